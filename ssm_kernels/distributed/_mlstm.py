r"""xLSTM's matrix memory over a sequence whose spans are on several ranks, as an autograd node.

The memory of a head is C and n in units of :math:`e^m`. A span multiplies it by the product of its forget gates,
:math:`e^F`, and adds its own:

.. math::
    m_{r+1} = \max(m_r + F_r, m_r^s), \qquad
    (C, n)_{r+1} = e^{m_r + F_r - m_{r+1}} (C, n)_r + e^{m_r^s - m_{r+1}} (C, n)_r^s

with :math:`(C, n, m)^s` of a span that begins empty. Ranks exchange one tensor, (rows, heads, value_dim + 2, key_dim): C, n,
and m in each element of the last row. A row is a sequence of the batch, or one of all packed sequences; those without steps on
a rank keep their memory there. The unit is a constant for gradients, and that of a rank's own scan differs from the fold's by
the rounding of the sum F. ``_scans.py`` describes forward and backward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dtypes import wide_dtype
from ._carry import Carry, SummaryCarry
from ._collectives import depend_on
from ._group import Group
from ._messages import Call
from ._scans import of_first, results_of, zeros

__all__ = ["MlstmScan"]

_ops = torch.ops.ssm_kernels


def _pack(C: Tensor, n: Tensor, m: Tensor) -> Tensor:
    return torch.cat([C, n[:, :, None], m[:, :, None, None].expand(*m.shape, 1, C.shape[3])], dim=2)


def _unpack(state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    C, n, m = state.split([state.shape[2] - 2, 1, 1], dim=2)
    return C.contiguous(), n.squeeze(2).contiguous(), m[:, :, 0, 0].contiguous()


def _weight(unit: Tensor, new_unit: Tensor) -> Tensor:
    """``e^(unit - new_unit)``, zero where ``unit`` is that of an empty memory."""
    return torch.where(torch.isneginf(unit), torch.zeros_like(unit), (unit - new_unit).exp())


class MemoryCarry(SummaryCarry):
    """Gathers memories of spans and the logarithms of their forget gates' products, float64. The fold is in float64.

    ``is_exponential``: the input gate. With the other, the unit of a memory with steps is 1.
    """

    def __init__(self, group: Group, what: str, reverse: bool, is_exponential: bool) -> None:
        super().__init__(group, what, reverse)
        self._is_exponential = is_exponential

    def _unit(self, moved: Tensor, own: Tensor, dtype: torch.dtype) -> Tensor:
        """The unit after a span whose own is ``own``, as it is stored, for a memory before it that has become ``moved``."""
        unit = torch.maximum(moved, own) if self._is_exponential else torch.where(torch.isneginf(own), moved, own)
        return unit.to(dtype).double()

    def _continue(self, last_state: Tensor, decay: Tensor, initial_state: Tensor) -> Tensor:
        before, own = initial_state.double(), last_state.double()
        moved, own_unit = before[:, :, -1, 0] + decay, own[:, :, -1, 0]
        unit = self._unit(moved, own_unit, last_state.dtype)
        weights = (_weight(each, unit)[:, :, None, None] for each in (moved, own_unit))
        of_before, of_own = (weight * state[:, :, :-1] for weight, state in zip(weights, (before, own), strict=True))
        last_row = unit[:, :, None, None].expand(*unit.shape, 1, own.shape[3])
        return torch.cat([of_before + of_own, last_row], dim=2).to(last_state.dtype)

    def _fold(
        self, values: Tensor, decays: Tensor, keep_mask: Tensor | None, first: Tensor | None, *, is_adjoint: bool
    ) -> Tensor | None:
        if is_adjoint:
            return super()._fold(values, decays, keep_mask, first, is_adjoint=True)
        state = first
        for rank in self._in_order(values.shape[0]):
            state = values[rank] if state is None else self._continue(values[rank], decays[rank], state)
        return state

    def _in_order(self, ranks: int) -> range:
        return range(ranks - 1, -1, -1) if self._reverse else range(ranks)

    def _empty(self, like: Tensor) -> Tensor:
        C, n, m = _unpack(torch.zeros_like(like))
        return _pack(C, n, m - torch.inf)

    def _adjoint_decays(self, states: Tensor, decays: Tensor) -> Tensor:
        units = states[:, :, :, -1, 0].double()
        first, *others = self._in_order(units.shape[0])
        unit, factors = units[first], {first: torch.zeros_like(units[first])}  # no rank reads that of the first
        for rank in others:
            moved = unit + decays[rank]
            unit = self._unit(moved, units[rank], states.dtype)
            factors[rank] = _weight(moved, unit)
        return torch.stack([factors[rank] for rank in range(units.shape[0])]).to(states.dtype)


class MlstmScan(torch.autograd.Function):
    """``out`` and, with ``needs_final``, the packed memory after the last rank's span.

    The first arguments have the order of the gradients of ``_mlstm_scan_bwd``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        i: Tensor,
        f: Tensor,
        C: Tensor | None,
        n: Tensor | None,
        m: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float | None,
        eps: float,
        input_gate: str,
        normalize: bool,
        reverse: bool,
        needs_final: bool,
        chain: Call | None,
        group: Group,
    ) -> Any:
        make = functools.partial(MemoryCarry, is_exponential=input_gate == "exp")
        carry = Carry.of(group, "mlstm_scan", reverse, chain, make)
        options = (scale, eps, input_gate, normalize)

        def summarize() -> tuple[Tensor, Tensor]:
            _, *last, _ = _ops._mlstm_scan_fwd(q, k, v, i, f, *options, None, None, None, cu_seqlens, None, reverse)
            log_gates = F.logsigmoid(f.double())
            # Sums in a fixed order, of each packed sequence.
            sums = ([torch.ones_like(log_gates), log_gates], None, cu_seqlens, None, "linear_scan", "none", True, reverse)
            return _pack(*last), _ops._linear_recurrence_fwd(*sums)[1]

        rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = (rows, q.shape[2], v.shape[3] + 2, q.shape[3]), wide_dtype(q.dtype)
        first = None if C is None or n is None or m is None else _pack(C, n, m)
        initial, final, decays, _ = carry.receive_state(state, q, first, None, summarize, needs_final)
        states = (None, None, None) if initial is None else _unpack(initial)
        out, *last, divisor = _ops._mlstm_scan_fwd(q, k, v, i, f, *options, *states, cu_seqlens, None, reverse)
        carry.send_state(_pack(*last))
        ctx.save_for_backward(q, k, v, i, f, *states, cu_seqlens, divisor, decays)
        ctx.carry, ctx.options, ctx.reverse, ctx.state = carry, options, reverse, state
        return (out, final) if needs_final else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor | None = None) -> Any:
        q, k, v, i, f, C, n, m, cu_seqlens, divisor, decays = ctx.saved_tensors
        inputs = (divisor, q, k, v, i, f, *ctx.options, C, n, m, cu_seqlens, None, ctx.reverse)
        needs = [*ctx.needs_input_grad[:8]]
        needs_initial = needs[5] or needs[6]

        def packed(gradients: Any) -> Tensor:
            of_C, of_n = gradients[5], gradients[6]
            return _pack(of_C, of_n, of_n.new_zeros(of_n.shape[:2]))

        def initial_gradient() -> Tensor:
            if ctx.carry.is_first:
                return depend_on(zeros(ctx.state, grad_out), grad_out)
            wanted = [place in (5, 6) for place in range(8)]
            return packed(_ops._mlstm_scan_bwd(grad_out, None, None, *inputs, wanted))

        of_last: tuple[Tensor | None, Tensor | None] = None, None
        passes_gradients = any(needs[1:7])
        if passes_gradients:
            last = ctx.carry.receive_gradient(ctx.state, grad_out, grad_final, decays, None, initial_gradient)
            of_last = of_last if last is None else _unpack(last)[:2]
        wants = passes_gradients and ctx.carry.wants_gradient(needs_initial)
        wanted = [*needs[:5], wants, wants, False]
        results = _ops._mlstm_scan_bwd(grad_out, *of_last, *inputs, wanted)
        if passes_gradients:
            ctx.carry.send_gradient(packed(results) if wants else None, None)
        gradients = results_of(results, wanted)
        (rows, heads, _, key_dim), dtype = ctx.state
        shapes: Any = {5: (rows, heads, v.shape[3], key_dim), 6: (rows, heads, key_dim)}
        for place, shape in shapes.items():
            gradients[place] = of_first(gradients[place], (shape, dtype), q, needs[place], ctx.carry)
        gradients[7] = zeros(((rows, heads), dtype), q) if needs[7] else None
        return (*gradients, *(None,) * 9)
