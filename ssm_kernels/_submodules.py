"""Submodules that are imported when they are first used, and ``dir()`` of a package without its internal names (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["public_names", "submodules_on_use"]


def public_names(package: str, *submodules: str) -> Callable[[], list[str]]:
    """A ``__dir__`` for the module ``package``: the names in its ``__all__``, ``submodules``, and the names that every module
    has, such as ``__doc__``."""

    def names() -> list[str]:
        module = vars(sys.modules[package])
        special = (name for name in module if name.startswith("__") and name.endswith("__"))
        return sorted({*module.get("__all__", ()), *submodules, *special})

    return names


def submodules_on_use(package: str, submodules: Sequence[str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for the module ``package`` that imports each of ``submodules`` when it is first used.

    It raises AttributeError where the import fails, as ``hasattr`` and the completion of names expect. The statement ``import``
    raises the ImportError itself.
    """

    def attribute(name: str) -> Any:
        module = sys.modules[package]
        if name not in submodules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=module)
        try:
            return importlib.import_module(f"{package}.{name}")
        except ImportError as error:
            raise AttributeError(f"{package}.{name} cannot be imported: {error}", name=name, obj=module) from error

    return attribute
