"""ssd_chunk_scan: gradients, against finite differences and the float64 reference's autograd."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, arrange, dtypes
from operator_spec import tensor_names, with_gradients
from ssd_helpers import (
    KERNEL_CHUNK,
    METHODS,
    MINIMAL,
    NAN_PLACES,
    OPTIONS,
    SEQUENCES,
    TENSORS,
    assert_all_close,
    assert_matches_reference,
    assert_nan_ends,
    at_steps,
    evaluate,
    every_method,
    every_option,
    make_cotangents,
    make_inputs,
    reference_scan,
    scan,
    scan_in_16_bit_products,
)
from torch import Tensor

from ssm_kernels import ssd_chunk_scan

OPERATOR = "ssd_chunk_scan"


def assert_gradcheck(inputs: dict[str, Any], **options: Any) -> None:
    """Gradients flow from both results to every tensor argument, the other result's gradient zero or undefined."""
    names = tensor_names(inputs)

    def of_tensors(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return scan(**(inputs | dict(zip(names, tensors, strict=True))))

    leaves = [inputs[name].detach().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(of_tensors, leaves, **options)


SMALL = {"batch": 1, "seqlen": 4, "heads": 2, "headdim": 2, "dstate": 2, "groups": 1, "chunk_size": 2}


def small_inputs(options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """As few elements as have every kind of sequence: one of no steps, one of one, one of more than a chunk."""
    sequences = {"cu_seqlens": (0, 0, 1, 4)} if "cu_seqlens" in options else {}
    return make_inputs(**(SMALL | options | sequences | more))


@every_option
def test_gradcheck(options, device):
    assert_gradcheck(small_inputs(options, device=device))


@every_option
def test_gradcheck_of_more_sizes(options, device):
    """In a direction."""
    for chunk_size in (None, 2):
        assert_gradcheck(make_inputs(device=device, chunk_size=chunk_size, **options), fast_mode=True)


@pytest.mark.parametrize("name", ["everything", "packed_with_states"])
@every_method
def test_gradcheck_of_discretizations(discretization, name, device):
    assert_gradcheck(small_inputs(OPTIONS[name], discretization=discretization, device=device))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gradcheck_of_groups(groups, device):
    inputs = make_inputs(device=device, seqlen=4, heads=4, headdim=1, dstate=2, groups=groups, chunk_size=2)
    assert_gradcheck(inputs, fast_mode=True)


@pytest.mark.parametrize(
    "options", [{}, {"resets": ((1, 16, 63, 64, 65), (20,))}, {"cu_seqlens": (0, 0, 1, 64, 64, 70)}], ids=str
)
def test_gradcheck_across_chunks(options, device):
    """Checks one random direction, over more than two chunks."""
    for chunk_size in (None, 16):
        sizes = {"seqlen": 70, "heads": 2, "headdim": 3, "dstate": 4, "groups": 1, "chunk_size": chunk_size}
        assert_gradcheck(make_inputs(device=device, **(sizes | options)), fast_mode=True)


@dtypes()
@every_option
def test_gradients(options, dtype, device):
    inputs = make_inputs(dtype=dtype, device=device, **({"seqlen": 70} | options))
    results = assert_matches_reference(inputs)
    for name in tensor_names(inputs):
        assert results[f"grad_{name}"].dtype == inputs[name].dtype
        assert results[f"grad_{name}"].shape == inputs[name].shape


@every_method
def test_discretizations(discretization, device):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert_matches_reference(make_inputs(seqlen=70, dtype=dtype, device=device, discretization=discretization))


def test_gradient_is_zero_where_the_step_size_is_clamped(device):
    """On both sides; of dt, and in what it adds to the gradients of dt_bias and A."""
    inputs = make_inputs(seqlen=70, device=device)
    steps = torch.nn.functional.softplus(inputs["dt"] + inputs["dt_bias"])
    inputs["dt_limit"] = tuple(torch.quantile(steps, q).item() for q in (0.3, 0.7))
    results = assert_matches_reference(inputs)
    low, high = inputs["dt_limit"]
    clamped = (steps < low) | (steps > high)
    assert not results["grad_dt"][clamped].any() and results["grad_dt"][~clamped].all()
    inputs["dt_limit"] = (5.0, 6.0)
    results = assert_matches_reference(inputs)
    assert not results["grad_dt"].any() and not results["grad_dt_bias"].any() and results["grad_A"].all()


@every_option
def test_yardstick_of_16_bit_products(options):
    """Nothing is rounded in float64: it is the scan."""
    for discretization in METHODS[:1] if options.get("log_decay") else METHODS:
        inputs = make_inputs(**({"seqlen": 70} | options), discretization=discretization)
        cotangents = make_cotangents(inputs)
        assert_all_close(evaluate(scan_in_16_bit_products, inputs, cotangents), evaluate(reference_scan, inputs, cotangents))


# ----- sizes and strides


@dtypes(torch.float64, torch.float32, torch.bfloat16)
@pytest.mark.parametrize("seqlen", [0, 1, 63, 64, 65, 300])
def test_lengths(seqlen, dtype, device):
    inputs = make_inputs(seqlen=seqlen, batch=1, heads=2, headdim=8, dstate=8, chunk_size=64, dtype=dtype, device=device)
    assert_matches_reference(inputs)


@dtypes(torch.float64, torch.float32, torch.bfloat16)
@pytest.mark.parametrize(
    ("headdim", "dstate"), [(1, 1), (48, 17), (64, 128), (96, 64), (33, 200), (256, 3), (3, 256), (256, 256)]
)
def test_headdim_and_dstate(headdim, dstate, dtype, device):
    seqlen = 20 if headdim * dstate > 10_000 else 70
    inputs = make_inputs(
        batch=1, seqlen=seqlen, heads=2, groups=1, headdim=headdim, dstate=dstate, chunk_size=16, dtype=dtype, device=device
    )
    assert_matches_reference(inputs)


@dtypes(torch.float64, torch.float32, torch.bfloat16)
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (6, 1), (6, 2), (6, 6), (24, 8)])
def test_heads_and_groups(heads, groups, dtype, device):
    assert_matches_reference(make_inputs(heads=heads, groups=groups, seqlen=65, dtype=dtype, device=device))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_each_argument(layout, device):
    for name in ("everything", "packed_with_states"):
        inputs = make_inputs(device=device, **({"seqlen": 20} | OPTIONS[name]))
        cotangents = make_cotangents(inputs)
        expected = evaluate(scan, inputs, cotangents)
        for argument in tensor_names(inputs):
            arranged = inputs | {argument: arrange(inputs[argument], layout)}
            assert_all_close(evaluate(scan, arranged, cotangents), expected)


@pytest.mark.parametrize("kind", ["expanded", "zero", *LAYOUTS[1:]])
def test_strides_of_the_incoming_gradients(kind, device):
    """`.sum()` sends a gradient of stride zero back."""
    for options in ({}, {"cu_seqlens": (0, 30, 30, 70)}):
        inputs = make_inputs(seqlen=70, device=device, **options)
        cotangents = make_cotangents(inputs)
        if kind in LAYOUTS:
            cotangents = tuple(arrange(cotangent, kind) for cotangent in cotangents)
        else:
            one = torch.full((), kind == "expanded", dtype=torch.float64, device=device)
            cotangents = tuple(one.expand(cotangent.shape) for cotangent in cotangents)
        assert_all_close(evaluate(scan, inputs, cotangents), evaluate(reference_scan, inputs, cotangents))


def test_expanded_arguments(device):
    """The gradient reaches the tensor that was expanded."""
    inputs = make_inputs(seqlen=20, device=device)
    for name in SEQUENCES:
        for axis in range(inputs[name].dim()):
            gradients = []
            for function in (scan, reference_scan):
                leaf = inputs[name].narrow(axis, 0, 1).clone().requires_grad_()
                out, _ = function(**(inputs | {name: leaf.expand(inputs[name].shape)}))
                out.square().sum().backward()
                gradients.append(leaf.grad)
            torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


# ----- which gradients come and which go


@pytest.mark.parametrize("through", [0, 1], ids=["out", "final_states"])
@every_option
def test_gradient_through_one_result_only(options, through, device):
    inputs = make_inputs(device=device, **({"seqlen": 20} | options))
    gradients = []
    for function in (scan, reference_scan):
        leaves = with_gradients(inputs)
        function(**leaves)[through].square().sum().backward()
        # The reference has no gradient at all where final_states does not depend on an argument.
        zeros = {name: torch.zeros_like(inputs[name]) for name in tensor_names(inputs)}
        gradients.append({name: zero if leaves[name].grad is None else leaves[name].grad for name, zero in zeros.items()})
    assert_all_close(*gradients)


def test_gradients_of_a_subset(device):
    """Whatever needs gradients, each is bit for bit the same, and the others get none."""
    inputs = make_inputs(seqlen=40, chunk_size=16, dtype=torch.float32, device=device)
    cotangents = make_cotangents(inputs)

    def gradients(wanted) -> dict[str, Tensor | None]:
        leaves = with_gradients(inputs, wanted)
        torch.autograd.backward(scan(**leaves), cotangents)
        return {name: leaves[name].grad for name in TENSORS}

    everything = gradients(TENSORS)
    subsets = [*itertools.combinations(TENSORS, 1), *itertools.combinations(TENSORS, 2), *itertools.combinations(TENSORS, 8)]
    for wanted in subsets:
        for name, gradient in gradients(wanted).items():
            if name in wanted:
                assert torch.equal(gradient, everything[name]), f"grad_{name} when only {wanted} need gradients"
            else:
                assert gradient is None


@pytest.mark.parametrize("cu_seqlens", [(0, 3, 6, 6, 10, 13, 17, 17), (0, 40, 70, 110, 140, 180)], ids=["short", "of_chunks"])
def test_packed_sequences_of_equal_lengths(cu_seqlens, device):
    """The PyTorch fallback batches them, wherever they are in memory."""
    assert_matches_reference(make_inputs(cu_seqlens=cu_seqlens, chunk_size=16, device=device))


@pytest.mark.parametrize("chunk_size", [None, 256])
def test_long_chunks(chunk_size, device):
    """On CPU these take more than 64 steps together where the state is as large as here."""
    sizes = {"batch": 1, "heads": 2, "groups": 1, "headdim": 128, "dstate": 128, "seqlen": 300}
    assert_matches_reference(make_inputs(**sizes, chunk_size=chunk_size, resets=((100, 200),), device=device))


@pytest.mark.parametrize("step", [34, 40, 70])
@pytest.mark.parametrize("begins", [(0, 32, 64), (0, 36, 72)], ids=["with_chunks", "inside_chunks"])
@pytest.mark.parametrize("name", NAN_PLACES)
def test_nan_ends_where_a_sequence_begins(name, begins, step, device):
    """With seq_idx too, but for the chunks that its sequence begins and ends in, and its own one."""
    inputs = make_inputs(seqlen=90, resets=((11, 50), begins[1:]), chunk_size=16, dtype=torch.float32, device=device)
    assert_nan_ends(inputs, name, step, begins, chunk=16 if device == "cpu" else KERNEL_CHUNK)


def test_nothing_needs_a_gradient(device):
    for result in scan(**make_inputs(device=device)):
        assert not result.requires_grad and result.grad_fn is None


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seqlen": 0}, {"batch": 0, "seqlen": 0}, {"cu_seqlens": (0,)}], ids=str)
def test_no_elements(sizes, device, uninitialized_memory_is_nan):
    for dtype in (torch.float64, torch.bfloat16):
        inputs = make_inputs(dtype=dtype, device=device, **sizes)
        cotangents = make_cotangents(inputs)
        results = evaluate(scan, inputs, cotangents)
        for name in TENSORS:
            gradient = results[f"grad_{name}"]
            assert gradient.shape == inputs[name].shape and gradient.dtype == inputs[name].dtype
            if name == "initial_states":
                assert torch.equal(gradient, cotangents[1])
            else:
                assert not gradient.any(), f"grad_{name}"


@pytest.mark.parametrize("cu_seqlens", [(0, 0, 0), (0, 0, 5, 5, 5, 6, 6), (0, 64, 64, 65)], ids=str)
def test_packed_sequences_of_no_steps(cu_seqlens, device, uninitialized_memory_is_nan):
    """Their initial states get the gradient of their final states."""
    for options in ({}, {"initial_states": False}):
        inputs = make_inputs(cu_seqlens=cu_seqlens, device=device, **options)
        results = assert_matches_reference(inputs)
        if inputs["initial_states"] is not None:
            empty = [i for i, (begin, end) in enumerate(itertools.pairwise(cu_seqlens)) if begin == end]
            assert torch.equal(results["grad_initial_states"][empty], make_cotangents(inputs)[1][empty])


def test_no_uninitialized_memory_is_read(device, uninitialized_memory_is_nan):
    for name, dtype in itertools.product(("everything", "packed_with_states", "resets"), (torch.float64, torch.bfloat16)):
        inputs = make_inputs(dtype=dtype, device=device, **({"seqlen": 130, "chunk_size": 64} | OPTIONS[name]))
        assert_matches_reference(inputs)


# ----- sequences


def test_gradient_through_carried_states(device):
    """Backpropagation over a cut sequence is that over the whole one."""
    inputs = make_inputs(seqlen=100, device=device)

    def in_four_parts(*, initial_states, **arguments):
        state, outputs = initial_states, []
        for steps in (slice(0, 1), slice(1, 64), slice(64, 65), slice(65, None)):
            out, state = scan(**at_steps(arguments, steps), initial_states=state)
            outputs.append(out)
        return torch.cat(outputs, dim=1), state

    cotangents = make_cotangents(inputs)
    assert_all_close(evaluate(in_four_parts, inputs, cotangents), evaluate(scan, inputs, cotangents))


def test_packed_sequences_one_by_one(device):
    inputs = make_inputs(cu_seqlens=(0, 0, 1, 65, 65, 130), chunk_size=16, device=device)

    def one_by_one(*, initial_states, cu_seqlens, **arguments):
        outputs, states = [], []
        for i, (begin, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
            part = at_steps(arguments, slice(begin, end)) | {"initial_states": initial_states[i : i + 1]}
            out, state = scan(**part, cu_seqlens=None)
            outputs.append(out)
            states.append(state)
        return torch.cat(outputs, dim=1), torch.cat(states)

    cotangents = make_cotangents(inputs)
    assert_all_close(evaluate(one_by_one, inputs, cotangents), evaluate(scan, inputs, cotangents))


@dtypes(torch.float64, torch.bfloat16)
def test_resets_let_no_gradient_through(dtype, device):
    """The last sequence's results give no gradient to the other sequences and their states."""
    sizes = {"seqlen": 150, "headdim": 16, "dstate": 16}
    inputs = make_inputs(resets=((10, 64, 100), (64,)), dtype=dtype, device=device, **sizes)
    grad_out, grad_final_states = make_cotangents(inputs)
    grad_out[0, :100] = 0
    grad_out[1, :64] = 0
    results = evaluate(scan, inputs, (grad_out, grad_final_states))
    for name in SEQUENCES:
        gradient = results[f"grad_{name}"]
        assert not gradient[0, :100].any() and not gradient[1, :64].any(), name
        assert gradient[0, 100:].any() and gradient[1, 64:].any(), name
    assert not results["grad_initial_states"].any()


# ----- extreme values


def test_large_and_small_step_sizes(device):
    """Far outside the range in which softplus changes; nothing overflows."""
    large = torch.tensor([-800.0, -100.0, -30.0, -1.0, 0.0, 1.0, 19.0, 21.0, 100.0, 800.0], dtype=torch.float64)
    for name, dtype in itertools.product(METHODS, (torch.float64, torch.float32)):
        inputs = make_inputs(seqlen=len(large), discretization=name, dtype=dtype, device=device)
        inputs["dt"] = large.to(inputs["dt"])[None, :, None].expand(inputs["dt"].shape).contiguous()
        results = assert_matches_reference(inputs)
        assert all(value.isfinite().all() for value in results.values())


@every_method
def test_where_A_or_the_step_size_is_zero(discretization, device):
    """Ordinary points, with ordinary gradients: nothing is divided by them."""
    inputs = make_inputs(**MINIMAL | {"initial_states": True}, seqlen=20, discretization=discretization, device=device)
    inputs["A"] = inputs["A"] * torch.tensor([0, 1, 1e-12, 1], dtype=torch.float64, device=device)
    inputs["dt"][:, ::3] = 0
    assert_matches_reference(inputs)


def test_growth(device):
    """A > 0, within what the exponentials hold."""
    inputs = make_inputs(seqlen=100, device=device)
    inputs["A"] = -0.1 * inputs["A"]
    assert_matches_reference(inputs)


# ----- what autograd does with the operator


def test_backward_twice_accumulates(device):
    leaves = with_gradients(make_inputs(device=device))
    out = ssd_chunk_scan(**leaves)
    out.sum().backward(retain_graph=True)
    once = leaves["x"].grad.clone()
    out.sum().backward()
    assert torch.equal(leaves["x"].grad, 2 * once)


@pytest.mark.parametrize("name", TENSORS)
def test_in_place_change_of_what_is_saved_is_noticed(name, device):
    inputs = make_inputs(device=device)
    leaf = torch.ones((), dtype=torch.float64, device=device, requires_grad=True)
    saved = {key: inputs[key] * leaf for key in TENSORS}
    loss = ssd_chunk_scan(**(inputs | saved)).sum()
    saved[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_kept_for_backward(device):
    """The arguments, all of them tensors that the caller has anyway, and nothing of the size of the states at chunks."""
    for name in ("everything", "packed", "resets"):
        inputs = with_gradients(make_inputs(device=device, **({"seqlen": 70} | OPTIONS[name])), SEQUENCES[:2])
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            ssd_chunk_scan(**inputs)
        arguments = {value.untyped_storage().data_ptr() for value in inputs.values() if isinstance(value, Tensor)}
        assert kept and {x.untyped_storage().data_ptr() for x in kept} <= arguments


def test_gradients_of_sums_over_long_sequences(device):
    """With float16 and bfloat16 inputs the gradients of A, D and dt_bias are sums in float32."""
    sizes = {"batch": 1, "seqlen": 1000, "heads": 2, "headdim": 4, "dstate": 4, "groups": 1}
    inputs = make_inputs(**sizes, dtype=torch.bfloat16, device=device)
    assert_matches_reference(inputs)
