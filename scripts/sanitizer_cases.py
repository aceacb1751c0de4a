"""Launches every CUDA kernel of the package on small inputs, for compute-sanitizer, and compares with the CPU.

    python scripts/sanitizer_cases.py [operator ...] [--share I/N]

--share 2/4 takes the second of every four cases: racecheck is faster in several processes at once.
The script makes the inputs on the CPU and copies them to the GPU. The sanitizer's reports are therefore about the package's
kernels, or about PyTorch's kernels that run with them. Each tensor is a separate allocation (tests/lib/vector_allocator.py), so
the sanitizer finds accesses past the last 16-byte vector of any tensor.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import conv_helpers
import norm_helpers
import recurrence_helpers
import sanitizer_decoding
import ssd_helpers
import torch
from helpers import DTYPES, move, move_all, set_debug_option, uninitialized_memory_is_nan
from operator_spec import OperatorSpec
from recurrence_helpers import PACKED, PLAIN, VARIANTS, Variant
from sanitizer_comparison import Check, Inputs, difference_between
from sanitizer_offsets import offset_checks
from sanitizer_scans import scan_checks
from sanitizer_ssd_cases import ssd_cases, ssd_gradient_cases, ssd_limited_cases, ssd_span_cases
from summary_helpers import RecurrenceSummary
from torch import Tensor
from vector_allocator import use_vector_allocator

from ssm_kernels import ssd_chunk_scan_summary
from ssm_kernels.ops.summaries import _ssd_chunk_scan_initial_gradient


def recurrence_cases() -> Iterator[tuple[str, Variant, Inputs, bool]]:
    """Name, recurrence, inputs and whether with gradients: each kernel (dtype, recurrence, options), then each path inside."""

    def case(what: str, variant: Variant, gradients: bool = True, **options: Any) -> tuple[str, Variant, Inputs, bool]:
        sizes = {"channels": 21, "seqlen": 70, "dtype": torch.float32}
        inputs = recurrence_helpers.make_inputs(variant, **(sizes | options))
        return f"{what} {variant.name} {variant.fixed} {options}", variant, inputs, gradients

    for dtype in DTYPES:
        for variant in VARIANTS.values():
            yield case("recurrence", variant, dtype=dtype)
        for variant in PLAIN.values():
            yield case("vectors", variant, dtype=dtype, channels=64, seqlen=128)
            yield case("sequential", variant, dtype=dtype, channels=72, seqlen=130)
            yield case("sequential, reverse", variant, False, dtype=dtype, channels=64, seqlen=37, h0=False, reverse=True)
            yield case("inference", variant, False, dtype=dtype, channels=64, seqlen=130)
            yield case("without h0, reverse", variant, dtype=dtype, h0=False, reverse=True)
            yield case("tiles along time", variant, dtype=dtype, batch=1, channels=5, seqlen=300)
            yield case("packed", variant, dtype=dtype, cu_seqlens=PACKED)
            yield case("packed, tiles along time", variant, dtype=dtype, cu_seqlens=(0, 1, 100, 100, 333), reverse=True)
            yield case("reset", variant, dtype=dtype, channels=64, reset=True)
            yield case("reset, tiles along time", variant, dtype=dtype, batch=1, seqlen=333, reset=True, reverse=True)
            for form in recurrence_helpers.FORMS if variant.recurrence.broadcast else ():
                yield case("broadcast", variant, dtype=dtype, form=form)
                yield case("broadcast", variant, dtype=dtype, form=form, broadcast_dtype=dtype)
        for name in ("linear_scan", "minlstm_scan", "rglru_scan"):
            for layout in ("transposed", "permuted", "offset", "sliced"):
                yield case("layout", PLAIN[name], dtype=dtype, channels=72, seqlen=129, layout=layout)
    for dtype in (torch.float32, torch.bfloat16):
        for name in ("mingru_scan", "liquid_scan"):
            for channels, seqlen in ((1, 1), (5, 63), (33, 65), (70, 200), (136, 31)):
                yield case("tails", PLAIN[name], dtype=dtype, channels=channels, seqlen=seqlen)
            # More tiles along time than one look-back covers, and more tiles than blocks.
            yield case("long", PLAIN[name], dtype=dtype, batch=1, channels=3, seqlen=9000)
            yield case("long, reverse", PLAIN[name], dtype=dtype, batch=1, channels=64, seqlen=9001, reverse=True)
            yield case("long, inference", PLAIN[name], False, dtype=dtype, batch=1, channels=65, seqlen=9000)
            yield case("long, packed", PLAIN[name], dtype=dtype, channels=9, cu_seqlens=(0, 4000, 4001, 4001, 9000))
            # A multiple of 128 channels: for other numbers of results, PyTorch's sums over broadcast axes read uninitialized
            # elements of their workspace.
            yield case("many chains", PLAIN[name], dtype=dtype, batch=40, channels=512, seqlen=300)
    for size in ({"batch": 0}, {"seqlen": 0}, {"channels": 0}):
        yield case("empty", PLAIN["mingru_scan"], **size)


def on_both_devices(
    operator: OperatorSpec, inputs: Inputs, gradients: bool = True, names: Sequence[str] | None = None
) -> Iterator[dict[str, Tensor]]:
    """The results on the CPU, then those on the GPU, and the gradients of these tensors, by default all."""
    cotangents = operator.make_cotangents(inputs) if gradients else None
    for device in ("cpu", "cuda"):
        moved = cotangents and tuple(move(x, device) for x in cotangents)
        yield operator.evaluate(operator, move_all(inputs, device), moved, names)


def check_recurrence(name: str, variant: Variant, inputs: Inputs, gradients: bool) -> str | None:
    set_debug_option("linear_scan_kernel", "sequential" if name.startswith("sequential") else "faster")
    expected, actual = on_both_devices(variant, inputs, gradients)
    return difference_between(name, actual, expected)


def check_recurrence_summary(name: str, variant: Variant, inputs: Inputs) -> str | None:
    without_h0 = {key: value for key, value in inputs.items() if key != "h0"}
    expected, actual = on_both_devices(RecurrenceSummary(variant), without_h0, gradients=False)
    return difference_between(f"summary, {name}", actual, expected)


def recurrence_checks() -> Iterator[Check]:
    for name, variant, inputs, gradients in recurrence_cases():
        yield partial(check_recurrence, name, variant, inputs, gradients)
        if gradients:  # inputs without gradients differ in nothing that a summary reads
            yield partial(check_recurrence_summary, name, variant, inputs)


def check_ssd(name: str, inputs: Inputs, products: str, gradients: bool) -> str | None:
    set_debug_option("ssd_mma", products)
    results = on_both_devices(ssd_helpers.SSD_STATES if "states_at" in inputs else ssd_helpers.SSD, inputs, gradients)
    expected = next(results)
    # initcheck does not see the writes of TMA stores (cp.async.bulk.tensor), but filled memory counts as
    # written. The comparison finds elements that a kernel does not write, or reads too early.
    with uninitialized_memory_is_nan() if products == "wgmma" else nullcontext():
        actual = next(results)
    return difference_between(
        f"{products}{', gradients' * gradients}, {name}", actual, expected, in_16_bits=inputs["x"].element_size() == 2
    )


def check_limited_ssd(name: str, inputs: Inputs, workspace: int, shared: int, products: str) -> str | None:
    with ssd_helpers.limited_workspace(workspace), ssd_helpers.limited_shared_memory(shared):
        return check_ssd(name, inputs, products, gradients=True)


def check_ssd_span(name: str, inputs: Inputs, reverse: bool, products: str) -> str | None:
    set_debug_option("ssd_mma", products)
    results = []
    for device in ("cpu", "cuda"):
        moved = move_all(inputs, device)
        if reverse:
            x, B = moved.pop("x"), moved.pop("B")
            results.append({"initial_gradient": _ssd_chunk_scan_initial_gradient(x, C=B, **moved)})
        else:
            results.append(dict(zip(("final_states", "decay"), ssd_chunk_scan_summary(**moved), strict=True)))
    in_16_bits = inputs["x"].element_size() == 2
    return difference_between(f"{products}, {name}", results[1], results[0], in_16_bits=in_16_bits)


def ssd_checks() -> Iterator[Check]:
    """Checks with either kind of matrix products; float32 has one."""
    checks = (
        (partial(check_ssd, gradients=False), ssd_cases),
        (partial(check_ssd, gradients=True), ssd_gradient_cases),
        (check_limited_ssd, ssd_limited_cases),
        (check_ssd_span, ssd_span_cases),
    )
    for products in ("wgmma", "mma"):
        for check, cases in checks:
            for case in cases():
                if products == "wgmma" or case[1]["x"].dtype != torch.float32:
                    yield partial(check, *case, products=products)


def norm_cases() -> Iterator[tuple[str, Inputs]]:
    """Each kernel (dtype, vectors or single elements, gate or residual), and each mapping of groups to threads."""
    for dtype in DTYPES:
        for size, sizes in norm_helpers.SIZES.items():
            gated = partial(norm_helpers.make_gated_inputs, dtype=dtype, **sizes)
            yield "layer_norm_gated", gated()
            if size in ("odd", "vectors", "warps"):
                yield "rms_norm_gated", gated(norm_before_gate=True, bias=False)
                yield "rms_norm_gated", gated(z=False, weight=False, bias=False)
            if "group" not in size:
                add = partial(norm_helpers.make_add_inputs, dtype=dtype, **sizes)
                yield "add_layer_norm", add()
                yield "add_rms_norm", add(residual_dtype=norm_helpers.accumulate_type(dtype), bias=False)
                yield "add_rms_norm", add(residual=False, residual_in_fp32=True)
        for activation in ("gelu", "gelu_tanh", "sigmoid", "none"):
            yield "rms_norm_gated", norm_helpers.make_gated_inputs(rows=(5,), columns=64, dtype=dtype, activation=activation)
    yield "rms_norm_gated", norm_helpers.make_gated_inputs(rows=(9001,), columns=512, dtype=torch.bfloat16)


def check_norm(name: str, inputs: Inputs) -> str | None:
    expected, on_cuda = on_both_devices(norm_helpers.NORMS[name], inputs)
    for key, actual in on_cuda.items():
        # Sums in another order; an fp16 or bf16 result is one rounding of them.
        roundings = 2 if actual.element_size() == 2 else 256
        tolerance = roundings * torch.finfo(actual.dtype).eps * (1 + expected[key].double().abs().max().item())
        difference = (actual.cpu().double() - expected[key].double()).abs().max().item()
        if not difference <= tolerance:
            sizes = tuple(inputs["x"].shape)
            return f"{name} {sizes}: {key} differs from the CPU's by {difference:.3g}, more than {tolerance:.3g}"
    return None


def conv_cases() -> Iterator[tuple[str, Inputs, tuple[str, ...]]]:
    """Name, inputs and the gradients asked for: each kernel (dtype, layout, width), then each path inside them."""

    def case(what: str, wanted: tuple[str, ...] = conv_helpers.TENSORS, **options: Any) -> tuple[str, Inputs, tuple[str, ...]]:
        sizes = {"channels": 72, "seqlen": 136, "dtype": torch.float32}
        inputs = conv_helpers.make_inputs(**(sizes | options))
        return f"{what} {options}", inputs, tuple(name for name in wanted if inputs[name] is not None)

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


def check_conv(name: str, inputs: Inputs, wanted: tuple[str, ...]) -> str | None:
    set_debug_option("causal_conv1d_kernel", "by_layout")
    expected, actual = on_both_devices(conv_helpers.CONV, inputs, bool(wanted), wanted)
    return difference_between(name, actual, expected)


CHECKS: dict[str, Callable[[], Iterator[Check]]] = {
    "selective_scan": scan_checks,
    "linear_scan": recurrence_checks,
    "ssd_chunk_scan": ssd_checks,
    "norms": lambda: (partial(check_norm, *case) for case in norm_cases()),
    "causal_conv1d": lambda: (partial(check_conv, *case) for case in conv_cases()),
    "offsets": offset_checks,
    **sanitizer_decoding.CHECKS,
}


def parse_share(text: str) -> slice:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, got {text!r}")
    return slice(int(match[1]) - 1, None, int(match[2]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="operator", help=f"of {', '.join(CHECKS)}; default: all")
    parser.add_argument("--share", metavar="I/N", type=parse_share, default=slice(None), help="of every N cases the I-th")
    arguments = parser.parse_args()
    use_vector_allocator()
    operators = arguments.operators or [*CHECKS]
    if unknown := set(operators) - CHECKS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    checks = [check for operator in operators for check in CHECKS[operator]()][arguments.share]
    wrong = 0
    # A tool that is stopped by the clock has then said how far it came.
    for done, check in enumerate(checks):
        if done % 20 == 0:
            print(f"{done} of {len(checks)} cases, {wrong} wrong", flush=True)
        if (message := check()) is not None:
            print(message, flush=True)
            wrong += 1
    print(f"{len(checks)} cases, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
