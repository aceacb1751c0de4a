#!/usr/bin/env python3
"""Errors of whole layers in fp32, fp16 and bf16 against float64, for docs/accuracy.md.

    python benchmarks/layer_accuracy.py [--device cuda] [--page docs/accuracy.md]

A layer of each dtype and one of float64 have the same parameters and inputs, those that the dtype has rounded. The error is the
norm of the difference over the norm of float64's result: of the output, of the gradient of the input, and the largest of the
parameters' gradients. ``--page`` writes the tables into a page, between its marks; without it they are printed.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import machine
from ssm_kernels import nn

BATCH, SEQLEN, CHANNELS = 4, 512, 256
BEGIN, END = "<!-- accuracy: written by benchmarks/layer_accuracy.py -->\n", "<!-- end of accuracy -->"
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    f"Mamba({CHANNELS})": lambda: nn.Mamba(CHANNELS),
    f'Mamba({CHANNELS}, discretization="zoh_exact")': lambda: nn.Mamba(CHANNELS, discretization="zoh_exact"),
    f"Mamba2({CHANNELS})": lambda: nn.Mamba2(CHANNELS),
    f"MinGRU({CHANNELS}, {CHANNELS})": lambda: nn.MinGRU(CHANNELS, CHANNELS, batch_first=True),
    f"MinLSTM({CHANNELS}, {CHANNELS})": lambda: nn.MinLSTM(CHANNELS, CHANNELS, batch_first=True),
    f"Liquid({CHANNELS}, {CHANNELS})": lambda: nn.Liquid(CHANNELS, CHANNELS, batch_first=True),
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Errors = tuple[float, float, float]


def run(layer: torch.nn.Module, x: Tensor, grad: Tensor, autocast: torch.dtype | None = None) -> list[Tensor]:
    """Output, gradient of the input, gradients of the parameters."""
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        y: Any = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], grad.to(y.dtype))]


def errors(make: Callable[[], torch.nn.Module], dtype: torch.dtype, device: torch.device, autocast: bool = False) -> Errors:
    torch.manual_seed(0)
    layer = make().to(device)
    x, grad = (torch.randn(BATCH, SEQLEN, CHANNELS).to(device, dtype) for _ in range(2))
    if autocast:
        x = x.float()
    else:
        layer = layer.to(dtype)
    exact = copy.deepcopy(layer).double()
    expected = run(exact, x.double(), grad.double())
    found = run(layer, x, grad, dtype if autocast else None)
    relative = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]
    return relative[0], relative[1], max(relative[2:])


def tables(device: torch.device) -> str:
    of_machine = machine(device)
    where = of_machine.get("gpu") or f"{of_machine['cpu']}, {of_machine['cpu_capability']}"
    columns = [(name, dtype, False) for name, dtype in DTYPES.items()]
    columns += [(f"autocast to {name}", dtype, True) for name, dtype in DTYPES.items() if name != "fp32"]
    measured = {
        name: [errors(make, dtype, device, autocast) for _, dtype, autocast in columns] for name, make in LAYERS.items()
    }
    lines = [
        f"Measured on {where}, PyTorch {of_machine['torch']}; batch {BATCH}, {SEQLEN} steps, inputs from a normal distribution."
    ]
    titles = ("Output", "Gradient of the input", "Gradients of the parameters, the largest error")
    for index, title in enumerate(titles):
        lines += [
            "",
            f"{title}:",
            "",
            f"| layer | {' | '.join(name for name, *_ in columns)} |",
            "|---|" + "---:|" * len(columns),
        ]
        lines += [f"| `{name}` | {' | '.join(f'{row[index]:.1e}' for row in rows)} |" for name, rows in measured.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu or cuda")
    parser.add_argument("--page", type=Path, help="the page that the tables are written into, between its marks")
    options = parser.parse_args()
    text = tables(options.device)
    if options.page is None:
        print(text, end="")
        return
    before, _, rest = options.page.read_text().partition(BEGIN)
    options.page.write_text(before + BEGIN + "\n" + text + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
