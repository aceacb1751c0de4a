"""Padded batches as packed sequences, and the loss of next tokens, without the host waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..nn.checks import check_shape, check_tensor
from ..ops._packing import with_padding
from .vocabulary import check_ids

__all__ = ["Packing", "check_attention_mask", "next_token_loss"]

_IGNORED = -100


def check_attention_mask(name: str, attention_mask: Any, inputs: Tensor) -> None:
    """Checks a mask of ``inputs``, (batch, seqlen, ...)."""
    check_shape(name, "attention_mask", attention_mask, "(batch, seqlen)", inputs.shape[:2])
    if attention_mask.is_complex():
        raise TypeError(f"{name}: expected attention_mask of bool, integers or real numbers, got {attention_mask.dtype}")
    check_device(name, "attention_mask", attention_mask, inputs.device)


def check_device(name: str, argument: str, value: Tensor, device: torch.device) -> None:
    if value.device != device:
        raise RuntimeError(f"{name}: expected {argument} on {device}, where the other tensors are, got {value.device}")


class Packing:
    """The tokens of a padded batch one sequence after another, and the padding after them.

    All sizes are those of the batch, so that a call has one shape whatever the mask holds.

    Attributes:
        cu_seqlens: (batch + 1,), where each row's tokens begin, and where the last end.
    """

    def __init__(self, attention_mask: Tensor) -> None:
        self.is_token = attention_mask != 0
        lengths = self.is_token.sum(dim=1)
        self.cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
        # A stable sort by "is padding" keeps the order of tokens; its inverse is where each position went.
        self._order = self.is_token.logical_not().flatten().to(torch.uint8).argsort(stable=True)
        positions = torch.arange(self._order.numel(), device=self._order.device)
        self._place = torch.empty_like(self._order).scatter_(0, self._order, positions)

    def cu_seqlens_of_all(self) -> Tensor:
        """``cu_seqlens`` with the padding as one more sequence, for layers that have no cache of one row a sequence."""
        return with_padding(self.cu_seqlens, self.is_token.numel())

    def pack(self, x: Tensor) -> Tensor:
        """(batch, seqlen, channels) -> (1, batch * seqlen, channels), padding last and zero."""
        return x.masked_fill(~self.is_token[..., None], 0).flatten(0, 1)[self._order][None]

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`pack`; padding is zero."""
        return x[0][self._place].unflatten(0, self.is_token.shape).masked_fill(~self.is_token[..., None], 0)


def next_token_loss(
    name: str,
    logits: Tensor,
    labels: Any,
    vocab_size: int,
    attention_mask: Tensor | None,
    cu_seqlens: Any = None,
    seq_idx: Any = None,
) -> Tensor:
    """The mean cross entropy of each token's logits and the next label, in float32 (float64 for float64 logits).

    Labels of -100 are left out, and so are those that no logits of the same sequence predict: behind or on padding, and the
    first of each packed sequence. On the CPU the others must be from 0 to ``vocab_size - 1``.
    """
    check_shape(name, "labels", labels, "(batch, seqlen)", logits.shape[:2])
    if labels.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected labels of dtype int32 or int64, got {labels.dtype}")
    check_device(name, "labels", labels, logits.device)
    targets = labels[:, 1:].long()
    if attention_mask is not None:
        is_token = attention_mask != 0
        targets = targets.masked_fill(~(is_token[:, 1:] & is_token[:, :-1]), _IGNORED)
    if cu_seqlens is not None:
        check_tensor(name, "cu_seqlens", cu_seqlens)
        begins = torch.zeros(labels.shape[1] + 1, dtype=torch.bool, device=labels.device)
        begins.scatter_(0, cu_seqlens.long(), True)
        targets = targets.masked_fill(begins[1:-1], _IGNORED)
    if seq_idx is not None:
        check_shape(name, "seq_idx", seq_idx, "(batch, seqlen)", labels.shape)
        targets = targets.masked_fill((seq_idx[:, 1:] != seq_idx[:, :-1]) | (seq_idx[:, 1:] < 0), _IGNORED)
    check_ids(name, "labels", targets, vocab_size, ignored=_IGNORED)
    predictions = logits[:, :-1].flatten(0, 1)
    wide = predictions if predictions.dtype == torch.float64 else predictions.float()
    return F.cross_entropy(wide, targets.flatten(), ignore_index=_IGNORED)
