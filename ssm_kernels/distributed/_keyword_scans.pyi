# Written by scripts/generate_stubs.py.

from typing import Any

from torch import Tensor

from .._mamba3_state import Mamba3State
from ..choices import Exchange
from ._group import GroupLike

__all__ = ["delta_rule_scan", "mamba3_chunk_scan", "mlstm_scan"]

def delta_rule_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    num_householder: int = 1,
    qk_l2norm: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate_lower_bound: float | None = None,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    group: GroupLike = None,
    exchange: Exchange | None = None,
) -> Any:
    """The delta rule of :func:`ssm_kernels.delta_rule_scan` over the ranks of a group.

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
        >>> dist.destroy_process_group()"""

def mamba3_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    trap: Tensor,
    angles: Tensor,
    *,
    B_bias: Tensor | None = None,
    C_bias: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    mimo_x: Tensor | None = None,
    mimo_z: Tensor | None = None,
    mimo_out: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-05,
    rotate: str = "pairs",
    chunk_size: int | None = None,
    initial_states: Mamba3State | tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    group: GroupLike = None,
    exchange: Exchange | None = None,
) -> Any:
    """:func:`ssm_kernels.mamba3_chunk_scan`, over the ranks of a group.

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
        >>> dist.destroy_process_group()"""

def mlstm_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    scale: float | None = None,
    eps: float = 1e-06,
    input_gate: str = "exp",
    normalize: bool = True,
    initial_states: tuple[Tensor, Tensor, Tensor] | None = None,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    group: GroupLike = None,
    exchange: Exchange | None = None,
) -> Any:
    """:func:`ssm_kernels.mlstm_scan`, xLSTM's matrix memory, over the ranks of a group.

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
        >>> dist.destroy_process_group()"""
