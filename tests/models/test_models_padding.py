"""MambaLM on prompts of unequal lengths, with attention_mask, labels and inputs_embeds: each row is what it is alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import says
from layer_helpers import assert_same_gradients
from model_helpers import VOCABULARY, every_mixer, make_model, make_talker, make_tokens
from plain_layers import parameters_of
from torch import Tensor

from ssm_kernels.models import CausalLMLossOutput, GenerationOutput, InferenceParams, MambaLM, MixerModel

OPERATOR = "selective_scan"  # the devices of all the mixers' operators
# One is shorter than the convolution, and one as long as the batch.
LENGTHS = (5, 1, 9, 2)


def make_rows(device: str = "cpu") -> list[Tensor]:
    return [make_tokens(length, device=device, seed=i) for i, length in enumerate(LENGTHS)]


def padded(rows: list[Tensor], side: str, fill: int = -1) -> tuple[Tensor, Tensor]:
    """Rows with padding outside the vocabulary, and their mask."""
    longest = max(row.shape[0] for row in rows)

    def pad(row: Tensor, value: int) -> Tensor:
        missing = longest - row.shape[0]
        return F.pad(row, (missing, 0) if side == "left" else (0, missing), value=value)

    return torch.stack([pad(row, fill) for row in rows]), torch.stack([pad(torch.ones_like(row), 0) for row in rows])


# ----- generation


@every_mixer
def test_prompts_of_unequal_lengths_are_generated_as_alone(mixer, device):
    model, rows = make_talker(mixer, device), make_rows(device)
    longest = max(LENGTHS)
    alone = [model.generate(row[None], max_new_tokens=8, temperature=0, output_scores=True) for row in rows]
    left, right = padded(rows, "left", 3), padded(rows, "right", 3)
    calls: dict[str, tuple[Any, dict[str, Any]]] = {
        "tensors": (rows, {}),
        "lists": ([row.tolist() for row in rows], {}),
        "left": (left[0], {"attention_mask": left[1]}),
        "right": (right[0], {"attention_mask": right[1].bool()}),
    }
    for name, (prompts, options) in calls.items():
        found = model.generate(prompts, max_new_tokens=8, temperature=0, pad_token_id=3, output_scores=True, **options)
        assert isinstance(found, GenerationOutput) and found.sequences.shape == (4, longest + 8)
        assert torch.equal(found.sequences[:, :longest], left[0]), name
        for i, single in enumerate(alone):
            assert torch.equal(found.sequences[i, longest:], single.sequences[0, LENGTHS[i] :]), name
            torch.testing.assert_close(torch.stack(found.scores)[:, i], torch.stack(single.scores)[:, 0])
    equal = [row.tolist() for row in make_tokens(2, 4)]
    assert model.generate(equal, max_length=9, temperature=0).shape == (2, 9)
    assert model.generate([row.int() for row in rows], 10).dtype == torch.int32


@every_mixer
def test_padding_between_the_tokens_of_a_prompt(mixer, device):
    """The model sees the other tokens only; numbers of padding, in the vocabulary or not, stay in the result, on the left."""
    model = make_talker(mixer, device)
    tokens = torch.tensor([[3, -7, 5, 99, 2, 1], [4, 6, 0, 8, -1, -2], [1, 2, 3, 4, 5, 6]], device=device)
    mask = torch.tensor([[1, 0, 1, 0, 0, 1], [0, 1, 1, 1, 0, 0], [1] * 6], device=device)
    moved = torch.tensor([[-7, 99, 2, 3, 5, 1], [4, -1, -2, 6, 0, 8], [1, 2, 3, 4, 5, 6]], device=device)
    options: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0, "repetition_penalty": 1.5, "output_scores": True}
    for given in (mask, mask.bool(), mask.double()):
        found = model.generate(tokens, attention_mask=given, pad_token_id=20, **options)
        assert torch.equal(found.sequences[:, :6], moved)
        for i, (row, is_token) in enumerate(zip(tokens, mask.bool(), strict=True)):
            alone = model.generate(row[is_token][None], **options)
            assert torch.equal(found.sequences[i, 6:], alone.sequences[0, -5:])
            torch.testing.assert_close(torch.stack(found.scores)[:, i], torch.stack(alone.scores)[:, 0])


@every_mixer
def test_masked_pieces_continue_from_the_cache(mixer):
    """Chunks of unequal lengths, one of which has no token, one after another, and then steps."""
    model, rows = make_model(mixer), [make_tokens(length, seed=i) for i, length in enumerate((7, 3, 6))]
    pieces = [[rows[0][:2], rows[1][:3], rows[2][:0]], [rows[0][2:], rows[1][3:], rows[2][:5]]]
    params = InferenceParams(9, 3)
    with torch.no_grad():
        for piece in pieces:
            ids, mask = padded(piece, "right")
            logits = model(ids, attention_mask=mask, inference_params=params).logits
            params.seqlen_offset += ids.shape[1]
        torch.testing.assert_close(logits[0, :5], model(rows[0][None]).logits[0, 2:])
        torch.testing.assert_close(logits[2, :5], model(rows[2][None, :5]).logits[0])
        step = model(make_tokens(3, 1), inference_params=params).logits[:, 0]
    for i, length in enumerate((7, 3, 5)):
        whole = torch.cat([rows[i][:length], make_tokens(3, 1)[i]])
        torch.testing.assert_close(step[i], model(whole[None]).logits[0, -1])


def test_ends_and_padding():
    """Several tokens end a sequence; the rest is pad_token_id, and the longest row cuts."""
    model, rows = make_talker("MinGRU"), make_rows()
    free = model.generate(rows, max_new_tokens=12, temperature=0)[:, max(LENGTHS) :]
    for eos in ([int(free[0, 3]), int(free[2, 5])], (int(free[1, 1]),), [*range(VOCABULARY)]):
        ends = [next((t for t, token in enumerate(row.tolist()) if token in eos), 11) for row in free]
        found = model.generate(rows, max_new_tokens=12, temperature=0, eos_token_id=eos, pad_token_id=20, output_scores=True)
        new = found.sequences[:, max(LENGTHS) :]
        assert new.shape[1] == len(found.scores) == max(ends) + 1
        for i, end in enumerate(ends):
            assert torch.equal(new[i, : end + 1], free[i, : end + 1]) and (new[i, end + 1 :] == 20).all()


def test_repetition_penalty_and_scores():
    model, rows = make_talker("Mamba"), make_rows()
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0, "repetition_penalty": 1e30}
    found = model.generate(rows, **options)
    for row, prompt in zip(found, rows, strict=True):
        # No token comes twice, and padding does not count as a token of the row.
        new = row[max(LENGTHS) :].tolist()
        assert len({*new}) == 6 and not {*new} & {*prompt.tolist()}
        assert torch.equal(model.generate(prompt[None], **options)[0, -6:], row[-6:])
    drawn = model.generate(rows, max_new_tokens=6, top_k=3, output_scores=True, generator=torch.Generator().manual_seed(0))
    plain = model.generate(rows, max_new_tokens=6, top_k=3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn.sequences, plain)  # scores change no token
    assert all(((score > -torch.inf).sum(dim=1) == 3).all() and score.shape == (4, VOCABULARY) for score in drawn.scores)


# ----- training


@pytest.mark.parametrize("side", ["left", "right"])
@every_mixer
def test_padding_changes_nothing(mixer, side, device):
    model, rows = make_model(mixer, device), make_rows(device)
    ids, mask = padded(rows, side)
    logits = model(ids, attention_mask=mask).logits
    assert not logits[mask == 0].any()
    actual = logits[mask != 0]
    expected = torch.cat([model(row[None]).logits[0] for row in rows])
    torch.testing.assert_close(actual, expected)
    assert_same_gradients(actual, expected, parameters_of(model), rtol=1e-7, atol=1e-9)
    backbone = MixerModel(model.config, dtype=torch.float64).to(device)
    backbone.load_state_dict(model.backbone.state_dict())
    torch.testing.assert_close(
        backbone(ids, attention_mask=mask.bool())[mask != 0], backbone(ids.clamp(0), attention_mask=mask)[mask != 0]
    )


def expected_loss(model: MambaLM, rows: list[Tensor]) -> Tensor:
    """The mean over all tokens that follow one of their row."""
    logits = torch.cat([model(row[None]).logits[0, :-1] for row in rows])
    return F.cross_entropy(logits, torch.cat([row[1:] for row in rows]))


@every_mixer
def test_labels(mixer, device):
    model, rows = make_model(mixer, device), make_rows(device)
    expected = expected_loss(model, rows)
    packed = torch.cat(rows)[None]
    ends = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
    seq_idx = torch.arange(4, device=device).repeat_interleave(torch.tensor(LENGTHS, device=device))[None].int()
    calls = [(padded(rows, side), {}) for side in ("left", "right")]
    losses = [model(ids, attention_mask=mask, labels=ids.clamp(0)).loss for (ids, mask), _ in calls]
    losses.append(model(packed, labels=packed, cu_seqlens=ends).loss)
    if mixer in ("Mamba", "Mamba2"):
        losses.append(model(packed, labels=packed.int(), seq_idx=seq_idx).loss)
    ids, mask = padded(rows, "right")
    losses.append(model(ids.clamp(0), labels=ids.where(mask != 0, -100)).loss)
    for loss in losses:
        torch.testing.assert_close(loss, expected)
    assert_same_gradients(losses[0], expected, parameters_of(model), rtol=1e-7, atol=1e-9)


def test_loss_is_float32_and_comes_first():
    model, ids = make_model("Mamba", dtype=torch.bfloat16), make_tokens(2, 9)
    output = model(ids, labels=ids)
    assert isinstance(output, CausalLMLossOutput) and output[0] is output.loss
    assert output.loss.dtype == torch.float32 and output.logits.dtype == torch.bfloat16
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected, rtol=0, atol=0)
    assert model(ids, labels=torch.full_like(ids, -100)).loss.isnan()


@every_mixer
def test_inputs_embeds(mixer, device):
    model, rows = make_model(mixer, device), make_rows(device)
    ids, mask = padded(rows, "left", 0)
    embeds = model.backbone.embedding(ids).detach().requires_grad_()
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, model(ids).logits)
    output = model(inputs_embeds=embeds, attention_mask=mask, labels=ids)
    torch.testing.assert_close(output.logits, model(ids, attention_mask=mask).logits)
    (grad,) = torch.autograd.grad(output.loss, embeds)
    assert grad[mask != 0].any() and not grad[mask == 0].any()
    # The values in the padding, even NaN, reach nothing.
    dirty = embeds.detach().masked_fill(mask[..., None] == 0, torch.nan)
    torch.testing.assert_close(model(inputs_embeds=dirty, attention_mask=mask).logits, output.logits)


def test_bad_inputs():
    model, ids = make_model("Mamba"), make_tokens(2, 3)
    embeds = torch.zeros(2, 3, 16, dtype=torch.float64)
    ends = torch.tensor([0, 3])
    calls: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({}, ValueError, "expected input_ids or inputs_embeds, got neither"),
        ({"input_ids": ids, "inputs_embeds": embeds}, ValueError, "expected input_ids or inputs_embeds, got both"),
        (
            {"inputs_embeds": embeds[..., :3]},
            ValueError,
            "expected inputs_embeds of shape (batch, seqlen, d_model) with d_model = 16",
        ),
        ({"inputs_embeds": embeds.long()}, TypeError, "expected inputs_embeds of a floating-point dtype, got torch.int64"),
        ({"inputs_embeds": embeds.to("meta")}, RuntimeError, "expected inputs_embeds on the model's device, cpu, got meta"),
        ({"input_ids": ids.to("meta")}, RuntimeError, "expected input_ids on the model's device, cpu, got meta"),
        ({"input_ids": ids, "attention_mask": ids[:, :2]}, ValueError, "expected attention_mask of shape (batch, seqlen)"),
        ({"input_ids": ids, "attention_mask": ids.to("meta")}, RuntimeError, "expected attention_mask on cpu"),
        ({"input_ids": ids, "attention_mask": ids.cfloat()}, TypeError, "expected attention_mask of bool, integers or real"),
        ({"input_ids": ids, "attention_mask": ids, "cu_seqlens": ends}, ValueError, "expected attention_mask or cu_seqlens"),
    ]
    for arguments, error, words in calls:
        for call in (model, model.backbone):
            with pytest.raises(error, match=says(words)):
                call(**arguments)
    with pytest.raises(RuntimeError, match=says("expected input_ids on the model's device, cpu, got meta")):
        model.generate(ids.to("meta"), 5)
    assert make_model("Mamba").to("meta")(ids.to("meta")).logits.is_meta
    model.backbone.layers[1].mixer.operators = SimpleNamespace(is_local=False)
    for name in ("labels", "attention_mask"):
        with pytest.raises(ValueError, match=says(f"MixerModel: expected no {name} with context parallelism")):
            model(ids, **{name: ids})


def test_offloaded_weights_are_not_at_rest_on_the_inputs_device():
    """A hook that brings the weights, as accelerate's, is not refused."""
    model, ids = make_model("Mamba"), make_tokens(1, 3)
    expected = model(ids).logits
    embedding = model.backbone.embedding
    kept = embedding.weight
    embedding.weight = torch.nn.Parameter(kept.detach().to("meta"))
    embedding.register_forward_pre_hook(lambda module, _: setattr(module, "weight", kept))
    torch.testing.assert_close(model(ids).logits, expected)
