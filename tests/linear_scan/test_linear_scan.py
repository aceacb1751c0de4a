"""linear_scan and its family: values, against the float64 reference."""

from __future__ import annotations

import inspect
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from decoding_helpers import DECODING_STEPS
from helpers import LAYOUTS, arrange, dtypes, parameter_dtype
from operator_spec import tensor_names
from operators import SCANS
from recurrence_helpers import (
    COMMON,
    FORMS,
    LINEAR,
    LIQUID,
    MINGRU,
    MINLSTM,
    PACKED,
    PLAIN,
    RECURRENCES,
    VARIANTS,
    assert_all_close,
    at_steps,
    evaluate,
    every_broadcasting,
    every_recurrence,
    every_variant,
    first_input,
    make_inputs,
    sequence_names,
    state_of,
    step_inputs,
)

import ssm_kernels
from ssm_kernels import reference

OPERATOR = "linear_scan"


def test_every_recurrence_has_its_row_its_functions_and_its_reference():
    of_others = {*SCANS, *DECODING_STEPS, "mlstm_step"} - {*PLAIN}
    scans, steps = ({name for name in ssm_kernels.__all__ if name.endswith(end)} - of_others for end in ("_scan", "_step"))
    assert scans == set(RECURRENCES) == set(reference.RECURRENCES)
    assert steps == {name.replace("_scan", "_step") for name in RECURRENCES}


@every_recurrence
def test_signatures(variant):
    """The reference's and the step's arguments are the scan's, in its order; a step takes ``reset`` by name."""
    scan, of_reference, step = (
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (variant.scan, getattr(reference, variant.name), variant.step)
    )
    assert scan == of_reference
    inputs, options = len(variant.recurrence.inputs), len(variant.recurrence.options)
    assert [name for name, *_ in scan[:inputs]] == list(variant.recurrence.inputs)
    state, reset = ("state", *scan[inputs][1:]), ("reset", inspect.Parameter.KEYWORD_ONLY, None)
    assert step == [*scan[:inputs], state, *scan[inputs + 1 : inputs + 1 + options], reset]


@dtypes()
@every_variant
def test_values(variant, dtype, device):
    for common in COMMON.values():
        inputs = make_inputs(variant, channels=37, dtype=dtype, device=device, **({"seqlen": 70} | common))
        results = variant.assert_matches_reference(inputs, gradients=False)
        assert results["h"].dtype == dtype and results["last_state"].dtype == parameter_dtype(dtype)
        assert results["h"].shape == first_input(inputs).shape and results["last_state"].shape == state_of(inputs).shape
        assert torch.equal(variant.scan(**inputs), results["h"])


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("seqlen", [0, 1, 31, 32, 33, 1000])
@every_recurrence
def test_lengths(variant, seqlen, reverse, device):
    for dtype, layout in ((torch.float64, "contiguous"), (torch.float32, "transposed"), (torch.bfloat16, "contiguous")):
        inputs = make_inputs(
            variant, batch=1, channels=5, seqlen=seqlen, reverse=reverse, dtype=dtype, layout=layout, device=device
        )
        variant.assert_matches_reference(inputs, gradients=False)


@pytest.mark.parametrize(("variant", "reverse"), [(LINEAR, False), (MINGRU, True)], ids=["linear", "mingru_reverse"])
def test_long_sequences(variant, reverse, device):
    inputs = make_inputs(variant, batch=1, channels=3, seqlen=65537, reverse=reverse, dtype=torch.float32, device=device)
    variant.assert_matches_reference(inputs, gradients=False)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("channels", [1, 3, 31, 32, 33, 100, 257, 300, 1030])
def test_numbers_of_channels(channels, batch, layout, device):
    for variant, dtype in itertools.product((LINEAR, MINLSTM), (torch.float64, torch.float32, torch.float16)):
        inputs = make_inputs(
            variant, batch=batch, channels=channels, seqlen=9, dtype=dtype, layout=layout, device=device, seed=channels
        )
        variant.assert_matches_reference(inputs, gradients=False)


@dtypes(torch.float64, torch.bfloat16)
@pytest.mark.parametrize("layout", LAYOUTS)
@every_recurrence
def test_layout_of_each_argument(variant, layout, dtype, device):
    for name, common in itertools.product((*variant.recurrence.inputs, "h0"), ({}, {"reverse": True, "cu_seqlens": PACKED})):
        inputs = make_inputs(variant, channels=6, dtype=dtype, device=device, **common)
        inputs[name] = arrange(inputs[name], layout)
        variant.assert_matches_reference(inputs, gradients=False)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "time", "channels"])
@every_recurrence
def test_expanded_arguments(variant, axis, device):
    for layout, reverse in itertools.product(("contiguous", "transposed"), (False, True)):
        inputs = make_inputs(variant, channels=6, layout=layout, form="full", reverse=reverse, device=device)
        for name in variant.recurrence.inputs:
            expanded = inputs[name].narrow(axis, 0, 1).expand(inputs[name].shape)
            assert 0 in expanded.stride()
            variant.assert_matches_reference(inputs | {name: expanded}, gradients=False)
        variant.assert_matches_reference(inputs | {"h0": inputs["h0"][:1].expand(2, -1)}, gradients=False)


def test_halves_of_one_projection(device):
    for dtype in (torch.float64, torch.bfloat16):
        gate, candidate = make_inputs(MINGRU, channels=12, seqlen=70, dtype=dtype, device=device)["gate"].chunk(2, dim=-1)
        inputs = make_inputs(MINGRU, channels=6, seqlen=70, dtype=dtype, device=device)
        assert not candidate.is_contiguous() and candidate.storage_offset() > 0
        MINGRU.assert_matches_reference(inputs | {"gate": gate, "candidate": candidate}, gradients=False)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@every_recurrence
def test_inputs_are_not_copied(variant, layout, device):
    """Values are right in every layout, and the output has the layout of the first input."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_inputs(variant, channels=6, seqlen=70, dtype=dtype, layout=layout, device=device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            h = variant.scan(**inputs)
        names = {event.name for event in profile.events()}
        assert "ssm_kernels::_linear_recurrence_fwd" in names
        assert not names & {"aten::copy_", "aten::clone", "aten::contiguous", "aten::to", "aten::_to_copy", "aten::reshape"}
        assert h.stride() == first_input(inputs).stride()


# ----- inputs that broadcast


@pytest.mark.parametrize("form", FORMS)
@every_broadcasting
def test_forms(variant, form, device):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for broadcast_dtype in {dtype, parameter_dtype(dtype)}:
            inputs = make_inputs(
                variant, seqlen=33, channels=9, form=form, dtype=dtype, broadcast_dtype=broadcast_dtype, device=device
            )
            variant.assert_matches_reference(inputs, gradients=False)


def test_each_input_has_its_own_form_and_dtype(device):
    for tau, dt in itertools.product(FORMS, repeat=2):
        inputs = make_inputs(LIQUID, form=tau, dtype=torch.bfloat16, device=device)
        inputs["dt"] = make_inputs(LIQUID, form=dt, dtype=torch.bfloat16, broadcast_dtype=torch.bfloat16, device=device)["dt"]
        LIQUID.assert_matches_reference(inputs, gradients=False)


@dtypes()
def test_step_size_as_a_number(dtype, device):
    inputs = make_inputs(LIQUID, dtype=dtype, device=device)
    number = torch.tensor(0.3, dtype=parameter_dtype(dtype), device=device)
    of_channels = number.repeat(inputs["candidate"].shape[-1])
    assert torch.equal(LIQUID.scan(**inputs | {"dt": 0.3}), LIQUID.scan(**inputs | {"dt": of_channels}))
    (h, state), (expected_h, expected_state) = (
        LIQUID.step(inputs["candidate"][:, 0], inputs["tau"], dt, inputs["h0"]) for dt in (0.3, number)
    )
    assert torch.equal(h, expected_h) and torch.equal(state, expected_state)


# ----- what a scan is equal to


@dtypes(torch.float64, torch.float32, torch.bfloat16)
@every_variant
def test_step_by_step(variant, dtype, device):
    inputs = make_inputs(variant, channels=9, seqlen=12, dtype=dtype, device=device)
    h, last_state = variant.scan(**inputs, return_last_state=True)
    state, steps = inputs["h0"], []
    for t in range(12):
        h_t, state = variant.step(**step_inputs(variant, inputs, t), state=state, **variant.fixed)
        assert h_t.dtype == dtype and state.dtype == parameter_dtype(dtype) and h_t.shape == state.shape == (2, 9)
        steps.append(h_t)
    # Between steps the state is of the accumulation dtype, and what is left is the order of its roundings.
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(torch.stack(steps, dim=1), h, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state, last_state, rtol=min(tolerance, 2e-6), atol=min(tolerance, 2e-6))


@every_recurrence
def test_step_without_a_state_or_a_batch(variant, device):
    for batch in (0, 2):
        inputs = make_inputs(variant, batch=batch, seqlen=1, h0=False, device=device)
        h, state = variant.step(**step_inputs(variant, inputs))
        expected_h, expected_state = variant.scan(**inputs, return_last_state=True)
        assert torch.equal(h, expected_h[:, 0]) and torch.equal(state, expected_state)


@pytest.mark.parametrize("form", FORMS)
@every_broadcasting
def test_step_with_inputs_that_broadcast(variant, form, device):
    inputs = make_inputs(variant, seqlen=1, form=form, device=device)
    of_step = {name: x.squeeze(-2) if x.dim() >= 2 else x for name, x in inputs.items() if name in variant.recurrence.inputs}
    h, state = variant.step(**of_step, state=inputs["h0"])
    expected_h, expected_state = variant.scan(**inputs, return_last_state=True)
    assert torch.equal(h, expected_h[:, 0]) and torch.equal(state, expected_state)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@every_variant
def test_cut_at_any_step(variant, reverse, device):
    """The state carried from one part to the next, the parts equal the whole."""
    inputs = make_inputs(variant, channels=7, seqlen=10, reverse=reverse, device=device)
    whole = evaluate(variant, inputs)
    for cut in range(11):
        parts = [slice(0, cut), slice(cut, 10)]
        state, outputs = inputs["h0"], []
        for steps in reversed(parts) if reverse else parts:
            part = at_steps(variant, inputs, steps) | {"h0": state}
            h, state = variant.scan(**part, return_last_state=True)
            outputs.append(h)
        h = torch.cat(outputs[::-1] if reverse else outputs, dim=1)
        assert_all_close({"h": h, "last_state": state}, whole, 1e-12)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@every_variant
def test_packed_sequences_are_the_sequences_one_by_one(variant, reverse, device):
    for dtype, h0 in itertools.product((torch.float64, torch.float32), (True, False)):
        inputs = make_inputs(variant, channels=9, cu_seqlens=PACKED, h0=h0, reverse=reverse, dtype=dtype, device=device)
        h, last_state = variant.scan(**inputs, return_last_state=True)
        for i, (begin, end) in enumerate(itertools.pairwise(PACKED)):
            alone = at_steps(variant, inputs, slice(begin, end)) | {"cu_seqlens": None}
            alone["h0"] = None if inputs["h0"] is None else inputs["h0"][i : i + 1]
            expected_h, expected_state = variant.scan(**alone, return_last_state=True)
            tolerance = 1e-12 if dtype == torch.float64 else 1e-6
            torch.testing.assert_close(h[:, begin:end], expected_h, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(last_state[i : i + 1], expected_state, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "cu_seqlens", [(0, 1), (0, 1, 2, 3), (0, 40, 41, 300), (0, 0, 0, 33), (0, *range(7, 500, 31), 500)], ids=str
)
def test_packings(cu_seqlens, device):
    for variant, reverse in itertools.product((LINEAR, MINLSTM), (False, True)):
        for dtype, layout in ((torch.float64, "contiguous"), (torch.float32, "transposed")):
            options = {"dtype": dtype, "layout": layout, "reverse": reverse, "device": device}
            variant.assert_matches_reference(make_inputs(variant, cu_seqlens=cu_seqlens, **options), gradients=False)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@every_recurrence
def test_offsets_of_packed_sequences_in_any_form(variant, reverse, device):
    inputs = make_inputs(variant, cu_seqlens=PACKED, reverse=reverse, device=device)
    expected = evaluate(variant, inputs)
    for dtype, layout in itertools.product((torch.int32, torch.int64), ("contiguous", "offset", "sliced")):
        buffer = torch.full((2 * len(PACKED) + 3,), 10**6, dtype=dtype, device=device)
        begin, step = {"contiguous": (0, 1), "offset": (2, 1), "sliced": (1, 2)}[layout]
        view = buffer[begin : begin + step * len(PACKED) : step]
        actual = evaluate(variant, inputs | {"cu_seqlens": view.copy_(inputs["cu_seqlens"])})
        assert_all_close(actual, expected, 0)


@pytest.mark.parametrize("common", [{}, {"cu_seqlens": PACKED}], ids=["batch", "packed"])
@every_variant
def test_reverse_is_the_scan_of_flipped_inputs(variant, common, device):
    inputs = make_inputs(variant, seqlen=40, channels=9, device=device, reverse=True, **common)
    flipped = inputs | {"reverse": False} | {name: inputs[name].flip(1) for name in sequence_names(variant, inputs)}
    if common:
        offsets = torch.tensor([PACKED[-1] - offset for offset in reversed(PACKED)], device=device)
        flipped |= {"cu_seqlens": offsets, "h0": inputs["h0"].flip(0)}
    h, last_state = variant.scan(**inputs, return_last_state=True)
    expected_h, expected_state = variant.scan(**flipped, return_last_state=True)
    torch.testing.assert_close(h, expected_h.flip(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last_state, expected_state.flip(0) if common else expected_state, rtol=1e-12, atol=1e-12)


@every_recurrence
def test_options_and_h0_by_default(variant, device):
    inputs = make_inputs(variant, h0=False, device=device)
    required = {name: inputs[name] for name in variant.recurrence.inputs}
    assert torch.equal(variant.scan(**required), variant.scan(**inputs))
    zero = variant.scan(**inputs | {"h0": state_of(inputs)})
    torch.testing.assert_close(variant.scan(**required), zero, rtol=1e-14, atol=1e-14)


def test_activation_none_is_no_activation(device):
    for variant in (MINGRU, MINLSTM):
        inputs = make_inputs(variant, device=device)
        assert torch.equal(variant.scan(**inputs), variant.scan(**inputs | {"candidate_activation": "none"}))


# ----- nothing to do


@pytest.mark.parametrize("sizes", [(0, 5, 4), (2, 0, 4), (2, 5, 0), (0, 0, 0), (2, 0, 0), (0, 5, 0)], ids=str)
@every_recurrence
def test_no_elements(variant, sizes, device):
    batch, seqlen, channels = sizes
    for h0, reverse in itertools.product((True, False), repeat=2):
        inputs = make_inputs(
            variant, batch=batch, seqlen=seqlen, channels=channels, h0=h0, reverse=reverse, dtype=torch.bfloat16, device=device
        )
        h, last_state = variant.scan(**inputs, return_last_state=True)
        assert h.shape == sizes and h.dtype == torch.bfloat16
        assert last_state.dtype == torch.float32
        assert torch.equal(last_state, inputs["h0"] if h0 else state_of(inputs))
        assert not h0 or last_state.data_ptr() != inputs["h0"].data_ptr() or not last_state.numel()


@pytest.mark.parametrize("cu_seqlens", [(0,), (0, 0), (0, 0, 0)], ids=str)
@every_recurrence
def test_packed_sequences_of_no_steps(variant, cu_seqlens, device):
    for h0, reverse in itertools.product((True, False), repeat=2):
        inputs = make_inputs(variant, cu_seqlens=cu_seqlens, h0=h0, reverse=reverse, device=device)
        h, last_state = variant.scan(**inputs, return_last_state=True)
        assert h.shape == (1, 0, 4) and torch.equal(last_state, inputs["h0"] if h0 else state_of(inputs))


# ----- extreme values


def test_gates_of_minlstm_that_saturate(device):
    """f' + i' = 1 for all gates, so candidates of 1 keep a state of 1."""
    gates = torch.tensor([-800.0, -100.0, -20.0, 0.0, 20.0, 100.0, 800.0], dtype=torch.float64)
    forget, input = (x.reshape(1, -1, 1).expand(1, -1, 5) for x in torch.meshgrid(gates, gates, indexing="ij"))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        inputs = {"forget": forget.to(device, dtype), "input": input.to(device, dtype)}
        ones = torch.ones_like(inputs["forget"])
        h0 = torch.ones(1, 5, dtype=parameter_dtype(dtype), device=device)
        h, last_state = MINLSTM.scan(**inputs, candidate=ones, h0=h0, return_last_state=True)
        tolerance = 4 * torch.finfo(last_state.dtype).eps * len(gates) ** 2
        torch.testing.assert_close(last_state, h0, rtol=tolerance, atol=0)
        torch.testing.assert_close(h, ones, rtol=max(tolerance, torch.finfo(dtype).eps), atol=0)
        for name in ("forget", "input", "candidate"):
            leaves = (
                inputs | {"candidate": 2 * ones} | {name: (inputs | {"candidate": 2 * ones})[name].detach().requires_grad_()}
            )
            h = MINLSTM.scan(**leaves, h0=h0)
            h.float().sum().backward()
            assert h.isfinite().all() and leaves[name].grad.isfinite().all()


def test_elementary_functions(device):
    """One step from zero is tanh of the candidate, and 1 - e^-dt: in float32 to a few roundings, near zero too."""
    x = torch.cat([torch.logspace(-30, 2, 4001), torch.linspace(0, 20, 4001)]).double()
    x = torch.cat([x, -x]).float().reshape(1, 1, -1).to(device)
    one = torch.ones_like(x)
    tanh = VARIANTS["mingru_scan-tanh-False"]
    for actual, exact in (
        (tanh.scan(one, x, **tanh.fixed), x.double().tanh()),
        (LIQUID.scan(one, one, x.abs()), -torch.expm1(-x.abs().double())),
    ):
        torch.testing.assert_close(actual.double(), exact, rtol=4 * torch.finfo(torch.float32).eps, atol=0)


@every_variant
def test_large_inputs(variant, device):
    """Far outside the range in which sigmoids, exponentials and activations change."""
    large = torch.tensor([-800.0, -100.0, -30.0, -21.0, -1.0, 0.0, 1.0, 30.0, 100.0, 800.0], dtype=torch.float64)
    for dtype, (position, name) in itertools.product((torch.float64, torch.float32), enumerate(variant.recurrence.inputs)):
        inputs = make_inputs(variant, seqlen=len(large), channels=6, form="full", dtype=dtype, device=device)
        values = variant.recurrence.inputs[name](large)
        if name == "gate" and not variant.fixed.get("gate_is_logit", True):
            values = values.sigmoid()
        inputs[name] = values.to(device, dtype).roll(position)[None, :, None].expand(inputs[name].shape)
        results = variant.assert_matches_reference(inputs, gradients=False)
        assert all(value.isfinite().all() for value in results.values())


def test_no_accuracy_is_lost_over_a_long_sequence(device):
    """In float32 at 65536 steps every state keeps six digits, where the log-space form of the same minGRU loses them."""
    variant = VARIANTS["mingru_scan-g-True"]
    inputs = make_inputs(variant, batch=1, seqlen=65536, channels=4, h0=False, dtype=torch.float32, device=device)

    def in_log_space(gate, candidate):
        log_decay = -F.softplus(gate)
        log_input = -F.softplus(-gate) + torch.where(candidate >= 0, (candidate.relu() + 0.5).log(), -F.softplus(-candidate))
        log_product = log_decay.cumsum(1)
        return (log_product + (log_input - log_product).logcumsumexp(1)).exp()

    exact = variant.reference_function(**inputs | {name: inputs[name].double() for name in ("gate", "candidate")})
    in_exact_log_space = in_log_space(*(inputs[name].double() for name in ("gate", "candidate")))
    torch.testing.assert_close(in_exact_log_space, exact, rtol=1e-9, atol=0)

    def largest_error(h):
        return ((h.double() - exact) / exact).abs().max().item()

    assert largest_error(variant.scan(**inputs)) < 1e-6
    assert largest_error(in_log_space(inputs["gate"], inputs["candidate"])) > 1e-4


def test_states_may_have_any_sign_and_decay_to_nothing(device):
    """Inputs without a logarithm: negative transitions, zeros, states of both signs; and products that underflow."""
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(LINEAR, seqlen=1000, channels=9, dtype=dtype, device=device)
        inputs["a"] = torch.where(inputs["a"].abs() < 0.2, 0, inputs["a"])
        results = LINEAR.assert_matches_reference(inputs, gradients=False)
        assert (results["h"] < 0).any() and results["h"].isfinite().all()
        inputs = make_inputs(LINEAR, seqlen=1000, channels=9, dtype=dtype, device=device)
        LINEAR.assert_matches_reference(inputs | {"a": 1e-3 * inputs["a"]}, gradients=False)


def one_place(inputs: dict) -> tuple[int, int, slice]:
    """Returns a step inside a sequence, the index of the sequence, and the steps that it may change."""
    packed = inputs["cu_seqlens"] is not None
    step, sequence, begin, end = (6, 5, *PACKED[5:7]) if packed else (20, -1, 0, 70)
    return step, sequence, slice(begin, step + 1) if inputs["reverse"] else slice(step, end)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@every_recurrence
def test_nonfinite_stays_in_its_channel_and_sequence(variant, layout, value, device):
    """Elements that a NaN cannot reach keep their bits; it fills all elements that it reaches."""
    for dtype, common in itertools.product((torch.float64, torch.float32), COMMON.values()):
        inputs = make_inputs(
            variant, channels=9, form="full", dtype=dtype, layout=layout, device=device, **({"seqlen": 70} | common)
        )
        clean = evaluate(variant, inputs)
        step, sequence, steps = one_place(inputs)
        reached = {name: torch.zeros_like(result, dtype=torch.bool) for name, result in clean.items()}
        reached["h"][-1, steps, 3] = reached["last_state"][sequence, 3] = True
        for name in variant.recurrence.inputs:
            touched = inputs | {name: inputs[name].clone()}
            touched[name][-1, step, 3] = value
            for result, actual in evaluate(variant, touched).items():
                assert torch.equal(actual[~reached[result]], clean[result][~reached[result]]), f"{result} of {name}"
                assert not math.isnan(value) or actual[reached[result]].isnan().all(), f"{result} of {name}"


@every_recurrence
def test_nonfinite_initial_state_stays_in_its_channel_and_sequence(variant, device):
    for dtype, common in itertools.product((torch.float64, torch.float32), COMMON.values()):
        inputs = make_inputs(variant, channels=9, dtype=dtype, device=device, **({"seqlen": 70} | common))
        if inputs["h0"] is None:
            continue
        clean = evaluate(variant, inputs)
        _, sequence, _ = one_place(inputs)
        reached = {name: torch.zeros_like(result, dtype=torch.bool) for name, result in clean.items()}
        reached["h"][-1, slice(*PACKED[5:7]) if common.get("cu_seqlens") else slice(None), 3] = True
        reached["last_state"][sequence, 3] = True
        touched = inputs | {"h0": inputs["h0"].clone()}
        touched["h0"][sequence, 3] = float("nan")
        for result, actual in evaluate(variant, touched).items():
            assert torch.equal(actual.isnan(), reached[result]), result
            assert torch.equal(actual[~reached[result]], clean[result][~reached[result]]), result


# ----- the same bits


@every_recurrence
def test_values_do_not_depend_on_the_neighbors(variant, device):
    """A single channel has the same bits alone as among others."""
    inputs = make_inputs(variant, batch=3, channels=33, seqlen=70, form="full", dtype=torch.float32, device=device)
    h = variant.scan(**inputs)
    channel = {name: inputs[name][..., 17:18] for name in tensor_names(inputs)}
    assert torch.equal(variant.scan(**inputs | channel), h[..., 17:18])


@every_recurrence
def test_arguments_are_left_as_they_were(variant, device):
    for dtype, common in itertools.product((torch.float32, torch.bfloat16), COMMON.values()):
        inputs = make_inputs(variant, dtype=dtype, device=device, **common)
        before = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        variant.scan(**inputs)
        assert all(torch.equal(inputs[name], value) for name, value in before.items())
