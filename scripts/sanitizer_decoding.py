"""The cases of ``sanitizer_cases.py`` for the operators of decoding steps, which change states in place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import conv_helpers
import decoding_helpers
import torch
from guarded_memory import Layout, guard_all
from helpers import METHODS, move, move_all
from sanitizer_comparison import Check, Inputs, difference_between
from selective_scan_helpers import STEP_DTYPES, make_step_inputs
from torch import Tensor

from ssm_kernels import causal_conv1d_update, selective_state_update


def state_update_cases() -> Iterator[tuple[str, Inputs]]:
    """Name and inputs: each kernel (dtypes, method, step, tied, general), then each path inside them."""
    for dtype, state_dtype in STEP_DTYPES:
        for method in METHODS:
            options = {"dtype": dtype, "state_dtype": state_dtype, "discretization": method}
            name = f"{dtype} {state_dtype} {method}"
            inputs = make_step_inputs(dim=37, dstate=32, **options)
            yield f"step {name}", inputs
            yield f"tied {name}", inputs | {"A": inputs["A"][:, :1].expand(37, 32)}
            yield f"step by elements {name}", make_step_inputs(dim=37, dstate=7, **options)
            yield f"general {name}", make_step_inputs(dim=37, dstate=7, layout="transposed", **options)
        options = {"dtype": dtype, "state_dtype": state_dtype}
        name = f"{dtype} {state_dtype}"
        for dstate in (1, 8, 16, 64, 128, 255, 256):
            yield f"dstate {dstate} {name}", make_step_inputs(dim=9, dstate=dstate, **options)
        for dstate in (7, 32):
            inputs = make_step_inputs(dim=37, dstate=dstate, **options)
            cast = inputs | {parameter: inputs[parameter].to(dtype) for parameter in ("A", "D", "dt_bias")}
            yield f"parameters in the dtype of x, dstate {dstate} {name}", cast
            yield f"the same, tied {name}", cast | {"A": cast["A"][:, :1].expand(37, dstate)}
        yield f"step of four rows {name}", make_step_inputs(batch=16, dim=1021, dstate=16, **options)
        for layout in ("transposed", "permuted", "offset", "sliced"):
            yield f"{layout} {name}", make_step_inputs(heads=3, dim=5, dstate=16, groups=3, layout=layout, **options)
        yield f"groups {name}", make_step_inputs(heads=6, dim=11, dstate=64, groups=2, **options)
        absent = dict.fromkeys(("D", "z", "dt_bias", "dt_softplus"), False)
        yield f"required only {name}", make_step_inputs(dim=37, dstate=32, **absent, **options)
        inputs = make_step_inputs(dim=37, dstate=32, **options)
        yield f"parameters in the dtype of x {name}", inputs | {key: inputs[key].to(dtype) for key in ("D", "dt_bias")}
        for index_dtype in (torch.int32, torch.int64):
            indices = torch.tensor([4, -1, 0, 2], dtype=index_dtype)
            inputs = make_step_inputs(batch=4, dim=37, dstate=32, slots=5, **options)
            yield f"slots {index_dtype} {name}", inputs | {"state_batch_indices": indices}
    yield "several rows per lane group", make_step_inputs(batch=66, heads=64, dim=64, dstate=128, dtype=torch.float32)


SHIFTED = (Layout(1), Layout(5), Layout(0, odd=True))


def shifted_state_update_cases() -> Iterator[tuple[str, Inputs, Layout]]:
    """Rows of all tensors between multiples of 16 bytes, with NaN between them: the step kernel, tied, and the general one."""
    for (dtype, state_dtype), layout in itertools.product(STEP_DTYPES, SHIFTED):
        for sizes in ({"dim": 37, "dstate": 32}, {"dim": 37, "dstate": 13}, {"heads": 3, "dim": 5, "dstate": 130, "groups": 3}):
            inputs = make_step_inputs(dtype=dtype, state_dtype=state_dtype, **sizes)
            name = f"{layout} {dtype} {state_dtype} {sizes}"
            yield name, inputs, layout
            if "heads" not in sizes:
                yield f"tied {name}", inputs | {"A": inputs["A"][:, :1].expand(37, sizes["dstate"])}, layout


def shifted_conv_update_cases() -> Iterator[tuple[str, Inputs, Layout]]:
    for (dtype, state_dtype), layout in itertools.product(STEP_DTYPES, SHIFTED):
        for seqlen, width in itertools.product((None, 3), (3, 4)):
            options = {"channels": 83, "seqlen": seqlen, "width": width, "length": width, "slots": None}
            inputs = conv_helpers.make_step_inputs(**options, dtype=dtype, state_dtype=state_dtype)
            yield f"step {layout} {dtype} {state_dtype} {options}", inputs, layout


def move_rows(inputs: Inputs, device: str, layout: Layout | None) -> Inputs:
    """Copies of the inputs; on CUDA those with a batch start their rows as the layout says."""
    moved = move_all(inputs, device)
    if layout is None or device == "cpu":
        return moved
    names = ("state", "conv_state", "x", "dt", "B", "C", "z")
    axes = {name: tuple(range(1, moved[name].dim())) for name in names if moved.get(name) is not None}
    return guard_all(moved, axes, layout, margin=0)


def check_state_update(name: str, inputs: Inputs, layout: Layout | None = None) -> str | None:
    results = []
    for device in ("cpu", "cuda"):
        moved = move_rows(inputs, device, layout)
        out = selective_state_update(**moved)
        results.append((out.cpu(), move(moved["state"], "cpu")))
    (out, state), (cuda_out, cuda_state) = results
    for what, actual, expected in (("out", cuda_out, out), ("state", cuda_state, state)):
        # An fp16 or bf16 result is one rounding of nearly the same number; a sum in another order differs by more roundings.
        roundings = 2 if actual.element_size() == 2 else 8
        tolerance = roundings * torch.finfo(actual.dtype).eps * (1 + expected.double().abs().max().item())
        difference = (actual.double() - expected.double()).abs().max().item()
        if not difference <= tolerance:
            return f"{name}: {what} differs from the CPU's by {difference:.3g}, more than {tolerance:.3g}"
    return None


# Options of make_token_inputs: rows and tokens, and what chooses slots.
TOKEN_CALLS: dict[str, Inputs] = {
    "destination": {"rows": 3, "destination": 0},
    "each destination": {"tokens": 3, "destination": 4},
    "accepted": {"rows": 3, "tokens": 3, "columns": 3},
    "packed": {"packed": (0, 3, 3, 4), "columns": 3, "intermediate": 3},
}


def token_cases() -> Iterator[tuple[str, Inputs]]:
    """The kernel of several tokens: dtypes, method, fast and tied, fast and not tied, general."""
    for (dtype, state_dtype), (call, options) in itertools.product(STEP_DTYPES, TOKEN_CALLS.items()):
        for method in ("zoh", "bilinear"):
            for dstate in (7, 32, 128, 200):
                kinds = {"dtype": dtype, "state_dtype": state_dtype, "discretization": method, "dstate": dstate}
                inputs = decoding_helpers.make_token_inputs(**options, dim=37, **kinds)
                yield f"{call} {kinds}", inputs
                yield f"{call}, tied {kinds}", inputs | {"A": inputs["A"][:, :1].expand(37, dstate)}


def conv_token_cases() -> Iterator[tuple[str, Inputs]]:
    calls: list[Inputs] = [
        {"rows": 3, "destination": True},
        {"rows": 3, "tokens": 3, "accepted": (1, 2, 4), "length": 7},
        {"packed": (0, 2, 2, 5), "accepted": (3, 1, 2), "length": 7, "intermediate": 3},
    ]
    for (dtype, state_dtype), options in itertools.product(STEP_DTYPES, calls):
        for channels, width in itertools.product((5, 300), (2, 4)):
            kinds = options | {"dtype": dtype, "state_dtype": state_dtype, "channels": channels, "width": width}
            yield f"step {kinds}", decoding_helpers.make_conv_token_inputs(**kinds)


def check_tokens(function: Callable[..., Tensor], name: str, inputs: Inputs) -> str | None:
    results = []
    for device in ("cpu", "cuda"):
        moved = move_all(inputs, device)
        function(**moved)
        results.append({key: moved[key] for key in decoding_helpers.WRITTEN if key in moved})
    return difference_between(name, results[1], results[0])


def conv_update_cases() -> Iterator[tuple[str, Inputs]]:
    for dtype, state_dtype in STEP_DTYPES:
        for channels in (1, 5, 72, 300):
            for seqlen in (None, 1, 3, 9):
                for width, length, slots in ((4, 4, None), (4, 3, 5), (1, 1, None), (2, 6, 7), (9, 9, 5)):
                    options = {"channels": channels, "seqlen": seqlen, "width": width, "length": length, "slots": slots}
                    options |= {"dtype": dtype, "state_dtype": state_dtype}
                    yield f"step {options}", conv_helpers.make_step_inputs(**options)
    padded = conv_helpers.make_step_inputs(batch=4, channels=72, slots=5, dtype=torch.bfloat16)
    yield "step, padding", padded | {"state_batch_indices": torch.tensor([4, -1, 0, 2])}


def check_conv_update(name: str, inputs: Inputs, layout: Layout | None = None) -> str | None:
    results = []
    for device in ("cpu", "cuda"):
        moved = move_rows(inputs, device, layout)
        results.append({"out": causal_conv1d_update(**moved), "state": moved["conv_state"]})
    return difference_between(name, results[1], results[0])


CHECKS: dict[str, Callable[[], Iterator[Check]]] = {
    "selective_state_update": lambda: (partial(check_state_update, *case) for case in state_update_cases()),
    "causal_conv1d_update": lambda: (partial(check_conv_update, *case) for case in conv_update_cases()),
    "shifted_updates": lambda: itertools.chain(
        (partial(check_state_update, *case) for case in shifted_state_update_cases()),
        (partial(check_conv_update, *case) for case in shifted_conv_update_cases()),
    ),
    "tokens": lambda: (partial(check_tokens, selective_state_update, *case) for case in token_cases()),
    "conv_tokens": lambda: (partial(check_tokens, causal_conv1d_update, *case) for case in conv_token_cases()),
}
