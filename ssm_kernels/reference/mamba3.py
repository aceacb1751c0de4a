"""Reference of Mamba-3's scan and its step: see :mod:`ssm_kernels.reference`, which has them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from .._mamba3_state import Mamba3State
from .._torchscript import REFERENCE_LOOPS, refuse_tracing
from .sequences import promoted_dtype, resets_of, typed_like

__all__ = ["Mamba3State", "gated", "mamba3_chunk_scan", "mamba3_state_update", "rotated"]


def rotated(rows: Tensor, phases: Tensor, rotate: str) -> Tensor:
    """The rows (..., dstate) with their first pairs rotated by phases (..., angles), others unchanged.

    Pair i is columns (2 i, 2 i + 1) of ``"pairs"`` and (i, i + dstate / 2) of ``"halves"``.

    Examples:
        >>> import math, torch
        >>> from ssm_kernels.reference.mamba3 import rotated
        >>> rotated(torch.tensor([1.0, 0.0, 5.0, 6.0]), torch.tensor([math.pi / 2]), "pairs").round()
        tensor([-0.,  1.,  5.,  6.])
    """
    dstate, count = rows.shape[-1], phases.shape[-1]
    if rotate == "halves":
        first, second = rows[..., :count], rows[..., dstate // 2 : dstate // 2 + count]
    else:
        first, second = rows[..., : 2 * count : 2], rows[..., 1 : 2 * count : 2]
    cos, sin = phases.cos(), phases.sin()
    first, second = cos * first - sin * second, sin * first + cos * second
    if rotate == "halves":
        return torch.cat([first, rows[..., count : dstate // 2], second, rows[..., dstate // 2 + count :]], dim=-1)
    return torch.cat([torch.stack([first, second], dim=-1).flatten(-2), rows[..., 2 * count :]], dim=-1)


def gated(y: Tensor, z: Tensor | None, norm_weight: Tensor | None, norm_eps: float) -> Tensor:
    """Each head's output, (..., heads, headdim): normalized if there is a weight, then gated."""
    if norm_weight is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm_eps) * norm_weight
    return y if z is None else y * F.silu(z)


def _of_heads(rows: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """B or C of a step, (batch, ranks, groups, dstate), by head and with the bias: (batch, ranks, heads, dstate)."""
    rows = rows.repeat_interleave(heads // rows.shape[2], dim=2)
    if bias is None:
        return rows
    return rows + (bias if bias.dim() == 2 else bias.transpose(0, 1))


@typed_like(ops.mamba3_chunk_scan)
def mamba3_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    trap: Tensor,
    angles: Tensor,
    *,
    B_bias: Tensor | None = None,
    C_bias: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    mimo_x: Tensor | None = None,
    mimo_z: Tensor | None = None,
    mimo_out: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    rotate: str = "pairs",
    chunk_size: int | None = None,
    initial_states: Mamba3State | tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
) -> Any:
    """Mamba-3's scan as a loop over time, of any rank. Arguments and results as :func:`ssm_kernels.mamba3_chunk_scan`.

    Computed in the promoted dtype of all arguments; all results have that dtype. ``chunk_size`` has no effect. With an axis of
    ranks in ``B`` and ``C``, (batch, seqlen, ranks, groups, dstate), a step is

    ``v^r = x * mimo_x^r``, ``U_t = sum_r v^r (k^r)^T``, ``y^r = S_t q^r + D v^r``, and then
    ``out = sum_r mimo_out^r * f(y^r, z * mimo_z^r)``

    where ``f`` normalizes and gates, and the ``mimo_*`` are (heads, ranks, headdim).

    Raises:
        NotImplementedError: ``reverse`` is True.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> x, B, C = torch.randn(2, 10, 4, 8), torch.randn(2, 10, 1, 16), torch.randn(2, 10, 1, 16)
        >>> dt, A, trap = torch.rand(2, 10, 4), -torch.rand(2, 10, 4), torch.randn(2, 10, 4)
        >>> reference.mamba3_chunk_scan(x, dt, A, B, C, trap, torch.randn(2, 10, 4)).shape
        torch.Size([2, 10, 4, 8])
    """
    refuse_tracing("mamba3_chunk_scan", REFERENCE_LOOPS)
    if reverse:
        raise NotImplementedError("mamba3_chunk_scan: reverse is not supported")
    given = (B_bias, C_bias, D, z, mimo_x, mimo_z, mimo_out, norm_weight, *(initial_states or ()))
    dtype = promoted_dtype(x, dt, A, B, C, trap, angles, *given)
    x, dt, A, B, C, trap, angles = (tensor.to(dtype) for tensor in (x, dt, A, B, C, trap, angles))
    batch, seqlen, heads, headdim = x.shape
    has_ranks = B.dim() == 5
    if not has_ranks:
        B, C = B.unsqueeze(2), C.unsqueeze(2)
    ranks, dstate = B.shape[2], B.shape[4]
    if angles.dim() == 3:
        angles = angles.unsqueeze(2)
    per_step = math.pi * torch.tanh(angles) * dt.unsqueeze(-1)
    weight = torch.sigmoid(trap)
    one_rank = x.new_ones(heads, 1, headdim)
    of_x, of_z, of_out = (one_rank if each is None else each.to(dtype) for each in (mimo_x, mimo_z, mimo_out))

    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_states is None:
        state = Mamba3State(
            x.new_zeros(sequences, heads, per_step.shape[3]),
            x.new_zeros(sequences, heads, headdim, dstate),
            x.new_zeros(sequences, ranks, heads, dstate),
            x.new_zeros(sequences, heads, headdim),
        )
    else:
        angle, ssm, k, last_x = (tensor.to(dtype) for tensor in initial_states)
        state = Mamba3State(angle, ssm, k.transpose(1, 2) if has_ranks else k.unsqueeze(1), last_x)
    resets = resets_of(seq_idx, batch, seqlen, x.device)
    # Without cu_seqlens the sequences are the rows, side by side.
    bounds = [0, seqlen] if cu_seqlens is None else cu_seqlens.tolist()
    outputs: list[Tensor] = []
    last: list[Mamba3State] = []
    for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
        own = slice(None) if cu_seqlens is None else slice(row, row + 1)
        angle, S, k_before, x_before = (tensor[own] for tensor in state)
        for t in range(begin, end):
            if t > begin and seq_idx is not None:
                keep = ~resets[:, t]
                angle, S, k_before, x_before = (
                    torch.where(keep.view(-1, *[1] * (tensor.dim() - 1)), tensor, 0)
                    for tensor in (angle, S, k_before, x_before)
                )
            angle = angle + per_step[:, t]
            k = rotated(_of_heads(B[:, t], B_bias, heads), angle.unsqueeze(1), rotate)
            q = rotated(_of_heads(C[:, t], C_bias, heads), angle.unsqueeze(1), rotate)
            decay = torch.exp(A[:, t] * dt[:, t])
            before, now = (1 - weight[:, t]) * dt[:, t] * decay, weight[:, t] * dt[:, t]
            v, v_before = (torch.einsum("bhp,hrp->brhp", each, of_x) for each in (x[:, t], x_before))
            S = decay[..., None, None] * S
            S = S + before[..., None, None] * torch.einsum("brhp,brhn->bhpn", v_before, k_before)
            S = S + now[..., None, None] * torch.einsum("brhp,brhn->bhpn", v, k)
            y = torch.einsum("bhpn,brhn->brhp", S, q)
            if D is not None:
                y = y + (D if D.dim() == 2 else D[:, None]) * v
            gate = None if z is None else torch.einsum("bhp,hrp->brhp", z[:, t].to(dtype), of_z)
            y = gated(y, gate, norm_weight, norm_eps)
            outputs.append(torch.einsum("brhp,hrp->bhp", y, of_out))
            k_before, x_before = k, x[:, t]
        # The phases are those of the kernels: within half a turn of zero.
        turns = angle / (2 * math.pi)
        angle = angle - 2 * math.pi * turns.detach().round()
        last.append(Mamba3State(angle, S, k_before, x_before))
    out = torch.stack(outputs, dim=1) if outputs else x
    if not return_final_states:
        return out
    found = [torch.cat(tensors) for tensors in zip(*last, strict=True)] if last else [*state]
    found[2] = found[2].transpose(1, 2) if has_ranks else found[2].squeeze(1)
    return out, Mamba3State(*found)


@typed_like(ops.mamba3_state_update)
def mamba3_state_update(
    angle: Tensor,
    ssm: Tensor,
    previous_k: Tensor,
    previous_x: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    trap: Tensor,
    angles: Tensor,
    *,
    B_bias: Tensor | None = None,
    C_bias: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    mimo_x: Tensor | None = None,
    mimo_z: Tensor | None = None,
    mimo_out: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    rotate: str = "pairs",
    state_batch_indices: Tensor | None = None,
) -> Any:
    """A step of :func:`mamba3_chunk_scan` that updates the four states in place.

    Arguments as :func:`ssm_kernels.mamba3_state_update`. Computed in the promoted dtype of all arguments.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> states = [torch.zeros(2, 4, *shape) for shape in ((4,), (8, 16), (16,), (8,))]
        >>> x, (B, C) = torch.randn(2, 4, 8), torch.randn(2, 2, 1, 16)
        >>> dt, A, trap = torch.rand(2, 4), -torch.rand(2, 4), torch.randn(2, 4)
        >>> reference.mamba3_state_update(*states, x, dt, A, B, C, trap, torch.randn(2, 4)).shape
        torch.Size([2, 4, 8])
    """
    states = (angle, ssm, previous_k, previous_x)
    slots = torch.arange(len(x), device=x.device) if state_batch_indices is None else state_batch_indices.long()
    used = slots >= 0
    out = torch.zeros_like(x)
    if not used.any():
        return out
    step = [tensor[used].unsqueeze(1) for tensor in (x, dt, A, B, C, trap, angles)]
    before = Mamba3State(*(tensor[slots[used]] for tensor in states))
    y, after = mamba3_chunk_scan(
        *step,
        B_bias=B_bias,
        C_bias=C_bias,
        D=D,
        z=None if z is None else z[used].unsqueeze(1),
        mimo_x=mimo_x,
        mimo_z=mimo_z,
        mimo_out=mimo_out,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        rotate=rotate,
        initial_states=before,
        return_final_states=True,
    )
    for tensor, value in zip(states, after, strict=True):
        tensor[slots[used]] = value.to(tensor.dtype)
    out[used] = y.squeeze(1).to(out.dtype)
    return out
