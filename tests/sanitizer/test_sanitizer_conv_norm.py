"""causal_conv1d and the norms for compute-sanitizer: each kernel, then each path inside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import conv_helpers
import norm_helpers
import torch
from helpers import DTYPES, debug_option
from sanitizer import PYTESTMARK, assert_same_on_gpu, over

pytestmark = PYTESTMARK


def conv_cases() -> Iterator[tuple[Any, ...]]:
    """Options of make_inputs and the gradients asked for: each kernel (dtype, layout, width), then each path inside them."""

    def case(what: str, wanted: tuple[str, ...] = conv_helpers.TENSORS, **options: Any) -> tuple[Any, ...]:
        sizes = {"channels": 72, "seqlen": 136, "dtype": torch.float32}
        return f"{what} {options}", sizes | options, wanted

    cuts: tuple[dict[str, Any], ...] = ({}, {"seq_idx": True}, {"cu_seqlens": conv_helpers.PACKED})
    cuts += (cuts[1] | cuts[2],)
    absent = {"bias": False, "initial_state": False, "activation": None}
    for dtype in DTYPES:
        for layout in ("contiguous", *conv_helpers.LAYOUTS):
            for cut in cuts:
                yield case("cut", dtype=dtype, layout=layout, **cut)
            for width in (1, 2, 3, 4, 5, 9):
                yield case("width", dtype=dtype, layout=layout, width=width)
            yield case("required only", dtype=dtype, layout=layout, **absent)
            yield case("parameters in the dtype of x", dtype=dtype, layout=layout, weight_dtype=dtype)
        for layout in ("transposed", "permuted", "offset", "sliced"):
            yield case("layout", dtype=dtype, layout=layout, channels=37, seqlen=129)
    for dtype in (torch.float32, torch.bfloat16):
        for layout in ("contiguous", "channels_first_memory"):
            for channels, seqlen in ((1, 1), (5, 2), (8, 3), (33, 65), (136, 31), (264, 200), (520, 704)):
                yield case("tails", dtype=dtype, layout=layout, channels=channels, seqlen=seqlen)
            yield case("many rows", dtype=dtype, layout=layout, batch=70, channels=16, seqlen=40)
            yield case("long", dtype=dtype, layout=layout, batch=1, channels=16, seqlen=9000)
            yield case("long, packed", dtype=dtype, layout=layout, channels=16, cu_seqlens=(0, 4000, 4001, 4001, 9000))
            for cut in cuts:
                for wanted in ((), *((name,) for name in conv_helpers.TENSORS)):
                    yield case(f"gradients of {', '.join(wanted)}", wanted, dtype=dtype, layout=layout, **cut)
    for size in ({"batch": 0}, {"seqlen": 0}, {"channels": 0}, {"cu_seqlens": (0, 0, 0)}):
        yield case("empty", **size)


@over("options, wanted", conv_cases())
def test_causal_conv1d(options, wanted):
    inputs = conv_helpers.make_inputs(**options)
    present = tuple(name for name in wanted if inputs[name] is not None)
    kernel = debug_option("causal_conv1d_kernel", "by_layout")
    assert_same_on_gpu(conv_helpers.CONV, inputs, wanted=present, contexts=[kernel])


def norm_cases() -> Iterator[tuple[Any, ...]]:
    """Each kernel (dtype, vectors or single elements, gate or residual), and each mapping of groups to threads."""

    def case(norm: str, **options: Any) -> tuple[Any, ...]:
        return f"{norm} {options}", norm, options

    for dtype in DTYPES:
        for size, sizes in norm_helpers.SIZES.items():
            options = {"dtype": dtype, **sizes}
            yield case("layer_norm_gated", **options)
            if size in ("odd", "vectors", "warps"):
                yield case("rms_norm_gated", **options, norm_before_gate=True, bias=False)
                yield case("rms_norm_gated", **options, z=False, weight=False, bias=False)
            if "group" not in size:
                yield case("add_layer_norm", **options)
                yield case("add_rms_norm", **options, residual_dtype=norm_helpers.accumulate_type(dtype), bias=False)
                yield case("add_rms_norm", **options, residual=False, residual_in_fp32=True)
        for activation in ("gelu", "gelu_tanh", "sigmoid", "none"):
            yield case("rms_norm_gated", rows=(5,), columns=64, dtype=dtype, activation=activation)
    yield case("rms_norm_gated", rows=(9001,), columns=512, dtype=torch.bfloat16)


@over("norm, options", norm_cases())
def test_norm(norm, options):
    """Sums come in another order; an fp16 or bf16 result is one rounding of them."""
    operator = norm_helpers.NORMS[norm]
    assert_same_on_gpu(operator, operator.make_inputs(**options), roundings=256)
