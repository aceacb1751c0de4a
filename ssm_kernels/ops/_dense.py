"""Calls of :func:`ssm_kernels.selective_scan` with a matrix A for each channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._discretizations import is_two_sample, with_alpha
from .._scan_state import ScanState
from ..choices import DiscretizationName, PreviousSample, TwoSampleDiscretizationName
from ._states_at import Positions, read_positions
from ._two_samples import read_previous, refuse_one_sample

__all__ = ["dense_scan"]


def dense_scan(
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
) -> Any:
    if alpha is not None or discretization in ("gbt", "gbt_two_sample"):
        discretization = with_alpha("selective_scan", discretization, alpha)
    reads_two = is_two_sample(discretization)
    if delta_A is not None:
        raise ValueError(
            "selective_scan: expected no delta_A with A of shape (dim, dstate, dstate): no rule of such A takes it"
        )
    if not reads_two:
        refuse_one_sample("selective_scan", discretization, lam, lam_sigmoid, previous)
    elif discretization != "exp_trapezoidal" and (lam is not None or lam_sigmoid):
        refuse_one_sample("selective_scan", discretization, lam, lam_sigmoid, "zero")
    previous_u, previous_B, repeats = read_previous("selective_scan", previous)
    tensors = (u, delta, A, B, C, D, z, delta_bias, initial_state, previous_u, previous_B, seq_idx, cu_seqlens)
    if states_at is None and not (return_last_state and reads_two):
        out, last_state = torch.ops.ssm_kernels.selective_scan_dense(
            *tensors,
            discretization=discretization,
            repeats_first=repeats,
            delta_softplus=delta_softplus,
            reverse=reverse,
        )
        return (out, last_state) if return_last_state else out
    positions = [] if states_at is None else read_positions("selective_scan", states_at)
    out, *found = torch.ops.ssm_kernels._selective_scan_dense_states_at(
        *tensors, discretization, repeats, delta_softplus, reverse, positions
    )
    last, at = found[0], found[3]
    if reads_two:
        last, at = (ScanState(state, u, matrix if B.dim() > 2 else None) for state, u, matrix in (found[:3], found[3:]))
    results = [out] + [last] * return_last_state + [at] * (states_at is not None)
    return tuple(results)
