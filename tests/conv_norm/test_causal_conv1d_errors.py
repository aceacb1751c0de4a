"""causal_conv1d's internal operators refuse bad gradients, and its step states that share memory.

test_operators_errors.py has the other messages.
"""

from __future__ import annotations

import pytest
import torch
from conv_helpers import backward_arguments, make_inputs, make_step_inputs
from helpers import says

from ssm_kernels import causal_conv1d_update

OPERATOR = "causal_conv1d"
ops = torch.ops.ssm_kernels


def test_gradients_of_a_wrong_shape_or_dtype(device):
    inputs = make_inputs(device=device)
    arguments = [*backward_arguments(inputs)]
    for index, name in enumerate(("grad_out", "grad_final_state")):
        for bad, error in ((arguments[index][:1], ValueError), (arguments[index].float(), RuntimeError)):
            with pytest.raises(error, match=says(f"causal_conv1d backward: expected {name} of ")):
                ops._causal_conv1d_bwd(*arguments[:index], bad, *arguments[index + 1 :])
    for bad, error in ((inputs["x"][:1].clone(), ValueError), (inputs["x"].float(), RuntimeError)):
        with pytest.raises(error, match=says("causal_conv1d backward: expected grad_x of ")):
            ops._causal_conv1d_bwd_out(*arguments, bad)
        with pytest.raises(error, match=says("causal_conv1d backward: expected grad_out_2 of ")):
            ops._causal_conv1d_bwd_out(*arguments, inputs["x"].clone(), bad)
    with pytest.raises(ValueError, match=says("causal_conv1d backward: expected grad_out with grad_out_2, got None")):
        ops._causal_conv1d_bwd_out(None, *arguments[1:], inputs["x"].clone(), arguments[0])


def test_state_whose_elements_share_memory(device):
    inputs = make_step_inputs(device=device)
    shape = inputs["conv_state"].shape
    windows = torch.zeros(40, dtype=torch.float64, device=device).as_strided(shape, (4, 2, 1))
    for state in (inputs["conv_state"][:1].expand(shape), windows):
        before = state.clone()
        with pytest.raises(
            RuntimeError,
            match=says("causal_conv1d_update: expected conv_state, which is updated in place", "conv_state.clone()"),
        ):
            causal_conv1d_update(**inputs | {"conv_state": state})
        assert torch.equal(state, before)


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_state_that_shares_memory_with_another_argument(name, device):
    inputs = make_step_inputs(channels=4, batch=4, device=device)
    state = inputs["conv_state"]
    memory = torch.zeros(state.numel() + 100, dtype=torch.float64, device=device)
    inputs["conv_state"] = memory[: state.numel()].view(state.shape).copy_(state)
    before = memory.clone()
    shared = memory[state.numel() - 1 :][: inputs[name].numel()].view(inputs[name].shape)
    message = f"causal_conv1d_update: expected {name} to share no memory with conv_state, which is updated in place"
    with pytest.raises(RuntimeError, match=says(message, f"{name}.clone()")):
        causal_conv1d_update(**inputs | {name: shared})
    assert torch.equal(memory, before)
    beside = memory[state.numel() :][: inputs[name].numel()].view(inputs[name].shape)
    causal_conv1d_update(**inputs | {name: beside})


def test_lazy_copies_of_the_state_share_no_memory(device):
    inputs = make_step_inputs(device=device)
    memory = inputs["conv_state"].clone()
    state, x = torch._lazy_clone(memory), torch._lazy_clone(memory)[..., 0]
    causal_conv1d_update(**inputs | {"conv_state": state, "x": x})
    assert torch.equal(memory, inputs["conv_state"]) and not torch.equal(state, memory)
