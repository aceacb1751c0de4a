"""Whole tensors of a model whose parameters are distributed, for a file that one rank writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ..nn.initialization import is_distributed

__all__ = ["check_is_whole", "write_whole"]

_DIMENSIONS = {nn.Linear: 2, nn.Embedding: 2, nn.Conv1d: 3}


def check_is_whole(name: str, model: nn.Module) -> None:
    """Checks that no parameter is a part of one, as FSDP1 and DeepSpeed leave them: nothing says which part.

    Raises:
        RuntimeError: a parameter is a part, or on meta.
    """
    on_meta = next((path for path, parameter in model.named_parameters() if parameter.is_meta), None)
    if on_meta is not None:
        raise RuntimeError(f"{name}: expected parameters with memory, got {on_meta} on meta: call to_empty and init_weights")
    for path, module in model.named_modules():
        dimensions = next((number for kind, number in _DIMENSIONS.items() if isinstance(module, kind)), None)
        weight = module._parameters.get("weight")
        # FSDP1 with use_orig_params=False leaves tensors that are not parameters.
        is_removed = not module._parameters and isinstance(module.__dict__.get("weight"), Tensor)
        if dimensions is not None and (is_removed or (weight is not None and weight.dim() != dimensions)):
            raise RuntimeError(
                f"{name}: expected a whole {path}.weight, got a part, as under FSDP1 and DeepSpeed: gather its state on "
                "every rank by ssm_kernels.distributed.get_state_dict(wrapped_model, (), options=StateDictOptions("
                "full_state_dict=True, cpu_offload=True)), and save that on rank 0; a model of fully_shard needs no such step"
            )


def write_whole(
    name: str,
    state: Mapping[str, Any],
    same: Mapping[str, str],
    fault: str | None,
    write: Callable[[dict[str, Any]], None],
) -> None:
    """Calls ``write`` with whole tensors on the CPU, on the first rank of the mesh; without DTensors, with ``state``.

    With DTensors every rank calls this function. It returns when the file is written.

    Args:
        name: of the caller, for messages.
        state: a state dict.
        same: entries that are the same tensor as another one.
        fault: what is wrong with this rank's shards, and then a RuntimeError on every rank.
        write: writes the tensors.

    Raises:
        RuntimeError: a rank has a ``fault``; or, on the other ranks, ``write`` has raised an error.
    """
    meshes = list({id(value.device_mesh): value.device_mesh for value in state.values() if is_distributed(value)}.values())
    if _is_true_anywhere(fault is not None, meshes):
        raise RuntimeError(f"{name}: {fault or 'another rank has found a fault, which its error names'}")
    if not meshes:
        write(dict(state))
        return
    import torch.distributed as dist

    roots = [getattr(mesh, "_get_root_mesh", lambda mesh=mesh: mesh)() for mesh in meshes]
    is_writer = dist.get_rank() == min(int(root.mesh.min()) for root in roots)
    whole: dict[str, Any] = {}
    for key, value in state.items():
        if key in same and same[key] in state:
            continue
        # One parameter at a time: no other rank holds more than one whole.
        gathered = _gather(value)
        if is_writer:
            whole[key] = gathered.cpu() if isinstance(gathered, Tensor) else gathered
    error: Exception | None = None
    if is_writer:
        try:
            write({key: whole[same.get(key, key) if key not in whole else key] for key in state})
        except Exception as caught:
            error = caught
    has_failed = _is_true_anywhere(error is not None, meshes)
    if error is not None:
        raise error
    if has_failed:
        raise RuntimeError(f"{name}: the rank that writes the file has failed; its error says why")


def _is_true_anywhere(flag: bool, meshes: list[Any]) -> bool:
    for mesh in meshes:
        import torch.distributed as dist

        value = torch.tensor(int(flag), device=mesh.device_type)
        for dimension in range(mesh.ndim):
            dist.all_reduce(value, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
        flag = bool(value.item())
    return flag


def _gather(value: Any) -> Any:
    if not is_distributed(value):
        return value
    local, mesh = value.to_local(), value.device_mesh
    if local.device.type != mesh.device_type:
        # Shards that are offloaded to the CPU, whose tensors NCCL does not take.
        from torch.distributed.tensor import DTensor

        stride = value.stride()
        value = DTensor.from_local(
            local.to(mesh.device_type), mesh, value.placements, run_check=False, shape=value.shape, stride=stride
        )
    return value.full_tensor()
