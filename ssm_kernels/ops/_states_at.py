"""``states_at`` of the scans: their states at chosen positions, which ``csrc/torch/states_at.h`` describes.

Without gradients and packed sequences one call of an operator returns them: ``_ssd_chunk_scan_states`` those at any positions,
``_selective_scan_fwd`` those at multiples of the chunk, from which short pieces lead to the others. On the CPU
``_ssd_chunk_scan_states`` is differentiable too. Otherwise the public operators run on the pieces between positions.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from .._torchscript import refuse_tracing

__all__ = ["Positions", "is_transformed", "read_positions"]

Positions = Sequence[int] | Tensor


def is_transformed() -> bool:
    """Whether ``torch.func`` or an export needs the public operators, which alone have batching rules and other runtimes."""
    return torch._C._are_functorch_transforms_active() or torch.compiler.is_exporting()


def read_positions(name: str, states_at: Positions) -> list[int]:
    """``states_at`` as the operators take it; they check that the positions are from 0 to seqlen."""
    refuse_tracing(name, "states_at")
    if isinstance(states_at, Tensor):
        if states_at.dim() != 1:
            raise ValueError(f"{name}: expected states_at of shape (positions,), got {list(states_at.shape)}")
        if states_at.dtype not in (torch.int32, torch.int64):
            raise RuntimeError(f"{name}: expected states_at of dtype int32 or int64, got {states_at.dtype}")
        if states_at.device.type != "cpu":
            raise RuntimeError(f"{name}: expected states_at on the CPU, where it is read, got {states_at.device}")
        return states_at.tolist()
    try:
        positions = [operator.index(p) for p in states_at]
    except TypeError:
        raise TypeError(f"{name}: expected states_at to be a sequence of ints or a tensor, got {states_at!r}") from None
    for position in positions:
        if not -(2**63) <= position < 2**63:
            raise ValueError(f"{name}: expected states_at from 0 to seqlen, got {position}")
    return positions
