"""The functions on these kernels that the modeling modules of transformers call, made from a module's own function.

Each drops the keywords that the models' own function does not use either, and raises an error for packed sequences that it
cannot keep apart. The fused functions, ``mamba_inner_fn`` and ``mamba_split_conv1d_scan_combined``, return None; the models go
on with the parts. mamba_ssm's fused functions differ from the models' own path: no mask after the convolution, other norms.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat import causal_conv1d as _conv
from ..compat._delta_rule import check_gates, delta_rule
from ..compat.selective_scan import selective_scan_fn, selective_state_update
from ..compat.ssd import mamba_chunk_scan_combined

__all__ = [
    "DELTA_RULES",
    "FUSED",
    "KERNELS",
    "Function",
    "make_causal_conv1d_fn",
    "make_causal_conv1d_fn_of_delta_rules",
    "make_causal_conv1d_fn_of_mamba",
    "make_causal_conv1d_update",
]

Function = Callable[..., Any]


def _sequence_numbers(function: str, seqlen: int, seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | None:
    """``seq_idx``, or that of ``cu_seqlens`` of one packed row. The host does not wait for their values."""
    if seq_idx is not None or cu_seqlens is None:
        return seq_idx
    if cu_seqlens.dim() != 1:
        raise ValueError(f"{function}: expected cu_seqlens of shape (sequences + 1,), got {list(cu_seqlens.shape)}")
    steps = torch.arange(seqlen, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(steps, cu_seqlens[1:].contiguous(), right=True, out_int32=True)[None]


def _refuse_packed(function: str, seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> None:
    for name, value in (("seq_idx", seq_idx), ("cu_seqlens", cu_seqlens)):
        if value is not None:
            raise NotImplementedError(f"{function}: {name} is not supported: {_REFUSED[function]}")


def make_causal_conv1d_fn(original: Function) -> Function:
    @functools.wraps(original)
    def causal_conv1d_fn(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **_: Any,
    ) -> Any:
        seq_idx = _sequence_numbers("causal_conv1d_fn", x.shape[-1], seq_idx, cu_seqlens)
        if activation in _ACTIVATIONS:
            return _conv.causal_conv1d_fn(x, weight, bias, seq_idx=seq_idx, activation=activation)
        return _activation(activation)(_conv.causal_conv1d_fn(x, weight, bias, seq_idx=seq_idx))

    return causal_conv1d_fn


def make_causal_conv1d_fn_of_mamba(original: Function) -> Function:
    conv = make_causal_conv1d_fn(original)

    @functools.wraps(original)
    def causal_conv1d_fn(*args: Any, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None, **kwargs: Any) -> Any:
        # The scan that follows gets neither: a sequence would continue the state of the one before.
        _refuse_packed("causal_conv1d_fn", seq_idx, cu_seqlens)
        return conv(*args, **kwargs)

    return causal_conv1d_fn


def make_causal_conv1d_fn_of_delta_rules(original: Function) -> Function:
    conv = make_causal_conv1d_fn(original)

    @functools.wraps(original)
    def causal_conv1d_fn(
        *args: Any,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        # transformers gives the scan what FlashAttention gets, so the convolution separates the same sequences.
        return conv(*args, seq_idx=seq_idx, cu_seqlens=cu_seq_lens_q if cu_seqlens is None else cu_seqlens, **kwargs)

    return causal_conv1d_fn


def make_causal_conv1d_update(original: Function) -> Function:
    @functools.wraps(original)
    def causal_conv1d_update(
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **_: Any,
    ) -> Any:
        _refuse_packed("causal_conv1d_update", seq_idx, cu_seqlens)
        if activation in _ACTIVATIONS:
            return _conv.causal_conv1d_update(x, conv_state, weight, bias, activation)
        return _activation(activation)(_conv.causal_conv1d_update(x, conv_state, weight, bias))

    return causal_conv1d_update


def make_selective_scan_fn(original: Function) -> Function:
    @functools.wraps(original)
    def scan(
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
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **_: Any,
    ) -> Any:
        _refuse_packed("selective_scan_fn", seq_idx, cu_seqlens)
        return selective_scan_fn(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state)

    return scan


def make_selective_state_update(original: Function) -> Function:
    @functools.wraps(original)
    def step(
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
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **_: Any,
    ) -> Any:
        _refuse_packed("selective_state_update", seq_idx, cu_seqlens)
        return selective_state_update(state, x, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus)

    return step


def make_mamba_chunk_scan_combined(original: Function) -> Function:
    @functools.wraps(original)
    def scan(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        seq_idx: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: Sequence[float] = (0.0, float("inf")),
        return_final_states: bool = False,
        cu_seqlens: Tensor | None = None,
        **_: Any,
    ) -> Any:
        seq_idx = _sequence_numbers("mamba_chunk_scan_combined", x.shape[1], seq_idx, cu_seqlens)
        return mamba_chunk_scan_combined(
            x,
            dt,
            A,
            B,
            C,
            chunk_size,
            D=D,
            z=z,
            dt_bias=dt_bias,
            initial_states=initial_states,
            seq_idx=seq_idx,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            return_final_states=return_final_states,
        )

    return scan


def make_delta_rule(original: Function, name: str) -> Function:
    """Makes the scan. A recurrent one takes the step for short calls without gradients, and writes the cache in place."""
    has_channels, is_step = name.endswith("kda"), name.startswith("fused")

    @functools.wraps(original)
    def scan(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **_: Any,
    ) -> Any:
        check_gates(name, value, g=g, key_dim=query.shape[-1] if has_channels else None)
        ends = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
        if is_step:
            _refuse_packed(name, seq_idx, ends)
        elif initial_state is not None and (seq_idx is not None or ends is not None):
            raise NotImplementedError(f"{name}: packed sequences after a cached state are not supported: {_STEP_IS_NOT_PACKED}")
        elif output_final_state and ends is not None:
            # The cache has one state for the row, that of the last sequence.
            seq_idx = _sequence_numbers(name, query.shape[1], seq_idx, ends)
        return delta_rule(
            name,
            query,
            key,
            value,
            beta,
            g=g,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=ends if seq_idx is None else None,
            seq_idx=seq_idx,
            by_step=is_step,
            in_place=is_step and output_final_state,
        )

    return scan


def make_fused(original: Function) -> Function:
    @functools.wraps(original)
    def fused(*args: Any, **kwargs: Any) -> None:
        return None

    return fused


_MAMBA_IS_NOT_PACKED = "the scan of models of Mamba's kind takes no packed sequences in transformers; pad them instead"
_STEP_IS_NOT_PACKED = "a decoding step has one token of each row; pass prompts in one call, and packed prompts without a cache"
_REFUSED = {
    "causal_conv1d_fn": _MAMBA_IS_NOT_PACKED,
    "selective_scan_fn": _MAMBA_IS_NOT_PACKED,
    "causal_conv1d_update": _STEP_IS_NOT_PACKED,
    "selective_state_update": _STEP_IS_NOT_PACKED,
    "fused_recurrent_gated_delta_rule": _STEP_IS_NOT_PACKED,
    "fused_recurrent_kda": _STEP_IS_NOT_PACKED,
}
_ACTIVATIONS = (None, "silu", "swish")
FUSED = ("mamba_inner_fn", "mamba_split_conv1d_scan_combined")
DELTA_RULES = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda")
KERNELS: dict[str, Callable[[Function], Function]] = {
    "causal_conv1d_fn": make_causal_conv1d_fn,
    "causal_conv1d_update": make_causal_conv1d_update,
    "mamba_chunk_scan_combined": make_mamba_chunk_scan_combined,
    "selective_scan_fn": make_selective_scan_fn,
    "selective_state_update": make_selective_state_update,
    **{name: functools.partial(make_delta_rule, name=name) for name in DELTA_RULES},
    **dict.fromkeys(FUSED, make_fused),
}


def _activation(name: str | None) -> Function:
    """An activation that the convolution's kernel does not have."""
    activation: Function = importlib.import_module("transformers.activations").ACT2FN[name]
    return activation
