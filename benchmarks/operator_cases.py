"""The causal convolution and the norms as cases: their tensors, the calls on them, and the bytes that a call must move.

``bench_layers.py`` and ``bench_causal_conv1d.py`` time them by :func:`measure_operator`, ``bench_norms.py`` in CUDA graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ssm_kernels
from benchmarks.benchmark import Contender, Contest, Function, Run, Turns, outputs_of
from benchmarks.tables import DIRECTIONS, Column, figure, ratio, throughput
from ssm_kernels import reference

EPS = 1e-5
# How many steps of the first sequence are compared with the reference. No operator's step depends on later ones.
COMPARED_STEPS = 256
# Relative L2 errors beyond which an output and a gradient are wrong; rounding the exact result to bfloat16 makes 1.7e-3.
WRONG = {torch.bfloat16: (1.2e-2, 4e-2), torch.float32: (1e-5, 1e-5)}


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Draws float32 numbers on the generator's device and rounds them to the dtype."""
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


def gradients_like(outputs: tuple[Tensor, ...], generator: torch.Generator) -> list[Tensor]:
    """Draws a gradient for every output, with the strides of the output, as a model of this layout passes it to backward."""
    return [torch.empty_like(out).normal_(generator=generator) for out in outputs]


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

    def leaves(self, generator: torch.Generator) -> dict[str, Tensor]:
        if self.channels_first:
            x = normal(generator, self.batch, self.channels, self.seqlen, dtype=self.dtype).mT
        else:
            columns = self.columns or self.channels
            start = (columns - self.channels) // 2 // 8 * 8
            x = normal(generator, self.batch, self.seqlen, columns, dtype=self.dtype)[..., start : start + self.channels]
        weight = normal(generator, self.channels, self.width, dtype=self.dtype) / 2
        return {"x": x, "weight": weight, "bias": normal(generator, self.channels, dtype=self.dtype)}

    def function_of(self, module: ModuleType, **options: Any) -> Function:
        """The operator of ``ssm_kernels`` or of ``ssm_kernels.reference``."""
        return functools.partial(module.causal_conv1d, activation="silu", **options)

    def functions(self, device: torch.device | str) -> dict[str, Function]:
        """Ours, and PyTorch's own functions where they compute the same. Each takes the leaves by name."""
        if self.cu_seqlens is not None:
            offsets = torch.tensor(self.cu_seqlens, dtype=torch.int32, device=device)
            return {"ours": self.function_of(ssm_kernels, cu_seqlens=offsets)}

        def by_pytorch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            padded = F.conv1d(x.mT, weight[:, None], bias, padding=self.width - 1, groups=self.channels)
            return F.silu(padded[..., : self.seqlen]).mT

        return {"ours": self.function_of(ssm_kernels), "PyTorch": by_pytorch}

    def moved_bytes(self) -> dict[str, int]:
        """Bytes that forward and backward must read and write, parameters left out."""
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

    def leaves(self, generator: torch.Generator) -> dict[str, Tensor]:
        def sliced() -> Tensor:
            return normal(generator, *self.rows, self.slice_of or self.columns, dtype=self.dtype)[..., : self.columns]

        def parameter() -> Tensor:
            return normal(generator, self.columns, dtype=self.weight_dtype)

        leaves = {"x": sliced()}
        if self.is_add:
            leaves["residual"] = normal(generator, *self.rows, self.columns, dtype=self.residual_dtype or self.dtype)
        leaves["weight"] = 1 + parameter() / 8
        if not self.is_add:
            leaves["z"] = sliced()
        return leaves | ({"bias": parameter()} if self.bias else {})

    def function_of(self, module: ModuleType) -> Function:
        """The operator of ``ssm_kernels`` or of ``ssm_kernels.reference``."""
        options = {} if self.is_add else {"group_size": self.group_size, "norm_before_gate": self.norm_before_gate}
        return functools.partial(getattr(module, self.operator), eps=EPS, **options)

    def functions(self, device: torch.device | str) -> dict[str, Function]:
        return {"ours": self.function_of(ssm_kernels), "PyTorch": self._by_pytorch}

    def _by_pytorch(
        self, x: Tensor, weight: Tensor, z: Tensor | None = None, residual: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if self.is_add:
            total = x + residual
            return self._norm_by_pytorch(total, weight, bias).to(x.dtype), total
        if self.norm_before_gate:
            return self._norm_by_pytorch(x, weight, bias) * F.silu(z)
        return self._norm_by_pytorch(x * F.silu(z), weight, bias)

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


def measure_operator(call: Convolution | Norm, contenders: Mapping[str, Function], run: Run, **timing: Any) -> dict[str, Any]:
    """The figures of forward and backward of every contender and of copies, the bytes, and the errors against the reference.

    A copy reads half of the bytes that the operator must move and writes as many.
    """
    generator, turns = torch.Generator(run.device).manual_seed(0), Turns(run)
    leaves = call.leaves(generator)
    with torch.no_grad():
        grads = gradients_like(outputs_of(contenders["ours"], leaves), generator)
    names = [f"out {index}" for index in range(len(grads))]
    masked = [torch.zeros_like(grad) for grad in grads]
    for target, grad in zip(masked, grads, strict=True):
        target[:1, :COMPARED_STEPS] = grad[:1, :COMPARED_STEPS]

    def first(tensor: Tensor) -> Tensor:
        return tensor[:1, :COMPARED_STEPS] if tensor.dim() == 3 else tensor

    doubles = {name: first(leaf).cpu().double() for name, leaf in leaves.items()}
    grads_of_first = [first(grad).cpu().double() for grad in grads]
    contest = Contest(
        contenders,
        lambda function: {name: first(found) for name, found in Contender(function, leaves, masked).results(names).items()},
        Contender(call.function_of(reference), doubles, grads_of_first).results(names),
        lambda who, function, figures: Contender(function, leaves, grads).stages(*DIRECTIONS),
        lambda name: WRONG[call.dtype][name.startswith("grad_")],
        {"bytes": call.moved_bytes(), "copy": {"recorded": False, "unsupported": None}},
    )
    row = contest.row(turns)
    for what, size in row["bytes"].items():
        source, target = (torch.zeros(size // 2, dtype=torch.int8, device=run.device) for _ in range(2))
        turns.add(row["copy"], {what: [lambda source=source, target=target: target.copy_(source)]})
    turns.measure(**timing)
    return row


def operator_columns(others: Mapping[str, str]) -> list[Column]:
    """The columns of operators' rows ``by_direction``; others by key and name."""
    columns = [
        figure("ms", "ours", "it", decimals=4),
        throughput("GB/s", "bytes", "it", 1e9),
        figure("copy, ms", "copy", "it", decimals=4),
        ratio("of a copy", "it", "copy", "ours"),
    ]
    for key, name in others.items():
        columns += [figure(name, key, "it", decimals=4), ratio("speed-up", "it", key, "ours")]
    return columns
