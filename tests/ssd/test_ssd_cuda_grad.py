"""ssd_chunk_scan on CUDA, gradients: the paths of backward's kernels, what stays apart."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, arrange, assert_equal, captured, dtypes
from operator_spec import tensor_names, with_gradients
from ssd_helpers import (
    OPTIONS,
    SEQUENCES,
    TENSORS,
    assert_accurate,
    assert_all_as_accurate,
    assert_all_close,
    assert_matches_reference,
    evaluate,
    evaluate_in_float64,
    evaluate_natively,
    make_cotangents,
    make_inputs,
    preferred_products,
    scan,
)
from torch import Tensor

from ssm_kernels import ssd_chunk_scan

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("each_products")]

of_kernels = dtypes(torch.float32, torch.bfloat16, torch.float16)

# Norm of the error over the norm of the gradient, for sequences and states. With z two roundings contribute, of g and of the
# gradient, and the roundings of S or T and of M.
LARGEST_RELATIVE_ERROR = {torch.float32: 1e-6, torch.bfloat16: 3.2e-3, torch.float16: 4.5e-4}
# The same for parameters: sums of few numbers in which terms cancel, so that the error is one draw.
LARGEST_RELATIVE_ERROR_OF_SUMS = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}
# The error after a long sequence over the error after one chunk.
LARGEST_GROWTH_OF_THE_ERROR = 1.5


def inputs_on_cuda(**options: Any) -> dict[str, Any]:
    sizes = {"headdim": 64, "dstate": 64, "seqlen": 130, "dtype": torch.bfloat16, "device": "cuda"}
    return make_inputs(**(sizes | options))


# ----- values


def test_both_products_agree_with_many_heads():
    """Equal up to roundings to the dtype of x, because only the order of sums differs."""
    inputs = inputs_on_cuda(batch=8, heads=80, groups=2, dstate=128)
    cotangents, results = make_cotangents(inputs), []
    for name in ("wgmma", "mma"):
        with preferred_products(name):
            results.append(evaluate(scan, inputs, cotangents))
    assert_all_close(*results, tolerance=2e-2)


# ----- sequences

PACKINGS = {
    "around_chunks": (0, 1, 64, 128, 193),
    "empty": (0, 0, 1, 64, 64, 70, 70),
    "long": (0, 0, 700, 701, 1500, 1500),
    "many": (0, *itertools.accumulate(max(0, 37 * i % 90 - 20) for i in range(40))),
}


@pytest.mark.parametrize("with_resets", [False, True], ids=["whole", "resets"])
@pytest.mark.parametrize("initial_states", [True, False], ids=["states", "no_states"])
@pytest.mark.parametrize("cu_seqlens", PACKINGS.values(), ids=list(PACKINGS))
def test_packed_sequences(cu_seqlens, initial_states, with_resets):
    resets = [sorted({*cu_seqlens[1:-1], *range(7, cu_seqlens[-1], 32)})] if with_resets else None
    inputs = inputs_on_cuda(cu_seqlens=cu_seqlens, resets=resets, initial_states=initial_states)
    results = assert_accurate(inputs)
    if initial_states:
        empty = [i for i, (begin, end) in enumerate(itertools.pairwise(cu_seqlens)) if begin == end]
        assert torch.equal(results["grad_initial_states"][empty], make_cotangents(inputs)[1][empty])


RESETS = {
    "at_chunks": ((64, 128), (128, 192)),
    "around_chunks": ((1, 63, 65, 199), (127,)),
    "in_one_row": ((20, 21, 100), ()),
    "at_every_step": (range(1, 200), range(64, 129)),
}


@pytest.mark.parametrize("initial_states", [True, False], ids=["states", "no_states"])
@pytest.mark.parametrize("resets", RESETS.values(), ids=list(RESETS))
def test_resets(resets, initial_states):
    assert_accurate(inputs_on_cuda(resets=resets, initial_states=initial_states, seqlen=200))


def test_what_follows_a_reset_has_no_part_in_it():
    """Without a gradient after it, not even a rounding of what was summed before in the same chunk."""
    inputs = inputs_on_cuda(seqlen=64, resets=((32,), (7, 33)), D=None, z=False)
    grad_out, grad_final_states = make_cotangents(inputs)
    grad_out[:, 33:] = 0
    grad_out[0, 32] = 0
    results = evaluate(scan, inputs, (1e3 * grad_out, 0 * grad_final_states))
    for name in ("x", "dt", "B", "C"):
        gradient = results[f"grad_{name}"]
        assert not gradient[0, 32:].any() and not gradient[1, 33:].any(), name
        assert gradient[0, :32].any() and gradient[1, :33].any(), name


# ----- work tiles split along time

# Few heads and many chunks: four segments of six chunks.
CUT = {"batch": 1, "heads": 2, "groups": 1, "seqlen": 64 * 23 + 5}
# Sequences with no chunks, with fewer chunks than segments, and with more.
CUT_PACKING = (0, 0, 579, 579, 580, 768, 1477, 1477)
CUT_OPTIONS = [{}, {"resets": ((700,),)}, {"cu_seqlens": CUT_PACKING}]
CUT_OPTIONS.append(CUT_OPTIONS[1] | CUT_OPTIONS[2])


def cut_inputs_on_cuda(**options: Any) -> dict[str, Any]:
    """Weak decays: the state before the first segment reaches the last one."""
    inputs = inputs_on_cuda(**(CUT | options))
    return inputs | {"A": 0.01 * inputs["A"]}


@of_kernels
@pytest.mark.parametrize(("heads", "headdim", "dstate", "seqlen"), [(1, 64, 64, 512), (3, 36, 100, 1477), (4, 128, 128, 2112)])
def test_split_work_tiles(heads, headdim, dstate, seqlen, dtype):
    assert_accurate(cut_inputs_on_cuda(heads=heads, headdim=headdim, dstate=dstate, seqlen=seqlen, dtype=dtype))


@pytest.mark.parametrize("through", [0, 1], ids=["out", "final_states"])
@pytest.mark.parametrize("options", CUT_OPTIONS, ids=["one_sequence", "resets", "packed", "packed_with_resets"])
def test_split_work_tiles_with_the_gradient_of_one_result(options, through):
    inputs = cut_inputs_on_cuda(**options)
    cotangents = tuple(x if i == through else None for i, x in enumerate(make_cotangents(inputs)))
    assert_accurate(inputs, cotangents)


@pytest.mark.parametrize("initial_states", [True, False], ids=["states", "no_states"])
@pytest.mark.parametrize("resets", [(1,), (1476,), (255, 512, 769), (650, 660), range(100, 1400, 100)], ids=str)
def test_split_work_tiles_with_resets(resets, initial_states):
    assert_accurate(cut_inputs_on_cuda(resets=(resets,), initial_states=initial_states))


@pytest.mark.parametrize("initial_states", [True, False], ids=["states", "no_states"])
@pytest.mark.parametrize("heads", [1, 4])
def test_split_work_tiles_of_packed_sequences(heads, initial_states):
    inputs = cut_inputs_on_cuda(cu_seqlens=CUT_PACKING, heads=heads, initial_states=initial_states)
    results = assert_accurate(inputs)
    if initial_states:
        assert torch.equal(results["grad_initial_states"][[0, 2, 6]], make_cotangents(inputs)[1][[0, 2, 6]])


# ----- extreme values


def test_gradient_is_zero_where_the_step_size_is_clamped():
    inputs = inputs_on_cuda()
    steps = torch.nn.functional.softplus(inputs["dt"].float() + inputs["dt_bias"])
    low, high = inputs["dt_limit"] = tuple(torch.quantile(steps, q).item() for q in (0.3, 0.7))
    # A step at a limit is on either side of it by the last bit of softplus.
    is_at_limit = ((steps - low).abs() < 1e-5) | ((steps - high).abs() < 1e-5)
    results = evaluate(scan, inputs, make_cotangents(inputs))
    is_clamped = (steps < low) | (steps > high)
    assert not results["grad_dt"][is_clamped & ~is_at_limit].any()
    assert results["grad_dt"][~is_clamped & ~is_at_limit].ne(0).double().mean() > 0.99
    results = assert_accurate(inputs | {"dt_limit": (5.0, 6.0)})
    assert not results["grad_dt"].any() and not results["grad_dt_bias"].any() and results["grad_A"].all()


@pytest.mark.parametrize("limits", [(0.0, math.inf), (-math.inf, math.inf)], ids=["clamped", "growth"])
def test_negative_step_sizes(limits):
    inputs = inputs_on_cuda(dt_softplus=False, dt_bias=False, dt_limit=limits)
    inputs["dt"] = inputs["dt"] - 0.3
    assert inputs["dt"].lt(0).double().mean() > 0.4
    assert_accurate(inputs)


@pytest.mark.parametrize("seqlen", [64, 130, 400])
def test_strong_decay(seqlen):
    """The decays of a sequence multiply to e^-1000."""
    inputs = inputs_on_cuda(seqlen=seqlen, heads=2, groups=1)
    steps = torch.nn.functional.softplus(inputs["dt"].float() + inputs["dt_bias"])
    inputs["A"] = -1000 / steps.sum(1).amin(0)
    results = assert_matches_reference(inputs)
    assert all(value.isfinite().all() for value in results.values())


@pytest.mark.parametrize("strong", [-1e5, -math.inf])
def test_a_step_that_forgets_everything(strong):
    """Every gradient is finite; beside an infinite A the gradient of dt is the limit."""
    inputs = inputs_on_cuda(heads=2, groups=1, dt_softplus=False, dt_bias=False)
    inputs |= {"A": torch.tensor([strong, -1.0], device="cuda"), "dt": inputs["dt"].abs()}
    cotangents = make_cotangents(inputs)
    exact = evaluate_in_float64(inputs, cotangents)
    assert all(value.isfinite().all() for value in exact.values())
    # PyTorch's own gradient of dt is NaN beside an infinite A: its error does not excuse the kernel's.
    native = {
        name: value.where(value.isfinite(), exact[name].to(value.dtype))
        for name, value in evaluate_natively(inputs, cotangents, exact).items()
    }
    assert_all_as_accurate(evaluate(scan, inputs, cotangents), native, exact, inputs)


def test_weak_decay_after_a_step_that_forgets_everything():
    """In the same chunk: the strong one leaves the differences between the others' sums their accuracy."""
    inputs = inputs_on_cuda(heads=2, groups=1, dt_softplus=False, dt_bias=False)
    inputs["dt"][:, 20::50] = 1e5
    inputs["x"][:, 20::50] = 0  # else all else is small beside what such a step adds
    results = assert_matches_reference(inputs)
    assert all(value.isfinite().all() for value in results.values())


# ----- strides


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layout_of_each_argument(layout):
    """Bit for bit: rows that the kernels cannot move, and steps that are apart, are copied."""
    for sizes in ({"seqlen": 70}, {"seqlen": 70, "headdim": 7, "dstate": 17}, {"cu_seqlens": (0, 0, 65, 100)}):
        inputs = inputs_on_cuda(**sizes)
        cotangents = make_cotangents(inputs)
        expected = evaluate(scan, inputs, cotangents)
        for name in tensor_names(inputs):
            assert_equal(evaluate(scan, inputs | {name: arrange(inputs[name], layout)}, cotangents), expected)
        assert_equal(evaluate(scan, inputs, tuple(arrange(x, layout) for x in cotangents)), expected)


def test_rows_at_any_address():
    """Rows of a wider tensor that begin at its second element."""
    inputs = inputs_on_cuda(seqlen=70)
    cotangents = make_cotangents(inputs)
    expected = evaluate(scan, inputs, cotangents)

    def moved(tensor: Tensor) -> Tensor:
        wider = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 3), math.nan)
        wider[..., 1:-2] = tensor
        return wider[..., 1:-2]

    for name in (*SEQUENCES, "initial_states"):
        assert_equal(evaluate(scan, inputs | {name: moved(inputs[name])}, cotangents), expected)
    assert_equal(evaluate(scan, inputs, tuple(map(moved, cotangents))), expected)


def test_strides_of_zero():
    """The kernels read expanded tensors in place."""
    inputs = inputs_on_cuda(seqlen=70)
    cotangents = make_cotangents(inputs)
    for name in SEQUENCES:
        for axis in range(inputs[name].dim()):
            expanded = inputs[name].narrow(axis, 0, 1).expand_as(inputs[name])
            expected = evaluate(scan, inputs | {name: expanded.contiguous()}, cotangents)
            assert_equal(evaluate(scan, inputs | {name: expanded}, cotangents), expected)


def test_gradient_of_a_sum():
    """Comes with strides of zero."""
    for options in ({}, {"cu_seqlens": (0, 30, 30, 70)}):
        inputs = inputs_on_cuda(**options)
        ones = tuple(torch.ones_like(x) for x in make_cotangents(inputs))
        expected = evaluate(scan, inputs, ones)
        assert_equal(
            evaluate(scan, inputs, tuple(x.flatten()[:1].view((1,) * x.dim()).expand(x.shape) for x in ones)), expected
        )
        leaves = with_gradients(inputs)
        ssd_chunk_scan(**leaves).sum().backward()
        of_out = evaluate(scan, inputs, (ones[0], None))
        assert_equal({f"grad_{name}": leaves[name].grad for name in tensor_names(inputs)}, gradients_only(of_out))


def gradients_only(results: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in results.items() if name.startswith("grad_")}


def test_gradients_have_the_strides_of_their_arguments():
    inputs = inputs_on_cuda(layout="transposed")
    results = assert_accurate(inputs)
    for name in ("x", "B", "C", "z", "dt"):
        assert results[f"grad_{name}"].stride() == inputs[name].stride(), name


# ----- the same bits, NaN


def with_nan(inputs: dict[str, Any], name: str, index: tuple[int, ...]) -> dict[str, Any]:
    value = inputs[name].clone()
    value[index] = math.nan
    return inputs | {name: value}


@pytest.mark.parametrize("name", SEQUENCES)
def test_nan_stays_in_its_packed_sequence(name):
    inputs = inputs_on_cuda(cu_seqlens=(0, 30, 30, 165, 300))
    cotangents = make_cotangents(inputs)
    clean = evaluate(scan, inputs, cotangents)
    actual = evaluate(scan, with_nan(inputs, name, (0, 40, 1)), cotangents)
    assert any(value.isnan().any() for value in actual.values())
    for argument in SEQUENCES:
        for steps in (slice(0, 30), slice(165, 300)):
            result = f"grad_{argument}"
            assert torch.equal(actual[result][:, steps], clean[result][:, steps]), f"{result} of a NaN in {name}"
    for i in (0, 1, 3):
        assert torch.equal(actual["grad_initial_states"][i], clean["grad_initial_states"][i]), name


@pytest.mark.parametrize("name", SEQUENCES)
def test_nan_stays_in_its_row_of_the_batch(name):
    inputs = inputs_on_cuda(batch=3)
    cotangents = make_cotangents(inputs)
    clean = evaluate(scan, inputs, cotangents)
    actual = evaluate(scan, with_nan(inputs, name, (1, 40, 1)), cotangents)
    assert any(value.isnan().any() for value in actual.values())
    for argument in (*SEQUENCES, "initial_states"):
        result = f"grad_{argument}"
        assert torch.equal(actual[result][::2], clean[result][::2]), f"{result} of a NaN in {name}"


@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("name", ["x", "dt", "z"])
def test_nan_stays_in_its_head(name, headdim):
    """But for the gradients of B and C, which are its group's."""
    inputs = inputs_on_cuda(heads=8, groups=2, headdim=headdim)
    cotangents = make_cotangents(inputs)
    clean = evaluate(scan, inputs, cotangents)
    actual = evaluate(scan, with_nan(inputs, name, (1, 40, 2)), cotangents)
    assert any(value.isnan().any() for value in actual.values())
    others = [0, 1, 3, 4, 5, 6, 7]
    heads_axis = dict.fromkeys(("x", "dt", "z"), 2) | {"initial_states": 1} | dict.fromkeys(("A", "D", "dt_bias"), 0)
    index = torch.tensor(others, device=clean["out"].device)
    for argument, axis in heads_axis.items():
        apart = (results[f"grad_{argument}"].index_select(axis, index) for results in (actual, clean))
        assert torch.equal(*apart), f"grad_{argument} of a NaN in {name}"
    for argument in ("B", "C"):
        assert torch.equal(actual[f"grad_{argument}"][:, :, 1], clean[f"grad_{argument}"][:, :, 1])
        assert torch.equal(actual[f"grad_{argument}"][0], clean[f"grad_{argument}"][0])


# ----- errors


def relative_errors(inputs: dict[str, Any]) -> dict[str, float]:
    cotangents = make_cotangents(inputs)
    actual, exact = evaluate(scan, inputs, cotangents), evaluate_in_float64(inputs, cotangents, scan)
    return {name: ((actual[name].double() - value).norm() / value.norm()).item() for name, value in exact.items()}


@of_kernels
def test_relative_errors(dtype):
    errors = relative_errors(inputs_on_cuda(heads=8, dstate=128, seqlen=512, dtype=dtype))
    sums = ("grad_A", "grad_D", "grad_dt_bias")
    too_large = {
        name: error
        for name, error in errors.items()
        if not error <= (LARGEST_RELATIVE_ERROR_OF_SUMS if name in sums else LARGEST_RELATIVE_ERROR)[dtype]
    }
    assert not too_large


@dtypes(torch.float32, torch.bfloat16)
def test_errors_do_not_grow_with_the_length(dtype):
    """With states before and gradients after, which a single chunk rounds too."""
    few = relative_errors(inputs_on_cuda(batch=16, seqlen=64, dstate=128, dtype=dtype))
    many = relative_errors(inputs_on_cuda(batch=1, seqlen=8192, dstate=128, dtype=dtype))
    for argument in ("dt", "x", "B", "C"):
        name = f"grad_{argument}"
        assert many[name] <= LARGEST_GROWTH_OF_THE_ERROR * few[name], f"{name}: {few[name]:.3g}, later {many[name]:.3g}"


# ----- CUDA graphs, memory


@pytest.mark.parametrize("length", [400, 1600], ids=["whole_work_tiles", "split_work_tiles"])
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])
def test_wrong_offsets_in_a_cuda_graph(gradients, length):
    """Graphs do not check offsets: wrong ones give wrong numbers, but the kernels end, and later calls are right."""
    inputs = inputs_on_cuda(cu_seqlens=(0, 100, length))
    cotangents = make_cotangents(inputs) if gradients else None
    kept = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
    expected = evaluate(scan, inputs, cotangents)
    graph, found = captured(lambda: evaluate(scan, inputs, cotangents))
    beyond = length + 500
    for offsets in ((7, 100, length), (0, length + 100, beyond), (-3, -2, -1), (length, 100, 0), (beyond, beyond, beyond)):
        inputs["cu_seqlens"].copy_(torch.tensor(offsets))
        graph.replay()
        torch.cuda.synchronize()
    inputs["cu_seqlens"].copy_(kept["cu_seqlens"])
    assert_equal({name: inputs[name] for name in kept}, kept)
    graph.replay()
    assert_equal(found, expected)


def test_memory_that_nobody_wrote_is_not_read(uninitialized_memory_is_nan):
    """Includes padded rows and blocks without work."""
    for options in (
        OPTIONS["everything"],
        {"cu_seqlens": PACKINGS["empty"]},
        {"headdim": 72, "dstate": 17, "heads": 9, "groups": 1},
        CUT | {"heads": 3},
    ):
        results = assert_accurate(inputs_on_cuda(**options))
        assert set(results) == {"out", "final_states", *(f"grad_{name}" for name in TENSORS)}
