"""Reference of complex states: the scan and its step with a complex A."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor

from .._discretizations import is_two_sample
from .._scan_state import ScanState
from ..choices import DiscretizationName, TwoSampleDiscretizationName
from ..ops._states_at import Positions
from .two_samples import two_sample_scan

__all__ = ["complex_scan", "complex_state_update"]


def complex_scan(
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
    lam: Tensor | None = None,
    lam_sigmoid: bool = False,
    conjugate_pairs: bool = True,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    previous: Literal["zero", "repeat"] | tuple[Tensor, Tensor | None] = "zero",
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool = False,
    states_at: Positions | None = None,
) -> Any:
    r"""The selective scan with complex states, as a loop over time.

    .. math::
        h_t &= \bar A(\Delta_t A)\, h_{t-1} + \Delta_t\, k(\Delta_t A)\, B_t u_t \\
        y_t &= 2\, \mathrm{Re} \langle C_t, h_t \rangle

    Without a conjugate on ``C``: :math:`\langle C, h \rangle = \sum_n C_n h_n`. Arguments and results as
    :func:`ssm_kernels.selective_scan` with a complex ``A``; ``states_at`` returns a list. Computed in the promoted dtype of all
    arguments, complex128 with float64; the gradients of complex tensors follow PyTorch's convention.

    Examples:
        >>> import torch
        >>> from ssm_kernels.reference import complex_scan
        >>> impulse = torch.tensor([[[1.0, 0.0, 0.0]]], dtype=torch.float64)
        >>> A, one = torch.tensor([[-0.1 + 1j]]).to(torch.complex128), torch.ones(1, 1, dtype=torch.complex128)
        >>> complex_scan(impulse, torch.ones_like(impulse), A, one, one)  # 2 exp(-0.1 t) cos(t)
        tensor([[[ 2.0000,  0.9778, -0.6814]]], dtype=torch.float64)
    """
    results = two_sample_scan(
        *(u, delta, A, B, C, D, z, delta_bias),
        discretization=cast(TwoSampleDiscretizationName, discretization),
        lam=lam,
        lam_sigmoid=lam_sigmoid,
        conjugate_pairs=conjugate_pairs,
        delta_softplus=delta_softplus,
        initial_state=initial_state,
        previous=previous,
        reverse=reverse,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        return_last_state=return_last_state,
        states_at=states_at,
    )
    if is_two_sample(discretization) or isinstance(results, Tensor):
        return results
    return tuple(
        value.state if isinstance(value, ScanState) else [each.state for each in value] if isinstance(value, list) else value
        for value in results
    )


def complex_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    discretization: DiscretizationName | TwoSampleDiscretizationName = "zoh",
    lam: Tensor | None = None,
    lam_sigmoid: bool = False,
    conjugate_pairs: bool = True,
    previous_x: Tensor | None = None,
    previous_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One decoding step of a complex state, (batch, dim, dstate): :func:`complex_scan` of one step.

    Returns:
        ``(out, new_state)``. Nothing is modified.

    Examples:
        >>> import torch
        >>> from ssm_kernels.reference import complex_state_update
        >>> state, x, dt = torch.zeros(2, 8, 16, dtype=torch.complex64), torch.randn(2, 8), torch.rand(2, 8)
        >>> A = torch.complex(-torch.rand(8, 16), torch.randn(8, 16))
        >>> B, C = torch.randn(2, 2, 16, dtype=torch.complex64)
        >>> y, new_state = complex_state_update(state, x, dt, A, B, C)
        >>> y.shape, new_state.shape
        (torch.Size([2, 8]), torch.Size([2, 8, 16]))
    """
    out, last = complex_scan(
        x[..., None],
        dt[..., None],
        A,
        B[..., None],
        C[..., None],
        D,
        None if z is None else z[..., None],
        dt_bias,
        discretization=discretization,
        lam=None if lam is None else torch.broadcast_to(lam, x.shape)[..., None],
        lam_sigmoid=lam_sigmoid,
        conjugate_pairs=conjugate_pairs,
        delta_softplus=dt_softplus,
        initial_state=state,
        previous="zero" if previous_x is None else (previous_x, previous_B),
        return_last_state=True,
    )
    return out[..., 0], last.state if isinstance(last, ScanState) else last
