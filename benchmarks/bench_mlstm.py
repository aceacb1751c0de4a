#!/usr/bin/env python3
"""mlstm_scan on CUDA: forward, and forward and backward, beside the published figures of mlstm_kernels.

    python benchmarks/bench_mlstm.py [--json FILE] [--append] [--cases NAME ...] [--trials N]

``page.md`` says what each figure is. mlstm_kernels' licence does not let us run it here: its figures are those that its authors
publish for an H100, and marked as recorded. ``--cases`` chooses cases, and ``--append`` keeps the rows of FILE that this run
does not measure.

Before a case is timed, its results and gradients for the last head of the last row of the batch are compared with those of the
CPU's matmuls in float64. Exits with 1 if a result is wrong; a missed bar is only reported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import ssm_kernels
from benchmarks.bench_delta_rule import offsets_of
from benchmarks.benchmark import Benchmark, Contender, Copy, Function, Result, Run, main, speedups
from benchmarks.operator_cases import OperatorCase
from benchmarks.tables import Column, Row, Table, error_columns, errors_of, figure, median, over, text, throughput, versus

PEER = "mlstm_kernels"
TIMED = ("forward", "both")
# Relative L2 errors of an output and of a gradient beyond which a result is wrong, by dtype. Rounding to bfloat16 makes 1.7e-3.
LIMITS = {torch.bfloat16: (8e-3, 1.5e-2), torch.float32: (1e-5, 1e-4)}


@dataclass(frozen=True)
class MlstmCase(OperatorCase):
    """A row of the table.

    Attributes:
        sequences: packed sequences of equal length in a row of the batch; 1 for a row that is not packed.
        sigmoid: the operator takes the sigmoid of the input gate, and does not divide.
    """

    batch: int
    seqlen: int
    heads: int = 8
    key_dim: int = 256
    value_dim: int = 512
    sequences: int = 1
    sigmoid: bool = False
    dtype: torch.dtype = torch.bfloat16
    operator = "mlstm_scan"
    timed = TIMED
    peer_name = PEER
    limits = LIMITS

    @property
    def name(self) -> str:
        words = {
            f"{self.sequences} sequences": self.sequences > 1,
            "sigmoid, no divisor": self.sigmoid,
            "fp32": self.dtype == torch.float32,
        }
        sizes = f"B{self.batch} L{self.seqlen} H{self.heads} K{self.key_dim} V{self.value_dim}"
        return ", ".join([sizes, *(word for word, holds in words.items() if holds)])

    def function(self, module: ModuleType = ssm_kernels) -> Function:
        return functools.partial(self.call, getattr(module, self.operator))

    def call(self, scan: Function, **arguments: Any) -> Any:
        if self.sequences > 1:
            arguments["cu_seqlens"] = offsets_of(self.sequences, self.seqlen, arguments["q"].device)
        if self.sigmoid:
            arguments |= {"input_gate": "sigmoid", "normalize": False}
        return scan(**arguments)

    def inputs(self, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
        """Normal numbers; forget gates around 3, so that a memory lasts for about 20 steps."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*columns: int) -> Tensor:
            return torch.randn((self.batch, self.seqlen, self.heads, *columns), generator=generator, device=device)

        rows = {"q": normal(self.key_dim), "k": normal(self.key_dim), "v": normal(self.value_dim)}
        return {name: row.to(self.dtype) for name, row in rows.items()} | {"i": normal(), "f": normal() + 3}

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """The last head of the last row."""
        return tensor[-1:, :, -1:]

    def others(self, ours: Contender, run: Run) -> dict[str, Contender | Copy]:
        return {}

    def amounts(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        given, out = sum(tensor.nbytes for tensor in inputs.values()), inputs["v"].nbytes
        moved = {"forward": given + out, "both": 3 * given + 2 * out}
        return {"bytes": moved, "given_bytes": given, "least_bytes": 2 * (given + out)}


CASES = [
    MlstmCase(128, 512),
    MlstmCase(32, 2048),
    MlstmCase(8, 8192),
    MlstmCase(1, 65536),
    MlstmCase(1, 65536, sequences=32),
    MlstmCase(32, 2048, sigmoid=True),
    MlstmCase(8, 4096, key_dim=128, value_dim=128),
    MlstmCase(8, 4095, heads=7, key_dim=100, value_dim=300),
    MlstmCase(2, 1024, heads=4, dtype=torch.float32),
]


def figures(row: Row, result: Result) -> dict[str, float]:
    errors = errors_of(row)
    found = {f"{what}, seconds": time for what in TIMED if (time := median(row["ours"], what)) is not None}
    found |= {
        "error of out": errors["out"],
        "largest error of gradients": max(error for name, error in errors.items() if name.startswith("grad_")),
    }
    return {**speedups(row, {PEER: PEER}, TIMED), **found}


def tables(result: Result) -> list[Table]:
    rows, case = result["rows"], text("case", "name")
    speed = [case]
    for what in TIMED:
        label = {"forward": "forward", "both": "forward + backward"}[what]
        speed += [figure(label, "ours", what), throughput("GB/s", "bytes", what, 1e9), *versus(PEER, PEER, what)]

    def peak(row: Row) -> float | None:
        found = median(row["ours"], "peak_bytes")
        return None if found is None else row["given_bytes"] + found

    memory = [
        case,
        Column("least", lambda row: f"{row['least_bytes'] / 1e6:.0f}"),
        Column("peak", lambda row: over(peak(row), 1e6, 0)),
        Column("× least", lambda row: over(peak(row), row["least_bytes"])),
    ]
    return [
        Table("mlstm_scan, milliseconds", speed, rows),
        Table("memory, megabytes", memory, rows),
        Table("relative errors", [case, *error_columns(rows)], rows),
    ]


def context(run: Run) -> Result:
    return {"settings": {"compared": "the last head of the last row"}}


BENCHMARK = Benchmark("mlstm_scan", lambda options: CASES, tables, figures, context=context, appends=True)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
