"""The public functions with good inputs, and how a test asks for the whole message of a bad argument."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from decoding_helpers import DECODING_STEPS
from mlstm_helpers import function_of
from operator_spec import Inputs, OperatorSpec
from operators import OPERATORS
from recurrence_helpers import PLAIN
from torch import Tensor


class Function(NamedTuple):
    """A public function and its good inputs.

    Attributes:
        first: the tensor whose dtype and device the others must have.
        sizes: options of ``make``, by which the table of shapes is written.
        indices: options of ``make`` that add tensors of integers, a set for each call.
        spec: None for a decoding step.
    """

    name: str
    make: Callable[..., Inputs]
    first: str
    sizes: Inputs
    indices: tuple[Inputs, ...] = ({},)
    spec: OperatorSpec | None = None

    def __repr__(self) -> str:
        return self.name

    def __call__(self, **inputs: Any) -> Any:
        return function_of(self.name)(**inputs)

    def inputs(self, **options: Any) -> Inputs:
        return self.make(**({"dtype": torch.float32} | self.sizes | options))

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(function_of(self.name)).parameters


HEADS = {"heads": 3, "groups": 3}


def function(spec: OperatorSpec) -> Function:
    return Function(spec.name, spec.make_inputs, next(iter(spec.make_inputs())), dict(spec.good), (*spec.indices,), spec)


def function_of_step(name: str) -> Function:
    step = DECODING_STEPS[name]
    sizes = dict(step.good)
    slots = sizes.pop("slots")
    return Function(name, step.make_inputs, step.first, sizes, ({"slots": slots},))


STEPS = {name: function_of_step(name) for name in DECODING_STEPS}
UPDATE, CONV_UPDATE = STEPS["selective_state_update"], STEPS["causal_conv1d_update"]
BY_NAME = {name: function(spec) for name, spec in OPERATORS.items()}
OF_SPECS = [*BY_NAME.values()]
SELECTIVE, SSD, CONV = (BY_NAME[name] for name in ("selective_scan", "ssd_chunk_scan", "causal_conv1d"))
RECURRENCES = {name: BY_NAME[name] for name in PLAIN}
FUNCTIONS = [*OF_SPECS, *STEPS.values()]
PACKING = [each for each in OF_SPECS if each.spec.packs]


def over(functions: list[Function]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("function", functions, ids=repr)


every_function, every_packing = over(FUNCTIONS), over(PACKING)


# Advice that a message may add: the layout that the sizes fit, the call to make, or the nearest of several names.
REMEDY = r"(, which fits inputs of shape [^:\n]+)?(: pass [^\n]+|; did you mean '\w+'\?)?"


def assert_refuses(function: Function, inputs: Inputs, error: type[Exception], message: str, *, on_meta: bool = True) -> None:
    """With this message, and nothing but a remedy after it on its line."""
    for place in (None, "meta") if on_meta else (None,):
        moved = {name: value.to(place) if place and isinstance(value, Tensor) else value for name, value in inputs.items()}
        with pytest.raises(error, match=rf"^{re.escape(f'{function.name}: {message}')}{REMEDY}(\n|$)"):
            function(**moved)
