"""selective_scan on CUDA beside the CPU's kernels: tiles, segments of time, sizes beyond 32 bits.

Tests for every device are beside the tests for the CPU; this file has tests that only a GPU's kernels can fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from helpers import METHODS, arrange, assert_as_accurate, debug_option, move, move_all
from operator_spec import with_gradients
from selective_scan_helpers import (
    MINIMAL,
    SELECTIVE_SCAN,
    TENSORS,
    assert_close,
    evaluate,
    evaluate_kernel_in_float64,
    make_cotangents,
    make_inputs,
)
from torch import Tensor

from ssm_kernels import selective_scan

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("kernel")]

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SEQUENCES = ("u", "delta", "z", "B", "C")

# Few channels and many steps: time is cut into segments, each for blocks of its own. Channels enough to fill a GPU: time is not
# cut, and a warp holds more channels and fewer steps. Channels for three blocks of 8 on each multiprocessor of an H100 or H200:
# blocks have fewer warps.
SEGMENTED = {"batch": 1, "dim": 5, "seqlen": 8300}
MANY_CHANNELS = {"batch": 112, "dim": 72}
SMALL_BLOCKS = {"batch": 38, "dim": 70}

every_method = pytest.mark.parametrize("method", METHODS)
both_layouts = pytest.mark.parametrize("layout", ["contiguous", "transposed"])


def dtypes(*chosen: torch.dtype):
    return pytest.mark.parametrize("dtype", chosen, ids=lambda dtype: str(dtype).removeprefix("torch."))


def evaluate_on_cuda(inputs: dict[str, Any], cotangents: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
    """Evaluates on the GPU copies of CPU tensors that keep their strides."""
    return evaluate(SELECTIVE_SCAN, move_all(inputs, "cuda"), cotangents and tuple(move(x, "cuda") for x in cotangents))


def assert_agrees_with_cpu(inputs: dict[str, Any], cotangents: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
    """Compares results and all gradients with the CPU's kernel in float64; returns the GPU's."""
    cotangents = cotangents or make_cotangents(inputs)
    actual = evaluate_on_cuda(inputs, cotangents)
    assert_close(actual, evaluate_kernel_in_float64(inputs, cotangents), inputs["u"].dtype)
    return actual


def assert_as_accurate_as_cpu(inputs: dict[str, Any]) -> None:
    """float64 to 1e-10; else by the low-precision rule, the CPU's kernel in the same dtypes in the place of PyTorch."""
    cotangents = make_cotangents(inputs)
    actual, exact = evaluate_on_cuda(inputs, cotangents), evaluate_kernel_in_float64(inputs, cotangents)
    if inputs["u"].dtype == torch.float64:
        return assert_close(actual, exact, torch.float64)
    expected = evaluate(SELECTIVE_SCAN, inputs, cotangents)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert_as_accurate(value.cpu(), expected[name], exact[name], name)


def arrange_sequence(tensor: Tensor, layout: str) -> Tensor:
    """As :func:`arrange`; ``channels_offset`` is a slice of a wider projection, channels (of B and C: states) contiguous."""
    if layout == "channels_offset":
        return arrange(tensor.transpose(-1, -2), "offset").transpose(-1, -2)
    return arrange(tensor, layout)


def arrange_sequences(inputs: dict[str, Any], layout: str) -> dict[str, Any]:
    return inputs | {name: arrange_sequence(inputs[name], layout) for name in SEQUENCES if inputs[name] is not None}


# ----- the sequential scan: whole tiles, loaded as vectors, and the tail

SEQUENTIAL = {"batch": 1, "dim": 128, "dstate": 16}


@both_layouts
@dtypes(torch.float32, torch.bfloat16)
@every_method
def test_every_method_on_whole_tiles(method, dtype, layout):
    for seqlen in (512, 520):
        inputs = make_inputs(**SEQUENTIAL, seqlen=seqlen, dtype=dtype, discretization=method)
        assert_as_accurate_as_cpu(arrange_sequences(inputs, layout))


@both_layouts
@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("option", MINIMAL)
def test_without_an_option_on_whole_tiles(option, dtype, layout):
    for seqlen in (512, 520):
        inputs = make_inputs(**SEQUENTIAL, seqlen=seqlen, dtype=dtype, **{option: False})
        assert_as_accurate_as_cpu(arrange_sequences(inputs, layout))


@both_layouts
@pytest.mark.parametrize("z", [True, False], ids=["z", "no_z"])
@pytest.mark.parametrize("through", ["out", "last_state"])
def test_gradient_of_one_result_on_whole_tiles(through, z, layout):
    inputs = make_inputs(**SEQUENTIAL, seqlen=520, dtype=torch.float32, z=z)
    inputs = arrange_sequences(inputs, layout)
    cotangent = make_cotangents(inputs)[("out", "last_state").index(through)]

    def gradients(device: str) -> list[Tensor | None]:
        leaves = with_gradients(move_all(inputs, device))
        results = dict(zip(("out", "last_state"), SELECTIVE_SCAN(**leaves), strict=True))
        present = [leaf for name in TENSORS if (leaf := leaves[name]) is not None]
        return torch.autograd.grad(results[through], present, move(cotangent, device), allow_unused=True)

    for actual, expected in zip(gradients("cuda"), gradients("cpu"), strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            scale = max(1.0, expected.abs().max().item())
            torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5 * scale)


@both_layouts
@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["u", "delta", "B", "C"])
def test_infinity_makes_no_nan_of_states_that_do_not_exist(name, value, layout):
    """Results that are infinite on the CPU are infinite, not NaN, also in the later steps of the tile."""
    inputs = make_inputs(batch=2, dim=64, seqlen=72, dstate=13, dtype=torch.float32, z=True)
    inputs[name][1, 5, 3] = value
    inputs = arrange_sequences(inputs, layout)
    cotangents = make_cotangents(inputs)
    actual, expected = evaluate_on_cuda(inputs, cotangents), evaluate(SELECTIVE_SCAN, inputs, cotangents)
    for result in ("out", "grad_z", "grad_u", "grad_delta"):
        assert torch.equal(actual[result].cpu().isnan(), expected[result].isnan()), result


@both_layouts
@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
@pytest.mark.parametrize("dstate", [1, 3, 13])
@pytest.mark.parametrize("name", ["u", "delta", "B", "C"])
def test_infinity_makes_no_nan_of_states_that_do_not_exist_in_short_sequences(name, dstate, value, layout):
    inputs = make_inputs(batch=2, dim=64, seqlen=27, dstate=dstate, dtype=torch.float32, z=True)
    inputs |= {name: inputs[name].abs() for name in ("B", "C")}
    inputs[name][1, 0, 5] = value
    inputs = arrange_sequences(inputs, layout)
    actual, expected = evaluate_on_cuda(inputs), evaluate(SELECTIVE_SCAN, inputs)
    assert torch.equal(actual["out"].cpu().isnan(), expected["out"].isnan())
    assert torch.equal(actual["last_state"].cpu().isnan(), expected["last_state"].isnan())


@both_layouts
@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
@pytest.mark.parametrize("dim", [5, 64, 70])
@pytest.mark.parametrize("name", ["B", "C"])
def test_infinity_makes_no_nan_of_channels_that_do_not_exist(name, dim, value, layout):
    """Such channels share the sums over channels; gradients of B and C are infinite sums of terms of one sign."""
    sizes = {"batch": 2, "dim": dim, "seqlen": 72, "dstate": 16, "z": False, "initial_state": False}
    inputs = make_inputs(**sizes, dtype=torch.float32)
    inputs[name][1, 5, 30] = value
    inputs = arrange_sequences(inputs | {"u": inputs["u"].abs()}, layout)
    grad_out, grad_last_state = make_cotangents(inputs)
    cotangents = grad_out.abs(), torch.zeros_like(grad_last_state)
    actual, expected = evaluate_on_cuda(inputs, cotangents), evaluate(SELECTIVE_SCAN, inputs, cotangents)
    infinite = expected["grad_C" if name == "B" else "grad_B"][1, 5]
    assert infinite.isinf().sum() == (42 if name == "B" else 31)
    for result in ("out", "grad_u", "grad_B", "grad_C"):
        assert torch.equal(actual[result].cpu().isnan(), expected[result].isnan()), result
        assert torch.equal(actual[result].cpu().isinf(), expected[result].isinf()), result


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("method", ["zoh", "zoh_exact", "backward_euler"])
def test_gradients_beside_an_infinite_rate_are_finite(method, dtype):
    inputs = make_inputs(batch=2, dim=64, seqlen=72, dstate=13, dtype=dtype, z=True, discretization=method)
    inputs["A"][5, 3] = -float("inf")
    actual = assert_agrees_with_cpu(inputs)
    assert all(result.isfinite().all() for result in actual.values())


# ----- agreement with the CPU


@every_method
@dtypes(*DTYPES)
def test_agrees_with_the_cpu(dtype, method):
    inputs = make_inputs(batch=2, dim=70, seqlen=300, dstate=16, groups=2, dtype=dtype, discretization=method)
    assert_as_accurate_as_cpu(inputs)


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        *((method, torch.float32) for method in METHODS),
        *(("zoh", dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16)),
        ("bilinear", torch.float64),
    ],
    ids=str,
)
def test_agrees_with_the_cpu_on_many_channels(method, dtype):
    assert_as_accurate_as_cpu(make_inputs(**MANY_CHANNELS, seqlen=300, dstate=5, dtype=dtype, discretization=method))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "offset", "channels_offset"])
@dtypes(torch.float32, torch.bfloat16)
def test_tiles_of_many_channels(dtype, layout):
    for seqlen in (160, 257):
        inputs = make_inputs(**MANY_CHANNELS, seqlen=seqlen, dtype=dtype)
        assert_agrees_with_cpu(arrange_sequences(inputs, layout))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "offset", "channels_offset"])
@dtypes(torch.float32, torch.bfloat16, torch.float16)
def test_tiles_of_small_blocks(dtype, layout):
    for sizes in (SMALL_BLOCKS | {"seqlen": 257, "dstate": 24}, {"batch": 43, "dim": 72, "seqlen": 512, "dstate": 16}):
        inputs = make_inputs(**sizes, dtype=dtype)
        assert_agrees_with_cpu(arrange_sequences(inputs, layout))


@pytest.mark.parametrize("dstate", [7, 17, 40])
def test_state_sizes_of_many_channels(dstate):
    assert_agrees_with_cpu(make_inputs(**MANY_CHANNELS, seqlen=130, dstate=dstate, groups=9, dtype=torch.float32))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "offset", "sliced", "channels_offset"])
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [
        *itertools.product((torch.float32, torch.bfloat16), (1, 5, 16, 33, 70, 72)),
        *itertools.product((torch.float64, torch.float16), (33,)),
    ],
    ids=str,
)
def test_tiles_and_their_tails(dtype, dim, layout):
    for seqlen in (1, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1000):
        inputs = make_inputs(batch=2, dim=dim, seqlen=seqlen, dstate=16, dtype=dtype, seed=seqlen)
        assert_agrees_with_cpu(arrange_sequences(inputs, layout))


# ----- sequential: up to 32 steps


@both_layouts
@dtypes(torch.float32, torch.bfloat16, torch.float16)
@every_method
def test_every_method_on_short_sequences(method, dtype, layout):
    for seqlen, dstate in ((32, 16), (32, 3), (20, 40)):
        inputs = make_inputs(batch=2, dim=40, seqlen=seqlen, dstate=dstate, groups=2, dtype=dtype, discretization=method)
        assert_as_accurate_as_cpu(arrange_sequences(inputs, layout))


@pytest.mark.parametrize("B, C", itertools.product(("constant", "variable"), repeat=2))
@pytest.mark.parametrize("option", [None, *MINIMAL])
def test_options_on_short_sequences(option, B, C):
    absent = {} if option is None else {option: False}
    assert_agrees_with_cpu(make_inputs(batch=2, dim=40, seqlen=27, dstate=16, B=B, C=C, dtype=torch.float32, **absent))


@both_layouts
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dim", [64, 130, 256, 300, 1000, 2010])
def test_many_blocks_of_channels(dim, groups, layout):
    """Whose parts of the gradients of B and C are added up."""
    for dtype, seqlen in ((torch.float32, 70), (torch.bfloat16, 130), (torch.float64, 9)):
        inputs = make_inputs(batch=2, dim=dim, seqlen=seqlen, dstate=16, groups=groups, dtype=dtype)
        assert_agrees_with_cpu(arrange_sequences(inputs, layout))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "offset", "channels_offset"])
@pytest.mark.parametrize("base", ["contiguous", "transposed"])
@pytest.mark.parametrize("name", [*SEQUENCES, "grad_out"])
def test_one_argument_in_another_layout(name, base, layout):
    """Beside others that whole vectors are read from."""
    for dtype in (torch.bfloat16, torch.float32):
        inputs = make_inputs(batch=2, dim=64, seqlen=256, dstate=16, dtype=dtype)
        grad_out, grad_last_state = make_cotangents(inputs)
        tensors = {"grad_out": grad_out} | {key: inputs[key] for key in SEQUENCES}
        tensors = {key: arrange(tensor, base) for key, tensor in tensors.items()}
        tensors[name] = arrange_sequence(tensors[name], layout)
        grad_out = tensors.pop("grad_out")
        assert_agrees_with_cpu(inputs | tensors, (grad_out, grad_last_state))


@both_layouts
@pytest.mark.parametrize("dstate", [1, 2, 3, 7, 8, 15, 16, 17, 32, 33, 64, 128, 255, 256])
def test_state_sizes(dstate, layout):
    for dtype, (method, seqlen) in itertools.product((torch.float32, torch.bfloat16), (("zoh", 130), ("bilinear", 70))):
        inputs = make_inputs(batch=2, dim=20, seqlen=seqlen, dstate=dstate, dtype=dtype, discretization=method)
        assert_agrees_with_cpu(arrange_sequences(inputs, layout))


@both_layouts
@pytest.mark.parametrize(
    ("B_groups", "C_groups"),
    [(70, 70), (35, 35), (14, 14), (10, 10), (7, 7), (5, 5), (2, 2), (70, None), (None, 70), (2, 35), (10, 14), (5, 7)],
)
def test_few_channels_in_a_group(B_groups, C_groups, layout):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_inputs(dim=70, seqlen=130, dstate=16, groups=B_groups, dtype=dtype)
        inputs["C"] = make_inputs(dim=70, seqlen=130, dstate=16, groups=C_groups, dtype=dtype, seed=5)["C"]
        assert_agrees_with_cpu(arrange_sequences(inputs, layout))


@pytest.mark.parametrize("sizes", [(1, 5, 9000), (2, 33, 700)], ids=str)
@pytest.mark.parametrize(("B", "C"), [("constant", "constant"), ("constant", "variable"), ("variable", "constant")])
def test_constant_B_and_C(B, C, sizes):
    batch, dim, seqlen = sizes
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for dstate in (3, 16):
            assert_agrees_with_cpu(make_inputs(batch=batch, dim=dim, seqlen=seqlen, dstate=dstate, B=B, C=C, dtype=dtype))


# ----- shared memory


def shared_memory_of_a_block(size: int) -> AbstractContextManager[None]:
    return debug_option("selective_scan_shared_bytes", size)


@both_layouts
@pytest.mark.parametrize("dstate", [8, 16, 100, 128, 256])
@dtypes(*DTYPES)
def test_little_shared_memory(dtype, dstate, layout):
    """As compute capability 8.6, 8.9 and 12.0 have it: fewer channels to a block, and fewer states to a slice."""
    for sizes in ({"batch": 2, "dim": 20, "seqlen": 530}, {"batch": 1, "dim": 3, "seqlen": 6300}):
        inputs = make_inputs(**sizes, dstate=dstate, dtype=dtype)
        with shared_memory_of_a_block(99 * 1024):
            assert_agrees_with_cpu(arrange_sequences(inputs, layout))


@pytest.mark.parametrize(("B", "C"), [("constant", "constant"), ("constant", "variable"), ("variable", "constant")])
@dtypes(torch.float64, torch.float32)
def test_little_shared_memory_and_constants(dtype, B, C):
    inputs = make_inputs(batch=2, dim=20, seqlen=530, dstate=256, B=B, C=C, dtype=dtype)
    with shared_memory_of_a_block(99 * 1024):
        assert_agrees_with_cpu(inputs)


def test_too_little_shared_memory():
    inputs = make_inputs(dstate=256, device="cuda")
    with (
        shared_memory_of_a_block(16 * 1024),
        pytest.raises(RuntimeError, match="for float64 and dstate = 256, got one with 16384"),
    ):
        selective_scan(**inputs)


def test_threads_whose_blocks_differ_in_shared_memory():
    """A kernel's limit is one for all threads of the program."""
    calls = [make_inputs(batch=1, dim=8, seqlen=64, dstate=dstate, dtype=torch.float64, device="cuda") for dstate in (16, 256)]
    expected = [selective_scan(**inputs) for inputs in calls]

    def repeat(inputs: dict[str, Any]) -> list[Tensor]:
        return [selective_scan(**inputs) for _ in range(300)]

    with ThreadPoolExecutor(4) as pool:
        for outs, alone in zip(pool.map(repeat, 2 * calls), 2 * expected, strict=True):
            assert all(torch.equal(out, alone) for out in outs)


# ----- time cut into segments


@pytest.mark.parametrize("z", [True, False], ids=["z", "no_z"])
@dtypes(torch.float64, torch.float32, torch.bfloat16)
@pytest.mark.parametrize("sizes", [(1, 3, 5000, 16), (1, 64, 16384, 8), (3, 20, 9000, 16), (2, 130, 1500, 17)], ids=str)
def test_segments_of_time(sizes, dtype, z):
    batch, dim, seqlen, dstate = sizes
    assert_agrees_with_cpu(make_inputs(batch=batch, dim=dim, seqlen=seqlen, dstate=dstate, z=z, dtype=dtype))


@both_layouts
def test_segments_of_every_length(layout):
    for seqlen, dtype in itertools.product((257, 1024, 1025, 2049, 3001, 4097, 6144, 6145, 8191, 8192, 8193, 10001), DTYPES):
        inputs = make_inputs(batch=1, dim=5, seqlen=seqlen, dtype=dtype, seed=seqlen)
        assert_agrees_with_cpu(arrange_sequences(inputs, layout))


@every_method
def test_segments_with_every_method(method):
    for dtype in DTYPES:
        inputs = make_inputs(batch=1, dim=20, seqlen=8300, dstate=16, groups=5, dtype=dtype, discretization=method)
        assert_as_accurate_as_cpu(inputs)


@pytest.mark.parametrize("chosen", [*itertools.product([False, True], repeat=5)], ids=lambda c: "".join("01"[x] for x in c))
def test_segments_with_every_combination_of_options(chosen):
    options = dict(zip(MINIMAL, chosen, strict=True))
    for dtype in (torch.float64, torch.bfloat16):
        assert_agrees_with_cpu(make_inputs(**SEGMENTED, **options, dtype=dtype))


@pytest.mark.parametrize("through", ["out", "last_state"])
@every_method
def test_segments_when_only_one_result_has_a_gradient(method, through):
    inputs = make_inputs(**SEGMENTED, discretization=method)
    cotangents = dict(zip(("out", "last_state"), make_cotangents(inputs), strict=True))

    def gradients(device: str) -> dict[str, Tensor]:
        leaves = with_gradients(move_all(inputs, device))
        results = dict(zip(("out", "last_state"), SELECTIVE_SCAN(**leaves), strict=True))
        found = torch.autograd.grad(
            results[through],
            [leaves[name] for name in TENSORS],
            move(cotangents[through], device),
            allow_unused=True,
            materialize_grads=True,
        )
        return {f"grad_{name}": gradient for name, gradient in zip(TENSORS, found, strict=True)}

    assert_close(gradients("cuda"), gradients("cpu"), torch.float64)


def test_segments_when_one_argument_needs_a_gradient():
    """It is bit for bit what it is when all do."""
    inputs = make_inputs(**SEGMENTED, dtype=torch.float32, device="cuda")
    cotangents = make_cotangents(inputs)
    everything = evaluate(SELECTIVE_SCAN, inputs, cotangents)
    for name in TENSORS:
        leaves = with_gradients(inputs, [name])
        (gradient,) = torch.autograd.grad(SELECTIVE_SCAN(**leaves), leaves[name], cotangents)
        assert torch.equal(gradient, everything[f"grad_{name}"]), name


@pytest.mark.parametrize(("method", "z"), [("euler", -1.0), ("bilinear", -2.0)])
def test_segments_whose_transition_is_zero(method, z):
    inputs = make_inputs(**SEGMENTED, delta_softplus=False, delta_bias=False, discretization=method)
    inputs |= {"A": torch.full_like(inputs["A"], z), "delta": torch.ones_like(inputs["delta"])}
    assert_agrees_with_cpu(inputs)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "euler"])
def test_segments_with_strong_decay(method):
    """The product of a segment's transitions underflows."""
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(**SEGMENTED, discretization=method, dtype=dtype)
        results = assert_agrees_with_cpu(inputs | {"A": 16 * inputs["A"]})
        assert all(value.isfinite().all() for value in results.values())


@pytest.mark.parametrize("method", ["zoh", "bilinear", "euler"])
def test_segments_with_growth_and_nothing_to_grow(method):
    """The product of the first segments' transitions overflows, but until 200 steps before the end the state is zero."""
    inputs = make_inputs(**SEGMENTED, delta_softplus=False, initial_state=False, dtype=torch.float32, discretization=method)
    inputs["A"] = 0.2 * inputs["A"].abs() + 0.1
    inputs["u"][..., :-200] = 0
    actual = evaluate_on_cuda(inputs)
    for name, value in evaluate_kernel_in_float64(inputs).items():
        error, scale = (x.abs().max().item() for x in (actual[name].cpu().double() - value, value))
        assert error <= 1e-4 * scale, name


# ----- accuracy


@pytest.mark.parametrize("memory", [1, 8], ids=["short_memory", "long_memory"])
@dtypes(torch.float32, torch.bfloat16)
@every_method
def test_error_does_not_grow_along_the_sequence(method, dtype, memory):
    inputs = make_inputs(batch=1, dim=8, seqlen=65536, dstate=4, dtype=dtype, discretization=method)
    inputs["A"] = inputs["A"] / memory
    cotangents = make_cotangents(inputs)
    actual, exact = evaluate_on_cuda(inputs, cotangents), evaluate_kernel_in_float64(inputs, cotangents)
    for name in ("out", *(f"grad_{sequence}" for sequence in SEQUENCES)):
        error = actual[name].cpu().double() - exact[name]
        first, last = (part.square().mean().sqrt() for part in (error[..., :4096], error[..., -4096:]))
        assert last <= 1.5 * first, f"{name}: {first:.3g} in the first 4096 steps, {last:.3g} in the last"
        if name != "out":  # backward comes from the end
            assert first <= 1.5 * last, f"{name}: {last:.3g} in the last 4096 steps, {first:.3g} in the first"


def assert_nan_spreads_as_on_the_cpu(
    inputs: dict[str, Any], name: str, places: Iterable[tuple[int, int, int]], clean: dict[str, Tensor] | None = None
) -> None:
    """Elements that the NaNs at these places do not reach keep their bits."""
    cotangents = make_cotangents(inputs)
    clean = clean or evaluate_on_cuda(inputs, cotangents)
    tensor = (cotangents[0] if name == "grad_out" else inputs[name]).clone()
    for row, channel, step in places:
        tensor[row, channel % tensor.shape[1], step] = float("nan")
    if name == "grad_out":
        cotangents = tensor, cotangents[1]
    else:
        inputs = inputs | {name: tensor}
    actual, expected = evaluate_on_cuda(inputs, cotangents), evaluate(SELECTIVE_SCAN, inputs, cotangents)
    for result, value in actual.items():
        reached = value.isnan()
        assert torch.equal(reached.cpu(), expected[result].isnan()), f"NaNs of {result}"
        assert torch.equal(value[~reached], clean[result][~reached]), result


@both_layouts
@pytest.mark.parametrize("name", [*SEQUENCES, "grad_out"])
@pytest.mark.parametrize(
    ("batch", "seqlen"), [(28, 600), (38, 300), (98, 300)], ids=["few_channels", "small_blocks", "many_channels"]
)
def test_nan_at_the_edges_of_lanes_and_tiles(batch, seqlen, name, layout):
    """One NaN in each batch row."""
    inputs = arrange_sequences(make_inputs(batch=batch, dim=70, seqlen=seqlen, dtype=torch.float32), layout)
    channels = itertools.cycle((0, 3, 4, 15, 16, 31, 32, 69))
    steps = itertools.cycle((0, 7, 8, 15, 16, 63, 64, 127, 128, 255, 256, 511 % seqlen, 512 % seqlen, seqlen - 1))
    assert_nan_spreads_as_on_the_cpu(inputs, name, zip(range(batch), channels, steps, strict=False))


@pytest.mark.parametrize("name", [*SEQUENCES, "grad_out"])
def test_nan_at_the_edges_of_segments(name):
    inputs = make_inputs(**SEGMENTED, dtype=torch.float32)
    clean = evaluate_on_cuda(inputs, make_cotangents(inputs))
    for step in (0, 255, 256, 2047, 2048, 4095, 4096, 6144, 8299):
        assert_nan_spreads_as_on_the_cpu(inputs, name, [(0, 2, step)], clean)


# ----- sizes


@both_layouts
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 1, "dim": 70_000},
        {"batch": 1, "dim": 70_000, "groups": 70_000},
        {"batch": 1, "dim": 70_000, "B": "constant", "C": "constant"},
        {"batch": 70_000, "dim": 3, "dtype": torch.float64},
    ],
    ids=str,
)
def test_more_channels_and_rows_than_a_grid_axis_holds(sizes, layout):
    inputs = make_inputs(**({"dtype": torch.float32} | sizes), seqlen=9, dstate=2)
    assert_agrees_with_cpu(arrange_sequences(inputs, layout))


@both_layouts
def test_more_elements_than_32_bits_count(layout, needs_gpu_memory):
    """The first channels, and those on both sides of element 2^31: the gradient of the others' output is zero, so that the sums
    over channels, too, are those of these few alone."""
    needs_gpu_memory("cuda", 45)
    dim, seqlen, dstate = 2**21 + 64, 1024, 2
    generator = torch.Generator("cuda").manual_seed(0)

    def sequence() -> Tensor:
        if layout == "contiguous":
            return torch.empty(1, dim, seqlen, dtype=torch.bfloat16, device="cuda")
        return torch.empty(1, seqlen, dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    inputs = {
        "u": sequence().normal_(generator=generator),
        "delta": sequence().uniform_(-3, 1, generator=generator),
        "A": -0.1 - normal(dim, dstate).abs(),
        "B": normal(1, dstate, seqlen, dtype=torch.bfloat16),
        "C": normal(1, dstate, seqlen, dtype=torch.bfloat16),
        "D": normal(dim),
        "z": sequence().normal_(generator=generator),
        "delta_bias": 0.1 * normal(dim),
        "initial_state": normal(1, dim, dstate),
        "delta_softplus": True,
    }
    assert inputs["u"].numel() > 2**31
    first, last = slice(None, 32), slice(2**21 - 32, None)
    cotangents = sequence().zero_(), torch.zeros(1, dim, dstate, device="cuda")
    for cotangent, part in itertools.product(cotangents, (first, last)):
        cotangent[:, part].normal_(generator=generator)

    channel_axis = dict.fromkeys(("u", "delta", "z", "initial_state", "out", "last_state"), 1)
    channel_axis |= dict.fromkeys(("A", "D", "delta_bias"), 0)

    def chosen(name: str, tensor: Any) -> Any:
        axis = channel_axis.get(name.removeprefix("grad_"))
        if axis is None:
            return tensor.cpu() if isinstance(tensor, Tensor) else tensor
        return torch.cat([tensor[(slice(None),) * axis + (part,)] for part in (first, last)], dim=axis).cpu()

    results = evaluate(SELECTIVE_SCAN, inputs, cotangents)
    assert not results["grad_A"][32 : 2**21 - 32].any()
    actual = {name: chosen(name, value) for name, value in results.items()}
    few = {name: chosen(name, value) for name, value in inputs.items()}
    few_cotangents = tuple(chosen(name, value) for name, value in zip(("out", "last_state"), cotangents, strict=True))
    assert_close(actual, evaluate_kernel_in_float64(few, few_cotangents), torch.bfloat16)


@dtypes(torch.float64, torch.float32, torch.bfloat16)
def test_no_uninitialized_memory_is_read(dtype, uninitialized_memory_is_nan):
    for sizes in ((2, 5, 70, 3), (2, 70, 150, 16), (1, 5, 8300, 17), (2, 300, 65, 16)):
        batch, dim, seqlen, dstate = sizes
        for form, layout in itertools.product(("variable", "constant"), ("contiguous", "transposed")):
            inputs = make_inputs(batch=batch, dim=dim, seqlen=seqlen, dstate=dstate, B=form, C=form, dtype=dtype)
            assert_agrees_with_cpu(arrange_sequences(inputs, layout))
