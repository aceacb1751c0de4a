"""The counts of FlopCounterMode for the operators and the layers."""

from __future__ import annotations

import pytest
import torch
from model_helpers import make_model, make_tokens
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import ssm_kernels
from ssm_kernels import nn
from ssm_kernels.integrations import flops

BATCH, SEQLEN, DIM, DSTATE, WIDTH = 2, 100, 24, 16, 4
STEPS = BATCH * SEQLEN


@pytest.fixture(autouse=True)
def registered():
    flops.register()
    flops.register()


def counted(function, *, backward: bool) -> dict[str, int]:
    """Flops of the operators that count any, by name; of forward alone, or of forward and backward."""
    with FlopCounterMode(display=False) as counter:
        out = function()
        if backward:
            (out[0] if isinstance(out, tuple) else out).sum().backward()
    return {str(name).split(".")[-1]: count for name, count in counter.get_flop_counts()["Global"].items() if count}


def with_gradients(*tensors):
    return [tensor.requires_grad_() for tensor in tensors]


def test_every_operator_has_a_formula():
    names = {name.removeprefix("ssm_kernels::") for name in torch._C._dispatch_get_all_op_names() if "ssm_kernels::" in name}
    without = {name for name in names if getattr(torch.ops.ssm_kernels, name) not in flop_registry}
    tables = {"_discretizations", "_two_sample_discretizations", "_discretization_aliases", "_recurrences", "_nearest_choice"}
    assert without == {"_set_debug_option", "_selective_scan_plan", "_ssd_chunk_scan_plan", *tables}


def selective_scan():
    u, delta = torch.randn(BATCH, DIM, SEQLEN), torch.rand(BATCH, DIM, SEQLEN)
    inputs = with_gradients(u, delta, -torch.rand(DIM, DSTATE), *torch.randn(2, BATCH, DSTATE, SEQLEN).unbind())
    return lambda: ssm_kernels.selective_scan(*inputs)


def ssd_chunk_scan():
    x, B, C = torch.randn(BATCH, SEQLEN, 6, 4), *torch.randn(2, BATCH, SEQLEN, 2, DSTATE).unbind()
    inputs = with_gradients(x, torch.rand(BATCH, SEQLEN, 6), -torch.rand(6), B, C)
    return lambda: ssm_kernels.ssd_chunk_scan(*inputs, chunk_size=32)


def causal_conv1d():
    inputs = with_gradients(torch.randn(BATCH, SEQLEN, DIM), torch.randn(DIM, WIDTH))
    return lambda: ssm_kernels.causal_conv1d(*inputs)


def mingru_scan():
    inputs = with_gradients(torch.randn(BATCH, SEQLEN, DIM), torch.randn(BATCH, SEQLEN, DIM))
    return lambda: ssm_kernels.mingru_scan(*inputs)


# C B^T in a group, (C B^T) x in a head, the chunk's state, and C times the state before the chunk.
WITHIN, VALUES, STATES = 2 * 32 * DSTATE, 6 * 32 * 4, 6 * 4 * DSTATE
OPERATORS = [
    (selective_scan, 9 * STEPS * DIM * DSTATE, 18 * STEPS * DIM * DSTATE),
    (ssd_chunk_scan, 2 * STEPS * (WITHIN + VALUES + 2 * STATES), 2 * STEPS * (3 * WITHIN + 2 * VALUES + 5 * STATES)),
    (causal_conv1d, 2 * STEPS * DIM * WIDTH, 4 * STEPS * DIM * WIDTH),
    (mingru_scan, 2 * STEPS * DIM, 4 * STEPS * DIM),
]


@pytest.mark.parametrize(("make", "forward", "backward"), OPERATORS, ids=[make.__name__ for make, *_ in OPERATORS])
def test_operator(make, forward, backward):
    call = make()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert sum(counted(call, backward=False).values()) == forward
    assert sum(counted(call, backward=False).values()) == forward
    assert sum(counted(call, backward=True).values()) == forward + backward


def test_steps():
    state, x, A = torch.zeros(BATCH, DIM, DSTATE), torch.rand(BATCH, DIM), -torch.rand(DIM, DSTATE)
    B = torch.randn(BATCH, DSTATE)
    step = counted(lambda: ssm_kernels.selective_state_update(state, x, x, A, B, B), backward=False)
    assert step == {"selective_state_update": 9 * BATCH * DIM * DSTATE}
    x, B = (tensor[:, None].repeat(1, 3, 1) for tensor in (x, B))
    tokens = counted(lambda: ssm_kernels.selective_state_update(state, x, x, A, B, B, out=torch.empty_like(x)), backward=False)
    assert tokens == {"selective_state_update_out": 3 * 9 * BATCH * DIM * DSTATE}


@pytest.mark.parametrize("updates", [1, 2])
def test_steps_of_the_delta_rule(updates):
    heads, value_heads, key_dim, value_dim = 2, 4, 5, 3
    states, q = torch.zeros(BATCH, value_heads, value_dim, key_dim), torch.rand(BATCH, 3, heads, key_dim)
    k, v = torch.rand(BATCH, 3 * updates, heads, key_dim), torch.rand(BATCH, 3 * updates, value_heads, value_dim)
    beta, g = v[..., 0], -torch.rand(BATCH, 3, value_heads)
    step = counted(lambda: ssm_kernels.delta_rule_step(states, q, k, v, beta, g=g, num_householder=updates), backward=False)
    assert step == {"delta_rule_step": BATCH * 3 * states[0].numel() * (3 + 4 * updates)}


def test_layers():
    """Forward and backward of the layers: their projections by PyTorch's formula, the rest by ours."""
    x = torch.randn(BATCH, SEQLEN, DIM, requires_grad=True)
    mamba = nn.Mamba(DIM, d_state=DSTATE, d_conv=WIDTH)
    inner, rank = mamba.d_inner, mamba.dt_rank
    projections = 2 * STEPS * (DIM * 2 * inner + inner * (rank + 2 * DSTATE) + rank * inner + inner * DIM)
    ours = 2 * STEPS * inner * WIDTH + 9 * STEPS * inner * DSTATE
    assert sum(counted(lambda: mamba(x), backward=True).values()) == 3 * (projections + ours)

    mamba2 = nn.Mamba2(DIM, d_state=DSTATE, d_conv=WIDTH, headdim=8, chunk_size=32)
    channels, heads = mamba2.d_ssm + 2 * DSTATE, mamba2.nheads
    projections = 2 * STEPS * DIM * (mamba2.d_ssm + channels + heads + mamba2.d_inner)
    within, values, states = 32 * DSTATE, heads * 32 * 8, heads * 8 * DSTATE
    scans = 2 * STEPS * (within + values + 2 * states) + 2 * STEPS * (3 * within + 2 * values + 5 * states)
    ours = 3 * 2 * STEPS * channels * WIDTH + scans
    assert sum(counted(lambda: mamba2(x), backward=True).values()) == 3 * projections + ours


def test_modules_of_a_model():
    """The counter's table has a row for each mixer."""
    model = make_model("Mamba2")
    with FlopCounterMode(display=False) as counter:
        model(make_tokens(2, 9))
    mixers = [name for name in counter.get_flop_counts() if name.endswith(".mixer")]
    assert len(mixers) == len(model.backbone.layers)
