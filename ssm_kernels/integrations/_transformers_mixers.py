"""The forwards of transformers' mixers of Mamba's kind on these kernels.

These mixers multiply by the weight of ``dt_proj`` and do not call the module, so an adapter on it has no effect. Their
``forward`` is replaced by one that calls ``dt_proj`` where it is more than a plain ``nn.Linear``. transformers 4.57 has two
forwards in each mixer class and takes the one with kernels on CUDA devices only; there ``forward`` is replaced for that too.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..nn.common import is_only_a_product
from ._transformers_functions import Function

__all__ = [
    "DT_PROJ",
    "CalledProjection",
    "calls_dt_proj",
    "forward_457",
    "forward_with_dt_proj",
    "mixers_457",
    "mixers_that_read_dt_proj",
]

DT_PROJ = "dt_proj"


def mixers_457(module: ModuleType) -> dict[str, Function]:
    """The forwards with kernels of a module of transformers 4.57, by the mixer's class."""
    classes = {name: vars(value) for name, value in list(vars(module).items()) if isinstance(value, type)}
    return {name: members["cuda_kernels_forward"] for name, members in classes.items() if "cuda_kernels_forward" in members}


def mixers_that_read_dt_proj(module: ModuleType) -> dict[str, Function]:
    """The forwards of transformers 5.17 and newer that multiply by the weight of ``dt_proj``, by the mixer's class."""
    classes = {name: vars(value) for name, value in list(vars(module).items()) if isinstance(value, type)}
    forwards = {name: members["forward"] for name, members in classes.items() if "forward" in members}
    return {name: forward for name, forward in forwards.items() if DT_PROJ in _names(inspect.unwrap(forward))}


def _names(function: object) -> tuple[str, ...]:
    code = getattr(function, "__code__", None)
    return () if code is None else code.co_names


class _MixerOnParts:
    """A mixer as its forward sees it: not in training, because the forward would call a fused function then.

    The forward multiplies by the weight of ``dt_proj``. A module that is more than its weight and bias, such as a layer with
    adapters, is called instead.
    """

    def __init__(self, mixer: Any) -> None:
        self._mixer = mixer
        self.training = False
        if calls_dt_proj(mixer):
            self.dt_proj = CalledProjection(mixer.dt_proj)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mixer, name)


class CalledProjection:
    """Stands for ``dt_proj``: a product with its weight calls the module."""

    def __init__(self, module: Any) -> None:
        self._module = module
        # PyTorch's quantized layers have methods in the places of weight and bias.
        self.bias = module.bias() if callable(module.bias) else module.bias
        self.weight = _CalledWeight(module, self.bias)

    def __call__(self, x: Tensor) -> Any:
        return self._module(x)


class _CalledWeight:
    """``weight @ x`` calls a projection and takes its bias off, which the scan adds."""

    def __init__(self, module: Any, bias: Tensor | None) -> None:
        self.module, self.bias = module, bias

    @classmethod
    def __torch_function__(cls, function: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The product, for which Python and ``torch.compile`` call the reflected method of x, ``torch.export`` an operator."""
        if function.__name__ not in ("matmul", "__matmul__", "__rmatmul__"):
            return NotImplemented
        # torch.compile has lost the order of a product that Python reflects.
        weight = args[1 if function.__name__ == "__rmatmul__" else 0]
        if not (isinstance(weight, cls) or torch.compiler.is_compiling()):
            return NotImplemented
        x, weight = args if isinstance(args[0], Tensor) else reversed(args)
        out = weight.module(x.transpose(1, 2))
        return (out if weight.bias is None else out - weight.bias).transpose(1, 2)


def calls_dt_proj(mixer: Any) -> bool:
    dt_proj = getattr(mixer, "dt_proj", None)
    if dt_proj is None:
        return False
    if is_only_a_product(dt_proj):
        # A quantized weight may be a tensor subclass, which has linear() and no other product.
        return hasattr(dt_proj.weight, "__tensor_flatten__")
    # The mixer itself runs the hooks that accelerate adds to a plain layer.
    return type(dt_proj) is not torch.nn.Linear or getattr(dt_proj, "_hf_hook", None) is None


def forward_with_dt_proj(forward: Function) -> Function:
    @functools.wraps(forward)
    def on_parts(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(_MixerOnParts(self) if calls_dt_proj(self) else self, *args, **kwargs)

    return on_parts


def forward_457(forward: Function, fast: Function, on_cpu: bool) -> Function:
    @functools.wraps(forward)
    def on_kernels(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_served = hidden_states.is_cuda or (on_cpu and hidden_states.device.type == "cpu")
        if is_served and getattr(self, "use_fast_kernels", True):  # use_mamba_kernels of the configuration
            mixer = _MixerOnParts(self) if self.training or calls_dt_proj(self) else self
            return fast(mixer, hidden_states, *args, **kwargs)
        return forward(self, hidden_states, *args, **kwargs)

    return on_kernels
