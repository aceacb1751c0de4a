"""The choice of tests in selection.py: exhaustive grids, and shares of the suite."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from selection import select_tests


def selected(names: list[str], *, markexpr: str = "", part: str | None = None) -> list[str]:
    """The names that remain of tests, of which those with "grid" in their names are exhaustive."""
    marks = {"exhaustive": "grid", "sanitizer": "sanitizer"}

    def mark(name: str) -> Any:
        return lambda asked: asked if marks[asked] in name else None

    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    config = SimpleNamespace(
        option=SimpleNamespace(markexpr=markexpr, part=part),
        hook=hook,
    )
    items: list[Any] = [SimpleNamespace(nodeid=name, get_closest_marker=mark(name)) for name in names]
    select_tests(config, items)
    return [item.nodeid for item in items]


def test_exhaustive_grids_run_only_where_they_are_asked_for():
    assert selected(["one", "grid"]) == ["one"] == selected(["one", "grid"], markexpr="not cuda")
    assert selected(["one", "grid"], markexpr="exhaustive") == ["one", "grid"]


def test_calls_for_the_sanitizer_run_only_where_they_are_asked_for():
    assert selected(["one", "sanitizer"]) == ["one"] == selected(["one", "sanitizer"], markexpr="cuda")
    assert selected(["one", "sanitizer"], markexpr="sanitizer") == ["one", "sanitizer"]


def test_parts_share_all_tests():
    names = [f"test_{i}" for i in range(100)]
    parts = [selected(names, part=f"{i}/3") for i in (1, 2, 3)]
    assert sorted(itertools.chain(*parts)) == sorted(names) and all(20 < len(part) < 50 for part in parts)


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "a/b"])
def test_part_names_a_share_that_exists(part):
    with pytest.raises(pytest.UsageError, match=f"expected --part i/n with 1 <= i <= n, got {part}"):
        selected(["one"], part=part)
