"""Collectives of tensor parallelism, between tensors that every rank has and tensors that ranks have parts of.

A tensor that every rank has is *replicated*: its values and its gradient are the same on all ranks. Where a rank uses it for
its own channels alone, the gradient that the rank computes is one term of a sum.

======================  ==============================  ===================================
differentiable          forward                         backward
======================  ==============================  ===================================
``sum_over_ranks``      all-reduce; reduce-scatter      none; all-gather of a sequence
``sum_gradients``       none                            one all-reduce for several tensors
``shared_input``        none; all-gather of a sequence  all-reduce; reduce-scatter
======================  ==============================  ===================================

``start_all_reduce`` and ``start_reduce_scatter`` return before the collective has finished. ``wait`` returns its result, and on
CUDA lets the current stream wait, not the host. They call PyTorch's functional operators: its Python wrappers look the group up
and wrap each result in a tensor subclass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ._agreement import failure
from ._group import Group

__all__ = [
    "all_gather",
    "all_reduce",
    "finished",
    "shared_input",
    "start_all_reduce",
    "start_reduce_scatter",
    "sum_gradients",
    "sum_of_each",
    "sum_over_ranks",
    "wait",
]

_functional = torch.ops._c10d_functional


def _run(operator: torch._ops.OpOverload, *arguments: Any) -> Tensor:
    """Starts a collective. The name of the group is the last argument."""
    if torch.compiler.is_compiling():
        return cast(Tensor, operator(*arguments))
    # PyTorch registers the autograd of its collectives in Python. The nodes here need none of it.
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return cast(Tensor, operator(*arguments))
    except RuntimeError as error:
        what = f"tensor parallelism: {operator.name().partition('::')[2]}"
        raise failure(what, Group.named(arguments[-1]), error) from error


def wait(started: Tensor, what: str, group: Group) -> Tensor:
    """``what`` and ``group`` are for the message of an error."""
    if torch.compiler.is_compiling():
        return cast(Tensor, _functional.wait_tensor.default(started))
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return cast(Tensor, _functional.wait_tensor.default(started))
    except RuntimeError as error:
        raise failure(f"tensor parallelism: {what}", group, error) from error


def all_reduce(tensor: Tensor, group: Group) -> Tensor:
    return wait(_run(_functional.all_reduce.default, tensor.contiguous(), "sum", group.name), "all_reduce", group)


def start_all_reduce(tensor: Tensor, group: Group) -> Tensor:
    """An all-reduce in place, of a contiguous tensor that nothing else reads."""
    # The compiler has no functional form of the operator that writes into its argument.
    start = _functional.all_reduce if torch.compiler.is_compiling() else _functional.all_reduce_
    return _run(start.default, tensor, "sum", group.name)


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    """Spans of the steps, (batch, seqlen / ranks, channels), of all ranks one after another."""
    started = _run(_functional.all_gather_into_tensor.default, tensor.contiguous(), group.size, group.name)
    gathered = wait(started, "all_gather_into_tensor", group)
    return gathered.unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1, 2)


def start_reduce_scatter(tensor: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' tensors, (batch, seqlen, channels), at this rank's span of the steps."""
    spans = tensor.unflatten(1, (group.size, -1)).transpose(0, 1).flatten(0, 1)
    return _run(_functional.reduce_scatter_tensor.default, spans.contiguous(), "sum", group.size, group.name)


def sum_of_each(tensors: Sequence[Tensor], group: Group) -> list[Tensor]:
    """The sum of each tensor over the ranks, in one all-reduce for those of a dtype."""
    if len(tensors) == 1:
        return [all_reduce(tensors[0], group)]
    sums: list[Tensor] = [*tensors]
    # In the order of the tensors, which is that of the other ranks.
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[place].flatten() for place in places])
        flat = wait(start_all_reduce(flat, group), "all_reduce", group)
        pieces = flat.split([tensors[place].numel() for place in places])
        for place, piece in zip(places, pieces, strict=True):
            sums[place] = piece.view(tensors[place].shape)
    return sums


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, scatters: bool) -> Tensor:
        ctx.group, ctx.scatters = group, scatters
        if scatters:
            return wait(start_reduce_scatter(tensor, group), "reduce_scatter_tensor", group)
        return all_reduce(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return (all_gather(grads[0], ctx.group) if ctx.scatters else grads[0]), None, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *sum_of_each(grads, ctx.group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return wait(start_reduce_scatter(grads[0], ctx.group), "reduce_scatter_tensor", ctx.group), None


class _Finished(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> Tensor:
        result: Tensor = tensor.wait()
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def finished(tensor: Tensor) -> Tensor:
    """The result of a collective of PyTorch's layers, as a plain tensor."""
    return cast(Tensor, _Finished.apply(tensor)) if isinstance(tensor, AsyncCollectiveTensor) else tensor


def sum_over_ranks(tensor: Tensor, group: Group, sequence_parallel: bool = False) -> Tensor:
    """The sum of the ranks' tensors, replicated; with ``sequence_parallel`` this rank's span of its steps."""
    return cast(Tensor, _SumOverRanks.apply(tensor, group, sequence_parallel))


def sum_gradients(tensors: list[Tensor], group: Group) -> list[Tensor]:
    """Replicated tensors, as each rank uses them for its own channels."""
    return list(cast(tuple[Tensor, ...], _SumGradients.apply(group, *tensors)))


def shared_input(tensor: Tensor, group: Group, sequence_parallel: bool = False) -> Tensor:
    """A replicated tensor that several layers read, each for this rank's channels; with ``sequence_parallel`` its argument is
    this rank's span of the steps."""
    return cast(Tensor, _Gather.apply(tensor, group)) if sequence_parallel else sum_gradients([tensor], group)[0]
