"""Rules of the causal convolution and of its decoding step."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from .. import reference
from .._dtypes import wide_dtype
from ..choices import ConvActivation
from ._batching import each_sample, each_sample_in_place, fold
from ._decomposition import in_dtype, refuse_packed
from ._table import Axes, Call, Composed, Row

__all__ = ["ROWS", "decomposed_convolution", "row_axes"]

AXES = {
    **dict.fromkeys(("x", "out"), "batch seqlen channels"),
    **dict.fromkeys(("initial_state", "final_state"), "batch channels width"),
    "weight": "channels width",
    "bias": "channels",
    "seq_idx": "batch seqlen",
}


def row_axes(call: Call, rank: int) -> str:
    """The axes of a step's x before its channels, given its rank with one token a row."""
    if call.get("cu_seqlens") is not None:
        return "tokens"
    return "batch" if call["x"].ndim == rank else "batch tokens"


def _step_axes(call: Call) -> Axes:
    return AXES | {
        **dict.fromkeys(("x", "out", ""), f"{row_axes(call, 2)} channels"),
        "conv_state": "batch channels width",
        "num_accepted_tokens": "batch",
        "intermediate_conv_window": "batch tokens channels width",
    }


def _flops(call: Call, *, backward: bool = False) -> int:
    return (1 + backward) * 2 * call["x"].numel() * call["weight"].shape[-1]


def decomposed_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: ConvActivation | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    refuse_packed("causal_conv1d", cu_seqlens)
    wide, weight, bias, state = in_dtype(wide_dtype(x.dtype), x, weight, bias, initial_state)
    out, state = reference.causal_conv1d(
        wide, weight, bias, activation=activation, seq_idx=seq_idx, initial_state=state, return_final_state=True
    )
    return out.to(x.dtype), state.to(x.dtype)


_STEPS = ("causal_conv1d_update", "causal_conv1d_update_out")

ROWS = {
    "causal_conv1d": Row(
        batching={
            "causal_conv1d": Composed(),
            "_causal_conv1d": fold("_causal_conv1d", {"x": 2, "initial_state": 1}, ("weight", "bias"), (2, 1)),
            "_causal_conv1d_bwd": each_sample("_causal_conv1d_bwd"),
        },
        flops=dict.fromkeys(("causal_conv1d", "_causal_conv1d", "_causal_conv1d_fwd"), _flops)
        | dict.fromkeys(("_causal_conv1d_bwd", "_causal_conv1d_bwd_out"), partial(_flops, backward=True)),
        axes=dict.fromkeys(("causal_conv1d", "_causal_conv1d", "_causal_conv1d_fwd", "_causal_conv1d_bwd"), AXES),
        decompositions={"causal_conv1d": decomposed_convolution},
    ),
    "causal_conv1d_update": Row(
        batching={name: each_sample_in_place(name) for name in _STEPS},
        flops=dict.fromkeys(_STEPS, _flops),
        axes=dict.fromkeys(_STEPS, _step_axes),
    ),
}
