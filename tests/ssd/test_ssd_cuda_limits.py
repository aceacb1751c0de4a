"""ssd_chunk_scan on CUDA with little memory: backward in sub-batches, and kernels for blocks with less shared memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, arrange, assert_equal
from operator_spec import tensor_names, with_gradients
from ssd_helpers import (
    OPTIONS,
    assert_accurate,
    evaluate,
    every_option,
    limited_shared_memory,
    limited_workspace,
    make_cotangents,
    make_inputs,
    plan,
    scan,
)
from torch import Tensor

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("each_products")]

# Shared memory of a block in KiB: compute capability 8.6 and 8.9, then 8.0.
SHARED_MEMORY = (99, 163)


def inputs_on_cuda(**options: Any) -> dict[str, Any]:
    sizes = {"headdim": 64, "dstate": 64, "seqlen": 100, "heads": 8, "dtype": torch.bfloat16, "device": "cuda"}
    return make_inputs(**(sizes | options))


def bytes_of_heads(inputs: dict[str, Any], heads: int) -> int:
    """Bytes of the states that backward keeps."""
    x, offsets, units = inputs["x"], inputs["cu_seqlens"], math.ceil(inputs["x"].shape[3] / 64)
    chunks = math.ceil(x.shape[1] / 64) if offsets is None else x.shape[1] // 64 + len(offsets) - 1
    return heads * 2 * chunks * units * 64 * (64 if inputs["B"].shape[3] <= 64 else 128) * 2


def assert_same_in_sub_batches(inputs: dict[str, Any], heads_at_once: int, cotangents: tuple[Tensor | None, ...]) -> None:
    """Compares backward in sub-batches with backward at once. Sums over sub-batches come in another order, and grad_z
    recomputes y in other ranges of chunks. With initial states, the first pass rounds the states before a span otherwise; they
    enter grad_dt and grad_C. All else has the same bits."""
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
        others = (*others, "grad_dt", "grad_C")
    assert_equal(*({name: value for name, value in of.items() if name not in others} for of in (actual, expected)))
    for name in expected.keys() & set(of_batch):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-4)


# Rows of the batch; spans of a row, packed: groups or heads of one; spans of one chunk, and some of its heads.
@pytest.mark.parametrize(("batch", "heads_at_once"), [(3, 16), (3, 8), (2, 4), (2, 3), (1, 1)])
@every_option
def test_sub_batches(options, batch, heads_at_once):
    inputs = inputs_on_cuda(batch=batch, **options)
    assert_same_in_sub_batches(inputs, heads_at_once, make_cotangents(inputs))


@pytest.mark.parametrize(("groups", "heads_at_once"), [(2, 4), (2, 3), (4, 6)], ids=["groups", "heads", "uneven_groups"])
@pytest.mark.parametrize(("headdim", "dstate"), [(7, 17), (72, 65), (128, 128)])
@pytest.mark.parametrize("name", ["everything", "packed_with_states"])
def test_sub_batches_of_other_sizes(name, headdim, dstate, groups, heads_at_once):
    inputs = inputs_on_cuda(headdim=headdim, dstate=dstate, groups=groups, **OPTIONS[name])
    assert_same_in_sub_batches(inputs, heads_at_once, make_cotangents(inputs))


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("heads_at_once", [8, 3])
def test_sub_batches_of_any_layout(layout, heads_at_once):
    inputs = inputs_on_cuda(layout=layout)
    assert_same_in_sub_batches(inputs, heads_at_once, tuple(arrange(x, layout) for x in make_cotangents(inputs)))


@pytest.mark.parametrize("through", [0, 1], ids=["out", "final_states"])
@pytest.mark.parametrize("heads_at_once", [8, 3])
def test_sub_batches_with_the_gradient_of_one_result(heads_at_once, through):
    inputs = inputs_on_cuda()
    assert_same_in_sub_batches(
        inputs, heads_at_once, tuple(x if i == through else None for i, x in enumerate(make_cotangents(inputs)))
    )


@pytest.mark.parametrize("heads_at_once", [8, 3])
def test_sub_batches_for_a_subset_of_the_gradients(heads_at_once):
    """Each gradient has the same bits, whichever others are needed."""
    inputs = inputs_on_cuda()
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
def test_sub_batches_take_less_memory(heads_at_once):
    inputs = inputs_on_cuda(batch=4, seqlen=4096, dstate=128, z=False)
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
@pytest.mark.parametrize("dstate", [64, 256])
@pytest.mark.parametrize("name", ["everything", "resets_with_states"])
def test_spans(name, dstate, reverse, chunks_at_once):
    """Spans of several chunks, the last one shorter, with sequences that begin within a span and with one."""
    inputs = inputs_on_cuda(dstate=dstate, batch=2, seqlen=700, reverse=reverse, **OPTIONS[name])
    if inputs["seq_idx"] is not None:
        inputs["seq_idx"][:, 700 - 256 if reverse else 256 :] += 1
    limit = chunks_at_once * inputs["x"].shape[2] * 2 * 64 * min(dstate, 128) * 2
    with limited_workspace(limit):
        assert plan(inputs, is_backward=True)["spans"] == str(math.ceil(11 / chunks_at_once))
        assert_accurate(inputs, make_cotangents(inputs))


@pytest.mark.parametrize("kibibytes", SHARED_MEMORY)
@pytest.mark.parametrize("dstate", [64, 128])
@pytest.mark.parametrize("name", ["everything", "resets_with_states", "packed_with_states"])
def test_less_shared_memory(name, dstate, kibibytes):
    """Fewer stages: the same bits."""
    options = OPTIONS[name] | ({"cu_seqlens": (0, 0, 65, 700)} if name.startswith("packed") else {"seqlen": 700})
    inputs = inputs_on_cuda(dstate=dstate, **options)
    cotangents = make_cotangents(inputs)
    expected = evaluate(scan, inputs, cotangents)
    with limited_shared_memory(1024 * kibibytes):
        assert_equal(evaluate(scan, inputs, cotangents), expected)
