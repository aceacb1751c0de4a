"""``create_block`` and ``MixerModel`` of ``mamba_ssm.models.mixer_seq_simple`` (2.3.2), made of this package's layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..models import mixer_model
from ..models.config import MambaConfig
from ..nn import Block, GatedMLP, Mamba2, Mamba3
from ..ops._arguments import did_you_mean
from .bidirectional import Mamba
from .layer_norm import RMSNorm, replace_rms_norms

__all__ = ["BlockWithoutMLP", "MixerModel", "create_block"]


def _check_no_attention(name: str, attn_layer_idx: Sequence[int] | None, attn_cfg: Mapping[str, Any] | None) -> None:
    for argument, value in (("attn_layer_idx", attn_layer_idx), ("attn_cfg", attn_cfg)):
        if value:
            raise NotImplementedError(f"{name}: attention layers are not supported, expected {argument} empty, got {value}")


class BlockWithoutMLP(Block):
    """The residual block of ``mamba_ssm`` 1.0 to 1.2: :class:`ssm_kernels.nn.Block` without an MLP.

    Args:
        dim: channels.
        mixer_cls: called with ``dim``, makes the mixer.
        norm_cls: called with ``dim``, makes the norm.
        fused_add_norm: see :class:`ssm_kernels.nn.Block`.
        residual_in_fp32: likewise.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module],
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__(dim, mixer_cls, nn.Identity, norm_cls, fused_add_norm, residual_in_fp32)


def create_block(
    d_model: int,
    d_intermediate: int | Mapping[str, Any] | None = 0,
    ssm_cfg: Mapping[str, Any] | None = None,
    attn_layer_idx: Sequence[int] | None = None,
    attn_cfg: Mapping[str, Any] | None = None,
    norm_epsilon: float = 1e-5,
    rms_norm: bool = False,
    residual_in_fp32: bool = False,
    fused_add_norm: bool = False,
    layer_idx: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Block:
    """Makes a residual block, :class:`ssm_kernels.nn.Block`.

    Args:
        d_model: channels.
        d_intermediate: hidden channels of the gated MLP; 0: no MLP. A mapping or None here is ``ssm_cfg``, as in ``mamba_ssm``
            1.0 to 1.2; the arguments after it then go by keyword.
        ssm_cfg: ``layer``, ``"Mamba1"`` (default), ``"Mamba2"`` or ``"Mamba3"``, and arguments of the mixer.
        attn_layer_idx: must be empty.
        attn_cfg: must be empty.
        norm_epsilon: eps of the norms.
        rms_norm: norm with :class:`.layer_norm.RMSNorm` instead of ``nn.LayerNorm``.
        residual_in_fp32: see :class:`ssm_kernels.nn.Block`.
        fused_add_norm: likewise.
        layer_idx: the mixer's key in ``InferenceParams.key_value_memory_dict``, and the block's attribute of this name.
        device: where the parameters are made.
        dtype: dtype of the parameters.

    Raises:
        NotImplementedError: ``attn_layer_idx`` or ``attn_cfg`` is not empty.
        ValueError: another ``layer``, or a value that the mixer refuses.
    """
    if d_intermediate is None or isinstance(d_intermediate, Mapping):
        if ssm_cfg is not None:
            raise ValueError(
                f"create_block: expected d_intermediate to be an int beside ssm_cfg, got {d_intermediate}: pass the arguments "
                "after the first by keyword"
            )
        ssm_cfg, d_intermediate = d_intermediate, 0
    _check_no_attention("create_block", attn_layer_idx, attn_cfg)
    factory: dict[str, Any] = {"device": device, "dtype": dtype}
    options = dict(ssm_cfg or {})
    layer = options.pop("layer", "Mamba1")
    layers: dict[str, Callable[..., nn.Module]] = {"Mamba1": Mamba, "Mamba2": Mamba2, "Mamba3": Mamba3}
    if layer not in layers:
        nearest = did_you_mean(layer, [*layers])
        raise ValueError(f"create_block: expected ssm_cfg['layer'] 'Mamba1', 'Mamba2' or 'Mamba3', got {layer!r}{nearest}")
    mixer = layers[layer]
    mlp_cls: Callable[[int], nn.Module] = nn.Identity
    if d_intermediate > 0:
        mlp_cls = functools.partial(GatedMLP, hidden_features=d_intermediate, out_features=d_model, **factory)
    norm: Callable[..., nn.Module] = RMSNorm if rms_norm else nn.LayerNorm
    block = Block(
        d_model,
        functools.partial(mixer, layer_idx=layer_idx, **options, **factory),
        mlp_cls,
        functools.partial(norm, eps=norm_epsilon, **factory),
        fused_add_norm,
        residual_in_fp32,
    )
    block.layer_idx = layer_idx  # type: ignore[assignment]
    return block


class MixerModel(mixer_model.MixerModel):
    """Embedding, blocks and norm: :class:`ssm_kernels.models.mixer_model.MixerModel` with ``mamba_ssm``'s constructor.

    Args:
        d_model: channels.
        n_layer: number of blocks.
        d_intermediate: see :func:`create_block`, as for the arguments below.
        vocab_size: rows of the embedding, without padding. If it is missing or a mapping, the third and the fourth argument
            are ``vocab_size`` and ``ssm_cfg``, as in ``mamba_ssm`` 1.0 to 1.2.
        initializer_cfg: ``initializer_range`` (0.02) and ``rescale_prenorm_residual`` (True).

    Raises:
        NotImplementedError, ValueError: as :func:`create_block`.
    """

    def __init__(
        self,
        d_model: int,
        n_layer: int,
        d_intermediate: int = 0,
        vocab_size: int | Mapping[str, Any] | None = None,
        ssm_cfg: Mapping[str, Any] | None = None,
        attn_layer_idx: Sequence[int] | None = None,
        attn_cfg: Mapping[str, Any] | None = None,
        norm_epsilon: float = 1e-5,
        rms_norm: bool = False,
        initializer_cfg: dict[str, Any] | None = None,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if vocab_size is None or isinstance(vocab_size, Mapping):
            ssm_cfg = ssm_cfg if vocab_size is None else vocab_size
            d_intermediate, vocab_size = 0, d_intermediate
        _check_no_attention("MixerModel", attn_layer_idx, attn_cfg)
        config = MambaConfig(
            d_model=d_model,
            d_intermediate=d_intermediate,
            n_layer=n_layer,
            vocab_size=vocab_size,
            ssm_cfg=dict(ssm_cfg or {}),
            rms_norm=rms_norm,
            residual_in_fp32=residual_in_fp32,
            fused_add_norm=fused_add_norm,
            pad_vocab_size_multiple=1,
        )
        super().__init__(config, initializer_cfg, device, dtype)
        replace_rms_norms(self)
        for block in self.layers:
            for norm in (block.norm, getattr(block, "norm2", None)):
                if norm is not None:
                    norm.eps = norm_epsilon  # type: ignore[union-attr]
        self.norm_f.eps = norm_epsilon  # type: ignore[assignment]
