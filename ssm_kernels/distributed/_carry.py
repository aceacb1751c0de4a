r"""The state that passes from rank to rank.

Rank r maps the state before its span to :math:`d_r h + s_r`. With the mask :math:`m_r`, zero where a new sequence begins at the
border before rank r, and the state :math:`h_0` before the whole sequence:

.. math::
    H_0 = h_0, \qquad H_{r+1} = d_r m_r H_r + s_r, \qquad \text{initial state of rank } r = m_r H_r

The adjoint, with :math:`g_r` the gradient of rank r's initial state from its outputs alone and :math:`G_R` that of the final
state, is the gradient of the last state of rank r - 1:

.. math::
    G_r = m_r (g_r + d_r G_{r+1})

Forward gathers :math:`s_r` and :math:`d_r`, backward :math:`g_r`: one collective each. Each rank then computes the recurrence
over ranks with the operator ``linear_scan``, whose additions have a fixed order. A recurrence that runs backwards in time
passes the ranks in the opposite order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._collectives import Gathering, Group

__all__ = ["Carry"]


def _like(factor: Tensor, states: Tensor) -> Tensor:
    """``factor`` with as many axes as ``states``."""
    return factor.reshape(*factor.shape, *(1,) * (states.dim() - factor.dim()))


def _fold(states: Tensor, decays: Tensor, first: Tensor | None, reverse: bool) -> Tensor:
    """The state after each rank, of the shape of ``states``, (ranks, ...). ``decays`` has leading axes of it."""
    ranks, of_decay = decays.shape[0], decays[0].numel()
    if of_decay == states[0].numel():
        a, b = (value.reshape(1, ranks, -1) for value in (decays, states))
    else:
        b = states.reshape(ranks, of_decay, -1).transpose(0, 1)
        a = decays.reshape(ranks, of_decay, 1).transpose(0, 1).expand_as(b)
    h0 = None if first is None else first.reshape(b.shape[0], b.shape[2])
    h = torch.ops.ssm_kernels._linear_recurrence_fwd([a, b], h0, None, None, "linear_scan", "none", True, reverse)[0]
    return h.transpose(0, 1).reshape(states.shape) if h.shape[0] > 1 else h.reshape(states.shape)


class Carry:
    """Passes states in forward and their gradients in backward, for one call of a scan.

    Args:
        group: the ranks.
        what: names the data in the message of an error.
        reverse: whether the recurrence runs backwards in time, so that the last rank is the first.
    """

    def __init__(self, group: Group, what: str, reverse: bool) -> None:
        self._group, self._what, self._reverse = group, what, reverse

    @property
    def is_first(self) -> bool:
        return self._group.rank == (self._group.size - 1 if self._reverse else 0)

    def begin(self, last_state: Tensor, decay: Tensor, initial_state: Tensor | None) -> Gathering:
        """Sends the summary of this rank's span.

        Args:
            last_state: from the state zero, (batch, ...).
            decay: of its dtype, with leading axes of it.
            initial_state: the state before the whole sequence. The first rank's counts.
        """
        if self.is_first and initial_state is not None:
            last_state = torch.addcmul(last_state, _like(decay, last_state), initial_state)
        return Gathering([last_state, decay], self._group, f"{self._what}: states")

    def end(
        self, gathering: Gathering, continues: Tensor | None, initial_state: Tensor | None, needs_final: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
        """Receives the summaries of all ranks.

        Args:
            continues: (ranks, batch), bool: whether the sequence before a rank's span goes on in it; None: it does.

        Returns:
            This rank's initial state; the state after the last rank if ``needs_final``; and, for backward, the decays of the
            ranks after this one, zero where a new sequence begins at the border, and ``continues`` of these ranks.
        """
        states, decays = gathering.wait()
        rank, size = self._group.rank, self._group.size
        passing = decays
        if continues is not None:
            passing = torch.where(_like(continues, decays), decays, 0)
        before = slice(rank + 1, size) if self._reverse else slice(0, rank)
        after = slice(0, rank) if self._reverse else slice(rank + 1, size)
        wanted = slice(0, size) if needs_final else before
        initial, final = initial_state, None
        if wanted.stop > wanted.start:
            running = _fold(states[wanted], passing[wanted], None, self._reverse)
            if not self.is_first:
                initial = running[rank + 1 - wanted.start if self._reverse else rank - 1]
                if continues is not None:
                    initial = torch.where(_like(continues[rank], initial), initial, 0)
            if needs_final:
                final = running[0 if self._reverse else -1].clone()
        if initial is None and torch.compiler.is_compiling():
            initial = torch.zeros_like(states[rank])
        if initial is not None and not self.is_first:
            initial = initial.contiguous()
        if initial is not None:
            initial = gathering.tie(initial)
        return initial, final, passing[after].clone(), None if continues is None else continues[after].clone()

    def gradient(
        self,
        local_gradient: Tensor,
        grad_final: Tensor | None,
        passing: Tensor,
        continues: Tensor | None,
    ) -> Tensor | None:
        """The gradient of the state after this rank's span; None if it is zero.

        Args:
            local_gradient: of this rank's initial state, from its outputs alone.
            grad_final: of the final state, which every rank returned; its gradients are summed.
            passing: from :meth:`end`.
            continues: from :meth:`end`.
        """
        tensors = [local_gradient] if grad_final is None else [local_gradient, grad_final]
        gathering = Gathering(tensors, self._group, f"{self._what}: gradients of states")
        gathered = gathering.wait()
        rank, size = self._group.rank, self._group.size
        final = gathered[1].sum(0) if grad_final is not None else None
        after = slice(0, rank) if self._reverse else slice(rank + 1, size)
        if after.stop == after.start:
            if final is None and torch.compiler.is_compiling():
                final = torch.zeros_like(local_gradient)
            return None if final is None else gathering.tie(final)
        gradients = gathered[0][after]
        if continues is not None:
            gradients = torch.where(_like(continues, gradients), gradients, 0)
        running = _fold(gradients, passing, final, not self._reverse)
        return gathering.tie(running[-1 if self._reverse else 0].contiguous())
