"""selective_scan on CUDA with rows that start between multiples of 16 bytes: odd lengths, and views inside wider buffers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from guarded_memory import ALIGNED, Layout, assert_offsets_keep_bits, guard_all
from helpers import assert_equal, debug_option, move_all
from selective_scan_helpers import (
    SELECTIVE_SCAN,
    assert_close,
    evaluate,
    evaluate_kernel_in_float64,
    kernels_of,
    make_cotangents,
    make_inputs,
)
from torch import Tensor

pytestmark = pytest.mark.cuda

SEQUENCES = ("u", "delta", "z", "B", "C")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
# Elements before and after each row. A row of 197 elements then starts at every element of 16 bytes; one of 196 with an odd
# stride, too, or at multiples of 4 or 8 bytes.
MARGINS = [(0, 0), (1, 0), (3, 2), (5, 8), (8, 0)]
every_margin = pytest.mark.parametrize("margin", MARGINS, ids=str)


@pytest.fixture(autouse=True)
def sequential_scan():
    """The plan chooses it for as many channels as few tests have."""
    if torch.cuda.get_device_properties("cuda").shared_memory_per_multiprocessor < 227 * 1024:
        pytest.skip("the sequential scan is made for two blocks of 113 KiB of shared memory on a multiprocessor")
    with debug_option("selective_scan_kernel", "sequential"):
        yield


def shift(tensor: Tensor, margin: tuple[int, int]) -> Tensor:
    """The same values on the GPU, each row between elements that are NaN."""
    before, after = margin
    length = tensor.shape[-1]
    buffer = torch.full((*tensor.shape[:-1], before + length + after), math.nan, dtype=tensor.dtype, device="cuda")
    buffer[..., before : before + length] = tensor.cuda()
    return buffer[..., before : before + length]


def shift_all(inputs: dict[str, Any], margin: tuple[int, int]) -> dict[str, Any]:
    return move_all(inputs, "cuda") | {name: shift(inputs[name], margin) for name in SEQUENCES if inputs[name] is not None}


def evaluate_shifted(inputs: dict[str, Any], cotangents: tuple[Tensor, ...], margin: tuple[int, int]) -> dict[str, Tensor]:
    grad_out, grad_last_state = cotangents
    return evaluate(SELECTIVE_SCAN, shift_all(inputs, margin), (shift(grad_out, margin), grad_last_state.cuda()))


def assert_agrees_with_the_cpu(inputs: dict[str, Any], margin: tuple[int, int]) -> None:
    cotangents = make_cotangents(inputs)
    exact = evaluate_kernel_in_float64(inputs, cotangents)
    assert_close(evaluate_shifted(inputs, cotangents, margin), exact, inputs["u"].dtype)


@every_dtype
@every_margin
def test_every_length_agrees_with_the_cpu(margin, dtype):
    """Whole tiles, and last tiles of every number of steps up to 13 and of 30 and 31."""
    for seqlen in range(190, 206):
        inputs = make_inputs(batch=2, dim=64, seqlen=seqlen, dstate=16, dtype=dtype, seed=seqlen)
        assert_agrees_with_the_cpu(inputs, margin)


@every_dtype
@pytest.mark.parametrize("seqlen", [1, 2, 7, 9, 31, 33, 63, 65])
def test_few_steps_agree_with_the_cpu(seqlen, dtype):
    for dim in (1, 63, 70):
        inputs = make_inputs(batch=2, dim=dim, seqlen=seqlen, dstate=16, dtype=dtype, seed=seqlen)
        assert_agrees_with_the_cpu(inputs, (1, 0))


@every_dtype
@pytest.mark.parametrize(
    "options",
    [
        {"z": False},
        {"D": False, "delta_bias": False, "delta_softplus": False, "initial_state": False},
        {"dstate": 13},
        {"dim": 150, "groups": 2},
        {"batch": 1, "seqlen": 1001},
        {"discretization": "zoh_exact"},
    ],
    ids=str,
)
def test_options_agree_with_the_cpu(options, dtype):
    """Also with segments: one batch row of many steps."""
    inputs = make_inputs(**{"batch": 2, "dim": 70, "seqlen": 197, "dstate": 16, "dtype": dtype} | options)
    assert_agrees_with_the_cpu(inputs, (0, 0))


@every_dtype
@every_margin
@pytest.mark.parametrize("seqlen", [192, 200])
def test_bits_are_those_of_aligned_rows(seqlen, margin, dtype):
    inputs = make_inputs(batch=2, dim=128, seqlen=seqlen, dstate=16, dtype=dtype)
    cotangents = make_cotangents(inputs)
    aligned = evaluate(SELECTIVE_SCAN, move_all(inputs, "cuda"), tuple(x.cuda() for x in cotangents))
    assert_equal(evaluate_shifted(inputs, cotangents, margin), aligned)


@pytest.mark.parametrize("name", SEQUENCES)
@every_dtype
def test_one_shifted_tensor_among_aligned_ones(dtype, name):
    inputs = make_inputs(batch=2, dim=64, seqlen=200, dstate=16, dtype=dtype)
    cotangents = make_cotangents(inputs)
    on_cuda = move_all(inputs, "cuda") | {name: shift(inputs[name], (3, 2))}
    actual = evaluate(SELECTIVE_SCAN, on_cuda, tuple(x.cuda() for x in cotangents))
    assert_close(actual, evaluate_kernel_in_float64(inputs, cotangents), dtype)


# At the edges of rows, whose neighbors are in the same 16 bytes, and of tiles.
PLACES = [(197, 0), (197, 196), (197, 191), (197, 192), (199, 100)]


@every_dtype
@pytest.mark.parametrize("name", [*SEQUENCES, "grad_out"])
def test_nan_stays_in_its_channel_and_step(name, dtype):
    """Elements that the NaN does not reach keep their bits."""
    for seqlen, step in PLACES:
        inputs = make_inputs(batch=2, dim=64, seqlen=seqlen, dstate=16, dtype=dtype)
        cotangents = make_cotangents(inputs)
        clean = evaluate_shifted(inputs, cotangents, (0, 0))
        (cotangents[0] if name == "grad_out" else inputs[name])[1, 5, step] = math.nan
        expected = evaluate(SELECTIVE_SCAN, inputs, cotangents)
        for result, value in evaluate_shifted(inputs, cotangents, (0, 0)).items():
            reached = value.isnan()
            assert torch.equal(reached.cpu(), expected[result].isnan()), (result, seqlen, step)
            assert torch.equal(value[~reached], clean[result][~reached]), (result, seqlen, step)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("name", ["u", "delta", "B", "C"])
def test_infinity_stays_in_its_channel_and_step(name, value):
    for seqlen, step in PLACES:
        inputs = make_inputs(batch=2, dim=64, seqlen=seqlen, dstate=13, dtype=torch.float32)
        inputs[name][1, 5, step] = value
        cotangents = make_cotangents(inputs)
        actual, expected = evaluate_shifted(inputs, cotangents, (0, 0)), evaluate(SELECTIVE_SCAN, inputs, cotangents)
        for result in ("out", "grad_z", "grad_u", "grad_delta"):
            assert torch.equal(actual[result].cpu().isnan(), expected[result].isnan()), (result, seqlen, step)


@every_dtype
def test_results_have_the_same_bits_every_time(dtype):
    """Neighboring rows share words of the results, and each row writes its own elements only."""
    inputs = make_inputs(batch=3, dim=65, seqlen=197, dstate=16, dtype=dtype)
    cotangents = make_cotangents(inputs)
    once = evaluate_shifted(inputs, cotangents, (0, 0))
    for _ in range(3):
        assert_equal(evaluate_shifted(inputs, cotangents, (0, 0)), once)


@pytest.mark.parametrize("seqlen", [195, 196, 197, 198, 199, 200])
def test_every_length_takes_the_sequential_scan(seqlen):
    with debug_option("selective_scan_kernel", "faster"):
        inputs = make_inputs(batch=64, dim=384, seqlen=seqlen, dstate=16, dtype=torch.bfloat16, device="cuda")
        assert kernels_of(inputs) == ("sequential", "sequential")


# Rows of steps, of channels in whole and in partial tiles, and of descending steps; whole tiles of steps, and a partial one.
ROWS = {
    "steps": ((-1,), {}),
    "channels": ((1,), {}),
    "channels_and_whole_tiles": ((1,), {"seqlen": 64}),
    "odd_channels": ((1,), {"dim": 251}),
    "reverse": ((-1,), {"reverse": True}),
}


@every_dtype
@pytest.mark.parametrize(("axes", "options"), ROWS.values(), ids=ROWS)
def test_the_kernel_and_the_bits_do_not_depend_on_where_rows_start(axes, options, dtype):
    """With as many channels as let the plan choose the sequential scan."""
    rows = dict.fromkeys((*SEQUENCES, "out"), axes)
    layouts = (Layout(1), Layout(2), Layout(4), Layout(3, odd=True))
    with debug_option("selective_scan_kernel", "faster"):
        sizes = {"batch": 64, "dim": 256, "seqlen": 72, "dstate": 16} | options
        inputs = make_inputs(**sizes, dtype=dtype, device="cuda")
        for layout in (ALIGNED, *layouts):
            assert kernels_of(guard_all(inputs, rows, layout)) == ("sequential", "sequential"), layout
        assert_offsets_keep_bits(SELECTIVE_SCAN, inputs, rows, layouts=layouts)
