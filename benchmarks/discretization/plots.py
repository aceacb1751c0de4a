"""Figures: speed against error, error against step size, time of forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullFormatter

from benchmarks.discretization.accuracy import Accuracy
from benchmarks.discretization.report import Report
from benchmarks.discretization.signals import SAMPLINGS
from benchmarks.labels import label
from benchmarks.style import COLORS, STYLE

FORMATS = ("png", "pdf", "svg")


class _Look(NamedTuple):
    color: str
    marker: str
    fill: str
    dashes: str

    @property
    def points(self) -> dict[str, str]:
        return {"color": self.color, "marker": self.marker, "markerfacecolor": self.fill}

    @property
    def line(self) -> dict[str, str]:
        return self.points | {"ls": self.dashes}


_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")


def _look(index: int) -> _Look:
    """The first pass through the colors has full markers and lines, the next ones have open markers and dashed lines.

    Each pass shifts the markers by one: 64 looks before the first repeats.
    """
    shift, place = divmod(index, len(COLORS))
    color = COLORS[place]
    return _Look(color, _MARKERS[(place + shift) % len(_MARKERS)], "white" if shift else color, "--" if shift else "-")


def _looks(methods: Sequence[str], known: Sequence[str]) -> dict[str, _Look]:
    """A method looks the same in every figure, whatever other methods the figure has."""
    return {method: _look(known.index(method)) for method in methods}


def _spread_apart(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions in [low, high] near the given ones, in the same order and at least ``gap`` apart where there is room."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    gap = min(gap, (high - low) / max(1, len(positions) - 1))
    placed: list[list[float]] = []  # runs of labels that touch: [sum of wanted first positions, count]
    for index in order:
        placed.append([positions[index], 1])
        while len(placed) > 1:
            before, after = placed[-2], placed[-1]
            if after[0] / after[1] >= before[0] / before[1] + gap * before[1]:
                break
            # The joined run starts where the mean displacement of its labels is zero.
            placed.pop()
            placed[-1] = [before[0] + after[0] - gap * before[1] * after[1], before[1] + after[1]]
    result = [0.0] * len(positions)
    rank = 0
    floor = low
    for total, count in placed:
        start = max(floor, min(total / count, high - gap * (len(positions) - rank - 1)))
        for place in range(int(count)):
            result[order[rank]] = start + gap * place
            rank += 1
        floor = start + gap * count
    return result


_PLACES = {"end": "step's end", "middle": "mid-step"}
_LARGEST_ERROR = 1e3
"""Above it a curve ends: its rule diverges."""


def _clipped(error: float) -> float:
    return min(error, _LARGEST_ERROR) if math.isfinite(error) else _LARGEST_ERROR


def _speed_against_error(axes: Axes, report: Report, looks: dict[str, _Look]) -> None:
    scans, accuracies = report.scans, report.accuracies
    errors_of = {accuracy.method: accuracy for accuracy in accuracies}
    step = accuracies[0].headline_step(report.sample_spacing)
    times = [1e3 * scan.step.median for scan in scans]
    measured = [errors_of[scan.method].error_at(step, report.sampling) for scan in scans]
    errors = [max(_clipped(error), 1e-16) for error in measured]
    for scan, time, error in zip(scans, times, errors, strict=True):
        look = looks[scan.method]
        whiskers = [[time - 1e3 * scan.step.p20], [1e3 * scan.step.p80 - time]]
        axes.errorbar(time, error, xerr=whiskers, **look.points, ls="", elinewidth=0.7, capsize=1.5, zorder=3)
    axes.set_yscale("log")
    low, high = min(errors), max(errors)
    margin = max(1.35, (high / low) ** 0.1)
    axes.set_ylim(low / margin, high * margin)
    left = min(1e3 * scan.step.p20 for scan in scans)
    right = max(1e3 * scan.step.p80 for scan in scans)
    width = max(right - left, 0.05 * right)
    axes.set_xlim(left - 0.1 * width, right + 1.6 * width)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    bottom, top = (math.log10(limit) for limit in axes.get_ylim())
    heights = [(math.log10(error) - bottom) / (top - bottom) for error in errors]
    labels = _spread_apart(heights, 0.085, 0.03, 0.97)
    for scan, time, error, height, value in zip(scans, times, errors, labels, measured, strict=True):
        look = looks[scan.method]
        # A clipped error is a number, because its height is not.
        clipped = "" if value <= _LARGEST_ERROR else f": {value:.1e}" if math.isfinite(value) else ": diverges"
        axes.annotate(
            f"{label(scan.method)}{clipped}",
            (time, error),
            xytext=(0.53, height),
            textcoords="axes fraction",
            fontsize=7,
            color=look.color,
            va="center",
            # From the label's left edge, so that no line crosses a label.
            arrowprops={
                **{"arrowstyle": "-", "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 3},
                **{"color": look.color, "lw": 0.4, "alpha": 0.7},
            },
        )
    axes.set_xlabel("forward + backward [ms]" if scans[0].training else "forward [ms]")
    axes.set_ylabel(f"relative error at step {step:.3g},\ninput at {_PLACES[report.sampling]}")
    axes.set_title("Speed against error", loc="left")


def _order_guides(axes: Axes, accuracies: Sequence[Accuracy], sampling: str) -> list[int]:
    """Draws a dashed line for each observed order: for order 1 above its curves, for higher orders below them.

    Returns the orders.
    """
    fine = accuracies[0].steps[-1]
    ends: dict[int, list[float]] = {}
    for accuracy in accuracies:
        found = accuracy.convergence[sampling]
        if found.order is not None and 0 < found.errors[-1] < 1 and abs(found.order - round(found.order)) < 0.2:
            ends.setdefault(round(found.order), []).append(found.errors[-1])
    finest = [error for accuracy in accuracies for found in accuracy.convergence.values() if (error := found.errors[-1]) < 1]
    for order, errors in ends.items():
        start = 2.2 * max(errors + finest) if order == 1 else min(errors) / 2.2
        end = (8 * fine, start * 8**order)
        axes.plot((fine, end[0]), (start, end[1]), color="#444444", lw=0.7, ls=(0, (4, 3)), zorder=0)
    return sorted(ends)


def _error_against_step(axes: Axes, report: Report, looks: dict[str, _Look]) -> tuple[list[Line2D], list[Line2D]]:
    """Returns legend entries: of the methods whose curves are visible, and of the other lines."""
    accuracies, sampling = report.accuracies, report.sampling
    other = next(place for place in SAMPLINGS if place != sampling)
    steps = accuracies[0].steps
    shown: list[float] = []
    visible = []
    for index, accuracy in enumerate(accuracies):
        look = looks[accuracy.method]
        for place, style in ((other, {"color": "#BBBBBB", "lw": 0.7, "zorder": 1}), (sampling, look.line)):
            errors = [error if error <= _LARGEST_ERROR else math.nan for error in accuracy.convergence[place].errors]
            errors = [max(error, 1e-16) for error in errors]
            finite = [error for error in errors if math.isfinite(error)]
            shown += finite
            if place == other:
                axes.plot(steps, errors, **style)
            elif finite:
                # Each curve has its markers at other steps, so that coinciding curves stay legible.
                axes.plot(steps, errors, **style, markevery=(index % 3, 3) if len(finite) > 3 else 1)
                visible.append(Line2D([], [], **look.line, label=label(accuracy.method)))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(min(shown, default=1e-3) / 3, 2 * max(shown, default=1.0))
    explained = [Line2D([], [], color="#BBBBBB", lw=0.7, label=f"any, input at {_PLACES[other]}")]
    if orders := _order_guides(axes, accuracies, sampling):
        text = f"slope of order {', '.join(map(str, orders))}"
        explained.append(Line2D([], [], color="#444444", lw=0.7, ls=(0, (4, 3)), label=text))
    if report.sample_spacing is not None:
        axes.axvline(report.sample_spacing, color="#444444", lw=0.6, ls=":", zorder=0)
        explained.append(Line2D([], [], color="#444444", lw=0.6, ls=":", label="sample spacing"))
    axes.set_xlabel(f"step size; colors: input at {_PLACES[sampling]}")
    axes.set_ylabel("relative error")
    axes.set_title(f"Error against step size{report.states and f', {report.states}'}", loc="left")
    return visible, explained


def _times(axes: Axes, report: Report, looks: dict[str, _Look]) -> None:
    """Bars from zero to the table's numbers: the light one is forward and backward together, the dark one in it forward."""
    scans = report.scans
    for row, scan in enumerate(scans):
        color = looks[scan.method].color
        if scan.training:
            axes.barh(row, 1e3 * scan.training.median, color=color, alpha=0.4, height=0.65)
        axes.barh(row, 1e3 * scan.forward.median, color=color, height=0.4 if scan.training else 0.65)
        whiskers = [[1e3 * (scan.step.median - scan.step.p20)], [1e3 * (scan.step.p80 - scan.step.median)]]
        axes.errorbar(1e3 * scan.step.median, row, xerr=whiskers, color="#333333", elinewidth=0.7, capsize=1.5)
        if scan.speedup is not None:
            place = (1e3 * scan.step.p80, row)
            faster = f"{scan.speedup:.0f}x" if scan.speedup >= 10 else f"{scan.speedup:.1f}x"
            faster += " (unreliable)" if scan.unreliable() else ""
            axes.annotate(faster, place, xytext=(4, 0), textcoords="offset points", va="center", fontsize=6.5)
    axes.set_yticks(range(len(scans)), [label(scan.method) for scan in scans])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.margins(x=0.45 if any(scan.unreliable() for scan in scans) else 0.18)
    axes.set_xlim(left=0)
    axes.set_xlabel("time [ms]" + ("; label: loop / kernel" if scans[0].speedup is not None else ""))
    axes.set_title("Forward (dark), both (light)" if scans[0].training else "Forward", loc="left")


def _operations(axes: Axes, report: Report) -> list[Patch]:
    """Returns legend entries."""
    colors = {"diagonal": COLORS[1], "full": COLORS[2]}
    for row, operation in enumerate(report.operations):
        axes.barh(row, operation.per_step, color=colors[operation.form], height=0.65)
    axes.set_yticks(range(len(report.operations)), [operation.name for operation in report.operations])
    axes.invert_yaxis()
    axes.set_xscale("log")
    # Whole decades, because within one decade matplotlib labels minor ticks, which overlap.
    times = [operation.per_step for operation in report.operations]
    axes.set_xlim(10 ** math.floor(math.log10(min(times) / 1.5)), 10 ** math.ceil(math.log10(max(times) * 1.1)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("ns per channel and step")
    axes.set_title("Elementary operations", loc="left")
    return [Patch(color=color, label=f"{form} A") for form, color in colors.items()]


def draw(report: Report, path: Path, known: Sequence[str], *, column: bool = False) -> None:
    """Writes the figure of :func:`figure_of` to a path that ends in one of ``FORMATS``."""
    with plt.rc_context(STYLE):
        figure = figure_of(report, known, column=column)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def figure_of(report: Report, known: Sequence[str], *, column: bool = False) -> Figure:
    """Draws the parts of the report: two or three panels, side by side over a page's width, or stacked in one column.

    Args:
        known: all methods; the position of a method determines its color and marker.
        column: stack the panels.
    """
    methods = [accuracy.method for accuracy in report.accuracies] or [scan.method for scan in report.scans]
    looks = _looks(methods, known)
    panels: list[Any] = []
    if report.scans and report.accuracies:
        panels.append(lambda axes: _speed_against_error(axes, report, looks))
    if report.accuracies:
        panels.append(lambda axes: _error_against_step(axes, report, looks))
    if report.scans:
        panels.append(lambda axes: _times(axes, report, looks))
    if not panels:
        panels.append(lambda axes: _operations(axes, report))
    across = 1 if column else len(panels)
    legend_columns = (2, 3, 5)[across - 1]
    width = 3.5 if across == 1 else 2.45 * across
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            *((len(panels), 1) if column else (1, len(panels))), squeeze=False, layout="constrained", figsize=(width, 2.55)
        )
        handles: list[Any] = []
        for axes, panel in zip(grid.flat, panels, strict=True):
            found = panel(axes) or ()
            handles += [handle for group in found for handle in group] if isinstance(found, tuple) else found
        # The legend is below the panels, so that it covers no data.
        legend_height = 0.15 * math.ceil(len(handles) / legend_columns) + 0.15 if handles else 0.0
        figure.set_size_inches(width, 2.55 * len(panels) / across + legend_height)
        if handles:
            figure.legend(handles=handles, loc="outside lower center", ncols=legend_columns)
    return figure
