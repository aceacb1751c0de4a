"""The cases of ``sanitizer_cases.py`` whose rows start between multiples of 16 bytes, of every operator.

Between the rows is NaN, and the memory ends with the last vector that has an element of the last row: a read beyond a row is
outside of the allocation, or shows in a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from guarded_memory import Layout, guard_all
from helpers import kernel_choices, move
from offset_cases import OFFSET_CASES, OffsetCase, rows
from operators import OPERATORS
from sanitizer_comparison import Check, difference_between
from torch import Tensor

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


@contextmanager
def tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def check_offsets(
    name: str,
    case: OffsetCase,
    dtype: torch.dtype,
    layout: Layout,
    kernels: AbstractContextManager[Any],
    tolerates_rounding: bool = False,
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
    in_16_bits = dtype.itemsize == 2 or tolerates_rounding
    return difference_between(f"{name} {dtype} {layout}", actual, expected, in_16_bits=in_16_bits)


def offset_checks() -> Iterator[Check]:
    for name, case in (MORE_CASES | OFFSET_CASES).items():
        family = OPERATORS[case.operator].family
        for dtype, layouts in LAYOUTS.items():
            for layout in layouts:
                for kernels in kernel_choices(family, "cuda"):
                    yield partial(check_offsets, name, case, dtype, layout, kernels)
                if family == "ssd_chunk_scan" and dtype == torch.float32:
                    yield partial(check_offsets, f"{name}, TF32", case, dtype, layout, tf32(), tolerates_rounding=True)
