"""The language model of ``mamba_ssm`` under its names, made of :mod:`ssm_kernels.models`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..models.checkpoints import find_folder, load_config, load_weights
from ..models.config import MambaConfig
from ..models.mamba_lm import MambaLM
from .generation import GenerateOutput, GenerationMixin, InferenceParams
from .layer_norm import replace_rms_norms

__all__ = [
    "GenerateOutput",
    "GenerationMixin",
    "InferenceParams",
    "MambaConfig",
    "MambaLMHeadModel",
    "load_config_hf",
    "load_state_dict_hf",
]


class MambaLMHeadModel(GenerationMixin, MambaLM):  # type: ignore[misc]  # generate has the arguments of mamba_ssm
    """:class:`ssm_kernels.models.MambaLM` with ``mamba_ssm``'s ``generate`` and norms, :class:`.layer_norm.RMSNorm`."""

    def __init__(
        self,
        config: MambaConfig,
        initializer_cfg: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, initializer_cfg, device, dtype)
        replace_rms_norms(self)


def load_config_hf(model_name: str) -> dict[str, Any]:
    """Fields of the ``config.json`` in a folder or on the Hugging Face hub."""
    return load_config(find_folder(model_name)).to_dict()


def load_state_dict_hf(
    model_name: str, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Weights of a folder or of the Hugging Face hub, on ``device`` and in ``dtype``."""
    return {name: weight.to(device=device, dtype=dtype) for name, weight in load_weights(find_folder(model_name)).items()}
