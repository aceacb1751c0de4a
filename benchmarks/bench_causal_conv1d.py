#!/usr/bin/env python3
"""causal_conv1d with SiLU, forward and backward: beside a copy of the same bytes, causal-conv1d's kernels and PyTorch's conv1d.

    python benchmarks/bench_causal_conv1d.py [--device cpu] [--json FILE] [--cases NAME ...] [--trials N] [--require [3]]

On CUDA in bfloat16: the size of a layer of Mamba-2, as a slice of its projection's output and channels-first; the copy reads
half of the bytes that the operator must move and writes as many. On the CPU in float32. PyTorch's is
``F.silu(F.conv1d(...))``, padded on both sides and cut. All take turns, and each is compared with the float64 reference
before. Exits with 1 if a result is wrong, or if ``--require`` is given and forward or backward misses its bar.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import peers
from benchmarks.benchmark import Benchmark, Result, Run, main, speedups
from benchmarks.operator_cases import Convolution, measure_operator, operator_columns
from benchmarks.tables import Table, by_direction, text

CAUSAL_CONV1D = "causal-conv1d"


@dataclass(frozen=True)
class Case(Convolution):
    """A convolution by the name that ``--cases`` chooses it by."""

    name: str = ""


LAYER = {"batch": 8, "seqlen": 2048, "channels": 5376, "dtype": torch.bfloat16}
SEQUENCES = tuple(range(0, 8 * 2048 + 1, 512))
CUDA_CASES = [
    Case(**LAYER, columns=10576, name="slice"),
    Case(**LAYER, channels_first=True, name="channels-first"),
    Case(**LAYER, name="contiguous"),
    Case(**LAYER | {"batch": 1, "seqlen": SEQUENCES[-1]}, columns=10576, cu_seqlens=SEQUENCES, name="packed slice"),
    Case(**LAYER | {"dtype": torch.float32}, columns=10576, name="float32 slice"),
    Case(**LAYER | {"batch": 1, "channels": 1792}, columns=3352, name="batch 1 slice"),
]
CPU_CASES = [
    Case(2, 2048, 1536, columns=3352, name="slice"),
    Case(2, 2048, 1536, channels_first=True, name="channels-first"),
    Case(2, 2048, 1536, name="contiguous"),
    Case(2, 2048, 1536, channels_first=True, width=2, name="width 2, channels-first"),
]


def measure_case(case: Case, run: Run) -> dict[str, Any]:
    contenders = case.functions(run.device)
    if run.device.type == "cuda" and case.cu_seqlens is None and (peer := peers.causal_conv1d()) is not None:
        contenders[CAUSAL_CONV1D] = peer
    return {**asdict(case), **measure_operator(case, contenders, run)}


def tables(result: Result) -> list[Table]:
    columns = [text("case", "name"), text("", "direction")]
    columns += operator_columns({"PyTorch": "PyTorch", CAUSAL_CONV1D: CAUSAL_CONV1D})
    return [Table("causal_conv1d, milliseconds", columns, by_direction(result["rows"]), left=2)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")


BENCHMARK = Benchmark(
    "causal_conv1d",
    lambda options: CUDA_CASES if options.device == "cuda" else CPU_CASES,
    lambda cases, run: [measure_case(case, run) for case in cases],
    tables,
    lambda row, result: speedups(row, {"PyTorch": "PyTorch"}),
    add_options=add_options,
    required={"require": ""},
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
