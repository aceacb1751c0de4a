"""Checkpoint files for the tests: safetensors written by the format's description, shards, transformers' folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}


def safetensors_bytes(header: dict[str, Any], data: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def write_safetensors(path: Path, weights: dict[str, Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, weight in weights.items():
        part = weight.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(part)]
        header[name] = {"dtype": DTYPES[weight.dtype], "shape": [*weight.shape], "data_offsets": offsets}
        data += part
    path.write_bytes(safetensors_bytes(header, data))


def write_shards(folder: Path, weights: dict[str, Tensor], kind: str, shards: int = 3) -> dict[str, str]:
    """Writes weights in shards with an index, in either format; returns the index's map."""
    stem, suffix = ("model", ".safetensors") if kind == "safetensors" else ("pytorch_model", ".bin")
    places: dict[str, str] = {}
    for i in range(shards):
        shard = f"{stem}-{i + 1:05d}-of-{shards:05d}{suffix}"
        part = {name: weight.clone() for name, weight in [*weights.items()][i::shards]}
        places |= dict.fromkeys(part, shard)
        if kind == "safetensors":
            write_safetensors(folder / shard, part)
        else:
            torch.save(part, folder / shard)
    write_index(folder, kind, places)
    return places


def write_index(folder: Path, kind: str, places: Any) -> None:
    name = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))


def transformers_fields(config: Any) -> dict[str, Any]:
    """The ``config.json`` that transformers writes for a model of Mamba or Mamba-2, in the names of its version 5."""
    ssm = config.ssm_cfg
    fields = {
        "architectures": ["MambaForCausalLM"],
        "model_type": config.mixer.lower(),
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layer,
        "vocab_size": config.vocab_size,
        "state_size": ssm["d_state"],
        "tie_word_embeddings": config.tie_embeddings,
        "transformers_version": "5.0.0",
    }
    if config.mixer == "Mamba":
        return fields | {"time_step_rank": ssm["dt_rank"]}
    heads = 2 * config.d_model // ssm["headdim"]
    limit = [0.0, {"__float__": "Infinity"}]
    return fields | {"num_heads": heads, "head_dim": ssm["headdim"], "n_groups": ssm["ngroups"], "time_step_limit": limit}
