"""linear_scan and its family: gradients, against finite differences and the float64 reference's autograd."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, arrange, assert_equal, dtypes, parameter_dtype
from operator_spec import tensor_names, with_gradients
from recurrence_helpers import (
    COMMON,
    FORMS,
    LINEAR,
    LIQUID,
    MINGRU,
    PACKED,
    RECURRENCES,
    RGLRU,
    VARIANTS,
    Variant,
    assert_all_close,
    at_steps,
    common_options,
    evaluate,
    every_broadcasting,
    every_recurrence,
    every_variant,
    make_cotangents,
    make_inputs,
    step_inputs,
)
from torch import Tensor

OPERATOR = "linear_scan"


def leaves_and_scan(variant: Variant, inputs: dict[str, Any]):
    """The tensor arguments, and the scan as a function of them."""
    names = tensor_names(inputs)

    def scan(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return variant.scan(**(inputs | dict(zip(names, tensors, strict=True))), return_last_state=True)

    return [inputs[name].detach().requires_grad_() for name in names], scan


@common_options
@every_variant
def test_gradcheck(variant, common, device):
    """Gradients flow from h and from last_state to every tensor argument, the other result's gradient zero or undefined."""
    inputs = make_inputs(variant, channels=2, device=device, **({"seqlen": 4} | common))
    leaves, scan = leaves_and_scan(variant, inputs)
    assert torch.autograd.gradcheck(scan, leaves)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@common_options
def test_gradgradcheck(common, layout, device):
    """linear_scan is linear in b and h0, and differentiable twice in a."""
    inputs = make_inputs(LINEAR, channels=2, layout=layout, device=device, **({"seqlen": 4} | common))
    leaves, scan = leaves_and_scan(LINEAR, inputs)
    assert torch.autograd.gradgradcheck(scan, leaves)


@pytest.mark.parametrize("result", ["h", "last_state"])
@common_options
def test_double_backward_of_one_result(common, result, device):
    """Against the reference: where the other result's gradient is undefined, and with no steps."""
    for sizes in ({"seqlen": 70}, {"seqlen": 1}, {"seqlen": 0}, {"channels": 0}, {"batch": 0}):
        inputs = make_inputs(LINEAR, device=device, **(sizes | common))
        second = []
        for function in (LINEAR.scan, LINEAR.reference_function):
            leaves = with_gradients(inputs)
            results = dict(zip(("h", "last_state"), function(**leaves, return_last_state=True), strict=True))
            of_tensors = [leaves[name] for name in tensor_names(inputs)]
            options = {"allow_unused": True, "materialize_grads": True}
            if not results[result].requires_grad:
                second.append([torch.zeros_like(leaf) for leaf in of_tensors])
                continue
            first = torch.autograd.grad(results[result].square().sum(), of_tensors, create_graph=True, **options)
            penalty = sum((gradient.square().sum() for gradient in first), start=0 * of_tensors[0].sum())
            second.append(torch.autograd.grad(penalty, of_tensors, **options))
        for name, actual, expected in zip(tensor_names(inputs), *second, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_double_backward_in_low_precision(device):
    """Second derivatives have the dtypes of their tensors."""
    for dtype in (torch.float32, torch.bfloat16):
        leaves = with_gradients(make_inputs(LINEAR, dtype=dtype, device=device))
        names = tensor_names(leaves)
        first = torch.autograd.grad(LINEAR.scan(**leaves).float().square().sum(), [leaves[n] for n in names], create_graph=True)
        sum(gradient.float().square().sum() for gradient in first).backward()
        for name in names:
            assert leaves[name].grad.dtype == leaves[name].dtype and leaves[name].grad.isfinite().all()


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@common_options
def test_gradients_that_have_a_graph_are_as_exact_as_those_without(common, autocast, device):
    """Holds for every dtype of inputs and of autocast."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_inputs(LINEAR, channels=5, dtype=dtype, device=device, **({"seqlen": 2000} | common))
        leaves = with_gradients(inputs)
        names, cotangents = tensor_names(inputs), make_cotangents(inputs)
        results = LINEAR.scan(**leaves, return_last_state=True)
        plain = torch.autograd.grad(results, [leaves[n] for n in names], cotangents, retain_graph=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            differentiable = torch.autograd.grad(results, [leaves[n] for n in names], cotangents, create_graph=True)
        for name, actual, expected in zip(names, differentiable, plain, strict=True):
            assert actual.requires_grad and actual.dtype == expected.dtype
            # One rounding to the dtype, of numbers that differ by float32's.
            tolerance = 2e-6 if expected.dtype == torch.float32 else 2**-7
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")


@dtypes()
@every_variant
def test_gradients(variant, dtype, device):
    for common in COMMON.values():
        inputs = make_inputs(variant, channels=37, dtype=dtype, device=device, **({"seqlen": 70} | common))
        results = variant.assert_matches_reference(inputs)
        for name in tensor_names(inputs):
            assert results[f"grad_{name}"].dtype == inputs[name].dtype
            assert results[f"grad_{name}"].shape == inputs[name].shape


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("seqlen", [0, 1, 31, 32, 33, 1000])
@every_recurrence
def test_lengths(variant, seqlen, reverse, device):
    for dtype, layout in ((torch.float64, "contiguous"), (torch.float32, "transposed")):
        inputs = make_inputs(
            variant, batch=1, channels=5, seqlen=seqlen, reverse=reverse, dtype=dtype, layout=layout, device=device
        )
        variant.assert_matches_reference(inputs)


def test_a_long_sequence(device):
    """Compares with the adjoint, written with the reference's scan: the reference's autograd is slow over so many steps."""
    inputs = make_inputs(LINEAR, batch=1, channels=3, seqlen=65537, device=device)
    grad_h, grad_last_state = make_cotangents(inputs)
    actual = evaluate(LINEAR, inputs, (grad_h, grad_last_state))
    a, b, h0 = (inputs[name] for name in ("a", "b", "h0"))
    h, last_state = LINEAR.reference_function(a, b, h0, return_last_state=True)
    e, grad_h0 = LINEAR.reference_function(a, a * grad_h, grad_last_state, reverse=True, return_last_state=True)
    grad_b = grad_h + torch.cat([e[:, 1:], grad_last_state[:, None]], dim=1)
    grad_a = grad_b * torch.cat([h0[:, None], h[:, :-1]], dim=1)
    expected = {"h": h, "last_state": last_state, "grad_a": grad_a, "grad_b": grad_b, "grad_h0": grad_h0}
    assert_all_close(actual, expected)


@pytest.mark.parametrize("recurrence", [LINEAR, MINGRU], ids=["linear", "mingru"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_results_larger_than_the_caches(recurrence, reverse):
    """Kernels stream results of kMinStreamedBytes past the caches. Calls of single rows do not and give the same bits."""
    min_streamed_bytes = 4 << 20
    sizes = {"batch": 3, "seqlen": 1024, "channels": 512}
    inputs = make_inputs(recurrence, **sizes, reverse=reverse, dtype=torch.float32)
    cotangents = recurrence.make_cotangents(inputs)
    together = recurrence.evaluate(recurrence, inputs, cotangents)
    row_bytes = together["h"][0].nbytes
    assert row_bytes < min_streamed_bytes < 3 * row_bytes
    for row in range(3):
        of_row = {name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in inputs.items()}
        alone = recurrence.evaluate(recurrence, of_row, tuple(cotangent[row : row + 1] for cotangent in cotangents))
        assert_equal({name: value[row : row + 1] for name, value in together.items()}, alone)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("channels", [1, 3, 31, 32, 33, 257, 300])
def test_numbers_of_channels(channels, layout, device):
    for variant, dtype in itertools.product((LINEAR, RGLRU), (torch.float64, torch.float32, torch.bfloat16)):
        inputs = make_inputs(variant, channels=channels, seqlen=9, dtype=dtype, layout=layout, device=device, seed=channels)
        variant.assert_matches_reference(inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
@every_recurrence
def test_layout_of_each_argument(variant, layout, device):
    for name, common in itertools.product((*variant.recurrence.inputs, "h0"), ({}, {"reverse": True, "cu_seqlens": PACKED})):
        inputs = make_inputs(variant, channels=6, device=device, **common)
        inputs[name] = arrange(inputs[name], layout)
        variant.assert_matches_reference(inputs)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "time", "channels"])
@every_recurrence
def test_expanded_arguments(variant, axis, device):
    """The gradient reaches the tensor that was expanded."""
    for reverse in (False, True):
        inputs = make_inputs(variant, channels=6, form="full", reverse=reverse, device=device)
        for name in variant.recurrence.inputs:
            small, gradients = inputs[name].narrow(axis, 0, 1), []
            for function in (variant.scan, variant.reference_function):
                leaf = small.clone().requires_grad_()
                function(**(inputs | {name: leaf.expand(inputs[name].shape)})).square().sum().backward()
                gradients.append(leaf.grad)
            torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
@every_broadcasting
def test_inputs_that_broadcast(variant, form, device):
    """Their gradients have their shape and their dtype."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for broadcast_dtype in {dtype, parameter_dtype(dtype)}:
            inputs = make_inputs(
                variant, seqlen=33, channels=9, form=form, dtype=dtype, broadcast_dtype=broadcast_dtype, device=device
            )
            variant.assert_matches_reference(inputs)


@pytest.mark.parametrize("kind", ["expanded", "transposed", "permuted", "sliced", "zero"])
@every_recurrence
def test_strides_of_the_incoming_gradients(variant, kind, device):
    """`.sum()` sends a gradient of stride zero back."""
    for common in ({"seqlen": 70}, {"seqlen": 70, "reverse": True}, {"cu_seqlens": PACKED}):
        inputs = make_inputs(variant, channels=6, device=device, **common)
        cotangents = make_cotangents(inputs)
        if kind in LAYOUTS:
            cotangents = tuple(arrange(cotangent, kind) for cotangent in cotangents)
        else:
            one = torch.full((), kind == "expanded", dtype=torch.float64, device=device)
            cotangents = tuple(one.expand(cotangent.shape) for cotangent in cotangents)
        assert_all_close(evaluate(variant, inputs, cotangents), evaluate(variant.reference, inputs, cotangents))


@pytest.mark.parametrize("through", ["h", "last_state"])
@common_options
@every_recurrence
def test_gradient_through_one_result_only(variant, common, through, device):
    inputs = make_inputs(variant, channels=5, device=device, **({"seqlen": 70} | common))
    gradients = []
    for function in (variant.scan, variant.reference_function):
        leaves = with_gradients(inputs)
        results = dict(zip(("h", "last_state"), function(**leaves, return_last_state=True), strict=True))
        results[through].square().sum().backward()
        gradients.append({name: leaves[name].grad for name in tensor_names(inputs)})
    assert_all_close(*gradients)


@every_recurrence
def test_gradients_of_a_subset(variant, device):
    """Each gradient has the same bits, whichever others are needed; the others are None."""
    inputs = make_inputs(variant, channels=5, seqlen=70, dtype=torch.float32, device=device)
    names, cotangents = tensor_names(inputs), make_cotangents(inputs)

    def gradients(wanted) -> dict[str, Tensor | None]:
        leaves = with_gradients(inputs, wanted)
        torch.autograd.backward(variant.scan(**leaves, return_last_state=True), cotangents)
        return {name: leaves[name].grad for name in names}

    everything = gradients(names)
    for wanted in itertools.chain(*(itertools.combinations(names, size) for size in range(1, len(names)))):
        for name, gradient in gradients(wanted).items():
            if name in wanted:
                assert torch.equal(gradient, everything[name]), f"grad_{name} when only {wanted} need gradients"
            else:
                assert gradient is None


@every_recurrence
def test_nothing_needs_a_gradient(variant, device):
    for result in variant.scan(**make_inputs(variant, device=device), return_last_state=True):
        assert not result.requires_grad and result.grad_fn is None


@pytest.mark.parametrize("sizes", [(0, 5, 4), (2, 0, 4), (2, 5, 0), (0, 0, 0)], ids=str)
@every_recurrence
def test_no_elements(variant, sizes, device, uninitialized_memory_is_nan):
    batch, seqlen, channels = sizes
    for dtype, reverse in itertools.product((torch.float64, torch.bfloat16), (False, True)):
        inputs = make_inputs(
            variant, batch=batch, seqlen=seqlen, channels=channels, reverse=reverse, dtype=dtype, device=device
        )
        cotangents = make_cotangents(inputs)
        results = evaluate(variant, inputs, cotangents)
        assert torch.equal(results["grad_h0"], cotangents[1] if seqlen == 0 else torch.zeros_like(inputs["h0"]))
        for name in variant.recurrence.inputs:
            gradient = results[f"grad_{name}"]
            assert gradient.shape == inputs[name].shape and gradient.dtype == inputs[name].dtype
            assert not gradient.any(), f"grad_{name}"


@pytest.mark.parametrize("cu_seqlens", [(0,), (0, 0, 0), (0, 0, 5, 5, 5, 6, 6)], ids=str)
@every_recurrence
def test_packed_sequences_of_no_steps(variant, cu_seqlens, device, uninitialized_memory_is_nan):
    """Their initial states get the gradient of their last states."""
    for reverse, h0 in itertools.product((False, True), repeat=2):
        inputs = make_inputs(variant, cu_seqlens=cu_seqlens, reverse=reverse, h0=h0, device=device)
        results = variant.assert_matches_reference(inputs)
        if h0:
            empty = [i for i, (begin, end) in enumerate(itertools.pairwise(cu_seqlens)) if begin == end]
            assert torch.equal(results["grad_h0"][empty], make_cotangents(inputs)[1][empty])


@pytest.mark.parametrize("offsets", [(7, 30, 40), (0, 50, 90), (-3, -2, -1), (40, 20, 0), (90, 90, 90)], ids=str)
def test_wrong_offsets_reach_no_other_memory(offsets, device):
    """Backward does not check offsets again, and reads no memory beside the states."""
    for reverse in (False, True):
        inputs = make_inputs(LINEAR, cu_seqlens=(0, 10, 40), reverse=reverse, device=device)
        arguments = list(LINEAR.backward_arguments(inputs))
        for i in (1, 4):  # grad_last_state and h0
            around = torch.full((4, 4), float("nan"), dtype=torch.float64, device=device)
            arguments[i] = around[1:3].copy_(arguments[i])
        arguments[5] = torch.tensor(offsets, device=device)
        gradients = torch.ops.ssm_kernels._linear_recurrence_bwd(*arguments)
        assert all(gradient.isfinite().all() for gradient in gradients)


@every_variant
def test_gradients_through_steps(variant, device):
    """Backpropagation through decoding steps equals backpropagation through the scan."""
    inputs = make_inputs(variant, seqlen=6, device=device)

    def step_by_step(*, h0, reverse, cu_seqlens, **arguments):
        state, outputs = h0, []
        for t in range(6):
            h, state = variant.step(**step_inputs(variant, arguments, t), state=state, **variant.fixed)
            outputs.append(h)
        return torch.stack(outputs, dim=1), state

    cotangents = make_cotangents(inputs)
    assert_all_close(evaluate(step_by_step, inputs, cotangents), evaluate(variant, inputs, cotangents))


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@every_recurrence
def test_gradient_through_carried_states(variant, reverse, device):
    """Backpropagation over a sequence in two parts equals backpropagation over the whole."""
    inputs = make_inputs(variant, channels=5, seqlen=100, reverse=reverse, device=device)

    def in_three_parts(*, h0, **arguments):
        parts = [slice(0, 32), slice(32, 65), slice(65, None)]
        state, outputs = h0, []
        for steps in reversed(parts) if reverse else parts:
            part = at_steps(variant, arguments, steps)
            h, state = variant.scan(**part, h0=state, return_last_state=True)
            outputs.append(h)
        return torch.cat(outputs[::-1] if reverse else outputs, dim=1), state

    cotangents = make_cotangents(inputs)
    assert_all_close(evaluate(in_three_parts, inputs, cotangents), evaluate(variant, inputs, cotangents))


# ----- extreme values


@every_variant
def test_large_inputs(variant, device):
    """Far outside the range in which sigmoids, exponentials and activations change."""
    large = torch.tensor([-800.0, -100.0, -30.0, -21.0, -1.0, 0.25, 1.0, 30.0, 100.0, 800.0], dtype=torch.float64)
    for name in variant.recurrence.inputs:
        if name in RECURRENCES["liquid_scan"].broadcast or variant is RGLRU:
            continue
        inputs = make_inputs(variant, seqlen=len(large), channels=6, form="full", device=device)
        values = variant.recurrence.inputs[name](large)
        if name == "gate" and not variant.fixed.get("gate_is_logit", True):
            values = values.sigmoid()
        inputs[name] = values.to(device)[None, :, None].expand(inputs[name].shape).contiguous()
        results = variant.assert_matches_reference(inputs)
        assert all(value.isfinite().all() for value in results.values())


def test_transition_of_zero(device):
    """A backward pass that recovers states by division fails here."""
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(LINEAR, seqlen=70, dtype=dtype, device=device)
        inputs["a"] = torch.where(inputs["a"] > 0, inputs["a"], 0)
        results = LINEAR.assert_matches_reference(inputs)
        assert all(value.isfinite().all() for value in results.values())


def test_kink_of_g(device):
    """At 0 the two branches of g have the same value, and the gradient is the slope from the right."""
    variant = VARIANTS["mingru_scan-g-True"]
    inputs = make_inputs(variant, seqlen=3, device=device)
    inputs["candidate"] = torch.zeros_like(inputs["candidate"])
    variant.assert_matches_reference(inputs)


def test_liquid_of_time_constants_far_below_the_step(device):
    """e^(-dt/tau) is not the difference of 1 and its complement: 1 / tau multiplies what that leaves."""
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(LIQUID, seqlen=33, channels=9, dtype=dtype, device=device)
        inputs["tau"] = torch.full_like(inputs["tau"], 1e-3)
        for multiple in (1, 10, 17, 30, 1000):
            inputs["dt"] = torch.full_like(inputs["dt"], 1e-3 * multiple)
            LIQUID.assert_matches_reference(inputs)


def test_rglru_near_a_transition_of_one(device):
    """sqrt(1 - a^2) and its derivative keep their digits where 1 - a^2 would cancel."""
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(RGLRU, seqlen=33, dtype=dtype, device=device)
        inputs["recurrence_gate"] = inputs["recurrence_gate"] - 12
        results = RGLRU.assert_matches_reference(inputs)
        assert all(value.isfinite().all() for value in results.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rglru_where_the_transition_is_one(dtype, device):
    """There the root has no finite slope, but the next factor of the chain rule vanishes faster."""
    inputs = make_inputs(RGLRU, seqlen=5, dtype=dtype, device=device)
    inputs["recurrence_gate"] = torch.full_like(inputs["recurrence_gate"], -1000)
    results = evaluate(RGLRU, inputs, make_cotangents(inputs))
    assert all(value.isfinite().all() for value in results.values())
    assert not results["grad_recurrence_gate"].any() and not results["grad_recurrent_param"].any()


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@every_recurrence
def test_nan_stays_in_its_channel_and_sequence(variant, layout, device):
    """Every gradient that the NaN cannot reach has the same bits as without it."""
    for common in COMMON.values():
        inputs = make_inputs(
            variant, channels=9, form="full", dtype=torch.float32, layout=layout, device=device, **({"seqlen": 70} | common)
        )
        packed = "cu_seqlens" in common
        step, sequence, steps = (6, 5, slice(*PACKED[5:7])) if packed else (20, -1, slice(None))
        cotangents = dict(zip(("grad_h", "grad_last_state"), make_cotangents(inputs), strict=True))
        clean = evaluate(variant, inputs, tuple(cotangents.values()))
        reached = {name: torch.zeros_like(result, dtype=torch.bool) for name, result in clean.items()}
        for mask in reached.values():
            mask[(-1, steps, 3) if mask.dim() == 3 else (sequence, 3)] = True
        for name in (*tensor_names(inputs), *cotangents):
            arguments = inputs | cotangents
            arguments[name] = arguments[name].clone()
            arguments[name][(-1, step, 3) if arguments[name].dim() == 3 else (sequence, 3)] = float("nan")
            actual = evaluate(variant, {key: arguments[key] for key in inputs}, tuple(arguments[key] for key in cotangents))
            for result, value in actual.items():
                assert torch.equal(value[~reached[result]], clean[result][~reached[result]]), f"{result} of a NaN in {name}"
            assert any(value.isnan().any() for value in actual.values())


# ----- the same bits, and what autograd does with the operator


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [1, 3])
def test_sums_over_what_was_broadcast_whatever_the_number_of_threads(batch, form, dtype, device, two_threads):
    for layout in ("contiguous", "transposed"):
        inputs = make_inputs(RGLRU, batch=batch, channels=70, seqlen=1000, form=form, dtype=dtype, layout=layout, device=device)
        first = evaluate(RGLRU, inputs, make_cotangents(inputs))
        torch.set_num_threads(1)
        assert_equal(evaluate(RGLRU, inputs, make_cotangents(inputs)), first)
        torch.set_num_threads(2)


def test_backward_twice_accumulates(device):
    leaves = with_gradients(make_inputs(MINGRU, device=device))
    h = MINGRU.scan(**leaves)
    h.sum().backward(retain_graph=True)
    once = leaves["gate"].grad.clone()
    h.sum().backward()
    assert torch.equal(leaves["gate"].grad, 2 * once)


@pytest.mark.parametrize("name", ["gate", "candidate", "h0", "h"])
def test_in_place_change_of_what_is_saved_is_noticed(name, device):
    inputs = make_inputs(MINGRU, device=device)
    leaf = torch.ones((), dtype=torch.float64, device=device, requires_grad=True)
    saved = {key: inputs[key] * leaf for key in ("gate", "candidate", "h0")}
    saved["h"] = MINGRU.scan(**(inputs | saved))
    loss = saved["h"].sum()
    saved[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_broadcasting
def test_gradients_of_float32_sums(variant, device):
    """An input that broadcasts along a long float16 or bfloat16 sequence gets a gradient summed in float32."""
    inputs = make_inputs(variant, batch=1, channels=2, seqlen=2000, form="channels", dtype=torch.bfloat16, device=device)
    variant.assert_matches_reference(inputs)


def gradients_of_what_broadcasts(variant: Variant, inputs: dict[str, Any], function: Any = None) -> dict[str, Tensor]:
    """The cotangent of h has one sign, so that no sum cancels."""
    leaves = {name: inputs[name].detach().requires_grad_() for name in variant.recurrence.broadcast}
    h = (function or variant.scan)(**inputs | leaves)
    return dict(zip(leaves, torch.autograd.grad(h.float().square().sum(), [*leaves.values()]), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_broadcasting
def test_gradients_of_16_bit_parameters_are_rounded_once(variant, dtype, device):
    """They equal the rounded gradients of the same numbers in float32: backward rounds the sum, not its terms."""
    inputs = make_inputs(variant, batch=4, seqlen=257, channels=9, dtype=dtype, broadcast_dtype=dtype, device=device)
    wide = {name: inputs[name].float() for name in variant.recurrence.broadcast}
    expected = gradients_of_what_broadcasts(variant, inputs | wide)
    for name, gradient in gradients_of_what_broadcasts(variant, inputs).items():
        assert gradient.dtype == dtype and torch.equal(gradient, expected[name].to(dtype)), name

    def mapped(**arguments: Any) -> Tensor:
        """Two samples, of which each parameter has its own."""
        twice = {name: x.expand(2, *x.shape) for name, x in arguments.items() if isinstance(x, Tensor)}
        rest = {name: x for name, x in arguments.items() if not isinstance(x, Tensor)}
        return torch.vmap(lambda of_sample: variant.scan(**of_sample, **rest))(twice)

    def under_autocast(**arguments: Any) -> Tensor:
        with torch.autocast(inputs["h0"].device.type, dtype):
            return variant.scan(**arguments)

    def not_16_bit(arguments: dict[str, Any]) -> dict[str, Any]:
        others = [name for name in variant.recurrence.inputs if name not in variant.recurrence.broadcast]
        return arguments | {name: arguments[name].float() for name in others}

    for function, arguments in ((mapped, inputs), (under_autocast, inputs), (under_autocast, not_16_bit(inputs))):
        expected = gradients_of_what_broadcasts(variant, arguments | wide, function)
        for name, gradient in gradients_of_what_broadcasts(variant, arguments, function).items():
            # vmap adds the samples' gradients, each of them rounded.
            close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0} if function is mapped else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(gradient, expected[name].to(dtype), **close)


def test_error_of_the_gradient_of_a_16_bit_parameter(device):
    """Compared with float64: the error of a float32 parameter plus one rounding."""
    inputs = make_inputs(
        RGLRU, batch=8, seqlen=1024, channels=64, dtype=torch.float16, broadcast_dtype=torch.float16, device=device
    )
    name = "recurrent_param"
    exact = gradients_of_what_broadcasts(RGLRU, {k: v.double() if isinstance(v, Tensor) else v for k, v in inputs.items()})[
        name
    ]

    def error(arguments: dict[str, Any]) -> float:
        return ((gradients_of_what_broadcasts(RGLRU, arguments)[name].double() - exact).norm() / exact.norm()).item()

    assert error(inputs) < error(inputs | {name: inputs[name].float()}) + torch.finfo(torch.float16).eps / 2


def test_16_bit_parameters_that_do_not_broadcast_are_not_cast(device):
    """Backward keeps the tensor that the caller has."""
    inputs = make_inputs(RGLRU, form="full", dtype=torch.bfloat16, broadcast_dtype=torch.bfloat16, device=device)
    inputs = with_gradients(inputs)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        RGLRU.scan(**inputs)
    assert inputs["recurrent_param"].data_ptr() in {x.data_ptr() for x in kept if x.dtype == torch.bfloat16}
