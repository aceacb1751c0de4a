"""Messages from rank to rank, and sends that nobody waits for.

``send`` returns at once: neither the host nor the device's stream waits for the receiver. Messages and their ``Work`` are kept
until they have been received. ``receive`` makes the stream wait, with gloo the host. Both are operators of the dispatcher, so
that profiles name them. A layer that checkpointing computes again may make neither: see ``_recomputation.py``.

Backends match messages by order and size alone. Each message therefore ends with a tag of 8 bytes, which ``receive`` compares
with the expected one: operator, layer, whether it is a gradient, and a number. Each rank counts the messages from and to
another one, so that the numbers of forward never differ: its messages are told apart by operator and layer. A gradient has the
number of the message in forward that it belongs to. A rank that skips a call or a backward causes an error at the first tag
that differs. The tag is last, so that the data in front of it begins at the address of the buffer.

A CUDA device compares the tags itself, so that the host does not wait: it replaces a message of another tag by NaN. The host
gets the tag by an asynchronous copy, and the next send or receive of the group that finds it there raises the error.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import datetime
import math
import sys
import time
import weakref
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._collectives import Group, Kind, Layout
from ._recomputation import exchange

__all__ = ["Chain"]

# A sender waits for its oldest message where more are under way. gloo does not tell before a wait whether one has arrived.
_MOST_UNDER_WAY = 64

# A process that ends through an exception waits so long for the receivers of its messages.
_SECONDS_AFTER_ERROR = 3.0

_TAG: Kind = ((1,), torch.int64)


class _Tag(NamedTuple):
    """Identifies a message. ``pack`` makes one number of it: 24 bits of the checksum of ``what``, then 1, 14 and 24 bits."""

    what: str
    is_gradient: bool
    layer: int
    number: int

    def pack(self) -> int:
        kind = zlib.crc32(self.what.encode()) % 2**24
        _names[kind] = self.what
        return ((kind << 1 | self.is_gradient) << 14 | self.layer % 2**14) << 24 | self.number % 2**24

    @classmethod
    def unpack(cls, tag: int) -> _Tag:
        what = _names.get(tag >> 39, "an operator that this rank has not called")
        return cls(what, bool(tag >> 38 & 1), tag >> 24 & (2**14 - 1), tag & (2**24 - 1))

    def __str__(self) -> str:
        layer = f" of layer {self.layer}" if self.layer > 0 else ""
        return f"{self.what}{layer}, {'gradient of ' if self.is_gradient else ''}message {self.number}"


# The names in tags, by their checksums.
_names: dict[int, str] = {}


class _Arrival(NamedTuple):
    """A message whose tag the device copies to the host."""

    event: torch.cuda.Event
    tag: Tensor
    expected: int
    group: Group
    peer: int


@dataclasses.dataclass
class _Traffic:
    """The messages of a process group: those under way, their numbers by rank, and those whose tags the host has not seen.

    ``spare`` has events and pinned memory of tags that the host has seen, for the next ones.
    """

    exchanges: bool
    under_way: collections.deque[tuple[Any, Tensor]] = dataclasses.field(default_factory=collections.deque)
    sent: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    received: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    arrivals: collections.deque[_Arrival] = dataclasses.field(default_factory=collections.deque)
    spare: list[tuple[torch.cuda.Event, Tensor]] = dataclasses.field(default_factory=list)

    @staticmethod
    def of(process_group: dist.ProcessGroup) -> _Traffic:
        traffic = _traffic.get(process_group)
        if traffic is None:
            # A fake process group, for dry runs in one process, delivers nothing.
            traffic = _traffic[process_group] = _Traffic(dist.get_backend(process_group) != "fake")
        return traffic

    def check(self, message: Tensor, expected: int, group: Group, peer: int) -> None:
        """Compares the tag of a message with the expected one; on CUDA the host does so later, in :meth:`check_arrivals`."""
        if not self.exchanges:
            return
        words = message.view(torch.int64)
        tag = words[-1:]
        if not message.is_cuda:
            _compare(int(tag), expected, group, peer)
            return
        event, on_host = (
            self.spare.pop() if self.spare else (torch.cuda.Event(), torch.empty_like(tag, device="cpu", pin_memory=True))
        )
        on_host.copy_(tag, non_blocking=True)
        event.record(torch.cuda.current_stream(message.device))
        self.arrivals.append(_Arrival(event, on_host, expected, group, peer))
        # Bytes of 255 are NaN in every dtype of a state.
        words.masked_fill_(tag != expected, -1)

    def check_arrivals(self) -> None:
        """Raises the error of a message whose tag has arrived on the host. Does not wait for others."""
        while self.arrivals and self.arrivals[0].event.query():
            arrival = self.arrivals.popleft()
            self.spare.append((arrival.event, arrival.tag))
            _compare(int(arrival.tag), arrival.expected, arrival.group, arrival.peer)


def _compare(tag: int, expected: int, group: Group, peer: int) -> None:
    if tag != expected:
        raise RuntimeError(
            f"{_Tag.unpack(expected).what}: expected from rank {peer} on rank {group.rank} of {group.size}: "
            f"{_Tag.unpack(expected)}; got: {_Tag.unpack(tag)}. One of the two ranks has skipped a call or a backward that the "
            "other one has made: every rank must make the same calls in the same order, and call backward for them"
        )


# By the process group itself: a later one may have the same name.
_traffic: weakref.WeakKeyDictionary[dist.ProcessGroup, _Traffic] = weakref.WeakKeyDictionary()


@atexit.register
def _wait_for_receivers() -> None:
    """With gloo, a process that ended before its neighbour has received would take the message with it.

    A process that ends through an exception waits for a few seconds only: a launcher sees its failure when it has ended.
    """
    limit = time.monotonic() + _SECONDS_AFTER_ERROR if getattr(sys, "last_value", None) is not None else None
    for traffic in [*_traffic.values()]:
        for work, _ in traffic.under_way:
            with contextlib.suppress(RuntimeError):
                if limit is None:
                    work.wait()
                else:
                    # A time-out of zero would be none.
                    work.wait(datetime.timedelta(seconds=max(limit - time.monotonic(), 0.001)))


def _send(message: Tensor, rank: int, size: int, group_name: str, peer: int, tag: int) -> Tensor:
    group = Group(group_name, size, rank)
    process_group = group.process_group
    traffic = _Traffic.of(process_group)
    traffic.check_arrivals()
    messages = traffic.under_way
    try:
        while messages and messages[0][0].is_completed():
            messages.popleft()
        while len(messages) >= _MOST_UNDER_WAY:
            work, oldest = messages[0]
            work.wait()
            if oldest.is_cuda:
                # Only the current stream has waited, and the memory may be that of another one.
                oldest.record_stream(torch.cuda.current_stream(oldest.device))
            messages.popleft()
        work = dist.isend(message, group=process_group, group_dst=peer)
    except RuntimeError as error:
        raise _failure(group, tag, f"to rank {peer}", error) from error
    messages.append((work, message))
    traffic.sent[peer] += 1
    return message.new_empty(0)


def _receive(like: Tensor, numel: int, rank: int, size: int, group_name: str, peer: int, tag: int) -> Tensor:
    group = Group(group_name, size, rank)
    process_group = group.process_group
    traffic = _Traffic.of(process_group)
    traffic.check_arrivals()
    message = like.new_empty(numel)
    try:
        work: Any = dist.irecv(message, group=process_group, group_src=peer)
        work.wait()
    except RuntimeError as error:
        raise _failure(group, tag, f"from rank {peer}", error) from error
    traffic.received[peer] += 1
    traffic.check(message, tag, group, peer)
    return message


def _failure(group: Group, tag: int, way: str, error: RuntimeError) -> RuntimeError:
    from ._agreement import calls_of_others

    expected = _Tag.unpack(tag)
    return RuntimeError(
        f"{expected.what}: the message {way} failed on rank {group.rank} of {group.size}: a rank has died, has made "
        "another call, has skipped a call or a backward, or has not come within the time-out of the group. The "
        f"message: {expected}.{calls_of_others(group)} PyTorch's message: {error}"
    )


_library = torch.library.Library("ssm_kernels_distributed", "DEF")
_library.define("send(Tensor message, int rank, int size, str group_name, int peer, int tag) -> Tensor")
_library.define("receive(Tensor like, int numel, int rank, int size, str group_name, int peer, int tag) -> Tensor")
_library.impl("send", _send, "CompositeExplicitAutograd")
_library.impl("receive", _receive, "CompositeExplicitAutograd")
_ops = torch.ops.ssm_kernels_distributed


class Chain:
    """Passes tensors to the next rank in forward, and their gradients to the rank before in backward: one message a call.

    Args:
        group: the ranks.
        what: names the data in the message of an error, and tells them from those of other operators.
        layer: the number of the layer that calls, or 0 for a function.
        reverse: whether the last rank is the first.
    """

    def __init__(self, group: Group, what: str, layer: int, reverse: bool = False) -> None:
        self._group, self._what, self._layer = group, what, layer
        self._next = group.rank + (-1 if reverse else 1)
        self._previous = group.rank - (-1 if reverse else 1)
        self.is_first = group.rank == (group.size - 1 if reverse else 0)
        self.is_last = group.rank == (0 if reverse else group.size - 1)
        # The numbers of the messages in forward. One that checkpointing does not repeat does not count.
        self._sent = self._received = 0

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Sends a copy to the next rank, if there is one."""
        if not self.is_last:
            self._sent = self._traffic.sent[self._next]
            exchange(f"{self._what}, sent", lambda: self._send(tensors, self._next, False, self._sent))

    def receive(self, kinds: Sequence[Kind], like: Tensor) -> list[Tensor]:
        """Receives tensors of these shapes and dtypes from the rank before. Not on the first rank.

        ``like`` is a tensor of the messages' device.

        Raises:
            RuntimeError: the message is that of another call; on CUDA a later call or backward raises this, and the results
                are NaN. Or a rank has died, or has not sent one within the time-out of the group.
        """
        self._received = self._traffic.received[self._previous]
        return exchange(f"{self._what}, received", lambda: self._receive(kinds, like, self._previous, False, self._received))

    def send_gradients(self, tensors: Sequence[Tensor]) -> None:
        """Sends a copy to the rank before, if there is one."""
        if not self.is_first:
            self._send(tensors, self._previous, True, self._received)

    def receive_gradients(self, kinds: Sequence[Kind], like: Tensor) -> list[Tensor]:
        """Receives from the next rank. Not on the last rank. Arguments and errors are those of :meth:`receive`."""
        return self._receive(kinds, like, self._next, True, self._sent)

    @property
    def _traffic(self) -> _Traffic:
        return _Traffic.of(self._group.process_group)

    def _place(self, peer: int, is_gradient: bool, number: int) -> tuple[Any, ...]:
        tag = _Tag(self._what, is_gradient, self._layer, number).pack()
        return self._group.rank, self._group.size, self._group.name, peer, tag

    def _send(self, tensors: Sequence[Tensor], peer: int, is_gradient: bool, number: int) -> list[Tensor]:
        if any(tensor.numel() for tensor in tensors):
            place = self._place(peer, is_gradient, number)
            # A kernel's argument: a copy from the host would wait for the device.
            tag = torch.full((1,), place[-1], dtype=torch.int64, device=tensors[0].device)
            tagged = [*tensors, tag]
            _ops.send(Layout.of(tagged).pack(tagged), *place)
        return []

    def _receive(self, kinds: Sequence[Kind], like: Tensor, peer: int, is_gradient: bool, number: int) -> list[Tensor]:
        if not any(math.prod(shape) for shape, _ in kinds):
            return [torch.empty(shape, dtype=dtype, device=like.device) for shape, dtype in kinds]
        layout = Layout([*kinds, _TAG])
        empty = torch.empty(0, dtype=layout.dtype, device=like.device)
        message = _ops.receive(empty, layout.numel, *self._place(peer, is_gradient, number))
        return layout.unpack(message, len(kinds))
