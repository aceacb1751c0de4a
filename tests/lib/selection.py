"""The tests that a run leaves out: exhaustive grids and calls for compute-sanitizer, unless ``-m`` names their mark, and the
other shares of ``--part i/n``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

ONLY_IF_NAMED = ("exhaustive", "sanitizer")


def share(text: str) -> tuple[int, int]:
    """The numbers of ``--part i/n``."""
    try:
        part, parts = map(int, text.split("/"))
    except ValueError:
        part, parts = 0, 0
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"expected --part i/n with 1 <= i <= n, got {text}")
    return part, parts


def _deselect(config: pytest.Config, items: list[pytest.Item], keep: Callable[[pytest.Item], bool]) -> None:
    others = [item for item in items if not keep(item)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = filter(keep, items)


def select_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    for mark in ONLY_IF_NAMED:
        if mark not in config.option.markexpr:
            _deselect(config, items, lambda item, mark=mark: item.get_closest_marker(mark) is None)
    if config.option.part is not None:
        part, parts = share(config.option.part)
        # By the name alone, so that every worker and every run chooses the same.
        _deselect(config, items, lambda item: zlib.crc32(item.nodeid.encode()) % parts == part - 1)
