"""linear_scan and its family as PyTorch operators, beside what ``test_operators_*.py`` test: steps, options, memory."""

from __future__ import annotations

import pytest
import torch
from helpers import allocated, split
from operator_spec import TRACED, UNTRACED, with_gradients
from recurrence_helpers import (
    LINEAR,
    LIQUID,
    MINGRU,
    PACKED,
    RGLRU,
    VARIANTS,
    assert_all_close,
    every_recurrence,
    make_inputs,
    step_inputs,
)

OPERATOR = "linear_scan"
ops = torch.ops.ssm_kernels

some_recurrences = pytest.mark.parametrize("variant", [LINEAR, MINGRU, LIQUID, RGLRU], ids=lambda variant: variant.name)


@every_recurrence
def test_opcheck_of_steps(variant, device):
    """Traces the step from a state."""
    operator = getattr(ops, variant.step.__name__)
    for h0 in (True, False):
        inputs = with_gradients(make_inputs(variant, seqlen=1, h0=h0, device=device))
        arguments = step_inputs(variant, inputs) | variant.fixed | {"state": inputs["h0"]}
        torch.library.opcheck(operator.default, *split(operator, arguments), test_utils=TRACED if h0 else UNTRACED)


@pytest.mark.parametrize("variant", [VARIANTS["mingru_scan-g-False"], VARIANTS["minlstm_scan-tanh"]], ids=lambda v: v.name)
def test_compile_with_options(variant, device, fresh_dynamo):
    compiled = torch.compile(variant, fullgraph=True, backend="aot_eager")
    inputs = make_inputs(variant, device=device)
    assert_all_close(variant.training_step(compiled, inputs), variant.training_step(variant, inputs), 1e-12)


def test_compile_with_a_number_for_the_step_size(device, fresh_dynamo):
    compiled = torch.compile(LIQUID, fullgraph=True, backend="aot_eager")
    for dt in (0.1, 0.3):
        inputs = make_inputs(LIQUID, device=device) | {"dt": dt}
        assert_all_close(LIQUID.training_step(compiled, inputs), LIQUID.training_step(LIQUID, inputs), 1e-12)


@some_recurrences
def test_compiled_steps(variant, device, fresh_dynamo):
    """A decoding loop, without gradients."""
    inputs = make_inputs(variant, seqlen=3, device=device)

    def decode(state, *steps):
        outputs = []
        for of_step in steps:
            h, state = variant.step(**of_step, state=state)
            outputs.append(h)
        return torch.stack(outputs, dim=1), state

    steps = [step_inputs(variant, inputs, t) for t in range(3)]
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for actual, expected in zip(compiled(inputs["h0"], *steps), decode(inputs["h0"], *steps), strict=True):
                assert torch.equal(actual, expected)


def test_backward_through_one_result_under_compile(device, fresh_dynamo):
    """The last state's gradient is undefined."""
    inputs = make_inputs(LINEAR, seqlen=9, device=device)

    def first(a, b, h0):
        return LINEAR.scan(a, b, h0).square().sum()

    compiled = torch.compile(first, fullgraph=True, backend="aot_eager")
    arguments = [inputs[name].requires_grad_() for name in ("a", "b", "h0")]
    for actual, expected in zip(
        torch.autograd.grad(compiled(*arguments), arguments), torch.autograd.grad(first(*arguments), arguments), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_autocast_of_packed_sequences_and_steps(device):
    inputs = make_inputs(MINGRU, cu_seqlens=PACKED, dtype=torch.float32, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        h, last_state = MINGRU.scan(**inputs, return_last_state=True)
        step_h, state = MINGRU.step(inputs["gate"][0], inputs["candidate"][0])
    assert h.dtype == step_h.dtype == torch.bfloat16 and last_state.dtype == state.dtype == torch.float32


def test_memory_grows_only_with_results_and_gradients(device):
    """From one length to twice the length, nothing of the size of a sequence appears beside them."""
    batch, channels, grown = 2, 64, 2048

    def measure(seqlen):
        inputs = make_inputs(RGLRU, batch=batch, channels=channels, seqlen=seqlen, dtype=torch.float32, device=device)
        forward, backward = RGLRU.forward_arguments(inputs), RGLRU.backward_arguments(inputs)
        return (
            allocated(lambda: ops._linear_recurrence_fwd(*forward), device),
            allocated(lambda: ops._linear_recurrence_bwd(*backward), device),
        )

    measure(64)  # what is allocated once
    fwd, bwd = (long - short for short, long in zip(measure(grown), measure(2 * grown), strict=True))
    sequence = 4 * batch * channels * grown
    # On CUDA also the carries between blocks, which grow with the number of segments.
    slack = 1024 if device == "cpu" else sequence // 4
    assert sequence <= fwd <= sequence + slack
    assert 4 * sequence <= bwd <= 4 * sequence + slack


def test_what_is_kept_for_backward(device):
    """Autograd saves the inputs, h and h0 only, which the caller holds anyway."""
    inputs = with_gradients(make_inputs(MINGRU, seqlen=70, device=device))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        h = MINGRU.scan(**inputs)
    storages = {x.untyped_storage().data_ptr() for x in (inputs["gate"], inputs["candidate"], inputs["h0"], h)}
    assert {x.untyped_storage().data_ptr() for x in kept} == storages


def test_vmap_over_steps(device, no_vmap_fallback):
    inputs = make_inputs(LIQUID, device=device)
    candidate, state = inputs["candidate"], torch.stack([inputs["h0"]] * 5, dim=1)
    h, new_state = torch.vmap(lambda f, state: LIQUID.step(f, inputs["tau"], 0.3, state), in_dims=1)(candidate, state)
    for t in range(5):
        expected = LIQUID.step(candidate[:, t], inputs["tau"], 0.3, inputs["h0"])
        torch.testing.assert_close((h[t], new_state[t]), expected, rtol=1e-12, atol=1e-12)
