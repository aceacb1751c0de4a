"""Options of MambaLM.generate are those of transformers: its logits processors and its generate give the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.17", reason="the tests run models of transformers, in the extra [clients]")

import transformers
from transformers_models import MODELS, tokens, without_tf32

from ssm_kernels.models import MambaConfig, MambaLM
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


def test_trainer(tmp_path):
    """transformers' Trainer with padded batches: it finds the loss, and the logits of an evaluation."""
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = MambaLM(MambaConfig(d_model=16, n_layer=1, vocab_size=40))
    before = model.lm_head.weight.detach().clone()
    lengths = [9, 4, 7, 2]
    rows = [{"input_ids": torch.randint(40, (9,)), "attention_mask": (torch.arange(9) < length).long()} for length in lengths]
    data = [row | {"labels": row["input_ids"]} for row in rows]
    options: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=1, per_device_eval_batch_size=4, learning_rate=1e-2, **options
    )

    class Trainer(transformers.Trainer):
        """As docs/models.md says: its own saving knows no tied weights."""

        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            self.model.save_pretrained(output_dir)

    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    assert not torch.equal(model.lm_head.weight, before)
    saved = MambaLM.from_pretrained(tmp_path / "checkpoint-1")
    torch.testing.assert_close(saved.lm_head.weight, model.lm_head.weight, rtol=0, atol=0)
    Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    found = trainer.predict(data)
    ids, mask = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "attention_mask"))
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, labels=ids)
    torch.testing.assert_close(torch.from_numpy(found.predictions), expected.logits)
    assert found.metrics["test_loss"] == pytest.approx(expected.loss.item(), rel=1e-5)


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
