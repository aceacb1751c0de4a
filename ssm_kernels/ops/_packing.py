"""Packed sequences as inference code passes them: by ``cu_seqlens`` and ``seq_idx`` at once, with padding at the end."""

from __future__ import annotations

import torch
from torch import Tensor


def check_same_packing(name: str, seq_idx: Tensor, cu_seqlens: Tensor) -> None:
    """Raises if ``seq_idx``, (1, seqlen), begins sequences elsewhere than ``cu_seqlens``, whose last element begins padding.

    Only on the CPU and outside of compilation, because on CUDA the host would have to wait for the device.
    """
    if torch.compiler.is_compiling() or seq_idx.device.type != "cpu" or cu_seqlens.device.type != "cpu":
        return
    changes = (seq_idx[0, 1:] != seq_idx[0, :-1]).nonzero()[:, 0] + 1
    starts = cu_seqlens[(cu_seqlens > 0) & (cu_seqlens < seq_idx.shape[1])].unique()
    if changes.tolist() != starts.tolist():
        raise ValueError(
            f"{name}: expected seq_idx and cu_seqlens of the same packing, got sequences that begin at {changes.tolist()} "
            f"and at {starts.tolist()}"
        )


def with_padding(cu_seqlens: Tensor, seqlen: int) -> Tensor:
    """``cu_seqlens`` and one more sequence, of the steps after the last element up to ``seqlen``. It may be empty."""
    return torch.cat([cu_seqlens, cu_seqlens.new_full((1,), seqlen)])
