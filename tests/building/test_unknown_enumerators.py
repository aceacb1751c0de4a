"""Enumerators that a kernel library does not know: its switches throw, and leave no output unwritten."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import ssm_kernels

ROOT = Path(__file__).resolve().parents[2]


def test_switches_throw_at_enumerators_behind_their_tables(tmp_path):
    """The message names the enumeration, the number of its rows and the enumerator."""
    program, source = tmp_path / "unknown_enumerators", ROOT / "tests" / "lib" / "unknown_enumerators.cpp"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", f"-I{ROOT / 'csrc'}", source, "-o", program]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    messages = result.stdout.splitlines()
    assert len(messages) == 7
    rows = len(ssm_kernels.discretizations) + len(("gbt", "dirac"))
    assert messages[0].startswith(f"ssm_kernels: expected a discretization below {rows}, ")
    assert f", got {rows}: use _ops and the kernel libraries of one build" in messages[0]
