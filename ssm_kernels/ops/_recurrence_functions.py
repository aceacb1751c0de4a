"""Makes the functions of a recurrence that follow from its scan: a decoding step, and the summary of a span of steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._recurrences import recurrences
from ._arguments import names_arguments
from ._masks import as_mask, reset_state
from ._step_sizes import step_size

__all__ = ["by_name", "example_call", "make_step", "make_summary", "number_inputs", "publish"]

Function = Callable[..., tuple[Tensor, Tensor]]


def by_name(signature: inspect.Signature) -> Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any]]:
    """A function that maps the arguments of a call to their names and leaves defaults out. ``torch.compile`` can trace it.

    Raises:
        TypeError: the arguments are not those of the signature.
    """
    parameters = signature.parameters.values()
    positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    required = {each.name for each in parameters if each.default is each.empty}

    def bound(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        fits = len(given) == len(args) + len(kwargs) and required <= given.keys() <= signature.parameters.keys()
        if not fits:
            signature.bind(*args, **kwargs)  # raises
        return given

    return bound


def number_inputs(signature: inspect.Signature) -> list[str]:
    """The inputs that may be numbers."""
    return [name for name, each in signature.parameters.items() if "float" in str(each.annotation)]


def publish(function: Any, name: str, module: str, signature: inspect.Signature, doc: str) -> None:
    """Gives a function the name, module, signature and docstring of a public function."""
    function.__name__ = function.__qualname__ = name
    function.__module__, function.__doc__, function.__signature__ = module, doc, signature


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
    name, first, operator = row.step, row.inputs[0], getattr(torch.ops.ssm_kernels, row.step)
    signature = _without(inspect.signature(scan), ("reverse", "cu_seqlens", "return_last_state"), h0="state")
    numbers, bound = number_inputs(signature), by_name(signature)

    def step(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        reset = kwargs.pop("reset", None)
        if numbers or reset is not None:
            kwargs, args = bound(args, kwargs), ()
            kwargs["state"] = reset_state(name, kwargs.get("state"), reset, kwargs[first])
            kwargs |= {key: step_size(name, kwargs[key], kwargs[first]) for key in numbers}
        return _call(operator, signature, args, kwargs)

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
    publish(step, name, scan.__module__, signature, doc)
    return names_arguments(step)


def make_summary(scan: Callable[..., Any]) -> Function:
    """The summary of a documented scan. It has the scan's inputs and options, and no initial state."""
    row = recurrences[scan.__name__]
    name, first, operator = row.summary, row.inputs[0], getattr(torch.ops.ssm_kernels, row.summary)
    signature = _without(inspect.signature(scan), ("h0", "return_last_state"))
    numbers, bound = number_inputs(signature), by_name(signature)

    def summary(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if numbers:
            kwargs, args = bound(args, kwargs), ()
            kwargs |= {key: step_size(name, kwargs[key], kwargs[first]) for key in numbers}
        if kwargs.get("reset") is not None:
            kwargs["reset"] = as_mask(name, kwargs["reset"], 2)
        return _call(operator, signature, args, kwargs)

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
    publish(summary, name, scan.__module__, signature, doc)
    return names_arguments(summary)


def _call(operator: Any, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    try:
        results: tuple[Tensor, Tensor] = operator(*args, **kwargs)
    except RuntimeError:
        signature.bind(*args, **kwargs)  # the dispatcher's error for a missing argument is no TypeError
        raise
    return results
