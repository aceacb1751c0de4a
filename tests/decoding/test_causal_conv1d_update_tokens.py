"""causal_conv1d_update as servers call it: out, slots to read and to write, packed steps, accepted drafts, windows."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from decoding_helpers import SLOTS, WRITTEN, convolve_by_rows, decode, make_conv_token_inputs
from helpers import DTYPES, LAYOUTS, arrange, assert_as_accurate, captured, says, split
from operator_spec import TRACED, UNTRACED, as_float64
from torch import Tensor

from ssm_kernels import causal_conv1d_update, reference

OPERATOR = "causal_conv1d"

operator = torch.ops.ssm_kernels.causal_conv1d_update_out
STATE_DTYPES = [*((dtype, dtype) for dtype in DTYPES), (torch.float16, torch.float32), (torch.bfloat16, torch.float32)]
every_dtype = pytest.mark.parametrize(("dtype", "state_dtype"), STATE_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
CALLS: dict[str, dict[str, Any]] = {
    "out": {},
    "out_without_slots": {"slots": False, "tokens": 3},
    "destination": {"destination": True},
    "destination_tokens": {"destination": True, "tokens": 3},
    "packed": {"packed": (0, 2, 2, 5, 6)},
    "packed_long": {"packed": (0, 40, 75)},
    "accepted": {"rows": 4, "tokens": 3, "accepted": (0, 1, 2, 3), "length": 5},
    "accepted_one": {"rows": 2, "accepted": (3, 1), "length": 6},
    "accepted_destination": {"rows": 2, "tokens": 2, "accepted": (3, 1), "length": 6, "destination": True},
    "accepted_packed": {"packed": (0, 3, 3, 4), "accepted": (2, 1, 3), "length": 6},
    "windows": {"tokens": 3, "intermediate": 4},
    "accepted_windows": {"packed": (0, 1, 4), "accepted": (2, 3), "length": 7, "intermediate": 3},
}
every_call = pytest.mark.parametrize("call", CALLS)


def run(inputs: dict[str, Any]) -> dict[str, Tensor]:
    return decode(inputs, causal_conv1d_update)


def assert_matches(inputs: dict[str, Any]) -> dict[str, Tensor]:
    actual, expected = run(inputs), convolve_by_rows(inputs)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        if name == "out" and value.device.type == "cuda":
            torch.testing.assert_close(value, expected[name], rtol=4 * torch.finfo(value.dtype).eps, atol=1e-5)
        else:
            assert torch.equal(value, expected[name]), name
    return actual


def reference_rows(window: Tensor, x: Tensor, **parameters: Any) -> Tensor:
    return reference.causal_conv1d_update(x, window, **parameters)[0]


@every_call
@every_dtype
def test_equals_calls_of_one_row(dtype, state_dtype, call, device):
    for channels, weight_dtype in itertools.product((5, 200), (None, dtype)):
        inputs = make_conv_token_inputs(
            **CALLS[call], channels=channels, dtype=dtype, state_dtype=state_dtype, weight_dtype=weight_dtype, device=device
        )
        results = assert_matches(inputs)
        assert results["out"].count_nonzero() and not torch.equal(results["conv_state"], inputs["conv_state"])


@every_call
@every_dtype
def test_matches_reference(dtype, state_dtype, call, device):
    inputs = make_conv_token_inputs(**CALLS[call], channels=24, dtype=dtype, state_dtype=state_dtype, device=device)
    actual, exact = run(inputs), convolve_by_rows(as_float64(inputs), reference_rows)
    for name in actual.keys() - {"out"}:
        assert torch.equal(actual[name], exact[name].to(actual[name].dtype)), name
    if dtype == torch.float64:
        torch.testing.assert_close(actual["out"], exact["out"], rtol=1e-12, atol=1e-12)
    else:
        native = convolve_by_rows(inputs, reference_rows)
        assert_as_accurate(actual["out"], native["out"], exact["out"], "out")


@pytest.mark.parametrize("width", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("call", ["destination", "accepted", "accepted_packed", "windows"])
def test_every_width(call, width, device):
    options = CALLS[call] | {"width": width, "length": width + 3}
    for activation in ("silu", None):
        assert_matches(make_conv_token_inputs(**options, activation=activation, bias=activation is None, device=device))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, index_dtype, device):
    for call, dtype in itertools.product(("accepted_destination", "accepted_windows"), (torch.float32, torch.bfloat16)):
        inputs = make_conv_token_inputs(**CALLS[call], channels=24, dtype=dtype, index_dtype=index_dtype, device=device)
        expected = run(inputs)
        tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        laid_out = {name: arrange(x, layout) for name, x in tensors.items() if x.is_floating_point()}
        tables = {name: x.repeat_interleave(2)[::2] for name, x in tensors.items() if not x.is_floating_point()}
        copies = {name: arrange(inputs[name].clone(), layout) for name in WRITTEN if name in inputs}
        causal_conv1d_update(**inputs | laid_out | tables | copies)
        assert all(torch.equal(copies[name], value) for name, value in expected.items() if name != "out")
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(copies["out"], expected["out"], rtol=4 * eps, atol=16 * eps)


def test_speculative_decoding_equals_decoding(device):
    """Drafts of two tokens of which some are refused: the accepted ones give what decoding one by one gives."""
    random = torch.Generator().manual_seed(0)
    inputs = make_conv_token_inputs(rows=2, channels=6, length=5, out=False, device=device)
    slots, window = inputs["state_batch_indices"], inputs["conv_state"][..., :3].clone()
    state = inputs["conv_state"].clone()
    accepted = torch.ones(2, dtype=torch.int32, device=device)
    parameters = {name: inputs[name] for name in ("weight", "bias", "activation")}
    for _ in range(6):
        drafts = torch.randn(2, 3, 6, generator=random, dtype=torch.float64).to(device)
        out = causal_conv1d_update(drafts, state, **parameters, state_batch_indices=slots, num_accepted_tokens=accepted)
        accepted = torch.randint(1, 4, (2,), generator=random).to(device)
        for b, count in enumerate(accepted.tolist()):
            row = window[slots[b].item()][None].contiguous()
            for t in range(count):
                expected = causal_conv1d_update(drafts[b, t][None], row, **parameters)[0]
                torch.testing.assert_close(out[b, t], expected, rtol=1e-13, atol=1e-13)
            window[slots[b].item()] = row[0]


def test_windows_without_indices(device):
    """Row b writes to entry b; a buffer may have more entries than rows, not fewer."""
    inputs = make_conv_token_inputs(rows=3, tokens=2, intermediate=2, device=device)
    del inputs["intermediate_state_indices"]
    windows = inputs["intermediate_conv_window"]
    for entries in (3, len(windows)):
        results = assert_matches(inputs | {"intermediate_conv_window": windows[:entries]})
        assert torch.equal(results["intermediate_conv_window"][3:], windows[3:entries])
    message = "expected intermediate_conv_window with an entry for each of 3 rows, or intermediate_state_indices, got [2,"
    with pytest.raises(ValueError, match=says(f"causal_conv1d_update: {message}")):
        run(inputs | {"intermediate_conv_window": windows[:2]})


@pytest.mark.parametrize("pad", [None, 5])
def test_padding(pad, device):
    value = -1 if pad is None else pad
    inputs = make_conv_token_inputs(rows=4, tokens=2, intermediate=2, channels=24, dtype=torch.float32, device=device)
    inputs |= {"pad_slot_id": pad, "state_batch_indices": torch.tensor([3, value, 0, 7], device=device)}
    inputs["dst_state_batch_indices"] = torch.tensor([1, 6, -3, 4], device=device)
    inputs["intermediate_state_indices"] = torch.tensor([2, 0, value, 1], device=device)
    inputs["x"][1] = math.nan
    results = assert_matches(inputs)
    assert results["out"][1].count_nonzero() == 0 and results["out"].isfinite().all()
    changed = (results["conv_state"] != inputs["conv_state"]).flatten(1).any(1).nonzero().flatten()
    assert changed.tolist() == [1, 4]


def test_padding_of_one_step(device):
    inputs = make_conv_token_inputs(rows=3, channels=200, dtype=torch.bfloat16, device=device) | {"pad_slot_id": 0}
    inputs["state_batch_indices"] = torch.tensor([4, 0, 2], device=device)
    results = assert_matches(inputs)
    assert results["out"][1].count_nonzero() == 0
    assert torch.equal(results["conv_state"][0], inputs["conv_state"][0])


def test_no_state_update(device):
    for call in ("out", "accepted", "windows"):
        inputs = make_conv_token_inputs(**CALLS[call], device=device) | {"disable_state_update": True}
        results = assert_matches(inputs)
        assert torch.equal(results["conv_state"], inputs["conv_state"])


def test_rows_share_a_slot_that_none_writes_to(device):
    inputs = make_conv_token_inputs(rows=3, tokens=2, destination=True, device=device)
    inputs["state_batch_indices"].fill_(4)
    assert_matches(inputs)


BAD_VALUES = {
    "state_batch_indices": ([1, SLOTS], "expected state_batch_indices below the number of slots, 24, got 24 for row 1"),
    "dst_state_batch_indices": ([1, SLOTS], "expected dst_state_batch_indices below the number of slots, 24, got 24 for row 1"),
    "intermediate_state_indices": (
        [0, 4],
        "expected intermediate_state_indices below the number of entries, 4, got 4 for row 1",
    ),
    "num_accepted_tokens": ([1, 5], "expected num_accepted_tokens from 0 to 4, got 5 for row 1"),
    "cu_seqlens": ([0, 6, 5], "expected cu_seqlens not to decrease, got 6 before 5"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_value_out_of_range(name, device):
    """An error on the CPU; on CUDA nothing outside of the tensors is read or written."""
    inputs = make_conv_token_inputs(
        packed=(0, 2, 5), destination=True, accepted=(1, 1), length=6, intermediate=3, dtype=torch.float32, device=device
    )
    value, message = BAD_VALUES[name]
    inputs[name] = torch.tensor(value, device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match=says(f"causal_conv1d_update: {message}")):
            run(inputs)
        return
    out = run(inputs)["out"]
    assert out[2:].isnan().all() if name == "state_batch_indices" else out[:2].isfinite().all()


def test_state_that_is_too_short_for_drafts(device):
    inputs = make_conv_token_inputs(tokens=3, accepted=(1, 1), length=4, device=device)
    message = "expected conv_state of at least width - 2 + seqlen = 5 steps with num_accepted_tokens, got [24, 5, 4]"
    with pytest.raises(ValueError, match=says(message)):
        run(inputs)
    inputs = make_conv_token_inputs(packed=(0, 1, 4), accepted=(1, 1), length=4, device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match=says("expected conv_state of at least width - 2 + 3 steps for row 1")):
            run(inputs)


SHAPES = {
    "x": ((2, 3, 5, 1), "expected x of shape (batch, channels) or (batch, seqlen, channels), got [2, 3, 5, 1]"),
    "out": ((2, 5), "expected out of shape (batch, seqlen, channels) = [2, 3, 5], got [2, 5]"),
    "state_batch_indices": ((2, 1), "expected state_batch_indices of shape (batch,) = [2], got [2, 1]"),
    "dst_state_batch_indices": ((3,), "expected dst_state_batch_indices of shape (batch,) = [2], got [3]"),
    "num_accepted_tokens": ((3,), "expected num_accepted_tokens of shape (batch,) = [2], got [3]"),
    "intermediate_conv_window": ((4, 2, 5, 3), "expected intermediate_conv_window for 3 tokens, got [4, 2, 5, 3]"),
    "intermediate_state_indices": ((3,), "expected intermediate_state_indices of shape (batch,) = [2], got [3]"),
    "cu_seqlens": ((4,), "expected x of shape (tokens, channels), got [2, 3, 5]"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_wrong_shape(name, device):
    inputs = make_conv_token_inputs(
        tokens=3, destination=True, accepted=(1, 1), length=6, intermediate=3, dtype=torch.float32, device=device
    )
    shape, message = SHAPES[name]
    is_table = "indices" in name or name.startswith(("num", "cu"))
    inputs[name] = (inputs["state_batch_indices"] if is_table else inputs["x"]).new_zeros(shape)
    for place in (device, "meta"):
        moved = {key: value.to(place) if isinstance(value, Tensor) else value for key, value in inputs.items()}
        with pytest.raises(ValueError, match=says(f"causal_conv1d_update: {message}")):
            run(moved)


def test_memory_that_is_shared(device):
    inputs = make_conv_token_inputs(tokens=3, intermediate=3, dtype=torch.float32, device=device)
    cases = [
        ({"out": inputs["x"]}, "expected x to share no memory with out, which is updated in place"),
        ({"out": inputs["conv_state"].flatten()[:30].view(2, 3, 5)}, "expected out to share no memory with conv_state"),
        ({"out": inputs["x"].new_empty(2, 1, 5).expand(2, 3, 5)}, "expected out, which is updated in place, to have elements"),
        (
            {"intermediate_conv_window": inputs["conv_state"].flatten()[:180].view(4, 3, 5, 3)},
            "expected intermediate_conv_window to share no memory with conv_state",
        ),
    ]
    before = inputs["conv_state"].clone()
    for changed, message in cases:
        with pytest.raises(RuntimeError, match=says(f"causal_conv1d_update: {message}")):
            causal_conv1d_update(**inputs | changed)
        assert torch.equal(inputs["conv_state"], before)


@pytest.mark.parametrize("options", [{"rows": 0}, {"tokens": 0}, {"channels": 0}, {"packed": (0, 0, 0)}], ids=str)
def test_nothing_to_do(options, device):
    inputs = make_conv_token_inputs(**options, device=device)
    results = run(inputs)
    assert results["out"].shape == inputs["x"].shape and torch.equal(results["conv_state"], inputs["conv_state"])


def opcheck(call: str, device: str, checks: tuple[str, ...]) -> None:
    inputs = make_conv_token_inputs(**CALLS[call], device=device) | {"disable_state_update": False}
    torch.library.opcheck(operator.default, *split(operator, inputs), test_utils=checks)


@every_call
def test_opcheck(call, device):
    """Traces the first call and the last one."""
    opcheck(call, device, TRACED if call in (next(iter(CALLS)), [*CALLS][-1]) else UNTRACED)


@pytest.mark.exhaustive
@every_call
def test_opcheck_traced(call, device):
    opcheck(call, device, TRACED)


def test_versions_are_counted(device):
    inputs = make_conv_token_inputs(tokens=2, intermediate=2, device=device)
    names = ("conv_state", "out", "intermediate_conv_window")
    versions = {name: inputs[name]._version for name in names}
    causal_conv1d_update(**inputs)
    assert {name: inputs[name]._version for name in names} == {name: version + 1 for name, version in versions.items()}


def test_lazy_copies_stay_lazy(device):
    originals = make_conv_token_inputs(packed=(0, 2, 3), destination=True, intermediate=2, device=device)
    expected = run(originals)
    inputs = {name: torch._lazy_clone(x) if isinstance(x, Tensor) else x for name, x in originals.items()}
    causal_conv1d_update(**inputs)
    assert all(torch.equal(inputs[name], value) for name, value in expected.items())
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    written = {name for name, x in tensors.items() if not torch._C._is_cow_tensor(x)}
    assert written == {"conv_state", "out", "intermediate_conv_window"}


def test_is_not_differentiable(device):
    inputs = make_conv_token_inputs(tokens=2, device=device)
    inputs["weight"].requires_grad_()
    with pytest.raises(NotImplementedError, match=says("causal_conv1d_update: decoding is not differentiable")):
        causal_conv1d_update(**inputs)
    with torch.no_grad():
        assert_matches(inputs)


@pytest.mark.parametrize("call", ["out", "accepted", "accepted_windows"])
def test_compile(call, device, fresh_dynamo):
    inputs = make_conv_token_inputs(**CALLS[call], device=device)

    def function(**inputs):
        return causal_conv1d_update(**inputs) * 2 + inputs["conv_state"].sum()

    results = []
    for call_of in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        copies = {name: inputs[name].clone() for name in WRITTEN if name in inputs}
        results.append((call_of(**inputs | copies), *copies.values()))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_autocast(device):
    inputs = make_conv_token_inputs(tokens=2, dtype=torch.float32, device=device)
    out = inputs["out"].bfloat16()
    expected = run(inputs | {"x": inputs["x"].bfloat16(), "out": out})
    with torch.autocast(device, dtype=torch.bfloat16):
        for actual in (run(inputs | {"out": out}), run(inputs | {"out": None, "pad_slot_id": -1})):
            assert torch.equal(actual["out"], expected["out"])
            assert torch.equal(actual["conv_state"], expected["conv_state"])


def test_vmap(device):
    sets = [make_conv_token_inputs(tokens=2, seed=seed, device=device) for seed in range(3)]
    names = ("x", "conv_state", "out")
    stacked = {name: torch.stack([s[name] for s in sets]) for name in names}
    shared = {name: value for name, value in sets[0].items() if name not in names}

    def one(*tensors):
        return causal_conv1d_update(**shared, **dict(zip(names, tensors, strict=True)))

    out = torch.vmap(one)(*stacked.values())
    for i, inputs in enumerate(sets):
        expected = run(shared | {name: inputs[name] for name in names})
        assert torch.equal(out[i], expected["out"]) and torch.equal(stacked["conv_state"][i], expected["conv_state"])
    with pytest.raises(RuntimeError, match=says("causal_conv1d_update: expected vmap over conv_state, which is written to")):
        torch.vmap(lambda x, out: causal_conv1d_update(**sets[0] | {"x": x, "out": out}))(stacked["x"], stacked["out"])


@pytest.mark.cuda
@pytest.mark.parametrize("call", ["out", "accepted", "accepted_windows"])
def test_cuda_graph(call):
    draws = [make_conv_token_inputs(**CALLS[call], channels=72, dtype=torch.bfloat16, device="cuda", seed=s) for s in range(3)]
    static = {k: v.clone() if isinstance(v, Tensor) else v for k, v in draws[0].items()}
    graph, _ = captured(lambda: causal_conv1d_update(**static))
    state = draws[0]["conv_state"]
    static["conv_state"].copy_(state)
    for shift, draw in enumerate(draws):
        draw["state_batch_indices"] = (draw["state_batch_indices"] + 2 * shift) % SLOTS
        for name, value in draw.items():
            if isinstance(value, Tensor) and name != "conv_state":
                static[name].copy_(value)
        graph.replay()
        expected = run(draw | {"conv_state": state})
        state = expected["conv_state"]
        assert all(torch.equal(static[name], value) for name, value in expected.items())


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"destination": True, "intermediate": 3}, {"slots": False}], ids=["slots", "tables", "rows"]
)
def test_steps_after_the_last_sequence_are_padding(options, out, device):
    """They hold NaN, touch no state, and their output is zero, or in ``out`` what it was."""
    inputs = make_conv_token_inputs(packed=(0, 2, 5), out=out, device=device, **options)
    expected = decode(inputs, causal_conv1d_update)
    for padding in (0, 1, 4):
        x = inputs["x"]
        padded = inputs | {"x": torch.cat([x, x.new_full((padding, *x.shape[1:]), torch.nan)])}
        if out:
            padded["out"] = x.new_full(padded["x"].shape, 7)
        results = decode(padded, causal_conv1d_update)
        tail = results["out"][5:]
        assert torch.equal(tail, torch.full_like(tail, 7 if out else 0))
        results["out"] = results["out"][:5]
        torch.testing.assert_close(results, expected, rtol=0, atol=0)
    inputs["cu_seqlens"] = torch.zeros_like(inputs["cu_seqlens"])
    assert torch.equal(decode(inputs, causal_conv1d_update)["conv_state"], inputs["conv_state"])
