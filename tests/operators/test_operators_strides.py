"""Tensors of any strides: results and gradients are those of contiguous copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from operator_spec import Inputs, OperatorSpec, tensor_names
from operators import OPERATORS, over
from torch import Tensor


def transposed(x: Tensor) -> Tensor:
    """The first axis is contiguous in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def reversed_axes(x: Tensor) -> Tensor:
    order = [*range(x.dim())][::-1]
    return x.permute(order).contiguous().permute(order)


def every_second(x: Tensor) -> Tensor:
    """Columns of a wider tensor whose other columns are NaN."""
    return torch.stack([torch.full_like(x, torch.nan), x], -1)[..., 1]


def last_columns(x: Tensor) -> Tensor:
    """A slice from a negative index: an odd offset, and rows that are not aligned."""
    return torch.cat([torch.full_like(x[..., :1], torch.nan), x], -1)[..., -x.shape[-1] :]


def one_row(x: Tensor) -> Tensor:
    """Expanded along the first axis, with a stride of zero."""
    return x[:1].expand(x.shape)


def one_number(x: Tensor) -> Tensor:
    """Expanded along all axes."""
    return x.flatten()[:1].reshape((1,) * x.dim()).expand(x.shape)


OPERATOR = "every operator"
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    function.__name__: function for function in (transposed, reversed_axes, every_second, last_columns, one_row, one_number)
}


def assert_same_as_contiguous(spec: OperatorSpec, inputs: Inputs, change: Callable[[Tensor], Tensor]) -> None:
    """For the gradients of the results, too, unless the layout makes them constant along an axis."""
    copies = inputs | {name: inputs[name].contiguous() for name in tensor_names(inputs)}
    cotangents = spec.make_cotangents(copies)
    expected = spec.evaluate(spec, copies, cotangents)
    spec.assert_close(spec.evaluate(spec, inputs, cotangents), expected, 1e-10)
    changed = tuple(change(cotangent) for cotangent in cotangents)
    expected = spec.evaluate(spec, copies, tuple(cotangent.contiguous() for cotangent in changed))
    spec.assert_close(spec.evaluate(spec, inputs, changed), expected, 1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
@over(OPERATORS)
def test_all_tensors_at_once(operator: OperatorSpec, layout: str, device: str) -> None:
    change, inputs = LAYOUTS[layout], operator.make_inputs(device=device)
    assert_same_as_contiguous(operator, inputs | {name: change(inputs[name]) for name in tensor_names(inputs)}, change)


@pytest.mark.parametrize("layout", ["transposed", "every_second", "one_row"])
@over(OPERATORS)
def test_one_tensor_among_contiguous_ones(operator: OperatorSpec, layout: str, device: str) -> None:
    """The tensors of a call do not share a layout: kernels that expect that copy, or take strides of each."""
    change, inputs = LAYOUTS[layout], operator.make_inputs(device=device)
    for name in tensor_names(inputs):
        assert_same_as_contiguous(operator, inputs | {name: change(inputs[name])}, lambda cotangent: cotangent)
