"""selective_state_update as servers call it: out, slots to read and to write, several tokens, states of every token."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from decoding_helpers import SLOTS, WRITTEN, decode, decode_by_steps, make_token_inputs
from helpers import LAYOUTS, METHODS, arrange, assert_as_accurate, captured, says, split
from operator_spec import as_float64
from selective_scan_helpers import STEP_DTYPES, STEP_FORMS
from torch import Tensor

from ssm_kernels import reference, selective_state_update

OPERATOR = "selective_state_update"

operator = torch.ops.ssm_kernels.selective_state_update_out
every_form = pytest.mark.parametrize("form", STEP_FORMS)
every_dtype = pytest.mark.parametrize(("dtype", "state_dtype"), STEP_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
# Options of make_token_inputs: rows and tokens, and what chooses slots.
CALLS: dict[str, dict[str, Any]] = {
    "out": {},
    "out_without_slots": {"columns": 0},
    "destination": {"destination": 0},
    "tokens": {"tokens": 4},
    "tokens_without_slots": {"tokens": 3, "columns": 0},
    "tokens_destination": {"tokens": 3, "destination": 0},
    "tokens_each_destination": {"tokens": 3, "destination": 4},
    "accepted": {"rows": 3, "tokens": 2, "columns": 3, "destination": 2},
    "accepted_in_place": {"rows": 3, "tokens": 3, "columns": 3},
    "packed": {"packed": (0, 2, 2, 5, 6)},
    "packed_accepted": {"packed": (0, 3, 3, 4), "columns": 3},
    "packed_each_destination": {"packed": (0, 3, 4), "destination": 3},
    "intermediate": {"tokens": 3, "intermediate": 4},
    "packed_intermediate": {"packed": (0, 1, 4), "intermediate": 3},
}
every_call = pytest.mark.parametrize("call", CALLS)


def assert_matches(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """As many calls of one row and one token give the same: bit for bit on the CPU."""
    actual, expected = decode(inputs), decode_by_steps(inputs)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        if value.device.type == "cpu":
            assert torch.equal(value, expected[name]), name
        else:
            eps = torch.finfo(value.dtype).eps
            torch.testing.assert_close(value, expected[name], rtol=4 * eps, atol=64 * eps)
    return actual


def assert_matches_reference(inputs: dict[str, Any]) -> None:
    """The float64 reference, by the low-precision rule below float64."""
    actual = decode(inputs)
    exact = decode_by_steps(as_float64(inputs), reference.selective_state_update)
    if inputs["x"].dtype == torch.float64:
        for name, value in actual.items():
            torch.testing.assert_close(value, exact[name], rtol=1e-12, atol=1e-12)
        return
    native = decode_by_steps(inputs, reference.selective_state_update)
    for name, value in actual.items():
        assert_as_accurate(value, native[name].to(value.dtype), exact[name], name)


@every_call
@every_dtype
def test_equals_steps_of_one_token(dtype, state_dtype, call, device):
    for form, dstate in itertools.product(("channels", "heads_groups"), (3, 16, 136)):
        inputs = make_token_inputs(
            **CALLS[call], **STEP_FORMS[form], dstate=dstate, dtype=dtype, state_dtype=state_dtype, device=device
        )
        results = assert_matches(inputs)
        assert results["out"].count_nonzero()
        assert not torch.equal(results["state"], inputs["state"])


@every_form
@every_call
def test_matches_reference(call, form, device):
    for dtype, state_dtype in STEP_DTYPES:
        assert_matches_reference(
            make_token_inputs(**CALLS[call], **STEP_FORMS[form], dtype=dtype, state_dtype=state_dtype, device=device)
        )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("discretization", METHODS)
def test_every_method(discretization, tied, device):
    for dtype, dstate in itertools.product((torch.float64, torch.bfloat16), (16, 200)):
        inputs = make_token_inputs(
            **CALLS["packed_accepted"], heads=4, dim=5, dstate=dstate, discretization=discretization, dtype=dtype, device=device
        )
        if tied:
            inputs["A"] = inputs["A"][:, :1, :1].expand_as(inputs["A"])
        assert_matches(inputs | {"dt_limit": (0.1, 0.9)})
        assert_matches(inputs | {"A": inputs["A"].abs().log(), "A_is_log": True})


@pytest.mark.parametrize("absent", ["D", "z", "dt_bias", "dt_softplus"])
def test_without_an_option(absent, device):
    assert_matches(make_token_inputs(**CALLS["tokens"], dstate=16, device=device, **{absent: False}))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, index_dtype, device):
    for call, dstate in itertools.product(("accepted", "packed_intermediate"), (3, 16)):
        for dtype, state_dtype in STEP_DTYPES:
            inputs = make_token_inputs(
                **CALLS[call],
                **STEP_FORMS["heads_groups"],
                dstate=dstate,
                dtype=dtype,
                state_dtype=state_dtype,
                index_dtype=index_dtype,
                device=device,
            )
            expected = decode(inputs)
            laid_out = {
                name: arrange(x, layout) for name, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()
            }
            tables = {n: x.repeat_interleave(2, -1)[..., ::2] for n, x in inputs.items() if n.endswith("_indices") and x.dim()}
            arranged = inputs | laid_out | tables
            copies = {name: arrange(inputs[name].clone(), layout) for name in WRITTEN if name in inputs}
            selective_state_update(**arranged | copies)
            for name, value in copies.items():
                eps = torch.finfo(value.dtype).eps
                torch.testing.assert_close(value, expected[name], rtol=4 * eps, atol=64 * eps)


@pytest.mark.parametrize("sizes", [(3, None, 1000, 16, 8), (2, 80, 64, 128, 1), (1, 24, 64, 128, 8)])
def test_sizes_of_models(sizes, device):
    rows, heads, dim, dstate, groups = sizes
    options = {"rows": rows, "heads": heads, "dim": dim, "dstate": dstate, "groups": groups, "device": device}
    assert_matches(make_token_inputs(**options, tokens=3, destination=3, dtype=torch.float32))
    assert_matches(make_token_inputs(**options, destination=0, dtype=torch.float32))


def test_tokens_without_other_arguments(device):
    """The operator of one step takes them too."""
    for call in ("tokens", "tokens_without_slots", "accepted_in_place"):
        inputs = make_token_inputs(**CALLS[call], out=False, dstate=16, device=device)
        inputs.pop("num_accepted_tokens", None)
        assert_matches(inputs)


# ----- slots


@pytest.mark.parametrize("pad", [None, 5])
def test_padding(pad, device):
    """A row whose slot is padding reads and writes nothing, whatever its inputs are; a state without a slot is not written."""
    inputs = make_token_inputs(rows=4, tokens=2, intermediate=2, dstate=16, dtype=torch.float32, device=device)
    value = -1 if pad is None else pad
    inputs |= {"pad_slot_id": pad}
    inputs["state_batch_indices"] = torch.tensor([3, value, 0, 7], device=device)
    inputs["dst_state_batch_indices"] = torch.tensor([[1, 2], [6, 8], [-3, 4], [value, value]], device=device)
    inputs["intermediate_state_indices"] = torch.tensor([2, 0, value, 1], device=device)
    for name in ("x", "dt", "z", "B", "C"):
        inputs[name][1] = math.nan
    results = assert_matches(inputs)
    assert results["out"][1].count_nonzero() == 0 and results["out"].isfinite().all()
    changed = (results["state"] != inputs["state"]).flatten(1).any(1).nonzero().flatten()
    assert changed.tolist() == [1, 2, 4]
    written = (results["intermediate_states_buffer"] != inputs["intermediate_states_buffer"]).flatten(1).any(1)
    assert written.nonzero().flatten().tolist() == [1, 2]


def test_padding_of_every_row(device):
    inputs = make_token_inputs(tokens=2, device=device)
    inputs["state_batch_indices"].fill_(-1)
    results = decode(inputs)
    assert results["out"].count_nonzero() == 0 and torch.equal(results["state"], inputs["state"])


def test_rows_share_a_slot_that_none_writes_to(device):
    inputs = make_token_inputs(rows=3, tokens=2, destination=2, dstate=16, device=device)
    inputs["state_batch_indices"].fill_(4)
    assert_matches(inputs)


def test_a_row_writes_several_states_to_one_slot(device):
    inputs = make_token_inputs(rows=2, tokens=3, destination=3, dstate=16, device=device)
    inputs["dst_state_batch_indices"] = torch.tensor([[3, 5, 3], [2, 2, 2]], device=device)
    assert_matches(inputs)


def test_arguments_that_change_nothing(device):
    """The same table to read from and to write to, and padding that is negative anyway, as vLLM passes them."""
    inputs = make_token_inputs(rows=3, dstate=16, dtype=torch.float32, device=device)
    inputs["state_batch_indices"][1] = -1
    expected, slots = decode(inputs), inputs["state_batch_indices"]
    for same in (slots, slots.clone()):
        actual = decode(inputs | {"dst_state_batch_indices": same, "pad_slot_id": -1})
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-6, atol=1e-6)


def test_no_state_update(device):
    for call in ("tokens", "tokens_each_destination", "packed_intermediate"):
        inputs = make_token_inputs(**CALLS[call], dstate=16, device=device) | {"disable_state_update": True}
        results = assert_matches(inputs)
        assert torch.equal(results["state"], inputs["state"])


def test_intermediate_states_without_indices(device):
    """Row b writes to entry b; a buffer may have more entries than rows, not fewer."""
    inputs = make_token_inputs(rows=3, tokens=2, intermediate=2, device=device)
    del inputs["intermediate_state_indices"]
    buffer = inputs["intermediate_states_buffer"]
    for entries in (3, len(buffer)):
        results = assert_matches(inputs | {"intermediate_states_buffer": buffer[:entries]})
        last = results["intermediate_states_buffer"][:3, 1]
        assert torch.equal(last, results["state"][inputs["state_batch_indices"].long()])
        assert torch.equal(results["intermediate_states_buffer"][3:], buffer[3:entries])
    message = "expected intermediate_states_buffer with an entry for each of 3 rows, or intermediate_state_indices, got [2,"
    with pytest.raises(ValueError, match=says(f"selective_state_update: {message}")):
        decode(inputs | {"intermediate_states_buffer": buffer[:2]})


BAD_SLOTS = {
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


@pytest.mark.parametrize("name", BAD_SLOTS)
def test_value_out_of_range(name, device):
    """An error on the CPU; on CUDA nothing outside of the tensors is read or written."""
    inputs = make_token_inputs(
        tokens=2, columns=2, destination=2, intermediate=2, dstate=16, dtype=torch.float32, device=device
    )
    value, message = BAD_SLOTS[name]
    inputs["num_accepted_tokens"] = torch.tensor([1, 1], device=device)
    inputs[name] = torch.tensor(value, device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match=says(f"selective_state_update: {message}")):
            decode(inputs)
        return
    results = decode(inputs)
    if name == "state_batch_indices":
        assert results["out"][1].isnan().all() and results["out"][0].isfinite().all()
    elif name == "num_accepted_tokens":  # the last column
        assert torch.equal(results["out"], decode(inputs | {name: torch.tensor([1, 2], device=device)})["out"])
    else:
        assert results["out"].isfinite().all()


@pytest.mark.parametrize(
    ("read", "write"), [([1, 1], None), ([1, 2], [4, 4]), ([1, 2], [2, 3]), ([1, 2], [[3, 4], [5, 3]])], ids=str
)
def test_slot_that_two_rows_use(read, write, device):
    if device != "cpu":
        pytest.skip("CUDA does not check: the rows race")
    inputs = make_token_inputs(tokens=2, device=device) | {"state_batch_indices": torch.tensor(read)}
    if write is not None:
        inputs["dst_state_batch_indices"] = torch.tensor(write)
    message = "selective_state_update: expected no slot that one row writes to and another row uses, got "
    with pytest.raises(ValueError, match=says(message, "for rows 0 and 1")):
        decode(inputs)


def test_entry_that_two_rows_use(device):
    if device != "cpu":
        pytest.skip("CUDA does not check: the rows race")
    inputs = make_token_inputs(tokens=2, intermediate=2, device=device)
    inputs["intermediate_state_indices"] = torch.tensor([3, 3])
    message = (
        "expected no entry of intermediate_state_indices that one row writes to and another row uses, got 3 for rows 0 and 1"
    )
    with pytest.raises(ValueError, match=says(f"selective_state_update: {message}")):
        decode(inputs)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, 2, 5), "expected cu_seqlens to start at 0, got 1"),
        ((0, 6, 5), "expected cu_seqlens not to decrease, got 6 before 5"),
        ((0, 2, 6), "expected cu_seqlens to end at 5, the number of tokens, or before, got 6"),
    ],
)
def test_values_of_cu_seqlens(value, message, device):
    inputs = make_token_inputs(packed=(0, 2, 5), destination=3, intermediate=3, device=device)
    inputs["cu_seqlens"] = torch.tensor(value, device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match=says(f"selective_state_update: {message}")):
            decode(inputs)
    else:
        decode(inputs)
        torch.cuda.synchronize()


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("options", [{}, {"destination": 3, "intermediate": 3}, {"heads": 2}], ids=["slots", "tables", "heads"])
def test_tokens_after_the_last_sequence_are_padding(options, out, device):
    """They hold NaN, touch no state, and their output is zero, or in ``out`` what it was."""
    inputs = make_token_inputs(packed=(0, 2, 5), out=out, device=device, **options)
    expected = decode(inputs)
    for padding in (0, 1, 4):
        padded = dict(inputs)
        for name in ("x", "dt", "z", "B", "C"):
            if inputs.get(name) is not None:
                value = inputs[name]
                padded[name] = torch.cat([value, value.new_full((padding, *value.shape[1:]), torch.nan)])
        if out:
            padded["out"] = inputs["out"].new_full(padded["x"].shape, 7)
        results = decode(padded)
        tail = results["out"][5:]
        assert torch.equal(tail, torch.full_like(tail, 7 if out else 0))
        results["out"] = results["out"][:5]
        torch.testing.assert_close(results, expected, rtol=0, atol=0)
    # Nothing but padding.
    inputs["cu_seqlens"] = torch.zeros_like(inputs["cu_seqlens"])
    assert torch.equal(decode(inputs)["state"], inputs["state"])


def test_sequence_longer_than_a_table(device):
    """An error on the CPU; on CUDA the states beyond are not written."""
    table = make_token_inputs(packed=(0, 1, 5), destination=3, dtype=torch.float32, device=device)
    buffer = make_token_inputs(packed=(0, 1, 5), intermediate=3, dtype=torch.float32, device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match=says("with a column for each token, got 3 columns for 4 tokens of row 1")):
            decode(table)
        with pytest.raises(ValueError, match=says("a buffer of intermediate states for 4 tokens of row 1, got 3")):
            decode(buffer)
    else:
        assert decode(table)["out"].isfinite().all() and decode(buffer)["out"].isfinite().all()


# ----- shapes and memory

SHAPES = {
    "x": ((2, 3, 4, 1), "expected x of shape (batch, dim), got [2, 3, 4, 1]"),
    "dt": ((2, 2, 4), "expected dt of shape (batch, tokens, dim) = [2, 3, 4], got [2, 2, 4]"),
    "B": ((2, 3), "expected B of shape (batch, tokens, dstate) or (batch, tokens, groups, dstate), got [2, 3]"),
    "C": ((2, 3, 5), "expected C of shape (batch, tokens, dstate) = [2, 3, 3], got [2, 3, 5]"),
    "out": ((2, 4), "expected out of shape (batch, tokens, dim) = [2, 3, 4], got [2, 4]"),
    "state_batch_indices": ((2, 1, 3), "expected state_batch_indices of shape (batch,) or (batch, tokens), got [2, 1, 3]"),
    "dst_state_batch_indices": ((2, 2), "expected dst_state_batch_indices with a column for each of 3 tokens, got [2, 2]"),
    "num_accepted_tokens": ((3,), "expected num_accepted_tokens of shape (batch,) = [2], got [3]"),
    "intermediate_states_buffer": ((4, 2, 4, 3), "expected intermediate_states_buffer for 3 tokens, got [4, 2, 4, 3]"),
    "intermediate_state_indices": ((3,), "expected intermediate_state_indices of shape (batch,) = [2], got [3]"),
    # The tokens of a packed x are not in rows.
    "cu_seqlens": ((3,), "expected x of shape (tokens, dim), got [2, 3, 4]"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_wrong_shape(name, device):
    inputs = make_token_inputs(tokens=3, columns=3, destination=3, intermediate=3, dtype=torch.float32, device=device)
    shape, message = SHAPES[name]
    like = inputs["state_batch_indices"] if "indices" in name or name.startswith(("num", "cu")) else inputs["x"]
    for on_meta in (False, True):
        changed = inputs | {name: like.new_zeros(shape)}
        if on_meta:
            changed = {key: value.to("meta") if isinstance(value, Tensor) else value for key, value in changed.items()}
        with pytest.raises(ValueError, match=says(f"selective_state_update: {message}")):
            decode(changed)


def test_arguments_that_need_another(device):
    inputs = make_token_inputs(tokens=3, intermediate=3, device=device)
    with pytest.raises(ValueError, match=says("expected state_batch_indices of two axes with num_accepted_tokens")):
        decode(inputs | {"num_accepted_tokens": torch.zeros(2, dtype=torch.int32, device=device)})
    with pytest.raises(ValueError, match=says("expected no intermediate_state_indices without a buffer")):
        decode({name: value for name, value in inputs.items() if name != "intermediate_states_buffer"})


def test_wrong_dtypes(device):
    inputs = make_token_inputs(tokens=3, columns=3, destination=3, intermediate=3, dtype=torch.float32, device=device)
    for name in ("out", "intermediate_states_buffer"):
        with pytest.raises(
            RuntimeError, match=says(f"expected {name} of dtype float32 (with x of dtype float32), got float16")
        ):
            decode(inputs | {name: inputs[name].half()})
    for name in ("state_batch_indices", "dst_state_batch_indices", "num_accepted_tokens", "intermediate_state_indices"):
        with pytest.raises(RuntimeError, match=says(f"expected {name} of dtype int32 or int64, got float32")):
            decode(inputs | {name: inputs[name].float()})


def test_memory_that_is_shared(device):
    inputs = make_token_inputs(tokens=3, intermediate=3, dtype=torch.float32, device=device)
    before = inputs["state"].clone()
    cases = [
        ({"out": inputs["x"]}, "expected x to share no memory with out, which is updated in place"),
        ({"out": inputs["state"].flatten()[:24].view(2, 3, 4)}, "expected out to share no memory with state"),
        ({"out": inputs["x"].new_empty(2, 1, 4).expand(2, 3, 4)}, "expected out, which is updated in place, to have elements"),
        (
            {"intermediate_states_buffer": inputs["state"][:12].view(4, 3, 4, 3)},
            "expected intermediate_states_buffer to share no memory with state",
        ),
    ]
    for changed, message in cases:
        with pytest.raises(RuntimeError, match=says(f"selective_state_update: {message}")):
            selective_state_update(**inputs | changed)
        assert torch.equal(inputs["state"], before)


@pytest.mark.parametrize("options", [{"rows": 0}, {"tokens": 0}, {"dim": 0}, {"packed": (0, 0, 0)}], ids=str)
def test_nothing_to_do(options, device):
    inputs = make_token_inputs(**options, device=device)
    results = decode(inputs)
    assert results["out"].shape == inputs["x"].shape and torch.equal(results["state"], inputs["state"])


# ----- as an operator of PyTorch


@every_call
def test_opcheck(call, device):
    torch.library.opcheck(operator.default, *split(operator, OPTIONS | make_token_inputs(**CALLS[call], device=device)))


OPTIONS = {"discretization": "zoh", "dt_softplus": True, "A_is_log": False, "disable_state_update": False}


def test_versions_are_counted(device):
    inputs = make_token_inputs(tokens=2, intermediate=2, device=device)
    names = ("state", "out", "intermediate_states_buffer")
    versions = {name: inputs[name]._version for name in names}
    selective_state_update(**inputs)
    assert {name: inputs[name]._version for name in names} == {name: v + 1 for name, v in versions.items()}
    selective_state_update(**inputs, disable_state_update=True)
    assert inputs["state"]._version == versions["state"] + 1


def test_lazy_copies_stay_lazy(device):
    originals = make_token_inputs(packed=(0, 2, 3), columns=2, destination=2, intermediate=2, device=device)
    expected = decode(originals)
    inputs = {name: torch._lazy_clone(x) if isinstance(x, Tensor) else x for name, x in originals.items()}
    selective_state_update(**inputs)
    assert all(torch.equal(inputs[name], value) for name, value in expected.items())
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    written = {name for name, x in tensors.items() if not torch._C._is_cow_tensor(x)}
    assert written == {"state", "out", "intermediate_states_buffer"}


def test_is_not_differentiable(device):
    inputs = make_token_inputs(tokens=2, device=device)
    inputs["A"].requires_grad_()
    with pytest.raises(NotImplementedError, match=says("selective_state_update: decoding is not differentiable: train with")):
        selective_state_update(**inputs)
    with torch.no_grad():
        assert_matches(inputs)


@pytest.mark.parametrize("call", ["out", "accepted", "packed_intermediate"])
def test_compile(call, device, fresh_dynamo):
    inputs = make_token_inputs(**CALLS[call], dstate=16, device=device)

    def function(**inputs):
        return selective_state_update(**inputs) * 2 + inputs["state"].sum()

    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        copies = {name: inputs[name].clone() for name in WRITTEN if name in inputs}
        results.append((run(**inputs | copies), *copies.values()))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_autocast(device):
    inputs = make_token_inputs(tokens=2, dstate=16, dtype=torch.float32, device=device)
    sequences = {name: inputs[name].bfloat16() for name in ("x", "dt", "z", "B", "C")}
    out = inputs["out"].bfloat16()
    expected = decode(inputs | sequences | {"out": out})
    with torch.autocast(device, dtype=torch.bfloat16):
        actual = decode(inputs | {"out": out})
        without = decode(inputs | {"out": None})
    for results in (actual, without):
        assert torch.equal(results["out"], expected["out"]) and torch.equal(results["state"], expected["state"])


def test_vmap(device):
    sets = [make_token_inputs(tokens=2, dstate=16, seed=seed, device=device) for seed in range(3)]
    names = ("state", "x", "dt", "B", "C", "z", "out")
    stacked = {name: torch.stack([s[name] for s in sets]) for name in names}
    shared = {name: value for name, value in sets[0].items() if name not in names}
    out = torch.vmap(lambda *tensors: selective_state_update(**shared, **dict(zip(names, tensors, strict=True))))(
        *stacked.values()
    )
    for i, inputs in enumerate(sets):
        expected = decode(shared | {name: inputs[name] for name in names})
        assert torch.equal(out[i], expected["out"]) and torch.equal(stacked["state"][i], expected["state"])
    with pytest.raises(RuntimeError, match=says("selective_state_update: expected vmap over out, which is written to")):
        torch.vmap(lambda state: selective_state_update(**sets[0] | {"state": state}))(stacked["state"])


@pytest.mark.cuda
@pytest.mark.parametrize("call", ["out", "accepted", "packed_intermediate"])
def test_cuda_graph(call):
    """A captured call replays on new values in the same tensors, the slots' too, and goes on with the same state."""
    draws = [make_token_inputs(**CALLS[call], dim=70, dstate=16, dtype=torch.float32, device="cuda", seed=s) for s in range(3)]
    static = {k: v.clone() if isinstance(v, Tensor) else v for k, v in draws[0].items()}
    graph, _ = captured(lambda: selective_state_update(**static))
    state = draws[0]["state"]
    static["state"].copy_(state)
    for shift, draw in enumerate(draws):
        draw["state_batch_indices"] = (draw["state_batch_indices"] + 2 * shift) % SLOTS
        for name, value in draw.items():
            if isinstance(value, Tensor) and name != "state":
                static[name].copy_(value)
        graph.replay()
        expected = decode(draw | {"state": state})
        state = expected["state"]
        assert all(torch.equal(static[name], value) for name, value in expected.items())
