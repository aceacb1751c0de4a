"""Small models of every mixer, their tokens, and the parameters that mamba_ssm's models have."""

from __future__ import annotations

from typing import Any

import layer_helpers
import pytest
import torch
from torch import Tensor

from ssm_kernels.models import MambaConfig, MambaLM

MIXERS: dict[str, dict[str, Any]] = {
    "Mamba": {"d_state": 3, "dt_rank": 2},
    "Mamba2": {"d_state": 4, "headdim": 8, "ngroups": 2},
    "MinGRU": {},
    "MinLSTM": {"d_conv": 3, "expand": 1.5, "candidate_activation": "g", "bias": True},
}
every_mixer = pytest.mark.parametrize("mixer", MIXERS)
# A vocabulary of 21 tokens, padded to 24.
VOCABULARY = 21


def make_config(mixer: str, **fields: Any) -> MambaConfig:
    sizes: dict[str, Any] = {"d_model": 16, "n_layer": 2, "vocab_size": VOCABULARY, "ssm_cfg": MIXERS[mixer]}
    return MambaConfig(**sizes | {"mixer": mixer} | fields)


def make_model(mixer: str, device: str = "cpu", dtype: torch.dtype = torch.float64, **fields: Any) -> MambaLM:
    """The same model on every device; its mixers say as much as its embedding."""
    torch.manual_seed(0)
    model = MambaLM(make_config(mixer, **fields), {"initializer_range": 1.0}, dtype=dtype)
    with torch.no_grad():
        for layer in model.backbone.layers:
            layer.mixer.out_proj.weight.mul_(10)
    return model.to(device)


def make_talker(mixer: str, device: str = "cpu", dtype: torch.dtype = torch.float64) -> MambaLM:
    """A model that repeats no token for long: its head is not its embedding."""
    return make_model(mixer, device, dtype, tie_embeddings=False)


def make_tokens(*shape: int, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def mamba_ssm_shapes(config: MambaConfig) -> dict[str, list[int]]:
    """The state_dict of mamba_ssm's MambaLMHeadModel with Mamba or Mamba2 of default options but MIXERS'."""
    d, inner, rows = config.d_model, 2 * config.d_model, config.padded_vocab_size
    sizes = MIXERS[config.mixer] | ({"d_ssm": inner} if config.mixer == "Mamba2" else {})
    mixer = layer_helpers.mamba_ssm_shapes(config.mixer, d, inner, **sizes)
    block = {"norm.weight": [d]} | {f"mixer.{name}": [*shape] for name, shape in mixer.items()}
    if config.d_intermediate:
        block |= {"norm2.weight": [d], "mlp.fc1.weight": [256, d], "mlp.fc2.weight": [d, 128]}
    layers = {f"layers.{i}.{name}": shape for i in range(config.n_layer) for name, shape in block.items()}
    backbone = {"embedding.weight": [rows, d], **layers, "norm_f.weight": [d]}
    return {f"backbone.{name}": shape for name, shape in backbone.items()} | {"lm_head.weight": [rows, d]}
