"""Backward of selective_scan on CUDA in spans of time: the gradients of several launches, each with the adjoint of the last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_equal, captured, debug_option
from selective_scan_helpers import SELECTIVE_SCAN, evaluate, make_cotangents, make_inputs, plans_of, spans_of
from torch import Tensor

pytestmark = pytest.mark.cuda

# The tests compare two rows of the batch. All others have incoming gradients of zero and add nothing to sums over the batch.
ROWS = (0, -1)
SUMS = ("A", "D", "delta_bias")
LANES_IN_TIME = {"dim": 40, "seqlen": 1061, "dstate": 64}
SEQUENTIAL = {"dim": 100, "seqlen": 4133, "dstate": 16}
CASES: dict[str, dict[str, Any]] = {
    "bfloat16": LANES_IN_TIME,
    "whole tiles": LANES_IN_TIME | {"seqlen": 1024},
    "reverse": LANES_IN_TIME | {"seqlen": 1064, "reverse": True},
    "reverse, shifted": LANES_IN_TIME | {"reverse": True},
    "channels contiguous": LANES_IN_TIME | {"layout": "transposed"},
    "float16": LANES_IN_TIME | {"dtype": torch.float16},
    "float32": LANES_IN_TIME | {"dtype": torch.float32},
    "float64": LANES_IN_TIME | {"dtype": torch.float64},
    "groups": LANES_IN_TIME | {"dim": 80, "groups": 2},
    "constant B": LANES_IN_TIME | {"B": "constant"},
    "constant C": LANES_IN_TIME | {"C": "constant"},
    "no initial state": LANES_IN_TIME | {"initial_state": False},
    "bilinear": LANES_IN_TIME | {"discretization": "bilinear"},
    "many states": LANES_IN_TIME | {"dstate": 200, "seqlen": 400},
    "sequential": SEQUENTIAL,
    "sequential, whole tiles": SEQUENTIAL | {"seqlen": 4160},
    "sequential, channels contiguous": SEQUENTIAL | {"dim": 104, "layout": "transposed"},
    "sequential, float32": SEQUENTIAL | {"dtype": torch.float32},
}


def make_case(name: str) -> dict[str, Any]:
    """Inputs of so many rows that blocks fill the device without segments."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    rows = multiprocessors if name == "float64" else multiprocessors // 2 + 1
    return make_inputs(**{"batch": rows, "dtype": torch.bfloat16, "device": "cuda"} | CASES[name])


@pytest.fixture(autouse=True)
def kernel_of_case(request):
    """The kernel that the case is named after, whichever is faster at its sizes; in a test without cases the faster one."""
    is_sequential = hasattr(request.node, "callspec") and request.node.callspec.params["name"].startswith("sequential")
    with debug_option("selective_scan_kernel", "sequential" if is_sequential else "faster"):
        yield


def of_rows(name: str, value: Any) -> Any:
    is_constant = not isinstance(value, Tensor) or name.removeprefix("grad_") in SUMS or value.dim() < 3
    return value if is_constant else value[list(ROWS)]


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_several_spans(name):
    inputs = make_case(name)
    assert spans_of(inputs) > 1 and "1 segments" in plans_of(inputs)[1]
    assert plans_of(inputs)[1].startswith("sequential" if name.startswith("sequential") else "warp_scan")
    cotangents = make_cotangents(inputs)
    for cotangent in cotangents:
        cotangent[1:-1] = 0
    found = {key: of_rows(key, value) for key, value in evaluate(SELECTIVE_SCAN, inputs, cotangents).items()}
    few = {key: of_rows(key, value) for key, value in inputs.items()}
    few_cotangents = tuple(cotangent[list(ROWS)] for cotangent in cotangents)
    exact = SELECTIVE_SCAN.evaluate_in_float64(few, few_cotangents)
    if inputs["u"].dtype == torch.float64:
        SELECTIVE_SCAN.assert_close(found, exact)
    else:
        native = SELECTIVE_SCAN.evaluate_natively(few, few_cotangents, exact)
        SELECTIVE_SCAN.assert_as_accurate(found, native, exact, few)


@pytest.mark.parametrize("name", ["bfloat16", "sequential"])
def test_each_gradient_alone_has_the_same_bits(name):
    inputs = make_case(name)
    every = SELECTIVE_SCAN.backward_operator(*SELECTIVE_SCAN.backward_arguments(inputs))
    needed = SELECTIVE_SCAN.needed(inputs)
    for index in range(len(needed)):
        alone = [i == index for i in range(len(needed))]
        grads = SELECTIVE_SCAN.backward_operator(*SELECTIVE_SCAN.backward_arguments(inputs, alone))
        assert torch.equal(grads[index], every[index])


@pytest.mark.parametrize("name", ["bfloat16", "sequential"])
def test_spans_in_a_graph(name):
    inputs = make_case(name)
    arguments = SELECTIVE_SCAN.backward_arguments(inputs)
    expected = SELECTIVE_SCAN.backward_operator(*arguments)
    graph, grads = captured(lambda: SELECTIVE_SCAN.backward_operator(*arguments))
    graph.replay()
    names = [str(i) for i in range(len(expected))]
    assert_equal(dict(zip(names, grads, strict=True)), dict(zip(names, expected, strict=True)))


def test_partial_sums_take_the_memory_of_one_span():
    """With 256 states, the partial sums of all steps would take 64 bytes for each channel and step."""
    inputs = make_inputs(batch=8, dim=1024, seqlen=1024, dstate=256, dtype=torch.bfloat16, device="cuda")
    arguments = SELECTIVE_SCAN.backward_arguments(inputs)
    assert spans_of(inputs) >= 8
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    SELECTIVE_SCAN.backward_operator(*arguments)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 20 * inputs["u"].numel()
