"""Every operator on CUDA beside other work: the same bits every time, streams, devices, CUDA graphs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from helpers import DTYPES, assert_equal, debug_option
from operator_spec import Inputs, OperatorSpec
from operators import OPERATORS
from recurrence_helpers import LINEAR, LIQUID, MINGRU, PLAIN, RGLRU
from selective_scan_helpers import SELECTIVE_SCAN
from ssd_helpers import SSD

pytestmark = pytest.mark.cuda


class Call(NamedTuple):
    """An operator, options of its ``make_inputs``, and the debug option and its value that choose its kernels."""

    operator: OperatorSpec
    options: Inputs
    kernels: tuple[str, str] | None = None

    def inputs(self, **options: object) -> Inputs:
        return self.operator.make_inputs(device="cuda", **(self.options | options))


# These recurrences have the kernels that differ most.
CALLS: list[tuple[OperatorSpec, Mapping[str, Inputs]]] = [
    (operator, operator.cuda_calls)
    for operator in OPERATORS.values()
    if operator.cuda_calls and (operator.name not in PLAIN or operator in (LINEAR, MINGRU, LIQUID, RGLRU))
]


def with_each_kernels(operator: OperatorSpec, name: str, options: Inputs) -> Iterator[object]:
    """The call as pytest's parameter, once for each value of the operator's debug option."""
    option, values = operator.cuda_kernels
    call = Call(operator, {"dtype": torch.float32} | options)
    if not values:
        yield pytest.param(call, id=f"{operator}-{name}")
    for value in values:
        yield pytest.param(call._replace(kernels=(option, value)), id=f"{operator}-{value}-{name}")


@pytest.fixture
def call(request) -> Iterator[Call]:
    kernels = request.param.kernels
    with debug_option(*kernels) if kernels else nullcontext():
        yield request.param


def calls(chosen: Iterable[tuple[OperatorSpec, Mapping[str, Inputs]]]) -> pytest.MarkDecorator:
    params = [with_each_kernels(operator, name, options) for operator, table in chosen for name, options in table.items()]
    return pytest.mark.parametrize("call", list(itertools.chain(*params)), indirect=True)


every_call = calls(CALLS)
every_operator = calls((operator, {"default": {}}) for operator, _ in CALLS)


def in_dtypes() -> Iterator[tuple[OperatorSpec, Mapping[str, Inputs]]]:
    """All calls in every dtype. In float64 ssd_chunk_scan is matmuls; test_ssd_cuda_grad.py has its other dtypes."""
    for operator, table in CALLS:
        if operator in (LINEAR, MINGRU, LIQUID):  # of the recurrences one
            continue
        more = {"longest": {"batch": 1, "channels": 32, "seqlen": 65536}} if operator is RGLRU else {}
        dtypes = [torch.bfloat16, torch.float16] if operator is SSD else DTYPES
        of_each = itertools.product((table | more).items(), dtypes)
        yield operator, {f"{name}-{str(dtype).removeprefix('torch.')}": o | {"dtype": dtype} for (name, o), dtype in of_each}


@calls(in_dtypes())
def test_repeatable(call):
    """Bit for bit, also on a GPU that is busy with something else."""
    operator, inputs = call.operator, call.inputs()
    cotangents = operator.make_cotangents(inputs)
    first = operator.evaluate(operator, inputs, cotangents)
    assert_equal(operator.evaluate(operator, inputs, cotangents), first)
    matrix, elsewhere = torch.ones(2048, 2048, device="cuda"), torch.cuda.Stream()
    elsewhere.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(elsewhere):
        for _ in range(8):
            torch.mm(matrix, matrix)
    for _ in range(3):
        assert_equal(operator.evaluate(operator, inputs, cotangents), first)
    torch.cuda.current_stream().wait_stream(elsewhere)


@every_operator
def test_two_streams_at_once(call):
    operator, table = call.operator, dict(CALLS)[call.operator]
    sets = [call.inputs(**table[name]) for name in ("long", "wide")]
    arguments = [(inputs, operator.make_cotangents(inputs)) for inputs in sets]
    expected = [operator.evaluate(operator, *each) for each in arguments]
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for each, stream, of_one_stream in zip(arguments, streams, expected, strict=True):
            with torch.cuda.stream(stream):
                results.append((operator.evaluate(operator, *each), of_one_stream))
    torch.cuda.synchronize()
    for actual, of_one_stream in results:
        assert_equal(actual, of_one_stream)


@pytest.mark.parametrize("late", ["input", "cotangent"])
@every_call
def test_runs_on_the_current_stream(call, late):
    """A call that waits for a long write on its own stream sees what was written, and so does its backward."""
    operator, inputs = call.operator, call.inputs()
    cotangents = operator.make_cotangents(inputs)
    expected = operator.evaluate(operator, inputs, cotangents)
    target = operator.first(inputs) if late == "input" else cotangents[0]
    values = target.clone()
    target.fill_(math.nan)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        target.copy_(values)
        actual = operator.evaluate(operator, inputs, cotangents)
    stream.synchronize()
    assert_equal(actual, expected)


@every_call
def test_runs_on_the_device_of_its_arguments(call):
    """With the same bits as on the current device, another GPU of the same kind."""
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_name(0) != torch.cuda.get_device_name(1):
        pytest.skip("needs two CUDA GPUs of the same kind")
    assert torch.cuda.current_device() == 0
    operator, results = call.operator, []
    for device in ("cuda:0", "cuda:1"):
        inputs = call.inputs() if device == "cuda:0" else call.operator.make_inputs(device=device, **call.options)
        results.append(operator.evaluate(operator, inputs, operator.make_cotangents(inputs)))
        assert all(value.device == torch.device(device) for value in results[-1].values())
        assert torch.cuda.current_device() == 0
    expected, actual = results
    assert_equal({name: value.to("cuda:0") for name, value in actual.items()}, expected)


@every_call
def test_cuda_graph_of_forward_and_backward(call):
    draws = [call.inputs(seed=seed) for seed in range(3)]
    if draws[0].get("cu_seqlens") is not None:
        sequences, end = len(draws[0]["cu_seqlens"]) - 1, int(draws[0]["cu_seqlens"][-1])
        draws[1]["cu_seqlens"][1:-1] = 1
        draws[2]["cu_seqlens"][1:-1] = torch.arange(sequences - 1).mul(end // sequences)
    call.operator.assert_replays(draws)


@calls([(SELECTIVE_SCAN, {"small": {"dim": 70, "seqlen": 150}}), (RGLRU, {"small": {"channels": 70, "seqlen": 150}})])
def test_compiled_into_cuda_graphs(call, fresh_dynamo):
    """torch.compile(mode="reduce-overhead") records and replays forward and backward."""
    operator, scan, names = call.operator, call.operator.function, [*call.operator.time_axes(call.inputs())]

    def layer(**inputs):
        sequences = {name: torch.tanh(inputs[name]) * 2 for name in names}
        out, last_state = scan(**(inputs | sequences), return_last_state=True)
        return torch.relu(out) + sequences[names[0]], last_state * 2

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):  # a warm-up, a recording, replays
        inputs = call.inputs(seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        actual, expected = (operator.training_step(function, inputs) for function in (compiled, layer))
        operator.assert_close(actual, expected, 1e-4)
