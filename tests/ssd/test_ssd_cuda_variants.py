"""ssd_chunk_scan on CUDA: tests that are the same for every dtype, number of states and MMA policy.

With more than 128 states, forward's two state tiles share the rows of a head and backward takes blocks of columns. Where blocks
have too little shared memory for that, PyTorch's matmuls in float32 take the call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import LAYOUTS, arrange, assert_equal, no_synchronization
from operator_spec import Cotangents, tensor_names, with_gradients
from ssd_helpers import (
    OPTIONS,
    SSD,
    assert_accurate,
    assert_as_exact_as_rounding,
    assert_matches_reference,
    evaluate,
    every_method,
    every_option,
    has_kernels,
    make_cotangents,
    make_inputs,
    preferred_products,
    scan,
)
from torch import Tensor

pytestmark = pytest.mark.cuda

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Variant(NamedTuple):
    """A dtype, a number of states and the preferred MMA instruction; float32 has one kind."""

    dtype: torch.dtype
    dstate: int
    products: str

    def inputs(self, **options: Any) -> dict[str, Any]:
        sizes = {"headdim": 64, "dstate": self.dstate, "seqlen": 130, "dtype": self.dtype, "device": "cuda"}
        return make_inputs(**(sizes | options))


@pytest.fixture
def variant(request):
    with preferred_products(request.param.products):
        yield request.param


def variants(dtypes: Iterable[torch.dtype], dstates: Iterable[int]) -> pytest.MarkDecorator:
    chosen = [
        Variant(dtype, dstate, products)
        for dtype, dstate in itertools.product(dtypes, dstates)
        for products in (("wgmma",) if dtype == FP32 else ("wgmma", "mma"))
    ]
    ids = [f"{str(dtype).removeprefix('torch.')}-{dstate}-{products}" for dtype, dstate, products in chosen]
    return pytest.mark.parametrize("variant", chosen, ids=ids, indirect=True)


every_variant = variants((FP32, BF16, FP16), (64, 128, 256))


# ----- values and gradients

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


@pytest.mark.parametrize("name", ["everything", "packed_with_states"])
@variants((FP32, BF16), (64, 128, 256))
@every_method
def test_discretizations(discretization, variant, name):
    options = OPTIONS[name] | ({"cu_seqlens": (0, 0, 65, 100)} if name.startswith("packed") else {})
    assert_accurate(variant.inputs(discretization=discretization, **options))


@variants((FP32, BF16), (64, 128, 256))
@pytest.mark.parametrize("name", ["everything", "required_only"])
@pytest.mark.parametrize("seqlen", [1, 32, 33, 63, 64, 65, 1000])
def test_lengths(seqlen, name, variant):
    for heads in (2, 3):
        assert_accurate(variant.inputs(heads=heads, groups=1, **(OPTIONS[name] | {"seqlen": seqlen})))


FEW_STATES = [(1, 1), (7, 17), (64, 64), (72, 65), (128, 128), (200, 128), (256, 16)]
MANY_STATES = [(1, 129), (7, 137), (64, 192), (72, 255), (128, 136), (200, 200), (256, 256)]


@variants((FP32, BF16, FP16), [64])
@pytest.mark.parametrize(("headdim", "dstate"), FEW_STATES + MANY_STATES)
def test_headdim_and_dstate(headdim, dstate, variant):
    for name in ("everything", "required_only"):
        inputs = variant.inputs(headdim=headdim, dstate=dstate, **OPTIONS[name])
        assert_accurate(inputs)
        if (headdim, dstate) in FEW_STATES:
            assert_matches_reference(inputs, gradients=False)


@pytest.mark.parametrize("headdim", [64, 128])
@variants([BF16], (64, 128, 256))
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 1), (6, 2), (6, 6), (9, 3), (9, 1), (80, 2)])
def test_heads_share_groups(heads, groups, variant, headdim):
    """The heads of a block, and of all blocks that add to the gradients of the same B and C."""
    assert_accurate(variant.inputs(heads=heads, groups=groups, headdim=headdim, seqlen=70))


@pytest.mark.parametrize(("headdim", "dstate"), [(36, 100), (64, 200)])
@variants((FP32, BF16), [64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, variant, headdim, dstate):
    inputs = variant.inputs(layout=layout, headdim=headdim, dstate=dstate)
    assert_accurate(inputs, tuple(arrange(x, layout) for x in make_cotangents(inputs)))


@pytest.mark.parametrize("through", [0, 1], ids=["out", "final_states"])
@variants([BF16], (64, 256))
@every_option
def test_gradient_through_one_result_only(options, variant, through):
    inputs = variant.inputs(**options)
    cotangents = tuple(x if i == through else None for i, x in enumerate(make_cotangents(inputs)))
    assert_accurate(inputs, cotangents)


def gradients_of(inputs: dict[str, Any], cotangents: Cotangents, wanted: Iterable[str]) -> dict[str, Tensor | None]:
    leaves = with_gradients(inputs, wanted)
    torch.autograd.backward(scan(**leaves), cotangents)
    return {name: leaves[name].grad for name in tensor_names(inputs)}


@variants([BF16], (64, 256))
@pytest.mark.parametrize("name", ["everything", "resets_with_states", "packed_with_states"])
def test_gradients_of_a_subset(name, variant):
    """Each gradient has the same bits, whichever others are needed; the others are None."""
    options = OPTIONS[name] | ({"cu_seqlens": (0, 0, 65, 100)} if name.startswith("packed") else {"seqlen": 100})
    inputs = variant.inputs(**options)
    cotangents, present = make_cotangents(inputs), tensor_names(inputs)
    everything = gradients_of(inputs, cotangents, present)
    singles_and_pairs = [*itertools.combinations(present, 1), *itertools.combinations(present, 2)]
    for wanted in [*singles_and_pairs, *itertools.combinations(present, len(present) - 1)]:
        for argument, gradient in gradients_of(inputs, cotangents, wanted).items():
            if argument in wanted:
                assert torch.equal(gradient, everything[argument]), f"grad_{argument} when only {wanted} need gradients"
            else:
                assert gradient is None


@variants((BF16, FP16), (64, 128, 256))
def test_out_is_as_exact_as_its_rounding(variant):
    assert_as_exact_as_rounding(variant.inputs(heads=4, groups=1, seqlen=500, **OPTIONS["required_only"]))


# ----- the same bits, NaN

# Few heads and many chunks: four segments of six chunks.
CUT = {"batch": 1, "heads": 2, "groups": 1, "seqlen": 64 * 23 + 5}
REPEATED = {
    "long": {"batch": 1, "seqlen": 3000},
    "many": {"batch": 16, "heads": 32, "seqlen": 200},
    "many_heads": {"batch": 8, "heads": 80, "groups": 2, "seqlen": 330},
    "packed": {"cu_seqlens": (0, *itertools.accumulate(max(0, 37 * i % 90 - 20) for i in range(40)))},
    "longest": {"batch": 1, "heads": 1, "groups": 1, "seqlen": 20000},
    "cut": CUT,
    "cut_with_resets": CUT | {"resets": ((700,),)},
    "cut_packed": CUT | {"cu_seqlens": (0, 0, 579, 579, 580, 768, 1477, 1477)},
}


@every_variant
@pytest.mark.parametrize("sizes", REPEATED.values(), ids=list(REPEATED))
def test_repeatable(sizes, variant):
    inputs = variant.inputs(**sizes)
    cotangents = make_cotangents(inputs)
    first = evaluate(scan, inputs, cotangents)
    for _ in range(3):
        assert_equal(evaluate(scan, inputs, cotangents), first)


@every_variant
def test_nan_stays_in_its_head(variant):
    inputs = variant.inputs(heads=4, groups=2)
    inputs["x"][0, 70, 1] = math.nan
    results = evaluate(scan, inputs, make_cotangents(inputs))
    assert results["out"][0, 70:, 1].isnan().any() and results["grad_z"][0, 70:, 1].isnan().any()
    for name in ("out", "grad_x", "grad_z", "grad_dt"):
        assert results[name][:, :, [0, 2, 3]].isfinite().all() and results[name][1].isfinite().all()


# ----- CUDA graphs

CALLS = {"few_heads": {"seqlen": 300}, "many_heads": {"seqlen": 300, "heads": 160, "groups": 1}, "split_work_tiles": CUT}
every_call = pytest.mark.parametrize("sizes", CALLS.values(), ids=list(CALLS))


@every_variant
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", ["everything", "resets_with_states", "packed_with_states"])
@every_call
def test_cuda_graph(sizes, name, gradients, variant):
    """Replayed on new values in the same tensors, the offsets of packed sequences too, it computes what an eager call does.

    Twice: with many heads states go from block to block, and blocks count as they begin: a replay must begin both anew.
    """
    end = sizes["seqlen"] + 100
    offsets = ((0, 0, 100, 101, end), (0, 250, 250, end - 1, end)) if name.startswith("packed") else (None, None)
    inputs, others = (
        variant.inputs(seed=seed, **(OPTIONS[name] | sizes | {"cu_seqlens": cu_seqlens}))
        for seed, cu_seqlens in enumerate(offsets)
    )
    if name.startswith("packed") and not has_kernels(inputs):
        pytest.skip("PyTorch's products read cu_seqlens on the host: a block has too little shared memory for the kernels")
    SSD.assert_replays((inputs, others), gradients=gradients)


@every_variant
@pytest.mark.parametrize("name", ["everything", "resets_with_states"])
@every_call
def test_nothing_waits_for_the_device(sizes, name, variant):
    inputs = variant.inputs(**(OPTIONS[name] | sizes))
    cotangents = make_cotangents(inputs)
    evaluate(scan, inputs, cotangents)
    with no_synchronization():
        evaluate(scan, inputs, cotangents)
