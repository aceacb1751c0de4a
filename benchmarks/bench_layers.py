#!/usr/bin/env python3
"""Whole layers and language models on CUDA, beside mamba_ssm's with causal-conv1d's kernels; eager, without torch.compile.

    python benchmarks/bench_layers.py [--json FILE] [--only PATTERN ...] [--trials N] [--no-models]

Layers: nn.Mamba and nn.Mamba2 with parameters and activations in bfloat16, projections included. "forward" runs without
gradients; "forward + backward" ends with the gradients of the input and of every parameter. Each is time between two events
after the cache was overwritten once, as triton.testing.do_bench measures it, ours and mamba_ssm's in turns; median of trials.
"peak" is the memory of forward and backward at its highest, over what was allocated before. "kept" are the bytes for each token
that the forward saves for backward, each storage once, without the parameters and the layer's own input.

Decoding steps run in a CUDA graph of many layers, so that caches do not hold their weights and states. "latency" is a replay of
a CUDA graph with two narrow layers on a few steps. Language models of 24 layers: a training step with float32 parameters under
autocast, without the optimizer, and the generation of tokens by wall clock. Operators between the scans and the projections are
compared with a copy of the same bytes.

mamba_ssm's layers get the weights of ours, and both ``state_dict``s must load into the other. Outputs, states, gradients and
logits of both are compared with ours in float64 on the CPU, logits with ours in float32. Exits with 1 if one is wrong; a missed
bar is only reported. Where mamba_ssm or causal-conv1d is not installed, figures recorded on an H200 are printed, and marked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import peers
from benchmarks.harness import machine, require_cuda
from benchmarks.layer_cases import (
    PEER,
    Bar,
    Case,
    DecodeCase,
    GenerationCase,
    LatencyCase,
    LayerCase,
    ModelCase,
    Settings,
    median_of,
    models_are_missing,
)
from benchmarks.layer_operators import CONVOLUTION, CONVOLUTION_CHANNELS_FIRST, NORM_ADD, NORM_GATED, OperatorCase

PEAK = Bar("peak", "share", 1.0, 0.9)
STEP = Bar("step", "speed", 1.0, 1.5)
SMALL = (Bar("forward", "speed", 2.0, 4.0), Bar("both", "speed", 2.5, 4.0), PEAK)
MAMBA = (Bar("forward", "speed", 1.25, 1.35), Bar("both", "speed", 1.45, 1.6), PEAK)
MAMBA2 = (Bar("forward", "speed", 1.2, 1.25), Bar("both", "speed", 1.3, 1.4), PEAK, Bar("kept", "limit", 42e3, 31.4e3))
COPY = tuple(Bar(direction, "speed", 0.85, 0.92, "copy") for direction in ("forward", "backward"))
ADD_NORM = (
    *(Bar(direction, "speed", 0.85, None, "copy") for direction in ("forward", "backward")),
    *(Bar(direction, "speed", 1.0, None, other) for direction in ("forward", "backward") for other in ("PyTorch", PEER)),
)
LAYERS = {"Mamba": 2048, "Mamba2": 2560}
CASES: list[Case] = [
    LayerCase(MAMBA, "Mamba", 8, 2048),
    LayerCase(MAMBA2, "Mamba2", 8, 2560),
    *(LayerCase(SMALL, layer, 1, 768) for layer in LAYERS),
    *(
        DecodeCase((STEP,), layer, batch, d_model, dtype)
        for layer, d_model in LAYERS.items()
        for batch in (1, 64)
        for dtype in (torch.float32, torch.bfloat16)
    ),
    *(LatencyCase((Bar("replay", "limit", 0.08e-3, 0.05e-3),), layer) for layer in LAYERS),
    *(ModelCase((Bar("step", "speed", 1.3, 1.5),), layer) for layer in LAYERS),
    *(GenerationCase((Bar("generate", "speed", 1.0, 1.5),), layer) for layer in LAYERS),
    OperatorCase(COPY, CONVOLUTION),
    OperatorCase(COPY, CONVOLUTION_CHANNELS_FIRST),
    OperatorCase(COPY, NORM_GATED),
    OperatorCase(ADD_NORM, NORM_ADD, with_pytorch=True),
]
MODELS = (ModelCase, GenerationCase)
# How the figures are printed: unit, its size, decimals.
UNITS = {
    "forward": ("ms", 1e-3, 4),
    "backward": ("ms", 1e-3, 4),
    "both": ("ms", 1e-3, 3),
    "peak": ("MB", 1e6, 0),
    "kept": ("kB / token", 1e3, 1),
    "held": ("kB / token", 1e3, 1),
    "step": ("ms", 1e-3, 4),
    "replay": ("ms", 1e-3, 4),
    "generate": ("ms", 1e-3, 1),
}
RELATIONS = {"speed": "≥", "share": "≤", "limit": "≤"}


def words_of(judged: Mapping[str, Any]) -> str:
    """A bar and what became of it."""
    scale = UNITS[judged["quantity"]][1] if judged["kind"] == "limit" else 1.0
    relation = RELATIONS[judged["kind"]]
    of_other = "" if judged["other"] in (None, PEER) else f"{judged['other']} {judged['found']:.2f}, "
    words = f"{of_other}{relation} {judged['bar'] / scale:g} {'met' if judged['met'] else 'missed'}"
    if judged["goal"] is not None:
        words += f", goal {judged['goal'] / scale:g} {'met' if judged['goal_met'] else 'missed'}"
    return words


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="layers and models", caption="* recorded", box=None)
    for index, name in enumerate(("case", "figure", "unit", "ours", "before", PEER, "ratio", "bar")):
        table.add_column(name, justify="right" if 2 < index < 7 else "left", no_wrap=True)
    for row in rows:
        first = row["name"]
        for quantity, (unit, scale, decimals) in UNITS.items():
            ours = median_of(row["ours"], quantity)
            if ours is None:
                continue
            cells = [f"{ours / scale:.{decimals}f}"]
            for who in ("before", PEER):
                figures, found = row.get(who) or {}, median_of(row.get(who), quantity)
                mark = "*" if figures.get("recorded") else ""
                cells.append("" if found is None else f"{found / scale:.{decimals}f}{mark}")
            theirs = median_of(row.get(PEER), quantity)
            speed = quantity not in ("peak", "kept", "held")
            ratio = "" if theirs is None else f"{theirs / ours if speed else ours / theirs:.2f}"
            asked = [words_of(judged) for judged in row["judged"] if judged["quantity"] == quantity]
            table.add_row(first, quantity, unit, *cells, ratio, "; ".join(asked))
            first = ""
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--only", nargs="+", metavar="PATTERN", help="only rows whose names contain one of these, as 'step B64'"
    )
    parser.add_argument("--no-models", action="store_true", help="without training and generation of language models")
    parser.add_argument("--trials", type=int, default=30, help="of each measurement (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="trials before those (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the measurements")
    options = parser.parse_args(arguments)
    if options.trials < 1 or options.warmup < 0:
        parser.error("--trials starts at 1, --warmup at 0")
    chosen = [case for case in CASES if options.only is None or any(part in case.name for part in options.only)]
    if not chosen:
        parser.error(f"--only: no name contains {' or '.join(options.only)}; there are: {', '.join(c.name for c in CASES)}")
    require_cuda(parser)

    settings = Settings(torch.device("cuda", torch.cuda.current_device()), options.trials, options.warmup)
    console = Console(width=200, highlight=False)
    described = peers.described_layers(peers.layers())
    console.print(f"{torch.cuda.get_device_name(settings.device)}, torch {torch.__version__}; peer: {described}")
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    result = {
        "benchmark": "layers",
        "machine": machine(settings.device),
        "settings": {"trials": options.trials, "warmup": options.warmup},
        "peer": described,
        "rows": rows,
        "skipped": skipped,
    }
    for case in chosen:
        reason = None
        if isinstance(case, MODELS):
            reason = "left out by --no-models" if options.no_models else models_are_missing()
        elif isinstance(case, OperatorCase):
            reason = case.is_missing()
        if reason is not None:
            skipped[case.name] = reason
            console.print(f"skipped: {case.name}: {reason}")
            continue
        row = case.row(settings)
        rows.append(row)
        # After each case: what was measured is kept if a later one does not end.
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=2, default=str) + "\n")
        unsupported = (row.get(PEER) or {}).get("unsupported")
        console.print(f"{case.name}: done" + (f"; {PEER}: {unsupported}" if unsupported else ""))
        torch.cuda.empty_cache()
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2, default=str) + "\n")
    console.print(table_of(rows))
    missed = [
        f"{row['name']}, {judged['quantity']}: {judged['found']:.3g}, bar {judged['bar']:g}"
        for row in rows
        for judged in row["judged"]
        if not judged["met"]
    ]
    console.print("every bar that could be judged is met" if not missed else "missed:\n  " + "\n  ".join(missed))

    wrong = [f"{row['name']}: {', '.join(row['wrong'])}" for row in rows if row["wrong"]]
    if wrong:
        print("wrong results: " + "; ".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
