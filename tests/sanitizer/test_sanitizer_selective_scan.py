"""selective_scan, its summary and the gradient of its initial state for compute-sanitizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from helpers import DTYPES, METHODS, debug_option
from sanitizer import PYTESTMARK, Inputs, assert_close_to_cpu, assert_same_on_gpu, both_devices, over
from selective_scan_helpers import MINIMAL, SELECTIVE_SCAN, TENSORS, make_inputs

from ssm_kernels import selective_scan_summary
from ssm_kernels.ops.summaries import _selective_scan_initial_gradient

pytestmark = PYTESTMARK

RESULTS = ("out", "last_state")
# A tile of the sequential scan with rows of whole vectors, for its path without bounds checks.
VECTORS = {"dim": 64, "seqlen": 128}


class Case(NamedTuple):
    """A call: the options of make_inputs, the results that have a gradient, and the inputs that require gradients."""

    name: str
    options: dict[str, Any]
    through: tuple[str, ...] = RESULTS
    wanted: tuple[str, ...] = TENSORS


def cases() -> Iterator[Case]:
    """Each kernel (dtype, method), then each path inside them."""

    def case(name: str, through: tuple[str, ...] = RESULTS, wanted: tuple[str, ...] = TENSORS, **options: Any) -> Case:
        sizes = {"dim": 21, "seqlen": 70, "dstate": 16, "dtype": torch.float32}
        return Case(f"{name} {options}", sizes | options, through, wanted)

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


def kernels(options: dict[str, Any]) -> tuple[str, ...]:
    """The kinds of kernels that take such a call."""
    per_step = "constant" not in (options.get("B"), options.get("C"))
    if not per_step or options["dstate"] > 16 or options["dtype"] == torch.float64:
        return ("warp_scan",)
    seqlen = options["cu_seqlens"][-1] if "cu_seqlens" in options else options["seqlen"]
    # Short sequences have a third kind, which runs if neither of these is preferred.
    return ("warp_scan", "sequential", *(["faster"] if seqlen <= 32 else []))


def assert_scan_is_the_same_on_gpu(inputs: Inputs, kernel: str, case: Case) -> None:
    wanted = [name for name in case.wanted if inputs[name] is not None] if case.through else ()
    choice = debug_option("selective_scan_kernel", kernel)
    assert_same_on_gpu(SELECTIVE_SCAN, inputs, wanted=wanted, through=case.through, contexts=[choice])


def by_kernel(chosen: Iterator[Case]) -> Iterator[tuple[Any, ...]]:
    for case in chosen:
        yield from ((f"{kernel}, {case.name}", case, kernel) for kernel in kernels(case.options))


@over("case, chosen", by_kernel(cases()))
def test_scan(case, chosen):
    assert_scan_is_the_same_on_gpu(make_inputs(**case.options), chosen, case)


SIZES = {"seqlen": 70, "dstate": 16, "dtype": torch.float32}
of_either_scan = over("chosen", ((name, name) for name in ("warp_scan", "sequential")))


@of_either_scan
def test_groups_of_B_and_of_C(chosen):
    inputs = make_inputs(dim=20, groups=10, **SIZES) | {"C": make_inputs(dim=20, groups=4, **SIZES)["C"]}
    assert_scan_is_the_same_on_gpu(inputs, chosen, Case("groups", {}))
    assert_summary_is_the_same_on_gpu(inputs, chosen)


@of_either_scan
def test_expanded_inputs(chosen):
    inputs = make_inputs(dim=21, **SIZES)
    inputs |= {"delta": inputs["delta"][:, :1].expand(2, 21, 70), "B": inputs["B"][:1].expand(2, 16, 70)}
    assert_scan_is_the_same_on_gpu(inputs, chosen, Case("expanded", {}))
    assert_summary_is_the_same_on_gpu(inputs, chosen)


def assert_summary_is_the_same_on_gpu(inputs: Inputs, kernel: str) -> None:
    results = []
    with debug_option("selective_scan_kernel", kernel):
        for moved in both_devices(inputs):
            shared = {name: moved[name] for name in ("delta_bias", "discretization", "delta_softplus", "seq_idx")}
            u, delta, A, B, C = (moved[name] for name in ("u", "delta", "A", "B", "C"))
            last_state, decay = selective_scan_summary(u, delta, A, B, **shared)
            gradient = _selective_scan_initial_gradient(u, delta, A, C, z=moved["z"], **shared)
            results.append({"last_state": last_state, "decay": decay, "initial gradient": gradient})
    assert_close_to_cpu(results[1], results[0])


# A summary takes no cu_seqlens and does not scan in reverse.
@of_either_scan
@over("case", ((case.name, case) for case in cases() if not case.options.keys() & {"cu_seqlens", "reverse"}))
def test_summary(case, chosen):
    assert_summary_is_the_same_on_gpu(make_inputs(**case.options), chosen)
