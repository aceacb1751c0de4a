"""linear_scan and its family under torch.vmap, over any of their arguments, and what the other transforms are told."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import FUNC_TRANSFORMS, parameter_dtype
from recurrence_helpers import (
    LINEAR,
    LIQUID,
    MINGRU,
    PACKED,
    RGLRU,
    Variant,
    assert_all_close,
    common_options,
    every_recurrence,
    first_input,
    make_cotangents,
    make_inputs,
    state_of,
    tensor_names,
    training_step,
    with_gradients,
    with_state,
)

OPERATOR = "linear_scan"

some_recurrences = pytest.mark.parametrize("variant", [LINEAR, MINGRU, LIQUID, RGLRU], ids=lambda variant: variant.name)


def stacked_inputs(variant: Variant, names, axis: int = 0, samples: int = 3, **options) -> tuple[list[dict], dict]:
    """Sets of arguments that differ in `names`, and one set with those stacked along `axis`."""
    first, *others = (make_inputs(variant, seed=seed, **options) for seed in range(samples))
    sets = [first, *(first | {name: other[name] for name in names} for other in others)]
    return sets, first | {name: torch.stack([s[name] for s in sets], dim=axis) for name in names}


def vmapped(variant: Variant, names, axis: int = 0):
    """The scan, mapped over some of its arguments."""

    def function(**inputs):
        def scan(*tensors):
            return variant.scan(**(inputs | dict(zip(names, tensors, strict=True))), return_last_state=True)

        return torch.vmap(scan, in_dims=axis)(*(inputs[name] for name in names))

    return function


@common_options
@every_recurrence
def test_vmap_over_each_combination_of_arguments(variant, common, device, no_vmap_fallback):
    names = tensor_names(make_inputs(variant, **common))
    for chosen in itertools.chain(*(itertools.combinations(names, size) for size in range(1, len(names) + 1))):
        sets, stacked = stacked_inputs(variant, chosen, device=device, **common)
        results = vmapped(variant, chosen)(**stacked)
        expected = [variant.scan(**s, return_last_state=True) for s in sets]
        for result, column in zip(results, zip(*expected, strict=True), strict=True):
            torch.testing.assert_close(result, torch.stack(column), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("axis", [1, -1])
@common_options
def test_vmap_over_other_axes(common, axis, device, no_vmap_fallback):
    names = tensor_names(make_inputs(MINGRU, **common))
    sets, stacked = stacked_inputs(MINGRU, names, axis=axis, device=device, **common)
    for result, column in zip(
        vmapped(MINGRU, names, axis)(**stacked),
        zip(*(MINGRU.scan(**s, return_last_state=True) for s in sets), strict=True),
        strict=True,
    ):
        torch.testing.assert_close(result, torch.stack(column), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("common", [{}, {"cu_seqlens": PACKED}], ids=["batch", "packed"])
@every_recurrence
def test_gradients_outside_vmap(variant, common, device, no_vmap_fallback):
    inputs = make_inputs(variant, **common)
    for names in ([next(iter(inputs))], ["h0"], tensor_names(inputs)):
        sets, stacked = stacked_inputs(variant, names, device=device, **common)

        def looped(names=names, sets=sets, **inputs):
            results = [with_state(variant)(**(inputs | {n: inputs[n][i] for n in names})) for i, _ in enumerate(sets)]
            return tuple(torch.stack(column) for column in zip(*results, strict=True))

        assert_all_close(training_step(vmapped(variant, names), stacked), training_step(looped, stacked))


@pytest.mark.parametrize("common", [{}, {"cu_seqlens": PACKED}], ids=["batch", "packed"])
@every_recurrence
def test_vmap_over_cotangents(variant, common, device, no_vmap_fallback):
    """Several vector-Jacobian products in one backward pass, of all arguments and of one."""
    leaves = with_gradients(make_inputs(variant, device=device, **common))
    results = variant.scan(**leaves, return_last_state=True)
    draws = [make_cotangents(leaves, seed=seed) for seed in range(3)]
    cotangents = [torch.stack(column) for column in zip(*draws, strict=True)]
    for names in (tensor_names(leaves), tensor_names(leaves)[:1]):
        wanted = [leaves[name] for name in names]

        def product(*cotangents, wanted=wanted):
            return torch.autograd.grad(results, wanted, cotangents, retain_graph=True)

        expected = zip(*(product(*draw) for draw in draws), strict=True)
        for actual, column in zip(torch.vmap(product)(*cotangents), expected, strict=True):
            torch.testing.assert_close(actual, torch.stack(column), rtol=1e-12, atol=1e-12)


def test_vmap_in_vmap(device, no_vmap_fallback):
    inputs = make_inputs(LINEAR, device=device)
    a = torch.stack([torch.stack([inputs["a"] / (i + 1 + j) for j in range(2)]) for i in range(3)])
    b = torch.stack([inputs["b"] * (j + 1) for j in range(2)])
    out = torch.vmap(torch.vmap(LINEAR.scan), in_dims=(0, None))(a, b)
    expected = torch.stack([torch.stack([LINEAR.scan(a[i, j], b[j]) for j in range(2)]) for i in range(3)])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@common_options
@some_recurrences
def test_vmap_over_no_samples(variant, common, device, no_vmap_fallback):
    inputs = make_inputs(variant, device=device, **common)
    for name in tensor_names(inputs):
        empty = inputs | {name: inputs[name].new_empty(0, *inputs[name].shape)}
        h, last_state = vmapped(variant, [name])(**empty)
        assert h.shape == (0, *first_input(inputs).shape) and h.dtype == first_input(inputs).dtype
        assert last_state.shape == (0, *state_of(inputs).shape) and last_state.dtype == parameter_dtype(h.dtype)


def test_vmap_over_steps(device, no_vmap_fallback):
    inputs = make_inputs(LIQUID, device=device)
    candidate, state = inputs["candidate"], torch.stack([inputs["h0"]] * 5, dim=1)
    h, new_state = torch.vmap(lambda f, state: LIQUID.step(f, inputs["tau"], 0.3, state), in_dims=1)(candidate, state)
    for t in range(5):
        expected = LIQUID.step(candidate[:, t], inputs["tau"], 0.3, inputs["h0"])
        torch.testing.assert_close((h[t], new_state[t]), expected, rtol=1e-12, atol=1e-12)


def test_vmap_over_offsets_says_that_it_is_not_supported(device, no_vmap_fallback):
    inputs = make_inputs(MINGRU, cu_seqlens=PACKED, device=device)
    stacked = torch.stack([inputs["cu_seqlens"]] * 2)
    with pytest.raises(RuntimeError, match=r"^mingru_scan: expected cu_seqlens that vmap does not map, got in_dims 0$"):
        vmapped(MINGRU, ["cu_seqlens"])(**(inputs | {"cu_seqlens": stacked}))


@pytest.mark.parametrize("transform", FUNC_TRANSFORMS)
@some_recurrences
def test_func_transforms_say_that_they_are_not_supported(variant, transform, device):
    """Naming the operator, what is not supported and what is."""
    inputs = make_inputs(variant, device=device)
    name = next(iter(inputs))
    with pytest.raises(RuntimeError, match=rf"^{variant.name}: .*torch\.func.* not supported") as error:
        FUNC_TRANSFORMS[transform](lambda x: variant.scan(**(inputs | {name: x})), inputs[name])
    assert "torch.autograd" in str(error.value) and "vmap" in str(error.value)
