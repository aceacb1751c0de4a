"""Rules of the scan of the state-space dual form and of its summary."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from .._dtypes import wide_dtype
from ..choices import DiscretizationName
from ..reference.sequences import step_sizes
from ._batching import each_sample, fold
from ._decomposition import in_dtype, kept_states, refuse_packed, scan_states, skip_and_gate
from ._table import Call, Composed, Row

__all__ = ["ROWS", "chunked_flops", "decomposed_scan"]

AXES = {
    **dict.fromkeys(("x", "z", "out"), "batch seqlen channels headdim"),
    **dict.fromkeys(("B", "C"), "batch seqlen groups dstate"),
    **dict.fromkeys(("A", "dt_bias"), "channels"),
    **dict.fromkeys(("initial_states", "final_states"), "batch channels headdim dstate"),
    "D": "channels headdim",
    **dict.fromkeys(("dt", "log_decay", "gain"), "batch seqlen channels"),
    "decay": "batch channels",
    "seq_idx": "batch seqlen",
    "states": "batch positions channels headdim dstate",
}
TWO_SAMPLE_AXES = AXES | {
    "lam": "batch seqlen channels",
    **dict.fromkeys(("previous_x", "last_x"), "batch channels headdim"),
    **dict.fromkeys(("previous_B", "last_B"), "batch groups dstate"),
    "states_x": "batch positions channels headdim",
    "states_B": "batch positions groups dstate",
}
_HEADS = dict.fromkeys(("x", "dt", "B", "C", "z", "log_decay", "gain"), 2) | {"initial_states": 1}

DEFAULT_CHUNK = 64


def chunked_flops(
    steps: int, length: int, groups: int, heads: int, headdim: int, dstate: int, chunk: int | None, backward: bool
) -> int:
    chunk = min(chunk or DEFAULT_CHUNK, length)
    within, values, states = groups * chunk * dstate, heads * chunk * headdim, heads * headdim * dstate
    if backward:  # of every factor; C B^T and the states are computed again
        return 2 * steps * (3 * within + 2 * values + 5 * states)
    return 2 * steps * (within + values + 2 * states)


def _flops(call: Call, *, backward: bool = False) -> int:
    batch, length, heads, headdim = call["x"].shape
    groups, dstate = call["B"].shape[-2:]
    return chunked_flops(batch * length, length, groups, heads, headdim, dstate, call["chunk_size"], backward)


def _summary_flops(call: Call, *, matrix: str = "B", backward: bool = False) -> int:
    heads = next(call[name] for name in ("x", "grad_out") if call.get(name) is not None)
    return (1 + 2 * backward) * 2 * heads.numel() * call[matrix].shape[-1]


def decomposed_scan(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    discretization: DiscretizationName = "zoh",
    reverse: bool = False,
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    refuse_packed("ssd_chunk_scan", cu_seqlens)
    batch, _, heads, headdim = x.shape
    if reverse:
        x, B, C = (sequence.flip(1) for sequence in (x, B, C))
        optional = (dt, z, seq_idx, log_decay, gain)
        dt, z, seq_idx, log_decay, gain = (None if sequence is None else sequence.flip(1) for sequence in optional)
    dtype = wide_dtype(x.dtype)
    wide, dt, A, B, C, D, z, bias, states = in_dtype(dtype, x, dt, A, B, C, D, z, dt_bias, initial_states)
    states = wide.new_zeros(batch, heads, headdim, B.shape[3]) if states is None else states
    x_t, B_t, C_t = (sequence.transpose(0, 1) for sequence in (wide, B, C))
    rule: DiscretizationName | None = discretization
    if log_decay is None:
        steps = step_sizes(dt, bias, dt_softplus, dt_limit)
    else:  # step sizes of A = 1, and inputs with their gains
        rule, steps, A = None, log_decay.to(dtype), wide.new_ones(heads)
        x_t = x_t if gain is None else gain.to(dtype).transpose(0, 1)[..., None] * x_t
    keep = kept_states(seq_idx, dtype)
    y, states = scan_states(rule, x_t, steps.transpose(0, 1), A[:, None], B_t, C_t, states, keep)
    D = D[:, None] if D is not None and D.dim() == 1 else D
    out = skip_and_gate(y.transpose(0, 1), wide, D, z).to(x.dtype)
    return out.flip(1) if reverse else out, states


_STATES = ("_ssd_chunk_scan_states_at", "_ssd_chunk_scan_states", "_ssd_chunk_scan_states_fwd")
_FORWARD = ("ssd_chunk_scan", "_ssd_chunk_scan", "_ssd_chunk_scan_fwd", *_STATES)
_TWO_SAMPLES = tuple(f"{name}_two_sample" for name in ("ssd_chunk_scan", "_ssd_chunk_scan"))
_TWO_SAMPLES += ("_ssd_chunk_scan_two_sample_states_at", "_ssd_chunk_scan_two_sample_fwd")
_BACKWARD_TWO_SAMPLES = "_ssd_chunk_scan_two_sample_bwd"
_BACKWARD = ("_ssd_chunk_scan_bwd", "_ssd_chunk_scan_states_bwd")
_SUMMARY = ("ssd_chunk_scan_summary", "_ssd_chunk_scan_summary", "_ssd_chunk_scan_summary_fwd")

ROWS = {
    "ssd_chunk_scan": Row(
        batching={
            **dict.fromkeys(("ssd_chunk_scan", "_ssd_chunk_scan_states_at"), Composed()),
            "_ssd_chunk_scan": fold("_ssd_chunk_scan", _HEADS, ("A", "D", "dt_bias"), (2, 1)),
            **dict.fromkeys(("ssd_chunk_scan_two_sample", "_ssd_chunk_scan_two_sample_states_at"), Composed()),
            **{name: each_sample(name) for name in (*_BACKWARD, "_ssd_chunk_scan_two_sample", _BACKWARD_TWO_SAMPLES)},
        },
        flops=dict.fromkeys((*_FORWARD, *_TWO_SAMPLES), _flops)
        | dict.fromkeys((*_BACKWARD, _BACKWARD_TWO_SAMPLES), partial(_flops, backward=True)),
        axes=dict.fromkeys((*_FORWARD, *_BACKWARD), AXES)
        | dict.fromkeys((*_TWO_SAMPLES, _BACKWARD_TWO_SAMPLES), TWO_SAMPLE_AXES),
        decompositions={"ssd_chunk_scan": decomposed_scan},
    ),
    "ssd_chunk_scan_summary": Row(
        batching={
            "ssd_chunk_scan_summary": Composed(),
            "_ssd_chunk_scan_summary": fold("_ssd_chunk_scan_summary", _HEADS, ("A", "dt_bias"), (1, 1)),
            "_ssd_chunk_scan_summary_bwd": each_sample("_ssd_chunk_scan_summary_bwd"),
        },
        flops=dict.fromkeys(_SUMMARY, _summary_flops)
        | {
            "_ssd_chunk_scan_initial_gradient": partial(_summary_flops, matrix="C"),
            "_ssd_chunk_scan_summary_bwd": partial(_summary_flops, backward=True),
        },
        axes=dict.fromkeys((*_SUMMARY, "_ssd_chunk_scan_summary_bwd"), AXES),
    ),
}
