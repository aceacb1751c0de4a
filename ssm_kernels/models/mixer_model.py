"""Embedding, residual blocks and norm: the language model without its head."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor

from .._torchscript import refuse_script
from ..choices import ExponentialDiscretizationName, RecurrenceName
from ..nn.block import Block, GatedMLP, add_norm
from ..nn.checks import check_shape
from ..nn.common import ConvMixer
from ..nn.initialization import initialized, reset_all, reset_embedding, reset_linear
from ..nn.mamba import Mamba
from ..nn.mamba2 import Mamba2
from ..nn.mamba3 import Mamba3
from ..nn.mlstm import MLSTM
from ..nn.naming import class_name
from ..nn.weight_decay import NamesNoDecay
from ..ops._arguments import did_you_mean
from .config import DELTA_RULES, MambaConfig
from .padding import Packing, check_attention_mask
from .prompts import check_tokens
from .recurrent_mixer import RecurrentMixer
from .vocabulary import check_ids

__all__ = ["MixerModel"]

_NORM_EPS = 1e-5


def _mixer_class(config: MambaConfig) -> Callable[..., nn.Module]:
    if config.mixer == "Mamba":
        return functools.partial(Mamba, discretization=config.discretization, recompute=config.recompute, **config.ssm_cfg)
    if config.mixer == "Mamba2":
        rule = cast(ExponentialDiscretizationName, config.discretization)
        return functools.partial(Mamba2, discretization=rule, recompute=config.recompute, **config.ssm_cfg)
    if config.mixer in DELTA_RULES:
        return functools.partial(_delta_rule, DELTA_RULES[config.mixer], config.recompute, **config.ssm_cfg)
    if config.mixer == "Mamba3":
        return functools.partial(Mamba3, **config.ssm_cfg)
    if config.mixer == "MLSTM":
        return functools.partial(MLSTM, **config.ssm_cfg)
    return functools.partial(RecurrentMixer, rnn=cast(RecurrenceName, config.mixer), **config.ssm_cfg)


def _delta_rule(layer: Callable[..., nn.Module], recompute: str, d_model: int, **options: Any) -> nn.Module:
    made: Any = layer(hidden_size=d_model, **options)
    made.recompute = recompute
    return cast(nn.Module, made)


# The last projections of mixers and MLPs.
_OUTPUTS = ("out_proj", "o_proj", "fc2")
_INITIALIZER_OPTIONS = ("initializer_range", "rescale_prenorm_residual", "n_residuals_per_layer")


def _own_initializations(
    backbone: nn.Module,
    n_layer: int,
    initializer_range: float = 0.02,
    rescale_prenorm_residual: bool = True,
    n_residuals_per_layer: int = 1,
) -> None:
    """Gives embedding and projections the initialization of ``mamba_ssm``'s models, and initializes what it changes."""
    for module in [*backbone.modules()]:
        if isinstance(module, nn.Embedding):
            initialized(module, functools.partial(reset_embedding, std=initializer_range)).reset_parameters()
        for name, child in module.named_children():
            if not isinstance(child, nn.Linear) or getattr(child.bias, "_no_reinit", False):
                continue
            if rescale_prenorm_residual and name in _OUTPUTS:
                # So that the variance of the residual stream, a sum over the layers, does not grow with their number.
                divisor = math.sqrt(n_residuals_per_layer * n_layer)
                initialized(child, functools.partial(reset_linear, divisor=divisor, zero_bias=True)).reset_parameters()
            elif child.bias is not None:
                nn.init.zeros_(initialized(child, functools.partial(reset_linear, zero_bias=True)).bias)


@torch.no_grad()
def _init_weights(
    module: nn.Module,
    n_layer: int,
    initializer_range: float = 0.02,
    rescale_prenorm_residual: bool = True,
    n_residuals_per_layer: int = 1,
) -> None:
    """``mamba_ssm``'s function, for ``model.apply`` in code written for it."""
    if isinstance(module, nn.Linear):
        if module.bias is not None and not getattr(module.bias, "_no_reinit", False):
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=initializer_range)
    if rescale_prenorm_residual:
        # So that the variance of the residual stream, a sum over the layers, does not grow with their number.
        for name in _OUTPUTS:
            projection = getattr(module, name, None)
            if isinstance(projection, nn.Linear):
                nn.init.kaiming_uniform_(projection.weight, a=math.sqrt(5))
                projection.weight /= math.sqrt(n_residuals_per_layer * n_layer)


@refuse_script
class MixerModel(NamesNoDecay, nn.Module):
    """Embedding, blocks and norm: :class:`.mamba_lm.MambaLM` without its head.

    Parameters: ``embedding.weight`` (padded vocabulary, d_model), ``layers.{i}.norm.weight`` (d_model,),
    ``layers.{i}.mixer.*``, with an MLP ``layers.{i}.norm2.weight``, ``layers.{i}.mlp.fc1.weight`` and
    ``layers.{i}.mlp.fc2.weight``, and ``norm_f.weight`` (d_model,). An ``nn.LayerNorm`` also has a ``bias``.

    Args:
        config: the sizes and options.
        initializer_cfg: ``mamba_ssm``'s: ``initializer_range`` (0.02), ``rescale_prenorm_residual`` (True) and
            ``n_residuals_per_layer`` (1, with an MLP 2).
        device: where the parameters are made.
        dtype: dtype of the model. Parameters that the mixers keep in a wider dtype are float32 (float64 in a float64 model).

    Examples:
        >>> import torch
        >>> from ssm_kernels.models import MambaConfig, MixerModel
        >>> model = MixerModel(MambaConfig(d_model=64, n_layer=2, vocab_size=100))
        >>> model(torch.randint(100, (4, 32))).shape  # (batch, seqlen, d_model)
        torch.Size([4, 32, 64])
    """

    def __init__(
        self,
        config: MambaConfig,
        initializer_cfg: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self._config = config
        self.fused_add_norm, self.residual_in_fp32 = config.fused_add_norm, config.residual_in_fp32
        self.embedding = nn.Embedding(config.padded_vocab_size, config.d_model, **factory)

        def norm_cls(channels: int) -> nn.Module:
            if config.rms_norm:
                return nn.RMSNorm(channels, eps=_NORM_EPS, device=device, dtype=dtype)
            return nn.LayerNorm(channels, eps=_NORM_EPS, device=device, dtype=dtype)

        mlp_cls: Callable[[int], nn.Module] = nn.Identity
        if config.d_intermediate > 0:
            mlp_cls = functools.partial(GatedMLP, hidden_features=config.d_intermediate, **factory)
        mixer_cls = functools.partial(_mixer_class(config), **factory)
        self.layers = nn.ModuleList(
            Block(
                config.d_model,
                functools.partial(mixer_cls, layer_idx=i),
                mlp_cls,
                norm_cls,
                fused_add_norm=config.fused_add_norm,
                residual_in_fp32=config.residual_in_fp32,
            )
            for i in range(config.n_layer)
        )
        self.norm_f = norm_cls(config.d_model)
        options = {"n_residuals_per_layer": 2 if config.d_intermediate > 0 else 1} | dict(initializer_cfg or {})
        unknown = [key for key in options if key not in _INITIALIZER_OPTIONS]
        if unknown:
            nearest = did_you_mean(unknown[0], _INITIALIZER_OPTIONS)
            raise TypeError(
                f"{class_name(self)}: expected initializer_cfg with keys of {[*_INITIALIZER_OPTIONS]}, got "
                f"{unknown[0]!r}{nearest}"
            )
        _own_initializations(self, config.n_layer, **options)

    def init_weights(self) -> None:
        """As :meth:`.mamba_lm.MambaLM.init_weights`."""
        reset_all(self, f"{class_name(self)}.init_weights")

    def forward(
        self,
        input_ids: Tensor | None = None,
        inference_params: Any = None,
        *,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **mixer_kwargs: Any,
    ) -> Tensor:
        """Hidden states, (batch, seqlen, d_model), of tokens, (batch, seqlen); zero where ``attention_mask`` is.

        :meth:`.mamba_lm.MambaLM.forward` documents the arguments and errors.
        """
        given = self._check_inputs(input_ids, inputs_embeds)
        packing = None
        if attention_mask is not None:
            check_attention_mask(class_name(self), attention_mask, given)
            self._check_is_local("attention_mask")
            if clash := sorted({"cu_seqlens", "seq_idx"}.intersection(mixer_kwargs)):
                raise ValueError(f"{class_name(self)}: expected attention_mask or {clash[0]}, got both")
            packing = Packing(attention_mask)
            # Without a cache of one row a sequence the padding needs a sequence of its own.
            ends = packing.cu_seqlens_of_all() if inference_params is None else packing.cu_seqlens
            mixer_kwargs["cu_seqlens"] = ends
            if input_ids is not None:  # padding may be any number
                input_ids = input_ids.masked_fill(~packing.is_token, 0)
        if input_ids is not None:
            check_ids(class_name(self), "input_ids", input_ids, self._vocab_size())
        residual = None
        hidden_states = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if packing is not None:
            hidden_states = packing.pack(hidden_states)
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual, inference_params=inference_params, **mixer_kwargs)
        hidden_states = add_norm(
            self.norm_f, hidden_states, residual, fused=self.fused_add_norm, residual_in_fp32=self.residual_in_fp32
        )[0]
        return hidden_states if packing is None else packing.unpack(hidden_states)

    def _check_inputs(self, input_ids: Any, inputs_embeds: Any) -> Tensor:
        """The tensor of inputs that is given, checked."""
        name = class_name(self)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(f"{name}: expected input_ids or inputs_embeds, got {'neither' if input_ids is None else 'both'}")
        if inputs_embeds is not None:
            axes = "(batch, seqlen, d_model)"
            check_shape(name, "inputs_embeds", inputs_embeds, axes, (None, None, self.embedding.embedding_dim))
            if not inputs_embeds.is_floating_point():
                raise TypeError(f"{name}: expected inputs_embeds of a floating-point dtype, got {inputs_embeds.dtype}")
        else:
            check_tokens(name, input_ids)
        given = input_ids if inputs_embeds is None else inputs_embeds
        embedding = self.embedding
        # Hooks and wrappers, as of FSDP and offloading, bring weights to the device of the input when the module is called.
        may_move = type(embedding) is not nn.Embedding or embedding._forward_pre_hooks or self._forward_pre_hooks
        if not may_move and "forward" not in embedding.__dict__ and given.device != embedding.weight.device:
            argument = "input_ids" if inputs_embeds is None else "inputs_embeds"
            raise RuntimeError(
                f"{name}: expected {argument} on the model's device, {embedding.weight.device}, got {given.device}"
            )
        return given

    def _vocab_size(self) -> int:
        """How many tokens there are, without the rows that pad the embedding. An embedding of another size has its own number.

        A wrapper has the number of the embedding inside.
        """
        found = (getattr(module, "num_embeddings", None) for module in self.embedding.modules())
        rows = next((rows for rows in found if isinstance(rows, int)), self._config.padded_vocab_size)
        return self._config.vocab_size if rows == self._config.padded_vocab_size else rows

    def _check_is_local(self, argument: str) -> None:
        """Raises where ranks hold spans of one sequence, as masks and labels know nothing of the other spans."""
        if any(isinstance(module, ConvMixer) and not module.operators.is_local for module in self.modules()):
            raise ValueError(
                f"{class_name(self)}: expected no {argument} with context parallelism: pack sequences with cu_seqlens, and "
                "compute the loss of each span with the next span's first label"
            )

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> dict[int, Any]:
        """Returns zero states of every mixer under its ``layer_idx``, for ``InferenceParams.key_value_memory_dict``."""
        return {
            i: cast(Block, layer).allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)
            for i, layer in enumerate(self.layers)
        }
