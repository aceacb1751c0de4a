"""Reference of xLSTM's matrix memory: see :mod:`ssm_kernels.reference`, which has it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from .._torchscript import REFERENCE_LOOPS, refuse_tracing
from ..ops._states_at import Positions
from .sequences import at_positions, promoted_dtype, resets_of, typed_like

__all__ = ["States", "advance", "mlstm_scan"]

States = tuple[Tensor, Tensor, Tensor]


def _unit(m: Tensor, i: Tensor, f: Tensor, input_gate: str) -> Tensor:
    """The unit of the states after a step. It is a constant: what the states stand for does not depend on it."""
    return torch.zeros_like(m) if input_gate == "sigmoid" else torch.maximum(F.logsigmoid(f) + m, i).detach()


def advance(states: States, of_step: Sequence[Tensor], eps: float, input_gate: str, normalize: bool) -> tuple[Tensor, States]:
    """The output and the states after one step. ``of_step``: its q, times the scale, k, v, i and f."""
    q, k, v, i, f = of_step
    C, n, m = states
    unit = _unit(m, i, f, input_gate)
    # Minus infinity, the unit of empty states, minus itself would be NaN, and so would its gradient.
    is_empty = torch.isneginf(m) | torch.isneginf(unit) | torch.isneginf(f)
    exponent = F.logsigmoid(f.masked_fill(is_empty, 0)) + (m - unit).masked_fill(is_empty, 0)
    decay = exponent.exp().masked_fill(is_empty, 0)
    is_shut = torch.isneginf(unit)
    gain = torch.sigmoid(i) if input_gate == "sigmoid" else (i - unit).masked_fill(is_shut, 0).exp().masked_fill(is_shut, 0)
    C = decay[..., None, None] * C + gain[..., None, None] * v[..., :, None] * k[..., None, :]
    out = (C * q[..., None, :]).sum(-1)
    if normalize:
        n = decay[..., None] * n + gain[..., None] * k
        floor = (-unit).exp()
        size = (n * q).sum(-1).abs()
        out = out / (torch.where(size > floor, size, floor) + eps)[..., None]
    return out, (C, n, unit)


@typed_like(ops.mlstm_scan)
def mlstm_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    scale: float | None = None,
    eps: float = 1e-6,
    input_gate: str = "exp",
    normalize: bool = True,
    initial_states: States | None = None,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    states_at: Positions | None = None,
    reverse: bool = False,
) -> Any:
    """xLSTM's matrix memory as a loop over time. Arguments and results as :func:`ssm_kernels.mlstm_scan`.

    Computed in the promoted dtype of all arguments; all results have that dtype. The unit ``m`` is held out of autograd. With
    ``reverse``, the scan of flipped arguments.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> q, k = torch.randn(2, 2, 10, 4, 8, dtype=torch.float64)
        >>> v, (i, f) = torch.randn(2, 10, 4, 6, dtype=torch.float64), torch.randn(2, 2, 10, 4, dtype=torch.float64)
        >>> reference.mlstm_scan(q, k, v, i, f).shape
        torch.Size([2, 10, 4, 6])
    """
    refuse_tracing("mlstm_scan", REFERENCE_LOOPS)
    dtype = promoted_dtype(q, k, v, i, f, *(initial_states or ()))
    q, k, v, i, f = (x.to(dtype) for x in (q, k, v, i, f))
    batch, seqlen, heads, key_dim = q.shape
    if reverse:
        if states_at is not None:
            raise ValueError("mlstm_scan: expected states_at without reverse, got both")
        q, k, v, i, f = (x.flip(1) for x in (q, k, v, i, f))
        seq_idx = None if seq_idx is None else seq_idx.flip(1)
        if cu_seqlens is not None:
            cu_seqlens = seqlen - cu_seqlens.flip(0)
            if initial_states is not None:
                initial_states = initial_states[0].flip(0), initial_states[1].flip(0), initial_states[2].flip(0)
    q = q * (key_dim**-0.5 if scale is None else scale)
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_states is None:
        C, n = q.new_zeros(sequences, heads, v.shape[3], key_dim), q.new_zeros(sequences, heads, key_dim)
        m = q.new_full((sequences, heads), -torch.inf)
    else:
        C, n, m = (x.to(dtype) for x in initial_states)
    m, resets = m.detach(), resets_of(seq_idx, batch, seqlen, q.device)
    empty = C.new_zeros(1, *C.shape[1:]), n.new_zeros(1, *n.shape[1:]), m.new_full((1, heads), -torch.inf)
    # Without cu_seqlens the sequences are the rows, side by side.
    bounds = [0, seqlen] if cu_seqlens is None else cu_seqlens.tolist()
    outputs: list[Tensor] = []
    last_states: list[States] = []
    of_steps: list[States] = []  # before the first step, and after each
    for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
        own = slice(None) if cu_seqlens is None else slice(row, row + 1)
        states: States = C[own], n[own], m[own]
        if begin < end and not of_steps:
            of_steps.append(states)
        for t in range(begin, end):
            if t > begin and seq_idx is not None:
                states = states[0], states[1], states[2].masked_fill(resets[:, t, None], -torch.inf)  # an empty memory
            out, states = advance(states, [x[:, t] for x in (q, k, v, i, f)], eps, input_gate, normalize)
            outputs.append(out)
            of_steps.append(states)
        last_states.append(states)
    if last_states:
        C, n, m = (torch.cat(of_sequences) for of_sequences in zip(*last_states, strict=True))
    out = torch.stack(outputs, dim=1) if outputs else v
    if reverse:
        out = out.flip(1)
        C, n, m = (x if cu_seqlens is None else x.flip(0) for x in (C, n, m))
    results: list[Any] = [out]
    if return_final_states:
        results.append((C, n, m))
    if states_at is not None:
        of_steps = of_steps or [(C, n, m) if cu_seqlens is None else empty]
        results.append(tuple(at_positions([*each], states_at)[0] for each in zip(*of_steps, strict=True)))
    return tuple(results) if len(results) > 1 else out
