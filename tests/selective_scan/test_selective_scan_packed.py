"""Packed sequences of selective_scan: cu_seqlens and seq_idx."""

import itertools
import math

import pytest
import torch
from helpers import LAYOUTS, METHODS, arrange, assert_equal, captured, says
from operator_spec import tensor_names
from selective_scan_helpers import (
    SELECTIVE_SCAN,
    assert_matches_reference,
    at_steps,
    evaluate,
    evaluate_in_float64,
    make_cotangents,
    make_inputs,
)

from ssm_kernels import selective_scan

OPERATOR = "selective_scan"
pytestmark = pytest.mark.usefixtures("kernel")

# Sequences of no steps, of one, of a chunk, of some chunks, and of parts of chunks.
OFFSETS = (0, 0, 1, 33, 33, 65, 193, 200, 200)
RESETS = (1, 32, 33, 34, 65, 97, 150, 192, 199)
SEQUENCES = ("out", "grad_u", "grad_delta", "grad_z", "grad_B", "grad_C")
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def assert_close(actual, expected, name):
    tolerance = 1e-10 if expected.dtype == torch.float64 else 2e-5 if expected.dtype == torch.float32 else 2e-2
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * scale, msg=lambda m: f"{name}: {m}")


def assert_one_by_one(inputs):
    """Outputs, last states and every gradient are those of a call for each sequence."""
    cotangents = make_cotangents(inputs)
    packed = evaluate(SELECTIVE_SCAN, inputs, cotangents)
    offsets = inputs["cu_seqlens"].tolist()
    sums = {}
    for i, (begin, end) in enumerate(itertools.pairwise(offsets)):
        one = at_steps(inputs, slice(begin, end)) | {"cu_seqlens": None}
        if inputs["initial_state"] is not None:
            one["initial_state"] = inputs["initial_state"][i : i + 1]
        alone = evaluate(SELECTIVE_SCAN, one, (cotangents[0][..., begin:end], cotangents[1][i : i + 1]))
        for name, value in alone.items():
            if name in SEQUENCES and value.dim() > 2:
                assert_close(packed[name][..., begin:end], value, name)
            elif name in ("last_state", "grad_initial_state"):
                assert_close(packed[name][i : i + 1], value, name)
            else:
                sums[name] = sums.get(name, 0) + value.double()
    for name, value in sums.items():
        assert_close(packed[name], value.to(packed[name].dtype), name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("discretization", METHODS)
def test_one_by_one(discretization, dtype, device):
    for layout in ("contiguous", "transposed"):
        options = {"dtype": dtype, "layout": layout, "device": device, "dim": 8}
        assert_one_by_one(make_inputs(cu_seqlens=OFFSETS, discretization=discretization, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"initial_state": False},
        {"B": "constant", "C": "constant"},
        {"B": "constant", "groups": 2},
        {"groups": 2, "dstate": 16, "dim": 128},
        {"dstate": 40},
        {"dstate": 16, "dim": 64, "layout": "transposed"},
        {"D": False, "z": False, "delta_bias": False, "delta_softplus": False},
    ],
    ids=str,
)
def test_one_by_one_with(options, device):
    for dtype, resets in itertools.product((torch.float64, torch.float32), (None, (RESETS,))):
        assert_one_by_one(make_inputs(cu_seqlens=OFFSETS, resets=resets, dtype=dtype, device=device, **options))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_each_argument(layout, device):
    inputs = make_inputs(cu_seqlens=OFFSETS, groups=2, device=device)
    expected = evaluate(SELECTIVE_SCAN, inputs, make_cotangents(inputs))
    for argument in tensor_names(inputs):
        arranged = inputs | {argument: arrange(inputs[argument], layout)}
        actual = evaluate(SELECTIVE_SCAN, arranged, make_cotangents(inputs))
        SELECTIVE_SCAN.assert_close(actual, expected)


@pytest.mark.parametrize("discretization", METHODS)
def test_matches_the_reference(discretization, device):
    options = {"discretization": discretization, "device": device}
    for dtype in (torch.float64, torch.float32):
        assert_matches_reference(make_inputs(cu_seqlens=OFFSETS, dtype=dtype, **options))
        assert_matches_reference(make_inputs(cu_seqlens=OFFSETS, resets=(RESETS,), dtype=dtype, **options))
        assert_matches_reference(make_inputs(seqlen=70, resets=((1, 32, 64), (5, 69)), dtype=dtype, **options))


def test_more_sequences_than_backward_scans_at_a_time(device):
    """Sequences of unequal lengths, shorter than a chunk."""
    offsets = tuple(itertools.accumulate((i % 3 for i in range(150)), initial=0))
    assert_matches_reference(make_inputs(cu_seqlens=offsets, device=device))
    assert_matches_reference(make_inputs(seqlen=80, resets=(range(1, 80), range(2, 80, 2)), device=device))


def test_gradcheck(device):
    for options in (
        {"cu_seqlens": (0, 0, 3, 5)},
        {"cu_seqlens": (0, 3, 6), "resets": ((2, 3, 4),)},
        {"resets": ((2,), (1, 3))},
    ):
        inputs = make_inputs(dim=2, dstate=2, device=device, **options)
        names = tensor_names(inputs)
        leaves = [inputs[name].requires_grad_() for name in names]

        def call(*values, inputs=inputs, names=names):
            return SELECTIVE_SCAN(**inputs | dict(zip(names, values, strict=True)))

        assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_offsets_of_either_dtype_and_any_stride(device):
    inputs = make_inputs(cu_seqlens=OFFSETS, device=device)
    expected = evaluate(SELECTIVE_SCAN, inputs, make_cotangents(inputs))
    offsets = inputs["cu_seqlens"].long()
    for cu_seqlens in (offsets, offsets.repeat_interleave(2)[::2]):
        assert_equal(evaluate(SELECTIVE_SCAN, inputs | {"cu_seqlens": cu_seqlens}, make_cotangents(inputs)), expected)


def test_numbers_of_sequences_of_either_dtype_and_any_stride(device):
    """Negative numbers are numbers like others."""
    inputs = make_inputs(resets=((2,), (1, 3)), device=device)
    expected = evaluate(SELECTIVE_SCAN, inputs, make_cotangents(inputs))
    seq_idx = inputs["seq_idx"]
    for other in (seq_idx.long(), seq_idx.t().contiguous().t(), seq_idx.long() * 2**40 - 7, -seq_idx):
        assert_equal(evaluate(SELECTIVE_SCAN, inputs | {"seq_idx": other}, make_cotangents(inputs)), expected)


def test_both_ways_to_name_sequences_agree(device):
    packed = make_inputs(cu_seqlens=(0, 5, 70, 100), initial_state=False, device=device)
    seq_idx = torch.tensor([[0] * 5 + [1] * 65 + [2] * 30], dtype=torch.int32, device=device)
    out, last_states = SELECTIVE_SCAN(**packed)
    other_out, last_state = SELECTIVE_SCAN(**packed | {"cu_seqlens": None, "seq_idx": seq_idx})
    assert torch.equal(other_out, out) and torch.equal(last_state, last_states[-1:])


@pytest.mark.parametrize("name", ["resets", "packed"])
def test_one_sequence_has_the_bits_of_no_sequences(name, device):
    for dtype in DTYPES:
        inputs = make_inputs(batch=1, seqlen=70, layout="transposed", dim=8, dtype=dtype, device=device)
        one = {"seq_idx": torch.full((1, 70), 3, dtype=torch.int32, device=device)}
        if name == "packed":
            one = {"cu_seqlens": torch.tensor([0, 70], device=device)}
        cotangents = make_cotangents(inputs)
        assert_equal(evaluate(SELECTIVE_SCAN, inputs | one, cotangents), evaluate(SELECTIVE_SCAN, inputs, cotangents))


def test_same_bits_every_time(device):
    inputs = make_inputs(cu_seqlens=OFFSETS, resets=(RESETS,), dtype=torch.float32, device=device)
    first, second = (evaluate(SELECTIVE_SCAN, inputs, make_cotangents(inputs)) for _ in range(2))
    assert_equal(first, second)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("resets", [False, True], ids=["packed", "seq_idx"])
def test_values_stay_in_their_sequence(resets, value, device):
    """Infinite states do not become NaN in the next sequence."""
    offsets = (0, 20, 60, 100)
    for dtype in (torch.float64, torch.float32):
        options = {"resets": (offsets[1:-1],), "batch": 1, "seqlen": 100} if resets else {"cu_seqlens": offsets}
        inputs = make_inputs(initial_state=False, dtype=dtype, device=device, **options)
        cotangents = (make_cotangents(inputs)[0], None)
        clean = evaluate(SELECTIVE_SCAN, inputs, cotangents)
        u = inputs["u"].clone()
        u[..., 30] = value
        actual = evaluate(SELECTIVE_SCAN, inputs | {"u": u}, cotangents)
        others = [*range(20), *range(60, 100)]
        for name in SEQUENCES:
            assert torch.equal(actual[name][..., others], clean[name][..., others]), name
        assert not actual["out"][..., 30].isfinite().all()
        rows = slice(0, 1) if resets else [0, 2]
        assert torch.equal(actual["last_state"][rows], clean["last_state"][rows])


@pytest.mark.parametrize("needs_grad", [False, True])
def test_states_at(needs_grad, device):
    """States belong to the sequence of the step before the position."""
    for options in (
        {"cu_seqlens": OFFSETS},
        {"cu_seqlens": OFFSETS, "resets": (RESETS,)},
        {"seqlen": 70, "resets": ((1, 64),)},
    ):
        inputs = make_inputs(device=device, **options)
        if needs_grad:
            inputs["u"].requires_grad_()
        positions = [0, 1, 2, 32, 33, 64, 65, 70]
        results = selective_scan(**inputs, return_last_state=True, states_at=positions)
        expected = SELECTIVE_SCAN.reference_function(**inputs, return_last_state=True, states_at=positions)
        for actual, exact in zip(results, expected, strict=True):
            torch.testing.assert_close(actual, exact, rtol=1e-10, atol=1e-10)


def test_no_sequences(device):
    inputs = make_inputs(cu_seqlens=(0,), device=device)
    results = evaluate(SELECTIVE_SCAN, inputs, make_cotangents(inputs))
    exact = evaluate_in_float64(inputs, make_cotangents(inputs))
    assert results["last_state"].shape[0] == 0 and results.keys() == exact.keys()
    for name, value in results.items():
        assert value.shape == exact[name].shape and not value.any()


def test_empty_sequences_keep_their_state(device):
    for resets in (None, ((),)):
        inputs = make_inputs(cu_seqlens=(0, 0, 0), resets=resets, device=device)
        _, cotangent = make_cotangents(inputs)
        results = evaluate(SELECTIVE_SCAN, inputs, (None, cotangent), names=["initial_state"])
        assert torch.equal(results["last_state"], inputs["initial_state"])
        assert torch.equal(results["grad_initial_state"], cotangent)


@pytest.mark.cuda
def test_seq_idx_cannot_be_captured():
    inputs = make_inputs(seqlen=70, resets=((3, 40),), dtype=torch.float32, device="cuda")
    with pytest.raises(RuntimeError, match=says("selective_scan: expected no seq_idx while a CUDA graph is captured")):
        captured(lambda: selective_scan(**inputs))


def test_opcheck(device):
    for options in (
        {"cu_seqlens": OFFSETS},
        {"seqlen": 70, "resets": ((3, 40),)},
        {"cu_seqlens": OFFSETS, "resets": (RESETS,)},
    ):
        inputs = make_inputs(device=device, **options)
        ops = torch.ops.ssm_kernels
        torch.library.opcheck(ops._selective_scan_fwd.default, SELECTIVE_SCAN.forward_arguments(inputs))
        torch.library.opcheck(ops._selective_scan_bwd.default, SELECTIVE_SCAN.backward_arguments(inputs))
