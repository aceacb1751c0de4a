"""mamba3_chunk_scan with ranks on CUDA: the kernels of one sample a step on several rows a step, beside float64."""

from __future__ import annotations

from typing import Any

import pytest
from mamba3_helpers import BOUNDS, assert_within_bounds, make_inputs

pytestmark = pytest.mark.cuda

SIZES: dict[str, dict[str, Any]] = {
    "one": {"ranks": 1, "seqlen": 70, "headdim": 16, "dstate": 16},
    "two": {"ranks": 2, "seqlen": 150, "headdim": 16, "dstate": 16, "resets": ((31, 32, 33, 64), (149,)), "norm": True},
    "three": {"ranks": 3, "cu_seqlens": (0, 1, 30, 30, 97), "headdim": 16, "dstate": 16, "norm": True},
    "four": {"ranks": 4, "batch": 1, "seqlen": 50, "heads": 2, "groups": 1, "headdim": 64, "dstate": 128, "angles": 32},
    "five": {"ranks": 5, "seqlen": 21, "headdim": 13, "dstate": 20, "z": False, "factors": False},
    "eight": {"ranks": 8, "seqlen": 33, "headdim": 80, "dstate": 40, "norm": True, "initial_states": False},
    "long_rows": {"ranks": 2, "batch": 1, "seqlen": 40, "headdim": 200, "dstate": 32, "norm": True},
    "nine": {"ranks": 9, "batch": 1, "seqlen": 5, "headdim": 8, "dstate": 8},  # more than the kernels take
    "strong_decays": {"ranks": 4, "batch": 1, "seqlen": 40, "headdim": 16, "dstate": 16},
}


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("name", list(SIZES))
def test_against_float64(name, dtype):
    inputs = make_inputs(device="cuda", dtype=dtype, rotate="halves", **SIZES[name])
    if name == "strong_decays":
        inputs["A"] = inputs["A"].clone()
        inputs["A"][:, 7::13] = -200
    assert_within_bounds(inputs)
