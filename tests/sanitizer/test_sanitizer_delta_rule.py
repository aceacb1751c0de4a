"""delta_rule_scan for compute-sanitizer: the kernels of compute capability 9.0 and those by mma.sync."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import sanitizer
import torch
from delta_rule_helpers import GATES, OPTIONS, evaluate_on, make_inputs
from helpers import uninitialized_memory_is_nan
from sanitizer import PYTESTMARK, assert_close_to_cpu, choose_kernel, kernels_of, over
from ssd_helpers import limited_workspace

pytestmark = PYTESTMARK

# Name, options of make_inputs, the positions at which the call returns states, and the kernels that take it.
Case = tuple[str, dict[str, Any], tuple[int, ...], str]
FAMILY = "delta_rule_scan"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# key_dim and value_dim: padded tiles, several tiles of values, and the kernels of wide keys.
SIZES = ((1, 1), (7, 20), (96, 192), (128, 130), (137, 24), (256, 130))
PACKED_PIECES = (0, 0, 64, 65, 200, 200)
# Steps of a sequence of one head that an H200 cuts into segments.
SEGMENTED = 8300


def case(name: str, kernels: str, states_at: tuple[int, ...] = (), **options: Any) -> Case:
    sizes = {"key_dim": 64, "value_dim": 64, "seqlen": 130, "dtype": torch.bfloat16}
    return f"{kernels}, {name} {options}", sizes | options, states_at, kernels


def every_kernel(dtype: torch.dtype) -> tuple[str, ...]:
    """float32 has the kernels by mma.sync alone."""
    return ("mma",) if dtype == torch.float32 else tuple(kernels_of(FAMILY))


def cases() -> Iterator[Case]:
    """Each kernel (dtype, kind of gate, up to 128 columns of keys and more), then each path inside them."""
    for dtype, (name, gate), (key_dim, value_dim) in itertools.product(DTYPES, GATES.items(), SIZES):
        if gate.get("gate") == "channel" and (dtype == torch.float32 or key_dim > 128):
            continue  # PyTorch's matmuls
        for kernels in ("wgmma",) if gate.get("gate") == "channel" else every_kernel(dtype):
            yield case(name, kernels, dtype=dtype, key_dim=key_dim, value_dim=value_dim, **gate)
    for name, options in OPTIONS.items():
        for kernels in kernels_of(FAMILY):
            yield case(name, kernels, **options)
    for seqlen, kernels, gate in itertools.product((0, 1, 63, 64, 65), kernels_of(FAMILY), ("head", "channel")):
        yield case("length", kernels, seqlen=seqlen, gate=gate)
    for kernels, gate in itertools.product(kernels_of(FAMILY), (None, "head", "channel")):
        yield case("packed", kernels, cu_seqlens=PACKED_PIECES, gate=gate)
        yield case("resets", kernels, seqlen=200, resets=((1, 64, 65, 199), (63, 127, 128)), gate=gate)
        yield case("states", kernels, (0, 64, 70, 130), gate=gate)
        yield case("updates", kernels, gate=gate, num_householder=3)
        yield case("one head in segments", kernels, batch=1, seqlen=SEGMENTED, heads=1, value_heads=1, gate=gate)
        bounds = (0, SEGMENTED, SEGMENTED + 1, 2 * SEGMENTED)
        yield case("one head in segments, packed", kernels, cu_seqlens=bounds, heads=1, value_heads=1, gate=gate)
        inside = {"raw": "softplus", "qk_l2norm": True, "beta_sigmoid": True, "num_householder": 2}
        if gate is not None:
            yield case("inside", kernels, gate=gate, **inside)
    for layout, kernels in itertools.product(("transposed", "channels_first", "offset"), kernels_of(FAMILY)):
        for key_dim, value_dim in ((64, 64), (7, 20)):
            yield case("layout", kernels, layout=layout, key_dim=key_dim, value_dim=value_dim)
    yield case("many blocks", "wgmma", batch=40, heads=4, value_heads=8, seqlen=65)


def assert_same(options: dict[str, Any], states_at: tuple[int, ...], *contexts: AbstractContextManager[Any]) -> None:
    """Results and gradients are close to those of the CPU."""
    inputs = make_inputs(**options)
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    others = {name: value for name, value in inputs.items() if name not in tensors and value is not None}
    if states_at:
        others["states_at"] = states_at
    expected = evaluate_on(tensors, "cpu", False, **others)
    with ExitStack() as stack:
        # initcheck does not see the writes of TMA stores, but filled memory counts as written. The comparison finds elements
        # that a kernel does not write, or reads too early.
        for context in (uninitialized_memory_is_nan(), *contexts):
            stack.enter_context(context)
        actual = evaluate_on(tensors, sanitizer.DEVICE, False, **others)
    assert_close_to_cpu(actual, expected, in_16_bits=inputs["q"].element_size() == 2)


@over("options, states_at, kernels", cases())
def test_scan(options, states_at, kernels):
    assert_same(options, states_at, choose_kernel(FAMILY, kernels))


def limited_cases() -> Iterator[Case]:
    """Backward over a few heads and rows at a time."""
    for kernels, gate in itertools.product(kernels_of(FAMILY), ("head", "channel")):
        yield case("little workspace", kernels, gate=gate)
        yield case("little workspace", kernels, gate=gate, cu_seqlens=PACKED_PIECES)


@over("options, states_at, kernels", limited_cases())
def test_little_workspace(options, states_at, kernels):
    assert_same(options, states_at, choose_kernel(FAMILY, kernels), limited_workspace(1))
