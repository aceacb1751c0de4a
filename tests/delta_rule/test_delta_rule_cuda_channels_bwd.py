"""Backward of delta_rule_scan on CUDA with a gate per channel of the key: the kernels, beside the gradients in float64."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import test_delta_rule_cuda_bwd as per_head
import torch
from delta_rule_helpers import gradients, needs_wgmma, relative_error
from helpers import debug_option
from test_delta_rule_cuda_bwd import BARS, DTYPES, assert_accurate
from torch import Tensor

from ssm_kernels import delta_rule_scan

pytestmark = pytest.mark.cuda

__all__ = ["needs_wgmma"]  # the fixture

# The gradient of beta is one number a step and head. A few of them, beside the gradient of the final state, are largest: the
# errors of 300 or 400 do not average. Emulated in PyTorch, the roundings of S, D, E, Y and keys times their decays to bf16
# give 5.0e-3 for two heads of 200 steps with gates of -400, and 5.6e-3 for 150 steps with key_dim 65; with E and Y in float32,
# 4.0e-3 and 3.3e-3. Larger calls have 3.0e-3 to 3.9e-3.
FEW_BETAS = 1.5
BETA = {"beta": FEW_BETAS * BARS[torch.bfloat16]}


def make_inputs(
    batch: int, seqlen: int, heads: int, value_heads: int, key_dim: int, value_dim: int, *, decay: float = 0.1, **options: Any
) -> dict[str, Tensor]:
    """As with a gate per head, and log decays of all channels from -2 decay to 0."""
    inputs = per_head.make_inputs(batch, seqlen, heads, value_heads, key_dim, value_dim, **options)
    generator = torch.Generator().manual_seed(2)
    inputs["g"] = -2 * decay * torch.rand(batch, seqlen, value_heads, key_dim, generator=generator)
    return inputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlen", [1, 2, 15, 16, 17, 63, 64, 65, 127, 300])
def test_every_length(seqlen, dtype):
    # One beta a step and head: the errors of a few do not average.
    few = {"beta": (3 if seqlen < 15 else 1.25) * BARS[dtype]}
    assert_accurate(make_inputs(2, seqlen, 2, 4, 128, 128, dtype=dtype), bars=few)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_heads", [2, 6])
@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(128, 128), (64, 64), (96, 192), (1, 1), (7, 5), (40, 24), (100, 130), (128, 320), (65, 64)]
)
def test_every_size_of_a_head(key_dim, value_dim, value_heads, dtype):
    inputs = make_inputs(1, 150, 2, value_heads, key_dim, value_dim, dtype=dtype)
    # Keys of few dimensions are correlated: the corrections of a chunk depend on one another.
    factor = 1 if key_dim > 8 else 4
    assert_accurate(inputs, BARS[dtype] * factor, {"beta": FEW_BETAS * BARS[dtype] * factor})


@pytest.mark.parametrize("most_beta", [1.0, 2.0])
def test_correlated_keys(most_beta):
    inputs = make_inputs(2, 512, 2, 2, 128, 128, cosine=0.9, decay=1e-5, most_beta=most_beta)
    assert_accurate(inputs, 7e-3, per_head.CORRELATED_BARS)


@pytest.mark.parametrize("g", [-1e-4, -5.0, -30.0, -400.0, -torch.inf])
@pytest.mark.parametrize("part", ["steps", "channels", "all"])
def test_any_decay(part, g):
    """Some steps, some channels of some steps, or all of a hundred steps."""
    inputs = make_inputs(1, 200, 2, 2, 64, 64)
    steps, channels = torch.arange(200)[:, None, None], torch.arange(64)
    chosen = {"steps": steps % 3 == 0, "channels": (steps + channels) % 3 == 0, "all": (steps >= 70) & (steps < 170)}[part]
    chosen = chosen.expand(200, 2, 64)
    inputs["g"] = torch.where(chosen, g, inputs["g"])
    found = assert_accurate(inputs, bars=BETA)
    if g < -100:
        assert (found["g"][0, chosen] == 0).all()


def test_strong_decays_do_not_cancel_in_their_gradient():
    inputs = make_inputs(1, 300, 2, 2, 128, 128, decay=3.0)
    del inputs["initial_states"]
    found = assert_accurate(inputs, bars=BETA)
    assert (found["g"][:, 0] == 0).all(), "the first step decays nothing"


def test_steps_that_write_nothing():
    """Their keys and values have no gradient; their beta has one."""
    inputs = make_inputs(1, 150, 2, 2, 64, 64)
    inputs["beta"][:, ::3] = 0
    found = assert_accurate(inputs, bars=BETA)
    assert (found["v"][:, ::3] == 0).all()
    assert (found["beta"][:, ::3] != 0).all()


def test_packed_sequences_are_those_alone():
    """Empty ones, at the ends too, pass the gradient of their states on. NaN of a sequence does not reach the others."""
    bounds = [0, 0, 1, 17, 17, 80, 144, 273, 400, 400]
    inputs = make_inputs(1, 400, 2, 4, 128, 128, sequences=9)
    packed = {**inputs, "cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    found = assert_accurate(packed, bars=BETA)
    poisoned = {name: tensor.clone() for name, tensor in packed.items()}
    for name in ("q", "k", "v", "beta", "g"):
        poisoned[name][:, 144:273] = torch.nan
    others = gradients(poisoned, "cuda", False)
    for name in ("q", "k", "v", "beta", "g"):
        assert torch.equal(others[name][:, :144], found[name][:, :144]), name
        assert torch.equal(others[name][:, 273:], found[name][:, 273:]), name
    for i, (begin, _) in enumerate(itertools.pairwise(bounds)):
        if begin != 144:
            assert torch.equal(others["initial_states"][i], found["initial_states"][i]), i


def test_sequences_of_seq_idx():
    """The gates of their first steps have no gradient. NaN does not reach the sequence before one that begins with a chunk."""
    inputs = make_inputs(2, 300, 2, 2, 128, 64)
    seq_idx = torch.zeros(2, 300, dtype=torch.int32)
    begins = ((0, 5), (1, 64), (1, 130), (1, 131), (1, 140))
    for row, step in begins:
        seq_idx[row, step:] += 1
    found = assert_accurate({**inputs, "seq_idx": seq_idx}, bars=BETA)
    for row, step in begins:
        assert (found["g"][row, step] == 0).all(), (row, step)
    for name in ("q", "k", "v", "beta", "g"):
        inputs[name][1, 64:] = torch.nan
    others = gradients({**inputs, "seq_idx": seq_idx}, "cuda", False)
    for name in ("q", "k", "v", "beta", "g"):
        assert torch.equal(others[name][1, :64], found[name][1, :64]), name
        assert torch.equal(others[name][0], found[name][0]), name


def test_options_inside():
    """The gate's parameters, sigmoid of beta and norms, which the kernels apply as they write."""
    inputs = make_inputs(2, 200, 2, 4, 128, 128)
    for name in ("q", "k"):
        inputs[name] = 3 * inputs[name]
    inputs["beta"] = torch.randn_like(inputs["beta"])
    inputs["g"] = torch.randn_like(inputs["g"])
    parameters = {"A_log": torch.randn(4), "dt_bias": torch.randn(4, 128)}
    options = {"qk_l2norm": True, "beta_sigmoid": True, "allow_neg_eigval": True}
    # The gradients of parameters are sums of terms of both signs.
    sums = dict.fromkeys(parameters, 2e-2)
    assert_accurate({**inputs, **parameters}, bars=sums | BETA, **options)
    assert_accurate({**inputs, "dt_bias": parameters["dt_bias"]}, bars=sums | BETA, gate_lower_bound=-5.0, **options)


def test_gradient_of_the_final_states_alone():
    inputs = {name: tensor.cuda().requires_grad_() for name, tensor in make_inputs(1, 200, 2, 2, 64, 64).items()}
    _, states = delta_rule_scan(**inputs, return_final_states=True)
    found = torch.autograd.grad(states.sum(), [inputs["k"], inputs["initial_states"]])
    typed = {name: tensor.detach().double().cpu().requires_grad_() for name, tensor in inputs.items()}
    _, states = delta_rule_scan(**typed, return_final_states=True)
    for one, other in zip(found, torch.autograd.grad(states.sum(), [typed["k"], typed["initial_states"]]), strict=True):
        assert relative_error(one, other) < 4e-3


@pytest.mark.parametrize("decay", [0.1, 0.002])
@pytest.mark.parametrize(("batch", "value_dim"), [(1, 128), (2, 72)])
def test_long_sequences_of_few_heads(batch, value_dim, decay):
    """Blocks take segments of a sequence, whose maps of the state and of its gradient are folded."""
    # Emulated in PyTorch, weak decays have 3.9e-3 in k and 4.2e-3 in beta, as without segments.
    bar = (1 if decay == 0.1 else 1.25) * BARS[torch.bfloat16]
    assert_accurate(make_inputs(batch, 12300, 1, 2, 128, value_dim, decay=decay), bar, BETA)


@pytest.mark.usefixtures("needs_wgmma")
@pytest.mark.parametrize(("heads", "value_heads"), [(2, 2), (1, 4)])
def test_parts_of_a_call_have_the_same_bits(heads, value_heads):
    """As many as a small workspace needs, down to one value head of a row."""
    inputs = make_inputs(3, 200, heads, value_heads, 128, 128)
    whole = gradients(inputs, "cuda", False)
    with debug_option("ssd_workspace_bytes", 1):
        parts = gradients(inputs, "cuda", False)
    # The order of a sum over the value heads of a key head may differ.
    rtol, atol = (0, 0) if heads == value_heads else (1e-2, 1e-3)
    for name, grad in whole.items():
        torch.testing.assert_close(parts[name], grad, rtol=rtol, atol=atol)


def test_repeats_have_the_same_bits():
    inputs = make_inputs(4, 640, 2, 4, 128, 128)
    found = gradients(inputs, "cuda", False)
    for _ in range(5):
        for name, grad in gradients(inputs, "cuda", False).items():
            assert torch.equal(grad, found[name]), name


@pytest.mark.usefixtures("needs_wgmma")
def test_kernels_run_by_name():
    """Those of backward, and none of a fallback's matrix products."""
    inputs = {name: tensor.cuda().requires_grad_() for name, tensor in make_inputs(1, 200, 2, 2, 64, 64).items()}
    out = delta_rule_scan(**inputs)
    grad = torch.randn_like(out)
    torch.autograd.grad(out, list(inputs.values()), grad, retain_graph=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(out, list(inputs.values()), grad)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    for kernel in ("chunks", "bwd_states", "bwd_chunks"):
        assert sum(f"kda_{kernel}_kernel" in name for name in names) == 1, kernel
    assert not [name for name in names if re.search("gemm|cutlass|bmm", name)]
