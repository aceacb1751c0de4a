"""The tables of discretizations, which C++ holds: ``csrc/common/discretization.h``; and names with a number."""

from __future__ import annotations

import re
from typing import TypeVar, cast

import torch

from .choices import DiscretizationName, TwoSampleDiscretizationName

__all__ = [
    "delta_A_discretizations",
    "discretization_aliases",
    "discretization_names",
    "discretizations",
    "is_discretization",
    "is_rule",
    "is_two_sample",
    "rule_of_decay",
    "split_name",
    "takes_delta_A",
    "two_sample_discretizations",
    "with_alpha",
]

discretizations: tuple[DiscretizationName, ...] = tuple(torch.ops.ssm_kernels._discretizations())
discretization_aliases: dict[str, str] = torch.ops.ssm_kernels._discretization_aliases()
two_sample_discretizations: tuple[TwoSampleDiscretizationName, ...] = tuple(torch.ops.ssm_kernels._two_sample_discretizations())
# The rules that take a step of its own for A (csrc/common/separate_step.h).
delta_A_discretizations = ("zoh", "zoh_exact", "poly", "highorder", "rk4", "dirac", "exp_trapezoidal")
_WITH_ALPHA = ("gbt", "gbt_two_sample")
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
    if stem == "gbt":
        return alpha is not None and 0 <= alpha <= 1
    return stem == name and name in discretization_names


def is_two_sample(name: str) -> bool:
    """Whether it names a rule that reads two input samples, with or without its number."""
    return isinstance(name, str) and name.partition("(")[0] in two_sample_discretizations


_Name = TypeVar("_Name", bound=str)


def is_rule(name: str) -> bool:
    """Whether it names a rule by itself, of one input sample or of two."""
    stem, alpha = split_name(name)
    if not is_two_sample(name):
        return is_discretization(name)
    return (alpha is not None and 0 <= alpha <= 1) if stem == "gbt_two_sample" else stem == name


def takes_delta_A(name: str) -> bool:
    """Whether a rule, by its name or an alias, takes a step of its own for A."""
    return discretization_aliases.get(name, name) in delta_A_discretizations


def rule_of_decay(name: str) -> DiscretizationName:
    """The rule with one input sample whose decay a rule with two has."""
    stem, alpha = split_name(name)
    if stem == "gbt_two_sample":
        return cast(DiscretizationName, f"gbt({alpha!r})")
    return "bilinear" if stem == "trapezoidal" else "zoh"


def with_alpha(operator: str, discretization: _Name, alpha: float | None) -> _Name:
    """The name that operators take: ``"gbt(0.7)"`` for ``"gbt"`` and 0.7.

    Raises:
        ValueError: ``alpha`` is given with a rule that has none, or is not from 0 to 1, or is missing.
    """
    if alpha is None:
        if discretization in _WITH_ALPHA:
            raise ValueError(f"{operator}: expected discretization {discretization!r} with alpha, a number from 0 to 1")
        return discretization
    if discretization not in _WITH_ALPHA:
        takes_both = operator.startswith("selective_")
        names = "'gbt' or 'gbt_two_sample'" if takes_both else "'gbt'"
        raise ValueError(f"{operator}: expected alpha with discretization {names} only, got {discretization!r}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"{operator}: expected alpha from 0 to 1, got {alpha}")
    return cast(_Name, f"{discretization}({float(alpha)!r})")
