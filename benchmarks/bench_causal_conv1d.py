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
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.benchmark import PEER, Benchmark, Result, main, speedups
from benchmarks.operator_cases import Convolution, operator_columns
from benchmarks.tables import Table, by_direction, text


@dataclass(frozen=True)
class Case(Convolution):
    """A convolution by the name that ``--cases`` chooses it by."""

    label: str = ""

    @property
    def name(self) -> str:
        return self.label


LAYER = {"batch": 8, "seqlen": 2048, "channels": 5376, "dtype": torch.bfloat16}
SEQUENCES = tuple(range(0, 8 * 2048 + 1, 512))
CUDA_CASES = [
    Case(**LAYER, columns=10576, label="slice"),
    Case(**LAYER, channels_first=True, label="channels-first"),
    Case(**LAYER, label="contiguous"),
    Case(**LAYER | {"batch": 1, "seqlen": SEQUENCES[-1]}, columns=10576, cu_seqlens=SEQUENCES, label="packed slice"),
    Case(**LAYER | {"dtype": torch.float32}, columns=10576, label="float32 slice"),
    Case(**LAYER | {"batch": 1, "channels": 1792}, columns=3352, label="batch 1 slice"),
]
CPU_CASES = [
    Case(2, 2048, 1536, columns=3352, label="slice"),
    Case(2, 2048, 1536, channels_first=True, label="channels-first"),
    Case(2, 2048, 1536, label="contiguous"),
    Case(2, 2048, 1536, channels_first=True, width=2, label="width 2, channels-first"),
]


def tables(result: Result) -> list[Table]:
    columns = [text("case", "name"), text("", "direction"), *operator_columns({"PyTorch": "PyTorch", PEER: "causal-conv1d"})]
    return [Table("causal_conv1d, milliseconds", columns, by_direction(result["rows"]), left=2)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")


BENCHMARK = Benchmark(
    "causal_conv1d",
    lambda options: CUDA_CASES if options.device == "cuda" else CPU_CASES,
    tables,
    lambda row, result: speedups(row, {"PyTorch": "PyTorch"}),
    add_options=add_options,
    required={"require": ""},
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
