"""Token ids and labels outside of the vocabulary: one sentence on the CPU, no check where the host cannot read the values."""

from __future__ import annotations

import pytest
import torch
from model_helpers import VOCABULARY, every_mixer, make_config, make_model, make_tokens
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ssm_kernels.compat.models import MambaLMHeadModel
from ssm_kernels.models import InferenceParams, MambaLM

# The vocabulary of 21 tokens is padded to 24.
OUTSIDE = [-1, -100, VOCABULARY, VOCABULARY + 2, VOCABULARY + 3, 2**40]


def with_id(value: int, *shape: int) -> Tensor:
    tokens = make_tokens(*shape)
    tokens[-1, -1] = value
    return tokens


def sentence(name: str, argument: str, low: int, high: int) -> str:
    got = f"got {low} as the smallest and {high} as the largest"
    return rf"^{name}: expected {argument} from 0 to 20, below vocab_size = 21[^:]*, {got}$"


@every_mixer
@pytest.mark.parametrize("value", OUTSIDE)
def test_token_ids(mixer, value):
    model, tokens = make_model(mixer), with_id(value, 2, 5)
    ends = int(tokens.min()), int(tokens.max())
    for call, name in ((model, "MixerModel"), (model.backbone, "MixerModel"), (model.generate, r"MambaLM\.generate")):
        options = {"max_new_tokens": 1} if call == model.generate else {}
        with pytest.raises(ValueError, match=sentence(name, "input_ids", *ends)):
            call(tokens, **options)
    row = tokens[-1]
    for prompts in ([[1], row.tolist()], [row[:2], row]):
        with pytest.raises(ValueError, match=sentence(r"MambaLM\.generate", r"input_ids\[1\]", int(row.min()), int(row.max()))):
            model.generate(prompts, max_new_tokens=1)


def test_an_embedding_of_another_size_below_a_wrapper():
    model = make_model("MinGRU")
    model.backbone.embedding = nn.Sequential(nn.Embedding(40, model.config.d_model, dtype=torch.float64))
    assert model.backbone(torch.full((1, 3), 39)).shape[:2] == (1, 3)
    with pytest.raises(ValueError, match="MixerModel: expected input_ids from 0 to 39, below vocab_size = 40"):
        model.backbone(torch.full((1, 3), 40))


def test_int32_ids():
    with pytest.raises(ValueError, match=sentence("MixerModel", "input_ids", 21, 21)):
        make_model("MinGRU")(torch.full((1, 3), 21, dtype=torch.int32))


@every_mixer
def test_padding_may_be_any_number(mixer):
    model, tokens = make_model(mixer), make_tokens(2, 5)
    mask = torch.ones(2, 5)
    mask[0, :2] = 0
    wild = tokens.masked_fill(mask == 0, -7)
    assert torch.equal(model(wild, attention_mask=mask).logits, model(tokens, attention_mask=mask).logits)
    labels = tokens.masked_fill(mask == 0, 10**6)
    expected = model(tokens, labels=tokens, attention_mask=mask).loss
    assert torch.equal(model(tokens, labels=labels, attention_mask=mask).loss, expected)
    assert torch.equal(
        model.generate(wild, 8, temperature=0, attention_mask=mask)[:, 5:],
        model.generate(tokens, 8, temperature=0, attention_mask=mask)[:, 5:],
    )


@pytest.mark.parametrize("value", [value for value in OUTSIDE if value != -100])
def test_labels(value):
    model, tokens = make_model("MinGRU"), make_tokens(2, 5)
    labels = with_id(value, 2, 5)
    labels[0, :3] = -100
    counted = labels[:, 1:][labels[:, 1:] != -100]
    with pytest.raises(ValueError, match=sentence("MambaLM", "labels", int(counted.min()), int(counted.max()))) as error:
        model(tokens, labels=labels)
    assert "or -100 to leave a token out" in str(error.value)


def test_labels_of_minus_100_are_left_out():
    model, tokens = make_model("MinGRU"), make_tokens(2, 5)
    labels = tokens.clone()
    labels[1] = -100
    assert torch.equal(model(tokens, labels=labels).loss, model(tokens[:1], labels=tokens[:1]).loss)
    assert model(tokens, labels=torch.full_like(tokens, -100)).loss.isnan()
    # No logits predict the first label.
    labels[:, 0] = 10**6
    assert model(tokens, labels=labels).loss.isfinite()


def test_an_embedding_of_another_size_has_its_own_number():
    model = make_model("MinGRU", tie_embeddings=False)
    model.backbone.embedding = nn.Embedding(30, 16, dtype=torch.float64)
    assert model(torch.full((1, 3), 29)).logits.shape == (1, 3, 24)
    with pytest.raises(ValueError, match="below vocab_size = 30, got 30"):
        model(torch.full((1, 3), 30))


def test_padding_of_ended_sequences_may_pad_the_vocabulary():
    model, tokens = make_model("Mamba", tie_embeddings=False), make_tokens(8, 2)
    found = model.generate(tokens, 60, temperature=5.0, eos_token_id=3, pad_token_id=VOCABULARY + 1)
    padding = found == VOCABULARY + 1
    assert padding.any() and found[~padding].max() < VOCABULARY


def test_compat_draws_no_rows_that_pad_the_vocabulary():
    torch.manual_seed(0)
    model = MambaLMHeadModel(make_config("Mamba", pad_vocab_size_multiple=2000))
    output = model.generate(make_tokens(4, 1), 40, top_k=0, temperature=100.0, output_scores=True, return_dict_in_generate=True)
    assert output.sequences.max() < VOCABULARY and output.scores[0].shape == (4, 2000)


def test_traces_and_compiled_code_have_no_check():
    model, tokens = make_model("MinGRU", dtype=torch.float32).eval(), make_tokens(1, 4)
    exported = torch.export.export(model, (tokens,), strict=False)
    assert not any("aminmax" in str(node.target) for node in exported.graph.nodes)
    with torch.device("meta"):
        assert MambaLM(make_config("MinGRU"))(torch.zeros(1, 3, dtype=torch.int64)).logits.is_meta
    with torch.no_grad():
        traced = make_fx(lambda ids: model.backbone(ids))(tokens)
    assert not any("aminmax" in str(node.target) for node in traced.graph.nodes)
    many = torch.vmap(model.backbone, randomness="same")(tokens[None].expand(2, -1, -1))
    assert many.shape == (2, 1, 4, 16)


def test_steps_of_a_cache():
    model = make_model("MinGRU")
    cache = InferenceParams(8, 1, key_value_memory_dict=model.allocate_inference_cache(1, 8))
    model(make_tokens(1, 3), inference_params=cache)
    cache.seqlen_offset = 3
    with pytest.raises(ValueError, match=sentence("MixerModel", "input_ids", 22, 22)):
        model(torch.tensor([[22]]), inference_params=cache)


@pytest.mark.cuda
def test_cuda_does_not_wait():
    import helpers

    model, tokens = make_model("MinGRU", "cuda"), make_tokens(2, 5, device="cuda")
    model(tokens, labels=tokens)
    with helpers.no_synchronization():
        model(tokens, labels=tokens)
    with pytest.raises(ValueError, match=sentence(r"MambaLM\.generate", "input_ids", 0, 21)):
        model.generate(torch.tensor([[0, 21]], device="cuda"), 5, eos_token_id=1)
