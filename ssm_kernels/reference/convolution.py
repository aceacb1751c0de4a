"""Reference of the causal convolution and its decoding step: see :mod:`ssm_kernels.reference`, which has both."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from .._torchscript import REFERENCE_LOOPS, refuse_tracing
from ..choices import ConvActivation
from ..ops._arguments import did_you_mean
from .sequences import typed_like

__all__ = ["causal_conv1d", "causal_conv1d_update"]


def _activate(x: Tensor, activation: ConvActivation | None) -> Tensor:
    if activation in (None, "none"):
        return x
    if activation in ("silu", "swish"):
        return F.silu(x)
    nearest = did_you_mean(activation, ("silu", "swish", "none"))
    raise ValueError(f"unknown activation {activation!r}, expected None, 'silu' or 'swish'{nearest}")


def _count_changes(seq_idx: Tensor) -> Tensor:
    """The number of each step's sequence, in the order of the sequences, (batch, seqlen)."""
    return F.pad((seq_idx.diff(dim=1) != 0).cumsum(dim=1), (min(1, seq_idx.shape[1]), 0))


def _masked(x: Tensor, padding: Tensor | None) -> Tensor:
    return x if padding is None else torch.where(padding, torch.zeros_like(x), x)


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, seq_idx: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Loops over the lags; returns the sums before the activation and the new state of x, (batch, seqlen, channels).

    Args:
        seq_idx: (batch, seqlen); ``state`` is the initial state of the first sequence of a row.
    """
    past, seqlen = weight.shape[1] - 1, x.shape[1]
    steps = torch.cat([state.transpose(1, 2).to(x.dtype), x], dim=1)
    number = None if seq_idx is None else _count_changes(seq_idx)
    if number is not None:
        of_steps = torch.cat([number.new_zeros(x.shape[0], past), number], dim=1)

    def read(first: int, count: int, reader: Tensor | None) -> Tensor:
        """Reads steps; zero where a step belongs to another sequence than the reader."""
        found = steps[:, first : first + count]
        if reader is None:
            return found
        is_own = of_steps[:, first : first + count] == reader
        return torch.where(is_own[..., None], found, torch.zeros_like(found))

    total = x.new_zeros(()) if bias is None else bias
    for lag in range(past + 1):
        total = total + weight[:, past - lag] * read(past - lag, seqlen, number)
    if seq_idx is None or number is None or seqlen == 0:
        return total, read(seqlen, past, None).transpose(1, 2)
    final_state = _masked(read(seqlen, past, number[:, -1:]), (seq_idx[:, -1:] < 0)[..., None])
    return total, final_state.transpose(1, 2)


@typed_like(ops.causal_conv1d)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: ConvActivation | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Any:
    """Depthwise causal convolution. Arguments and results as :func:`ssm_kernels.causal_conv1d`.

    A loop over packed sequences, and for each over the lags. Padding is replaced by zeros before and after.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> x = torch.tensor([[[1.0], [2.0], [3.0]]], dtype=torch.float64)
        >>> reference.causal_conv1d(x, torch.tensor([[10.0, 1.0]], dtype=torch.float64)).flatten()
        tensor([ 1., 12., 23.], dtype=torch.float64)
    """
    sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    state = x.new_zeros(sequences, x.shape[2], weight.shape[1] - 1) if initial_state is None else initial_state
    padding = None if seq_idx is None else (seq_idx < 0)[..., None]
    x = _masked(x, padding)
    if cu_seqlens is not None:
        refuse_tracing("causal_conv1d", REFERENCE_LOOPS)
        lengths = cu_seqlens.diff().tolist()
        pieces = x.split(lengths, dim=1)
        numbers = [None] * len(pieces) if seq_idx is None else seq_idx.split(lengths, dim=1)
        results = [
            _convolve(piece, weight, bias, state[i, None], number)
            for i, (piece, number) in enumerate(zip(pieces[:sequences], numbers, strict=False))
        ]
        total = torch.cat([total for total, _ in results], dim=1) if results else x
        final_state = torch.cat([state for _, state in results]) if results else state
    else:
        total, final_state = _convolve(x, weight, bias, state, seq_idx)
    out = _masked(_activate(total, activation), padding)
    return (out, final_state) if return_final_state else out


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: ConvActivation | None = None,
    state_batch_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One decoding step or a few. Arguments as :func:`ssm_kernels.causal_conv1d_update`; nothing is modified in place.

    Returns:
        ``(out, new_state)``. With ``state_batch_indices``, ``new_state`` is the whole cache; rows with a negative index are
        padding: their output is zero and they touch no state.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> x, state = torch.tensor([[3.0]], dtype=torch.float64), torch.tensor([[[2.0]]], dtype=torch.float64)
        >>> y, new_state = reference.causal_conv1d_update(x, state, torch.tensor([[10.0, 1.0]], dtype=torch.float64))
        >>> y, new_state
        (tensor([[23.]], dtype=torch.float64), tensor([[[3.]]], dtype=torch.float64))
    """
    steps = x if x.dim() == 3 else x[:, None]
    batch, seqlen, _ = steps.shape
    past = weight.shape[1] - 1
    slots = torch.arange(batch, device=x.device) if state_batch_indices is None else state_batch_indices.long()
    padding = slots < 0
    state = conv_state[slots.clamp(min=0)]
    total, _ = _convolve(steps, weight, bias, state[..., state.shape[2] - past :])
    out = torch.where(padding[:, None, None], torch.zeros_like(total), _activate(total, activation))
    rolled = torch.cat([state, steps.transpose(1, 2).to(state.dtype)], dim=2)[..., seqlen:]
    new_state = conv_state.clone()
    new_state[slots[~padding]] = rolled[~padding]
    return (out if x.dim() == 3 else out[:, 0]), new_state
