"""Projections of one input as one matrix product: forward, for the gradient of the input, and for the gradients of the weights.

Six projections take six products, of which those to the gates are a few columns wide and read the whole input each. Backward
takes twelve, and adds the six gradients of the input. One product of the weights, one below another, reads the input once, and
its gradient needs no sums. The projections are then columns of one buffer. The mixers' backward writes their gradients into
the columns of another one.

Only eager calls on a GPU in fp16 and bf16 join products, with enough tokens for the copies of the weights to pay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .aligned import aligned_size, can_align, dtype_to_align

__all__ = ["join_projections"]

# The first projections of a group of several are sequences, whose gradients the mixer's backward writes.
_SEQUENCES = 3
# Products of a group have columns of zeros up to whole tiles: 6156 columns took cuBLAS three times as long as 6208.
_TILE = 64


def join_projections(x: Tensor, *groups: Mapping[str, nn.Module | None]) -> dict[str, Tensor]:
    """The results of ``module(x)`` by name, one product a group; an empty dict for calls that have to call the modules.

    The projections of a group are columns of one buffer, in the order of the dict. A group is one projection, or queries, keys
    and values and then any others.
    """
    dtype = dtype_to_align(x)
    if dtype is None:
        return {}
    modules = [[module for module in group.values() if isinstance(module, nn.Linear)] for group in groups]
    all_modules = [module for group in modules for module in group]
    if len(all_modules) != sum(map(len, groups)) or not can_align(x, *all_modules):
        return {}
    sequences = [module for group in modules for module in group[:_SEQUENCES]]
    if any(module.bias is not None for module in all_modules):
        return {}
    if any(module.out_features != aligned_size(module.out_features, dtype) for module in sequences):
        return {}
    weights = [module.weight for module in all_modules]
    products = _JoinedProjections.apply(x, [len(group) for group in groups], dtype, *weights)
    return dict(zip((name for group in groups for name in group), products, strict=True))


class _JoinedProjections(torch.autograd.Function):
    """Keeps ``x`` and the weights as they are, and joins the weights again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: list[int], dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.groups, ctx.dtype = groups, dtype
        rows = x.to(dtype)
        products: list[Tensor] = []
        for group in _split(weights, groups):
            products += _project(rows, group)
        return tuple(products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # The products have the dtype of forward's, wherever backward is called.
        with torch.autocast(grads[0].device.type, enabled=False):
            return _JoinedProjections._gradients(ctx, grads)

    @staticmethod
    def _gradients(ctx: Any, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, needs_weights = ctx.needs_input_grad[0], _split(ctx.needs_input_grad[3:], ctx.groups)
        rows = x.to(ctx.dtype).reshape(-1, x.shape[-1])
        grad_x: Tensor | None = None
        grad_weights: list[Tensor | None] = []
        parts = zip(_split(weights, ctx.groups), _split(grads, ctx.groups), needs_weights, strict=True)
        for group, of_group, needs in parts:
            joined = _join_columns(of_group)
            if needs_x:
                weight = _join_weights(group, ctx.dtype)
                grad_x = joined @ weight if grad_x is None else grad_x.addmm_(joined, weight)
            if any(needs):
                product = joined.t() @ rows
                found = product[: _columns(group)].split([weight.shape[0] for weight in group])
                grad_weights += [
                    grad.to(weight.dtype) if is_needed else None
                    for grad, weight, is_needed in zip(found, group, needs, strict=True)
                ]
            else:
                grad_weights += [None] * len(group)
        if grad_x is not None:
            grad_x = grad_x.view(x.shape).to(x.dtype)
        return grad_x, None, None, *grad_weights


def _split(values: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    """The values of each group."""
    groups, first = [], 0
    for count in counts:
        groups.append(values[first : first + count])
        first += count
    return groups


def _columns(weights: Sequence[Tensor]) -> int:
    return sum(weight.shape[0] for weight in weights)


def _whole_tiles(columns: int) -> int:
    return -(-columns // _TILE) * _TILE


def _join_weights(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One weight itself, or all, one below another, with rows of zeros up to whole tiles."""
    if len(weights) == 1:
        return weights[0].to(dtype)
    columns = _columns(weights)
    padding = weights[0].new_zeros(_whole_tiles(columns) - columns, weights[0].shape[1], dtype=dtype)
    return torch.cat([*(weight.to(dtype) for weight in weights), padding])


def _project(x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """The products with each weight; of several, columns of one buffer."""
    product = F.linear(x, _join_weights(weights, x.dtype))
    return product[..., : _columns(weights)].split([weight.shape[0] for weight in weights], dim=-1)


def _join_columns(grads: Sequence[Tensor]) -> Tensor:
    """The gradients of a group as the columns of a matrix: a view if the mixer's backward has written them so.

    That backward allocates the buffer of a group and writes the first columns. This function writes the others.
    """
    sizes = [grad.shape[-1] for grad in grads]
    first = grads[0]
    if len(grads) == 1:
        return first.reshape(-1, sizes[0])
    shape = (*first.shape[:-1], _whole_tiles(sum(sizes)))
    strides = torch.empty(shape, device="meta").stride()
    is_of_mixer = (
        first.stride() == strides
        and first.storage_offset() == 0
        and first.untyped_storage().nbytes() == torch.Size(shape).numel() * first.element_size()
        and all(_is_column(grads[i], first, sum(sizes[:i])) for i in range(1, _SEQUENCES))
    )
    if is_of_mixer:
        buffer, written = first.as_strided(shape, strides), _SEQUENCES
    else:
        buffer, written = first.new_empty(shape), 0
    columns = buffer.split([*sizes, shape[-1] - sum(sizes)], dim=-1)
    for grad, column in list(zip(grads, columns, strict=False))[written:]:
        column.copy_(grad)
    columns[-1].zero_()
    return buffer.view(-1, shape[-1])


def _is_column(grad: Tensor, first: Tensor, place: int) -> bool:
    """Whether ``grad`` has the columns from ``place`` on of the buffer that begins with ``first``."""
    return bool(
        grad.stride() == first.stride()
        and grad.storage_offset() == place
        and grad.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    )
