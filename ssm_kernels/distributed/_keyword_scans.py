"""The delta rule, Mamba-3 and xLSTM's matrix memory over the ranks of a group.

They have the arguments of the functions in ``ssm_kernels``, from which their signatures follow. ``scripts/generate_stubs.py``
writes them to ``_keyword_scans.pyi``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor  # noqa: F401  # an annotation of the functions, as GroupLike and Exchange

from .. import ops
from .._mamba3_state import Mamba3State  # noqa: F401
from ..choices import Exchange  # noqa: F401
from ..ops._arguments import names_arguments
from ._every_rank import on_every_rank, operators_of
from ._group import GroupLike  # noqa: F401
from ._over_ranks import KEYWORD_SCANS, define_over_ranks

__all__ = [*KEYWORD_SCANS]

_DOCS = {
    "delta_rule_scan": r"""The delta rule of :func:`ssm_kernels.delta_rule_scan` over the ranks of a group.

    A span maps the states before it to :math:`S T + B`: T, (key_dim, key_dim), is the product of the transitions of a head,
    and B the last state from zero. Packed sequences are as for :func:`ssd_chunk_scan`. Along a chain a rank sends batch *
    value_heads * value_dim * key_dim numbers of the states' dtype each way. With summaries it scans its span once more, for T
    and B, with ``value_dim + key_dim`` columns of values, and runs the scan's adjoint once more, for the gradient of its
    initial states. It sends batch * value_heads * (value_dim + key_dim) * key_dim numbers in forward, and batch * value_heads *
    value_dim * key_dim in backward; with ``return_final_states`` twice as many in backward.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from ssm_kernels import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> q, k = torch.randn(2, 1, 100, 4, 16)  # this rank's steps
        >>> v, beta = torch.randn(1, 100, 4, 32), torch.rand(1, 100, 4)
        >>> distributed.delta_rule_scan(q, k, v, beta, qk_l2norm=True).shape
        torch.Size([1, 100, 4, 32])
        >>> dist.destroy_process_group()
    """,
    "mamba3_chunk_scan": """:func:`ssm_kernels.mamba3_chunk_scan`, over the ranks of a group.

    Packed sequences are as for :func:`ssd_chunk_scan`. A rank of the group sends three tensors each way, along a chain to
    its neighbour: the phases, batch * heads * angles float64 numbers; the last k and x, batch * heads * (ranks * dstate +
    headdim), with the ranks of ``B``; and the state S, batch * heads * headdim * dstate, for which alone a rank waits for the
    scan of another. With summaries it scans its span once more for S, runs the scan's adjoint once more, for the gradient of
    its initial S, and sends batch * heads more numbers, the products of its decays, in forward; with ``return_final_states``
    twice as many in backward.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from ssm_kernels import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> x, (B, C) = torch.randn(1, 100, 4, 8), torch.randn(2, 1, 100, 1, 16)  # this rank's steps
        >>> dt, A, trap = torch.rand(1, 100, 4), -torch.rand(1, 100, 4), torch.randn(1, 100, 4)
        >>> distributed.mamba3_chunk_scan(x, dt, A, B, C, trap, torch.randn(1, 100, 4)).shape
        torch.Size([1, 100, 4, 8])
        >>> dist.destroy_process_group()
    """,
    "mlstm_scan": """:func:`ssm_kernels.mlstm_scan`, xLSTM's matrix memory, over the ranks of a group.

    With ``cu_seqlens`` ``initial_states`` and the final states are those of all sequences of the whole sequence, on every rank.
    Ranks exchange C, n and m in one tensor. Along a chain a rank sends batch * heads * (value_dim + 2) * key_dim numbers of the
    states' dtype each way. With summaries it scans its span once more, sends these and batch * heads float64 numbers, the sums
    of its log forget gates, in forward, and the gradient, as large as the states, in backward; with ``return_final_states``
    twice as many in backward. With ``cu_seqlens`` the sequences are the batch.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from ssm_kernels import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> q, k, v = torch.randn(3, 1, 100, 4, 16)  # this rank's steps
        >>> i, f = torch.randn(2, 1, 100, 4)
        >>> distributed.mlstm_scan(q, k, v, i, f).shape
        torch.Size([1, 100, 4, 16])
        >>> dist.destroy_process_group()
    """,
}


def _over_ranks(name: str) -> Callable[..., Any]:
    local = inspect.signature(getattr(ops, name))
    passed = [key if each.kind is not each.KEYWORD_ONLY else f"{key}={key}" for key, each in local.parameters.items()]
    passed = [each for each in passed if each.partition("=")[0] not in KEYWORD_SCANS[name]]
    body = [f"return operators_of(group, exchange, {name!r}).{name}({', '.join(passed)})"]
    return define_over_ranks(name, __name__, local, _DOCS[name], body, without=KEYWORD_SCANS[name], operators_of=operators_of)


globals().update({name: names_arguments(on_every_rank(_over_ranks(name))) for name in __all__})
