"""Steps of discretizations that read two input samples: the samples are updated in place beside the state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ssm_kernels import selective_scan, selective_state_update

OPERATOR = "selective_state_update"
RULES = ("foh_ramp", "trapezoidal", "gbt_two_sample", "exp_trapezoidal")
every_rule = pytest.mark.parametrize("rule", RULES)
STEPS = 6


def make_inputs(
    rule: str, *, groups: int | None = None, dtype: torch.dtype = torch.float64, slots: int = 3, dim: int = 6, dstate: int = 5
) -> dict[str, Any]:
    """Arguments of selective_scan over STEPS tokens, and the previous sample."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    matrix = (slots, dstate, STEPS) if groups is None else (slots, groups, dstate, STEPS)
    inputs: dict[str, Any] = {
        "u": normal(slots, dim, STEPS),
        "delta": normal(slots, dim, STEPS) - 1,
        "A": -normal(dim, dstate, dtype=torch.float64).exp().to(wide),
        "B": normal(*matrix),
        "C": normal(*matrix),
        "D": normal(dim, dtype=wide),
        "z": normal(slots, dim, STEPS),
        "delta_bias": normal(dim, dtype=wide),
        "initial_state": normal(slots, dim, dstate, dtype=wide),
        "delta_softplus": True,
        "discretization": rule,
        "previous": (normal(slots, dim), normal(*matrix[:-1])),
    }
    if rule == "gbt_two_sample":
        inputs["alpha"] = 0.7
    if rule == "exp_trapezoidal":
        inputs |= {"lam": normal(slots, dim, STEPS), "lam_sigmoid": True}
    return inputs


def on(device: str, inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(x.to(device) for x in value)
        if isinstance(value, tuple)
        else value.to(device)
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }


def step_arguments(inputs: dict[str, Any], tokens: int | slice, cache: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
    """The arguments of one step, or of several tokens."""
    several = isinstance(tokens, slice)

    def at(name: str) -> Tensor:
        value = inputs[name][..., tokens]
        return value.movedim(-1, 1) if several else value

    named = {"x": "u", "dt": "delta", "B": "B", "C": "C", "z": "z"} | ({"lam": "lam"} if "lam" in inputs else {})
    options = {name: inputs[name] for name in ("A", "D", "discretization", "alpha", "lam_sigmoid") if name in inputs}
    options |= {"dt_bias": inputs["delta_bias"], "dt_softplus": True}
    state, previous_x, previous_B = cache
    return (
        {name: at(of) for name, of in named.items()}
        | options
        | {
            "state": state,
            "previous_x": previous_x,
            "previous_B": previous_B,
        }
    )


def cache_of(inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.clone() for x in (inputs["initial_state"], *inputs["previous"]))


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@every_rule
def test_steps_are_the_scan(rule, dtype, groups, device):
    """One by one, and several tokens in a call: outputs, states and samples."""
    inputs = on(device, make_inputs(rule, groups=groups, dtype=dtype))
    expected, last = selective_scan(**inputs, return_last_state=True)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    one_by_one, at_once = cache_of(inputs), cache_of(inputs)
    outs = [selective_state_update(**step_arguments(inputs, t, one_by_one)) for t in range(STEPS)]
    out = selective_state_update(**step_arguments(inputs, slice(0, STEPS), at_once)).movedim(1, -1)
    for found in (torch.stack(outs, -1), out):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for cache in (one_by_one, at_once):
        torch.testing.assert_close(cache[0], last.state, rtol=tolerance, atol=tolerance)
        assert torch.equal(cache[1], last.u) and torch.equal(cache[2], last.B)


@every_rule
def test_slots(rule, device):
    """Rows use slots in another order; padding and unused slots stay."""
    inputs = on(device, make_inputs(rule))
    cache = tuple(torch.cat([x, x[:1] + 1]) for x in cache_of(inputs))
    before = tuple(x.clone() for x in cache)
    arguments = step_arguments(inputs, 0, cache)
    slots = torch.tensor([2, -1, 3], device=device)
    out = selective_state_update(**arguments, state_batch_indices=slots)
    assert not out[1].any()
    for row, slot in ((0, 2), (2, 3)):
        own = tuple(x[slot : slot + 1].clone() for x in before)
        of_row = {
            name: value[row : row + 1] if name in ("x", "dt", "B", "C", "z", "lam") else value
            for name, value in arguments.items()
        }
        expected = selective_state_update(**of_row | dict(zip(("state", "previous_x", "previous_B"), own, strict=True)))
        torch.testing.assert_close(out[row : row + 1], expected)
        for found, value in zip(cache, own, strict=True):
            torch.testing.assert_close(found[slot : slot + 1], value)
    for found, value in zip(cache, before, strict=True):
        assert torch.equal(found[:2], value[:2])


@every_rule
def test_a_slot_for_each_token(rule, device):
    """Tables of slots with a column for each token receive the state and the sample after the token."""
    inputs = on(device, make_inputs(rule))
    cache = tuple(torch.cat([x, x, x]) for x in cache_of(inputs))
    slots = torch.tensor([[0, 3], [1, 4], [2, 5]], device=device)
    selective_state_update(**step_arguments(inputs, slice(0, 2), cache), state_batch_indices=slots)
    one_by_one = cache_of(inputs)
    for t, begin in enumerate((0, 3)):
        selective_state_update(**step_arguments(inputs, t, one_by_one))
        for found, value in zip(cache, one_by_one, strict=True):
            torch.testing.assert_close(found[begin : begin + 3], value)


@every_rule
def test_heads_and_tied_rates(rule, device):
    """Rows of A with one number take the same path as those with several."""
    inputs = on(device, make_inputs(rule))
    inputs["A"] = inputs["A"][:, :1].expand_as(inputs["A"])
    cache, dense = cache_of(inputs), cache_of(inputs)
    arguments = step_arguments(inputs, 0, cache)
    expected = selective_state_update(**step_arguments(inputs | {"A": inputs["A"].clone()}, 0, dense))
    torch.testing.assert_close(selective_state_update(**arguments), expected)
    torch.testing.assert_close(cache[0], dense[0])
    cache = cache_of(inputs)
    heads = {
        name: value.unflatten(-1, (2, 3)) if name in ("x", "dt", "z", "lam", "D", "dt_bias", "previous_x") else value
        for name, value in step_arguments(inputs, 0, cache).items()
    }
    heads |= {"A": inputs["A"].unflatten(0, (2, 3)), "state": cache[0].unflatten(1, (2, 3))}
    torch.testing.assert_close(selective_state_update(**heads).flatten(1), expected)
    torch.testing.assert_close(cache[0], dense[0])
    assert torch.equal(cache[1], inputs["u"][..., 0])


def test_dt_limit_and_log_of_A(device):
    inputs = on(device, make_inputs("exp_trapezoidal"))
    caches = cache_of(inputs), cache_of(inputs)
    arguments = step_arguments(inputs, 0, caches[0]) | {"dt_limit": (0.2, 0.4)}
    of_log = step_arguments(inputs, 0, caches[1]) | {"dt_limit": (0.2, 0.4), "A": (-inputs["A"]).log(), "A_is_log": True}
    torch.testing.assert_close(selective_state_update(**arguments), selective_state_update(**of_log))


def test_opcheck_and_versions():
    inputs = make_inputs("exp_trapezoidal")
    cache = cache_of(inputs)
    arguments = step_arguments(inputs, 0, cache)
    arguments.pop("discretization")
    flag = arguments.pop("lam_sigmoid")
    operator = torch.ops.ssm_kernels.selective_state_update_two_sample.default
    torch.library.opcheck(operator, (), arguments | {"discretization": "exp_trapezoidal", "lam_sigmoid": flag})
    versions = [x._version for x in cache]
    selective_state_update(**step_arguments(inputs, 0, cache))
    assert [x._version for x in cache] == [version + 1 for version in versions]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"previous_x": None}, ValueError, "expected previous_x with discretization 'trapezoidal', got None"),
        ({"previous_B": None}, ValueError, "expected previous_B with discretization 'trapezoidal', got None"),
        ({"discretization": "zoh"}, ValueError, "expected previous_x with a discretization that reads two input samples only"),
        ({"discretization": "exp_trapezoidal"}, ValueError, "expected lam with discretization 'exp_trapezoidal' and no other"),
        ({"lam": torch.zeros(3, 6).double()}, ValueError, "expected lam with discretization 'exp_trapezoidal' and no other"),
        (
            {"lam_sigmoid": True},
            ValueError,
            "expected lam_sigmoid with discretization 'exp_trapezoidal' only, got 'trapezoidal'",
        ),
        (
            {"x": torch.zeros(3, 2, 6).double(), "lam": torch.zeros(4, 2, 6).double()},
            ValueError,
            r"expected lam of shape \(batch, tokens, dim\) = \[3, 2, 6\], or one that broadcasts to it, got \[4, 2, 6\]",
        ),
        ({"discretization": "gbt_two_sample"}, ValueError, "expected discretization 'gbt_two_sample' with alpha"),
        ({"previous_x": torch.zeros(3, 5).double()}, ValueError, r"expected previous_x of shape \(batch, dim\) = \[3, 6\]"),
        ({"previous_B": torch.zeros(3, 4).double()}, ValueError, r"expected previous_B of shape \(batch, dstate\) = \[3, 5\]"),
        ({"previous_x": torch.zeros(3, 6)}, RuntimeError, "expected previous_x of dtype float64"),
    ],
)
def test_messages(changed, error, message):
    inputs = make_inputs("trapezoidal")
    with pytest.raises(error, match=f"^selective_state_update: {message}"):
        selective_state_update(**step_arguments(inputs, 0, cache_of(inputs)) | changed)


@pytest.mark.parametrize("name", ["state", "previous_x", "previous_B", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "lam"])
def test_wrong_kinds_of_each_tensor(name):
    """Through torch.ops: None for a required tensor, and sparse ones."""
    inputs = make_inputs("exp_trapezoidal")
    given = step_arguments(inputs, 0, cache_of(inputs))
    operator = torch.ops.ssm_kernels.selective_state_update_two_sample
    if name not in ("D", "z", "dt_bias", "lam"):
        with pytest.raises(TypeError, match=f"^selective_state_update: expected {name} to be a tensor, got None"):
            operator(**given | {name: None})
    with pytest.raises(NotImplementedError, match=f"^selective_state_update: expected {name} to be a dense tensor"):
        operator(**given | {name: given[name].to_sparse()})


def test_shared_memory_raises():
    inputs = make_inputs("trapezoidal")
    arguments = step_arguments(inputs, 0, cache_of(inputs))
    for changed in ({"previous_x": arguments["x"]}, {"previous_B": arguments["B"]}):
        with pytest.raises(RuntimeError, match=r"share no memory with previous_., which is updated in place"):
            selective_state_update(**arguments | changed)


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [0, slice(0, 3)], ids=["one token", "three tokens"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dstate", [16, 5, 200])
@every_rule
def test_cuda_agrees_with_the_cpu(rule, dstate, dtype, tokens):
    inputs = make_inputs(rule, groups=2, dtype=dtype, slots=5, dim=70, dstate=dstate)
    slots = torch.tensor([3, 0, 4, 1, 2], dtype=torch.int32)
    arguments = step_arguments(inputs, tokens, cache_of(inputs)) | {"state_batch_indices": slots}
    check_on_cuda(arguments, dtype)


@pytest.mark.cuda
@pytest.mark.parametrize(("dim", "groups"), [(72, 2), (12, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dstate", [16, 12, 128])
@every_rule
def test_cuda_vectors_agree_with_the_cpu(rule, dstate, dtype, dim, groups):
    """Contiguous rows, four channels of a group at a time or fewer, and a row without a slot."""
    inputs = make_inputs(rule, groups=groups, dtype=dtype, slots=5, dim=dim, dstate=dstate)
    arguments = step_arguments(inputs, 0, cache_of(inputs))
    arguments = {name: x.contiguous() if isinstance(x, Tensor) else x for name, x in arguments.items()}
    check_on_cuda(arguments | {"state_batch_indices": torch.tensor([3, 0, -1, 1, 2])}, dtype)


def check_on_cuda(arguments: dict[str, Any], dtype: torch.dtype) -> None:
    on_cuda = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in arguments.items()}
    wide = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in arguments.items()}
    found, expected = selective_state_update(**on_cuda), selective_state_update(**wide)
    results = {"out": (found, expected)} | {name: (on_cuda[name], wide[name]) for name in ("state", "previous_x", "previous_B")}
    for name, (actual, value) in results.items():
        bound = 5e-6 + torch.finfo(actual.dtype).eps if dtype != torch.float64 else 1e-12
        assert (actual.cpu().double() - value).norm() < bound * value.norm(), name
