"""Shared by the references: types, step sizes, packed sequences, and states at positions."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops._states_at import Positions

__all__ = ["at_positions", "of_sequences", "promoted_dtype", "resets_of", "step_sizes", "typed_like"]

_Operator = TypeVar("_Operator", bound=Callable[..., Any])


def typed_like(operator: _Operator) -> Callable[[Callable[..., Any]], _Operator]:
    """Decorator of a reference: type checkers see the overloads of its operator."""
    return lambda reference: cast(_Operator, reference)


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
    # numbers do not count as a limit, as in _arguments.finite_dt_limit: dtypes other than float64 do not have them.
    if high < sys.float_info.max:
        dt = torch.where(dt > high, high, dt)
    if low > -sys.float_info.max:
        dt = torch.where(dt < low, low, dt)
    return dt


def promoted_dtype(*tensors: Tensor | None) -> torch.dtype:
    dtype, *others = (tensor.dtype for tensor in tensors if tensor is not None)
    for other in others:
        dtype = torch.promote_types(dtype, other)
    return dtype


def resets_of(seq_idx: Tensor | None, batch: int, seqlen: int, device: torch.device) -> Tensor:
    """Mask of the steps that drop the state before them, because ``seq_idx`` changes: (batch, seqlen), bool."""
    resets = torch.zeros(batch, seqlen, dtype=torch.bool, device=device)
    if seq_idx is not None:
        resets[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return resets


def of_sequences(
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


def at_positions(states: list[Tensor], states_at: Positions | None) -> tuple[Tensor, ...]:
    """The states after chosen numbers of steps, (batch, positions, ...); nothing without positions."""
    if states_at is None:
        return ()
    found = [states[int(p)] for p in states_at]
    return (torch.stack(found, dim=1) if found else states[0][:, None][:, :0],)
