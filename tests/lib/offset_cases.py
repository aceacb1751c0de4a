"""Calls whose rows start at any element of 16 bytes, for every operator: tests and sanitizer runs share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from operators import OPERATORS

Axes = Mapping[str, Sequence[int]]


class OffsetCase(NamedTuple):
    """Options of ``make_inputs``, and the axes of a row of each input and result."""

    operator: str
    options: Mapping[str, Any]
    axes: Axes


def rows(operator: str, names: str, *axes: int, **options: Any) -> OffsetCase:
    return OffsetCase(operator, options, dict.fromkeys(names.split(), axes))


SCAN, SSD = "u delta z B C out", "x z B C out"
# Tails of every kernel: more than one tile or chunk, and no multiple of a vector. Fewer than 33 steps take other kernels.
OFFSET_CASES = {
    "selective_scan, steps": rows("selective_scan", SCAN, -1, dim=37, seqlen=197, dstate=16),
    "selective_scan, few steps": rows("selective_scan", SCAN, -1, dim=37, seqlen=29, dstate=16),
    "selective_scan, reverse": rows("selective_scan", SCAN, -1, dim=21, seqlen=77, dstate=16, reverse=True),
    "selective_scan, dstate 13": rows("selective_scan", SCAN, -1, dim=21, seqlen=77, dstate=13),
    "selective_scan, groups": rows("selective_scan", SCAN, -1, dim=24, seqlen=77, dstate=16, groups=3),
    "selective_scan, channels": rows("selective_scan", SCAN, 1, dim=83, seqlen=70, dstate=16),
    "ssd_chunk_scan": OffsetCase(
        "ssd_chunk_scan",
        {"seqlen": 70, "heads": 3, "groups": 1, "headdim": 50, "dstate": 36},
        {**dict.fromkeys(SSD.split(), (2, 3)), "dt": (2,)},
    ),
    "ssd_chunk_scan, odd": rows("ssd_chunk_scan", SSD, 2, 3, seqlen=131, heads=2, groups=2, headdim=65, dstate=130),
    "causal_conv1d, channels": rows("causal_conv1d", "x out", 2, channels=83, seqlen=70),
    "causal_conv1d, steps": rows("causal_conv1d", "x out", 1, channels=21, seqlen=197),
}
OFFSET_CASES |= {
    f"{name}, {columns} columns": rows(
        name, "x z residual out normed new_residual", -1, **{"rows": (8,), "columns": columns, **groups}
    )
    for name in ("rms_norm_gated", "layer_norm_gated", "add_rms_norm", "add_layer_norm")
    for columns, groups in ((96, {}), (2561, {}), *([(150, {"group_size": 50})] if name.endswith("gated") else []))
}
RECURRENT = "a b gate candidate forget input recurrence_gate input_gate log_gate x h"
OFFSET_CASES |= {
    f"{name}, {what}": rows(name, RECURRENT, axis, channels=channels, seqlen=seqlen)
    for name, operator in OPERATORS.items()
    if hasattr(operator, "recurrence")
    for what, axis, channels, seqlen in (("channels", 2, 83, 130), ("steps", 1, 21, 197))
    if axis == 2 or name in ("linear_scan", "minlstm_scan")
}
