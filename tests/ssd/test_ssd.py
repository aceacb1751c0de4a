"""ssd_chunk_scan: values, against the float64 reference and against the operators that compute the same by other means."""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, arrange, assert_equal, dtypes, parameter_dtype
from operator_spec import tensor_names
from ssd_helpers import (
    METHODS,
    MINIMAL,
    OPTIONS,
    PACKED,
    SEQUENCES,
    assert_all_close,
    assert_matches_reference,
    at_steps,
    evaluate,
    every_method,
    every_option,
    make_cotangents,
    make_inputs,
    scan,
    states_like,
)
from torch import Tensor

from ssm_kernels import reference, selective_scan, selective_state_update, ssd_chunk_scan

OPERATOR = "ssd_chunk_scan"

# Around the sizes that tiles and chunks have.
LENGTHS = (0, 1, 2, 63, 64, 65, 300)


def test_signature_is_that_of_the_reference():
    operator, of_reference = (
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (ssd_chunk_scan, reference.ssd_chunk_scan)
    )
    assert operator == of_reference


@dtypes()
@every_option
def test_values(options, dtype, device):
    for sizes in ({}, {"seqlen": 70}):
        inputs = make_inputs(dtype=dtype, device=device, **(sizes | options))
        results = assert_matches_reference(inputs, gradients=False)
        assert results["out"].dtype == dtype and results["final_states"].dtype == parameter_dtype(dtype)
        assert results["out"].shape == inputs["x"].shape and results["final_states"].shape == states_like(inputs).shape
        assert torch.equal(ssd_chunk_scan(**inputs), results["out"])


@every_method
def test_discretizations(discretization, device):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for name in ("everything", "packed"):
            inputs = make_inputs(dtype=dtype, device=device, discretization=discretization, **({"seqlen": 70} | OPTIONS[name]))
            assert_matches_reference(inputs, gradients=False)


def test_alias_of_a_discretization(device):
    inputs = make_inputs(device=device)
    expected = ssd_chunk_scan(**inputs | {"discretization": "foh"})
    assert torch.equal(ssd_chunk_scan(**inputs | {"discretization": "zoh_exact"}), expected)


def test_discretizations_differ(device):
    results = [ssd_chunk_scan(**make_inputs(discretization=name, device=device)) for name in METHODS]
    assert all((a - b).abs().max() > 1e-6 for a, b in itertools.combinations(results, 2))


def test_defaults(device):
    """Defaults of the optional arguments, with some negative step sizes, which become 0."""
    inputs = make_inputs(**MINIMAL, seqlen=20, device=device)
    inputs["dt"] = inputs["dt"] - 0.3
    assert (inputs["dt"] < 0).any() and (inputs["dt"] > 0).any()
    required = [inputs[name] for name in ("x", "dt", "A", "B", "C")]
    out = ssd_chunk_scan(*required)
    torch.testing.assert_close(out, ssd_chunk_scan(**inputs), rtol=0, atol=0)
    assert_matches_reference(inputs, gradients=False)
    clamped = inputs | {"dt": inputs["dt"].clamp(min=0)}
    torch.testing.assert_close(out, ssd_chunk_scan(**clamped), rtol=1e-12, atol=1e-12)


def test_limits_of_the_step_size(device):
    """The limits apply after bias and softplus, and infinite limits change nothing."""
    inputs = make_inputs(seqlen=70, device=device)
    steps = torch.nn.functional.softplus(inputs["dt"] + inputs["dt_bias"])
    low, high = (torch.quantile(steps, q).item() for q in (0.3, 0.7))
    for limits in ((low, high), (low, math.inf), (0.0, high), (high, high), (-math.inf, math.inf)):
        assert_matches_reference(inputs | {"dt_limit": limits}, gradients=False)
        plain = inputs | {"dt": steps.clamp(*limits), "dt_bias": None, "dt_softplus": False}
        torch.testing.assert_close(
            ssd_chunk_scan(**inputs | {"dt_limit": limits}), ssd_chunk_scan(**plain), rtol=1e-12, atol=1e-12
        )
    negative = make_inputs(**MINIMAL, dt_limit=(-math.inf, math.inf), device=device)
    negative["dt"] = negative["dt"] - 0.3  # growth
    assert_matches_reference(negative, gradients=False)
    assert torch.equal(ssd_chunk_scan(**negative | {"dt_limit": None}), ssd_chunk_scan(**negative))


def test_no_limits_of_the_step_size_mean_the_same_in_torch_ops(device):
    """dt_limit=None sets no limits in torch.ops and in Python; it is the default of torch.ops only."""
    inputs = make_inputs(**MINIMAL, device=device)
    inputs["dt"] = inputs["dt"] - 0.3  # some steps are negative
    operator = torch.ops.ssm_kernels.ssd_chunk_scan
    arguments = [inputs.pop(name) for name in ("x", "dt", "A", "B", "C")]
    unlimited = ssd_chunk_scan(*arguments, dt_limit=(-math.inf, math.inf))
    assert torch.equal(operator(*arguments)[0], unlimited)
    assert torch.equal(operator(*arguments, dt_limit=None)[0], unlimited)
    at_least_zero = ssd_chunk_scan(*arguments)
    assert torch.equal(operator(*arguments, dt_limit=(0.0, math.inf))[0], at_least_zero)
    assert not torch.equal(at_least_zero, unlimited)


# ----- sizes and strides


@dtypes(torch.float64, torch.float32, torch.bfloat16)
@pytest.mark.parametrize("seqlen", LENGTHS)
def test_lengths(seqlen, dtype, device):
    for chunk_size in (None, 64):
        inputs = make_inputs(seqlen=seqlen, heads=2, headdim=8, dstate=8, chunk_size=chunk_size, dtype=dtype, device=device)
        assert_matches_reference(inputs, gradients=False)


@dtypes(torch.float64, torch.float32, torch.bfloat16)
@pytest.mark.parametrize(
    ("headdim", "dstate"),
    [(1, 1), (48, 17), (17, 48), (64, 16), (64, 64), (64, 128), (96, 64), (128, 96), (33, 200), (256, 3), (3, 256), (256, 256)],
)
def test_headdim_and_dstate(headdim, dstate, dtype, device):
    inputs = make_inputs(
        batch=1,
        seqlen=20 if headdim * dstate > 10_000 else 70,
        heads=2,
        groups=1,
        headdim=headdim,
        dstate=dstate,
        chunk_size=16,
        dtype=dtype,
        device=device,
    )
    assert_matches_reference(inputs, gradients=False)


@dtypes(torch.float64, torch.float32, torch.bfloat16)
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (6, 1), (6, 2), (6, 3), (6, 6), (24, 8), (80, 1)])
def test_heads_and_groups(heads, groups, dtype, device):
    for batch in (1, 3):
        inputs = make_inputs(batch=batch, heads=heads, groups=groups, seqlen=65, dtype=dtype, device=device)
        assert_matches_reference(inputs, gradients=False)


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 7, 16, 64, 128, 1000])
@pytest.mark.parametrize("name", ["everything", "resets_with_states", "packed_with_states"])
def test_chunk_size_is_a_hint(name, chunk_size, device):
    """Results and gradients are the sequential recurrence's, whatever the chunks."""
    options = OPTIONS[name] | {"chunk_size": chunk_size}
    if options.get("cu_seqlens"):
        options["cu_seqlens"] = (0, 0, 64, 65, 65, 130)
    elif options.get("resets"):
        options["resets"] = ((1, 16, 63, 64, 100), ())
    for dtype in (torch.float64, torch.float32):
        assert_matches_reference(make_inputs(dtype=dtype, device=device, **({"seqlen": 130} | options)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_each_argument(layout, device):
    for dtype, name in itertools.product((torch.float64, torch.bfloat16), ("everything", "packed_with_states")):
        inputs = make_inputs(dtype=dtype, device=device, **({"seqlen": 20} | OPTIONS[name]))
        expected = evaluate(scan, inputs)
        for argument in tensor_names(inputs):
            arranged = inputs | {argument: arrange(inputs[argument], layout)}
            if dtype == torch.float64:
                assert_all_close(evaluate(scan, arranged), expected)
            else:
                assert_matches_reference(arranged, gradients=False)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layout_of_all_arguments(layout, device):
    for dtype, options in itertools.product((torch.float64, torch.bfloat16), ({}, {"cu_seqlens": (0, 30, 30, 70)})):
        inputs = make_inputs(seqlen=70, headdim=16, dstate=8, layout=layout, dtype=dtype, device=device, **options)
        assert_matches_reference(inputs, gradients=False)


def test_slices_of_one_projection(device):
    """Inputs as a layer makes them: x, B and C are slices of one tensor, z and dt of another."""
    for dtype in (torch.float64, torch.bfloat16):
        inputs = make_inputs(seqlen=70, headdim=8, dstate=4, dtype=dtype, device=device)
        sliced = dict(inputs)
        for names in (("x", "B", "C"), ("z", "dt")):
            flat = [inputs[name].flatten(2) for name in names]
            parts = torch.cat(flat, dim=-1).split([part.shape[-1] for part in flat], dim=-1)
            sliced |= {name: part.unflatten(-1, inputs[name].shape[2:]) for name, part in zip(names, parts, strict=True)}
        assert not sliced["x"].is_contiguous()
        torch.testing.assert_close(ssd_chunk_scan(**sliced), ssd_chunk_scan(**inputs), rtol=2e-2, atol=2e-2)
        assert_matches_reference(sliced, gradients=False)


def test_expanded_arguments(device):
    """One row for the batch, one step size for the heads, one gate for the channels."""
    inputs = make_inputs(seqlen=20, device=device)
    for name in SEQUENCES:
        for axis in range(inputs[name].dim()):
            expanded = inputs[name].narrow(axis, 0, 1).expand(inputs[name].shape)
            expected = ssd_chunk_scan(**inputs | {name: expanded.contiguous()})
            torch.testing.assert_close(ssd_chunk_scan(**inputs | {name: expanded}), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seqlen": 0}, {"batch": 0, "seqlen": 0}, {"heads": 0, "groups": 1}], ids=str)
def test_no_elements(sizes, device):
    for dtype in (torch.float64, torch.bfloat16):
        for options in ({}, {"initial_states": False}, {"resets": ((1,),)}):
            inputs = make_inputs(dtype=dtype, device=device, **(sizes | options))
            out, final_states = scan(**inputs)
            assert out.shape == inputs["x"].shape and out.dtype == dtype
            assert final_states.shape == states_like(inputs).shape
            if final_states.numel():
                initial_states = inputs["initial_states"]
                assert torch.equal(final_states, torch.zeros_like(final_states) if initial_states is None else initial_states)


# ----- sequences


def test_resets_are_separate_sequences(device):
    """Resets inside chunks and at their borders, elsewhere in each row; initial_states belongs to the first sequence."""
    seqlen, resets = 150, ((1, 16, 40, 64, 128, 149), (63, 64, 65), ())
    for chunk_size in (None, 16, 64):
        inputs = make_inputs(batch=3, seqlen=seqlen, resets=resets, chunk_size=chunk_size, device=device)
        out, final_states = scan(**inputs)
        for row, starts in enumerate(resets):
            of_row = inputs | {name: inputs[name][row : row + 1] for name in (*SEQUENCES, "seq_idx", "initial_states")}
            of_row["seq_idx"] = None
            parts, state = [], of_row["initial_states"]
            for begin, end in itertools.pairwise((0, *starts, seqlen)):
                y, last = scan(**at_steps(of_row, slice(begin, end)) | {"initial_states": state})
                parts.append(y)
                state = None
            torch.testing.assert_close(out[row : row + 1], torch.cat(parts, dim=1), rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(final_states[row : row + 1], last, rtol=1e-11, atol=1e-11)


def test_packed_sequences_one_by_one(device):
    """Sequences of no steps, of one, and of more than a chunk."""
    cu_seqlens = (0, 0, 1, 65, 65, 193, 200, 200)
    for with_states, chunk_size in itertools.product((True, False), (None, 16, 64)):
        inputs = make_inputs(cu_seqlens=cu_seqlens, initial_states=with_states, chunk_size=chunk_size, device=device)
        out, final_states = scan(**inputs)
        assert final_states.shape[0] == len(cu_seqlens) - 1
        for i, (begin, end) in enumerate(itertools.pairwise(cu_seqlens)):
            state = inputs["initial_states"][i : i + 1] if with_states else None
            alone = at_steps(inputs, slice(begin, end)) | {"initial_states": state, "cu_seqlens": None}
            y, last = scan(**alone)
            torch.testing.assert_close(out[:, begin:end], y, rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(final_states[i : i + 1], last, rtol=1e-11, atol=1e-11)


def test_resets_in_packed_sequences(device):
    """seq_idx changes at first steps of packed sequences, inside chunks and at their borders, and the states are those of
    cu_seqlens."""
    cu_seqlens, resets = (0, 0, 1, 65, 65, 193, 200, 200), (1, 40, 65, 66, 129, 150, 192, 199)
    for with_states, chunk_size in itertools.product((True, False), (None, 16, 64)):
        options = {"initial_states": with_states, "chunk_size": chunk_size}
        inputs = make_inputs(cu_seqlens=cu_seqlens, resets=(resets,), device=device, **options)
        cotangents = make_cotangents(inputs)
        packed = evaluate(scan, inputs, cotangents)
        for i, (begin, end) in enumerate(itertools.pairwise(cu_seqlens)):
            state = inputs["initial_states"][i : i + 1] if with_states else None
            one = at_steps(inputs, slice(begin, end)) | {"initial_states": state, "cu_seqlens": None}
            alone = evaluate(scan, one, (cotangents[0][:, begin:end], cotangents[1][i : i + 1]))
            for name in ("out", "grad_x", "grad_dt", "grad_B", "grad_C", "grad_z"):
                torch.testing.assert_close(packed[name][:, begin:end], alone[name], rtol=1e-10, atol=1e-10)
            for name in ("final_states", *(["grad_initial_states"] if with_states else [])):
                torch.testing.assert_close(packed[name][i : i + 1], alone[name], rtol=1e-10, atol=1e-10)


def test_offsets_of_either_dtype_and_any_stride(device):
    inputs = make_inputs(cu_seqlens=PACKED, device=device)
    expected = evaluate(scan, inputs)
    offsets = inputs["cu_seqlens"].long()
    for cu_seqlens in (offsets, offsets.repeat_interleave(2)[::2]):
        assert_equal(evaluate(scan, inputs | {"cu_seqlens": cu_seqlens}), expected)


def test_numbers_of_sequences_of_either_dtype_and_any_stride(device):
    inputs = make_inputs(resets=((2,), (1, 3)), device=device)
    expected = evaluate(scan, inputs)
    seq_idx = inputs["seq_idx"]
    for other in (seq_idx.long(), seq_idx.t().contiguous().t(), seq_idx.long() * 2**40 - 7):
        assert_equal(evaluate(scan, inputs | {"seq_idx": other}), expected)


def test_both_ways_to_name_sequences_agree(device):
    packed = make_inputs(cu_seqlens=(0, 5, 70, 100), initial_states=False, device=device)
    seq_idx = torch.tensor([[0] * 5 + [1] * 65 + [2] * 30], dtype=torch.int32, device=device)
    out, final_states = scan(**packed)
    other_out, last_state = scan(**packed | {"cu_seqlens": None, "seq_idx": seq_idx})
    torch.testing.assert_close(other_out, out, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(last_state, final_states[-1:], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["resets", "packed"])
def test_one_sequence_is_no_sequences(name, device):
    inputs = make_inputs(batch=1, seqlen=70, device=device)
    one = {"seq_idx": torch.full((1, 70), 3, dtype=torch.int32, device=device)}
    if name == "packed":
        one = {"cu_seqlens": torch.tensor([0, 70], device=device)}
    assert_all_close(evaluate(scan, inputs | one), evaluate(scan, inputs), 1e-12)


def test_a_sequence_in_parts(device):
    """The final state of one call is the initial state of the next."""
    inputs = make_inputs(seqlen=200, device=device)
    whole = evaluate(scan, inputs)
    state, parts = inputs["initial_states"], []
    for begin, end in ((0, 1), (1, 64), (64, 129), (129, 129), (129, 200)):
        out, state = scan(**at_steps(inputs, slice(begin, end)) | {"initial_states": state})
        parts.append(out)
    assert_all_close({"out": torch.cat(parts, dim=1), "final_states": state}, whole, 1e-11)


# ----- the same system by other operators


def steps_of_decoding(inputs: dict[str, Any], state: Tensor, steps: range) -> Tensor:
    """``out`` of these steps by selective_state_update; the state is updated in place."""
    x, dt, A, B, C, D, z, dt_bias = (inputs[name] for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias"))
    heads, headdim, dstate = x.shape[2], x.shape[3], B.shape[3]

    def per_channel(v: Tensor | None) -> Tensor | None:
        return None if v is None else (v if v.dim() == 2 else v[:, None]).expand(heads, headdim)

    outputs = [
        selective_state_update(
            state,
            x[:, t],
            dt[:, t, :, None].expand(x.shape[0], heads, headdim),
            A[:, None, None].expand(heads, headdim, dstate),
            B[:, t],
            C[:, t],
            per_channel(D),
            None if z is None else z[:, t],
            per_channel(dt_bias),
            dt_softplus=inputs["dt_softplus"],
            dt_limit=inputs["dt_limit"],
            discretization=inputs["discretization"],
        )
        for t in steps
    ]
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("name", ["everything", "required_only", "D", "dt_limit", "dt_bias_and_softplus"])
@every_method
def test_prefill_and_steps_are_the_whole(discretization, name, device):
    options = OPTIONS[name] | {"discretization": discretization}
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(seqlen=70, dtype=dtype, device=device, **options)
        out, final_states = scan(**inputs)
        first, state = scan(**at_steps(inputs, slice(0, 66)))
        state = state.clone()
        tolerance = 1e-11 if dtype == torch.float64 else 1e-4
        steps = torch.cat([first, steps_of_decoding(inputs, state, range(66, 70))], dim=1)
        torch.testing.assert_close(steps, out, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(state, final_states, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["everything", "D_and_z", "dt_softplus", "initial_states"])
@every_method
def test_is_the_selective_scan_of_the_same_system(discretization, name, device):
    """With A tied over the head, and dt, D and dt_bias expanded over its channels; results and gradients."""
    inputs = make_inputs(seqlen=70, device=device, **OPTIONS[name] | {"discretization": discretization})
    headdim, dstate = inputs["x"].shape[3], inputs["B"].shape[3]

    def of_channels(v: Tensor | None) -> Tensor | None:
        return None if v is None else (v if v.dim() == 2 else v[:, None].expand(-1, headdim)).flatten()

    def by_channels(x, dt, A, B, C, D, z, dt_bias, initial_states, **_):
        u, gate = (None if v is None else v.flatten(2).transpose(1, 2) for v in (x, z))
        delta = dt[..., None].expand(x.shape).flatten(2).transpose(1, 2)
        out, last_state = selective_scan(
            u,
            delta,
            A[:, None, None].expand(-1, headdim, dstate).flatten(0, 1),
            B.permute(0, 2, 3, 1),
            C.permute(0, 2, 3, 1),
            of_channels(D),
            gate,
            of_channels(dt_bias),
            discretization=discretization,
            delta_softplus=inputs["dt_softplus"],
            initial_state=None if initial_states is None else initial_states.flatten(1, 2),
            return_last_state=True,
        )
        return out.transpose(1, 2).unflatten(2, x.shape[2:]), last_state.unflatten(1, x.shape[2:])

    cotangents = make_cotangents(inputs)
    assert_all_close(evaluate(scan, inputs, cotangents), evaluate(by_channels, inputs, cotangents))
