"""The operators of decoding steps, which change states in place, for compute-sanitizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import conv_helpers
import decoding_helpers
import torch
from guarded_memory import Layout, guard_all
from helpers import METHODS, move_all
from sanitizer import PYTESTMARK, Inputs, assert_close_to_cpu, both_devices, over
from selective_scan_helpers import STEP_DTYPES, make_step_inputs

from ssm_kernels import causal_conv1d_update, selective_state_update

pytestmark = PYTESTMARK

Case = tuple[str, Inputs]
SHIFTED = (Layout(1), Layout(5), Layout(0, odd=True))


def state_update_inputs(
    tied: bool = False, cast: Sequence[str] = (), indices: torch.dtype | None = None, **options: Any
) -> Inputs:
    """make_step_inputs, and if asked for an A of one value a row, parameters in the dtype of x, and slots of the states."""
    inputs = make_step_inputs(**options)
    inputs |= {name: inputs[name].to(options["dtype"]) for name in cast}
    if indices is not None:
        inputs["state_batch_indices"] = torch.tensor([4, -1, 0, 2], dtype=indices)
    return with_tied_A(inputs) if tied else inputs


def with_tied_A(inputs: Inputs) -> Inputs:
    return inputs | {"A": inputs["A"][..., :1].expand(inputs["A"].shape)}


def move_rows(inputs: Inputs, device: str, layout: Layout | None) -> Inputs:
    """Copies of the inputs; on CUDA those with a batch start their rows as the layout says."""
    moved = move_all(inputs, device)
    if layout is None or device == "cpu":
        return moved
    names = ("state", "conv_state", "x", "dt", "B", "C", "z")
    axes = {name: tuple(range(1, moved[name].dim())) for name in names if moved.get(name) is not None}
    return guard_all(moved, axes, layout, margin=0)


# ----- selective_state_update


def state_update_cases() -> Iterator[Case]:
    """Each kernel (dtypes, method, step, tied, general), then each path inside them."""

    def case(name: str, **options: Any) -> Case:
        return f"{name} {options}", {"dim": 37, "dstate": 32} | options

    for dtype, state_dtype in STEP_DTYPES:
        kinds = {"dtype": dtype, "state_dtype": state_dtype}
        for method in METHODS:
            yield case("step", **kinds, discretization=method)
            yield case("tied", **kinds, discretization=method, tied=True)
            yield case("step by elements", dstate=7, **kinds, discretization=method)
            yield case("general", dstate=7, layout="transposed", **kinds, discretization=method)
        for dstate in (1, 8, 16, 64, 128, 255, 256):
            yield case("dstate", dim=9, dstate=dstate, **kinds)
        for dstate, tied in itertools.product((7, 32), (False, True)):
            yield case("parameters in the dtype of x", dstate=dstate, tied=tied, cast=("A", "D", "dt_bias"), **kinds)
        yield case("step of four rows", batch=16, dim=1021, dstate=16, **kinds)
        for layout in ("transposed", "permuted", "offset", "sliced"):
            yield case("layout", heads=3, dim=5, dstate=16, groups=3, layout=layout, **kinds)
        yield case("groups", heads=6, dim=11, dstate=64, groups=2, **kinds)
        yield case("required only", **dict.fromkeys(("D", "z", "dt_bias", "dt_softplus"), False), **kinds)
        yield case("D and dt_bias in the dtype of x", cast=("D", "dt_bias"), **kinds)
        for indices in (torch.int32, torch.int64):
            yield case("slots", batch=4, slots=5, indices=indices, **kinds)
    yield case("several rows per lane group", batch=66, heads=64, dim=64, dstate=128, dtype=torch.float32)


def assert_state_update_is_the_same_on_gpu(inputs: Inputs, layout: Layout | None = None) -> None:
    """An fp16 or bf16 result is one rounding of nearly the same number; a sum in another order differs by more roundings."""
    results = []
    for moved in both_devices(inputs, partial(move_rows, layout=layout)):
        results.append({"out": selective_state_update(**moved), "state": moved["state"]})
    assert_close_to_cpu(results[1], results[0], roundings=8)


@over("options", state_update_cases())
def test_state_update(options):
    assert_state_update_is_the_same_on_gpu(state_update_inputs(**options))


def shifted_state_update_cases() -> Iterator[tuple[Any, ...]]:
    """Rows of all tensors between multiples of 16 bytes, with NaN between them: the step kernel, tied, and the general one."""
    for (dtype, state_dtype), layout in itertools.product(STEP_DTYPES, SHIFTED):
        for sizes in ({"dim": 37, "dstate": 32}, {"dim": 37, "dstate": 13}, {"heads": 3, "dim": 5, "dstate": 130, "groups": 3}):
            for tied in (False,) if "heads" in sizes else (False, True):
                options = {"dtype": dtype, "state_dtype": state_dtype, "tied": tied} | sizes
                yield f"{layout} {options}", options, layout


@over("options, layout", shifted_state_update_cases())
def test_state_update_of_rows_at_any_element(options, layout):
    assert_state_update_is_the_same_on_gpu(state_update_inputs(**options), layout)


# Options of make_token_inputs: rows and tokens, and what chooses slots.
TOKEN_CALLS: dict[str, Inputs] = {
    "destination": {"rows": 3, "destination": 0},
    "each destination": {"tokens": 3, "destination": 4},
    "accepted": {"rows": 3, "tokens": 3, "columns": 3},
    "packed": {"packed": (0, 3, 3, 4), "columns": 3, "intermediate": 3},
}


def token_cases() -> Iterator[tuple[Any, ...]]:
    """The kernel of several tokens: dtypes, method, fast and tied, fast and not tied, general."""
    for (dtype, state_dtype), (call, options) in itertools.product(STEP_DTYPES, TOKEN_CALLS.items()):
        for method, dstate, tied in itertools.product(("zoh", "bilinear"), (7, 32, 128, 200), (False, True)):
            kinds = {"dtype": dtype, "state_dtype": state_dtype, "discretization": method, "dstate": dstate}
            yield f"{call}{', tied' * tied} {kinds}", options | kinds, tied


def assert_tokens_are_the_same_on_gpu(function: Any, inputs: Inputs) -> None:
    results = []
    for moved in both_devices(inputs):
        function(**moved)
        results.append({name: moved[name] for name in decoding_helpers.WRITTEN if name in moved})
    assert_close_to_cpu(results[1], results[0])


@over("options, tied", token_cases())
def test_tokens(options, tied):
    inputs = decoding_helpers.SELECTIVE_STATE_UPDATE.make_token_inputs(dim=37, **options)
    assert_tokens_are_the_same_on_gpu(selective_state_update, with_tied_A(inputs) if tied else inputs)


# ----- causal_conv1d_update


def conv_update_cases() -> Iterator[Case]:
    for dtype, state_dtype in STEP_DTYPES:
        for channels, seqlen in itertools.product((1, 5, 72, 300), (None, 1, 3, 9)):
            for width, length, slots in ((4, 4, None), (4, 3, 5), (1, 1, None), (2, 6, 7), (9, 9, 5)):
                options = {"channels": channels, "seqlen": seqlen, "width": width, "length": length, "slots": slots}
                options |= {"dtype": dtype, "state_dtype": state_dtype}
                yield f"step {options}", options


def assert_conv_update_is_the_same_on_gpu(inputs: Inputs, layout: Layout | None = None) -> None:
    results = []
    for moved in both_devices(inputs, partial(move_rows, layout=layout)):
        results.append({"out": causal_conv1d_update(**moved), "state": moved["conv_state"]})
    assert_close_to_cpu(results[1], results[0])


@over("options", conv_update_cases())
def test_conv_update(options):
    assert_conv_update_is_the_same_on_gpu(conv_helpers.make_step_inputs(**options))


def test_conv_update_with_padding():
    inputs = conv_helpers.make_step_inputs(batch=4, channels=72, slots=5, dtype=torch.bfloat16)
    assert_conv_update_is_the_same_on_gpu(inputs | {"state_batch_indices": torch.tensor([4, -1, 0, 2])})


def shifted_conv_update_cases() -> Iterator[tuple[Any, ...]]:
    for (dtype, state_dtype), layout in itertools.product(STEP_DTYPES, SHIFTED):
        for seqlen, width in itertools.product((None, 3), (3, 4)):
            options = {"channels": 83, "seqlen": seqlen, "width": width, "length": width, "slots": None}
            options |= {"dtype": dtype, "state_dtype": state_dtype}
            yield f"step {layout} {options}", options, layout


@over("options, layout", shifted_conv_update_cases())
def test_conv_update_of_rows_at_any_element(options, layout):
    assert_conv_update_is_the_same_on_gpu(conv_helpers.make_step_inputs(**options), layout)


def conv_token_cases() -> Iterator[Case]:
    calls: list[Inputs] = [
        {"rows": 3, "destination": True},
        {"rows": 3, "tokens": 3, "accepted": (1, 2, 4), "length": 7},
        {"packed": (0, 2, 2, 5), "accepted": (3, 1, 2), "length": 7, "intermediate": 3},
    ]
    for (dtype, state_dtype), call in itertools.product(STEP_DTYPES, calls):
        for channels, width in itertools.product((5, 300), (2, 4)):
            options = call | {"dtype": dtype, "state_dtype": state_dtype, "channels": channels, "width": width}
            yield f"step {options}", options


@over("options", conv_token_cases())
def test_conv_tokens(options):
    assert_tokens_are_the_same_on_gpu(causal_conv1d_update, decoding_helpers.make_conv_token_inputs(**options))
