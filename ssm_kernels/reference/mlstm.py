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
from .sequences import promoted_dtype, resets_of, typed_like

__all__ = ["States", "advance", "mlstm_scan"]

States = tuple[Tensor, Tensor, Tensor]


def _unit(m: Tensor, i: Tensor, f: Tensor, input_gate: str) -> Tensor:
    """The unit of the states after a step. It is a constant: what the states stand for does not depend on it."""
    with torch.no_grad():
        return torch.zeros_like(m) if input_gate == "sigmoid" else torch.maximum(F.logsigmoid(f) + m, i)


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
) -> Any:
    """xLSTM's matrix memory as a loop over time. Arguments and results as :func:`ssm_kernels.mlstm_scan`.

    Computed in the promoted dtype of all arguments; all results have that dtype. The unit ``m`` is held out of autograd.

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
    q = q * (key_dim**-0.5 if scale is None else scale)
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_states is None:
        C, n = q.new_zeros(sequences, heads, v.shape[3], key_dim), q.new_zeros(sequences, heads, key_dim)
        m = q.new_full((sequences, heads), -torch.inf)
    else:
        C, n, m = (x.to(dtype) for x in initial_states)
    m, resets = m.detach(), resets_of(seq_idx, batch, seqlen, q.device)

    def scan(rows: slice, begin: int, end: int, states: States) -> tuple[list[Tensor], States]:
        outputs = []
        for t in range(begin, end):
            if t > begin and seq_idx is not None:
                C, n, m = states
                states = C, n, m.masked_fill(resets[rows, t, None], -torch.inf)  # an empty memory
            of_step = [x[rows, t] for x in (q, k, v, i, f)]
            out, states = advance(states, of_step, eps, input_gate, normalize)
            outputs.append(out)
        return outputs, states

    if cu_seqlens is None:
        outputs, (C, n, m) = scan(slice(None), 0, seqlen, (C, n, m))
    else:
        bounds, outputs, found = cu_seqlens.tolist(), [], []
        for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
            of_row, states = scan(slice(0, 1), begin, end, (C[row : row + 1], n[row : row + 1], m[row : row + 1]))
            outputs += of_row
            found.append(states)
        if found:
            C, n, m = (torch.cat(of_rows) for of_rows in zip(*found, strict=True))
    out = torch.stack(outputs, dim=1) if outputs else v
    return (out, (C, n, m)) if return_final_states else out
