"""states_at of ssd_chunk_scan on CUDA without gradients: forward's kernels store the states between chunks as they pass them.

test_states_at.py has the tests that are the same for every device.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import captured, no_synchronization, uninitialized_memory_is_nan
from ssd_helpers import KERNEL_CHUNK, SEQUENCES, SSD, SSD_STATES, limited_shared_memory, make_inputs, plan, preferred_products
from torch import Tensor

pytestmark = pytest.mark.cuda

# How blocks share the work: work tiles that several blocks process, work tiles that are cut between two blocks, and whole ones.
SHAPES: dict[str, dict[str, Any]] = {
    "split_work_tiles": {"batch": 1, "heads": 3, "groups": 1, "seqlen": 64 * 40 + 5},
    "many_heads": {"heads": 160, "groups": 1, "seqlen": 300},
    "whole_chunks": {"seqlen": 256},
    "resets": {"seqlen": 300, "resets": ((1, 64, 65, 129, 192), (128, 256))},
    "resets_in_split_work_tiles": {"batch": 1, "heads": 2, "groups": 1, "seqlen": 2000, "resets": ((64, 500, 1024, 1025),)},
    "padded": {"seqlen": 300, "headdim": 60, "dstate": 60},
    "without_initial_states": {"seqlen": 300, "initial_states": False},
    "one_chunk": {"seqlen": 64},
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
# float32 has one kind of products.
KINDS = [(torch.float32, "wgmma"), *itertools.product((torch.float16, torch.bfloat16), ("wgmma", "mma"))]
every_kind = pytest.mark.parametrize("dtype, products", KINDS, ids=[f"{str(d).removeprefix('torch.')}-{p}" for d, p in KINDS])


def positions_of(seqlen: int) -> list[tuple[int, ...]]:
    """Multiples of the chunk: each, in no order and twice, of distances that have a common divisor, and the last alone."""
    every = (*range(0, seqlen, KERNEL_CHUNK), seqlen)
    return [every[1:-1], every, (*every[::-3], 0, seqlen, *every[::2]), every[2:-1:2], every[-2:-1]]


def inputs_on_cuda(**options: Any) -> dict[str, Any]:
    return make_inputs(**({"headdim": 64, "dstate": 64, "seqlen": 300, "device": "cuda"} | options))


def before(inputs: dict[str, Any], position: int) -> dict[str, Any]:
    """The arguments of the steps before the position."""
    names = [name for name in (*SEQUENCES, "seq_idx") if inputs[name] is not None]
    return inputs | {name: inputs[name][:, :position] for name in names}


def assert_accurate_states(states: Tensor, exact: Tensor, inputs: dict[str, Any], positions: tuple[int, ...]) -> None:
    """A state at a position is as accurate as the final state of a scan of the steps before it."""
    for i, position in enumerate(positions):
        error = (states[:, i] - exact[:, i]).norm()
        expected = (SSD(**before(inputs, position))[1] - exact[:, i]).norm()
        floor = torch.finfo(torch.float32).eps * exact[:, i].norm()
        assert error <= 1.5 * expected + 4 * floor, f"{position}: {error} from float64, the final state {expected}"


@pytest.mark.parametrize("dstate", [64, 128, 256])
@every_kind
@every_shape
def test_multiples_of_the_chunk(shape, dtype, products, dstate):
    inputs = inputs_on_cuda(**({"dtype": dtype, "dstate": dstate} | shape))
    seqlen = inputs["x"].shape[1]
    every = (*range(0, seqlen, KERNEL_CHUNK), seqlen)
    exact = SSD_STATES.evaluate_in_float64(inputs | {"states_at": every}, function=SSD_STATES)["states"]
    with preferred_products(products):
        alone = SSD.evaluate(SSD, inputs)
        first = None
        for positions in positions_of(seqlen):
            with uninitialized_memory_is_nan():
                results = SSD_STATES.evaluate(SSD_STATES, inputs | {"states_at": positions})
            assert torch.equal(results["out"], alone["out"]) and torch.equal(results["final_states"], alone["final_states"])
            wanted = exact[:, [every.index(p) for p in positions]]
            assert results["states"].shape == wanted.shape
            if positions == every:
                first = results["states"]
                assert_accurate_states(first, exact, inputs, every)
                assert torch.equal(first[:, -1], alone["final_states"])
            elif positions:
                assert_accurate_states(results["states"], wanted, inputs, positions)
            if first is not None:  # the same pass, whatever it stores
                assert torch.equal(results["states"], first[:, [every.index(p) for p in positions]])


@every_kind
@pytest.mark.parametrize("shape", ["many_heads", "resets", "padded", "without_initial_states"])
def test_other_positions(shape, dtype, products):
    """From the state at the multiple before, which a change of seq_idx there resets; also of sequences of less than a chunk."""
    for seqlen in (300, 33, 20):
        resets = {"resets": ((1, 10), (5,))} if shape == "resets" and seqlen < 300 else {}
        inputs = inputs_on_cuda(**({"dtype": dtype} | SHAPES[shape] | {"seqlen": seqlen} | resets))
        positions = tuple(p for p in (0, 3, 64, 65, 130, 193, 250, seqlen - 1, seqlen) if p <= seqlen)
        states_at = {"states_at": positions}
        exact = SSD_STATES.evaluate_in_float64(inputs | states_at, function=SSD_STATES)["states"]
        with preferred_products(products), uninitialized_memory_is_nan():
            states = SSD_STATES(**inputs | states_at)[2]
            assert_accurate_states(states, exact, inputs, positions)


@every_kind
def test_infinity_ends_where_a_sequence_begins(dtype, products):
    inputs = inputs_on_cuda(dtype=dtype, batch=1, resets=((128,),))
    inputs["initial_states"][0, 0] = torch.inf
    with preferred_products(products):
        states = SSD_STATES(**inputs | {"states_at": (64, 128, 150, 192)})[2]
    assert not states[0, :2, 0].isfinite().any() and states[0, 2:].isfinite().all() and states[0, :, 1:].isfinite().all()


def count_kernels(inputs: dict[str, Any], positions: tuple[int, ...]) -> int:
    """The launches of forward's kernels, those of other kernels apart."""
    with torch.no_grad():
        SSD_STATES(**inputs | {"states_at": positions})
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            SSD_STATES(**inputs | {"states_at": positions})
            torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if "ssd_fwd_" in event.key or "ssd_short_scan" in event.key)


@every_kind
def test_one_launch(dtype, products):
    inputs = inputs_on_cuda(dtype=dtype)
    inputs["A"].requires_grad_()
    with preferred_products(products):
        for positions in positions_of(300):
            assert count_kernels(inputs, positions) == 1
        assert count_kernels(inputs, (64, 70, 128, 200, 70)) == 3


@every_kind
def test_graph_without_synchronization(dtype, products):
    inputs = inputs_on_cuda(dtype=dtype, **SHAPES["resets"]) | {"states_at": (256, 64, 70, 300)}
    with preferred_products(products):
        expected = SSD_STATES(**inputs)
        with no_synchronization():
            SSD_STATES(**inputs)
        graph, results = captured(lambda: SSD_STATES(**inputs))
    for result in results:
        result.zero_()
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.parametrize("dstate", [64, 256])
def test_without_kernels(dstate):
    """PyTorch's matmuls take the call where a block has too little shared memory."""
    inputs = inputs_on_cuda(dtype=torch.float32, dstate=dstate) | {"states_at": (64, 70, 0, 300)}
    exact = {name: value.float() for name, value in SSD_STATES.evaluate_in_float64(inputs, function=SSD_STATES).items()}
    with limited_shared_memory(99 * 1024):
        assert plan(inputs)["kernel"] == "aten"
        SSD_STATES.assert_close(SSD_STATES.evaluate(SSD_STATES, inputs), exact, tolerance=1e-4)
