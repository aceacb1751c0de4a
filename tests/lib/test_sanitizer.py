"""The comparison of calls for compute-sanitizer, with the CPU in the GPU's place."""

from __future__ import annotations

import pytest
import sanitizer
import torch
from operators import every_case
from sanitizer import assert_close_to_cpu, assert_same_on_gpu
from selective_scan_helpers import SELECTIVE_SCAN


@pytest.fixture(autouse=True)
def cpu_in_place_of_the_gpu(monkeypatch):
    monkeypatch.setattr(sanitizer, "DEVICE", "cpu:0")


@every_case
def test_equal_results_pass(operator, options):
    assert_same_on_gpu(operator, operator.make_inputs(**options))


@pytest.mark.parametrize("name", ["out", "last_state", "grad_A"])
def test_a_wrong_result_fails(name, monkeypatch):
    evaluate = SELECTIVE_SCAN.evaluate
    calls = []

    def wrong_at_second(*args, **kwargs):
        calls.append(args)
        results = evaluate(*args, **kwargs)
        return results if len(calls) == 1 else results | {name: results[name] * 1.001}

    monkeypatch.setattr(SELECTIVE_SCAN, "evaluate", wrong_at_second)
    inputs = SELECTIVE_SCAN.make_inputs(dtype=torch.float32)
    with pytest.raises(AssertionError, match=f"{name} differs from the CPU's by"):
        assert_same_on_gpu(SELECTIVE_SCAN, inputs)


def test_only_the_gradients_asked_for_are_compared(monkeypatch):
    found = []
    monkeypatch.setattr(sanitizer, "assert_close_to_cpu", lambda actual, expected: found.append(sorted(actual)))
    inputs = SELECTIVE_SCAN.make_inputs()
    assert_same_on_gpu(SELECTIVE_SCAN, inputs, wanted=("u", "A"), through=("out",))
    assert_same_on_gpu(SELECTIVE_SCAN, inputs, wanted=())
    assert found == [["grad_A", "grad_u", "last_state", "out"], ["last_state", "out"]]


@pytest.mark.parametrize(("options", "relative"), [({}, 1e-4), ({"in_16_bits": True}, 3e-2), ({"roundings": 8}, 16 * 2**-23)])
def test_tolerances(options, relative):
    expected = {"out": torch.ones(3)}
    assert_close_to_cpu({"out": expected["out"] + 0.9 * relative}, expected, **options)
    with pytest.raises(AssertionError, match="out differs"):
        assert_close_to_cpu({"out": expected["out"] + 1.2 * relative}, expected, **options)


def test_nan_differs():
    with pytest.raises(AssertionError, match="out differs"):
        assert_close_to_cpu({"out": torch.tensor([torch.nan])}, {"out": torch.ones(1)})
