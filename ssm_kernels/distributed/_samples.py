r"""The last input samples that pass from rank to rank, for rules that read two samples a step.

A span needs the sample before its first step: that of the last rank before it that has steps, else the one that the caller
gives. With the mask :math:`m_r`, zero where a new sequence begins at the border before rank r:

.. math::
    P_0 = \text{given sample}, \qquad P_{r+1} = \text{last sample of span } r, \text{ or } P_r \text{ if it has no steps},
    \qquad \text{sample before span } r = m_r P_r

With ``repeats`` the sample before a sequence is its first one: rank r takes that of its span in place of :math:`m_r P_r` where
a sequence begins at its border, and where no rank before it has steps.

``SampleCarry`` sends :math:`P_{r+1}` along a chain, or gathers the last samples of all ranks, and does the same with gradients
in the opposite direction. A sample does not depend on a scan, so that no rank waits for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ._carry import like_states, mask_state
from ._collectives import Gathering, Kind, depend_on
from ._group import Group
from ._messages import Call, Chain
from ._recomputation import exchange

__all__ = ["Received", "SampleCarry"]

_T = TypeVar("_T")


class Received(NamedTuple):
    """The result of :meth:`SampleCarry.receive`.

    Attributes:
        previous: the samples before this rank's span, or none where the caller gives none.
        final: the samples after the whole sequence, or none where they are not needed.
        from_before: (batch,), bool: whether ``previous`` is the sample of another rank or the given one, not that of the first
            step of the span; None: it always is.
        has_steps: (ranks,), bool, of summaries: which ranks have steps.
    """

    previous: list[Tensor]
    final: list[Tensor]
    from_before: Tensor | None
    has_steps: Tensor | None


def _step(tensor: Tensor, axis: int, is_last: bool) -> Tensor:
    return tensor.select(axis, tensor.shape[axis] - 1 if is_last else 0)


class SampleCarry:
    """Passes samples in forward and their gradients in backward, for one call of a scan.

    Args:
        group: the ranks.
        what: names the data in the message of an error.
        reverse: whether time runs backwards, so that the last rank is the first.
        chain: the call along a chain, or None for an all-gather.
        axes: the axis of time of each tensor of steps.
        repeats: whether the sample before a sequence is its first one.
    """

    def __init__(
        self, group: Group, what: str, reverse: bool, chain: Call | None, axes: tuple[int, ...], repeats: bool
    ) -> None:
        self._group, self._what, self._reverse, self._axes, self._repeats = group, f"{what}: samples", reverse, axes, repeats
        self._chain = None if chain is None else Chain(group, self._what, chain, reverse)
        ranks = range(group.size)
        order = [*reversed(ranks)] if reverse else [*ranks]
        place = order.index(group.rank)
        self._order, self._before, self._after = order, order[:place], order[place + 1 :]

    @property
    def is_first(self) -> bool:
        return not self._before

    def receive(self, steps: list[Tensor], given: list[Tensor], carry_mask: Tensor | None, needs_final: bool) -> Received:
        """Receives the samples before this rank's span, and sends its last ones.

        Args:
            steps: the tensors of samples, of every step of this rank's span.
            given: the samples before the whole sequence, or none.
            carry_mask: as for ``Carry``.
            needs_final: whether the samples after the last rank are a result.
        """
        is_empty = steps[0].shape[self._axes[0]] == 0
        kinds = self._kinds(steps)
        zeros = [torch.zeros(shape, dtype=dtype, device=steps[0].device) for shape, dtype in kinds]
        own = zeros if is_empty else [_step(tensor, axis, not self._reverse) for tensor, axis in self._pairs(steps)]
        first = given or zeros
        final: list[Tensor] = []
        has_steps = None
        if self._chain is not None:
            is_known = own[0].new_full((1,), float(bool(given)))
            if not self.is_first:
                *first, is_known = self._chain.receive([*kinds, ((1,), own[0].dtype)], steps[0])
            sent = [*first, is_known] if is_empty else [*own, torch.ones_like(is_known)]
            self._chain.send(sent)
            is_known = is_known != 0
        else:
            flag = own[0].new_full((1,), float(not is_empty))

            *samples, flags = exchange(self._what, Gathering([*own, flag], self._group, self._what).wait)
            has_steps = flags[:, 0] != 0
            is_known = torch.full_like(has_steps[:1], bool(given))
            for rank in self._before:
                is_known = is_known | has_steps[rank]
            if needs_final:
                final = self._last(samples, has_steps, first, self._order)
            first = [depend_on(sample, flags) for sample in self._last(samples, has_steps, first, self._before)]
        if self.is_first and not given and not torch.compiler.is_compiling():
            return Received([], final, None, has_steps)
        mask = None if carry_mask is None else carry_mask[0, self._group.rank]
        if not self._repeats:
            return Received([mask_state(sample, mask) for sample in first], final, mask, has_steps)
        from_before = is_known.expand(own[0].shape[0]) if mask is None else is_known & mask
        if not is_empty:
            starts = [_step(tensor, axis, self._reverse) for tensor, axis in self._pairs(steps)]
            first = [torch.where(like_states(from_before, old), old, new) for old, new in zip(first, starts, strict=True)]
        return Received(first, final, from_before, has_steps)

    def send_gradients(
        self,
        gradients: list[Tensor],
        of_steps: list[Tensor | None],
        of_final: list[Tensor],
        from_before: Tensor | None,
        has_steps: Tensor | None,
        steps: list[Tensor],
    ) -> list[Tensor]:
        """Passes the gradients of samples on, and adds them to those of steps.

        Args:
            gradients: of the samples before this rank's span; none: they are zero.
            of_steps: the gradients of this rank's steps, to which those of its samples are added in place.
            of_final: of the samples after the whole sequence, which every rank returned; none: they are zero.
            from_before, has_steps: from :meth:`receive`.
            steps: as for :meth:`receive`.

        Returns:
            The gradients of the samples before the whole sequence: of the first rank, and zeros of others.
        """
        kinds, like = self._kinds(steps), steps[0]
        seqlen = like.shape[self._axes[0]]
        zeros = [torch.zeros(shape, dtype=dtype, device=like.device) for shape, dtype in kinds]
        own = gradients or zeros
        if self._repeats and from_before is not None:
            for place, (gradient, axis) in enumerate(self._pairs(of_steps)):
                if gradient is not None and seqlen > 0:
                    _step(gradient, axis, self._reverse).add_(mask_state(own[place], ~from_before))
        own = [mask_state(gradient, from_before) for gradient in own]
        if self._chain is not None:
            later = zeros if self._chain.is_last else self._chain.receive_gradients(kinds, like)
            passed = [a + b for a, b in zip(own, later, strict=True)] if seqlen == 0 else own
            self._chain.send_gradients(passed)
            before = passed if self.is_first else zeros
        else:
            assert has_steps is not None
            gathering = Gathering([*own, *of_final], self._group, f"{self._what}, gradients")
            gathered = gathering.wait()
            of_ranks, finals = gathered[: len(own)], [tensor.sum(0) for tensor in gathered[len(own) :]]
            later = self._until_steps(of_ranks, finals, has_steps, self._after)
            before = self._until_steps(of_ranks, finals, has_steps, self._order) if self.is_first else zeros
            later, before = ([depend_on(each, gathered[0]) for each in gradients] for gradients in (later, before))
        if seqlen > 0:
            for gradient, (of_samples, axis) in zip(later, self._pairs(of_steps), strict=True):
                if of_samples is not None:
                    _step(of_samples, axis, not self._reverse).add_(gradient)
        return before

    def _pairs(self, tensors: Iterable[_T]) -> Iterator[tuple[_T, int]]:
        return zip(tensors, self._axes, strict=True)

    def _kinds(self, steps: list[Tensor]) -> list[Kind]:
        return [((*each.shape[:axis], *each.shape[axis + 1 :]), each.dtype) for each, axis in self._pairs(steps)]

    @staticmethod
    def _last(samples: list[Tensor], has_steps: Tensor, first: list[Tensor], ranks: list[int]) -> list[Tensor]:
        """The samples of the last of ``ranks`` that has steps, or ``first``."""
        for rank in ranks:
            first = [torch.where(has_steps[rank], sample[rank], other) for sample, other in zip(samples, first, strict=True)]
        return [sample.clone() for sample in first]

    @staticmethod
    def _until_steps(gradients: list[Tensor], finals: list[Tensor], has_steps: Tensor, ranks: list[int]) -> list[Tensor]:
        """The sum of gradients over ranks up to the first that has steps; of the final samples too, if none has."""
        results = []
        for place, of_ranks in enumerate(gradients):
            total, goes_on = torch.zeros_like(of_ranks[0]), torch.ones_like(has_steps[0])
            for rank in ranks:
                total = torch.where(goes_on, total + of_ranks[rank], total)
                goes_on = goes_on & ~has_steps[rank]
            if finals:
                total = torch.where(goes_on, total + finals[place], total)
            results.append(total)
        return results
