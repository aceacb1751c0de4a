"""``mamba_ssm.ops.triton.layernorm`` (1.0 to 1.2), which later versions call ``layer_norm``: its functions at its positions."""

from __future__ import annotations

from torch import Tensor

from . import layer_norm
from ._errors import peer_arguments
from .layer_norm import RMSNorm, layer_norm_linear_fn

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_linear_fn", "rms_norm_fn"]


@peer_arguments()
def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Tensor | tuple[Tensor | None, ...]:
    """:func:`.layer_norm.layer_norm_fn` without its later arguments.

    Returns:
        ``y``, shape and dtype of ``x``; with ``prenorm`` also ``x + residual``. Differentiable with respect to every tensor.

    Raises:
        ValueError, RuntimeError, TypeError: as :func:`.layer_norm.layer_norm_fn`.
    """
    return layer_norm.layer_norm_fn(
        x,
        weight,
        bias,
        residual,
        eps=eps,
        prenorm=prenorm,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
    )


@peer_arguments()
def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor | None, ...]:
    """:func:`layer_norm_fn` with ``is_rms_norm``."""
    return layer_norm_fn(x, weight, bias, residual, eps, prenorm, residual_in_fp32, True)
