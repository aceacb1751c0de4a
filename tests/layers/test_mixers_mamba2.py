"""The operator between Mamba-2's projections: the tensors saved for backward, slices, and the norm in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mamba2_mixer_helpers import MAMBA2_MIXER, OPTIONS, make_inputs
from mixer_spec import assert_close, kept_bytes
from torch import Tensor

OPERATOR = "mamba2_mixer"
ops = torch.ops.ssm_kernels
operator, evaluate = MAMBA2_MIXER.operator, MAMBA2_MIXER.evaluate


def test_keeps_little_for_backward(device):
    inputs = make_inputs(dtype=torch.bfloat16, device=device, **MAMBA2_MIXER.sizes)
    arguments = tuple((inputs | {"projected": inputs["projected"].requires_grad_()}).values())
    rows, d_ssm = 2 * 80, 64
    y_and_rstd, A = rows * (d_ssm * 2 + 4), 4 * 4
    assert kept_bytes(lambda: operator(*arguments)[0], arguments) == y_and_rstd + A


def test_writes_the_gradient_of_a_slice(device):
    """As beside an MLP, whose columns come first."""
    inputs = make_inputs(device=device)
    expected = evaluate(operator, inputs)["grad_projected"]
    wider = torch.cat([torch.ones(2, 14, 6, device=device, dtype=torch.float64), inputs["projected"]], dim=-1)
    sliced = evaluate(operator, inputs | {"projected": wider[..., 6:]})["grad_projected"]
    assert torch.equal(sliced, expected)


def test_wrong_number_of_columns(device):
    inputs = make_inputs(device=device)
    inputs["projected"] = inputs["projected"][..., 1:]
    with pytest.raises(ValueError, match="Mamba2: expected projected of 38 columns, got 37"):
        operator(*inputs.values())


# ----- The norm of groups that continue on other devices


class SplitMixer(torch.autograd.Function):
    """The mixer in the pieces between which ranks add their sums."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        y, conv_state, ssm_state, *saved, parameters = ops._mamba2_mixer_fwd(*arguments, applies_norm=False)
        assert [tensor.numel() for tensor in saved] == [0, 0]
        _, groups, *_, eps, before, _ = arguments[11:]
        size = y.shape[-1] // groups
        z, norm_weight = arguments[0][..., : y.shape[-1]], arguments[6]
        mean_square = ops._norm_gated_squares(y, None if before else z, size, "silu") / size
        out, rstd, _ = ops._norm_gated_fwd(y, norm_weight, z, None, eps, size, before, "silu", False, mean_square)
        ctx.save_for_backward(*arguments[:11], y, z, rstd, parameters)
        ctx.options = arguments[11:], size, before
        return out, conv_state, ssm_state

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (*tensors, y, z, rstd, parameters), (options, size, before) = ctx.saved_tensors, ctx.options
        mean_product = ops._norm_gated_products(grads[0], y, tensors[6], z, rstd, size, before, "silu") / size
        needs = [*ctx.needs_input_grad[:9]]
        results = ops._mamba2_mixer_bwd(*grads, y, rstd, parameters, needs, *tensors, *options, mean_product)
        return *(grad if need else None for grad, need in zip(results, needs, strict=True)), *(None,) * 11


@pytest.mark.parametrize("name", ["default", "norm_before_gate", "groups", "states", "cu_seqlens"])
def test_norm_in_pieces(name, device):
    inputs = make_inputs(device=device, **OPTIONS[name])
    assert_close(evaluate(SplitMixer.apply, inputs), evaluate(operator, inputs), 1e-12)


def test_opcheck_of_the_pieces(device):
    inputs = make_inputs(device=device)
    arguments = tuple(inputs.values())
    torch.library.opcheck(ops._mamba2_mixer_fwd.default, arguments, {"applies_norm": False})
    out, *_, y, rstd, parameters = ops._mamba2_mixer_fwd(*arguments)
    saved = (out, None, None, y, rstd, parameters, [True] * 7 + [False] * 2)
    torch.library.opcheck(ops._mamba2_mixer_bwd.default, (*saved, *arguments, torch.ones_like(rstd)))


def test_no_norm_to_leave_out(device):
    with pytest.raises(ValueError, match="Mamba2: expected norm_weight with applies_norm=False, got None"):
        ops._mamba2_mixer_fwd(*make_inputs(norm=False, device=device).values(), applies_norm=False)
