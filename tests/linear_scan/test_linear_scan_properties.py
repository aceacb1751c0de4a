"""linear_scan and its family on argument sets drawn by Hypothesis, compared with the float64 reference."""

from __future__ import annotations

import itertools

import torch
from helpers import LAYOUTS, arrange, move_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_spec import as_float64, tensor_names
from recurrence_helpers import (
    FORMS,
    VARIANTS,
    assert_all_close,
    at_steps,
    evaluate,
    first_input,
    make_cotangents,
    make_inputs,
)

OPERATOR = "linear_scan"

no_deadline = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
LENGTHS = st.one_of(st.integers(0, 12), st.integers(30, 35), st.integers(62, 70), st.integers(120, 135))


@st.composite
def argument_sets(draw, dtypes=(torch.float64,), packed=(False, True)):
    """A recurrence with options, sizes, and for each tensor its own form and layout, possibly expanded along one axis."""
    variant = draw(st.sampled_from(list(VARIANTS.values())))
    dtype = draw(st.sampled_from(dtypes))
    options = {"channels": draw(st.integers(0, 40)), "h0": draw(st.booleans()), "reverse": draw(st.booleans())}
    if draw(st.sampled_from(packed)):
        options["cu_seqlens"] = [0, *itertools.accumulate(draw(st.lists(st.integers(0, 40), max_size=5)))]
    else:
        options |= {"batch": draw(st.integers(0, 3)), "seqlen": draw(LENGTHS)}
    options |= {"dtype": dtype, "seed": draw(st.integers(0, 2**16))}
    inputs = make_inputs(variant, **options)
    for name in variant.recurrence.broadcast:
        form = draw(st.sampled_from(list(FORMS)))
        narrow = draw(st.booleans())
        inputs[name] = make_inputs(variant, form=form, broadcast_dtype=dtype if narrow else None, **options)[name]
    for name in tensor_names(inputs):
        tensor = arrange(inputs[name], draw(st.sampled_from(LAYOUTS)))
        axis = draw(st.sampled_from([None, None, *range(tensor.dim())]))
        if axis is not None and tensor.shape[axis] > 0:
            tensor = tensor.narrow(axis, 0, 1).expand(tensor.shape)
        inputs[name] = tensor
    return variant, inputs


@settings(no_deadline, max_examples=200)
@given(arguments=argument_sets())
def test_values_and_gradients(arguments, device):
    variant, inputs = arguments
    variant.assert_matches_reference(move_all(inputs, device))


@settings(no_deadline, max_examples=100)
@given(arguments=argument_sets(dtypes=(torch.float32, torch.bfloat16, torch.float16)))
def test_low_precision(arguments, device):
    """Relative to the largest value of each result, which cancellation may leave far below the terms of its sums.

    Backward also reads states that were rounded to the dtype of h. A gradient's terms are products of these with adjoints,
    for which the largest gradient stands: the difference of a constant candidate from the state cancels to nothing.
    """
    variant, inputs = arguments
    inputs = move_all(inputs, device)
    cotangents = make_cotangents(inputs)
    actual = evaluate(variant, inputs, cotangents)
    exact = evaluate(variant.reference, as_float64(inputs), tuple(x.double() for x in cotangents))
    of_states = torch.finfo(first_input(inputs).dtype).eps
    largest = {name: value.abs().max().item() if value.numel() else 0.0 for name, value in exact.items()}
    term = largest["h"] * max((value for name, value in largest.items() if name.startswith("grad_")), default=0.0)
    for name, value in actual.items():
        assert value.isfinite().all(), name
        if name.removeprefix("grad_") in variant.recurrence.broadcast:
            continue  # sums over all elements, which may cancel to nothing
        scale = max(1.0, largest[name], term if name.startswith("grad_") else 0.0)
        atol = (64 * torch.finfo(torch.float32).eps + (2 * of_states if name.startswith("grad_") else 0)) * scale
        rtol = 2 * torch.finfo(value.dtype).eps
        torch.testing.assert_close(value.double(), exact[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@settings(no_deadline, max_examples=40)
@given(arguments=argument_sets(packed=(False,)), cut=st.floats(0, 1))
def test_cut_anywhere(arguments, cut, device):
    """The sequence cut at any step, the state carried over, equals the whole."""
    variant, inputs = arguments
    inputs = move_all(inputs, device)
    whole = evaluate(variant, inputs)
    seqlen = whole["h"].shape[1]
    step = round(cut * seqlen)
    for name in variant.recurrence.broadcast:
        inputs[name] = inputs[name].expand(whole["h"].shape)
    state, parts = inputs["h0"], []
    slices = [slice(0, step), slice(step, None)]
    for steps in reversed(slices) if inputs["reverse"] else slices:
        if seqlen > 1:
            part = at_steps(variant, inputs, steps)
        else:
            part = inputs | {name: inputs[name][:, steps] for name in variant.recurrence.inputs}
        h, state = variant.scan(**(part | {"h0": state}), return_last_state=True)
        parts.append(h)
    h = torch.cat(parts[::-1] if inputs["reverse"] else parts, dim=1)
    assert_all_close({"h": h, "last_state": state}, whole)


@settings(no_deadline, max_examples=60)
@given(arguments=argument_sets(packed=(True,)))
def test_packed_sequences_do_not_touch(arguments, device):
    """Each is what it is alone."""
    variant, inputs = arguments
    inputs = move_all(inputs, device)
    packed = evaluate(variant, inputs)
    for name in variant.recurrence.broadcast:
        inputs[name] = inputs[name].expand(packed["h"].shape)
    for i, (begin, end) in enumerate(itertools.pairwise(inputs["cu_seqlens"].tolist())):
        alone = inputs | {name: inputs[name][:, begin:end] for name in variant.recurrence.inputs} | {"cu_seqlens": None}
        alone["h0"] = None if inputs["h0"] is None else inputs["h0"][i : i + 1]
        expected = {"h": packed["h"][:, begin:end], "last_state": packed["last_state"][i : i + 1]}
        assert_all_close(evaluate(variant, alone), expected)
