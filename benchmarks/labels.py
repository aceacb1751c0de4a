"""Names of the discretizations in tables and plots."""

from __future__ import annotations

# ssm_kernels.reference.ALIASES by canonical name: the reports are written where torch may be missing.
ALIASES = {"zoh_exact": "foh"}


def label(method: str) -> str:
    """The discretization's name with its alias, such as ``"zoh_exact (foh)"``; another name as it is."""
    return f"{method} ({ALIASES[method]})" if method in ALIASES else method
