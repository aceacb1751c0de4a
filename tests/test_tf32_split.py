"""float32 as two TF32 numbers (csrc/cuda/mma_tf32x3.cuh), by the host's compiler."""

from __future__ import annotations

import subprocess

from build_helpers import compile_program


def test_both_parts_of_a_finite_number_are_finite(tmp_path):
    """Also of the largest, which rounding would make Inf; what is rounded, and that the parts sum to the number."""
    result = subprocess.run([str(compile_program("tf32_split", tmp_path))], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
