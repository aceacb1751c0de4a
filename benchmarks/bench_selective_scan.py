#!/usr/bin/env python3
"""selective_scan on CUDA: forward and backward, beside mamba_ssm's kernel and beside the least time that the chip needs.

    python benchmarks/bench_selective_scan.py [--json FILE] [--cases NAME ...] [--trials N]

``page.md`` says what each figure is, ``floors.py`` how the least time follows from an H200's rates. Cases of one shape take
turns, and mamba_ssm's kernel with them, if it is installed; else figures recorded with it on an H200 are printed and marked.

Before a case is timed, its results and gradients for some channels are compared with those of the CPU kernel in float64. Exits
with 1 if one is wrong; a missed bar is only reported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.benchmark import PEER, Benchmark, Contender, Function, Result, Run, main, speedups
from benchmarks.discretization.scans import ScanSize, scan_bytes, scan_inputs
from benchmarks.floors import H200_RATES, floors
from benchmarks.harness import on_h200
from benchmarks.operator_cases import OperatorCase
from benchmarks.tables import (
    DIRECTIONS,
    Column,
    Row,
    Table,
    figure,
    largest_errors,
    median,
    over,
    ratio,
    text,
    throughput,
    versus,
)
from ssm_kernels import reference

BF16, FP32 = torch.bfloat16, torch.float32
ALWAYS_FP32 = {"grad_A", "grad_D", "grad_delta_bias"}
CHECKED_CHANNELS = 8
# The axis of the channels; B and C have none.
CHANNEL_AXES = {"out": 1, "u": 1, "delta": 1, "z": 1, "A": 0, "D": 0, "delta_bias": 0}


@dataclass(frozen=True)
class Case(OperatorCase):
    """A row of the table: sizes, types and options of a scan.

    Attributes:
        packed: mean length of sequences that the row packs, whose lengths differ; None for one sequence.
    """

    batch: int
    dim: int
    seqlen: int
    dstate: int = 16
    dtype: torch.dtype = BF16
    z: bool = True
    groups: int | None = None
    contiguous: str = "seqlen"
    discretization: str = "zoh"
    packed: int | None = None
    reverse: bool = False
    operator = "selective_scan"
    timed = ("forward", "training", "backward")
    limits = MappingProxyType({BF16: (2.5e-3, 2.5e-3), FP32: (1e-5, 1e-5)})

    @property
    def name(self) -> str:
        words = ["bf16" if self.dtype == BF16 else "fp32", f"B{self.batch} D{self.dim} L{self.seqlen} N{self.dstate}"]
        words += ["z"] if self.z else []
        words += [] if self.groups is None else [f"G{self.groups}"]
        words += ["D-contiguous"] if self.contiguous == "dim" else []
        words += [] if self.discretization == "zoh" else [self.discretization]
        words += [] if self.packed is None else [f"packed {self.packed}"]
        words += ["reverse"] if self.reverse else []
        return " ".join(words)

    @property
    def turns(self) -> tuple[Any, ...]:
        return self.batch, self.dim, self.seqlen, self.dstate, self.dtype

    @property
    def options(self) -> dict[str, Any]:
        return {"discretization": self.discretization, "delta_softplus": True, "reverse": self.reverse}

    @property
    def computes_as_the_peer(self) -> bool:
        return self.discretization == "zoh" and self.packed is None and not self.reverse

    @property
    def size(self) -> ScanSize:
        return ScanSize(self.batch, self.dim, self.seqlen, self.dstate)

    def inputs(self, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
        inputs = scan_inputs(self.size, device=device, dtype=self.dtype, seed=seed, groups=self.groups)
        if not self.z:
            del inputs["z"]
        if self.contiguous == "dim":
            for name in inputs.keys() & {"u", "delta", "z", "B", "C"}:
                inputs[name] = inputs[name].mT.contiguous().mT
        return inputs

    def packing(self, device: torch.device | str) -> dict[str, Tensor]:
        """The first and last steps of the packed sequences, whose borders are drawn."""
        if self.packed is None:
            return {}
        borders = torch.rand(max(1, self.seqlen // self.packed) - 1, generator=torch.Generator().manual_seed(0)).sort().values
        ends = torch.tensor([0]), (borders * self.seqlen).long(), torch.tensor([self.seqlen])
        return {"cu_seqlens": torch.cat(ends).to(device, torch.int32)}

    def contender(self, device: torch.device, seed: int = 0) -> Contender:
        ours = super().contender(device, seed)
        return ours._replace(function=functools.partial(ours.function, **self.packing(device)))

    def exact_function(self) -> Function:
        return functools.partial(self.function(), **self.packing("cpu"))

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """Some channels. Gradients of B and C are those of these channels alone."""
        if name not in CHANNEL_AXES:
            return tensor
        every = self.dim // CHECKED_CHANNELS
        channels = slice(0, CHECKED_CHANNELS * every, every)
        return tensor[:, channels] if CHANNEL_AXES[name] else tensor[channels]

    def allowed(self, name: str) -> float:
        return self.limits[FP32 if name in ALWAYS_FP32 else self.dtype][0]

    def amounts(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        forward_bytes, both_bytes = scan_bytes(inputs)
        return {
            "updates": self.size.updates,
            "seqlen": self.seqlen,
            "bytes": {"forward": forward_bytes, "backward": both_bytes - forward_bytes},
            "chunk_state_bytes": chunk_state_bytes(inputs),
        }

    def others(self, ours: Contender, run: Run) -> dict[str, Contender]:
        found = super().others(ours, run) if self.computes_as_the_peer else {}
        if not found or self.contiguous == "seqlen":
            return found
        # The peer copies such tensors: in its own layout too.
        copied = replace(self, contiguous="seqlen").inputs(run.device)
        given = found["peer"]
        return {"peer": Contender(given.function, copied, [ours.grads[0].contiguous()]), "peer_given": given}


MAIN = (8, 2048, 2048)
LONG = (1, 2048, 65536)
# Vision Mamba's length, and its neighbors, whose rows start at other multiples of 2 bytes.
SHIFTED_LENGTHS = (196, 197, 199, 200)
CASES = [
    Case(*MAIN),
    Case(*MAIN, z=False),
    Case(8, 5120, 2048),
    Case(*LONG),
    Case(1, 1536, 4096),
    Case(32, 512, 60, dtype=FP32, z=False),
    *(Case(64, 384, seqlen) for seqlen in SHIFTED_LENGTHS),
    Case(8, 512, 1024, dtype=FP32, z=False),
    Case(*MAIN, dtype=FP32),
    *(Case(8, 1024, 2048, dstate) for dstate in (8, 32, 64, 128, 256)),
    *(Case(*MAIN, groups=groups) for groups in (1, 4)),
    Case(*MAIN, contiguous="dim"),
    *(Case(*MAIN, discretization=method) for method in reference.DISCRETIZATIONS if method != "zoh"),
    Case(*MAIN, reverse=True),
    *(Case(*LONG, packed=packed) for packed in (256, 1024)),
]


def chunk_state_bytes(inputs: Mapping[str, Tensor]) -> int:
    """Bytes that forward saves for backward, apart from its inputs."""
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    meta = [inputs[name].to("meta") if name in inputs else None for name in names]
    *_, states = torch.ops.ssm_kernels._selective_scan_fwd(*meta, None, "zoh", True, True)
    return states.nbytes


def other_of(row: Row, result: Result) -> tuple[str, Row] | None:
    """The name and the row of the method, layout or sequence that a row is compared with; None if it is the base itself."""
    variants = {
        f" {row['discretization']}": "zoh",
        " D-contiguous": "L-contiguous",
        f" packed {row['packed']}": "one sequence",
        " reverse": "forward in time",
    }
    for suffix, other in variants.items():
        base = row["name"].removesuffix(suffix)
        found = next((found for found in result["rows"] if found["name"] == base != row["name"]), None)
        if found is not None:
            return other, found
    return None


def slowest_over_neighbors(row: Row, result: Result, what: str) -> float | None:
    """The time for each step, over the least of the rows of SHIFTED_LENGTHS."""

    def of_step(found: Row) -> float:
        return found["ours"][what]["median"] / found["seqlen"]

    rows = [found for found in result["rows"] if found["seqlen"] in SHIFTED_LENGTHS]
    return of_step(row) / min(map(of_step, rows)) if row in rows else None


def figures(row: Row, result: Result) -> dict[str, float]:
    found = speedups(row, {"peer": PEER})
    if other := other_of(row, result):
        name, ours, theirs = other[0], row["ours"], other[1]["ours"]
        found |= {f"{what}, time over {name}": ours[what]["median"] / theirs[what]["median"] for what in DIRECTIONS}
        if name == "zoh":
            found |= speedups({"ours": ours, "peer": other[1].get("peer", {})}, {"peer": f"{PEER}'s zoh"})
    for what in DIRECTIONS:
        if (slower := slowest_over_neighbors(row, result, what)) is not None:
            found[f"{what}, time of a step over the fastest neighbor's"] = slower
    ours, theirs = (median(row.get(who), "peak_bytes") for who in ("ours", "peer"))
    return found | ({"peak memory over mamba_ssm": ours / theirs} if ours and theirs else {})


def step_time(name: str, who: str, what: str) -> Column:
    """Nanoseconds that a step of all channels takes."""

    def value(row: Row) -> str:
        found = median(row.get(who), what)
        return "" if found is None else f"{found * 1e9 / row['seqlen']:.0f}"

    return Column(name, value)


def floor_columns(direction: str, rates: Mapping[str, float]) -> list[Column]:
    def floor_of(row: Row) -> tuple[str, float]:
        return max(floors(row, rates)[direction].items(), key=lambda item: item[1])

    return [
        Column(f"floor, {direction}", lambda row: f"{floor_of(row)[1] * 1e3:.3f}"),
        Column("by", lambda row: floor_of(row)[0]),
        Column("× floor", lambda row: over(median(row["ours"], direction), floor_of(row)[1])),
        throughput("GB/s", "bytes", direction, 1e9),
        Column("10¹² updates/s", lambda row: over(row["updates"] / 1e12, median(row["ours"], direction))),
    ]


def tables(result: Result) -> list[Table]:
    rows = result["rows"]
    of_zoh = [row for row in rows if row["discretization"] == "zoh" and row["packed"] is None and not row["reverse"]]
    case = text("case", "name")
    speed = [case]
    for what, name in (("forward", "forward"), ("training", "in training"), ("backward", "backward")):
        speed += [figure(name, "ours", what), *versus(PEER, "peer", what)]
    against = [case, text("against", "other")]
    for what in DIRECTIONS:
        against += [figure(what, "found", what), ratio("ratio", what, "ours", "other's")]
    against += [ratio(f"{PEER}'s zoh / ours, {what}", what, "peer", "ours") for what in DIRECTIONS]
    compared = [
        row
        | {"found": row["ours"], "other": other[0], "other's": other[1]["ours"]}
        | ({"peer": other[1].get("peer")} if other[0] == "zoh" else {"peer": None})
        for row in rows
        if (other := other_of(row, result))
    ]

    def bytes_each(name: str, found: Callable[[Row], float | None]) -> Column:
        return Column(name, lambda row: over(found(row), row["updates"] // row["dstate"]))

    per_step = [case]
    for who, name in (("ours", "ours"), ("peer", PEER)):
        per_step += [step_time(f"{what}, {name}", who, what) for what in DIRECTIONS]

    memory = [
        case,
        bytes_each("ours", lambda row: median(row["ours"], "peak_bytes")),
        bytes_each("of which chunk states", lambda row: row["chunk_state_bytes"]),
        bytes_each(PEER, lambda row: median(row.get("peer"), "peak_bytes")),
        ratio("ours / mamba_ssm", "peak_bytes", "ours", "peer", 3),
    ]
    rates = result["rates"]
    return [
        Table("selective_scan, milliseconds", speed, of_zoh),
        Table("nanoseconds for each step", per_step, [row for row in of_zoh if row["seqlen"] in SHIFTED_LENGTHS]),
        Table(
            "mamba_ssm with D-contiguous tensors, milliseconds",
            [case, *(figure(what, "peer_given", what) for what in DIRECTIONS)],
            [row for row in rows if "forward" in row.get("peer_given", {})],
        ),
        Table("methods and layouts", against, compared, left=2),
        Table(
            "time over the floor",
            [case, *(column for what in DIRECTIONS for column in floor_columns(what, rates))],
            of_zoh if rates else [],
        ),
        Table("peak memory, bytes", memory, [row for row in of_zoh if median(row["ours"], "peak_bytes") is not None]),
        largest_errors(rows, "dtype"),
    ]


def context(run: Run) -> Result:
    return {
        "peer": peers.described(peers.operator("selective_scan"), recorded=peers.SOURCE_OF_SCANS),
        "rates": H200_RATES if on_h200(run.device) else None,
    }


BENCHMARK = Benchmark(
    "selective_scan",
    lambda options: CASES,
    tables,
    figures,
    context=context,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
