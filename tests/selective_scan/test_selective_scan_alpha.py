"""The bilinear family with ``alpha``, and impulses: arguments, names with a number, and the rules that they contain."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from selective_scan_helpers import make_inputs
from torch import Tensor

import ssm_kernels
from ssm_kernels import nn, reference
from ssm_kernels.models import MambaConfig

OPERATOR = "selective_scan"
MEMBERS = {0.0: "euler", 0.5: "bilinear", 1.0: "backward_euler"}


def results(inputs: dict[str, Any], **options: Any) -> list[Tensor]:
    """The output, the last state and all gradients."""
    leaves = {name: value.detach().requires_grad_() for name, value in inputs.items() if isinstance(value, Tensor)}
    out, last_state = ssm_kernels.selective_scan(**inputs | leaves | options, return_last_state=True)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)).sum() + last_state.sum()
    return [out.detach(), last_state.detach(), *torch.autograd.grad(loss, list(leaves.values()))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("alpha", "name"), MEMBERS.items())
def test_gbt_contains_the_rules_of_the_family(alpha, name, dtype, device):
    inputs = make_inputs(seqlen=70, dtype=dtype, device=device)
    inputs.pop("discretization", None)
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-4}
    for found, expected in zip(
        results(inputs, discretization="gbt", alpha=alpha), results(inputs, discretization=name), strict=True
    ):
        torch.testing.assert_close(found, expected, **tolerance)


def test_alpha_0_is_euler_at_infinite_rates(device):
    """Zero times infinity does not make the decay NaN."""
    inputs = make_inputs(device=device)
    inputs.pop("discretization", None)
    inputs["A"].view(-1)[0] = -math.inf
    pairs = zip(results(inputs, discretization="gbt", alpha=0.0), results(inputs, discretization="euler"), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert results(inputs, discretization="gbt", alpha=0.0)[0].isneginf().any()


def test_alpha_is_part_of_the_name(device):
    inputs = make_inputs(device=device)
    inputs.pop("discretization", None)
    for found, expected in zip(
        results(inputs, discretization="gbt", alpha=0.7), results(inputs, discretization="gbt(0.7)"), strict=True
    ):
        assert torch.equal(found, expected)


def test_impulses_are_zoh_of_a_divided_input(device):
    """Zero-order hold of ``B u / delta`` is an impulse of ``B u``."""
    inputs = make_inputs(dtype=torch.float64, device=device)
    inputs.pop("discretization", None)
    inputs |= {"delta_bias": None, "delta_softplus": False, "D": None, "z": None, "delta": inputs["delta"].abs() + 0.1}
    found = ssm_kernels.selective_scan(**inputs, discretization="dirac")
    expected = ssm_kernels.selective_scan(**inputs | {"u": inputs["u"] / inputs["delta"]}, discretization="zoh")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_alpha_outside_of_its_range(value):
    inputs = make_inputs()
    inputs.pop("discretization", None)
    with pytest.raises(ValueError, match=r"^selective_scan: expected alpha from 0 to 1"):
        ssm_kernels.selective_scan(**inputs, discretization="gbt", alpha=value)
    with pytest.raises(ValueError, match="expected discretization 'gbt' with alpha, a number from 0 to 1"):
        ssm_kernels.selective_scan(**inputs, discretization=f"gbt({value})")


@pytest.mark.parametrize("call", [ssm_kernels.selective_scan, reference.selective_scan], ids=["operator", "reference"])
def test_alpha_belongs_to_gbt(call):
    inputs = make_inputs()
    inputs.pop("discretization", None)
    with pytest.raises(ValueError, match=r"expected discretization .gbt. with alpha"):
        call(**inputs, discretization="gbt")
    with pytest.raises(ValueError, match="expected alpha with discretization 'gbt' or 'gbt_two_sample' only, got 'zoh'"):
        call(**inputs, discretization="zoh", alpha=0.7)
    with pytest.raises(ValueError, match="zoh"):
        call(**inputs, discretization="zoh(0.7)")


def test_scans_in_chunks_refuse_them():
    x, dt, B = torch.randn(1, 8, 2, 4), torch.rand(1, 8, 2), torch.randn(1, 8, 1, 3)
    for name in ("gbt(0.7)", "dirac"):
        with pytest.raises(ValueError, match=r"^ssd_chunk_scan: discretization '.*' is not supported"):
            ssm_kernels.ssd_chunk_scan(x, dt, -torch.ones(2), B, B, discretization=name)


def test_layers_take_alpha_and_save_it():
    layer = nn.Mamba(16, discretization="gbt", alpha=0.7)
    assert layer.discretization == "gbt(0.7)"
    other = nn.Mamba(16, discretization="gbt(0.70)")  # another spelling of the same number
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(layer(x), other(x))
    with pytest.raises(RuntimeError, match=r"got one of 'gbt\(0.7\)'"):
        nn.Mamba(16, discretization="gbt", alpha=0.6).load_state_dict(layer.state_dict())
    with pytest.raises(ValueError, match=r"^Mamba: expected discretization 'gbt' with alpha"):
        nn.Mamba(16, discretization="gbt")
    assert nn.SelectiveSSM(16, discretization="gbt", alpha=1.0).discretization == "gbt(1.0)"
    assert MambaConfig(discretization="gbt(0.7)").discretization == "gbt(0.7)"
    with pytest.raises(ValueError, match=r"expected discretization .gbt. with alpha"):
        MambaConfig(discretization="gbt")
