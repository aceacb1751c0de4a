"""Tensors whose rows start at any element, inside memory that is NaN before, between and after the rows.

A kernel that reads beyond a row gets NaN into its results, and one that writes there is found by :func:`assert_guards_kept`.
Rows that start between 16-byte boundaries have to give the bits of aligned rows, which :func:`assert_same_bits` compares::

    aligned = evaluate({"u": u, ...})
    for layout in LAYOUTS:
        assert_same_bits(evaluate({"u": guarded(u, layout), ...}), aligned)

:func:`assert_offsets_keep_bits` does so for an ``OperatorSpec``, with its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from operator_spec import Inputs, OperatorSpec, Results
from torch import Tensor

# Elements before the first row and after the last one, a multiple of 16 bytes in every dtype.
MARGIN = 16
# Row strides are multiples of it, unless they are odd: the rows of a tensor then start equally far from 16-byte boundaries.
_ALIGNMENT = 8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Layout(NamedTuple):
    """Where rows lie in wider rows.

    Attributes:
        first: NaN elements before each row; the first one starts at a multiple of 16 bytes plus ``first`` elements.
        odd: the row stride is odd, and rows start at every element of 16 bytes. Otherwise it is a multiple of 8 elements.
    """

    first: int = 0
    odd: bool = False

    def row_stride(self, length: int) -> int:
        """Leaves at least one NaN between two rows."""
        needed = self.first + length + 1
        return needed | 1 if self.odd else -(-needed // _ALIGNMENT) * _ALIGNMENT


ALIGNED = Layout()
LAYOUTS = (*(Layout(first) for first in range(9)), Layout(0, odd=True), Layout(3, odd=True))
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda at: f"{at.first}{'-odd' if at.odd else ''}")


def guarded(
    tensor: Tensor,
    layout: Layout = ALIGNED,
    *,
    axes: Sequence[int] = (-1,),
    row_stride: int | None = None,
    margin: int = MARGIN,
) -> Tensor:
    """A copy with the same values, on the same device, in guarded rows.

    Args:
        axes: the axes that a row consists of, the last one contiguous: ``(-1,)`` for (batch, dim, seqlen) with contiguous
            steps, ``(1,)`` for contiguous channels, ``(2, 3)`` for rows of heads, (batch, seqlen, heads, headdim). The other
            axes are outside of these, in their order.
        row_stride: replaces the layout's, as for the columns of a wider tensor of known width.
        margin: NaN before the first row and after the last one. Without any the memory ends with the last vector that holds an
            element of the row, and compute-sanitizer finds reads beyond it.
    """
    if not tensor.is_floating_point():
        raise TypeError(f"guards are NaN, got {tensor.dtype}")
    inner = [axis % tensor.dim() for axis in axes]
    outer = [axis for axis in range(tensor.dim()) if axis not in inner]
    length = math.prod(tensor.shape[axis] for axis in inner)
    strides, step = [0] * tensor.dim(), 1
    for axis in reversed(inner):
        strides[axis] = step
        step *= tensor.shape[axis]
    step = layout.row_stride(length) if row_stride is None else row_stride
    if step <= layout.first + length:
        raise ValueError(f"a row stride of {step} leaves no guard after {layout.first} + {length} elements")
    for axis in reversed(outer):
        strides[axis] = step
        step *= tensor.shape[axis]
    last = sum(stride * (size - 1) for stride, size in zip(strides, tensor.shape, strict=True)) if tensor.numel() else 0
    vector = 16 // tensor.element_size()
    elements = -(-(margin + layout.first + last + 1) // vector) * vector + margin
    memory = tensor.new_full((elements,), math.nan)
    view = memory.as_strided(tensor.shape, strides, margin + layout.first)
    view.copy_(tensor)
    return view.detach()


def guarded_empty(
    shape: Sequence[int], layout: Layout = ALIGNED, *, dtype: torch.dtype, device: str = "cpu", axes: Sequence[int] = (-1,)
) -> Tensor:
    """Rows of NaN among guards, for results that are written into a wider tensor."""
    return guarded(torch.full(tuple(shape), math.nan, dtype=dtype, device=device), layout, axes=axes)


def assert_guards_kept(view: Tensor, what: str = "") -> None:
    """The memory that the view does not cover is still NaN."""
    elements = view.untyped_storage().nbytes() // view.element_size()
    covered = torch.zeros(elements, dtype=torch.bool, device=view.device)
    covered.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    memory = view.detach().as_strided((elements,), (1,), 0)
    changed = (~covered & ~memory.isnan()).nonzero().flatten()
    assert not changed.numel(), f"{what}: wrote {changed.numel()} elements outside of the rows, at {changed[:8].tolist()}"


def bits(tensor: Tensor) -> Tensor:
    """The values as integers, which compare equal where NaN does not, and unequal for zeros of different signs."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])


def assert_same_bits(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str = "") -> None:
    """Every tensor, bit for bit; NaN are equal if their bits are."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        other = expected[name]
        assert (value.shape, value.dtype) == (other.shape, other.dtype), f"{what} {name}"
        different = (bits(value) != bits(other)).nonzero()
        assert not different.numel(), (
            f"{what} {name}: {len(different)} of {value.numel()} elements differ, the first at {different[0].tolist()}: "
            f"{value[tuple(different[0])].item()} instead of {other[tuple(different[0])].item()}"
        )


def guard_all(inputs: Mapping[str, Any], axes: Mapping[str, Sequence[int]], layout: Layout, **options: int) -> dict[str, Any]:
    """The inputs, those with an entry in ``axes`` in guarded rows of these axes."""
    return dict(inputs) | {
        name: guarded(inputs[name], layout, axes=row, **options)
        for name, row in axes.items()
        if isinstance(inputs.get(name), Tensor)
    }


def assert_offsets_keep_bits(
    spec: OperatorSpec,
    inputs: Inputs,
    axes: Mapping[str, Sequence[int]],
    *,
    layouts: Sequence[Layout] = LAYOUTS,
    evaluate: Callable[[Inputs, Sequence[Tensor]], Results] | None = None,
) -> Results:
    """Results and gradients of guarded rows have the bits of aligned rows, in every layout; returns those of aligned rows.

    Args:
        axes: the axes of a row, by the names of inputs and of results, whose gradients are guarded as well.
        evaluate: results and gradients of inputs and cotangents, by default ``spec.evaluate``.
    """
    call = evaluate or (lambda inputs, cotangents: spec.evaluate(spec, inputs, cotangents))
    cotangents = dict(zip(spec.results, spec.make_cotangents(inputs), strict=True))
    expected = call(guard_all(inputs, axes, ALIGNED), tuple(guard_all(cotangents, axes, ALIGNED).values()))
    for name, value in expected.items():
        assert not value.isnan().any(), f"{spec.name} aligned: {name} has NaN"
    for layout in layouts:
        moved, incoming = guard_all(inputs, axes, layout), guard_all(cotangents, axes, layout)
        actual = call(moved, tuple(incoming.values()))
        assert_same_bits(actual, expected, f"{spec.name} {layout}")
        for name, value in (moved | incoming).items():
            if name in axes and isinstance(value, Tensor):
                assert_guards_kept(value, f"{spec.name} {layout} {name}")
    return expected
