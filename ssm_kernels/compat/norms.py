"""``mamba_ssm.ops.triton.layernorm_gated`` (2.3.2): its functions and modules on our kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._dtypes import cast, readable
from .._torchscript import refuse_script
from ..ops.norm import layer_norm_gated, rms_norm_gated
from ._errors import peer_arguments
from ._promotion import common_dtype, no_autocast

__all__ = ["LayerNorm", "RMSNorm", "layernorm_fn", "rmsnorm_fn"]


@peer_arguments()
def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """LayerNorm, or RMSNorm, of groups of columns, times ``silu(z)``: :func:`ssm_kernels.rms_norm_gated` in any mix of dtypes.

    ``x`` and ``z`` of different dtypes are widened to the wider one, a copy of the other. The result has the shape and dtype of
    ``x`` and is differentiable with respect to every tensor. Autocast changes nothing.

    Raises:
        ValueError, RuntimeError, TypeError: as :func:`ssm_kernels.rms_norm_gated`.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.norms import layernorm_fn
        >>> x, z = torch.randn(2, 10, 64), torch.randn(2, 10, 64)
        >>> layernorm_fn(x, torch.ones(64), torch.zeros(64), z).shape
        torch.Size([2, 10, 64])
    """
    common_dtype("layernorm_fn", x=x, weight=weight, bias=bias)
    dtype = common_dtype("layernorm_fn", x=x, z=z)
    norm = rms_norm_gated if is_rms_norm else layer_norm_gated
    with no_autocast(x):
        out = norm(
            cast(x, dtype),
            readable(weight, dtype),
            cast(z, dtype),
            readable(bias, dtype),
            eps=eps,
            group_size=group_size,
            norm_before_gate=norm_before_gate,
        )
    return cast(out, x.dtype)


@peer_arguments()
def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """:func:`layernorm_fn` with ``is_rms_norm``.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.norms import rmsnorm_fn
        >>> x, z = torch.randn(2, 10, 64), torch.randn(2, 10, 64)
        >>> rmsnorm_fn(x, torch.ones(64), None, z, norm_before_gate=False).shape
        torch.Size([2, 10, 64])
    """
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, True)


@refuse_script
class _Norm(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        self.register_parameter("bias", self._make_bias())
        self.reset_parameters()

    def _make_bias(self) -> nn.Parameter | None:
        return None

    def reset_parameters(self) -> None:
        """Sets the weight to one and the bias to zero."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class RMSNorm(_Norm):
    """Gated RMSNorm of groups of ``group_size`` columns, without a bias; parameters as in ``mamba_ssm``.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.norms import RMSNorm
        >>> norm, x, z = RMSNorm(64, group_size=32), torch.randn(2, 10, 64), torch.randn(2, 10, 64)
        >>> norm(x, z).shape
        torch.Size([2, 10, 64])
    """

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """``norm(x) * silu(z)``, or ``norm(x * silu(z))`` unless ``norm_before_gate``."""
        return rmsnorm_fn(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)


class LayerNorm(_Norm):
    """Gated LayerNorm of groups of ``group_size`` columns; parameters as in ``mamba_ssm``.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.norms import LayerNorm
        >>> norm, x, z = LayerNorm(64), torch.randn(2, 10, 64), torch.randn(2, 10, 64)
        >>> norm(x, z).shape
        torch.Size([2, 10, 64])
    """

    def _make_bias(self) -> nn.Parameter:
        return nn.Parameter(torch.empty_like(self.weight))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """``norm(x) * silu(z)``, or ``norm(x * silu(z))`` unless ``norm_before_gate``."""
        return layernorm_fn(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)
