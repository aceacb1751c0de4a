"""MambaLM's checkpoints: folders of mamba_ssm and of our own, safetensors, the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_helpers import transformers_fields, write_safetensors, write_shards
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
    fields = {field.name for field in dataclasses.fields(MambaConfig)} - {"mixer", "discretization", "recompute"}
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


def test_recompute_in_a_checkpoint(tmp_path):
    make_model("Mamba2", recompute="all").save_pretrained(tmp_path)
    model = MambaLM.from_pretrained(tmp_path)
    assert model.config.recompute == "all" and {layer.mixer.recompute for layer in model.backbone.layers} == {"all"}
    model = MambaLM.from_pretrained(tmp_path, recompute="none")
    assert {layer.mixer.recompute for layer in model.backbone.layers} == {"none"}


def test_fields_are_replaced_on_loading(tmp_path):
    make_model("Mamba").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="expected a checkpoint of discretization 'zoh_exact'"):
        model = MambaLM.from_pretrained(tmp_path, discretization="foh")
    assert {layer.mixer.discretization for layer in model.backbone.layers} == {"foh"}


def test_safetensors(tmp_path, monkeypatch):
    """The package safetensors is not needed; its files store a shared tensor once, and parts begin at any byte."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    model = make_model("Mamba", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    weights = dict(model.state_dict())
    del weights["lm_head.weight"]
    for name in ("backbone.norm_f.weight", "backbone.layers.0.mixer.D"):
        weights[name] = weights.pop(name).bfloat16()
    write_safetensors(tmp_path / "model.safetensors", weights)
    loaded = MambaLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(make_tokens(1, 4)), model(make_tokens(1, 4)), rtol=0, atol=0)
    # Weights that were saved later take its place.
    make_model("MinGRU").save_pretrained(tmp_path)
    assert MambaLM.from_pretrained(tmp_path).config.mixer == "MinGRU"


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards(kind, tmp_path):
    model = make_model("Mamba2", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    write_shards(tmp_path, model.state_dict(), kind)
    loaded = MambaLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(make_tokens(1, 4)), model(make_tokens(1, 4)), rtol=0, atol=0)


@pytest.mark.parametrize("size", [4000, "4KB", "1"])
def test_saves_shards(size, tmp_path):
    model = make_model("Mamba", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, max_shard_size=size)
    files = sorted(path.name for path in tmp_path.glob("*.bin"))
    assert files == [f"pytorch_model-{i + 1:05d}-of-{len(files):05d}.bin" for i in range(len(files))] and len(files) > 2
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    parameters = sum(value.numel() * value.element_size() for value in model.parameters())
    assert index["metadata"]["total_size"] == parameters and {*index["weight_map"]} == {*model.state_dict()}
    # The shared weight is written once, and no shard is larger but for one tensor.
    assert index["weight_map"]["lm_head.weight"] == index["weight_map"]["backbone.embedding.weight"]
    for file in files:
        shard = torch.load(tmp_path / file, weights_only=True)
        assert sum(v.numel() * 4 for name, v in shard.items() if name != "lm_head.weight") <= 4000 or len(shard) == 1
    loaded = MambaLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(make_tokens(1, 4)), model(make_tokens(1, 4)), rtol=0, atol=0)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"of another save")
    (tmp_path / "pytorch_model-best.bin").write_bytes(b"the user's")
    model.save_pretrained(tmp_path, max_shard_size="5GiB")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "pytorch_model-best.bin", "pytorch_model.bin"]
    for bad, error in (("5 tons", ValueError), (0, ValueError), (1.5, TypeError), ("-1", ValueError)):
        with pytest.raises(error, match=says("MambaLM.save_pretrained: expected max_shard_size")):
            model.save_pretrained(tmp_path, max_shard_size=bad)


@pytest.mark.parametrize("size", [None, 4000])
def test_interrupted_save_leaves_the_earlier_one(size, tmp_path, monkeypatch):
    first, second = (make_model("Mamba", dtype=torch.float32) for _ in range(2))
    with torch.no_grad():
        second.backbone.norm_f.weight.fill_(2)
    first.save_pretrained(tmp_path, max_shard_size=size)
    save, left = torch.save, [1 if size else 0]

    def interrupted(*args: Any) -> None:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        save(*args)

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        second.save_pretrained(tmp_path, max_shard_size=size)
    for name, value in MambaLM.from_pretrained(tmp_path).state_dict().items():
        torch.testing.assert_close(value, first.state_dict()[name], rtol=0, atol=0)
    monkeypatch.undo()
    second.save_pretrained(tmp_path, max_shard_size=size)
    assert not [*tmp_path.glob("*.partial")]


def test_snapshots_of_the_hub_link_to_blobs(tmp_path):
    """The cache of huggingface_hub has snapshots of links to blobs."""
    snapshot, blobs = tmp_path / "snapshots" / "0123", tmp_path / "blobs"
    blobs.mkdir()
    model = make_model("Mamba", dtype=torch.float32)
    model.save_pretrained(snapshot)
    (snapshot / "pytorch_model.bin").unlink()
    write_shards(snapshot, model.state_dict(), "safetensors")
    for i, path in enumerate([*snapshot.iterdir()]):
        path.rename(blobs / str(i))
        path.symlink_to(f"../../blobs/{i}")
    loaded = MambaLM.from_pretrained(snapshot)
    torch.testing.assert_close(loaded(make_tokens(1, 4)), model(make_tokens(1, 4)), rtol=0, atol=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mixer", ["Mamba", "Mamba2"])
def test_checkpoints_of_transformers(mixer, tied, tmp_path):
    """Its fields and names, without transformers; tests/clients/test_transformers_checkpoints.py has its own folders."""
    model = make_model(mixer, dtype=torch.float32, tie_embeddings=tied, pad_vocab_size_multiple=1)
    weights = {name.replace("embedding.", "embeddings."): value for name, value in model.state_dict().items()}
    if tied:
        del weights["lm_head.weight"]
    fields = transformers_fields(model.config)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    write_safetensors(tmp_path / "model.safetensors", weights)
    loaded = MambaLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(make_tokens(1, 4)), model(make_tokens(1, 4)), rtol=0, atol=0)
    assert (loaded.lm_head.weight is loaded.backbone.embedding.weight) == tied
    # The saved files have this package's own format.
    loaded.save_pretrained(tmp_path)
    again = MambaLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(make_tokens(1, 4)), model(make_tokens(1, 4)), rtol=0, atol=0)
    for change, words in (
        ({"model_type": "falcon_mamba"}, "expected model_type 'mamba' or 'mamba2', got 'falcon_mamba'"),
        ({"hidden_act": "gelu"}, "expected hidden_act 'silu' or 'swish', got 'gelu'"),
        ({"layer_norm_epsilon": 1e-6}, "expected layer_norm_epsilon 1e-05, got 1e-06"),
        ({"hidden_size": "16"}, "'16'" if mixer == "Mamba2" else "expected d_model to be an int, got str"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields | change))
        with pytest.raises(ValueError, match=says("config.json", words)):
            MambaLM.from_pretrained(tmp_path)


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
    files = ["config.json", "pytorch_model.bin", "model.safetensors"]
    indexes = ["model.safetensors.index.json", "pytorch_model.bin.index.json"]
    shards = ["pytorch_model-*.bin", "model-*.safetensors"]
    assert asked == [("someone/mamba", [*files, *indexes, *shards])]
    for local in ("./no/such", "/no/such", "no-such-folder"):
        with pytest.raises(FileNotFoundError, match=f"no folder {local}$"):
            MambaLM.from_pretrained(local)


def test_folders_that_do_not_fit(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json in"):
        MambaLM.from_pretrained(tmp_path)
    make_model("Mamba").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for fields, words in (
        ({"activation": "gelu"}, ["config.json", "got ['activation'] too"]),
        ({"attn_layer_idx": [1]}, ["attention layers", "attn_layer_idx=[1]"]),
        ({"ssm_cfg": {"layer": "Mamba4"}}, ["unknown ssm_cfg", "'Mamba4'", "'Mamba2'"]),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        with pytest.raises(ValueError, match=says(*words)):
            MambaLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"d_model": 32}))
    with pytest.raises(RuntimeError, match="size mismatch"):
        MambaLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"no pytorch_model\.bin, model\.safetensors or index of shards in .*$"):
        MambaLM.from_pretrained(tmp_path)
