"""Compares results of the GPU with those of the CPU, for every case of ``sanitizer_cases.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]
# Returns a description of the error, or None.
Check = Callable[[], str | None]


def difference_between(
    name: str, actual: dict[str, Tensor], expected: dict[str, Tensor], in_16_bits: bool = False
) -> str | None:
    """Describes a wrong result of the device. The tolerance is loose: the tests check accuracy."""
    for what, value in expected.items():
        relative = 3e-2 if in_16_bits else {torch.float64: 1e-9, torch.float32: 1e-4}.get(value.dtype, 3e-2)
        if not value.numel():
            continue
        # The device flushes float32 numbers below 1e-38 to zero.
        tolerance = relative * max(value.detach().double().abs().max().item(), 1e-30)
        difference = (actual[what].detach().cpu().double() - value.detach().double()).abs().max().item()
        if not difference <= tolerance:
            return f"{name}: {what} differs from the CPU's by {difference:.3g}, more than {tolerance:.3g}"
    return None
