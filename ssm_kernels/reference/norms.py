"""References of the norms, in the manner of :mod:`ssm_kernels.reference`, which has them too.

A group is ``group_size`` consecutive columns of a row, all of them by default. With ``v`` the group,

    norm(v) = (v - mean(v)) / sqrt(mean((v - mean(v))^2) + eps)

and RMSNorm is the same without the mean.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dtypes import wide_dtype
from ..choices import GateActivation
from ..ops._arguments import did_you_mean

__all__ = ["GATE_ACTIVATIONS", "add_layer_norm", "add_rms_norm", "layer_norm_gated", "rms_norm_gated"]

GATE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "none": lambda z: z,
}


def _norm(
    v: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group_size: int | None, subtract_mean: bool
) -> Tensor:
    groups = v.unflatten(-1, (-1, group_size or v.shape[-1]))
    if subtract_mean:
        groups = groups - groups.mean(-1, keepdim=True)
    y = (groups / torch.sqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


def _norm_gated(
    x: Tensor,
    weight: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    activation: GateActivation,
    subtract_mean: bool,
) -> Tensor:
    if activation not in GATE_ACTIVATIONS:
        known, nearest = ", ".join(GATE_ACTIVATIONS), did_you_mean(activation, GATE_ACTIVATIONS)
        raise ValueError(f"unknown activation {activation!r}, expected one of: {known}{nearest}")
    gate = None if z is None else GATE_ACTIVATIONS[activation](z)
    if gate is not None and not norm_before_gate:
        x = x * gate
    out = _norm(x, weight, bias, eps, group_size, subtract_mean)
    return out * gate if gate is not None and norm_before_gate else out


def rms_norm_gated(
    x: Tensor,
    weight: Tensor | None,
    z: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: GateActivation = "silu",
) -> Tensor:
    """``norm(x a(z)) weight + bias``, or ``(norm(x) weight + bias) a(z)`` with ``norm_before_gate``.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> reference.rms_norm_gated(torch.tensor([[3.0, 4.0]], dtype=torch.float64), None)
        tensor([[0.8485, 1.1314]], dtype=torch.float64)
    """
    return _norm_gated(x, weight, z, bias, eps, group_size, norm_before_gate, activation, False)


def layer_norm_gated(
    x: Tensor,
    weight: Tensor | None,
    z: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: GateActivation = "silu",
) -> Tensor:
    """:func:`rms_norm_gated` with the mean subtracted.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> reference.layer_norm_gated(torch.tensor([[3.0, 5.0]], dtype=torch.float64), None)
        tensor([[-1.0000,  1.0000]], dtype=torch.float64)
    """
    return _norm_gated(x, weight, z, bias, eps, group_size, norm_before_gate, activation, True)


def _add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual_in_fp32: bool,
    subtract_mean: bool,
) -> tuple[Tensor, Tensor]:
    accumulate = wide_dtype(x.dtype)
    kept = accumulate if residual_in_fp32 else x.dtype if residual is None else residual.dtype
    new_residual = x.to(kept) if residual is None else (x + residual).to(kept)
    return _norm(new_residual, weight, bias, eps, None, subtract_mean).to(x.dtype), new_residual


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual_in_fp32: bool = False,
) -> tuple[Tensor, Tensor]:
    """``norm(x + residual) weight + bias`` and ``x + residual``.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> x, residual = torch.tensor([[[1.0, 2.0]], [[2.0, 2.0]]], dtype=torch.float64)
        >>> reference.add_rms_norm(x, residual, None)
        (tensor([[0.8485, 1.1314]], dtype=torch.float64), tensor([[3., 4.]], dtype=torch.float64))
    """
    return _add_norm(x, residual, weight, bias, eps, residual_in_fp32, False)


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual_in_fp32: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`add_rms_norm` with the mean subtracted.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> x, residual = torch.tensor([[[1.0, 2.0]], [[2.0, 3.0]]], dtype=torch.float64)
        >>> reference.add_layer_norm(x, residual, None)
        (tensor([[-1.0000,  1.0000]], dtype=torch.float64), tensor([[3., 5.]], dtype=torch.float64))
    """
    return _add_norm(x, residual, weight, bias, eps, residual_in_fp32, True)
