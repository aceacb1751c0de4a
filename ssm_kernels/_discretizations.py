"""The table of discretizations, which C++ holds: ``csrc/common/discretization.h``."""

from __future__ import annotations

import torch

from .choices import DiscretizationName

__all__ = ["discretization_aliases", "discretizations"]

discretizations: tuple[DiscretizationName, ...] = tuple(torch.ops.ssm_kernels._discretizations())
discretization_aliases: dict[str, str] = torch.ops.ssm_kernels._discretization_aliases()
