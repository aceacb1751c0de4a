"""Reference operators: the ground truth that every kernel is tested against.

Plain, differentiable PyTorch, written from the formulas, one time step after another. Everything is computed in the dtype of
the arguments (pass float64 for a precise one); nothing here is fast.

The continuous system is diagonal, ``h'(t) = A h(t) + B(t) u(t)``, ``y(t) = C(t) h(t) + D u(t)``. With the step ``delta`` and
``z = delta * A`` every discretization has the form

    h_t = Abar(z_t) * h_{t-1} + delta_t * gain(z_t) * B_t * u_t

and differs only in the two functions ``Abar`` and ``gain``.

In the state-space dual form the state is a matrix, headdim x dstate, and the whole matrix decays by one number.

The discretizations are in ``reference_discretizations.py``, the gated linear recurrences in ``reference_recurrences.py``, the
causal convolution in ``reference_convolution.py`` and the norms in ``reference_norms.py``; this module exports all of them.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ._states_at import Positions
from .reference_convolution import causal_conv1d, causal_conv1d_update
from .reference_discretizations import ALIASES, DISCRETIZATIONS, Discretization, coefficients, phi1
from .reference_norms import GATE_ACTIVATIONS, add_layer_norm, add_rms_norm, layer_norm_gated, rms_norm_gated
from .reference_recurrences import (
    CANDIDATE_ACTIVATIONS,
    RECURRENCES,
    diag_linear_scan,
    elu_gru_scan,
    hgrn_scan,
    linear_scan,
    liquid_scan,
    mingru_scan,
    minlstm_scan,
    rglru_scan,
)

__all__ = [
    "ALIASES",
    "CANDIDATE_ACTIVATIONS",
    "DISCRETIZATIONS",
    "GATE_ACTIVATIONS",
    "RECURRENCES",
    "Discretization",
    "add_layer_norm",
    "add_rms_norm",
    "causal_conv1d",
    "causal_conv1d_update",
    "coefficients",
    "diag_linear_scan",
    "elu_gru_scan",
    "hgrn_scan",
    "layer_norm_gated",
    "linear_scan",
    "liquid_scan",
    "mingru_scan",
    "minlstm_scan",
    "phi1",
    "rglru_scan",
    "rms_norm_gated",
    "selective_scan",
    "selective_state_update",
    "ssd_chunk_scan",
]


def step_sizes(dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float] | None = None) -> Tensor:
    """Applies the bias, which broadcasts, softplus and the limits, in this order, to raw step sizes."""
    if bias is not None:
        dt = dt + bias
    if softplus:
        dt = F.softplus(dt)
    if limit is None:
        return dt
    low, high = limit
    # Exactly at a limit the gradient is 1. The gradient of torch.clamp there depends on the PyTorch version. The largest finite
    # numbers are no limit, as in _arguments.finite_dt_limit: dtypes other than float64 do not have them.
    if high < sys.float_info.max:
        dt = torch.where(dt > high, high, dt)
    if low > -sys.float_info.max:
        dt = torch.where(dt < low, low, dt)
    return dt


def _promoted_dtype(*tensors: Tensor | None) -> torch.dtype:
    dtype, *others = (tensor.dtype for tensor in tensors if tensor is not None)
    for other in others:
        dtype = torch.promote_types(dtype, other)
    return dtype


def _per_step(X: Tensor, batch: int, dim: int, seqlen: int) -> Tensor:
    """B or C of any accepted shape as (batch, dim, dstate, seqlen)."""
    if X.dim() == 2:
        return X[None, :, :, None].expand(batch, dim, X.shape[1], seqlen)
    if X.dim() == 3:
        X = X[:, None]
    if X.shape[1] == 1:
        return X.expand(batch, dim, *X.shape[2:])
    return X.repeat_interleave(dim // X.shape[1], dim=1)


@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: str = "zoh",
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: Literal[False] = False,
    states_at: None = None,
) -> Tensor: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: str = "zoh",
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: Literal[False] = False,
    states_at: Positions,
) -> tuple[Tensor, Tensor]: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: str = "zoh",
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: Literal[True],
    states_at: None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: str = "zoh",
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: Literal[True],
    states_at: Positions,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: str = "zoh",
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool,
    states_at: None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: str = "zoh",
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool,
    states_at: Positions | None,
) -> Tensor | tuple[Tensor, ...]: ...
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: str = "zoh",
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool = False,
    states_at: Positions | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """The selective scan as a loop over time. Arguments and results as :func:`ssm_kernels.selective_scan`.

    Computed in the promoted dtype of all arguments; results have that dtype. With ``reverse``, the scan of flipped arguments.
    """
    batch, dim, seqlen = u.shape
    dtype = _promoted_dtype(u, delta, A, B, C, D, z, delta_bias, initial_state)
    if reverse:
        if states_at is not None:
            raise ValueError("selective_scan: expected states_at without reverse, got both")
        u, delta, B, C = (v if v.dim() == 2 else v.flip(-1) for v in (u, delta, B, C))
        z, seq_idx = (None if v is None else v.flip(-1) for v in (z, seq_idx))
        if cu_seqlens is not None:
            cu_seqlens = seqlen - cu_seqlens.flip(0)
            initial_state = None if initial_state is None else initial_state.flip(0)
    u, A = u.to(dtype), A.to(dtype)
    delta = step_sizes(delta.to(dtype), None if delta_bias is None else delta_bias.to(dtype)[:, None], delta_softplus)
    Bt = _per_step(B.to(dtype), batch, dim, seqlen)
    Ct = _per_step(C.to(dtype), batch, dim, seqlen)
    resets = _resets(seq_idx, batch, seqlen, u.device)
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    first_states = A.new_zeros(sequences, dim, A.shape[1]) if initial_state is None else initial_state.to(dtype)

    def scan(begin: int, end: int, resets: Tensor, state: Tensor) -> tuple[Tensor, list[Tensor]]:
        outputs, states = [], [state]
        # unbind, because indexing one step has a gradient as large as the whole sequence.
        steps = (v[..., begin:end].unbind(-1) for v in (u, delta, Bt, Ct, resets))
        for u_t, delta_t, B_t, C_t, reset_t in zip(*steps, strict=True):
            Abar, c = coefficients(discretization, delta_t[..., None], A)
            state = Abar * state.masked_fill(reset_t[:, None, None], 0) + c * B_t * u_t[..., None]
            states.append(state)
            outputs.append((state * C_t).sum(-1))
        return torch.stack(outputs, dim=-1) if outputs else u[..., :0], states

    out, h, states = _of_sequences(scan, cu_seqlens, resets, first_states, time=2)
    if D is not None:
        out = out + D.to(dtype)[:, None] * u
    if z is not None:
        out = out * F.silu(z.to(dtype))
    if reverse:
        out, h = out.flip(-1), h if cu_seqlens is None else h.flip(0)
    results = (out, *((h,) if return_last_state else ()), *_at_positions(states, states_at))
    return results if len(results) > 1 else out


def _resets(seq_idx: Tensor | None, batch: int, seqlen: int, device: torch.device) -> Tensor:
    """Where the state before a step is dropped, (batch, seqlen): where ``seq_idx`` changes."""
    resets = torch.zeros(batch, seqlen, dtype=torch.bool, device=device)
    if seq_idx is not None:
        resets[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return resets


def _of_sequences(
    scan: Callable[[int, int, Tensor, Tensor], tuple[Tensor, list[Tensor]]],
    cu_seqlens: Tensor | None,
    resets: Tensor,
    first_states: Tensor,
    time: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The outputs and last states of all packed sequences, and the states before the first step and after each.

    Args:
        scan: the outputs of the steps from the first to before the second number, and the states before the first of these
            steps and after each. Its other arguments are the resets at all steps, and the state before these.
        resets: (batch, seqlen).
        first_states: of each sequence, or of each row without ``cu_seqlens``.
        time: the axis of time of outputs.
    """
    seqlen = resets.shape[1]
    if cu_seqlens is None:
        out, states = scan(0, seqlen, resets, first_states)
        return out, states[-1], states
    # The first step of a sequence continues from the initial state.
    resets = resets.clone()
    resets[:, cu_seqlens[:-1][cu_seqlens[:-1] < seqlen].long()] = False
    out, _ = scan(0, 0, resets, first_states[:1])
    of_steps: list[Tensor] = []
    outputs, last_states = [out], [first_states[:0]]
    for i, (begin, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        out, own = scan(begin, end, resets, first_states[i : i + 1])
        outputs.append(out)
        last_states.append(own[-1])
        if begin < end:
            of_steps += own[len(of_steps) > 0 :]  # position 0 is before the first step, others are after one
    of_steps = of_steps or [first_states.new_zeros(1, *first_states.shape[1:])]
    return torch.cat(outputs, dim=time), torch.cat(last_states), of_steps


def _at_positions(states: list[Tensor], states_at: Positions | None) -> tuple[Tensor, ...]:
    """The states after chosen numbers of steps, (batch, positions, ...); nothing without positions."""
    if states_at is None:
        return ()
    found = [states[int(p)] for p in states_at]
    return (torch.stack(found, dim=1) if found else states[0][:, None][:, :0],)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    discretization: str = "zoh",
    state_batch_indices: Tensor | None = None,
    A_is_log: bool = False,
) -> tuple[Tensor, Tensor]:
    """One decoding step. Arguments as :func:`ssm_kernels.selective_state_update`, but nothing is modified in place.

    Returns:
        ``(out, new_state)``. With ``state_batch_indices``, ``new_state`` is the whole cache; rows with a negative index are
        padding: their output is zero and they touch no state.
    """
    heads = state.dim() == 4
    B, C = (X[:, None] if X.dim() == 2 else X for X in (B, C))
    if not heads:
        state, x, dt, A = state[:, None], x[:, None], dt[:, None], A[None]
        D, dt_bias = (None if v is None else v[None] for v in (D, dt_bias))
        z = None if z is None else z[:, None]
    nheads = state.shape[1]
    dt = step_sizes(dt, dt_bias, dt_softplus, dt_limit)
    A = -torch.exp(A) if A_is_log else A
    rows = torch.arange(x.shape[0], device=x.device) if state_batch_indices is None else state_batch_indices.long()
    padding = rows < 0
    rows = rows.clamp(min=0)
    Abar, c = coefficients(discretization, dt[..., None], A)
    if not heads:  # groups of channels
        Bt, Ct = (X.repeat_interleave(x.shape[2] // X.shape[1], dim=1)[:, None] for X in (B, C))
    else:
        Bt, Ct = (X.repeat_interleave(nheads // X.shape[1], dim=1)[:, :, None] for X in (B, C))
    h = Abar * state[rows] + c * Bt * x[..., None]
    out = (h * Ct).sum(-1)
    if D is not None:
        out = out + D * x
    if z is not None:
        out = out * F.silu(z)
    out = torch.where(padding[:, None, None], torch.zeros_like(out), out)
    new_state = state.clone()
    new_state[rows[~padding]] = h[~padding].to(state.dtype)
    return (out, new_state) if heads else (out[:, 0], new_state[:, 0])


def _ssd_sequence(
    x: Tensor, a: Tensor, c: Tensor, B: Tensor, C: Tensor, resets: Tensor, state: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """``y`` without the skip connection, and the states before the first step and after each; one group of B and C per head.

    Args:
        resets: (batch, seqlen), where the state before a step is dropped.
    """
    outputs, states = [], [state]
    for x_t, a_t, c_t, B_t, C_t, reset_t in zip(*(v.unbind(1) for v in (x, a, c, B, C, resets)), strict=True):
        state = state.masked_fill(reset_t[:, None, None, None], 0)
        state = a_t[..., None, None] * state + (c_t[..., None] * x_t)[..., None] * B_t[..., None, :]
        states.append(state)
        outputs.append((state * C_t[..., None, :]).sum(-1))
    return torch.stack(outputs, dim=1) if outputs else x, states


@overload
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = (0.0, math.inf),
    initial_states: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: Literal[False] = False,
    discretization: str = "zoh",
    states_at: None = None,
) -> Tensor: ...
@overload
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = (0.0, math.inf),
    initial_states: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: Literal[False] = False,
    discretization: str = "zoh",
    states_at: Positions,
) -> tuple[Tensor, Tensor]: ...
@overload
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = (0.0, math.inf),
    initial_states: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: Literal[True],
    discretization: str = "zoh",
    states_at: None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = (0.0, math.inf),
    initial_states: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: Literal[True],
    discretization: str = "zoh",
    states_at: Positions,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = (0.0, math.inf),
    initial_states: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: bool,
    discretization: str = "zoh",
    states_at: None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = (0.0, math.inf),
    initial_states: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: bool,
    discretization: str = "zoh",
    states_at: Positions | None,
) -> Tensor | tuple[Tensor, ...]: ...
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = (0.0, math.inf),
    initial_states: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: bool = False,
    discretization: str = "zoh",
    states_at: Positions | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """The scan of the state-space dual form as a loop over time. Arguments and results as :func:`ssm_kernels.ssd_chunk_scan`.

    ``chunk_size`` is without effect: there are no chunks. Computed in the promoted dtype of all arguments; ``out`` and
    ``final_states`` have that dtype. With ``reverse``, the scan of flipped arguments.
    """
    batch, seqlen, heads, headdim = x.shape
    dtype = _promoted_dtype(x, dt, A, B, C, D, z, dt_bias, initial_states)
    if reverse:
        if states_at is not None:
            raise ValueError("ssd_chunk_scan: expected states_at without reverse, got both")
        x, dt, B, C = (v.flip(1) for v in (x, dt, B, C))
        z, seq_idx = (None if v is None else v.flip(1) for v in (z, seq_idx))
        if cu_seqlens is not None:
            cu_seqlens = seqlen - cu_seqlens.flip(0)
            initial_states = None if initial_states is None else initial_states.flip(0)
    x, A = x.to(dtype), A.to(dtype)
    dt = step_sizes(dt.to(dtype), None if dt_bias is None else dt_bias.to(dtype), dt_softplus, dt_limit)
    a, c = coefficients(discretization, dt, A)
    Bt, Ct = (X.to(dtype).repeat_interleave(heads // X.shape[2], dim=2) for X in (B, C))
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    states = x.new_zeros(sequences, heads, headdim, B.shape[3]) if initial_states is None else initial_states.to(dtype)

    def scan(begin: int, end: int, resets: Tensor, state: Tensor) -> tuple[Tensor, list[Tensor]]:
        x_i, a_i, c_i, B_i, C_i = (v[:, begin:end] for v in (x, a, c, Bt, Ct))
        return _ssd_sequence(x_i, a_i, c_i, B_i, C_i, resets[:, begin:end], state)

    resets = _resets(seq_idx, batch, seqlen, x.device)
    out, states, of_steps = _of_sequences(scan, cu_seqlens, resets, states, time=1)
    if D is not None:
        out = out + (D if D.dim() == 2 else D[:, None]).to(dtype) * x
    if z is not None:
        out = out * F.silu(z.to(dtype))
    if reverse:
        out, states = out.flip(1), states if cu_seqlens is None else states.flip(0)
    results = (out, *((states,) if return_final_states else ()), *_at_positions(of_steps, states_at))
    return results if len(results) > 1 else out
