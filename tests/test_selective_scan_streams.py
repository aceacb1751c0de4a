"""selective_scan on CUDA beside other work: the same bits every time, streams, devices, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_equal, captured, move, move_all
from operator_spec import with_gradients
from selective_scan_helpers import (
    MINIMAL,
    SELECTIVE_SCAN,
    TENSORS,
    assert_close,
    evaluate,
    evaluate_in_float64,
    make_cotangents,
    make_inputs,
)
from torch import Tensor

from ssm_kernels import selective_scan

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("kernel")]

# Few channels and many steps: time is cut into segments.
SEGMENTED = {"batch": 1, "dim": 5, "seqlen": 8300}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["variable", "constant"])
@pytest.mark.parametrize("sizes", [(1, 64, 8192), (1, 256, 8192), (2, 2048, 200), (8, 1024, 200), (3, 70, 150)], ids=str)
def test_repeatable(sizes, form, dtype):
    """Bit for bit, also on a GPU that is busy with something else."""
    batch, dim, seqlen = sizes
    inputs = make_inputs(batch=batch, dim=dim, seqlen=seqlen, dstate=16, B=form, C=form, dtype=dtype, device="cuda")
    cotangents = make_cotangents(inputs)
    first = evaluate(SELECTIVE_SCAN, inputs, cotangents)
    assert_equal(evaluate(SELECTIVE_SCAN, inputs, cotangents), first)
    matrix, elsewhere = torch.ones(2048, 2048, device="cuda"), torch.cuda.Stream()
    elsewhere.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(elsewhere):
        for _ in range(8):
            torch.mm(matrix, matrix)
    for _ in range(3):
        assert_equal(evaluate(SELECTIVE_SCAN, inputs, cotangents), first)
    torch.cuda.current_stream().wait_stream(elsewhere)


STREAM_SIZES = [{"batch": 2, "dim": 256, "seqlen": 1024}, {"batch": 1, "dim": 64, "seqlen": 8192}]


def test_two_streams_at_once():
    sets = [make_inputs(**sizes, dstate=16, dtype=torch.float32, device="cuda") for sizes in STREAM_SIZES]
    cotangents = [make_cotangents(inputs) for inputs in sets]
    expected = [evaluate(SELECTIVE_SCAN, *arguments) for arguments in zip(sets, cotangents, strict=True)]
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    results: list[list[dict[str, Tensor]]] = [[] for _ in sets]
    for _ in range(5):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(evaluate(SELECTIVE_SCAN, sets[i], cotangents[i]))
    torch.cuda.synchronize()
    for i, runs in enumerate(results):
        for run in runs:
            assert_equal(run, expected[i])


@pytest.mark.parametrize("sizes", STREAM_SIZES, ids=str)
def test_runs_on_the_current_stream(sizes):
    """A scan that waits for a long write on its own stream sees what was written, and so does its backward."""
    inputs = make_inputs(**sizes, dstate=16, dtype=torch.float32, device="cuda")
    cotangents = make_cotangents(inputs)
    expected = evaluate(SELECTIVE_SCAN, inputs, cotangents)
    values, inputs["u"] = inputs["u"], torch.full_like(inputs["u"], float("nan"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        inputs["u"].copy_(values)
        actual = evaluate(SELECTIVE_SCAN, inputs, cotangents)
    stream.synchronize()
    assert_equal(actual, expected)


def test_runs_on_the_device_of_its_arguments():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    assert torch.cuda.current_device() == 0
    for sizes in ({"dim": 70, "seqlen": 150}, SEGMENTED):
        inputs = make_inputs(**sizes, dtype=torch.float32)
        cotangents = make_cotangents(inputs)
        results = evaluate(SELECTIVE_SCAN, move_all(inputs, "cuda:1"), tuple(move(x, "cuda:1") for x in cotangents))
        assert_close(results, evaluate_in_float64(inputs, cotangents), torch.float32)
        assert all(value.device == torch.device("cuda:1") for value in results.values())
        assert torch.cuda.current_device() == 0


# ----- CUDA graphs


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 2, "dim": 70, "seqlen": 150, "groups": 2},
        {"batch": 2, "dim": 70, "seqlen": 150, "layout": "transposed", "dtype": torch.bfloat16},
        {"batch": 2, "dim": 70, "seqlen": 150, "B": "constant", "C": "constant"},
        {"batch": 1, "dim": 64, "seqlen": 8192},
        {**SEGMENTED, **MINIMAL},
    ],
    ids=str,
)
def test_cuda_graph_of_forward_and_backward(options):
    """Replayed on new values in the same tensors, it computes what an eager call does."""
    options = {"dstate": 16, "dtype": torch.float32, "device": "cuda"} | options
    draws = [make_inputs(**options, seed=seed) for seed in range(3)]
    cotangents = [make_cotangents(inputs, seed=10 + seed) for seed, inputs in enumerate(draws)]
    expected = [evaluate(SELECTIVE_SCAN, *arguments) for arguments in zip(draws, cotangents, strict=True)]

    static = with_gradients({k: v.clone() if isinstance(v, Tensor) else v for k, v in draws[0].items()})
    static_cotangents = tuple(x.clone() for x in cotangents[0])
    present = [name for name in TENSORS if static[name] is not None]

    def forward_and_backward() -> dict[str, Tensor]:
        results = SELECTIVE_SCAN(**static)
        gradients = torch.autograd.grad(results, [static[name] for name in present], static_cotangents)
        names = ["out", "last_state", *(f"grad_{name}" for name in present)]
        return dict(zip(names, (*results, *gradients), strict=True))

    graph, found = captured(forward_and_backward)

    for draw, draw_cotangents, results in zip(draws, cotangents, expected, strict=True):
        with torch.no_grad():
            for name in present:
                static[name].copy_(draw[name])
            for tensor, value in zip(static_cotangents, draw_cotangents, strict=True):
                tensor.copy_(value)
        graph.replay()
        assert_equal(found, results)


def test_compiled_into_cuda_graphs(fresh_dynamo):
    """torch.compile(mode="reduce-overhead") records and replays forward and backward."""

    def layer(*, u, z, **inputs):
        out, last_state = selective_scan(torch.tanh(u) * 2, z=z * 3, **inputs, return_last_state=True)
        return torch.relu(out) + u, last_state * 2

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):  # a warm-up, a recording, replays
        inputs = make_inputs(dim=70, seqlen=150, dstate=16, dtype=torch.float32, device="cuda", seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        actual, expected = SELECTIVE_SCAN.training_step(compiled, inputs), SELECTIVE_SCAN.training_step(layer, inputs)
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
