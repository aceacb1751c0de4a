"""The layers in plain PyTorch: its own convolution, the formula of the norm and the reference scans, in the parameters' dtypes.

Each function computes a layer from its options and from parameters by name, which are the layer's own unless others are given.
In float64 the results are the exact ones; in the layer's dtypes they are the yardstick of its low-precision results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ssm_kernels import nn, reference
from ssm_kernels._dtypes import wide_dtype
from ssm_kernels.models import MambaConfig, RecurrentMixer

Parameters = Mapping[str, Tensor]


def parameters_of(layer: torch.nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The parameters by name; gradients flow through the conversion to ``dtype``."""
    return {name: p if dtype is None else p.to(dtype) for name, p in layer.named_parameters()}


def within(parameters: Parameters, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}


def _project(p: Parameters, name: str, x: Tensor) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def _convolve(p: Parameters, x: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
    """Convolves (batch, seqlen, channels); a step reads only previous steps of its own sequence."""
    weight, bias = p["conv1d.weight"], p.get("conv1d.bias")
    x, seqlen, width = x.transpose(1, 2), x.shape[1], weight.shape[2]
    inputs = F.pad(x, (width - 1, 0))
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


def rms_norm(x: Tensor, weight: Tensor, groups: int = 1, eps: float = 1e-5) -> Tensor:
    x = x.unflatten(-1, (groups, -1))
    return (x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()).flatten(-2) * weight


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, groups: int, norm_before_gate: bool) -> Tensor:
    wide = wide_dtype(x.dtype)
    y, gate, weight = x.to(wide), F.silu(z.to(wide)), weight.to(wide)
    y = rms_norm(y, weight, groups) * gate if norm_before_gate else rms_norm(y * gate, weight, groups)
    return y.to(x.dtype)


def selective_ssm(
    layer: nn.Mamba | nn.SelectiveSSM,
    x: Tensor,
    z: Tensor | None = None,
    initial_state: Tensor | None = None,
    p: Parameters | None = None,
) -> tuple[Tensor, Tensor]:
    """``out`` and ``last_state`` of (batch, seqlen, d_inner)."""
    p = parameters_of(layer) if p is None else p
    dt, B, C = _project(p, "x_proj", x).split([layer.dt_rank, layer.d_state, layer.d_state], dim=-1)
    delta, wide = F.linear(dt, p["dt_proj.weight"]), wide_dtype(x.dtype)
    out, last_state = reference.selective_scan(
        *(v.transpose(1, 2) for v in (x.to(delta.dtype), delta)),
        -torch.exp(p["A_log"].to(wide)),
        *(v.transpose(1, 2) for v in (B, C)),
        p["D"].to(wide),
        None if z is None else z.transpose(1, 2),
        p["dt_proj.bias"].to(wide),
        discretization=layer.discretization,
        delta_softplus=True,
        initial_state=initial_state,
        return_last_state=True,
    )
    return out.transpose(1, 2).to(delta.dtype), last_state


def mamba(layer: nn.Mamba, hidden_states: Tensor, p: Parameters | None = None) -> Tensor:
    p = parameters_of(layer) if p is None else p
    x, z = _project(p, "in_proj", hidden_states).chunk(2, dim=-1)
    return _project(p, "out_proj", selective_ssm(layer, _convolve(p, x), z, p=p)[0])


def mamba2(
    layer: nn.Mamba2,
    u: Tensor,
    p: Parameters | None = None,
    *,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    p = parameters_of(layer) if p is None else p
    d_mlp, matrix = layer.d_inner - layer.d_ssm, layer.ngroups * layer.d_state
    sizes = [d_mlp, d_mlp, layer.d_ssm, layer.d_ssm + 2 * matrix, layer.nheads]
    gate, up, z, xBC, dt = _project(p, "in_proj", u).split(sizes, dim=-1)
    sequence_ids = seq_idx
    if cu_seqlens is not None:
        sequence_ids = torch.bucketize(torch.arange(u.shape[1], device=u.device), cu_seqlens[1:], right=True)[None]
    x, B, C = _convolve(p, xBC, sequence_ids).split([layer.d_ssm, matrix, matrix], dim=-1)
    wide, heads = wide_dtype(x.dtype), (layer.nheads, layer.headdim)
    out, _ = reference.ssd_chunk_scan(
        x.unflatten(-1, heads),
        dt,
        -torch.exp(p["A_log"].to(wide)),
        *(v.unflatten(-1, (layer.ngroups, layer.d_state)) for v in (B, C)),
        D=(p["D"].unflatten(0, heads) if layer.D_has_hdim else p["D"]).to(wide),
        z=None if layer.rmsnorm else z.unflatten(-1, heads),
        dt_bias=p["dt_bias"].to(wide),
        dt_softplus=True,
        dt_limit=layer.dt_limit,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        return_final_states=True,
        discretization=layer.discretization,
    )
    y = out.to(dt.dtype).flatten(-2)
    if layer.rmsnorm:
        y = gated_norm(y, z, p["norm.weight"], layer.ngroups, layer.norm_before_gate)
    return _project(p, "out_proj", torch.cat([F.silu(gate) * up, y], dim=-1) if d_mlp else y)


ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "tanh": lambda x: 2 / (1 + torch.exp(-2 * x)) - 1,
    "g": lambda x: torch.where(x >= 0, x + 0.5, 1 / (1 + torch.exp(-x))),
}


def _recurrent_step(layer: torch.nn.Module, p: Parameters, name: str, x: Tensor, h: Tensor, dt: Tensor | float) -> Tensor:
    """The next state of one layer and direction: ``x`` (batch, inputs), ``h`` (batch, hidden)."""
    parts = (x @ p[f"weight_ih_{name}"].T + p.get(f"bias_ih_{name}", 0)).split(layer.hidden_size, dim=-1)
    g = ACTIVATIONS[layer.candidate_activation]
    if isinstance(layer, nn.MinGRU):
        z = 1 / (1 + torch.exp(-parts[0]))
        return (1 - z) * h + z * g(parts[1])
    if isinstance(layer, nn.MinLSTM):
        f, i = (1 / (1 + torch.exp(-part)) for part in parts[:2])
        return f / (f + i) * h + i / (f + i) * g(parts[2])
    raw_tau = parts[1] if layer.input_dependent_tau else p[f"raw_tau_{name}"]
    tau = 1e-3 + torch.where(raw_tau > 20, raw_tau, torch.log1p(torch.exp(raw_tau)))  # where torch's softplus is the identity
    decay = torch.exp(-dt / tau)
    return g(parts[0]) * (1 - decay) + h * decay


def recurrent(
    layer: torch.nn.Module,
    x: Tensor,
    h_0: Tensor | None = None,
    p: Parameters | None = None,
    *,
    dt: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """``output`` and ``h_n`` of a sequence (seqlen, batch, channels) by loops over layers, directions and time."""
    p = parameters_of(layer) if p is None else p
    suffixes = ("", "_reverse") if layer.bidirectional else ("",)
    last_states = []
    for index in range(layer.num_layers):
        outputs = []
        for suffix in suffixes:
            h = x.new_zeros(x.shape[1], layer.hidden_size) if h_0 is None else h_0[len(last_states)]
            states = {}
            for t in reversed(range(len(x))) if suffix else range(len(x)):
                dt_t = dt[t][:, None] if isinstance(dt, Tensor) else dt
                h = states[t] = _recurrent_step(layer, p, f"l{index}{suffix}", x[t], h, dt_t)
            outputs.append(torch.stack([states[t] for t in range(len(x))]))
            last_states.append(h)
        x = torch.cat(outputs, dim=-1)
    return x, torch.stack(last_states)


def recurrent_mixer(layer: RecurrentMixer, u: Tensor, p: Parameters) -> Tensor:
    h = recurrent(layer.rnn, _convolve(p, u).transpose(0, 1), p=within(p, "rnn."))[0].transpose(0, 1)
    return _project(p, "out_proj", h * F.silu(_project(p, "gate_proj", u)))


def logits(model: torch.nn.Module, input_ids: Tensor, p: Parameters | None = None) -> Tensor:
    """The logits of a model with RMSNorm and tied embeddings."""
    p = parameters_of(model) if p is None else p
    config: MambaConfig = model.config
    mixers = {"Mamba": mamba, "Mamba2": mamba2, "MinGRU": recurrent_mixer, "MinLSTM": recurrent_mixer}
    x = F.embedding(input_ids, p["backbone.embedding.weight"])
    for index, layer in enumerate(model.backbone.layers):
        q = within(p, f"backbone.layers.{index}.")
        x = x + mixers[config.mixer](layer.mixer, rms_norm(x, q["norm.weight"]), p=within(q, "mixer."))
        if config.d_intermediate:
            value, gate = _project(q, "mlp.fc1", rms_norm(x, q["norm2.weight"])).chunk(2, dim=-1)
            x = x + _project(q, "mlp.fc2", value * F.silu(gate))
    return F.linear(rms_norm(x, p["backbone.norm_f.weight"]), p["backbone.embedding.weight"])
