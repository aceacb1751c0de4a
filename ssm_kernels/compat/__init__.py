"""The modules ``mamba_ssm`` and ``causal_conv1d``, with the operators and layers of this package.

``install()`` makes them importable in the running process, so that code which imports these packages runs unchanged on the
operators of this one, on CUDA and on the CPU:

    import ssm_kernels.compat

    ssm_kernels.compat.install()
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

``python -m ssm_kernels.compat script.py arguments ...`` runs a script like that without a change. The functions are also
members of ``ssm_kernels.compat.selective_scan``, ``.ssd``, ``.causal_conv1d``, ``.norms`` and ``.layer_norm``.
"""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ._modules import MODULES, VERSIONS

__all__ = ["install", "installed", "uninstall"]

_lock = threading.RLock()
# The modules in sys.modules that install() made, by name; empty if they are not installed.
_installed: dict[str, ModuleType] = {}


def install() -> None:
    """Makes the names of ``mamba_ssm`` and ``causal_conv1d`` importable from this package, in this process.

    The modules are those of ``ssm_kernels.compat._modules``: real submodules with a ``__spec__``; the packages have a
    ``__version__``, which ``importlib.metadata.version`` also returns. Code that imports them afterwards receives the functions
    of this package; packages of these names that are installed but not imported yet are hidden until :func:`uninstall`. Other
    processes are not affected. A second call changes nothing.

    Raises:
        RuntimeError: ``mamba_ssm`` or ``causal_conv1d``, or a submodule, was imported from elsewhere already. Nothing is
            changed.
    """
    with _lock:
        if _installed:
            return
        foreign = sorted(name for name in sys.modules if name.partition(".")[0] in VERSIONS)
        if foreign:
            raise RuntimeError(
                f"ssm_kernels.compat.install: expected none of {', '.join(VERSIONS)} to be imported, got {', '.join(foreign)} "
                "from another package: call install() before the first import"
            )
        modules = {name: _make_module(name, exports) for name, exports in MODULES.items()}
        for name, module in modules.items():
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(modules[parent], child, module)
        _installed.update(modules)
        sys.modules.update(modules)
        sys.meta_path.insert(0, _FINDER)


def uninstall() -> None:
    """Takes back what :func:`install` did: later imports find the packages that are installed, if there are any.

    Functions and classes that were imported before stay as they are. Without :func:`install` the call changes nothing, and a
    module that something else has put in the place of an installed one stays there.
    """
    with _lock:
        for name, module in _installed.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        _installed.clear()
        if _FINDER in sys.meta_path:
            sys.meta_path.remove(_FINDER)


@contextmanager
def installed() -> Iterator[None]:
    """A context in which the modules are installed. Leaves them installed if they were at its beginning.

    Raises:
        RuntimeError: as :func:`install`.
    """
    with _lock:
        was_installed = bool(_installed)
        install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()


def _make_module(name: str, exports: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, f"``{name}`` as ssm_kernels.compat provides it.")
    is_package = any(other.startswith(name + ".") for other in MODULES)
    module.__spec__ = ModuleSpec(name, _FINDER, origin=__file__, is_package=is_package)
    module.__package__ = name if is_package else name.rpartition(".")[0]
    if is_package:
        module.__path__ = []
    if name in VERSIONS:
        module.__version__ = VERSIONS[name]  # type: ignore[attr-defined]
    module.__all__ = sorted(exports)  # type: ignore[attr-defined]
    module.__dict__.update(exports)
    has = ", ".join(sorted({*exports, *(other.rpartition(".")[2] for other in MODULES if other.rpartition(".")[0] == name)}))

    def missing(attribute: str) -> Any:
        raise AttributeError(
            f"{name} of ssm_kernels.compat has no {attribute}, it has {has}; ssm_kernels.compat.uninstall() gives way to the "
            "package itself",
            name=attribute,
            obj=module,
        )

    module.__getattr__ = missing  # type: ignore[method-assign]
    # The ImportError of `from module import name` drops the message above and shows the file.
    module.__file__ = f"<ssm_kernels.compat, which has {has}>"
    return module


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {VERSIONS[self._name]}\n"

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{self._name} of ssm_kernels.compat has no files, got {path}")


class _Finder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    """Finds and loads the installed modules and their versions. Raises for a submodule that the table does not have."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in _installed:
            return None
        if fullname in _installed:
            return _installed[fullname].__spec__
        raise ModuleNotFoundError(
            f"ssm_kernels.compat has no module {fullname}, it has {', '.join(MODULES)}; ssm_kernels.compat.uninstall() gives "
            "way to the package itself",
            name=fullname,
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _installed[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """The module is complete."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        name = None if context is None else context.name
        return [_Distribution(root) for root in VERSIONS if name is None or name.lower().replace("-", "_") == root]


_FINDER = _Finder()
