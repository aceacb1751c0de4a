"""ssd_chunk_scan on CUDA for rows of any length that start at any element: the same bits as of aligned, padded rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from guarded_memory import LAYOUTS, Layout, assert_offsets_keep_bits, assert_same_bits
from ssd_helpers import SSD, evaluate, make_cotangents, make_inputs, preferred_products
from torch import Tensor
from torch.nn.functional import pad

pytestmark = pytest.mark.cuda

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = dict.fromkeys(("x", "z", "B", "C", "out"), (2, 3)) | dict.fromkeys(("dt", "log_decay", "gain"), (2,))
# Odd elements, and those that fill words, pairs of words and vectors; every row at another one.
SOME_LAYOUTS = (*(Layout(first) for first in (1, 2, 4, 6, 8)), Layout(3, odd=True))
SIZES: dict[str, dict[str, Any]] = {
    "P64_N128": {"heads": 3, "groups": 1, "headdim": 64, "dstate": 128, "seqlen": 130},
    "P48_N16_of_each_head": {"heads": 3, "groups": 3, "headdim": 48, "dstate": 16, "seqlen": 65},
    "P100_N100": {"heads": 4, "groups": 2, "headdim": 100, "dstate": 100, "seqlen": 63},
    "P64_N130": {"heads": 2, "groups": 1, "headdim": 64, "dstate": 130, "seqlen": 70},
    "P36_N256": {"heads": 2, "groups": 1, "headdim": 36, "dstate": 256, "seqlen": 66},
    "P7_N5": {"heads": 3, "groups": 1, "headdim": 7, "dstate": 5, "seqlen": 17},
}
every_size = pytest.mark.parametrize("size", SIZES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def inputs_of(size: str, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    return make_inputs(dtype=dtype, device="cuda", **SIZES[size] | options)


@every_size
@every_dtype
def test_first_columns(size, dtype):
    layouts = LAYOUTS if size == "P64_N128" and dtype == torch.bfloat16 else SOME_LAYOUTS
    assert_offsets_keep_bits(SSD, inputs_of(size, dtype), ROWS, layouts=layouts)


@pytest.mark.parametrize("size", ["P64_N128", "P100_N100"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [{"reverse": True}, {"cu_seqlens": (0, 0, 70, 71, 150)}, {"log_decay": True}],
    ids=["reverse", "packed", "log_decay"],
)
def test_first_columns_of_other_kernels(size, dtype, options):
    assert_offsets_keep_bits(SSD, inputs_of(size, dtype, **options), ROWS, layouts=SOME_LAYOUTS[::3])


def test_first_columns_by_mma():
    with preferred_products("mma"):
        assert_offsets_keep_bits(SSD, inputs_of("P64_N128", torch.bfloat16), ROWS, layouts=SOME_LAYOUTS[::3])


def test_first_columns_of_segments_along_time():
    sizes = {"batch": 1, "heads": 2, "groups": 1, "headdim": 64, "dstate": 128, "seqlen": 2047}
    assert_offsets_keep_bits(SSD, make_inputs(dtype=torch.bfloat16, device="cuda", **sizes), ROWS, layouts=SOME_LAYOUTS[::3])


@pytest.mark.parametrize("seqlen", [1, 17, 63, 197, 777])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lengths(seqlen, dtype):
    assert_offsets_keep_bits(SSD, inputs_of("P64_N128", dtype, seqlen=seqlen), ROWS, layouts=SOME_LAYOUTS[:1])


@pytest.mark.parametrize(("headdim", "dstate"), [(100, 100), (36, 130), (64, 20), (7, 64), (33, 129)])
@every_dtype
def test_rows_have_the_bits_of_padded_ones(headdim, dstate, dtype):
    """Zeros up to a multiple of 16 in rows and columns: other layouts of all tensors, the same numbers."""
    inputs = make_inputs(headdim=headdim, dstate=dstate, heads=3, groups=1, seqlen=130, D="channel", dtype=dtype, device="cuda")
    cotangents = make_cotangents(inputs)
    rows, columns = -headdim % 16, -dstate % 16

    def padded(name: str, value: Tensor) -> Tensor:
        if name in ("x", "z", "D", "out", "grad_x", "grad_z", "grad_D"):
            return pad(value, (0, rows))
        if name in ("B", "C", "grad_B", "grad_C"):
            return pad(value, (0, columns))
        return pad(value, (0, columns, 0, rows)) if "states" in name else value

    def of(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: padded(name, value) if isinstance(value, Tensor) else value for name, value in tensors.items()}

    actual = evaluate(SSD, inputs, cotangents)
    wider = evaluate(SSD, of(inputs), tuple(of(dict(zip(SSD.results, cotangents, strict=True))).values()))
    actual = of(actual)
    # PyTorch sums the parts of D's gradient, in an order that may depend on the sizes.
    torch.testing.assert_close(actual.pop("grad_D"), wider.pop("grad_D"), rtol=1e-5, atol=1e-5)
    assert_same_bits(actual, wider)


def count_launches(call: Callable[[], Any]) -> tuple[int, int]:
    """The kernels of a call, and those of them that copy rows."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    kernels = {event.key: event.count for event in profile.key_averages() if not event.key.startswith(("Mem", "cuda"))}
    return sum(kernels.values()), sum(count for name, count in kernels.items() if "row_copies" in name)


@pytest.mark.parametrize(
    "sizes", [{"dstate": 100}, {"headdim": 100}, {"headdim": 100, "dstate": 100}, {"headdim": 77}], ids=str
)
def test_one_launch_copies_all_inputs(sizes):
    """One launch more, and another for an output without vectors and for gradients of an odd length."""
    options = {"heads": 4, "groups": 4, "headdim": 64, "dstate": 128, "seqlen": 130, "z": False, "initial_states": False}

    def launches_of(sizes: dict[str, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        inputs = make_inputs(**options | sizes, dtype=torch.bfloat16, device="cuda")
        with torch.no_grad():
            forward = count_launches(lambda: SSD(**inputs))
        x, B = inputs["x"].requires_grad_(), inputs["B"].requires_grad_()
        out = SSD(**inputs)[0]
        cotangent = torch.ones_like(out)
        return forward, count_launches(lambda: torch.autograd.grad(out, (x, B), cotangent, retain_graph=True))

    aligned = launches_of({name: -(-size // 16) * 16 for name, size in sizes.items()})
    assert [copies for _, copies in aligned] == [0, 0]
    headdim = sizes.get("headdim", 64)
    copies = (1 + (headdim % 8 > 0), 1 + headdim % 2)
    assert launches_of(sizes) == tuple((count + more, more) for (count, _), more in zip(aligned, copies, strict=True))
