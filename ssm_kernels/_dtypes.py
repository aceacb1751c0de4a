"""Dtypes of states, sums and parameters beside those of activations."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["cast", "readable", "wide_dtype"]

# With None as a value of its own, a call with a tensor returns a tensor.
Given = TypeVar("Given", Tensor, None, Tensor | None)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, sums and the parameters of recurrences for activations of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast(tensor: Given, dtype: torch.dtype) -> Given:
    """``tensor`` in ``dtype``; itself if it has it. Differentiable: the gradient returns in the tensor's own dtype."""
    return tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)


def readable(value: Given, dtype: torch.dtype) -> Given:
    """A parameter or state in a dtype that operators take with activations of ``dtype``: that or its wide dtype."""
    return value if value is None or value.dtype == dtype else cast(value, wide_dtype(dtype))
