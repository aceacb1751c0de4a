"""The delta rules of flash-linear-attention (0.6): names, positions and defaults of arguments are its own, the operators ours.

Sequences are (batch, seqlen, heads, dim), states (sequences, value_heads, key_dim, value_dim) as FLA stores them. This
package stores states with key_dim last, so that a returned state is a transposed view, and a given one may have any strides.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._delta_rule import serve
from ._errors import peer_arguments

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
]

_peer = peer_arguments(
    initial_states="initial_state",
    return_final_states="output_final_state",
    qk_l2norm="use_qk_l2norm_in_kernel",
    gate_lower_bound="lower_bound",
    beta_sigmoid="use_beta_sigmoid_in_kernel",
)


@_peer
def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet: :func:`ssm_kernels.delta_rule_scan` without a gate.

    Args:
        q: (batch, seqlen, heads, key_dim); float32, float16, bfloat16 or float64, of which FLA refuses float32 and float64.
        k: as ``q``.
        v: (batch, seqlen, value_heads, value_dim); the heads of ``q`` divide value_heads, which FLA's function has equal.
        beta: (batch, seqlen, value_heads), any floating-point dtype.
        scale: of the output, key_dim :sup:`-1/2` by default.
        initial_state: (sequences, value_heads, key_dim, value_dim), any floating-point dtype.
        output_final_state: return the final state instead of None.
        use_qk_l2norm_in_kernel: divide each row of ``q`` and ``k`` by the root of its sum of squares plus 1e-6.
        cu_seqlens: (sequences + 1,), the ends of sequences that a batch of 1 packs; int32 or int64.
        cu_seqlens_cpu: without effect.
        kwargs: ``chunk_size``, without effect.

    If ``q``, ``k`` and ``v`` differ in dtype, they are widened to the widest. Autocast changes nothing.

    Returns:
        ``(o, final_state)``: (batch, seqlen, value_heads, value_dim), dtype of ``q``, and None or a view of shape (sequences,
        value_heads, key_dim, value_dim), float32 (float64 with float64 inputs). Both are differentiable with respect to every
        floating-point tensor.

    Raises:
        ValueError, RuntimeError, TypeError: as :func:`ssm_kernels.delta_rule_scan`.
        TypeError: another keyword.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.fla import chunk_delta_rule
        >>> q, k, v = torch.randn(3, 2, 100, 4, 16)
        >>> o, state = chunk_delta_rule(q, k, v, torch.rand(2, 100, 4), use_qk_l2norm_in_kernel=True)
        >>> o.shape, state
        (torch.Size([2, 100, 4, 16]), None)
    """
    common = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    return serve("chunk_delta_rule", q, k, v, beta, *common, kwargs)


@_peer
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet: :func:`ssm_kernels.delta_rule_scan` with one gate a value head. ``chunk_gdn`` is another name for it.

    Args:
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens: as for
            :func:`chunk_delta_rule`.
        g: log decays, (batch, seqlen, value_heads), natural and at most 0; with ``use_gate_in_kernel`` raw ones.
        use_beta_sigmoid_in_kernel: ``beta`` is raw; its sigmoid counts.
        allow_neg_eigval: twice that sigmoid.
        state_v_first: states are (sequences, value_heads, value_dim, key_dim).
        cu_seqlens_cpu, chunk_indices: without effect.
        cp_context: None: FLA's context parallelism is not supported.
        kwargs: ``use_gate_in_kernel``, with which ``A_log`` and ``dt_bias``, both (value_heads,), make the log decay
            ``-exp(A_log) softplus(g + dt_bias)``; ``transpose_state_layout``, the older name of ``state_v_first``;
            ``chunk_size``, without effect.

    Returns:
        as :func:`chunk_delta_rule`.

    Raises:
        ValueError, RuntimeError, TypeError: as :func:`chunk_delta_rule`.
        NotImplementedError: a ``cp_context``.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.fla import chunk_gated_delta_rule
        >>> q, k, v = torch.randn(3, 2, 100, 4, 16)
        >>> g, beta = -torch.rand(2, 100, 4), torch.rand(2, 100, 4)
        >>> o, state = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
        >>> state.shape
        torch.Size([2, 4, 16, 16])
    """
    common = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    return serve(
        "chunk_gated_delta_rule",
        q,
        k,
        v,
        beta,
        *common,
        kwargs,
        g=g,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cp_context=cp_context,
    )


@_peer
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention: :func:`ssm_kernels.delta_rule_scan` with one gate for each channel of the key.

    Args:
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, state_v_first, cu_seqlens, cp_context: as for :func:`chunk_gated_delta_rule`.
        g: log decays, (batch, seqlen, value_heads, key_dim), natural and at most 0, down to minus infinity; with
            ``use_gate_in_kernel`` raw ones.
        use_gate_in_kernel: ``A_log`` of value_heads elements and ``dt_bias`` of value_heads * key_dim make the log decay
            ``-exp(A_log) softplus(g + dt_bias)``.
        lower_bound: with ``use_gate_in_kernel``, a negative number: the log decay is ``lower_bound * sigmoid(exp(A_log) * (g +
            dt_bias))``. ``A_log`` may then be absent.
        safe_gate: needs ``lower_bound`` with ``use_gate_in_kernel``, as FLA's does; otherwise without effect, because gates
            need no bound.
        disable_recompute, cu_seqlens_cpu, max_num_seqs: without effect: backward always computes the chunks again.
        return_intermediate_states, use_graph: False.
        kwargs: ``A_log``, ``dt_bias``; ``transpose_state_layout`` and ``chunk_size`` as for :func:`chunk_gated_delta_rule`.

    Returns:
        as :func:`chunk_delta_rule`.

    Raises:
        ValueError, RuntimeError, TypeError: as :func:`chunk_delta_rule`.
        NotImplementedError: a ``cp_context``, ``return_intermediate_states`` (``states_at`` of
            :func:`ssm_kernels.delta_rule_scan` has them) or ``use_graph``.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.fla import chunk_kda
        >>> q, k, v, g = torch.randn(4, 2, 100, 4, 16)
        >>> o, state = chunk_kda(q, k, v, -g.abs(), torch.rand(2, 100, 4), use_qk_l2norm_in_kernel=True)
        >>> o.shape
        torch.Size([2, 100, 4, 16])
    """
    common = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    return serve(
        "chunk_kda",
        q,
        k,
        v,
        beta,
        *common,
        kwargs,
        g=g,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cp_context=cp_context,
        return_intermediate_states=return_intermediate_states,
        use_graph=use_graph,
    )


@_peer
def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """DeltaProduct: :func:`ssm_kernels.delta_rule_scan` with ``num_householder`` updates in a step.

    Args:
        q, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, cu_seqlens_cpu, cp_context: as for
            :func:`chunk_gated_delta_rule`; ``cu_seqlens`` counts steps of ``q``.
        k, v, beta: with ``num_householder`` entries for each step of ``q``, one after another.
        g: log decays, (batch, seqlen, value_heads), or None.
        num_householder: the number of updates in a step.

    Returns:
        as :func:`chunk_delta_rule`.

    Raises:
        ValueError, RuntimeError, TypeError, NotImplementedError: as :func:`chunk_gated_delta_rule`.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.fla import chunk_gated_delta_product
        >>> q, (k, v) = torch.randn(2, 100, 4, 16), torch.randn(2, 2, 200, 4, 16)
        >>> g, beta = -torch.rand(2, 100, 4), torch.rand(2, 200, 4)
        >>> o, state = chunk_gated_delta_product(q, k, v, g, beta, 2, use_qk_l2norm_in_kernel=True)
        >>> o.shape
        torch.Size([2, 100, 4, 16])
    """
    common = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    options = {"g": g, "num_householder": num_householder, "cp_context": cp_context}
    return serve("chunk_gated_delta_product", q, k, v, beta, *common, **options)


@_peer
def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet for short sequences: :func:`chunk_delta_rule`, and :func:`ssm_kernels.delta_rule_step` for up to 16 tokens a
    sequence without gradients.

    Args:
        q, k, v, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens: as for
            :func:`chunk_delta_rule`.
        beta: as there, or None for 1. One number a channel of the value, (batch, seqlen, value_heads, value_dim), is not
            supported.

    Returns:
        as :func:`chunk_delta_rule`. ``initial_state`` stays as it is.

    Raises:
        ValueError, RuntimeError, TypeError: as :func:`chunk_delta_rule`.
        NotImplementedError: a ``beta`` of channels.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.fla import fused_recurrent_delta_rule
        >>> q, k, v = torch.randn(3, 2, 1, 4, 16)
        >>> o, state = fused_recurrent_delta_rule(q, k, v, torch.rand(2, 1, 4), output_final_state=True)
        >>> o, state = fused_recurrent_delta_rule(q, k, v, torch.rand(2, 1, 4), initial_state=state, output_final_state=True)
        >>> state.shape
        torch.Size([2, 4, 16, 16])
    """
    common = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    return serve("fused_recurrent_delta_rule", q, k, v, beta, *common)


@_peer
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet for short sequences, as :func:`fused_recurrent_delta_rule`. ``beta`` is the seventh argument.
    ``fused_recurrent_gdn`` is another name for it.

    FLA's function has no backward; this one is differentiable.

    Args:
        q, k, v, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, state_v_first, cu_seqlens: as for :func:`chunk_gated_delta_rule`.
        g: log decays, (batch, seqlen, value_heads), or None; with ``use_gate_in_kernel`` raw ones.
        gk: log decays of the channels of the key, (batch, seqlen, value_heads, key_dim), or None; they add to ``g``.
        gv: None: decays of the channels of the value are not supported.
        beta: as for :func:`fused_recurrent_delta_rule`.
        use_gate_in_kernel, A_log, dt_bias: as for :func:`chunk_gated_delta_rule`; not with ``gk``.
        kwargs: ``transpose_state_layout``, the older name of ``state_v_first``.

    Returns:
        as :func:`fused_recurrent_delta_rule`.

    Raises:
        ValueError, RuntimeError, TypeError: as :func:`chunk_delta_rule`.
        NotImplementedError: ``gv``, a ``beta`` of channels, or ``gk`` with ``use_gate_in_kernel``.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.fla import fused_recurrent_gated_delta_rule
        >>> q, k, v = torch.randn(3, 2, 1, 4, 16)
        >>> g, beta = -torch.rand(2, 1, 4), torch.rand(2, 1, 4)
        >>> o, state = fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, output_final_state=True)
        >>> o.shape
        torch.Size([2, 1, 4, 16])
    """
    common = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    return serve(
        "fused_recurrent_gated_delta_rule",
        q,
        k,
        v,
        beta,
        *common,
        kwargs,
        g=g,
        gk=gk,
        gv=gv,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )


@_peer
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention for short sequences, as :func:`fused_recurrent_delta_rule`. ``A_log`` comes before ``scale``.

    The result of FLA's function has no gradient; that of this one has.

    Args:
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first, cu_seqlens: as for :func:`chunk_kda`.
        kwargs: ``transpose_state_layout``, the older name of ``state_v_first``.

    Returns:
        as :func:`fused_recurrent_delta_rule`.

    Raises:
        ValueError, RuntimeError, TypeError: as :func:`chunk_delta_rule`.
        NotImplementedError: a ``beta`` of channels.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.fla import fused_recurrent_kda
        >>> q, k, v, g = torch.randn(4, 2, 1, 4, 16)
        >>> o, state = fused_recurrent_kda(q, k, v, -g.abs(), torch.rand(2, 1, 4), output_final_state=True)
        >>> state.shape
        torch.Size([2, 4, 16, 16])
    """
    common = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    return serve(
        "fused_recurrent_kda",
        q,
        k,
        v,
        beta,
        *common,
        kwargs,
        g=g,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
    )


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
