"""delta_rule_scan on CUDA with norms, gates and sigmoids inside: forward and gradients, beside float64 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from delta_rule_helpers import evaluate_on, relative_error
from helpers import debug_option
from torch import Tensor

from ssm_kernels import delta_rule_scan

pytestmark = pytest.mark.cuda

# Relative errors of the output and of gradients. fp16 has three more bits.
OUT_BARS = {torch.bfloat16: 3.5e-3, torch.float16: 6e-4}
BARS = {torch.bfloat16: 4e-3, torch.float16: 8e-4}
# Gradients of a number a step and head, or a head: the errors of the sums that a head shares do not average over the few heads
# of these calls. On an H200, one head alone had an error of 1.05e-2 in A_log, 2 rows of 2 heads 6e-3, and 2 heads of 300 steps
# with key_dim 100 and value_dim 130 an error of 8.7e-3 in g.
FEW_SUMS = {"beta": 1.5, "g": 3.0, "A_log": 5.0, "dt_bias": 5.0}  # times the bar
OPTIONS = {"qk_l2norm": True, "beta_sigmoid": True}
SIZES = [(64, 64), (96, 192), (40, 24), (100, 130), (65, 64)]
every_gate = pytest.mark.parametrize("gate", ["head", "channel"])


def make_inputs(
    gate: str = "head",
    batch: int = 2,
    seqlen: int = 200,
    heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 128,
    value_dim: int = 128,
    *,
    dtype: torch.dtype = torch.bfloat16,
    parameter_dtype: torch.dtype = torch.float32,
    sequences: int | None = None,
) -> dict[str, Tensor]:
    """Rows of q and k of lengths from 0.1 to 10, raw gates, of heads or of channels of the key, and betas."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def rows() -> Tensor:
        lengths = 10 ** (2 * torch.rand(batch, seqlen, heads, 1, generator=generator) - 1)
        return (lengths * normal(batch, seqlen, heads, key_dim) * key_dim**-0.5).to(dtype)

    found = {
        "q": rows(),
        "k": rows(),
        "v": normal(batch, seqlen, value_heads, value_dim).to(dtype),
        "beta": normal(batch, seqlen, value_heads).to(parameter_dtype),
        "g": normal(batch, seqlen, value_heads).to(parameter_dtype),
        "A_log": 0.5 * normal(value_heads),
        "dt_bias": -3 + normal(value_heads),
        "initial_states": 0.3 * normal(sequences or batch, value_heads, value_dim, key_dim),
    }
    if gate == "channel":
        generator.manual_seed(2)
        found["g"] = normal(batch, seqlen, value_heads, key_dim).to(parameter_dtype)
        found["dt_bias"] = -3 + normal(value_heads, key_dim)
    return found


def assert_accurate(inputs: dict[str, Any], factor: float = 1.0, **options: Any) -> dict[str, Tensor]:
    """Bars are times `factor`."""
    dtype = inputs["v"].dtype
    found, expected = evaluate_on(inputs, "cuda", False, **options), evaluate_on(inputs, "cpu", True, **options)
    for name, one in found.items():
        bar = (OUT_BARS if name in ("out", "final_states") else BARS)[dtype]
        assert one.isfinite().all(), name
        assert relative_error(one, expected[name]) < factor * FEW_SUMS.get(name, 1.0) * bar, name
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value_heads", [2, 4])
@every_gate
def test_norms_and_gates(value_heads, dtype, gate):
    assert_accurate(make_inputs(gate, value_heads=value_heads, seqlen=512, dtype=dtype), **OPTIONS)


@every_gate
def test_bounded_gates_and_negative_eigenvalues(gate):
    inputs = make_inputs(gate, seqlen=512)
    assert_accurate(inputs, gate_lower_bound=-5.0, allow_neg_eigval=True, **OPTIONS)
    del inputs["A_log"]
    assert_accurate(inputs, gate_lower_bound=-5.0, allow_neg_eigval=True, **OPTIONS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_gate
def test_parameters_of_the_dtype(dtype, gate):
    """g and beta have the dtype of q, and so have their gradients: those are rounded once."""
    assert_accurate(make_inputs(gate, seqlen=300, dtype=dtype, parameter_dtype=dtype), **OPTIONS)


@pytest.mark.parametrize("asked", ["norm", "gate", "sigmoid"])
@every_gate
def test_one_option_alone(asked, gate):
    inputs = make_inputs(gate, seqlen=300)
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
@every_gate
def test_rows_of_any_length(dtype, gate):
    """A row of length 0 has a gradient a thousand times the normalized row's. Others have lengths near the root of 1e-6."""
    inputs = make_inputs(gate, dtype=dtype)
    scales = torch.tensor([0.0, 1e-3, 1.0, 30.0])
    for i, name in enumerate(("q", "k")):
        inputs[name] = (inputs[name].float() * scales[(torch.arange(200) + i) % 4][:, None, None]).to(dtype)
    found = assert_accurate(inputs, **OPTIONS)
    for i, name in enumerate(("q", "k")):
        zero = (torch.arange(200) + i) % 4 == 0
        assert (found[name][:, zero] != 0).any(), name


@pytest.mark.parametrize(
    ("gate", "key_dim", "value_dim"),
    [*(("head", *sizes) for sizes in [*SIZES, (256, 128), (150, 64)]), *(("channel", *sizes) for sizes in SIZES)],
)
@pytest.mark.parametrize("value_heads", [2, 6])
def test_every_size_of_a_head(value_heads, gate, key_dim, value_dim):
    inputs = make_inputs(gate, batch=1, seqlen=300, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim)
    # Keys of few dimensions are correlated, and these decays are weak: 3.7e-3 in out with 40 columns.
    assert_accurate(inputs, 1.2 if key_dim < 64 else 1.0, **OPTIONS)


@every_gate
def test_packed_sequences(gate):
    bounds = torch.tensor([0, 0, 1, 17, 17, 80, 144, 273, 400, 400])
    inputs = make_inputs(gate, batch=1, seqlen=400, sequences=9)
    assert_accurate({**inputs, "cu_seqlens": bounds}, **OPTIONS)


@every_gate
def test_sequences_of_seq_idx(gate):
    inputs = make_inputs(gate, seqlen=300)
    seq_idx = torch.zeros(2, 300, dtype=torch.int32)
    for row, step in ((0, 5), (1, 64), (1, 130), (1, 140)):
        seq_idx[row, step:] += 1
    assert_accurate({**inputs, "seq_idx": seq_idx}, **OPTIONS)


def test_states_at_positions():
    inputs = {name: tensor.cuda() for name, tensor in make_inputs(seqlen=300).items()}
    _, final, states = delta_rule_scan(**inputs, **OPTIONS, states_at=[70, 300], return_final_states=True)
    del inputs["initial_states"]
    begun = make_inputs(seqlen=300)["initial_states"].cuda()
    parts = {name: tensor[:, :70] if tensor.dim() > 1 else tensor for name, tensor in inputs.items()}
    _, between = delta_rule_scan(**parts, **OPTIONS, initial_states=begun, return_final_states=True)
    assert torch.equal(states[:, 0], between)
    assert torch.equal(states[:, 1], final)


def test_long_sequences_of_few_heads():
    """Segments of a sequence are scanned at the same time."""
    inputs = make_inputs(batch=2, seqlen=8229, heads=1, value_heads=2)
    found = delta_rule_scan(**{name: tensor.cuda() for name, tensor in inputs.items()}, **OPTIONS, return_final_states=True)
    expected = delta_rule_scan(
        **{name: tensor.double() for name, tensor in inputs.items()}, **OPTIONS, return_final_states=True
    )
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 4e-3


def test_long_sequences_of_few_heads_with_gates_of_channels():
    """Segments of sequences, of two rows of the batch, are scanned at the same time."""
    assert_accurate(make_inputs("channel", batch=2, seqlen=8229, heads=1, value_heads=1), **OPTIONS)


def test_gates_whose_channels_are_apart():
    inputs = make_inputs("channel")
    found = evaluate_on(inputs, "cuda", False, **OPTIONS)
    inputs["g"] = inputs["g"].transpose(2, 3).contiguous().transpose(2, 3)
    for name, one in evaluate_on(inputs, "cuda", False, **OPTIONS).items():
        assert torch.equal(one, found[name]), name


@every_gate
def test_parts_of_a_small_workspace(gate):
    """The value heads of a key head in several parts, each with its parameters of gates, whose sums are float32."""
    inputs = make_inputs(gate, batch=2, heads=1, value_heads=4)
    whole = evaluate_on(inputs, "cuda", False, **OPTIONS)
    with debug_option("ssd_workspace_bytes", 1):
        parts = evaluate_on(inputs, "cuda", False, **OPTIONS)
    for name, one in whole.items():
        torch.testing.assert_close(parts[name], one, rtol=1e-2, atol=2e-3)


@every_gate
def test_repeats_have_the_same_bits(gate):
    inputs = make_inputs(gate, batch=4, seqlen=640)
    found = evaluate_on(inputs, "cuda", False, **OPTIONS)
    for _ in range(3):
        for name, one in evaluate_on(inputs, "cuda", False, **OPTIONS).items():
            assert torch.equal(one, found[name]), name


@every_gate
def test_graphs_replay_other_values(gate):
    inputs = {name: tensor.cuda() for name, tensor in make_inputs(gate).items()}
    delta_rule_scan(**inputs, **OPTIONS)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        found = delta_rule_scan(**inputs, **OPTIONS)
    inputs["A_log"].add_(0.5)
    inputs["k"].mul_(2)
    graph.replay()
    torch.testing.assert_close(found, delta_rule_scan(**inputs, **OPTIONS), rtol=0, atol=0)


def test_one_kernel_makes_factors_and_one_their_gradients():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for compute capability 9.0")
    inputs = {name: tensor.cuda().requires_grad_() for name, tensor in make_inputs().items()}
    out = delta_rule_scan(**inputs, **OPTIONS)
    torch.autograd.grad(out.sum(), list(inputs.values()), retain_graph=True)
    grad = torch.ones_like(out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(out, list(inputs.values()), grad)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    for kernel in ("factors", "bwd_matrices", "bwd_states", "bwd_chunks", "gate_grads"):
        assert sum(f"delta_rule_{kernel}" in name for name in names) == 1, kernel
    # A sum, two copies of it, and a copy of the initial state's gradient.
    assert len([name for name in names if "delta_rule" not in name and "Mem" not in name]) <= 4


def test_no_other_kernel_computes_norms_and_gates_of_channels():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for compute capability 9.0")
    inputs = {name: tensor.cuda().requires_grad_() for name, tensor in make_inputs("channel", value_heads=2).items()}
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
