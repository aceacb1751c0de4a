"""Draws docs/figures/delta_rule_chunk.png: the matrices of one chunk of the delta rule, and what is computed from them.

python docs/figures/delta_rule_chunk.py [--output FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from torch import Tensor

STEPS, KEY_DIM = 32, 8
PARALLEL, SERIAL, INK = "#0072B2", "#D55E00", "#333333"


def matrices_of_a_chunk() -> dict[str, Tensor]:
    """The three matrices of a head with random keys, queries, betas and gates, (steps, steps)."""
    generator = torch.Generator().manual_seed(3)
    q, k = (F.normalize(torch.randn(STEPS, KEY_DIM, generator=generator, dtype=torch.float64), dim=1) for _ in range(2))
    beta, g = torch.rand(STEPS, generator=generator).double(), -0.1 * torch.rand(STEPS, generator=generator).double()
    c = g.cumsum(0)
    decays = (c[:, None] - c[None, :]).tril().exp().tril()
    lower = torch.eye(STEPS).double() + (beta[:, None] * (k @ k.T) * decays).tril(-1)
    inverse = torch.linalg.solve_triangular(lower, torch.eye(STEPS).double(), upper=False, unitriangular=True)
    return {"$I + A$": lower, "$M = (I + A)^{-1}$": inverse, "$P$": (q @ k.T) * decays}


def draw_matrix(axes: Axes, name: str, matrix: Tensor) -> None:
    shades = LinearSegmentedColormap.from_list("", [SERIAL, "white", PARALLEL])
    size = matrix.sign() * matrix.abs().clamp(max=1).sqrt()
    above = torch.ones(STEPS, STEPS, dtype=torch.bool).triu(1)
    axes.imshow(size.masked_fill(above, torch.nan).numpy(), cmap=shades, vmin=-1, vmax=1, interpolation="nearest")
    axes.set_title(name, fontsize=9)
    axes.set(xticks=[-0.5, STEPS - 0.5], yticks=[-0.5, STEPS - 0.5], xlabel="step $j$")
    axes.set_xticklabels(["0", str(STEPS)])
    axes.set_yticklabels(["0", str(STEPS)])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def draw_flow(axes: Axes) -> None:
    axes.set(xlim=(-0.6, 5.0), ylim=(-0.3, 3.4))
    axes.axis("off")

    def box(x: float, y: float, text: str, color: str, width: float) -> None:
        shape = "round,pad=0,rounding_size=0.06"
        corner = (x - width / 2, y - 0.24)
        axes.add_patch(FancyBboxPatch(corner, width, 0.48, boxstyle=shape, facecolor=color + "22", edgecolor=color))
        axes.text(x, y, text, ha="center", va="center", color=INK)

    def arrow(start: tuple[float, float], end: tuple[float, float], color: str, bend: float = 0) -> None:
        style = {"arrowstyle": "-|>", "color": color, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7}
        axes.annotate("", end, start, arrowprops=style | {"connectionstyle": f"arc3,rad={bend}"})

    axes.text(-0.55, 3.28, "all chunks at once", color=PARALLEL, ha="left", va="center")
    axes.text(-0.55, -0.1, "chunk after chunk", color=SERIAL, ha="left", va="center")
    box(0.55, 2.75, r"$A$: $k_i k_j$, $\beta_i$, decays", PARALLEL, 1.5)
    box(2.3, 2.75, "$M$: inverse of $I + A$", PARALLEL, 1.55)
    box(4.0, 2.75, "$P$: $q_i k_j$, decays", PARALLEL, 1.4)
    arrow((1.3, 2.75), (1.525, 2.75), PARALLEL)
    box(0.55, 1.5, "$V - (e^c K)\\,S^{\\top}$", SERIAL, 1.25)
    box(2.3, 1.5, "$U = M\\,\\beta\\,(\\ldots)$", SERIAL, 1.2)
    axes.text(-0.5, 1.5, "$S$", ha="left", va="center", color=SERIAL)
    arrow((-0.36, 1.5), (-0.075, 1.5), SERIAL)
    arrow((1.175, 1.5), (1.7, 1.5), SERIAL)
    arrow((2.3, 2.51), (2.3, 1.74), PARALLEL)
    box(4.0, 1.5, "out $= s\\,(e^c Q)\\,S^{\\top} + P U$", INK, 1.8)
    arrow((2.9, 1.5), (3.1, 1.5), SERIAL)
    arrow((4.0, 2.51), (4.0, 1.74), PARALLEL)
    box(2.3, 0.2, "$S' =$ decayed $S + U^{\\top} \\tilde{K}$", SERIAL, 1.95)
    arrow((2.3, 1.26), (2.3, 0.44), SERIAL)
    arrow((-0.4, 1.36), (1.325, 0.2), SERIAL, 0.25)
    arrow((3.275, 0.2), (3.6, 0.2), SERIAL)
    axes.text(3.66, 0.2, "next chunk", ha="left", va="center", color=SERIAL)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".png"), metavar="FILE")
    options = parser.parse_args(arguments)
    if not options.output.parent.is_dir():
        parser.error(f"--output {options.output}: there is no such folder")
    mpl.rcParams.update({"font.size": 8, "axes.linewidth": 0.6, "savefig.dpi": 200, "mathtext.fontset": "cm"})
    figure = Figure(figsize=(10, 2.4), layout="constrained")
    *heat_maps, flow = figure.subplots(1, 4, width_ratios=[1, 1, 1, 3.8])
    for axes, (name, matrix) in zip(heat_maps, matrices_of_a_chunk().items(), strict=True):
        draw_matrix(axes, name, matrix)
    heat_maps[0].set_ylabel("step $i$")
    draw_flow(flow)
    figure.savefig(options.output)


if __name__ == "__main__":
    main()
