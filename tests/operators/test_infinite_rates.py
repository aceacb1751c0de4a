"""Infinite gates, steps and rates: where the results are finite, so are the gradients, and they are the limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import METHODS
from operator_spec import OperatorSpec, tensor_names
from recurrence_helpers import VARIANTS
from selective_scan_helpers import SELECTIVE_SCAN
from ssd_helpers import SSD
from summary_helpers import RECURRENCE_SUMMARIES, SELECTIVE_SUMMARY, SSD_SUMMARY

import ssm_kernels
from ssm_kernels import nn, reference

LARGE = 1e9  # in place of infinity
OF_METHODS = {method: {"discretization": method} for method in (*METHODS, "gbt(0.0)", "gbt(1.0)", "gbt(0.7)")}
CASES: dict[str, tuple[OperatorSpec, dict[str, dict[str, Any]]]] = {
    "selective_scan": (SELECTIVE_SCAN, OF_METHODS | {"no_softplus": {"delta_softplus": False, "delta_bias": False}}),
    "selective_scan_summary": (SELECTIVE_SUMMARY, OF_METHODS),
    "ssd_chunk_scan": (SSD, {"zoh": {}, "zoh_exact": {"discretization": "zoh_exact"}}),
    "ssd_chunk_scan_summary": (SSD_SUMMARY, {"zoh": {}, "zoh_exact": {"discretization": "zoh_exact"}}),
    **{name: (variant, {"": {}}) for name, variant in VARIANTS.items()},
    **{f"{name}_summary": (summary, {"": {}}) for name, summary in RECURRENCE_SUMMARIES.items()},
}
# Infinite arguments that leave the results finite: those that had NaN gradients.
DECAYED = {
    "selective_scan-zoh": {("A", -math.inf), ("delta", -math.inf)},
    "selective_scan-zoh_exact": {("A", -math.inf)},
    "selective_scan-backward_euler": {("A", -math.inf)},
    "selective_scan-gbt(1.0)": {("A", -math.inf)},
    "selective_scan-no_softplus": {("A", -math.inf)},
    "selective_scan_summary-zoh": {("A", -math.inf)},
    "ssd_chunk_scan-zoh": {("A", -math.inf)},
    "ssd_chunk_scan_summary-zoh": {("A", -math.inf)},
    "liquid_scan": {("dt", math.inf), ("tau", math.inf)},
    "liquid_scan_summary": {("dt", math.inf)},
    "rglru_scan": {("recurrent_param", math.inf), ("recurrence_gate", math.inf), ("recurrence_gate", -math.inf)},
    "rglru_scan_summary": {("recurrent_param", math.inf)},
    "mingru_scan": {("gate", math.inf), ("gate", -math.inf)},
}
PAIRS = {f"{key}-{name}".rstrip("-"): (spec, o) for key, (spec, options) in CASES.items() for name, o in options.items()}


def is_finite(results: dict[str, torch.Tensor]) -> bool:
    return all(bool(value.isfinite().all()) for name, value in results.items() if not name.startswith("grad_"))


@pytest.mark.parametrize("case", PAIRS)
def test_gradients_beside_infinite_arguments_are_the_limits(case):
    operator, options = PAIRS[case]
    inputs = operator.make_inputs(**options)
    cotangents = operator.make_cotangents(inputs)
    finite = set()
    for name in tensor_names(inputs):
        for value in (math.inf, -math.inf):
            at = inputs[name].numel() // 2
            infinite, large = (inputs[name].clone(memory_format=torch.contiguous_format) for _ in range(2))
            infinite.view(-1)[at], large.view(-1)[at] = value, math.copysign(LARGE, value)
            actual = operator.evaluate(operator, inputs | {name: infinite}, cotangents)
            expected = operator.evaluate(operator.reference, inputs | {name: infinite}, cotangents)
            assert is_finite(actual) == is_finite(expected), (name, value)
            if not is_finite(actual):
                continue
            finite.add((name, value))
            limit = operator.evaluate(operator, inputs | {name: large}, cotangents)
            for what, result in actual.items():
                where = f"{what} beside {name} = {value}"
                torch.testing.assert_close(result, expected[what], rtol=1e-9, atol=1e-9, msg=lambda m, w=where: f"{w}: {m}")
                torch.testing.assert_close(result, limit[what], rtol=1e-5, atol=1e-5, msg=lambda m, w=where: f"{w}: {m}")
    assert finite >= DECAYED.get(case, set())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [ssm_kernels.liquid_scan, reference.liquid_scan])
def test_liquid_with_an_infinite_step(function, dtype):
    """Every state is its candidate, whatever tau is."""
    candidate, tau = (torch.rand(2, 5, 3, dtype=dtype).add(0.5).requires_grad_() for _ in range(2))
    h = function(candidate, tau, math.inf)
    torch.testing.assert_close(h, candidate)
    h.sum().backward()
    assert torch.equal(candidate.grad, torch.ones_like(candidate)) and not tau.grad.any()


def test_layers_with_infinite_rates():
    """An infinite step of Liquid with tau of the input; A_log whose exponential overflows."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16, requires_grad=True)
    liquid, mamba, mamba2 = nn.Liquid(16, 16), nn.Mamba(16), nn.Mamba2(16, headdim=8)
    for layer in (mamba, mamba2):
        with torch.no_grad():
            layer.A_log.fill_(1000)
    for layer in (liquid, mamba, mamba2):
        out = layer(x, dt=math.inf) if layer is liquid else layer(x)
        out = out if isinstance(out, torch.Tensor) else out[0]
        out.square().sum().backward()
        assert out.isfinite().all() and x.grad.isfinite().all(), layer
        assert all(parameter.grad.isfinite().all() for parameter in layer.parameters() if parameter.grad is not None), layer
