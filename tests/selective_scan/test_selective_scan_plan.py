"""The choice among selective_scan's kernels: plans for CUDA devices of every amount of shared memory, which are plain data and
need no GPU, and the kernels that calls on a GPU take.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_equal, debug_option, launched_kernels
from selective_scan_helpers import SELECTIVE_SCAN, evaluate, kernels_of, make_cotangents, make_inputs
from torch import Tensor

from build_backend import find_toolkit
from ssm_kernels import selective_scan

ROOT = Path(__file__).resolve().parents[2]
# By compute capability: shared memory that a block may take, a kilobyte less than a multiprocessor has; types and directions
# that the sequential scan runs there.
DEVICES = {
    "8.6": (99 * 1024, set()),
    "8.0": (163 * 1024, {"float32 forward"}),
    "9.0": (227 * 1024, {f"{dtype} {way}" for dtype in ("float32", "float16", "bfloat16") for way in ("forward", "backward")}),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    toolkit = find_toolkit([])
    if toolkit is None:
        pytest.skip("no nvcc was found")
    target = tmp_path_factory.mktemp("plan") / "selective_scan_plan"
    source = ROOT / "tests" / "lib" / "selective_scan_plan.cu"
    command = [toolkit.home / "bin" / "nvcc", "-std=c++17", "-O0", f"-I{ROOT / 'csrc'}", "-arch=sm_80", source, "-o", target]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return target


def test_the_plan_of_a_call_on_the_cpu_names_no_cuda_kernel():
    assert kernels_of(make_inputs()) == ("cpu", "cpu")


def plans_and_spans(program: Path, limit: int) -> dict[str, tuple[int, int]]:
    """Bytes of shared memory and the steps of a span, by the name of a plan."""
    lines = subprocess.run([str(program), str(limit)], capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: tuple(map(int, numbers.split())) for name, numbers in (line.split(": ") for line in lines)}


def plans(program: Path, limit: int) -> dict[str, int]:
    return {name: size for name, (size, _) in plans_and_spans(program, limit).items()}


@pytest.mark.parametrize(("limit", "sequential"), DEVICES.values(), ids=DEVICES)
def test_every_call_fits_into_shared_memory(limit, sequential, program):
    taken = plans(program, limit)
    assert {name.split()[0] for name in taken} == {"float64", "float32", "bfloat16", "float16"}
    assert {name: size for name, size in taken.items() if size > limit} == {}
    assert {" ".join(name.split()[:2]) for name in taken if name.endswith(" sequential")} == sequential


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_rows_between_vector_boundaries_take_the_sequential_scan(way, program):
    """16 bytes are 8 elements of bfloat16, 4 of float32."""
    found = plans(program, DEVICES["9.0"][0])
    names = {" ".join(name.split()[:6]): name for name in found if "constant" not in name and "reverse" not in name}
    for dtype, shifted in (("bfloat16", {30, 60, 196, 197}), ("float32", {30, 197})):
        for seqlen in (30, 60, 196, 197, 200, 4096):
            name = names[f"{dtype} {way} N16 B100 D2048 L{seqlen}"]
            assert name.endswith(" sequential") and name.endswith(" shifted sequential") == (seqlen in shifted), name


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_reversed_rows_take_the_sequential_scan(way, program):
    """Rows that begin and end at multiples of 16 bytes, such as those of 60, 196, 200 and 4096 numbers in float32."""
    reverse = [name for name in plans(program, DEVICES["9.0"][0]) if " N16 B100 D2048 " in name and " reverse" in name]
    taken = [name for name in reverse if f" {way} " in name and "float64" not in name and "constant" not in name]
    assert {name.split()[5] for name in taken} == {"L30", "L60", "L196", "L197", "L200", "L4096"}
    for name in taken:
        whole = int(name.split()[5][1:]) % (4 if "float32" in name else 8) == 0
        assert name.endswith(" descending sequential") == whole, name
        assert whole or not name.endswith(" sequential"), name


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_packed_sequences_are_shifted_rows(way, program):
    """They begin at any step, whatever the length of the whole row."""
    packed = [name for name in plans(program, DEVICES["9.0"][0]) if " N16 B1 D2048 " in name and " packed" in name]
    taken = [name for name in packed if f" {way} " in name and "float64" not in name and "constant" not in name]
    assert taken and all(name.endswith(" shifted sequential") for name in taken)


def test_spans_of_backward_are_whole_tiles(program):
    """A tile has 64 steps. A span scans at least 512 states of a tile, and there are at most 32."""
    spans = plans_and_spans(program, DEVICES["9.0"][0])
    backward = {name: span for name, (_, span) in spans.items() if " backward " in name}
    for name, span in backward.items():
        dstate, dim, seqlen = (int(re.search(rf" {letter}(\d+) ", name + " ")[1]) for letter in "NDL")
        whole = " packed" in name or " constant B constant C" in name or dim == 1
        assert span == seqlen if whole else span == seqlen or (span % 64 == 0 and span // 64 * dstate >= 512), name
        assert -(-seqlen // span) <= 32, name
    long = {name: span for name, span in backward.items() if " B100 D2048 L4096 " in name and " constant" not in name}
    for dstate, expected in ((8, 4096), (16, 2048), (64, 512), (128, 256), (256, 128)):
        assert {span for name, span in long.items() if f" N{dstate} " in name} == {expected}


def test_few_blocks_take_one_span(program):
    """A row of 2048 channels leaves the device idle: time is split into segments, which run at once."""
    spans = plans_and_spans(program, DEVICES["9.0"][0])
    few = [name for name in spans if " backward " in name and " B1 D2048 L4096 " in name and " constant" not in name]
    assert few and {spans[name][1] for name in few} == {4096}


# Bytes of an element, whether channels are contiguous, batch, dim and seqlen; whether forward and backward are sequential.
# The times of both scans at these sizes, or at sizes near them, are close on an H200.
CHOICES = {
    (2, 0, 8, 1024, 1376): (True, True),
    (2, 0, 8, 1024, 1369): (True, True),
    (2, 0, 8, 1024, 777): (True, False),
    (2, 0, 8, 1032, 2048): (False, False),
    (2, 0, 3, 1280, 2047): (False, True),
    (4, 0, 8, 1024, 1376): (True, True),
    (4, 0, 8, 1024, 1369): (False, True),
    (4, 0, 8, 1024, 777): (True, False),
    (4, 0, 8, 1024, 197): (True, False),
    (4, 0, 8, 2048, 2047): (True, True),
    (4, 0, 16, 768, 2047): (True, True),
    (2, 1, 4, 1280, 1024): (True, True),
    (2, 1, 4, 1282, 1024): (True, True),
    (2, 1, 4, 1288, 1024): (False, True),
    (2, 1, 4, 1280, 200): (False, False),
    (4, 1, 4, 1280, 1024): (False, True),
    (4, 1, 4, 1280, 200): (True, False),
}


def test_the_faster_scan_is_chosen(program):
    """Odd lengths and odd numbers of channels have times of their own in the model."""
    numbers = [str(number) for sizes in CHOICES for number in sizes]
    arguments = [str(program), str(DEVICES["9.0"][0]), *numbers]
    lines = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [tuple(value == "1" for value in line.split()) for line in lines]
    assert dict(zip(CHOICES, found, strict=True)) == CHOICES


# ----- calls on a GPU

both_layouts = pytest.mark.parametrize("layout", ["contiguous", "transposed"])


def evaluate_by_each_kernel(inputs: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    if torch.cuda.get_device_properties("cuda").shared_memory_per_multiprocessor < 227 * 1024:
        pytest.skip("the sequential scan is made for two blocks of 113 KiB of shared memory on a multiprocessor")
    results = {}
    for kernel in ("faster", "sequential", "warp_scan"):
        with debug_option("selective_scan_kernel", kernel):
            results[kernel] = evaluate(SELECTIVE_SCAN, inputs, make_cotangents(inputs))
    return results


@pytest.mark.cuda
@both_layouts
@pytest.mark.parametrize("dstate", [13, 16])
def test_many_channels_take_the_sequential_scan(dstate, layout):
    sizes = {"batch": 8, "dim": 2048, "seqlen": 64, "dstate": dstate}
    inputs = make_inputs(**sizes, dtype=torch.bfloat16, layout=layout, device="cuda")
    results = evaluate_by_each_kernel(inputs)
    assert kernels_of(inputs) == ("sequential", "sequential")
    assert_equal(results["faster"], results["sequential"])


@pytest.mark.cuda
@pytest.mark.parametrize(("seqlen", "layout"), [(65, "contiguous"), (68, "contiguous"), (64, "offset")])
def test_calls_with_shifted_rows_take_the_sequential_scan(seqlen, layout):
    sizes = {"batch": 8, "dim": 2048, "seqlen": seqlen, "dstate": 16}
    inputs = make_inputs(**sizes, dtype=torch.bfloat16, layout=layout, device="cuda")
    results = evaluate_by_each_kernel(inputs)
    assert kernels_of(inputs) == ("sequential", "sequential")
    assert_equal(results["faster"], results["sequential"])


@pytest.mark.cuda
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
    results = evaluate_by_each_kernel(inputs)
    assert kernels_of(inputs) == ("warp_scan", "warp_scan")
    assert_equal(results["faster"], results["warp_scan"])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("discretization", ["bilinear", "rk4"])
def test_the_choice_is_that_of_zoh(discretization, dtype):
    for sizes in ({"batch": 8, "dim": 2048, "seqlen": 64}, {"batch": 1, "dim": 512, "seqlen": 2047}):
        chosen = [
            kernels_of(make_inputs(**sizes, dstate=16, dtype=dtype, discretization=method, device="cuda"))[0]
            for method in (discretization, "zoh")
        ]
        assert chosen[0] == chosen[1]


@pytest.mark.cuda
def test_few_channels_have_lanes_in_time_in_forward():
    inputs = make_inputs(batch=2, dim=64, seqlen=304, dstate=16, dtype=torch.bfloat16, device="cuda")
    results = evaluate_by_each_kernel(inputs)
    assert kernels_of(inputs) == ("warp_scan", "sequential")
    assert torch.equal(results["faster"]["out"], results["warp_scan"]["out"])


@pytest.mark.cuda
def test_both_carry_passes_find_the_same_maps():
    """More than 16 states, so that the main pass is the warp scan; its backward cuts the row into segments."""
    inputs = make_inputs(batch=1, dim=129, seqlen=6400, dstate=29, dtype=torch.float32, device="cuda")
    inputs["A"] = 1e-2 * inputs["A"]
    results = evaluate_by_each_kernel(inputs)
    assert all("warp_scan" in name for name in kernels_of(inputs))
    for name, expected in results["warp_scan"].items():
        tolerance = 1e-4 * expected.abs().max().item()
        torch.testing.assert_close(results["sequential"][name], expected, rtol=1e-4, atol=tolerance)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["sequential", "warp_scan"])
def test_the_debug_option_chooses_both_kernels(name):
    inputs = make_inputs(batch=2, dim=40, seqlen=32, dstate=16, dtype=torch.bfloat16, device="cuda")
    with debug_option("selective_scan_kernel", name):
        assert kernels_of(inputs) == (name, name)


@pytest.mark.cuda
@pytest.mark.parametrize(("seqlen", "is_sequential"), [(32, True), (33, False)])
def test_few_steps_are_sequential(seqlen, is_sequential):
    inputs = make_inputs(batch=2, dim=40, seqlen=seqlen, dstate=16, dtype=torch.bfloat16, device="cuda")
    names = launched_kernels(lambda: selective_scan(**inputs))
    assert any("short_scan_fwd_kernel" in name for name in names) == is_sequential, sorted(names)
    assert kernels_of(inputs)[0] == ("short_scan" if is_sequential else "warp_scan")
