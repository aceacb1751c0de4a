"""The cases of ``bench_layers.py`` that are operators between scans and projections, beside a copy of the same bytes.

Forward and backward are timed apart, in turns with mamba_ssm's and causal-conv1d's kernels and with copies. A copy reads half
of the bytes that the operator must move and writes as many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import ssm_kernels
from benchmarks import peers
from benchmarks.harness import Stages
from benchmarks.layer_cases import (
    COMPARED_STEPS,
    PEER,
    WRONG_GRADIENT,
    WRONG_OUT,
    Case,
    Figures,
    Row,
    Settings,
    add_times,
    attempts,
    relative_error,
)
from benchmarks.operator_cases import Convolution, Function, Norm, gradients_like, normal_tensors, outputs_of

__all__ = ["CONVOLUTION", "CONVOLUTION_CHANNELS_FIRST", "NORM_ADD", "NORM_GATED", "OperatorCase"]

BF16, FP32 = torch.bfloat16, torch.float32

# The calls of a Mamba-2 layer of 2560 channels. x of the convolution is a slice of the in-projection's output.
CONVOLUTION = Convolution(8, 2048, 5376, columns=10576, dtype=BF16)
CONVOLUTION_CHANNELS_FIRST = Convolution(8, 2048, 5376, channels_first=True, dtype=BF16)
NORM_GATED = Norm("rms_norm_gated", (8, 2048), 5120, weight_dtype=BF16)
NORM_ADD = Norm("add_rms_norm", (8, 2048), 2560, residual_dtype=FP32, weight_dtype=BF16)


@dataclass(frozen=True)
class OperatorCase(Case):
    """Forward and backward of an operator, with gradients of every tensor; beside PyTorch's functions if ``with_pytorch``."""

    call: Convolution | Norm = CONVOLUTION
    with_pytorch: bool = False
    kind = "operator"

    @property
    def name(self) -> str:
        return self.call.described

    def is_missing(self) -> str | None:
        """Why there is nothing to measure, or None."""
        return None if hasattr(ssm_kernels, self.call.operator) else f"ssm_kernels has no {self.call.operator}"

    def functions(self, device: torch.device) -> dict[str, Function]:
        """Ours, PyTorch's if it is asked for, and the peer's if it is installed."""
        found = self.call.functions(device)
        if not self.with_pytorch:
            found = {"ours": found["ours"]}
        if self.call.operator in (installed := peers.layer_operators()):
            found[PEER] = installed[self.call.operator]
        return found

    @staticmethod
    def results(function: Function, leaves: dict[str, Tensor], gradients: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Outputs and gradients, of activations the first steps of the first sequence only."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in leaves.items()}
        masked = [torch.zeros_like(gradient) for gradient in gradients]
        for target, gradient in zip(masked, gradients, strict=True):
            target[:1, :COMPARED_STEPS] = gradient[:1, :COMPARED_STEPS]
        out = outputs_of(function, leaves)
        found = {f"out {i}": tensor.detach() for i, tensor in enumerate(out)}
        of_leaves = torch.autograd.grad(out, [*leaves.values()], masked)
        found |= {f"grad_{name}": gradient for name, gradient in zip(leaves, of_leaves, strict=True)}
        return {name: tensor[:1, :COMPARED_STEPS] if tensor.dim() == 3 else tensor for name, tensor in found.items()}

    def measure(self, settings: Settings) -> Row:
        device, generator = settings.device, torch.Generator(settings.device).manual_seed(0)
        functions = self.functions(device)
        leaves = {name: tensor.requires_grad_() for name, tensor in self.call.leaves(normal_tensors(generator)).items()}
        with torch.no_grad():
            gradients = gradients_like(outputs_of(functions["ours"], leaves), generator)
        first = {
            name: (tensor[:1, :COMPARED_STEPS] if tensor.dim() == 3 else tensor).detach().cpu().double()
            for name, tensor in leaves.items()
        }
        exact = self.results(
            functions["ours"], first, tuple(gradient[:1, :COMPARED_STEPS].cpu().double() for gradient in gradients)
        )
        errors: dict[str, dict[str, float]] = {}
        stages: dict[tuple[str, str], Stages] = {}

        def of_one(who: str, function: Function) -> Figures:
            actual = self.results(function, leaves, gradients)
            errors[who] = {name: relative_error(actual[name], expected) for name, expected in exact.items()}
            kept = outputs_of(function, leaves)

            def forward() -> None:
                with torch.no_grad():
                    function(*leaves.values())

            stages[who, "forward"] = [forward]
            stages[who, "backward"] = [lambda: torch.autograd.grad(kept, [*leaves.values()], gradients, retain_graph=True)]
            return {}

        figures = attempts(functions, of_one)
        figures["copy"] = {"recorded": False, "unsupported": None}
        moved = self.call.moved_bytes()
        for what, size in moved.items():
            source, target = (torch.zeros(size // 2, dtype=torch.int8, device=device) for _ in range(2))
            stages["copy", what] = [lambda source=source, target=target: target.copy_(source)]
        add_times(figures, stages, settings)
        wrong = [
            f"{who}: {name}"
            for who, one in errors.items()
            for name, error in one.items()
            if (who == "ours" or name.startswith("out"))
            and not error <= (WRONG_OUT if name.startswith("out") else WRONG_GRADIENT)
        ]
        return {**figures, "bytes": moved, "errors": errors, "wrong": wrong}
