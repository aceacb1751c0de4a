#!/usr/bin/env python3
"""selective_state_update on CUDA: time of a decoding step, beside a copy of the same bytes and beside mamba_ssm's kernel.

    python benchmarks/bench_state_update.py [--json FILE] [--trials N]

Each case is timed in two ways. "graph": a CUDA graph of many steps, each on another set of tensors, so many sets that none is
still in the second-level cache when its turn comes again; time of a replay over the number of steps. "call": one call between
two events after the cache was overwritten, as triton.testing.do_bench does (and by it, where Triton is installed). The copy
moves as many bytes as the state: each read once and written once, which is the least that a step can do. Every case is compared
with the float64 reference before it is timed. Exits with 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import ssm_kernels
from benchmarks import peers
from benchmarks.harness import machine, measure, require_cuda, time_graph, time_host
from ssm_kernels import reference

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Sizes and types of a step. With ``heads``, ``dim`` is headdim, and A, dt, D and dt_bias are one number per head."""

    batch: int
    heads: int | None
    dim: int
    dstate: int
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    discretization: str = "zoh"

    @property
    def sizes(self) -> str:
        channels = f"D{self.dim}" if self.heads is None else f"H{self.heads} P{self.dim}"
        return f"B{self.batch} {channels} N{self.dstate}"

    @property
    def dtypes(self) -> str:
        short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
        return f"{short[self.dtype]} / {short[self.state_dtype]}"

    @property
    def state_bytes(self) -> int:
        return self.batch * (self.heads or 1) * self.dim * self.dstate * self.state_dtype.itemsize

    @property
    def recorded(self) -> float | None:
        if self.discretization != "zoh" or self.state_dtype != torch.float32:
            return None
        return peers.RECORDED_STATE_UPDATE.get((self.batch, self.heads, self.dim, self.dstate))

    def inputs(self, seed: int, batch: int | None = None) -> Inputs:
        generator = torch.Generator("cuda").manual_seed(seed)
        batch = batch or self.batch

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(dtype)

        channels = (self.dim,) if self.heads is None else (self.heads, self.dim)
        matrix = (batch, self.dstate) if self.heads is None else (batch, 1, self.dstate)
        inputs = {
            "state": normal(batch, *channels, self.dstate, dtype=self.state_dtype),
            "x": normal(batch, *channels),
            "B": normal(*matrix),
            "C": normal(*matrix),
            "z": normal(batch, *channels),
        }
        if self.heads is None:
            inputs["A"] = -torch.exp(normal(self.dim, self.dstate, dtype=torch.float32))
            inputs["dt"] = normal(batch, self.dim)
            inputs["D"], inputs["dt_bias"] = (normal(self.dim, dtype=torch.float32) for _ in range(2))
        else:
            A = -torch.exp(normal(self.heads, dtype=torch.float32))
            inputs["A"] = A[:, None, None].expand(*channels, self.dstate)
            inputs["dt"] = normal(batch, self.heads)[..., None].expand(batch, *channels)
            for name in ("D", "dt_bias"):
                inputs[name] = normal(self.heads, dtype=torch.float32)[:, None].expand(channels)
        return inputs | {"dt_softplus": True}


FP32, BF16 = torch.float32, torch.bfloat16
SIZES = [
    (64, None, 2048, 16),
    (64, 80, 64, 128),
    (1, None, 2048, 16),
    (1, 80, 64, 128),
    (8, 80, 64, 128),
    (64, None, 2048, 64),
    (64, 24, 64, 64),
    (16, 32, 64, 256),
]
CASES = [
    *(Case(*sizes, dtype=FP32) for sizes in SIZES[:2]),
    *(Case(*sizes) for sizes in SIZES),
    *(Case(*sizes, state_dtype=BF16) for sizes in SIZES[:4]),
    *(Case(*SIZES[0], dtype=FP32, discretization=method) for method in reference.DISCRETIZATIONS if method != "zoh"),
]


def step(inputs: Inputs, discretization: str) -> Tensor:
    return ssm_kernels.selective_state_update(**inputs, discretization=discretization)


def moved_bytes(inputs: Inputs) -> int:
    """What a step must move: every element once (not once per expansion), the state twice, and the output."""
    sizes = {
        name: math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride) * t.element_size()
        for name, t in inputs.items()
        if isinstance(t, Tensor)
    }
    return sum(sizes.values()) + sizes["state"] + sizes["x"]


def error_of(case: Case) -> float:
    """Largest error of output and state over the roundings allowed to them; at most 1 for a right result."""
    inputs = case.inputs(seed=1, batch=min(case.batch, 3))
    doubles = {k: v.double() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    exact = reference.selective_state_update(**doubles, discretization=case.discretization)
    out = step(inputs, case.discretization)
    worst = 0.0
    for actual, expected in zip((out, inputs["state"]), exact, strict=True):
        roundings = max(torch.finfo(actual.dtype).eps, 32 * torch.finfo(torch.float32).eps)
        worst = max(worst, ((actual.double() - expected).abs().max() / (roundings * expected.abs().max())).item())
    return worst


def time_call(function: Callable[[Inputs], Any], inputs: Inputs) -> float:
    """Median seconds of a call after the cache was overwritten."""
    try:
        from triton.testing import do_bench
    except ImportError:
        return measure({"call": [lambda: function(inputs)]}, device="cuda", trials=200, warmup=20)["call"].total.median
    return do_bench(lambda: function(inputs), warmup=25, rep=200, return_mode="median") * 1e-3


def measure_case(case: Case, trials: int, peer: Callable[[Inputs], Tensor] | None) -> dict[str, Any]:
    cache = torch.cuda.get_device_properties("cuda").L2_cache_size or 2**26
    one = case.inputs(seed=0)
    sets = [one, *(case.inputs(seed=i) for i in range(1, min(256, max(2, math.ceil(4 * cache / moved_bytes(one))))))]

    def ours(inputs: Inputs) -> Tensor:
        return step(inputs, case.discretization)

    pairs = [(inputs["state"], torch.empty_like(inputs["state"])) for inputs in sets]

    def copy(pair: Any) -> Tensor:
        return pair[1].copy_(pair[0])

    row: dict[str, Any] = {
        "sizes": case.sizes,
        "dtypes": case.dtypes,
        "discretization": case.discretization,
        "bytes": moved_bytes(one),
        "copied_bytes": 2 * case.state_bytes,
        "error": error_of(case),
        "graph": time_graph(ours, sets, trials).to_dict(),
        "call": time_call(ours, one),
        "copy_graph": time_graph(copy, pairs, trials).to_dict(),
        "copy_call": time_call(copy, pairs[0]),
    }
    if peer is not None and case.discretization == "zoh":
        row["peer"] = {"graph": time_graph(peer, sets, trials).to_dict(), "call": time_call(peer, one), "recorded": False}
    elif case.recorded is not None and "H200" in torch.cuda.get_device_name():
        row["peer"] = {"graph": None, "call": case.recorded, "recorded": True}
    return row


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="selective_state_update, microseconds per step")
    columns = ("sizes", "x / state", "method", "graph", "GB/s", "copy", "/ copy", "peer", "call", "copy", "peer")
    for name in columns:
        table.add_column(name, justify="left" if name in ("sizes", "x / state", "method") else "right")
    for row in rows:
        peer = row.get("peer")
        table.add_row(
            row["sizes"],
            row["dtypes"],
            row["discretization"],
            f"{row['graph']['median'] * 1e6:.2f}",
            f"{row['bytes'] / row['graph']['median'] / 1e9:.0f}",
            f"{row['copy_graph']['median'] * 1e6:.2f}",
            f"{row['graph']['median'] / row['copy_graph']['median']:.2f}",
            f"{peer['graph']['median'] * 1e6:.2f}" if peer and peer["graph"] else "",
            f"{row['call'] * 1e6:.2f}",
            f"{row['copy_call'] * 1e6:.2f}",
            f"{peer['call'] * 1e6:.2f}{' (recorded)' if peer['recorded'] else ''}" if peer else "",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--trials", type=int, default=50, help="replays of each graph (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the measurements")
    options = parser.parse_args(arguments)
    if options.trials < 1:
        parser.error("--trials starts at 1")
    require_cuda(parser)

    peer = peers.state_update()
    console = Console(width=140)
    rows = []
    for case in CASES:
        rows.append(measure_case(case, options.trials, peer))
        torch.cuda.empty_cache()
        console.print(f"{case.sizes}, {case.dtypes}, {case.discretization}: {rows[-1]['graph']['median'] * 1e6:.2f} us")
    small = Case(1, None, 64, 16).inputs(seed=0)  # the GPU finishes this step sooner than the host the next call
    host = {"ours": time_host(lambda: step(small, "zoh")).median}
    if peer is not None:
        host["peer"] = time_host(lambda: peer(small)).median
    console.print(table_of(rows))
    console.print(", ".join(f"host time per call, {who}: {seconds * 1e6:.1f} us" for who, seconds in host.items()))

    if options.json is not None:
        result = {
            "benchmark": "selective_state_update",
            "machine": machine("cuda"),
            "settings": {"trials": options.trials, "cases": [asdict(case) for case in CASES]},
            "peer": peers.described(peer),
            "rows": rows,
            "host_seconds": host,
        }
        options.json.write_text(json.dumps(result, indent=2, default=str) + "\n")
    wrong = [f"{row['sizes']}, {row['dtypes']}, {row['discretization']}" for row in rows if not row["error"] <= 1]
    if wrong:
        print("wrong results: " + "; ".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
