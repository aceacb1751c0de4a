"""causal_conv1d: rows that start at any element and have any length give the bits of aligned rows."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conv_helpers import CONV, PACKED, assert_matches_reference, backward_arguments, make_inputs
from guarded_memory import (
    LAYOUTS,
    assert_guards_kept,
    assert_offsets_keep_bits,
    assert_same_bits,
    every_layout,
    guarded,
    guarded_empty,
)

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("kernels_by_layout")]
ops = torch.ops.ssm_kernels

# The axis of x, (batch, seqlen, channels), whose elements are neighbors.
CHANNELS, STEPS = -1, 1
every_axis = pytest.mark.parametrize("axis", [CHANNELS, STEPS], ids=["channels_last", "channels_first"])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@every_axis
@every_dtype
@pytest.mark.parametrize("length", [1, 3, 131, 136, 520, 777])
def test_bits_at_every_offset(length, dtype, axis):
    """136 and 520 elements are whole vectors, for which other kernels take aligned rows."""
    size = {"channels": length, "seqlen": 75} if axis == CHANNELS else {"channels": 3, "seqlen": length}
    layouts = LAYOUTS if length == 136 else LAYOUTS[1::3]
    for width, activation, initial_state in ((4, "silu", True), (4, "silu", False), (3, None, True)):
        inputs = make_inputs(
            **size, width=width, activation=activation, initial_state=initial_state, dtype=dtype, device="cuda"
        )
        assert_offsets_keep_bits(CONV, inputs, {"x": (axis,), "out": (axis,)}, layouts=layouts)


@every_dtype
def test_rows_that_share_a_warp(dtype):
    """Channels-first rows of few steps: 2 to 16 lanes a row, and more rows than fill the last warp."""
    for length, channels in ((8, 37), (20, 37), (48, 21), (104, 5)):
        inputs = make_inputs(channels=channels, seqlen=length, dtype=dtype, device="cuda")
        assert_offsets_keep_bits(CONV, inputs, {"x": (STEPS,), "out": (STEPS,)}, layouts=LAYOUTS[1::3])
        assert_matches_reference(inputs | {"x": inputs["x"].mT.contiguous().mT})


@every_dtype
def test_parameters_that_start_between_vectors(dtype):
    """Aligned rows, and a weight and a bias whose first channel is not at a multiple of 16 bytes."""
    inputs = make_inputs(channels=1536, seqlen=259, dtype=dtype, weight_dtype=dtype, device="cuda")
    shifted = {name: torch.cat([inputs[name][:1], inputs[name]])[1:] for name in ("weight", "bias")}
    expected, actual = (CONV.evaluate(CONV, given) for given in (inputs, inputs | shifted))
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_elements_than_one_thread_each(dtype):
    """Forward takes runs, shifted rows long warps, backward tiles of several warps."""
    inputs = make_inputs(channels=1536, seqlen=259, dtype=dtype, device="cuda")
    assert_offsets_keep_bits(CONV, inputs, {"x": (CHANNELS,), "out": (CHANNELS,)}, layouts=LAYOUTS[3:4])
    assert_matches_reference(inputs)


@every_dtype
@pytest.mark.parametrize("cut", [{"cu_seqlens": PACKED}, {"seq_idx": True}], ids=["packed", "seq_idx"])
def test_bits_of_packed_rows(cut, dtype):
    for channels in (136, 21):
        inputs = make_inputs(channels=channels, seqlen=75, **cut, dtype=dtype, device="cuda")
        assert_offsets_keep_bits(CONV, inputs, {"x": (CHANNELS,), "out": (CHANNELS,)}, layouts=LAYOUTS[1::3])


@every_layout
@every_axis
def test_rows_of_different_layouts(axis, layout):
    """x, grad_out and grad_x start at different elements; grad_x is part of a wider tensor."""
    for dtype, size in itertools.product((torch.float32, torch.bfloat16), ((150, 136), (136, 259), (133, 131))):
        inputs = make_inputs(seqlen=size[0], channels=size[1], dtype=dtype, device="cuda")
        grad_out, *others = backward_arguments(inputs)
        expected = dict(zip(("x", "weight", "bias", "state"), ops._causal_conv1d_bwd(grad_out, *others), strict=True))
        incoming = guarded(grad_out, LAYOUTS[5], axes=(axis,))
        x = guarded(inputs["x"], layout, axes=(axis,))
        arguments = [incoming, *(x if other is inputs["x"] else other for other in others)]
        grad_x = guarded_empty(x.shape, LAYOUTS[2], dtype=dtype, device="cuda", axes=(axis,))
        actual = {"x": grad_x} | dict(
            zip(("weight", "bias", "state"), ops._causal_conv1d_bwd_out(*arguments, grad_x), strict=True)
        )
        assert_guards_kept(grad_x, "grad_x")
        if axis == CHANNELS:
            assert_same_bits(actual, expected)
        assert_same_bits({"x": grad_x}, {"x": expected["x"]})


@every_axis
def test_infinities_after_the_last_tap_change_nothing(axis):
    """Steps that the last vector of an odd row lacks take no part in sums."""
    inputs = make_inputs(channels=5, seqlen=133, activation=None, dtype=torch.float32, device="cuda")
    inputs["x"][:, -1] = math.inf
    inputs["x"] = guarded(inputs["x"], LAYOUTS[3], axes=(axis,))
    results = CONV.evaluate(CONV, inputs, CONV.make_cotangents(inputs))
    # Only the tap of lag 0 has a product with the last step.
    assert results["grad_weight"][:, :-1].isfinite().all()


@every_axis
@pytest.mark.parametrize("seqlen", [1, 2, 17, 63, 197, 777])
def test_matches_reference_at_odd_sizes(seqlen, axis):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_inputs(channels=33, seqlen=seqlen, dtype=dtype, device="cuda")
        inputs["x"] = guarded(inputs["x"], LAYOUTS[-1], axes=(axis,))
        assert_matches_reference(inputs)
