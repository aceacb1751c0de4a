"""The autograd functions of mamba_ssm and causal_conv1d, called by apply with positional arguments, as projects call them."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPAT_VERSION
from torch import Tensor

from ssm_kernels import compat, reference
from ssm_kernels.compat import references
from ssm_kernels.compat._modules import MODULES

CLIENT = "mamba_ssm"
CLIENT_VERSION = COMPAT_VERSION
OPERATOR = "every operator"

SCAN = "mamba_ssm.ops.selective_scan_interface"
SSD = "mamba_ssm.ops.triton.ssd_combined"
NORM, NORM_1_X = "mamba_ssm.ops.triton.layer_norm", "mamba_ssm.ops.triton.layernorm"
GATED = "mamba_ssm.ops.triton.layernorm_gated"
CONV = "causal_conv1d.causal_conv1d_interface"


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def decays(*shape: int) -> Tensor:
    return -torch.rand(*shape, dtype=torch.float64) - 0.1


def plain_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state):
    return reference.selective_scan(
        u, delta, A, B, C, D, z, delta_bias, delta_softplus=delta_softplus, return_last_state=return_last_state
    )


def plain_inner(xz, conv, conv_bias, x_proj, dt_proj, *rest):
    """The mixer of which the four functions of Mamba are parts; without an out-projection there are 5 + 4 arguments or more."""
    out_proj = torch.eye(xz.shape[1] // 2, dtype=xz.dtype)
    return references.mamba_inner_ref(xz, conv, conv_bias, x_proj, dt_proj, out_proj, None, *rest[:-1]).transpose(1, 2)


def plain_ssd(x, dt, A, B, C, chunk_size, D, z, dt_bias, initial, seq_idx, cu_seqlens, softplus, limit, final):
    return reference.ssd_chunk_scan(
        x,
        dt,
        A,
        B,
        C,
        D=D,
        z=z,
        dt_bias=dt_bias,
        initial_states=initial,
        dt_softplus=softplus,
        dt_limit=limit,
        return_final_states=final,
    )


def plain_split(zxbcdt, conv, conv_bias, dt_bias, A, D, chunk_size, initial, seq_idx, limit, final, activation, weight, eps):
    """Heads of 4 channels, one group of 3 states, and a norm after the gate."""
    z, xBC, dt = zxbcdt.split([8, 14, 2], dim=-1)
    xBC = F.silu(F.conv1d(F.pad(xBC.transpose(1, 2), (3, 0)), conv[:, None], conv_bias, groups=14)).transpose(1, 2)
    x, B, C = xBC.split([8, 3, 3], dim=-1)
    y = reference.ssd_chunk_scan(
        x.unflatten(-1, (2, 4)), dt, A, B[:, :, None], C[:, :, None], D=D, dt_bias=dt_bias, dt_softplus=True, dt_limit=limit
    )
    return F.rms_norm(y.flatten(-2), (8,), weight, eps) * F.silu(z)


def plain_norm(x, weight, bias, residual, eps, is_rms_norm):
    total = x + residual
    if is_rms_norm:
        return F.rms_norm(total, (6,), weight, eps) + bias, total
    return F.layer_norm(total, (6,), weight, bias, eps), total


def plain_conv(x, weight, bias, seq_idx, initial, return_final, final_out, activation):
    steps = torch.cat([initial, x], -1)
    return F.silu(F.conv1d(steps, weight[:, None], bias, groups=6)), steps[..., -3:]


def inner() -> list:
    return [randn(2, 12, 9), randn(6, 1, 4), randn(6), randn(8, 6), randn(6, 2)]


def scan() -> list:
    return [randn(2, 6, 9), randn(2, 6, 9), decays(6, 3), randn(2, 3, 9), randn(2, 2, 3, 9), randn(6), randn(2, 6, 9), randn(6)]


def ssd() -> list:
    sizes = (2, 7, 2, 4), (2, 7, 2, 4), (2,), (2, 2, 4, 3)
    D, z, dt_bias, initial = randn(2), randn(*sizes[1]), randn(2), randn(*sizes[3])
    return [randn(*sizes[0]), randn(2, 7, 2), decays(2), randn(2, 7, 1, 3), randn(2, 7, 1, 3), 16, D, z, dt_bias, initial]


def rest() -> list:
    """The arguments of a mixer after A: B, C, D, delta_bias, the biases of B and C, delta_softplus, checkpoint_lvl."""
    return [None, None, randn(6), randn(6), randn(3), randn(3), True, 1]


def norm() -> list:
    return [randn(2, 5, 6), randn(6), randn(6), randn(2, 5, 6)]


LIMIT = (0.1, 2.0)
# Module, class, its arguments by position, and the plain function of these arguments.
CALLS = {
    "scan": (SCAN, "SelectiveScanFn", lambda: [*scan(), True, True], plain_scan),
    "inner": (
        SCAN,
        "MambaInnerFn",
        lambda: [*inner(), randn(5, 6), randn(5), decays(6, 3), *rest()],
        lambda *a: references.mamba_inner_ref(*a[:-1]),
    ),
    "no_out_proj": (SCAN, "MambaInnerFnNoOutProj", lambda: [*inner(), decays(6, 3), *rest()], plain_inner),
    "bimamba": (
        SCAN,
        "BiMambaInnerFn",
        lambda: [*inner(), randn(5, 6), randn(5), decays(6, 3), decays(6, 3), *rest()],
        lambda *a: references.bimamba_inner_ref(*a[:-1]),
    ),
    "ssd": (SSD, "MambaChunkScanCombinedFn", lambda: [*ssd(), None, None, True, LIMIT, True], plain_ssd),
    "split": (
        SSD,
        "MambaSplitConv1dScanCombinedFn",
        lambda: [
            *(randn(2, 7, 24), randn(14, 4), randn(14), randn(2), decays(2), randn(2, 4), 16, None, None, LIMIT),
            *(False, "silu", randn(8), 1e-5),
        ],
        plain_split,
    ),
    "norm": (
        NORM,
        "LayerNormFn",
        lambda: [*norm(), None, None, None, 1e-5, 0.0, None, True, False, False],
        lambda *a: plain_norm(*a[:4], a[7], a[12]),
    ),
    "linear": (
        NORM,
        "LayerNormLinearFn",
        lambda: [*norm()[:3], randn(4, 6), randn(4), randn(2, 5, 6), 1e-5, False, False, True],
        lambda x, w, b, lw, lb, r, eps, *_: F.linear(plain_norm(x, w, b, r, eps, True)[0], lw, lb),
    ),
    "norm_1_x": (
        NORM_1_X,
        "LayerNormFn",
        lambda: [*norm(), 1e-5, True, False, False],
        lambda *a: plain_norm(*a[:5], a[7]),
    ),
    "gated": (
        GATED,
        "LayerNormFn",
        lambda: [*norm(), 1e-5, None, False, False],
        lambda x, w, b, z, eps, *_: F.layer_norm(x * F.silu(z), (6,), w, b, eps),
    ),
    "conv": (
        CONV,
        "CausalConv1dFn",
        lambda: [randn(2, 6, 9), randn(6, 4), randn(6), None, randn(2, 6, 3), True, None, "silu"],
        plain_conv,
    ),
}


@pytest.mark.serves("values and gradients", model="`SelectiveScanFn` and the other classes with `apply`")
@pytest.mark.parametrize("call", CALLS)
def test_apply_has_the_values_and_gradients_of_plain_formulas(call):
    module, name, arguments, plain = CALLS[call]
    torch.manual_seed(0)
    given = [a.requires_grad_() if isinstance(a, Tensor) else a for a in arguments()]
    leaves = [a for a in given if isinstance(a, Tensor)]
    with compat.installed():
        function = getattr(importlib.import_module(module), name)
    out, expected = function.apply(*given), plain(*given)
    torch.testing.assert_close(out, expected)
    outs = [list(each) if isinstance(each, tuple) else [each] for each in (out, expected)]
    dout = [torch.randn_like(each) for each in outs[0]]
    grads = [torch.autograd.grad(each, leaves, dout, allow_unused=True) for each in outs]
    torch.testing.assert_close(list(grads[0]), list(grads[1]))


def test_the_account_counts_the_classes():
    with compat.installed():
        from mamba_ssm.ops.selective_scan_interface import BiMambaInnerFn, SelectiveScanFn  # noqa: F401

        account = {request.name: request for request in compat.served().requests}
    for name in ("SelectiveScanFn", "BiMambaInnerFn"):
        request = account[f"{SCAN}.{name}"]
        assert (request.status, request.answer) == ("served", f"ssm_kernels.compat.autograd_functions.{name}")


def test_classes_with_one_name_differ_by_module():
    functions = [MODULES[module]["LayerNormFn"] for module in (NORM, NORM_1_X, GATED)]
    assert len({*functions}) == 3


def test_apply_stays_in_a_compiled_graph():
    function = MODULES[SCAN]["SelectiveScanFn"]
    arguments = [each.requires_grad_() for each in scan()]

    def call(*given):
        return function.apply(*given, True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), call(*arguments))


def test_rms_norm_forward():
    x, weight, bias = randn(5, 6), randn(6), randn(6)
    function = MODULES[SCAN]["rms_norm_forward"]
    torch.testing.assert_close(function(x, weight, None), F.rms_norm(x, (6,), weight, 1e-6))
    torch.testing.assert_close(function(x, weight, bias, 1e-3, False), F.layer_norm(x, (6,), weight, bias, 1e-3))


def test_the_projection_of_a_norm_takes_any_mix_of_dtypes():
    function = MODULES[NORM]["layer_norm_linear_fn"]
    x, weight, linear = torch.randn(5, 6).bfloat16(), torch.ones(6), torch.randn(4, 6)
    out, total = function(x, weight, None, linear, None, x, prenorm=True, is_rms_norm=True)
    expected = F.linear(F.rms_norm(2 * x.double(), (6,), eps=1e-6), linear.double())
    assert out.dtype == total.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=0.05, atol=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        assert function(x.float(), weight, None, linear, None).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"^layer_norm_linear_fn: expected norm_weight"):
        function(x, weight[1:], None, linear, None)
    with pytest.raises(ValueError, match=r"^layer_norm_linear_fn: expected linear_weight of shape \(out_columns, columns\)"):
        function(x, weight, None, linear.T, None)


def test_errors_name_the_class():
    function = MODULES[SCAN]["SelectiveScanFn"]
    u, delta, A, B, C = scan()[:5]
    with pytest.raises(ValueError, match=r"^SelectiveScanFn.apply: expected B of shape"):
        function.apply(u, delta, A, B[..., 1:], C)
    with pytest.raises(TypeError, match=r"^SelectiveScanFn.apply: missing a required argument: 'delta'"):
        function.apply(u)
    derived = type("ForkFn", (function,), {})
    with pytest.raises(NotImplementedError, match=r"^ForkFn: .* classes derived from SelectiveScanFn: derive from torch"):
        derived.apply(u, delta, A, B, C)
