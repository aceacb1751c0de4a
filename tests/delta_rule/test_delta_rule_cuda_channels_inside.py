"""delta_rule_scan on CUDA with a gate per channel of the key, and norms, gates and sigmoids inside, beside float64."""

from __future__ import annotations

from typing import Any

import pytest
import test_delta_rule_cuda_inside as per_head
import torch
from delta_rule_helpers import evaluate_on
from helpers import debug_option
from test_delta_rule_cuda_inside import OPTIONS, assert_accurate
from torch import Tensor

from ssm_kernels import delta_rule_scan

pytestmark = pytest.mark.cuda


def make_inputs(*, parameter_dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Tensor]:
    """As with a gate per head, and raw gates and biases of channels."""
    inputs = per_head.make_inputs(**options, parameter_dtype=parameter_dtype)
    generator = torch.Generator().manual_seed(2)
    key_dim = inputs["q"].size(3)
    inputs["g"] = torch.randn(*inputs["g"].shape, key_dim, generator=generator).to(parameter_dtype)
    inputs["dt_bias"] = -3 + torch.randn(inputs["beta"].size(2), key_dim, generator=generator)
    return inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value_heads", [2, 4])
def test_norms_and_gates(value_heads, dtype):
    assert_accurate(make_inputs(value_heads=value_heads, seqlen=512, dtype=dtype), **OPTIONS)


def test_bounded_gates_and_negative_eigenvalues():
    inputs = make_inputs(seqlen=512)
    assert_accurate(inputs, gate_lower_bound=-5.0, allow_neg_eigval=True, **OPTIONS)
    del inputs["A_log"]
    assert_accurate(inputs, gate_lower_bound=-5.0, allow_neg_eigval=True, **OPTIONS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_the_dtype(dtype):
    """g and beta have the dtype of q, and so have their gradients: those are rounded once."""
    assert_accurate(make_inputs(seqlen=300, dtype=dtype, parameter_dtype=dtype), **OPTIONS)


@pytest.mark.parametrize("asked", ["norm", "gate", "sigmoid"])
def test_one_option_alone(asked):
    inputs = make_inputs(seqlen=300)
    if asked != "norm":
        for name in ("q", "k"):
            inputs[name] = torch.nn.functional.normalize(inputs[name].float(), dim=-1).to(torch.bfloat16)
    if asked != "gate":
        inputs["g"] = -0.1 * inputs["g"].abs()
        del inputs["A_log"], inputs["dt_bias"]
    if asked != "sigmoid":
        inputs["beta"] = inputs["beta"].sigmoid()
    assert_accurate(inputs, qk_l2norm=asked == "norm", beta_sigmoid=asked == "sigmoid")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_any_length(dtype):
    """Of length 0, whose gradient is a thousand times that of the normalized row, and of lengths near the root of 1e-6."""
    inputs = make_inputs(dtype=dtype)
    scales = torch.tensor([0.0, 1e-3, 1.0, 30.0])
    for i, name in enumerate(("q", "k")):
        inputs[name] = (inputs[name].float() * scales[(torch.arange(200) + i) % 4][:, None, None]).to(dtype)
    found = assert_accurate(inputs, **OPTIONS)
    for i, name in enumerate(("q", "k")):
        zero = (torch.arange(200) + i) % 4 == 0
        assert (found[name][:, zero] != 0).any(), name


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (96, 192), (40, 24), (100, 130), (65, 64)])
@pytest.mark.parametrize("value_heads", [2, 6])
def test_every_size_of_a_head(value_heads, key_dim, value_dim):
    inputs = make_inputs(batch=1, seqlen=300, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim)
    # Keys of few dimensions are correlated, and these decays are weak.
    assert_accurate(inputs, 1.2 if key_dim < 64 else 1.0, **OPTIONS)


def test_packed_sequences():
    bounds = torch.tensor([0, 0, 1, 17, 17, 80, 144, 273, 400, 400])
    inputs = make_inputs(batch=1, seqlen=400, sequences=9)
    assert_accurate({**inputs, "cu_seqlens": bounds}, **OPTIONS)


def test_sequences_of_seq_idx():
    inputs = make_inputs(seqlen=300)
    seq_idx = torch.zeros(2, 300, dtype=torch.int32)
    for row, step in ((0, 5), (1, 64), (1, 130), (1, 140)):
        seq_idx[row, step:] += 1
    assert_accurate({**inputs, "seq_idx": seq_idx}, **OPTIONS)


def test_gates_whose_channels_are_apart():
    inputs = make_inputs()
    found = evaluate_on(inputs, "cuda", False, **OPTIONS)
    inputs["g"] = inputs["g"].transpose(2, 3).contiguous().transpose(2, 3)
    for name, one in evaluate_on(inputs, "cuda", False, **OPTIONS).items():
        assert torch.equal(one, found[name]), name


def test_long_sequences_of_few_heads():
    """Segments of sequences, of two rows of the batch, are scanned at the same time."""
    assert_accurate(make_inputs(batch=2, seqlen=8229, heads=1, value_heads=1), **OPTIONS)


def test_parts_of_a_small_workspace():
    """The value heads of a key head in several parts, each with its parameters of gates."""
    inputs = make_inputs(batch=2, heads=1, value_heads=4)
    whole = evaluate_on(inputs, "cuda", False, **OPTIONS)
    with debug_option("ssd_workspace_bytes", 1):
        parts = evaluate_on(inputs, "cuda", False, **OPTIONS)
    for name, one in whole.items():
        torch.testing.assert_close(parts[name], one, rtol=1e-2, atol=2e-3)


def test_repeats_have_the_same_bits():
    inputs = make_inputs(batch=4, seqlen=640)
    found = evaluate_on(inputs, "cuda", False, **OPTIONS)
    for _ in range(3):
        for name, one in evaluate_on(inputs, "cuda", False, **OPTIONS).items():
            assert torch.equal(one, found[name]), name


def test_graphs_replay_other_values():
    inputs = {name: tensor.cuda() for name, tensor in make_inputs().items()}
    delta_rule_scan(**inputs, **OPTIONS)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        found = delta_rule_scan(**inputs, **OPTIONS)
    inputs["A_log"].add_(0.5)
    inputs["k"].mul_(2)
    graph.replay()
    torch.testing.assert_close(found, delta_rule_scan(**inputs, **OPTIONS), rtol=0, atol=0)


def test_no_other_kernel_computes_norms_and_gates():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for compute capability 9.0")
    inputs = {name: tensor.cuda().requires_grad_() for name, tensor in make_inputs(value_heads=2).items()}
    out = delta_rule_scan(**inputs, **OPTIONS)
    grad = torch.ones_like(out)
    torch.autograd.grad(out, list(inputs.values()), grad, retain_graph=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(out, list(inputs.values()), grad)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    for kernel in ("chunks", "bwd_states", "bwd_chunks"):
        assert sum(f"kda_{kernel}_kernel" in name for name in names) == 1, kernel
    # The gradients of A_log and dt_bias, summed over chunks and channels, and copies of these and of the states' gradient.
    assert len([name for name in names if "kda" not in name and "Mem" not in name]) <= 6, names
