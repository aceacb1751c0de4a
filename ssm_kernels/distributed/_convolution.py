"""The causal convolution over a sequence whose spans are on several ranks, as autograd nodes.

A rank needs the ``width - 1`` steps before its span: its halo. While it travels, the rank convolves its span from zero; it then
computes the first steps again from the halo. Backward is the mirror: each rank sends the gradient of its halo, and adds those
of its own steps that the later ranks have read.

A span may have fewer steps than the halo, so that a halo takes steps of several ranks. ``ChainHalo`` passes them from neighbour
to neighbour. With ``Halo`` every rank sends its last steps to all, and says which of the ``width - 1`` places are steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..choices import ConvActivation
from ._collectives import Gathering, depend_on, kind
from ._group import Group
from ._messages import Call, Chain
from ._recomputation import exchange, is_repeated

__all__ = [
    "CausalConv1d",
    "Halo",
    "MambaConv",
    "add_to_last_steps",
    "gate_gradient",
    "halo_mask",
    "is_gate",
    "last_steps",
]

_ops = torch.ops.ssm_kernels


class Halo:
    """The halos of all ranks, for one call of a convolution; forward returns tensors for backward to keep.

    Args:
        group: the ranks.
        taps: steps of a halo, at least 1.
    """

    def __init__(self, group: Group, taps: int) -> None:
        self._group, self._taps = group, taps

    def begin(self, x: Tensor) -> Gathering | None:
        """Sends the last steps of a span, (batch, seqlen, channels), unless :meth:`end` takes the halo from forward."""
        if is_repeated():
            return None
        head = min(x.shape[1], self._taps)
        tail, is_step = x[:, x.shape[1] - head :].transpose(1, 2), x.new_ones(head)
        if head < self._taps:
            tail, is_step = (F.pad(tensor, (self._taps - head, 0)) for tensor in (tail, is_step))
        return Gathering([tail, is_step], self._group, "causal_conv1d: halo")

    def end(
        self, gathering: Gathering | None, initial_state: Tensor | None, steps_before: Tensor | None, needs_final: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Receives the last steps of all ranks.

        Returns:
            This rank's halo, (batch, channels, taps); with ``needs_final`` that after the last rank; and, for backward, the
            places that the halo at each border reads, and which of them belong to the sequence there.
        """
        taps = self._taps

        def receive() -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
            assert gathering is not None
            tails, are_steps = gathering.wait()
            first = torch.zeros_like(tails[0]) if initial_state is None else initial_state
            # (batch, channels, places): of the initial state, then of each rank.
            places = torch.cat([first, *tails.unbind(0)], dim=2)
            count = F.pad(are_steps.flatten(), (taps, 0), value=1).cumsum(0, dtype=torch.int64)
            # The halo at a border reads the last `taps` of the places before it that are steps.
            wanted = count[taps - 1 :: taps, None] + torch.arange(1 - taps, 1, device=places.device)
            sources = torch.searchsorted(count, wanted)
            own = halo_mask(steps_before, slice(None), taps)

            def read(border: int) -> Tensor:
                return _masked(places.index_select(2, sources[border]), _at(own, border))

            final = read(self._group.size) if needs_final else None
            return depend_on(read(self._group.rank), gathering.buffer), final, sources, own

        halo, final, sources, own = exchange("causal_conv1d: halo", receive)
        return halo, final, sources, own

    def depend_on_halo(self, gathering: Gathering | None, tensor: Tensor) -> Tensor:
        """``tensor``, for the compiler a function of the halos: see :func:`depend_on`."""
        return tensor if gathering is None else depend_on(tensor, gathering.buffer)

    def needs_gradient(self, needs_initial: bool) -> bool:
        """Whether other ranks need the gradient of this rank's halo."""
        return True

    def send_gradient(self, gradient: Tensor, grad_final: Tensor | None, own: Tensor | None, seqlen: int) -> Gathering:
        """Sends the gradient of this rank's halo, and its part of that of the final state."""
        gradients = [_masked(gradient, _at(own, self._group.rank))]
        if grad_final is not None:
            gradients.append(_masked(grad_final, _at(own, self._group.size)))
        return Gathering(gradients, self._group, "causal_conv1d: gradients of the halo")

    def gradient(
        self, gathering: Gathering, sources: Tensor, grad_x: Tensor | None, needs_initial: bool, seqlen: int
    ) -> Tensor | None:
        """Adds the gradients of this rank's last steps to ``grad_x``, in place; returns that of the initial state."""
        gathered, rank, taps = gathering.wait(), self._group.rank, self._taps
        of_borders = [*gathered[0].unbind(0)]
        if len(gathered) > 1:
            of_borders.append(gathered[1].sum(0))
        if grad_x is not None:
            head = min(seqlen, taps)
            grad_tail = depend_on(_of_places(of_borders, sources, rank + 1, rank + 1), gathering.buffer)
            grad_x[:, seqlen - head :].add_(grad_tail[..., taps - head :].transpose(1, 2))
        if not needs_initial:
            return None
        return torch.zeros_like(of_borders[0]) if rank > 0 else _of_places(of_borders, sources, 0, 0)


class ChainHalo:
    """As :class:`Halo`, from neighbour to neighbour: a span shorter than the halo passes a part of its own halo on.

    The halo that travels also has steps of other sequences: the rank that reads it sets them to zero.
    """

    def __init__(self, group: Group, taps: int, call: Call) -> None:
        self._group, self._taps = group, taps
        self._chain = Chain(group, "causal_conv1d: halo", call)

    def begin(self, x: Tensor) -> Tensor:
        """Sends the last steps of a span, (batch, seqlen, channels), unless it is shorter than the halo."""
        if x.shape[1] >= self._taps:
            self._chain.send([last_steps(None, x, self._taps)])
        return x

    def end(
        self, x: Tensor, initial_state: Tensor | None, steps_before: Tensor | None, needs_final: bool = False
    ) -> tuple[Tensor, None, None, Tensor | None]:
        """Receives the halo. Returns it, and which of its steps belong to the sequence after it; the others are for gathers."""
        assert not needs_final
        shape = x.shape[0], x.shape[2], self._taps
        if not self._chain.is_first:
            (halo,) = self._chain.receive([(shape, x.dtype)], x)
        else:
            halo = x.new_zeros(shape) if initial_state is None else initial_state
        if x.shape[1] < self._taps:
            self._chain.send([last_steps(halo, x, self._taps)])
        own = halo_mask(steps_before, self._group.rank, self._taps)
        return _masked(halo, own), None, None, own

    def depend_on_halo(self, x: Tensor, tensor: Tensor) -> Tensor:
        """A chain is not for compiled code."""
        return tensor

    def needs_gradient(self, needs_initial: bool) -> bool:
        """Whether other ranks, or the initial state, need the gradient of this rank's halo."""
        return needs_initial or not self._chain.is_first

    def send_gradient(self, gradient: Tensor, grad_final: Tensor | None, own: Tensor | None, seqlen: int) -> Tensor:
        """Sends the gradient of this rank's halo, unless that of later halos has to be added to it."""
        gradient = _masked(gradient, own)
        if seqlen >= self._taps:
            self._chain.send_gradients([gradient])
        return gradient

    def gradient(
        self, gradient: Tensor, sources: None, grad_x: Tensor | None, needs_initial: bool, seqlen: int
    ) -> Tensor | None:
        """Adds the gradients of this rank's last steps to ``grad_x``, in place; returns that of the initial state."""
        if not self._chain.is_last:
            (grad_tail,) = self._chain.receive_gradients([kind(gradient)], gradient)
            gradient = add_to_last_steps(gradient, grad_x, grad_tail, seqlen)
        if seqlen < self._taps:
            self._chain.send_gradients([gradient])
        if not needs_initial:
            return None
        return gradient if self._chain.is_first else torch.zeros_like(gradient)


def _halo(group: Group, taps: int, chain: Call | None) -> Halo | ChainHalo:
    """``chain``: as for :meth:`.Carry.of`."""
    return Halo(group, taps) if chain is None else ChainHalo(group, taps, chain)


def last_steps(halo: Tensor | None, x: Tensor, taps: int) -> Tensor:
    """The last ``taps`` steps of a halo, (batch, channels, taps), and ``x``, (batch, seqlen, channels), after it.

    Without a halo ``x`` has as many.
    """
    head = min(x.shape[1], taps)
    tail = x[:, x.shape[1] - head :].transpose(1, 2)
    return tail if halo is None or head == taps else torch.cat([halo[..., head:], tail], 2)


def add_to_last_steps(grad_halo: Tensor, grad_x: Tensor | None, grad_tail: Tensor, seqlen: int) -> Tensor:
    """The adjoint of :func:`last_steps`: adds to ``grad_x`` in place, and returns the sum for the halo."""
    taps = grad_tail.shape[2]
    head = min(seqlen, taps)
    if grad_x is not None:
        grad_x[:, seqlen - head :].add_(grad_tail[..., taps - head :].transpose(1, 2))
    return grad_halo if head == taps else grad_halo + F.pad(grad_tail[..., : taps - head], (head, 0))


def halo_mask(steps_before: Tensor | None, border: int | slice, taps: int) -> Tensor | None:
    """Mask of the halo's steps that belong to the sequence at a border, (..., batch, 1, taps); None: all do."""
    if steps_before is None:
        return None
    lags = torch.arange(taps, 0, -1, device=steps_before.device)
    return (steps_before[border, :, None] >= lags)[..., None, :]


class CausalConv1d(torch.autograd.Function):
    """``out`` and, with ``needs_final``, the state after the last rank's span.

    ``steps_before`` is that of :class:`._packed_sequences.Packing`, or None for sequences that are not packed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        initial_state: Tensor | None,
        seq_idx: Tensor | None,
        steps_before: Tensor | None,
        activation: ConvActivation | None,
        needs_final: bool,
        chain: Call | None,
        group: Group,
    ) -> Any:
        halo = _halo(group, weight.shape[1] - 1, chain)
        out, final = _convolve(ctx, x, weight, bias, initial_state, seq_idx, steps_before, activation, needs_final, halo, group)
        return (out, final) if needs_final else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor | None = None) -> Any:
        return (*_adjoint(ctx, ctx.saved_tensors, grad_out, None, grad_final, None), *(None,) * 6)


class MambaConv(torch.autograd.Function):
    """``x`` for the projections, ``x`` for the scan, and ``z``, as of ``_mamba_conv``. Not for compiled code.

    Backward gets two gradients of ``x``, which the convolution's kernel adds as it reads them. The gradient of ``xz`` is one
    buffer: the scan writes the gradient of ``z`` into its right half (:func:`gate_gradient`), the convolution that of ``x``
    into its left half.
    """

    @staticmethod
    def forward(
        ctx: Any,
        xz: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        initial_state: Tensor | None,
        chain: Call | None,
        group: Group,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, z = xz.chunk(2, dim=-1)
        halo = _halo(group, weight.shape[1] - 1, chain)
        out, _ = _convolve(ctx, x, weight, bias, initial_state, None, None, "silu", False, halo, group)
        ctx.set_materialize_grads(False)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(z)
        return out, out.detach(), z

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor | None, grad_scanned: Tensor | None, grad_z: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        x = saved[0]
        if grad_x is None:
            grad_x, grad_scanned = grad_scanned, None
        if grad_x is None:  # the other ranks wait for the gradient of this one's halo
            grad_x = torch.zeros_like(x)
        if not ctx.needs_input_grad[0]:
            return (*_adjoint(ctx, saved, grad_x, grad_scanned, None, None), None, None)
        grad_xz = None if grad_z is None else _whole_of(grad_z)
        if grad_xz is None:
            grad_xz = _new_whole(x)
            right = grad_xz[..., x.shape[2] :]
            right.zero_() if grad_z is None else right.copy_(grad_z)
        _, *others = _adjoint(ctx, saved, grad_x, grad_scanned, None, grad_xz[..., : x.shape[2]])
        return (grad_xz, *others, None, None)


def is_gate(z: Tensor) -> bool:
    """Whether a tensor is the last result of :class:`MambaConv`, with a gradient."""
    return type(z.grad_fn).__name__ == "MambaConvBackward"


def gate_gradient(z: Tensor) -> Tensor:
    """Memory for the gradient of such a tensor, whose node then writes beside it."""
    whole = _new_whole(z)
    # The node must not take another tensor for it, such as the gradient of a concatenation.
    whole._is_gradient_of_both_halves = True  # type: ignore[attr-defined]
    return whole[..., z.shape[2] :]


def _new_whole(half: Tensor) -> Tensor:
    batch, seqlen, channels = half.shape
    return half.new_empty(batch, seqlen, 2 * channels)


def _whole_of(half: Tensor) -> Tensor | None:
    """The tensor whose right half :func:`gate_gradient` returned, or None."""
    whole = half._base
    if whole is None or not getattr(whole, "_is_gradient_of_both_halves", False):
        return None
    right = whole[..., half.shape[2] :]
    is_right = right.shape == half.shape and right.stride() == half.stride()
    return whole if is_right and right.storage_offset() == half.storage_offset() else None


def _convolve(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    steps_before: Tensor | None,
    activation: ConvActivation | None,
    needs_final: bool,
    halo: Halo | ChainHalo,
    group: Group,
) -> tuple[Tensor, Tensor | None]:
    """The output and, with ``needs_final``, the final state; saves for :func:`_adjoint`."""
    taps = weight.shape[1] - 1
    head = min(x.shape[1], taps)
    exchanged: Any = halo.begin(x)
    out, _ = _ops._causal_conv1d_fwd(x, weight, bias, seq_idx, None, None, activation)
    steps, final, sources, own = halo.end(exchanged, initial_state, steps_before, needs_final)
    if head == 0:
        out = halo.depend_on_halo(exchanged, out)
    elif group.rank > 0 or initial_state is not None or torch.compiler.is_compiling():
        short_idx = None if seq_idx is None else seq_idx[:, :head]
        begin, _ = _ops._causal_conv1d_fwd(x[:, :head], weight, bias, short_idx, None, steps, activation)
        out[:, :head].copy_(begin)
    ctx.save_for_backward(x, weight, bias, seq_idx, steps, sources, own)
    ctx.halo, ctx.activation = halo, activation
    return out, final


def _adjoint(
    ctx: Any,
    saved: tuple[Tensor, ...],
    grad_out: Tensor,
    grad_out_2: Tensor | None,
    grad_final: Tensor | None,
    grad_x: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of ``x``, ``weight``, ``bias`` and ``initial_state``.

    Args:
        saved: ``ctx.saved_tensors``, which checkpointing lets backward read once.
        grad_out: of the output.
        grad_out_2: added to ``grad_out``, or None.
        grad_final: of the final state.
        grad_x: memory for the gradient of ``x``, or None.
    """
    x, weight, bias, seq_idx, steps, sources, own = saved
    needs = ctx.needs_input_grad[:4]
    head = min(x.shape[1], weight.shape[1] - 1)
    exchanged = None
    if needs[0] or needs[3]:
        if head > 0 and ctx.halo.needs_gradient(needs[3]):
            short_idx = None if seq_idx is None else seq_idx[:, :head]
            of_head = (x[:, :head], weight, bias, short_idx, None, steps, ctx.activation)
            grad_head = grad_out[:, :head] if grad_out_2 is None else grad_out[:, :head] + grad_out_2[:, :head]
            local = _ops._causal_conv1d_bwd(grad_head, None, *of_head, [False] * 3 + [True])[3]
        else:
            local = depend_on(torch.zeros_like(steps), grad_out)
        exchanged = ctx.halo.send_gradient(local, grad_final, own, x.shape[1])
    wanted = [*needs[:3], False]
    arguments = (x, weight, bias, seq_idx, None, steps, ctx.activation, wanted)
    if grad_x is None:
        results = _ops._causal_conv1d_bwd(grad_out if grad_out_2 is None else grad_out + grad_out_2, None, *arguments)
    else:
        results = (grad_x, *_ops._causal_conv1d_bwd_out(grad_out, None, *arguments, grad_x, grad_out_2))
    grads: list[Tensor | None] = [grad if need else None for grad, need in zip(results, wanted, strict=True)]
    if exchanged is not None:
        grads[3] = ctx.halo.gradient(exchanged, sources, grads[0], needs[3], x.shape[1])
    return tuple(grads)


def _at(own: Tensor | None, border: int) -> Tensor | None:
    return None if own is None else own[border]


def _masked(value: Tensor, own: Tensor | None) -> Tensor:
    """Zero where a step belongs to another sequence than the first step after the border."""
    return value if own is None else torch.where(own, value, 0)


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
