"""The cases of ssd_chunk_scan for sanitizer_cases.py: names and inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import ssd_helpers
import torch
from sanitizer_comparison import Inputs
from summary_helpers import SSD_SUMMARY

SSD_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SSD_PADDED = (
    {"headdim": 1, "dstate": 1},
    {"headdim": 7, "dstate": 17},
    {"headdim": 200, "dstate": 24},
    {"headdim": 7, "dstate": 137},
    {"headdim": 100, "dstate": 100},
    {"headdim": 36, "dstate": 130},
)


def ssd_paths() -> Iterator[tuple[str, Inputs]]:
    """Cases for the paths that the kernels of forward and of backward share."""
    for method in ssd_helpers.METHODS:
        yield ssd_case("method", discretization=method)
    for name, options in ssd_helpers.OPTIONS.items():
        yield ssd_case(name, **options)
    for sizes in SSD_PADDED:
        yield ssd_case("padded", **sizes)
    for seqlen, reverse in itertools.product((0, 1, 63, 64, 65), (False, True)):
        yield ssd_case("length", seqlen=seqlen, reverse=reverse)
    yield ssd_case("many blocks", batch=40, heads=10, groups=1, seqlen=65)
    for name in ("everything", "resets_with_states", "packed_with_states", "packed_with_resets", "reverse_packed_with_resets"):
        yield ssd_case(name, **(ssd_helpers.OPTIONS[name] | {"dtype": torch.float32, "dstate": 128, "heads": 3, "groups": 1}))
    for sizes in ({"headdim": 7, "dstate": 17}, {"headdim": 100, "dstate": 130}):
        yield ssd_case("padded", dtype=torch.float32, **sizes)


def ssd_cases() -> Iterator[tuple[str, Inputs]]:
    """For the dtypes with fused kernels: each kernel of forward (dtype, up to 64 states and more, sequences shorter and longer
    than a block's range of chunks), then each path inside them."""
    for dtype in SSD_DTYPES:
        for dstate in (64, 128, 256):
            yield ssd_case("kernel", dtype=dtype, dstate=dstate)
            yield ssd_case("short sequences", dtype=dtype, dstate=dstate, seqlen=25, resets=((3, 9), (1,)))
            yield ssd_case("longer than a run", dtype=dtype, dstate=dstate, batch=1, heads=2, groups=1, seqlen=1000)
            for headdim, states_at in ((64, (64, 128, 192)), (60, (0, 128, 150, 256))):  # in the result, in a workspace
                sizes = {"dtype": dtype, "dstate": dstate, "headdim": headdim, "seqlen": 300}
                yield ssd_case("states", states_at, **sizes, resets=((64, 140), ()))
    yield from ssd_paths()
    yield ssd_case("heads without a partner", heads=3, groups=3)
    yield ssd_case("heads without a partner", heads=3, groups=1)
    for dstate in (64, 256):
        sizes = {"heads": 2, "groups": 1, "dstate": dstate}
        yield ssd_case("resets, longer than a run", **sizes, batch=1, seqlen=1000, resets=((1, 64, 65, 700),))
        for reverse in (False, True):
            yield ssd_case("packed, longer than a run", **sizes, cu_seqlens=(0, 0, 700, 701, 1500, 1500), reverse=reverse)
    sizes = {"heads": 2, "groups": 1, "dstate": 128, "dtype": torch.float32}
    yield ssd_case("resets, longer than a run", **sizes, batch=1, seqlen=1000, resets=((1, 64, 65, 700),))
    yield ssd_case("in two runs", batch=3, heads=120, groups=1, seqlen=500)
    yield ssd_case("packed, in two runs", heads=160, groups=1, cu_seqlens=(0, 0, 300, 364, 365, 900, 900))


def ssd_gradient_cases() -> Iterator[tuple[str, Inputs]]:
    """Like ssd_cases, for backward: each kernel (dtype, up to 64 states and more, with a gate, with work tiles that are
    cut along time), then each path inside them."""
    for dtype in SSD_DTYPES:
        for dstate in (64, 128, 256):
            for z in (True, False):
                yield ssd_case("kernel", dtype=dtype, dstate=dstate, z=z)
            yield ssd_case("cut along time", dtype=dtype, dstate=dstate, batch=1, heads=3, groups=1, seqlen=64 * 8 + 5)
    yield from ssd_paths()
    for heads, groups in ((1, 1), (3, 3), (9, 1)):
        yield ssd_case("heads", heads=heads, groups=groups)
    for headdim in (128, 256):
        yield ssd_case("units of a head", headdim=headdim, heads=3, groups=1, dstate=128)
    yield ssd_case("few chunks, heads of a group in several blocks", batch=1, heads=80, groups=2, seqlen=65)
    yield ssd_case("many chunks", batch=1, heads=2, groups=1, seqlen=1000)
    for states in (True, False):
        sizes = {"heads": 2, "groups": 1, "initial_states": states}
        yield ssd_case("resets in chunks", **sizes, seqlen=200, resets=((1, 64, 65, 199), (63, 127, 128)))
        yield ssd_case("packed, of several chunks", **sizes, cu_seqlens=(0, 0, 64, 65, 200, 200))
        yield ssd_case("packed, of no steps", **sizes, cu_seqlens=(0, 0, 0))
        yield ssd_case("resets, cut along time", **sizes, batch=1, seqlen=1000, resets=((1, 64, 65, 700),))
        yield ssd_case("packed, cut along time", **sizes, cu_seqlens=(0, 0, 700, 701, 1500, 1500))
    for layout in ("transposed", "channels_first", "offset"):
        for sizes in ({}, *SSD_PADDED):
            yield ssd_case("layout", layout=layout, **sizes)


def ssd_case(name: str, states_at: Sequence[int] = (), **options: Any) -> tuple[str, Inputs]:
    sizes = {"headdim": 64, "dstate": 64, "seqlen": 130, "dtype": torch.bfloat16}
    return f"{name} {options}", ssd_helpers.make_inputs(**(sizes | options)) | ({"states_at": states_at} if states_at else {})


def ssd_limited_cases() -> Iterator[tuple[str, Inputs, int, int]]:
    """Backward in sub-batches and with less shared memory: name, inputs, and the limits of workspace and shared memory."""
    plenty = 2**40
    packed = {"headdim": 7, "cu_seqlens": (0, 0, 65, 130)}
    for sizes in ({"heads": 4, "groups": 2}, {"dstate": 17, **packed}, {"dstate": 137, **packed}):
        for workspace in (1, 2**17):
            yield *ssd_case(f"sub-batches in {workspace} bytes", **sizes), workspace, plenty
    for dstate in (64, 128, 256):
        for kibibytes in (99, 163):
            yield *ssd_case(f"{kibibytes} KiB of shared memory", dstate=dstate, seqlen=600), plenty, 1024 * kibibytes
    sizes = {"dstate": 137, "dtype": torch.float32, **packed}
    yield *ssd_case("sub-batches", **sizes), 1, plenty
    yield *ssd_case("163 KiB of shared memory", **sizes), plenty, 1024 * 163
    yield *ssd_case("163 KiB of shared memory", **(sizes | {"dstate": 100})), plenty, 1024 * 163


def ssd_span_cases() -> Iterator[tuple[str, Inputs, bool]]:
    """Name and inputs for the kernels of the states after a span, and whether it is the mirror: ``x`` is then the gradient
    of the outputs, and ``B`` is C."""

    def case(name: str, **options: Any) -> Iterator[tuple[str, Inputs, bool]]:
        sizes = {"headdim": 64, "dstate": 64, "seqlen": 130, "dtype": torch.bfloat16}
        inputs = SSD_SUMMARY.make_inputs(**(sizes | options))
        for reverse in (False, True):
            yield f"{'initial gradient' if reverse else 'states after a span'}, {name} {options}", inputs, reverse

    for dtype in SSD_DTYPES:
        for dstate in (64, 128, 256):
            yield from case("kernel", dtype=dtype, dstate=dstate)
        yield from case("segments", dtype=dtype, batch=1, heads=130, groups=1, seqlen=700, headdim=16, dstate=16)
        yield from case("resets", dtype=dtype, seqlen=200, resets=((1, 64, 65, 199), (63, 127, 128)))
    for sizes in SSD_PADDED:
        yield from case("padded", **sizes)
    for seqlen in (0, 1, 63, 64, 65):
        yield from case("length", seqlen=seqlen)
    for heads, groups in ((1, 1), (3, 3), (9, 1)):
        yield from case("heads", heads=heads, groups=groups)
    for layout in ("transposed", "channels_first", "offset"):
        yield from case("layout", layout=layout)
