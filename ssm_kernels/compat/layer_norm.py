"""``mamba_ssm.ops.triton.layer_norm`` (2.3.2): norms with a residual, on our kernels."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._dtypes import cast, readable, wide_dtype
from .._torchscript import refuse_script
from ..ops._arguments import is_autocast_enabled
from ..ops.norm import add_layer_norm, add_rms_norm
from ._errors import check_device, check_shape, peer_arguments
from ._promotion import common_dtype, no_autocast

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_linear_fn", "rms_norm_fn"]

# By is_rms_norm, the norm with weight and bias, and the one with weight1 and bias1.
_second = peer_arguments(weight="weight1", bias="bias1")
_NORMS = {False: (add_layer_norm, _second(add_layer_norm)), True: (add_rms_norm, _second(add_rms_norm))}


@peer_arguments()
def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple[Tensor | None, ...]:
    """LayerNorm, or RMSNorm, of ``dropout(x * rowscale) + dropout(x1) + residual``.

    Without ``x1``, ``weight1``, ``rowscale`` and dropout the call is one kernel, which normalizes the sum as it is rounded to
    the residual's dtype. Otherwise PyTorch computes the sum in float32 (float64 beside float64 tensors), unrounded.

    Args:
        x: (..., columns).
        weight: (columns,).
        bias: (columns,).
        residual: shape of ``x``.
        x1: shape of ``x``; not together with ``rowscale``.
        weight1: (columns,): also return the norm with this weight.
        bias1: (columns,), with ``weight1``.
        eps: added to the variance.
        dropout_p: from 0 to 1, the probability that an element of ``x`` and ``x1`` is zeroed.
        rowscale: a factor for each row: as many elements as the leading axes of ``x`` have.
        prenorm: also return the sum.
        residual_in_fp32: without ``residual``, return the sum in float32.
        is_rms_norm: subtract no mean.
        return_dropout_mask: also return the masks of ``x`` and ``x1``, True where an element is kept; None where there is none.

    Returns:
        ``y``, dtype of ``x``, or a tuple of ``y``, ``y1`` with ``weight1``, the sum with ``prenorm`` (dtype of ``residual``,
        else float32 with ``residual_in_fp32``, else that of ``x``) and the two masks. Differentiable with respect to every
        tensor.

    Raises:
        ValueError: ``x1`` with ``rowscale``, ``bias1`` without ``weight1``, or a shape or ``dropout_p`` is not as above.
        RuntimeError, TypeError: as :func:`ssm_kernels.add_rms_norm`.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.layer_norm import layer_norm_fn
        >>> x = torch.randn(2, 10, 64)
        >>> layer_norm_fn(x, torch.ones(64), torch.zeros(64), residual=x).shape
        torch.Size([2, 10, 64])
    """
    name = "layer_norm_fn"
    if x1 is not None and rowscale is not None:
        raise ValueError(f"{name}: rowscale is not supported together with x1")
    if weight1 is None and bias1 is not None:
        raise ValueError(f"{name}: expected bias1 with weight1 only")
    dtype = common_dtype(name, x=x)
    common_dtype(name, x=x, weight=weight, bias=bias, weight1=weight1, bias1=bias1)
    every = common_dtype(name, x=x, residual=residual, x1=x1, rowscale=rowscale)
    wide = wide_dtype(every)
    if x1 is not None and x1.shape != x.shape:
        raise ValueError(f"{name}: expected x1 of the shape of x = {list(x.shape)}, got {list(x1.shape)}")
    if rowscale is not None and rowscale.numel() != math.prod(x.shape[:-1]):
        raise ValueError(
            f"{name}: expected rowscale of the leading axes of x = {list(x.shape[:-1])}, got {list(rowscale.shape)}"
        )
    for argument, tensor in (("x1", x1), ("rowscale", rowscale)):
        if tensor is not None:
            check_device(name, argument, tensor, "x", x)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"{name}: expected dropout_p from 0 to 1, got {dropout_p}")
    norm, norm1 = _NORMS[bool(is_rms_norm)]
    residual_dtype = residual.dtype if residual is not None else wide_dtype(dtype) if residual_in_fp32 else dtype
    mask, mask1, y1 = None, None, None
    is_plain = x1 is None and weight1 is None and rowscale is None and dropout_p == 0.0
    with no_autocast(x):
        if is_plain and residual_dtype in (dtype, wide_dtype(dtype)):
            y, total = norm(
                x,
                residual,
                readable(weight, dtype),
                readable(bias, dtype),
                eps=eps,
                residual_in_fp32=residual is None and residual_in_fp32,
            )
        else:
            scaled = x.to(wide)
            if rowscale is not None:
                scaled = scaled * rowscale.to(wide).reshape(*x.shape[:-1], 1)
            scaled, mask = _dropout(scaled, dropout_p)
            if x1 is not None:
                scaled1, mask1 = _dropout(x1.to(wide), dropout_p)
                scaled = scaled + scaled1
            y, total = norm(scaled, cast(residual, wide), cast(weight, wide), cast(bias, wide), eps=eps)
            if weight1 is not None:
                y1 = norm1(total, None, cast(weight1, wide), cast(bias1, wide), eps=eps)[0].to(dtype)
            y, total = y.to(dtype), total.to(residual_dtype)
    results: list[Tensor | None] = [y]
    if weight1 is not None:
        results.append(y1)
    if prenorm:
        results.append(total)
    if return_dropout_mask:
        results += [mask, mask1]
    return tuple(results) if len(results) > 1 else y


def _dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    if p == 0.0:
        return x, None
    mask = torch.rand_like(x) >= p
    # With p = 1 all elements are zeroed; a division by zero would make their gradients NaN.
    return torch.where(mask, x * (1.0 / (1.0 - p) if p < 1.0 else 0.0), 0.0), mask


@peer_arguments()
def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple[Tensor | None, ...]:
    """:func:`layer_norm_fn` with ``is_rms_norm``.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.layer_norm import rms_norm_fn
        >>> x = torch.randn(2, 10, 64)
        >>> y, residual = rms_norm_fn(x, torch.ones(64), None, residual=x, prenorm=True)
        >>> torch.equal(residual, x + x)
        True
    """
    return layer_norm_fn(
        x,
        weight,
        bias,
        residual,
        x1,
        weight1,
        bias1,
        eps,
        dropout_p,
        rowscale,
        prenorm,
        residual_in_fp32,
        True,
        return_dropout_mask,
    )


@peer_arguments(weight="norm_weight", bias="norm_bias")
def layer_norm_linear_fn(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`layer_norm_fn`, and a projection of its result.

    Args:
        linear_weight: (out_columns, columns), cast to the dtype of ``x``, or to autocast's.
        linear_bias: (out_columns,), likewise, or None.

    Other arguments are those of :func:`layer_norm_fn`.

    Returns:
        ``out``, (..., out_columns), dtype of ``x`` or of autocast; with ``prenorm`` also the sum of ``x`` and ``residual``.
        Differentiable with respect to every tensor.

    Raises:
        ValueError: a shape is not as above.
        RuntimeError, TypeError: as :func:`layer_norm_fn`.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.layer_norm import layer_norm_linear_fn
        >>> x, weight = torch.randn(2, 10, 64), torch.randn(32, 64)
        >>> layer_norm_linear_fn(x, torch.ones(64), None, weight, None, is_rms_norm=True).shape
        torch.Size([2, 10, 32])
    """
    name = "layer_norm_linear_fn"
    common_dtype(name, x=x, linear_weight=linear_weight, linear_bias=linear_bias)
    check_shape(name, "linear_weight", linear_weight, "(out_columns, columns)", (None, x.shape[-1] if x.dim() > 0 else None))
    if linear_bias is not None:
        check_shape(name, "linear_bias", linear_bias, "(out_columns,)", linear_weight.shape[:1])
        check_device(name, "linear_bias", linear_bias, "x", x)
    check_device(name, "linear_weight", linear_weight, "x", x)
    y, total = layer_norm_fn(
        x,
        norm_weight,
        norm_bias,
        residual,
        eps=eps,
        prenorm=True,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
    )
    assert y is not None and total is not None
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if is_autocast_enabled(device) and y.dtype != torch.float64 else y.dtype
    out = F.linear(cast(y, dtype), cast(linear_weight, dtype), cast(linear_bias, dtype))
    return (out, total) if prenorm else out


@refuse_script
class RMSNorm(nn.RMSNorm):
    """RMSNorm with a residual and dropout before it; parameters as in ``mamba_ssm``, whose models all have these norms.

    As an ``nn.RMSNorm`` it also is a norm of :class:`ssm_kernels.nn.Block` with ``fused_add_norm``, which reads weight and eps.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.layer_norm import RMSNorm
        >>> norm, x = RMSNorm(64), torch.randn(2, 10, 64)
        >>> y, residual = norm(x, residual=x, prenorm=True)
        >>> y.shape, residual.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 10, 64]))
    """

    eps: float
    bias: None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, device=device, dtype=dtype)
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.register_parameter("bias", None)

    def forward(  # type: ignore[override]  # the residual and the options
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Tensor | tuple[Tensor | None, ...]:
        """:func:`rms_norm_fn` with the module's weight and eps, and its dropout in training."""
        return rms_norm_fn(
            x,
            self.weight,
            None,
            residual=residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
        )


def replace_rms_norms(model: nn.Module) -> None:
    """Puts an :class:`RMSNorm` with the same weight in the place of each ``nn.RMSNorm`` of a model."""
    for module in [*model.modules()]:
        for name, norm in module.named_children():
            if type(norm) is nn.RMSNorm and norm.eps is not None:
                own = RMSNorm(norm.normalized_shape[0], norm.eps, device="meta")
                own.weight = norm.weight
                setattr(module, name, own)
