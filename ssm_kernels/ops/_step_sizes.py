"""Step sizes that are numbers."""

from __future__ import annotations

import math
import numbers
import sys
from typing import Any

import torch
from torch import Tensor

from .._dtypes import wide_dtype

__all__ = ["check_step_size", "step_size"]


def step_size(operator: str, dt: Tensor | float, candidate: Tensor) -> Tensor:
    """``dt`` as a tensor.

    Raises:
        ValueError: a number is negative, NaN, or finite and beyond the range of the dtype in which states are.
        TypeError: ``dt`` is neither a tensor nor a real number.
    """
    if isinstance(dt, Tensor):
        return dt
    is_symbol = isinstance(dt, (torch.SymInt, torch.SymFloat))
    if isinstance(dt, bool) or not (is_symbol or isinstance(dt, numbers.Real)):
        got = "None" if dt is None else type(dt).__name__
        raise TypeError(f"{operator}: expected dt to be a tensor or a number, got {got}")
    if not isinstance(candidate, Tensor):
        raise TypeError(f"{operator}: expected candidate to be a tensor, got {type(candidate).__name__}")
    dtype = wide_dtype(candidate.dtype)
    if not is_symbol:  # whose value no trace may depend on
        check_step_size(operator, dt, dtype)
    # One value for each channel: CUDA reads rows whose channels are contiguous as vectors, others element by element.
    value = torch.sym_float(dt) if is_symbol else float(dt)
    return torch.full(candidate.shape[-1:], value, dtype=dtype, device=candidate.device)


def check_step_size(name: str, dt: Any, dtype: torch.dtype) -> None:
    """Checks a number: not negative, and infinite or within the range of ``dtype``.

    Raises:
        ValueError: it is not.
    """
    if not dt >= 0:
        raise ValueError(f"{name}: expected dt to be not negative, got {dt}")
    largest = torch.finfo(dtype).max
    if largest < dt < math.inf:
        if dt > sys.float_info.max:
            raise ValueError(f"{name}: expected dt within a float's range, got an integer beyond it")
        raise ValueError(f"{name}: expected dt up to {largest:.3g}, the largest number of {dtype}, or inf, got {dt:.3g}")
