"""delta_rule_scan on CUDA with keys of 129 to 256 columns: forward and backward, beside float64 of the same rounded inputs."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from delta_rule_helpers import evaluate_on, needs_wgmma, relative_error
from helpers import debug_option
from test_delta_rule_cuda_bwd import BARS, DTYPES, make_inputs
from torch import Tensor

from ssm_kernels import delta_rule_scan

pytestmark = pytest.mark.cuda

__all__ = ["needs_wgmma"]  # the fixture

# One number a step and head, of calls with few heads: their errors do not average.
FEW = {"beta": 6e-3, "g": 7.5e-3}


def assert_accurate(
    inputs: dict[str, Any], bar: float | None = None, bars: dict[str, float] | None = None, **options: Any
) -> dict[str, Tensor]:
    bar = BARS[inputs["v"].dtype] if bar is None else bar
    found, expected = evaluate_on(inputs, "cuda", False, **options), evaluate_on(inputs, "cpu", True, **options)
    for name, one in found.items():
        assert one.isfinite().all(), name
        assert relative_error(one, expected[name]) < (bars or {}).get(name, bar), name
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlen", [1, 2, 15, 17, 63, 64, 65, 127, 300])
def test_every_length(seqlen, dtype):
    few = dict.fromkeys(FEW, 3 * BARS[dtype])
    assert_accurate(make_inputs(2, seqlen, 2, 4, 256, 128, dtype=dtype), bars=few)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_heads", [2, 6])
@pytest.mark.parametrize(
    ("key_dim", "value_dim"),
    [(256, 512), (256, 64), (129, 1), (131, 5), (136, 100), (144, 130), (192, 384), (193, 65), (255, 72)],
)
def test_every_size_of_a_head(key_dim, value_dim, value_heads, dtype):
    few = {name: bar * BARS[dtype] / BARS[torch.bfloat16] for name, bar in FEW.items()}
    inputs = make_inputs(1, 150, 2, value_heads, key_dim, value_dim, dtype=dtype)
    if value_dim < 8:  # no sums over columns of values
        assert_accurate(inputs, 3 * BARS[dtype])
    else:
        assert_accurate(inputs, bars=few)


@pytest.mark.parametrize("most_beta", [1.0, 2.0])
def test_correlated_keys_without_decay(most_beta):
    inputs = make_inputs(2, 512, 2, 2, 256, 128, cosine=0.9, decay=None, most_beta=most_beta)
    assert_accurate(inputs, 7e-3, {"out": 6e-3, "beta": 1.2e-2})


@pytest.mark.parametrize(("beta", "bar"), [(1.0, 2e-2), (2.0, 6e-2)])
def test_identical_keys(beta, bar):
    """Those of test_delta_rule_cuda.py, where the bars have their reasons."""
    inputs = make_inputs(1, 256, 1, 1, 256, 128, decay=None)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
    inputs["beta"] = torch.full_like(inputs["beta"], beta)
    del inputs["initial_states"]
    found = delta_rule_scan(**{name: tensor.cuda() for name, tensor in inputs.items()})
    assert relative_error(found, delta_rule_scan(**{name: tensor.double() for name, tensor in inputs.items()})) < bar


@pytest.mark.parametrize("g", [-1e-4, -5.0, -30.0, -400.0, -torch.inf])
def test_any_decay(g):
    inputs = make_inputs(1, 200, 2, 2, 192, 64)
    inputs["g"] = torch.where(torch.arange(200)[:, None] % 3 == 0, g, inputs["g"])
    found = assert_accurate(inputs, bars=FEW)
    if g < -100:
        assert (found["g"][:, ::3] == 0).all()


def test_packed_sequences_are_those_alone():
    """Empty ones, at the ends too, keep their initial states. NaN of a sequence does not reach the others."""
    bounds = [0, 0, 1, 17, 17, 80, 144, 273, 400, 400]
    inputs = make_inputs(1, 400, 2, 4, 256, 128, sequences=9)
    packed = {**inputs, "cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    found = assert_accurate(packed, bars=FEW)
    poisoned = {name: tensor.clone() for name, tensor in packed.items()}
    for name in ("q", "k", "v", "beta", "g"):
        poisoned[name][:, 144:273] = torch.nan
    others = evaluate_on(poisoned, "cuda", False)
    for name in ("out", "q", "k", "v", "beta", "g"):
        assert torch.equal(others[name][:, :144], found[name][:, :144]), name
        assert torch.equal(others[name][:, 273:], found[name][:, 273:]), name
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if begin == 144:
            continue
        for name in ("initial_states", "final_states"):
            assert torch.equal(others[name][i], found[name][i]), (name, i)
        alone = {name: tensor[:, begin:end].cuda() for name, tensor in inputs.items() if name != "initial_states"}
        alone["initial_states"] = inputs["initial_states"][i : i + 1].cuda()
        assert torch.equal(delta_rule_scan(**alone), found["out"][:, begin:end]), i


def test_sequences_of_seq_idx():
    inputs = make_inputs(2, 300, 2, 2, 256, 64)
    seq_idx = torch.zeros(2, 300, dtype=torch.int32)
    for row, step in ((0, 5), (1, 64), (1, 130), (1, 140)):
        seq_idx[row, step:] += 1
    assert_accurate({**inputs, "seq_idx": seq_idx}, bars=FEW)


def test_split_anywhere_is_whole():
    inputs = {name: tensor.cuda() for name, tensor in make_inputs(2, 257, 2, 4, 256, 128).items()}
    whole, states = delta_rule_scan(**inputs, return_final_states=True)
    for cut in (1, 63, 64, 100, 256):
        parts = [{n: t[:, steps] for n, t in inputs.items()} for steps in (slice(cut), slice(cut, None))]
        parts[0]["initial_states"] = inputs["initial_states"]
        first, parts[1]["initial_states"] = delta_rule_scan(**parts[0], return_final_states=True)
        second, final = delta_rule_scan(**parts[1], return_final_states=True)
        assert relative_error(torch.cat([first, second], 1), whole.double().cpu()) < 4e-3
        assert relative_error(final, states.double().cpu()) < 4e-3


def test_states_at_positions_are_final_states_of_prefixes():
    inputs = make_inputs(2, 300, 2, 4, 200, 64)
    positions = [0, 64, 70, 299, 300]
    found = delta_rule_scan(**{n: t.cuda() for n, t in inputs.items()}, states_at=positions, return_final_states=True)
    expected = delta_rule_scan(**{n: t.double() for n, t in inputs.items()}, states_at=positions, return_final_states=True)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < BARS[torch.bfloat16]
    assert torch.equal(found[2][:, 4], found[1])


def test_options_inside():
    """The gate's parameters, sigmoid of beta and norms."""
    inputs = make_inputs(2, 200, 2, 4, 256, 128)
    for name in ("q", "k"):
        inputs[name] = 3 * inputs[name]
    # Over 2900 seeds, a float64 emulation of the kernels' roundings has errors of g of 2.2e-3 in the median and 7.8e-3 at most,
    # because the last steps' large gradients share a few sums over the gradient of the final state. Seed 4 has 2.2e-3.
    generator = torch.Generator().manual_seed(4)
    for name in ("beta", "g"):
        inputs[name] = torch.randn(inputs[name].shape, generator=generator)
    parameters = {name: torch.randn(4, generator=generator) for name in ("A_log", "dt_bias")}
    options = {"qk_l2norm": True, "beta_sigmoid": True, "allow_neg_eigval": True}
    sums = dict.fromkeys(parameters, 2e-2)  # of terms of both signs
    assert_accurate({**inputs, **parameters}, 7.5e-3, sums, **options)


def test_repeats_and_batches_have_the_same_bits():
    """Also where blocks share a head's chunks: 100 heads in all, 200 blocks of rows."""
    inputs = {name: tensor.cuda() for name, tensor in make_inputs(25, 640, 2, 4, 256, 136).items()}
    found = evaluate_on(inputs, "cuda", False)
    for _ in range(3):
        for name, again in evaluate_on(inputs, "cuda", False).items():
            assert torch.equal(again, found[name]), name
    row = {name: tensor[7:8] for name, tensor in inputs.items()}
    assert torch.equal(delta_rule_scan(**row), found["out"][7:8])


@pytest.mark.usefixtures("needs_wgmma")
@pytest.mark.parametrize(("heads", "value_heads"), [(2, 2), (1, 4)])
def test_parts_of_a_call_have_the_same_bits(heads, value_heads):
    """As many as a small workspace needs, down to one value head of a row."""
    inputs = make_inputs(3, 200, heads, value_heads, 256, 128)
    whole = evaluate_on(inputs, "cuda", False)
    with debug_option("ssd_workspace_bytes", 1):
        parts = evaluate_on(inputs, "cuda", False)
    # The order of a sum over the value heads of a key head may differ.
    rtol, atol = (0, 0) if heads == value_heads else (1e-2, 1e-3)
    for name, grad in whole.items():
        torch.testing.assert_close(parts[name], grad, rtol=rtol, atol=atol)


@pytest.mark.usefixtures("needs_wgmma")
def test_kernels_run_by_name():
    """None of a fallback's matrix products."""
    inputs = {name: tensor.cuda().requires_grad_() for name, tensor in make_inputs(1, 200, 2, 2, 256, 64).items()}
    out = delta_rule_scan(**inputs)
    grad = torch.randn_like(out)
    torch.autograd.grad(out, list(inputs.values()), grad)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(delta_rule_scan(**inputs), list(inputs.values()), grad)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    for kernel, times in (("fwd_wide", 1), ("bwd_matrices", 2), ("bwd_wide_states", 1), ("bwd_wide_chunks", 1)):
        assert sum(f"delta_rule_{kernel}" in name for name in names) == times, kernel
    assert not [name for name in names if re.search("gemm|cutlass|bmm", name)]
