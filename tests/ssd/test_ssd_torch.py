"""ssd_chunk_scan as a PyTorch operator, beside what ``test_operators_*.py`` test: options, compiled autograd, memory."""

from __future__ import annotations

import pytest
import torch
from helpers import peak_memory, says
from ssd_helpers import (
    SSD,
    assert_all_close,
    backward_arguments,
    make_inputs,
    scan,
)
from torch._dynamo.testing import CompileCounterWithBackend

OPERATOR = "ssd_chunk_scan"
ops = torch.ops.ssm_kernels


def test_gradients_that_are_not_needed_have_no_elements(device):
    inputs = make_inputs(device=device)
    everything = ops._ssd_chunk_scan_bwd(*backward_arguments(inputs))
    count = len(everything)
    for needed in range(count):
        gradients = ops._ssd_chunk_scan_bwd(*backward_arguments(inputs, [i == needed for i in range(count)]))
        for i, gradient in enumerate(gradients):
            assert torch.equal(gradient, everything[i]) if i == needed else not gradient.numel()


def test_compile_with_options(device, fresh_dynamo):
    """Once for every chunk_size: nothing after the first call, which of numbers such as dt_limit may take two attempts."""
    counter, counts = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(scan, fullgraph=True, dynamic=True, backend=counter)
    for chunk_size in (16, 32, 48):
        inputs = make_inputs(chunk_size=chunk_size, seqlen=70, dt_limit=(0.1, 0.5), discretization="foh", device=device)
        assert_all_close(SSD.training_step(compiled, inputs), SSD.training_step(scan, inputs), 1e-11)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


def test_compiled_autograd(device, fresh_dynamo):
    """The backward pass traced as a whole."""
    inputs = make_inputs(seqlen=20, device=device)
    expected = SSD.training_step(scan, inputs)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", dynamic=True)):
        assert_all_close(SSD.training_step(scan, inputs), expected, 1e-11)


def test_memory_does_not_hold_a_state_for_every_step(device):
    """Beside results and gradients: nothing that grows as the states or the products of all pairs of steps would."""
    sizes = {"batch": 1, "heads": 4, "headdim": 16, "dstate": 64, "groups": 1, "chunk_size": 64, "dtype": torch.float32}

    def measure(seqlen):
        inputs = make_inputs(**sizes, seqlen=seqlen, device=device)
        forward, backward = SSD.forward_arguments(inputs), SSD.backward_arguments(inputs)
        return (
            peak_memory(lambda: ops._ssd_chunk_scan_fwd(*forward), device),
            peak_memory(lambda: ops._ssd_chunk_scan_bwd(*backward), device),
        )

    measure(64)  # what is allocated once
    grown = 4096
    fwd, bwd = (long - short for short, long in zip(measure(grown), measure(2 * grown), strict=True))
    states = 4 * grown * 4 * 16 * 64  # (seqlen, heads, headdim, dstate)
    assert fwd < states / 32 and bwd < states / 5, (fwd / states, bwd / states)


def test_incoming_gradients_of_the_wrong_shape(device):
    """Errors of the internal operator, which autograd itself never causes."""
    arguments = backward_arguments(make_inputs(device=device))
    torch.ops.ssm_kernels._ssd_chunk_scan_bwd(*arguments)
    grad_out, grad_final_states, *others = arguments
    wrong_out, wrong_states = grad_out[:, 1:], grad_final_states[1:]
    for name, wrong, grads in (
        ("grad_out", wrong_out, (wrong_out, grad_final_states)),
        ("grad_final_states", wrong_states, (grad_out, wrong_states)),
    ):
        with pytest.raises(ValueError, match=says(f"expected {name} of shape ", f"got {[*wrong.shape]}")):
            torch.ops.ssm_kernels._ssd_chunk_scan_bwd(*grads, *others)
