"""Messages of every operator about bad arguments. A value or shape is a ValueError; test_operators_dtypes.py has the others.

Messages are compared as a whole, on the device and on meta. The operators' own files have messages that need more than a
changed argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import ssd_helpers
import torch
from conv_helpers import BAD_ACTIVATIONS, unknown_activation
from error_helpers import (
    CONV,
    CONV_UPDATE,
    FUNCTIONS,
    HEADS,
    OF_SPECS,
    PACKING,
    RECURRENCES,
    SELECTIVE,
    SSD,
    UPDATE,
    Function,
    assert_refuses,
    every_function,
    every_packing,
    over,
)
from helpers import BAD_OFFSETS
from operator_spec import Inputs, Shapes
from selective_scan_helpers import BAD_DISCRETIZATIONS, unknown_discretization
from torch import Tensor

import ssm_kernels
from ssm_kernels.reference import ALIASES, DISCRETIZATIONS

OPERATOR = "every operator"


# ----- shapes

DN, BDN = "(dim, dstate)", "(batch, dim, dstate)"
CONV_UPDATE_SHAPES: Shapes = {
    "x": [("(batch, channels) or (batch, seqlen, channels)", [(2, 3, 5, 1), (5,)])],
    "conv_state": [
        ("(batch, channels, length)", [(3, 5)]),
        ("(batch, channels, length) = [3, 5, 4]", [(2, 5, 4), (3, 4, 4)]),
    ],
    "weight": [("(channels, width) = [5, 4]", [(4, 4)])],
    "bias": [("(channels,) = [5]", [(4,)])],
    "state_batch_indices": [("(batch,) = [3]", [(2,)])],
}

UPDATE_SHAPES: Shapes = {
    "state": [
        (f"{BDN} or (batch, heads, headdim, dstate)", [(6, 4)]),
        (f"{BDN} = [2, 6, 4]", [(3, 6, 4), (1, 6, 4), (2, 5, 4)]),
    ],
    "x": [("(batch, dim)", [(2,), (2, 6, 1, 1)])],
    "dt": [("(batch, dim) = [2, 6]", [(2, 1)])],
    "A": [(f"{DN} = [6, 4]", [(6, 1), (2, 6, 4)])],
    "B": [
        ("(batch, dstate) or (batch, groups, dstate)", [(4,)]),
        ("(batch, dstate) = [2, 4]", [(2, 5)]),
        ("(batch, groups, dstate) = [2, 2, 4]", [(1, 2, 4)]),
    ],
    "C": [("(batch, groups, dstate) = [2, 2, 4]", [(2, 1, 4), (2, 4)])],
    "D": [("(dim,) = [6]", [(1,), (6, 4)])],
    "z": [("(batch, dim) = [2, 6]", [(1, 6)])],
    "dt_bias": [("(dim,) = [6]", [(2, 6)])],
    "state_batch_indices": [("(batch,) = [2]", [(3,), (1,), (2, 1, 1), ()])],
}
UPDATE_SHAPES_WITH_HEADS: Shapes = {
    "state": [("(batch, heads, headdim, dstate) = [2, 3, 6, 4]", [(2, 3, 5, 4)])],
    "x": [("(batch, heads, headdim)", [(2, 18)])],
    "dt": [("(batch, heads, headdim) = [2, 3, 6]", [(2, 3), (2, 3, 1)])],
    "A": [("(heads, headdim, dstate) = [3, 6, 4]", [(3,), (3, 1, 1)])],
    "C": [("(batch, groups, dstate) = [2, 3, 4]", [(2, 1, 4)])],
    "D": [("(heads, headdim) = [3, 6]", [(3,)])],
    "z": [("(batch, heads, headdim) = [2, 3, 6]", [(2, 3, 1)])],
    "dt_bias": [("(heads, headdim) = [3, 6]", [(3, 1)])],
}


SHAPES: list[tuple[Function, Inputs, Shapes]] = [
    *((function, options, shapes) for function in OF_SPECS for options, shapes in function.spec.bad_shapes),
    (CONV_UPDATE, {}, CONV_UPDATE_SHAPES),
    (UPDATE, {}, UPDATE_SHAPES),
    (UPDATE, HEADS, UPDATE_SHAPES_WITH_HEADS),
]


def shape_cases() -> Iterator[object]:
    for function, options, shapes in SHAPES:
        for name, expectations in shapes.items():
            for expected, wrong in expectations:
                for shape in wrong:
                    yield pytest.param(function, options, name, expected, shape, id=f"{function}-{name}-{[*shape]}-{expected}")


@pytest.mark.parametrize(("function", "options", "name", "expected", "shape"), list(shape_cases()))
def test_shapes(function, options, name, expected, shape, device):
    dtype = torch.int64 if name in ("seq_idx", "state_batch_indices") else torch.float32
    inputs = function.inputs(device=device, **options) | {name: torch.zeros(shape, dtype=dtype, device=device)}
    assert_refuses(function, inputs, ValueError, f"expected {name} of shape {expected}, got {[*shape]}")


# ----- packed sequences


@pytest.mark.parametrize("reverse", [False, True], ids=["int32", "int64_reverse"])
@pytest.mark.parametrize("offsets", BAD_OFFSETS, ids=str)
@every_packing
def test_values_of_offsets(function, offsets, reverse, device):
    if function is CONV and device == "cuda":
        pytest.skip("causal_conv1d does not wait for the GPU to check its offsets")
    inputs = function.inputs(cu_seqlens=(0, 10), device=device)
    inputs["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int64 if reverse else torch.int32, device=device)
    takes_reverse = "reverse" in function.parameters and function.name != "mamba3_chunk_scan"
    options = {"reverse": reverse} if takes_reverse else {}
    states = {name: None for name in inputs if name == "h0" or name.startswith("initial_")}
    message = f"expected cu_seqlens {BAD_OFFSETS[offsets]}"
    if len(offsets) == 1:
        message += " sequences"
    assert_refuses(function, inputs | options | states, ValueError, message, on_meta=False)


@pytest.mark.parametrize("batch", [0, 2])
@every_packing
def test_offsets_with_a_batch(function, batch, device):
    inputs = function.inputs(batch=batch, device=device) | {"cu_seqlens": torch.tensor([0, 5], device=device)}
    assert_refuses(function, inputs, ValueError, f"expected batch 1 with cu_seqlens, got {batch}")


@pytest.mark.parametrize("shape", [(0,), (), (1, 3)], ids=str)
@every_packing
def test_shape_of_offsets(function, shape, device):
    inputs = function.inputs(batch=1, device=device) | {"cu_seqlens": torch.zeros(shape, dtype=torch.int64, device=device)}
    assert_refuses(function, inputs, ValueError, f"expected cu_seqlens of shape (sequences + 1,), got {[*shape]}")


@over([*RECURRENCES.values()])
def test_resets_of_packed_sequences(function, device):
    inputs = function.inputs(cu_seqlens=(0, 2, 5), device=device)
    inputs["reset"] = torch.zeros(1, 5, dtype=torch.bool, device=device)
    message = "expected reset or cu_seqlens, got both: let a sequence of cu_seqlens begin at each reset"
    assert_refuses(function, inputs, ValueError, message)


@over([each for each in PACKING if {"seq_idx", "cu_seqlens"} <= {*each.parameters}])
def test_both_ways_of_packing(function, device):
    inputs = function.inputs(**function.indices[1], device=device)
    seqlen = int(inputs["cu_seqlens"][-1])
    inputs["seq_idx"] = torch.zeros(1, seqlen + 1, dtype=torch.int32, device=device)
    message = f"expected seq_idx of shape (batch, seqlen) = [1, {seqlen}], got [1, {seqlen + 1}]"
    assert_refuses(function, inputs, ValueError, message)


# ----- options and sizes

ZEROS = torch.zeros
METHODS = [*DISCRETIZATIONS, "gbt(0.7)", "dirac", *ALIASES]
EXPONENTIAL = ", ".join(ssd_helpers.NAMES)

# Function, options of its good inputs, changed arguments, message.
VALUES: list[tuple[Function, Inputs, Inputs, str]] = [
    *((function, *row) for function in OF_SPECS for row in function.spec.bad_values),
    *(
        (
            UPDATE,
            options,
            dict.fromkeys("BC", ZEROS(2, groups, 4)),
            f"expected the groups of B and C to divide {axis}, got {groups}",
        )
        for options, axis in (({}, "dim = 6"), (HEADS, "heads = 3"))
        for groups in (0, 4)
    ),
    *((UPDATE, {"dstate": size}, {}, f"expected dstate from 1 to 256, got {size}") for size in (0, 257)),
    *((UPDATE, {}, {"discretization": name}, unknown_discretization(name)) for name in BAD_DISCRETIZATIONS),
    *((CONV_UPDATE, {}, {"activation": name}, unknown_activation(name)) for name in BAD_ACTIVATIONS),
    (CONV_UPDATE, {"length": 2}, {}, "expected conv_state of at least width - 1 = 3 steps, got [3, 5, 2]"),
]


@pytest.mark.parametrize(("function", "options", "changed", "message"), VALUES, ids=lambda value: str(value)[:60])
def test_values(function, options, changed, message, device):
    changed = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in changed.items()}
    assert_refuses(function, function.inputs(device=device, **options) | changed, ValueError, message)


@pytest.mark.parametrize(
    ("function", "options", "changed"),
    [
        (SELECTIVE, {"dstate": 256, "seqlen": 2}, {}),
        (SSD, {"seqlen": 2, "headdim": 256, "dstate": 256}, {}),
        *((SSD, {}, {"chunk_size": chunk_size}) for chunk_size in (1, 2**40)),
        *((SELECTIVE, {}, {"discretization": name}) for name in METHODS),
        *((function, {}, {}) for function in FUNCTIONS),
    ],
    ids=lambda value: str(value)[:40],
)
def test_good_inputs_are_accepted(function, options, changed, device):
    function(**function.inputs(device=device, **options) | changed)


@pytest.mark.parametrize("name", sorted(DISCRETIZATIONS.keys() - set(ssd_helpers.METHODS)))
def test_discretizations_that_are_not_exponential(name, device):
    """They are known, and others are listed."""
    message = f"discretization '{name}' is not supported"
    with pytest.raises(ValueError, match=f"^ssd_chunk_scan: {message}") as error:
        SSD(**SSD.inputs(discretization=name, device=device))
    assert str(error.value).splitlines()[0].partition("expected one of: ")[2] == EXPONENTIAL


# ----- the functions


@every_function
def test_required_arguments(function, device):
    for name, parameter in function.parameters.items():
        inputs = function.inputs(device=device)
        inputs.pop(name, None)
        if parameter.default is inspect.Parameter.empty:
            with pytest.raises(TypeError, match=name):
                function(**inputs)


@pytest.mark.parametrize(
    ("function", "positional", "option"),
    [(SELECTIVE, ["u", "delta", "A", "B", "C", "D", "z", "delta_bias"], "zoh"), (SSD, ["x", "dt", "A", "B", "C"], 64)],
    ids=["selective_scan", "ssd_chunk_scan"],
)
def test_options_are_keyword_only(function, positional, option, device):
    """mamba_ssm's SSD takes chunk_size as its sixth argument, in the place of another one here."""
    inputs, parameters = function.inputs(device=device), function.parameters
    with pytest.raises(TypeError, match="positional"):
        getattr(ssm_kernels, function.name)(*(inputs[name] for name in positional), option)
    assert [*parameters][: len(positional)] == positional
    assert {parameters[name].kind for name in [*parameters][len(positional) :]} == {inspect.Parameter.KEYWORD_ONLY}


@every_function
def test_bad_arguments_leave_no_trace(function, device):
    """After an error the arguments are as before, and the next call works."""
    inputs = function.inputs(device=device)
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    kept, name = {name: value.clone() for name, value in tensors.items()}, [*tensors][-1]
    expected = function(**inputs | {name: value.clone() for name, value in tensors.items()})
    with pytest.raises(ValueError, match=f"expected {name} of"):
        function(**inputs | {name: inputs[name][None]})
    assert all(torch.equal(value, kept[name]) for name, value in tensors.items())
    results = function(**inputs)
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (results, expected)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
