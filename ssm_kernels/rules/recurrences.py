"""Rules of the gated linear recurrences: the scans, their steps and their summaries."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._dtypes import wide_dtype
from .._recurrences import Recurrence, recurrences
from ._batching import fold
from ._decomposition import bound, refuse_packed, scan
from ._table import Call, Composed, Decomposition, Row

__all__ = ["ROWS"]

AXES = {
    **dict.fromkeys(("inputs", "h", "0", "1", "2", "3"), "batch seqlen channels"),
    **dict.fromkeys(("h0", "last_state", "decay"), "batch channels"),
    "reset": "batch seqlen",
}
_CHANNELS = {
    **dict.fromkeys(("inputs", "h", "grad_h"), 2),
    **dict.fromkeys(("h0", "grad_last_state", "grad_decay"), 1),
}


def _flops(call: Call, *, per_element: int, backward: bool = False) -> int:
    """Flops of an operator with a list of inputs, or with a recurrence's own."""
    steps = call["inputs"][0] if "inputs" in call else next(iter(call.values()))
    return (1 + backward) * per_element * steps.numel()


def _linear_step(h: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    h = a * h + b
    return [h, h.clone()]  # the results of a step share no memory


def _decomposition(recurrence: Recurrence, is_step: bool) -> Decomposition:
    operator = getattr(torch.ops.ssm_kernels, recurrence.step if is_step else recurrence.scan).default
    first, names = recurrence.inputs[0], recurrence.inputs + recurrence.options

    def decomposition(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        given = bound(operator, arguments, options)
        dtype, shape, wide = given[first].dtype, given[first].shape, wide_dtype(given[first].dtype)
        inputs = {key: given[key].to(wide) if isinstance(given[key], Tensor) else given[key] for key in names}
        a, b = (factor.expand(shape) for factor in reference.RECURRENCES[recurrence.scan](**inputs))
        if is_step:
            h = b.clone() if given["state"] is None else a * given["state"].to(wide) + b
            return h.to(dtype), h.clone()
        refuse_packed(recurrence.scan, given["cu_seqlens"])
        h0 = torch.zeros_like(b[:, 0]) if given["h0"] is None else given["h0"].to(wide)
        if given["reset"] is not None:
            reset = given["reset"].unsqueeze(-1)
            a, b = torch.where(reset, 0, a), torch.where(reset, a * h0.unsqueeze(1) + b, b)
        steps = [(factor.flip(1) if given["reverse"] else factor).transpose(0, 1) for factor in (a, b)]
        h, last_state = scan(_linear_step, h0, steps, (), like=steps[1])
        h = h.transpose(0, 1)
        return (h.flip(1) if given["reverse"] else h).to(dtype), last_state

    return decomposition


def _shared_row(internal: str, per_element: int) -> Row:
    """The rules of the operator ``internal``, which the calls of every recurrence reach."""
    forward, backward = (internal, f"{internal}_fwd"), f"{internal}_bwd"
    flops = partial(_flops, per_element=per_element)
    return Row(
        batching={name: fold(name, _CHANNELS) for name in (internal, backward)},
        flops=dict.fromkeys(forward, flops) | {backward: partial(flops, backward=True)},
        axes=dict.fromkeys((*forward, backward), AXES),
    )


def _row(name: str, internal: Row, decomposition: Decomposition | None = None) -> Row:
    return internal._replace(
        batching={name: Composed(), **internal.batching},
        flops={name: next(iter(internal.flops.values())), **internal.flops},
        decompositions={} if decomposition is None else {name: decomposition},
    )


_RECURRENCE, _SUMMARY = _shared_row("_linear_recurrence", 2), _shared_row("_linear_recurrence_summary", 3)
ROWS: dict[str, Row] = {}
for _each in recurrences.values():
    for _name, _is_step in ((_each.scan, False), (_each.step, True)):
        ROWS[_name] = _row(_name, _RECURRENCE, _decomposition(_each, _is_step))
    ROWS[_each.summary] = _row(_each.summary, _SUMMARY)
