"""Makes the functions of a recurrence that follow from its scan: a decoding step, and the summary of a span of steps."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .._recurrences import recurrences
from ._arguments import names_arguments
from ._masks import as_mask, reset_state
from ._step_sizes import step_size

__all__ = ["define", "example_call", "make_step", "make_summary", "step_sizes"]

Function = Callable[..., tuple[Tensor, Tensor]]


def step_sizes(name: str, signature: inspect.Signature, first: str) -> list[str]:
    """Lines of a function that replace inputs that may be numbers by tensors for the input ``first``."""
    numbers = [key for key, each in signature.parameters.items() if "float" in str(each.annotation)]
    return [f"{key} = step_size({name!r}, {key}, {first})" for key in numbers]


def define(name: str, module: str, signature: inspect.Signature, doc: str, body: Iterable[str], **scope: Any) -> Any:
    """Compiles a function, as ``dataclasses`` does. Python binds its arguments, and ``torch.compile`` can trace it.

    Args:
        name, module, signature, doc: of the function. Its defaults are literals.
        body: its lines, which read the arguments by name.
        scope: what else the lines read.
    """
    empty, parameters = inspect.Parameter.empty, signature.parameters.values()
    bare = signature.replace(parameters=[each.replace(annotation=empty) for each in parameters], return_annotation=empty)
    lines = [f"def make({', '.join(scope)}):", f" def {name}{bare}:", *(f"  {line}" for line in body), f" return {name}"]
    made: dict[str, Any] = {}
    exec(compile("\n".join(lines), f"<{module}.{name}>", "exec"), vars(sys.modules[module]), made)
    function = made["make"](**scope)
    function.__qualname__, function.__module__, function.__doc__ = name, module, doc
    function.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": signature.return_annotation}
    return function


def example_call(scan: str, signature: inspect.Signature, *more: str) -> tuple[str, str]:
    """For docstrings: the names of the inputs, and the arguments of a call, keywords where a function asks for them."""
    inputs = recurrences[scan].inputs

    def argument(name: str) -> str:
        parameter = signature.parameters[name]
        return f"{name}={name}" if parameter.kind is parameter.KEYWORD_ONLY else name

    return ", ".join(inputs), ", ".join(map(argument, (*inputs, *more)))


def _without(signature: inspect.Signature, names: Iterable[str], **renamed: str) -> inspect.Signature:
    kept = [each for name, each in signature.parameters.items() if name not in names]
    kept = [each.replace(name=renamed.get(each.name, each.name)) for each in kept]
    return signature.replace(parameters=kept, return_annotation="tuple[Tensor, Tensor]")


def make_step(scan: Callable[..., Any]) -> Function:
    """The step of a documented scan. It has the scan's inputs and the options of its formula."""
    row = recurrences[scan.__name__]
    name, first, operator = row.step, row.inputs[0], getattr(torch.ops.ssm_kernels, row.step).default
    signature = _without(inspect.signature(scan), ("reverse", "cu_seqlens", "return_last_state"), h0="state")
    body = [
        "if reset is not None:",
        f"    state = reset_state({name!r}, state, reset, {first})",
        *step_sizes(name, signature, first),
        *_calls(signature, ("reset",)),
    ]
    names, call = example_call(row.scan, signature)
    _, call_with_state = example_call(row.scan, signature, "state")
    doc = f"""One step of :func:`{row.scan}`; see :func:`linear_step`.

    Examples:
        >>> import torch
        >>> from ssm_kernels import {name}
        >>> {names} = torch.rand({len(row.inputs)}, 2, 8)  # (batch, channels)
        >>> h, state = {name}({call})  # from a state of zero
        >>> h, state = {name}({call_with_state})
        >>> h.shape
        torch.Size([2, 8])
    """
    scope = {"operator": operator, "reset_state": reset_state, "step_size": step_size}
    return names_arguments(define(name, scan.__module__, signature, doc, body, **scope))


def make_summary(scan: Callable[..., Any]) -> Function:
    """The summary of a documented scan. It has the scan's inputs and options, and no initial state."""
    row = recurrences[scan.__name__]
    name, first, operator = row.summary, row.inputs[0], getattr(torch.ops.ssm_kernels, row.summary).default
    signature = _without(inspect.signature(scan), ("h0", "return_last_state"))
    body = [f"reset = as_mask({name!r}, reset, 2)", *step_sizes(name, signature, first), *_calls(signature)]
    names, call = example_call(row.scan, signature)
    doc = f"""The map of :func:`{row.scan}` from the state before all steps to the state after them.

    :func:`{row.scan}` documents the inputs, :func:`linear_scan_summary` the other arguments, the results and the errors.

    Examples:
        >>> import torch
        >>> from ssm_kernels import {name}
        >>> {names} = torch.rand({len(row.inputs)}, 2, 100, 8)  # (batch, seqlen, channels)
        >>> last_state, decay = {name}({call})
        >>> last_state.shape, decay.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))
    """
    scope = {"operator": operator, "as_mask": as_mask, "step_size": step_size}
    return names_arguments(define(name, scan.__module__, signature, doc, body, **scope))


def _calls(signature: inspect.Signature, without: Iterable[str] = ()) -> list[str]:
    """Lines that call ``operator``: without its options, which are bools or None, if all are defaults.

    The dispatcher takes half a microsecond for each keyword.
    """
    parameters = [each for name, each in signature.parameters.items() if name not in without]
    inputs = [each for each in parameters if each.name == "state" or each.default is each.empty]
    options = [each for each in parameters if each not in inputs]

    def call(given: Iterable[inspect.Parameter]) -> str:
        passed = (f"{each.name}={each.name}" if each.kind is each.KEYWORD_ONLY else each.name for each in given)
        return f"return operator({', '.join(passed)})"

    if not options:
        return [call(inputs)]
    are_defaults = " and ".join(f"{each.name} is {each.default}" for each in options)
    return [f"if {are_defaults}:", f"    {call(inputs)}", call(parameters)]
