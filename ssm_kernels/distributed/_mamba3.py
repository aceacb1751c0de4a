r"""Mamba-3's scan over a sequence whose spans are on several ranks, as three autograd nodes, one after another.

All ranks compute in the frame of the whole sequence, whose phases count from its first step. In this frame a span multiplies
the state by one number a head, :math:`e^{\sum A_t \mathrm{dt}_t}`, and turns nothing:

1. ``CarriedPhases``: the phases before a span are the sum of the turns of the spans before it. A rank sums those of its span,
   (batch, heads, angles), without any scan.
2. ``CarriedSamples``: the sample before a span, k and x of the last step of the rank before. k of a rank's last step follows
   from ``B`` and the phases.
3. ``Mamba3Scan``: the state S, as ``_scans.py`` describes. The span's scan begins with phases, sample and state.

Backward runs them in the opposite order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._dtypes import wide_dtype
from .._mamba3_state import Mamba3State
from ..ops.norm import rms_norm_gated
from ._carry import Carry, mask_state
from ._collectives import depend_on
from ._group import Group
from ._messages import Call
from ._samples import SampleCarry
from ._scans import of_first, results_of, zeros

__all__ = ["mamba3_over_ranks"]

_ops = torch.ops.ssm_kernels
_NAME = "mamba3_chunk_scan"
# The place of the initial state S among the differentiable arguments of ``_mamba3_chunk_scan``, and those of the arguments on
# which no state depends: C, its bias, D, z, mimo_z, mimo_out and norm_weight.
_SSM, _OF_OUTPUTS = 16, (4, 8, 9, 10, 12, 13, 14)


def _steps_of_last(seq_idx: Tensor) -> Tensor:
    """Whether a step belongs to the last sequence of its row, (batch, seqlen), bool."""
    begins = (seq_idx[:, 1:] != seq_idx[:, :-1]).long()
    later = torch.nn.functional.pad(begins.flip(1).cumsum(1).flip(1), (0, 1))
    return later[:, : seq_idx.shape[1]] == 0


def _turns(angles: Tensor, dt: Tensor, seq_idx: Tensor | None) -> Tensor:
    """By how much a span turns its last sequence, in radians from -pi to pi, (batch, heads, angles), float64."""
    rates, sizes = angles.double().tanh(), dt.double()
    if seq_idx is not None:
        is_last = _steps_of_last(seq_idx)[..., None]
        sizes = torch.where(is_last, sizes, 0)
        rates = torch.where(is_last if rates.dim() == 3 else is_last[..., None], rates, 0)
    if rates.dim() == 3:
        return _reduced(math.pi * torch.einsum("bls,blh->bhs", rates, sizes))
    return _reduced(math.pi * (rates * sizes[..., None]).sum(1))


def _reduced(angle: Tensor) -> Tensor:
    """``angle`` less a number of whole turns, which is a constant for gradients."""
    return angle - 2 * math.pi * (angle.detach() / (2 * math.pi)).round()


def _rotated(rows: Tensor, angle: Tensor, rotate: str) -> Tensor:
    """``rows`` (..., dstate), its pairs of columns turned by ``angle`` (..., angles)."""
    cos, sin = angle.cos().to(rows.dtype), angle.sin().to(rows.dtype)
    count, dstate = angle.shape[-1], rows.shape[-1]
    if rotate == "pairs":
        first, second = rows[..., : 2 * count].unflatten(-1, (count, 2)).unbind(-1)
        turned = torch.stack([cos * first - sin * second, sin * first + cos * second], dim=-1).flatten(-2)
        return torch.cat([turned, rows[..., 2 * count :]], dim=-1)
    low, high = rows.split(dstate // 2, dim=-1)
    first, second = low[..., :count], high[..., :count]
    return torch.cat([cos * first - sin * second, low[..., count:], sin * first + cos * second, high[..., count:]], dim=-1)


class CarriedPhases(torch.autograd.Function):
    """The phases before this rank's span and, with ``needs_final``, those after the last rank's, float64."""

    @staticmethod
    def forward(
        ctx: Any,
        turns: Tensor,
        initial_angle: Tensor | None,
        carry_mask: Tensor | None,
        needs_final: bool,
        chain: Call | None,
        group: Group,
    ) -> Any:
        carry = Carry.of(group, f"{_NAME}: phases", False, chain)
        keep_mask = None if carry_mask is None else carry_mask[1, group.rank]
        state = turns.shape, turns.dtype

        def summarize() -> tuple[Tensor, Tensor]:
            return turns, turns.new_ones(turns.shape[0])

        initial, final, decays, carry_mask = carry.receive_state(
            state, turns, initial_angle, carry_mask, summarize, needs_final
        )
        initial = zeros(state, turns) if initial is None else initial.clone()
        carry.send_state(mask_state(initial, keep_mask) + turns)
        ctx.save_for_backward(keep_mask, decays, carry_mask)
        ctx.carry, ctx.state = carry, state
        return (initial, final) if needs_final else initial

    @staticmethod
    def backward(ctx: Any, grad_initial: Tensor, grad_final: Tensor | None = None) -> Any:
        keep_mask, decays, carry_mask = ctx.saved_tensors
        of_last = ctx.carry.receive_gradient(
            ctx.state, grad_initial, grad_final, decays, carry_mask, lambda: grad_initial.contiguous()
        )
        of_last = zeros(ctx.state, grad_initial) if of_last is None else of_last
        of_initial = grad_initial + mask_state(of_last, keep_mask)
        ctx.carry.send_gradient(of_initial, carry_mask)
        needs = ctx.needs_input_grad
        first = of_first(of_initial, ctx.state, grad_initial, needs[1], ctx.carry)
        return (of_last if needs[0] else None, first, *(None,) * 4)


class CarriedSamples(torch.autograd.Function):
    """The sample before this rank's span, k and x, and with ``needs_final`` that after the last rank's.

    ``last_k`` and ``last_x`` have the last step of this span, (batch, 1, heads, ...), or none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        last_k: Tensor,
        last_x: Tensor,
        initial_k: Tensor | None,
        initial_x: Tensor | None,
        carry_mask: Tensor | None,
        needs_final: bool,
        chain: Call | None,
        group: Group,
    ) -> Any:
        samples = SampleCarry(group, _NAME, False, chain, (1, 1), False)
        given = [] if initial_k is None or initial_x is None else [initial_k, initial_x]
        steps = [last_k, last_x]
        previous, final, from_before, has_steps = samples.receive(steps, given, carry_mask, needs_final)
        ctx.save_for_backward(*steps, from_before, has_steps)
        ctx.samples, ctx.has_previous = samples, len(previous) > 0
        if not ctx.has_previous:
            previous = [each.new_zeros(each.shape[0], *each.shape[2:]) for each in steps]
        return (*previous, *final)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        last_k, last_x, from_before, has_steps = ctx.saved_tensors
        needs = ctx.needs_input_grad
        steps = [last_k, last_x]
        of_previous = [*gradients[:2]] if ctx.has_previous else []
        of_steps = [torch.zeros_like(step) for step in steps]
        of_given = ctx.samples.send_gradients(of_previous, [*of_steps], [*gradients[2:]], from_before, has_steps, steps)
        results = [each if need else None for each, need in zip((*of_steps, *of_given), needs[:4], strict=True)]
        return (*results, *(None,) * 4)


class Mamba3Scan(torch.autograd.Function):
    """``out`` and, with ``needs_final``, the state S after the last rank's span.

    The first arguments have the order of the gradients of ``_mamba3_chunk_scan_bwd``. The initial angle, k and x are those
    before this rank's span, and ``initial_ssm`` is that before the whole sequence.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        trap: Tensor,
        angles: Tensor,
        B_bias: Tensor | None,
        C_bias: Tensor | None,
        D: Tensor | None,
        z: Tensor | None,
        mimo_x: Tensor | None,
        mimo_z: Tensor | None,
        mimo_out: Tensor | None,
        norm_weight: Tensor | None,
        initial_angle: Tensor,
        initial_ssm: Tensor | None,
        initial_k: Tensor,
        initial_x: Tensor,
        seq_idx: Tensor | None,
        carry_mask: Tensor | None,
        norm_eps: float,
        rotate: str,
        chunk_size: int | None,
        wide_out: bool,
        needs_final: bool,
        chain: Call | None,
        group: Group,
    ) -> Any:
        carry = Carry.of(group, _NAME, False, chain)
        dtype = wide_dtype(x.dtype)
        state = (x.shape[0], *x.shape[2:], B.shape[-1]), dtype
        parameters = (B_bias, C_bias, D, z, mimo_x, mimo_z, mimo_out, norm_weight)
        options = (seq_idx, None, norm_eps, rotate, chunk_size, wide_out, False)

        def scan(ssm: Tensor | None) -> tuple[Tensor, Tensor]:
            states = (initial_angle, zeros(state, x) if ssm is None else ssm, initial_k, initial_x)
            arguments = (x, dt, A, B, C, trap, angles, *parameters, *states, *options)
            out, _, last_ssm, _, _ = _ops._mamba3_chunk_scan_fwd(*arguments)
            return out, last_ssm

        def summarize() -> tuple[Tensor, Tensor]:
            return scan(None)[1], (A.to(dtype) * dt.to(dtype)).sum(1).exp()

        initial, final, decays, carry_mask = carry.receive_state(state, x, initial_ssm, carry_mask, summarize, needs_final)
        out, last_ssm = scan(initial)
        carry.send_state(last_ssm)
        tensors = (x, dt, A, B, C, trap, angles, *parameters, initial_angle, initial, initial_k, initial_x)
        ctx.save_for_backward(*tensors, seq_idx, decays, carry_mask)
        ctx.carry, ctx.options, ctx.state = carry, options[1:], state
        return (out, final) if needs_final else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor | None = None) -> Any:
        *tensors, seq_idx, decays, carry_mask = ctx.saved_tensors
        needs = [*ctx.needs_input_grad[: len(tensors)]]
        if tensors[_SSM] is None:
            tensors[_SSM] = zeros(ctx.state, grad_out)

        def adjoint(grad_ssm: Tensor | None, wanted: list[bool]) -> list[Tensor | None]:
            grads = (grad_out, None, grad_ssm, None, None)
            return results_of(_ops._mamba3_chunk_scan_bwd(*grads, *tensors, seq_idx, *ctx.options, wanted), wanted)

        def initial_gradient() -> Tensor:
            if ctx.carry.is_first:
                return depend_on(zeros(ctx.state, grad_out), grad_out)
            gradient = adjoint(None, [place == _SSM for place in range(len(tensors))])[_SSM]
            assert gradient is not None
            return gradient

        grad_ssm = None
        passes_gradients = any(need for place, need in enumerate(needs) if place not in _OF_OUTPUTS)
        if passes_gradients:
            grad_ssm = ctx.carry.receive_gradient(ctx.state, grad_out, grad_final, decays, carry_mask, initial_gradient)
        wanted = [*needs]
        wanted[_SSM] = passes_gradients and ctx.carry.wants_gradient(needs[_SSM])
        gradients = adjoint(grad_ssm, wanted)
        if passes_gradients:
            ctx.carry.send_gradient(gradients[_SSM], carry_mask)
        gradients[_SSM] = of_first(gradients[_SSM], ctx.state, grad_out, needs[_SSM], ctx.carry)
        return (*gradients, *(None,) * 9)


def mamba3_over_ranks(
    tensors: dict[str, Any],
    seq_idx: Tensor | None,
    carry_mask: Tensor | None,
    needs_final: bool,
    chain: Call | None,
    group: Group,
    *,
    norm_eps: float,
    rotate: str,
    chunk_size: int | None,
) -> tuple[Tensor, Mamba3State | None]:
    """``out``, and the states after the whole sequence if they are needed.

    Args:
        tensors: the arguments of ``_mamba3_chunk_scan``, by name and in their order, with the states before the whole sequence.
        carry_mask: as for ``Carry``.
    """
    z, norm_weight = tensors["z"], tensors["norm_weight"]
    # The scan of rank one has no norm.
    norms_here = norm_weight is not None and tensors["B"].dim() == 4
    if norms_here:
        tensors = tensors | {"z": None, "norm_weight": None}
    x, B, bias = tensors["x"], tensors["B"], tensors["B_bias"]
    wide, heads = wide_dtype(x.dtype), x.shape[2]
    exchange = (carry_mask, needs_final, chain, group)
    turns = _turns(tensors["angles"], tensors["dt"], seq_idx)
    given = tensors["initial_angle"]
    phases = CarriedPhases.apply(turns, None if given is None else given.double(), *exchange)
    angle, *final_angle = phases if needs_final else (phases,)
    last_angle = turns + mask_state(angle, None if carry_mask is None else carry_mask[1, group.rank])

    last = slice(max(x.shape[1] - 1, 0), None)
    rows = B[:, last].to(wide).repeat_interleave(heads // B.shape[-2], dim=-2)
    turned = last_angle[:, None]
    if B.dim() == 5:  # (batch, 1, heads, ranks, dstate)
        rows, turned = rows.transpose(2, 3), turned.unsqueeze(-2)
        bias = bias.unsqueeze(-2) if bias is not None and bias.dim() == 2 else bias
    last_k = _rotated(rows if bias is None else rows + bias, turned, rotate)
    samples = (last_k, x[:, last], tensors["initial_k"], tensors["initial_x"])
    k, previous_x, *final_samples = CarriedSamples.apply(*samples, *exchange)

    states = {"initial_angle": _reduced(angle).to(wide), "initial_k": k, "initial_x": previous_x}
    results = Mamba3Scan.apply(
        *(tensors | states).values(), seq_idx, carry_mask, norm_eps, rotate, chunk_size, norms_here, needs_final, chain, group
    )
    out, *final_ssm = results if needs_final else (results,)
    if norms_here:
        gate = None if z is None else z.to(wide).flatten(2)
        options: dict[str, Any] = {"eps": norm_eps, "group_size": norm_weight.shape[1], "norm_before_gate": True}
        out = rms_norm_gated(out.flatten(2), norm_weight.flatten(), gate, **options)
        out = out.unflatten(2, norm_weight.shape).to(x.dtype)
    final = Mamba3State(_reduced(final_angle[0]).to(wide), *final_ssm, *final_samples) if needs_final else None
    return out, final
