#!/usr/bin/env python3
"""nn.Mamba3 on CUDA beside mamba_ssm's layer, projections included; eager, without torch.compile.

    python benchmarks/bench_mamba3_layers.py [--json FILE] [--append] [--cases NAME ...] [--without_peers] [--trials N]

``page.md`` says what each figure is. mamba_ssm's layer gets the weights of ours, and both ``state_dict``s must load into the
other. Outputs and gradients are compared with ours in float64 on the CPU. Exits with 1 if one of ours is wrong; a missed bar is
only reported.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import peers
from benchmarks.benchmark import PEER, Benchmark, Result, Run, main
from benchmarks.layer_cases import LayerCase, layer_figures, layer_tables
from benchmarks.tables import Row, Table

CASES = [LayerCase("Mamba3"), LayerCase("Mamba3", batch=1, d_model=768)]


def figures(row: Row, result: Result) -> dict[str, float]:
    return layer_figures(row, PEER)


def tables(result: Result) -> list[Table]:
    return layer_tables("layers of Mamba-3", result["rows"], PEER)


def context(run: Run) -> Result:
    found = None if run.without_peers else peers.layers().get("Mamba3")
    return {"peer": peers.described(found) if found else "not installed"}


BENCHMARK = Benchmark(
    "mamba3_layers",
    lambda options: CASES,
    tables,
    figures,
    cache_writes=1,
    context=context,
    appends=True,
    leaves_out_peers=True,
    triton_call=lambda case, device: case.triton_call(device),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
