"""The scans of rules that read two input samples a step, with a step of its own for A or with complex states, over a sequence
whose spans are on several ranks, as autograd nodes.

Each node first receives the sample before its span (``_samples.py``). The state then passes as in ``_scans.py``: the sample is
an input of the span's scan, and of its summary, whose decay is that of the rule with one sample. Along a chain the last samples
are sent before the scan begins. Complex states are pairs of real numbers, as the operators have them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._discretizations import is_two_sample, rule_of_decay
from .._dtypes import wide_dtype
from ..choices import DiscretizationName, TwoSampleDiscretizationName
from ..ops._complex import columns, complex_decay, numbers
from ..ops.summaries import (
    _selective_scan_initial_gradient,
    _ssd_chunk_scan_initial_gradient,
    selective_scan_summary,
    ssd_chunk_scan_summary,
)
from ._carry import Carry, ComplexCarry
from ._collectives import depend_on
from ._group import Group
from ._mamba2_mixer import before_gate
from ._messages import Call
from ._samples import SampleCarry
from ._scans import in_order, matrix_in_order, of_first, results_of, zeros

__all__ = ["TwoSampleChunkScan", "TwoSampleScan"]

_ops = torch.ops.ssm_kernels


def _given(*samples: Tensor | None) -> list[Tensor]:
    return [sample for sample in samples if sample is not None]


class TwoSampleScan(torch.autograd.Function):
    """``out`` and, with ``needs_final``, the state and the samples after the last rank's span.

    ``saves``: whether backward may follow.
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
        lam: Tensor | None,
        previous_u: Tensor | None,
        previous_B: Tensor | None,
        delta_A: Tensor | None,
        seq_idx: Tensor | None,
        carry_mask: Tensor | None,
        discretization: DiscretizationName | TwoSampleDiscretizationName,
        lam_sigmoid: bool,
        repeats: bool,
        delta_softplus: bool,
        reverse: bool,
        is_complex: bool,
        conjugate_pairs: bool,
        needs_final: bool,
        saves: bool,
        chain: Call | None,
        group: Group,
    ) -> Any:
        steps = [u] if B.dim() == 2 else [u, B]
        samples = None
        previous: list[Tensor] = []
        final_samples: list[Tensor] = []
        from_before = has_steps = None
        if is_two_sample(discretization):
            axes = tuple(each.dim() - 1 for each in steps)
            samples = SampleCarry(group, "selective_scan", reverse, chain, axes, repeats)
            given = _given(previous_u, previous_B)
            previous, final_samples, from_before, has_steps = samples.receive(steps, given, carry_mask, needs_final)
        before_u, before_B = [*previous, None, None][:2]
        carry = Carry.of(group, "selective_scan", reverse, chain, ComplexCarry if is_complex else None)
        options = (discretization, lam_sigmoid, repeats, delta_softplus, reverse, is_complex, conjugate_pairs)
        more = (lam, before_u, before_B, delta_A, seq_idx)

        def decay_of_span() -> Tensor:
            if is_complex:
                of_steps: Any = {"delta_bias": delta_bias, "discretization": discretization, "delta_softplus": delta_softplus}
                return columns(complex_decay(u, delta, numbers(A), seq_idx=seq_idx, **of_steps))
            is_separate = delta_A is not None
            _, decay = selective_scan_summary(
                in_order(u, 2, reverse),
                in_order(delta_A if is_separate else delta, 2, reverse),
                A,
                matrix_in_order(B, reverse),
                delta_bias=None if is_separate else delta_bias,
                discretization="zoh" if is_separate else rule_of_decay(discretization),
                delta_softplus=delta_softplus and not is_separate,
                seq_idx=in_order(seq_idx, 1, reverse),
            )
            return decay

        def summarize() -> tuple[Tensor, Tensor]:
            decay = decay_of_span()
            _, last_state, _ = _ops._selective_scan_two_sample_fwd(
                u, delta, A, B, B, None, None, delta_bias, None, *more, None, *options, False
            )
            return last_state, decay

        state = (u.shape[0], *A.shape), A.dtype
        initial, final, decays, carry_mask = carry.receive_state(state, u, initial_state, carry_mask, summarize, needs_final)
        tensors = (u, delta, A, B, C, D, z, delta_bias)
        needs_grad = saves and any(ctx.needs_input_grad)
        out, last_state, chunk_states = _ops._selective_scan_two_sample_fwd(
            *tensors, initial, *more, None, *options, needs_grad
        )
        carry.send_state(last_state)
        packed_initial = None if seq_idx is None else initial
        ctx.save_for_backward(*tensors, packed_initial, *more, chunk_states, decays, carry_mask, from_before, has_steps)
        ctx.carry, ctx.samples, ctx.steps, ctx.options = carry, samples, len(steps), options
        return (out, final, *final_samples) if needs_final else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor | None = None, *grad_samples: Tensor) -> Any:
        *tensors, chunk_states, decays, carry_mask, from_before, has_steps = ctx.saved_tensors
        u, delta, A, B, C, _, z, delta_bias, _, _, before_u, _, delta_A, seq_idx = tensors
        discretization, _, _, delta_softplus, reverse, is_complex, _ = ctx.options
        needs = [*ctx.needs_input_grad[:13]]
        state = (u.shape[0], *A.shape), A.dtype

        def adjoint(grad_last_state: Tensor | None, wanted: list[bool]) -> list[Tensor | None]:
            results = _ops._selective_scan_two_sample_bwd(
                grad_out, grad_last_state, *tensors, None, chunk_states, *ctx.options, wanted
            )
            return results_of(results, wanted)

        def initial_gradient() -> Tensor:
            if ctx.carry.is_first:
                return depend_on(zeros(state, grad_out), grad_out)
            if is_complex:
                gradient = adjoint(None, [place == 8 for place in range(13)])[8]
                assert gradient is not None
                return gradient
            is_separate = delta_A is not None
            return _selective_scan_initial_gradient(
                in_order(grad_out, 2, reverse),
                in_order(delta_A if is_separate else delta, 2, reverse),
                A,
                matrix_in_order(C, reverse),
                z=in_order(z, 2, reverse),
                delta_bias=None if is_separate else delta_bias,
                discretization="zoh" if is_separate else rule_of_decay(discretization),
                delta_softplus=delta_softplus and not is_separate,
                seq_idx=in_order(seq_idx, 1, reverse),
            )

        grad_last_state = None
        passes_gradients = any(needs[i] for i in (0, 1, 2, 3, 7, 8, 9, 10, 11, 12))
        if passes_gradients:
            grad_last_state = ctx.carry.receive_gradient(state, grad_out, grad_final, decays, carry_mask, initial_gradient)
        needs_samples = ctx.samples is not None and any(needs[i] for i in (0, 3, 10, 11))
        wanted = [*needs]
        wanted[8] = passes_gradients and ctx.carry.wants_gradient(needs[8])
        wanted[10] = needs_samples and before_u is not None
        wanted[11] = wanted[10] and ctx.steps == 2
        gradients = adjoint(grad_last_state, wanted)
        if passes_gradients:
            ctx.carry.send_gradient(gradients[8], carry_mask)
        gradients[8] = of_first(gradients[8], state, u, needs[8], ctx.carry)
        of_previous = gradients[10 : 10 + ctx.steps] if wanted[10] else []
        gradients[10:12] = [None, None]
        if needs_samples:
            of_steps = [gradients[place] for place in (0, 3)[: ctx.steps]]
            steps = [u, B][: ctx.steps]
            of_given = ctx.samples.send_gradients(of_previous, of_steps, [*grad_samples], from_before, has_steps, steps)
            for place, gradient in enumerate(of_given, 10):
                gradients[place] = gradient if needs[place] else None
        return (*gradients, *(None,) * 13)


class TwoSampleChunkScan(torch.autograd.Function):
    """``out`` and, with ``needs_final``, the states and the samples after the last rank's span."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
        initial_states: Tensor | None,
        lam: Tensor | None,
        previous_x: Tensor | None,
        previous_B: Tensor | None,
        seq_idx: Tensor | None,
        carry_mask: Tensor | None,
        discretization: str,
        lam_sigmoid: bool,
        repeats: bool,
        chunk_size: int | None,
        dt_softplus: bool,
        dt_min: float,
        dt_max: float,
        reverse: bool,
        needs_final: bool,
        chain: Call | None,
        group: Group,
    ) -> Any:
        samples = SampleCarry(group, "ssd_chunk_scan", reverse, chain, (1, 1), repeats)
        given = _given(previous_x, previous_B)
        previous, final_samples, from_before, has_steps = samples.receive([x, B], given, carry_mask, needs_final)
        before_x, before_B = previous or (None, None)
        carry = Carry.of(group, "ssd_chunk_scan", reverse, chain)
        options = (discretization, lam_sigmoid, repeats, chunk_size, dt_softplus, dt_min, dt_max, reverse)
        more = (lam, before_x, before_B, seq_idx)

        def summarize() -> tuple[Tensor, Tensor]:
            # The decay is that of "zoh".
            _, decay = ssd_chunk_scan_summary(
                in_order(x, 1, reverse),
                in_order(dt, 1, reverse),
                A,
                in_order(B, 1, reverse),
                dt_bias=dt_bias,
                dt_softplus=dt_softplus,
                dt_limit=(dt_min, dt_max),
                seq_idx=in_order(seq_idx, 1, reverse),
            )
            _, last_states = _ops._ssd_chunk_scan_two_sample_fwd(
                x, dt, A, B, C, None, None, dt_bias, None, *more, None, *options
            )
            return last_states, decay

        state = (x.shape[0], *x.shape[2:], B.shape[3]), wide_dtype(x.dtype)
        initial, final, decays, carry_mask = carry.receive_state(state, x, initial_states, carry_mask, summarize, needs_final)
        tensors = (x, dt, A, B, C, D, z, dt_bias, initial, *more)
        out, last_states = _ops._ssd_chunk_scan_two_sample_fwd(*tensors, None, *options)
        carry.send_state(last_states)
        ctx.save_for_backward(*tensors, decays, carry_mask, from_before, has_steps)
        ctx.carry, ctx.samples, ctx.options = carry, samples, options
        return (out, final, *final_samples) if needs_final else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor | None = None, *grad_samples: Tensor) -> Any:
        *tensors, decays, carry_mask, from_before, has_steps = ctx.saved_tensors
        x, dt, A, B, C, _, z, dt_bias, _, _, before_x, _, seq_idx = tensors
        dt_softplus, dt_min, dt_max, reverse = ctx.options[4:]
        needs = [*ctx.needs_input_grad[:12]]
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
                dt_softplus=dt_softplus,
                dt_limit=(dt_min, dt_max),
                seq_idx=in_order(seq_idx, 1, reverse),
            )

        grad_final_states = None
        passes_gradients = any(needs[i] for i in (0, 1, 2, 3, 7, 8, 9, 10, 11))
        if passes_gradients:
            grad_final_states = ctx.carry.receive_gradient(state, grad_out, grad_final, decays, carry_mask, initial_gradient)
        needs_samples = any(needs[i] for i in (0, 3, 10, 11))
        wanted = [*needs]
        wanted[8] = passes_gradients and ctx.carry.wants_gradient(needs[8])
        wanted[10] = wanted[11] = needs_samples and before_x is not None
        results = _ops._ssd_chunk_scan_two_sample_bwd(grad_out, grad_final_states, *tensors, None, *ctx.options, wanted)
        gradients = results_of(results, wanted)
        if passes_gradients:
            ctx.carry.send_gradient(gradients[8], carry_mask)
        gradients[8] = of_first(gradients[8], state, x, needs[8], ctx.carry)
        of_previous = gradients[10:] if wanted[10] else []
        gradients[10:] = [None, None]
        if needs_samples:
            of_steps = [gradients[0], gradients[3]]
            of_given = ctx.samples.send_gradients(of_previous, of_steps, [*grad_samples], from_before, has_steps, [x, B])
            gradients[10:] = [each if needs[place] else None for place, each in enumerate(of_given, 10)]
        return (*gradients, *(None,) * 13)
