"""Reference of the scan of the state-space dual form: see :mod:`ssm_kernels.reference`, which has it."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from .._discretizations import is_two_sample
from .._torchscript import REFERENCE_LOOPS, refuse_tracing
from ..choices import DiscretizationName, ExponentialDiscretizationName, ExponentialTwoSampleDiscretizationName, PreviousSample
from ..ops._states_at import Positions
from ..ops._two_samples import refuse_one_sample
from .discretizations import coefficients
from .sequences import at_positions, of_sequences, promoted_dtype, resets_of, step_sizes, typed_like
from .two_samples import two_sample_chunk_scan

__all__ = ["ssd_chunk_scan"]


def _ssd_sequence(
    x: Tensor, a: Tensor, c: Tensor, B: Tensor, C: Tensor, resets: Tensor | None, state: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """``y`` without the skip connection, and the states before the first step and after each; one group of B and C per head.

    Args:
        resets: (batch, seqlen), where the state before a step is dropped, if it is anywhere.
    """
    outputs, states = [], [state]
    steps = ((c[..., None] * x)[..., None], a[..., None, None], B[..., None, :], C[..., None, :])
    of_steps = [None] * x.shape[1] if resets is None else resets[..., None, None, None].unbind(1)
    for input_t, a_t, B_t, C_t, reset_t in zip(*(v.unbind(1) for v in steps), of_steps, strict=True):
        state = a_t * (state if reset_t is None else state.masked_fill(reset_t, 0)) + input_t * B_t
        states.append(state)
        outputs.append((state * C_t).sum(-1))
    return torch.stack(outputs, dim=1) if outputs else x, states


def step_coefficients(
    dtype: torch.dtype,
    dt: Tensor | None,
    A: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float] | None,
    discretization: DiscretizationName,
    log_decay: Tensor | None,
    gain: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The factors of the state and of the input of each step, (batch, seqlen, heads), from either form of the arguments."""
    if (dt is None) != (A is None) or (dt is None) == (log_decay is None):
        raise ValueError("ssd_chunk_scan: expected either dt and A or log_decay")
    if log_decay is None or dt is not None:
        if gain is not None:
            raise ValueError("ssd_chunk_scan: expected gain with log_decay only, got it with dt and A")
        assert dt is not None and A is not None
        steps = step_sizes(dt.to(dtype), None if dt_bias is None else dt_bias.to(dtype), dt_softplus, dt_limit)
        return coefficients(discretization, steps, A.to(dtype))
    if dt_bias is not None or dt_softplus or dt_limit not in (None, (0.0, math.inf)) or discretization != "zoh":
        raise ValueError("ssd_chunk_scan: expected dt_bias, dt_softplus, dt_limit and discretization with dt and A only")
    decay = log_decay.to(dtype).exp()
    return decay, torch.ones_like(decay) if gain is None else gain.to(dtype)


@typed_like(ops.ssd_chunk_scan)
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
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
    discretization: ExponentialDiscretizationName | ExponentialTwoSampleDiscretizationName = "zoh",
    lam: Tensor | None = None,
    lam_sigmoid: bool = False,
    previous: PreviousSample | tuple[Tensor, Tensor] = "zero",
    states_at: Positions | None = None,
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
) -> Any:
    """The scan of the state-space dual form as a loop over time. Arguments and results as :func:`ssm_kernels.ssd_chunk_scan`.

    ``chunk_size`` is without effect: there are no chunks. Computed in the promoted dtype of all arguments; ``out`` and
    ``final_states`` have that dtype. With ``reverse``, the scan of flipped arguments. Rules with two input samples are those of
    :func:`two_sample_chunk_scan`.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> x, dt = torch.randn(2, 10, 4, 8, dtype=torch.float64), torch.rand(2, 10, 4, dtype=torch.float64)
        >>> A, B, C = -torch.rand(4, dtype=torch.float64), *torch.randn(2, 2, 10, 1, 16, dtype=torch.float64)
        >>> reference.ssd_chunk_scan(x, dt, A, B, C).shape
        torch.Size([2, 10, 4, 8])
    """
    refuse_tracing("ssd_chunk_scan", REFERENCE_LOOPS)
    if is_two_sample(discretization):
        if dt is None or A is None or log_decay is not None or gain is not None:
            raise ValueError("ssd_chunk_scan: expected dt and A, without gain, with a discretization that reads two samples")
        return two_sample_chunk_scan(
            *(x, dt, A, B, C),
            D=D,
            z=z,
            dt_bias=dt_bias,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            initial_states=initial_states,
            reverse=reverse,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            return_final_states=return_final_states,
            discretization=cast(ExponentialTwoSampleDiscretizationName, discretization),
            lam=lam,
            lam_sigmoid=lam_sigmoid,
            previous=previous,
            states_at=states_at,
        )
    refuse_one_sample("ssd_chunk_scan", discretization, lam, lam_sigmoid, previous)
    batch, seqlen, heads, headdim = x.shape
    dtype = promoted_dtype(x, dt, A, B, C, D, z, dt_bias, initial_states, log_decay, gain)
    if reverse:
        if states_at is not None:
            raise ValueError("ssd_chunk_scan: expected states_at without reverse, got both")
        x, B, C = (v.flip(1) for v in (x, B, C))
        optional = (dt, z, seq_idx, log_decay, gain)
        dt, z, seq_idx, log_decay, gain = (None if v is None else v.flip(1) for v in optional)
        if cu_seqlens is not None:
            cu_seqlens = seqlen - cu_seqlens.flip(0)
            initial_states = None if initial_states is None else initial_states.flip(0)
    x = x.to(dtype)
    rule = cast(DiscretizationName, discretization)
    a, c = step_coefficients(dtype, dt, A, dt_bias, dt_softplus, dt_limit, rule, log_decay, gain)
    Bt, Ct = (X.to(dtype).repeat_interleave(heads // X.shape[2], dim=2) for X in (B, C))
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    states = x.new_zeros(sequences, heads, headdim, B.shape[3]) if initial_states is None else initial_states.to(dtype)

    def scan(begin: int, end: int, resets: Tensor, state: Tensor) -> tuple[Tensor, list[Tensor]]:
        x_i, a_i, c_i, B_i, C_i = (v[:, begin:end] for v in (x, a, c, Bt, Ct))
        return _ssd_sequence(x_i, a_i, c_i, B_i, C_i, None if seq_idx is None else resets[:, begin:end], state)

    resets = resets_of(seq_idx, batch, seqlen, x.device)
    out, states, of_steps = of_sequences(scan, cu_seqlens, resets, states, time=1)
    if D is not None:
        out = out + (D if D.dim() == 2 else D[:, None]).to(dtype) * x
    if z is not None:
        out = out * F.silu(z.to(dtype))
    if reverse:
        out, states = out.flip(1), states if cu_seqlens is None else states.flip(0)
    results = (out, *((states,) if return_final_states else ()), *at_positions(of_steps, states_at))
    return results if len(results) > 1 else out
