"""Each operator's own cases, and rows that start between multiples of 16 bytes, for compute-sanitizer.

Between such rows is NaN, and the memory ends with the last vector that has an element of the last row: a read beyond a row is
outside of the allocation, or shows in a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from guarded_memory import Layout, guard_all
from helpers import move_all, tf32
from offset_cases import OFFSET_CASES, OffsetCase, rows
from operators import OPERATORS
from sanitizer import PYTESTMARK, assert_same_on_gpu, choose_kernel, kernels_of, over

pytestmark = PYTESTMARK

DTYPES = (torch.float32, torch.bfloat16)


def cases() -> Iterator[tuple[Any, ...]]:
    for name, operator in OPERATORS.items():
        if "cuda" not in operator.devices:
            continue
        for dtype in DTYPES:
            for case, options in operator.cases.items():
                for kernel in kernels_of(operator.family):
                    yield f"{name}-{case}-{dtype}-{kernel}", operator, {"dtype": dtype} | options, kernel


@over("operator, options, chosen", cases())
def test_cases(operator, options, chosen):
    inputs = operator.make_inputs(**options)
    in_16_bits = options["dtype"].itemsize == 2
    assert_same_on_gpu(operator, inputs, contexts=[choose_kernel(operator.family, chosen)], in_16_bits=in_16_bits)


# ----- rows at any element

# Every start of a row in 16 bytes occurs in each dtype: all at once, or all rows alike.
LAYOUTS = {torch.float32: (Layout(1), Layout(0, odd=True)), torch.bfloat16: (Layout(5), Layout(0, odd=True))}

SCAN, RECURRENCE = "u delta z B C out", "gate candidate forget input h"
PACKED = (0, 1, 64, 64, 100, 133)
# Beside the cases of the tests: cuts of sequences, other widths, and sizes of which rows take other blocks.
# Kernels of norms read whole the last vector of a saved tensor: eight rows fill it, and the sanitizer has nothing to report.
MORE_CASES = {
    "selective_scan, dstate 100": rows("selective_scan", SCAN, -1, dim=5, seqlen=77, dstate=100),
    "selective_scan, packed": rows("selective_scan", SCAN, -1, dim=21, dstate=16, cu_seqlens=PACKED),
    "ssd_chunk_scan, packed": rows("ssd_chunk_scan", "x z B C out", 2, 3, heads=2, headdim=65, dstate=20, cu_seqlens=PACKED),
    "causal_conv1d, packed channels": rows("causal_conv1d", "x out", 2, channels=83, cu_seqlens=PACKED),
    "causal_conv1d, packed steps": rows("causal_conv1d", "x out", 1, channels=21, cu_seqlens=PACKED),
    "causal_conv1d, width 3": rows("causal_conv1d", "x out", 2, channels=83, seqlen=70, width=3),
    "causal_conv1d, width 3, steps": rows("causal_conv1d", "x out", 1, channels=21, seqlen=197, width=3),
    "causal_conv1d, many tiles": rows("causal_conv1d", "x out", 2, batch=70, channels=83, seqlen=70),
    "causal_conv1d, one step": rows("causal_conv1d", "x out", 2, channels=83, seqlen=1),
}
for columns, groups in ((97, {}), (147, {"group_size": 49}), (12289, {})):
    for operator in ("rms_norm_gated", "layer_norm_gated", *(() if groups else ("add_rms_norm", "add_layer_norm"))):
        MORE_CASES[f"{operator}, {columns} columns"] = rows(
            operator, "x z residual out normed new_residual", -1, **{"rows": (8,), "columns": columns, **groups}
        )
for operator in ("mingru_scan", "minlstm_scan"):
    MORE_CASES[f"{operator}, packed"] = rows(operator, RECURRENCE, 2, channels=83, cu_seqlens=PACKED)
    MORE_CASES[f"{operator}, reset, steps"] = rows(operator, RECURRENCE, 1, channels=21, seqlen=197, reset=True)


def assert_offsets_are_the_same_on_gpu(case: OffsetCase, dtype: torch.dtype, layout: Layout, **options: Any) -> None:
    def move(tensors: dict[str, Any], device: str) -> dict[str, Any]:
        moved = move_all(tensors, device)
        return moved if device == "cpu" else guard_all(moved, case.axes, layout, margin=0)

    operator = OPERATORS[case.operator]
    assert_same_on_gpu(operator, operator.make_inputs(**case.options, dtype=dtype), move=move, **options)


def offset_cases() -> Iterator[tuple[Any, ...]]:
    for name, case in (MORE_CASES | OFFSET_CASES).items():
        for dtype, layouts in LAYOUTS.items():
            for layout in layouts:
                for kernel in kernels_of(OPERATORS[case.operator].family):
                    yield f"{name}-{dtype}-{layout}-{kernel}", case, dtype, layout, kernel


@over("case, dtype, layout, chosen", offset_cases())
def test_rows_at_any_element(case, dtype, layout, chosen):
    kernels = choose_kernel(OPERATORS[case.operator].family, chosen)
    assert_offsets_are_the_same_on_gpu(case, dtype, layout, contexts=[kernels], in_16_bits=dtype.itemsize == 2)


@pytest.mark.parametrize("layout", LAYOUTS[torch.float32], ids=str)
@over("case", ((name, case) for name, case in (MORE_CASES | OFFSET_CASES).items() if case.operator == "ssd_chunk_scan"))
def test_rows_at_any_element_in_tf32(case, layout):
    assert_offsets_are_the_same_on_gpu(case, torch.float32, layout, contexts=[tf32()], in_16_bits=True)
