"""causal_conv1d and causal_conv1d_update as PyTorch operators, beside what ``test_operators_*.py`` test."""

from __future__ import annotations

import itertools

import pytest
import torch
from conv_helpers import (
    CONV,
    OPTIONS,
    assert_all_close,
    make_inputs,
    make_step_inputs,
    step,
    with_state,
)
from helpers import arrange, on_meta, says, split
from operator_spec import with_gradients
from torch import Tensor

from ssm_kernels import causal_conv1d, causal_conv1d_update

OPERATOR = "causal_conv1d"
ops = torch.ops.ssm_kernels

every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))


@pytest.mark.parametrize("slots", [None, 5])
@pytest.mark.parametrize("seqlen", [None, 3])
def test_opcheck_of_the_step(seqlen, slots, device):
    inputs = make_step_inputs(seqlen=seqlen, slots=slots, device=device)
    torch.library.opcheck(ops.causal_conv1d_update.default, split(ops.causal_conv1d_update, inputs)[0])


@every_option
def test_opcheck_of_backward_into_a_given_tensor(options, device):
    inputs = make_inputs(**options, device=device)
    arguments = (*CONV.backward_arguments(inputs), torch.empty_like(inputs["x"]))
    torch.library.opcheck(ops._causal_conv1d_bwd_out.default, arguments)


@pytest.mark.parametrize("layout", CONV.layouts)
def test_meta_agrees_with_the_device(layout, device):
    """Shapes, dtypes and strides, of backward into a given tensor and of the step."""
    for dtype, size in itertools.product((torch.float64, torch.float32, torch.bfloat16), CONV.sizes):
        inputs = make_inputs(**size, dtype=dtype, layout=layout, device=device)
        arguments = (*CONV.backward_arguments(inputs), torch.empty_like(inputs["x"]))
        metas, reals = ops._causal_conv1d_bwd_out(*map(on_meta, arguments)), ops._causal_conv1d_bwd_out(*arguments)
        for meta, real in zip(metas, reals, strict=True):
            CONV.assert_same_layout(meta, real)
    args = split(ops.causal_conv1d_update, make_step_inputs(seqlen=3, device=device))[0]
    meta, real = ops.causal_conv1d_update(*map(on_meta, args)), ops.causal_conv1d_update(*args)
    assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.slow
def test_compile_with_inductor(device, fresh_dynamo):
    """Inductor fuses and lays out the operations around the operator: a slice of a projection, transposed or not."""

    def layer(*, x, **inputs):
        x = torch.cat([x * 2, torch.tanh(x)], dim=-1)[..., x.shape[-1] // 2 : x.shape[-1] // 2 + x.shape[-1]]
        out, final_state = with_state(**inputs, x=x)
        return torch.relu(out), final_state * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for seqlen, layout in ((70, "contiguous"), (9, "channels_first_memory")):
        inputs = make_inputs(seqlen=seqlen, channels=16, dtype=torch.float32, layout=layout, device=device)
        assert_all_close(CONV.training_step(compiled, inputs), CONV.training_step(layer, inputs), 1e-4)


def test_compiled_steps(device, fresh_dynamo):
    """A decoding loop, without gradients; the state is mutated in the graph."""
    inputs = make_step_inputs(seqlen=3, device=device)

    def decode(x, conv_state, weight, bias):
        outputs = [causal_conv1d_update(x[:, t], conv_state, weight, bias, activation="silu") for t in range(3)]
        return torch.stack(outputs, dim=1)

    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            states = [inputs["conv_state"].clone() for _ in range(2)]
            results = [
                function(inputs["x"], state, inputs["weight"], inputs["bias"])
                for function, state in zip((compiled, decode), states, strict=True)
            ]
            assert torch.equal(*results) and torch.equal(*states) and not torch.equal(states[0], inputs["conv_state"])


@pytest.mark.parametrize("names", [("x", "conv_state"), ("conv_state",), ("x", "conv_state", "weight", "bias")], ids="-".join)
def test_vmap_of_the_step(names, device, no_vmap_fallback):
    for options, axis in itertools.product(({}, {"seqlen": 3}, {"slots": 4}), (0, 1)):
        sets = [make_step_inputs(seed=seed, **options, device=device) for seed in range(3)]
        sets = [sets[0] | {name: s[name] for name in names} for s in sets]
        expected = [step(s) for s in sets]
        stacked = [torch.stack([s[name] for s in sets], dim=axis) for name in names]

        def one(*tensors, sets=sets):
            return causal_conv1d_update(**sets[0] | dict(zip(names, tensors, strict=True)))

        out = torch.vmap(one, in_dims=axis)(*stacked)
        torch.testing.assert_close(out, torch.stack([out for out, _ in expected]))
        state = stacked[names.index("conv_state")]
        torch.testing.assert_close(state, torch.stack([state for _, state in expected], dim=axis))


def test_vmap_of_the_step_needs_a_state_for_each_sample(device):
    inputs = make_step_inputs(device=device)
    with pytest.raises(RuntimeError, match=says("causal_conv1d_update: expected vmap over conv_state")):
        torch.vmap(lambda x: causal_conv1d_update(**inputs | {"x": x}))(torch.stack([inputs["x"]] * 2))


@pytest.mark.parametrize("name", ["x", "conv_state", "weight", "bias"])
def test_the_step_is_not_differentiable(name, device):
    inputs = make_step_inputs(device=device)
    leaf = inputs[name].clone().requires_grad_()
    # A leaf cannot be written to, so the state is a function of it.
    inputs[name] = leaf * 1
    out = causal_conv1d_update(**inputs)
    with pytest.raises(
        RuntimeError, match=says("causal_conv1d_update: decoding is not differentiable: train with causal_conv1d")
    ):
        out.sum().backward()
    if name == "conv_state":
        with pytest.raises(RuntimeError, match=says("causal_conv1d_update: decoding is not differentiable")):
            inputs[name].sum().backward()


def test_what_is_kept_for_backward(device):
    """Autograd saves the inputs only, which the caller holds anyway."""
    for options in OPTIONS.values():
        inputs = with_gradients(make_inputs(**options, device=device))
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            causal_conv1d(**inputs)
        storages = {x.untyped_storage().data_ptr() for x in inputs.values() if isinstance(x, Tensor)}
        assert {x.untyped_storage().data_ptr() for x in kept} == storages


def test_changed_inputs_are_noticed(device):
    leaves = with_gradients(make_inputs(device=device))
    x = leaves["x"] * 1
    out = causal_conv1d(**leaves | {"x": x})
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@every_option
def test_autocast_of_narrow_parameters(options, low, device):
    inputs = make_inputs(**options, channels=16, dtype=torch.float32, device=device)
    parameters = {name: inputs[name].to(low) for name in ("weight", "bias") if inputs[name] is not None}
    with torch.autocast(device, dtype=low):
        assert all(result.dtype == low for result in with_state(**with_gradients(inputs | parameters)))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_of_the_step(state_dtype, device):
    """The state stays what it is."""
    inputs = make_step_inputs(dtype=torch.float32, state_dtype=torch.float32, device=device)
    inputs["conv_state"] = inputs["conv_state"].to(state_dtype)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, state = step(inputs)
    expected, expected_state = step(inputs | {"x": inputs["x"].bfloat16()})
    assert out.dtype == torch.bfloat16 and state.dtype == state_dtype
    assert torch.equal(out, expected) and torch.equal(state, expected_state)


@pytest.mark.parametrize("layout", ["offset", "sliced"])
def test_positional_arguments(layout, device):
    inputs = make_inputs(activation=None, initial_state=False, device=device)
    inputs["weight"] = arrange(inputs["weight"], layout)
    assert torch.equal(causal_conv1d(inputs["x"], inputs["weight"], inputs["bias"]), causal_conv1d(**inputs))
    inputs = make_step_inputs(activation=None, device=device)
    state = inputs["conv_state"].clone()
    out = causal_conv1d_update(inputs["x"], state, inputs["weight"], inputs["bias"])
    expected = step(inputs)
    assert torch.equal(out, expected[0]) and torch.equal(state, expected[1])
