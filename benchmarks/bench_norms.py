#!/usr/bin/env python3
"""The norms on CUDA: time of forward and of backward, beside a copy of the same bytes and beside PyTorch's own functions.

    python benchmarks/bench_norms.py [--json FILE] [--trials N]

Each case is a CUDA graph of calls on different tensors, which have left the second-level cache; a time is the time of a replay
over the number of calls. Forward and backward are the private operators that autograd calls, without its bookkeeping. PyTorch's
composition is its rms_norm or layer_norm with the gate or the sum, forward and backward together. Every case is compared with
the float64 reference before it is timed. Exits with 1 if one is wrong.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import ssm_kernels
from benchmarks.benchmark import Benchmark, Contender, Function, Result, Run, leaves_of, main, outputs_of
from benchmarks.harness import sets_beyond_cache, time_graph
from benchmarks.operator_cases import EPS, Norm
from benchmarks.tables import DIRECTIONS, Table, figure, ratio, text
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

    def tensors(self, device: torch.device, seed: int) -> dict[str, Tensor]:
        return self.leaves(torch.Generator(device).manual_seed(seed))


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
        self.case = case

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
        out, *rest = self.forward(tensors)
        names = ("new_residual", "rstd", "mean") if self.case.is_add else ("rstd", "mean")
        saved = dict(zip(names, rest, strict=True))
        if self.case.is_add:
            saved["grad_new_residual"] = torch.randn_like(saved["new_residual"])
        return tensors | saved | {"grad": torch.randn_like(out)}

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
        leaves = leaves_of({name: tensors[name] for name in ("x", "residual", "weight", "z", "bias") if name in tensors})
        results = outputs_of(self.case.functions(tensors["x"].device)["PyTorch"], leaves)
        return torch.autograd.grad(results, [*leaves.values()], [torch.ones_like(result) for result in results])


def error_of(case: Case, device: torch.device) -> float:
    """Largest error of results and gradients over the roundings allowed to them; at most 1 for a right result."""
    inputs = replace(case, rows=(67,)).tensors(device, seed=1)

    def evaluate(function: Function, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(2)
        results = outputs_of(function, tensors)
        grads = [torch.randn(r.shape, generator=generator, device=device).to(case.dtype).to(r.dtype) for r in results]
        return Contender(function, tensors, grads).results(("out 0", "out 1"))

    found = evaluate(case.function_of(ssm_kernels), inputs)
    exact = evaluate(case.function_of(reference), {name: tensor.double() for name, tensor in inputs.items()})
    # fp32 results follow from a residual that is rounded to the dtype of x.
    roundings = max(2 * torch.finfo(case.dtype).eps, 256 * torch.finfo(torch.float32).eps)
    errors = [(found[name].double() - of_one).abs().max() / (roundings * of_one.abs().max()) for name, of_one in exact.items()]
    return torch.stack(errors).max().item()


def measure_case(case: Case, run: Run) -> dict[str, Any]:
    calls, moved = Calls(case), case.moved_bytes()
    sets = sets_beyond_cache(
        lambda seed: calls.prepare_backward(case.tensors(run.device, seed)), moved["forward"], run.device, 32
    )

    def copy_of(size: int) -> dict[str, float]:
        half = size // 2 // 16 * 16  # both ends aligned
        pairs = [tuple(torch.empty(2, half, dtype=torch.int8, device=run.device)) for _ in sets]
        return time_graph(lambda pair: pair[1].copy_(pair[0]), pairs, run.trials).to_dict()

    error = error_of(case, run.device)
    return {
        "name": case.name,
        "error": error,
        "wrong": [] if error <= 1 else ["a result or gradient"],
        "forward_bytes": moved["forward"],
        "backward_bytes": moved["backward"],
        "forward": time_graph(calls.forward, sets, run.trials).to_dict(),
        "backward": time_graph(calls.backward, sets, run.trials).to_dict(),
        "forward_copy": copy_of(moved["forward"]),
        "backward_copy": copy_of(moved["backward"]),
        "native": time_graph(calls.native, sets[: max(1, len(sets) // 4)], run.trials).to_dict(),
    }


def tables(result: Result) -> list[Table]:
    rows = [
        {
            "name": row["name"],
            "ours": {what: row[what] for what in DIRECTIONS},
            "copy": {what: row[f"{what}_copy"] for what in DIRECTIONS},
            "both": {"both": sum(row[what]["median"] for what in DIRECTIONS)},
            "PyTorch": {"both": row["native"]},
        }
        for row in result["rows"]
    ]
    columns = [text("case", "name")]
    for what in DIRECTIONS:
        columns += [figure(what, "ours", what, 1e-6, 1), figure("copy", "copy", what, 1e-6, 1)]
        columns.append(ratio("of a copy", what, "copy", "ours"))
    columns += [figure("both", "both", "both", 1e-6, 1), figure("PyTorch", "PyTorch", "both", 1e-6, 1)]
    return [Table("norms, microseconds", columns, rows)]


BENCHMARK = Benchmark(
    "norms",
    lambda options: CASES,
    lambda cases, run: [measure_case(case, run) for case in cases],
    tables,
    trials=30,
    context=lambda run: {"settings": {"cases": [asdict(case) for case in CASES]}},
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
