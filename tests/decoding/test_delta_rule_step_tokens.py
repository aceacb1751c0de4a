"""delta_rule_step as servers call it: out, slots to read and to write, several tokens, states of every token."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from delta_rule_step_helpers import (
    DTYPES,
    GATES,
    SLOTS,
    WRITTEN,
    decode,
    decode_by_steps,
    make_inputs,
    make_token_inputs,
    step,
)
from helpers import LAYOUTS, arrange, assert_as_accurate, captured, says
from operator_spec import as_float64
from torch import Tensor

from ssm_kernels import delta_rule_step, reference

OPERATOR = "delta_rule_step"

every_dtype = pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES, ids=lambda d: str(d).removeprefix("torch."))
# Options of make_token_inputs: rows and tokens, and what chooses slots.
CALLS: dict[str, dict[str, Any]] = {
    "out": {},
    "out_without_slots": {"columns": 0},
    "destination": {"destination": 0},
    "tokens": {"tokens": 4},
    "tokens_without_slots": {"tokens": 3, "columns": 0},
    "tokens_destination": {"tokens": 3, "destination": 0},
    "tokens_each_destination": {"tokens": 3, "destination": 4},
    "accepted": {"batch": 3, "tokens": 2, "columns": 3, "destination": 2},
    "accepted_in_place": {"batch": 3, "tokens": 3, "columns": 3},
    "packed": {"packed": (0, 2, 2, 5, 6)},
    "packed_accepted": {"packed": (0, 3, 3, 4), "columns": 3},
    "packed_each_destination": {"packed": (0, 3, 4), "destination": 3},
    "intermediate": {"tokens": 3, "intermediate": 4},
    "packed_intermediate": {"packed": (0, 1, 4), "intermediate": 3},
}
every_call = pytest.mark.parametrize("call", CALLS)


def assert_matches(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """As many calls of one row and one token give the same bits."""
    actual, expected = decode(inputs), decode_by_steps(inputs)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name
    return actual


def assert_matches_reference(inputs: dict[str, Any]) -> None:
    """The float64 reference, by the low-precision rule below float64."""
    actual = decode(inputs)
    exact = decode_by_steps(as_float64(inputs), reference.delta_rule_step)
    if inputs["q"].dtype == torch.float64:
        for name, value in actual.items():
            torch.testing.assert_close(value, exact[name], rtol=1e-12, atol=1e-12)
        return
    native = decode_by_steps(inputs, reference.delta_rule_step)
    for name, value in actual.items():
        assert_as_accurate(value, native[name].to(value.dtype), exact[name], name)


@every_call
@every_dtype
def test_equals_steps_of_one_token(dtype, state_dtype, call, device):
    for key_dim, gate, updates in ((3, "head", 1), (16, "column", 2), (136, "head", 1), (264, None, 1)):
        options = {"key_dim": key_dim, "gate": gate, "num_householder": updates, "qk_l2norm": True}
        inputs = make_token_inputs(**CALLS[call], **options, dtype=dtype, state_dtype=state_dtype, device=device)
        results = assert_matches(inputs)
        assert results["out"].count_nonzero()
        assert not torch.equal(results["states"], inputs["states"])


@pytest.mark.parametrize("gate", GATES)
@every_call
def test_matches_reference(call, gate, device):
    for dtype, state_dtype in DTYPES:
        options = {"gate": gate, "dtype": dtype, "state_dtype": state_dtype, "device": device}
        assert_matches_reference(make_token_inputs(**CALLS[call], **options))


@pytest.mark.parametrize("updates", [1, 2])
def test_tokens_equal_the_reference_of_tokens(updates, device):
    for gate, tokens in itertools.product(GATES, (1, 5)):
        options = {"tokens": tokens, "gate": gate, "num_householder": updates, "A_log": gate is not None, "device": device}
        inputs = make_inputs(**options, beta_sigmoid=True, allow_neg_eigval=True, qk_l2norm=True)
        exact = reference.delta_rule_step(**inputs)
        for actual, expected in zip(step(inputs), exact, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, index_dtype, device):
    for call, key_dim in itertools.product(("accepted", "packed_intermediate"), (3, 16)):
        for dtype, state_dtype in DTYPES:
            options = {"key_dim": key_dim, "dtype": dtype, "state_dtype": state_dtype, "index_dtype": index_dtype}
            inputs = make_token_inputs(**CALLS[call], **options, gate="column", device=device)
            expected = decode(inputs)
            laid_out = {
                name: arrange(x, layout) for name, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()
            }
            tables = {n: x.repeat_interleave(2, -1)[..., ::2] for n, x in inputs.items() if n.endswith("_indices") and x.dim()}
            copies = {name: arrange(inputs[name].clone(), layout) for name in WRITTEN if name in inputs}
            delta_rule_step(**inputs | laid_out | tables | copies)
            for name, value in copies.items():
                assert torch.equal(value, expected[name])


def test_sizes_of_models(device):
    for state_dtype in (torch.float32, torch.bfloat16):
        options = {"batch": 3, "heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "qk_l2norm": True}
        inputs = make_token_inputs(
            **options, tokens=3, destination=3, dtype=torch.bfloat16, state_dtype=state_dtype, device=device
        )
        assert_matches(inputs)


def test_padding_of_slots(device):
    """Negative indices and pad_slot_id, in every table: what is padding stays as it is, or poisoned."""
    for key_dim in (16, 13):
        inputs = make_token_inputs(
            **CALLS["tokens_each_destination"], batch=3, intermediate=3, key_dim=key_dim, dtype=torch.float32, device=device
        )
        read, write = inputs["state_batch_indices"], inputs["dst_state_batch_indices"]
        inputs["pad_slot_id"] = 0
        read[1], write[0, 1], write[2, 2], inputs["intermediate_state_indices"][2] = -1, -7, 0, 0
        used = {int(read[0]), int(read[2])}
        inputs["states"][[slot for slot in range(SLOTS) if slot not in used]] = math.nan
        actual, expected = decode(inputs), decode_by_steps(inputs)
        for name, value in actual.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0, equal_nan=True)
        assert actual["out"][1].count_nonzero() == 0 and actual["out"].isfinite().all()


@pytest.mark.parametrize("call", ["out", "tokens", "packed"])
def test_states_that_are_not_updated(call, device):
    inputs = make_token_inputs(**CALLS[call], device=device)
    expected = decode(inputs)
    actual = decode(inputs | {"disable_state_update": True})
    assert torch.equal(actual["out"], expected["out"]) and torch.equal(actual["states"], inputs["states"])


def test_tokens_behind_the_last_sequence(device):
    """They are padding: out stays as it was, or is zero where the function makes it."""
    for key_dim in (16, 13):
        inputs = make_token_inputs(packed=(0, 2, 3), key_dim=key_dim, dtype=torch.float32, device=device)
        names = ("q", "k", "v", "beta", "g", "out")
        padded = inputs | {name: torch.cat([inputs[name], torch.full_like(inputs[name], math.nan)]) for name in names}
        expected, actual = decode(inputs), decode(padded)
        assert torch.equal(actual["out"][:3], expected["out"]) and actual["out"][3:].isnan().all()
        assert torch.equal(actual["states"], expected["states"])
        out = delta_rule_step(**padded | {"out": None, "states": inputs["states"].clone()})
        assert torch.equal(out[:3], expected["out"]) and out[3:].count_nonzero() == 0


def test_out_may_have_any_strides(device):
    inputs = make_token_inputs(tokens=3, dtype=torch.bfloat16, device=device)
    expected = decode(inputs)["out"]
    for layout in LAYOUTS:
        out = arrange(inputs["out"].clone(), layout)
        assert delta_rule_step(**inputs | {"states": inputs["states"].clone(), "out": out}) is out
        assert torch.equal(out, expected)


BAD_VALUES = {
    "slot": ({"tokens": 2}, "state_batch_indices", (0,), SLOTS, "expected state_batch_indices below the number of slots"),
    "destination": ({"destination": 0}, "dst_state_batch_indices", (1,), 24, "expected dst_state_batch_indices below"),
    "accepted": (CALLS["accepted"], "num_accepted_tokens", (1,), 4, "expected num_accepted_tokens from 0 to 3, got 4"),
    "cu_seqlens": (CALLS["packed"], "cu_seqlens", (1,), 7, "expected cu_seqlens"),
    "entry": (CALLS["intermediate"], "intermediate_state_indices", (0,), 4, "expected intermediate_state_indices below"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_bad_values_on_the_cpu(case):
    call, name, place, value, message = BAD_VALUES[case]
    inputs = make_token_inputs(**call)
    inputs[name][place] = value
    before = inputs["states"].clone()
    with pytest.raises(ValueError, match=says("delta_rule_step: ", message)):
        delta_rule_step(**inputs)
    assert torch.equal(inputs["states"], before)


@pytest.mark.cuda
def test_slots_past_the_last_one():
    for key_dim in (16, 13):
        inputs = make_token_inputs(tokens=3, destination=3, intermediate=3, key_dim=key_dim, dtype=torch.float32, device="cuda")
        expected = decode(inputs)
        inputs["state_batch_indices"][1], inputs["dst_state_batch_indices"][0, 1] = SLOTS, SLOTS + 5
        inputs["intermediate_state_indices"][0] = 99
        found = decode(inputs)
        assert found["out"][1].isnan().all() and torch.equal(found["out"][0], expected["out"][0])
        unwritten = [*inputs["dst_state_batch_indices"][1].tolist()]
        assert torch.equal(found["states"][unwritten], inputs["states"][unwritten])
        assert (found["intermediate_states_buffer"] == 7).all()


@pytest.mark.cuda
@pytest.mark.parametrize("call", ["tokens_each_destination", "packed_accepted", "packed_intermediate"])
def test_cuda_graph(call):
    """A captured call replays on new values, the tables' and the lengths' too."""
    draws = [make_token_inputs(**CALLS[call], seed=s, dtype=torch.float32, device="cuda") for s in range(3)]
    for shift, draw in enumerate(draws):
        draw["state_batch_indices"] = (draw["state_batch_indices"] + 2 * shift) % SLOTS
        if "cu_seqlens" in draw:
            draw["cu_seqlens"][1:-1] -= min(shift, 1)
    static = {k: v.clone() if isinstance(v, Tensor) else v for k, v in draws[0].items()}
    graph, _ = captured(lambda: delta_rule_step(**static))
    for draw in draws:
        for name, value in draw.items():
            if isinstance(value, Tensor):
                static[name].copy_(value)
        graph.replay()
        for name, value in decode(draw).items():
            torch.testing.assert_close(static[name], value, rtol=0, atol=0, equal_nan=True)
