"""selective_state_update: values in every dtype, layout and form, the state in place, slots."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, METHODS, arrange, says
from operator_spec import as_float64
from selective_scan_helpers import STEP_DTYPES, STEP_FORMS, make_inputs, make_step_inputs, step
from selective_scan_helpers import assert_step_matches_reference as assert_matches_reference
from torch import Tensor

from ssm_kernels import reference, selective_scan, selective_state_update

OPERATOR = "selective_state_update"

every_form = pytest.mark.parametrize("form", STEP_FORMS)
every_method = pytest.mark.parametrize("discretization", METHODS)

every_dtype = pytest.mark.parametrize(("dtype", "state_dtype"), STEP_DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@every_form
@every_method
@every_dtype
def test_matches_reference(dtype, state_dtype, discretization, form, device):
    for slots in (None, 5):
        inputs = make_step_inputs(
            **STEP_FORMS[form],
            batch=3,
            dstate=16,
            slots=slots,
            discretization=discretization,
            dtype=dtype,
            state_dtype=state_dtype,
            device=device,
        )
        assert_matches_reference(inputs)


@pytest.mark.parametrize("dstate", [1, 2, 3, 4, 6, 7, 8, 12, 15, 16, 17, 24, 31, 32, 48, 64, 100, 127, 128, 136, 255, 256])
@every_dtype
def test_every_dstate(dtype, state_dtype, dstate, device):
    for form in ("channels", "heads_groups"):
        inputs = make_step_inputs(**STEP_FORMS[form], dstate=dstate, dtype=dtype, state_dtype=state_dtype, device=device)
        assert_matches_reference(inputs)


@pytest.mark.parametrize(
    "sizes", [(64, None, 2048, 16, None), (3, None, 1000, 16, 8), (4, 80, 64, 128, 1), (1, 24, 64, 128, 8)]
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_sizes_of_models(tied, sizes, device):
    """Enough rows for many blocks, in groups that no block divides."""
    batch, heads, dim, dstate, groups = sizes
    inputs = make_step_inputs(
        batch=batch, heads=heads, dim=dim, dstate=dstate, groups=groups, dtype=torch.float32, slots=batch + 1, device=device
    )
    assert_matches_reference(tie(inputs) if tied else inputs)


def tie(inputs: dict[str, Any]) -> dict[str, Any]:
    """As Mamba-2 has them: A one number per head (per channel where there are no heads), dt, D and dt_bias one per head."""
    A = inputs["A"]
    tied = {"A": A[..., :1].expand_as(A) if A.dim() == 2 else A[:, :1, :1].expand_as(A)}
    if A.dim() == 3:
        tied |= {name: inputs[name][..., :1].expand_as(inputs[name]) for name in ("dt", "D", "dt_bias")}
    return inputs | tied


@every_form
@every_method
def test_tied_parameters(discretization, form, device):
    """Expanded and materialized parameters give the same."""
    for dtype, state_dtype in STEP_DTYPES:
        inputs = tie(
            make_step_inputs(
                **STEP_FORMS[form],
                dstate=32,
                discretization=discretization,
                dtype=dtype,
                state_dtype=state_dtype,
                device=device,
            )
        )
        assert inputs["A"].stride(-1) == 0
        assert_matches_reference(inputs)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@every_form
@every_dtype
def test_logarithm_of_A(dtype, state_dtype, form, tied, device):
    inputs = make_step_inputs(**STEP_FORMS[form], dstate=16, dtype=dtype, state_dtype=state_dtype, device=device)
    A = inputs["A"]
    A_log = torch.log(-A[..., :1]).expand_as(A) if tied else torch.log(-A)
    assert_matches_reference(inputs | {"A": A_log, "A_is_log": True})


@pytest.mark.parametrize("layout", LAYOUTS)
@every_form
def test_layouts(form, layout, device):
    for (dtype, state_dtype), dstate in itertools.product(STEP_DTYPES, (3, 16)):
        options = STEP_FORMS[form] | {"dstate": dstate, "dtype": dtype, "state_dtype": state_dtype, "device": device}
        assert_matches_reference(make_step_inputs(**options, slots=4, layout=layout))


@pytest.mark.parametrize("name", ["state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias"])
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layout_of_each_argument(layout, name, device):
    """One argument that is laid out otherwise, beside contiguous ones."""
    inputs = make_step_inputs(**STEP_FORMS["heads_groups"], dstate=16, dtype=torch.float32, device=device)
    expected = step(inputs)
    for actual, value in zip(step(inputs | {name: arrange(inputs[name], layout)}), expected, strict=True):
        torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chosen", [*itertools.product([False, True], repeat=4)], ids=lambda c: "".join("01"[x] for x in c))
@pytest.mark.parametrize("form", ["channels", "heads"])
def test_every_combination_of_options(form, chosen, device):
    options = dict(zip(("D", "z", "dt_bias", "dt_softplus"), chosen, strict=True))
    for dtype, state_dtype in STEP_DTYPES:
        assert_matches_reference(
            make_step_inputs(**STEP_FORMS[form], **options, dtype=dtype, state_dtype=state_dtype, device=device)
        )


@pytest.mark.parametrize("limits", [(0.2, 0.4), (0.3, math.inf), (0.0, 0.3), (-math.inf, math.inf)], ids=str)
@every_form
def test_limits_of_the_step_size(form, limits, device):
    """They come after bias and softplus."""
    for (dtype, state_dtype), dstate in itertools.product(STEP_DTYPES, (3, 16)):
        inputs = make_step_inputs(**STEP_FORMS[form], dstate=dstate, dtype=dtype, state_dtype=state_dtype, device=device)
        assert_matches_reference(inputs | {"dt_limit": limits})


def test_limits_of_the_step_size_that_exclude_each_other(device):
    for limits in ((0.5, 0.25), (math.nan, 1.0)):
        inputs = make_step_inputs(device=device) | {"dt_limit": limits}
        with pytest.raises(
            ValueError, match=says("selective_state_update: expected dt_limit = (min, max) with min <= max, got (")
        ):
            selective_state_update(**inputs)
    with pytest.raises(ValueError, match=says("selective_state_update: expected dt_limit = (min, max), got 0.5")):
        selective_state_update(**make_step_inputs(device=device) | {"dt_limit": 0.5})


@pytest.mark.parametrize("names", [("D",), ("dt_bias",), ("A",), ("A", "D", "dt_bias")], ids="-".join)
@every_dtype
def test_parameters_in_the_dtype_of_x(dtype, state_dtype, names, device):
    for form, dstate, tied, is_log in itertools.product(("channels", "heads"), (3, 16), (False, True), (False, True)):
        inputs = make_step_inputs(**STEP_FORMS[form], dstate=dstate, dtype=dtype, state_dtype=state_dtype, device=device)
        if is_log:
            inputs |= {"A": torch.log(-inputs["A"]), "A_is_log": True}
        cast = inputs | {name: inputs[name].to(dtype) for name in names}
        wide = cast | {name: cast[name].to(inputs["A"].dtype) for name in names}
        actual, expected = (step(tie(i) if tied else i) for i in (cast, wide))
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layout_of_A_in_the_dtype_of_x(layout, device):
    inputs = make_step_inputs(**STEP_FORMS["heads_groups"], dstate=16, dtype=torch.bfloat16, device=device)
    A = inputs["A"].bfloat16()
    expected = step(inputs | {"A": A.float()})
    for actual, value in zip(step(inputs | {"A": arrange(A, layout)}), expected, strict=True):
        torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-6)


def test_B_and_C_without_groups_beside_heads(device):
    inputs = make_step_inputs(**STEP_FORMS["heads"], dstate=16, device=device)
    without = inputs | {name: inputs[name].squeeze(1) for name in ("B", "C")}
    for actual, expected in zip(step(without), step(inputs), strict=True):
        assert torch.equal(actual, expected)


def test_alias(device):
    inputs = make_step_inputs(discretization="foh", device=device)
    assert torch.equal(step(inputs)[0], step(inputs | {"discretization": "zoh_exact"})[0])


def test_positional_arguments_are_those_of_mamba_ssm(device):
    inputs = make_step_inputs(slots=3, device=device)
    names = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus", "state_batch_indices")
    state = inputs["state"].clone()
    out = selective_state_update(state, *(inputs[name] for name in names[1:]))
    expected = step(inputs)
    assert torch.equal(out, expected[0]) and torch.equal(state, expected[1])


@every_method
@pytest.mark.parametrize("groups", [None, 2])
def test_equals_a_scan_of_one_step(groups, discretization, device):
    inputs = make_step_inputs(dim=6, groups=groups, discretization=discretization, device=device)
    out, state = step(inputs)
    scan_out, last_state = selective_scan(
        inputs["x"][..., None],
        inputs["dt"][..., None],
        inputs["A"],
        inputs["B"][..., None],
        inputs["C"][..., None],
        inputs["D"],
        inputs["z"][..., None],
        inputs["dt_bias"],
        initial_state=inputs["state"],
        discretization=discretization,
        delta_softplus=inputs["dt_softplus"],
        return_last_state=True,
    )
    torch.testing.assert_close(out, scan_out[..., 0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(state, last_state, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_decoding_equals_the_scan(dtype, device):
    seqlen = 40
    inputs = make_inputs(dim=6, seqlen=seqlen, groups=2, dtype=dtype, device=device)
    out, last_state = selective_scan(**inputs, return_last_state=True)
    state = inputs["initial_state"].clone()
    outputs = [
        selective_state_update(
            state,
            inputs["u"][..., t],
            inputs["delta"][..., t],
            inputs["A"],
            inputs["B"][..., t],
            inputs["C"][..., t],
            inputs["D"],
            inputs["z"][..., t],
            inputs["delta_bias"],
            dt_softplus=inputs["delta_softplus"],
        )
        for t in range(seqlen)
    ]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(torch.stack(outputs, dim=-1), out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state, last_state, rtol=tolerance, atol=tolerance)


def test_state_is_updated_in_place(device):
    inputs = make_step_inputs(dstate=16, device=device)
    state, others = inputs["state"], {k: v.clone() for k, v in inputs.items() if isinstance(v, Tensor) and k != "state"}
    address, version = state.data_ptr(), state._version
    _, expected = step(inputs)
    out = selective_state_update(**inputs)
    assert state.data_ptr() == address and torch.equal(state, expected)
    assert state._version == version + 1
    assert all(torch.equal(inputs[name], value) for name, value in others.items())
    storages = {x.untyped_storage().data_ptr() for x in inputs.values() if isinstance(x, Tensor)}
    assert out.untyped_storage().data_ptr() not in storages


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_no_rows(shape, device):
    batch, *heads, dim = shape
    inputs = make_step_inputs(batch=batch, heads=heads[0] if heads else None, dim=dim, dtype=torch.float32, device=device)
    out, state = step(inputs)
    assert out.shape == shape and state.shape == inputs["state"].shape


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["state", "x", "dt", "A", "D", "z", "dt_bias"])
def test_not_finite_stays_in_its_channel(name, value, device):
    for dstate in (3, 16, 128):
        inputs = make_step_inputs(dim=40, dstate=dstate, dtype=torch.float32, device=device)
        clean_out, clean_state = step(inputs)
        tensor = inputs[name].clone()
        has_batch = name in ("state", "x", "dt", "z")
        tensor[(1, 9) if has_batch else 9] = value
        out, state = step(inputs | {name: tensor})
        others = torch.ones_like(out, dtype=torch.bool)
        others[(1, 9) if has_batch else (slice(None), 9)] = False
        assert torch.equal(out[others], clean_out[others]) and torch.equal(state[others], clean_state[others])
        exact_out, exact_state = reference.selective_state_update(**(inputs | {name: tensor}))
        assert torch.equal(out.isfinite(), exact_out.isfinite()) and torch.equal(out.isnan(), exact_out.isnan())
        assert torch.equal(state.isfinite(), exact_state.isfinite()) and torch.equal(state.isnan(), exact_state.isnan())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@every_form
def test_slots(form, strided, dtype, device):
    inputs = make_step_inputs(**STEP_FORMS[form], batch=5, dstate=16, slots=9, dtype=torch.float32, device=device)
    indices = torch.tensor([7, -1, 0, torch.iinfo(dtype).min, 3], dtype=dtype, device=device)
    inputs["state_batch_indices"] = torch.stack([indices, indices.new_full((5,), 8)], dim=1)[:, 0] if strided else indices
    out, state = assert_matches_reference(inputs)
    untouched = [1, 2, 4, 5, 6, 8]
    assert torch.equal(state[untouched], inputs["state"][untouched])
    assert not torch.equal(state[[0, 3, 7]], inputs["state"][[0, 3, 7]])
    assert out[[1, 3]].count_nonzero() == 0


def test_padding_does_not_read_the_inputs_into_the_output(device):
    inputs = make_step_inputs(batch=3, slots=3, dtype=torch.float32, device=device)
    inputs["state_batch_indices"] = torch.tensor([0, -1, 2], device=device)
    for name in ("x", "dt", "z", "B", "C"):
        inputs[name][1] = float("nan")
    out, _ = step(inputs)
    assert out.isfinite().all() and out[1].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slot_out_of_range(dtype, device):
    inputs = make_step_inputs(batch=3, slots=4, dtype=torch.float32, device=device)
    inputs["state_batch_indices"] = torch.tensor([1, 4, 2], dtype=dtype, device=device)
    before = inputs["state"].clone()
    if device == "cpu":
        with pytest.raises(
            ValueError, match=says("expected state_batch_indices below the number of slots, 4, got 4 at position 1")
        ):
            selective_state_update(**inputs)
        assert torch.equal(inputs["state"], before)
    else:
        out = selective_state_update(**inputs)
        assert out[1].isnan().all() and out[[0, 2]].isfinite().all()
        assert torch.equal(inputs["state"][[0, 3]], before[[0, 3]])
        expected, _ = reference.selective_state_update(
            **as_float64(inputs | {"state": before, "state_batch_indices": inputs["state_batch_indices"].clamp(max=3)})
        )
        torch.testing.assert_close(out[[0, 2]].double(), expected[[0, 2]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slot_of_two_rows(dtype, device):
    """On the CPU an error; on CUDA a race, of which only the slots of other rows can be tested. Padding may be repeated."""
    inputs = make_step_inputs(batch=6, slots=4, dtype=torch.float32, device=device)
    before = inputs["state"].clone()
    inputs["state_batch_indices"] = torch.tensor([-1, 2, 0, -1, 2, 3], dtype=dtype, device=device)
    if device == "cpu":
        message = "selective_state_update: expected distinct state_batch_indices, got 2 at positions 1 and 4"
        with pytest.raises(ValueError, match=says(message)):
            selective_state_update(**inputs)
        assert torch.equal(inputs["state"], before)
    else:
        out = selective_state_update(**inputs)
        once = inputs | {"state": before, "state_batch_indices": torch.tensor([-1, 2, 0, -1, -1, 3], device=device)}
        expected_out, expected_state = step(once)
        assert torch.equal(out[[0, 2, 3, 5]], expected_out[[0, 2, 3, 5]])
        assert torch.equal(inputs["state"][[0, 1, 3]], expected_state[[0, 1, 3]])


def test_more_slots_than_a_32_bit_offset_reaches(device, needs_gpu_memory):
    """Two slots are 2^31 elements apart."""
    needs_gpu_memory(device, 5)
    inputs = make_step_inputs(dim=8, dstate=16, slots=2, dtype=torch.float16, state_dtype=torch.float16, device=device)
    expected = step(inputs)
    far = torch.empty(2**31 + 1024, dtype=torch.float16, device=device).as_strided((2, 8, 16), (2**31, 16, 1))
    far.copy_(inputs["state"])
    out = selective_state_update(**(inputs | {"state": far}))
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(far, expected[1])


@pytest.mark.cuda
@every_dtype
def test_cuda_agrees_with_the_cpu(dtype, state_dtype):
    """The same formulas on both: no further apart than the order of a sum and the last bits of an exponential."""
    on_cpu = make_step_inputs(dim=300, dstate=128, dtype=dtype, state_dtype=state_dtype, discretization="foh")
    on_cuda = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in on_cpu.items()}
    for cuda, cpu in zip(step(on_cuda), step(on_cpu), strict=True):
        eps = max(torch.finfo(cuda.dtype).eps, 4e-7 if dtype != torch.float64 else 0)
        torch.testing.assert_close(cuda.cpu(), cpu, rtol=8 * eps, atol=8 * eps * cpu.abs().max().item())
