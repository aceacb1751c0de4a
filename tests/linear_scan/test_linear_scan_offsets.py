"""Recurrences on CUDA whose rows of channels start at any element, or have any length: the bits of vector rows.

A channel's results do not depend on the other channels: rows of vectors, which have more channels, have the same bits.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from guarded_memory import LAYOUTS, Layout, assert_guards_kept, assert_same_bits, guarded
from helpers import debug_option, dtypes
from recurrence_helpers import (
    LINEAR,
    MINGRU,
    MINLSTM,
    Variant,
    evaluate,
    every_recurrence,
    every_variant,
    make_cotangents,
    make_inputs,
)
from torch import Tensor

pytestmark = pytest.mark.cuda

both_directions = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
small_dtypes = dtypes(torch.float32, torch.float16, torch.bfloat16)
both_kernels = pytest.mark.parametrize("choice", ["sequential", "tiles"])


def assert_rows_keep_bits(variant: Variant, channels: int, layouts: tuple[Layout, ...], only: str = "", **sizes: Any) -> None:
    """The first ``channels`` channels in every layout, or ``only`` one tensor, beside all channels in rows of whole sectors."""
    inputs = make_inputs(variant, channels=-(-channels // 16) * 16, form="full", device="cuda", **sizes)
    cotangents = make_cotangents(inputs)
    expected = {name: x[..., :channels] for name, x in evaluate(variant, inputs, cotangents).items()}
    assert not any(x.isnan().any() for x in expected.values())
    tensors = {
        name: x for name, x in (inputs | {"grad": cotangents[0]}).items() if isinstance(x, Tensor) and x.is_floating_point()
    }
    for layout in layouts:
        rows = {
            name: guarded(x[..., :channels], layout if only in ("", name) else Layout(), axes=(-1,))
            for name, x in tensors.items()
        }
        moved = {name: rows.get(name, x) for name, x in inputs.items()}
        actual = evaluate(variant, moved, (rows["grad"], cotangents[1][..., :channels]))
        what = f"{variant.name} {channels} channels {layout} {only} {sizes}"
        assert_same_bits(actual, expected, what)
        for name, x in rows.items():
            assert_guards_kept(x, f"{what} {name}")


@both_kernels
@small_dtypes
@every_variant
def test_every_variant(variant, dtype, choice):
    """Kernels of shifted tiles know the same options at compile time as those of vectors."""
    with debug_option("linear_scan_kernel", choice):
        assert_rows_keep_bits(variant, 83, (Layout(0), Layout(2), Layout(3, odd=True)), seqlen=150, dtype=dtype)


@both_kernels
@both_directions
@small_dtypes
def test_every_offset(dtype, reverse, choice):
    """Rows that end in every part of a vector, and one channel."""
    with debug_option("linear_scan_kernel", choice):
        for channels in (1, 8, 62, 63, 64, 65, 126, 127, 136):
            layouts = LAYOUTS if channels in (63, 136) else (Layout(0), Layout(4), Layout(1, odd=True))
            assert_rows_keep_bits(MINGRU, channels, layouts, seqlen=77, dtype=dtype, reverse=reverse)


@both_kernels
@small_dtypes
def test_lengths(dtype, choice):
    with debug_option("linear_scan_kernel", choice):
        for variant, seqlen in itertools.product((LINEAR, MINLSTM), (1, 2, 3, 7, 8, 16, 33, 129, 1100)):
            sizes = {"seqlen": seqlen, "h0": seqlen % 2 == 0, "dtype": dtype}
            assert_rows_keep_bits(variant, 67, (Layout(0, odd=True), Layout(5)), **sizes)


@both_kernels
@small_dtypes
def test_one_tensor_in_other_rows(dtype, choice):
    """The kernels take one way for all tensors."""
    with debug_option("linear_scan_kernel", choice):
        for variant in (MINGRU, MINLSTM):
            for name in (*variant.recurrence.inputs, "h0", "grad"):
                assert_rows_keep_bits(variant, 72, (Layout(1), Layout(2, odd=True)), only=name, seqlen=70, dtype=dtype)


@pytest.mark.parametrize("chains", [2, 5], ids=lambda chains: f"{chains}_of_a_multiprocessor")
@small_dtypes
def test_chains_in_step(dtype, chains):
    """Blocks of several chains that share sectors, and their clusters, the last one with chains that have no channels.

    There are such blocks where there are more chains, of 64 channels, than multiprocessors. Rows of 600 channels are vectors
    that share sectors.
    """
    batch = (chains - 1) * torch.cuda.get_device_properties("cuda").multi_processor_count // 9 + 1
    with debug_option("linear_scan_kernel", "sequential"):
        for variant, channels in ((MINGRU, 570), (LINEAR, 600)):
            layouts = (Layout(0), Layout(3, odd=True))
            assert_rows_keep_bits(variant, channels, layouts, batch=batch, seqlen=200 // chains, dtype=dtype)


@small_dtypes
@pytest.mark.parametrize("options", [{"cu_seqlens": (0, 3, 40, 41, 150)}, {"seqlen": 70, "reset": True, "h0": False}], ids=str)
def test_packed_and_reset(options, dtype):
    """General tiles, which load and store vectors of shifted rows as aligned pieces."""
    for variant in (MINGRU, MINLSTM):
        assert_rows_keep_bits(variant, 67, (Layout(1), Layout(4), Layout(3, odd=True)), dtype=dtype, **options)


@pytest.mark.exhaustive
@both_kernels
@both_directions
@small_dtypes
@every_recurrence
def test_all_sizes(variant, dtype, reverse, choice):
    with debug_option("linear_scan_kernel", choice):
        for channels, seqlen in itertools.product((*range(1, 12), *range(60, 70), 127, 200), (1, 17, 300)):
            assert_rows_keep_bits(variant, channels, LAYOUTS, seqlen=seqlen, dtype=dtype, reverse=reverse)
