"""Steps with a step of its own for A, ``dt_A``: the scan's, token by token and several at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ssm_kernels import reference, selective_scan, selective_state_update

OPERATOR = "selective_state_update"
RULES = ("zoh", "zoh_exact", "poly", "highorder", "rk4", "dirac", "exp_trapezoidal")
every_rule = pytest.mark.parametrize("rule", RULES)
STEPS, SLOTS, DIM, DSTATE = 6, 3, 6, 5


def make_inputs(rule: str, *, groups: int | None = None, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Arguments of selective_scan over STEPS tokens."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    matrix = (SLOTS, DSTATE, STEPS) if groups is None else (SLOTS, groups, DSTATE, STEPS)
    inputs: dict[str, Any] = {
        "u": normal(SLOTS, DIM, STEPS),
        "delta": normal(SLOTS, DIM, STEPS) - 1,
        "A": -normal(DIM, DSTATE, dtype=torch.float64).exp().to(wide),
        "B": normal(*matrix),
        "C": normal(*matrix),
        "D": normal(DIM, dtype=wide),
        "z": normal(SLOTS, DIM, STEPS),
        "delta_bias": normal(DIM, dtype=wide),
        "initial_state": normal(SLOTS, DIM, DSTATE, dtype=wide),
        "delta_softplus": True,
        "discretization": rule,
        "delta_A": (4 * torch.rand(SLOTS, DIM, STEPS, generator=generator, dtype=torch.float64)).to(dtype),
    }
    inputs["delta_A"][..., 2] = 0
    if rule == "exp_trapezoidal":
        previous = (normal(SLOTS, DIM), normal(*matrix[:-1]))
        inputs |= {"lam": normal(SLOTS, DIM, STEPS), "lam_sigmoid": True, "previous": previous}
    return inputs


def on(device: str, inputs: dict[str, Any]) -> dict[str, Any]:
    def moved(value: Any) -> Any:
        return (
            tuple(map(moved, value)) if isinstance(value, tuple) else value.to(device) if isinstance(value, Tensor) else value
        )

    return {name: moved(value) for name, value in inputs.items()}


def step_arguments(inputs: dict[str, Any], tokens: int | slice, cache: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments of one step, or of several tokens."""

    def at(name: str) -> Tensor:
        value = inputs[name][..., tokens]
        return value.movedim(-1, 1) if isinstance(tokens, slice) else value

    named = {"x": "u", "dt": "delta", "B": "B", "C": "C", "z": "z", "dt_A": "delta_A", "lam": "lam"}
    options = {name: inputs[name] for name in ("A", "D", "discretization", "lam_sigmoid") if name in inputs}
    options |= {"dt_bias": inputs["delta_bias"], "dt_softplus": True}
    return {name: at(of) for name, of in named.items() if of in inputs} | options | cache


def cache_of(inputs: dict[str, Any]) -> dict[str, Tensor]:
    names = ("state", "previous_x", "previous_B")
    values = (inputs["initial_state"], *inputs.get("previous", ()))
    return {name: value.clone() for name, value in zip(names, values, strict=False)}


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@every_rule
def test_steps_are_the_scan(rule, dtype, groups, device):
    inputs = on(device, make_inputs(rule, groups=groups, dtype=dtype))
    expected, last = selective_scan(**inputs, return_last_state=True)
    last = last if isinstance(last, Tensor) else last.state
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    one_by_one, at_once = cache_of(inputs), cache_of(inputs)
    outs = [selective_state_update(**step_arguments(inputs, t, one_by_one)) for t in range(STEPS)]
    out = selective_state_update(**step_arguments(inputs, slice(0, STEPS), at_once)).movedim(1, -1)
    for found in (torch.stack(outs, -1), out):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for cache in (one_by_one, at_once):
        torch.testing.assert_close(cache["state"], last, rtol=tolerance, atol=tolerance)


@every_rule
def test_slots_and_padding(rule, device):
    inputs = on(device, make_inputs(rule))
    cache = {name: torch.cat([x, x[:1] + 1]) for name, x in cache_of(inputs).items()}
    expected = {name: x.clone() for name, x in cache_of(inputs).items()}
    out = selective_state_update(**step_arguments(inputs, 0, expected))
    before = {name: x.clone() for name, x in cache.items()}
    indices = torch.tensor([2, -1, 0], device=device)
    of_slots = {name: x[..., :1].expand(SLOTS, *x.shape[1:]) if name == "none" else x for name, x in inputs.items()}
    moved = {
        name: x[[2, 1, 0]] if isinstance(x, Tensor) and name in ("u", "delta", "B", "C", "z", "delta_A", "lam") else x
        for name, x in of_slots.items()
    }
    found = selective_state_update(**step_arguments(moved, 0, cache), state_batch_indices=indices)
    torch.testing.assert_close(found[[2, 0]], out[[0, 2]])
    assert (found[1] == 0).all()
    for name, value in cache.items():
        torch.testing.assert_close(value[[0, 2]], expected[name][[0, 2]])
        assert torch.equal(value[[1, 3]], before[name][[1, 3]])


@pytest.mark.parametrize("rule", RULES[:-1])
def test_against_the_reference_with_heads(rule, device):
    """Also with A tied over a row, broadcast steps and A as a logarithm."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    state, x, dt = normal(2, 4, 3, 5), normal(2, 4, 3), normal(2, 4, 3).abs()
    A, B, C = normal(4)[:, None, None].expand(4, 3, 5), normal(2, 2, 5), normal(2, 2, 5)
    dt_A = normal(2, 4, 1).abs()
    options = {"discretization": rule, "A_is_log": True}
    expected, last = reference.selective_state_update(state, x, dt, A, B, C, dt_A=dt_A.expand(2, 4, 3), **options)
    out = selective_state_update(state, x, dt, A, B, C, dt_A=dt_A, **options)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)


def test_zero_keeps_the_state_and_infinity_clears_it():
    inputs = make_inputs("zoh")
    cache = cache_of(inputs)
    given = step_arguments(inputs, 0, cache)
    given |= {"x": torch.zeros(SLOTS, DIM, dtype=torch.float64), "dt_A": torch.zeros(1, dtype=torch.float64)}
    before = cache["state"].clone()
    selective_state_update(**given)
    assert torch.equal(cache["state"], before)
    selective_state_update(**given | {"dt_A": torch.full((1,), float("inf"), dtype=torch.float64)})
    assert (cache["state"] == 0).all()


@pytest.mark.parametrize("rule", ["zoh_exact", "exp_trapezoidal"])
def test_opcheck_compile_and_vmap(rule):
    inputs = make_inputs(rule)
    given = step_arguments(inputs, 0, cache_of(inputs))
    empty = torch.empty(0, dtype=torch.float64)
    samples = [given.get(name, empty.clone()) for name in ("previous_x", "previous_B")]
    tensors = [given.get(name) for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "lam")]
    keywords = {"discretization": rule, "lam_sigmoid": rule == "exp_trapezoidal", "dt_A": given["dt_A"]}
    operator = torch.ops.ssm_kernels.selective_state_update_two_sample.default
    torch.library.opcheck(operator, (given["state"], *samples, *tensors, True), keywords)

    compiled = torch.compile(lambda given: selective_state_update(**given), backend="aot_eager", fullgraph=True)
    caches = [cache_of(inputs), cache_of(inputs)]
    expected = selective_state_update(**step_arguments(inputs, 0, caches[0]))
    torch.testing.assert_close(compiled(step_arguments(inputs, 0, caches[1])), expected)
    torch.testing.assert_close(caches[1]["state"], caches[0]["state"])

    if rule == "exp_trapezoidal":
        return
    states = torch.stack([inputs["initial_state"], -inputs["initial_state"]])

    def step(state: Tensor) -> Tensor:
        return selective_state_update(**given | {"state": state})

    several = states.clone()
    outs = torch.vmap(step)(several)
    one_by_one = [state.clone() for state in states]
    torch.testing.assert_close(outs, torch.stack([step(state) for state in one_by_one]))
    torch.testing.assert_close(several, torch.stack(one_by_one))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"discretization": "bilinear"}, ValueError, "expected dt_A with discretization 'zoh'.*got 'bilinear', which advances"),
        ({"discretization": "foh_ramp"}, ValueError, "expected previous_x with discretization 'foh_ramp'"),
        ({"dt_A": torch.zeros(3, dtype=torch.float64)}, ValueError, r"expected dt_A of shape \(batch, dim\)"),
        ({"dt_A": torch.zeros(SLOTS, DIM)}, RuntimeError, "expected dt_A of dtype float64"),
        ({"previous_x": torch.zeros(SLOTS, DIM)}, ValueError, "expected previous_x with a discretization that reads two"),
    ],
)
def test_messages(changed, error, message):
    inputs = make_inputs("zoh")
    with pytest.raises(error, match=f"^selective_state_update: {message}"):
        selective_state_update(**step_arguments(inputs, 0, cache_of(inputs)) | changed)
