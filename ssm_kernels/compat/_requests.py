"""The account of :func:`ssm_kernels.compat.served`: which names programs asked for, and what they got.

Clients often catch the ImportError of a name that they miss and go on in slower code of their own, so the requests are recorded
where they arrive: :class:`RecordedModule` sees imports and attributes, the finder of :mod:`ssm_kernels.compat` missing modules.
"""

from __future__ import annotations

import dataclasses
import difflib
import dis
import importlib.util
import sys
from collections.abc import Iterable
from types import FrameType, ModuleType
from typing import Any

__all__ = [
    "NOT_INSTALLED",
    "RecordedModule",
    "Request",
    "Served",
    "earlier",
    "forget",
    "nearest_first",
    "record",
    "record_earlier",
    "requests",
]


@dataclasses.dataclass(frozen=True)
class Request:
    """A name that a program asked for.

    Attributes:
        name: a module, or a module and a name in it, with dots.
        by: the module that asked, such as ``"models.mixer"``.
        place: file and line of the first such request.
        status: ``"served"``: a working module or name of this package; ``"elsewhere"``: another package answered, because the
            name is not among the installed parts; ``"missing"``: an error, or a name that raises one when it is used.
        answer: what the program got.

    Examples:
        >>> import ssm_kernels
        >>> with ssm_kernels.compat.installed():
        ...     from causal_conv1d import causal_conv1d_fn
        >>> account = ssm_kernels.compat.served()
        >>> account.requests[-1].name, account.requests[-1].status
        ('causal_conv1d.causal_conv1d_fn', 'served')
    """

    name: str
    by: str
    place: str
    status: str
    answer: str

    def __str__(self) -> str:
        return f"{self.status:9}  {self.name}: {self.answer}; asked by {self.by} ({self.place})"


@dataclasses.dataclass(frozen=True)
class Served:
    """The requests since the modules were installed, and their answers. ``print`` shows them as lines.

    Attributes:
        installed: the parts that are installed now.
        requests: one for each name and file that asked for it, in the order of the first request.
        earlier: one for each name that a module, imported before the installation, has None for: it caught an ImportError.
        hidden: packages of the installed parts' names that imports do not find until ``uninstall``, such as a project's own
            copy of ``mamba_ssm``, with their files.

    Examples:
        >>> import ssm_kernels
        >>> with ssm_kernels.compat.installed():
        ...     from causal_conv1d import causal_conv1d_fn
        >>> account = ssm_kernels.compat.served()
        >>> account.installed  # now
        ()
        >>> len(account.requests)
        2
    """

    installed: tuple[str, ...]
    requests: tuple[Request, ...]
    hidden: tuple[tuple[str, str], ...] = ()
    earlier: tuple[Request, ...] = ()

    @property
    def missing(self) -> tuple[Request, ...]:
        """The requests that nothing answered, earlier ones first; a client may have gone on without these names."""
        return *self.earlier, *(request for request in self.requests if request.status == "missing")

    def __str__(self) -> str:
        state = f"installed: {', '.join(self.installed)}" if self.installed else "nothing installed"
        asked = [*self.earlier, *self.requests]
        lines = [f"ssm_kernels.compat: {state}; {len(asked)} names asked for, {len(self.missing)} missing"]
        lines += [f"  hidden     {name}: {file}" for name, file in self.hidden]
        lines += [f"  {request}" for request in asked]
        return "\n".join(lines)


NOT_INSTALLED = "not among the installed parts, so left to other packages"

# By name, asking module and file. Python's dicts are safe to write from several threads.
_requests: dict[tuple[str, str, str], Request] = {}
_earlier: list[Request] = []


def forget() -> None:
    """Begins a new account."""
    _requests.clear()
    _earlier.clear()


def record_earlier(name: str, module: ModuleType) -> None:
    """Adds a name that ``module`` has None for since an import before the installation."""
    file = getattr(module, "__file__", None) or "no file"
    _earlier.append(Request(name, module.__name__, file, "missing", "None since an import before install()"))


def earlier() -> tuple[Request, ...]:
    """The names that modules have None for since an import before the installation."""
    return tuple(_earlier)


def requests() -> tuple[Request, ...]:
    """All requests of the account, with what other packages have answered by now."""
    return tuple(_answered_elsewhere(request) for request in _requests.copy().values())


def _answered_elsewhere(request: Request) -> Request:
    module = sys.modules.get(request.name)
    if request.answer != NOT_INSTALLED or module is None:
        return request
    return dataclasses.replace(request, status="elsewhere", answer=f"module {getattr(module, '__file__', None)}")


def record(name: str, status: str, answer: str) -> None:
    """Adds a request of the code that called this package or the import system."""
    frame = _client(sys._getframe(1))
    if frame is None:
        return
    by, file = str(frame.f_globals.get("__name__", "?")), frame.f_code.co_filename
    known = _requests.get((name, by, file))
    if known is None or known.answer != answer:
        _requests[name, by, file] = Request(name, by, f"{file}:{frame.f_lineno}", status, answer)


_IMPORT_FILES = {importlib.util.__file__, importlib.__file__, __file__}


def _client(frame: FrameType | None) -> FrameType | None:
    """The first frame outside the import system and the modules of this file and of the finder."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith("<frozen importlib") or file in _IMPORT_FILES or _is_finder(frame)):
            return frame
        frame = frame.f_back
    return None


def _is_finder(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "ssm_kernels.compat"


_IMPORT_NAME = dis.opmap["IMPORT_NAME"]


def _is_import(frame: FrameType) -> bool:
    """Whether an import reads ``__spec__``, and not a tool that looks through all modules, as ``inspect`` does."""
    file = frame.f_code.co_filename
    if file.startswith("<frozen importlib") or file in _IMPORT_FILES:
        return True
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _IMPORT_NAME


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """``known`` names, those that resemble ``name`` most first."""
    return sorted(known, key=lambda other: -difflib.SequenceMatcher(None, name, other).ratio())


class RecordedModule(ModuleType):
    """A module that records who imports it and which of its names are asked for.

    The import system reads ``__spec__`` of a module in ``sys.modules`` at each import, in the frame of the importing code.
    """

    def __getattribute__(self, name: str) -> Any:
        if name[:2] == "__" and name != "__spec__":
            return ModuleType.__getattribute__(self, name)
        own: dict[str, Any] = ModuleType.__getattribute__(self, "__dict__")
        module = own.get("__name__", "")
        if name == "__spec__":
            if _is_import(sys._getframe(1)):
                record(module, "served", "module of ssm_kernels.compat")
            return own[name]
        # A call such as selective_scan_cuda.fwd(...) in a model's forward is recorded once for each place.
        place = name, id(sys._getframe(1).f_code)
        seen = own.setdefault("__seen__", set())
        if place in seen and name in own:
            return own[name]
        try:
            value = ModuleType.__getattribute__(self, name)
        except AttributeError:
            record(f"{module}.{name}", "missing", "no such name")
            raise
        if name in own:
            seen.add(place)
        if not isinstance(value, RecordedModule):
            record(f"{module}.{name}", *_describe(value))
        return value


def _describe(value: Any) -> tuple[str, str]:
    """The status of a name, and what it is."""
    place = f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', type(value).__name__)}"
    if place.startswith("ssm_kernels.compat.unserved."):
        return "missing", f"{place}, which raises an error when it is used"
    return "served", place
