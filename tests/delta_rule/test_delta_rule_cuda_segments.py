"""Long sequences of few heads on CUDA, by all families of kernels: segments of a sequence run at the same time.

The results are beside those of PyTorch's matmuls in float64, of the same rounded inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from delta_rule_helpers import evaluate_on, needs_wgmma, relative_error
from helpers import debug_option
from test_delta_rule_cuda_bwd import make_inputs
from torch import Tensor

from ssm_kernels import delta_rule_scan

pytestmark = pytest.mark.cuda

__all__ = ["needs_wgmma"]  # the fixture

# Dtype, key_dim and value_dim.
FAMILIES = {
    "wgmma": (torch.bfloat16, 128, 72),
    "wide": (torch.bfloat16, 256, 136),
    "channels": (torch.bfloat16, 128, 72),
    "mma": (torch.bfloat16, 100, 72),
    "mma_float16": (torch.float16, 256, 64),
    "mma_float32": (torch.float32, 128, 72),
}
# beta and g have one number a step and head: their errors do not average.
BARS = {torch.bfloat16: (6e-3, 1e-2), torch.float16: (1.2e-3, 2.5e-3), torch.float32: (2e-6, 4e-6)}
SEQLEN = 8229
PACKED = [0, 0, 6000, 16000]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    name = request.param
    with debug_option("delta_rule_mma", "mma" if name.startswith("mma") else "wgmma"):
        yield name


def inputs_of(family: str, batch: int, bounds: list[int] | None = None) -> dict[str, Any]:
    """Two value heads of a key head, and decays that keep what came some segments before."""
    dtype, key_dim, value_dim = FAMILIES[family]
    sequences, seqlen = (None, SEQLEN) if bounds is None else (len(bounds) - 1, bounds[-1])
    inputs = make_inputs(batch, seqlen, 1, 2, key_dim, value_dim, dtype=dtype, decay=0.002, sequences=sequences)
    if family == "channels":
        inputs["g"] = inputs["g"].unsqueeze(3) * torch.linspace(0.5, 1.5, key_dim)
    if bounds is not None:
        inputs["cu_seqlens"] = torch.tensor(bounds)
    return inputs


def assert_accurate(inputs: dict[str, Any], **options: Any) -> None:
    found, expected = evaluate_on(inputs, "cuda", False, **options), evaluate_on(inputs, "cuda", True, **options)
    bar, bar_of_few = BARS[inputs["v"].dtype]
    for name, one in found.items():
        assert one.isfinite().all(), name
        assert relative_error(one, expected[name]) < (bar_of_few if name in ("beta", "g") else bar), name


def count_folds(inputs: dict[str, Tensor]) -> list[int]:
    """Those of forward, and of both."""
    moved = {name: tensor.cuda() for name, tensor in inputs.items()}
    moved["v"].requires_grad_()
    counts = []
    for is_trained in (False, True):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            out = delta_rule_scan(**moved)
            if is_trained:
                out.sum().backward()
            torch.cuda.synchronize()
        counts.append(sum("delta_rule_fold" in event.name for event in profile.events()))
    return counts


def test_rows_of_a_batch(family):
    assert_accurate(inputs_of(family, 2))


def test_packed_sequences(family):
    """An empty one, and some of several segments."""
    assert_accurate(inputs_of(family, 1, PACKED))


def test_tiny_betas(family):
    """Steps whose gradient of v kernels do not divide by beta; maps of segments write none."""
    inputs = inputs_of(family, 1)
    inputs["beta"][:, ::50] = 0
    inputs["beta"][:, 1::50] *= 2.0**-12
    assert_accurate(inputs)


def test_states_at_positions_and_no_initial_states(family):
    inputs = inputs_of(family, 1)
    del inputs["initial_states"]
    assert_accurate(inputs, states_at=[4000, 4050])


@pytest.mark.usefixtures("needs_wgmma")
def test_forward_and_backward_fold_maps(family):
    """One fold in forward, and two in backward."""
    assert count_folds(inputs_of(family, 1)) == [1, 3]
    assert count_folds(inputs_of(family, 1, PACKED))[0] == 1


@pytest.mark.usefixtures("needs_wgmma")
def test_graphs_replay_other_lengths(family):
    """The host does not read where packed sequences begin."""
    inputs = {name: tensor.cuda() for name, tensor in inputs_of(family, 1, PACKED).items()}
    delta_rule_scan(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        found = delta_rule_scan(**inputs, return_final_states=True)
    inputs["cu_seqlens"].copy_(torch.tensor([0, 12000, 12000, PACKED[-1]]))
    graph.replay()
    for one, other in zip(found, delta_rule_scan(**inputs, return_final_states=True), strict=True):
        assert torch.equal(one, other)


def test_repeats_have_the_same_bits(family):
    inputs = inputs_of(family, 1)
    found, again = (evaluate_on(inputs, "cuda", False) for _ in range(2))
    for name, one in found.items():
        assert torch.equal(again[name], one), name
