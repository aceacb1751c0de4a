"""RMSNorm of groups whose columns are on several devices: sums of each device's columns, and the norm with the means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import dtypes, uninitialized_memory_is_nan
from norm_helpers import SIZES, accumulate_type, make_gated_inputs
from torch import Tensor

from ssm_kernels import reference

OPERATOR = "norms"
ops = torch.ops.ssm_kernels

every_dtype = dtypes()
every_order = pytest.mark.parametrize("norm_before_gate", [False, True], ids=["gate_first", "norm_first"])
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def make_inputs(**options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, z and grad_out."""
    inputs = make_gated_inputs(bias=False, **options)
    return inputs["x"], inputs["weight"], inputs["z"], inputs["x"].roll(1, -1) - 0.3


def assert_sums(actual: Tensor, terms: Tensor, groups: int, dtype: torch.dtype) -> None:
    """Compares with the sums over groups of float64 terms, (..., columns), to some roundings of the sum of magnitudes."""
    terms = terms.reshape(-1, groups, terms.shape[-1] // groups)
    assert actual.shape == terms.shape[:-1] and actual.dtype == accumulate_type(dtype)
    bound = 32 * torch.finfo(actual.dtype).eps * terms.abs().sum(-1)
    assert ((actual.double() - terms.sum(-1)).abs() <= bound).all()


@every_dtype
@pytest.mark.parametrize("size", SIZES)
def test_sums(size, dtype, device):
    sizes = dict(SIZES[size])
    group_size = sizes.pop("group_size", None)
    x, weight, z, grad_out = make_inputs(dtype=dtype, device=device, **sizes)
    groups = x.shape[-1] // (group_size or x.shape[-1])
    gate = torch.nn.functional.silu(z.double())
    assert_sums(ops._norm_gated_squares(x, None, group_size, "silu"), x.double().square(), groups, dtype)
    assert_sums(ops._norm_gated_squares(x, z, group_size, "silu"), (x.double() * gate).square(), groups, dtype)
    rstd = torch.rand(x.shape[:-1].numel(), groups, dtype=torch.float64).to(device, accumulate_type(dtype))
    of_columns = rstd.double().repeat_interleave(x.shape[-1] // groups, -1).view(x.shape)
    gated = grad_out.double() * x.double() * gate * of_columns
    for norm_before_gate in (False, True):
        arguments = (rstd, group_size, norm_before_gate, "silu")
        products = ops._norm_gated_products(grad_out, x, weight, z, *arguments)
        assert_sums(products, gated * weight.double(), groups, dtype)
        products = ops._norm_gated_products(grad_out, x, None, None, *arguments)
        assert_sums(products, grad_out.double() * x.double() * of_columns, groups, dtype)


@pytest.mark.parametrize("activation", reference.GATE_ACTIVATIONS)
def test_sums_with_every_gate(activation, device):
    x, weight, z, grad_out = make_inputs(columns=96, dtype=torch.float32, device=device)
    rstd = torch.ones(10, 1, device=device)
    ones = torch.ones_like(z, dtype=torch.float64)
    gated = reference.rms_norm_gated(ones, None, z.double(), norm_before_gate=True, eps=0.0, activation=activation)
    assert_sums(ops._norm_gated_squares(x, z, None, activation), (x.double() * gated).square(), 1, torch.float32)
    products = ops._norm_gated_products(grad_out, x, weight, z, rstd, None, False, activation)
    assert_sums(products, grad_out.double() * x.double() * gated * weight.double(), 1, torch.float32)


def pieces_of(tensor: Tensor, cut: int) -> list[Tensor]:
    return [tensor[..., :cut], tensor[..., cut:]]


# On CUDA: one block a group, several groups a warp, groups that start between 16-byte boundaries, clusters of blocks.
@every_order
@every_dtype
@pytest.mark.parametrize(("columns", "cut"), [(1536, 512), (96, 32), (1001, 333), (24576, 12288)])
def test_two_devices(columns, cut, dtype, norm_before_gate, device):
    """Each piece of the columns, with the sums of both, has what the whole norm has."""
    x, weight, z, grad_out = make_inputs(rows=(3, 7), columns=columns, dtype=dtype, device=device)
    exact = {name: value.double().requires_grad_() for name, value in (("x", x), ("weight", weight), ("z", z))}
    expected = reference.rms_norm_gated(**exact, norm_before_gate=norm_before_gate)
    grads = torch.autograd.grad(expected, list(exact.values()), grad_out.double())

    pieces = [*zip(*(pieces_of(tensor, cut) for tensor in (x, weight, z, grad_out)), strict=True)]
    squares = [ops._norm_gated_squares(x, None if norm_before_gate else z, None, "silu") for x, _, z, _ in pieces]
    options = (None, norm_before_gate, "silu", False)
    mean_square = sum(squares) / columns
    outs, rstds, _ = zip(
        *(ops._norm_gated_fwd(x, weight, z, None, 1e-5, *options, mean_square) for x, weight, z, _ in pieces), strict=True
    )
    assert torch.equal(*rstds)
    rstd = rstds[0]
    products = [ops._norm_gated_products(g, x, weight, z, rstd, *options[:3]) for x, weight, z, g in pieces]
    mean_product = sum(products) / columns
    results = []
    for x, weight, z, g in pieces:
        arguments = (g, x, weight, z, None, rstd.new_empty(0), rstd, *options)
        grad_x, grad_weight, grad_z, _ = ops._norm_gated_bwd(*arguments, [True, True, True, False], mean_product)
        buffers = [torch.empty_like(tensor) for tensor in (x, z)]
        of_weight, _ = ops._norm_gated_bwd_out(*arguments, [True, False], *buffers, mean_product)
        for actual, same in zip((*buffers, of_weight), (grad_x, grad_z, grad_weight), strict=True):
            assert torch.equal(actual, same)
        results.append((grad_x, grad_weight, grad_z))
    joined = [torch.cat(values, -1) for values in (outs, *zip(*results, strict=True))]
    for actual, wanted in zip(joined, (expected, *grads), strict=True):
        tolerance = TOLERANCE[actual.dtype] * wanted.abs().max().item()
        torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("columns", [192, 768])
@every_order
def test_rows_and_runs_have_the_same_bits(norm_before_gate, columns, device):
    x, weight, z, grad_out = make_inputs(rows=(1031,), columns=columns, dtype=torch.bfloat16, device=device)

    def evaluate(rows: slice) -> list[Tensor]:
        gate = None if norm_before_gate else z[rows]
        squares = ops._norm_gated_squares(x[rows], gate, None, "silu")
        options = (None, norm_before_gate, "silu")
        mean_square = squares / columns
        out, rstd, _ = ops._norm_gated_fwd(x[rows], weight, z[rows], None, 1e-5, *options, False, mean_square)
        products = ops._norm_gated_products(grad_out[rows], x[rows], weight, z[rows], rstd, *options)
        arguments = (grad_out[rows], x[rows], weight, z[rows], None, rstd.new_empty(0), rstd, *options, False)
        grad_x, _, grad_z, _ = ops._norm_gated_bwd(*arguments, [True, False, True, False], products / columns)
        return [squares, out, products, grad_x, grad_z]

    whole = evaluate(slice(None))
    for actual, expected in zip(evaluate(slice(None)), whole, strict=True):
        assert torch.equal(actual, expected)
    for actual, expected in zip(evaluate(slice(1000, 1001)), whole, strict=True):
        assert torch.equal(actual, expected[1000:1001])


def test_no_rows(device):
    x, weight, z, grad_out = make_inputs(rows=(2, 0), columns=12, device=device)
    with uninitialized_memory_is_nan():
        squares = ops._norm_gated_squares(x, z, 4, "silu")
        out, rstd, mean = ops._norm_gated_fwd(x, weight, z, None, 1e-5, 4, False, "silu", False, squares)
        products = ops._norm_gated_products(grad_out, x, weight, z, rstd, 4, False, "silu")
        arguments = (grad_out, x, weight, z, None, mean, rstd, 4, False, "silu", False)
        grad_x, grad_weight, _, _ = ops._norm_gated_bwd(*arguments, [True] * 4, products)
    assert squares.shape == products.shape == rstd.shape == (0, 3)
    assert out.shape == grad_x.shape == (2, 0, 12)
    assert torch.equal(grad_weight, torch.zeros_like(weight))


def test_messages(device):
    x, weight, z, grad_out = make_inputs(device=device)
    options = (None, False, "silu")
    mean_square = ops._norm_gated_squares(x, z, None, "silu")
    forward = (x, weight, z, None, 1e-5, *options)
    with pytest.raises(ValueError, match="layer_norm_gated: expected no mean_square, which RMSNorm alone takes, got a tensor"):
        ops._norm_gated_fwd(*forward, True, mean_square)
    with pytest.raises(
        ValueError, match=r"rms_norm_gated: expected mean_square of shape \(rows, groups\) = \[10, 1\], got \[10\]"
    ):
        ops._norm_gated_fwd(*forward, False, mean_square[:, 0])
    with pytest.raises(RuntimeError, match="rms_norm_gated: expected mean_square"):
        ops._norm_gated_fwd(*forward, False, mean_square.float())
    _, rstd, mean = ops._norm_gated_fwd(*forward, False)
    backward = (grad_out, x, weight, z, None, mean, rstd, *options, False, [True] * 4)
    with pytest.raises(ValueError, match=r"expected mean_product of shape \(rows, groups\) = \[10, 1\], got \[1, 10\]"):
        ops._norm_gated_bwd(*backward, rstd.t())
    with pytest.raises(ValueError, match=r"rms_norm_gated: expected z of shape \(..., columns\)"):
        ops._norm_gated_squares(x, z[..., 1:], None, "silu")
    with pytest.raises(ValueError, match=r"rms_norm_gated: expected rstd of shape \(rows, groups\) = \[10, 3\], got \[10, 1\]"):
        ops._norm_gated_products(grad_out, x, weight, z, rstd, 4, False, "silu")
    with pytest.raises(ValueError, match="rms_norm_gated: unknown activation 'relu'"):
        ops._norm_gated_squares(x, z, None, "relu")
