"""Reference of the decoding step of both scans."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._discretizations import with_alpha
from ..choices import DiscretizationName
from .discretizations import coefficients
from .sequences import step_sizes

__all__ = ["selective_state_update"]


def selective_state_update(
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
    dt_limit: tuple[float, float] | None = None,
    discretization: DiscretizationName = "zoh",
    alpha: float | None = None,
    dt_A: Tensor | None = None,
    state_batch_indices: Tensor | None = None,
    A_is_log: bool = False,
    conjugate_pairs: bool = True,
) -> tuple[Tensor, Tensor]:
    """One decoding step. Arguments as :func:`ssm_kernels.selective_state_update`, but nothing is modified in place.

    Matrices ``A`` of shape (dim, dstate, dstate) or (1, dstate, dstate) are taken with every rule of one input sample.

    Returns:
        ``(out, new_state)``. With ``state_batch_indices``, ``new_state`` is the whole cache; rows with a negative index are
        padding: their output is zero and they touch no state.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> state, x, dt = torch.zeros(2, 8, 16), torch.randn(2, 8), torch.rand(2, 8)
        >>> A, B, C = -torch.rand(8, 16), torch.randn(2, 16), torch.randn(2, 16)
        >>> y, new_state = reference.selective_state_update(state, x, dt, A, B, C)
        >>> y.shape, new_state.shape
        (torch.Size([2, 8]), torch.Size([2, 8, 16]))
    """
    if alpha is not None or discretization == "gbt":
        discretization = with_alpha("selective_state_update", discretization, alpha)
    heads = state.dim() == 4
    is_dense = A.dim() == 3 and not heads
    B, C = (X[:, None] if X.dim() == 2 else X for X in (B, C))
    if not heads:
        state, x, dt, A = state[:, None], x[:, None], dt[:, None], A[None]
        D, dt_bias = (None if v is None else v[None] for v in (D, dt_bias))
        z, dt_A = (None if v is None else v[:, None] for v in (z, dt_A))
    nheads = state.shape[1]
    dt = step_sizes(dt, dt_bias, dt_softplus, dt_limit)
    A = -torch.exp(A) if A_is_log else A
    rows = torch.arange(x.shape[0], device=x.device) if state_batch_indices is None else state_batch_indices.long()
    padding = rows < 0
    rows = rows.clamp(min=0)
    if not heads:  # groups of channels
        Bt, Ct = (X.repeat_interleave(x.shape[2] // X.shape[1], dim=1)[:, None] for X in (B, C))
    else:
        Bt, Ct = (X.repeat_interleave(nheads // X.shape[1], dim=1)[:, :, None] for X in (B, C))
    if is_dense:
        from .dense import dense_coefficients  # which uses this package's modules

        if dt_A is not None:
            raise ValueError("selective_state_update: expected no dt_A with A of shape (dim, dstate, dstate)")
        Abar, c, _ = dense_coefficients(discretization, dt, A)
        h = (Abar @ state[rows][..., None] + c @ (Bt * x[..., None])[..., None])[..., 0]
    else:
        Abar, c = coefficients(discretization, dt[..., None], A, None if dt_A is None else dt_A[..., None])
        h = Abar * state[rows] + c * Bt * x[..., None]
    out = (h * Ct).sum(-1)
    out = out.real * (1 + conjugate_pairs) if out.is_complex() else out
    if D is not None:
        out = out + D * x
    if z is not None:
        out = out * F.silu(z)
    out = torch.where(padding[:, None, None], torch.zeros_like(out), out)
    new_state = state.clone()
    new_state[rows[~padding]] = h[~padding].to(state.dtype)
    return (out, new_state) if heads else (out[:, 0], new_state[:, 0])
