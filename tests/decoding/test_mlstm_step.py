"""mlstm_step against its reference and against the scan; slots, layouts, autograd, vmap, compilation and CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_as_accurate, captured
from mlstm_helpers import MLSTM
from mlstm_helpers import make_inputs as make_scan_inputs
from mlstm_step_helpers import CASES, DTYPES, STATES, make_inputs, step
from torch import Tensor

from ssm_kernels import mlstm_step, reference

OPERATOR = "mlstm_step"

every_case = pytest.mark.parametrize("options", CASES.values(), ids=list(CASES))


def by_reference(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """The reference's output and states, on the CPU for every device."""
    device = inputs["q"].device
    out, states = reference.mlstm_step(**{name: x.cpu() if isinstance(x, Tensor) else x for name, x in inputs.items()})
    return out.to(device), *(state.to(device) for state in states)


def assert_matches_reference(inputs: dict[str, Any]) -> None:
    exact = by_reference(
        {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in inputs.items()}
    )
    native = by_reference(inputs)
    for name, actual, own, wanted in zip(("out", *STATES), step(inputs), native, exact, strict=True):
        if inputs["q"].dtype == torch.float64:
            torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert_as_accurate(actual, own.to(actual.dtype), wanted, name)


@every_case
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_matches_reference(dtypes, options, device):
    dtype, state_dtype = dtypes
    for slots, gate_dtype in ((None, None), (5, dtype)):
        assert_matches_reference(
            make_inputs(slots=slots, dtype=dtype, state_dtype=state_dtype, gate_dtype=gate_dtype, device=device, **options)
        )


@pytest.mark.parametrize("sizes", [(1, 1), (3, 7), (33, 5), (64, 40), (128, 65), (256, 512), (512, 3)])
def test_sizes(sizes, device):
    key_dim, value_dim = sizes
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert_matches_reference(make_inputs(key_dim=key_dim, value_dim=value_dim, dtype=dtype, device=device))


@pytest.mark.parametrize("layout", ["transposed", "permuted", "offset", "sliced"])
def test_layouts(layout, device):
    for dtype in (torch.float64, torch.float32):
        assert_matches_reference(make_inputs(layout=layout, slots=4, dtype=dtype, device=device))


@every_case
def test_steps_are_the_scan(options, device):
    inputs = make_scan_inputs(seqlen=70, key_dim=12, value_dim=10, device=device, **options)
    out, *states = MLSTM(**inputs)
    running = [inputs[f"initial_{name}"].clone() for name in STATES]
    outputs = [mlstm_step(*running, *(inputs[name][:, t] for name in "qkvif"), **options) for t in range(inputs["q"].shape[1])]
    torch.testing.assert_close(torch.stack(outputs, 1), out, rtol=1e-10, atol=1e-11)
    for state, wanted in zip(running, states, strict=True):
        torch.testing.assert_close(state, wanted, rtol=1e-10, atol=1e-11)


def test_an_empty_memory_may_hold_anything(device):
    """m of minus infinity: a new slot of a cache, whatever C and n are."""
    inputs = make_inputs(device=device)
    inputs["m"] = torch.full_like(inputs["m"], -torch.inf)
    zeros = inputs | {name: torch.zeros_like(inputs[name]) for name in "Cn"}
    expected = by_reference(zeros)
    poisoned = inputs | {name: torch.full_like(inputs[name], torch.nan) for name in "Cn"}
    for actual, wanted in zip(step(poisoned), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("log_forget", [0.0, -1e-4, -30.0, -400.0, -torch.inf])
@pytest.mark.parametrize("i", [-torch.inf, -60.0, 1000.0])
def test_gates_of_any_size(log_forget, i, device):
    inputs = make_inputs(device=device)
    before = {0.0: torch.inf, -1e-4: 9.2102}.get(log_forget, log_forget)
    inputs |= {"i": torch.full_like(inputs["i"], i), "f": torch.full_like(inputs["f"], before)}
    assert_matches_reference(inputs)


def test_padding_and_other_slots(device):
    inputs = make_inputs(batch=3, slots=6, device=device)
    inputs["state_batch_indices"] = torch.tensor([4, -1, 0], device=device)
    out, *states = step(inputs)
    assert not out[1].any() and out[0].any()
    for name, state in zip(STATES, states, strict=True):
        assert torch.equal(state[[1, 2, 3, 5]], inputs[name][[1, 2, 3, 5]])
    assert_matches_reference(inputs)


def test_indices_that_are_refused():
    inputs = make_inputs(slots=4)
    for indices, message in (
        ([4, 0], "expected state_batch_indices below the number of slots, 4, got 4 at position 0"),
        ([1, 1], "expected distinct state_batch_indices, got 1 at positions 0 and 1"),
    ):
        with pytest.raises(ValueError, match=f"^mlstm_step: {message}"):
            mlstm_step(**inputs | {"state_batch_indices": torch.tensor(indices)})


@pytest.mark.cuda
def test_slots_past_the_last_one():
    inputs = make_inputs(slots=4, device="cuda", dtype=torch.float32)
    inputs["state_batch_indices"] = torch.tensor([4, 1], device="cuda")
    out, C, _, m = step(inputs)
    assert out[0].isnan().all() and out[1].isfinite().all()
    assert torch.equal(C[[0, 2, 3]], inputs["C"][[0, 2, 3]]) and torch.equal(m[[0, 2, 3]], inputs["m"][[0, 2, 3]])


def test_bad_arguments(device):
    inputs = make_inputs(device=device)
    for changed, message in (
        ({"n": inputs["n"][:, :, :1]}, r"expected n of shape \(batch, heads, key_dim\) = \[2, 3, 16\], got \[2, 3, 1\]"),
        ({"m": inputs["m"][:1]}, r"expected m of shape \(batch, heads\) = \[2, 3\], got \[1, 3\]"),
        ({"v": inputs["v"][:, :1]}, r"expected v of shape \(batch, heads, value_dim\) = \[2, 3, 6\], got \[2, 1, 6\]"),
        ({"eps": -1.0}, "expected a finite eps of at least 0, got -1"),
        ({"normalize": False}, 'expected normalize with input_gate "exp"'),
    ):
        with pytest.raises(ValueError, match=f"^mlstm_step: {message}"):
            mlstm_step(**inputs | changed)
    shared = inputs["C"].clone()
    with pytest.raises(RuntimeError, match=r"^mlstm_step: .*n"):
        mlstm_step(**inputs | {"C": shared, "n": shared[:, :, 0]})


@pytest.mark.parametrize("name", ["C", "n", "m", "q", "i"])
def test_gradients_are_refused(name, device):
    inputs = make_inputs(device=device)
    sentence = r"^mlstm_step: decoding is not differentiable: train with mlstm_scan, and decode under torch.no_grad\(\)$"
    with pytest.raises(RuntimeError, match=sentence):
        mlstm_step(**inputs | {name: inputs[name].clone().requires_grad_()}).sum().backward()
    if name in STATES:  # one that is the result of a graph
        state = inputs[name].clone().requires_grad_() * 2
        mlstm_step(**inputs | {name: state})
        with pytest.raises(RuntimeError, match=sentence):
            state.sum().backward()
    with torch.no_grad():
        mlstm_step(**inputs | {name: inputs[name].clone().requires_grad_()})


def test_opcheck(device):
    for options in ({}, {"slots": 4}):
        inputs = make_inputs(device=device, dtype=torch.float32, **options)
        names = [argument.name for argument in torch.ops.ssm_kernels.mlstm_step.default._schema.arguments]
        torch.library.opcheck(torch.ops.ssm_kernels.mlstm_step, tuple(inputs[name] for name in names))


def test_vmap(device):
    samples = [make_inputs(device=device, seed=seed) for seed in range(3)]
    stacked = {name: torch.stack([each[name] for each in samples]) for name in (*STATES, *"qkvif")}
    out = torch.vmap(lambda tensors: mlstm_step(**tensors))(stacked)
    expected = [step(each) for each in samples]
    for place, actual in enumerate((out, *(stacked[name] for name in STATES))):
        assert torch.equal(actual, torch.stack([each[place] for each in expected]))


def test_autocast(device):
    inputs = make_inputs(device=device, dtype=torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, *states = step(inputs)
    low = inputs | {name: inputs[name].bfloat16() for name in "qkv"}
    for actual, wanted in zip((out, *states), step(low), strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.cuda
def test_replays_of_a_graph():
    """Other values in the same tensors, slots included: nothing is read on the host."""
    draws = [make_inputs(slots=6, device="cuda", dtype=torch.bfloat16, key_dim=64, value_dim=96, seed=seed) for seed in (0, 1)]
    draws[1]["state_batch_indices"] = torch.tensor([-1, 2], dtype=torch.int32, device="cuda")
    expected = [step(draw) for draw in draws]
    static = {name: x.clone() if isinstance(x, Tensor) else x for name, x in draws[0].items()}
    graph, out = captured(lambda: mlstm_step(**static))
    for draw, wanted in list(zip(draws, expected, strict=True))[::-1]:
        for name, x in draw.items():
            if isinstance(x, Tensor):
                static[name].copy_(x)
        graph.replay()
        for actual, value in zip((out, *(static[name] for name in STATES)), wanted, strict=True):
            assert torch.equal(actual, value)
