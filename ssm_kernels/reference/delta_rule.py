"""Reference of the delta rule: see :mod:`ssm_kernels.reference`, which has it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from .._torchscript import REFERENCE_LOOPS, refuse_tracing
from ..ops._states_at import Positions
from .sequences import at_positions, of_sequences, promoted_dtype, resets_of, typed_like

__all__ = ["delta_rule_scan", "log_decays"]


def log_decays(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, gate_lower_bound: float | None) -> Tensor:
    """The log decays of raw gates; others as they are."""
    if A_log is None and gate_lower_bound is None:
        return g
    biased = g if dt_bias is None else g + dt_bias
    rate = torch.ones_like(biased[0, 0]) if A_log is None else A_log.exp()
    if g.dim() == 4 and rate.dim() == 1:
        rate = rate[:, None]
    return -rate * F.softplus(biased) if gate_lower_bound is None else gate_lower_bound * torch.sigmoid(rate * biased)


def _l2norm(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


@typed_like(ops.delta_rule_scan)
def delta_rule_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    states_at: Positions | None = None,
    reverse: bool = False,
    num_householder: int = 1,
    qk_l2norm: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate_lower_bound: float | None = None,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
) -> Any:
    """The delta rule as a loop over time. Arguments and results as :func:`ssm_kernels.delta_rule_scan`.

    Computed in the promoted dtype of all arguments; all results have that dtype. With ``reverse``, the scan of flipped
    arguments, in which the updates of a step keep their order.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> q, k = torch.randn(2, 2, 10, 4, 8, dtype=torch.float64)
        >>> v, beta = torch.randn(2, 10, 4, 6, dtype=torch.float64), torch.rand(2, 10, 4, dtype=torch.float64)
        >>> reference.delta_rule_scan(q, k, v, beta, qk_l2norm=True).shape
        torch.Size([2, 10, 4, 6])
    """
    refuse_tracing("delta_rule_scan", REFERENCE_LOOPS)
    dtype = promoted_dtype(q, k, v, beta, g, initial_states, A_log, dt_bias)
    q, k, v, beta = (x.to(dtype) for x in (q, k, v, beta))
    g, initial_states, A_log, dt_bias = (None if x is None else x.to(dtype) for x in (g, initial_states, A_log, dt_bias))
    batch, seqlen, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    # The updates of a step have an axis of their own.
    k, v, beta = (x.unflatten(1, (seqlen, num_householder)) for x in (k, v, beta))
    if reverse:
        if states_at is not None:
            raise ValueError("delta_rule_scan: expected states_at without reverse, got both")
        q, k, v, beta = (x.flip(1) for x in (q, k, v, beta))
        g, seq_idx = (None if x is None else x.flip(1) for x in (g, seq_idx))
        if cu_seqlens is not None:
            cu_seqlens = seqlen - cu_seqlens.flip(0)
            initial_states = None if initial_states is None else initial_states.flip(0)
    if qk_l2norm:
        q, k = _l2norm(q), _l2norm(k)
    if beta_sigmoid:
        beta = torch.sigmoid(beta) * (2 if allow_neg_eigval else 1)
    q = q * (key_dim**-0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(value_heads // heads, dim=-2) for x in (q, k))
    decay = q.new_ones(batch, seqlen, value_heads) if g is None else log_decays(g, A_log, dt_bias, gate_lower_bound).exp()
    decay = decay[..., None] if decay.dim() == 3 else decay  # of each channel of the key
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    states = q.new_zeros(sequences, value_heads, value_dim, key_dim) if initial_states is None else initial_states
    resets = resets_of(seq_idx, batch, seqlen, q.device)

    def scan(begin: int, end: int, resets: Tensor, state: Tensor) -> tuple[Tensor, list[Tensor]]:
        outputs, states = [], [state]
        for t in range(begin, end):
            if seq_idx is not None:
                state = state.masked_fill(resets[:, t, None, None, None], 0)
            state = state * decay[:, t, :, None, :]
            for update in range(num_householder):
                k_t, v_t, beta_t = (x[:, t, update] for x in (k, v, beta))
                error = v_t - (state * k_t[:, :, None, :]).sum(-1)
                state = state + (beta_t[..., None] * error)[..., None] * k_t[:, :, None, :]
            outputs.append((state * q[:, t, :, None, :]).sum(-1))
            states.append(state)
        empty = v[:, begin:end, 0]
        return torch.stack(outputs, dim=1) if outputs else empty, states

    out, states, of_steps = of_sequences(scan, cu_seqlens, resets, states, time=1)
    if reverse:
        out, states = out.flip(1), states if cu_seqlens is None else states.flip(0)
    results = (out, *((states,) if return_final_states else ()), *at_positions(of_steps, states_at))
    return results if len(results) > 1 else out
