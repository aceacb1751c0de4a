"""xLSTM's layer as a loop of PyTorch operations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def plain_mlstm(layer: Any, u: Tensor, p: dict[str, Tensor] | None = None) -> Tensor:
    """Step by step, without a unit: the true states."""
    p = dict(layer.named_parameters()) if p is None else p

    def project(name: str) -> Tensor:
        return F.linear(u, p[f"{name}.weight"], p.get(f"{name}.bias"))

    if layer.weight_mode == "single":
        q, k, v, o, i, f = (project(name) for name in ("q", "k", "v", "ogate_preact", "igate_preact", "fgate_preact"))
    else:
        q, k, v, o = project("qkv_opreact").split([layer.qk_dim, layer.qk_dim, layer.v_dim, layer.v_dim], -1)
        i, f = project("ifgate_preact").chunk(2, -1)
    if layer.gate_soft_cap is not None:
        i, f = (layer.gate_soft_cap * torch.tanh(x / layer.gate_soft_cap) for x in (i, f))
    q, k, v = (x.unflatten(-1, (layer.num_heads, -1)) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    C, n = u.new_zeros(u.shape[0], layer.num_heads, k.shape[-1], v.shape[-1]), torch.zeros_like(k[:, 0])
    m, outputs = u.new_full((u.shape[0], layer.num_heads), -torch.inf), []
    for t in range(u.shape[1]):
        m = torch.maximum(F.logsigmoid(f[:, t]) + m, i[:, t]).detach()
        C = f[:, t].sigmoid()[..., None, None] * C + i[:, t].exp()[..., None, None] * k[:, t, :, :, None] * v[:, t, :, None]
        n = f[:, t].sigmoid()[..., None] * n + i[:, t].exp()[..., None] * k[:, t]
        divisor = (scale * (n * q[:, t]).sum(-1)).abs().clamp(min=1) + layer.eps * m.exp()
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", C, q[:, t]) / divisor[..., None])
    h = torch.stack(outputs, 1)
    norm = layer.multihead_norm
    h = F.layer_norm(h, h.shape[-1:], eps=norm.eps).flatten(-2) * p["multihead_norm.weight"]
    h = h + p["multihead_norm.bias"] if "multihead_norm.bias" in p else h
    return F.linear(o.sigmoid() * h, p["out_proj.weight"], p.get("out_proj.bias"))
