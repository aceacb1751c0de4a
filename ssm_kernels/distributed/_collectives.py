"""Several small tensors of a rank in one buffer, for messages, and the all-gather of such buffers of context parallelism.

Functional collectives are traced by ``torch.compile`` and counted by ``CommDebugMode``. Backward needs no other collective:
each rank gathers the gradients of all ranks and keeps the part that concerns it, in a fixed order of additions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Gathering", "Group", "GroupLike", "Kind", "Layout", "check_dimensions", "failure", "kind", "tie"]

GroupLike = dist.ProcessGroup | DeviceMesh | None
Kind = tuple[Sequence[int], torch.dtype]  # shape and dtype of a tensor


@dataclasses.dataclass(frozen=True)
class Group:
    """The ranks that hold a sequence together, as plain values: modules that keep one can be copied and compiled.

    Attributes:
        name: PyTorch's name of the process group.
        size: number of ranks.
        rank: this process's rank in the group. Rank 0 holds the first span of the sequence.
    """

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, group: GroupLike | Group) -> Group:
        """Describes a process group, a device mesh of one dimension, or the default group for None.

        Raises:
            ValueError: the mesh has several dimensions, or this process is not in the group.
            TypeError: the argument is something else.
        """
        if isinstance(group, Group):
            return group
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"context parallelism: expected a mesh of one dimension, got {group.ndim}: pass a slice such as mesh['cp']"
                )
            group = group.get_group()
        if group is None:
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            if group == dist.GroupMember.NON_GROUP_MEMBER:  # what dist.new_group returns to the other processes
                raise ValueError(f"context parallelism: expected a group of this process, rank {dist.get_rank()}")
            raise TypeError(f"context parallelism: expected a ProcessGroup or a DeviceMesh, got {type(group).__name__}")
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(f"context parallelism: expected a group of this process, rank {dist.get_rank()}")
        return cls(group.group_name, dist.get_world_size(group), rank)

    @classmethod
    def named(cls, name: str) -> Group:
        """The group that has PyTorch's name ``name`` now."""
        return cls.of(cls(name, 0, 0).process_group)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group that has this name now. Not for compiled code."""
        resolve: Any = c10d.__dict__["_resolve_process_group"]
        process_group: dist.ProcessGroup = resolve(self.name)
        return process_group

    def others_in(self, group: Group) -> list[int]:
        """The global ranks other than this process's that are in both groups."""
        ranks, others = (set(dist.get_process_group_ranks(each.process_group)) for each in (self, group))
        return sorted((ranks & others) - {dist.get_rank()})


def check_dimensions(style: str, group: Group, other_style: str, other_group: Group | None) -> None:
    """Checks that two styles of parallelism share a layer over different dimensions of the mesh."""
    common = [] if other_group is None else group.others_in(other_group)
    if common:
        raise ValueError(
            f"{style}: expected another dimension of the mesh than that of {other_style}, which the layer has already, got the "
            f"ranks {common} in both"
        )


def tie(tensor: Tensor, to: Tensor) -> Tensor:
    """``tensor``, for the compiler a function of the other one.

    Ranks need different data: the first one uses no state of others, and its own gradient is used by none. The compiler would
    remove a collective whose result a rank does not use, or move one that does not depend on the gradients of the results to
    forward, on this rank alone. The others would wait for it.
    """
    if not torch.compiler.is_compiling():
        return tensor
    for axis in range(to.dim()):
        to = to.narrow(axis, 0, min(to.shape[axis], 1))
    number = to.sum().to(tensor.dtype)
    return torch.where(torch.zeros_like(number, dtype=torch.bool), number, tensor)


def kind(tensor: Tensor) -> Kind:
    """Shape and dtype."""
    return tensor.shape, tensor.dtype


class Layout:
    """The places of several tensors in one flat buffer: of their dtype, or of bytes where they have several.

    Args:
        kinds: shape and dtype of each tensor.

    Attributes:
        dtype: of the buffer.
        numel: elements of the buffer.
    """

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._kinds = kinds
        self._is_of_bytes = any(dtype != kinds[0][1] for _, dtype in kinds)
        self.dtype = torch.uint8 if self._is_of_bytes else kinds[0][1]
        self._spans: list[tuple[int, int]] = []  # first element and length
        self.numel = 0
        for shape, dtype in kinds:
            length = math.prod(shape) * (dtype.itemsize if self._is_of_bytes else 1)
            self._spans.append((self.numel, length))
            # A view of bytes as numbers has to begin at a multiple of their size.
            self.numel += length + (-length % 8 if self._is_of_bytes else 0)

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Layout:
        return Layout([kind(tensor) for tensor in tensors])

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """The buffer with the values of ``tensors``."""
        flat = [tensor.reshape(-1) for tensor in tensors]
        if self._is_of_bytes:
            flat = [tensor.view(torch.uint8) for tensor in flat]
            flat = [
                torch.nn.functional.pad(tensor, (0, -tensor.shape[0] % 8)) if tensor.shape[0] % 8 > 0 else tensor
                for tensor in flat
            ]
        return torch.cat(flat) if len(flat) > 1 else flat[0]

    def unpack(self, buffer: Tensor, count: int | None = None) -> list[Tensor]:
        """The first ``count`` tensors, or all, in contiguous buffers (..., numel), each with the same leading axes: views."""
        results = []
        for (shape, dtype), (begin, length) in zip(self._kinds[:count], self._spans[:count], strict=True):
            part = buffer.narrow(-1, begin, length)
            if self._is_of_bytes:
                part = part.view(dtype)
            results.append(part.view(*buffer.shape[:-1], *shape))
        return results


def failure(what: str, group: Group, error: RuntimeError) -> RuntimeError:
    """The error of a collective that has failed. ``what`` names it."""
    from ._agreement import calls_of_others, mark_as_known

    return mark_as_known(
        RuntimeError(
            f"{what} failed on rank {group.rank} of {group.size}: a rank has died, has made another call, or has not come "
            f"within the time-out of the group.{calls_of_others(group)} PyTorch's message: {error}"
        )
    )


class Gathering:
    """An all-gather under way, of tensors whose shapes and dtypes are the same on every rank.

    Args:
        tensors: of this rank.
        group: the ranks.
        what: names the data in the message of an error.
    """

    def __init__(self, tensors: Sequence[Tensor], group: Group, what: str) -> None:
        self._group, self._what = group, what
        self._layout = Layout.of(tensors)
        packed = self._layout.pack(tensors)
        self._buffer = self._run(torch.ops._c10d_functional.all_gather_into_tensor, packed, group.size, group.name)

    def wait(self) -> list[Tensor]:
        """The tensors of all ranks, each (ranks, ...).

        Raises:
            RuntimeError: the collective failed: a rank has died, made another call or not come within the group's time-out.
        """
        self._buffer = self._run(torch.ops._c10d_functional.wait_tensor, self._buffer)
        return self._layout.unpack(self._buffer.view(self._group.size, -1))

    def tie(self, tensor: Tensor) -> Tensor:
        """``tensor``, for the compiler a function of the gathered data: see :func:`tie`."""
        return tie(tensor, self._buffer)

    def _run(self, operator: torch._ops.OpOverloadPacket, *arguments: object) -> Tensor:
        if torch.compiler.is_compiling():
            traced: Tensor = operator(*arguments)
            return traced
        try:
            result: Tensor = operator(*arguments)
        except RuntimeError as error:
            raise failure(f"{self._what}: the all-gather", self._group, error) from error
        return result
