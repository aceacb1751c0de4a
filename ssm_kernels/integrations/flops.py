"""Flops of the operators for ``torch.utils.flop_counter.FlopCounterMode``.

:func:`register` gives each operator its formula. A multiply-add counts as two flops. As for PyTorch's own operators,
elementwise work around a scan or a product (norms, gates, softplus, D x) is not counted. Backward counts twice its forward, and
again what it computes anew.

======================  ============================================================================================
selective scan          9 per element of the states: batch * seqlen * dim * dstate, the count that papers use
                        (https://github.com/state-spaces/mamba/issues/110)
selective_state_update  the same, with one step for each token
delta_rule_step         per element of a token's states 4 an update, 2 for the output and 1 for a gate
SSD                     the products of the chunked algorithm (Mamba-2, arXiv:2405.21060, section 6), chunks of Q steps:
                        C B^T of a group, its product with x, the chunks' states, and the states' share of the output
mLSTM                   SSD's, for the values and for the divisor; a step 5 per element of its states
convolution             2 * width per element
linear recurrences      2 per element
summaries               as the scan, less the output: 7 per element of the states; SSD's 2 * headdim * dstate per step and head;
                        3 per element of a linear recurrence
======================  ============================================================================================

Q is ``chunk_size``, or 64 where it is absent; at most seqlen. The kernels may take chunks of another size and then do more or
less than the count.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from ..rules import column
from ..rules._table import Formula

__all__ = ["register"]


def register() -> None:
    """Makes ``FlopCounterMode`` count the operators of this package. Further calls do nothing.

    Examples:
        >>> import torch
        >>> from torch.utils.flop_counter import FlopCounterMode
        >>> import ssm_kernels
        >>> ssm_kernels.integrations.flops.register()
        >>> layer, x = ssm_kernels.nn.Mamba(64), torch.randn(2, 100, 64)
        >>> with FlopCounterMode(display=False) as counter:
        ...     y = layer(x)
        >>> counter.get_total_flops() > 2 * 200 * layer.in_proj.weight.numel()  # more than the in-projection's
        True
    """
    for name, formula in column("flops").items():
        operator = getattr(torch.ops.ssm_kernels, name)
        if operator not in flop_registry:
            register_flop_formula(operator, get_raw=True)(partial(_count, formula, _argument_names(operator)))


def _argument_names(operator: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in operator.default._schema.arguments)


def _count(formula: Formula, names: tuple[str, ...], *values: Any, out_val: Any = None, **options: Any) -> int:
    return formula({**dict.fromkeys(names), **dict(zip(names, values, strict=False)), **options})
