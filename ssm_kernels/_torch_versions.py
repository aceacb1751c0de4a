"""Which versions of torch one build runs with. setup.py loads this file alone, without the package."""

from __future__ import annotations

import re

__all__ = ["release_of", "torch_pin"]


def _minor_version(torch_version: str) -> str | None:
    """``2.15`` of ``2.15.1+cu132``; None of a pre-release, whose interface changes from day to day."""
    released = re.match(r"(\d+\.\d+)(?:\.\d+)*(?=\+|$)", torch_version)
    return released and released[1]


def release_of(torch_version: str) -> str:
    """Equal for two versions of torch with the same interface: the minor version, or all of a pre-release."""
    return _minor_version(torch_version) or torch_version


def torch_pin(torch_version: str) -> str:
    """The requirement of a build with torch ``torch_version``: its minor version, or a pre-release exactly."""
    minor = _minor_version(torch_version)
    return f"torch=={minor}.*" if minor else f"torch=={torch_version.partition('+')[0]}"
