"""Differentiable collectives of tensor parallelism, between tensors that every rank has and tensors that ranks have parts of.

A tensor that every rank has is *replicated*: its values and its gradient are the same on all ranks. Where a rank uses it for
its own channels alone, the gradient that the rank computes is one term of a sum.

======================  ==============================  ===================================
function                forward                         backward
======================  ==============================  ===================================
``enter``               none; all-gather of a sequence  all-reduce; reduce-scatter
``leave``               all-reduce; reduce-scatter      none; all-gather of a sequence
``sum_over_ranks``      all-reduce                      all-reduce
``sum_gradients``       none                            one all-reduce for several tensors
======================  ==============================  ===================================
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["all_reduce", "enter", "finished", "leave", "sum_gradients", "sum_over_ranks"]

_SEQUENCE = 1  # axis of (batch, seqlen, channels)
# The second names are those before PyTorch 2.15.
_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_scatter = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor


def _wait(tensor: Tensor) -> Tensor:
    return tensor.wait() if isinstance(tensor, collectives.AsyncCollectiveTensor) else tensor


def all_reduce(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    return _wait(collectives.all_reduce(tensor.contiguous(), "sum", (mesh, 0)))


def _all_gather(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    return _wait(_gather(tensor.contiguous(), _SEQUENCE, (mesh, 0)))


def _reduce_scatter(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    return _wait(_scatter(tensor.contiguous(), "sum", _SEQUENCE, (mesh, 0)))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: DeviceMesh, gathers: bool) -> Tensor:
        ctx.mesh, ctx.gathers = mesh, gathers
        return _all_gather(tensor, mesh) if gathers else tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return (_reduce_scatter if ctx.gathers else all_reduce)(grads[0], ctx.mesh), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: DeviceMesh, scatters: bool) -> Tensor:
        ctx.mesh, ctx.scatters = mesh, scatters
        return (_reduce_scatter if scatters else all_reduce)(tensor, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return (_all_gather(grads[0], ctx.mesh) if ctx.scatters else grads[0]), None, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return all_reduce(tensor, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return all_reduce(grads[0], ctx.mesh), None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh = mesh
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        flat = all_reduce(torch.cat([grad.flatten() for grad in grads]), ctx.mesh)
        pieces = flat.split([grad.numel() for grad in grads])
        return None, *(piece.view(grad.shape) for piece, grad in zip(pieces, grads, strict=True))


class _Finished(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _wait(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def finished(tensor: Tensor) -> Tensor:
    """The result of an asynchronous collective, as a plain tensor."""
    return cast(Tensor, _Finished.apply(tensor))


def enter(tensor: Tensor, mesh: DeviceMesh, sequence_parallel: bool = False) -> Tensor:
    """A replicated tensor, as each rank uses it; with ``sequence_parallel`` gathered from the ranks' spans of its steps."""
    return cast(Tensor, _Enter.apply(tensor, mesh, sequence_parallel))


def leave(tensor: Tensor, mesh: DeviceMesh, sequence_parallel: bool = False) -> Tensor:
    """The sum of the ranks' tensors, replicated; with ``sequence_parallel`` this rank's span of its steps."""
    return cast(Tensor, _Leave.apply(tensor, mesh, sequence_parallel))


def sum_over_ranks(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of the ranks' tensors, which each rank uses for its own channels."""
    return cast(Tensor, _SumOverRanks.apply(tensor, mesh))


def sum_gradients(tensors: list[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """Replicated tensors of one dtype, as each rank uses them for its own channels."""
    return list(cast(tuple[Tensor, ...], _SumGradients.apply(mesh, *tensors)))
