"""The layers around a delta rule in plain PyTorch, step by step: the formulas of flash-linear-attention's naive functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ssm_kernels.nn import DeltaNet, GatedDeltaNet, GatedDeltaProduct, KimiDeltaAttention

WIDTH = 12


class DeltaLayer(NamedTuple):
    """A layer of the tests: its class, arguments of a small one and, by name, further arguments."""

    type: type[nn.Module]
    sizes: dict[str, Any]
    variants: dict[str, dict[str, Any]]


_OF_ALL: dict[str, dict[str, Any]] = {
    "default": {},
    "no_conv": {"use_short_conv": False},
    "conv_bias": {"conv_bias": True, "conv_size": 3},
    "conv_of_one_step": {"conv_size": 1},
}
_HEADS = {"hidden_size": WIDTH, "head_dim": 4, "num_heads": 2, "layer_idx": 0}
DELTA_LAYERS = {
    "DeltaNet": DeltaLayer(
        DeltaNet,
        {"hidden_size": WIDTH, "num_heads": 2, "layer_idx": 0},
        _OF_ALL
        | {
            "gate": {"use_gate": True, "expand_v": 2.0},
            "no_beta": {"use_beta": False},
            "neg_eigval": {"allow_neg_eigval": True, "expand_k": 0.5},
            "no_beta_neg_eigval": {"use_beta": False, "allow_neg_eigval": True},
            "elu": {"qk_activation": "elu"},
            "relu_sum": {"qk_activation": "relu", "qk_norm": "sum"},
            "elu_sum": {"qk_activation": "elu", "qk_norm": "sum", "use_short_conv": False},
            "identity": {"qk_activation": "identity", "use_short_conv": False},
        },
    ),
    "GatedDeltaNet": DeltaLayer(
        GatedDeltaNet,
        _HEADS,
        _OF_ALL
        | {
            "more_value_heads": {"num_v_heads": 6, "expand_v": 1.5},
            "no_gate": {"use_gate": False},
            "sigmoid": {"output_gate_activation": "sigmoid", "num_v_heads": 4},
            "neg_eigval": {"allow_neg_eigval": True},
        },
    ),
    "KimiDeltaAttention": DeltaLayer(
        KimiDeltaAttention,
        _HEADS,
        _OF_ALL
        | {
            "more_value_heads": {"num_v_heads": 4, "expand_v": 1.5},
            "neg_eigval": {"allow_neg_eigval": True},
            "bounded": {"lower_bound": -2.0, "num_v_heads": 4},
            "safe_gate": {"safe_gate": True, "lower_bound": -5.0},
        },
    ),
    "GatedDeltaProduct": DeltaLayer(
        GatedDeltaProduct,
        _HEADS,
        _OF_ALL
        | {
            "more_value_heads": {"num_v_heads": 4, "expand_v": 1.5},
            "one_update": {"num_householder": 1},
            "three_updates": {"num_householder": 3, "num_v_heads": 4},
            "no_forget_gate": {"use_forget_gate": False},
            "no_output_gate": {"use_output_gate": False},
            "no_neg_eigval": {"allow_neg_eigval": False},
        },
    ),
}
VARIANTS = [f"{name}-{variant}" for name, layer in DELTA_LAYERS.items() for variant in layer.variants]


def make_delta_layer(
    name: str, device: str = "cpu", dtype: torch.dtype | None = torch.float64, seed: int = 0, **options: Any
) -> Any:
    """A layer with parameters that depend on the seed alone; ``name`` is a key of the table, or a key, ``-`` and a variant."""
    name, _, variant = name.partition("-")
    spec = DELTA_LAYERS[name]
    torch.manual_seed(seed)
    layer = spec.type(**spec.sizes | (spec.variants[variant] if variant else {}) | options, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, dtype=torch.float64).to(parameter))
    return layer.to(device)


def _short_convolution(layer: Any, p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight, bias = p[f"{name}.weight"], p.get(f"{name}.bias")
    padded = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return F.conv1d(padded, weight, bias, groups=weight.shape[0]).transpose(1, 2)


def plain_delta_layer(layer: Any, u: Tensor, p: Mapping[str, Tensor] | None = None) -> Tensor:
    """The layer of whole sequences that begin from zero, in the dtype of the parameters ``p``, by default its own."""
    p = dict(layer.named_parameters()) if p is None else p
    heads, value_heads, columns = layer.num_heads, layer.num_v_heads, layer.head_k_dim
    updates = getattr(layer, "num_householder", 1)
    of_keys = getattr(layer, "qk_activation", "silu")
    projected = []
    for name, activation in (("q", of_keys), ("k", of_keys), ("v", "silu")):
        x = F.linear(u, p[f"{name}_proj.weight"])
        if layer.use_short_conv:
            x = _short_convolution(layer, p, f"{name}_conv1d", x)
        functions: dict[str, Any] = {"silu": F.silu, "relu": F.relu, "elu": lambda x: F.elu(x) + 1, "identity": lambda x: x}
        projected.append(functions[activation](x))
    q, k, v = projected
    batch, seqlen = u.shape[:2]
    q = q.view(batch, seqlen, heads, columns)
    k = k.view(batch, seqlen, updates, heads, columns)
    v = v.view(batch, seqlen, updates, value_heads, layer.head_v_dim)
    if getattr(layer, "qk_norm", "l2") == "sum":
        q, k = (F.normalize(x, p=1, dim=-1, eps=1e-6) for x in (q, k))
    else:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(value_heads // heads, dim=-2) for x in (q, k))
    if "b_proj.weight" in p:
        beta = F.linear(u, p["b_proj.weight"]).sigmoid().view(batch, seqlen, updates, value_heads)
    else:
        beta = u.new_ones(batch, seqlen, updates, value_heads)
    if layer.allow_neg_eigval:
        beta = beta * 2
    decay = u.new_ones(batch, seqlen, value_heads, 1)
    if "a_proj.weight" in p:
        g = -p["A_log"].exp() * F.softplus(F.linear(u, p["a_proj.weight"]) + p["dt_bias"])
        decay = g.exp()[..., None]
    elif "f_proj.0.weight" in p:
        raw = F.linear(F.linear(u, p["f_proj.0.weight"]), p["f_proj.1.weight"]) + p["dt_bias"]
        raw, rate = raw.view(batch, seqlen, value_heads, columns), p["A_log"].exp()[:, None]
        bound = layer.lower_bound
        decay = (-rate * F.softplus(raw) if bound is None else bound * (rate * raw).sigmoid()).exp()
    state, outputs = u.new_zeros(batch, value_heads, columns, layer.head_v_dim), []
    for t in range(seqlen):
        state = state * decay[:, t, :, :, None]
        for i in range(updates):
            key = k[:, t, i]
            error = v[:, t, i] - torch.einsum("bhkv,bhk->bhv", state, key)
            state = state + torch.einsum("bhk,bhv->bhkv", key * beta[:, t, i, :, None], error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * columns**-0.5)
    y = torch.stack(outputs, dim=1)
    y = y * (y.square().mean(-1, keepdim=True) + layer.o_norm.eps).rsqrt() * p["o_norm.weight"]
    if "g_proj.weight" in p:
        gate = F.linear(u, p["g_proj.weight"]).view(y.shape)
        is_sigmoid = getattr(layer, "output_gate_activation", "swish") == "sigmoid"
        y = y * (gate.sigmoid() if is_sigmoid else F.silu(gate))
    elif "g_proj.0.weight" in p:
        gate = F.linear(F.linear(u, p["g_proj.0.weight"]), p["g_proj.1.weight"], p["g_proj.1.bias"])
        y = y * gate.view(y.shape).sigmoid()
    return F.linear(y.flatten(-2), p["o_proj.weight"])
