"""MambaLM's checkpoints: folders of mamba_ssm and of our own, safetensors, the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import says
from model_helpers import MIXERS, VOCABULARY, make_config, make_model, make_tokens, mamba_ssm_shapes
from torch import Tensor

from ssm_kernels.models import MambaConfig, MambaLM


def mamba_ssm_folder(
    folder: Any, config: dict[str, Any], shapes: dict[str, list[int]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """A checkpoint with random weights as mamba_ssm writes it; returns the weights."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator).mul(0.1).to(dtype) for name, shape in shapes.items()}
    weights["lm_head.weight"] = weights["backbone.embedding.weight"]
    folder.mkdir()
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config, indent=4))
    return weights


@pytest.mark.parametrize("mixer", ["Mamba", "Mamba2"])
def test_loads_checkpoints_of_mamba_ssm(mixer, tmp_path):
    layer = {"layer": "Mamba2"} if mixer == "Mamba2" else {}
    config = {"d_model": 16, "n_layer": 2, "vocab_size": VOCABULARY, "ssm_cfg": layer | MIXERS[mixer], "rms_norm": True}
    # As published: state-spaces/mamba-130m has no field beyond these, mamba2-130m has more.
    config |= {"residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 8}
    if mixer == "Mamba2":
        config |= {"d_intermediate": 0, "attn_layer_idx": [], "attn_cfg": {}, "tie_embeddings": True}
    weights = mamba_ssm_folder(tmp_path / "saved", config, mamba_ssm_shapes(make_config(mixer)), torch.float16)
    model = MambaLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert model.config == make_config(mixer) and model.lm_head.weight.dtype == torch.float32
    assert model.lm_head.weight is model.backbone.embedding.weight
    torch.testing.assert_close(
        dict(model.state_dict()), {name: value.float() for name, value in weights.items()}, rtol=0, atol=0
    )
    assert MambaLM.from_pretrained(str(tmp_path / "saved"), dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16
    # And what it saves is what mamba_ssm reads: its fields alone, its names, shared weights twice.
    model.save_pretrained(tmp_path / "new" / "folder")
    saved = json.loads((tmp_path / "new" / "folder" / "config.json").read_text())
    fields = {field.name for field in dataclasses.fields(MambaConfig)} - {"mixer", "discretization"}
    assert set(saved) == fields and {name: saved[name] for name in config} == config
    again = torch.load(tmp_path / "new" / "folder" / "pytorch_model.bin", weights_only=True)
    assert [*again] == [*mamba_ssm_shapes(model.config)]
    torch.testing.assert_close(dict(again), dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("fields", [{}, {"tie_embeddings": False, "rms_norm": False, "d_intermediate": 20}])
@pytest.mark.parametrize("mixer, discretization", [*((mixer, "zoh") for mixer in MIXERS), ("Mamba", "foh"), ("Mamba2", "rk4")])
def test_round_trip(mixer, discretization, fields, tmp_path):
    model = make_model(mixer, discretization=discretization, **fields)
    model.save_pretrained(tmp_path)
    other = MambaLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert other.config == model.config
    torch.testing.assert_close(other(make_tokens(2, 9)), model(make_tokens(2, 9)), rtol=0, atol=0)
    # The marks that optimizers look for survive.
    marks = [getattr(parameter, "_no_weight_decay", False) for parameter in model.parameters()]
    assert [getattr(parameter, "_no_weight_decay", False) for parameter in other.parameters()] == marks


def test_fields_are_replaced_on_loading(tmp_path):
    make_model("Mamba").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="expected a checkpoint of discretization 'zoh_exact'"):
        model = MambaLM.from_pretrained(tmp_path, discretization="foh")
    assert {layer.mixer.discretization for layer in model.backbone.layers} == {"foh"}


def test_safetensors(tmp_path, monkeypatch):
    """A module replaces safetensors, which is not a dependency; its files store a shared tensor once."""
    model = make_model("Mamba", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(FileNotFoundError, match=says("pip install safetensors")):
        MambaLM.from_pretrained(tmp_path)
    package, module = ModuleType("safetensors"), ModuleType("safetensors.torch")
    package.__spec__ = module.__spec__ = SimpleNamespace()

    def load_file(path):
        weights = torch.load(io.BytesIO(path.read_bytes()), weights_only=True)
        del weights["lm_head.weight"]
        return weights

    module.load_file = load_file
    monkeypatch.setitem(sys.modules, "safetensors", package)
    monkeypatch.setitem(sys.modules, "safetensors.torch", module)
    loaded = MambaLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(make_tokens(1, 4)), model(make_tokens(1, 4)), rtol=0, atol=0)


def test_hub(tmp_path, monkeypatch):
    """A module replaces huggingface_hub, which is not a dependency."""
    make_model("Mamba").save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match=says("no folder someone/mamba", "pip install huggingface_hub")):
        MambaLM.from_pretrained("someone/mamba")
    asked = []
    hub = ModuleType("huggingface_hub")
    hub.__spec__ = SimpleNamespace()
    hub.snapshot_download = lambda name, allow_patterns: asked.append((name, allow_patterns)) or str(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert MambaLM.from_pretrained("someone/mamba").config == make_config("Mamba")
    assert asked == [("someone/mamba", ["config.json", "pytorch_model.bin", "model.safetensors"])]
    for local in ("./no/such", "/no/such", "no-such-folder"):
        with pytest.raises(FileNotFoundError, match=f"no folder {local}$"):
            MambaLM.from_pretrained(local)


def test_folders_that_do_not_fit(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json in"):
        MambaLM.from_pretrained(tmp_path)
    make_model("Mamba").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for fields, words in (
        ({"hidden_size": 16, "model_type": "mamba"}, ["got ['hidden_size', 'model_type'] too", "transformers"]),
        ({"attn_layer_idx": [1]}, ["attention layers", "attn_layer_idx=[1]"]),
        ({"ssm_cfg": {"layer": "Mamba3"}}, ["unknown ssm_cfg", "'Mamba3'", "'Mamba2'"]),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        with pytest.raises(ValueError, match=says(*words)):
            MambaLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"d_model": 32}))
    with pytest.raises(RuntimeError, match="size mismatch"):
        MambaLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=says("expected an object in", "got list")):
        MambaLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=says("expected JSON in", "config.json: ")):
        MambaLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"no pytorch_model\.bin in .*$"):
        MambaLM.from_pretrained(tmp_path)
