"""ssd_chunk_scan on CUDA with more states than a state tile has columns. Two tiles of forward share the rows of a head;
backward takes blocks of columns. Where blocks have too little shared memory, PyTorch's matmuls run in float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_equal, dtypes
from ssd_helpers import (
    OPTIONS,
    assert_accurate,
    assert_all_close,
    assert_matches_reference,
    evaluate,
    evaluate_in_float64,
    has_16_bit_products,
    limited_shared_memory,
    limited_workspace,
    make_cotangents,
    make_inputs,
    scan,
)

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("each_products")]

fp16_and_bf16 = dtypes(torch.bfloat16, torch.float16)
of_kernels = dtypes(torch.float32, torch.bfloat16, torch.float16)


def inputs_on_cuda(**options: Any) -> dict[str, Any]:
    sizes = {"headdim": 64, "dstate": 256, "seqlen": 130, "dtype": torch.bfloat16, "device": "cuda"}
    return make_inputs(**(sizes | options))


@fp16_and_bf16
@pytest.mark.parametrize("name", ["everything", "resets_with_states", "packed_with_states"])
def test_gradients_of_products_in_float32(name, dtype):
    """Exact to their own rounding."""
    inputs = inputs_on_cuda(dtype=dtype, **({"headdim": 48, "dstate": 136, "seqlen": 65} | OPTIONS[name]))
    with limited_shared_memory(99 * 1024):
        assert not has_16_bit_products(inputs)
        assert_matches_reference(inputs)


@pytest.mark.parametrize("name", ["everything", "resets_with_states"])
@pytest.mark.parametrize(
    ("batch", "heads", "seqlen"), [(1, 2, 3001), (3, 120, 500)], ids=["long_work_tiles", "many_work_tiles"]
)
def test_sequences_in_ranges(batch, heads, seqlen, name):
    options = OPTIONS[name] | ({"resets": ((2, 64, 65, 499),) * batch} if name.startswith("resets") else {})
    assert_accurate(inputs_on_cuda(**(options | {"batch": batch, "heads": heads, "groups": 1, "seqlen": seqlen})))


@pytest.mark.parametrize("heads", [2, 60, 160])
def test_packed_sequences_in_ranges(heads):
    assert_accurate(inputs_on_cuda(heads=heads, groups=1, cu_seqlens=(0, 0, 300, 364, 365, 1500, 1500, 2000)))


@pytest.mark.parametrize("name", ["everything", "packed_with_states"])
def test_with_little_memory(name):
    """Limits a block's shared memory, so that kernels have fewer stages or none fits, and backward's workspace."""
    options = OPTIONS[name] | ({"cu_seqlens": (0, 0, 65, 700)} if name.startswith("packed") else {"seqlen": 700})
    inputs = inputs_on_cuda(**options)
    cotangents = make_cotangents(inputs)
    expected = evaluate(scan, inputs, cotangents)
    with limited_shared_memory(163 * 1024):
        assert_equal(evaluate(scan, inputs, cotangents), expected)
    with limited_shared_memory(99 * 1024):
        assert_all_close(evaluate(scan, inputs, cotangents), expected, tolerance=2e-2)
    for workspace in (1, 2**20):
        with limited_workspace(workspace):
            assert_accurate(inputs, cotangents)


CALLS = {
    "many_heads": {"seqlen": 300, "heads": 160, "groups": 1},
    "split_work_tiles": {"seqlen": 1500, "batch": 1, "heads": 2, "groups": 1},
    "packed": {"heads": 2, "groups": 1, "cu_seqlens": (0, 0, 65, 700)},
    "no_steps": {"seqlen": 0},
    "no_rows": {"batch": 0},
    "empty_sequences": {"cu_seqlens": (0, 0, 0)},
}


def calls(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("sizes", [CALLS[name] for name in names], ids=names)


every_call = calls(*CALLS)


@every_call
def test_calls(sizes):
    assert_accurate(inputs_on_cuda(**sizes))


@every_call
def test_memory_that_nobody_wrote_is_not_read(sizes, uninitialized_memory_is_nan):
    for dstate in (256, 137):
        inputs = inputs_on_cuda(dstate=dstate, headdim=48, **sizes)
        for result in evaluate(scan, inputs, make_cotangents(inputs)).values():
            assert result.isfinite().all()


@pytest.mark.parametrize("dtype, bar", [(torch.float32, 1e-6), (torch.bfloat16, 3.2e-3), (torch.float16, 4.5e-4)])
@pytest.mark.parametrize("seqlen", [64, 4096])
def test_relative_errors(seqlen, dtype, bar):
    """The gradients of x and dt are rounded for 128 columns each, and once more when they are added."""
    sizes = {"heads": 4, "groups": 1, "batch": 1, "seqlen": seqlen, "z": False}
    inputs = inputs_on_cuda(dtype=dtype, **sizes)
    cotangents = make_cotangents(inputs)
    found, exact = evaluate(scan, inputs, cotangents), evaluate_in_float64(inputs, cotangents, scan)
    for name in ("out", "final_states", "grad_x", "grad_dt", "grad_B", "grad_C", "grad_initial_states"):
        error = (found[name] - exact[name]).norm() / exact[name].norm()
        assert error <= bar, (name, error)
