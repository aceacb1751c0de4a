"""Calls whose rows start at any element of 16 bytes, for every operator: tests and sanitizer runs share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import operator_spec
from operators import OPERATORS

Axes = Mapping[str, Sequence[int]]


class OffsetCase(NamedTuple):
    """Options of ``make_inputs``, and the axes of a row of each input and result."""

    operator: str
    options: Mapping[str, Any]
    axes: Axes


def rows(operator: str, names: str, *axes: int, **options: Any) -> OffsetCase:
    return OffsetCase(operator, *operator_spec.rows(names, *axes, **options))


OFFSET_CASES = {
    f"{operator}, {name}" if name else operator.name: OffsetCase(operator.name, *case)
    for operator in OPERATORS.values()
    for name, case in operator.offsets.items()
}
