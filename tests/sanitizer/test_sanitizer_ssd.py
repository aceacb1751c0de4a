"""ssd_chunk_scan, its states at positions and after a span for compute-sanitizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import ssd_helpers
import torch
from helpers import uninitialized_memory_is_nan
from sanitizer import PYTESTMARK, assert_close_to_cpu, assert_same_on_gpu, both_devices, over
from ssd_helpers import limited_shared_memory, limited_workspace, preferred_products
from summary_helpers import SSD_SUMMARY

from ssm_kernels import ssd_chunk_scan_summary
from ssm_kernels.ops.summaries import _ssd_chunk_scan_initial_gradient

pytestmark = PYTESTMARK

# Name, options of make_inputs, and the positions at which the call returns states.
Case = tuple[str, dict[str, Any], tuple[int, ...]]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PADDED = (
    {"headdim": 1, "dstate": 1},
    {"headdim": 7, "dstate": 17},
    {"headdim": 200, "dstate": 24},
    {"headdim": 7, "dstate": 137},
    {"headdim": 100, "dstate": 100},
    {"headdim": 36, "dstate": 130},
)


def paths() -> Iterator[Case]:
    """Cases for the paths that the kernels of forward and of backward share."""
    for method in ssd_helpers.METHODS:
        yield case("method", discretization=method)
    for name, options in ssd_helpers.OPTIONS.items():
        yield case(name, **options)
    for sizes in PADDED:
        yield case("padded", **sizes)
    for seqlen, reverse in itertools.product((0, 1, 63, 64, 65), (False, True)):
        yield case("length", seqlen=seqlen, reverse=reverse)
    yield case("many blocks", batch=40, heads=10, groups=1, seqlen=65)
    packed = ("packed_with_states", "packed_with_resets", "reverse_packed_with_resets", "log_decay_packed")
    for name in ("everything", "resets_with_states", *packed, "log_decay_and_gain"):
        yield case(name, **(ssd_helpers.OPTIONS[name] | {"dtype": torch.float32, "dstate": 128, "heads": 3, "groups": 1}))
    for sizes in ({"headdim": 7, "dstate": 17}, {"headdim": 100, "dstate": 130}):
        yield case("padded", dtype=torch.float32, **sizes)


def forward_cases() -> Iterator[Case]:
    """For the dtypes with fused kernels: each kernel of forward (dtype, up to 64 states and more, sequences shorter and longer
    than a block's range of chunks), then each path inside them."""
    for dtype in DTYPES:
        for dstate in (64, 128, 256):
            yield case("kernel", dtype=dtype, dstate=dstate)
            yield case("short sequences", dtype=dtype, dstate=dstate, seqlen=25, resets=((3, 9), (1,)))
            for log_decay in (False, True):
                sizes = {"batch": 1, "heads": 2, "groups": 1, "seqlen": 1000}
                yield case("longer than a run", dtype=dtype, dstate=dstate, log_decay=log_decay, **sizes)
            for headdim, states_at in ((64, (64, 128, 192)), (60, (0, 128, 150, 256))):  # in the result, in a workspace
                sizes = {"dtype": dtype, "dstate": dstate, "headdim": headdim, "seqlen": 300}
                yield case("states", states_at, **sizes, resets=((64, 140), ()))
    yield from paths()
    yield case("heads without a partner", heads=3, groups=3)
    yield case("heads without a partner", heads=3, groups=1)
    for dstate in (64, 256):
        sizes = {"heads": 2, "groups": 1, "dstate": dstate}
        yield case("resets, longer than a run", **sizes, batch=1, seqlen=1000, resets=((1, 64, 65, 700),))
        for reverse in (False, True):
            yield case("packed, longer than a run", **sizes, cu_seqlens=(0, 0, 700, 701, 1500, 1500), reverse=reverse)
    sizes = {"heads": 2, "groups": 1, "dstate": 128, "dtype": torch.float32}
    yield case("resets, longer than a run", **sizes, batch=1, seqlen=1000, resets=((1, 64, 65, 700),))
    yield case("in two runs", batch=3, heads=120, groups=1, seqlen=500)
    yield case("packed, in two runs", heads=160, groups=1, cu_seqlens=(0, 0, 300, 364, 365, 900, 900))


def backward_cases() -> Iterator[Case]:
    """Like forward_cases, for backward: each kernel (dtype, up to 64 states and more, with a gate, with work tiles that are
    cut along time), then each path inside them."""
    for dtype in DTYPES:
        for dstate in (64, 128, 256):
            for z in (True, False):
                yield case("kernel", dtype=dtype, dstate=dstate, z=z)
            for log_decay in (False, True):
                sizes = {"batch": 1, "heads": 3, "groups": 1, "seqlen": 64 * 8 + 5}
                yield case("cut along time", dtype=dtype, dstate=dstate, log_decay=log_decay, **sizes)
    yield from paths()
    for heads, groups in ((1, 1), (3, 3), (9, 1)):
        yield case("heads", heads=heads, groups=groups)
    for headdim in (128, 256):
        yield case("units of a head", headdim=headdim, heads=3, groups=1, dstate=128)
    yield case("few chunks, heads of a group in several blocks", batch=1, heads=80, groups=2, seqlen=65)
    yield case("many chunks", batch=1, heads=2, groups=1, seqlen=1000)
    for states in (True, False):
        sizes = {"heads": 2, "groups": 1, "initial_states": states}
        yield case("resets in chunks", **sizes, seqlen=200, resets=((1, 64, 65, 199), (63, 127, 128)))
        yield case("packed, of several chunks", **sizes, cu_seqlens=(0, 0, 64, 65, 200, 200))
        yield case("packed, of no steps", **sizes, cu_seqlens=(0, 0, 0))
        yield case("resets, cut along time", **sizes, batch=1, seqlen=1000, resets=((1, 64, 65, 700),))
        yield case("packed, cut along time", **sizes, cu_seqlens=(0, 0, 700, 701, 1500, 1500))
    for layout in ("transposed", "channels_first", "offset"):
        for sizes in ({}, *PADDED):
            yield case("layout", layout=layout, **sizes)


def case(name: str, states_at: Sequence[int] = (), **options: Any) -> Case:
    sizes = {"headdim": 64, "dstate": 64, "seqlen": 130, "dtype": torch.bfloat16}
    return f"{name} {options}", sizes | options, tuple(states_at)


def limited_cases() -> Iterator[tuple[Any, ...]]:
    """Backward in sub-batches and with less shared memory: name, inputs, and the limits of workspace and shared memory."""
    plenty = 2**40
    packed = {"headdim": 7, "cu_seqlens": (0, 0, 65, 130)}
    for sizes in ({"heads": 4, "groups": 2}, {"dstate": 17, **packed}, {"dstate": 137, **packed}):
        for workspace in (1, 2**17):
            yield *case(f"sub-batches in {workspace} bytes", **sizes), workspace, plenty
    for dstate in (64, 128, 256):
        for kibibytes in (99, 163):
            yield *case(f"{kibibytes} KiB of shared memory", dstate=dstate, seqlen=600), plenty, 1024 * kibibytes
    sizes = {"dstate": 137, "dtype": torch.float32, **packed}
    yield *case("sub-batches", **sizes), 1, plenty
    yield *case("163 KiB of shared memory", **sizes), plenty, 1024 * 163
    yield *case("163 KiB of shared memory", **(sizes | {"dstate": 100})), plenty, 1024 * 163


def span_cases() -> Iterator[tuple[Any, ...]]:
    """Name and inputs for the kernels of the states after a span, and whether it is the mirror: ``x`` is then the gradient
    of the outputs, and ``B`` is C."""

    def span(name: str, **options: Any) -> Iterator[tuple[Any, ...]]:
        sizes = {"headdim": 64, "dstate": 64, "seqlen": 130, "dtype": torch.bfloat16}
        for reverse in (False, True):
            yield f"{'initial gradient' if reverse else 'states after a span'}, {name} {options}", sizes | options, reverse

    for dtype in DTYPES:
        for dstate in (64, 128, 256):
            yield from span("kernel", dtype=dtype, dstate=dstate)
        yield from span("segments", dtype=dtype, batch=1, heads=130, groups=1, seqlen=700, headdim=16, dstate=16)
        yield from span("resets", dtype=dtype, seqlen=200, resets=((1, 64, 65, 199), (63, 127, 128)))
    for sizes in PADDED:
        yield from span("padded", **sizes)
    for seqlen in (0, 1, 63, 64, 65):
        yield from span("length", seqlen=seqlen)
    for heads, groups in ((1, 1), (3, 3), (9, 1)):
        yield from span("heads", heads=heads, groups=groups)
    for layout in ("transposed", "channels_first", "offset"):
        yield from span("layout", layout=layout)
    for dtype in DTYPES:
        yield from span("log decays", dtype=dtype, log_decay=True, seqlen=200, resets=((1, 64, 65), (63, 127)))


# ----- tests


def by_products(cases: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """With either kind of matrix products; float32 has one."""
    for name, options, *others in cases:
        for products in ("wgmma",) if options["dtype"] == torch.float32 else ("wgmma", "mma"):
            yield f"{products}, {name}", options, *others, products


def assert_scan_is_the_same_on_gpu(
    options: dict[str, Any], states_at: Sequence[int], products: str, gradients: bool, *limits: AbstractContextManager[Any]
) -> None:
    operator = ssd_helpers.SSD_STATES if states_at else ssd_helpers.SSD
    inputs = ssd_helpers.make_inputs(**options) | ({"states_at": states_at} if states_at else {})
    contexts = [preferred_products(products), *limits]
    # initcheck does not see the writes of TMA stores (cp.async.bulk.tensor), but filled memory counts as
    # written. The comparison finds elements that a kernel does not write, or reads too early.
    if products == "wgmma":
        contexts.append(uninitialized_memory_is_nan())
    in_16_bits = inputs["x"].element_size() == 2
    assert_same_on_gpu(operator, inputs, wanted=None if gradients else (), contexts=contexts, in_16_bits=in_16_bits)


@over("options, states_at, products", by_products(forward_cases()))
def test_forward(options, states_at, products):
    assert_scan_is_the_same_on_gpu(options, states_at, products, False)


@over("options, states_at, products", by_products(backward_cases()))
def test_backward(options, states_at, products):
    assert_scan_is_the_same_on_gpu(options, states_at, products, True)


@over("options, states_at, workspace, shared, products", by_products(limited_cases()))
def test_little_memory(options, states_at, workspace, shared, products):
    limits = limited_workspace(workspace), limited_shared_memory(shared)
    assert_scan_is_the_same_on_gpu(options, states_at, products, True, *limits)


@over("options, reverse, products", by_products(span_cases()))
def test_states_of_a_span(options, reverse, products):
    inputs = SSD_SUMMARY.make_inputs(**options)
    results = []
    with preferred_products(products):
        for moved in both_devices(inputs):
            if reverse:
                mirrored = {name: value for name, value in moved.items() if name not in ("x", "B", "gain")}
                gradient = _ssd_chunk_scan_initial_gradient(moved["x"], C=moved["B"], **mirrored)
                results.append({"initial_gradient": gradient})
            else:
                results.append(dict(zip(("final_states", "decay"), ssd_chunk_scan_summary(**moved), strict=True)))
    assert_close_to_cpu(results[1], results[0], in_16_bits=inputs["x"].element_size() == 2)
