"""Options of MambaLM.generate are those of transformers: its logits processors and its generate give the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers_models import MODELS, tokens, without_tf32

from ssm_kernels.models import MambaLM
from ssm_kernels.models.sampling import SeenTokens, process

CLIENT = "transformers"
__all__ = ["without_tf32"]

# In the order in which transformers applies them.
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.3},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
]
WARPERS = {
    "temperature": transformers.TemperatureLogitsWarper,
    "top_k": transformers.TopKLogitsWarper,
    "top_p": transformers.TopPLogitsWarper,
    "min_p": transformers.MinPLogitsWarper,
}


def make_logits() -> Tensor:
    return 2 * torch.randn(6, 50, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_scores_are_those_of_the_warpers(options):
    logits, none = make_logits(), {"temperature": 1.0, "top_k": 0, "top_p": 0.0, "min_p": 0.0}
    expected = logits
    for name, value in options.items():
        expected = WARPERS[name](value)(None, expected)
    # Ours subtract the largest logit before a temperature divides.
    torch.testing.assert_close(process(logits, **none | options).log_softmax(-1), expected.log_softmax(-1))


def test_repetition_penalty_is_that_of_the_processor():
    logits, prompt = make_logits(), torch.randint(50, (6, 9), generator=torch.Generator().manual_seed(1))
    seen, processor = SeenTokens(prompt, None, 50, 1.3), transformers.RepetitionPenaltyLogitsProcessor(1.3)
    torch.testing.assert_close(seen.penalize(logits), processor(prompt, logits.clone()), rtol=0, atol=0)
    seen.add(prompt[:, 0] // 2)
    longer = torch.cat([prompt, prompt[:, :1] // 2], dim=1)
    torch.testing.assert_close(seen.penalize(logits), processor(longer, logits.clone()), rtol=0, atol=0)


@pytest.mark.parametrize("model", ["Mamba", "Mamba2"])
def test_generate_is_that_of_transformers(model, tmp_path):
    """Greedy, with several tokens that end a sequence, a penalty, and prompts that are padded on the left."""
    theirs = MODELS[model].make(tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path)
    ours, ids = MambaLM.from_pretrained(tmp_path), tokens(3, 7, "cpu")
    options: dict[str, Any] = {"max_new_tokens": 12, "repetition_penalty": 1.2, "pad_token_id": 0}
    free = ours.generate(ids, temperature=0, **options)
    options["eos_token_id"] = [int(free[0, 10]), int(free[1, 12])]
    found = ours.generate(ids, temperature=0, output_scores=True, **options)
    expected = theirs.generate(ids, do_sample=False, return_dict_in_generate=True, output_scores=True, **options)
    assert torch.equal(found.sequences, expected.sequences) and len(found.scores) == len(expected.scores)
    running = (found.sequences[:, 7:] != 0).long()  # after a sequence's end scores have no meaning
    for t, scores in enumerate(zip(found.scores, expected.scores, strict=True)):
        rows = running[:, t] != 0
        torch.testing.assert_close(*(score[rows] for score in scores), rtol=1e-4, atol=1e-4)
    # The penalty of transformers counts padding as a token: without it, masks mean the same.
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, :1] = 0
    arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 8, "pad_token_id": 0}
    padded = ids.masked_fill(mask == 0, 0)
    assert torch.equal(ours.generate(padded, temperature=0, **arguments), theirs.generate(padded, do_sample=False, **arguments))


@pytest.mark.parametrize("model", ["Mamba", "Mamba2"])
def test_loss_is_that_of_transformers(model, tmp_path):
    theirs = MODELS[model].make()
    theirs.save_pretrained(tmp_path)
    ours, ids = MambaLM.from_pretrained(tmp_path), tokens(2, 9, "cpu")
    labels = ids.clone()
    labels[0, 5:] = -100
    torch.testing.assert_close(ours(ids, labels=labels).loss, theirs(ids, labels=labels).loss, rtol=1e-4, atol=1e-5)
    embeds = theirs.get_input_embeddings()(ids)
    actual, expected = ours(inputs_embeds=embeds, labels=labels), theirs(inputs_embeds=embeds, labels=labels)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-4, atol=1e-5)
