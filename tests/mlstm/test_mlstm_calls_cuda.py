"""Calls of mlstm_scan on CUDA: no wait of the host, and reverse scans and states at positions in graphs."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_equal, captured, no_synchronization
from mlstm_helpers import MLSTM, make_inputs
from operator_spec import with_gradients

import ssm_kernels

pytestmark = pytest.mark.cuda

SIZES = {"heads": 2, "key_dim": 64, "value_dim": 64, "device": "cuda"}
PACKED = (0, 100, 100, 163, 400)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_backward_and_unpacked_calls_do_not_wait(dtype, reverse):
    """Forward of a packed call reads cu_seqlens on the host, to check it; nothing else waits for the device."""
    inputs = with_gradients(make_inputs(cu_seqlens=PACKED, reverse=reverse, dtype=dtype, **SIZES))
    leaves = [value for value in inputs.values() if isinstance(value, torch.Tensor) and value.requires_grad]
    cotangents = MLSTM.make_cotangents(inputs)
    results = MLSTM(**inputs)
    with no_synchronization():
        torch.autograd.grad(results, leaves, cotangents)
        unpacked = make_inputs(seqlen=130, reverse=reverse, dtype=dtype, **SIZES | {"device": "cpu"})
    unpacked = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in unpacked.items()}
    with no_synchronization():
        MLSTM(**unpacked)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_graphs_with_changing_lengths(dtype):
    """A graph captured with some lengths replays a reverse scan, and states at positions, of others."""
    inputs = make_inputs(cu_seqlens=PACKED, dtype=dtype, **SIZES)
    states = tuple(inputs.pop(f"initial_{name}") for name in "Cnm")

    def call() -> dict[str, torch.Tensor]:
        at = {"states_at": (64, 300)} | inputs
        out, final, chosen = ssm_kernels.mlstm_scan(**at, initial_states=states, return_final_states=True)
        backwards = ssm_kernels.mlstm_scan(**inputs | {"reverse": True}, initial_states=states)
        names = ("out", "C", "n", "m", "C_at", "n_at", "m_at", "backwards")
        return dict(zip(names, (out, *final, *chosen, backwards), strict=True))

    graph, found = captured(call)
    for bounds in ((0, 1, 2, 399, 400), (0, 0, 400, 400, 400), PACKED):
        inputs["cu_seqlens"].copy_(torch.tensor(bounds))
        graph.replay()
        assert_equal({name: value.clone() for name, value in found.items()}, call())
