"""What a span of a scan hands on: its last state from the state zero and its decay, and the gradient of its initial state.

A span maps the state before it to ``decay * state + last_state``. Where the transition is an exponential, the decay is the
exponential of a sum, in float64; for the other discretizations and the recurrences it is the product over the steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import RECURRENCES

__all__ = [
    "_selective_scan_initial_gradient",
    "_ssd_chunk_scan_initial_gradient",
    "linear_recurrence_initial_gradient",
    "linear_recurrence_summary",
    "selective_scan_summary",
    "ssd_chunk_scan_summary",
]

_ops = torch.ops.ssm_kernels
# Rules with Abar = e^(delta A).
_EXPONENTIAL = frozenset(("zoh", "zoh_exact", "foh", "poly", "highorder", "rk4"))


def selective_scan_summary(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    *,
    delta_bias: Tensor | None = None,
    discretization: str = "zoh",
    delta_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """``last_state`` and ``decay``, (batch, dim, dstate), dtype of ``A``. Arguments as :func:`ssm_kernels.selective_scan`."""
    of_steps = (u, delta, A, B, B, None, None, delta_bias)
    last_state = _ops._selective_scan_fwd(*of_steps, None, discretization, delta_softplus, False)[1]
    if discretization in _EXPONENTIAL:
        steps = delta.double() if delta_bias is None else delta.double() + delta_bias.double()[:, None]
        total = (F.softplus(steps) if delta_softplus else steps).sum(-1)
        return last_state, torch.exp(total[..., None] * A.double()).to(A.dtype)
    of_steps = (torch.zeros_like(u), *of_steps[1:])
    ones = torch.ones_like(last_state)
    return last_state, _ops._selective_scan_fwd(*of_steps, ones, discretization, delta_softplus, False)[1]


def _selective_scan_initial_gradient(
    grad_out: Tensor,
    delta: Tensor,
    A: Tensor,
    C: Tensor,
    *,
    delta_bias: Tensor | None = None,
    discretization: str = "zoh",
    delta_softplus: bool = False,
) -> Tensor:
    """The gradient of the initial state, (batch, dim, dstate), from that of the outputs before the gate, in their dtype."""
    zeros, options = torch.zeros_like(delta), (discretization, delta_softplus)
    of_steps = (zeros, delta, A, C, C, None, None, delta_bias)
    chunk_states = _ops._selective_scan_fwd(*of_steps, None, *options, True)[2]
    needs_grad = [False] * 8 + [True]
    gradient: Tensor = _ops._selective_scan_bwd(grad_out, None, *of_steps, chunk_states, *options, needs_grad)[8]
    return gradient


def ssd_chunk_scan_summary(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float],
    discretization: str = "zoh",
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``final_states``, (batch, heads, headdim, dstate), and ``decay``, (batch, heads), dtype of ``A``.

    Arguments as :func:`ssm_kernels.ssd_chunk_scan`. Where ``seq_idx`` changes inside the span, the decay is zero.
    """
    _, final_states = _ops._ssd_chunk_scan_fwd(
        x, dt, A, B, B, None, None, None, dt_bias, dt_softplus, *dt_limit, None, seq_idx, None, discretization
    )
    steps = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    steps = F.softplus(steps) if dt_softplus else steps
    decay = torch.exp(steps.clamp(*dt_limit).sum(1) * A.double()).to(A.dtype)
    if seq_idx is not None:
        decay = decay.masked_fill((seq_idx[:, 1:] != seq_idx[:, :-1]).any(1)[:, None], 0)
    return final_states, decay


def _ssd_chunk_scan_initial_gradient(
    grad_out: Tensor,
    dt: Tensor,
    A: Tensor,
    C: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float],
    discretization: str = "zoh",
    seq_idx: Tensor | None = None,
) -> Tensor:
    """The gradient of the initial states from that of the outputs before the gate: (batch, heads, headdim, dstate)."""
    states = A.new_zeros(grad_out.shape[0], *grad_out.shape[2:], C.shape[3])
    gradient: Tensor = _ops._ssd_chunk_scan_bwd(
        grad_out,
        None,
        torch.zeros_like(grad_out),
        dt,
        A,
        C,
        C,
        None,
        None,
        None,
        dt_bias,
        dt_softplus,
        *dt_limit,
        states,
        seq_idx,
        None,
        discretization,
        [False] * 8 + [True],
    )[8]
    return gradient


def linear_recurrence_summary(
    inputs: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    recurrence: str,
    candidate_activation: str,
    gate_is_logit: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """``last_state`` and ``decay``, (batch or packed sequences, channels), in the dtype of the recurrence's states.

    Arguments as ``torch.ops.ssm_kernels._linear_recurrence``.
    """
    arguments = (cu_seqlens, None, recurrence, candidate_activation, gate_is_logit, reverse)
    last_state = _ops._linear_recurrence_fwd(inputs, None, *arguments)[1]
    options = {"candidate_activation": candidate_activation, "gate_is_logit": gate_is_logit}
    options = {name: value for name, value in options.items() if name in _OPTIONS.get(recurrence, ())}
    gates = _call_by_schema(recurrence, [value.to(last_state.dtype) for value in inputs], options)
    ones = torch.ones_like(last_state)
    decay = _ops._linear_recurrence_fwd(
        [gates, torch.zeros_like(gates)], ones, cu_seqlens, None, "linear_scan", "none", True, reverse
    )
    return last_state, decay[1]


_OPTIONS = {"mingru_scan": ("candidate_activation", "gate_is_logit"), "minlstm_scan": ("candidate_activation",)}
_KEYWORDS = {"rglru_scan": ("recurrence_gate", "input_gate", "x", "recurrent_param"), "hgrn_scan": ("log_gate", "x")}


def _call_by_schema(recurrence: str, inputs: list[Tensor], options: dict[str, object]) -> Tensor:
    """``a`` of ``h = a h + b``, of the shape of the inputs."""
    names = _KEYWORDS.get(recurrence)
    function = RECURRENCES[recurrence]
    a, _ = function(*inputs, **options) if names is None else function(**dict(zip(names, inputs, strict=True)), **options)
    return a.expand_as(inputs[0]).contiguous()


def linear_recurrence_initial_gradient(
    grad_h: Tensor,
    inputs: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    recurrence: str,
    candidate_activation: str,
    gate_is_logit: bool,
    reverse: bool,
) -> Tensor:
    """The gradient of the state before the span, or before each packed sequence, from that of ``h`` alone."""
    options = (recurrence, candidate_activation, gate_is_logit, reverse)
    needs_grad = [False] * 4 + [True]
    # The gradients of the inputs read h; this one does not.
    gradients = _ops._linear_recurrence_bwd(grad_h, None, inputs, inputs[0], None, cu_seqlens, None, *options, needs_grad)
    gradient: Tensor = gradients[4]
    return gradient
