#!/usr/bin/env python3
"""Turns the JSON files of the benchmarks into one page per GPU or CPU, docs/benchmarks/<name>.md, and its figures.

    python benchmarks/report.py [FILE.json ...] [--output FOLDER] [--costs PAGE.md]

Without files, every JSON file in the folder is taken, and the costs in docs/discretizations.md are written anew from them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.costs import replace_costs
from benchmarks.floors import floors
from benchmarks.labels import label
from benchmarks.markdown import table
from benchmarks.report_layers import layers

Result = dict[str, Any]
DOCS = Path(__file__).resolve().parents[1] / "docs"
DIRECTIONS = ("forward", "backward")
# What selective_scan's peak memory over mamba_ssm's is held to.
MEMORY_BAR = 1.0


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
                label(row["discretization"]),
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


def milliseconds(found: Result | None, what: str) -> str:
    if found is None or what not in found:
        return "unsupported" if found and found["unsupported"] else ""
    return f"{found[what]['median'] * 1e3:.3f}" + (" (recorded)" if found["recorded"] else "")


def verdict(row: Result, direction: str, *others: str) -> list[str]:
    """The ratio to the first of ``others`` that the row is held to, and what was asked of it."""
    for found in row["judged"]:
        if found["direction"] == direction and found["other"] in others:
            relation = {"mamba_ssm": "≥", "zoh": "≤", "L-contiguous": "within ×"}[found["other"]]
            asked = f"{relation} {found['bar']:g} {'met' if found['met'] else '**missed**'}"
            if found["goal"] is not None:
                asked += f", goal {found['goal']:g} {'met' if found['ratio'] >= found['goal'] else 'missed'}"
            return [f"{found['ratio']:.2f}", asked]
    return ["", ""]


def against_peer(rows: Sequence[Result]) -> str:
    lines = []
    for row in rows:
        peer = row.get("peer")
        if row["discretization"] != "zoh":
            continue
        line = [row["name"]]
        for what in ("forward", "training", "backward"):
            ours = row["ours"][what]
            line += [f"{ours['median'] * 1e3:.3f} ± {100 * ours['spread']:.0f} %", milliseconds(peer, what)]
            ratio = f"{peer[what]['median'] / ours['median']:.2f}" if peer and what in peer else ""
            line += [ratio] if what == "training" else [ratio, verdict(row, what, "mamba_ssm")[1]]
        lines.append(line)
    header = ["case", "forward", "mamba_ssm", "speed-up", "bar", "in training", "mamba_ssm", "speed-up"]
    return table([*header, "backward", "mamba_ssm", "speed-up", "bar"], lines)


def against_ours(rows: Sequence[Result]) -> str:
    lines = []
    for row in rows:
        if any(found["other"] != "mamba_ssm" for found in row["judged"]):
            others = [found["other"] for found in row["judged"] if found["other"] != "mamba_ssm"]
            line = [row["name"], others[0]]
            for direction in DIRECTIONS:
                line += [milliseconds(row["ours"], direction), *verdict(row, direction, *others)]
            lines.append(line)
    return table(["case", "against", "forward", "ratio", "bar", "backward", "ratio", "bar"], lines, left=2)


def against_floor(rows: Sequence[Result], rates: dict[str, float]) -> str:
    lines = []
    for row in rows:
        if row["discretization"] != "zoh":
            continue
        line = [row["name"]]
        for direction in DIRECTIONS:
            ours, floor = row["ours"][direction]["median"], floors(row, rates)[direction]
            bound = max(floor, key=floor.get)
            line += [f"{floor[bound] * 1e3:.3f}", bound, f"{ours / floor[bound]:.2f}"]
            line += [f"{row['bytes'][direction] / ours / 1e9:.0f}", f"{row['updates'] / ours / 1e12:.2f}"]
        lines.append(line)
    header = ["by", "× floor", "GB/s", "10¹² updates/s"]
    return table(["case", "floor, forward", *header, "floor, backward", *header], lines)


def memory(rows: Sequence[Result]) -> str:
    lines = []
    for row in rows:
        peer, elements = row.get("peer"), row["updates"] // row["dstate"]
        if row["discretization"] != "zoh" or row["ours"]["peak_bytes"] is None:
            continue
        peaks = [found and found["peak_bytes"] for found in (row["ours"], peer)]
        shares = [f"{peak / elements:.2f}" if peak else "" for peak in (*peaks, row["chunk_state_bytes"])]
        ratio = peaks[0] / peaks[1] if peaks[1] else None
        asked = "" if ratio is None else f"≤ {MEMORY_BAR:g} {'met' if ratio <= MEMORY_BAR else '**missed**'}"
        lines.append([row["name"], shares[0], shares[2], shares[1], "" if ratio is None else f"{ratio:.3f}", asked])
    return table(["case", "ours", "of which chunk states", "mamba_ssm", "ours / mamba_ssm", "bar"], lines)


def largest_errors(rows: Sequence[Result], key: str = "dtype") -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["errors"]))
    lines = []
    for value in dict.fromkeys(row[key] for row in rows):
        found = [row["errors"] for row in rows if row[key] == value]
        worst = {name: max((errors[name] for errors in found if name in errors), default=None) for name in names}
        lines.append([value, *("" if error is None else f"{error:.1e}" for error in worst.values())])
    return table([key, *names], lines)


def selective_scan(result: Result) -> str:
    rows = result["rows"]
    given = [
        f"{milliseconds(row['peer_given'], 'forward')} and {milliseconds(row['peer_given'], 'backward')} ({row['name']})"
        for row in rows
        if "forward" in row.get("peer_given", {})
    ]
    copies = f" Given D-contiguous tensors, which it copies, it takes {'; '.join(given)}." if given else ""
    refuses = any((row.get("peer") or {}).get("unsupported") for row in rows)
    unsupported = ' "unsupported": its kernel refuses the case.' if refuses else ""
    least = (
        f"""The floor is the largest of the times that memory traffic (every argument, result and gradient once), special
functions and instructions need at least, for zoh; `benchmarks/floors.py` has the formulas. GB/s is of that traffic, an
update one step of one state.

{against_floor(rows, result["rates"])}

"""
        if result["rates"]
        else ""
    )
    return f"""## selective_scan

Milliseconds of GPU time with D, delta_bias and softplus; B batch, D dim, L seqlen, N dstate, *z* the gate, G groups of B and C.
*Forward*: without gradients, saving nothing; the bars are for this one. *In training*: the forward that saves the states at the
chunk boundaries. *Backward*: `torch.autograd.grad` to every input. Between two events, after the second-level cache was
overwritten;
{result["settings"]["trials"]} trials; median, ± half the distance from the 20th to the 80th percentile. What is of one shape
was measured in turns. mamba_ssm's columns are its CUDA kernel ({result["peer"]}),
always in its own layout, L-contiguous; *speed-up* is its time over ours.{unsupported}{copies}

{against_peer(rows)}

Methods and layouts, our time over that of zoh and of the L-contiguous layout:

{against_ours(rows)}

{least}![State updates per second over updates per byte]({result["figure"]})

Peak memory of forward and backward beside the inputs and the incoming gradient, outputs and gradients included, in bytes per
batch entry, channel and step ([docs/tuning.md](../tuning.md#where-the-memory-goes) says for what):

{memory(rows)}

Largest relative error (L2) over the cases, against float64, the incoming gradient nonzero for some channels:

{largest_errors(rows)}
"""


def ssd_against_peer(rows: Sequence[Result]) -> str:
    lines = []
    for row in rows:
        peer = row.get("peer")
        line = [row["name"], f"{row['graph']['median'] * 1e3:.3f}"]
        for what in DIRECTIONS:
            seconds, spread = row["ours"][what]["median"], row["ours"][what]["spread"]
            line += [f"{seconds * 1e3:.3f} ± {100 * spread:.0f} %", f"{row['bytes'][what] / seconds / 1e9:.0f}"]
            line += [f"{row['operations'][what] / seconds / 1e12:.0f}", milliseconds(peer, what)]
            line += [f"{peer[what]['median'] / seconds:.2f}" if peer and what in peer else ""]
            line += [verdict(row, what, "mamba_ssm")[1]]
        lines.append(line)
    columns = ["GB/s", "TFLOP/s", "mamba_ssm", "speed-up", "bar"]
    return table(["case", "graph", "forward", *columns, "backward", *columns], lines)


def ssd_memory(rows: Sequence[Result]) -> str:
    lines = []
    for row in rows:
        line = [row["name"], f"{row['least_bytes'] / 1e6:.0f}"]
        for who in ("ours", "peer"):
            found = (row.get(who) or {}).get("peak_bytes")
            peak = None if found is None else row["given_bytes"] + found
            line += ["", ""] if peak is None else [f"{peak / 1e6:.0f}", f"{peak / row['least_bytes']:.2f}"]
        lines.append(line)
    return table(["case", "least", "ours", "× least", "mamba_ssm", "× least"], lines)


def ssd_errors(rows: Sequence[Result]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["errors"]))
    lines = []
    for row in rows:
        accuracy, errors = row["accuracy"], (row["errors"].get(name) for name in names)
        line = [row["name"], *("" if error is None else f"{error:.1e}" for error in errors)]
        asked = {what: f"≤ {of['bar']:g} {'met' if of['met'] else '**missed**'}" for what, of in accuracy.items()}
        over_rounding = (f"{row[name]:.3f}" for name in ("over_rounding", "over_rounding_without_D"))
        lines.append([*line, *over_rounding, asked["out"], asked["gradients"]])
    return table(["case", *names, "out / rounding", "without D", "bar", "bar of gradients"], lines)


def ssd_chunk_scan(result: Result) -> str:
    rows = result["rows"]
    return f"""## ssd_chunk_scan

Milliseconds in bfloat16, or float32 (*fp32*), with D, dt_bias and softplus; B batch, L seqlen, H heads, P headdim, N dstate, G
groups, *z* the gate.
*Forward*: without gradients. *Backward*: `torch.autograd.grad` to every input. Between two events, after the second-level cache
was overwritten; {result["settings"]["trials"]} trials; median, ± half the distance from the 20th to the 80th percentile.
*Graph*: a forward in a CUDA graph of many, on inputs that have left the cache. GB/s counts what must be moved, TFLOP/s the
operations of chunks of {result["settings"]["counted_chunk"]} steps ([docs/ssd.md](../ssd.md#operations-and-bytes)).
mamba_ssm's columns are its Triton kernels in chunks of 256, tuned ({result["peer"]}),
which multiply float32 as TF32; *speed-up* is their time over ours. At small sizes they are bound by their launches from Python.

{ssd_against_peer(rows)}

Memory of inputs, forward and backward at its highest, in megabytes; *least* is that of inputs, output and gradients, the
incoming one among them:

{ssd_memory(rows)}

Relative error (L2) for {result["settings"]["compared"]}, against float64, the
incoming gradient zero for all others. *out / rounding* is the error of out over that of rounding the float64 result to its
dtype; *without D* that of an out without D, in which there is no D x that only rounding touches. *bar* is of these two in
bfloat16, of out in float32:

{ssd_errors(rows)}
"""


def verdicts(row: Result, direction: str, peer: str | None = None) -> str:
    """What was asked of a linear recurrence, beside its share of a copy or against the peer, and whether it is met."""
    words = []
    for judged in row["judged"]:
        against = judged["against"]
        if judged["direction"] != direction or (against if against in row["peers"] else None) != peer:
            continue
        asked = f"≤ {judged['bar'] * 1e6:g} µs" if against == "time" else f"≥ {judged['bar']:g}"
        if against != "time" and peer is None:
            asked = f"{judged['found']:.2f} × the speed of {against}, {asked}"
        words.append(f"{asked} {'met' if judged['met'] else '**missed**'}")
    return ", ".join(words)


def shares(rows: Sequence[Result]) -> str:
    lines = []
    for row in rows:
        line = [row["name"]]
        for what in DIRECTIONS:
            ours, met = row["ours"][what], row["met"][what]
            share = f"{100 * row['share'][what]:.0f} %"
            asked = "" if met is None else f"≥ {100 * row['bar']:.0f} % {'met' if met else '**missed**'}"
            if met is not None and row["goal"] is not None:
                asked += f", goal {100 * row['goal']:.0f} % {'met' if row['share'][what] >= row['goal'] else 'missed'}"
            asked = ", ".join(filter(None, (asked, verdicts(row, what))))
            rate = f"{row['bytes'][what] / ours['median'] / 1e9:.0f}"
            line += [f"{ours['median'] * 1e3:.4f} ± {100 * ours['spread']:.0f} %", rate, share, asked]
        lines.append(line)
    columns = ["GB/s", "of a copy", "bar"]
    return table(["case", "forward", *columns, "backward", *columns], lines)


def against_other_scans(rows: Sequence[Result]) -> str:
    lines = []
    for row in rows:
        for name, peer in row["peers"].items():
            line = [row["name"], name + (" (recorded)" if peer["recorded"] else "")]
            for what in DIRECTIONS:
                ours = row["ours"][what]["median"]
                other = peer[what]["median"] if what in peer else None
                line += [f"{ours * 1e3:.4f}", "unsupported" if other is None else f"{other * 1e3:.4f}"]
                line += ["" if other is None else f"{other / ours:.2f}", verdicts(row, what, name)]
            lines.append(line)
    columns = ["other", "speed-up", "bar"]
    return table(["case", "other", "forward", *columns, "backward", *columns], lines, left=2)


def against_cudnn(rows: Sequence[Result]) -> str:
    lines = []
    for row in rows:
        for ours, other in (("nn.MinGRU", "torch.nn.GRU"), ("nn.MinLSTM", "torch.nn.LSTM")):
            line = [row["name"], f"{ours}, {other}"]
            for what in DIRECTIONS:
                mine, theirs = (row["layers"][name][what]["median"] for name in (ours, other))
                line += [f"{mine * 1e3:.3f}", f"{theirs * 1e3:.3f}", f"{theirs / mine:.2f}"]
            lines.append(line)
    columns = ["torch.nn", "ratio"]
    return table(["size", "layers", "forward", *columns, "backward", *columns], lines, left=2)


def linear_scan(result: Result) -> str:
    layers = f"""
Layers, their projections included, float32 (cuDNN's may use TF32, as by default): milliseconds of forward, and of backward to
the input and every parameter. They are not the same functions: minGRU and minLSTM have no weights from state to gates.

{against_cudnn(result["layers"])}
"""
    copied = result["copy"]
    return f"""## Linear recurrences

Milliseconds of GPU time in bfloat16; B batch, T seqlen, H channels. *Forward*: without gradients. *Backward*:
`torch.autograd.grad` to every input. Between two events, after the second-level cache was overwritten;
{result["settings"]["trials"]} trials; median, ± half the distance from the 20th to the 80th percentile.
GB/s counts what must be moved: forward each input and h once; backward each input that the formulas need, h, the incoming
gradient and the gradients once. *Of a copy*: that over
{copied["rate"] / 1e9:.0f} GB/s, the rate of a copy of {copied["bytes"] / 2**30:.0f} GiB in the same run.

{shares(result["rows"])}

![Share of a copy's rate, forward and backward]({result["figure"]})

Other scans, whose gates are computed before, in the layout that each wants, and the loop over time compiled by `torch.compile`
({result["peers"]}); *speed-up* is their time over ours:

{against_other_scans(result["rows"])}
{layers if result["layers"] else ""}
Largest relative error (L2) for some channels over the cases, against float64:

{largest_errors(result["rows"], "recurrence")}
"""


def overhead(result: Result) -> str:
    rows = []
    for row in result["rows"]:
        host, bar = row["host"], row["bar"]
        asked = "" if bar is None else f"≤ {bar * 1e6:g} {'met' if host['median'] <= bar else '**missed**'}"
        rows.append([row["function"], row["what"], f"{microseconds(host['median'])} ± {100 * host['spread']:.0f} %", asked])
    settings = result["settings"]
    return f"""## Host time of a call

Microseconds that the host needs for one call on CUDA tensors (batch {settings["batch"]}, dim {settings["dim"]}, seqlen
{settings["seqlen"]}, dstate {settings["dstate"]}, bfloat16; of ssd_chunk_scan one head), the GPU never being what it waits for.
*Forward + backward* is a call and `torch.autograd.grad` of it to every input; *operator* is the registered operator without
autograd; `a * b` is what PyTorch needs for a product of two such tensors. Median of {settings["blocks"]} blocks of calls.

{table(["function", "what", "µs", "bar"], rows, left=2)}
"""


def against_other(
    rows: dict[str, Result], first: str = "method", ours: str = "kernel", other: str = "loop", digits: int = 1
) -> str:
    """Times of both sides of each row, and whether the ratio that its bar holds meets it."""
    has_bars = any("bar" in row for row in rows.values())
    lines = []
    for name, row in rows.items():
        cells = [label(name)]
        for what, ratio in (("forward", "ratio_forward"), ("both", "ratio_forward_backward")):
            for who in (ours, other):
                timing = row[f"{who}_{what}"]
                cells.append(f"{timing['median'] * 1e3:.2f} ± {100 * timing['spread']:.0f} %")
            cells.append(f"{row[ratio]:.{digits}f}")
        if has_bars:
            held = row.get("ratio_held", row["ratio_forward_backward"])  # older measurements lack it
            cells.append(f"≥ {row['bar']:g} {'met' if held >= row['bar'] else '**missed**'}")
        lines.append(cells)
    header = [first, "forward", f"forward, {other}", "ratio", "forward + backward", f"forward + backward, {other}", "ratio"]
    return table([*header, "bar"] if has_bars else header, lines)


def convolutions_cpu(found: Result) -> str:
    size = found["settings"]
    return f"""
causal_conv1d of width {size["width"]} with a bias and SiLU at batch {size["batch"]}, {size["channels"]} channels; the number
after the layout is the seqlen. *slice*: the channels are part of a channels-last tensor of {size["columns"]} columns, as in
Mamba2. *PyTorch*: `F.silu(F.conv1d(...))`. The bar holds forward, and forward + backward:

{against_other(found["rows"], "x", other="PyTorch")}
"""


def layers_cpu(found: Result) -> str:
    size = found["settings"]
    return f"""
Layers at batch {size["batch"]}, seqlen {size["seqlen"]}; the number after the name is d_model. *composed*: the same layer as
PyTorch's functions around `selective_scan` or `ssd_chunk_scan`, with `F.conv1d` on a padded copy and `F.rms_norm`
(`benchmarks/composed_layers.py`). The bar holds forward + backward:

{against_other(found["rows"], "layer", "layer", "composed", digits=2)}
"""


def selective_scan_cpu(result: Result) -> str:
    settings, recurrences, ssd = result["settings"], result["recurrences"], result.get("ssd")
    packed = (ssd or {}).get("packed")
    of_packed = (
        f"""
*packed sequences*: {packed["sequences"]} of {packed["steps"]} steps by cu_seqlens, {packed["heads"]} heads, headdim
{packed["headdim"]}, dstate {packed["dstate"]}, all else the same.
"""
        if packed  # measured since there is one
        else ""
    )
    of_ssd = (
        f"""
ssd_chunk_scan at batch {ssd["settings"]["batch"]}, seqlen {ssd["settings"]["seqlen"]}, {ssd["settings"]["heads"]} heads,
headdim {ssd["settings"]["headdim"]}, dstate {ssd["settings"]["dstate"]}, one group, with D, dt_bias and softplus, float32:
{of_packed}
{against_other(ssd["rows"], "scan")}
"""
        if ssd  # measured since there is one
        else ""
    )
    # Older measurements lack these.
    of_convolutions = convolutions_cpu(result["convolutions"]) if "convolutions" in result else ""
    of_layers = layers_cpu(result["layers"]) if "layers" in result else ""
    size = recurrences["settings"]
    return f"""## selective_scan on the CPU

Milliseconds at batch {settings["batch"]}, dim {settings["dim"]}, seqlen {settings["seqlen"]}, dstate {settings["dstate"]},
{settings["dtype"]}, {result["machine"]["threads"]} threads, {result["machine"]["cpu_capability"]}; *loop* is the same scan as a
loop over time in PyTorch (`ssm_kernels.reference`, whose phi1 for zoh_exact is a series of 18 terms near zero), in turns with
the kernel. {settings["trials"]} trials; median, ± half the distance from the 20th to the 80th percentile.

{against_other(result["methods"])}

Linear recurrences at batch {size["batch"]}, seqlen {size["seqlen"]}, {size["channels"]} channels, float32:

{against_other(recurrences["rows"], "scan")}
{of_ssd}{of_convolutions}{of_layers}"""


# In the order of the page.
SECTIONS: dict[str, Callable[[Result], str]] = {
    "layers": layers,
    "selective_scan": selective_scan,
    "ssd_chunk_scan": ssd_chunk_scan,
    "linear_scan": linear_scan,
    "selective_state_update": state_update,
    "overhead": overhead,
    "selective_scan_cpu": selective_scan_cpu,
}


def name_of(machine: dict[str, Any]) -> str:
    return machine.get("gpu") or machine["cpu"]


def page(results: Sequence[Result]) -> str:
    machines = [result["machine"] for result in results]
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
    # Measurements of different days may come from different versions.
    values = {key: dict.fromkeys(str(machine[key]) for machine in machines if key in machine) for key in names}
    rows = [[names[key], ", ".join(found)] for key, found in values.items() if found]
    sections = "\n".join(SECTIONS[result["benchmark"]](result) for result in results)
    return f"""# Benchmarks on {name_of(machines[0])}

Written by `benchmarks/report.py` from the measurements beside it; not edited by hand.

{table(["machine", ""], rows, left=2)}

{sections}"""


# Of the benchmarks that have a figure, how its file's name ends.
FIGURES = {"selective_scan": "selective_scan_roofline", "linear_scan": "linear_scan_shares"}


def draw(result: Result, path: Path) -> None:
    from benchmarks import roofline  # here, because no other page needs matplotlib

    (roofline.draw if result["benchmark"] == "selective_scan" else roofline.draw_shares)(result, path)


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
        try:
            result = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            parser.error(f"{path}: {error}")
        if result.get("benchmark") not in SECTIONS or "machine" not in result:
            parser.error(f"{path}: not the result of a benchmark that this script knows ({', '.join(SECTIONS)})")
        by_machine[name_of(result["machine"])].append(result)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, results in by_machine.items():
        results.sort(key=lambda result: list(SECTIONS).index(result["benchmark"]))
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
