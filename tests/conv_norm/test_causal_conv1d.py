"""causal_conv1d: values, gradients, states, layouts, widths, packed sequences."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conv_helpers import (
    LAYOUTS,
    PACKED,
    TENSORS,
    assert_all_close,
    assert_matches_reference,
    backward_arguments,
    evaluate,
    make_cotangents,
    make_inputs,
    make_step_inputs,
    step,
    with_state,
)
from helpers import DTYPES, arrange, assert_equal, debug_option, says
from helpers import LAYOUTS as ANY_LAYOUTS
from operator_spec import as_float64, tensor_names, with_gradients
from torch import Tensor

from ssm_kernels import causal_conv1d, reference

OPERATOR = "causal_conv1d"
pytestmark = pytest.mark.usefixtures("kernels_by_layout")
ops = torch.ops.ssm_kernels

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_activation = pytest.mark.parametrize("activation", ["silu", None])
# How a row is cut into sequences.
CUTS = {"whole": {}, "seq_idx": {"seq_idx": True}, "packed": {"cu_seqlens": PACKED}}
CUTS["packed_with_seq_idx"] = CUTS["packed"] | CUTS["seq_idx"]
every_cut = pytest.mark.parametrize("cut", CUTS.values(), ids=list(CUTS))
# Sizes of x: whole vectors and several tiles of time, and neither.
SIZES = {"vectors": {"channels": 136, "seqlen": 328}, "odd": {"channels": 21, "seqlen": 75}}
every_size = pytest.mark.parametrize("size", SIZES.values(), ids=list(SIZES))


@every_cut
@every_size
@every_activation
@every_dtype
def test_matches_reference(dtype, activation, size, cut, device):
    for layout, weight_dtype in (("contiguous", None), ("channels_first_memory", dtype)):
        inputs = make_inputs(
            **(size | cut), dtype=dtype, weight_dtype=weight_dtype, activation=activation, layout=layout, device=device
        )
        assert_matches_reference(inputs)


@pytest.mark.cuda
@every_cut
@every_activation
@every_dtype
def test_few_elements_give_the_same_bits(dtype, activation, cut):
    for channels, width in ((136, 4), (136, 3), (768, 2)):
        sizes = {"channels": channels, "seqlen": 40, "width": width}
        inputs = make_inputs(**(sizes | cut), dtype=dtype, activation=activation, device="cuda")
        expected = with_state(**inputs)
        with debug_option("causal_conv1d_kernel", "faster"):
            actual = with_state(**inputs)
        assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_convolution_of_pytorch(dtype, device):
    """Independent of the reference: PyTorch's convolution, padded on the left, without the last steps."""
    inputs = make_inputs(channels=72, seqlen=50, initial_state=False, dtype=dtype, device=device)
    leaves, doubles = with_gradients(inputs), with_gradients(as_float64(inputs))
    out = causal_conv1d(**leaves)
    x, weight, bias = (doubles[name] for name in ("x", "weight", "bias"))
    expected = F.silu(F.conv1d(x.mT, weight[:, None], bias, padding=3, groups=72)[..., :50]).mT
    grad_out, _ = make_cotangents(inputs)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    names = tensor_names(inputs)
    actual = torch.autograd.grad(out, [leaves[name] for name in names], grad_out)
    for name, value, exact in zip(
        names, actual, torch.autograd.grad(expected, (x, weight, bias), grad_out.double()), strict=True
    ):
        scale = exact.abs().max().item()
        torch.testing.assert_close(value.double() / scale, exact / scale, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 9, 40])
@every_size
def test_every_width(size, width, device):
    for dtype, cut in itertools.product((torch.float32, torch.bfloat16), CUTS.values()):
        assert_matches_reference(make_inputs(**(size | cut), width=width, dtype=dtype, device=device))
    assert_matches_reference(make_inputs(channels=21, seqlen=50, width=width, layout="channels_first_memory", device=device))


@pytest.mark.parametrize("layout", [*LAYOUTS, *ANY_LAYOUTS])
@every_cut
def test_layouts_of_x(cut, layout, device):
    for dtype, size in itertools.product((torch.float32, torch.bfloat16), SIZES.values()):
        inputs = make_inputs(**(size | cut), dtype=dtype, layout=layout, device=device)
        results = assert_matches_reference(inputs)
        assert results["grad_x"].shape == inputs["x"].shape


@pytest.mark.parametrize("layout", ["channels_first_memory", "contiguous"])
def test_dense_results_keep_the_layout_of_x(layout, device):
    inputs = make_inputs(channels=16, seqlen=40, layout=layout, device=device)
    results = evaluate(with_state, inputs, make_cotangents(inputs))
    assert results["out"].stride() == results["grad_x"].stride() == inputs["x"].stride()


@pytest.mark.parametrize("layout", ANY_LAYOUTS[1:])
@pytest.mark.parametrize("name", ["weight", "bias", "initial_state", "seq_idx", "cu_seqlens"])
def test_layouts_of_other_arguments(name, layout, device):
    cut = CUTS["packed" if name == "cu_seqlens" else "seq_idx" if name == "seq_idx" else "whole"]
    for size in SIZES.values():
        inputs = make_inputs(**(size | cut), dtype=torch.float32, device=device)
        if layout in ("offset", "sliced") and not inputs[name].is_floating_point():
            wider = torch.stack([inputs[name], torch.full_like(inputs[name], 99)], dim=-1)
            other = inputs | {name: wider[..., 0]}
        else:
            other = inputs | {name: arrange(inputs[name], layout)}
        cotangents = make_cotangents(inputs)
        assert_equal(evaluate(with_state, other, cotangents), evaluate(with_state, inputs, cotangents))


@pytest.mark.parametrize("layout", [*LAYOUTS, *ANY_LAYOUTS[1:]])
def test_layouts_of_the_incoming_gradients(layout, device):
    for dtype, x_layout in itertools.product((torch.float32, torch.bfloat16), ("contiguous", "channels_first_memory")):
        inputs = make_inputs(channels=72, seqlen=75, dtype=dtype, layout=x_layout, device=device)
        grad_out, grad_state = make_cotangents(inputs)
        laid_out = make_inputs(channels=72, seqlen=75, dtype=dtype, layout=layout, device=device)["x"].copy_(grad_out)
        arranged = arrange(grad_state, layout) if layout in ANY_LAYOUTS else grad_state.mT.contiguous().mT
        expected = evaluate(with_state, inputs, (grad_out, grad_state))
        actual = evaluate(with_state, inputs, (laid_out, arranged))
        assert_all_close(actual, expected, 1e-5 if dtype == torch.float32 else 1e-2)


def test_expanded_arguments(device):
    """Strides of zero."""
    inputs = make_inputs(channels=24, seqlen=40, dtype=torch.float32, device=device)
    expanded = inputs | {
        "x": inputs["x"][:1, :1].expand(2, 40, 24),
        "weight": inputs["weight"][:1].expand(24, 4),
        "bias": inputs["bias"][:1].expand(24),
        "initial_state": inputs["initial_state"][..., :1].expand(2, 24, 3),
    }
    assert_matches_reference(expanded)


@pytest.mark.parametrize("seqlen", [0, 1, 2, 3, 4, 5, 31, 32, 33, 35, 64, 129])
def test_every_length(seqlen, device):
    """Shorter than the width, too: the final state then keeps the end of the initial one."""
    for width, channels, initial_state in itertools.product((2, 4, 6), (8, 5), (True, False)):
        for dtype in (torch.float64, torch.float32):
            inputs = make_inputs(
                seqlen=seqlen, channels=channels, width=width, initial_state=initial_state, dtype=dtype, device=device
            )
            final_state = assert_matches_reference(inputs)["final_state"]
            kept = max(0, width - 1 - seqlen)
            if initial_state:
                assert torch.equal(final_state[..., :kept], inputs["initial_state"][..., width - 1 - kept :])
            else:
                assert not final_state[..., :kept].count_nonzero()


@pytest.mark.parametrize("size", [{"batch": 0}, {"channels": 0}, {"seqlen": 0}, {"batch": 0, "seqlen": 0}], ids=str)
def test_empty(size, device):
    for dtype in (torch.float64, torch.bfloat16):
        inputs = make_inputs(**size, dtype=dtype, device=device)
        results = evaluate(with_state, inputs, make_cotangents(inputs))
        assert results["out"].shape == inputs["x"].shape
        for name in tensor_names(inputs):
            assert results[f"grad_{name}"].shape == inputs[name].shape
        for name in ("grad_weight", "grad_bias"):
            assert not results[name].count_nonzero()


@pytest.mark.parametrize("cu_seqlens", [(0,), (0, 0), (0, 0, 0, 5), (0, 5, 5, 5), (0, 1, 1, 2, 2, 3)], ids=str)
def test_sequences_without_steps(cu_seqlens, device):
    """Their initial states are their final states, and gradients pass from the one to the other whole."""
    for initial_state in (True, False):
        inputs = make_inputs(cu_seqlens=cu_seqlens, initial_state=initial_state, device=device)
        results = evaluate(with_state, inputs, make_cotangents(inputs))
        states = [i for i, (a, b) in enumerate(itertools.pairwise(cu_seqlens)) if a == b]
        expected = inputs["initial_state"][states] if initial_state else torch.zeros(len(states), 5, 3).to(inputs["x"])
        assert torch.equal(results["final_state"][states], expected)
        if initial_state:
            assert torch.equal(results["grad_initial_state"][states], make_cotangents(inputs)[1][states])
        if cu_seqlens != (0,):
            assert_matches_reference(inputs)


@pytest.mark.parametrize("cut", ["packed", "packed_with_seq_idx"])
@every_dtype
@every_size
def test_packed_equals_one_by_one(size, dtype, cut, device):
    inputs = make_inputs(**(size | CUTS[cut]), dtype=dtype, device=device)
    cotangents = make_cotangents(inputs)
    packed = evaluate(with_state, inputs, cotangents)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    sums = {name: torch.zeros_like(inputs[name]) for name in ("weight", "bias")}
    for i, (begin, end) in enumerate(itertools.pairwise(PACKED)):
        one = inputs | {
            "x": inputs["x"][:, begin:end],
            "initial_state": inputs["initial_state"][i : i + 1],
            "seq_idx": None if inputs["seq_idx"] is None else inputs["seq_idx"][:, begin:end],
            "cu_seqlens": None,
        }
        alone = evaluate(with_state, one, (cotangents[0][:, begin:end], cotangents[1][i : i + 1]))
        for name in ("out", "grad_x"):
            torch.testing.assert_close(packed[name][:, begin:end], alone[name], rtol=tolerance, atol=tolerance)
        for name in ("final_state", "grad_initial_state"):
            torch.testing.assert_close(packed[name][i : i + 1], alone[name], rtol=tolerance, atol=tolerance)
        for name, total in sums.items():
            total += alone[f"grad_{name}"]
    for name, total in sums.items():
        tolerance = 1e-12 if dtype == torch.float64 else 1e-4
        torch.testing.assert_close(packed[f"grad_{name}"], total, rtol=tolerance, atol=tolerance * total.abs().max().item())


def test_numbers_of_sequences_are_arbitrary(device):
    """A new sequence begins where the number changes: A B A are three, and only equality and the sign count."""
    for dtype, big in ((torch.int32, 2**31 - 1), (torch.int64, 2**40)):
        inputs = make_inputs(batch=1, seqlen=7, channels=8, device=device)
        cuts = [
            torch.tensor([[a, a, b, b, b, a, a]], dtype=dtype, device=device)
            for a, b in ((0, 1), (5, 3), (big, 0), (big - 1, big))
        ]
        first, *others = (evaluate(with_state, inputs | {"seq_idx": cut}, make_cotangents(inputs)) for cut in cuts)
        for other in others:
            assert_equal(other, first)
        apart = inputs | {"cu_seqlens": torch.tensor([0, 2, 5, 7], device=device)}
        state = inputs["initial_state"].new_zeros(3, 8, 3)
        state[0] = inputs["initial_state"][0]
        out, final_state = with_state(**apart | {"initial_state": state})
        torch.testing.assert_close(first["out"], out)
        torch.testing.assert_close(first["final_state"], final_state[2:])


# Lengths of sequences: each number and how many steps have it. Long, one step and two steps of padding: at the begin, between
# sequences and at the end of a row, two paddings in a row, and a row of padding.
PADDED_ROWS = (
    ((0, 70), (-1, 90), (1, 60), (-3, 2), (2, 50), (-1, 56)),
    ((-1, 100), (-2, 1), (4, 3), (-1, 1), (5, 1), (-9, 40), (4, 182)),
    ((-1, 328),),
)


def make_padded_inputs(device: str, *, packed: bool, dtype: torch.dtype, **options) -> dict:
    """Inputs of 328 steps with PADDED_ROWS; packed: the first row alone, and cu_seqlens that cut its padding and sequences."""
    cut = {"cu_seqlens": (0, 40, 100, 100, 150, 200, 328)} if packed else {"batch": 3, "seqlen": 328}
    inputs = make_inputs(**(options | cut), dtype=dtype, device=device)
    rows = [[number for number, steps in row for _ in range(steps)] for row in PADDED_ROWS[: 1 if packed else 3]]
    return inputs | {"seq_idx": torch.tensor(rows, dtype=torch.int64 if packed else torch.int32, device=device)}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", [1, 4, 6])
@pytest.mark.parametrize("layout", ["contiguous", "odd_slice", "channels_first_memory"])
def test_padding(layout, width, packed, device):
    """Its outputs and gradients are zero, as are states after it, and nothing depends on what it holds."""
    for dtype, channels in itertools.product((torch.float32, torch.bfloat16), (136, 21)):
        inputs = make_padded_inputs(device, packed=packed, dtype=dtype, width=width, channels=channels, layout=layout)
        cotangents = make_cotangents(inputs)
        results = assert_matches_reference(inputs)
        padding = inputs["seq_idx"] < 0
        for name in ("out", "grad_x"):
            assert not results[name][padding].any() and results[name][~padding].any()
        # The third packed sequence has no steps, so that its final state is the initial one.
        is_zero = padding[0, inputs["cu_seqlens"][1:].long() - 1] if packed else padding[:, -1]
        is_zero[2] &= not packed
        assert width == 1 or torch.equal(results["final_state"].flatten(1).any(1), ~is_zero)
        # Backward must not multiply the NaN that it reads by zero.
        expected = evaluate(with_state, inputs, cotangents)
        for tensor in (inputs["x"], cotangents[0]):
            tensor.masked_fill_(padding[..., None], math.nan)
        assert_equal(evaluate(with_state, inputs, cotangents), expected)


@pytest.mark.parametrize("packed", [False, True])
def test_padding_leaves_the_bits_of_sequences(packed, device):
    """The outputs and gradients of a sequence are the same with padding beside it as with other sequences there."""
    for dtype, layout in itertools.product((torch.float32, torch.bfloat16), ("contiguous", "channels_first_memory")):
        inputs = make_padded_inputs(device, packed=packed, dtype=dtype, channels=24, layout=layout)
        cotangents, is_step = make_cotangents(inputs), inputs["seq_idx"] >= 0
        numbers = inputs["seq_idx"].where(is_step, 100 - inputs["seq_idx"])
        actual, expected = (evaluate(with_state, inputs | {"seq_idx": ids}, cotangents) for ids in (inputs["seq_idx"], numbers))
        for name in ("out", "grad_x"):
            assert torch.equal(actual[name][is_step], expected[name][is_step])


@pytest.mark.parametrize("bounds", [(0, 40, 75), (0, 1, 2, 3, 75), (0, 33, 34, 70, 75)], ids=str)
@pytest.mark.parametrize("width", [2, 4, 6])
def test_pieces_with_states_equal_the_whole(width, bounds, device):
    """Gradients pass through the states, too."""
    inputs = with_gradients(make_inputs(seqlen=75, channels=16, width=width, device=device))
    leaves = [inputs[name] for name in TENSORS]
    grad_out, grad_state = make_cotangents(inputs)
    whole = with_state(**inputs)
    outputs, state = [], inputs["initial_state"]
    for begin, end in itertools.pairwise(bounds):
        out, state = with_state(**inputs | {"x": inputs["x"][:, begin:end], "initial_state": state})
        outputs.append(out)
    pieces = (torch.cat(outputs, dim=1), state)
    for actual, expected in zip(pieces, whole, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for actual, expected in zip(
        torch.autograd.grad(pieces, leaves, (grad_out, grad_state)),
        torch.autograd.grad(whole, leaves, (grad_out, grad_state)),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 6])
def test_not_finite_stays_in_its_channel_and_window(width, value, device):
    for layout, cut, dtype in itertools.product(
        ("contiguous", "channels_first_memory"), ({}, CUTS["packed"]), (torch.float32, torch.float64)
    ):
        size = {"channels": 24, "seqlen": 75, "width": width, "dtype": dtype, "activation": None, "layout": layout}
        inputs = make_inputs(**(size | cut), initial_state=False, device=device)
        clean = evaluate(with_state, inputs, make_cotangents(inputs))
        x = inputs["x"].clone()
        x[0, 34, 9] = value
        end = min(34 + width, 40 if cut else 75)
        dirty = evaluate(with_state, inputs | {"x": x}, make_cotangents(inputs))
        reached = torch.zeros_like(clean["out"], dtype=torch.bool)
        reached[0, 34:end, 9] = True
        assert not dirty["out"][reached].isfinite().any()
        assert torch.equal(dirty["out"][~reached], clean["out"][~reached])
        assert torch.equal(dirty["grad_x"], clean["grad_x"])  # without an activation x is not read for it
        other_channels = torch.arange(24, device=device) != 9
        assert torch.equal(dirty["grad_weight"][other_channels], clean["grad_weight"][other_channels])
        assert not dirty["grad_weight"][9].isfinite().any()
        # The same of an incoming gradient.
        grad_out, grad_state = make_cotangents(inputs)
        bad = grad_out.clone()
        bad[0, 34, 9] = value
        dirty = evaluate(with_state, inputs, (bad, grad_state))
        begin = max(34 - width + 1, 9 if cut else 0)
        reached = torch.zeros_like(clean["out"], dtype=torch.bool)
        reached[0, begin:35, 9] = True
        assert not dirty["grad_x"][reached].isfinite().any()
        assert torch.equal(dirty["grad_x"][~reached], clean["grad_x"][~reached])


def test_states_and_steps_of_other_sequences_are_not_read(device):
    """Memory before a sequence, and the states of other sequences, may be NaN."""
    inputs = make_inputs(cu_seqlens=(0, 20, 40, 75), channels=24, dtype=torch.float32, device=device)
    clean = evaluate(with_state, inputs, make_cotangents(inputs))
    x, state = inputs["x"].clone(), inputs["initial_state"].clone()
    x[:, 20:40] = math.nan
    state[1] = math.nan
    dirty = evaluate(with_state, inputs | {"x": x, "initial_state": state}, make_cotangents(inputs))
    for name in ("out", "grad_x"):
        assert torch.equal(dirty[name][:, :20], clean[name][:, :20])
        assert torch.equal(dirty[name][:, 40:], clean[name][:, 40:])
    for name in ("final_state", "grad_initial_state"):
        assert torch.equal(dirty[name][[0, 2]], clean[name][[0, 2]])


@every_cut
@pytest.mark.parametrize("width", [1, 2, 4, 6])
def test_gradcheck(width, cut, device):
    cut = {"cu_seqlens": (0, 0, 2, 7, 7)} if "cu_seqlens" in cut else cut
    for bias, activation, initial_state in itertools.product((True, False), ("silu", None), (True, False)):
        options = {"batch": 2, "seqlen": 7, "channels": 3, "bias": bias, "initial_state": initial_state}
        inputs = with_gradients(make_inputs(**(options | cut), width=width, activation=activation, device=device))
        names = tensor_names(inputs)

        def function(*tensors, inputs=inputs, names=names):
            return with_state(**inputs | dict(zip(names, tensors, strict=True)))

        assert torch.autograd.gradcheck(function, [inputs[name] for name in names])


@pytest.mark.parametrize("names", [s for n in (1, 2, 3) for s in itertools.combinations(TENSORS, n)], ids="-".join)
@every_size
def test_needs_grad(size, names, device):
    """A gradient is the same, bit for bit, whichever others are asked for."""
    for dtype, cut in ((torch.float32, {}), (torch.bfloat16, CUTS["packed"])):
        inputs = make_inputs(**(size | cut), dtype=dtype, device=device)
        cotangents = make_cotangents(inputs)
        everything = evaluate(with_state, inputs, cotangents)
        for name, value in evaluate(with_state, inputs, cotangents, names).items():
            assert torch.equal(value, everything[name]), name


@every_activation
@pytest.mark.parametrize("through", ["out", "final_state"])
def test_gradient_through_one_result(through, activation, device):
    for size, cut in itertools.product(SIZES.values(), CUTS.values()):
        inputs = make_inputs(**(size | cut), activation=activation, device=device)
        cotangents = make_cotangents(inputs)
        chosen = (cotangents[0], None) if through == "out" else (None, cotangents[1])
        zeros = tuple(torch.zeros_like(x) if y is None else x for x, y in zip(cotangents, chosen, strict=True))
        assert_all_close(evaluate(with_state, inputs, chosen), evaluate(with_state, inputs, zeros), 1e-13)


@pytest.mark.parametrize("layout", ["slice", "odd_slice", "contiguous", "channels_first_slice", "channels_first_memory"])
@every_cut
def test_gradient_into_a_part_of_a_tensor(cut, layout, device):
    """_causal_conv1d_bwd_out does not write to memory beside the gradient."""
    for dtype, size in itertools.product((torch.float32, torch.bfloat16), SIZES.values()):
        inputs = make_inputs(**(size | cut), dtype=dtype, layout=layout, device=device)
        arguments = backward_arguments(inputs)
        expected = ops._causal_conv1d_bwd(*arguments)
        grad_x = make_inputs(**(size | cut), dtype=dtype, layout=layout, device=device)["x"]
        base = grad_x if grad_x._base is None else grad_x._base
        before = base.clone()
        results = ops._causal_conv1d_bwd_out(*arguments, grad_x)
        torch.testing.assert_close(grad_x, expected[0], rtol=0, atol=0)
        assert all(torch.equal(a, b) for a, b in zip(results, expected[1:], strict=True))
        # Outside of it the bits are as before.
        after = base.clone()
        for whole in (before, after):
            whole.as_strided(grad_x.shape, grad_x.stride(), grad_x.storage_offset()).zero_()
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("needs_state", [True, False])
@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("layout", ["slice", "odd_slice", "channels_first_memory"])
@every_cut
def test_two_gradients_of_the_output(cut, layout, width, needs_state, device):
    """_causal_conv1d_bwd_out adds grad_out_2 to grad_out, in the kernel where that can, with any of its layouts."""
    for dtype, size in itertools.product((torch.float64, torch.float32, torch.bfloat16), SIZES.values()):
        inputs = make_inputs(**(size | cut), width=width, dtype=dtype, layout=layout, device=device)
        if not needs_state:
            inputs["initial_state"] = None
        arguments = backward_arguments(inputs, (True, True, True, needs_state))
        first, second = arguments[0], torch.randn_like(arguments[0])
        total, grad_x = (first.double() + second.double()).to(dtype), torch.empty_like(inputs["x"])
        found = ops._causal_conv1d_bwd_out(*arguments, grad_x, second)
        expected = ops._causal_conv1d_bwd(total, *arguments[1:])
        # The sum of low-precision gradients is rounded here alone.
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.6e-2}[dtype]
        for actual, wanted in zip((grad_x, *found), expected, strict=True):
            if wanted.numel() > 0:
                assert (actual.double() - wanted.double()).norm() <= tolerance * wanted.double().norm()


@every_cut
@every_size
def test_the_same_bits_every_time(size, cut, device, uninitialized_memory_is_nan):
    for dtype, layout in itertools.product((torch.float32, torch.bfloat16), ("slice", "channels_first_memory")):
        inputs = make_inputs(**({"batch": 3} | size | cut), dtype=dtype, layout=layout, device=device)
        cotangents = make_cotangents(inputs)
        first = evaluate(with_state, inputs, cotangents)
        for _ in range(3):
            assert_equal(evaluate(with_state, inputs, cotangents), first)


def test_lazy_copies_stay_lazy(device):
    """Arguments are read through pointers that may be shared: nothing is copied on write."""
    for cut in CUTS.values():
        inputs = make_inputs(channels=16, seqlen=75, **cut, device=device)
        inputs = {k: torch._lazy_clone(v) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        evaluate(with_state, inputs, [torch._lazy_clone(x) for x in make_cotangents(inputs)])
        assert all(torch._C._is_cow_tensor(v) for v in inputs.values() if isinstance(v, Tensor))


@pytest.mark.parametrize("name", ["swish", "none"])
def test_other_names_of_activations(name, device):
    inputs = make_inputs(device=device)
    same = {"swish": "silu", "none": None}[name]
    assert torch.equal(causal_conv1d(**inputs | {"activation": name}), causal_conv1d(**inputs | {"activation": same}))
    inputs = make_step_inputs(device=device)
    for actual, expected in zip(step(inputs | {"activation": name}), step(inputs | {"activation": same}), strict=True):
        assert torch.equal(actual, expected)


def test_offsets_beyond_32_bits(device, needs_gpu_memory):
    """Rows of the batch are 2^31 elements apart."""
    needs_gpu_memory(device, 6)
    inputs = make_inputs(seqlen=70, channels=16, dtype=torch.bfloat16, device=device)
    far = torch.empty(2**31 + 70 * 16, dtype=torch.bfloat16, device=device).as_strided((2, 70, 16), (2**31, 16, 1))
    far.copy_(inputs["x"])
    expected, actual = with_state(**inputs), with_state(**inputs | {"x": far})
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.cuda
@every_dtype
def test_cuda_agrees_with_the_cpu(dtype):
    for size, cut in itertools.product(SIZES.values(), CUTS.values()):
        results = [
            evaluate(with_state, inputs, make_cotangents(inputs))
            for inputs in (make_inputs(**(size | cut), dtype=dtype, device=device) for device in ("cpu", "cuda"))
        ]
        for name, cpu in results[0].items():
            eps = max(torch.finfo(cpu.dtype).eps, 4e-7 if dtype != torch.float64 else 0)
            tolerance = 16 * eps * max(1.0, cpu.double().abs().max().item())
            torch.testing.assert_close(results[1][name].cpu(), cpu, rtol=16 * eps, atol=tolerance)


def test_reference_refuses_other_activations():
    with pytest.raises(ValueError, match=says("unknown activation 'relu'")):
        reference.causal_conv1d(**make_inputs(activation="relu"))
