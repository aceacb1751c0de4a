"""The operators of a group of ranks that hold a sequence together. Layers call them in place of the local ones.

Each method checks that the ranks agree, converts packed sequences, casts under autocast, and calls the autograd node. A group
of one rank calls the local operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import ops
from .._recurrences import recurrences
from ..choices import CandidateActivation, ConvActivation, DiscretizationName, Exchange
from ..ops._arguments import did_you_mean, finite_dt_limit, three_tensors
from ..ops._masks import as_mask
from ._agreement import Agreement, describe
from ._autocast import Autocast
from ._convolution import CausalConv1d
from ._delta_rule import DeltaRuleScan
from ._group import Group
from ._messages import Call
from ._mlstm import MlstmScan
from ._over_ranks import given_arguments
from ._packed_sequences import ForwardCount, Packing, PackingCache, SequenceSplit
from ._scans import LinearRecurrence, SelectiveScan, SsdChunkScan

__all__ = ["GroupOperators"]

_Cached = TypeVar("_Cached", Packing, SequenceSplit)

# The most ranks of a chain: each rank more waits for one more scan.
_MOST_IN_CHAIN = 8


def choose_exchange(operator: str, exchange: Exchange | None, ranks: int) -> Exchange:
    """The exchange of calls that can run along a chain: by the number of ranks, unless the caller gives one."""
    if exchange not in (None, "chain", "summaries"):
        nearest = did_you_mean(exchange, ("chain", "summaries"))
        raise ValueError(f"{operator}: expected exchange to be 'chain', 'summaries' or None, got {exchange!r}{nearest}")
    return exchange or ("chain" if ranks <= _MOST_IN_CHAIN else "summaries")


def _expand(tensor: Tensor, like: Tensor) -> Tensor:
    """Expands an input as the local operator does: its gradient is summed over time first, and not in fp16 or bf16."""
    if tensor.shape == like.shape:
        return tensor
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    tensor = tensor.reshape(*(1,) * (like.dim() - tensor.dim()), *tensor.shape)
    sizes = [*tensor.shape]
    for axis in (0, 2, 1):
        if sizes[axis] != like.shape[axis]:
            sizes[axis] = like.shape[axis]
            tensor = tensor.expand(sizes)
    return tensor


def _on_meta(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as tensors without data, for the checks of the local operator."""
    return {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


class GroupOperators:
    """Operators over a sequence whose spans are on the ranks of ``group``. ``functions.py`` documents arguments and results.

    Args:
        group: the ranks.
        agreement: what the ranks have agreed on.
        exchange: "chain" or "summaries", or None to choose by the number of ranks.
        operator: for the message of an error.
        layer: the number of the layer among those of a model, from 1, or 0 for a function.
        forward_count: counts the forward passes of the model; None for a function.

    Raises:
        ValueError: ``exchange`` is something else.
    """

    def __init__(
        self,
        group: Group,
        agreement: Agreement,
        exchange: Exchange | None,
        operator: str,
        layer: int = 0,
        forward_count: ForwardCount | None = None,
    ) -> None:
        self.group, self._agreement, self._layer, self._forward_count = group, agreement, layer, forward_count
        self.exchange = choose_exchange(operator, exchange, group.size)
        self._description = 0  # a checksum, of the call on which the ranks have agreed last

    def selective_scan(
        self,
        u: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        *,
        discretization: DiscretizationName = "zoh",
        delta_softplus: bool = False,
        initial_state: Tensor | None = None,
        reverse: bool = False,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_last_state: bool = False,
        z_is_gate: bool = False,
    ) -> Any:
        # z_is_gate: z is that of a MambaConv, transposed.
        tensors: dict[str, Any] = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias}
        tensors |= {"initial_state": initial_state, "seq_idx": seq_idx}
        options: dict[str, Any] = {
            "discretization": discretization,
            "delta_softplus": delta_softplus,
            "reverse": reverse,
            "return_last_state": return_last_state,
        }
        if self.group.size == 1:
            return ops.selective_scan(**tensors, cu_seqlens=cu_seqlens, **options)
        matrices = {name: value.dim() - 1 for name, value in (("B", B), ("C", C)) if value.dim() > 2}
        time_axes = {"u": 2, "delta": 2, "z": 2, "seq_idx": 1} | matrices
        tensors = Autocast(u).cast(tensors, lower=("u", "delta", "z", *matrices))
        self._agree("selective_scan", ops.selective_scan, tensors, options, time_axes, cu_seqlens)
        numbers, packing = self._packing("selective_scan", u.shape[2], seq_idx, cu_seqlens)
        names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")
        return SelectiveScan.apply(
            *(tensors[name] for name in names),
            numbers,
            _carry_mask(packing, reverse),
            discretization,
            delta_softplus,
            reverse,
            return_last_state,
            torch.is_grad_enabled(),
            z_is_gate,
            self._chain(return_last_state),
            self.group,
        )

    def ssd_chunk_scan(
        self,
        x: Tensor,
        dt: Tensor | None,
        A: Tensor | None,
        B: Tensor,
        C: Tensor,
        *,
        chunk_size: int | None = None,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: Sequence[float] | None = (0.0, math.inf),
        initial_states: Tensor | None = None,
        reverse: bool = False,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_final_states: bool = False,
        discretization: DiscretizationName = "zoh",
        log_decay: Tensor | None = None,
        gain: Tensor | None = None,
    ) -> Any:
        tensors: dict[str, Any] = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
        tensors |= {"initial_states": initial_states, "seq_idx": seq_idx, "log_decay": log_decay, "gain": gain}
        options: dict[str, Any] = {
            "chunk_size": chunk_size,
            "dt_softplus": dt_softplus,
            "dt_limit": dt_limit,
            "discretization": discretization,
            "reverse": reverse,
            "return_final_states": return_final_states,
        }
        if self.group.size == 1:
            return ops.ssd_chunk_scan(**tensors, cu_seqlens=cu_seqlens, **options)
        time_axes = dict.fromkeys(("x", "dt", "B", "C", "z", "seq_idx", "log_decay", "gain"), 1)
        tensors = Autocast(x).cast(tensors, lower=("x", "dt", "B", "C", "z"))
        self._agree("ssd_chunk_scan", ops.ssd_chunk_scan, tensors, options, time_axes, cu_seqlens)
        numbers, packing = self._packing("ssd_chunk_scan", x.shape[1], seq_idx, cu_seqlens)
        names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states", "log_decay", "gain")
        return SsdChunkScan.apply(
            *(tensors[name] for name in names),
            numbers,
            _carry_mask(packing, reverse),
            chunk_size,
            dt_softplus,
            *finite_dt_limit(dt_limit),
            discretization,
            reverse,
            return_final_states,
            self._chain(return_final_states),
            self.group,
        )

    def delta_rule_scan(self, *inputs: Tensor, **given: Any) -> Any:
        """Arguments and results as :func:`ssm_kernels.delta_rule_scan`, without ``states_at``."""
        options = given_arguments("delta_rule_scan", inputs, given)
        if self.group.size == 1:
            return ops.delta_rule_scan(**options)
        cu_seqlens, return_final_states = options.pop("cu_seqlens"), options.pop("return_final_states")
        names = ("q", "k", "v", "beta", "g", "initial_states", "A_log", "dt_bias")
        tensors = {name: options.pop(name) for name in (*names, "seq_idx")}
        q, seq_idx, num_householder, reverse = tensors["q"], tensors["seq_idx"], options["num_householder"], options["reverse"]
        to = Autocast(q)
        tensors |= {name: to.to_lower(tensors[name]) for name in ("q", "k", "v")}
        tensors |= {name: to.to_float_unless_lower(tensors[name]) for name in ("beta", "g")}
        tensors |= {name: to.to_float(tensors[name]) for name in ("initial_states", "A_log", "dt_bias")}
        time_axes = dict.fromkeys(("q", "k", "v", "beta", "g", "seq_idx"), 1)
        updates = dict.fromkeys(("k", "v", "beta"), num_householder)
        all_options = options | {"return_final_states": return_final_states}
        self._agree("delta_rule_scan", ops.delta_rule_scan, tensors, all_options, time_axes, cu_seqlens, entries=updates)
        numbers, packing = self._packing("delta_rule_scan", q.shape[1], seq_idx, cu_seqlens)
        return DeltaRuleScan.apply(
            *(tensors[name] for name in names),
            numbers,
            _carry_mask(packing, reverse),
            *options.values(),
            return_final_states,
            self._chain(return_final_states),
            self.group,
        )

    def mlstm_scan(self, *inputs: Tensor, **given: Any) -> Any:
        """Arguments and results as :func:`ssm_kernels.mlstm_scan`, without ``states_at`` and ``seq_idx``."""
        options = given_arguments("mlstm_scan", inputs, given)
        if self.group.size == 1:
            return ops.mlstm_scan(**options)
        initial_states = options.pop("initial_states")
        cu_seqlens, return_final_states = options.pop("cu_seqlens"), options.pop("return_final_states")
        C, n, m = (None, None, None) if initial_states is None else three_tensors(initial_states)
        tensors: dict[str, Any] = {name: options.pop(name) for name in "qkvif"}
        tensors |= {"initial_C": C, "initial_n": n, "initial_m": m}
        q, v, normalize = tensors["q"], tensors["v"], options["normalize"]

        def local(initial_C: Tensor | None, initial_n: Tensor | None, initial_m: Tensor | None, **arguments: Any) -> Any:
            states: Any = (initial_C, initial_n, initial_m)
            return ops.mlstm_scan(**arguments, initial_states=None if initial_states is None else states)

        to = Autocast(q)
        tensors |= {name: to.to_lower(tensors[name]) for name in "qkv"}
        tensors |= {name: to.to_float_unless_lower(tensors[name]) for name in "if"}
        tensors |= {name: to.to_float(tensors[name]) for name in ("initial_C", "initial_n", "initial_m")}
        all_options = options | {"return_final_states": return_final_states}
        self._agree("mlstm_scan", local, tensors, all_options, dict.fromkeys("qkvif", 1), cu_seqlens)
        of_span = None
        if cu_seqlens is not None:
            of_span = self._split("mlstm_scan", cu_seqlens, q.shape[1]).cu_seqlens(cu_seqlens)
        chain = self._chain(return_final_states)
        results = MlstmScan.apply(*tensors.values(), of_span, *options.values(), return_final_states, chain, self.group)
        if not return_final_states:
            return results
        out, memory = results
        final_C, final_n, final_m = memory.split([v.shape[3], 1, 1], dim=2)
        final_n = final_n.squeeze(2)
        if not normalize:  # the call reads no n and leaves it as it is
            final_n = torch.zeros_like(final_n) if n is None else n.clone()
        return out, (final_C, final_n, final_m[:, :, 0, 0])

    def causal_conv1d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        activation: ConvActivation | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        initial_state: Tensor | None = None,
        return_final_state: bool = False,
    ) -> Any:
        options: dict[str, Any] = {"activation": activation, "return_final_state": return_final_state}
        local = ops.causal_conv1d
        if self.group.size == 1:
            return local(x, weight, bias, initial_state=initial_state, seq_idx=seq_idx, cu_seqlens=cu_seqlens, **options)
        x, weight, bias, initial_state = self._cast_convolution(x, weight, bias, initial_state)
        self._agree_on_convolution(x, weight, bias, initial_state, options, seq_idx, cu_seqlens)
        numbers, packing = self._packing("causal_conv1d", x.shape[1], seq_idx, cu_seqlens)
        if weight.shape[1] == 1:  # a step reads no other
            results = local(
                x, weight, bias, seq_idx=seq_idx, initial_state=initial_state, activation=activation, return_final_state=True
            )
            return results if return_final_state else results[0]
        return CausalConv1d.apply(
            x,
            weight,
            bias,
            initial_state,
            numbers,
            None if packing is None else packing.steps_before,
            activation,
            return_final_state,
            self._chain(return_final_state),
            self.group,
        )

    def recurrence(
        self,
        name: str,
        inputs: Sequence[Tensor],
        h0: Tensor | None,
        *,
        reverse: bool = False,
        cu_seqlens: Tensor | None = None,
        reset: Tensor | None = None,
        return_last_state: bool = False,
        candidate_activation: CandidateActivation | None = None,
        gate_is_logit: bool = True,
    ) -> Any:
        """A scan of ``linear_scan``'s family.

        Args:
            inputs: in the order of the local function's arguments.
        """
        row = recurrences[name]
        reset = as_mask(name, reset, 2)
        named = dict(zip(row.inputs, inputs, strict=True))
        own_options: dict[str, Any] = {"candidate_activation": candidate_activation, "gate_is_logit": gate_is_logit}
        options = {"reverse": reverse, "return_last_state": return_last_state} | {key: own_options[key] for key in row.options}
        local = getattr(ops, name)
        if self.group.size == 1:
            return local(**named, h0=h0, cu_seqlens=cu_seqlens, reset=reset, **options)
        to = Autocast(inputs[0])
        named = {key: to.to_float(value) if key in row.broadcast else to.to_lower(value) for key, value in named.items()}
        tensors = named | {"h0": to.to_float(h0), "reset": reset}
        time_axes = {key: value.dim() - 2 for key, value in named.items() if value.dim() >= 2} | {"reset": 1}
        self._agree(name, local, tensors, options, time_axes, cu_seqlens, row.broadcast)
        if cu_seqlens is not None:
            cu_seqlens = self._split(name, cu_seqlens, inputs[0].shape[1]).cu_seqlens(cu_seqlens)
        first = named[row.inputs[0]]
        return LinearRecurrence.apply(
            name,
            "none" if candidate_activation is None else candidate_activation,
            gate_is_logit,
            reverse,
            return_last_state,
            # With reset the state before the sequence also counts on other ranks.
            self._chain(return_last_state or reset is not None),
            self.group,
            cu_seqlens,
            reset,
            tensors["h0"],
            *(_expand(value, first) if key in row.broadcast else value for key, value in named.items()),
        )

    def _chain(self, needs_others: bool = False) -> Call | None:
        """The call on which the ranks have just agreed, if states pass along a chain, and None if ranks gather summaries.

        A chain cannot run where ranks need something of later ranks, in compiled code and in a CUDA graph.
        """
        if self.exchange != "chain" or needs_others or torch.compiler.is_compiling():
            return None
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        return None if is_captured else Call(self._layer, self._description)

    def _packing(
        self, operator: str, seqlen: int, seq_idx: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor | None, Packing | None]:
        """The numbers of this rank's steps and the packed sequences of a call; new ones begin where either argument says so."""
        given = [tensor for tensor in (cu_seqlens, seq_idx) if tensor is not None]
        if not given:
            return None, None

        def make() -> Packing:
            of_split = None if cu_seqlens is None else self._split(operator, cu_seqlens, seqlen).seq_idx(cu_seqlens)
            return Packing(seq_idx, of_split, self.group)

        packing = self._cached(Packing, operator, given, seqlen, make)
        return (seq_idx if packing.numbers is None else packing.numbers), packing

    def _split(self, operator: str, cu_seqlens: Tensor, seqlen: int) -> SequenceSplit:
        def make() -> SequenceSplit:
            return SequenceSplit(operator, cu_seqlens, seqlen, self.group)

        return self._cached(SequenceSplit, operator, [cu_seqlens], seqlen, make)

    def _cached(
        self, kind: type[_Cached], operator: str, tensors: Sequence[Tensor], seqlen: int, make: Callable[[], _Cached]
    ) -> _Cached:
        """Makes a ``Packing`` or ``SequenceSplit``, which gathers, or returns that of an earlier call of the same forward pass.

        The layers of a module compare whether the tensors are those of an earlier call, because a rank that gathered alone
        would wait for the others. Functions gather in every call: they compare a call only once, and the answer changes.
        Compiled code and CUDA graphs, which run again with other values, gather as well.
        """
        is_captured = tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if self._forward_count is None or torch.compiler.is_compiling() or is_captured:
            return make()
        is_recomputed = torch._C._current_graph_task_id() != -1
        cache = PackingCache(kind, tensors, seqlen, self.group, self._forward_count, is_recomputed)
        # Ranks may differ in what they recompute in backward: what forward has kept needs no other rank.
        if cache.found is None or not is_recomputed:
            description = {"tensor": "a new one" if cache.found is None else "that of an earlier call", "layer": self._layer}
            what = "seq_idx or cu_seqlens" if kind is Packing else "cu_seqlens"
            self._agreement.check(f"{operator}, {what}", lambda: description, lambda: None)
        if cache.found is not None:
            assert isinstance(cache.found, kind)
            return cache.found
        made = make()
        cache.store(made)
        return made

    @staticmethod
    def _cast_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None) -> tuple[Any, ...]:
        to = Autocast(x)
        return to.to_lower(x), to.to_float_unless_lower(weight), to.to_float_unless_lower(bias), to.to_lower(initial_state)

    def _agree_on_convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        initial_state: Tensor | None,
        options: Mapping[str, Any],
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> None:
        tensors = {"x": x, "weight": weight, "bias": bias, "initial_state": initial_state, "seq_idx": seq_idx}
        time_axes = {"x": 1, "seq_idx": 1}
        self._agree("causal_conv1d", ops.causal_conv1d, tensors, options, time_axes, cu_seqlens)

    def _agree(
        self,
        operator: str,
        local: Callable[..., Any],
        tensors: Mapping[str, Tensor | None],
        options: Mapping[str, Any],
        time_axes: Mapping[str, int],
        cu_seqlens: Tensor | None = None,
        broadcast: Sequence[str] = (),
        entries: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Compares a call with those of the other ranks, unless it is being compiled.

        Args:
            operator: for messages.
            local: the operator for one rank, which checks the arguments, ``cu_seqlens`` included.
            tensors: arguments by name.
            options: the others.
            time_axes: the axis of time of the tensors that have one.
            cu_seqlens: of the whole sequence.
            broadcast: tensors whose axis of time may have the size 1.
            entries: how many entries of the axis of time a step has, for tensors with several.
        """
        refuses_states = cu_seqlens is not None and operator not in (*recurrences, "mlstm_scan")
        if torch.compiler.is_compiling():
            if refuses_states:
                _refuse_states(operator, tensors, options)
            return

        def description() -> dict[str, Any]:
            described: dict[str, Any] = {name: describe(value, time_axes.get(name)) for name, value in tensors.items()}
            # The number of packed sequences changes from call to call: SequenceSplit compares it.
            ends = 0 if cu_seqlens is None or cu_seqlens.dim() == 0 else cu_seqlens.shape[0]
            described |= {"cu_seqlens": describe(cu_seqlens, 0 if ends > 0 else None, "sequences + 1")}
            h0 = tensors.get("h0")
            if ends > 0 and h0 is not None and h0.dim() > 0 and h0.shape[0] == ends - 1:
                described["h0"] = describe(h0, 0, "sequences")
            described |= {name: str(value) for name, value in options.items()}
            described |= {"exchange": self.exchange, "layer": self._layer or None}
            sized = [(tensors[name], axis, entries.get(name, 1)) for name, axis in time_axes.items() if name not in broadcast]
            lengths = {_steps(tensor, axis, each) for tensor, axis, each in sized if tensor is not None and tensor.dim() > axis}
            described["steps of the tensors"] = "equal" if len(lengths) <= 1 else " and ".join(sorted(lengths))
            return described

        def check() -> None:
            given = {name: value for name, value in (*tensors.items(), ("cu_seqlens", cu_seqlens)) if value is not None}
            like, *others = given
            for name in others:
                if given[name].device != given[like].device:
                    raise RuntimeError(
                        f"{operator}: expected {name} on {given[like].device} (the device of {like}), got {given[name].device}"
                    )
            if refuses_states:
                _refuse_states(operator, tensors, options)
            local(**_on_meta({**tensors, **given}), **options)

        kinds = [
            None if tensor is None else (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
            for tensor in (*tensors.values(), cu_seqlens)
        ]
        arguments = (*kinds, *options.values())
        self._description = self._agreement.check(operator, description, check, arguments, bool(options.get("reverse")))


def _steps(tensor: Tensor, axis: int, entries: int) -> str:
    """The number of steps of a tensor, for the message of an error."""
    size = tensor.shape[axis]
    return str(size) if entries == 1 else f"{size} / {entries}" if entries < 1 or size % entries else str(size // entries)


def _carry_mask(packing: Packing | None, reverse: bool) -> Tensor | None:
    if packing is None:
        return None
    return packing.carry_mask_in_reverse() if reverse else packing.carry_mask


def _refuse_states(operator: str, tensors: Mapping[str, Tensor | None], options: Mapping[str, Any]) -> None:
    initial = [tensors.get(name) for name in ("initial_state", "initial_states")]
    needs_final = any(options.get(name) for name in ("return_last_state", "return_final_state", "return_final_states"))
    if needs_final or any(state is not None for state in initial):
        raise ValueError(
            f"{operator}: expected neither initial nor final states with cu_seqlens over several ranks: every sequence would "
            "have its own"
        )
