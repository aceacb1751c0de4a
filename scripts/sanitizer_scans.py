"""The cases of selective_scan for sanitizer_cases.py: the scan, its summary and the gradient of its initial state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from helpers import DTYPES, METHODS, move_all, set_debug_option
from operator_spec import with_gradients
from sanitizer_comparison import Check, Inputs, difference_between
from selective_scan_helpers import MINIMAL, SELECTIVE_SCAN, TENSORS, make_inputs
from torch import Tensor

from ssm_kernels import selective_scan_summary
from ssm_kernels.ops.summaries import _selective_scan_initial_gradient

RESULTS = ("out", "last_state")
# A tile of the sequential scan with rows of whole vectors, for its path without bounds checks.
VECTORS = {"dim": 64, "seqlen": 128}


class ScanCase(NamedTuple):
    """A call: the results that have a gradient, and the inputs that require gradients."""

    name: str
    inputs: Inputs
    through: tuple[str, ...] = RESULTS
    wanted: tuple[str, ...] = TENSORS


def scan_cases() -> Iterator[ScanCase]:
    """Each kernel (dtype, method), then each path inside them."""

    def case(name: str, through: tuple[str, ...] = RESULTS, wanted: tuple[str, ...] = TENSORS, **options: Any) -> ScanCase:
        sizes = {"dim": 21, "seqlen": 70, "dstate": 16, "dtype": torch.float32}
        return ScanCase(f"{name} {options}", make_inputs(**(sizes | options)), through, wanted)

    for dtype in DTYPES:
        for method in METHODS:
            yield case("method", dtype=dtype, discretization=method)
        # Whole vectors along time and along channels, then unaligned rows and strided elements.
        for method in METHODS if dtype != torch.float64 else ("zoh",):
            for layout in ("contiguous", "transposed"):
                yield case("vectors", **VECTORS, dtype=dtype, discretization=method, layout=layout)
        for layout in ("transposed", "permuted", "offset", "sliced"):
            yield case("layout", dtype=dtype, dim=37, seqlen=129, groups=1, layout=layout)
        # Rows that start and end between multiples of 16 bytes, at the end of an allocation and inside of one.
        for seqlen, layout in ((68, "contiguous"), (69, "contiguous"), (71, "contiguous"), (96, "offset")):
            yield case("shifted rows", dtype=dtype, dim=64, seqlen=seqlen, layout=layout)
        yield case("inference", (), dtype=dtype, dim=37, seqlen=130)
        yield case("required only", dtype=dtype, **MINIMAL)
        for layout in ("contiguous", "transposed"):
            yield case("short sequences", dtype=dtype, dim=40, seqlen=27, layout=layout)
        yield case("segments", dtype=dtype, batch=1, dim=5, seqlen=6300, dstate=5)
    for method in METHODS:
        yield case("method, tiles of long sequences", dim=9, seqlen=140, discretization=method)
    for dtype in (torch.float32, torch.bfloat16):
        for dim, seqlen in ((1, 1), (5, 63), (33, 65), (70, 200)):
            yield case("tails", dtype=dtype, dim=dim, seqlen=seqlen)
        # Too many channels for one warp per channel, over more than one tile of steps.
        yield case("many channels", dtype=dtype, batch=100, dim=72, seqlen=130, dstate=2)
        yield case("many tiles of channels", dtype=dtype, dim=250, dstate=3)
        for B, C in (("constant", "constant"), ("constant", "variable"), ("variable", "constant")):
            yield case("constant", dtype=dtype, B=B, C=C)
    for dstate in (1, 3, 17, 40, 256):
        yield case("dstate", dim=5, dstate=dstate)
    yield case("dstate", dim=5, dstate=256, dtype=torch.float64)
    for option in MINIMAL:
        yield case("without", **{option: False})
        yield case("vectors, without", **VECTORS, **{option: False})
    for groups in (2, 10):
        yield case("groups", dim=20, groups=groups)
    groups = case("groups of B and of C", dim=20, groups=10)
    other_C = make_inputs(dim=20, seqlen=70, dstate=16, groups=4, dtype=torch.float32)["C"]
    yield groups._replace(inputs=groups.inputs | {"C": other_C})
    packed = {"cu_seqlens": (0, 0, 1, 33, 33, 65, 193, 200, 200)}
    for dtype in DTYPES:
        for options in ({}, {"initial_state": False}, {"resets": ((1, 32, 97, 192),)}, {"B": "constant", "C": "constant"}):
            yield case("packed", dtype=dtype, **packed, **options)
        for dstate in (5, 16, 40):
            sizes = {"dim": 64, "dstate": dstate}
            yield case("packed, whole vectors along channels", dtype=dtype, layout="transposed", **packed, **sizes)
    yield case("sequences of seq_idx", batch=2, seqlen=130, resets=((1, 32, 97), (64,)))
    yield case("packed, many tiles of channels", dim=250, dstate=3, **packed)
    for dtype in DTYPES:
        for layout, seqlen in (("contiguous", 128), ("contiguous", 200), ("offset", 131), ("transposed", 131), ("sliced", 70)):
            yield case("reverse", reverse=True, dim=64, seqlen=seqlen, dtype=dtype, layout=layout)
        yield case("reverse, short", reverse=True, dtype=dtype, dim=40, seqlen=27)
        yield case("reverse, packed", reverse=True, dtype=dtype, dim=64, layout="transposed", **packed)
        yield case("reverse, segments", reverse=True, dtype=dtype, batch=1, dim=5, seqlen=6300, dstate=5)
    whole = case("expanded")
    expanded = {"delta": whole.inputs["delta"][:, :1].expand(2, 21, 70), "B": whole.inputs["B"][:1].expand(2, 16, 70)}
    yield whole._replace(inputs=whole.inputs | expanded)
    for result in RESULTS:
        yield case("gradient of one result", (result,))
        yield case("vectors, gradient of one result", (result,), **VECTORS)
        yield case("vectors, gradient of one result, without z", (result,), **VECTORS, z=False)
        yield case("gradient of one result, segments", (result,), batch=1, dim=3, seqlen=6300, dstate=3)
    for wanted in (*((name,) for name in TENSORS), ("u", "delta", "z"), ("B", "A")):
        for sizes in ({}, VECTORS, {"B": "constant", "C": "constant"}):
            yield case(f"gradients of {', '.join(wanted)}", wanted=wanted, **sizes)
    segments = {"batch": 1, "dim": 4, "seqlen": 6300, "dstate": 3}
    yield case("vectors, segments", batch=1, dim=64, seqlen=512)
    yield case("vectors, segments", batch=1, dim=64, seqlen=512, layout="transposed", z=False)
    yield case("segments", **segments, layout="transposed", groups=2)
    yield case("segments", **segments, discretization="bilinear", z=False)
    yield case("segments", **segments, B="constant", C="constant", initial_state=False)
    yield case("segments, inference", (), **segments, dtype=torch.bfloat16)


def ways(inputs: Inputs) -> tuple[str, ...]:
    """The kinds of kernels that take such a call."""
    per_step = inputs["B"].dim() > 2 and inputs["C"].dim() > 2
    is_sequential = per_step and inputs["A"].shape[1] <= 16 and inputs["u"].dtype != torch.float64
    # Short sequences have a third kind, which runs if neither of these is preferred.
    return ("warp_scan", "sequential", *(["faster"] if inputs["u"].shape[2] <= 32 else [])) if is_sequential else ("warp_scan",)


def move_whole_blocks(inputs: Inputs, device: str) -> Inputs:
    """As move_all, but the memory ends on a multiple of the 16 bytes of an asynchronous copy (cp.async): the tools count all of
    them, also where the kernel reads only the first of them and fills the others with zeros. Those others are NaN here."""

    def moved(tensor: Tensor) -> Tensor:
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        whole = -(-elements * tensor.element_size() // 16) * 16 // tensor.element_size()
        memory = tensor.new_full((whole,), math.nan if tensor.is_floating_point() else 0, device=device)
        memory[:elements].copy_(tensor.as_strided((elements,), (1,), 0))
        return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return {name: moved(value) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def evaluate_scan(case: ScanCase, cotangents: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    inputs, cotangents = move_whole_blocks(case.inputs, device), move_all(cotangents, device)
    if not case.through:
        return dict(zip(RESULTS, SELECTIVE_SCAN(**inputs), strict=True))
    leaves = with_gradients(inputs)
    results = dict(zip(RESULTS, SELECTIVE_SCAN(**leaves), strict=True))
    wanted = [name for name in case.wanted if leaves[name] is not None]
    incoming = [cotangents[name] for name in case.through]
    gradients = torch.autograd.grad([results[name] for name in case.through], [leaves[name] for name in wanted], incoming)
    return results | {f"grad_{name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}


def check_scan(case: ScanCase, way: str) -> str | None:
    set_debug_option("selective_scan_kernel", way)
    cotangents = dict(zip(RESULTS, SELECTIVE_SCAN.make_cotangents(case.inputs), strict=True))
    expected, actual = (evaluate_scan(case, cotangents, device) for device in ("cpu", "cuda"))
    return difference_between(f"{way}, {case.name}", actual, expected)


def is_plain(inputs: Inputs) -> bool:
    """Whether a summary takes these inputs: it knows no cu_seqlens and no reverse scan."""
    return inputs["cu_seqlens"] is None and not inputs["reverse"]


def check_summary(case: ScanCase, way: str) -> str | None:
    set_debug_option("selective_scan_kernel", way)
    results = []
    for device in ("cpu", "cuda"):
        inputs = move_whole_blocks(case.inputs, device)
        shared = {name: inputs[name] for name in ("delta_bias", "discretization", "delta_softplus", "seq_idx")}
        u, delta, A, B, C = (inputs[name] for name in ("u", "delta", "A", "B", "C"))
        last_state, decay = selective_scan_summary(u, delta, A, B, **shared)
        gradient = _selective_scan_initial_gradient(u, delta, A, C, z=inputs["z"], **shared)
        results.append({"last_state": last_state, "decay": decay, "initial gradient": gradient})
    return difference_between(f"summary, {way}, {case.name}", results[1], results[0])


def scan_checks() -> Iterator[Check]:
    for case in scan_cases():
        yield from (partial(check_scan, case, way) for way in ways(case.inputs))
        if is_plain(case.inputs):
            yield from (partial(check_summary, case, way) for way in ("sequential", "warp_scan"))
