"""Messages from rank to rank, and sends that nobody waits for.

``send`` returns at once: neither the host nor the device's stream waits for the receiver. Messages and their ``Work`` are kept
until they have been received. ``receive`` makes the stream wait, with gloo the host. Both are operators of the dispatcher, so
that profiles name them. A layer that checkpointing computes again may make neither: see ``_recomputation.py``.

Backends match messages by order and size alone. Each message therefore ends with a tag of 8 bytes, which ``receive`` compares
with the expected one: operator and description of the call, layer, whether it is a gradient, and the number of the call among
those of the group's chains. Ranks that make the same calls count alike. A rank that skips a call or a backward, or calls with
other arguments, causes an error at the first tag that differs. The tag is last, so that the data in front of it begins at the
address of the buffer.

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

from ._agreement import calls_of_others, mark_as_known
from ._collectives import Kind, Layout
from ._group import Group
from ._recomputation import exchange

__all__ = ["Call", "Chain"]

# A sender waits for its oldest message where more are under way. gloo does not tell before a wait whether one has arrived.
_MOST_UNDER_WAY = 64

# A process that ends through an exception waits so long for the receivers of its messages.
_SECONDS_AFTER_ERROR = 3.0

_TAG: Kind = ((1,), torch.int64)


class Call(NamedTuple):
    """A call along a chain: the number of the layer that makes it, or 0 for a function, and a checksum of its description."""

    layer: int = 0
    description: int = 0


class _Tag(NamedTuple):
    """Identifies a message. ``pack`` makes one number of it: a checksum of ``what`` and ``description`` has 24 of its bits."""

    what: str
    description: int
    is_gradient: bool
    layer: int
    number: int

    def pack(self) -> int:
        kind = zlib.crc32(self.what.encode(), self.description) % 2**24
        _kinds[kind] = self.what, self.description
        return ((kind << 1 | self.is_gradient) << 14 | self.layer % 2**14) << 24 | self.number % 2**24

    @classmethod
    def unpack(cls, tag: int) -> _Tag:
        what, description = _kinds.get(tag >> 39, ("a call that this rank has not made", 0))
        return cls(what, description, bool(tag >> 38 & 1), tag >> 24 & (2**14 - 1), tag & (2**24 - 1))

    def __str__(self) -> str:
        layer = f" of layer {self.layer}" if self.layer > 0 else ""
        return f"{self.what}{layer}, {'gradient of ' if self.is_gradient else ''}call {self.number}"


# ``what`` and ``description`` of tags, by their checksums.
_kinds: dict[int, tuple[str, int]] = {}


class _Arrival(NamedTuple):
    """A message whose tag the device copies to the host."""

    event: torch.cuda.Event
    tag: Tensor
    device: torch.device
    expected: int
    group: Group
    peer: int


@dataclasses.dataclass
class _Traffic:
    """The messages of a process group: those under way, and those whose tags the host has not seen. ``calls`` counts calls.

    ``spare`` has events and pinned memory of tags that the host has seen, by device, for the next ones.
    """

    exchanges: bool
    calls: int = 0
    under_way: collections.deque[tuple[Any, Tensor]] = dataclasses.field(default_factory=collections.deque)
    arrivals: collections.deque[_Arrival] = dataclasses.field(default_factory=collections.deque)
    spare: collections.defaultdict[torch.device, list[tuple[torch.cuda.Event, Tensor]]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )

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
        spare = self.spare[message.device]
        if spare:
            event, on_host = spare.pop()
        else:
            event, on_host = torch.cuda.Event(), torch.empty(1, dtype=torch.int64, device="cpu", pin_memory=True)
        on_host.copy_(tag, non_blocking=True)
        event.record(torch.cuda.current_stream(message.device))
        self.arrivals.append(_Arrival(event, on_host, message.device, expected, group, peer))
        # Bytes of 255 are NaN in every dtype of a state.
        words.masked_fill_(tag != expected, -1)

    def check_arrivals(self) -> None:
        """Raises the error of a message whose tag has arrived on the host. Does not wait for others."""
        while self.arrivals and self.arrivals[0].event.query():
            arrival = self.arrivals.popleft()
            self.spare[arrival.device].append((arrival.event, arrival.tag))
            _compare(int(arrival.tag), arrival.expected, arrival.group, arrival.peer)


def _compare(tag: int, expected: int, group: Group, peer: int) -> None:
    if tag != expected:
        wanted, got = _Tag.unpack(expected), _Tag.unpack(tag)
        is_same = (got.what, got.layer) == (wanted.what, wanted.layer)
        other = ", with other arguments" if is_same and got.description != wanted.description else ""
        error = RuntimeError(
            f"{wanted.what}: expected from rank {peer} on rank {group.rank} of {group.size}: {wanted}; got: {got}{other}. One "
            "of the two ranks has skipped a call or backward that the other one has made, or has called with other arguments. "
            "Every rank must make the same calls in the same order, and call backward for them"
        )
        raise mark_as_known(error)


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
    traffic.check(message, tag, group, peer)
    return message


def _failure(group: Group, tag: int, way: str, error: RuntimeError) -> RuntimeError:
    expected = _Tag.unpack(tag)
    return mark_as_known(
        RuntimeError(
            f"{expected.what}: the message {way} failed on rank {group.rank} of {group.size}: a rank has died, has made "
            "another call, has skipped a call or a backward, or has not come within the time-out of the group. The "
            f"message: {expected}.{calls_of_others(group)} PyTorch's message: {error}"
        )
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
        call: that the messages belong to.
        reverse: whether the last rank is the first.
    """

    def __init__(self, group: Group, what: str, call: Call, reverse: bool = False) -> None:
        self._group, self._what, self._call = group, what, call
        self._next = group.rank + (-1 if reverse else 1)
        self._previous = group.rank - (-1 if reverse else 1)
        self.is_first = group.rank == (group.size - 1 if reverse else 0)
        self.is_last = group.rank == (0 if reverse else group.size - 1)
        # Counted by the first message in forward: a call that exchanges nothing when it is computed again does not count.
        self._number: int | None = None

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Sends a copy to the next rank, if there is one."""
        if not self.is_last:
            exchange(f"{self._what}, sent", lambda: self._send(tensors, self._next, False))

    def receive(self, kinds: Sequence[Kind], like: Tensor) -> list[Tensor]:
        """Receives tensors of these shapes and dtypes from the rank before. Not on the first rank.

        ``like`` is a tensor of the messages' device.

        Raises:
            RuntimeError: the message is that of another call; on CUDA a later call or backward raises this, and the results
                are NaN. Or a rank has died, or has not sent one within the time-out of the group.
        """
        return exchange(f"{self._what}, received", lambda: self._receive(kinds, like, self._previous, False))

    def send_gradients(self, tensors: Sequence[Tensor]) -> None:
        """Sends a copy to the rank before, if there is one."""
        if not self.is_first:
            self._send(tensors, self._previous, True)

    def receive_gradients(self, kinds: Sequence[Kind], like: Tensor) -> list[Tensor]:
        """Receives from the next rank. Not on the last rank. Arguments and errors are those of :meth:`receive`."""
        return self._receive(kinds, like, self._next, True)

    def _place(self, peer: int, is_gradient: bool) -> tuple[Any, ...]:
        if self._number is None:
            assert not is_gradient
            traffic = _Traffic.of(self._group.process_group)
            self._number, traffic.calls = traffic.calls, traffic.calls + 1
        tag = _Tag(self._what, self._call.description, is_gradient, self._call.layer, self._number).pack()
        return self._group.rank, self._group.size, self._group.name, peer, tag

    def _send(self, tensors: Sequence[Tensor], peer: int, is_gradient: bool) -> list[Tensor]:
        place = self._place(peer, is_gradient)
        if any(tensor.numel() for tensor in tensors):
            # A kernel's argument: a copy from the host would wait for the device.
            tag = torch.full((1,), place[-1], dtype=torch.int64, device=tensors[0].device)
            tagged = [*tensors, tag]
            _ops.send(Layout.of(tagged).pack(tagged), *place)
        return []

    def _receive(self, kinds: Sequence[Kind], like: Tensor, peer: int, is_gradient: bool) -> list[Tensor]:
        place = self._place(peer, is_gradient)
        if not any(math.prod(shape) for shape, _ in kinds):
            return [torch.empty(shape, dtype=dtype, device=like.device) for shape, dtype in kinds]
        layout = Layout([*kinds, _TAG])
        empty = torch.empty(0, dtype=layout.dtype, device=like.device)
        message = _ops.receive(empty, layout.numel, *place)
        return layout.unpack(message, len(kinds))
