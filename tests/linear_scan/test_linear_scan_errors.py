"""linear_scan and its family: the order of arguments, messages of steps and of the internal operators.

test_operators_errors.py has the messages of the scans.
"""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from helpers import says
from recurrence_helpers import LIQUID, MINGRU, PLAIN, Variant, every_recurrence, make_inputs

from ssm_kernels import reference

OPERATOR = "linear_scan"
SIZES = {"batch": 2, "seqlen": 5, "channels": 4}
SEQUENCE = "(batch, seqlen, channels)"


def good_inputs(variant: Variant, **options) -> dict:
    return make_inputs(variant, **(SIZES | {"dtype": torch.float32} | options))


def first_name(variant: Variant) -> str:
    return next(iter(variant.recurrence.inputs))


def other_names(variant: Variant) -> list[str]:
    """Names of the inputs that must have the first one's shape and dtype."""
    return [name for name in list(variant.recurrence.inputs)[1:] if name not in variant.recurrence.broadcast]


# ----- the functions


@every_recurrence
def test_options_are_keyword_only(variant, device):
    inputs = good_inputs(variant, device=device)
    positional = [inputs[name] for name in variant.recurrence.positional_names]
    with pytest.raises(TypeError, match="positional"):
        variant.scan(*positional, True)
    with pytest.raises(TypeError, match="positional"):
        variant.step(*positional, True)
    kinds = {p.kind for p in list(inspect.signature(variant.scan).parameters.values())[len(positional) :]}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


GATES = {"a", "gate", "forget", "input", "recurrence_gate", "input_gate", "log_gate"}
GATED = {"b", "candidate", "x"}


@every_recurrence
def test_gates_come_before_the_input_that_they_gate(variant):
    """In the function, the step, the reference and the operator; inputs that broadcast come last."""
    kinds = [0 if name in GATES else 1 if name in GATED else 2 for name in variant.recurrence.inputs]
    assert kinds == sorted(kinds)
    names = [*variant.recurrence.inputs]
    for function in (variant.scan, variant.step, getattr(reference, variant.name)):
        assert list(inspect.signature(function).parameters)[: len(names)] == names
    assert [argument.name for argument in variant.operator._schema.arguments][: len(names)] == names


@pytest.mark.parametrize("names", [("x", "log_gate"), ("x", "recurrence_gate", "input_gate", "recurrent_param")], ids=str)
def test_inputs_in_an_older_order_are_refused(names, device):
    """They have one shape: taken for one another they would give wrong numbers."""
    variant = next(variant for variant in PLAIN.values() if variant.recurrence.inputs.keys() == {*names})
    inputs = good_inputs(variant, h0=False, device=device)
    in_order = [inputs[name] for name in names]
    of_step = [x[:, 0] if x.dim() == 3 else x for x in in_order]
    for function, arguments in (
        (variant.scan, in_order),
        (variant.step, of_step),
        (getattr(reference, variant.name), in_order),
    ):
        with pytest.raises(TypeError, match="positional argument"):
            function(*arguments)
        with pytest.raises(TypeError, match="multiple values for argument"):
            function(arguments[0], **dict(zip(names[1:], arguments[1:], strict=True)))
    with pytest.raises(RuntimeError, match="positional argument"):
        variant.operator(*in_order)
    usage = {
        "hgrn": "expected x by keyword, as in {}(log_gate, x=x), got 2 positional arguments: gates come first",
        "rglru": "expected x and recurrent_param by keyword, as in {}(recurrence_gate, input_gate, x=x, "
        "recurrent_param=recurrent_param), got 4 positional arguments: gates come first",
    }[variant.name.removesuffix("_scan")]
    for function, arguments in ((variant.scan, in_order), (variant.step, of_step)):
        name = function.__name__
        with pytest.raises(TypeError, match="^" + re.escape(f"{name}: {usage.format(name)}") + "$"):
            function(*arguments)


@every_recurrence
def test_errors_of_steps(variant, device):
    """They name the step and its `state`, also under autocast and vmap."""
    inputs = good_inputs(variant, seqlen=1, device=device)
    of_step = {name: inputs[name] for name in variant.recurrence.inputs}
    of_step = {name: x[:, 0] if x.dim() == 3 else x for name, x in of_step.items()} | {"state": inputs["h0"]}
    step, first = variant.name.replace("_scan", "_step"), first_name(variant)
    axes = "(batch, channels)"

    def assert_step_raises(error, message, **bad):
        with pytest.raises(error, match=rf"^{re.escape(message)}"):
            variant.step(**of_step | bad)

    for shape in ((4,), (2, 3, 4), ()):
        bad = {first: torch.zeros(shape, device=device)}
        assert_step_raises(ValueError, f"{step}: expected {first} of shape {axes}, got {[*shape]}", **bad)
    for name in (*other_names(variant), "state"):
        for shape in ((3, 4), (2, 1), (4,), (2, 1, 4)):
            bad = {name: torch.zeros(shape, device=device)}
            assert_step_raises(ValueError, f"{step}: expected {name} of shape {axes} = [2, 4], got {[*shape]}", **bad)
    for name in variant.recurrence.broadcast:
        for shape in ((3,), (3, 1), (1, 2, 4)):
            message = f"{step}: expected {name} of a shape that broadcasts to {axes} = [2, 4], got {[*shape]}"
            assert_step_raises(ValueError, message, **{name: torch.ones(shape, device=device)})
    like = f"(with {first} of dtype float32)"
    bad = {"state": of_step["state"].double()}
    assert_step_raises(RuntimeError, f"{step}: expected state of dtype float32 {like}, got float64", **bad)
    bad = {"state": of_step["state"].to("meta")}
    assert_step_raises(RuntimeError, f"{step}: expected state on {of_step[first].device} (the device of {first})", **bad)
    for name in other_names(variant):
        assert_step_raises(
            RuntimeError, f"{step}: expected {name} of dtype float32 {like}, got float16", **{name: of_step[name].half()}
        )
    bad = {first: of_step[first].long()}
    assert_step_raises(
        RuntimeError, f"{step}: expected {first} of dtype float32, float16, bfloat16 or float64, got int64", **bad
    )
    if "candidate_activation" in variant.recurrence.options:
        message = f"{step}: unknown candidate_activation 'relu', expected one of: none, g, tanh"
        assert_step_raises(ValueError, message, candidate_activation="relu")
    with torch.autocast(of_step[first].device.type, torch.bfloat16):
        variant.step(**of_step | {name: of_step[name].half() for name in other_names(variant)})
    bad = {"state": of_step["state"][:1]}
    with pytest.raises(ValueError, match=re.escape(f"{step}: expected state of shape {axes} = [2, 4], got [1, 4]")):
        torch.vmap(lambda x: variant.step(**of_step | bad | {first: x}))(of_step[first][None])


@pytest.mark.parametrize("dt", [None, "0.1", [0.1]], ids=repr)
def test_step_size_that_is_no_number(dt, device):
    inputs = good_inputs(LIQUID, device=device)
    of_step = [inputs["candidate"][:, 0], inputs["tau"], dt]
    for name, call in (
        ("liquid_scan", lambda: LIQUID.scan(**inputs | {"dt": dt})),
        ("liquid_step", lambda: LIQUID.step(*of_step)),
    ):
        with pytest.raises(TypeError, match=says(f"{name}: expected dt to be a tensor or a number, got ")):
            call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recurrence": "gru_scan"}, "unknown recurrence 'gru_scan'"),
        ({"inputs": 1}, "mingru_scan: expected 2 inputs, got 1"),
        ({"inputs": 3}, "mingru_scan: expected 2 inputs, got 3"),
    ],
    ids=str,
)
def test_internal_operator(change, message, device):
    gate = good_inputs(MINGRU, device=device)["gate"]
    inputs, recurrence = [gate] * change.get("inputs", 2), change.get("recurrence", "mingru_scan")
    for operator in (torch.ops.ssm_kernels._linear_recurrence, torch.ops.ssm_kernels._linear_recurrence_fwd):
        with pytest.raises(ValueError, match=says(message)):
            operator(inputs, None, None, None, recurrence, "none", True, False)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("h", (2, 5, 3), f"mingru_scan: expected h of shape {SEQUENCE} = [2, 5, 4], got [2, 5, 3]"),
        ("grad_h", (2, 4, 4), f"mingru_scan: expected grad_h of shape {SEQUENCE} = [2, 5, 4], got [2, 4, 4]"),
        (
            "grad_last_state",
            (1, 4),
            "mingru_scan: expected grad_last_state of shape ",
        ),
    ],
)
def test_internal_backward_operator(name, shape, message, device):
    sequence, state = torch.zeros(2, 5, 4, device=device), torch.zeros(2, 4, device=device)
    arguments = {"grad_h": sequence, "grad_last_state": state, "inputs": [sequence] * 2, "h": sequence}
    arguments |= {"h0": None, "cu_seqlens": None, "reset": None, "recurrence": "mingru_scan", "candidate_activation": "none"}
    arguments |= {"gate_is_logit": True, "reverse": False, "needs_grad": [True] * 2 + [False] * 3}
    torch.ops.ssm_kernels._linear_recurrence_bwd(**arguments)
    with pytest.raises(ValueError, match=says(message)):
        torch.ops.ssm_kernels._linear_recurrence_bwd(**arguments | {name: torch.zeros(shape, device=device)})
