"""The classes that ``mamba_ssm`` and ``causal_conv1d`` derive from ``torch.autograd.Function``, which clients import to call
``apply``: :class:`SelectiveScanFn` and the like.

The functions here have gradients of their own, so the classes have ``apply`` alone, and no ``forward`` or ``backward``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from . import causal_conv1d, layer_norm, layernorm, norms, selective_scan, ssd
from ._errors import peer_arguments

__all__ = [
    "BiMambaInnerFn",
    "CausalConv1dFn",
    "GatedLayerNormFn",
    "LayerNormFn",
    "LayerNormFn1x",
    "LayerNormLinearFn",
    "MambaChunkScanCombinedFn",
    "MambaInnerFn",
    "MambaInnerFnNoOutProj",
    "MambaSplitConv1dScanCombinedFn",
    "SelectiveScanFn",
]


class _Function:
    """A class whose ``apply`` is a function of this package.

    Keyword arguments work too, which ``torch.autograd.Function.apply`` refuses. Under ``torch.compile`` a call stays in its
    graph. A subclass is not served: PyTorch would run its ``forward`` and ``backward``, which the class does not have.
    """

    _name: str
    _function: Callable[..., Any]

    def __init_subclass__(cls, function: Callable[..., Any] | None = None, name: str | None = None) -> None:
        if function is not None:
            cls._name = name or cls.__name__
            cls._function = staticmethod(_named(f"{cls._name}.apply", function))
            place = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
            cls.__doc__ = (
                f"``{cls._name}.apply(...)`` is :func:`.{place}`: the same arguments in the same order, defaults, "
                "results, gradients and errors."
            )

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Calls the function.

        Raises:
            NotImplementedError: the class is derived from one of these.
        """
        if "_function" not in cls.__dict__:
            raise NotImplementedError(
                f"{cls.__name__}: ssm_kernels.compat does not support classes derived from {cls._name}: derive from "
                "torch.autograd.Function, or call the function"
            )
        return cls._function(*args, **kwargs)


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under another name in its errors."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return peer_arguments(name)(call)


class SelectiveScanFn(_Function, function=selective_scan.selective_scan_fn): ...


class MambaInnerFn(_Function, function=selective_scan.mamba_inner_fn): ...


class MambaInnerFnNoOutProj(_Function, function=selective_scan.mamba_inner_fn_no_out_proj): ...


class BiMambaInnerFn(_Function, function=selective_scan.bimamba_inner_fn): ...


class MambaChunkScanCombinedFn(_Function, function=ssd.mamba_chunk_scan_combined): ...


class MambaSplitConv1dScanCombinedFn(_Function, function=ssd.mamba_split_conv1d_scan_combined): ...


class LayerNormFn(_Function, function=layer_norm.layer_norm_fn): ...


class LayerNormLinearFn(_Function, function=layer_norm.layer_norm_linear_fn): ...


class LayerNormFn1x(_Function, function=layernorm.layer_norm_fn, name="LayerNormFn"): ...


class GatedLayerNormFn(_Function, function=norms.layernorm_fn, name="LayerNormFn"): ...


class CausalConv1dFn(_Function, function=causal_conv1d.causal_conv1d_fn): ...
