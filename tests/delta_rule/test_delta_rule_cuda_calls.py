"""delta_rule_scan on CUDA: several updates a step, reverse scans and both forms of sequences, beside float64 on the CPU."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from delta_rule_helpers import evaluate_on, needs_wgmma, relative_error
from torch import Tensor

from ssm_kernels import delta_rule_scan

pytestmark = pytest.mark.cuda

__all__ = ["needs_wgmma"]  # the fixture

DTYPES = [torch.bfloat16, torch.float16]
# Relative errors of results and gradients. Gates and betas have one number a step and head, whose errors average less.
BARS = {torch.bfloat16: 4e-3, torch.float16: 8e-4}
FEW_SUMS = 2


def make_inputs(
    batch: int,
    seqlen: int,
    heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    updates: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    has_gate: bool = True,
    most_beta: float = 1.0,
    sequences: int | None = None,
) -> dict[str, Tensor]:
    """Normalized keys and queries, log decays from -0.2 to 0, and initial states."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    steps = updates * seqlen
    found = {
        "q": F.normalize(normal(batch, seqlen, heads, key_dim), dim=-1).to(dtype),
        "k": F.normalize(normal(batch, steps, heads, key_dim), dim=-1).to(dtype),
        "v": normal(batch, steps, value_heads, value_dim).to(dtype),
        "beta": most_beta * torch.rand(batch, steps, value_heads, generator=generator),
        "initial_states": 0.3 * normal(sequences or batch, value_heads, value_dim, key_dim),
    }
    if has_gate:
        found["g"] = -0.2 * torch.rand(batch, seqlen, value_heads, generator=generator)
    return found


def assert_accurate(inputs: dict[str, Any], bar: float | None = None, **options: Any) -> dict[str, Tensor]:
    bar = BARS[inputs["v"].dtype] if bar is None else bar
    found, expected = (
        evaluate_on(inputs, "cuda", False, **options),
        evaluate_on(inputs, "cpu", True, **options),
    )
    for name, tensor in found.items():
        assert tensor.isfinite().all(), name
        assert relative_error(tensor, expected[name]) < bar * (FEW_SUMS if name in ("g", "beta") else 1), name
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("updates", [2, 3, 4])
@pytest.mark.parametrize("seqlen", [1, 15, 32, 33, 64, 65, 150])
def test_updates_of_every_length(seqlen, updates, dtype):
    few = 2 if seqlen == 1 else 1
    assert_accurate(
        make_inputs(2, seqlen, 2, 4, 128, 128, updates=updates, dtype=dtype), few * BARS[dtype], num_householder=updates
    )


@pytest.mark.parametrize("updates", [2, 3])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (96, 192), (40, 24), (100, 130)])
@pytest.mark.parametrize(("heads", "value_heads"), [(2, 2), (2, 6)])
def test_updates_of_every_size_of_a_head(key_dim, value_dim, heads, value_heads, updates):
    inputs = make_inputs(1, 75, heads, value_heads, key_dim, value_dim, updates=updates)
    assert_accurate(inputs, num_householder=updates)


@pytest.mark.parametrize("has_gate", [False, True])
def test_updates_with_negative_eigenvalues(has_gate):
    """600 updates that forget no rounding: PyTorch emulates 6.2e-3 to 6.5e-3 for the gradient of the initial states."""
    inputs = make_inputs(2, 300, 2, 2, 128, 128, updates=2, has_gate=has_gate, most_beta=2.0)
    assert_accurate(inputs, 6e-3 if has_gate else 7e-3, num_householder=2)


@pytest.mark.parametrize("updates", [2, 3, 4, 16])
def test_updates_are_ordinary_steps(updates):
    """The query at the last update of a step, its decay at the first."""
    inputs = {name: tensor.cuda() for name, tensor in make_inputs(2, 100, 2, 4, 128, 64, updates=updates).items()}
    out, states = delta_rule_scan(**inputs, num_householder=updates, return_final_states=True)
    q, g = inputs["q"], inputs["g"]
    steps, last = dict(inputs), updates - 1
    steps["q"] = torch.randn(2, updates * 100, *q.shape[2:], device="cuda").to(q.dtype)
    steps["q"][:, last::updates] = q
    steps["g"] = torch.zeros(2, updates * 100, 4, device="cuda")
    steps["g"][:, ::updates] = g
    expected, final = delta_rule_scan(**steps, scale=128**-0.5, return_final_states=True)
    assert relative_error(out, expected[:, last::updates].double().cpu()) < 1e-3
    assert relative_error(states, final.double().cpu()) < 1e-3


@pytest.mark.parametrize("updates", [8, 32, 64])
@pytest.mark.parametrize("seqlen", [1, 9, 21])
def test_many_updates(seqlen, updates):
    inputs = make_inputs(1, seqlen, 2, 4, 128, 72, updates=updates)
    assert_accurate(inputs, 2 * BARS[torch.bfloat16], num_householder=updates)


@pytest.mark.parametrize("position", [1, 31, 32, 77])
def test_updates_split_anywhere(position):
    """Two calls that pass on their state, beside one in float64."""
    inputs = make_inputs(1, 100, 2, 4, 128, 64, updates=2)
    leaves = {name: tensor.cuda().requires_grad_() for name, tensor in inputs.items()}
    states, outs = leaves.pop("initial_states"), []
    initial_states = states
    for begin, end in ((0, position), (position, 100)):
        part = {
            name: leaf[:, begin:end] if name in ("q", "g") else leaf[:, 2 * begin : 2 * end] for name, leaf in leaves.items()
        }
        out, states = delta_rule_scan(
            **part, initial_states=states, scale=128**-0.5, num_householder=2, return_final_states=True
        )
        outs.append(out)
    generator = torch.Generator().manual_seed(1)
    results = (torch.cat(outs, 1), states)
    grads = [torch.randn(result.shape, generator=generator).to(result) for result in results]
    leaves["initial_states"] = initial_states
    found = dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), grads), strict=True))
    expected = evaluate_on(inputs, "cpu", True, num_householder=2)
    assert relative_error(results[0], expected["out"]) < BARS[torch.bfloat16]
    assert relative_error(results[1], expected["final_states"]) < BARS[torch.bfloat16]
    for name, grad in found.items():
        few = FEW_SUMS if name in ("g", "beta") else 1
        assert relative_error(grad, expected[name]) < few * BARS[torch.bfloat16], name


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("updates", [1, 2, 3, 4])
def test_packed_sequences(updates, reverse):
    bounds = [0, 0, 1, 17, 17, 80, 144, 273, 300, 300]
    inputs = make_inputs(1, 300, 2, 4, 128, 128, updates=updates, sequences=9)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    found = assert_accurate({**inputs, "cu_seqlens": cu_seqlens}, num_householder=updates, reverse=reverse)
    on_device = {name: tensor.cuda() for name, tensor in inputs.items()}
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        alone = {name: on_device[name][:, begin:end] for name in ("q", "g")}
        alone |= {name: on_device[name][:, updates * begin : updates * end] for name in ("k", "v", "beta")}
        alone["initial_states"] = on_device["initial_states"][i : i + 1]
        out, _ = delta_rule_scan(**alone, num_householder=updates, reverse=reverse, return_final_states=True)
        torch.testing.assert_close(found["out"][:, begin:end], out, rtol=0, atol=0)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("is_packed", [False, True])
def test_sequences_of_seq_idx(updates, reverse, is_packed):
    inputs: dict[str, Tensor] = make_inputs(1, 300, 2, 2, 128, 64, updates=updates, sequences=3 if is_packed else 1)
    seq_idx = torch.zeros(1, 300, dtype=torch.int32)
    for step in (5, 64, 130, 140, 200):
        seq_idx[0, step:] += 1
    if is_packed:  # one begins with one of seq_idx, the other inside
        inputs["cu_seqlens"] = torch.tensor([0, 140, 230, 300], dtype=torch.int32)
    assert_accurate({**inputs, "seq_idx": seq_idx}, num_householder=updates, reverse=reverse)


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 300])
def test_reverse_is_the_scan_of_flipped_tensors(seqlen, updates):
    inputs = make_inputs(2, seqlen, 2, 4, 128, 96, updates=updates)
    few = 2 if seqlen == 1 else 1
    found = assert_accurate(inputs, few * BARS[torch.bfloat16], num_householder=updates, reverse=True)
    flipped = {name: tensor if name == "initial_states" else tensor.flip(1) for name, tensor in inputs.items()}
    for name in ("k", "v", "beta"):
        flipped[name] = inputs[name].unflatten(1, (seqlen, updates)).flip(1).flatten(1, 2)
    out = delta_rule_scan(**{name: tensor.cuda() for name, tensor in flipped.items()}, num_householder=updates)
    assert torch.equal(found["out"], out.flip(1))


@pytest.mark.parametrize("updates", [1, 2])
def test_states_at_positions_of_packed_sequences(updates):
    """At a bound the state is the one of the sequence before it."""
    inputs: dict[str, Tensor] = make_inputs(1, 300, 2, 4, 100, 64, updates=updates, sequences=5)
    inputs["cu_seqlens"] = torch.tensor([0, 0, 70, 70, 200, 300])
    assert_accurate(inputs, num_householder=updates, states_at=[0, 1, 70, 71, 128, 300])
    del inputs["initial_states"]
    assert_accurate(inputs, num_householder=updates, states_at=[0, 200])


@pytest.mark.parametrize("positions", [[0], [64], [1, 64, 100, 299], [0, 300], [300]], ids=str)
@pytest.mark.parametrize("kind", ["one gate", "seq_idx", "packed", "wide keys", "channels", "two updates"])
def test_gradients_of_states_at_positions(kind, positions):
    updates = 2 if kind == "two updates" else 1
    sizes: dict[str, int] = {"batch": 1, "sequences": 5} if kind == "packed" else {"batch": 2}
    inputs: dict[str, Tensor] = make_inputs(
        seqlen=300, heads=2, value_heads=4, key_dim=200 if kind == "wide keys" else 128, value_dim=64, updates=updates, **sizes
    )
    if kind == "packed":  # one begins at a position, one has no steps
        inputs["cu_seqlens"] = torch.tensor([0, 64, 64, 130, 200, 300])
    if kind == "seq_idx":  # one begins at a position
        inputs["seq_idx"] = torch.arange(300).ge(64).int().add(torch.arange(300).ge(130).int()).expand(2, 300)
    if kind == "channels":
        inputs["g"] = -0.2 * torch.rand(2, 300, 4, 128, generator=torch.Generator().manual_seed(2))
    assert_accurate(inputs, 6e-3, num_householder=updates, states_at=positions)


@pytest.mark.usefixtures("needs_wgmma")
@pytest.mark.parametrize("positions", [[100], [100, 200], [200]], ids=str)
def test_states_at_positions_run_kernels(positions):
    """Those of forward once more to the last position before seqlen, those of backward for each piece, and none of a fallback's
    products.
    """
    leaves = {name: tensor.cuda().requires_grad_() for name, tensor in make_inputs(1, 200, 2, 2, 64, 64).items()}
    _, _, states = delta_rule_scan(**leaves, states_at=positions, return_final_states=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(states.sum(), list(leaves.values()))
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    spans = 1 if 100 in positions else 0
    kernels = {"chunk_matrices": spans, "fwd": spans} | dict.fromkeys(("bwd_matrices", "bwd_states", "bwd_chunks"), spans + 1)
    for kernel, count in kernels.items():
        assert sum(f"delta_rule_{kernel}" in name for name in names) == count, kernel
    assert not [name for name in names if re.search("gemm|cutlass|bmm", name)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("heads", [2, 4])
def test_options_inside(heads, reverse):
    inputs = make_inputs(2, 100, heads, 4, 128, 128, updates=2)
    for name in ("q", "k"):
        inputs[name] = 3 * inputs[name]
    inputs["beta"], inputs["g"] = torch.randn_like(inputs["beta"]), torch.randn_like(inputs["g"])
    inputs |= {"A_log": torch.randn(4), "dt_bias": torch.randn(4)}
    options = {"qk_l2norm": True, "beta_sigmoid": True, "allow_neg_eigval": True}
    # The gradients of parameters are sums of terms of both signs.
    found, expected = (
        evaluate_on(inputs, *place, num_householder=2, reverse=reverse, **options) for place in (("cuda", False), ("cpu", True))
    )
    for name, tensor in found.items():
        assert relative_error(tensor, expected[name]) < (2e-2 if name in ("A_log", "dt_bias") else 8e-3), name


@pytest.mark.usefixtures("needs_wgmma")
@pytest.mark.parametrize(
    "options",
    [{"num_householder": 2}, {"num_householder": 3}, {"reverse": True}, {"num_householder": 2, "reverse": True}],
    ids=["two updates", "three updates", "reverse", "two updates in reverse"],
)
def test_kernels_run_by_name(options):
    """Those of forward and backward, and none of a fallback's matrix products."""
    inputs = make_inputs(1, 200, 2, 2, 64, 64, updates=options.get("num_householder", 1))
    leaves = {name: tensor.cuda().requires_grad_() for name, tensor in inputs.items()}

    def run() -> None:
        out = delta_rule_scan(**leaves, **options)
        torch.autograd.grad(out.sum(), list(leaves.values()))

    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    for kernel in ("chunk_matrices", "fwd", "bwd_matrices", "bwd_states", "bwd_chunks"):
        assert sum(f"delta_rule_{kernel}" in name for name in names) == 1, kernel
    assert not [name for name in names if re.search("gemm|cutlass|bmm", name)]
