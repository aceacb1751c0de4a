#!/usr/bin/env python3
"""mamba3_chunk_scan on CUDA: forward and backward, beside mamba_ssm's Triton kernels of rank one.

    python benchmarks/bench_mamba3.py [--json FILE] [--append] [--cases NAME ...] [--without_peers] [--trials N]

``page.md`` says what each figure is. mamba_ssm's scan takes turns with ours, if it is installed; else its recorded figures are
shown. Its kernels for ranks need TileLang, which no machine of ours has. ``--cases`` chooses cases, and ``--append`` keeps the
rows of FILE that this run does not measure.

Before a case is timed, its results and gradients for the last head of the last row of the batch are compared with those of the
CPU in float64. Exits with 1 if a result of ours is wrong; a missed bar is only reported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

import ssm_kernels
from benchmarks import peers
from benchmarks.bench_delta_rule import offsets_of, peak_bytes
from benchmarks.benchmark import PEER, Benchmark, Contender, Contest, Copy, Function, Result, Run, main, speedups
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
    text,
    throughput,
    versus,
)

# Relative L2 errors of an output and of a gradient beyond which a result is wrong, by dtype. Rounding to bfloat16 makes 1.7e-3.
LIMITS = {torch.bfloat16: (8e-3, 1.5e-2), torch.float32: (1e-5, 1e-4)}
# The arguments that one head has to itself in (batch, seqlen, heads, ...).
OF_HEADS = ("x", "z", "dt", "A", "trap", "out")


@dataclass(frozen=True)
class Mamba3Case(OperatorCase):
    """A row of the table, with z, D and biases, and half of dstate rotated, as in ``nn.Mamba3``.

    Attributes:
        ranks: None for the form of rank one, else the rows of B and C in a step.
        sequences: packed sequences of equal length in a row of the batch; 1 for a row that is not packed.
    """

    batch: int
    seqlen: int
    heads: int
    headdim: int = 64
    dstate: int = 128
    ranks: int | None = None
    sequences: int = 1
    dtype: torch.dtype = torch.bfloat16
    operator = "mamba3_chunk_scan"
    limits = LIMITS
    peer_name = PEER

    @property
    def name(self) -> str:
        words = {
            f"R{self.ranks}": self.ranks is not None,
            f"{self.sequences} sequences": self.sequences > 1,
            "fp32": self.dtype == torch.float32,
        }
        sizes = f"B{self.batch} L{self.seqlen} H{self.heads} P{self.headdim} N{self.dstate}"
        return ", ".join([sizes, *(word for word, holds in words.items() if holds)])

    def function(self, module: ModuleType = ssm_kernels) -> Function:
        return functools.partial(self.call, getattr(module, self.operator))

    def call(self, scan: Function, **arguments: Any) -> Any:
        if self.sequences > 1:
            arguments["cu_seqlens"] = offsets_of(self.sequences, self.seqlen, arguments["x"].device)
        return scan(**arguments, rotate="pairs" if self.ranks is None else "halves")

    def inputs(self, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
        """Normal numbers, B and C after a norm; A and dt as layers begin: dt log-uniform from 0.001 to 0.1."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        steps, ranks = (self.batch, self.seqlen), () if self.ranks is None else (self.ranks,)
        rows = {
            "x": normal(*steps, self.heads, self.headdim),
            "B": F.rms_norm(normal(*steps, *ranks, 1, self.dstate), (self.dstate,)),
            "C": F.rms_norm(normal(*steps, *ranks, 1, self.dstate), (self.dstate,)),
            "z": normal(*steps, self.heads, self.headdim),
        }
        dt_bias = torch.log(torch.expm1(0.001 * 100.0 ** torch.rand(self.heads, generator=generator, device=device)))
        found = {name: row.to(self.dtype) for name, row in rows.items()}
        found |= {
            "dt": F.softplus(0.1 * normal(*steps, self.heads) + dt_bias),
            "A": -(1 + normal(*steps, self.heads).abs()),
            "trap": normal(*steps, self.heads),
            "angles": normal(*steps, self.dstate // 4),
            "B_bias": 1 + 0.1 * normal(self.heads, *ranks, self.dstate),
            "C_bias": 1 + 0.1 * normal(self.heads, *ranks, self.dstate),
            "D": normal(self.heads),
        }
        for name in ("mimo_x", "mimo_z", "mimo_out") if self.ranks is not None else ():
            found[name] = 1 + 0.1 * normal(self.heads, *ranks, self.headdim)
        return found

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """The last head of the last row. Gradients of parameters, and of what heads share, are of this row and head."""
        if name in OF_HEADS:
            return tensor[-1:, :, -1:]
        return tensor[-1:]

    def peer_contender(self, ours: Contender) -> Contender | None:
        """mamba_ssm's scan with the same tensors in its own layouts."""
        found = peers.mamba3_scan() if self.ranks is None and self.dtype == torch.bfloat16 else None
        if found is None:
            return None
        given = {name: tensor.detach() for name, tensor in ours.inputs.items()}
        steps = {name: given[name].transpose(1, 2).contiguous() for name in ("dt", "A", "trap")}
        inputs = {
            **{"Q": given["C"], "K": given["B"], "V": given["x"], "ADT": steps["A"] * steps["dt"], "DT": steps["dt"]},
            **{"Trap": steps["trap"].to(self.dtype), "Q_bias": given["C_bias"], "K_bias": given["B_bias"], "D": given["D"]},
            "Angles": given["angles"].to(self.dtype)[:, :, None].expand(-1, -1, self.heads, -1),
            "Z": given["z"],
        }
        options = {}
        if self.sequences > 1:
            options["cu_seqlens"] = offsets_of(self.sequences, self.seqlen, given["x"].device)
        return Contender(functools.partial(found, **options), inputs, ours.grads)

    def triton_call(self, device: torch.device) -> Callable[[], Any] | None:
        if peers.mamba3_scan() is None or self.ranks is not None or self.dtype != torch.bfloat16:
            return None
        return functools.partial(self.call_peer, device)

    def call_peer(self, device: torch.device) -> None:
        theirs = self.peer_contender(self.contender(device))
        assert theirs is not None
        theirs.results()

    def others(self, ours: Contender, run: Run) -> dict[str, Contender | Copy]:
        is_alone = run.device.type != "cuda" or run.without_peers
        theirs = None if is_alone else self.peer_contender(ours)
        return {} if theirs is None else {PEER: theirs}

    def contest(self, run: Run) -> Contest:
        return replace(super().contest(run), judges_others=False)

    def amounts(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        given, out = sum(tensor.nbytes for tensor in inputs.values()), inputs["x"].nbytes
        moved = {"forward": given + out, "backward": 2 * given + out}
        return {"bytes": moved, "given_bytes": given, "least_bytes": 2 * (given + out)}


CASES = [
    Mamba3Case(8, 4096, 80),
    Mamba3Case(8, 2048, 32),
    Mamba3Case(1, 16384, 32),
    Mamba3Case(1, 65536, 24),
    Mamba3Case(1, 16384, 32, sequences=8),
    Mamba3Case(8, 2047, 31, headdim=60, dstate=120),
    Mamba3Case(8, 2048, 64, ranks=4),
    Mamba3Case(2, 1024, 8, dtype=torch.float32),
]


def figures(row: Row, result: Result) -> dict[str, float]:
    errors = errors_of(row)
    found = {f"{what}, seconds": time for what in DIRECTIONS if (time := median(row["ours"], what)) is not None}
    if (peak := peak_bytes(row, "ours")) is not None:
        found["peak, bytes"] = float(peak)
    found |= {
        "error of out": errors["out"],
        "largest error of gradients": max(error for name, error in errors.items() if name.startswith("grad_")),
    }
    return {**speedups(row, {PEER: PEER}), **found}


def tables(result: Result) -> list[Table]:
    rows, case = result["rows"], text("case", "name")
    speed = [case]
    for what in DIRECTIONS:
        speed += [figure(what, "ours", what), throughput("GB/s", "bytes", what, 1e9), *versus(PEER, PEER, what)]
    memory = [case, Column("least", lambda row: f"{row['least_bytes'] / 1e6:.0f}")]
    for who in ("ours", PEER):
        memory.append(Column(who, lambda row, who=who: over(peak_bytes(row, who), 1e6, 0)))
    memory.append(Column("× least", lambda row: over(peak_bytes(row, "ours"), row["least_bytes"])))
    return [
        Table("mamba3_chunk_scan, milliseconds", speed, rows),
        Table("memory, megabytes", memory, rows),
        Table("relative errors", [case, *error_columns(rows)], rows),
    ]


def context(run: Run) -> Result:
    found = None if run.without_peers else peers.mamba3_scan()
    return {"settings": {"compared": "the last head of the last row"}, "peer": peers.described(found)}


BENCHMARK = Benchmark(
    "mamba3_chunk_scan",
    lambda options: CASES,
    tables,
    figures,
    context=context,
    appends=True,
    leaves_out_peers=True,
    triton_call=lambda case, device: case.triton_call(device),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
