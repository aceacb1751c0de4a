"""Packed sequences that go on across the borders between ranks.

Each rank has the sequence numbers of its own steps. It also needs, for every border, the number of steps before the border
that belong to the sequence that goes on there: zero where a new one begins. One all-gather of a few integers gives these
numbers.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ._agreement import by_rank
from ._collectives import Gathering
from ._group import Group

__all__ = ["ForwardCount", "Packing", "PackingCache", "SequenceSplit"]

# More steps than a sequence has: the initial state stands for any number of steps before the first.
_ALL = 1 << 40


class ForwardCount:
    """Tells the forward passes of a module apart. A layer that begins again belongs to the next one, on every rank alike."""

    def __init__(self) -> None:
        self.number = 0
        self._begun: set[int] = set()

    def begin(self, layer: int) -> None:
        if layer in self._begun:
            self.number += 1
            self._begun.clear()
        self._begun.add(layer)


class _Entry(NamedTuple):
    others: list[weakref.ref[Tensor]]
    versions: list[int]
    seqlen: int
    forward_count: ForwardCount
    number: int
    value: Packing | SequenceSplit


# By the process group itself: a later one may have the same name.
_caches: weakref.WeakKeyDictionary[dist.ProcessGroup, WeakTensorKeyDictionary] = weakref.WeakKeyDictionary()


class PackingCache:
    """Caches the ``Packing`` or ``SequenceSplit`` that ranks have made of a call's tensors, as long as the first of them lives.

    All layers of a model get the same tensors, so that one collective and one check serve them all. They serve one forward
    pass: in the next one the same tensors may hold other values, or the other ranks other spans, and this rank cannot know. In
    one pass ranks may still disagree whether a tensor is that of an earlier call: the caller lets them compare it.

    Args:
        kind: ``Packing`` or ``SequenceSplit``.
        tensors: of this call, at least one. Inference tensors, which have no version, are always new.
        seqlen: this rank's steps.
        group: the ranks.
        count: counts the forward passes.
        is_recomputed: whether backward repeats a call, which needs what forward has made in any pass.

    Attributes:
        found: that of an earlier call with the same tensors, unchanged, or None.
    """

    def __init__(
        self,
        kind: type[Packing | SequenceSplit],
        tensors: Sequence[Tensor],
        seqlen: int,
        group: Group,
        count: ForwardCount,
        is_recomputed: bool,
    ) -> None:
        self._kind, self._tensors, self._seqlen, self._count = kind, tensors, seqlen, count
        self.found: Packing | SequenceSplit | None = None
        self._of_tensor: dict[type, _Entry] | None = None
        if any(tensor.is_inference() for tensor in tensors):
            return
        self._of_tensor = _caches.setdefault(group.process_group, WeakTensorKeyDictionary()).setdefault(tensors[0], {})
        entry = self._of_tensor.get(kind)
        if entry is None or not (is_recomputed or (entry.forward_count, entry.number) == (count, count.number)):
            return
        if (entry.versions, entry.seqlen) == (self._versions(), seqlen):
            others = [reference() for reference in entry.others]
            if len(others) == len(tensors) - 1 and all(map(operator.is_, others, tensors[1:])):
                self.found = entry.value

    def store(self, made: Packing | SequenceSplit) -> None:
        """Stores what this call has made. It must not refer to the call's tensors, which it would keep alive."""
        if self._of_tensor is not None:
            others = [weakref.ref(tensor) for tensor in self._tensors[1:]]
            count = self._count
            self._of_tensor[self._kind] = _Entry(others, self._versions(), self._seqlen, count, count.number, made)

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]


class Packing:
    """The sequences of a rank's steps, and those that go on across borders.

    A sequence begins where ``seq_idx`` or ``cu_seqlens`` says so, and goes on across a border where its numbers on both sides
    are equal.

    Args:
        seq_idx: (batch, seqlen), int32 or int64: the numbers of this rank's steps, or None.
        of_split: the same from ``cu_seqlens``, or None.
        group: the ranks.

    Attributes:
        numbers: with ``of_split``, a number for each of this rank's steps that changes where a sequence begins, and is negative
            where ``seq_idx`` is. Else None: ``seq_idx`` itself, which this object does not keep alive.
        steps_before: (ranks + 1, batch), int64: how many steps before a rank's span belong to the sequence of its first step;
            zero if one of its numbers is negative, which is padding for convolutions. The last row is of the border after the
            last rank: the steps of the last sequence. A span without steps has the numbers of the border after it.
        carry_mask: (2, ranks, batch), bool: whether a sequence goes on at the border before a rank, and whether it also goes on
            at the end of the rank's span. For scans, to which a negative number is one like others. ``carry_mask_in_reverse``
            has the same for scans that run backwards in time.
    """

    def __init__(self, seq_idx: Tensor | None, of_split: Tensor | None, group: Group) -> None:
        numbers = [number for number in (seq_idx, of_split) if number is not None]
        batch, seqlen = numbers[0].shape
        begins = _changes(numbers)
        self.numbers = of_split if seq_idx is None or of_split is None else _numbered(seq_idx, begins)
        if seqlen > 0:
            # The steps after the last change.
            trailing = (begins.long().flip(1).cumsum(1) == 0).sum(1) + 1
            first, last = (torch.stack([number[:, place].long() for number in numbers]) for place in (0, -1))
        else:
            trailing = torch.zeros(batch, dtype=torch.int64, device=numbers[0].device)
            first = last = trailing.expand(len(numbers), batch)
        lengths = torch.full_like(trailing, seqlen)
        own = torch.cat([first, last, torch.stack([trailing, lengths])])
        table = Gathering([own], group, "seq_idx at the borders").wait()[0]
        number = torch.zeros_like(first)
        run = torch.full_like(trailing, _ALL)
        is_begun = torch.zeros_like(trailing, dtype=torch.bool)
        rows, paddings, goes_through, empties = [], [], [], []
        for of_rank in table.unbind(0):
            first, last, (trailing, lengths) = of_rank.split([len(numbers), len(numbers), 2])
            is_empty = lengths == 0
            steps_before = torch.where(is_empty | ~is_begun | (first == number).all(0), run, 0)
            rows.append(steps_before)
            paddings.append((torch.where(is_empty, number, first) < 0).any(0))
            goes_through.append(trailing == lengths)
            empties.append(is_empty)
            run = torch.where(is_empty, run, trailing + torch.where(trailing == lengths, steps_before, 0))
            number = torch.where(is_empty, number, last)
            is_begun = is_begun | ~is_empty
        steps_before = torch.stack([*rows, run])
        goes_on = steps_before[:-1] > 0
        self._is_one_sequence = torch.stack(goes_through)
        self.carry_mask = torch.stack([goes_on, goes_on & self._is_one_sequence])
        self.steps_before = torch.where(torch.stack([*paddings, (number < 0).any(0)]), 0, steps_before)
        self._is_empty = torch.stack(empties)
        self._carry_mask_in_reverse: Tensor | None = None

    def carry_mask_in_reverse(self) -> Tensor:
        """``carry_mask`` for scans from the last step to the first: the border before a rank is the one after its last step."""
        if self._carry_mask_in_reverse is None:
            # The initial state passes the border after the last rank with steps.
            goes_on_after = torch.ones_like(self._is_empty[0])
            rows = []
            for goes_on, is_empty in zip(self.carry_mask[0].flip(0).unbind(0), self._is_empty.flip(0).unbind(0), strict=True):
                rows.append(is_empty | goes_on_after)
                goes_on_after = torch.where(is_empty, goes_on_after, goes_on)
            before = torch.stack(rows).flip(0)
            self._carry_mask_in_reverse = torch.stack([before, before & self._is_one_sequence])
        return self._carry_mask_in_reverse


class SequenceSplit:
    """The places of the ranks' spans in packed sequences that ``cu_seqlens`` describes.

    Args:
        name: of the operator, for messages.
        cu_seqlens: (sequences + 1,), int32 or int64, of the whole sequence: the same on every rank.
        seqlen: this rank's steps.
        group: the ranks.

    Raises:
        ValueError: on every rank, if ``cu_seqlens`` differs between ranks, does not begin at 0, decreases or does not end at
            the sum of the spans' lengths. Neither compiled code nor a CUDA graph under capture checks it.
    """

    def __init__(self, name: str, cu_seqlens: Tensor, seqlen: int, group: Group) -> None:
        values = cu_seqlens.long()
        checksum, is_ascending = _checksum(values), (values[1:] >= values[:-1]).all() & (values[0] == 0)
        sequences = torch.full_like(checksum, values.shape[0] - 1)
        own = torch.stack(
            [torch.full_like(checksum, seqlen), values[-1], checksum, torch.where(is_ascending, sequences, ~sequences)]
        )
        table = Gathering([own], group, "lengths of the spans").wait()[0]
        lengths = table[:, 0]
        if not torch.compiler.is_compiling() and not (values.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._check(name, values, table.tolist())
        self._begin, self._seqlen = lengths[: group.rank].sum(), seqlen

    @staticmethod
    def _check(name: str, values: Tensor, table: list[list[int]]) -> None:
        if any(row[1:] != table[0][1:] for row in table):
            others = [f"{max(row[3], ~row[3])} sequences that end at {row[1]} (checksum {row[2]})" for row in table]
            raise ValueError(f"{name}: expected the same cu_seqlens on every rank, got {by_rank(others)}")
        if table[0][3] < 0:
            fault = next((at for at in range(1, values.shape[0]) if values[at] < values[at - 1]), 0)
            got = f"{values[fault - 1]} and then {values[fault]} at place {fault}" if fault > 0 else f"{values[0]} first"
            raise ValueError(f"{name}: expected cu_seqlens that begin at 0 and do not decrease, got {got}")
        lengths = [row[0] for row in table]
        if sum(lengths) != table[0][1]:
            raise ValueError(
                f"{name}: expected cu_seqlens that end at the sum of the spans' lengths, {' + '.join(map(str, lengths))} = "
                f"{sum(lengths)}, got {table[0][1]}"
            )

    def seq_idx(self, cu_seqlens: Tensor) -> Tensor:
        """The numbers of this rank's steps, (1, seqlen), int64, for the ``cu_seqlens`` that this object was made of."""
        steps = self._begin + torch.arange(self._seqlen, device=cu_seqlens.device)
        return torch.searchsorted(cu_seqlens.long(), steps, right=True)[None]

    def cu_seqlens(self, cu_seqlens: Tensor) -> Tensor:
        """The part of ``cu_seqlens`` in this rank's span: sequences of other ranks have no steps."""
        return (cu_seqlens - self._begin.to(cu_seqlens.dtype)).clamp(0, self._seqlen)


def _checksum(values: Tensor) -> Tensor:
    """A sum of each value mixed with its place: sums of the values alone agree for many ``cu_seqlens``."""
    places = torch.arange(1, values.shape[0] + 1, device=values.device)
    mixed = values * 0x2545F4914F6CDD1D ^ places * 0x1B873593CC9E2D51  # modulo 2^64
    mixed = (mixed ^ (mixed >> 29)) * 0x3C6EF372FE94F82B
    return (mixed ^ (mixed >> 32)).sum()


def _changes(numbers: Sequence[Tensor]) -> Tensor:
    """Whether any of the numbers of a step differs from the step before, (batch, seqlen - 1)."""
    changes = numbers[0][:, 1:] != numbers[0][:, :-1]
    for number in numbers[1:]:
        changes = changes | (number[:, 1:] != number[:, :-1])
    return changes


def _numbered(seq_idx: Tensor, begins: Tensor) -> Tensor:
    """Numbers that change where a sequence begins, from ``_changes``, and are negative where ``seq_idx`` is."""
    count = torch.nn.functional.pad(begins.cumsum(1), (1, 0))[:, : seq_idx.shape[1]]
    return torch.where(seq_idx < 0, ~count, count)
