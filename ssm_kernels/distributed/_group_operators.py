"""The operators of a group of ranks that hold a sequence together. Layers call them in place of the local ones.

Each method checks that the ranks agree, converts packed sequences, casts under autocast, and calls the autograd node. A group
of one rank calls the local operator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .. import ops
from .._discretizations import is_two_sample
from .._mamba3_state import Mamba3State
from .._recurrences import recurrences
from .._scan_state import ScanState
from ..choices import (
    CandidateActivation,
    ConvActivation,
    DiscretizationName,
    ExponentialDiscretizationName,
    ExponentialTwoSampleDiscretizationName,
    PreviousSample,
    TwoSampleDiscretizationName,
)
from ..ops._arguments import finite_dt_limit, four_tensors, three_tensors
from ..ops._complex import complex_scan, is_complex
from ..ops._masks import as_mask
from ..ops._two_samples import broadcast_steps, read_previous, two_sample_scan
from ._autocast import Autocast
from ._convolution import CausalConv1d
from ._delta_rule import DeltaRuleScan
from ._group_calls import GroupCalls, carry_mask_of
from ._mamba3 import mamba3_over_ranks
from ._mlstm import MlstmScan
from ._over_ranks import given_arguments
from ._scans import LinearRecurrence, SelectiveScan, SsdChunkScan
from ._two_samples import TwoSampleChunkScan, TwoSampleScan

__all__ = ["GroupOperators"]

_MAMBA3_STATES = ("initial_angle", "initial_ssm", "initial_k", "initial_x")


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


class GroupOperators(GroupCalls):
    """Operators over a sequence whose spans are on the ranks of a group. ``functions.py`` documents arguments and results."""

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
        discretization: DiscretizationName | TwoSampleDiscretizationName = "zoh",
        delta_softplus: bool = False,
        initial_state: Tensor | None = None,
        reverse: bool = False,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_last_state: bool = False,
        z_is_gate: bool = False,
        **of_samples: Any,
    ) -> Any:
        # z_is_gate: z is that of a MambaConv, transposed. of_samples: lam, lam_sigmoid, previous, delta_A and conjugate_pairs.
        if is_complex(A):
            return complex_scan(
                *(u, delta, A, B, C, D, z, delta_bias),
                scan=self._two_sample_scan,
                discretization=discretization,
                delta_softplus=delta_softplus,
                initial_state=initial_state,
                reverse=reverse,
                seq_idx=seq_idx,
                cu_seqlens=cu_seqlens,
                return_last_state=return_last_state,
                **of_samples,
            )
        if is_two_sample(discretization) or of_samples.get("delta_A") is not None:
            return self._two_sample_scan(
                *(u, delta, A, B, C, D, z, delta_bias),
                discretization=discretization,
                delta_softplus=delta_softplus,
                initial_state=initial_state,
                reverse=reverse,
                seq_idx=seq_idx,
                cu_seqlens=cu_seqlens,
                return_last_state=return_last_state,
                **of_samples,
            )
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
            carry_mask_of(packing, reverse),
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
        discretization: ExponentialDiscretizationName | ExponentialTwoSampleDiscretizationName = "zoh",
        log_decay: Tensor | None = None,
        gain: Tensor | None = None,
        **of_samples: Any,
    ) -> Any:
        # of_samples: lam, lam_sigmoid and previous.
        if is_two_sample(discretization) and log_decay is None:
            if dt is None or A is None or gain is not None:
                raise ValueError(
                    "ssd_chunk_scan: expected dt and A, without gain, with a discretization that reads two samples"
                )
            return self._two_sample_chunk_scan(
                *(x, dt, A, B, C),
                chunk_size=chunk_size,
                D=D,
                z=z,
                dt_bias=dt_bias,
                dt_softplus=dt_softplus,
                dt_limit=dt_limit,
                initial_states=initial_states,
                reverse=reverse,
                seq_idx=seq_idx,
                cu_seqlens=cu_seqlens,
                return_final_states=return_final_states,
                discretization=cast(ExponentialTwoSampleDiscretizationName, discretization),
                **of_samples,
            )
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
            carry_mask_of(packing, reverse),
            chunk_size,
            dt_softplus,
            *finite_dt_limit(dt_limit),
            discretization,
            reverse,
            return_final_states,
            self._chain(return_final_states),
            self.group,
        )

    def _two_sample_scan(
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
        discretization: DiscretizationName | TwoSampleDiscretizationName,
        lam: Tensor | None = None,
        lam_sigmoid: bool = False,
        previous: PreviousSample | tuple[Tensor, Tensor | None] = "zero",
        delta_A: Tensor | None = None,
        delta_softplus: bool = False,
        initial_state: Tensor | None = None,
        reverse: bool = False,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_last_state: bool = False,
        is_complex: bool = False,
        conjugate_pairs: bool = True,
    ) -> Any:
        """:func:`ssm_kernels.selective_scan` of rules that read two input samples a step, with ``delta_A`` or of pairs of real
        numbers, the complex states."""
        name = "selective_scan"
        previous_u, previous_B, repeats = read_previous(name, previous)
        axes = "(batch, dim, seqlen)"
        lam, delta_A = (broadcast_steps(name, key, value, u, axes) for key, value in (("lam", lam), ("delta_A", delta_A)))
        tensors: dict[str, Any] = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias}
        tensors |= {"initial_state": initial_state, "lam": lam, "previous_u": previous_u, "previous_B": previous_B}
        tensors |= {"delta_A": delta_A, "seq_idx": seq_idx}
        options: dict[str, Any] = {
            "discretization": discretization,
            "lam_sigmoid": lam_sigmoid,
            "repeats": repeats,
            "delta_softplus": delta_softplus,
            "reverse": reverse,
            "is_complex": is_complex,
            "conjugate_pairs": conjugate_pairs,
            "return_last_state": return_last_state,
        }

        def local(previous_u: Tensor | None, previous_B: Tensor | None, repeats: bool, **arguments: Any) -> Any:
            given: Any = "repeat" if repeats else "zero" if previous_u is None else (previous_u, previous_B)
            arguments = {"cu_seqlens": None, "alpha": None, "states_at": None} | arguments
            return two_sample_scan(**arguments, previous=given)

        if self.group.size == 1:
            return local(**tensors, cu_seqlens=cu_seqlens, **options)
        matrices = {key: value.dim() - 1 for key, value in (("B", B), ("C", C)) if value.dim() > 2}
        time_axes = dict.fromkeys(("u", "delta", "z", "lam", "delta_A"), 2) | {"seq_idx": 1} | matrices
        of_matrices = () if is_complex else ("previous_B", *matrices)
        tensors = Autocast(u).cast(tensors, lower=("u", "delta", "z", "lam", "delta_A", "previous_u", *of_matrices))
        self._agree(name, local, tensors, options, time_axes, cu_seqlens)
        seq_idx, packing = self._packing(name, u.shape[2], seq_idx, cu_seqlens)
        results = TwoSampleScan.apply(
            *(value for key, value in tensors.items() if key != "seq_idx"),
            seq_idx,
            carry_mask_of(packing, reverse),
            *options.values(),
            torch.is_grad_enabled(),
            self._chain(return_last_state),
            self.group,
        )
        if not return_last_state:
            return results
        out, last_state, *samples = results
        return out, ScanState(last_state, *[*samples, None][:2]) if is_two_sample(discretization) else last_state

    def _two_sample_chunk_scan(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
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
        discretization: ExponentialTwoSampleDiscretizationName,
        lam: Tensor | None = None,
        lam_sigmoid: bool = False,
        previous: PreviousSample | tuple[Tensor, Tensor] = "zero",
    ) -> Any:
        """:func:`ssm_kernels.ssd_chunk_scan` of rules that read two input samples a step."""
        name = "ssd_chunk_scan"
        previous_x, previous_B, repeats = read_previous(name, previous, "x", may_lack_B=False)
        lam = broadcast_steps(name, "lam", lam, dt, "(batch, seqlen, heads)")
        tensors: dict[str, Any] = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
        tensors |= {"initial_states": initial_states, "lam": lam, "previous_x": previous_x, "previous_B": previous_B}
        tensors |= {"seq_idx": seq_idx}
        options: dict[str, Any] = {
            "discretization": discretization,
            "lam_sigmoid": lam_sigmoid,
            "repeats": repeats,
            "chunk_size": chunk_size,
            "dt_softplus": dt_softplus,
            "dt_limit": dt_limit,
            "reverse": reverse,
            "return_final_states": return_final_states,
        }

        def local(previous_x: Any, previous_B: Any, repeats: bool, **arguments: Any) -> Any:
            given: Any = "repeat" if repeats else "zero" if previous_x is None else (previous_x, previous_B)
            return ops.ssd_chunk_scan(**arguments, previous=given)

        if self.group.size == 1:
            return local(**tensors, cu_seqlens=cu_seqlens, **options)
        steps = ("x", "dt", "B", "C", "z", "lam")
        tensors = Autocast(x).cast(tensors, lower=(*steps, "previous_x", "previous_B"))
        self._agree(name, local, tensors, options, dict.fromkeys((*steps, "seq_idx"), 1), cu_seqlens)
        seq_idx, packing = self._packing(name, x.shape[1], seq_idx, cu_seqlens)
        results = TwoSampleChunkScan.apply(
            *(value for key, value in tensors.items() if key != "seq_idx"),
            seq_idx,
            carry_mask_of(packing, reverse),
            discretization,
            lam_sigmoid,
            repeats,
            chunk_size,
            dt_softplus,
            *finite_dt_limit(dt_limit),
            reverse,
            return_final_states,
            self._chain(return_final_states),
            self.group,
        )
        return (results[0], ScanState(*results[1:])) if return_final_states else results

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
            carry_mask_of(packing, reverse),
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

    def mamba3_chunk_scan(self, *inputs: Tensor, **given: Any) -> Any:
        """Arguments and results as :func:`ssm_kernels.mamba3_chunk_scan`, without ``reverse``."""
        name = "mamba3_chunk_scan"
        options = given_arguments(name, inputs, given)
        if self.group.size == 1:
            return ops.mamba3_chunk_scan(**options)
        states = dict(zip(_MAMBA3_STATES, four_tensors(options.pop("initial_states")), strict=True))
        cu_seqlens, needs_final = options.pop("cu_seqlens"), options.pop("return_final_states")
        steps = ("x", "dt", "A", "B", "C", "trap", "angles")
        of_all = ("B_bias", "C_bias", "D", "z", "mimo_x", "mimo_z", "mimo_out", "norm_weight")
        tensors = {key: options.pop(key) for key in (*steps, *of_all)} | states | {"seq_idx": options.pop("seq_idx")}
        all_options = options | {"return_final_states": needs_final}

        def local(**arguments: Any) -> Any:
            given = Mamba3State(*(arguments.pop(key, None) for key in _MAMBA3_STATES))
            return ops.mamba3_chunk_scan(**arguments, initial_states=given)

        x: Tensor = tensors["x"]
        tensors = Autocast(x).cast(tensors, lower=("x", "B", "C", "z", "initial_x"))
        self._agree(name, local, tensors, all_options, dict.fromkeys((*steps, "z", "seq_idx"), 1), cu_seqlens)
        seq_idx, packing = self._packing(name, x.shape[1], tensors.pop("seq_idx"), cu_seqlens)
        carry_mask, chain = carry_mask_of(packing, False), self._chain(needs_final)
        out, final = mamba3_over_ranks(tensors, seq_idx, carry_mask, needs_final, chain, self.group, **options)
        return (out, final) if needs_final else out

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
