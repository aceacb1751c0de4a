"""delta_rule_scan where numbers are extreme: gates down to minus infinity, correlated keys, betas of 0, 1 and 2, NaN."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from delta_rule_helpers import DELTA_RULE, assert_matches_reference, evaluate, make_inputs, scan
from operator_spec import as_float64

OPERATOR = "delta_rule_scan"

GATES = (-1e-4, -5.0, -30.0, -400.0, -math.inf)
every_gated = pytest.mark.parametrize("gate", ["head", "channel"])


def relative_error(actual, exact):
    return ((actual.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("value", GATES)
@every_gated
def test_gates_of_one_size(value, gate, device):
    """Trap 11: exponentials above the diagonal never overflow, and gradients are finite."""
    inputs = make_inputs(seqlen=130, batch=1, gate=gate, device=device)
    inputs["g"] = torch.full_like(inputs["g"], value)
    results = assert_matches_reference(inputs)
    assert all(result.isfinite().all() for result in results.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@every_gated
def test_gates_of_all_sizes(gate, dtype, device):
    """Traps 10, 11 and 12: weak, strong and infinite decays next to each other."""
    inputs = make_inputs(seqlen=130, batch=1, gate=gate, dtype=dtype, device=device)
    for i, value in enumerate((*GATES, -0.01, -316.0)):
        inputs["g"][:, i::11] = value
    cotangents = DELTA_RULE.make_cotangents(inputs)
    actual, exact = evaluate(scan, inputs, cotangents), DELTA_RULE.evaluate_in_float64(inputs, cotangents)
    limit = {torch.float64: 1e-10, torch.float32: 3e-6, torch.bfloat16: 1.5e-2}[dtype]
    for name, value in actual.items():
        assert value.isfinite().all() and relative_error(value, exact[name]) < limit, name


@every_gated
def test_gradient_of_the_first_gate(gate, device):
    """Trap 10: without an initial state the first decay multiplies zero, and its gradient is exactly zero."""
    inputs = make_inputs(seqlen=130, gate=gate, dtype=torch.float32, initial_states=False, device=device)
    cotangents = DELTA_RULE.make_cotangents(inputs)
    assert not evaluate(scan, inputs, cotangents)["grad_g"][:, 0].any()
    with_states = make_inputs(seqlen=130, gate=gate, dtype=torch.float32, device=device)
    assert evaluate(scan, with_states, cotangents)["grad_g"][:, 0].all()


@every_gated
def test_infinite_raw_gates(gate, device):
    """A raw gate of infinity decays to zero, and every gradient is finite."""
    inputs = make_inputs(seqlen=20, gate=gate, raw="softplus", device=device)
    inputs["g"][:, 3::5] = math.inf
    results = evaluate(scan, inputs, DELTA_RULE.make_cotangents(inputs))
    assert all(result.isfinite().all() for result in results.values())
    assert not results["grad_g"][:, 3::5].any()


def correlated(keys, size, generator):
    """Unit keys: random ones, ones of cosine 0.9, or all the same."""
    own = F.normalize(torch.randn(1, 256, 2, size, generator=generator, dtype=torch.float64), dim=-1)
    shared = F.normalize(torch.randn(1, 1, 2, size, generator=generator, dtype=torch.float64), dim=-1)
    weight = {"random": 0.0, "cosine 0.9": 0.9, "identical": 1.0}[keys]
    return F.normalize(math.sqrt(weight) * shared + math.sqrt(1 - weight) * own, dim=-1)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0, "below 2"])
@pytest.mark.parametrize("keys", ["random", "cosine 0.9", "identical"])
def test_correlated_keys(keys, beta, device):
    """Traps 12 and 23: an inverse by Neumann doubling loses everything here."""
    generator = torch.Generator().manual_seed(0)
    k = correlated(keys, 32, generator)
    inputs = make_inputs(batch=1, seqlen=256, value_heads=2, key_dim=32, value_dim=16, gate=None, device=device)
    fraction = 2 * torch.rand(1, 256, 2, generator=generator, dtype=torch.float64)
    inputs |= {"k": k.to(device), "beta": (fraction if beta == "below 2" else torch.full_like(fraction, beta)).to(device)}
    cotangents = DELTA_RULE.make_cotangents(inputs)
    cotangents32 = tuple(x.float() for x in cotangents)
    single = {
        name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    assert_matches_reference(as_float64(single), cotangents=cotangents)
    # The elements of the inverse alternate between 2 and -2 for identical keys: float32 loses up to two digits of a loop's.
    # CUDA's products are sums of three TF32 products, which keep 22 of float32's 24 bits.
    bar = 1e-4 if (keys, beta, torch.device(device).type) == ("identical", 2.0, "cuda") else 5e-5
    actual, exact = evaluate(scan, single, cotangents32), DELTA_RULE.evaluate_in_float64(single, cotangents32)
    for name, value in actual.items():
        if exact[name].norm() > 0:
            assert relative_error(value, exact[name]) < bar, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bounds_of_errors(dtype, device):
    """Against float64 of the rounded inputs: 3.5e-3 of the output on random keys, 4e-3 of gradients."""
    inputs = make_inputs(batch=1, seqlen=256, value_heads=2, key_dim=64, value_dim=32, dtype=dtype, device=device)
    cotangents = DELTA_RULE.make_cotangents(inputs)
    actual, exact = evaluate(scan, inputs, cotangents), DELTA_RULE.evaluate_in_float64(inputs, cotangents)
    for name, value in actual.items():
        assert relative_error(value, exact[name]) < (3.5e-3 if name in ("out", "final_states") else 4e-3), name


def test_unnormalized_keys_with_strong_decay(device):
    """The decayed recurrence is bounded where the inverse without decays overflows float32."""
    inputs = make_inputs(batch=1, seqlen=130, value_heads=2, key_dim=32, dtype=torch.float32, device=device)
    inputs["k"] = 6 * inputs["k"]
    inputs["g"] = torch.full_like(inputs["g"], -5.0)
    cotangents = DELTA_RULE.make_cotangents(inputs)
    actual, exact = evaluate(scan, inputs, cotangents), DELTA_RULE.evaluate_in_float64(inputs, cotangents)
    for name, value in actual.items():
        assert value.isfinite().all() and relative_error(value, exact[name]) < 1e-5, name


@pytest.mark.parametrize("gate", [None, "head", "channel"])
@pytest.mark.parametrize("name", ["q", "k", "v", "beta"])
@pytest.mark.parametrize("packed", [False, True])
def test_nan_ends_with_its_sequence(packed, name, gate, device):
    """A NaN reaches no other packed sequence, and none that seq_idx begins with a chunk of 64 steps."""
    bounds = (0, 50, 128, 200)
    options = {"cu_seqlens": bounds} if packed else {"batch": 1, "seqlen": 200, "resets": ((50, 128),)}
    inputs = make_inputs(**options, gate=gate, device=device)
    cotangents = DELTA_RULE.make_cotangents(inputs)
    clean = evaluate(scan, inputs, cotangents)
    inputs[name] = inputs[name].clone()
    inputs[name][:, 70] = math.nan
    actual = evaluate(scan, inputs, cotangents)
    others = torch.ones(200, dtype=torch.bool)
    others[50 if packed else 0 : 128] = False
    for result in ("out", "grad_q", "grad_k", "grad_v", "grad_beta"):
        assert torch.equal(actual[result][:, others], clean[result][:, others]), result
    assert torch.equal(actual["final_states"][-1], clean["final_states"][-1])
    assert actual["out"][:, 70].isnan().all()
