"""Rules of the delta rule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .._dtypes import wide_dtype
from ..reference.delta_rule import log_decays
from ._batching import each_sample, fold
from ._decomposition import in_dtype, kept_states, refuse_packed, scan
from ._table import Axes, Call, Composed, Row

__all__ = ["ROWS", "decomposed_scan", "flops"]

_AXES = {
    "q": "batch seqlen groups key_dim",
    "k": "batch updates groups key_dim",
    "v": "batch updates channels value_dim",
    "beta": "batch updates channels",
    "out": "batch seqlen channels value_dim",
    **dict.fromkeys(("initial_states", "final_states"), "batch channels value_dim key_dim"),
    "states": "batch positions channels value_dim key_dim",
    "seq_idx": "batch seqlen",
    "A_log": "channels",
}
_HEADS = dict.fromkeys(("q", "k", "v", "beta", "g"), 2) | {"initial_states": 1}


def _axes(call: Call) -> Axes:
    key_dim = " key_dim" if call.get("g") is not None and call["g"].ndim == 4 else ""
    return _AXES | {"g": "batch seqlen channels" + key_dim, "dt_bias": "channels" + key_dim}


CHUNK = 64


def flops(call: Call, *, backward: bool = False) -> int:
    """Counts the operations of the products of pairs, of the inverse and of the products with states."""
    batch, updates, value_heads, value_dim = call["v"].shape
    seqlen, heads, key_dim = call["q"].shape[1:]
    chunk = min(CHUNK, updates)
    of_keys, of_values, of_states = chunk * key_dim, chunk * value_dim, key_dim * value_dim
    queries, steps = 2 * batch * seqlen, 2 * batch * updates
    forward = steps * (heads * of_keys + value_heads * (of_keys + of_values + 2 * of_states))
    forward += queries * (heads * of_keys + value_heads * (of_values + of_states))
    if not backward:
        return forward
    # Forward again without its outputs, and two products for each of its products.
    return 3 * forward - queries * value_heads * (of_values + of_states)


def decomposed_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    states_at: Sequence[int] = (),
    reverse: bool = False,
    num_householder: int = 1,
    qk_l2norm: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate_lower_bound: float | None = None,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_packed("delta_rule_scan", cu_seqlens)
    if states_at:
        raise ValueError("decomposition of delta_rule_scan: expected no states_at, got positions: a loop keeps the last state")
    dtype, (batch, seqlen, heads, key_dim), (value_heads, value_dim) = v.dtype, q.shape, v.shape[2:]
    q, k, v, beta, g, states, A_log, dt_bias = in_dtype(wide_dtype(dtype), q, k, v, beta, g, initial_states, A_log, dt_bias)
    k, v, beta = (x.unflatten(1, (seqlen, num_householder)) for x in (k, v, beta))
    if reverse:
        q, k, v, beta = (x.flip(1) for x in (q, k, v, beta))
        g, seq_idx = (None if x is None else x.flip(1) for x in (g, seq_idx))
    if qk_l2norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if beta_sigmoid:
        beta = torch.sigmoid(beta) * (2 if allow_neg_eigval else 1)
    q = q * (key_dim**-0.5 if scale is None else scale)
    if g is None:
        decay = torch.ones_like(v[:, :, 0, :, :1])
    else:
        decay = log_decays(g, A_log, dt_bias, gate_lower_bound).exp()
        decay = decay[..., None] if decay.dim() == 3 else decay
    states = q.new_zeros(batch, value_heads, value_dim, key_dim) if states is None else states
    keep = kept_states(seq_idx, q.dtype)
    if keep is not None:
        decay = decay * keep.transpose(0, 1)[..., None, None]
    of_group = value_heads // heads

    def of_value_heads(x: Tensor) -> Tensor:
        return x.unsqueeze(-2).expand(*x.shape[:-1], of_group, x.shape[-1]).flatten(-3, -2)

    def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> list[Tensor]:
        state = state * decay[:, :, None, :]
        for update in range(num_householder):
            key = of_value_heads(k[:, update])[:, :, None, :]
            error = v[:, update] - (state * key).sum(-1)
            state = state + (beta[:, update, :, None] * error)[..., None] * key
        return [state, (state * of_value_heads(q)[:, :, None, :]).sum(-1)]

    steps = [x.transpose(0, 1) for x in (q, k, v, beta, decay)]
    out, states = scan(step, states, steps, (), like=v[:, :, 0].transpose(0, 1))
    out = out.transpose(0, 1).to(dtype)
    return out.flip(1) if reverse else out, states, states.new_empty(batch, 0, value_heads, value_dim, key_dim)


_FORWARD = ("delta_rule_scan", "_delta_rule_scan", "_delta_rule_scan_fwd")

ROWS = {
    "delta_rule_scan": Row(
        batching={
            "delta_rule_scan": Composed(),
            "_delta_rule_scan": fold("_delta_rule_scan", _HEADS, ("A_log", "dt_bias"), (2, 1, 2)),
            "_delta_rule_scan_bwd": each_sample("_delta_rule_scan_bwd"),
        },
        flops=dict.fromkeys(_FORWARD, flops) | {"_delta_rule_scan_bwd": partial(flops, backward=True)},
        axes=dict.fromkeys((*_FORWARD, "_delta_rule_scan_bwd"), _axes),
        decompositions={"delta_rule_scan": decomposed_scan},
    ),
}
