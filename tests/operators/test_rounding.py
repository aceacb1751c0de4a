"""Rounding to fp16 and bf16 without bias: a kernel's results are as often above the float64 value as below it, and as often
farther from zero as nearer to it.

All inputs are numbers of the 16-bit dtype, so that the float64 evaluation gets the same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from decoding_helpers import DECODING_STEPS
from helpers import dtypes, kernel_choices
from mamba2_mixer_helpers import make_inputs as make_mamba2_inputs
from operator_spec import Results, as_float64, tensor_names
from operators import every_operator
from torch import Tensor

OPERATOR = "every operator"

# Each has its own loads and stores: along time, along the channels, and one element at a time.
LAYOUTS = ("contiguous", "transposed", "permuted")
# The standard deviation of a share of n independent roundings is 1 / (2 sqrt(n)).
TOLERANCE = 10
# Results of fewer roundings than this would pass with any bias.
LEAST_ROUNDINGS = 4 * TOLERANCE**2

low_precision = dtypes(torch.bfloat16, torch.float16)


def assert_unbiased(actual: Results, exact: Results) -> None:
    """For every 16-bit result that is not a copy of an input; there must be such results."""
    tested = 0
    for name, value in actual.items():
        if value.element_size() != 2:
            continue
        error = value.double() - exact[name].to(value.device)
        roundings = int(error.count_nonzero())
        if roundings == 0:
            continue
        assert roundings >= LEAST_ROUNDINGS, f"{name}: {roundings} roundings"
        for what, sign in (("above", error), ("farther from zero than", error * value.sign())):
            share = int((sign > 0).sum()) / roundings
            message = f"{name}: {share:.3f} of {roundings} results are {what} the float64 value"
            assert abs(share - 0.5) <= TOLERANCE / math.sqrt(roundings), message
        tested += 1
    assert tested


@low_precision
@every_operator
def test_operators(operator, dtype, device):
    options = operator.large | {"batch": 16, "dtype": dtype}
    exact = None
    for layout in operator.layouts if len(operator.layouts) == 1 else LAYOUTS:
        strides = {} if layout == "contiguous" else {"layout": layout}
        inputs = operator.make_inputs(**options, **strides, device=device)
        cotangents = operator.make_cotangents(inputs)
        if exact is None:
            exact = operator.evaluate_in_float64(inputs, cotangents)
        for kernels in kernel_choices(operator.family, device):
            with kernels:
                assert_unbiased(operator.evaluate(operator, inputs, cotangents), exact)


@low_precision
@pytest.mark.parametrize("name", DECODING_STEPS)
def test_decoding_steps(name, dtype, device):
    decoding = DECODING_STEPS[name]
    inputs = decoding.make_inputs(**decoding.large, batch=16, dtype=dtype, state_dtype=dtype, device=device)
    exact = dict(zip(("out", "state"), decoding.reference(**as_float64(inputs)), strict=True))
    for kernels in kernel_choices(decoding.family, device):
        with kernels:
            assert_unbiased(dict(zip(exact, decoding.step(inputs), strict=True)), exact)


# ----- the operators between the projections of layers, in comparison with themselves in float64


def mamba_inputs(dtype: torch.dtype, device: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    batch, seqlen, dim, dstate = 16, 40, 48, 16
    shapes = {"x": (dim,), "delta": (dim,), "A_log": (dim, dstate), "B": (dstate,), "C": (dstate,), "D": (dim,), "z": (dim,)}
    shapes |= {"delta_bias": (dim,)}
    inputs: dict[str, Any] = {}
    for name, shape in shapes.items():
        is_parameter = name in ("A_log", "D", "delta_bias")
        value = torch.randn(shape if is_parameter else (batch, seqlen, *shape), generator=generator)
        inputs[name] = value.to(device, torch.float32 if is_parameter else dtype)
    return inputs | {"initial_state": None, "discretization": "zoh"}


def convolution_inputs(dtype: torch.dtype, device: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"xz": (16, 40, 96), "weight": (48, 4), "bias": (48,), "initial_state": (16, 48, 3)}
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: value.to(device, dtype if value.dim() == 3 else torch.float32) for name, value in values.items()}


def mamba2_inputs(dtype: torch.dtype, device: str) -> dict[str, Any]:
    return make_mamba2_inputs(batch=16, seqlen=40, headdim=12, dstate=16, states=True, dtype=dtype, device=device)


MIXERS: Mapping[str, Callable[[torch.dtype, str], dict[str, Any]]] = {
    "_mamba_conv": convolution_inputs,
    "_mamba_mixer": mamba_inputs,
    "_mamba2_mixer": mamba2_inputs,
}


def evaluate_mixer(
    name: str, inputs: dict[str, Any], cotangents: Sequence[Tensor] | None = None
) -> tuple[Results, list[Tensor]]:
    """The results and gradients, and the cotangents: by default random numbers of the results' dtypes."""
    leaves = inputs | {key: inputs[key].detach().requires_grad_() for key in tensor_names(inputs)}
    outputs = getattr(torch.ops.ssm_kernels, name)(*leaves.values())
    if cotangents is None:
        generator = torch.Generator().manual_seed(1)
        cotangents = [torch.randn(output.shape, generator=generator).to(output) for output in outputs]
    cotangents = [cotangent.to(output.dtype) for cotangent, output in zip(cotangents, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, [leaves[key] for key in tensor_names(inputs)], cotangents)
    results = {str(index): output.detach() for index, output in enumerate(outputs)}
    return results | dict(zip((f"grad_{key}" for key in tensor_names(inputs)), gradients, strict=True)), cotangents


@low_precision
@pytest.mark.parametrize("name", MIXERS)
def test_mixers(name, dtype, device):
    inputs = MIXERS[name](dtype, device)
    actual, cotangents = evaluate_mixer(name, inputs)
    assert_unbiased(actual, evaluate_mixer(name, as_float64(inputs), cotangents)[0])
