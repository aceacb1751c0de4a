"""The Mamba-2 mixer between its projections, over a sequence whose spans are on several ranks.

The local operator ``_mamba2_mixer`` computes convolution, scan and norm from the states before the span, and saves as little as
on one rank. Before it, forward convolves x and B once more for the span's summary; backward takes the norm's adjoint and the
convolution of C once more for the gradient of the span's initial state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dtypes import wide_dtype
from .._mixers import Mamba2Options
from ..ops.summaries import _ssd_chunk_scan_initial_gradient, ssd_chunk_scan_summary
from ._carry import SummaryCarry, mask_state
from ._collectives import Kind, depend_on
from ._convolution import Halo, add_to_last_steps, halo_mask, last_steps
from ._group import Group
from ._messages import Call, Chain
from ._split_norm import SplitNorm

__all__ = ["ChainedMamba2Mixer", "Mamba2Mixer", "before_gate"]

_ops = torch.ops.ssm_kernels


def before_gate(grad_out: Tensor, z: Tensor | None) -> Tensor:
    """The gradient of a scan's outputs before the gate, in the dtype of ``grad_out``."""
    if z is None:
        return grad_out
    wide = wide_dtype(z.dtype)
    return (grad_out.to(wide) * F.silu(z.to(wide))).to(grad_out.dtype)


class Mamba2Mixer(torch.autograd.Function):
    """The first result of ``torch.ops.ssm_kernels._mamba2_mixer``. ``Packing`` has ``steps_before`` and ``carry_mask``."""

    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        A_log: Tensor,
        D: Tensor,
        dt_bias: Tensor,
        norm_weight: Tensor | None,
        seq_idx: Tensor | None,
        steps_before: Tensor | None,
        carry_mask: Tensor | None,
        options: Mamba2Options,
        group: Group,
        norm: SplitNorm | None,
    ) -> Tensor:
        heads, taps = A_log.shape[0], conv_weight.shape[-1] - 1
        z, xBC, dt = options.split(projected, heads)
        d_ssm = z.shape[-1]
        halo, steps, sources, own = Halo(group, taps), None, None, None
        if taps > 0:
            steps, _, sources, own = halo.end(halo.begin(xBC), None, steps_before)
        wide = wide_dtype(projected.dtype)

        def summarize() -> tuple[Tensor, Tensor]:
            xB = _convolved(slice(0, d_ssm + options.of_groups), xBC, conv_weight, conv_bias, steps, seq_idx)
            x, B = xB.split_with_sizes([d_ssm, options.of_groups], dim=-1)
            return ssd_chunk_scan_summary(
                options.heads(x),
                dt,
                -torch.exp(A_log.to(wide)),
                options.groups(B),
                dt_bias=dt_bias.to(wide),
                seq_idx=seq_idx,
                **options.of_scan,
            )

        carry = SummaryCarry(group, "Mamba2", reverse=False)
        states, _ = _kinds(projected, xBC, A_log, options, taps)
        initial, _, decays, later = carry.receive_state(states, projected, None, carry_mask, summarize)
        arguments = (conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, steps, initial, seq_idx, None, *options)
        mixer = _ops._mamba2_mixer_fwd if norm is None else norm.mixer_forward
        out, _, _, y, rstd, parameters = mixer(projected, *arguments)
        tensors = (projected, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, steps, initial, seq_idx)
        ctx.save_for_backward(*tensors, y, rstd, parameters, sources, own, decays, later)
        ctx.carry, ctx.halo, ctx.options, ctx.norm = carry, halo, options, norm
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        *tensors, y, rstd, parameters, sources, own, decays, later = ctx.saved_tensors
        projected, conv_weight, conv_bias, A_log, _, dt_bias, norm_weight, steps, _, seq_idx = tensors
        heads, options = A_log.shape[0], ctx.options
        z, xBC, dt = options.split(projected, heads)
        d_ssm = z.shape[-1]
        needs = [*ctx.needs_input_grad[:7]]
        grad_states = mean_product = None
        if ctx.norm is not None:
            mean_product = ctx.norm.mean_product(grad_out, y, z, norm_weight, rstd)
        if any(needs[i] for i in (0, 1, 2, 3, 5)):
            wide = wide_dtype(projected.dtype)
            states, _ = _kinds(projected, xBC, A_log, options, conv_weight.shape[-1] - 1)

            def initial_gradient() -> Tensor:
                if ctx.carry.is_first:
                    return depend_on(torch.zeros(states[0], dtype=states[1], device=grad_out.device), grad_out)
                if norm_weight is None:
                    grad_y = before_gate(grad_out, z)
                else:
                    norm = (rstd.new_empty(0), rstd, d_ssm // options.ngroups, options.norm_before_gate, "silu", False)
                    needs_y = [True, False, False, False]
                    grad_y = _ops._norm_gated_bwd(grad_out, y, norm_weight, z, None, *norm, needs_y, mean_product)[0]
                columns = slice(d_ssm + options.of_groups, d_ssm + 2 * options.of_groups)
                C = _convolved(columns, xBC, conv_weight, conv_bias, steps, seq_idx)
                return _ssd_chunk_scan_initial_gradient(
                    options.heads(grad_y),
                    dt,
                    -torch.exp(A_log.to(wide)),
                    options.groups(C),
                    dt_bias=dt_bias.to(wide),
                    seq_idx=seq_idx,
                    **options.of_scan,
                )

            grad_states = ctx.carry.receive_gradient(states, grad_out, None, decays, later, initial_gradient)
        wanted = [*needs, needs[0] and steps is not None, False]
        arguments = (*tensors, None, *ctx.options)
        results = _ops._mamba2_mixer_bwd(grad_out, None, grad_states, y, rstd, parameters, wanted, *arguments, mean_product)
        grads: list[Tensor | None] = [grad if need else None for grad, need in zip(results, wanted, strict=True)]
        if wanted[7]:
            grad_xBC = results[0][..., d_ssm:-heads]
            seqlen = projected.shape[1]
            ctx.halo.gradient(ctx.halo.send_gradient(results[7], None, own, seqlen), sources, grad_xBC, False, seqlen)
        return (*grads[:7], *(None,) * 6)


class ChainedMamba2Mixer(torch.autograd.Function):
    """As :class:`Mamba2Mixer`, with the halo and the states of the rank before, which come in one message.

    Backward gets one from the next rank: the gradients of the steps and states that forward has sent.
    """

    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        A_log: Tensor,
        D: Tensor,
        dt_bias: Tensor,
        norm_weight: Tensor | None,
        seq_idx: Tensor | None,
        steps_before: Tensor | None,
        carry_mask: Tensor | None,
        options: Mamba2Options,
        group: Group,
        norm: SplitNorm | None,
        call: Call,
    ) -> Tensor:
        ctx.chain, taps = Chain(group, "Mamba2: states and halo", call), conv_weight.shape[-1] - 1
        _, xBC, _ = options.split(projected, A_log.shape[0])
        ctx.kinds = _kinds(projected, xBC, A_log, options, taps)
        initial = steps = own = border_mask = None
        if ctx.chain.is_first:
            halo = projected.new_zeros(ctx.kinds[1][0])
        else:
            initial, halo = ctx.chain.receive(ctx.kinds, projected)
            own = halo_mask(steps_before, group.rank, taps)
            border_mask = None if carry_mask is None else carry_mask[0, group.rank]
            initial = mask_state(initial, border_mask)
            if taps > 0:
                steps = halo if own is None else torch.where(own, halo, 0)
        arguments = (conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, steps, initial, seq_idx, None, *options)
        mixer = _ops._mamba2_mixer_fwd if norm is None else norm.mixer_forward
        out, _, last_states, y, rstd, parameters = mixer(projected, *arguments)
        ctx.chain.send([last_states, last_steps(halo, xBC, taps)])
        tensors = (projected, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, steps, initial, seq_idx)
        ctx.save_for_backward(*tensors, y, rstd, parameters, own, border_mask)
        ctx.options, ctx.norm = options, norm
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        *tensors, y, rstd, parameters, own, border_mask = ctx.saved_tensors
        projected, steps, norm_weight = tensors[0], tensors[7], tensors[6]
        needs = [*ctx.needs_input_grad[:7]]
        heads = tensors[3].shape[0]
        d_ssm, seqlen = heads * ctx.options.headdim, projected.shape[1]
        grad_states = grad_tail = mean_product = None
        if ctx.norm is not None:
            mean_product = ctx.norm.mean_product(grad_out, y, projected[..., :d_ssm], norm_weight, rstd)
        passes_gradients = any(needs[i] for i in (0, 1, 2, 3, 5))
        if passes_gradients and not ctx.chain.is_last:
            grad_states, grad_tail = ctx.chain.receive_gradients(ctx.kinds, grad_out)
        is_later = passes_gradients and not ctx.chain.is_first
        wanted = [*needs, is_later and steps is not None, is_later]
        arguments = (*tensors, None, *ctx.options)
        results = _ops._mamba2_mixer_bwd(grad_out, None, grad_states, y, rstd, parameters, wanted, *arguments, mean_product)
        grads: list[Tensor | None] = [grad if need else None for grad, need in zip(results, wanted, strict=True)]
        grad_halo = grads[7]
        if grad_halo is None:
            grad_halo = projected.new_zeros(ctx.kinds[1][0])
        elif own is not None:
            grad_halo = torch.where(own, grad_halo, 0)
        if grad_tail is not None:
            grad_xBC = results[0][..., d_ssm:-heads] if needs[0] else None
            grad_halo = add_to_last_steps(grad_halo, grad_xBC, grad_tail, seqlen)
        if is_later:
            ctx.chain.send_gradients([mask_state(results[8], border_mask), grad_halo])
        return (*grads[:7], *(None,) * 7)


def _kinds(projected: Tensor, xBC: Tensor, A_log: Tensor, options: Mamba2Options, taps: int) -> list[Kind]:
    """Shapes and dtypes of a state and of a halo."""
    batch, wide = projected.shape[0], wide_dtype(projected.dtype)
    states = batch, A_log.shape[0], options.headdim, options.dstate
    return [(states, wide), ((batch, xBC.shape[2], taps), projected.dtype)]


def _convolved(
    columns: slice, xBC: Tensor, weight: Tensor, bias: Tensor | None, steps: Tensor | None, seq_idx: Tensor | None
) -> Tensor:
    """The convolution of some channels, from the halo ``steps``."""
    bias = None if bias is None else bias[columns]
    steps = None if steps is None else steps[:, columns]
    out: Tensor = _ops._causal_conv1d_fwd(xBC[..., columns], weight.squeeze(1)[columns], bias, seq_idx, None, steps, "silu")[0]
    return out
