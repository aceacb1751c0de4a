"""Conversion between the order of a ``PackedSequence`` and sequences one after another, which the scans take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._torchscript import is_tracing


class PackedOrder:
    """The order of steps in a ``PackedSequence``: step t of every sequence before step t + 1 of any.

    Attributes:
        cu_seqlens: (sequences + 1,), where each sequence begins when they follow one another. Sequences are in the order of
            ``data``, longest first.

    Args:
        packed: the sequences.
        states: (..., sequences, channels), if a caller has any. Compiled code reads the number of sequences from its shape or
            from that of the sorted indices: a value of ``batch_sizes`` would be a symbol without a known size.
    """

    def __init__(self, packed: PackedSequence, states: Tensor | None = None) -> None:
        batch_sizes, device = packed.batch_sizes, packed.data.device  # batch_sizes is on the CPU, and does not increase
        steps, total = batch_sizes.numel(), packed.data.shape[0]
        sequences = torch.arange(_count(packed, states) if steps else 0, device=batch_sizes.device)
        # Sequence i has step t if the batch at step t is larger than i.
        lengths = steps - torch.searchsorted(batch_sizes.flip(0), sequences, right=True)
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        self._packed = packed
        self.cu_seqlens = cu_seqlens.to(device, non_blocking=True)
        sizes = batch_sizes.to(device, non_blocking=True)
        # With a given output size, repeat_interleave does not wait for the GPU.
        step = torch.arange(steps, device=device).repeat_interleave(sizes, output_size=total)
        place = torch.arange(total, device=device)
        sequence = place - (sizes.cumsum(0) - sizes)[step]
        self._in_sequence = self.cu_seqlens[sequence] + step
        self._in_packed = torch.empty_like(self._in_sequence).scatter_(0, self._in_sequence, place)

    def to_sequences(self, data: Tensor) -> Tensor:
        """(total, ...) in the order of ``data`` -> (total, ...), one sequence after another."""
        return data.index_select(0, self._in_packed)

    def to_packed(self, x: Tensor) -> PackedSequence:
        """The inverse of :meth:`to_sequences`, as a ``PackedSequence`` with the batch sizes and indices of the given one."""
        packed = self._packed
        data = x.index_select(0, self._in_sequence)
        return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)


def _count(packed: PackedSequence, states: Tensor | None) -> Any:
    """The number of sequences: a tensor while ``torch.jit.trace`` records, which would keep an int as a constant."""
    if torch.compiler.is_compiling():
        if packed.sorted_indices is not None:
            return packed.sorted_indices.shape[0]
        if states is not None and states.dim() > 1:
            return states.shape[-2]
        count = int(packed.batch_sizes[0])
        torch._check(count >= 1)
        torch._check(count <= packed.data.shape[0])
        return count
    return packed.batch_sizes[0] if is_tracing() else int(packed.batch_sizes[0])
