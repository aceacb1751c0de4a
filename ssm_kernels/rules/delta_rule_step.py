"""Rules of the delta rule's decoding step."""

from __future__ import annotations

from collections.abc import Mapping

from ._batching import each_sample_in_place
from ._table import Axes, Call, Row

__all__ = ["ROWS"]


def _axes(call: Call) -> Axes:
    """The rank of q says whether there are several tokens, and that of g whether a gate has columns."""
    rows = "tokens" if call.get("cu_seqlens") is not None else "batch" if call["q"].ndim == 3 else "batch tokens"
    updates = "batch updates" if rows == "batch" and call["k"].ndim == 4 else rows.replace("tokens", "updates")
    gate = "channels columns" if call.get("g") is not None and call["g"].ndim == call["q"].ndim else "channels"
    return {
        "q": f"{rows} groups columns",
        "k": f"{updates} groups columns",
        "v": f"{updates} channels headdim",
        "beta": f"{updates} channels",
        "g": f"{rows} {gate}",
        "A_log": "channels",
        "dt_bias": gate,
        "states": "batch channels headdim columns",
        "intermediate_states_buffer": "batch tokens channels headdim columns",
        **dict.fromkeys(("out", ""), f"{rows} channels headdim"),
    }


def _flops(call: Call, *, backward: bool = False) -> int:
    """Counts, for each element of a token's states, the decay's product, four operations an update and two of the output."""
    _, heads, value_dim, key_dim = call["states"].shape
    tokens = call["q"][..., 0, 0].numel()
    per_element = 2 + 4 * (call.get("num_householder") or 1) + (call.get("g") is not None)
    return (1 + backward) * tokens * heads * value_dim * key_dim * per_element


def _out_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    return (*shapes["q"][:-2], *shapes["states"][1:3])


_STEPS = ("delta_rule_step", "delta_rule_step_out")

ROWS = {
    "delta_rule_step": Row(
        batching={name: each_sample_in_place(name, _out_shape) for name in _STEPS},
        flops=dict.fromkeys(_STEPS, _flops),
        axes=dict.fromkeys(_STEPS, _axes),
    )
}
