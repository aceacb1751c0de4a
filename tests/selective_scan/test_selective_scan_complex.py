"""Complex states of the selective scan, against the reference, real systems of twice the size, and the scan in pieces."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ssm_kernels import reference, selective_scan, selective_scan_summary
from ssm_kernels.reference import summaries

RULES = ("zoh", "zoh_exact", "bilinear", "trapezoidal", "exp_trapezoidal")
TWO_SAMPLES = ("trapezoidal", "exp_trapezoidal")
every_rule = pytest.mark.parametrize("rule", RULES)
OF_STEPS = ("u", "delta", "B", "C", "z", "lam", "seq_idx")


def make_inputs(
    rule: str,
    *,
    batch: int = 2,
    dim: int = 6,
    seqlen: int = 7,
    dstate: int = 3,
    B: str = "per step",
    C: str = "per step",
    previous: str = "zero",
    sequences: int | None = None,
    dtype: torch.dtype = torch.float64,
    angle: float = 3.0,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Keyword arguments, also of the reference. ``angle``: the scale of the imaginary part of A."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def complex_normal(*shape: int) -> Tensor:
        return torch.complex(normal(*shape, dtype=wide), normal(*shape, dtype=wide))

    def matrix(form: str) -> Tensor:
        shapes = {"per step": (batch, dstate, seqlen), "groups": (batch, 2, dstate, seqlen), "constant": (dim, dstate)}
        return complex_normal(*shapes[form])

    rows = batch if sequences is None else sequences
    A = torch.complex(-normal(dim, dstate, dtype=wide).exp(), angle * normal(dim, dstate, dtype=wide))
    inputs: dict[str, Any] = {
        "u": normal(batch, dim, seqlen),
        "delta": normal(batch, dim, seqlen) - 1,
        "A": A,
        "B": matrix(B),
        "C": matrix(C),
        "D": normal(dim, dtype=wide),
        "z": normal(batch, dim, seqlen),
        "delta_bias": normal(dim, dtype=wide),
        "initial_state": complex_normal(rows, dim, dstate),
        "delta_softplus": True,
        "discretization": rule,
    }
    if rule == "exp_trapezoidal":
        inputs |= {"lam": normal(batch, dim, seqlen), "lam_sigmoid": True}
    if rule in TWO_SAMPLES:
        inputs["previous"] = previous
        if previous == "given":
            sample = None if B == "constant" else complex_normal(rows, *inputs["B"].shape[1:-1])
            inputs["previous"] = (normal(rows, dim), sample)
    return inputs | options


def on(device: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs on the device; skips the test where complex states have no kernels."""
    if device == "cpu":
        return inputs
    one, number = torch.ones(1, 1, 1, device=device), torch.ones(1, 1, dtype=torch.complex64, device=device)
    try:
        selective_scan(one, one, -number, number, number)
    except NotImplementedError as error:
        pytest.skip(str(error))

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(moved(each) for each in value)
        return value.to(device) if isinstance(value, Tensor) else value

    return {name: moved(value) for name, value in inputs.items()}


def widened(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs in float64 and complex128, on the CPU."""

    def wide(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(wide(each) for each in value)
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            return value.cpu() if isinstance(value, Tensor) else value
        return value.to("cpu", torch.complex128 if value.is_complex() else torch.float64)

    return {name: wide(value) for name, value in inputs.items()}


def results_of(function: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs, last states and samples, and all gradients of a sum with random weights."""
    given, leaves, names = dict(inputs), [], []

    def leaf(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            return value
        leaves.append(value.detach().clone(memory_format=torch.preserve_format).requires_grad_())
        names.append(name)
        return leaves[-1]

    for name, value in inputs.items():
        given[name] = (
            tuple(leaf(f"previous_{i}", each) for i, each in enumerate(value))
            if isinstance(value, tuple)
            else leaf(name, value)
        )
    out, last = function(**given, return_last_state=True)
    last = tuple(each for each in last if each is not None) if isinstance(last, tuple) else (last,)
    found = {"out": out} | {f"last_{i}": value for i, value in enumerate(last)}
    generator, loss = torch.Generator().manual_seed(5), torch.zeros((), dtype=torch.float64)
    for value in found.values():
        parts = torch.view_as_real(value) if value.is_complex() else value
        weights = torch.randint(-4, 5, parts.shape, generator=generator).double() / 4
        loss = loss + (parts.double().cpu() * weights).sum()
    gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return found | {f"grad_{name}": gradient for name, gradient in zip(names, gradients, strict=True)}


def relative_error(got: Tensor, expected: Tensor) -> float:
    got, expected = got.detach().cpu().to(expected.dtype), expected.detach()
    return float((got - expected).norm()) / max(float(expected.norm()), 1e-300) if expected.numel() else 0.0


def assert_as_reference(inputs: dict[str, Any], tolerance: float = 1e-10, **tolerances: float) -> None:
    expected = results_of(reference.complex_scan, widened(inputs))
    found = results_of(selective_scan, inputs)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        error = relative_error(found[name], value)
        assert error <= tolerances.get(name, tolerance), (name, error)


@every_rule
def test_reference_is_a_real_system_of_twice_the_size(rule: str) -> None:
    """Re and Im of a state are two real states whose matrix is [[a, -b], [b, a]]; its functions are those of the matrix."""
    inputs = make_inputs(rule, batch=1, dim=2, dstate=2, seqlen=5, B="constant", C="constant", z=None, D=None)
    inputs |= {"delta_bias": None, "delta_softplus": False, "delta": inputs["delta"].exp()}
    found = reference.complex_scan(**inputs)
    lam = torch.sigmoid(inputs["lam"]) if "lam" in inputs else None

    def real(value: Tensor) -> Tensor:  # a complex number as a matrix
        return torch.stack([torch.stack([value.real, -value.imag]), torch.stack([value.imag, value.real])])

    one = torch.eye(2, dtype=torch.float64)
    for channel in range(2):
        expected = torch.zeros(5, dtype=torch.float64)
        for n in range(2):
            A, B, C = (real(inputs[name][channel, n]) for name in "ABC")
            h, u_before = real(inputs["initial_state"][0, channel, n])[:, :1], 0.0
            for t in range(5):
                delta, u = inputs["delta"][0, channel, t], float(inputs["u"][0, channel, t])
                z, input, before = delta * A, B[:, :1] * u, B[:, :1] * u_before
                if rule in ("bilinear", "trapezoidal"):
                    inverse = torch.linalg.inv(one - z / 2)
                    now = input if rule == "bilinear" else (input + before) / 2
                    h = inverse @ ((one + z / 2) @ h + delta * now)
                elif rule == "zoh_exact":
                    block = torch.zeros(3, 3, dtype=torch.float64)
                    block[:2, :2], block[:2, 2:] = z, delta * input
                    h = (torch.linalg.matrix_exp(block) @ torch.cat([h, torch.ones(1, 1, dtype=torch.float64)]))[:2]
                else:
                    decay = torch.linalg.matrix_exp(z)
                    weight = 1.0 if lam is None else float(lam[0, channel, t])
                    h = decay @ (h + delta * (1 - weight) * before) + delta * weight * input
                u_before = u
                expected[t] += 2 * (C @ h)[0, 0]
        assert torch.allclose(found[0, channel], expected, rtol=1e-10, atol=1e-10)


@every_rule
def test_real_numbers_as_complex_ones_are_the_real_scan(rule: str) -> None:
    inputs = make_inputs(rule, seqlen=70, previous="given")
    real = dict(inputs)
    for name in ("A", "B", "C", "initial_state"):
        real[name] = inputs[name].real.clone()
        inputs[name] = torch.complex(real[name], torch.zeros_like(real[name]))
    if rule in TWO_SAMPLES:
        u, sample = inputs["previous"]
        real["previous"] = (u, sample.real.clone())
        inputs["previous"] = (u, torch.complex(sample.real, torch.zeros_like(sample.real)))
    expected = selective_scan(**real)
    assert torch.allclose(selective_scan(**inputs, conjugate_pairs=False), expected, rtol=1e-12, atol=1e-12)


@every_rule
@pytest.mark.parametrize(("B", "C"), [("per step", "groups"), ("constant", "constant"), ("groups", "constant")])
def test_float64_equals_the_reference(rule: str, B: str, C: str) -> None:
    inputs = make_inputs(rule, seqlen=70, B=B, C=C, previous="given")
    assert_as_reference(inputs)


@every_rule
@pytest.mark.parametrize("seqlen", [0, 1, 33])
@pytest.mark.parametrize("dim", [1, 19])
def test_sizes(rule: str, seqlen: int, dim: int) -> None:
    for previous in ("zero", "repeat"):
        inputs = make_inputs(rule, seqlen=seqlen, dim=dim, dstate=5, previous=previous, conjugate_pairs=False)
        assert_as_reference(inputs)


@every_rule
def test_layouts_of_sequences_and_matrices(rule: str) -> None:
    inputs = make_inputs(rule, seqlen=40, previous="given")
    expected = selective_scan(**inputs)
    for name in ("u", "delta", "z", "B", "C"):
        inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    inputs["A"] = inputs["A"].conj().resolve_conj().conj()
    assert torch.equal(selective_scan(**inputs), expected)


@every_rule
@pytest.mark.parametrize("reverse", [False, True])
def test_packed_sequences(rule: str, reverse: bool) -> None:
    cu_seqlens = torch.tensor([0, 5, 5, 45, 70])
    for previous in ("repeat", "given"):
        inputs = make_inputs(rule, batch=1, seqlen=70, sequences=4, previous=previous, cu_seqlens=cu_seqlens, reverse=reverse)
        assert_as_reference(inputs)
    seq_idx = torch.arange(70).div(13, rounding_mode="floor").expand(2, -1).contiguous()
    assert_as_reference(make_inputs(rule, seqlen=70, seq_idx=seq_idx, reverse=reverse))


@every_rule
def test_pieces_equal_the_whole(rule: str) -> None:
    inputs = make_inputs(rule, seqlen=40, previous="given")
    expected, last = selective_scan(**inputs, return_last_state=True)
    for split in (1, 32, 39):
        pieces, state = [], dict(inputs)
        for steps in (slice(0, split), slice(split, None)):
            part = state | {name: state[name][..., steps] for name in OF_STEPS if name in state}
            out, found = selective_scan(**part, return_last_state=True)
            pieces.append(out)
            is_pair = rule in TWO_SAMPLES
            state |= {"initial_state": found.state if is_pair else found}
            if is_pair:
                state["previous"] = (found.u, found.B)
        assert torch.allclose(torch.cat(pieces, -1), expected, rtol=1e-12, atol=1e-12)
        end, expected_end = (found.state, last.state) if rule in TWO_SAMPLES else (found, last)
        assert torch.allclose(end, expected_end, rtol=1e-12, atol=1e-12)


@every_rule
def test_summaries(rule: str) -> None:
    """``decay * h + last_state`` is the last state for any ``h``, in its gradients, too."""

    def last_of(summarize: bool, **given: Any) -> tuple[Tensor, Tensor]:
        if summarize:
            others = ("C", "D", "z", "initial_state", "return_last_state")
            last_state, decay = selective_scan_summary(**{name: each for name, each in given.items() if name not in others})
            last = decay * given["initial_state"] + last_state
        else:
            _, last = selective_scan(**given)
            last = last.state if rule in TWO_SAMPLES else last
        return last.real[:0], last

    for seqlen, dtype, tolerance in ((40, torch.float64, 1e-12), (33, torch.float32, 2e-6), (0, torch.float64, 0)):
        inputs = make_inputs(rule, seqlen=seqlen, dtype=dtype, previous="given")
        seq_idx = (torch.arange(seqlen) > 25).int() * torch.tensor([[1], [0]], dtype=torch.int32)
        for given in (inputs, inputs | {"seq_idx": seq_idx}):
            found, expected = (results_of(partial(last_of, summarize), given) for summarize in (True, False))
            for name, value in expected.items():
                assert relative_error(found[name], value) <= tolerance, name


def test_reference_of_summaries() -> None:
    for rule in ("zoh_exact", "bilinear"):
        inputs = {name: value for name, value in make_inputs(rule).items() if name not in ("C", "D", "z", "initial_state")}
        torch.testing.assert_close(selective_scan_summary(**inputs), summaries.selective_scan_summary(**inputs))
    infinite = inputs | {"delta": torch.full_like(inputs["delta"], torch.inf), "discretization": "zoh"}
    with pytest.raises(NotImplementedError, match=r"^selective_scan_summary: delta_A is not supported with a complex A"):
        selective_scan_summary(**inputs, delta_A=inputs["delta"])
    infinite["A"] = infinite["A"].clone().requires_grad_()
    _, decay = selective_scan_summary(**infinite)
    decay.real.sum().backward()
    assert not decay.any() and not infinite["A"].grad.any()


@every_rule
def test_states_at_positions(rule: str) -> None:
    inputs = make_inputs(rule, seqlen=40, previous="given")
    positions = [0, 3, 40, 32]
    _, expected = reference.complex_scan(**inputs, states_at=positions)
    out, found = selective_scan(**inputs, states_at=positions)
    assert torch.allclose(out, selective_scan(**inputs), rtol=1e-12, atol=1e-12)
    if rule not in TWO_SAMPLES:
        torch.testing.assert_close(reference.selective_scan(**inputs, states_at=positions), (out, found))
    for i, value in enumerate(expected):
        got, state = (found.state[:, i], value.state) if rule in TWO_SAMPLES else (found[:, i], value)
        assert torch.allclose(got, state, rtol=1e-10, atol=1e-12)


@every_rule
def test_low_precision(rule: str) -> None:
    """Against float64 of the same inputs. The gradients of float32 step sizes are sums that cancel."""
    for dtype, out, gradient in ((torch.float32, 1e-6, 1e-6), (torch.bfloat16, 2.5e-3, 2.5e-3), (torch.float16, 4e-4, 4e-4)):
        inputs = make_inputs(rule, seqlen=70, dim=16, dtype=dtype, previous="given")
        of_steps = dict.fromkeys(("grad_delta", "grad_delta_bias"), 2 * gradient)
        assert_as_reference(inputs, gradient, out=out, **of_steps)


@every_rule
def test_angles_of_many_turns(rule: str) -> None:
    """Im(A) delta about 50: a float of that size has an error of 2e-6 radians, which the product with turns does not have."""
    inputs = make_inputs(rule, seqlen=70, dim=16, dtype=torch.float32, angle=50.0, delta_softplus=False, delta_bias=None)
    inputs["delta"] = inputs["delta"].abs() * 0.2 + 0.9
    assert inputs["A"].imag.abs().max() > 50
    assert_as_reference(inputs, 1e-6)


def test_phase_after_a_million_steps() -> None:
    """Rounding errors of an undamped oscillator do not have one sign. (Of a million equal steps they add up.)"""
    steps, angle = 1_000_000, 0.7853
    delta = torch.rand(1, 1, steps, generator=torch.Generator().manual_seed(0)) + 0.5
    u = torch.zeros(1, 1, steps)
    u[..., 0] = 1
    one = torch.ones(1, 1, dtype=torch.complex64)
    A = torch.complex(torch.zeros(1, 1), torch.full((1, 1), angle))
    _, state = selective_scan(u, delta, A, one, one, return_last_state=True)
    expected = torch.polar(torch.ones((), dtype=torch.float64), A.imag.double() * delta[..., 1:].double().sum())
    assert abs(float(torch.angle(state.to(torch.complex128) / expected))) < 1e-3


@every_rule
def test_gradcheck(rule: str) -> None:
    inputs = make_inputs(rule, batch=1, dim=2, seqlen=3, dstate=2, previous="given")
    names = [name for name, value in inputs.items() if isinstance(value, Tensor)]
    given = [inputs[name].requires_grad_() for name in names]
    others = {name: value for name, value in inputs.items() if name not in names}

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, last = selective_scan(**dict(zip(names, tensors, strict=True)), **others, return_last_state=True)
        return out, last.state if rule in TWO_SAMPLES else last

    assert torch.autograd.gradcheck(call, given)


@pytest.mark.parametrize("rule", ["zoh", "trapezoidal"])
def test_small_steps_and_zero_rates(rule: str) -> None:
    """No gradient divides by A, a step or a decay."""
    inputs = make_inputs(rule, seqlen=40, delta_softplus=False, delta_bias=None)
    inputs["delta"] = torch.where(torch.arange(40) % 3 == 0, 0.0, 1e-9).expand_as(inputs["delta"]).double().clone()
    inputs["A"][:, 0] = 0
    assert_as_reference(inputs)
    exact = make_inputs("zoh_exact", seqlen=40, angle=1e-3)
    exact["A"] = exact["A"] * 1e-3
    exact["A"][:, 0] = 0
    assert_as_reference(exact)


def test_large_steps_clear_states() -> None:
    inputs = make_inputs("zoh", seqlen=4, delta_softplus=False, delta_bias=None, z=None, D=None)
    inputs["delta"] = torch.full_like(inputs["delta"], 1e4)
    inputs["u"] = torch.zeros_like(inputs["u"])
    out, state = selective_scan(**inputs, return_last_state=True)
    assert not out.any() and not state.any()


def test_autocast_casts_sequences_alone() -> None:
    inputs = make_inputs("zoh", dtype=torch.float32, seqlen=33)
    with torch.autocast("cpu", torch.bfloat16):
        out, state = selective_scan(**inputs, return_last_state=True)
    assert out.dtype == torch.bfloat16 and state.dtype == torch.complex64
    rounded = {name: inputs[name].bfloat16() for name in ("u", "delta", "z")}
    assert torch.equal(out, selective_scan(**inputs | rounded))


def test_vmap_and_opcheck() -> None:
    inputs = make_inputs("zoh", seqlen=5)
    u = torch.stack([inputs["u"], 2 * inputs["u"]])
    rest = {name: value for name, value in inputs.items() if name != "u"}
    mapped = torch.vmap(lambda each: selective_scan(u=each, **rest))(u)
    assert torch.allclose(mapped[1], selective_scan(u=u[1], **rest), rtol=1e-12)

    def pairs(value: Tensor) -> Tensor:
        return torch.view_as_real(value).flatten(-2)

    B, C = (pairs(inputs[name].movedim(-1, 1)).movedim(1, -1) for name in "BC")
    tensors = [inputs["u"], inputs["delta"], pairs(inputs["A"]), B, C, inputs["D"], inputs["z"], inputs["delta_bias"]]
    arguments = [value.detach().clone().requires_grad_() for value in (*tensors, pairs(inputs["initial_state"]))]
    torch.library.opcheck(
        torch.ops.ssm_kernels.selective_scan_two_sample.default,
        tuple(arguments),
        {"discretization": "zoh", "delta_softplus": True, "is_complex": True},
    )


@pytest.mark.parametrize("rule", ["zoh", "exp_trapezoidal"])
def test_compiled_call(rule: str) -> None:
    inputs = make_inputs(rule, seqlen=5, dtype=torch.float32)
    compiled = torch.compile(selective_scan, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(**inputs), selective_scan(**inputs))
    of_span = {name: value for name, value in inputs.items() if name not in ("C", "D", "z", "initial_state")}
    summary = torch.compile(selective_scan_summary, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(summary(**of_span), selective_scan_summary(**of_span))


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"discretization": "foh_ramp"}, ValueError, "a complex A with discretization 'zoh', .* got 'foh_ramp'"),
        ({"discretization": "euler"}, ValueError, "a complex A with discretization 'zoh', .* got 'euler'"),
        ({"B": torch.ones(2, 3, 7)}, RuntimeError, "expected a complex B with a complex A, got float32"),
        ({"C": torch.ones(2, 3, 7, dtype=torch.complex64)}, RuntimeError, "expected C of dtype complex128, that of A"),
        ({"C": torch.ones(2, 4, 7, dtype=torch.complex128)}, ValueError, r"C of shape .* = \[2, 3, 7\], got \[2, 4, 7\]"),
        ({"A": torch.ones(3, dtype=torch.complex128)}, ValueError, r"A of shape \(dim, dstate\), .* got \[3\]"),
        ({"A": torch.ones(6, 3, 3, dtype=torch.complex128)}, ValueError, r"A of shape \(dim, dstate\), .* got \[6, 3, 3\]"),
        ({"A": torch.ones(6, 129, dtype=torch.complex128)}, ValueError, "expected dstate from 1 to 128 .* got 129"),
        ({"B": torch.ones(7, dtype=torch.complex128)}, ValueError, r"B of shape \(dim, dstate\) or .* got \[7\]"),
        ({"initial_state": torch.ones(1, 6, 3).to(torch.complex128)}, ValueError, r"= \[2, 6, 3\], got \[1, 6, 3\]"),
        ({"discretization": "trapezoidal", "previous": (torch.ones(2, 6).double(), None)}, ValueError, "got None with B of"),
        ({"u": torch.ones(2, 6, 7)}, RuntimeError, "expected a complex A of dtype complex64 beside float32"),
        ({"delta_A": torch.ones(7).double()}, NotImplementedError, "delta_A is not supported with a complex A"),
        ({"lam": torch.ones(7).double()}, ValueError, "expected lam with discretization 'exp_trapezoidal' only, got 'zoh'"),
    ],
)
def test_errors(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"selective_scan: .*{message}"):
        selective_scan(**make_inputs("zoh") | changes)


def test_double_backward_names_the_reference() -> None:
    inputs = make_inputs("zoh")
    A = inputs["A"].requires_grad_()
    (gradient,) = torch.autograd.grad(selective_scan(**inputs).sum(), A, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^selective_scan: double backward .* ssm_kernels.reference.two_sample_scan, which"):
        gradient.abs().sum().backward()


def test_real_calls_have_no_conjugate_pairs() -> None:
    one = torch.ones(1, 1, 1)
    with pytest.raises(ValueError, match="selective_scan: expected conjugate_pairs=False with a complex A only"):
        selective_scan(one, one, one[0], one, one, conjugate_pairs=False)
