"""The operators in terms of PyTorch's own, for exporters that know no others.

:func:`decomposition_table` is for ``torch.export.ExportedProgram.run_decompositions``. A scan becomes one ``scan`` of PyTorch's
higher-order operators over its steps, ``h_t = Abar_t h_{t-1} + c_t B_t u_t`` with the coefficients of
:mod:`ssm_kernels.reference`; its body holds one step, so that nothing has the size of all states. ONNX has such an operator,
``Scan``. The rest becomes elementwise operators.

Inputs narrower than float32 are computed in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from ..rules import column
from ..rules._table import Decomposition

__all__ = ["decomposition_table"]


def decomposition_table() -> dict[Any, Decomposition]:
    """Returns a function of PyTorch's operators for each operator that leaves its arguments as they are.

    The table has the scans, the convolution, the norms, the steps of the linear recurrences, and what layers call between
    their projections; forward only. ``selective_state_update`` and ``causal_conv1d_update`` are not in it, because they update
    a state in place: for decoding, export the scan and the convolution of one step, with their initial and last states.

    Returns:
        A new dict from ``torch.ops.ssm_kernels`` overloads to functions of the same arguments, for
        ``ExportedProgram.run_decompositions``. The functions return the operators' results but for what forward saves for
        backward, in whose place they return tensors without elements. They raise ValueError for ``cu_seqlens``.

    Examples:
        >>> import torch
        >>> import ssm_kernels
        >>> table = ssm_kernels.integrations.decompositions.decomposition_table()
        >>> a, b = torch.rand(2, 5, 3), torch.rand(2, 5, 3)
        >>> h, last_state = table[torch.ops.ssm_kernels.linear_scan.default](a, b)
        >>> torch.allclose(h, ssm_kernels.linear_scan(a, b))
        True
    """
    return {getattr(torch.ops.ssm_kernels, name).default: rule for name, rule in column("decompositions").items()}
