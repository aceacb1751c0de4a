"""Adapters of peft on the projections of mixers and models train, merge and act in decoding; so do other wrapped weights."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.nn as nn
from helpers import says
from layer_helpers import MIXERS, WIDTH, assert_all_close, decode, gradients, make_layer, make_sequence
from plain_layers import logits, mamba, mamba2
from torch import Tensor

from ssm_kernels.models import MambaConfig, MambaLM

CLIENT, OPERATOR = "peft", "ssd_chunk_scan"
peft = pytest.importorskip("peft", reason="needs the package peft")

PROJECTIONS = {"Mamba": ["in_proj", "x_proj", "dt_proj", "out_proj"], "Mamba2": ["in_proj", "out_proj"]}
PLAIN = {"Mamba": mamba, "Mamba2": mamba2}
every_mixer = pytest.mark.parametrize("model", MIXERS)


@pytest.fixture(autouse=True)
def same_compilers() -> Iterator[None]:
    """BOFT of peft sets CC and CXX of the process to gcc, with which later tests cannot link C++."""
    with mock.patch.dict(os.environ):
        yield


class Holder(nn.Module):
    """A model whose only layer is ``layer``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def adapt(model: nn.Module, targets: list[str], **options) -> nn.Module:
    """Adds adapters whose second factor is not zero."""
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False).to(next(model.parameters()))


def adapters_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in module.named_parameters() if "lora_" in name}


def effective_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The parameters by their names without adapters: the weight of an adapted layer is W + scaling * up down."""
    parameters = {name.replace(".base_layer", ""): p.detach() for name, p in module.named_parameters() if "lora_" not in name}
    for name, layer in module.named_modules():
        if hasattr(layer, "lora_A"):
            down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            parameters[f"{name}.weight"] = parameters[f"{name}.weight"] + layer.scaling["default"] * (up @ down)
    return parameters


def assert_adapters_train(outputs: Tensor, expected: Tensor, adapters: dict[str, Tensor]) -> None:
    assert_all_close(outputs, expected)
    leaves = [*adapters.values()]
    for name, a, b in zip(adapters, gradients(outputs, leaves), gradients(expected, leaves), strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.serves("adapters train, merge and decode")
@every_mixer
def test_adapters_on_every_projection(model, device):
    plain_layer, x = make_layer(model, device), make_sequence(2, 7, WIDTH, device=device)
    adapted = adapt(Holder(copy.deepcopy(plain_layer)), PROJECTIONS[model])
    layer = adapted.base_model.model.layer
    adapters = adapters_of(layer)
    assert len(adapters) == 2 * len(PROJECTIONS[model])
    out = adapted(x)
    assert (out - plain_layer(x)).abs().max() > 1e-3  # the adapters change the result
    assert_adapters_train(out, PLAIN[model](plain_layer, x, effective_parameters(layer)), adapters)
    assert_all_close(decode(layer, x), out.detach())
    merged = adapted.merge_and_unload()
    assert not adapters_of(merged)
    assert_all_close(merged(x), out)
    assert_all_close(decode(merged.layer, x), out.detach())


# Ways in which peft's methods use a layer: they add to its output, scale it, or multiply by a weight of their own making.
METHODS = {
    "LoRA": ("LoraConfig", {"r": 2}),
    "rsLoRA": ("LoraConfig", {"r": 2, "use_rslora": True}),
    "DoRA": ("LoraConfig", {"r": 2, "use_dora": True}),
    "IA3": ("IA3Config", {"feedforward_modules": []}),
    "HRA": ("HRAConfig", {"r": 2}),
    "SHiRA": ("ShiraConfig", {"r": 1, "random_seed": 0}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 2}),
    "Road": ("RoadConfig", {"group_size": 2}),
}


@pytest.mark.serves("adapters train, merge and decode")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension", "ignore:Setting boft_n_butterfly_factor")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_methods_of_peft_on_the_step_sizes(method, device):
    """``dt_proj`` is a linear layer to every method: the same output at first, gradients, and the same output merged."""
    name, options = METHODS[method]
    layer, x = make_layer("Mamba", device), make_sequence(2, 7, WIDTH, device=device)
    expected = layer(x)
    torch.manual_seed(1)
    config = getattr(peft, name)(target_modules=["dt_proj"], **options)
    adapted = peft.get_peft_model(Holder(layer), config).to(torch.float64)
    tight = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(adapted(x), expected, **tight)
    torch.testing.assert_close(decode(layer, x), expected.detach(), **tight)
    trained = {key: p for key, p in adapted.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(0.3 * torch.rand_like(parameter))
    out = adapted(x)
    assert (out - expected).abs().max() > 1e-6
    assert trained and all(gradient.abs().max() > 0 for gradient in gradients(out, trained.values()))
    torch.testing.assert_close(decode(layer, x), out.detach(), **tight)
    merged = adapted.merge_and_unload()
    assert type(merged.layer.dt_proj) is nn.Linear
    torch.testing.assert_close(merged(x), out, **tight)
    torch.testing.assert_close(decode(merged.layer, x), out.detach(), **tight)


@pytest.mark.serves("adapters train, merge and decode")
@every_mixer
def test_adapters_of_a_language_model(model):
    torch.manual_seed(0)
    sizes = {"d_state": 4, **({"headdim": 4} if model == "Mamba2" else {"dt_rank": 2})}
    config = MambaConfig(d_model=8, n_layer=2, vocab_size=11, ssm_cfg=sizes, mixer=model)
    lm, ids = MambaLM(config, dtype=torch.float64), torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))
    plain_lm = copy.deepcopy(lm)
    adapted = adapt(lm, PROJECTIONS[model])
    adapters = adapters_of(lm)
    assert len(adapters) == 2 * 2 * len(PROJECTIONS[model])
    out = lm(ids).logits
    assert_adapters_train(out, logits(plain_lm, ids, effective_parameters(lm)), adapters)
    tokens = lm.generate(ids, max_new_tokens=4, top_k=1)
    merged = adapted.merge_and_unload()
    assert_all_close(merged(ids).logits, out)
    assert torch.equal(merged.generate(ids, max_new_tokens=4, top_k=1), tokens)


@every_mixer
def test_an_adapter_of_the_convolution_is_refused(model):
    layer, x = make_layer(model), make_sequence(2, 3, WIDTH)
    channels = layer.conv1d.weight.shape[0]
    with pytest.warns(UserWarning, match="groups > 1"):
        config = peft.LoraConfig(target_modules=["conv1d"], r=channels, init_lora_weights=False)
        adapted = peft.get_peft_model(Holder(layer), config, autocast_adapter_dtype=False)
    message = f"{model}: expected conv1d without adapters, whose weights the layer would not read, got "
    with pytest.raises(NotImplementedError, match=says(message)):
        adapted(x)
    with pytest.raises(NotImplementedError, match=says(message)):
        decode(layer, x)
