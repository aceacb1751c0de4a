"""Parameters of which each rank holds a part, and the modules that read them.

A mixer's ``in_proj.weight`` holds several matrices one after another: those of x and z in Mamba, of z, x, B, C and dt in
Mamba2. A rank needs its rows of each, which no placement of one DTensor describes. A module therefore holds one DTensor for
each of them, a *part*: ``in_proj.weight_x``, ``in_proj.weight_z``. Its placement is ``Shard``, or ``Replicate`` where every
rank needs all of B and C. FSDP2, optimizers, gradient clipping and distributed checkpoints see ordinary DTensors.

``state_dict`` has the whole parameter under its own name, ``in_proj.weight``, with its rows in the order of an unsharded layer.
For that the ranks exchange their rows for columns of all rows, an all-to-all, so ``state_dict`` and ``load_state_dict`` are
collective calls. Each rank keeps its share of the memory.

Parts of one parameter are adjacent in memory until something moves them, as FSDP2 does. One matrix product then reads all of
them; otherwise it reads a copy, which is made again in backward so that it takes no memory between the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from .._arguments import is_autocast_enabled
from ._collectives import Group
from ._linear import column_parallel_linear, row_parallel_linear
from ._reductions import sum_gradients

__all__ = ["ColumnParallel", "Distribution", "Local", "Part", "Parted", "RowParallel", "become", "join", "placed_like", "split"]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a parameter.

    Attributes:
        name: ends the names of its DTensors.
        size: rows of the whole part, or columns where the parameter is cut along them.
        groups: ``None``: the ranks hold equal shards. Otherwise every rank holds the whole part, of so many groups of rows.
        reads: the groups that this rank reads.
    """

    name: str
    size: int
    groups: int | None = None
    reads: tuple[int, ...] = ()

    def placement(self, dim: int) -> Placement:
        return Shard(dim) if self.groups is None else Replicate()

    def read(self, whole: Tensor) -> Tensor:
        """The rows that this rank reads of a part that every rank has."""
        assert self.groups is not None
        if self.reads == tuple(range(self.groups)):
            return whole
        rows = whole.chunk(self.groups)
        # An index tensor would make the host wait for the device.
        return rows[self.reads[0]] if len(self.reads) == 1 else torch.cat([rows[group] for group in self.reads])


@dataclasses.dataclass(frozen=True)
class Distribution:
    """How a style distributes parameters: the mesh, and ``src_data_rank`` of ``torch.distributed.tensor.distribute_tensor``."""

    mesh: DeviceMesh
    src_data_rank: int | None

    def distribute(self, tensor: Tensor, placement: Placement) -> DTensor:
        return distribute_tensor(tensor.detach(), self.mesh, [placement], src_data_rank=self.src_data_rank)

    def parts(self, parameter: nn.Parameter, parts: Sequence[Part], dim: int) -> list[nn.Parameter]:
        """The parts of a parameter, adjacent in memory where it is cut along its rows."""
        whole = parameter.detach().split([part.size for part in parts], dim)
        placements = [part.placement(dim) for part in parts]
        distributed = [self.distribute(piece, placement) for piece, placement in zip(whole, placements, strict=True)]
        locals_ = [piece.to_local() for piece in distributed]
        if dim == 0:
            locals_ = [*torch.cat(locals_).split([piece.shape[0] for piece in locals_])]
        return [
            nn.Parameter(_from_local(local.contiguous(), self.mesh, [placement], piece.shape), parameter.requires_grad)
            for local, placement, piece in zip(locals_, placements, whole, strict=True)
        ]


def _from_local(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _on_mesh(tensor: DTensor) -> DTensor:
    """``tensor`` on the devices of its mesh: a state dict may be offloaded to the CPU, whose tensors NCCL does not take."""
    local, mesh = tensor.to_local(), tensor.device_mesh
    if local.device.type != "cpu" or mesh.device_type == "cpu":
        return tensor
    return _from_local(local.to(mesh.device_type), mesh, tensor.placements, tensor.shape)


def _across(dim: int, whole: Tensor) -> list[Placement]:
    """Placements that leave the axis ``dim`` whole and cut a matrix along its other axis."""
    assert isinstance(whole, DTensor)
    return [Shard(1 - dim) if whole.ndim == 2 else Replicate()] * whole.device_mesh.ndim


def join(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """The whole parameter, or a tensor of its shape, of tensors of its parts."""
    first = pieces[0]
    if not isinstance(first, DTensor):
        return torch.cat([*pieces], dim)
    placements = _across(dim, first)
    pieces_across = [_on_mesh(cast(DTensor, piece)).redistribute(placements=placements) for piece in pieces]
    local = torch.cat([piece.to_local() for piece in pieces_across], dim)
    shape = [*first.shape]
    shape[dim] = sum(piece.shape[dim] for piece in pieces)
    # An offloaded state stays offloaded. DTensor.from_local moves its argument to the mesh's device.
    return _from_local(local, first.device_mesh, placements, shape).to(first.to_local().device)


def split(whole: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """The inverse of :func:`join`. The pieces of a DTensor have the placements of :func:`join`."""
    if not isinstance(whole, DTensor):
        return [piece.contiguous() for piece in whole.split([*sizes], dim)]
    placements = _across(dim, whole)
    locals_ = _on_mesh(whole).redistribute(placements=placements).to_local().split([*sizes], dim)
    shapes = [[*whole.shape[:dim], size, *whole.shape[dim + 1 :]] for size in sizes]
    return [_from_local(local, whole.device_mesh, placements, shape) for local, shape in zip(locals_, shapes, strict=True)]


def placed_like(value: Tensor, parameter: Tensor) -> Tensor:
    """``value`` with the mesh and the placements of ``parameter``."""
    if not isinstance(parameter, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    if not isinstance(value, DTensor):
        # distribute_tensor does not know the placements of FSDP2 with tensor parallelism.
        value = DTensor.from_local(value.to(parameter.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return _on_mesh(value).redistribute(mesh, placements)


def _is_shard(parameter: Tensor | None) -> bool:
    """Whether a parameter is a DTensor on the mesh of tensor parallelism alone."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1


def local_of(parameter: Tensor | None) -> Tensor | None:
    """This rank's shard. Between calls FSDP2 has cut the shard further, along another dimension of the mesh: then the
    parameter itself, which FSDP2 looks for.
    """
    return cast(DTensor, parameter).to_local() if _is_shard(parameter) else parameter


class Local(nn.Module):
    """Mixin: attributes that name parameters are this rank's shards; ``parameters()`` and ``state_dict`` have the DTensors."""

    _gradient_group: Group | None  # over which gradients are summed that each rank has a part of

    def reset_parameters(self) -> None:
        raise NotImplementedError(
            f"{type(self).__name__}: expected parameters to be initialized before TensorParallel distributes them"
        )

    @torch.no_grad()
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # PyTorch copies no tensor that is not distributed into a DTensor.
        for name, parameter in self._parameters.items():
            value = state_dict.get(prefix + name)
            if parameter is not None and isinstance(value, Tensor) and value.shape == parameter.shape:
                state_dict[prefix + name] = placed_like(value, parameter)
        super()._load_from_state_dict(state_dict, prefix, *args)


def become(module: nn.Module, mixin: type[nn.Module], attributes: Iterable[str] = (), sums: Group | None = None) -> None:
    """Derives a class for ``module`` from ``mixin`` and its own class.

    A derived class, as for parametrizations and FSDP2, keeps ``isinstance``, hooks and the names of parameters.

    Args:
        module: changed in place.
        mixin: the first base class.
        attributes: the parameters whose attributes are this rank's shards.
        sums: the ranks over which their gradients are summed.
    """
    key = (mixin, type(module), tuple(attributes))
    if key not in _derived:
        _derived[key] = _derive(*key)
    module.__class__ = _derived[key]
    if isinstance(module, Local):
        module._gradient_group = sums


# One class for all layers of a kind: the compiler compiles the code of each class anew.
_derived: dict[tuple[type[nn.Module], type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def _derive(mixin: type[nn.Module], own: type[nn.Module], attributes: tuple[str, ...]) -> type[nn.Module]:
    def reader(name: str) -> property:
        def read(self: Local) -> Tensor | None:
            local, group = local_of(self._parameters[name]), self._gradient_group
            return local if local is None or group is None else sum_gradients([local], group)[0]

        return property(read)

    return type(f"TensorParallel{own.__name__}", (mixin, own), {name: reader(name) for name in attributes})


class Parted(Local):
    """Mixin: a module whose ``weight`` and ``bias`` may be DTensors of several parts.

    A layer of one part has its parameters under their own names.
    """

    _group: Group
    _sequence_parallel: bool
    _parts: Sequence[Part]
    _dims: dict[str, int]  # of the parameters that have parts

    def distribute(
        self, how: Distribution, parts: Sequence[Part], dims: dict[str, int], *, sequence_parallel: bool = False
    ) -> None:
        """Replaces the parameters named in ``dims`` by DTensors of their parts, cut along the axis ``dims`` gives."""
        self._group, self._sequence_parallel = Group.of(how.mesh), sequence_parallel
        self._parts = parts
        self._dims = {name: dim for name, dim in dims.items() if self._parameters[name] is not None}
        for name, dim in self._dims.items():
            whole = cast(nn.Parameter, self._parameters[name])
            pieces = how.parts(whole, parts, dim)
            del self._parameters[name]
            self._parameters.update(zip(self.part_names(name), pieces, strict=True))

    def parted(self) -> Iterable[tuple[str, list[str], int]]:
        """The parameters with several parts: name, names of the parts, axis."""
        return [(name, self.part_names(name), dim) for name, dim in self._dims.items() if len(self._parts) > 1]

    def part_names(self, name: str) -> list[str]:
        return [name] if len(self._parts) == 1 else [f"{name}_{part.name}" for part in self._parts]

    def read(self, *names: str) -> dict[str, list[Tensor]]:
        """Returns this rank's tensors of the parts of these parameters, or of all."""
        found = {name: [self._parameters[full] for full in self.part_names(name)] for name in names or self._dims}
        tensors = {name: [cast(Tensor, local_of(tensor)) for tensor in parts] for name, parts in found.items()}
        replicated = [place for place, part in enumerate(self._parts) if part.groups is not None]
        shared = [tensors[name][place] for name in tensors for place in replicated]
        if any(tensor.requires_grad for tensor in shared) and torch.is_grad_enabled():
            summed = iter(sum_gradients(shared, self._group))
            for name in tensors:
                for place in replicated:
                    tensors[name][place] = next(summed)
        for name in tensors:
            for place in replicated:
                tensors[name][place] = self._parts[place].read(tensors[name][place])
        return tensors

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, part_names, dim in self.parted():
            destination[prefix + name] = join([destination.pop(prefix + part).detach() for part in part_names], dim)

    @torch.no_grad()
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, part_names, dim in self.parted():
            whole = state_dict.pop(prefix + name, None)
            if not isinstance(whole, Tensor):
                continue
            parameters = [cast(Tensor, self._parameters[part]) for part in part_names]
            sizes = [parameter.shape[dim] for parameter in parameters]
            expected = [*parameters[0].shape[:dim], sum(sizes), *parameters[0].shape[dim + 1 :]]
            if [*whole.shape] != expected:
                error_msgs = args[-1]
                error_msgs.append(f"size mismatch for {prefix + name}: expected shape {expected}, got {[*whole.shape]}")
                state_dict.update(zip((prefix + part for part in part_names), parameters, strict=True))
                continue
            state_dict.update(zip((prefix + part for part in part_names), split(whole, sizes, dim), strict=True))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _cast(self, x: Tensor, parts: dict[str, list[Tensor]]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """``x``, weights and biases for a product: under autocast in its dtype."""
        weights, biases, device = parts["weight"], parts.get("bias", []), x.device.type
        if is_autocast_enabled(device) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            x, weights, biases = x.to(dtype), [w.to(dtype) for w in weights], [b.to(dtype) for b in biases]
        return x, weights, biases

    def _whole_attribute(self, name: str) -> Tensor | None:
        if name in self._parameters or name not in self._dims:
            return local_of(self._parameters.get(name))
        first, dim = cast(DTensor, self._parameters[self.part_names(name)[0]]), self._dims[name]
        if _is_shard(first):
            return torch.cat(self.read(name)[name], dim)
        # Between calls FSDP2 has cut the parts further. Callers look for the dtype and the device.
        return first.to_local().new_empty(0)

    @property
    def weight(self) -> Tensor | None:
        """This rank's weight, its parts joined."""
        return self._whole_attribute("weight")

    @property
    def bias(self) -> Tensor | None:
        """This rank's bias, its parts joined."""
        return self._whole_attribute("bias")


class ColumnParallel(Parted):
    """A linear layer with a replicated input and this rank's columns of the output."""

    def forward(self, x: Tensor) -> Tensor:
        if self._sequence_parallel and x.ndim != 3:
            raise ValueError(
                f"{type(self).__name__}: expected (batch, seqlen, channels) with sequence_parallel, which cannot cut one step, "
                f"got {[*x.shape]}"
            )
        x, weights, biases = self._cast(x, self.read())
        bias = torch.cat(biases) if len(biases) > 1 else next(iter(biases), None)
        return column_parallel_linear(x, weights, bias, self._group, self._sequence_parallel)


class RowParallel(Parted):
    """A linear layer with this rank's columns of the input. The output is replicated.

    With ``_is_inner`` each rank uses the output for its own channels, so that the gradient is a sum over ranks too.
    """

    _is_inner = False

    def forward(self, x: Tensor) -> Tensor:
        x, weights, _ = self._cast(x, self.read("weight"))
        out = row_parallel_linear(x, weights, self._group, self._sequence_parallel, self._is_inner)
        bias = self.bias
        if bias is None:
            return out
        if self._sequence_parallel:
            (bias,) = sum_gradients([bias], self._group)
        return out + bias.to(out.dtype)
