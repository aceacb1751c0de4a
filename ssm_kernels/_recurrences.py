"""The table of recurrences, which C++ holds: ``csrc/common/recurrences.h``."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Recurrence", "recurrences"]


class Recurrence(NamedTuple):
    """A gated linear recurrence.

    Attributes:
        scan, step, summary: the names of its operators.
        inputs: the names of its inputs, in the order of the operators' arguments.
        broadcast: the last of them, which may have any shape that broadcasts, and the accumulation dtype.
        options: the names of options that change its formula.
    """

    scan: str
    inputs: tuple[str, ...]
    broadcast: tuple[str, ...]
    options: tuple[str, ...]

    @property
    def step(self) -> str:
        return f"{self.scan.removesuffix('_scan')}_step"

    @property
    def summary(self) -> str:
        return f"{self.scan}_summary"


recurrences = {
    scan: Recurrence(scan, tuple(inputs), tuple(inputs[first_broadcast:]), tuple(options))
    for scan, inputs, first_broadcast, options in zip(*torch.ops.ssm_kernels._recurrences(), strict=True)
}
"""By the name of the scan."""
