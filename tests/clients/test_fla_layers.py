"""The layers of the delta rule beside flash-linear-attention's: constructors, state_dicts, initial parameters, outputs.

FLA's layers call Triton kernels. Its functions in plain PyTorch take their place here, and PyTorch's own convolution and norm.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fla_package import import_fla, without
from torch import Tensor

from ssm_kernels import nn

CLIENT, OPERATOR = "flash-linear-attention", "delta_rule_scan"

HOMES = {
    "DeltaNet": "delta_net",
    "GatedDeltaNet": "gated_deltanet",
    "KimiDeltaAttention": "kda",
    "GatedDeltaProduct": "gated_deltaproduct",
}
SIZES = {"hidden_size": 24, "head_dim": 8, "num_heads": 2}
LAYERS = {
    "DeltaNet": {"hidden_size": 24, "num_heads": 2},
    "DeltaNet-gate": {"hidden_size": 24, "num_heads": 2, "use_gate": True, "expand_v": 2.0, "allow_neg_eigval": True},
    "DeltaNet-elu": {"hidden_size": 24, "num_heads": 2, "qk_activation": "elu", "qk_norm": "sum", "use_short_conv": False},
    "GatedDeltaNet": SIZES | {"num_v_heads": 4},
    "GatedDeltaNet-no_gate": SIZES | {"use_gate": False, "conv_bias": True, "allow_neg_eigval": True, "use_short_conv": True},
    "GatedDeltaNet-sigmoid": SIZES | {"output_gate_activation": "sigmoid", "use_short_conv": False},
    "KimiDeltaAttention": SIZES | {"num_v_heads": 4, "expand_v": 1.5},
    "KimiDeltaAttention-bounded": SIZES | {"safe_gate": True, "lower_bound": -5.0, "allow_neg_eigval": True},
    "GatedDeltaProduct": SIZES | {"num_v_heads": 4, "num_householder": 3},
    "GatedDeltaProduct-no_gates": SIZES | {"use_forget_gate": False, "use_output_gate": False, "allow_neg_eigval": False},
}
every_layer = pytest.mark.parametrize("name", LAYERS)
pytestmark = pytest.mark.filterwarnings("ignore:ShortConvolution is crucial")


@pytest.fixture(autouse=True)
def without_tf32():
    """PyTorch's convolution takes TF32 by default."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def convolution(conv: torch.nn.Conv1d, x: Tensor, **options: object) -> tuple[Tensor, None]:
    out = F.conv1d(F.pad(x.transpose(1, 2), (conv.kernel_size[0] - 1, 0)), conv.weight, conv.bias, groups=conv.groups)
    out = out.transpose(1, 2)
    return (out if conv.activation is None else F.silu(out)), None


def packed_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, **options: object) -> tuple[Tensor, None]:
    out = F.conv1d(F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=weight.shape[0])
    return F.silu(out.transpose(1, 2)), None


def norm(module: torch.nn.Module, x: Tensor, g: Tensor | None = None) -> Tensor:
    out = F.rms_norm(x, x.shape[-1:], module.weight, module.eps)
    return out if g is None else out * (g.sigmoid() if module.activation == "sigmoid" else F.silu(g))


def normalized(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.fixture(scope="module")
def fla():
    """FLA's layers, whose kernels are replaced by its own functions in plain PyTorch."""
    names = [f"fla.layers.{home}" for home in HOMES.values()]
    naives = ["fla.ops.delta_rule.naive", "fla.ops.gated_delta_rule.naive", "fla.ops.kda.naive", "fla.ops.kda.gate"]
    naives += ["fla.ops.gated_delta_product.naive", "fla.ops.gated_delta_rule.gate"]
    with without("fla"), pytest.MonkeyPatch.context() as patch:
        of = dict(zip([*names, *naives, "fla.modules"], import_fla(*names, *naives, "fla.modules"), strict=True))

        def delta(q, k, v, beta, use_qk_l2norm_in_kernel, **options):
            q, k = (normalized(x) if use_qk_l2norm_in_kernel else x for x in (q, k))
            q, k, v, beta = (x.transpose(1, 2) for x in (q, k, v, beta))
            return of["fla.ops.delta_rule.naive"].delta_rule_recurrence(q, k, v, beta)[0].transpose(1, 2), None

        def gated(q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval, **options):
            g = of["fla.ops.gated_delta_rule.gate"].naive_gdn_gate(g, A_log, dt_bias)
            q, k = (normalized(x).repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
            beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
            return of["fla.ops.gated_delta_rule.naive"].naive_recurrent_gated_delta_rule(q, k, v, beta, g)

        def kda(q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval, lower_bound, **options):
            gates = of["fla.ops.kda.gate"]
            if lower_bound is None:
                g = gates.naive_kda_gate(g, A_log, dt_bias)
            else:
                g = gates.naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound)
            beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
            return of["fla.ops.kda.naive"].naive_recurrent_kda(normalized(q), normalized(k), v, g, beta)

        def product(q, k, v, g, beta, num_householder, **options):
            scale = q.shape[-1] ** -0.5
            function = of["fla.ops.gated_delta_product.naive"].naive_recurrent_gated_delta_product
            return function(normalized(q), normalized(k), v, g, beta, scale, num_householder=num_householder)

        patch.setattr(of["fla.layers.delta_net"], "fused_recurrent_delta_rule", delta)
        patch.setattr(of["fla.layers.gated_deltanet"], "chunk_gated_delta_rule", gated)
        patch.setattr(of["fla.layers.gated_deltanet"], "causal_conv1d", packed_convolution)
        patch.setattr(of["fla.layers.kda"], "chunk_kda", kda)
        patch.setattr(of["fla.layers.gated_deltaproduct"], "chunk_gated_delta_product", product)
        patch.setattr(of["fla.modules"].ShortConvolution, "forward", convolution)
        for each in ("FusedRMSNormGated", "RMSNorm"):
            patch.setattr(getattr(of["fla.modules"], each), "forward", norm)
        yield SimpleNamespace(**{name: getattr(of[f"fla.layers.{home}"], name) for name, home in HOMES.items()})


def make(fla, name):
    """The layer of FLA and ours, drawn from the same seed."""
    layer, options = name.partition("-")[0], LAYERS[name]
    torch.manual_seed(0)
    theirs = getattr(fla, layer)(**options)
    torch.manual_seed(0)
    return theirs, getattr(nn, layer)(**options)


@pytest.mark.parametrize("name", HOMES)
def test_constructor(fla, name):
    theirs = [p for p in inspect.signature(getattr(fla, name)).parameters.values() if p.name != "kwargs"]
    ours = [*inspect.signature(getattr(nn, name)).parameters.values()]
    assert [(p.name, p.default, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.default, p.kind) for p in theirs]
    assert [p.name for p in ours[len(theirs) :]] == ["device", "dtype"]


@every_layer
def test_initial_parameters(fla, name):
    """Names, shapes, dtypes, order and, with one seed, the values."""
    theirs, ours = (layer.state_dict() for layer in make(fla, name))
    assert [*ours] == [*theirs]
    for key, value in theirs.items():
        assert ours[key].dtype is value.dtype and ours[key].shape == value.shape, key
        torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@every_layer
def test_outputs_and_gradients_of_a_checkpoint(fla, name, device):
    theirs, ours = make(fla, name)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs, ours = theirs.to(device), ours.to(device)
    x = torch.randn(2, 40, 24, generator=torch.Generator().manual_seed(1)).to(device)
    expected, actual = theirs(x)[0], ours(x)
    assert (actual - expected).norm() <= 1e-5 * expected.norm()
    cotangent = torch.randn(2, 40, 24, generator=torch.Generator().manual_seed(2)).to(device)
    of_theirs = torch.autograd.grad(expected, [*theirs.parameters()], cotangent)
    for (key, _), a, b in zip(
        ours.named_parameters(), torch.autograd.grad(actual, [*ours.parameters()], cotangent), of_theirs, strict=True
    ):
        assert (a - b).norm() <= 1e-4 * b.norm(), key
