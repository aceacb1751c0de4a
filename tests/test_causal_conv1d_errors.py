"""causal_conv1d and causal_conv1d_update: what bad arguments are told. A value or shape: ValueError; a dtype or device:
RuntimeError.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conv_helpers import backward_arguments, make_inputs, make_step_inputs
from helpers import BAD_OFFSETS, says
from torch import Tensor

from ssm_kernels import causal_conv1d, causal_conv1d_update

OPERATOR = "causal_conv1d"
ops = torch.ops.ssm_kernels

SIZES = {"batch": 2, "seqlen": 9, "channels": 5, "width": 4, "dtype": torch.float32}


def assert_raises(function, inputs: dict[str, Any], error: type[Exception], *message: str) -> None:
    """On the device and on meta; after the error the next call works."""
    for place in (None, "meta"):
        moved = {k: v.to(place) if place and isinstance(v, Tensor) else v for k, v in inputs.items()}
        with pytest.raises(error, match=rf"^{says(*message)}"):
            function(**moved)


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("x", [(9, 5), (1, 2, 9, 5), ()], "(batch, seqlen, channels)"),
        ("weight", [(5,), (5, 1, 4), ()], "(channels, width)"),
        ("weight", [(4, 4), (1, 4), (6, 4)], "(channels, width) = [5, "),
        ("bias", [(4,), (1,), (5, 1), ()], "(channels,) = [5]"),
        ("seq_idx", [(2, 8), (9,), (1, 9), (2, 9, 1)], "(batch, seqlen) = [2, 9]"),
        ("initial_state", [(2, 5, 4), (1, 5, 3), (2, 4, 3), (2, 3), (2, 3, 5)], "(batch, channels, width - 1) = [2, 5, 3]"),
    ],
)
def test_shapes(name, shapes, expected, device):
    for shape in shapes:
        inputs = make_inputs(**SIZES, device=device)
        dtype = torch.int64 if name == "seq_idx" else torch.float32
        inputs[name] = torch.zeros(shape, dtype=dtype, device=device)
        assert_raises(
            causal_conv1d, inputs, ValueError, f"causal_conv1d: expected {name} of shape {expected}", f", got {[*shape]}"
        )


def test_shape_of_packed_states(device):
    inputs = make_inputs(**SIZES | {"cu_seqlens": (0, 4, 4, 9)}, device=device)
    inputs["initial_state"] = inputs["initial_state"][:1]
    message = "causal_conv1d: expected initial_state of shape (sequences, channels, width - 1) = [3, 5, 3], got [1, 5, 3]"
    assert_raises(causal_conv1d, inputs, ValueError, message)


def test_width_of_zero(device):
    inputs = make_inputs(**SIZES, initial_state=False, device=device)
    inputs["weight"] = inputs["weight"][:, :0]
    message = "causal_conv1d: expected weight of a width of at least 1, got [5, 0]"
    assert_raises(causal_conv1d, inputs, ValueError, message)


@pytest.mark.parametrize("name", ["relu", "", "SiLU", "gelu"])
def test_unknown_activation(name, device):
    for function, inputs in (
        (causal_conv1d, make_inputs(activation=name, device=device)),
        (causal_conv1d_update, make_step_inputs(activation=name, device=device)),
    ):
        message = f"{function.__name__}: unknown activation '{name}', expected None, 'silu' or 'swish'"
        assert_raises(function, inputs, ValueError, message)


def test_both_ways_of_packing(device):
    inputs = make_inputs(cu_seqlens=(0, 4, 9), device=device)
    inputs["seq_idx"] = torch.zeros(1, 9, dtype=torch.int32, device=device)
    assert_raises(causal_conv1d, inputs, ValueError, "causal_conv1d: expected seq_idx or cu_seqlens, got both")


@pytest.mark.parametrize("offsets", BAD_OFFSETS, ids=str)
def test_values_of_offsets(offsets):
    for dtype in (torch.int32, torch.int64):
        inputs = make_inputs(cu_seqlens=(0, 10), initial_state=False)
        inputs["cu_seqlens"] = torch.tensor(offsets, dtype=dtype)
        with pytest.raises(ValueError, match=says(f"causal_conv1d: expected cu_seqlens {BAD_OFFSETS[offsets]}")):
            causal_conv1d(**inputs)


def test_offsets_with_a_batch(device):
    for batch in (0, 2):
        inputs = make_inputs(batch=batch, initial_state=False, device=device)
        inputs["cu_seqlens"] = torch.tensor([0, 9], device=device)
        assert_raises(causal_conv1d, inputs, ValueError, f"causal_conv1d: expected batch 1 with cu_seqlens, got {batch}")


def test_shape_of_offsets(device):
    for shape in ((0,), (), (1, 3)):
        inputs = make_inputs(batch=1, initial_state=False, device=device)
        inputs["cu_seqlens"] = torch.zeros(shape, dtype=torch.int64, device=device)
        message = f"causal_conv1d: expected cu_seqlens of shape (sequences + 1,), got {[*shape]}"
        assert_raises(causal_conv1d, inputs, ValueError, message)


BAD_DTYPES = [
    # dtype of the rest, argument, its dtype, what is expected
    (torch.float32, "x", torch.int64, "expected x of dtype Float, Half, BFloat16 or Double, got Long"),
    (torch.float32, "x", torch.complex64, "expected a real x, got ComplexFloat: complex tensors are not supported"),
    (torch.float32, "weight", torch.bfloat16, "expected weight of dtype Float (with x of dtype Float), got BFloat16"),
    (torch.float16, "weight", torch.bfloat16, "expected weight of dtype ", "Half", "Float", "got BFloat16"),
    (torch.float64, "bias", torch.float32, "expected bias of dtype Double (with x of dtype Double), got Float"),
    (torch.bfloat16, "initial_state", torch.float32, "expected initial_state of dtype BFloat16", "got Float"),
    (torch.float32, "seq_idx", torch.int16, "expected seq_idx of dtype Int or Long, got Short"),
    (torch.float32, "seq_idx", torch.float32, "expected seq_idx of dtype Int or Long, got Float"),
]


@pytest.mark.parametrize("case", BAD_DTYPES, ids=str)
def test_dtypes(case, device):
    dtype, name, got, *message = case
    inputs = make_inputs(seq_idx=True, dtype=dtype, device=device)
    assert_raises(causal_conv1d, inputs | {name: inputs[name].to(got)}, RuntimeError, "causal_conv1d: ", *message)


@pytest.mark.parametrize("name", ["weight", "bias", "initial_state", "seq_idx", "cu_seqlens"])
def test_mixed_devices(name, device):
    inputs = make_inputs(**{"cu_seqlens": (0, 4, 9)} if name == "cu_seqlens" else {"seq_idx": True}, device=device)
    message = f"causal_conv1d: expected {name} on {inputs['x'].device} (the device of x), got meta"
    with pytest.raises(RuntimeError, match=says(message)):
        causal_conv1d(**(inputs | {name: inputs[name].to("meta")}))


def test_gradients_of_a_wrong_shape_or_dtype(device):
    inputs = make_inputs(device=device)
    arguments = [*backward_arguments(inputs)]
    for index, name in enumerate(("grad_out", "grad_final_state")):
        for bad, error in ((arguments[index][:1], ValueError), (arguments[index].float(), RuntimeError)):
            with pytest.raises(error, match=says(f"causal_conv1d backward: expected {name} of ")):
                ops._causal_conv1d_bwd(*arguments[:index], bad, *arguments[index + 1 :])
    for bad, error in ((inputs["x"][:1].clone(), ValueError), (inputs["x"].float(), RuntimeError)):
        with pytest.raises(error, match=says("causal_conv1d backward: expected grad_x of ")):
            ops._causal_conv1d_bwd_out(*arguments, bad)
        with pytest.raises(error, match=says("causal_conv1d backward: expected grad_out_2 of ")):
            ops._causal_conv1d_bwd_out(*arguments, inputs["x"].clone(), bad)
    with pytest.raises(ValueError, match=says("causal_conv1d backward: expected grad_out with grad_out_2, got None")):
        ops._causal_conv1d_bwd_out(None, *arguments[1:], inputs["x"].clone(), arguments[0])


STEP_SHAPES = [
    ("x", (2, 3, 5, 1), "(batch, channels) or (batch, seqlen, channels), got [2, 3, 5, 1]"),
    ("x", (5,), "(batch, channels) or (batch, seqlen, channels), got [5]"),
    ("conv_state", (3, 5), "(batch, channels, length), got [3, 5]"),
    ("conv_state", (2, 5, 4), "(batch, channels, length) = [3, 5, 4], got [2, 5, 4]"),
    ("conv_state", (3, 4, 4), "(batch, channels, length) = [3, 5, 4], got [3, 4, 4]"),
    ("weight", (4, 4), "(channels, width) = [5, 4], got [4, 4]"),
    ("bias", (4,), "(channels,) = [5], got [4]"),
    ("state_batch_indices", (2,), "(batch,) = [3], got [2]"),
]


@pytest.mark.parametrize(("name", "shape", "expected"), STEP_SHAPES)
def test_shapes_of_the_step(name, shape, expected, device):
    dtype = torch.int64 if name == "state_batch_indices" else torch.float64
    inputs = make_step_inputs(device=device) | {name: torch.zeros(shape, dtype=dtype, device=device)}
    assert_raises(causal_conv1d_update, inputs, ValueError, f"causal_conv1d_update: expected {name} of shape {expected}")


def test_state_that_is_too_short(device):
    inputs = make_step_inputs(length=2, device=device)
    message = "causal_conv1d_update: expected conv_state of at least width - 1 = 3 steps, got [3, 5, 2]"
    assert_raises(causal_conv1d_update, inputs, ValueError, message)


@pytest.mark.parametrize(
    ("dtype", "name", "got", "message"),
    [
        (
            torch.float32,
            "conv_state",
            torch.bfloat16,
            "expected conv_state of dtype Float (with x of dtype Float), got BFloat16",
        ),
        (torch.float64, "conv_state", torch.float32, "expected conv_state of dtype Double (with x of dtype Double), got Float"),
        (torch.float32, "state_batch_indices", torch.int16, "expected state_batch_indices of dtype Int or Long, got Short"),
    ],
)
def test_dtypes_of_the_step(dtype, name, got, message, device):
    inputs = make_step_inputs(slots=3, dtype=dtype, device=device)
    changed = inputs | {name: inputs[name].to(got)}
    assert_raises(causal_conv1d_update, changed, RuntimeError, f"causal_conv1d_update: {message}")


@pytest.mark.parametrize("name", ["conv_state", "weight", "bias", "state_batch_indices"])
def test_mixed_devices_of_the_step(name, device):
    inputs = make_step_inputs(slots=3, device=device)
    message = f"causal_conv1d_update: expected {name} on {inputs['x'].device} (the device of x), got meta"
    with pytest.raises(RuntimeError, match=says(message)):
        causal_conv1d_update(**(inputs | {name: inputs[name].to("meta")}))


def test_state_whose_elements_share_memory(device):
    inputs = make_step_inputs(device=device)
    shape = inputs["conv_state"].shape
    windows = torch.zeros(40, dtype=torch.float64, device=device).as_strided(shape, (4, 2, 1))
    for state in (inputs["conv_state"][:1].expand(shape), windows):
        before = state.clone()
        with pytest.raises(
            RuntimeError,
            match=says("causal_conv1d_update: expected conv_state, which is updated in place", "conv_state.clone()"),
        ):
            causal_conv1d_update(**inputs | {"conv_state": state})
        assert torch.equal(state, before)


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_state_that_shares_memory_with_another_argument(name, device):
    inputs = make_step_inputs(channels=4, batch=4, device=device)
    state = inputs["conv_state"]
    memory = torch.zeros(state.numel() + 100, dtype=torch.float64, device=device)
    inputs["conv_state"] = memory[: state.numel()].view(state.shape).copy_(state)
    before = memory.clone()
    shared = memory[state.numel() - 1 :][: inputs[name].numel()].view(inputs[name].shape)
    message = f"causal_conv1d_update: expected {name} to share no memory with conv_state, which is updated in place"
    with pytest.raises(RuntimeError, match=says(message, f"{name}.clone()")):
        causal_conv1d_update(**inputs | {name: shared})
    assert torch.equal(memory, before)
    beside = memory[state.numel() :][: inputs[name].numel()].view(inputs[name].shape)
    causal_conv1d_update(**inputs | {name: beside})


def test_lazy_copies_of_the_state_share_no_memory(device):
    inputs = make_step_inputs(device=device)
    memory = inputs["conv_state"].clone()
    state, x = torch._lazy_clone(memory), torch._lazy_clone(memory)[..., 0]
    causal_conv1d_update(**inputs | {"conv_state": state, "x": x})
    assert torch.equal(memory, inputs["conv_state"]) and not torch.equal(state, memory)
