"""Rules of xLSTM's matrix memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from .._dtypes import wide_dtype
from ..reference.mlstm import advance
from ._batching import each_sample, each_sample_in_place, fold
from ._decomposition import in_dtype, kept_states, refuse_packed, scan
from ._table import Axes, Call, Composed, Row
from .ssd import chunked_flops

__all__ = ["ROWS", "decomposed_scan", "flops"]

_GATES = dict.fromkeys(("i", "f", "divisor"), "batch seqlen channels")
_C, _N, _M = "batch channels value_dim key_dim", "batch channels key_dim", "batch channels"
_AXES: Axes = {
    **dict.fromkeys(("q", "k"), "batch seqlen channels key_dim"),
    **dict.fromkeys(("v", "out"), "batch seqlen channels value_dim"),
    **_GATES,
    **dict.fromkeys(("initial_C", "final_C"), _C),
    **dict.fromkeys(("initial_n", "final_n"), _N),
    **dict.fromkeys(("initial_m", "final_m"), _M),
    "states_C": "batch positions channels value_dim key_dim",
    "states_n": "batch positions channels key_dim",
    "states_m": "batch positions channels",
    "seq_idx": "batch seqlen",
}
_HEADS = dict.fromkeys(("q", "k", "v", "i", "f"), 2) | dict.fromkeys(("initial_C", "initial_n", "initial_m"), 1)


def flops(call: Call, *, backward: bool = False) -> int:
    """Counts the products of both chunked scans, of the numerators and of the divisors."""
    batch, seqlen, heads, value_dim = call["v"].shape
    key_dim, total = call["q"].shape[3], 0
    for rows in (value_dim, 1) if call.get("normalize", True) else (value_dim,):
        total += chunked_flops(batch * seqlen, seqlen, heads, heads, rows, key_dim, None, backward)
    return total


def decomposed_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    scale: float | None = None,
    eps: float = 1e-6,
    input_gate: str = "exp",
    normalize: bool = True,
    initial_C: Tensor | None = None,
    initial_n: Tensor | None = None,
    initial_m: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    refuse_packed("mlstm_scan", cu_seqlens)
    dtype, (batch, _, heads, key_dim) = v.dtype, q.shape
    if reverse:
        q, k, v, i, f = (x.flip(1) for x in (q, k, v, i, f))
        seq_idx = None if seq_idx is None else seq_idx.flip(1)
    q, k, v, i, f, C, n, m = in_dtype(wide_dtype(dtype), q, k, v, i, f, initial_C, initial_n, initial_m)
    q = q * (key_dim**-0.5 if scale is None else scale)
    if initial_C is None:
        C, n = q.new_zeros(batch, heads, v.shape[3], key_dim), q.new_zeros(batch, heads, key_dim)
        m = q.new_full((batch, heads), -torch.inf)

    keep = kept_states(seq_idx, q.dtype)

    def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, *keep: Tensor) -> list[Tensor]:
        # The rows of C, n, and m in a row's first column.
        C, n, m = state[:, :, :-2], state[:, :, -2], state[:, :, -1, 0].detach()
        if keep:
            m = torch.where(keep[0][:, None] == 0, torch.full_like(m, -torch.inf), m)
        out, (C, n, unit) = advance((C, n, m), (q, k, v, i, f), eps, input_gate, normalize)
        rows = [C, n[:, :, None], unit[:, :, None, None].expand(-1, -1, 1, C.shape[3])]
        return [torch.cat(rows, dim=2), out]

    rows = [C, n[:, :, None], m[:, :, None, None].expand(-1, -1, 1, key_dim)]
    steps = [x.transpose(0, 1) for x in (q, k, v, i, f)] + ([] if keep is None else [keep])
    out, state = scan(step, torch.cat(rows, dim=2), steps, (), like=v.transpose(0, 1))
    out = out.transpose(0, 1).to(dtype)
    out = out.flip(1) if reverse else out
    return out, state[:, :, :-2].clone(), state[:, :, -2].clone(), state[:, :, -1, 0].clone()


_STEP_AXES: Axes = {
    **dict.fromkeys(("q", "k", "n"), "batch channels key_dim"),
    **dict.fromkeys(("v", ""), "batch channels value_dim"),
    **dict.fromkeys(("i", "f", "m"), "batch channels"),
    "C": "batch channels value_dim key_dim",
}


def _step_flops(call: Call, *, backward: bool = False) -> int:
    """Counts, for each element of C and n, the decay's product, two operations of the input and two of the output."""
    batch, (_, heads, value_dim, key_dim) = call["q"].shape[0], call["C"].shape
    return (1 + backward) * 5 * batch * heads * (value_dim + call.get("normalize", True)) * key_dim


def _out_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    return shapes["v"]


_FORWARD = ("mlstm_scan", "_mlstm_scan", "_mlstm_scan_states_at", "_mlstm_scan_fwd")

ROWS = {
    "mlstm_scan": Row(
        batching={
            **dict.fromkeys(("mlstm_scan", "_mlstm_scan_states_at"), Composed()),
            "_mlstm_scan": fold("_mlstm_scan", _HEADS, (), (2, 1, 1, 1)),
            "_mlstm_scan_bwd": each_sample("_mlstm_scan_bwd"),
        },
        flops=dict.fromkeys(_FORWARD, flops) | {"_mlstm_scan_bwd": partial(flops, backward=True)},
        axes=dict.fromkeys((*_FORWARD, "_mlstm_scan_bwd"), _AXES),
        decompositions={"mlstm_scan": decomposed_scan},
    ),
    "mlstm_step": Row(
        batching={"mlstm_step": each_sample_in_place("mlstm_step", _out_shape)},
        flops={"mlstm_step": _step_flops},
        axes={"mlstm_step": _STEP_AXES},
    ),
}
