"""The causal convolution over a sequence whose spans are on several ranks, as an autograd node.

A rank needs the ``width - 1`` steps before its span: its halo. Every rank sends its last steps to all. A span may have fewer
steps than the halo, so that a halo takes steps of several ranks: each rank also says which of the ``width - 1`` places that it
sends are steps. While they travel, the rank convolves its span from zero; it then computes the first steps again from the halo.
Backward is the mirror: each rank sends the gradient of its halo, and adds those of its own steps that the later ranks have
read.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._collectives import Gathering, Group, tie

__all__ = ["CausalConv1d"]

_ops = torch.ops.ssm_kernels


class CausalConv1d(torch.autograd.Function):
    """``out`` and, with ``needs_final``, the state after the last rank's span.

    ``past`` is that of :class:`._packing.Packing`, or None for sequences that are not packed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        initial_state: Tensor | None,
        seq_idx: Tensor | None,
        past: Tensor | None,
        activation: str | None,
        needs_final: bool,
        group: Group,
    ) -> Any:
        taps = weight.shape[1] - 1
        head = min(x.shape[1], taps)
        tail = F.pad(x[:, x.shape[1] - head :].transpose(1, 2), (taps - head, 0))
        is_step = torch.arange(taps, device=x.device) >= taps - head
        gathering = Gathering([tail, is_step.to(x.dtype)], group, "causal_conv1d: halo")
        out, _ = _ops._causal_conv1d_fwd(x, weight, bias, seq_idx, None, None, activation)

        tails, are_steps = gathering.wait()
        first = tail.new_zeros(tail.shape) if initial_state is None else initial_state
        # (batch, channels, places): of the initial state, then of each rank.
        places = torch.cat([first, *tails.unbind(0)], dim=2)
        count = F.pad(are_steps.flatten().long(), (taps, 0), value=1).cumsum(0)
        # The places that each border's halo reads: the last `taps` of those before it that are steps.
        borders = torch.arange(1, group.size + 2, device=x.device) * taps - 1
        wanted = count[borders][:, None] - taps + 1 + torch.arange(taps, device=x.device)
        sources = torch.searchsorted(count, wanted)
        own = None
        lags = torch.arange(taps, 0, -1, device=x.device)
        if past is not None:
            own = (past[..., None] >= lags)[:, :, None]  # (ranks + 1, batch, 1, taps)
        halo = gathering.tie(_read(places, sources, own, group.rank))
        short_idx = None if seq_idx is None else seq_idx[:, :head]
        if head > 0 and (group.rank > 0 or initial_state is not None or torch.compiler.is_compiling()):
            begin, _ = _ops._causal_conv1d_fwd(x[:, :head], weight, bias, short_idx, None, halo, activation)
            out[:, :head].copy_(begin)
        out = gathering.tie(out) if head == 0 else out
        ctx.save_for_backward(x, weight, bias, seq_idx, halo, sources, own)
        ctx.group, ctx.activation, ctx.needs_final = group, activation, needs_final
        return (out, _read(places, sources, own, group.size)) if needs_final else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor | None = None) -> Any:
        x, weight, bias, seq_idx, halo, sources, own = ctx.saved_tensors
        group, needs = ctx.group, ctx.needs_input_grad[:4]
        taps = weight.shape[1] - 1
        head = min(x.shape[1], taps)
        gathering = None
        if needs[0] or needs[3]:
            local = tie(torch.zeros_like(halo), grad_out)
            if head > 0:
                short_idx = None if seq_idx is None else seq_idx[:, :head]
                of_head = (x[:, :head], weight, bias, short_idx, None, halo, ctx.activation)
                local = _ops._causal_conv1d_bwd(grad_out[:, :head], None, *of_head, [False] * 3 + [True])[3]
            gradients = [_masked(local, own, group.rank)]
            if grad_final is not None:
                gradients.append(_masked(grad_final, own, group.size))
            gathering = Gathering(gradients, group, "causal_conv1d: gradients of the halo")
        wanted = [*needs[:3], False]
        results = _ops._causal_conv1d_bwd(grad_out, None, x, weight, bias, seq_idx, None, halo, ctx.activation, wanted)
        grads: list[Tensor | None] = [grad if need else None for grad, need in zip(results, wanted, strict=True)]
        if gathering is not None:
            gathered = gathering.wait()
            of_borders = [*gathered[0].unbind(0)]
            if grad_final is not None:
                of_borders.append(gathered[1].sum(0))
            if grads[0] is not None and head > 0:
                grad_tail = gathering.tie(_of_places(of_borders, sources, group.rank + 1, group.rank + 1))
                end = grads[0][:, x.shape[1] - head :]
                end.add_(grad_tail[..., taps - head :].transpose(1, 2))
            elif grads[0] is not None:
                grads[0] = gathering.tie(grads[0])
            if needs[3]:
                grads[3] = torch.zeros_like(halo) if group.rank > 0 else _of_places(of_borders, sources, 0, 0)
        return (*grads, None, None, None, None, None)


def _masked(value: Tensor, own: Tensor | None, border: int) -> Tensor:
    return value if own is None else torch.where(own[border], value, 0)


def _read(places: Tensor, sources: Tensor, own: Tensor | None, border: int) -> Tensor:
    """The halo at a border, (batch, channels, taps); zero where a step belongs to another sequence."""
    return _masked(places.index_select(2, sources[border]), own, border)


def _of_places(gradients: list[Tensor], sources: Tensor, block: int, border: int) -> Tensor:
    """The gradient of a block of ``taps`` places, from the gradients of the halos of the borders from ``border`` on.

    The gradients are added in the order of the borders.
    """
    taps = sources.shape[1]
    if len(gradients) <= border:
        return torch.zeros_like(gradients[0])
    own = block * taps + torch.arange(taps, device=sources.device)
    read = torch.cat(gradients[border:], dim=2)  # (batch, channels, borders * taps)
    reads_own = sources[border : len(gradients)].reshape(1, -1) == own[:, None]
    return torch.where(reads_own, read[:, :, None], 0).sum(3)
