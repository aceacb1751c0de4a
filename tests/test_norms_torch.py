"""The norms as PyTorch operators: opcheck, compile, autocast, vmap, transforms of torch.func, saved memory."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from helpers import FUNC_TRANSFORMS, KeptGraphs, split
from norm_helpers import (
    ADD,
    GATED,
    evaluate,
    make_add_inputs,
    make_cotangents,
    make_gated_inputs,
    tensors_of,
)
from torch import Tensor

import ssm_kernels

OPERATOR = "norms"
ops = torch.ops.ssm_kernels

every_norm = pytest.mark.parametrize("name", (*GATED, *ADD))


def make_inputs(name: str, **options) -> dict:
    return make_gated_inputs(**options) if name in GATED else make_add_inputs(**options)


def cotangents_of(name: str, inputs: dict) -> list[Tensor]:
    return make_cotangents(inputs, 1 if name in GATED else 2)


# ----- opcheck


@pytest.mark.parametrize("needs_grad", [True, False], ids=["grad", "no_grad"])
@every_norm
def test_opcheck(name, needs_grad, device):
    cases = [{}, {"dtype": torch.bfloat16, "bias": False}]
    cases += [{"group_size": 4, "norm_before_gate": True}] if name in GATED else [{"residual": False, "residual_in_fp32": True}]
    for options in cases:
        inputs = make_inputs(name, device=device, **options)
        if needs_grad:
            inputs |= {key: inputs[key].requires_grad_() for key in tensors_of(inputs)}
        operator = getattr(ops, name)
        torch.library.opcheck(operator.default, *split(operator, inputs))


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
    check(ops._norm_gated_bwd_out.default, (*arguments, [True, False], *(torch.empty_like(x) for _ in range(3))))
    check(ops._norm_gated_bwd_out.default, (*arguments, [False, True], None, torch.empty_like(x), None))

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


@every_norm
def test_compile_once_for_every_length(name, device, fresh_dynamo):
    graphs = KeptGraphs()
    compiled = torch.compile(partial(getattr(ssm_kernels, name)), fullgraph=True, dynamic=True, backend=graphs.backend)
    for seqlen in (5, 32, 7):
        inputs = make_inputs(name, rows=(3, seqlen), device=device)
        cotangents = cotangents_of(name, inputs)
        expected = evaluate(getattr(ssm_kernels, name), inputs, cotangents)
        for key, value in evaluate(compiled, inputs, cotangents).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-12, atol=1e-12)
    kernels = "_norm_gated" if name in GATED else "_add_norm"
    assert graphs.kernels() == ([f"ssm_kernels.{kernels}_fwd.default"], [f"ssm_kernels.{kernels}_bwd.default"])


# ----- Autocast


@every_norm
def test_autocast_leaves_dtypes_as_they_are(name, device):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_inputs(name, dtype=dtype, parameter_dtype=torch.float32, device=device)
        expected = evaluate(getattr(ssm_kernels, name), inputs)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            actual = evaluate(getattr(ssm_kernels, name), inputs)
        for key, value in actual.items():
            assert value.dtype == dtype and torch.equal(value, expected[key])


# ----- vmap


@pytest.mark.parametrize("axis", [0, -1])
@every_norm
def test_vmap_over_each_combination_of_arguments(name, axis, device, no_vmap_fallback):
    first = make_inputs(name, rows=(2, 3), columns=12, device=device) | ({"group_size": 4} if name in GATED else {})
    tensors = tensors_of(first)
    for size in (1, 2, 4):
        for names in itertools.combinations(tensors, size):
            sets = [first | {key: first[key] * factor for key in names} for factor in (1.0, -0.5, 2.0)]
            stacked = {key: torch.stack([s[key] for s in sets], dim=axis).requires_grad_() for key in names}

            def norm(*values, names=names):
                return getattr(ssm_kernels, name)(**(first | dict(zip(names, values, strict=True))))

            def flatten(results) -> list[Tensor]:
                return [results] if isinstance(results, Tensor) else list(results)

            results = flatten(torch.vmap(norm, in_dims=axis)(*stacked.values()))
            of_samples = [norm(*(value.select(axis, i) for value in stacked.values())) for i in range(3)]
            expected = [torch.stack(values) for values in zip(*map(flatten, of_samples), strict=True)]
            cotangents = [torch.randn_like(result) for result in results]
            gradients = [torch.autograd.grad(r, [*stacked.values()], cotangents) for r in (results, expected)]
            for actual, value in zip([*results, *gradients[0]], [*expected, *gradients[1]], strict=True):
                torch.testing.assert_close(actual, value, rtol=1e-11, atol=1e-11)


@every_norm
def test_vmap_without_samples(name, device, no_vmap_fallback):
    inputs = make_inputs(name, rows=(2,), device=device)
    for key in ("x", "weight"):
        results = torch.vmap(
            lambda value, key=key: getattr(ssm_kernels, name)(**(inputs | {key: value})),
        )(inputs[key].new_empty(0, *inputs[key].shape))
        for result in [results] if name in GATED else results:
            assert result.shape == (0, 2, 12)


@pytest.mark.parametrize("transform", FUNC_TRANSFORMS)
@every_norm
def test_other_transforms_raise(name, transform, device):
    inputs = make_inputs(name, device=device)

    def norm(x):
        results = getattr(ssm_kernels, name)(**(inputs | {"x": x}))
        return results if name in GATED else results[0]

    with pytest.raises(RuntimeError, match=f"{name}: the transforms of torch.func"):
        FUNC_TRANSFORMS[transform](norm, inputs["x"])


# ----- Memory


@every_norm
def test_what_is_saved(name, device):
    """The inputs, which are there anyway, or the new residual; and a number or two for each group of a row."""
    options = {"group_size": 16} if name in GATED else {}
    inputs = make_inputs(name, rows=(3, 5), columns=64, dtype=torch.bfloat16, device=device) | options
    leaves = {key: inputs[key].requires_grad_() for key in tensors_of(inputs)}
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        results = getattr(ssm_kernels, name)(**(inputs | leaves))
    known = [*leaves.values(), *([] if name in GATED else [results[1]])]
    new = [tensor for tensor in saved if all(tensor.data_ptr() != other.data_ptr() for other in known) and tensor.numel()]
    statistics = 2 if "layer" in name else 1
    assert [tensor.shape for tensor in new] == [(15, 4 if name in GATED else 1)] * statistics
    assert len(saved) - len(new) <= len(known) + 1
