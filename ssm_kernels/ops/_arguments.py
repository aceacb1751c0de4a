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

from .. import choices
from .._torchscript import refuse_script

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


# Types of numbers that need no closer look.
_PLAIN_AMOUNTS = (int, float, type(None))


def is_autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on; False for a device that has none, such as meta, for which PyTorch's question raises."""
    # torch.compile of PyTorch 2.11 cannot trace is_autocast_available.
    has_autocast = device_type in ("cpu", "cuda") or is_autocast_available(device_type)
    return has_autocast and torch.is_autocast_enabled(device_type)


def empty_output(x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, shape: Sequence[int] | None = None) -> torch.Tensor:
    """Memory for the output of a decoding step: like ``x``, which autocast casts, or of another shape.

    Zero with ``cu_seqlens``: the operator does not write to tokens after its end.
    """
    is_cast = is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype(x.device.type) if is_cast else x.dtype
    if shape is not None:
        return (x.new_empty if cu_seqlens is None else x.new_zeros)(tuple(shape), dtype=dtype)
    make = torch.empty_like if cu_seqlens is None else torch.zeros_like
    return make(x, dtype=dtype, memory_format=torch.contiguous_format)


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor cannot be read: for tracing, under a dispatch mode or a transform, of a subclass."""
    traces = torch.compiler.is_compiling() or torch._C._get_tracing_state() or _get_current_dispatch_mode() is not None
    return bool(traces or type(tensor) is not torch.Tensor or torch._C._are_functorch_transforms_active())


def names_arguments(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorator: an operator's errors name the operator and the argument. Only failing calls inspect all arguments.

    The dispatcher's own message for an argument that is not a tensor is a RuntimeError of several lines with the value printed.
    Python's for an attribute of a None is an AttributeError. Before each call :func:`keyword_checks` runs, unless a decorator
    below this one calls it.
    """
    check = keyword_checks(function) if not hasattr(function, "__wrapped__") else None

    @functools.wraps(function)
    def operator(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if check is not None:
            check(kwargs)
        try:
            return function(*args, **kwargs)
        except (AttributeError, IndexError, OverflowError, RuntimeError, TypeError, ValueError) as raised:
            if str(raised).startswith(f"{function.__name__}: "):
                raise
            error = argument_error(function, args, kwargs)
            if error is None:
                raise
        raise error

    return refuse_script(operator)


def keyword_checks(function: Callable[..., Any]) -> Callable[[dict[str, Any]], None]:
    """A function that checks the flags and numbers among the keywords of a call of ``function``.

    The dispatcher takes objects of most types for a bool, takes a bool for a number, and rounds fractions. Compiled code has no
    such check: its flags may be symbols.
    """
    annotations = {name: str(each.annotation) for name, each in inspect.signature(function).parameters.items()}
    flags = tuple(name for name, annotation in annotations.items() if annotation == "bool")
    amounts = tuple(name for name, annotation in annotations.items() if annotation.startswith(("int", "float")))

    def check(keywords: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        for name in flags:
            if name in keywords and keywords[name] is not True and keywords[name] is not False and not is_flag(keywords[name]):
                raise _wrong_type(function.__name__, name, "a bool", keywords[name])
        for name in amounts:
            if name in keywords and type(keywords[name]) not in _PLAIN_AMOUNTS:
                kind = _expected_kind(annotations[name], keywords[name])
                if kind is not None:
                    or_none = " or None" if "None" in annotations[name] else ""
                    raise _wrong_type(function.__name__, name, kind + or_none, keywords[name])

    return check


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
        if value is None and "None" in annotation:
            continue
        kind = _expected_kind(annotation, value)
        if kind is not None:
            kind += " or None" if "None" in annotation else ""
            return _wrong_type(function.__name__, name, kind, value)
        limit = _exceeded_limit(annotation, value)
        if limit is not None:
            return ValueError(f"{function.__name__}: expected {name} {limit}")
    return None


def check_dense(name: str, argument: str, tensor: torch.Tensor) -> None:
    """Checks a tensor that Python reads before an operator does, with the operators' own messages.

    Args:
        name: of the operator or layer, for messages.
        argument: its name.

    Raises:
        NotImplementedError: the tensor is nested, sparse or quantized.
    """
    if tensor.is_nested:
        raise NotImplementedError(f"{name}: expected {argument} to be a dense tensor, got a nested one")
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"{name}: expected {argument} to be a dense tensor (of layout torch.strided), got layout {tensor.layout}"
        )
    if tensor.is_quantized:
        raise NotImplementedError(
            f"{name}: expected {argument} to be a plain tensor, got a quantized one: pass its dequantize()"
        )


def _wrong_type(operator: str, name: str, kind: str, value: Any) -> TypeError:
    if isinstance(value, torch.Tensor):
        got = f"a tensor of shape {list(value.shape)}"
    else:
        got = "None" if value is None else type(value).__name__
    return TypeError(f"{operator}: expected {name} to be {kind}, got {got}")


def is_flag(value: Any) -> bool:
    """Whether a value serves as a bool: bools, 0, 1, and the bools of NumPy and PyTorch, in arrays and tensors of one too."""
    if _is_single(value):
        return str(value.dtype) in ("bool", "torch.bool")
    if isinstance(value, (numbers.Integral, torch.SymInt)):
        return value in (0, 1)
    return isinstance(value, (bool, torch.SymBool))


def _is_single(value: Any) -> bool:
    """Whether the value is a tensor, or an array of NumPy, that the dispatcher takes for a number."""
    if isinstance(value, torch.Tensor):
        return not value.is_nested and value.numel() == 1 and not value.is_complex()
    return hasattr(value, "__array__") and getattr(value, "shape", None) == () and value.dtype.kind in "biuf"


def _expected_kind(annotation: str, value: Any) -> str | None:
    """Names the kind of argument that an annotation asks for; None if the value is of this kind, or the kind is unknown."""
    if annotation.startswith("Tensor"):
        is_tensor = torch.overrides.is_tensor_like(value) and not isinstance(value, type)
        if "float" not in annotation:
            return None if is_tensor else "a tensor"
        return None if is_tensor or _is_number(value) else "a tensor or a number"
    if annotation.startswith("Sequence[float]"):
        return None if _are_numbers(value) else "a sequence of numbers"
    if annotation.startswith("bool"):
        return None if is_flag(value) else "a bool"
    if annotation.startswith("int"):
        is_int = isinstance(value, (numbers.Integral, torch.SymInt)) and not isinstance(value, bool)
        return None if is_int or (_is_single(value) and "int" in str(value.dtype)) else "an integer"
    if annotation.startswith("float"):
        return None if _is_number(value) or (_is_single(value) and "bool" not in str(value.dtype)) else "a number"
    if annotation.startswith(("str", *choices.__all__)):
        is_pair = "tuple[" in annotation and isinstance(value, (tuple, list))
        return None if isinstance(value, str) or is_pair else "a string"
    return None


def _is_number(value: Any) -> bool:
    """Whether the value is a real number as the dispatcher takes it: fractions are none."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return True
    is_fraction = isinstance(value, numbers.Rational) and not isinstance(value, numbers.Integral)
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not is_fraction


def _are_numbers(value: Any) -> bool:
    if isinstance(value, torch.Tensor) or hasattr(value, "__array__"):
        return len(value.shape) == 1
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(_is_number(item) or _is_single(item) for item in value)
    )


def _exceeded_limit(annotation: str, value: Any) -> str | None:
    """Says in which range an argument of the right type should be, and what it is; None if it is there."""
    if "float" in annotation and _is_beyond_float(value):
        return "within a float's range, got an integer beyond it"
    if annotation.startswith("int") and isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"within int64's range, got {value}"
    if isinstance(value, str) and not value.isascii() and value != value.encode(errors="replace").decode():
        return f"to be a name, got the invalid Unicode string {value!a}"
    return None


def _is_beyond_float(value: Any) -> bool:
    given = value if isinstance(value, (list, tuple)) else [value]
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
    """``dt_limit`` of a call as the operators take it: finite, or None.

    Raises:
        ValueError: it is not a pair of numbers within a float's range. The operators check their order.
        TypeError: it is not a sequence of numbers.
    """
    if dt_limit is None:
        return None
    # The dispatcher's own message does not say what the numbers are.
    if isinstance(dt_limit, (int, float)):
        raise ValueError(f"{operator}: expected dt_limit = (min, max), got {dt_limit}")
    if not _are_numbers(dt_limit):
        raise _wrong_type(operator, "dt_limit", "a sequence of numbers or None", dt_limit)
    if len(dt_limit) != 2:
        raise ValueError(f"{operator}: expected dt_limit = (min, max), got {len(dt_limit)} numbers")
    if _is_beyond_float(dt_limit):
        raise ValueError(f"{operator}: expected dt_limit within a float's range, got an integer beyond it")
    return finite_dt_limit([limit if _is_number(limit) else float(limit) for limit in dt_limit])


def three_tensors(states: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The states (C, n, m) of a call of ``mlstm_scan``."""
    C, n, m = _tensors("mlstm_scan", states, ("C", "n", "m"), "the three tensors C, n and m")
    return C, n, m


def four_tensors(states: Any) -> tuple[Any, Any, Any, Any]:
    """The states (angle, ssm, k, x) of a call of ``mamba3_chunk_scan``; four times None where it has none."""
    if states is None:
        return None, None, None, None
    names = ("angle", "ssm", "k", "x")
    angle, ssm, k, x = _tensors("mamba3_chunk_scan", states, names, "the four tensors angle, ssm, k and x")
    return angle, ssm, k, x


def _tensors(operator: str, states: Any, names: tuple[str, ...], expected: str) -> tuple[Any, ...]:
    if not isinstance(states, (tuple, list)) or len(states) != len(names):
        got = f"{len(states)} of them" if isinstance(states, (tuple, list)) else type(states).__name__
        raise ValueError(f"{operator}: expected initial_states to be {expected}, got {got}")
    for name, state in zip(names, states, strict=True):
        if state is not None and (not torch.overrides.is_tensor_like(state) or isinstance(state, type)):
            raise TypeError(f"{operator}: expected initial_{name} to be a tensor or None, got {type(state).__name__}")
    return tuple(states)
