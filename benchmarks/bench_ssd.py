#!/usr/bin/env python3
"""ssd_chunk_scan on CUDA: forward and backward, beside mamba_ssm's Triton kernels.

    python benchmarks/bench_ssd.py [--json FILE] [--cases NAME ...] [--trials N]

``page.md`` says what each figure is. The cases leave the chunks' length to the operator. mamba_ssm's
``mamba_chunk_scan_combined`` takes turns with ours, tuned before, if it is installed; else figures recorded with it on an H200
are printed and marked. A case with given log decays takes turns with flash-linear-attention's ``chunk_simple_gla``, if that is
installed, and with our call that has dt and A instead.

Before a case is timed, its results and gradients for one row of the batch are compared with those of the CPU kernel in
float64. The error of ``out`` is also given over that of the exact result rounded to its dtype, and so is that of an ``out``
without D, whose D x hides some of it. Exits with 1 if a result is wrong; a missed bar is only reported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

import ssm_kernels
from benchmarks import peers
from benchmarks.benchmark import PEER, Benchmark, Contender, Contest, Copy, Result, Run, main, relative_error, speedups
from benchmarks.harness import Stages
from benchmarks.operator_cases import OperatorCase
from benchmarks.tables import (
    DIRECTIONS,
    Column,
    Row,
    Table,
    error_columns,
    errors_of,
    figure,
    median,
    over,
    ratio,
    text,
    throughput,
    versus,
)

# The length of chunks whose operations are counted.
COUNTED_CHUNK = 64
SIMPLE_GLA, DT_FORM = "chunk_simple_gla", "dt form"


@dataclass(frozen=True)
class Case(OperatorCase):
    """A row of the table. The comparison is of one row of the batch, and includes the final states."""

    batch: int
    seqlen: int
    heads: int
    headdim: int = 64
    dstate: int = 128
    groups: int = 1
    z: bool = False
    dtype: torch.dtype = torch.bfloat16
    tf32: bool = False  # whether PyTorch's switch allows TF32; mamba_ssm always uses it for float32
    operator = "ssd_chunk_scan"
    options = MappingProxyType({"dt_softplus": True})
    compared_options = MappingProxyType({"return_final_states": True})
    results = ("out", "final_states")
    limits = MappingProxyType({torch.bfloat16: (6e-3, 6e-3), torch.float32: (1e-5, 1e-5)})
    limits_of_tf32 = (1e-3, 5e-3)

    @property
    def name(self) -> str:
        words = (f"{letter}{size}" for letter, size in zip("BLHPNG", self.sizes, strict=True))
        dtype = ["tf32" if self.tf32 else "fp32"] * (self.dtype == torch.float32)
        return " ".join([*words, *["z"] * self.z, *dtype])

    @contextmanager
    def switch(self) -> Iterator[None]:
        """PyTorch's switch for the products of float32 on CUDA, which forward and backward read when they run."""
        matmul = torch.backends.cuda.matmul
        was_allowed = matmul.allow_tf32
        matmul.allow_tf32 = self.tf32
        try:
            yield
        finally:
            matmul.allow_tf32 = was_allowed

    def allowed(self, name: str) -> float:
        return self.limits_of_tf32[name.startswith("grad_")] if self.tf32 else super().allowed(name)

    def compared(self, contender: Contender) -> dict[str, Tensor]:
        with self.switch():
            return super().compared(contender)

    def prepare(self, who: str, contender: Contender | Copy, figures: dict[str, Any], run: Run) -> Mapping[str, Stages]:
        def switched(stage: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                with self.switch():
                    return stage(*args)

            return call

        stages = super().prepare(who, contender, figures, run)
        return {what: [switched(stage) for stage in of_one] for what, of_one in stages.items()}

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.batch, self.seqlen, self.heads, self.headdim, self.dstate, self.groups

    def inputs(self, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
        """As Mamba-2 makes them: softplus(dt + dt_bias) is spread log-uniformly over about [0.001, 0.1]."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        def uniform() -> Tensor:
            return torch.rand(self.heads, generator=generator, device=device)

        steps, matrix = (self.batch, self.seqlen), (self.groups, self.dstate)
        inputs = {
            "x": F.silu(normal(*steps, self.heads, self.headdim)).to(self.dtype),
            "dt": (0.1 * normal(*steps, self.heads)).to(self.dtype),
            "A": -1 - 15 * uniform(),
            "B": F.silu(normal(*steps, *matrix)).to(self.dtype),
            "C": F.silu(normal(*steps, *matrix)).to(self.dtype),
            "D": torch.ones(self.heads, device=device),
            "dt_bias": torch.log(torch.expm1(0.001 * 100.0 ** uniform())),
        }
        return inputs | ({"z": normal(*steps, self.heads, self.headdim).to(self.dtype)} if self.z else {})

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """The last row of the batch. Gradients of the parameters are of this row."""
        return tensor if name in ("A", "D", "dt_bias") else tensor[self.batch - 1 :]

    def amounts(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        given = sum(tensor.nbytes for tensor in inputs.values()) + inputs["x"].nbytes
        # Inputs and gradients, output and the incoming gradient; of these, what is there before forward.
        amounts = {"least_bytes": 2 * given, "given_bytes": given}
        return {"bytes": self.moved_bytes(), "operations": self.operations(), **amounts}

    def errors_of_out(self, inputs: Mapping[str, Tensor]) -> dict[str, float]:
        """The error of ``out``, with D and without, alone and over that of the exact result rounded to its dtype."""
        doubles = {name: tensor.cpu().double() for name, tensor in self.parts(inputs).items()}
        found = {}
        for what, changed in (("", {}), ("_without_D", {"D": None})):
            with torch.no_grad(), self.switch():
                out, exact = (self.function()(**given | changed) for given in (inputs, doubles))
            found[f"error{what}"] = relative_error(self.part("out", out), exact)
            found[f"over_rounding{what}"] = found[f"error{what}"] / relative_error(exact.to(self.dtype), exact)
        return found

    def contest(self, run: Run) -> Contest:
        """Adds these errors, and the time of a forward in a CUDA graph, on inputs that have left the cache."""
        found = super().contest(run)
        sets = run.sets(lambda seed: self.inputs(run.device, seed), self.moved_bytes()["forward"], 64)
        with torch.no_grad(), self.switch():
            graph = run.time_graph(lambda inputs: self.function()(**inputs), sets)
        errors = self.errors_of_out(found.contenders["ours"].inputs)
        return replace(found, amounts={**found.amounts, **errors, "graph": graph})

    def moved_bytes(self) -> dict[str, int]:
        H, P, N, G, tokens = self.heads, self.headdim, self.dstate, self.groups, self.batch * self.seqlen
        size = self.dtype.itemsize
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


@dataclass(frozen=True)
class LogCase(Case):
    """A row of the table of given log decays, in float32, without D."""

    options = MappingProxyType({"dt": None, "A": None})

    @property
    def name(self) -> str:
        return f"{super().name} log"

    @property
    def fields(self) -> dict[str, Any]:
        return {**super().fields, "gates": "log"}

    def inputs(self, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
        """The decays of a gated linear attention: a sigmoid to the power of 1/16."""
        found = super().inputs(device, seed)
        log_decay = F.logsigmoid(10 * found["dt"].float()) / 16
        return {"x": found["x"], "B": found["B"], "C": found["C"], "log_decay": log_decay}

    def others(self, ours: Contender, run: Run) -> dict[str, Contender | Copy]:
        given = super().inputs(run.device)
        by_dt = {**{name: ours.inputs[name] for name in "xBC"}, "A": given["A"], "dt": F.softplus(given["dt"] - 4)}
        found = {DT_FORM: Contender(ssm_kernels.ssd_chunk_scan, by_dt, ours.grads)}
        if (peer := peers.simple_gla()) is not None:
            found[SIMPLE_GLA] = ours._replace(function=peer)
        return found

    def moved_bytes(self) -> dict[str, int]:
        further = (4 - self.dtype.itemsize) * self.batch * self.seqlen * self.heads  # float32 in the place of dt
        found = super().moved_bytes()
        return {"forward": found["forward"] + further, "backward": found["backward"] + 2 * further}


CASES = [
    Case(8, 4096, 80),
    Case(8, 4096, 80, z=True),
    Case(8, 4096, 80, dstate=64),
    Case(8, 2048, 24),
    Case(1, 16384, 80),
    Case(1, 4096, 24),
    Case(1, 65536, 24),
    Case(8, 4096, 80, dstate=256),
    Case(8, 2048, 24, dtype=torch.float32),
    Case(8, 4096, 80, dtype=torch.float32),
    LogCase(8, 4096, 16, headdim=128, groups=16),
]


def figures(row: Row, result: Result) -> dict[str, float]:
    of_out = max(row["over_rounding"], row["over_rounding_without_D"])
    found = {"error of out over rounding": of_out}
    if row["dtype"] == "float32":
        found = {"error of out": max(errors_of(row)["out"], row["error_without_D"])}
    gradients = [error for name, error in errors_of(row).items() if name.startswith("grad_")]
    for what in DIRECTIONS:
        if (by_dt := median(row.get(DT_FORM), what)) is not None:
            found[f"{what}, over the dt form"] = median(row["ours"], what) / by_dt
    return {**speedups(row, {"peer": PEER, SIMPLE_GLA: SIMPLE_GLA}), **found, "largest error of gradients": max(gradients)}


def tables(result: Result) -> list[Table]:
    rows, case = result["rows"], text("case", "name")
    given = [row for row in rows if row.get("gates") == "log"]
    rows = [row for row in rows if row not in given]
    speed = [case, figure("graph", "graph", "median")]
    for what in DIRECTIONS:
        speed += [figure(what, "ours", what), throughput("GB/s", "bytes", what, 1e9)]
        speed += [throughput("TFLOP/s", "operations", what, 1e12), *versus(PEER, "peer", what)]

    def peak(row: Row, who: str) -> float | None:
        found = median(row.get(who), "peak_bytes")
        return None if found is None else row["given_bytes"] + found

    beside_gla = [case]
    for what in DIRECTIONS:
        beside_gla += [
            figure(what, "ours", what),
            throughput("GB/s", "bytes", what, 1e9),
            *versus(SIMPLE_GLA, SIMPLE_GLA, what),
        ]
        beside_gla += [figure(DT_FORM, DT_FORM, what), ratio("ratio", what, "ours", DT_FORM, decimals=3)]

    memory = [case, Column("least", lambda row: f"{row['least_bytes'] / 1e6:.0f}")]
    for who, name in (("ours", "ours"), ("peer", PEER)):
        memory.append(Column(name, lambda row, who=who: over(peak(row, who), 1e6, 0)))
        memory.append(Column("× least", lambda row, who=who: over(peak(row, who), row["least_bytes"])))
    errors = [case, *error_columns(result["rows"]), Column("out / rounding", lambda row: f"{row['over_rounding']:.3f}")]
    errors.append(Column("without D", lambda row: f"{row['over_rounding_without_D']:.3f}"))
    return [
        Table("ssd_chunk_scan, milliseconds", speed, rows),
        Table("given log decays, milliseconds", beside_gla, given),
        Table("memory, megabytes", memory, rows),
        Table("relative errors", errors, result["rows"]),
    ]


def context(run: Run) -> Result:
    settings = {"counted_chunk": COUNTED_CHUNK, "compared": "one row of the batch"}
    return {
        "settings": settings,
        "simple_gla": peers.described_of_fla(peers.simple_gla()),
        "peer": peers.described(peers.operator("ssd_chunk_scan"), recorded=peers.SOURCE_OF_SCANS),
    }


BENCHMARK = Benchmark(
    "ssd_chunk_scan",
    lambda options: CASES,
    tables,
    figures,
    trials=30,
    warmup=5,
    context=context,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
