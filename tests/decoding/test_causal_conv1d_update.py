"""causal_conv1d_update: values in every dtype, width and layout, the state in place, slots."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conv_helpers import assert_step_matches_reference, make_inputs, make_step_inputs, step, with_state
from helpers import DTYPES, LAYOUTS, arrange, captured, says
from torch import Tensor

from ssm_kernels import causal_conv1d_update

OPERATOR = "causal_conv1d"

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_activation = pytest.mark.parametrize("activation", ["silu", None])
STATE_DTYPES = [
    *((dtype, dtype) for dtype in DTYPES),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
]
every_step_dtype = pytest.mark.parametrize(
    ("dtype", "state_dtype"), STATE_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch.")
)


@pytest.mark.parametrize("seqlen", [None, 1, 2, 5, 40])
@every_activation
@every_step_dtype
def test_step_matches_reference(dtype, state_dtype, activation, seqlen, device):
    for channels, (width, length), slots in itertools.product((5, 200), ((4, 4), (4, 3), (2, 6)), (None, 7)):
        inputs = make_step_inputs(
            seqlen=seqlen,
            channels=channels,
            width=width,
            length=length,
            slots=slots,
            activation=activation,
            dtype=dtype,
            state_dtype=state_dtype,
            weight_dtype=dtype if slots else None,
            device=device,
        )
        assert_step_matches_reference(inputs)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 9])
def test_step_of_every_width(width, device):
    for dtype, more, seqlen, bias in itertools.product((torch.float64, torch.bfloat16), (0, 1, 3), (None, 3), (True, False)):
        length = width - 1 + more
        if length:
            inputs = make_step_inputs(width=width, length=length, seqlen=seqlen, bias=bias, dtype=dtype, device=device)
            assert_step_matches_reference(inputs)


def test_step_of_width_one_without_a_state(device):
    inputs = make_step_inputs(width=1, device=device)
    inputs["conv_state"] = inputs["conv_state"][..., :0]
    assert_step_matches_reference(inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["x", "conv_state", "weight", "bias"])
def test_step_layouts(name, layout, device):
    for dtype, seqlen in itertools.product((torch.float32, torch.bfloat16), (None, 3)):
        inputs = make_step_inputs(channels=24, seqlen=seqlen, dtype=dtype, device=device)
        inputs[name] = arrange(inputs[name], layout)
        if name == "conv_state":
            expected = step(inputs | {name: inputs[name].contiguous()})
            before = inputs[name].clone()
            out = causal_conv1d_update(**inputs)
            assert torch.equal(out, expected[0]) and torch.equal(inputs[name], expected[1])
            assert not torch.equal(inputs[name], before)
        else:
            assert_step_matches_reference(inputs)


@pytest.mark.parametrize("steps", [1, 3])
@every_dtype
def test_steps_equal_the_whole(dtype, steps, device):
    inputs = make_inputs(channels=24, seqlen=30, dtype=dtype, device=device)
    out, final_state = with_state(**inputs)
    state = torch.cat([inputs["initial_state"].new_zeros(2, 24, 1), inputs["initial_state"]], dim=2)
    parameters = {name: inputs[name] for name in ("weight", "bias", "activation")}
    outputs = []
    for t in range(0, 30, steps):
        x = inputs["x"][:, t : t + steps]
        outputs.append(causal_conv1d_update(x if steps > 1 else x[:, 0], state, **parameters))
    decoded = torch.cat(outputs, dim=1) if steps > 1 else torch.stack(outputs, dim=1)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6}.get(dtype, 1e-2)
    torch.testing.assert_close(decoded, out, rtol=tolerance, atol=tolerance)
    assert torch.equal(state[..., 1:], final_state)
    assert torch.equal(state[..., 0], inputs["x"][:, -4])


def test_state_is_updated_in_place(device):
    inputs = make_step_inputs(device=device)
    state, others = inputs["conv_state"], {k: v.clone() for k, v in inputs.items() if isinstance(v, Tensor)}
    address, version = state.data_ptr(), state._version
    _, expected = step(inputs)
    out = causal_conv1d_update(**inputs)
    assert state.data_ptr() == address and torch.equal(state, expected) and state._version == version + 1
    assert all(torch.equal(inputs[name], value) for name, value in others.items() if name != "conv_state")
    assert out.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_slots(strided, dtype, device):
    for seqlen in (None, 3):
        inputs = make_step_inputs(batch=5, slots=9, seqlen=seqlen, channels=24, dtype=torch.float32, device=device)
        indices = torch.tensor([7, -1, 0, torch.iinfo(dtype).min, 3], dtype=dtype, device=device)
        inputs["state_batch_indices"] = torch.stack([indices, indices.new_full((5,), 8)], dim=1)[:, 0] if strided else indices
        inputs["x"][[1, 3]] = math.nan
        out, state = step(inputs)
        untouched = [1, 2, 4, 5, 6, 8]
        assert torch.equal(state[untouched], inputs["conv_state"][untouched])
        assert not torch.equal(state[[0, 3, 7]], inputs["conv_state"][[0, 3, 7]])
        assert out[[1, 3]].count_nonzero() == 0
        rows = inputs | {"x": inputs["x"][[0, 2, 4]], "state_batch_indices": indices[[0, 2, 4]]}
        expected_out, expected_state = assert_step_matches_reference(rows)
        assert torch.equal(out[[0, 2, 4]], expected_out) and torch.equal(state, expected_state)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slot_out_of_range(dtype, device):
    inputs = make_step_inputs(batch=3, slots=4, dtype=torch.float32, device=device)
    inputs["state_batch_indices"] = torch.tensor([1, 4, 2], dtype=dtype, device=device)
    before = inputs["conv_state"].clone()
    if device == "cpu":
        message = "causal_conv1d_update: expected state_batch_indices below the number of slots, 4, got 4 at position 1"
        with pytest.raises(ValueError, match=says(message)):
            causal_conv1d_update(**inputs)
        assert torch.equal(inputs["conv_state"], before)
    else:
        out = causal_conv1d_update(**inputs)
        assert out[1].isnan().all() and out[[0, 2]].isfinite().all()
        assert torch.equal(inputs["conv_state"][[0, 3]], before[[0, 3]])


def test_slot_of_two_rows(device):
    """An error on the CPU. On CUDA a race: only the slots of other rows can be tested. Padding may be repeated."""
    inputs = make_step_inputs(batch=6, slots=4, dtype=torch.float32, device=device)
    before = inputs["conv_state"].clone()
    inputs["state_batch_indices"] = torch.tensor([-1, 2, 0, -1, 2, 3], device=device)
    if device == "cpu":
        message = "causal_conv1d_update: expected distinct state_batch_indices, got 2 at positions 1 and 4"
        with pytest.raises(ValueError, match=says(message)):
            causal_conv1d_update(**inputs)
        assert torch.equal(inputs["conv_state"], before)
    else:
        out = causal_conv1d_update(**inputs)
        once = inputs | {"conv_state": before, "state_batch_indices": torch.tensor([-1, 2, 0, -1, -1, 3], device=device)}
        expected_out, expected_state = step(once)
        assert torch.equal(out[[0, 2, 3, 5]], expected_out[[0, 2, 3, 5]])
        assert torch.equal(inputs["conv_state"][[0, 1, 3]], expected_state[[0, 1, 3]])


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 3, 4), (2, 3, 0), (2, 0, 4)], ids=str)
def test_step_of_nothing(shape, device):
    batch, *seqlen, channels = shape
    inputs = make_step_inputs(batch=batch, seqlen=seqlen[0] if seqlen else None, channels=channels, device=device)
    out, state = step(inputs)
    assert out.shape == shape and torch.equal(state, inputs["conv_state"])


@pytest.mark.cuda
def test_step_in_a_cuda_graph():
    """A captured step replays on new values in the same tensors, and goes on with the same state."""
    draws = [make_step_inputs(channels=72, slots=6, dtype=torch.bfloat16, device="cuda", seed=seed) for seed in range(4)]
    static = {k: v.clone() if isinstance(v, Tensor) else v for k, v in draws[0].items()}
    graph, out = captured(lambda: causal_conv1d_update(**static))
    state = draws[0]["conv_state"].clone()
    static["conv_state"].copy_(state)
    for draw in draws:
        for name in ("x", "weight", "bias"):
            static[name].copy_(draw[name])
        graph.replay()
        expected = causal_conv1d_update(**draw | {"conv_state": state})
        assert torch.equal(out, expected) and torch.equal(static["conv_state"], state)
