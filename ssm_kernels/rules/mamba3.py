"""Rules of Mamba-3's scan and its step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op

from .._dtypes import wide_dtype
from ..reference.mamba3 import gated, rotated
from ._batching import each_sample, each_sample_in_place, fold, named
from ._decomposition import in_dtype, kept_states, refuse_packed
from ._table import Axes, Call, Composed, Row
from .ssd import chunked_flops

__all__ = ["ROWS", "decomposed_scan"]


def _axes(call: Call) -> Axes:
    # The heads share their angles and, in groups, B and C: DTensor cuts the batch alone.
    has_heads = call["angles"].ndim == 4
    return {
        **dict.fromkeys(("x", "z", "out"), "batch seqlen heads headdim"),
        **dict.fromkeys(("B", "C"), "batch seqlen groups dstate"),
        **dict.fromkeys(("dt", "A", "trap"), "batch seqlen heads"),
        "angles": "batch seqlen heads angles" if has_heads else "batch seqlen angles",
        **dict.fromkeys(("B_bias", "C_bias"), "heads dstate"),
        "D": "heads headdim",
        "norm_weight": "heads headdim",
        **dict.fromkeys(("initial_angle", "final_angle"), "batch heads angles"),
        **dict.fromkeys(("initial_ssm", "final_ssm"), "batch heads headdim dstate"),
        **dict.fromkeys(("initial_k", "final_k"), "batch heads dstate"),
        **dict.fromkeys(("initial_x", "final_x"), "batch heads headdim"),
        "seq_idx": "batch seqlen",
    }


def _flops(call: Call, *, backward: bool = False) -> int:
    """Counts the products of the chunked scan, whose heads share no B and C, and six operations of each rotated pair."""
    batch, seqlen, heads, headdim = call["x"].shape
    dstate, angles = call["B"].shape[-1], call["angles"].shape[-1]
    total = chunked_flops(batch * seqlen, seqlen, heads, heads, headdim, dstate, call["chunk_size"], backward)
    return total + (1 + 2 * backward) * 12 * batch * seqlen * heads * angles


def decomposed_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    trap: Tensor,
    angles: Tensor,
    *,
    B_bias: Tensor | None = None,
    C_bias: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    mimo_x: Tensor | None = None,
    mimo_z: Tensor | None = None,
    mimo_out: Tensor | None = None,
    norm_weight: Tensor | None = None,
    initial_angle: Tensor | None = None,
    initial_ssm: Tensor | None = None,
    initial_k: Tensor | None = None,
    initial_x: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    norm_eps: float = 1e-5,
    rotate: str = "pairs",
    chunk_size: int | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    refuse_packed("mamba3_chunk_scan", cu_seqlens)
    dtype, (batch, _, heads, headdim), (groups, dstate) = x.dtype, x.shape, B.shape[2:]
    wide = wide_dtype(dtype)
    inputs = in_dtype(wide, x, dt, A, B, C, trap, angles, B_bias, C_bias, D, z, norm_weight)
    x, dt, A, B, C, trap, angles, B_bias, C_bias, D, z, norm_weight = inputs
    states = in_dtype(wide, initial_angle, initial_ssm, initial_k, initial_x)
    shapes = (heads, angles.shape[-1]), (heads, headdim, dstate), (heads, dstate), (heads, headdim)
    first = [x.new_zeros(batch, *shape) if state is None else state for state, shape in zip(states, shapes, strict=True)]
    per_step = math.pi * (angles if angles.dim() == 4 else angles.unsqueeze(2)).tanh() * dt.unsqueeze(-1)
    B, C = (rows[:, :, :, None].expand(-1, -1, -1, heads // groups, -1).flatten(2, 3) for rows in (B, C))
    B, C = B if B_bias is None else B + B_bias, C if C_bias is None else C + C_bias
    weight, decay = trap.sigmoid(), (A * dt).exp()
    keep = kept_states(seq_idx, wide)

    def step(
        angle: Tensor,
        S: Tensor,
        k_before: Tensor,
        x_before: Tensor,
        x: Tensor,
        decay: Tensor,
        before: Tensor,
        now: Tensor,
        B: Tensor,
        C: Tensor,
        phase: Tensor,
        *keep: Tensor,
    ) -> list[Tensor]:
        if keep:
            kept = keep[0][:, None, None]
            angle, S, k_before = angle * kept, S * kept[..., None], k_before * kept
        angle = angle + phase
        k, q = rotated(B, angle, rotate), rotated(C, angle, rotate)
        S = decay[..., None, None] * S + before[..., None, None] * x_before[..., None] * k_before[..., None, :]
        S = S + now[..., None, None] * x[..., None] * k[..., None, :]
        return [angle, S, k, x.clone(), (S * q[..., None, :]).sum(-1)]

    steps = [x, decay, (1 - weight) * dt * decay, weight * dt, B, C, per_step]
    steps = [each.transpose(0, 1) for each in steps] + ([] if keep is None else [keep])
    if isinstance(x.shape[1], int) and x.shape[1] == 0:
        y, (angle, S, k, last_x) = x, first
    else:
        angle, S, k, last_x, y = scan_op(step, first, steps, ())
        y = y.transpose(0, 1)
    angle = angle - 2 * math.pi * (angle / (2 * math.pi)).round()
    if D is not None:
        y = y + (D if D.dim() == 2 else D[:, None]) * x
    out = gated(y, z, norm_weight, norm_eps).to(dtype)
    return out, angle.clone(), S.clone(), k.clone(), last_x.to(dtype, copy=True)


_SEQUENCES = ("x", "dt", "A", "B", "C", "trap", "angles", "z")
_STATES = ("initial_angle", "initial_ssm", "initial_k", "initial_x")


def _each_or_folded() -> Any:
    """One call for samples that fold into the batch, and one each for samples of parameters and of packed sequences."""
    name = "_mamba3_chunk_scan"
    operator, one_each = getattr(torch.ops.ssm_kernels, name).default, each_sample(name)
    folded = fold(name, dict.fromkeys((*_SEQUENCES, *_STATES), 0), (), (0,) * 5)

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any, **options: Any) -> tuple[Any, Any]:
        values, dims = named(operator, arguments, in_dims)
        if dims["cu_seqlens"] is not None:
            found = dims["cu_seqlens"]
            raise RuntimeError(f"mamba3_chunk_scan: expected cu_seqlens that vmap does not map, got in_dims {found}")
        is_mapped = any(dims[each] is not None for each in ("B_bias", "C_bias", "D"))
        way = one_each if is_mapped or values["cu_seqlens"] is not None else folded
        return way(info, in_dims, *arguments, **options)

    return rule


_STEP_AXES = {
    **dict.fromkeys(("x", "z", "previous_x", ""), "batch heads headdim"),
    **dict.fromkeys(("dt", "A", "trap"), "batch heads"),
    **dict.fromkeys(("B", "C"), "batch groups dstate"),
    **dict.fromkeys(("B_bias", "C_bias"), "heads dstate"),
    "D": "heads headdim",
    "norm_weight": "heads headdim",
    "angle": "batch heads angles",
    "ssm": "batch heads headdim dstate",
    "previous_k": "batch heads dstate",
}


def _step_axes(call: Call) -> Axes:
    return _STEP_AXES | {"angles": "batch heads angles" if call["angles"].ndim == 3 else "batch angles"}


def _step_flops(call: Call, *, backward: bool = False) -> int:
    """Counts, for each element of the state, the decay's product and two operations of each sample and of the output."""
    batch, (_, heads, headdim, dstate) = call["x"].shape[0], call["ssm"].shape
    return (1 + backward) * 7 * batch * heads * headdim * dstate


def _out_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    return shapes["x"]


_FORWARD = ("mamba3_chunk_scan", "_mamba3_chunk_scan", "_mamba3_chunk_scan_fwd")

ROWS = {
    "mamba3_chunk_scan": Row(
        batching={
            "mamba3_chunk_scan": Composed(),
            "_mamba3_chunk_scan": _each_or_folded(),
            "_mamba3_chunk_scan_bwd": each_sample("_mamba3_chunk_scan_bwd"),
        },
        flops=dict.fromkeys(_FORWARD, _flops) | {"_mamba3_chunk_scan_bwd": partial(_flops, backward=True)},
        axes=dict.fromkeys((*_FORWARD, "_mamba3_chunk_scan_bwd"), _axes),
        decompositions={"mamba3_chunk_scan": decomposed_scan},
    ),
    "mamba3_state_update": Row(
        batching={"mamba3_state_update": each_sample_in_place("mamba3_state_update")},
        flops={"mamba3_state_update": _step_flops},
        axes={"mamba3_state_update": _step_axes},
    ),
}
