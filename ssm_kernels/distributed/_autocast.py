"""Autocast, for operators whose autograd nodes are Python functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops._arguments import is_autocast_enabled

__all__ = ["Autocast"]


class Autocast:
    """Casts the arguments of an operator as autocast does on the device of ``like``."""

    def __init__(self, like: Tensor) -> None:
        device = like.device.type
        self._lower = torch.get_autocast_dtype(device) if is_autocast_enabled(device) else None

    def to_lower(self, tensor: Any) -> Any:
        return self._to(tensor, self._lower)

    def to_float(self, tensor: Any) -> Any:
        return self._to(tensor, None if self._lower is None else torch.float32)

    def cast(self, tensors: Mapping[str, Any], lower: Sequence[str]) -> dict[str, Any]:
        """All arguments of a call: those named in ``lower`` in the lower precision, the others in float32."""
        return {name: self.to_lower(value) if name in lower else self.to_float(value) for name, value in tensors.items()}

    def to_float_unless_lower(self, tensor: Any) -> Any:
        return tensor if tensor is None or tensor.dtype == self._lower else self.to_float(tensor)

    @staticmethod
    def _to(tensor: Any, dtype: torch.dtype | None) -> Any:
        if dtype is None or tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(dtype)
