"""MambaLM.generate and what it is made of: decoding with a cache, CUDA graphs, sampling."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from typing import Any

import helpers
import pytest
import torch
import torch.nn.functional as F
from helpers import says
from layer_helpers import assert_same_gradients
from model_helpers import VOCABULARY, every_mixer, make_model, make_talker, make_tokens
from plain_layers import parameters_of, within
from torch import Tensor

from ssm_kernels.models import InferenceParams, MambaLM, MixerModel, sample

OPERATOR = "selective_scan"  # the devices of all the mixers' operators


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
    backbone.load_state_dict(within(model.state_dict(), "backbone."))
    torch.testing.assert_close(F.linear(backbone(tokens), model.lm_head.weight), whole)


@every_mixer
def test_packed_sequences_are_one_by_one(mixer, device):
    model, tokens = make_model(mixer, device), make_tokens(1, 9, device=device)
    packed = model(tokens, cu_seqlens=torch.tensor([0, 4, 4, 9], device=device)).logits
    single = torch.cat([model(tokens[:, :4]).logits, model(tokens[:, 4:]).logits], dim=1)
    torch.testing.assert_close(packed, single)
    assert_same_gradients(packed, single, parameters_of(model), 1e-7, 1e-9)


def greedy(model: MambaLM, tokens: Tensor, steps: int) -> Tensor:
    """Generates greedily, with a full forward pass for every token."""
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


def test_sequences_of_a_batch_are_independent():
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
    """Keeps the tokens that it receives."""

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
    """The second call replays the first's graph on another prompt, without waiting for the device."""
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
    """Frequency of each token among the draws."""
    generator = torch.Generator(logits.device).manual_seed(0)
    tokens = sample(logits.expand(count, -1), **options, generator=generator)
    return tokens.bincount(minlength=logits.shape[-1]).double() / count


def expected_frequencies(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 0.0, min_p: float = 0.0
) -> Tensor:
    """The definition, a token at a time."""
    p = (logits.double() / temperature).softmax(dim=-1)
    order = sorted(range(len(p)), key=lambda token: -p[token])
    kept = order[:top_k] if top_k else order
    total, mass, nucleus = sum(p[token].item() for token in kept), 0.0, []
    for token in kept:
        if nucleus and ((0 < top_p < 1 and mass >= top_p) or p[token] < min_p * p[order[0]]):
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
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 12, "top_p": 0.9, "min_p": 0.3},
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


TOKENS = make_tokens(2, 3)
# Arguments that are refused, by the name in the message.
BAD_ARGUMENTS: dict[tuple[str, ...], list[tuple[dict[str, Any], type[Exception], str]]] = {
    ("sample", "MambaLM.generate"): [
        ({"temperature": -1.0}, ValueError, "expected temperature to be finite and not negative, got -1.0"),
        ({"top_k": -1}, ValueError, "expected top_k to be at least 0, got -1"),
        ({"min_p": -0.5}, ValueError, "expected min_p from 0 to 1, got -0.5"),
        ({"top_p": 1.5}, ValueError, "expected top_p from 0 to 1, got 1.5"),
    ],
    ("sample",): [
        ({"logits": torch.zeros(2, 0)}, ValueError, "expected logits of at least one token"),
        ({"logits": torch.zeros(2, 3).int()}, TypeError, "expected logits of at least one token and of a floating-point dtype"),
    ],
    ("MambaLM", "MambaLM.generate"): [
        ({"input_ids": TOKENS.float()}, TypeError, "expected input_ids of dtype int32 or int64, got torch.float32"),
        ({"input_ids": TOKENS[0]}, ValueError, "expected input_ids of shape (batch, seqlen), got [3]"),
    ],
    ("MambaLM",): [
        ({"input_ids": [1, 2]}, TypeError, "expected input_ids to be a tensor, got list"),
        ({"labels": TOKENS, "num_last_tokens": 1}, ValueError, "expected labels or num_last_tokens, got both"),
        ({"labels": TOKENS[:, :2]}, ValueError, "expected labels of shape (batch, seqlen)"),
        ({"labels": TOKENS.float()}, TypeError, "expected labels of dtype int32 or int64, got torch.float32"),
        ({"labels": TOKENS.to("meta")}, RuntimeError, "expected labels on cpu, where the other tensors are, got meta"),
    ],
    ("MambaLM.generate",): [
        ({"max_length": None}, ValueError, "expected max_length or max_new_tokens, got neither"),
        ({"max_new_tokens": 2}, ValueError, "expected max_length or max_new_tokens, got both"),
        ({"max_length": 2}, ValueError, "expected max_length to be at least 3, got 2"),
        ({"max_length": None, "max_new_tokens": -1}, ValueError, "expected max_new_tokens to be at least 0, got -1"),
        ({"input_ids": [1, 2]}, TypeError, "expected prompts of 1-D tensors or lists of ints, got input_ids[0] of int"),
        ({"input_ids": "text"}, TypeError, "expected input_ids to be a tensor, or a list of prompts, got str"),
        ({"input_ids": [[1], []]}, ValueError, "expected a prompt of at least one token, got none in input_ids[1]"),
        ({"input_ids": []}, ValueError, "expected a prompt of at least one token, got an empty list"),
        ({"input_ids": [[1.5]]}, TypeError, "expected a token of input_ids[0] to be an int, got float"),
        ({"input_ids": [TOKENS]}, ValueError, "expected input_ids[0] of shape (seqlen,), got [2, 3]"),
        ({"input_ids": [[1]], "attention_mask": TOKENS}, ValueError, "expected no attention_mask with a list of prompts"),
        ({"attention_mask": TOKENS[:, :2]}, ValueError, "expected attention_mask of shape (batch, seqlen)"),
        ({"attention_mask": [1, 1, 1]}, TypeError, "expected attention_mask to be a tensor, got list"),
        ({"attention_mask": TOKENS * 0}, ValueError, "expected a prompt of at least one token in each row"),
        (
            {"attention_mask": TOKENS.to("meta")},
            RuntimeError,
            "expected attention_mask on cpu, where the other tensors are, got",
        ),
        ({"eos_token_id": [1, VOCABULARY]}, ValueError, "expected eos_token_id below vocab_size = 21, got 21"),
        ({"eos_token_id": []}, ValueError, "expected eos_token_id to be an int, a list of at least one, or None, got an empty"),
        ({"eos_token_id": 1.0}, TypeError, "expected eos_token_id to be an int, a list of ints or None, got float"),
        ({"pad_token_id": 24}, ValueError, "expected pad_token_id below 24, the rows of the embedding, got 24"),
        ({"repetition_penalty": 0.0}, ValueError, "expected repetition_penalty to be positive and finite, got 0.0"),
        ({"output_scores": 1}, TypeError, "expected output_scores to be a bool, got int"),
        ({"streamer": 3}, TypeError, "expected streamer to have methods put and end, got int"),
        ({"eos_token_id": VOCABULARY}, ValueError, "expected eos_token_id below vocab_size = 21, got 21"),
        ({"cg": True}, ValueError, "expected input_ids on a CUDA device with cg=True, got cpu"),
        ({"input_ids": TOKENS[:, :0]}, ValueError, "expected a prompt of at least one token, got input_ids of shape [2, 0]"),
        ({"input_ids": TOKENS[:0]}, ValueError, "expected a prompt of at least one token, got input_ids of shape [0, 3]"),
        ({"generator": 0}, TypeError, "expected generator to be a torch.Generator or None, got int"),
    ],
}


@pytest.mark.parametrize(
    "name, options, error, words", [(name, *row) for names, rows in BAD_ARGUMENTS.items() for name in names for row in rows]
)
def test_bad_arguments(name, options, error, words):
    model = make_model("Mamba")
    call, good = {
        "sample": (sample, {"logits": torch.zeros(1, 3)}),
        "MambaLM": (model, {"input_ids": TOKENS}),
        "MambaLM.generate": (model.generate, {"input_ids": TOKENS, "max_length": 4}),
    }[name]
    with pytest.raises(error, match=says(f"{name}: {words}")):
        call(**good | options)
