"""Layers whose rows do not fill whole vectors of 16 bytes: copies of their parameters that do.

A row of 770 elements in bfloat16 starts between vectors. Matrix products then load two elements at a time, and so do the
kernels between the projections: at d_model 770 a ``Mamba`` took twice the time of d_model 768. A layer with such a size gives
its operators copies of its parameters with rows of zeros behind each part and columns of zeros behind each row. The channels
that are added are zero in forward and in backward, and the others have the same values. Parameters keep their shapes.

Only eager calls on a GPU in fp16 and bf16 do so, with enough tokens for the copies to pay: a compiler sees the layer as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from ..ops._arguments import is_autocast_enabled, is_traced
from .common import is_plain_linear

__all__ = [
    "Heads",
    "Layout",
    "align_parameters",
    "aligned_linear",
    "aligned_size",
    "can_align",
    "dtype_to_align",
    "first_columns",
]

_VECTOR_BYTES = 16
# Tokens of a call below which the copies of the weights take as long as aligned products save.
_LEAST_TOKENS = 1024


def aligned_size(size: int, dtype: torch.dtype) -> int:
    """The next larger number of elements that fill whole vectors."""
    of_vector = _of_vector(dtype)
    return -(-size // of_vector) * of_vector


def _of_vector(dtype: torch.dtype) -> int:
    return _VECTOR_BYTES // dtype.itemsize


def dtype_to_align(sequences: Tensor) -> torch.dtype | None:
    """The dtype in which a layer computes, or None for a call whose parameters are read as they are."""
    # First: a compiler would take the number of tokens for a constant, or guard on it.
    if is_traced(sequences) or not _may_align(sequences) or forward_ad._current_level >= 0:
        return None
    if sequences.dtype != torch.float64 and is_autocast_enabled(sequences.device.type):
        dtype = torch.get_autocast_dtype(sequences.device.type)
    else:
        dtype = sequences.dtype
    return dtype if _is_worthwhile(dtype) else None


def _may_align(sequences: Tensor) -> bool:
    return sequences.is_cuda and sequences.shape[:-1].numel() >= _LEAST_TOKENS


def _is_worthwhile(dtype: torch.dtype) -> bool:
    # Products in float32 take the same time.
    return dtype in (torch.float16, torch.bfloat16)


def can_align(sequences: Tensor, *linears: nn.Module) -> bool:
    """Whether the products of these modules may be computed from copies of their parameters, with these inputs."""
    if not all(is_plain_linear(module) for module in linears):
        return False
    # Products of different dtypes raise an error, unless autocast casts them.
    is_cast = is_autocast_enabled(sequences.device.type)
    return is_cast or all(p.dtype == sequences.dtype for module in linears for p in module.parameters())


class Heads(NamedTuple):
    """A number of groups of ``size`` rows, which take ``aligned`` rows of a copy each. Other rows may follow them."""

    number: int
    size: int
    aligned: int

    @property
    def own_rows(self) -> int:
        return self.number * self.size

    @property
    def copied_rows(self) -> int:
        return self.number * self.aligned


class Layout(NamedTuple):
    """The shape of a parameter's copy; its rows from ``split`` on begin at the row ``start``, or its first rows are heads."""

    shape: tuple[int, ...]
    split: int = 0
    start: int = 0
    heads: Heads | None = None


def align_parameters(parameters: Sequence[Tensor | None], layouts: Sequence[Layout]) -> list[Tensor | None]:
    """Copies of the parameters, differentiable, with zeros between them; a parameter that has the shape of its copy itself."""
    result = list(parameters)
    places = [i for i, p in enumerate(parameters) if p is not None and p.shape != layouts[i].shape]
    if places:
        copies = _AlignParameters.apply([layouts[i] for i in places], *(parameters[i] for i in places))
        for place, copy in zip(places, copies, strict=True):
            result[place] = copy
    return result


def _parts(tensor: Tensor, shape: torch.Size, layout: Layout) -> list[Tensor]:
    """The views of a copy, or of its gradient, that have the rows of a parameter."""
    for axis in range(1, tensor.dim()):
        tensor = tensor.narrow(axis, 0, shape[axis])
    if layout.heads is not None:
        return _parts_of_heads(tensor, shape[0], layout.heads)
    rows = (layout.split, shape[0] - layout.split)
    return [tensor.narrow(0, first, count) for first, count in zip((0, layout.start), rows, strict=True) if count > 0]


def _parts_of_heads(copy: Tensor, rows: int, heads: Heads) -> list[Tensor]:
    """The heads' rows of a copy, (number, size, ...), and the others, of which there may be none."""
    parts = [copy[: heads.copied_rows].view(heads.number, heads.aligned, *copy.shape[1:])[:, : heads.size]]
    others = rows - heads.own_rows
    return [*parts, copy.narrow(0, heads.copied_rows, others)] if others > 0 else parts


def _split(parameter: Tensor, parts: list[Tensor], layout: Layout) -> list[Tensor]:
    """The rows of a parameter with the shapes of ``parts``."""
    if layout.heads is None:
        return list(parameter.split([view.shape[0] for view in parts]))
    heads = layout.heads
    first = parameter[: heads.own_rows].view(heads.number, heads.size, *parameter.shape[1:])
    return [first, parameter[heads.own_rows :]][: len(parts)]


def _join(parts: list[Tensor], layout: Layout) -> Tensor:
    if layout.heads is not None:
        parts = [parts[0].reshape(layout.heads.own_rows, *parts[0].shape[2:]), *parts[1:]]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


class _AlignParameters(torch.autograd.Function):
    """One buffer for each dtype, filled with zeros once, has all copies."""

    @staticmethod
    def forward(ctx: Any, layouts: list[Layout], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.layouts, ctx.shapes = layouts, [p.shape for p in parameters]
        copies: list[Tensor] = [parameters[0]] * len(parameters)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for dtype in {p.dtype for p in parameters}:
            places = [i for i, p in enumerate(parameters) if p.dtype == dtype]
            sizes = [aligned_size(torch.Size(layouts[i].shape).numel(), dtype) for i in places]
            buffer = parameters[places[0]].new_zeros(sum(sizes))
            for i, part in zip(places, buffer.split(sizes), strict=True):
                shape = torch.Size(layouts[i].shape)
                copies[i] = part[: shape.numel()].view(shape)
                found = _parts(copies[i], parameters[i].shape, layouts[i])
                split = _split(parameters[i], found, layouts[i])
                if all(tensor.is_contiguous() for tensor in (*found, *split)):
                    targets += found
                    sources += split
                else:
                    for target, source in zip(found, split, strict=True):
                        target.copy_(source)
        if targets:
            torch._foreach_copy_(targets, sources)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        result: list[Tensor | None] = []
        for grad, shape, layout in zip(grads, ctx.shapes, ctx.layouts, strict=True):
            result.append(None if grad is None else _join(_parts(grad, shape, layout), layout))
        return (None, *result)


def aligned_linear(
    x: Tensor, linear: nn.Linear, dtype: torch.dtype, heads: Heads | None = None, contiguous: bool = False
) -> Tensor:
    """``linear(x)`` with aligned rows.

    With heads, zeros follow the outputs of each, and the last axis is longer. Else the result has the shape of ``linear(x)``.
    In either case its stride between rows may be longer, unless it is to be contiguous.
    """
    outputs = linear.weight.shape[0]
    if heads is None:
        heads = Heads(1, outputs, aligned_size(outputs, dtype))
        columns = outputs
    else:
        columns = heads.copied_rows + outputs - heads.own_rows
    rows = aligned_size(max(columns, heads.copied_rows), dtype)
    if linear.weight.shape == (rows, aligned_size(linear.weight.shape[1], dtype)):
        return F.linear(x, linear.weight, linear.bias)
    result: Tensor = _AlignedLinear.apply(x, linear.weight, linear.bias, heads, rows, columns, dtype, contiguous)
    return result


class _AlignedLinear(torch.autograd.Function):
    """Keeps ``x`` and the weight as they are, and copies them again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        heads: Heads,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        contiguous: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.heads, ctx.rows, ctx.dtype, ctx.bias_dtype = heads, rows, dtype, None if bias is None else bias.dtype
        aligned_bias = None if bias is None else _aligned_weight(bias[:, None], heads, rows, 1, dtype).flatten()
        inputs = aligned_size(weight.shape[1], dtype)
        out = F.linear(_with_columns(x, dtype), _aligned_weight(weight, heads, rows, inputs, dtype), aligned_bias)
        if columns == rows:
            return out
        return _in_columns(out, columns) if contiguous else out[..., :columns]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        inputs, dtype, heads = weight.shape[1], ctx.dtype, ctx.heads
        rows = _whole_rows(grad, dtype)
        rows = rows.reshape(-1, rows.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            product = rows @ _aligned_weight(weight, heads, ctx.rows, aligned_size(inputs, dtype), dtype)
            grad_x = _in_columns(product.reshape(*x.shape[:-1], -1), inputs).to(x.dtype)
        if ctx.needs_input_grad[1]:
            product = rows.t() @ _with_columns(x, dtype).flatten(0, -2)
            grad_weight = _own_rows(product[:, :inputs], heads, weight.shape[0], weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = _own_rows(rows.sum(0)[:, None], heads, weight.shape[0], ctx.bias_dtype)[:, 0]
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _aligned_weight(weight: Tensor, heads: Heads, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    if (rows, columns) == weight.shape:
        return weight.to(dtype)
    if rows == weight.shape[0]:
        return _in_columns(weight.to(dtype), columns)
    own = weight.shape[0]
    aligned = weight.new_zeros(rows, columns, dtype=dtype)
    first, aligned_first = heads.own_rows, heads.copied_rows
    of_heads = aligned[:aligned_first].view(heads.number, heads.aligned, columns)
    of_heads[:, : heads.size, : weight.shape[1]] = weight[:first].view(heads.number, heads.size, -1)
    if own > first:
        aligned[aligned_first : aligned_first + own - first, : weight.shape[1]] = weight[first:]
    return aligned


def _own_rows(copy: Tensor, heads: Heads, rows: int, dtype: torch.dtype) -> Tensor:
    """The rows of a parameter out of those of its copy."""
    if rows == copy.shape[0] and copy.is_contiguous():
        return copy.to(dtype)
    parts = [part.to(dtype) for part in _parts_of_heads(copy, rows, heads)]
    return _join(parts, Layout((), heads=heads))


def _with_columns(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype`` with columns of zeros, if its rows are not whole vectors."""
    return _in_columns(x.to(dtype), aligned_size(x.shape[-1], dtype))


def _in_columns(x: Tensor, columns: int) -> Tensor:
    """The first columns of ``x``, contiguous, or all and zeros behind them."""
    own = x.shape[-1]
    if own == columns:
        return x
    if not torch.is_grad_enabled() and not is_traced(x):
        copy: Tensor = torch.ops.ssm_kernels._copy_rows(x, columns)
        return copy
    return F.pad(x, (0, columns - own)) if columns > own else x[..., :columns].contiguous()


def first_columns(x: Tensor, columns: int) -> Tensor:
    """The same for the results of products, differentiable."""
    if x.shape[-1] == columns:
        return x
    result: Tensor = _FirstColumns.apply(x, columns)
    return result


class _FirstColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: int) -> Tensor:
        ctx.columns = x.shape[-1]
        return _in_columns(x, columns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _in_columns(grad, ctx.columns), None


def _whole_rows(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient with columns of zeros, in its own memory if the mixer's backward has allocated it with their space."""
    columns = grad.shape[-1]
    shape = (*grad.shape[:-1], aligned_size(columns, dtype))
    if shape == grad.shape:
        return grad
    strides = torch.empty(shape, device="meta").stride()
    has_space = (
        not torch.is_grad_enabled()
        and not is_traced(grad)
        and grad.stride() == strides
        and grad.storage_offset() == 0
        and grad.untyped_storage().nbytes() == torch.Size(shape).numel() * grad.element_size()
    )
    if not has_space:
        return _with_columns(grad, dtype)
    whole = grad.as_strided(shape, strides)
    whole[..., columns:] = 0
    return whole
