"""Layers whose discretization reads two input samples a step: their state also has the last samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor

from .._dtypes import wide_dtype
from .._scan_state import ScanState

__all__ = ["KeepsSamples"]


class KeepsSamples(nn.Module):
    """Base class of these layers, which keep the state and the last samples of the input and of B in one tensor."""

    discretization: Any
    lam_logit: nn.Parameter

    def _views_of(self, state: Tensor) -> ScanState:
        """The state, and the samples of the input and of B, in a tensor of all."""
        raise NotImplementedError

    def _parts_of(self, state: Tensor, dtype: torch.dtype) -> ScanState:
        """The state, in a wide dtype, and the samples, in ``dtype``: views where the tensor of all has the dtype."""
        views = self._views_of(state)
        return ScanState(views.state.to(wide_dtype(dtype)), views.u.to(dtype), cast(Tensor, views.B).to(dtype))

    def _weights(self, dtype: torch.dtype, missing_axes: int) -> dict[str, Any]:
        """The options of a scan, or of a step, that weigh its samples; ``lam`` with so many axes after its own."""
        if self.discretization != "exp_trapezoidal":
            return {}
        return {"lam": self.lam_logit.to(dtype)[(...,) + (None,) * missing_axes], "lam_sigmoid": True}

    def _step_two_samples(self, state: Tensor, dtype: torch.dtype, update: Callable[..., Tensor]) -> Tensor:
        """``update`` of the parts of a state, which it modifies in place."""
        parts = self._parts_of(state, dtype)
        out = update(parts.state, previous_x=parts.u, previous_B=parts.B)
        for view, part in zip(self._views_of(state), parts, strict=True):
            if cast(Tensor, part).dtype != cast(Tensor, view).dtype:
                cast(Tensor, view).copy_(cast(Tensor, part))
        return out
