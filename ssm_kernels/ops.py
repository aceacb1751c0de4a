"""The selective and the chunked scan and their decoding step, typed and documented. Each calls ``torch.ops.ssm_kernels``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from ._arguments import names_arguments

__all__ = ["selective_scan", "selective_state_update", "ssd_chunk_scan"]


@overload
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
    return_last_state: Literal[False] = False,
) -> Tensor: ...
@overload
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
    return_last_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
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
    return_last_state: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
@names_arguments
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

    The discretization defines the functions :math:`\bar A` and :math:`k`: see ``docs/discretizations.md``.
    Source: Gu and Dao, *Mamba* (arXiv 2312.00752), equations 1 to 4. ``"zoh"`` is the rule of the paper's code; the
    paper's equation 4 is ``"zoh_exact"`` here.

    Args:
        u: input, (batch, dim, seqlen); float32, float16, bfloat16 or float64. Any strides; seqlen-contiguous and
            dim-contiguous tensors are read in 16-byte vectors, others element by element on CUDA.
        delta: step sizes, shape and dtype of ``u``.
        A: diagonal of the continuous system, (dim, dstate), real, float32 (float64 with float64 inputs); dstate <= 256.
        B: input matrix. Constant: (dim, dstate) in the dtype of ``A``. Per step: (batch, dstate, seqlen) or
            (batch, groups, dstate, seqlen) in the dtype of ``u``; channel ``d`` reads group ``d // (dim // groups)``.
        C: output matrix, as ``B``, independently of it.
        D: skip connection, (dim,), dtype of ``A``.
        z: gate, shape and dtype of ``u``.
        delta_bias: (dim,), dtype of ``A``.
        discretization: one of ``ssm_kernels.discretizations``, such as ``"zoh"``, ``"zoh_exact"`` and ``"bilinear"``, or
            ``"foh"``, an alias of ``"zoh_exact"``.
        delta_softplus: apply softplus (identity above 20, as :func:`torch.nn.functional.softplus`) to ``delta + delta_bias``.
        initial_state: state before the first step, (batch, dim, dstate), dtype of ``A``; zero if absent.
        return_last_state: also return the state after the last step.

    Returns:
        ``out`` of the shape and dtype of ``u``; with ``return_last_state`` also ``last_state``, (batch, dim, dstate), dtype of
        ``A``. Both are differentiable with respect to every tensor argument, ``initial_state`` included. Double backward and
        ``torch.func`` transforms other than ``vmap`` are not supported and raise.

    The operator runs on CPU and on CUDA (compute capability 8.0 and newer) and gives the same bits every time. States and sums
    are float32 (float64 with float64 inputs). Autograd saves the states at every 32nd step (above 16 states: 64th). On CUDA the
    operator launches on the current stream, the host does not wait for the device, and forward and backward can be captured in
    a CUDA graph.

    Raises:
        ValueError: a shape or the discretization is not as above.
        RuntimeError: a dtype, layout or device is not as above, or there is no kernel for the device.
        TypeError: an argument is not a tensor where one is expected, or a required tensor is None.
    """
    results: tuple[Tensor, Tensor] = torch.ops.ssm_kernels.selective_scan(
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
    return results if return_last_state else results[0]


@names_arguments
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
    dt_limit: Sequence[float] | None = None,
    A_is_log: bool = False,
) -> Tensor:
    r"""One decoding step of the selective scan; ``state`` is updated in place.

    The result equals a scan with seqlen 1, the initial state ``state`` and the same ``dt_limit``, whose default in
    :func:`ssd_chunk_scan` is (0, inf). The step has two forms. With channels (Mamba, :func:`selective_scan`) ``state`` is
    (batch, dim, dstate). With heads (Mamba-2, :func:`ssd_chunk_scan`) ``state`` is (batch, heads, headdim, dstate), and ``A``,
    ``dt``, ``D`` and ``dt_bias`` are expanded over the axes that they do not depend on. Arguments have the names and the order
    of ``mamba_ssm``'s function.

    Args:
        state: (batch, dim, dstate) or (batch, heads, headdim, dstate), modified in place; float32 (float64 with float64
            inputs), or the dtype of ``x``. With ``state_batch_indices`` its first size is the number of cache slots instead.
        x: (batch, dim) or (batch, heads, headdim).
        dt: shape and dtype of ``x`` (with heads often expanded over headdim, which is read without a copy).
        A: (dim, dstate) or (heads, headdim, dstate); float32 (float64 with float64 inputs), or the dtype of ``x``; may be
            expanded.
        B: (batch, dstate) or (batch, groups, dstate), dtype of ``x``. The groups divide dim or, where there
            are heads, the heads.
        C: shape and dtype of ``B``.
        D: (dim,) or (heads, headdim), dtypes as for ``A``.
        z: gate, shape and dtype of ``x``.
        dt_bias: (dim,) or (heads, headdim), dtypes as for ``A``.
        dt_softplus: apply softplus to ``dt + dt_bias``.
        state_batch_indices: (batch,), int32 or int64: the slot of ``state`` that each row of the batch uses. A negative index
            is padding: the output is zero and no state is touched. Other indices must be distinct and below the number of
            slots; the CPU raises a ValueError otherwise. CUDA does not check, because the host would have to wait for the
            device: a row whose index is past the last slot returns NaN and touches no state. Rows that share a slot race:
            the contents of this slot and the outputs of these rows are undefined; other slots are not affected.
        discretization: as for :func:`selective_scan`.
        dt_limit: the smallest and the largest step size; clamps the others, after bias and softplus. None: no limits.
        A_is_log: ``A`` holds the logarithm that layers keep; the operator computes ``-exp(A)`` from it.

    Returns:
        ``out``, shape and dtype of ``x``. Not differentiable: backward through it raises.

    Raises:
        ValueError: a shape, the discretization, ``dt_limit`` or, on the CPU, ``state_batch_indices`` is not as above.
        RuntimeError: a dtype, layout or device is not as above, or there is no kernel for the device.
        RuntimeError: elements of ``state``, which is updated in place, share memory with each other or with another argument.
        TypeError: an argument is not a tensor where one is expected, or a required tensor is None.
    """
    out: Tensor = torch.ops.ssm_kernels.selective_state_update(
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
        dt_limit=_dt_limit("selective_state_update", dt_limit),
        A_is_log=A_is_log,
    )
    return out


@overload
def ssd_chunk_scan(
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
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: Literal[False] = False,
    discretization: str = "zoh",
) -> Tensor: ...
@overload
def ssd_chunk_scan(
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
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: Literal[True],
    discretization: str = "zoh",
) -> tuple[Tensor, Tensor]: ...
@overload
def ssd_chunk_scan(
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
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: bool,
    discretization: str = "zoh",
) -> Tensor | tuple[Tensor, Tensor]: ...
@names_arguments
def ssd_chunk_scan(
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
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: bool = False,
    discretization: str = "zoh",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The scan of Mamba-2, structured state-space duality (SSD), in chunks, as matrix products.

    Each head is a selective scan whose :math:`A` is one number, with a state of headdim times dstate:

    .. math::
        \Delta_t &= \mathrm{dt}_t + \mathrm{dt\_bias}, \quad
        \Delta_t \leftarrow \mathrm{softplus}(\Delta_t) \text{ if } \mathrm{dt\_softplus}, \quad
        \Delta_t \leftarrow \mathrm{clamp}(\Delta_t, \mathrm{dt\_limit}) \\
        S_t &= e^{\Delta_t A} S_{t-1} + \Delta_t\, k(\Delta_t A)\, x_t B_t^\top \\
        y_t &= (S_t C_t + D x_t) \cdot \mathrm{silu}(z_t)

    The discretization defines the function :math:`k`: see ``docs/discretizations.md``.
    Source: Dao and Gu, *Transformers are SSMs* (arXiv 2405.21060), section 6. Arguments have the names of ``mamba_ssm``'s
    ``mamba_chunk_scan_combined``.

    Args:
        x: input, (batch, seqlen, heads, headdim); float32, float16, bfloat16 or float64; headdim <= 256. All tensors may have
            any strides.
        dt: step sizes, (batch, seqlen, heads), dtype of ``x``.
        A: (heads,), float32 (float64 with float64 inputs).
        B: input matrix, (batch, seqlen, groups, dstate), dtype of ``x``; dstate <= 256. The groups divide the heads: head ``h``
            reads group ``h // (heads // groups)``.
        C: output matrix, shape and dtype of ``B``.
        chunk_size: a hint of how many steps a chunk has, on CPU at most 64 or 128; None lets the operator choose. It changes
            the rounding of the result only.
        D: skip connection, (heads,) or (heads, headdim), dtype of ``A``.
        z: gate, shape and dtype of ``x``.
        dt_bias: (heads,), dtype of ``A``.
        dt_softplus: apply softplus (identity above 20, as :func:`torch.nn.functional.softplus`) to ``dt + dt_bias``.
        dt_limit: the smallest and the largest step size. Others are clamped, after bias and softplus, and have no gradient.
            None: no limits, which is also the default of ``torch.ops.ssm_kernels.ssd_chunk_scan``.
        initial_states: states before the first step, (batch, heads, headdim, dstate), dtype of ``A``; zero if absent.
        seq_idx: (batch, seqlen), int32 or int64, the number of the sequence that a step belongs to. Where it changes from one
            step to the next, the state starts again from zero. ``initial_states`` belongs to the first sequence of a row,
            ``final_states`` to the last.
        cu_seqlens: (sequences + 1,), int32 or int64. The batch, then of size 1, holds sequences one after another, and sequence
            ``i`` is steps ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1``. It starts at 0, ends at seqlen and does not decrease;
            a sequence may have no steps. Sequences are independent: ``initial_states`` and ``final_states`` are (sequences,
            heads, headdim, dstate). Not together with ``seq_idx``.
        return_final_states: also return the states after the last step.
        discretization: a rule whose state decays by :math:`e^{\Delta A}`: ``"zoh"``, ``"zoh_exact"`` (alias ``"foh"``),
            ``"poly"``, ``"highorder"`` or ``"rk4"``. They differ in the input's factor.

    Returns:
        ``out`` of the shape and dtype of ``x``; with ``return_final_states`` also ``final_states``, (batch, heads, headdim,
        dstate), dtype of ``A``; a sequence without steps returns its initial state. Both are differentiable with respect to
        every floating-point tensor argument, ``initial_states`` included. Double backward and ``torch.func`` transforms other
        than ``vmap`` are not supported and raise.

    States and sums are float32 (float64 with float64 inputs), also for float16 and bfloat16; float32 inputs are multiplied as
    float32, whether TF32 is allowed or not. Autograd saves the inputs only. Autocast casts ``x``, ``dt``, ``B``, ``C`` and
    ``z`` to its dtype, parameters and states to float32. ``docs/ssd.md`` describes rounding, NaN and infinity, memory, and when
    the values of ``cu_seqlens`` are checked.

    Raises:
        ValueError: a shape, the values of ``cu_seqlens``, ``chunk_size``, ``dt_limit`` or the discretization are not as above,
            or both ``seq_idx`` and ``cu_seqlens`` are given.
        RuntimeError: a dtype, layout or device is not as above, or there is no kernel for the device.
        TypeError: an argument is not a tensor where one is expected, or a required tensor is None.
    """
    results: tuple[Tensor, Tensor] = torch.ops.ssm_kernels.ssd_chunk_scan(
        x,
        dt,
        A,
        B,
        C,
        chunk_size=chunk_size,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=_dt_limit("ssd_chunk_scan", dt_limit),
        initial_states=initial_states,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        discretization=discretization,
    )
    return results if return_final_states else results[0]


def _dt_limit(operator: str, dt_limit: Sequence[float] | None) -> Sequence[float] | None:
    # The dispatcher's own message does not say what the numbers are.
    if isinstance(dt_limit, (int, float)):
        raise ValueError(f"{operator}: expected dt_limit = (min, max), got {dt_limit}")
    return dt_limit
