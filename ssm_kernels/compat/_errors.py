"""Errors of the functions in this package: they name the function that was called and arguments of its signature, whichever
operator raises them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from .._torchscript import refuse_script
from ..choices import ConvActivation
from ..ops._arguments import argument_error, did_you_mean, is_autocast_enabled

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

ACTIVATIONS = ("silu", "swish")


def check_activation(function: str, activation: str | None) -> ConvActivation | None:
    """The activation of a convolution, if the packages have it."""
    if activation is not None and activation not in ACTIVATIONS:
        nearest = did_you_mean(activation, ACTIVATIONS)
        raise NotImplementedError(f"{function}: expected activation None, 'silu' or 'swish', got {activation!r}{nearest}")
    return cast("ConvActivation | None", activation)


def peer_arguments(
    called: str | None = None, /, **names: str
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Decorator: errors name the function instead of the operator that raised them, and arguments as the function does.

    An argument of a wrong type is an error as with :func:`ssm_kernels._arguments.names_arguments`. Decorated functions may call
    each other: the outermost names the function.

    Args:
        called: the name of the function in messages, such as ``"selective_scan_cuda.fwd"``, if it is not ``__name__``.
        names: for arguments of operators that the function has under another name, that name.
    """
    words = re.compile(rf"\b({'|'.join(names)})\b") if names else None

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        if called is not None:
            function.__name__ = called

        def restate(error: Exception) -> None:
            message = error.args[0] if error.args else None
            operator, separator, text = message.partition(": ") if isinstance(message, str) else ("", "", "")
            if separator and operator.removesuffix(" backward").isidentifier():
                text = text if words is None else words.sub(lambda match: names[match[0]], text)
                error.args = (f"{function.__name__}: {text}", *error.args[1:])

        @functools.wraps(function)
        def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            try:
                return function(*args, **kwargs)
            except ValueError as error:
                restate(error)
                raise
            except (AttributeError, RuntimeError, TypeError) as error:
                of_argument: Exception | None = argument_error(function, args, kwargs)
                if of_argument is None:
                    restate(error)
                    if str(error).startswith(f"{function.__name__}: "):
                        raise
                    of_argument = _call_error(function, args, kwargs, str(error))
                if of_argument is None:
                    raise
            raise of_argument

        return refuse_script(call)

    return decorate


_NO_KERNEL = re.compile(r"Could not run '[\w:.]+' with arguments from the '(\w+)' backend")


def _call_error(function: Callable[..., object], args: object, kwargs: object, message: str) -> Exception | None:
    """The error for arguments that are too few, too many or unknown, or for tensors without kernels, where PyTorch's own names
    the operator that it could not call; or nothing."""
    assert isinstance(args, tuple) and isinstance(kwargs, dict)
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError as error:
        return TypeError(f"{function.__name__}: {error}")
    for name, value in given.items():
        if isinstance(value, Tensor) and (kind := unsupported_kind(value)) is not None:
            return RuntimeError(f"{function.__name__}: expected {name} to be a dense tensor of numbers, got a {kind} tensor")
    found = _NO_KERNEL.match(message)
    return None if found is None else RuntimeError(f"{function.__name__}: there are no kernels for tensors of {found[1]}")


def unsupported_kind(tensor: Tensor) -> str | None:
    """The kind of a tensor that no operator takes: sparse, nested or quantized; None for other tensors."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    return None if tensor.layout == torch.strided else str(tensor.layout).removeprefix("torch.").replace("_", " ")


def check_given(function: str, **tensors: Tensor | None) -> None:
    """For tensors that the peer's function requires and the operator does not."""
    for name, tensor in tensors.items():
        if tensor is None:
            raise TypeError(f"{function}: expected {name} to be a tensor, got None")


def check_shape(function: str, name: str, tensor: Tensor, axes: str, shape: Sequence[int | None]) -> None:
    """Raises unless ``tensor`` has the shape, where None is any size; ``axes`` names its sizes, as ``"(batch, dim)"``."""
    if tensor.dim() != len(shape):
        raise ValueError(f"{function}: expected {name} of shape {axes}, got {list(tensor.shape)}")
    expected = [size if other is None else other for size, other in zip(tensor.shape, shape, strict=True)]
    if list(tensor.shape) != expected:
        raise ValueError(f"{function}: expected {name} of shape {axes} = {expected}, got {list(tensor.shape)}")


def check_device(function: str, name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Raises unless ``tensor`` is on the device of ``like``."""
    if tensor.device != like.device:
        raise RuntimeError(f"{function}: expected {name} on {like.device} (the device of {like_name}), got {tensor.device}")


def check_projection(
    function: str, name: str, weight: Tensor, axes: str, shape: Sequence[int | None], like_name: str, like: Tensor
) -> None:
    """Raises unless ``weight`` multiplies a tensor of the dtype of ``like``, on its device; autocast gives both one dtype."""
    check_shape(function, name, weight, axes, shape)
    check_device(function, name, weight, like_name, like)
    if weight.dtype != like.dtype and not is_autocast_enabled(like.device.type):
        raise RuntimeError(f"{function}: expected {name} of dtype {like.dtype} (the dtype of {like_name}), got {weight.dtype}")
