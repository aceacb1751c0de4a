"""Ranks that call an operator together agree on its shapes, dtypes and options before they exchange data.

An all-gather of tensors of different sizes is not an error that every rank sees: gloo ends the process, and NCCL waits, until
its watchdog ends the process, or returns wrong numbers. Each rank therefore describes its call the first time and whenever the
description changes, and compares it with those of the others. The descriptions travel through the key-value store of the
process group, because a rank whose description has not changed is already in the all-gather: the rank that waits for it raises
after the group's time-out, and the other when its all-gather fails.

Rank 0 reads the description of every rank and writes its finding, which each other rank reads: 2 * ranks - 1 reads. A rank
whose own arguments are invalid writes its error in place of a description and waits for nobody. A call whose description has
not changed costs a comparison on the host. Compiled code makes no comparison: one call that is not compiled makes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import default_pg_timeout

from .._torchscript import refuse_tracing
from ._group import Group

__all__ = [
    "Agreement",
    "by_rank",
    "calls_begun",
    "calls_of_others",
    "compare",
    "describe",
    "failure",
    "mark_as_known",
    "report",
]

_ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError, "RuntimeError": RuntimeError}
_Call = tuple[Any, ...]
_Error = TypeVar("_Error", bound=Exception)


@dataclasses.dataclass
class _History:
    """Number of comparisons that the ranks of a process group have made, and the function calls that they agreed on.

    ``unread`` has this rank's entries of the store that other ranks may not have read yet.
    """

    comparisons: int = 0
    unread: list[str] = dataclasses.field(default_factory=list)
    agreed: set[_Call] = dataclasses.field(default_factory=set)


# How many calls this process has begun to compare, or knows to be agreed on, in all groups.
_begun = [0]


def calls_begun() -> int:
    """Changes when a call reaches its comparison. From there on an error is that of every rank, or of the exchange of data."""
    return _begun[0]


# By the process group itself: a later one may have the same name.
_histories: weakref.WeakKeyDictionary[dist.ProcessGroup, _History] = weakref.WeakKeyDictionary()


def describe(tensor: Tensor | None, free: int | None = None, size: str = "seqlen") -> str:
    """Shape, dtype, device and whether a gradient is needed. The size of the axis ``free`` may differ: ``size`` names it."""
    if tensor is None:
        return "None"
    axes = [str(size) for size in tensor.shape]
    if free is not None and free < len(axes):
        axes[free] = size
    needs_grad = ", requires_grad" if torch.is_grad_enabled() and tensor.requires_grad else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tensor.device.type} [{', '.join(axes)}]{needs_grad}"


class Agreement:
    """Compares the calls of the ranks of a group, and remembers those that were equal.

    Args:
        group: the ranks.
        of_layer: a layer makes the same calls again and again, so it remembers the last one of a kind: where a rank alone
            returns to an earlier call, it compares again. Functions remember every call.
    """

    def __init__(self, group: Group, of_layer: bool = False) -> None:
        self._group = group
        # By operator and kind of call: what its description was made of, the description, and its checksum.
        self._last: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Call, tuple[_Call, _Call, int]]] | None = None
        if of_layer:
            self._last = weakref.WeakKeyDictionary()

    def check(
        self,
        operator: str,
        describe: Callable[[], Mapping[str, Any]],
        validate: Callable[[], Any],
        arguments: _Call = (),
        reverse: bool = False,
    ) -> int:
        """Compares the description of a call with the other ranks', if it is new. See :func:`compare`.

        Returns a checksum of the description.

        Args:
            operator: the name of the operator.
            describe: makes the description.
            validate: checks the arguments.
            arguments: all that the description depends on: a layer that repeats its last call makes no description.
            reverse: a bidirectional layer alternates between calls in both directions.
        """
        if self._group.size == 1:
            return 0
        refuse_tracing(operator, "several ranks")
        process_group = self._group.process_group
        if self._last is None:
            description = describe()
            _begun[0] += 1
            key = (operator, *description.items())
            agreed = _histories.setdefault(process_group, _History()).agreed
            if key not in agreed:
                compare(self._group, operator, description, validate)
                agreed.add(key)
            return _checksum(key)
        last = self._last.setdefault(process_group, {})
        # Checkpointing alternates too, between a forward without gradients and one that is computed again.
        place = (operator, torch.is_grad_enabled(), reverse)
        known, agreed_on, checksum = last.get(place, ((), (), 0))
        if arguments and arguments == known:
            _begun[0] += 1
            return checksum
        description = describe()
        _begun[0] += 1
        key = (operator, *description.items())
        if key != agreed_on:
            compare(self._group, operator, description, validate)
            checksum = _checksum(key)
        last[place] = arguments, key, checksum
        return checksum


def _checksum(description: _Call) -> int:
    """The same in every process, unlike a hash."""
    return zlib.crc32(repr(description).encode())


def compare(group: Group, operator: str, description: Mapping[str, Any], validate: Callable[[], Any]) -> None:
    """Compares the description of a call with the other ranks'.

    Args:
        group: the ranks.
        operator: the name of the operator, for messages.
        description: arguments by name, as strings, numbers or None.
        validate: checks the arguments; an error that it raises is raised on every rank.

    Raises:
        ValueError: the ranks' descriptions differ, or ``validate`` raised a ValueError on another rank.
        TypeError: ``validate`` raised a TypeError on another rank.
        RuntimeError: a rank does not make a new call, or ``validate`` raised another error on another rank.
    """
    try:
        validate()
    except Exception as error:
        report(group, operator, error, description)
        raise
    if not _exchanges(group):
        return
    try:
        found = _exchange(group, operator, {"operator": operator, "arguments": dict(description)})
    except RuntimeError as error:
        raise mark_as_known(error) from error.__cause__
    if found is not None:
        kind, message = found
        raise mark_as_known(_ERRORS[kind](f"{operator}: {message}"))


def _exchanges(group: Group) -> bool:
    """A fake process group, for dry runs in one process, exchanges nothing."""
    return group.size > 1 and dist.get_backend(group.process_group) != "fake"


def mark_as_known(error: _Error) -> _Error:
    """Marks an error that every rank of a group raises, or of which this rank cannot tell the others. Returns it."""
    error.__dict__["_ssm_kernels_is_known"] = True
    return error


def report(
    group: Group,
    operator: str,
    error: Exception,
    arguments: Mapping[str, Any] | None = None,
    said: str | None = None,
) -> None:
    """Tells the other ranks of an error that this rank raises in place of a call. They raise it when they compare the call.

    Does not wait for them. A rank that repeats a call on which all have agreed makes no comparison: it waits for this rank's
    data until the group's time-out, or until this process has ended.

    Args:
        said: a message in place of that of ``error``, which is then a TypeError for the others.
    """
    if not _exchanges(group) or error.__dict__.get("_ssm_kernels_is_known"):
        return
    mark_as_known(error)
    kind = next((name for name, kind in _ERRORS.items() if isinstance(error, kind)), "RuntimeError")
    raised = (kind, str(error) or type(error).__name__) if said is None else ("TypeError", said)
    history = _histories.setdefault(group.process_group, _History())
    number = history.comparisons
    history.comparisons += 1
    call = {"operator": operator, "arguments": dict(arguments or {}), "raised": raised}
    entries = {_key(number, group.rank): json.dumps(call)}
    if group.rank == 0:
        entries[_key(number, "result")] = json.dumps((raised[0], _raised(0, raised)))
    history.unread += entries
    # The store has ended with its rank.
    with contextlib.suppress(RuntimeError):
        store, _ = _store(group)
        for key, value in entries.items():
            store.set(key, value)


def _key(number: int, of: int | str) -> str:
    return f"ssm_kernels/comparison/{number}/{of}"


def _store(group: Group) -> tuple[Any, datetime.timedelta]:
    """The store of a process group, and the group's time-out."""
    process_group: Any = group.process_group
    try:
        timeout = process_group._get_backend(process_group._device_types[0]).options._timeout
    except (AttributeError, RuntimeError):  # a backend without options
        timeout = default_pg_timeout
    return process_group.get_group_store(), timeout


def _exchange(group: Group, operator: str, call: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns rank 0's finding about the calls of all ranks: type and message of an error, or None if the calls are equal."""
    try:
        return _exchange_through_store(group, operator, call)
    except dist.DistNetworkError as error:
        raise RuntimeError(
            f"{operator}: rank {group.rank} makes a call with new arguments, {_text(call)}, and cannot compare it with those "
            "of other ranks: the store of the process group cannot be reached. The process that holds it, in most cases that "
            f"of rank 0, has ended. PyTorch's message: {error}"
        ) from error


def _exchange_through_store(group: Group, operator: str, call: Mapping[str, Any]) -> tuple[str, str] | None:
    history = _histories.setdefault(group.process_group, _History())
    number = history.comparisons
    history.comparisons += 1
    store, _ = _store(group)
    keys, result = [_key(number, rank) for rank in range(group.size)], _key(number, "result")
    store.set(keys[group.rank], json.dumps(call))
    _wait(group, operator, call, keys, result)
    if group.rank == 0:
        found = _difference([json.loads(value) for value in store.multi_get(keys)])
        store.set(result, json.dumps(found))
    else:
        found = json.loads(store.get(result))
    # Every rank has begun this comparison and so has read all of those before.
    for key in history.unread:
        store.delete_key(key)
    history.unread = [keys[group.rank], *([result] if group.rank == 0 else [])]
    return found


def _wait(group: Group, operator: str, call: Mapping[str, Any], keys: list[str], result: str) -> None:
    """Rank 0 waits for every rank's entry of the store, other ranks for its finding.

    Raises RuntimeError if a rank does not write its own of ``keys`` within the time-out; rank 0 tells the others.
    """
    store, timeout = _store(group)
    awaited = keys if group.rank == 0 else [result]
    absent: list[int] = []
    # Rank 0 may have begun to wait later than this rank, and find all calls after this rank's time-out.
    for _ in range(2):
        try:
            store.wait(awaited, timeout)
            return
        except dist.DistNetworkError:  # the store has ended with its rank
            raise
        except RuntimeError:  # the store's time-out
            with contextlib.suppress(RuntimeError):
                absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if absent:
                break
    message = (
        f"rank {group.rank} makes a call with new arguments, {_text(call)}, and waits for ranks {absent or [0]}, which have "
        f"not made one within {timeout}: they have died or called with other arguments. Every rank must make the same calls in "
        "the same order"
    )
    if group.rank == 0:
        with contextlib.suppress(RuntimeError):
            store.set(result, json.dumps(("RuntimeError", message)))
    raise RuntimeError(f"{operator}: {message}")


def calls_of_others(group: Group) -> str:
    """Describes the calls with which other ranks wait for this one; empty if there are none."""
    try:
        history, (store, _) = _histories.get(group.process_group, _History()), _store(group)
        keys = {rank: _key(history.comparisons, rank) for rank in range(group.size) if rank != group.rank}
        calls = {rank: _text(json.loads(store.get(key))) for rank, key in keys.items() if store.check([key])}
    except RuntimeError:  # the store has died with its rank
        return ""
    return "".join(f" Rank {rank} called {text}, and this rank did not." for rank, text in calls.items())


def failure(what: str, group: Group, error: RuntimeError) -> RuntimeError:
    """The error of a collective that has failed. ``what`` names it."""
    return mark_as_known(
        RuntimeError(
            f"{what} failed on rank {group.rank} of {group.size}: a rank has died, has made another call, or has not come "
            f"within the time-out of the group.{calls_of_others(group)} PyTorch's message: {error}"
        )
    )


def _text(call: Mapping[str, Any]) -> str:
    arguments = ", ".join(f"{name}={value}" for name, value in call["arguments"].items() if value not in (None, "None"))
    return f"{call['operator']}({arguments})"


def _difference(calls: list[dict[str, Any]]) -> tuple[str, str] | None:
    for rank, call in enumerate(calls):
        if "raised" in call:
            return call["raised"][0], _raised(rank, call["raised"])
    operators = [call["operator"] for call in calls]
    if len(set(operators)) > 1:
        return "ValueError", f"expected the same call on every rank, got {by_rank(operators)}"
    for name in {name: None for call in calls for name in call["arguments"]}:
        values = [str(call["arguments"].get(name)) for call in calls]
        if len(set(values)) > 1:
            return "ValueError", f"expected the same {name} on every rank, got {by_rank(values)}"
    return None


def _raised(rank: int, raised: Sequence[str]) -> str:
    return f"rank {rank} of the group raised: {raised[1]}"


def by_rank(values: Sequence[str]) -> str:
    """The values, each with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return " and ".join(f"{value} on rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}" for value, of in ranks.items())
