"""Inputs of the norms, and their comparison with the reference."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import pytest
import torch
from helpers import Draws
from operator_spec import Cotangents, OperatorSpec, Shapes, rows
from torch import Tensor

GATED = ("rms_norm_gated", "layer_norm_gated")
ADD = ("add_rms_norm", "add_layer_norm")

# Sizes that reach every mapping of the CUDA kernels: several groups of a row to a warp, a group to a warp, to several and to a
# cluster of blocks, one of more chunks than a cluster has blocks; rows that start at multiples of 16 bytes and between them.
SIZES: dict[str, dict[str, Any]] = {
    "few_columns": {"rows": (5,), "columns": 5},
    "odd": {"rows": (3, 7), "columns": 37},
    "vectors": {"rows": (2, 33), "columns": 64},
    "warp": {"rows": (19,), "columns": 512},
    "warps": {"rows": (2, 5), "columns": 1536},
    "odd_warps": {"rows": (9,), "columns": 1537},
    "groups": {"rows": (2, 9), "columns": 96, "group_size": 8},
    "odd_groups": {"rows": (11,), "columns": 35, "group_size": 7},
    "groups_of_warps": {"rows": (7,), "columns": 2400, "group_size": 800},
    "cluster": {"rows": (3,), "columns": 12288},
    "chunks": {"rows": (2,), "columns": 90001},
    "more_rows": {"rows": (601,), "columns": 40},
}


def accumulate_type(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def make_gated_inputs(
    *,
    rows: tuple[int, ...] = (2, 5),
    columns: int = 12,
    dtype: torch.dtype = torch.float64,
    parameter_dtype: torch.dtype | None = None,
    device: str = "cpu",
    weight: bool = True,
    z: bool = True,
    bias: bool = True,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Keyword arguments of a gated norm."""
    normal = Draws(seed).normal
    parameter_dtype = parameter_dtype or accumulate_type(dtype)
    inputs: dict[str, Any] = {"x": (1.5 * normal(*rows, columns) + 0.4).to(device, dtype)}
    inputs["weight"] = (1 + 0.3 * normal(columns)).to(device, parameter_dtype) if weight else None
    inputs["z"] = (1.2 * normal(*rows, columns)).to(device, dtype) if z else None
    inputs["bias"] = (0.5 * normal(columns)).to(device, parameter_dtype) if bias else None
    return inputs | options


def make_add_inputs(
    *, residual: bool = True, residual_dtype: torch.dtype | None = None, residual_in_fp32: bool = False, **options: Any
) -> dict[str, Any]:
    """Keyword arguments of a norm with a residual."""
    inputs = make_gated_inputs(**options)
    z = inputs.pop("z")
    inputs["residual"] = z.to(residual_dtype or z.dtype) if residual else None
    order = ("x", "residual", "weight", "bias")
    return {name: inputs[name] for name in order} | {"residual_in_fp32": residual_in_fp32}


CUDA_CALLS: dict[str, dict[str, Any]] = {"long": {"rows": (4097,), "columns": 256}, "wide": {"rows": (64,), "columns": 12288}}
SHAPES: Shapes = {
    "x": [("(..., columns) with at least one column", [(), (3, 0)])],
    "weight": [("(columns,) = [12]", [(11,), (13,)])],
    "bias": [("(columns,) = [12]", [(1, 12)])],
}


class Norm(OperatorSpec):
    family = "norms"
    reference_tolerance = 1e-10
    large = MappingProxyType({"columns": 96, "seqlen": 70})
    nested = ("x", "weight")
    either = ("weight", "bias", "residual")
    cuda_calls = CUDA_CALLS

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.is_gated = name in GATED
        self.results = ("out",) if self.is_gated else ("normed", "new_residual")
        self.internal = self.autograd = "_norm_gated" if self.is_gated else "_add_norm"
        others = {"group_size": 4, "norm_before_gate": True} if self.is_gated else {"residual": False, "residual_in_fp32": True}
        self.cases = {"all": {}, "bfloat16": {"dtype": torch.bfloat16, "bias": False}, "others": others}
        self.options = {"default": {}} | ({"grouped": {"group_size": 4}} if self.is_gated else {})
        self.mapped = tuple(self.options)
        more = "z" if self.is_gated else "residual"
        self.bad_shapes = [({}, SHAPES | {more: [("(..., columns) = [2, 5, 12]", [(2, 5, 11)])]})]
        epsilons = (-1.0, math.nan, math.inf)
        self.bad_values = [({}, {"eps": eps}, f"expected a finite eps >= 0, got {eps:g}") for eps in epsilons]
        if self.is_gated:
            self.bad_values += [
                ({}, {"group_size": size}, f"expected group_size to divide columns = 12, got {size}") for size in (5, 0, -12)
            ]
            message = "unknown activation 'relu', expected one of: silu, gelu, gelu_tanh, sigmoid, none"
            self.bad_values.append(({}, {"activation": "relu"}, message))
        self.offsets = {
            f"{columns} columns": rows("x z residual out normed new_residual", -1, rows=(8,), columns=columns, **groups)
            for columns, groups in ((96, {}), (2561, {}), *([(150, {"group_size": 50})] if self.is_gated else []))
        }

    def make_inputs(self, *, batch: int = 3, seqlen: int | None = None, **options: Any) -> dict[str, Any]:
        if seqlen is not None:
            options["rows"] = (batch, seqlen)
        return make_gated_inputs(**options) if self.is_gated else make_add_inputs(**options)

    def result_shapes(self, inputs: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
        return (inputs["x"].shape,) * len(self.results)

    def result_dtypes(self, inputs: dict[str, Any]) -> tuple[torch.dtype, ...]:
        dtype = inputs["x"].dtype
        if self.is_gated:
            return (dtype,)
        residual = inputs["residual"]
        like_residual = dtype if residual is None else residual.dtype
        return dtype, accumulate_type(dtype) if inputs["residual_in_fp32"] else like_residual

    def time_axes(self, inputs: dict[str, Any]) -> dict[str, int]:
        return {name: 1 for name in ("x", "z", "residual") if inputs.get(name) is not None}

    def cast_by_autocast(self, inputs: dict[str, Any]) -> list[str]:
        return []

    def evaluate_natively(
        self, inputs: dict[str, Any], cotangents: Cotangents | None, exact: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Multiplies in the dtype of x: parameters are rounded to fp16 or bf16 with it."""
        dtype = inputs["x"].dtype
        if dtype.itemsize == 2:
            inputs = inputs | {key: inputs[key].to(dtype) for key in ("weight", "bias") if inputs[key] is not None}
        return super().evaluate_natively(inputs, cotangents, exact)


NORMS = {name: Norm(name) for name in (*GATED, *ADD)}
every_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=list(NORMS))
every_gated = pytest.mark.parametrize("norm", [NORMS[name] for name in GATED], ids=GATED)
every_add = pytest.mark.parametrize("norm", [NORMS[name] for name in ADD], ids=ADD)
