"""The rules of the operators: a row for each operator, a module for each family.

``torch.vmap`` reads the column ``batching``, ``FlopCounterMode`` ``flops``, DTensor ``axes``, and exporters read
``decompositions``.
``ssm_kernels._vmap`` and the modules of ``ssm_kernels.integrations`` register the columns with PyTorch.
"""

from typing import Any

from . import convolution, mixers, norm, recurrences, selective_scan, ssd, state_update
from ._table import Row

__all__ = ["ROWS", "column"]

ROWS: dict[str, Row] = {
    name: row
    for module in (selective_scan, ssd, state_update, convolution, norm, recurrences, mixers)
    for name, row in module.ROWS.items()
}


def column(name: str) -> dict[str, Any]:
    """A column by the names of operators in ``torch.ops.ssm_kernels``. Rows that share an operator have one rule for it."""
    return {operator: rule for row in ROWS.values() for operator, rule in getattr(row, name).items()}
