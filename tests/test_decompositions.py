"""The operators as PyTorch's own: exported programs after ``decomposition_table`` against the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from helpers import assert_all_close
from norm_helpers import NORMS
from operator_spec import Inputs, OperatorSpec
from operators import ALL_SCANS, over_options
from torch import Tensor
from torch.export import ExportedProgram

import ssm_kernels
from ssm_kernels.integrations.decompositions import decomposition_table


class Call(nn.Module):
    """A function of tensors by name, the other arguments given."""

    def __init__(self, function: Callable[..., Any], constants: Inputs) -> None:
        super().__init__()
        self.function, self.constants = function, constants

    def forward(self, tensors: dict[str, Tensor]) -> Any:
        return self.function(**tensors, **self.constants)


def decomposed(function: Callable[..., Any], inputs: Inputs) -> ExportedProgram:
    """The program after decomposition, checked to have no operator of this package."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    constants = {name: value for name, value in inputs.items() if name not in tensors}
    program = torch.export.export(Call(function, constants), (tensors,)).run_decompositions(decomposition_table())
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    left = [node.target for graph in graphs for node in graph.nodes if str(node.target).startswith("ssm_kernels.")]
    assert not left
    return program


def run(program: ExportedProgram, inputs: Inputs) -> Any:
    return program.module()({name: value for name, value in inputs.items() if isinstance(value, Tensor)})


def unpacked(spec: OperatorSpec) -> dict[str, Inputs]:
    return {name: options for name, options in spec.options.items() if spec.make_inputs(**options).get("cu_seqlens") is None}


@over_options(ALL_SCANS | NORMS, unpacked)
def test_operators(operator: OperatorSpec, options: Inputs):
    inputs = operator.make_inputs(**options)
    program = decomposed(operator, inputs)

    def function(**tensors: Any) -> Any:
        return run(program, tensors)

    if operator.first(inputs).dtype == torch.float64:
        operator.assert_matches_reference(inputs, gradients=False, function=function)
    else:  # the program holds its dtypes
        results = dict(zip(operator.results, function(**inputs), strict=True))
        exact = operator.evaluate_in_float64(inputs)
        operator.assert_as_accurate(results, operator.evaluate_natively(inputs, None, exact), exact, inputs)


@pytest.mark.parametrize("discretization", ssm_kernels.discretizations)
def test_every_discretization(discretization: str):
    spec = ALL_SCANS["selective_scan"]
    inputs = spec.make_inputs() | {"discretization": discretization}
    program = decomposed(spec, inputs)
    spec.assert_matches_reference(inputs, gradients=False, function=lambda **tensors: run(program, tensors))


STEPS = {
    "linear_step": ("a", "b"),
    "diag_linear_step": ("gate", "x"),
    "elu_gru_step": ("gate", "candidate"),
    "hgrn_step": ("log_gate", "x"),
    "liquid_step": ("candidate", "tau", "dt"),
    "mingru_step": ("gate", "candidate"),
    "minlstm_step": ("forget", "input", "candidate"),
    "rglru_step": ("recurrence_gate", "input_gate", "x", "recurrent_param"),
}


@pytest.mark.parametrize("with_state", [False, True], ids=["from zero", "from a state"])
@pytest.mark.parametrize("step", STEPS)
def test_steps_of_recurrences(step: str, with_state: bool):
    torch.manual_seed(0)
    function = getattr(ssm_kernels, step)
    inputs: Inputs = {name: torch.rand(2, 5, dtype=torch.float64) + 0.1 for name in STEPS[step]}
    inputs["state"] = torch.randn(2, 5, dtype=torch.float64) if with_state else None
    outputs, expected = run(decomposed(function, inputs), inputs), function(**inputs)
    named = [{"h": h, "new_state": state} for h, state in (outputs, expected)]
    assert_all_close(*named, 1e-12)


def test_table_is_new():
    decomposition_table().clear()
    assert torch.ops.ssm_kernels._mamba_mixer_fwd.default in decomposition_table()


def test_packed_sequences_are_refused():
    spec = ALL_SCANS["linear_scan"]
    a, b = torch.rand(2, 1, 6, 4).unbind()
    inputs = {"a": a, "b": b, "cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32)}
    with pytest.raises(Exception, match="decomposition of linear_scan: expected cu_seqlens to be None, got a tensor"):
        decomposed(spec, inputs)
