"""The kernels of ssd_chunk_scan_summary's final states on CUDA, and of their mirror, the gradient of the states before a span.

The exact values are PyTorch's matmuls in float64, which test_summaries.py compares with the reference. Of the mirror, ``x`` is
the gradient of the outputs and ``B`` is C.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, assert_as_accurate, dtypes, move_all, no_synchronization
from operator_spec import as_float64
from ssd_helpers import SSD, has_16_bit_products, limited_shared_memory, limited_workspace, plan
from ssd_rounding import states_in_split_products
from summary_helpers import SSD_SUMMARY
from torch import Tensor

from ssm_kernels import ssd_chunk_scan_summary
from ssm_kernels.ops import summaries

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("each_products")]

of_kernels = dtypes(torch.float32, torch.bfloat16, torch.float16)
both_directions = pytest.mark.parametrize("reverse", [False, True], ids=["final_states", "initial_gradient"])


def inputs_on_cuda(**options: Any) -> dict[str, Any]:
    sizes = {"headdim": 64, "dstate": 64, "seqlen": 130, "dtype": torch.bfloat16, "device": "cuda"}
    return SSD_SUMMARY.make_inputs(**(sizes | options))


def span_states(inputs: dict[str, Any], reverse: bool) -> Tensor:
    if not reverse:
        return ssd_chunk_scan_summary(**inputs)[0]
    mirrored = {name: value for name, value in inputs.items() if name not in ("x", "B")}
    return summaries._ssd_chunk_scan_initial_gradient(inputs["x"], C=inputs["B"], **mirrored)


def assert_accurate(inputs: dict[str, Any], reverse: bool) -> Tensor:
    scan = SSD_SUMMARY.scan_inputs(inputs)
    assert plan(scan, is_backward=True)["kernel"] != "aten"
    actual, exact = span_states(inputs, reverse), span_states(as_float64(inputs), reverse)
    if has_16_bit_products(scan):
        native = states_in_split_products(**inputs, reverse=reverse)
    else:
        native = span_states(move_all(inputs, "cpu"), reverse).cuda()
    assert actual.shape == exact.shape and actual.is_contiguous() and exact.any()
    assert_as_accurate(actual, native, exact, "initial gradient" if reverse else "final states")
    return actual


@both_directions
@of_kernels
@pytest.mark.parametrize("seqlen", [1, 2, 63, 64, 65, 127, 128, 129, 200])
def test_lengths_around_chunks(seqlen, dtype, reverse):
    assert_accurate(inputs_on_cuda(seqlen=seqlen, dtype=dtype), reverse)


@both_directions
@of_kernels
@pytest.mark.parametrize(
    ("headdim", "dstate"),
    [(1, 1), (7, 17), (64, 16), (64, 128), (32, 64), (72, 65), (128, 128), (256, 100), (64, 130), (7, 137), (128, 256)],
)
def test_sizes_of_states(headdim, dstate, dtype, reverse):
    """Several state tiles of a head, padded ones, and blocks of columns."""
    assert_accurate(inputs_on_cuda(headdim=headdim, dstate=dstate, dtype=dtype), reverse)


@both_directions
@of_kernels
@pytest.mark.parametrize(("batch", "heads", "groups"), [(1, 1, 1), (3, 3, 1), (2, 3, 3), (2, 12, 4), (1, 9, 3)])
def test_heads_and_groups(batch, heads, groups, dtype, reverse):
    assert_accurate(inputs_on_cuda(batch=batch, heads=heads, groups=groups, dtype=dtype), reverse)


@both_directions
@of_kernels
@pytest.mark.parametrize("decay", [1.0, 0.01], ids=["strong_decay", "weak_decay"])
@pytest.mark.parametrize(
    ("batch", "heads", "seqlen"), [(1, 2, 512), (1, 128, 645), (1, 3, 20000), (4, 160, 200)],
    ids=["a_chunk_each", "two_segments", "many_segments", "more_work_tiles_than_multiprocessors"],
)  # fmt: skip
def test_segments(batch, heads, seqlen, decay, dtype, reverse):
    """With weak decays the first segment reaches the last state."""
    sizes = {"headdim": 16, "dstate": 16, "groups": 1}
    inputs = inputs_on_cuda(batch=batch, heads=heads, seqlen=seqlen, dtype=dtype, **sizes)
    assert_accurate(inputs | {"A": decay * inputs["A"]}, reverse)


@both_directions
@of_kernels
@pytest.mark.parametrize(
    "resets",
    [((1,), (199,)), ((63, 65), (64,)), ((), (128, 130)), ((65, 66, 67), (191, 192)), (range(1, 200), (10, 190))],
    ids=["ends", "around_a_border", "one_row", "inside", "every_step"],
)
def test_resets(resets, dtype, reverse):
    assert_accurate(inputs_on_cuda(seqlen=200, resets=resets, dtype=dtype), reverse)


@both_directions
@pytest.mark.parametrize("resets", [(1,), (19999,), (640, 9984, 10000)], ids=str)
def test_resets_in_segments(resets, reverse):
    inputs = inputs_on_cuda(batch=1, heads=3, groups=1, seqlen=20000, resets=(resets,))
    assert_accurate(inputs | {"A": 0.01 * inputs["A"]}, reverse)


@both_directions
@of_kernels
def test_nan_of_another_sequence(dtype, reverse):
    """It reaches at most the chunks of its sequence; in float32, its sequence alone."""
    inputs = inputs_on_cuda(seqlen=300, resets=((100,), (100, 220)), dtype=dtype)
    clean = span_states(inputs, reverse)
    near, far = ((100, 110), (150, 299)) if reverse else ((99, 219), (10, 140))
    steps = near if dtype == torch.float32 else far
    with_nan = {name: inputs[name].clone() for name in ("x", "dt", "B")}
    for row, step in enumerate(steps):
        for tensor in with_nan.values():
            tensor[row, step] = math.nan
    assert torch.equal(span_states(inputs | with_nan, reverse), clean)


@both_directions
@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize(("headdim", "dstate"), [(64, 64), (7, 17)])
def test_layouts(headdim, dstate, layout, reverse):
    sizes = {"headdim": headdim, "dstate": dstate, "seqlen": 200}
    expected, actual = (span_states(inputs_on_cuda(layout=of, **sizes), reverse) for of in ("contiguous", layout))
    assert torch.equal(actual, expected)


@both_directions
@pytest.mark.parametrize("dstate", [64, 137])
def test_little_workspace(dstate, reverse):
    """One row of the batch at a time."""
    inputs = inputs_on_cuda(batch=3, dstate=dstate, resets=((3,), (), (64, 70)))
    with limited_workspace(1):
        assert_accurate(inputs, reverse)


@both_directions
@of_kernels
@pytest.mark.parametrize("kibibytes", [99, 163])
def test_little_shared_memory(kibibytes, dtype, reverse):
    """Fewer stages, or fewer columns at a time."""
    inputs = inputs_on_cuda(seqlen=300, dstate=100, dtype=dtype)
    with limited_shared_memory(1024 * kibibytes):
        if plan(SSD_SUMMARY.scan_inputs(inputs), is_backward=True)["kernel"] == "aten":
            pytest.skip("matmuls take the call")
        assert_accurate(inputs, reverse)


@both_directions
@of_kernels
def test_only_kernels_of_states_run(dtype, reverse):
    """Neither matmuls nor forward's kernel, and the host does not wait."""
    inputs = inputs_on_cuda(seqlen=2000, dstate=128, dtype=dtype)
    span_states(inputs, reverse)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        with no_synchronization():
            span_states(inputs, reverse)
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    assert sum("ssd_state_passing_kernel" in name for name in names) == 1
    assert sum("ssd_fold_summaries_kernel" in name for name in names) == 1
    assert not [name for name in names if "ssd_fwd" in name or "gemm" in name.lower() or "cutlass" in name]


@of_kernels
def test_mirror_is_the_gradient_of_the_scan(dtype):
    """In one chunk the scan's own backward has the same products, in the same order."""
    inputs = inputs_on_cuda(seqlen=64, dtype=dtype)
    states = torch.zeros(2, 4, 64, 64, device="cuda", requires_grad=True)
    out, _ = SSD(**SSD_SUMMARY.scan_inputs(inputs, states))
    (expected,) = torch.autograd.grad(out, states, inputs["x"])
    assert torch.equal(span_states(inputs, reverse=True), expected)
