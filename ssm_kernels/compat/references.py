"""The ``*_ref`` functions of ``mamba_ssm`` and ``causal_conv1d``, which scripts compare with: on :mod:`ssm_kernels.reference`.

They compute in plain PyTorch, in float32 or, beside a float64 tensor, in float64, and return the dtype of their input. Those of
decoding steps update their state in place.
"""

from __future__ import annotations

import typing
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from .._dtypes import cast, wide_dtype
from .._torchscript import refuse_script_of
from ..choices import DiscretizationName
from ._promotion import common_dtype
from ._scan_arguments import complex_pairs, operator_arguments
from .causal_conv1d import write_final_states

__all__ = [
    "bimamba_inner_ref",
    "causal_conv1d_ref",
    "causal_conv1d_update_ref",
    "mamba_inner_ref",
    "rms_norm_ref",
    "selective_scan_ref",
    "selective_state_update_ref",
]


def _widen(function: str, tensors: dict[str, Tensor | None]) -> dict[str, Any]:
    """All tensors in float32, or in float64 if one is."""
    wide = wide_dtype(common_dtype(function, **tensors))
    return {name: cast(tensor, wide) for name, tensor in tensors.items()}


def selective_scan_ref(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    discretization: DiscretizationName = "zoh",
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`.selective_scan.selective_scan_fn` by :func:`ssm_kernels.reference.selective_scan`."""
    if A.is_complex():
        arguments = operator_arguments("selective_scan_ref", u, delta, A, B, C, D, z, delta_bias, takes_complex=True)
        out, last_state = reference.selective_scan(
            *arguments, delta_softplus=delta_softplus, return_last_state=True, discretization=discretization
        )
        return (out.to(u.dtype), last_state) if return_last_state else out.to(u.dtype)
    tensors = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias}
    out, last_state = reference.selective_scan(
        **_widen("selective_scan_ref", tensors),
        delta_softplus=delta_softplus,
        return_last_state=True,
        discretization=discretization,
    )
    return (out.to(u.dtype), last_state) if return_last_state else out.to(u.dtype)


def mamba_inner_ref(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    *,
    discretization: DiscretizationName = "zoh",
) -> Tensor:
    """:func:`.selective_scan.mamba_inner_fn` without its norms, by the references of its parts."""
    y = _inner_scan(
        xz,
        conv1d_weight,
        conv1d_bias,
        x_proj_weight,
        delta_proj_weight,
        A,
        B,
        C,
        D,
        delta_bias,
        B_proj_bias,
        C_proj_bias,
        delta_softplus,
        discretization,
    )
    return F.linear(y, out_proj_weight, out_proj_bias)


def _inner_scan(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    A: Tensor,
    B: Tensor | None,
    C: Tensor | None,
    D: Tensor | None,
    delta_bias: Tensor | None,
    B_proj_bias: Tensor | None,
    C_proj_bias: Tensor | None,
    delta_softplus: bool,
    discretization: DiscretizationName,
    reverse: bool = False,
) -> Any:
    """The gated scan, (batch, seqlen, dim), of the convolved sequence, from its end with ``reverse``."""
    scanned, z = xz.chunk(2, dim=1)
    x: Any = causal_conv1d_ref(scanned, conv1d_weight.squeeze(1), conv1d_bias, activation="silu")
    rank, width = delta_proj_weight.shape[1], A.shape[1] * (1 + A.is_complex())
    sizes = [rank, *[width] * ((B is None) + (C is None))]
    low_rank, *projected = F.linear(x.transpose(1, 2), x_proj_weight).split(sizes, dim=-1)

    def per_step(value: Tensor) -> Tensor:
        return complex_pairs(value) if A.is_complex() and not value.is_complex() else value

    B = per_step(_add(projected[0], B_proj_bias)).transpose(1, 2) if B is None else per_step(B) if B.dim() > 2 else B
    C = per_step(_add(projected[-1], C_proj_bias)).transpose(1, 2) if C is None else per_step(C) if C.dim() > 2 else C
    delta = F.linear(low_rank, delta_proj_weight).transpose(1, 2)
    if reverse:
        x, delta, z = (tensor.flip(-1) for tensor in (x, delta, z))
        B, C = (tensor.flip(-1) if tensor.dim() > 2 else tensor for tensor in (B, C))
    y: Any = selective_scan_ref(x, delta, A, B, C, D, z, delta_bias, delta_softplus, discretization=discretization)
    return (y.flip(-1) if reverse else y).transpose(1, 2)


def bimamba_inner_ref(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    A_b: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    *,
    discretization: DiscretizationName = "zoh",
) -> Tensor:
    """:func:`.selective_scan.bimamba_inner_fn` by the references of its parts."""
    y: Any = 0
    for system, reverse in ((A, False), (A_b, True)):
        y = y + _inner_scan(
            xz,
            conv1d_weight,
            conv1d_bias,
            x_proj_weight,
            delta_proj_weight,
            system,
            B,
            C,
            D,
            delta_bias,
            B_proj_bias,
            C_proj_bias,
            delta_softplus,
            discretization,
            reverse,
        )
    return F.linear(y, out_proj_weight, out_proj_bias)


def _add(v: Tensor, bias: Tensor | None) -> Tensor:
    return v if bias is None else v + bias.to(v.dtype)


def selective_state_update_ref(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    *,
    discretization: DiscretizationName = "zoh",
) -> Tensor:
    """:func:`.selective_scan.selective_state_update` by the function of that name in :mod:`ssm_kernels.reference`."""
    tensors = {"state": state, "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    out, new_state = reference.selective_state_update(
        **_widen("selective_state_update_ref", tensors),
        dt_softplus=dt_softplus,
        discretization=discretization,
    )
    state.copy_(new_state)
    return out.to(x.dtype)


def causal_conv1d_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`.causal_conv1d.causal_conv1d_fn` without ``seq_idx``, by :func:`ssm_kernels.reference.causal_conv1d`."""
    wide = _widen("causal_conv1d_ref", {"x": x, "weight": weight, "bias": bias, "initial_state": initial_states})
    steps = wide.pop("x").transpose(1, 2)
    out, final_states = reference.causal_conv1d(steps, **wide, activation=typing.cast(Any, activation), return_final_state=True)
    out = out.transpose(1, 2).to(x.dtype)
    if not return_final_states:
        return out
    final_states = final_states.to(x.dtype)
    return out, final_states if final_states_out is None else write_final_states(final_states, final_states_out)


def causal_conv1d_update_ref(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
) -> Tensor:
    """:func:`.causal_conv1d.causal_conv1d_update` by the function of that name in :mod:`ssm_kernels.reference`."""
    wide = _widen("causal_conv1d_update_ref", {"x": x, "state": conv_state, "weight": weight, "bias": bias})
    steps, state = wide["x"], wide["state"]
    steps = steps[:, None] if x.dim() == 2 else steps.transpose(1, 2)
    places = torch.arange(conv_state.shape[2], device=x.device).expand_as(conv_state)
    if cache_seqlens is not None:
        places = (places + cache_seqlens[:, None, None]) % conv_state.shape[2]
    out, new_state = reference.causal_conv1d_update(
        steps,
        state.gather(2, places),
        wide["weight"],
        wide["bias"],
        activation=typing.cast(Any, activation),
    )
    if cache_seqlens is not None:
        places = (places + steps.shape[1]) % conv_state.shape[2]
    conv_state.scatter_(2, places, new_state.to(conv_state.dtype))
    out = out.to(x.dtype)
    return out[:, 0] if x.dim() == 2 else out.transpose(1, 2)


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    upcast: bool = True,
) -> Tensor:
    """:func:`.norms.rmsnorm_fn` by :func:`ssm_kernels.reference.rms_norm_gated`."""
    if not upcast:
        raise NotImplementedError("rms_norm_ref: upcast=False is not supported")
    wide = _widen("rms_norm_ref", {"x": x, "weight": weight, "bias": bias, "z": z})
    out = reference.rms_norm_gated(
        **wide,
        eps=eps,
        group_size=group_size,
        norm_before_gate=norm_before_gate,
    )
    return out.to(x.dtype)


refuse_script_of(__name__)
