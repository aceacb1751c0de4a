"""Shared by the decompositions: the scan over steps, for which PyTorch has a higher-order operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.scan import scan_op

from .. import reference
from ..choices import DiscretizationName

__all__ = ["bound", "in_dtype", "kept_states", "refuse_packed", "scan", "scan_states", "skip_and_gate"]


def in_dtype(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def refuse_packed(operator: str, cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is not None:
        raise ValueError(
            f"decomposition of {operator}: expected cu_seqlens to be None, got a tensor: a graph cannot have one scan for each "
            "of a number of sequences that it does not know"
        )


def scan(
    step: Callable[..., list[Tensor]], state: Tensor, steps: list[Tensor], constants: tuple[Tensor, ...], *, like: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs of all steps, which have the shape and dtype of ``like``, and the last state."""
    if isinstance(like.shape[0], int) and like.shape[0] == 0:
        return like, state
    last_state, outputs = scan_op(step, [state], steps, constants)
    return outputs, last_state


def scan_states(
    discretization: DiscretizationName | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    keep: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The state-space model without skip connection and gate, for both of its scans.

    Args:
        discretization: a name. None: the state's factor is e^(dt A), and the input's is 1.
        x: (seqlen, batch, heads, headdim).
        dt: step sizes, (seqlen, batch, heads).
        A: (heads, dstate), or (heads, 1) for one number a head.
        B: (seqlen, batch, groups, dstate).
        C: as B.
        state: (batch, heads, headdim, dstate).
        keep: (seqlen, batch), 0 where the state before a step is dropped, else 1.

    Returns:
        y, (seqlen, batch, heads, headdim), and the last state.
    """
    heads_of_group = x.shape[2] // B.shape[2]

    def step(h: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, *others: Tensor) -> list[Tensor]:
        A, *keep = reversed(others)
        if keep:
            h = h * keep[0][:, None, None, None]
        if discretization is None:
            Abar, c = (dt[..., None] * A).exp(), torch.ones_like(A)
        else:
            Abar, c = reference.coefficients(discretization, dt[..., None], A)
        B, C = (X[:, :, None].expand(-1, -1, heads_of_group, -1).flatten(1, 2) for X in (B, C))
        h = Abar[:, :, None] * h + (c * B)[:, :, None] * x[..., None]
        return [h, (h * C[:, :, None]).sum(-1)]

    return scan(step, state, [x, dt, B, C, *([] if keep is None else [keep])], (A,), like=x)


def kept_states(seq_idx: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """(seqlen, batch): 0 where a sequence begins inside a row, else 1."""
    if seq_idx is None:
        return None
    continues = (seq_idx[:, 1:] == seq_idx[:, :-1]).to(seq_idx.dtype)
    return torch.cat([torch.ones_like(seq_idx[:, :1]), continues], dim=1).to(dtype).transpose(0, 1)


def skip_and_gate(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    y = y if D is None else y + D * x
    return y if z is None else y * F.silu(z)


def bound(operator: Any, positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call, by name and in the operator's order."""
    arguments = operator._schema.arguments
    given = dict(zip((argument.name for argument in arguments), positional, strict=False)) | dict(named)
    return {argument.name: given.get(argument.name, argument.default_value) for argument in arguments}
