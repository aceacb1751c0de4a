"""The ranks of a group, as plain values."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Group", "GroupLike", "check_dimensions"]

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
