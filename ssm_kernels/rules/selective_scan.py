"""Rules of the selective scan and of its summary."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from .._dtypes import wide_dtype
from ..choices import DiscretizationName
from ..reference.sequences import step_sizes
from ._batching import each_sample, fold
from ._decomposition import in_dtype, kept_states, refuse_packed, scan_states, skip_and_gate
from ._table import Axes, Call, Composed, Row

__all__ = ["ROWS", "decomposed_scan", "flops"]

AXES = {
    **dict.fromkeys(("u", "delta", "z", "out"), "batch channels seqlen"),
    **dict.fromkeys(("B", "C"), "batch groups dstate seqlen"),
    **dict.fromkeys(("D", "delta_bias"), "channels"),
    **dict.fromkeys(("initial_state", "last_state", "decay"), "batch channels dstate"),
    "A": "channels dstate",
    "chunk_states": "batch chunks channels dstate",
    "seq_idx": "batch seqlen",
    "states": "batch positions channels dstate",
}
TWO_SAMPLE_AXES = AXES | {
    **dict.fromkeys(("lam", "delta_A"), "batch channels seqlen"),
    **dict.fromkeys(("previous_u", "last_u"), "batch channels"),
    **dict.fromkeys(("previous_B", "last_B"), "batch groups dstate"),
    "states_u": "batch positions channels",
    "states_B": "batch positions groups dstate",
}
DENSE_AXES = TWO_SAMPLE_AXES | {"A": "channels dstate dstate"}
_CHANNELS = dict.fromkeys(("u", "delta", "B", "C", "z", "initial_state"), 1)


def flops(call: Call, *, x: str = "u", A: str = "A", backward: bool = False) -> int:
    return (1 + backward) * 9 * call[x].numel() * call[A].shape[-1]


def _two_sample_flops(call: Call, *, backward: bool = False) -> int:
    return (1 + backward) * 13 * call["u"].numel() * call["A"].shape[-1]


def _dense_flops(call: Call, *, backward: bool = False) -> int:
    dstate = call["A"].shape[-1]
    return (4 if backward else 1) * 8 * call["u"].numel() * dstate * dstate


def _dense_axes(call: Call) -> Axes:
    return DENSE_AXES if call["A"].shape[0] == call["u"].shape[1] else DENSE_AXES | {"A": "matrices dstate dstate"}


def _summary_flops(call: Call, *, backward: bool = False) -> int:
    steps = next(call[name] for name in ("u", "grad_out") if call.get(name) is not None)
    return (1 + backward) * 7 * steps.numel() * call["A"].shape[-1]


def decomposed_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    discretization: DiscretizationName,
    delta_softplus: bool,
    save_chunk_states: bool,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_packed("selective_scan", cu_seqlens)
    batch, dim, _ = u.shape
    dtype = wide_dtype(u.dtype)
    if reverse:
        u, delta, B, C = (X if X.dim() == 2 else X.flip(-1) for X in (u, delta, B, C))
        z, seq_idx = (None if X is None else X.flip(-1) for X in (z, seq_idx))
    x, delta, A, B, C, D, z_wide, bias, state = in_dtype(dtype, u, delta, A, B, C, D, z, delta_bias, initial_state)
    # (seqlen, batch, groups, dstate); a time-invariant matrix is the same at each step, with a group for each channel.
    B, C = (X.expand(u.shape[2], batch, *X.shape) if X.dim() == 2 else _with_groups(X).permute(3, 0, 1, 2) for X in (B, C))
    groups = max(B.shape[2], C.shape[2])
    B, C = (X.expand(-1, -1, groups, -1) for X in (B, C))
    dt = step_sizes(delta.permute(2, 0, 1), bias, delta_softplus)
    state = x.new_zeros(batch, dim, A.shape[1]) if state is None else state
    y, last_state = scan_states(
        discretization, x.permute(2, 0, 1)[..., None], dt, A, B, C, state[:, :, None], kept_states(seq_idx, dtype)
    )
    out = skip_and_gate(y[..., 0].permute(1, 2, 0), x, None if D is None else D[:, None], z_wide).to(u.dtype)
    return out.flip(-1) if reverse else out, last_state[:, :, 0], x.new_zeros(0)


def _with_groups(X: Tensor) -> Tensor:
    return X if X.dim() == 4 else X[:, None]


_FORWARD = ("selective_scan", "_selective_scan_states_at", "_selective_scan_fwd")
_TWO_SAMPLES = ("selective_scan_two_sample", "_selective_scan_two_sample_states_at", "_selective_scan_two_sample_fwd")
_DENSE = ("selective_scan_dense", "_selective_scan_dense_states_at", "_selective_scan_dense_fwd")

ROWS = {
    "selective_scan": Row(
        batching={
            "selective_scan": fold("selective_scan", _CHANNELS, ("A", "D", "delta_bias"), (1, 1), with_groups=("B", "C")),
            "_selective_scan_states_at": Composed(),
            "_selective_scan_bwd": each_sample("_selective_scan_bwd"),
            "selective_scan_two_sample": each_sample("selective_scan_two_sample"),
            "_selective_scan_two_sample_states_at": Composed(),
            "_selective_scan_two_sample_bwd": each_sample("_selective_scan_two_sample_bwd"),
            "selective_scan_dense": each_sample("selective_scan_dense"),
            "_selective_scan_dense_states_at": Composed(),
            "_selective_scan_dense_bwd": each_sample("_selective_scan_dense_bwd"),
        },
        flops=dict.fromkeys(_FORWARD, flops)
        | dict.fromkeys(
            ("_selective_scan_bwd", "_selective_scan_bwd_last", "_selective_scan_bwd_out"), partial(flops, backward=True)
        )
        | dict.fromkeys(_TWO_SAMPLES, _two_sample_flops)
        | {"_selective_scan_two_sample_bwd": partial(_two_sample_flops, backward=True)}
        | dict.fromkeys(_DENSE, _dense_flops)
        | {"_selective_scan_dense_bwd": partial(_dense_flops, backward=True)},
        axes=dict.fromkeys((*_FORWARD, "_selective_scan_bwd", "_selective_scan_bwd_last"), AXES)
        | dict.fromkeys((*_TWO_SAMPLES, "_selective_scan_two_sample_bwd"), TWO_SAMPLE_AXES)
        | dict.fromkeys((*_DENSE, "_selective_scan_dense_bwd"), _dense_axes),
        decompositions={"_selective_scan_fwd": decomposed_scan},
    ),
    "selective_scan_summary": Row(
        batching={
            "selective_scan_summary": fold(
                "selective_scan_summary", _CHANNELS, ("A", "delta_bias"), (1, 1), with_groups=("B",)
            ),
            "_selective_scan_summary_bwd": each_sample("_selective_scan_summary_bwd"),
        },
        flops=dict.fromkeys(
            ("selective_scan_summary", "_selective_scan_summary_fwd", "_selective_scan_initial_gradient"), _summary_flops
        )
        | {"_selective_scan_summary_bwd": partial(_summary_flops, backward=True)},
        axes=dict.fromkeys(("selective_scan_summary", "_selective_scan_summary_fwd", "_selective_scan_summary_bwd"), AXES),
    ),
}
