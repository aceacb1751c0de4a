"""Calls of :func:`ssm_kernels.selective_scan` and :func:`ssm_kernels.ssd_chunk_scan` with a discretization that reads two input
samples a step, and of the former with a step of its own for A or with complex states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._discretizations import is_two_sample, with_alpha
from .._scan_state import ScanState
from ..choices import (
    DiscretizationName,
    ExponentialTwoSampleDiscretizationName,
    PreviousSample,
    TwoSampleDiscretizationName,
)
from ._states_at import Positions, read_positions

__all__ = ["refuse_one_sample", "two_sample_chunk_scan", "two_sample_scan"]


def refuse_one_sample(operator: str, discretization: str, lam: Any, lam_sigmoid: bool, previous: Any) -> None:
    """Raises for arguments that rules with one input sample do not have."""
    if lam is not None or lam_sigmoid:
        given = "lam" if lam is not None else "lam_sigmoid"
        raise ValueError(f"{operator}: expected {given} with discretization 'exp_trapezoidal' only, got {discretization!r}")
    if not (isinstance(previous, str) and previous == "zero"):
        raise ValueError(
            f"{operator}: expected previous with a discretization that reads two input samples, such as 'foh_ramp', "
            f"got {discretization!r}"
        )


def read_previous(
    operator: str, previous: Any, input: str = "u", *, may_lack_B: bool = True
) -> tuple[Tensor | None, Tensor | None, bool]:
    """``previous`` as operators take it: the samples of the input and B, and whether the first sample repeats."""
    if isinstance(previous, str):
        if previous not in ("zero", "repeat"):
            raise ValueError(f"{operator}: unknown previous {previous!r}, expected 'zero', 'repeat' or a pair ({input}, B)")
        return None, None, previous == "repeat"
    if not isinstance(previous, (tuple, list)) or len(previous) != 2:
        got = f"{len(previous)} values" if isinstance(previous, (tuple, list)) else type(previous).__name__
        raise TypeError(f"{operator}: expected previous to be 'zero', 'repeat' or a pair ({input}, B), got {got}")
    for name, value in zip((input, "B"), previous, strict=True):
        is_tensor = torch.overrides.is_tensor_like(value) and not isinstance(value, type)
        may_be_none = may_lack_B and name == "B"
        if not is_tensor and not (may_be_none and value is None):
            raise TypeError(
                f"{operator}: expected the {name} of previous to be a tensor{' or None' if may_be_none else ''}, "
                f"got {type(value).__name__}"
            )
    return previous[0], previous[1], False


def broadcast_steps(operator: str, name: str, value: Tensor | None, like: Tensor, axes: str) -> Tensor | None:
    """The argument ``name``, such as ``lam``, in the shape of ``like``, by strides of zero."""
    # Nested tensors have no shape; the operator refuses them by name.
    if value is None or value.is_nested or like.is_nested or value.shape == like.shape:
        return value
    try:
        return value.broadcast_to(like.shape)
    except RuntimeError:
        raise ValueError(
            f"{operator}: expected {name} of shape {axes} = {[*like.shape]}, or one that broadcasts to it, got {[*value.shape]}"
        ) from None


def two_sample_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    *,
    discretization: DiscretizationName | TwoSampleDiscretizationName,
    alpha: float | None,
    lam: Tensor | None,
    lam_sigmoid: bool,
    previous: PreviousSample | tuple[Tensor, Tensor | None],
    delta_A: Tensor | None,
    delta_softplus: bool,
    initial_state: Tensor | None,
    reverse: bool,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    return_last_state: bool,
    states_at: Positions | None,
    is_complex: bool = False,
    conjugate_pairs: bool = True,
) -> Any:
    if alpha is not None or discretization in ("gbt", "gbt_two_sample"):
        discretization = with_alpha("selective_scan", discretization, alpha)
    reads_two = is_two_sample(discretization)
    if not reads_two:
        refuse_one_sample("selective_scan", discretization, lam, lam_sigmoid, previous)
    previous_u, previous_B, repeats = read_previous("selective_scan", previous)
    lam = broadcast_steps("selective_scan", "lam", lam, u, "(batch, dim, seqlen)")
    delta_A = broadcast_steps("selective_scan", "delta_A", delta_A, u, "(batch, dim, seqlen)")
    tensors = (u, delta, A, B, C, D, z, delta_bias, initial_state, lam, previous_u, previous_B, delta_A, seq_idx, cu_seqlens)
    if not return_last_state and states_at is None:
        out, _ = torch.ops.ssm_kernels.selective_scan_two_sample(
            *tensors,
            discretization=discretization,
            lam_sigmoid=lam_sigmoid,
            repeats_first=repeats,
            delta_softplus=delta_softplus,
            reverse=reverse,
            is_complex=is_complex,
            conjugate_pairs=conjugate_pairs,
        )
        return out
    positions = [] if states_at is None else read_positions("selective_scan", states_at)
    options = (discretization, lam_sigmoid, repeats, delta_softplus, reverse, is_complex, conjugate_pairs)
    out, *found = torch.ops.ssm_kernels._selective_scan_two_sample_states_at(*tensors, *options, positions)
    last, at = found[0], found[3]
    if reads_two:
        last, at = (ScanState(state, u, matrix if B.dim() > 2 else None) for state, u, matrix in (found[:3], found[3:]))
    results = [out] + [last] * return_last_state + [at] * (states_at is not None)
    return tuple(results)


def two_sample_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: Sequence[float] | None,
    initial_states: Tensor | None,
    reverse: bool,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    return_final_states: bool,
    discretization: ExponentialTwoSampleDiscretizationName,
    lam: Tensor | None,
    lam_sigmoid: bool,
    previous: PreviousSample | tuple[Tensor, Tensor],
    states_at: Positions | None,
) -> Any:
    previous_x, previous_B, repeats = read_previous("ssd_chunk_scan", previous, "x", may_lack_B=False)
    lam = broadcast_steps("ssd_chunk_scan", "lam", lam, dt, "(batch, seqlen, heads)")
    if not return_final_states and states_at is None:
        out, _ = torch.ops.ssm_kernels.ssd_chunk_scan_two_sample(
            *(x, dt, A, B, C),
            D=D,
            z=z,
            dt_bias=dt_bias,
            initial_states=initial_states,
            lam=lam,
            previous_x=previous_x,
            previous_B=previous_B,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            discretization=discretization,
            lam_sigmoid=lam_sigmoid,
            repeats_first=repeats,
            chunk_size=chunk_size,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            reverse=reverse,
        )
        return out
    tensors = (D, z, dt_bias, initial_states, lam, previous_x, previous_B, seq_idx, cu_seqlens)
    options = (discretization, lam_sigmoid, repeats, chunk_size, dt_softplus, dt_limit, reverse)
    positions = [] if states_at is None else read_positions("ssd_chunk_scan", states_at)
    out, *found = torch.ops.ssm_kernels._ssd_chunk_scan_two_sample_states_at(x, dt, A, B, C, *tensors, *options, positions)
    last, at = ScanState(*found[:3]), ScanState(*found[3:])
    return (out, *[last] * return_final_states, *[at] * (states_at is not None))
