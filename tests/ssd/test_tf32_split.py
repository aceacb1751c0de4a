"""Tests the split of float32 into two TF32 numbers (csrc/cuda/mma_tf32x3.cuh), compiled for the host."""

from __future__ import annotations

import subprocess

from build_helpers import compile_program


def test_both_parts_of_a_finite_number_are_finite(tmp_path):
    """Even of the largest, which rounding would turn into Inf. Also: which part is rounded, and that they sum to the number."""
    result = subprocess.run([str(compile_program("tf32_split", tmp_path))], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
