"""Sharded parameters, and the modules that read them.

A mixer's ``in_proj.weight`` is *fused*: it holds several matrices one after another, those of x and z in Mamba, of z, x, B, C
and dt in Mamba2. A rank needs its rows of each, which no placement of one DTensor describes. A module therefore holds one
DTensor for each of these *parts*: ``in_proj.weight_x``, ``in_proj.weight_z``. Its :class:`ShardSpec` gives the placement,
``Shard`` or, where every rank needs all of B and C, ``Replicate``. FSDP2, optimizers, gradient clipping and distributed
checkpoints see ordinary DTensors.

``state_dict`` has the whole parameter under its own name, ``in_proj.weight``, with its rows in the order of an unsharded layer.
For that the ranks exchange their rows for columns of all rows, an all-to-all, so ``state_dict`` and ``load_state_dict`` are
collective calls. Each rank keeps its share of the memory.

Parts of one parameter are adjacent in memory until something moves them, as FSDP2 does. One matrix product then reads all of
them; otherwise it reads a copy, which is made again in backward so that it takes no memory between the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from .._torchscript import refuse_tracing
from ..nn.naming import class_name
from ..ops._arguments import is_autocast_enabled
from ._group import Group
from ._linear import column_parallel_linear, row_parallel_linear
from ._local_tensors import LocalTensors, Run, from_local, traced_tensors

__all__ = [
    "ColumnParallelLinear",
    "Distribution",
    "RowParallelLinear",
    "ShardSpec",
    "ShardedLayer",
    "ShardedLinear",
    "ShardedModule",
    "join",
    "placed_like",
    "split",
    "swap_class",
]


@dataclasses.dataclass(frozen=True)
class ShardSpec:
    """How the ranks hold one part of a fused parameter.

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
        """The rows that this rank reads, of its tensor of the part."""
        if self.groups is None or self.is_read_whole:
            return whole
        first, rows = self.reads[0], whole.shape[0] // self.groups
        if self.reads == tuple(range(first, first + len(self.reads))):
            return whole.narrow(0, first * rows, len(self.reads) * rows)
        # An index tensor would make the host wait for the device.
        return torch.cat([whole.narrow(0, group * rows, rows) for group in self.reads])

    @property
    def is_read_whole(self) -> bool:
        return self.groups is None or self.reads == tuple(range(self.groups))


@dataclasses.dataclass(frozen=True)
class Distribution:
    """The arguments with which a style calls ``torch.distributed.tensor.distribute_tensor``."""

    mesh: DeviceMesh
    src_data_rank: int | None

    @cached_property
    def group(self) -> Group:
        return Group.of(self.mesh)

    def distribute(self, tensor: Tensor, placement: Placement) -> DTensor:
        return distribute_tensor(tensor.detach(), self.mesh, [placement], src_data_rank=self.src_data_rank)

    def parts(self, parameter: nn.Parameter, parts: Sequence[ShardSpec], dim: int) -> list[nn.Parameter]:
        """The parts of a parameter, adjacent in memory where it is cut along its rows."""
        whole = parameter.detach().split([part.size for part in parts], dim)
        placements = [part.placement(dim) for part in parts]
        distributed = [self.distribute(piece, placement) for piece, placement in zip(whole, placements, strict=True)]
        locals_ = [piece.to_local() for piece in distributed]
        if dim == 0:
            locals_ = [*torch.cat(locals_).split([piece.shape[0] for piece in locals_])]
        return [
            nn.Parameter(from_local(local.contiguous(), self.mesh, [placement], piece.shape), parameter.requires_grad)
            for local, placement, piece in zip(locals_, placements, whole, strict=True)
        ]


def _on_mesh(tensor: DTensor) -> DTensor:
    """``tensor`` on the devices of its mesh: a state dict may be offloaded to the CPU, whose tensors NCCL does not take."""
    local, mesh = tensor.to_local(), tensor.device_mesh
    if local.device.type != "cpu" or mesh.device_type == "cpu":
        return tensor
    return from_local(local.to(mesh.device_type), mesh, tensor.placements, tensor.shape)


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
    return from_local(local, first.device_mesh, placements, shape).to(first.to_local().device)


def split(whole: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """The inverse of :func:`join`. The pieces of a DTensor have the placements of :func:`join`."""
    if not isinstance(whole, DTensor):
        return [piece.contiguous() for piece in whole.split([*sizes], dim)]
    placements = _across(dim, whole)
    locals_ = _on_mesh(whole).redistribute(placements=placements).to_local().split([*sizes], dim)
    shapes = [[*whole.shape[:dim], size, *whole.shape[dim + 1 :]] for size in sizes]
    return [from_local(local, whole.device_mesh, placements, shape) for local, shape in zip(locals_, shapes, strict=True)]


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
    return isinstance(parameter, DTensor) and len(parameter.placements) == 1


class _Reader:
    """Reads parameters of modules by one autograd node: those that are DTensors on the mesh of tensor parallelism alone. FSDP2
    cuts them further between its calls, along another dimension of the mesh.
    """

    def __init__(self, modules: Sequence[ShardedModule], only: str | None = None) -> None:
        runs = [
            (place, name, names)
            for place, module in enumerate(modules)
            for name, names in module.runs().items()
            if only in (None, name)
        ]
        found = [(place, name, names) for place, name, names in runs if _is_shard(modules[place]._parameters[names[0]])]
        self.names = [(place, name) for place, name, _ in found]  # of each run: the module's place, and its name there
        # No reference to modules[0], which has this reader.
        self._children = [*modules[1:]]
        self._holders = [(modules[place]._parameters, each) for place, _, names in found for each in names]
        self._tensors = LocalTensors([modules[place].run(names) for place, _, names in found], modules[0]._group)
        self._has_all = len(found) == len(runs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a module makes its own.
        return type(None), ()

    def is_current(self, children: Sequence[ShardedModule]) -> bool:
        """Whether modules, parameters and their memory are the same as before."""
        return self._has_all and self._children == children and self._tensors.are_of(self._parameters())

    def read(self) -> list[list[Tensor]]:
        """The tensors of each run: one, or one for each part where the parts are not adjacent in memory."""
        refuse_tracing("TensorParallel", "several ranks")
        return self._tensors.read(self._parameters())

    def _parameters(self) -> list[Any]:
        return [parameters.get(name) for parameters, name in self._holders]


class ShardedModule(nn.Module):
    """Mixin: attributes that name parameters are this rank's shards; ``parameters()`` and ``state_dict`` have the DTensors."""

    _group: Group
    _summed: frozenset[str] = frozenset()  # the parameters whose gradients the ranks sum, each of its own channels
    _held: dict[str, list[Tensor]] | None = None  # by ShardedLayer, while it runs
    _readers: dict[str, _Reader]  # of parameters that are read alone
    _joins_rows = True  # parts of a parameter are rows of it, not columns

    def runs(self) -> dict[str, list[str]]:
        """The parameters that are read together, by the name under which :meth:`local` has them."""
        return {name: [name] for name, parameter in self._parameters.items() if parameter is not None}

    def run(self, names: list[str]) -> Run:
        """The parameters of these names."""
        parameters = [cast(DTensor, self._parameters[name]) for name in names]
        return Run(parameters, [name in self._summed for name in names], self._joins_rows)

    def local(self, name: str) -> list[Tensor]:
        """This rank's tensors of the parameter: one, or one for each part where the parts are not adjacent in memory.

        FSDP2 looks for the parameters themselves: between its calls these are the tensors.
        """
        if self._held is not None and name in self._held:
            return self._held[name]
        names = self.runs().get(name, [])
        if not (names and _is_shard(self._parameters[names[0]])):
            return [cast(Tensor, self._parameters[each]) for each in names]
        if torch.compiler.is_compiling():
            return traced_tensors(self.run(names), self._group)
        reader = self._readers.get(name)
        if reader is None or not reader.is_current([]):
            reader = self._readers[name] = _Reader([self], name)
        return reader.read()[0]

    def reset_parameters(self) -> None:
        raise NotImplementedError(
            f"{class_name(self)}: expected parameters to be initialized before TensorParallel distributes them"
        )

    @torch.no_grad()
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # PyTorch copies no tensor that is not distributed into a DTensor.
        for name, parameter in self._parameters.items():
            value = state_dict.get(prefix + name)
            if parameter is not None and isinstance(value, Tensor) and value.shape == parameter.shape:
                state_dict[prefix + name] = placed_like(value, parameter)
        super()._load_from_state_dict(state_dict, prefix, *args)


class ShardedLayer(ShardedModule):
    """Mixin for a layer: its forward reads the parameters of the layer and of its modules at once, by one autograd node."""

    _reader: _Reader | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        children = [module for module in self._modules.values() if isinstance(module, ShardedModule)]
        reader = self._reader
        if reader is None or not reader.is_current(children):
            reader = self.__dict__["_reader"] = _Reader([self, *children])
        held: list[dict[str, list[Tensor]]] = [{} for _ in (self, *children)]
        for (place, name), tensors in zip(reader.names, reader.read(), strict=True):
            held[place][name] = tensors
        try:
            for module, of_module in zip((self, *children), held, strict=True):
                module.__dict__["_held"] = of_module
            return super().forward(*args, **kwargs)
        finally:
            for module in (self, *children):
                module.__dict__.pop("_held", None)


def swap_class(
    module: nn.Module, mixin: type[nn.Module], group: Group, attributes: Iterable[str] = (), summed: Iterable[str] = ()
) -> None:
    """Derives a class for ``module`` from ``mixin`` and its own class.

    A derived class, as for parametrizations and FSDP2, keeps ``isinstance``, hooks and the names of parameters.

    Args:
        module: changed in place.
        mixin: the first base class.
        group: the ranks.
        attributes: the parameters whose attributes are this rank's shards.
        summed: the parameters whose gradients are summed over the ranks.
    """
    key = (mixin, type(module), tuple(attributes))
    if key not in _derived:
        _derived[key] = _derive(*key)
    module.__class__ = _derived[key]
    if isinstance(module, ShardedModule):
        # The module's own initialization reads whole parameters.
        module.__dict__.pop("reset_parameters", None)
        module._group, module._summed, module._readers = group, frozenset(summed), {}


# One class for all layers of a kind: the compiler compiles the code of each class anew.
_derived: dict[tuple[type[nn.Module], type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def _derive(mixin: type[nn.Module], own: type[nn.Module], attributes: tuple[str, ...]) -> type[nn.Module]:
    def reader(name: str) -> property:
        return property(lambda self: next(iter(self.local(name)), None))

    return type(f"TensorParallel{own.__name__}", (mixin, own), {name: reader(name) for name in attributes})


class ShardedLinear(ShardedModule):
    """Mixin: a linear layer or depthwise convolution whose ``weight`` and ``bias`` may be fused, with a DTensor for each part.

    A layer of one part has its parameters under their own names.
    """

    _sequence_parallel: bool
    _shards: Sequence[ShardSpec]
    _reads_whole: bool
    _dims: dict[str, int]  # of the parameters that have parts
    _runs: dict[str, list[str]]

    def distribute(
        self, how: Distribution, parts: Sequence[ShardSpec], dims: dict[str, int], *, sequence_parallel: bool = False
    ) -> None:
        """Replaces the parameters named in ``dims`` by DTensors of their parts, cut along the axis ``dims`` gives."""
        self._sequence_parallel = sequence_parallel
        self._shards = parts
        self._reads_whole = all(part.is_read_whole for part in parts)
        self._dims = {name: dim for name, dim in dims.items() if self._parameters[name] is not None}
        for name, dim in self._dims.items():
            whole = cast(nn.Parameter, self._parameters[name])
            pieces = how.parts(whole, parts, dim)
            del self._parameters[name]
            self._parameters.update(zip(self.shard_names(name), pieces, strict=True))
            self._summed |= {full for full, part in zip(self.shard_names(name), parts, strict=True) if part.groups is not None}
        self._runs = {name: self.shard_names(name) for name in self._dims}
        parts_of_any = {full for names in self._runs.values() for full in names}
        self._runs |= {name: names for name, names in super().runs().items() if name not in parts_of_any}

    def runs(self) -> dict[str, list[str]]:
        return self._runs

    def fused_parameters(self) -> Iterable[tuple[str, list[str], int]]:
        """The parameters of several parts: name, names of the parts' DTensors, axis."""
        return [(name, self.shard_names(name), dim) for name, dim in self._dims.items() if len(self._shards) > 1]

    def shard_names(self, name: str) -> list[str]:
        return [name] if len(self._shards) == 1 else [f"{name}_{part.name}" for part in self._shards]

    def read(self, name: str) -> list[Tensor]:
        """This rank's tensors of the parameter, one after another."""
        tensors = self.local(name)
        if self._reads_whole or name not in self._dims:
            return tensors
        if len(tensors) != len(self._shards):
            sizes = [cast(DTensor, self._parameters[part])._local_tensor.shape[0] for part in self.shard_names(name)]
            tensors = [*tensors[0].split(sizes)]
        return [part.read(tensor) for part, tensor in zip(self._shards, tensors, strict=True)]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, shard_names, dim in self.fused_parameters():
            destination[prefix + name] = join([destination.pop(prefix + part).detach() for part in shard_names], dim)

    @torch.no_grad()
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, shard_names, dim in self.fused_parameters():
            whole = state_dict.pop(prefix + name, None)
            if not isinstance(whole, Tensor):
                continue
            parameters = [cast(Tensor, self._parameters[part]) for part in shard_names]
            sizes = [parameter.shape[dim] for parameter in parameters]
            expected = [*parameters[0].shape[:dim], sum(sizes), *parameters[0].shape[dim + 1 :]]
            if [*whole.shape] != expected:
                error_msgs = args[-1]
                error_msgs.append(f"size mismatch for {prefix + name}: expected shape {expected}, got {[*whole.shape]}")
                state_dict.update(zip((prefix + part for part in shard_names), parameters, strict=True))
                continue
            state_dict.update(zip((prefix + part for part in shard_names), split(whole, sizes, dim), strict=True))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _cast(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """``x``, weights and biases for a product: under autocast in its dtype."""
        weights, biases, device = self.read("weight"), self.read("bias"), x.device.type
        if is_autocast_enabled(device) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            x, weights, biases = x.to(dtype), [w.to(dtype) for w in weights], [b.to(dtype) for b in biases]
        return x, weights, biases

    def _whole_attribute(self, name: str) -> Tensor | None:
        tensors = self.local(name)
        if len(tensors) > 1 and isinstance(tensors[0], DTensor):
            # Between calls FSDP2 has cut the parts further. Callers look for the dtype and the device.
            return tensors[0].to_local().new_empty(0)
        tensors = self.read(name)
        return torch.cat(tensors, self._dims[name]) if len(tensors) > 1 else next(iter(tensors), None)

    @property
    def weight(self) -> Tensor | None:
        """This rank's weight, its parts joined."""
        return self._whole_attribute("weight")

    @property
    def bias(self) -> Tensor | None:
        """This rank's bias, its parts joined."""
        return self._whole_attribute("bias")


class ColumnParallelLinear(ShardedLinear):
    """A linear layer with a replicated input and this rank's columns of the output.

    With ``_shares_input`` the layer around it gathers the input, and sums the gradients of all projections that read it.
    """

    _shares_input = False

    def forward(self, x: Tensor) -> Tensor:
        if self._sequence_parallel and x.ndim != 3:
            raise ValueError(
                f"{class_name(self)}: expected (batch, seqlen, channels) with sequence_parallel, which cannot cut one step, "
                f"got {[*x.shape]}"
            )
        x, weights, biases = self._cast(x)
        bias = torch.cat(biases) if len(biases) > 1 else next(iter(biases), None)
        group = None if self._shares_input else self._group
        return column_parallel_linear(x, weights, bias, group, self._sequence_parallel)


class RowParallelLinear(ShardedLinear):
    """A linear layer with this rank's columns of the input. The output is replicated.

    With ``_is_inner`` each rank uses the output for its own channels, so that the gradient is a sum over ranks too.
    """

    _is_inner = False
    _joins_rows = False

    def forward(self, x: Tensor) -> Tensor:
        x, weights, _ = self._cast(x)
        out = row_parallel_linear(x, weights, self._group, self._sequence_parallel, self._is_inner)
        bias = self.bias
        if bias is None:
            return out
        return out + bias.to(out.dtype)
