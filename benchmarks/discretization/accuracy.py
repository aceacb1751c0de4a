"""Part 3: each discretization's error against the exact solution of the continuous system."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import ssm_kernels
from benchmarks.discretization.scans import has_operator, options_of
from benchmarks.discretization.signals import SAMPLINGS, Response, System
from ssm_kernels import reference
from ssm_kernels._discretizations import is_two_sample

DC_STEP = 0.1
"""The largest step of Mamba's initialization."""

_ROUNDING = 1e-12
_ASYMPTOTIC = 0.5  # the order is the slope of the curve up to this |z|
_ASYMPTOTIC_NORM = 1 / 8  # or up to this norm of a matrix, whose powers are not bounded by those of its eigenvalues


@dataclass(frozen=True)
class Convergence:
    """Errors at every step size, for input samples from one place of the step.

    Attributes:
        errors: root mean square of ``out - y`` over channels and step ends, divided by the root mean square of ``y``; float64.
        order: observed order of convergence; None if the errors show none.
        exact: the errors are rounding errors wherever the input is resolved.
    """

    errors: tuple[float, ...]
    order: float | None
    exact: bool


@dataclass(frozen=True)
class Accuracy:
    """One discretization's error.

    Attributes:
        steps: step sizes, coarsest first.
        convergence: for each key of ``SAMPLINGS``.
        dc_step: the recording's step, else ``DC_STEP``.
        dc_gain_error: the gain for a constant input divided by the exact ``-1/A``, minus 1, at step ``dc_step``, for the worst
            A of the system's range, the absolute value for a complex A; NaN if the recurrence is unstable. For a matrix A the
            norm of the error of the whole state that a constant input leads to, over the norm of the exact ``-A^{-1} B``.
        rounding: the same norm of (result in the run's dtype - float64 result) at the finest step, the arguments rounded to
            that dtype; None for float64, and for the reference.
        spectral_radii: of Abar at each of the steps, for a matrix A: the state without input decays where it is below 1.
        by_reference: no operator has the rule for these states, so that the reference computed it.
    """

    method: str
    steps: tuple[float, ...]
    convergence: dict[str, Convergence]
    dc_step: float
    dc_gain_error: float
    rounding: float | None
    spectral_radii: tuple[float, ...] = ()
    by_reference: bool = False

    @property
    def stable_step(self) -> float | None:
        """The largest step up to which every measured step is stable, for a matrix A; None if there is none."""
        stable = None
        for step, radius in sorted(zip(self.steps, self.spectral_radii, strict=True)):
            if not radius < 1:
                break
            stable = step
        return stable

    def headline_step(self, spacing: float | None) -> float:
        """The step of the table's and the figure's errors: the recording's, else the largest of Mamba's initialization."""
        largest = DC_STEP if spacing is None else spacing
        return max((step for step in self.steps if step <= largest * (1 + 1e-9)), default=self.steps[-1])

    def error_at(self, step: float, sampling: str) -> float:
        """The error at the step nearest to ``step``."""
        errors = self.convergence[sampling].errors
        return min(zip(self.steps, errors, strict=True), key=lambda pair: abs(math.log(pair[0] / step)))[1]

    def to_dict(self) -> dict[str, object]:
        """Values for JSON: numbers that are not finite are None."""

        def number(value: float | None) -> float | None:
            return value if value is not None and math.isfinite(value) else None

        return {
            "method": self.method,
            "steps": list(self.steps),
            **{
                f"sampled_at_{sampling}": {"errors": [number(error) for error in found.errors], "order": number(found.order)}
                for sampling, found in self.convergence.items()
            },
            "dc_step": self.dc_step,
            "dc_gain_error": number(self.dc_gain_error),
            "rounding": number(self.rounding),
            "spectral_radii": [number(radius) for radius in self.spectral_radii],
            "computed_by": "reference" if self.by_reference else "operator",
        }


def observed_order(steps: Sequence[float], errors: Sequence[float], largest_step: float) -> float | None:
    """The slope of log(error) over log(step) by least squares, over steps up to ``largest_step`` with errors above rounding."""
    points = [
        (math.log(step), math.log(error))
        for step, error in zip(steps, errors, strict=True)
        if step <= largest_step * (1 + 1e-9) and math.isfinite(error) and error > _ROUNDING
    ]
    if len(points) < 3:
        return None
    x_mean = sum(x for x, _ in points) / len(points)
    y_mean = sum(y for _, y in points) / len(points)
    return sum((x - x_mean) * (y - y_mean) for x, y in points) / sum((x - x_mean) ** 2 for x, _ in points)


def _scan(
    method: str,
    u: Tensor,
    before: Tensor | None,
    step: float,
    system: System,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """The operator on u of (dim, seqlen) with a constant step; float64 on the CPU.

    Rules that read two samples begin with ``before``, (dim,), or repeat the first sample.
    """
    parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    parameter_dtype = parameter_dtype.to_complex() if system.A.is_complex() else parameter_dtype
    u = u[None].to(device, dtype)
    A, B, C = (tensor.to(device, parameter_dtype) for tensor in (system.A, system.B, system.C))
    options = options_of(method, u)
    if is_two_sample(method):
        options["previous"] = "repeat" if before is None else (before[None].to(device, dtype), None)
    out = ssm_kernels.selective_scan(u, torch.full_like(u, step), A, B, C, **options)
    return out[0].double().cpu()


def _reference_scan(method: str, u: Tensor, before: Tensor | None, step: float, system: System) -> Tensor:
    """:func:`ssm_kernels.reference.dense_scan` of the arguments of :func:`_scan`, in float64 on the CPU.

    The step is constant, so that one exponential serves all steps, where ``dense_scan`` takes one for each.
    """
    lam = options_of(method, u)
    factors = reference.dense_coefficients(
        method, torch.tensor(step, dtype=torch.float64), system.A[0], lam=lam["lam"][0, 0, 0] if "lam" in lam else None
    )
    Abar, now, previous = (factor.mT for factor in factors)
    earlier = torch.cat([u[:, :1] if before is None else before[:, None], u[:, :-1]], dim=1)
    samples, earlier = (system.B * values.mT[..., None] for values in (u, earlier))  # (seqlen, dim, dstate)
    inputs = samples @ now + earlier @ previous
    h, states = torch.zeros_like(system.B), []
    for input_t in inputs.unbind(0):
        h = torch.addmm(input_t, h, Abar)
        states.append(h)
    return (torch.stack(states, dim=1) * system.C[:, None]).sum(-1)


def _relative(difference: Tensor, y: Tensor) -> float:
    """Ratio of root mean squares, computed so that large finite values do not overflow."""
    largest = difference.abs().max()
    if not torch.isfinite(largest):
        return math.inf
    return ((difference / largest.clamp(min=1e-300)).square().mean().sqrt() * largest / y.square().mean().sqrt()).item()


def _dc_gain_error(method: str, system: System, step: float, device: torch.device) -> float:
    """Takes the operator's coefficients from single steps of one channel per state; A is evenly spaced over the system's range.

    From the exact fixed point ``-1/A`` one step with input 1 adds the recurrence's own fixed point less the exact one, times
    ``1 - Abar``.
    """
    if system.A.is_complex():
        A = system.A[0].to(device)
    else:
        slowest, fastest = system.A.max().item(), system.A.min().item()
        A = torch.linspace(slowest, fastest, system.A.shape[1], dtype=torch.float64, device=device)
    one, of_step = torch.ones_like(A), torch.ones(1, len(A), 1, dtype=torch.float64, device=device)

    def one_step(u: float, state: Tensor) -> Tensor:
        options = options_of(method, of_step) | {"initial_state": state[None, :, None], "return_last_state": True}
        if is_two_sample(method):
            options["previous"] = "repeat"
        matrices = (A[:, None], one[:, None], one[:, None])
        _, last = ssm_kernels.selective_scan(u * of_step, step * of_step, *matrices, **options)
        return (last if isinstance(last, Tensor) else last.state)[0, :, 0]

    Abar = one_step(0.0, one)
    if not (Abar.abs() < 1).all():
        return math.nan
    error = -A * (one_step(1.0, -1 / A) + 1 / A) / (1 - Abar)
    # 1 - Abar, about -z, has lost as many digits as z is small.
    error[error.abs() < 8 * torch.finfo(torch.float64).eps * (1 + 1 / (step * A).abs())] = 0
    worst = error[error.abs().argmax()]
    return worst.abs().item() if worst.is_complex() else worst.item()


def _matrix_step(method: str, system: System, step: float, u: float, states: Tensor, device: torch.device) -> Tensor:
    """One step of a channel from each of the states, (rows, dstate), with a constant input; by the operator if it has the rule.

    It is float64 on the CPU.
    """
    by_operator = has_operator(method, is_matrix=True)
    scan = ssm_kernels.selective_scan if by_operator else reference.dense_scan
    device = device if by_operator else torch.device("cpu")
    of_step = torch.ones(len(states), 1, 1, dtype=torch.float64, device=device)
    options = options_of(method, of_step) | {"initial_state": states[:, None].to(device), "return_last_state": True}
    if is_two_sample(method):
        options["previous"] = "repeat"
    matrices = (tensor.to(device) for tensor in (system.A, system.B[:1], system.C[:1]))
    _, last = scan(u * of_step, step * of_step, *matrices, **options)
    return (last if isinstance(last, Tensor) else last.state)[:, 0].cpu()


def _decay(method: str, system: System, step: float, device: torch.device) -> tuple[Tensor, float]:
    """Abar, (dstate, dstate), and its spectral radius.

    A rule is a function of the triangular A, so Abar is triangular, and its diagonal has the eigenvalues. An algorithm for
    eigenvalues of any matrix would return worse ones, because those of a matrix far from normal depend on its rounding errors.
    """
    Abar = _matrix_step(method, system, step, 0.0, torch.eye(system.A.shape[-1], dtype=torch.float64), device).mT
    return Abar, Abar.diagonal().abs().max().item()


def _matrix_gain_error(method: str, system: System, step: float, device: torch.device) -> float:
    """As :func:`_dc_gain_error`, for the state that the input of the first channel leads to."""
    Abar, radius = _decay(method, system, step, device)
    if not radius < 1:
        return math.nan
    exact = -torch.linalg.solve(system.A[0], system.B[0])
    moved = _matrix_step(method, system, step, 1.0, exact[None], device)[0] - exact
    matrix = torch.eye(len(exact), dtype=torch.float64) - Abar
    error = (torch.linalg.solve(matrix, moved).norm() / exact.norm()).item()
    # The solve multiplies rounding errors by the condition number.
    return 0.0 if error < 8 * torch.finfo(torch.float64).eps * torch.linalg.cond(matrix).item() else error


def measure_accuracy(
    methods: Sequence[str],
    system: System,
    response: Response,
    *,
    device: torch.device,
    dtype: torch.dtype,
    spacing: float | None = None,
    on_method: Callable[[], None] | None = None,
) -> list[Accuracy]:
    """Measures every method's error at every step, with ``ssm_kernels.selective_scan`` in float64.

    With a matrix A the rules by exponentials of matrices, which the operator does not have, are those of the reference.

    Args:
        spacing: the sample spacing of a recording, the step of the DC gain.
    """
    factors = response.factors()
    steps = tuple(factor * response.step for factor in factors)
    largest_step = min((_ASYMPTOTIC_NORM if system.is_matrix else _ASYMPTOTIC) / system.norm, response.resolved)
    results = []
    for method in methods:
        convergence = {}
        by_reference = not has_operator(method, is_matrix=system.is_matrix)
        for sampling in SAMPLINGS:
            errors = []
            for factor, step in zip(factors, steps, strict=True):
                u, y = response.at(factor, sampling)
                before = response.before(factor, sampling)
                if by_reference:
                    out = _reference_scan(method, u, before, step, system)
                else:
                    out = _scan(method, u, before, step, system, device, torch.float64)
                errors.append(_relative(out - y, y))
            resolved = [error for step, error in zip(steps, errors, strict=True) if step <= response.resolved * (1 + 1e-9)]
            exact = max(resolved) <= _ROUNDING
            convergence[sampling] = Convergence(tuple(errors), observed_order(steps, errors, largest_step), exact)
        rounding = None
        if dtype != torch.float64 and not by_reference:
            exact, rounded = (
                _scan(method, response.u, response.u_start, response.step, system, device, used)
                for used in (torch.float64, dtype)
            )
            rounding = _relative(rounded - exact, exact)
        dc_step = DC_STEP if spacing is None else spacing
        radii: tuple[float, ...] = ()
        if system.is_matrix:
            gain_error = _matrix_gain_error(method, system, dc_step, device)
            radii = tuple(_decay(method, system, step, device)[1] for step in steps)
        else:
            gain_error = _dc_gain_error(method, system, dc_step, device)
        results.append(Accuracy(method, steps, convergence, dc_step, gain_error, rounding, radii, by_reference))
        if on_method is not None:
            on_method()
    return results


_LARGE_DIFFERENCE = 1.5
"""Errors whose ratio is smaller count as about equal."""


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def advice(accuracies: Sequence[Accuracy], system: System, step: float, sampling: str) -> str:
    """Says in two or three sentences what the errors at one step mean for the choice of a rule."""
    errors = {accuracy.method: accuracy.error_at(step, sampling) for accuracy in accuracies}
    fastest = step * system.rates.max().item()
    useful = {method: error for method, error in errors.items() if math.isfinite(error) and error < 1}
    if not useful:
        return (
            f"No rule resolves this input at step {step:g}, where |delta A| reaches {fastest:.2g}: use a smaller step, or a "
            "smaller |A|."
        )
    best = min(useful, key=lambda method: useful[method])
    close = [method for method in useful if useful[method] <= _LARGE_DIFFERENCE * max(useful[best], _ROUNDING)]
    sentences = []
    if len(errors) == 1:
        sentences.append(f"At step {step:g} the error of {best} is {useful[best]:.1e}.")
    elif len(close) == len(errors):
        sentences.append(
            f"At step {step:g} all rules are within a factor of {max(useful.values()) / useful[best]:.2f}: take the fastest, "
            "and a smaller step for a smaller error."
        )
    else:
        others = [method for method in errors if method not in close]
        worst = max(others, key=lambda method: errors[method])
        size = f"{useful[best]:.1e}"
        if not math.isfinite(errors[worst]):
            compared = f"{worst} diverges"
        elif useful[best] <= _ROUNDING:
            size, compared = "that of rounding", f"that of {worst} is {errors[worst]:.1e}"
        else:
            compared = f"that of {worst} is {errors[worst] / useful[best]:.3g} times as large"
        near = [method for method in close if method != best]
        within = f"within a factor of {_LARGE_DIFFERENCE:g} of it: {_listed(near)}; " if near else ""
        sentences.append(f"At step {step:g} {best} has the smallest error, {size}; {within}{compared}.")
    if system.is_matrix:
        sentences.append(
            f"The eigenvalues of delta A reach {fastest:.2g} and its norm {step * system.norm:.2g}: the larger the norm, the "
            "more states may grow before they decay."
        )
    else:
        sentences.append(f"|delta A| reaches {fastest:.2g}; docs/discretizations.md has the range in which each rule is safe.")
    return " ".join(sentences)
