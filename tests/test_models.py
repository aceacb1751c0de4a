"""MambaLM: equal to plain PyTorch and the reference operators, checkpoints of mamba_ssm, decoding, sampling, training."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import io
import itertools
import json
import math
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import helpers
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from helpers import says
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ssm_kernels import reference
from ssm_kernels.models import InferenceParams, MambaConfig, MambaLM, MixerModel, RecurrentMixer, sample

MIXERS: dict[str, dict[str, Any]] = {
    "Mamba": {"d_state": 3, "dt_rank": 2},
    "Mamba2": {"d_state": 4, "headdim": 8, "ngroups": 2},
    "MinGRU": {},
    "MinLSTM": {"d_conv": 3, "expand": 1.5, "candidate_activation": "g", "bias": True},
}
every_mixer = pytest.mark.parametrize("mixer", MIXERS)
# A vocabulary of 21 tokens, padded to 24.
VOCABULARY = 21
OPERATOR = "selective_scan"  # the devices of all the mixers' operators


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


# ----- the same model in plain PyTorch, of its parameters and the reference operators


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt() * weight


def _causal_convolution(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """And the activation; (batch, seqlen, channels)."""
    weight = p["conv1d.weight"]
    padded = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, weight, p["conv1d.bias"], groups=weight.shape[0])).transpose(1, 2)


def _reference_mamba(p: dict[str, Tensor], u: Tensor, config: MambaConfig) -> Tensor:
    x, z = F.linear(u, p["in_proj.weight"]).chunk(2, dim=-1)
    x = _causal_convolution(p, x)
    rank, dstate = p["dt_proj.weight"].shape[1], p["A_log"].shape[1]
    dt, B, C = F.linear(x, p["x_proj.weight"]).split([rank, dstate, dstate], dim=-1)
    y = reference.selective_scan(
        x.transpose(1, 2),
        F.linear(dt, p["dt_proj.weight"]).transpose(1, 2),
        -p["A_log"].exp(),
        B.transpose(1, 2),
        C.transpose(1, 2),
        p["D"],
        z.transpose(1, 2),
        p["dt_proj.bias"],
        delta_softplus=True,
        discretization=config.discretization,
    )
    return F.linear(y.transpose(1, 2), p["out_proj.weight"])


def _reference_mamba2(p: dict[str, Tensor], u: Tensor, config: MambaConfig) -> Tensor:
    heads, inner = p["A_log"].shape[0], p["norm.weight"].shape[0]
    groups = config.ssm_cfg["ngroups"]
    channels = p["conv1d.weight"].shape[0]
    z, xBC, dt = F.linear(u, p["in_proj.weight"]).split([inner, channels, heads], dim=-1)
    x, B, C = _causal_convolution(p, xBC).split([inner, (channels - inner) // 2, (channels - inner) // 2], dim=-1)
    y = reference.ssd_chunk_scan(
        x.unflatten(-1, (heads, -1)),
        dt,
        -p["A_log"].exp(),
        B.unflatten(-1, (groups, -1)),
        C.unflatten(-1, (groups, -1)),
        D=p["D"],
        dt_bias=p["dt_bias"],
        dt_softplus=True,
        discretization=config.discretization,
    )
    gated = (y.flatten(-2) * F.silu(z)).unflatten(-1, (groups, -1))
    return F.linear(_rms_norm(gated, p["norm.weight"].unflatten(0, (groups, -1))).flatten(-2), p["out_proj.weight"])


def _reference_recurrence(p: dict[str, Tensor], u: Tensor, config: MambaConfig) -> Tensor:
    inputs = F.linear(_causal_convolution(p, u), p["rnn.weight_ih_l0"], p["rnn.bias_ih_l0"])
    scan = {"MinGRU": reference.mingru_scan, "MinLSTM": reference.minlstm_scan}[config.mixer]
    inputs = inputs.unflatten(-1, (-1, p["out_proj.weight"].shape[1])).unbind(-2)
    h = scan(*inputs, candidate_activation=config.ssm_cfg.get("candidate_activation"))
    gate = F.silu(F.linear(u, p["gate_proj.weight"], p.get("gate_proj.bias")))
    return F.linear(h * gate, p["out_proj.weight"], p.get("out_proj.bias"))


REFERENCES = {
    "Mamba": _reference_mamba,
    "Mamba2": _reference_mamba2,
    "MinGRU": _reference_recurrence,
    "MinLSTM": _reference_recurrence,
}


def _within(parameters: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}


def reference_logits(parameters: dict[str, Tensor], config: MambaConfig, input_ids: Tensor) -> Tensor:
    """A model with RMSNorm and tied embeddings."""
    embedding = parameters["backbone.embedding.weight"]
    x = embedding[input_ids]
    for i in range(config.n_layer):
        p = _within(parameters, f"backbone.layers.{i}.")
        x = x + REFERENCES[config.mixer](_within(p, "mixer."), _rms_norm(x, p["norm.weight"]), config)
        if config.d_intermediate:
            value, gate = F.linear(_rms_norm(x, p["norm2.weight"]), p["mlp.fc1.weight"]).chunk(2, dim=-1)
            x = x + F.linear(value * F.silu(gate), p["mlp.fc2.weight"])
    return F.linear(_rms_norm(x, parameters["backbone.norm_f.weight"]), embedding)


@pytest.mark.parametrize("d_intermediate", [0, 20])
@every_mixer
def test_values_and_gradients(mixer, d_intermediate, device):
    model = make_model(mixer, device, d_intermediate=d_intermediate)
    tokens = make_tokens(2, 11, device=device)
    actual = model(tokens).logits
    parameters = dict(model.named_parameters())
    expected = reference_logits(parameters, model.config, tokens)
    torch.testing.assert_close(actual, expected)
    cotangent = torch.randn(actual.shape, dtype=torch.float64).to(device)
    gradients = (torch.autograd.grad(logits, [*parameters.values()], cotangent) for logits in (actual, expected))
    for name, got, wanted in zip(parameters, *gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-9, msg=lambda message, name=name: f"{name}: {message}")


@pytest.mark.parametrize("mixer, discretization", [("Mamba", "foh"), ("Mamba", "bilinear"), ("Mamba2", "foh")])
def test_discretizations(mixer, discretization):
    model, tokens = make_model(mixer, discretization=discretization), make_tokens(2, 9)
    torch.testing.assert_close(model(tokens).logits, reference_logits(dict(model.named_parameters()), model.config, tokens))
    assert not torch.allclose(model(tokens).logits, make_model(mixer)(tokens).logits)


@pytest.mark.parametrize("field", ["rms_norm", "fused_add_norm", "residual_in_fp32", "tie_embeddings"])
def test_options(field):
    """The options of the configuration reach the model."""
    model, tokens = make_model("Mamba", dtype=torch.float32, **{field: False}), make_tokens(2, 9)
    block = model.backbone.layers[0]
    is_rms = isinstance(block.norm, torch.nn.RMSNorm) and isinstance(model.backbone.norm_f, torch.nn.RMSNorm)
    is_tied = model.lm_head.weight is model.backbone.embedding.weight
    states = {"rms_norm": is_rms, "fused_add_norm": block.fused_add_norm, "residual_in_fp32": block.residual_in_fp32}
    expected = dict.fromkeys(["rms_norm", "fused_add_norm", "residual_in_fp32", "tie_embeddings"], True)
    assert states | {"tie_embeddings": is_tied} == expected | {field: False}
    model(tokens).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    if field in ("fused_add_norm", "residual_in_fp32"):
        torch.testing.assert_close(model(tokens).logits, make_model("Mamba", dtype=torch.float32)(tokens).logits)


def test_16_bit_residual_stream_in_float32():
    model = make_model("Mamba", dtype=torch.bfloat16)
    hidden_states, residual = model.backbone.layers[0](model.backbone.embedding(make_tokens(1, 3)))
    assert hidden_states.dtype == torch.bfloat16 and residual.dtype == torch.float32
    assert model(make_tokens(1, 3)).logits.dtype == torch.bfloat16


@every_mixer
def test_autocast(mixer, device):
    model, tokens = make_model(mixer, device, torch.float32), make_tokens(2, 9, device=device)
    with torch.autocast(device, torch.bfloat16):
        logits = model(tokens).logits
        generated = model.generate(tokens, max_new_tokens=3, temperature=0)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), model(tokens).logits, rtol=0.1, atol=0.5)
    logits.float().logsumexp(dim=-1).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert generated.shape == (2, 12)


# ----- what mamba_ssm has


def test_fields_and_defaults_are_those_of_mamba_ssm():
    expected = {
        "d_model": 2560,
        "d_intermediate": 0,
        "n_layer": 64,
        "vocab_size": 50277,
        "ssm_cfg": {},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
        "tie_embeddings": True,
    }
    assert dataclasses.asdict(MambaConfig()) == expected | {"mixer": "Mamba", "discretization": "zoh"}
    assert MambaConfig().to_dict() == expected
    assert [*dataclasses.asdict(MambaConfig())][:12] == [*expected]
    names = [*inspect.signature(MambaLM.forward).parameters][1:]
    assert names == ["input_ids", "position_ids", "inference_params", "num_last_tokens", "mixer_kwargs"]


def mamba_ssm_shapes(config: MambaConfig) -> dict[str, list[int]]:
    """The state_dict of mamba_ssm's MambaLMHeadModel with Mamba or Mamba2 of default options but MIXERS'."""
    d, inner, rows = config.d_model, 2 * config.d_model, config.padded_vocab_size
    cfg = MIXERS[config.mixer]
    if config.mixer == "Mamba":
        rank, state = cfg["dt_rank"], cfg["d_state"]
        mixer = {
            "A_log": [inner, state],
            "D": [inner],
            "in_proj.weight": [2 * inner, d],
            "conv1d.weight": [inner, 1, 4],
            "conv1d.bias": [inner],
            "x_proj.weight": [rank + 2 * state, inner],
            "dt_proj.weight": [inner, rank],
            "dt_proj.bias": [inner],
            "out_proj.weight": [d, inner],
        }
    else:
        heads, width = inner // cfg["headdim"], inner + 2 * cfg["ngroups"] * cfg["d_state"]
        mixer = {
            "dt_bias": [heads],
            "A_log": [heads],
            "D": [heads],
            "in_proj.weight": [inner + width + heads, d],
            "conv1d.weight": [width, 1, 4],
            "conv1d.bias": [width],
            "norm.weight": [inner],
            "out_proj.weight": [d, inner],
        }
    block = {"norm.weight": [d]} | {f"mixer.{name}": shape for name, shape in mixer.items()}
    if config.d_intermediate:
        block |= {"norm2.weight": [d], "mlp.fc1.weight": [256, d], "mlp.fc2.weight": [d, 128]}
    layers = {f"layers.{i}.{name}": shape for i in range(config.n_layer) for name, shape in block.items()}
    backbone = {"embedding.weight": [rows, d], **layers, "norm_f.weight": [d]}
    return {f"backbone.{name}": shape for name, shape in backbone.items()} | {"lm_head.weight": [rows, d]}


@pytest.mark.parametrize("d_intermediate", [0, 100])
@pytest.mark.parametrize("mixer", ["Mamba", "Mamba2"])
def test_names_and_shapes_of_parameters(mixer, d_intermediate):
    model = make_model(mixer, d_intermediate=d_intermediate)
    shapes = {name: [*value.shape] for name, value in model.state_dict().items()}
    expected = mamba_ssm_shapes(model.config)
    assert shapes == expected and [*shapes] == [*expected]


@pytest.mark.parametrize("d_intermediate, residuals", [(0, 1), (100, 2)])
def test_initialization(d_intermediate, residuals):
    torch.manual_seed(0)
    sizes = {"d_model": 64, "n_layer": 9, "vocab_size": 1000, "d_intermediate": d_intermediate}
    model = MambaLM(MambaConfig(**sizes, ssm_cfg={"bias": True}))
    embedding = model.backbone.embedding.weight
    assert model.lm_head.weight is embedding
    assert embedding.std().item() == pytest.approx(0.02, rel=0.02) and abs(embedding.mean().item()) < 1e-3
    for layer in model.backbone.layers:
        projections = [layer.mixer.out_proj] + ([layer.mlp.fc2] if d_intermediate else [])
        for projection in projections:
            # Uniform up to 1 / sqrt(inputs), as nn.Linear's own, and then divided.
            bound = projection.in_features**-0.5 / math.sqrt(9 * residuals)
            assert bound > projection.weight.max().item() > 0.99 * bound
        assert layer.mixer.in_proj.weight.max().item() > 0.99 * 64**-0.5
        assert not layer.mixer.in_proj.bias.any() and not layer.mixer.out_proj.bias.any()
        # The bias of the step sizes stays as the mixer drew it.
        dt = F.softplus(layer.mixer.dt_proj.bias)
        assert dt.min() >= 0.999e-4 and dt.max() <= 0.1001 and dt.std() > 0.01
    model = MambaLM(MambaConfig(**sizes), {"initializer_range": 0.5, "rescale_prenorm_residual": False})
    assert model.backbone.embedding.weight.std().item() == pytest.approx(0.5, rel=0.02)
    assert model.backbone.layers[0].mixer.out_proj.weight.max().item() > 0.99 * 128**-0.5


@pytest.mark.parametrize("rnn, between", [("MinGRU", (0, 1)), ("MinLSTM", (1, 2))])
def test_gate_that_lets_the_candidate_in_starts_closed(rnn, between):
    torch.manual_seed(0)
    mixer = RecurrentMixer(64, rnn)
    parts = mixer.rnn.bias_ih_l0.unflatten(0, (-1, 128))
    for part, bias in enumerate(parts):
        if part == between[0]:
            assert -4 <= bias.min() < -3.5 and -0.5 < bias.max() <= 0
        else:
            assert bias.abs().max() <= 128**-0.5


# ----- checkpoints


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
    with pytest.warns(UserWarning, match="expected a checkpoint of discretization 'foh'"):
        model = MambaLM.from_pretrained(tmp_path, discretization="foh")
    assert {layer.mixer.discretization for layer in model.backbone.layers} == {"foh"}


def test_safetensors(tmp_path, monkeypatch):
    """A module in the place of safetensors, which is no dependency; its files have a shared tensor once."""
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
    """A module in the place of huggingface_hub, which is no dependency."""
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


# ----- decoding


@pytest.mark.parametrize("d_intermediate", [0, 20])
@every_mixer
def test_steps_and_pieces_are_the_whole_sequence(mixer, d_intermediate, device):
    model, tokens = make_model(mixer, device, d_intermediate=d_intermediate), make_tokens(2, 9, device=device)
    whole = model(tokens).logits
    for bounds in (range(10), (0, 4, 7, 8, 9)):
        params = InferenceParams(max_seqlen=9, max_batch_size=2)
        with torch.no_grad():
            for begin, end in itertools.pairwise(bounds):
                params.seqlen_offset = begin
                logits = model(tokens[:, begin:end], inference_params=params).logits
                torch.testing.assert_close(logits, whole[:, begin:end])
        assert [*params.key_value_memory_dict] == [0, 1]


@every_mixer
def test_cache_is_the_one_that_was_allocated(mixer):
    """States keep their addresses, as CUDA graphs need."""
    model = make_model(mixer)
    cache = model.allocate_inference_cache(2, 9)
    addresses = {i: [state.data_ptr() for state in states] for i, states in cache.items()}
    params = InferenceParams(9, 2, key_value_memory_dict=cache)
    with torch.no_grad():
        for offset, seqlen in ((0, 4), (4, 1), (0, 2)):
            params.seqlen_offset = offset
            model(make_tokens(2, seqlen), inference_params=params)
    assert {i: [state.data_ptr() for state in states] for i, states in cache.items()} == addresses


def test_logits_of_the_last_tokens():
    model, tokens = make_model("Mamba"), make_tokens(2, 9)
    whole = model(tokens).logits
    assert whole.shape == (2, 9, 24)
    torch.testing.assert_close(model(tokens, num_last_tokens=3).logits, whole[:, -3:])
    torch.testing.assert_close(model(tokens, torch.arange(9)).logits, whole, rtol=0, atol=0)
    torch.testing.assert_close(model(tokens.int()).logits, whole, rtol=0, atol=0)
    backbone = MixerModel(model.config, dtype=torch.float64)
    backbone.load_state_dict(_within(model.state_dict(), "backbone."))
    torch.testing.assert_close(F.linear(backbone(tokens), model.lm_head.weight), whole)


@pytest.mark.parametrize("mixer", ["Mamba2", "MinGRU", "MinLSTM"])
def test_packed_sequences_are_one_by_one(mixer, device):
    model, tokens = make_model(mixer, device), make_tokens(1, 9, device=device)
    packed = model(tokens, cu_seqlens=torch.tensor([0, 4, 4, 9], device=device)).logits
    single = torch.cat([model(tokens[:, :4]).logits, model(tokens[:, 4:]).logits], dim=1)
    torch.testing.assert_close(packed, single)
    parameters = [*model.parameters()]
    gradients = (torch.autograd.grad(logits.square().sum(), parameters) for logits in (packed, single))
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-9)


def greedy(model: MambaLM, tokens: Tensor, steps: int) -> Tensor:
    """By a full forward pass for every token."""
    for _ in range(steps):
        logits = model(tokens).logits[:, -1, : model.config.vocab_size]
        tokens = torch.cat([tokens, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return tokens


@pytest.mark.parametrize("prompt", [1, 5])
@every_mixer
def test_greedy_generation(mixer, prompt, device):
    model, tokens = make_talker(mixer, device), make_tokens(2, prompt, device=device)
    expected = greedy(model, tokens, 12)
    assert expected[:, prompt:].unique().numel() > 3
    for options in ({"top_k": 1}, {"temperature": 0}, {"temperature": 0.0, "top_p": 0.5, "cg": False}):
        actual = model.generate(tokens, max_new_tokens=12, **options)
        assert actual.dtype == tokens.dtype and torch.equal(actual, expected)
    assert torch.equal(model.generate(tokens.int(), prompt + 3, top_k=1), expected[:, : prompt + 3].int())
    assert torch.equal(model.generate(tokens, max_new_tokens=0), tokens)


def test_sequences_of_a_batch_do_not_meet():
    model, tokens = make_talker("Mamba"), make_tokens(3, 4)
    together = model.generate(tokens, 10, temperature=0)
    for row, alone in zip(together, tokens, strict=True):
        assert torch.equal(model.generate(alone[None], 10, temperature=0)[0], row)


@every_mixer
def test_equal_generators_give_equal_tokens(mixer, device):
    model, tokens = make_model(mixer, device), make_tokens(2, 4, device=device)

    def draw(seed: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return model.generate(tokens, max_new_tokens=20, temperature=3.0, top_k=15, top_p=0.95, generator=generator)

    assert torch.equal(draw(0), draw(0)) and not torch.equal(draw(0), draw(1))
    torch.manual_seed(5)
    first = model.generate(tokens, max_new_tokens=20, temperature=3.0)
    torch.manual_seed(5)
    assert torch.equal(model.generate(tokens, max_new_tokens=20, temperature=3.0), first)


def test_rows_that_pad_the_vocabulary_are_never_drawn():
    model = make_model("Mamba", pad_vocab_size_multiple=2000)
    assert model.lm_head.weight.shape == (2000, 16)
    drawn = model.generate(make_tokens(4, 1), max_new_tokens=50, temperature=100.0)
    assert drawn.max() < VOCABULARY and drawn.unique().numel() == VOCABULARY


@pytest.mark.parametrize("streamed", [False, True])
def test_end_of_sequence(streamed, device):
    model, tokens = make_talker("MinGRU", device), make_tokens(2, 3, device=device)
    free = greedy(model, tokens, 30)
    for eos in range(VOCABULARY):
        lengths = [(row == eos).nonzero()[:1].flatten().tolist() for row in free[:, 3:]]
        steps = max(ends[0] + 1 if ends else 30 for ends in lengths)
        expected = free[:, : 3 + steps].clone()
        for row, ends in zip(expected, lengths, strict=True):
            if ends:
                row[3 + ends[0] :] = eos
        streamer = Stream() if streamed else None
        actual = model.generate(tokens, max_new_tokens=30, temperature=0, eos_token_id=eos, streamer=streamer)
        assert torch.equal(actual, expected), eos
        if streamer is not None:
            assert torch.equal(streamer.tokens(), expected.cpu()) and streamer.ended == 1


class Stream:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu" and not self.ended
        self.pieces.append(value)

    def end(self) -> None:
        self.ended += 1

    def tokens(self) -> Tensor:
        prompt, *steps = self.pieces
        return torch.cat([prompt, *(step[:, None] for step in steps)], dim=1)


def test_nothing_has_a_gradient():
    model, tokens = make_model("Mamba"), make_tokens(1, 3)
    assert not model.generate(tokens, 5).requires_grad
    # Tokens can be trained on.
    model(model.generate(tokens, 5)).logits.sum().backward()


def test_inference_mode(device):
    """A graph that is kept from inference mode is used outside of it too."""
    model, tokens = make_talker("Mamba", device), make_tokens(2, 3, device=device)
    with torch.inference_mode():
        inside = model.generate(tokens, 9, temperature=0)
    assert torch.equal(model.generate(tokens, 9, temperature=0), inside)
    with torch.inference_mode():
        assert torch.equal(model.generate(tokens, 9, temperature=0), inside)


# ----- CUDA graphs


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_mixer
def test_graph_does_what_steps_do(mixer, dtype):
    """Twice, of which the second replays the first's graph, on another prompt, without waiting for the device."""
    model = make_talker(mixer, "cuda", dtype)
    generate = functools.partial(model.generate, max_new_tokens=12, temperature=2.0, top_k=10, top_p=0.9)
    for seed in range(2):
        tokens = make_tokens(2, 4 + seed, device="cuda", seed=seed)
        plain, replayed = (torch.Generator("cuda").manual_seed(seed) for _ in range(2))
        expected = generate(tokens, cg=False, generator=plain)
        if seed == 0:
            assert model._graphed is None
            actual = generate(tokens, generator=replayed)
            graphed = model._graphed
        else:
            with helpers.no_synchronization():
                actual = generate(tokens, cg=True, generator=replayed)
            assert model._graphed is graphed
        assert torch.equal(actual, expected)


@pytest.mark.cuda
def test_graph_follows_the_parameters():
    model, tokens = make_talker("Mamba", "cuda", torch.float32), make_tokens(2, 4, device="cuda")
    model.generate(tokens, 8, temperature=0)
    graphed = model._graphed
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(model.generate(tokens, 20, temperature=0), greedy(model, tokens, 16))
    assert model._graphed is graphed
    with torch.no_grad():
        model.backbone.norm_f.weight = torch.nn.Parameter(-model.backbone.norm_f.weight)
    assert torch.equal(model.generate(tokens, 20, temperature=0), greedy(model, tokens, 16))
    assert model._graphed is not graphed
    assert torch.equal(model.generate(tokens[:1], 20, temperature=0), greedy(model, tokens[:1], 16))
    with torch.autocast("cuda", torch.bfloat16):
        actual = model.generate(tokens, 20, temperature=0)
        assert torch.equal(actual, model.generate(tokens, 20, temperature=0, cg=False))
    model.clear_graph()
    assert model._graphed is None


def test_models_with_a_graph_are_copied_and_pickled_without_it():
    model = make_model("Mamba")
    model._graphed = lambda: None  # cannot be pickled, as a graph
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other._graphed is None and model._graphed is not None
        assert other.lm_head.weight is other.backbone.embedding.weight
        torch.testing.assert_close(other(make_tokens(1, 3)), model(make_tokens(1, 3)), rtol=0, atol=0)


# ----- sampling


def draw(logits: Tensor, count: int = 40_000, **options: Any) -> Tensor:
    """How often each token is drawn."""
    generator = torch.Generator(logits.device).manual_seed(0)
    tokens = sample(logits.expand(count, -1), **options, generator=generator)
    return tokens.bincount(minlength=logits.shape[-1]).double() / count


def expected_frequencies(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 0.0) -> Tensor:
    """The definition, a token at a time."""
    p = (logits.double() / temperature).softmax(dim=-1)
    order = sorted(range(len(p)), key=lambda token: -p[token])
    kept = order[:top_k] if top_k else order
    total, mass, nucleus = sum(p[token].item() for token in kept), 0.0, []
    for token in kept:
        if nucleus and 0 < top_p < 1 and mass >= top_p:
            break
        nucleus.append(token)
        mass += p[token].item() / total
    frequencies = torch.zeros_like(p)
    frequencies[nucleus] = p[nucleus] / p[nucleus].sum()
    return frequencies


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_k": 100},
        {"top_p": 0.6},
        {"top_p": 1.0},
        {"top_p": 1e-6},
        {"temperature": 1.7, "top_k": 8, "top_p": 0.8},
    ],
)
def test_distribution_of_samples(options, device):
    logits = 1.5 * torch.randn(30, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    actual, expected = draw(logits.to(device), **options).cpu(), expected_frequencies(logits, **options)
    assert not actual[expected == 0].any()
    # Five standard deviations of a frequency in 40 000 draws.
    assert ((actual - expected).abs() <= 5 * (expected * (1 - expected) / 40_000).sqrt()).all()


def test_samples_of_extreme_logits(device):
    logits = torch.tensor([[-torch.inf, 3e38, -3e38, 0.0]], device=device)
    for options in ({}, {"top_p": 0.5}, {"top_k": 3}, {"top_k": 2, "top_p": 0.9}, {"temperature": 0}):
        assert draw(logits, 100, **options).tolist() == [0, 1, 0, 0]
    cold = torch.tensor([[1.0, 9.0, 3.0, 8.0]], device=device)
    assert draw(cold, 100, temperature=1e-30).tolist() == draw(cold, 100, temperature=1e-44).tolist() == [0, 1, 0, 0]
    half = torch.tensor([[6e4, 6e4, -6e4]], dtype=torch.float16, device=device)
    assert draw(half, 1000, temperature=0.5)[:2].min() > 0.4


@pytest.mark.parametrize(
    "options, words",
    [
        ({"temperature": -1.0}, "expected temperature to be finite and not negative, got -1.0"),
        ({"top_k": -1}, "expected top_k to be at least 0, got -1"),
        ({"top_p": 1.5}, "expected top_p from 0 to 1, got 1.5"),
    ],
)
def test_bad_sampling(options, words):
    for name, call in (
        ("sample", lambda: sample(torch.zeros(1, 3), **options)),
        ("MambaLM.generate", lambda: generate(**options)),
    ):
        with pytest.raises(ValueError, match=says(f"{name}: {words}")):
            call()


def generate(**options: Any) -> Tensor:
    return make_model("Mamba").generate(make_tokens(1, 3), 4, **options)


def test_bad_generation():
    model, tokens = make_model("Mamba"), make_tokens(2, 3)
    for options, given in (({}, "neither"), ({"max_length": 5, "max_new_tokens": 2}, "both")):
        with pytest.raises(ValueError, match=f"expected max_length or max_new_tokens, got {given}"):
            model.generate(tokens, **options)
    for options, words in (
        ({"max_length": 2}, "expected max_length to be at least 3, got 2"),
        ({"max_new_tokens": -1}, "expected max_new_tokens to be at least 0, got -1"),
        ({"max_length": 4, "eos_token_id": VOCABULARY}, "expected eos_token_id below vocab_size = 21, got 21"),
        ({"max_length": 4, "cg": True}, "expected input_ids on a CUDA device with cg=True, got cpu"),
    ):
        with pytest.raises(ValueError, match=says(f"MambaLM.generate: {words}")):
            model.generate(tokens, **options)
    for bad in (tokens[:, :0], tokens[:0]):
        with pytest.raises(ValueError, match=says("a prompt of at least one token", f"{[*bad.shape]}")):
            model.generate(bad, 4)
    with pytest.raises(TypeError, match=says("generator to be a torch.Generator or None, got int")):
        model.generate(tokens, 4, generator=0)
    for name, call in (("MambaLM", model), ("MambaLM.generate", lambda ids: model.generate(ids, 9))):
        with pytest.raises(TypeError, match=says(f"{name}: expected input_ids of dtype int32 or int64, got torch.float32")):
            call(tokens.float())
        with pytest.raises(ValueError, match=says(f"{name}: expected input_ids of shape (batch, seqlen), got [3]")):
            call(tokens[0])
        with pytest.raises(TypeError, match=says(f"{name}: expected input_ids to be a tensor, got list")):
            call([1, 2])


@pytest.mark.parametrize(
    "fields, error, words",
    [
        ({"d_model": 0}, ValueError, "expected d_model to be at least 1, got 0"),
        ({"n_layer": 1.0}, TypeError, "expected n_layer to be an int, got float"),
        ({"rms_norm": 1}, TypeError, "expected rms_norm to be a bool, got int"),
        ({"ssm_cfg": [1]}, TypeError, "expected ssm_cfg to be a dict, got list"),
        ({"attn_layer_idx": [3]}, ValueError, "expected no attention layers"),
        ({"attn_cfg": {"num_heads": 3}}, ValueError, "expected no attention layers"),
        ({"mixer": "LSTM"}, ValueError, "unknown mixer 'LSTM', expected one of ['Mamba', 'Mamba2', 'MinGRU', 'MinLSTM']"),
        ({"mixer": "Mamba", "ssm_cfg": {"layer": "Mamba2"}}, ValueError, "expected one mixer, got mixer='Mamba'"),
        ({"discretization": "tustin"}, ValueError, "unknown discretization 'tustin'"),
        ({"discretization": "foh", "mixer": "MinGRU"}, ValueError, "expected no discretization with mixer 'MinGRU'"),
        ({"ssm_cfg": {"discretization": "foh"}}, ValueError, "MambaConfig(discretization=...)"),
    ],
)
def test_bad_configurations(fields, error, words):
    with pytest.raises(error, match=says(f"MambaConfig: {words}" if words[0] != "M" else words)):
        MambaConfig(**fields)


def test_configurations_leave_their_arguments_alone():
    ssm_cfg = {"layer": "Mamba2", "d_state": 8}
    config = MambaConfig(ssm_cfg=ssm_cfg)
    assert config.mixer == "Mamba2" and config.ssm_cfg == {"d_state": 8} and len(ssm_cfg) == 2
    assert config.to_dict()["ssm_cfg"] == ssm_cfg
    assert MambaConfig.from_dict(config.to_dict()) == config == dataclasses.replace(config)
    with pytest.raises(ValueError, match=says("discretization 'bilinear' is not supported")):
        MambaLM(make_config("Mamba2", discretization="bilinear"))
    with pytest.raises(TypeError, match="MambaLM: expected config to be a MambaConfig, got dict"):
        MambaLM({})


@pytest.mark.parametrize("rnn", ["MinGRU", "MinLSTM"])
def test_bad_calls_of_the_recurrent_mixer(rnn):
    mixer = RecurrentMixer(4, rnn)
    with pytest.raises(ValueError, match=says("RecurrentMixer: expected hidden_states of shape (batch, seqlen, d_model)")):
        mixer(torch.zeros(2, 3, 5))
    conv_state, state = mixer.allocate_inference_cache(2, 0)
    with pytest.raises(ValueError, match=says("RecurrentMixer.step: expected hidden_states", "got [2, 2, 4]")):
        mixer.step(torch.zeros(2, 2, 4), conv_state, state)
    with pytest.raises(ValueError, match=says("RecurrentMixer.step: expected ssm_state of shape (batch, d_inner) = [2, 8]")):
        mixer.step(torch.ones(2, 1, 4), conv_state, state[:1])
    assert not conv_state.any()
    with pytest.raises(ValueError, match=says("RecurrentMixer: expected no inference_params with cu_seqlens")):
        mixer(torch.zeros(1, 3, 4), InferenceParams(3, 1), torch.tensor([0, 3]))
    with pytest.raises(TypeError, match=says("RecurrentMixer: expected cu_seqlens to be a tensor, got list")):
        mixer(torch.zeros(1, 3, 4), cu_seqlens=[0, 3])
    with pytest.raises(ValueError, match="inference_params needs a layer_idx"):
        mixer(torch.zeros(2, 3, 4), InferenceParams(3, 2))
    for arguments, words in (
        ({"rnn": "GRU"}, "unknown rnn 'GRU'"),
        ({"expand": 0}, "expected expand"),
        ({"d_conv": 0}, "d_conv"),
    ):
        with pytest.raises(ValueError, match=says(f"RecurrentMixer: {words}" if words != "d_conv" else words)):
            RecurrentMixer(4, **arguments)


# ----- training


def real_text() -> Tensor:
    """Bytes of this repository's license."""
    return torch.tensor([*(Path(__file__).parents[1] / "LICENSE").read_bytes()])


@every_mixer
def test_trains_as_the_model_of_reference_operators(mixer):
    """On real text, in float32, from the same parameters: the losses of every step are equal, and fall."""
    text = real_text()
    torch.manual_seed(0)
    model = MambaLM(MambaConfig(d_model=32, n_layer=2, vocab_size=128, mixer=mixer, ssm_cfg=MIXERS[mixer]))
    parameters = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    losses: dict[str, list[float]] = {"ours": [], "reference": []}
    calls = {
        "ours": (lambda ids: model(ids).logits, model.parameters()),
        "reference": (lambda ids: reference_logits(parameters, model.config, ids), parameters.values()),
    }
    for name, (call, leaves) in calls.items():
        optimizer = torch.optim.Adam(leaves, lr=1e-2)
        for step in range(12):
            starts = torch.randint(len(text) - 33, (4,), generator=torch.Generator().manual_seed(step))
            batch = text[starts[:, None] + torch.arange(33)]
            loss = F.cross_entropy(call(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    assert losses["ours"] == pytest.approx(losses["reference"], rel=1e-4)
    assert losses["ours"][0] == pytest.approx(math.log(128), abs=0.1)
    assert losses["ours"][-1] < losses["ours"][0] - 1.2


@every_mixer
def test_gradients_reach_every_parameter(mixer):
    model = make_model(mixer, d_intermediate=20)
    model(make_tokens(2, 9)).logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name


@every_mixer
def test_checkpointed_blocks(mixer):
    """torch.utils.checkpoint computes every block again in backward."""
    model, tokens = make_model(mixer, d_intermediate=20), make_tokens(2, 9)
    parameters = [*model.parameters()]
    expected = torch.autograd.grad(model(tokens).logits.square().sum(), parameters)
    calls = []
    for layer in model.backbone.layers:
        layer.mixer.register_forward_hook(lambda *_: calls.append(None))
        layer.forward = functools.partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)
    actual = torch.autograd.grad(model(tokens).logits.square().sum(), parameters)
    assert len(calls) == 4
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


# ----- torch.compile and torch.export


@pytest.mark.slow
def test_compiles_once_for_all_lengths(device):
    """With one mixer: those of the others are compiled in the tests of their layers."""
    model = make_model("MinGRU", device, d_intermediate=20, n_layer=1)
    parameters = [*model.parameters()]
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for seqlen in (9, 5, 64):
        tokens = make_tokens(2, seqlen, device=device)
        actual, expected = compiled(tokens).logits, model(tokens).logits
        torch.testing.assert_close(actual, expected)
        gradients = (torch.autograd.grad(logits.square().sum(), parameters) for logits in (actual, expected))
        for got, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-9)
        graphs.append(counter.frame_count)
    # The first call may be traced twice, as a module's float is a variable before it is found to be a constant.
    assert graphs[0] == graphs[-1] <= 2


@pytest.mark.slow
@every_mixer
def test_exports(mixer):
    model = make_model(mixer, d_intermediate=20)
    sizes = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("seqlen")}}
    program = torch.export.export(model, (make_tokens(2, 9),), dynamic_shapes=sizes)
    for shape in ((2, 9), (3, 17)):
        torch.testing.assert_close(program.module()(make_tokens(*shape)).logits, model(make_tokens(*shape)).logits)
