"""References of linear_scan's family, in the manner of :mod:`ssm_kernels.reference`, which exports them.

The gated linear recurrences are ``h_t = a_t * h_{t-1} + b_t`` and differ only in how ``a`` and ``b`` come from their inputs.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any, Literal, Protocol, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torchscript import REFERENCE_LOOPS, refuse_tracing
from ..choices import CandidateActivation
from ..ops._arguments import did_you_mean
from .discretizations import decaying

__all__ = [
    "CANDIDATE_ACTIVATIONS",
    "RECURRENCES",
    "diag_linear_scan",
    "elu_gru_scan",
    "hgrn_scan",
    "linear_scan",
    "liquid_scan",
    "mingru_scan",
    "minlstm_scan",
    "rglru_scan",
]

CANDIDATE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "g": lambda x: torch.where(x < 0, torch.sigmoid(x), x + 0.5),
    "tanh": torch.tanh,
}


def _activate(candidate: Tensor, activation: CandidateActivation | None) -> Tensor:
    name: str = "none" if activation is None else activation
    if name not in CANDIDATE_ACTIVATIONS:
        known, nearest = ", ".join(CANDIDATE_ACTIVATIONS), did_you_mean(name, CANDIDATE_ACTIVATIONS)
        raise ValueError(f"unknown candidate_activation {name!r}, expected one of: {known}{nearest}")
    return CANDIDATE_ACTIVATIONS[name](candidate)


def _scan(a: Tensor, b: Tensor, h0: Tensor | None, reverse: bool, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    """All states, (batch, seqlen, channels), and the last one, (batch, channels)."""
    initial = torch.zeros_like(b[:, 0]) if h0 is None else h0
    h = initial
    resets = [None] * b.shape[1] if reset is None else reset.unsqueeze(-1).unbind(1)
    steps = list(zip(a.unbind(1), b.unbind(1), resets, strict=True))
    states = []
    for a_t, b_t, reset_t in reversed(steps) if reverse else steps:
        if reset_t is not None:
            h = torch.where(reset_t, initial, h)
        h = a_t * h + b_t
        states.append(h)
    return torch.stack(states[::-1] if reverse else states, dim=1), h


def _scan_sequences(
    a: Tensor, b: Tensor, h0: Tensor | None, reverse: bool, cu_seqlens: Tensor | None, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`_scan` for any number of steps, and over each packed sequence if ``cu_seqlens`` are given."""
    batch, seqlen, channels = b.shape
    if cu_seqlens is None:
        if seqlen == 0:
            return b, b.new_zeros(batch, channels) if h0 is None else h0
        return _scan(a, b, h0, reverse, reset)
    if reset is not None:
        raise ValueError("expected reset or cu_seqlens, got both")
    states, last_states = [b[:, :0]], [b.new_zeros(0, channels)]
    for i, (begin, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        h0_i = None if h0 is None else h0[i : i + 1]
        h, last_state = _scan_sequences(a[:, begin:end], b[:, begin:end], h0_i, reverse, None)
        states.append(h)
        last_states.append(last_state)
    return torch.cat(states, dim=1), torch.cat(last_states)


RECURRENCES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {}
"""Functions by the name of a recurrence's scan: each maps its inputs (and options) to ``(a, b)`` of
``h_t = a_t h_{t-1} + b_t``."""


class _Scan(Protocol):
    """A scan of the family: ``h``, or ``(h, last_state)``."""

    @overload
    def __call__(self, *args: Any, return_last_state: Literal[False] = False, **kwargs: Any) -> Tensor: ...
    @overload
    def __call__(self, *args: Any, return_last_state: Literal[True], **kwargs: Any) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(self, *args: Any, return_last_state: bool, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]: ...


def _recurrence(coefficients: Callable[..., tuple[Tensor, Tensor]]) -> _Scan:
    """Registers the coefficients in :data:`RECURRENCES` and builds the scan from them.

    The scan has the arguments of the function of the same name in :mod:`ssm_kernels`. It is computed in float32 or, where any
    argument is float64, in float64; ``h`` and ``last_state`` have that dtype.
    """
    RECURRENCES[coefficients.__name__] = coefficients
    parameters = list(inspect.signature(coefficients).parameters.values())
    inputs = [parameter for parameter in parameters if parameter.default is parameter.empty]
    common = {"h0": None, "reverse": False, "cu_seqlens": None, "reset": None, "return_last_state": False}

    def parameter(name: str, kind: Any) -> inspect.Parameter:
        return inspect.Parameter(name, kind, default=common[name])

    signature = inspect.Signature(
        [
            *inputs,
            parameter("h0", inputs[-1].kind),
            *parameters[len(inputs) :],
            *(
                parameter(name, inspect.Parameter.KEYWORD_ONLY)
                for name in ("reverse", "cu_seqlens", "reset", "return_last_state")
            ),
        ]
    )

    def scan(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        refuse_tracing(coefficients.__name__, REFERENCE_LOOPS)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        dtype = torch.float32
        for value in arguments.values():
            if isinstance(value, Tensor) and value.is_floating_point():
                dtype = torch.promote_types(dtype, value.dtype)
        for name in ("h0", *(parameter.name for parameter in inputs)):
            if isinstance(arguments[name], Tensor):
                arguments[name] = arguments[name].to(dtype)
        h0, reverse, cu_seqlens, reset, return_last_state = (arguments.pop(name) for name in common)
        a, b = torch.broadcast_tensors(*coefficients(**arguments))
        h, last_state = _scan_sequences(a, b, h0, reverse, cu_seqlens, reset)
        return (h, last_state) if return_last_state else h

    scan.__name__ = scan.__qualname__ = coefficients.__name__
    scan.__doc__ = coefficients.__doc__
    scan.__dict__["__signature__"] = signature
    return cast(_Scan, scan)


@_recurrence
def linear_scan(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``h = a h + b``.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> a, b = torch.full((1, 3, 1), 0.5, dtype=torch.float64), torch.ones(1, 3, 1, dtype=torch.float64)
        >>> reference.linear_scan(a, b).flatten()
        tensor([1.0000, 1.5000, 1.7500], dtype=torch.float64)
    """
    return a, b


@_recurrence
def mingru_scan(
    gate: Tensor, candidate: Tensor, *, candidate_activation: CandidateActivation | None = None, gate_is_logit: bool = True
) -> tuple[Tensor, Tensor]:
    """``h = (1 - z) h + z g(candidate)``, ``z = sigmoid(gate)`` or the gate itself.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> gate, candidate = torch.zeros(1, 3, 1, dtype=torch.float64), torch.ones(1, 3, 1, dtype=torch.float64)
        >>> reference.mingru_scan(gate, candidate).flatten()
        tensor([0.5000, 0.7500, 0.8750], dtype=torch.float64)
    """
    z = torch.sigmoid(gate) if gate_is_logit else gate
    return 1 - z, z * _activate(candidate, candidate_activation)


@_recurrence
def minlstm_scan(
    forget: Tensor, input: Tensor, candidate: Tensor, *, candidate_activation: CandidateActivation | None = None
) -> tuple[Tensor, Tensor]:
    """``h = f' h + i' g(candidate)``, ``f'`` and ``i'`` the sigmoids of forget and input, divided by their sum.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> gate, candidate = torch.zeros(1, 3, 1, dtype=torch.float64), torch.ones(1, 3, 1, dtype=torch.float64)
        >>> reference.minlstm_scan(gate, gate, candidate).flatten()
        tensor([0.5000, 0.7500, 0.8750], dtype=torch.float64)
    """
    i = torch.sigmoid(F.logsigmoid(input) - F.logsigmoid(forget))
    return 1 - i, i * _activate(candidate, candidate_activation)


@_recurrence
def liquid_scan(candidate: Tensor, tau: Tensor, dt: Tensor | float) -> tuple[Tensor, Tensor]:
    """``h = f + (h - f) e^(-dt / tau)``, ``f`` the candidate.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> candidate, tau = torch.ones(1, 3, 1, dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
        >>> reference.liquid_scan(candidate, tau, 1.0).flatten()
        tensor([0.3935, 0.6321, 0.7769], dtype=torch.float64)
    """
    z = decaying(lambda dt, tau: -dt / tau, torch.as_tensor(dt, dtype=tau.dtype, device=tau.device), tau)
    return torch.exp(z), -torch.expm1(z) * candidate


def _sigmoid(x: Tensor) -> Tensor:
    """Sigmoid whose gradient is relatively exact.

    Autograd has ``(1 - y) y`` for the derivative of :func:`torch.sigmoid`, which cancels where ``y`` is near 1.
    """
    return torch.where(x > 0, 1 / (1 + torch.exp(-x.abs())), torch.sigmoid(x))


def _one_minus_exp(x: Tensor) -> Tensor:
    """``1 - e^x`` for ``x <= 0``, with a relatively exact value and gradient.

    Autograd has ``expm1(x) + 1`` for the derivative of :func:`torch.expm1`, which cancels far below zero.
    """
    return torch.where(x > -1, -torch.expm1(x), 1 - torch.exp(x))


def _sqrt(x: Tensor) -> Tensor:
    """Square root with the gradient 0 at 0. Autograd has infinity there, and NaN after a factor of 0."""
    is_zero = x == 0
    return torch.where(is_zero, 0, torch.sqrt(torch.where(is_zero, 1, x)))


@_recurrence
def rglru_scan(recurrence_gate: Tensor, input_gate: Tensor, *, x: Tensor, recurrent_param: Tensor) -> tuple[Tensor, Tensor]:
    """``h = a h + sqrt(1 - a^2) sigmoid(input_gate) x``, ``log a = -8 softplus(recurrent_param) sigmoid(recurrence_gate)``.

    Where ``a`` is 1 the gate and the parameter have the gradient 0.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> gate, x = torch.zeros(1, 3, 1, dtype=torch.float64), torch.ones(1, 3, 1, dtype=torch.float64)
        >>> reference.rglru_scan(gate, gate, x=x, recurrent_param=torch.tensor([0.1], dtype=torch.float64)).flatten()
        tensor([0.4994, 0.5248, 0.5261], dtype=torch.float64)
    """
    log_a = decaying(lambda parameter, gate: -8 * F.softplus(parameter) * _sigmoid(gate), recurrent_param, recurrence_gate)
    return torch.exp(log_a), _sqrt(_one_minus_exp(2 * log_a)) * _sigmoid(input_gate) * x


@_recurrence
def hgrn_scan(log_gate: Tensor, *, x: Tensor) -> tuple[Tensor, Tensor]:
    """``h = e^log_gate h + x``.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> x = torch.ones(1, 3, 1, dtype=torch.float64)
        >>> reference.hgrn_scan(-0.5 * x, x=x).flatten()
        tensor([1.0000, 1.6065, 1.9744], dtype=torch.float64)
    """
    return torch.exp(log_gate), x


@_recurrence
def elu_gru_scan(gate: Tensor, candidate: Tensor) -> tuple[Tensor, Tensor]:
    """``h = (1 - z) h + z (1 + elu(candidate))``, ``z = sigmoid(gate)``.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> gate, candidate = torch.zeros(1, 3, 1, dtype=torch.float64), torch.ones(1, 3, 1, dtype=torch.float64)
        >>> reference.elu_gru_scan(gate, candidate).flatten()
        tensor([1.0000, 1.5000, 1.7500], dtype=torch.float64)
    """
    z = torch.sigmoid(gate)
    return 1 - z, z * (1 + F.elu(candidate))


@_recurrence
def diag_linear_scan(gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """``h = sigmoid(gate) h + x``.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> gate, x = torch.zeros(1, 3, 1, dtype=torch.float64), torch.ones(1, 3, 1, dtype=torch.float64)
        >>> reference.diag_linear_scan(gate, x).flatten()
        tensor([1.0000, 1.5000, 1.7500], dtype=torch.float64)
    """
    return torch.sigmoid(gate), x
