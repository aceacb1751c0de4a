"""Decoding steps as servers call them: out, slots to read and to write, several tokens, states of every token."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from decoding_helpers import CALLS, SERVER_STEPS, SLOTS, ServerStep
from helpers import LAYOUTS, arrange, captured, says, split
from operator_spec import TRACED, UNTRACED
from selective_scan_helpers import STEP_DTYPES
from torch import Tensor

OPERATOR = "every operator"

every_step = pytest.mark.parametrize("step", SERVER_STEPS.values(), ids=SERVER_STEPS)
every_call = pytest.mark.parametrize("call", CALLS)


def padded_with_nan(step: ServerStep, inputs: dict[str, Any], padding: int) -> dict[str, Any]:
    """Tokens of NaN behind packed ones."""
    padded = dict(inputs)
    for name in step.sequences:
        if (value := inputs.get(name)) is not None:
            count = padding * (inputs.get("num_householder", 1) if name in step.updates else 1)
            padded[name] = torch.cat([value, value.new_full((count, *value.shape[1:]), math.nan)])
    return padded


@every_call
@pytest.mark.parametrize(("dtype", "state_dtype"), STEP_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@every_step
def test_equals_steps_of_one_token(step, dtype, state_dtype, call, device):
    for size in step.sizes:
        inputs = step.make_token_inputs(**CALLS[call], **size, dtype=dtype, state_dtype=state_dtype, device=device)
        results = step.assert_matches(inputs)
        assert results["out"].count_nonzero()
        assert not torch.equal(results[step.state], inputs[step.state])


@every_call
@every_step
def test_matches_reference(step, call, device):
    for form, (dtype, state_dtype) in itertools.product(step.forms, STEP_DTYPES):
        kinds = {"dtype": dtype, "state_dtype": state_dtype, "device": device}
        step.assert_matches_reference(step.make_token_inputs(**CALLS[call], **form, **kinds))


@pytest.mark.parametrize("call", ["accepted", "packed_intermediate"])
@every_step
def test_layouts(step, call, device):
    """Any strides of every tensor, the tables' too, and both dtypes of tables."""
    for (dtype, state_dtype), layout, index_dtype in itertools.product(STEP_DTYPES, LAYOUTS, (torch.int32, torch.int64)):
        kinds = {"dtype": dtype, "state_dtype": state_dtype, "index_dtype": index_dtype}
        inputs = step.make_token_inputs(**CALLS[call], **step.sizes[1], **kinds, device=device)
        expected = step.decode(inputs)
        laid_out = {name: arrange(x, layout) for name, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
        tables = {
            n: x.repeat_interleave(2, -1)[..., ::2] for n, x in inputs.items() if n.endswith("_indices") and x is not None
        }
        actual = step.decode(inputs | laid_out | tables)
        for name, value in actual.items():
            eps = 0 if step.same_bits else torch.finfo(value.dtype).eps
            torch.testing.assert_close(value, expected[name], rtol=4 * eps, atol=64 * eps)


@every_step
def test_tokens_without_other_arguments(step, device):
    """The operator of one step takes them too."""
    for call in ("tokens", "tokens_without_slots", "accepted_in_place"):
        inputs = step.make_token_inputs(**CALLS[call], **step.sizes[1], out=False, device=device)
        inputs.pop("num_accepted_tokens", None)
        step.assert_matches(inputs)


# ----- slots


@pytest.mark.parametrize("pad", [None, 5])
@every_step
def test_padding(step, pad, device):
    """A row whose slot is padding reads and writes nothing, whatever its inputs are; a state without a slot is not written."""
    value = -1 if pad is None else pad
    for size in step.sizes:
        inputs = step.make_token_inputs(rows=4, tokens=2, intermediate=2, **size, dtype=torch.float32, device=device)
        inputs |= {"pad_slot_id": pad}
        inputs["state_batch_indices"] = torch.tensor([3, value, 0, 7], device=device)
        inputs["dst_state_batch_indices"] = torch.tensor([[1, 2], [6, 8], [-3, 4], [value, value]], device=device)
        inputs["intermediate_state_indices"] = torch.tensor([2, 0, value, 1], device=device)
        for name in step.sequences:
            if inputs[name] is not None:
                inputs[name][1] = math.nan
        results = step.assert_matches(inputs)
        assert results["out"][1].count_nonzero() == 0 and results["out"].isfinite().all()
        changed = (results[step.state] != inputs[step.state]).flatten(1).any(1).nonzero().flatten()
        assert changed.tolist() == [1, 2, 4]
        written = (results["intermediate_states_buffer"] != inputs["intermediate_states_buffer"]).flatten(1).any(1)
        assert written.nonzero().flatten().tolist() == [1, 2]


@every_step
def test_padding_of_every_row(step, device):
    inputs = step.make_token_inputs(tokens=2, device=device)
    inputs["state_batch_indices"].fill_(-1)
    results = step.decode(inputs)
    assert results["out"].count_nonzero() == 0 and torch.equal(results[step.state], inputs[step.state])


@every_step
def test_slots_that_no_row_uses_are_not_read(step, device):
    inputs = step.make_token_inputs(**CALLS["tokens_each_destination"], rows=3, dtype=torch.float32, device=device)
    used = set(inputs["state_batch_indices"].tolist())
    expected = step.decode(inputs)["out"]
    inputs[step.state][[slot for slot in range(SLOTS) if slot not in used]] = math.nan
    assert torch.equal(step.decode(inputs)["out"], expected)


@every_step
def test_rows_share_a_slot_that_none_writes_to(step, device):
    inputs = step.make_token_inputs(rows=3, tokens=2, destination=2, **step.sizes[1], device=device)
    inputs["state_batch_indices"].fill_(4)
    step.assert_matches(inputs)


@every_step
def test_a_row_writes_several_states_to_one_slot(step, device):
    inputs = step.make_token_inputs(rows=2, tokens=3, destination=3, **step.sizes[1], device=device)
    inputs["dst_state_batch_indices"] = torch.tensor([[3, 5, 3], [2, 2, 2]], device=device)
    step.assert_matches(inputs)


@every_step
def test_arguments_that_change_nothing(step, device):
    """The same table to read from and to write to, and padding that is negative anyway, as vLLM passes them."""
    inputs = step.make_token_inputs(rows=3, **step.sizes[1], dtype=torch.float32, device=device)
    inputs["state_batch_indices"][1] = -1
    expected, slots = step.decode(inputs), inputs["state_batch_indices"]
    for same in (slots, slots.clone()):
        actual = step.decode(inputs | {"dst_state_batch_indices": same, "pad_slot_id": -1})
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-6, atol=1e-6)


@every_step
def test_no_state_update(step, device):
    for call in ("out", "tokens", "tokens_each_destination", "packed_intermediate"):
        inputs = step.make_token_inputs(**CALLS[call], **step.sizes[1], device=device) | {"disable_state_update": True}
        results = step.assert_matches(inputs)
        assert torch.equal(results[step.state], inputs[step.state])


@every_step
def test_intermediate_states_without_indices(step, device):
    """Row b writes to entry b; a buffer may have more entries than rows, not fewer."""
    inputs = step.make_token_inputs(rows=3, tokens=2, intermediate=2, device=device)
    del inputs["intermediate_state_indices"]
    buffer = inputs["intermediate_states_buffer"]
    for entries in (3, len(buffer)):
        results = step.assert_matches(inputs | {"intermediate_states_buffer": buffer[:entries]})
        last = results["intermediate_states_buffer"][:3, 1]
        assert torch.equal(last, results[step.state][inputs["state_batch_indices"].long()])
        assert torch.equal(results["intermediate_states_buffer"][3:], buffer[3:entries])
    message = "expected intermediate_states_buffer with an entry for each of 3 rows, or intermediate_state_indices, got [2,"
    with pytest.raises(ValueError, match=says(f"{step.name}: {message}")):
        step.decode(inputs | {"intermediate_states_buffer": buffer[:2]})


# A table, its values and the error on the CPU.
BAD_VALUES: dict[str, tuple[Any, str]] = {
    "state_batch_indices": (
        [[1, 4], [SLOTS, 2]],
        "expected state_batch_indices below the number of slots, 24, got 24 for row 1",
    ),
    "dst_state_batch_indices": (
        [[1, 3], [5, SLOTS]],
        "expected dst_state_batch_indices below the number of slots, 24, got 24 for row 1",
    ),
    "intermediate_state_indices": (
        [0, 4],
        "expected intermediate_state_indices below the number of entries, 4, got 4 for row 1",
    ),
    "num_accepted_tokens": ([1, 3], "expected num_accepted_tokens from 0 to 2, got 3 for row 1"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
@every_step
def test_value_out_of_range(step, name, device):
    """An error on the CPU that leaves the states alone; on CUDA nothing outside of the tensors is read or written."""
    value, message = BAD_VALUES[name]
    for size in step.sizes:
        inputs = step.make_token_inputs(
            tokens=2, columns=2, destination=2, intermediate=2, **size, dtype=torch.float32, device=device
        )
        inputs["num_accepted_tokens"] = torch.tensor([1, 1], device=device)
        inputs[name] = torch.tensor(value, device=device)
        if device == "cpu":
            before = inputs[step.state].clone()
            with pytest.raises(ValueError, match=says(f"{step.name}: {message}")):
                step.function(**inputs)
            assert torch.equal(inputs[step.state], before)
            continue
        results = step.decode(inputs)
        if name == "state_batch_indices":
            assert results["out"][1].isnan().all() and results["out"][0].isfinite().all()
        elif name == "num_accepted_tokens":  # the last column
            assert torch.equal(results["out"], step.decode(inputs | {name: torch.tensor([1, 2], device=device)})["out"])
        else:
            assert results["out"].isfinite().all()


@pytest.mark.parametrize(
    ("read", "write"), [([1, 1], None), ([1, 2], [4, 4]), ([1, 2], [2, 3]), ([1, 2], [[3, 4], [5, 3]])], ids=str
)
@every_step
def test_slot_that_two_rows_use(step, read, write, device):
    if device != "cpu":
        pytest.skip("CUDA does not check: the rows race")
    inputs = step.make_token_inputs(tokens=2, device=device) | {"state_batch_indices": torch.tensor(read)}
    if write is not None:
        inputs["dst_state_batch_indices"] = torch.tensor(write)
    message = f"{step.name}: expected no slot that one row writes to and another row uses, got "
    with pytest.raises(ValueError, match=says(message, "for rows 0 and 1")):
        step.decode(inputs)


@every_step
def test_entry_that_two_rows_use(step, device):
    if device != "cpu":
        pytest.skip("CUDA does not check: the rows race")
    inputs = step.make_token_inputs(tokens=2, intermediate=2, device=device)
    inputs["intermediate_state_indices"] = torch.tensor([3, 3])
    message = (
        "expected no entry of intermediate_state_indices that one row writes to and another row uses, got 3 for rows 0 and 1"
    )
    with pytest.raises(ValueError, match=says(f"{step.name}: {message}")):
        step.decode(inputs)


# ----- packed tokens


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, 2, 5), "expected cu_seqlens to start at 0, got 1"),
        ((0, 6, 5), "expected cu_seqlens not to decrease, got 6 before 5"),
        ((0, 2, 6), "expected cu_seqlens to end at 5, the number of tokens, or before, got 6"),
    ],
)
@every_step
def test_values_of_cu_seqlens(step, value, message, device):
    inputs = step.make_token_inputs(packed=(0, 2, 5), destination=3, intermediate=3, device=device)
    inputs["cu_seqlens"] = torch.tensor(value, device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match=says(f"{step.name}: {message}")):
            step.decode(inputs)
    else:
        step.decode(inputs)
        torch.cuda.synchronize()


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("options", [{}, {"destination": 3, "intermediate": 3}], ids=["slots", "tables"])
@every_step
def test_tokens_after_the_last_sequence_are_padding(step, options, out, device):
    """They hold NaN, touch no state, and their output is zero, or in ``out`` what it was."""
    for size in step.sizes:
        inputs = step.make_token_inputs(packed=(0, 2, 5), out=out, **options, **size, device=device)
        expected = step.decode(inputs)
        for padding in (0, 1, 4):
            padded = padded_with_nan(step, inputs, padding)
            if out:
                padded["out"] = inputs["out"].new_full(tuple(step.out_shape(padded)), 7)
            results = step.decode(padded)
            tail = results["out"][5:]
            assert torch.equal(tail, torch.full_like(tail, 7 if out else 0))
            results["out"] = results["out"][:5]
            torch.testing.assert_close(results, expected, rtol=0, atol=0)
        # Nothing but padding.
        inputs["cu_seqlens"] = torch.zeros_like(inputs["cu_seqlens"])
        assert torch.equal(step.decode(inputs)[step.state], inputs[step.state])


@every_step
def test_sequence_longer_than_a_table(step, device):
    """An error on the CPU; on CUDA the states beyond are not written."""
    table = step.make_token_inputs(packed=(0, 1, 5), destination=3, dtype=torch.float32, device=device)
    buffer = step.make_token_inputs(packed=(0, 1, 5), intermediate=3, dtype=torch.float32, device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match=says("with a column for each token, got 3 columns for 4 tokens of row 1")):
            step.decode(table)
        with pytest.raises(ValueError, match=says("a buffer of intermediate states for 4 tokens of row 1, got 3")):
            step.decode(buffer)
    else:
        assert step.decode(table)["out"].isfinite().all() and step.decode(buffer)["out"].isfinite().all()


# ----- shapes and memory

# The shape of a table or a buffer, and the error; the first sizes of a buffer, where those of a state follow.
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "state_batch_indices": ((2, 1, 3), "expected state_batch_indices of shape (batch,) or (batch, tokens), got [2, 1, 3]"),
    "dst_state_batch_indices": ((2, 2), "expected dst_state_batch_indices with a column for each of 3 tokens, got [2, 2]"),
    "num_accepted_tokens": ((3,), "expected num_accepted_tokens of shape (batch,) = [2], got [3]"),
    "intermediate_states_buffer": ((4, 2), "expected intermediate_states_buffer for 3 tokens, got [4, 2,"),
    "intermediate_state_indices": ((3,), "expected intermediate_state_indices of shape (batch,) = [2], got [3]"),
    # The tokens of a packed x are not in rows.
    "cu_seqlens": ((3,), "of shape (tokens, "),
}


@pytest.mark.parametrize("name", SHAPES)
@every_step
def test_wrong_shape(step, name, device):
    inputs = step.make_token_inputs(tokens=3, columns=3, destination=3, intermediate=3, dtype=torch.float32, device=device)
    shape, message = SHAPES[name]
    is_buffer = name == "intermediate_states_buffer"
    like = inputs[step.state if is_buffer else "state_batch_indices"]
    for on_meta in (False, True):
        changed = inputs | {name: like.new_zeros((*shape, *like.shape[1:]) if is_buffer else shape)}
        if on_meta:
            changed = {key: value.to("meta") if isinstance(value, Tensor) else value for key, value in changed.items()}
        with pytest.raises(ValueError, match=says(f"{step.name}: expected ", message.removeprefix("expected "))):
            step.decode(changed)


@every_step
def test_arguments_that_need_another(step, device):
    inputs = step.make_token_inputs(tokens=3, intermediate=3, device=device)
    with pytest.raises(ValueError, match=says("expected state_batch_indices of two axes with num_accepted_tokens")):
        step.decode(inputs | {"num_accepted_tokens": torch.zeros(2, dtype=torch.int32, device=device)})
    with pytest.raises(ValueError, match=says("expected no intermediate_state_indices without a buffer")):
        step.decode({name: value for name, value in inputs.items() if name != "intermediate_states_buffer"})


@every_step
def test_wrong_dtypes(step, device):
    inputs = step.make_token_inputs(tokens=3, columns=3, destination=3, intermediate=3, dtype=torch.float32, device=device)
    for name in ("out", "intermediate_states_buffer"):
        message = f"expected {name} of dtype float32 (with {step.tokens} of dtype float32), got float16"
        with pytest.raises(RuntimeError, match=says(message)):
            step.decode(inputs | {name: inputs[name].half()})
    for name in ("state_batch_indices", "dst_state_batch_indices", "num_accepted_tokens", "intermediate_state_indices"):
        with pytest.raises(RuntimeError, match=says(f"expected {name} of dtype int32 or int64, got float32")):
            step.decode(inputs | {name: inputs[name].float()})


@every_step
def test_memory_that_is_shared(step, device):
    inputs = step.make_token_inputs(tokens=3, intermediate=3, dtype=torch.float32, device=device)
    state, out, read = inputs[step.state], inputs["out"], inputs[step.tokens]
    before, buffer = state.clone(), inputs["intermediate_states_buffer"]
    memory = torch.zeros(out.numel() + read.numel(), device=device)
    cases = [
        (
            {
                "out": memory[: out.numel()].view(out.shape),
                step.tokens: memory[out.numel() - 1 :][: read.numel()].view(read.shape),
            },
            f"expected {step.tokens} to share no memory with out, which is updated in place",
        ),
        ({"out": state.flatten()[: out.numel()].view(out.shape)}, f"expected out to share no memory with {step.state}"),
        ({"out": out.new_empty(2, 1, *out.shape[2:]).expand(out.shape)}, "expected out, which is updated in place, to have"),
        (
            {"intermediate_states_buffer": state[:12].view(buffer.shape)},
            f"expected intermediate_states_buffer to share no memory with {step.state}",
        ),
    ]
    for changed, message in cases:
        with pytest.raises(RuntimeError, match=says(f"{step.name}: {message}")):
            step.function(**inputs | changed)
        assert torch.equal(state, before)


@pytest.mark.parametrize("options", [{"rows": 0}, {"tokens": 0}, {"packed": (0, 0, 0)}], ids=str)
@every_step
def test_nothing_to_do(step, options, device):
    inputs = step.make_token_inputs(**options, device=device)
    results = step.decode(inputs)
    assert results["out"].shape == tuple(step.out_shape(inputs)) and torch.equal(results[step.state], inputs[step.state])


# ----- as an operator of PyTorch


def opcheck(step: ServerStep, call: str, device: str, checks: tuple[str, ...]) -> None:
    inputs = {"dt_limit": None, "A_is_log": False} | step.make_token_inputs(**CALLS[call], **step.sizes[1], device=device)
    torch.library.opcheck(step.operator.default, *split(step.operator, inputs), test_utils=checks)


@every_call
@every_step
def test_opcheck(step, call, device):
    """Traces the first call and the last one."""
    opcheck(step, call, device, TRACED if call in (next(iter(CALLS)), [*CALLS][-1]) else UNTRACED)


@pytest.mark.exhaustive
@every_call
@every_step
def test_opcheck_traced(step, call, device):
    opcheck(step, call, device, TRACED)


@every_step
def test_versions_are_counted(step, device):
    inputs = step.make_token_inputs(tokens=2, intermediate=2, device=device)
    versions = {name: inputs[name]._version for name in step.written}
    step.function(**inputs)
    assert {name: inputs[name]._version for name in step.written} == {name: v + 1 for name, v in versions.items()}
    step.function(**inputs | {"disable_state_update": True})
    assert inputs[step.state]._version == versions[step.state] + 1


@every_step
def test_lazy_copies_stay_lazy(step, device):
    originals = step.make_token_inputs(packed=(0, 2, 3), columns=2, destination=2, intermediate=2, device=device)
    expected = step.decode(originals)
    inputs = {name: torch._lazy_clone(x) if isinstance(x, Tensor) else x for name, x in originals.items()}
    step.function(**inputs)
    assert all(torch.equal(inputs[name], value) for name, value in expected.items())
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    assert {name for name, x in tensors.items() if not torch._C._is_cow_tensor(x)} == set(step.written)


@every_step
def test_is_not_differentiable(step, device):
    inputs = step.make_token_inputs(tokens=2, **step.sizes[1], device=device)
    inputs[step.parameter].requires_grad_()
    with pytest.raises(NotImplementedError, match=says(f"{step.name}: decoding is not differentiable: train with")):
        step.decode(inputs)
    with torch.no_grad():
        step.assert_matches(inputs)


@pytest.mark.parametrize("call", ["out", "accepted", "packed_intermediate", "tokens_each_destination"])
@every_step
def test_compile(step, call, device, fresh_dynamo):
    inputs = step.make_token_inputs(**CALLS[call], **step.sizes[1], device=device)

    def function(**inputs):
        return step.function(**inputs) * 2 + inputs[step.state].sum()

    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        copies = {name: inputs[name].clone() for name in step.written if name in inputs}
        results.append((run(**inputs | copies), *copies.values()))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@every_step
def test_autocast(step, device):
    inputs = step.make_token_inputs(tokens=2, **step.sizes[1], dtype=torch.float32, device=device)
    sequences = {name: inputs[name].bfloat16() for name in step.cast}
    out = inputs["out"].bfloat16()
    expected = step.decode(inputs | sequences | {"out": out})
    with torch.autocast(device, dtype=torch.bfloat16):
        actual = step.decode(inputs | {"out": out})
        without = step.decode(inputs | {"out": None})
    for results in (actual, without):
        assert torch.equal(results["out"], expected["out"]) and torch.equal(results[step.state], expected[step.state])


@every_step
def test_vmap(step, device):
    sets = [step.make_token_inputs(tokens=2, seed=seed, device=device) for seed in range(3)]
    names = [name for name in (step.state, *step.sequences, "out") if sets[0][name] is not None]
    stacked = {name: torch.stack([s[name] for s in sets]) for name in names}
    shared = {name: value for name, value in sets[0].items() if name not in names}
    out = torch.vmap(lambda *tensors: step.function(**shared, **dict(zip(names, tensors, strict=True))))(*stacked.values())
    for i, inputs in enumerate(sets):
        expected = step.decode(shared | {name: inputs[name] for name in names})
        assert torch.equal(out[i], expected["out"]) and torch.equal(stacked[step.state][i], expected[step.state])
    with pytest.raises(RuntimeError, match=says(f"{step.name}: expected vmap over out, which is written to")):
        torch.vmap(lambda state: step.function(**sets[0] | {step.state: state}))(stacked[step.state])


@pytest.mark.cuda
@pytest.mark.parametrize("call", ["out", "accepted", "packed_accepted", "packed_intermediate", "tokens_each_destination"])
@every_step
def test_cuda_graph(step, call):
    """A captured call replays on new values in the same tensors, also of slots and lengths, and goes on with the same state."""
    draws = [
        step.make_token_inputs(**CALLS[call], **step.sizes[1], dtype=torch.float32, device="cuda", seed=s) for s in range(3)
    ]
    for shift, draw in enumerate(draws):
        if draw["state_batch_indices"] is not None:
            draw["state_batch_indices"] = (draw["state_batch_indices"] + 2 * shift) % SLOTS
        if "cu_seqlens" in draw:
            draw["cu_seqlens"][1:-1] -= min(shift, 1)
    static = {k: v.clone() if isinstance(v, Tensor) else v for k, v in draws[0].items()}
    graph, _ = captured(lambda: step.function(**static))
    state = draws[0][step.state]
    static[step.state].copy_(state)
    for draw in draws:
        for name, value in draw.items():
            if isinstance(value, Tensor) and name != step.state:
                static[name].copy_(value)
        graph.replay()
        expected = step.decode(draw | {step.state: state})
        state = expected[step.state]
        for name, value in expected.items():
            torch.testing.assert_close(static[name], value, rtol=0, atol=0, equal_nan=True)
