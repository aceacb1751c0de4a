"""The operators of ``ssm_kernels`` over a sequence whose spans are on several ranks: context parallelism.

Each rank of a group passes its own contiguous span, in the order of the ranks, and gets the outputs of its span. Spans may have
unequal lengths, and none. Arguments and results are those of the function of the same name in ``ssm_kernels``, with these
exceptions:

- There is no ``states_at``, ``mlstm_scan`` has no ``seq_idx``, and ``mamba3_chunk_scan`` no ``reverse``.
- ``selective_scan``, ``ssd_chunk_scan``, ``mamba3_chunk_scan``, ``delta_rule_scan`` and ``causal_conv1d`` take and return no
  states beside ``cu_seqlens``.
- The recurrences are differentiable once: a second derivative raises a RuntimeError.

And:

- ``group``: a ``ProcessGroup``, a ``DeviceMesh`` of one dimension, or None for the default group.
- ``exchange``: leave it out. States pass from neighbour to neighbour, along a chain, for up to 8 ranks, and by an all-gather of
  summaries for more ranks and where a chain cannot run: a call that returns a final state, one with ``reset``, a compiled one
  and CUDA graphs. "chain" and "summaries" replace the number of ranks in this choice.
- Parameters, such as ``A`` or ``weight``, are the same on every rank. Their gradients are of the rank's span alone: the sum
  over ranks is the gradient of the whole sequence.
- An initial state is the state before the whole sequence. Every rank passes it; its gradient is also a part of a sum.
- A final or last state is that after the whole sequence, and every rank gets it. The loss may use it on any of them: gradients
  of all ranks are added.
- With ``reverse`` time runs from the last step of the last rank to the first step of rank 0.
- ``cu_seqlens`` describes the whole sequence and is the same on every rank. ``seq_idx`` and ``reset`` have this rank's steps.

Every rank has to make the same calls in the same order, in backward too. The ranks compare shapes, dtypes and options of each
call that is new; a difference is an error on every rank. A rank with invalid arguments raises at once, and so do the others if
they compare the call. Compiled code makes no comparison. Along a chain a rank that receives the message of another call raises
a RuntimeError. On CUDA its results are NaN then, and one of its later calls or backwards raises. With summaries ranks combine
different calls without an error if they have compared both before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._discretizations import is_two_sample, with_alpha
from ..choices import (
    ConvActivation,
    DiscretizationName,
    Exchange,
    ExponentialDiscretizationName,
    ExponentialTwoSampleDiscretizationName,
    PreviousSample,
    TwoSampleDiscretizationName,
)
from ..ops._arguments import names_arguments
from ..ops._complex import is_complex
from ..ops._two_samples import refuse_one_sample
from . import _keyword_scans, _recurrences
from ._every_rank import on_every_rank, operators_of
from ._group import GroupLike
from ._keyword_scans import *  # noqa: F403
from ._recurrences import *  # noqa: F403

__all__ = ["causal_conv1d", "selective_scan", "ssd_chunk_scan"]
__all__ += _keyword_scans.__all__ + _recurrences.__all__


@names_arguments
@on_every_rank
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: DiscretizationName | TwoSampleDiscretizationName = "zoh",
    alpha: float | None = None,
    lam: Tensor | None = None,
    lam_sigmoid: bool = False,
    previous: PreviousSample | tuple[Tensor, Tensor | None] = "zero",
    delta_A: Tensor | None = None,
    conjugate_pairs: bool = True,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool = False,
    group: GroupLike = None,
    exchange: Exchange | None = None,
) -> Any:
    """:func:`ssm_kernels.selective_scan` over the ranks of a group.

    Rules that read two input samples a step receive the last sample of the rank before, batch * dim + batch * groups * dstate +
    1 numbers of the dtype of ``u``: along a chain in a message of its own, with summaries in an all-gather. ``previous`` is the
    sample before the whole sequence, on every rank, and ``return_last_state`` returns a ``ScanState``. With summaries these
    rules, ``delta_A`` and a complex ``A`` run the scan once more for the last state of the span. With a complex ``A`` backward
    computes the gradient of the span's initial state by one more adjoint of the scan.

    Packed sequences are as for :func:`ssd_chunk_scan`. With ``reverse`` a rank copies u, delta, per-step B and ``seq_idx``
    in forward, and the outputs' gradient, delta, z, per-step C and ``seq_idx`` in backward. The copies are freed as soon as
    the summary, or the initial state's gradient, is computed. With summaries a rank sends its span's last state and decay
    in forward, 2 * batch * dim * dstate numbers of the dtype of ``A``, and the gradient of its initial state in backward,
    half as many; with ``return_last_state`` backward also sends that gradient.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from ssm_kernels import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> u, delta = torch.randn(2, 8, 100), torch.rand(2, 8, 100)  # this rank's steps
        >>> A, B, C = -torch.rand(8, 16), torch.randn(2, 16, 100), torch.randn(2, 16, 100)
        >>> distributed.selective_scan(u, delta, A, B, C).shape
        torch.Size([2, 8, 100])
        >>> dist.destroy_process_group()
    """
    if conjugate_pairs is not True and not is_complex(A):
        raise ValueError("selective_scan: expected conjugate_pairs=False with a complex A only, got a real A")
    if alpha is not None or discretization in ("gbt", "gbt_two_sample"):
        discretization = with_alpha("selective_scan", discretization, alpha)
    if not is_two_sample(discretization) and (lam is not None or lam_sigmoid is not False or previous != "zero"):
        refuse_one_sample("selective_scan", discretization, lam, lam_sigmoid, previous)
    return operators_of(group, exchange, "selective_scan").selective_scan(
        *(u, delta, A, B, C, D, z, delta_bias),
        discretization=discretization,
        lam=lam,
        lam_sigmoid=lam_sigmoid,
        previous=previous,
        delta_A=delta_A,
        conjugate_pairs=conjugate_pairs,
        delta_softplus=delta_softplus,
        initial_state=initial_state,
        reverse=reverse,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        return_last_state=return_last_state,
    )


@names_arguments
@on_every_rank
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] | None = (0.0, math.inf),
    initial_states: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: bool = False,
    discretization: ExponentialDiscretizationName | ExponentialTwoSampleDiscretizationName = "zoh",
    lam: Tensor | None = None,
    lam_sigmoid: bool = False,
    previous: PreviousSample | tuple[Tensor, Tensor] = "zero",
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
    group: GroupLike = None,
    exchange: Exchange | None = None,
) -> Any:
    """:func:`ssm_kernels.ssd_chunk_scan` over the ranks of a group, with packed sequences that cross borders.

    A sequence of ``seq_idx`` goes on across a border if the numbers on both sides are equal. Initial and final states together
    with ``cu_seqlens`` raise a ValueError, and so does a pair as ``previous``. Rules that read two input samples exchange
    samples as those of :func:`selective_scan` do. With ``reverse`` a rank copies x, dt, B and ``seq_idx`` in forward, and the
    outputs' gradient, dt, C and ``seq_idx`` in backward, with ``log_decay`` and ``gain`` in place of dt if they are given. The
    copies are freed as soon as the summary, or the gradient of the initial states, is computed.

    With summaries a rank sends batch * heads * (headdim * dstate + 1) numbers of the dtype of ``A`` in forward, and batch *
    heads * headdim * dstate in backward; with ``return_final_states`` twice as many in backward.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from ssm_kernels import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> x, dt = torch.randn(2, 100, 4, 16), torch.rand(2, 100, 4)  # this rank's steps
        >>> A, B, C = -torch.rand(4), torch.randn(2, 100, 1, 32), torch.randn(2, 100, 1, 32)
        >>> distributed.ssd_chunk_scan(x, dt, A, B, C).shape
        torch.Size([2, 100, 4, 16])
        >>> dist.destroy_process_group()
    """
    if not is_two_sample(discretization) and (lam is not None or lam_sigmoid is not False or previous != "zero"):
        refuse_one_sample("ssd_chunk_scan", discretization, lam, lam_sigmoid, previous)
    return operators_of(group, exchange, "ssd_chunk_scan").ssd_chunk_scan(
        *(x, dt, A, B, C),
        chunk_size=chunk_size,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        initial_states=initial_states,
        reverse=reverse,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        return_final_states=return_final_states,
        discretization=discretization,
        lam=lam,
        lam_sigmoid=lam_sigmoid,
        previous=previous,
        log_decay=log_decay,
        gain=gain,
    )


@names_arguments
@on_every_rank
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: ConvActivation | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    group: GroupLike = None,
    exchange: Exchange | None = None,
) -> Any:
    """:func:`ssm_kernels.causal_conv1d` over the ranks of a group: the halo of ``width - 1`` steps comes from the ranks before.

    Packed sequences are as for :func:`ssd_chunk_scan`. With summaries a rank sends (batch * channels + 1) * (width - 1)
    numbers of the dtype of ``x`` in forward and batch * channels * (width - 1) in backward; with ``return_final_state``
    twice as many in backward.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from ssm_kernels import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> x, weight = torch.randn(2, 100, 8), torch.randn(8, 4)
        >>> distributed.causal_conv1d(x, weight, activation="silu").shape  # of this rank's steps
        torch.Size([2, 100, 8])
        >>> dist.destroy_process_group()
    """
    return operators_of(group, exchange, "causal_conv1d").causal_conv1d(
        x,
        weight,
        bias,
        activation=activation,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        return_final_state=return_final_state,
    )
