#!/usr/bin/env python3
"""selective_state_update on CUDA: time of a decoding step, beside a copy of the same bytes and beside mamba_ssm's kernel.

    python benchmarks/bench_state_update.py [--json FILE] [--trials N]

``page.md`` says what each figure is. A call is timed by ``triton.testing.do_bench`` where Triton is installed. Every case is
compared with the float64 reference before it is timed. Exits with 1 if one is wrong.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import ssm_kernels
from benchmarks import peers
from benchmarks.benchmark import PEER, Benchmark, Result, Run, main
from benchmarks.harness import measure, on_h200, sets_beyond_cache, time_graph, time_host
from benchmarks.labels import label
from benchmarks.tables import Table, figure, ratio, text, throughput
from ssm_kernels import reference

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Sizes and types of a step. With ``heads``, ``dim`` is headdim, and A, dt, D and dt_bias are one number per head."""

    batch: int
    heads: int | None
    dim: int
    dstate: int
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    discretization: str = "zoh"

    @property
    def name(self) -> str:
        return f"{self.sizes}, {self.dtypes}, {self.discretization}"

    @property
    def sizes(self) -> str:
        channels = f"D{self.dim}" if self.heads is None else f"H{self.heads} P{self.dim}"
        return f"B{self.batch} {channels} N{self.dstate}"

    @property
    def dtypes(self) -> str:
        short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
        return f"{short[self.dtype]} / {short[self.state_dtype]}"

    @property
    def state_bytes(self) -> int:
        return self.batch * (self.heads or 1) * self.dim * self.dstate * self.state_dtype.itemsize

    @property
    def recorded(self) -> float | None:
        if self.discretization != "zoh" or self.state_dtype != torch.float32:
            return None
        return peers.RECORDED_STATE_UPDATE.get((self.batch, self.heads, self.dim, self.dstate))

    def inputs(self, device: torch.device, seed: int, batch: int | None = None) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        batch = batch or self.batch

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        channels = (self.dim,) if self.heads is None else (self.heads, self.dim)
        matrix = (batch, self.dstate) if self.heads is None else (batch, 1, self.dstate)
        inputs = {
            "state": normal(batch, *channels, self.dstate, dtype=self.state_dtype),
            "x": normal(batch, *channels),
            "B": normal(*matrix),
            "C": normal(*matrix),
            "z": normal(batch, *channels),
        }
        if self.heads is None:
            inputs["A"] = -torch.exp(normal(self.dim, self.dstate, dtype=torch.float32))
            inputs["dt"] = normal(batch, self.dim)
            inputs["D"], inputs["dt_bias"] = (normal(self.dim, dtype=torch.float32) for _ in range(2))
        else:
            A = -torch.exp(normal(self.heads, dtype=torch.float32))
            inputs["A"] = A[:, None, None].expand(*channels, self.dstate)
            inputs["dt"] = normal(batch, self.heads)[..., None].expand(batch, *channels)
            for name in ("D", "dt_bias"):
                inputs[name] = normal(self.heads, dtype=torch.float32)[:, None].expand(channels)
        return inputs | {"dt_softplus": True}


FP32, BF16 = torch.float32, torch.bfloat16
SIZES = [
    (64, None, 2048, 16),
    (64, 80, 64, 128),
    (1, None, 2048, 16),
    (1, 80, 64, 128),
    (8, 80, 64, 128),
    (64, None, 2048, 64),
    (64, 24, 64, 64),
    (16, 32, 64, 256),
]
CASES = [
    *(Case(*sizes, dtype=FP32) for sizes in SIZES[:2]),
    *(Case(*sizes) for sizes in SIZES),
    *(Case(*sizes, state_dtype=BF16) for sizes in SIZES[:4]),
    *(Case(*SIZES[0], dtype=FP32, discretization=method) for method in reference.DISCRETIZATIONS if method != "zoh"),
]


def step(inputs: Inputs, discretization: str) -> Tensor:
    return ssm_kernels.selective_state_update(**inputs, discretization=discretization)


def moved_bytes(inputs: Inputs) -> int:
    """Bytes that a step must move: every element once (not once per expansion), the state twice, and the output."""
    sizes = {
        name: math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride) * t.element_size()
        for name, t in inputs.items()
        if isinstance(t, Tensor)
    }
    return sum(sizes.values()) + sizes["state"] + sizes["x"]


def error_of(case: Case, device: torch.device) -> float:
    """Largest error of output and state over the roundings allowed to them; at most 1 for a right result."""
    inputs = case.inputs(device, seed=1, batch=min(case.batch, 3))
    doubles = {k: v.double() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    exact = reference.selective_state_update(**doubles, discretization=case.discretization)
    out = step(inputs, case.discretization)
    worst = 0.0
    for actual, expected in zip((out, inputs["state"]), exact, strict=True):
        roundings = max(torch.finfo(actual.dtype).eps, 32 * torch.finfo(torch.float32).eps)
        worst = max(worst, ((actual.double() - expected).abs().max() / (roundings * expected.abs().max())).item())
    return worst


def time_call(function: Callable[[Inputs], Any], inputs: Inputs) -> float:
    """Median seconds of a call after the cache was overwritten."""
    try:
        from triton.testing import do_bench
    except ImportError:
        return measure({"call": [lambda: function(inputs)]}, device="cuda", trials=200, warmup=20)["call"].total.median
    return do_bench(lambda: function(inputs), warmup=25, rep=200, return_mode="median") * 1e-3


def measure_case(case: Case, run: Run) -> dict[str, Any]:
    one = case.inputs(run.device, seed=0)
    sets = sets_beyond_cache(lambda seed: case.inputs(run.device, seed), moved_bytes(one), run.device, 256)
    pairs = [(inputs["state"], torch.empty_like(inputs["state"])) for inputs in sets]
    error, peer = error_of(case, run.device), peers.state_update()

    def ours(inputs: Inputs) -> Tensor:
        return step(inputs, case.discretization)

    def copy(pair: Any) -> Tensor:
        return pair[1].copy_(pair[0])

    row: dict[str, Any] = {
        "name": case.name,
        "sizes": case.sizes,
        "dtypes": case.dtypes,
        "discretization": case.discretization,
        "bytes": moved_bytes(one),
        "copied_bytes": 2 * case.state_bytes,
        "error": error,
        "wrong": [] if error <= 1 else ["output or state"],
        "graph": time_graph(ours, sets, run.trials).to_dict(),
        "call": time_call(ours, one),
        "copy_graph": time_graph(copy, pairs, run.trials).to_dict(),
        "copy_call": time_call(copy, pairs[0]),
    }
    if peer is not None and case.discretization == "zoh":
        in_graph = time_graph(peer, sets, run.trials).to_dict()
        row["peer"] = {"graph": in_graph, "call": time_call(peer, one), "recorded": False}
    elif case.recorded is not None and on_h200(run.device):
        row["peer"] = {"graph": None, "call": case.recorded, "recorded": True}
    return row


def host_times(run: Run) -> dict[str, float]:
    small = Case(1, None, 64, 16).inputs(run.device, seed=0)  # the GPU finishes this step sooner than the host the next call
    host, peer = {"ours": time_host(lambda: step(small, "zoh")).median}, peers.state_update()
    return host if peer is None else host | {"peer": time_host(lambda: peer(small)).median}


def tables(result: Result) -> list[Table]:
    rows = [
        {
            **row,
            "ours": row,
            "copy": {"graph": row["copy_graph"], "call": row["copy_call"]},
            "method": label(row["discretization"]),
        }
        for row in result["rows"]
    ]
    graph, call = (
        [
            figure(what, "ours", what, 1e-6, 2),
            figure(f"{what}, copy", "copy", what, 1e-6, 2),
            figure(f"{what}, {PEER}", "peer", what, 1e-6, 2),
            ratio("speed-up", what, "peer", "ours"),
        ]
        for what in ("graph", "call")
    )
    graph.insert(1, throughput("GB/s", "bytes", "graph", 1e9))
    graph.insert(3, ratio("× copy", "graph", "ours", "copy"))
    columns = [text("sizes"), text("x / state", "dtypes"), text("method"), *graph, *call]
    host = [{"who": who, "µs": f"{seconds * 1e6:.2f}"} for who, seconds in result["host_seconds"].items()]
    return [
        Table("selective_state_update, microseconds", columns, rows, left=3),
        Table("host time, microseconds", [text("who"), text("µs")], host),
    ]


def context(run: Run) -> Result:
    settings = {"cases": [asdict(case) for case in CASES]}
    return {"peer": peers.described(peers.state_update()), "settings": settings, "host_seconds": {}}


BENCHMARK = Benchmark(
    "selective_state_update",
    lambda options: CASES,
    lambda cases, run: [measure_case(case, run) for case in cases],
    tables,
    trials=50,
    context=context,
    conclude=lambda run: {"host_seconds": host_times(run)},
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
