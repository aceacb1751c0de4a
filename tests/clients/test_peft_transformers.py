"""peft's LoRA on models of transformers that run on these kernels: adapters train, act in decoding and merge."""

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
MAMBA = ["in_proj", "x_proj", "dt_proj"]
TARGETS = {"Mamba": MAMBA, "FalconMamba": MAMBA, "Jamba": MAMBA, "Mamba2": ["in_proj"]}


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


def effective_weight(self: Any) -> torch.Tensor:
    return self.get_base_layer().weight + self.get_delta_weight("default")


@pytest.mark.serves("LoRA on transformers' models")
@pytest.mark.parametrize("model", TARGETS)
def test_every_adapter_trains(model: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = MODELS[model]
    net, ids = adapted(model, device, [*TARGETS[model], "out_proj"], hidden_type=True), tokens(2, SEQLEN, device)
    with monkeypatch.context() as context:
        # The model's own path multiplies by dt_proj.weight, which is that of the layer without the adapter.
        context.setattr(peft.tuners.lora.Linear, "weight", property(effective_weight))
        expected = logits_and_gradients(net, ids)
    with patched(), counting() as calls:
        actual = logits_and_gradients(net, ids)
    assert calls == of.training_calls()
    assert set(actual) == set(expected)
    adapters = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
    assert adapters and all("lora_" in name for name in adapters)
    for name in adapters:
        assert actual[name].norm() > 0, name
        close(actual[name], expected[name], rounding(of, SEQLEN), name)
    close(actual["logits"], expected["logits"], rounding(of, SEQLEN))


def cached_logits(net: Any, ids: torch.Tensor) -> torch.Tensor:
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return torch.stack(net.generate(input_ids=ids, max_new_tokens=4, **options).logits, dim=1)


@pytest.mark.parametrize("model", TARGETS)
def test_adapters_act_in_decoding_and_merge_into_the_weights(model: str, device: str) -> None:
    of = MODELS[model]
    net, ids = adapted(model, device, TARGETS[model]), tokens(2, SEQLEN, device)
    with patched(), torch.no_grad():
        expected = net(ids, use_cache=False).logits
        with counting() as calls:
            cached = cached_logits(net, ids)
        assert calls == of.calls(1, steps=3)
        close(cached[:, 0], expected[:, -1], rounding(of, SEQLEN))
        merged = net.merge_and_unload()
        close(merged(ids, use_cache=False).logits, expected, rounding(of, SEQLEN))
        close(cached_logits(merged, ids), cached, rounding(of, SEQLEN))


def test_adapters_under_compile_fullgraph(device: str) -> None:
    of = MODELS["Mamba"]
    net, ids = adapted("Mamba", device, TARGETS["Mamba"]), tokens(2, SEQLEN, device)
    torch._dynamo.reset()
    with patched():
        expected = logits_and_gradients(net, ids)
        compiled = torch.compile(net, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
        actual = logits_and_gradients(compiled, ids)
    assert {name.removeprefix("_orig_mod.") for name in actual} == set(expected)
    for name, value in actual.items():
        close(value, expected[name.removeprefix("_orig_mod.")], rounding(of, SEQLEN), name)


def test_peft_refuses_out_proj_by_the_models_type(device: str) -> None:
    with pytest.raises(ValueError, match="'out_proj' is incompatible"):
        adapted("Mamba", device, ["out_proj"])
