"""Reference of the selective scan."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from .._discretizations import with_alpha
from .._torchscript import REFERENCE_LOOPS, refuse_tracing
from ..choices import DiscretizationName
from ..ops._states_at import Positions
from .discretizations import coefficients, discretization_of
from .sequences import at_positions, of_sequences, promoted_dtype, resets_of, step_sizes, typed_like

__all__ = ["selective_scan"]

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


@typed_like(ops.selective_scan)
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
    alpha: float | None = None,
    delta_A: Tensor | None = None,
    conjugate_pairs: bool = True,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool = False,
    states_at: Positions | None = None,
) -> Any:
    """The selective scan as a loop over time. Arguments and results as :func:`ssm_kernels.selective_scan`.

    Computed in the promoted dtype of all arguments; results have that dtype. With ``reverse``, the scan of flipped arguments.
    With a complex ``A`` it is :func:`complex_scan`.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> one = torch.ones(1, 1, 3, dtype=torch.float64)
        >>> reference.selective_scan(one, one, -torch.ones(1, 1, dtype=torch.float64), one, one, discretization="zoh_exact")
        tensor([[[0.6321, 0.8647, 0.9502]]], dtype=torch.float64)
    """
    refuse_tracing("selective_scan", REFERENCE_LOOPS)
    if alpha is not None or discretization == "gbt":
        discretization = with_alpha("selective_scan", discretization, alpha)
    if A.is_complex():
        from .complex_states import complex_scan  # which uses this module

        if delta_A is not None:
            raise ValueError("selective_scan: expected no delta_A with a complex A")
        discretization_of(discretization)  # raises for rules that read two input samples
        results = complex_scan(
            *(u, delta, A, B, C, D, z, delta_bias),
            discretization=discretization,
            conjugate_pairs=conjugate_pairs,
            delta_softplus=delta_softplus,
            initial_state=initial_state,
            reverse=reverse,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            return_last_state=True,
            states_at=states_at,
        )
        found = [results[0], *([results[1]] if return_last_state else []), *(torch.stack(each, dim=1) for each in results[2:])]
        return tuple(found) if len(found) > 1 else found[0]
    if A.dim() == 3:
        from .dense import dense_scan  # which uses this module

        if delta_A is not None:
            raise ValueError("selective_scan: expected no delta_A with A of shape (dim, dstate, dstate)")
        results = dense_scan(
            *(u, delta, A, B, C, D, z, delta_bias),
            discretization=discretization,
            delta_softplus=delta_softplus,
            initial_state=initial_state,
            reverse=reverse,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            return_last_state=True,
            states_at=states_at,
        )
        found = [torch.stack([at.state for at in each], dim=1) for each in results[2:]]
        found = [results[0], *([results[1].state] if return_last_state else []), *found]
        return tuple(found) if len(found) > 1 else found[0]
    batch, dim, seqlen = u.shape
    dtype = promoted_dtype(u, delta, A, B, C, D, z, delta_bias, initial_state, delta_A)
    delta_A = None if delta_A is None else delta_A.to(dtype).expand(u.shape)
    if reverse:
        if states_at is not None:
            raise ValueError("selective_scan: expected states_at without reverse, got both")
        u, delta, B, C = (v if v.dim() == 2 else v.flip(-1) for v in (u, delta, B, C))
        z, seq_idx, delta_A = (None if v is None else v.flip(-1) for v in (z, seq_idx, delta_A))
        if cu_seqlens is not None:
            cu_seqlens = seqlen - cu_seqlens.flip(0)
            initial_state = None if initial_state is None else initial_state.flip(0)
    u, A = u.to(dtype), A.to(dtype)
    delta = step_sizes(delta.to(dtype), None if delta_bias is None else delta_bias.to(dtype)[:, None], delta_softplus)
    steps_of_A = delta if delta_A is None else delta_A
    Bt = _per_step(B.to(dtype), batch, dim, seqlen)
    Ct = _per_step(C.to(dtype), batch, dim, seqlen)
    resets = resets_of(seq_idx, batch, seqlen, u.device)
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    first_states = A.new_zeros(sequences, dim, A.shape[1]) if initial_state is None else initial_state.to(dtype)

    def scan(begin: int, end: int, resets: Tensor, state: Tensor) -> tuple[Tensor, list[Tensor]]:
        outputs, states = [], [state]
        count = max(1, _BLOCK // max(1, state.numel()))
        # split and unbind, because an index has a gradient as large as the whole sequence.
        blocks = (v[..., begin:end].split(count, -1) for v in (u, delta, steps_of_A, Bt, Ct, resets))
        for u_i, delta_i, of_A_i, B_i, C_i, resets_i in zip(*blocks, strict=True):
            of_A = None if delta_A is None else of_A_i[..., None]
            Abar, c = coefficients(discretization, delta_i[..., None], A[:, None], of_A)
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
