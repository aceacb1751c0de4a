#!/usr/bin/env python3
"""nn.GatedDeltaNet on CUDA beside flash-linear-attention's layer, projections included; eager, without torch.compile.

    python benchmarks/bench_delta_rule_layers.py [--json FILE] [--append] [--cases NAME ...] [--without_peers] [--trials N]

``page.md`` says what each figure is. flash-linear-attention's layers get the weights of ours, and both ``state_dict``s must
load into the other. Outputs and gradients are compared with ours in float64 on the CPU. Exits with 1 if one of ours is wrong; a
missed bar is only reported. Triton compiles and tunes the peer's kernels for minutes before the first case:
``--without_peers`` measures ours alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import peers, triton_kernels
from benchmarks.bench_delta_rule import TRITON_SECONDS
from benchmarks.benchmark import FLA, Benchmark, Result, Run, main
from benchmarks.layer_cases import DeltaLayerCase, layer_figures, layer_tables
from benchmarks.tables import Row, Table

# The defaults of the layer, and the heads of Qwen3-Next.
CASES = [DeltaLayerCase(), DeltaLayerCase(heads=16, value_heads=32, key_dim=128, value_dim=128)]


def figures(row: Row, result: Result) -> dict[str, float]:
    return layer_figures(row, FLA)


def tables(result: Result) -> list[Table]:
    return layer_tables("layers of the delta rules", result["rows"], FLA)


def context(run: Run) -> Result:
    if run.device.type == "cuda" and not run.without_peers:
        triton_kernels.tune(once=False)
    found = None if run.without_peers else peers.layer_of_fla("GatedDeltaNet")
    return {"peer": peers.described_of_fla(found)}


BENCHMARK = Benchmark(
    "delta_rule_layers",
    lambda options: CASES,
    tables,
    figures,
    cache_writes=1,
    context=context,
    appends=True,
    leaves_out_peers=True,
    triton_call=lambda case, device: case.triton_call(device),
    triton_seconds=TRITON_SECONDS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
