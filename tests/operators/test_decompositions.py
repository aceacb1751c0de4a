"""The operators as PyTorch's own: exported programs after ``decomposition_table`` against the operators."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from helpers import assert_all_close
from norm_helpers import NORMS
from operator_spec import Inputs, OperatorSpec
from operators import ALL_SCANS
from recurrence_helpers import PLAIN
from torch import Tensor

import ssm_kernels
from ssm_kernels.integrations.decompositions import decomposition_table

Calls = dict[str, tuple[Callable[..., Any], Inputs]]


def tensors_of(inputs: Inputs) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


class Several(nn.Module):
    """Calls of functions with tensors by name, the other arguments given."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, tensors: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
        return {name: function(**inputs | tensors[name]) for name, (function, inputs) in self.calls.items()}


def results_of(calls: Calls) -> dict[str, Any]:
    """Exports one program of these calls, decomposes it, checks that no operator of this package is left, and runs it.

    To decompose a program of a single call takes as long, because PyTorch visits every operator that it knows.
    """
    tensors = {name: tensors_of(inputs) for name, (_, inputs) in calls.items()}
    constants = {
        name: (function, {key: value for key, value in inputs.items() if key not in tensors[name]})
        for name, (function, inputs) in calls.items()
    }
    program = torch.export.export(Several(constants), (tensors,)).run_decompositions(decomposition_table())
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    left = [node.target for graph in graphs for node in graph.nodes if str(node.target).startswith("ssm_kernels.")]
    assert not left
    return program.module()(tensors)


SPECS = ALL_SCANS | NORMS


@functools.cache
def every_input_of(key: str) -> dict[str, Inputs]:
    """Inputs of an operator for each of its options without packed sequences."""
    every = {name: SPECS[key].make_inputs(**options) for name, options in SPECS[key].options.items()}
    return {name: inputs for name, inputs in every.items() if inputs.get("cu_seqlens") is None}


def covering(options: dict[str, dict[str, Any]]) -> list[str]:
    """The defaults, and options with every pair of values that one of the options has: those with most values first."""
    found, seen = [], set()
    for name in sorted(options, key=lambda name: -len(options[name])):
        values = [(argument, repr(value)) for argument, value in options[name].items()]
        pairs = {*itertools.combinations_with_replacement(sorted(values), 2)}
        if not pairs or not pairs <= seen:
            found.append(name)
            seen |= pairs
    return found


def inputs_of(key: str) -> dict[str, Inputs]:
    """The options that each run tries: two for each recurrence after the first, because they share their scan."""
    every, recurrences = every_input_of(key), [name for name in SPECS if SPECS[name].family == "linear_scan"]
    first = 2 * (recurrences.index(key) - 1) if key in recurrences else -1
    names = covering({name: SPECS[key].options[name] for name in every})
    return {name: every[name] for name in (names if first < 0 else ([*every] * 2)[first % len(every) :][:2])}


@functools.cache
def results_of_family(family: str) -> dict[str, Any]:
    """The results of all operators of a family, by variant and option."""
    keys = [key for key in SPECS if SPECS[key].family == family]
    return results_of({f"{key}, {option}": (SPECS[key], inputs) for key in keys for option, inputs in inputs_of(key).items()})


def check_results(operator: OperatorSpec, inputs: Inputs, results: Any) -> None:
    if operator.first(inputs).dtype == torch.float64:
        operator.assert_matches_reference(inputs, gradients=False, function=lambda **_: results)
    else:  # the program holds its dtypes
        exact = operator.evaluate_in_float64(inputs)
        named = dict(zip(operator.results, results, strict=True))
        operator.assert_as_accurate(named, operator.evaluate_natively(inputs, None, exact), exact, inputs)


@pytest.mark.parametrize(("key", "options"), [(key, name) for key in SPECS for name in inputs_of(key)])
def test_operators(key: str, options: str):
    check_results(SPECS[key], inputs_of(key)[options], results_of_family(SPECS[key].family)[f"{key}, {options}"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("key", SPECS)
def test_every_option(key: str):
    inputs = every_input_of(key)
    for name, results in results_of({name: (SPECS[key], inputs[name]) for name in inputs}).items():
        check_results(SPECS[key], inputs[name], results)


def test_every_discretization():
    spec = ALL_SCANS["selective_scan"]
    inputs = {name: spec.make_inputs() | {"discretization": name} for name in ssm_kernels.discretizations}
    for name, results in results_of({name: (spec, inputs[name]) for name in inputs}).items():
        spec.assert_matches_reference(inputs[name], gradients=False, function=lambda results=results, **_: results)


def test_steps_of_recurrences():
    """From zero and from a state."""
    torch.manual_seed(0)
    calls: Calls = {}
    for variant in PLAIN.values():
        inputs = {name: torch.rand(2, 5, dtype=torch.float64) + 0.1 for name in variant.recurrence.inputs}
        for state in (None, torch.randn(2, 5, dtype=torch.float64)):
            start = "zero" if state is None else "a state"
            calls[f"{variant.name}, a step from {start}"] = variant.step, inputs | {"state": state}
    results = results_of(calls)
    for name, (function, inputs) in calls.items():
        expected = {f"{name}, {result}": value for result, value in zip(("h", "new_state"), function(**inputs), strict=True)}
        assert_all_close(dict(zip(expected, results[name], strict=True)), expected, 1e-12)


def test_table_is_new():
    decomposition_table().clear()
    assert torch.ops.ssm_kernels._mamba_mixer_fwd.default in decomposition_table()


def test_packed_sequences_are_refused():
    spec = ALL_SCANS["linear_scan"]
    a, b = torch.rand(2, 1, 6, 4).unbind()
    inputs = {"a": a, "b": b, "cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32)}
    with pytest.raises(Exception, match="decomposition of linear_scan: expected cu_seqlens to be None, got a tensor"):
        results_of({"packed": (spec, inputs)})
