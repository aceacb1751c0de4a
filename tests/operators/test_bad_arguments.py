"""Each argument of each operator in turn replaced by what it cannot be: one sentence of ours, or the plain call's results."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from bad_arguments import FLAGS, INTEGERS, NAMES, NUMBERS, call_of, fresh, is_ours, replaced, same
from decoding_helpers import DECODING_STEPS
from mlstm_helpers import function_of
from test_arguments import OPERATORS, Operator
from torch import Tensor

import ssm_kernels
from ssm_kernels import choices

OPERATOR = "selective_scan"
PAIRS = (
    [1.0], [1, 2, 3], [2.0, 1.0], [math.nan, 1.0], [0.0, math.nan], "ab", ["a", "b"], [1j, 2], [None, 1], 3, 3.0, 1j, [[0, 1]],
    {0.0: 1, 1.0: 2}, {0.0, 1.0}, [True, False], [10**400, 10**401], [0, 10**400], torch.ones(3), np.ones((1, 2)), object(),
)  # fmt: skip
# No step has one of these sizes.
LEGAL_PAIRS = ((-math.inf, math.inf), [-1e300, 1e300], torch.tensor([-1e9, 1e9]), np.array([-1e9, 1e9]))
POSITIONS = (
    [-1],
    [2**70],
    "ab",
    3,
    1.5,
    [1.0],
    [None],
    [1j],
    torch.ones(2),
    torch.ones(1, 1, dtype=torch.int64),
    [99],
    object(),
)

# Arguments that broadcast, by the beginnings of the operators' names: a number for all rows is legal.
BROADCAST = {
    ("liquid", "rglru"): {"tau", "dt", "recurrent_param"},
    ("selective_",): {"delta_A", "dt_A"},
}
# Numbers that may be negative.
SIGNED = {"scale", "gate_lower_bound"}


def values_of(annotation: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields values that the argument refuses, each with a name."""
    if isinstance(value, Tensor) or annotation.startswith("Tensor"):
        yield from replaced(value if isinstance(value, Tensor) else torch.ones(2, 3), is_present=isinstance(value, Tensor))
    for start, others in (
        ("float", NUMBERS),
        ("int", INTEGERS),
        ("bool", FLAGS),
        ("Sequence[float]", PAIRS),
        ("Positions", POSITIONS),
    ):
        if annotation.startswith(start) or (start == "float" and "| float" in annotation):
            yield from ((start, other) for other in others)
    if annotation.startswith(("str", *choices.__all__)):
        yield from (("str", other) for other in NAMES)


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=list(OPERATORS))
def test_every_argument_of_operators(operator: Operator) -> None:
    function, good = function_of(operator.function), operator.make("cpu")
    tried = 0
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = str(parameter.annotation)
        for kind, wrong in values_of(annotation, good.get(name)):
            if kind == "zero-dim" and any(
                operator.name.startswith(names) and name in arguments for names, arguments in BROADCAST.items()
            ):
                continue
            if (wrong is None and "None" in annotation) or (name in SIGNED and type(wrong) is float and wrong < 0):
                continue
            error = call_of(function, fresh(good) | {name: wrong})
            assert is_ours(error, operator.function), (name, kind, wrong, error)
            tried += 1
    assert tried > 20


@pytest.mark.parametrize("name", [name for name, each in OPERATORS.items() if "dt_limit" in str(each.overload._schema)])
def test_limits_of_steps(name: str) -> None:
    operator = OPERATORS[name]
    function, good = getattr(ssm_kernels, operator.function), operator.make("cpu") | {"dt_limit": None}
    expected = function(**fresh(good))
    for legal in LEGAL_PAIRS:
        assert same(function(**fresh(good) | {"dt_limit": legal}), expected)
    for wrong, message in (
        ([1.0], "expected dt_limit = (min, max), got 1 numbers"),
        ((2.0, 1.0), "expected dt_limit = (min, max) with min <= max, got (2, 1)"),
        ((0.0, math.nan), "expected dt_limit = (min, max) with min <= max, got (0, nan)"),
        ((0, 10**400), "expected dt_limit within a float's range, got an integer beyond it"),
    ):
        with pytest.raises(ValueError, match=f"^{operator.function}: {re.escape(message)}$"):
            function(**fresh(good) | {"dt_limit": wrong})
    with pytest.raises(
        TypeError, match=f"^{operator.function}: expected dt_limit to be a sequence of numbers or None, got set$"
    ):
        function(**fresh(good) | {"dt_limit": {0.0, 1.0}})


@pytest.mark.parametrize("name", ["liquid_scan", "liquid_step", "liquid_scan_summary"])
def test_step_sizes_as_numbers(name: str) -> None:
    function, good = getattr(ssm_kernels, name), OPERATORS[name].make("cpu")
    wide = {
        key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value for key, value in good.items()
    }
    for dt in (1e39, 10**50, np.float64(1e39)):
        with pytest.raises(
            ValueError, match=rf"^{name}: expected dt up to 3.4e\+38, the largest number of torch.float32, or inf"
        ):
            function(**good | {"dt": dt})
        function(**wide | {"dt": dt})
    for dt in (math.nan, -1, -math.inf):
        with pytest.raises(ValueError, match=f"^{name}: expected dt to be not negative, got {dt}$"):
            function(**good | {"dt": dt})
    with pytest.raises(ValueError, match=f"^{name}: expected dt within a float's range, got an integer beyond it$"):
        function(**wide | {"dt": 10**400})
    for dt in (math.inf, 2**70, 3e38, Fraction(1, 2)):
        assert same(function(**good | {"dt": dt}), function(**good | {"dt": torch.full((4,), float(dt))})), dt


@pytest.mark.parametrize("name", [name for name in OPERATORS if "_update" in name])
def test_decoding_operators_refuse_gradients_with_one_sentence(name: str) -> None:
    """When backward reaches the result; at once where the call writes it to an argument, or to a leaf."""
    operator = OPERATORS[name]
    function, good = getattr(ssm_kernels, operator.function), fresh(operator.make("cpu"))
    scan = {"mamba3_state_update": "mamba3_chunk_scan"}.get(name, "causal_conv1d" if "conv" in name else "selective_scan")
    sentence = f"{operator.function}: decoding is not differentiable: train with {scan}, and decode under torch.no_grad()"
    for leaf in ("x", next(state for state in ("state", "conv_state", "ssm") if state in good)):
        with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)}$"):
            function(**good | {leaf: good[leaf].clone().requires_grad_()}).sum().backward()
    with torch.no_grad():
        function(**good | {"x": good["x"].clone().requires_grad_()})


def test_numbers_and_flags_of_numpy_and_of_tensors() -> None:
    operator = OPERATORS["rms_norm_gated"]
    good = operator.make("cpu") | {"eps": 1e-5, "norm_before_gate": True}
    expected = ssm_kernels.rms_norm_gated(**fresh(good))
    for eps in (np.float32(1e-5), np.float64(1e-5), np.array(1e-5), torch.tensor(1e-5, dtype=torch.float64)):
        for flag in (1, np.True_, np.array(True), torch.tensor(True)):
            found = ssm_kernels.rms_norm_gated(**fresh(good) | {"eps": eps, "norm_before_gate": flag})
            torch.testing.assert_close(found, expected)
    for name, wrong in (("eps", np.True_), ("norm_before_gate", np.float64(1)), ("norm_before_gate", np.array([True, False]))):
        assert is_ours(call_of(ssm_kernels.rms_norm_gated, fresh(good) | {name: wrong}), "rms_norm_gated")


def test_symbols_as_numbers_and_flags() -> None:
    """Sizes of compiled code that is made for all of them."""
    a = torch.rand(2, 7, 3)

    def reversed_if_long(a: Tensor) -> Tensor:
        return ssm_kernels.linear_scan(a, a, reverse=a.shape[1] > 5)

    def one_step_a_step(a: Tensor) -> Tensor:
        return ssm_kernels.liquid_scan(a, a + 1, dt=1 / a.shape[1])

    for function in (reversed_if_long, one_step_a_step):
        compiled = torch.compile(function, backend="eager", dynamic=True, fullgraph=True)
        for x in (a, torch.rand(2, 4, 3)):
            torch.testing.assert_close(compiled(x), function(x))


@pytest.mark.parametrize("name", DECODING_STEPS)
def test_lazily_negated_views_of_decoding_operators(name: str) -> None:
    """The memory of x.conj().imag holds the negatives of its values."""
    function, good = getattr(ssm_kernels, name), OPERATORS[name].make("cpu")
    expected, written = function(**fresh(good)), DECODING_STEPS[name].written
    good["out"] = torch.empty_like(expected)
    if "out" not in written:
        del good["out"]
    for argument, value in good.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        negated = torch._neg_view(-value)
        error = call_of(function, fresh(good) | {argument: negated})
        if argument in written:
            message = f"expected {argument} to have its values in memory, got a lazily negated view: pass a copy"
            assert isinstance(error, NotImplementedError) and message in str(error), (argument, error)
        else:
            assert same(function(**fresh(good) | {argument: torch._neg_view(-value)}), expected), argument
