"""This rank's tensors of DTensor parameters: one autograd node reads all parameters of a layer.

``DTensor.to_local`` makes a node for each parameter, and its backward computes the metadata of each gradient anew: of a Mamba2
layer both take the host longer than a small GPU kernel. The node here gives gradients the specs of their parameters. It
also sums the gradients of those parameters that a rank uses for its own channels alone, in one all-reduce.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ._group import Group
from ._reductions import sum_gradients, sum_of_each

__all__ = ["LocalTensors", "Run", "from_local", "traced_tensors"]


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


class _View(NamedTuple):
    """One tensor of a run: parameter number ``first``, and those after it to ``last`` where they are adjacent in memory.

    Attributes:
        first: numbers the parameters of all runs.
        last: equal to ``first`` for a parameter alone.
        shape: of all of them together.
        stride: that of the first.
        is_recorded: whether gradients are computed for it.
    """

    first: int
    last: int
    shape: Sequence[int]
    stride: Sequence[int]
    is_recorded: bool

    def of(self, parameters: Sequence[Any]) -> Tensor:
        """A new tensor: autograd writes its metadata into it."""
        local: Tensor = parameters[self.first]._local_tensor
        return local.detach() if self.first == self.last else local.as_strided(self.shape, self.stride)


class _Gradients(NamedTuple):
    """Describes the recorded parameters to backward.

    Attributes:
        group: the ranks.
        rows: of the parameters of each view.
        specs: the spec of each parameter, and whether it is contiguous.
        summed: the places of those whose gradients are summed over the ranks.
    """

    group: Group
    rows: Sequence[Sequence[int]]
    specs: Sequence[tuple[Any, bool]]
    summed: Sequence[int]


def _like(spec_and_contiguity: tuple[Any, bool], gradient: Tensor) -> DTensor:
    (parameter_spec, is_contiguous), gradient = spec_and_contiguity, gradient.contiguous()
    if is_contiguous:
        # As FSDP2 does, gradients share the spec of their parameter.
        return cast(DTensor, cast(Any, DTensor)(gradient, parameter_spec, requires_grad=False))
    return from_local(gradient, parameter_spec.mesh, parameter_spec.placements, parameter_spec.shape)


class _LocalTensors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, views: Sequence[Tensor], gradients: _Gradients, *parameters: Any) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return tuple(views)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        of: _Gradients = ctx.gradients
        pieces: list[Tensor | None] = []
        for grad, rows in zip(grads, of.rows, strict=True):
            pieces += [grad] if len(rows) == 1 else [None] * len(rows) if grad is None else grad.split(rows)
        places = [place for place in of.summed if pieces[place] is not None]
        if places:
            sums = sum_of_each([cast(Tensor, pieces[place]) for place in places], of.group)
            for place, piece in zip(places, sums, strict=True):
                pieces[place] = piece
        gradients = (None if piece is None else _like(spec, piece) for piece, spec in zip(pieces, of.specs, strict=True))
        return None, None, *gradients


class LocalTensors:
    """Reads this rank's tensors of runs, whose specs and places in memory it looks up once.

    It holds no tensor: a module that was moved to another device keeps no memory on the first one.
    """

    def __init__(self, runs: Sequence[Run], group: Group) -> None:
        self._views: list[list[_View]] = []
        parameters: list[Any] = []
        summed: list[bool] = []
        for run in runs:
            first, locals_ = len(parameters), [cast(Any, parameter)._local_tensor for parameter in run.parameters]
            parameters += run.parameters
            summed += run.summed
            is_one = len(locals_) == 1 or (
                run.joins_rows
                and len({parameter.requires_grad for parameter in run.parameters}) == 1
                and _are_adjacent(locals_)
            )
            places = [(first, len(parameters) - 1)] if is_one else [(place, place) for place in range(first, len(parameters))]
            self._views.append([self._view(parameters, *ends) for ends in places])
        # A parameter's spec, its local tensor, the address of that, and whether the parameter requires gradients.
        self._found = [(p._spec, weakref.ref(p._local_tensor), p._local_tensor.data_ptr(), p.requires_grad) for p in parameters]
        self._recorded = [view for views in self._views for view in views if view.is_recorded]
        numbers = [[*range(view.first, view.last + 1)] for view in self._recorded]
        self._places = [*itertools.chain.from_iterable(numbers)]
        self._gradients = _Gradients(
            group,
            rows=[[parameters[number]._local_tensor.shape[0] for number in of_view] for of_view in numbers],
            specs=[(parameters[number]._spec, parameters[number].is_contiguous()) for number in self._places],
            summed=[place for place, number in enumerate(self._places) if summed[number]],
        )

    @staticmethod
    def _view(parameters: Sequence[Any], first: int, last: int) -> _View:
        local, requires_grad = parameters[first]._local_tensor, parameters[first].requires_grad
        rows = sum(parameter._local_tensor.shape[0] for parameter in parameters[first : last + 1])
        return _View(first, last, (rows, *local.shape[1:]), local.stride(), requires_grad)

    def are_of(self, parameters: Sequence[Any]) -> bool:
        """Whether these are the parameters of the runs, in the same memory."""
        for parameter, (spec, local, address, requires_grad) in zip(parameters, self._found, strict=True):
            if getattr(parameter, "_spec", None) is not spec or parameter.requires_grad != requires_grad:
                return False
            found = local()
            if found is None or parameter._local_tensor is not found or found.data_ptr() != address:
                return False
        return True

    def read(self, parameters: Sequence[Any]) -> list[list[Tensor]]:
        """The tensors of each run: one where its parameters are adjacent in memory, otherwise one for each of them.

        Differentiable once. Gradients are DTensors like their parameters.
        """
        if not (self._recorded and torch.is_grad_enabled()):
            return [[view.of(parameters) for view in views] for views in self._views]
        with torch.no_grad():
            recorded = [view.of(parameters) for view in self._recorded]
        results = iter(
            cast(Any, _LocalTensors.apply(recorded, self._gradients, *[parameters[place] for place in self._places]))
        )
        return [[next(results) if view.is_recorded else view.of(parameters) for view in views] for views in self._views]


def traced_tensors(run: Run, group: Group) -> list[Tensor]:
    """Reads a run as ``LocalTensors`` does, for the compiler, which knows ``to_local`` but no nodes of DTensors."""
    tensors = [parameter.to_local() for parameter in run.parameters]
    places = [place for place, sums in enumerate(run.summed) if sums and tensors[place].requires_grad]
    if places and torch.is_grad_enabled():
        for place, tensor in zip(places, sum_gradients([tensors[place] for place in places], group), strict=True):
            tensors[place] = tensor
    return tensors
