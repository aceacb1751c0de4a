"""Ranks that call an operator together agree on its shapes, dtypes and options before they exchange data.

An all-gather of tensors of different sizes is not an error that every rank sees: gloo ends the process, and NCCL waits, until
its watchdog ends the process, or returns wrong numbers. Each rank therefore describes its call the first time and whenever the
description changes, and compares it with those of the others. The descriptions travel through the key-value store of the
process group, because a rank whose description has not changed is already in the all-gather: the rank that waits for it raises
after the group's time-out, and the other when its all-gather fails.

A call whose description has not changed costs a comparison on the host. Compiled code makes no comparison: one call that is not
compiled makes it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ._collectives import Group

__all__ = ["Agreement", "calls_of_others", "describe"]

# By the name of a group: how many comparisons its ranks have made, and what they have agreed on.
_comparisons: dict[str, int] = {}
_agreed_of_functions: dict[str, set[tuple[Any, ...]]] = {}


def describe(tensor: Tensor | None, time: int | None = None) -> str:
    """Shape without the number of steps, dtype, device and whether a gradient is needed."""
    if tensor is None:
        return "None"
    axes = [str(size) for size in tensor.shape]
    if time is not None and time < len(axes):
        axes[time] = "seqlen"
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
        self._last: dict[tuple[Any, ...], tuple[Any, ...]] | None = {} if of_layer else None

    def check(self, operator: str, description: Mapping[str, Any], validate: Callable[[], Any]) -> None:
        """Compares the description of a call with the other ranks', if it is new.

        Args:
            operator: the name of the operator, for messages.
            description: arguments by name, as strings, numbers or None.
            validate: checks the arguments; an error that it raises is raised on every rank.

        Raises:
            ValueError: the ranks' descriptions differ, or ``validate`` raised a ValueError on another rank.
            RuntimeError: a rank does not make a new call, or ``validate`` raised another error on another rank.
        """
        if self._group.size == 1:
            return
        key = (operator, *description.items())
        # A bidirectional layer alternates between two calls, and so does checkpointing that recomputes a forward.
        place = (operator, torch.is_grad_enabled(), description.get("reverse"))
        if self._last is not None:
            if self._last.get(place) == key:
                return
        elif key in _agreed_of_functions.setdefault(self._group.name, set()):
            return
        error: Exception | None = None
        try:
            validate()
        except (ValueError, RuntimeError, TypeError) as raised:
            error = raised
        call: dict[str, Any] = {
            "operator": operator,
            "arguments": dict(description),
            "error": None if error is None else str(error),
        }
        call["is_value_error"] = isinstance(error, ValueError)
        calls = _exchange(self._group, operator, call)
        if error is not None:
            raise error
        _compare(operator, calls)
        if self._last is not None:
            self._last[place] = key
        else:
            _agreed_of_functions[self._group.name].add(key)


def _key(number: int, rank: int) -> str:
    return f"ssm_kernels/context_parallel/{number}/{rank}"


def _store(group: Group) -> tuple[Any, datetime.timedelta]:
    """The store of a process group, and the group's time-out."""
    resolve: Any = c10d.__dict__["_resolve_process_group"]
    process_group = resolve(group.name)
    options: Any = process_group._get_backend(process_group._device_types[0]).options
    return process_group.get_group_store(), options._timeout


def _exchange(group: Group, operator: str, call: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The calls of all ranks."""
    number = _comparisons.get(group.name, 0)
    _comparisons[group.name] = number + 1
    store, timeout = _store(group)
    store.set(_key(number, group.rank), json.dumps(call))
    calls, absent = [], []
    for rank in range(group.size):
        try:
            store.wait([_key(number, rank)], timeout)
            calls.append(json.loads(store.get(_key(number, rank))))
        except RuntimeError:  # the store's time-out
            absent.append(rank)
            break
    if absent:
        absent += [rank for rank in range(absent[0] + 1, group.size) if not store.check([_key(number, rank)])]
        raise RuntimeError(
            f"{operator}: rank {group.rank} makes a call with new arguments, {_text(call)}, and waits for ranks {absent}, "
            f"which have not made one within {timeout}: they have died or called with other arguments. Every rank must "
            "make the same calls in the same order"
        )
    if number >= 2:
        # Every rank has begun comparison number - 1 and so has read all of the one before.
        store.delete_key(_key(number - 2, group.rank))
    return calls


def calls_of_others(group: Group) -> str:
    """Describes the calls with which other ranks wait for this one; empty if there are none."""
    try:
        number, (store, _) = _comparisons.get(group.name, 0), _store(group)
        ranks = [rank for rank in range(group.size) if rank != group.rank and store.check([_key(number, rank)])]
        calls = {rank: _text(json.loads(store.get(_key(number, rank)))) for rank in ranks}
    except RuntimeError:  # the store has died with its rank
        return ""
    return "".join(f" Rank {rank} called {text}, and this rank did not." for rank, text in calls.items())


def _text(call: Mapping[str, Any]) -> str:
    arguments = ", ".join(f"{name}={value}" for name, value in call["arguments"].items() if value not in (None, "None"))
    return f"{call['operator']}({arguments})"


def _compare(operator: str, calls: list[dict[str, Any]]) -> None:
    for rank, call in enumerate(calls):
        if call["error"] is not None:
            message = f"{operator}: rank {rank} of the group raised: {call['error']}"
            raise ValueError(message) if call["is_value_error"] else RuntimeError(message)
    operators = [call["operator"] for call in calls]
    if len(set(operators)) > 1:
        raise ValueError(f"{operator}: expected the same call on every rank, got {_by_rank(operators)}")
    for name in {name: None for call in calls for name in call["arguments"]}:
        values = [str(call["arguments"].get(name)) for call in calls]
        if len(set(values)) > 1:
            raise ValueError(f"{operator}: expected the same {name} on every rank, got {_by_rank(values)}")


def _by_rank(values: list[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return " and ".join(f"{value} on rank{'s' * (len(of) > 1)} {', '.join(map(str, of))}" for value, of in ranks.items())
