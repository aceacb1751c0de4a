"""Packed sequences in models of transformers: hybrid ones separate them under conditions only, others never.

Mixers read ``seq_idx`` or ``cu_seqlens``, attention reads neither. transformers builds a mask that separates the sequences from
``position_ids``, unless there is a cache or an ``attention_mask``. The model then mixes the sequences without an error, so that
its ``forward`` is replaced by one that checks these arguments first. Models of Mamba's kind and ``Mamba2ForCausalLM`` drop
``seq_idx`` and ``cu_seqlens``: their ``forward`` is replaced by one that refuses them.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..nn.naming import class_name
from ._transformers_functions import Function

__all__ = [
    "PACKING",
    "forward_that_checks_packing",
    "forward_that_refuses_packing",
    "models_that_drop_packing",
    "models_with_attention",
]

PACKING = "packing"
_MASKS = ("create_causal_mask", "_update_causal_mask")
_PACKED, _CACHES = ("seq_idx", "cu_seqlens"), ("cache", "past_key_values", "cache_params")
# Layers other than attention, in the lists of types of the configurations.
_OTHER_LAYERS = ("linear_attention", "mamba", "mamba2", "mlp", "moe")
# Their backbone takes what they drop.
_DROP_PACKING = ("Mamba2ForCausalLM",)
# Models whose masks ignore position_ids.
_IGNORE_POSITIONS = ("GraniteMoeHybrid",)


def models_with_attention(module: ModuleType) -> dict[str, Function]:
    """The forwards that make masks for attention layers, by the model's class."""
    return {name: forward for name, forward in _forwards(module).items() if any(mask in _names(forward) for mask in _MASKS)}


def models_that_drop_packing(module: ModuleType, has_packing: bool) -> dict[str, Function]:
    """The forwards of models that drop packed sequences, by the class; of all models unless the mixers take them."""
    ends = _DROP_PACKING if has_packing else ("Model", "ForCausalLM")
    return {name: forward for name, forward in _forwards(module).items() if name.endswith(ends)}


def _forwards(module: ModuleType) -> dict[str, Function]:
    classes = {name: vars(value) for name, value in list(vars(module).items()) if isinstance(value, type)}
    return {name: members["forward"] for name, members in classes.items() if "forward" in members}


def _names(forward: Function) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return () if code is None else code.co_names


def forward_that_checks_packing(forward: Function, *packings: str) -> Function:
    """``forward`` that raises a ValueError where attention would mix packed sequences.

    ``packings`` are further arguments that pack sequences, beside ``seq_idx`` and ``cu_seqlens``.
    """
    names = [*inspect.signature(forward).parameters][1:]
    # Models of transformers 4.57 that make their masks themselves.
    ignores_positions = "create_causal_mask" not in _names(forward)

    @functools.wraps(forward)
    def on_separate_sequences(self: Any, *args: Any, **kwargs: Any) -> Any:
        packed = _packed(kwargs, packings)
        if packed is not None:
            fault = _fault(self, dict(zip(names, args, strict=False)) | kwargs, ignores_positions)
            if fault is not None:
                raise ValueError(
                    f"{class_name(self)}: expected {fault}; otherwise attention mixes the sequences that {packed} packs"
                )
        return forward(self, *args, **kwargs)

    return on_separate_sequences


def forward_that_refuses_packing(forward: Function) -> Function:
    """``forward`` that raises a NotImplementedError for packed sequences."""

    @functools.wraps(forward)
    def on_one_sequence(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (packed := _packed(kwargs)) is not None:
            name = class_name(self)
            remedy = "pass it to model.base_model" if name in _DROP_PACKING else "pad the sequences to rows of a batch"
            raise NotImplementedError(
                f"{name}: {packed} is not supported, because transformers does not pass it to the mixers: {remedy}"
            )
        return forward(self, *args, **kwargs)

    return on_one_sequence


def _packed(given: dict[str, Any], others: tuple[str, ...] = ()) -> str | None:
    return next((name for name in (*_PACKED, *others) if given.get(name) is not None), None)


def _restart(given: dict[str, Any]) -> bool:
    """Whether ``position_ids`` begin anew where a sequence does. True on CUDA, where the host would wait for the device."""
    positions, seq_idx, cu_seqlens = (given.get(name) for name in ("position_ids", *_PACKED))
    cu_seqlens = given.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens
    if torch.compiler.is_compiling() or not isinstance(positions, Tensor) or positions.device.type != "cpu":
        return True
    goes_on = positions.diff(dim=-1) == 1
    if isinstance(seq_idx, Tensor) and seq_idx.shape[-1] == positions.shape[-1]:
        return not bool((goes_on & (seq_idx.diff(dim=-1) != 0)).any())
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1:
        inside = cu_seqlens[(cu_seqlens > 0) & (cu_seqlens < positions.shape[-1])].long()
        return not bool(goes_on[..., inside - 1].any())
    return True


def _fault(model: Any, given: dict[str, Any], ignores_positions: bool) -> str | None:
    """The arguments to expect instead of these, if attention would mix packed sequences; None if it would not."""
    config, mask = model.config, given.get("attention_mask")
    types = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None)
    has_attention = types is None or any(kind not in _OTHER_LAYERS for kind in types)
    # FlashAttention separates sequences itself, and a mask of four dimensions is the caller's own.
    is_flash = "flash" in str(getattr(config, "_attn_implementation", ""))
    if not has_attention or is_flash or isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.dim() == 4):
        return None
    if ignores_positions or type(model).__name__.startswith(_IGNORE_POSITIONS):
        return 'FlashAttention (attn_implementation="flash_attention_2"), because this model\'s masks ignore position_ids'
    if given.get("position_ids") is None:
        return "position_ids that restart at 0 with each packed sequence, got none"
    if not _restart(given):
        return "position_ids that restart with each packed sequence, got some that go on"
    if mask is not None:
        return "no attention_mask, got one"
    use_cache, recomputes = given.get("use_cache"), getattr(model, "gradient_checkpointing", False) and model.training
    if use_cache is None:
        use_cache = getattr(config, "use_cache", False)
    if (use_cache and not recomputes) or any(given.get(name) is not None for name in _CACHES):
        return "use_cache=False and no cache, got one (use_cache is True by default)"
    return None
