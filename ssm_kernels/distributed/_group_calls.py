"""The calls of operators over the ranks of a group: their comparison, their packed sequences, and their exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._recurrences import recurrences
from ..choices import Exchange
from ..ops._arguments import did_you_mean
from ._agreement import Agreement, describe
from ._group import Group
from ._messages import Call
from ._packed_sequences import ForwardCount, Packing, PackingCache, SequenceSplit

__all__ = ["GroupCalls", "carry_mask_of", "choose_exchange"]

_Cached = TypeVar("_Cached", Packing, SequenceSplit)

# The most ranks of a chain: each rank more waits for one more scan.
_MOST_IN_CHAIN = 8


def choose_exchange(operator: str, exchange: Exchange | None, ranks: int) -> Exchange:
    """The exchange of calls that can run along a chain: by the number of ranks, unless the caller gives one."""
    if exchange not in (None, "chain", "summaries"):
        nearest = did_you_mean(exchange, ("chain", "summaries"))
        raise ValueError(f"{operator}: expected exchange to be 'chain', 'summaries' or None, got {exchange!r}{nearest}")
    return exchange or ("chain" if ranks <= _MOST_IN_CHAIN else "summaries")


def _on_meta(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as tensors without data, for the checks of the local operator."""
    return {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


class GroupCalls:
    """Base class of operators over a sequence whose spans are on the ranks of ``group``.

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


def carry_mask_of(packing: Packing | None, reverse: bool) -> Tensor | None:
    if packing is None:
        return None
    return packing.carry_mask_in_reverse() if reverse else packing.carry_mask


def _refuse_states(operator: str, tensors: Mapping[str, Tensor | None], options: Mapping[str, Any]) -> None:
    initial = [tensors.get(name) for name in ("initial_state", "initial_states", "previous_u", "previous_x", "initial_ssm")]
    needs_final = any(options.get(name) for name in ("return_last_state", "return_final_state", "return_final_states"))
    if needs_final or any(state is not None for state in initial):
        raise ValueError(
            f"{operator}: expected neither initial nor final states with cu_seqlens over several ranks: every sequence would "
            "have its own"
        )
