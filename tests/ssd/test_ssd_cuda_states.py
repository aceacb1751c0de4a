"""ssd_chunk_scan on CUDA: states at positions, and the states after a span of steps.

test_states_at.py and test_summaries.py have the tests that are the same for every device.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import (
    LAYOUTS,
    assert_as_accurate,
    captured,
    launched_kernels,
    move_all,
    no_synchronization,
    uninitialized_memory_is_nan,
)
from operator_spec import as_float64
from ssd_helpers import (
    GIVEN,
    KERNEL_CHUNK,
    SEQUENCES,
    SSD,
    SSD_STATES,
    has_16_bit_products,
    limited_shared_memory,
    limited_workspace,
    plan,
)
from ssd_rounding import states_in_split_products
from ssd_variants import BF16, DSTATES, FP16, FP32, Variant, variants
from summary_helpers import SSD_SUMMARY
from torch import Tensor

from ssm_kernels import ssd_chunk_scan_summary
from ssm_kernels.ops import summaries

pytestmark = pytest.mark.cuda


def states_inputs(variant: Variant, **options: Any) -> dict[str, Any]:
    return variant.inputs(**({"seqlen": 300} | options))


# ----- states_at without gradients: forward's kernels store the states between chunks as they pass them

# How blocks share the work: work tiles that several blocks process, work tiles that are cut between two blocks, and whole ones.
SHAPES: dict[str, dict[str, Any]] = {
    "split_work_tiles": {"batch": 1, "heads": 3, "groups": 1, "seqlen": 64 * 40 + 5},
    "many_heads": {"heads": 160, "groups": 1, "seqlen": 300},
    "whole_chunks": {"seqlen": 256},
    "resets": {"seqlen": 300, "resets": ((1, 64, 65, 129, 192), (128, 256))},
    "resets_in_split_work_tiles": {"batch": 1, "heads": 2, "groups": 1, "seqlen": 2000, "resets": ((64, 500, 1024, 1025),)},
    "padded": {"seqlen": 300, "headdim": 60, "dstate": 60},
    "without_initial_states": {"seqlen": 300, "initial_states": False},
    "one_chunk": {"seqlen": 64},
    "log_decay": {"seqlen": 300, "resets": ((1, 64, 130), ()), "log_decay": True},
}


every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))


def positions_of(seqlen: int) -> list[tuple[int, ...]]:
    """Multiples of the chunk: each, in no order and twice, of distances that have a common divisor, and the last alone."""
    every = (*range(0, seqlen, KERNEL_CHUNK), seqlen)
    return [every[1:-1], every, (*every[::-3], 0, seqlen, *every[::2]), every[2:-1:2], every[-2:-1]]


def before(inputs: dict[str, Any], position: int) -> dict[str, Any]:
    """The arguments of the steps before the position."""
    names = [name for name in (*SEQUENCES, *GIVEN, "seq_idx") if inputs[name] is not None]
    return inputs | {name: inputs[name][:, :position] for name in names}


def assert_accurate_states(states: Tensor, exact: Tensor, inputs: dict[str, Any], positions: tuple[int, ...]) -> None:
    """A state at a position is as accurate as the final state of a scan of the steps before it."""
    for i, position in enumerate(positions):
        error = (states[:, i] - exact[:, i]).norm()
        expected = (SSD(**before(inputs, position))[1] - exact[:, i]).norm()
        floor = torch.finfo(torch.float32).eps * exact[:, i].norm()
        assert error <= 1.5 * expected + 4 * floor, f"{position}: {error} from float64, the final state {expected}"


@every_shape
@variants((FP32, FP16, BF16), DSTATES)
def test_multiples_of_the_chunk(shape, variant):
    inputs = states_inputs(variant, **shape)
    seqlen = inputs["x"].shape[1]
    every = (*range(0, seqlen, KERNEL_CHUNK), seqlen)
    exact = SSD_STATES.evaluate_in_float64(inputs | {"states_at": every}, function=SSD_STATES)["states"]
    alone = SSD.evaluate(SSD, inputs)
    first = None
    for positions in positions_of(seqlen):
        with uninitialized_memory_is_nan():
            results = SSD_STATES.evaluate(SSD_STATES, inputs | {"states_at": positions})
        assert torch.equal(results["out"], alone["out"]) and torch.equal(results["final_states"], alone["final_states"])
        wanted = exact[:, [every.index(p) for p in positions]]
        assert results["states"].shape == wanted.shape
        if positions == every:
            first = results["states"]
            assert_accurate_states(first, exact, inputs, every)
            assert torch.equal(first[:, -1], alone["final_states"])
        elif positions:
            assert_accurate_states(results["states"], wanted, inputs, positions)
        if first is not None:  # the same pass, whatever it stores
            assert torch.equal(results["states"], first[:, [every.index(p) for p in positions]])


@pytest.mark.parametrize("shape", ["many_heads", "resets", "padded", "without_initial_states", "log_decay"])
@variants((FP32, FP16, BF16), [64])
def test_other_positions(shape, variant):
    """From the state at the multiple before, which a change of seq_idx there resets; also of sequences of less than a chunk."""
    for seqlen in (300, 33, 20):
        resets = {"resets": ((1, 10), (5,))} if "resets" in SHAPES[shape] and seqlen < 300 else {}
        inputs = states_inputs(variant, **(SHAPES[shape] | {"seqlen": seqlen} | resets))
        positions = tuple(p for p in (0, 3, 64, 65, 130, 193, 250, seqlen - 1, seqlen) if p <= seqlen)
        states_at = {"states_at": positions}
        exact = SSD_STATES.evaluate_in_float64(inputs | states_at, function=SSD_STATES)["states"]
        with uninitialized_memory_is_nan():
            states = SSD_STATES(**inputs | states_at)[2]
            assert_accurate_states(states, exact, inputs, positions)


@variants((FP32, FP16, BF16), [64])
def test_infinity_ends_where_a_sequence_begins(variant):
    inputs = states_inputs(variant, batch=1, resets=((128,),))
    inputs["initial_states"][0, 0] = torch.inf
    states = SSD_STATES(**inputs | {"states_at": (64, 128, 150, 192)})[2]
    assert not states[0, :2, 0].isfinite().any() and states[0, 2:].isfinite().all() and states[0, :, 1:].isfinite().all()


def count_kernels(inputs: dict[str, Any], positions: tuple[int, ...]) -> int:
    """The launches of forward's kernels, those of other kernels apart."""
    with torch.no_grad():
        SSD_STATES(**inputs | {"states_at": positions})
        kernels = launched_kernels(lambda: SSD_STATES(**inputs | {"states_at": positions}))
    return sum(count for name, count in kernels.items() if "ssd_fwd_" in name or "ssd_short_scan" in name)


@variants((FP32, FP16, BF16), [64])
def test_one_launch(variant):
    inputs = states_inputs(variant)
    inputs["A"].requires_grad_()
    for positions in positions_of(300):
        assert count_kernels(inputs, positions) == 1
    assert count_kernels(inputs, (64, 70, 128, 200, 70)) == 3


@variants((FP32, FP16, BF16), [64])
def test_graph_without_synchronization(variant):
    inputs = states_inputs(variant, **SHAPES["resets"]) | {"states_at": (256, 64, 70, 300)}
    expected = SSD_STATES(**inputs)
    with no_synchronization():
        SSD_STATES(**inputs)
    graph, results = captured(lambda: SSD_STATES(**inputs))
    for result in results:
        result.zero_()
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@variants([FP32], (64, 256))
def test_without_kernels(variant):
    """PyTorch's matmuls take the call where a block has too little shared memory."""
    inputs = states_inputs(variant) | {"states_at": (64, 70, 0, 300)}
    exact = {name: value.float() for name, value in SSD_STATES.evaluate_in_float64(inputs, function=SSD_STATES).items()}
    with limited_shared_memory(99 * 1024):
        assert plan(inputs)["kernel"] == "aten"
        SSD_STATES.assert_close(SSD_STATES.evaluate(SSD_STATES, inputs), exact, tolerance=1e-4)


# ----- ssd_chunk_scan_summary's final states, and their mirror, the gradient of the states before a span

# The exact values are PyTorch's matmuls in float64, which test_summaries.py compares with the reference. The mirror's ``x`` is
# the gradient of the outputs, its ``B`` is C.


both_directions = pytest.mark.parametrize("reverse", [False, True], ids=["final_states", "initial_gradient"])


def span_inputs(variant: Variant, **options: Any) -> dict[str, Any]:
    return SSD_SUMMARY.make_inputs(**(variant.sizes | options))


def span_states(inputs: dict[str, Any], reverse: bool) -> Tensor:
    if not reverse:
        return ssd_chunk_scan_summary(**inputs)[0]
    mirrored = {name: value for name, value in inputs.items() if name not in ("x", "B", "gain")}
    return summaries._ssd_chunk_scan_initial_gradient(inputs["x"], C=inputs["B"], **mirrored)


def assert_accurate_span(inputs: dict[str, Any], reverse: bool) -> Tensor:
    scan = SSD_SUMMARY.scan_inputs(inputs)
    assert plan(scan, is_backward=True)["kernel"] != "aten"
    actual, exact = span_states(inputs, reverse), span_states(as_float64(inputs), reverse)
    if has_16_bit_products(scan):
        native = states_in_split_products(**inputs, reverse=reverse)
    else:
        native = span_states(move_all(inputs, "cpu"), reverse).cuda()
    assert actual.shape == exact.shape and actual.is_contiguous() and exact.any()
    # The sums of log decays of a chunk reach 2^7. Their rounding is not in the products of the yardstick.
    floor = 2**-18 if has_16_bit_products(scan) else None
    assert_as_accurate(actual, native, exact, "initial gradient" if reverse else "final states", floor)
    return actual


@both_directions
@pytest.mark.parametrize("log_decay", [False, True])
@pytest.mark.parametrize("seqlen", [1, 2, 63, 64, 65, 127, 128, 129, 200])
@variants((FP32, BF16, FP16), [64])
def test_span_lengths_around_chunks(seqlen, log_decay, reverse, variant):
    assert_accurate_span(span_inputs(variant, seqlen=seqlen, log_decay=log_decay), reverse)


@both_directions
@pytest.mark.parametrize(
    ("headdim", "dstate"),
    [(1, 1), (7, 17), (64, 16), (64, 128), (32, 64), (72, 65), (128, 128), (256, 100), (64, 130), (7, 137), (128, 256)],
)
@variants((FP32, BF16, FP16), [64])
def test_span_sizes_of_states(headdim, dstate, reverse, variant):
    """Several state tiles of a head, padded ones, and blocks of columns."""
    assert_accurate_span(span_inputs(variant, headdim=headdim, dstate=dstate), reverse)


@both_directions
@pytest.mark.parametrize(("batch", "heads", "groups"), [(1, 1, 1), (3, 3, 1), (2, 3, 3), (2, 12, 4), (1, 9, 3)])
@variants((FP32, BF16, FP16), [64])
def test_span_heads_and_groups(batch, heads, groups, reverse, variant):
    assert_accurate_span(span_inputs(variant, batch=batch, heads=heads, groups=groups), reverse)


@both_directions
@pytest.mark.parametrize("log_decay", [False, True])
@pytest.mark.parametrize("decay", [1.0, 0.01], ids=["strong_decay", "weak_decay"])
@pytest.mark.parametrize(
    ("batch", "heads", "seqlen"), [(1, 2, 512), (1, 128, 645), (1, 3, 20000), (4, 160, 200)],
    ids=["a_chunk_each", "two_segments", "many_segments", "more_work_tiles_than_multiprocessors"],
)  # fmt: skip
@variants((FP32, BF16, FP16), [64])
def test_span_segments(batch, heads, seqlen, decay, log_decay, reverse, variant):
    """With weak decays the first segment reaches the last state."""
    sizes = {"headdim": 16, "dstate": 16, "groups": 1, "log_decay": log_decay}
    inputs = span_inputs(variant, batch=batch, heads=heads, seqlen=seqlen, **sizes)
    name = "log_decay" if log_decay else "A"
    assert_accurate_span(inputs | {name: decay * inputs[name]}, reverse)


@both_directions
@pytest.mark.parametrize(
    "resets",
    [((1,), (199,)), ((63, 65), (64,)), ((), (128, 130)), ((65, 66, 67), (191, 192)), (range(1, 200), (10, 190))],
    ids=["ends", "around_a_border", "one_row", "inside", "every_step"],
)
@variants((FP32, BF16, FP16), [64])
def test_span_resets(resets, reverse, variant):
    assert_accurate_span(span_inputs(variant, seqlen=200, resets=resets), reverse)


@both_directions
@pytest.mark.parametrize("resets", [(1,), (19999,), (640, 9984, 10000)], ids=str)
@variants([BF16], [64])
def test_span_resets_in_segments(resets, reverse, variant):
    inputs = span_inputs(variant, batch=1, heads=3, groups=1, seqlen=20000, resets=(resets,))
    assert_accurate_span(inputs | {"A": 0.01 * inputs["A"]}, reverse)


@both_directions
@variants((FP32, BF16, FP16), [64])
def test_span_nan_of_another_sequence(reverse, variant):
    """It reaches at most the chunks of its sequence; in float32, its sequence alone."""
    inputs = span_inputs(variant, seqlen=300, resets=((100,), (100, 220)))
    clean = span_states(inputs, reverse)
    near, far = ((100, 110), (150, 299)) if reverse else ((99, 219), (10, 140))
    steps = near if variant.dtype == FP32 else far
    with_nan = {name: inputs[name].clone() for name in ("x", "dt", "B")}
    for row, step in enumerate(steps):
        for tensor in with_nan.values():
            tensor[row, step] = math.nan
    assert torch.equal(span_states(inputs | with_nan, reverse), clean)


@both_directions
@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize(("headdim", "dstate"), [(64, 64), (7, 17)])
@variants([BF16], [64])
def test_span_layouts(headdim, dstate, layout, reverse, variant):
    sizes = {"headdim": headdim, "dstate": dstate, "seqlen": 200}
    expected, actual = (span_states(span_inputs(variant, layout=of, **sizes), reverse) for of in ("contiguous", layout))
    assert torch.equal(actual, expected)


@both_directions
@pytest.mark.parametrize("dstate", [64, 137])
@variants([BF16], [64])
def test_span_little_workspace(dstate, reverse, variant):
    """One row of the batch at a time."""
    inputs = span_inputs(variant, batch=3, dstate=dstate, resets=((3,), (), (64, 70)))
    with limited_workspace(1):
        assert_accurate_span(inputs, reverse)


@both_directions
@pytest.mark.parametrize("kibibytes", [99, 163])
@variants((FP32, BF16, FP16), [64])
def test_span_little_shared_memory(kibibytes, reverse, variant):
    """Fewer stages, or fewer columns at a time."""
    inputs = span_inputs(variant, seqlen=300, dstate=100)
    with limited_shared_memory(1024 * kibibytes):
        if plan(SSD_SUMMARY.scan_inputs(inputs), is_backward=True)["kernel"] == "aten":
            pytest.skip("matmuls take the call")
        assert_accurate_span(inputs, reverse)


@both_directions
@pytest.mark.parametrize("log_decay", [False, True])
@variants((FP32, BF16, FP16), [64])
def test_span_only_kernels_of_states_run(log_decay, reverse, variant):
    """Neither matmuls nor forward's kernel, and the host does not wait."""
    inputs = span_inputs(variant, seqlen=2000, dstate=128, log_decay=log_decay)
    span_states(inputs, reverse)

    def without_waiting() -> None:
        with no_synchronization():
            span_states(inputs, reverse)

    kernels = launched_kernels(without_waiting)
    assert sum(count for name, count in kernels.items() if "state_passing_kernel" in name) == 1
    assert sum(count for name, count in kernels.items() if "ssd_fold_summaries_kernel" in name) == 1
    assert not [name for name in kernels if "ssd_fwd" in name or "gemm" in name.lower() or "cutlass" in name]


@variants((FP32, BF16, FP16), [64])
def test_span_mirror_is_the_gradient_of_the_scan(variant):
    """In one chunk the scan's own backward has the same products, in the same order."""
    inputs = span_inputs(variant, seqlen=64)
    states = torch.zeros(2, 4, 64, 64, device="cuda", requires_grad=True)
    out, _ = SSD(**SSD_SUMMARY.scan_inputs(inputs, states))
    (expected,) = torch.autograd.grad(out, states, inputs["x"])
    assert torch.equal(span_states(inputs, reverse=True), expected)
