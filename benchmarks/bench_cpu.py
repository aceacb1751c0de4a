#!/usr/bin/env python3
"""The CPU kernels, forward and forward with backward: scans against loops over time in PyTorch, the convolution against
PyTorch's, and the layers against compositions of PyTorch's functions around the scans.

    python benchmarks/bench_cpu.py [--methods all] [--json FILE] [--require 10] [--require_recurrences 20]
                                   [--require_convolutions 3] [--require_layers 1.5]

The two sides of a row take turns, so that whatever else the machine does slows both. Exits with 1 if ``--require`` is given and
a method of selective_scan is less than that many times as fast as the loop, forward with backward. The other options hold the
other sections likewise. Without a number they hold the bars of ``bars.json``.

``page.md`` says what each row is; the constants below are its sizes. The script checks that the convolutions and the layers
agree with the other side, before it times them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import ssm_kernels
from benchmarks import bench_delta_rule, bench_ssd, composed_layers
from benchmarks.benchmark import Benchmark, Case, Contender, Result, Run, Turns, main, relative_error
from benchmarks.discretization.scans import ScanSize, scan_inputs
from benchmarks.labels import label
from benchmarks.operator_cases import Convolution
from benchmarks.tables import Column, Row, Table, cell, text
from ssm_kernels import reference

RECURRENCE_SHAPE = {"batch": 4, "seqlen": 1024, "channels": 512}
# Options by the names of the rows, which begin with the operator's.
RECURRENCES: dict[str, dict[str, str]] = {
    "linear_scan": {},
    "mingru_scan": {},
    "mingru_scan, tanh": {"candidate_activation": "tanh"},
    "minlstm_scan": {},
    "liquid_scan": {},
    "rglru_scan": {},
}
SSD_SHAPE = {"batch": 2, "seqlen": 512, "heads": 8, "headdim": 64, "dstate": 64}
PACKED_SHAPE = {"sequences": 500, "steps": 8, "heads": 8, "headdim": 32, "dstate": 32}
DELTA_RULE_SHAPE = {"batch": 2, "seqlen": 1024, "heads": 4, "value_heads": 4, "key_dim": 64, "value_dim": 64}
# The convolution of a Mamba2 of d_model 768, which cuts its input out of the projection's output.
CONVOLUTION_SHAPE = {"batch": 2, "channels": 1792, "width": 4}
CONVOLUTION_SEQLENS = (512, 2048)
CONVOLUTION_COLUMNS = 3352
LAYER_SHAPE = {"batch": 2, "seqlen": 512}
LAYER_SIZES = (256, 768)
# The limit on the relative difference of convolutions and of layers, in units of the dtype's epsilon.
ROUNDING = 8
COMPARED_DTYPES = ("float32", "bfloat16")
DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64")}


# By section of the result: the heading of the rows' names, the names of both sides, ours first, and the table.
SECTIONS = {
    "methods": ("method", "kernel", "loop", "selective_scan, milliseconds"),
    "recurrences": ("scan", "kernel", "loop", "linear recurrences, milliseconds"),
    "ssd": ("scan", "kernel", "loop", "ssd_chunk_scan, milliseconds"),
    "delta_rules": ("rule", "kernel", "loop", "delta_rule_scan, milliseconds"),
    "convolutions": ("x", "kernel", "PyTorch", "causal_conv1d, milliseconds"),
    "layers": ("layer", "layer", "composed", "layers, milliseconds"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "recurrences": {"settings": RECURRENCE_SHAPE},
    "ssd": {"settings": SSD_SHAPE, "packed": PACKED_SHAPE},
    "delta_rules": {"settings": DELTA_RULE_SHAPE},
    "convolutions": {"settings": CONVOLUTION_SHAPE | {"columns": CONVOLUTION_COLUMNS}},
    "layers": {"settings": LAYER_SHAPE},
}


Sides = dict[str, Contender]
# Maps each timed stage to the name of its ratio in the result.
RATIOS = {"forward": "ratio_forward", "both": "ratio_forward_backward"}


@dataclass(frozen=True)
class Pair(Case):
    """A row, by its section and its name, and what makes its two sides from a seed."""

    name: str
    make: Callable[[int], Sides]


def of_functions(name: str, inputs: Mapping[str, Any], **options: Any) -> Sides:
    """Returns the function of this name and its reference."""
    functions = {"kernel": getattr(ssm_kernels, name), "loop": getattr(reference, name)}
    calls = {who: functools.partial(function, **options) for who, function in functions.items()}
    with torch.no_grad():
        grad = torch.ones_like(calls["kernel"](**inputs))
    return {who: Contender(call, inputs, [grad]) for who, call in calls.items()}


def of_method(method: str, size: ScanSize, dtype: torch.dtype, seed: int) -> Sides:
    inputs = scan_inputs(size, device=torch.device("cpu"), dtype=dtype, seed=seed)
    return of_functions("selective_scan", inputs, discretization=method, delta_softplus=True)


def of_recurrence(name: str, arguments: Mapping[str, Any], seed: int) -> Sides:
    """A linear recurrence; inputs that layers broadcast are broadcast."""
    inputs: dict[str, Tensor | float] = {}
    generator = torch.Generator().manual_seed(seed)
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
    return of_functions(name, inputs, **arguments)


def ssd_cases() -> dict[str, tuple[bench_ssd.Case, int]]:
    """The cases of ssd_chunk_scan by the names of their rows, each with the number of sequences that are packed in a row."""
    sequences, steps, *sizes = PACKED_SHAPE.values()
    packed = bench_ssd.Case(1, sequences * steps, *sizes, dtype=torch.float32)
    return {"ssd_chunk_scan": (bench_ssd.Case(**SSD_SHAPE, dtype=torch.float32), 1), "packed sequences": (packed, sequences)}


def of_ssd(case: bench_ssd.Case, sequences: int, seed: int) -> Sides:
    inputs = case.inputs(torch.device("cpu"), seed)
    if sequences > 1:
        inputs["cu_seqlens"] = torch.arange(0, case.seqlen + 1, case.seqlen // sequences)
    return of_functions(case.operator, inputs, **case.options)


def of_delta_rule(rule: str, seed: int) -> Sides:
    case = bench_delta_rule.DeltaCase(rule, **DELTA_RULE_SHAPE, dtype=torch.float32)
    return of_functions(case.operator, case.inputs(torch.device("cpu"), seed))


def convolutions() -> dict[str, Convolution]:
    """The cases of causal_conv1d by the names of their rows."""
    layouts: dict[str, dict[str, int]] = {"slice": {"columns": CONVOLUTION_COLUMNS}, "channels-first": {"channels_first": True}}
    return {
        f"{layout} {seqlen}, {dtype}": Convolution(**CONVOLUTION_SHAPE, **sizes, seqlen=seqlen, dtype=DTYPES[dtype])
        for seqlen in CONVOLUTION_SEQLENS
        for dtype in COMPARED_DTYPES
        for layout, sizes in layouts.items()
    }


def of_convolution(name: str, case: Convolution, seed: int) -> Sides:
    ours = case.contender(torch.device("cpu"), seed)
    with torch.no_grad():
        result = case.by_pytorch(**ours.inputs)
    # The same numbers, for each in the strides of its result.
    grads = [torch.empty_like(result).copy_(ours.grads[0])]
    return agreeing(name, {"kernel": ours, "PyTorch": Contender(case.by_pytorch, ours.inputs, grads)})


def of_layer(layer: str, d_model: int, dtype: torch.dtype, seed: int, batch: int, seqlen: int) -> Sides:
    """A layer and its composition of PyTorch's functions around the scan."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = getattr(ssm_kernels.nn, layer)(d_model, dtype=dtype)
        x, grad = (torch.randn(batch, seqlen, d_model, dtype=dtype) for _ in range(2))
    composition = getattr(composed_layers, layer.lower())
    calls = {"layer": lambda x: module(x), "composed": lambda x: composition(module, x)}
    parameters = dict(module.named_parameters())
    return agreeing(
        f"{layer} {d_model}, {dtype}", {who: Contender(call, {"x": x}, [grad], parameters) for who, call in calls.items()}
    )


def agreeing(name: str, sides: Sides) -> Sides:
    """Raises RuntimeError where results or gradients of the two sides differ by more than rounding."""
    found, expected = (contender.results() for contender in sides.values())
    limit = ROUNDING * torch.finfo(found["out"].dtype).eps
    for what, tensor in found.items():
        error = relative_error(tensor, expected[what].double())
        if not error <= limit:
            both = " and ".join(sides)
            raise RuntimeError(f"{name}: expected {what} of {both} to agree to {limit:.1e}, got {error:.1e}")
    return sides


def cases(options: argparse.Namespace) -> list[Pair]:
    size, dtype = ScanSize(options.batch, options.dim, options.seqlen, options.dstate), DTYPES[options.dtype]
    methods = list(reference.DISCRETIZATIONS) if "all" in options.methods else options.methods
    makers: dict[str, Callable[[int], Sides]] = {
        f"methods/{method}": functools.partial(of_method, method, size, dtype) for method in methods
    }
    for row, arguments in RECURRENCES.items():
        makers[f"recurrences/{row}"] = functools.partial(of_recurrence, row.partition(",")[0], arguments)
    for row, (case, sequences) in ssd_cases().items():
        makers[f"ssd/{row}"] = functools.partial(of_ssd, case, sequences)
    for rule in (bench_delta_rule.DELTA, bench_delta_rule.GATED, bench_delta_rule.KDA):
        makers[f"delta_rules/{rule}"] = functools.partial(of_delta_rule, rule)
    for row, case in convolutions().items():
        makers[f"convolutions/{row}"] = functools.partial(of_convolution, row, case)
    for layer, name, d_model in itertools.product(("Mamba", "Mamba2"), COMPARED_DTYPES, LAYER_SIZES):
        makers[f"layers/{layer} {d_model}, {name}"] = functools.partial(of_layer, layer, d_model, DTYPES[name], **LAYER_SHAPE)
    return [Pair(name, make) for name, make in makers.items()]


def compare(sides: Sides, run: Run) -> dict[str, dict[str, Any]]:
    """The timings of both sides, ``forward`` (no graph) and ``both`` (forward and backward)."""
    turns, found = Turns(run), {who: {} for who in sides}
    for who, contender in sides.items():
        turns.add(found[who], contender.stages("forward", "both"))
    turns.measure()
    return {f"{who}_{what}": timing for who, timings in found.items() for what, timing in timings.items()}


def measure_pairs(cases: list[Pair], run: Run) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        row: dict[str, Any] = {"name": case.name, **compare(case.make(run.options.seed), run)}
        _, ours, other, _ = SECTIONS[case.name.partition("/")[0]]
        for what, ratio in RATIOS.items():
            row[ratio] = row[f"{other}_{what}"]["median"] / row[f"{ours}_{what}"]["median"]
        rows.append(row)
    return rows


def figures(row: Row, result: Result) -> dict[str, float]:
    return {"forward": row["ratio_forward"], "forward + backward": row["ratio_forward_backward"]}


def layout(result: Result) -> Result:
    """The result by sections, whose rows have names."""
    rows: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for row in result["rows"]:
        section, _, name = row["name"].partition("/")
        rows[section][name] = {key: value for key, value in row.items() if key != "name"}
    by_section = {section: settings | {"rows": rows[section]} for section, settings in SETTINGS.items()}
    return {key: value for key, value in result.items() if key != "rows"} | {"methods": rows["methods"], **by_section}


def tables(result: Result) -> list[Table]:
    found = []
    for section, (first, ours, other, title) in SECTIONS.items():
        # Older results lack some sections.
        rows = result["methods"] if section == "methods" else result.get(section, {"rows": {}})["rows"]
        columns, digits = [text(first, "row")], 2 if section == "layers" else 1
        for what, name in (("forward", "forward"), ("both", "forward + backward")):
            for who, heading in ((ours, name), (other, f"{name}, {other}")):
                columns.append(Column(heading, lambda row, figure=f"{who}_{what}": cell(row, figure, decimals=2, spread=True)))
            columns.append(Column("ratio", lambda row, key=RATIOS[what], digits=digits: f"{row[key]:.{digits}f}"))
        found.append(Table(title, columns, [row | {"row": label(name)} for name, row in rows.items()]))
    return found


def size_up_to(most: int, text: str) -> int:
    """An argument's type: a size."""
    if not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"expected an integer from 1 to {most}, got {text}")
    return int(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(device="cpu")
    for name, default, most in (("batch", 2, 2**31), ("dim", 256, 2**31), ("seqlen", 512, 2**31), ("dstate", 16, 256)):
        parser.add_argument(f"--{name}", type=functools.partial(size_up_to, most), default=default, metavar="N")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument(
        "--methods",
        nargs="+",
        type=lambda name: reference.ALIASES.get(name, name),
        choices=["all", *reference.DISCRETIZATIONS],
        default=["zoh"],
        metavar="NAME",
    )
    parser.add_argument("--seed", type=int, default=0)


def context(run: Run) -> Result:
    return {"settings": {name: getattr(run.options, name) for name in ("dtype", "seed", "batch", "dim", "seqlen", "dstate")}}


BENCHMARK = Benchmark(
    "selective_scan_cpu",
    cases,
    tables,
    figures,
    measure_pairs,
    trials=9,
    warmup=2,
    context=context,
    layout=layout,
    add_options=add_options,
    required={
        "require": "methods/",
        "require_recurrences": "recurrences/",
        "require_convolutions": "convolutions/",
        "require_layers": "layers/",
    },
    trials_option="--n_trials",
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK, __doc__))
