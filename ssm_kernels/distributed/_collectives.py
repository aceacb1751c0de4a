"""The all-gather of context parallelism: several small tensors of each rank in one buffer, by a functional collective.

Functional collectives are traced by ``torch.compile`` and counted by ``CommDebugMode``. Backward needs no other collective:
each rank gathers the gradients of all ranks and keeps the part that concerns it, in a fixed order of additions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Gathering", "Group", "GroupLike", "tie"]

GroupLike = dist.ProcessGroup | DeviceMesh | None


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
            raise TypeError(f"context parallelism: expected a ProcessGroup or a DeviceMesh, got {type(group).__name__}")
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(f"context parallelism: expected a group of this process, rank {dist.get_rank()}")
        return cls(group.group_name, dist.get_world_size(group), rank)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group that has this name now. Not for compiled code."""
        resolve: Any = c10d.__dict__["_resolve_process_group"]
        process_group: dist.ProcessGroup = resolve(self.name)
        return process_group


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


class Gathering:
    """An all-gather under way, of tensors whose shapes and dtypes are the same on every rank.

    Args:
        tensors: of this rank.
        group: the ranks.
        what: names the data in the message of an error.
    """

    def __init__(self, tensors: Sequence[Tensor], group: Group, what: str) -> None:
        self._shapes = [tuple(tensor.shape) for tensor in tensors]
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._group, self._what = group, what
        self._is_of_bytes = len(set(self._dtypes)) > 1
        flat = [tensor.contiguous().view(-1) for tensor in tensors]
        if self._is_of_bytes:
            flat = [tensor.view(torch.uint8) for tensor in flat]
            # A view of bytes as numbers has to begin at a multiple of their size.
            flat = [torch.nn.functional.pad(tensor, (0, -tensor.shape[0] % 8)) for tensor in flat]
        packed = torch.cat(flat) if len(flat) > 1 else flat[0]
        self._lengths = [tensor.shape[0] for tensor in flat]
        self._buffer = self._run(torch.ops._c10d_functional.all_gather_into_tensor, packed, group.size, group.name)

    def wait(self) -> list[Tensor]:
        """The tensors of all ranks, each (ranks, ...).

        Raises:
            RuntimeError: the collective failed: a rank has died, made another call or not come within the group's time-out.
        """
        self._buffer = self._run(torch.ops._c10d_functional.wait_tensor, self._buffer)
        gathered = self._buffer.view(self._group.size, -1)
        results = []
        ends = itertools.accumulate(self._lengths)
        for end, length, shape, dtype in zip(ends, self._lengths, self._shapes, self._dtypes, strict=True):
            part = gathered[:, end - length : end]
            if self._is_of_bytes:
                part = part[:, : math.prod(shape) * dtype.itemsize].view(dtype)
            results.append(part.reshape(self._group.size, *shape))
        return results

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
            from ._agreement import calls_of_others

            raise RuntimeError(
                f"{self._what}: the all-gather failed on rank {self._group.rank} of {self._group.size}: a rank has died, has "
                f"made another call, or has not come within the time-out of the group.{calls_of_others(self._group)} PyTorch's "
                f"message: {error}"
            ) from error
        return result
