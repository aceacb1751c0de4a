"""delta_rule_scan on CUDA: the kernels of forward, beside the loop in float64 on the same rounded inputs."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from delta_rule_helpers import needs_wgmma, relative_error
from torch import Tensor

from ssm_kernels import delta_rule_scan, reference

pytestmark = pytest.mark.cuda

__all__ = ["needs_wgmma"]  # the fixture

DTYPES = [torch.bfloat16, torch.float16]
# fp16 has three more bits; its products of rounded states and corrections have those, too.
BARS = {torch.bfloat16: 3.6e-3, torch.float16: 6e-4}


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
) -> dict[str, Tensor]:
    """Normalized keys, any two of a head with about that cosine, log decays from -2 decay to 0, beta up to most_beta."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device="cuda")

    common = F.normalize(normal(1, 1, heads, key_dim), dim=-1)
    own = F.normalize(normal(batch, seqlen, heads, key_dim), dim=-1)
    found = {
        "q": F.normalize(normal(batch, seqlen, heads, key_dim), dim=-1).to(dtype),
        "k": F.normalize(cosine**0.5 * common + (1 - cosine) ** 0.5 * own, dim=-1).to(dtype),
        "v": normal(batch, seqlen, value_heads, value_dim).to(dtype),
        "beta": most_beta * uniform(batch, seqlen, value_heads),
    }
    if decay is not None:
        found["g"] = -2 * decay * uniform(batch, seqlen, value_heads)
    return found


def in_float64(inputs: dict[str, Any], **options: Any) -> tuple[Tensor, ...]:
    typed = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
    return reference.delta_rule_scan(**typed, **options, return_final_states=True)


def assert_accurate(inputs: dict[str, Any], bar: float | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    bar = BARS[inputs["v"].dtype] if bar is None else bar
    found = delta_rule_scan(**inputs, **options, return_final_states=True)
    for name, one, other in zip(("out", "final_states"), found, in_float64(inputs, **options), strict=True):
        assert one.isfinite().all(), name
        assert relative_error(one, other) < bar, name
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlen", [1, 2, 15, 16, 17, 63, 64, 65, 127, 300])
def test_every_length(seqlen, dtype):
    assert_accurate(make_inputs(2, seqlen, 2, 4, 128, 128, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_heads", [2, 4, 6])
@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(128, 128), (64, 64), (96, 192), (1, 1), (7, 5), (40, 24), (100, 130), (128, 512), (65, 64)]
)
def test_every_size_of_a_head(key_dim, value_dim, value_heads, dtype):
    inputs = make_inputs(1, 150, 2, value_heads, key_dim, value_dim, dtype=dtype)
    # Keys of few dimensions are correlated: the corrections of a chunk depend on one another.
    assert_accurate(inputs, BARS[dtype] * (1 if key_dim > 8 else 2))


def test_correlated_keys_without_decay_and_with_negative_eigenvalues():
    assert_accurate(make_inputs(2, 1024, 2, 2, 128, 128, cosine=0.9, decay=None, most_beta=2.0), 6e-3)


@pytest.mark.parametrize(("beta", "bar"), [(1.0, 2e-2), (2.0, 6e-2)])
def test_identical_keys(beta, bar):
    """Powers of A would reach 1e18 in a chunk. Each step with beta 2 reflects the state: no rounding is ever forgotten.

    With beta 1 a step adds U_t = v_t - v_(t-1), and their sum is v_t: the roundings of up to 64 terms add up, the terms cancel.
    Emulated in PyTorch, the rounding of the operands gives errors of 1.36e-2 to 1.53e-2 in four draws, 6e-3 with U in float32.
    """
    inputs = make_inputs(1, 256, 1, 1, 128, 128, decay=None)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
    inputs["beta"] = torch.full_like(inputs["beta"], beta)
    found = delta_rule_scan(**inputs)
    expected, _ = in_float64(inputs)
    assert relative_error(found, expected) < bar


@pytest.mark.parametrize("g", [-1e-4, -5.0, -30.0, -400.0, -torch.inf])
def test_any_decay(g):
    inputs = make_inputs(1, 200, 2, 2, 64, 64)
    inputs["g"] = torch.where(torch.arange(200, device="cuda")[:, None] % 3 == 0, g, inputs["g"])
    assert_accurate(inputs)


def test_initial_states():
    inputs = make_inputs(2, 130, 2, 4, 128, 96)
    inputs["initial_states"] = torch.randn(2, 4, 96, 128, device="cuda")
    assert_accurate(inputs)


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


def test_sequences_of_seq_idx():
    inputs = make_inputs(2, 300, 2, 2, 128, 64)
    seq_idx = torch.zeros(2, 300, dtype=torch.int32, device="cuda")
    for row, step in ((0, 5), (1, 64), (1, 130), (1, 140)):
        seq_idx[row, step:] += 1
    assert_accurate({**inputs, "seq_idx": seq_idx})


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
    """The gate's parameters, sigmoid of beta and norms inside."""
    inputs = make_inputs(2, 200, 2, 4, 128, 128)
    for name in ("q", "k"):
        inputs[name] = 3 * inputs[name]
    inputs["beta"] = torch.randn_like(inputs["beta"])
    inputs["g"] = torch.randn_like(inputs["g"])
    parameters = {"A_log": torch.randn(4, device="cuda"), "dt_bias": torch.randn(4, device="cuda")}
    options = {"qk_l2norm": True, "beta_sigmoid": True, "allow_neg_eigval": True}
    assert_accurate({**inputs, **parameters}, **options)
    assert_accurate({**inputs, "dt_bias": parameters["dt_bias"]}, gate_lower_bound=-5.0, **options)


@pytest.mark.parametrize("decay", [None, 0.1])
@pytest.mark.parametrize("key_dim", [64, 128, 160])
@pytest.mark.parametrize("dtype", DTYPES)
def test_beta_of_the_dtype(dtype, key_dim, decay):
    """A kernel reads beta as it is, at any stride: the bits of the same values in float32."""
    inputs = make_inputs(2, 130, 2, 4, key_dim, 64, dtype=dtype, decay=decay)
    rows = torch.full((2, 130, 9), torch.nan, dtype=dtype, device="cuda")
    rows[..., 1::2] = inputs["beta"].to(dtype)
    expected = delta_rule_scan(**{**inputs, "beta": rows[..., 1::2].float()}, return_final_states=True)
    found = delta_rule_scan(**{**inputs, "beta": rows[..., 1::2]}, return_final_states=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_slices_of_wider_tensors():
    """Rows at any column, and heads and steps at any stride: the bits of contiguous tensors."""
    inputs = make_inputs(2, 130, 2, 4, 64, 64)
    expected, states = delta_rule_scan(**inputs, return_final_states=True)
    for first in (1, 3, 8):
        wide = dict(inputs)
        for name in ("q", "k", "v"):
            tensor = inputs[name]
            memory = torch.full((*tensor.shape[:3], 80), torch.nan, dtype=tensor.dtype, device="cuda")
            wide[name] = memory[..., first : first + 64].copy_(tensor)
        found, final = delta_rule_scan(**wide, return_final_states=True)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(final, states, rtol=0, atol=0)
    by_head = dict(inputs)
    for name in ("q", "k", "v"):
        by_head[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(delta_rule_scan(**by_head), expected, rtol=0, atol=0)


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


@pytest.mark.parametrize("starts", [None, (250, 66)], ids=["whole", "seq_idx"])
def test_states_at_positions_are_final_states_of_prefixes(starts):
    inputs = make_inputs(2, 300, 2, 4, 100, 64)
    inputs["initial_states"] = torch.randn(2, 4, 64, 100, device="cuda")
    if starts is not None:  # a second sequence of each row
        inputs["seq_idx"] = (torch.arange(300) >= torch.tensor(starts)[:, None]).int().cuda()
    positions = [0, 64, 70, 299, 300]
    out, final, states = delta_rule_scan(**inputs, states_at=positions, return_final_states=True)
    expected = in_float64(inputs, states_at=positions)
    for found, wanted in zip((out, final, states), expected, strict=True):
        assert relative_error(found, wanted) < BARS[torch.bfloat16]
    assert torch.equal(states[:, 0], inputs["initial_states"]) and torch.equal(states[:, 4], final)


def test_states_at_any_address():
    """Kernels read pairs of a state's elements: the host copies states that begin at odd addresses."""
    inputs = make_inputs(2, 100, 2, 4, 64, 48)
    states, cotangent = torch.randn(2, 2, 4, 48, 64, device="cuda")

    def shifted(tensor: Tensor) -> Tensor:
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view_as(tensor)

    results = []
    for place in (torch.clone, shifted):
        leaves = [tensor.detach().requires_grad_() for tensor in (inputs["v"], place(states))]
        final = delta_rule_scan(**inputs | {"v": leaves[0]}, initial_states=leaves[1], return_final_states=True)[1]
        results.append((final, *torch.autograd.grad(final, leaves, place(cotangent))))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


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


def assert_spans_are_one_scan(inputs: dict[str, Tensor], cut: int, bounds: list[int]) -> None:
    """The scan has the bits of two calls cut there; packed sequences are those of calls of their own."""
    whole, states = delta_rule_scan(**inputs, return_final_states=True)
    first, between = delta_rule_scan(**{n: t[:, :cut] for n, t in inputs.items()}, return_final_states=True)
    second, final = delta_rule_scan(
        **{n: t[:, cut:] for n, t in inputs.items()}, initial_states=between, return_final_states=True
    )
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=0, atol=0)
    torch.testing.assert_close(final, states, rtol=0, atol=0)
    packed, packed_states = delta_rule_scan(**inputs, cu_seqlens=torch.tensor(bounds, device="cuda"), return_final_states=True)
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        alone = {name: tensor[:, begin:end] for name, tensor in inputs.items()}
        out_alone, states_alone = delta_rule_scan(**alone, return_final_states=True)
        assert relative_error(packed[:, begin:end], out_alone.double()) < 6e-3
        assert relative_error(packed_states[i], states_alone[0].double()) < 6e-3


def test_spans_of_a_limited_workspace():
    """96 heads: the matrices of 69,888 steps fill the workspace. The rest is a second launch, from the states of the first."""
    assert_spans_are_one_scan(make_inputs(1, 70000, 1, 96, 16, 16), 69888, [0, 10, 69000, 69950, 70000])


def assert_graph_replays_other_lengths(inputs: dict[str, Tensor]) -> None:
    """Inputs have 200 steps."""
    cu_seqlens = torch.tensor([0, 30, 200], device="cuda")
    delta_rule_scan(**inputs, cu_seqlens=cu_seqlens)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        found = delta_rule_scan(**inputs, cu_seqlens=cu_seqlens)
    cu_seqlens.copy_(torch.tensor([0, 111, 200]))
    graph.replay()
    torch.testing.assert_close(found, delta_rule_scan(**inputs, cu_seqlens=cu_seqlens), rtol=0, atol=0)


@pytest.mark.usefixtures("needs_wgmma")
def test_graphs_replay_other_lengths():
    assert_graph_replays_other_lengths(make_inputs(1, 200, 2, 2, 64, 64))


@pytest.mark.usefixtures("needs_wgmma")
def test_kernels_run_by_name():
    """One kernel for the inverses and one for the scan, and none of a fallback's matrix products."""
    inputs = make_inputs(1, 200, 2, 2, 64, 64)
    delta_rule_scan(**inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        delta_rule_scan(**inputs)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    for kernel in ("delta_rule_chunk_matrices", "delta_rule_fwd"):
        assert sum(kernel in name for name in names) == 1
    assert not [name for name in names if re.search("gemm|cutlass|bmm", name)]
