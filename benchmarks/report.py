#!/usr/bin/env python3
"""Turns the JSON files of the benchmarks into one page per GPU or CPU: docs/benchmarks/<name>.md.

python benchmarks/report.py FILE.json [FILE.json ...] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first ``left`` columns are aligned to the left, the others to the right."""
    lines = [header, ["---"] * left + ["---:"] * (len(header) - left), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}"


def state_update(result: Result) -> str:
    rows = []
    for row in result["rows"]:
        graph, copy, peer = row["graph"]["median"], row["copy_graph"]["median"], row.get("peer")
        rows.append(
            [
                row["sizes"],
                row["dtypes"],
                row["discretization"],
                f"{microseconds(graph)} ± {100 * row['graph']['spread']:.0f} %",
                f"{row['bytes'] / graph / 1e9:.0f}",
                microseconds(copy),
                f"{graph / copy:.2f}",
                microseconds(peer["graph"]["median"]) if peer and peer["graph"] else "",
                f"{peer['graph']['median'] / graph:.2f}" if peer and peer["graph"] else "",
                microseconds(row["call"]),
                microseconds(row["copy_call"]),
                microseconds(peer["call"]) + (" (recorded)" if peer["recorded"] else "") if peer else "",
                f"{peer['call'] / row['call']:.2f}" if peer else "",
            ]
        )
    header = ["sizes", "x / state", "method", "graph", "GB/s", "graph, copy", "× copy", "graph, mamba_ssm", "speed-up"]
    header += ["call", "call, copy", "call, mamba_ssm", "speed-up"]
    host = ", ".join(f"{who} {microseconds(seconds)} µs" for who, seconds in result["host_seconds"].items())
    return f"""## selective_state_update

Microseconds for one decoding step with D, z, dt_bias and softplus; with heads (H, headdim P), A, dt, D and dt_bias are one
number per head. *Graph*: a CUDA graph of steps on different tensors, so many that the second-level cache holds none of them for
long. *Call*: one call between two events, after the cache was overwritten. *Copy*: of a tensor as large as the state, the least
that a step can take. GB/s counts every tensor once and the state twice. mamba_ssm's columns are its Triton kernel
({result["peer"]}), *speed-up* that over ours; outside a graph its calls are bound by their launches from Python.
{result["settings"]["trials"]} replays per graph; median, ± half the distance
from the 20th to the 80th percentile. Every case was compared with the float64 reference in the same run.

{table(header, rows, left=3)}

Host time of one call from Python: {host}.
"""


def selective_scan_cpu(result: Result) -> str:
    rows = []
    for method, row in result["methods"].items():
        cells = [method]
        for what, ratio in (("forward", "ratio_forward"), ("both", "ratio_forward_backward")):
            for who in ("kernel", "loop"):
                timing = row[f"{who}_{what}"]
                cells.append(f"{timing['median'] * 1e3:.2f} ± {100 * timing['spread']:.0f} %")
            cells.append(f"{row[ratio]:.1f}")
        rows.append(cells)
    header = ["method", "forward", "forward, loop", "ratio", "forward + backward", "forward + backward, loop", "ratio"]
    settings = result["settings"]
    return f"""## selective_scan on the CPU

Milliseconds at batch {settings["batch"]}, dim {settings["dim"]}, seqlen {settings["seqlen"]}, dstate {settings["dstate"]},
{settings["dtype"]}, {result["machine"]["threads"]} threads, {result["machine"]["cpu_capability"]}; *loop* is the same scan as a
loop over time in PyTorch (`ssm_kernels.reference`), in turns with the kernel. {settings["trials"]} trials; median, ± half the
distance from the 20th to the 80th percentile.

{table(header, rows)}
"""


SECTIONS: dict[str, Callable[[Result], str]] = {
    "selective_scan_cpu": selective_scan_cpu,
    "selective_state_update": state_update,
}


def name_of(machine: dict[str, Any]) -> str:
    return machine.get("gpu") or machine["cpu"]


def page(results: Sequence[Result]) -> str:
    machine = results[0]["machine"]
    names = {
        "gpu": "GPU",
        "driver": "driver",
        "cuda": "CUDA",
        "torch": "torch",
        "python": "Python",
        "ssm_kernels": "ssm_kernels",
        "cpu": "CPU",
        "system": "system",
    }
    rows = [[name, str(machine[key])] for key, name in names.items() if key in machine]
    sections = "\n".join(SECTIONS[result["benchmark"]](result) for result in results)
    return f"""# Benchmarks on {name_of(machine)}

Written by `benchmarks/report.py` from the measurements beside it; not edited by hand.

{table(["machine", ""], rows, left=2)}

{sections}"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "benchmarks", metavar="FOLDER"
    )
    options = parser.parse_args(arguments)
    by_machine = defaultdict(list)
    for path in options.files:
        try:
            result = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            parser.error(f"{path}: {error}")
        if result.get("benchmark") not in SECTIONS or "machine" not in result:
            parser.error(f"{path}: not the result of a benchmark that this script knows ({', '.join(SECTIONS)})")
        by_machine[name_of(result["machine"])].append(result)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, results in by_machine.items():
        target = options.output / f"{re.sub('[^A-Za-z0-9]+', '_', name).strip('_')}.md"
        target.write_text(page(results))
        print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
