"""The causal convolution and the norms as cases: their tensors, the calls on them, and the bytes that a call must move.

``bench_layers.py``, ``bench_causal_conv1d.py`` and ``bench_norms.py`` time these cases, each in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import ssm_kernels

__all__ = ["EPS", "Convolution", "Function", "Norm", "Normal", "Operator", "gradients_like", "normal_tensors", "outputs_of"]

EPS = 1e-5
Function = Callable[..., Tensor | tuple[Tensor, ...]]


class Normal(Protocol):
    def __call__(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Draws a tensor from the standard normal distribution."""


def normal_tensors(generator: torch.Generator) -> Normal:
    """Draws float32 numbers on the generator's device and rounds them to the dtype."""

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).to(dtype)

    return normal


def outputs_of(function: Function, leaves: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Calls the function on the leaves; one output becomes a tuple too."""
    out = function(*leaves.values())
    return out if isinstance(out, tuple) else (out,)


def gradients_like(outputs: tuple[Tensor, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Draws a gradient for every output, with the strides of the output, as a model of this layout passes it to backward."""
    return tuple(torch.empty_like(out).normal_(generator=generator) for out in outputs)


class Operator(Protocol):
    """A case, of any operator."""

    @property
    def operator(self) -> str:
        """The public operator's name."""

    @property
    def described(self) -> str:
        """The operator and the sizes."""

    def leaves(self, normal: Normal) -> dict[str, Tensor]:
        """Makes the operator's tensors, in the order of its arguments."""

    def functions(self, device: torch.device | str) -> dict[str, Function]:
        """Ours, and PyTorch's own functions where they compute the same. Each takes the leaves."""

    def moved_bytes(self) -> dict[str, int]:
        """Bytes that forward and backward must read and write, parameters left out."""


@dataclass(frozen=True)
class Convolution:
    """causal_conv1d with a bias and SiLU on (batch, seqlen, channels).

    Attributes:
        columns: x is a slice of a tensor of this width, as a mixer cuts it out of its projection's output.
        channels_first: x is a transposed view of a (batch, channels, seqlen) tensor.
        cu_seqlens: first and last steps of packed sequences.
    """

    batch: int
    seqlen: int
    channels: int
    columns: int | None = None
    channels_first: bool = False
    width: int = 4
    dtype: torch.dtype = torch.float32
    cu_seqlens: tuple[int, ...] | None = None

    @property
    def operator(self) -> str:
        return "causal_conv1d"

    @property
    def described(self) -> str:
        layout = "channels-first" if self.channels_first else f"of {self.columns or self.channels} columns"
        return f"{self.operator} B{self.batch} L{self.seqlen} C{self.channels} {layout}"

    def leaves(self, normal: Normal) -> dict[str, Tensor]:
        if self.channels_first:
            x = normal(self.batch, self.channels, self.seqlen, dtype=self.dtype).mT
        else:
            columns = self.columns or self.channels
            start = (columns - self.channels) // 2 // 8 * 8
            x = normal(self.batch, self.seqlen, columns, dtype=self.dtype)[..., start : start + self.channels]
        weight = normal(self.channels, self.width, dtype=self.dtype) / 2
        return {"x": x, "weight": weight, "bias": normal(self.channels, dtype=self.dtype)}

    def functions(self, device: torch.device | str) -> dict[str, Function]:
        offsets = None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens, dtype=torch.int32, device=device)

        def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return ssm_kernels.causal_conv1d(x, weight, bias, activation="silu", cu_seqlens=offsets)

        def by_pytorch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            padded = F.conv1d(x.mT, weight[:, None], bias, padding=self.width - 1, groups=self.channels)
            return F.silu(padded[..., : self.seqlen]).mT

        return {"ours": ours} if offsets is not None else {"ours": ours, "PyTorch": by_pytorch}

    def moved_bytes(self) -> dict[str, int]:
        tensor = self.batch * self.seqlen * self.channels * self.dtype.itemsize
        return {"forward": 2 * tensor, "backward": 3 * tensor}


@dataclass(frozen=True)
class Norm:
    """A norm with a gate or with a residual on (\\*rows, columns).

    Attributes:
        operator: rms_norm_gated, layer_norm_gated, add_rms_norm or add_layer_norm.
        rows: sizes of the axes before the last.
        slice_of: x and z are slices of tensors of this width.
        residual_dtype: None for that of x.
    """

    operator: str
    rows: tuple[int, ...]
    columns: int
    group_size: int | None = None
    norm_before_gate: bool = False
    bias: bool = False
    residual_dtype: torch.dtype | None = None
    slice_of: int | None = None
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype = torch.float32

    @property
    def described(self) -> str:
        sizes = [f"{letter}{size}" for letter, size in zip("BL" if len(self.rows) == 2 else "R", self.rows, strict=True)]
        return " ".join([self.operator, *sizes, f"C{self.columns}"])

    @property
    def is_add(self) -> bool:
        return self.operator.startswith("add")

    @property
    def subtract_mean(self) -> bool:
        return "layer" in self.operator

    def leaves(self, normal: Normal) -> dict[str, Tensor]:
        def sliced() -> Tensor:
            return normal(*self.rows, self.slice_of or self.columns, dtype=self.dtype)[..., : self.columns]

        def parameter() -> Tensor:
            return normal(self.columns, dtype=self.weight_dtype)

        leaves = {"x": sliced()}
        if self.is_add:
            leaves["residual"] = normal(*self.rows, self.columns, dtype=self.residual_dtype or self.dtype)
            leaves["weight"] = 1 + parameter() / 8
        else:
            leaves["weight"] = 1 + parameter() / 8
            leaves["z"] = sliced()
        return leaves | {"bias": parameter()} if self.bias else leaves

    def function_of(self, module: ModuleType) -> Function:
        """The operator of ``ssm_kernels`` or of ``ssm_kernels.reference``."""
        options: dict[str, Any] = {"eps": EPS}
        if not self.is_add:
            options |= {"group_size": self.group_size, "norm_before_gate": self.norm_before_gate}
        operator = getattr(module, self.operator)
        return lambda *leaves: operator(*leaves, **options)

    def functions(self, device: torch.device | str) -> dict[str, Function]:
        return {"ours": self.function_of(ssm_kernels), "PyTorch": self._by_pytorch}

    def _by_pytorch(
        self, x: Tensor, second: Tensor, third: Tensor, bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if self.is_add:
            total = x + second
            return self._norm_by_pytorch(total, third, bias).to(x.dtype), total
        if self.norm_before_gate:
            return self._norm_by_pytorch(x, second, bias) * F.silu(third)
        return self._norm_by_pytorch(x * F.silu(third), second, bias)

    def _norm_by_pytorch(self, v: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight, bias = weight.to(v.dtype), None if bias is None else bias.to(v.dtype)
        if self.group_size is None and self.subtract_mean:
            return F.layer_norm(v, (self.columns,), weight, bias, EPS)
        if self.group_size is None and bias is None:
            return F.rms_norm(v, (self.columns,), weight, EPS)
        size = (self.group_size or self.columns,)
        groups = v.unflatten(-1, (-1, *size))
        normed = F.layer_norm(groups, size, eps=EPS) if self.subtract_mean else F.rms_norm(groups, size, eps=EPS)
        scaled = normed.flatten(-2) * weight
        return scaled if bias is None else scaled + bias

    def moved_bytes(self) -> dict[str, int]:
        elements = torch.Size(self.rows).numel() * self.columns
        size = self.dtype.itemsize
        if not self.is_add:
            # Read x and z, write out; read grad, x and z, write their gradients.
            return {"forward": 3 * size * elements, "backward": 5 * size * elements}
        residual = (self.residual_dtype or self.dtype).itemsize
        # A residual in the dtype of x shares its gradient.
        gradients = size if self.residual_dtype in (None, self.dtype) else size + residual
        return {"forward": 2 * (size + residual) * elements, "backward": (size + 2 * residual + gradients) * elements}
