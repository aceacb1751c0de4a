"""Questions that launches ask the CUDA runtime (csrc/cuda/launch.cuh, tma_descriptor.h), on a runtime that the test makes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from build_backend import cuda_include_dirs, find_toolkit

ROOT = Path(__file__).resolve().parents[2]


def test_failed_probes_are_forgotten_and_answers_are_kept(tmp_path):
    """No failed probe leaves CUDA's last error set, or its answer cached; each kernel is asked for once on a device."""
    toolkit = find_toolkit([])
    if toolkit is None:
        pytest.skip("no CUDA toolkit was found")
    program, source = tmp_path / "cuda_probes", ROOT / "tests" / "lib" / "cuda_probes.cpp"
    includes = [f"-I{folder}" for folder in (ROOT / "csrc", *cuda_include_dirs(toolkit.home))]
    command = [os.environ.get("CXX", "c++"), "-std=c++17", *includes, source, "-o", program]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
