"""The modules of ``mamba_ssm`` and ``causal_conv1d``, with the operators and layers of this package.

``install()`` makes them importable in the running process, so that code which imports these packages, or the extension modules
below them, runs unchanged on the operators of this one, on CUDA and on the CPU:

    import ssm_kernels.compat

    ssm_kernels.compat.install()
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

``install(only=[...])`` installs some of them beside a project's own copy of the others, and ``served()`` says which names were
asked for and what answered. ``python -m ssm_kernels.compat script.py arguments ...`` runs a script like that without a change.
The functions are also members of ``ssm_kernels.compat.selective_scan``, ``.ssd``, ``.mamba3``, ``.causal_conv1d``, ``.norms``
and ``.layer_norm``.
"""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import importlib.util
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .._submodules import public_names
from .._warnings import warn
from . import fla as fla
from ._modules import FUNCTIONS, MODULES, PARTS, VERSIONS
from ._requests import (
    NOT_INSTALLED,
    RecordedModule,
    Request,
    Served,
    earlier,
    forget,
    nearest_first,
    record,
    record_earlier,
    requests,
)

__all__ = ["Request", "Served", "install", "installed", "served", "uninstall"]

__dir__ = public_names(__name__, "causal_conv1d", "fla", "layer_norm", "mamba3", "norms", "selective_scan", "ssd")

_lock = threading.RLock()
# The modules in sys.modules that install() made, by name; empty if they are not installed.
_installed: dict[str, ModuleType] = {}
# The holders that keep the modules installed: install(), under its own name, and every open context of installed().
_holders: set[object] = set()
# The packages that the installed modules hide, by name, with their files.
_hidden: dict[str, str] = {}


def install(only: Sequence[str] | None = None) -> None:
    """Makes the names of ``mamba_ssm`` and ``causal_conv1d`` importable from this package, in this process.

    The modules are those of ``ssm_kernels.compat._modules``: real submodules with a ``__spec__``; the packages have a
    ``__version__``, which ``importlib.metadata.version`` also returns. Code that imports them afterwards receives the functions
    of this package; packages of these names that are installed but not imported yet are hidden until :func:`uninstall`. Other
    processes are not affected.

    Args:
        only: the parts to install, top-level modules: ``"mamba_ssm"``, ``"causal_conv1d"`` and the extension modules
            ``"selective_scan_cuda"``, ``"causal_conv1d_cuda"`` and, of VMamba, ``"selective_scan_cuda_core"``, ``_oflex``,
            ``_nrow`` and ``_ndstate``. All other names are left to other packages, such as a project's own copy of
            ``mamba_ssm``, which then calls the extension modules of this package. None: all parts.

    One selection holds in a process: a second call for the same parts changes nothing, and one for others raises an error.

    Warns:
        UserWarning: a module that was imported before has None in the place of a function or module of these parts. It caught
            an ImportError and goes on without it.

    Raises:
        RuntimeError: a part, or a submodule of it, was imported from elsewhere already, a None in ``sys.modules`` blocks its
            import, or other parts are installed. Nothing is changed.
        ValueError: ``only`` is empty or has an unknown name.
        TypeError: ``only`` is not a sequence of strings.

    Examples:
        >>> import ssm_kernels.compat
        >>> ssm_kernels.compat.install(only=["selective_scan_cuda", "causal_conv1d_cuda"])
        >>> import selective_scan_cuda
        >>> ssm_kernels.compat.served().requests[0].name
        'selective_scan_cuda'
        >>> ssm_kernels.compat.uninstall()
    """
    _hold("install", "install", _read_parts("install", only))


def uninstall() -> None:
    """Takes back what :func:`install` did: later imports find the packages that are installed, if there are any.

    While a context of :func:`installed` is open, in any thread, the modules stay until it ends. Functions and classes that were
    imported before stay as they are. Without :func:`install` the call changes nothing, and a module that something else has put
    in the place of an installed one stays there.

    Examples:
        >>> import sys
        >>> import ssm_kernels
        >>> ssm_kernels.compat.install()
        >>> import mamba_ssm
        >>> ssm_kernels.compat.uninstall()
        >>> "mamba_ssm" in sys.modules
        False
    """
    _release("install")


@contextmanager
def installed(only: Sequence[str] | None = None) -> Iterator[None]:
    """A context in which the modules are installed. They stay until the last context, of all threads, has ended, and as long
    as :func:`install` asks for.

    Args:
        only: as for :func:`install`. Contexts that are open at the same time need the same parts.

    Raises:
        RuntimeError, ValueError, TypeError: as :func:`install`.

    Examples:
        >>> import ssm_kernels
        >>> with ssm_kernels.compat.installed():
        ...     from causal_conv1d import causal_conv1d_fn
        >>> causal_conv1d_fn.__module__
        'ssm_kernels.compat.causal_conv1d'
    """
    holder = object()
    _hold(holder, "installed", _read_parts("installed", only))
    try:
        yield
    finally:
        _release(holder)


def served() -> Served:
    """Lists the names that programs have asked for since the modules were last installed, who asked, and what answered.

    The account holds every import of an installed module, every name read from one, and every module and name that was asked
    for and is not there, also those that a client catches and goes on without. A top-level module that is not among the
    installed parts is recorded too, and whether another package answered. What modules that were imported before have None for
    is apart, in ``earlier``. The account stays after :func:`uninstall`; the next installation begins a new one.

    Returns:
        the requests; ``missing`` has those that nothing answered, the earlier ones too. ``print(served())`` shows all as lines.

    Examples:
        >>> import ssm_kernels
        >>> with ssm_kernels.compat.installed():
        ...     from causal_conv1d import causal_conv1d_fn
        >>> account = ssm_kernels.compat.served()
        >>> [(request.name, request.status) for request in account.requests]
        [('causal_conv1d', 'served'), ('causal_conv1d.causal_conv1d_fn', 'served')]
    """
    with _lock:
        present = tuple(part for part in PARTS if part in _installed)
        return Served(present, requests(), tuple(_hidden.items()), earlier())


def _read_parts(call: str, only: Sequence[str] | None) -> tuple[str, ...]:
    if only is None:
        return PARTS
    name = f"ssm_kernels.compat.{call}"
    if isinstance(only, str):
        raise TypeError(f'{name}: expected only to be a list of strings or None, got the string "{only}": write ["{only}"]')
    if not isinstance(only, Iterable):
        raise TypeError(f"{name}: expected only to be a list of strings or None, got {type(only).__name__}")
    only = [*only]
    if not all(isinstance(part, str) for part in only):
        raise TypeError(f"{name}: expected only to be a list of strings, got {only}")
    if not only:
        raise ValueError(f"{name}: expected at least one part in only, got none; the parts are {', '.join(PARTS)}")
    for part in only:
        if part not in PARTS:
            whole = f"; {part} comes with the part {root}" if (root := part.partition(".")[0]) in PARTS else ""
            raise ValueError(
                f"{name}: expected parts out of {', '.join(nearest_first(part, PARTS))} in only, got {part}{whole}"
            )
    return tuple(part for part in PARTS if part in only)


def _hold(holder: object, call: str, parts: tuple[str, ...]) -> None:
    with _lock:
        present = tuple(part for part in PARTS if part in _installed)
        if not present:
            _add_modules(call, parts)
        elif present != parts:
            end = "call uninstall() first" if "install" in _holders else "end the contexts of installed() first"
            raise RuntimeError(
                f"ssm_kernels.compat.{call}: expected the parts that are installed already, {', '.join(present)}, got "
                f"{', '.join(parts)}: {end}, or name all parts in one call"
            )
        _holders.add(holder)


def _release(holder: object) -> None:
    with _lock:
        _holders.discard(holder)
        if not _holders:
            _remove_modules()


def _add_modules(call: str, parts: tuple[str, ...]) -> None:
    _check_no_other_package(call, parts)
    _hidden.update({part: file for part in parts if (file := _file_of(part)) is not None})
    modules = {name: _make_module(name, MODULES[name]) for name in MODULES if name.partition(".")[0] in parts}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    forget()
    _installed.update(modules)
    sys.modules.update(modules)
    sys.meta_path.insert(0, _FINDER)
    _report_clients_without(call, parts)


def _remove_modules() -> None:
    for name, module in _installed.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _installed.clear()
    _hidden.clear()
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)


def _file_of(name: str) -> str | None:
    """The file of a top-level module that imports would find now, without an import."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    return spec.origin or ", ".join(spec.submodule_search_locations or ()) or "no file"


def _check_no_other_package(call: str, parts: tuple[str, ...]) -> None:
    others = {name: module for name, module in [*sys.modules.items()] if name.partition(".")[0] in parts}
    imported = sorted(name for name, module in others.items() if module is not None)
    roots = {name.partition(".")[0] for name in others}
    present = ", ".join(part for part in parts if part in roots)
    rest = [part for part in parts if part not in roots]
    beside = f", or install the rest beside it with only={rest}" if rest else ""
    if imported:
        raise RuntimeError(
            f"ssm_kernels.compat.{call}: expected {present} not to be imported yet, got {', '.join(imported)} from another "
            f"package: call {call}() before the first import{beside}"
        )
    if others:
        raise RuntimeError(
            f"ssm_kernels.compat.{call}: expected {present} not to be blocked, got None in sys.modules for "
            f"{', '.join(sorted(others))}: delete the entries before {call}(){beside}"
        )


def _report_clients_without(call: str, parts: tuple[str, ...]) -> None:
    """Warns of modules that were imported before and have None in the place of what is installed now."""
    names = sorted({*parts, *(name for part in parts for name in FUNCTIONS.get(part, ()))})
    found: dict[str, list[str]] = {}
    for module in [*sys.modules.values()]:
        members = getattr(module, "__dict__", None)
        if type(members) is not dict or not isinstance(module, ModuleType):
            continue
        for name in [name for name in names if members.get(name, module) is None]:
            record_earlier(name, module)
            found.setdefault(module.__name__, []).append(name)
    if found:
        clients = "; ".join(f"{module} has None for {', '.join(missing)}" for module, missing in found.items())
        warn(
            f"ssm_kernels.compat.{call}: expected clients to be imported after {call}(), got some that go on without these "
            f"kernels: {clients}. Call {call}() before their first import",
        )


def _make_module(name: str, exports: dict[str, Any]) -> ModuleType:
    module = RecordedModule(name, f"``{name}`` as ssm_kernels.compat provides it.")
    own = module.__dict__
    is_package = any(other.startswith(name + ".") for other in MODULES)
    own["__spec__"] = ModuleSpec(name, _FINDER, origin=__file__, is_package=is_package)
    own["__package__"] = name if is_package else name.rpartition(".")[0]
    if is_package:
        own["__path__"] = []
    if name in VERSIONS:
        own["__version__"] = VERSIONS[name]
    own["__all__"] = sorted(exports)
    own.update(exports)
    has = sorted({*exports, *(other.rpartition(".")[2] for other in MODULES if other.rpartition(".")[0] == name)})

    def missing(attribute: str) -> Any:
        nearest = ", ".join(nearest_first(attribute, has))
        # The ImportError of `from module import name` drops the message below and shows the file.
        own["__file__"] = f"<ssm_kernels.compat, which has {nearest}>"
        raise AttributeError(
            f"{name} of ssm_kernels.compat has no {attribute}, it has {nearest}; ssm_kernels.compat.uninstall() gives way to "
            "the package itself",
            name=attribute,
            obj=module,
        )

    own["__getattr__"] = missing
    own["__file__"] = f"<ssm_kernels.compat, which has {', '.join(has)}>"
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
        root = fullname.partition(".")[0]
        if root not in _installed:
            if fullname in PARTS:
                record(fullname, "missing", NOT_INSTALLED)
            return None
        if fullname in _installed:
            return _installed[fullname].__spec__
        record(fullname, "missing", "no such module")
        if not _is_import():
            return None
        known = [name for name in MODULES if name.partition(".")[0] in _installed]
        raise ModuleNotFoundError(
            f"ssm_kernels.compat has no module {fullname}, it has {', '.join(nearest_first(fullname, known))}; "
            "ssm_kernels.compat.uninstall() gives way to the package itself",
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
        roots = [root for root in VERSIONS if root in _installed]
        return [_Distribution(root) for root in roots if name is None or name.lower().replace("-", "_") == root]


def _is_import() -> bool:
    """Whether an import, and not ``importlib.util.find_spec``, asks the finder that calls this function.

    The import system and ``find_spec`` call a finder with the same arguments. ``find_spec`` needs None for a missing module,
    which the import system turns into a message without the list of modules. This function tells them apart by the name of the
    import system's function two calls above the finder. If a Python names it otherwise, imports raise the plain message.
    """
    asking = sys._getframe(2).f_back
    return asking is not None and asking.f_code.co_name == "_find_and_load_unlocked"


_FINDER = _Finder()
