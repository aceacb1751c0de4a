"""Steps with a matrix A for each channel, or one for all: against the scan, in place, for several tokens and slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ssm_kernels import reference, selective_scan, selective_state_update

RULES = {
    "bilinear": {},
    "trapezoidal": {},
    "gbt": {"alpha": 0.7},
    "gbt_two_sample": {"alpha": 0.3},
    "euler": {},
    "backward_euler": {},
    "rk4": {},
}
TWO_SAMPLES = ("trapezoidal", "gbt_two_sample")
STEPS = 4
OPERATOR = "selective_state_update"
every_rule = pytest.mark.parametrize("rule", RULES)


def make_inputs(
    rule: str,
    device: str = "cpu",
    *,
    batch: int = 3,
    dim: int = 6,
    dstate: int = 5,
    groups: int | None = None,
    matrices: str = "random",
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """Arguments of selective_scan over STEPS tokens."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    eye = torch.eye(dstate, dtype=wide, device=device)
    if matrices == "Jordan block":
        A = (torch.diag(torch.ones(dstate - 1), 1).to(eye) - 0.7 * eye).expand(dim, -1, -1)
    else:
        A = normal(1 if matrices == "shared" else dim, dstate, dstate, dtype=wide) / dstate**0.5 / 2 - eye
    shape = (batch, dstate, STEPS) if groups is None else (batch, groups, dstate, STEPS)
    inputs: dict[str, Any] = {
        "u": normal(batch, dim, STEPS),
        "delta": normal(batch, dim, STEPS) - 1,
        "A": A,
        "B": normal(*shape),
        "C": normal(*shape),
        "D": normal(dim, dtype=wide),
        "z": normal(batch, dim, STEPS),
        "delta_bias": normal(dim, dtype=wide),
        "initial_state": normal(batch, dim, dstate, dtype=wide),
        "delta_softplus": True,
        "discretization": rule,
    }
    if rule in TWO_SAMPLES:
        inputs["previous"] = (normal(batch, dim), normal(*shape[:-1]))
    return inputs | RULES.get(rule, {})


def step_arguments(inputs: dict[str, Any], t: int | None) -> dict[str, Any]:
    """The arguments of the step of token ``t``, or of all tokens; the state and the samples apart."""

    def at(value: Tensor) -> Tensor:
        return value.movedim(-1, 1) if t is None else value[..., t]

    names = {"x": "u", "dt": "delta", "B": "B", "C": "C", "z": "z"}
    return {name: at(inputs[of_scan]) for name, of_scan in names.items()} | {
        "A": inputs["A"],
        "D": inputs["D"],
        "dt_bias": inputs["delta_bias"],
        "dt_softplus": True,
        "discretization": inputs["discretization"],
        "alpha": inputs.get("alpha"),
    }


def memories(inputs: dict[str, Any]) -> dict[str, Tensor]:
    found = {"state": inputs["initial_state"].clone()}
    if "previous" in inputs:
        found |= {"previous_x": inputs["previous"][0].clone(), "previous_B": inputs["previous"][1].clone()}
    return found


@every_rule
@pytest.mark.parametrize(("matrices", "groups"), [("random", 2), ("shared", None), ("Jordan block", None)])
def test_steps_equal_the_scan(rule: str, matrices: str, groups: int | None, device: str) -> None:
    inputs = make_inputs(rule, device, matrices=matrices, groups=groups)
    expected, last = selective_scan(**inputs, return_last_state=True)
    single, several = memories(inputs), memories(inputs)
    outputs = [selective_state_update(**single, **step_arguments(inputs, t)) for t in range(STEPS)]
    torch.testing.assert_close(torch.stack(outputs, -1), expected, rtol=1e-10, atol=1e-12)
    found = selective_state_update(**several, **step_arguments(inputs, None))
    torch.testing.assert_close(found.movedim(1, -1), expected, rtol=1e-10, atol=1e-12)
    for memory in (single, several):
        state = last.state if rule in TWO_SAMPLES else last
        torch.testing.assert_close(memory["state"], state, rtol=1e-10, atol=1e-12)
        if rule in TWO_SAMPLES:
            assert torch.equal(memory["previous_x"], last.u) and torch.equal(memory["previous_B"], last.B)


@pytest.mark.parametrize(("dim", "dstate"), [(1, 1), (37, 3), (2, 32)])
def test_sizes_against_the_reference(dim: int, dstate: int, device: str) -> None:
    for rule in RULES:
        inputs = make_inputs(rule, dim=dim, dstate=dstate)
        states, arguments = memories(inputs), step_arguments(inputs, 0)
        if rule in TWO_SAMPLES:
            of_one = {name: x[..., :1] if name in ("u", "delta", "B", "C", "z") else x for name, x in inputs.items()}
            out, last = reference.two_sample_scan(**of_one, return_last_state=True)
            expected, state = out[..., 0], last.state
        else:
            expected, state = reference.selective_state_update(**states, **arguments)
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in (states | arguments).items()}
        torch.testing.assert_close(selective_state_update(**moved).cpu(), expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(moved["state"].cpu(), state, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", ["euler", "trapezoidal", "backward_euler"])
def test_diagonal_matrices_equal_a_diagonal_A(rule: str, device: str) -> None:
    inputs = make_inputs(rule, device)
    diagonal = -torch.rand(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
    dense, plain = memories(inputs), memories(inputs)
    arguments = step_arguments(inputs, 0) | {"dt_limit": (0.05, 0.4)}
    expected = selective_state_update(**plain, **arguments | {"A": diagonal})
    found = selective_state_update(**dense, **arguments | {"A": torch.diag_embed(diagonal)})
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    for name, value in plain.items():
        torch.testing.assert_close(dense[name], value, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("indices", [[4, -1, 0], [-1, 2, -1], [-1, -1, -1], [0, 1, 2]])
@pytest.mark.parametrize("rule", ["bilinear", "trapezoidal"])
def test_slots(rule: str, indices: list[int], device: str) -> None:
    inputs = make_inputs(rule, device)
    rows = memories(inputs)
    caches = {
        name: torch.randn(5, *value.shape[1:], dtype=value.dtype, generator=torch.Generator().manual_seed(2)).to(device)
        for name, value in rows.items()
    }
    used = [row for row, slot in enumerate(indices) if slot >= 0]
    slots = [indices[row] for row in used]
    for name in caches:
        caches[name][slots] = rows[name][used]
    expected_caches = {name: value.clone() for name, value in caches.items()}
    expected = selective_state_update(**rows, **step_arguments(inputs, 1))
    expected[[row for row in range(3) if row not in used]] = 0
    for name in caches:
        expected_caches[name][slots] = rows[name][used]
    table = torch.tensor(indices, dtype=torch.int32, device=device)
    found = selective_state_update(**caches, **step_arguments(inputs, 1), state_batch_indices=table)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    for name, value in caches.items():
        torch.testing.assert_close(value, expected_caches[name], rtol=1e-12, atol=1e-13)
        untouched = [slot for slot in range(5) if slot not in slots]
        assert torch.equal(value[untouched], expected_caches[name][untouched])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs("trapezoidal", device, dtype=dtype)
    wide = {name: value.double() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    wide["previous"] = tuple(value.double() for value in inputs["previous"])
    states, expected_states = memories(inputs), memories(wide)
    states["state"] = states["state"].to(dtype)
    expected_states["state"] = states["state"].double()
    found = selective_state_update(**states, **step_arguments(inputs, 0) | {"A": inputs["A"].to(dtype)})
    expected = selective_state_update(**expected_states, **step_arguments(wide, 0) | {"A": inputs["A"].to(dtype).double()})
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert found.dtype == dtype and states["state"].dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(states["state"].double(), expected_states["state"], rtol=tolerance, atol=tolerance)


def test_empty(device: str) -> None:
    inputs = make_inputs("bilinear", device, batch=0)
    assert selective_state_update(**memories(inputs), **step_arguments(inputs, 0)).shape == (0, 6)


def test_compiles(device: str) -> None:
    inputs = make_inputs("bilinear", device)
    states, compiled = memories(inputs), memories(inputs)
    expected = selective_state_update(**states, **step_arguments(inputs, 0))
    found = torch.compile(selective_state_update, backend="eager", fullgraph=True)(**compiled, **step_arguments(inputs, 0))
    assert torch.equal(found, expected) and torch.equal(compiled["state"], states["state"])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"discretization": "zoh"}, ValueError, "expected .*, got 'zoh', which needs the exponential of a matrix in each step"),
        ({"A": torch.zeros(2, 5, 5)}, ValueError, r"expected A of shape .* = \[6, 5, 5\] or \[1, 5, 5\], got \[2, 5, 5\]"),
        ({"dt_A": torch.ones(3, 6)}, NotImplementedError, "dt_A is not supported with A of shape"),
        ({"A_is_log": True}, NotImplementedError, "A_is_log is not supported with A of shape"),
        ({"out": torch.zeros(3, 6)}, NotImplementedError, "out is not supported with A of shape"),
        ({"B": torch.zeros(2, 5)}, ValueError, r"expected B of shape \(batch, dstate\) or .*, got \[2, 5\]"),
        ({"C": torch.zeros(3, 4)}, ValueError, r"expected C of shape .* with dstate = 5, got \[3, 4\]"),
        ({"state": torch.zeros(3, 6, 33)}, ValueError, "expected dstate from 1 to 32 with a matrix A for each channel, got 33"),
        ({"dt": torch.zeros(3, 1)}, ValueError, r"expected dt of shape \(batch, dim\) = \[3, 6\], got \[3, 1\]"),
        ({"state_batch_indices": torch.tensor([0, 1, 3])}, ValueError, "expected state_batch_indices below 3, got 3"),
        ({"state_batch_indices": torch.tensor([0, 1, 1])}, ValueError, "expected distinct state_batch_indices"),
        ({"state": torch.zeros(3, 6, 5).double().requires_grad_()}, NotImplementedError, "decoding is not differentiable"),
        ({"discretization": "trapezoidal"}, ValueError, "expected previous_x with discretization 'trapezoidal', got None"),
    ],
)
def test_refuses(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    inputs = make_inputs("bilinear")
    with pytest.raises(error, match="selective_state_update: " + message):
        selective_state_update(**memories(inputs) | step_arguments(inputs, 0) | changed)


def test_reference_steps_rules_with_exponentials() -> None:
    inputs = make_inputs("zoh_exact")
    states, arguments = memories(inputs), step_arguments(inputs, 0)
    of_one = {name: x[..., :1] if name in ("u", "delta", "B", "C", "z") else x for name, x in inputs.items()}
    expected, last = reference.selective_scan(**of_one, return_last_state=True)
    out, state = reference.selective_state_update(**states, **arguments)
    torch.testing.assert_close(out, expected[..., 0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-11, atol=1e-12)
    with pytest.raises(ValueError, match="expected no dt_A with A of shape"):
        reference.selective_state_update(**states, **arguments, dt_A=arguments["dt"])
