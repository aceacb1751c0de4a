"""Reference of the decoding step of xLSTM's matrix memory."""

from __future__ import annotations

import torch
from torch import Tensor

from .mlstm import States, advance

__all__ = ["mlstm_step"]


def mlstm_step(
    C: Tensor,
    n: Tensor,
    m: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    scale: float | None = None,
    eps: float = 1e-6,
    input_gate: str = "exp",
    normalize: bool = True,
    state_batch_indices: Tensor | None = None,
) -> tuple[Tensor, States]:
    """A decoding step of xLSTM's matrix memory. Arguments as :func:`ssm_kernels.mlstm_step`, but nothing is modified in place.

    Returns:
        ``(out, (new_C, new_n, new_m))``. With ``state_batch_indices`` the new states are whole caches; rows with a negative
        index are padding: their output is zero and they touch no state.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> C, n, m = torch.zeros(2, 4, 6, 8), torch.zeros(2, 4, 8), torch.full((2, 4), -torch.inf)
        >>> (q, k), v, (i, f) = torch.randn(2, 2, 4, 8), torch.randn(2, 4, 6), torch.randn(2, 2, 4)
        >>> out, (new_C, new_n, new_m) = reference.mlstm_step(C, n, m, q, k, v, i, f)
        >>> out.shape, new_C.shape
        (torch.Size([2, 4, 6]), torch.Size([2, 4, 6, 8]))
    """
    batch, _, key_dim = q.shape
    rows = torch.arange(batch, device=q.device) if state_batch_indices is None else state_batch_indices.long()
    is_padding, slots = rows < 0, rows.clamp(min=0)
    q = q * (key_dim**-0.5 if scale is None else scale)
    of_rows = (C[slots], n[slots], m[slots])
    out, new_states = advance(of_rows, (q, k, v, i, f), eps, input_gate, normalize)
    out = torch.where(is_padding[:, None, None], torch.zeros_like(out), out)
    caches = []
    for cache, new in zip((C, n, m), new_states, strict=True):
        copy = cache.clone()
        copy[rows[~is_padding]] = new[~is_padding].to(cache.dtype)
        caches.append(copy)
    return out, (caches[0], caches[1], caches[2])
