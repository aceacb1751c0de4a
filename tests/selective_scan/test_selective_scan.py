"""selective_scan: values, against the float64 reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import LAYOUTS, METHODS, arrange, parameter_dtype
from selective_scan_helpers import (
    CHUNK,
    MINIMAL,
    SELECTIVE_SCAN,
    assert_matches_reference,
    evaluate,
    make_inputs,
    reference_scan,
)

from ssm_kernels import selective_scan

OPERATOR = "selective_scan"
pytestmark = pytest.mark.usefixtures("kernel")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LENGTHS = sorted({0, 1, 2, 63, 64, 65, 1000, 4097, CHUNK - 1, CHUNK, CHUNK + 1})

every_method = pytest.mark.parametrize("method", METHODS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit, NaNs included."""
    assert actual.keys() == expected.keys()
    for name in actual:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@every_method
@every_dtype
def test_values(method, dtype, device):
    inputs = make_inputs(dim=6, seqlen=150, dstate=16, groups=2, discretization=method, dtype=dtype, device=device)
    results = assert_matches_reference(inputs, gradients=False)
    assert results["out"].dtype == dtype and results["last_state"].dtype == parameter_dtype(dtype)
    assert results["out"].shape == inputs["u"].shape and results["last_state"].shape == inputs["initial_state"].shape


@every_method
@pytest.mark.parametrize("seqlen", LENGTHS)
def test_lengths(seqlen, method, device):
    inputs = make_inputs(batch=1, dim=3, seqlen=seqlen, dstate=2, discretization=method, device=device)
    assert_matches_reference(inputs, gradients=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("seqlen", LENGTHS)
def test_lengths_in_low_precision(seqlen, layout, dtype, device):
    inputs = make_inputs(batch=2, dim=9, seqlen=seqlen, dstate=4, dtype=dtype, layout=layout, device=device)
    assert_matches_reference(inputs, gradients=False)


@pytest.mark.parametrize("seqlen", [63, 64, 65, 127, 128, 129, 600])
def test_lengths_with_long_chunks(seqlen, device):
    inputs = make_inputs(batch=2, dim=5, seqlen=seqlen, dstate=17, device=device)
    assert_matches_reference(inputs)


@pytest.mark.parametrize("initial_state", [True, False])
def test_no_steps(initial_state, device):
    inputs = make_inputs(seqlen=0, initial_state=initial_state, device=device)
    out, last_state = selective_scan(**inputs, return_last_state=True)
    assert out.shape == (2, 4, 0)
    before = inputs["initial_state"] if initial_state else torch.zeros_like(last_state)
    assert torch.equal(last_state, before)
    assert last_state.data_ptr() != before.data_ptr()


@pytest.mark.parametrize("seqlen", [0, 7])
def test_empty_batch(seqlen, device):
    out, last_state = selective_scan(**make_inputs(batch=0, seqlen=seqlen, device=device), return_last_state=True)
    assert out.shape == (0, 4, seqlen) and last_state.shape == (0, 4, 3)


@pytest.mark.parametrize("seqlen", [0, 70])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("form", ["variable", "constant"])
@every_dtype
def test_no_channels(dtype, form, layout, seqlen, device):
    for groups in (None, 1, 3):
        inputs = make_inputs(dim=0, seqlen=seqlen, B=form, C=form, groups=groups, dtype=dtype, layout=layout, device=device)
        out, last_state = selective_scan(**inputs, return_last_state=True)
        assert out.shape == (2, 0, seqlen) and out.dtype == dtype
        assert last_state.shape == (2, 0, 3) and last_state.dtype == parameter_dtype(dtype)


def test_result_without_and_with_the_last_state(device):
    inputs = make_inputs(device=device)
    out = selective_scan(**inputs)
    assert isinstance(out, torch.Tensor)
    with_state = selective_scan(**inputs, return_last_state=True)
    assert isinstance(with_state, tuple) and len(with_state) == 2
    assert torch.equal(out, with_state[0])


def slice_steps(inputs: dict, start: int, stop: int, state: torch.Tensor | None) -> dict:
    per_step = {"u", "delta", "z"} | {name for name in ("B", "C") if inputs[name].dim() > 2}
    return {k: v[..., start:stop] if k in per_step and v is not None else v for k, v in inputs.items()} | {
        "initial_state": state
    }


@every_method
@every_dtype
@pytest.mark.parametrize("cuts", [[CHUNK], [37], [1, 100], list(range(1, 130))], ids=["chunk", "37", "1_100", "every_step"])
def test_parts_with_the_state_carried_equal_the_whole(cuts, dtype, method, device):
    """Two halves, three unequal parts and single steps."""
    inputs = make_inputs(batch=1, dim=5, seqlen=130, dstate=3, discretization=method, dtype=dtype, device=device)
    out, last_state = selective_scan(**inputs, return_last_state=True)
    state, parts = inputs["initial_state"], []
    for start, stop in itertools.pairwise([0, *cuts, 130]):
        part, state = selective_scan(**slice_steps(inputs, start, stop, state), return_last_state=True)
        parts.append(part)
    # On CUDA a cut moves the boundaries of the tiles, and with them the order in which steps are combined.
    roundings = 8 if device == "cpu" else 64
    tolerance = roundings * torch.finfo(parameter_dtype(dtype)).eps
    torch.testing.assert_close(state, last_state, rtol=tolerance, atol=tolerance)
    rounding = max(tolerance, torch.finfo(dtype).eps)
    torch.testing.assert_close(torch.cat(parts, dim=-1), out, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("chosen", [*itertools.product([False, True], repeat=5)], ids=lambda c: "".join("01"[x] for x in c))
def test_every_combination_of_options(chosen, device):
    options = dict(zip(MINIMAL, chosen, strict=True))
    for dtype, layout in itertools.product((torch.float64, torch.float32), ("contiguous", "transposed")):
        inputs = make_inputs(dim=9, seqlen=7, **options, dtype=dtype, layout=layout, device=device)
        assert_matches_reference(inputs, gradients=False)


@pytest.mark.parametrize("groups", [None, 1, 2, 3, 6])
@pytest.mark.parametrize("C", ["variable", "constant"])
@pytest.mark.parametrize("B", ["variable", "constant"])
def test_forms_of_B_and_C(B, C, groups, device):
    for dtype, layout in itertools.product((torch.float64, torch.bfloat16), ("contiguous", "transposed")):
        inputs = make_inputs(dim=6, seqlen=70, B=B, C=C, groups=groups, dtype=dtype, layout=layout, device=device)
        assert_matches_reference(inputs, gradients=False)


@pytest.mark.parametrize(("B_groups", "C_groups"), [(None, 2), (4, None), (2, 4), (1, 2)])
def test_groups_of_B_and_C_are_independent(B_groups, C_groups, device):
    inputs = make_inputs(dim=4, groups=B_groups, device=device)
    inputs["C"] = make_inputs(dim=4, groups=C_groups, seed=5, device=device)["C"]
    assert_matches_reference(inputs, gradients=False)


@every_method
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("dstate", [1, 3, 16, 17, 64, 256])
def test_state_sizes(dstate, layout, method, device):
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(dim=5, seqlen=6, dstate=dstate, discretization=method, dtype=dtype, layout=layout, device=device)
        assert_matches_reference(inputs, gradients=False)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dim", [1, 5, 16, 33, 70])
def test_numbers_of_channels(dim, batch, layout, device):
    """Whole vectors and blocks of channels, and their tails; one group, and a group per channel."""
    for dtype, groups in itertools.product(DTYPES, (1, dim)):
        inputs = make_inputs(
            batch=batch, dim=dim, seqlen=9, dstate=4, groups=groups, dtype=dtype, layout=layout, device=device, seed=dim
        )
        assert_matches_reference(inputs, gradients=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name", ["u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state", "constant B", "constant C"]
)
def test_layout_of_each_argument(name, layout, dtype, device):
    name, form = (name[-1], "constant") if name.startswith("constant") else (name, "variable")
    inputs = make_inputs(dim=6, seqlen=70, groups=2, dtype=dtype, device=device, **{"B": form, "C": form})
    inputs[name] = arrange(inputs[name], layout)
    assert_matches_reference(inputs, gradients=False)


EXPANDED = {
    "u over batch": ("u", 0),
    "u over channels": ("u", 1),
    "u over time": ("u", 2),
    "delta over channels": ("delta", 1),
    "delta over time": ("delta", 2),
    "A over channels": ("A", 0),
    "A over states": ("A", 1),
    "B over batch": ("B", 0),
    "B over groups": ("B", 1),
    "B over time": ("B", 3),
    "C over states": ("C", 2),
    "D": ("D", 0),
    "z over batch": ("z", 0),
    "delta_bias": ("delta_bias", 0),
    "initial_state over batch": ("initial_state", 0),
}


@pytest.mark.parametrize("which", EXPANDED)
def test_expanded_arguments(which, device):
    name, axis = EXPANDED[which]
    for layout in ("contiguous", "transposed"):
        inputs = make_inputs(dim=6, seqlen=9, groups=2, layout=layout, device=device)
        inputs[name] = inputs[name].narrow(axis, 0, 1).expand(inputs[name].shape)
        assert 0 in inputs[name].stride()
        assert_matches_reference(inputs, gradients=False)


def test_halves_of_one_projection(device):
    """u and z as Mamba's in-projection gives them: the two halves of one tensor, channels contiguous."""
    projected = make_inputs(dim=12, seqlen=70, device=device)["u"].transpose(1, 2).contiguous().transpose(1, 2)
    inputs = make_inputs(dim=6, seqlen=70, device=device)
    inputs["u"], inputs["z"] = projected.chunk(2, dim=1)
    assert not inputs["z"].is_contiguous() and inputs["z"].storage_offset() > 0
    assert_matches_reference(inputs, gradients=False)


def test_offsets_beyond_32_bits(device, needs_gpu_memory):
    """Two batch rows are 2^31 elements apart."""
    needs_gpu_memory(device, 5)
    inputs = make_inputs(batch=2, dim=3, seqlen=8, dtype=torch.bfloat16, device=device)
    expected = evaluate(SELECTIVE_SCAN, inputs)
    far = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=device).as_strided((2, 3, 8), (2**31, 8, 1))
    inputs["u"] = far.copy_(inputs["u"])
    assert_equal(evaluate(SELECTIVE_SCAN, inputs), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_native_layouts_are_not_copied(layout, dtype, device):
    """Nothing is copied where time or channels are contiguous, and the output has the input's layout."""
    inputs = make_inputs(dim=6, seqlen=70, dtype=dtype, device=device)
    inputs |= {name: arrange(inputs[name], layout) for name in ("u", "delta", "z", "B", "C")}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        out = selective_scan(**inputs)
    names = {event.name for event in profile.events()}
    assert "ssm_kernels::_selective_scan_fwd" in names
    assert not names & {"aten::copy_", "aten::clone", "aten::contiguous", "aten::to", "aten::_to_copy", "aten::reshape"}
    assert out.stride() == inputs["u"].stride()


def test_softplus_threshold(device):
    """softplus is the identity above 20, as PyTorch's."""
    inputs = make_inputs(batch=1, dim=3, seqlen=6, delta_bias=False, device=device)
    steps = torch.tensor([-800.0, -40.0, 19.999999, 20.0, 20.000001, 700.0], dtype=torch.float64, device=device)
    inputs["delta"] = steps.expand(1, 3, 6)
    for dtype in (torch.float64, torch.float32):
        cast = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        assert_matches_reference(cast, gradients=False)


@every_method
@pytest.mark.parametrize("argument", ["A", "delta"])
def test_towards_zero(argument, method, device):
    """A -> 0 and delta -> 0 are ordinary points, from both sides and at zero itself."""
    tiny = [0.0, -0.0, 1e-300, -1e-300, 1e-38, -1e-30, 1e-16, -1e-12, 1e-8, -1e-6, 1e-4, -1e-3]
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(
            dim=len(tiny), seqlen=9, dstate=2, delta_softplus=False, delta_bias=False, dtype=dtype, device=device
        )
        inputs["discretization"] = method
        values = torch.tensor(tiny, dtype=torch.float64).to(dtype).to(device)
        inputs[argument] = values[:, None].expand(-1, 2) if argument == "A" else values[None, :, None].expand(2, -1, 9)
        results = assert_matches_reference(inputs, gradients=False)
        assert all(value.isfinite().all() for value in results.values())


@every_method
def test_large_z(method, device):
    """Steps far outside the accurate range: the formulas' values, whether they decay, grow or overflow."""
    large = [-3.0, -20.0, -80.0, -90.0, -700.0, -800.0, -1e4, 3.0, 20.0, 80.0, 700.0]
    for dtype, sizes in ((torch.float64, [*large, -1e8, 1e4]), (torch.float32, large)):
        inputs = make_inputs(dim=len(sizes), seqlen=1, dstate=2, **MINIMAL, dtype=dtype, device=device)
        inputs |= {"discretization": method, "initial_state": torch.ones_like(inputs["A"]).expand(2, -1, -1)}
        inputs["A"] = torch.tensor(sizes, dtype=dtype, device=device)[:, None].expand(-1, 2)
        inputs["delta"] = torch.ones_like(inputs["delta"])
        out, last_state = selective_scan(**inputs, return_last_state=True)
        expected_out, expected_state = reference_scan(**inputs, return_last_state=True)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(out, expected_out, rtol=tolerance, atol=tolerance, equal_nan=True)
        torch.testing.assert_close(last_state, expected_state, rtol=tolerance, atol=tolerance, equal_nan=True)


@every_method
def test_long_decay_stays_finite(method, device):
    """Strong decay over a long sequence, where log-space or divided states overflow."""
    inputs = make_inputs(batch=1, dim=8, seqlen=1000, dstate=4, discretization=method, dtype=torch.float32, device=device)
    if method != "euler":  # whose |Abar| exceeds 1 there
        inputs["A"] = inputs["A"] * 16
    results = assert_matches_reference(inputs, gradients=False)
    assert all(value.isfinite().all() for value in results.values())


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["u", "delta", "z", "A", "D", "delta_bias", "initial_state"])
def test_nonfinite_stays_in_its_channel(name, value, layout, device):
    """Where the reference has no NaN or Inf, every bit is as without it; where it has one, so has the kernel."""
    for dtype in (torch.float64, torch.float32):
        inputs = make_inputs(dim=9, seqlen=70, dtype=dtype, layout=layout, device=device)
        clean = evaluate(SELECTIVE_SCAN, inputs)
        inputs[name] = inputs[name].clone()
        index = {"A": (3, 1), "D": (3,), "delta_bias": (3,), "initial_state": (1, 3, 2)}.get(name, (1, 3, 20))
        inputs[name][index] = value
        actual, expected = evaluate(SELECTIVE_SCAN, inputs), evaluate(SELECTIVE_SCAN.reference, inputs)
        for result in ("out", "last_state"):
            touched = torch.zeros_like(clean[result], dtype=torch.bool)
            touched[(slice(None) if name in ("A", "D", "delta_bias") else 1), 3] = True
            assert torch.equal(actual[result][~touched], clean[result][~touched])
            assert torch.equal(actual[result].isfinite(), expected[result].isfinite())
            # Where Abar is infinite, a parallel scan adds up infinities of both signs: NaN, where a loop has one of them.
            if device == "cpu" or name != "A" or value != float("inf"):
                assert torch.equal(actual[result].isnan(), expected[result].isnan())
                assert torch.equal(actual[result].isposinf(), expected[result].isposinf())
        if value != -float("inf") or name not in ("A", "delta", "delta_bias"):  # exp(-inf) = softplus(-inf) = 0
            assert not all(result.isfinite().all() for result in actual.values())


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("name", ["B", "C"])
def test_nonfinite_of_a_group_stays_in_its_group(name, layout, device):
    inputs = make_inputs(dim=10, seqlen=70, groups=2, dtype=torch.float32, layout=layout, device=device)
    clean = evaluate(SELECTIVE_SCAN, inputs)
    inputs[name] = inputs[name].clone()
    inputs[name][1, 0, 2, 20] = float("nan")
    actual = evaluate(SELECTIVE_SCAN, inputs)
    hit = torch.zeros_like(clean["out"], dtype=torch.bool)
    hit[1, :5, 20 : None if name == "B" else 21] = True  # B's enters the state, C's only the one output
    assert torch.equal(actual["out"].isnan(), hit)
    assert torch.equal(actual["out"][~hit], clean["out"][~hit])
    hit = torch.zeros_like(clean["last_state"], dtype=torch.bool)
    hit[1, :5, 2] = name == "B"
    assert torch.equal(actual["last_state"].isnan(), hit)
    assert torch.equal(actual["last_state"][~hit], clean["last_state"][~hit])


def test_values_do_not_depend_on_the_neighbors(device):
    """A channel alone, bit for bit as among others."""
    inputs = make_inputs(batch=3, dim=33, seqlen=70, dtype=torch.float32, device=device)
    out = selective_scan(**inputs)
    channel = {k: v[:, 17:18] if k in ("u", "delta", "z", "initial_state") else v for k, v in inputs.items()}
    channel |= {k: inputs[k][17:18] for k in ("A", "D", "delta_bias")}
    assert torch.equal(selective_scan(**channel), out[:, 17:18])


def test_alias_is_the_same_method(device):
    assert torch.equal(
        selective_scan(**make_inputs(discretization="zoh_exact", device=device)),
        selective_scan(**make_inputs(discretization="foh", device=device)),
    )


def test_arguments_are_left_as_they_were(device):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_inputs(dtype=dtype, device=device)
        before = {k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)}
        selective_scan(**inputs)
        assert all(torch.equal(inputs[name], value) for name, value in before.items())
