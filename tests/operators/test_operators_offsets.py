"""Rows that start at any element of 16 bytes, with NaN around them: results and gradients have the bits of aligned rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import conv_helpers
import delta_rule_step_helpers
import pytest
import torch
from decoding_helpers import SELECTIVE_STATE_UPDATE
from guarded_memory import (
    ALIGNED,
    LAYOUTS,
    Layout,
    assert_guards_kept,
    assert_offsets_keep_bits,
    assert_same_bits,
    guard_all,
)
from helpers import LAYOUTS as STRIDES
from helpers import dtypes, kernel_choices
from offset_cases import OFFSET_CASES, OffsetCase
from operator_spec import Inputs
from operators import OPERATORS
from selective_scan_helpers import make_step_inputs

import ssm_kernels

OPERATOR = "every operator"


@pytest.mark.parametrize("case", OFFSET_CASES.values(), ids=list(OFFSET_CASES))
@dtypes(torch.float32, torch.bfloat16, torch.float16)
def test_bits_are_those_of_aligned_rows(case: OffsetCase, device: str, dtype: torch.dtype) -> None:
    spec = OPERATORS[case.operator]
    inputs = spec.make_inputs(**case.options, dtype=dtype, device=device)
    # On the CPU nothing depends on the alignment but the compiler's choice of instructions.
    layouts = LAYOUTS if device == "cuda" else (Layout(1), Layout(0, odd=True))
    for context in kernel_choices(spec.family, device):
        with context:
            assert_offsets_keep_bits(spec, inputs, case.axes, layouts=layouts)


@pytest.mark.parametrize("form", ["channels", "heads", "tokens"])
@pytest.mark.parametrize("dstate", [13, 16, 128])
@dtypes(torch.float32, torch.bfloat16, torch.float16)
def test_decoding_steps_have_the_bits_of_aligned_rows(form: str, dstate: int, device: str, dtype: torch.dtype) -> None:
    options = {"dstate": dstate, "dtype": dtype, "state_dtype": dtype, "device": device}
    if form == "heads":
        inputs = make_step_inputs(heads=3, dim=27, **options)
        inputs["A"] = inputs["A"][:, :1, :1].expand_as(inputs["A"])  # one number a head, as in Mamba-2
    elif form == "tokens":
        inputs = SELECTIVE_STATE_UPDATE.make_token_inputs(tokens=3, dim=83, out=False, **options)
    else:
        inputs = make_step_inputs(dim=83, **options)
    axes = dict.fromkeys(("state", "x", "dt", "B", "C", "z"), (-1,))
    assert_steps_keep_bits(ssm_kernels.selective_state_update, inputs, axes, "state")


@pytest.mark.parametrize("layout", STRIDES[1:])
@pytest.mark.parametrize("batch", [2, 16])
@dtypes(torch.float32, torch.bfloat16)
def test_decoding_steps_have_the_same_bits_in_any_strides(layout: str, batch: int, device: str, dtype: torch.dtype) -> None:
    options = {"batch": batch, "dim": 1021, "dstate": 24, "dtype": dtype, "state_dtype": dtype, "device": device}
    results = []
    for strides in ("contiguous", layout):
        inputs = make_step_inputs(**options, layout=strides)
        results.append({"out": ssm_kernels.selective_state_update(**inputs), "state": inputs["state"]})
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("tokens", [None, 3])
@pytest.mark.parametrize("key_dim", [13, 64, 136])
@dtypes(torch.float32, torch.bfloat16, torch.float16)
def test_steps_of_the_delta_rule_have_the_bits_of_aligned_rows(
    key_dim: int, tokens: int | None, device: str, dtype: torch.dtype
) -> None:
    options = {"key_dim": key_dim, "value_dim": 21, "tokens": tokens, "dtype": dtype, "state_dtype": dtype}
    inputs = delta_rule_step_helpers.make_inputs(**options, gate="column", qk_l2norm=True, device=device)
    axes = dict.fromkeys(("states", "q", "k", "v", "beta", "g"), (-1,))
    assert_steps_keep_bits(ssm_kernels.delta_rule_step, inputs, axes, "states")


@pytest.mark.parametrize("seqlen", [None, 3])
@dtypes(torch.float32, torch.bfloat16, torch.float16)
def test_steps_of_the_convolution_have_the_bits_of_aligned_rows(seqlen: int | None, device: str, dtype: torch.dtype) -> None:
    inputs = conv_helpers.make_step_inputs(channels=83, seqlen=seqlen, dtype=dtype, device=device)
    for state_axis in (-1, 1):
        assert_steps_keep_bits(
            ssm_kernels.causal_conv1d_update, inputs, {"x": (-1,), "conv_state": (state_axis,)}, "conv_state"
        )


def assert_steps_keep_bits(function: Callable, inputs: Inputs, axes: Mapping[str, Sequence[int]], state: str) -> None:
    """The output and the state, which the function updates in place."""

    def results(layout: Layout) -> Inputs:
        moved = guard_all(inputs, axes, layout)
        found = {"out": function(**moved), state: moved[state]}
        for name in axes:
            assert_guards_kept(moved[name], f"{layout} {name}")
        return found

    expected = results(ALIGNED)
    for layout in LAYOUTS:
        assert_same_bits(results(layout), expected, str(layout))
