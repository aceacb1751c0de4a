"""The operators, typed and documented. Each calls ``torch.ops.ssm_kernels.<name>``."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["selective_scan", "selective_state_update"]


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: str = "zoh",
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Selective scan of a diagonal state-space model, with a choice of discretization.

    .. math::
        \Delta_t &= \mathrm{delta}_t + \mathrm{delta\_bias}, \quad
        \Delta_t \leftarrow \mathrm{softplus}(\Delta_t) \text{ if } \mathrm{delta\_softplus} \\
        h_t &= \bar A(\Delta_t A)\, h_{t-1} + \Delta_t\, k(\Delta_t A)\, B_t u_t \\
        y_t &= (\langle C_t, h_t \rangle + D u_t) \cdot \mathrm{silu}(z_t)

    The functions :math:`\bar A` and :math:`k` are the discretization's: see ``docs/discretizations.md``.
    Source: Gu and Dao, *Mamba* (arXiv 2312.00752), equations 1 to 4; ``"zoh"`` is the rule of its code, not of its equation 4,
    which is ``"foh"`` here.

    Args:
        u: input, (batch, dim, seqlen); float32, float16, bfloat16 or float64. Any strides; seqlen-contiguous and
            dim-contiguous are read as they are, others element by element on CUDA.
        delta: step sizes, shape and dtype of ``u``.
        A: diagonal of the continuous system, (dim, dstate), real, float32 (float64 with float64 inputs); dstate <= 256.
        B: input matrix. Constant: (dim, dstate) in the dtype of ``A``. Per step: (batch, dstate, seqlen) or
            (batch, groups, dstate, seqlen) in the dtype of ``u``; channel ``d`` reads group ``d // (dim // groups)``.
        C: output matrix, as ``B``, independently of it.
        D: skip connection, (dim,), dtype of ``A``.
        z: gate, shape and dtype of ``u``.
        delta_bias: (dim,), dtype of ``A``.
        discretization: one of ``ssm_kernels.discretizations``, such as ``"zoh"``, ``"foh"`` and ``"bilinear"``, or
            ``"zoh_exact"``, an alias of ``"foh"``.
        delta_softplus: apply softplus (identity above 20, as :func:`torch.nn.functional.softplus`) to ``delta + delta_bias``.
        initial_state: state before the first step, (batch, dim, dstate), dtype of ``A``; zero if absent.
        return_last_state: also return the state after the last step.

    Returns:
        ``out`` of the shape and dtype of ``u``; with ``return_last_state`` also ``last_state``, (batch, dim, dstate), dtype of
        ``A``. Both are differentiable with respect to every tensor argument, ``initial_state`` included. Double backward and
        ``torch.func`` transforms other than ``vmap`` are not supported and raise.

    On CPU and on CUDA (compute capability 8.0 and newer), with the same bits every time. States and sums are float32 (float64
    with float64 inputs). For gradients the states at every 32nd step (above 16 states: 64th) are kept. On CUDA the work goes to
    the current stream, nothing waits for the device, and forward and backward can be captured in a CUDA graph.

    Raises:
        ValueError: a shape or the discretization is not as above.
        RuntimeError: a dtype or device is not as above, or there is no kernel for the device.
    """
    out, last_state = torch.ops.ssm_kernels.selective_scan(
        u,
        delta,
        A,
        B,
        C,
        D,
        z,
        delta_bias,
        initial_state,
        discretization=discretization,
        delta_softplus=delta_softplus,
    )
    return (out, last_state) if return_last_state else out


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
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    *,
    discretization: str = "zoh",
) -> Tensor:
    r"""One decoding step of the selective scan; ``state`` is updated in place.

    Equal to :func:`selective_scan` with seqlen 1 whose initial state is ``state``. Two forms: with channels
    (``state`` of shape (batch, dim, dstate), Mamba) and with heads (``state`` of shape (batch, heads, headdim, dstate),
    Mamba-2).
    The argument names and order are those of ``mamba_ssm``'s function.

    Args:
        state: (batch, dim, dstate) or (batch, heads, headdim, dstate), modified in place; float32 (float64 with float64
            inputs), or the dtype of ``x``. With ``state_batch_indices`` its first size is the number of cache slots instead.
        x: (batch, dim) or (batch, heads, headdim).
        dt: shape and dtype of ``x`` (with heads often expanded over headdim, which is read without a copy).
        A: (dim, dstate) or (heads, headdim, dstate); float32 (float64 with float64 inputs); may be expanded.
        B: (batch, dstate) or (batch, groups, dstate), dtype of ``x``. The groups divide dim or, where there
            are heads, the heads.
        C: shape and dtype of ``B``.
        D: (dim,) or (heads, headdim), dtype of ``A`` or of ``x``.
        z: gate, shape and dtype of ``x``.
        dt_bias: (dim,) or (heads, headdim), dtype of ``A`` or of ``x``.
        dt_softplus: apply softplus to ``dt + dt_bias``.
        state_batch_indices: (batch,), int32 or int64: the slot of ``state`` that each row of the batch uses. A negative index
            is padding: the output is zero and no state is touched. Indices must be distinct. An index past the last slot is an
            error on the CPU; on CUDA, where checking would wait for the device, the row's output is NaN and no state is
            touched.
        discretization: as for :func:`selective_scan`.

    Returns:
        ``out``, shape and dtype of ``x``. Not differentiable: backward through it raises.

    Raises:
        ValueError: a shape or the discretization is not as above.
        RuntimeError: a dtype or device is not as above, or there is no kernel for the device.
    """
    return torch.ops.ssm_kernels.selective_state_update(
        state,
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        dt_softplus,
        state_batch_indices,
        discretization=discretization,
    )
