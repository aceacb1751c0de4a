#!/usr/bin/env python3
"""Host time of a call on CUDA: the scans without and with gradients, selective_state_update, and mamba_ssm's functions.

    python benchmarks/bench_overhead.py [--json FILE] [--blocks N]

The tensors are so small that the host never waits for the GPU. Backward passes the work to autograd's thread and waits for it.
The difference between a call and the registered operator is the time of the dispatcher, of autograd and of the Python wrapper.
A product of two tensors of the same size shows what PyTorch needs for any operator. Median over blocks of 50 calls.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import ssm_kernels
from benchmarks import bench_ssd, peers
from benchmarks.benchmark import Benchmark, Result, Run, leaves_of, main
from benchmarks.discretization.scans import ScanSize, scan_inputs
from benchmarks.harness import time_host
from benchmarks.tables import Row, Table, figure, text

SIZE = ScanSize(batch=1, dim=64, seqlen=64, dstate=16)


def training(function: Callable[..., Tensor], inputs: dict[str, Tensor]) -> dict[str, Callable[[], Any]]:
    """The calls of a function of tensors: of tensors that need no gradients, recording a graph, forward and backward."""
    leaves = leaves_of(inputs)
    wanted = tuple(leaves.values())
    grad_out = torch.ones_like(function(**inputs))
    return {
        "without gradients": lambda: function(**inputs),
        "forward, recording": lambda: function(**leaves),
        "forward + backward": lambda: torch.autograd.grad(function(**leaves), wanted, grad_out),
    }


def operators(inputs: dict[str, Tensor]) -> dict[str, Callable[[], Any]]:
    """The operators that selective_scan's autograd function calls."""
    forward, backward = torch.ops.ssm_kernels._selective_scan_fwd, torch.ops.ssm_kernels._selective_scan_bwd
    tensors = tuple(inputs[name] for name in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias"))
    out, _, chunk_states = forward(*tensors, None, "zoh", True, True)
    grad_out = torch.ones_like(out)
    needs_grad = [True] * 8 + [False]  # all but the initial state
    return {
        "operator, forward": lambda: forward(*tensors, None, "zoh", True, True),
        "operator, backward": lambda: backward(grad_out, None, *tensors, chunk_states, "zoh", True, needs_grad),
    }


def step_inputs(inputs: dict[str, Tensor]) -> dict[str, Any]:
    """A decoding step of the scan's sizes."""
    step = {name: inputs[name][..., 0].contiguous() for name in ("B", "C", "z")}
    step |= {"x": inputs["u"][..., 0].contiguous(), "dt": inputs["delta"][..., 0].contiguous()}
    state = inputs["A"].new_zeros(SIZE.batch, SIZE.dim, SIZE.dstate)
    return step | {"state": state, "A": inputs["A"], "D": inputs["D"], "dt_bias": inputs["delta_bias"], "dt_softplus": True}


def scan(**tensors: Tensor) -> Tensor:
    return ssm_kernels.selective_scan(**tensors, delta_softplus=True)


def ssd(**tensors: Tensor) -> Tensor:
    return ssm_kernels.ssd_chunk_scan(**tensors, dt_softplus=True)


def product(a: Tensor, b: Tensor) -> Tensor:
    return a * b


class Case(NamedTuple):
    """A function whose calls are timed."""

    name: str
    calls: Callable[[dict[str, Tensor]], dict[str, Callable[[], Any]]]


def of_ssd(inputs: dict[str, Tensor]) -> dict[str, Callable[[], Any]]:
    case = bench_ssd.Case(SIZE.batch, SIZE.seqlen, heads=1, headdim=SIZE.dim, dstate=SIZE.dstate)
    return training(ssd, case.inputs(inputs["u"].device))


def of_step(function: Callable[[dict[str, Any]], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Callable[[], Any]]]:
    def calls(inputs: dict[str, Tensor]) -> dict[str, Callable[[], Any]]:
        step = step_inputs(inputs)
        return {"without gradients": lambda: function(step)}

    return calls


def cases(options: argparse.Namespace) -> list[Case]:
    found = [
        Case("selective_scan", lambda inputs: training(scan, inputs) | operators(inputs)),
        Case("ssd_chunk_scan", of_ssd),
        Case("selective_state_update", of_step(lambda step: ssm_kernels.selective_state_update(**step))),
        Case("a * b", lambda inputs: training(product, {"a": inputs["u"], "b": inputs["delta"]})),
    ]
    peer_scan, peer_step = peers.selective_scan(), peers.state_update()
    if peer_scan is not None:
        found.append(Case("mamba_ssm, selective_scan", lambda inputs: training(peer_scan, inputs)))
    if peer_step is not None:
        found.append(Case("mamba_ssm, selective_state_update", of_step(peer_step)))
    return found


def measure_case(case: Case, run: Run) -> list[dict[str, Any]]:
    calls = case.calls(scan_inputs(SIZE, device=run.device, dtype=torch.bfloat16, seed=0))
    return [
        {"name": case.name, "function": case.name, "what": what, "host": time_host(call, blocks=run.trials).to_dict()}
        for what, call in calls.items()
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
    lambda cases, run: [row for case in cases for row in measure_case(case, run)],
    tables,
    figures,
    trials=40,
    context=lambda run: {"settings": {"blocks": run.trials, **vars(SIZE)}},
    trials_option="--blocks",
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
