"""The delta rule over a sequence whose spans are on several ranks, as an autograd node.

A step multiplies the state from the right by a matrix and adds another, so that a span maps the state before it to
:math:`S T + B` with T (key_dim, key_dim) and B (value_dim, key_dim) of each head. ``_scans.py`` describes forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dtypes import wide_dtype
from ._carry import Carry, MatrixCarry
from ._collectives import depend_on
from ._group import Group
from ._messages import Call
from ._scans import of_first, results_of, zeros

__all__ = ["DeltaRuleScan"]

_ops = torch.ops.ssm_kernels


def _summary(k: Tensor, v: Tensor, num_householder: int, scan: Any) -> tuple[Tensor, Tensor]:
    """B and T of a span. T has the rows that the scan makes of the rows of an identity, with values of zero.

    Args:
        scan: computes the last states from keys in place of the queries, which states do not depend on, values and initial
            states.
    """
    (batch, _, value_heads, value_dim), key_dim = v.shape, k.shape[3]
    identity = torch.eye(key_dim, dtype=wide_dtype(k.dtype), device=k.device)
    rows = F.pad(identity, (0, 0, value_dim, 0)).expand(batch, value_heads, value_dim + key_dim, key_dim)
    last_states: Tensor = scan(k[:, ::num_householder], F.pad(v, (0, key_dim)), rows)
    last_state, transition = last_states.split([value_dim, key_dim], dim=2)
    return last_state, transition


class DeltaRuleScan(torch.autograd.Function):
    """``out`` and, with ``needs_final``, the states after the last rank's span.

    The first arguments have the order of the gradients of ``_delta_rule_scan_bwd``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor | None,
        initial_states: Tensor | None,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        seq_idx: Tensor | None,
        carry_mask: Tensor | None,
        scale: float | None,
        reverse: bool,
        num_householder: int,
        qk_l2norm: bool,
        gate_lower_bound: float | None,
        beta_sigmoid: bool,
        allow_neg_eigval: bool,
        needs_final: bool,
        chain: Call | None,
        group: Group,
    ) -> Any:
        carry = Carry.of(group, "delta_rule_scan", reverse, chain, MatrixCarry)
        before = (seq_idx, None, (), reverse, num_householder, qk_l2norm)
        after = (gate_lower_bound, beta_sigmoid, allow_neg_eigval)

        def scan(q: Tensor, v: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor]:
            out, last_states, _ = _ops._delta_rule_scan_fwd(q, k, v, beta, g, scale, states, *before, A_log, dt_bias, *after)
            return out, last_states

        def summarize() -> tuple[Tensor, Tensor]:
            return _summary(k, v, num_householder, lambda *arguments: scan(*arguments)[1])

        state = (v.shape[0], *v.shape[2:], q.shape[3]), wide_dtype(q.dtype)
        initial, final, maps, carry_mask = carry.receive_state(state, q, initial_states, carry_mask, summarize, needs_final)
        out, last_states = scan(q, v, initial)
        carry.send_state(last_states)
        ctx.save_for_backward(q, k, v, beta, g, initial, A_log, dt_bias, seq_idx, maps, carry_mask)
        ctx.carry, ctx.scale, ctx.before, ctx.after = carry, scale, before[1:], after
        return (out, final) if needs_final else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor | None = None) -> Any:
        q, k, v, beta, g, initial, A_log, dt_bias, seq_idx, maps, carry_mask = ctx.saved_tensors
        inputs = (q, k, v, beta, g, ctx.scale, initial, seq_idx, *ctx.before, A_log, dt_bias, *ctx.after)
        needs = [*ctx.needs_input_grad[:8]]
        state = (v.shape[0], *v.shape[2:], q.shape[3]), wide_dtype(q.dtype)

        def initial_gradient() -> Tensor:
            if ctx.carry.is_first:
                return depend_on(zeros(state, grad_out), grad_out)
            wanted = [place == 5 for place in range(8)]
            gradient: Tensor = _ops._delta_rule_scan_bwd(grad_out, None, None, *inputs, wanted)[5]
            return gradient

        grad_last_states = None
        passes_gradients = any(needs[1:])
        if passes_gradients:
            grad_last_states = ctx.carry.receive_gradient(state, grad_out, grad_final, maps, carry_mask, initial_gradient)
        wanted = [*needs[:5], passes_gradients and ctx.carry.wants_gradient(needs[5]), *needs[6:]]
        gradients = results_of(_ops._delta_rule_scan_bwd(grad_out, grad_last_states, None, *inputs, wanted), wanted)
        if passes_gradients:
            ctx.carry.send_gradient(gradients[5], carry_mask)
        gradients[5] = of_first(gradients[5], state, q, needs[5], ctx.carry)
        return (*gradients, *(None,) * 12)
