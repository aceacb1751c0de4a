"""MambaLM with the layers of the delta rule: values, packed and padded batches, generation, checkpoints, initialization."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from helpers import says
from model_helpers import VOCABULARY, make_tokens
from plain_delta_layers import plain_delta_layer
from torch import Tensor

from ssm_kernels import nn
from ssm_kernels.models import MambaConfig, MambaLM

OPERATOR = "delta_rule_scan"

HEADS = {"head_dim": 4, "num_heads": 2}
MIXERS: dict[str, dict[str, Any]] = {
    "DeltaNet": {"num_heads": 2, "use_gate": True},
    "GatedDeltaNet": HEADS | {"num_v_heads": 4},
    "KimiDeltaAttention": HEADS | {"lower_bound": -5.0},
    "GatedDeltaProduct": HEADS | {"use_short_conv": False},
}
every_mixer = pytest.mark.parametrize("mixer", MIXERS)


def make_model(mixer: str, device: str = "cpu", **fields: Any) -> MambaLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "n_layer": 2, "vocab_size": VOCABULARY, "tie_embeddings": False}
    config = MambaConfig(**sizes | {"mixer": mixer, "ssm_cfg": MIXERS[mixer]} | fields)
    model = MambaLM(config, {"initializer_range": 1.0}, dtype=torch.float64)
    with torch.no_grad():
        for layer in model.backbone.layers:
            layer.mixer.o_proj.weight.mul_(10)
    return model.to(device)


def logits_of(model: MambaLM, tokens: Tensor) -> Tensor:
    backbone = model.backbone
    stream = backbone.embedding(tokens)
    for block in backbone.layers:
        stream = stream + plain_delta_layer(block.mixer, block.norm(stream))
    return model.lm_head(backbone.norm_f(stream))


@every_mixer
def test_values_and_packed_sequences(mixer, device):
    model, tokens = make_model(mixer, device), make_tokens(1, 9, device=device)
    assert type(model.backbone.layers[1].mixer) is getattr(nn, mixer)
    torch.testing.assert_close(model(tokens).logits, logits_of(model, tokens), rtol=1e-8, atol=1e-9)
    packed = model(tokens, cu_seqlens=torch.tensor([0, 4, 9], device=device)).logits
    one_by_one = torch.cat([logits_of(model, tokens[:, :4]), logits_of(model, tokens[:, 4:])], dim=1)
    torch.testing.assert_close(packed, one_by_one, rtol=1e-8, atol=1e-9)


@every_mixer
def test_generation(mixer, device):
    """Greedy tokens, of prompts of unequal lengths with padding on the left, too."""
    model, tokens = make_model(mixer, device), make_tokens(2, 5, device=device)
    generated = model.generate(tokens, max_length=9, top_k=1)
    expected = tokens
    with torch.no_grad():
        for _ in range(4):
            following = logits_of(model, expected)[:, -1, :VOCABULARY].argmax(-1, keepdim=True)
            expected = torch.cat([expected, following], dim=1)
    assert torch.equal(getattr(generated, "sequences", generated), expected)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5], device=device)
    masked = model(tokens, attention_mask=mask).logits
    torch.testing.assert_close(masked[:1, 2:], logits_of(model, tokens[:1, 2:]), rtol=1e-8, atol=1e-9)


@every_mixer
def test_saved_and_loaded(mixer, tmp_path):
    model, tokens = make_model(mixer), make_tokens(1, 4)
    model.save_pretrained(tmp_path)
    loaded = MambaLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config.mixer == mixer and loaded.config.ssm_cfg == MIXERS[mixer]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@every_mixer
def test_initial_output_projections(mixer):
    """The residual stream's variance does not grow with the number of layers."""
    torch.manual_seed(0)
    config = MambaConfig(d_model=32, n_layer=16, vocab_size=10, mixer=mixer, ssm_cfg=MIXERS[mixer])
    model = MambaLM(config, device="meta").to_empty(device="cpu")
    model.init_weights()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    for layer in model.backbone.layers:
        weight = layer.mixer.o_proj.weight
        assert 0.9 < weight.abs().max() * math.sqrt(16 * weight.shape[1]) <= 1.0001


@every_mixer
def test_in_a_block(mixer):
    make = getattr(nn, mixer)
    block = nn.Block(16, lambda size: make(hidden_size=size, layer_idx=0, **MIXERS[mixer]), functools.partial(nn.GatedMLP))
    x, residual = block(torch.randn(2, 5, 16))
    assert x.shape == residual.shape == (2, 5, 16)
    assert block.allocate_inference_cache(2, 0)[1].shape[0] == 2


@every_mixer
def test_bad_options(mixer):
    for options, error, message in (
        ({"hidden_size": 8}, ValueError, "MambaConfig: expected ssm_cfg without hidden_size"),
        ({"headdim": 8}, TypeError, f"MambaConfig: expected arguments of {mixer} in ssm_cfg"),
    ):
        with pytest.raises(error, match=says(message)):
            MambaConfig(d_model=16, mixer=mixer, ssm_cfg=options)
    with pytest.raises(ValueError, match=says(f"MambaConfig: expected no discretization with mixer '{mixer}'")):
        MambaConfig(d_model=16, mixer=mixer, discretization="foh")


@every_mixer
def test_recompute(mixer, tmp_path):
    config = MambaConfig(d_model=16, n_layer=2, vocab_size=11, mixer=mixer, ssm_cfg=MIXERS[mixer], recompute="all")
    model = MambaLM(config)
    model.save_pretrained(tmp_path)
    for each in (model, MambaLM.from_pretrained(tmp_path)):
        assert each.config.recompute == "all" and {layer.mixer.recompute for layer in each.backbone.layers} == {"all"}
    default = MambaLM(dataclasses.replace(config, recompute="cheap"))
    default.load_state_dict(model.state_dict())
    tokens = torch.tensor([[1, 2, 3]])
    results = []
    for each in (model, default):
        each(tokens).logits.sum().backward()
        results.append([parameter.grad for parameter in each.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
