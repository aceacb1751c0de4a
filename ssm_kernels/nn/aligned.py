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

from .._arguments import is_autocast_enabled, is_traced
from .common import is_plain_linear

__all__ = ["Layout", "align_parameters", "aligned_linear", "aligned_size", "can_align", "dtype_to_align", "first_columns"]

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


class Layout(NamedTuple):
    """The shape of a parameter's copy; its rows from ``split`` on begin at the row ``start``."""

    shape: tuple[int, ...]
    split: int = 0
    start: int = 0


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
    rows = (layout.split, shape[0] - layout.split)
    return [tensor.narrow(0, first, count) for first, count in zip((0, layout.start), rows, strict=True) if count > 0]


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
                split = parameters[i].split([view.shape[0] for view in found])
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
            parts = [] if grad is None else _parts(grad, shape, layout)
            result.append(None if grad is None else parts[0].contiguous() if len(parts) == 1 else torch.cat(parts))
        return (None, *result)


def aligned_linear(x: Tensor, linear: nn.Linear, parts: int, dtype: torch.dtype, contiguous: bool = False) -> Tensor:
    """``linear(x)`` with aligned rows.

    With several parts, the outputs are this number of parts of equal size, and zeros follow each: the last axis is longer. A
    result of one part has the shape of ``linear(x)``, and a stride between rows that is longer, unless it is to be contiguous.
    """
    if all(size == aligned_size(size, dtype) for size in (linear.weight.shape[1], linear.weight.shape[0] // parts)):
        return F.linear(x, linear.weight, linear.bias)
    result: Tensor = _AlignedLinear.apply(x, linear.weight, linear.bias, parts, dtype, contiguous)
    return result


class _AlignedLinear(torch.autograd.Function):
    """Keeps ``x`` and the weight as they are, and copies them again in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, dtype: torch.dtype, contiguous: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parts, ctx.dtype, ctx.bias_dtype = parts, dtype, None if bias is None else bias.dtype
        aligned_bias = None
        if bias is not None:
            of_part = bias.numel() // parts
            aligned_bias = bias.new_zeros(parts, aligned_size(of_part, dtype), dtype=dtype)
            aligned_bias[:, :of_part] = bias.view(parts, of_part)
            aligned_bias = aligned_bias.flatten()
        out = F.linear(_with_columns(x, dtype), _aligned_weight(weight, parts, dtype), aligned_bias)
        if parts > 1:
            return out
        return _in_columns(out, weight.shape[0]) if contiguous else out[..., : weight.shape[0]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (outputs, inputs), dtype, parts = weight.shape, ctx.dtype, ctx.parts
        of_part = outputs // parts
        rows = grad if parts > 1 else _whole_rows(grad, dtype)
        rows = rows.reshape(-1, rows.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            product = rows @ _aligned_weight(weight, parts, dtype)
            grad_x = _in_columns(product.reshape(*x.shape[:-1], -1), inputs).to(x.dtype)
        if ctx.needs_input_grad[1]:
            product = rows.t() @ _with_columns(x, dtype).flatten(0, -2)
            grad_weight = (
                product.reshape(parts, -1, product.shape[-1])[:, :of_part, :inputs].reshape(outputs, inputs).to(weight.dtype)
            )
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0).reshape(parts, -1)[:, :of_part].reshape(outputs).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _aligned_weight(weight: Tensor, parts: int, dtype: torch.dtype) -> Tensor:
    outputs, inputs = weight.shape[0] // parts, weight.shape[1]
    shape = (parts, aligned_size(outputs, dtype), aligned_size(inputs, dtype))
    if shape == (parts, outputs, inputs):
        return weight.to(dtype)
    if shape[:2] == (1, outputs):
        return _in_columns(weight.to(dtype), shape[2])
    aligned = weight.new_zeros(shape, dtype=dtype)
    aligned[:, :outputs, :inputs] = weight.view(parts, outputs, inputs)
    return aligned.flatten(0, 1)


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
