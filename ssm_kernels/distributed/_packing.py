"""Packed sequences that go on across the borders between ranks.

Each rank has the sequence numbers of its own steps. What it has to know of the others is, for every border, how many of the
steps before it belong to the sequence that goes on there: zero where a new one begins. One all-gather of a few integers gives
it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ._agreement import by_rank
from ._collectives import Gathering, Group

__all__ = ["Packing", "Spans", "of_latest"]

_Made = TypeVar("_Made")

# More steps than a sequence has: the initial state stands for any number of steps before the first.
_ALL = 1 << 40


class _Latest(NamedTuple):
    tensors: list[weakref.ref[Tensor]]
    versions: list[int]
    seqlen: int
    made: object


# By the process group itself: a later one may have the same name.
_latest: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[type, _Latest]] = weakref.WeakKeyDictionary()


def of_latest(kind: type[_Made], tensors: Sequence[Tensor], seqlen: int, group: Group, make: Callable[[], _Made]) -> _Made:
    """Makes a ``Packing`` or ``Spans``, or returns that of the group's latest call if it had the same tensors, unchanged.

    All layers of a model get the same tensors, so that one collective and one check serve them all. Every rank decides this
    alike, because every rank makes the same calls. Compiled code and CUDA graphs, which run again with other values, and
    inference tensors, which have no version, make a new one.
    """
    is_captured = tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or is_captured or any(tensor.is_inference() for tensor in tensors):
        return make()
    versions = [tensor._version for tensor in tensors]
    of_group = _latest.setdefault(group.process_group, {})
    latest = of_group.get(kind)
    if latest is not None and (latest.versions, latest.seqlen) == (versions, seqlen):
        same = len(latest.tensors) == len(tensors)
        if same and all(reference() is tensor for reference, tensor in zip(latest.tensors, tensors, strict=True)):
            assert isinstance(latest.made, kind)
            return latest.made
    made = make()
    of_group[kind] = _Latest([weakref.ref(tensor) for tensor in tensors], versions, seqlen, made)
    return made


class Packing:
    """The sequences of a rank's steps, and those that go on across borders.

    Args:
        numbers: each (batch, seqlen), int32 or int64: numbers of this rank's steps. A sequence begins where any of them
            changes, and goes on across a border where all of them are equal on both sides.
        group: the ranks.

    Attributes:
        seq_idx: a number for each of this rank's steps that changes where a sequence begins: ``numbers``, if there is one.
            Negative where one of them is.
        past: (ranks + 1, batch), int64: how many steps before a rank's span belong to the sequence of its first step; zero if
            one of its numbers is negative, which is padding for convolutions. The last row is of the border after the last
            rank: the steps of the last sequence. A span without steps has the numbers of the border after it.
        passes: (2, ranks, batch), bool: whether a sequence goes on at the border before a rank, and whether it also goes on at
            the end of the rank's span. For scans, to which a negative number is one like others. ``passes_in_reverse`` has the
            same for scans that run backwards in time.
    """

    def __init__(self, numbers: Sequence[Tensor], group: Group) -> None:
        batch, seqlen = numbers[0].shape
        begins = _changes(numbers)
        self.seq_idx = numbers[0] if len(numbers) == 1 else _numbered(numbers, begins)
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
        rows, paddings, keeps, empties = [], [], [], []
        for of_rank in table.unbind(0):
            first, last, (trailing, lengths) = of_rank.split([len(numbers), len(numbers), 2])
            is_empty = lengths == 0
            past = torch.where(is_empty | ~is_begun | (first == number).all(0), run, 0)
            rows.append(past)
            paddings.append((torch.where(is_empty, number, first) < 0).any(0))
            keeps.append(trailing == lengths)
            empties.append(is_empty)
            run = torch.where(is_empty, run, trailing + torch.where(trailing == lengths, past, 0))
            number = torch.where(is_empty, number, last)
            is_begun = is_begun | ~is_empty
        past = torch.stack([*rows, run])
        goes_on = past[:-1] > 0
        self._is_one_sequence = torch.stack(keeps)
        self.passes = torch.stack([goes_on, goes_on & self._is_one_sequence])
        self.past = torch.where(torch.stack([*paddings, (number < 0).any(0)]), 0, past)
        self._is_empty = torch.stack(empties)
        self._passes_in_reverse: Tensor | None = None

    def passes_in_reverse(self) -> Tensor:
        """``passes`` for scans from the last step to the first: the border before a rank is the one after its last step."""
        if self._passes_in_reverse is None:
            # The initial state passes the border after the last rank with steps.
            goes_on_after = torch.ones_like(self._is_empty[0])
            rows = []
            for goes_on, is_empty in zip(self.passes[0].flip(0).unbind(0), self._is_empty.flip(0).unbind(0), strict=True):
                rows.append(is_empty | goes_on_after)
                goes_on_after = torch.where(is_empty, goes_on_after, goes_on)
            before = torch.stack(rows).flip(0)
            self._passes_in_reverse = torch.stack([before, before & self._is_one_sequence])
        return self._passes_in_reverse


class Spans:
    """The places of the ranks' spans in packed sequences that ``cu_seqlens`` describes.

    Args:
        operator: for messages.
        cu_seqlens: (sequences + 1,), int32 or int64, of the whole sequence: the same on every rank.
        seqlen: this rank's steps.
        group: the ranks.

    Raises:
        ValueError: on every rank, if ``cu_seqlens`` differs between ranks, does not begin at 0, decreases or does not end at
            the sum of the spans' lengths. Neither compiled code nor a CUDA graph under capture checks it.
    """

    def __init__(self, operator: str, cu_seqlens: Tensor, seqlen: int, group: Group) -> None:
        values = cu_seqlens.long()
        weights = torch.arange(1, values.shape[0] + 1, device=values.device)
        checksum, is_ascending = (values * weights).sum(), (values[1:] >= values[:-1]).all() & (values[0] == 0)
        sequences = torch.full_like(checksum, values.shape[0] - 1)
        own = torch.stack(
            [torch.full_like(checksum, seqlen), values[-1], checksum, torch.where(is_ascending, sequences, ~sequences)]
        )
        table = Gathering([own], group, "lengths of the spans").wait()[0]
        lengths = table[:, 0]
        if not torch.compiler.is_compiling() and not (values.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._check(operator, table.tolist())
        self._begin, self._seqlen, self._cu_seqlens = lengths[: group.rank].sum(), seqlen, cu_seqlens

    @staticmethod
    def _check(operator: str, table: list[list[int]]) -> None:
        if any(row[1:] != table[0][1:] for row in table):
            others = [f"{max(row[3], ~row[3])} sequences that end at {row[1]} (checksum {row[2]})" for row in table]
            raise ValueError(f"{operator}: expected the same cu_seqlens on every rank, got {by_rank(others)}")
        if table[0][3] < 0:
            raise ValueError(f"{operator}: expected cu_seqlens that begin at 0 and do not decrease")
        lengths = [row[0] for row in table]
        if sum(lengths) != table[0][1]:
            raise ValueError(
                f"{operator}: expected cu_seqlens that end at the sum of the spans' lengths, {' + '.join(map(str, lengths))} = "
                f"{sum(lengths)}, got {table[0][1]}"
            )

    def seq_idx(self) -> Tensor:
        """The numbers of this rank's steps, (1, seqlen), int64."""
        steps = self._begin + torch.arange(self._seqlen, device=self._cu_seqlens.device)
        return torch.searchsorted(self._cu_seqlens.long(), steps, right=True)[None]

    def cu_seqlens(self) -> Tensor:
        """The part of ``cu_seqlens`` in this rank's span: sequences of other ranks have no steps."""
        return (self._cu_seqlens - self._begin.to(self._cu_seqlens.dtype)).clamp(0, self._seqlen)


def _changes(numbers: Sequence[Tensor]) -> Tensor:
    """Whether any of the numbers of a step differs from the step before, (batch, seqlen - 1)."""
    changes = numbers[0][:, 1:] != numbers[0][:, :-1]
    for number in numbers[1:]:
        changes = changes | (number[:, 1:] != number[:, :-1])
    return changes


def _numbered(numbers: Sequence[Tensor], begins: Tensor) -> Tensor:
    """Numbers that change where a sequence begins, from ``_changes``, and are negative where one of ``numbers`` is."""
    count = torch.nn.functional.pad(begins.cumsum(1), (1, 0))[:, : numbers[0].shape[1]]
    is_padding = numbers[0] < 0
    for number in numbers[1:]:
        is_padding = is_padding | (number < 0)
    return torch.where(is_padding, ~count, count)
