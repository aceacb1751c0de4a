"""Errors of the layers name the layer: those of PyTorch about dtypes and devices, those of operators, and Python's of calls."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._torchscript import refuse_script
from ..ops._arguments import is_autocast_enabled

__all__ = ["class_name", "name_for_operator", "names_layer"]

_Layer = TypeVar("_Layer", bound=type[nn.Module])

_METHODS = ("forward", "step")
_INHERITED = ("__init__", "forward", "step", "allocate_inference_cache", "allocate_state", "flatten_parameters")
_ERRORS = (NotImplementedError, RuntimeError, TypeError, ValueError)

# The start of an operator's message. Layers begin with a capital letter.
_OF_OPERATOR = re.compile(r"[a-z_]\w*: ")
_ABOUT_DTYPES = re.compile(r"dtype|scalar type|not implemented for")
# Modules of PyTorch that derive classes from a module's class.
_DERIVES = ("torch.distributed.", "torch.nn.utils.parametrize")
_ABOUT_DEVICES = re.compile(r"device|Tensor on|backend")


def class_name(module: object) -> str:
    """The name of the user's class in messages.

    PyTorch derives a class from it for ``fully_shard`` (``FSDPMamba``), ``replicate`` and parametrizations, with a prefix.
    """
    cls = type(module)
    if cls.__module__.startswith(_DERIVES):
        for base in cls.__mro__[1:]:
            if cls.__name__ != base.__name__ and cls.__name__.endswith(base.__name__):
                return base.__name__
    return cls.__name__


def name_for_operator(module: nn.Module) -> tuple[str, ...]:
    """The last argument of a mixer's operators, which their errors name: none for the layer that the operators were made for.

    Compiled code keeps that name.
    """
    is_default = type(module).__name__ == getattr(module, "_mixer_name", None) or torch.compiler.is_compiling()
    return () if is_default else (class_name(module),)


def names_layer(layer: _Layer) -> _Layer:
    """Class decorator. Only failing calls cost time; compiled code keeps the errors as they are."""
    for name in _INHERITED:
        function = getattr(layer, name, None)
        is_inherited = name not in layer.__dict__ and isinstance(function, types.FunctionType)
        if isinstance(function, types.FunctionType) and is_inherited and function.__module__.startswith("ssm_kernels."):
            # Python's message of a wrong call has the qualified name.
            own = types.FunctionType(function.__code__, function.__globals__, name, function.__defaults__, function.__closure__)
            functools.update_wrapper(own, function)
            own.__dict__.pop("__wrapped__")
            own.__kwdefaults__, own.__qualname__ = function.__kwdefaults__, f"{layer.__qualname__}.{name}"
            setattr(layer, name, own)
    for name in _METHODS:
        if name in layer.__dict__:
            setattr(layer, name, _explained(layer.__dict__[name]))
    return refuse_script(layer)


def _explained(method: Callable[..., Any]) -> Callable[..., Any]:
    first = [*inspect.signature(method).parameters][1]

    @functools.wraps(method)
    def explained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # which cannot resume inside of a try after a break of its graph
            return method(self, *args, **kwargs)
        try:
            return method(self, *args, **kwargs)
        except _ERRORS as error:
            value = args[0] if args else kwargs.get(first)
            layer = class_name(self) + ("" if method.__name__ == "forward" else f".{method.__name__}")
            other = _explain(self, layer, first, value, error)
            if other is None:
                raise
            raise other from error

    return refuse_script(explained, method.__qualname__)


def _explain(module: nn.Module, layer: str, name: str, value: Any, error: Exception) -> Exception | None:
    """The error of a layer for one of PyTorch or of an operator; None to leave it."""
    if type(error) not in _ERRORS:
        return None
    message = str(error)
    value = value.data if isinstance(value, PackedSequence) else value
    weight = _first_weight(module)
    if isinstance(error, RuntimeError) and isinstance(value, Tensor) and weight is not None:
        if value.device != weight.device and _ABOUT_DEVICES.search(message):
            return RuntimeError(f"{layer}: expected {name} on {weight.device} (the layer's device), got {value.device}")
        is_castable = value.is_floating_point() and value.dtype != torch.float64 and weight.dtype != torch.float64
        is_cast = is_castable and is_autocast_enabled(value.device.type)
        if value.dtype != weight.dtype and not is_cast and _ABOUT_DTYPES.search(message):
            remedy = "; or use autocast" if is_castable else ""
            return RuntimeError(f"{layer}: expected {name} of dtype {weight.dtype} (the layer's{remedy}), got {value.dtype}")
    if _OF_OPERATOR.match(message):
        return type(error)(f"{layer}: {message}")
    # The operator between the projections names the layer that it was made for, which others contain too.
    mixer, separator, text = message.partition(": ")
    is_other = separator and mixer == getattr(module, "_mixer_name", None) and mixer != class_name(module)
    return type(error)(f"{class_name(module)}: {text}") if is_other else None


def _first_weight(module: nn.Module) -> Tensor | None:
    """The weight of the projection that reads the input, if it has a floating-point dtype: quantized ones take several."""
    for name in ("in_proj", "x_proj", "fc1", "gate_proj", "q_proj", "q", "qkv_opreact"):
        weight = getattr(getattr(module, name, None), "weight", None)
        if weight is not None:
            break
    else:
        weight = getattr(module, "weight_ih_l0", None)
    return weight if isinstance(weight, Tensor) and weight.is_floating_point() else None
