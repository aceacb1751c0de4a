"""Every operator under torch.vmap, over any of its arguments, and what the other transforms of torch.func are told."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import FUNC_TRANSFORMS
from operator_spec import OperatorSpec, tensor_names
from operators import OPERATORS, SCANS, every_operator, over, over_options

OPERATOR = "every operator"

every_mapped = over_options(OPERATORS, lambda spec: {name: spec.options[name] for name in spec.mapped})


def stacked_inputs(
    operator: OperatorSpec, names: Sequence[str], axis: int = 0, samples: int = 3, **options: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Sets of arguments that differ in these, and one set with those stacked along the axis."""
    first, *others = (operator.make_inputs(seed=seed, **options) for seed in range(samples))
    sets = [first, *(first | {name: other[name] for name in names} for other in others)]
    return sets, first | {name: torch.stack([s[name] for s in sets], dim=axis) for name in names}


def vmapped(operator: OperatorSpec, names: Sequence[str], axis: int = 0) -> Callable:
    """The operator, mapped over some of its arguments."""

    def function(**inputs):
        def of_tensors(*tensors):
            return operator(**inputs | dict(zip(names, tensors, strict=True)))

        return torch.vmap(of_tensors, in_dims=axis)(*(inputs[name] for name in names))

    return function


def assert_equals_a_loop(operator: OperatorSpec, names: Sequence[str], axis: int, **options: Any) -> None:
    sets, stacked = stacked_inputs(operator, names, axis, **options)
    expected = zip(*(operator(**s) for s in sets), strict=True)
    for result, column in zip(vmapped(operator, names, axis)(**stacked), expected, strict=True):
        torch.testing.assert_close(
            result, torch.stack(column), rtol=operator.tolerance, atol=operator.tolerance, msg=lambda m: f"{names}: {m}"
        )


@every_mapped
def test_vmap_over_each_combination_of_arguments(operator, options, device, no_vmap_fallback, recwarn):
    names = tensor_names(operator.make_inputs(**options))
    few = range(1, len(names) + 1) if len(names) <= 5 else (1, 2, len(names) - 1, len(names))
    for chosen in itertools.chain(*(itertools.combinations(names, size) for size in few)):
        assert_equals_a_loop(operator, chosen, 0, **options, device=device)
    assert not [w for w in recwarn if "vmap" in str(w.message) or "batching rule" in str(w.message)]


@pytest.mark.parametrize("axis", [1, -1])
@every_mapped
def test_vmap_over_other_axes(operator, options, axis, device, no_vmap_fallback):
    assert_equals_a_loop(operator, tensor_names(operator.make_inputs(**options)), axis, **options, device=device)


@every_mapped
def test_gradients_outside_vmap(operator, options, device, no_vmap_fallback):
    """For combinations of tensors, each over another axis than the one before."""
    present = tensor_names(operator.make_inputs(**options))
    few = range(1, len(present) + 1) if len(present) <= 4 else (1, len(present))
    pairs = [present[1:4:2], present[2:6], [*operator.time_axes(operator.make_inputs(**options)).keys() & set(present)]]
    combinations = filter(None, (*itertools.chain(*(itertools.combinations(present, size) for size in few)), *pairs))
    for names, axis in zip(combinations, itertools.cycle((0, 1, -1))):
        _, stacked = stacked_inputs(operator, names, axis, **options, device=device)

        def looped(names=names, axis=axis, **inputs):
            of_samples = ({name: inputs[name].select(axis, i) for name in names} for i in range(3))
            results = [operator(**inputs | of_sample) for of_sample in of_samples]
            return tuple(torch.stack(column) for column in zip(*results, strict=True))

        actual = operator.training_step(vmapped(operator, names, axis), stacked)
        operator.assert_close(actual, operator.training_step(looped, stacked), operator.gradient_tolerance)


@every_mapped
def test_vmap_over_no_samples(operator, options, device, no_vmap_fallback):
    inputs = operator.make_inputs(**options, device=device)
    names = tensor_names(inputs)
    for chosen in (*((name,) for name in names), names):
        empty = inputs | {name: inputs[name].new_empty(0, *inputs[name].shape) for name in chosen}
        expected = zip(operator.result_shapes(inputs), operator.result_dtypes(inputs), strict=True)
        for result, (shape, dtype) in zip(vmapped(operator, chosen)(**empty), expected, strict=True):
            assert result.shape == (0, *shape) and result.dtype == dtype


@every_operator
def test_vmap_in_vmap(operator, device, no_vmap_fallback):
    inputs = operator.make_inputs(device=device)
    outer, inner = operator.nested
    x = torch.stack([torch.stack([inputs[outer] / (i + 1 + j) for j in range(2)]) for i in range(3)])
    y = torch.stack([inputs[inner] * (j + 1) for j in range(2)])

    def of_two(x, y):
        return operator(**inputs | {outer: x, inner: y})

    actual = torch.vmap(torch.vmap(of_two), in_dims=(0, None))(x, y)
    for index, result in enumerate(actual):
        expected = torch.stack([torch.stack([of_two(x[i, j], y[j])[index] for j in range(2)]) for i in range(3)])
        torch.testing.assert_close(result, expected, rtol=operator.tolerance, atol=operator.tolerance)


@over({name: spec for name, spec in SCANS.items() if spec.packs})
def test_vmap_over_offsets_says_that_it_is_not_supported(operator, device, no_vmap_fallback):
    inputs = operator.make_inputs(cu_seqlens=(0, 4, 9), device=device)
    stacked = torch.stack([inputs["cu_seqlens"]] * 2)
    with pytest.raises(RuntimeError, match=rf"^{operator.name}: expected cu_seqlens that vmap does not map, got in_dims 0$"):
        vmapped(operator, ["cu_seqlens"])(**(inputs | {"cu_seqlens": stacked}))


@pytest.mark.parametrize("transform", FUNC_TRANSFORMS)
@every_operator
def test_func_transforms_say_that_they_are_not_supported(operator, transform, device):
    """Naming the operator, what is not supported and what is."""
    inputs = operator.make_inputs(device=device)
    name = tensor_names(inputs)[0]
    with pytest.raises(RuntimeError, match=rf"^{operator.name}: .*torch\.func.* not supported") as error:
        FUNC_TRANSFORMS[transform](lambda x: operator(**(inputs | {name: x}))[0], inputs[name])
    assert "torch.autograd" in str(error.value) and "vmap" in str(error.value)
