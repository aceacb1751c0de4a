"""The tests' guards: where rows start, and that reads and writes beyond a row are found."""

from __future__ import annotations

import math

import pytest
import torch
from guarded_memory import (
    LAYOUTS,
    Layout,
    assert_guards_kept,
    assert_same_bits,
    every_layout,
    guarded,
    guarded_empty,
)
from helpers import dtypes

SHAPES = [((2, 3, 5), (-1,)), ((2, 3, 5), (1,)), ((2, 3, 2, 4), (2, 3)), ((7,), (0,)), ((2, 0, 5), (-1,)), ((2, 3, 0), (-1,))]


@dtypes()
@every_layout
def test_rows_start_where_the_layout_says(layout, dtype):
    for shape, axes in SHAPES:
        check_rows(torch.randn(shape).to(dtype), axes, layout)


def check_rows(values, axes, layout):
    view, shape = guarded(values, layout, axes=axes), values.shape
    assert torch.equal(view, values)
    assert view.stride(axes[-1]) == 1
    assert not values.numel() or (view.data_ptr() - layout.first * view.element_size()) % 16 == 0
    outer = [axis for axis in range(len(shape)) if axis not in [a % len(shape) for a in axes]]
    if outer and values.numel():
        stride = view.stride(outer[-1])
        assert stride % 2 == 1 if layout.odd else stride % 8 == 0
        neighbors = view.as_strided((view.numel(),), (1,), view.storage_offset() - 1)
        assert neighbors[0].isnan()
    assert_guards_kept(view)


@pytest.mark.parametrize("at", [-1, 5], ids=["before", "after"])
@every_layout
def test_writes_beyond_a_row_are_found(layout, at):
    view = guarded_empty((2, 3, 5), layout, dtype=torch.bfloat16)
    assert view.isnan().all()
    beyond = view.as_strided((1,), (1,), view.storage_offset() + view.stride(1) + at)
    beyond.fill_(0)
    with pytest.raises(AssertionError, match="x: wrote 1 elements"):
        assert_guards_kept(view, "x")


def test_bits():
    nan = torch.tensor([math.nan, 1.0])
    assert_same_bits({"x": nan}, {"x": nan.clone()})
    with pytest.raises(AssertionError, match=r"x: 1 of 2 elements differ, the first at \[1\]: 0.0 instead of -0.0"):
        assert_same_bits({"x": torch.tensor([1.0, 0.0])}, {"x": torch.tensor([1.0, -0.0])})
    with pytest.raises(AssertionError):
        assert_same_bits({"x": nan}, {"x": nan.double()})


def test_refuses_rows_without_guards():
    assert guarded(torch.zeros(2, 5), Layout(2), row_stride=8).stride() == (8, 1)
    with pytest.raises(ValueError, match="leaves no guard after 2"):
        guarded(torch.zeros(2, 5), Layout(2), row_stride=7)
    with pytest.raises(TypeError, match="int64"):
        guarded(torch.zeros(2, dtype=torch.int64))


def test_layouts_cover_every_element_of_a_vector():
    assert {layout.first for layout in LAYOUTS if not layout.odd} == set(range(9))
