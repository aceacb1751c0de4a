"""The rows of a cache of states that a call uses, for calls that one decoding kernel does not serve: circular buffers, states
in a third dtype, and steps that autograd records. A decoding operator checks the slots, and they mean what they mean there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import ops
from ..ops.convolution import causal_conv1d_update
from ._promotion import no_autocast


def _may_share_memory(state: Tensor) -> bool:
    """Whether elements may share memory: False if each stride is longer than all that shorter strides span."""
    # torch.compile would guard on the strides and compile again for others.
    if torch.compiler.is_compiling():
        return False
    span = 0
    for stride, size in sorted(zip(state.stride(), state.shape, strict=True)):
        if size > 1 and stride <= span:
            return True
        span += (size - 1) * stride
    return False


def _padding(state: Tensor) -> Tensor:
    """Indices of one row without a slot: the operator checks the memory of the state and leaves it as it is."""
    return torch.full((1,), -1, device=state.device)


def check_conv_cache(state: Tensor, indices: Tensor | None, batch: int) -> None:
    """Raises as :func:`ssm_kernels.causal_conv1d_update` for slots, where it calls the operator with tensors of no channels,
    and for elements of ``state`` that share memory."""
    if _may_share_memory(state):
        x = state.new_zeros(1, state.shape[1])
        causal_conv1d_update(x, state.detach(), x.new_zeros(x.shape[1], 1), state_batch_indices=_padding(state))
    if indices is None:
        return
    empty = state.new_empty(batch, 0)
    causal_conv1d_update(empty, state.new_empty(state.shape[0], 0, 0), empty.new_empty(0, 1), state_batch_indices=indices)


def check_scan_cache(state: Tensor, indices: Tensor | None, batch: int) -> None:
    """Raises as :func:`ssm_kernels.selective_state_update` for slots, where it calls the operator with tensors of no channels,
    and for elements of ``state`` that share memory."""
    if _may_share_memory(state):
        x, B = state.new_zeros(1, *state.shape[1:-1]), state.new_zeros(1, state.shape[-1])
        ops.selective_state_update(
            state.detach(), x, x, state.new_zeros(state.shape[1:]), B, B, state_batch_indices=_padding(state)
        )
    if indices is None:
        return
    if indices.dim() == 2:
        raise NotImplementedError(
            "selective_state_update: expected state_batch_indices of shape (batch,) with a state of another dtype than float32 "
            f"and that of x, got {list(indices.shape)}"
        )
    x, B = state.new_empty(batch, 0), state.new_empty(batch, 1)
    ops.selective_state_update(
        state.new_empty(state.shape[0], 0, 1), x, x, x.new_empty(0, 1), B, B, state_batch_indices=indices
    )


class CacheRows:
    """Reads and writes the slots ``indices`` of ``state``, or all of them in order without ``indices``. ``check`` raises for
    slots and memory that the operator refuses.

    As in the operators, a negative index is padding: the row's output is zero and no slot is touched. The CPU raises for slots
    that are not distinct or past the last one. CUDA does not, because the host would have to wait for the device: a row whose
    index is past the last slot returns NaN and touches no slot, and rows that share a slot race.
    """

    def __init__(
        self, state: Tensor, indices: Tensor | None, batch: int, check: Callable[[Tensor, Tensor | None, int], None]
    ) -> None:
        self.state, self.indices = state, indices
        with no_autocast(state):
            check(state, indices, batch)
        if indices is None:
            return
        self.places = indices.long().clamp(min=0, max=max(state.shape[0] - 1, 0))
        self.is_valid = indices == self.places

    def read(self) -> Tensor:
        """Copies the rows. A row of padding gets the values of some slot, or zeros if the cache has no slots."""
        if self.indices is None:
            return self.state.clone()
        if self.state.shape[0] == 0:
            return self.state.new_zeros(self.indices.shape[0], *self.state.shape[1:])
        return self.state.index_select(0, self.places)

    def write(self, old: Tensor, new: Tensor) -> None:
        """Writes ``new`` rows into the slots that ``old`` was read from.

        The host does not read the indices. A row without a slot repeats the write of the first row that has one; if no row has
        one, a slot gets its old contents back.
        """
        if self.indices is None:
            self.state.copy_(new)
            return
        if self.indices.shape[0] == 0 or self.state.shape[0] == 0:
            return
        rows = torch.arange(self.indices.shape[0], device=self.indices.device)
        rows = torch.where(self.is_valid, rows, self.is_valid.int().argmax())
        new = torch.where(self._like(new, self.is_valid), new.to(self.state.dtype), old.to(self.state.dtype))
        self.state.index_copy_(0, self.places[rows], new[rows])

    def without_slot(self, out: Tensor) -> Tensor:
        """``out`` with zeros in the rows of padding and NaN in those past the last slot."""
        if self.indices is None:
            return out
        out = out.masked_fill(self._like(out, self.indices < 0), 0)
        return out.masked_fill(self._like(out, self.indices >= self.state.shape[0]), torch.nan)

    @staticmethod
    def _like(tensor: Tensor, rows: Tensor) -> Tensor:
        return rows.view(-1, *[1] * (tensor.dim() - 1))
