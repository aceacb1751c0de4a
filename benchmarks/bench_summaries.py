#!/usr/bin/env python3
"""The summaries of a span of steps on CUDA, beside forward of their scans: the work that context parallelism adds to a rank.

    python benchmarks/bench_summaries.py [--json FILE] [--cases NAME ...] [--trials N]

``page.md`` says what each figure is. Summary and scan take turns, on the same tensors. Before a case is timed, the last
state of some channels and its gradients are compared with those of the CPU kernel in float64. Exits with 1 if one is wrong; a
missed bar is only reported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import ssm_kernels
from benchmarks.benchmark import Benchmark, Contender, Copy, Function, Result, Run, main
from benchmarks.operator_cases import OperatorCase, normal
from benchmarks.tables import Column, Row, Table, errors_of, figure, median, over, text, throughput
from ssm_kernels._recurrences import Recurrence, recurrences

COMPARED_CHANNELS = 8
Draw = Callable[..., Tensor]


@dataclass(frozen=True)
class SummaryCase(OperatorCase):
    """The summary of a scan, in bfloat16.

    Attributes:
        scan: the scan's name in ``ssm_kernels``.
        sizes: those of the row's name, by letter; B is the batch.
    """

    scan: str
    sizes: Mapping[str, int]
    dtype = torch.bfloat16
    # Decays of spans as long as these are zero in float32.
    results = ("last_state",)
    timed = ("forward",)
    # Results are rounded to float32, gradients to bfloat16.
    limits = MappingProxyType({torch.bfloat16: (1e-4, 3.5e-3)})

    @property
    def name(self) -> str:
        return " ".join([self.scan, *(f"{letter}{size}" for letter, size in self.sizes.items())])

    @property
    def operator(self) -> str:
        return f"{self.scan}_summary"

    @property
    def peer(self) -> None:
        return None

    def amounts(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"bytes": {"forward": sum(tensor.nbytes for tensor in inputs.values())}}

    def scan_inputs(self, draw: Draw) -> dict[str, Tensor]:
        """The arguments of the scan that its summary does not have."""
        return {}

    def others(self, ours: Contender, run: Run) -> dict[str, Contender | Copy]:
        draw = functools.partial(normal, torch.Generator(run.device).manual_seed(2), dtype=self.dtype)
        function: Function = functools.partial(getattr(ssm_kernels, self.scan), **self.options)
        return {"scan": Contender(function, {**ours.inputs, **self.scan_inputs(draw)}, [])}

    def prepare(self, who: str, contender: Any, figures: dict[str, Any], run: Run) -> Any:
        return contender.stages(*self.timed)


@dataclass(frozen=True)
class RecurrenceSummary(SummaryCase):
    """The summary of a recurrence: inputs of the size (B, T, H), and of the size H those that broadcast."""

    row: Recurrence

    def inputs(self, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
        draw = functools.partial(normal, torch.Generator(device).manual_seed(seed))
        own = [name for name in self.row.inputs if name not in self.row.broadcast]
        found = {name: draw(*self.sizes.values(), dtype=self.dtype) for name in own}
        found |= {name: draw(self.sizes["H"], dtype=torch.float32).abs() + 0.1 for name in self.row.broadcast}
        if self.scan == "linear_scan":
            found["a"] = found["a"].float().sigmoid().to(self.dtype)
        if self.scan == "hgrn_scan":
            found["log_gate"] = torch.nn.functional.logsigmoid(found["log_gate"].float()).to(self.dtype)
        return found

    def part(self, name: str, tensor: Tensor) -> Tensor:
        return tensor[..., :: max(1, self.sizes["H"] // COMPARED_CHANNELS)]


@dataclass(frozen=True)
class SelectiveScanSummary(SummaryCase):
    options = MappingProxyType({"delta_softplus": True})

    def inputs(self, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
        draw = functools.partial(normal, torch.Generator(device).manual_seed(seed))
        B, D, L, N = self.sizes.values()
        return {
            "u": draw(B, L, D, dtype=self.dtype).mT,
            "delta": draw(B, L, D, dtype=self.dtype).mT,
            "A": -draw(D, N, dtype=torch.float32).exp(),
            "B": draw(B, N, L, dtype=self.dtype),
            "delta_bias": draw(D, dtype=torch.float32) - 4,
        }

    def scan_inputs(self, draw: Draw) -> dict[str, Tensor]:
        B, _, L, N = self.sizes.values()
        return {"C": draw(B, N, L)}

    def part(self, name: str, tensor: Tensor) -> Tensor:
        if name == "B":
            return tensor
        axis = 0 if name in ("A", "delta_bias") else 1
        return tensor.narrow(axis, 0, COMPARED_CHANNELS)


@dataclass(frozen=True)
class SsdSummary(SummaryCase):
    options = MappingProxyType({"dt_softplus": True})
    # The products have operands in bfloat16.
    limits = MappingProxyType({torch.bfloat16: (3.5e-3, 1.2e-2)})

    def inputs(self, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
        draw = functools.partial(normal, torch.Generator(device).manual_seed(seed))
        B, L, H, P, N = self.sizes.values()
        return {
            "x": draw(B, L, H, P, dtype=self.dtype),
            "dt": draw(B, L, H, dtype=self.dtype),
            "A": -draw(H, dtype=torch.float32).exp(),
            "B": draw(B, L, 1, N, dtype=self.dtype),
            "dt_bias": draw(H, dtype=torch.float32) - 4,
        }

    def scan_inputs(self, draw: Draw) -> dict[str, Tensor]:
        B, L, _, _, N = self.sizes.values()
        return {"C": draw(B, L, 1, N)}

    def part(self, name: str, tensor: Tensor) -> Tensor:
        if name == "B":
            return tensor
        axis = {"x": 2, "dt": 2, "last_state": 1}.get(name, 0)
        return tensor.narrow(axis, 0, 1)


SHAPES = ((8, 2048, 2048), (1, 65536, 1024), (1, 65536, 256))


CASES: list[SummaryCase] = [
    SelectiveScanSummary("selective_scan", {"B": 8, "D": 2048, "L": 2048, "N": 16}),
    SelectiveScanSummary("selective_scan", {"B": 1, "D": 2048, "L": 65536, "N": 16}),
    SsdSummary("ssd_chunk_scan", {"B": 8, "L": 2048, "H": 64, "P": 64, "N": 128}),
    SsdSummary("ssd_chunk_scan", {"B": 1, "L": 65536, "H": 32, "P": 64, "N": 128}),
    *(
        RecurrenceSummary(row.scan, dict(zip("BTH", shape, strict=True)), row)
        for shape in SHAPES
        for row in recurrences.values()
        if shape == SHAPES[0] or row.scan in ("linear_scan", "minlstm_scan")
    ),
]


def share_of_forward(row: Row) -> float | None:
    ours, scan = (median(row.get(who), "forward") for who in ("ours", "scan"))
    return ours / scan if ours and scan else None


def figures(row: Row, result: Result) -> dict[str, float]:
    found = share_of_forward(row)
    return {} if found is None else {"time over that of the scan's forward": found}


def tables(result: Result) -> list[Table]:
    columns = [
        text("case", "name"),
        figure("summary", "ours", "forward", decimals=4),
        throughput("GB/s", "bytes", "forward", 1e9),
        figure("scan, forward", "scan", "forward", decimals=4),
        Column("of a forward", lambda row: over(share_of_forward(row), 1.0)),
    ]
    errors = [
        text("case", "name"),
        Column("last state", lambda row: f"{errors_of(row)['last_state']:.1e}"),
        Column(
            "largest of a gradient",
            lambda row: f"{max(error for name, error in errors_of(row).items() if 'grad_' in name):.1e}",
        ),
    ]
    return [
        Table("summaries, milliseconds", columns, result["rows"]),
        Table("relative errors of summaries", errors, result["rows"]),
    ]


BENCHMARK = Benchmark("summaries", lambda options: CASES, tables, figures, trials=50, warmup=5)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
