"""The operators of ``ssm_kernels`` over a sequence whose spans are on several ranks: context parallelism.

Each rank of a group passes its own contiguous span, in the order of the ranks, and gets the outputs of its span. Spans may have
unequal lengths, and none. Arguments and results are those of the function of the same name in ``ssm_kernels``, with these
exceptions:

- There is no ``states_at``.
- ``selective_scan``, ``ssd_chunk_scan`` and ``causal_conv1d`` take and return no states beside ``cu_seqlens``.
- The recurrences are differentiable once: a second derivative raises a RuntimeError.

And:

- ``group``: a ``ProcessGroup``, a ``DeviceMesh`` of one dimension, or None for the default group.
- ``exchange``: how states pass from rank to rank: "chain", from neighbour to neighbour; "summaries", by an all-gather; or None,
  the chain for up to 8 ranks. A call that returns a final state, one with ``reset``, and a compiled one use summaries.
- Parameters, such as ``A`` or ``weight``, are the same on every rank. Their gradients are of the rank's span alone: the sum
  over ranks is the gradient of the whole sequence.
- An initial state is the state before the whole sequence. Every rank passes it; its gradient is also a part of a sum.
- A final or last state is that after the whole sequence, and every rank gets it. The loss may use it on any of them: gradients
  of all ranks are added.
- With ``reverse`` time runs from the last step of the last rank to the first step of rank 0.
- ``cu_seqlens`` describes the whole sequence and is the same on every rank. ``seq_idx`` and ``reset`` have this rank's steps.

Every rank has to make the same calls in the same order, in backward too. The ranks compare shapes, dtypes and options of each
call that is new; a difference is an error on every rank. A rank with invalid arguments raises at once, and so do the others if
they compare the call. Compiled code makes no comparison. Along a chain a rank that receives
the message of another call raises a RuntimeError. On CUDA its results are NaN then, and one of its later calls or backwards
raises. With summaries ranks combine different calls without an error if they have compared both before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..choices import CandidateActivation, ConvActivation, DiscretizationName, Exchange
from ..ops._arguments import argument_error, keyword_checks, names_arguments
from ..ops.recurrence_steps import step_size
from ._agreement import Agreement, calls_begun, report
from ._group import Group, GroupLike
from ._group_operators import GroupOperators

__all__ = [
    "causal_conv1d",
    "diag_linear_scan",
    "elu_gru_scan",
    "hgrn_scan",
    "linear_scan",
    "liquid_scan",
    "mingru_scan",
    "minlstm_scan",
    "rglru_scan",
    "selective_scan",
    "ssd_chunk_scan",
]


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def _on_every_rank(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorator: the other ranks of the group get the error of a rank whose arguments are invalid, and do not wait for it."""
    check = keyword_checks(function)

    @functools.wraps(function)
    def operator(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        begun = calls_begun()
        try:
            check(kwargs)
            return function(*args, **kwargs)
        except Exception as error:
            if calls_begun() == begun:
                _tell_others(error, function, args, kwargs)
            raise

    return operator


def _tell_others(error: Exception, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        group = Group.of(kwargs.get("group"))
    except (RuntimeError, TypeError, ValueError):  # not a group of this process
        return
    is_of_types = isinstance(error, (AttributeError, RuntimeError, TypeError))
    named = argument_error(function, args, kwargs) if is_of_types else None
    report(group, function.__name__, error, said=None if named is None else str(named))


def _of(group: GroupLike | Group, exchange: Exchange | None, operator: str) -> GroupOperators:
    ranks = Group.of(group)
    return GroupOperators(ranks, Agreement(ranks), exchange, operator)


@names_arguments
@_on_every_rank
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
    discretization: DiscretizationName = "zoh",
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool = False,
    group: GroupLike = None,
    exchange: Exchange | None = None,
) -> Any:
    """:func:`ssm_kernels.selective_scan` over the ranks of a group, with every discretization.

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
    return _of(group, exchange, "selective_scan").selective_scan(
        u,
        delta,
        A,
        B,
        C,
        D,
        z,
        delta_bias,
        discretization=discretization,
        delta_softplus=delta_softplus,
        initial_state=initial_state,
        reverse=reverse,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        return_last_state=return_last_state,
    )


@names_arguments
@_on_every_rank
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
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
    discretization: DiscretizationName = "zoh",
    group: GroupLike = None,
    exchange: Exchange | None = None,
) -> Any:
    """:func:`ssm_kernels.ssd_chunk_scan` over the ranks of a group, with packed sequences that cross borders.

    A sequence of ``seq_idx`` goes on across a border if the numbers on both sides are equal. Initial and final states together
    with ``cu_seqlens`` raise a ValueError. With ``reverse`` a rank copies x, dt, B and ``seq_idx`` in forward, and the outputs'
    gradient, dt, C and ``seq_idx`` in backward. The copies are freed as soon as the summary, or the gradient of the initial
    states, is computed.

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
    return _of(group, exchange, "ssd_chunk_scan").ssd_chunk_scan(
        x,
        dt,
        A,
        B,
        C,
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
    )


@names_arguments
@_on_every_rank
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
    return _of(group, exchange, "causal_conv1d").causal_conv1d(
        x,
        weight,
        bias,
        activation=activation,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        return_final_state=return_final_state,
    )


@names_arguments
@_on_every_rank
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
    return _of(group, exchange, "linear_scan").recurrence(
        "linear_scan",
        (a, b),
        h0,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        reset=reset,
        return_last_state=return_last_state,
    )


@names_arguments
@_on_every_rank
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
        >>> gate, candidate = torch.randn(2, 2, 100, 8)
        >>> distributed.mingru_scan(gate, candidate).shape  # of this rank's steps
        torch.Size([2, 100, 8])
        >>> dist.destroy_process_group()
    """
    return _of(group, exchange, "mingru_scan").recurrence(
        "mingru_scan",
        (gate, candidate),
        h0,
        candidate_activation=candidate_activation,
        gate_is_logit=gate_is_logit,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        reset=reset,
        return_last_state=return_last_state,
    )


@names_arguments
@_on_every_rank
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
        >>> forget, input, candidate = torch.randn(3, 2, 100, 8)
        >>> distributed.minlstm_scan(forget, input, candidate).shape  # of this rank's steps
        torch.Size([2, 100, 8])
        >>> dist.destroy_process_group()
    """
    return _of(group, exchange, "minlstm_scan").recurrence(
        "minlstm_scan",
        (forget, input, candidate),
        h0,
        candidate_activation=candidate_activation,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        reset=reset,
        return_last_state=return_last_state,
    )


@names_arguments
@_on_every_rank
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
        >>> candidate, dt = torch.randn(2, 100, 8), torch.rand(2, 100, 1)
        >>> distributed.liquid_scan(candidate, torch.full((8,), 2.0), dt).shape  # of this rank's steps
        torch.Size([2, 100, 8])
        >>> dist.destroy_process_group()
    """
    return _of(group, exchange, "liquid_scan").recurrence(
        "liquid_scan",
        (candidate, tau, step_size("liquid_scan", dt, candidate)),
        h0,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        reset=reset,
        return_last_state=return_last_state,
    )


@names_arguments
@_on_every_rank
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
        >>> gate, x = torch.randn(2, 2, 100, 8)
        >>> distributed.rglru_scan(gate, gate, x=x, recurrent_param=torch.ones(8)).shape  # of this rank's steps
        torch.Size([2, 100, 8])
        >>> dist.destroy_process_group()
    """
    return _of(group, exchange, "rglru_scan").recurrence(
        "rglru_scan",
        (recurrence_gate, input_gate, x, recurrent_param),
        h0,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        reset=reset,
        return_last_state=return_last_state,
    )


@names_arguments
@_on_every_rank
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
        >>> log_gate, x = -torch.rand(2, 100, 8), torch.randn(2, 100, 8)
        >>> distributed.hgrn_scan(log_gate, x=x).shape  # of this rank's steps
        torch.Size([2, 100, 8])
        >>> dist.destroy_process_group()
    """
    return _of(group, exchange, "hgrn_scan").recurrence(
        "hgrn_scan",
        (log_gate, x),
        h0,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        reset=reset,
        return_last_state=return_last_state,
    )


@names_arguments
@_on_every_rank
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
        >>> gate, candidate = torch.randn(2, 2, 100, 8)
        >>> distributed.elu_gru_scan(gate, candidate).shape  # of this rank's steps
        torch.Size([2, 100, 8])
        >>> dist.destroy_process_group()
    """
    return _of(group, exchange, "elu_gru_scan").recurrence(
        "elu_gru_scan",
        (gate, candidate),
        h0,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        reset=reset,
        return_last_state=return_last_state,
    )


@names_arguments
@_on_every_rank
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
        >>> gate, x = torch.randn(2, 2, 100, 8)
        >>> distributed.diag_linear_scan(gate, x).shape  # of this rank's steps
        torch.Size([2, 100, 8])
        >>> dist.destroy_process_group()
    """
    return _of(group, exchange, "diag_linear_scan").recurrence(
        "diag_linear_scan",
        (gate, x),
        h0,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        reset=reset,
        return_last_state=return_last_state,
    )
