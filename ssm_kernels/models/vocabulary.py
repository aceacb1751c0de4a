"""Checks that token ids and labels are in the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops._arguments import is_traced

__all__ = ["check_ids", "check_range"]


def check_ids(
    name: str, argument: str, ids: Tensor, vocab_size: int, *, ignored: int | None = None, waits: bool = False
) -> None:
    """Raises if an id is negative, or not below ``vocab_size``; ``ignored`` may occur besides.

    Without ``waits`` ids on another device than the CPU are not checked, as the host would have to wait for the device. Traces
    and compiled code contain no check.
    """
    is_readable = ids.device.type == "cpu" or (waits and not ids.is_meta)
    if not is_readable or is_traced(ids) or ids.numel() == 0:
        return
    low, high = _ends(ids if ignored is None else ids.masked_fill(ids == ignored, 0))
    if low >= 0 and high < vocab_size:
        return
    if ignored is not None:
        low, high = _ends(ids[ids != ignored])
    check_range(name, argument, (low, high), vocab_size, ignored=ignored)


def check_range(name: str, argument: str, ids: Sequence[int], vocab_size: int, *, ignored: int | None = None) -> None:
    """:func:`check_ids` for the smallest and the largest id, or for all of them."""
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        besides = "" if ignored is None else f", or {ignored} to leave a token out"
        raise ValueError(
            f"{name}: expected {argument} from 0 to {vocab_size - 1}, below vocab_size = {vocab_size}{besides}, got "
            f"{low} as the smallest and {high} as the largest"
        )


def _ends(ids: Tensor) -> list[int]:
    # One tensor: the host waits for a device once.
    ends: list[int] = torch.stack(ids.aminmax()).tolist()
    return ends
