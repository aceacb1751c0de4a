#!/usr/bin/env python3
"""selective_scan on CUDA: forward and backward, beside mamba_ssm's kernel and beside the least time that the chip needs.

    python benchmarks/bench_selective_scan.py [--json FILE] [--cases NAME ...] [--trials N]

All cases have D, delta_bias and softplus. "forward" runs without gradients and saves nothing, "training" is the forward of a
training step, which saves the states at the chunk boundaries, "backward" is ``torch.autograd.grad`` to every input. Each is
GPU time between two events, after the cache was overwritten; the median of the trials. Cases of one shape take turns, and
mamba_ssm's kernel with them, if it is installed; else figures recorded with it on an H200 are printed, and marked as such.

The floor, on an H200, is the largest of the times that memory, special functions and instructions need: benchmarks/floors.py.

Before a case is timed, its results and gradients for some channels are compared with those of the CPU kernel in float64. Exits
with 1 if one is wrong; a missed bar is only reported.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import ssm_kernels
from benchmarks import peers
from benchmarks.discretization.scans import ScanSize, scan_bytes, scan_inputs
from benchmarks.floors import H200_RATES, floors
from benchmarks.harness import Stages, add_case_options, chosen_cases, machine, measure, require_cuda
from ssm_kernels import reference

BF16, FP32 = torch.bfloat16, torch.float32
# Relative L2 error against float64 up to which a result is right: rounding to bfloat16 alone makes 1.7e-3.
ALLOWED_ERROR = {BF16: 2.5e-3, FP32: 1e-5}
ALWAYS_FP32 = {"grad_A", "grad_D", "grad_delta_bias"}
CHECKED_CHANNELS = 8
DIRECTIONS = ("forward", "backward")
PEER, ZOH, LAYOUT = "mamba_ssm", "zoh", "L-contiguous"


@dataclass(frozen=True)
class Bar:
    """What a case's times are held to.

    Attributes:
        other: ``PEER``: its time over ours is at least ``value``. ``ZOH``: our time over that of zoh is at most ``value``.
            ``LAYOUT``: our times for the two layouts differ by no more than that factor.
        goal: what is hoped for beyond ``value``.
    """

    other: str
    value: float
    goal: float | None = None

    def is_met(self, ratio: float) -> bool:
        if self.other == PEER:
            return ratio >= self.value
        return ratio <= self.value and (self.other == ZOH or ratio >= 1 / self.value)


@dataclass(frozen=True)
class Case:
    """A row of the table: sizes, types and options of a scan, and the bars for (forward, backward)."""

    batch: int
    dim: int
    seqlen: int
    dstate: int = 16
    dtype: torch.dtype = BF16
    z: bool = True
    groups: int | None = None
    contiguous: str = "seqlen"
    discretization: str = "zoh"
    bars: tuple[tuple[Bar, Bar], ...] = ()

    @property
    def name(self) -> str:
        words = ["bf16" if self.dtype == BF16 else "fp32", f"B{self.batch} D{self.dim} L{self.seqlen} N{self.dstate}"]
        words += ["z"] if self.z else []
        words += [] if self.groups is None else [f"G{self.groups}"]
        words += ["D-contiguous"] if self.contiguous == "dim" else []
        words += [] if self.discretization == "zoh" else [self.discretization]
        return " ".join(words)

    @property
    def shape(self) -> tuple[Any, ...]:
        """What cases that take turns have in common."""
        return self.batch, self.dim, self.seqlen, self.dstate, self.dtype

    @property
    def size(self) -> ScanSize:
        return ScanSize(self.batch, self.dim, self.seqlen, self.dstate)

    def inputs(self, device: torch.device, *, contiguous: str | None = None) -> dict[str, Tensor]:
        inputs = scan_inputs(self.size, device=device, dtype=self.dtype, seed=0, groups=self.groups)
        if not self.z:
            del inputs["z"]
        if (contiguous or self.contiguous) == "dim":
            for name in inputs.keys() & {"u", "delta", "z", "B", "C"}:
                inputs[name] = channels_last(inputs[name])
        return inputs

    def function(self) -> Callable[..., Tensor]:
        return functools.partial(ssm_kernels.selective_scan, discretization=self.discretization, delta_softplus=True)


def channels_last(tensor: Tensor) -> Tensor:
    """The same values with the dimension before the last contiguous in memory."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def faster(forward: float, backward: float, goals: tuple[float | None, float | None] = (None, None)) -> tuple[Bar, Bar]:
    return Bar(PEER, forward, goals[0]), Bar(PEER, backward, goals[1])


def within(other: str, value: float) -> tuple[Bar, Bar]:
    return Bar(other, value), Bar(other, value)


MAIN = (8, 2048, 2048)
EXPONENTIAL = ("zoh", "zoh_exact", "poly", "highorder", "rk4")
NO_SLOWER = faster(1.0, 1.0)
CASES = [
    Case(*MAIN, bars=(faster(2.5, 4.0, (3.5, 6.0)),)),
    Case(*MAIN, z=False, bars=(faster(2.5, 4.0, (3.5, 6.0)),)),
    Case(8, 5120, 2048, bars=(faster(2.5, 4.0),)),
    Case(1, 2048, 65536, bars=(faster(2.5, 4.0, (4.0, 7.0)),)),
    Case(1, 1536, 4096, bars=(faster(2.5, 4.0, (4.0, 7.0)),)),
    Case(32, 512, 60, dtype=FP32, z=False, bars=(faster(4.0, 4.0),)),
    Case(8, 512, 1024, dtype=FP32, z=False, bars=(faster(4.0, 4.0),)),
    Case(*MAIN, dtype=FP32),
    *(Case(8, 1024, 2048, dstate, bars=(NO_SLOWER,)) for dstate in (8, 32, 64, 128, 256)),
    *(Case(*MAIN, groups=groups, bars=(NO_SLOWER,)) for groups in (1, 4)),
    Case(*MAIN, contiguous="dim", bars=(NO_SLOWER, within(LAYOUT, 1.15))),
    *(
        Case(*MAIN, discretization=method, bars=(within(ZOH, 1.1 if method in EXPONENTIAL else 1.25),))
        for method in reference.DISCRETIZATIONS
        if method != "zoh"
    ),
]


def chunk_state_bytes(inputs: Mapping[str, Tensor]) -> int:
    """What forward saves for backward, apart from its inputs."""
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    meta = [inputs[name].to("meta") if name in inputs else None for name in names]
    *_, states = torch.ops.ssm_kernels._selective_scan_fwd(*meta, None, "zoh", True, True)
    return states.nbytes


def gradients_of(function: Callable[..., Tensor], inputs: Mapping[str, Tensor], grad_out: Tensor) -> tuple[Tensor, ...]:
    """``out`` and the gradient of every input."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    out = function(**leaves)
    return out.detach(), *torch.autograd.grad(out, tuple(leaves.values()), grad_out)


def errors_of(case: Case, inputs: Mapping[str, Tensor], grad_out: Tensor) -> dict[str, float]:
    """Relative L2 errors of ``out`` and every gradient for some channels, the whole scan run.

    The incoming gradient is zero for all other channels, so that gradients of B and C are those of the few channels alone.
    """
    every, function = case.dim // CHECKED_CHANNELS, case.function()
    few = {"u": 1, "delta": 1, "z": 1, "A": 0, "D": 0, "delta_bias": 0}  # where the channels are

    def sliced(name: str, tensor: Tensor) -> Tensor:
        if name in few:
            tensor = tensor.narrow(few[name], 0, CHECKED_CHANNELS * every)
            tensor = tensor[:, ::every] if few[name] else tensor[::every]
        return tensor.cpu().double()

    masked = torch.zeros_like(grad_out)
    masked[:, : CHECKED_CHANNELS * every : every] = grad_out[:, : CHECKED_CHANNELS * every : every]
    found = gradients_of(function, inputs, masked)
    doubles = {name: sliced(name, tensor) for name, tensor in inputs.items()}
    exact = gradients_of(function, doubles, sliced("u", grad_out))
    errors = {}
    for name, actual, expected in zip(("u", *inputs), found, exact, strict=True):
        label = f"grad_{name}" if errors else "out"
        errors[label] = ((sliced(name, actual) - expected).norm() / expected.norm()).item()
    return errors


def stages_of(function: Callable[..., Tensor], inputs: Mapping[str, Tensor], grad_out: Tensor) -> dict[str, Stages]:
    """What is timed."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    wanted = tuple(leaves.values())
    out = function(**leaves)

    def forward() -> Tensor:
        with torch.no_grad():
            return function(**inputs)

    return {
        "forward": (forward,),
        "training": (lambda: function(**leaves),),
        "backward": (lambda: torch.autograd.grad(out, wanted, grad_out, retain_graph=True),),
    }


def peak_bytes(function: Callable[..., Tensor], inputs: Mapping[str, Tensor], grad_out: Tensor) -> int | None:
    """The most that forward and backward need at a time beside inputs and incoming gradient: outputs and gradients included."""
    if not grad_out.is_cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients_of(function, inputs, grad_out)
    return torch.cuda.max_memory_allocated() - before


class Contender:
    """A function on one set of inputs: what of it is timed, what memory it needs, or why it does not run."""

    def __init__(self, function: Callable[..., Tensor], inputs: Mapping[str, Tensor], grad_out: Tensor, *, may_fail: bool):
        self.stages: dict[str, Stages] = {}
        self.peak: int | None = None
        self.unsupported: str | None = None
        try:
            gradients_of(function, inputs, grad_out)  # what is made once, at the first call, is none of its memory
            self.peak = peak_bytes(function, inputs, grad_out)
            self.stages = stages_of(function, inputs, grad_out)
        except Exception as error:  # whatever a peer raises
            if not may_fail:
                raise
            self.unsupported = (str(error).strip().splitlines() or [type(error).__name__])[0]


def measure_shape(
    cases: Sequence[Case], trials: int, warmup: int, peer: Callable[..., Tensor] | None, device: torch.device
) -> list[dict[str, Any]]:
    """The rows of cases that have their shape in common, measured in turns."""
    rows, contenders = [], {}
    for case in cases:
        inputs = case.inputs(device)
        grad_out = torch.empty_like(inputs["u"]).normal_(generator=torch.Generator(device).manual_seed(1))
        forward_bytes, both_bytes = scan_bytes(inputs)
        row = {
            "name": case.name,
            **{key: value for key, value in asdict(case).items() if key not in ("bars", "dtype")},
            "dtype": str(case.dtype).removeprefix("torch."),
            "updates": case.size.updates,
            "bytes": {"forward": forward_bytes, "backward": both_bytes - forward_bytes},
            "chunk_state_bytes": chunk_state_bytes(inputs),
            "errors": errors_of(case, inputs, grad_out),
        }
        row["wrong"] = [
            name
            for name, error in row["errors"].items()
            if not error <= ALLOWED_ERROR[FP32 if name in ALWAYS_FP32 else case.dtype]
        ]
        rows.append(row)
        contenders[case.name, "ours"] = Contender(case.function(), inputs, grad_out, may_fail=False)
        if peer is not None and case.discretization == "zoh":
            if case.contiguous == "dim":  # the peer copies such tensors: in its own layout too
                contenders[case.name, "peer_given"] = Contender(peer, inputs, grad_out, may_fail=True)
                inputs, grad_out = case.inputs(device, contiguous="seqlen"), grad_out.contiguous()
            contenders[case.name, "peer"] = Contender(peer, inputs, grad_out, may_fail=True)

    benchmarks = {(*key, what): stages for key, contender in contenders.items() for what, stages in contender.stages.items()}
    measured = measure(benchmarks, device=device, trials=trials, warmup=warmup)
    for case, row in zip(cases, rows, strict=True):
        for who in ("ours", "peer", "peer_given"):
            contender = contenders.get((case.name, who))
            if contender is None:
                continue
            row[who] = {what: measured[case.name, who, what].total.to_dict() for what in contender.stages}
            row[who] |= {"peak_bytes": contender.peak, "unsupported": contender.unsupported, "recorded": False}
        recorded = peers.RECORDED_SCAN.get((case.dtype, *case.shape[:-1], case.z))
        if peer is None and recorded and on_h200(device) and case.discretization == "zoh" and case.groups in (None, 1):
            times = {direction: {"median": seconds} for direction, seconds in zip(DIRECTIONS, recorded, strict=True)}
            row["peer"] = {**times, "peak_bytes": None, "unsupported": None, "recorded": True}
    return rows


def on_h200(device: torch.device) -> bool:
    return device.type == "cuda" and "H200" in torch.cuda.get_device_name(device)


def judge(cases: Sequence[Case], rows: Sequence[dict[str, Any]]) -> None:
    """Adds to every row its ratios to what its bars name, where that was measured."""
    by_name = {row["name"]: row for row in rows}
    for case, row in zip(cases, rows, strict=True):
        plain = Case(*case.shape, z=case.z, groups=case.groups).name
        row["judged"] = []
        for pair in case.bars:
            for direction, bar in zip(DIRECTIONS, pair, strict=True):
                other = row.get("peer") if bar.other == PEER else by_name.get(plain, {}).get("ours")
                if other is None or direction not in other:
                    continue
                ratio = row["ours"][direction]["median"] / other[direction]["median"]
                ratio = 1 / ratio if bar.other == PEER else ratio
                found = {"direction": direction, "other": bar.other, "ratio": ratio, "bar": bar.value, "goal": bar.goal}
                row["judged"].append(found | {"met": bar.is_met(ratio)})


def milliseconds(row: Mapping[str, Any], who: str, what: str) -> str:
    found = row.get(who)
    if found is None:
        return ""
    if what not in found:
        return "" if found["unsupported"] is None else "unsupported"
    return f"{found[what]['median'] * 1e3:.3f}" + ("*" if found["recorded"] else "")


def peak(row: Mapping[str, Any], who: str) -> str:
    """Peak memory in bytes per batch entry, channel and step."""
    found = (row.get(who) or {}).get("peak_bytes")
    return "" if found is None else f"{found * row['dstate'] / row['updates']:.2f}"


def table_of(rows: Sequence[dict[str, Any]], rates: Mapping[str, float] | None) -> Table:
    table = Table(title="selective_scan, milliseconds", caption="* recorded; bars: met +, missed -", box=None)
    rest = ("peer", "ratio, bar", "/ floor", "GB/s")
    for index, name in enumerate(("case", "fwd", "training", *rest, "bwd", *rest, "peak B", "peer")):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        cells = [row["name"]]
        floor = floors(row, rates) if rates else None
        for direction in DIRECTIONS:
            ours = row["ours"][direction]["median"]
            cells.append(milliseconds(row, "ours", direction))
            cells += [milliseconds(row, "ours", "training")] if direction == "forward" else []
            cells.append(milliseconds(row, "peer", direction))
            judged = [found for found in row["judged"] if found["direction"] == direction]
            cells.append(" ".join(f"{found['ratio']:.2f} {'+' if found['met'] else '-'}{found['bar']:g}" for found in judged))
            cells.append(f"{ours / max(floor[direction].values()):.2f}" if floor else "")
            cells.append(f"{row['bytes'][direction] / ours / 1e9:.0f}")
        table.add_row(*cells, peak(row, "ours"), peak(row, "peer"))
    return table


def sentence(row: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    ratio = f"{found['ratio']:.2f}"
    said = f"{ratio} times as fast as mamba_ssm" if found["other"] == PEER else f"{ratio} times the time of {found['other']}"
    return f"{row['name']}, {found['direction']}: {said}, bar {found['bar']:g}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_case_options(parser, "L65536", trials=20, warmup=3)
    options = parser.parse_args(arguments)
    chosen = chosen_cases(parser, options, CASES)
    require_cuda(parser)

    device = torch.device("cuda", torch.cuda.current_device())
    peer = peers.selective_scan()
    console = Console(width=180, highlight=False)
    console.print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; peer: {peers.described(peer)}")
    measured: dict[str, dict[str, Any]] = {}
    for shape in dict.fromkeys(case.shape for case in chosen):
        cases = [case for case in chosen if case.shape == shape]
        found = measure_shape(cases, options.trials, options.warmup, peer, device)
        measured |= {row["name"]: row for row in found}
        times = (
            f"{row['name']} {' / '.join(milliseconds(row, 'ours', direction) for direction in DIRECTIONS)}" for row in found
        )
        console.print(f"ms forward / backward: {'; '.join(times)}")
        torch.cuda.empty_cache()
    rows = [measured[case.name] for case in chosen]
    judge(chosen, rows)
    rates = H200_RATES if on_h200(device) else None
    console.print(table_of(rows, rates))
    missed = [sentence(row, found) for row in rows for found in row["judged"] if not found["met"]]
    console.print("every bar that could be judged is met" if not missed else "missed:\n  " + "\n  ".join(missed))

    if options.json is not None:
        result = {
            "benchmark": "selective_scan",
            "machine": machine(device),
            "settings": {"trials": options.trials, "warmup": options.warmup},
            "peer": peers.described(peer),
            "rates": rates,
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=2, default=str) + "\n")
    wrong = [f"{row['name']}: {', '.join(row['wrong'])}" for row in rows if row["wrong"]]
    if wrong:
        print("wrong results: " + "; ".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
