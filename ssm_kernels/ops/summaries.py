"""Summaries of a span of steps: the map from the state before the span to the state after it. ``recurrences.py`` has
the summaries of recurrences. Typed like ``selective_scan.py``.

A scan is linear in its initial state: for any ``h0`` the last state is ``decay * h0 + last_state``, with ``last_state`` that of
a scan from zero. The two tensors have the size of a state, whatever the length of the span. Devices that hold the spans of one
sequence exchange them instead of outputs.

The private functions are their mirror for backward: the gradient of the state before a span, from the gradients of the
outputs of the span alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._discretizations import is_two_sample, rule_of_decay, with_alpha
from .._recurrences import recurrences
from ..choices import CandidateActivation, DiscretizationName, PreviousSample, TwoSampleDiscretizationName
from ._arguments import check_dense, finite_dt_limit, names_arguments, read_dt_limit
from ._complex import complex_summary, is_complex
from ._two_samples import broadcast_steps, read_previous, refuse_one_sample
from .recurrences import *  # noqa: F403

__all__ = [
    "selective_scan_summary",
    "ssd_chunk_scan_summary",
    *(row.summary for row in recurrences.values()),
]


@names_arguments
def selective_scan_summary(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    *,
    delta_bias: Tensor | None = None,
    discretization: DiscretizationName | TwoSampleDiscretizationName = "zoh",
    alpha: float | None = None,
    lam: Tensor | None = None,
    lam_sigmoid: bool = False,
    previous: PreviousSample | tuple[Tensor, Tensor | None] = "zero",
    delta_A: Tensor | None = None,
    delta_softplus: bool = False,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The map of :func:`selective_scan` from the state before all steps to the state after them.

    .. math:: h_{\mathrm{last}} = \mathrm{decay} \cdot h_0 + \mathrm{last\_state}, \quad \mathrm{decay} = \prod_t \bar A_t

    Where :math:`\bar A = e^{\Delta A}` (``"zoh"``, ``"zoh_exact"``, ``"poly"``, ``"highorder"``, ``"rk4"``, ``"dirac"``), the
    decay is :math:`e^{A \sum_t \Delta_t}`, with the sum in float64. For the other discretizations it is the product of all
    steps, and zero where the CPU's product is below the smallest normal number.

    Args:
        u, delta, A, B, delta_bias, discretization, alpha, delta_softplus: as for :func:`selective_scan`.
        lam, lam_sigmoid, previous: of rules that read two input samples, as for :func:`selective_scan`: the map is that of the
            state, and the sample before all steps is given.
        delta_A: as for :func:`selective_scan`.
        seq_idx: (batch, seqlen), int32 or int64, the number of the sequence that a step belongs to. Where it changes from one
            step to the next, the state starts again from zero. The first step never starts a sequence.

    Returns:
        ``last_state`` of a scan from zero and ``decay``, both (batch, dim, dstate), dtype of ``A``. With ``seq_idx``
        ``last_state`` is that of the last sequence of each row, and ``decay`` is zero in rows in which a sequence begins. A
        span of no steps has the last state 0 and the decay 1. Both are differentiable with respect to every floating-point
        tensor argument. Double backward and ``torch.func`` transforms other than ``vmap`` are not supported and raise.

    The kernels write nothing but the two results and, on CUDA, states of segments of time. With ``seq_idx`` they read copies of
    u, delta and per-step B with zeros before the last sequence. Backward runs the scan and its adjoint on both devices.
    Autograd saves the inputs only. Of rules that read two input samples, and with ``delta_A``, the last state is that of a
    scan, whose outputs are computed too, and the decay that of the rule with one sample and the same :math:`\bar A`. With a
    complex ``A`` both results are complex, and the last state is that of a scan, too; so is the decay of ``"bilinear"`` and
    ``"trapezoidal"``.

    Raises:
        NotImplementedError: ``delta_A`` is given with a complex ``A``.
        ValueError: a shape or the discretization is not as above.
        RuntimeError: a dtype, layout or device is not supported, or the device has no kernel.
        TypeError: an argument is not a tensor where one is expected, or a required tensor is None.

    Examples:
        >>> import torch
        >>> from ssm_kernels import selective_scan_summary
        >>> u, delta = torch.randn(2, 8, 100), torch.rand(2, 8, 100)
        >>> A, B = -torch.rand(8, 16), torch.randn(2, 16, 100)
        >>> last_state, decay = selective_scan_summary(u, delta, A, B)
        >>> last_state.shape, decay.shape
        (torch.Size([2, 8, 16]), torch.Size([2, 8, 16]))
    """
    if alpha is not None or discretization in ("gbt", "gbt_two_sample"):
        discretization = with_alpha("selective_scan_summary", discretization, alpha)
    reads_two = is_two_sample(discretization)
    if not reads_two and (lam is not None or lam_sigmoid is not False or previous != "zero"):
        refuse_one_sample("selective_scan_summary", discretization, lam, lam_sigmoid, previous)
    if is_complex(A):
        if seq_idx is not None:
            _check_seq_idx("selective_scan_summary", seq_idx, u)
        return complex_summary(
            *(u, delta, A, B),
            delta_bias=delta_bias,
            discretization=discretization,
            lam=lam,
            lam_sigmoid=lam_sigmoid,
            previous=previous,
            delta_A=delta_A,
            delta_softplus=delta_softplus,
            seq_idx=seq_idx,
        )
    if reads_two or delta_A is not None:
        previous_u, previous_B, repeats = read_previous("selective_scan_summary", previous)
        lam = broadcast_steps("selective_scan_summary", "lam", lam, u, "(batch, dim, seqlen)")
        delta_A = broadcast_steps("selective_scan_summary", "delta_A", delta_A, u, "(batch, dim, seqlen)")
        own = delta_A is None
        _, decay = selective_scan_summary(
            *(u, delta if delta_A is None else delta_A, A, B),
            delta_bias=delta_bias if own else None,
            discretization=rule_of_decay(discretization) if own else "zoh",
            delta_softplus=delta_softplus and own,
            seq_idx=seq_idx,
        )
        _, last_state = torch.ops.ssm_kernels.selective_scan_two_sample(
            *(u, delta, A, B, B, None, None, delta_bias, None, lam, previous_u, previous_B, delta_A, seq_idx),
            discretization=discretization,
            lam_sigmoid=lam_sigmoid,
            repeats_first=repeats,
            delta_softplus=delta_softplus,
        )
        return last_state, decay
    begins = None
    if seq_idx is not None:
        _check_seq_idx("selective_scan_summary", seq_idx, u)
        begins = _begins(seq_idx)
        # The state stays zero until the last sequence begins, whatever the values of the others are.
        is_last = (begins.flip(1).cumsum(1).flip(1) == begins)[:, None]
        u, delta, B = _only(is_last, u), _only(is_last, delta), _only(is_last, B)
    last_state, decay = torch.ops.ssm_kernels.selective_scan_summary(
        u, delta, A, B, delta_bias, discretization=discretization, delta_softplus=delta_softplus
    )
    return last_state, decay if begins is None else decay.masked_fill(begins.any(1)[:, None, None], 0)


@names_arguments
def ssd_chunk_scan_summary(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    B: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] | None = (0.0, math.inf),
    discretization: DiscretizationName = "zoh",
    seq_idx: Tensor | None = None,
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The map of :func:`ssd_chunk_scan` from the states before all steps to the states after them.

    .. math:: S_{\mathrm{last}} = \mathrm{decay} \cdot S_0 + \mathrm{final\_states}, \quad
        \mathrm{decay} = e^{A \sum_t \Delta_t}

    The sum is in float64. With ``log_decay`` in place of ``dt`` and ``A`` the exponent is the sum of the log decays.

    Args:
        x, dt, A, B, dt_bias, dt_softplus, dt_limit, discretization, log_decay, gain: as for :func:`ssd_chunk_scan`.
        seq_idx: (batch, seqlen), int32 or int64, the number of the sequence that a step belongs to. Where it changes from one
            step to the next, the state starts again from zero. The first step never starts a sequence.

    Returns:
        ``final_states`` of a scan from zero, (batch, heads, headdim, dstate), and ``decay``, (batch, heads), float32
        (float64 with float64 inputs).
        With ``seq_idx`` ``final_states`` are those of the last sequence of each row, and ``decay`` is zero in rows in which a
        sequence begins. A span of no steps has the final states 0 and the decay 1. Both are differentiable with respect to
        every floating-point tensor argument. Double backward and ``torch.func`` transforms other than ``vmap`` are not
        supported and raise.

    The CPU computes the states by one matmul for each run of many steps, and so does backward on both devices. CUDA has kernels
    of the states alone. Autograd saves the inputs only.

    Raises:
        ValueError: a shape, ``dt_limit`` or the discretization is not as above, or the call has both or neither of
            ``log_decay`` and ``dt`` with ``A``, or an argument of the other form.
        RuntimeError: a dtype, layout or device is not supported, or the device has no kernel.
        TypeError: an argument is not a tensor where one is expected, or a required tensor is None.

    Examples:
        >>> import torch
        >>> from ssm_kernels import ssd_chunk_scan_summary
        >>> x, dt = torch.randn(2, 100, 4, 16), torch.rand(2, 100, 4)
        >>> A, B = -torch.rand(4), torch.randn(2, 100, 1, 32)
        >>> last_states, decay = ssd_chunk_scan_summary(x, dt, A, B)
        >>> last_states.shape, decay.shape
        (torch.Size([2, 4, 16, 32]), torch.Size([2, 4]))
    """
    results: tuple[Tensor, Tensor] = torch.ops.ssm_kernels.ssd_chunk_scan_summary(
        x,
        dt,
        A,
        B,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=read_dt_limit("ssd_chunk_scan_summary", dt_limit),
        discretization=discretization,
        seq_idx=seq_idx,
        log_decay=log_decay,
        gain=gain,
    )
    return results


@torch.no_grad()
def _selective_scan_initial_gradient(
    grad_out: Tensor,
    delta: Tensor,
    A: Tensor,
    C: Tensor,
    *,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    discretization: DiscretizationName = "zoh",
    delta_softplus: bool = False,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """The gradient of the state before all steps, (batch, dim, dstate), from the gradients of the outputs alone.

    It is the sum over t of (product of Abar up to t) C_t grad_out_t silu(z_t), over the steps of the first sequence of each
    row. The gradient of the last state adds ``decay`` times itself.

    Args:
        grad_out: the gradient of the outputs, dtype of ``delta``.
        z: the gate of the outputs, or None.
    """
    if seq_idx is not None:
        is_first = (_begins(seq_idx).cumsum(1) == 0)[:, None]
        grad_out, delta, C = _only(is_first, grad_out), _only(is_first, delta), _only(is_first, C)
        z = None if z is None else _only(is_first, z)
    result: Tensor = torch.ops.ssm_kernels._selective_scan_initial_gradient(
        grad_out, delta, A, C, z, delta_bias, discretization, delta_softplus
    )
    return result


@torch.no_grad()
def _ssd_chunk_scan_initial_gradient(
    grad_out: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    C: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] | None = (0.0, math.inf),
    discretization: DiscretizationName = "zoh",
    seq_idx: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> Tensor:
    """The gradient of the states before all steps, (batch, heads, headdim, dstate), from the gradients of the outputs alone.

    It is the sum over t of e^(A sum of dt up to t) grad_out_t C_t^T, over the steps of the first sequence of each row. The
    gradient of the final states adds ``decay`` times itself.

    Args:
        grad_out: the gradient of the outputs before the gate: the caller has multiplied it by silu(z). Dtype of ``C``.
    """
    result: Tensor = torch.ops.ssm_kernels._ssd_chunk_scan_initial_gradient(
        grad_out, dt, A, C, dt_bias, dt_softplus, *finite_dt_limit(dt_limit), seq_idx, discretization, log_decay, None
    )
    return result


@torch.no_grad()
def _linear_recurrence_initial_gradient(
    grad_h: Tensor,
    recurrence: str,
    inputs: Sequence[Tensor],
    *,
    candidate_activation: CandidateActivation | None = None,
    gate_is_logit: bool = True,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
) -> Tensor:
    """The gradient of the state before all steps, (batch, channels), from the gradients of the states after each step alone.

    With ``cu_seqlens`` it is that of the state before each packed sequence, (sequences, channels).

    It is the sum over t of (product of a up to t) grad_h_t, over the steps before the first reset of each row. The gradient of
    the last state adds ``decay`` times itself.

    Args:
        grad_h: the gradient of ``h``, its shape and dtype.
        recurrence: the name of the scan, such as ``"mingru_scan"``.
        inputs: those of the scan, in the order of its arguments; the first has the shape that others broadcast to.
    """
    first, *others = inputs
    expanded = [first, *(x.expand_as(first) for x in others)]
    if reset is not None:
        later = reset.flip(1) if reverse else reset
        is_cut = later.cumsum(1) > 0
        is_cut = (is_cut.flip(1) if reverse else is_cut)[..., None]
        # Zero gradients times Inf or NaN of steps that the state does not reach would be NaN.
        grad_h, expanded = grad_h.masked_fill(is_cut, 0), [x.masked_fill(is_cut, 1) for x in expanded]
        first = expanded[0]
    needs_grad = [False] * 4 + [True]
    options = (recurrence, candidate_activation or "none", gate_is_logit, reverse, needs_grad)
    # Other gradients read h; this one does not.
    call = (grad_h, None, expanded, first, None, cu_seqlens, None)
    result: Tensor = torch.ops.ssm_kernels._linear_recurrence_bwd(*call, *options)[-1]
    return result


def _check_seq_idx(operator: str, seq_idx: Tensor, u: Tensor) -> None:
    for name, value in (("seq_idx", seq_idx), ("u", u)):
        check_dense(operator, name, value)
    if u.dim() != 3:
        return  # which the operator refuses
    expected = [u.shape[0], u.shape[-1]]
    if [*seq_idx.shape] != expected:
        raise ValueError(f"{operator}: expected seq_idx of shape (batch, seqlen) = {expected}, got {[*seq_idx.shape]}")
    if seq_idx.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"{operator}: expected seq_idx of dtype int32 or int64, got {seq_idx.dtype}")


def _only(steps: Tensor, values: Tensor) -> Tensor:
    """``values``, zero at other steps; ``steps`` (batch, 1, seqlen). A matrix that is constant in time stays as it is."""
    if values.dim() not in (3, 4) or (values.shape[0], values.shape[-1]) != (steps.shape[0], steps.shape[-1]):
        return values  # constant, or refused by the operator
    return torch.where(steps if values.dim() == 3 else steps[:, None], values, 0)


def _begins(seq_idx: Tensor) -> Tensor:
    """Mask of the steps after the first at which a sequence begins: (batch, seqlen), bool."""
    begins = torch.zeros_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return begins
