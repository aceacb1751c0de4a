#!/usr/bin/env python3
"""selective_state_update on CUDA: time of a decoding step, beside a copy of the same bytes and beside mamba_ssm's kernel.

    python benchmarks/bench_state_update.py [--json FILE] [--trials N]

``page.md`` says what each figure is. A call is timed by ``triton.testing.do_bench`` where Triton is installed. Every case is
compared with the float64 reference before it is timed. Exits with 1 if one is wrong.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import ssm_kernels
from benchmarks import peers
from benchmarks.benchmark import PEER, Benchmark, Case, Contest, Result, Run, main
from benchmarks.harness import measure, time_host
from benchmarks.labels import label
from benchmarks.tables import Table, figure, ratio, text, throughput, versus
from ssm_kernels import reference

Inputs = dict[str, Any]
OPERATOR = "selective_state_update"

# Relative L2 errors against float64 up to which a result is right: rounding to bfloat16 alone makes 1.7e-3.
ALLOWED_ERROR = {torch.bfloat16: 2.5e-3, torch.float32: 1e-5}
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class StepCase(Case):
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
        return f"{SHORT[self.dtype]} / {SHORT[self.state_dtype]}"

    @property
    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("sizes", "dtypes", "discretization")}

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

    def step(self, inputs: Inputs) -> Tensor:
        return ssm_kernels.selective_state_update(**inputs, discretization=self.discretization)

    def contest(self, run: Run) -> Contest:
        few = self.inputs(run.device, seed=1, batch=min(self.batch, 3))
        doubles = {k: v.cpu().double() if isinstance(v, Tensor) else v for k, v in few.items()}
        exact = reference.selective_state_update(**doubles, discretization=self.discretization)
        moved = moved_bytes(self.inputs(run.device, seed=0))
        sets = run.sets(lambda seed: self.inputs(run.device, seed), moved, 256)
        targets = {id(inputs): torch.empty_like(inputs["state"]) for inputs in sets}
        contenders = {"ours": self.step, "copy": lambda inputs: targets[id(inputs)].copy_(inputs["state"])}
        if self.discretization == "zoh" and (peer := peers.operator(OPERATOR)) is not None:
            contenders["peer"] = peer

        def results(function: Callable[[Inputs], Tensor]) -> dict[str, Tensor]:
            return {"out": self.step(few), "state": few["state"]} if function == self.step else {}

        def prepare(who: str, function: Callable[[Inputs], Tensor], figures: dict[str, Any]) -> dict[str, Any]:
            figures |= {"graph": run.time_graph(function, sets), "call": time_call(function, sets[0], run.device)}
            return {}

        amounts = {"bytes": moved, "copied_bytes": 2 * sets[0]["state"].nbytes}
        return Contest(contenders, results, dict(zip(("out", "state"), exact, strict=True)), prepare, self.allowed, amounts)

    def allowed(self, name: str) -> float:
        return ALLOWED_ERROR[self.dtype if name == "out" else self.state_dtype]


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
    *(StepCase(*sizes, dtype=FP32) for sizes in SIZES[:2]),
    *(StepCase(*sizes) for sizes in SIZES),
    *(StepCase(*sizes, state_dtype=BF16) for sizes in SIZES[:4]),
    *(StepCase(*SIZES[0], dtype=FP32, discretization=method) for method in reference.DISCRETIZATIONS if method != "zoh"),
]


def moved_bytes(inputs: Inputs) -> int:
    """Bytes that a step must move: every element once (not once per expansion), the state twice, and the output."""
    sizes = {
        name: math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride) * t.element_size()
        for name, t in inputs.items()
        if isinstance(t, Tensor)
    }
    return sum(sizes.values()) + sizes["state"] + sizes["x"]


def time_call(function: Callable[[Inputs], Any], inputs: Inputs, device: torch.device) -> float:
    """Median seconds of a call after the cache was overwritten."""
    with contextlib.suppress(ImportError):
        from triton.testing import do_bench

        if device.type == "cuda":
            return do_bench(lambda: function(inputs), warmup=25, rep=200, return_mode="median") * 1e-3
    return measure({"call": [lambda: function(inputs)]}, device=device, trials=200, warmup=20)["call"].total.median


def host_times(run: Run) -> dict[str, float]:
    case = StepCase(1, None, 64, 16)
    small = case.inputs(run.device, seed=0)  # the GPU finishes this step sooner than the host the next call
    functions = {"ours": case.step} | ({"peer": peer} if (peer := peers.operator(OPERATOR)) else {})
    return {who: time_host(functools.partial(function, small), run.device).median for who, function in functions.items()}


def tables(result: Result) -> list[Table]:
    rows = [
        {
            **row,
            # Older results have our figures and the copy's in the row.
            "ours": row.get("ours", row),
            "copy": row.get("copy") or {"graph": row["copy_graph"], "call": row["copy_call"]},
            "method": label(row["discretization"]),
        }
        for row in result["rows"]
    ]
    graph, call = (
        [
            figure(what, "ours", what, 1e-6, 2),
            figure(f"{what}, copy", "copy", what, 1e-6, 2),
            *versus(f"{what}, {PEER}", "peer", what, 1e-6, 2),
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
    return {"peer": peers.described(peers.operator(OPERATOR)), "host_seconds": {}}


BENCHMARK = Benchmark(
    OPERATOR,
    lambda options: CASES,
    tables,
    trials=50,
    context=context,
    conclude=lambda run: {"host_seconds": host_times(run)},
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
