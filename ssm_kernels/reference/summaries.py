"""References of the summaries and of their mirror, written from the formulas in the manner of :mod:`ssm_kernels.reference`.

The decay is the product of the transitions of all steps, and zero where a sequence begins. The gradient of the state before a
span is the sum over its steps of the product of the transitions up to a step, times what reads the state there.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._discretizations import with_alpha
from ..choices import DiscretizationName, ExponentialDiscretizationName
from .discretizations import coefficients
from .recurrences import RECURRENCES
from .sequences import step_sizes
from .ssd import step_coefficients

__all__ = [
    "initial_gradient",
    "recurrence_summary",
    "selective_scan_summary",
    "ssd_chunk_scan_summary",
]


def _begins(seq_idx: Tensor) -> Tensor:
    begins = torch.zeros_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return begins


def _product(transitions: Tensor, axis: int, begins: Tensor | None) -> Tensor:
    """The product over time; zero in rows of the batch in which a sequence begins."""
    product = transitions.prod(axis)
    if begins is None:
        return product
    return product.masked_fill(begins.any(1).reshape(-1, *(1,) * (product.dim() - 1)), 0)


def selective_scan_summary(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    *,
    delta_bias: Tensor | None = None,
    discretization: DiscretizationName = "zoh",
    alpha: float | None = None,
    delta_softplus: bool = False,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`ssm_kernels.selective_scan_summary`, in the promoted dtype of all arguments."""
    if alpha is not None or discretization == "gbt":
        discretization = with_alpha("selective_scan_summary", discretization, alpha)
    begins = None if seq_idx is None else _begins(seq_idx)
    if begins is not None:
        is_last = begins.flip(1).cumsum(1).flip(1) == begins
        u = torch.where(is_last[:, None], u, 0)
    options: Any = {"delta_bias": delta_bias, "discretization": discretization, "delta_softplus": delta_softplus}
    _, last_state = reference.selective_scan(u, delta, A, B, B, **options, return_last_state=True)
    dtype = last_state.dtype
    bias = None if delta_bias is None else delta_bias.to(dtype.to_real())[:, None]
    steps = step_sizes(delta.to(dtype.to_real()), bias, delta_softplus)
    Abar, _ = coefficients(discretization, steps[..., None], A.to(dtype)[:, None])
    return last_state, _product(Abar, 2, begins)


def ssd_chunk_scan_summary(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    B: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = (0.0, math.inf),
    discretization: ExponentialDiscretizationName = "zoh",
    seq_idx: Tensor | None = None,
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`ssm_kernels.ssd_chunk_scan_summary`, in the promoted dtype of all arguments."""
    options: Any = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit, "discretization": discretization}
    options |= {"log_decay": log_decay, "gain": gain}
    _, final_states = reference.ssd_chunk_scan(x, dt, A, B, B, **options, seq_idx=seq_idx, return_final_states=True)
    transitions, _ = step_coefficients(final_states.dtype, dt, A, **options)
    return final_states, _product(transitions, 1, None if seq_idx is None else _begins(seq_idx))


def recurrence_summary(
    recurrence: str,
    *inputs: Any,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    """As the summary of this scan, such as ``"linear_scan"``; in float32 or, where any argument is float64, in float64."""
    scan = getattr(reference, recurrence)
    of_time: Any = {"reverse": reverse, "cu_seqlens": cu_seqlens, "reset": reset}
    h, last_state = scan(*inputs, **of_time, return_last_state=True, **named)
    tensors = [x.to(h.dtype) if isinstance(x, Tensor) else x for x in inputs]
    others = {name: x.to(h.dtype) if isinstance(x, Tensor) else x for name, x in named.items()}
    a = RECURRENCES[recurrence](*tensors, **others)[0].expand_as(h)
    if cu_seqlens is None:
        return last_state, _product(a, 1, reset)
    products = [a[0, begin:end].prod(0) for begin, end in itertools.pairwise(cu_seqlens.tolist())]
    return last_state, torch.stack(products) if products else torch.ones_like(last_state)


def initial_gradient(transitions: Tensor, reads: Tensor, begins: Tensor | None = None, reverse: bool = False) -> Tensor:
    """The sum over t of (product of the transitions up to t) reads_t, over the steps before a sequence begins.

    Args:
        transitions: (batch, seqlen, ...).
        reads: the gradients of the states through what reads them at their own step alone; broadcasts with ``transitions``.
        begins: (batch, seqlen), bool.
    """
    if reverse:
        transitions, reads = transitions.flip(1), reads.flip(1)
        begins = None if begins is None else begins.flip(1)
    terms = transitions.cumprod(1) * reads
    if begins is not None:
        is_cut = begins.cumsum(1) > 0
        terms = terms.masked_fill(is_cut.reshape(*is_cut.shape, *(1,) * (terms.dim() - 2)), 0)
    return terms.sum(1)
