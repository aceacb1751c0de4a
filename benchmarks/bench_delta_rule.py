#!/usr/bin/env python3
"""delta_rule_scan on CUDA: forward and backward, beside flash-linear-attention's Triton kernels.

    python benchmarks/bench_delta_rule.py [--json FILE] [--append] [--cases NAME ...] [--without_peers] [--trials N]

``page.md`` says what each figure is. flash-linear-attention's chunked scans take turns with ours, if that is installed. Triton
compiles and tunes them by several processes before the first case, which takes minutes. ``--without_peers`` measures ours
alone, ``--cases`` chooses cases, and ``--append`` keeps the rows of FILE that this run does not measure.

Before a case is timed, its results and gradients for the last key head of the last row of the batch are compared with those of
the CPU's matmuls in float64. Exits with 1 if a result of ours is wrong; a missed bar is only reported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

import ssm_kernels
from benchmarks import peers, triton_kernels
from benchmarks.benchmark import FLA, Benchmark, Contender, Contest, Copy, Function, Result, Run, main, speedups
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

LONG_FORM = "2T steps"
DELTA, GATED, KDA, PRODUCT = "DeltaNet", "Gated DeltaNet", "KDA", "DeltaProduct"
# The cosine of two keys of a case of similar keys.
COSINE = 0.9
# Relative L2 errors of an output and of a gradient beyond which a result is wrong, by dtype. Rounding to bfloat16 makes 1.7e-3.
LIMITS = {torch.bfloat16: (8e-3, 1.5e-2), torch.float32: (1e-5, 1e-5)}


@functools.cache
def offsets_of(sequences: int, seqlen: int, device: torch.device) -> Tensor:
    """The first and last steps of packed sequences of equal length."""
    return torch.arange(0, seqlen + 1, seqlen // sequences, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class DeltaCase(OperatorCase):
    """A row of the table.

    Attributes:
        rule: the operator that these arguments are.
        sequences: packed sequences of equal length in a row of the batch; 1 for a row that is not packed.
        householder: updates of a step.
        inside: the operator computes gates from ``A_log`` and ``dt_bias``, beta's sigmoid and the norms of q and k.
        alike: two keys have a cosine of ``COSINE``.
    """

    rule: str
    batch: int
    seqlen: int
    heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    sequences: int = 1
    householder: int = 1
    largest_beta: int = 1
    inside: bool = False
    alike: bool = False
    dtype: torch.dtype = torch.bfloat16
    operator = "delta_rule_scan"
    results = ("out", "final_states")
    limits = LIMITS
    compared_options = MappingProxyType({"return_final_states": True})
    compares_others = True
    peer_name = FLA

    @property
    def name(self) -> str:
        sizes = f"B{self.batch} L{self.seqlen} H{self.heads}/{self.value_heads} K{self.key_dim} V{self.value_dim}"
        words = {
            f"{self.sequences} sequences": self.sequences > 1,
            f"n = {self.householder}": self.householder > 1,
            f"beta < {self.largest_beta}": self.largest_beta > 1,
            "all inside": self.inside,
            f"keys of cosine {COSINE:g}": self.alike,
            "fp32": self.dtype == torch.float32,
        }
        return ", ".join([f"{self.rule} {sizes}", *(word for word, holds in words.items() if holds)])

    def function(self, module: ModuleType = ssm_kernels) -> Function:
        return functools.partial(self.call, getattr(module, self.operator))

    def call(self, scan: Function, **arguments: Any) -> Any:
        if self.sequences > 1:
            arguments["cu_seqlens"] = offsets_of(self.sequences, self.seqlen, arguments["q"].device)
        if self.householder > 1:
            arguments["num_householder"] = self.householder
        if self.inside:
            arguments |= {"qk_l2norm": True, "beta_sigmoid": True}
        return scan(**arguments)

    @property
    def peer(self) -> Function | None:
        found = peers.delta_rule(self.rule)
        return None if found is None else functools.partial(self.call, found)

    def triton_call(self, device: torch.device) -> Callable[[], Any] | None:
        return None if self.peer is None else functools.partial(self.call_peer, device)

    def call_peer(self, device: torch.device) -> None:
        """Makes the calls that are compared, and those that are timed."""
        theirs = self.contender(device)._replace(function=self.peer)
        self.compared(theirs)
        theirs.stages("forward")["forward"][0]()
        theirs.results()

    def inputs(self, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
        """Keys and queries of length 1; g = -A dt as layers begin, A from 1 to 16 and dt log-uniform from 0.001 to 0.1."""
        generator = torch.Generator(device).manual_seed(seed)
        updates = (self.batch, self.seqlen * self.householder)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, device=device)

        q, k = normal(self.batch, self.seqlen, self.heads, self.key_dim), normal(*updates, self.heads, self.key_dim)
        if self.alike:
            k = COSINE**0.5 * normal(self.heads, self.key_dim) + (1 - COSINE) ** 0.5 * k
        if not self.inside:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        raw_beta = normal(*updates, self.value_heads)
        beta = raw_beta if self.inside else self.largest_beta * raw_beta.sigmoid()
        v = normal(*updates, self.value_heads, self.value_dim)
        found = {name: tensor.to(self.dtype) for name, tensor in {"q": q, "k": k, "v": v, "beta": beta}.items()}
        if self.rule == DELTA:
            return found
        columns = (self.value_heads, self.key_dim) if self.rule == KDA else (self.value_heads,)
        raw = 0.1 * normal(self.batch, self.seqlen, *columns)
        A_log = torch.log(1 + 15 * uniform(self.value_heads))
        dt_bias = torch.log(torch.expm1(0.001 * 100.0 ** uniform(*columns)))
        if self.inside:
            return found | {"g": raw.to(self.dtype), "A_log": A_log, "dt_bias": dt_bias}
        return found | {"g": -A_log.exp().view(-1, *[1] * (len(columns) - 1)) * F.softplus(raw + dt_bias)}

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """The last key head, with its value heads, of the last row. Gradients of the parameters are of this row."""
        heads = slice(-1, None) if name in ("q", "k") else slice(-(self.value_heads // self.heads), None)
        if name in ("A_log", "dt_bias"):
            return tensor[heads]
        if name == "final_states":
            return tensor[-self.sequences :, heads]
        return tensor[-1:, :, heads]

    def compared(self, contender: Contender) -> dict[str, Tensor]:
        """A contender of other arguments is only timed."""
        return super().compared(contender) if contender.inputs["q"].shape[1] == self.seqlen else {}

    def others(self, ours: Contender, run: Run) -> dict[str, Contender | Copy]:
        is_beside_peers = run.device.type == "cuda" and not run.without_peers
        found = super().others(ours, run) if is_beside_peers else {}
        if self.householder > 1:
            long = replace(self, rule=GATED, seqlen=self.householder * self.seqlen, householder=1)
            found[LONG_FORM] = long.contender(run.device)
        return found

    def contest(self, run: Run) -> Contest:
        return replace(super().contest(run), judges_others=False)

    def amounts(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        given = sum(tensor.nbytes for tensor in inputs.values())
        out = inputs["q"].shape[:2].numel() * self.value_heads * self.value_dim * self.dtype.itemsize
        moved = {"forward": given + out, "backward": 2 * given + out}
        return {"bytes": moved, "given_bytes": given, "least_bytes": 2 * (given + out)}


# Each case has about 80 specializations of kernels, whose compilation takes seconds each.
TRITON_SECONDS = (480.0, 420.0)
FP32 = torch.float32
CASES = [
    DeltaCase(GATED, 8, 4096, 16, 16),
    DeltaCase(GATED, 8, 4096, 16, 32),
    DeltaCase(GATED, 8, 4096, 32, 32),
    DeltaCase(GATED, 8, 4096, 16, 32, inside=True),
    DeltaCase(GATED, 1, 32768, 32, 32),
    DeltaCase(GATED, 1, 32768, 2, 8),
    DeltaCase(GATED, 1, 32768, 16, 32, sequences=8),
    DeltaCase(GATED, 8, 4096, 30, 30, 96, 192, largest_beta=2),
    DeltaCase(GATED, 8, 4096, 6, 6, 256, 512),
    DeltaCase(DELTA, 8, 4096, 16, 16),
    DeltaCase(KDA, 8, 4096, 16, 16),
    DeltaCase(PRODUCT, 8, 2048, 16, 16, householder=2),
    DeltaCase(DELTA, 2, 1024, 8, 8, largest_beta=2, alike=True),
    DeltaCase(GATED, 2, 1024, 8, 8, dtype=FP32),
    DeltaCase(DELTA, 2, 1024, 8, 8, dtype=FP32),
]


def peak_bytes(row: Row, who: str) -> float | None:
    """The most that forward and backward hold at a time, inputs included."""
    found = median(row.get(who), "peak_bytes")
    return None if found is None else row["given_bytes"] + found


def figures(row: Row, result: Result) -> dict[str, float]:
    """Speed-ups, seconds and errors; the gradient of beta, which sums over value_dim, is apart from the others."""
    found = {f"{what}, seconds": time for what in DIRECTIONS if (time := median(row["ours"], what)) is not None}
    for what in DIRECTIONS:
        if (long := median(row.get(LONG_FORM), what)) is not None:
            found[f"{what}, time over {LONG_FORM}"] = median(row["ours"], what) / long
    errors = errors_of(row)
    others = [error for name, error in errors.items() if name.startswith("grad_") and name != "grad_beta"]
    found |= {
        "error of out": errors["out"],
        "error of the gradient of beta": errors["grad_beta"],
        "largest error of other gradients": max(others),
    }
    if (theirs := median(row.get(FLA), "peak_bytes")) is not None:
        found[f"peak memory over {FLA}"] = (row["given_bytes"] + median(row["ours"], "peak_bytes")) / (
            row["given_bytes"] + theirs
        )
    return {**speedups(row, {FLA: FLA}), **found}


def tables(result: Result) -> list[Table]:
    rows, case = result["rows"], text("case", "name")
    speed = [case]
    for what in DIRECTIONS:
        speed += [figure(what, "ours", what), throughput("GB/s", "bytes", what, 1e9), *versus(FLA, FLA, what)]
    products = [row for row in rows if LONG_FORM in row]
    over_long = [case]
    for what in DIRECTIONS:
        over_long += [
            figure(what, "ours", what),
            figure(LONG_FORM, LONG_FORM, what),
            ratio("ratio", what, "ours", LONG_FORM, decimals=3),
        ]

    memory = [case, Column("least", lambda row: f"{row['least_bytes'] / 1e6:.0f}")]
    for who in ("ours", FLA):
        memory.append(Column(who, lambda row, who=who: over(peak_bytes(row, who), 1e6, 0)))
        memory.append(Column("× least", lambda row, who=who: over(peak_bytes(row, who), row["least_bytes"])))

    def of_out(row: Row) -> str:
        found = errors_of(row, FLA).get("out")
        return "" if found is None else f"{found:.1e}"

    errors = [case, *error_columns(rows), Column(f"out, {FLA}", of_out)]
    return [
        Table("delta_rule_scan, milliseconds", speed, rows),
        Table("products, milliseconds", over_long, products),
        Table("memory, megabytes", memory, rows),
        Table("relative errors", errors, rows),
    ]


def context(run: Run) -> Result:
    if run.device.type == "cuda" and not run.without_peers:
        triton_kernels.tune(once=False)
    found = None if run.without_peers else peers.delta_rule(GATED)
    return {"settings": {"compared": "the last key head of the last row"}, "peer": peers.described_of_fla(found)}


BENCHMARK = Benchmark(
    "delta_rule_scan",
    lambda options: CASES,
    tables,
    figures,
    context=context,
    appends=True,
    leaves_out_peers=True,
    triton_call=lambda case, device: case.triton_call(device),
    triton_seconds=TRITON_SECONDS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
