"""The prompts of a generation: of one length, as a list, or with a mask; and the tokens that end and fill sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..nn.checks import check_int, check_optional_int, check_shape
from .padding import check_attention_mask
from .vocabulary import check_ids, check_range

__all__ = ["Prompts", "check_eos", "check_pad", "check_tokens", "read_prompts"]


class Prompts(NamedTuple):
    """Prompts with their padding on the left.

    Attributes:
        input_ids: (batch, columns): those of the given tensor, or of the longest prompt of a list.
        attention_mask: (batch, columns), bool: false for padding. None for a tensor without a mask, and for a list of prompts
            of one length.
    """

    input_ids: Tensor
    attention_mask: Tensor | None


def check_tokens(name: str, input_ids: Any) -> None:
    check_shape(name, "input_ids", input_ids, "(batch, seqlen)", (None, None))
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected input_ids of dtype int32 or int64, got {input_ids.dtype}")


def read_prompts(
    name: str, input_ids: Any, attention_mask: Any, pad_id: int, device: torch.device, vocab_size: int, waits: bool
) -> Prompts:
    """Checks prompts and moves their padding to the left, that between tokens too.

    The padding of a tensor keeps its numbers and their order; they need not be in the vocabulary.

    Args:
        input_ids: (batch, seqlen), or a list of (seqlen,) or of lists of ints.
        attention_mask: None, or for a tensor its mask.
        pad_id: fills the shorter rows of a list.
        device: of lists of ints.
        vocab_size: tokens are below it.
        waits: check tokens on every device, not on the CPU alone.
    """
    if isinstance(input_ids, Tensor):
        check_tokens(name, input_ids)
        if 0 in input_ids.shape:
            raise ValueError(f"{name}: expected a prompt of at least one token, got input_ids of shape {[*input_ids.shape]}")
        if attention_mask is None:
            check_ids(name, "input_ids", input_ids, vocab_size, waits=waits)
            return Prompts(input_ids, None)
        check_attention_mask(name, attention_mask, input_ids)
        is_token = attention_mask != 0
        if not input_ids.is_meta and not bool(is_token.any(dim=1).all()):
            raise ValueError(f"{name}: expected a prompt of at least one token in each row, got a row of padding")
        check_ids(name, "input_ids", input_ids.masked_fill(~is_token, 0), vocab_size, waits=waits)
        order = is_token.to(torch.uint8).argsort(dim=1, stable=True)
        return Prompts(input_ids.gather(1, order), is_token.gather(1, order))
    if isinstance(input_ids, str | bytes) or not isinstance(input_ids, Sequence):
        kind = type(input_ids).__name__
        raise TypeError(f"{name}: expected input_ids to be a tensor, or a list of prompts, got {kind}")
    if attention_mask is not None:
        raise ValueError(f"{name}: expected no attention_mask with a list of prompts, whose lengths say the same")
    rows = [_read_prompt(name, i, row, device, vocab_size, waits) for i, row in enumerate(input_ids)]
    if not rows:
        raise ValueError(f"{name}: expected a prompt of at least one token, got an empty list")
    if any(row.device != rows[0].device for row in rows):
        raise RuntimeError(f"{name}: expected prompts on one device, got {sorted({str(row.device) for row in rows})}")
    longest = max(row.numel() for row in rows)
    dtype = torch.int32 if all(row.dtype == torch.int32 for row in rows) else torch.int64
    ids = torch.full((len(rows), longest), pad_id, dtype=dtype, device=rows[0].device)
    is_token = torch.zeros_like(ids, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, longest - row.numel() :] = row
        is_token[i, longest - row.numel() :] = True
    return Prompts(ids, None if all(row.numel() == longest for row in rows) else is_token)


def _read_prompt(name: str, i: int, row: Any, device: torch.device, vocab_size: int, waits: bool) -> Tensor:
    if not isinstance(row, Tensor):
        if isinstance(row, str | bytes) or not isinstance(row, Sequence):
            raise TypeError(
                f"{name}: expected prompts of 1-D tensors or lists of ints, got input_ids[{i}] of {type(row).__name__}"
            )
        for token in row:
            check_int(name, f"a token of input_ids[{i}]", token, low=-math.inf)
        if row:
            check_range(name, f"input_ids[{i}]", [int(token) for token in row], vocab_size)
        row = torch.tensor([int(token) for token in row], dtype=torch.int64, device=device)
    check_shape(name, f"input_ids[{i}]", row, "(seqlen,)", (None,))
    if row.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected input_ids[{i}] of dtype int32 or int64, got {row.dtype}")
    if row.numel() == 0:
        raise ValueError(f"{name}: expected a prompt of at least one token, got none in input_ids[{i}]")
    check_ids(name, f"input_ids[{i}]", row, vocab_size, waits=waits)
    return row


def check_eos(name: str, eos_token_id: Any, vocab_size: int) -> tuple[int, ...]:
    """The tokens that end a sequence, from None, an int or several."""
    if eos_token_id is None:
        return ()
    if isinstance(eos_token_id, Sequence) and not isinstance(eos_token_id, str):
        ids = list(eos_token_id)
        if not ids:
            raise ValueError(f"{name}: expected eos_token_id to be an int, a list of at least one, or None, got an empty list")
    else:
        ids = [eos_token_id]
    for token in ids:
        check_int(name, "eos_token_id", token, low=0, expected="an int, a list of ints or None")
        if token >= vocab_size:
            raise ValueError(f"{name}: expected eos_token_id below vocab_size = {vocab_size}, got {token}")
    return tuple(int(token) for token in ids)


def check_pad(name: str, pad_token_id: Any, eos_ids: tuple[int, ...], rows: int) -> int:
    """The token that fills sequences: the given one, the first that ends sequences, or 0."""
    check_optional_int(name, "pad_token_id", pad_token_id, low=0)
    if pad_token_id is not None and pad_token_id >= rows:
        raise ValueError(f"{name}: expected pad_token_id below {rows}, the rows of the embedding, got {pad_token_id}")
    return int(pad_token_id) if pad_token_id is not None else (eos_ids or (0,))[0]
