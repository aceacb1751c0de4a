#!/usr/bin/env python3
"""causal_conv1d with SiLU, forward and backward: beside a copy of the same bytes, causal-conv1d's kernels and PyTorch's conv1d.

    python benchmarks/bench_causal_conv1d.py [--device cpu] [--json FILE] [--cases NAME ...] [--trials N] [--require 3]

On CUDA in bfloat16: the size of a layer of Mamba-2, as a slice of its projection's output and channels-first; the copy reads
half of the bytes that the operator must move and writes as many. On the CPU in float32. PyTorch's is
``F.silu(F.conv1d(...))``, padded on both sides and cut. All take turns, and each is compared with the float64 reference
before. Exits with 1 if a result is wrong, or if ``--require`` is given and forward or backward is less than that many times as
fast as PyTorch's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.harness import Stages, add_case_options, chosen_cases, machine, measure, require_cuda
from benchmarks.operator_cases import Convolution, Function, gradients_like, normal_tensors, outputs_of
from ssm_kernels import reference

COMPARED_STEPS = 64


@dataclass(frozen=True)
class Case(Convolution):
    """A convolution by the name that ``--cases`` chooses it by."""

    name: str = ""

    def tensors(self, device: str) -> tuple[Tensor, ...]:
        """x, weight, bias and the gradient of the result."""
        generator = torch.Generator(device).manual_seed(0)
        leaves = self.leaves(normal_tensors(generator))
        with torch.no_grad():
            outputs = outputs_of(self.functions(device)["ours"], leaves)
        return (*leaves.values(), *gradients_like(outputs, generator))

    def contenders(self, device: str) -> dict[str, Function]:
        """Ours, PyTorch's and, on CUDA and if it is installed, causal-conv1d's."""
        found = {"pytorch" if who == "PyTorch" else who: function for who, function in self.functions(device).items()}
        if device == "cuda" and self.cu_seqlens is None and (peer := peers.causal_conv1d()) is not None:
            found["causal-conv1d"] = peer
        return found


LAYER = {"batch": 8, "seqlen": 2048, "channels": 5376, "dtype": torch.bfloat16}
SEQUENCES = tuple(range(0, 8 * 2048 + 1, 512))
CUDA_CASES = [
    Case(**LAYER, columns=10576, name="slice"),
    Case(**LAYER, channels_first=True, name="channels-first"),
    Case(**LAYER, name="contiguous"),
    Case(**LAYER | {"batch": 1, "seqlen": SEQUENCES[-1]}, columns=10576, cu_seqlens=SEQUENCES, name="packed slice"),
    Case(**LAYER | {"dtype": torch.float32}, columns=10576, name="float32 slice"),
    Case(**LAYER | {"batch": 1, "channels": 1792}, columns=3352, name="batch 1 slice"),
]
CPU_CASES = [
    Case(2, 2048, 1536, columns=3352, name="slice"),
    Case(2, 2048, 1536, channels_first=True, name="channels-first"),
    Case(2, 2048, 1536, name="contiguous"),
    Case(2, 2048, 1536, channels_first=True, width=2, name="width 2, channels-first"),
]


def backward(function: Function, tensors: Sequence[Tensor]) -> Callable[[], Any]:
    *leaves, grad = tensors
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def errors_of(case: Case, function: Function, tensors: Sequence[Tensor]) -> dict[str, float]:
    """Largest error of the first steps' result and of x's gradient, over the largest value."""
    short = [t[:1, :COMPARED_STEPS] if t.dim() == 3 else t for t in tensors]
    x, weight, bias, grad = (t.detach().cpu().double().requires_grad_() for t in short)
    exact = reference.causal_conv1d(x, weight, bias, activation="silu")
    (exact_grad,) = torch.autograd.grad(exact, x, grad)
    with torch.no_grad():
        out = function(*tensors[:3])[:1, :COMPARED_STEPS]
    found = backward(function, tensors)()[0][:1, : COMPARED_STEPS - case.width]  # later gradients depend on later steps
    pairs = {"out": (out, exact), "grad_x": (found, exact_grad[:, : COMPARED_STEPS - case.width])}
    return {name: ((a.cpu().double() - b).abs().max() / b.abs().max()).item() for name, (a, b) in pairs.items()}


def measure_case(case: Case, device: str, trials: int, warmup: int) -> dict[str, Any]:
    tensors = case.tensors(device)
    row: dict[str, Any] = {**asdict(case), "bytes": case.moved_bytes(), "errors": {}, "seconds": {}}
    benchmarks: dict[str, Stages] = {}
    for who, function in case.contenders(device).items():
        row["errors"][who] = errors_of(case, function, tensors)

        def forward(function: Function = function) -> None:
            with torch.no_grad():
                function(*tensors[:3])

        benchmarks[f"{who} forward"] = [forward]
        benchmarks[f"{who} backward"] = [backward(function, tensors)]
    for what, size in case.moved_bytes().items():
        source, target = (torch.zeros(size // 2, dtype=torch.int8, device=device) for _ in range(2))
        benchmarks[f"copy {what}"] = [lambda source=source, target=target: target.copy_(source)]
    for name, found in measure(benchmarks, device=device, trials=trials, warmup=warmup).items():
        row["seconds"][name] = found.total.to_dict()
    tolerance = 4 * max(torch.finfo(case.dtype).eps, 1e-6)
    row["wrong"] = [name for name, error in row["errors"]["ours"].items() if not error <= tolerance]
    return row


def lines_of(row: dict[str, Any]) -> list[str]:
    seconds = {name: found["median"] for name, found in row["seconds"].items()}
    lines = []
    for what in ("forward", "backward"):
        ours = seconds[f"ours {what}"]
        cells = [f"{row['name']:24} {what:9} {1e3 * ours:9.4f} ms", f"{row['bytes'][what] / ours / 1e9:7.0f} GB/s"]
        cells.append(f"{100 * seconds[f'copy {what}'] / ours:4.0f} % of a copy")
        for who in ("pytorch", "causal-conv1d"):
            if f"{who} {what}" in seconds:
                cells.append(f"{seconds[f'{who} {what}'] / ours:6.2f}x {who}")
        lines.append("  ".join(cells))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--require", type=float, metavar="RATIO", help="the least ratio to PyTorch that is a success")
    add_case_options(parser, "slice", trials=20, warmup=3)
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        require_cuda(parser)
    cases = chosen_cases(parser, options, CUDA_CASES if options.device == "cuda" else CPU_CASES)

    rows = []
    for case in cases:
        rows.append(measure_case(case, options.device, options.trials, options.warmup))
        print("\n".join(lines_of(rows[-1])), flush=True)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if options.json is not None:
        result = {
            "benchmark": "causal_conv1d",
            "machine": machine(options.device),
            "settings": {"device": options.device, "trials": options.trials, "warmup": options.warmup},
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=2, default=str) + "\n")

    status = 0
    for row in rows:
        if row["wrong"]:
            print(f"{row['name']}: wrong {', '.join(row['wrong'])}: {row['errors']['ours']}", file=sys.stderr)
            status = 1
        for what in ("forward", "backward"):
            if options.require is None or f"pytorch {what}" not in row["seconds"]:
                continue
            ratio = row["seconds"][f"pytorch {what}"]["median"] / row["seconds"][f"ours {what}"]["median"]
            if ratio < options.require:
                print(
                    f"{row['name']}: {what} is {ratio:.2f}x as fast as PyTorch, required {options.require:g}x", file=sys.stderr
                )
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
