"""The state of a scan whose discretization reads two input samples a step."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["ScanState"]


class ScanState(NamedTuple):
    """The state and the last samples, from which a scan of later steps continues.

    Attributes:
        state: (batch, dim, dstate), or (sequences, dim, dstate); of ``ssd_chunk_scan`` (batch, heads, headdim, dstate).
        u: the last input sample, (batch, dim); of ``ssd_chunk_scan`` (batch, heads, headdim).
        B: the input matrix of that sample, (batch, dstate) or (batch, groups, dstate); None if B is constant.

    Examples:
        >>> import torch
        >>> from ssm_kernels.reference import ScanState
        >>> ScanState(torch.zeros(2, 8, 16), torch.zeros(2, 8), None)._fields
        ('state', 'u', 'B')
    """

    state: Tensor
    u: Tensor
    B: Tensor | None
