"""Several small tensors of a rank in one buffer, for messages, and the all-gather of such buffers of context parallelism.

Functional collectives are traced by ``torch.compile`` and counted by ``CommDebugMode``. Backward needs no other collective:
each rank gathers the gradients of all ranks and keeps the part that concerns it, in a fixed order of additions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._agreement import failure
from ._group import Group

__all__ = ["Gathering", "Kind", "Layout", "depend_on", "kind"]

Kind = tuple[Sequence[int], torch.dtype]  # shape and dtype of a tensor


def depend_on(tensor: Tensor, other: Tensor) -> Tensor:
    """``tensor``, which the compiler takes for a function of ``other``, so that it neither removes nor moves what computes it.

    Ranks need different data: the first one uses no state of others, and its own gradient is used by none. The compiler would
    remove a collective whose result a rank does not use, or move one that does not depend on the gradients of the results to
    forward, on this rank alone. The others would wait for it.
    """
    if not torch.compiler.is_compiling():
        return tensor
    for axis in range(other.dim()):
        other = other.narrow(axis, 0, min(other.shape[axis], 1))
    number = other.sum().to(tensor.dtype)
    return torch.where(torch.zeros_like(number, dtype=torch.bool), number, tensor)


def kind(tensor: Tensor) -> Kind:
    """Shape and dtype."""
    return tensor.shape, tensor.dtype


class Layout:
    """The places of several tensors in one flat buffer: of their dtype, or of bytes where they have several.

    Args:
        kinds: shape and dtype of each tensor.

    Attributes:
        dtype: of the buffer.
        numel: elements of the buffer.
    """

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._kinds = kinds
        self._is_of_bytes = any(dtype != kinds[0][1] for _, dtype in kinds)
        self.dtype = torch.uint8 if self._is_of_bytes else kinds[0][1]
        self._spans: list[tuple[int, int]] = []  # first element and length
        self.numel = 0
        for shape, dtype in kinds:
            length = math.prod(shape) * (dtype.itemsize if self._is_of_bytes else 1)
            self._spans.append((self.numel, length))
            # A view of bytes as numbers has to begin at a multiple of their size.
            self.numel += length + (-length % 8 if self._is_of_bytes else 0)

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Layout:
        return Layout([kind(tensor) for tensor in tensors])

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """The buffer with the values of ``tensors``."""
        flat = [tensor.contiguous().view(-1) for tensor in tensors]
        if self._is_of_bytes:
            flat = [tensor.view(torch.uint8) for tensor in flat]
            flat = [
                torch.nn.functional.pad(tensor, (0, -tensor.shape[0] % 8)) if tensor.shape[0] % 8 > 0 else tensor
                for tensor in flat
            ]
        return torch.cat(flat) if len(flat) > 1 else flat[0]

    def unpack(self, buffer: Tensor, count: int | None = None) -> list[Tensor]:
        """The first ``count`` tensors, or all, in contiguous buffers (..., numel), each with the same leading axes: views."""
        results = []
        for (shape, dtype), (begin, length) in zip(self._kinds[:count], self._spans[:count], strict=True):
            part = buffer.narrow(-1, begin, length)
            if self._is_of_bytes:
                part = part.view(dtype)
            results.append(part.view(*buffer.shape[:-1], *shape))
        return results


class Gathering:
    """An all-gather under way, of tensors whose shapes and dtypes are the same on every rank.

    Args:
        tensors: of this rank.
        group: the ranks.
        what: names the data in the message of an error.

    Attributes:
        buffer: the data, for :func:`depend_on`.
    """

    def __init__(self, tensors: Sequence[Tensor], group: Group, what: str) -> None:
        self._group, self._what = group, what
        self._layout = Layout.of(tensors)
        packed = self._layout.pack(tensors)
        self.buffer = self._run(torch.ops._c10d_functional.all_gather_into_tensor, packed, group.size, group.name)

    def wait(self) -> list[Tensor]:
        """The tensors of all ranks, each (ranks, ...).

        Raises:
            RuntimeError: the collective failed: a rank has died, made another call or not come within the group's time-out.
        """
        self.buffer = self._run(torch.ops._c10d_functional.wait_tensor, self.buffer)
        return self._layout.unpack(self.buffer.view(self._group.size, -1))

    def _run(self, operator: torch._ops.OpOverloadPacket, *arguments: object) -> Tensor:
        if torch.compiler.is_compiling():
            traced: Tensor = operator(*arguments)
            return traced
        try:
            result: Tensor = operator(*arguments)
        except RuntimeError as error:
            raise failure(f"{self._what}: the all-gather", self._group, error) from error
        return result
