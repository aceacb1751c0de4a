"""Registers the operators' batching rules for :func:`torch.vmap`, which :mod:`ssm_kernels.rules` has."""

from __future__ import annotations

import torch

from .rules import column
from .rules._table import Composed

_library = torch.library.Library("ssm_kernels", "IMPL")

for _name, _rule in column("batching").items():
    if isinstance(_rule, Composed):
        _function = _rule.function or getattr(torch.ops.ssm_kernels, _name).default.decompose
        _library.impl(_name, _function, "FuncTorchBatchedDecomposition")
    else:
        torch.library.register_vmap(f"ssm_kernels::{_name}", _rule)
