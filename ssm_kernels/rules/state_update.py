"""Rules of the decoding step of both scans."""

from __future__ import annotations

from functools import partial

from . import selective_scan
from ._batching import each_sample_in_place
from ._table import Axes, Call, Row
from .convolution import row_axes

__all__ = ["ROWS"]


def _axes(call: Call) -> Axes:
    """The state says whether there are heads, x then whether there are several tokens."""
    channels = "channels headdim" if call["state"].ndim == 4 else "channels"
    rows = row_axes(call, call["state"].ndim - 1)
    groups = "groups" if call["B"].ndim == len(rows.split()) + 2 else ""
    return {
        **dict.fromkeys(("x", "dt", "z", "out", ""), f"{rows} {channels}"),
        **dict.fromkeys(("B", "C"), f"{rows} {groups} dstate"),
        **dict.fromkeys(("D", "dt_bias"), channels),
        "A": f"{channels} dstate",
        **dict.fromkeys(("lam", "dt_A"), f"{rows} {channels}"),
        "previous_x": f"batch {channels}",
        "previous_B": f"batch {groups} dstate",
        "state": f"batch {channels} dstate",
        "intermediate_states_buffer": f"batch tokens {channels} dstate",
    }


_STEPS = tuple(f"selective_state_update{of}{into}" for of in ("", "_two_sample") for into in ("", "_out"))

ROWS = {
    "selective_state_update": Row(
        batching={name: each_sample_in_place(name) for name in _STEPS},
        flops=dict.fromkeys(_STEPS, partial(selective_scan.flops, x="x")),
        axes=dict.fromkeys(_STEPS, _axes),
    )
}
