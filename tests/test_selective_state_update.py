"""selective_state_update: values, the state in place, slots, the operator in PyTorch, and what bad arguments are told."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, METHODS, arrange, as_float64, assert_as_accurate, make_inputs, make_step_inputs
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ssm_kernels import reference, selective_scan, selective_state_update

OPERATOR = "selective_state_update"
operator = torch.ops.ssm_kernels.selective_state_update

FORMS: dict[str, dict[str, Any]] = {
    "channels": {"dim": 6},
    "channels_groups": {"dim": 6, "groups": 3},
    "heads": {"heads": 4, "dim": 5},
    "heads_groups": {"heads": 4, "dim": 5, "groups": 2},
}
every_form = pytest.mark.parametrize("form", FORMS)
every_method = pytest.mark.parametrize("discretization", METHODS)

# x, dt, B, C, z and out beside the state.
DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.float16, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]
every_dtype = pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def step(inputs: dict[str, Any], function=selective_state_update) -> tuple[Tensor, Tensor]:
    """``out`` and the new state, of a copy of the state in the same strides."""
    state = inputs["state"]
    copy = torch.empty_strided(state.shape, state.stride(), dtype=state.dtype, device=state.device).copy_(state)
    return function(**(inputs | {"state": copy})), copy


def says(*parts: str) -> str:
    """A pattern of the parts in this order."""
    return ".*".join(re.escape(part) for part in parts)


def assert_matches_reference(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Compares with the float64 reference, by the low-precision rule below float64."""
    out, state = step(inputs)
    assert out.shape == inputs["x"].shape and out.dtype == inputs["x"].dtype
    exact_out, exact_state = reference.selective_state_update(**as_float64(inputs))
    if inputs["x"].dtype == torch.float64:
        torch.testing.assert_close(out, exact_out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state, exact_state, rtol=1e-12, atol=1e-12)
    else:
        native_out, native_state = reference.selective_state_update(**inputs)
        assert_as_accurate(out, native_out.to(out.dtype), exact_out, "out")
        assert_as_accurate(state, native_state, exact_state, "state")
    return out, state


@every_form
@every_method
@every_dtype
def test_matches_reference(dtype, state_dtype, discretization, form, device):
    for slots in (None, 5):
        inputs = make_step_inputs(
            **FORMS[form],
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
        inputs = make_step_inputs(**FORMS[form], dstate=dstate, dtype=dtype, state_dtype=state_dtype, device=device)
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
    for dtype, state_dtype in DTYPES:
        inputs = tie(
            make_step_inputs(
                **FORMS[form], dstate=32, discretization=discretization, dtype=dtype, state_dtype=state_dtype, device=device
            )
        )
        assert inputs["A"].stride(-1) == 0
        assert_matches_reference(inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
@every_form
def test_layouts(form, layout, device):
    for (dtype, state_dtype), dstate in itertools.product(DTYPES, (3, 16)):
        options = FORMS[form] | {"dstate": dstate, "dtype": dtype, "state_dtype": state_dtype, "device": device}
        assert_matches_reference(make_step_inputs(**options, slots=4, layout=layout))


@pytest.mark.parametrize("name", ["state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias"])
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layout_of_each_argument(layout, name, device):
    """One argument that is laid out otherwise, beside contiguous ones."""
    inputs = make_step_inputs(**FORMS["heads_groups"], dstate=16, dtype=torch.float32, device=device)
    expected = step(inputs)
    for actual, value in zip(step(inputs | {name: arrange(inputs[name], layout)}), expected, strict=True):
        torch.testing.assert_close(actual, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chosen", [*itertools.product([False, True], repeat=4)], ids=lambda c: "".join("01"[x] for x in c))
@pytest.mark.parametrize("form", ["channels", "heads"])
def test_every_combination_of_options(form, chosen, device):
    options = dict(zip(("D", "z", "dt_bias", "dt_softplus"), chosen, strict=True))
    for dtype, state_dtype in DTYPES:
        assert_matches_reference(
            make_step_inputs(**FORMS[form], **options, dtype=dtype, state_dtype=state_dtype, device=device)
        )


@pytest.mark.parametrize("names", [("D",), ("dt_bias",), ("D", "dt_bias")], ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_D_and_dt_bias_in_the_dtype_of_x(dtype, names, device):
    for form in ("channels", "heads"):
        inputs = make_step_inputs(**FORMS[form], dstate=16, dtype=dtype, device=device)
        cast = inputs | {name: inputs[name].to(dtype) for name in names}
        actual, expected = step(cast), step(cast | {name: cast[name].float() for name in names})
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


def test_B_and_C_without_groups_beside_heads(device):
    inputs = make_step_inputs(**FORMS["heads"], dstate=16, device=device)
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
    """The scan runs on the CPU; the rest is computed on the device."""
    inputs = make_step_inputs(dim=6, groups=groups, discretization=discretization)
    out, state = step({k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()})
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
    torch.testing.assert_close(out.cpu(), scan_out[..., 0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(state.cpu(), last_state, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_decoding_equals_the_scan(dtype, device):
    seqlen = 40
    scan = make_inputs(dim=6, seqlen=seqlen, groups=2, dtype=dtype)
    out, last_state = selective_scan(**scan, return_last_state=True)
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in scan.items()}
    state = moved["initial_state"].clone()
    outputs = [
        selective_state_update(
            state,
            moved["u"][..., t],
            moved["delta"][..., t],
            moved["A"],
            moved["B"][..., t],
            moved["C"][..., t],
            moved["D"],
            moved["z"][..., t],
            moved["delta_bias"],
            dt_softplus=moved["delta_softplus"],
        )
        for t in range(seqlen)
    ]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(torch.stack(outputs, dim=-1).cpu(), out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state.cpu(), last_state, rtol=tolerance, atol=tolerance)


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


def test_bitwise_repeatable_whatever_the_batch(device):
    """A row's result depends neither on the run nor on the rows beside it."""
    for options in (FORMS["channels"], FORMS["heads"], {"dim": 700}, {"heads": 16, "dim": 64}):
        inputs = make_step_inputs(**options, batch=40, dstate=64, dtype=torch.float32, device=device)
        out, state = step(inputs)
        again, _ = step(inputs)
        assert torch.equal(again, out)
        per_batch = ("state", "x", "dt", "B", "C", "z")
        one_out, one_state = step(inputs | {name: inputs[name][7:8] for name in per_batch})
        assert torch.equal(one_out[0], out[7]) and torch.equal(one_state[0], state[7])


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
    inputs = make_step_inputs(**FORMS[form], batch=5, dstate=16, slots=9, dtype=torch.float32, device=device)
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


def test_more_slots_than_a_32_bit_offset_reaches(device):
    """Two slots that lie 2^31 elements apart."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 5 * 2**30:
        pytest.skip("needs 5 GiB of free GPU memory")
    inputs = make_step_inputs(dim=8, dstate=16, slots=2, dtype=torch.float16, state_dtype=torch.float16, device=device)
    expected = step(inputs)
    far = torch.empty(2**31 + 1024, dtype=torch.float16, device=device).as_strided((2, 8, 16), (2**31, 16, 1))
    far.copy_(inputs["state"])
    out = selective_state_update(**(inputs | {"state": far}))
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(far, expected[1])


OPCHECK = {
    "channels": {},
    "heads": {"heads": 3, "groups": 3},
    "required_only": dict.fromkeys(("D", "z", "dt_bias", "dt_softplus"), False),
    "slots": {"slots": 4},
    "bfloat16": {"dtype": torch.bfloat16, "state_dtype": torch.bfloat16},
    "transposed": {"layout": "transposed"},
}


def split(inputs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The operator's positional and keyword arguments."""
    names = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus", "state_batch_indices")
    return tuple(inputs.get(name) for name in names), {"discretization": inputs["discretization"]}


@pytest.mark.parametrize("case", OPCHECK)
def test_opcheck(case, device):
    torch.library.opcheck(operator.default, *split(make_step_inputs(**OPCHECK[case], device=device)))


@pytest.mark.parametrize("layout", LAYOUTS)
@every_form
def test_meta_agrees_with_the_device(form, layout, device):
    for dtype, state_dtype in DTYPES:
        inputs = make_step_inputs(**FORMS[form], dtype=dtype, state_dtype=state_dtype, layout=layout, device=device)
        args, kwargs = split(inputs)
        on_meta = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x for x in args
        ]
        meta, real = operator(*on_meta, **kwargs), operator(*args, **kwargs)
        assert meta.is_meta and not real.is_meta
        assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def decode_twice(**inputs):
    """Two steps and work around them, on a state that the caller holds."""
    first = selective_state_update(**inputs)
    second = selective_state_update(**(inputs | {"x": torch.tanh(first)}))
    return second * 2 + inputs["state"].sum()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("slots", [None, 4])
def test_compile(slots, backend, device, fresh_dynamo):
    compiled = torch.compile(decode_twice, fullgraph=True, backend=backend)
    inputs = make_step_inputs(slots=slots, dstate=16, device=device)
    for actual, expected in zip(step(inputs, compiled), step(inputs, decode_twice), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_compile_once_for_every_batch(device, fresh_dynamo):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(decode_twice, fullgraph=True, backend=counter, dynamic=True)
    for batch in (2, 3, 7):
        inputs = make_step_inputs(batch=batch, device=device)
        for actual, expected in zip(step(inputs, compiled), step(inputs, decode_twice), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert counter.frame_count == 1


@pytest.mark.parametrize("result", ["out", "state"])
@pytest.mark.parametrize("name", ["state", "x", "A", "D"])
def test_backward_says_that_there_is_none(name, result, device):
    inputs = make_step_inputs(device=device)
    leaf = inputs[name].requires_grad_()
    # A leaf cannot be written to, so the state is a function of it.
    inputs[name] = leaf * 1
    results = {"out": selective_state_update(**inputs), "state": inputs["state"]}
    with pytest.raises(RuntimeError, match=says("selective_state_update is not differentiable", "selective_scan")):
        results[result].sum().backward()


def test_backward_through_a_view_of_a_cache_says_so_too(device):
    """The state of one layer, a view of all layers' states, beside weights that require gradients."""
    inputs = make_step_inputs(device=device)
    cache = torch.stack([inputs["state"], inputs["state"]])
    inputs |= {"A": inputs["A"].requires_grad_(), "state": cache[1]}
    expected = step(inputs | {"A": inputs["A"].detach()})[1]
    selective_state_update(**inputs)
    assert torch.equal(cache[1], expected)
    with pytest.raises(RuntimeError, match=says("selective_state_update is not differentiable")):
        cache.sum().backward()


def test_forward_mode_says_that_there_is_none(device):
    inputs = make_step_inputs(device=device)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        dual = torch.autograd.forward_ad.make_dual(inputs["x"], torch.ones_like(inputs["x"]))
        selective_state_update(**(inputs | {"x": dual}))


def test_state_that_requires_grad_cannot_be_written_to(device):
    inputs = make_step_inputs(device=device)
    inputs["state"].requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        selective_state_update(**inputs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, device):
    inputs = make_step_inputs(device=device)
    expected = step(inputs)
    inputs |= {name: inputs[name].requires_grad_() for name in ("x", "A", "D")}
    with mode():
        actual = step(inputs)
        assert not actual[0].requires_grad and not actual[1].requires_grad
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


def test_version_is_counted_without_gradients(device):
    inputs = make_step_inputs(device=device)
    version = inputs["state"]._version
    with torch.inference_mode():
        selective_state_update(**inputs)
    with torch.no_grad():
        selective_state_update(**inputs)
    assert inputs["state"]._version == version + 2


def test_vmap(device):
    sets = [make_step_inputs(dstate=16, seed=seed, device=device) for seed in range(3)]
    batched = ("state", "x", "dt", "B", "C", "z")
    stacked = {name: torch.stack([s[name] for s in sets]) for name in batched}
    shared = {name: sets[0][name] for name in ("A", "D", "dt_bias")}

    def one(state, x, dt, B, C, z):
        return selective_state_update(state, x, dt, shared["A"], B, C, shared["D"], z, shared["dt_bias"], dt_softplus=True)

    out = torch.vmap(one)(*stacked.values())
    for i, inputs in enumerate(sets):
        expected_out, expected_state = step(inputs | shared)
        assert torch.equal(out[i], expected_out) and torch.equal(stacked["state"][i], expected_state)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("low_state", [False, True], ids=["float32_state", "low_state"])
def test_autocast(low_state, low, device):
    """x, dt, B, C and z are cast, A, D and dt_bias are float32, the state stays what it is."""
    inputs = make_step_inputs(dstate=16, dtype=torch.float32, state_dtype=low if low_state else None, device=device)
    mixed = inputs | {name: inputs[name].to(low) for name in ("x", "B", "D")}
    cast = inputs | {name: inputs[name].to(low) for name in ("x", "dt", "B", "C", "z")} | {"D": inputs["D"].to(low).float()}
    with torch.autocast(device, dtype=low):
        out, state = step(mixed)
    expected = step(cast)
    assert out.dtype == low and state.dtype == (low if low_state else torch.float32)
    assert torch.equal(out, expected[0]) and torch.equal(state, expected[1])


SIZES = {"batch": 2, "dim": 6, "dstate": 4, "groups": 2, "dtype": torch.float32}
BAD_SHAPES = {
    None: [
        ("state", (6, 4), "(batch, dim, dstate) or (batch, heads, headdim, dstate)"),
        ("state", (3, 6, 4), "(batch, dim, dstate) = [2, 6, 4]"),
        ("state", (1, 6, 4), "(batch, dim, dstate) = [2, 6, 4]"),
        ("state", (2, 5, 4), "(batch, dim, dstate) = [2, 6, 4]"),
        ("x", (2,), "(batch, dim)"),
        ("x", (2, 6, 1), "(batch, dim)"),
        ("dt", (2, 1), "(batch, dim) = [2, 6]"),
        ("A", (6, 1), "(dim, dstate) = [6, 4]"),
        ("A", (2, 6, 4), "(dim, dstate) = [6, 4]"),
        ("B", (4,), "(batch, dstate) or (batch, groups, dstate)"),
        ("B", (2, 5), "(batch, dstate) = [2, 4]"),
        ("B", (1, 2, 4), "(batch, groups, dstate) = [2, 2, 4]"),
        ("C", (2, 1, 4), "(batch, groups, dstate) = [2, 2, 4]"),
        ("C", (2, 4), "(batch, groups, dstate) = [2, 2, 4]"),
        ("D", (1,), "(dim,) = [6]"),
        ("D", (6, 4), "(dim,) = [6]"),
        ("z", (1, 6), "(batch, dim) = [2, 6]"),
        ("dt_bias", (2, 6), "(dim,) = [6]"),
    ],
    3: [
        ("state", (2, 3, 5, 4), "(batch, heads, headdim, dstate) = [2, 3, 6, 4]"),
        ("x", (2, 18), "(batch, heads, headdim)"),
        ("dt", (2, 3), "(batch, heads, headdim) = [2, 3, 6]"),
        ("dt", (2, 3, 1), "(batch, heads, headdim) = [2, 3, 6]"),
        ("A", (3,), "(heads, headdim, dstate) = [3, 6, 4]"),
        ("A", (3, 1, 1), "(heads, headdim, dstate) = [3, 6, 4]"),
        ("C", (2, 1, 4), "(batch, groups, dstate) = [2, 3, 4]"),
        ("D", (3,), "(heads, headdim) = [3, 6]"),
        ("z", (2, 3, 1), "(batch, heads, headdim) = [2, 3, 6]"),
        ("dt_bias", (3, 1), "(heads, headdim) = [3, 6]"),
    ],
}


def good_inputs(heads: int | None = None, **options) -> dict[str, Any]:
    return make_step_inputs(**(SIZES | {"heads": heads, "groups": heads or SIZES["groups"]} | options))


@pytest.mark.parametrize(
    ("heads", "name", "shape", "expected"), [(heads, *case) for heads, cases in BAD_SHAPES.items() for case in cases]
)
def test_shapes(heads, name, shape, expected, device):
    inputs = good_inputs(heads, device=device) | {name: torch.zeros(shape, device=device)}
    pattern = says(f"selective_state_update: expected {name} of shape ", expected, ", got ", str([*shape]))
    for place in (device, "meta"):
        moved = {k: v.to(place) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        with pytest.raises(ValueError, match=pattern):
            selective_state_update(**moved)


@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize(("heads", "axis"), [(None, "dim = 6"), (3, "heads = 3")])
def test_groups_that_do_not_divide(heads, axis, groups, device):
    inputs = good_inputs(heads, device=device) | {name: torch.zeros(2, groups, 4, device=device) for name in ("B", "C")}
    message = f"selective_state_update: expected the groups of B and C to divide {axis}, got {groups}"
    with pytest.raises(ValueError, match=says(message)):
        selective_state_update(**inputs)


@pytest.mark.parametrize("dstate", [0, 257])
def test_dstate_outside_the_limits(dstate, device):
    with pytest.raises(ValueError, match=says(f"selective_state_update: expected dstate from 1 to 256, got {dstate}")):
        selective_state_update(**good_inputs(dstate=dstate, device=device))


def test_unknown_discretization_lists_the_known(device):
    with pytest.raises(ValueError, match=says("selective_state_update: unknown discretization 'tustin'")) as error:
        selective_state_update(**good_inputs(device=device) | {"discretization": "tustin"})
    for known in [*reference.DISCRETIZATIONS, *reference.ALIASES]:
        assert re.search(rf"\b{known}\b", str(error.value)), f"{known} is not listed"


BAD_DTYPES = [
    # dtype of the rest, argument, its dtype, what is expected
    (torch.float32, "x", torch.int64, "expected x of dtype Float, Half, BFloat16 or Double, got Long"),
    (torch.float32, "x", torch.complex64, "expected a real x, got ComplexFloat: complex tensors are not supported"),
    (torch.float32, "state", torch.bfloat16, "expected state of dtype Float (with x of dtype Float), got BFloat16"),
    (torch.float32, "state", torch.float64, "expected state of dtype Float (with x of dtype Float), got Double"),
    (torch.float16, "state", torch.bfloat16, "expected state of dtype Float (with x of dtype Half), got BFloat16"),
    (torch.float64, "state", torch.float32, "expected state of dtype Double (with x of dtype Double), got Float"),
    (torch.bfloat16, "dt", torch.float32, "expected dt of dtype BFloat16 (with x of dtype BFloat16), got Float"),
    (torch.bfloat16, "A", torch.bfloat16, "expected A of dtype Float (with x of dtype BFloat16), got BFloat16"),
    (torch.float32, "A", torch.complex64, "expected a real A, got ComplexFloat: complex tensors are not supported"),
    (torch.bfloat16, "B", torch.float32, "expected B of dtype BFloat16 (with x of dtype BFloat16), got Float"),
    (torch.float16, "C", torch.bfloat16, "expected C of dtype Half (with x of dtype Half), got BFloat16"),
    (torch.float16, "z", torch.float32, "expected z of dtype Half (with x of dtype Half), got Float"),
    (torch.float16, "D", torch.bfloat16, "expected D of dtype Float (with x of dtype Half), got BFloat16"),
    (torch.float64, "dt_bias", torch.float32, "expected dt_bias of dtype Double (with x of dtype Double), got Float"),
    (torch.float32, "state_batch_indices", torch.int16, "expected state_batch_indices of dtype Int or Long, got Short"),
    (torch.float32, "state_batch_indices", torch.float32, "expected state_batch_indices of dtype Int or Long, got Float"),
]


@pytest.mark.parametrize(("dtype", "name", "got", "message"), BAD_DTYPES)
def test_dtypes(dtype, name, got, message, device):
    inputs = good_inputs(dtype=dtype, slots=2, device=device)
    with pytest.raises(RuntimeError, match=says("selective_state_update: " + message)):
        selective_state_update(**(inputs | {name: inputs[name].to(got)}))


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 1), ()])
def test_shape_of_indices(shape, device):
    inputs = good_inputs(slots=3, device=device) | {"state_batch_indices": torch.zeros(shape, dtype=torch.int64, device=device)}
    with pytest.raises(ValueError, match=says(f"expected state_batch_indices of shape (batch,) = [2], got {[*shape]}")):
        selective_state_update(**inputs)


ARGUMENTS = ["state", "dt", "A", "B", "C", "D", "z", "dt_bias", "state_batch_indices"]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_mixed_devices(name, device):
    inputs = good_inputs(slots=2, device=device)
    on = str(inputs["x"].device)
    with pytest.raises(
        RuntimeError, match=says(f"selective_state_update: expected {name} on {on} (the device of x), got meta")
    ):
        selective_state_update(**(inputs | {name: inputs[name].to("meta")}))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["x", *ARGUMENTS])
def test_cpu_and_cuda_mixed(name):
    inputs = good_inputs(slots=2)
    expected, got = ("cuda:0", "cpu") if name == "x" else ("cpu", "cuda:0")
    with pytest.raises(RuntimeError, match=says("selective_state_update: expected ", f" on {expected}", f", got {got}")):
        selective_state_update(**(inputs | {name: inputs[name].to("cuda")}))


@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C"])
def test_required_arguments(name, device):
    inputs = good_inputs(device=device)
    del inputs[name]
    with pytest.raises(TypeError, match=name):
        selective_state_update(**inputs)


def test_state_whose_elements_share_memory(device):
    inputs = good_inputs(device=device)
    inputs["state"] = inputs["state"][:1].expand(2, -1, -1)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers to a single memory location"):
        selective_state_update(**inputs)


def test_bad_arguments_leave_the_state_alone(device):
    inputs = good_inputs(device=device)
    before = inputs["state"].clone()
    with pytest.raises(ValueError, match="expected C of shape"):
        selective_state_update(**(inputs | {"C": inputs["C"][:, :1]}))
    assert torch.equal(inputs["state"], before)


@pytest.mark.cuda
@pytest.mark.parametrize("slots", [None, 6])
def test_cuda_graph(slots):
    """A captured step replays on new values in the same tensors, the slots' too, and goes on with the same state."""
    draws = [
        make_step_inputs(batch=3, dim=70, dstate=16, slots=slots, dtype=torch.float32, device="cuda", seed=s) for s in range(4)
    ]
    static = {k: v.clone() if isinstance(v, Tensor) else v for k, v in draws[0].items()}
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        step(static)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = selective_state_update(**static)

    state = draws[0]["state"].clone()
    static["state"].copy_(state)
    for shift, draw in enumerate(draws):
        if slots is not None:
            draw["state_batch_indices"] = (draw["state_batch_indices"] + shift) % slots
        for name, value in draw.items():
            if isinstance(value, Tensor) and name != "state":
                static[name].copy_(value)
        graph.replay()
        expected = selective_state_update(**(draw | {"state": state}))
        assert torch.equal(out, expected) and torch.equal(static["state"], state)


@pytest.mark.cuda
def test_runs_on_the_current_stream():
    """A step that waits for a long write on its own stream sees what was written."""
    inputs = make_step_inputs(batch=4, dim=512, dstate=16, dtype=torch.float32, device="cuda")
    expected, _ = step(inputs)
    values, inputs["x"] = inputs["x"], torch.full_like(inputs["x"], float("nan"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        inputs["x"].copy_(values)
        out = selective_state_update(**inputs)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.cuda
def test_runs_on_the_device_of_its_arguments():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    inputs = make_step_inputs(dstate=16, dtype=torch.float32, device="cuda:1")
    assert torch.cuda.current_device() == 0
    out, _ = assert_matches_reference(inputs)
    assert out.device == torch.device("cuda:1")


@pytest.mark.cuda
@every_dtype
def test_cuda_agrees_with_the_cpu(dtype, state_dtype):
    """The same formulas on both: no further apart than the order of a sum and the last bits of an exponential."""
    on_cpu = make_step_inputs(dim=300, dstate=128, dtype=dtype, state_dtype=state_dtype, discretization="foh")
    on_cuda = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in on_cpu.items()}
    for cuda, cpu in zip(step(on_cuda), step(on_cpu), strict=True):
        eps = max(torch.finfo(cuda.dtype).eps, 4e-7 if dtype != torch.float64 else 0)
        torch.testing.assert_close(cuda.cpu(), cpu, rtol=8 * eps, atol=8 * eps * cpu.abs().max().item())
