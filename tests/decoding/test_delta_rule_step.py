"""delta_rule_step: values in every dtype, layout and option, the states in place, slots."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from decoding_helpers import DELTA_RULE_STEP
from delta_rule_step_helpers import CASES, DTYPES, GATES, assert_step_matches_reference, make_inputs, step
from helpers import LAYOUTS, arrange, says
from operator_spec import as_float64
from torch import Tensor

from ssm_kernels import delta_rule_step, reference

OPERATOR = "delta_rule_step"

every_dtype = pytest.mark.parametrize(("dtype", "state_dtype"), DTYPES, ids=lambda d: str(d).removeprefix("torch."))
every_case = pytest.mark.parametrize("case", CASES)
every_gate = pytest.mark.parametrize("gate", GATES)


def updated_by_hand(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """One token and one update with a gate a head, as matrices in float64: S <- S (I - beta k k^T) e^g + beta v k^T."""
    out, new = [], []
    for b, h in itertools.product(range(inputs["q"].shape[0]), range(inputs["v"].shape[1])):
        group = inputs["v"].shape[1] // inputs["q"].shape[1]
        q, k = (inputs[name][b, h // group].double() for name in ("q", "k"))
        v, beta, g = inputs["v"][b, h].double(), inputs["beta"][b, h].double(), inputs["g"][b, h].double()
        S = inputs["states"][b, h].double()
        erase = torch.eye(len(k), dtype=torch.float64, device=k.device) - beta * torch.outer(k, k)
        S = math.exp(g) * S @ erase + beta * torch.outer(v, k)
        new.append(S)
        out.append(S @ q / math.sqrt(len(k)))
    return torch.stack(out).view_as(inputs["v"]), torch.stack(new).view_as(inputs["states"])


def test_formula(device):
    inputs = make_inputs(heads=2, value_heads=6, key_dim=7, value_dim=5, device=device)
    for actual, expected in zip(step(inputs), updated_by_hand(inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


@every_case
@every_dtype
def test_matches_reference(dtype, state_dtype, case, device):
    for slots, gate_dtype in ((None, None), (5, dtype)):
        options = {"dtype": dtype, "state_dtype": state_dtype, "gate_dtype": gate_dtype, "slots": slots, "device": device}
        assert_step_matches_reference(make_inputs(**CASES[case], **options, batch=3))


KEY_DIMS = [1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 33, 48, 64, 96, 100, 128, 129, 160, 192, 255, 256, 257, 384, 512]


@pytest.mark.parametrize("key_dim", KEY_DIMS)
@every_dtype
def test_every_key_dim(dtype, state_dtype, key_dim, device):
    for gate, value_dim in (("head", 3), ("column", 40)):
        inputs = make_inputs(
            key_dim=key_dim, value_dim=value_dim, gate=gate, qk_l2norm=True, dtype=dtype, state_dtype=state_dtype, device=device
        )
        assert_step_matches_reference(inputs)


@pytest.mark.parametrize("value_dim", [1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 192, 512])
@every_dtype
def test_every_value_dim(dtype, state_dtype, value_dim, device):
    for key_dim in (16, 40, 129):
        inputs = make_inputs(key_dim=key_dim, value_dim=value_dim, dtype=dtype, state_dtype=state_dtype, device=device)
        assert_step_matches_reference(inputs)


@pytest.mark.parametrize(
    "sizes", [(64, 32, 32, 128, 128), (5, 16, 32, 128, 128), (3, 30, 30, 96, 192), (2, 6, 6, 256, 512), (1, 2, 8, 128, 128)]
)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sizes_of_models(state_dtype, sizes, device):
    """Enough rows for long tiles, and few for short ones. The CPU's kernel takes the place of the reference's loop."""
    batch, heads, value_heads, key_dim, value_dim = sizes
    if device == "cpu" and batch > 8:
        pytest.skip("the reference would take seconds")
    options = {"batch": batch, "heads": heads, "value_heads": value_heads, "key_dim": key_dim, "value_dim": value_dim}
    inputs = make_inputs(**options, qk_l2norm=True, dtype=torch.bfloat16, state_dtype=state_dtype, device=device)
    if device == "cpu":
        assert_step_matches_reference(inputs)
        return
    on_cpu = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    for cuda, cpu in zip(step(inputs), step(on_cpu), strict=True):
        eps = max(torch.finfo(cuda.dtype).eps, 4e-7)
        torch.testing.assert_close(cuda.cpu(), cpu, rtol=8 * eps, atol=8 * eps * cpu.abs().max().item())


@pytest.mark.parametrize("heads, value_heads", [(1, 1), (1, 3), (2, 6), (4, 4), (3, 12)])
def test_grouped_value_heads(heads, value_heads, device):
    inputs = make_inputs(heads=heads, value_heads=value_heads, device=device)
    expected = assert_step_matches_reference(inputs)
    repeated = {name: inputs[name].repeat_interleave(value_heads // heads, dim=1) for name in ("q", "k")}
    for actual, value in zip(step(inputs | repeated), expected, strict=True):
        assert torch.equal(actual, value)


@pytest.mark.parametrize("updates", [2, 3])
@every_gate
def test_several_updates_of_a_token(gate, updates, device):
    """The state decays before the first and is read after the last."""
    for (dtype, state_dtype), key_dim in itertools.product(DTYPES[:4], (16, 33, 256)):
        options = {"num_householder": updates, "gate": gate, "key_dim": key_dim, "qk_l2norm": True, "dtype": dtype}
        inputs = make_inputs(**options, state_dtype=state_dtype, device=device)
        assert inputs["k"].shape[:2] == (2, updates)
        assert_step_matches_reference(inputs)
    inputs = make_inputs(num_householder=updates, gate=gate, device=device)
    out, states = step(inputs)
    separate = {name: inputs[name] for name in ("q", "states")}
    for i in range(updates):
        parts = {name: inputs[name][:, i] for name in ("k", "v", "beta")}
        found, separate["states"] = step(separate | parts | {"g": inputs["g"] if i == 0 else None})
    torch.testing.assert_close(out, found, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(states, separate["states"], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("layout", LAYOUTS)
@every_dtype
def test_layouts(layout, dtype, state_dtype, device):
    for key_dim, gate in ((16, "column"), (33, "head"), (128, "head")):
        options = {"key_dim": key_dim, "gate": gate, "A_log": True, "dt_bias": True, "state_dtype": state_dtype}
        assert_step_matches_reference(make_inputs(**options, dtype=dtype, slots=4, layout=layout, device=device))


@pytest.mark.parametrize("name", ["states", "q", "k", "v", "beta", "g", "A_log", "dt_bias"])
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layout_of_each_argument(layout, name, device):
    """One argument that is laid out otherwise, beside contiguous ones, gives the same bits."""
    for dtype in (torch.float32, torch.bfloat16):
        options = {"gate": "column", "A_log": True, "dt_bias": True, "key_dim": 64, "value_dim": 20}
        inputs = make_inputs(**options, dtype=dtype, state_dtype=dtype, device=device)
        expected = step(inputs)
        for actual, value in zip(step(inputs | {name: arrange(inputs[name], layout)}), expected, strict=True):
            assert torch.equal(actual, value)


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_columns_that_start_at_any_element(offset, device):
    """Slices of wider rows: the same bits as of rows that start at vectors."""
    for (dtype, state_dtype), key_dim in itertools.product(DTYPES, (64, 128, 384)):
        inputs = make_inputs(key_dim=key_dim, value_dim=24, dtype=dtype, state_dtype=state_dtype, device=device)
        sliced = {}
        for name in ("states", "q", "k", "v"):
            x = inputs[name]
            wide = x.new_full((*x.shape[:-1], x.shape[-1] + 5), math.nan)
            sliced[name] = wide[..., offset : offset + x.shape[-1]].copy_(x)
        expected = step(inputs)
        for actual, value in zip(step(inputs | sliced), expected, strict=True):
            assert torch.equal(actual, value)


def test_states_with_keys_in_front(device):
    """A cache of (key_dim, value_dim) states, as transformers has, is a transposed view."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_inputs(key_dim=128, value_dim=48, dtype=dtype, state_dtype=dtype, device=device)
        expected = step(inputs)
        cache = inputs["states"].transpose(-1, -2).contiguous()
        out = delta_rule_step(**inputs | {"states": cache.transpose(-1, -2)})
        assert torch.equal(out, expected[0]) and torch.equal(cache.transpose(-1, -2), expected[1])


@pytest.mark.parametrize("g", [-1e-4, -5.0, -30.0, -400.0, -math.inf])
@pytest.mark.parametrize("gate", ["head", "column"])
def test_strong_gates(gate, g, device):
    """Any gate down to minus infinity, on some rows."""
    for dtype, state_dtype in DTYPES:
        inputs = make_inputs(gate=gate, key_dim=40, dtype=dtype, state_dtype=state_dtype, device=device)
        inputs["g"][1] = g
        out, states = assert_step_matches_reference(inputs)
        assert out.isfinite().all() and states.isfinite().all()


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_strengths_of_a_write(beta, device):
    """0 leaves the state; 1 replaces what the key gives; 2 reflects it."""
    inputs = make_inputs(gate=None, device=device) | {"qk_l2norm": True, "scale": 1.0}
    inputs["beta"] = torch.full_like(inputs["beta"], beta)
    inputs["q"] = inputs["k"]
    out, states = assert_step_matches_reference(inputs)
    before = delta_rule_step(**inputs | {"states": inputs["states"].clone(), "beta": torch.zeros_like(inputs["beta"])})
    torch.testing.assert_close(out, before + beta * (inputs["v"] - before), rtol=1e-4, atol=1e-4)
    assert torch.equal(states, inputs["states"]) == (beta == 0)


def test_scale_is_of_the_key_dim_by_default(device):
    inputs = make_inputs(key_dim=25, device=device)
    expected = step(inputs)
    for actual, value in zip(step(inputs | {"scale": 0.2}), expected, strict=True):
        torch.testing.assert_close(actual, value, rtol=1e-14, atol=1e-14)
    assert step(inputs | {"scale": 0.0})[0].count_nonzero() == 0


def test_rows_of_zeros_have_a_norm(device):
    inputs = make_inputs(dtype=torch.float32, device=device) | {"qk_l2norm": True}
    inputs["q"][0], inputs["k"][1] = 0, 0
    out, states = assert_step_matches_reference(inputs)
    assert out[0].count_nonzero() == 0 and states.isfinite().all()


@pytest.mark.parametrize("names", ["beta", "g", "A_log", "dt_bias", "beta g A_log dt_bias"])
def test_gates_in_the_dtype_of_q(names, device):
    for (dtype, state_dtype), gate, key_dim in itertools.product(DTYPES[2:], ("head", "column"), (16, 21)):
        options = {"gate": gate, "A_log": True, "dt_bias": True, "key_dim": key_dim, "dtype": dtype, "state_dtype": state_dtype}
        inputs = make_inputs(**options, device=device)
        cast = inputs | {name: inputs[name].to(dtype) for name in names.split()}
        wide = cast | {name: cast[name].float() for name in names.split()}
        for actual, expected in zip(step(cast), step(wide), strict=True):
            assert torch.equal(actual, expected)


def test_states_are_updated_in_place(device):
    inputs = make_inputs(device=device)
    states, others = inputs["states"], {k: v.clone() for k, v in inputs.items() if isinstance(v, Tensor) and k != "states"}
    address, version = states.data_ptr(), states._version
    _, expected = step(inputs)
    out = delta_rule_step(**inputs)
    assert states.data_ptr() == address and torch.equal(states, expected)
    assert states._version == version + 1
    assert all(torch.equal(inputs[name], value) for name, value in others.items())
    storages = {x.untyped_storage().data_ptr() for x in inputs.values() if isinstance(x, Tensor)}
    assert out.untyped_storage().data_ptr() not in storages


NOTHING = [{"batch": 0}, {"value_dim": 0}, {"value_heads": 0}, {"batch": 0, "tokens": 3}, {"tokens": 0}]


@pytest.mark.parametrize("sizes", NOTHING, ids=str)
def test_nothing_to_do(sizes, device):
    inputs = make_inputs(**sizes, dtype=torch.float32, device=device)
    out, states = step(inputs)
    assert out.numel() == 0 and torch.equal(states, inputs["states"])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["states", "v", "beta", "g"])
def test_not_finite_stays_in_its_row(name, value, device):
    """In its row of the state, or its head."""
    for key_dim in (13, 16, 128):
        inputs = make_inputs(key_dim=key_dim, value_dim=40, dtype=torch.float32, device=device)
        clean_out, clean_states = step(inputs)
        tensor = inputs[name].clone()
        place = (1, 2, 9) if name in ("states", "v") else (1, 2)
        tensor[place] = value
        out, states = step(inputs | {name: tensor})
        others = torch.ones_like(out, dtype=torch.bool)
        others[place] = False
        assert torch.equal(out[others], clean_out[others]) and torch.equal(states[others], clean_states[others])
        assert out[place].isfinite().all() == (name == "g" and value == -math.inf)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_slots(strided, dtype, device):
    """Slots that no row uses are poisoned: they are neither read nor written."""
    for key_dim in (16, 13):
        inputs = make_inputs(batch=5, key_dim=key_dim, slots=9, dtype=torch.float32, device=device)
        indices = torch.tensor([7, -1, 0, torch.iinfo(dtype).min, 3], dtype=dtype, device=device)
        inputs["state_batch_indices"] = torch.stack([indices, indices.new_full((5,), 8)], dim=1)[:, 0] if strided else indices
        untouched, used = [1, 2, 4, 5, 6, 8], [0, 3, 7]
        inputs["states"][untouched] = math.nan
        out, states = step(inputs)
        assert states[untouched].isnan().all() and states[used].isfinite().all()
        assert out.isfinite().all() and out[[1, 3]].count_nonzero() == 0
        exact_out, exact_states = reference.delta_rule_step(**as_float64(inputs))
        torch.testing.assert_close(out.double(), exact_out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states[used].double(), exact_states[used], rtol=1e-5, atol=1e-5)


def test_padding_does_not_read_the_inputs_into_the_output(device):
    inputs = make_inputs(batch=3, slots=3, dtype=torch.float32, device=device)
    inputs["state_batch_indices"] = torch.tensor([0, -1, 2], device=device)
    for name in ("q", "k", "v", "beta", "g"):
        inputs[name][1] = math.nan
    out, _ = step(inputs)
    assert out.isfinite().all() and out[1].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slot_out_of_range(dtype, device):
    for key_dim in (16, 13):
        inputs = make_inputs(batch=3, key_dim=key_dim, slots=4, dtype=torch.float32, device=device)
        inputs["state_batch_indices"] = torch.tensor([1, 4, 2], dtype=dtype, device=device)
        before = inputs["states"].clone()
        if device == "cpu":
            with pytest.raises(
                ValueError, match=says("expected state_batch_indices below the number of slots, 4, got 4 at position 1")
            ):
                delta_rule_step(**inputs)
            assert torch.equal(inputs["states"], before)
        else:
            out = delta_rule_step(**inputs)
            assert out[1].isnan().all() and out[[0, 2]].isfinite().all()
            assert torch.equal(inputs["states"][[0, 3]], before[[0, 3]])


def test_slot_of_two_rows(device):
    """On the CPU an error; on CUDA a race. Padding may be repeated."""
    inputs = make_inputs(batch=6, slots=4, dtype=torch.float32, device="cpu")
    before = inputs["states"].clone()
    inputs["state_batch_indices"] = torch.tensor([-1, 2, 0, -1, 2, 3])
    message = "delta_rule_step: expected distinct state_batch_indices, got 2 at positions 1 and 4"
    with pytest.raises(ValueError, match=says(message)):
        delta_rule_step(**inputs)
    assert torch.equal(inputs["states"], before)


def test_more_slots_than_a_32_bit_offset_reaches(device, needs_gpu_memory):
    """Two slots are 2^31 elements apart."""
    needs_gpu_memory(device, 5)
    inputs = make_inputs(value_dim=8, key_dim=16, slots=2, dtype=torch.float16, state_dtype=torch.float16, device=device)
    expected = step(inputs)
    far = torch.empty(2**31 + 1024, dtype=torch.float16, device=device).as_strided((2, 4, 8, 16), (2**31, 128, 16, 1))
    far.copy_(inputs["states"])
    out = delta_rule_step(**(inputs | {"states": far}))
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(far, expected[1])


@pytest.mark.cuda
@every_dtype
def test_cuda_agrees_with_the_cpu(dtype, state_dtype):
    """The same formulas on both: no further apart than the order of a sum and the last bits of an exponential."""
    for key_dim in (128, 131):
        on_cpu = make_inputs(key_dim=key_dim, value_dim=72, gate="column", A_log=True, dtype=dtype, state_dtype=state_dtype)
        on_cuda = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in on_cpu.items()}
        for cuda, cpu in zip(step(on_cuda), step(on_cpu), strict=True):
            eps = max(torch.finfo(cuda.dtype).eps, 4e-7 if dtype != torch.float64 else 0)
            torch.testing.assert_close(cuda.cpu(), cpu, rtol=8 * eps, atol=8 * eps * cpu.abs().max().item())


@pytest.mark.cuda
def test_kernels_agree_to_the_bit():
    """Long tiles and short ones, vectors and copies through shared memory: a row does not depend on the others."""
    for (dtype, state_dtype), key_dim in itertools.product(DTYPES[1:], (32, 64, 128, 256, 512)):
        options = {"key_dim": key_dim, "value_dim": 128, "heads": 8, "value_heads": 8, "qk_l2norm": True}
        inputs = make_inputs(batch=48, **options, dtype=dtype, state_dtype=state_dtype, device="cuda")
        out, states = step(inputs)
        row = {name: x[7:8] if isinstance(x, Tensor) else x for name, x in inputs.items()}
        alone = step(row)
        copied = step(row | {"states": arrange(row["states"], "offset")})
        for found in (alone, copied):
            assert torch.equal(found[0], out[7:8]) and torch.equal(found[1], states[7:8])


@pytest.mark.parametrize("updates", [1, 2])
def test_tokens_equal_the_reference_of_tokens(updates, device):
    for gate, tokens in itertools.product(GATES, (1, 5)):
        options = {"tokens": tokens, "gate": gate, "num_householder": updates, "A_log": gate is not None, "device": device}
        inputs = make_inputs(**options, beta_sigmoid=True, allow_neg_eigval=True, qk_l2norm=True)
        exact = reference.delta_rule_step(**inputs)
        for actual, expected in zip(step(inputs), exact, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_tokens_of_models(device):
    for state_dtype in (torch.float32, torch.bfloat16):
        options = {"rows": 3, "heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "qk_l2norm": True}
        inputs = DELTA_RULE_STEP.make_token_inputs(
            **options, tokens=3, destination=3, dtype=torch.bfloat16, state_dtype=state_dtype, device=device
        )
        DELTA_RULE_STEP.assert_matches(inputs)
