"""The decoding step of the delta rules, which changes states in place, for compute-sanitizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from decoding_helpers import DELTA_RULE_STEP, WRITTEN
from delta_rule_step_helpers import DTYPES, GATES, OPTIONS, make_inputs
from guarded_memory import Layout, guard_all
from helpers import LAYOUTS, move_all
from sanitizer import PYTESTMARK, Inputs, assert_close_to_cpu, both_devices, over

from ssm_kernels import delta_rule_step

pytestmark = PYTESTMARK

Case = tuple[str, Inputs]
SHIFTED = (Layout(1), Layout(5), Layout(0, odd=True))
# One vector a lane and several, in groups of 8, 16 and 32 lanes; rows that the staged kernel takes.
KEY_DIMS = (8, 64, 96, 128, 256, 512, 1, 13, 130, 257)


def move_rows(inputs: Inputs, device: str, layout: Layout | None) -> Inputs:
    """Copies of the inputs; on CUDA their rows start as the layout says, with NaN between them."""
    moved = move_all(inputs, device)
    if layout is None or device == "cpu":
        return moved
    return guard_all(moved, dict.fromkeys(("states", "q", "k", "v", "beta", "g"), (-1,)), layout, margin=0)


def assert_is_the_same_on_gpu(inputs: Inputs, layout: Layout | None = None) -> None:
    results = []
    for moved in both_devices(inputs, partial(move_rows, layout=layout)):
        out = delta_rule_step(**moved)
        results.append({name: moved[name] for name in WRITTEN if name in moved} | {"out": out})
    assert_close_to_cpu(results[1], results[0])


def step_cases() -> Iterator[Case]:
    """Each kernel, then each path inside them."""
    for dtype, state_dtype in DTYPES:
        kinds = {"dtype": dtype, "state_dtype": state_dtype}
        for key_dim, gate, updates in itertools.product(KEY_DIMS, GATES, (1, 2)):
            options = {"key_dim": key_dim, "value_dim": 37, "gate": gate, "num_householder": updates, "qk_l2norm": True}
            yield f"{options} {kinds}", options | kinds
        for layout in LAYOUTS[1:]:
            options = {"key_dim": 64, "value_dim": 20, "slots": 4, "layout": layout, "gate": "column", "A_log": True}
            yield f"{options} {kinds}", options | kinds | {"dt_bias": True}
        for name, (options, needs_gate) in OPTIONS.items():
            for gate in ("head", "column") if needs_gate else (None,):
                yield f"{name} {gate} {kinds}", {"gate": gate} | options | kinds
        yield f"long tiles {kinds}", {"batch": 64, "heads": 16, "value_heads": 16, "key_dim": 64, "value_dim": 256} | kinds
        yield f"small heads {kinds}", {"value_dim": 1, "key_dim": 16} | kinds


@over("options", step_cases())
def test_step(options):
    assert_is_the_same_on_gpu(make_inputs(**options))


def test_padding():
    for key_dim in (64, 13):
        inputs = make_inputs(batch=4, key_dim=key_dim, slots=5, dtype=torch.float32)
        assert_is_the_same_on_gpu(inputs | {"state_batch_indices": torch.tensor([4, -1, 0, 2])})


def shifted_cases() -> Iterator[tuple[Any, ...]]:
    for (dtype, state_dtype), layout, key_dim in itertools.product(DTYPES, SHIFTED, (13, 64, 384)):
        options = {"key_dim": key_dim, "value_dim": 21, "gate": "column", "dtype": dtype, "state_dtype": state_dtype}
        yield f"{layout} {options}", options, layout


@over("options, layout", shifted_cases())
def test_rows_at_any_element(options, layout):
    assert_is_the_same_on_gpu(make_inputs(**options), layout)


# Options of make_token_inputs: rows and tokens, and what chooses slots.
TOKEN_CALLS: dict[str, Inputs] = {
    "destination": {"rows": 3, "destination": 0},
    "each destination": {"tokens": 3, "destination": 4},
    "accepted": {"rows": 3, "tokens": 3, "columns": 3},
    "packed": {"packed": (0, 3, 3, 4), "columns": 3, "intermediate": 3},
}


def token_cases() -> Iterator[Case]:
    for (dtype, state_dtype), (call, options) in itertools.product(DTYPES, TOKEN_CALLS.items()):
        for key_dim, updates in itertools.product((7, 64, 128, 384), (1, 2)):
            kinds = {"dtype": dtype, "state_dtype": state_dtype, "key_dim": key_dim, "num_householder": updates}
            yield f"{call} {kinds}", options | kinds


@over("options", token_cases())
def test_tokens(options):
    assert_is_the_same_on_gpu(DELTA_RULE_STEP.make_token_inputs(value_dim=21, **options))
