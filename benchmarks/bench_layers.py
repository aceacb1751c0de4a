#!/usr/bin/env python3
"""Whole layers and language models on CUDA, beside mamba_ssm's with causal-conv1d's kernels; eager, without torch.compile.

    python benchmarks/bench_layers.py [--json FILE] [--cases NAME ...] [--trials N] [--no-models]

``page.md`` says what each figure is: of nn.Mamba and nn.Mamba2, of their decoding steps, of narrow layers in a CUDA graph, of
language models in training and generation, and of the operators between scans and projections.

mamba_ssm's layers get the weights of ours, and both ``state_dict``s must load into the other. Outputs, states, gradients and
logits of both are compared with ours in float64 on the CPU, logits with ours in float32. Exits with 1 if one is wrong; a missed
bar is only reported. Where mamba_ssm or causal-conv1d is not installed, figures recorded on an H200 are printed, and marked.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import peers
from benchmarks.benchmark import PEER, Benchmark, Case, Result, Run, main, speedups
from benchmarks.layer_cases import DecodeCase, GenerationCase, LanguageModelCase, LatencyCase, LayerCase, ModelCase
from benchmarks.operator_cases import Convolution, Norm, operator_columns
from benchmarks.tables import DIRECTIONS, Column, Row, Table, by_direction, figure, median, ratio, text, throughput
from ssm_kernels.choices import RecomputeName

BF16, FP32 = torch.bfloat16, torch.float32
LAYERS = {"Mamba": 2048, "Mamba2": 2560}
# Those that take the least time come first: a run that is cut short has most of the rows.
CASES: list[Case] = [
    # The calls of a Mamba-2 layer of 2560 channels. x of the convolution is a slice of the in-projection's output.
    Convolution(8, 2048, 5376, columns=10576, dtype=BF16),
    Convolution(8, 2048, 5376, channels_first=True, dtype=BF16),
    Norm("rms_norm_gated", (8, 2048), 5120, weight_dtype=BF16),
    Norm("add_rms_norm", (8, 2048), 2560, residual_dtype=FP32, weight_dtype=BF16),
    *(LayerCase(layer, 1, 768) for layer in LAYERS),
    *(LayerCase(layer, 8, d_model) for layer, d_model in LAYERS.items()),
    *(
        LayerCase(layer, 8, size, recompute=level)
        for layer, d_model in LAYERS.items()
        for size in (768, d_model)
        for level in get_args(RecomputeName)
    ),
    *(
        DecodeCase(layer, batch, d_model, dtype)
        for layer, d_model in LAYERS.items()
        for batch in (1, 64)
        for dtype in (FP32, BF16)
    ),
    *(LatencyCase(layer) for layer in LAYERS),
    *(ModelCase(layer) for layer in LAYERS),
    *(GenerationCase(layer) for layer in LAYERS),
]


def figures(row: Row, result: Result) -> dict[str, float]:
    others = {name: name for name in (PEER, "copy", "PyTorch")}
    found = speedups(row, others, (*DIRECTIONS, "both", "step", "generate"))
    found |= {what: value for what in ("kept", "replay") if (value := median(row["ours"], what)) is not None}
    for what in ("peak", "kept"):
        ours, theirs = (median(row.get(who), what) for who in ("ours", PEER))
        if ours and theirs:
            found[f"{what} over mamba_ssm"] = ours / theirs
    return found


def beside(what: str, unit: float, decimals: int, name: str, *, before: bool = True) -> list[Column]:
    """The columns of our figure, of ours before, and of mamba_ssm's."""
    contenders = {"ours": name, **({"before": "before"} if before else {}), PEER: PEER}
    return [figure(column, who, what, unit, decimals) for who, column in contenders.items()]


def per_second(name: str, what: str, unit: float = 1.0) -> list[Column]:
    """The columns of our tokens per second and of mamba_ssm's."""
    return [throughput(name, "tokens", what, unit), throughput(PEER, "tokens", what, unit, PEER)]


def speedup(what: str) -> Column:
    return ratio("speed-up", what, PEER, "ours")


def worst_error(name: str, who: str, *, of_gradients: bool) -> Column:
    def of_row(row: Row) -> str:
        found = row["errors"].get(who, {})
        chosen = {result: error for result, error in found.items() if result.startswith("grad_") == of_gradients}
        worst = max(chosen, key=lambda result: chosen[result], default=None)
        return "" if worst is None else f"{chosen[worst]:.1e} ({worst})"

    return Column(name, of_row)


def tables(result: Result) -> list[Table]:
    rows, case = result["rows"], text("case", "name")

    def of_kind(title: str, kind: str, *columns: Column) -> Table:
        return Table(title, [case, *columns], [row for row in rows if row["kind"] == kind and not row.get("recompute")])

    operators = by_direction([row for row in rows if row["kind"] == "operator"])
    unsupported = [row for row in rows if (row.get(PEER) or {}).get("unsupported")]
    skipped = [{"name": name, "reason": reason} for name, reason in result["skipped"].items()]
    return [
        of_kind(
            "layers, milliseconds",
            "layer",
            *beside("forward", 1e-3, 3, "forward"),
            speedup("forward"),
            *beside("both", 1e-3, 3, "forward + backward"),
            speedup("both"),
        ),
        of_kind(
            "memory of layers",
            "layer",
            *beside("peak", 1e6, 0, "peak, MB"),
            ratio("ours / mamba_ssm", "peak", "ours", PEER),
            *beside("kept", 1e3, 1, "kept, kB", before=False),
            *beside("held", 1e3, 1, "held, kB", before=False),
        ),
        Table(
            "recompute",
            [
                case,
                figure("kept, kB", "ours", "kept", 1e3, 1),
                figure("peak, MB", "ours", "peak", 1e6, 0),
                figure("forward + backward, ms", "ours", "both", 1e-3, 3),
            ],
            [row for row in rows if row.get("recompute")],
        ),
        of_kind("decoding steps, microseconds", "decode", *beside("step", 1e-6, 2, "µs", before=False), speedup("step")),
        of_kind("small layers, milliseconds", "latency", *beside("replay", 1e-3, 4, "ms")),
        of_kind(
            "training steps",
            "model",
            *beside("step", 1e-3, 1, "ms"),
            *per_second("10³ tokens/s", "step", 1e3),
            speedup("step"),
            *beside("peak", 2**30, 1, "peak, GiB"),
        ),
        of_kind(
            "generation",
            "generation",
            *beside("generate", 1e-3, 1, "ms", before=False),
            *per_second("tokens/s", "generate"),
            speedup("generate"),
        ),
        Table(
            "operators", [case, text("", "direction"), *operator_columns({PEER: PEER, "PyTorch": "PyTorch"})], operators, left=2
        ),
        Table(
            "largest relative errors",
            [
                case,
                *(
                    worst_error(prefix + name, who, of_gradients=name == "gradients")
                    for who, prefix in (("ours", ""), (PEER, f"{PEER}, "))
                    for name in ("outputs", "gradients")
                ),
            ],
            rows,
        ),
        Table("not measured", [case, text("reason")], skipped, left=2),
        Table("unsupported by mamba_ssm", [case, Column("reason", lambda row: row[PEER]["unsupported"])], unsupported, left=2),
    ]


def skipped(options: argparse.Namespace) -> dict[str, str]:
    models = [case.name for case in CASES if isinstance(case, LanguageModelCase)]
    return dict.fromkeys(models, "left out by --no-models") if options.no_models else {}


def context(run: Run) -> Result:
    return {"peer": peers.described(peers.layers(), "causal-conv1d"), "skipped": skipped(run.options)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-models", action="store_true", help="without training and generation of language models")


BENCHMARK = Benchmark(
    "layers",
    lambda options: [case for case in CASES if case.name not in skipped(options)],
    tables,
    figures,
    trials=30,
    warmup=5,
    cache_writes=1,
    context=context,
    add_options=add_options,
    triton_call=lambda case, device: case.triton_call(device),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
