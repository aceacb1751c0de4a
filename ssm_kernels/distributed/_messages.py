"""Messages from rank to rank: operators that ``torch.utils.checkpoint`` can save, and sends that nobody waits for.

``send`` returns at once: neither the host nor the device's stream waits for the receiver. Messages and their ``Work`` are kept
until they have been received. ``receive`` makes the stream wait, with gloo the host. Both are operators of the dispatcher, so
that :func:`keep_exchanged_states` can take their results from forward when a checkpointed layer is computed again.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ._collectives import Group, Layout

__all__ = ["Chain", "keep_exchanged_states"]

# A sender waits for its oldest message where more are under way. gloo does not tell before a wait whether one has arrived.
_MOST_UNDER_WAY = 64

# By the process group itself: a later one may have the same name.
_under_way: weakref.WeakKeyDictionary[dist.ProcessGroup, collections.deque[tuple[Any, Tensor]]] = weakref.WeakKeyDictionary()


@atexit.register
def _wait_for_receivers() -> None:
    """With gloo, a process that ended before its neighbour has received would take the message with it."""
    for messages in [*_under_way.values()]:
        for work, _ in messages:
            with contextlib.suppress(RuntimeError):
                work.wait()


def _send(message: Tensor, rank: int, size: int, group_name: str, peer: int, what: str) -> Tensor:
    group = Group(group_name, size, rank)
    process_group = group.process_group
    messages = _under_way.setdefault(process_group, collections.deque())
    with _named(group, what, f"to rank {peer}"):
        while messages and messages[0][0].is_completed():
            messages.popleft()
        while len(messages) >= _MOST_UNDER_WAY:
            messages[0][0].wait()
            messages.popleft()
        work = dist.isend(message, group=process_group, group_dst=peer)
    messages.append((work, message))
    return message.new_empty(0)


def _receive(like: Tensor, numel: int, rank: int, size: int, group_name: str, peer: int, what: str) -> Tensor:
    group = Group(group_name, size, rank)
    message = like.new_empty(numel)
    with _named(group, what, f"from rank {peer}"):
        work: Any = dist.irecv(message, group=group.process_group, group_src=peer)
        work.wait()
    return message


@contextlib.contextmanager
def _named(group: Group, what: str, way: str) -> Any:
    try:
        yield
    except RuntimeError as error:
        from ._agreement import calls_of_others

        raise RuntimeError(
            f"{what}: the message {way} failed on rank {group.rank} of {group.size}: a rank has died, has made another call, "
            f"or has not come within the time-out of the group.{calls_of_others(group)} PyTorch's message: {error}"
        ) from error


_library = torch.library.Library("ssm_kernels_distributed", "DEF")
_library.define("send(Tensor message, int rank, int size, str group_name, int peer, str what) -> Tensor")
_library.define("receive(Tensor like, int numel, int rank, int size, str group_name, int peer, str what) -> Tensor")
_library.impl("send", _send, "CompositeExplicitAutograd")
_library.impl("receive", _receive, "CompositeExplicitAutograd")
_ops = torch.ops.ssm_kernels_distributed


class Chain:
    """Passes tensors to the next rank in forward, and their gradients to the rank before in backward.

    Args:
        group: the ranks.
        what: names the data in the message of an error.
        reverse: whether the last rank is the first.
    """

    def __init__(self, group: Group, what: str, reverse: bool = False) -> None:
        self._group, self._what = group, what
        self._step = -1 if reverse else 1
        self.is_first = group.rank == (group.size - 1 if reverse else 0)
        self.is_last = group.rank == (0 if reverse else group.size - 1)

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Sends to the next rank, if there is one."""
        if not self.is_last:
            self._send(tensors, self._group.rank + self._step, self._what)

    def receive(self, layout: Layout, like: Tensor) -> list[Tensor]:
        """Receives from the rank before. Not on the first rank. ``like``: a tensor of the messages' device."""
        return self._receive(layout, like, self._group.rank - self._step, self._what)

    def send_gradients(self, tensors: Sequence[Tensor]) -> None:
        """Sends to the rank before, if there is one."""
        if not self.is_first:
            self._send(tensors, self._group.rank - self._step, f"{self._what}, gradients")

    def receive_gradients(self, layout: Layout, like: Tensor) -> list[Tensor]:
        """Receives from the next rank. Not on the last rank."""
        return self._receive(layout, like, self._group.rank + self._step, f"{self._what}, gradients")

    def _place(self, peer: int, what: str) -> tuple[Any, ...]:
        return self._group.rank, self._group.size, self._group.name, peer, what

    def _send(self, tensors: Sequence[Tensor], peer: int, what: str) -> None:
        message = Layout.of(tensors).pack(tensors)
        if message.numel() > 0:
            _ops.send(message, *self._place(peer, what))

    def _receive(self, layout: Layout, like: Tensor, peer: int, what: str) -> list[Tensor]:
        empty = torch.empty(0, dtype=layout.dtype, device=like.device)
        message = empty if layout.numel == 0 else _ops.receive(empty, layout.numel, *self._place(peer, what))
        return layout.unpack(message)


# Not the all-gathers: a call may leave out those that describe packed sequences, and results are matched by the call's number.
_SAVED = {_ops.send.default, _ops.receive.default} | {
    getattr(torch.ops.ssm_kernels, name).default
    for name in ("_selective_scan_summary_fwd", "_ssd_chunk_scan_summary_fwd", "_linear_recurrence_summary_fwd")
}


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def keep_exchanged_states() -> tuple[Any, Any]:
    """For activation checkpointing: layers with context parallelism keep what they have received from other ranks.

    A checkpointed layer with a chain is then computed again in backward without communication. With summaries it repeats the
    all-gathers, but not the summaries' kernels. What it keeps does not depend on the length of the sequences::

        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=keep_exchanged_states)
    """
    make: Callable[..., tuple[Any, Any]] = create_selective_checkpoint_contexts
    return make(_policy)
