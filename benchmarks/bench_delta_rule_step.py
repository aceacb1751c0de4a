#!/usr/bin/env python3
"""delta_rule_step on CUDA: time of a decoding step, beside a copy of the states and beside flash-linear-attention's kernel.

    python benchmarks/bench_delta_rule_step.py [--json FILE] [--trials N]

``page.md`` says what each figure is. Every case is compared with the float64 reference before it is timed. Exits with 1 if one
is wrong.
"""

from __future__ import annotations

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
from benchmarks.bench_state_update import SHORT, time_call
from benchmarks.benchmark import FLA, Benchmark, Case, Contest, Result, Row, Run, main
from benchmarks.tables import Table, figure, ratio, text, throughput, versus
from ssm_kernels import reference

Inputs = dict[str, Any]
OPERATOR = "delta_rule_step"

# Relative L2 errors against float64 up to which a result is right: rounding to bfloat16 alone makes 1.7e-3.
ALLOWED_ERROR = {torch.bfloat16: 3e-3, torch.float32: 1e-5}
GATES = {None: "none", "head": "a head", "column": "a column"}


@dataclass(frozen=True)
class DeltaStepCase(Case):
    """Sizes and types of a step. ``gate``: the shape of g. ``tokens``: None for one token."""

    batch: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    gate: str | None = "head"
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    tokens: int | None = None

    @property
    def name(self) -> str:
        return f"{self.sizes}, {self.dtypes}, gate {GATES[self.gate]}"

    @property
    def sizes(self) -> str:
        tokens = "" if self.tokens is None else f" T{self.tokens}"
        return f"B{self.batch}{tokens} H{self.heads}/{self.value_heads} K{self.key_dim} V{self.value_dim}"

    @property
    def dtypes(self) -> str:
        return f"{SHORT[self.dtype]} / {SHORT[self.state_dtype]}"

    @property
    def fields(self) -> dict[str, Any]:
        return {"sizes": self.sizes, "dtypes": self.dtypes, "gate": GATES[self.gate]}

    def inputs(self, device: torch.device, seed: int, batch: int | None = None) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)
        batch = batch or self.batch
        rows = (batch,) if self.tokens is None else (batch, self.tokens)

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        columns = (self.value_heads, self.key_dim) if self.gate == "column" else (self.value_heads,)
        return {
            "states": normal(batch, self.value_heads, self.value_dim, self.key_dim, dtype=self.state_dtype),
            "q": normal(*rows, self.heads, self.key_dim),
            "k": normal(*rows, self.heads, self.key_dim),
            "v": normal(*rows, self.value_heads, self.value_dim),
            "beta": normal(*rows, self.value_heads).sigmoid(),
            "g": None if self.gate is None else -normal(*rows, *columns, dtype=torch.float32).abs(),
            "qk_l2norm": True,
        }

    def peer(self) -> Callable[[Inputs], Any] | None:
        """flash-linear-attention's kernel, which reads the states and writes others."""
        if self.gate != "head" or self.state_dtype != torch.float32:
            return None
        step = peers.imported("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule")
        if step is None:
            return None

        def call(inputs: Inputs) -> Any:
            names = ("q", "k", "v", "g", "beta")
            sequences = {name: inputs[name] if self.tokens else inputs[name][:, None] for name in names}
            states = inputs["states"].view(*inputs["states"].shape[:2], self.key_dim, self.value_dim)
            return step[0](**sequences, initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=True)

        return call

    def step(self, inputs: Inputs) -> Tensor:
        return ssm_kernels.delta_rule_step(**inputs)

    def contest(self, run: Run) -> Contest:
        few = self.inputs(run.device, seed=1, batch=min(self.batch, 3))
        doubles = {k: v.cpu().double() if isinstance(v, Tensor) else v for k, v in few.items()}
        exact = reference.delta_rule_step(**doubles)
        moved = moved_bytes(self.inputs(run.device, seed=0))
        sets = run.sets(lambda seed: self.inputs(run.device, seed), moved, 256)
        targets = {id(inputs): torch.empty_like(inputs["states"]) for inputs in sets}
        contenders = {"ours": self.step, "copy": lambda inputs: targets[id(inputs)].copy_(inputs["states"])}
        if (peer := self.peer()) is not None:
            contenders["peer"] = peer

        def results(function: Callable[[Inputs], Tensor]) -> dict[str, Tensor]:
            return {"out": self.step(few), "states": few["states"]} if function == self.step else {}

        def prepare(who: str, function: Callable[[Inputs], Tensor], found: dict[str, Any]) -> dict[str, Any]:
            found |= {"graph": run.time_graph(function, sets), "call": time_call(function, sets[0], run.device)}
            return {}

        amounts = {"bytes": moved, "copied_bytes": 2 * sets[0]["states"].nbytes}
        return Contest(contenders, results, dict(zip(("out", "states"), exact, strict=True)), prepare, self.allowed, amounts)

    def allowed(self, name: str) -> float:
        return ALLOWED_ERROR[self.dtype if name == "out" else self.state_dtype]


FP32, BF16 = torch.float32, torch.bfloat16
CASES = [
    DeltaStepCase(64, 32, 32, 128, 128),
    DeltaStepCase(64, 32, 32, 128, 128, state_dtype=BF16),
    DeltaStepCase(64, 32, 32, 128, 128, dtype=FP32),
    DeltaStepCase(64, 32, 32, 128, 128, gate="column"),
    DeltaStepCase(64, 32, 32, 128, 128, gate=None),
    DeltaStepCase(64, 16, 32, 128, 128),
    DeltaStepCase(16, 16, 32, 128, 128),
    DeltaStepCase(1, 16, 32, 128, 128),
    DeltaStepCase(64, 30, 30, 96, 192),
    DeltaStepCase(64, 6, 6, 256, 512),
    DeltaStepCase(64, 32, 32, 127, 128),
    DeltaStepCase(16, 16, 32, 128, 128, tokens=4),
]


def moved_bytes(inputs: Inputs) -> int:
    """Bytes that a step must move: every tensor once, the states twice, and the output."""
    sizes = {name: math.prod(t.shape) * t.element_size() for name, t in inputs.items() if isinstance(t, Tensor)}
    return sum(sizes.values()) + sizes["states"] + sizes["v"]


def figures(row: Row, result: Result) -> dict[str, float]:
    others = {"copy": "graph, share of a copy's rate", "peer": f"graph, speed-up over {FLA}"}
    ours = row["ours"].get("graph")
    return {
        name: row[who]["graph"]["median"] / ours["median"]
        for who, name in others.items()
        if ours is not None and "graph" in row.get(who, {})
    }


def tables(result: Result) -> list[Table]:
    graph, call = (
        [
            figure(what, "ours", what, 1e-6, 2),
            figure(f"{what}, copy", "copy", what, 1e-6, 2),
            *versus(f"{what}, {FLA}", "peer", what, 1e-6, 2),
        ]
        for what in ("graph", "call")
    )
    graph.insert(1, throughput("GB/s", "bytes", "graph", 1e9))
    graph.insert(3, ratio("× copy", "graph", "ours", "copy"))
    columns = [text("sizes"), text("q / states", "dtypes"), text("gate"), *graph, *call]
    return [Table("delta_rule_step, microseconds", columns, result["rows"], left=3)]


BENCHMARK = Benchmark(OPERATOR, lambda options: CASES, tables, figures, trials=50)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
