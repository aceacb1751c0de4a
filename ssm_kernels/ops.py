"""The operators, typed and documented. Each calls ``torch.ops.ssm_kernels.<name>``."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "diag_linear_scan",
    "diag_linear_step",
    "elu_gru_scan",
    "elu_gru_step",
    "hgrn_scan",
    "hgrn_step",
    "linear_scan",
    "linear_step",
    "liquid_scan",
    "liquid_step",
    "mingru_scan",
    "mingru_step",
    "minlstm_scan",
    "minlstm_step",
    "rglru_scan",
    "rglru_step",
    "selective_scan",
    "selective_state_update",
    "ssd_chunk_scan",
]


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
    dt_limit: Sequence[float] | None = None,
) -> Tensor:
    r"""One decoding step of the selective scan; ``state`` is updated in place.

    Equal to a scan with seqlen 1 whose initial state is ``state``. Two forms: with channels (``state`` of shape (batch, dim,
    dstate), Mamba, :func:`selective_scan`) and with heads (``state`` of shape (batch, heads, headdim, dstate), Mamba-2,
    :func:`ssd_chunk_scan`, with ``A``, ``dt``, ``D`` and ``dt_bias`` expanded over what they do not depend on).
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
        dt_limit: the smallest and the largest step size: others are clamped, after bias and softplus. None: no limits.

    Returns:
        ``out``, shape and dtype of ``x``. Not differentiable: backward through it raises.

    Raises:
        ValueError: a shape, the discretization or ``dt_limit`` is not as above.
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
        dt_limit=dt_limit,
    )


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
    dt_limit: Sequence[float] = (0.0, math.inf),
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: bool = False,
    discretization: str = "zoh",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The scan of Mamba-2, structured state-space duality (SSD), in chunks: nearly all of it products of matrices.

    Each head is a selective scan whose :math:`A` is one number, with a state of headdim times dstate:

    .. math::
        \Delta_t &= \mathrm{dt}_t + \mathrm{dt\_bias}, \quad
        \Delta_t \leftarrow \mathrm{softplus}(\Delta_t) \text{ if } \mathrm{dt\_softplus}, \quad
        \Delta_t \leftarrow \mathrm{clamp}(\Delta_t, \mathrm{dt\_limit}) \\
        S_t &= e^{\Delta_t A} S_{t-1} + \Delta_t\, k(\Delta_t A)\, x_t B_t^\top \\
        y_t &= (S_t C_t + D x_t) \cdot \mathrm{silu}(z_t)

    The function :math:`k` is the discretization's: see ``docs/discretizations.md``.
    Source: Dao and Gu, *Transformers are SSMs* (arXiv 2405.21060), section 6. The argument names are those of ``mamba_ssm``'s
    ``mamba_chunk_scan_combined``.

    Args:
        x: input, (batch, seqlen, heads, headdim); float32, float16, bfloat16 or float64; headdim <= 256. Any strides, as all
            tensors here.
        dt: step sizes, (batch, seqlen, heads), dtype of ``x``.
        A: (heads,), float32 (float64 with float64 inputs).
        B: input matrix, (batch, seqlen, groups, dstate), dtype of ``x``; dstate <= 256. The groups divide the heads: head ``h``
            reads group ``h // (heads // groups)``.
        C: output matrix, shape and dtype of ``B``.
        chunk_size: a hint, how many steps to take together; None chooses. Without effect on the result but for rounding.
        D: skip connection, (heads,) or (heads, headdim), dtype of ``A``.
        z: gate, shape and dtype of ``x``.
        dt_bias: (heads,), dtype of ``A``.
        dt_softplus: apply softplus (identity above 20, as :func:`torch.nn.functional.softplus`) to ``dt + dt_bias``.
        dt_limit: the smallest and the largest step size: others are clamped, after bias and softplus, and have no gradient.
        initial_states: states before the first step, (batch, heads, headdim, dstate), dtype of ``A``; zero if absent.
        seq_idx: (batch, seqlen), int32 or int64, the number of the sequence that a step belongs to: where it changes from one
            step to the next the state starts again from zero. ``initial_states`` is what the first of a row's sequences
            begins with, ``final_states`` what the last one ends with.
        cu_seqlens: (sequences + 1,), int32 or int64: the batch, then of size 1, holds sequences one after another, and sequence
            ``i`` is steps ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1``. It starts at 0, ends at seqlen and does not decrease;
            a sequence may have no steps. Nothing passes from one sequence to the next: ``initial_states`` and ``final_states``
            are (sequences, heads, headdim, dstate). Not together with ``seq_idx``.
        return_final_states: also return the states after the last step.
        discretization: one of those whose state decays by :math:`e^{\Delta A}`: ``"zoh"``, ``"foh"`` (alias ``"zoh_exact"``),
            ``"poly"``, ``"highorder"`` or ``"rk4"``. They differ in the input's factor.

    Returns:
        ``out`` of the shape and dtype of ``x``; with ``return_final_states`` also ``final_states``, (batch, heads, headdim,
        dstate), dtype of ``A``, which of a sequence without steps is its initial state. Both are differentiable with respect to
        every floating-point tensor argument, ``initial_states`` included. Double backward and ``torch.func`` transforms other
        than ``vmap`` are not supported and raise.

    States and sums are float32 (float64 with float64 inputs), and exponents are summed in float64: strong decay, weak decay and
    length cost no accuracy. (16-bit inputs on CUDA with up to 128 states: in float32, within a chunk, and three operands are
    rounded to 16 bits; docs/ssd.md.) Only the inputs are kept for gradients; backward computes the states again. The values of
    ``cu_seqlens`` are read on the host, but by forward while a CUDA graph is being captured. Under autocast ``x``, ``dt``,
    ``B``, ``C`` and ``z`` are cast to its dtype, parameters and states to float32.

    Raises:
        ValueError: a shape, the values of ``cu_seqlens``, ``chunk_size``, ``dt_limit`` or the discretization are not as above,
            or both ``seq_idx`` and ``cu_seqlens`` are given.
        RuntimeError: a dtype or device is not as above, or there is no kernel for the device.
    """
    out, final_states = torch.ops.ssm_kernels.ssd_chunk_scan(
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
        dt_limit=dt_limit,
        initial_states=initial_states,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        discretization=discretization,
    )
    return (out, final_states) if return_final_states else out


def linear_scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""All states of a linear recurrence, each channel by itself.

    .. math:: h_t = a_t h_{t-1} + b_t

    The scans that follow make :math:`a` and :math:`b` of gates and candidates, in the same kernel; what is said here of inputs,
    ``h0``, the options and the results holds for all of them.

    Args:
        a: (batch, seqlen, channels); float32, float16, bfloat16 or float64. Any value, any strides. The other inputs of a scan
            have the first one's shape, dtype and device, unless its documentation says that they broadcast: then their shape is
            any that broadcasts to the first one's, and their dtype the first one's or that of ``h0``.
        b: shape and dtype of ``a``.
        h0: state before the first step, (batch, channels), float32 (float64 with float64 inputs); zero if absent.
        reverse: time runs backwards, from the last step to the first: ``h0`` comes before the last step, and ``last_state`` is
            the state at step 0. In each packed sequence, too.
        cu_seqlens: (sequences + 1,), int32 or int64: the batch, then of size 1, holds sequences one after another, and sequence
            ``i`` is steps ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1``. It starts at 0, ends at seqlen and does not decrease;
            a sequence may have no steps. Nothing passes from one sequence to the next: ``h0`` and ``last_state`` are
            (sequences, channels). While a CUDA graph is captured or replayed nobody checks the values; from wrong ones come
            wrong numbers, but no access outside the tensors.
        return_last_state: also return the state after the last step.

    Returns:
        ``h``, every state, shape and dtype of ``a``; with ``return_last_state`` also ``last_state``, (batch, channels), dtype
        of ``h0``, which for a sequence of no steps is its ``h0``. Both are differentiable with respect to every floating-point
        tensor argument, ``h0`` included. Double backward is supported by ``linear_scan`` alone and raises in the others;
        transforms of ``torch.func`` other than ``vmap`` are not supported and raise.

    On CPU and on CUDA (compute capability 8.0 and newer), with the same bits every time. States and sums are float32 (float64
    with float64 inputs), whatever the dtype of the inputs, and no logarithms: values of any sign, and no loss of accuracy over
    long sequences. Where states grow, products of up to 128 consecutive ``a`` must be finite numbers too on CUDA, unless they
    multiply a zero. For gradients the inputs and ``h`` are kept. On CUDA the work goes to the current stream and can be
    captured in a CUDA graph; nothing waits for the device, except that the values of ``cu_seqlens`` are checked on the host,
    unless a graph is being captured. Under autocast the inputs are cast to its dtype, those that broadcast and ``h0`` to
    float32.

    Raises:
        ValueError: a shape, the values of ``cu_seqlens`` or a candidate activation are not as documented.
        RuntimeError: a dtype or device is not as documented, or there is no kernel for the device.
    """
    h, last_state = torch.ops.ssm_kernels.linear_scan(a, b, h0, reverse=reverse, cu_seqlens=cu_seqlens)
    return (h, last_state) if return_last_state else h


def mingru_scan(
    gate: Tensor,
    candidate: Tensor,
    h0: Tensor | None = None,
    *,
    candidate_activation: str | None = None,
    gate_is_logit: bool = True,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""All states of a minGRU.

    .. math::
        z_t &= \sigma(\mathrm{gate}_t), \text{ or } \mathrm{gate}_t \text{ itself without gate\_is\_logit} \\
        h_t &= (1 - z_t)\, h_{t-1} + z_t\, g(\mathrm{candidate}_t)

    Source: Feng et al., *Were RNNs All We Needed?* (arXiv 2410.01201), section 3.1, and its appendix for :math:`g`; here
    not in log-space, so that a candidate may have any sign.

    Args:
        gate: (batch, seqlen, channels), the update gate.
        candidate: shape and dtype of ``gate``.
        candidate_activation: None for the candidate itself, ``"g"`` for the paper's positive one, ``x + 1/2`` where
            ``x >= 0`` and ``sigmoid(x)`` elsewhere, or ``"tanh"``.
        gate_is_logit: apply the sigmoid to ``gate``.

    The other arguments, the results and what is raised: see :func:`linear_scan`.
    """
    h, last_state = torch.ops.ssm_kernels.mingru_scan(
        gate,
        candidate,
        h0,
        candidate_activation=candidate_activation,
        gate_is_logit=gate_is_logit,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
    )
    return (h, last_state) if return_last_state else h


def minlstm_scan(
    forget: Tensor,
    input: Tensor,
    candidate: Tensor,
    h0: Tensor | None = None,
    *,
    candidate_activation: str | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""All states of a minLSTM, whose forget and input gates are normalized to the sum 1.

    .. math::
        f_t &= \sigma(\mathrm{forget}_t), \quad i_t = \sigma(\mathrm{input}_t) \\
        h_t &= \frac{f_t}{f_t + i_t} h_{t-1} + \frac{i_t}{f_t + i_t}\, g(\mathrm{candidate}_t)

    The gates are computed as :math:`i' = \sigma(\mathrm{softplus}(-\mathrm{forget}) - \mathrm{softplus}(-\mathrm{input}))` and
    :math:`f' = 1 - i'`, which is finite where both sigmoids underflow. Where both gates are :math:`-\infty` they have no limit,
    and the result is NaN.
    Source: Feng et al., *Were RNNs All We Needed?* (arXiv 2410.01201), section 3.2, and its appendix for :math:`g`.

    Args:
        forget: (batch, seqlen, channels), before the sigmoid.
        input: shape and dtype of ``forget``, before the sigmoid.
        candidate: shape and dtype of ``forget``.
        candidate_activation: as for :func:`mingru_scan`.

    The other arguments, the results and what is raised: see :func:`linear_scan`.
    """
    h, last_state = torch.ops.ssm_kernels.minlstm_scan(
        forget, input, candidate, h0, candidate_activation=candidate_activation, reverse=reverse, cu_seqlens=cu_seqlens
    )
    return (h, last_state) if return_last_state else h


def liquid_scan(
    candidate: Tensor,
    tau: Tensor,
    dt: Tensor | float,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""All states of a leaky integrator whose target, time constant and step size may change with every step.

    .. math:: h_t = f_t + (h_{t-1} - f_t)\, e^{-\mathrm{dt}_t / \tau_t}, \quad f = \mathrm{candidate}

    This is the exact solution of :math:`\tau\, \mathrm dh/\mathrm dt = f - h` over a step in which :math:`f` and :math:`\tau`
    are constant: the relaxation of liquid time-constant networks (Hasani et al., arXiv 2006.04439) in closed form, for an
    :math:`f` and :math:`\tau` that do not depend on the state.

    Args:
        candidate: (batch, seqlen, channels).
        tau: time constant, not zero; broadcasts, such as (channels,). Positive for a decay.
        dt: step size; broadcasts, such as (batch, seqlen, 1) for irregular sampling, or a number.

    The other arguments, the results and what is raised: see :func:`linear_scan`.

    Raises:
        TypeError: ``dt`` is neither a tensor nor a number.
    """
    if not isinstance(dt, Tensor):
        if not isinstance(dt, numbers.Real):
            raise TypeError(f"liquid_scan: expected dt to be a tensor or a number, got {type(dt).__name__}")
        dtype = torch.float64 if candidate.dtype == torch.float64 else torch.float32
        # One for each channel: CUDA reads rows whose channels are contiguous as vectors, others element by element.
        dt = torch.full(candidate.shape[-1:], dt, dtype=dtype, device=candidate.device)
    h, last_state = torch.ops.ssm_kernels.liquid_scan(candidate, tau, dt, h0, reverse=reverse, cu_seqlens=cu_seqlens)
    return (h, last_state) if return_last_state else h


def rglru_scan(
    x: Tensor,
    recurrence_gate: Tensor,
    input_gate: Tensor,
    recurrent_param: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""All states of Griffin's real-gated linear recurrent unit (RG-LRU).

    .. math::
        \log a_t &= -8\, \mathrm{softplus}(\mathrm{recurrent\_param})\, \sigma(\mathrm{recurrence\_gate}_t) \\
        h_t &= a_t h_{t-1} + \sqrt{1 - a_t^2}\; \sigma(\mathrm{input\_gate}_t)\, x_t

    Source: De et al., *Griffin* (arXiv 2402.19427), equations 1 to 4, with :math:`\Lambda = -\mathrm{recurrent\_param}`: the
    parameter as ``recurrentgemma`` and ``transformers`` store it.

    Args:
        x: (batch, seqlen, channels).
        recurrence_gate: shape and dtype of ``x``, before the sigmoid.
        input_gate: shape and dtype of ``x``, before the sigmoid.
        recurrent_param: broadcasts; as a rule (channels,).

    The other arguments, the results and what is raised: see :func:`linear_scan`.
    """
    h, last_state = torch.ops.ssm_kernels.rglru_scan(
        x, recurrence_gate, input_gate, recurrent_param, h0, reverse=reverse, cu_seqlens=cu_seqlens
    )
    return (h, last_state) if return_last_state else h


def hgrn_scan(
    x: Tensor,
    log_gate: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""All states of a hierarchically gated recurrent network (HGRN), of gates in log-space.

    .. math:: h_t = e^{\mathrm{log\_gate}_t} h_{t-1} + x_t

    Source: Qin et al., *Hierarchically Gated Recurrent Neural Network* (arXiv 2311.04823), in the form of
    ``flash-linear-attention``'s kernel: the forget gate comes as its logarithm, and what the input gate lets through as ``x``.

    Args:
        x: (batch, seqlen, channels).
        log_gate: shape and dtype of ``x``; at most 0 for a decay.

    The other arguments, the results and what is raised: see :func:`linear_scan`.
    """
    h, last_state = torch.ops.ssm_kernels.hgrn_scan(x, log_gate, h0, reverse=reverse, cu_seqlens=cu_seqlens)
    return (h, last_state) if return_last_state else h


def elu_gru_scan(
    gate: Tensor,
    candidate: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""All states of a minGRU whose candidate is made positive by ``1 + elu``.

    .. math::
        z_t &= \sigma(\mathrm{gate}_t) \\
        h_t &= (1 - z_t)\, h_{t-1} + z_t\, (1 + \mathrm{elu}(\mathrm{candidate}_t))

    ``1 + elu(x)`` is ``x + 1`` for ``x > 0``, else ``e^x``. Otherwise as :func:`mingru_scan` with
    ``candidate_activation="g"``, and smooth where that has a kink.

    Args:
        gate: (batch, seqlen, channels), the update gate before the sigmoid.
        candidate: shape and dtype of ``gate``.

    The other arguments, the results and what is raised: see :func:`linear_scan`.
    """
    h, last_state = torch.ops.ssm_kernels.elu_gru_scan(gate, candidate, h0, reverse=reverse, cu_seqlens=cu_seqlens)
    return (h, last_state) if return_last_state else h


def diag_linear_scan(
    gate: Tensor,
    x: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""All states of a diagonal linear recurrence with a sigmoid gate.

    .. math:: h_t = \sigma(\mathrm{gate}_t)\, h_{t-1} + x_t

    Args:
        gate: (batch, seqlen, channels), the forget gate before the sigmoid.
        x: shape and dtype of ``gate``.

    The other arguments, the results and what is raised: see :func:`linear_scan`.
    """
    h, last_state = torch.ops.ssm_kernels.diag_linear_scan(gate, x, h0, reverse=reverse, cu_seqlens=cu_seqlens)
    return (h, last_state) if return_last_state else h


def _step(
    scan: Callable[..., Any],
    inputs: dict[str, Tensor],
    state: Tensor | None,
    *,
    broadcast: Mapping[str, Tensor | float] = MappingProxyType({}),
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """One step of the scan: of inputs with a batch, time is the axis before the last. Shapes are checked as those of a step."""
    name, sizes = scan.__name__.replace("_scan", "_step"), "(batch, channels)"
    (first_name, first), *others = inputs.items()
    if first.dim() != 2:
        raise ValueError(f"{name}: expected {first_name} of shape {sizes}, got {list(first.shape)}")
    for what, x in (*others, ("state", state)):
        if x is not None and x.shape != first.shape:
            raise ValueError(f"{name}: expected {what} of shape {sizes} = {list(first.shape)}, got {list(x.shape)}")
    for what, x in broadcast.items():
        if isinstance(x, Tensor) and not _broadcasts(x, first):
            shapes = f"{sizes} = {list(first.shape)}, got {list(x.shape)}"
            raise ValueError(f"{name}: expected {what} of a shape that broadcasts to {shapes}")
    arguments = (*inputs.values(), *broadcast.values())
    of_one_step = (x.unsqueeze(-2) if isinstance(x, Tensor) and x.dim() > 1 else x for x in arguments)
    h, new_state = scan(*of_one_step, state, return_last_state=True, **options)
    return h.squeeze(1), new_state


def _broadcasts(x: Tensor, like: Tensor) -> bool:
    pairs = zip(reversed(x.shape), reversed(like.shape), strict=False)
    return x.dim() <= like.dim() and all(size in (1, target) for size, target in pairs)


def linear_step(a: Tensor, b: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One step of :func:`linear_scan`, for decoding: a scan of seqlen 1. So are the steps of the other scans.

    Args:
        a, b: the scan's inputs in its order, (batch, channels). Inputs that broadcast do so to this shape.
        state: state before the step, (batch, channels), float32 (float64 with float64 inputs); zero if absent. Not modified.

    Returns:
        ``(h, new_state)``: the same state in the dtype of the first input and in that of ``state``. Differentiable as the scan.

    Options and what is raised are the scan's.
    """
    return _step(linear_scan, {"a": a, "b": b}, state)


def mingru_step(
    gate: Tensor,
    candidate: Tensor,
    state: Tensor | None = None,
    *,
    candidate_activation: str | None = None,
    gate_is_logit: bool = True,
) -> tuple[Tensor, Tensor]:
    """One step of :func:`mingru_scan`; see :func:`linear_step`."""
    inputs = {"gate": gate, "candidate": candidate}
    return _step(mingru_scan, inputs, state, candidate_activation=candidate_activation, gate_is_logit=gate_is_logit)


def minlstm_step(
    forget: Tensor,
    input: Tensor,
    candidate: Tensor,
    state: Tensor | None = None,
    *,
    candidate_activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of :func:`minlstm_scan`; see :func:`linear_step`."""
    inputs = {"forget": forget, "input": input, "candidate": candidate}
    return _step(minlstm_scan, inputs, state, candidate_activation=candidate_activation)


def liquid_step(candidate: Tensor, tau: Tensor, dt: Tensor | float, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One step of :func:`liquid_scan`; see :func:`linear_step`."""
    return _step(liquid_scan, {"candidate": candidate}, state, broadcast={"tau": tau, "dt": dt})


def rglru_step(
    x: Tensor, recurrence_gate: Tensor, input_gate: Tensor, recurrent_param: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One step of :func:`rglru_scan`; see :func:`linear_step`."""
    inputs = {"x": x, "recurrence_gate": recurrence_gate, "input_gate": input_gate}
    return _step(rglru_scan, inputs, state, broadcast={"recurrent_param": recurrent_param})


def hgrn_step(x: Tensor, log_gate: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One step of :func:`hgrn_scan`; see :func:`linear_step`."""
    return _step(hgrn_scan, {"x": x, "log_gate": log_gate}, state)


def elu_gru_step(gate: Tensor, candidate: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One step of :func:`elu_gru_scan`; see :func:`linear_step`."""
    return _step(elu_gru_scan, {"gate": gate, "candidate": candidate}, state)


def diag_linear_step(gate: Tensor, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One step of :func:`diag_linear_scan`; see :func:`linear_step`."""
    return _step(diag_linear_scan, {"gate": gate, "x": x}, state)
