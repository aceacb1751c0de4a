"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["table"]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first ``left`` columns are aligned to the left, the others to the right."""
    lines = [header, ["---"] * left + ["---:"] * (len(header) - left), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
