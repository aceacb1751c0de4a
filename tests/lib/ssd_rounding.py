"""Models of ssd_chunk_scan's CUDA kernels for fp16 and bf16: PyTorch in their dtypes, with operands rounded as theirs are."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from helpers import parameter_dtype
from torch import Tensor

from ssm_kernels import reference


def scan_in_16_bit_products(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    discretization: str,
    reverse: bool,
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """PyTorch in that dtype: the scan in chunks, as products with fp16 or bf16 operands and float32 sums.

    So are the products of its gradients, among whose operands is the gradient of what the gate multiplies. Everything between
    them is float32; of float64 inputs all of it is float64.
    """
    dtype, accumulate = x.dtype, parameter_dtype(x.dtype)
    batch, seqlen, heads, headdim = x.shape
    if reverse:
        steps = (x, dt, B, C, z, seq_idx, log_decay, gain)
        x, dt, B, C, z, seq_idx, log_decay, gain = (v if v is None else v.flip(1) for v in steps)
        if cu_seqlens is not None:
            cu_seqlens = seqlen - cu_seqlens.flip(0)
            initial_states = None if initial_states is None else initial_states.flip(0)
    # At once: a gradient that comes from several chunks is then rounded when their sum is complete.
    x, B, C = (tensor.to(accumulate) for tensor in (x, B, C))
    zeta, gain = _coefficients(accumulate, dt, A, dt_bias, dt_softplus, dt_limit, discretization, log_decay, gain)
    if initial_states is None:
        sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
        initial_states = x.new_zeros(sequences, heads, headdim, B.shape[3])
    states, outputs = list(initial_states.unbind()), [x.new_zeros(0, heads, headdim)]
    for row, begin, end, i, resets in _sequences(batch, seqlen, seq_idx, cu_seqlens):
        if resets:
            states[i] = torch.zeros_like(states[i])
        for first in range(begin, end, chunk):
            steps = row, slice(first, min(first + chunk, end))
            out, states[i] = _chunk_in_16_bit_products(x[steps], zeta[steps], gain[steps], B[steps], C[steps], states[i], dtype)
            outputs.append(out)
    out = torch.cat(outputs).view(x.shape)
    if D is not None:
        out = out + (D if D.dim() == 2 else D[:, None]) * x
    if z is not None:
        out = _RoundedGradient.apply(out, dtype) * F.silu(z.to(accumulate))
    final_states = torch.stack(states) if states else initial_states
    if reverse:
        out, final_states = out.flip(1), final_states if cu_seqlens is None else final_states.flip(0)
    return out, final_states


def states_in_split_products(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    B: Tensor,
    *,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    seq_idx: Tensor | None,
    discretization: str,
    reverse: bool = False,
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
    chunk: int = 64,
) -> Tensor:
    """The states after all steps, begun with zero, (batch, heads, headdim, dstate).

    With ``reverse``, the gradient of the states before them; ``x`` is then the gradient of the outputs, and ``B`` is C.

    The kernels split the scaled ``x`` into two operands, hi and lo, so that only the rounding of lo is lost. Tensor cores sum
    the products of 16 steps and the state, and truncate the sum to float32. The sums of a chunk's logarithms are float32.
    """
    dtype, accumulate = x.dtype, parameter_dtype(x.dtype)
    batch, seqlen, heads, headdim = x.shape
    x, B = (tensor.to(accumulate) for tensor in (x, B))
    zeta, gain = _coefficients(accumulate, dt, A, dt_bias, dt_softplus, dt_limit, discretization, log_decay, gain)
    B = B.repeat_interleave(heads // B.shape[2], dim=2)
    states = x.new_zeros(batch, heads, headdim, B.shape[3])
    for row, begin, end, _, resets in _sequences(batch, seqlen, seq_idx, None):
        if resets and reverse:
            continue
        state = torch.zeros_like(states[row])
        chunks = range(begin, end, chunk)
        for first in reversed(chunks) if reverse else chunks:
            steps = row, slice(first, min(first + chunk, end))
            sums = (zeta[steps] / math.log(2)).cumsum(0)
            weights = sums.exp2() if reverse else (sums[-1] - sums).exp2() * gain[steps]
            scaled = weights[..., None] * x[steps]
            hi = scaled.to(dtype).to(accumulate)
            lo = (scaled - hi).to(dtype).to(accumulate)
            state = state * sums[-1].exp2()[:, None, None]
            for operand in (hi, lo):
                for a, b in zip(operand.double().split(16), B[steps].double().split(16), strict=True):
                    state = _truncated(state + torch.einsum("jhp,jhn->hpn", a, b), accumulate)
        states[row] = state
    return states


def _truncated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds float64 numbers towards zero."""
    nearest = values.to(dtype)
    return torch.where(nearest.abs() > values.abs(), nearest.nextafter(torch.zeros_like(nearest)), nearest)


def _coefficients(
    accumulate: torch.dtype,
    dt: Tensor | None,
    A: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    discretization: str,
    log_decay: Tensor | None,
    gain: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The logarithm of the decay, and the gain, of each step."""
    if dt is None:
        zeta = log_decay.to(accumulate).clamp(min=-800)
        return zeta, torch.ones_like(zeta) if gain is None else gain.to(accumulate)
    dt = dt.to(accumulate)
    d = dt if dt_bias is None else dt + dt_bias
    d = (F.softplus(d) if dt_softplus else d).clamp(*dt_limit)
    gain = reference.coefficients(discretization, d, A)[1]
    return (d * A).clamp(min=-800), gain  # infinite sums would have NaN differences


def _sequences(
    batch: int, seqlen: int, seq_idx: Tensor | None, cu_seqlens: Tensor | None
) -> Iterator[tuple[int, int, int, int, bool]]:
    """Row of the batch, first step, end and number of the state of every run of steps, and whether seq_idx resets that state
    before the run."""
    if cu_seqlens is None:
        sequences = [(row, 0, seqlen) for row in range(batch)]
    else:
        sequences = [(0, begin, end) for begin, end in itertools.pairwise(cu_seqlens.tolist())]
    for state, (row, first, last) in enumerate(sequences):
        begins = [] if seq_idx is None else (seq_idx[row, first:last].diff().nonzero()[:, 0] + first + 1).tolist()
        for begin, end in itertools.pairwise([first, *begins, last]):
            yield row, begin, end, state, begin > first


def _chunk_in_16_bit_products(
    x: Tensor, zeta: Tensor, gain: Tensor, B: Tensor, C: Tensor, state: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    def product(equation: str, a: Tensor, b: Tensor) -> Tensor:
        return _RoundedProduct.apply(equation, dtype, a, b)

    def of_heads(of_groups: Tensor, axis: int) -> Tensor:
        return of_groups.repeat_interleave(x.shape[1] // B.shape[1], dim=axis)

    sums = zeta.double().cumsum(0)
    causal = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).tril()[:, :, None]
    decay = (sums[:, None] - sums).masked_fill(~causal, -math.inf).exp().to(x.dtype)
    from_start, to_end, whole = (exponent.exp().to(x.dtype) for exponent in (sums, sums[-1] - sums, sums[-1]))
    M = of_heads(product("ign,jgn->ijg", C, B), 2) * decay * gain
    of_state = product("hpn,ihn->ihp", state, of_heads(C, 1))
    out = product("ijh,jhp->ihp", M, x) + from_start[..., None] * of_state
    weighed = (to_end * gain)[..., None] * x
    return out, state * whole[:, None, None] + product("jhp,jhn->hpn", weighed, of_heads(B, 1))


class _RoundedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype).to(grad.dtype), None


class _RoundedProduct(torch.autograd.Function):
    """An einsum that rounds its operands to a dtype; its gradients round theirs too, the incoming gradient included."""

    @staticmethod
    def forward(ctx: Any, equation: str, dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
        a, b = (operand.to(dtype).to(operand.dtype) for operand in (a, b))
        ctx.save_for_backward(a, b)
        ctx.equation, ctx.dtype = equation, dtype
        return torch.einsum(equation, a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, Tensor]:
        a, b = ctx.saved_tensors
        of_a, of_b, of_result = re.split(",|->", ctx.equation)
        grad = grad.to(ctx.dtype).to(grad.dtype)
        grad_a = torch.einsum(f"{of_result},{of_b}->{of_a}", grad, b)
        return None, None, grad_a, torch.einsum(f"{of_a},{of_result}->{of_b}", a, grad)
