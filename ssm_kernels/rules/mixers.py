"""Rules of the operators that layers call between their projections."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._mixers import (
    MAMBA2_ARGUMENTS,
    delta_rule_mixer,
    mamba2_arguments,
    mamba2_mixer,
    mamba_mixer,
    mlstm_mixer,
    project,
)
from . import delta_rule, mlstm, selective_scan, ssd
from ._batching import each_sample
from ._decomposition import bound
from ._table import Call, Composed, Row
from .convolution import decomposed_convolution
from .norm import decomposed_norm

__all__ = ["ROWS", "composed_delta_rule", "composed_mamba2", "composed_mamba2_projected", "composed_mlstm"]

# In these tensors the channels stand beside others: xz and projected hold x, z, B, C and dt side by side, so that a piece of
# their columns does not hold whole heads; the gated norm of Mamba2 averages over all channels of a group.
AXES = dict.fromkeys(
    (
        *("x", "delta", "B", "C", "z", "initial_state", "chunk_states", "out", "last_state", "xz", ""),  # of Mamba
        *("projected", "conv_state", "ssm_state", "seq_idx", "final_conv_state", "final_ssm_state"),  # of Mamba2
        *("y", "rstd", "norm_mean_product"),
        *("q", "k", "v", "beta", "g", "q_state", "k_state", "v_state"),  # of the delta rules
        *("i", "f", "C", "n", "m", "final_C", "final_n", "final_m", "divisor"),  # of mLSTM
    ),
    "batch",
)


def _composed_mamba(*arguments: Any) -> tuple[Any, ...]:
    return mamba_mixer(torch.ops.ssm_kernels.selective_scan, *arguments)


def composed_mamba2(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    operators = torch.ops.ssm_kernels
    parts = operators.causal_conv1d, operators.ssd_chunk_scan, operators.rms_norm_gated
    return mamba2_mixer(*parts, *mamba2_arguments(arguments))


def composed_mamba2_projected(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, *states = composed_mamba2(*arguments)
    return project(out, *arguments[MAMBA2_ARGUMENTS:]), states[0], states[1]


def composed_delta_rule(*arguments: Any) -> tuple[Tensor, Tensor]:
    operators = torch.ops.ssm_kernels

    def convolve(*tensors: Any, **options: Any) -> Tensor:
        out: Tensor = operators.causal_conv1d(*tensors, **options)[0]
        return out

    def scan(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, final_states, _ = operators.delta_rule_scan(*tensors, **options)
        return out, final_states

    return delta_rule_mixer(convolve, scan, operators.rms_norm_gated, *arguments)


def composed_mlstm(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def scan(*tensors: Any, **options: Any) -> tuple[Tensor, Any]:
        out, *final_states = torch.ops.ssm_kernels.mlstm_scan(*tensors, **options)
        return out, final_states

    out, (C, n, m) = mlstm_mixer(scan, torch.ops.ssm_kernels.layer_norm_gated, *arguments)
    return out, C, n, m


def _conv_flops(call: Call) -> int:
    return 2 * math.prod(call["xz"].shape[:-1]) * call["weight"].numel()


def _inner_flops(call: Call) -> int:
    steps = math.prod(call["xz"].shape[:-1])
    products = sum(call[name].numel() for name in ("conv_weight", "x_proj", "dt_proj", "out_proj"))
    return steps * (2 * products + 9 * call["A_log"].numel())


def _mamba2_flops(call: Call, *, backward: bool = False) -> int:
    batch, length, _ = call["projected"].shape
    convolution = (1 + backward) * 2 * batch * length * call["conv_weight"].numel()
    heads = call["A_log"].shape[0]
    sizes = (call["ngroups"], heads, call["headdim"], call["dstate"], call["chunk_size"])
    return convolution + ssd.chunked_flops(batch * length, length, *sizes, backward)


def _projected_flops(call: Call, *, backward: bool = False) -> int:
    weight = call["out_proj_weight"]
    projection = 0 if weight is None else 2 * call["projected"].shape[0] * call["projected"].shape[1] * weight.numel()
    return _mamba2_flops(call, backward=backward) + (1 + backward) * projection


def _delta_rule_flops(call: Call, *, backward: bool = False) -> int:
    (batch, seqlen, _), updates = call["q"].shape, call["num_householder"]
    flops = 0
    for name in "qkv":
        weight = call[f"{name}_weight"]
        flops += 0 if weight is None else (1 + backward) * 2 * batch * seqlen * weight.numel()
    sizes = {"q": (seqlen, -1, call["key_dim"]), "v": (seqlen * updates, -1, call["value_dim"])}
    heads = {name: call[name].view(batch, *size) for name, size in sizes.items()}
    flops += delta_rule.flops(heads, backward=backward)
    weight = call["out_proj_weight"]
    return flops + (0 if weight is None else (1 + backward) * 2 * batch * seqlen * weight.numel())


def _mlstm_flops(call: Call, *, backward: bool = False) -> int:
    (batch, seqlen, _), heads = call["q"].shape, call["i"].shape[2]
    flops = mlstm.flops({name: call[name].view(batch, seqlen, heads, -1) for name in ("q", "v")}, backward=backward)
    weight = call["out_proj_weight"]
    return flops + (0 if weight is None else (1 + backward) * 2 * batch * seqlen * weight.numel())


def _no_flops(call: Call) -> int:
    return 0


def _decomposed_conv(
    xz: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, layer: str = "Mamba"
) -> tuple[Tensor, Tensor, Tensor]:
    x, z = xz.chunk(2, dim=-1)
    x, _ = decomposed_convolution(x, weight.flatten(1), bias, "silu", initial_state=initial_state)
    return x, x, z


def _decomposed_mamba(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    given = bound(torch.ops.ssm_kernels._mamba_mixer_fwd.default, arguments, options)
    scan = partial(selective_scan.decomposed_scan, save_chunk_states=given.pop("save_chunk_states"))
    out, last_state, saved = mamba_mixer(scan, **given)
    return out, last_state, saved, saved.clone()


def _without_norm(x: Tensor, weight: Tensor, z: Tensor, **options: Any) -> Tensor:
    return x


def _decomposed_mamba2(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    given = bound(torch.ops.ssm_kernels._mamba2_mixer_fwd.default, arguments, options)
    norm = partial(decomposed_norm, "rms_norm_gated") if given.pop("applies_norm") else _without_norm
    results = mamba2_mixer(decomposed_convolution, ssd.decomposed_scan, norm, *mamba2_arguments(tuple(given.values())))
    return *results, *(given["projected"].new_zeros(0) for _ in range(3))


def _decomposed_projected(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    given = bound(torch.ops.ssm_kernels._mamba2_mixer_projected_fwd.default, arguments, options)
    out, *others = _decomposed_mamba2(*(*given.values(),)[:MAMBA2_ARGUMENTS])
    return project(out, *(*given.values(),)[MAMBA2_ARGUMENTS:]), *others


def _decomposed_delta_rule(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    def convolve(*tensors: Any, **given: Any) -> Tensor:
        return decomposed_convolution(*tensors, **given)[0]

    def scan(*tensors: Any, **given: Any) -> tuple[Tensor, Tensor]:
        out, final_states, _ = delta_rule.decomposed_scan(*tensors, **given)
        return out, final_states

    given = bound(torch.ops.ssm_kernels._delta_rule_mixer_fwd.default, arguments, options)
    results = delta_rule_mixer(convolve, scan, partial(decomposed_norm, "rms_norm_gated"), *given.values())
    return *results, given["q"].new_zeros(0), given["q"].new_zeros(0)


def _decomposed_mlstm(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    def scan(*tensors: Any, **given: Any) -> tuple[Tensor, Any]:
        out, *final_states = mlstm.decomposed_scan(*tensors, **given)
        return out, final_states

    given = bound(torch.ops.ssm_kernels._mlstm_mixer_fwd.default, arguments, options)
    out, final_states = mlstm_mixer(scan, partial(decomposed_norm, "layer_norm_gated"), *given.values())
    return out, *final_states, *(given["q"].new_zeros(0) for _ in range(4))


_mamba_flops = partial(selective_scan.flops, x="x", A="A_log")


def _row(name: str, composed: Any, flops: Any, decomposition: Any) -> Row:
    forward, backward = (name, f"{name}_fwd"), f"{name}_bwd"
    return Row(
        batching={name: Composed(composed), backward: each_sample(backward)},
        flops=dict.fromkeys(forward, flops) | {backward: partial(flops, backward=True)},
        axes=dict.fromkeys((*forward, backward), AXES),
        decompositions={f"{name}_fwd": decomposition},
    )


ROWS = {
    "_mamba_conv": Row(
        batching={"_mamba_conv": Composed()},
        flops={"_mamba_conv": _conv_flops},
        axes={"_mamba_conv": AXES},
        decompositions={"_mamba_conv": _decomposed_conv},
    ),
    "_mamba_mixer": _row("_mamba_mixer", _composed_mamba, _mamba_flops, _decomposed_mamba),
    "_mamba2_mixer": _row("_mamba2_mixer", composed_mamba2, _mamba2_flops, _decomposed_mamba2),
    "_mamba2_mixer_projected": _row(
        "_mamba2_mixer_projected", composed_mamba2_projected, _projected_flops, _decomposed_projected
    ),
    "_delta_rule_mixer": _row("_delta_rule_mixer", composed_delta_rule, _delta_rule_flops, _decomposed_delta_rule),
    "_mlstm_mixer": _row("_mlstm_mixer", composed_mlstm, _mlstm_flops, _decomposed_mlstm),
    # Parts of layers' forward under torch.no_grad, and of their backward.
    "_mamba_inner": Row(flops={"_mamba_inner": _inner_flops}),
    "_mixer_parameters": Row(flops={"_mixer_parameters": _no_flops}),
    "_copy_rows": Row(flops={"_copy_rows": _no_flops}),
}
