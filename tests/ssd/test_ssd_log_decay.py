"""ssd_chunk_scan with log_decay and gain in place of dt and A: linear attention with decay.

The options of the scan with log_decay are rows of ``OPTIONS`` in ssd_helpers.py, which every test of all operators runs.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers import captured, dtypes
from operator_spec import with_gradients
from ssd_helpers import (
    KERNEL_CHUNK,
    SSD,
    assert_all_close,
    assert_matches_reference,
    at_steps,
    evaluate,
    make_cotangents,
    make_inputs,
    scan,
)
from torch import Tensor

from ssm_kernels import ssd_chunk_scan, ssd_chunk_scan_summary

OPERATOR = "ssd_chunk_scan"
SEQLEN = 2 * KERNEL_CHUNK + 6


def given_inputs(**options: Any) -> dict[str, Any]:
    return make_inputs(**({"log_decay": True, "seqlen": SEQLEN} | options))


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"resets": ((3, 64, 65), (130,))}], ids=["", "reverse", "resets"])
def test_is_the_scan_of_step_sizes(options, device):
    """log_decay = dt A and gain = dt is zoh, whose gain is the step size; the chain rule has the gradients of dt and A."""
    inputs = make_inputs(seqlen=SEQLEN, dt_bias=False, dt_softplus=False, device=device, **options)
    weights = make_cotangents(inputs)

    def from_step_sizes(dt: Tensor, A: Tensor, **others: Any) -> tuple[Tensor, ...]:
        return scan(**(others | {"dt": None, "A": None, "log_decay": dt * A, "gain": dt}))

    assert_all_close(evaluate(from_step_sizes, inputs, weights), evaluate(scan, inputs, weights))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_simple_gla(dtype, device):
    """The recurrence of simple gated linear attention as flash-linear-attention's naive_recurrent_simple_gla has it."""
    generator = torch.Generator().manual_seed(0)
    batch, seqlen, heads, K, V = 2, 70, 3, 5, 4

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    q, k, v = normal(batch, seqlen, heads, K), normal(batch, seqlen, heads, K), normal(batch, seqlen, heads, V)
    g = torch.nn.functional.logsigmoid(normal(batch, seqlen, heads))
    scale, S, outputs = K**-0.5, v.new_zeros(batch, heads, K, V), []
    for t in range(seqlen):
        S = S * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append((q[:, t, :, :, None] * scale * S).sum(-2))
    out, states = ssd_chunk_scan(v, None, None, k, q * scale, log_decay=g, return_final_states=True)
    torch.testing.assert_close(out, torch.stack(outputs, 1))
    torch.testing.assert_close(states, S.transpose(2, 3))


def test_retention_in_parallel_form(device):
    """RetNet: (Q K^T * D) V with D_ij = gamma^(i - j) for j <= i, and one gamma for each head."""
    inputs = given_inputs(groups=4, D=None, z=False, initial_states=False, gain=False, device=device)
    slopes = torch.log1p(-(2.0 ** (-5 - torch.arange(4, dtype=torch.float64, device=device))))
    inputs["log_decay"] = slopes.expand(inputs["log_decay"].shape)
    steps = torch.arange(SEQLEN, device=device)
    distance = (steps[:, None] - steps).clamp(min=0)
    decay = (slopes[:, None, None] * distance).exp().tril()
    out = torch.einsum("bihn,bjhn,hij,bjhp->bihp", inputs["C"], inputs["B"], decay, inputs["x"])
    torch.testing.assert_close(ssd_chunk_scan(**inputs), out)


def test_gain_multiplies_the_input(device):
    inputs = given_inputs(D=None, device=device)
    scaled = inputs | {"x": inputs["gain"][..., None] * inputs["x"], "gain": None}
    assert_all_close(evaluate(scan, scaled), evaluate(scan, inputs))


@dtypes()
@pytest.mark.parametrize("wide", [False, True], ids=["dtype_of_x", "wide"])
def test_dtypes(wide, dtype, device):
    inputs = given_inputs(dtype=dtype, device=device)
    kind = inputs["D"].dtype if wide else dtype
    inputs |= {"log_decay": inputs["log_decay"].to(kind), "gain": inputs["gain"].to(kind)}
    results = assert_matches_reference(inputs)
    assert results["grad_log_decay"].dtype == results["grad_gain"].dtype == kind


@pytest.mark.parametrize("name", ["log_decay", "gain"])
def test_dtypes_of_other_tensors_are_refused(name, device):
    for dtype, other in ((torch.float32, torch.float64), (torch.float32, torch.bfloat16), (torch.float64, torch.float32)):
        inputs = given_inputs(dtype=dtype, device=device)
        inputs[name] = inputs[name].to(other)
        with pytest.raises(RuntimeError, match=f"^ssd_chunk_scan: expected {name} of dtype"):
            scan(**inputs)


def test_autocast_keeps_float32(device):
    inputs = given_inputs(dtype=torch.float32, device=device)
    with torch.autocast(device, torch.bfloat16):
        out, states = scan(**inputs | {"gain": inputs["gain"].half()})
    lower = {name: inputs[name].bfloat16() for name in ("x", "B", "C", "z")}
    expected = scan(**inputs | lower | {"gain": inputs["gain"].half().float()})
    assert torch.equal(out, expected[0]) and torch.equal(states, expected[1])


@dtypes()
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_infinite_decays(reverse, dtype, device):
    """A log decay of -inf drops the state, as a change of seq_idx does, and has the gradient 0; everything else is finite."""
    resets = ((1, 20, 63, 64, 65, 128), (0, 127))
    inputs = given_inputs(dtype=dtype, device=device, reverse=reverse, initial_states=not reverse)
    for row, steps in enumerate(resets):
        inputs["log_decay"][row, list(steps)] = -math.inf
    weights = make_cotangents(inputs)
    actual = assert_matches_reference(inputs, cotangents=weights)
    assert all(value.isfinite().all() for value in actual.values())
    for row, steps in enumerate(resets):
        assert not actual["grad_log_decay"][row, list(steps)].any()


def test_lower_log_decays_decay_as_much(device):
    """e^x of the lowest numbers is zero in every dtype, as e^-inf is."""
    inputs = given_inputs(device=device)
    lowest = torch.finfo(torch.float64).min
    inputs["log_decay"][:, ::3] = -math.inf
    finite = inputs | {"log_decay": inputs["log_decay"].clamp(min=lowest)}
    weights = make_cotangents(inputs)
    assert_all_close(evaluate(scan, finite, weights), evaluate(scan, inputs, weights))


def test_growing_states(device):
    inputs = given_inputs(device=device)
    inputs["log_decay"] = inputs["log_decay"].abs() * 0.2
    assert_matches_reference(inputs)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("step", [1, KERNEL_CHUNK, KERNEL_CHUNK + 7])
def test_two_calls_are_one(step, reverse, device):
    inputs = given_inputs(reverse=reverse, device=device)
    out, final_states = scan(**inputs)
    parts = [at_steps(inputs, slice(None, step)), at_steps(inputs, slice(step, None))]
    outputs, states = {}, inputs["initial_states"]
    for i in (1, 0) if reverse else (0, 1):
        outputs[i], states = scan(**parts[i] | {"initial_states": states})
    torch.testing.assert_close(torch.cat([outputs[0], outputs[1]], 1), out, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(states, final_states, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_packed_sequences_are_separate(reverse, device):
    offsets = (0, 0, 1, 65, 65, 130, SEQLEN)
    inputs = given_inputs(cu_seqlens=offsets, reverse=reverse, device=device)
    out, final_states = scan(**inputs)
    for i, (begin, end) in enumerate(itertools.pairwise(offsets)):
        one = at_steps(inputs, slice(begin, end)) | {"cu_seqlens": None, "initial_states": inputs["initial_states"][i : i + 1]}
        of_one, state = scan(**one)
        torch.testing.assert_close(of_one, out[:, begin:end], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(state[0], final_states[i], rtol=1e-11, atol=1e-11)


def test_decay_of_the_summary(device):
    inputs = given_inputs(device=device)
    inputs["log_decay"][0, 5, 1] = -math.inf
    arguments = {name: inputs[name] for name in ("x", "dt", "A", "B", "log_decay", "gain")}
    last, decay = ssd_chunk_scan_summary(**arguments)
    torch.testing.assert_close(decay, inputs["log_decay"].sum(1).exp())
    assert decay[0, 1] == 0
    states = inputs["initial_states"]
    torch.testing.assert_close(scan(**inputs)[1], decay[..., None, None] * states + last, rtol=1e-11, atol=1e-11)


def test_needs_no_other_gradients(device):
    for names in (["log_decay"], ["gain"], ["x", "gain"]):
        leaves = with_gradients(given_inputs(device=device), names)
        everything = with_gradients(given_inputs(device=device))
        for inputs in (leaves, everything):
            sum(result.sum() for result in scan(**inputs)).backward()
        for name in names:
            torch.testing.assert_close(leaves[name].grad, everything[name].grad, rtol=1e-11, atol=1e-11)


@pytest.mark.cuda
def test_cuda_graph():
    inputs = given_inputs(dtype=torch.bfloat16, device="cuda")
    graph, found = captured(lambda: SSD(**inputs))
    graph.replay()
    torch.testing.assert_close(found, SSD(**inputs))
