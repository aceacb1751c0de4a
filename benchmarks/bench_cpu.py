#!/usr/bin/env python3
"""The CPU kernels, forward and forward with backward: scans against loops over time in PyTorch, the convolution against
PyTorch's, and the layers against compositions of PyTorch's functions around the scans.

    python benchmarks/bench_cpu.py [--methods all] [--json FILE] [--require 10] [--require_recurrences 20]
                                   [--require_convolutions 3] [--require_layers 1.5]

The two sides of a row take turns, so that whatever else the machine does meets both. Exits with 1 if ``--require`` is given and
the forward with backward of selective_scan's kernel is less than that many times faster, for any of the methods. The other
options likewise hold the other sections. The page that ``report.py`` writes compares every row with its bar:

| rows | sizes, in float32 unless the row says otherwise | bar | of |
|---|---|---|---|
| linear recurrences | batch 4, seqlen 1024, 512 channels | 20 | forward + backward |
| ssd_chunk_scan | batch 2, seqlen 512, 8 heads, headdim 64, dstate 64, with D, dt_bias and softplus | 5 | forward + backward |
| packed sequences | the same for 500 sequences of 8 steps by cu_seqlens, headdim 32, dstate 32 | 5 | forward + backward |
| causal_conv1d | batch 2, seqlen 512 and 2048, 1792 channels, width 4, with bias and SiLU | 3 | forward, forward + backward |
| Mamba, Mamba2 | batch 2, seqlen 512, d_model 256 and 768 | 1.5 | forward + backward |

The script checks that the convolutions and the layers agree with the other side, before it times them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import ssm_kernels
from benchmarks import composed_layers
from benchmarks.bench_ssd import Case
from benchmarks.discretization.scans import ScanSize, scan_inputs, scan_stages
from benchmarks.harness import Stages, Timing, machine, measure
from benchmarks.operator_cases import Convolution, gradients_like, normal_tensors
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
# The convolution of a Mamba2 of d_model 768, which cuts its input out of the projection's output.
CONVOLUTION_SHAPE = {"batch": 2, "channels": 1792, "width": 4}
CONVOLUTION_SEQLENS = (512, 2048)
CONVOLUTION_COLUMNS = 3352
CONVOLUTION_BAR = 3
LAYER_SHAPE = {"batch": 2, "seqlen": 512}
LAYER_SIZES = (256, 768)
LAYER_BAR = 1.5
# The limit on the relative difference of convolutions and of layers, in units of the dtype's epsilon.
ROUNDING = 8
COMPARED_DTYPES = ("float32", "bfloat16")
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
    functions = {"kernel": getattr(ssm_kernels, name), "loop": getattr(reference, name)}
    calls = {who: functools.partial(function, **inputs, **options) for who, function in functions.items()}
    return compare_calls(calls, leaves, dict.fromkeys(calls, grad_out), trials, warmup)


def compare_calls(
    calls: Mapping[str, Callable[[], Tensor]],
    leaves: Sequence[Tensor],
    grads: Mapping[str, Tensor],
    trials: int,
    warmup: int,
) -> dict[str, Timing]:
    """As :func:`compare`, for two calls, each with the gradient of its result."""

    def stages(call: Callable[[], Tensor], grad: Tensor) -> dict[str, Stages]:
        def forward() -> Tensor:
            with torch.no_grad():
                return call()

        return {"forward": (forward,), "both": (call, lambda out: torch.autograd.grad(out, leaves, grad))}

    benchmarks = {f"{who} {what}": timed for who, call in calls.items() for what, timed in stages(call, grads[who]).items()}
    return {name: found.total for name, found in measure(benchmarks, trials=trials, warmup=warmup).items()}


def check_agreement(name: str, calls: Mapping[str, Callable[[], Tensor]], leaves: Sequence[Tensor], grad: Tensor) -> None:
    """Raises RuntimeError where results or gradients of the two calls differ by more than rounding."""
    ours, other = ([out, *torch.autograd.grad(out, leaves, grad)] for out in (call() for call in calls.values()))
    limit = ROUNDING * torch.finfo(ours[0].dtype).eps
    for index, (found, expected) in enumerate(zip(ours, other, strict=True)):
        error = ((found.double() - expected.double()).norm() / expected.double().norm()).item()
        if not error <= limit:
            what = "result" if index == 0 else f"gradient {index - 1}"
            raise RuntimeError(f"{name}: expected the {what} of {' and '.join(calls)} to agree to {limit:.1e}, got {error:.1e}")


def convolutions() -> dict[str, Convolution]:
    """The cases of causal_conv1d by the names of their rows."""
    layouts: dict[str, dict[str, int]] = {"slice": {"columns": CONVOLUTION_COLUMNS}, "channels-first": {"channels_first": True}}
    return {
        f"{layout} {seqlen}, {dtype}": Convolution(**CONVOLUTION_SHAPE, **sizes, seqlen=seqlen, dtype=DTYPES[dtype])
        for seqlen in CONVOLUTION_SEQLENS
        for dtype in COMPARED_DTYPES
        for layout, sizes in layouts.items()
    }


def compare_convolution(name: str, case: Convolution, trials: int, warmup: int, seed: int) -> dict[str, Timing]:
    """As :func:`compare`, for causal_conv1d and PyTorch's functions."""
    generator = torch.Generator().manual_seed(seed)
    leaves = [leaf.requires_grad_() for leaf in case.leaves(normal_tensors(generator)).values()]
    functions = {"PyTorch" if who == "PyTorch" else "kernel": function for who, function in case.functions("cpu").items()}
    calls = {who: functools.partial(function, *leaves) for who, function in functions.items()}
    with torch.no_grad():
        results = {who: call() for who, call in calls.items()}
    (grad,) = gradients_like((results["kernel"],), generator)
    check_agreement(name, calls, leaves, grad)
    # The same numbers, for each in the strides of its result.
    grads = {who: torch.empty_like(result).copy_(grad) for who, result in results.items()}
    return compare_calls(calls, leaves, grads, trials, warmup)


def compare_layer(
    layer: str, d_model: int, dtype: torch.dtype, trials: int, warmup: int, seed: int, batch: int, seqlen: int
) -> dict[str, Timing]:
    """As :func:`compare`, for a layer and its composition of PyTorch's functions around the scan."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = getattr(ssm_kernels.nn, layer)(d_model, dtype=dtype)
        x = torch.randn(batch, seqlen, d_model, dtype=dtype).requires_grad_()
        grad = torch.randn(batch, seqlen, d_model, dtype=dtype)
    composition = getattr(composed_layers, layer.lower())
    calls = {"layer": lambda: module(x), "composed": lambda: composition(module, x)}
    leaves = [x, *module.parameters()]
    check_agreement(f"{layer} {d_model}, {dtype}", calls, leaves, grad)
    return compare_calls(calls, leaves, dict.fromkeys(calls, grad), trials, warmup)


def sides_of(timings: dict[str, Timing]) -> tuple[str, str]:
    """Returns the two names that a row compares: ours and the other's."""
    ours, other = dict.fromkeys(name.rpartition(" ")[0] for name in timings)
    return ours, other


def ratios_of(timings: dict[str, Timing]) -> dict[str, float]:
    ours, other = sides_of(timings)
    return {what: timings[f"{other} {what}"].median / timings[f"{ours} {what}"].median for what in ("forward", "both")}


def line_of(name: str, timings: dict[str, Timing]) -> str:
    cells = []
    for what, ratio in ratios_of(timings).items():
        for who in sides_of(timings):
            timing = timings[f"{who} {what}"]
            spread = f"+-{100 * timing.spread:.0f}%"
            cells.append(f"{1e3 * timing.median:8.3f} {spread:>5}")
        cells.append(f"{ratio:6.2f}x")
    return f"{name:28} {' '.join(cells)}"


def heading_of(first: str, ours: str, other: str) -> str:
    columns = f"{ours:>14} {other:>14} {'ratio':>7}"
    return f"{first:28} {columns} {columns}"


def to_dict(timings: dict[str, Timing], holds_forward: bool = False) -> dict[str, Any]:
    """Timings and ratios; ``ratio_held`` is what a bar holds: forward + backward, or the least of both ratios."""
    ratios = ratios_of(timings)
    return {
        **{name.replace(" ", "_"): timing.to_dict() for name, timing in timings.items()},
        "ratio_forward": ratios["forward"],
        "ratio_forward_backward": ratios["both"],
        "ratio_held": min(ratios.values()) if holds_forward else ratios["both"],
    }


def judged_row(name: str, timings: dict[str, Timing], bar: float, holds_forward: bool = False) -> dict[str, Any]:
    """Prints the row and whether it meets its bar."""
    row = to_dict(timings, holds_forward) | {"bar": bar}
    print(f"{line_of(name, timings)} {'met' if row['ratio_held'] >= bar else 'NOT met'}", flush=True)
    return row


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
    parser.add_argument(
        "--methods",
        nargs="+",
        type=lambda name: reference.ALIASES.get(name, name),
        choices=["all", *methods],
        default=["zoh"],
        metavar="NAME",
    )
    parser.add_argument("--n_trials", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--require", type=float, metavar="RATIO", help="the least ratio, loop over kernel, that is a success")
    for section in ("recurrences", "convolutions", "layers"):
        parser.add_argument(f"--require_{section}", type=float, metavar="RATIO", help=f"likewise, of the {section}")
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
    print(f"{'':28} {'------------- forward -------------':>37} {'-------- forward + backward --------':>38}")
    print(heading_of("method", "kernel", "loop"))

    results: dict[str, dict[str, Any]] = {}
    for method in methods if "all" in options.methods else options.methods:
        timings = compare(method, size, DTYPES[options.dtype], options.n_trials, options.warmup, options.seed)
        print(line_of(method, timings), flush=True)
        results[method] = to_dict(timings)
    sizes = ", ".join(f"{name} {value}" for name, value in RECURRENCE_SHAPE.items())
    print(f"\nlinear recurrences, {sizes}, float32; at least {RECURRENCE_BAR}x forward + backward")
    recurrences: dict[str, dict[str, Any]] = {}
    for row, (name, arguments_of_row) in RECURRENCES.items():
        timings = compare_recurrence(name, arguments_of_row, options.n_trials, options.warmup, options.seed)
        recurrences[row] = judged_row(row, timings, RECURRENCE_BAR)
    sizes = ", ".join(f"{name} {value}" for name, value in SSD_SHAPE.items())
    packed = ", ".join(f"{name} {value}" for name, value in PACKED_SHAPE.items())
    print(f"\nstate-space duality, {sizes}, float32; at least {SSD_BAR}x forward + backward")
    print(f"packed sequences: {packed}")
    ssd: dict[str, dict[str, Any]] = {}
    for row, inputs in ssd_inputs(options.seed).items():
        timings = compare_ssd(inputs, options.n_trials, options.warmup)
        ssd[row] = judged_row(row, timings, SSD_BAR)
    sizes = ", ".join(f"{name} {value}" for name, value in CONVOLUTION_SHAPE.items())
    print(f"\ncausal_conv1d, {sizes}; at least {CONVOLUTION_BAR}x forward, and forward + backward")
    print(f"with the seqlen; slice: of {CONVOLUTION_COLUMNS} columns\n{heading_of('', 'kernel', 'PyTorch')}")
    convolved: dict[str, dict[str, Any]] = {}
    for row, case in convolutions().items():
        timings = compare_convolution(row, case, options.n_trials, options.warmup, options.seed)
        convolved[row] = judged_row(row, timings, CONVOLUTION_BAR, holds_forward=True)
    sizes = ", ".join(f"{name} {value}" for name, value in LAYER_SHAPE.items())
    print(f"\nlayers and their d_model, {sizes}; at least {LAYER_BAR:g}x forward + backward")
    print(heading_of("", "layer", "composed"))
    layers: dict[str, dict[str, Any]] = {}
    for layer, dtype, d_model in itertools.product(("Mamba", "Mamba2"), COMPARED_DTYPES, LAYER_SIZES):
        row, settings = f"{layer} {d_model}, {dtype}", (options.n_trials, options.warmup, options.seed)
        layers[row] = judged_row(row, compare_layer(layer, d_model, DTYPES[dtype], *settings, **LAYER_SHAPE), LAYER_BAR)

    if options.json is not None:
        settings = {"dtype": options.dtype, "seed": options.seed, "trials": options.n_trials, **vars(size)}
        result = {"benchmark": "selective_scan_cpu", "machine": description, "settings": settings, "methods": results}
        result["recurrences"] = {"settings": RECURRENCE_SHAPE, "rows": recurrences}
        result["ssd"] = {"settings": SSD_SHAPE, "packed": PACKED_SHAPE, "rows": ssd}
        result["convolutions"] = {"settings": CONVOLUTION_SHAPE | {"columns": CONVOLUTION_COLUMNS}, "rows": convolved}
        result["layers"] = {"settings": LAYER_SHAPE, "rows": layers}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    status = 0
    for name, rows, required in (
        ("selective_scan", results, options.require),
        ("linear recurrences", recurrences, options.require_recurrences),
        ("causal_conv1d", convolved, options.require_convolutions),
        ("layers", layers, options.require_layers),
    ):
        if required is not None:
            least = min(row["ratio_held"] for row in rows.values())
            status = status if least >= required else 1
            is_met = "met" if least >= required else "NOT met"
            print(f"\n{name}: required {required:g}x: {is_met}, {least:.2f}x")
    return status


if __name__ == "__main__":
    sys.exit(main())
