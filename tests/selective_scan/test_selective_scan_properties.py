"""selective_scan on argument sets that nobody thought of: drawn by Hypothesis, compared with the float64 reference."""

from __future__ import annotations

import torch
from helpers import LAYOUTS, METHODS, arrange, move_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_spec import as_float64
from selective_scan_helpers import (
    SELECTIVE_SCAN,
    TENSORS,
    assert_matches_reference,
    evaluate,
    make_cotangents,
    make_inputs,
)

from ssm_kernels import selective_scan

OPERATOR = "selective_scan"

no_deadline = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def argument_sets(draw, dtypes=(torch.float64,)):
    """Sizes, options, the method, and for each tensor its own layout, possibly expanded along one axis."""
    dim = draw(st.integers(0, 20))
    divisors = [g for g in range(1, 21) if dim % g == 0]
    inputs = make_inputs(
        batch=draw(st.integers(0, 3)),
        dim=dim,
        seqlen=draw(st.one_of(st.integers(0, 12), st.integers(60, 70), st.integers(120, 135))),
        dstate=draw(st.integers(1, 20)),
        groups=draw(st.sampled_from([None, *divisors])),
        B=draw(st.sampled_from(["variable", "constant"])),
        C=draw(st.sampled_from(["variable", "constant"])),
        D=draw(st.booleans()),
        z=draw(st.booleans()),
        delta_bias=draw(st.booleans()),
        delta_softplus=draw(st.booleans()),
        initial_state=draw(st.booleans()),
        reverse=draw(st.booleans()),
        discretization=draw(st.sampled_from([*METHODS, "foh"])),
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 2**16)),
    )
    for name in TENSORS:
        tensor = inputs[name]
        if tensor is None:
            continue
        tensor = arrange(tensor, draw(st.sampled_from(LAYOUTS)))
        axis = draw(st.sampled_from([None, None, *range(tensor.dim())]))
        if axis is not None and tensor.shape[axis] > 0:
            tensor = tensor.narrow(axis, 0, 1).expand(tensor.shape)
        inputs[name] = tensor
    return inputs


@settings(no_deadline, max_examples=60)
@given(inputs=argument_sets())
def test_values_and_gradients(inputs, device):
    inputs = move_all(inputs, device)
    assert_matches_reference(inputs)


@settings(no_deadline, max_examples=40)
@given(inputs=argument_sets(dtypes=(torch.float32, torch.bfloat16, torch.float16)))
def test_low_precision(inputs, device):
    """The floor is relative to the largest value of a result, which cancellation may leave far below the terms of its sums."""
    inputs = move_all(inputs, device)
    cotangents = make_cotangents(inputs)
    actual = evaluate(SELECTIVE_SCAN, inputs, cotangents)
    native = evaluate(SELECTIVE_SCAN.reference, inputs, cotangents)
    exact = evaluate(SELECTIVE_SCAN.reference, as_float64(inputs), tuple(x.double() for x in cotangents))
    for name, value in actual.items():
        assert value.isfinite().all(), name
        if not value.numel():
            continue
        rounding = torch.finfo(value.dtype).eps
        scale = max(1.0, exact[name].abs().max().item())
        yardstick = (native[name].double() - exact[name]).abs().max().item()
        floor = 64 * torch.finfo(torch.float32).eps * scale
        torch.testing.assert_close(value.double(), exact[name], rtol=2 * rounding, atol=2 * yardstick + floor)


@settings(no_deadline, max_examples=40)
@given(inputs=argument_sets(), cut=st.floats(0, 1))
def test_cut_anywhere(inputs, cut, device):
    """The sequence cut at any step, the state carried over, equals the whole."""
    inputs = move_all(inputs, device)
    out, last_state = selective_scan(**inputs, return_last_state=True)
    step = round(cut * out.shape[-1])
    state, parts = inputs["initial_state"], []
    slices = [slice(0, step), slice(step, None)]
    for steps in reversed(slices) if inputs["reverse"] else slices:
        part = {
            name: inputs[name][..., steps]
            if name in ("u", "delta", "z") or (name in "BC" and inputs[name].dim() > 2)
            else inputs[name]
            for name in TENSORS
            if inputs[name] is not None
        }
        y, state = selective_scan(**(inputs | part | {"initial_state": state}), return_last_state=True)
        parts.append(y)
    whole = torch.cat(parts[::-1] if inputs["reverse"] else parts, dim=-1)
    torch.testing.assert_close(whole, out, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state, last_state, rtol=1e-11, atol=1e-11)


@settings(no_deadline, max_examples=50)
@given(inputs=argument_sets(), scale=st.floats(-4, 4))
def test_linear_in_the_input_and_the_state(inputs, scale, device):
    """Doubling u and the initial state doubles the result: the scan is linear in them, whatever the method."""
    inputs = move_all(inputs, device)
    out, last_state = selective_scan(**inputs, return_last_state=True)
    state = inputs["initial_state"]
    scaled = inputs | {"u": scale * inputs["u"], "initial_state": None if state is None else scale * state}
    scaled_out, scaled_state = selective_scan(**scaled, return_last_state=True)
    torch.testing.assert_close(scaled_out, scale * out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(scaled_state, scale * last_state, rtol=1e-10, atol=1e-10)
