"""Batching rules of the operators for :func:`torch.vmap`."""

from __future__ import annotations

import torch
from torch import Tensor


def _samples_first(tensor: Tensor, dim: int | None, samples: int) -> Tensor:
    """The mapped axis in front; a tensor that is not mapped is the same for every sample."""
    return tensor.expand(samples, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _sample_shape(tensor: Tensor, dim: int | None) -> tuple[int, ...]:
    return tuple(size for axis, size in enumerate(tensor.shape) if dim is None or axis != dim % tensor.dim())


def _selective_scan(info, in_dims, u, delta, A, B, C, D=None, z=None, delta_bias=None, initial_state=None, **options):
    """One call for all samples: folded into the batch or, where a parameter is mapped, into the channels as further groups."""
    samples = info.batch_size
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")
    dims = dict(zip(names, in_dims, strict=False))
    present = {
        name: tensor
        for name, tensor in zip(names, (u, delta, A, B, C, D, z, delta_bias, initial_state), strict=True)
        if tensor is not None
    }
    batch_dim_seqlen, dstate = _sample_shape(u, dims["u"]), _sample_shape(A, dims["A"])[-1]
    if samples == 0:
        return (u.new_empty(0, *batch_dim_seqlen), A.new_empty(0, *batch_dim_seqlen[:2], dstate)), (0, 0)
    parameters = {"A", "D", "delta_bias"}
    for name in ("B", "C"):
        if present[name].dim() - (dims[name] is not None) == 2:  # constant
            parameters.add(name)
    fold_into_batch = all(dims.get(name) is None for name in parameters)

    folded = {}
    for name, tensor in present.items():
        if name in parameters:
            folded[name] = tensor if fold_into_batch else _samples_first(tensor, dims[name], samples).flatten(0, 1)
            continue
        tensor = _samples_first(tensor, dims[name], samples)
        if fold_into_batch:
            folded[name] = tensor.flatten(0, 1)
        else:
            if name in ("B", "C") and tensor.dim() == 4:  # (batch, dstate, seqlen) for each sample: one group
                tensor = tensor.unsqueeze(2)
            folded[name] = tensor.transpose(0, 1).flatten(1, 2)
    outputs = torch.ops.ssm_kernels.selective_scan(*(folded.get(name) for name in names), **options)
    axis = 0 if fold_into_batch else 1
    return tuple(output.unflatten(axis, (samples, batch_dim_seqlen[axis])) for output in outputs), (axis, axis)


def _selective_state_update(info, in_dims, state, *tensors_and_flags, **options):
    """A call for each sample: the state is updated in place, so the samples' states cannot be folded into a copy."""
    if in_dims[0] is None:
        raise RuntimeError("selective_state_update: expected vmap over state, which is updated in place, got in_dims None")
    outputs = []
    for sample in range(info.batch_size):
        arguments = [
            argument if dim is None else argument.select(dim, sample)
            for argument, dim in zip(tensors_and_flags, in_dims[1:], strict=False)
        ]
        sample_state = state.select(in_dims[0], sample)
        outputs.append(torch.ops.ssm_kernels.selective_state_update(sample_state, *arguments, **options))
    if not outputs:
        x = tensors_and_flags[0]
        return x.new_empty(0, *_sample_shape(x, in_dims[1])), 0
    return torch.stack(outputs), 0


torch.library.register_vmap("ssm_kernels::selective_scan", _selective_scan)
torch.library.register_vmap("ssm_kernels::selective_state_update", _selective_state_update)
