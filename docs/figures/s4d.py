"""Draws docs/figures/s4d.png: kernels of S4D by discretization, and errors against the step size.

The errors are those of ``profile_discretization.py --states s4d-lin`` and ``s4d-inv`` in ``s4d_lin.json`` and ``s4d_inv.json``.

python docs/figures/s4d.py [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.discretization.signals import STATES, System
from benchmarks.style import COLORS, STYLE
from ssm_kernels import selective_scan

DSTATE = 8
LOOKS = {
    "zoh": (COLORS[0], "o", "-"),
    "zoh_exact": (COLORS[1], "s", "-"),
    "bilinear": (COLORS[2], "^", "-"),
    "trapezoidal": (COLORS[3], "D", "--"),
    "exp_trapezoidal": (COLORS[4], "P", "--"),
}
TWO_SAMPLES = ("trapezoidal", "exp_trapezoidal")


def kernel(rule: str, system: System, step: float, steps: int) -> torch.Tensor:
    """The response to an impulse of integral one in the first step."""
    u = torch.zeros(1, 1, steps, dtype=torch.float64)
    u[..., 0] = 1 / step
    options = {"lam": torch.full_like(u, 0.5)} if rule == "exp_trapezoidal" else {}
    delta = torch.full_like(u, step)
    return selective_scan(u, delta, system.A, system.B, system.C, discretization=rule, **options)[0, 0]


def draw_kernels(axes: Axes, states: str, step: float, steps: int) -> None:
    system = System.s4d(states, 1, DSTATE, seed=0)
    times = torch.linspace(0, step * steps, 1000, dtype=torch.float64)
    exact = 2 * (system.C[0, :, None] * torch.exp(system.A[0, :, None] * times)).sum(0).real
    axes.plot(times, exact, color="#BBBBBB", lw=3)
    for rule, (color, marker, dashes) in LOOKS.items():
        if rule != "trapezoidal":
            lag = torch.arange(steps) + (0.0 if rule in TWO_SAMPLES else 0.5)
            axes.plot(step * lag, kernel(rule, system, step, steps), color=color, marker=marker, ls=dashes, lw=0.8, ms=3)
    axes.set_xlabel("time since the impulse")
    axes.set_title(f"{STATES[states]}: kernel at step {step:g}", loc="left")


def draw_errors(axes: Axes, states: str) -> None:
    found = json.loads(Path(__file__).with_name(f"{states.replace('-', '_')}.json").read_text())
    for accuracy in found["accuracies"]:
        color, marker, dashes = LOOKS[accuracy["method"]]
        for place, style in (("middle", {"color": "#BBBBBB", "lw": 0.7, "zorder": 1}), ("end", {})):
            errors = [math.nan if error is None else error for error in accuracy[f"sampled_at_{place}"]["errors"]]
            look = {"color": color, "marker": marker, "ls": dashes, "ms": 3, "lw": 0.8} if place == "end" else style
            axes.plot(accuracy["steps"], errors, **look)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("step size")
    axes.set_ylabel("relative error")
    axes.set_title(f"{STATES[states]}: error of the output", loc="left")


def draw() -> Figure:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.35, 5.4), layout="constrained")
        grid = figure.subplots(2, 2)
        for column, (states, step) in enumerate((("s4d-lin", 0.05), ("s4d-inv", 0.015))):
            draw_kernels(grid[0, column], states, step, 30)
            draw_errors(grid[1, column], states)
        handles = [Line2D([], [], color="#BBBBBB", lw=3, label="exact kernel")]
        handles += [Line2D([], [], color=c, marker=m, ls=d, ms=3, lw=0.8, label=rule) for rule, (c, m, d) in LOOKS.items()]
        handles.append(Line2D([], [], color="#BBBBBB", lw=0.7, label="errors, input at mid-step"))
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".png"))
    options = parser.parse_args(arguments)
    with mpl.rc_context(STYLE):
        draw().savefig(options.output, dpi=150)


if __name__ == "__main__":
    main()
