"""The norms, typed and documented: gated, and with a residual. Each calls ``torch.ops.ssm_kernels``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..choices import GateActivation
from ._arguments import names_arguments

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm_gated", "rms_norm_gated"]


@names_arguments
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
    r"""RMSNorm of groups of columns, times a gate: Mamba-2's norm.

    .. math::
        \mathrm{norm}(v) &= v / \sqrt{\mathrm{mean}(v^2) + \mathrm{eps}} \\
        \mathrm{out} &= \mathrm{norm}(x \cdot a(z)) \cdot \mathrm{weight} + \mathrm{bias} \\
        \mathrm{out} &= (\mathrm{norm}(x) \cdot \mathrm{weight} + \mathrm{bias}) \cdot a(z)
        \quad \text{with norm\_before\_gate}

    Source: Dao and Gu, *Transformers are SSMs* (arXiv 2405.21060), section 7; ``mamba_ssm`` has both orders.

    Args:
        x: (..., columns), any number of leading axes; float32, float16, bfloat16 or float64. A slice of a wider tensor along
            the columns and along one leading axis is read in place; other strides are copied.
        weight: (columns,), dtype of ``x`` or float32 (float64 with float64 ``x``), or None.
        z: the gate, shape and dtype of ``x``. Without it, a plain norm.
        bias: as ``weight``.
        eps: added to the mean square; at least 0.
        group_size: columns that are normalized together, a divisor of columns; all by default.
        norm_before_gate: apply the gate to the norm's result instead of its input.
        activation: ``a``: ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` (the tanh approximation), ``"sigmoid"`` or ``"none"``, the
            gate itself.

    Returns:
        ``out``, shape and dtype of ``x``, contiguous; differentiable with respect to every tensor argument. Double backward and
        ``torch.func`` transforms other than ``vmap`` are not supported and raise.

    The operator runs on CPU and on CUDA (compute capability 8.0 and newer) and gives the same bits every time on one device. It
    computes in float32 (float64 with float64 inputs) and rounds once. Autograd saves the inputs and one number per group of a
    row. Autocast casts to float32 the parameters and residuals whose dtype differs from the dtype of ``x``. On CUDA the
    operator launches on the current stream, the host does not wait for the device, and forward and backward can be captured in
    a CUDA graph.

    Raises:
        ValueError: a shape, ``eps``, ``group_size`` or the activation is not as above.
        RuntimeError: a dtype, layout or device is not supported, or the device has no kernel.
        TypeError: an argument is not a tensor where one is expected, or ``x`` is None.

    Examples:
        >>> import torch
        >>> from ssm_kernels import rms_norm_gated
        >>> x, z = torch.randn(2, 10, 64), torch.randn(2, 10, 64)
        >>> rms_norm_gated(x, torch.ones(64), z, group_size=32).shape
        torch.Size([2, 10, 64])
        >>> rms_norm_gated(torch.tensor([[3.0, 4.0]]), None)
        tensor([[0.8485, 1.1314]])
    """
    out: Tensor = torch.ops.ssm_kernels.rms_norm_gated.default(
        x, weight, z, bias, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate, activation=activation
    )
    return out


@names_arguments
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
    r"""LayerNorm of groups of columns, times a gate.

    .. math::
        \mathrm{norm}(v) = (v - \mathrm{mean}(v)) / \sqrt{\mathrm{mean}((v - \mathrm{mean}(v))^2) + \mathrm{eps}}

    :func:`rms_norm_gated` documents everything else. Autograd saves two numbers per group of a row.

    Examples:
        >>> import torch
        >>> from ssm_kernels import layer_norm_gated
        >>> x, z = torch.randn(2, 10, 64), torch.randn(2, 10, 64)
        >>> layer_norm_gated(x, torch.ones(64), z, torch.zeros(64)).shape
        torch.Size([2, 10, 64])
        >>> layer_norm_gated(torch.tensor([[3.0, 5.0]]), None)
        tensor([[-1.0000,  1.0000]])
    """
    out: Tensor = torch.ops.ssm_kernels.layer_norm_gated.default(
        x, weight, z, bias, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate, activation=activation
    )
    return out


@names_arguments
def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual_in_fp32: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Sum with a residual and its RMSNorm: the residual connection and norm between two mixers of a model.

    .. math::
        \mathrm{new\_residual} &= x + \mathrm{residual} \\
        \mathrm{normed} &= \mathrm{new\_residual} / \sqrt{\mathrm{mean}(\mathrm{new\_residual}^2) + \mathrm{eps}}
        \cdot \mathrm{weight} + \mathrm{bias}

    Args:
        x: (..., columns), as in :func:`rms_norm_gated`.
        residual: shape of ``x``, dtype of ``x`` or float32 (float64 with float64 ``x``); None stands for zeros.
        weight: (columns,), dtype of ``x`` or float32 (float64 with float64 ``x``), or None.
        bias: as ``weight``.
        eps: added to the mean square; at least 0.
        residual_in_fp32: return ``new_residual`` in float32 (float64 with float64 ``x``).

    Returns:
        ``(normed, new_residual)``, both of the shape of ``x``: ``normed`` in the dtype of ``x``, ``new_residual`` in the dtype
        of ``residual``, or of ``x`` without a residual. ``normed`` is the norm of the rounded ``new_residual``. Both are
        differentiable with respect to every tensor argument. Autograd saves ``new_residual``, the parameters and one number per
        row.

    :func:`rms_norm_gated` documents the rest and the errors.

    Examples:
        >>> import torch
        >>> from ssm_kernels import add_rms_norm
        >>> x, residual = torch.randn(2, 10, 64), torch.randn(2, 10, 64)
        >>> y, residual = add_rms_norm(x, residual, torch.ones(64))
        >>> y.shape, residual.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 10, 64]))
        >>> add_rms_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]), None)
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))
    """
    results: tuple[Tensor, Tensor] = torch.ops.ssm_kernels.add_rms_norm.default(
        x, residual, weight, bias, eps=eps, residual_in_fp32=residual_in_fp32
    )
    return results


@names_arguments
def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual_in_fp32: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sum with a residual and its LayerNorm: :func:`add_rms_norm` with the mean subtracted.

    Examples:
        >>> import torch
        >>> from ssm_kernels import add_layer_norm
        >>> x, residual = torch.randn(2, 10, 64), torch.randn(2, 10, 64)
        >>> y, residual = add_layer_norm(x, residual, torch.ones(64), torch.zeros(64))
        >>> y.shape, residual.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 10, 64]))
    """
    results: tuple[Tensor, Tensor] = torch.ops.ssm_kernels.add_layer_norm.default(
        x, residual, weight, bias, eps=eps, residual_in_fp32=residual_in_fp32
    )
    return results
