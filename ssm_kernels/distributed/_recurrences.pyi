# Written by scripts/generate_stubs.py.

from typing import Any

from torch import Tensor

from ..choices import CandidateActivation, Exchange
from ._group import GroupLike

__all__ = [
    "diag_linear_scan",
    "elu_gru_scan",
    "hgrn_scan",
    "linear_scan",
    "liquid_scan",
    "mingru_scan",
    "minlstm_scan",
    "rglru_scan",
]

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
) -> Any: ...
def mingru_scan(
    gate: Tensor,
    candidate: Tensor,
    h0: Tensor | None = None,
    *,
    candidate_activation: CandidateActivation | None = None,
    gate_is_logit: bool = True,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool = False,
    group: GroupLike = None,
    exchange: Exchange | None = None,
) -> Any:
    """:func:`ssm_kernels.mingru_scan` over the ranks of a group: see :func:`linear_scan`.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from ssm_kernels import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> gate, candidate = torch.rand(2, 2, 100, 8)  # this rank's steps
        >>> distributed.mingru_scan(gate, candidate).shape
        torch.Size([2, 100, 8])
        >>> dist.destroy_process_group()"""

def minlstm_scan(
    forget: Tensor,
    input: Tensor,
    candidate: Tensor,
    h0: Tensor | None = None,
    *,
    candidate_activation: CandidateActivation | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool = False,
    group: GroupLike = None,
    exchange: Exchange | None = None,
) -> Any:
    """:func:`ssm_kernels.minlstm_scan` over the ranks of a group: see :func:`linear_scan`.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from ssm_kernels import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> forget, input, candidate = torch.rand(3, 2, 100, 8)  # this rank's steps
        >>> distributed.minlstm_scan(forget, input, candidate).shape
        torch.Size([2, 100, 8])
        >>> dist.destroy_process_group()"""

def liquid_scan(
    candidate: Tensor,
    tau: Tensor,
    dt: Tensor | float,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool = False,
    group: GroupLike = None,
    exchange: Exchange | None = None,
) -> Any:
    """:func:`ssm_kernels.liquid_scan` over the ranks of a group: see :func:`linear_scan`.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from ssm_kernels import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> candidate, tau, dt = torch.rand(3, 2, 100, 8)  # this rank's steps
        >>> distributed.liquid_scan(candidate, tau, dt).shape
        torch.Size([2, 100, 8])
        >>> dist.destroy_process_group()"""

def rglru_scan(
    recurrence_gate: Tensor,
    input_gate: Tensor,
    *,
    x: Tensor,
    recurrent_param: Tensor,
    h0: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool = False,
    group: GroupLike = None,
    exchange: Exchange | None = None,
) -> Any:
    """:func:`ssm_kernels.rglru_scan` over the ranks of a group: see :func:`linear_scan`.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from ssm_kernels import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> recurrence_gate, input_gate, x, recurrent_param = torch.rand(4, 2, 100, 8)  # this rank's steps
        >>> distributed.rglru_scan(recurrence_gate, input_gate, x=x, recurrent_param=recurrent_param).shape
        torch.Size([2, 100, 8])
        >>> dist.destroy_process_group()"""

def hgrn_scan(
    log_gate: Tensor,
    *,
    x: Tensor,
    h0: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool = False,
    group: GroupLike = None,
    exchange: Exchange | None = None,
) -> Any:
    """:func:`ssm_kernels.hgrn_scan` over the ranks of a group: see :func:`linear_scan`.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from ssm_kernels import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> log_gate, x = torch.rand(2, 2, 100, 8)  # this rank's steps
        >>> distributed.hgrn_scan(log_gate, x=x).shape
        torch.Size([2, 100, 8])
        >>> dist.destroy_process_group()"""

def elu_gru_scan(
    gate: Tensor,
    candidate: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool = False,
    group: GroupLike = None,
    exchange: Exchange | None = None,
) -> Any:
    """:func:`ssm_kernels.elu_gru_scan` over the ranks of a group: see :func:`linear_scan`.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from ssm_kernels import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> gate, candidate = torch.rand(2, 2, 100, 8)  # this rank's steps
        >>> distributed.elu_gru_scan(gate, candidate).shape
        torch.Size([2, 100, 8])
        >>> dist.destroy_process_group()"""

def diag_linear_scan(
    gate: Tensor,
    x: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool = False,
    group: GroupLike = None,
    exchange: Exchange | None = None,
) -> Any:
    """:func:`ssm_kernels.diag_linear_scan` over the ranks of a group: see :func:`linear_scan`.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from ssm_kernels import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> gate, x = torch.rand(2, 2, 100, 8)  # this rank's steps
        >>> distributed.diag_linear_scan(gate, x).shape
        torch.Size([2, 100, 8])
        >>> dist.destroy_process_group()"""
