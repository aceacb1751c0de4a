"""The cases of ``sanitizer_cases.py`` whose rows start between multiples of 16 bytes, of every operator.

Between the rows is NaN, and the memory ends with the last vector that has an element of the last row: a read beyond a row is
outside of the allocation, or shows in a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from guarded_memory import Layout, guard_all
from helpers import kernel_choices, move
from offset_cases import OFFSET_CASES, OffsetCase
from operators import OPERATORS
from sanitizer_comparison import Check, difference_between
from torch import Tensor

# Every start of a row in 16 bytes occurs in each dtype: all at once, or all rows alike.
LAYOUTS = {torch.float32: (Layout(1), Layout(0, odd=True)), torch.bfloat16: (Layout(5), Layout(0, odd=True))}


def check_offsets(
    name: str, case: OffsetCase, dtype: torch.dtype, layout: Layout, kernels: AbstractContextManager[Any]
) -> str | None:
    spec = OPERATORS[case.operator]
    inputs = spec.make_inputs(**case.options, dtype=dtype)
    cotangents = dict(zip(spec.results, spec.make_cotangents(inputs), strict=True))
    expected = spec.evaluate(spec, inputs, tuple(cotangents.values()))

    def on_cuda(tensors: dict[str, Any]) -> dict[str, Any]:
        moved = {key: move(value, "cuda") if isinstance(value, Tensor) else value for key, value in tensors.items()}
        return guard_all(moved, case.axes, layout, margin=0)

    with kernels:
        actual = spec.evaluate(spec, on_cuda(inputs), tuple(on_cuda(cotangents).values()))
    return difference_between(f"{name} {dtype} {layout}", actual, expected, in_16_bits=dtype.itemsize == 2)


def offset_checks() -> Iterator[Check]:
    for name, case in OFFSET_CASES.items():
        for dtype, layouts in LAYOUTS.items():
            for layout in layouts:
                for kernels in kernel_choices(OPERATORS[case.operator].family, "cuda"):
                    yield partial(check_offsets, name, case, dtype, layout, kernels)
