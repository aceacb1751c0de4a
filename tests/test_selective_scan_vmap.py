"""selective_scan under torch.vmap, over any of its arguments, and what the other transforms of torch.func are told."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import (
    FUNC_TRANSFORMS,
    MINIMAL,
    TENSORS,
    make_cotangents,
    make_inputs,
    scan_with_state,
    training_step,
    with_gradients,
)

from ssm_kernels import selective_scan

OPERATOR = "selective_scan"


SUBSETS = [subset for size in (1, 2, 8, 9) for subset in itertools.combinations(TENSORS, size)]


def stacked_inputs(names, axis: int = 0, samples: int = 3, **options) -> tuple[list[dict], dict]:
    """Sets of arguments that differ in `names`, and one set with those stacked along `axis`."""
    first, *others = (make_inputs(seed=seed, **options) for seed in range(samples))
    sets = [first, *(first | {name: other[name] for name in names} for other in others)]
    return sets, first | {name: torch.stack([s[name] for s in sets], dim=axis) for name in names}


@pytest.mark.parametrize("names", SUBSETS, ids="-".join)
def test_vmap_over_each_combination_of_arguments(names, device, no_vmap_fallback, recwarn):
    for options in ({"seqlen": 5}, {"seqlen": 5, "groups": 2}, {"seqlen": 5, "B": "constant", "C": "constant"}):
        sets, stacked = stacked_inputs(names, device=device, **options)

        def scan(*tensors, stacked=stacked):
            return selective_scan(**(stacked | dict(zip(names, tensors, strict=True))), return_last_state=True)

        results = torch.vmap(scan)(*(stacked[name] for name in names))
        expected = [selective_scan(**s, return_last_state=True) for s in sets]
        for i, result in enumerate(results):
            torch.testing.assert_close(result, torch.stack([e[i] for e in expected]), rtol=1e-12, atol=1e-12)
    assert not [w for w in recwarn if "vmap" in str(w.message) or "batching rule" in str(w.message)]


@pytest.mark.parametrize("axis", [1, -1])
def test_vmap_over_other_axes(axis, device, no_vmap_fallback):
    sets, stacked = stacked_inputs(TENSORS, axis=axis, device=device)

    def scan(*tensors):
        return selective_scan(**(stacked | dict(zip(TENSORS, tensors, strict=True))))

    out = torch.vmap(scan, in_dims=axis, out_dims=axis)(*(stacked[name] for name in TENSORS))
    torch.testing.assert_close(out, torch.stack([selective_scan(**s) for s in sets], dim=axis), rtol=1e-12, atol=1e-12)


def test_vmap_without_optional_arguments(device, no_vmap_fallback):
    sets, stacked = stacked_inputs(("u", "A"), device=device, **MINIMAL)

    def scan(u, A):
        return selective_scan(**(stacked | {"u": u, "A": A}), return_last_state=True)

    for i, result in enumerate(torch.vmap(scan)(stacked["u"], stacked["A"])):
        expected = torch.stack([selective_scan(**s, return_last_state=True)[i] for s in sets])
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_vmap_in_vmap(device, no_vmap_fallback):
    inputs = make_inputs(device=device)
    u = torch.stack([torch.stack([inputs["u"] * (i + 1) + j for j in range(2)]) for i in range(3)])
    A = torch.stack([inputs["A"] * (j + 1) for j in range(2)])

    def scan(u, A):
        return selective_scan(**(inputs | {"u": u, "A": A}))

    out = torch.vmap(torch.vmap(scan), in_dims=(0, None))(u, A)
    expected = torch.stack([torch.stack([scan(u[i, j], A[j]) for j in range(2)]) for i in range(3)])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"B": "constant", "C": "constant"}], ids=str)
@pytest.mark.parametrize("names", [*((name,) for name in TENSORS), TENSORS], ids="-".join)
def test_vmap_over_no_samples(names, options, device, no_vmap_fallback):
    inputs = make_inputs(device=device, **options)

    def scan(*tensors):
        return selective_scan(**(inputs | dict(zip(names, tensors, strict=True))), return_last_state=True)

    out, last_state = torch.vmap(scan)(*(inputs[name].new_empty(0, *inputs[name].shape) for name in names))
    assert out.shape == (0, *inputs["u"].shape) and out.dtype == inputs["u"].dtype
    assert last_state.shape == (0, *inputs["initial_state"].shape) and last_state.dtype == inputs["A"].dtype


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"B": "constant", "C": "constant"}], ids=str)
@pytest.mark.parametrize("names", [*((name,) for name in TENSORS), ("u", "delta", "B", "C", "z"), TENSORS], ids="-".join)
def test_gradients_outside_vmap(names, options, device, no_vmap_fallback):
    sets, stacked = stacked_inputs(names, device=device, **options)

    def vmapped(**inputs):
        def scan(*tensors):
            return selective_scan(**(inputs | dict(zip(names, tensors, strict=True))), return_last_state=True)

        return torch.vmap(scan)(*(inputs[name] for name in names))

    def looped(**inputs):
        results = [scan_with_state(**(inputs | {name: inputs[name][i] for name in names})) for i in range(len(sets))]
        return tuple(torch.stack(column) for column in zip(*results, strict=True))

    actual, expected = training_step(stacked, vmapped), training_step(stacked, looped)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def test_batched_gradients(device):
    """is_grads_batched: several vector-Jacobian products in one backward pass."""
    leaves = with_gradients(make_inputs(device=device))
    out = selective_scan(**leaves)
    cotangents = torch.stack([make_cotangents(leaves, seed=seed)[0] for seed in range(3)])
    tensors = [leaves[name] for name in TENSORS]
    batched = torch.autograd.grad(out, tensors, cotangents, is_grads_batched=True, retain_graph=True)
    for i, cotangent in enumerate(cotangents):
        for all_of_them, one in zip(batched, torch.autograd.grad(out, tensors, cotangent, retain_graph=True), strict=True):
            torch.testing.assert_close(all_of_them[i], one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transform", FUNC_TRANSFORMS)
def test_func_transforms_say_that_they_are_not_supported(transform, device):
    """Naming the operator, what is not supported and what is."""
    inputs = make_inputs(device=device)
    with pytest.raises(RuntimeError, match=r"^selective_scan: .*torch\.func.* not supported") as error:
        FUNC_TRANSFORMS[transform](lambda u: selective_scan(**(inputs | {"u": u})), inputs["u"])
    assert "torch.autograd" in str(error.value) and "vmap" in str(error.value)
