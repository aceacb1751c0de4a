"""Folders with ``config.json`` and weights, as ``mamba_ssm``'s ``MambaLMHeadModel`` saves and loads them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import MambaConfig

__all__ = ["find_folder", "load_config", "load_weights", "save"]

_CONFIG, _WEIGHTS, _SAFE_WEIGHTS = "config.json", "pytorch_model.bin", "model.safetensors"


def find_folder(name: str | os.PathLike[str]) -> Path:
    """Returns an existing folder, or downloads from the Hugging Face hub into one.

    Raises:
        FileNotFoundError: there is no such folder, and ``name`` cannot be fetched.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    text = os.fspath(name)
    # A name on the hub: owner/name.
    if text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise FileNotFoundError(f"MambaLM.from_pretrained: no folder {text}")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise FileNotFoundError(
            f"MambaLM.from_pretrained: no folder {text}. To fetch it from the Hugging Face hub, pip install huggingface_hub, "
            f"or download its {_CONFIG} and {_WEIGHTS} into a folder and give that"
        )
    hub: Any = importlib.import_module("huggingface_hub")
    return Path(hub.snapshot_download(text, allow_patterns=[_CONFIG, _WEIGHTS, _SAFE_WEIGHTS]))


def load_config(folder: Path) -> MambaConfig:
    """The configuration in a folder.

    Raises:
        FileNotFoundError: the folder has no ``config.json``.
        ValueError: the file does not hold a configuration.
    """
    path = folder / _CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"MambaLM.from_pretrained: no {_CONFIG} in {folder}")
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"MambaLM.from_pretrained: expected JSON in {path}: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"MambaLM.from_pretrained: expected an object in {path}, got {type(fields).__name__}")
    return MambaConfig.from_dict(fields)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Loads the ``state_dict`` of a folder on the CPU: from ``model.safetensors`` if the file and the package safetensors
    exist, else from ``pytorch_model.bin``.

    Raises:
        FileNotFoundError: the folder has no weights that can be read here.
    """
    safe, pickled = folder / _SAFE_WEIGHTS, folder / _WEIGHTS
    can_read_safe = importlib.util.find_spec("safetensors") is not None
    if safe.is_file() and can_read_safe:
        return importlib.import_module("safetensors.torch").load_file(safe)
    if pickled.is_file():
        return torch.load(pickled, map_location="cpu", weights_only=True)
    hint = ": pip install safetensors to read its model.safetensors" if safe.is_file() else ""
    raise FileNotFoundError(f"MambaLM.from_pretrained: no {_WEIGHTS} in {folder}{hint}")


def save(folder: Path, config: MambaConfig, state_dict: dict[str, Any]) -> None:
    """Writes ``config.json`` and ``pytorch_model.bin``; makes the folder if it is missing.

    Removes a ``model.safetensors``, which :func:`load_weights` would prefer to the new weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _SAFE_WEIGHTS).unlink(missing_ok=True)
    torch.save(state_dict, folder / _WEIGHTS)
    (folder / _CONFIG).write_text(json.dumps(config.to_dict(), indent=4) + "\n")
