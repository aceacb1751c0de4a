"""delta_rule_scan on the CPU as PyTorch matmuls, which other devices without kernels take."""

from __future__ import annotations

import math

import pytest
import torch
from delta_rule_helpers import DELTA_RULE, assert_matches_reference, evaluate, every_gate, every_option, make_inputs, scan
from helpers import debug_option


@pytest.fixture(autouse=True)
def matmuls():
    with debug_option("delta_rule_cpu", "matmuls"):
        yield


@every_option
def test_matmuls_match_the_reference(options):
    assert_matches_reference(make_inputs(**options))


@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 129])
@every_gate
def test_lengths_of_matmuls(seqlen, gate):
    assert_matches_reference(make_inputs(seqlen=seqlen, gate=gate, batch=1, heads=1, value_heads=2, key_dim=20))


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_matmuls_with_gates_of_all_sizes(gate):
    inputs = make_inputs(seqlen=130, batch=1, gate=gate)
    for i, value in enumerate((-1e-4, -5.0, -30.0, -400.0, -math.inf)):
        inputs["g"][:, i::11] = value
    results = assert_matches_reference(inputs)
    assert all(result.isfinite().all() for result in results.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_gate
def test_kernels_and_matmuls_agree(gate, dtype):
    inputs = make_inputs(seqlen=200, gate=gate, key_dim=40, value_dim=24, dtype=dtype)
    cotangents = DELTA_RULE.make_cotangents(inputs)
    by_matmuls = evaluate(scan, inputs, cotangents)
    with debug_option("delta_rule_cpu", "kernels"):
        by_kernels = evaluate(scan, inputs, cotangents)
    bar = 1e-13 if dtype == torch.float64 else 1e-6
    for name, value in by_kernels.items():
        assert (value - by_matmuls[name]).norm() < bar * by_matmuls[name].norm(), name
