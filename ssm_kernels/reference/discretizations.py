"""Reference discretizations: the two functions of ``z = delta * A`` by which the rules of ``selective_scan.py`` differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .._discretizations import delta_A_discretizations, discretization_names, split_name, takes_delta_A
from ..choices import DiscretizationName
from ..ops._arguments import did_you_mean

__all__ = [
    "ALIASES",
    "DISCRETIZATIONS",
    "Discretization",
    "coefficients",
    "decaying",
    "discretization_of",
    "exponents_of_A",
    "phi1",
]


class Discretization(NamedTuple):
    """A rule that turns the continuous system into a recurrence.

    Attributes:
        name: the string that ``discretization=`` takes.
        coefficients: maps ``z = delta * A`` to ``(Abar, gain)``; the input's factor is ``delta * gain``.
        summary: one line on what the rule is.
        input_has_delta: False for ``"dirac"``, where the input's factor is the gain, without ``delta``.

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
    input_has_delta: bool = True


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


def _generalized_bilinear(z: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    if alpha in (0, 1):  # zero times infinity would be NaN
        return _backward_euler(z) if alpha else _euler(z)
    return (1 + (1 - alpha) * z) / (1 - alpha * z), 1 / (1 - alpha * z)


def discretization_of(name: str) -> Discretization:
    """The rule of a name: a key of :data:`DISCRETIZATIONS` or :data:`ALIASES`, ``"gbt(0.7)"`` or ``"dirac"``.

    Raises:
        ValueError: the discretization is unknown, or ``"gbt"`` has no number from 0 to 1.

    Examples:
        >>> from ssm_kernels import reference
        >>> reference.discretization_of("gbt(0.7)").summary
        'generalized bilinear transform with alpha = 0.7, one input sample'
    """
    stem, alpha = split_name(ALIASES.get(name, name))
    if stem == "gbt":
        if alpha is None or not 0 <= alpha <= 1:
            raise ValueError(f"expected discretization 'gbt' with alpha, a number from 0 to 1, as in 'gbt(0.7)', got {name!r}")
        summary = f"generalized bilinear transform with alpha = {alpha}, one input sample"
        return Discretization(name, partial(_generalized_bilinear, alpha=alpha), summary)
    if alpha is None and stem == "dirac":
        return Discretization(name, _zoh, "input impulses at the ends of the steps", input_has_delta=False)
    if alpha is not None or stem not in DISCRETIZATIONS:
        known = sorted(discretization_names)
        nearest = did_you_mean(name, known)
        raise ValueError(f"unknown discretization {name!r}, expected one of {known}{nearest}")
    return DISCRETIZATIONS[stem]


def exponents_of_A(discretization: str, delta_A: Tensor, A: Tensor) -> Tensor:
    """``delta_A A``, of which the decay is the exponential. An infinite step is the largest number: a rate of 0 keeps states.

    Raises:
        ValueError: the rule takes no step of its own for A.

    Examples:
        >>> import torch
        >>> from ssm_kernels.reference.discretizations import exponents_of_A
        >>> exponents_of_A("zoh", torch.tensor(2.0), torch.tensor([-1.0, 0.0]))
        tensor([-2., 0.])
    """
    if not takes_delta_A(discretization):
        raise ValueError(f"expected delta_A with one of {[*delta_A_discretizations]}, got {discretization!r}")
    largest = 1e300 if torch.promote_types(delta_A.dtype, A.dtype) == torch.float64 else 1e38
    return decaying(torch.mul, delta_A.clamp(max=largest), A)


def coefficients(
    discretization: DiscretizationName, delta: Tensor, A: Tensor, delta_A: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``(Abar, c)`` of ``h_t = Abar h_{t-1} + c B_t u_t``.

    Args:
        discretization: a name that :func:`discretization_of` takes.
        delta: step sizes, any shape that broadcasts with ``A``.
        A: the diagonal of the continuous system.
        delta_A: the step of ``Abar``, in place of ``delta``, shape of ``delta``.

    Raises:
        ValueError: the discretization is unknown, or takes no ``delta_A``.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> delta, A = torch.tensor(0.5, dtype=torch.float64), torch.tensor(-1.0, dtype=torch.float64)
        >>> reference.coefficients("zoh_exact", delta, A)
        (tensor(0.6065, dtype=torch.float64), tensor(0.3935, dtype=torch.float64))
        >>> reference.coefficients("bilinear", delta, A)
        (tensor(0.6000, dtype=torch.float64), tensor(0.4000, dtype=torch.float64))
    """
    rule = discretization_of(discretization)
    z = decaying(torch.mul, delta, A, at_plus_infinity=rule.name in ("backward_euler", "gbt(1.0)"))
    Abar, gain = rule.coefficients(z)
    if delta_A is not None:
        Abar = torch.exp(exponents_of_A(discretization, delta_A, A))
    return Abar, delta * gain if rule.input_has_delta else gain
