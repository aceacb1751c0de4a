"""The traps of Mamba-3, by their numbers in the design study: what goes wrong in silence."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from mamba3_helpers import FACTORS, MAMBA3, OF_STEPS, OPTIONS, SCAN, SEQUENCES, STATES, at_steps, make_inputs
from operator_spec import with_gradients
from torch import Tensor

from ssm_kernels import mamba3_state_update

OPERATOR = "mamba3_chunk_scan"


def gradients(outputs: tuple[Tensor, ...], cotangents: tuple[Tensor, ...], leaves: dict[str, Any]) -> dict[str, Tensor]:
    names = [name for name, value in leaves.items() if isinstance(value, Tensor) and value.requires_grad]
    return dict(zip(names, torch.autograd.grad(outputs, [leaves[name] for name in names], cotangents), strict=True))


def test_1_pairs_are_not_halves(device):
    inputs = make_inputs(seqlen=20, device=device)
    pairs, halves = (MAMBA3(**inputs | {"rotate": rotate})[0] for rotate in ("pairs", "halves"))
    assert (pairs - halves).abs().max() > 0.1


def test_2_rows_of_ranks_before_groups(device):
    """A rank of B that is zero adds nothing, each group has its gradient, and D multiplies v of each rank."""
    inputs = make_inputs(seqlen=6, device=device, **OPTIONS["ranks"] | {"ranks": 3, "norm": False, "z": False})
    whole = MAMBA3(**inputs)[0]
    less = {name: inputs[name].clone() for name in ("mimo_x", "mimo_out")}
    for value in less.values():
        value[:, 1] = 0
    kept = [0, 2]
    rest = {name: inputs[name][:, :, kept] for name in "BC"} | {name: inputs[name][:, kept] for name in ("B_bias", "C_bias")}
    rest |= {name: inputs[name][:, kept] for name in ("mimo_x", "mimo_out")} | {"initial_k": inputs["initial_k"][:, :, kept]}
    torch.testing.assert_close(MAMBA3(**inputs | less)[0], MAMBA3(**inputs | rest)[0], rtol=1e-12, atol=1e-12)
    leaves = with_gradients(inputs)
    found = gradients(MAMBA3(**leaves)[:1], (torch.ones_like(whole),), leaves)
    assert found["B"].ne(0).all() and found["C"].ne(0).all() and found["D"].ne(0).all()
    without = MAMBA3(**inputs | {"D": None})[0]
    factors = (inputs["mimo_x"] * inputs["mimo_out"]).sum(1)
    torch.testing.assert_close(whole - without, inputs["D"] * factors * inputs["x"], rtol=1e-10, atol=1e-10)


def test_3_biases_are_sums_over_batch_and_time(device):
    """A head's bias is that of no other head of its group, and its gradient is the sum of the row's gradients."""
    inputs = make_inputs(groups=1, seqlen=6, device=device)
    leaves = with_gradients(inputs)
    per_head = with_gradients(inputs | {name: inputs[name].repeat_interleave(4, 2) for name in "BC"})
    cotangents = MAMBA3.make_cotangents(inputs)
    of_group, of_heads = (gradients(MAMBA3(**each), cotangents, each) for each in (leaves, per_head))
    for name in "BC":
        torch.testing.assert_close(of_group[f"{name}_bias"], of_heads[name].sum((0, 1)), rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(of_group[name], of_heads[name].sum(2, keepdim=True), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("bounds", [(0, 16, 32, 40), (0, 1, 2, 40), (0, 15, 17, 40), (0, 0, 31, 32, 32, 33, 40)], ids=str)
def test_4_boundaries(bounds, device):
    """Sequences side by side are separate: by cu_seqlens, by seq_idx, and one by one, gradients of shared tensors included."""
    inputs = make_inputs(cu_seqlens=bounds, chunk_size=16, device=device)
    leaves, alone = with_gradients(inputs), with_gradients(inputs)
    cotangents = MAMBA3.make_cotangents(inputs)
    found = MAMBA3(**leaves)
    outputs = []
    for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
        states = {name: alone[name][row : row + 1] for name in STATES}
        outputs.append(MAMBA3(**at_steps(alone, begin, end) | states | {"cu_seqlens": None}))
    expected = tuple(torch.cat([each[i] for each in outputs], 1 if i == 0 else 0) for i in range(5))
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-11)
    of_one, of_each = gradients(found, cotangents, leaves), gradients(expected, cotangents, alone)
    for name, gradient in of_one.items():
        torch.testing.assert_close(
            gradient, of_each[name], rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )
    # Without states, seq_idx cuts as cu_seqlens does.
    stateless = inputs | dict.fromkeys(STATES)
    numbers = torch.zeros(1, bounds[-1], dtype=torch.int32, device=device)
    for begin in bounds[1:-1]:
        numbers[:, begin:] += begin < bounds[-1]
    by_numbers = MAMBA3(**stateless | {"cu_seqlens": None, "seq_idx": numbers})[0]
    torch.testing.assert_close(by_numbers, MAMBA3(**stateless)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("at", "name"), [*((at, "everything") for at in (0, 1, 15, 16, 17, 31, 39, 40)), (17, "ranks"), (4, "ranks")]
)
def test_5_split_anywhere(at, name, device):
    """The whole call, and two that pass all four states on: results and gradients, through k and x of the border too."""
    inputs = make_inputs(seqlen=40, chunk_size=16, device=device, **OPTIONS[name])
    whole, parts = with_gradients(inputs), with_gradients(inputs)
    cotangents = MAMBA3.make_cotangents(inputs)
    expected = MAMBA3(**whole)
    out, *states = MAMBA3(**at_steps(parts, 0, at))
    rest, *last = MAMBA3(**at_steps(parts, at, 40) | dict(zip(STATES, states, strict=True)))
    found = (torch.cat((out, rest), 1), *last)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-11)
    of_whole, of_parts = gradients(expected, cotangents, whole), gradients(found, cotangents, parts)
    for name, gradient in of_parts.items():
        torch.testing.assert_close(
            gradient, of_whole[name], rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    "options",
    [{}, {"rotate": "halves", "norm": True}, {"angles_of_heads": True, "D": "channel"}, {"ranks": 3}, OPTIONS["ranks"]],
    ids=str,
)
def test_5_steps_are_the_scan(options, device):
    inputs = make_inputs(seqlen=70, device=device, **options)
    out, *states = MAMBA3(**inputs)
    running = [inputs[name].clone() for name in STATES]
    shared = {name: inputs[name] for name in ("B_bias", "C_bias", "D", "norm_weight", "rotate", *FACTORS)}
    outputs = [
        mamba3_state_update(*running, *(inputs[name][:, t] for name in SEQUENCES), z=inputs["z"][:, t], **shared)
        for t in range(70)
    ]
    torch.testing.assert_close(torch.stack(outputs, 1), out, rtol=1e-10, atol=1e-11)
    for state, wanted in zip(running, states, strict=True):
        torch.testing.assert_close(state, wanted, rtol=1e-10, atol=1e-11)


EXTREMES = {
    "weights of zero and one": {"trap": lambda x: 60 * x.sign()},
    "weights of exactly one": {"trap": lambda x: torch.full_like(x, torch.inf)},
    "no time": {"dt": lambda x: x * (torch.arange(x.shape[1])[:, None] % 3 > 0)},
    "no decay": {"A": torch.zeros_like},
    "strong decay": {"A": lambda x: torch.where(torch.arange(x.shape[1])[:, None] % 4 == 1, -1000 / 0.05, x)},
    "saturated angles": {"angles": lambda x: 20 * x.sign()},
    "more than a turn": {"dt": lambda x: 10 * x, "A": lambda x: x / 10},
}


@pytest.mark.parametrize("changes", EXTREMES.values(), ids=list(EXTREMES))
def test_6_extreme_gates(changes):
    """Finite results that match the reference: nothing is divided by a decay, and a step of no time moves its sample on."""
    inputs = make_inputs(seqlen=40, chunk_size=16)
    inputs |= {name: change(inputs[name]) for name, change in changes.items()}
    cotangents = MAMBA3.make_cotangents(inputs)
    actual = MAMBA3.evaluate(MAMBA3, inputs, cotangents)
    assert all(value.isfinite().all() for value in actual.values())
    MAMBA3.assert_close(actual, MAMBA3.evaluate_in_float64(inputs, cotangents), 1e-9)


def test_6_a_step_of_no_time_moves_its_sample_on():
    inputs = make_inputs(seqlen=3, initial_states=False)
    inputs["dt"][:, 1] = 0
    _, _, ssm, k, x = MAMBA3(**at_steps(inputs, 0, 2))
    _, _, before, *_ = MAMBA3(**at_steps(inputs, 0, 1))
    torch.testing.assert_close(ssm, before, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(x, inputs["x"][:, 1], rtol=0, atol=0)
    assert (k - MAMBA3(**at_steps(inputs, 0, 1))[3]).abs().min() > 0


STEPS = 1_000_000


@pytest.fixture(scope="module")
def long_phases() -> tuple[dict[str, Tensor], Tensor]:
    """A million steps of 0.16 radians in the mean, as float32, and the phase after them in float64."""
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "x": torch.zeros(1, STEPS, 1, 1),
        "dt": torch.rand(1, STEPS, 1, generator=generator) * 0.2,
        "A": torch.full((1, STEPS, 1), -1.0),
        "B": torch.zeros(1, STEPS, 1, 4),
        "C": torch.zeros(1, STEPS, 1, 4),
        "trap": torch.zeros(1, STEPS, 1),
        "angles": torch.randn(1, STEPS, 2, generator=generator) + 0.7,
    }
    added = math.pi * torch.tanh(inputs["angles"].double()) * inputs["dt"].double()
    return inputs, torch.remainder(added.sum(1), 2 * math.pi)[0]


def distance(found: Tensor, wanted: Tensor) -> float:
    difference = torch.remainder(found.double() - wanted + math.pi, 2 * math.pi) - math.pi
    return difference.abs().max().item()


def test_7_phases_of_a_million_steps(long_phases, device):
    inputs, wanted = long_phases
    found = SCAN(**{name: tensor.to(device) for name, tensor in inputs.items()}, return_final_states=True)[1][0, 0]
    assert distance(found.cpu(), wanted) < (1e-6 if device == "cpu" else 1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-3), (torch.float64, 1e-8)], ids=str)
def test_7_phases_of_many_single_steps(long_phases, dtype, bound):
    """30 000 calls of one step here; the error grows with the square root of their number in float32."""
    inputs, _ = long_phases
    steps = 30_000
    wanted = (math.pi * torch.tanh(inputs["angles"][:, :steps].double()) * inputs["dt"][:, :steps].double()).sum(1)[0]
    states = torch.zeros(1, 1, 2, dtype=dtype), torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 4), torch.zeros(1, 1, 1)
    tokens = [inputs[name][:, :steps].unbind(1) for name in SEQUENCES]
    for token in zip(*tokens, strict=True):
        torch.ops.ssm_kernels.mamba3_state_update(*states, *token)
    assert distance(states[0][0, 0], wanted) < bound * math.sqrt(steps / STEPS)


@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", "trap", "angles", "z"])
@pytest.mark.parametrize("step", [1, 15, 16, 17, 39])
def test_8_causality(name, step, device):
    """Bits before a step do not change with the arguments of the step, whose dt and trap are in the shifted weights."""
    for options in ({}, {"dtype": torch.float32}, {"ranks": 2}, {"ranks": 3, "dtype": torch.float32, "norm": True}):
        inputs = make_inputs(seqlen=40, chunk_size=16, device=device, **options)
        changed = inputs | {name: inputs[name].clone()}
        changed[name][:, step:] = 3 - changed[name][:, step:] if name != "A" else 2 * changed[name][:, step:]
        before, after = (MAMBA3(**each)[0] for each in (inputs, changed))
        assert torch.equal(before[:, :step], after[:, :step])
        assert not torch.equal(before[:, step], after[:, step]) or name == "B"


def test_8_gradients_are_causal(device):
    """Arguments of later steps have no gradient from the output of a step."""
    inputs = with_gradients(make_inputs(seqlen=20, chunk_size=8, device=device))
    out = SCAN(**inputs)
    found = torch.autograd.grad(out[:, 9].sum(), [inputs[name] for name in OF_STEPS if name != "seq_idx"])
    for gradient in found:
        assert gradient[:, 10:].eq(0).all() and gradient[:, 9].ne(0).any()


def test_9_gradients_of_dt_and_of_the_product(device):
    """With A dt as one argument, as mamba_ssm has it, dt's gradient has no part through the decay."""
    inputs = with_gradients(make_inputs(seqlen=9, device=device))
    product = (inputs["A"] * inputs["dt"]).detach().requires_grad_()
    dt = inputs["dt"].detach().requires_grad_()
    cotangents = MAMBA3.make_cotangents(inputs)
    of_both = gradients(MAMBA3(**inputs), cotangents, inputs)
    of_product = torch.autograd.grad(MAMBA3(**inputs | {"A": product / dt, "dt": dt}), (product, dt), cotangents)
    torch.testing.assert_close(of_both["A"], of_product[0] * inputs["dt"], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(of_both["dt"], of_product[1] + of_product[0] * inputs["A"], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", "trap", "angles", "z"])
def test_nan_stays_in_its_sequence_and_head(name):
    """And after the chunks before its own."""
    inputs = make_inputs(cu_seqlens=(0, 20, 40), chunk_size=16, groups=4, angles_of_heads=True)
    clean = MAMBA3(**inputs)[0]
    inputs[name] = inputs[name].clone()
    inputs[name][0, 18, 1] = torch.nan
    out = MAMBA3(**inputs)[0]
    assert torch.equal(out[:, 20:], clean[:, 20:]) and torch.equal(out[:, :16], clean[:, :16])
    assert torch.equal(out[:, :, [0, 2, 3]], clean[:, :, [0, 2, 3]])
    assert out[:, 18, 1].isnan().any()
