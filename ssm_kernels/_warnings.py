"""Warnings at the line of the user's code."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

import torch

__all__ = ["warn"]

# contextlib runs the context managers of this package, and functools its decorators.
_INNER = ("ssm_kernels", "torch", "contextlib", "functools")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """``warnings.warn``, at the line that called PyTorch or this package, through however many of their frames.

    Filters by module and Python's rule to show a warning once a place thus apply to the user's module. Under ``torch.compile``,
    which cannot read frames, the place is the caller's.
    """
    frame = None if torch.compiler.is_compiling() else _user_frame(sys._getframe(1))
    if frame is None:
        warnings.warn(message, category, stacklevel=2)
        return
    module = str(frame.f_globals.get("__name__", "<unknown>"))
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def _user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _INNER:
            return frame
        frame = frame.f_back
    return None
