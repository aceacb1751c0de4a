"""Earlier paths of modules. Imports of these paths, and pickles that hold them, get the modules of today."""

from __future__ import annotations

import importlib
import sys

__all__ = ["EARLIER_MODULES", "register"]

EARLIER_MODULES = {
    "convolutions": "ops.convolution",
    "minimal_recurrences": "ops.recurrences",
    "norms": "ops.norm",
    "recurrence_steps": "ops.recurrences",
    "recurrences": "ops.recurrences",
    "reference_convolution": "reference.convolution",
    "reference_discretizations": "reference.discretizations",
    "reference_norms": "reference.norms",
    "reference_recurrences": "reference.recurrences",
    "reference_sequences": "reference.sequences",
    "reference_ssd": "reference.ssd",
    "reference_summaries": "reference.summaries",
    "ssd": "ops.ssd",
    "summaries": "ops.summaries",
}


def register(package: str) -> None:
    """Makes ``import package.earlier`` and the attribute ``earlier`` of ``package`` find the module at its path of today."""
    for earlier, path in EARLIER_MODULES.items():
        module = importlib.import_module(f"{package}.{path}")
        sys.modules[f"{package}.{earlier}"] = module
        setattr(sys.modules[package], earlier, module)
