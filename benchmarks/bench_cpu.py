#!/usr/bin/env python3
"""The CPU kernels of the scans against loops over time in PyTorch, forward and forward with backward.

    python benchmarks/bench_cpu.py [--methods all] [--json FILE] [--require 10] [--require_recurrences 20]

Kernel and loop take turns, so that whatever else the machine does meets both. Exits with 1 if ``--require`` is given and the
forward with backward of selective_scan's kernel is less than that many times faster, for any of the methods; likewise with
``--require_recurrences`` for any of the linear recurrences. Their sizes are fixed: batch 4, seqlen 1024, 512 channels, float32;
they shall be 20 times as fast as their loops, which is only reported. Likewise ssd_chunk_scan, 5 times as fast, at
batch 2, seqlen 512, 8 heads, headdim 64, dstate 64, and for 500 sequences of 8 steps by cu_seqlens, 8 heads, headdim 32,
dstate 32, in float32, with D, dt_bias and softplus.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import ssm_kernels
from benchmarks.bench_ssd import Case
from benchmarks.discretization.scans import ScanSize, scan_inputs, scan_stages
from benchmarks.harness import Stages, Timing, machine, measure
from ssm_kernels import reference

RECURRENCE_SHAPE = {"batch": 4, "seqlen": 1024, "channels": 512}
RECURRENCE_BAR = 20
# By the names of their rows.
RECURRENCES: dict[str, tuple[str, dict[str, str]]] = {
    "linear_scan": ("linear_scan", {}),
    "mingru_scan": ("mingru_scan", {}),
    "mingru_scan, tanh": ("mingru_scan", {"candidate_activation": "tanh"}),
    "minlstm_scan": ("minlstm_scan", {}),
    "liquid_scan": ("liquid_scan", {}),
    "rglru_scan": ("rglru_scan", {}),
}
SSD_SHAPE = {"batch": 2, "seqlen": 512, "heads": 8, "headdim": 64, "dstate": 64}
PACKED_SHAPE = {"sequences": 500, "steps": 8, "heads": 8, "headdim": 32, "dstate": 32}
SSD_BAR = 5
DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64")}


def compare(method: str, size: ScanSize, dtype: torch.dtype, trials: int, warmup: int, seed: int) -> dict[str, Timing]:
    """The timings of kernel and loop, ``forward`` (no graph) and ``both`` (forward and backward)."""
    inputs = scan_inputs(size, device=torch.device("cpu"), dtype=dtype, seed=seed)
    grad_out = torch.ones_like(inputs["u"])
    functions = {"kernel": ssm_kernels.selective_scan, "loop": reference.selective_scan}
    benchmarks = {
        f"{who} {what}": scan_stages(function, inputs, grad_out, method, backward=what == "both")
        for who, function in functions.items()
        for what in ("forward", "both")
    }
    return {name: found.total for name, found in measure(benchmarks, trials=trials, warmup=warmup).items()}


def recurrence_inputs(name: str, generator: torch.Generator) -> dict[str, Tensor | float]:
    """The inputs of a linear recurrence; those that broadcast as layers give them."""
    inputs: dict[str, Tensor | float] = {}
    for argument in getattr(torch.ops.ssm_kernels, name).default._schema.arguments:
        if argument.name == "h0":
            break
        shape = RECURRENCE_SHAPE.values() if argument.name != "recurrent_param" else [RECURRENCE_SHAPE["channels"]]
        value = torch.randn(*shape, generator=generator)
        if argument.name == "tau":
            value = 1 + value.abs()
        elif argument.name == "a":
            value = value.sigmoid()
        inputs[argument.name] = 0.5 if argument.name == "dt" else value
    return inputs


def compare_recurrence(name: str, options: dict[str, str], trials: int, warmup: int, seed: int) -> dict[str, Timing]:
    """As :func:`compare`, for a linear recurrence."""
    inputs = recurrence_inputs(name, torch.Generator().manual_seed(seed))
    return compare_functions(name, inputs, options, torch.ones(*RECURRENCE_SHAPE.values()), trials, warmup)


def ssd_inputs(seed: int) -> dict[str, dict[str, Tensor]]:
    """The inputs of ssd_chunk_scan by the names of their rows."""
    sequences, steps, *sizes = PACKED_SHAPE.values()
    cases = {
        "ssd_chunk_scan": Case(**SSD_SHAPE, dtype="float32"),
        "packed sequences": Case(1, sequences * steps, *sizes, dtype="float32"),
    }
    rows = {name: case.inputs(torch.device("cpu"), seed) for name, case in cases.items()}
    rows["packed sequences"]["cu_seqlens"] = steps * torch.arange(sequences + 1)
    return rows


def compare_ssd(inputs: dict[str, Tensor], trials: int, warmup: int) -> dict[str, Timing]:
    """As :func:`compare`, for ssd_chunk_scan."""
    return compare_functions("ssd_chunk_scan", inputs, {"dt_softplus": True}, torch.ones_like(inputs["x"]), trials, warmup)


def compare_functions(
    name: str,
    inputs: Mapping[str, Tensor | float],
    options: Mapping[str, str | bool],
    grad_out: Tensor,
    trials: int,
    warmup: int,
) -> dict[str, Timing]:
    """As :func:`compare`, for the function of this name and its reference."""
    tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
    leaves = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point()]

    def stages(function: Callable[..., Tensor]) -> dict[str, Stages]:
        def forward() -> Tensor:
            with torch.no_grad():
                return function(**inputs, **options)

        both = (lambda: function(**inputs, **options), lambda out: torch.autograd.grad(out, leaves, grad_out))
        return {"forward": (forward,), "both": both}

    functions = {"kernel": getattr(ssm_kernels, name), "loop": getattr(reference, name)}
    benchmarks = {f"{who} {what}": timed for who, function in functions.items() for what, timed in stages(function).items()}
    return {name: found.total for name, found in measure(benchmarks, trials=trials, warmup=warmup).items()}


def ratios_of(timings: dict[str, Timing]) -> dict[str, float]:
    return {what: timings[f"loop {what}"].median / timings[f"kernel {what}"].median for what in ("forward", "both")}


def line_of(name: str, timings: dict[str, Timing]) -> str:
    cells = []
    for what, ratio in ratios_of(timings).items():
        for who in ("kernel", "loop"):
            timing = timings[f"{who} {what}"]
            spread = f"+-{100 * timing.spread:.0f}%"
            cells.append(f"{1e3 * timing.median:8.3f} {spread:>5}")
        cells.append(f"{ratio:6.1f}x")
    return f"{name:17} {' '.join(cells)}"


def to_dict(timings: dict[str, Timing]) -> dict[str, object]:
    ratios = ratios_of(timings)
    return {
        **{name.replace(" ", "_"): timing.to_dict() for name, timing in timings.items()},
        "ratio_forward": ratios["forward"],
        "ratio_forward_backward": ratios["both"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    methods = list(reference.DISCRETIZATIONS)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--dstate", type=int, default=16)
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--methods", nargs="+", choices=["all", *methods], default=["zoh"], metavar="NAME")
    parser.add_argument("--n_trials", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--require", type=float, metavar="RATIO", help="the least ratio, loop over kernel, that is a success")
    parser.add_argument("--require_recurrences", type=float, metavar="RATIO", help="likewise, of the linear recurrences")
    options = parser.parse_args(arguments)
    if min(options.batch, options.dim, options.seqlen, options.dstate, options.n_trials) < 1 or options.warmup < 0:
        parser.error("sizes and --n_trials start at 1, --warmup at 0")
    if options.dstate > 256:
        parser.error("--dstate ends at 256")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: there is no such folder")

    size = ScanSize(options.batch, options.dim, options.seqlen, options.dstate)
    description = machine()
    print(f"ssm_kernels {description['ssm_kernels']}, torch {description['torch']}, Python {description['python']}")
    print(f"{description['cpu']}, {description['threads']} threads, {description['cpu_capability']}")
    print(f"selective_scan, {size}, {options.dtype}; median ms of {options.n_trials} trials, +- half of 20 % to 80 %\n")
    print(f"{'':17} {'------------- forward -------------':>37} {'-------- forward + backward --------':>38}")
    heading = f"{'kernel':>14} {'loop':>14} {'ratio':>7}"
    print(f"{'method':17} {heading} {heading}")

    results: dict[str, dict[str, object]] = {}
    for method in methods if "all" in options.methods else options.methods:
        timings = compare(method, size, DTYPES[options.dtype], options.n_trials, options.warmup, options.seed)
        print(line_of(method, timings), flush=True)
        results[method] = to_dict(timings)
    sizes = ", ".join(f"{name} {value}" for name, value in RECURRENCE_SHAPE.items())
    print(f"\nlinear recurrences, {sizes}, float32; at least {RECURRENCE_BAR}x forward + backward")
    recurrences: dict[str, dict[str, object]] = {}
    for row, (name, arguments_of_row) in RECURRENCES.items():
        timings = compare_recurrence(name, arguments_of_row, options.n_trials, options.warmup, options.seed)
        is_met = ratios_of(timings)["both"] >= RECURRENCE_BAR
        print(f"{line_of(row, timings)} {'met' if is_met else 'NOT met'}", flush=True)
        recurrences[row] = to_dict(timings) | {"bar": RECURRENCE_BAR}
    sizes = ", ".join(f"{name} {value}" for name, value in SSD_SHAPE.items())
    packed = ", ".join(f"{name} {value}" for name, value in PACKED_SHAPE.items())
    print(f"\nstate-space duality, {sizes}, float32; at least {SSD_BAR}x forward + backward")
    print(f"packed sequences: {packed}")
    ssd: dict[str, dict[str, object]] = {}
    for row, inputs in ssd_inputs(options.seed).items():
        timings = compare_ssd(inputs, options.n_trials, options.warmup)
        is_met = ratios_of(timings)["both"] >= SSD_BAR
        print(f"{line_of(row, timings)} {'met' if is_met else 'NOT met'}", flush=True)
        ssd[row] = to_dict(timings) | {"bar": SSD_BAR}

    if options.json is not None:
        settings = {"dtype": options.dtype, "seed": options.seed, "trials": options.n_trials, **vars(size)}
        result = {"benchmark": "selective_scan_cpu", "machine": description, "settings": settings, "methods": results}
        result["recurrences"] = {"settings": RECURRENCE_SHAPE, "rows": recurrences}
        result["ssd"] = {"settings": SSD_SHAPE, "packed": PACKED_SHAPE, "rows": ssd}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    status = 0
    for name, rows, required in (
        ("selective_scan", results, options.require),
        ("linear recurrences", recurrences, options.require_recurrences),
    ):
        if required is not None:
            least = min(row["ratio_forward_backward"] for row in rows.values())
            status = status if least >= required else 1
            is_met = "met" if least >= required else "NOT met"
            print(f"\n{name}: required {required:g}x forward + backward: {is_met}, {least:.1f}x")
    return status


if __name__ == "__main__":
    sys.exit(main())
