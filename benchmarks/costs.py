"""Computes the cost of each discretization relative to zoh from the benchmarks' JSON files.

``benchmarks/report.py`` writes the result into ``docs/discretizations.md``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.labels import label

Result = dict[str, Any]

BEGIN, END = "<!-- costs: written by benchmarks/report.py -->", "<!-- end of costs -->"
TRUNCATIONS = ("highorder", "poly", "rk4")


class Cost(NamedTuple):
    """Seconds of every method in one measurement.

    Attributes:
        scan: a whole sequence, not a step of decoding.
    """

    machine: str
    what: str
    scan: bool
    seconds: dict[str, float]

    def over(self, method: str, other: str) -> float:
        return self.seconds[method] / self.seconds[other]


def _of_cuda(result: Result, machine: str) -> Iterator[Cost]:
    rows = {row["name"]: row for row in result["rows"]}
    others = [row for row in result["rows"] if row["discretization"] != "zoh"]
    for case in dict.fromkeys(row["name"].removesuffix(f" {row['discretization']}") for row in others):
        same = [rows[case], *(row for row in others if row["name"] == f"{case} {row['discretization']}")]
        for what in ("forward", "backward"):
            seconds = {row["discretization"]: row["ours"][what]["median"] for row in same}
            yield Cost(machine, f"{what}, {case}", True, seconds)


def _of_cpu(result: Result, machine: str) -> Iterator[Cost]:
    settings = result["settings"]
    case = f"{settings['dtype']} B{settings['batch']} D{settings['dim']} L{settings['seqlen']} N{settings['dstate']}"
    machine = f"{machine}, {result['machine']['threads']} threads"
    for what, key in (("forward", "kernel_forward"), ("forward + backward", "kernel_both")):
        seconds = {method: row[key]["median"] for method, row in result["methods"].items()}
        yield Cost(machine, f"{what}, {case}", True, seconds)


def _of_steps(result: Result, machine: str) -> Iterator[Cost]:
    cases: dict[tuple[str, str], dict[str, float]] = {}
    for row in result["rows"]:
        cases.setdefault((row["sizes"], row["dtypes"]), {})[row["discretization"]] = row.get("ours", row)["graph"]["median"]
    for (sizes, dtypes), seconds in cases.items():
        if len(seconds) > 1:
            yield Cost(machine, f"decoding step, {dtypes} {sizes}", False, seconds)


_READERS = {"selective_scan": _of_cuda, "selective_scan_cpu": _of_cpu, "selective_state_update": _of_steps}


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"


def costs_block(results: Sequence[Result]) -> str:
    """The sentences and the table, in Markdown, from the results of all benchmarks that compare discretizations."""
    by_name = sorted(
        (result for result in results if result["benchmark"] in _READERS), key=lambda r: list(_READERS).index(r["benchmark"])
    )
    costs = [
        cost
        for result in by_name
        for cost in _READERS[result["benchmark"]](result, result["machine"].get("gpu") or result["machine"]["cpu"])
    ]
    scans, steps = ([cost for cost in costs if cost.scan is scan] for scan in (True, False))
    over_zoh = _range([cost.over("zoh_exact", "zoh") for cost in scans])
    over_truncations = _range([cost.over("zoh_exact", other) for cost in scans for other in TRUNCATIONS])
    sentences = [
        f"A scan with `zoh_exact` (`foh`) takes {over_zoh} times as long as with `zoh`, and {over_truncations} times as "
        "long as with `highorder`, `poly` or `rk4`."
    ]
    if steps:
        sentences.append(
            f"A step of decoding with `zoh_exact` takes {_range([cost.over('zoh_exact', 'zoh') for cost in steps])} times as "
            "long as with `zoh`."
        )
    methods = [method for method in scans[0].seconds if method != "zoh"]
    lines = ["| time over `zoh`'s | " + " | ".join(f"`{label(method)}`" for method in methods) + " |"]
    lines.append("|---|" + "---:|" * len(methods))
    for cost in costs:
        ratios = [f"{cost.over(method, 'zoh'):.2f}" for method in methods]
        lines.append(f"| {cost.machine}: {cost.what} | {' | '.join(ratios)} |")
    return "\n".join([" ".join(sentences), "", *lines])


def replace_costs(page: str, results: Sequence[Result]) -> str:
    """The page with the block between its two markers written anew.

    Raises:
        ValueError: the markers are not there once each.
    """
    pattern = f"{re.escape(BEGIN)}\n.*?{re.escape(END)}"
    if len(re.findall(pattern, page, flags=re.DOTALL)) != 1:
        raise ValueError(f"expected one block between {BEGIN!r} and {END!r}")
    block = f"{BEGIN}\n{costs_block(results)}\n{END}"
    return re.sub(pattern, lambda _: block, page, flags=re.DOTALL)
