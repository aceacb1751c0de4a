"""selective_scan as a PyTorch operator, beside what ``test_operators_*.py`` test: memory, saved states, autocast's accuracy."""

from __future__ import annotations

import pytest
import torch
from helpers import allocated, assert_as_accurate, parameter_dtype
from operator_spec import as_float64
from selective_scan_helpers import (
    CASES,
    CHUNK,
    SELECTIVE_SCAN,
    chunk_length,
    evaluate,
    make_inputs,
    reference_scan,
)
from torch._dynamo.testing import CompileCounterWithBackend

from ssm_kernels import selective_scan

OPERATOR = "selective_scan"
ops = torch.ops.ssm_kernels


@pytest.mark.parametrize("case", CASES)
def test_opcheck_without_saved_states(case, device):
    inputs = make_inputs(**CASES[case], device=device) | {"save_chunk_states": False}
    torch.library.opcheck(ops._selective_scan_fwd.default, SELECTIVE_SCAN.forward_arguments(inputs))


def test_compile_once_for_every_number_of_states(device, fresh_dynamo):
    """The number of steps between two saved states depends on it."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(SELECTIVE_SCAN, fullgraph=True, dynamic=True, backend=counter)
    for dstate, seqlen in ((16, 70), (17, 70), (64, 33), (5, 130)):
        inputs = make_inputs(dstate=dstate, seqlen=seqlen, groups=2, device=device)
        actual, expected = (SELECTIVE_SCAN.training_step(function, inputs) for function in (compiled, SELECTIVE_SCAN))
        SELECTIVE_SCAN.assert_close(actual, expected, 1e-12)
    assert counter.frame_count == 1


def test_autocast_accuracy(device):
    inputs = make_inputs(dim=6, seqlen=150, dtype=torch.float32, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = selective_scan(**inputs)
    cast = inputs | {name: inputs[name].bfloat16() for name in ("u", "delta", "B", "C", "z")}
    native, exact = evaluate(SELECTIVE_SCAN.reference, cast)["out"], evaluate(SELECTIVE_SCAN.reference, as_float64(cast))["out"]
    assert_as_accurate(out, native, exact, "out")


def test_memory_grows_only_with_results_and_chunk_states(device):
    """From one length to twice the length, nothing of size batch * dim * seqlen * dstate appears, in either direction."""
    batch, dim, dstate, grown = 2, 64, 32, 16 * CHUNK

    def measure(seqlen):
        inputs = make_inputs(batch=batch, dim=dim, seqlen=seqlen, dstate=dstate, dtype=torch.float32, device=device)
        arguments = SELECTIVE_SCAN.backward_arguments(inputs)
        return (
            allocated(
                lambda: ops._selective_scan_fwd(*SELECTIVE_SCAN.forward_arguments(inputs | {"save_chunk_states": False})),
                device,
            ),
            allocated(lambda: ops._selective_scan_fwd(*SELECTIVE_SCAN.forward_arguments(inputs)), device),
            allocated(lambda: ops._selective_scan_bwd(*arguments), device),
        )

    measure(CHUNK)  # what is allocated once
    inference, fwd, bwd = (long - short for short, long in zip(measure(grown), measure(2 * grown), strict=True))
    sequence, matrix = 4 * batch * dim * grown, 4 * batch * dstate * grown
    chunk_states = sequence * dstate // chunk_length(dstate)
    # On CUDA also the carries between blocks, which grow with the number of segments.
    slack = 1024 if device == "cpu" else sequence * dstate // 8
    assert sequence <= inference <= sequence + slack  # out
    assert sequence + chunk_states <= fwd <= sequence + chunk_states + slack
    assert 3 * sequence + 2 * matrix <= bwd <= 3 * sequence + 2 * matrix + slack  # grad_u, grad_delta, grad_z; grad_B, grad_C


def test_memory_that_backward_needs_for_itself(device, two_threads):
    """With groups of B, sums of C's gradient over channels must not hold the sequence once per channel.

    On the CPU, whatever the groups: a chunk of each gradient for every state of every channel, and what is left of half-empty
    vectors. On CUDA once per block of 32 channels, which share their group: with a group for every channel, once for each.
    """
    batch, dim, dstate, seqlen = 4, 256, 16, 512
    groups = dim if device == "cpu" else dim // 32
    inputs = make_inputs(batch=batch, dim=dim, seqlen=seqlen, dstate=dstate, groups=groups, dtype=torch.float32, device=device)
    inputs["C"] = inputs["C"][:, :1].contiguous()
    arguments = SELECTIVE_SCAN.backward_arguments(inputs)
    gradients = []
    taken = allocated(lambda: gradients.extend(ops._selective_scan_bwd(*arguments)), device)
    own = taken - sum(gradient.nbytes for gradient in gradients)
    if device == "cpu":
        assert 0 <= own <= (2 * CHUNK + 64) * 4 * batch * dim * dstate
    else:
        # Partial sums of C's gradient, and the states between segments of time; those of B are its gradient.
        assert 0 <= own <= batch * dim // 32 * dstate * seqlen * 4 + 2**19


def test_chunk_states(device):
    """(batch, chunks + 1, dim, dstate): the state at each chunk boundary; none where backward does not ask for them."""
    seqlen = 2 * CHUNK + 1
    inputs = make_inputs(seqlen=seqlen, dim=5, device=device)
    out, last_state, chunk_states = ops._selective_scan_fwd(*SELECTIVE_SCAN.forward_arguments(inputs))
    assert chunk_states.shape == (2, 4, 5, 3) and chunk_states.dtype == parameter_dtype(out.dtype)
    for index, steps in enumerate((0, CHUNK, 2 * CHUNK, seqlen)):
        upto = {k: v[..., :steps] if k in ("u", "delta", "z", "B", "C") else v for k, v in inputs.items()}
        _, state = reference_scan(**upto, return_last_state=True)
        torch.testing.assert_close(chunk_states[:, index], state, rtol=1e-12, atol=1e-12)
    unsaved = ops._selective_scan_fwd(*SELECTIVE_SCAN.forward_arguments(inputs | {"save_chunk_states": False}))
    assert torch.equal(unsaved[0], out) and torch.equal(unsaved[1], last_state) and not unsaved[2].numel()
