"""reverse=True of ssd_chunk_scan: the scan of flipped arguments, its outputs flipped."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, assert_equal, captured, dtypes, no_synchronization, parameter_dtype, says
from operator_spec import tensor_names
from ssd_helpers import (
    KERNEL_CHUNK,
    METHODS,
    MINIMAL,
    SEQUENCES,
    SSD,
    assert_matches_reference,
    at_steps,
    evaluate,
    has_kernels,
    limited_workspace,
    make_cotangents,
    make_inputs,
    plan,
    preferred_products,
)
from torch import Tensor

from ssm_kernels import reference, ssd_chunk_scan

OPERATOR = "ssd_chunk_scan"

# Sequences of no steps, of one, of a chunk, of some chunks, and of parts of chunks.
OFFSETS = (0, 0, 1, 65, 65, 129, 321, 330, 330)
RESETS = ((1, 32, 64, 65, 129, 150, 192, 199), (63, 127, 128))


def flipped_scan(**inputs: Any) -> tuple[Tensor, Tensor]:
    """Flips the inputs, scans without ``reverse``, and flips ``out``."""
    assert inputs["reverse"]
    flipped = {name: inputs[name].flip(axis) for name, axis in SSD.time_axes(inputs).items()}
    packed, initial_states = inputs["cu_seqlens"] is not None, inputs["initial_states"]
    if packed:
        flipped["cu_seqlens"] = inputs["x"].shape[1] - inputs["cu_seqlens"].flip(0)
        flipped["initial_states"] = None if initial_states is None else initial_states.flip(0)
    out, final_states = SSD(**inputs | flipped | {"reverse": False})
    return out.flip(1), final_states.flip(0) if packed else final_states


assert_is_flipped_scan = partial(SSD.assert_same_as, flipped_scan)


@pytest.mark.parametrize("discretization", METHODS)
def test_is_the_flipped_scan(discretization, device):
    for layout, seqlen in itertools.product(("contiguous", "transposed"), (1, KERNEL_CHUNK, 3 * KERNEL_CHUNK + 7)):
        inputs = make_inputs(reverse=True, seqlen=seqlen, layout=layout, discretization=discretization, device=device)
        assert_is_flipped_scan(inputs)


@pytest.mark.parametrize(
    "options",
    [
        MINIMAL,
        {"D": "channel", "dt_limit": (0.2, 0.4)},
        {"dt_limit": None},
        {"batch": 0},
        {"chunk_size": 16},
        {"headdim": 64, "dstate": 64},
        {"batch": 1, "seqlen": 1000},
        {"resets": RESETS, "seqlen": 200},
        {"cu_seqlens": OFFSETS},
        {"cu_seqlens": OFFSETS, "initial_states": False, "layout": "transposed"},
        {"cu_seqlens": OFFSETS, "resets": RESETS[:1]},
        {"cu_seqlens": (0, 0, 0)},
        {"cu_seqlens": (0,)},
    ],
    ids=str,
)
def test_is_the_flipped_scan_with(options, device):
    assert_is_flipped_scan(make_inputs(reverse=True, device=device, **{"seqlen": 70, **options}))


@pytest.mark.parametrize("layout", LAYOUTS)
@dtypes()
def test_matches_the_reference(dtype, layout, device):
    for seqlen in (64, 71):
        options = {"dtype": dtype, "layout": layout, "device": device, "headdim": 16, "dstate": 16}
        results = assert_matches_reference(make_inputs(reverse=True, seqlen=seqlen, **options))
        assert results["out"].dtype == dtype and results["final_states"].dtype == parameter_dtype(dtype)


def test_gradients_have_the_layout_of_their_tensors(device):
    for layout in LAYOUTS:
        inputs = make_inputs(reverse=True, seqlen=70, layout=layout, device=device)
        forward = inputs | {"reverse": False}
        cotangents = make_cotangents(inputs)
        strides = [{name: value.stride() for name, value in evaluate(SSD, of, cotangents).items()} for of in (inputs, forward)]
        assert strides[0] == strides[1]


def test_states(device):
    """The initial states come after the last step, and the final states are the ones at step 0."""
    inputs = make_inputs(reverse=True, seqlen=170, device=device)
    out, final_states = SSD(**inputs)
    later_out, states = SSD(**at_steps(inputs, slice(90, 170)))
    earlier_out, first_states = SSD(**at_steps(inputs, slice(0, 90)) | {"initial_states": states})
    torch.testing.assert_close(torch.cat([earlier_out, later_out], 1), out)
    torch.testing.assert_close(first_states, final_states)
    none = make_inputs(reverse=True, seqlen=0, device=device)
    assert torch.equal(SSD(**none)[1], none["initial_states"])


def test_packed_sequences_one_by_one(device):
    inputs = make_inputs(reverse=True, cu_seqlens=OFFSETS, device=device)
    out, final_states = SSD(**inputs)
    for i, (begin, end) in enumerate(itertools.pairwise(OFFSETS)):
        of_sequence = at_steps(inputs, slice(begin, end)) | {"cu_seqlens": None}
        of_sequence["initial_states"] = inputs["initial_states"][i : i + 1]
        expected_out, expected_states = SSD(**of_sequence)
        torch.testing.assert_close(out[:, begin:end], expected_out)
        torch.testing.assert_close(final_states[i : i + 1], expected_states)


def test_gradcheck(device):
    for options in ({}, {"cu_seqlens": (0, 0, 3, 5)}, {"resets": ((2,), (1, 3))}):
        inputs = make_inputs(reverse=True, device=device, **options)
        names = tensor_names(inputs)
        leaves = [inputs[name].requires_grad_() for name in names]

        def call(*values, inputs=inputs, names=names):
            return SSD(**inputs | dict(zip(names, values, strict=True)))

        assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_values_after_the_step_reach_it_and_values_before_do_not(device):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        inputs = make_inputs(reverse=True, seqlen=200, dtype=dtype, device=device)
        for name in SEQUENCES:
            changed = inputs[name].clone()
            changed[:, 70] = 3
            before, after = (ssd_chunk_scan(**inputs | {name: value}) for value in (inputs[name], changed))
            assert torch.equal(after[:, 71:], before[:, 71:])
            steps = slice(70, 71) if name in "Cz" else slice(40, 71)
            assert (after[:, steps] != before[:, steps]).any()


def test_states_at_is_refused(device):
    inputs = make_inputs(reverse=True, device=device)
    for function in (ssd_chunk_scan, reference.ssd_chunk_scan):
        with pytest.raises(ValueError, match=says("ssd_chunk_scan: expected states_at without reverse, got both")):
            function(**inputs, states_at=[1])


# ----- CUDA's kernels: the order of all sums is the same in both directions. A reverse scan multiplies by mma.sync.

SIZES_OF_KERNELS = [
    {"headdim": 64, "dstate": 64},
    {"headdim": 64, "dstate": 128, "heads": 3, "groups": 1},
    {"headdim": 100, "dstate": 200},
    {"headdim": 7, "dstate": 17, "layout": "permuted"},
    {"seqlen": 64},
    {"seqlen": 20, "resets": RESETS[:1]},
    {"seqlen": 1000, "batch": 1, "heads": 2, "groups": 1, "headdim": 64},
    {"seqlen": 1000, "batch": 1, "headdim": 64, "resets": ((1, 64, 65, 700, 999),)},
    {"batch": 40, "heads": 10, "groups": 1, "seqlen": 65},
    {"resets": RESETS, "seqlen": 200, "headdim": 64},
    {"cu_seqlens": OFFSETS, "headdim": 64, "dstate": 64},
    {"cu_seqlens": (0, 0, 700, 701, 1500, 1500), "headdim": 64, "heads": 2, "groups": 1},
    {"cu_seqlens": OFFSETS, "resets": RESETS[:1], "headdim": 100, "initial_states": False},
    {"cu_seqlens": tuple(range(0, 3000, 64)), "headdim": 64, "heads": 8, "groups": 1},
]


@pytest.mark.cuda
@pytest.mark.parametrize("z", [False, True], ids=["no_z", "z"])
@dtypes(torch.float32, torch.bfloat16, torch.float16)
def test_kernels_have_the_bits_of_the_flipped_scan(dtype, z):
    for options in SIZES_OF_KERNELS:
        inputs = make_inputs(**{"seqlen": 130, "z": z, **options}, reverse=True, dtype=dtype, device="cuda")
        plans = [plan(inputs, is_backward) for is_backward in (False, True)]
        with preferred_products("mma"):
            assert plans == [plan(inputs | {"reverse": False}, is_backward) for is_backward in (False, True)]
            if has_kernels(inputs) or options.get("dstate", 0) <= 64:  # more states may exceed a block's shared memory
                assert_is_flipped_scan(inputs, bits=True)


@pytest.mark.cuda
@dtypes(torch.float32, torch.bfloat16)
def test_kernels_in_sub_batches(dtype):
    """Backward takes some heads of a group at a time, whose sums it adds, and some rows of the batch."""
    options = {"heads": 6, "groups": 2, "headdim": 64, "dstate": 128, "seqlen": 200, "dtype": dtype, "device": "cuda"}
    with limited_workspace(1), preferred_products("mma"):
        assert_is_flipped_scan(make_inputs(reverse=True, **options), bits=True)


@pytest.mark.cuda
def test_nothing_waits_for_the_device():
    inputs = make_inputs(reverse=True, headdim=64, dstate=64, seqlen=300, dtype=torch.bfloat16, device="cuda")
    cotangents = make_cotangents(inputs)
    evaluate(SSD, inputs, cotangents)
    with no_synchronization():
        evaluate(SSD, inputs, cotangents)


@pytest.mark.cuda
def test_cu_seqlens_that_change_in_a_graph():
    """The kernels read the offsets when the graph is replayed."""
    inputs = make_inputs(reverse=True, cu_seqlens=(0, 5, 70, 100), headdim=64, dtype=torch.float32, device="cuda")
    others = torch.tensor([0, 40, 41, 100], dtype=torch.int32, device="cuda")
    expected = evaluate(SSD, inputs | {"cu_seqlens": others})
    graph, found = captured(lambda: evaluate(SSD, inputs))
    inputs["cu_seqlens"].copy_(others)
    graph.replay()
    assert_equal(found, expected)
