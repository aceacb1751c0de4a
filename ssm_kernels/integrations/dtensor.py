"""Sharding of the operators for DTensor (``torch.distributed.tensor``).

:func:`register` tells DTensor along which axes an operator may be cut without communication:

======================================================  ==================================================
selective_scan, ssd_chunk_scan, delta_rule_scan,        the batch; channels or heads
mlstm_scan, causal_conv1d, the recurrences, their
steps, and the scans' summaries
selective_state_update, causal_conv1d_update,           the batch, unless the call has slots or packed
delta_rule_step, mlstm_step, also with ``out`` and the  tokens; channels or heads
arguments of servers
the norms, and the mixers of Mamba and Mamba2           the batch
======================================================  ==================================================

Tensors with the axis are sharded along it and the others are replicated; gradients of the others are partial sums. Heads of
several groups are cut with their groups. An axis is cut only if the number of devices divides its size. DTensor chooses the cut
that moves the fewest bytes. A tensor that an operator writes into, such as a state, keeps its placement; if no cut fits it, the
call raises an error.

The layers ``Mamba`` and ``Mamba2`` cut the batch alone: the output of ``in_proj`` holds several tensors side by side. For
tensor parallelism :class:`ssm_kernels.distributed.TensorParallel` cuts their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ..rules import column
from ..rules._table import Axes, Call

__all__ = ["register"]

Tensors = list[tuple[str, Any]]
Sharding = tuple[list[Placement], list[Placement]]  # of the results, and of the tensors among the arguments

_SLOTS = ("state_batch_indices", "dst_state_batch_indices", "intermediate_state_indices", "cu_seqlens")

_ROWS_WITH_ENTRIES = ("intermediate_states_buffer", "intermediate_conv_window")


def register() -> None:
    """Registers the shardings of the operators with DTensor, whose interface for this is experimental.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.distributed.tensor import Shard, distribute_tensor
        >>> import ssm_kernels
        >>> ssm_kernels.integrations.dtensor.register()
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        >>> a, b = (distribute_tensor(torch.rand(2, 100, 8), mesh, [Shard(2)]) for _ in range(2))  # channels over ranks
        >>> h = ssm_kernels.linear_scan(a, b)
        >>> h.placements
        (Shard(dim=2),)
        >>> dist.destroy_process_group()
    """
    for name, axes in column("axes").items():
        operator = getattr(torch.ops.ssm_kernels, name).default
        register_sharding(operator)(partial(_shardings, operator._schema, axes))


def _axes_of(axes: Axes, name: str, tensor: Any) -> list[str]:
    """The names of a tensor's axes, without those that it does not have."""
    names = axes.get(name.removeprefix("grad_"), "").split()
    for optional in ("groups", "headdim"):
        if tensor is not None and optional in names and tensor.ndim == len(names) - 1:
            names.remove(optional)
    return names


def _shardings(schema: Any, axes_of_call: Axes | Callable[[Call], Axes], *args: Any, **kwargs: Any) -> list[Sharding]:
    call = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    axes = axes_of_call(call) if callable(axes_of_call) else axes_of_call
    # A list of tensors gives several, with its name.
    values = [(name, item) for name, value in call.items() for item in (value if isinstance(value, tuple) else (value,))]
    tensors = [(name, value) for name, value in values if hasattr(value, "placements")]
    found: list[Sharding] = [([Replicate()] * len(schema.returns), [Replicate()] * len(tensors))]
    found += [_cut(schema, axes, call, tensors, axis) for axis in _axes_to_cut(axes, call, tensors)]
    written = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}
    for place, (name, tensor) in enumerate(tensors):
        if name in written:
            found = [sharding for sharding in found if sharding[1][place] in tensor.placements]
            if not found:
                raise ValueError(
                    f"{schema.name}: expected {name} to be replicated or cut as the other tensors that the call writes into, "
                    f"along the channels or, without slots and packed tokens, the batch; got {tensor.placements}"
                )
    return found


def _axes_to_cut(axes: Axes, call: Call, tensors: Tensors) -> Iterator[str]:
    sizes: dict[str, set[int]] = {}
    for name, tensor in tensors:
        for axis, size in zip(_axes_of(axes, name, tensor), tensor.shape, strict=False):
            sizes.setdefault(axis, {1} if axis == "groups" else set()).add(size)
    devices, groups = tensors[0][1].mesh.size(), max(sizes.get("groups", {1}))
    batch = sizes.get("batch", {1})
    has_slots = any(call.get(name) is not None for name in _SLOTS)
    if any(call.get(name) is not None for name in _ROWS_WITH_ENTRIES):
        has_slots = has_slots or len(batch) > 1  # more entries than rows: a row's entry may be on another device
    if not has_slots and all(size % devices == 0 for size in batch):
        yield "batch"
    if all(size % devices == 0 for size in sizes.get("channels", {1})) and (groups == 1 or groups % devices == 0):
        yield "channels"


def _cut(schema: Any, axes: Axes, call: Call, tensors: Tensors, axis: str) -> Sharding:
    def placement(name: str, tensor: Any, otherwise: Placement) -> Placement:
        names = _axes_of(axes, name, tensor)
        has_groups = "groups" in names and tensor.shape[names.index("groups")] > 1
        wanted = "groups" if axis == "channels" and has_groups else axis
        return Shard(names.index(wanted)) if wanted in names else otherwise

    inputs = [placement(name, tensor, Replicate()) if tensor.shape[0] else Replicate() for name, tensor in tensors]
    needed = iter(call.get("needs_grad", ()))
    outputs: list[Placement] = []
    for result in schema.returns:
        if result.name.startswith("grad_"):
            of = result.name.removeprefix("grad_")
            # Gradients that are not needed, and the mean that RMSNorm does not have, have no elements.
            outputs.append(placement(of, call.get(of), Partial()) if next(needed) else Replicate())
        elif result.name == "mean" and not call["subtract_mean"]:
            outputs.append(Replicate())
        else:
            outputs.append(placement(result.name, None, Replicate()))
    return outputs, inputs
