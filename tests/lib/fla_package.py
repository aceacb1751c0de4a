"""The import of flash-linear-attention for the tests of a file, and for no longer."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest


@contextlib.contextmanager
def transformers_without_fla() -> Iterator[None]:
    """Takes back what the import of FLA registers with transformers: its classes for "mamba", "mamba2" and other names."""
    tables = []
    for name in ("configuration_auto", "modeling_auto"):
        module = importlib.import_module(f"transformers.models.auto.{name}")
        tables += [table for table in vars(module).values() if isinstance(getattr(table, "_extra_content", None), dict)]
    before = [dict(table._extra_content) for table in tables]
    try:
        yield
    finally:
        for table, content in zip(tables, before, strict=True):
            table._extra_content.clear()
            table._extra_content.update(content)


@contextlib.contextmanager
def without(*roots: str) -> Iterator[None]:
    """Hides the packages that are imported already; modules of theirs that are imported meanwhile are forgotten at the end."""

    def of_roots() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in roots]

    hidden = {name: sys.modules.pop(name) for name in of_roots()}
    try:
        yield
    finally:
        for name in of_roots():
            del sys.modules[name]
        sys.modules.update(hidden)


def import_fla(*modules: str) -> list[ModuleType]:
    """Modules of FLA, for a block of ``without("fla")``; skips the tests where FLA cannot be imported."""
    for package in ("transformers", "einops", "triton"):
        pytest.importorskip(package, reason=f"flash-linear-attention needs {package}")
    if importlib.util.find_spec("fla") is None:
        pytest.skip("needs flash-linear-attention: the extra [clients]")
    with transformers_without_fla():
        try:
            return [importlib.import_module(name) for name in modules]
        except Exception as error:
            pytest.skip(f"flash-linear-attention cannot be imported here: {type(error).__name__}: {error}")


@contextlib.contextmanager
def blocked_fla() -> Iterator[None]:
    """Imports of FLA fail, as where it is not installed."""
    with without("fla"):
        sys.modules["fla"] = None  # type: ignore[assignment]
        yield
