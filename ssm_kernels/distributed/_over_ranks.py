"""Functions over the ranks of a group from those of one process, whose arguments they have."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from .. import ops
from ..ops._recurrence_functions import define

__all__ = ["KEYWORD_SCANS", "define_over_ranks", "given_arguments", "over_ranks"]

# The scans whose arguments GroupOperators takes as they are, and the arguments that ranks do not take.
KEYWORD_SCANS = {
    "delta_rule_scan": ("states_at",),
    "mamba3_chunk_scan": ("reverse",),
    "mlstm_scan": ("seq_idx", "states_at"),
}
_PARAMETERS = {name: inspect.signature(getattr(ops, name)).parameters for name in KEYWORD_SCANS}
_DEFAULTS: dict[str, dict[str, Any]] = {
    name: {key: each.default for key, each in parameters.items() if key not in KEYWORD_SCANS[name]}
    for name, parameters in _PARAMETERS.items()
}
_POSITIONAL = {
    name: tuple(key for key, each in parameters.items() if each.kind is not each.KEYWORD_ONLY)
    for name, parameters in _PARAMETERS.items()
}


def given_arguments(name: str, positional: Iterable[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of one of ``KEYWORD_SCANS`` over ranks by name, in their order."""
    unknown = [key for key in keywords if key not in _DEFAULTS[name]]
    if unknown:
        raise TypeError(f"{name}: got an unexpected keyword argument {unknown[0]!r}")
    return _DEFAULTS[name] | dict(zip(_POSITIONAL[name], positional, strict=False)) | keywords


def over_ranks(local: inspect.Signature, without: Iterable[str] = ()) -> inspect.Signature:
    """The signature of a function over ranks."""
    more = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for key, annotation in (("group", "GroupLike"), ("exchange", "Exchange | None"))
    ]
    kept = [each for key, each in local.parameters.items() if key not in without]
    return local.replace(parameters=[*kept, *more], return_annotation="Any")


def define_over_ranks(
    name: str,
    module: str,
    local: inspect.Signature,
    doc: str,
    body: Iterable[str],
    *,
    without: Iterable[str] = (),
    **scope: Any,
) -> Any:
    """Compiles a function: see :func:`define`.

    Args:
        local: the signature of the function of one process.
        without: its arguments that ranks do not take.
    """
    return define(name, module, over_ranks(local, without), doc, body, **scope)
