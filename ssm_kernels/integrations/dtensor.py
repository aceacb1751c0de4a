"""Sharding of the operators for DTensor (``torch.distributed.tensor``).

:func:`register` tells DTensor along which axes an operator may be cut without communication:

======================================================  ==================================================
selective_scan, ssd_chunk_scan, causal_conv1d, the      the batch; channels or heads
recurrences, their steps, and the scans' summaries
selective_state_update, causal_conv1d_update, also      the batch, unless the call has slots or packed
with ``out`` and the arguments of servers               tokens; channels or heads
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

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

__all__ = ["register"]

Axes = Mapping[str, str]
Tensors = list[tuple[str, Any]]
Sharding = tuple[list[Placement], list[Placement]]  # of the results, and of the tensors among the arguments

# The axes of each tensor, by the name of the argument or the result; those of a gradient are those of its tensor.
_SCAN = {
    **dict.fromkeys(("u", "delta", "z", "out"), "batch channels seqlen"),
    **dict.fromkeys(("B", "C"), "batch groups dstate seqlen"),
    **dict.fromkeys(("D", "delta_bias"), "channels"),
    **dict.fromkeys(("initial_state", "last_state", "decay"), "batch channels dstate"),
    "A": "channels dstate",
    "chunk_states": "batch chunks channels dstate",
    "seq_idx": "batch seqlen",
}
_SSD = {
    **dict.fromkeys(("x", "z", "out"), "batch seqlen channels headdim"),
    **dict.fromkeys(("B", "C"), "batch seqlen groups dstate"),
    **dict.fromkeys(("A", "dt_bias"), "channels"),
    **dict.fromkeys(("initial_states", "final_states"), "batch channels headdim dstate"),
    "D": "channels headdim",
    "dt": "batch seqlen channels",
    "decay": "batch channels",
    "seq_idx": "batch seqlen",
}
_CONVOLUTION = {
    **dict.fromkeys(("x", "out"), "batch seqlen channels"),
    **dict.fromkeys(("initial_state", "final_state"), "batch channels width"),
    "weight": "channels width",
    "bias": "channels",
    "seq_idx": "batch seqlen",
}
_RECURRENCE = {
    **dict.fromkeys(("inputs", "h", "0", "1", "2", "3"), "batch seqlen channels"),
    **dict.fromkeys(("h0", "last_state", "decay"), "batch channels"),
    "reset": "batch seqlen",
}
# In these tensors the channels stand beside others: xz and projected hold x, z, B, C and dt side by side, so that a piece of
# their columns does not hold whole heads; the gated norm of Mamba2 averages over all channels of a group.
_MIXER = dict.fromkeys(
    (
        *("x", "delta", "B", "C", "z", "initial_state", "chunk_states", "out", "last_state", "xz", ""),  # of Mamba
        *("projected", "conv_state", "ssm_state", "seq_idx", "final_conv_state", "final_ssm_state"),  # of Mamba2
        *("y", "rstd", "norm_mean_product"),
    ),
    "batch",
)
_SLOTS = ("state_batch_indices", "dst_state_batch_indices", "intermediate_state_indices", "cu_seqlens")

_ROWS_WITH_ENTRIES = ("intermediate_states_buffer", "intermediate_conv_window")


def _step(call: Mapping[str, Any]) -> Axes:
    """The axes of selective_state_update: the state says whether there are heads, x then whether there are several tokens."""
    channels = "channels headdim" if call["state"].ndim == 4 else "channels"
    rows = _rows(call, call["state"].ndim - 1)
    groups = "groups" if call["B"].ndim == len(rows.split()) + 2 else ""
    return {
        **dict.fromkeys(("x", "dt", "z", "out", ""), f"{rows} {channels}"),
        **dict.fromkeys(("B", "C"), f"{rows} {groups} dstate"),
        **dict.fromkeys(("D", "dt_bias"), channels),
        "A": f"{channels} dstate",
        "state": f"batch {channels} dstate",
        "intermediate_states_buffer": f"batch tokens {channels} dstate",
    }


def _convolution_step(call: Mapping[str, Any]) -> Axes:
    return _CONVOLUTION | {
        **dict.fromkeys(("x", "out", ""), f"{_rows(call, 2)} channels"),
        "conv_state": "batch channels width",
        "num_accepted_tokens": "batch",
        "intermediate_conv_window": "batch tokens channels width",
    }


def _rows(call: Mapping[str, Any], rank: int) -> str:
    """The axes of x before its channels, given its rank with one token a row."""
    if call.get("cu_seqlens") is not None:
        return "tokens"
    return "batch" if call["x"].ndim == rank else "batch tokens"


_NORM = dict.fromkeys(
    ("x", "z", "residual", "out", "normed", "new_residual", "rstd", "mean", "mean_square", "mean_product", ""), "batch"
)

_SCAN_SUMMARY = ("selective_scan_summary", "_selective_scan_summary_fwd", "_selective_scan_summary_bwd")
_SSD_SUMMARY = ("ssd_chunk_scan_summary", *(f"_ssd_chunk_scan_summary{kind}" for kind in ("", "_fwd", "_bwd")))
_RECURRENCE_SUMMARY = tuple(f"_linear_recurrence_summary{kind}" for kind in ("", "_fwd", "_bwd"))

_OPERATORS: dict[str, Axes | Callable[[Mapping[str, Any]], Axes]] = {
    **dict.fromkeys(("selective_scan", "_selective_scan_fwd", "_selective_scan_bwd", "_selective_scan_bwd_last"), _SCAN),
    **dict.fromkeys(("ssd_chunk_scan", "_ssd_chunk_scan", "_ssd_chunk_scan_fwd", "_ssd_chunk_scan_bwd"), _SSD),
    **dict.fromkeys(
        ("_ssd_chunk_scan_states", "_ssd_chunk_scan_states_fwd", "_ssd_chunk_scan_states_bwd"),
        _SSD | {"states": "batch positions channels headdim dstate"},
    ),
    **dict.fromkeys(_SCAN_SUMMARY, _SCAN),
    **dict.fromkeys(_SSD_SUMMARY, _SSD),
    **dict.fromkeys(_RECURRENCE_SUMMARY, _RECURRENCE),
    **dict.fromkeys(("causal_conv1d", "_causal_conv1d", "_causal_conv1d_fwd", "_causal_conv1d_bwd"), _CONVOLUTION),
    **dict.fromkeys(("_mamba_conv", "_mamba_mixer", "_mamba_mixer_fwd", "_mamba_mixer_bwd"), _MIXER),
    **dict.fromkeys(("_mamba2_mixer", "_mamba2_mixer_fwd", "_mamba2_mixer_bwd"), _MIXER),
    **dict.fromkeys(tuple(f"_mamba2_mixer_projected{kind}" for kind in ("", "_fwd", "_bwd")), _MIXER),
    **dict.fromkeys(("rms_norm_gated", "layer_norm_gated", "_norm_gated", "_norm_gated_fwd", "_norm_gated_bwd"), _NORM),
    **dict.fromkeys(("_norm_gated_squares", "_norm_gated_products"), _NORM),
    **dict.fromkeys(("add_rms_norm", "add_layer_norm", "_add_norm", "_add_norm_fwd", "_add_norm_bwd"), _NORM),
    **dict.fromkeys(("_linear_recurrence", "_linear_recurrence_fwd", "_linear_recurrence_bwd"), _RECURRENCE),
    **dict.fromkeys(("selective_state_update", "selective_state_update_out"), _step),
    **dict.fromkeys(("causal_conv1d_update", "causal_conv1d_update_out"), _convolution_step),
}


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
    for name, axes in _OPERATORS.items():
        operator = getattr(torch.ops.ssm_kernels, name).default
        register_sharding(operator)(partial(_shardings, operator._schema, axes))


def _axes_of(axes: Axes, name: str, tensor: Any) -> list[str]:
    """The names of a tensor's axes, without those that it does not have."""
    names = axes.get(name.removeprefix("grad_"), "").split()
    for optional in ("groups", "headdim"):
        if tensor is not None and optional in names and tensor.ndim == len(names) - 1:
            names.remove(optional)
    return names


def _shardings(
    schema: Any, axes_of_call: Axes | Callable[[Mapping[str, Any]], Axes], *args: Any, **kwargs: Any
) -> list[Sharding]:
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


def _axes_to_cut(axes: Axes, call: Mapping[str, Any], tensors: Tensors) -> Iterator[str]:
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


def _cut(schema: Any, axes: Axes, call: Mapping[str, Any], tensors: Tensors, axis: str) -> Sharding:
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
