"""Draws docs/figures/ssd_chunks.png: the scan of one head as a matrix cut into chunks, and what is computed of each.

python docs/figures/ssd_chunks.py [--output FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from ssm_kernels import reference

SEQLEN, CHUNK, DSTATE = 64, 16, 8
INSIDE, BETWEEN, INK = "#0072B2", "#D55E00", "#333333"


def matrix_of_a_head() -> torch.Tensor:
    """The matrix that multiplies x, (seqlen, seqlen): the responses to an impulse at each step."""
    generator = torch.Generator().manual_seed(3)
    B, C = (torch.randn(1, SEQLEN, 1, DSTATE, generator=generator, dtype=torch.float64) for _ in range(2))
    dt = 0.02 + 0.08 * torch.rand(1, SEQLEN, 1, generator=generator, dtype=torch.float64)
    impulses = torch.eye(SEQLEN, dtype=torch.float64)[None, :, None]  # a channel for each
    return reference.ssd_chunk_scan(impulses, dt, torch.full((1,), -1.0, dtype=torch.float64), B, C)[0, :, 0]


def draw_matrix(axes: Axes) -> None:
    size = matrix_of_a_head().abs()
    size = (size / size.max()).pow(0.4)
    chunk = torch.arange(SEQLEN) // CHUNK
    is_inside = chunk[:, None] == chunk[None, :]
    is_past = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()
    for color, shown in ((INSIDE, is_inside & is_past), (BETWEEN, ~is_inside & is_past)):
        shades = LinearSegmentedColormap.from_list("", ["white", color])
        axes.imshow(size.masked_fill(~shown, torch.nan).numpy(), cmap=shades, vmin=0, vmax=1, interpolation="nearest")
    borders = [k * CHUNK - 0.5 for k in range(SEQLEN // CHUNK + 1)]
    axes.set(xticks=borders, yticks=borders, xlabel="step $j$ of $x$", ylabel="step $i$ of $y$")
    axes.set_xticklabels([round(border + 0.5) for border in borders])
    axes.set_yticklabels([round(border + 0.5) for border in borders])
    for row in range(SEQLEN // CHUNK):
        for column in range(row + 1):
            corner = (borders[column], borders[row])
            axes.add_patch(Rectangle(corner, CHUNK, CHUNK, fill=False, edgecolor=INK, linewidth=0.5, clip_on=False))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.text(SEQLEN * 0.99, 1, "in a chunk: $M_{ij}$,\nwritten out as a matrix", color=INSIDE, ha="right", va="top")
    axes.text(SEQLEN * 0.99, 12, "between chunks: of rank\ndstate, never written out", color=BETWEEN, ha="right", va="top")


def draw_flow(axes: Axes) -> None:
    axes.set(xlim=(-0.75, 3.6), ylim=(-0.35, 4.2))
    axes.axis("off")

    def box(x: float, y: float, text: str, color: str, width: float = 0.82) -> None:
        patch = FancyBboxPatch(
            (x - width / 2, y - 0.21),
            width,
            0.42,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=color + "22",
            edgecolor=color,
        )
        axes.add_patch(patch)
        axes.text(x, y, text, ha="center", va="center", color=INK)

    def arrow(start: tuple[float, float], end: tuple[float, float], color: str = INK, bend: float = 0) -> None:
        style = {"arrowstyle": "-|>", "color": color, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7}
        axes.annotate("", end, start, arrowprops=style | {"connectionstyle": f"arc3,rad={bend}"})

    axes.text(-0.72, 1.4, "$S$", ha="left", va="center", color=BETWEEN)
    arrow((-0.6, 1.4), (-0.34, 1.4), BETWEEN)
    for k in range(4):
        box(k, 3.85, f"$x, B, C, \\Delta$ of chunk {k + 1}", INK, 0.94)
        box(k, 2.75, r"$c\,x^{\top}B$ decayed" + "\nto the end", BETWEEN)
        box(k, 1.4, f"state {k + 1}", BETWEEN, 0.68)
        box(k, 0.1, f"$y$ of chunk {k + 1}", INSIDE)
        arrow((k, 3.63), (k, 2.97))
        arrow((k, 2.53), (k, 1.62), BETWEEN)
        arrow((k - 0.46, 3.66), (k - 0.3, 0.33), INSIDE, 0.08)
        before = (k - 0.42, 1.33) if k else (-0.47, 1.33)
        arrow(before, (k - 0.1, 0.33), BETWEEN, 0.2)
        arrow((k + 0.34, 1.4), (k + 0.66 if k < 3 else k + 0.58, 1.4), BETWEEN)
    axes.text(-0.5, 2.3, "$M$", color=INSIDE, ha="right")
    axes.text(-0.18, 0.68, "$C$", color=BETWEEN, ha="left")
    axes.text(0.04, 2.02, "+", color=BETWEEN)
    axes.text(0.36, 1.47, r"$\times e^{cs}$", color=BETWEEN, ha="left", va="bottom", fontsize=7)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".png"), metavar="FILE")
    options = parser.parse_args(arguments)
    if not options.output.parent.is_dir():
        parser.error(f"--output {options.output}: there is no such folder")
    mpl.rcParams.update({"font.size": 8, "axes.linewidth": 0.6, "savefig.dpi": 200, "mathtext.fontset": "cm"})
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.65])
    draw_matrix(left)
    draw_flow(right)
    figure.savefig(options.output)


if __name__ == "__main__":
    main()
