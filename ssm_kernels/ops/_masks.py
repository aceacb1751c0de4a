"""Masks of steps and lengths of sequences, in the forms in which callers have them, and the options of scans over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._arguments import check_dense

__all__ = ["as_mask", "read_lengths", "reset_state", "time_options"]


def as_mask(name: str, reset: Any, axes: int) -> Any:
    """``reset`` as a bool tensor with so many axes: true where it is not zero. A last axis of size 1 is dropped.

    The caller checks the shape. Something other than a tensor is returned as it is.

    Args:
        name: of the operator or layer, for messages.
        reset: bool, or of any integer or floating-point dtype.
        axes: of the mask.

    Raises:
        RuntimeError: ``reset`` is complex.
        NotImplementedError: ``reset`` is nested, sparse or quantized.
    """
    if not isinstance(reset, Tensor):
        return reset
    check_dense(name, "reset", reset)
    if reset.dim() == axes + 1 and reset.shape[-1] == 1:
        reset = reset.squeeze(-1)
    if reset.dtype == torch.bool:
        return reset
    if reset.is_complex():
        raise RuntimeError(
            f"{name}: expected reset of dtype bool, or of an integer or floating-point dtype in which any number but zero is a "
            f"reset, got {reset.dtype}"
        )
    return reset != 0


def time_options(operator: str, reverse: bool, cu_seqlens: Tensor | None, reset: Tensor | None) -> dict[str, Any]:
    """The keywords of a scan, none if all are defaults: the dispatcher takes half a microsecond for each."""
    if reverse is False and cu_seqlens is None and reset is None:
        return {}
    return {"reverse": reverse, "cu_seqlens": cu_seqlens, "reset": as_mask(operator, reset, 2)}


def reset_state(name: str, state: Tensor | None, reset: Tensor | None, like: Tensor, axis: int = 0) -> Tensor | None:
    """The state before a step: ``state``, and zero in the rows where ``reset``, (batch,) or (batch, 1), is not zero.

    Args:
        name: of the operator or layer, for messages.
        state: with the batch at ``axis``; None is zero.
        reset: None for no reset.
        like: (batch, ...), an input of the step.
        axis: of the batch in ``state``.

    Raises:
        ValueError: ``reset`` has another shape.
        RuntimeError: ``reset`` is complex, or ``reset`` or ``state`` on another device than ``like``.
        NotImplementedError: ``reset`` or ``state`` is nested, sparse or quantized.
        TypeError: ``reset`` is not a tensor.
    """
    if reset is None:
        return state
    mask = as_mask(name, reset, 1)
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name}: expected reset to be a tensor, got {type(reset).__name__}")
    if mask.shape != like.shape[:1]:
        raise ValueError(f"{name}: expected reset of shape (batch,) = {list(like.shape[:1])}, got {list(reset.shape)}")
    if mask.device != like.device:
        raise RuntimeError(f"{name}: expected reset on {like.device}, got {mask.device}")
    if not isinstance(state, Tensor):
        return state  # None, or what the operator refuses
    check_dense(name, "state", state)
    if state.device != like.device:
        raise RuntimeError(f"{name}: expected state on {like.device}, got {state.device}")
    if state.dim() <= axis or state.shape[axis] != mask.shape[0]:
        return state  # which the operator refuses
    return state.masked_fill(mask.view(*(1,) * axis, -1, *(1,) * (state.dim() - axis - 1)), 0)


def read_lengths(name: str, lengths: Any, batch: int, seqlen: int, device: torch.device) -> Tensor:
    """``lengths`` of the rows of a padded batch as an int64 tensor, (batch,), on ``device``.

    The host reads the values to check them, and so waits for the device if they are there, except in compiled code and while a
    CUDA graph is captured.

    Raises:
        ValueError: the shape or a value is not as above.
        RuntimeError: ``lengths`` is not of an integer dtype, or a meta tensor beside others.
        NotImplementedError: ``lengths`` is nested, sparse or quantized.
        TypeError: ``lengths`` is neither a tensor nor a sequence of ints.
    """
    if not isinstance(lengths, Tensor):
        is_ints = isinstance(lengths, Sequence) and all(isinstance(n, int) and not isinstance(n, bool) for n in lengths)
        if not is_ints:
            raise TypeError(f"{name}: expected lengths to be a tensor or a sequence of ints, got {type(lengths).__name__}")
        lengths = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    check_dense(name, "lengths", lengths)
    if lengths.is_meta and device.type != "meta":
        raise RuntimeError(f"{name}: expected lengths with values, got a meta tensor")
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise RuntimeError(f"{name}: expected lengths of an integer dtype, got {lengths.dtype}")
    if lengths.shape != (batch,):
        raise ValueError(f"{name}: expected lengths of shape (batch,) = [{batch}], got {list(lengths.shape)}")
    is_checked = not torch.compiler.is_compiling() and lengths.device.type != "meta" and batch > 0
    if is_checked and not (lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
        low, high = (int(value) for value in lengths.aminmax())
        if low < 0 or high > seqlen:
            raise ValueError(f"{name}: expected lengths from 0 to seqlen = {seqlen}, got values from {low} to {high}")
    return lengths.to(device, torch.int64, non_blocking=True)
