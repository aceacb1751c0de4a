"""Mamba-2's operator with the out-projection: comparison with the mixer and F.linear, and what it keeps for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mamba2_mixer_helpers import MAMBA2_MIXER, MAMBA2_PROJECTED, make_inputs, make_projected_inputs
from mixer_spec import kept_bytes
from torch import Tensor

OPERATOR = "mamba2_mixer"
MIXER_ARGUMENTS = len(make_inputs())


def mixer_and_linear(*arguments: Any) -> tuple[Tensor, ...]:
    """As a layer that calls out_proj as a module."""
    weight, bias, _ = arguments[MIXER_ARGUMENTS:]
    out, *states = MAMBA2_MIXER.operator(*arguments[:MIXER_ARGUMENTS])
    return out if weight is None else F.linear(out, weight, bias), *states


@pytest.mark.parametrize("recomputes", [False, True], ids=["cheap", "all"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"norm_before_gate": True}, {"norm": False}, {"groups": 2}])
def test_has_the_bits_of_a_module(options, dtype, recomputes, device):
    """The input of the out-projection is recomputed with the bits of forward."""
    sizes = MAMBA2_PROJECTED.sizes
    inputs = make_projected_inputs(device=device, dtype=dtype, recomputes=recomputes, bias=False, **sizes, **options)
    actual = MAMBA2_PROJECTED.evaluate(MAMBA2_PROJECTED.operator, inputs)
    expected = MAMBA2_PROJECTED.evaluate(mixer_and_linear, inputs)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def kept(inputs: dict[str, Any], autocast: torch.dtype | None = None) -> int:
    arguments = tuple((inputs | {"projected": inputs["projected"].detach().requires_grad_()}).values())
    with torch.autocast(inputs["projected"].device.type, autocast, enabled=autocast is not None):
        return kept_bytes(lambda: MAMBA2_PROJECTED.operator(*arguments)[0], arguments)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no_norm"])
def test_keeps_little_for_backward(norm, device):
    rows, d_ssm, A = 2 * 80, 64, 4 * 4
    sizes = {"seqlen": 80, "heads": 4, "headdim": 16, "dstate": 16, "dtype": torch.bfloat16, "device": device}
    rstd = rows * 4 if norm else 0
    assert kept(make_projected_inputs(norm=norm, **sizes)) == rows * d_ssm * 2 + rstd + A
    assert kept(make_projected_inputs(norm=norm, recomputes=True, **sizes)) == rstd + A


def test_keeps_no_copy_of_a_weight_under_autocast(device):
    sizes = {"seqlen": 80, "heads": 4, "headdim": 16, "dstate": 16, "device": device}
    inputs = make_projected_inputs(dtype=torch.float32, **sizes)
    inputs["out_proj_weight"].requires_grad_()
    inputs["projected"] = inputs["projected"].bfloat16()
    expected = kept(make_projected_inputs(dtype=torch.bfloat16, **sizes))
    assert kept(inputs, torch.bfloat16) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_as_a_module(dtype, device):
    inputs = make_projected_inputs(dtype=torch.float32, device=device)
    with torch.autocast(device, dtype=dtype):
        found, expected = MAMBA2_PROJECTED.operator(*inputs.values())[0], mixer_and_linear(*inputs.values())[0]
    assert found.dtype == dtype and torch.equal(found, expected)
