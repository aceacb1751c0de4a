"""ssd_chunk_scan on CUDA with more states than a unit of its kernels carries: forward in kernels whose units share the rows of
a head, backward by columns. Where blocks have too little shared memory for that it is PyTorch's products in float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import LAYOUTS, arrange, assert_equal, captured, dtypes, no_synchronization
from operator_spec import with_gradients
from ssd_helpers import (
    OPTIONS,
    assert_all_close,
    assert_as_exact_as_rounding,
    assert_matches_reference,
    evaluate,
    evaluate_in_float64,
    every_method,
    every_option,
    has_16_bit_products,
    limited_shared_memory,
    limited_workspace,
    make_cotangents,
    make_inputs,
    scan,
)

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("each_products")]

in_16_bits = dtypes(torch.bfloat16, torch.float16)
of_kernels = dtypes(torch.float32, torch.bfloat16, torch.float16)


def inputs_on_cuda(**options: Any) -> dict[str, Any]:
    sizes = {"headdim": 64, "dstate": 256, "seqlen": 130, "dtype": torch.bfloat16, "device": "cuda"}
    return make_inputs(**(sizes | options))


def assert_accurate(inputs: dict[str, Any]) -> None:
    assert_matches_reference(inputs, exact=scan)


@of_kernels
@every_option
def test_gradients(options, dtype):
    assert_matches_reference(inputs_on_cuda(dtype=dtype, **({"headdim": 48, "seqlen": 65} | options)))
    assert_accurate(inputs_on_cuda(dtype=dtype, **({"dstate": 192, "seqlen": 200} | options)))


@in_16_bits
@pytest.mark.parametrize("name", ["everything", "resets_with_states", "packed_with_states"])
def test_gradients_of_products_in_float32(name, dtype):
    """Exact to their own rounding."""
    inputs = inputs_on_cuda(dtype=dtype, **({"headdim": 48, "dstate": 136, "seqlen": 65} | OPTIONS[name]))
    with limited_shared_memory(99 * 1024):
        assert not has_16_bit_products(inputs)
        assert_matches_reference(inputs)


@every_method
def test_discretizations(discretization):
    assert_accurate(inputs_on_cuda(discretization=discretization))


@of_kernels
@pytest.mark.parametrize(("headdim", "dstate"), [(1, 129), (7, 137), (64, 192), (72, 255), (128, 136), (200, 200), (256, 256)])
def test_headdim_and_dstate(headdim, dstate, dtype):
    for name in ("everything", "required_only"):
        assert_accurate(inputs_on_cuda(headdim=headdim, dstate=dstate, dtype=dtype, **OPTIONS[name]))


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 1), (6, 2), (6, 6), (80, 2)])
def test_heads_share_groups(heads, groups):
    assert_accurate(inputs_on_cuda(heads=heads, groups=groups, seqlen=70))


@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 1000])
def test_lengths(seqlen):
    assert_accurate(inputs_on_cuda(seqlen=seqlen, heads=2, groups=1))


@pytest.mark.parametrize("name", ["everything", "resets_with_states"])
@pytest.mark.parametrize(("batch", "heads", "seqlen"), [(1, 2, 3001), (3, 120, 500)], ids=["long_walks", "many_walks"])
def test_sequences_in_runs(batch, heads, seqlen, name):
    options = OPTIONS[name] | ({"resets": ((2, 64, 65, 499),) * batch} if name.startswith("resets") else {})
    assert_accurate(inputs_on_cuda(**(options | {"batch": batch, "heads": heads, "groups": 1, "seqlen": seqlen})))


@pytest.mark.parametrize("heads", [2, 60, 160])
def test_packed_sequences_in_runs(heads):
    assert_accurate(inputs_on_cuda(heads=heads, groups=1, cu_seqlens=(0, 0, 300, 364, 365, 1500, 1500, 2000)))


@in_16_bits
def test_out_is_as_exact_as_its_rounding(dtype):
    assert_as_exact_as_rounding(inputs_on_cuda(heads=4, groups=1, seqlen=500, dtype=dtype, **OPTIONS["required_only"]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout):
    inputs = inputs_on_cuda(layout=layout, dstate=200)
    cotangents = tuple(arrange(x, layout) for x in make_cotangents(inputs))
    assert_matches_reference(inputs, cotangents=cotangents, exact=scan)


@of_kernels
@pytest.mark.parametrize(
    "sizes", [{"batch": 1, "seqlen": 3000}, {"batch": 8, "heads": 80, "seqlen": 330}], ids=["long", "many"]
)
def test_repeatable(sizes, dtype):
    inputs = inputs_on_cuda(dtype=dtype, **sizes)
    cotangents = make_cotangents(inputs)
    assert_equal(*(evaluate(scan, inputs, cotangents) for _ in range(2)))


@pytest.mark.parametrize("through", [0, 1], ids=["out", "final_states"])
def test_gradient_through_one_result_only(through):
    inputs = inputs_on_cuda()
    cotangents = tuple(x if i == through else None for i, x in enumerate(make_cotangents(inputs)))
    assert_matches_reference(inputs, cotangents=cotangents, exact=scan)


def test_a_subset_of_the_gradients():
    """Whatever needs gradients, each is bit for bit the same."""
    inputs = inputs_on_cuda()
    cotangents, wholes = make_cotangents(inputs), {}
    everything = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
    for wanted in (everything, ("B",), ("x", "C"), ("A", "z"), ("D",), ("dt", "dt_bias"), ("initial_states",)):
        leaves = with_gradients(inputs, wanted)
        torch.autograd.backward(scan(**leaves), cotangents)
        found = {name: leaves[name].grad for name in wanted}
        wholes = wholes or found
        assert_equal(found, {name: wholes[name] for name in wanted})


@pytest.mark.parametrize("name", ["everything", "packed_with_states"])
def test_with_little_memory(name):
    """A block's, with which there are no such kernels, or fewer stages, and that of the states that backward keeps."""
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
            assert_matches_reference(inputs, cotangents=cotangents, exact=scan)


CALLS = {
    "many_heads": {"seqlen": 300, "heads": 160, "groups": 1},
    "cut_walks": {"seqlen": 1500, "batch": 1, "heads": 2, "groups": 1},
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


@calls("many_heads", "cut_walks")
def test_nothing_waits_for_the_device(sizes):
    inputs = inputs_on_cuda(**sizes)
    cotangents = make_cotangents(inputs)
    evaluate(scan, inputs, cotangents)
    with no_synchronization():
        evaluate(scan, inputs, cotangents)


def test_nan_stays_in_its_head():
    inputs = inputs_on_cuda(heads=4, groups=2)
    inputs["x"][0, 70, 1] = float("nan")
    results = evaluate(scan, inputs, make_cotangents(inputs))
    assert results["out"][0, 70:, 1].isnan().any() and results["grad_z"][0, 70:, 1].isnan().any()
    for name in ("out", "grad_x", "grad_z", "grad_dt"):
        assert results[name][:, :, [0, 2, 3]].isfinite().all() and results[name][1].isfinite().all()


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


@calls("many_heads", "cut_walks", "packed")
def test_cuda_graph(sizes):
    """Replayed on new values in the same tensors, it computes what an eager call does."""
    inputs, others = (inputs_on_cuda(seed=seed, **sizes) for seed in range(2))
    cotangents = make_cotangents(inputs)
    expected = evaluate(scan, others, cotangents)
    graph, found = captured(lambda: evaluate(scan, inputs, cotangents))
    for name, value in others.items():
        if isinstance(value, torch.Tensor):
            inputs[name].copy_(value)
    graph.replay()
    assert_equal(found, expected)
