"""``mamba_ssm``'s functions with a complex ``A``: its own tests of them, restated, with its draws and tolerances.

Real ``B`` and ``C`` of each step have the real and the imaginary part of a step as neighbors, (..., dstate, 2 seqlen).
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssm_kernels.compat.references import bimamba_inner_ref, mamba_inner_ref, selective_scan_ref
from ssm_kernels.compat.selective_scan import bimamba_inner_fn, mamba_inner_fn, mamba_inner_fn_no_out_proj, selective_scan_fn

TOLERANCES = {torch.float32: (6e-4, 2e-3), torch.float16: (3e-3, 5e-3), torch.bfloat16: (3e-2, 5e-2)}
VARIABLE = [(False, False, 1), (False, True, 1), (True, False, 1), (True, True, 1), (True, True, 2)]


def plain_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """``out`` in the dtype of ``u`` and the last state, in the precision of ``A``."""
    dtype, wide = u.dtype, A.dtype.to_real()
    u, delta = u.to(wide), delta.to(wide)
    step = delta if delta_bias is None else delta + delta_bias[:, None]
    step = F.softplus(step) if delta_softplus else step

    def of_steps(matrix: Tensor) -> list[Tensor]:  # one for each step, which broadcasts with (batch, dim, dstate)
        if matrix.dim() == 2:
            return [matrix] * u.shape[2]
        if not matrix.is_complex():
            matrix = torch.view_as_complex(matrix.to(wide).unflatten(-1, (-1, 2)).contiguous())
        groups = matrix[:, None] if matrix.dim() == 3 else matrix
        return [*groups.repeat_interleave(u.shape[1] // groups.shape[1], 1).unbind(-1)]

    h, outputs = torch.zeros(*u.shape[:2], A.shape[1], dtype=A.dtype), []
    for t, (B_t, C_t) in enumerate(zip(of_steps(B), of_steps(C), strict=True)):
        h = (step[:, :, t, None] * A).exp() * h + B_t * (step * u)[:, :, t, None]
        outputs.append(2 * (h * C_t).sum(-1).real)
    out = torch.stack(outputs, -1) + (0 if D is None else D[:, None] * u)
    return (out if z is None else out * F.silu(z.to(wide))).to(dtype), h


def gradients(function: Any, tensors: dict[str, Tensor], **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The results, and the gradients of the first one by every tensor."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in tensors.items()}
    results = function(**leaves, **options)
    out = results[0] if isinstance(results, tuple) else results
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    out.backward(weight)
    found = {name: leaf.grad for name, leaf in leaves.items()}
    names = ("out", "state")
    return dict(zip(names, results if isinstance(results, tuple) else (out,), strict=False)), found


@pytest.mark.parametrize("itype", [*TOLERANCES])
@pytest.mark.parametrize(("is_variable_B", "is_variable_C", "groups"), VARIABLE)
def test_selective_scan(is_variable_B: bool, is_variable_C: bool, groups: int, itype: torch.dtype) -> None:
    batch, dim, dstate, seqlen = 2, 4, 8, 37
    rtol, atol = TOLERANCES[itype]
    every = [*itertools.product([False, True], repeat=4)]
    for has_D, has_z, has_delta_bias, delta_softplus in every if itype == torch.float32 else (every[0], every[-1]):
        torch.manual_seed(0)
        rtolw, atolw = (max(1e-3, rtol), max(1e-3, atol)) if has_z else (1e-3, 1e-3)
        inner = (groups,) if groups > 1 else ()

        def matrix(is_variable: bool, inner: tuple[int, ...] = inner) -> Tensor:
            if is_variable:
                return torch.randn(batch, *inner, dstate, 2 * seqlen).to(itype)
            return torch.randn(dim, dstate, dtype=torch.complex64)

        tensors = {"A": -0.5 * torch.rand(dim, dstate, dtype=torch.complex64), "B": matrix(is_variable_B)}
        tensors |= {"C": matrix(is_variable_C)} | ({"D": torch.randn(dim)} if has_D else {})
        tensors |= {"z": torch.randn(batch, dim, seqlen).to(itype)} if has_z else {}
        tensors |= {"delta_bias": 0.5 * torch.rand(dim)} if has_delta_bias else {}
        tensors |= {"u": torch.randn(batch, dim, seqlen).to(itype)}
        tensors |= {"delta": (0.5 * torch.rand(batch, dim, seqlen)).to(itype)}
        options = {"delta_softplus": delta_softplus}
        found, grads = gradients(selective_scan_fn, tensors, return_last_state=True, **options)
        expected, expected_grads = gradients(plain_scan, tensors, **options)
        assert found["out"].dtype == itype and found["state"].dtype == torch.complex64
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")  # noqa: B023
        of_tensors = {"u": (2 * rtol, 2 * atol), "delta": (5 * rtol, 10 * atol), "A": (rtolw, 5 * atolw)}
        of_tensors |= {"B": (rtol, atol)} if is_variable_B else {}
        of_tensors |= {"C": (rtol, atol)} if is_variable_C else {}
        for name, gradient in grads.items():
            assert gradient.dtype == tensors[name].dtype, name
            r, a = of_tensors.get(name, (rtolw, atolw))
            torch.testing.assert_close(gradient, expected_grads[name], rtol=r, atol=a, msg=lambda text: f"{name}: {text}")  # noqa: B023
    reference = selective_scan_ref(**tensors, delta_softplus=True)
    torch.testing.assert_close(reference, expected["out"].detach(), rtol=rtol, atol=atol)


def inner_tensors(dtype: torch.dtype, is_variable_B: bool, is_variable_C: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    dim, dstate, rank = 12, 8, 3
    number = torch.complex128 if dtype == torch.float64 else torch.complex64
    tensors = {
        "xz": torch.randn(2, 2 * dim, 33, dtype=dtype),
        "conv1d_weight": torch.randn(dim, 1, 3, dtype=dtype),
        "conv1d_bias": torch.randn(dim, dtype=dtype),
        "x_proj_weight": torch.randn(rank + (is_variable_B + is_variable_C) * 2 * dstate, dim, dtype=dtype),
        "delta_proj_weight": torch.randn(dim, rank, dtype=dtype),
        "out_proj_weight": torch.randn(dim // 2, dim, dtype=dtype),
        "A": -0.5 * torch.rand(dim, dstate, dtype=number),
        "D": torch.randn(dim, dtype=dtype),
        "delta_bias": 0.5 * torch.rand(dim, dtype=dtype),
    }
    for name, is_variable in (("B", is_variable_B), ("C", is_variable_C)):
        if is_variable:
            tensors[f"{name}_proj_bias"] = torch.randn(2 * dstate, dtype=dtype)
        else:
            tensors[name] = torch.randn(dim, dstate, dtype=number)
    return tensors


def plain_inner(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None = None,
    *,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor,
    delta_bias: Tensor,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
) -> Tensor:
    x, z = xz.chunk(2, dim=1)
    x = F.silu(F.conv1d(F.pad(x, (2, 0)), conv1d_weight, conv1d_bias, groups=x.shape[1]))
    columns = F.linear(x.transpose(1, 2), x_proj_weight)
    rank, width = delta_proj_weight.shape[1], 2 * A.shape[1]

    def matrix(columns: Tensor, bias: Tensor) -> Tensor:
        return torch.view_as_complex((columns + bias).unflatten(-1, (-1, 2)).contiguous()).transpose(1, 2)

    if B_proj_bias is not None:
        B = matrix(columns[..., rank : rank + width], B_proj_bias)
    if C_proj_bias is not None:
        C = matrix(columns[..., -width:], C_proj_bias)
    assert B is not None and C is not None
    delta = F.linear(columns[..., :rank], delta_proj_weight).transpose(1, 2)
    out, _ = plain_scan(x, delta, A, B, C, D, z, delta_bias, delta_softplus=True)
    return F.linear(out.transpose(1, 2), out_proj_weight, out_proj_bias)


@pytest.mark.parametrize("is_variable_C", [False, True])
@pytest.mark.parametrize("is_variable_B", [False, True])
def test_mamba_inner_fn(is_variable_B: bool, is_variable_C: bool) -> None:
    """The rows of ``x_proj_weight`` for B and C are 2 dstate, the parts of a state as neighbors."""
    tensors = inner_tensors(torch.float32, is_variable_B, is_variable_C)
    rtol, atol = TOLERANCES[torch.float32]
    torch.testing.assert_close(mamba_inner_fn(out_proj_bias=None, **tensors), plain_inner(**tensors), rtol=rtol, atol=atol)
    tensors = inner_tensors(torch.float64, is_variable_B, is_variable_C)
    found, expected = gradients(mamba_inner_fn, tensors, out_proj_bias=None), gradients(plain_inner, tensors)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(mamba_inner_ref(out_proj_bias=None, **tensors), found[0]["out"].detach())


def test_inner_functions_of_forks() -> None:
    """``bimamba_inner_fn`` adds the scan of the reversed sequence, with given real ``B`` and ``C`` reversed by steps."""
    tensors = inner_tensors(torch.float64, True, False)
    A_b = -0.5 * torch.rand(12, 8, dtype=torch.complex128)
    out = bimamba_inner_fn(out_proj_bias=None, A_b=A_b, **tensors)
    torch.testing.assert_close(bimamba_inner_ref(out_proj_bias=None, A_b=A_b, **tensors), out)
    given = tensors | {"x_proj_weight": tensors["x_proj_weight"][:3], "B": torch.randn(2, 8, 66, dtype=torch.float64)}
    del given["B_proj_bias"]
    two = bimamba_inner_fn(out_proj_bias=None, A_b=A_b, **given)
    torch.testing.assert_close(bimamba_inner_ref(out_proj_bias=None, A_b=A_b, **given), two)
    forward, weight = mamba_inner_fn(out_proj_bias=None, **given), given.pop("out_proj_weight")
    torch.testing.assert_close(mamba_inner_fn_no_out_proj(**given).transpose(1, 2) @ weight.T, forward)
    assert not torch.allclose(two, forward)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"x_proj_weight": torch.randn(3 + 16, 12)},
            ValueError,
            r"x_proj_weight of shape \(rank \+ 2 dstate \+ 2 dstate, dim\)",
        ),
        ({"B_proj_bias": torch.randn(8)}, ValueError, r"B_proj_bias of shape \(2 dstate,\)"),
        (
            {"c_rms_weight": torch.randn(8)},
            NotImplementedError,
            "b_rms_weight and c_rms_weight are not supported with a complex A",
        ),
        ({"D": torch.randn(12) + 0j}, NotImplementedError, "complex D is not supported"),
    ],
)
def test_errors(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^mamba_inner_fn: .*{message}"):
        mamba_inner_fn(out_proj_bias=None, **inner_tensors(torch.float32, True, True) | changes)
    tensors = inner_tensors(torch.float32, True, True)
    with pytest.raises(RuntimeError, match=r"^bimamba_inner_fn: expected A_b real or complex as A"):
        bimamba_inner_fn(out_proj_bias=None, A_b=tensors["A"].real, **tensors)
    u = torch.ones(2, 12, 5)
    with pytest.raises(RuntimeError, match=r"^selective_scan_fn: expected a complex B of shape \(dim, dstate\)"):
        selective_scan_fn(u, u, tensors["A"], torch.ones(12, 8), torch.ones(2, 8, 10))
    with pytest.raises(
        ValueError, match=r"^selective_scan_fn: .* \(..., dstate, 2 seqlen\) with 2 seqlen = 10, got \[2, 8, 5\]"
    ):
        selective_scan_fn(u, u, tensors["A"], torch.ones(2, 8, 5), torch.ones(2, 8, 10))


def test_double_precision_of_a_matrix_of_steps_is_kept() -> None:
    u, A = torch.randn(1, 2, 5), -torch.rand(2, 3, dtype=torch.complex64)
    B, C = torch.randn(2, 1, 3, 10, dtype=torch.float64)
    out, state = selective_scan_fn(u, u.abs(), A, B, C, return_last_state=True)
    assert out.dtype == torch.float32 and state.dtype == torch.complex128
