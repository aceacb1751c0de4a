"""Folders with ``config.json`` and weights, as ``mamba_ssm``'s ``MambaLMHeadModel`` saves and loads them."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ..nn.checks import check_int
from ..ops._arguments import did_you_mean
from .config import MambaConfig
from .transformers_format import convert_config, is_transformers_config, rename_weights
from .weights import INDEXES, PICKLED, SAFE, find_weights, open_weights, read_json

__all__ = ["find_folder", "load_config", "load_model", "load_weights", "override", "parse_size", "save"]

_CONFIG, _NAME, _DISCRETIZATION = "config.json", "MambaLM.from_pretrained", "discretization_name"
# Files to fetch from the hub: weights in one file, or in shards with an index.
_PATTERNS = [_CONFIG, PICKLED, SAFE, *INDEXES, "pytorch_model-*.bin", "model-*.safetensors"]
_SHARD = re.compile(r"(pytorch_model-[0-9]{5,}-of-[0-9]{5,}\.bin|model-[0-9]{5,}-of-[0-9]{5,}\.safetensors)")


def find_folder(name: str | os.PathLike[str]) -> Path:
    """Returns an existing folder, or downloads from the Hugging Face hub into one.

    Raises:
        FileNotFoundError: there is no such folder, and ``name`` cannot be fetched.
        TypeError, ValueError: ``name`` is no path, or empty.
    """
    if not isinstance(name, str | os.PathLike) or not isinstance(text := os.fspath(name), str):
        raise TypeError(f"{_NAME}: expected folder to be a path or a name, got {type(name).__name__}")
    # Path("") is the working directory.
    if not text.strip() or "\0" in text:
        raise ValueError(f"{_NAME}: expected a folder or a name on the Hugging Face hub, got {text!r}")
    folder = Path(text)
    if folder.is_dir():
        return folder
    # A name on the hub: owner/name.
    if text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise FileNotFoundError(f"{_NAME}: no folder {text}")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise FileNotFoundError(
            f"{_NAME}: no folder {text}. To fetch it from the Hugging Face hub, pip install huggingface_hub, "
            f"or download its {_CONFIG} and {PICKLED} into a folder and give that"
        )
    hub: Any = importlib.import_module("huggingface_hub")
    return Path(hub.snapshot_download(text, allow_patterns=_PATTERNS))


def load_config(folder: Path) -> MambaConfig:
    """The configuration in a folder, of ``mamba_ssm``, of this package or of transformers.

    Raises:
        FileNotFoundError: the folder has no ``config.json``.
        ValueError: the file does not hold a configuration.
    """
    path = folder / _CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{_NAME}: no {_CONFIG} in {folder}")
    fields = read_json(path)
    try:
        return MambaConfig.from_dict(convert_config(fields) if is_transformers_config(fields) else fields)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{_NAME}: expected the configuration of a model in {path}: {error}") from None


def override(config: MambaConfig, fields: Mapping[str, Any]) -> MambaConfig:
    """``config`` with other values of some fields; ``ssm_cfg`` is replaced as a whole, and may name another mixer's layer.

    Raises:
        TypeError: a name is not a field, or a value is of another type.
        ValueError: a value is not as :class:`MambaConfig` says.
    """
    known = [field.name for field in dataclasses.fields(config)]
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise TypeError(f"{_NAME}: expected fields of MambaConfig, {known}, got {unknown[0]}{did_you_mean(unknown[0], known)}")
    return dataclasses.replace(config, **fields)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Loads the ``state_dict`` of a folder on the CPU, under the names of :class:`.mamba_lm.MambaLM`.

    Raises:
        FileNotFoundError: the folder has no weights, or a shard is missing.
        ValueError: a file is damaged or asks for more than tensors.
    """
    return {name: weight.clone() for name, weight in _map_weights(find_weights(folder))[0].items()}


def load_model(folder: Path, config: MambaConfig, make: Callable[[Any], Any], device: torch.device | str | None) -> Any:
    """Makes a model by ``make(device)`` and loads a folder's weights, after a comparison of all shapes on ``meta``.

    Raises:
        FileNotFoundError, ValueError: as :func:`load_weights`; the configuration does not make a model.
        RuntimeError: the weights do not fit the model. The model has not been allocated then.
    """
    path = find_weights(folder)
    weights, held = _map_weights(path)
    if config.tie_embeddings:
        # A file format without shared tensors holds only one of the two.
        for name, other in (("lm_head", "backbone.embedding"), ("backbone.embedding", "lm_head")):
            if f"{other}.weight" in weights:
                weights.setdefault(f"{name}.weight", weights[f"{other}.weight"])
    # A model of many layers is slow to make on meta too.
    layers = {found[1] for found in map(re.compile(r"backbone\.layers\.([0-9]+)\.").match, weights) if found}
    if len(layers) != config.n_layer:
        raise RuntimeError(f"{_NAME}: expected {config.n_layer} layers in {path}, as the configuration says, got {len(layers)}")
    try:
        with torch.device("meta"):
            shapes = make("meta")
    except (TypeError, ValueError, RuntimeError, OverflowError, MemoryError) as error:
        raise ValueError(f"{_NAME}: expected the configuration of a model in {folder / _CONFIG}: {error}") from None
    _check_fit(shapes, weights, held, path)
    model = make(device)
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise RuntimeError(f"{_NAME}: {path} does not fit: {error}") from None
    return model


def _map_weights(path: Path) -> tuple[dict[str, Tensor], int]:
    weights, held = open_weights(path)
    weights = dict(weights)
    rename_weights(weights)
    return weights, held


def _check_fit(model: nn.Module, weights: dict[str, Tensor], held: int, path: Path) -> None:
    """Compares names, shapes and sizes with those of ``model``, on meta."""
    expected = {name: value for name, value in model.state_dict().items() if not name.endswith(_DISCRETIZATION)}
    faults = []
    for name, value in weights.items():
        if name.endswith(_DISCRETIZATION):
            if value.dim() != 1 or value.numel() > 64:
                faults.append(f"expected {name} to be at most 64 bytes, got a tensor of shape {[*value.shape]}")
        elif name not in expected:
            faults.append(f"unexpected {name}")
        elif value.shape != expected[name].shape:
            sizes = f"expected {[*expected[name].shape]}, got {[*value.shape]}"
            faults.append(f"size mismatch for {name}: {sizes}")
        elif not value.is_floating_point():
            faults.append(f"expected {name} of a floating-point dtype, got {value.dtype}")
    faults += [f"missing {name}" for name in expected if name not in weights]
    if faults:
        more = f", and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise RuntimeError(f"{_NAME}: {path} does not fit the model of {_CONFIG}: {'; '.join(faults[:5])}{more}")
    # Tensors that share their storage could be larger together than the file.
    needed = sum(weights[name].numel() * weights[name].element_size() for name, _ in model.named_parameters())
    if needed > held:
        raise RuntimeError(f"{_NAME}: expected {needed} bytes of parameters in {path}, got {held} bytes")


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(name: str, argument: str, size: Any) -> int | None:
    """Bytes from None, an int, or a string as transformers takes it, such as ``"5GB"`` or ``"200MiB"``.

    Raises:
        ValueError, TypeError: it is none of these.
    """
    if size is None:
        return None
    if isinstance(size, str):
        found = re.fullmatch(r"([0-9]{1,18}) ?([KMG]I?B|)", size.upper())
        if found is None:
            raise ValueError(f"{name}: expected {argument} such as '5GB' or '200MiB', got {size!r}")
        size = int(found[1]) * _UNITS[found[2]]
    check_int(name, argument, size, expected="an int, a string such as '5GB' or None")
    return int(size)


def save(folder: Path, config: MambaConfig, max_shard_size: int | None, state_dict: dict[str, Any]) -> None:
    """Writes ``config.json`` and the weights, in shards if they are larger; makes the folder if it is missing.

    Removes other files of weights and indexes, which :func:`load_weights` would prefer to the new ones, and old shards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = _split(state_dict, max_shard_size)
    partial: dict[str, Path] = {}

    def write(name: str, content: Any) -> None:
        # Under another name until all files are whole: an interrupted save leaves the earlier one as it is.
        partial[name] = folder / f"{name}.partial"
        if isinstance(content, str):
            partial[name].write_text(content)
        else:
            torch.save(content, partial[name])

    if len(shards) == 1:
        write(PICKLED, state_dict)
    else:
        places: dict[str, str] = {}
        for i, shard in enumerate(shards, 1):
            file = f"pytorch_model-{i:05d}-of-{len(shards):05d}.bin"
            write(file, shard)
            places |= dict.fromkeys(shard, file)
        sizes = {value.data_ptr(): value.numel() * value.element_size() for value in state_dict.values()}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        write(f"{PICKLED}.index.json", json.dumps(index, indent=2) + "\n")
    write(_CONFIG, json.dumps(config.to_dict(), indent=4) + "\n")
    for name, path in partial.items():
        path.replace(folder / name)
    for path in [*folder.iterdir()]:
        if path.name not in partial and (path.name in (SAFE, PICKLED, *INDEXES) or _SHARD.fullmatch(path.name)):
            path.unlink()


def _split(state_dict: dict[str, Any], max_shard_size: int | None) -> list[dict[str, Any]]:
    """Groups of tensors of at most ``max_shard_size`` bytes, or of one tensor; tensors that share memory stay together."""
    if max_shard_size is None:
        return [state_dict]
    shards: list[dict[str, Any]] = [{}]
    size = 0
    homes: dict[int, dict[str, Any]] = {}
    for name, value in state_dict.items():
        nbytes = value.numel() * value.element_size()
        home = homes.get(value.data_ptr()) if nbytes else shards[-1]
        if home is None:
            if shards[-1] and size + nbytes > max_shard_size:
                shards.append({})
                size = 0
            home = homes[value.data_ptr()] = shards[-1]
            size += nbytes
        home[name] = value
    return shards
