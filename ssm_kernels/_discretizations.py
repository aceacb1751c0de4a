"""The tables of discretizations, which C++ holds: ``csrc/common/discretization.h``; and names with a number."""

from __future__ import annotations

import re
from typing import cast

import torch

from .choices import DiscretizationName

__all__ = [
    "discretization_aliases",
    "discretization_names",
    "discretizations",
    "is_discretization",
    "split_name",
    "with_alpha",
]

discretizations: tuple[DiscretizationName, ...] = tuple(torch.ops.ssm_kernels._discretizations())
discretization_aliases: dict[str, str] = torch.ops.ssm_kernels._discretization_aliases()
_WITH_ALPHA = ("gbt",)
_FURTHER: tuple[DiscretizationName, ...] = ("gbt", "dirac")
discretization_names: tuple[str, ...] = (*discretizations, *_FURTHER, *discretization_aliases)


def split_name(name: str) -> tuple[str, float | None]:
    """The rule and the number of a name: ``("gbt", 0.7)`` for ``"gbt(0.7)"``, ``("zoh", None)`` for ``"zoh"``."""
    matched = re.fullmatch(r"(\w+)\(([-+.0-9eE]+)\)", name)  # numbers that C++ reads, too
    if matched is None:
        return name, None
    try:
        return matched[1], float(matched[2])
    except ValueError:
        return name, None


def is_discretization(name: str) -> bool:
    """Whether ``discretization=`` takes the name by itself: the number of a rule with ``alpha`` is in it."""
    stem, alpha = split_name(name)
    if stem in _WITH_ALPHA:
        return alpha is not None and 0 <= alpha <= 1
    return stem == name and name in discretization_names


def with_alpha(operator: str, discretization: DiscretizationName, alpha: float | None) -> DiscretizationName:
    """The name that operators take: ``"gbt(0.7)"`` for ``"gbt"`` and 0.7.

    Raises:
        ValueError: ``alpha`` is given with a rule that has none, or is not from 0 to 1, or is missing.
    """
    if alpha is None:
        if discretization in _WITH_ALPHA:
            raise ValueError(f"{operator}: expected discretization {discretization!r} with alpha, a number from 0 to 1")
        return discretization
    if discretization not in _WITH_ALPHA:
        raise ValueError(f"{operator}: expected alpha with discretization 'gbt' only, got {discretization!r}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"{operator}: expected alpha from 0 to 1, got {alpha}")
    return cast(DiscretizationName, f"{discretization}({float(alpha)!r})")
