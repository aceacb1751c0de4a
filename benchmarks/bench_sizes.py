#!/usr/bin/env python3
"""Every operator and layer at awkward sizes on CUDA: forward and backward beside the neighbor's time, and beside mamba_ssm.

    python benchmarks/bench_sizes.py [--json FILE] [--only NAME ...] [--part I/N] [--append] [--without_peers] [--trials N]

``size_cases.py`` has the sizes. A size, its neighbor, each kernel that an option can force and mamba_ssm's kernel take turns.
Results and gradients are compared, bit for bit, with those of aligned copies of the same tensors. Exits with 1 if one is wrong.
The sweep can run in parts: ``--append`` keeps the rows of FILE that this run does not measure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median as median_of
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import peers, triton_kernels
from benchmarks.benchmark import PEER, Benchmark, Result, Run, Stopwatch, Turns, main, share_seconds, speedups
from benchmarks.harness import Stages
from benchmarks.size_cases import CHOICES, SizeCase, all_cases, stages_of, triton_call
from benchmarks.tables import DIRECTIONS, Column, Row, Table, cell, median, text

# The relative difference from the result of aligned copies beyond which a result is wrong.
WRONG = {"bfloat16": 1e-2, "float32": 1e-5}
# The names of figures, after the direction.
OVER_NEIGHBOR, OVER_PEER = "time over the neighbor's", f"speed-up over {PEER}"
OVER_BEST, OVER_FEW_COLUMNS = "time over the best kernel's", "time of an element over that of 2560 columns"
LIMIT, LEAST_SPEEDUP, LIMIT_OF_CHOICE = 1.25, 1.2, 1.1
FEW_COLUMNS, MANY_COLUMNS = 2560, 12288


def measure(cases: Sequence[SizeCase], run: Run) -> list[dict[str, Any]]:
    """The rows of a neighbor and of the sizes that have it."""
    turns, watch = Turns(run), Stopwatch()
    rows = [row_of(case, turns) for case in cases]
    watch.lap("rows")
    turns.measure(warm_code=True, cache_writes=None)
    share_seconds(rows, watch.lap("measured"))
    neighbors = {row["name"]: row for row in rows}
    for row in rows:
        row["ratios"] = {name: rounded(value) for name, value in ratios(row, neighbors.get(row["neighbor"])).items()}
    for row in rows:
        for who in row.keys() & {"ours", PEER, *CHOICES.get(row["operator"], ("", {}))[1]}:
            row[who] |= {what: short(row[who][what]) for what in DIRECTIONS if what in row[who]}
    return rows


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def short(timing: Mapping[str, float]) -> dict[str, float]:
    """Keeps only the figures of a timing that the tables show: a sweep has thousands of timings."""
    return {name: rounded(timing[name]) for name in ("median", "spread")}


def row_of(case: SizeCase, turns: Turns) -> dict[str, Any]:
    """The row without times, which follow when the contenders take their turns.

    An exception becomes a figure of the contender that raised it. One of ours makes the row wrong.
    """
    watch = Stopwatch()
    run, row = turns.run, {"name": case.name, **case.fields, "different_bits": {}, "wrong": [], "seconds": watch.laps}
    try:
        makers, row["different_bits"] = stages_of(case, run.device)
    except Exception as error:
        return row | {"ours": unsupported(error), "wrong": [words_of(error)]}
    row["wrong"] = [name for name, error in row["different_bits"].items() if not error <= WRONG[row["dtype"]]]
    watch.lap("tensors and bits")
    for who, make in makers.items():
        if who == PEER and run.without_peers:
            continue
        row[who] = {"recorded": False, "unsupported": None}
        try:
            stages = make()
            call_once(stages)
            turns.add(row[who], stages)
        except Exception as error:
            row[who] = unsupported(error)
            row["wrong"] += [words_of(error)] if who == "ours" else []
        watch.lap("mamba_ssm" if who == PEER else "first calls")
    return row


def call_once(stages: Mapping[str, Stages]) -> None:
    """The first call may refuse the tensors, and another library's kernels are compiled in it."""
    for of_one in stages.values():
        for stage in of_one:
            stage()


def words_of(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def unsupported(error: Exception) -> dict[str, Any]:
    return {"recorded": False, "unsupported": words_of(error)}


# ----- figures


def ratios(row: Row, neighbor: Row | None) -> dict[str, float]:
    """Our time over that at the neighbor's size, over that of the best kernel, and mamba_ssm's over ours, by direction."""
    found = {}
    kernels = CHOICES.get(row["operator"], ("", {}))[1]
    for what in DIRECTIONS:
        ours = median(row.get("ours"), what)
        if ours is None:
            continue
        others = {
            f"{what}, {OVER_NEIGHBOR}": None if neighbor is None or neighbor is row else median(neighbor.get("ours"), what),
            f"{what}, {OVER_BEST}": min(filter(None, (median(row.get(who), what) for who in ("ours", *kernels))))
            if kernels
            else None,
        }
        found |= {name: ours / other for name, other in others.items() if other}
    return found | speedups(row, {PEER: PEER})


def element_time(row: Row | None, what: str) -> float | None:
    seconds = median((row or {}).get("ours"), what)
    return None if seconds is None or row is None else seconds / (row["sizes"]["R"] * row["sizes"]["C"])


def figures(row: Row, result: Result) -> dict[str, float]:
    """The ratios, and for many columns of a norm the time of an element over that of few."""
    found = dict(row["ratios"])
    if row["sizes"].get("C") == MANY_COLUMNS and "R" in row["sizes"]:
        narrow = [
            other
            for other in result["rows"]
            if all(other[key] == row[key] for key in ("operator", "dtype")) and other["sizes"] == {"R": 8192, "C": FEW_COLUMNS}
        ]
        for what in DIRECTIONS if narrow else ():
            wide, few = element_time(row, what), element_time(narrow[0], what)
            if wide and few:
                found[f"{what}, {OVER_FEW_COLUMNS}"] = wide / few
    return found


# ----- tables


def groups_of(rows: Sequence[Row], *keys: str) -> dict[tuple[str, ...], list[Row]]:
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def summary(rows: Sequence[Row], name: str, worst: Callable[[Sequence[float]], float], keys: Sequence[str]) -> list[Row]:
    """For each group of rows the worst and the median figure of both directions, and the row of the worst one."""
    found = []
    for group, of_group in groups_of(rows, *keys).items():
        line: dict[str, Any] = dict(zip(keys, group, strict=True))
        every = [
            (row["ratios"][f"{what}, {name}"], row["name"])
            for what in DIRECTIONS
            for row in of_group
            if f"{what}, {name}" in row["ratios"]
        ]
        if not every:
            continue
        for what in DIRECTIONS:
            values = [row["ratios"][f"{what}, {name}"] for row in of_group if f"{what}, {name}" in row["ratios"]]
            line[what] = {"worst": worst(values), "median": median_of(values), "sizes": len(values)} if values else {}
        extreme = worst([value for value, _ in every])
        found.append(line | {"sizes": max(line[what].get("sizes", 0) for what in DIRECTIONS), "at": dict(every)[extreme]})
    return found


def summary_columns(keys: Sequence[str]) -> list[Column]:
    def of(what: str, which: str) -> Column:
        return Column(f"{what}, {which}", lambda row: f"{row[what][which]:.2f}" if row[what] else "")

    columns = [text(key) for key in keys] + [text("sizes")]
    columns += [of(what, which) for what in DIRECTIONS for which in ("worst", "median")]
    return [*columns, text("worst at", "at")]


def far(row: Row, name: str, is_far: Callable[[float], bool]) -> bool:
    return any(is_far(value) for figure, value in row["ratios"].items() if figure.endswith(name))


def ratio_column(what: str, name: str, heading: str) -> Column:
    def of_row(row: Row) -> str:
        found = row["ratios"].get(f"{what}, {name}")
        return "" if found is None else f"{found:.2f}"

    return Column(heading, of_row)


def time_columns(name: str, who: Callable[[Row], Row | None], heading: str) -> list[Column]:
    columns = []
    for what in DIRECTIONS:
        columns += [
            Column(what, lambda row, what=what: cell(row.get("ours"), what, 1e-6, 1, spread=True)),
            Column(heading, lambda row, what=what: cell(who(row), what, 1e-6, 1)),
            ratio_column(what, name, "ratio"),
        ]
    return columns


def tables(result: Result) -> list[Table]:
    rows = [row for row in result["rows"] if "ratios" in row]
    named = {row["name"]: row for row in rows}

    def neighbor(row: Row) -> Row | None:
        return named.get(row["neighbor"], {}).get("ours")

    def best(row: Row) -> Row | None:
        return {
            what: min(
                (row[who][what] for who in ("ours", *CHOICES[row["operator"]][1]) if what in row.get(who, {})),
                key=lambda time: time["median"],
            )
            for what in DIRECTIONS
            if what in row["ours"]
        }

    def table(title: str, name: str, is_far: Callable[[float], bool], who: Callable[[Row], Row | None], heading: str) -> Table:
        columns = [text("size", "name"), *time_columns(name, who, heading)]
        return Table(title, columns, [row for row in rows if far(row, name, is_far)])

    keys, by_operator = ("operator", "kind", "dtype"), ("operator", "dtype")
    wide = [
        {
            "name": row["name"],
            "ratios": {name: value for name, value in figures(row, result).items() if name.endswith(OVER_FEW_COLUMNS)},
        }
        for row in rows
        if row["sizes"].get("C") == MANY_COLUMNS and "R" in row["sizes"]
    ]
    bits = [
        {"name": row["name"], "results": ", ".join(f"{name} ({error:.0e})" for name, error in row["different_bits"].items())}
        for row in rows
        if row["different_bits"]
    ]
    return [
        Table("time over the neighbor's", summary_columns(keys), summary(rows, OVER_NEIGHBOR, max, keys), left=3),
        table("sizes above 1.25, microseconds", OVER_NEIGHBOR, lambda ratio: ratio > LIMIT, neighbor, "neighbor"),
        Table("speed-up over mamba_ssm", summary_columns(keys), summary(rows, OVER_PEER, min, keys), left=3),
        table("sizes below 1.2, microseconds", OVER_PEER, lambda ratio: ratio < LEAST_SPEEDUP, lambda row: row.get(PEER), PEER),
        Table("time over the best kernel's", summary_columns(by_operator), summary(rows, OVER_BEST, max, by_operator), left=2),
        table("choices above 1.1, microseconds", OVER_BEST, lambda ratio: ratio > LIMIT_OF_CHOICE, best, "best"),
        Table(
            "12,288 columns over 2,560",
            [text("size", "name"), *(ratio_column(what, OVER_FEW_COLUMNS, what) for what in DIRECTIONS)],
            wide,
        ),
        Table(
            "other bits than aligned copies",
            [text("size", "name"), text("results and their relative differences", "results")],
            bits,
            left=2,
        ),
        Table("not measured", [text("size", "name"), text("because of", "why")], refusals(rows), left=2),
    ]


def refusals(rows: Sequence[Row]) -> list[Row]:
    """The contenders that raised, with the number of sizes of each message."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        for who in ("ours", PEER):
            if why := (row.get(who) or {}).get("unsupported"):
                found.setdefault((row["operator"], f"{who}: {why}"), []).append(row)
    return [
        {"name": f"{operator}, {len(of_one)} sizes, such as {of_one[0]['name']}", "why": why}
        for (operator, why), of_one in found.items()
    ]


# ----- the program


def part(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"expected I/N with 1 <= I <= N, got {text!r}")
    return int(index), int(count)


def cases(options: argparse.Namespace) -> list[SizeCase]:
    """Sizes of one neighbor stay together; every part has some of every operator."""
    index, count = getattr(options, "part", None) or (1, 1)
    every = all_cases()
    position = {turns: at for at, turns in enumerate(dict.fromkeys(case.turns for case in every))}
    return [case for case in every if position[case.turns] % count == index - 1]


def context(run: Run) -> dict[str, Any]:
    triton_kernels.tune(once=True)
    found = peers.operator("selective_scan")
    return {"peer": peers.described(found, "causal-conv1d") if found else "not installed"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", type=part, metavar="I/N", help="the I-th of N parts of the sweep")


BENCHMARK = Benchmark(
    "sizes",
    cases,
    tables,
    figures,
    measure,
    trials=10,
    warmup=2,
    context=context,
    add_options=add_options,
    appends=True,
    leaves_out_peers=True,
    triton_call=triton_call,
    tunes_once=True,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
