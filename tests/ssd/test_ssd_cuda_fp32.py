"""ssd_chunk_scan on CUDA for fp32: 3xTF32 kernels, as exact as PyTorch's matmuls in fp32. test_ssd_cuda_tf32.py allows TF32.

test_ssd_cuda_variants.py has the tests that are the same for all dtypes.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import LAYOUTS
from operator_spec import with_gradients
from ssd_helpers import (
    KERNEL_CHUNK,
    MINIMAL,
    NAN_PLACES,
    OPTIONS,
    assert_accurate,
    assert_nan_ends,
    evaluate,
    evaluate_in_float64,
    every_method,
    every_option,
    limited_shared_memory,
    limited_workspace,
    make_cotangents,
    make_inputs,
    scan,
)
from torch import Tensor

pytestmark = pytest.mark.cuda

# Each has its own number of columns per state tile and of stages.
every_dstate = pytest.mark.parametrize("dstate", [64, 128, 256])


def inputs_on_cuda(**options: Any) -> dict[str, Any]:
    sizes = {"headdim": 64, "dstate": 128, "seqlen": 130, "dtype": torch.float32, "device": "cuda"}
    return make_inputs(**(sizes | options))


@every_dstate
@every_option
def test_options(options, dstate):
    assert_accurate(inputs_on_cuda(dstate=dstate, **options))


# Up to 32 steps a sequential scan takes the place of the matrix products.
@pytest.mark.parametrize("dstate", [5, 64, 128, 200, 256])
@every_option
def test_options_of_short_sequences(options, dstate):
    assert_accurate(inputs_on_cuda(dstate=dstate, **({"seqlen": 24} | options)))


@every_method
def test_discretizations_of_short_sequences(discretization):
    assert_accurate(inputs_on_cuda(seqlen=32, discretization=discretization))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("headdim", [3, 16, 40, 72, 200])
def test_rows_of_short_sequences(headdim, layout):
    assert_accurate(inputs_on_cuda(seqlen=19, headdim=headdim, dstate=24, heads=6, groups=3, layout=layout))


@pytest.mark.parametrize(("seqlen", "is_sequential"), [(32, True), (33, False)])
def test_short_sequences_are_sequential(seqlen, is_sequential):
    inputs = inputs_on_cuda(seqlen=seqlen)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        scan(**inputs)
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert any("ssd_short_scan_fwd_kernel" in name for name in names) == is_sequential, sorted(names)


def test_nan_in_a_short_sequence_reaches_its_later_steps_alone():
    inputs = inputs_on_cuda(seqlen=30, batch=1, resets=((10, 20),))
    clean = scan(**inputs)[0]
    inputs["x"][0, 13, 1] = math.nan
    out = scan(**inputs)[0]
    assert torch.equal(out[0, :13], clean[0, :13]) and torch.equal(out[0, 20:], clean[0, 20:])
    assert out[0, 13:20, 1].isnan().all() and torch.equal(out[0, :, [0, 2, 3]], clean[0, :, [0, 2, 3]])


def test_short_sequences_reset_at_every_step():
    inputs = inputs_on_cuda(seqlen=32, resets=(range(1, 32), (31,)))
    assert_accurate(inputs)
    inputs["initial_states"] = torch.full_like(inputs["initial_states"], math.inf)
    out = scan(**inputs)[0]
    assert out[0, 1:].isfinite().all() and out[1, 31].isfinite().all()


@every_dstate
@pytest.mark.parametrize("name", ["everything", "resets_with_states", "packed_with_states"])
@pytest.mark.parametrize(
    "sizes", [{"batch": 1, "heads": 2}, {"batch": 3, "heads": 120}], ids=["long_work_tiles", "many_work_tiles"]
)
def test_sequences_in_ranges(sizes, name, dstate):
    options = OPTIONS[name] | {"seqlen": 700}
    if name.startswith("resets"):
        options |= {"resets": ((2, 64, 65, 499),) * sizes["batch"]}
    if name.startswith("packed"):
        options |= {"cu_seqlens": (0, 0, 300, 364, 365, 1500, 1500, 2000)}
    if sizes["batch"] > 1:
        # The reference keeps every step's state: 64 rows a head would take 41 GB. A head of 256 states takes two state tiles.
        options |= {"headdim": 16, "heads": 60 if dstate > 128 else 120}
    assert_accurate(inputs_on_cuda(dstate=dstate, groups=1, **(sizes | options)))


def relative_errors(inputs: dict[str, Any]) -> dict[str, float]:
    cotangents = make_cotangents(inputs)
    found, exact = evaluate(scan, inputs, cotangents), evaluate_in_float64(inputs, cotangents, scan)
    return {name: ((found[name] - value).norm() / value.norm()).item() for name, value in exact.items()}


@every_dstate
def test_products_are_those_of_fp32(dstate):
    """A single TF32 product, which test_ssd_cuda_tf32.py allows, leaves errors of 3e-4."""
    errors = relative_errors(inputs_on_cuda(dstate=dstate, seqlen=512))
    assert max(errors.values()) <= 1e-6, errors


@pytest.mark.parametrize("strong", [30 * math.log(2), 60 * math.log(2), 100.0], ids=["30_bits", "60_bits", "144_bits"])
def test_weak_decays_keep_their_accuracy_beside_strong_ones(strong):
    """Cumulative sums of log decays are then large, and the decay between two steps is a difference of two of them."""
    inputs = inputs_on_cuda(heads=2, groups=1, dt_softplus=False, dt_bias=False, z=False)
    inputs["dt"] = torch.where(torch.arange(130, device="cuda")[:, None] % 9 == 8, strong, 0.01).expand_as(inputs["dt"])
    inputs["x"][:, 8::9] = 0  # else all else is small beside what such a step adds
    inputs["A"] = torch.tensor([-1.0, -1.1], device="cuda")
    errors = relative_errors(inputs)
    assert max(errors[name] for name in ("out", "final_states", "grad_x", "grad_dt", "grad_B", "grad_C")) <= 1e-6, errors


def test_error_does_not_grow_with_the_length():
    few, many = (relative_errors(inputs_on_cuda(batch=1, heads=2, groups=1, seqlen=seqlen, z=False)) for seqlen in (64, 65536))
    for name in ("out", "final_states", "grad_x", "grad_dt", "grad_B", "grad_C"):
        assert many[name] <= 2 * few[name], f"{name}: {few[name]:.3g}, later {many[name]:.3g}"


def test_without_decay_the_error_is_of_rounding_once_a_step():
    """Without decay no rounding of a state is forgotten. There is less than one rounding per step, and they go either way."""
    seqlen = 65536
    inputs = inputs_on_cuda(batch=1, heads=2, groups=1, seqlen=seqlen, z=False)
    inputs["A"] = torch.full_like(inputs["A"], -1e-6)
    exact = evaluate_in_float64(inputs, None, scan)
    for name, value in evaluate(scan, inputs).items():
        assert (value - exact[name]).norm() <= 2**-24 * math.sqrt(seqlen) * exact[name].norm(), name


@every_dstate
@pytest.mark.parametrize("kibibytes", [99, 163])
@pytest.mark.parametrize("name", ["everything", "packed_with_states"])
def test_less_shared_memory(name, dstate, kibibytes):
    """Kernels have fewer stages, or PyTorch's matmuls run in one direction or both."""
    options = OPTIONS[name] | ({"cu_seqlens": (0, 0, 65, 700)} if name.startswith("packed") else {"seqlen": 700})
    inputs = inputs_on_cuda(dstate=dstate, **options)
    with limited_shared_memory(1024 * kibibytes):
        assert_accurate(inputs)


@every_dstate
def test_less_workspace(dstate):
    inputs = inputs_on_cuda(dstate=dstate, heads=8)
    cotangents = make_cotangents(inputs)
    for workspace in (1, 2**20):
        with limited_workspace(workspace):
            assert_accurate(inputs, cotangents)


@every_dstate
@pytest.mark.parametrize("sizes", [{"batch": 3, "seqlen": 200}, {"batch": 1, "heads": 2, "groups": 1, "seqlen": 700}])
def test_unpacked_calls_are_not_taken_as_packed(sizes, dstate):
    """In a kernel for both, ptxas 13.0 read the wrong predicate for the absent cu_seqlens (docs/tuning/ssd_chunk_scan.md)."""
    unpacked = inputs_on_cuda(dstate=dstate, **sizes)
    assert_accurate(unpacked)
    assert_accurate(unpacked | {"z": None, "D": None, "initial_states": None})
    steps = sizes["batch"] * sizes["seqlen"]
    assert_accurate(inputs_on_cuda(dstate=dstate, **sizes | {"cu_seqlens": (0, steps // 3, steps)}))


@every_dstate
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_largest_inputs(sign, dstate):
    """Rounding to the nearest TF32 number must not turn the largest float into infinity."""
    inputs = inputs_on_cuda(**MINIMAL, dstate=dstate, seqlen=70)
    inputs["B"] *= 2.0**-40
    place = (0, 40, 1, 3)
    inputs["x"][place] = sign * torch.finfo(torch.float32).max
    exact = {key: value.double() if isinstance(value, Tensor) else value for key, value in inputs.items()}
    for actual, expected in zip(scan(**inputs), scan(**exact), strict=True):
        assert actual.isfinite().all()
        assert (actual - expected).abs().amax() <= 1e-5 * expected.abs().amax()


# Sizes, the steps at which the last row's sequences begin, and the step of the NaN: inside chunks, and in a split work tile.
NAN_CASES = {
    "in_steps": ({"seqlen": 30}, (0, 10, 20), 13),
    "in_chunks": ({"seqlen": 90}, (0, 36, 72), 40),
    "in_segments": ({"seqlen": 1000, "batch": 1, "heads": 1, "groups": 1}, (0, 300, 710), 500),
}


@every_dstate
@pytest.mark.parametrize("sizes, begins, step", NAN_CASES.values(), ids=list(NAN_CASES))
@pytest.mark.parametrize("name", NAN_PLACES)
def test_nan_ends_where_a_sequence_begins(name, sizes, begins, step, dstate):
    inputs = inputs_on_cuda(dstate=dstate, resets=(begins[1:],), **sizes)
    assert_nan_ends(inputs, name, step, begins, chunk=KERNEL_CHUNK)


@pytest.mark.parametrize("name", NAN_PLACES)
def test_nan_ends_in_products_of_pytorch(name):
    """PyTorch's matmuls use the chunk_size that the caller passes."""
    inputs = inputs_on_cuda(seqlen=90, resets=((36, 72),), chunk_size=16)
    with limited_shared_memory(99 * 1024):
        assert_nan_ends(inputs, name, step=40, begins=(0, 36, 72), chunk=16)


@every_dstate
@pytest.mark.parametrize("kibibytes", [163, 227])
def test_kernels_run(kibibytes, dstate):
    """Backward without z for every dstate, with less shared memory for 64 columns of the states at a time."""
    inputs = inputs_on_cuda(dstate=dstate, z=False)
    if torch.cuda.get_device_properties(0).shared_memory_per_block_optin < 1024 * kibibytes:
        pytest.skip(f"a block has no {kibibytes} KiB of shared memory")
    cotangents = make_cotangents(inputs)
    with (
        limited_shared_memory(1024 * kibibytes),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile,
    ):
        evaluate(scan, inputs, cotangents)
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    columns = 64 if kibibytes == 163 else min(dstate, 128)
    kernels = [f"{name}<float, {columns}," for name in ("ssd_state_passing_kernel", "ssd_bwd_chunks_kernel")]
    if kibibytes == 227 or dstate <= 128:
        kernels.append(f"ssd_fwd_sm80_kernel<float, {dstate},")
    for kernel in kernels:
        assert any(kernel in name for name in names), f"no {kernel} ...> among {sorted(names)}"


@pytest.mark.parametrize("wanted", [("x",), ("dt", "A"), ("B", "initial_states"), ("C", "D"), ("dt_bias",)], ids="_".join)
def test_some_gradients_by_columns(wanted):
    """64 columns of the states at a time, the last block with fewer. Some gradients come from one block only."""
    inputs = inputs_on_cuda(dstate=137, z=False)
    cotangents = make_cotangents(inputs)
    everything = evaluate(scan, inputs, cotangents)
    with limited_shared_memory(163 * 1024):
        leaves = with_gradients(inputs, wanted)
        torch.autograd.backward(scan(**leaves), cotangents)
    for name in wanted:
        expected = everything[f"grad_{name}"]
        assert (leaves[name].grad - expected).norm() <= 2e-6 * expected.norm(), name


@every_dstate
def test_memory_that_nobody_wrote_is_not_read(dstate, uninitialized_memory_is_nan):
    for options in (OPTIONS["everything"], {"cu_seqlens": (0, 0, 1, 64, 64, 70, 70)}, {"headdim": 72, "heads": 9, "groups": 1}):
        assert_accurate(inputs_on_cuda(dstate=dstate - 3, **options))
