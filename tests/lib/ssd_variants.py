"""The kernels of ssd_chunk_scan on CUDA by dtype, number of states and MMA instruction, for tests that run on several of them.

With more than 128 states, forward's two state tiles share the rows of a head and backward takes blocks of columns. Where blocks
have too little shared memory for that, PyTorch's matmuls in float32 take the call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from ssd_helpers import make_inputs

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# Each has its own number of columns per state tile and of stages.
DSTATES = (64, 128, 256)
DEVICE = "cuda"

# Few heads and many chunks: four segments of six chunks.
CUT = {"batch": 1, "heads": 2, "groups": 1, "seqlen": 64 * 23 + 5}
# Sequences with no chunks, with fewer chunks than segments, and with more.
CUT_PACKING = (0, 0, 579, 579, 580, 768, 1477, 1477)

# Options of make_inputs for more states than a state tile has columns.
CALLS_WITH_MANY_STATES: dict[str, dict[str, Any]] = {
    "many_heads": {"seqlen": 300, "heads": 160, "groups": 1},
    "split_work_tiles": {"seqlen": 1500, "batch": 1, "heads": 2, "groups": 1},
    "packed": {"heads": 2, "groups": 1, "cu_seqlens": (0, 0, 65, 700)},
    "no_steps": {"seqlen": 0},
    "no_rows": {"batch": 0},
    "empty_sequences": {"cu_seqlens": (0, 0, 0)},
}


class Variant(NamedTuple):
    """A dtype, a number of states and the preferred MMA instruction; float32 has one kind."""

    dtype: torch.dtype
    dstate: int
    products: str

    @property
    def sizes(self) -> dict[str, Any]:
        return {"headdim": 64, "dstate": self.dstate, "seqlen": 130, "dtype": self.dtype, "device": DEVICE}

    def inputs(self, **options: Any) -> dict[str, Any]:
        return make_inputs(**(self.sizes | options))


def variants(dtypes: Iterable[torch.dtype], dstates: Iterable[int]) -> pytest.MarkDecorator:
    """Parametrizes a test over the variants; the fixture ``variant`` sets the preferred instruction."""
    chosen = [
        Variant(dtype, dstate, products)
        for dtype, dstate in itertools.product(dtypes, dstates)
        for products in (("wgmma",) if dtype == FP32 else ("wgmma", "mma"))
    ]
    ids = [f"{str(dtype).removeprefix('torch.')}-{dstate}-{products}" for dtype, dstate, products in chosen]
    return pytest.mark.parametrize("variant", chosen, ids=ids, indirect=True)


every_variant = variants((FP32, BF16, FP16), DSTATES)
