"""peft's LoRA on models of transformers that run on these kernels: adapters train as on the models' own path."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="the tests run models of transformers, in the extra [clients]")
pytest.importorskip("peft", reason="the tests train peft's adapters, in the extra [clients]")

import peft
from transformers_models import MODELS, close, counting, logits_and_gradients, rounding, tokens, without_tf32  # noqa: F401

from ssm_kernels.integrations.transformers import patched

CLIENT, OPERATOR = "peft", "ssd_chunk_scan"
SEQLEN = 37
# peft refuses out_proj and conv1d of these models by their type, because mamba_ssm's fused functions would not call them.
TARGETS = {"Mamba": ["in_proj", "x_proj", "dt_proj"], "Mamba2": ["in_proj"]}
OUTSIDE = {"Mamba": "dt_proj"}


def adapted(model: str, device: str, targets: list[str], *, hidden_type: bool = False) -> Any:
    net = MODELS[model].make(device)
    if hidden_type:
        # A type that peft's list does not have: here out_proj is called as a module.
        net.config.model_type = "tests"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=targets))
    torch.manual_seed(3)
    for name, parameter in net.named_parameters():
        if "lora_B" in name:  # zero at first, which would hide an ignored adapter
            torch.nn.init.normal_(parameter, std=0.1)
    return net.to(device)


@pytest.mark.serves("LoRA on transformers' models")
@pytest.mark.parametrize("model", TARGETS)
def test_every_adapter_trains_as_on_the_models_own_path(model: str, device: str) -> None:
    of = MODELS[model]
    net, ids = adapted(model, device, [*TARGETS[model], "out_proj"], hidden_type=True), tokens(2, SEQLEN, device)
    expected = logits_and_gradients(net, ids)
    with patched(), counting() as calls:
        actual = logits_and_gradients(net, ids)
    assert calls == of.training_calls()
    assert set(actual) == set(expected)
    adapters = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
    assert adapters and all("lora_" in name for name in adapters)
    for name in adapters:
        # transformers multiplies by dt_proj.weight and does not call dt_proj: neither path trains its adapter.
        if OUTSIDE.get(model, "out of none") in name:
            assert name not in actual
        else:
            assert actual[name].norm() > 0, name
            close(actual[name], expected[name], rounding(of, SEQLEN), name)
    close(actual["logits"], expected["logits"], rounding(of, SEQLEN))


@pytest.mark.parametrize("model", TARGETS)
def test_adapters_merge_into_the_weights(model: str, device: str) -> None:
    targets = [name for name in TARGETS[model] if name != OUTSIDE.get(model)]
    net, ids = adapted(model, device, targets), tokens(2, SEQLEN, device)
    with patched(), torch.no_grad():
        expected = net(ids, use_cache=False).logits
        actual = net.merge_and_unload()(ids, use_cache=False).logits
    close(actual, expected, rounding(MODELS[model], SEQLEN))


def test_peft_refuses_out_proj_by_the_models_type(device: str) -> None:
    with pytest.raises(ValueError, match="'out_proj' is incompatible"):
        adapted("Mamba", device, ["out_proj"])
