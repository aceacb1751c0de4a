"""The norms as PyTorch operators: opcheck, compile, autocast, vmap, transforms of torch.func, saved memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from norm_helpers import every_norm, make_gated_inputs
from operator_spec import tensor_names
from torch import Tensor

OPERATOR = "norms"
ops = torch.ops.ssm_kernels


# ----- opcheck


def check_and_call(operator: Any, *arguments: Any) -> Tensor:
    torch.library.opcheck(operator.default, arguments)
    result: Tensor = operator(*arguments)
    return result


@pytest.mark.parametrize("subtract_mean", [False, True], ids=["rms_norm", "layer_norm"])
def test_opcheck_of_the_internal_operators(subtract_mean, device):
    check = torch.library.opcheck
    inputs = make_gated_inputs(dtype=torch.bfloat16, device=device)
    x, weight, z, bias = (inputs[key] for key in ("x", "weight", "z", "bias"))
    options = (4, True, "gelu", subtract_mean)
    leaves = [value.clone().requires_grad_() for value in (x, weight, z, bias)]
    check(ops._norm_gated.default, (*leaves, 1e-5, *options))
    check(ops._norm_gated_fwd.default, (x, weight, z, bias, 1e-5, *options))
    _, rstd, mean = ops._norm_gated_fwd(x, weight, z, bias, 1e-5, *options)
    arguments = (x, x, weight, z, bias, mean, rstd, *options)
    for needs_grad in ([True] * 4, [False, True, False, False]):
        check(ops._norm_gated_bwd.default, (*arguments, needs_grad))
    check(ops._norm_gated_bwd_out.default, (*arguments, [True, False], *(torch.empty_like(x) for _ in range(2))))
    check(ops._norm_gated_bwd_out.default, (*arguments, [False, True], None, torch.empty_like(x)))
    outputs = [torch.empty_like(x) for _ in range(2)]
    check(ops._norm_gated_bwd_out.default, (*arguments, [False, True], None, outputs[0], None, outputs[1], 1e-5))

    if not subtract_mean:
        mean_square = check_and_call(ops._norm_gated_squares, x, z, 4, "gelu")
        check(ops._norm_gated_fwd.default, (x, weight, z, bias, 1e-5, *options, mean_square))
        mean_product = check_and_call(ops._norm_gated_products, x, x, weight, z, rstd, *options[:3])
        check(ops._norm_gated_bwd.default, (*arguments, [True] * 4, mean_product))
        check(ops._norm_gated_bwd_out.default, (*arguments, [True] * 2, torch.empty_like(x), None, mean_product))

    residual = z.float()
    check(ops._add_norm.default, (leaves[0], residual, *leaves[1::2], 1e-5, None, False, subtract_mean))
    check(ops._add_norm_fwd.default, (x, residual, weight, bias, 1e-5, None, False, subtract_mean))
    normed, new_residual, rstd, mean = ops._add_norm_fwd(x, residual, weight, bias, 1e-5, None, False, subtract_mean)
    for needs_grad in ([True] * 4, [False, False, True, False]):
        check(
            ops._add_norm_bwd.default,
            (normed, residual, new_residual, weight, bias, mean, rstd, None, subtract_mean, needs_grad),
        )


# ----- torch.compile


# ----- Autocast


@every_norm
def test_autocast_leaves_dtypes_as_they_are(norm, device):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = norm.make_inputs(dtype=dtype, parameter_dtype=torch.float32, device=device)
        expected = norm.evaluate(norm, inputs)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            actual = norm.evaluate(norm, inputs)
        for key, value in actual.items():
            assert value.dtype == dtype and torch.equal(value, expected[key])


# ----- vmap


# ----- Memory


@every_norm
def test_what_is_saved(norm, device):
    """The inputs, which are there anyway, or the new residual; and a number or two for each group of a row."""
    options = {"group_size": 16} if norm.is_gated else {}
    inputs = norm.make_inputs(rows=(3, 5), columns=64, dtype=torch.bfloat16, device=device) | options
    leaves = {key: inputs[key].requires_grad_() for key in tensor_names(inputs)}
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        results = norm.function(**(inputs | leaves))
    known = [*leaves.values(), *([] if norm.is_gated else [results[1]])]
    new = [tensor for tensor in saved if all(tensor.data_ptr() != other.data_ptr() for other in known) and tensor.numel()]
    statistics = 2 if "layer" in norm.name else 1
    assert [tensor.shape for tensor in new] == [(15, 4 if norm.is_gated else 1)] * statistics
    assert len(saved) - len(new) <= len(known) + 1
