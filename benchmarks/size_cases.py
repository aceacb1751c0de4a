"""The cases of ``bench_sizes.py``: one factor at a time around a base size of each operator, and every size's neighbor.

A size's *neighbor* is the next larger multiple of 8 in length, columns, first column and width, and of 16 in N and P, all else
equal. A size that is its own neighbor is only compared with mamba_ssm, and between kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import ssm_kernels
from benchmarks import peers
from benchmarks.benchmark import PEER, Contender, Function, outputs_of
from benchmarks.harness import Stages, graph_of
from benchmarks.layer_cases import make_layers
from ssm_kernels._recurrences import recurrences

BF16, FP32 = torch.bfloat16, torch.float32
LENGTHS = (2048, 2047, 2046, 2044, 2040, 1369, 777, 197, 63, 17, 1)
FIRST_COLUMNS = (8, 4, 2, 1)
# The multiple to which the neighbor rounds a size up, by its letter. A letter that is missing keeps its size.
MULTIPLES = {"L": 8, "T": 8, "D": 8, "C": 8, "H": 8, "N": 16, "P": 16, "first": 8, "of": 8, "d_model": 8}


def rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class SizeCase:
    """A row: an operator, its sizes by letter, a dtype and a layout.

    Attributes:
        operator: the operator or layer; without "_scan" where a recurrence has it.
        kind: the factor that differs from the base.
        sizes: pairs of a letter and a size, in the order of the name. "first" is the first column, or step where these are
            contiguous, of rows that are "of" a width.
        layout: words in the name.
        with_peer: whether mamba_ssm's kernel runs beside ours. Its Triton kernels are compiled anew for many sizes.
    """

    operator: str
    kind: str
    sizes: tuple[tuple[str, int], ...]
    dtype: torch.dtype = BF16
    layout: str = ""
    with_peer: bool = True

    @property
    def name(self) -> str:
        words = [self.operator, "fp32" if self.dtype == FP32 else "bf16"]
        words += [f"{letter}{size}" if len(letter) == 1 else f"{letter} {size}" for letter, size in self.sizes]
        words += [self.layout] if self.layout else []
        return " ".join(words)

    @property
    def size(self) -> dict[str, int]:
        return dict(self.sizes)

    @property
    def rounded_letters(self) -> Mapping[str, int]:
        """Heads are not columns."""
        return {letter: of for letter, of in MULTIPLES.items() if not (letter == "H" and "P" in self.size)}

    @property
    def neighbor(self) -> SizeCase:
        multiples, size = self.rounded_letters, self.size
        sizes = tuple((letter, rounded(size, multiples.get(letter, 1))) for letter, size in self.sizes)
        if self.operator == "Mamba2":  # as many heads, of the neighbor's headdim
            larger = size["d_model"] * rounded(size["P"], 16) // size["P"]
            sizes = tuple((letter, larger if letter == "d_model" else found) for letter, found in sizes)
        return self if sizes == self.sizes else replace(self, sizes=sizes)

    @property
    def turns(self) -> str:
        """Sizes of one neighbor take turns with it."""
        return self.neighbor.name

    @property
    def fields(self) -> dict[str, Any]:
        dtype = str(self.dtype).removeprefix("torch.")
        return {
            "operator": self.operator,
            "kind": self.kind,
            "dtype": dtype,
            "sizes": self.size,
            "neighbor": self.neighbor.name,
        }

    def draw(self, device: torch.device) -> Draw:
        size = self.size
        return Draw(torch.Generator(device).manual_seed(0), self.dtype, size.get("first", 0), size.get("of"))


class Draw:
    """Random tensors of a dtype, whose rows are cut out of wider ones."""

    def __init__(self, generator: torch.Generator, dtype: torch.dtype, first: int, width: int | None) -> None:
        self.generator, self.dtype, self.first, self.width = generator, dtype, first, width

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.generator.device, dtype=dtype or self.dtype)

    def parameter(self, *shape: int) -> Tensor:
        return self.normal(*shape, dtype=FP32)

    def rows(self, *shape: int, inner: int = 1) -> Tensor:
        """``inner`` axes make a row. Rows are as far apart as the width says, plus what they are longer than the columns."""
        if self.width is None:
            return self.normal(*shape)
        length = math.prod(shape[-inner:])
        wide = self.normal(*shape[:-inner], max(self.width, rounded(self.first + length, 8) + self.width % 8))
        return wide[..., self.first : self.first + length].unflatten(-1, shape[-inner:])


# The sizes of one call, by operator.
Make = Callable[[SizeCase, torch.device], tuple[Function, dict[str, Tensor]]]


def selective_scan(case: SizeCase, device: torch.device) -> tuple[Function, dict[str, Tensor]]:
    size, draw = case.size, case.draw(device)
    batch, dim, seqlen, dstate = (size[letter] for letter in "BDLN")
    matrix = (size["G"], dstate) if "G" in size else (dstate,)
    if case.layout == "D-contiguous":
        u, delta, z = (draw.rows(batch, seqlen, dim).mT for _ in range(3))
        B, C = (draw.rows(batch, seqlen, *matrix, inner=len(matrix)).movedim(1, -1) for _ in range(2))
    else:
        u, delta, z = (draw.rows(batch, dim, seqlen) for _ in range(3))
        B, C = (draw.rows(batch, *matrix, seqlen) for _ in range(2))
    A = -torch.arange(1, dstate + 1, device=device, dtype=FP32).expand(dim, dstate).contiguous()
    parameters = {"A": A, "D": draw.parameter(dim), "delta_bias": draw.parameter(dim) - 4}
    inputs = {"u": u, "delta": delta.mul_(0.1), "A": parameters["A"], "B": B, "C": C, "D": parameters["D"], "z": z}
    return functools.partial(ssm_kernels.selective_scan, delta_softplus=True), inputs | {"delta_bias": parameters["delta_bias"]}


def causal_conv1d(case: SizeCase, device: torch.device) -> tuple[Function, dict[str, Tensor]]:
    size, draw = case.size, case.draw(device)
    batch, seqlen, channels = (size[letter] for letter in "BLC")
    channels_first = case.layout == "channels-first"
    x = draw.rows(batch, channels, seqlen).mT if channels_first else draw.rows(batch, seqlen, channels)
    inputs = {"x": x, "weight": draw.normal(channels, 4).div_(2), "bias": draw.normal(channels)}
    return functools.partial(ssm_kernels.causal_conv1d, activation="silu"), inputs


def norm(case: SizeCase, device: torch.device) -> tuple[Function, dict[str, Tensor]]:
    size, draw = case.size, case.draw(device)
    columns = size["C"] * size.get("G", 1)
    x, other = (draw.rows(size["R"], columns) for _ in range(2))
    inputs = {"x": x, "weight": draw.parameter(columns), "residual" if case.operator.startswith("add") else "z": other}
    inputs |= {"bias": draw.parameter(columns)} if "layer" in case.operator else {}
    options = {"group_size": size["C"]} if "G" in size else {}
    return functools.partial(getattr(ssm_kernels, case.operator), eps=1e-5, **options), inputs


# By the names of the cases: the inputs that do not broadcast.
RECURRENCES = {
    "linear_scan" if name == "linear_scan" else name.removesuffix("_scan"): tuple(
        key for key in row.inputs if key not in row.broadcast
    )
    for name, row in recurrences.items()
}


def recurrence(case: SizeCase, device: torch.device) -> tuple[Function, dict[str, Tensor]]:
    size, draw = case.size, case.draw(device)
    batch, seqlen, channels = (size[letter] for letter in "BTH")
    time_contiguous = case.layout == "T-contiguous"
    names = RECURRENCES[case.operator]
    inputs = {
        name: draw.rows(batch, channels, seqlen).mT if time_contiguous else draw.rows(batch, seqlen, channels) for name in names
    }
    for name in inputs.keys() & {"a", "log_gate"}:
        (inputs[name].sigmoid_() if name == "a" else inputs[name].abs_().neg_())
    if case.operator == "rglru":
        inputs["recurrent_param"] = draw.parameter(channels)
    if case.operator == "liquid":
        inputs |= {"tau": draw.parameter(channels).abs_() + 1, "dt": draw.normal(batch, seqlen, 1).abs_()}
    name = case.operator if case.operator.endswith("_scan") else f"{case.operator}_scan"
    return getattr(ssm_kernels, name), inputs


def ssd_chunk_scan(case: SizeCase, device: torch.device) -> tuple[Function, dict[str, Tensor]]:
    size, draw = case.size, case.draw(device)
    batch, seqlen, heads, headdim, dstate, groups = (size[letter] for letter in "BLHPNG")
    x = draw.rows(batch, seqlen, heads, headdim, inner=2)
    B, C = (draw.rows(batch, seqlen, groups, dstate, inner=2).mul_(0.5) for _ in range(2))
    inputs = {"x": x, "dt": draw.rows(batch, seqlen, heads).mul_(0.1), "A": -1 - draw.parameter(heads).abs_(), "B": B, "C": C}
    inputs |= {"D": draw.parameter(heads)}
    if case.layout == "z":
        inputs["z"] = draw.rows(batch, seqlen, heads, headdim, inner=2)
    inputs["dt_bias"] = draw.parameter(heads) - 4
    return functools.partial(ssm_kernels.ssd_chunk_scan, dt_softplus=True), inputs


def selective_state_update(case: SizeCase, device: torch.device) -> tuple[Function, dict[str, Tensor]]:
    size, draw = case.size, case.draw(device)
    batch, dim, dstate = (size[letter] for letter in "BDN")
    x, dt, z = (draw.rows(batch, dim) for _ in range(3))
    B, C = (draw.rows(batch, dstate) for _ in range(2))
    inputs = {
        "state": draw.parameter(batch, dim, dstate),
        "x": x,
        "dt": dt,
        "A": -1 - draw.parameter(dim, dstate).abs_(),
        "B": B,
        "C": C,
        "D": draw.parameter(dim),
        "z": z,
        "dt_bias": draw.parameter(dim) - 4,
    }
    return functools.partial(ssm_kernels.selective_state_update, dt_softplus=True), inputs


NORMS = ("rms_norm_gated", "layer_norm_gated", "add_rms_norm", "add_layer_norm")
MAKERS: dict[str, Make] = {
    "selective_scan": selective_scan,
    "causal_conv1d": causal_conv1d,
    **dict.fromkeys(NORMS, norm),
    **dict.fromkeys(RECURRENCES, recurrence),
    "ssd_chunk_scan": ssd_chunk_scan,
    "selective_state_update": selective_state_update,
}
LAYERS = ("Mamba", "Mamba2")
# Those of which mamba_ssm's have Triton kernels.
TRITON_OPERATORS = ("ssd_chunk_scan", "rms_norm_gated", "add_rms_norm", "selective_state_update", "Mamba2")
# The operators whose kernels an option chooses, with its values by name; the calls take turns with the choice by default.
CHOICES: dict[str, tuple[str, dict[str, int]]] = {
    "selective_scan": ("selective_scan_kernel", {"sequential": 1, "warp scan": 2}),
    **dict.fromkeys(RECURRENCES, ("linear_scan_kernel", {"tiles": 1, "sequential": 2})),
    "causal_conv1d": ("causal_conv1d_kernel", {"by layout": 1}),
}


def forced(stages: Mapping[str, Stages], option: str, value: int) -> dict[str, Stages]:
    """The same stages, during which the option has the value."""
    set_option = torch.ops.ssm_kernels._set_debug_option

    def wrapped(stage: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            before = set_option(option, value)
            try:
                return stage(*args)
            finally:
                set_option(option, before)

        return call

    return {what: [wrapped(stage) for stage in of_one] for what, of_one in stages.items()}


def contender_of(case: SizeCase, device: torch.device) -> Contender:
    function, inputs = MAKERS[case.operator](case, device)
    if case.operator == "selective_state_update":
        return Contender(function, inputs, [])
    with torch.no_grad():
        outputs = outputs_of(function, inputs)
    generator = torch.Generator(device).manual_seed(1)
    return Contender(function, inputs, [torch.empty_like(out).normal_(generator=generator) for out in outputs])


def peer_of(case: SizeCase, ours: Contender) -> Contender | None:
    """mamba_ssm's kernel on the same tensors, where it is installed and computes the same."""
    peer = peers.operator(case.operator) if case.with_peer else None
    if peer is None or (case.operator in NORMS and "G" in case.size):
        return None
    # Its CUDA kernels load vectors from wherever rows start: a misaligned address ends the process's use of the GPU.
    if case.operator in ("selective_scan", "causal_conv1d") and case.size.get("first", 0) % 8:
        return None
    if case.operator == "selective_state_update":
        return Contender(lambda **inputs: peer({**inputs, "dt_softplus": True}), ours.inputs, [])
    return ours._replace(function=peer, grads=ours.grads[:1])


def aligned_copy(tensor: Tensor) -> Tensor:
    """The same values in the same order of axes, with rows that start at multiples of 8 elements of aligned memory.

    A row is made of the innermost axes that are contiguous without gaps.
    """
    axes = sorted((axis for axis in range(tensor.dim()) if tensor.shape[axis] > 1), key=tensor.stride)
    strides, step, dense = [1] * tensor.dim(), 1, 1
    for axis in axes:
        if tensor.stride(axis) != dense:  # here a row ends
            step, dense = rounded(step, 8), -1
        strides[axis] = step
        step *= tensor.shape[axis]
        dense = dense * tensor.shape[axis] if dense > 0 else -1
    # Gaps after the rows of a dense tensor of more than one axis, too: its last axis of memory is a row.
    if dense > 0 and len(axes) > 1:
        strides[axes[0]] = 1
        step = rounded(tensor.shape[axes[0]], 8)
        for axis in axes[1:]:
            strides[axis] = step
            step *= tensor.shape[axis]
    return torch.empty(max(1, step), dtype=tensor.dtype, device=tensor.device).as_strided(tensor.shape, strides).copy_(tensor)


def is_aligned(tensor: Tensor) -> bool:
    unit = 16 // tensor.element_size()
    strides = (stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1 and stride != 1)
    return tensor.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in strides)


def different_bits(ours: Contender) -> dict[str, float]:
    """The results and gradients whose bits differ from those of aligned copies, with their relative differences."""
    tensors = [*(value for value in ours.inputs.values() if value.dim() > 1), *ours.grads]
    if not ours.grads or all(map(is_aligned, tensors)):
        return {}
    copies = {name: aligned_copy(value) if value.dim() > 1 else value for name, value in ours.inputs.items()}
    names = [f"out{index or ''}" for index in range(len(ours.grads))]
    found = ours.results(names)
    expected = ours._replace(inputs=copies, grads=[aligned_copy(grad) for grad in ours.grads]).results(names)
    different = {}
    for name, value in found.items():
        other = expected[name]
        if not torch.equal(value, other):
            different[name] = ((value.double() - other.double()).norm() / other.double().norm()).item()
    return different


def layer_calls(layer: nn.Module, case: SizeCase, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward, and forward with backward."""
    generator = torch.Generator(device).manual_seed(1)
    shape = tuple(case.size[letter] for letter in ("B", "L", "d_model"))
    x, grad = (torch.randn(shape, generator=generator, device=device, dtype=case.dtype) for _ in range(2))
    leaf = x.clone().requires_grad_()
    wanted = [leaf, *layer.parameters()]

    def forward() -> Tensor:
        with torch.no_grad():
            return layer(x)

    def both() -> Any:
        return torch.autograd.grad(layer(leaf), wanted, grad)

    return forward, both


def layer_stages(layer: nn.Module, case: SizeCase, device: torch.device) -> dict[str, Stages]:
    """Captures forward, and forward with backward, in CUDA graphs, so that times leave out the host's."""
    forward, both = layer_calls(layer, case, device)
    for call in (forward, both):
        if device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    call()
            torch.cuda.current_stream().wait_stream(stream)
    return {"forward": [graph_of(forward, device)], "backward": [graph_of(both, device)]}


def stages_of(case: SizeCase, device: torch.device) -> tuple[dict[str, Callable[[], Mapping[str, Stages]]], dict[str, float]]:
    """Returns what makes each contender's stages, by name, and the results whose bits differ from aligned copies."""
    if case.operator in LAYERS:
        options = {"headdim": case.size["P"]} if "P" in case.size else {}
        layers = make_layers(case.operator, case.size["d_model"], device, case.dtype, **options)
        return {
            who: functools.partial(layer_stages, layer, case, device)
            for who, layer in layers.items()
            if who == "ours" or case.with_peer
        }, {}
    ours = contender_of(case, device)
    whats = ("forward", "backward") if ours.grads else ("forward",)
    makers: dict[str, Callable[[], Mapping[str, Stages]]] = {"ours": lambda: ours.stages(*whats)}
    option, values = CHOICES.get(case.operator, ("", {}))
    for kernel, value in values.items():
        # Kernels need the states that they themselves have saved.
        def make(value: int = value) -> Mapping[str, Stages]:
            before = torch.ops.ssm_kernels._set_debug_option(option, value)
            try:
                return forced(ours.stages(*whats), option, value)
            finally:
                torch.ops.ssm_kernels._set_debug_option(option, before)

        makers[kernel] = make
    peer = peer_of(case, ours)
    if peer is not None:
        makers[PEER] = lambda: peer.stages(*whats)
    return makers, different_bits(ours)


def triton_call(case: SizeCase, device: torch.device) -> Callable[[], Any] | None:
    """As ``Case.triton_call``."""
    if not case.with_peer or case.operator not in TRITON_OPERATORS:
        return None
    if case.operator not in LAYERS and (peers.operator(case.operator) is None or (case.operator in NORMS and "G" in case.size)):
        return None

    def call_operator() -> None:
        peer = peer_of(case, contender_of(case, device))
        for stages in peer.stages(*(("forward", "backward") if peer.grads else ("forward",))).values() if peer else ():
            for stage in stages:
                stage()

    def call_layer() -> None:
        options = {"headdim": case.size["P"]} if "P" in case.size else {}
        layer = make_layers(case.operator, case.size["d_model"], device, case.dtype, **options)[PEER]
        forward, both = layer_calls(layer, case, device)
        forward(), both()

    return call_layer if case.operator in LAYERS else call_operator


# ----- the grid


def around(base: SizeCase, kind: str, letter: str, sizes: Iterable[int], **changes: Any) -> list[SizeCase]:
    """The base with other sizes of one letter."""
    return [
        replace(base, kind=kind, sizes=tuple((name, size if name == letter else old) for name, old in base.sizes), **changes)
        for size in sizes
    ]


def sizes(**letters: int) -> tuple[tuple[str, int], ...]:
    return tuple(letters.items())


def slices(base: SizeCase, width: int, firsts: Sequence[int] = FIRST_COLUMNS, **changes: Any) -> list[SizeCase]:
    """The base, cut out of rows of a width."""
    return [
        replace(base, kind="first column", sizes=(*base.sizes, ("first", first), ("of", width)), **changes) for first in firsts
    ]


def of_selective_scan(dtype: torch.dtype) -> list[SizeCase]:
    base = SizeCase("selective_scan", "length", sizes(B=8, D=1024, L=2048, N=16), dtype)
    found = around(base, "length", "L", LENGTHS)
    found += slices(base, 2064)
    found += around(base, "columns", "D", (1032, 1028, 1026, 1025))
    found += around(base, "states", "N", (8, 9, 10, 12, 13, 20, 24, 100, 130))
    # Blocks that do not fill the device, and the choice of kernels.
    for batch, dim in ((1, 1536), (2, 1536), (3, 1280), (16, 768), (64, 192), (8, 2048), (32, 1024)):
        shape = replace(base, sizes=sizes(B=batch, D=dim, L=2048, N=16))
        found += around(shape, "batch x channels", "L", (2048, 2047, 1369) if dtype == BF16 else (2048, 2047))
    for groups in (1, 3, 12):
        shape = replace(base, sizes=sizes(B=8, D=768, L=2048, N=16, G=groups))
        found += around(shape, "groups", "L", (2048, 2047))
    inner = replace(base, sizes=sizes(B=4, D=1280, L=1024, N=16), layout="D-contiguous")
    found += around(inner, "columns", "D", (1280, 1284, 1282, 1283, 1288))
    found += around(inner, "length", "L", (1023, 777, 197, 17, 1))
    found += slices(inner, 2560) + slices(inner, 2565, (0,))
    return found


def of_causal_conv1d(dtype: torch.dtype) -> list[SizeCase]:
    first = SizeCase("causal_conv1d", "length", sizes(B=8, L=2048, C=1536), dtype, "channels-first")
    last = replace(first, sizes=sizes(B=4, L=2048, C=2048), layout="")
    found = around(first, "length", "L", LENGTHS)
    found += around(first, "columns", "C", (1544, 1540, 1538, 1537))
    found += slices(first, 2064)
    found += [
        replace(case, kind="batch x channels")
        for c in (1536, 4096)
        for case in around(replace(first, sizes=sizes(B=1, L=2048, C=c)), "", "L", (2048, 2047))
    ]
    found += around(last, "columns", "C", (2048, 2056, 2052, 2050, 2047, 1804))
    found += around(last, "length", "L", (2047, 1369, 777, 197, 63, 17, 1))
    found += slices(last, 4096, (0, *FIRST_COLUMNS)) + slices(last, 4101, (0,))
    found += slices(replace(last, sizes=sizes(B=4, L=2048, C=1804)), 3608, (4,))
    return found


def of_norms(dtype: torch.dtype) -> list[SizeCase]:
    found = []
    for operator in NORMS:
        base = SizeCase(operator, "columns", sizes(R=8192, C=2560), dtype)
        found += around(base, "columns", "C", (2560, 2568, 2564, 2562, 2561, 96, 100, 97, 768, 770, 192, 200))
        found += around(base, "columns", "C", (5120, 5121))
        found += [replace(base, sizes=sizes(R=2048, C=columns)) for columns in (12288, 12289, 12292)]
        found += slices(base, 5128)
        found += around(base, "length", "R", (2047, 197, 17, 1))
        if operator.endswith("gated"):
            found += [
                replace(base, kind="groups", sizes=sizes(R=8192, C=c, G=g))
                for c, g in ((1536, 1), (512, 3), (513, 3), (516, 3), (64, 24), (50, 24), (49, 24))
            ]
    return [replace(case, with_peer=case.size["C"] in (2560, 2561, 12288, 770) and "first" not in case.size) for case in found]


def of_recurrences(dtype: torch.dtype) -> list[SizeCase]:
    found = []
    for operator in RECURRENCES:
        base = SizeCase(operator, "columns", sizes(B=8, T=2048, H=1024), dtype)
        found += around(base, "columns", "H", (1024, 1020, 1022, 1023))
        if operator not in ("linear_scan", "mingru", "minlstm"):
            continue
        found += around(base, "columns", "H", (1016, 192, 200, 770, 63))
        found += around(base, "length", "T", (2047, 1369, 777, 197, 63, 17, 1))
        found += slices(base, 2048) + slices(base, 2053, (0,))
        inner = replace(base, layout="T-contiguous")
        found += around(inner, "length", "T", (2048, 2047, 2046, 2044, 1369, 197, 17))
        for batch, channels in ((1, 1536), (3, 1280), (1, 4096), (16, 768), (32, 1024)):
            found += [
                replace(base, kind="batch x channels", sizes=sizes(B=batch, T=2048, H=channels - less)) for less in (0, 4, 1)
            ]
    return found


def of_ssd_chunk_scan(dtype: torch.dtype) -> list[SizeCase]:
    base = SizeCase("ssd_chunk_scan", "length", sizes(B=4, L=2048, H=24, P=64, N=128, G=1), dtype)
    found = around(base, "length", "L", LENGTHS)
    found += around(base, "headdim", "P", (48, 80, 100, 112, 128, 50, 65))
    found += around(base, "states", "N", (8, 12, 16, 24, 100, 101, 130))
    found += around(base, "groups", "G", (3, 24))
    found += around(replace(base, sizes=sizes(B=4, L=2047, H=24, P=64, N=16, G=3)), "groups", "G", (3, 24))
    found += slices(base, 3352) + slices(base, 3353, (0,))
    found += slices(replace(base, sizes=sizes(B=4, L=2048, H=12, P=64, N=128, G=1), layout="z"), 1804, (0, 4))
    small = replace(base, sizes=sizes(B=1, L=2048, H=24, P=64, N=128, G=1))
    found += around(small, "batch x channels", "L", (2048, 2047)) + around(small, "batch x channels", "H", (48, 80))
    # The sizes at which mamba_ssm's kernels run, which are compiled anew for most of them.
    with_peer = {
        "length": ("L", (2048, 2047, 1369, 197)),
        "headdim": ("P", (100, 128)),
        "states": ("N", (16, 100)),
        "groups": ("G", (3,)),
    }

    def runs(case: SizeCase) -> bool:
        letter, kept = with_peer.get(case.kind, ("L", ()))
        if dtype != BF16 and case.kind != "length":
            return False
        return case.size["B"] == 4 and case.size["L"] in (2047, *with_peer["length"][1]) and case.size[letter] in kept

    return [replace(case, with_peer=runs(case)) for case in found]


def of_selective_state_update(dtype: torch.dtype) -> list[SizeCase]:
    base = SizeCase("selective_state_update", "columns", sizes(B=64, D=2048, N=16), dtype)
    found = around(base, "columns", "D", (2048, 2044, 2046, 2047)) + around(base, "states", "N", (8, 12, 13, 24, 100, 130))
    found += slices(base, 4096) + around(replace(base, sizes=sizes(B=1, D=2048, N=16)), "batch x channels", "D", (2048, 2047))
    return [replace(case, with_peer=case.size["N"] == 16) for case in found]


def of_layers(dtype: torch.dtype) -> list[SizeCase]:
    found = []
    # Mamba2's heads have to divide its channels.
    headdims = {192: 64, 200: 80, 384: 64, 768: 64, 770: 70, 776: 97, 1000: 80}
    for layer in LAYERS:
        for d_model, headdim in headdims.items():
            letters = {"B": 4, "L": 2048, "d_model": d_model} | ({"P": headdim} if layer == "Mamba2" else {})
            base = SizeCase(layer, "columns", sizes(**letters), dtype, with_peer=layer == "Mamba" or dtype == BF16)
            found += around(base, "layer", "L", (2048, 2047, 1369))
    return found


FAMILIES = (
    of_selective_scan,
    of_causal_conv1d,
    of_norms,
    of_recurrences,
    of_ssd_chunk_scan,
    of_selective_state_update,
    of_layers,
)


def with_neighbors(cases: Iterable[SizeCase]) -> list[SizeCase]:
    """Each case once, and each neighbor that is not among them after the first case that needs it."""
    by_name: dict[str, SizeCase] = {}
    listed = {case.name: case for case in reversed(list(cases))}
    for case in reversed(listed.values()):
        by_name.setdefault(case.name, case)
        neighbor = case.neighbor
        by_name.setdefault(neighbor.name, listed.get(neighbor.name, neighbor))
    return list(by_name.values())


def all_cases() -> list[SizeCase]:
    return with_neighbors(case for dtype in (BF16, FP32) for family in FAMILIES for case in family(dtype))
