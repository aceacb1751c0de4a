"""Arguments of the operators' Python functions: error messages, and the limits of step sizes."""

from __future__ import annotations

import functools
import inspect
import numbers
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.amp.autocast_mode import is_autocast_available
from torch.utils._python_dispatch import _get_current_dispatch_mode

from . import choices
from ._torchscript import refuse_script

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def is_autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on; False for a device that has none, such as meta, for which PyTorch's question raises."""
    # torch.compile of PyTorch 2.11 cannot trace is_autocast_available.
    has_autocast = device_type in ("cpu", "cuda") or is_autocast_available(device_type)
    return has_autocast and torch.is_autocast_enabled(device_type)


def empty_output(x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """Memory for the output of a decoding step: like ``x``, which autocast casts.

    Zero with ``cu_seqlens``: the operator does not write to tokens after its end.
    """
    is_cast = is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype(x.device.type) if is_cast else x.dtype
    make = torch.empty_like if cu_seqlens is None else torch.zeros_like
    return make(x, dtype=dtype, memory_format=torch.contiguous_format)


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor cannot be read: for tracing, under a dispatch mode or a transform, of a subclass."""
    traces = torch.compiler.is_compiling() or torch._C._get_tracing_state() or _get_current_dispatch_mode() is not None
    return bool(traces or type(tensor) is not torch.Tensor or torch._C._are_functorch_transforms_active())


def names_arguments(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorator: an operator's errors name the operator and the argument. Only failing calls inspect the arguments.

    The dispatcher's own message for an argument that is not a tensor is a RuntimeError of several lines with the value printed.
    Python's for an attribute of a None is an AttributeError.
    """

    @functools.wraps(function)
    def operator(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except (AttributeError, OverflowError, RuntimeError, TypeError):
            error = argument_error(function, args, kwargs)
            if error is None:
                raise
        raise error

    return refuse_script(operator)


def did_you_mean(given: object, choices: Iterable[str | None]) -> str:
    """``"; did you mean 'zoh'?"`` for the choice nearest to ``given``, or ``""``.

    The operators' own messages follow the same rule, which ``csrc/torch/choices.cpp`` has.
    """
    # PyTorch takes strings as UTF-8, which has no lone surrogates.
    name = str(given).encode(errors="replace").decode()
    suggestion: str = torch.ops.ssm_kernels._nearest_choice(name, [choice for choice in choices if choice is not None])
    return suggestion


def finite_dt_limit(dt_limit: Sequence[float] | None) -> list[float]:
    """``dt_limit`` with the largest finite numbers in place of infinities and of None: the operators take all as no limit.

    AOTInductor cannot read an infinity back from its packages.
    """
    largest = sys.float_info.max
    if dt_limit is None:
        return [-largest, largest]
    return [max(min(limit, largest), -largest) for limit in dt_limit]


def argument_error(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """Describes the first argument of a wrong type, or the first number beyond a float's range, if there is one."""
    signature = inspect.signature(function)
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return _keyword_error(function.__name__, signature, len(args))
    for name, value in arguments.items():
        annotation = str(signature.parameters[name].annotation)
        if torch.overrides.is_tensor_like(value) or (value is None and "None" in annotation):
            continue
        kind = _expected_kind(annotation, value)
        if kind is None:
            if "float" in annotation and _is_beyond_float(value):
                return ValueError(f"{function.__name__}: expected {name} within a float's range, got an integer beyond it")
            continue
        kind += " or None" if "None" in annotation else ""
        got = "None" if value is None else type(value).__name__
        return TypeError(f"{function.__name__}: expected {name} to be {kind}, got {got}")
    return None


def _expected_kind(annotation: str, value: Any) -> str | None:
    """Names the kind of argument that an annotation asks for; None if the value, which is not a tensor, is of this kind."""
    is_number = isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat))
    if annotation.startswith("Tensor"):
        if "float" not in annotation:
            return "a tensor"
        return None if is_number else "a tensor or a number"
    if annotation.startswith("Sequence[float]"):
        are_numbers = isinstance(value, Sequence) and all(isinstance(item, numbers.Real) for item in value)
        return None if are_numbers else "a sequence of numbers"
    if annotation.startswith("int"):
        return None if isinstance(value, (numbers.Integral, torch.SymInt)) else "an integer"
    if annotation.startswith("float"):
        return None if is_number else "a number"
    if annotation.startswith(("str", *choices.__all__)):
        return None if isinstance(value, str) else "a string"
    return None


def _is_beyond_float(value: Any) -> bool:
    given = value if isinstance(value, Sequence) else [value]
    return any(isinstance(number, int) and abs(number) > sys.float_info.max for number in given)


def _keyword_error(operator: str, signature: inspect.Signature, given: int) -> TypeError | None:
    """Describes a call that passes keyword-only arguments by position.

    ``x`` once came before the gates, and mamba_ssm's ``selective_scan`` takes its flags by position.
    """
    parameters = signature.parameters.values()
    positional = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if operator == "selective_scan" and given > len(positional):
        return TypeError(
            f"selective_scan: expected at most {len(positional)} positional arguments, got {given}: pass delta_softplus= and "
            "return_last_state= by keyword, or call ssm_kernels.compat.selective_scan.selective_scan_fn, which takes "
            "mamba_ssm's order"
        )
    if given <= len(positional) or not keywords:
        return None
    usage = ", ".join([*positional, *(f"{name}={name}" for name in keywords)])
    return TypeError(
        f"{operator}: expected {' and '.join(keywords)} by keyword, as in {operator}({usage}), got {given} positional "
        "arguments: gates come first"
    )


def read_dt_limit(operator: str, dt_limit: Sequence[float] | None) -> Sequence[float] | None:
    """``dt_limit`` of a call as the operators take it: finite, or None."""
    # The dispatcher's own message does not say what the numbers are.
    if isinstance(dt_limit, (int, float)):
        raise ValueError(f"{operator}: expected dt_limit = (min, max), got {dt_limit}")
    return None if dt_limit is None else finite_dt_limit(dt_limit)
