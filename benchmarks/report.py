#!/usr/bin/env python3
"""Turns the JSON files of the benchmarks into one page per GPU or CPU, docs/benchmarks/<name>.md, and its figures.

    python benchmarks/report.py [FILE.json ...] [--output FOLDER] [--costs PAGE.md]

Without files, every JSON file in the folder is taken, and the costs in docs/discretizations.md are written anew from them. The
tables are those that the benchmarks print; the text around them is in benchmarks/page.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.costs import replace_costs
from benchmarks.tables import Column, Result, Table, markdown

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
TEMPLATES = dict(
    re.findall(r"^\[benchmark: (\w+)\]\n\n(.*?)\n*(?=\[benchmark: |\Z)", (HERE / "page.md").read_text(), re.M | re.S)
)
_FOUND = [importlib.import_module(f"benchmarks.{path.stem}").BENCHMARK for path in sorted(HERE.glob("bench_*.py"))]
# In the order of the page.
BENCHMARKS = {name: benchmark for name in TEMPLATES for benchmark in _FOUND if benchmark.name == name}
MACHINE = {
    "gpu": "GPU",
    "driver": "driver",
    "cuda": "CUDA",
    "torch": "torch",
    "python": "Python",
    "ssm_kernels": "ssm_kernels",
    "cpu": "CPU",
    "system": "system",
}
# How the names of the figures' files end.
FIGURES = {
    "selective_scan": "selective_scan_roofline",
    "linear_scan": "linear_scan_shares",
    "distributed": "distributed_scaling",
}


def section(result: Result) -> str:
    """The result's part of ``page.md``: an empty table is left out, and so is the paragraph before it."""
    tables = {table.title: table for table in BENCHMARKS[result["benchmark"]].tables(result)}
    blocks: list[str | Table] = []
    for block in TEMPLATES[result["benchmark"]].split("\n\n"):
        match = re.fullmatch(r"\[table: (.*)\]", block)
        if match is None:
            blocks.append(block)
        elif tables[match[1]].rows:
            blocks.append(tables[match[1]])
        else:
            blocks.pop()
    return "\n\n".join(markdown(block) if isinstance(block, Table) else filled(block.format(**result)) for block in blocks)


def filled(paragraph: str) -> str:
    return textwrap.fill(paragraph, 128, break_long_words=False, break_on_hyphens=False)


def page(results: Sequence[Result]) -> str:
    machines = [result["machine"] for result in results]
    # Measurements of different days may come from different versions.
    values = {key: dict.fromkeys(str(machine[key]) for machine in machines if key in machine) for key in MACHINE}
    rows = [{"name": MACHINE[key], "value": ", ".join(found)} for key, found in values.items() if found]
    columns = [Column("machine", lambda row: row["name"]), Column("", lambda row: row["value"])]
    introduction = f"""# Benchmarks on {name_of(machines[0])}

Written by `benchmarks/report.py` from the measurements beside it; not edited by hand."""
    return "\n\n".join([introduction, markdown(Table("machine", columns, rows, left=2)), *map(section, results)]) + "\n"


def name_of(machine: Mapping[str, Any]) -> str:
    return machine.get("gpu") or machine["cpu"]


def draw(result: Result, path: Path) -> None:
    from benchmarks import roofline  # here, because no other page needs matplotlib

    functions = {
        "selective_scan": roofline.draw,
        "linear_scan": roofline.draw_shares,
        "distributed": roofline.draw_scaling,
    }
    functions[result["benchmark"]](result, path)


def read(parser: argparse.ArgumentParser, path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        parser.error(f"{path}: {error}")
    if result.get("benchmark") not in BENCHMARKS or "machine" not in result:
        parser.error(f"{path}: not the result of a benchmark that this script knows ({', '.join(BENCHMARKS)})")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.json")
    parser.add_argument("--output", type=Path, default=DOCS / "benchmarks", metavar="FOLDER")
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="PAGE.md",
        help="a page with a block of costs to write anew (default: docs/discretizations.md, where no FILE.json is given)",
    )
    options = parser.parse_args(arguments)
    by_machine = defaultdict(list)
    for path in options.files or sorted(options.output.glob("*.json")):
        result = read(parser, path)
        by_machine[name_of(result["machine"])].append(result)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, results in by_machine.items():
        results.sort(key=lambda result: list(BENCHMARKS).index(result["benchmark"]))
        target = options.output / f"{re.sub('[^A-Za-z0-9]+', '_', name).strip('_')}.md"
        for result in results:
            if result["benchmark"] in FIGURES:
                result["figure"] = f"{target.stem}_{FIGURES[result['benchmark']]}.png"
                draw(result, options.output / result["figure"])
        target.write_text(page(results))
        print(target)
    costs = options.costs or (None if options.files else DOCS / "discretizations.md")
    if costs is not None:
        try:
            costs.write_text(replace_costs(costs.read_text(), [result for of_one in by_machine.values() for result in of_one]))
        except (OSError, ValueError) as error:
            parser.error(f"{costs}: {error}")
        print(costs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
