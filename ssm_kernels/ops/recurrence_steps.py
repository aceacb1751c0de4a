"""One decoding step of each gated linear recurrence. ``recurrences.py`` has the scans and exports the steps."""

from __future__ import annotations

import math
import numbers
import sys
from typing import Any

import torch
from torch import Tensor

from ..choices import CandidateActivation
from ._arguments import names_arguments
from ._masks import reset_state

__all__ = [
    "diag_linear_step",
    "elu_gru_step",
    "hgrn_step",
    "linear_step",
    "liquid_step",
    "mingru_step",
    "minlstm_step",
    "rglru_step",
]


def step_size(operator: str, dt: Tensor | float, candidate: Tensor) -> Tensor:
    """``dt`` as a tensor.

    Raises:
        ValueError: a number is negative, NaN, or finite and beyond the range of the dtype in which states are.
        TypeError: ``dt`` is neither a tensor nor a real number.
    """
    if isinstance(dt, Tensor):
        return dt
    is_symbol = isinstance(dt, (torch.SymInt, torch.SymFloat))
    if isinstance(dt, bool) or not (is_symbol or isinstance(dt, numbers.Real)):
        got = "None" if dt is None else type(dt).__name__
        raise TypeError(f"{operator}: expected dt to be a tensor or a number, got {got}")
    if not isinstance(candidate, Tensor):
        raise TypeError(f"{operator}: expected candidate to be a tensor, got {type(candidate).__name__}")
    dtype = torch.float64 if candidate.dtype == torch.float64 else torch.float32
    if not is_symbol:  # whose value no trace may depend on
        check_step_size(operator, dt, dtype)
    # One value for each channel: CUDA reads rows whose channels are contiguous as vectors, others element by element.
    value = torch.sym_float(dt) if is_symbol else float(dt)
    return torch.full(candidate.shape[-1:], value, dtype=dtype, device=candidate.device)


def check_step_size(name: str, dt: Any, dtype: torch.dtype) -> None:
    """Checks a number: not negative, and infinite or within the range of ``dtype``.

    Raises:
        ValueError: it is not.
    """
    if not dt >= 0:
        raise ValueError(f"{name}: expected dt to be not negative, got {dt}")
    largest = torch.finfo(dtype).max
    if largest < dt < math.inf:
        if dt > sys.float_info.max:
            raise ValueError(f"{name}: expected dt within a float's range, got an integer beyond it")
        raise ValueError(f"{name}: expected dt up to {largest:.3g}, the largest number of {dtype}, or inf, got {dt:.3g}")


@names_arguments
def linear_step(a: Tensor, b: Tensor, state: Tensor | None = None, *, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One decoding step of :func:`linear_scan`: a scan of seqlen 1. This docstring documents the steps of the other scans too.

    Args:
        a, b: the scan's inputs in its order, (batch, channels). Inputs that broadcast do so to this shape.
        state: state before the step, (batch, channels), float32 (float64 with float64 inputs); zero if absent. Not modified.
        reset: (batch,) or (batch, 1), bool or of an integer or floating-point dtype: in the rows where it is true, or not zero,
            the state before the step is zero, whatever ``state`` holds. None for no reset.

    Returns:
        ``(h, new_state)``: the same state in the dtype of the first input and in the dtype of ``state``. Differentiable like
        the scan.

    The step has the errors of the scan and, except ``reverse`` and ``cu_seqlens``, its options. Messages name the step and its
    arguments.

    Examples:
        >>> import torch
        >>> from ssm_kernels import linear_step
        >>> a, b = torch.tensor([[0.5]]), torch.tensor([[1.0]])  # (batch, channels)
        >>> h, state = linear_step(a, b)  # from a state of zero
        >>> h, state = linear_step(a, b, state)
        >>> h
        tensor([[1.5000]])
    """
    state = reset_state("linear_step", state, reset, a)
    results: tuple[Tensor, Tensor] = torch.ops.ssm_kernels.linear_step(a, b, state)
    return results


@names_arguments
def mingru_step(
    gate: Tensor,
    candidate: Tensor,
    state: Tensor | None = None,
    *,
    candidate_activation: CandidateActivation | None = None,
    gate_is_logit: bool = True,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of :func:`mingru_scan`; see :func:`linear_step`.

    Examples:
        >>> import torch
        >>> from ssm_kernels import mingru_step
        >>> gate, candidate = torch.tensor([[0.0]]), torch.tensor([[1.0]])
        >>> h, state = mingru_step(gate, candidate)  # from a state of zero
        >>> h, state = mingru_step(gate, candidate, state)
        >>> h
        tensor([[0.7500]])
    """
    state = reset_state("mingru_step", state, reset, gate)
    results: tuple[Tensor, Tensor] = torch.ops.ssm_kernels.mingru_step(
        gate, candidate, state, candidate_activation=candidate_activation, gate_is_logit=gate_is_logit
    )
    return results


@names_arguments
def minlstm_step(
    forget: Tensor,
    input: Tensor,
    candidate: Tensor,
    state: Tensor | None = None,
    *,
    candidate_activation: CandidateActivation | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of :func:`minlstm_scan`; see :func:`linear_step`.

    Examples:
        >>> import torch
        >>> from ssm_kernels import minlstm_step
        >>> gate, candidate = torch.tensor([[0.0]]), torch.tensor([[1.0]])
        >>> h, state = minlstm_step(gate, gate, candidate)  # from a state of zero
        >>> h, state = minlstm_step(gate, gate, candidate, state)
        >>> h
        tensor([[0.7500]])
    """
    state = reset_state("minlstm_step", state, reset, forget)
    results: tuple[Tensor, Tensor] = torch.ops.ssm_kernels.minlstm_step(
        forget, input, candidate, state, candidate_activation=candidate_activation
    )
    return results


@names_arguments
def liquid_step(
    candidate: Tensor, tau: Tensor, dt: Tensor | float, state: Tensor | None = None, *, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One step of :func:`liquid_scan`; see :func:`linear_step`.

    Examples:
        >>> import torch
        >>> from ssm_kernels import liquid_step
        >>> candidate, dt = torch.tensor([[1.0]]), torch.tensor([[1.0]])
        >>> h, state = liquid_step(candidate, torch.tensor([2.0]), dt)  # from a state of zero
        >>> h, state = liquid_step(candidate, torch.tensor([2.0]), dt, state)
        >>> h
        tensor([[0.6321]])
    """
    state = reset_state("liquid_step", state, reset, candidate)
    results: tuple[Tensor, Tensor] = torch.ops.ssm_kernels.liquid_step(
        candidate, tau, step_size("liquid_step", dt, candidate), state
    )
    return results


@names_arguments
def rglru_step(
    recurrence_gate: Tensor,
    input_gate: Tensor,
    *,
    x: Tensor,
    recurrent_param: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of :func:`rglru_scan`; see :func:`linear_step`.

    Examples:
        >>> import torch
        >>> from ssm_kernels import rglru_step
        >>> gates, x = torch.tensor([[0.0]]), torch.tensor([[1.0]])
        >>> h, state = rglru_step(gates, gates, x=x, recurrent_param=torch.tensor([0.1]))  # from a state of zero
        >>> h, state = rglru_step(gates, gates, x=x, recurrent_param=torch.tensor([0.1]), state=state)
        >>> h
        tensor([[0.5248]])
    """
    state = reset_state("rglru_step", state, reset, recurrence_gate)
    results: tuple[Tensor, Tensor] = torch.ops.ssm_kernels.rglru_step(
        recurrence_gate, input_gate, x=x, recurrent_param=recurrent_param, state=state
    )
    return results


@names_arguments
def hgrn_step(
    log_gate: Tensor, *, x: Tensor, state: Tensor | None = None, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One step of :func:`hgrn_scan`; see :func:`linear_step`.

    Examples:
        >>> import torch
        >>> from ssm_kernels import hgrn_step
        >>> log_gate, x = torch.tensor([[-0.5]]), torch.tensor([[1.0]])
        >>> h, state = hgrn_step(log_gate, x=x)  # from a state of zero
        >>> h, state = hgrn_step(log_gate, x=x, state=state)
        >>> h
        tensor([[1.6065]])
    """
    state = reset_state("hgrn_step", state, reset, log_gate)
    results: tuple[Tensor, Tensor] = torch.ops.ssm_kernels.hgrn_step(log_gate, x=x, state=state)
    return results


@names_arguments
def elu_gru_step(
    gate: Tensor, candidate: Tensor, state: Tensor | None = None, *, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One step of :func:`elu_gru_scan`; see :func:`linear_step`.

    Examples:
        >>> import torch
        >>> from ssm_kernels import elu_gru_step
        >>> gate, candidate = torch.tensor([[0.0]]), torch.tensor([[1.0]])
        >>> h, state = elu_gru_step(gate, candidate)  # from a state of zero
        >>> h, state = elu_gru_step(gate, candidate, state)
        >>> h
        tensor([[1.5000]])
    """
    state = reset_state("elu_gru_step", state, reset, gate)
    results: tuple[Tensor, Tensor] = torch.ops.ssm_kernels.elu_gru_step(gate, candidate, state)
    return results


@names_arguments
def diag_linear_step(
    gate: Tensor, x: Tensor, state: Tensor | None = None, *, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One step of :func:`diag_linear_scan`; see :func:`linear_step`.

    Examples:
        >>> import torch
        >>> from ssm_kernels import diag_linear_step
        >>> gate, x = torch.tensor([[0.0]]), torch.tensor([[1.0]])
        >>> h, state = diag_linear_step(gate, x)  # from a state of zero
        >>> h, state = diag_linear_step(gate, x, state)
        >>> h
        tensor([[1.5000]])
    """
    state = reset_state("diag_linear_step", state, reset, gate)
    results: tuple[Tensor, Tensor] = torch.ops.ssm_kernels.diag_linear_step(gate, x, state)
    return results
