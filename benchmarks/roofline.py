"""The figures of the benchmarks: the measured rates, under the limits of the chip, and the speed-up over ranks.

selective_scan's shows state updates per second over updates per byte. The linear recurrences have less to compute than to move:
theirs shows the share of a copy's rate. The distributed one continues the measured speed-ups with the model of more ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.bench_distributed import model_rows
from benchmarks.floors import SLOTS_PER_UPDATE, floors
from benchmarks.style import COLORS, STYLE
from benchmarks.tables import median

_OURS, _PEER, _GREY = COLORS[1], COLORS[2], "#767676"
_MARKERS = {
    "bfloat16, dstate 16": "o",
    "bfloat16, dstate 16, batch 1": "^",
    "float32, dstate 16": "s",
    "bfloat16, dstate as labelled": "D",
}


def _series(row: Mapping[str, Any]) -> str:
    if row["dstate"] != 16:
        return "bfloat16, dstate as labelled"
    return f"{row['dtype']}, dstate 16" + (", batch 1" if row["batch"] == 1 else "")


def _ceilings(axes: Axes, rates: Mapping[str, float], direction: str, intensities: tuple[float, float]) -> None:
    low, high = intensities
    flat = {
        "1 exponential per update": rates["special functions"],
        f"{SLOTS_PER_UPDATE[direction]:g} instructions per update": rates["issue"] / SLOTS_PER_UPDATE[direction],
    }
    lowest = min(flat.values())
    for name, rate in flat.items():
        axes.plot((rate / rates["copy"], high), (rate, rate), color=_GREY, lw=1.0 if rate == lowest else 0.6, zorder=1)
        axes.annotate(name, (high, rate), xytext=(-2, 2), textcoords="offset points", ha="right", va="bottom", color=_GREY)
    ridge = max(flat.values()) / rates["copy"]
    axes.plot((low, ridge), (low * rates["copy"], ridge * rates["copy"]), color=_GREY, lw=1.0, zorder=1)
    corner = 0.7 * rates["special functions"] / rates["copy"]
    axes.annotate(
        "memory, at the\nrate of a copy",
        (corner, corner * rates["copy"]),
        xytext=(-5, 0),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=_GREY,
    )


def _points(axes: Axes, rows: Sequence[Mapping[str, Any]], rates: Mapping[str, float] | None, direction: str) -> None:
    for row in rows:
        marker = _MARKERS[_series(row)]
        intensity = row["updates"] / row["bytes"][direction]
        if rates:
            least = max(floors(row, rates)[direction].values())
            axes.plot(intensity, row["updates"] / least, marker="_", ms=9, color="black", zorder=2)
        rate = row["updates"] / row["ours"][direction]["median"]
        axes.plot(intensity, rate, marker, color=_OURS, zorder=4)
        peer = row.get("peer") or {}
        if direction in peer:
            fill = "white" if peer["recorded"] else _PEER
            axes.plot(intensity, row["updates"] / peer[direction]["median"], marker, color=_PEER, mfc=fill, zorder=3)
        if row["dstate"] != 16:
            axes.annotate(
                f"{row['dstate']}",
                (intensity, rate),
                xytext=(0, -5),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=6.5,
                color=_OURS,
            )


def _rates_shown(rows: Sequence[Mapping[str, Any]], rates: Mapping[str, float] | None) -> tuple[float, float]:
    """The limits of the vertical axis: from below the slowest point to above the ceilings of forward."""
    points = [
        row["updates"] / row[who][direction]["median"]
        for row in rows
        for who in ("ours", "peer")
        for direction in SLOTS_PER_UPDATE
        if direction in (row.get(who) or {})
    ]
    ceilings = [rates["issue"] / SLOTS_PER_UPDATE["forward"]] if rates else []
    return min(points) / 1.5, 1.6 * max(*points, *ceilings)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws the cases of zoh with L-contiguous tensors, forward and backward, from the benchmark's result."""
    rows = [row for row in result["rows"] if row["discretization"] == "zoh" and row["contiguous"] == "seqlen"]
    peers = [row["peer"] for row in rows if "forward" in (row.get("peer") or {})]
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, 2, figsize=(7.2, 3.6), sharey=True, layout="constrained")
        grid[0].set_yscale("log")
        grid[0].set_ylim(_rates_shown(rows, result["rates"]))
        intensities = [row["updates"] / row["bytes"][direction] for row in rows for direction in SLOTS_PER_UPDATE]
        limits = min(intensities) / 5, max(intensities) * 1.6
        for axes, direction in zip(grid, SLOTS_PER_UPDATE, strict=True):
            axes.set_xscale("log", base=2)
            axes.set_xlim(limits)
            if result["rates"]:
                _ceilings(axes, result["rates"], direction, limits)
            _points(axes, rows, result["rates"], direction)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_xlabel("state updates per byte moved")
            axes.set_title(direction.capitalize(), loc="left")
        grid[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        grid[0].yaxis.set_major_formatter(lambda rate, _: f"{rate / 1e12:g}")
        grid[0].yaxis.set_minor_locator(NullLocator())
        grid[0].set_ylabel("state updates per second [10¹²]")
        handles = [Line2D([], [], color=_OURS, marker="o", ls="", label="ssm_kernels")]
        for recorded in dict.fromkeys(peer["recorded"] for peer in peers):
            fill, label = ("white", "mamba_ssm, recorded") if recorded else (_PEER, "mamba_ssm")
            handles.append(Line2D([], [], color=_PEER, mfc=fill, marker="o", ls="", label=label))
        series = {_series(row) for row in rows}
        handles += [
            Line2D([], [], color=_GREY, marker=_MARKERS[name], ls="", label=name) for name in _MARKERS if name in series
        ]
        if result["rates"]:
            handles.append(Line2D([], [], color="black", marker="_", ms=9, ls="", label="floor of the case"))
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path)
        plt.close(figure)


def draw_shares(result: Mapping[str, Any], path: Path) -> None:
    """Draws the rates of the linear recurrences, forward and backward, as shares of the copy's, from the benchmark's result.

    Other scans lie below ours in each row, so that no point hides another.
    """
    rows, rate = list(reversed(result["rows"])), result["copy"]["rate"]
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    colors = dict(zip(names, COLORS[2:], strict=False))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, 2, figsize=(7.2, 0.9 + 0.19 * len(rows)), sharey=True, layout="constrained")
        recorded = set()
        for axes, direction in zip(grid, ("forward", "backward"), strict=True):
            for index, row in enumerate(rows):
                moved = 100 * row["bytes"][direction] / rate
                axes.plot(moved / row["ours"][direction]["median"], index, "o", color=_OURS, zorder=4)
                for name, peer in row["peers"].items():
                    if direction in peer:
                        fill = "white" if peer["recorded"] else colors[name]
                        recorded |= {name} if peer["recorded"] else set()
                        share = moved / peer[direction]["median"]
                        axes.plot(share, index - 0.35, "o", color=colors[name], mfc=fill, zorder=3)
            axes.axvline(100, color=_GREY, lw=1.0, zorder=1)
            axes.set_xlim(left=-2)
            axes.set_xlabel("useful bytes per second [% of a copy's]")
            axes.set_title(direction.capitalize(), loc="left")
        grid[0].set_yticks(range(len(rows)), [row["name"] for row in rows])
        handles = [Line2D([], [], color=_OURS, marker="o", ls="", label="ssm_kernels")]
        for name in names:
            fill = "white" if name in recorded else colors[name]
            label = f"{name}, recorded" if name in recorded else name
            handles.append(Line2D([], [], color=colors[name], mfc=fill, marker="o", ls="", label=label))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
        figure.savefig(path)
        plt.close(figure)


def draw_scaling(result: Mapping[str, Any], path: Path) -> None:
    """Draws the speed-up of models over ranks, forward and backward together: measured, and modelled for more ranks."""
    rows = [row for row in result["rows"] if median(row.get("one"), "both") and median(row["ours"], "both")]
    device = "GPU" if "gpu" in result["machine"] else "process"
    modelled = model_rows(dict(result))
    ranks = sorted({1, *(row["ranks"] for row in [*rows, *modelled])})
    markers = {"context parallel": "o", "tensor parallel": "s"}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(5.6, 4.2), layout="constrained")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.plot(1, 1, "o", color="black", zorder=4)
        lines, highest = [], 1.0
        not_drawn = {row["name"] for row in modelled}
        for row, color in zip(rows, COLORS[1:], strict=False):
            measured = [1, row["one"]["both"]["median"] / row["ours"]["both"]["median"]]
            (line,) = axes.plot([1, row["ranks"]], measured, color=color, marker=markers[row["kind"]], ms=3.5, zorder=3)
            line.set_label(row["name"].rpartition(", ")[0])
            lines.append(line)
            of_model = []
            if row["kind"] == "context parallel" and row["layer"] in not_drawn:
                not_drawn.remove(row["layer"])  # one line for both exchanges
                of_model = [
                    (other["ranks"], other["speedup"])
                    for other in modelled
                    if other["name"] == row["layer"] and other["ranks"] >= row["ranks"]
                ]
                axes.plot(*zip(*of_model, strict=True), color=color, ls="--", zorder=2)
            highest = max(highest, *measured, *(speedup for _, speedup in of_model))
        (ideal,) = axes.plot(ranks, ranks, color=_GREY, lw=0.6, zorder=1, label="ideal")
        axes.set_ylim(0.5, 2 * highest)
        axes.set_xticks(ranks)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
        axes.set_xlabel(f"ranks, a {device} each")
        axes.set_ylabel(f"speed-up over one {device}")
        if modelled:
            lines.append(Line2D([], [], color=_GREY, ls="--", label="model of more ranks"))
        figure.legend(handles=[*lines, ideal], loc="outside lower center", ncols=1)
        figure.savefig(path)
        plt.close(figure)
