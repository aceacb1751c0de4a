"""The mixers of plain PyTorch: its own convolution, the formula of the norm and the reference scans, in the layers' dtypes.

What the layers were before they had operators for all that, and what their low-precision results are measured by.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ssm_kernels import nn, reference
from ssm_kernels.nn.common import wide_dtype


def _convolve(layer: nn.Mamba | nn.Mamba2, x: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
    """On (batch, seqlen, channels); a step reads those before it that have its number."""
    x, seqlen, width = x.transpose(1, 2), x.shape[1], layer.d_conv
    weight, bias, inputs = layer.conv1d.weight, layer.conv1d.bias, F.pad(x, (width - 1, 0))
    if sequence_ids is None:
        return F.silu(F.conv1d(inputs, weight, bias, groups=weight.shape[0])).transpose(1, 2)
    weight = weight.to(wide_dtype(x.dtype))
    terms = [] if bias is None else [bias[:, None].to(weight.dtype)]
    for lag in range(width):
        window = inputs[..., width - 1 - lag : width - 1 - lag + seqlen]
        before = F.pad(sequence_ids, (lag, 0), value=-1)[:, :seqlen]
        window = window.masked_fill((before != sequence_ids)[:, None], 0)
        terms.append(window * weight[:, :, width - 1 - lag])
    return F.silu(functools.reduce(torch.add, terms).to(x.dtype).transpose(1, 2))


def _gated_norm(layer: nn.Mamba2, y: Tensor, z: Tensor) -> Tensor:
    norm, wide = layer.norm, wide_dtype(y.dtype)
    x, gate = y.to(wide), F.silu(z.to(wide))
    if not norm.norm_before_gate:
        x = x * gate
    x = x.unflatten(-1, (-1, norm.group_size))
    x = F.rms_norm(x, (norm.group_size,), eps=norm.eps).flatten(-2) * norm.weight.to(wide)
    return (x * gate if norm.norm_before_gate else x).to(y.dtype)


def mamba(layer: nn.Mamba, hidden_states: Tensor) -> Tensor:
    x, z = layer.in_proj(hidden_states).chunk(2, dim=-1)
    x = _convolve(layer, x)
    dt, B, C = layer.x_proj(x).split([layer.dt_rank, layer.d_state, layer.d_state], dim=-1)
    delta, wide = F.linear(dt, layer.dt_proj.weight), wide_dtype(x.dtype)
    out = reference.selective_scan(
        *(v.transpose(1, 2) for v in (x.to(delta.dtype), delta)),
        -torch.exp(layer.A_log.to(wide)),
        *(v.transpose(1, 2) for v in (B, C)),
        layer.D.to(wide),
        z.transpose(1, 2),
        layer.dt_proj.bias.to(wide),
        discretization=layer.discretization,
        delta_softplus=True,
    )
    return layer.out_proj(out.transpose(1, 2).to(delta.dtype))


def mamba2(layer: nn.Mamba2, u: Tensor, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    d_mlp, matrix = layer.d_inner - layer.d_ssm, layer.ngroups * layer.d_state
    sizes = [d_mlp, d_mlp, layer.d_ssm, layer.d_ssm + 2 * matrix, layer.nheads]
    gate, up, z, xBC, dt = layer.in_proj(u).split(sizes, dim=-1)
    sequence_ids = seq_idx
    if cu_seqlens is not None:
        sequence_ids = torch.bucketize(torch.arange(u.shape[1], device=u.device), cu_seqlens[1:], right=True)[None]
    xBC = _convolve(layer, xBC, sequence_ids)
    x, B, C = xBC.split([layer.d_ssm, matrix, matrix], dim=-1)
    wide, heads = wide_dtype(x.dtype), (layer.nheads, layer.headdim)
    out, _ = reference.ssd_chunk_scan(
        x.unflatten(-1, heads),
        dt,
        -torch.exp(layer.A_log.to(wide)),
        *(v.unflatten(-1, (layer.ngroups, layer.d_state)) for v in (B, C)),
        D=(layer.D.unflatten(0, heads) if layer.D_has_hdim else layer.D).to(wide),
        z=None if layer.rmsnorm else z.unflatten(-1, heads),
        dt_bias=layer.dt_bias.to(wide),
        dt_softplus=True,
        dt_limit=layer.dt_limit,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        return_final_states=True,
        discretization=layer.discretization,
    )
    y = out.to(dt.dtype).flatten(-2)
    y = _gated_norm(layer, y, z) if layer.rmsnorm else y
    return layer.out_proj(torch.cat([F.silu(gate) * up, y], dim=-1) if d_mlp else y)
