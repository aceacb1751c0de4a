"""delta_rule_scan on CUDA by mma.sync: forward and backward, beside float64 on the CPU of the same rounded inputs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from delta_rule_helpers import evaluate_on, relative_error
from helpers import debug_option
from test_delta_rule_cuda_bwd import BARS as BARS_OF_16_BITS
from test_delta_rule_cuda_bwd import make_inputs
from torch import Tensor

from ssm_kernels import delta_rule_scan

pytestmark = pytest.mark.cuda

BARS = BARS_OF_16_BITS | {torch.float32: 1e-6}
DTYPES = list(BARS)
# One number a step and head, of calls with few heads: their errors do not average.
FEW = ("beta", "g")


@pytest.fixture(autouse=True)
def takes_mma() -> Iterator[None]:
    with debug_option("delta_rule_mma", "mma"):
        yield


def assert_accurate(
    inputs: dict[str, Any], factor: float = 1, factors: dict[str, float] | None = None, **options: Any
) -> dict[str, Tensor]:
    """``factor`` and ``factors`` times the bars of the dtype."""
    bar = BARS[inputs["v"].dtype]
    found, expected = evaluate_on(inputs, "cuda", False, **options), evaluate_on(inputs, "cpu", True, **options)
    for name, one in found.items():
        assert one.isfinite().all(), name
        assert relative_error(one, expected[name]) < (factors or {}).get(name, factor) * bar, name
    return found


def names_of_kernels(inputs: dict[str, Tensor], **options: Any) -> list[str]:
    moved = {name: tensor.cuda() for name, tensor in inputs.items()}
    moved["v"].requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        delta_rule_scan(**moved, **options).sum().backward()
        torch.cuda.synchronize()
    return [re.sub(r"\W+", " ", event.name) for event in profile.events() if "delta_rule" in event.name]


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_run_by_name(dtype):
    names = names_of_kernels(make_inputs(1, 70, 2, 2, 64, 64, dtype=dtype))
    for kernel, count in (("matrices", 2), ("states", 3), ("gradients", 1)):
        assert sum(f"delta_rule_sm80_{kernel}" in name for name in names) == count, names


def test_float32_takes_the_kernels_by_default():
    with debug_option("delta_rule_mma", "wgmma"):
        names = names_of_kernels(make_inputs(1, 70, 2, 2, 64, 64, dtype=torch.float32))
    assert any("delta_rule_sm80_gradients" in name for name in names), names


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlen", [1, 2, 15, 17, 63, 64, 65, 127, 300])
def test_every_length(seqlen, dtype):
    assert_accurate(make_inputs(2, seqlen, 2, 4, 128, 128, dtype=dtype), factors=dict.fromkeys(FEW, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_heads", [2, 6])
@pytest.mark.parametrize(
    ("key_dim", "value_dim"),
    [
        (128, 128),
        (64, 64),
        (96, 192),
        (1, 1),
        (7, 5),
        (40, 24),
        (100, 130),
        (128, 320),
        (65, 64),
        (131, 5),
        (200, 72),
        (256, 128),
    ],
)
def test_every_size_of_a_head(key_dim, value_dim, value_heads, dtype):
    inputs = make_inputs(1, 150, 2, value_heads, key_dim, value_dim, dtype=dtype)
    # Keys of few dimensions are correlated: the corrections of a chunk depend on one another. Few values: no sums over columns.
    is_narrow = min(key_dim, value_dim) < 8
    few = dict.fromkeys(FEW, 4 if is_narrow else 2)
    if (key_dim, value_heads) == (256, 2):
        # The terms of g's gradient nearly cancel: emulated in PyTorch, the rounding of states and their gradients alone gives
        # 9.0e-3, where other sizes have 2.5e-3 to 4.1e-3.
        few["g"] = 4
    assert_accurate(inputs, 4 if is_narrow else 1, few)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most_beta", [1.0, 2.0])
def test_correlated_keys_without_decay(most_beta, dtype):
    inputs = make_inputs(2, 512, 2, 2, 128, 128, dtype=dtype, cosine=0.9, decay=None, most_beta=most_beta)
    assert_accurate(inputs, 1.75, {"beta": 3})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("g", [-1e-4, -5.0, -30.0, -400.0, -torch.inf])
def test_any_decay(g, dtype):
    """Float16 has no number as small as e^-30, by which the gradient of the first state decays."""
    inputs = make_inputs(1, 200, 2, 2, 64, 64, dtype=dtype)
    inputs["g"] = torch.where(torch.arange(200)[:, None] % 3 == 0, g, inputs["g"])
    found = assert_accurate(inputs, factors=dict.fromkeys(FEW, 2))
    if g < -100:
        assert (found["g"][:, ::3] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_sequences_are_those_alone(dtype):
    """Empty ones, at the ends too, keep their initial states. NaN of a sequence does not reach the others."""
    bounds = [0, 0, 1, 17, 17, 80, 144, 273, 400, 400]
    inputs = make_inputs(1, 400, 2, 4, 128, 128, dtype=dtype, sequences=9)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    found = assert_accurate({**inputs, "cu_seqlens": cu_seqlens}, factors=dict.fromkeys(FEW, 2))
    on_gpu = {name: tensor.cuda() for name, tensor in inputs.items()}
    states = on_gpu.pop("initial_states")
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        alone = {name: tensor[:, begin:end] for name, tensor in on_gpu.items()}
        out, final = delta_rule_scan(**alone, initial_states=states[i : i + 1], return_final_states=True)
        assert torch.equal(found["out"][:, begin:end], out)
        assert torch.equal(found["final_states"][i : i + 1], final)
    poisoned = {name: tensor.clone() for name, tensor in on_gpu.items()}
    for tensor in poisoned.values():
        tensor[:, 144:273] = torch.nan
    out = delta_rule_scan(**poisoned, initial_states=states, cu_seqlens=cu_seqlens.cuda())
    assert torch.equal(out[:, :144], found["out"][:, :144])
    assert torch.equal(out[:, 273:], found["out"][:, 273:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_of_seq_idx(dtype):
    seq_idx = torch.zeros(2, 300, dtype=torch.int32)
    for row, step in ((0, 5), (1, 64), (1, 130), (1, 140)):
        seq_idx[row, step:] += 1
    inputs = make_inputs(2, 300, 2, 2, 128, 64, dtype=dtype)
    assert_accurate({**inputs, "seq_idx": seq_idx}, factors=dict.fromkeys(FEW, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_options_inside(dtype):
    """The gate's parameters, sigmoid of beta and norms inside. Gradients of a few parameters cancel in their sums."""
    inputs = make_inputs(2, 200, 2, 4, 128, 128, dtype=dtype)
    for name in ("q", "k"):
        inputs[name] = 3 * inputs[name]
    normal = torch.Generator().manual_seed(2)
    inputs |= {name: torch.randn(inputs["beta"].shape, generator=normal) for name in ("beta", "g")}
    inputs |= {name: torch.randn(4, generator=normal) for name in ("A_log", "dt_bias")}
    few = {"g": 3, "beta": 3, "A_log": 8, "dt_bias": 8}
    assert_accurate(inputs, 1.5, few, qk_l2norm=True, beta_sigmoid=True, allow_neg_eigval=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"reverse": True}, {"num_householder": 2}], ids=["reverse", "updates"])
def test_other_orders_of_steps(options, dtype):
    inputs = make_inputs(2, 200, 2, 4, 64, 64, dtype=dtype)
    if "num_householder" in options:
        inputs |= {name: inputs[name][:, :100] for name in ("q", "g")}
    assert_accurate(inputs, factors=dict.fromkeys(FEW, 2), **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_at_positions(dtype):
    inputs = {name: tensor.cuda() for name, tensor in make_inputs(2, 300, 2, 4, 100, 64, dtype=dtype).items()}
    positions = [0, 64, 70, 299, 300]
    found = delta_rule_scan(**inputs, states_at=positions, return_final_states=True)
    expected = delta_rule_scan(
        **{name: tensor.double().cpu() for name, tensor in inputs.items()}, states_at=positions, return_final_states=True
    )
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < BARS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_the_workspace_and_little_shared_memory(dtype):
    """Calls whose workspace is large run in parts, and blocks take half of their values where shared memory is small."""
    inputs = make_inputs(3, 150, 2, 6, 64, 128, dtype=dtype)
    whole = evaluate_on(inputs, "cuda", False)
    with debug_option("ssd_workspace_bytes", 1):
        parts = evaluate_on(inputs, "cuda", False)
    with debug_option("delta_rule_shared_bytes", 99 * 1024):
        small = evaluate_on(inputs, "cuda", False)
    for name, expected in whole.items():
        assert relative_error(parts[name], expected.double().cpu()) < 3 * BARS[dtype], name
        assert relative_error(small[name], expected.double().cpu()) < 3 * BARS[dtype], name


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeats_and_batches_have_the_same_bits(dtype):
    inputs = {name: tensor.cuda() for name, tensor in make_inputs(20, 200, 4, 8, 128, 128, dtype=dtype).items()}
    out, states = delta_rule_scan(**inputs, return_final_states=True)
    for _ in range(3):
        again = delta_rule_scan(**inputs, return_final_states=True)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], states)
    row = {name: tensor[7:8] for name, tensor in inputs.items()}
    assert torch.equal(delta_rule_scan(**row), out[7:8])
