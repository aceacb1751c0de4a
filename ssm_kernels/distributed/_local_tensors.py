"""This rank's tensors of DTensor parameters: one autograd node reads all parameters of a layer.

``DTensor.to_local`` makes a node for each parameter, and its backward computes the metadata of each gradient anew: of a Mamba2
layer both take the host longer than a small GPU kernel. The node here gives gradients the specs of their parameters. It
also sums the gradients of those parameters that a rank uses for its own channels alone, in one all-reduce.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ._collectives import Group
from ._reductions import sum_gradients, sum_of_each

__all__ = ["Run", "from_local", "local_tensors"]


class Run(NamedTuple):
    """Parameters that are read as one tensor, one after another, where they are adjacent in memory.

    Attributes:
        parameters: the DTensors.
        summed: whether the gradient of each is summed over the ranks.
        joins_rows: whether the parameters are rows of one tensor. Otherwise they are read one by one.
    """

    parameters: Sequence[DTensor]
    summed: Sequence[bool]
    joins_rows: bool = True


def from_local(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _are_adjacent(tensors: Sequence[Tensor]) -> bool:
    storage, end = tensors[0].untyped_storage().data_ptr(), tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() != storage or tensor.data_ptr() != end or not tensor.is_contiguous():
            return False
        end += tensor.nbytes
    return True


def _view_of(parameters: Sequence[Any]) -> Tensor:
    """A view of the shards of parameters that are adjacent in memory. A new tensor: autograd writes its metadata into it."""
    first: Tensor = parameters[0]._local_tensor
    if len(parameters) == 1:
        return first.view_as(first)
    rows = sum(parameter._local_tensor.shape[0] for parameter in parameters)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _like(spec_and_contiguity: tuple[Any, bool], gradient: Tensor) -> DTensor:
    (parameter_spec, is_contiguous), gradient = spec_and_contiguity, gradient.contiguous()
    if is_contiguous:
        # As FSDP2 does, gradients share the spec of their parameter.
        return cast(DTensor, cast(Any, DTensor)(gradient, parameter_spec, requires_grad=False))
    return from_local(gradient, parameter_spec.mesh, parameter_spec.placements, parameter_spec.shape)


class _LocalTensors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, runs: Sequence[Run], *parameters: Any) -> tuple[Tensor, ...]:
        ctx.group, ctx.summed = group, [*itertools.chain.from_iterable(run.summed for run in runs)]
        ctx.specs = [(parameter._spec, parameter.is_contiguous()) for parameter in parameters]
        ctx.rows = [[cast(Any, parameter)._local_tensor.shape[0] for parameter in run.parameters] for run in runs]
        ctx.set_materialize_grads(False)
        return tuple(_view_of(run.parameters) for run in runs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        pieces: list[Tensor | None] = []
        for grad, rows in zip(grads, ctx.rows, strict=True):
            pieces += [grad] if len(rows) == 1 else [None] * len(rows) if grad is None else grad.split(rows)
        places = [
            place for place, (piece, sums) in enumerate(zip(pieces, ctx.summed, strict=True)) if sums and piece is not None
        ]
        if places:
            sums = sum_of_each([cast(Tensor, pieces[place]) for place in places], ctx.group)
            for place, piece in zip(places, sums, strict=True):
                pieces[place] = piece
        gradients = (None if piece is None else _like(spec, piece) for piece, spec in zip(pieces, ctx.specs, strict=True))
        return None, None, *gradients


def local_tensors(runs: Sequence[Run], group: Group) -> list[list[Tensor]]:
    """This rank's tensors of each run: one where its parameters are adjacent in memory, otherwise one for each of them.

    Differentiable once. Gradients are DTensors like their parameters.
    """
    if torch.compiler.is_compiling():
        return [_traced(run, group) for run in runs]
    pieces: list[list[Run]] = []
    for run in runs:
        parameters = run.parameters
        is_one = len(parameters) == 1 or (
            run.joins_rows
            and len({parameter.requires_grad for parameter in parameters}) == 1
            and _are_adjacent([cast(Any, parameter)._local_tensor for parameter in parameters])
        )
        pieces.append([run] if is_one else [Run([p], [sums]) for p, sums in zip(parameters, run.summed, strict=True)])
    is_recording = torch.is_grad_enabled()
    recorded = [piece for run in pieces for piece in run if is_recording and piece.parameters[0].requires_grad]
    results: Any = iter(())
    if recorded:
        parameters = [parameter for piece in recorded for parameter in piece.parameters]
        results = iter(cast(Any, _LocalTensors.apply(group, recorded, *parameters)))
    return [
        [next(results) if is_recording and piece.parameters[0].requires_grad else _view_of(piece.parameters) for piece in run]
        for run in pieces
    ]


def _traced(run: Run, group: Group) -> list[Tensor]:
    """The same for the compiler, which knows ``to_local`` but no nodes of DTensors."""
    tensors = [parameter.to_local() for parameter in run.parameters]
    places = [place for place, sums in enumerate(run.summed) if sums and tensors[place].requires_grad]
    if places and torch.is_grad_enabled():
        for place, tensor in zip(places, sum_gradients([tensors[place] for place in places], group), strict=True):
            tensors[place] = tensor
    return tensors
