#!/usr/bin/env python3
"""The norms on CUDA: time of forward and of backward, beside a copy of the same bytes and beside PyTorch's own functions.

    python benchmarks/bench_norms.py [--json FILE] [--cases NAME ...] [--trials N]

Each case is a CUDA graph of calls on different tensors, which have left the second-level cache; a time is the time of a replay
over the number of calls. Backward is a call of the graph's node, without autograd's engine. PyTorch's composition is its
rms_norm or layer_norm with the gate or the sum, forward and backward together. Every case is compared with the float64
reference before it is timed. Exits with 1 if one is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.benchmark import PEER, Benchmark, Contender, Copy, Result, Run, leaves_of, main, outputs_of
from benchmarks.harness import Stages
from benchmarks.operator_cases import Norm
from benchmarks.tables import DIRECTIONS, Table, figure, ratio, text

Calls = dict[str, Callable[[], Any]]


def calls_of(who: str, contender: Contender | Copy) -> Calls:
    """Forward and backward on one set of tensors; of PyTorch's functions both in one."""
    if isinstance(contender, Copy):
        return {what: copy for what, (copy,) in contender.stages(*DIRECTIONS).items()}
    if who == "PyTorch":
        training, both = contender.stages("both")["both"]
        return {"both": lambda: both(training())}
    (node,) = {out.grad_fn for out in outputs_of(contender.function, leaves_of(contender.inputs))}
    return {"forward": contender.stages("forward")["forward"][0], "backward": lambda: node(*contender.grads)}


@dataclass(frozen=True)
class Case(Norm):
    """A norm on a matrix, with all options in its name, timed in CUDA graphs."""

    @property
    def name(self) -> str:
        parts = [super().name.replace(" ", ", ", 1), str(self.dtype).removeprefix("torch.")]
        parts += [f"groups of {self.group_size}"] if self.group_size else []
        parts += ["norm before gate"] if self.norm_before_gate else []
        parts += ["bias"] if self.bias else []
        parts += [f"residual {str(self.residual_dtype).removeprefix('torch.')}"] if self.residual_dtype else []
        parts += [f"slices of {self.slice_of}"] if self.slice_of else []
        return ", ".join(parts)

    def others(self, ours: Contender, run: Run) -> dict[str, Contender | Copy]:
        return {who: other for who, other in super().others(ours, run).items() if who != PEER}

    def prepare(self, who: str, contender: Contender | Copy, figures: dict[str, Any], run: Run) -> dict[str, Stages]:
        def make(seed: int) -> Calls:
            if isinstance(contender, Copy):
                return calls_of(who, contender)
            return calls_of(who, self.contender(run.device, seed)._replace(function=contender.function))

        # PyTorch's functions keep more tensors.
        sets = run.sets(make, self.moved_bytes()["forward"], 8 if who == "PyTorch" else 32)
        for what in sets[0]:
            figures[what] = run.time_graph(lambda calls, what=what: calls[what](), sets)
        return {}


MAIN = ((8 * 2048,), 5120)
RESIDUAL = ((8 * 2048,), 2560)
FP32 = torch.float32
CASES = [
    Case("rms_norm_gated", *MAIN),
    Case("rms_norm_gated", *MAIN, slice_of=10576),
    Case("rms_norm_gated", *MAIN, norm_before_gate=True),
    Case("rms_norm_gated", *MAIN, group_size=640),
    Case("layer_norm_gated", *MAIN, bias=True),
    Case("rms_norm_gated", *MAIN, dtype=FP32),
    Case("rms_norm_gated", (2048,), 1536),
    Case("rms_norm_gated", (8 * 2048,), 16384),
    Case("add_rms_norm", *RESIDUAL),
    Case("add_rms_norm", *RESIDUAL, residual_dtype=FP32),
    Case("add_layer_norm", *RESIDUAL, bias=True),
    Case("add_rms_norm", (8 * 2048,), 768),
    Case("add_rms_norm", (2048,), 768),
]


def tables(result: Result) -> list[Table]:
    columns = [text("case", "name")]
    for what in DIRECTIONS:
        columns += [figure(what, "ours", what, 1e-6, 1), figure("copy", "copy", what, 1e-6, 1)]
        columns.append(ratio("of a copy", what, "copy", "ours"))
    columns += [figure("both", "both", "both", 1e-6, 1), figure("PyTorch", "PyTorch", "both", 1e-6, 1)]
    rows = [row | {"both": {"both": sum(row["ours"][what]["median"] for what in DIRECTIONS)}} for row in result["rows"]]
    return [Table("norms, microseconds", columns, rows)]


BENCHMARK = Benchmark("norms", lambda options: CASES, tables, trials=30)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
