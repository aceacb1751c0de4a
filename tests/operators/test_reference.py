"""The reference against oracles that share no code with it: SciPy, the matrix exponential, mpmath, exact solutions."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
import scipy.linalg
import scipy.signal
import torch
from helpers import METHODS
from operator_spec import tensor_names
from recurrence_helpers import LINEAR, PACKED, RGLRU, at_steps, common_options, every_variant, sequence_names
from recurrence_helpers import make_inputs as make_recurrence_inputs
from selective_scan_helpers import make_inputs

import ssm_kernels
from ssm_kernels import reference
from ssm_kernels.reference import ALIASES, DISCRETIZATIONS, coefficients, discretization_of, phi1

EPS = torch.finfo(torch.float64).eps
# "dirac" is for impulses: the tests of sampled inputs have no place for it.
METHOD_NAMES = sorted([*DISCRETIZATIONS, "gbt(0.7)"])

# Each decade down to 1e-300, both sides of phi1's switch at 0.5, the zeros of the truncated series, and large values.
POINTS = sorted(
    {sign * 10.0**-k for sign in (-1, 1) for k in (*range(1, 20), 100, 300)}
    | {sign * x for sign in (-1, 1) for x in (0.3, 0.49999, 0.5, 0.50001, 1.1, 1.5, 2.7, 3.0, 10.0, 100.0)}
    | {0.0, -1.0, -2.0, -600.0}
)


def relative_to(scale: float, value: float, expected) -> float:
    return float(abs(mpmath.mpf(value) - expected) / scale)


def test_every_method_has_its_row_of_expectations():
    assert set(METHODS) == {*DISCRETIZATIONS, "gbt(0.7)", "dirac"}
    assert ALIASES == {"foh": "zoh_exact"}


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_coefficients_against_mpmath(method):
    z = torch.tensor(POINTS, dtype=torch.float64)
    Abar, gain = discretization_of(method).coefficients(z)
    with mpmath.workdps(400):
        for i, x in enumerate(POINTS):
            if method == "gbt(0.7)" and abs(1 - 0.7 * x) < 0.5:  # the pole magnifies the rounding of alpha z
                continue
            expected_Abar, expected_gain = METHODS[method].oracle(mpmath.mpf(x))
            # Rounding errors have the size of the terms, which are larger than a sum near its zero.
            Abar_scale = abs(expected_Abar) if expected_Abar == mpmath.exp(mpmath.mpf(x)) else max(1, abs(expected_Abar))
            terms = METHODS[method].gain_terms
            gain_scale = abs(expected_gain) if terms is None else max(abs(x) ** k / math.factorial(k + 1) for k in range(terms))
            assert relative_to(Abar_scale, Abar[i].item(), expected_Abar) < 2 * EPS, f"Abar of {method} at z = {x}"
            assert relative_to(gain_scale, gain[i].item(), expected_gain) < 4 * EPS, f"gain of {method} at z = {x}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_phi1_far_from_zero(dtype):
    """1 / -z, and the derivative 1 / z^2, where the powers of the series are no longer finite."""
    z = torch.tensor([-1e4, -1e5, -1e18, -math.inf], dtype=dtype, requires_grad=True)
    value = phi1(z)
    (slope,) = torch.autograd.grad(value.sum(), z)
    torch.testing.assert_close(value, -1 / z.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(slope, z.detach() ** -2, rtol=1e-6, atol=1e-37)


def test_phi1_and_its_derivatives_near_zero_against_mpmath():
    z = torch.tensor([x for x in POINTS if abs(x) <= 3], dtype=torch.float64, requires_grad=True)
    value = phi1(z)
    (first,) = torch.autograd.grad(value.sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z)
    with mpmath.workdps(60):

        def derivative(x, order):
            # sum_k k (k-1) ... z^(k-order) / (k+1)!
            return mpmath.fsum(
                mpmath.ff(k, order) * mpmath.mpf(x) ** (k - order) / mpmath.factorial(k + 1) for k in range(order, 80)
            )

        for i, x in enumerate(z.tolist()):
            # Away from the series the quotient's derivatives lose one and two factors of 1 / z.
            growth = 1.0 if abs(x) < 0.5 else 1 / abs(x)
            assert relative_to(abs(derivative(x, 0)), value[i].item(), derivative(x, 0)) < 4 * EPS
            assert relative_to(abs(derivative(x, 1)), first[i].item(), derivative(x, 1)) < 16 * EPS * (1 + growth)
            assert relative_to(abs(derivative(x, 2)), second[i].item(), derivative(x, 2)) < 64 * EPS * (1 + growth**2)


@pytest.mark.parametrize("method", [name for name in METHOD_NAMES if METHODS[name].scipy])
def test_coefficients_against_scipy(method):
    """SciPy discretizes the system as a matrix, by its own general formulas."""
    scipy_method, alpha = METHODS[method].scipy
    A = np.array([-0.01, -0.5, -1.3, -4.0])
    B = np.array([[1.0], [-2.0], [0.3], [5.0]])
    C, D = np.ones((1, 4)), np.zeros((1, 1))
    for delta in (1e-4, 0.05, 0.7):
        expected_Abar, expected_B, *_ = scipy.signal.cont2discrete((np.diag(A), B, C, D), delta, scipy_method, alpha)
        Abar, c = coefficients(method, torch.tensor(delta, dtype=torch.float64), torch.from_numpy(A))
        np.testing.assert_allclose(np.diag(Abar.numpy()), expected_Abar, rtol=1e-13, atol=1e-15)
        np.testing.assert_allclose(c.numpy()[:, None] * B, expected_B, rtol=1e-12)


@pytest.mark.parametrize(
    ("method", "alpha"), [("euler", 0.0), ("gbt(0.25)", 0.25), ("bilinear", 0.5), ("gbt(0.7)", 0.7), ("backward_euler", 1.0)]
)
def test_generalized_bilinear_family_against_scipy(method, alpha):
    A = np.array([-0.2, -3.0])
    system = (np.diag(A), np.ones((2, 1)), np.ones((1, 2)), np.zeros((1, 1)))
    expected_Abar, expected_B, *_ = scipy.signal.cont2discrete(system, 0.3, "gbt", alpha)
    Abar, c = coefficients(method, torch.tensor(0.3, dtype=torch.float64), torch.from_numpy(A))
    np.testing.assert_allclose(np.diag(Abar.numpy()), expected_Abar, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(c.numpy()[:, None], expected_B, rtol=1e-13)


def test_zoh_exact_is_the_exponential_of_the_augmented_matrix():
    """exp(delta [[A, B], [0, 0]]) = [[Abar, c B], [0, 1]] for an input that is constant over the step; also at A = 0."""
    A = np.array([0.0, -1e-9, -1e-3, -0.5, -7.0, 0.4])
    B = np.array([1.0, 2.0, -1.0, 0.5, 3.0, -2.0])
    for delta in (1e-6, 0.1, 2.0):
        augmented = np.zeros((7, 7))
        augmented[:6, :6], augmented[:6, 6] = np.diag(A), B
        exponential = scipy.linalg.expm(delta * augmented)
        Abar, c = coefficients("zoh_exact", torch.tensor(delta, dtype=torch.float64), torch.from_numpy(A))
        np.testing.assert_allclose(Abar.numpy(), np.diag(exponential)[:6], rtol=1e-13)
        np.testing.assert_allclose(c.numpy() * B, exponential[:6, 6], rtol=1e-13)


def integrate(method: str, u, exact, steps: int, duration: float = 2.0, A: float = -1.3) -> float:
    """Largest error of the state over ``[0, duration]``, the input sampled at the end of each step."""
    delta = duration / steps
    t = torch.arange(1, steps + 1, dtype=torch.float64) * delta
    ones = torch.ones(1, 1, steps, dtype=torch.float64)
    y = reference.selective_scan(
        u(t)[None, None], ones * delta, torch.full((1, 1), A, dtype=torch.float64), ones, ones, discretization=method
    )
    return (y[0, 0] - exact(t)).abs().max().item()


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_observed_order_for_a_smooth_input(method):
    """Every rule that takes one input sample per step is of first order: h' = A h + sin 3t + cos(7t) / 2, h(0) = 0."""
    A = -1.3

    def u(t):
        return torch.sin(3 * t) + torch.cos(7 * t) / 2

    def exact(t):
        # The solution for e^{iwt} is (e^{iwt} - e^{At}) / (iw - A); sine is its imaginary part, cosine the real one.
        def wave(w):
            return (torch.exp(1j * w * t) - torch.exp(A * t)) / (1j * w - A)

        return wave(3).imag + wave(7).real / 2

    errors = [integrate(method, u, exact, steps, A=A) for steps in (64, 128, 256, 512)]
    orders = [math.log2(coarse / fine) for coarse, fine in itertools.pairwise(errors)]
    assert all(0.9 < order < 1.1 for order in orders), f"errors {errors}, orders {orders}"
    assert errors[-1] < 0.01


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_observed_order_for_a_constant_input(method):
    """A constant input takes the sampling away, and leaves the error of the rule itself."""
    A = -1.3
    errors = [integrate(method, torch.ones_like, lambda t: torch.expm1(A * t) / A, steps, A=A) for steps in (8, 16, 32, 64)]
    expected = METHODS[method].step_order
    if expected is None:
        assert max(errors) < 1e-14
        return
    orders = [math.log2(coarse / fine) for coarse, fine in itertools.pairwise(errors)]
    assert all(abs(order - expected) < 0.25 for order in orders), f"errors {errors}, orders {orders}"
    assert abs(orders[-1] - expected) < 0.1


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_dc_gain(method):
    """Under a constant input the state settles at c B u / (1 - Abar), in the continuous system at -B u / A."""
    A = torch.tensor([-0.2, -1.0, -1.9], dtype=torch.float64)
    delta = torch.ones((), dtype=torch.float64)
    Abar, c = coefficients(method, delta, A)
    ratio = c / (1 - Abar) * -A
    if METHODS[method].keeps_dc_gain:
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=1e-14, atol=0)
    else:
        assert (ratio[1:] - 1).abs().min() > 5e-3
    steps = 400
    y = reference.selective_scan(
        torch.ones(1, 1, steps, dtype=torch.float64),
        torch.full((1, 1, steps), 0.5, dtype=torch.float64),
        A[None],
        *(torch.ones(1, 3, dtype=torch.float64),) * 2,
        discretization=method,
    )
    Abar, c = coefficients(method, torch.tensor(0.5, dtype=torch.float64), A)
    torch.testing.assert_close(y[0, 0, -1], (c / (1 - Abar)).sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_stable_where_the_table_says(method):
    lowest = METHODS[method].stable_from
    z = torch.linspace(max(lowest, -50.0), -1e-6, 1001, dtype=torch.float64)
    Abar, _ = coefficients(method, torch.ones((), dtype=torch.float64), z)
    assert Abar.abs().max() <= 1
    if lowest > -math.inf:
        Abar, _ = coefficients(method, torch.ones((), dtype=torch.float64), torch.tensor(lowest - 1e-3, dtype=torch.float64))
        assert Abar.abs() > 1


def test_alias_and_unknown_name():
    delta, A = torch.tensor(0.3, dtype=torch.float64), torch.tensor([-1.0, -2.0], dtype=torch.float64)
    for alias, name in ALIASES.items():
        for x, y in zip(coefficients(alias, delta, A), coefficients(name, delta, A), strict=True):
            assert torch.equal(x, y)
    with pytest.raises(ValueError, match="unknown discretization 'trapezium'") as error:
        coefficients("trapezium", delta, A)
    assert all(repr(name) in str(error.value) for name in [*DISCRETIZATIONS, *ALIASES])


def scan_by_hand(inputs: dict) -> tuple[np.ndarray, np.ndarray]:
    """The scan from its definition, one number at a time, in Python's own arithmetic."""
    arrays = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    u, A = arrays["u"], arrays["A"]
    (batch, dim, seqlen), dstate = u.shape, A.shape[1]
    out, last_state = np.zeros(u.shape), np.zeros((batch, dim, dstate))

    def element(X, b, d, n, t):
        if X.ndim == 2:
            return float(X[d, n])
        return float(X[b, n, t] if X.ndim == 3 else X[b, d * X.shape[1] // dim, n, t])

    for b, d in itertools.product(range(batch), range(dim)):
        h = [0.0] * dstate if arrays["initial_state"] is None else [float(x) for x in arrays["initial_state"][b, d]]
        for t in range(seqlen):
            step = float(arrays["delta"][b, d, t])
            if arrays["delta_bias"] is not None:
                step += float(arrays["delta_bias"][d])
            if arrays["delta_softplus"] and step <= 20:
                step = math.log1p(math.exp(step))
            y = 0.0
            for n in range(dstate):
                Abar, gain = METHODS[arrays["discretization"]].oracle(mpmath.mpf(step) * float(A[d, n]))
                factor = step * float(gain) if METHODS[arrays["discretization"]].input_has_delta else float(gain)
                h[n] = float(Abar) * h[n] + factor * element(arrays["B"], b, d, n, t) * float(u[b, d, t])
                y += element(arrays["C"], b, d, n, t) * h[n]
            if arrays["D"] is not None:
                y += float(arrays["D"][d] * u[b, d, t])
            if arrays["z"] is not None:
                y *= float(arrays["z"][b, d, t]) / (1 + math.exp(-float(arrays["z"][b, d, t])))
            out[b, d, t] = y
        last_state[b, d] = h
    return out, last_state


@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 2},
        {"B": "constant"},
        {"C": "constant", "groups": 1},
        {"B": "constant", "C": "constant", "D": False, "z": False, "delta_bias": False, "initial_state": False},
        {"delta_softplus": False, "groups": 4},
    ],
    ids=str,
)
def test_scan_against_its_definition(method, options):
    inputs = make_inputs(**options, discretization=method)
    out, last_state = reference.selective_scan(**inputs, return_last_state=True)
    expected_out, expected_last_state = scan_by_hand(inputs)
    np.testing.assert_allclose(out.numpy(), expected_out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(last_state.numpy(), expected_last_state, rtol=1e-12, atol=1e-13)


def test_scan_with_zoh_exact_is_exact_for_a_held_input():
    """A held input is what SciPy's lsim integrates with interp=False; its sample i acts over the step that ends at i + 1."""
    generator = np.random.default_rng(0)
    A, B, C, D = np.array([-0.3, -1.1, -2.5]), generator.normal(size=3), generator.normal(size=3), 0.7
    u, delta, steps = generator.normal(size=40), 0.2, 40
    _, _, states = scipy.signal.lsim(
        (np.diag(A), B[:, None], np.eye(3), np.zeros((3, 1))), np.append(u, 0), np.arange(steps + 1) * delta, interp=False
    )
    y, last_state = reference.selective_scan(
        torch.from_numpy(u)[None, None],
        torch.full((1, 1, steps), delta, dtype=torch.float64),
        *(torch.from_numpy(x)[None] for x in (A, B, C)),
        D=torch.tensor([D], dtype=torch.float64),
        discretization="zoh_exact",
        return_last_state=True,
    )
    np.testing.assert_allclose(y[0, 0].numpy(), states[1:] @ C + D * u, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(last_state[0, 0].numpy(), states[-1], rtol=1e-10)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_reference_gradcheck(method):
    """The reference's autograd, phi1's two branches included, against finite differences."""
    inputs = make_inputs(batch=1, dim=2, seqlen=3, dstate=2, discretization=method)
    names = [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]

    def scan(*tensors):
        return reference.selective_scan(**(inputs | dict(zip(names, tensors, strict=True))), return_last_state=True)

    assert torch.autograd.gradcheck(scan, [inputs[name].detach().requires_grad_() for name in names])


# ----- the gated linear recurrences


@every_variant
def test_recurrence_against_its_formula(variant):
    """The formulas of the papers, one number at a time, in mpmath."""
    inputs = make_recurrence_inputs(variant, batch=1, seqlen=9, channels=3)
    h, last_state = variant.reference_function(**inputs, return_last_state=True)
    sequences = [inputs[name].expand(h.shape) for name in variant.recurrence.inputs]
    with mpmath.workdps(40):
        for channel in range(3):
            state = mpmath.mpf(inputs["h0"][0, channel].item())
            for t in range(9):
                numbers = (mpmath.mpf(sequence[0, t, channel].item()) for sequence in sequences)
                a, b = variant.recurrence.formula(*numbers, **variant.fixed)
                state = a * state + b
                assert abs(h[0, t, channel].item() - state) < 1e-14 * max(1, abs(state))
            assert last_state[0, channel] == h[0, -1, channel]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "point", [{"recurrent_param": -1000.0}, {"recurrent_param": -200.0}, {"recurrence_gate": -math.inf}], ids=str
)
def test_rglru_without_decay(point, dtype):
    """Its gradients are finite and the operator's."""
    inputs = make_recurrence_inputs(RGLRU, seqlen=5, dtype=dtype)
    for name, value in point.items():
        inputs[name] = torch.full_like(inputs[name], value)
    names = [name for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    results = []
    for scan in (reference.rglru_scan, ssm_kernels.rglru_scan):
        leaves = {name: inputs[name].clone().requires_grad_() for name in names}
        h, last_state = scan(**inputs | leaves, return_last_state=True)
        gradients = torch.autograd.grad(h.square().sum() + last_state.sum(), list(leaves.values()))
        results.append(dict(zip(names, gradients, strict=True)))
    for name, gradient in results[0].items():
        assert gradient.isfinite().all(), name
        torch.testing.assert_close(gradient, results[1][name], msg=lambda text, name=name: f"{name}: {text}")


def test_rglru_gradients_are_relatively_exact_against_mpmath():
    """A gradient that a strong decay or a saturated gate makes tiny has as many correct digits as any other."""
    recurrence = RGLRU.recurrence
    gates, params = (-30.0, -3.0, 0.0, 0.4, 3.0, 12.0, 30.0), (-30.0, -8.0, -1.0, 0.0, 0.7, 4.0, 15.0)
    points = [(gate, input_gate, 0.8, param) for gate, param in itertools.product(gates, params) for input_gate in (-2.0, 25.0)]
    h0 = torch.tensor(0.3, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for x in torch.tensor(points, dtype=torch.float64).unbind(1)]
    a, b = reference.RECURRENCES["rglru_scan"](**dict(zip(recurrence.inputs, inputs, strict=True)))
    gradients = torch.stack(torch.autograd.grad((a * h0 + b).sum(), inputs), dim=1)
    with mpmath.workdps(100):

        def next_state(*numbers):
            a, b = recurrence.formula(*numbers)
            return a * mpmath.mpf(h0.item()) + b

        for point, gradient in zip(points, gradients, strict=True):
            numbers = [mpmath.mpf(x) for x in point]
            for i, name in enumerate(recurrence.inputs):
                order = [int(i == j) for j in range(len(numbers))]
                expected = mpmath.diff(next_state, tuple(numbers), tuple(order))
                error = relative_to(abs(expected), gradient[i].item(), expected)
                # The absolute rounding of log a, some 8 |recurrent_param| EPS, is a relative error of a = e^(log a).
                assert error < 64 * (8 + abs(point[3])) * EPS, f"gradient of {name} at {point}"


def assert_to_roundings(actual: tuple, expected: tuple) -> None:
    """To roundings: PyTorch evaluates the last elements of a vector with other bits than the rest."""
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)


@every_variant
def test_recurrence_step_by_step(variant):
    inputs = make_recurrence_inputs(variant, seqlen=9)
    whole, last_state = variant.reference_function(**inputs, return_last_state=True)
    state = inputs["h0"]
    for t in range(9):
        h, state = variant.reference_function(
            **at_steps(variant, inputs, slice(t, t + 1)) | {"h0": state}, return_last_state=True
        )
        assert_to_roundings((h, state), (whole[:, t : t + 1], whole[:, t]))
    assert_to_roundings((state,), (last_state,))


@every_variant
def test_recurrence_in_reverse_is_that_of_flipped_inputs(variant):
    inputs = make_recurrence_inputs(variant, seqlen=9, reverse=True)
    flipped = {name: inputs[name].flip(1) for name in sequence_names(variant, inputs)}
    h, last_state = variant.reference_function(**inputs, return_last_state=True)
    expected_h, expected_state = variant.reference_function(**inputs | flipped | {"reverse": False}, return_last_state=True)
    assert_to_roundings((h, last_state), (expected_h.flip(1), expected_state))


@pytest.mark.parametrize("h0", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
@every_variant
def test_recurrence_of_packed_sequences_one_by_one(variant, reverse, h0):
    inputs = make_recurrence_inputs(variant, cu_seqlens=PACKED, reverse=reverse, h0=h0)
    h, last_state = variant.reference_function(**inputs, return_last_state=True)
    assert h.shape == (1, PACKED[-1], 4) and last_state.shape == (len(PACKED) - 1, 4)
    for i, (begin, end) in enumerate(itertools.pairwise(PACKED)):
        alone = at_steps(variant, inputs, slice(begin, end)) | {"cu_seqlens": None}
        alone["h0"] = inputs["h0"][i : i + 1] if h0 else None
        expected = variant.reference_function(**alone, return_last_state=True)
        assert_to_roundings((h[:, begin:end], last_state[i : i + 1]), expected)


@common_options
@every_variant
def test_recurrence_gradcheck(variant, common):
    inputs = make_recurrence_inputs(variant, **({"batch": 1, "seqlen": 3, "channels": 2} | common))
    names = tensor_names(inputs)

    def scan(*tensors):
        return variant.reference_function(**(inputs | dict(zip(names, tensors, strict=True))), return_last_state=True)

    assert torch.autograd.gradcheck(scan, [inputs[name].detach().requires_grad_() for name in names])


def test_recurrence_without_steps():
    """The state stays, and is zero by default, also in packed sequences."""
    inputs = make_recurrence_inputs(LINEAR, seqlen=0)
    h, last_state = reference.linear_scan(**inputs, return_last_state=True)
    assert h.shape == (2, 0, 4) and torch.equal(last_state, inputs["h0"])
    for offsets, sequences in (((0,), 0), ((0, 0, 0), 2)):
        inputs = make_recurrence_inputs(LINEAR, cu_seqlens=offsets, h0=False)
        h, last_state = reference.linear_scan(**inputs, return_last_state=True)
        assert h.shape == (1, 0, 4) and torch.equal(last_state, torch.zeros(sequences, 4, dtype=torch.float64))


def test_dtype_of_recurrences():
    """float32 for any narrower dtype, float64 if any argument is."""
    x = torch.ones(1, 2, 3)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        results = reference.linear_scan(x.to(dtype), x.to(dtype), return_last_state=True)
        assert all(result.dtype == torch.float32 for result in results)
    assert reference.linear_scan(x, x, torch.zeros(1, 3, dtype=torch.float64)).dtype == torch.float64


def test_unknown_candidate_activation():
    x = torch.ones(1, 2, 3)
    with pytest.raises(ValueError, match="unknown candidate_activation 'relu', expected one of: none, g, tanh"):
        reference.mingru_scan(x, x, candidate_activation="relu")
