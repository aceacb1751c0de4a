"""Inputs of the norms, and their comparison with the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers import assert_as_accurate
from torch import Tensor

import ssm_kernels
from ssm_kernels import reference

GATED = ("rms_norm_gated", "layer_norm_gated")
ADD = ("add_rms_norm", "add_layer_norm")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# Sizes that reach every mapping of the CUDA kernels: several groups of a row to a warp, a group to a warp and to several, one
# that is cut into chunks; vectors of 16 bytes and single elements.
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
    "chunks": {"rows": (3,), "columns": 12288},
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
    **options: Any,
) -> dict[str, Any]:
    """Keyword arguments of a gated norm."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

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


def tensors_of(inputs: dict[str, Any]) -> list[str]:
    return [name for name, value in inputs.items() if isinstance(value, Tensor)]


def evaluate(function: Callable, inputs: dict[str, Any], cotangents: list[Tensor] | None = None) -> dict[str, Tensor]:
    """Results by position and, given cotangents, ``grad_<name>`` of every tensor."""
    names = tensors_of(inputs)
    leaves = {name: inputs[name].detach().requires_grad_(cotangents is not None) for name in names}
    results = function(**(inputs | leaves))
    results = (results,) if isinstance(results, Tensor) else results
    evaluated = {f"result_{i}": result.detach() for i, result in enumerate(results)}
    if cotangents is not None:
        gradients = torch.autograd.grad(
            results, list(leaves.values()), [c.to(r) for c, r in zip(cotangents, results, strict=True)]
        )
        evaluated |= {f"grad_{name}": gradient for name, gradient in zip(names, gradients, strict=True)}
    return evaluated


def make_cotangents(inputs: dict[str, Any], count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(inputs["x"].shape, generator=generator, dtype=torch.float64).to(inputs["x"]) for _ in range(count)]


def assert_matches_reference(name: str, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Results and gradients against the float64 reference, by the low-precision rule below float64."""
    cotangents = make_cotangents(inputs, 2 if name in ADD else 1)
    actual = evaluate(getattr(ssm_kernels, name), inputs, cotangents)
    doubles = {key: value.double() if isinstance(value, Tensor) else value for key, value in inputs.items()}
    exact = evaluate(getattr(reference, name), doubles, [cotangent.double() for cotangent in cotangents])
    native_inputs = dict(inputs)
    if inputs["x"].dtype.itemsize == 2:  # the yardstick multiplies in the dtype of x, with parameters rounded to it
        for key in ("weight", "bias"):
            if inputs[key] is not None:
                native_inputs[key] = inputs[key].to(inputs["x"].dtype)
    native = evaluate(getattr(reference, name), native_inputs, cotangents)
    for key, value in actual.items():
        if value.dtype == torch.float64:
            torch.testing.assert_close(value, exact[key], rtol=1e-10, atol=1e-10, msg=lambda m, key=key: f"{key}: {m}")
        else:
            assert_as_accurate(value, native[key].to(value.dtype), exact[key], key)
    return actual
