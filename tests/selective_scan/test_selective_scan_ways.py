"""The choice of selective_scan among its three kernels on CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_equal, debug_option
from selective_scan_helpers import SELECTIVE_SCAN, evaluate, kernels_of, make_cotangents, make_inputs
from torch import Tensor

from ssm_kernels import selective_scan

pytestmark = pytest.mark.cuda

both_layouts = pytest.mark.parametrize("layout", ["contiguous", "transposed"])


def evaluate_each_way(inputs: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    if torch.cuda.get_device_properties("cuda").shared_memory_per_multiprocessor < 227 * 1024:
        pytest.skip("the sequential scan is made for two blocks of 113 KiB of shared memory on a multiprocessor")
    results = {}
    for way in ("faster", "sequential", "warp_scan"):
        with debug_option("selective_scan_kernel", way):
            results[way] = evaluate(SELECTIVE_SCAN, inputs, make_cotangents(inputs))
    return results


@both_layouts
@pytest.mark.parametrize("dstate", [13, 16])
def test_many_channels_take_the_sequential_scan(dstate, layout):
    sizes = {"batch": 8, "dim": 2048, "seqlen": 64, "dstate": dstate}
    inputs = make_inputs(**sizes, dtype=torch.bfloat16, layout=layout, device="cuda")
    results = evaluate_each_way(inputs)
    assert kernels_of(inputs) == ("sequential", "sequential")
    assert_equal(results["faster"], results["sequential"])


@pytest.mark.parametrize(("seqlen", "layout"), [(65, "contiguous"), (68, "contiguous"), (64, "offset")])
def test_rows_between_vector_boundaries_take_the_sequential_scan(seqlen, layout):
    sizes = {"batch": 8, "dim": 2048, "seqlen": seqlen, "dstate": 16}
    inputs = make_inputs(**sizes, dtype=torch.bfloat16, layout=layout, device="cuda")
    results = evaluate_each_way(inputs)
    assert kernels_of(inputs) == ("sequential", "sequential")
    assert_equal(results["faster"], results["sequential"])


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 8, "dim": 2048, "dstate": 12},
        {"batch": 8, "dim": 2048, "C": "constant"},
        {"batch": 8, "dim": 2048, "dstate": 17},
        {"batch": 8, "dim": 2048, "B": "constant"},
        {"batch": 8, "dim": 2048, "groups": 128},
        {"batch": 8, "dim": 2048, "layout": "sliced"},
    ],
    ids=str,
)
def test_other_calls_have_lanes_in_time(options):
    inputs = make_inputs(**{"seqlen": 64, "dstate": 16, "dtype": torch.bfloat16, "device": "cuda"} | options)
    results = evaluate_each_way(inputs)
    assert kernels_of(inputs) == ("warp_scan", "warp_scan")
    assert_equal(results["faster"], results["warp_scan"])


def test_few_channels_have_lanes_in_time_in_forward():
    inputs = make_inputs(batch=2, dim=64, seqlen=304, dstate=16, dtype=torch.bfloat16, device="cuda")
    results = evaluate_each_way(inputs)
    assert kernels_of(inputs) == ("warp_scan", "sequential")
    assert torch.equal(results["faster"]["out"], results["warp_scan"]["out"])


def test_both_carry_passes_find_the_same_maps():
    """More than 16 states, so that the main pass is the warp scan; its backward cuts the row into segments."""
    inputs = make_inputs(batch=1, dim=129, seqlen=6400, dstate=29, dtype=torch.float32, device="cuda")
    inputs["A"] = 1e-2 * inputs["A"]
    results = evaluate_each_way(inputs)
    assert all("warp_scan" in name for name in kernels_of(inputs))
    for name, expected in results["warp_scan"].items():
        tolerance = 1e-4 * expected.abs().max().item()
        torch.testing.assert_close(results["sequential"][name], expected, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize("way", ["sequential", "warp_scan"])
def test_the_debug_option_chooses_both_kernels(way):
    inputs = make_inputs(batch=2, dim=40, seqlen=32, dstate=16, dtype=torch.bfloat16, device="cuda")
    with debug_option("selective_scan_kernel", way):
        assert kernels_of(inputs) == (way, way)


@pytest.mark.parametrize(("seqlen", "is_sequential"), [(32, True), (33, False)])
def test_few_steps_are_sequential(seqlen, is_sequential):
    inputs = make_inputs(batch=2, dim=40, seqlen=seqlen, dstate=16, dtype=torch.bfloat16, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        selective_scan(**inputs)
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert any("short_scan_fwd_kernel" in name for name in names) == is_sequential, sorted(names)
    assert kernels_of(inputs)[0] == ("short_scan" if is_sequential else "warp_scan")
