"""delta_rule_scan on CUDA with a gate per channel of the key: the kernels of forward, beside the loop in float64."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import test_delta_rule_cuda as per_head
import torch
from delta_rule_helpers import needs_wgmma, relative_error
from test_delta_rule_cuda import (
    BARS,
    DTYPES,
    assert_accurate,
    assert_graph_replays_other_lengths,
    assert_spans_are_one_scan,
    in_float64,
)
from torch import Tensor

from ssm_kernels import delta_rule_scan

pytestmark = pytest.mark.cuda

__all__ = ["needs_wgmma"]  # the fixture


def make_inputs(
    batch: int, seqlen: int, heads: int, value_heads: int, key_dim: int, value_dim: int, *, decay: float = 0.1, **options: Any
) -> dict[str, Tensor]:
    """As with a gate per head, and log decays of all channels from -2 decay to 0."""
    inputs = per_head.make_inputs(batch, seqlen, heads, value_heads, key_dim, value_dim, **options)
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (batch, seqlen, value_heads, key_dim)
    inputs["g"] = -2 * decay * torch.rand(shape, generator=generator, device="cuda")
    return inputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlen", [1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 127, 300])
def test_every_length(seqlen, dtype):
    assert_accurate(make_inputs(2, seqlen, 2, 4, 128, 128, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_heads", [2, 6])
@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(128, 128), (64, 64), (96, 192), (1, 1), (7, 5), (40, 24), (100, 130), (128, 320), (65, 64)]
)
def test_every_size_of_a_head(key_dim, value_dim, value_heads, dtype):
    inputs = make_inputs(1, 150, 2, value_heads, key_dim, value_dim, dtype=dtype)
    # Keys of few dimensions are correlated: the corrections of a chunk depend on one another.
    assert_accurate(inputs, BARS[dtype] * (1 if key_dim > 8 else 4))


def test_correlated_keys_with_negative_eigenvalues():
    assert_accurate(make_inputs(2, 512, 2, 2, 128, 128, cosine=0.9, decay=1e-5, most_beta=2.0), 6e-3)


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_identical_keys(beta):
    inputs = make_inputs(1, 256, 1, 1, 128, 128, cosine=1.0, decay=1e-5)
    inputs["beta"] = torch.full_like(inputs["beta"], beta)
    # Beside the roundings of a gate per head, those of the keys times their decays, which no step forgets with beta = 2.
    assert_accurate(inputs, 2e-2 if beta == 1 else 8e-2)


@pytest.mark.parametrize("g", [-1e-4, -5.0, -30.0, -400.0, -torch.inf])
@pytest.mark.parametrize("part", ["steps", "channels", "all"])
def test_any_decay(part, g):
    """Some steps, some channels of some steps, or all of a hundred steps."""
    inputs = make_inputs(1, 200, 2, 2, 128, 64)
    steps, channels = torch.arange(200, device="cuda")[:, None, None], torch.arange(128, device="cuda")
    chosen = {"steps": steps % 3 == 0, "channels": (steps + channels) % 3 == 0, "all": (steps >= 70) & (steps < 170)}[part]
    inputs["g"] = torch.where(chosen, g, inputs["g"])
    inputs["initial_states"] = torch.randn(1, 2, 64, 128, device="cuda")
    assert_accurate(inputs)


def test_strong_decays():
    """Their sums over 16 steps exceed the exponents of float32."""
    assert_accurate(make_inputs(1, 300, 2, 2, 128, 128, decay=6.0))


def test_one_gate_for_all_channels_is_a_gate_per_head():
    inputs = make_inputs(2, 200, 2, 4, 128, 128)
    per_channel = {**inputs, "g": inputs["g"][..., :1].expand(-1, -1, -1, 128)}
    found = delta_rule_scan(**per_channel, return_final_states=True)
    expected = delta_rule_scan(**{**inputs, "g": inputs["g"][..., 0]}, return_final_states=True)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other.double()) < 5e-3


def test_packed_sequences_are_those_alone():
    """Empty ones, at the ends too, keep their initial states. NaN of a sequence does not reach the others."""
    bounds = [0, 0, 1, 17, 17, 80, 144, 273, 400, 400]
    inputs = make_inputs(1, 400, 2, 4, 128, 128)
    inputs["initial_states"] = torch.randn(9, 4, 128, 128, device="cuda")
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    out, states = assert_accurate({**inputs, "cu_seqlens": cu_seqlens})
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        alone = {name: tensor[:, begin:end] for name, tensor in inputs.items() if name != "initial_states"}
        alone["initial_states"] = inputs["initial_states"][i : i + 1]
        out_alone, states_alone = delta_rule_scan(**alone, return_final_states=True)
        torch.testing.assert_close(out[:, begin:end], out_alone, rtol=0, atol=0)
        torch.testing.assert_close(states[i : i + 1], states_alone, rtol=0, atol=0)
    poisoned = {name: tensor.clone() for name, tensor in inputs.items()}
    for name in ("q", "k", "v", "beta", "g"):
        poisoned[name][:, 144:273] = torch.nan
    found = delta_rule_scan(**poisoned, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(found[:, :144], out[:, :144], rtol=0, atol=0)
    torch.testing.assert_close(found[:, 273:], out[:, 273:], rtol=0, atol=0)


def test_sequences_of_seq_idx_are_those_alone():
    """They begin anywhere in a chunk, or with one, which NaN of the sequence before does not reach."""
    inputs = make_inputs(2, 300, 2, 4, 128, 64)
    inputs["initial_states"] = torch.randn(2, 4, 64, 128, device="cuda")
    seq_idx = torch.zeros(2, 300, dtype=torch.int32, device="cuda")
    for row, step in ((0, 5), (1, 64), (1, 130), (1, 131), (1, 140)):
        seq_idx[row, step:] += 1
    out, _ = assert_accurate({**inputs, "seq_idx": seq_idx})
    for name in ("q", "k", "v", "beta", "g"):
        inputs[name] = inputs[name].clone()
        inputs[name][1, :64] = torch.nan
    found = delta_rule_scan(**inputs, seq_idx=seq_idx)
    assert torch.equal(found[0], out[0]) and torch.equal(found[1, 64:], out[1, 64:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key_dim", [128, 100])
def test_gates_at_any_address(key_dim, dtype):
    """The first kernel loads gates as vectors if all rows begin at 16 bytes, else one by one. Both give the same bits."""
    inputs = make_inputs(3, 333, 2, 6, key_dim, 128, dtype=dtype)
    shifted = torch.cat([inputs["g"].new_zeros(1), inputs["g"].flatten()])[1:].view_as(inputs["g"])
    packed = {name: tensor.flatten(0, 1)[None] for name, tensor in inputs.items()}
    packed["cu_seqlens"] = torch.tensor([0, 1, 65, 65, 400, 999], device="cuda")
    for call, gates in ((inputs, shifted), (packed, shifted.flatten(0, 1)[None])):
        found = delta_rule_scan(**call, return_final_states=True)
        expected = delta_rule_scan(**call | {"g": gates}, return_final_states=True)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def test_split_anywhere_is_whole():
    inputs = make_inputs(2, 257, 2, 4, 128, 128)
    whole, states = delta_rule_scan(**inputs, return_final_states=True)
    for cut in (1, 63, 64, 100, 256):
        first, between = delta_rule_scan(**{n: t[:, :cut] for n, t in inputs.items()}, return_final_states=True)
        second, final = delta_rule_scan(
            **{n: t[:, cut:] for n, t in inputs.items()}, initial_states=between, return_final_states=True
        )
        assert relative_error(torch.cat([first, second], 1), whole.double()) < 4e-3
        assert relative_error(final, states.double()) < 4e-3


def test_options_inside():
    """The gate's parameters, sigmoid of beta and norms, which the kernels compute as they read."""
    inputs = make_inputs(2, 200, 2, 4, 128, 128)
    for name in ("q", "k"):
        inputs[name] = 3 * inputs[name]
    inputs["beta"] = torch.randn_like(inputs["beta"])
    inputs["g"] = torch.randn_like(inputs["g"])
    parameters = {"A_log": torch.randn(4, device="cuda"), "dt_bias": torch.randn(4, 128, device="cuda")}
    options = {"qk_l2norm": True, "beta_sigmoid": True, "allow_neg_eigval": True}
    assert_accurate({**inputs, **parameters}, **options)
    assert_accurate({**inputs, "dt_bias": parameters["dt_bias"]}, gate_lower_bound=-5.0, **options)
    assert_accurate({**inputs, **parameters, "g": inputs["g"].bfloat16()}, **options)


def test_tensors_at_any_stride():
    """The bits of contiguous tensors."""
    inputs = make_inputs(2, 130, 2, 4, 64, 64)
    expected, states = delta_rule_scan(**inputs, return_final_states=True)
    for first in (1, 3, 8):
        wide = dict(inputs)
        for name in ("q", "k", "v", "g"):
            tensor = inputs[name]
            memory = torch.full((*tensor.shape[:3], 80), torch.nan, dtype=tensor.dtype, device="cuda")
            wide[name] = memory[..., first : first + 64].copy_(tensor)
        found, final = delta_rule_scan(**wide, return_final_states=True)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(final, states, rtol=0, atol=0)
    for axes in ((1, 2), (2, 3)):
        moved = {name: inputs[name].transpose(*axes).contiguous().transpose(*axes) for name in ("q", "k", "v", "g")}
        torch.testing.assert_close(delta_rule_scan(**inputs | moved), expected, rtol=0, atol=0)


def test_repeats_and_batches_have_the_same_bits():
    """Also where blocks share a head's chunks: 160 heads in all."""
    inputs = make_inputs(20, 640, 4, 8, 128, 128)
    out, states = delta_rule_scan(**inputs, return_final_states=True)
    for _ in range(5):
        again, states_again = delta_rule_scan(**inputs, return_final_states=True)
        assert torch.equal(again, out)
        assert torch.equal(states_again, states)
    row = {name: tensor[7:8] for name, tensor in inputs.items()}
    assert torch.equal(delta_rule_scan(**row), out[7:8])


def test_states_at_positions_are_final_states_of_prefixes():
    inputs = make_inputs(2, 300, 2, 4, 100, 64)
    inputs["initial_states"] = torch.randn(2, 4, 64, 100, device="cuda")
    positions = [0, 64, 70, 299, 300]
    out, final, states = delta_rule_scan(**inputs, states_at=positions, return_final_states=True)
    expected = in_float64(inputs, states_at=positions)
    for found, wanted in zip((out, final, states), expected, strict=True):
        assert relative_error(found, wanted) < BARS[torch.bfloat16]
    assert torch.equal(states[:, 0], inputs["initial_states"]) and torch.equal(states[:, 4], final)


@pytest.mark.parametrize("decay", [0.1, 0.002])
@pytest.mark.parametrize(("batch", "value_dim"), [(1, 128), (2, 72)])
def test_long_sequences_of_few_heads(batch, value_dim, decay):
    """Blocks take segments of a sequence, whose maps of the state are folded."""
    inputs = make_inputs(batch, 8229, 1, 2, 128, value_dim, decay=decay)
    inputs["initial_states"] = torch.randn(batch, 2, value_dim, 128, device="cuda")
    assert_accurate(inputs, 4e-3)
    # Strides that do not allow a view as one sequence: no segments.
    apart = {name: torch.stack([tensor, tensor], 1)[:, 0] for name, tensor in inputs.items()}
    whole, states = delta_rule_scan(**inputs, return_final_states=True)
    found, final = delta_rule_scan(**apart, return_final_states=True)
    assert relative_error(found, whole.double()) < 6e-3
    assert relative_error(final, states.double()) < 6e-3


@pytest.mark.usefixtures("needs_wgmma")
def test_segments_run_by_name():
    """The kernel of the chunks' operands, two scans, of maps and of outputs, and the fold between them."""
    inputs = make_inputs(1, 16384, 1, 2, 128, 128)
    delta_rule_scan(**inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        delta_rule_scan(**inputs)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    for kernel, count in (("kda_chunks", 1), ("kda_fwd", 2), ("delta_rule_fold", 1)):
        assert sum(kernel in name for name in names) == count, kernel


def test_spans_of_a_limited_workspace():
    """The operands of 31,488 steps of 32 heads fill the workspace. The rest is a second launch."""
    cut = 16000  # a multiple of a chunk: no other rounding
    assert_spans_are_one_scan(make_inputs(1, 32000, 1, 32, 16, 16), cut, [0, 10, 31000, 31950, 32000])


@pytest.mark.usefixtures("needs_wgmma")
def test_graphs_replay_other_lengths():
    assert_graph_replays_other_lengths(make_inputs(1, 200, 2, 2, 64, 64))


@pytest.mark.usefixtures("needs_wgmma")
def test_kernels_run_by_name():
    """One kernel for the chunks' operands and one for the scan, and none of a fallback's matrix products."""
    inputs = make_inputs(1, 200, 2, 2, 64, 64)
    delta_rule_scan(**inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        delta_rule_scan(**inputs)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    for kernel in ("kda_chunks", "kda_fwd"):
        assert sum(kernel in name for name in names) == 1
    assert not [name for name in names if re.search("gemm|cutlass|bmm", name)]
