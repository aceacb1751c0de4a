"""mlstm_scan for compute-sanitizer: its own chunked kernels, those of ssd_chunk_scan, gates and the normalizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from helpers import uninitialized_memory_is_nan
from mlstm_helpers import GATES, MLSTM, OPTIONS, make_inputs
from sanitizer import PYTESTMARK, assert_same_on_gpu, over
from ssd_helpers import limited_workspace, preferred_products

pytestmark = PYTESTMARK

# Name and options of make_inputs.
Case = tuple[str, dict[str, Any]]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# key_dim and value_dim: padded tiles, and, with 256 and a multiple of it in bfloat16, the chunked kernels of mlstm.
SIZES = ((1, 1), (7, 20), (64, 64), (100, 300), (256, 256), (256, 512))
PACKED_PIECES = (0, 0, 64, 65, 200, 200)


def case(name: str, **options: Any) -> Case:
    # eps keeps divisors away from zero: a step whose n q cancels would be mostly rounding errors.
    sizes = {"heads": 2, "key_dim": 256, "value_dim": 256, "seqlen": 130, "dtype": torch.bfloat16, "eps": 0.5}
    return f"{name} {options}", sizes | options


def cases() -> Iterator[Case]:
    """Each kernel (dtype, gate, sizes), then each path inside them."""
    for dtype, (name, gate), (key_dim, value_dim) in itertools.product(DTYPES, GATES.items(), SIZES):
        yield case(name, dtype=dtype, key_dim=key_dim, value_dim=value_dim, **gate)
    for sizes in ({}, {"key_dim": 64, "value_dim": 20}):
        for name, options in OPTIONS.items():
            yield case(name, **sizes, **options)
        for seqlen, reverse in itertools.product((0, 1, 63, 64, 65), (False, True)):
            yield case("length", seqlen=seqlen, reverse=reverse, **sizes)
        yield case("packed", cu_seqlens=PACKED_PIECES, **sizes)
        yield case("resets", seqlen=200, resets=((1, 64, 65, 199), (63, 127, 128)), **sizes)
        yield case("one head in segments", batch=1, heads=1, seqlen=2100, **sizes)
        for layout in ("transposed", "offset", "sliced"):
            yield case("layout", layout=layout, **sizes)


def assert_same(options: dict[str, Any], *contexts: AbstractContextManager[Any]) -> None:
    # initcheck does not see the writes of TMA stores, but filled memory counts as written. The comparison finds elements that a
    # kernel does not write, or reads too early.
    contexts = (uninitialized_memory_is_nan(), *contexts)
    inputs = make_inputs(**options)
    assert_same_on_gpu(MLSTM, inputs, contexts=contexts, in_16_bits=inputs["q"].element_size() == 2)


@over("options", cases())
def test_scan(options):
    assert_same(options)


@over("options", (case(name, **gate) for name, gate in GATES.items()))
def test_kernels_of_ssd(options):
    assert_same(options, preferred_products("mma"))


@over("options", (case("little workspace", **options) for options in ({}, {"cu_seqlens": PACKED_PIECES})))
def test_little_workspace(options):
    assert_same(options, limited_workspace(1))
