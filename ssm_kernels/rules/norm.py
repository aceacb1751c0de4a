"""Rules of the norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._dtypes import wide_dtype
from ._batching import each_sample, named, sample_shape, samples_first
from ._decomposition import in_dtype
from ._table import Composed, Row

__all__ = ["ROWS", "decomposed_norm"]

AXES = dict.fromkeys(
    ("x", "z", "residual", "out", "normed", "new_residual", "rstd", "mean", "mean_square", "mean_product", ""), "batch"
)


def _fold(name: str) -> Callable[..., tuple[Any, Any]]:
    """The samples as more rows or, if a parameter is mapped, in the columns as more groups."""
    operator = getattr(torch.ops.ssm_kernels, name).default

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        values, dims = named(operator, arguments, in_dims)
        columns = sample_shape(values["x"], dims["x"])[-1]
        mapped = [each for each in ("weight", "bias") if dims[each] is not None]
        into_columns = info.batch_size > 0 and bool(mapped)
        for each in ("x", "z", "residual", *(("weight", "bias") if into_columns else ())):
            if values.get(each) is not None:
                tensor = samples_first(values[each], dims[each], info.batch_size)
                values[each] = tensor.movedim(0, -2).flatten(-2) if into_columns else tensor
        if into_columns and values["group_size"] is None:
            values["group_size"] = columns
        elif not into_columns:  # without samples any parameter will do
            values |= {each: values[each].new_empty(sample_shape(values[each], dims[each])) for each in mapped}
        results = operator(*values.values())

        def unfolded(result: Tensor) -> tuple[Tensor, int]:
            return (result.unflatten(-1, (info.batch_size, columns)), result.dim() - 1) if into_columns else (result, 0)

        if isinstance(results, Tensor):
            return unfolded(results)
        (normed, axis), (residual, _) = map(unfolded, results)
        return (normed, residual), (axis, axis)

    return rule


def decomposed_norm(
    name: str, x: Tensor, weight: Tensor | None, z: Tensor | None = None, bias: Tensor | None = None, **options: Any
) -> Tensor:
    return getattr(reference, name)(*in_dtype(wide_dtype(x.dtype), x, weight, z, bias), **options).to(x.dtype)


def _decomposed_add_norm(
    name: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual_in_fp32: bool = False,
) -> tuple[Tensor, Tensor]:
    normed, new_residual = getattr(reference, name)(*in_dtype(wide_dtype(x.dtype), x, residual, weight, bias), eps=eps)
    kept = wide_dtype(x.dtype) if residual_in_fp32 else x.dtype if residual is None else residual.dtype
    return normed.to(x.dtype), new_residual.to(kept)


def _flops(call: Any) -> int:
    return 0


def _row(name: str, internal: str, decomposition: Callable[..., Any], parts: tuple[str, ...]) -> Row:
    operators = (name, internal, f"{internal}_fwd", f"{internal}_bwd")
    return Row(
        batching={name: Composed(), internal: _fold(internal), f"{internal}_bwd": each_sample(f"{internal}_bwd")},
        flops=dict.fromkeys((*operators, *parts), _flops),
        axes=dict.fromkeys((*operators, *(part for part in parts if part != "_norm_gated_bwd_out")), AXES),
        decompositions={name: partial(decomposition, name)},
    )


_OF_GATED = ("_norm_gated_bwd_out", "_norm_gated_squares", "_norm_gated_products")

ROWS = {
    **{name: _row(name, "_norm_gated", decomposed_norm, _OF_GATED) for name in ("rms_norm_gated", "layer_norm_gated")},
    **{name: _row(name, "_add_norm", _decomposed_add_norm, ()) for name in ("add_rms_norm", "add_layer_norm")},
}
