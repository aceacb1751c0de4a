"""The recurrences over the ranks of a group, with the arguments of the functions of the same names in ``ssm_kernels``.

A loop makes them from the table of recurrences. ``scripts/generate_stubs.py`` writes their types to ``_recurrences.pyi``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import ops
from .._recurrences import Recurrence, recurrences
from ..choices import Exchange
from ..ops._arguments import names_arguments
from ..ops._recurrence_functions import example_call, step_sizes
from ..ops._step_sizes import step_size
from ._every_rank import on_every_rank, operators_of
from ._group import GroupLike
from ._over_ranks import define_over_ranks

__all__ = [*recurrences]


@names_arguments
@on_every_rank
def linear_scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool = False,
    group: GroupLike = None,
    exchange: Exchange | None = None,
) -> Any:
    """:func:`ssm_kernels.linear_scan` over the ranks of a group.

    ``reset`` has this rank's steps, and ``h0``, the same on every rank, is the state before the whole sequence and after each
    reset. With ``cu_seqlens`` ``h0`` and ``last_state`` are those of all sequences of the whole sequence, on every rank. A rank
    sends 2 * batch * channels numbers of the states' dtype in forward and batch * channels in backward; with
    ``return_last_state`` twice as many in backward; with ``reset`` another batch numbers in forward; with ``cu_seqlens`` the
    sequences are the batch.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from ssm_kernels import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> a, b = torch.rand(2, 100, 8), torch.randn(2, 100, 8)  # this rank's steps
        >>> h, last_state = distributed.linear_scan(a, b, return_last_state=True)
        >>> h.shape, last_state.shape  # the last state is that of the whole sequence, on every rank
        (torch.Size([2, 100, 8]), torch.Size([2, 8]))
        >>> dist.destroy_process_group()
    """
    return operators_of(group, exchange, "linear_scan").recurrence(
        "linear_scan",
        (a, b),
        h0,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        reset=reset,
        return_last_state=return_last_state,
    )


def _over_ranks(row: Recurrence) -> Callable[..., Any]:
    name, first = row.scan, row.inputs[0]
    local = inspect.signature(getattr(ops, name))
    options = [key for key in local.parameters if key not in (*row.inputs, "h0")]
    passed = [f"({', '.join(row.inputs)})", "h0", *(f"{key}={key}" for key in options)]
    body = [
        f"operators = operators_of(group, exchange, {name!r})",
        *step_sizes(name, local, first),
        f"return operators.recurrence({name!r}, {', '.join(passed)})",
    ]
    names, call = example_call(name, local)
    doc = f""":func:`ssm_kernels.{name}` over the ranks of a group: see :func:`linear_scan`.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from ssm_kernels import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> {names} = torch.rand({len(row.inputs)}, 2, 100, 8)  # this rank's steps
        >>> distributed.{name}({call}).shape
        torch.Size([2, 100, 8])
        >>> dist.destroy_process_group()
    """
    scan = define_over_ranks(name, __name__, local, doc, body, operators_of=operators_of, step_size=step_size)
    return names_arguments(on_every_rank(scan))


globals().update({name: _over_ranks(row) for name, row in recurrences.items() if name != "linear_scan"})
