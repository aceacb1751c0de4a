"""Summaries of a span of steps, and their adjoint."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import ssd_helpers
import test_operators_compile as compiled
import test_operators_torch as generic
import test_operators_vmap as mapped
import torch
from helpers import LAYOUTS, METHODS, Draws, dtypes
from operator_spec import tensor_names, with_gradients
from operators import over, over_options
from summary_helpers import (
    DISTINCT_SUMMARIES,
    RECURRENCE_SUMMARY_VARIANTS,
    SELECTIVE_SUMMARY,
    SSD_SUMMARY,
    SUMMARIES,
    Summary,
    assert_within_a_rounding_per_step,
    cast,
)

import ssm_kernels
from ssm_kernels.reference.sequences import step_sizes

OPERATOR = "every operator"

ALL = {"selective_scan": SELECTIVE_SUMMARY, "ssd_chunk_scan": SSD_SUMMARY} | RECURRENCE_SUMMARY_VARIANTS
every_summary, every_distinct = over(SUMMARIES), over(DISTINCT_SUMMARIES)


def all_cases(operators: dict[str, Summary]) -> pytest.MarkDecorator:
    return over_options(operators, lambda spec: spec.options)


# ----- values and gradients


@all_cases(ALL)
def test_matches_reference(operator, options, device):
    for seqlen in (5, 70):
        operator.assert_matches_reference(operator.make_inputs(**options, seqlen=seqlen, device=device))


@dtypes(torch.float32, torch.bfloat16, torch.float16)
@all_cases(DISTINCT_SUMMARIES)
def test_low_precision(operator, options, dtype, device):
    operator.assert_matches_reference(operator.make_inputs(**options, seqlen=40, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("delta_softplus", [False, True])
@pytest.mark.parametrize("discretization", METHODS)
def test_every_discretization(discretization, delta_softplus, dtype):
    options: dict[str, Any] = {"discretization": discretization, "delta_softplus": delta_softplus, "dtype": dtype}
    for sizes in ({"seqlen": 70, "dim": 20, "dstate": 17}, {"B": "constant", "groups": 2}):
        SELECTIVE_SUMMARY.assert_matches_reference(SELECTIVE_SUMMARY.make_inputs(**options, **sizes))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("discretization", ssd_helpers.METHODS)
def test_every_discretization_of_ssd(discretization, dtype):
    SSD_SUMMARY.assert_matches_reference(SSD_SUMMARY.make_inputs(discretization=discretization, dtype=dtype, seqlen=40))


@pytest.mark.parametrize("resets", [None, ((100, 290), (), (130,))], ids=["whole", "resets"])
def test_several_runs_of_ssd(resets, device):
    """Enough states for several runs of steps in a call."""
    options = {"seqlen": 300, "heads": 8, "headdim": 64, "dstate": 64, "resets": resets, "batch": 3}
    SSD_SUMMARY.assert_matches_reference(SSD_SUMMARY.make_inputs(**options, device=device))


@pytest.mark.parametrize("resets", [None, ((100, 290, 600), ())], ids=["whole", "resets"])
def test_long_run_of_ssd(resets, device):
    """Few states, for which a run has several blocks of summed logarithms, the last one incomplete."""
    SSD_SUMMARY.assert_matches_reference(SSD_SUMMARY.make_inputs(seqlen=700, resets=resets, device=device))


@pytest.mark.parametrize("layout", LAYOUTS)
@every_distinct
def test_layouts(operator, layout, device):
    inputs = operator.make_inputs(layout=layout, seqlen=40, device=device)
    plain = operator.make_inputs(seqlen=40, device=device)
    cotangents = operator.make_cotangents(inputs)
    operator.assert_close(*(operator.evaluate(operator, call, cotangents) for call in (inputs, plain)), 1e-12)


@over(ALL)
def test_last_state_from_any_state(operator, device):
    """``decay * state + last_state``, of the scan's own kernels; with a long span, whose decay is far below one."""
    spans = [{"seqlen": 1}, {"seqlen": 33}, {"seqlen": 300}]
    if "packed" in operator.options:
        spans.append(operator.options["packed"])
    for span in spans:
        inputs = operator.make_inputs(**span, device=device)
        last_state, decay = operator(**inputs)
        state = Draws(1).normal(*last_state.shape).to(last_state)
        of_state = decay.reshape(*decay.shape, *(1,) * (state.dim() - decay.dim())) * state
        torch.testing.assert_close(of_state + last_state, operator.from_a_state(inputs, state), rtol=1e-11, atol=1e-11)


@over({name: SUMMARIES[f"{name}_summary"] for name in ("selective_scan", "ssd_chunk_scan")})
def test_sum_of_a_long_span_is_in_float64(operator):
    """Equal steps whose sum in float32 has an error of 1e-3."""
    steps = 1 << 18
    inputs = operator.make_inputs(
        batch=1,
        seqlen=steps,
        dtype=torch.float32,
        groups=1,
        **dict.fromkeys(("dim", "dstate") if operator is SELECTIVE_SUMMARY else ("heads", "headdim", "dstate"), 1),
    )
    step = "delta" if operator is SELECTIVE_SUMMARY else "dt"
    size = torch.tensor(1e-5, dtype=torch.float32)
    inputs[step] = size.expand_as(inputs[step])
    inputs |= {f"{step}_softplus": False, f"{step}_bias": None}
    decay = operator(**inputs)[1]
    expected = torch.exp(inputs["A"].double() * size.double() * steps)
    torch.testing.assert_close(decay.double().flatten(), expected.flatten(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("a", [0.9, -0.9, 0.3])
def test_decay_of_a_long_span_becomes_zero(a):
    """It stays at no denormal number, which would round up to itself, and computing with which is slow."""
    values = torch.full((1, 4000, 64), a)
    assert torch.equal(ssm_kernels.linear_scan_summary(values, values)[1], torch.zeros(1, 64))
    u, A = torch.ones(1, 16, 4000), torch.full((16, 3), a - 1)
    decay = ssm_kernels.selective_scan_summary(u, u, A, A, discretization="euler")[1]
    assert torch.equal(decay, torch.zeros(1, 16, 3))


@pytest.mark.parametrize(
    ("discretization", "dtype"),
    [
        *((method, torch.float32) for method in METHODS),
        *itertools.product(["zoh", "bilinear"], [torch.float64, torch.bfloat16, torch.float16]),
    ],
    ids=str,
)
def test_long_span_of_selective_scan(discretization, dtype, kernel, device):
    """Transitions near 1, so that the decay is far from zero. On CUDA longer, where time is cut into segments."""
    sizes = {"batch": 1, "dim": 40, "dstate": 13, "seqlen": 4300 if device == "cuda" else 700, "groups": 2}
    options = {"discretization": discretization, "dtype": dtype, "device": device}
    inputs = SELECTIVE_SUMMARY.make_inputs(**sizes, **options)
    inputs["A"] = 1e-3 * inputs["A"]
    exact = SELECTIVE_SUMMARY.reference(**{name: cast(value, torch.float64) for name, value in inputs.items()})
    for layout in ("contiguous", "transposed"):
        arranged = SELECTIVE_SUMMARY.make_inputs(**sizes, **options, layout=layout) | {"A": inputs["A"]}
        for result, expected in zip(SELECTIVE_SUMMARY(**arranged), exact, strict=True):
            assert_within_a_rounding_per_step(result, expected, sizes["seqlen"])


def test_gradients_of_a_long_span(kernel, device):
    """Also through the last state alone: its scan, whose time CUDA cuts into segments, has outputs without gradients."""
    sizes = {"batch": 1, "dim": 40, "dstate": 16, "seqlen": 2100 if device == "cuda" else 500}
    inputs = SELECTIVE_SUMMARY.make_inputs(**sizes, dtype=torch.float32, device=device)
    inputs["A"] = 1e-3 * inputs["A"]
    of_both = SELECTIVE_SUMMARY.make_cotangents(inputs)
    for cotangents in (of_both, (of_both[0], None)):
        SELECTIVE_SUMMARY.assert_matches_reference(inputs, cotangents=cotangents)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
@dtypes(torch.float64, torch.float32, torch.bfloat16, torch.float16)
def test_sum_of_step_sizes(dtype, layout, kernel, device):
    """Lengths and numbers of channels around the parts and vectors of the CUDA kernels."""
    matrices = ({"dstate": 12},) if kernel == "sequential" else ({"dstate": 1, "B": "constant"},)
    sizes = ((1, 7, 8, 256, 264), (1, 31, 256, 257, 2056)) if device == "cuda" else ((1, 7, 20), (1, 31, 257))
    for dim, seqlen, matrix in itertools.product(*sizes, matrices):
        options = {"batch": 2, "dim": dim, "seqlen": seqlen, **matrix}
        inputs = SELECTIVE_SUMMARY.make_inputs(**options, layout=layout, dtype=dtype, device=device)
        inputs["A"] = -torch.ones_like(inputs["A"]) / (1 + seqlen)
        sizes = step_sizes(inputs["delta"].double(), inputs["delta_bias"].double()[:, None], True)
        expected = torch.exp(inputs["A"].double() * sizes.sum(2, keepdim=True))
        tolerance = 1e-12 if dtype == torch.float64 else 3e-7
        decay = SELECTIVE_SUMMARY(**inputs)[1].double()
        torch.testing.assert_close(decay, expected.expand_as(decay), rtol=tolerance, atol=0)


def test_infinite_steps_decay_to_zero(kernel, device):
    """In several parts of the CUDA kernel; the other channels keep their values."""
    sizes = {"batch": 1, "dim": 6, "dstate": 16, "seqlen": 700, "delta_softplus": False, "delta_bias": False}
    inputs = SELECTIVE_SUMMARY.make_inputs(**sizes, dtype=torch.float32, device=device)
    inputs["A"] = 1e-3 * inputs["A"]
    expected = SELECTIVE_SUMMARY(**inputs)
    inputs["delta"][:, 2, 300] = torch.inf
    inputs["A"].requires_grad_()
    results = SELECTIVE_SUMMARY(**inputs)
    (gradient,) = torch.autograd.grad(results[1].sum(), inputs["A"], retain_graph=True)
    assert gradient.isfinite().all() and torch.equal(gradient[2], torch.zeros_like(gradient[2]))
    assert torch.equal(results[1][:, 2], torch.zeros_like(results[1][:, 2]))
    for result, finite in zip(results, expected, strict=True):
        for others in (slice(0, 2), slice(3, 6)):
            torch.testing.assert_close(result[:, others], finite[:, others], rtol=1e-5, atol=1e-5)


def test_states_of_a_long_growth(device):
    """A state stays finite beside a product over many tiles that overflows."""
    a, b = (torch.full((1, 4096, 8), value, device=device) for value in (1.0, 0.0))
    a[:, 512:1024], b[:, 0] = 1.2, 1e-30
    last_state, _ = ssm_kernels.linear_scan_summary(a, b)
    expected = torch.full_like(last_state.double(), 1e-30).mul_(torch.tensor(1.2, dtype=torch.float32).double() ** 512)
    torch.testing.assert_close(last_state.double(), expected, rtol=1e-4, atol=0)


# Around a tile of the CUDA kernel: 64 channels, and 64 steps in float64, 128 in float32, 256 in 16-bit types.
RECURRENCE_SPANS: dict[str, dict[str, Any]] = {
    **{f"{seqlen} steps": {"seqlen": seqlen, "channels": 8} for seqlen in (15, 17, 64, 65, 129, 256, 257)},
    **{f"{channels} channels": {"channels": channels, "seqlen": 130} for channels in (1, 63, 64, 72)},
    "many tiles": {"batch": 1, "channels": 64, "seqlen": 2500},
    "reset": {"batch": 3, "channels": 64, "seqlen": 300, "reset": True},
    "packed": {"channels": 72, "cu_seqlens": (0, 1, 100, 100, 356, 357, 1000)},
    "packed, reverse": {"channels": 9, "cu_seqlens": (0, 0, 256, 640, 700), "reverse": True},
}


@dtypes(torch.float64, torch.float32, torch.bfloat16)
@over({name: SUMMARIES[f"{name}_summary"] for name in ("linear_scan", "rglru_scan")})
def test_every_span_of_recurrences(operator, dtype, device):
    """Transitions near 1, so that the decay is far from zero."""
    for sizes in RECURRENCE_SPANS.values():
        inputs = operator.make_inputs(**sizes, dtype=dtype, device=device)
        if "a" in inputs:
            inputs["a"] = 1 - inputs["a"].abs() / 128
        else:
            inputs["recurrence_gate"] = inputs["recurrence_gate"] - 6
        operator.assert_matches_reference(inputs, gradients=False)


@dtypes(torch.float64, torch.float32, torch.bfloat16, torch.float16)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_bits_depend_on_the_sequence_alone(reverse, dtype, device):
    """Alone, in a batch, and packed at any place."""
    offsets = torch.tensor([0, 300, 301, 301, 430, 1130], dtype=torch.int32, device=device)
    b = Draws(1).normal(1, 1130, 72).to(device, dtype)
    a = (1 - 1e-2 * Draws(2).normal(1, 1130, 72).abs()).to(device, dtype)
    packed = ssm_kernels.linear_scan_summary(a, b, cu_seqlens=offsets, reverse=reverse)
    for row, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
        own = [x[:, begin:end] for x in (a, b)]
        alone = ssm_kernels.linear_scan_summary(*own, reverse=reverse)
        batch = ssm_kernels.linear_scan_summary(*(x.repeat(3, 1, 1) for x in own), reverse=reverse)
        for result, of_row, of_rows in zip(packed, alone, batch, strict=True):
            assert torch.equal(result[row], of_row[0]) and torch.equal(of_rows, of_row.expand_as(of_rows))


@dtypes(torch.float32, torch.float64)
def test_a_decay_of_zero_stays_zero(dtype, device):
    """Holds even if the product of later steps overflows."""
    a, b = (torch.zeros(1, 300, 8, dtype=dtype, device=device) for _ in range(2))
    a[:, :100], a[:, 5], a[:, 100:] = 1, 0, 1e30
    for result in ssm_kernels.linear_scan_summary(a, b):
        assert torch.equal(result, torch.zeros_like(result))


@every_summary
def test_no_steps_and_no_rows(operator, device):
    for size in ({"seqlen": 0}, {"batch": 0}):
        inputs = operator.make_inputs(**size, device=device)
        results = operator.evaluate(operator, inputs, operator.make_cotangents(inputs))
        last_state, decay = (results[name] for name in operator.results)
        assert torch.equal(last_state, torch.zeros_like(last_state)) and torch.equal(decay, torch.ones_like(decay))
        for name in tensor_names(inputs):
            assert torch.equal(results[f"grad_{name}"], torch.zeros_like(inputs[name])), name


@every_distinct
def test_gradcheck(operator):
    inputs = operator.make_inputs(batch=1, seqlen=4)
    names = tensor_names(inputs)

    def of_tensors(*tensors):
        return operator(**inputs | dict(zip(names, tensors, strict=True)))

    assert torch.autograd.gradcheck(of_tensors, [inputs[name].clone().requires_grad_() for name in names], fast_mode=True)


# ----- packed sequences

SEQ_IDX = ((2, 4), (), (1,))


def packed_selective_inputs(device: str, **options: Any) -> dict[str, Any]:
    inputs = SELECTIVE_SUMMARY.make_inputs(batch=3, seqlen=5, device=device, **options)
    return inputs | {"seq_idx": ssd_helpers.make_seq_idx(SEQ_IDX, 5).to(device)}


@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
def test_seq_idx_of_selective_scan(discretization, device):
    inputs = packed_selective_inputs(device, discretization=discretization)
    results = SELECTIVE_SUMMARY.assert_matches_reference(inputs)
    for row, begins in enumerate(SEQ_IDX):
        of_steps = {name: inputs[name][row : row + 1, :, begins[-1] if begins else 0 :] for name in ("u", "delta", "B")}
        last_state, decay = SELECTIVE_SUMMARY(**inputs | of_steps | {"seq_idx": None})
        torch.testing.assert_close(results["last_state"][row], last_state[0], rtol=1e-12, atol=1e-12)
        assert torch.equal(results["decay"][row], torch.zeros_like(decay[0]) if begins else decay[0])


@pytest.mark.parametrize(("name", "cut"), [("delta", (0, 1)), ("delta", (2, 1)), ("B", (0, 1)), ("B", (-1, 1)), ("B", (-1, 4))])
def test_seq_idx_hides_no_wrong_shape(name, cut, device):
    inputs = packed_selective_inputs(device)
    axis, length = cut
    inputs[name] = inputs[name].narrow(axis, 0, length)
    with pytest.raises(ValueError, match=f"selective_scan_summary: expected {name} of shape"):
        SELECTIVE_SUMMARY(**inputs)


def test_a_nan_ends_with_its_sequence(device):
    inputs = packed_selective_inputs(device)
    for name in ("u", "delta", "B"):
        inputs[name][0, :, 3] = torch.nan  # in the second of three sequences
    assert all(result.isfinite().all() for result in SELECTIVE_SUMMARY(**inputs))
    for spec, options in ((SSD_SUMMARY, {"resets": ((3,), ())}), (SUMMARIES["linear_scan_summary"], {"reset": True})):
        inputs = spec.make_inputs(**options, device=device)
        if "reset" in inputs:
            inputs["reset"] = torch.tensor([[False, False, False, True, False], [False] * 5], device=device)
        spec.first(inputs)[0, 1] = torch.nan
        assert all(result.isfinite().all() for result in spec(**inputs)), spec


def test_steps_of_a_sequence_that_began_earlier(device):
    """The first step of a span begins no sequence, whatever the span before had, but a reset there does."""
    inputs = SSD_SUMMARY.make_inputs(resets=((), ()), device=device)
    for actual, expected in zip(SSD_SUMMARY(**inputs), SSD_SUMMARY(**inputs | {"seq_idx": None}), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    linear = SUMMARIES["linear_scan_summary"]
    inputs = linear.make_inputs(device=device) | {"reset": torch.eye(2, 5, dtype=torch.bool, device=device)}
    decay = linear(**inputs)[1]
    assert torch.equal(decay, torch.zeros_like(decay))


# ----- as PyTorch operators


@over_options(DISTINCT_SUMMARIES, lambda spec: spec.cases)
def test_opcheck(operator, options, device):
    generic.test_opcheck(operator, options, device)


@every_distinct
def test_opcheck_of_the_internal_operators(operator, device):
    generic.test_opcheck_of_the_internal_operators(operator, {}, device)


@pytest.mark.parametrize("layout", ["contiguous", "permuted", "sliced"])
@every_distinct
def test_meta_agrees_with_the_device(operator, layout, device):
    generic.test_meta_agrees_with_the_device(operator, layout, torch.bfloat16, device)


@every_distinct
def test_grad_modes(operator, device):
    generic.test_without_gradients(operator, {}, torch.inference_mode, device)
    generic.test_results_are_differentiable_where_an_argument_is(operator, device)
    generic.test_double_backward_says_that_there_is_none(operator, device)
    generic.test_forward_mode_says_that_there_is_none(operator, device)
    generic.test_lazy_copies_stay_lazy(operator, {}, torch.float32, device)


@every_summary
def test_autocast(operator, device):
    """Inputs are cast, parameters stay float32; gradients come back in float32."""
    inputs = operator.make_inputs(dtype=torch.float32, device=device)
    cast = inputs | {name: inputs[name].bfloat16() for name in operator.cast_by_autocast(inputs)}
    cotangents, leaves = operator.make_cotangents(cast), with_gradients(inputs)
    with torch.autocast(device, dtype=torch.bfloat16):
        results = operator(**leaves)
    explicit = operator.evaluate(operator, cast, cotangents)
    torch.autograd.backward(results, cotangents)
    for name, result in zip(operator.results, results, strict=True):
        assert torch.equal(result, explicit[name])
    for name in tensor_names(inputs):
        assert torch.equal(leaves[name].grad, explicit[f"grad_{name}"].float()), name
    generic.test_autocast_leaves_float64_alone(operator, device)


@over_options(DISTINCT_SUMMARIES, lambda spec: {name: spec.options[name] for name in spec.compiled})
def test_compile_once_for_every_length(operator, options, device, fresh_dynamo):
    compiled.test_compile_once_for_every_length(operator, options, device, None)


every_mapped = over_options(DISTINCT_SUMMARIES, lambda spec: {name: spec.options[name] for name in spec.mapped})


@every_mapped
def test_vmap(operator, options, device, no_vmap_fallback, recwarn):
    mapped.test_vmap_over_each_combination_of_arguments(operator, options, device, None, recwarn)
    mapped.test_vmap_over_no_samples(operator, options, device, None)


@every_mapped
def test_gradients_outside_vmap(operator, options, device, no_vmap_fallback):
    mapped.test_gradients_outside_vmap(operator, options, device, None)


@every_distinct
def test_func_transforms_say_that_they_are_not_supported(operator, device):
    for transform in ("grad", "jvp"):
        mapped.test_func_transforms_say_that_they_are_not_supported(operator, transform, device)


@pytest.mark.parametrize("name", [*SUMMARIES])
def test_tags(name):
    generic.test_operators_are_tagged_for_compile(name)


# ----- messages


@pytest.mark.parametrize(
    ("function", "changed", "error", "message"),
    [
        (
            "selective_scan_summary",
            {"delta": (2, 4, 6)},
            ValueError,
            r"expected delta of shape \(batch, dim, seqlen\) = \[2, 4",
        ),
        ("selective_scan_summary", {"B": (2, 3, 3, 5)}, ValueError, "expected the groups of B to divide dim = 4, got 3"),
        ("selective_scan_summary", {"discretization": "tustin"}, ValueError, "unknown discretization 'tustin', expected one"),
        ("selective_scan_summary", {"delta": torch.float32}, RuntimeError, "expected delta of dtype float64"),
        ("selective_scan_summary", {"u": None}, TypeError, "expected u to be a tensor, got None"),
        ("ssd_chunk_scan_summary", {"dt": (2, 5, 3)}, ValueError, r"expected dt of shape \(batch, seqlen, heads\) = \[2, 5, 4"),
        ("ssd_chunk_scan_summary", {"dt_limit": (2.0, 1.0)}, ValueError, r"expected dt_limit = \(min, max\) with min <= max"),
        ("ssd_chunk_scan_summary", {"dt_limit": 1.0}, ValueError, r"expected dt_limit = \(min, max\), got 1.0"),
        ("ssd_chunk_scan_summary", {"discretization": "euler"}, ValueError, "discretization 'euler' is not supported"),
        ("linear_scan_summary", {"b": (2, 5, 3)}, ValueError, r"expected b of shape \(batch, seqlen, channels\) = \[2, 5, 4\]"),
        ("linear_scan_summary", {"reset": (2, 3)}, ValueError, r"expected reset of shape \(batch, seqlen\) = \[2, 5\]"),
        ("linear_scan_summary", {"cu_seqlens": torch.tensor([0, 5])}, ValueError, "expected batch 1 with cu_seqlens, got 2"),
        ("mingru_scan_summary", {"candidate_activation": "relu"}, ValueError, "unknown candidate_activation 'relu'"),
        ("liquid_scan_summary", {"tau": (3,)}, ValueError, "expected tau of a shape that broadcasts to"),
        ("liquid_scan_summary", {"dt": "1"}, TypeError, "expected dt to be a tensor or a number, got str"),
    ],
)
def test_messages(function, changed, error, message):
    inputs = SUMMARIES[function].make_inputs()
    for name, value in changed.items():
        is_shape = isinstance(value, tuple) and name != "dt_limit"
        inputs[name] = torch.zeros(value, dtype=torch.float64) if is_shape else value
        if isinstance(value, torch.dtype):
            inputs[name] = SUMMARIES[function].make_inputs()[name].to(value)
    with pytest.raises(error, match=f"^{function}: {message}"):
        getattr(ssm_kernels, function)(**inputs)
