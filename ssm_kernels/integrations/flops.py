"""Flops of the operators for ``torch.utils.flop_counter.FlopCounterMode``.

:func:`register` gives each operator its formula. A multiply-add counts as two flops. As for PyTorch's own operators,
elementwise work around a scan or a product (norms, gates, softplus, D x) is not counted. Backward counts twice its forward, and
again what it computes anew.

======================  ============================================================================================
selective scan          9 per element of the states: batch * seqlen * dim * dstate, the count that papers use
                        (https://github.com/state-spaces/mamba/issues/110)
selective_state_update  the same, with one step for each token
SSD                     the products of the chunked algorithm (Mamba-2, arXiv:2405.21060, section 6), chunks of Q steps:
                        C B^T of a group, its product with x, the chunks' states, and the states' share of the output
convolution             2 * width per element
linear recurrences      2 per element
summaries               as the scan, less the output: 7 per element of the states; SSD's 2 * headdim * dstate per step and head;
                        3 per element of a linear recurrence
======================  ============================================================================================

Q is ``chunk_size``, or 64 where it is absent; at most seqlen. The kernels may take chunks of another size and then do more or
less than the count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from .._recurrences import recurrences

__all__ = ["register"]

Arguments = Mapping[str, Any]
Formula = Callable[[Arguments], int]

DEFAULT_CHUNK = 64


def _scan(call: Arguments, *, x: str = "u", A: str = "A", backward: bool = False) -> int:
    return (1 + backward) * 9 * call[x].numel() * call[A].shape[-1]


def _ssd(steps: int, length: int, groups: int, heads: int, headdim: int, dstate: int, chunk: int | None, backward: bool) -> int:
    chunk = min(chunk or DEFAULT_CHUNK, length)
    within, values, states = groups * chunk * dstate, heads * chunk * headdim, heads * headdim * dstate
    if backward:  # of every factor; C B^T and the states are computed again
        return 2 * steps * (3 * within + 2 * values + 5 * states)
    return 2 * steps * (within + values + 2 * states)


def _chunk_scan(call: Arguments, *, backward: bool = False) -> int:
    batch, length, heads, headdim = call["x"].shape
    groups, dstate = call["B"].shape[-2:]
    return _ssd(batch * length, length, groups, heads, headdim, dstate, call["chunk_size"], backward)


def _convolution(call: Arguments, *, backward: bool = False) -> int:
    return (1 + backward) * 2 * call["x"].numel() * call["weight"].shape[-1]


def _mamba_conv(call: Arguments) -> int:
    return 2 * math.prod(call["xz"].shape[:-1]) * call["weight"].numel()


def _mamba_inner(call: Arguments) -> int:
    steps = math.prod(call["xz"].shape[:-1])
    products = sum(call[name].numel() for name in ("conv_weight", "x_proj", "dt_proj", "out_proj"))
    return steps * (2 * products + 9 * call["A_log"].numel())


def _mamba2_mixer(call: Arguments, *, backward: bool = False) -> int:
    batch, length, _ = call["projected"].shape
    convolution = (1 + backward) * 2 * batch * length * call["conv_weight"].numel()
    heads = call["A_log"].shape[0]
    scan = _ssd(
        *(batch * length, length, call["ngroups"], heads, call["headdim"], call["dstate"], call["chunk_size"]), backward
    )
    return convolution + scan


def _mamba2_mixer_projected(call: Arguments, *, backward: bool = False) -> int:
    weight = call["out_proj_weight"]
    projection = 0 if weight is None else 2 * call["projected"].shape[0] * call["projected"].shape[1] * weight.numel()
    return _mamba2_mixer(call, backward=backward) + (1 + backward) * projection


def _recurrence(call: Arguments, *, inputs: str | None = None, backward: bool = False) -> int:
    steps = next(iter(call.values())) if inputs is None else call[inputs][0]
    return (1 + backward) * 2 * steps.numel()


def _nothing(call: Arguments) -> int:
    return 0


def _scan_summary(call: Arguments, *, backward: bool = False) -> int:
    steps = next(call[name] for name in ("u", "grad_out") if call.get(name) is not None)
    return (1 + backward) * 7 * steps.numel() * call["A"].shape[-1]


def _chunk_scan_summary(call: Arguments, *, matrix: str = "B", backward: bool = False) -> int:
    heads = next(call[name] for name in ("x", "grad_out") if call.get(name) is not None)
    return (1 + 2 * backward) * 2 * heads.numel() * call[matrix].shape[-1]


def _recurrence_summary(call: Arguments, *, inputs: str | None = None, backward: bool = False) -> int:
    steps = next(iter(call.values())) if inputs is None else call[inputs][0]
    return (1 + backward) * 3 * steps.numel()


_FORMULAS: dict[Formula, tuple[str, ...]] = {
    _scan: ("selective_scan", "_selective_scan_fwd"),
    partial(_scan, backward=True): ("_selective_scan_bwd", "_selective_scan_bwd_last", "_selective_scan_bwd_out"),
    partial(_scan, x="x"): ("selective_state_update", "selective_state_update_out"),
    partial(_scan, x="x", A="A_log"): ("_mamba_mixer", "_mamba_mixer_fwd"),
    partial(_scan, x="x", A="A_log", backward=True): ("_mamba_mixer_bwd",),
    _chunk_scan: (
        *("ssd_chunk_scan", "_ssd_chunk_scan", "_ssd_chunk_scan_fwd"),
        *("_ssd_chunk_scan_states", "_ssd_chunk_scan_states_fwd"),
    ),
    partial(_chunk_scan, backward=True): ("_ssd_chunk_scan_bwd", "_ssd_chunk_scan_states_bwd"),
    _mamba2_mixer: ("_mamba2_mixer", "_mamba2_mixer_fwd"),
    partial(_mamba2_mixer, backward=True): ("_mamba2_mixer_bwd",),
    _mamba2_mixer_projected: ("_mamba2_mixer_projected", "_mamba2_mixer_projected_fwd"),
    partial(_mamba2_mixer_projected, backward=True): ("_mamba2_mixer_projected_bwd",),
    _convolution: (
        *("causal_conv1d", "_causal_conv1d", "_causal_conv1d_fwd"),
        *("causal_conv1d_update", "causal_conv1d_update_out"),
    ),
    partial(_convolution, backward=True): ("_causal_conv1d_bwd", "_causal_conv1d_bwd_out"),
    _mamba_conv: ("_mamba_conv",),
    _mamba_inner: ("_mamba_inner",),
    _recurrence: tuple(name for row in recurrences.values() for name in (row.scan, row.step)),
    partial(_recurrence, inputs="inputs"): ("_linear_recurrence", "_linear_recurrence_fwd"),
    partial(_recurrence, inputs="inputs", backward=True): ("_linear_recurrence_bwd",),
    _scan_summary: ("selective_scan_summary", "_selective_scan_summary_fwd", "_selective_scan_initial_gradient"),
    partial(_scan_summary, backward=True): ("_selective_scan_summary_bwd",),
    _chunk_scan_summary: ("ssd_chunk_scan_summary", "_ssd_chunk_scan_summary", "_ssd_chunk_scan_summary_fwd"),
    partial(_chunk_scan_summary, matrix="C"): ("_ssd_chunk_scan_initial_gradient",),
    partial(_chunk_scan_summary, backward=True): ("_ssd_chunk_scan_summary_bwd",),
    _recurrence_summary: tuple(row.summary for row in recurrences.values()),
    partial(_recurrence_summary, inputs="inputs"): ("_linear_recurrence_summary", "_linear_recurrence_summary_fwd"),
    partial(_recurrence_summary, inputs="inputs", backward=True): ("_linear_recurrence_summary_bwd",),
    _nothing: (
        *("rms_norm_gated", "layer_norm_gated", "_norm_gated", "_norm_gated_fwd", "_norm_gated_bwd", "_norm_gated_bwd_out"),
        *("_norm_gated_squares", "_norm_gated_products"),
        *("add_rms_norm", "add_layer_norm", "_add_norm", "_add_norm_fwd", "_add_norm_bwd"),
        "_mixer_parameters",
        "_copy_rows",
    ),
}


def register() -> None:
    """Makes ``FlopCounterMode`` count the operators of this package. Further calls do nothing.

    Examples:
        >>> import torch
        >>> from torch.utils.flop_counter import FlopCounterMode
        >>> import ssm_kernels
        >>> ssm_kernels.integrations.flops.register()
        >>> layer, x = ssm_kernels.nn.Mamba(64), torch.randn(2, 100, 64)
        >>> with FlopCounterMode(display=False) as counter:
        ...     y = layer(x)
        >>> counter.get_total_flops() > 2 * 200 * layer.in_proj.weight.numel()  # more than the in-projection's
        True
    """
    for formula, names in _FORMULAS.items():
        for name in names:
            operator = getattr(torch.ops.ssm_kernels, name)
            if operator not in flop_registry:
                register_flop_formula(operator, get_raw=True)(partial(_count, formula, _argument_names(operator)))


def _argument_names(operator: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in operator.default._schema.arguments)


def _count(formula: Formula, names: tuple[str, ...], *values: Any, out_val: Any = None, **options: Any) -> int:
    return formula({**dict.fromkeys(names), **dict(zip(names, values, strict=False)), **options})
