"""Steps of complex states: against the scan, in place, for several tokens and slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ssm_kernels import reference, selective_scan, selective_state_update

RULES = ("zoh", "zoh_exact", "bilinear", "trapezoidal", "exp_trapezoidal")
TWO_SAMPLES = ("trapezoidal", "exp_trapezoidal")
every_rule = pytest.mark.parametrize("rule", RULES)
STEPS = 5


def make_inputs(rule: str, *, groups: int | None = None, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Arguments of selective_scan over STEPS tokens."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    slots, dim, dstate = 3, 6, 5

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def complex_normal(*shape: int) -> Tensor:
        return torch.complex(normal(*shape, dtype=wide), normal(*shape, dtype=wide))

    matrix = (slots, dstate, STEPS) if groups is None else (slots, groups, dstate, STEPS)
    inputs: dict[str, Any] = {
        "u": normal(slots, dim, STEPS),
        "delta": normal(slots, dim, STEPS) - 1,
        "A": torch.complex(-normal(dim, dstate, dtype=wide).exp(), 5 * normal(dim, dstate, dtype=wide)),
        "B": complex_normal(*matrix),
        "C": complex_normal(*matrix),
        "D": normal(dim, dtype=wide),
        "z": normal(slots, dim, STEPS),
        "delta_bias": normal(dim, dtype=wide),
        "initial_state": complex_normal(slots, dim, dstate),
        "delta_softplus": True,
        "discretization": rule,
    }
    if rule == "exp_trapezoidal":
        inputs |= {"lam": normal(slots, dim, STEPS), "lam_sigmoid": True}
    if rule in TWO_SAMPLES:
        inputs["previous"] = (normal(slots, dim), complex_normal(*matrix[:-1]))
    return inputs


def step_arguments(inputs: dict[str, Any], t: int | None) -> dict[str, Any]:
    """The arguments of the step of token ``t``, or of all tokens; the state and the samples apart."""

    def at(value: Tensor) -> Tensor:
        return value.movedim(-1, 1) if t is None else value[..., t]

    arguments = {
        "x": at(inputs["u"]),
        "dt": at(inputs["delta"]),
        "A": inputs["A"],
        "B": at(inputs["B"]),
        "C": at(inputs["C"]),
        "D": inputs["D"],
        "z": at(inputs["z"]),
        "dt_bias": inputs["delta_bias"],
        "dt_softplus": True,
        "discretization": inputs["discretization"],
    }
    if "lam" in inputs:
        arguments |= {"lam": at(inputs["lam"]), "lam_sigmoid": True}
    return arguments


def memories(inputs: dict[str, Any]) -> dict[str, Tensor]:
    found = {"state": inputs["initial_state"].clone()}
    if "previous" in inputs:
        found |= {"previous_x": inputs["previous"][0].clone(), "previous_B": inputs["previous"][1].clone()}
    return found


@every_rule
@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("pairs", [True, False])
def test_steps_equal_the_scan(rule: str, groups: int | None, pairs: bool) -> None:
    inputs = make_inputs(rule, groups=groups)
    expected, last = selective_scan(**inputs, conjugate_pairs=pairs, return_last_state=True)
    states = memories(inputs)
    outputs = [selective_state_update(**states, **step_arguments(inputs, t), conjugate_pairs=pairs) for t in range(STEPS)]
    assert torch.allclose(torch.stack(outputs, -1), expected, rtol=1e-10, atol=1e-12)
    assert torch.allclose(states["state"], last.state if rule in TWO_SAMPLES else last, rtol=1e-10, atol=1e-12)
    if rule in TWO_SAMPLES:
        assert torch.equal(states["previous_x"], last.u) and torch.equal(states["previous_B"], last.B)


@every_rule
def test_several_tokens_equal_single_ones(rule: str) -> None:
    inputs = make_inputs(rule)
    single, several = memories(inputs), memories(inputs)
    expected = torch.stack([selective_state_update(**single, **step_arguments(inputs, t)) for t in range(STEPS)], 1)
    assert torch.allclose(selective_state_update(**several, **step_arguments(inputs, None)), expected, rtol=1e-12)
    for name, value in single.items():
        assert torch.allclose(several[name], value, rtol=1e-12), name


@every_rule
def test_step_equals_the_reference(rule: str) -> None:
    inputs = make_inputs(rule)
    states, arguments = memories(inputs), step_arguments(inputs, 0)
    expected, state = reference.complex_state_update(**states, **arguments)
    assert torch.allclose(selective_state_update(**states, **arguments), expected, rtol=1e-10)
    assert torch.allclose(states["state"], state, rtol=1e-10)
    if rule not in TWO_SAMPLES:
        found = reference.selective_state_update(**memories(inputs), **arguments)
        torch.testing.assert_close(found, (expected, state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    inputs = make_inputs("zoh", dtype=dtype)
    states, arguments = memories(inputs), step_arguments(inputs, 0)
    wide = {
        name: value.to(torch.complex128 if value.is_complex() else torch.float64) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    expected, state = reference.complex_state_update(states["state"].to(torch.complex128), **wide)
    out = selective_state_update(**states, **arguments)
    assert out.dtype == dtype
    assert torch.allclose(out.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    assert float((states["state"] - state).norm() / state.norm()) < 1e-6


def test_slots_and_strided_states() -> None:
    inputs = make_inputs("zoh")
    arguments = step_arguments(inputs, 0)
    expected_state = inputs["initial_state"].clone()
    expected = selective_state_update(expected_state, **arguments)
    # The step copies this state: its real and imaginary parts are not one row of real numbers.
    strided = torch.zeros(3, 6, 10, dtype=torch.complex128)[..., ::2]
    strided.copy_(inputs["initial_state"])
    assert torch.equal(selective_state_update(strided, **arguments), expected)
    assert torch.equal(strided, expected_state)

    cache = torch.zeros(5, 6, 5, dtype=torch.complex128)
    slots = torch.tensor([4, -1, 2])
    cache[slots[slots >= 0]] = inputs["initial_state"][slots >= 0]
    out = selective_state_update(cache, **arguments, state_batch_indices=slots)
    assert torch.equal(out[[0, 2]], expected[[0, 2]]) and not out[1].any()
    assert torch.equal(cache[[4, 2]], expected_state[[0, 2]]) and not cache[[0, 1, 3]].any()


def test_constant_B_as_groups() -> None:
    inputs = make_inputs("zoh")
    B, C = torch.randn(2, 6, 5, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    scan = inputs | {"B": B, "C": C}
    expected = selective_scan(**scan)[..., 0]
    arguments = step_arguments(inputs, 0) | {"B": B.expand(3, -1, -1), "C": C.expand(3, -1, -1)}
    assert torch.allclose(selective_state_update(inputs["initial_state"].clone(), **arguments), expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"state": torch.ones(3, 6, 5).double()}, RuntimeError, "expected a complex state with a complex A, got float64"),
        ({"discretization": "poly"}, ValueError, "a complex A with discretization 'zoh', .* got 'poly'"),
        ({"dt_A": torch.ones(6).double()}, NotImplementedError, "dt_A is not supported with a complex A"),
        ({"A_is_log": True}, NotImplementedError, "A_is_log is not supported with a complex A"),
        ({"out": torch.ones(3, 6).double()}, NotImplementedError, "out is not supported with a complex A"),
    ],
)
def test_errors(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    inputs = make_inputs("zoh")
    with pytest.raises(kind, match=f"selective_state_update: .*{message}"):
        selective_state_update(**{**memories(inputs), **step_arguments(inputs, 0), **changes})
