"""transformers' models with delta rules: packed sequences, strong gates and caches, which no test of all models covers."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="the tests run models of transformers, in the extra [clients]")

from transformers_models import (
    CONV_STEP,
    DELTA_MODELS,
    DELTA_STEP,
    backward,
    close,
    counting,
    distance,
    logits_and_gradients,
    rounding,
    tokens,
    without_tf32,  # noqa: F401
)

from ssm_kernels.integrations.transformers import patched, served

CLIENT, OPERATOR = "transformers", "delta_rule_scan"
LENGTHS = (9, 1, 20, 7)
SEQLEN = sum(LENGTHS)
# Attention of the others compresses or selects keys without regard to sequences.
PACKED = [name for name in DELTA_MODELS if name not in ("Qwen4Exp", "Glm5Next")]


def packing_by(name: str, device: str) -> dict[str, torch.Tensor]:
    if name == "seq_idx":
        numbers = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
        return {"seq_idx": numbers[None].int().to(device)}
    return {"cu_seq_lens_q": torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32, device=device)}


def positions_of(device: str) -> torch.Tensor:
    return torch.cat([torch.arange(length, device=device) for length in LENGTHS])[None]


@pytest.mark.serves("packed sequences with position_ids")
@pytest.mark.parametrize("by", ["seq_idx", "cu_seq_lens_q"])
@pytest.mark.parametrize("model", PACKED)
def test_packed_sequences_equal_separate_ones(model: str, by: str, device: str) -> None:
    of = DELTA_MODELS[model]
    net = of.make(device).base_model
    parts = [tokens(1, length, device, seed) for seed, length in enumerate(LENGTHS)]
    ids = torch.cat(parts, dim=1)
    with patched():
        with counting() as calls:
            packed = logits_and_gradients(net, ids, **packing_by(by, device), position_ids=positions_of(device))
        assert calls == of.training_calls()
        net.train().zero_grad()
        hidden = torch.cat([net(part, use_cache=False)[0] for part in parts], dim=1)
        backward(hidden)
    close(packed["logits"], hidden, rounding(of, SEQLEN))
    for name, parameter in net.named_parameters():
        close(packed[name], parameter.grad, rounding(of, SEQLEN), name)


@pytest.mark.parametrize("by", ["seq_idx", "cu_seq_lens_q"])
@pytest.mark.parametrize("model", ["Qwen3Next", "KimiLinear"])
def test_packing_that_attention_would_mix_is_refused(model: str, by: str) -> None:
    net, ids, packing = DELTA_MODELS[model].make().base_model, tokens(1, SEQLEN, "cpu"), packing_by(by, "cpu")
    right = {"position_ids": positions_of("cpu"), "use_cache": False}
    wrongs: tuple[tuple[dict[str, Any], str], ...] = (
        ({"use_cache": True}, "expected use_cache=False"),
        ({"attention_mask": torch.ones_like(ids)}, "expected no attention_mask"),
        ({"position_ids": None}, "expected position_ids that restart"),
        ({"position_ids": torch.arange(SEQLEN)[None]}, "got some that go on"),
    )
    with patched(), torch.no_grad():
        for wrong, words in wrongs:
            with pytest.raises(ValueError, match=f"{words}.*otherwise attention mixes the sequences that {by} packs"):
                net(ids, **packing, **right | wrong)
    assert "packing" not in str(served())


@pytest.mark.parametrize("model", ["Qwen3_5"])
def test_gradients_of_strong_gates_are_nearer_to_float64_than_the_models_own(model: str) -> None:
    """Decays down to exp(-20) a step: the models' own path subtracts sums of the whole chunk."""
    of, ids = DELTA_MODELS[model], tokens(2, SEQLEN, "cpu")
    net = of.make(max_A_log=10.0)
    own = logits_and_gradients(net, ids)
    with patched():
        actual = logits_and_gradients(net, ids)
        exact = logits_and_gradients(of.make(max_A_log=10.0).double(), ids)
    gates = [name for name in own if name.endswith(("A_log", "dt_bias"))]
    assert len(gates) == 4
    for name in gates:
        error, own_error = (distance(each[name], exact[name]) for each in (actual, own))
        assert error <= 2e-5 < own_error, f"{name}: {error:.1e}, the model's own {own_error:.1e}"


@pytest.mark.parametrize("model", ["Qwen3Next", "KimiLinear"])
def test_a_step_writes_the_state_of_the_cache_in_place(model: str, device: str) -> None:
    of, ids = DELTA_MODELS[model], tokens(2, 12, device)
    net = of.make(device)
    with patched(), torch.no_grad():
        expected = net(ids, use_cache=False).logits
        cache = net(ids[:, :10], use_cache=True).past_key_values
        states = [layer.recurrent_states[0] for layer in cache.layers if hasattr(layer, "recurrent_states")]
        before = [state.clone() for state in states]
        with counting() as calls:
            steps = [net(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in (10, 11)]
    assert calls == {CONV_STEP: 2 * of.mixers, DELTA_STEP: 2 * of.mixers}
    after = [layer.recurrent_states[0] for layer in cache.layers if hasattr(layer, "recurrent_states")]
    for state, old, new in zip(states, before, after, strict=True):
        assert new is state and not torch.equal(new, old) and new.dtype == torch.float32
    close(torch.cat(steps, 1), expected[:, 10:], rounding(of, 12))


@pytest.mark.parametrize("model", ["Qwen3Next", "KimiLinear"])
def test_a_prompt_in_two_calls_and_gradients_of_a_step(model: str, device: str) -> None:
    """A call after a prompt continues the cache's state; a single token that needs gradients takes the scan."""
    of, ids = DELTA_MODELS[model], tokens(2, 12, device)
    net = of.make(device)
    with patched():
        with torch.no_grad():
            expected = net(ids, use_cache=False).logits
            cache = net(ids[:, :5], use_cache=True).past_key_values
            rest = net(ids[:, 5:11], past_key_values=cache, use_cache=True).logits
        close(rest, expected[:, 5:11], rounding(of, 12))
        with counting() as calls:
            last = net(ids[:, 11:], past_key_values=cache, use_cache=True).logits
        assert last.requires_grad and calls[DELTA_STEP] == 0 and calls["_delta_rule_scan_fwd"] == of.mixers
    close(last, expected[:, 11:], rounding(of, 12))


@pytest.mark.parametrize(
    ("function", "length", "words"),
    [
        ("recurrent_kimi_delta_attention", 1, "fused_recurrent_kda: seq_idx is not supported: a decoding step has one token"),
        ("chunk_kimi_delta_attention", 3, "chunk_kda: packed sequences after a cached state are not supported"),
    ],
)
def test_packed_sequences_after_a_cached_state_are_refused(function: str, length: int, words: str) -> None:
    modeling = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    q, k, v, g = torch.randn(4, 1, length, 2, 8)
    seq_idx, state = torch.zeros(1, length, dtype=torch.int32), torch.zeros(1, 2, 8, 8)
    with patched(), pytest.raises(NotImplementedError, match=words):
        getattr(modeling, function)(q, k, v, g=-g.abs(), beta=g[..., 0].sigmoid(), initial_state=state, seq_idx=seq_idx)
