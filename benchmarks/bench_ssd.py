#!/usr/bin/env python3
"""ssd_chunk_scan on CUDA: forward and backward, beside mamba_ssm's Triton kernels.

    python benchmarks/bench_ssd.py [--json FILE] [--cases NAME ...] [--trials N]

All cases have D, dt_bias and softplus, leave the chunks' length to the operator, and are of bfloat16, or of float32 where their
names say so, which mamba_ssm multiplies as TF32. "forward" runs without gradients, "backward" is ``torch.autograd.grad`` to
every input. Each is time between two events, after the cache was overwritten; the median of the trials. mamba_ssm's
``mamba_chunk_scan_combined`` takes turns with ours, tuned before, if it is installed; else figures recorded with it on an H200
are printed, and marked as such. At small sizes it is bound by its launches from Python, and that is what is measured. "graph"
is a forward in a CUDA graph, on inputs that have left the second-level cache.

GB/s and TFLOP/s are of the bytes that must move and of the operations that chunks of 64 steps take, whatever the kernels do:
docs/ssd.md, "Operations and bytes". "peak" is the memory of inputs, forward and backward at its highest, over that of inputs,
output and gradients, which nothing can do without.

Before a case is timed, its results and gradients for one row of the batch are compared with those of the CPU kernel in
float64. The error of ``out`` is also given over that of the exact result rounded to its dtype, and so is that of an ``out``
without D, whose D x hides some of it. Exits with 1 if a result is wrong; a missed bar is only reported.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import ssm_kernels
from benchmarks import peers
from benchmarks.bench_selective_scan import DIRECTIONS, PEER, Contender, milliseconds, on_h200
from benchmarks.harness import add_case_options, chosen_cases, machine, measure, require_cuda, time_graph

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class ErrorBars:
    """Relative L2 errors against float64: beyond what a result is wrong, and what is asked of gradients and of ``out``, of the
    latter over that of rounding the exact result, or as it is."""

    wrong: float
    gradients: float
    out: float
    is_over_rounding: bool


# Rounding to bfloat16 alone makes 1.7e-3; one product of TF32 would make 3e-4.
ERROR_BARS = {
    "bfloat16": ErrorBars(wrong=6e-3, gradients=2.5e-3, out=1.15, is_over_rounding=True),
    "float32": ErrorBars(wrong=1e-5, gradients=1e-6, out=1e-6, is_over_rounding=False),
}
# The length of chunks whose operations are counted.
COUNTED_CHUNK = 64


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        bar, goal: mamba_ssm's time over ours that forward and backward shall reach, and what is hoped for.
    """

    batch: int
    seqlen: int
    heads: int
    headdim: int = 64
    dstate: int = 128
    groups: int = 1
    z: bool = False
    dtype: str = "bfloat16"
    bar: float | None = None
    goal: float | None = None

    @property
    def name(self) -> str:
        words = (f"{letter}{size}" for letter, size in zip("BLHPNG", self.sizes, strict=True))
        return " ".join([*words, *["z"] * self.z, *["fp32"] * (self.dtype == "float32")])

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.batch, self.seqlen, self.heads, self.headdim, self.dstate, self.groups

    def inputs(self, device: torch.device, seed: int = 0) -> Inputs:
        """As Mamba-2 makes them: softplus(dt + dt_bias) is spread log-uniformly over about [0.001, 0.1]."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        def uniform() -> Tensor:
            return torch.rand(self.heads, generator=generator, device=device)

        steps, matrix = (self.batch, self.seqlen), (self.groups, self.dstate)
        inputs = {
            "x": F.silu(normal(*steps, self.heads, self.headdim)).to(self.torch_dtype),
            "dt": (0.1 * normal(*steps, self.heads)).to(self.torch_dtype),
            "A": -1 - 15 * uniform(),
            "B": F.silu(normal(*steps, *matrix)).to(self.torch_dtype),
            "C": F.silu(normal(*steps, *matrix)).to(self.torch_dtype),
            "D": torch.ones(self.heads, device=device),
            "dt_bias": torch.log(torch.expm1(0.001 * 100.0 ** uniform())),
        }
        return inputs | ({"z": normal(*steps, self.heads, self.headdim).to(self.torch_dtype)} if self.z else {})

    def function(self) -> Callable[..., Any]:
        return functools.partial(ssm_kernels.ssd_chunk_scan, dt_softplus=True)

    def moved_bytes(self) -> dict[str, int]:
        H, P, N, G, tokens = self.heads, self.headdim, self.dstate, self.groups, self.batch * self.seqlen
        size = self.torch_dtype.itemsize
        return {
            "forward": size * tokens * (2 * H * P + H + 2 * G * N + self.z * H * P),
            "backward": size * tokens * (3 * H * P + 2 * H + 4 * G * N + self.z * 2 * H * P),
        }

    def operations(self) -> dict[str, int]:
        H, P, N, G, Q, tokens = self.heads, self.headdim, self.dstate, self.groups, COUNTED_CHUNK, self.batch * self.seqlen
        return {
            "forward": tokens * (2 * G * Q * N + 2 * H * Q * P + 4 * H * P * N),
            "backward": tokens * (6 * G * Q * N + (6 if self.z else 4) * H * Q * P + 12 * H * P * N),
        }


CASES = [
    Case(8, 4096, 80, bar=2.5, goal=4.0),
    Case(8, 4096, 80, z=True),
    Case(8, 4096, 80, dstate=64),
    Case(8, 2048, 24, bar=2.5),
    Case(1, 16384, 80, bar=2.5),
    Case(1, 4096, 24, bar=4.0),
    Case(1, 65536, 24),
    Case(8, 4096, 80, dstate=256),
    Case(8, 2048, 24, dtype="float32"),
    Case(8, 4096, 80, dtype="float32"),
]


def relative_error(actual: Tensor, exact: Tensor) -> float:
    return ((actual - exact).norm() / exact.norm()).item()


def over_rounding(case: Case, actual: Tensor, exact: Tensor) -> float:
    """The error over that of the exact result rounded to the case's dtype."""
    return relative_error(actual, exact) / relative_error(exact.to(case.torch_dtype).double(), exact)


def errors_of(case: Case, inputs: Inputs, grad_out: Tensor) -> dict[str, Any]:
    """Relative L2 errors of both results and every gradient for one row; that of ``out`` over rounding's, with D and without.

    The whole scan runs. The incoming gradient is zero for all others, so that gradients of the parameters are of this row.
    """
    row = case.batch - 1

    def sliced(name: str, tensor: Tensor) -> Tensor:
        return (tensor if name in ("A", "D", "dt_bias") else tensor[row:]).cpu().double()

    def results_of(inputs: Inputs, grad_out: Tensor) -> dict[str, Tensor]:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
        out, final_states = case.function()(**leaves, return_final_states=True)
        gradients = torch.autograd.grad(out, tuple(leaves.values()), grad_out)
        found = dict(zip((f"grad_{name}" for name in leaves), gradients, strict=True))
        return {"out": out.detach(), "final_states": final_states.detach()} | found

    masked = torch.zeros_like(grad_out)
    masked[row:] = grad_out[row:]
    found = results_of(inputs, masked)
    exact_inputs = {name: sliced(name, tensor) for name, tensor in inputs.items()}
    exact = results_of(exact_inputs, sliced("x", grad_out))
    with torch.no_grad():
        out, exact_out = (case.function()(**of | {"D": None}) for of in (inputs, exact_inputs))
    return {
        "errors": {
            name: relative_error(sliced(name.removeprefix("grad_"), found[name]), expected) for name, expected in exact.items()
        },
        "over_rounding": over_rounding(case, sliced("out", found["out"]), exact["out"]),
        "over_rounding_without_D": over_rounding(case, sliced("out", out), exact_out),
        "error_without_D": relative_error(sliced("out", out), exact_out),
    }


def time_in_graph(case: Case, inputs: Inputs, trials: int, device: torch.device) -> dict[str, float]:
    """Seconds of a forward in a CUDA graph, on so many sets of inputs that the cache holds none of them for long."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size or 2**26
    count = min(64, math.ceil(4 * cache / case.moved_bytes()["forward"]))
    sets = [inputs, *(case.inputs(device, seed) for seed in range(1, count))]
    function = case.function()
    with torch.no_grad():
        return time_graph(lambda one: function(**one), sets, trials).to_dict()


def measure_case(
    case: Case, trials: int, warmup: int, peer: Callable[..., Tensor] | None, device: torch.device
) -> dict[str, Any]:
    """The row of a case, ours and the peer measured in turns."""
    inputs = case.inputs(device)
    grad_out = torch.empty_like(inputs["x"]).normal_(generator=torch.Generator(device).manual_seed(1))
    compared = errors_of(case, inputs, grad_out)
    given = sum(tensor.nbytes for tensor in inputs.values())
    row: dict[str, Any] = {
        "name": case.name,
        **asdict(case),
        "bytes": case.moved_bytes(),
        "operations": case.operations(),
        # Inputs and gradients, output and the incoming gradient; of these, what is there before forward.
        "least_bytes": 2 * (given + grad_out.nbytes),
        "given_bytes": given + grad_out.nbytes,
        **compared,
        "wrong": [name for name, error in compared["errors"].items() if not error <= ERROR_BARS[case.dtype].wrong],
        "graph": time_in_graph(case, inputs, trials, device),
    }
    contenders = {"ours": Contender(case.function(), inputs, grad_out, may_fail=False)}
    if peer is not None:
        contenders["peer"] = Contender(peer, inputs, grad_out, may_fail=True)  # its first call compiles, and tunes itself
    benchmarks = {
        (who, what): contender.stages[what]
        for who, contender in contenders.items()
        for what in DIRECTIONS
        if what in contender.stages
    }
    measured = measure(benchmarks, device=device, trials=trials, warmup=warmup)
    for who, contender in contenders.items():
        row[who] = {what: measured[who, what].total.to_dict() for what in DIRECTIONS if (who, what) in measured}
        row[who] |= {"peak_bytes": contender.peak, "unsupported": contender.unsupported, "recorded": False}
    recorded = None if case.z or case.dtype != "bfloat16" else peers.RECORDED_SSD.get(case.sizes)
    if peer is None and recorded and on_h200(device):
        times = {direction: {"median": seconds} for direction, seconds in zip(DIRECTIONS, recorded, strict=True)}
        row["peer"] = {**times, "peak_bytes": None, "unsupported": None, "recorded": True}
    return row


def judge(row: dict[str, Any]) -> None:
    """Adds to a row what became of its bars: of speed, where the peer's is known, and of accuracy."""
    row["judged"] = []
    for direction in DIRECTIONS:
        other = row.get("peer") or {}
        if row["bar"] is not None and direction in other:
            ratio = other[direction]["median"] / row["ours"][direction]["median"]
            found = {"direction": direction, "other": PEER, "ratio": ratio, "bar": row["bar"], "goal": row["goal"]}
            row["judged"].append(found | {"met": ratio >= row["bar"]})
    gradients = {name: error for name, error in row["errors"].items() if name.startswith("grad_")}
    bars = ERROR_BARS[row["dtype"]]
    if bars.is_over_rounding:
        of_out = max(row["over_rounding"], row["over_rounding_without_D"])
    else:
        of_out = max(row["errors"]["out"], row["error_without_D"])
    row["accuracy"] = {
        "out": {"found": of_out, "bar": bars.out, "met": of_out <= bars.out},
        "gradients": {
            "found": max(gradients.values()),
            "bar": bars.gradients,
            "met": all(error <= bars.gradients for error in gradients.values()),
        },
    }


def peak(row: Mapping[str, Any], who: str) -> str:
    """Peak memory over the least."""
    found = (row.get(who) or {}).get("peak_bytes")
    return "" if found is None else f"{(row['given_bytes'] + found) / row['least_bytes']:.2f}"


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="ssd_chunk_scan, milliseconds", caption="* recorded; bars: met +, missed -", box=None)
    rest = ("GB/s", "TFLOP/s", "peer", "ratio, bar")
    columns = ("case", "graph", "fwd", *rest, "bwd", *rest, "peak", "peer", "error of out", "gradients")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        cells = [row["name"], f"{row['graph']['median'] * 1e3:.3f}"]
        for direction in DIRECTIONS:
            seconds, other = row["ours"][direction]["median"], (row.get("peer") or {}).get(direction)
            cells += [f"{seconds * 1e3:.3f}", f"{row['bytes'][direction] / seconds / 1e9:.0f}"]
            cells += [f"{row['operations'][direction] / seconds / 1e12:.0f}", milliseconds(row, "peer", direction)]
            judged = [found for found in row["judged"] if found["direction"] == direction]
            marks = "".join(f" {'+' if found['met'] else '-'}{found['bar']:g}" for found in judged)
            cells.append("" if other is None else f"{other['median'] / seconds:.2f}{marks}")
        cells += [peak(row, "ours"), peak(row, "peer")]
        accuracy = row["accuracy"]
        cells += [f"{accuracy['out']['found']:.3g} {'+' if accuracy['out']['met'] else '-'}"]
        cells += [f"{accuracy['gradients']['found']:.1e} {'+' if accuracy['gradients']['met'] else '-'}"]
        table.add_row(*cells)
    return table


def missed_bars(row: Mapping[str, Any]) -> list[str]:
    """A sentence for each."""
    missed = [
        f"{row['name']}, {found['direction']}: {found['ratio']:.2f} times as fast as mamba_ssm, bar {found['bar']:g}"
        for found in row["judged"]
        if not found["met"]
    ]
    out, gradients = row["accuracy"]["out"], row["accuracy"]["gradients"]
    if not out["met"]:
        unit = " times that of rounding" if ERROR_BARS[row["dtype"]].is_over_rounding else ""
        missed.append(f"{row['name']}: error of out {out['found']:.3g}{unit}, bar {out['bar']:g}")
    if not gradients["met"]:
        errors = ", ".join(
            f"{name} {error:.1e}"
            for name, error in row["errors"].items()
            if name.startswith("grad_") and not error <= gradients["bar"]
        )
        missed.append(f"{row['name']}: errors of {errors}, bar {gradients['bar']:g}")
    return missed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_case_options(parser, "L65536", trials=30, warmup=5)
    options = parser.parse_args(arguments)
    chosen = chosen_cases(parser, options, CASES)
    require_cuda(parser)

    device = torch.device("cuda", torch.cuda.current_device())
    peer = peers.ssd()
    console = Console(width=200, highlight=False)
    console.print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; peer: {peers.described(peer)}")
    rows: list[dict[str, Any]] = []
    result = {
        "benchmark": "ssd_chunk_scan",
        "machine": machine(device),
        "settings": {
            "trials": options.trials,
            "warmup": options.warmup,
            "counted_chunk": COUNTED_CHUNK,
            "compared": "one row of the batch",
        },
        "peer": peers.described(peer),
        "rows": rows,
    }
    for case in chosen:
        row = measure_case(case, options.trials, options.warmup, peer, device)
        judge(row)
        rows.append(row)
        # After each case: what was measured is kept if a later one does not end.
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=2, default=str) + "\n")
        times = " / ".join(milliseconds(row, "ours", direction) for direction in DIRECTIONS)
        console.print(f"ms forward / backward: {row['name']} {times}")
        torch.cuda.empty_cache()
    console.print(table_of(rows))
    missed = [sentence for row in rows for sentence in missed_bars(row)]
    console.print("every bar that could be judged is met" if not missed else "missed:\n  " + "\n  ".join(missed))

    wrong = [f"{row['name']}: {', '.join(row['wrong'])}" for row in rows if row["wrong"]]
    if wrong:
        print("wrong results: " + "; ".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
