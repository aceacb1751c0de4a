"""transformers 4.57, whose mixers choose between two forwards: the one with kernels, on CPU too, against the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the tests run models of transformers, in the extra [clients]")

import transformers

if not transformers.__version__.startswith("4.57."):
    pytest.skip(f"the tests are for transformers 4.57; {transformers.__version__} is installed", allow_module_level=True)

from transformers_models import (
    DELTA_MODELS,
    MODELS,
    PACKS_IN_MAMBA_LAYERS,
    close,
    counting,
    logits_and_gradients,
    rounding,
    tokens,
    without_tf32,  # noqa: F401
)

from ssm_kernels.integrations.transformers import patched, served

CLIENT, OPERATOR = "transformers", "ssd_chunk_scan"
# NemotronH is not in 4.57, and the fast path of FalconH1 enters the scope of a CUDA device. Layers of Qwen3-Next keep the
# functions that they were made with.
SERVED = [name for name in MODELS if name not in ("NemotronH", "FalconH1", *DELTA_MODELS)]
# Without a cache, Zamba2's own path neither masks padding nor sums the states of several chunks over the right axis.
CHUNK = 16
models = pytest.mark.parametrize("model", SERVED)


@contextlib.contextmanager
def own_path(net: Any) -> Iterator[None]:
    """Jamba and Zamba take their own path only if the configuration asks for it."""
    mixers = [module for module in net.modules() if hasattr(module, "use_fast_kernels")]
    for mixer in mixers:
        mixer.use_fast_kernels = False
    yield
    for mixer in mixers:
        mixer.use_fast_kernels = True


def make(model: str, device: str) -> Any:
    net = MODELS[model].make(device)
    for module in net.modules():
        if type(module).__name__ == "Zamba2MambaMixer":
            module.time_step_min = 0.0  # only Zamba2's own path clamps the step size by it
    return net


@pytest.mark.serves("training")
@models
def test_logits_and_gradients_equal_the_models_own_path(model: str, device: str) -> None:
    of, net = MODELS[model], make(model, device)
    seqlen = CHUNK if model == "Zamba2" else 37
    ids = tokens(2, seqlen, device)
    mask = torch.ones_like(ids)
    if model != "Zamba2":
        mask[0, :11] = 0
    with own_path(net):
        expected = logits_and_gradients(net, ids, attention_mask=mask)
    with patched(), counting() as calls:
        actual = logits_and_gradients(net, ids, attention_mask=mask)
    assert calls == of.training_calls()
    assert net.training is False and set(actual) == set(expected)
    for found in (actual, expected):
        found["logits"] = found["logits"] * mask[..., None]
    for name, value in actual.items():
        close(value, expected[name], rounding(of, seqlen), name)


class LowRank(torch.nn.Module):
    """A projection with an adapter, as peft wraps it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.adapter = torch.nn.Parameter(torch.randn_like(base.weight) / 10)

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + torch.nn.functional.linear(x, self.adapter)


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("model", ["Mamba", "FalconMamba", "Jamba"])
def test_adapters_of_dt_proj_act_and_train(model: str, is_training: bool, device: str) -> None:
    of, net, ids = MODELS[model], make(model, device), tokens(2, 20, device)
    for module in list(net.modules()):
        if hasattr(module, "dt_proj"):
            module.dt_proj = LowRank(module.dt_proj)
    net.train(is_training)
    with own_path(net):
        expected = logits_and_gradients(net, ids)
    with patched(), counting() as calls:
        actual = logits_and_gradients(net, ids)
    assert calls == of.training_calls()
    assert any("adapter" in name for name in actual) and set(actual) == set(expected)
    for name, value in actual.items():
        close(value, expected[name], rounding(of, 20), name)


@pytest.mark.serves("cached generation")
@models
def test_cached_generation_equals_the_models_own(model: str, device: str) -> None:
    of, net, ids = MODELS[model], make(model, device), tokens(2, 9, device)
    options = {"max_new_tokens": 6, "do_sample": False}
    with own_path(net):
        expected = net.generate(ids, **options)
    with patched(), counting() as calls:
        actual = net.generate(ids, **options)
    assert calls == of.calls(1, steps=5)
    assert torch.equal(actual, expected)


@pytest.mark.serves(PACKS_IN_MAMBA_LAYERS)
@pytest.mark.parametrize("model", ["Bamba", "GraniteMoeHybrid"])
def test_packed_sequences_equal_separate_ones(model: str, device: str) -> None:
    of, lengths = MODELS[model], (9, 1, 20, 7)
    only_mamba = {"num_hidden_layers": 2} | ({"attn_layer_indices": []} if model == "Bamba" else {"layer_types": ["mamba"] * 2})
    net = of.make(device, **only_mamba)
    parts = [tokens(1, length, device, seed) for seed, length in enumerate(lengths)]
    seq_idx = torch.repeat_interleave(torch.arange(4, device=device), torch.tensor(lengths, device=device))[None].int()
    with patched(), torch.no_grad():
        separate = torch.cat([net(part, use_cache=False).logits for part in parts], dim=1)
        with counting() as calls:
            packed = net(torch.cat(parts, dim=1), seq_idx=seq_idx, use_cache=False).logits
    assert calls == of.calls(1)
    close(packed, separate, rounding(of, sum(lengths)))


def test_unpatch_restores_names_that_were_absent() -> None:
    from transformers.models.bamba import modeling_bamba

    before, forward = dict(vars(modeling_bamba)), modeling_bamba.BambaMixer.forward
    with patched() as report:
        assert modeling_bamba.is_fast_path_available is True
        assert "mamba_chunk_scan_combined" in report.modules[modeling_bamba.__name__]
        assert modeling_bamba.BambaMixer.forward is not forward
    assert vars(modeling_bamba) == before and modeling_bamba.BambaMixer.forward is forward
    assert not served().modules


def test_falcon_h1_keeps_its_own_path_on_the_cpu() -> None:
    net, ids = MODELS["FalconH1"].make(), tokens(2, 20, "cpu")
    with torch.no_grad():
        expected = net(ids, use_cache=False).logits
        with patched(), counting() as calls:
            actual = net(ids, use_cache=False).logits
    assert not calls
    assert torch.equal(actual, expected)


@pytest.mark.serves("training", model="Qwen3Next")
def test_qwen3_next_that_is_made_after_the_patch(device: str) -> None:
    of, ids = DELTA_MODELS["Qwen3Next"], tokens(2, 37, device)
    own = of.make(device)
    expected, expected_tokens = logits_and_gradients(own, ids), own.generate(ids, max_new_tokens=4, do_sample=False)
    with patched():
        net = of.make(device)
        with counting() as calls:
            actual = logits_and_gradients(net, ids)
        assert calls == of.training_calls()
        with counting() as calls:
            found = net.generate(ids, max_new_tokens=4, do_sample=False)
        assert calls == of.calls(1, steps=3)
    assert torch.equal(found, expected_tokens)
    for name, value in actual.items():
        close(value, expected[name], rounding(of, 37), name)
