"""Mamba and Mamba2 composed of PyTorch's functions around the scans, with the parameters of a layer.

The layers computed this before the package had operators for the convolution, the gated norm and the mixers.
``bench_cpu.py`` times the layers beside these compositions. ``tests/lib/plain_layers.py`` is for accuracy instead: its scans
are the reference's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ssm_kernels import nn, selective_scan, ssd_chunk_scan
from ssm_kernels._dtypes import wide_dtype
from ssm_kernels.nn.gated_rms_norm import GatedRMSNorm


def mamba(layer: nn.Mamba, hidden_states: Tensor) -> Tensor:
    """``layer(hidden_states)``."""
    x, z = layer.in_proj(hidden_states).chunk(2, dim=-1)
    x = _convolve(layer, x)
    dt, B, C = layer.x_proj(x).split([layer.dt_rank, layer.d_state, layer.d_state], dim=-1)
    delta, wide = F.linear(dt, layer.dt_proj.weight), wide_dtype(x.dtype)
    out, _ = selective_scan(
        x.mT,
        delta.mT,
        -torch.exp(layer.A_log.to(wide)),
        B.mT,
        C.mT,
        layer.D.to(wide),
        z.mT,
        layer.dt_proj.bias.to(wide),
        discretization=layer.discretization,
        delta_softplus=True,
        return_last_state=True,
    )
    return layer.out_proj(out.mT)


def mamba2(layer: nn.Mamba2, u: Tensor) -> Tensor:
    """``layer(u)`` for a layer with a norm and without an MLP beside the SSM."""
    columns = layer.ngroups * layer.d_state
    z, xBC, dt = layer.in_proj(u).split([layer.d_ssm, layer.d_ssm + 2 * columns, layer.nheads], dim=-1)
    x, B, C = _convolve(layer, xBC).split([layer.d_ssm, columns, columns], dim=-1)
    wide, groups = wide_dtype(x.dtype), (layer.ngroups, layer.d_state)
    y, _ = ssd_chunk_scan(
        x.unflatten(-1, (layer.nheads, layer.headdim)),
        dt,
        -torch.exp(layer.A_log.to(wide)),
        B.unflatten(-1, groups),
        C.unflatten(-1, groups),
        chunk_size=layer.chunk_size,
        D=layer.D.to(wide),
        dt_bias=layer.dt_bias.to(wide),
        dt_softplus=True,
        dt_limit=layer.dt_limit,
        return_final_states=True,
        discretization=layer.discretization,
    )
    return layer.out_proj(_gated_norm(layer.norm, y.flatten(-2), z))


def _convolve(layer: nn.Mamba | nn.Mamba2, x: Tensor) -> Tensor:
    """The convolution and SiLU on (batch, seqlen, channels)."""
    weight = layer.conv1d.weight
    # One step of padding more than the convolution needs, as the layers had it for empty sequences.
    inputs = F.pad(x.mT, (layer.d_conv, 0))
    out = F.conv1d(inputs, weight, layer.conv1d.bias, groups=weight.shape[0])[..., 1:]
    return F.silu(out.mT.contiguous())


def _gated_norm(norm: GatedRMSNorm, x: Tensor, z: Tensor) -> Tensor:
    """``norm(x, z)``, computed in float32 for float16 and bfloat16."""
    wide = wide_dtype(x.dtype)
    y, gate = x.to(wide), F.silu(z.to(wide))
    if not norm.norm_before_gate:
        y = y * gate
    y = y.unflatten(-1, (-1, norm.group_size))
    y = F.rms_norm(y, (norm.group_size,), eps=norm.eps).flatten(-2) * norm.weight.to(wide)
    return (y * gate if norm.norm_before_gate else y).to(x.dtype)
