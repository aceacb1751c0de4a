"""mlstm_scan in PyTorch with the roundings of its kernels on CUDA."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from helpers import parameter_dtype
from ssd_rounding import scan_in_16_bit_products
from torch import Tensor


def in_two_tf32_parts(values: Tensor) -> Tensor:
    """Rounds float32 numbers to 22 significant bits, which two TF32 numbers of 11 bits have."""
    return ((values.contiguous().view(torch.int32) + 2) & ~3).view(torch.float32)


def _gates(
    i: Tensor, f: Tensor, initial_m: Tensor | None, input_gate: str, cu_seqlens: Tensor | None, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The unit, a constant, the log decay and the gain of each step, (batch, seqlen, heads), and the final unit."""
    batch, seqlen, heads = i.shape
    bounds = [0, seqlen] if cu_seqlens is None else cu_seqlens.tolist()
    rows = batch if cu_seqlens is None else len(bounds) - 1
    m = i.new_full((rows, heads), -torch.inf) if initial_m is None else initial_m.detach()
    log_forget, units, before = F.logsigmoid(f), [], []
    is_reset = torch.zeros_like(f, dtype=torch.bool)
    final = list(m.unbind())
    for row in range(rows):
        sequence, begin, end = (row, 0, seqlen) if cu_seqlens is None else (0, *bounds[row : row + 2])
        for t in range(begin, end):
            if t > begin and seq_idx is not None:
                is_reset[sequence, t] = seq_idx[sequence, t] != seq_idx[sequence, t - 1]
                final[row] = final[row].masked_fill(is_reset[sequence, t], -torch.inf)
            before.append(final[row])
            carried = (log_forget[sequence, t] + final[row]).detach()
            final[row] = torch.zeros_like(carried) if input_gate == "sigmoid" else carried.maximum(i[sequence, t].detach())
            units.append(final[row])
    unit, previous = (torch.stack(x).view(i.shape) for x in (units, before))
    log_decay = log_forget + (previous - unit).masked_fill(is_reset, 0)  # the scan itself drops the state there
    gain = torch.sigmoid(i) if input_gate == "sigmoid" else (i - unit).exp()
    return unit, log_decay, gain, torch.stack(final)


def mlstm_scan_in_16_bit_products(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    scale: float | None,
    eps: float,
    input_gate: str,
    normalize: bool,
    initial_C: Tensor | None,
    initial_n: Tensor | None,
    initial_m: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    reverse: bool = False,
    return_final_states: bool = True,
    chunk: int = 64,
) -> tuple[Tensor, ...]:
    """Two chunked scans whose products have operands in the dtype of ``q``, and whose outputs are rounded to it before the
    division; everything else is float32, and of float64 inputs float64. Decays of zero are not supported."""
    is_packed = cu_seqlens is not None
    if reverse:
        q, k, v, i, f = (x.flip(1) for x in (q, k, v, i, f))
        seq_idx = None if seq_idx is None else seq_idx.flip(1)
        cu_seqlens = None if cu_seqlens is None else q.shape[1] - cu_seqlens.flip(0)
        if is_packed and initial_C is not None and initial_n is not None and initial_m is not None:
            initial_C, initial_n, initial_m = (x.flip(0) for x in (initial_C, initial_n, initial_m))

    def in_order(out: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        if not reverse:
            return out, *states
        return out.flip(1), *(x.flip(0) if is_packed else x for x in states)

    dtype, accumulate = q.dtype, parameter_dtype(q.dtype)
    i, f = i.to(accumulate), f.to(accumulate)
    unit, log_decay, gain, final_m = _gates(i, f, initial_m, input_gate, cu_seqlens, seq_idx)

    def scan(values: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        out, states = scan_in_16_bit_products(
            *(values, None, None, k, q),
            **dict.fromkeys(("D", "z", "dt_bias", "chunk_size")),
            seq_idx=seq_idx,
            dt_softplus=False,
            dt_limit=(0.0, torch.inf),
            initial_states=initial,
            cu_seqlens=cu_seqlens,
            discretization="zoh",
            reverse=False,
            log_decay=log_decay,
            gain=gain,
            chunk=chunk,
        )
        return out.to(dtype).to(accumulate), states

    scale = q.shape[3] ** -0.5 if scale is None else scale
    numerators, C = scan(v, initial_C)
    if not normalize:
        n = torch.zeros_like(C[:, :, 0]) if initial_n is None else initial_n
        return in_order((numerators * scale).to(dtype), C, n, final_m)
    products, n = scan(torch.ones_like(v[..., :1]), None if initial_n is None else initial_n.unsqueeze(2))
    divisor = torch.maximum((products * scale).abs(), (-unit).exp()[..., None]) + eps
    return in_order((numerators * scale / divisor).to(dtype), C, n.squeeze(2), final_m)
