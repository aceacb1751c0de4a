"""Every tensor argument of every public operator: messages about None, other types and other layouts.

The message names the operator and the argument, through the Python function and through ``torch.ops``, whatever the mode.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from decoding_helpers import DECODING_STEPS
from helpers import split
from mamba3_step_helpers import make_inputs as make_mamba3_step_inputs
from mlstm_helpers import function_of
from mlstm_step_helpers import make_inputs as make_mlstm_step_inputs
from operators import OPERATORS as SPECS
from recurrence_helpers import PLAIN, Variant
from recurrence_helpers import make_inputs as make_recurrence_inputs
from recurrence_helpers import step_inputs as make_recurrence_step_inputs
from summary_helpers import SUMMARIES, Summary
from torch import Tensor

import ssm_kernels

OPERATOR = "selective_scan"


class Operator(NamedTuple):
    """A public operator.

    Attributes:
        make: legal keyword arguments on a device, with every tensor that can be there together.
        named: the Python function, which errors name; the operator's name if empty.
    """

    name: str
    make: Callable[[str], dict[str, Any]]
    named: str = ""

    @property
    def function(self) -> str:
        return self.named or self.name

    def may_be_none(self, name: str) -> bool:
        """Whether the Python function takes None for it, although the operator may not."""
        return "None" in str(inspect.signature(function_of(self.function)).parameters[name].annotation)

    @property
    def overload(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.ssm_kernels, self.name).default

    def calls(self) -> dict[str, Callable]:
        """The ways of calling it, by keywords."""

        def operator(**arguments: Any) -> Any:
            packet = getattr(torch.ops.ssm_kernels, self.name)
            positional, keywords = split(packet, arguments)
            return packet(*positional, **keywords)

        return {"function": function_of(self.function), "torch.ops": operator}

    def tensors(self, *, required: bool) -> list[str]:
        """The names of the tensor arguments that must, or need not, be there."""
        kind = torch.TensorType if required else torch.OptionalType
        return [
            argument.name
            for argument in self.overload._schema.arguments
            if isinstance(argument.type, kind) and "Tensor" in str(argument.type)
        ]


def _operators(name: str) -> list[Operator]:
    """An operator with a spec; a recurrence with its step."""
    spec = SPECS[name]
    found = [Operator(name, lambda device: spec.make_inputs(**spec.together, dtype=torch.float32, device=device))]
    if name in PLAIN:
        found.append(Operator(name.replace("_scan", "_step"), lambda device: _step_of_recurrence(PLAIN[name], device)))
    return found


def _step_of_recurrence(variant: Variant, device: str) -> dict[str, Any]:
    inputs = make_recurrence_inputs(variant, seqlen=1, dtype=torch.float32, device=device)
    options = {key: inputs[key] for key in variant.fixed}
    return make_recurrence_step_inputs(variant, inputs) | options | {"state": inputs["h0"]}


def _decoding_operators(name: str) -> list[Operator]:
    """The operators of one token and of several."""
    step = DECODING_STEPS[name]

    def make(device: str) -> dict[str, Any]:
        return step.make_inputs(**step.together, dtype=torch.float32, device=device)

    def make_tokens(device: str) -> dict[str, Any]:
        return step.make_token_inputs(**step.tokens_together, dtype=torch.float32, device=device)

    return [Operator(name, make), Operator(f"{name}_out", make_tokens, name)]


def _summary(spec: Summary) -> Operator:
    return Operator(spec.name, lambda device: spec.make_inputs(**spec.together, dtype=torch.float32, device=device))


OPERATORS = {
    operator.name: operator
    for operator in (
        *(operator for name in SPECS for operator in _operators(name)),
        *(operator for name in DECODING_STEPS for operator in _decoding_operators(name)),
        *(_summary(spec) for spec in SUMMARIES.values()),
        Operator("mamba3_state_update", lambda device: make_mamba3_step_inputs(slots=3, dtype=torch.float32, device=device)),
        Operator("mlstm_step", lambda device: make_mlstm_step_inputs(slots=3, dtype=torch.float32, device=device)),
    )
}
every_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=list(OPERATORS))
MODES = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))


def assert_raises(operator: Operator, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    for how, call in operator.calls().items():
        with pytest.raises(error, match=rf"^{re.escape(message)}(\n|$)") as raised:
            call(**arguments)
        assert raised.type is error, how


def test_every_public_operator_is_tested():
    names = {name.removeprefix("ssm_kernels::") for name in torch._C._dispatch_get_all_op_names() if "ssm_kernels::" in name}
    # test_*_two_samples.py and test_selective_scan_dense.py have the arguments of these.
    others = {f"{name}_two_sample" for name in ("selective_scan", "selective_state_update", "ssd_chunk_scan")}
    others |= {"selective_scan_dense", "selective_state_update_two_sample_out"}
    assert {name for name in names if not name.startswith("_")} == {*OPERATORS, *others}


@every_operator
def test_good_arguments_are_accepted(operator, device):
    for call in operator.calls().values():
        call(**operator.make(device))


@every_mode
@every_operator
def test_none_for_a_required_tensor(operator, mode, device):
    with mode():
        for name in operator.tensors(required=True):
            arguments = operator.make(device) | {name: None}
            kind = "a tensor or a number" if operator.name.startswith("liquid") and name == "dt" else "a tensor"
            for how, call in operator.calls().items():
                if how == "function" and operator.may_be_none(name):
                    call(**arguments)
                    continue
                expected = kind if how == "function" else "a tensor"
                message = rf"^{operator.function}: expected {name} to be {expected}, got None(\n|$)"
                with pytest.raises(TypeError, match=message):
                    call(**arguments)


@every_mode
@every_operator
def test_none_for_every_required_tensor(operator, mode, device):
    required = operator.tensors(required=True)
    arguments = {name: value for name, value in operator.make(device).items() if not isinstance(value, Tensor)}
    arguments |= dict.fromkeys(operator.tensors(required=False))
    number = {"dt": 0.1} if operator.name.startswith("liquid") else {}
    with mode():
        positional, keywords = split(getattr(torch.ops.ssm_kernels, operator.name), arguments | dict.fromkeys(required))
        with pytest.raises(TypeError, match=rf"^{operator.function}: expected {required[0]} to be a tensor, got None(\n|$)"):
            getattr(torch.ops.ssm_kernels, operator.name)(*positional, **keywords)
        with pytest.raises(TypeError, match=rf"^{operator.function}: expected {required[0]} to be a tensor, got None"):
            operator.calls()["function"](**arguments | dict.fromkeys(required) | number)


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse": (lambda x: x.to_sparse(), "to be a dense tensor (of layout Strided), got layout Sparse"),
    "nested": (
        lambda x: torch.nested.nested_tensor([x, x], layout=torch.strided),
        "to be a dense tensor, got a nested one",
    ),
    "jagged": (
        lambda x: torch.nested.nested_tensor([x.reshape(-1), x.reshape(-1)], layout=torch.jagged),
        "to be a dense tensor (of layout Strided), got layout Jagged",
    ),
    "csr": (lambda x: x.to_sparse_csr(), "to be a dense tensor (of layout Strided), got layout SparseCsr"),
    "mkldnn": (lambda x: x.to_mkldnn(), "to be a dense tensor (of layout Strided), got layout Mkldnn"),
}


@every_mode
@every_operator
def test_layouts(operator, mode, device):
    for layout, (change, message) in LAYOUTS.items():
        if layout == "jagged" and mode is torch.inference_mode:
            continue  # the tensor's own Python class refuses
        tried = 0
        with mode():
            for name in (*operator.tensors(required=True), *operator.tensors(required=False)):
                arguments = operator.make(device)
                x = arguments[name]
                if x is None or (layout == "csr" and x.dim() < 2):
                    continue
                if layout == "mkldnn" and (device != "cpu" or x.dtype != torch.float32 or x.dim() == 0):
                    continue
                expected = f"{operator.function}: expected {name} {message}"
                assert_raises(operator, arguments | {name: change(x)}, NotImplementedError, expected)
                tried += 1
        assert tried or (layout == "mkldnn" and device != "cpu"), layout


OTHER_TYPES = (np.zeros((2, 3), np.float32), "x", [1.0], 3.0, {})


@every_mode
@every_operator
def test_other_types(operator, mode, device):
    for value in OTHER_TYPES:
        for name in (*operator.tensors(required=True), *operator.tensors(required=False)):
            takes_numbers = operator.name.startswith("liquid") and name == "dt"
            if takes_numbers and isinstance(value, float):
                continue
            kind = "a tensor" + " or a number" * takes_numbers + " or None" * operator.may_be_none(name)
            message = f"{operator.function}: expected {name} to be {kind}, got {type(value).__name__}"
            with mode(), pytest.raises(TypeError, match=f"^{re.escape(message)}$") as raised:
                operator.calls()["function"](**operator.make(device) | {name: value})
            assert raised.value.__context__ is None  # the dispatcher's message, with the value


KINDS = {"int": "an integer", "float": "a number", "str": "a string", "Sequence[float]": "a sequence of numbers"}


@every_operator
def test_other_types_of_options(operator, device):
    function, arguments = function_of(operator.function), operator.make(device)
    for name, parameter in inspect.signature(function).parameters.items():
        annotation, _, optional = str(parameter.annotation).partition(" | ")
        if annotation in KINDS:
            message = f"{operator.function}: expected {name} to be {KINDS[annotation]}{' or None' * bool(optional)}, got object"
            with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
                function(**arguments | {name: object()})
            if not optional:
                with pytest.raises(
                    TypeError, match=f"^{operator.function}: expected {name} to be {KINDS[annotation]}, got None$"
                ):
                    function(**arguments | {name: None})


@every_operator
def test_other_types_by_position(operator, device):
    arguments = operator.make(device)
    for name, parameter in inspect.signature(function_of(operator.function)).parameters.items():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and name in operator.tensors(required=True):
            before = [*arguments.values()][: [*arguments].index(name)]
            after = {key: arguments[key] for key in [*arguments][len(before) + 1 :]}
            with pytest.raises(TypeError, match=f"^{operator.function}: expected {name} to be a tensor.*, got str$"):
                function_of(operator.function)(*before, "x", **after)


@every_operator
def test_other_errors_are_the_operators_own(operator, device):
    """Errors of calls with the right types pass unchanged, and so do Python's of calls that do not fit the signature."""
    function, arguments = function_of(operator.function), operator.make(device)
    name = operator.tensors(required=True)[0]
    with pytest.raises(NotImplementedError, match=f"^{operator.function}: expected {name} to be a dense tensor"):
        function(**arguments | {name: arguments[name].to_sparse()})
    with pytest.raises(TypeError, match=rf"^{operator.function}\(\) got an unexpected keyword argument 'more'"):
        function(**arguments, more=1)
    with pytest.raises(TypeError, match=rf"^{operator.function}\(\) missing .* required"):
        function()


@every_operator
def test_the_function_keeps_its_signature(operator):
    function = getattr(ssm_kernels, operator.function)
    assert function.__name__ == operator.function and function.__doc__
    names = [argument.name for argument in operator.overload._schema.arguments if not argument.kwarg_only]
    assert {*names} <= {*inspect.signature(function).parameters}


def test_step_size_as_a_number_beside_a_candidate_that_is_no_tensor(device):
    tau = torch.ones(3, device=device)
    for name in ("liquid_scan", "liquid_step"):
        with pytest.raises(TypeError, match=rf"^{name}: expected candidate to be a tensor, got str$"):
            getattr(ssm_kernels, name)("x", tau, 0.1)
