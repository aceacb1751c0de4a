#!/usr/bin/env python3
"""Host time of a call on CUDA: the scans without and with gradients, selective_state_update, and mamba_ssm's functions.

    python benchmarks/bench_overhead.py [--json FILE] [--blocks N]

The tensors are so small that the GPU is never what the host waits for. "without gradients": of tensors that need none. "forward
+ backward" is a call and ``torch.autograd.grad`` of it to every input, which hands the work to autograd's thread and waits for
it. "operator" is the registered operator called directly, without autograd: what is left of a call is the dispatcher's,
autograd's and the Python wrapper's part. A product of two tensors of the same size shows what PyTorch needs for any operator.
Median over blocks of 50 calls.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import ssm_kernels
from benchmarks import peers
from benchmarks.bench_ssd import Case
from benchmarks.discretization.scans import ScanSize, scan_inputs
from benchmarks.harness import machine, require_cuda, time_host

SIZE = ScanSize(batch=1, dim=64, seqlen=64, dstate=16)
BARS = {("selective_scan", "without gradients"): 5e-6, ("selective_scan", "forward + backward"): 20e-6}


def training(function: Callable[..., Tensor], inputs: dict[str, Tensor]) -> dict[str, Callable[[], Any]]:
    """The calls of a function of tensors: of tensors that need no gradients, recording a graph, forward and backward."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
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


def calls(device: torch.device) -> dict[tuple[str, str], Callable[[], Any]]:
    """What is timed, by name of the function and what of it."""
    inputs = scan_inputs(SIZE, device=device, dtype=torch.bfloat16, seed=0)
    step = step_inputs(inputs)
    one_head = Case(SIZE.batch, SIZE.seqlen, heads=1, headdim=SIZE.dim, dstate=SIZE.dstate).inputs(device)
    functions = {
        "selective_scan": training(scan, inputs) | operators(inputs),
        "ssd_chunk_scan": training(ssd, one_head),
        "selective_state_update": {"without gradients": lambda: ssm_kernels.selective_state_update(**step)},
        "a * b": training(product, {"a": inputs["u"], "b": inputs["delta"]}),
    }
    peer_scan, peer_step = peers.selective_scan(), peers.state_update()
    if peer_scan is not None:
        functions["mamba_ssm, selective_scan"] = training(peer_scan, inputs)
    if peer_step is not None:
        functions["mamba_ssm, selective_state_update"] = {"without gradients": lambda: peer_step(step)}
    return {(name, what): call for name, timed in functions.items() for what, call in timed.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--blocks", type=int, default=40, help="of 50 calls (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the measurements")
    options = parser.parse_args(arguments)
    if options.blocks < 1:
        parser.error("--blocks starts at 1")
    require_cuda(parser)

    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    for (name, what), call in calls(device).items():
        timing = time_host(call, blocks=options.blocks).to_dict()
        bar = BARS.get((name, what))
        rows.append({"function": name, "what": what, "host": timing, "bar": bar})
    table = Table(title=f"host time, microseconds per call at {SIZE}", box=None)
    for index, column in enumerate(("function", "", "us", "+- %", "bar")):
        table.add_column(column, justify="left" if index < 2 else "right")
    for row in rows:
        found, bar = row["host"]["median"], row["bar"]
        verdict = "" if bar is None else f"{bar * 1e6:g} {'met' if found <= bar else 'missed'}"
        table.add_row(row["function"], row["what"], f"{found * 1e6:.2f}", f"{100 * row['host']['spread']:.0f}", verdict)
    Console(width=120, highlight=False).print(table)

    if options.json is not None:
        result = {
            "benchmark": "overhead",
            "machine": machine(device),
            "settings": {"blocks": options.blocks, **vars(SIZE)},
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
