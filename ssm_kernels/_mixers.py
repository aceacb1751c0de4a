"""The layers of Mamba, Mamba-2, delta rules and mLSTM between their projections, in terms of the operators they consist of.

vmap, decompositions and ranks that share a sequence have rules for these operators and none for the fused mixers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._dtypes import wide_dtype
from .choices import ConvActivation, DiscretizationName, GateActivation

__all__ = [
    "MAMBA2_ARGUMENTS",
    "Mamba2Options",
    "Mamba2Tensors",
    "delta_rule_mixer",
    "mamba2_arguments",
    "mamba2_mixer",
    "mamba_mixer",
    "mlstm_mixer",
    "project",
]


class Mamba2Tensors(NamedTuple):
    """The tensors of ``torch.ops.ssm_kernels._mamba2_mixer``, in the order of its first arguments."""

    projected: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    D: Tensor | None
    dt_bias: Tensor
    norm_weight: Tensor | None
    conv_state: Tensor | None
    ssm_state: Tensor | None
    seq_idx: Tensor | None
    cu_seqlens: Tensor | None


class Mamba2Options(NamedTuple):
    """The options of ``torch.ops.ssm_kernels._mamba2_mixer``, in the order of its last arguments."""

    headdim: int
    ngroups: int
    dstate: int
    chunk_size: int | None
    dt_min: float
    dt_max: float
    eps: float
    norm_before_gate: bool
    discretization: DiscretizationName

    @property
    def of_groups(self) -> int:
        """The columns of B, and of C."""
        return self.ngroups * self.dstate

    @property
    def of_scan(self) -> dict[str, Any]:
        """Options of ``ssd_chunk_scan``, its summary and its initial gradient."""
        return {"dt_softplus": True, "dt_limit": (self.dt_min, self.dt_max), "discretization": self.discretization}

    def split(self, projected: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """z, the convolution's input, and dt."""
        d_ssm = heads * self.headdim
        z, xBC, dt = projected.split_with_sizes([d_ssm, d_ssm + 2 * self.of_groups, heads], dim=-1)
        return z, xBC, dt

    def heads(self, x: Tensor) -> Tensor:
        """(..., heads * headdim) as (..., heads, headdim)."""
        return x.unflatten(-1, (-1, self.headdim))

    def groups(self, matrix: Tensor) -> Tensor:
        """B or C, (..., ngroups * dstate), as (..., ngroups, dstate)."""
        return matrix.unflatten(-1, (self.ngroups, self.dstate))


MAMBA2_ARGUMENTS = len(Mamba2Tensors._fields) + len(Mamba2Options._fields)


def mamba2_arguments(arguments: tuple[Any, ...]) -> tuple[Mamba2Tensors, Mamba2Options]:
    """The arguments of ``torch.ops.ssm_kernels._mamba2_mixer`` by name, but for the layer's name in messages."""
    tensors = len(Mamba2Tensors._fields)
    options = arguments[tensors : tensors + len(Mamba2Options._fields)]
    return Mamba2Tensors(*arguments[:tensors]), Mamba2Options(*options)


def project(
    out: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    recomputes_scan: bool,
    layer: str = "Mamba2",
    casts_projection: bool = False,
) -> Tensor:
    """The out-projection of a mixer's result, with the last arguments of ``torch.ops.ssm_kernels._mamba2_mixer_projected``."""
    if weight is None:
        return out
    if casts_projection:
        weight, bias = weight.to(out.dtype), None if bias is None else bias.to(out.dtype)
    if weight.shape[1] != out.shape[-1]:  # columns for zeros behind the rows
        out = F.pad(out, (0, weight.shape[1] - out.shape[-1]))
    return F.linear(out, weight, bias)


def mamba_mixer(
    scan: Callable[..., tuple[Any, ...]],
    x: Tensor,
    delta: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    discretization: DiscretizationName,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    layer: str = "Mamba",
) -> tuple[Any, ...]:
    """Arguments and results as ``torch.ops.ssm_kernels._mamba_mixer``, by a function with the arguments of ``selective_scan``.

    Results of ``scan`` after the first are returned as they are.
    """
    wide = wide_dtype(x.dtype)
    out, *others = scan(
        x.transpose(1, 2),
        delta.transpose(1, 2),
        -torch.exp(A_log.to(wide)),
        B.transpose(1, 2),
        C.transpose(1, 2),
        None if D is None else D.to(wide),
        None if z is None else z.transpose(1, 2),
        None if delta_bias is None else delta_bias.to(wide),
        initial_state=initial_state,
        discretization=discretization,
        delta_softplus=True,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
    )
    return out.transpose(1, 2), *others


def mamba2_mixer(
    convolve: Callable[..., tuple[Tensor, Tensor]],
    scan: Callable[..., tuple[Tensor, Tensor]],
    norm: Callable[..., Tensor],
    tensors: Mamba2Tensors,
    options: Mamba2Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Results as of ``torch.ops.ssm_kernels._mamba2_mixer``.

    Args:
        convolve: a function with the arguments of ``causal_conv1d``, which returns the final state too.
        scan: a function with the arguments of ``ssd_chunk_scan``, which returns the final states too.
        norm: a function with the arguments of ``rms_norm_gated``.
        tensors, options: the arguments of the operator.
    """
    projected, norm_weight, seq_idx = tensors.projected, tensors.norm_weight, tensors.seq_idx
    wide = wide_dtype(projected.dtype)
    z, xBC, dt = options.split(projected, tensors.dt_bias.shape[-1])
    xBC, conv_state = convolve(
        xBC,
        tensors.conv_weight.flatten(1),
        tensors.conv_bias,
        activation="silu",
        seq_idx=seq_idx,
        cu_seqlens=tensors.cu_seqlens,
        initial_state=tensors.conv_state,
    )
    x, B, C = xBC.split([z.shape[-1], options.of_groups, options.of_groups], dim=-1)
    y, ssm_state = scan(
        options.heads(x),
        dt,
        -torch.exp(tensors.A_log.to(wide)),
        options.groups(B),
        options.groups(C),
        chunk_size=options.chunk_size,
        D=None if tensors.D is None else tensors.D.to(wide),
        z=options.heads(z) if norm_weight is None else None,
        dt_bias=tensors.dt_bias.to(wide),
        initial_states=tensors.ssm_state,
        seq_idx=seq_idx,
        cu_seqlens=tensors.cu_seqlens,
        **options.of_scan,
    )
    y = y.flatten(-2)
    if norm_weight is not None:
        group_size = z.shape[-1] // options.ngroups
        y = norm(y, norm_weight, z, eps=options.eps, group_size=group_size, norm_before_gate=options.norm_before_gate)
    return y, conv_state, ssm_state


def delta_rule_mixer(
    convolve: Callable[..., Tensor],
    scan: Callable[..., tuple[Tensor, Any]],
    norm: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    z: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    v_weight: Tensor | None,
    q_bias: Tensor | None,
    k_bias: Tensor | None,
    v_bias: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    norm_weight: Tensor | None,
    q_state: Tensor | None,
    k_state: Tensor | None,
    v_state: Tensor | None,
    ssm_state: Tensor | None,
    out_proj_weight: Tensor | None,
    out_proj_bias: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    key_dim: int,
    value_dim: int,
    num_householder: int,
    qk_activation: ConvActivation | None,
    qk_l2norm: bool,
    gate_lower_bound: float | None,
    beta_sigmoid: bool,
    allow_neg_eigval: bool,
    eps: float,
    norm_before_gate: bool,
    norm_activation: GateActivation,
    recomputes_scan: bool,
    layer: str,
    casts_projection: bool = False,
) -> tuple[Tensor, Any]:
    """Arguments and results as of ``torch.ops.ssm_kernels._delta_rule_mixer``.

    Args:
        convolve: a function with the arguments of ``causal_conv1d``.
        scan: a function with the arguments of ``delta_rule_scan``, which returns the final states too.
        norm: a function with the arguments of ``rms_norm_gated``.
    """
    packing = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}

    def convolved(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, state: Tensor | None, activation: ConvActivation | None
    ) -> Tensor:
        if weight is None:
            return x
        return convolve(x, weight.flatten(1), bias, activation=activation, initial_state=state, **packing)

    def heads(x: Tensor, size: int, updates: int = 1) -> Tensor:
        return x.unflatten(-1, (-1, size)) if updates == 1 else x.unflatten(-1, (updates, -1, size)).flatten(1, 2)

    q = convolved(q, q_weight, q_bias, q_state, qk_activation)
    k = convolved(k, k_weight, k_bias, k_state, qk_activation)
    v = convolved(v, v_weight, v_bias, v_state, "silu")
    y, final_states = scan(
        heads(q, key_dim),
        heads(k, key_dim, num_householder),
        heads(v, value_dim, num_householder),
        beta,
        g=g,
        initial_states=ssm_state,
        num_householder=num_householder,
        qk_l2norm=qk_l2norm,
        A_log=A_log,
        dt_bias=dt_bias,
        gate_lower_bound=gate_lower_bound,
        beta_sigmoid=beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        **packing,
    )
    if norm_weight is not None:
        gate = None if z is None else heads(z, value_dim)
        y = norm(y, norm_weight, gate, eps=eps, norm_before_gate=norm_before_gate, activation=norm_activation)
    projection = (out_proj_weight, out_proj_bias, recomputes_scan, layer, casts_projection)
    return project(y.flatten(-2), *projection), final_states


def mlstm_mixer(
    scan: Callable[..., tuple[Tensor, Any]],
    norm: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    z: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    C: Tensor | None,
    n: Tensor | None,
    m: Tensor | None,
    out_proj_weight: Tensor | None,
    out_proj_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    gate_soft_cap: float | None,
    eps: float,
    norm_eps: float,
    recomputes_scan: bool,
    layer: str,
    casts_projection: bool = False,
) -> tuple[Tensor, Any]:
    """Arguments and results as of ``torch.ops.ssm_kernels._mlstm_mixer``, but with the final states in one.

    Args:
        scan: a function with the arguments of ``torch.ops.ssm_kernels.mlstm_scan``, which returns the output and the final
            states.
        norm: a function with the arguments of ``layer_norm_gated``.
    """
    heads = i.shape[-1]
    if gate_soft_cap is not None:
        i, f = (gate_soft_cap * torch.tanh(gate / gate_soft_cap) for gate in (i, f))
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in (q, k, v))
    y, final_states = scan(q, k, v, i, f, eps=eps, initial_C=C, initial_n=n, initial_m=m, cu_seqlens=cu_seqlens)
    group_size, y = y.shape[-1], y.flatten(-2)
    if norm_weight is not None:
        options: dict[str, Any] = {"eps": norm_eps, "group_size": group_size, "norm_before_gate": True}
        y = norm(y, norm_weight, z, norm_bias, **options, activation="sigmoid")
    return project(y, out_proj_weight, out_proj_bias, recomputes_scan, layer, casts_projection), final_states
