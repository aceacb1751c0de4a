"""Checks of the layers' arguments. TypeError for a type, ValueError for a value; each names the layer and the argument."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from .._discretizations import discretization_names, is_rule, two_sample_discretizations
from ..choices import RecomputeName
from ..ops._arguments import check_dense, did_you_mean, is_flag


def _wrong_type(layer: str, name: str, expected: str, value: Any) -> TypeError:
    return TypeError(f"{layer}: expected {name} to be {expected}, got {type(value).__name__}")


def check_int(layer: str, name: str, value: Any, low: float = 1, high: int | None = None, *, expected: str = "an int") -> None:
    # A bool is an int in Python, but as a size it is a mistake.
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _wrong_type(layer, name, expected, value)
    size = int(value)
    if high is None and size < low:
        raise ValueError(f"{layer}: expected {name} to be at least {low}, got {value}")
    if high is not None and not low <= size <= high:
        raise ValueError(f"{layer}: expected {name} from {low} to {high}, got {value}")


def check_optional_int(layer: str, name: str, value: Any, low: int = 1) -> None:
    if value is not None:
        check_int(layer, name, value, low, expected="an int or None")


def check_bools(layer: str, **values: Any) -> None:
    """Checks for bools, NumPy's and PyTorch's too. Numbers are none: one may be another argument in the wrong place."""
    for name, value in values.items():
        if not is_flag(value) or (isinstance(value, numbers.Integral) and not isinstance(value, bool)):
            raise _wrong_type(layer, name, "a bool", value)


def check_number(layer: str, name: str, value: Any) -> None:
    """Checks for a real number, of any sign and size."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _wrong_type(layer, name, "a number", value)


def check_not_negative(layer: str, name: str, value: Any) -> None:
    check_number(layer, name, value)
    if not 0 <= value < math.inf:
        raise ValueError(f"{layer}: expected {name} to be finite and not negative, got {value}")


def check_probability(layer: str, name: str, value: Any) -> None:
    check_number(layer, name, value)
    if not 0 <= value <= 1:
        raise ValueError(f"{layer}: expected {name} from 0 to 1, got {value}")


def check_pair(layer: str, name: str, value: Any) -> None:
    """Checks for two numbers; callers check their order."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _wrong_type(layer, name, "a pair of numbers", value)
    if len(value) != 2:
        raise ValueError(f"{layer}: expected {name} to be a pair of numbers, got {len(value)} of them")
    for i, number in enumerate(value):
        check_number(layer, f"{name}[{i}]", number)


def check_choice(layer: str, name: str, value: Any, choices: Sequence[str | None]) -> None:
    if not (value is None or isinstance(value, str)) or (value is None and None not in choices):
        raise _wrong_type(layer, name, "a string or None" if None in choices else "a string", value)
    if value not in choices:
        raise ValueError(f"{layer}: unknown {name} {value!r}, expected one of {[*choices]}{did_you_mean(value, choices)}")


def check_discretization(layer: str, value: Any, supported: Sequence[str] = (), *, takes_two_samples: bool = False) -> None:
    """Checks that it is the name of a rule. The error lists ``supported``, or all; operators refuse the others."""
    listed = supported or discretization_names
    if takes_two_samples:
        listed = (*discretization_names, *two_sample_discretizations)
    stem = value.partition("(")[0] if isinstance(value, str) else ""
    if stem in ("gbt", "gbt_two_sample") and stem in listed and not is_rule(value):
        raise ValueError(
            f"{layer}: expected discretization {stem!r} with alpha from 0 to 1, as in '{stem}(0.7)', got {value!r}"
        )
    if stem in ("gbt", *two_sample_discretizations) and stem not in listed and set(listed) & {*two_sample_discretizations}:
        raise ValueError(
            f"{layer}: discretization {value!r} has a rational decay, and this layer needs an exponential one, expected one of "
            f"{[*listed]}"
        )
    if stem in two_sample_discretizations and stem not in listed:
        raise ValueError(
            f"{layer}: discretization {value!r} reads two input samples a step, which this layer does not, expected one of "
            f"{[*listed]}"
        )
    if not isinstance(value, str) or not is_rule(value):
        check_choice(layer, "discretization", value, listed)


def check_recompute(layer: str, value: Any) -> None:
    check_choice(layer, "recompute", value, get_args(RecomputeName))


def check_step_sizes(layer: str, dt_min: Any, dt_max: Any, dt_init_floor: Any) -> None:
    """Checks the range of step sizes at initialization."""
    for name, value in (("dt_min", dt_min), ("dt_max", dt_max)):
        check_number(layer, name, value)
    if not 0 < dt_min <= dt_max < math.inf:
        raise ValueError(f"{layer}: expected 0 < dt_min <= dt_max, both finite, got dt_min={dt_min}, dt_max={dt_max}")
    check_not_negative(layer, "dt_init_floor", dt_init_floor)


def check_dtype(layer: str, dtype: Any) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise _wrong_type(layer, "dtype", "a torch.dtype or None", dtype)
    if not dtype.is_floating_point:
        raise ValueError(f"{layer}: expected a floating-point dtype, got {dtype}")


def check_callable(layer: str, name: str, value: Any, example: str) -> None:
    if not callable(value):
        raise _wrong_type(layer, name, f"a callable, such as {example}", value)


def check_tensor(layer: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise _wrong_type(layer, name, "a tensor", value)
    check_dense(layer, name, value)


def check_floating(layer: str, name: str, value: Tensor, *, least_bytes: int = 1) -> None:
    """Checks the dtype. Those of one byte are formats for storage, which PyTorch does not compute with."""
    if not value.is_floating_point() or value.dtype.itemsize < least_bytes:
        raise RuntimeError(
            f"{layer}: expected {name} of a floating-point dtype{' of 16 bits or more' * (least_bytes > 1)}, got {value.dtype}"
        )


def check_shape(layer: str, name: str, value: Any, axes: str, sizes: Sequence[int | None]) -> None:
    """Checks for a tensor with these sizes; None stands for any. ``axes`` names them, or is the size itself."""
    check_tensor(layer, name, value)
    fits = value.dim() == len(sizes) and all(size is None or size == got for size, got in zip(sizes, value.shape, strict=True))
    if not fits:
        names = axes.strip("()").split(", ")
        known = [f"{axis} = {size}" for axis, size in zip(names, sizes, strict=True) if size is not None and axis != str(size)]
        suffix = f" with {', '.join(known)}" if known else ""
        raise ValueError(f"{layer}: expected {name} of shape {axes}{suffix}, got {list(value.shape)}")
