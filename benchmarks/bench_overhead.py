#!/usr/bin/env python3
"""Host time of a call on CUDA: the scans without and with gradients, selective_state_update, and mamba_ssm's functions.

    python benchmarks/bench_overhead.py [--json FILE] [--blocks N]

The tensors are so small that the host never waits for the GPU. Backward passes the work to autograd's thread and waits for it.
The difference between a call and the registered operator is the time of the dispatcher, of autograd and of the Python wrapper.
A product of two tensors of the same size shows what PyTorch needs for any operator. Median over blocks of 50 calls.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import ssm_kernels
from benchmarks import bench_ssd, peers
from benchmarks.benchmark import Benchmark, Case, Result, Run, leaves_of, main
from benchmarks.discretization.scans import ScanSize, scan_inputs
from benchmarks.harness import time_host
from benchmarks.tables import Row, Table, figure, text

SIZE = ScanSize(batch=1, dim=64, seqlen=64, dstate=16)
Calls = dict[str, Callable[[], Any]]


def training(function: Callable[..., Tensor], inputs: dict[str, Tensor]) -> Calls:
    """The calls of a function of tensors: of tensors that need no gradients, recording a graph, forward and backward."""
    leaves = leaves_of(inputs)
    wanted = tuple(leaves.values())
    grad_out = torch.ones_like(function(**inputs))
    return {
        "without gradients": lambda: function(**inputs),
        "forward, recording": lambda: function(**leaves),
        "forward + backward": lambda: torch.autograd.grad(function(**leaves), wanted, grad_out),
    }


def operators(inputs: dict[str, Tensor]) -> Calls:
    """The operators that selective_scan's autograd function calls."""
    forward, backward = torch.ops.ssm_kernels._selective_scan_fwd, torch.ops.ssm_kernels._selective_scan_bwd
    tensors = tuple(inputs[name] for name in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias"))
    out, _, chunk_states = forward(*tensors, None, "zoh", True, True)
    grad_out = torch.ones_like(out)
    needs_grad = [True] * 8 + [False]  # all but the initial state
    others = "zoh", True, None, None, None, False, needs_grad
    return {
        "operator, forward": lambda: forward(*tensors, None, "zoh", True, True),
        "operator, backward": lambda: backward(grad_out, None, *tensors, chunk_states, *others),
    }


def step(function: Callable[[dict[str, Any]], Tensor], inputs: dict[str, Tensor]) -> Calls:
    """A decoding step of the scan's sizes."""
    given: dict[str, Any] = {name: inputs[name][..., 0].contiguous() for name in ("B", "C", "z")}
    given |= {"x": inputs["u"][..., 0].contiguous(), "dt": inputs["delta"][..., 0].contiguous()}
    given |= {"A": inputs["A"], "D": inputs["D"], "dt_bias": inputs["delta_bias"], "dt_softplus": True}
    given["state"] = inputs["A"].new_zeros(SIZE.batch, SIZE.dim, SIZE.dstate)
    return {"without gradients": lambda: function(given)}


@dataclass(frozen=True)
class Call(Case):
    """A function whose calls are timed; ``calls`` makes them from the inputs of a scan."""

    name: str
    calls: Callable[[dict[str, Tensor]], Calls]


def of_scan(inputs: dict[str, Tensor]) -> Calls:
    scan = functools.partial(ssm_kernels.selective_scan, delta_softplus=True)
    return training(scan, inputs) | operators(inputs)


def of_ssd(inputs: dict[str, Tensor]) -> Calls:
    case = bench_ssd.Case(SIZE.batch, SIZE.seqlen, heads=1, headdim=SIZE.dim, dstate=SIZE.dstate)
    return training(case.function(), case.inputs(inputs["u"].device))


def of_product(inputs: dict[str, Tensor]) -> Calls:
    return training(lambda a, b: a * b, {"a": inputs["u"], "b": inputs["delta"]})


def cases(options: argparse.Namespace) -> list[Call]:
    found = [
        Call("selective_scan", of_scan),
        Call("ssd_chunk_scan", of_ssd),
        Call("selective_state_update", functools.partial(step, lambda inputs: ssm_kernels.selective_state_update(**inputs))),
        Call("a * b", of_product),
    ]
    if (peer := peers.operator("selective_scan")) is not None:
        found.append(Call("mamba_ssm, selective_scan", functools.partial(training, peer)))
    if (peer := peers.operator("selective_state_update")) is not None:
        found.append(Call("mamba_ssm, selective_state_update", functools.partial(step, peer)))
    return found


def measure_calls(cases: list[Call], run: Run) -> list[dict[str, Any]]:
    inputs = scan_inputs(SIZE, device=run.device, dtype=torch.bfloat16, seed=0)
    return [
        {
            "name": case.name,
            "function": case.name,
            "what": what,
            "host": time_host(call, run.device, blocks=run.trials).to_dict(),
        }
        for case in cases
        for what, call in case.calls(inputs).items()
    ]


def tables(result: Result) -> list[Table]:
    rows = [row | {"ours": row} for row in result["rows"]]
    columns = [text("function"), text("what"), figure("µs", "ours", "host", 1e-6, 2)]
    return [Table("host time of a call, microseconds", columns, rows, left=2)]


def figures(row: Row, result: Result) -> dict[str, float]:
    return {row["what"]: row["host"]["median"]}


BENCHMARK = Benchmark(
    "overhead",
    cases,
    tables,
    figures,
    measure_calls,
    trials=40,
    context=lambda run: {"settings": {"blocks": run.trials, **vars(SIZE)}},
    trials_option="--blocks",
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
