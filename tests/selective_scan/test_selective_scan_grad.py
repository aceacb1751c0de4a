"""selective_scan: gradients, against finite differences and the float64 reference's autograd."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import LAYOUTS, METHODS, arrange, assert_as_accurate
from operator_spec import as_float64
from selective_scan_helpers import (
    CHUNK,
    MINIMAL,
    SELECTIVE_SCAN,
    TENSORS,
    assert_matches_reference,
    evaluate,
    make_cotangents,
    make_inputs,
    reference_scan,
)

from ssm_kernels import selective_scan

OPERATOR = "selective_scan"
pytestmark = pytest.mark.usefixtures("kernel")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

every_method = pytest.mark.parametrize("method", METHODS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

# Each optional argument alone, each form of B and C, then all together.
GRADCHECK = {
    "required_only": MINIMAL,
    "D": MINIMAL | {"D": True},
    "z": MINIMAL | {"z": True},
    "delta_bias": MINIMAL | {"delta_bias": True},
    "delta_softplus": MINIMAL | {"delta_softplus": True},
    "initial_state": MINIMAL | {"initial_state": True},
    "constant_B": MINIMAL | {"B": "constant"},
    "constant_C": MINIMAL | {"C": "constant"},
    "constant_B_and_C": MINIMAL | {"B": "constant", "C": "constant"},
    "one_group": MINIMAL | {"groups": 1},
    "groups": MINIMAL | {"groups": 2, "dim": 4},
    "groups_constant_B": MINIMAL | {"groups": 2, "dim": 4, "B": "constant"},
    "all": {},
    "all_groups": {"groups": 2, "dim": 4},
    "all_constant_B_and_C": {"B": "constant", "C": "constant"},
}


# Every case of one method, and these of all others.
OF_EVERY_METHOD = ("required_only", "constant_B", "constant_B_and_C", "all", "all_groups")


def is_exhaustive(method: str, case: str) -> bool:
    return method != "zoh_exact" and case not in OF_EVERY_METHOD


@pytest.mark.parametrize(
    ("method", "case"),
    [
        pytest.param(method, case, marks=pytest.mark.exhaustive if is_exhaustive(method, case) else ())
        for method, case in itertools.product(METHODS, GRADCHECK)
    ],
)
def test_gradcheck(method, case, device):
    """Gradients flow from out and last_state to every tensor argument, the other result's gradient zero or undefined."""
    inputs = make_inputs(**({"batch": 2, "dim": 3, "seqlen": 4, "dstate": 2} | GRADCHECK[case]), device=device)
    inputs["discretization"] = method
    names = [name for name in TENSORS if inputs[name] is not None]

    def scan(*tensors):
        return selective_scan(**(inputs | dict(zip(names, tensors, strict=True))), return_last_state=True)

    assert torch.autograd.gradcheck(scan, [inputs[name].detach().requires_grad_() for name in names])


@every_method
@every_dtype
def test_gradients_over_several_chunks(dtype, method, device):
    inputs = make_inputs(dim=6, seqlen=150, dstate=5, groups=2, discretization=method, dtype=dtype, device=device)
    results = assert_matches_reference(inputs)
    for name in TENSORS:
        assert results[f"grad_{name}"].dtype == inputs[name].dtype
        assert results[f"grad_{name}"].shape == inputs[name].shape


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        (torch.float64, "contiguous"),
        (torch.float64, "transposed"),
        (torch.float32, "transposed"),
        (torch.bfloat16, "contiguous"),
    ],
    ids=str,
)
@pytest.mark.parametrize("seqlen", sorted({0, 1, 2, 63, 64, 65, 1000, CHUNK - 1, CHUNK, CHUNK + 1}))
def test_lengths(seqlen, dtype, layout, device):
    """On the CPU the longest has three sweeps of five chunks, the last of them incomplete."""
    seqlen = min(seqlen, 12 * CHUNK + 5) if device == "cpu" else seqlen
    inputs = make_inputs(dim=5, seqlen=seqlen, dstate=3, discretization="foh", dtype=dtype, layout=layout, device=device)
    assert_matches_reference(inputs)


@pytest.mark.parametrize("seqlen", [0, 7])
def test_empty_batch(seqlen, device):
    inputs = make_inputs(batch=0, seqlen=seqlen, device=device)
    results = evaluate(SELECTIVE_SCAN, inputs, make_cotangents(inputs))
    for name in TENSORS:
        gradient = results[f"grad_{name}"]
        assert gradient.shape == inputs[name].shape and not gradient.any()


@pytest.mark.parametrize("seqlen", [0, 70])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize(("B", "C"), [*itertools.product(("variable", "constant"), repeat=2)])
@every_dtype
def test_no_channels(dtype, B, C, layout, seqlen, device, uninitialized_memory_is_nan):
    """Nothing depends on a per-step B or C, whose gradients have elements all the same: zeros."""
    for groups in (None, 1, 3):
        inputs = make_inputs(dim=0, seqlen=seqlen, B=B, C=C, groups=groups, dtype=dtype, layout=layout, device=device)
        results = evaluate(SELECTIVE_SCAN, inputs, make_cotangents(inputs))
        for name in TENSORS:
            gradient = results[f"grad_{name}"]
            assert gradient.shape == inputs[name].shape and gradient.dtype == inputs[name].dtype
            assert not gradient.any(), f"grad_{name}"


def test_no_steps(device):
    inputs = make_inputs(seqlen=0, device=device)
    grad_out, grad_last_state = make_cotangents(inputs)
    results = evaluate(SELECTIVE_SCAN, inputs, (grad_out, grad_last_state))
    assert torch.equal(results["grad_initial_state"], grad_last_state)
    assert all(not results[f"grad_{name}"].any() for name in TENSORS if name != "initial_state")


@every_dtype
@pytest.mark.parametrize("groups", [None, 1, 2, 3])
@pytest.mark.parametrize("C", ["variable", "constant"])
@pytest.mark.parametrize("B", ["variable", "constant"])
def test_forms_of_B_and_C(B, C, groups, dtype, device):
    """In both layouts for float64, and on a GPU, whose kernels differ by dtype."""
    for layout in ("contiguous", "transposed") if device == "cuda" or dtype == torch.float64 else ("transposed",):
        inputs = make_inputs(dim=6, seqlen=70, B=B, C=C, groups=groups, dtype=dtype, layout=layout, device=device)
        assert_matches_reference(inputs)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("chosen", [*itertools.product([False, True], repeat=5)], ids=lambda c: "".join("01"[x] for x in c))
def test_every_combination_of_options(chosen, layout, device):
    options = dict(zip(MINIMAL, chosen, strict=True))
    assert_matches_reference(make_inputs(dim=9, seqlen=7, **options, layout=layout, device=device))


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("dstate", [1, 3, 16, 17, 64, 256])
def test_state_sizes(dstate, layout, device):
    for dtype, method in ((torch.float64, "foh"), (torch.float32, "bilinear")):
        inputs = make_inputs(dim=5, seqlen=66, dstate=dstate, discretization=method, dtype=dtype, layout=layout, device=device)
        assert_matches_reference(inputs)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dim", [1, 5, 16, 33, 70])
def test_numbers_of_channels(dim, batch, layout, device):
    for dtype, groups in ((torch.float64, 1), (torch.float64, dim), (torch.float32, None), (torch.bfloat16, 1)):
        inputs = make_inputs(
            batch=batch, dim=dim, seqlen=9, dstate=4, groups=groups, dtype=dtype, layout=layout, device=device, seed=dim
        )
        assert_matches_reference(inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TENSORS)
def test_layout_of_each_argument(name, layout, device):
    inputs = make_inputs(dim=6, seqlen=70, groups=2, device=device)
    inputs[name] = arrange(inputs[name], layout)
    assert_matches_reference(inputs)


@pytest.mark.parametrize(
    ("name", "axis"), [("u", 1), ("delta", 1), ("delta", 2), ("A", 0), ("B", 0), ("B", 3), ("C", 1), ("z", 0), ("D", 0)]
)
def test_expanded_arguments(name, axis, device):
    """The gradient reaches the tensor that was expanded."""
    inputs = make_inputs(dim=6, seqlen=9, groups=2, device=device)
    small = inputs[name].narrow(axis, 0, 1).contiguous()

    def gradient(function):
        leaf = small.clone().requires_grad_()
        function(**(inputs | {name: leaf.expand(inputs[name].shape)})).square().sum().backward()
        return leaf.grad

    torch.testing.assert_close(gradient(selective_scan), gradient(reference_scan), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced", "zero"])
def test_strides_of_the_incoming_gradient(kind, device):
    """`.sum()` sends a gradient of stride zero back."""
    inputs = make_inputs(dim=6, seqlen=70, device=device)
    grad_out, grad_last_state = make_cotangents(inputs)
    if kind in ("transposed", "sliced"):
        cotangents = arrange(grad_out, kind), arrange(grad_last_state, kind)
    else:
        one = torch.full((), kind == "expanded", dtype=torch.float64, device=device)
        cotangents = one.expand(grad_out.shape), one.expand(grad_last_state.shape)
    actual = evaluate(SELECTIVE_SCAN, inputs, cotangents)
    expected = evaluate(SELECTIVE_SCAN.reference, inputs, cotangents)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-11, atol=1e-11)


def test_sum_backward(device):
    inputs = make_inputs(device=device)
    gradients = []
    for function in (selective_scan, reference_scan):
        leaves = {name: inputs[name].detach().requires_grad_() for name in TENSORS}
        out, last_state = function(**(inputs | leaves), return_last_state=True)
        (out.sum() + last_state.sum()).backward()
        gradients.append({name: leaf.grad for name, leaf in leaves.items()})
    for name in TENSORS:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("through", ["out", "last_state"])
@every_method
def test_gradient_through_one_result_only(method, through, device):
    """Arguments that do not influence the result (C, D and z for last_state) get a zero or undefined gradient."""
    inputs = make_inputs(dim=5, seqlen=70, discretization=method, device=device)
    gradients = []
    for function in (selective_scan, reference_scan):
        leaves = {name: inputs[name].detach().requires_grad_() for name in TENSORS}
        results = dict(zip(("out", "last_state"), function(**(inputs | leaves), return_last_state=True), strict=True))
        results[through].square().sum().backward()
        gradients.append({n: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for n, leaf in leaves.items()})
    for name in TENSORS:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], rtol=1e-11, atol=1e-11)


def gradients_of(inputs: dict, wanted: tuple[str, ...]) -> dict[str, torch.Tensor | None]:
    leaves = {name: inputs[name].detach().requires_grad_(name in wanted) for name in TENSORS if inputs[name] is not None}
    out, last_state = selective_scan(**(inputs | leaves), return_last_state=True)
    torch.autograd.backward((out, last_state), make_cotangents(inputs))
    return {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("constant", [False, True], ids=["variable", "constant"])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_gradients_of_a_subset(size, constant, device):
    """Whatever needs gradients, each is bit for bit the same, and the others get none."""
    form = "constant" if constant else "variable"
    inputs = make_inputs(dim=5, seqlen=70, B=form, C=form, dtype=torch.float32, device=device)
    everything = gradients_of(inputs, TENSORS)
    for wanted in itertools.combinations(TENSORS, size):
        for name, gradient in gradients_of(inputs, wanted).items():
            if name in wanted:
                assert torch.equal(gradient, everything[name]), f"grad_{name} when only {wanted} need gradients"
            else:
                assert gradient is None


def test_nothing_needs_a_gradient(device):
    out, last_state = selective_scan(**make_inputs(device=device), return_last_state=True)
    assert not out.requires_grad and out.grad_fn is None
    assert not last_state.requires_grad and last_state.grad_fn is None


def test_softplus_threshold(device):
    """Above 20 softplus is the identity, and its derivative 1; below, the logistic function."""
    steps = torch.tensor([-800.0, -40.0, 0.0, 19.999999, 20.0, 20.000001, 700.0], dtype=torch.float64, device=device)
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(batch=1, dim=3, seqlen=7, delta_bias=False, dtype=dtype, device=device)
        inputs["delta"] = steps.to(dtype).expand(1, 3, 7).contiguous()
        assert_matches_reference(inputs)
        inputs |= {"A": torch.zeros_like(inputs["A"]), "u": torch.ones_like(inputs["u"]), "z": None, "D": None}
        ones = torch.ones_like(inputs["B"])
        # h_t adds delta_t three times over, so that grad_delta is softplus' times 3 times the remaining steps.
        leaf = inputs["delta"].clone().requires_grad_()
        selective_scan(**(inputs | {"delta": leaf, "B": ones, "C": ones})).sum().backward()
        expected = 3 * torch.arange(7, 0, -1, device=device) * torch.where(steps > 20, torch.ones_like(steps), steps.sigmoid())
        torch.testing.assert_close(leaf.grad, expected.to(dtype).expand(1, 3, 7), rtol=1e-6, atol=1e-12)


@every_method
@pytest.mark.parametrize("argument", ["A", "delta"])
def test_towards_zero(argument, method, device):
    tiny = [0.0, -0.0, 1e-300, -1e-300, 1e-38, -1e-30, 1e-16, -1e-12, 1e-8, -1e-6, 1e-4, -1e-3]
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(
            dim=len(tiny), seqlen=9, dstate=2, delta_softplus=False, delta_bias=False, dtype=dtype, device=device
        )
        inputs["discretization"] = method
        values = torch.tensor(tiny, dtype=torch.float64).to(dtype).to(device)
        shaped = values[:, None].expand(-1, 2) if argument == "A" else values[None, :, None].expand(2, -1, 9)
        inputs[argument] = shaped.contiguous()
        results = assert_matches_reference(inputs)
        assert all(value.isfinite().all() for value in results.values())


@every_method
def test_large_z(method, device):
    large = [-1.9, -3.0, -20.0, -80.0, -90.0, -700.0, -800.0, -1e3, 3.0, 20.0]
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(dim=len(large), seqlen=1, dstate=2, **MINIMAL, dtype=dtype, device=device)
        inputs |= {"discretization": method, "initial_state": torch.ones_like(inputs["A"]).expand(2, -1, -1).contiguous()}
        inputs["A"] = torch.tensor(large, dtype=dtype, device=device)[:, None].expand(-1, 2).contiguous()
        inputs["delta"] = torch.ones_like(inputs["delta"])
        cotangents = make_cotangents(inputs)
        actual = evaluate(SELECTIVE_SCAN, inputs, cotangents)
        exact = evaluate(SELECTIVE_SCAN.reference, as_float64(inputs), tuple(x.double() for x in cotangents))
        tolerance = 1e-11 if dtype == torch.float64 else 2e-6
        for name in ("u", "delta", "A", "initial_state"):
            # Channels differ by many orders of magnitude, so each is measured by its own size. What lies below 1e-15 the
            # reference itself does not know: its autograd gets e^z as the difference of two terms of order one.
            axis = 0 if name == "A" else 1
            error, scale = (
                x.movedim(axis, 0).flatten(1).abs().amax(1)
                for x in (actual[f"grad_{name}"].double() - exact[f"grad_{name}"], exact[f"grad_{name}"])
            )
            assert (error <= tolerance * scale + 1e-15).all(), f"grad_{name}: errors {error / scale} at z = {large}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_zoh_exact_keeps_its_digits_between_series_and_quotient(dtype, device):
    """One step from zero: the state is the gain times u B and the gradient of A its derivative, each with float32's digits."""
    z = -torch.logspace(-1.5, 0.5, 64)
    inputs = make_inputs(dim=len(z), seqlen=1, dstate=16, **MINIMAL, dtype=dtype, device=device)
    inputs |= {"discretization": "zoh_exact", "delta": torch.ones_like(inputs["delta"])}
    inputs["A"] = z.to(device)[:, None].expand(-1, 16).contiguous()
    cotangents = make_cotangents(inputs)
    actual = evaluate(SELECTIVE_SCAN, inputs, cotangents)
    exact = evaluate(SELECTIVE_SCAN.reference, as_float64(inputs), tuple(x.double() for x in cotangents))
    for name, tolerance in (("last_state", 2e-6), ("grad_A", 4e-6)):
        axis = 0 if name == "grad_A" else 1
        error, scale = (x.movedim(axis, 0).flatten(1).abs().amax(1) for x in (actual[name].double() - exact[name], exact[name]))
        assert (error <= tolerance * scale).all(), f"{name}: errors {error / scale} at z = {z}"


def test_long_decay_stays_finite(device):
    """Strong decay over a long sequence: Abar underflows to 0; backward must not divide by it."""
    for method in METHODS.keys() - {"euler"}:
        inputs = make_inputs(batch=1, dim=4, seqlen=200, discretization=method, dtype=torch.float32, device=device)
        inputs["A"] = inputs["A"] * 16
        results = assert_matches_reference(inputs)
        assert all(value.isfinite().all() for value in results.values())


@pytest.mark.parametrize(("method", "z"), [("euler", -1.0), ("bilinear", -2.0)])
def test_transition_of_zero(method, z, device):
    """Abar = 0: a backward pass that recovers states by division fails here."""
    inputs = make_inputs(dim=3, seqlen=70, delta_softplus=False, delta_bias=False, discretization=method, device=device)
    inputs["A"] = torch.full_like(inputs["A"], z)
    inputs["delta"] = torch.ones_like(inputs["delta"])
    results = assert_matches_reference(inputs)
    assert all(value.isfinite().all() for value in results.values())


@every_method
def test_gradient_through_carried_states(method, device):
    """Backpropagation over a cut sequence is that over the whole one."""
    inputs = make_inputs(batch=1, dim=5, seqlen=150, discretization=method, device=device)
    whole = evaluate(SELECTIVE_SCAN, inputs, make_cotangents(inputs))

    def in_three_parts(u, delta, A, B, C, D, z, delta_bias, *, initial_state, **options):
        state, outs = initial_state, []
        for steps in (slice(0, CHUNK), slice(CHUNK, CHUNK + 37), slice(CHUNK + 37, None)):
            cut = (x[..., steps] for x in (u, delta, B, C, z))
            u_cut, delta_cut, B_cut, C_cut, z_cut = cut
            out, state = selective_scan(
                u_cut, delta_cut, A, B_cut, C_cut, D, z_cut, delta_bias, initial_state=state, return_last_state=True, **options
            )
            outs.append(out)
        return torch.cat(outs, dim=-1), state

    parts = evaluate(in_three_parts, inputs, make_cotangents(inputs))
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("name", ["u", "delta", "z", "A", "D", "delta_bias", "initial_state", "grad_out", "grad_last_state"])
def test_nan_stays_in_its_channel(name, layout, device):
    """The gradients of B and C sum over channels; every other gradient of every other channel is bit for bit as without."""
    inputs = make_inputs(dim=9, seqlen=70, dtype=torch.float32, layout=layout, device=device)
    cotangents = dict(zip(("grad_out", "grad_last_state"), make_cotangents(inputs), strict=True))
    clean = evaluate(SELECTIVE_SCAN, inputs, tuple(cotangents.values()))
    holder = cotangents if name.startswith("grad") else inputs
    holder[name] = holder[name].clone()
    channel = {"A": (3, 1), "D": (3,), "delta_bias": (3,), "initial_state": (1, 3, 2), "grad_last_state": (1, 3, 2)}
    holder[name][channel.get(name, (1, 3, 20))] = float("nan")
    actual = evaluate(SELECTIVE_SCAN, inputs, tuple(cotangents.values()))
    expected = evaluate(SELECTIVE_SCAN.reference, inputs, tuple(cotangents.values()))
    others = [d for d in range(9) if d != 3]
    for tensor in ("u", "delta", "z", "initial_state"):
        gradient, unaffected = actual[f"grad_{tensor}"], clean[f"grad_{tensor}"]
        assert torch.equal(gradient[:, others], unaffected[:, others]), f"grad_{tensor}"
        if name not in ("A", "D", "delta_bias"):
            assert torch.equal(gradient[0], unaffected[0]), f"grad_{tensor}"
    for tensor in ("A", "D", "delta_bias"):
        assert torch.equal(actual[f"grad_{tensor}"][others], clean[f"grad_{tensor}"][others]), f"grad_{tensor}"
    for tensor in TENSORS:
        assert torch.equal(actual[f"grad_{tensor}"].isnan(), expected[f"grad_{tensor}"].isnan()), f"NaNs of grad_{tensor}"


def test_backward_twice_accumulates(device):
    inputs = make_inputs(device=device)
    leaf = inputs["u"].clone().requires_grad_()
    out = selective_scan(**(inputs | {"u": leaf}))
    out.sum().backward(retain_graph=True)
    once = leaf.grad.clone()
    out.sum().backward()
    assert torch.equal(leaf.grad, 2 * once)


def test_in_place_change_of_a_saved_argument_is_noticed(device):
    inputs = make_inputs(device=device)
    leaf = inputs["u"].clone().requires_grad_()
    out = selective_scan(**(inputs | {"u": leaf}))
    inputs["B"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_accuracy_of_sums_over_long_sequences(device):
    """grad_A and grad_D of a long low-precision sequence are float32 sums, not 16-bit ones."""
    inputs = make_inputs(batch=1, dim=2, seqlen=2000, dstate=2, dtype=torch.bfloat16, device=device)
    cotangents = make_cotangents(inputs)
    actual = evaluate(SELECTIVE_SCAN, inputs, cotangents)
    native = evaluate(SELECTIVE_SCAN.reference, inputs, cotangents)
    exact = evaluate(SELECTIVE_SCAN.reference, as_float64(inputs), tuple(x.double() for x in cotangents))
    for name in ("grad_A", "grad_D", "grad_delta_bias"):
        assert_as_accurate(actual[name], native[name], exact[name], name)
