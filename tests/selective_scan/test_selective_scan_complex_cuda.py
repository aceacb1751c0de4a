"""Complex states on CUDA beside the CPU in float64: types, layouts, borders, packed sequences, many states, and steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_selective_scan_complex import TWO_SAMPLES, every_rule, make_inputs, on, relative_error, results_of, widened

from ssm_kernels import selective_scan, selective_state_update

pytestmark = pytest.mark.cuda

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OPTIONS: dict[str, dict[str, Any]] = {
    "tiles": {"seqlen": 128, "dim": 64, "dstate": 16, "previous": "given"},
    "partial_tiles": {"seqlen": 77, "dim": 67, "dstate": 7, "previous": "repeat", "conjugate_pairs": False},
    "chunks": {"seqlen": 139, "dim": 70, "dstate": 13, "previous": "given"},
    "groups": {"seqlen": 66, "dim": 128, "dstate": 16, "B": "groups", "C": "groups", "previous": "given"},
    "reverse": {"seqlen": 75, "dim": 64, "dstate": 4, "reverse": True, "previous": "given"},
    "constant": {"seqlen": 70, "dim": 70, "dstate": 6, "B": "constant", "C": "constant", "previous": "given"},
    "constant_B": {"seqlen": 70, "dim": 20, "B": "constant", "previous": "repeat"},
    "many_states": {"seqlen": 140, "dim": 12, "dstate": 40, "previous": "given"},
    "most_states": {"seqlen": 66, "dim": 6, "dstate": 128, "previous": "given"},
    "one_step": {"seqlen": 1, "dim": 33, "dstate": 16, "previous": "given"},
}


def assert_agrees_with_cpu(inputs: dict[str, Any]) -> None:
    found = results_of(selective_scan, on("cuda", inputs))
    for name, value in results_of(selective_scan, widened(inputs)).items():
        dtype = torch.zeros((), dtype=found[name].dtype).real.dtype
        eps = torch.finfo(dtype).eps
        bound = 1e-11 if dtype == torch.float64 else 1e-5 + eps
        if inputs["u"].element_size() == 2:
            bound = max(bound, torch.finfo(inputs["u"].dtype).eps)
        assert relative_error(found[name], value) < bound, name


@every_rule
@pytest.mark.parametrize("name", OPTIONS)
def test_float64_and_float32(rule: str, name: str) -> None:
    for dtype in (torch.float64, torch.float32):
        assert_agrees_with_cpu(make_inputs(rule, dtype=dtype, **OPTIONS[name]))


@every_rule
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(rule: str, dtype: torch.dtype) -> None:
    for name in ("tiles", "partial_tiles", "chunks", "constant"):
        assert_agrees_with_cpu(make_inputs(rule, dtype=dtype, **OPTIONS[name]))


@every_rule
def test_channels_last_and_packed(rule: str) -> None:
    cu_seqlens = torch.tensor([0, 5, 5, 45, 110])
    inputs = make_inputs(rule, batch=1, dim=40, seqlen=110, dstate=9, sequences=4, previous="given", cu_seqlens=cu_seqlens)
    assert_agrees_with_cpu(inputs)
    for name in ("u", "delta", "z", "B", "C"):
        inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    assert_agrees_with_cpu(inputs)
    seq_idx = torch.arange(110).div(13, rounding_mode="floor").expand(2, -1).contiguous()
    assert_agrees_with_cpu(make_inputs(rule, dim=40, seqlen=110, seq_idx=seq_idx, reverse=True))


def test_angles_of_many_turns() -> None:
    inputs = make_inputs("zoh", seqlen=70, dim=40, dtype=torch.float32, angle=50.0, delta_softplus=False, delta_bias=None)
    inputs["delta"] = inputs["delta"].abs() * 0.2 + 0.9
    assert_agrees_with_cpu(inputs)


@pytest.mark.parametrize("rule", ["zoh", "exp_trapezoidal"])
@pytest.mark.parametrize("B", ["per step", "constant"])
def test_rates_of_minus_infinity(rule: str, B: str) -> None:
    # The steps after the last one of a tile have a step size of zero, and 0 times infinity is not a number.
    inputs = make_inputs(rule, seqlen=37, dim=40, dstate=5, B=B, dtype=torch.float32, previous="given")
    inputs["A"] = torch.complex(inputs["A"].real.index_fill(1, torch.tensor([2]), -1e30), inputs["A"].imag)
    expected = results_of(selective_scan, widened(inputs))
    inputs["A"] = torch.complex(inputs["A"].real.index_fill(1, torch.tensor([2]), -torch.inf), inputs["A"].imag)
    for name, value in results_of(selective_scan, on("cuda", inputs)).items():
        assert relative_error(value, expected[name]) < 1e-5, name


@pytest.mark.parametrize("rule", ["zoh", "exp_trapezoidal"])
def test_same_bits_every_time(rule: str) -> None:
    inputs = on("cuda", make_inputs(rule, seqlen=130, dim=200, dstate=16, dtype=torch.bfloat16))
    first = results_of(selective_scan, inputs)
    for name, value in results_of(selective_scan, inputs).items():
        assert torch.equal(value, first[name]), name


@every_rule
def test_steps(rule: str) -> None:
    for dtype in DTYPES:
        inputs = make_inputs(rule, seqlen=3, dim=40, dstate=37, dtype=dtype, B="groups", C="groups", previous="given")
        expected, last = selective_scan(**widened(inputs), return_last_state=True)
        inputs = on("cuda", inputs)
        states = {"state": inputs["initial_state"].clone()}
        if rule in TWO_SAMPLES:
            states |= {"previous_x": inputs["previous"][0].clone(), "previous_B": inputs["previous"][1].clone()}
        options = {"dt_softplus": True, "discretization": rule}
        if "lam" in inputs:
            options |= {"lam": inputs["lam"].movedim(-1, 1), "lam_sigmoid": True}
        tokens = {
            key: inputs[name].movedim(-1, 1) for key, name in (("x", "u"), ("dt", "delta"), ("B", "B"), ("C", "C"), ("z", "z"))
        }
        out = selective_state_update(**states, **tokens, A=inputs["A"], D=inputs["D"], dt_bias=inputs["delta_bias"], **options)
        bound = max(torch.finfo(dtype).eps, 5e-6 if dtype != torch.float64 else 1e-12)
        assert relative_error(out.movedim(1, -1), expected) < bound
        state = last.state if rule in TWO_SAMPLES else last
        assert relative_error(states["state"], state) < (1e-12 if dtype == torch.float64 else 5e-6)
        if rule in TWO_SAMPLES:
            assert torch.equal(states["previous_x"].cpu(), last.u.to(dtype))
            assert relative_error(states["previous_B"], last.B) == 0
