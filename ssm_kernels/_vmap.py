"""Batching rules of the operators for :func:`torch.vmap`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._mixers import MAMBA2_ARGUMENTS, mamba2_arguments, mamba2_mixer, mamba_mixer, project
from ._recurrences import recurrences


def _samples_first(tensor: Tensor, dim: int | None, samples: int) -> Tensor:
    """Moves the mapped axis to the front; expands a tensor that is not mapped over the samples."""
    return tensor.expand(samples, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _sample_shape(tensor: Tensor, dim: int | None) -> tuple[int, ...]:
    return tuple(size for axis, size in enumerate(tensor.shape) if dim is None or axis != dim % tensor.dim())


def _select_sample(arguments: tuple[Any, ...], in_dims: tuple[Any, ...], sample: int) -> list[Any]:
    return [
        argument.select(dim, sample) if isinstance(argument, Tensor) and dim is not None else argument
        for argument, dim in zip(arguments, in_dims, strict=False)
    ]


def _selective_scan(
    info: Any,
    in_dims: tuple[Any, ...],
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """One call for all samples, folded into the batch or, if the sequences are packed into one row or a parameter is mapped,
    into the channels as more groups."""
    operator, samples = torch.ops.ssm_kernels.selective_scan, info.batch_size
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")
    dims = dict(zip((*names, "seq_idx", "cu_seqlens"), in_dims, strict=False))
    if dims.get("cu_seqlens") is not None:
        raise RuntimeError(f"selective_scan: expected cu_seqlens that vmap does not map, got in_dims {dims['cu_seqlens']}")
    present = {
        name: tensor
        for name, tensor in zip(names, (u, delta, A, B, C, D, z, delta_bias, initial_state), strict=True)
        if tensor is not None
    }
    batch_dim_seqlen, dstate = _sample_shape(u, dims["u"]), _sample_shape(A, dims["A"])[-1]
    states = batch_dim_seqlen[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if samples == 0:
        return (u.new_empty(0, *batch_dim_seqlen), A.new_empty(0, states, batch_dim_seqlen[1], dstate)), (0, 0)
    parameters = {"A", "D", "delta_bias"}
    for name in ("B", "C"):
        if present[name].dim() - (dims[name] is not None) == 2:  # constant
            parameters.add(name)
    fold_into_batch = cu_seqlens is None and all(dims.get(name) is None for name in parameters)
    if not fold_into_batch and dims.get("seq_idx") is not None:  # which channels share: a call for each sample
        arguments = (u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx, cu_seqlens)
        padded = (*in_dims, *(None,) * (len(arguments) - len(in_dims)))
        results = [operator(*_select_sample(arguments, padded, sample), **options) for sample in range(samples)]
        return tuple(map(torch.stack, zip(*results, strict=True))), (0, 0)

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
    if seq_idx is not None and fold_into_batch:
        seq_idx = _samples_first(seq_idx, dims.get("seq_idx"), samples).flatten(0, 1)
    outputs = operator(*(folded.get(name) for name in names), seq_idx, cu_seqlens, **options)
    axis = 0 if fold_into_batch else 1
    return tuple(output.unflatten(axis, (samples, batch_dim_seqlen[axis])) for output in outputs), (axis, axis)


def _selective_scan_summary(
    info: Any,
    in_dims: tuple[Any, ...],
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    delta_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """One call for all samples, folded as those of the scan."""
    samples = info.batch_size
    dims = dict(zip(("u", "delta", "A", "B", "delta_bias"), in_dims, strict=False))
    is_constant = B.dim() - (dims["B"] is not None) == 2
    batch, dim, _ = _sample_shape(u, dims["u"])
    if samples == 0:
        empty = A.new_empty(0, batch, dim, _sample_shape(A, dims["A"])[-1])
        return (empty, torch.empty_like(empty)), (0, 0)
    parameters = {"A": A, "delta_bias": delta_bias} | ({"B": B} if is_constant else {})
    sequences = {"u": u, "delta": delta} | ({} if is_constant else {"B": B})
    into_batch = all(dims.get(name) is None for name in parameters)
    folded = {}
    for name, parameter in parameters.items():
        if into_batch or parameter is None:
            folded[name] = parameter
        else:
            folded[name] = _samples_first(parameter, dims[name], samples).flatten(0, 1)
    for name, sequence in sequences.items():
        tensor = _samples_first(sequence, dims[name], samples)
        if into_batch:
            folded[name] = tensor.flatten(0, 1)
        else:
            if name == "B" and tensor.dim() == 4:  # (batch, dstate, seqlen) for each sample: one group
                tensor = tensor.unsqueeze(2)
            folded[name] = tensor.transpose(0, 1).flatten(1, 2)
    outputs = torch.ops.ssm_kernels.selective_scan_summary(
        folded["u"], folded["delta"], folded["A"], folded["B"], folded["delta_bias"], **options
    )
    axis = 0 if into_batch else 1
    return tuple(output.unflatten(axis, (samples, (batch, dim)[axis])) for output in outputs), (axis, axis)


def _selective_state_update(
    info: Any, in_dims: tuple[Any, ...], state: Tensor, *tensors_and_flags: Any, **options: Any
) -> tuple[Any, Any]:
    """One call per sample: the state is updated in place, so the samples' states cannot be folded into a copy."""
    if in_dims[0] is None:
        raise RuntimeError("selective_state_update: expected vmap over state, which is updated in place, got in_dims None")
    outputs = []
    for sample in range(info.batch_size):
        arguments = _select_sample(tensors_and_flags, in_dims[1:], sample)
        sample_state = state.select(in_dims[0], sample)
        outputs.append(torch.ops.ssm_kernels.selective_state_update(sample_state, *arguments, **options))
    if not outputs:
        x = tensors_and_flags[0]
        return x.new_empty(0, *_sample_shape(x, in_dims[1])), 0
    return torch.stack(outputs), 0


def _selective_state_update_out(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    return _call_each_sample(torch.ops.ssm_kernels.selective_state_update_out, info, in_dims, arguments)


def _call_each_sample(operator: Any, info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[None, None]:
    """One call per sample of an operator that returns nothing. The tensors that it writes to must have samples."""
    name = operator.__name__.removesuffix("_out")
    dims = (*in_dims, *(None,) * (len(arguments) - len(in_dims)))
    for argument, value, dim in zip(operator.default._schema.arguments, arguments, dims, strict=False):
        if argument.is_write and value is not None and dim is None:
            raise RuntimeError(f"{name}: expected vmap over {argument.name}, which is written to, got in_dims None")
    for sample in range(info.batch_size):
        operator(*_select_sample(arguments, dims, sample))
    return None, None


def _backward_of_each_sample(operator: Any) -> Callable[..., tuple[Any, Any]]:
    """A rule of one call per sample. Without samples a call with zeros tells the shapes."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        samples = range(info.batch_size)
        calls = [_select_sample(arguments, in_dims, sample) for sample in samples] or [
            [
                argument.new_zeros(_sample_shape(argument, dim))
                if isinstance(argument, Tensor) and dim is not None
                else argument
                for argument, dim in zip(arguments, in_dims, strict=True)
            ]
        ]
        gradients = [torch.stack(column)[: len(samples)] for column in zip(*(operator(*call) for call in calls), strict=True)]
        return tuple(gradients), (0,) * len(gradients)

    return rule


class _RecurrenceFold:
    """Folds samples into the batch or, if the batch is one row of packed sequences, into the channels."""

    def __init__(
        self,
        info: Any,
        inputs: list[Tensor],
        dims: list[int | None],
        cu_seqlens: Tensor | None,
        cu_seqlens_dim: int | None,
        recurrence: str,
    ) -> None:
        if cu_seqlens_dim is not None:
            raise RuntimeError(f"{recurrence}: expected cu_seqlens that vmap does not map, got in_dims {cu_seqlens_dim}")
        self.samples = info.batch_size
        self.axis = 0 if cu_seqlens is None else -1
        self.size = _sample_shape(inputs[0], dims[0])[self.axis]

    def fold(self, tensor: Tensor | None, dim: int | None) -> Tensor | None:
        """Folds a sequence or a state; one that is not mapped is repeated for every sample."""
        if tensor is None:
            return None
        tensor = _samples_first(tensor, dim, self.samples)
        return tensor.flatten(0, 1) if self.axis == 0 else tensor.movedim(0, -2).flatten(-2)

    def fold_all(self, tensors: list[Tensor], dims: list[int | None]) -> list[Tensor | None]:
        return [self.fold(tensor, dim) for tensor, dim in zip(tensors, dims, strict=True)]

    def unfold(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """The tensor and its mapped axis; a gradient that is not needed has no elements to map."""
        if tensor.dim() == 1:
            return tensor, None
        tensor = tensor.unflatten(self.axis, (self.samples, self.size))
        return tensor, self.axis if self.axis == 0 else tensor.dim() - 2


def _linear_recurrence(
    info: Any,
    in_dims: tuple[Any, ...],
    inputs: list[Tensor],
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    reset: Tensor | None,
    recurrence: str,
    *options: Any,
) -> tuple[Any, Any]:
    input_dims, h0_dim, cu_seqlens_dim, reset_dim, *_ = in_dims
    samples = _RecurrenceFold(info, inputs, input_dims, cu_seqlens, cu_seqlens_dim, recurrence)
    results = torch.ops.ssm_kernels._linear_recurrence(
        samples.fold_all(inputs, input_dims),
        samples.fold(h0, h0_dim),
        cu_seqlens,
        samples.fold(reset, reset_dim),
        recurrence,
        *options,
    )
    (h, h_dim), (last_state, last_state_dim) = map(samples.unfold, results)
    return (h, last_state), (h_dim, last_state_dim)


def _linear_recurrence_summary(
    info: Any,
    in_dims: tuple[Any, ...],
    inputs: list[Tensor],
    cu_seqlens: Tensor | None,
    reset: Tensor | None,
    recurrence: str,
    *options: Any,
) -> tuple[Any, Any]:
    input_dims, cu_seqlens_dim, reset_dim, *_ = in_dims
    samples = _RecurrenceFold(info, inputs, input_dims, cu_seqlens, cu_seqlens_dim, recurrence)
    results = torch.ops.ssm_kernels._linear_recurrence_summary(
        samples.fold_all(inputs, input_dims), cu_seqlens, samples.fold(reset, reset_dim), recurrence, *options
    )
    (last_state, last_state_dim), (decay, decay_dim) = map(samples.unfold, results)
    return (last_state, decay), (last_state_dim, decay_dim)


def _linear_recurrence_bwd(
    info: Any,
    in_dims: tuple[Any, ...],
    grad_h: Tensor | None,
    grad_last_state: Tensor | None,
    inputs: list[Tensor],
    h: Tensor,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    reset: Tensor | None,
    recurrence: str,
    *options: Any,
) -> tuple[Any, Any]:
    grad_h_dim, grad_last_state_dim, input_dims, h_dim, h0_dim, cu_seqlens_dim, reset_dim, *_ = in_dims
    samples = _RecurrenceFold(info, inputs, input_dims, cu_seqlens, cu_seqlens_dim, recurrence)
    gradients = torch.ops.ssm_kernels._linear_recurrence_bwd(
        samples.fold(grad_h, grad_h_dim),
        samples.fold(grad_last_state, grad_last_state_dim),
        samples.fold_all(inputs, input_dims),
        samples.fold(h, h_dim),
        samples.fold(h0, h0_dim),
        cu_seqlens,
        samples.fold(reset, reset_dim),
        recurrence,
        *options,
    )
    gradients, dims = zip(*map(samples.unfold, gradients), strict=True)
    return gradients, dims


def _linear_recurrence_summary_bwd(
    info: Any,
    in_dims: tuple[Any, ...],
    grad_last_state: Tensor | None,
    grad_decay: Tensor | None,
    inputs: list[Tensor],
    cu_seqlens: Tensor | None,
    reset: Tensor | None,
    recurrence: str,
    *options: Any,
) -> tuple[Any, Any]:
    grad_last_state_dim, grad_decay_dim, input_dims, cu_seqlens_dim, reset_dim, *_ = in_dims
    samples = _RecurrenceFold(info, inputs, input_dims, cu_seqlens, cu_seqlens_dim, recurrence)
    gradients = torch.ops.ssm_kernels._linear_recurrence_summary_bwd(
        samples.fold(grad_last_state, grad_last_state_dim),
        samples.fold(grad_decay, grad_decay_dim),
        samples.fold_all(inputs, input_dims),
        cu_seqlens,
        samples.fold(reset, reset_dim),
        recurrence,
        *options,
    )
    gradients, dims = zip(*map(samples.unfold, gradients), strict=True)
    return gradients, dims


def _ssd_chunk_scan(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """One call for all samples, folded into the batch or, if it is packed or a parameter is mapped, into the heads."""
    operator, samples = torch.ops.ssm_kernels._ssd_chunk_scan, info.batch_size
    names = [argument.name for argument in operator.default._schema.arguments]
    values, dims = dict(zip(names, arguments, strict=True)), dict(zip(names, in_dims, strict=True))
    if dims["cu_seqlens"] is not None:
        raise RuntimeError(f"ssd_chunk_scan: expected cu_seqlens that vmap does not map, got in_dims {dims['cu_seqlens']}")
    batch, seqlen, heads, headdim = _sample_shape(values["x"], dims["x"])
    parameters = ("A", "D", "dt_bias")
    into_heads = values["cu_seqlens"] is not None or any(dims[name] is not None for name in parameters)
    if samples == 0:
        states = batch if values["cu_seqlens"] is None else len(values["cu_seqlens"]) - 1
        out = values["x"].new_empty(0, batch, seqlen, heads, headdim)
        return (out, values["A"].new_empty(0, states, heads, headdim, _sample_shape(values["B"], dims["B"])[-1])), (0, 0)
    if into_heads and dims["seq_idx"] is not None:  # which heads share: a call for each sample
        results = [operator(*_select_sample(arguments, in_dims, sample)) for sample in range(samples)]
        return tuple(map(torch.stack, zip(*results, strict=True))), (0, 0)

    axes = dict.fromkeys(("x", "dt", "B", "C", "z", "initial_states", "seq_idx"), 0)  # that the samples are folded into
    if into_heads:  # groups of B and C are some heads as well
        axes = dict.fromkeys(("x", "dt", "B", "C", "z"), 2) | {"initial_states": 1} | dict.fromkeys(parameters, 0)
    folded = values | {
        name: _samples_first(values[name], dims[name], samples).movedim(0, axis).flatten(axis, axis + 1)
        for name, axis in axes.items()
        if values[name] is not None
    }
    out, final_states = operator(*folded.values())
    if into_heads:
        return (out.unflatten(2, (samples, heads)), final_states.unflatten(1, (samples, heads))), (2, 1)
    return (out.unflatten(0, (samples, batch)), final_states.unflatten(0, (samples, batch))), (0, 0)


def _ssd_chunk_scan_summary(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """One call for all samples, folded into the batch or, if a parameter is mapped, into the heads."""
    operator, samples = torch.ops.ssm_kernels._ssd_chunk_scan_summary, info.batch_size
    names = [argument.name for argument in operator.default._schema.arguments]
    values, dims = dict(zip(names, arguments, strict=True)), dict(zip(names, in_dims, strict=True))
    batch, _, heads, headdim = _sample_shape(values["x"], dims["x"])
    into_heads = any(dims[name] is not None for name in ("A", "dt_bias"))
    if samples == 0:
        A, dstate = values["A"], _sample_shape(values["B"], dims["B"])[-1]
        return (A.new_empty(0, batch, heads, headdim, dstate), A.new_empty(0, batch, heads)), (0, 0)
    if into_heads and dims["seq_idx"] is not None:  # which heads share: a call for each sample
        results = [operator(*_select_sample(arguments, in_dims, sample)) for sample in range(samples)]
        return tuple(map(torch.stack, zip(*results, strict=True))), (0, 0)

    axes = dict.fromkeys(("x", "dt", "B", "seq_idx"), 0)  # that the samples are folded into
    if into_heads:  # groups of B are some heads as well
        axes = dict.fromkeys(("x", "dt", "B"), 2) | dict.fromkeys(("A", "dt_bias"), 0)
    folded = values | {
        name: _samples_first(values[name], dims[name], samples).movedim(0, axis).flatten(axis, axis + 1)
        for name, axis in axes.items()
        if values[name] is not None
    }
    axis, size = (1, heads) if into_heads else (0, batch)
    return tuple(result.unflatten(axis, (samples, size)) for result in operator(*folded.values())), (axis, axis)


def _causal_conv1d(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """One call for all samples, folded into the batch or, if it is packed or a parameter is mapped, into the channels."""
    operator, samples = torch.ops.ssm_kernels._causal_conv1d, info.batch_size
    names = [argument.name for argument in operator.default._schema.arguments]
    values, dims = dict(zip(names, arguments, strict=True)), dict(zip(names, in_dims, strict=True))
    if dims["cu_seqlens"] is not None:
        raise RuntimeError(f"causal_conv1d: expected cu_seqlens that vmap does not map, got in_dims {dims['cu_seqlens']}")
    batch, seqlen, channels = _sample_shape(values["x"], dims["x"])
    into_channels = values["cu_seqlens"] is not None or dims["weight"] is not None or dims["bias"] is not None
    if samples == 0:
        states = batch if values["cu_seqlens"] is None else len(values["cu_seqlens"]) - 1
        past = _sample_shape(values["weight"], dims["weight"])[-1] - 1
        x = values["x"]
        return (x.new_empty(0, batch, seqlen, channels), x.new_empty(0, states, channels, past)), (0, 0)
    if into_channels and dims["seq_idx"] is not None:  # which channels share: a call for each sample
        results = [operator(*_select_sample(arguments, in_dims, sample)) for sample in range(samples)]
        return tuple(map(torch.stack, zip(*results, strict=True))), (0, 0)

    axes = dict.fromkeys(("x", "seq_idx", "initial_state"), 0)  # that the samples are folded into
    if into_channels:
        axes = {"x": 2, "weight": 0, "bias": 0, "initial_state": 1}
    folded = values | {
        name: _samples_first(values[name], dims[name], samples).movedim(0, axis).flatten(axis, axis + 1)
        for name, axis in axes.items()
        if values[name] is not None
    }
    out, final_state = operator(*folded.values())
    if into_channels:
        return (out.unflatten(2, (samples, channels)), final_state.unflatten(1, (samples, channels))), (2, 1)
    return (out.unflatten(0, (samples, batch)), final_state.unflatten(0, (samples, batch))), (0, 0)


def _causal_conv1d_update(
    info: Any, in_dims: tuple[Any, ...], x: Tensor, conv_state: Tensor, *others: Any, **options: Any
) -> tuple[Any, Any]:
    """One call per sample: the state is updated in place, so the samples' states cannot be folded into a copy."""
    if in_dims[1] is None:
        raise RuntimeError("causal_conv1d_update: expected vmap over conv_state, which is updated in place, got in_dims None")
    dims = (*in_dims, *(None,) * (2 + len(others) - len(in_dims)))
    outputs = []
    for sample in range(info.batch_size):
        arguments = _select_sample((x, conv_state, *others), dims, sample)
        outputs.append(torch.ops.ssm_kernels.causal_conv1d_update(*arguments, **options))
    return (torch.stack(outputs) if outputs else x.new_empty(0, *_sample_shape(x, in_dims[0]))), 0


def _causal_conv1d_update_out(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    return _call_each_sample(torch.ops.ssm_kernels.causal_conv1d_update_out, info, in_dims, arguments)


class _NormFold:
    """Folds samples into the rows or, if a parameter is mapped, into the columns as more groups."""

    def __init__(self, info: Any, x: Tensor, x_dim: int | None, parameter_dims: tuple[int | None, ...]) -> None:
        self.samples = info.batch_size
        self.shape = _sample_shape(x, x_dim)
        self.into_columns = self.samples > 0 and any(dim is not None for dim in parameter_dims)

    def fold(self, tensor: Tensor | None, dim: int | None) -> Tensor | None:
        """Folds rows or a parameter; one that is not mapped is repeated for every sample."""
        if tensor is None:
            return None
        tensor = _samples_first(tensor, dim, self.samples)
        return tensor.movedim(0, -2).flatten(-2) if self.into_columns else tensor

    def fold_parameter(self, tensor: Tensor | None, dim: int | None) -> Tensor | None:
        if self.into_columns:
            return self.fold(tensor, dim)
        # Mapped although not into the columns: there are no samples.
        return tensor if tensor is None or dim is None else tensor.new_empty(_sample_shape(tensor, dim))

    def group_size(self, group_size: int | None) -> int | None:
        return self.shape[-1] if self.into_columns and group_size is None else group_size

    def unfold(self, tensor: Tensor) -> tuple[Tensor, int]:
        if not self.into_columns:
            return tensor, 0
        return tensor.unflatten(-1, (self.samples, self.shape[-1])), tensor.dim() - 1


def _norm_gated(
    info: Any,
    in_dims: tuple[Any, ...],
    x: Tensor,
    weight: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    eps: float,
    group_size: int | None,
    *options: Any,
) -> tuple[Any, Any]:
    x_dim, weight_dim, z_dim, bias_dim, *_ = in_dims
    samples = _NormFold(info, x, x_dim, (weight_dim, bias_dim))
    out = torch.ops.ssm_kernels._norm_gated(
        samples.fold(x, x_dim),
        samples.fold_parameter(weight, weight_dim),
        samples.fold(z, z_dim),
        samples.fold_parameter(bias, bias_dim),
        eps,
        samples.group_size(group_size),
        *options,
    )
    return samples.unfold(out)


def _add_norm(
    info: Any,
    in_dims: tuple[Any, ...],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    group_size: int | None,
    *options: Any,
) -> tuple[Any, Any]:
    x_dim, residual_dim, weight_dim, bias_dim, *_ = in_dims
    samples = _NormFold(info, x, x_dim, (weight_dim, bias_dim))
    results = torch.ops.ssm_kernels._add_norm(
        samples.fold(x, x_dim),
        samples.fold(residual, residual_dim),
        samples.fold_parameter(weight, weight_dim),
        samples.fold_parameter(bias, bias_dim),
        eps,
        samples.group_size(group_size),
        *options,
    )
    (normed, dim), (new_residual, _) = map(samples.unfold, results)
    return (normed, new_residual), (dim, dim)


def _mamba_mixer(*arguments: Any) -> tuple[Any, ...]:
    return mamba_mixer(torch.ops.ssm_kernels.selective_scan, *arguments)


def _mamba2_mixer(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    operators = torch.ops.ssm_kernels
    parts = operators.causal_conv1d, operators.ssd_chunk_scan, operators.rms_norm_gated
    return mamba2_mixer(*parts, *mamba2_arguments(arguments))


def _mamba2_mixer_projected(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, *states = _mamba2_mixer(*arguments)
    return project(out, *arguments[MAMBA2_ARGUMENTS:]), states[0], states[1]


_library = torch.library.Library("ssm_kernels", "IMPL")
# Calls of operators that have the rule.
_NORMS = ("rms_norm_gated", "layer_norm_gated", "add_rms_norm", "add_layer_norm")
_RECURRENCES = tuple(name for row in recurrences.values() for name in (row.scan, row.step, row.summary))
for _name in (*_RECURRENCES, "ssd_chunk_scan_summary", "ssd_chunk_scan", "causal_conv1d", "_mamba_conv", *_NORMS):
    _library.impl(_name, getattr(torch.ops.ssm_kernels, _name).default.decompose, "FuncTorchBatchedDecomposition")

for _name in (
    "_add_norm_bwd",
    "_causal_conv1d_bwd",
    "_norm_gated_bwd",
    "_selective_scan_bwd",
    "_selective_scan_summary_bwd",
    "_ssd_chunk_scan_bwd",
    "_ssd_chunk_scan_states_bwd",
    "_ssd_chunk_scan_summary_bwd",
    "_mamba2_mixer_bwd",
    "_mamba2_mixer_projected_bwd",
    "_mamba_mixer_bwd",
):
    torch.library.register_vmap(
        f"ssm_kernels::{_name}", _backward_of_each_sample(getattr(torch.ops.ssm_kernels, _name).default)
    )

torch.library.register_vmap("ssm_kernels::_add_norm", _add_norm)
torch.library.register_vmap("ssm_kernels::_causal_conv1d", _causal_conv1d)
torch.library.register_vmap("ssm_kernels::causal_conv1d_update", _causal_conv1d_update)
torch.library.register_vmap("ssm_kernels::causal_conv1d_update_out", _causal_conv1d_update_out)
torch.library.register_vmap("ssm_kernels::_linear_recurrence", _linear_recurrence)
torch.library.register_vmap("ssm_kernels::_linear_recurrence_bwd", _linear_recurrence_bwd)
torch.library.register_vmap("ssm_kernels::_linear_recurrence_summary", _linear_recurrence_summary)
torch.library.register_vmap("ssm_kernels::_linear_recurrence_summary_bwd", _linear_recurrence_summary_bwd)
torch.library.register_vmap("ssm_kernels::_norm_gated", _norm_gated)
torch.library.register_vmap("ssm_kernels::_ssd_chunk_scan", _ssd_chunk_scan)
torch.library.register_vmap("ssm_kernels::_ssd_chunk_scan_summary", _ssd_chunk_scan_summary)
torch.library.register_vmap("ssm_kernels::selective_scan", _selective_scan)
torch.library.register_vmap("ssm_kernels::selective_scan_summary", _selective_scan_summary)
torch.library.register_vmap("ssm_kernels::selective_state_update", _selective_state_update)
torch.library.register_vmap("ssm_kernels::selective_state_update_out", _selective_state_update_out)
_library.impl("_mamba2_mixer", _mamba2_mixer, "FuncTorchBatchedDecomposition")
_library.impl("_mamba2_mixer_projected", _mamba2_mixer_projected, "FuncTorchBatchedDecomposition")
_library.impl("_mamba_mixer", _mamba_mixer, "FuncTorchBatchedDecomposition")
