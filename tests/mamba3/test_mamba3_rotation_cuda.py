"""mamba3_chunk_scan on CUDA beside float64: the rotation's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mamba3_helpers import BOUNDS, MAMBA3, assert_within_bounds, make_inputs

pytestmark = pytest.mark.cuda

HALVES: dict[str, Any] = {"rotate": "halves"}
OWN: dict[str, Any] = {"angles_of_heads": True}
SMALL: dict[str, Any] = {"headdim": 16, "dstate": 16, "angles": 5}
SIZES: dict[str, dict[str, Any]] = {
    "odd": OWN | {"batch": 1, "seqlen": 67, "heads": 3, "groups": 1, "headdim": 13, "dstate": 17, "angles": 8},
    "halves": HALVES | {"batch": 2, "seqlen": 130, "heads": 2, "groups": 2, "headdim": 16, "dstate": 34, "angles": 9},
    "slabs": {"batch": 1, "seqlen": 70, "heads": 38, "groups": 2, "headdim": 8, "dstate": 24, "angles": 3},
    "usual": {"batch": 2, "seqlen": 200, "heads": 4, "groups": 1, "headdim": 64, "dstate": 128, "angles": 32},
    "usual_halves": HALVES | {"batch": 1, "seqlen": 96, "heads": 2, "groups": 1, "headdim": 64, "dstate": 64, "angles": 32},
    "long_rows": {"batch": 1, "seqlen": 65, "heads": 2, "groups": 1, "headdim": 16, "dstate": 256, "angles": 128},
    "packed": SMALL | {"cu_seqlens": (0, 1, 2, 40, 40, 63, 65, 66, 130), "heads": 3, "groups": 1},
    "resets": SMALL | OWN | {"batch": 2, "seqlen": 140, "resets": ((1, 63, 64, 65, 100), (127, 128))},
    "norm": SMALL | {"batch": 2, "seqlen": 70, "norm": True},
    "no_angles": {"batch": 1, "seqlen": 70, "headdim": 8, "dstate": 9, "angles": 0},
}


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("name", list(SIZES))
def test_against_float64(name, dtype):
    inputs = make_inputs(device="cuda", dtype=dtype, **SIZES[name])
    assert_within_bounds(inputs)


def test_bits_are_the_same_again():
    inputs = make_inputs(device="cuda", dtype=torch.bfloat16, **SIZES["slabs"])
    cotangents = MAMBA3.make_cotangents(inputs)
    first, second = (MAMBA3.evaluate(MAMBA3, inputs, cotangents) for _ in range(2))
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
