r"""The residual block of Mamba's language models: add, norm, mixer and, where a model has one, a gated MLP.

For the output :math:`x` of the previous block and the residual stream :math:`r`:

.. math::
    r' &= r + x, \qquad y = \mathrm{mixer}(\mathrm{norm}(r')) \\
    r'' &= r' + y, \qquad \mathrm{out} = \mathrm{mlp}(\mathrm{norm}_2(r''))

A block returns its last output and the residual stream separately. The next block adds them, so that one operator computes the
sum and the norm. Source: Gu and Dao, *Mamba* (arXiv 2312.00752), section 3.4; ``mamba_ssm`` has the block in this form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .._dtypes import wide_dtype
from ..ops.norm import add_layer_norm, add_rms_norm
from .checks import (
    check_bools,
    check_callable,
    check_dtype,
    check_int,
    check_optional_int,
    check_shape,
    check_tensor,
)
from .initialization import linear
from .naming import class_name, names_layer
from .weight_decay import NamesNoDecay

__all__ = ["Block", "GatedMLP", "add_norm"]


@names_layer
class GatedMLP(NamesNoDecay, nn.Module):
    """A gated MLP (SwiGLU with the default activation), ``fc2(value * activation(gate))`` with ``(value, gate) = fc1(x)``.

    Parameter names and shapes match ``mamba_ssm``'s ``GatedMLP``: ``fc1.weight`` (2 hidden, in_features),
    ``fc2.weight`` (out_features, hidden); with ``bias`` also ``fc1.bias`` and ``fc2.bias``.

    Args:
        in_features: channels of the input.
        hidden_features: channels of value and gate, rounded up to a multiple of ``multiple_of``; ``None`` is
            ``8 * in_features / 3``.
        out_features: channels of the output; ``None`` is ``in_features``.
        activation: of the gate.
        bias: whether the two projections have one.
        multiple_of: see ``hidden_features``.
        device: where the parameters are made.
        dtype: dtype of the parameters.

    Raises:
        ValueError: a size is not positive.
        TypeError: an argument is of another type.

    Examples:
        >>> import torch
        >>> from ssm_kernels import nn
        >>> nn.GatedMLP(32, hidden_features=128)(torch.randn(2, 10, 32)).shape
        torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.silu,
        bias: bool = False,
        multiple_of: int = 128,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("GatedMLP", "in_features", in_features)
        check_optional_int("GatedMLP", "hidden_features", hidden_features)
        check_optional_int("GatedMLP", "out_features", out_features)
        check_int("GatedMLP", "multiple_of", multiple_of)
        check_bools("GatedMLP", bias=bias)
        check_callable("GatedMLP", "activation", activation, "torch.nn.functional.silu")
        check_dtype("GatedMLP", dtype)
        hidden = 8 * in_features // 3 if hidden_features is None else hidden_features
        hidden = -(-hidden // multiple_of) * multiple_of
        out_features = in_features if out_features is None else out_features
        self.in_features, self.activation = in_features, activation
        self.fc1 = linear(in_features, 2 * hidden, bias, device, dtype)
        self.fc2 = linear(hidden, out_features, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        name = class_name(self)
        check_tensor(name, "x", x)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"{name}: expected x of shape (..., in_features) = (..., {self.in_features}), got {list(x.shape)}")
        if x.is_meta and not next(self.parameters()).is_meta:
            raise RuntimeError(f"{name}: expected x on the layer's device, got a meta tensor")
        value, gate = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(value * self.activation(gate))


def add_norm(
    norm: nn.Module, x: Tensor, residual: Tensor | None, *, fused: bool, residual_in_fp32: bool
) -> tuple[Tensor, Tensor]:
    """``norm(x + residual)`` and the sum, which is the new residual stream.

    Args:
        norm: an ``nn.RMSNorm`` or ``nn.LayerNorm`` if ``fused``, else any module.
        x: (..., channels).
        residual: shape of ``x``; zero if absent.
        fused: reads the parameters of ``norm`` and calls :func:`ssm_kernels.add_rms_norm` or ``add_layer_norm``; the result has
            the dtype of ``x``. Otherwise, or if another module replaces the norm, the sum has the dtype that PyTorch gives
            it, and the function calls ``norm`` with the sum in the dtype of its weight.
        residual_in_fp32: the sum is float32 (float64 if it would be float64 without this argument).
    """
    if fused and isinstance(norm, (nn.RMSNorm, nn.LayerNorm)) and norm.eps is not None:
        operator = add_rms_norm if isinstance(norm, nn.RMSNorm) else add_layer_norm
        bias = getattr(norm, "bias", None)
        return operator(x, residual, norm.weight, bias, eps=norm.eps, residual_in_fp32=residual_in_fp32)
    residual = x if residual is None else x + residual
    weight = getattr(norm, "weight", None)
    normed = norm(residual if weight is None else residual.to(weight.dtype))
    return normed, residual.to(wide_dtype(residual.dtype)) if residual_in_fp32 else residual


def check_fused_norm(layer: str, norm: nn.Module) -> None:
    """Checks that :func:`add_norm` can read the parameters of ``norm``."""
    if not isinstance(norm, (nn.RMSNorm, nn.LayerNorm)):
        raise TypeError(
            f"{layer}: expected norm_cls to make an nn.RMSNorm or nn.LayerNorm with fused_add_norm, got {type(norm).__name__}"
        )
    if norm.eps is None:
        raise ValueError(
            f"{layer}: expected norm_cls to make a norm with a number for eps with fused_add_norm, got eps=None of {norm}: "
            f"write functools.partial(torch.nn.{type(norm).__name__}, eps=1e-5)"
        )
    if len(norm.normalized_shape) != 1:
        raise ValueError(
            f"{layer}: expected norm_cls to make a norm of the last axis with fused_add_norm, got normalized_shape="
            f"{(*norm.normalized_shape,)} of {norm}"
        )


def _check_dtype_of_stream(name: str, value: Tensor) -> None:
    """Checks for a dtype that both ways to add and normalize take."""
    if value.dtype not in _DTYPES:
        hint = ": complex tensors are not supported" if value.is_complex() else ""
        dtypes = "float32, float16, bfloat16 or float64"
        raise RuntimeError(f"Block: expected {name} of dtype {dtypes}, got {str(value.dtype).removeprefix('torch.')}{hint}")


_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@names_layer
class Block(NamesNoDecay, nn.Module):
    """A residual block: add, norm, mixer and, with ``mlp_cls``, add, norm, MLP. See the formulas of ``block.py``.

    Constructor, calls and parameter names match ``mamba_ssm``'s ``Block``: ``norm.*``, ``mixer.*`` and,
    with an MLP, ``norm2.*`` and ``mlp.*``.

    Args:
        dim: channels.
        mixer_cls: makes the mixer: ``mixer_cls(dim)`` maps (batch, seqlen, dim) to itself and takes ``inference_params``.
        mlp_cls: makes the MLP: ``mlp_cls(dim)``, such as ``functools.partial(GatedMLP, hidden_features=1024)``.
            ``nn.Identity`` is no MLP.
        norm_cls: makes each norm: ``norm_cls(dim)``.
        fused_add_norm: computes sum and norm in one operator, :func:`ssm_kernels.add_rms_norm` or ``add_layer_norm``. It reads
            the parameters of an ``nn.RMSNorm`` or ``nn.LayerNorm`` and does not call the module, so hooks on it do not run.
        residual_in_fp32: keeps the residual stream in float32 (float64 in a float64 model).

    Raises:
        ValueError: ``dim`` is not positive, or a norm lacks the eps that ``fused_add_norm`` reads.
        TypeError: an argument is of another type, or ``fused_add_norm`` cannot read the norm.

    Examples:
        >>> import functools
        >>> import torch
        >>> from ssm_kernels import nn
        >>> norm = functools.partial(torch.nn.RMSNorm, eps=1e-5)
        >>> block = nn.Block(32, nn.Mamba, norm_cls=norm, fused_add_norm=True, residual_in_fp32=True)
        >>> x, residual = block(torch.randn(2, 10, 32), None)
        >>> x.shape, residual.shape
        (torch.Size([2, 10, 32]), torch.Size([2, 10, 32]))
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module],
        mlp_cls: Callable[[int], nn.Module] = nn.Identity,
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        check_int("Block", "dim", dim)
        for name, make, example in (
            ("mixer_cls", mixer_cls, "functools.partial(Mamba, d_state=16)"),
            ("mlp_cls", mlp_cls, "ssm_kernels.nn.GatedMLP"),
            ("norm_cls", norm_cls, "torch.nn.RMSNorm"),
        ):
            check_callable("Block", name, make, example)
        check_bools("Block", fused_add_norm=fused_add_norm, residual_in_fp32=residual_in_fp32)
        self.dim, self.fused_add_norm, self.residual_in_fp32 = dim, fused_add_norm, residual_in_fp32
        # The order of mamba_ssm: optimizer states are saved, and random numbers drawn, in the order of creation.
        self.norm = norm_cls(dim)
        self.mixer = mixer_cls(dim)
        self.mlp: nn.Module | None = None
        if mlp_cls is not nn.Identity:
            self.norm2 = norm_cls(dim)
            self.mlp = mlp_cls(dim)
        if fused_add_norm:
            check_fused_norm("Block", self.norm)

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None = None, inference_params: Any = None, **mixer_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Runs the block.

        Args:
            hidden_states: (batch, seqlen, dim), the output of the previous block; float32, float16, bfloat16 or float64. With
                ``fused_add_norm`` its dtype, the residual's and the norm's go together as in :func:`ssm_kernels.add_rms_norm`.
            residual: the residual stream without ``hidden_states``, of the same shape; zero if absent, as in the first block.
            inference_params: passed to the mixer; see :class:`.mamba.Mamba`.
            mixer_kwargs: passed to the mixer.

        Returns:
            The output of the mixer or of the MLP, in the shape of ``hidden_states``, and the residual stream without it.

        Raises:
            ValueError: ``hidden_states`` or ``residual`` is not of the shape above.
            TypeError: one of them is not a tensor, or the mixer does not take an argument.
            RuntimeError: one of them is complex, bool, of integers or of another dtype than those above.

        Examples:
            >>> import torch
            >>> from ssm_kernels import nn
            >>> blocks, x, residual = [nn.Block(32, nn.Mamba) for _ in range(2)], torch.randn(2, 10, 32), None
            >>> for block in blocks:
            ...     x, residual = block(x, residual)
            >>> (x + residual).shape
            torch.Size([2, 10, 32])
        """
        check_shape("Block", "hidden_states", hidden_states, "(batch, seqlen, dim)", (None, None, self.dim))
        _check_dtype_of_stream("hidden_states", hidden_states)
        weight = getattr(self.norm, "weight", None)
        if hidden_states.is_meta and isinstance(weight, Tensor) and not weight.is_meta:
            raise RuntimeError(f"Block: expected hidden_states on {weight.device} (the layer's device), got meta")
        if residual is not None:
            check_shape("Block", "residual", residual, "(batch, seqlen, dim)", hidden_states.shape)
            _check_dtype_of_stream("residual", residual)
            if residual.device != hidden_states.device:
                raise RuntimeError(f"Block: expected residual on {hidden_states.device}, got {residual.device}")
        hidden_states, residual = self._add_norm(self.norm, hidden_states, residual)
        hidden_states = self.mixer(hidden_states, inference_params=inference_params, **mixer_kwargs)
        if self.mlp is not None:
            hidden_states, residual = self._add_norm(self.norm2, hidden_states, residual)
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """Returns the mixer's states for decoding; see its method of this name."""
        allocate = cast(Callable[..., Any], self.mixer.allocate_inference_cache)
        return allocate(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def extra_repr(self) -> str:
        return f"fused_add_norm={self.fused_add_norm}, residual_in_fp32={self.residual_in_fp32}"

    def _add_norm(self, norm: nn.Module, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return add_norm(norm, x, residual, fused=self.fused_add_norm, residual_in_fp32=self.residual_in_fp32)
