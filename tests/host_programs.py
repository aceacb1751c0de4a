"""Programs of tests that run the host's half of the CUDA sources: compiled by nvcc, run without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from build_backend import find_toolkit

ROOT = Path(__file__).resolve().parents[1]


def compile_program(name: str, folder: Path) -> Path:
    """Compiles ``tests/<name>.cu`` to a program in ``folder``; skips the test where there is no nvcc."""
    toolkit = find_toolkit([])
    if toolkit is None:
        pytest.skip("no nvcc was found")
    target, source = folder / name, ROOT / "tests" / f"{name}.cu"
    command = [toolkit.home / "bin" / "nvcc", "-std=c++17", "-O1", f"-I{ROOT / 'csrc'}", "-arch=sm_80", source, "-o", target]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return target
