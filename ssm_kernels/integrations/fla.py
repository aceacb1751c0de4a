"""A backend of flash-linear-attention (0.6): its functions of Gated DeltaNet and KDA on these operators.

FLA dispatches some of its functions to registered backends. :func:`register` adds one that serves ``chunk_gated_delta_rule``,
``chunk_kda`` and ``fused_recurrent_kda``, so that FLA's layers and models call it without a change of their code. Calls that
it does not serve, such as those with a ``cp_context`` or a ``beta`` of channels, go on to FLA's other backends and its Triton
kernels. FLA has no such place for its other functions: :mod:`ssm_kernels.compat.fla` has them by name.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from typing import Any

from ..compat import fla as _functions

__all__ = ["register", "unregister"]

NAME = "ssm_kernels"
# Before FLA's own backends, whose priority is 3 or more; those of other hardware have 0.
_PRIORITY = 1
_UNSERVED = {
    "chunk_gated_delta_rule": ("cp_context",),
    "chunk_kda": ("cp_context", "return_intermediate_states", "use_graph"),
    "fused_recurrent_kda_fwd": ("ssm_state_indices", "num_accepted_tokens", "out"),
}
_HOMES = {
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_kda": "fla.ops.kda",
    "fused_recurrent_kda_fwd": "fla.ops.kda.fused_recurrent",
}
_lock = threading.Lock()
_is_active = False
# The module fla.backends whose registry has the backend.
_registered: Any = None


def register() -> None:
    """Adds the backend to FLA's registry and enables it, in this process. Further calls do nothing.

    The environment variable ``FLA_SSM_KERNELS=0`` disables it, and ``FLA_DISABLE_BACKEND_DISPATCH=1`` all backends.

    Raises:
        ImportError: flash-linear-attention is not installed.
        RuntimeError: its version has no registry of backends: it is older than 0.6.

    Examples:
        >>> import ssm_kernels
        >>> ssm_kernels.integrations.fla.register()  # doctest: +SKIP
        >>> from fla.ops.kda import chunk_kda  # doctest: +SKIP
    """
    global _is_active, _registered
    backends = _backends()
    with _lock:
        # The import of FLA anew makes another registry.
        if backends is not _registered:
            _add(backends)
            _registered = backends
        _is_active = True


def unregister() -> None:
    """Disables the backend: FLA's functions take its own kernels again.

    Examples:
        >>> import ssm_kernels
        >>> ssm_kernels.integrations.fla.unregister()
    """
    global _is_active
    with _lock:
        _is_active = False


def _backends() -> Any:
    try:
        importlib.import_module("fla")
    except ModuleNotFoundError as error:
        if error.name != "fla":
            raise
        raise ImportError("ssm_kernels.integrations.fla: expected flash-linear-attention, which is not installed") from error
    try:
        return importlib.import_module("fla.backends")
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "ssm_kernels.integrations.fla: expected flash-linear-attention 0.6 or newer, which has a registry of backends"
        ) from error


def _add(backends: Any) -> None:
    functions = {name: getattr(importlib.import_module(home), name) for name, home in _HOMES.items()}
    signatures = {name: inspect.signature(function) for name, function in functions.items()}

    def by_name(function_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call of FLA's function, without those that take their default."""
        given = signatures[function_name].bind_partial(*args, **kwargs).arguments
        more = given.pop("kwargs", {})
        return given | more

    class Backend(backends.BaseBackend):
        backend_type = NAME
        package_name = NAME
        env_var = "FLA_SSM_KERNELS"
        priority = _PRIORITY

        def is_enabled(self) -> bool:
            return _is_active and bool(super().is_enabled())

        def verify(self, function_name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            if function_name not in _UNSERVED:
                return False, f"{NAME} has no {function_name}"
            given = by_name(function_name, args, kwargs)
            unserved = [name for name in _UNSERVED[function_name] if not (given.get(name) is None or given[name] is False)]
            if function_name == "fused_recurrent_kda_fwd":
                if given.get("inplace_final_state", True):
                    unserved.append("inplace_final_state")
                beta, v = given.get("beta"), given.get("v")
                if beta is not None and v is not None and beta.dim() == v.dim():
                    unserved.append("a beta of channels")
            return (False, f"{NAME} does not serve {', '.join(unserved)}") if unserved else (True, None)

        def chunk_gated_delta_rule(self, *args: Any, **kwargs: Any) -> Any:
            return _functions.chunk_gated_delta_rule(*args, **kwargs)

        def chunk_kda(self, *args: Any, **kwargs: Any) -> Any:
            return _functions.chunk_kda(*args, **kwargs)

        def fused_recurrent_kda_fwd(self, *args: Any, **kwargs: Any) -> Any:
            # By name: initial_state comes before scale here, and after it in fused_recurrent_kda.
            given = by_name("fused_recurrent_kda_fwd", args, kwargs)
            for name in ("inplace_final_state", *_UNSERVED["fused_recurrent_kda_fwd"]):
                given.pop(name, None)
            return _functions.fused_recurrent_kda(**given)

    for entry_point in ("gated_delta_rule", "kda", functions["chunk_kda"]):
        backends.register(entry_point)(Backend)
