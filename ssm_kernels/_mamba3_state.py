"""The state of Mamba-3's scan between two calls."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Mamba3State"]


class Mamba3State(NamedTuple):
    """The four tensors from which Mamba-3's scan continues; with ``cu_seqlens`` the first axis is that of the sequences.

    Attributes:
        angle: the phases after the last step, in radians, (batch, heads, angles).
        ssm: the state, (batch, heads, headdim, dstate).
        k: the last row of ``B``, with its bias and rotated by ``angle``, (batch, heads, dstate); of rank R
            (batch, heads, R, dstate).
        x: the last input, (batch, heads, headdim).

    Examples:
        >>> import torch
        >>> from ssm_kernels.reference import Mamba3State
        >>> zeros = torch.zeros
        >>> Mamba3State(zeros(2, 4, 8), zeros(2, 4, 16, 32), zeros(2, 4, 32), zeros(2, 4, 16))._fields
        ('angle', 'ssm', 'k', 'x')
    """

    angle: Tensor
    ssm: Tensor
    k: Tensor
    x: Tensor
