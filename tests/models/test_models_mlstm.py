"""MambaLM with xLSTM's layer: values, packed and padded batches, generation, checkpoints, initialization."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import says
from model_helpers import VOCABULARY, make_tokens
from plain_mlstm import plain_mlstm
from torch import Tensor

from ssm_kernels import nn
from ssm_kernels.models import MambaConfig, MambaLM

OPERATOR = "mlstm_scan"

OPTIONS = [{"num_heads": 2}, {"num_heads": 2, "weight_mode": "fused", "use_bias": True}]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=["single", "fused"])


def make_model(options: dict[str, Any], device: str = "cpu", **fields: Any) -> MambaLM:
    """Its gates depend on tokens and are not closed."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "n_layer": 2, "vocab_size": VOCABULARY, "tie_embeddings": False}
    config = MambaConfig(**sizes | {"mixer": "MLSTM", "ssm_cfg": options} | fields)
    model = MambaLM(config, {"initializer_range": 1.0}, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate_preact" in name:
                parameter.copy_(torch.randn_like(parameter))
        for layer in model.backbone.layers:
            layer.mixer.out_proj.weight.mul_(10)
    return model.to(device)


def logits_of(model: MambaLM, tokens: Tensor) -> Tensor:
    backbone = model.backbone
    stream = backbone.embedding(tokens)
    for block in backbone.layers:
        stream = stream + plain_mlstm(block.mixer, block.norm(stream))
    return model.lm_head(backbone.norm_f(stream))


@every_option
def test_values_and_packed_sequences(options, device):
    model, tokens = make_model(options, device), make_tokens(1, 9, device=device)
    assert type(model.backbone.layers[1].mixer) is nn.MLSTM
    torch.testing.assert_close(model(tokens).logits, logits_of(model, tokens), rtol=1e-8, atol=1e-9)
    packed = model(tokens, cu_seqlens=torch.tensor([0, 4, 9], device=device)).logits
    one_by_one = torch.cat([logits_of(model, tokens[:, :4]), logits_of(model, tokens[:, 4:])], dim=1)
    torch.testing.assert_close(packed, one_by_one, rtol=1e-8, atol=1e-9)


@every_option
def test_generation(options, device):
    """Greedy tokens, and of prompts of unequal lengths with padding on the left."""
    model, tokens = make_model(options, device), make_tokens(2, 5, device=device)
    generated = model.generate(tokens, max_length=9, top_k=1)
    expected = tokens
    with torch.no_grad():
        for _ in range(4):
            following = logits_of(model, expected)[:, -1, :VOCABULARY].argmax(-1, keepdim=True)
            expected = torch.cat([expected, following], dim=1)
    assert torch.equal(generated, expected)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5], device=device)
    masked = model(tokens, attention_mask=mask).logits
    torch.testing.assert_close(masked[:1, 2:], logits_of(model, tokens[:1, 2:]), rtol=1e-8, atol=1e-9)
    padded = model.generate(tokens, max_length=9, top_k=1, attention_mask=mask)
    assert torch.equal(padded[:1, 5:], model.generate(tokens[:1, 2:], max_length=7, top_k=1)[:, 3:])


@every_option
def test_saved_and_loaded(options, tmp_path):
    model, tokens = make_model(options), make_tokens(1, 4)
    model.save_pretrained(tmp_path)
    loaded = MambaLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config.mixer == "MLSTM" and loaded.config.ssm_cfg == options
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@every_option
def test_initial_values(options):
    """The gates keep their biases, and the residual stream's variance does not grow with the number of layers."""
    config = MambaConfig(d_model=32, n_layer=16, vocab_size=10, mixer="MLSTM", ssm_cfg=options)
    made = MambaLM(config)
    empty = MambaLM(config, device="meta").to_empty(device="cpu")
    empty.init_weights()
    for model in (made, empty):
        for layer in model.backbone.layers:
            mixer, weight = layer.mixer, layer.mixer.out_proj.weight
            gates = (mixer.ifgate_preact,) if mixer.weight_mode == "fused" else (mixer.igate_preact, mixer.fgate_preact)
            assert torch.equal(torch.cat([gate.bias for gate in gates]), torch.tensor([-10.0, -10.0, 3.0, 6.0]))
            assert not any(gate.weight.any() for gate in gates)
            assert 0.9 < weight.abs().max() * math.sqrt(16 * weight.shape[1]) <= 1.0001


def test_bad_options():
    for options, error, message in (
        ({"embedding_dim": 8}, ValueError, "MambaConfig: expected ssm_cfg without embedding_dim"),
        ({"head_dim": 8}, TypeError, "MambaConfig: expected arguments of MLSTM in ssm_cfg"),
    ):
        with pytest.raises(error, match=says(message)):
            MambaConfig(d_model=16, mixer="MLSTM", ssm_cfg=options)
    with pytest.raises(ValueError, match=says("MambaConfig: expected no recompute with mixer 'MLSTM'")):
        MambaConfig(d_model=16, mixer="MLSTM", recompute="all")
