"""The rules of the operators: a row for each operator, a module for each family.

``torch.vmap`` reads the column ``batching``, ``FlopCounterMode`` ``flops``, DTensor ``axes``, and exporters read
``decompositions``.
``ssm_kernels._vmap`` and the modules of ``ssm_kernels.integrations`` register the columns with PyTorch.
"""

import importlib
import pkgutil
from typing import Any

from ._table import Row

__all__ = ["ROWS", "column"]

ROWS: dict[str, Row] = {
    name: row
    for module in pkgutil.iter_modules(__path__)
    if not module.name.startswith("_")
    for name, row in importlib.import_module(f"{__name__}.{module.name}").ROWS.items()
}


def column(name: str) -> dict[str, Any]:
    """A column by the names of operators in ``torch.ops.ssm_kernels``. Rows that share an operator have one rule for it."""
    return {operator: rule for row in ROWS.values() for operator, rule in getattr(row, name).items()}
