"""ssd_chunk_scan on CUDA at its limits.

Little workspace and shared memory, memory that nobody wrote, rows at any address, extreme values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import guarded_memory
import pytest
import torch
from guarded_memory import Layout, assert_offsets_keep_bits, assert_same_bits
from helpers import LAYOUTS, arrange, assert_equal, launched_kernels
from operator_spec import tensor_names, with_gradients
from ssd_helpers import (
    GIVEN,
    MINIMAL,
    OPTIONS,
    SSD,
    TENSORS,
    assert_accurate,
    assert_all_as_accurate,
    assert_all_close,
    assert_matches_reference,
    evaluate,
    evaluate_in_float64,
    evaluate_natively,
    every_option,
    has_16_bit_products,
    limited_shared_memory,
    limited_workspace,
    make_cotangents,
    make_inputs,
    plan,
    preferred_products,
    scan,
)
from ssd_variants import BF16, CALLS_WITH_MANY_STATES, CUT, DSTATES, FP16, FP32, Variant, variants
from torch import Tensor
from torch.nn.functional import pad

pytestmark = pytest.mark.cuda


def limited_inputs(variant: Variant, **options: Any) -> dict[str, Any]:
    return variant.inputs(**({"seqlen": 100, "heads": 8} | options))


def bytes_of_heads(inputs: dict[str, Any], heads: int) -> int:
    """Bytes of the states that backward keeps."""
    x, offsets, units = inputs["x"], inputs["cu_seqlens"], math.ceil(inputs["x"].shape[3] / 64)
    chunks = math.ceil(x.shape[1] / 64) if offsets is None else x.shape[1] // 64 + len(offsets) - 1
    return heads * 2 * chunks * units * 64 * (64 if inputs["B"].shape[3] <= 64 else 128) * 2


def assert_same_in_sub_batches(inputs: dict[str, Any], heads_at_once: int, cotangents: tuple[Tensor | None, ...]) -> None:
    """Compares backward in sub-batches with backward at once. Sums over sub-batches come in another order, and grad_z
    recomputes y in other ranges of chunks. With initial states, the first pass rounds the states before a span otherwise; they
    enter grad_dt, grad_log_decay and grad_C. All else has the same bits."""
    expected = evaluate(scan, inputs, cotangents)
    batch, _, heads, _ = inputs["x"].shape
    is_in_spans = inputs["cu_seqlens"] is None and heads_at_once < heads
    with limited_workspace(bytes_of_heads(inputs, heads_at_once)):
        chosen = plan(inputs, is_backward=True)
        assert (int(chosen["sub_batches"]) > 1) == (heads_at_once < batch * heads)
        assert (int(chosen["spans"]) > 1) == is_in_spans
        actual = assert_accurate(inputs, cotangents)
    of_batch, of_heads = ("grad_A", "grad_D", "grad_dt_bias"), ("grad_B", "grad_C")
    heads_of_group = inputs["x"].shape[2] // inputs["B"].shape[2]
    others = (*of_batch, "grad_z", *(of_heads if heads_at_once < heads_of_group else ()))
    if is_in_spans and inputs["initial_states"] is not None:
        others = (*others, "grad_dt", "grad_log_decay", "grad_C")
    assert_equal(*({name: value for name, value in of.items() if name not in others} for of in (actual, expected)))
    for name in expected.keys() & set(of_batch):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-4)


# Rows of the batch; spans of a row, packed: groups or heads of one; spans of one chunk, and some of its heads.
@pytest.mark.parametrize(("batch", "heads_at_once"), [(3, 16), (3, 8), (2, 4), (2, 3), (1, 1)])
@every_option
@variants([BF16], [64])
def test_sub_batches(options, batch, heads_at_once, variant):
    inputs = limited_inputs(variant, batch=batch, **options)
    assert_same_in_sub_batches(inputs, heads_at_once, make_cotangents(inputs))


@pytest.mark.parametrize(("groups", "heads_at_once"), [(2, 4), (2, 3), (4, 6)], ids=["groups", "heads", "uneven_groups"])
@pytest.mark.parametrize(("headdim", "dstate"), [(7, 17), (72, 65), (128, 128)])
@pytest.mark.parametrize("name", ["everything", "packed_with_states", "log_decay_and_gain"])
@variants([BF16], [64])
def test_sub_batches_of_other_sizes(name, headdim, dstate, groups, heads_at_once, variant):
    inputs = limited_inputs(variant, headdim=headdim, dstate=dstate, groups=groups, **OPTIONS[name])
    assert_same_in_sub_batches(inputs, heads_at_once, make_cotangents(inputs))


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("heads_at_once", [8, 3])
@variants([BF16], [64])
def test_sub_batches_of_any_layout(layout, heads_at_once, variant):
    inputs = limited_inputs(variant, layout=layout)
    assert_same_in_sub_batches(inputs, heads_at_once, tuple(arrange(x, layout) for x in make_cotangents(inputs)))


@pytest.mark.parametrize("through", [0, 1], ids=["out", "final_states"])
@pytest.mark.parametrize("heads_at_once", [8, 3])
@variants([BF16], [64])
def test_sub_batches_with_the_gradient_of_one_result(heads_at_once, through, variant):
    inputs = limited_inputs(variant)
    assert_same_in_sub_batches(
        inputs, heads_at_once, tuple(x if i == through else None for i, x in enumerate(make_cotangents(inputs)))
    )


@pytest.mark.parametrize("heads_at_once", [8, 3])
@variants([BF16], [64])
def test_sub_batches_for_a_subset_of_the_gradients(heads_at_once, variant):
    """Each gradient has the same bits, whichever others are needed."""
    inputs = limited_inputs(variant)
    cotangents = make_cotangents(inputs)

    def gradients_of(wanted: tuple[str, ...]) -> dict[str, Tensor]:
        leaves = with_gradients(inputs, wanted)
        torch.autograd.backward(scan(**leaves), cotangents)
        return {name: leaves[name].grad for name in wanted}

    with limited_workspace(bytes_of_heads(inputs, heads_at_once)):
        everything = gradients_of(tuple(tensor_names(inputs)))
        for wanted in (("B",), ("x", "C"), ("A", "z"), ("D",), ("dt", "dt_bias"), ("initial_states",)):
            assert_equal(gradients_of(wanted), {name: everything[name] for name in wanted})


@pytest.mark.parametrize("heads_at_once", [8, 2], ids=["rows", "spans"])
@variants([BF16], [64])
def test_sub_batches_take_less_memory(heads_at_once, variant):
    inputs = limited_inputs(variant, batch=4, seqlen=4096, dstate=128, z=False)
    leaves = with_gradients(inputs)
    results, cotangents = scan(**leaves), make_cotangents(inputs)

    def peak() -> int:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(results, [leaves[name] for name in tensor_names(inputs)], cotangents, retain_graph=True)
        return torch.cuda.max_memory_allocated() - before

    whole = peak()
    limit = bytes_of_heads(inputs, heads_at_once)
    with limited_workspace(limit):
        in_sub_batches = peak()
    spared = bytes_of_heads(inputs, 4 * 8) - limit
    # Where a row is split, the float32 states between spans come on top.
    assert in_sub_batches <= whole - 0.8 * spared, (whole, in_sub_batches, spared)


@pytest.mark.parametrize("chunks_at_once", [1, 5])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["everything", "resets_with_states", "log_decay_with_resets"])
@variants([BF16], (64, 256))
def test_spans(name, reverse, chunks_at_once, variant):
    """Spans of several chunks, the last one shorter, with sequences that begin within a span and with one."""
    inputs = limited_inputs(variant, batch=2, seqlen=700, reverse=reverse, **OPTIONS[name])
    if inputs["seq_idx"] is not None:
        inputs["seq_idx"][:, 700 - 256 if reverse else 256 :] += 1
    limit = chunks_at_once * inputs["x"].shape[2] * 2 * 64 * min(variant.dstate, 128) * 2
    with limited_workspace(limit):
        assert plan(inputs, is_backward=True)["spans"] == str(math.ceil(11 / chunks_at_once))
        assert_accurate(inputs, make_cotangents(inputs))


# ----- less shared memory and workspace


# Shared memory of a block in KiB: compute capability 8.6 and 8.9, then 8.0.
@pytest.mark.parametrize("kibibytes", [99, 163])
@variants((FP32, BF16), DSTATES)
@pytest.mark.parametrize("name", ["everything", "resets_with_states", "packed_with_states", "log_decay_and_gain"])
def test_less_shared_memory(name, variant, kibibytes):
    """In bf16 kernels have fewer stages and the same bits. In float32, and in bf16 with more than 128 states and 99 KiB,
    PyTorch's matmuls run in one direction or both."""
    options = OPTIONS[name] | ({"cu_seqlens": (0, 0, 65, 700)} if name.startswith("packed") else {"seqlen": 700})
    inputs = variant.inputs(heads=4 if variant.dtype == FP32 or variant.dstate > 128 else 8, **options)
    cotangents = make_cotangents(inputs)
    if variant.dtype == FP32:
        with limited_shared_memory(1024 * kibibytes):
            assert_accurate(inputs, cotangents)
        return
    expected = evaluate(scan, inputs, cotangents)
    with limited_shared_memory(1024 * kibibytes):
        if variant.dstate > 128 and kibibytes == 99:
            assert_all_close(evaluate(scan, inputs, cotangents), expected, tolerance=2e-2)
        else:
            assert_equal(evaluate(scan, inputs, cotangents), expected)


@pytest.mark.parametrize("workspace", [1, 2**20])
@variants([FP32], DSTATES)
def test_less_workspace(variant, workspace):
    with limited_workspace(workspace):
        assert_accurate(variant.inputs(heads=8))


@pytest.mark.parametrize("workspace", [1, 2**20])
@variants([BF16], [256])
@pytest.mark.parametrize("name", ["everything", "packed_with_states"])
def test_less_workspace_with_many_states(name, variant, workspace):
    options = OPTIONS[name] | ({"cu_seqlens": (0, 0, 65, 700)} if name.startswith("packed") else {"seqlen": 700})
    with limited_workspace(workspace):
        assert_accurate(variant.inputs(**options))


@pytest.mark.parametrize("name", ["everything", "resets_with_states", "packed_with_states"])
@variants((BF16, FP16), [136])
def test_gradients_of_products_in_float32(name, variant):
    """Exact to their own rounding."""
    inputs = variant.inputs(**({"headdim": 48, "seqlen": 65} | OPTIONS[name]))
    with limited_shared_memory(99 * 1024):
        assert not has_16_bit_products(inputs)
        assert_matches_reference(inputs)


@pytest.mark.parametrize("kibibytes", [163, 227])
@variants([FP32], DSTATES)
def test_kernels_run(kibibytes, variant):
    """Backward without z for every dstate, with less shared memory for 64 columns of the states at a time."""
    inputs = variant.inputs(z=False)
    if torch.cuda.get_device_properties(0).shared_memory_per_block_optin < 1024 * kibibytes:
        pytest.skip(f"a block has no {kibibytes} KiB of shared memory")
    cotangents = make_cotangents(inputs)
    with limited_shared_memory(1024 * kibibytes):
        names = launched_kernels(lambda: evaluate(scan, inputs, cotangents))
    columns = 64 if kibibytes == 163 else min(variant.dstate, 128)
    kernels = [f"{name}<float, {columns}," for name in ("StatePassing", "ssd_bwd_chunks_kernel")]
    if kibibytes == 227 or variant.dstate <= 128:
        kernels.append(f"ssd_fwd_sm80_kernel<float, {variant.dstate},")
    for kernel in kernels:
        assert any(kernel in name for name in names), f"no {kernel} ...> among {sorted(names)}"


EVERY_PATH = [
    OPTIONS["everything"],
    {"cu_seqlens": (0, 0, 1, 64, 64, 70, 70)},
    {"headdim": 72, "heads": 9, "groups": 1},
    {"log_decay": True, "cu_seqlens": (0, 0, 1, 64, 64, 70, 70)},
]


@variants([FP32], [dstate - 3 for dstate in DSTATES])
@pytest.mark.parametrize("options", EVERY_PATH, ids=["everything", "packed", "padded", "log_decay"])
def test_memory_that_nobody_wrote_is_not_read(options, variant, uninitialized_memory_is_nan):
    """Includes padded rows and blocks without work."""
    assert_accurate(variant.inputs(**options))


@variants([BF16], [64])
@pytest.mark.parametrize(
    "options", [*EVERY_PATH[:2], EVERY_PATH[2] | {"dstate": 17}, CUT | {"heads": 3}, EVERY_PATH[3]], ids=str
)
def test_memory_that_nobody_wrote_is_not_read_in_16_bits(options, variant, uninitialized_memory_is_nan):
    inputs = variant.inputs(**options)
    expected = {"out", "final_states", *(f"grad_{name}" for name in (*TENSORS, *GIVEN) if inputs[name] is not None)}
    assert set(assert_accurate(inputs)) == expected


@variants([BF16], (256, 137))
@pytest.mark.parametrize("sizes", CALLS_WITH_MANY_STATES.values(), ids=list(CALLS_WITH_MANY_STATES))
def test_memory_that_nobody_wrote_is_not_read_with_many_states(sizes, variant, uninitialized_memory_is_nan):
    inputs = variant.inputs(headdim=48, **sizes)
    for result in evaluate(scan, inputs, make_cotangents(inputs)).values():
        assert result.isfinite().all()


# ----- rows of any length that start at any element: the bits of aligned, padded rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = dict.fromkeys(("x", "z", "B", "C", "out"), (2, 3)) | dict.fromkeys(("dt", "log_decay", "gain"), (2,))
# Odd elements, and those that fill words, pairs of words and vectors; every row at another one.
SOME_LAYOUTS = (*(Layout(first) for first in (1, 2, 4, 6, 8)), Layout(3, odd=True))
SHIFTED_SIZES: dict[str, dict[str, Any]] = {
    "P64_N128": {"heads": 3, "groups": 1, "headdim": 64, "dstate": 128, "seqlen": 130},
    "P48_N16_of_each_head": {"heads": 3, "groups": 3, "headdim": 48, "dstate": 16, "seqlen": 65},
    "P100_N100": {"heads": 4, "groups": 2, "headdim": 100, "dstate": 100, "seqlen": 63},
    "P64_N130": {"heads": 2, "groups": 1, "headdim": 64, "dstate": 130, "seqlen": 70},
    "P36_N256": {"heads": 2, "groups": 1, "headdim": 36, "dstate": 256, "seqlen": 66},
    "P7_N5": {"heads": 3, "groups": 1, "headdim": 7, "dstate": 5, "seqlen": 17},
}
every_size = pytest.mark.parametrize("size", SHIFTED_SIZES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def shifted_inputs(size: str, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    return make_inputs(dtype=dtype, device="cuda", **SHIFTED_SIZES[size] | options)


@every_size
@every_dtype
def test_first_columns(size, dtype):
    layouts = guarded_memory.LAYOUTS if size == "P64_N128" and dtype == torch.bfloat16 else SOME_LAYOUTS
    assert_offsets_keep_bits(SSD, shifted_inputs(size, dtype), ROWS, layouts=layouts)


@pytest.mark.parametrize("size", ["P64_N128", "P100_N100"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [{"reverse": True}, {"cu_seqlens": (0, 0, 70, 71, 150)}, {"log_decay": True}],
    ids=["reverse", "packed", "log_decay"],
)
def test_first_columns_of_other_kernels(size, dtype, options):
    assert_offsets_keep_bits(SSD, shifted_inputs(size, dtype, **options), ROWS, layouts=SOME_LAYOUTS[::3])


def test_first_columns_by_mma():
    with preferred_products("mma"):
        assert_offsets_keep_bits(SSD, shifted_inputs("P64_N128", torch.bfloat16), ROWS, layouts=SOME_LAYOUTS[::3])


def test_first_columns_of_segments_along_time():
    sizes = {"batch": 1, "heads": 2, "groups": 1, "headdim": 64, "dstate": 128, "seqlen": 2047}
    assert_offsets_keep_bits(SSD, make_inputs(dtype=torch.bfloat16, device="cuda", **sizes), ROWS, layouts=SOME_LAYOUTS[::3])


@pytest.mark.parametrize("seqlen", [1, 17, 63, 197, 777])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_first_columns_of_lengths(seqlen, dtype):
    assert_offsets_keep_bits(SSD, shifted_inputs("P64_N128", dtype, seqlen=seqlen), ROWS, layouts=SOME_LAYOUTS[:1])


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
    kernels = launched_kernels(call)
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


# ----- extreme values


@pytest.mark.parametrize("limits", [(0.0, math.inf), (-math.inf, math.inf)], ids=["clamped", "growth"])
@variants([BF16], [64])
def test_negative_step_sizes(limits, variant):
    inputs = variant.inputs(dt_softplus=False, dt_bias=False, dt_limit=limits)
    inputs["dt"] = inputs["dt"] - 0.3
    assert inputs["dt"].lt(0).double().mean() > 0.4
    assert_accurate(inputs)


@pytest.mark.parametrize("seqlen", [64, 130, 400])
@variants([BF16], [64])
def test_strong_decay(seqlen, variant):
    """The decays of a sequence multiply to e^-1000."""
    inputs = variant.inputs(seqlen=seqlen, heads=2, groups=1)
    steps = torch.nn.functional.softplus(inputs["dt"].float() + inputs["dt_bias"])
    inputs["A"] = -1000 / steps.sum(1).amin(0)
    results = assert_matches_reference(inputs)
    assert all(value.isfinite().all() for value in results.values())


@pytest.mark.parametrize("strong", [-1e5, -math.inf])
@variants([BF16], [64])
def test_a_step_that_forgets_everything(strong, variant):
    """Every gradient is finite; beside an infinite A the gradient of dt is the limit."""
    inputs = variant.inputs(heads=2, groups=1, dt_softplus=False, dt_bias=False)
    inputs |= {"A": torch.tensor([strong, -1.0], device="cuda"), "dt": inputs["dt"].abs()}
    assert_accurate_beside_nan(inputs)


def assert_accurate_beside_nan(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """PyTorch's own gradients are NaN beside infinite decays: their errors do not excuse the kernel's."""
    cotangents = make_cotangents(inputs)
    exact = evaluate_in_float64(inputs, cotangents)
    assert all(value.isfinite().all() for value in exact.values())
    native = {
        name: value.where(value.isfinite(), exact[name].to(value.dtype))
        for name, value in evaluate_natively(inputs, cotangents, exact).items()
    }
    actual = evaluate(scan, inputs, cotangents)
    assert_all_as_accurate(actual, native, exact, inputs)
    return actual


# The lowest of a chunk's tables is -111.
@pytest.mark.parametrize("strong", [-100.0, -120.0, -1e30, -math.inf])
@variants((FP32, BF16), (64, 256))
def test_given_decays_of_zero(strong, variant):
    """Single steps, neighbors, a chunk's first and last, the sequence's first and last, and all steps of a head."""
    inputs = variant.inputs(heads=2, groups=1, log_decay=True)
    inputs["log_decay"][:, [0, 5, 6, 7, 63, 64, 100, 129], 0] = strong
    inputs["log_decay"][1, :, 1] = strong
    results = assert_accurate_beside_nan(inputs)
    forgets = inputs["log_decay"] == strong
    assert strong > -111 or not results["grad_log_decay"][forgets].any()


@variants([BF16], [64])
def test_weak_decay_after_a_step_that_forgets_everything(variant):
    """In the same chunk: the strong one leaves the differences between the others' sums their accuracy."""
    inputs = variant.inputs(heads=2, groups=1, dt_softplus=False, dt_bias=False)
    inputs["dt"][:, 20::50] = 1e5
    inputs["x"][:, 20::50] = 0  # else all else is small beside what such a step adds
    results = assert_matches_reference(inputs)
    assert all(value.isfinite().all() for value in results.values())


@variants([BF16], [64])
def test_weak_given_decays_after_a_step_that_forgets_everything(variant):
    inputs = variant.inputs(heads=2, groups=1, log_decay=True)
    inputs["log_decay"] = 0.1 * inputs["log_decay"]
    inputs["log_decay"][:, 20::50] = -1e5
    inputs["x"][:, 20::50] = 0
    results = assert_matches_reference(inputs)
    assert all(value.isfinite().all() for value in results.values())


@pytest.mark.parametrize("sign", [1.0, -1.0])
@variants([FP32], DSTATES)
def test_largest_inputs(sign, variant):
    """Rounding to the nearest TF32 number must not turn the largest float into infinity."""
    inputs = variant.inputs(**MINIMAL, seqlen=70)
    inputs["B"] *= 2.0**-40
    place = (0, 40, 1, 3)
    inputs["x"][place] = sign * torch.finfo(torch.float32).max
    exact = {key: value.double() if isinstance(value, Tensor) else value for key, value in inputs.items()}
    for actual, expected in zip(scan(**inputs), scan(**exact), strict=True):
        assert actual.isfinite().all()
        assert (actual - expected).abs().amax() <= 1e-5 * expected.abs().amax()
