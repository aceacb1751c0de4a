"""The recurrences and their summaries for compute-sanitizer: each kernel (dtype, recurrence, options), and each path inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import recurrence_helpers
import torch
from helpers import DTYPES, debug_option
from recurrence_helpers import PACKED, PLAIN, VARIANTS, Variant
from sanitizer import PYTESTMARK, assert_same_on_gpu, over
from summary_helpers import RecurrenceSummary

pytestmark = PYTESTMARK


def cases() -> Iterator[tuple[Any, ...]]:
    """Recurrence, options of make_inputs, and whether with gradients."""

    def case(what: str, variant: Variant, gradients: bool = True, **options: Any) -> tuple[Any, ...]:
        sizes = {"channels": 21, "seqlen": 70, "dtype": torch.float32}
        return f"{what} {variant.name} {variant.fixed} {options}", variant, sizes | options, gradients

    for dtype in DTYPES:
        for variant in VARIANTS.values():
            yield case("recurrence", variant, dtype=dtype)
        for variant in PLAIN.values():
            yield case("vectors", variant, dtype=dtype, channels=64, seqlen=128)
            yield case("sequential", variant, dtype=dtype, channels=72, seqlen=130)
            yield case("sequential, reverse", variant, False, dtype=dtype, channels=64, seqlen=37, h0=False, reverse=True)
            yield case("inference", variant, False, dtype=dtype, channels=64, seqlen=130)
            yield case("without h0, reverse", variant, dtype=dtype, h0=False, reverse=True)
            yield case("tiles along time", variant, dtype=dtype, batch=1, channels=5, seqlen=300)
            yield case("packed", variant, dtype=dtype, cu_seqlens=PACKED)
            yield case("packed, tiles along time", variant, dtype=dtype, cu_seqlens=(0, 1, 100, 100, 333), reverse=True)
            yield case("reset", variant, dtype=dtype, channels=64, reset=True)
            yield case("reset, tiles along time", variant, dtype=dtype, batch=1, seqlen=333, reset=True, reverse=True)
            for form in recurrence_helpers.FORMS if variant.recurrence.broadcast else ():
                yield case("broadcast", variant, dtype=dtype, form=form)
                yield case("broadcast", variant, dtype=dtype, form=form, broadcast_dtype=dtype)
        for name in ("linear_scan", "minlstm_scan", "rglru_scan"):
            for layout in ("transposed", "permuted", "offset", "sliced"):
                yield case("layout", PLAIN[name], dtype=dtype, channels=72, seqlen=129, layout=layout)
    for dtype in (torch.float32, torch.bfloat16):
        for name in ("mingru_scan", "liquid_scan"):
            for channels, seqlen in ((1, 1), (5, 63), (33, 65), (70, 200), (136, 31)):
                yield case("tails", PLAIN[name], dtype=dtype, channels=channels, seqlen=seqlen)
            # More tiles along time than one look-back covers, and more tiles than blocks.
            yield case("long", PLAIN[name], dtype=dtype, batch=1, channels=3, seqlen=9000)
            yield case("long, reverse", PLAIN[name], dtype=dtype, batch=1, channels=64, seqlen=9001, reverse=True)
            yield case("long, inference", PLAIN[name], False, dtype=dtype, batch=1, channels=65, seqlen=9000)
            yield case("long, packed", PLAIN[name], dtype=dtype, channels=9, cu_seqlens=(0, 4000, 4001, 4001, 9000))
            # A multiple of 128 channels: for other numbers of results, PyTorch's sums over broadcast axes read uninitialized
            # elements of their workspace.
            yield case("many chains", PLAIN[name], dtype=dtype, batch=40, channels=512, seqlen=300)
    for size in ({"batch": 0}, {"seqlen": 0}, {"channels": 0}):
        yield case("empty", PLAIN["mingru_scan"], **size)


@over("name, variant, options, gradients", ((name, name, *case) for name, *case in cases()))
def test_scan(name, variant, options, gradients):
    inputs = recurrence_helpers.make_inputs(variant, **options)
    kernel = debug_option("linear_scan_kernel", "sequential" if name.startswith("sequential") else "faster")
    assert_same_on_gpu(variant, inputs, wanted=None if gradients else (), contexts=[kernel])


# Inputs without gradients differ in nothing that a summary reads.
@over("variant, options", ((name, *case) for name, *case, gradients in cases() if gradients))
def test_summary(variant, options):
    inputs = recurrence_helpers.make_inputs(variant, **options)
    without_h0 = {key: value for key, value in inputs.items() if key != "h0"}
    assert_same_on_gpu(RecurrenceSummary(variant), without_h0, wanted=())
