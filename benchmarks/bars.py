"""The bars of the benchmarks: ``bars.json`` has them, by benchmark, row and figure, each a pattern as ``fnmatch`` takes it.

A bar asks for a figure that is ``at_least`` or ``at_most`` a number, or both, and may name a ``goal`` beyond it. Of several
bars for one figure of a row the last one holds. Speed-ups are another's time over ours, all other ratios ours over another's;
times are in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.tables import Column, Table, text

Bars = Mapping[str, Mapping[str, Mapping[str, float]]]


def load(benchmark: str) -> Bars:
    """The bars of a benchmark, by row and figure."""
    return json.loads(Path(__file__).with_suffix(".json").read_text()).get(benchmark, {})


def judge(rows: Iterable[tuple[str, Mapping[str, float]]], bars: Bars) -> list[dict[str, Any]]:
    """Compares the figures of every row, given with its name, with their bars; what was not measured is not judged."""
    judged = []
    for row, figures in rows:
        for name, found in figures.items():
            matching = [
                bar
                for rows_held, bars_of_rows in bars.items()
                for figure, bar in bars_of_rows.items()
                if fnmatchcase(row, rows_held) and fnmatchcase(name, figure)
            ]
            if matching:
                judged.append({"row": row, "figure": name, "found": found, **_verdict(found, matching[-1])})
    return judged


def _verdict(found: float, bar: Mapping[str, float]) -> dict[str, Any]:
    at_least, at_most, goal = bar.get("at_least"), bar.get("at_most"), bar.get("goal")
    met = (at_least is None or found >= at_least) and (at_most is None or found <= at_most)
    reached = None if goal is None else found >= goal if at_most is None else found <= goal
    return {"bar": dict(bar), "met": met, "goal_met": reached}


def words(bar: Mapping[str, float]) -> str:
    signs = {"at_least": "≥", "at_most": "≤", "goal": "goal"}
    return ", ".join(f"{sign} {bar[name]:g}" for name, sign in signs.items() if name in bar)


def table(judged: Sequence[Mapping[str, Any]]) -> Table:
    """The figures, their bars, and whether they meet these."""
    verdicts = {True: "met", False: "missed", None: ""}
    columns = [
        text("row"),
        text("figure"),
        Column("found", lambda one: f"{one['found']:.3g}"),
        Column("bar", lambda one: words(one["bar"])),
        Column("", lambda one: verdicts[one["met"]]),
        Column("goal", lambda one: verdicts[one["goal_met"]]),
    ]
    return Table("bars", columns, judged, left=2)
