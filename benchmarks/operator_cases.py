"""Operators as cases: their tensors, the calls on them, the part that is compared, and the bytes that a call must move.

The scans are subclasses of :class:`OperatorCase` in the benchmarks of their own. The causal convolution and the norms are here,
because several benchmarks time them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ssm_kernels
from benchmarks import peers
from benchmarks.benchmark import PEER, Case, Contender, Contest, Copy, Function, Run, outputs_of
from benchmarks.harness import Stages
from benchmarks.tables import DIRECTIONS, Column, figure, ratio, throughput, versus
from ssm_kernels import reference

EPS = 1e-5
# How many steps of the first sequence are compared with the reference. No operator's step depends on later ones.
COMPARED_STEPS = 256


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Draws float32 numbers on the generator's device and rounds them to the dtype."""
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


class OperatorCase(Case):
    """A differentiable operator on tensors of one size, compared for a part of these, then timed beside its peers.

    Attributes:
        operator: its name in ``ssm_kernels`` and in ``ssm_kernels.reference``.
        options: its arguments that are not tensors.
        compared_options: those that the comparison adds.
        results: the names of its outputs, those that the comparison adds included.
        timed: the stages of a :class:`Contender`.
        peer_name: the contender of mamba_ssm's kernel in a row.
        compares_others: whether peers are compared with the exact result too.
        limits: by dtype, the relative L2 errors beyond which an output and a gradient are wrong. Rounding the exact result to
            bfloat16 makes 1.7e-3.
    """

    operator: str
    options: Mapping[str, Any] = MappingProxyType({})
    compared_options: Mapping[str, Any] = MappingProxyType({})
    results: tuple[str, ...] = ("out",)
    timed: tuple[str, ...] = DIRECTIONS
    peer_name = "peer"
    compares_others = False
    dtype: torch.dtype
    limits: Mapping[torch.dtype, tuple[float, float]]

    def inputs(self, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
        raise NotImplementedError

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """The part of an argument or a result that is compared, as a view. It depends on no other part."""
        raise NotImplementedError

    def allowed(self, name: str) -> float:
        """The error beyond which a result or a gradient is wrong."""
        return self.limits[self.dtype][name.startswith("grad_")]

    def amounts(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Further entries of the row: the bytes that must move, and the like."""
        raise NotImplementedError

    @property
    def peer(self) -> Function | None:
        """mamba_ssm's kernel, if it is installed and computes the same."""
        return peers.operator(self.operator)

    def others(self, ours: Contender, run: Run) -> dict[str, Contender | Copy]:
        peer = self.peer
        return {} if peer is None else {self.peer_name: ours._replace(function=peer)}

    def function(self, module: ModuleType = ssm_kernels) -> Function:
        return functools.partial(getattr(module, self.operator), **self.options)

    def exact_function(self) -> Function:
        """Returns the function that computes the exact result: the CPU kernel, in float64."""
        return self.function()

    @property
    def fields(self) -> dict[str, Any]:
        dtypes = {name: str(value).removeprefix("torch.") for name, value in vars(self).items() if "dtype" in name and value}
        return {"kind": "operator", **asdict(self), **dtypes}

    def contender(self, device: torch.device, seed: int = 0) -> Contender:
        """Ours. The incoming gradients have the strides of the outputs, as a model of this layout passes them to backward."""
        inputs = self.inputs(device, seed)
        with torch.no_grad():
            outputs = outputs_of(self.function(), inputs)
        generator = torch.Generator(device).manual_seed(seed + 1)
        grads = [torch.empty_like(out).normal_(generator=generator) for out in outputs]
        return Contender(self.function(), inputs, grads)

    def compared(self, contender: Contender) -> dict[str, Tensor]:
        """The compared part of the contender's results and gradients. The incoming gradient is zero for all other parts."""
        masked = [torch.zeros_like(grad) for grad in contender.grads]
        for name, target, grad in zip(self.results, masked, contender.grads, strict=False):
            self.part(name, target).copy_(self.part(name, grad))
        function = functools.partial(contender.function, **self.compared_options)
        return self.parts(Contender(function, contender.inputs, masked).results(self.results))

    def exact(self, ours: Contender) -> dict[str, Tensor]:
        """The same of the exact result, which is computed for that part alone."""
        grads = [self.part(name, grad).cpu().double() for name, grad in zip(self.results, ours.grads, strict=False)]
        doubles = {name: tensor.cpu().double() for name, tensor in self.parts(ours.inputs).items()}
        function = functools.partial(self.exact_function(), **self.compared_options)
        return Contender(function, doubles, grads).results(self.results)

    def parts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.part(name.removeprefix("grad_"), tensor) for name, tensor in tensors.items()}

    def prepare(self, who: str, contender: Contender | Copy, figures: dict[str, Any], run: Run) -> Mapping[str, Stages]:
        if isinstance(contender, Contender):
            figures["peak_bytes"] = contender.peak_bytes()  # compiles and tunes peers that do so
        return contender.stages(*self.timed)

    def contest(self, run: Run) -> Contest:
        ours = self.contender(run.device)

        def results(contender: Contender | Copy) -> dict[str, Tensor]:
            is_compared = contender is ours or (self.compares_others and isinstance(contender, Contender))
            return self.compared(contender) if is_compared else {}

        prepare = functools.partial(self.prepare, run=run)
        contenders = {"ours": ours, **self.others(ours, run)}
        return Contest(contenders, results, self.exact(ours), prepare, self.allowed, self.amounts(ours.inputs))


class ComposedOperatorCase(OperatorCase):
    """An operator that PyTorch's functions compute too, beside these, mamba_ssm's kernel and copies of as many bytes."""

    results = ("out 0", "out 1")
    peer_name = PEER
    compares_others = True
    limits = MappingProxyType({torch.bfloat16: (1.2e-2, 4e-2), torch.float32: (1e-5, 1e-5)})

    def by_pytorch(self, **tensors: Tensor) -> Any:
        raise NotImplementedError

    def moved_bytes(self) -> dict[str, int]:
        """Bytes that forward and backward must read and write, parameters left out."""
        raise NotImplementedError

    def part(self, name: str, tensor: Tensor) -> Tensor:
        return (
            tensor
            if tensor.dim() == 1 or name == "weight"
            else tensor[(slice(1),) * (tensor.dim() - 2)][..., :COMPARED_STEPS, :]
        )

    def exact_function(self) -> Function:
        return self.function(reference)

    def amounts(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"bytes": self.moved_bytes()}

    def others(self, ours: Contender, run: Run) -> dict[str, Contender | Copy]:
        by_pytorch, copy = ours._replace(function=self.by_pytorch), Copy(self.moved_bytes(), run.device)
        return {"PyTorch": by_pytorch, **super().others(ours, run), "copy": copy}


@dataclass(frozen=True)
class Convolution(ComposedOperatorCase):
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
    operator = "causal_conv1d"
    options = MappingProxyType({"activation": "silu"})

    @property
    def name(self) -> str:
        layout = "channels-first" if self.channels_first else f"of {self.columns or self.channels} columns"
        return f"{self.operator} B{self.batch} L{self.seqlen} C{self.channels} {layout}"

    def inputs(self, device: torch.device, seed: int = 0) -> dict[str, Any]:
        draw = functools.partial(normal, torch.Generator(device).manual_seed(seed), dtype=self.dtype)
        if self.channels_first:
            x = draw(self.batch, self.channels, self.seqlen).mT
        else:
            columns = self.columns or self.channels
            start = (columns - self.channels) // 2 // 8 * 8
            x = draw(self.batch, self.seqlen, columns)[..., start : start + self.channels]
        return {"x": x, "weight": draw(self.channels, self.width) / 2, "bias": draw(self.channels)}

    def contender(self, device: torch.device, seed: int = 0) -> Contender:
        ours = super().contender(device, seed)
        if self.cu_seqlens is None:
            return ours
        offsets = torch.tensor(self.cu_seqlens, dtype=torch.int32, device=device)
        return ours._replace(function=functools.partial(ours.function, cu_seqlens=offsets))

    def others(self, ours: Contender, run: Run) -> dict[str, Contender | Copy]:
        found = super().others(ours, run)
        return found if self.cu_seqlens is None else {"copy": found["copy"]}

    def by_pytorch(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        padded = F.conv1d(x.mT, weight[:, None], bias, padding=self.width - 1, groups=self.channels)
        return F.silu(padded[..., : x.shape[1]]).mT

    def moved_bytes(self) -> dict[str, int]:
        tensor = self.batch * self.seqlen * self.channels * self.dtype.itemsize
        return {"forward": 2 * tensor, "backward": 3 * tensor}


@dataclass(frozen=True)
class Norm(ComposedOperatorCase):
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
    def name(self) -> str:
        sizes = [f"{letter}{size}" for letter, size in zip("BL" if len(self.rows) == 2 else "R", self.rows, strict=True)]
        return " ".join([self.operator, *sizes, f"C{self.columns}"])

    @property
    def is_add(self) -> bool:
        return self.operator.startswith("add")

    @property
    def subtract_mean(self) -> bool:
        return "layer" in self.operator

    @property
    def options(self) -> dict[str, Any]:
        gate = {} if self.is_add else {"group_size": self.group_size, "norm_before_gate": self.norm_before_gate}
        return {"eps": EPS, **gate}

    @property
    def peer(self) -> Function | None:
        is_plain = self.group_size is None and not self.norm_before_gate and not self.bias
        computes_same = is_plain and (not self.is_add or self.residual_dtype == torch.float32)
        return super().peer if computes_same else None

    def triton_call(self, device: torch.device) -> Callable[[], Any] | None:
        peer = self.peer
        return None if peer is None else lambda: self.contender(device)._replace(function=peer).results(self.results)

    def inputs(self, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
        draw = functools.partial(normal, torch.Generator(device).manual_seed(seed))

        def sliced() -> Tensor:
            return draw(*self.rows, self.slice_of or self.columns, dtype=self.dtype)[..., : self.columns]

        def parameter() -> Tensor:
            return draw(self.columns, dtype=self.weight_dtype)

        inputs = {"x": sliced()}
        if self.is_add:
            inputs["residual"] = draw(*self.rows, self.columns, dtype=self.residual_dtype or self.dtype)
        inputs["weight"] = 1 + parameter() / 8
        if not self.is_add:
            inputs["z"] = sliced()
        return inputs | ({"bias": parameter()} if self.bias else {})

    def by_pytorch(
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


def operator_columns(others: Mapping[str, str]) -> list[Column]:
    """The columns of operators' rows ``by_direction``; others by key and name."""
    columns = [
        figure("ms", "ours", "it", decimals=4),
        throughput("GB/s", "bytes", "it", 1e9),
        figure("copy, ms", "copy", "it", decimals=4),
        ratio("of a copy", "it", "copy", "ours"),
    ]
    return columns + [column for key, name in others.items() for column in versus(name, key, "it", decimals=4)]
