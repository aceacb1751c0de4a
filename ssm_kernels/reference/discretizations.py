"""Reference discretizations: the two functions of ``z = delta * A`` by which the rules of ``selective_scan.py`` differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..choices import DiscretizationName
from ..ops._arguments import did_you_mean

__all__ = ["ALIASES", "DISCRETIZATIONS", "Discretization", "coefficients", "decaying", "phi1"]


class Discretization(NamedTuple):
    """A rule that turns the continuous system into a recurrence.

    Attributes:
        name: the string that ``discretization=`` takes.
        coefficients: maps ``z = delta * A`` to ``(Abar, gain)``; the input's factor is ``delta * gain``.
        summary: one line on what the rule is.

    Examples:
        >>> from ssm_kernels import reference
        >>> reference.DISCRETIZATIONS["bilinear"].summary
        'Tustin: the trapezoidal rule for A, one input sample'
        >>> sorted(reference.DISCRETIZATIONS)
        ['backward_euler', 'bilinear', 'euler', 'highorder', 'poly', 'rk4', 'zoh', 'zoh_exact']
    """

    name: str
    coefficients: Callable[[Tensor], tuple[Tensor, Tensor]]
    summary: str


_Coefficients = Callable[[Tensor], tuple[Tensor, Tensor]]
DISCRETIZATIONS: dict[str, Discretization] = {}
ALIASES = {"foh": "zoh_exact"}


def _discretization(name: str, summary: str) -> Callable[[_Coefficients], _Coefficients]:
    def register(function: _Coefficients) -> _Coefficients:
        DISCRETIZATIONS[name] = Discretization(name, function, summary)
        return function

    return register


def decaying(exponent: Callable[..., Tensor], *factors: Tensor, at_plus_infinity: bool = False) -> Tensor:
    """``exponent(*factors)``, with the gradient 0 where it is minus infinity, or, on request, infinity.

    There the function of it has decayed to 0, and so has the gradient, while autograd multiplies that 0 by an infinite factor.

    Examples:
        >>> import torch
        >>> from ssm_kernels.reference.discretizations import decaying
        >>> delta, A = torch.tensor(1.0, requires_grad=True), torch.tensor(-float("inf"))
        >>> torch.autograd.grad(decaying(torch.mul, delta, A).exp(), delta)
        (tensor(0.),)
    """
    value = exponent(*factors)
    decayed = value.isinf() if at_plus_infinity else value == -math.inf
    finite = exponent(*(torch.where(decayed, 1, factor) for factor in factors))
    return torch.where(decayed, value.detach(), finite)


def phi1(z: Tensor) -> Tensor:
    """``(e^z - 1) / z``, continued by 1 at ``z = 0``; differentiable (twice) there as well.

    Below ``|z| = 0.5`` it is the Taylor series ``sum_k z^k / (k + 1)!`` with 18 terms (relative remainder under 1e-21 there),
    because the derivative of the quotient cancels near zero.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> reference.phi1(torch.tensor([0.0, 1e-12, 1.0], dtype=torch.float64))
        tensor([1.0000, 1.0000, 1.7183], dtype=torch.float64)
    """
    near_zero = z.abs() < 0.5
    # Each branch gets a harmless argument where it is not taken: an infinite value there would make the gradient NaN.
    near, away = torch.where(near_zero, z, 0), torch.where(near_zero, 1, z)
    series = torch.zeros_like(z)
    for k in range(17, -1, -1):
        series = 1.0 + series * near / (k + 2)
    return torch.where(near_zero, series, torch.expm1(away) / away)


@_discretization("zoh", "Mamba's rule: zero-order hold for A, Euler for B")
def _zoh(z: Tensor) -> tuple[Tensor, Tensor]:
    return torch.exp(z), torch.ones_like(z)


@_discretization("zoh_exact", "exact for an input that is constant over the step: zero-order hold for A and B")
def _zoh_exact(z: Tensor) -> tuple[Tensor, Tensor]:
    return torch.exp(z), phi1(z)


@_discretization("bilinear", "Tustin: the trapezoidal rule for A, one input sample")
def _bilinear(z: Tensor) -> tuple[Tensor, Tensor]:
    return (1 + z / 2) / (1 - z / 2), 1 / (1 - z / 2)


@_discretization("poly", "zoh_exact with three Taylor terms of phi1")
def _poly(z: Tensor) -> tuple[Tensor, Tensor]:
    return torch.exp(z), 1 + z / 2 + z**2 / 6


@_discretization("highorder", "zoh_exact with two Taylor terms of phi1")
def _highorder(z: Tensor) -> tuple[Tensor, Tensor]:
    return torch.exp(z), 1 + z / 2


@_discretization("rk4", "zoh_exact with four Taylor terms of phi1")
def _rk4(z: Tensor) -> tuple[Tensor, Tensor]:
    return torch.exp(z), 1 + z / 2 + z**2 / 6 + z**3 / 24


@_discretization("euler", "forward Euler")
def _euler(z: Tensor) -> tuple[Tensor, Tensor]:
    return 1 + z, torch.ones_like(z)


@_discretization("backward_euler", "backward (implicit) Euler")
def _backward_euler(z: Tensor) -> tuple[Tensor, Tensor]:
    return 1 / (1 - z), 1 / (1 - z)


def coefficients(discretization: DiscretizationName, delta: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """``(Abar, c)`` of ``h_t = Abar h_{t-1} + c B_t u_t``.

    Args:
        discretization: a key of :data:`DISCRETIZATIONS` or of :data:`ALIASES`.
        delta: step sizes, any shape that broadcasts with ``A``.
        A: the diagonal of the continuous system.

    Raises:
        ValueError: the discretization is unknown.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> delta, A = torch.tensor(0.5, dtype=torch.float64), torch.tensor(-1.0, dtype=torch.float64)
        >>> reference.coefficients("zoh_exact", delta, A)
        (tensor(0.6065, dtype=torch.float64), tensor(0.3935, dtype=torch.float64))
        >>> reference.coefficients("bilinear", delta, A)
        (tensor(0.6000, dtype=torch.float64), tensor(0.4000, dtype=torch.float64))
    """
    name: str = ALIASES.get(discretization, discretization)
    if name not in DISCRETIZATIONS:
        known = sorted([*DISCRETIZATIONS, *ALIASES])
        nearest = did_you_mean(discretization, known)
        raise ValueError(f"unknown discretization {discretization!r}, expected one of {known}{nearest}")
    z = decaying(torch.mul, delta, A, at_plus_infinity=name == "backward_euler")
    Abar, gain = DISCRETIZATIONS[name].coefficients(z)
    return Abar, delta * gain
