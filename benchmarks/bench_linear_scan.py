#!/usr/bin/env python3
"""The gated linear recurrences on CUDA: forward and backward, beside a copy, beside other scans and beside cuDNN's layers.

    python benchmarks/bench_linear_scan.py [--json FILE] [--cases NAME ...] [--trials N] [--skip_compile]

``page.md`` says what each figure is. Cases of one shape take turns with their peers: for ``linear_scan`` the kernels of
flash-linear-attention and accelerated-scan, for minGRU the loop over time compiled by ``torch.compile``, at one size. Where a
peer is not installed, figures recorded on an H200 are printed and marked.

Before a case is timed, its results and gradients for some channels are compared with those of the CPU kernel in float64. Exits
with 1 if one is wrong; a missed bar is only reported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.benchmark import Benchmark, Contender, Copy, Result, Run, Turns, main, measure_cases, speedups
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
from ssm_kernels import nn

CHECKED_CHANNELS = 8
COPIED_BYTES = 2**30
COMPILED = "compiled loop"


class Recurrence(NamedTuple):
    """A recurrence's operator, the names of its inputs, and how many of them its backward has to read."""

    operator: str
    inputs: tuple[str, ...]
    read_backward: int


RECURRENCES = {
    "mingru": Recurrence("mingru_scan", ("gate", "candidate"), 2),
    "minlstm": Recurrence("minlstm_scan", ("forget", "input", "candidate"), 3),
    "linear_scan": Recurrence("linear_scan", ("a", "b"), 1),
}


@dataclass(frozen=True)
class Case(OperatorCase):
    """A row of the table: a recurrence at some size, in bfloat16."""

    recurrence: str
    batch: int
    seqlen: int
    channels: int
    results = ("h",)
    dtype = torch.bfloat16
    # Backward reads h in bfloat16.
    limits = MappingProxyType({torch.bfloat16: (3.5e-3, 3.5e-3)})

    @property
    def name(self) -> str:
        return f"{self.recurrence} B{self.batch} T{self.seqlen} H{self.channels}"

    @property
    def turns(self) -> tuple[int, int, int]:
        return self.batch, self.seqlen, self.channels

    @property
    def operator(self) -> str:
        return RECURRENCES[self.recurrence].operator

    def inputs(self, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        names = RECURRENCES[self.recurrence].inputs
        inputs = {name: torch.randn(self.turns, generator=generator, device=device) for name in names}
        if self.recurrence == "linear_scan":
            a = inputs["a"].sigmoid()
            inputs = {"a": a, "b": (1 - a) * inputs["b"]}
        return {name: tensor.bfloat16() for name, tensor in inputs.items()}

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """Some channels."""
        return tensor[..., :: max(1, self.channels // CHECKED_CHANNELS)]

    def amounts(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        one, (_, names, read_backward) = next(iter(inputs.values())).nbytes, RECURRENCES[self.recurrence]
        return {"bytes": {"forward": one * (len(names) + 1), "backward": one * (read_backward + 2 + len(names))}}

    def others(self, ours: Contender, run: Run) -> dict[str, Contender]:
        if self.recurrence == "linear_scan":
            arranged = {who: other.arrange(**ours.inputs, grad=ours.grads[0]) for who, other in peers.gated_scans().items()}
            return {who: Contender(peers.gated_scans()[who].scan, inputs, [grad]) for who, (inputs, grad) in arranged.items()}
        if self.recurrence == "mingru" and self.turns == COMPILED_SHAPE and not run.options.skip_compile:
            return {COMPILED: ours._replace(function=torch.compile(loop, dynamic=False))}
        return {}


LARGE = ((8, 2048, 2048), (32, 512, 1024), (1, 65536, 1024))
FEW_CHANNELS, MANY_CHANNELS = (1, 65536, 256), (32, 256, 2048)
SMALL = ((32, 60, 512), (1, 32, 256))
CASES = [Case(name, *shape) for shape in (*LARGE, MANY_CHANNELS, FEW_CHANNELS, *SMALL) for name in RECURRENCES]
COMPILED_SHAPE = (1, 32, 256)


def loop(gate: Tensor, candidate: Tensor) -> Tensor:
    """minGRU as a loop over time."""
    z, h = torch.sigmoid(gate.float()), torch.zeros_like(candidate[:, 0], dtype=torch.float32)
    a, b = 1 - z, z * candidate.float()
    states = []
    for t in range(gate.shape[1]):
        h = a[:, t] * h + b[:, t]
        states.append(h)
    return torch.stack(states, dim=1).to(gate.dtype)


# (batch, seqlen, channels in and out)
LAYERS = ((32, 60, 512), (1, 32, 256))
LAYER_TYPES: dict[str, Callable[..., torch.nn.Module]] = {
    "nn.MinGRU": nn.MinGRU,
    "torch.nn.GRU": torch.nn.GRU,
    "nn.MinLSTM": nn.MinLSTM,
    "torch.nn.LSTM": torch.nn.LSTM,
}


def measure_shape(cases: list[Case], run: Run) -> list[dict[str, Any]]:
    """The rows of cases of one shape, the figures of other scans apart from ours."""
    rows = measure_cases(cases, run)
    for row in rows:
        row["peers"] = {who: row.pop(who) for who in (*peers.GATED_SCANS, COMPILED) if who in row}
    return rows


def measure_copy(run: Run) -> dict[str, Any]:
    """The rate of a copy, its bytes counted twice: read and written."""
    turns, found = Turns(run), {}
    turns.add(found, Copy({"copy": 2 * COPIED_BYTES}, run.device).stages("copy"))
    turns.measure()
    return {"bytes": COPIED_BYTES, **found["copy"], "rate": 2 * COPIED_BYTES / found["copy"]["median"]}


def measure_layers(run: Run) -> list[dict[str, Any]]:
    rows = []
    for batch, seqlen, channels in LAYERS:
        turns, found = Turns(run), {}
        for name, layer_type in LAYER_TYPES.items():
            layer = layer_type(channels, channels, batch_first=True).to(run.device)
            generator = torch.Generator(run.device).manual_seed(0)
            x = torch.randn(batch, seqlen, channels, device=run.device, generator=generator)
            found[name] = {}
            contender = Contender(
                lambda x, layer=layer: layer(x)[0], {"x": x}, [torch.ones_like(x)], dict(layer.named_parameters())
            )
            turns.add(found[name], contender.stages(*DIRECTIONS))
        turns.measure()
        size = {"batch": batch, "seqlen": seqlen, "channels": channels}
        rows.append({"name": f"B{batch} T{seqlen} I{channels} H{channels}", **size, "layers": found})
    return rows


def share(row: Row, what: str, result: Result) -> float:
    """The rate at which the bytes move that must, as a share of the copy's."""
    return row["bytes"][what] / row["ours"][what]["median"] / result["copy"]["rate"]


def of_short_rows(row: Row, what: str, result: Result) -> float | None:
    """The speed of one row of few channels over that of as many elements in short rows of many channels."""
    if (row["batch"], row["seqlen"], row["channels"]) != FEW_CHANNELS:
        return None
    name = Case(row["recurrence"], *MANY_CHANNELS).name
    times = (found["ours"][what]["median"] for found in result["rows"] if found["name"] == name)
    return next((time / row["ours"][what]["median"] for time in times), None)


def figures(row: Row, result: Result) -> dict[str, float]:
    found = speedups({"ours": row["ours"], **row["peers"]}, {name: name for name in row["peers"]})
    for what in DIRECTIONS:
        found |= {f"{what}, share of a copy's rate": share(row, what, result), f"{what}, seconds": median(row["ours"], what)}
        if (other := of_short_rows(row, what, result)) is not None:
            found[f"{what}, speed over that of 32 short rows"] = other
    return found


def speed_columns(what: str, result: Result) -> list[Column]:
    return [
        figure(what, "ours", what, decimals=4),
        throughput("GB/s", "bytes", what, 1e9),
        Column("of a copy", lambda row: f"{100 * share(row, what, result):.0f} %"),
        Column("× short rows", lambda row: over(of_short_rows(row, what, result), 1.0)),
    ]


def tables(result: Result) -> list[Table]:
    case = text("case", "name")
    other_scans = [
        {
            "name": row["name"],
            "other": name + (" (recorded)" if peer["recorded"] else ""),
            "found": row["ours"],
            "ours": row["ours"],
            "peer": peer | {"recorded": False},
        }
        for row in result["rows"]
        for name, peer in row["peers"].items()
    ]
    beside_others = [case, text("other")]
    beside_cudnn = [text("size", "name"), text("layers")]
    for what in DIRECTIONS:
        beside_others += [figure(what, "found", what, decimals=4), *versus("other", "peer", what, decimals=4)]
        beside_cudnn += [figure(what, "mine", what), figure("torch.nn", "theirs", what), ratio("ratio", what, "theirs", "mine")]
    layers = [
        {"name": row["name"], "layers": f"{mine}, {theirs}", "mine": row["layers"][mine], "theirs": row["layers"][theirs]}
        for row in result["layers"]
        for mine, theirs in (("nn.MinGRU", "torch.nn.GRU"), ("nn.MinLSTM", "torch.nn.LSTM"))
    ]
    copied = [
        Column("bytes", lambda row: f"{row['bytes'] / 2**30:.0f} GiB"),
        Column("GB/s", lambda row: f"{row['rate'] / 1e9:.0f}"),
    ]
    speed = [column for what in DIRECTIONS for column in speed_columns(what, result)]
    return [
        Table("linear recurrences, milliseconds", [case, *speed], result["rows"]),
        Table("copy", copied, [result["copy"]]),
        Table("other scans, milliseconds", beside_others, other_scans, left=2),
        Table("layers, milliseconds", beside_cudnn, layers, left=2),
        largest_errors(result["rows"], "recurrence"),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip_compile", action="store_true", help="without the compiled loop, which takes a while")


BENCHMARK = Benchmark(
    "linear_scan",
    lambda options: CASES,
    tables,
    figures,
    measure_shape,
    trials=50,
    warmup=5,
    context=lambda run: {"peers": peers.described_gated_scans(peers.gated_scans()), "copy": measure_copy(run), "layers": []},
    conclude=lambda run: {"layers": [] if run.options.cases else measure_layers(run)},
    add_options=add_options,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
