"""The scans over a sequence whose spans are on several ranks, as autograd nodes.

Forward scans from the state that the ranks before this one leave, and backward runs the scan's adjoint with the gradient of its
last state that the ranks after this one leave. A chain needs nothing else. With summaries, forward first runs over the span
without outputs, and backward computes the gradient of the initial state from the outputs' gradient alone. See ``_carry.py``.
With ``reverse`` the last rank is the first; the summaries and the initial gradients then read flipped copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dtypes import wide_dtype
from ..choices import DiscretizationName
from ..ops.summaries import (
    _linear_recurrence_initial_gradient,
    _selective_scan_initial_gradient,
    _ssd_chunk_scan_initial_gradient,
    selective_scan_summary,
    ssd_chunk_scan_summary,
)
from ._carry import Carry
from ._collectives import Kind, depend_on
from ._convolution import gate_gradient
from ._group import Group
from ._mamba2_mixer import before_gate
from ._messages import Call

__all__ = [
    "LinearRecurrence",
    "SelectiveScan",
    "SsdChunkScan",
    "in_order",
    "matrix_in_order",
    "of_first",
    "results_of",
    "zeros",
]

_ops = torch.ops.ssm_kernels


def in_order(values: Tensor | None, axis: int, reverse: bool) -> Any:
    """``values`` with the steps of ``axis`` in the order of the scan's time: with ``reverse`` a flipped copy."""
    return values.flip(axis) if reverse and values is not None else values


def matrix_in_order(matrix: Tensor, reverse: bool) -> Tensor:
    """``B`` or ``C`` of ``selective_scan`` in the order of the scan's time; a constant one stays as it is."""
    return matrix if matrix.dim() == 2 else in_order(matrix, -1, reverse)


def results_of(gradients: tuple[Tensor, ...], needed: list[bool]) -> list[Tensor | None]:
    """Gradients that are not needed have no elements: None in their place."""
    return [gradient if need else None for gradient, need in zip(gradients, needed, strict=True)]


def of_first(gradient: Tensor | None, state: Kind, like: Tensor, needs: bool, carry: Carry) -> Tensor | None:
    """The gradient of the state before the whole sequence: the first rank's, and zero on the others."""
    if not needs:
        return None
    return gradient if carry.is_first else zeros(state, like)


def zeros(state: Kind, like: Tensor) -> Tensor:
    """A state of zeros on the device of ``like``."""
    return torch.zeros(state[0], dtype=state[1], device=like.device)


class SelectiveScan(torch.autograd.Function):
    """``out`` and, with ``needs_final``, the state after the last rank's span.

    ``saves``: whether backward may follow. ``z_is_gate``: z is that of a ``MambaConv``, transposed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        delta_bias: Tensor | None,
        initial_state: Tensor | None,
        seq_idx: Tensor | None,
        carry_mask: Tensor | None,
        discretization: DiscretizationName,
        delta_softplus: bool,
        reverse: bool,
        needs_final: bool,
        saves: bool,
        z_is_gate: bool,
        chain: Call | None,
        group: Group,
    ) -> Any:
        carry = Carry.of(group, "selective_scan", reverse, chain)
        options = (discretization, delta_softplus)

        def summarize() -> tuple[Tensor, Tensor]:
            return selective_scan_summary(
                in_order(u, 2, reverse),
                in_order(delta, 2, reverse),
                A,
                matrix_in_order(B, reverse),
                delta_bias=delta_bias,
                discretization=discretization,
                delta_softplus=delta_softplus,
                seq_idx=in_order(seq_idx, 1, reverse),
            )

        state = (u.shape[0], *A.shape), A.dtype
        initial, final, decays, carry_mask = carry.receive_state(state, u, initial_state, carry_mask, summarize, needs_final)
        needs_grad = saves and any(ctx.needs_input_grad)
        out, last_state, chunk_states = _ops._selective_scan_fwd(
            u, delta, A, B, C, D, z, delta_bias, initial, *options, needs_grad, seq_idx, None, reverse
        )
        carry.send_state(last_state)
        # Backward finds the initial state of a call without packed sequences among the states of chunks.
        packed_initial = None if seq_idx is None else initial
        ctx.save_for_backward(u, delta, A, B, C, D, z, delta_bias, chunk_states, packed_initial, seq_idx, decays, carry_mask)
        ctx.carry, ctx.options, ctx.reverse, ctx.z_is_gate = carry, options, reverse, z_is_gate
        return (out, final) if needs_final else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor | None = None) -> Any:
        u, delta, A, B, C, D, z, delta_bias, chunk_states, packed_initial, seq_idx, decays, carry_mask = ctx.saved_tensors
        (discretization, delta_softplus), reverse = ctx.options, ctx.reverse
        needs = [*ctx.needs_input_grad[:9]]
        state = (u.shape[0], *A.shape), A.dtype

        def initial_gradient() -> Tensor:
            if ctx.carry.is_first:
                return depend_on(zeros(state, grad_out), grad_out)
            return _selective_scan_initial_gradient(
                in_order(grad_out, 2, reverse),
                in_order(delta, 2, reverse),
                A,
                matrix_in_order(C, reverse),
                z=in_order(z, 2, reverse),
                delta_bias=delta_bias,
                discretization=discretization,
                delta_softplus=delta_softplus,
                seq_idx=in_order(seq_idx, 1, reverse),
            )

        grad_last_state = None
        passes_gradients = any(needs[i] for i in (0, 1, 2, 3, 7, 8))
        if passes_gradients:
            grad_last_state = ctx.carry.receive_gradient(state, grad_out, grad_final, decays, carry_mask, initial_gradient)
        wanted = [*needs[:8], passes_gradients and ctx.carry.wants_gradient(needs[8])]
        inputs = (u, delta, A, B, C, D, z, delta_bias, chunk_states, *ctx.options, packed_initial, seq_idx, None, reverse)
        if ctx.z_is_gate and wanted[6]:
            grad_z = gate_gradient(z.transpose(1, 2)).transpose(1, 2)
            others = _ops._selective_scan_bwd_out(grad_out, grad_last_state, *inputs, wanted, grad_z)
            results = (*others[:6], grad_z, *others[6:])
        else:
            results = _ops._selective_scan_bwd(grad_out, grad_last_state, *inputs, wanted)
        gradients = results_of(results, wanted)
        if passes_gradients:
            ctx.carry.send_gradient(gradients[8], carry_mask)
        gradients[8] = of_first(gradients[8], state, u, needs[8], ctx.carry)
        return (*gradients, *(None,) * 10)


class SsdChunkScan(torch.autograd.Function):
    """``out`` and, with ``needs_final``, the states after the last rank's span."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor | None,
        A: Tensor | None,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
        initial_states: Tensor | None,
        log_decay: Tensor | None,
        gain: Tensor | None,
        seq_idx: Tensor | None,
        carry_mask: Tensor | None,
        chunk_size: int | None,
        dt_softplus: bool,
        dt_min: float,
        dt_max: float,
        discretization: DiscretizationName,
        reverse: bool,
        needs_final: bool,
        chain: Call | None,
        group: Group,
    ) -> Any:
        carry = Carry.of(group, "ssd_chunk_scan", reverse, chain)

        def summarize() -> tuple[Tensor, Tensor]:
            return ssd_chunk_scan_summary(
                in_order(x, 1, reverse),
                in_order(dt, 1, reverse),
                A,
                in_order(B, 1, reverse),
                dt_bias=dt_bias,
                dt_softplus=dt_softplus,
                dt_limit=(dt_min, dt_max),
                discretization=discretization,
                seq_idx=in_order(seq_idx, 1, reverse),
                log_decay=in_order(log_decay, 1, reverse),
                gain=in_order(gain, 1, reverse),
            )

        state = (x.shape[0], *x.shape[2:], B.shape[3]), wide_dtype(x.dtype)
        initial, final, decays, carry_mask = carry.receive_state(state, x, initial_states, carry_mask, summarize, needs_final)
        scalars = (dt_softplus, dt_min, dt_max)
        options = (discretization, reverse, log_decay, gain)
        out, last_states = _ops._ssd_chunk_scan_fwd(
            x, dt, A, B, C, chunk_size, D, z, dt_bias, *scalars, initial, seq_idx, None, *options
        )
        carry.send_state(last_states)
        ctx.save_for_backward(x, dt, A, B, C, D, z, dt_bias, initial, log_decay, gain, seq_idx, decays, carry_mask)
        ctx.carry, ctx.chunk_size = carry, chunk_size
        ctx.scalars, ctx.discretization, ctx.reverse = scalars, discretization, reverse
        return (out, final) if needs_final else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor | None = None) -> Any:
        x, dt, A, B, C, D, z, dt_bias, initial, log_decay, gain, seq_idx, decays, carry_mask = ctx.saved_tensors
        reverse = ctx.reverse
        options = (ctx.discretization, reverse, log_decay, gain)
        arguments = (x, dt, A, B, C, ctx.chunk_size, D, z, dt_bias, *ctx.scalars, initial, seq_idx, None, *options)
        needs = [*ctx.needs_input_grad[:11]]
        state = (x.shape[0], *x.shape[2:], B.shape[3]), wide_dtype(x.dtype)

        def initial_gradient() -> Tensor:
            if ctx.carry.is_first:
                return depend_on(zeros(state, grad_out), grad_out)
            return _ssd_chunk_scan_initial_gradient(
                in_order(before_gate(grad_out, z), 1, reverse),
                in_order(dt, 1, reverse),
                A,
                in_order(C, 1, reverse),
                dt_bias=dt_bias,
                dt_softplus=ctx.scalars[0],
                dt_limit=ctx.scalars[1:],
                discretization=ctx.discretization,
                seq_idx=in_order(seq_idx, 1, reverse),
                log_decay=in_order(log_decay, 1, reverse),
            )

        grad_final_states = None
        passes_gradients = any(needs[i] for i in (0, 1, 2, 3, 7, 8, 9, 10))
        if passes_gradients:
            grad_final_states = ctx.carry.receive_gradient(state, grad_out, grad_final, decays, carry_mask, initial_gradient)
        wanted = [*needs[:8], passes_gradients and ctx.carry.wants_gradient(needs[8]), *needs[9:]]
        gradients = results_of(_ops._ssd_chunk_scan_bwd(grad_out, grad_final_states, *arguments, wanted), wanted)
        if passes_gradients:
            ctx.carry.send_gradient(gradients[8], carry_mask)
        gradients[8] = of_first(gradients[8], state, x, needs[8], ctx.carry)
        return (*gradients, *(None,) * 11)


def _recurrence_state(values: Tensor, cu_seqlens: Tensor | None) -> Kind:
    """Shape and dtype of a state of a recurrence over ``values`` and, with ``cu_seqlens``, its packed sequences."""
    rows = values.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = wide_dtype(values.dtype)
    return (rows, values.shape[2]), dtype


class LinearRecurrence(torch.autograd.Function):
    """``h`` and, with ``needs_final``, the state after the last span in the direction of time.

    With ``reset``, ``h0`` is the state before the whole sequence and after every reset, so that two scans are needed: of the
    steps before the first reset of a row, from the state of the ranks before, and of the others. Each step takes its values and
    gradients from one of them: what the other makes of Inf and NaN counts for nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        recurrence: str,
        candidate_activation: str,
        gate_is_logit: bool,
        reverse: bool,
        needs_final: bool,
        chain: Call | None,
        group: Group,
        cu_seqlens: Tensor | None,
        reset: Tensor | None,
        h0: Tensor | None,
        *inputs: Tensor,
    ) -> Any:
        options = (recurrence, candidate_activation, gate_is_logit, reverse)
        carry = Carry.of(group, recurrence, reverse, chain)
        is_reset = after_reset = keep_mask = None
        if reset is not None:
            h_after, last_after = _ops._linear_recurrence_fwd(inputs, h0, None, reset, *options)
            count = reset.flip(1).cumsum(1).flip(1) if reverse else reset.cumsum(1)
            after_reset = (count > 0)[..., None]
            is_reset = reset.any(1)[:, None]
            keep_mask = ~is_reset[:, 0]

        def summarize() -> tuple[Tensor, Tensor]:
            last_state, decay = _ops._linear_recurrence_summary_fwd(inputs, cu_seqlens, None, *options)
            if is_reset is not None:
                last_state, decay = torch.where(is_reset, last_after, last_state), decay.masked_fill(is_reset, 0)
            return last_state, decay

        state = _recurrence_state(inputs[0], cu_seqlens)
        initial, final, decays, carry_mask = carry.receive_state(state, inputs[0], h0, None, summarize, needs_final, keep_mask)
        h, last_state = _ops._linear_recurrence_fwd(inputs, initial, cu_seqlens, None, *options)
        carry.send_state(last_state)
        if after_reset is not None:
            h = torch.where(after_reset, h_after, h)
        ctx.save_for_backward(h, initial, h0, cu_seqlens, reset, after_reset, is_reset, decays, carry_mask, *inputs)
        ctx.carry, ctx.options = carry, options
        return (h, final) if needs_final else h

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor, grad_final: Tensor | None = None) -> Any:
        h, initial, h0, cu_seqlens, reset, after_reset, is_reset, decays, carry_mask, *inputs = ctx.saved_tensors
        needs_h0, needs = ctx.needs_input_grad[9], [*ctx.needs_input_grad[10:]]
        wanted = [*needs, *[False] * (4 - len(needs))]
        state = _recurrence_state(inputs[0], cu_seqlens)

        def initial_gradient() -> Tensor:
            if ctx.carry.is_first:
                return depend_on(zeros(state, grad_h), grad_h)
            recurrence, candidate_activation, gate_is_logit, reverse = ctx.options
            return _linear_recurrence_initial_gradient(
                grad_h,
                recurrence,
                inputs,
                candidate_activation=candidate_activation,
                gate_is_logit=gate_is_logit,
                reverse=reverse,
                cu_seqlens=cu_seqlens,
                reset=reset,
            )

        grad_last_state = ctx.carry.receive_gradient(state, grad_h, grad_final, decays, carry_mask, initial_gradient)
        flags = [*wanted, ctx.carry.wants_gradient(needs_h0)]
        if after_reset is None:
            arguments = (inputs, h, initial, cu_seqlens, None, *ctx.options)
            gradients = results_of(_ops._linear_recurrence_bwd(grad_h, grad_last_state, *arguments, flags), flags)
        else:
            grad_last_before = grad_last_after = None
            if grad_last_state is not None:
                grad_last_before = grad_last_state.masked_fill(is_reset, 0)
                grad_last_after = grad_last_state.masked_fill(~is_reset, 0)
            before = [value.masked_fill(after_reset, 1) for value in inputs]
            arguments = (before, h, initial, None, None, *ctx.options)
            grad_before = grad_h.masked_fill(after_reset, 0)
            gradients = results_of(_ops._linear_recurrence_bwd(grad_before, grad_last_before, *arguments, flags), flags)
            arguments = (inputs, h, h0, None, reset, *ctx.options)
            grad_after = grad_h.masked_fill(~after_reset, 0)
            flags = [*wanted, needs_h0]
            others = results_of(_ops._linear_recurrence_bwd(grad_after, grad_last_after, *arguments, flags), flags)
            for place, (own, other) in enumerate(zip(gradients[:4], others[:4], strict=True)):
                gradients[place] = None if own is None or other is None else torch.where(after_reset, other, own)
            own, other = gradients[4], others[4]
            gradients[4] = other if own is None or other is None else own + other
        ctx.carry.send_gradient(gradients[4], carry_mask)
        if reset is None:
            gradients[4] = of_first(gradients[4], state, h, needs_h0, ctx.carry)
        return (*(None,) * 9, gradients[4], *gradients[: len(inputs)])
