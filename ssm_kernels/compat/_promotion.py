"""Dtypes of mixed calls. The operators take one dtype for sequences and the accumulation dtype for parameters; the kernels of
other packages load every argument as float32. The functions here widen arguments until the operators accept them: an argument
is never rounded to a narrower dtype, except float64 parameters beside narrower sequences, which those kernels also round."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from ..ops._arguments import is_autocast_enabled

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def common_dtype(function: str, **tensors: Tensor | None) -> torch.dtype:
    """The narrowest dtype that holds the values of all tensors. Refuses complex, integer and float8 tensors by name."""
    dtype: torch.dtype | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{function}: expected {name} to be a tensor, got {type(tensor).__name__}")
        check_real(function, name, tensor)
        dtype = tensor.dtype if dtype is None else torch.promote_types(dtype, tensor.dtype)
    if dtype is None:
        raise TypeError(f"{function}: expected {next(iter(tensors))} to be a tensor, got None")
    return dtype


def check_real(function: str, name: str, tensor: Tensor) -> None:
    """Raises for complex numbers, which mamba_ssm's first kernels take, for integers and for float8."""
    if tensor.is_complex():
        raise NotImplementedError(f"{function}: complex {name} is not supported, expected a real floating-point tensor")
    if tensor.dtype not in _FLOATS:
        raise RuntimeError(f"{function}: expected {name} of dtype float32, float16, bfloat16 or float64, got {tensor.dtype}")


def no_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Keeps autocast from casting arguments: the kernels that the functions stand for do not take part in it."""
    device = tensor.device.type
    if is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()
