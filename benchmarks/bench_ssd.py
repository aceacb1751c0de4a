#!/usr/bin/env python3
"""ssd_chunk_scan on CUDA: forward and backward, beside mamba_ssm's Triton kernels.

    python benchmarks/bench_ssd.py [--json FILE] [--cases NAME ...] [--trials N]

``page.md`` says what each figure is. The cases leave the chunks' length to the operator. mamba_ssm's
``mamba_chunk_scan_combined`` takes turns with ours, tuned before, if it is installed; else figures recorded with it on an H200
are printed and marked.

Before a case is timed, its results and gradients for one row of the batch are compared with those of the CPU kernel in
float64. The error of ``out`` is also given over that of the exact result rounded to its dtype, and so is that of an ``out``
without D, whose D x hides some of it. Exits with 1 if a result is wrong; a missed bar is only reported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

import ssm_kernels
from benchmarks import peers
from benchmarks.benchmark import (
    PEER,
    Benchmark,
    Contender,
    Result,
    Run,
    Turns,
    main,
    recorded_figures,
    relative_error,
    speedups,
    wrong_results,
)
from benchmarks.harness import Stages, sets_beyond_cache, time_graph
from benchmarks.tables import DIRECTIONS, Column, Row, Table, error_column, figure, median, over, ratio, text, throughput

Inputs = dict[str, Tensor]

# Relative L2 errors against float64 beyond which a result is wrong: rounding to bfloat16 alone makes 1.7e-3, one product of
# TF32 would make 3e-4.
ALLOWED_ERROR = {"bfloat16": 6e-3, "float32": 1e-5}
# The length of chunks whose operations are counted.
COUNTED_CHUNK = 64


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    batch: int
    seqlen: int
    heads: int
    headdim: int = 64
    dstate: int = 128
    groups: int = 1
    z: bool = False
    dtype: str = "bfloat16"

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
    Case(8, 4096, 80),
    Case(8, 4096, 80, z=True),
    Case(8, 4096, 80, dstate=64),
    Case(8, 2048, 24),
    Case(1, 16384, 80),
    Case(1, 4096, 24),
    Case(1, 65536, 24),
    Case(8, 4096, 80, dstate=256),
    Case(8, 2048, 24, dtype="float32"),
    Case(8, 4096, 80, dtype="float32"),
]


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
        function = functools.partial(case.function(), return_final_states=True)
        return Contender(function, inputs, [grad_out]).results(("out", "final_states"))

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


def time_in_graph(case: Case, run: Run) -> dict[str, float]:
    """Seconds of a forward in a CUDA graph, on so many sets of inputs that the cache holds none of them for long."""
    sets = sets_beyond_cache(lambda seed: case.inputs(run.device, seed), case.moved_bytes()["forward"], run.device, 64)
    function = case.function()
    with torch.no_grad():
        return time_graph(lambda one: function(**one), sets, run.trials).to_dict()


def measure_case(case: Case, run: Run) -> dict[str, Any]:
    """The row of a case, ours and the peer measured in turns."""
    inputs = case.inputs(run.device)
    grad_out = torch.empty_like(inputs["x"]).normal_(generator=torch.Generator(run.device).manual_seed(1))
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
        "wrong": wrong_results(compared["errors"], lambda _: ALLOWED_ERROR[case.dtype]),
        "graph": time_in_graph(case, run),
    }
    turns, peer = Turns(run), peers.ssd()

    def prepare(who: str, function: Callable[..., Any], figures: dict[str, Any]) -> dict[str, Stages]:
        contender = Contender(function, inputs, [grad_out])
        figures["peak_bytes"] = contender.peak_bytes()
        return contender.stages(*DIRECTIONS)

    row |= turns.contend({"ours": case.function()} | ({} if peer is None else {"peer": peer}), prepare)
    turns.measure()
    if not case.z and case.dtype == "bfloat16" and case.sizes in peers.RECORDED_SSD:
        recorded_figures({"peer": peers.RECORDED_SSD[case.sizes]}, row, run.device)
    return row


def figures(row: Row, result: Result) -> dict[str, float]:
    of_out = max(row["over_rounding"], row["over_rounding_without_D"])
    found = {"error of out over rounding": of_out}
    if row["dtype"] == "float32":
        found = {"error of out": max(row["errors"]["out"], row["error_without_D"])}
    gradients = [error for name, error in row["errors"].items() if name.startswith("grad_")]
    return {**speedups(row, {"peer": PEER}), **found, "largest error of gradients": max(gradients)}


def tables(result: Result) -> list[Table]:
    rows, case = result["rows"], text("case", "name")
    speed = [case, figure("graph", "graph", "median")]
    for what in DIRECTIONS:
        speed += [figure(what, "ours", what), throughput("GB/s", "bytes", what, 1e9)]
        speed += [throughput("TFLOP/s", "operations", what, 1e12), figure(PEER, "peer", what)]
        speed.append(ratio("speed-up", what, "peer", "ours"))

    def peak(row: Row, who: str) -> float | None:
        found = median(row.get(who), "peak_bytes")
        return None if found is None else row["given_bytes"] + found

    memory = [case, Column("least", lambda row: f"{row['least_bytes'] / 1e6:.0f}")]
    for who, name in (("ours", "ours"), ("peer", PEER)):
        memory.append(Column(name, lambda row, who=who: over(peak(row, who), 1e6, 0)))
        memory.append(Column("× least", lambda row, who=who: over(peak(row, who), row["least_bytes"])))
    errors = [case, *map(error_column, dict.fromkeys(name for row in rows for name in row["errors"]))]
    errors.append(Column("out / rounding", lambda row: f"{row['over_rounding']:.3f}"))
    errors.append(Column("without D", lambda row: f"{row['over_rounding_without_D']:.3f}"))
    return [
        Table("ssd_chunk_scan, milliseconds", speed, rows),
        Table("memory, megabytes", memory, rows),
        Table("relative errors", errors, rows),
    ]


def context(run: Run) -> Result:
    settings = {"counted_chunk": COUNTED_CHUNK, "compared": "one row of the batch"}
    return {"settings": settings, "peer": peers.described(peers.ssd())}


BENCHMARK = Benchmark(
    "ssd_chunk_scan",
    lambda options: CASES,
    lambda cases, run: [measure_case(case, run) for case in cases],
    tables,
    figures,
    trials=30,
    warmup=5,
    context=context,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
