"""mlstm_scan against the reference, and the reference against the recurrence in true units."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal, parameter_dtype
from mlstm_helpers import (
    CASES,
    GATES,
    MLSTM,
    SEQUENCES,
    STATES,
    TENSORS,
    assert_close,
    assert_matches_reference,
    at_steps,
    evaluate,
    every_gate,
    every_option,
    make_inputs,
)
from mlstm_rounding import in_two_tf32_parts, mlstm_scan_in_16_bit_products
from operator_spec import with_gradients
from torch import Tensor

import ssm_kernels
from ssm_kernels import reference

OPERATOR = "mlstm_scan"

LENGTHS = (1, 16, 63, 64, 65, 129)
BOUNDS = (0, 1, 1, 16, 79, 143, 208, 208, 300)
# The logarithms of forget gates.
FORGET = (0.0, -1e-4, -5.0, -30.0, -400.0, -torch.inf)


def before_sigmoid(log_forget: float) -> float:
    """The pre-activation whose sigmoid has this logarithm."""
    return log_forget if log_forget < -30 else log_forget - torch.tensor(-log_forget).double().neg().expm1().neg().log().item()


# ----- the reference


def recurrence_in_true_units(inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Beck et al.'s equations 19 to 27 without a stabilizer: the outputs, C and n."""
    q, k, v, i, f = (inputs[name] for name in SEQUENCES)
    C, n, m = (inputs[name] for name in STATES)
    C, n = C * m.exp()[..., None, None], n * m.exp()[..., None]
    q = q * (q.shape[3] ** -0.5 if inputs["scale"] is None else inputs["scale"])
    gains = i.exp() if inputs["input_gate"] == "exp" else torch.sigmoid(i)
    outputs = []
    for t in range(q.shape[1]):
        decay, gain = torch.sigmoid(f[:, t]), gains[:, t]
        C = decay[..., None, None] * C + torch.einsum("bh,bhv,bhk->bhvk", gain, v[:, t], k[:, t])
        n = decay[..., None] * n + gain[..., None] * k[:, t]
        out = torch.einsum("bhvk,bhk->bhv", C, q[:, t])
        divisor = torch.einsum("bhk,bhk->bh", n, q[:, t]).abs().clamp(min=1)
        outputs.append(out / divisor[..., None] if inputs["normalize"] else out)
    return torch.stack(outputs, 1), C, n


@every_gate
def test_reference_is_the_recurrence_in_true_units(options):
    """With eps = 0 the outputs, the states and all gradients are those of a loop without m, which no gradient reaches."""
    inputs = make_inputs(seqlen=9, eps=0.0, **options)
    inputs["i"] *= 2
    leaves, own = with_gradients(inputs, TENSORS), with_gradients(inputs, TENSORS)
    out, (C, n, m) = reference.mlstm_scan(
        *(leaves[name] for name in SEQUENCES),
        eps=0.0,
        initial_states=tuple(leaves[name] for name in STATES),
        return_final_states=True,
        **options,
    )
    expected = recurrence_in_true_units(own)
    found = (out, C * m.exp()[..., None, None], n * m.exp()[..., None])
    if not inputs["normalize"]:
        found, expected = found[:2], expected[:2]
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype) for x in found]
    names = TENSORS if inputs["normalize"] else TENSORS[:-1]
    of_found = torch.autograd.grad(found, [leaves[name] for name in names], weights)
    of_expected = torch.autograd.grad(expected, [own[name] for name in names], weights)
    for actual, wanted in zip((*found, *of_found), (*expected, *of_expected), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-12)


def test_one_step_from_nothing():
    """The layout of C is (value_dim, key_dim); the first step's unit is its input gate, so that the memory is v k^T."""
    inputs = make_inputs(seqlen=1, initial_states=False)
    out, C, n, m = MLSTM(**inputs)
    q, k, v, i = (inputs[name][:, 0] for name in ("q", "k", "v", "i"))
    torch.testing.assert_close(C, v[..., :, None] * k[..., None, :])
    torch.testing.assert_close(n, k)
    assert torch.equal(m, i)
    products = (q * k).sum(-1) * 3**-0.5
    torch.testing.assert_close(out[:, 0], v * (products / (torch.maximum(products.abs(), (-i).exp()) + 1e-6))[..., None])


@every_option
def test_rounded_products_are_the_reference_in_float64(options):
    """The yardstick of CUDA's errors, which rounds nothing of float64 inputs."""
    inputs = make_inputs(seqlen=70, **options)
    cotangents = MLSTM.make_cotangents(inputs)
    found = MLSTM.evaluate(mlstm_scan_in_16_bit_products, inputs, cotangents)
    assert_close(found, MLSTM.evaluate(MLSTM.reference, inputs, cotangents))


def test_numbers_in_two_tf32_parts():
    ulp = 2.0**-23
    numbers = torch.tensor([1.0, 1 + ulp, 1 + 2 * ulp, 1 + 4 * ulp, -1 - 3 * ulp, 0.0])
    assert in_two_tf32_parts(numbers).tolist() == [1.0, 1.0, 1 + 4 * ulp, 1 + 4 * ulp, -1 - 4 * ulp, 0.0]


# ----- the operator against the reference


@every_option
def test_matches_reference(options, device):
    assert_matches_reference(make_inputs(**options, device=device))


@pytest.mark.parametrize("options", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_matches_reference_in_low_precision(options, dtype, device):
    assert_matches_reference(make_inputs(seqlen=40, **options, dtype=dtype, device=device))


@every_gate
@pytest.mark.parametrize("seqlen", LENGTHS)
def test_lengths(seqlen, options, device):
    assert_matches_reference(make_inputs(seqlen=seqlen, batch=1, heads=2, device=device, **options))


@every_gate
@pytest.mark.parametrize("sizes", [(1, 1), (1, 7), (20, 1), (96, 192), (5, 257), (3, 512), (256, 300)])
def test_sizes_of_heads(sizes, options, device):
    """A value_dim over 256 is several heads of the chunked scan, and one that they do not divide is padded."""
    key_dim, value_dim = sizes
    assert_matches_reference(
        make_inputs(seqlen=70, batch=1, heads=2, key_dim=key_dim, value_dim=value_dim, device=device, **options)
    )


@pytest.mark.parametrize("layout", ["transposed", "permuted", "offset", "sliced"])
def test_layouts(layout, device):
    for value_dim in (6, 300):
        assert_matches_reference(make_inputs(seqlen=7, value_dim=value_dim, layout=layout, device=device))


@every_gate
def test_gradcheck(options):
    inputs = make_inputs(seqlen=4, batch=1, heads=2, eps=0.0, **options)
    names = TENSORS if inputs["normalize"] else TENSORS[:-1]

    def results(*tensors: Tensor) -> tuple[Tensor, ...]:
        out, C, n, m = MLSTM(**inputs | dict(zip(names, tensors, strict=True)))
        # In true units, which hold the gradients of m.
        return out, C * m.exp()[..., None, None], *((n * m.exp()[..., None],) if inputs["normalize"] else ())

    leaves = with_gradients(inputs, names)
    if inputs["input_gate"] == "sigmoid":  # m is constant
        assert torch.autograd.gradcheck(results, [leaves[name] for name in names])
    else:
        # No gradient reaches the factor e^m of the states, which is not constant: outputs alone.
        assert torch.autograd.gradcheck(lambda *tensors: results(*tensors)[0], [leaves[name] for name in names])


def test_gradients_of_final_states_in_true_units():
    """Gradients through the C and n of chained calls, whose units depend on the gates, are those of one loop in true units."""
    whole = make_inputs(seqlen=12, eps=0.0)
    leaves = with_gradients(whole, TENSORS)
    states: tuple[Tensor, ...] = tuple(leaves[name] for name in STATES)
    outputs = []
    for begin in range(0, 12, 3):
        out, *states = MLSTM(**at_steps(leaves, begin, begin + 3) | dict(zip(STATES, states, strict=True)))
        outputs.append(out)
    weights = torch.randn(outputs[-1].shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = torch.autograd.grad(outputs[-1], [leaves[name] for name in TENSORS], weights)
    own = with_gradients(whole, TENSORS)
    expected = torch.autograd.grad(recurrence_in_true_units(own)[0][:, -3:], [own[name] for name in TENSORS], weights)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-12)


# ----- sequences


def part(inputs: dict[str, Any], sequence: int, begin: int, end: int) -> dict[str, Any]:
    states = {name: inputs[name][sequence : sequence + 1] for name in STATES if inputs[name] is not None}
    return at_steps(inputs, begin, end) | states | {"cu_seqlens": None}


@every_gate
@pytest.mark.parametrize("initial_states", [False, True])
def test_packed_is_one_by_one(initial_states, options, device):
    """Lengths 1, 0, 15, 63, 64, 65, 0 and 92 in one call: results and all gradients are those of calls for each sequence."""
    inputs = make_inputs(cu_seqlens=BOUNDS, heads=2, initial_states=initial_states, device=device, **options)

    def one_by_one(**leaves: Any) -> tuple[Tensor, ...]:
        found = [MLSTM(**part(leaves, s, *pair)) for s, pair in enumerate(itertools.pairwise(BOUNDS))]
        out, C, n, m = zip(*found, strict=True)
        return torch.cat(out, 1), torch.cat(C), torch.cat(n), torch.cat(m)

    MLSTM.assert_same_as(one_by_one, inputs)


@pytest.mark.parametrize("options", [GATES["exp"], GATES["sigmoid"]], ids=["exp", "sigmoid"])
def test_resets_are_sequences_from_nothing(options, device):
    """seq_idx at steps inside, on and around chunks: results and gradients are those of calls for each part of a row."""
    cuts = (0, 1, 63, 64, 70, 129, 150)
    inputs = make_inputs(batch=1, seqlen=150, heads=2, resets=(cuts[1:-1],), device=device, **options)

    def one_by_one(**leaves: Any) -> tuple[Tensor, ...]:
        outputs, states = [], {name: leaves[name] for name in STATES}
        for begin, end in itertools.pairwise(cuts):
            out, *final = MLSTM(**at_steps(leaves, begin, end) | states | {"seq_idx": None})
            outputs.append(out)
            states = dict.fromkeys(STATES)
        return torch.cat(outputs, 1), *final

    MLSTM.assert_same_as(one_by_one, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_numerators_may_overflow(dtype, device):
    """C q of 2e5 is beyond float16, and so is n q; their quotient is not."""
    inputs = make_inputs(seqlen=70, key_dim=64, value_dim=64, initial_states=False, dtype=dtype, device=device)
    inputs |= {name: inputs[name].abs() * scale + scale / 2 for name, scale in (("q", 24.0), ("k", 24.0), ("v", 2.0))}
    out = MLSTM(**inputs)[0]
    exact = MLSTM.evaluate_in_float64(inputs, None)["out"]
    torch.testing.assert_close(out.double(), exact, rtol=max(4 * torch.finfo(dtype).eps, 5e-6), atol=0)


@every_gate
@pytest.mark.parametrize("cuts", [(1,), (64,), (63, 65), (10, 10, 99)])
def test_split_anywhere_is_the_whole(cuts, options, device):
    inputs = make_inputs(seqlen=100, heads=2, device=device, **options)

    def split(**leaves: Any) -> tuple[Tensor, ...]:
        outputs, states = [], tuple(leaves[name] for name in STATES)
        for begin, end in itertools.pairwise((0, *cuts, 100)):
            out, *states = MLSTM(**at_steps(leaves, begin, end) | dict(zip(STATES, states, strict=True)))
            outputs.append(out)
        return torch.cat(outputs, 1), *states

    MLSTM.assert_same_as(split, inputs)


def test_states_of_sequences_without_steps(device):
    inputs = make_inputs(cu_seqlens=(0, 0, 4, 4), device=device)
    _, *states = MLSTM(**inputs)
    for name, state in zip(STATES, states, strict=True):
        assert torch.equal(state[[0, 2]], inputs[name][[0, 2]]), name
    _, C, n, m = MLSTM(**inputs | dict.fromkeys(STATES))
    assert not C[[0, 2]].any() and not n[[0, 2]].any() and torch.isneginf(m[[0, 2]]).all()


# ----- numerics


def extreme_inputs(log_forget: float, i: float, *, input_gate: str = "exp", **options: Any) -> dict[str, Any]:
    inputs = make_inputs(seqlen=70, heads=2, key_dim=8, value_dim=6, input_gate=input_gate, **options)
    inputs["f"] = inputs["f"].clone()
    inputs["f"][:, 3::7] = before_sigmoid(log_forget)
    inputs["i"] = inputs["i"] * abs(i) if abs(i) != torch.inf else inputs["i"].clone()
    inputs["i"][:, 5::11] = i
    return inputs


@pytest.mark.parametrize("log_forget", FORGET)
@pytest.mark.parametrize(
    ("i", "initial_states"), [(-torch.inf, True), (-60.0, False), (10.0, True), (60.0, False), (1000.0, True)]
)
def test_gates_of_any_size(log_forget, i, initial_states, device):
    """Decays from e^-0.0001 to 0 and input gates from 0 to e^1000: all results are finite, and those of the loop."""
    inputs = extreme_inputs(log_forget, i, initial_states=initial_states, device=device)
    found = assert_matches_reference(inputs)
    assert all(torch.isfinite(value).all() for name, value in found.items() if name != "final_m")


@pytest.mark.parametrize("log_forget", FORGET)
def test_sigmoid_gates_of_any_size(log_forget, device):
    for i in (-torch.inf, -60.0, 60.0):
        assert_matches_reference(extreme_inputs(log_forget, i, input_gate="sigmoid", device=device))


@pytest.mark.parametrize("log_forget", FORGET[1:])
def test_gates_of_any_size_in_float32(log_forget, device):
    assert_matches_reference(extreme_inputs(log_forget, 10.0, dtype=torch.float32, device=device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scale_is_not_rounded(dtype, device):
    """48^-0.5 in bfloat16 is 1.3e-3 too large; the roundings of outputs, of either sign, leave less in their norm."""
    inputs = make_inputs(seqlen=64, key_dim=48, value_dim=64, normalize=False, input_gate="sigmoid", dtype=dtype, device=device)
    scaled, unscaled = (MLSTM(**inputs | {"scale": scale})[0].double().norm() for scale in (48**-0.5, 1.0))
    assert abs(scaled / unscaled * 48**0.5 - 1) < 1e-4


def test_shut_gates_leave_an_empty_memory(device):
    """i of minus infinity from the first step on: the memory stays empty, and its outputs and gradients are 0."""
    inputs = make_inputs(initial_states=False, device=device)
    inputs["i"] = torch.full_like(inputs["i"], -torch.inf)
    inputs["i"][:, 3:] = 1.0
    found = assert_matches_reference(inputs)
    assert not found["out"][:, :3].any() and found["out"][:, 3:].any()
    assert not found["grad_f"][:, :4].any()  # nothing was there to forget
    assert torch.isfinite(found["grad_f"]).all()


def test_an_empty_memory_is_no_initial_states(device):
    """A unit of e^-inf makes any C and n empty; the first forget gate has no gradient."""
    inputs = make_inputs(device=device)
    inputs["initial_m"] = torch.full_like(inputs["initial_m"], -torch.inf)
    found = evaluate(MLSTM, inputs, MLSTM.make_cotangents(inputs))
    assert not found["grad_initial_C"].any() and not found["grad_initial_n"].any() and not found["grad_f"][:, 0].any()
    expected = evaluate(MLSTM, inputs | dict.fromkeys(STATES), MLSTM.make_cotangents(inputs))
    assert_close({name: found[name] for name in expected}, expected)


def test_the_unit_does_not_change_the_results(device):
    """C, n and m in another unit are the same states: with eps = 0 the outputs are the same, and gradients follow the unit."""
    inputs = make_inputs(eps=0.0, seqlen=70, device=device)
    other = inputs | {
        "initial_C": inputs["initial_C"] * 5.0**0.5,
        "initial_n": inputs["initial_n"] * 5.0**0.5,
        "initial_m": inputs["initial_m"] - 0.5 * torch.tensor(5.0, dtype=torch.float64).log().item(),
    }
    weights = (MLSTM.make_cotangents(inputs)[0], None, None, None)
    found, expected = evaluate(MLSTM, other, weights), evaluate(MLSTM, inputs, weights)
    for name in ("out", *(f"grad_{name}" for name in SEQUENCES)):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found["grad_initial_C"] * 5.0**0.5, expected["grad_initial_C"], rtol=1e-10, atol=1e-12)


def test_final_m_is_the_largest_exponent(device):
    inputs = make_inputs(seqlen=200, initial_states=False, device=device)
    log_forget = F.logsigmoid(inputs["f"]).cumsum(1)
    exponents = inputs["i"] + log_forget[:, -1:] - log_forget
    torch.testing.assert_close(MLSTM(**inputs)[3], exponents.amax(1), rtol=1e-12, atol=1e-12)


def test_long_sequences_keep_their_digits_in_float32(device):
    """m of many steps with small gates has few digits left of a step's decay; they are not lost, because m is a unit."""
    inputs = make_inputs(batch=1, seqlen=4000, heads=1, key_dim=4, value_dim=4, initial_states=False, device=device)
    inputs["f"] = torch.full_like(inputs["f"], -3.0)
    inputs["i"] = inputs["i"] - 10
    inputs["i"][:, 0] = 0.0
    exact = MLSTM(**inputs)[0]
    found = MLSTM(**{name: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in inputs.items()})[
        0
    ]
    assert (found - exact).norm() < 2e-6 * exact.norm()


def test_float32_errors(device):
    """n q is a sum of terms that cancel, and gradients divide by it: in float32 sums alone their errors are 2e-6."""
    inputs = make_inputs(
        batch=1, seqlen=300, heads=2, key_dim=256, value_dim=256, initial_states=False, dtype=torch.float32, device=device
    )
    cotangents = MLSTM.make_cotangents(inputs)
    exact = MLSTM.evaluate_in_float64(inputs, cotangents)
    for name, value in evaluate(MLSTM, inputs, cotangents).items():
        assert (value - exact[name]).norm() < 1e-6 * exact[name].norm(), name


# ----- autograd


def test_m_is_constant(device):
    """The gradient of an initial m is zero, and that of the final m, a result of the node like the others, reaches nothing."""
    inputs = make_inputs(device=device)
    *cotangents, of_m = MLSTM.make_cotangents(inputs)
    found = evaluate(MLSTM, inputs, (*cotangents, of_m))
    assert not found["grad_initial_m"].any()
    assert_equal(found, evaluate(MLSTM, inputs, (*cotangents, None)))
    alone = evaluate(MLSTM, inputs, (None, None, None, of_m))
    assert not any(value.any() for name, value in alone.items() if name.startswith("grad_"))


def test_backward_saves_the_inputs_and_a_number_for_each_row(device):
    saved: list[Tensor] = []
    inputs = with_gradients(make_inputs(seqlen=70, device=device, dtype=torch.float32))

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        MLSTM(**inputs)
    addresses = {value.data_ptr() for value in inputs.values() if isinstance(value, Tensor)}
    own = [tensor for tensor in saved if tensor.data_ptr() not in addresses]
    assert [(x.shape, x.dtype) for x in own] == [((2, 70, 4), torch.float32)]


@pytest.mark.parametrize("result", range(3))
@pytest.mark.parametrize("name", TENSORS)
@every_gate
def test_each_gradient_alone(options, name, result, device):
    """Gradients of one argument through one result, as the graph of a part of a model asks for them."""
    inputs = make_inputs(seqlen=6, device=device, **options)
    cotangents = [None if place != result else x for place, x in enumerate(MLSTM.make_cotangents(inputs))]
    if result == 2 and not inputs["normalize"] and name != "initial_n":
        return  # n is passed through
    found = evaluate(MLSTM, inputs, cotangents, [name])
    expected = MLSTM.evaluate(MLSTM.reference, inputs, cotangents, [name])
    key = f"grad_{name}"
    assert_close({key: found[key]}, {key: expected[key]})


def test_dtypes_of_states(device):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        out, *states = MLSTM(**make_inputs(dtype=dtype, device=device))
        assert out.dtype == dtype and {state.dtype for state in states} == {parameter_dtype(dtype)}


def test_initial_states_are_three_tensors():
    inputs = make_inputs()
    tensors = [inputs[name] for name in SEQUENCES]
    for wrong, got in (((inputs["initial_C"],), "1 of them"), (inputs["initial_C"], "Tensor")):
        with pytest.raises(
            ValueError, match=f"^mlstm_scan: expected initial_states to be the three tensors C, n and m, got {got}"
        ):
            ssm_kernels.mlstm_scan(*tensors, initial_states=wrong)
    with pytest.raises(ValueError, match="expected initial states C, n and m or none of them, got C = a tensor, n = None"):
        torch.ops.ssm_kernels.mlstm_scan(*tensors, initial_C=inputs["initial_C"])
