#!/usr/bin/env python3
"""The norms on CUDA: time of forward and of backward, beside a copy of the same bytes and beside PyTorch's own functions.

    python benchmarks/bench_norms.py [--json FILE] [--trials N]

Each case is a CUDA graph of several calls, each on another set of tensors, so many that none is still in the second-level cache
when its turn comes again; a time is that of a replay over the number of calls. Forward and backward are the private operators
that autograd calls, without its bookkeeping. A copy reads and writes as many bytes together as a call must: every tensor once.
PyTorch's composition is torch.nn.functional.rms_norm or layer_norm with the gate or the sum beside it, forward and backward
together. Every case is compared with the float64 reference before it is timed. Exits with 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import ssm_kernels
from benchmarks.harness import machine, require_cuda, time_graph
from benchmarks.operator_cases import EPS, Function, Norm, normal_tensors, outputs_of
from ssm_kernels import reference

ops = torch.ops.ssm_kernels


@dataclass(frozen=True)
class Case(Norm):
    """A norm on a matrix, with all options in its name."""

    @property
    def name(self) -> str:
        parts = [self.described.replace(" ", ", ", 1), str(self.dtype).removeprefix("torch.")]
        parts += [f"groups of {self.group_size}"] if self.group_size else []
        parts += ["norm before gate"] if self.norm_before_gate else []
        parts += ["bias"] if self.bias else []
        parts += [f"residual {str(self.residual_dtype).removeprefix('torch.')}"] if self.residual_dtype else []
        parts += [f"slices of {self.slice_of}"] if self.slice_of else []
        return ", ".join(parts)

    def tensors(self, seed: int) -> dict[str, Tensor]:
        return self.leaves(normal_tensors(torch.Generator("cuda").manual_seed(seed)))


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


class Calls:
    """Forward and backward of a case as calls on one set of tensors, made of the private operators."""

    def __init__(self, case: Case) -> None:
        self.case, self.pytorch = case, case.functions("cuda")["PyTorch"]

    def forward(self, tensors: dict[str, Any]) -> tuple[Tensor, ...]:
        case = self.case
        if case.is_add:
            first = (tensors.get(name) for name in ("x", "residual", "weight", "bias"))
            return ops._add_norm_fwd(*first, EPS, None, False, case.subtract_mean)
        first = (tensors.get(name) for name in ("x", "weight", "z", "bias"))
        options = (case.group_size, case.norm_before_gate, "silu", case.subtract_mean)
        return ops._norm_gated_fwd(*first, EPS, *options)

    def prepare_backward(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The tensors that backward reads."""
        results = self.forward(tensors)
        grad = torch.randn_like(results[0])
        if self.case.is_add:
            _, new_residual, rstd, mean = results
            return tensors | {
                "grad": grad,
                "grad_new_residual": torch.randn_like(new_residual),
                "new_residual": new_residual,
                "rstd": rstd,
                "mean": mean,
            }
        _, rstd, mean = results
        return tensors | {"grad": grad, "rstd": rstd, "mean": mean}

    def backward(self, tensors: dict[str, Any]) -> tuple[Tensor, ...]:
        case, t = self.case, tensors
        if case.is_add:
            # A residual in the dtype of x shares its gradient.
            needs_grad = [True, case.residual_dtype is not None, True, case.bias]
            arguments = (t["grad"], t["grad_new_residual"], t["new_residual"], t["weight"], t.get("bias"), t["mean"], t["rstd"])
            return ops._add_norm_bwd(*arguments, None, case.subtract_mean, needs_grad)
        arguments = (t["grad"], t["x"], t["weight"], t["z"], t.get("bias"), t["mean"], t["rstd"])
        options = (case.group_size, case.norm_before_gate, "silu", case.subtract_mean)
        return ops._norm_gated_bwd(*arguments, *options, [True, True, True, case.bias])

    def native(self, tensors: dict[str, Any]) -> tuple[Tensor, ...]:
        """PyTorch's functions: forward, and gradients of the sum of the results."""
        names = [name for name in ("x", "residual", "weight", "z", "bias") if name in tensors]
        leaves = {name: tensors[name].detach().requires_grad_() for name in names}
        results = outputs_of(self.pytorch, leaves)
        return torch.autograd.grad(results, [*leaves.values()], [torch.ones_like(result) for result in results])


def error_of(case: Case) -> float:
    """Largest error of results and gradients over the roundings allowed to them; at most 1 for a right result."""
    inputs = replace(case, rows=(67,)).tensors(seed=1)

    def evaluate(function: Function, tensors: dict[str, Tensor]) -> list[Tensor]:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
        results = outputs_of(function, leaves)
        generator = torch.Generator("cuda").manual_seed(2)
        cotangents = [torch.randn(r.shape, generator=generator, device="cuda").to(case.dtype).to(r.dtype) for r in results]
        return [*results, *torch.autograd.grad(results, list(leaves.values()), cotangents)]

    doubles = {name: tensor.double() for name, tensor in inputs.items()}
    worst = 0.0
    for actual, exact in zip(
        evaluate(case.function_of(ssm_kernels), inputs), evaluate(case.function_of(reference), doubles), strict=True
    ):
        # fp32 results follow from a residual that is rounded to the dtype of x.
        roundings = max(2 * torch.finfo(case.dtype).eps, 256 * torch.finfo(torch.float32).eps)
        worst = max(worst, ((actual.double() - exact).abs().max() / (roundings * exact.abs().max())).item())
    return worst


def measure_case(case: Case, trials: int) -> dict[str, Any]:
    calls = Calls(case)
    cache = torch.cuda.get_device_properties("cuda").L2_cache_size or 2**26
    one = calls.prepare_backward(case.tensors(seed=0))
    moved = case.moved_bytes()
    count = min(32, max(2, math.ceil(4 * cache / moved["forward"])))
    sets = [one, *(calls.prepare_backward(case.tensors(seed=i)) for i in range(1, count))]

    def copy_of(size: int) -> dict[str, float]:
        half = size // 2 // 16 * 16  # both ends aligned
        pairs = [tuple(torch.empty(2, half, dtype=torch.int8, device="cuda")) for _ in range(count)]
        return time_graph(lambda pair: pair[1].copy_(pair[0]), pairs, trials).to_dict()

    row: dict[str, Any] = {
        "name": case.name,
        "error": error_of(case),
        "forward_bytes": moved["forward"],
        "backward_bytes": moved["backward"],
        "forward": time_graph(calls.forward, sets, trials).to_dict(),
        "backward": time_graph(calls.backward, sets, trials).to_dict(),
        "forward_copy": copy_of(moved["forward"]),
        "backward_copy": copy_of(moved["backward"]),
    }
    row["native"] = time_graph(calls.native, sets[: max(1, count // 4)], trials).to_dict()
    return row


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="norms, microseconds; share of the copy's speed")
    for name in ("case", "forward", "copy", "share", "backward", "copy", "share", "both", "PyTorch"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for row in rows:
        cells = [row["name"]]
        for way in ("forward", "backward"):
            ours, copy = row[way]["median"], row[f"{way}_copy"]["median"]
            cells += [f"{ours * 1e6:.1f}", f"{copy * 1e6:.1f}", f"{copy / ours:.0%}"]
        both = row["forward"]["median"] + row["backward"]["median"]
        table.add_row(*cells, f"{both * 1e6:.1f}", f"{row['native']['median'] * 1e6:.1f}")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--trials", type=int, default=30, help="replays of each graph (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the measurements")
    options = parser.parse_args(arguments)
    if options.trials < 1:
        parser.error("--trials starts at 1")
    require_cuda(parser)

    console = Console(width=160)
    rows = []
    for case in CASES:
        rows.append(measure_case(case, options.trials))
        torch.cuda.empty_cache()
        console.print(f"{case.name}: {rows[-1]['forward']['median'] * 1e6:.1f}, {rows[-1]['backward']['median'] * 1e6:.1f} us")
    console.print(table_of(rows))
    if options.json is not None:
        result = {
            "benchmark": "norms",
            "machine": machine("cuda"),
            "settings": {"trials": options.trials, "cases": [asdict(case) for case in CASES]},
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=2, default=str) + "\n")
    wrong = [row["name"] for row in rows if not row["error"] <= 1]
    if wrong:
        print("wrong results: " + "; ".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
