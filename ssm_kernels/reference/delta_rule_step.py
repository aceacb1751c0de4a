"""Reference of the delta rule's decoding step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["delta_rule_step"]


def delta_rule_step(
    states: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    g: Tensor | None = None,
    scale: float | None = None,
    state_batch_indices: Tensor | None = None,
    qk_l2norm: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate_lower_bound: float | None = None,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    num_householder: int = 1,
) -> tuple[Tensor, Tensor]:
    """Decoding steps of the delta rule. Arguments as :func:`ssm_kernels.delta_rule_step`, but nothing is modified in place.

    Returns:
        ``(out, new_states)``. With ``state_batch_indices``, of shape (batch,), ``new_states`` is the whole cache; rows with a
        negative index are padding: their output is zero and they touch no state.

    Examples:
        >>> import torch
        >>> from ssm_kernels import reference
        >>> states, q, k = torch.zeros(2, 4, 6, 8), torch.randn(2, 4, 8), torch.randn(2, 4, 8)
        >>> v, beta = torch.randn(2, 4, 6), torch.rand(2, 4)
        >>> out, new_states = reference.delta_rule_step(states, q, k, v, beta, qk_l2norm=True)
        >>> out.shape, new_states.shape
        (torch.Size([2, 4, 6]), torch.Size([2, 4, 6, 8]))
    """
    has_tokens = q.dim() == 4
    if not has_tokens:
        q, g = q[:, None], None if g is None else g[:, None]
        k, v, beta = (x if num_householder > 1 else x[:, None] for x in (k, v, beta))
    batch, tokens, heads, key_dim = q.shape
    if qk_l2norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // heads, dim=2) for x in (q, k))
    q = q * (key_dim**-0.5 if scale is None else scale)
    if beta_sigmoid:
        beta = torch.sigmoid(beta)
    if allow_neg_eigval:
        beta = 2 * beta
    if g is not None:
        g = _log_decays(g, A_log, dt_bias, gate_lower_bound)
        g = g[..., None, :] if g.dim() == 4 else g[..., None, None]

    rows = torch.arange(batch, device=q.device) if state_batch_indices is None else state_batch_indices.long()
    padding = rows < 0
    S, out = states[rows.clamp(min=0)], []
    for t in range(tokens):
        if g is not None:
            S = S * torch.exp(g[:, t])
        for i in range(t * num_householder, (t + 1) * num_householder):
            correction = beta[:, i, :, None] * (v[:, i] - (S * k[:, i, :, None]).sum(-1))
            S = S + correction[..., None] * k[:, i, :, None]
        out.append((S * q[:, t, :, None]).sum(-1))
    result = torch.stack(out, dim=1) if out else v.new_zeros(batch, 0, *v.shape[2:])
    result = torch.where(padding[:, None, None, None], torch.zeros_like(result), result)
    new_states = states.clone()
    new_states[rows[~padding]] = S[~padding].to(states.dtype)
    return (result if has_tokens else result[:, 0]), new_states


def _log_decays(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, gate_lower_bound: float | None) -> Tensor:
    """Log decays from gates, raw ones if ``A_log`` or ``gate_lower_bound`` is given."""
    if A_log is None and gate_lower_bound is None:
        return g
    if dt_bias is not None:
        g = g + dt_bias
    rate = torch.ones((), dtype=g.dtype, device=g.device) if A_log is None else torch.exp(A_log)
    rate = rate[:, None] if rate.dim() == 1 and g.dim() == 4 else rate
    return -rate * F.softplus(g) if gate_lower_bound is None else gate_lower_bound * torch.sigmoid(rate * g)
