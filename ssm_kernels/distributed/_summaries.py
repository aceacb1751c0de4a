"""Summaries and initial gradients of the linear recurrences, of packed sequences too.

A span maps the state before it to ``decay * state + last_state``. With ``cu_seqlens`` every sequence has a state of its own,
which the operator of the summaries does not have: its last state is that of the scan, its decay the product of the gates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..reference import RECURRENCES

__all__ = ["linear_recurrence_initial_gradient", "linear_recurrence_summary"]

_ops = torch.ops.ssm_kernels


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
    arguments = (None, recurrence, candidate_activation, gate_is_logit, reverse)
    if cu_seqlens is None:
        summary: tuple[Tensor, Tensor] = _ops._linear_recurrence_summary_fwd(inputs, *arguments)
        return summary
    last_state = _ops._linear_recurrence_fwd(inputs, None, cu_seqlens, *arguments)[1]
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
