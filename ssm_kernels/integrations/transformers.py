"""The models of ``transformers`` on these kernels: :func:`patch`, :func:`unpatch` and the context manager :func:`patched`.

A modeling module of transformers calls its scan, convolution and decoding steps through functions of the module, whose
fallbacks are loops in PyTorch. :func:`patch` assigns functions on these kernels to those names: in modules that are imported
already and, by an import hook, in modules that follow. Models, weights, caches and results keep their form.

transformers 5.17 and newer marks the functions with a decorator, by which :func:`patch` finds them; in 4.57 the names say what
they are. Mixers of Mamba's kind get another ``forward`` too (``_transformers_mixers``).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ._transformers_functions import (
    DELTA_RULES,
    FUSED,
    KERNELS,
    Function,
    make_causal_conv1d_fn,
    make_causal_conv1d_fn_of_delta_rules,
    make_causal_conv1d_fn_of_mamba,
    make_causal_conv1d_update,
)
from ._transformers_mixers import DT_PROJ, forward_457, forward_with_dt_proj, mixers_457, mixers_that_read_dt_proj
from ._transformers_packing import (
    PACKING,
    forward_that_checks_packing,
    forward_that_refuses_packing,
    models_that_drop_packing,
    models_with_attention,
)
from ._transformers_xlstm import MLSTM, backends_of_xlstm, forward_of_backend

__all__ = ["Served", "patch", "patched", "served", "unpatch"]

# Modeling files of transformers, and those that it downloads with a checkpoint (trust_remote_code).
_MODELING = re.compile(r"(transformers\.models\.\w+|transformers_modules\..+)\.modeling_\w+")
_ABSENT = object()


@dataclass(frozen=True)
class Served:
    """The functions that run on these kernels, by module. ``print`` shows them as lines.

    Attributes:
        version: of transformers.
        active: whether models that are imported from now on are served too.
        modules: the names that were assigned in each imported module, with the kernel that each calls.

    Examples:
        >>> import ssm_kernels
        >>> integration = ssm_kernels.integrations.transformers
        >>> report = integration.served()
        >>> report.active
        False
    """

    version: str
    active: bool
    modules: Mapping[str, Mapping[str, str]]

    def __str__(self) -> str:
        state = "patched" if self.active else "not patched"
        lines = [f"transformers {self.version}: {state}, {len(self.modules)} imported modules served"]
        lines += [f"  {module}: {', '.join(names)}" for module, names in sorted(self.modules.items())]
        return "\n".join(lines)


def patch() -> Served:
    """Runs the models of transformers on these kernels, on CPU and CUDA; models that exist already included.

    Serves the scan, the convolution and the decoding steps of Mamba, Mamba2, FalconMamba, Bamba, Jamba, Zamba, Zamba2,
    NemotronH, FalconH1 and GraniteMoeHybrid; the delta rule and the convolution of Qwen3-Next, Qwen3.5, Qwen3.5-MoE,
    Qwen4-Exp, OLMo-Hybrid, LaraMini, Kimi-Linear, GLM5-Next and BailingHybrid; the matrix memory of xLSTM; and the
    convolution of all other models that call ``causal_conv1d_fn`` and ``causal_conv1d_update`` (LFM2, ...). A second call
    changes nothing.

    Training, padding, cached generation, ``torch.compile(fullgraph=True)`` and ``torch.export`` work. An exported model
    contains the operators of ``torch.ops.ssm_kernels``. Mixers of Mamba-2's kind, delta rules and convolutions take packed
    sequences, as ``seq_idx`` or, in one row, as ``cu_seqlens``, which delta rules read as ``cu_seq_lens_q``; models of Mamba's
    kind raise an error for them, because transformers does not pass them to their scan. Attention layers ignore all of these:
    they need ``position_ids`` that restart with each sequence, ``use_cache=False`` and no ``attention_mask``, and those of
    GraniteMoeHybrid FlashAttention. A patched model raises a ValueError where its attention would mix the sequences.

    xLSTM trains and generates at any length and in each of its modes; heads with more than 256 channels of a query keep the
    model's own functions, and so do the layers of the package ``xlstm``, which transformers takes where it is installed.

    Adapters on ``dt_proj``, quantized layers in its place and hooks on it act and train. A plain layer with hooks of accelerate
    is not called, because the mixer runs those.

    With transformers 4.57 the fast path of each mixer runs on CPU too, except that of FalconH1, which is for CUDA only. A
    Qwen3-Next model must be made after this call, because its layers keep the functions.

    Returns:
        what is served now; :func:`served` also shows models that are imported later.

    Raises:
        ImportError: transformers is not installed.
        RuntimeError: its version is not served: older than 4.57, or 5.0 to 5.16.

    Examples:
        >>> import ssm_kernels
        >>> integration = ssm_kernels.integrations.transformers
        >>> integration.patch().active  # the models that are imported now and later run on these kernels
        True
        >>> integration.unpatch().active
        False
    """
    with _lock:
        _state.hold(patch)
        return served()


def unpatch() -> Served:
    """Restores what :func:`patch` replaced. Names that others have assigned since keep what those assigned.

    While a block of :func:`patched` runs, in any thread, the models stay patched until it ends.

    Examples:
        >>> import ssm_kernels
        >>> integration = ssm_kernels.integrations.transformers
        >>> report = integration.patch()
        >>> integration.unpatch().active
        False
    """
    with _lock:
        _state.release(patch)
        return served()


@contextmanager
def patched() -> Iterator[Served]:
    """:func:`patch` for a ``with`` block. Patches are counted: models stay patched while any block is open in any thread, or
    until :func:`unpatch` after :func:`patch`.

    Examples:
        >>> import ssm_kernels
        >>> integration = ssm_kernels.integrations.transformers
        >>> with integration.patched() as report:
        ...     print(report.active)
        True
        >>> integration.served().active
        False
    """
    holder = object()
    with _lock:
        _state.hold(holder)
        result = served()
    try:
        yield result
    finally:
        with _lock:
            _state.release(holder)


def served() -> Served:
    """Lists the functions that run on these kernels now.

    Examples:
        >>> import ssm_kernels
        >>> integration = ssm_kernels.integrations.transformers
        >>> report = integration.served()
        >>> report.active, dict(report.modules)
        (False, {})
    """
    with _lock:
        modules: dict[str, dict[str, str]] = {}
        for place in _state.places:
            if place.kernel not in (*FUSED, DT_PROJ, PACKING):
                modules.setdefault(place.name, {})[place.attribute] = place.kernel
        return Served(_state.version, _state.active, modules)


# ---- Which names of a module are replaced by what.


def _decorated_name(value: object) -> str | None:
    """The name of the kernel that a function stands for, by transformers' decorator."""
    # With the package kernels the decorated function is a module that has the name.
    name = getattr(value, "kernel_layer_name", None)
    code, cells = getattr(value, "__code__", None), getattr(value, "__closure__", None)
    if name is None and hasattr(value, "__wrapped__") and code is not None and cells and "func_name" in code.co_freevars:
        name = cells[code.co_freevars.index("func_name")].cell_contents
    return name if isinstance(name, str) else None


def _replacements(module: ModuleType) -> dict[str, tuple[str, object]]:
    """The kernels' names and the functions on them, by the names in a modeling module of transformers 5.17 and newer."""
    names = {
        attribute: name
        for attribute, value in list(vars(module).items())
        if callable(value) and (name := _decorated_name(value)) in KERNELS
    }
    has_delta_rules = any(name in DELTA_RULES for name in names.values())
    found: dict[str, tuple[str, object]] = {}
    for attribute, name in names.items():
        assert name is not None
        make = KERNELS[name]
        if name == "causal_conv1d_fn" and "selective_scan_fn" in names.values():
            make = make_causal_conv1d_fn_of_mamba
        elif name == "causal_conv1d_fn" and has_delta_rules:
            make = make_causal_conv1d_fn_of_delta_rules
        found[attribute] = (name, make(getattr(module, attribute)))
    return found


def _no_original(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the fused functions of mamba_ssm are not served: transformers' mixers run on the parts")


def _replacements_457(module: ModuleType) -> dict[str, tuple[str, object]]:
    """As :func:`_replacements` for transformers 4.57: functions that are None or absent, and what says whether they are."""
    # Some modules define a function only if its package is installed.
    called = {name for fast in mixers_457(module).values() for name in fast.__code__.co_names}
    names = [name for name in KERNELS if name in vars(module) or name in called]
    found: dict[str, tuple[str, object]] = {
        name: (name, _no_original if name in FUSED else KERNELS[name](_no_original)) for name in names
    }
    if "_causal_conv1d_cache" in vars(module):
        conv = make_causal_conv1d_update(_no_original), make_causal_conv1d_fn(_no_original)
        found["_causal_conv1d_cache"] = ("causal_conv1d_fn", conv)
    if found and "is_fast_path_available" in vars(module):
        found["is_fast_path_available"] = ("flag", True)
    return found


# ---- The state of the patch.


@dataclass(frozen=True)
class _Place:
    """A name that was assigned: ``owner`` is a module or a mixer class in it."""

    owner: Any
    name: str
    attribute: str
    kernel: str
    original: object
    ours: object

    def restore(self) -> None:
        if vars(self.owner).get(self.attribute, _ABSENT) is not self.ours:
            return
        if self.original is _ABSENT:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.original)


class _State:
    def __init__(self) -> None:
        self.active = False
        self.version = "not imported"
        self.is_457 = False
        self.places: list[_Place] = []
        self.hook = _Hook()
        # The holders that keep the models patched: the function patch(), and every open block of patched().
        self.holders: set[object] = set()

    def hold(self, holder: object) -> None:
        self._check_version()
        if not self.active:
            try:
                self._start()
            except BaseException:
                self._stop()
                raise
        self.holders.add(holder)

    def release(self, holder: object) -> None:
        self.holders.discard(holder)
        if self.active and not self.holders:
            self._stop()

    def _start(self) -> None:
        self.active = True
        sys.meta_path.insert(0, self.hook)
        for name, module in list(sys.modules.items()):
            if module is not None and _MODELING.fullmatch(name):
                self.serve(module)
        self._assign_copies()

    def _stop(self) -> None:
        self.active = False
        sys.meta_path.remove(self.hook)
        for place in reversed(self.places):
            place.restore()
        # Names that were copied from a served module since.
        originals = {id(place.ours): place for place in self.places if callable(place.ours)}
        self.places.clear()
        for owner, attribute, value in _globals(originals):
            setattr(owner, attribute, originals[id(value)].original)

    def serve(self, module: ModuleType) -> None:
        """Assigns the functions to the names of a module that is imported; all of them or, on an error, none."""
        found = _replacements_457(module) if self.is_457 else _replacements(module)
        forwards: dict[str, tuple[str, Function]] = {}
        if self.is_457:
            for name, fast in mixers_457(module).items():
                # FalconH1's enters the scope of a CUDA device.
                ours = forward_457(getattr(module, name).forward, fast, on_cpu="FalconH1" not in name)
                forwards[name] = ("cuda_kernels_forward", ours)
        elif any(kernel == "selective_scan_fn" for kernel, _ in found.values()):
            for name, forward in mixers_that_read_dt_proj(module).items():
                forwards[name] = (DT_PROJ, forward_with_dt_proj(forward))
        for name, forward in backends_of_xlstm(module).items():
            forwards[name] = (MLSTM, forward_of_backend(forward))
        kernels = {kernel for kernel, _ in found.values()}
        has_packing, has_delta_rules = "mamba_chunk_scan_combined" in kernels, not kernels.isdisjoint(DELTA_RULES)
        if has_packing or has_delta_rules:
            packings = ("cu_seq_lens_q",) if has_delta_rules else ()
            for name, forward in models_with_attention(module).items():
                forwards[name] = (PACKING, forward_that_checks_packing(forward, *packings))
        if has_packing or "selective_scan_fn" in kernels:
            for name, forward in models_that_drop_packing(module, has_packing).items():
                forwards[name] = (PACKING, forward_that_refuses_packing(forward))
        for attribute, (kernel, function) in found.items():
            self._assign(module, module.__name__, attribute, kernel, function)
        for name, (kernel, forward) in forwards.items():
            self._assign(getattr(module, name), f"{module.__name__}.{name}", "forward", kernel, forward)

    def _assign(self, owner: Any, name: str, attribute: str, kernel: str, ours: object) -> None:
        self.places.append(_Place(owner, name, attribute, kernel, vars(owner).get(attribute, _ABSENT), ours))
        setattr(owner, attribute, ours)

    def _assign_copies(self) -> None:
        """Assigns to the names that other modules imported from a modeling module."""
        originals = {id(place.original): place for place in self.places if callable(place.original)}
        for owner, attribute, value in _globals(originals):
            place = originals[id(value)]
            self._assign(owner, owner.__name__, attribute, place.kernel, place.ours)

    def _check_version(self) -> None:
        try:
            transformers = importlib.import_module("transformers")
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise
            raise ImportError("ssm_kernels.integrations.transformers: expected transformers, which is not installed") from error
        self.version = transformers.__version__
        major, minor = (int(part) for part in self.version.split(".")[:2])
        self.is_457 = (major, minor) == (4, 57)
        hub = None if self.is_457 else importlib.import_module("transformers.integrations.hub_kernels")
        if not self.is_457 and not hasattr(hub, "use_kernel_func_from_hub_with_fallback"):
            raise RuntimeError(
                "ssm_kernels.integrations.transformers: expected transformers 5.17 or newer, or 4.57, got "
                f"{self.version}, whose models find their kernels in other ways"
            )


def _globals(of: Mapping[int, object]) -> list[tuple[ModuleType, str, object]]:
    """The globals of all modules that are one of the objects with these ids."""
    return [
        (module, name, value)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if id(value) in of
    ]


class _Hook(importlib.abc.MetaPathFinder):
    """Serves each modeling module after its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _MODELING.fullmatch(fullname):
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """A module's own loader, and then :meth:`_State.serve`. The module keeps no trace of it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        """The module's own loader serves other methods that callers of ``find_spec`` use, such as ``get_source``."""
        if name.startswith("__"):  # copy and pickle ask before there is a loader
            raise AttributeError(name)
        return getattr(self.loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        with _lock:
            if _state.active:
                _state.serve(module)


_lock = threading.RLock()
_state = _State()
