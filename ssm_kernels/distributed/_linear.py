"""Linear layers over ranks: one autograd node has the products and their collectives.

=============================  ==============================  =============================================
function                       forward                         backward
=============================  ==============================  =============================================
``column_parallel_linear``     none; all-gather of a sequence  all-reduce; reduce-scatter
the same without a group       none                            none
``row_parallel_linear``        all-reduce; reduce-scatter      none; all-gather of a sequence
the same, ``is_inner``         all-reduce                      all-reduce
=============================  ==============================  =============================================

Backward of a column-parallel layer starts the collective of its input's gradient before it computes the gradients of the
parameters, which hide part of it: on CUDA the collectives run on a stream of their own, and begin when the product's first
blocks end. Forward of a row-parallel layer does not cut its product into pieces, each summed while the next is computed: on two
H200s forward took 8 % longer with four pieces.

A layer may have several weights, which are joined. Backward joins them again instead of saving the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._group import Group
from ._reductions import all_gather, all_reduce, start_all_reduce, start_reduce_scatter, wait

__all__ = ["column_parallel_linear", "row_parallel_linear"]


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors], dim)


def _weight_gradients(
    x: Tensor, grad: Tensor, weights: Sequence[Tensor], dim: int, needed: Sequence[bool]
) -> Sequence[Tensor | None]:
    if not any(needed):
        return [None] * len(weights)
    grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
    if len(weights) == 1:
        return [grad_weight]
    return [piece.contiguous() for piece in grad_weight.split([weight.shape[dim] for weight in weights], dim)]


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, group: Group | None, gathers: bool, *weights: Tensor) -> Tensor:
        if gathers and group is not None:
            x = all_gather(x, group)
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.gathers = group, gathers
        return F.linear(x, _joined(weights, 0), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *weights = ctx.saved_tensors
        (grad,), (needs_x, needs_bias, _, _, *needs_weights) = grads, ctx.needs_input_grad
        grad_x = grad @ _joined(weights, 0) if needs_x else None
        if grad_x is not None and ctx.group is not None:
            grad_x = (start_reduce_scatter if ctx.gathers else start_all_reduce)(grad_x, ctx.group)
        what = "reduce_scatter_tensor" if ctx.gathers else "all_reduce"
        grad_weights = _weight_gradients(x, grad, weights, 0, needs_weights)
        grad_bias = grad.flatten(0, -2).sum(0) if needs_bias else None
        if grad_x is not None and ctx.group is not None:
            grad_x = wait(grad_x, what, ctx.group)
        return grad_x, grad_bias, None, None, *grad_weights


class _RowParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, scatters: bool, is_inner: bool, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.scatters, ctx.is_inner = group, scatters, is_inner
        start = start_reduce_scatter if scatters else start_all_reduce
        what = "reduce_scatter_tensor" if scatters else "all_reduce"
        return wait(start(F.linear(x, _joined(weights, 1)), group), what, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *weights = ctx.saved_tensors
        (grad,), (needs_x, _, _, _, *needs_weights) = grads, ctx.needs_input_grad
        if ctx.scatters:
            grad = all_gather(grad, ctx.group)
        if ctx.is_inner:
            grad = all_reduce(grad, ctx.group)
        grad_x = grad @ _joined(weights, 1) if needs_x else None
        return grad_x, None, None, None, *_weight_gradients(x, grad, weights, 1, needs_weights)


def column_parallel_linear(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, group: Group | None, sequence_parallel: bool
) -> Tensor:
    """``linear`` of a replicated tensor with this rank's rows of the weights and of the bias. Differentiable once.

    Args:
        x: (..., columns); with ``sequence_parallel`` this rank's span of the steps, (batch, seqlen / ranks, columns).
        weights: each (rows, columns), one after another.
        bias: of all rows.
        group: the ranks; None if ``x`` is a ``shared_input``, which several layers read.
        sequence_parallel: gathers ``x`` from the ranks' spans.
    """
    return cast(Tensor, _ColumnParallelLinear.apply(x, bias, group, sequence_parallel, *weights))


def row_parallel_linear(
    x: Tensor, weights: Sequence[Tensor], group: Group, sequence_parallel: bool = False, is_inner: bool = False
) -> Tensor:
    """The sum over ranks of ``linear`` of this rank's columns with its columns of the weights. Differentiable once.

    Args:
        x: (..., columns).
        weights: each (rows, some of the columns), one after another.
        group: the ranks.
        sequence_parallel: the result is this rank's span of the steps, (batch, seqlen / ranks, rows).
        is_inner: each rank uses the result for its own channels, so that its gradient is a sum over ranks too.
    """
    return cast(Tensor, _RowParallelLinear.apply(x, group, sequence_parallel, is_inner, *weights))
