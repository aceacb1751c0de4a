"""How selective_scan is cut for CUDA devices of every amount of shared memory: its plans are plain data and need no GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from selective_scan_helpers import kernels_of, make_inputs

from build_backend import find_toolkit

ROOT = Path(__file__).resolve().parents[1]
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
    source = ROOT / "tests" / "selective_scan_plan.cu"
    command = [toolkit.home / "bin" / "nvcc", "-std=c++17", "-O0", f"-I{ROOT / 'csrc'}", "-arch=sm_80", source, "-o", target]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return target


def test_the_plan_of_a_call_on_the_cpu_names_no_cuda_kernel():
    assert kernels_of(make_inputs()) == ("cpu", "cpu")


@pytest.mark.parametrize(("limit", "sequential"), DEVICES.values(), ids=DEVICES)
def test_every_call_fits_into_shared_memory(limit, sequential, program):
    lines = subprocess.run([str(program), str(limit)], capture_output=True, text=True, check=True).stdout.splitlines()
    taken = {name: int(size) for name, size in (line.split(": ") for line in lines)}
    assert {name.split()[0] for name in taken} == {"float64", "float32", "bfloat16", "float16"}
    assert {name: size for name, size in taken.items() if size > limit} == {}
    assert {" ".join(name.split()[:2]) for name in taken if name.endswith(" sequential")} == sequential
