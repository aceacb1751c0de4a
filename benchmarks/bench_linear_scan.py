#!/usr/bin/env python3
"""The gated linear recurrences on CUDA: forward and backward, beside a copy, beside other scans and beside cuDNN's layers.

    python benchmarks/bench_linear_scan.py [--json FILE] [--cases NAME ...] [--trials N] [--skip_compile]

"forward" runs without gradients, "backward" is ``torch.autograd.grad`` to every input. Each is GPU time between two events,
after the cache was overwritten; the median of the trials. What is of one shape takes turns, and with it the peers. Beside
``linear_scan`` these are scans whose gates are computed before, flash-linear-attention's ``chunk_hgrn`` and accelerated-scan's,
each in the layout that it wants; where one is not installed, figures recorded on an H200 are printed, and marked as such.
Beside minGRU it is the loop over time compiled by ``torch.compile``, at one size.

The work is little, so that a scan is held to the bytes that it must move: forward each input and h once, backward each input
that the formulas need, h and the incoming gradient once, and the gradients once. Their number over the time is given as a share
of the rate at which the device copies a large tensor, measured in the same run. One row of 256 channels is held to the time of
as many elements in 32 rows of 2048; small calls are held to a time.

The layers ``nn.MinGRU`` and ``nn.MinLSTM``, projections included, are timed beside ``torch.nn.GRU`` and ``torch.nn.LSTM``, in
float32 (where cuDNN may use TF32, as it does by default; the others do not).

Before a case is timed, its results and gradients for some channels are compared with those of the CPU kernel in float64. Exits
with 1 if one is wrong; a missed bar is only reported.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import ssm_kernels
from benchmarks import peers
from benchmarks.bench_selective_scan import DIRECTIONS, gradients_of, on_h200, stages_of
from benchmarks.harness import Stages, add_case_options, chosen_cases, machine, measure, require_cuda
from ssm_kernels import nn

Inputs = dict[str, Tensor]

# Relative L2 error against float64 up to which a result is right: rounding to bfloat16 alone makes 1.7e-3, and backward reads h
# in 16 bits.
ALLOWED_ERROR = 3.5e-3
CHECKED_CHANNELS = 8
COPIED_BYTES = 2**30
COMPILED = "compiled loop"
TIME = "time"


class Recurrence(NamedTuple):
    """What a case calls, and the inputs that its backward has to read."""

    scan: Callable[..., Tensor]
    inputs: tuple[str, ...]
    read_backward: tuple[str, ...]


RECURRENCES = {
    "mingru": Recurrence(ssm_kernels.mingru_scan, ("gate", "candidate"), ("gate", "candidate")),
    "minlstm": Recurrence(ssm_kernels.minlstm_scan, ("forget", "input", "candidate"), ("forget", "input", "candidate")),
    "linear_scan": Recurrence(ssm_kernels.linear_scan, ("a", "b"), ("a",)),
}


class Bar(NamedTuple):
    """What a case is held to beside its share of the copy's rate.

    Attributes:
        against: a peer, or the name of another case, than which it shall be at least ``value`` times as fast; or ``TIME``:
            it shall take at most ``value`` seconds.
    """

    against: str
    value: float
    directions: tuple[str, ...] = DIRECTIONS

    def is_met(self, found: float) -> bool:
        return found <= self.value if self.against == TIME else found >= self.value


@dataclass(frozen=True)
class Case:
    """A row of the table: a recurrence at some size, in bfloat16.

    Attributes:
        bar, goal: the share of the copy's rate that forward and backward shall reach, and what is hoped for.
        bars: what else is asked.
    """

    recurrence: str
    batch: int
    seqlen: int
    channels: int
    bar: float | None = None
    goal: float | None = None
    bars: tuple[Bar, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.recurrence} B{self.batch} T{self.seqlen} H{self.channels}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """What cases that take turns have in common."""
        return self.batch, self.seqlen, self.channels

    @property
    def scan(self) -> Callable[..., Tensor]:
        return RECURRENCES[self.recurrence].scan

    def inputs(self, device: torch.device) -> Inputs:
        generator = torch.Generator(device).manual_seed(0)
        names = RECURRENCES[self.recurrence].inputs
        inputs = {name: torch.randn(self.shape, generator=generator, device=device) for name in names}
        if self.recurrence == "linear_scan":
            a = inputs["a"].sigmoid()
            inputs = {"a": a, "b": (1 - a) * inputs["b"]}
        return {name: tensor.bfloat16() for name, tensor in inputs.items()}

    def moved_bytes(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        one = next(iter(inputs.values())).nbytes
        read_backward = len(RECURRENCES[self.recurrence].read_backward)
        return {"forward": one * (len(inputs) + 1), "backward": one * (read_backward + 2 + len(inputs))}


LARGE = ((8, 2048, 2048), (32, 512, 1024), (1, 65536, 1024))
FEW_CHANNELS, MANY_CHANNELS = (1, 65536, 256), (32, 256, 2048)
SMALL = ((32, 60, 512), (1, 32, 256))
PEER_BARS = {"linear_scan": (Bar("chunk_hgrn", 4.0), Bar("accelerated_scan", 1.0))}
CASES = [
    *(Case(name, *shape, 0.8, 0.9, PEER_BARS.get(name, ())) for shape in LARGE for name in RECURRENCES),
    *(Case(name, *MANY_CHANNELS) for name in RECURRENCES),
    # As fast, but for what a measurement may differ by.
    *(Case(name, *FEW_CHANNELS, bars=(Bar(Case(name, *MANY_CHANNELS).name, 0.95),)) for name in RECURRENCES),
    *(Case(name, *shape, bars=(Bar(TIME, 10e-6, ("forward",)),)) for shape in SMALL for name in RECURRENCES),
]
COMPILED_SHAPE = (1, 32, 256)


def compiled_loop() -> Callable[..., Tensor]:
    """minGRU as a loop over time, compiled."""

    def loop(gate: Tensor, candidate: Tensor) -> Tensor:
        z, h = torch.sigmoid(gate.float()), torch.zeros_like(candidate[:, 0], dtype=torch.float32)
        a, b = 1 - z, z * candidate.float()
        states = []
        for t in range(gate.shape[1]):
            h = a[:, t] * h + b[:, t]
            states.append(h)
        return torch.stack(states, dim=1).to(gate.dtype)

    return torch.compile(loop, dynamic=False)


class Layer(NamedTuple):
    """A row of the table of layers: (batch, seqlen, channels in and out)."""

    batch: int
    seqlen: int
    channels: int

    @property
    def name(self) -> str:
        return f"B{self.batch} T{self.seqlen} I{self.channels} H{self.channels}"


LAYERS = (Layer(32, 60, 512), Layer(1, 32, 256))
LAYER_TYPES: dict[str, Callable[..., torch.nn.Module]] = {
    "nn.MinGRU": nn.MinGRU,
    "torch.nn.GRU": torch.nn.GRU,
    "nn.MinLSTM": nn.MinLSTM,
    "torch.nn.LSTM": torch.nn.LSTM,
}


def relative_errors(names: Iterable[str], found: Iterable[Tensor], exact: Iterable[Tensor]) -> dict[str, float]:
    return {
        name: ((actual.cpu().double() - expected).norm() / expected.norm()).item()
        for name, actual, expected in zip(names, found, exact, strict=True)
    }


def errors_of(case: Case, inputs: Inputs, grad_h: Tensor) -> dict[str, float]:
    """Relative L2 errors of ``h`` and every gradient for some channels, the whole scan run."""
    every = max(1, case.channels // CHECKED_CHANNELS)
    found = [tensor[..., ::every] for tensor in gradients_of(case.scan, inputs, grad_h)]
    doubles = {name: tensor[..., ::every].cpu().double() for name, tensor in inputs.items()}
    exact = gradients_of(case.scan, doubles, grad_h[..., ::every].cpu().double())
    return relative_errors(("h", *(f"grad_{name}" for name in inputs)), found, exact)


def timed(function: Callable[..., Tensor], inputs: Mapping[str, Tensor], grad_out: Tensor) -> dict[str, Stages]:
    """Forward without gradients, and backward to every input."""
    stages = stages_of(function, inputs, grad_out)
    return {direction: stages[direction] for direction in DIRECTIONS}


def peers_of(
    case: Case, inputs: Inputs, grad_h: Tensor, others: Mapping[str, peers.GatedScan], *, compile: bool
) -> tuple[dict[str, dict[str, Stages]], dict[str, str]]:
    """What is timed of every peer beside a case, by its name, and why others are not."""
    found: dict[str, dict[str, Stages]] = {}
    unsupported: dict[str, str] = {}
    candidates: dict[str, Callable[[], tuple[Callable[..., Tensor], Inputs, Tensor]]] = {}
    if case.recurrence == "linear_scan":
        for name, other in others.items():
            candidates[name] = functools.partial(lambda other: (other.scan, *other.arrange(**inputs, grad=grad_h)), other)
    if compile and case.recurrence == "mingru" and case.shape == COMPILED_SHAPE:
        candidates[COMPILED] = lambda: (compiled_loop(), inputs, grad_h)
    for name, candidate in candidates.items():
        try:
            function, arguments, grad_out = candidate()
            gradients_of(function, arguments, grad_out)  # compiles, and tunes itself
            found[name] = timed(function, arguments, grad_out)
        except Exception as error:  # whatever a peer raises
            unsupported[name] = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return found, unsupported


def measure_shape(
    cases: Sequence[Case],
    trials: int,
    warmup: int,
    others: Mapping[str, peers.GatedScan],
    device: torch.device,
    *,
    compile: bool,
) -> list[dict[str, Any]]:
    """The rows of cases that have their shape in common, measured in turns."""
    rows, benchmarks = [], {}
    for case in cases:
        inputs = case.inputs(device)
        grad_h = torch.randn(case.shape, generator=torch.Generator(device).manual_seed(1), device=device).bfloat16()
        errors = errors_of(case, inputs, grad_h)
        found, unsupported = peers_of(case, inputs, grad_h, others, compile=compile)
        rows.append(
            {
                "name": case.name,
                **asdict(case),
                "bytes": case.moved_bytes(inputs),
                "errors": errors,
                "wrong": [name for name, error in errors.items() if not error <= ALLOWED_ERROR],
                "peers": {name: {"unsupported": reason, "recorded": False} for name, reason in unsupported.items()},
            }
        )
        contenders = {"ours": timed(case.scan, inputs, grad_h)} | found
        benchmarks |= {(case.name, who, what): stages for who, of in contenders.items() for what, stages in of.items()}
    measured = measure(benchmarks, device=device, trials=trials, warmup=warmup)
    by_name = {row["name"]: row for row in rows}
    for (name, who, what), found in measured.items():
        row = by_name[name]
        target = row.setdefault("ours", {}) if who == "ours" else row["peers"].setdefault(who, {"recorded": False})
        target[what] = found.total.to_dict()
    for case, row in zip(cases, rows, strict=True):
        if case.recurrence == "linear_scan" and on_h200(device):
            for name, seconds in peers.RECORDED_GATED_SCAN.get(case.shape, {}).items():
                times = {direction: {"median": value} for direction, value in zip(DIRECTIONS, seconds, strict=True)}
                row["peers"].setdefault(name, {**times, "recorded": True})
    return rows


def measure_copy(trials: int, warmup: int, device: torch.device) -> dict[str, Any]:
    """The rate of a copy, its bytes counted twice: read and written."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = measure({"copy": (lambda: target.copy_(source),)}, device=device, trials=trials, warmup=warmup)["copy"].total
    return {"bytes": COPIED_BYTES, **timing.to_dict(), "rate": 2 * COPIED_BYTES / timing.median}


def measure_layers(sizes: Iterable[Layer], trials: int, warmup: int, device: torch.device) -> list[dict[str, Any]]:
    rows = []
    for size in sizes:
        benchmarks: dict[tuple[str, str], Stages] = {}
        for name, layer_type in LAYER_TYPES.items():
            layer = layer_type(size.channels, size.channels, batch_first=True).to(device)
            x = torch.randn(size, device=device, generator=torch.Generator(device).manual_seed(0))
            benchmarks |= {(name, direction): stages for direction, stages in layer_stages(layer, x).items()}
        measured = measure(benchmarks, device=device, trials=trials, warmup=warmup)
        row: dict[str, Any] = {"name": size.name, **size._asdict(), "layers": {}}
        for (name, direction), found in measured.items():
            row["layers"].setdefault(name, {})[direction] = found.total.to_dict()
        rows.append(row)
    return rows


def layer_stages(layer: torch.nn.Module, x: Tensor) -> dict[str, Stages]:
    """Forward without gradients, and backward to the input and every parameter."""
    x = x.requires_grad_()
    wanted = (x, *layer.parameters())
    out = layer(x)[0]
    grad_out = torch.ones_like(out)

    def forward() -> Tensor:
        with torch.no_grad():
            return layer(x)[0]

    return {
        "forward": (forward,),
        "backward": (lambda: torch.autograd.grad(out, wanted, grad_out, retain_graph=True),),
    }


def judge(rows: Sequence[dict[str, Any]], rate: float) -> None:
    """Adds to every row its share of the copy's rate, whether that meets its bar, and what became of its other bars."""
    by_name = {row["name"]: row for row in rows}
    for row in rows:
        row["share"] = {what: row["bytes"][what] / row["ours"][what]["median"] / rate for what in DIRECTIONS}
        row["met"] = {what: None if row["bar"] is None else row["share"][what] >= row["bar"] for what in DIRECTIONS}
        row["judged"] = []
        for bar in row["bars"]:
            for what in bar.directions:
                found = row["ours"][what]["median"]
                if bar.against != TIME:
                    other = row["peers"].get(bar.against) or by_name.get(bar.against, {}).get("ours", {})
                    if what not in other:
                        continue
                    found = other[what]["median"] / found
                verdict = {"against": bar.against, "direction": what, "found": found, "bar": bar.value}
                row["judged"].append(verdict | {"met": bar.is_met(found)})


def sentence(judged: Mapping[str, Any]) -> str:
    found, bar = judged["found"], judged["bar"]
    if judged["against"] == TIME:
        return f"{found * 1e6:.1f} us, bar {bar * 1e6:g} us"
    return f"{found:.2f} times as fast as {judged['against']}, bar {bar:g}"


def peer_times(row: Mapping[str, Any], what: str) -> str:
    """The times of a row's peers in milliseconds."""
    words = []
    for name, found in row["peers"].items():
        time = f"{found[what]['median'] * 1e3:.3f}{'*' if found['recorded'] else ''}" if what in found else "unsupported"
        words.append(f"{name} {time}")
    return ", ".join(words)


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="linear recurrences, bf16, milliseconds", caption="* recorded; bars: met +, missed -", box=None)
    for index, name in enumerate(("case", *(word for what in DIRECTIONS for word in (what, "GB/s", "of a copy", "peers")))):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        cells = [row["name"]]
        for what in DIRECTIONS:
            seconds, met = row["ours"][what]["median"], row["met"][what]
            mark = "" if met is None else " +" if met else " -"
            cells += [f"{seconds * 1e3:.4f}", f"{row['bytes'][what] / seconds / 1e9:.0f}"]
            cells += [f"{100 * row['share'][what]:.0f} %{mark}", peer_times(row, what)]
        table.add_row(*cells)
    return table


def table_of_layers(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="layers, fp32, milliseconds forward / backward", box=None)
    for index, name in enumerate(("size", *LAYER_TYPES)):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            row["name"],
            *(" / ".join(f"{row['layers'][name][what]['median'] * 1e3:.3f}" for what in DIRECTIONS) for name in LAYER_TYPES),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_case_options(parser, "T65536", trials=50, warmup=5)
    parser.add_argument("--skip_compile", action="store_true", help="without the compiled loop, which takes a while")
    options = parser.parse_args(arguments)
    chosen = chosen_cases(parser, options, CASES)
    require_cuda(parser)

    device = torch.device("cuda", torch.cuda.current_device())
    others = peers.gated_scans()
    descriptions = peers.described_gated_scans(others)
    console = Console(width=180, highlight=False)
    console.print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; peers: {descriptions}")
    copy = measure_copy(options.trials, options.warmup, device)
    console.print(f"copy: {copy['rate'] / 1e9:.0f} GB/s")
    measured: dict[str, dict[str, Any]] = {}
    for shape in dict.fromkeys(case.shape for case in chosen):
        cases = [case for case in chosen if case.shape == shape]
        found = measure_shape(cases, options.trials, options.warmup, others, device, compile=not options.skip_compile)
        measured |= {row["name"]: row for row in found}
        torch.cuda.empty_cache()
    rows = [measured[case.name] for case in chosen]
    judge(rows, copy["rate"])
    layers = [] if options.cases else measure_layers(LAYERS, options.trials, options.warmup, device)
    console.print(table_of(rows))
    if layers:
        console.print(table_of_layers(layers))
    missed = [
        f"{row['name']}, {what}: {100 * row['share'][what]:.0f} % of a copy, bar {100 * row['bar']:.0f} %"
        for row in rows
        for what in DIRECTIONS
        if row["met"][what] is False
    ]
    judged = [(row["name"], found) for row in rows for found in row["judged"]]
    missed += [f"{name}, {found['direction']}: {sentence(found)}" for name, found in judged if not found["met"]]
    console.print("every bar that could be judged is met" if not missed else "missed:\n  " + "\n  ".join(missed))

    if options.json is not None:
        result = {
            "benchmark": "linear_scan",
            "machine": machine(device),
            "settings": {"trials": options.trials, "warmup": options.warmup},
            "peers": descriptions,
            "copy": copy,
            "rows": rows,
            "layers": layers,
        }
        options.json.write_text(json.dumps(result, indent=2, default=str) + "\n")
    wrong = [f"{row['name']}: {', '.join(row['wrong'])}" for row in rows if row["wrong"]]
    if wrong:
        print("wrong results: " + "; ".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
