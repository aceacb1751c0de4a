"""ssd_chunk_scan: accuracy for strong and weak decay, NaN, the same bits in every run, and sizes beyond 32 bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import assert_as_accurate, assert_equal, dtypes
from operator_spec import as_float64
from ssd_helpers import (
    MINIMAL,
    OPTIONS,
    SEQUENCES,
    assert_all_as_accurate,
    assert_matches_reference,
    at_steps,
    evaluate,
    evaluate_in_float64,
    evaluate_natively,
    make_cotangents,
    make_inputs,
    reference_scan,
    scan,
)
from torch import Tensor

OPERATOR = "ssd_chunk_scan"


# ----- accuracy


# dt of every step and A, so that the sum of dt * A over 256 steps is what the name says, or as described.
DECAYS = {
    "sum_of_-1e-3": (lambda t: torch.full_like(t, 1e-6), -4.0),
    "sum_of_-1": (lambda t: torch.full_like(t, 1 / 256), -1.0),
    "sum_of_-1000": (lambda t: torch.full_like(t, 1 / 256), -1000.0),
    "sum_of_-1000_large_steps": (lambda t: torch.full_like(t, 1000 / 256), -1.0),
    "sum_of_-1e6": (lambda t: torch.full_like(t, 1.0), -4000.0),
    # Steps after a strong one decay weakly; their decays must not be differences of its large sum.
    "strong_steps_among_weak": (lambda t: torch.where(t % 50 == 20, 100.0, 1e-4), -10.0),
    "one_step_of_-1e5_at_the_start": (lambda t: torch.where(t == 0, 1e4, 1e-3), -10.0),
    "one_step_of_-1e5_at_the_end_of_a_chunk": (lambda t: torch.where(t == 63, 1e4, 1e-3), -10.0),
    "none": (lambda t: torch.zeros_like(t), -1.0),
    "no_A": (lambda t: torch.full_like(t, 0.01), 0.0),
}


@pytest.mark.parametrize("decay", DECAYS)
def test_strong_and_weak_decay(decay, device):
    """In float32 as exact as the sequential recurrence, in value and gradients."""
    steps, A = DECAYS[decay]
    dt = steps(torch.arange(256.0, dtype=torch.float64))
    for dtype, chunk_size in ((torch.float32, None), (torch.float32, 64), (torch.float32, 256), (torch.bfloat16, None)):
        sizes = {"batch": 1, "seqlen": 256, "headdim": 4, "chunk_size": chunk_size, "dtype": dtype}
        inputs = make_inputs(**MINIMAL | {"initial_states": True} | sizes)
        scale = torch.linspace(1, 0.5, 4, dtype=torch.float64)
        inputs["dt"] = (dt[None, :, None] * scale).to(dtype)
        inputs["A"] = torch.full_like(inputs["A"], A)
        inputs = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in inputs.items()}
        results = assert_matches_reference(inputs)
        assert all(value.isfinite().all() for value in results.values())


@dtypes(torch.float32, torch.bfloat16)
def test_error_does_not_grow_along_the_sequence(dtype, device):
    """Weak decay, so that the state remembers hundreds of steps."""
    seqlen, part = (16384, 1024) if device == "cpu" else (65536, 4096)
    inputs = make_inputs(batch=1, seqlen=seqlen, heads=2, headdim=8, groups=1, dstate=8, dtype=dtype, device=device)
    inputs["A"] = inputs["A"] * 16 / part
    cotangents = make_cotangents(inputs)
    actual = evaluate(scan, inputs, cotangents)
    on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    exact = evaluate(scan, as_float64(on_cpu), tuple(x.cpu().double() for x in cotangents))
    for name in ("out", *(f"grad_{sequence}" for sequence in SEQUENCES)):
        error = actual[name].cpu().double() - exact[name]
        # Past the beginning, where the state is small, and in backward before the end.
        first, last = (steps.square().mean().sqrt() for steps in (error[:, part : 2 * part], error[:, -2 * part : -part]))
        assert last <= 1.5 * first and (name == "out" or first <= 1.5 * last), f"{name}: {first:.3g}, then {last:.3g}"


def test_float32_is_float32(device):
    """No product of halves or of tf32: an error of some roundings, where those have 2^-11."""
    inputs = make_inputs(batch=1, seqlen=300, heads=2, groups=1, headdim=64, dstate=64, dtype=torch.float32, device=device)
    actual, exact = evaluate(scan, inputs), evaluate(reference_scan, as_float64(inputs))
    for name, value in actual.items():
        error = (value.double() - exact[name]).abs().max() / exact[name].abs().max()
        assert error < 1e-5, f"{name}: {error:.3g}"


@dtypes(torch.bfloat16, torch.float16)
def test_rounding_of_16_bit_results(dtype, device):
    """The error is little more than the rounding of the exact result to the dtype."""
    inputs = make_inputs(batch=1, seqlen=300, heads=2, groups=1, headdim=64, dstate=64, dtype=dtype, device=device)
    out, exact = evaluate(scan, inputs)["out"], evaluate(reference_scan, as_float64(inputs))["out"]
    assert_as_accurate(out, exact.to(dtype), exact, "out")


# ----- NaN, the same bits


@pytest.mark.parametrize("name", [*SEQUENCES, "A", "D", "dt_bias", "initial_states", "grad_out", "grad_final_states"])
def test_nan_stays_in_its_head_and_row(name, device):
    """A NaN of B or C stays in its group. Every result that a NaN cannot reach keeps its bits."""
    inputs = make_inputs(batch=3, seqlen=70, heads=6, groups=3, headdim=4, dtype=torch.float32, chunk_size=16, device=device)
    row, step, head, group, heads_of_group = 1, 20, 2, 1, slice(2, 4)
    of_group, of_parameter = name in ("B", "C"), name in ("A", "D", "dt_bias")
    cotangents = dict(zip(("grad_out", "grad_final_states"), make_cotangents(inputs), strict=True))
    clean = evaluate(scan, inputs, tuple(cotangents.values()))

    values = inputs | cotangents
    values[name] = values[name].clone()
    index = {1: (head,), 3: (row, step, head)}.get(values[name].dim(), (row, step, group if of_group else head, 1))
    index = (row, head, 1, 1) if name in ("initial_states", "grad_final_states") else index
    values[name][index] = math.nan
    actual = evaluate(scan, {key: values[key] for key in inputs}, tuple(values[key] for key in cotangents))

    rows = slice(None) if of_parameter else row
    heads = heads_of_group if of_group else head
    for result, value in actual.items():
        reached = torch.zeros_like(value, dtype=torch.bool)
        if result in ("grad_A", "grad_D", "grad_dt_bias"):
            reached[heads] = True
        elif result in ("final_states", "grad_initial_states"):
            reached[rows, heads] = True
        else:
            reached[rows, :, group if result in ("grad_B", "grad_C") else heads] = True
        assert torch.equal(value[~reached], clean[result][~reached]), f"{result} of a NaN in {name}"
    assert any(value.isnan().any() for value in actual.values())


def test_nan_stays_in_its_packed_sequence(device):
    inputs = make_inputs(cu_seqlens=(0, 30, 30, 65, 100), dtype=torch.float32, device=device)
    clean = evaluate(scan, inputs)
    for name in SEQUENCES:
        dirty = inputs | {name: inputs[name].clone()}
        dirty[name][0, 40, 1] = math.nan
        actual = evaluate(scan, dirty)
        assert actual["out"].isnan().any()
        for steps in (slice(0, 30), slice(65, 100)):
            assert torch.equal(actual["out"][:, steps], clean["out"][:, steps]), name
        for i in (0, 1, 3):
            assert torch.equal(actual["final_states"][i], clean["final_states"][i]), name


@dtypes()
@pytest.mark.parametrize("name", ["everything", "resets", "packed"])
def test_repeatable(name, dtype, device, two_threads):
    options = OPTIONS[name] | {"batch": 1, "seqlen": 300, "headdim": 48, "dstate": 17}
    if options.get("cu_seqlens"):
        options["cu_seqlens"] = (0, 100, 101, 300)
    inputs = make_inputs(dtype=dtype, device=device, **options)
    cotangents = make_cotangents(inputs)
    first = evaluate(scan, inputs, cotangents)
    assert_equal(evaluate(scan, inputs, cotangents), first)


def test_arguments_are_not_modified(device):
    for name in ("everything", "packed_with_states", "resets_with_states"):
        inputs = make_inputs(device=device, **OPTIONS[name])
        before = {key: value.clone() for key, value in inputs.items() if isinstance(value, Tensor)}
        evaluate(scan, inputs, make_cotangents(inputs))
        assert all(torch.equal(inputs[key], value) for key, value in before.items())


# ----- sizes that need a GPU's memory and time


def beyond_32_bits(sizes: dict[str, int]) -> tuple[dict[str, Any], tuple[Tensor, Tensor]]:
    """bfloat16 inputs of these sizes that decay within tens of steps, and gradients that are zero."""
    generator = torch.Generator("cuda").manual_seed(0)
    batch, seqlen, heads, headdim, dstate = (sizes[name] for name in ("batch", "seqlen", "heads", "headdim", "dstate"))

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda").normal_(generator=generator)

    inputs = {
        "x": normal(batch, seqlen, heads, headdim),
        "dt": torch.empty(batch, seqlen, heads, dtype=torch.bfloat16, device="cuda").uniform_(-1, 1, generator=generator),
        "A": -1 - normal(heads, dtype=torch.float32).abs(),
        "B": normal(batch, seqlen, 1, dstate),
        "C": normal(batch, seqlen, 1, dstate),
        "D": normal(heads, dtype=torch.float32),
        "z": normal(batch, seqlen, heads, headdim),
        "dt_bias": normal(heads, dtype=torch.float32) / 10,
        "initial_states": normal(batch, heads, headdim, dstate, dtype=torch.float32),
        "log_decay": None,
        "gain": None,
        "seq_idx": None,
        "cu_seqlens": None,
        "dt_softplus": True,
        "dt_limit": (0.0, math.inf),
        "chunk_size": None,
        "discretization": "zoh",
        "reverse": False,
    }
    assert inputs["x"].numel() > 2**31
    return inputs, (torch.zeros_like(inputs["x"]), torch.zeros_like(inputs["initial_states"]))


def assert_as_accurate_as_the_reference(
    actual: dict[str, Tensor], inputs: dict[str, Any], cotangents: tuple[Tensor, Tensor], parts: dict[str, Any]
) -> None:
    """``parts``: of the results of the reference, those that ``actual`` has."""
    exact = evaluate_in_float64(inputs, cotangents)
    native = evaluate_natively(inputs, cotangents, exact)
    of_parts = ({name: results[name][part] for name, part in parts.items()} for results in (native, exact))
    assert_all_as_accurate({name: actual[name] for name in parts}, *of_parts, inputs)


@pytest.mark.cuda
@pytest.mark.slow
def test_more_elements_than_32_bits_count_in_heads(needs_gpu_memory):
    """The first heads and the last: the gradient of the others' results is zero, so that sums over heads are of these alone."""
    needs_gpu_memory("cuda", 60)
    inputs, cotangents = beyond_32_bits({"batch": 1, "seqlen": 256, "heads": 2**17 + 8, "headdim": 64, "dstate": 16})
    chosen = torch.tensor([0, 1, 2**16, 2**17 + 6, 2**17 + 7], device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    for cotangent, axis in zip(cotangents, (2, 1), strict=True):
        shape = (*cotangent.shape[:axis], len(chosen), *cotangent.shape[axis + 1 :])
        cotangent.index_copy_(axis, chosen, torch.randn(shape, generator=generator, device="cuda").to(cotangent))
    axes = dict.fromkeys(("x", "dt", "z", "out"), 2) | dict.fromkeys(("initial_states", "final_states"), 1)
    axes |= dict.fromkeys(("A", "D", "dt_bias"), 0)

    def of_chosen(name: str, value: Any) -> Any:
        axis = axes.get(name.removeprefix("grad_"))
        return value.index_select(axis, chosen) if axis is not None else value

    results = evaluate(scan, inputs, cotangents)
    actual = {name: of_chosen(name, value) for name, value in results.items()}
    few = {name: of_chosen(name, value) for name, value in inputs.items()}
    few_cotangents = tuple(of_chosen(name, x) for name, x in zip(("out", "final_states"), cotangents, strict=True))
    assert_as_accurate_as_the_reference(actual, few, few_cotangents, dict.fromkeys(actual, ...))


@pytest.mark.cuda
@pytest.mark.slow
def test_more_elements_than_32_bits_count_in_time(needs_gpu_memory):
    """The last steps: the state forgets what is more than a thousand steps old."""
    needs_gpu_memory("cuda", 60)
    inputs, cotangents = beyond_32_bits({"batch": 1, "seqlen": 2**20 + 1030, "heads": 32, "headdim": 64, "dstate": 16})
    for cotangent in (cotangents[0][:, -200:], cotangents[1]):
        cotangent.normal_(generator=torch.Generator("cuda").manual_seed(1))
    results = evaluate(scan, inputs, cotangents)
    last, end = at_steps(inputs, slice(-1200, None)), (slice(None), slice(-200, None))
    actual = {name: results[name][end] for name in ("out", *(f"grad_{name}" for name in SEQUENCES))}
    actual["final_states"] = results["final_states"]
    parts = dict.fromkeys(actual, end) | {"final_states": ...}
    assert_as_accurate_as_the_reference(actual, last, (cotangents[0][:, -1200:], cotangents[1]), parts)
