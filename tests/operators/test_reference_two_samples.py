"""The reference of discretizations with two input samples: formulas, order, gain, boundaries, packed sequences, gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import mpmath
import numpy as np
import pytest
import scipy.linalg
import scipy.signal
import torch
from torch import Tensor

from ssm_kernels import reference
from ssm_kernels.reference import ScanState, phi2, two_sample_coefficients, two_sample_scan

RULES: dict[str, dict[str, Any]] = {
    "foh_ramp": {},
    "trapezoidal": {},
    "gbt_two_sample": {"alpha": 0.7},
    "exp_trapezoidal": {"lam": 0.5},
}
every_rule = pytest.mark.parametrize("rule", RULES)
POINTS = [-20.0, -16.0, -3.0, -2.0, -1.6, -1.0001, -1.0, -0.9999, -0.3, -1e-4, -1e-9, 0.0, 1e-9, 1e-4, 0.4, 3.0]
EPS = torch.finfo(torch.float64).eps
A_OF_ORDER = -1.3


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def options_of(rule: str) -> dict[str, Any]:
    return {name: number(value) if name == "lam" else value for name, value in RULES[rule].items()}


def oracle(rule: str, z: Any) -> tuple[Any, Any, Any]:
    """``Abar`` and the factors of the current and of the previous sample, for a step of 1, from the formulas."""
    if rule in ("trapezoidal", "gbt_two_sample"):
        alpha = mpmath.mpf("0.5") if rule == "trapezoidal" else mpmath.mpf(RULES[rule]["alpha"])
        return (1 + (1 - alpha) * z) / (1 - alpha * z), alpha / (1 - alpha * z), (1 - alpha) / (1 - alpha * z)
    decay = mpmath.exp(z)
    if rule == "exp_trapezoidal":
        lam = mpmath.mpf(RULES[rule]["lam"])
        return decay, lam, (1 - lam) * decay
    first = (decay - 1) / z if z else mpmath.mpf(1)
    second = (first - 1) / z if z else mpmath.mpf(1) / 2
    return decay, second, first - second


@every_rule
def test_coefficients_against_mpmath(rule):
    z = torch.tensor(POINTS, dtype=torch.float64)
    found = two_sample_coefficients(rule, number(1.0), z, **options_of(rule))
    with mpmath.workdps(60):
        for i, point in enumerate(POINTS):
            for value, expected in zip(found, oracle(rule, mpmath.mpf(point)), strict=True):
                assert abs(mpmath.mpf(value[i].item()) - expected) < 8 * EPS * max(1, abs(expected)), (rule, point)


def test_phi2_and_its_derivative_near_zero():
    z = torch.tensor([x for x in POINTS if abs(x) <= 3], dtype=torch.float64, requires_grad=True)
    value = phi2(z)
    (slope,) = torch.autograd.grad(value.sum(), z)
    with mpmath.workdps(60):
        for i, x in enumerate(z.tolist()):
            terms = [mpmath.mpf(x) ** k / mpmath.factorial(k + 2) for k in range(60)]
            slopes = [k * mpmath.mpf(x) ** (k - 1) / mpmath.factorial(k + 2) for k in range(1, 60)]
            assert abs(value[i].item() - mpmath.fsum(terms)) < 8 * EPS
            assert abs(slope[i].item() - mpmath.fsum(slopes)) < 64 * EPS


def test_first_order_hold_against_scipy():
    """SciPy's state is x - gamma u, its input matrix gamma_0 + Abar gamma, and D + C gamma its direct term."""
    A, B, C = np.array([-0.2, -1.5, -4.0]), np.array([1.0, -2.0, 0.5]), np.array([0.3, 1.0, -1.0])
    for delta in (1e-3, 0.1, 0.9):
        system = (np.diag(A), B[:, None], C[None], np.zeros((1, 1)))
        decay, matrix, _, direct, _ = scipy.signal.cont2discrete(system, delta, "foh")
        Abar, c, c_previous = two_sample_coefficients("foh_ramp", number(delta), torch.from_numpy(A))
        np.testing.assert_allclose(np.diag(decay), Abar.numpy(), rtol=1e-12)
        np.testing.assert_allclose(matrix[:, 0], (c_previous + Abar * c).numpy() * B, rtol=1e-9)
        np.testing.assert_allclose(direct[0, 0], C @ (c.numpy() * B), rtol=1e-9)


def test_first_order_hold_is_exact_for_linear_input():
    """The matrix exponential of the system with the input's value and slope as states, also at A = 0."""
    for A, delta in itertools.product((0.0, -1e-7, -0.4, -3.0, 0.5), (1e-4, 0.2, 1.7)):
        augmented = np.array([[A, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
        end = scipy.linalg.expm(delta * augmented) @ np.array([0.3, 0.7, (1.9 - 0.7) / delta])
        Abar, c, c_previous = two_sample_coefficients("foh_ramp", number(delta), number(A))
        assert abs((Abar * 0.3 + c * 1.9 + c_previous * 0.7).item() - end[0]) < 1e-13


def integrate(rule: str, steps: int, previous: str, lam: float | None = None) -> float:
    """The largest error of h' = A h + cos 3t + cos(7t) / 2, h(0) = 0, over [0, 2], with or without the sample at 0."""
    delta = 2.0 / steps
    t = torch.arange(1, steps + 1, dtype=torch.float64) * delta
    ones = torch.ones(1, 1, steps, dtype=torch.float64)
    sample = (torch.full((1, 1), 1.5, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64))
    options = options_of(rule)
    if lam is not None:
        options["lam"] = number(lam)
    y = two_sample_scan(
        (torch.cos(3 * t) + torch.cos(7 * t) / 2)[None, None],
        ones * delta,
        torch.full((1, 1), A_OF_ORDER, dtype=torch.float64),
        ones,
        ones,
        discretization=rule,
        previous=sample if previous == "true" else previous,
        **options,
    )
    waves = [
        weight * (torch.exp(1j * w * t) - torch.exp(A_OF_ORDER * t)) / (1j * w - A_OF_ORDER) for w, weight in ((3, 1), (7, 0.5))
    ]
    return (y[0, 0] - sum(wave.real for wave in waves)).abs().max().item()


@pytest.mark.parametrize(
    ("rule", "previous", "lam", "order"),
    [
        *((rule, "true", None, 1 if rule == "gbt_two_sample" else 2) for rule in RULES),
        *((rule, "repeat", None, 1 if rule == "gbt_two_sample" else 2) for rule in RULES),
        *((rule, "zero", None, 1) for rule in RULES),
        ("exp_trapezoidal", "true", 0.4, 1),
        ("exp_trapezoidal", "true", 1.0, 1),
    ],
)
def test_order_of_convergence(rule, previous, lam, order):
    """Two samples give order 2, but not without a sample before the first step."""
    errors = [integrate(rule, steps, previous, lam) for steps in (128, 256, 512, 1024)]
    orders = [math.log2(coarse / fine) for coarse, fine in itertools.pairwise(errors)]
    assert abs(orders[-1] - order) < 0.1, f"errors {errors}, orders {orders}"


@every_rule
def test_gain_for_a_constant_input(rule):
    """(c + c_previous) / (1 - Abar) is -1 / A, but for the exponential trapezoid, which is off by (z/2) coth(z/2)."""
    z = torch.tensor([-0.1, -1.6, -16.0], dtype=torch.float64)
    Abar, c, c_previous = two_sample_coefficients(rule, number(1.0), z, **options_of(rule))
    gain = -z * (c + c_previous) / (1 - Abar)
    expected = z / 2 / torch.tanh(z / 2) if rule == "exp_trapezoidal" else torch.ones_like(z)
    torch.testing.assert_close(gain, expected, rtol=1e-13, atol=0)


@every_rule
def test_stability(rule):
    z = -torch.logspace(-4, 4, 200, dtype=torch.float64)
    Abar = two_sample_coefficients(rule, number(1.0), z, **options_of(rule))[0]
    assert Abar.abs().max() <= 1
    expected = {"trapezoidal": -1.0, "gbt_two_sample": -3 / 7}.get(rule, 0.0)
    assert abs(Abar[-1].item() - expected) < 1e-3


def make_inputs(rule: str, *, batch: int = 2, seqlen: int = 7, B: str = "per step", seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    dim, dstate = 4, 3
    matrix = {"per step": (batch, dstate, seqlen), "groups": (batch, 2, dstate, seqlen), "constant": (dim, dstate)}[B]
    inputs: dict[str, Any] = {
        "u": normal(batch, dim, seqlen),
        "delta": normal(batch, dim, seqlen),
        "A": -normal(dim, dstate).exp(),
        "B": normal(*matrix),
        "C": normal(batch, dstate, seqlen),
        "D": normal(dim),
        "z": normal(batch, dim, seqlen),
        "delta_bias": normal(dim),
        "initial_state": normal(batch, dim, dstate),
        "delta_softplus": True,
        "discretization": rule,
    }
    if rule == "gbt_two_sample":
        inputs["alpha"] = 0.7
    if rule == "exp_trapezoidal":
        inputs |= {"lam": normal(batch, dim, seqlen), "lam_sigmoid": True}
    return inputs


def sample_of(inputs: dict[str, Any], seed: int = 1) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    u, B = inputs["u"], inputs["B"]
    matrix = None if B.dim() == 2 else torch.randn(*B.shape[:-1], generator=generator, dtype=torch.float64)
    return torch.randn(*u.shape[:2], generator=generator, dtype=torch.float64), matrix


def cut(inputs: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    of_steps = ("u", "delta", "B", "C", "z", "lam")
    return {name: value[..., begin:end] if name in of_steps and value.dim() > 2 else value for name, value in inputs.items()}


@every_rule
def test_special_cases(rule):
    """Weights of 1 on the current sample leave rules with one sample."""
    one_sample = {
        "gbt_two_sample": ("backward_euler", {"alpha": 1.0}),
        "exp_trapezoidal": ("zoh", {"lam": number(1.0), "lam_sigmoid": False}),
    }
    if rule == "trapezoidal":
        inputs = make_inputs(rule)
        half = two_sample_scan(**inputs | {"discretization": "gbt_two_sample", "alpha": 0.5})
        torch.testing.assert_close(two_sample_scan(**inputs), half, rtol=1e-14, atol=1e-14)
    elif rule in one_sample:
        name, changed = one_sample[rule]
        inputs = make_inputs(rule)
        found = two_sample_scan(**inputs | changed, previous=sample_of(inputs))
        for option in ("alpha", "lam", "lam_sigmoid"):
            inputs.pop(option, None)
        torch.testing.assert_close(found, reference.selective_scan(**inputs | {"discretization": name}), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("B", ["per step", "groups", "constant"])
@every_rule
def test_split_anywhere_is_the_whole(rule, B):
    """Outputs, last state and sample, and all gradients, also those of the state and the sample before the first step."""
    inputs = make_inputs(rule, B=B)
    u_before, B_before = sample_of(inputs)
    names = [name for name, value in inputs.items() if isinstance(value, Tensor)]
    leaves = [inputs[name].clone().requires_grad_() for name in names]
    samples = [x.clone().requires_grad_() for x in (u_before, B_before) if x is not None]
    given = inputs | dict(zip(names, leaves, strict=True))
    previous = (samples[0], samples[1] if len(samples) > 1 else None)

    def results(parts: list[Tensor], last: ScanState) -> list[Tensor]:
        tensors = [torch.cat(parts, -1), *(x for x in last if x is not None)]
        generator = torch.Generator().manual_seed(5)
        loss = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in tensors)
        return [*tensors, *torch.autograd.grad(loss, [*leaves, *samples])]

    whole = results(
        *([x] if i == 0 else x for i, x in enumerate(two_sample_scan(**given, previous=previous, return_last_state=True)))
    )
    for split in (0, 1, 4, 7):
        first, middle = two_sample_scan(**cut(given, 0, split), previous=previous, return_last_state=True)
        later = cut(given, split, 7) | {"initial_state": middle.state}
        second, last = two_sample_scan(**later, previous=(middle.u, middle.B), return_last_state=True)
        for found, expected in zip(results([first, second], last), whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("previous", ["zero", "repeat"])
@every_rule
def test_packed_sequences_are_separate_calls(rule, previous):
    """With cu_seqlens, an empty sequence and one of a single step included, and with seq_idx."""
    inputs = make_inputs(rule, batch=1, seqlen=9) | {"previous": previous}
    ends = [0, 4, 4, 5, 9]
    states = torch.randn(4, 4, 3, dtype=torch.float64)
    packed = inputs | {"initial_state": states, "cu_seqlens": torch.tensor(ends)}
    out, last = two_sample_scan(**packed, return_last_state=True)
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        own = cut(inputs, begin, end) | {"initial_state": states[i : i + 1]}
        own_out, own_last = two_sample_scan(**own, return_last_state=True)
        torch.testing.assert_close(out[..., begin:end], own_out)
        for found, expected in zip(last, own_last, strict=True):
            torch.testing.assert_close(found[i : i + 1], expected)
    seq_idx = torch.tensor([[0, 0, 0, 0, 3, 7, 7, 7, 7]])
    out = two_sample_scan(**inputs, seq_idx=seq_idx)
    for begin, end in ((4, 5), (5, 9)):
        torch.testing.assert_close(out[..., begin:end], two_sample_scan(**cut(inputs, begin, end) | {"initial_state": None}))


@every_rule
def test_reverse_is_the_scan_of_flipped_inputs(rule):
    inputs = make_inputs(rule)
    previous = sample_of(inputs)
    flipped = {
        name: value.flip(-1) if name in cut(inputs, 0, 0) and name in ("u", "delta", "B", "C", "z", "lam") else value
        for name, value in inputs.items()
    }
    out, last = two_sample_scan(**inputs, previous=previous, reverse=True, return_last_state=True)
    expected, expected_last = two_sample_scan(**flipped, previous=previous, return_last_state=True)
    torch.testing.assert_close(out, expected.flip(-1))
    for found, value in zip(last, expected_last, strict=True):
        torch.testing.assert_close(found, value)


@pytest.mark.parametrize("previous", ["zero", "repeat"])
@pytest.mark.parametrize("B", ["per step", "groups", "constant"])
@every_rule
def test_states_at_positions_continue_the_scan(rule, B, previous):
    inputs = make_inputs(rule, B=B)
    out, states = two_sample_scan(**inputs, previous=previous, states_at=[0, 3, 7])
    for position, at in zip([0, 3, 7], states, strict=True):
        later = cut(inputs, position, 7) | {"initial_state": at.state}
        torch.testing.assert_close(two_sample_scan(**later, previous=(at.u, at.B)), out[..., position:])


@every_rule
def test_a_step_of_size_zero_advances_the_sample(rule):
    """The state stays, and the next step reads the sample of the step of size zero."""
    inputs = make_inputs(rule) | {"delta_softplus": False, "delta_bias": None}
    inputs["delta"] = inputs["delta"].abs()
    inputs["delta"][..., 3] = 0
    _, states = two_sample_scan(**inputs, states_at=[3, 4])
    torch.testing.assert_close(states[0].state, states[1].state)
    assert torch.equal(states[1].u, inputs["u"][..., 3])
    later = cut(inputs, 4, 7) | {"initial_state": states[0].state}
    sample = (inputs["u"][..., 3], inputs["B"][..., 3])
    torch.testing.assert_close(two_sample_scan(**later, previous=sample), two_sample_scan(**inputs)[..., 4:])


@every_rule
def test_later_arguments_do_not_reach_earlier_outputs(rule):
    inputs = make_inputs(rule)
    before = two_sample_scan(**inputs)
    for name in ("u", "delta", "B", "C", "z", "lam"):
        if name in inputs:
            changed = inputs[name].clone()
            changed[..., 4] += 1
            assert torch.equal(two_sample_scan(**inputs | {name: changed})[..., :4], before[..., :4])


def test_lam_broadcasts():
    inputs = make_inputs("exp_trapezoidal")
    lam = torch.randn(2, 1, 7, dtype=torch.float64, requires_grad=True)
    expanded = lam.detach().expand(2, 4, 7).clone().requires_grad_()
    outs = [two_sample_scan(**inputs | {"lam": each}) for each in (lam, expanded)]
    torch.testing.assert_close(*outs)
    grads = [torch.autograd.grad(out.square().sum(), each)[0] for out, each in zip(outs, (lam, expanded), strict=True)]
    torch.testing.assert_close(grads[0], grads[1].sum(1, keepdim=True))


@pytest.mark.parametrize("previous", ["zero", "repeat", "given"])
@every_rule
def test_gradcheck(rule, previous):
    inputs = make_inputs(rule, batch=1, seqlen=3)
    names = [name for name, value in inputs.items() if isinstance(value, Tensor)]
    samples = [x for x in sample_of(inputs) if x is not None] if previous == "given" else []

    def scan(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = inputs | dict(zip(names, tensors, strict=False))
        before = tensors[len(names) :] if samples else previous
        out, last = two_sample_scan(**given, previous=before, return_last_state=True)
        return (out, *last)

    assert torch.autograd.gradcheck(scan, [x.clone().requires_grad_() for x in (*(inputs[name] for name in names), *samples)])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"discretization": "simpson"}, "unknown discretization 'simpson'"),
        ({"discretization": "gbt_two_sample"}, "expected alpha with discretization 'gbt_two_sample'"),
        ({"alpha": 0.5}, "expected alpha with discretization 'gbt_two_sample'"),
        ({"discretization": "exp_trapezoidal"}, "expected lam with discretization 'exp_trapezoidal'"),
        ({"reverse": True, "states_at": [0]}, "expected states_at without reverse"),
    ],
)
def test_messages(changed, message):
    with pytest.raises(ValueError, match=message):
        two_sample_scan(**make_inputs("trapezoidal") | changed)


@pytest.mark.parametrize(
    ("B", "previous", "error", "message"),
    [
        ("per step", "repaet", ValueError, "unknown previous 'repaet', expected 'zero', 'repeat' or a pair"),
        ("per step", 3, TypeError, "expected previous to be 'zero', 'repeat' or a pair"),
        ("per step", (torch.zeros(2, 4), None), ValueError, "expected previous to have a sample of B where"),
        ("constant", (torch.zeros(2, 4), torch.zeros(2, 3)), ValueError, "expected previous to have a sample of B where"),
    ],
)
def test_messages_of_previous(B, previous, error, message):
    with pytest.raises(error, match=f"^two_sample_scan: {message}"):
        two_sample_scan(**make_inputs("trapezoidal", B=B), previous=previous)


def test_a_list_is_a_pair():
    inputs = make_inputs("trapezoidal")
    before = sample_of(inputs)
    assert torch.equal(two_sample_scan(**inputs, previous=[*before]), two_sample_scan(**inputs, previous=before))
