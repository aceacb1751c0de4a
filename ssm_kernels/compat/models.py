"""The language model of ``mamba_ssm`` under its names, made of :mod:`ssm_kernels.models`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..models import config as own
from ..models.checkpoints import find_folder, load_config, load_weights
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


@dataclasses.dataclass
class MambaConfig(own.MambaSsmFields):
    """The fields of ``mamba_ssm``'s configuration with its defaults. They are as given, and assignable: a model checks them.

    ``ssm_cfg["layer"]`` is ``"Mamba1"``, as without it, or ``"Mamba2"``. :class:`ssm_kernels.models.MambaConfig` documents the
    fields.
    """

    def to_dict(self) -> dict[str, Any]:
        """The fields, for a ``config.json``."""
        return dataclasses.asdict(self)


class MambaLMHeadModel(GenerationMixin, MambaLM):  # type: ignore[misc]  # generate has the arguments of mamba_ssm
    """:class:`ssm_kernels.models.MambaLM` with ``mamba_ssm``'s ``generate`` and norms, :class:`.layer_norm.RMSNorm`.

    Its ``config`` is a :class:`MambaConfig`, unless ``mamba_ssm`` has no such model.
    """

    def __init__(
        self,
        config: MambaConfig | own.MambaConfig,
        initializer_cfg: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checked = own.MambaConfig.from_dict(vars(config)) if isinstance(config, MambaConfig) else config
        super().__init__(checked, initializer_cfg, device, dtype)
        if isinstance(config, MambaConfig):
            self.config = config  # type: ignore[assignment]
        elif {field.name for field in dataclasses.fields(MambaConfig)}.issuperset(fields := config.to_dict()):
            self.config = MambaConfig(**fields)  # type: ignore[assignment]
        replace_rms_norms(self)
        for index, block in enumerate(self.backbone.layers):
            block.layer_idx = index  # type: ignore[assignment]


def load_config_hf(model_name: str) -> dict[str, Any]:
    """Fields of the ``config.json`` in a folder or on the Hugging Face hub."""
    return load_config(find_folder(model_name)).to_dict()


def load_state_dict_hf(
    model_name: str, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Weights of a folder or of the Hugging Face hub, on ``device`` and in ``dtype``."""
    return {name: weight.to(device=device, dtype=dtype) for name, weight in load_weights(find_folder(model_name)).items()}
