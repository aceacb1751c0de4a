"""ssd_chunk_scan on CUDA, gradients: the paths of backward's kernels, what stays apart, and calls in CUDA graphs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, arrange, assert_equal, captured, no_synchronization
from operator_spec import Cotangents, tensor_names, with_gradients
from ssd_helpers import (
    GIVEN,
    KERNEL_CHUNK,
    NAN_PLACES,
    OPTIONS,
    SEQUENCES,
    SSD,
    assert_accurate,
    assert_all_close,
    assert_nan_ends,
    evaluate,
    every_option,
    has_kernels,
    limited_shared_memory,
    make_cotangents,
    preferred_products,
    scan,
)
from ssd_variants import BF16, CUT, CUT_PACKING, DSTATES, FP16, FP32, Variant, every_variant, variants
from torch import Tensor

from ssm_kernels import ssd_chunk_scan

pytestmark = pytest.mark.cuda


@variants([BF16], [128])
def test_both_products_agree_with_many_heads(variant):
    """Equal up to roundings to the dtype of x, because only the order of sums differs."""
    inputs = variant.inputs(batch=8, heads=80, groups=2)
    cotangents, results = make_cotangents(inputs), []
    for name in ("wgmma", "mma"):
        with preferred_products(name):
            results.append(evaluate(scan, inputs, cotangents))
    assert_all_close(*results, tolerance=2e-2)


# ----- sequences


PACKINGS = {
    "around_chunks": (0, 1, 64, 128, 193),
    "empty": (0, 0, 1, 64, 64, 70, 70),
    "long": (0, 0, 700, 701, 1500, 1500),
    "many": (0, *itertools.accumulate(max(0, 37 * i % 90 - 20) for i in range(40))),
}


@pytest.mark.parametrize("with_resets", [False, True], ids=["whole", "resets"])
@pytest.mark.parametrize("initial_states", [True, False], ids=["states", "no_states"])
@pytest.mark.parametrize("cu_seqlens", PACKINGS.values(), ids=list(PACKINGS))
@variants([BF16], [64])
def test_packed_sequences(cu_seqlens, initial_states, with_resets, variant):
    resets = [sorted({*cu_seqlens[1:-1], *range(7, cu_seqlens[-1], 32)})] if with_resets else None
    inputs = variant.inputs(cu_seqlens=cu_seqlens, resets=resets, initial_states=initial_states)
    results = assert_accurate(inputs)
    if initial_states:
        empty = [i for i, (begin, end) in enumerate(itertools.pairwise(cu_seqlens)) if begin == end]
        assert torch.equal(results["grad_initial_states"][empty], make_cotangents(inputs)[1][empty])


RESETS = {
    "at_chunks": ((64, 128), (128, 192)),
    "around_chunks": ((1, 63, 65, 199), (127,)),
    "in_one_row": ((20, 21, 100), ()),
    "at_every_step": (range(1, 200), range(64, 129)),
}


@pytest.mark.parametrize("initial_states", [True, False], ids=["states", "no_states"])
@pytest.mark.parametrize("resets", RESETS.values(), ids=list(RESETS))
@variants([BF16], [64])
def test_resets(resets, initial_states, variant):
    assert_accurate(variant.inputs(resets=resets, initial_states=initial_states, seqlen=200))


@variants([BF16], [64])
def test_what_follows_a_reset_has_no_part_in_it(variant):
    """Without a gradient after it, not even a rounding of what was summed before in the same chunk."""
    inputs = variant.inputs(seqlen=64, resets=((32,), (7, 33)), D=None, z=False)
    grad_out, grad_final_states = make_cotangents(inputs)
    grad_out[:, 33:] = 0
    grad_out[0, 32] = 0
    results = evaluate(scan, inputs, (1e3 * grad_out, 0 * grad_final_states))
    for name in ("x", "dt", "B", "C"):
        gradient = results[f"grad_{name}"]
        assert not gradient[0, 32:].any() and not gradient[1, 33:].any(), name
        assert gradient[0, :32].any() and gradient[1, :33].any(), name


# ----- work tiles split along time


CUT_OPTIONS: list[dict[str, Any]] = [{}, {"resets": ((700,),)}, {"cu_seqlens": CUT_PACKING}]
CUT_OPTIONS.append(CUT_OPTIONS[1] | CUT_OPTIONS[2])
CUT_OPTIONS += [{"log_decay": True}, {"log_decay": True} | CUT_OPTIONS[3]]


def cut_inputs(variant: Variant, **options: Any) -> dict[str, Any]:
    """Weak decays: the state before the first segment reaches the last one."""
    inputs = variant.inputs(**(CUT | options))
    return inputs | {name: 0.01 * inputs[name] for name in ("A", "log_decay") if inputs[name] is not None}


@pytest.mark.parametrize(("heads", "headdim", "dstate", "seqlen"), [(1, 64, 64, 512), (3, 36, 100, 1477), (4, 128, 128, 2112)])
@variants((FP32, BF16, FP16), [64])
def test_split_work_tiles(heads, headdim, dstate, seqlen, variant):
    assert_accurate(cut_inputs(variant, heads=heads, headdim=headdim, dstate=dstate, seqlen=seqlen))


@pytest.mark.parametrize("through", [0, 1], ids=["out", "final_states"])
@pytest.mark.parametrize(
    "options",
    CUT_OPTIONS,
    ids=["one_sequence", "resets", "packed", "packed_with_resets", "log_decay", "log_decay_packed_with_resets"],
)
@variants([BF16], [64])
def test_split_work_tiles_with_the_gradient_of_one_result(options, through, variant):
    inputs = cut_inputs(variant, **options)
    cotangents = tuple(x if i == through else None for i, x in enumerate(make_cotangents(inputs)))
    assert_accurate(inputs, cotangents)


@pytest.mark.parametrize("initial_states", [True, False], ids=["states", "no_states"])
@pytest.mark.parametrize("resets", [(1,), (1476,), (255, 512, 769), (650, 660), range(100, 1400, 100)], ids=str)
@variants([BF16], [64])
def test_split_work_tiles_with_resets(resets, initial_states, variant):
    assert_accurate(cut_inputs(variant, resets=(resets,), initial_states=initial_states))


@pytest.mark.parametrize("initial_states", [True, False], ids=["states", "no_states"])
@pytest.mark.parametrize("heads", [1, 4])
@variants([BF16], [64])
def test_split_work_tiles_of_packed_sequences(heads, initial_states, variant):
    inputs = cut_inputs(variant, cu_seqlens=CUT_PACKING, heads=heads, initial_states=initial_states)
    results = assert_accurate(inputs)
    if initial_states:
        assert torch.equal(results["grad_initial_states"][[0, 2, 6]], make_cotangents(inputs)[1][[0, 2, 6]])


# ----- some gradients


@pytest.mark.parametrize("through", [0, 1], ids=["out", "final_states"])
@variants([BF16], (64, 256))
@every_option
def test_gradient_through_one_result_only(options, variant, through):
    inputs = variant.inputs(**options)
    cotangents = tuple(x if i == through else None for i, x in enumerate(make_cotangents(inputs)))
    assert_accurate(inputs, cotangents)


def gradients_of(inputs: dict[str, Any], cotangents: Cotangents, wanted: Iterable[str]) -> dict[str, Tensor | None]:
    leaves = with_gradients(inputs, wanted)
    torch.autograd.backward(scan(**leaves), cotangents)
    return {name: leaves[name].grad for name in tensor_names(inputs)}


@variants([BF16], (64, 256))
@pytest.mark.parametrize("name", ["everything", "resets_with_states", "packed_with_states", "log_decay_and_gain"])
def test_gradients_of_a_subset(name, variant):
    """Each gradient has the same bits, whichever others are needed; the others are None."""
    options = OPTIONS[name] | ({"cu_seqlens": (0, 0, 65, 100)} if name.startswith("packed") else {"seqlen": 100})
    inputs = variant.inputs(**options)
    cotangents, present = make_cotangents(inputs), tensor_names(inputs)
    everything = gradients_of(inputs, cotangents, present)
    singles_and_pairs = [*itertools.combinations(present, 1), *itertools.combinations(present, 2)]
    for wanted in [*singles_and_pairs, *itertools.combinations(present, len(present) - 1)]:
        for argument, gradient in gradients_of(inputs, cotangents, wanted).items():
            if argument in wanted:
                assert torch.equal(gradient, everything[argument]), f"grad_{argument} when only {wanted} need gradients"
            else:
                assert gradient is None


@pytest.mark.parametrize(
    "wanted",
    [("x",), ("dt", "A"), ("B", "initial_states"), ("C", "D"), ("dt_bias",), ("log_decay",), ("x", "gain")],
    ids="_".join,
)
@variants([FP32], [137])
def test_some_gradients_by_columns(wanted, variant):
    """64 columns of the states at a time, the last block with fewer. Some gradients come from one block only."""
    inputs = variant.inputs(z=False, log_decay=not {*wanted}.isdisjoint(GIVEN))
    cotangents = make_cotangents(inputs)
    everything = evaluate(scan, inputs, cotangents)
    with limited_shared_memory(163 * 1024):
        leaves = with_gradients(inputs, wanted)
        torch.autograd.backward(scan(**leaves), cotangents)
    for name in wanted:
        expected = everything[f"grad_{name}"]
        assert (leaves[name].grad - expected).norm() <= 2e-6 * expected.norm(), name


@variants([BF16], [64])
def test_gradient_is_zero_where_the_step_size_is_clamped(variant):
    inputs = variant.inputs()
    steps = torch.nn.functional.softplus(inputs["dt"].float() + inputs["dt_bias"])
    low, high = inputs["dt_limit"] = tuple(torch.quantile(steps, q).item() for q in (0.3, 0.7))
    # A step at a limit is on either side of it by the last bit of softplus.
    is_at_limit = ((steps - low).abs() < 1e-5) | ((steps - high).abs() < 1e-5)
    results = evaluate(scan, inputs, make_cotangents(inputs))
    is_clamped = (steps < low) | (steps > high)
    assert not results["grad_dt"][is_clamped & ~is_at_limit].any()
    assert results["grad_dt"][~is_clamped & ~is_at_limit].ne(0).double().mean() > 0.99
    results = assert_accurate(inputs | {"dt_limit": (5.0, 6.0)})
    assert not results["grad_dt"].any() and not results["grad_dt_bias"].any() and results["grad_A"].all()


# ----- strides


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@variants([BF16], [64])
def test_layout_of_each_argument(layout, variant):
    """Bit for bit: rows that the kernels cannot move, and steps that are apart, are copied."""
    odd = {"seqlen": 70, "headdim": 7, "dstate": 17}
    for options in ({"seqlen": 70}, odd, {"cu_seqlens": (0, 0, 65, 100)}, {"seqlen": 70, "log_decay": True}):
        inputs = variant.inputs(**options)
        cotangents = make_cotangents(inputs)
        expected = evaluate(scan, inputs, cotangents)
        for name in tensor_names(inputs):
            assert_equal(evaluate(scan, inputs | {name: arrange(inputs[name], layout)}, cotangents), expected)
        assert_equal(evaluate(scan, inputs, tuple(arrange(x, layout) for x in cotangents)), expected)


@variants([BF16], [64])
def test_rows_at_any_address(variant):
    """Rows of a wider tensor that begin at its second element."""
    inputs = variant.inputs(seqlen=70)
    cotangents = make_cotangents(inputs)
    expected = evaluate(scan, inputs, cotangents)

    def moved(tensor: Tensor) -> Tensor:
        wider = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 3), math.nan)
        wider[..., 1:-2] = tensor
        return wider[..., 1:-2]

    for name in (*SEQUENCES, "initial_states"):
        assert_equal(evaluate(scan, inputs | {name: moved(inputs[name])}, cotangents), expected)
    assert_equal(evaluate(scan, inputs, tuple(map(moved, cotangents))), expected)


@variants([BF16], [64])
def test_states_that_are_not_aligned(variant):
    inputs = variant.inputs(seqlen=70)
    expected, states = evaluate(scan, inputs), inputs["initial_states"]
    apart = torch.cat([states.new_zeros(1), states.flatten()])[1:].view_as(states)
    assert_equal(evaluate(scan, inputs | {"initial_states": apart}), expected)


@variants([BF16], [64])
def test_strides_of_zero(variant):
    """The kernels read expanded tensors in place."""
    for names, options in ((SEQUENCES, {}), (GIVEN, {"log_decay": True}), (GIVEN[:1], {"log_decay": True, "gain": False})):
        inputs = variant.inputs(seqlen=70, **options)
        cotangents = make_cotangents(inputs)
        for name in names:
            for axis in range(inputs[name].dim()):
                expanded = inputs[name].narrow(axis, 0, 1).expand_as(inputs[name])
                expected = evaluate(scan, inputs | {name: expanded.contiguous()}, cotangents)
                assert_equal(evaluate(scan, inputs | {name: expanded}, cotangents), expected)


@pytest.mark.parametrize("of_gain", [None, torch.float32, "x"], ids=str)
@pytest.mark.parametrize("of_log_decay", [torch.float32, "x"], ids=str)
@variants((BF16, FP16), [64])
def test_dtypes_of_given_gates(of_log_decay, of_gain, variant):
    """The bits of float32 with the same values; a gradient is rounded to the dtype of its argument."""
    inputs = variant.inputs(seqlen=200, log_decay=True, gain=of_gain is not None)
    dtypes = {name: variant.dtype if of == "x" else of for name, of in zip(GIVEN, (of_log_decay, of_gain), strict=True) if of}
    rounded = {name: inputs[name].to(variant.dtype) for name in dtypes}
    cotangents = make_cotangents(inputs)
    expected = evaluate(scan, inputs | {name: value.float() for name, value in rounded.items()}, cotangents)
    for name, dtype in dtypes.items():
        expected[f"grad_{name}"] = expected[f"grad_{name}"].to(dtype)
    given = {name: value.to(dtypes[name]) for name, value in rounded.items()}
    assert_equal(evaluate(scan, inputs | given, cotangents), expected)
    wider = {name: torch.stack((value, value), -1)[..., 0] for name, value in given.items()}  # other strides, in place
    assert_equal(evaluate(scan, inputs | wider, cotangents), expected)


@variants([BF16], [64])
def test_gradient_of_a_sum(variant):
    """Comes with strides of zero."""
    for options in ({}, {"cu_seqlens": (0, 30, 30, 70)}):
        inputs = variant.inputs(**options)
        ones = tuple(torch.ones_like(x) for x in make_cotangents(inputs))
        expected = evaluate(scan, inputs, ones)
        assert_equal(
            evaluate(scan, inputs, tuple(x.flatten()[:1].view((1,) * x.dim()).expand(x.shape) for x in ones)), expected
        )
        leaves = with_gradients(inputs)
        ssd_chunk_scan(**leaves).sum().backward()
        of_out = evaluate(scan, inputs, (ones[0], None))
        assert_equal({f"grad_{name}": leaves[name].grad for name in tensor_names(inputs)}, gradients_only(of_out))


def gradients_only(results: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in results.items() if name.startswith("grad_")}


@variants([BF16], [64])
def test_gradients_have_the_strides_of_their_arguments(variant):
    for is_given, names in ((False, ("x", "B", "C", "z", "dt")), (True, GIVEN)):
        inputs = variant.inputs(layout="transposed", log_decay=is_given)
        results = assert_accurate(inputs)
        for name in names:
            assert results[f"grad_{name}"].stride() == inputs[name].stride(), name


# ----- the same bits, NaN


REPEATED = {
    "long": {"batch": 1, "seqlen": 3000},
    "many": {"batch": 16, "heads": 32, "seqlen": 200},
    "many_heads": {"batch": 8, "heads": 80, "groups": 2, "seqlen": 330},
    "packed": {"cu_seqlens": (0, *itertools.accumulate(max(0, 37 * i % 90 - 20) for i in range(40)))},
    "longest": {"batch": 1, "heads": 1, "groups": 1, "seqlen": 20000},
    "cut": CUT,
    "cut_with_resets": CUT | {"resets": ((700,),)},
    "cut_packed": CUT | {"cu_seqlens": CUT_PACKING},
    "cut_log_decay": CUT | {"log_decay": True},
}


@every_variant
@pytest.mark.parametrize("sizes", REPEATED.values(), ids=list(REPEATED))
def test_repeatable(sizes, variant):
    inputs = variant.inputs(**sizes)
    cotangents = make_cotangents(inputs)
    first = evaluate(scan, inputs, cotangents)
    for _ in range(3):
        assert_equal(evaluate(scan, inputs, cotangents), first)


def with_nan(inputs: dict[str, Any], name: str, index: tuple[int, ...]) -> dict[str, Any]:
    value = inputs[name].clone()
    value[index] = math.nan
    return inputs | {name: value}


@pytest.mark.parametrize("name", SEQUENCES)
@variants([BF16], [64])
def test_nan_stays_in_its_packed_sequence(name, variant):
    inputs = variant.inputs(cu_seqlens=(0, 30, 30, 165, 300))
    cotangents = make_cotangents(inputs)
    clean = evaluate(scan, inputs, cotangents)
    actual = evaluate(scan, with_nan(inputs, name, (0, 40, 1)), cotangents)
    assert any(value.isnan().any() for value in actual.values())
    for argument in SEQUENCES:
        for steps in (slice(0, 30), slice(165, 300)):
            result = f"grad_{argument}"
            assert torch.equal(actual[result][:, steps], clean[result][:, steps]), f"{result} of a NaN in {name}"
    for i in (0, 1, 3):
        assert torch.equal(actual["grad_initial_states"][i], clean["grad_initial_states"][i]), name


@pytest.mark.parametrize("name", SEQUENCES)
@variants([BF16], [64])
def test_nan_stays_in_its_row_of_the_batch(name, variant):
    inputs = variant.inputs(batch=3)
    cotangents = make_cotangents(inputs)
    clean = evaluate(scan, inputs, cotangents)
    actual = evaluate(scan, with_nan(inputs, name, (1, 40, 1)), cotangents)
    assert any(value.isnan().any() for value in actual.values())
    for argument in (*SEQUENCES, "initial_states"):
        result = f"grad_{argument}"
        assert torch.equal(actual[result][::2], clean[result][::2]), f"{result} of a NaN in {name}"


@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("name", ["x", "dt", "z", *GIVEN])
@variants([BF16], [64])
def test_nan_stays_in_its_head(name, headdim, variant):
    """But for the gradients of B and C, which are its group's."""
    inputs = variant.inputs(heads=8, groups=2, headdim=headdim, log_decay=name in GIVEN)
    cotangents = make_cotangents(inputs)
    clean = evaluate(scan, inputs, cotangents)
    actual = evaluate(scan, with_nan(inputs, name, (1, 40, 2)), cotangents)
    assert any(value.isnan().any() for value in actual.values())
    others = [0, 1, 3, 4, 5, 6, 7]
    heads_axis = dict.fromkeys(("x", "dt", "z", *GIVEN), 2) | {"initial_states": 1} | dict.fromkeys(("A", "D", "dt_bias"), 0)
    heads_axis = {argument: axis for argument, axis in heads_axis.items() if inputs[argument] is not None}
    index = torch.tensor(others, device=clean["out"].device)
    for argument, axis in heads_axis.items():
        apart = (results[f"grad_{argument}"].index_select(axis, index) for results in (actual, clean))
        assert torch.equal(*apart), f"grad_{argument} of a NaN in {name}"
    for argument in ("B", "C"):
        assert torch.equal(actual[f"grad_{argument}"][:, :, 1], clean[f"grad_{argument}"][:, :, 1])
        assert torch.equal(actual[f"grad_{argument}"][0], clean[f"grad_{argument}"][0])


@every_variant
def test_nan_in_x_stays_in_its_head(variant):
    inputs = variant.inputs(heads=4, groups=2)
    inputs["x"][0, 70, 1] = math.nan
    results = evaluate(scan, inputs, make_cotangents(inputs))
    assert results["out"][0, 70:, 1].isnan().any() and results["grad_z"][0, 70:, 1].isnan().any()
    for name in ("out", "grad_x", "grad_z", "grad_dt"):
        assert results[name][:, :, [0, 2, 3]].isfinite().all() and results[name][1].isfinite().all()


# Sizes, the steps at which the last row's sequences begin, and the step of the NaN: inside chunks, and in a split work tile.
NAN_CASES = {
    "in_steps": ({"seqlen": 30}, (0, 10, 20), 13),
    "in_chunks": ({"seqlen": 90}, (0, 36, 72), 40),
    "in_segments": ({"seqlen": 1000, "batch": 1, "heads": 1, "groups": 1}, (0, 300, 710), 500),
}


@pytest.mark.parametrize("sizes, begins, step", NAN_CASES.values(), ids=list(NAN_CASES))
@pytest.mark.parametrize("name", NAN_PLACES)
@variants([FP32], DSTATES)
def test_nan_ends_where_a_sequence_begins(name, sizes, begins, step, variant):
    inputs = variant.inputs(resets=(begins[1:],), **sizes)
    assert_nan_ends(inputs, name, step, begins, chunk=KERNEL_CHUNK)


@pytest.mark.parametrize("name", NAN_PLACES)
@variants([FP32], [128])
def test_nan_ends_in_products_of_pytorch(name, variant):
    """PyTorch's matmuls use the chunk_size that the caller passes."""
    inputs = variant.inputs(seqlen=90, resets=((36, 72),), chunk_size=16)
    with limited_shared_memory(99 * 1024):
        assert_nan_ends(inputs, name, step=40, begins=(0, 36, 72), chunk=16)


# ----- CUDA graphs


CALLS = {"few_heads": {"seqlen": 300}, "many_heads": {"seqlen": 300, "heads": 160, "groups": 1}, "split_work_tiles": CUT}


every_call = pytest.mark.parametrize("sizes", CALLS.values(), ids=list(CALLS))


@every_variant
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", ["everything", "resets_with_states", "packed_with_states", "log_decay_and_gain"])
@every_call
def test_cuda_graph(sizes, name, gradients, variant):
    """Replayed on new values in the same tensors, the offsets of packed sequences too, it computes what an eager call does.

    Twice: with many heads states go from block to block, and blocks count as they begin: a replay must begin both anew.
    """
    end = sizes["seqlen"] + 100
    offsets = ((0, 0, 100, 101, end), (0, 250, 250, end - 1, end)) if name.startswith("packed") else (None, None)
    inputs, others = (
        variant.inputs(seed=seed, **(OPTIONS[name] | sizes | {"cu_seqlens": cu_seqlens}))
        for seed, cu_seqlens in enumerate(offsets)
    )
    if name.startswith("packed") and not has_kernels(inputs):
        pytest.skip("PyTorch's products read cu_seqlens on the host: a block has too little shared memory for the kernels")
    SSD.assert_replays((inputs, others), gradients=gradients)


@every_variant
@pytest.mark.parametrize("name", ["everything", "resets_with_states", "log_decay_and_gain"])
@every_call
def test_nothing_waits_for_the_device(sizes, name, variant):
    inputs = variant.inputs(**(OPTIONS[name] | sizes))
    cotangents = make_cotangents(inputs)
    evaluate(scan, inputs, cotangents)
    with no_synchronization():
        evaluate(scan, inputs, cotangents)


@pytest.mark.parametrize("length", [400, 1600], ids=["whole_work_tiles", "split_work_tiles"])
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])
@variants([BF16], [64])
def test_wrong_offsets_in_a_cuda_graph(gradients, length, variant):
    """Graphs do not check offsets: wrong ones give wrong numbers, but the kernels end, and later calls are right."""
    inputs = variant.inputs(cu_seqlens=(0, 100, length))
    cotangents = make_cotangents(inputs) if gradients else None
    kept = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
    expected = evaluate(scan, inputs, cotangents)
    graph, found = captured(lambda: evaluate(scan, inputs, cotangents))
    beyond = length + 500
    for offsets in ((7, 100, length), (0, length + 100, beyond), (-3, -2, -1), (length, 100, 0), (beyond, beyond, beyond)):
        inputs["cu_seqlens"].copy_(torch.tensor(offsets))
        graph.replay()
        torch.cuda.synchronize()
    inputs["cu_seqlens"].copy_(kept["cu_seqlens"])
    assert_equal({name: inputs[name] for name in kept}, kept)
    graph.replay()
    assert_equal(found, expected)
