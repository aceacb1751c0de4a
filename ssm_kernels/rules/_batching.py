"""Batching rules for :func:`torch.vmap`: folds of the samples into an axis of one call, and one call for each sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["each_sample", "each_sample_in_place", "fold", "named", "sample_shape", "samples_first"]

Rule = Callable[..., tuple[Any, Any]]


def samples_first(tensor: Tensor, dim: int | None, samples: int) -> Tensor:
    """Moves the mapped axis to the front; expands a tensor that is not mapped over the samples."""
    return tensor.expand(samples, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def sample_shape(tensor: Tensor, dim: int | None) -> tuple[int, ...]:
    return tuple(size for axis, size in enumerate(tensor.shape) if dim is None or axis != dim % tensor.dim())


def select_sample(arguments: Any, in_dims: Any, sample: int | None) -> list[Any]:
    """The arguments of one sample; zeros of its shapes for the sample None. Lists of tensors have lists of axes."""

    def select(argument: Any, dim: Any) -> Any:
        if dim is None:
            return argument
        if not isinstance(argument, Tensor):
            return select_sample(argument, dim, sample)
        return argument.new_zeros(sample_shape(argument, dim)) if sample is None else argument.select(dim, sample)

    return [select(*each) for each in zip(arguments, in_dims, strict=False)]


def named(operator: Any, arguments: Sequence[Any], in_dims: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The positional arguments of a call and their mapped axes, by name; None for those that it leaves out."""
    names = [argument.name for argument in operator._schema.arguments if not argument.kwarg_only]
    absent = dict.fromkeys(names)
    return absent | dict(zip(names, arguments, strict=False)), absent | dict(zip(names, in_dims, strict=False))


def each_sample(name: str) -> Rule:
    """One call for each sample. Without samples a call with zeros tells the shapes."""
    operator = getattr(torch.ops.ssm_kernels, name).default

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any, **options: Any) -> tuple[Any, Any]:
        calls = [select_sample(arguments, in_dims, sample) for sample in range(info.batch_size)]
        calls = calls or [select_sample(arguments, in_dims, None)]
        results = zip(*(operator(*call, **options) for call in calls), strict=True)
        stacked = tuple(torch.stack(result)[: info.batch_size] for result in results)
        return stacked, (0,) * len(stacked)

    return rule


def each_sample_in_place(name: str, shape: Callable[[Mapping[str, tuple[int, ...]]], tuple[int, ...]] | None = None) -> Rule:
    """One call for each sample of an operator that writes to its arguments: the samples cannot be folded into copies of them.

    Each tensor with elements that it writes to must have samples. A result that is not among them has the shape and dtype of
    ``x``, or the shape that ``shape`` returns for the arguments' shapes, and the dtype of ``q``.
    """
    operator = getattr(torch.ops.ssm_kernels, name)
    schema = operator.default._schema
    public = name.removesuffix("_out")

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any, **options: Any) -> tuple[Any, Any]:
        values, dims = named(operator.default, arguments, in_dims)
        for argument in schema.arguments:
            value = values[argument.name] if argument.is_write else None
            # Tensors without elements stand for absent ones.
            if value is not None and value.numel() > 0 and dims[argument.name] is None:
                verb = "written to" if schema.name.endswith("_out") else "updated in place"
                raise RuntimeError(f"{public}: expected vmap over {argument.name}, which is {verb}, got in_dims None")
        samples = range(info.batch_size)
        in_dims = tuple(dims.values())
        results = [operator(*select_sample(arguments, in_dims, sample), **options) for sample in samples]
        if not schema.returns:
            return None, None
        if results:
            return torch.stack(results), 0
        shapes = {key: sample_shape(value, dims[key]) for key, value in values.items() if isinstance(value, Tensor)}
        like, result_shape = ("x", shapes["x"]) if shape is None else ("q", shape(shapes))
        return values[like].new_empty(0, *result_shape), 0

    return rule


def fold(
    name: str,
    channels: Mapping[str, int],
    parameters: Sequence[str] = (),
    results: Sequence[int] | None = None,
    with_groups: Sequence[str] = (),
) -> Rule:
    """One call for all samples, folded into its batch or, if a parameter is mapped or sequences share a row, its channels.

    Args:
        name: of an operator.
        channels: the axis of the channels (or heads) in each tensor with a batch, which is its first axis.
        parameters: tensors of channels without a batch.
        results: the axis of the channels in each result; the last one if absent.
        with_groups: tensors with an axis of groups of channels, which they may lack. Without a batch they are parameters.
    """
    operator = getattr(torch.ops.ssm_kernels, name).default
    one_each = each_sample(name)

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any, **options: Any) -> tuple[Any, Any]:
        values, dims = named(operator, arguments, in_dims)
        if dims.get("cu_seqlens") is not None:
            public = values.get("recurrence", name.removeprefix("_"))
            raise RuntimeError(f"{public}: expected cu_seqlens that vmap does not map, got in_dims {dims['cu_seqlens']}")
        constant = [each for each in with_groups if values[each].dim() - (dims[each] is not None) == 2]
        of_channels = [each for each in (*parameters, *constant) if values[each] is not None]
        is_mapped = any(dims[each] is not None for each in of_channels)
        into_channels = values.get("cu_seqlens") is not None or is_mapped
        row = next((each for each in ("seq_idx", "reset") if values.get(each) is not None), None)
        # All channels share a row's sequences.
        if info.batch_size == 0 or (into_channels and row is not None and dims[row] is not None):
            return one_each(info, tuple(dims.values()), *values.values(), **options)

        with_batch = [each for each in channels if each in values and each not in constant]
        axes = {each: channels[each] if into_channels else 0 for each in with_batch}
        if into_channels:
            axes |= dict.fromkeys(of_channels, 0)
        elif row is not None:
            axes[row] = 0

        def folded(tensor: Tensor, dim: int | None, axis: int, has_groups: bool) -> Tensor:
            tensor = samples_first(tensor, dim, info.batch_size)
            if into_channels and has_groups and tensor.dim() == 4:  # (batch, dstate, seqlen) for each sample: one group
                tensor = tensor.unsqueeze(2)
            return tensor.movedim(0, axis).flatten(axis, axis + 1)

        for each, axis in axes.items():
            value, dim = values[each], dims[each]
            if isinstance(value, (list, tuple)):
                values[each] = [folded(*item, axis, False) for item in zip(value, dim or [None] * len(value), strict=True)]
            elif value is not None:
                values[each] = folded(value, dim, axis, each in with_groups and each not in constant)
        outputs = operator(*values.values(), **options)

        def unfolded(output: Tensor, axis: int) -> tuple[Tensor, int | None]:
            if output.dim() == 1:  # a gradient that is not needed: no elements to map
                return output, None
            return output.unflatten(axis, (info.batch_size, output.shape[axis] // info.batch_size)), axis

        of_results = [output.dim() - 1 for output in outputs] if results is None else results
        found = [unfolded(output, axis if into_channels else 0) for output, axis in zip(outputs, of_results, strict=True)]
        return tuple(output for output, _ in found), tuple(axis for _, axis in found)

    return rule
