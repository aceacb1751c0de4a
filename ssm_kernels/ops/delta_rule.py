"""The delta rule, typed and documented. It calls ``torch.ops.ssm_kernels``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._arguments import names_arguments
from ._states_at import Positions, read_positions

__all__ = ["delta_rule_scan"]

# Looked up once: the attributes of torch.ops take 0.3 microseconds a call.
_delta_rule_scan = torch.ops.ssm_kernels.delta_rule_scan.default


@names_arguments
def delta_rule_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    states_at: Positions | None = None,
    reverse: bool = False,
    num_householder: int = 1,
    qk_l2norm: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate_lower_bound: float | None = None,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    r"""The recurrence of DeltaNet, Gated DeltaNet, Kimi Delta Attention and DeltaProduct, in chunks, as matrix products.

    The state of a head maps keys to values. A step decays it, moves the value that it has for :math:`k_t` towards :math:`v_t`
    by the fraction :math:`\beta_t`, and reads it:

    .. math::
        S_t &= S_{t-1}\, \mathrm{Diag}(e^{g_t}), \quad
        S_t \leftarrow S_t + \beta_t (v_t - S_t k_t)\, k_t^\top \\
        \mathrm{out}_t &= \mathrm{scale} \cdot S_t q_t

    Without ``g`` nothing decays (DeltaNet, arXiv 2406.06484). ``g`` has one number a head (Gated DeltaNet, arXiv 2412.06464) or
    one for each channel of the key (KDA, arXiv 2510.26692). With ``num_householder`` :math:`n`, a step decays the state once
    and then updates it :math:`n` times (DeltaProduct, arXiv 2502.10297).

    Args:
        q: queries, (batch, seqlen, heads, key_dim); float32, float16, bfloat16 or float64. All tensors may have any strides.
        k: keys, (batch, n * seqlen, heads, key_dim), dtype of ``q``. The recurrence grows without bound where
            :math:`\beta_t \lVert k_t \rVert^2 > 2` and nothing decays: normalize keys, or pass ``qk_l2norm``.
        v: values, (batch, n * seqlen, value_heads, value_dim), dtype of ``q``. The heads of ``q`` divide those of ``v``: value
            head ``h`` reads head ``h // (value_heads // heads)``.
        beta: (batch, n * seqlen, value_heads), dtype of ``q`` or float32 (float64 with float64 inputs); from 0 to 2.
        g: log decays, natural and at most 0, down to minus infinity; (batch, seqlen, value_heads) or (batch, seqlen,
            value_heads, key_dim), dtype of ``q`` or float32. Positive ones let the state grow.
        scale: of the output; by default key_dim :sup:`-1/2`.
        initial_states: states before the first step, (batch, value_heads, value_dim, key_dim), float32 (float64 with float64
            inputs); zero if absent.
        return_final_states: also return the states after the last step.
        seq_idx: (batch, seqlen), int32 or int64, the number of the sequence that a step belongs to. Where it changes from one
            step to the next, the state starts again from zero. ``initial_states`` belongs to the first sequence of a row,
            ``final_states`` to the last; together with ``cu_seqlens``, to the first and the last part of each of its sequences.
        cu_seqlens: (sequences + 1,), int32 or int64. The batch, then of size 1, holds sequences one after another, and sequence
            ``i`` is steps ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1`` of ``q``. It starts at 0, ends at seqlen and does not
            decrease; a sequence may have no steps. States are then (sequences, value_heads, value_dim, key_dim).
        states_at: also return the states at these positions: ints, or a tensor of one axis, int32 or int64, on the CPU. The
            state at ``p``, from 0 to seqlen, is the one after the first ``p`` steps, before ``seq_idx`` or ``cu_seqlens`` begin
            a sequence at step ``p``. With ``cu_seqlens`` the state at 0 is the initial state of the sequence of step 0, or zero
            if seqlen is 0. Positions may repeat and need no order. Not with ``reverse``.
        reverse: time runs backwards, from the last step to the first, also in each packed sequence. The updates of a step keep
            their order.
        num_householder: the number :math:`n` of updates in a step.
        qk_l2norm: divide each row of ``q`` and ``k`` by the root of its sum of squares plus 1e-6.
        A_log: (value_heads,), float32 (float64 with float64 inputs). ``g`` is then raw, and the log decay is
            :math:`-e^{\mathrm{A\_log}}\, \mathrm{softplus}(g + \mathrm{dt\_bias})`.
        dt_bias: (value_heads,) or, for a ``g`` of channels, (value_heads, key_dim), dtype of ``A_log``. Only with a raw ``g``.
        gate_lower_bound: a negative number :math:`l`. ``g`` is then raw, and the log decay is
            :math:`l\, \sigma(e^{\mathrm{A\_log}} (g + \mathrm{dt\_bias}))`, without ``A_log`` :math:`l\, \sigma(g +
            \mathrm{dt\_bias})`.
        beta_sigmoid: ``beta`` is raw, and the fraction is its sigmoid.
        allow_neg_eigval: with ``beta_sigmoid``, twice the sigmoid, so that the transition has eigenvalues down to -1.

    Returns:
        ``out``, (batch, seqlen, value_heads, value_dim), dtype of ``q``; with ``return_final_states`` then ``final_states``,
        (batch, value_heads, value_dim, key_dim), float32 or float64; a sequence without steps returns its initial state. With
        ``states_at`` then ``states``, (batch, positions, value_heads, value_dim, key_dim). All are differentiable with respect
        to every floating-point tensor argument. Double backward and ``torch.func`` transforms other than ``vmap`` are not
        supported and raise.

    The CPU and CUDA have kernels; PyTorch's matmuls take the calls that these do not, such as float64 on CUDA. States, inverses
    and sums are float32 (float64 with float64 inputs); kernels of 16 bits round operands of their products. Autograd saves the
    inputs only. With ``cu_seqlens`` the host waits for its values. Autocast casts ``q``, ``k`` and ``v`` to its dtype,
    parameters and states to float32. ``docs/delta_rule.md`` names the kernel of each call, and describes the chunks, rounding
    and limits.

    Raises:
        ValueError: a shape, a position, the values of ``cu_seqlens`` or an option are not as above, ``states_at`` is given with
            ``reverse``, ``allow_neg_eigval`` without ``beta_sigmoid``, or a parameter of the gate without a raw ``g``.
        RuntimeError: a dtype, layout or device is not supported.
        TypeError: an argument is not a tensor where one is expected, a required tensor is None, or ``states_at`` has other
            elements than ints.

    Examples:
        >>> import torch
        >>> from ssm_kernels import delta_rule_scan
        >>> batch, seqlen, heads, key_dim, value_dim = 2, 100, 4, 16, 32
        >>> q, k = torch.randn(2, batch, seqlen, heads, key_dim)
        >>> v, beta = torch.randn(batch, seqlen, heads, value_dim), torch.rand(batch, seqlen, heads)
        >>> delta_rule_scan(q, k, v, beta, qk_l2norm=True).shape
        torch.Size([2, 100, 4, 32])
        >>> g = -torch.rand(batch, seqlen, heads)
        >>> out, states = delta_rule_scan(q, k, v, beta, g=g, qk_l2norm=True, return_final_states=True)
        >>> states.shape
        torch.Size([2, 4, 32, 16])
        >>> more = delta_rule_scan(q, k, v, beta, g=g, qk_l2norm=True, initial_states=states)  # continues
    """
    # The dispatcher takes half a microsecond for each keyword: those that few calls give are left out.
    options: dict[str, Any] = {}
    given = [value for value in (seq_idx, cu_seqlens, gate_lower_bound) if value is not None]
    if given or reverse is not False or num_householder != 1:
        options = {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens, "reverse": reverse, "num_householder": num_householder}
        options |= {"gate_lower_bound": gate_lower_bound}
    positions: list[int] = []
    if states_at is not None:
        if reverse:
            raise ValueError("delta_rule_scan: expected states_at without reverse, got both")
        positions = read_positions("delta_rule_scan", states_at)
        options |= {"states_at": sorted(set(positions))}
    out, final_states, states = _delta_rule_scan(
        q,
        k,
        v,
        beta,
        g=g,
        scale=scale,
        initial_states=initial_states,
        qk_l2norm=qk_l2norm,
        A_log=A_log,
        dt_bias=dt_bias,
        beta_sigmoid=beta_sigmoid,
        allow_neg_eigval=allow_neg_eigval,
        **options,
    )
    results: tuple[Tensor, ...] = (out, final_states) if return_final_states else (out,)
    if states_at is not None:
        ascending = options["states_at"]
        if ascending != positions:  # without an index on the device, which the capture of a CUDA graph refuses
            each = states.unbind(1)
            states = torch.stack([each[ascending.index(p)] for p in positions], 1)
        results = (*results, states)
    return results if len(results) > 1 else out
