"""reverse=True of selective_scan: the scan of flipped arguments, its outputs flipped."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, METHODS, assert_equal, captured, parameter_dtype, says
from operator_spec import tensor_names
from selective_scan_helpers import (
    CHUNK,
    MINIMAL,
    SELECTIVE_SCAN,
    assert_matches_reference,
    at_steps,
    evaluate,
    make_inputs,
)
from torch import Tensor

from ssm_kernels import reference, selective_scan

OPERATOR = "selective_scan"
pytestmark = pytest.mark.usefixtures("kernel")

# Sequences of no steps, of one, of a chunk, of some chunks, and of parts of chunks.
OFFSETS = (0, 0, 1, 33, 33, 65, 193, 200, 200)
RESETS = ((1, 32, 33, 34, 65, 97, 150, 192, 199),)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def flipped_scan(**inputs: Any) -> tuple[Tensor, Tensor]:
    """Flips the inputs, scans without ``reverse``, and flips ``out``."""
    assert inputs["reverse"]
    flipped = {name: inputs[name].flip(axis) for name, axis in SELECTIVE_SCAN.time_axes(inputs).items()}
    packed, initial_state = inputs["cu_seqlens"] is not None, inputs["initial_state"]
    if packed:
        flipped["cu_seqlens"] = inputs["u"].shape[-1] - inputs["cu_seqlens"].flip(0)
        flipped["initial_state"] = None if initial_state is None else initial_state.flip(0)
    out, last_state = SELECTIVE_SCAN(**inputs | flipped | {"reverse": False})
    return out.flip(-1), last_state.flip(0) if packed else last_state


assert_is_flipped_scan = partial(SELECTIVE_SCAN.assert_same_as, flipped_scan)


@pytest.mark.parametrize("discretization", METHODS)
def test_is_the_flipped_scan(discretization, device):
    for layout, seqlen in itertools.product(("contiguous", "transposed"), (1, CHUNK, 3 * CHUNK + 7)):
        inputs = make_inputs(reverse=True, seqlen=seqlen, layout=layout, discretization=discretization, device=device)
        assert_is_flipped_scan(inputs)


@pytest.mark.parametrize(
    "options",
    [
        MINIMAL,
        {"groups": 2},
        {"B": "constant", "C": "constant"},
        {"B": "constant"},
        {"dim": 128, "dstate": 16, "groups": 2},
        {"dim": 64, "dstate": 16, "layout": "transposed"},
        {"dstate": 40},
        {"seqlen": 20, "dstate": 16},
        {"batch": 1, "dim": 3, "seqlen": 1100},
        {"resets": RESETS, "seqlen": 200},
        {"cu_seqlens": OFFSETS},
        {"cu_seqlens": OFFSETS, "initial_state": False, "layout": "transposed", "dim": 16},
        {"cu_seqlens": OFFSETS, "resets": RESETS, "groups": 2},
    ],
    ids=str,
)
def test_is_the_flipped_scan_with(options, device):
    assert_is_flipped_scan(make_inputs(reverse=True, device=device, **{"seqlen": 70, **options}))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_the_reference(dtype, layout, device):
    for seqlen in (64, 71):
        options = {"dtype": dtype, "layout": layout, "device": device, "dim": 64, "dstate": 16}
        results = assert_matches_reference(make_inputs(reverse=True, seqlen=seqlen, **options))
        assert results["out"].dtype == dtype and results["last_state"].dtype == parameter_dtype(dtype)


@pytest.mark.parametrize("sizes", [{"dim": 64, "dstate": 16}, {"dim": 100, "dstate": 13}], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_has_the_bits_of_the_flipped_scan(dtype, layout, sizes, device):
    """The order of the sums over time does not depend on the direction. The last tile is not whole."""
    inputs = make_inputs(reverse=True, **sizes, seqlen=200, layout=layout, dtype=dtype, device=device)
    assert_is_flipped_scan(inputs, bits=True)


def test_states(device):
    """The initial state comes after the last step, and the last state is the one at step 0."""
    inputs = make_inputs(reverse=True, seqlen=70, device=device)
    out, last_state = SELECTIVE_SCAN(**inputs)
    later_out, state = SELECTIVE_SCAN(**at_steps(inputs, slice(40, 70)))
    earlier_out, first_state = SELECTIVE_SCAN(**at_steps(inputs, slice(0, 40)) | {"initial_state": state})
    torch.testing.assert_close(torch.cat([earlier_out, later_out], -1), out)
    torch.testing.assert_close(first_state, last_state)
    none = make_inputs(reverse=True, seqlen=0, device=device)
    assert torch.equal(SELECTIVE_SCAN(**none)[1], none["initial_state"])


def test_gradcheck(device):
    for options in ({}, {"cu_seqlens": (0, 0, 3, 5)}, {"resets": ((2,), (1, 3))}):
        inputs = make_inputs(dim=2, dstate=2, reverse=True, device=device, **options)
        names = tensor_names(inputs)
        leaves = [inputs[name].requires_grad_() for name in names]

        def call(*values, inputs=inputs, names=names):
            return SELECTIVE_SCAN(**inputs | dict(zip(names, values, strict=True)))

        assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_values_after_the_step_reach_it_and_values_before_do_not(device):
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(reverse=True, seqlen=100, dtype=dtype, device=device)
        u = inputs["u"].clone()
        u[..., 30] = torch.nan
        clean, out = (selective_scan(**inputs | {"u": value}) for value in (inputs["u"], u))
        assert torch.equal(out[..., 31:], clean[..., 31:]) and out[..., :31].isnan().all()


def test_states_at_is_refused(device):
    inputs = make_inputs(reverse=True, device=device)
    for function in (selective_scan, reference.selective_scan):
        with pytest.raises(ValueError, match=says("selective_scan: expected states_at without reverse, got both")):
            function(**inputs, states_at=[1])


@pytest.mark.cuda
def test_cu_seqlens_that_change_in_a_graph():
    """The rows of a reverse call follow the offsets when the graph is replayed."""
    inputs = make_inputs(reverse=True, cu_seqlens=(0, 5, 70, 100), dim=64, dtype=torch.float32, device="cuda")
    others = torch.tensor([0, 40, 41, 100], dtype=torch.int32, device="cuda")
    expected = evaluate(SELECTIVE_SCAN, inputs | {"cu_seqlens": others})
    graph, found = captured(lambda: evaluate(SELECTIVE_SCAN, inputs))
    inputs["cu_seqlens"].copy_(others)
    graph.replay()
    assert_equal(found, expected)
