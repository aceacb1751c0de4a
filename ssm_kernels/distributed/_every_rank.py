"""``on_every_rank`` reports the error of one rank to the others of its group; ``operators_of`` makes the group's operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from ..choices import Exchange
from ..ops._arguments import argument_error, keyword_checks
from ._agreement import Agreement, calls_begun, report
from ._group import Group, GroupLike
from ._group_operators import GroupOperators

__all__ = ["on_every_rank", "operators_of"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def on_every_rank(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorator: the other ranks of the group get the error of a rank whose arguments are invalid, and do not wait for it."""
    check = keyword_checks(function)

    @functools.wraps(function)
    def operator(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        begun = calls_begun()
        try:
            check(kwargs)
            return function(*args, **kwargs)
        except Exception as error:
            if calls_begun() == begun:
                _tell_others(error, function, args, kwargs)
            raise

    return operator


def _tell_others(error: Exception, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        group = Group.of(kwargs.get("group"))
    except (RuntimeError, TypeError, ValueError):  # not a group of this process
        return
    is_of_types = isinstance(error, (AttributeError, RuntimeError, TypeError))
    named = argument_error(function, args, kwargs) if is_of_types else None
    report(group, function.__name__, error, said=None if named is None else str(named))


def operators_of(group: GroupLike | Group, exchange: Exchange | None, operator: str) -> GroupOperators:
    ranks = Group.of(group)
    return GroupOperators(ranks, Agreement(ranks), exchange, operator)
