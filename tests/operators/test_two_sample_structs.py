"""The structs of ``csrc/common/two_sample_discretization.h`` and the adjoint of a scan with them, against differences."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_derivatives_and_gradients_against_differences(tmp_path):
    """Of each rule, z from -30 over 0, a step of size zero, and the gradients of the state and the sample before all steps."""
    program, source = tmp_path / "two_samples", ROOT / "tests" / "lib" / "two_sample_discretizations.cpp"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", f"-I{ROOT / 'csrc'}", source, "-o", program]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    result = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    errors = [float(line) for line in result.stdout.splitlines()]
    assert len(errors) == 8
    assert max(errors) < 1e-7
