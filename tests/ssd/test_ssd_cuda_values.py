"""ssd_chunk_scan on CUDA: results and gradients for every dtype, number of states and MMA instruction, and for TF32.

One test compares the errors with the bars of benchmarks/bars.json.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, arrange, assert_equal, captured, launched_kernels, tf32
from operator_spec import with_gradients
from ssd_helpers import (
    OPTIONS,
    SSD,
    assert_accurate,
    assert_as_exact_as_rounding,
    assert_matches_reference,
    evaluate,
    evaluate_in_float64,
    every_method,
    every_option,
    make_cotangents,
    make_inputs,
    plan,
    scan,
)
from ssd_variants import BF16, CALLS_WITH_MANY_STATES, DSTATES, FP16, FP32, variants
from torch import Tensor

from ssm_kernels import ssd_chunk_scan

pytestmark = pytest.mark.cuda


# By dstate; the smaller ones are compared with the reference.
SIZES = {
    17: {"headdim": 7, "seqlen": 70},
    24: {"headdim": 48, "seqlen": 65},
    128: {"seqlen": 200},
    192: {"seqlen": 200},
    256: {"headdim": 48, "seqlen": 65},
}


@variants((FP32, BF16, FP16), SIZES)
@every_option
def test_options(options, variant):
    inputs = variant.inputs(**(SIZES[variant.dstate] | options))
    assert_matches_reference(inputs, exact=scan if SIZES[variant.dstate] == {"seqlen": 200} else None)
    if variant.dstate == 128:
        assert_matches_reference(inputs, gradients=False)


@variants([FP32], DSTATES)
@every_option
def test_options_of_a_whole_head(options, variant):
    assert_accurate(variant.inputs(**options))


@pytest.mark.parametrize("name", ["everything", "packed_with_states"])
@variants((FP32, BF16), DSTATES)
@every_method
def test_discretizations(discretization, variant, name):
    options = OPTIONS[name] | ({"cu_seqlens": (0, 0, 65, 100)} if name.startswith("packed") else {})
    assert_accurate(variant.inputs(discretization=discretization, **options))
    if variant.dstate == 64:
        assert_matches_reference(variant.inputs(seqlen=100, discretization=discretization), gradients=False)


@variants((FP32, BF16), DSTATES)
@pytest.mark.parametrize("name", ["everything", "required_only", "log_decay_and_gain"])
@pytest.mark.parametrize("seqlen", [1, 32, 33, 63, 64, 65, 1000])
def test_lengths(seqlen, name, variant):
    for heads in (2, 3):
        assert_accurate(variant.inputs(heads=heads, groups=1, **(OPTIONS[name] | {"seqlen": seqlen})))


FEW_STATES = [(1, 1), (7, 17), (64, 64), (72, 65), (128, 128), (200, 128), (256, 16)]
MANY_STATES = [(1, 129), (7, 137), (64, 192), (72, 255), (128, 136), (200, 200), (256, 256)]


@variants((FP32, BF16, FP16), [64])
@pytest.mark.parametrize(("headdim", "dstate"), FEW_STATES + MANY_STATES)
def test_headdim_and_dstate(headdim, dstate, variant):
    for name in ("everything", "required_only", "log_decay_and_gain"):
        inputs = variant.inputs(headdim=headdim, dstate=dstate, **OPTIONS[name])
        assert_accurate(inputs)
        if (headdim, dstate) in FEW_STATES:
            assert_matches_reference(inputs, gradients=False)


@pytest.mark.parametrize("headdim", [64, 128])
@variants([BF16], DSTATES)
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 1), (6, 2), (6, 6), (9, 3), (9, 1), (80, 2)])
def test_heads_share_groups(heads, groups, variant, headdim):
    """The heads of a block, and of all blocks that add to the gradients of the same B and C."""
    inputs = variant.inputs(heads=heads, groups=groups, headdim=headdim, seqlen=70)
    assert_accurate(inputs)
    if headdim == variant.dstate == 64 and heads < 80:
        assert_matches_reference(inputs, gradients=False)


@pytest.mark.parametrize(("headdim", "dstate"), [(36, 100), (64, 200)])
@variants((FP32, BF16), [64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, variant, headdim, dstate):
    inputs = variant.inputs(layout=layout, headdim=headdim, dstate=dstate)
    assert_accurate(inputs, tuple(arrange(x, layout) for x in make_cotangents(inputs)))


@variants((BF16, FP16), DSTATES)
def test_out_is_as_exact_as_its_rounding(variant):
    assert_as_exact_as_rounding(variant.inputs(heads=4, groups=1, seqlen=500, **OPTIONS["required_only"]))


@pytest.mark.parametrize("sizes", CALLS_WITH_MANY_STATES.values(), ids=list(CALLS_WITH_MANY_STATES))
@variants([BF16], [256])
def test_calls_with_many_states(sizes, variant):
    assert_accurate(variant.inputs(**sizes))


# ----- short sequences: up to 32 steps in float32 a sequential scan takes the place of the matrix products


@every_option
@variants([FP32], (5, 64, 128, 200, 256))
def test_options_of_short_sequences(options, variant):
    assert_accurate(variant.inputs(**({"seqlen": 24} | options)))


@every_method
@variants([FP32], [128])
def test_discretizations_of_short_sequences(discretization, variant):
    assert_accurate(variant.inputs(seqlen=32, discretization=discretization))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("headdim", [3, 16, 40, 72, 200])
@variants([FP32], [128])
def test_rows_of_short_sequences(headdim, layout, variant):
    assert_accurate(variant.inputs(seqlen=19, headdim=headdim, dstate=24, heads=6, groups=3, layout=layout))


@pytest.mark.parametrize(
    ("options", "is_sequential"),
    [({"seqlen": 32}, True), ({"seqlen": 33}, False), ({"seqlen": 32, "log_decay": True}, False)],
    ids=str,
)
@variants([FP32], [128])
def test_short_sequences_are_sequential(options, is_sequential, variant):
    inputs = variant.inputs(**options)
    names = launched_kernels(lambda: scan(**inputs))
    assert any("ssd_short_scan_fwd_kernel" in name for name in names) == is_sequential, sorted(names)


@variants([FP32], [128])
def test_nan_in_a_short_sequence_reaches_its_later_steps_alone(variant):
    inputs = variant.inputs(seqlen=30, batch=1, resets=((10, 20),))
    clean = scan(**inputs)[0]
    inputs["x"][0, 13, 1] = math.nan
    out = scan(**inputs)[0]
    assert torch.equal(out[0, :13], clean[0, :13]) and torch.equal(out[0, 20:], clean[0, 20:])
    assert out[0, 13:20, 1].isnan().all() and torch.equal(out[0, :, [0, 2, 3]], clean[0, :, [0, 2, 3]])


@variants([FP32], [128])
def test_short_sequences_reset_at_every_step(variant):
    inputs = variant.inputs(seqlen=32, resets=(range(1, 32), (31,)))
    assert_accurate(inputs)
    inputs["initial_states"] = torch.full_like(inputs["initial_states"], math.inf)
    out = scan(**inputs)[0]
    assert out[0, 1:].isfinite().all() and out[1, 31].isfinite().all()


# ----- sequences that blocks split, and blocks with several sequences


@pytest.mark.parametrize("name", ["everything", "resets_with_states"])
@pytest.mark.parametrize("seqlen", [1000, 2048, 3001])
@variants([BF16], [64])
def test_sequences_longer_than_a_range(seqlen, name, variant):
    """A batch of one with two heads is split along time, with resets."""
    options = OPTIONS[name] | ({"resets": ((2, 64, 65, 999),)} if name.startswith("resets") else {})
    sizes = {"batch": 1, "heads": 2, "groups": 1, "seqlen": seqlen}
    inputs = variant.inputs(**(sizes | options))
    assert_matches_reference(inputs, gradients=False)


IN_RANGES = {"long_work_tiles": {"batch": 1, "heads": 2}, "many_work_tiles": {"batch": 3, "heads": 120}}


@variants((FP32, BF16), DSTATES)
@pytest.mark.parametrize("name", ["everything", "resets_with_states", "packed_with_states", "log_decay_and_gain"])
@pytest.mark.parametrize("sizes", IN_RANGES.values(), ids=list(IN_RANGES))
def test_sequences_in_ranges(sizes, name, variant):
    seqlen = 700 if variant.dtype == FP32 else 3001 if sizes["batch"] == 1 else 500
    options = OPTIONS[name] | {"seqlen": seqlen}
    if name.startswith("resets"):
        options |= {"resets": ((2, 64, 65, 499),) * sizes["batch"]}
    if name.startswith("packed"):
        options |= {"cu_seqlens": (0, 0, 300, 364, 365, 1500, 1500, 2000)}
    if sizes["batch"] > 1 and variant.dtype == FP32:
        # float64 keeps every step's state: 64 rows a head would take 41 GB. A head of 256 states takes two state tiles.
        sizes = sizes | {"headdim": 16, "heads": 60 if variant.dstate > 128 else 120}
    assert_accurate(variant.inputs(groups=1, **(options | sizes)))


@variants([BF16], (64, 256))
@pytest.mark.parametrize("heads", [2, 60, 160])
def test_packed_sequences_in_ranges(heads, variant):
    """With few heads a sequence is longer than a block's range of chunks, with many a range has several sequences."""
    inputs = variant.inputs(heads=heads, groups=1, cu_seqlens=(0, 0, 300, 364, 365, 1500, 1500, 2000))
    if variant.dstate > 64:
        assert_accurate(inputs)
    else:
        assert_matches_reference(inputs, gradients=False)


@variants([BF16], [64])
def test_many_packed_sequences(variant):
    """More than one for each thread that counts their chunks."""
    lengths = torch.arange(2500) % 3
    offsets = (0, *torch.cumsum(lengths, 0).tolist())
    sizes = {"heads": 2, "groups": 1, "headdim": 8, "dstate": 8, "cu_seqlens": offsets}
    assert_matches_reference(variant.inputs(**sizes), gradients=False)


@pytest.mark.parametrize("heads", [3, 397])
@variants([FP16], [100])
def test_heads_without_a_partner_in_ranges(heads, variant):
    """Longer than a range with few heads, in two ranges with many; padded rows and columns."""
    sizes = {"batch": 1, "heads": heads, "groups": 1, "headdim": 36, "seqlen": 700}
    assert_matches_reference(variant.inputs(**sizes), gradients=False)


def results_of(inputs: dict[str, Any]) -> dict[str, Tensor]:
    out, final_states = ssd_chunk_scan(**inputs, return_final_states=True)
    return {"out": out, "final_states": final_states}


@variants([BF16], [128])
def test_a_sequence_in_two_ranges_has_the_bits_of_a_whole_one(variant):
    """Two heads for each multiprocessor fill whole ranges; with half as many more, ranges begin inside sequences."""
    heads = 2 * torch.cuda.get_device_properties("cuda").multi_processor_count
    sizes = {"batch": 1, "heads": heads * 3 // 2, "groups": 1, "seqlen": 330}
    inputs = variant.inputs(**sizes)
    head_axes = {"x": 2, "dt": 2, "z": 2, "A": 0, "D": 0, "dt_bias": 0, "initial_states": 1}
    fewer = {
        name: value.narrow(head_axes[name], 0, heads) if name in head_axes and isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    cut, whole = results_of(inputs), results_of(fewer)
    assert_equal({"out": cut["out"][:, :, :heads], "final_states": cut["final_states"][:, :heads]}, whole)


MANY_HEADS = {"batch": 8, "heads": 80, "groups": 2, "seqlen": 330}


@variants([BF16], [128])
def test_rows_of_a_batch_with_many_heads(variant):
    """Ranges that begin inside sequences and have several: the same as a call for each row of the batch."""
    inputs = variant.inputs(**MANY_HEADS)
    whole = results_of(inputs)
    batched = ("x", "dt", "B", "C", "z", "initial_states")
    for row in (0, 7):
        of_row = results_of({name: inputs[name][row : row + 1] if name in batched else inputs[name] for name in inputs})
        # The sequences of one row may be longer than ranges: then sums come in another order.
        for name, value in of_row.items():
            torch.testing.assert_close(value[0], whole[name][row], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("sizes", [{"batch": 3, "seqlen": 200}, {"batch": 1, "heads": 2, "groups": 1, "seqlen": 700}])
@variants([FP32], DSTATES)
def test_unpacked_calls_are_not_taken_as_packed(sizes, variant):
    """In a kernel for both, ptxas 13.0 read the wrong predicate for the absent cu_seqlens (docs/tuning/ssd_chunk_scan.md)."""
    unpacked = variant.inputs(**sizes)
    assert_accurate(unpacked)
    assert_accurate(unpacked | {"z": None, "D": None, "initial_states": None})
    steps = sizes["batch"] * sizes["seqlen"]
    assert_accurate(variant.inputs(**sizes | {"cu_seqlens": (0, steps // 3, steps)}))


# ----- errors

# Norm of the error over the norm of the value, for sequences and states. With z two roundings contribute to a gradient, of g
# and of the gradient, and the roundings of S or T and of M. With more than 128 states the gradients of x and dt are rounded for
# 128 columns each, and once more when they are added.
LARGEST_RELATIVE_ERROR = {torch.float32: 1e-6, torch.bfloat16: 3.2e-3, torch.float16: 4.5e-4}


# The same for parameters: sums of few numbers in which terms cancel, so that the error is one draw.
LARGEST_RELATIVE_ERROR_OF_SUMS = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def relative_errors(inputs: dict[str, Any]) -> dict[str, float]:
    cotangents = make_cotangents(inputs)
    found, exact = evaluate(scan, inputs, cotangents), evaluate_in_float64(inputs, cotangents, scan)
    return {name: ((found[name] - value).norm() / value.norm()).item() for name, value in exact.items()}


@variants((FP32, BF16, FP16), [128])
def test_relative_errors(variant):
    errors = relative_errors(variant.inputs(heads=8, seqlen=512))
    sums = ("grad_A", "grad_D", "grad_dt_bias")
    too_large = {
        name: error
        for name, error in errors.items()
        if not error <= (LARGEST_RELATIVE_ERROR_OF_SUMS if name in sums else LARGEST_RELATIVE_ERROR)[variant.dtype]
    }
    assert not too_large


@variants((FP32, BF16, FP16), [256])
@pytest.mark.parametrize("seqlen", [64, 4096])
def test_relative_errors_with_many_states(seqlen, variant):
    errors = relative_errors(variant.inputs(heads=4, groups=1, batch=1, seqlen=seqlen, z=False))
    for name in ("out", "final_states", "grad_x", "grad_dt", "grad_B", "grad_C", "grad_initial_states"):
        assert errors[name] <= LARGEST_RELATIVE_ERROR[variant.dtype], (name, errors[name])


# The error after a long sequence over the error after one chunk.
LARGEST_GROWTH_OF_THE_ERROR = 1.5


@variants((FP32, BF16), [128])
def test_errors_do_not_grow_with_the_length(variant):
    """With states before and gradients after, which a single chunk rounds too."""
    few = relative_errors(variant.inputs(batch=16, seqlen=64))
    many = relative_errors(variant.inputs(batch=1, seqlen=8192))
    for argument in ("dt", "x", "B", "C"):
        name = f"grad_{argument}"
        assert many[name] <= LARGEST_GROWTH_OF_THE_ERROR * few[name], f"{name}: {few[name]:.3g}, later {many[name]:.3g}"


@variants([FP32], DSTATES)
def test_products_are_those_of_fp32(variant):
    """A single TF32 product, which the tests of TF32 below allow, leaves errors of 3e-4."""
    errors = relative_errors(variant.inputs(seqlen=512))
    assert max(errors.values()) <= 1e-6, errors


@pytest.mark.parametrize("is_given", [False, True], ids=["dt", "log_decay"])
@pytest.mark.parametrize("strong", [30 * math.log(2), 60 * math.log(2), 100.0], ids=["30_bits", "60_bits", "144_bits"])
@variants([FP32], [128])
def test_weak_decays_keep_their_accuracy_beside_strong_ones(strong, is_given, variant):
    """Cumulative sums of log decays are then large, and the decay between two steps is a difference of two of them."""
    inputs = variant.inputs(heads=2, groups=1, dt_softplus=False, dt_bias=False, z=False, log_decay=is_given)
    sizes = torch.where(torch.arange(130, device="cuda")[:, None] % 9 == 8, strong, 0.01).expand(2, 130, 2)
    inputs["x"][:, 8::9] = 0  # else all else is small beside what such a step adds
    A = torch.tensor([-1.0, -1.1], device="cuda")
    inputs |= {"log_decay": sizes * A} if is_given else {"dt": sizes, "A": A}
    errors = relative_errors(inputs)
    of_gates = "grad_log_decay" if is_given else "grad_dt"
    assert max(errors[name] for name in ("out", "final_states", "grad_x", of_gates, "grad_B", "grad_C")) <= 1e-6, errors


@variants([FP32], [128])
def test_error_does_not_grow_with_the_length(variant):
    few, many = (relative_errors(variant.inputs(batch=1, heads=2, groups=1, seqlen=seqlen, z=False)) for seqlen in (64, 65536))
    for name in ("out", "final_states", "grad_x", "grad_dt", "grad_B", "grad_C"):
        assert many[name] <= 2 * few[name], f"{name}: {few[name]:.3g}, later {many[name]:.3g}"


@variants([FP32], [128])
def test_without_decay_the_error_is_of_rounding_once_a_step(variant):
    """Without decay no rounding of a state is forgotten. There is less than one rounding per step, and they go either way."""
    seqlen = 65536
    inputs = variant.inputs(batch=1, heads=2, groups=1, seqlen=seqlen, z=False)
    inputs["A"] = torch.full_like(inputs["A"], -1e-6)
    exact = evaluate_in_float64(inputs, None, scan)
    for name, value in evaluate(scan, inputs).items():
        assert (value - exact[name]).norm() <= 2**-24 * math.sqrt(seqlen) * exact[name].norm(), name


# The bars of accuracy in benchmarks/bars.json, on the inputs of bench_ssd.py as Mamba-2 makes them: arguments of its cases.
BARS: dict[str, dict[str, Any]] = {
    "bf16": {"batch": 2, "seqlen": 2048, "heads": 24},
    "bf16_z": {"batch": 2, "seqlen": 2048, "heads": 24, "z": True},
    "bf16_N64": {"batch": 2, "seqlen": 2048, "heads": 24, "dstate": 64},
    "bf16_N256": {"batch": 2, "seqlen": 2048, "heads": 24, "dstate": 256},
    "fp32": {"batch": 1, "seqlen": 2048, "heads": 24, "dtype": torch.float32},
    "log_decay": {"batch": 2, "seqlen": 2048, "heads": 16, "headdim": 128, "groups": 16},
}


@pytest.mark.parametrize("name", BARS)
@pytest.mark.usefixtures("each_products")
def test_bars(name):
    pytest.importorskip("rich", reason="the benchmarks print their tables with rich")
    from benchmarks import bars, bench_ssd
    from benchmarks.benchmark import relative_error

    case = (bench_ssd.LogCase if name == "log_decay" else bench_ssd.Case)(**BARS[name])
    ours = case.contender(torch.device("cuda"))
    found = case.compared(ours)
    errors = {name: relative_error(found[name], exact) for name, exact in case.exact(ours).items()}
    row = {**case.fields, **case.errors_of_out(ours.inputs), "errors": {"ours": errors}}
    judged = bars.judge([(case.name, bench_ssd.figures(row, {}))], bars.load("ssd_chunk_scan"))
    assert len(judged) == 2 and all(found["met"] for found in judged), (judged, row["errors"])


# ----- TF32: where PyTorch's switch allows it, one TF32 product in place of three for fp32

# Relative errors of norms. Each element is rounded to 11 bits; dt, A, dt_bias and log_decay get differences of sums.
LEAST, MOST, MOST_OF_DIFFERENCES = 3e-5, 1.5e-3, 1e-2
OF_DIFFERENCES = ("grad_dt", "grad_A", "grad_dt_bias", "grad_log_decay")
TF32_SHAPES: dict[str, Any] = {
    "gated": {},
    "P100": {"headdim": 100, "groups": 1},
    "reverse": {"reverse": True, "z": False},
    "log_decay": {"log_decay": True, "z": False},
}


def tf32_inputs(**options: Any) -> dict[str, Any]:
    sizes = {"headdim": 64, "dstate": 128, "seqlen": 200, "dtype": torch.float32, "device": "cuda"}
    return make_inputs(**(sizes | options))


def assert_errors_of_tf32(inputs: dict[str, Any]) -> None:
    with tf32():
        errors = relative_errors(inputs)
    for name, error in errors.items():
        assert error <= (MOST_OF_DIFFERENCES if name in OF_DIFFERENCES else MOST), errors
    for name in ("out", "final_states", "grad_x", "grad_B", "grad_C"):
        assert errors[name] >= LEAST, f"{name} is too exact for TF32: {errors}"


@pytest.mark.parametrize("dstate", [16, 64, 128, 256])
@pytest.mark.parametrize("shape", TF32_SHAPES)
def test_tf32_accuracy(dstate, shape):
    assert_errors_of_tf32(tf32_inputs(dstate=dstate, **TF32_SHAPES[shape]))


@pytest.mark.parametrize("options", [{"cu_seqlens": (0, 0, 70, 71, 200)}, {"resets": [(3, 64, 150)]}], ids=["packed", "resets"])
def test_tf32_accuracy_of_several_sequences(options):
    assert_errors_of_tf32(tf32_inputs(**options))


@every_method
def test_tf32_accuracy_of_discretizations(discretization):
    assert_errors_of_tf32(tf32_inputs(discretization=discretization))


def test_tf32_accuracy_of_segments_along_time():
    assert_errors_of_tf32(tf32_inputs(batch=1, heads=2, groups=1, seqlen=2100))


def test_tf32_switch_is_read_by_forward_and_by_backward():
    inputs = tf32_inputs()
    cotangents = make_cotangents(inputs)
    exact = evaluate(SSD, inputs, cotangents)
    leaves = with_gradients(inputs)
    tensors = [value for value in leaves.values() if isinstance(value, Tensor) and value.requires_grad]
    names = [name for name, value in leaves.items() if isinstance(value, Tensor) and value.requires_grad]
    with tf32():
        assert plan(inputs)["products"] == plan(inputs, is_backward=True)["products"] == "TF32"
        outputs = SSD(**leaves)
        gradients = torch.autograd.grad(outputs, tensors, cotangents, retain_graph=True)
    exact_gradients = torch.autograd.grad(outputs, tensors, cotangents)
    assert plan(inputs)["products"] == plan(inputs, is_backward=True)["products"] == "3xTF32"
    assert not torch.equal(outputs[0], exact["out"])
    for name, rounded, gradient in zip(names, gradients, exact_gradients, strict=True):
        assert torch.equal(gradient, exact[f"grad_{name}"]), name
        # The gradient of D is a sum of elementwise products.
        assert name == "D" or not torch.equal(rounded, gradient), name


def test_tf32_by_fp32_precision():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        assert plan(tf32_inputs())["products"] == "TF32"
        matmul.fp32_precision = "ieee"
        assert plan(tf32_inputs())["products"] == "3xTF32"
    finally:
        matmul.fp32_precision = before


def test_tf32_has_the_same_bits_every_time_and_in_a_graph(fresh_dynamo):
    inputs = tf32_inputs()
    cotangents = make_cotangents(inputs)
    with tf32():
        first, second = (evaluate(SSD, inputs, cotangents) for _ in range(2))
        assert_equal(first, second)
        with torch.no_grad():
            graph, results = captured(lambda: SSD(**inputs))
            compiled = torch.compile(ssd_chunk_scan, backend="aot_eager")(**inputs)
    # A graph keeps the kernels that it has captured.
    graph.replay()
    assert torch.equal(results[0], first["out"])
    assert torch.equal(compiled, first["out"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tf32_does_not_affect_other_dtypes(dtype):
    inputs = tf32_inputs(dtype=dtype)
    cotangents = make_cotangents(inputs)
    exact = evaluate(SSD, inputs, cotangents)
    with tf32():
        assert_equal(evaluate(SSD, inputs, cotangents), exact)
