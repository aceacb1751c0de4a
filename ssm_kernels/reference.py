"""Reference operators: the ground truth that every kernel is tested against.

Plain, differentiable PyTorch, written from the formulas, one time step after another. Everything is computed in the dtype of
the arguments (pass float64 for a precise one); nothing here is fast.

The continuous system is diagonal, ``h'(t) = A h(t) + B(t) u(t)``, ``y(t) = C(t) h(t) + D u(t)``. With the step ``delta`` and
``z = delta * A`` every discretization has the form

    h_t = Abar(z_t) * h_{t-1} + delta_t * gain(z_t) * B_t * u_t

and differs only in the two functions ``Abar`` and ``gain``.

In the state-space dual form the state is a matrix, headdim x dstate, and the whole matrix decays by one number.

The discretizations are in ``reference_discretizations.py``, the scan of the dual form in ``reference_ssd.py``, the gated linear
recurrences in ``reference_recurrences.py``, the causal convolution in ``reference_convolution.py`` and the norms in
``reference_norms.py``; this module exports all of them.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ._states_at import Positions
from ._submodules import public_names
from ._torchscript import REFERENCE_LOOPS, refuse_script_of, refuse_tracing
from .choices import DiscretizationName
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
from .reference_sequences import at_positions, of_sequences, promoted_dtype, resets_of, step_sizes
from .reference_ssd import ssd_chunk_scan

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

__dir__ = public_names(__name__)

# The loop computes the coefficients of several steps at once, of at most so many elements: for few elements the calls of
# PyTorch take all the time. Steps with as many elements are computed one by one.
_BLOCK = 4096


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
    discretization: DiscretizationName = "zoh",
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
    discretization: DiscretizationName = "zoh",
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
    discretization: DiscretizationName = "zoh",
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
    discretization: DiscretizationName = "zoh",
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
    discretization: DiscretizationName = "zoh",
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
    discretization: DiscretizationName = "zoh",
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
    discretization: DiscretizationName = "zoh",
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

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> one = torch.ones(1, 1, 3, dtype=torch.float64)
        >>> reference.selective_scan(one, one, -torch.ones(1, 1, dtype=torch.float64), one, one, discretization="zoh_exact")
        tensor([[[0.6321, 0.8647, 0.9502]]], dtype=torch.float64)
    """
    refuse_tracing("selective_scan", REFERENCE_LOOPS)
    batch, dim, seqlen = u.shape
    dtype = promoted_dtype(u, delta, A, B, C, D, z, delta_bias, initial_state)
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
    resets = resets_of(seq_idx, batch, seqlen, u.device)
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    first_states = A.new_zeros(sequences, dim, A.shape[1]) if initial_state is None else initial_state.to(dtype)

    def scan(begin: int, end: int, resets: Tensor, state: Tensor) -> tuple[Tensor, list[Tensor]]:
        outputs, states = [], [state]
        count = max(1, _BLOCK // max(1, state.numel()))
        # split and unbind, because an index has a gradient as large as the whole sequence.
        blocks = (v[..., begin:end].split(count, -1) for v in (u, delta, Bt, Ct, resets))
        for u_i, delta_i, B_i, C_i, resets_i in zip(*blocks, strict=True):
            Abar, c = coefficients(discretization, delta_i[..., None], A[:, None])
            inputs = c * B_i.transpose(2, 3) * u_i[..., None]
            steps = (Abar.unbind(2), inputs.unbind(2), C_i.unbind(-1), resets_i.unbind(-1))
            for Abar_t, input_t, C_t, reset_t in zip(*steps, strict=True):
                before = state if seq_idx is None else state.masked_fill(reset_t[:, None, None], 0)
                state = Abar_t * before + input_t
                states.append(state)
                outputs.append((state * C_t).sum(-1))
        return torch.stack(outputs, dim=-1) if outputs else u[..., :0], states

    out, h, states = of_sequences(scan, cu_seqlens, resets, first_states, time=2)
    if D is not None:
        out = out + D.to(dtype)[:, None] * u
    if z is not None:
        out = out * F.silu(z.to(dtype))
    if reverse:
        out, h = out.flip(-1), h if cu_seqlens is None else h.flip(0)
    results = (out, *((h,) if return_last_state else ()), *at_positions(states, states_at))
    return results if len(results) > 1 else out


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
    discretization: DiscretizationName = "zoh",
    state_batch_indices: Tensor | None = None,
    A_is_log: bool = False,
) -> tuple[Tensor, Tensor]:
    """One decoding step. Arguments as :func:`ssm_kernels.selective_state_update`, but nothing is modified in place.

    Returns:
        ``(out, new_state)``. With ``state_batch_indices``, ``new_state`` is the whole cache; rows with a negative index are
        padding: their output is zero and they touch no state.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> state, x, dt = torch.zeros(2, 8, 16), torch.randn(2, 8), torch.rand(2, 8)
        >>> A, B, C = -torch.rand(8, 16), torch.randn(2, 16), torch.randn(2, 16)
        >>> y, new_state = reference.selective_state_update(state, x, dt, A, B, C)
        >>> y.shape, new_state.shape
        (torch.Size([2, 8]), torch.Size([2, 8, 16]))
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


refuse_script_of(__name__)
