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


def _has_ranks(bias: Any) -> bool:
    return bias is not None and bias.ndim == 3


def _axes(call: Call) -> Axes:
    # The heads share their angles and, in groups, B and C: DTensor cuts the batch alone.
    has_heads, ranks = call["angles"].ndim == 4, " ranks" if call["B"].ndim == 5 else ""
    return {
        **dict.fromkeys(("x", "z", "out"), "batch seqlen heads headdim"),
        **dict.fromkeys(("B", "C"), f"batch seqlen{ranks} groups dstate"),
        **dict.fromkeys(("dt", "A", "trap"), "batch seqlen heads"),
        "angles": "batch seqlen heads angles" if has_heads else "batch seqlen angles",
        **{name: "heads ranks dstate" if _has_ranks(call.get(name)) else "heads dstate" for name in ("B_bias", "C_bias")},
        "D": "heads headdim",
        **dict.fromkeys(("mimo_x", "mimo_z", "mimo_out"), "heads ranks headdim"),
        "norm_weight": "heads headdim",
        **dict.fromkeys(("initial_angle", "final_angle"), "batch heads angles"),
        **dict.fromkeys(("initial_ssm", "final_ssm"), "batch heads headdim dstate"),
        **dict.fromkeys(("initial_k", "final_k"), f"batch heads{ranks} dstate"),
        **dict.fromkeys(("initial_x", "final_x"), "batch heads headdim"),
        "seq_idx": "batch seqlen",
    }


def _flops(call: Call, *, backward: bool = False) -> int:
    """Counts the products of the chunked scan, whose heads share no B and C, and six operations of each rotated pair.

    With ranks each step has as many rows in the products.
    """
    batch, seqlen, heads, headdim = call["x"].shape
    dstate, angles = call["B"].shape[-1], call["angles"].shape[-1]
    samples = seqlen * (call["B"].shape[2] if call["B"].ndim == 5 else 1)
    total = chunked_flops(batch * samples, samples, heads, heads, headdim, dstate, call["chunk_size"], backward)
    return total + (1 + 2 * backward) * 12 * batch * samples * heads * angles


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
    dtype, (batch, _, heads, headdim), (groups, dstate) = x.dtype, x.shape, B.shape[-2:]
    wide = wide_dtype(dtype)
    inputs = in_dtype(wide, x, dt, A, B, C, trap, angles, B_bias, C_bias, D, z, norm_weight)
    x, dt, A, B, C, trap, angles, B_bias, C_bias, D, z, norm_weight = inputs
    states = in_dtype(wide, initial_angle, initial_ssm, initial_k, initial_x)
    shapes = (heads, angles.shape[-1]), (heads, headdim, dstate), (heads, dstate), (heads, headdim)
    first = [x.new_zeros(batch, *shape) if state is None else state for state, shape in zip(states, shapes, strict=True)]
    per_step = math.pi * (angles if angles.dim() == 4 else angles.unsqueeze(2)).tanh() * dt.unsqueeze(-1)
    # The ranks are an axis before that of the heads, of size 1 in a call without them.
    has_ranks = B.dim() == 5
    if not has_ranks:
        B, C = B.unsqueeze(2), C.unsqueeze(2)
    ranks = B.shape[2]
    B, C = (rows[..., None, :].expand(-1, -1, -1, -1, heads // groups, -1).flatten(3, 4) for rows in (B, C))
    B, C = (
        rows if bias is None else rows + (bias.transpose(0, 1) if bias.dim() == 3 else bias)
        for rows, bias in ((B, B_bias), (C, C_bias))
    )

    def of_ranks(each: Tensor, factor: Tensor | None) -> Tensor:
        # (..., heads, headdim) times factors (heads, ranks, headdim).
        if factor is None:
            return each.unsqueeze(-3).expand(*each.shape[:-2], ranks, -1, -1)
        return each.unsqueeze(-3) * factor.transpose(0, 1)

    angle, S, k, last_x = first
    if initial_k is None:
        k = k.unsqueeze(1).expand(-1, ranks, -1, -1).contiguous()
    else:
        k = k.transpose(1, 2).contiguous() if has_ranks else k.unsqueeze(1)
    first = [angle, S, k, of_ranks(last_x, mimo_x).contiguous()]
    v = of_ranks(x, mimo_x)
    weight, decay = trap.sigmoid(), (A * dt).exp()
    keep = kept_states(seq_idx, wide)

    def step(
        angle: Tensor,
        S: Tensor,
        k_before: Tensor,
        v_before: Tensor,
        v: Tensor,
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
            angle, S, k_before = angle * kept, S * kept[..., None], k_before * kept[..., None]
        angle = angle + phase
        k, q = (rotated(rows, angle.unsqueeze(1), rotate) for rows in (B, C))
        S = decay[..., None, None] * S + before[..., None, None] * (v_before[..., None] * k_before[..., None, :]).sum(1)
        S = S + now[..., None, None] * (v[..., None] * k[..., None, :]).sum(1)
        return [angle, S, k, v.clone(), (S.unsqueeze(1) * q[..., None, :]).sum(-1)]

    steps = [v, decay, (1 - weight) * dt * decay, weight * dt, B, C, per_step]
    steps = [each.transpose(0, 1) for each in steps] + ([] if keep is None else [keep])
    if isinstance(x.shape[1], int) and x.shape[1] == 0:
        y, (angle, S, k, _) = v, first
    else:
        angle, S, k, _, y = scan_op(step, first, steps, ())
        y, last_x = y.transpose(0, 1), x[:, -1]
    angle = angle - 2 * math.pi * (angle / (2 * math.pi)).round()
    if D is not None:
        y = y + (D if D.dim() == 2 else D[:, None]) * v
    y = gated(y, None if z is None else of_ranks(z, mimo_z), norm_weight, norm_eps)
    out = (y if mimo_out is None else y * mimo_out.transpose(0, 1)).sum(2).to(dtype)
    k = k.transpose(1, 2).contiguous() if has_ranks else k.squeeze(1).clone()
    return out, angle.clone(), S.clone(), k, last_x.to(dtype, copy=True)


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
        parameters = ("B_bias", "C_bias", "D", "mimo_x", "mimo_z", "mimo_out", "norm_weight")
        is_mapped = any(dims[each] is not None for each in parameters)
        way = one_each if is_mapped or values["cu_seqlens"] is not None else folded
        return way(info, in_dims, *arguments, **options)

    return rule


_STEP_AXES = {
    **dict.fromkeys(("x", "z", "previous_x", ""), "batch heads headdim"),
    **dict.fromkeys(("dt", "A", "trap"), "batch heads"),
    "D": "heads headdim",
    **dict.fromkeys(("mimo_x", "mimo_z", "mimo_out"), "heads ranks headdim"),
    "norm_weight": "heads headdim",
    "angle": "batch heads angles",
    "ssm": "batch heads headdim dstate",
}


def _step_axes(call: Call) -> Axes:
    ranks = "ranks " if call["B"].ndim == 4 else ""
    return _STEP_AXES | {
        "angles": "batch heads angles" if call["angles"].ndim == 3 else "batch angles",
        **dict.fromkeys(("B", "C"), f"batch {ranks}groups dstate"),
        **{name: "heads ranks dstate" if _has_ranks(call.get(name)) else "heads dstate" for name in ("B_bias", "C_bias")},
        "previous_k": f"batch heads {ranks}dstate",
    }


def _step_flops(call: Call, *, backward: bool = False) -> int:
    """Counts, for each element of the state, the decay's product and two operations of each sample and of the output.

    Each rank has its samples and its output.
    """
    batch, (_, heads, headdim, dstate) = call["x"].shape[0], call["ssm"].shape
    ranks = call["B"].shape[1] if call["B"].ndim == 4 else 1
    return (1 + backward) * (1 + 6 * ranks) * batch * heads * headdim * dstate


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
