"""TorchScript: functions and layers refuse ``torch.jit.script``, and some of their arguments ``torch.jit.trace``."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from torch.jit._trace import is_tracing

__all__ = ["REFERENCE_LOOPS", "is_tracing", "refuse_script", "refuse_script_of", "refuse_tracing"]

REFERENCE_LOOPS = "the loops of ssm_kernels.reference over steps and sequences"

_Target = TypeVar("_Target", bound=Callable[..., Any])

# torch.jit.script calls it on functions and on each submodule of a module, before it reads any source.
_HOOK = "__prepare_scriptable__"


def refuse_script(target: _Target, name: str | None = None) -> _Target:
    """Decorator of a function or of a module's class: ``torch.jit.script`` raises one sentence that names it.

    Functions and modules that call it or contain it raise the same sentence. Nothing else reads the attribute that this sets.

    Args:
        name: of the function in the message, if it is not ``__name__``. The message for a module has the name of its class.
    """

    def refuse(layer: type | None = None) -> NoReturn:
        raise RuntimeError(
            f"{name or (layer or target).__name__}: torch.jit.script is not supported, and PyTorch has deprecated TorchScript; "
            "use torch.compile or torch.export"
        )

    setattr(target, _HOOK, classmethod(refuse) if isinstance(target, type) else refuse)
    return target


def refuse_script_of(module: str) -> None:
    """:func:`refuse_script` for the functions in ``__all__`` of a module that has no other decorator for them."""
    names = vars(sys.modules[module])
    for name in names["__all__"]:
        if isinstance(names[name], types.FunctionType):
            refuse_script(names[name])


def refuse_tracing(name: str, what: str) -> None:
    """Raises in ``torch.jit.trace``, which would keep as a constant what depends on sizes or values.

    Args:
        name: of the function or layer.
        what: it cannot be traced with.

    Raises:
        RuntimeError: a trace is being recorded.
    """
    if is_tracing():
        raise RuntimeError(f"{name}: torch.jit.trace does not support {what}; use torch.compile or torch.export")
