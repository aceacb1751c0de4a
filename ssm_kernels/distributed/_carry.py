r"""The state that passes from rank to rank.

Rank r maps the state before its span to :math:`d_r h + s_r`. With the mask :math:`m_r`, zero where a new sequence begins at the
border before rank r, and the state :math:`h_0` before the whole sequence:

.. math::
    H_0 = h_0, \qquad H_{r+1} = d_r m_r H_r + s_r, \qquad \text{initial state of rank } r = m_r H_r

The adjoint, with :math:`g_r` the gradient of rank r's initial state from its outputs alone and :math:`G_R` that of the final
state, is the gradient of the last state of rank r - 1:

.. math::
    G_r = m_r (g_r + d_r G_{r+1})

``ChainCarry`` sends :math:`H_{r+1}` from rank r to rank r + 1, and :math:`G_r` to rank r - 1.

``SummaryCarry`` gathers :math:`s_r` and :math:`d_r` in forward and :math:`g_r` in backward: one collective each. Each rank then
computes the recurrence over ranks with the operator ``linear_scan``, whose additions have a fixed order.

Complex states are pairs of real numbers. ``ComplexCarry`` multiplies them by pairs :math:`d_r`, and by their conjugates in the
adjoint.

The span of a delta rule maps the state, (value_dim, key_dim), to :math:`H_r T_r + s_r` with a matrix :math:`T_r`, (key_dim,
key_dim), in place of :math:`d_r`, and the adjoint has its transpose. ``MatrixCarry`` computes that recurrence.

A recurrence that runs backwards in time passes the ranks in the opposite order.

A span in which a sequence begins, or with a reset, drops the state before it, and with it Inf and NaN, as one process does.
Any other decay of zero is a factor: NaN stays NaN, and Inf becomes NaN. One process gives NaN where a step's decay is zero, and
Inf where only the product of the steps underflows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from ..ops._complex import columns, numbers
from ._collectives import Gathering, Kind, depend_on
from ._group import Group
from ._messages import Call, Chain
from ._recomputation import exchange

__all__ = ["Carry", "ComplexCarry", "MatrixCarry", "SummaryCarry", "like_states", "mask_state"]


def like_states(factor: Tensor, states: Tensor) -> Tensor:
    """``factor`` with as many axes as ``states``."""
    return factor.reshape(*factor.shape, *(1,) * (states.dim() - factor.dim()))


def mask_state(state: Tensor, mask: Tensor | None) -> Tensor:
    """A state, or its gradient, with zeros in the rows whose sequence does not go on: ``mask`` is (batch,), bool, or None."""
    return state if mask is None else torch.where(like_states(mask, state), state, 0)


def _fold(values: Tensor, decays: Tensor, keep_mask: Tensor | None, first: Tensor | None, reverse: bool) -> Tensor | None:
    """The last state of ``h = decay * h + value`` over ranks, from ``first``; None if there are neither ranks nor ``first``.

    Args:
        values: (ranks, ...).
        decays: with leading axes of ``values``.
        keep_mask: (ranks, batch), bool: a rank where it is false drops the state before it, Inf and NaN included.
        first: the state before the first rank, or None for zero.
        reverse: whether the last rank is the first.
    """
    if keep_mask is not None:
        drops = (~keep_mask).long()
        later = drops.cumsum(0) if reverse else drops.flip(0).cumsum(0).flip(0)
        # A state that a later rank drops enters the scan as zero, so that no Inf or NaN of it spreads.
        values = torch.where(like_states(later == drops, values), values, 0)
        decays = torch.where(like_states(later == 0, decays), decays, 0)
        first = None if first is None else torch.where(like_states((later == 0).all(0), first), first, 0)
    if first is None:
        if values.shape[0] == 0:
            return None
        first, rest = (values[-1], slice(0, -1)) if reverse else (values[0], slice(1, None))
        values, decays = values[rest], decays[rest]
    ranks = values.shape[0]
    if ranks == 0:
        return first
    of_decay = decays[0].numel()
    if of_decay == values[0].numel():
        a, b = (tensor.reshape(1, ranks, -1) for tensor in (decays, values))
    else:
        b = values.reshape(ranks, of_decay, -1).transpose(0, 1)
        a = decays.reshape(ranks, of_decay, 1).transpose(0, 1).expand_as(b)
    h0 = first.reshape(b.shape[0], b.shape[2])
    h = torch.ops.ssm_kernels._linear_recurrence_fwd([a, b], h0, None, None, "linear_scan", "none", True, reverse)[1]
    return h.reshape(first.shape)


def _fold_matrices(
    values: Tensor, maps: Tensor, keep_mask: Tensor | None, first: Tensor | None, reverse: bool, is_adjoint: bool
) -> Tensor | None:
    """As :func:`_fold` for ``h = h @ map + value``; with ``is_adjoint`` the maps are transposed.

    The products are in float64, which neither TF32 nor autocast rounds.

    Args:
        values: (ranks, ..., rows, columns).
        maps: (ranks, ..., columns, columns).
    """
    state = None if first is None else first.double()
    ranks = range(values.shape[0])
    for rank in reversed(ranks) if reverse else ranks:
        value = values[rank].double()
        if state is not None:
            by = maps[rank].double()
            state = mask_state(state @ (by.mT if is_adjoint else by), None if keep_mask is None else keep_mask[rank]) + value
        else:
            state = value
    return None if state is None else state.to(values.dtype)


def _fold_pairs(
    values: Tensor, decays: Tensor, keep_mask: Tensor | None, first: Tensor | None, reverse: bool, is_adjoint: bool
) -> Tensor | None:
    """As :func:`_fold` for pairs of real and imaginary parts; with ``is_adjoint`` the decays are conjugate.

    Args:
        values, decays: (ranks, ..., 2 dstate).
    """
    state, ranks = first, range(values.shape[0])
    for rank in reversed(ranks) if reverse else ranks:
        if state is None:
            state = values[rank]
            continue
        by = numbers(decays[rank])
        after = columns(numbers(state) * (by.conj() if is_adjoint else by))
        state = mask_state(after, None if keep_mask is None else keep_mask[rank]) + values[rank]
    return state


class Carry(ABC):
    """Passes states in forward and their gradients in backward, for one call of a scan.

    A node calls :meth:`receive_state` before the scan and :meth:`send_state` after it, and in backward :meth:`receive_gradient`
    before the scan's adjoint and :meth:`send_gradient` after it.

    Args:
        group: the ranks.
        what: names the data in the message of an error.
        reverse: whether the recurrence runs backwards in time, so that the last rank is the first.
    """

    def __init__(self, group: Group, what: str, reverse: bool) -> None:
        self._group, self._what, self._reverse = group, what, reverse

    @staticmethod
    def of(
        group: Group, what: str, reverse: bool, chain: Call | None, summaries: Callable[[Group, str, bool], Carry] | None = None
    ) -> Carry:
        """Makes a carry.

        Args:
            group, what, reverse: as for the class.
            chain: the call along a chain, or None for summaries.
            summaries: makes the carry for summaries, where it is not a ``SummaryCarry``.
        """
        if chain is not None:
            return ChainCarry(group, what, reverse, chain)
        return (summaries or SummaryCarry)(group, what, reverse)

    @property
    def is_first(self) -> bool:
        return self._group.rank == (self._group.size - 1 if self._reverse else 0)

    @abstractmethod
    def receive_state(
        self,
        state: Kind,
        like: Tensor,
        initial_state: Tensor | None,
        carry_mask: Tensor | None,
        summarize: Callable[[], tuple[Tensor, Tensor]],
        needs_final: bool = False,
        keep_mask: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Receives the state before this rank's span.

        Args:
            state: shape and dtype of a state.
            like: a tensor of its device.
            initial_state: the state before the whole sequence. The first rank's counts.
            carry_mask: (2, ranks, batch), bool: whether a sequence goes on at the border before a rank, and whether it also
                goes on at the border after it; None: it does, unless the ranks send ``keep_mask``.
            summarize: returns the last state from the state zero, (batch, ...), and the decay with leading axes of it.
            needs_final: whether the state after the last rank is a result.
            keep_mask: (batch,), bool, where other ranks do not know it from ``carry_mask``: whether this span keeps the state
                before it. It travels as numbers of the dtype of ``decay``.

        Returns:
            This rank's initial state; the state after the last rank if ``needs_final``; and two tensors for backward.
        """

    @abstractmethod
    def send_state(self, last_state: Tensor) -> None:
        """Takes the state after this rank's span."""

    @abstractmethod
    def receive_gradient(
        self,
        state: Kind,
        like: Tensor,
        grad_final: Tensor | None,
        decays: Tensor | None,
        carry_mask: Tensor | None,
        initial_gradient: Callable[[], Tensor],
    ) -> Tensor | None:
        """The gradient of the state after this rank's span; None if it is zero.

        Args:
            state, like: as for :meth:`receive_state`.
            grad_final: of the final state, which every rank returned; its gradients are summed.
            decays, carry_mask: from :meth:`receive_state`.
            initial_gradient: returns the gradient of this rank's initial state, from its outputs alone.
        """

    @abstractmethod
    def wants_gradient(self, needs_gradient: bool) -> bool:
        """Whether the adjoint has to compute the gradient of this rank's initial state.

        Args:
            needs_gradient: whether that of the state before the whole sequence is needed.
        """

    @abstractmethod
    def send_gradient(self, gradient: Tensor | None, carry_mask: Tensor | None) -> None:
        """Takes the gradient of this rank's initial state, if :meth:`wants_gradient`.

        Args:
            gradient: of the initial state.
            carry_mask: from :meth:`receive_state`.
        """


class ChainCarry(Carry):
    """Receives the state from the rank before, and sends the one after the span to the next rank.

    Rank r waits for r scans once in each pass: the ranks before it run ahead by that time and do not wait for it.
    """

    def __init__(self, group: Group, what: str, reverse: bool, call: Call) -> None:
        super().__init__(group, what, reverse)
        self._chain = Chain(group, f"{what}: states", call, reverse)

    def receive_state(
        self,
        state: Kind,
        like: Tensor,
        initial_state: Tensor | None,
        carry_mask: Tensor | None,
        summarize: Callable[[], tuple[Tensor, Tensor]],
        needs_final: bool = False,
        keep_mask: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        assert not needs_final and keep_mask is None
        if self.is_first:
            return initial_state, None, None, None
        (initial,) = self._chain.receive([state], like)
        border_mask = None if carry_mask is None else carry_mask[0, self._group.rank]
        return mask_state(initial, border_mask), None, None, border_mask

    def send_state(self, last_state: Tensor) -> None:
        self._chain.send([last_state])

    def receive_gradient(
        self,
        state: Kind,
        like: Tensor,
        grad_final: Tensor | None,
        decays: Tensor | None,
        carry_mask: Tensor | None,
        initial_gradient: Callable[[], Tensor],
    ) -> Tensor | None:
        return None if self._chain.is_last else self._chain.receive_gradients([state], like)[0]

    def wants_gradient(self, needs_gradient: bool) -> bool:
        return needs_gradient or not self.is_first

    def send_gradient(self, gradient: Tensor | None, carry_mask: Tensor | None) -> None:
        if not self.is_first:
            assert gradient is not None
            self._chain.send_gradients([mask_state(gradient, carry_mask)])


class SummaryCarry(Carry):
    """Gathers what each rank's span makes of the state before it."""

    def receive_state(
        self,
        state: Kind,
        like: Tensor,
        initial_state: Tensor | None,
        carry_mask: Tensor | None,
        summarize: Callable[[], tuple[Tensor, Tensor]],
        needs_final: bool = False,
        keep_mask: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        def gather() -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
            gathering = self._begin(*summarize(), initial_state, carry_mask, keep_mask)
            return self._end(gathering, carry_mask, initial_state, needs_final)

        return exchange(f"{self._what}: summaries", gather)

    def send_state(self, last_state: Tensor) -> None:
        pass

    def receive_gradient(
        self,
        state: Kind,
        like: Tensor,
        grad_final: Tensor | None,
        decays: Tensor | None,
        carry_mask: Tensor | None,
        initial_gradient: Callable[[], Tensor],
    ) -> Tensor | None:
        assert decays is not None
        local = initial_gradient()
        return self._gradient(local, grad_final, decays, carry_mask)

    def wants_gradient(self, needs_gradient: bool) -> bool:
        return needs_gradient and self.is_first

    def send_gradient(self, gradient: Tensor | None, carry_mask: Tensor | None) -> None:
        pass

    def _begin(
        self,
        last_state: Tensor,
        decay: Tensor,
        initial_state: Tensor | None,
        carry_mask: Tensor | None,
        keep_mask: Tensor | None,
    ) -> Gathering:
        """Sends the summary of this rank's span."""
        if self.is_first and initial_state is not None:
            after = self._continue(last_state, decay, initial_state)
            own = keep_mask if carry_mask is None else carry_mask[1, self._group.rank]
            last_state = after if own is None else torch.where(like_states(own, after), after, last_state)
        tensors = [last_state, decay] if keep_mask is None else [last_state, decay, keep_mask.to(decay.dtype)]
        return Gathering(tensors, self._group, f"{self._what}: states")

    def _end(
        self, gathering: Gathering, carry_mask: Tensor | None, initial_state: Tensor | None, needs_final: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
        """Receives the summaries of all ranks. The tensors for backward are the decays of the ranks after this one and their
        ``carry_mask``.
        """
        states, decays, *sent = gathering.wait()
        if sent:
            carry_mask = torch.stack([torch.ones_like(sent[0], dtype=torch.bool), sent[0] != 0])
        rank, size = self._group.rank, self._group.size

        def fold(ranks: slice) -> Tensor | None:
            keep = None if carry_mask is None else carry_mask[1, ranks]
            return self._fold(states[ranks], decays[ranks], keep, None, is_adjoint=False)

        initial, final = initial_state, None
        if not self.is_first:
            initial = fold(slice(rank + 1, size) if self._reverse else slice(0, rank))
            assert initial is not None
            if carry_mask is not None:
                initial = mask_state(initial, carry_mask[0, rank])
            # From one rank it is a view of what all ranks have sent, which backward must not keep.
            is_view = carry_mask is None and (size - 1 - rank if self._reverse else rank) == 1
            initial = initial.clone() if is_view else initial.contiguous()
        if needs_final:
            final = fold(slice(0, size))
        if initial is None and torch.compiler.is_compiling():
            initial = self._empty(states[rank])
        if initial is not None:
            initial = depend_on(initial, gathering.buffer)
        after = self._after()
        decays = self._adjoint_decays(states, decays)
        return initial, final, decays[after].clone(), None if carry_mask is None else carry_mask[:, after].clone()

    def _gradient(
        self, local_gradient: Tensor, grad_final: Tensor | None, decays: Tensor, carry_mask: Tensor | None
    ) -> Tensor | None:
        tensors = [local_gradient] if grad_final is None else [local_gradient, grad_final]
        gathering = Gathering(tensors, self._group, f"{self._what}: gradients of states")
        gathered = gathering.wait()
        final = gathered[1].sum(0) if grad_final is not None else None
        gradients, keep_mask = gathered[0][self._after()], None
        if carry_mask is not None:
            keep_mask = carry_mask[1]
            gradients = torch.where(like_states(carry_mask[0], gradients), gradients, 0)
        gradient = self._fold(gradients, decays, keep_mask, final, is_adjoint=True)
        if gradient is None and torch.compiler.is_compiling():
            gradient = torch.zeros_like(local_gradient)
        return None if gradient is None else depend_on(gradient.contiguous(), gathering.buffer)

    def _continue(self, last_state: Tensor, decay: Tensor, initial_state: Tensor) -> Tensor:
        """The state after a span that begins with ``initial_state``."""
        return torch.addcmul(last_state, like_states(decay, last_state), initial_state)

    def _fold(
        self, values: Tensor, decays: Tensor, keep_mask: Tensor | None, first: Tensor | None, *, is_adjoint: bool
    ) -> Tensor | None:
        """The last state of the recurrence over ranks or, with ``is_adjoint``, of the adjoint, which runs the other way."""
        return _fold(values, decays, keep_mask, first, self._reverse != is_adjoint)

    def _empty(self, like: Tensor) -> Tensor:
        """The state before the whole sequence, if the caller gives none."""
        return torch.zeros_like(like)

    def _adjoint_decays(self, states: Tensor, decays: Tensor) -> Tensor:
        """Returns the factors by which the adjoint multiplies the gradient of the state after each rank."""
        return decays

    def _after(self) -> slice:
        """The ranks after this one, in the direction of the recurrence."""
        return slice(0, self._group.rank) if self._reverse else slice(self._group.rank + 1, self._group.size)


class MatrixCarry(SummaryCarry):
    """Gathers summaries of spans that multiply the state by a matrix, as those of the delta rule do."""

    def _continue(self, last_state: Tensor, decay: Tensor, initial_state: Tensor) -> Tensor:
        after = _fold_matrices(last_state[None], decay[None], None, initial_state, reverse=False, is_adjoint=False)
        assert after is not None
        return after

    def _fold(
        self, values: Tensor, decays: Tensor, keep_mask: Tensor | None, first: Tensor | None, *, is_adjoint: bool
    ) -> Tensor | None:
        return _fold_matrices(values, decays, keep_mask, first, self._reverse != is_adjoint, is_adjoint)


class ComplexCarry(SummaryCarry):
    """Gathers summaries of spans that multiply complex states, pairs of real and imaginary parts."""

    def _continue(self, last_state: Tensor, decay: Tensor, initial_state: Tensor) -> Tensor:
        return last_state + columns(numbers(decay) * numbers(initial_state))

    def _fold(
        self, values: Tensor, decays: Tensor, keep_mask: Tensor | None, first: Tensor | None, *, is_adjoint: bool
    ) -> Tensor | None:
        return _fold_pairs(values, decays, keep_mask, first, self._reverse != is_adjoint, is_adjoint)
