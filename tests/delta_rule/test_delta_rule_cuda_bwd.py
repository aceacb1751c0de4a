"""Backward of delta_rule_scan on CUDA: the kernels, beside the gradients in float64 on the CPU of the same rounded inputs."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from delta_rule_helpers import gradients, needs_wgmma, relative_error
from helpers import debug_option
from torch import Tensor

from ssm_kernels import delta_rule_scan

pytestmark = pytest.mark.cuda

__all__ = ["needs_wgmma"]  # the fixture

DTYPES = [torch.bfloat16, torch.float16]
BARS = {torch.bfloat16: 4e-3, torch.float16: 8e-4}
CORRELATED_BARS = {"beta": 1.2e-2}
# The gradients of g in the last chunk are the largest, and share a few sums over the gradient of the final state: the errors of
# two or eight heads do not average. Emulated in PyTorch, the rounding of S, D, E and Y to bf16 gives 4.9e-3 for 65 steps and
# 6.0e-3 for 320 rows of values (1.0e-3 to 3.7e-3 for seven other draws), and 2.7e-4 without it.
FEW_SUMS = {"65 steps": 6e-3, "320 rows": 7.5e-3}


def make_inputs(
    batch: int,
    seqlen: int,
    heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    cosine: float = 0.0,
    decay: float | None = 0.1,
    most_beta: float = 1.0,
    sequences: int | None = None,
) -> dict[str, Tensor]:
    """Normalized keys, any two of a head with about that cosine, log decays from -2 decay to 0, and initial states."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    common = F.normalize(normal(1, 1, heads, key_dim), dim=-1)
    own = F.normalize(normal(batch, seqlen, heads, key_dim), dim=-1)
    found = {
        "q": F.normalize(normal(batch, seqlen, heads, key_dim), dim=-1).to(dtype),
        "k": F.normalize(cosine**0.5 * common + (1 - cosine) ** 0.5 * own, dim=-1).to(dtype),
        "v": normal(batch, seqlen, value_heads, value_dim).to(dtype),
        "beta": most_beta * torch.rand(batch, seqlen, value_heads, generator=generator),
        "initial_states": 0.3 * normal(sequences or batch, value_heads, value_dim, key_dim),
    }
    if decay is not None:
        found["g"] = -2 * decay * torch.rand(batch, seqlen, value_heads, generator=generator)
    return found


def assert_accurate(
    inputs: dict[str, Any], bar: float | None = None, bars: dict[str, float] | None = None, **options: Any
) -> dict[str, Tensor]:
    bar = BARS[inputs["v"].dtype] if bar is None else bar
    found, expected = gradients(inputs, "cuda", False, **options), gradients(inputs, "cpu", True, **options)
    for name, grad in found.items():
        assert grad.isfinite().all(), name
        assert relative_error(grad, expected[name]) < (bars or {}).get(name, bar), name
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlen", [1, 2, 15, 16, 17, 63, 64, 65, 127, 300])
def test_every_length(seqlen, dtype):
    # One number a step and head: the errors of a few do not average.
    few = dict.fromkeys(("beta", "g"), 3 * BARS[dtype]) if seqlen < 15 else {}
    if seqlen == 65 and dtype == torch.bfloat16:
        few = {"g": FEW_SUMS["65 steps"]}
    assert_accurate(make_inputs(2, seqlen, 2, 4, 128, 128, dtype=dtype), bars=few)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_heads", [2, 6])
@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(128, 128), (64, 64), (96, 192), (1, 1), (7, 5), (40, 24), (100, 130), (128, 320), (65, 64)]
)
def test_every_size_of_a_head(key_dim, value_dim, value_heads, dtype):
    inputs = make_inputs(1, 150, 2, value_heads, key_dim, value_dim, dtype=dtype)
    few = {"g": FEW_SUMS["320 rows"]} if value_dim == 320 and value_heads == 2 and dtype == torch.bfloat16 else {}
    # Keys of few dimensions are correlated: the corrections of a chunk depend on one another.
    assert_accurate(inputs, BARS[dtype] * (1 if key_dim > 8 else 4), few)


@pytest.mark.parametrize("most_beta", [1.0, 2.0])
def test_correlated_keys_without_decay(most_beta):
    inputs = make_inputs(2, 512, 2, 2, 128, 128, cosine=0.9, decay=None, most_beta=most_beta)
    assert_accurate(inputs, 7e-3, CORRELATED_BARS)


@pytest.mark.parametrize("g", [-1e-4, -5.0, -30.0, -400.0, -torch.inf])
def test_any_decay(g):
    inputs = make_inputs(1, 200, 2, 2, 64, 64)
    inputs["g"] = torch.where(torch.arange(200)[:, None] % 3 == 0, g, inputs["g"])
    found = assert_accurate(inputs)
    if g < -100:
        assert (found["g"][:, ::3] == 0).all()


def test_strong_decays_do_not_cancel_in_their_gradient():
    inputs = make_inputs(1, 300, 2, 2, 128, 128, decay=3.0)
    del inputs["initial_states"]
    found = assert_accurate(inputs)
    assert (found["g"][:, 0] == 0).all(), "the first step decays nothing"


def test_steps_that_write_nothing():
    """Their keys and values have no gradient; their beta has one."""
    inputs = make_inputs(1, 150, 2, 2, 64, 64)
    inputs["beta"][:, ::3] = 0
    found = assert_accurate(inputs)
    assert (found["v"][:, ::3] == 0).all()
    assert (found["beta"][:, ::3] != 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key_dim", [64, 192])
def test_beta_of_the_dtype(key_dim, dtype):
    """The kernels read it as they read the same numbers in float32."""
    inputs = make_inputs(2, 150, 2, 4, key_dim, 64, dtype=dtype)
    inputs["beta"] = inputs["beta"].to(dtype)
    found = gradients(inputs, "cuda", False)
    expected = gradients(inputs | {"beta": inputs["beta"].float()}, "cuda", False)
    for name, grad in found.items():
        assert grad.equal(expected[name].to(grad.dtype)), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key_dim", [64, 192])
def test_small_betas(key_dim, dtype):
    """Backward divides gradients of v by larger ones alone."""
    inputs = make_inputs(1, 150, 2, 4, key_dim, 72, dtype=dtype, sequences=3)
    inputs["beta"][:, ::3] *= 1e-3
    inputs["beta"][:, 1::9] = 0
    inputs["beta"][:, 2::9] = 1e-15
    assert_accurate({**inputs, "cu_seqlens": torch.tensor([0, 70, 70, 150], dtype=torch.int32)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_rounded_betas(dtype):
    """The kernels round it to the type of beta."""
    inputs = make_inputs(2, 150, 2, 4, 64, 64, dtype=dtype)
    inputs["beta"] = inputs["beta"].to(dtype)
    found = assert_accurate(inputs)
    assert found["beta"].dtype == dtype


def test_packed_sequences_are_those_alone():
    """Empty ones, at the ends too, pass the gradient of their states on. NaN of a sequence does not reach the others."""
    bounds = [0, 0, 1, 17, 17, 80, 144, 273, 400, 400]
    inputs = make_inputs(1, 400, 2, 4, 128, 128, sequences=9)
    packed = {**inputs, "cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    found = assert_accurate(packed)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key_dim", [64, 128])
def test_more_blocks_than_multiprocessors(key_dim, dtype):
    """The kernel of the states computes the products of queries and keys."""
    assert_accurate(make_inputs(5, 150, 4, 16, key_dim, 128, dtype=dtype))
    packed = make_inputs(1, 400, 4, 16, key_dim, 128, dtype=dtype, sequences=6)
    packed["cu_seqlens"] = torch.tensor([0, 17, 80, 144, 273, 273, 400], dtype=torch.int32)
    assert_accurate(packed)
    seq_idx = torch.zeros(5, 150, dtype=torch.int32)
    seq_idx[:, 70:] = 1
    assert_accurate({**make_inputs(5, 150, 4, 16, key_dim, 128, dtype=dtype), "seq_idx": seq_idx})


def test_sequences_of_seq_idx():
    inputs = make_inputs(2, 300, 2, 2, 128, 64)
    seq_idx = torch.zeros(2, 300, dtype=torch.int32)
    for row, step in ((0, 5), (1, 64), (1, 130), (1, 140)):
        seq_idx[row, step:] += 1
    assert_accurate({**inputs, "seq_idx": seq_idx})


def test_options_inside():
    """The gate's parameters, sigmoid of beta and norms inside."""
    inputs = make_inputs(2, 200, 2, 4, 128, 128)
    for name in ("q", "k"):
        inputs[name] = 3 * inputs[name]
    inputs["beta"] = torch.randn_like(inputs["beta"])
    inputs["g"] = torch.randn_like(inputs["g"])
    parameters = {"A_log": torch.randn(4), "dt_bias": torch.randn(4)}
    options = {"qk_l2norm": True, "beta_sigmoid": True, "allow_neg_eigval": True}
    # The gradients of parameters are sums of terms of both signs.
    sums = dict.fromkeys(parameters, 2e-2)
    assert_accurate({**inputs, **parameters}, 6e-3, sums, **options)
    assert_accurate({**inputs, "dt_bias": parameters["dt_bias"]}, 6e-3, sums, gate_lower_bound=-5.0, **options)


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
    assert_accurate(make_inputs(batch, 12300, 1, 2, 128, value_dim, decay=decay))


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
    for kernel in ("bwd_matrices", "bwd_states", "bwd_chunks"):
        assert sum(f"delta_rule_{kernel}" in name for name in names) == 1, kernel
    assert not [name for name in names if re.search("gemm|cutlass|bmm", name)]
