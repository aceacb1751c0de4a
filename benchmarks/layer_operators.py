"""The cases of ``bench_layers.py`` that are operators between scans and projections, beside a copy of the same bytes.

Forward and backward are timed apart, in turns with mamba_ssm's and causal-conv1d's kernels and with copies. A copy reads half
of the bytes that the operator must move and writes as many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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

__all__ = ["AddNormCase", "ConvCase", "GatedNormCase", "OperatorCase"]

BF16, FP32 = torch.bfloat16, torch.float32
Function = Callable[..., Tensor | tuple[Tensor, ...]]


def outputs_of(function: Function, leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
    out = function(*leaves.values())
    return out if isinstance(out, tuple) else (out,)


@dataclass(frozen=True)
class OperatorCase(Case):
    """Forward and backward of an operator on (batch, seqlen, channels), with gradients of every tensor."""

    batch: int = 8
    seqlen: int = 2048
    channels: int = 5120
    kind = "operator"
    operator = ""

    @property
    def name(self) -> str:
        return f"{self.operator} B{self.batch} L{self.seqlen} C{self.channels}"

    def is_missing(self) -> str | None:
        """Why there is nothing to measure, or None."""
        return None if hasattr(ssm_kernels, self.operator) else f"ssm_kernels has no {self.operator}"

    def leaves(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        """Makes the operator's arguments, in its order; ``normal`` makes a tensor of a shape and a dtype."""
        raise NotImplementedError

    def functions(self) -> dict[str, Function]:
        """Ours, and others without the peer's."""
        raise NotImplementedError

    def bytes_per_element(self) -> dict[str, int]:
        """Bytes that forward and backward must move, parameters left out."""
        raise NotImplementedError

    def results(self, function: Function, leaves: dict[str, Tensor], gradients: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Outputs and gradients, of activations the first steps of the first sequence only."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in leaves.items()}
        steps = min(COMPARED_STEPS, self.seqlen)
        masked = [torch.zeros_like(gradient) for gradient in gradients]
        for target, gradient in zip(masked, gradients, strict=True):
            target[:1, :steps] = gradient[:1, :steps]
        out = outputs_of(function, leaves)
        found = {f"out {i}": tensor.detach() for i, tensor in enumerate(out)}
        of_leaves = torch.autograd.grad(out, [*leaves.values()], masked)
        found |= {f"grad_{name}": gradient for name, gradient in zip(leaves, of_leaves, strict=True)}
        return {name: tensor[:1, :steps] if tensor.dim() == 3 else tensor for name, tensor in found.items()}

    def measure(self, settings: Settings) -> Row:
        device, generator = settings.device, torch.Generator(settings.device).manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        functions = self.functions()
        if self.operator in (installed := peers.layer_operators()):
            functions[PEER] = installed[self.operator]
        leaves = {name: tensor.requires_grad_() for name, tensor in self.leaves(normal).items()}
        with torch.no_grad():
            gradients = tuple(normal(*out.shape, dtype=out.dtype) for out in outputs_of(functions["ours"], leaves))
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
        moved = {what: size * self.batch * self.seqlen * self.channels for what, size in self.bytes_per_element().items()}
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


@dataclass(frozen=True)
class ConvCase(OperatorCase):
    """Width 4 with bias and silu; x is a slice of the in-projection's output, or channels-first."""

    channels: int = 5376
    columns: int = 10576
    channels_first: bool = False
    operator = "causal_conv1d"

    @property
    def name(self) -> str:
        return f"{super().name} {'channels-first' if self.channels_first else f'of {self.columns} columns'}"

    def leaves(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        if self.channels_first:
            x = normal(self.batch, self.channels, self.seqlen).mT
        else:
            start = (self.columns - self.channels) // 2 // 8 * 8
            x = normal(self.batch, self.seqlen, self.columns)[..., start : start + self.channels]
        return {"x": x, "weight": normal(self.channels, 4) / 2, "bias": normal(self.channels)}

    def functions(self) -> dict[str, Function]:
        return {"ours": lambda x, weight, bias: ssm_kernels.causal_conv1d(x, weight, bias, activation="silu")}

    def bytes_per_element(self) -> dict[str, int]:
        return {"forward": 4, "backward": 6}


@dataclass(frozen=True)
class GatedNormCase(OperatorCase):
    """Mamba-2's norm of x * silu(z)."""

    operator = "rms_norm_gated"

    def leaves(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        shape = (self.batch, self.seqlen, self.channels)
        return {"x": normal(*shape), "weight": 1 + normal(self.channels) / 8, "z": normal(*shape)}

    def functions(self) -> dict[str, Function]:
        return {"ours": lambda x, weight, z: ssm_kernels.rms_norm_gated(x, weight, z, eps=1e-5)}

    def bytes_per_element(self) -> dict[str, int]:
        return {"forward": 6, "backward": 10}


@dataclass(frozen=True)
class AddNormCase(OperatorCase):
    """The sum with a float32 residual, and its norm; beside PyTorch's sum, ``rms_norm`` and cast as well."""

    channels: int = 2560
    operator = "add_rms_norm"

    def leaves(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        shape = (self.batch, self.seqlen, self.channels)
        return {"x": normal(*shape), "residual": normal(*shape, dtype=FP32), "weight": 1 + normal(self.channels) / 8}

    def functions(self) -> dict[str, Function]:
        def by_pytorch(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            total = x + residual
            return F.rms_norm(total, (self.channels,), weight.to(total.dtype), 1e-5).to(x.dtype), total

        def ours(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return ssm_kernels.add_rms_norm(x, residual, weight, eps=1e-5, residual_in_fp32=x.dtype != torch.float64)

        return {"ours": ours, "PyTorch": by_pytorch}

    def bytes_per_element(self) -> dict[str, int]:
        return {"forward": 12, "backward": 16}
