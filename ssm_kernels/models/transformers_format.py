"""Checkpoints of transformers' ``MambaForCausalLM`` and ``Mamba2ForCausalLM``: their ``config.json`` and parameter names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["convert_config", "is_transformers_config", "rename_weights"]

_EMBEDDING = "backbone.embeddings.weight"


def is_transformers_config(fields: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is transformers'. Its published Mamba checkpoints have mamba_ssm's fields beside their own."""
    return "model_type" in fields or "hidden_size" in fields


def convert_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of :class:`.config.MambaConfig` for a ``config.json`` of transformers.

    Raises:
        ValueError: it is another model's, or sets what :class:`.mamba_lm.MambaLM` does not have.
    """
    kind = fields.get("model_type")
    if kind not in ("mamba", "mamba2"):
        raise ValueError(
            f"expected model_type 'mamba' or 'mamba2', got {kind!r}: ssm_kernels.integrations.transformers patches other models"
        )

    def expect(name: str, default: Any, *allowed: Any) -> None:
        if fields.get(name, default) not in allowed:
            raise ValueError(f"expected {name} {' or '.join(map(repr, allowed))}, got {fields[name]!r}")

    expect("hidden_act", "silu", "silu", "swish")
    expect("layer_norm_epsilon", 1e-5, 1e-5)
    # Defaults of transformers, which config.json may leave out.
    defaults: dict[str, Any] = {"hidden_size": 768, "num_hidden_layers": 32, "vocab_size": 50280, "state_size": 16}
    if kind == "mamba2":
        defaults = {"hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 32768, "state_size": 128}

    def get(name: str, default: Any = None) -> Any:
        return fields.get(name, defaults.get(name, default))

    ssm_cfg: dict[str, Any] = {
        "d_state": get("state_size"),
        "d_conv": get("conv_kernel", 4),
        "expand": get("expand", 2),
        "bias": get("use_bias", False),
        "conv_bias": get("use_conv_bias", True),
    }
    if kind == "mamba":
        ssm_cfg["dt_rank"] = get("time_step_rank", "auto")
    else:
        ssm_cfg |= {"headdim": get("head_dim", 64), "ngroups": get("n_groups", 8), "chunk_size": get("chunk_size", 256)}
        limit = get("time_step_limit", [0.0, math.inf])
        if not isinstance(limit, list) or len(limit) != 2:
            raise ValueError(f"expected time_step_limit to be a pair of numbers, got {limit!r}")
        ssm_cfg["dt_limit"] = tuple(map(_number, limit))
        heads, channels = get("num_heads", 128), [ssm_cfg["expand"], get("hidden_size"), ssm_cfg["headdim"]]
        if not all(isinstance(size, int) for size in (heads, *channels)) or channels[0] * channels[1] != heads * channels[2]:
            raise ValueError(f"expected num_heads * head_dim to be expand * hidden_size, got {heads} heads and {channels}")
    return {
        "mixer": "Mamba2" if kind == "mamba2" else "Mamba",
        "d_model": get("hidden_size"),
        "n_layer": get("num_hidden_layers"),
        "vocab_size": get("vocab_size"),
        "pad_vocab_size_multiple": 1,
        "residual_in_fp32": get("residual_in_fp32", True),
        "tie_embeddings": get("tie_word_embeddings", kind == "mamba"),
        "ssm_cfg": ssm_cfg,
    }


def _number(value: Any) -> Any:
    """Infinity as transformers writes it from version 5 on, ``{"__float__": "Infinity"}``; other values as they are."""
    if isinstance(value, dict) and value == {"__float__": "Infinity"}:
        return math.inf
    return value


def rename_weights(weights: dict[str, Tensor]) -> None:
    """Gives the embedding its name in :class:`.mamba_lm.MambaLM`; the other names are equal."""
    if _EMBEDDING in weights:
        weights["backbone.embedding.weight"] = weights.pop(_EMBEDDING)
