"""Rows that start at any element of 16 bytes, with NaN around them: results and gradients have the bits of aligned rows."""

from __future__ import annotations

import pytest
import torch
from guarded_memory import LAYOUTS, Layout, assert_offsets_keep_bits
from helpers import dtypes, kernel_choices
from offset_cases import OFFSET_CASES, OffsetCase
from operators import OPERATORS

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
