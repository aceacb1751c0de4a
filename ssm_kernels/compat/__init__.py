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

from .._submodules import public_names
from ._modules import MODULES, VERSIONS

__all__ = ["install", "installed", "uninstall"]

__dir__ = public_names(__name__, "causal_conv1d", "layer_norm", "norms", "selective_scan", "ssd")

_lock = threading.RLock()
# The modules in sys.modules that install() made, by name; empty if they are not installed.
_installed: dict[str, ModuleType] = {}
# The holders that keep the modules installed: install(), under its own name, and every open context of installed().
_holders: set[object] = set()


def install() -> None:
    """Makes the names of ``mamba_ssm`` and ``causal_conv1d`` importable from this package, in this process.

    The modules are those of ``ssm_kernels.compat._modules``: real submodules with a ``__spec__``; the packages have a
    ``__version__``, which ``importlib.metadata.version`` also returns. Code that imports them afterwards receives the functions
    of this package; packages of these names that are installed but not imported yet are hidden until :func:`uninstall`. Other
    processes are not affected. A second call changes nothing.

    Raises:
        RuntimeError: ``mamba_ssm`` or ``causal_conv1d``, or a submodule, was imported from elsewhere already, or a None in
            ``sys.modules`` blocks its import. Nothing is changed.
    """
    _hold("install")


def uninstall() -> None:
    """Takes back what :func:`install` did: later imports find the packages that are installed, if there are any.

    While a context of :func:`installed` is open, in any thread, the modules stay until it ends. Functions and classes that were
    imported before stay as they are. Without :func:`install` the call changes nothing, and a module that something else has put
    in the place of an installed one stays there.
    """
    _release("install")


@contextmanager
def installed() -> Iterator[None]:
    """A context in which the modules are installed. They stay until the last context, of all threads, has ended, and as long
    as :func:`install` asks for.

    Raises:
        RuntimeError: as :func:`install`.
    """
    holder = object()
    _hold(holder)
    try:
        yield
    finally:
        _release(holder)


def _hold(holder: object) -> None:
    with _lock:
        if not _installed:
            _add_modules()
        _holders.add(holder)


def _release(holder: object) -> None:
    with _lock:
        _holders.discard(holder)
        if not _holders:
            _remove_modules()


def _add_modules() -> None:
    _check_no_other_package()
    modules = {name: _make_module(name, exports) for name, exports in MODULES.items()}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    _installed.update(modules)
    sys.modules.update(modules)
    sys.meta_path.insert(0, _FINDER)


def _remove_modules() -> None:
    for name, module in _installed.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _installed.clear()
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)


def _check_no_other_package() -> None:
    others = {name: module for name, module in [*sys.modules.items()] if name.partition(".")[0] in VERSIONS}
    imported = sorted(name for name, module in others.items() if module is not None)
    packages = ", ".join(VERSIONS)
    if imported:
        raise RuntimeError(
            f"ssm_kernels.compat.install: expected none of {packages} to be imported, got {', '.join(imported)} from another "
            "package: call install() before the first import"
        )
    if others:
        raise RuntimeError(
            f"ssm_kernels.compat.install: expected none of {packages} to be blocked, got None in sys.modules for "
            f"{', '.join(sorted(others))}: delete the entries before install()"
        )


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
    """Finds and loads the installed modules and their versions. The import of a submodule that the table does not have raises
    an error with the table; ``importlib.util.find_spec`` returns None for it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in _installed:
            return None
        if fullname in _installed:
            return _installed[fullname].__spec__
        if not _is_import():
            return None
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


def _is_import() -> bool:
    """Whether an import, and not ``importlib.util.find_spec``, asks the finder that calls this function.

    The import system and ``find_spec`` call a finder with the same arguments. ``find_spec`` needs None for a missing module,
    which the import system turns into a message without the list of modules. This function tells them apart by the name of the
    import system's function two calls above the finder. If a Python names it otherwise, imports raise the plain message.
    """
    asking = sys._getframe(2).f_back
    return asking is not None and asking.f_code.co_name == "_find_and_load_unlocked"


_FINDER = _Finder()
