"""xLSTM's matrix memory, typed and documented. It calls ``torch.ops.ssm_kernels``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._arguments import names_arguments, three_tensors
from ._states_at import Positions, read_positions

__all__ = ["mlstm_scan"]

# Looked up once: the attributes of torch.ops take 0.3 microseconds a call.
_mlstm_scan = torch.ops.ssm_kernels.mlstm_scan.default


@names_arguments
def mlstm_scan(
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
    initial_states: tuple[Tensor, Tensor, Tensor] | None = None,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    states_at: Positions | None = None,
    reverse: bool = False,
) -> (
    Tensor
    | tuple[Tensor, tuple[Tensor, Tensor, Tensor]]
    | tuple[Tensor, tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
):
    r"""xLSTM's matrix memory (mLSTM, Beck et al., arXiv 2405.04517), in chunks, as matrix products.

    Per head, with the forget gate :math:`\sigma(f_t)` and the input gate :math:`e^{i_t}`:

    .. math::
        C_t &= \sigma(f_t)\, C_{t-1} + e^{i_t} v_t k_t^\top, \qquad n_t = \sigma(f_t)\, n_{t-1} + e^{i_t} k_t \\
        \mathrm{out}_t &= \frac{\mathrm{scale} \cdot C_t q_t}{\max(\lvert \mathrm{scale} \cdot n_t^\top q_t \rvert, 1)}

    The operator never computes :math:`e^{i_t}`, which overflows. States are in units of :math:`e^{m_t}` with
    :math:`m_t = \max(\log \sigma(f_t) + m_{t-1}, i_t)`, in which the gates are at most 1 and the 1 of the divisor is
    :math:`e^{-m_t}`.

    Args:
        q: queries, (batch, seqlen, heads, key_dim); float32, float16, bfloat16 or float64. key_dim is at most 256. All tensors
            may have any strides.
        k: keys, shape and dtype of ``q``.
        v: values, (batch, seqlen, heads, value_dim), dtype of ``q``.
        i: input gates before their activation, (batch, seqlen, heads), dtype of ``q`` or float32 (float64 with float64 inputs);
            down to minus infinity, which shuts the gate.
        f: forget gates before their sigmoid, likewise. Minus infinity drops the state before the step.
        scale: of ``q``; by default key_dim :sup:`-1/2`.
        eps: added to the divisor, in units of :math:`e^{m_t}`.
        input_gate: ``"exp"``, or ``"sigmoid"`` for :math:`\sigma(i_t)` in place of :math:`e^{i_t}`; then :math:`m_t = 0`.
        normalize: divide. ``False``, only with ``input_gate="sigmoid"``, returns :math:`\mathrm{scale} \cdot C_t q_t`; then
            ``n`` is not computed, and the final one is the initial one, or zero.
        initial_states: the states ``(C, n, m)`` before the first step: (batch, heads, value_dim, key_dim),
            (batch, heads, key_dim) and (batch, heads), float32 (float64 with float64 inputs). ``m`` is the logarithm of the
            unit of ``C`` and ``n``; minus infinity is an empty memory, as without ``initial_states``.
        return_final_states: also return the states after the last step.
        cu_seqlens: (sequences + 1,), int32 or int64. The batch, then of size 1, holds sequences one after another, and sequence
            ``s`` is steps ``cu_seqlens[s]`` to ``cu_seqlens[s + 1] - 1``. It starts at 0, ends at seqlen and does not decrease;
            a sequence may have no steps. States then have a row for each sequence.
        seq_idx: (batch, seqlen), int32 or int64, the number of the sequence that a step belongs to. Where it changes from one
            step to the next, the memory starts again empty. ``initial_states`` belong to the first sequence of a row, the
            states after the last step to its last; together with ``cu_seqlens``, to the first and the last part of each of its
            sequences.
        states_at: also return the states at these positions: ints, or a tensor of one axis, int32 or int64, on the CPU. The
            states at ``p``, from 0 to seqlen, are those after the first ``p`` steps, before ``seq_idx`` or ``cu_seqlens`` begin
            a sequence at step ``p``. With ``cu_seqlens`` the states at 0 are the initial ones of the sequence of step 0, or an
            empty memory if seqlen is 0. Positions may repeat and need no order. Not with ``reverse``.
        reverse: time runs backwards, from the last step to the first, also in each packed sequence.

    Returns:
        ``out``, (batch, seqlen, heads, value_dim), dtype of ``q``; with ``return_final_states`` then ``(C, n, m)``, shaped and
        typed as ``initial_states``. A sequence without steps returns its initial states. With ``states_at`` then the states at
        the positions, ``(C, n, m)`` likewise with an axis of positions after the first. All are differentiable with respect to
        every floating-point tensor argument, where the unit counts as a constant: the gradient of an initial ``m`` is zero, and
        that of other units is not read. What the states stand for does not depend on the unit, and ``out`` only through
        ``eps``. Double backward and ``torch.func`` transforms other than ``vmap`` are not supported and raise.

    The products are those of :func:`ssd_chunk_scan`, with its kernels, rounding and limits; bfloat16 calls with ``key_dim`` 256
    and a ``value_dim`` that is a multiple of 256 have kernels of their own on compute capability 9.0. Sums and states are
    float32 (float64 with float64 inputs). Autograd saves the inputs, and the divisor of each step and head in float32. Autocast
    casts ``q``, ``k`` and ``v`` to its dtype, states to float32. ``docs/mlstm.md`` describes the computation.

    Raises:
        ValueError: a shape, a position, the values of ``cu_seqlens`` or an option are not as above, ``initial_states`` is not
            three tensors, or ``states_at`` is given with ``reverse``.
        RuntimeError: a dtype, layout or device is not supported.
        TypeError: an argument is not a tensor where one is expected, a required tensor is None, or ``states_at`` has other
            elements than ints.

    Examples:
        >>> import torch
        >>> from ssm_kernels import mlstm_scan
        >>> batch, seqlen, heads, key_dim, value_dim = 2, 100, 4, 16, 32
        >>> q, k = torch.randn(2, batch, seqlen, heads, key_dim)
        >>> v, (i, f) = torch.randn(batch, seqlen, heads, value_dim), torch.randn(2, batch, seqlen, heads)
        >>> out, states = mlstm_scan(q, k, v, i, f, return_final_states=True)
        >>> out.shape, [state.shape for state in states]
        (torch.Size([2, 100, 4, 32]), [torch.Size([2, 4, 32, 16]), torch.Size([2, 4, 16]), torch.Size([2, 4])])
        >>> more = mlstm_scan(q, k, v, i, f, initial_states=states)  # continues
    """
    C, n, m = (None, None, None) if initial_states is None else three_tensors(initial_states)
    if states_at is not None:
        positions = read_positions("mlstm_scan", states_at)
        arguments = (q, k, v, i, f, scale, eps, input_gate, normalize, C, n, m, cu_seqlens, seq_idx, reverse)
        out, *states = torch.ops.ssm_kernels._mlstm_scan_states_at(*arguments, positions)
        of_positions: Any = tuple(states[3:])
        return (out, (states[0], states[1], states[2]), of_positions) if return_final_states else (out, of_positions)
    # The dispatcher takes half a microsecond for each keyword: those that few calls give are left out.
    options: dict[str, Any] = {}
    if not (seq_idx is cu_seqlens is None and reverse is False):
        options = {"cu_seqlens": cu_seqlens, "seq_idx": seq_idx, "reverse": reverse}
    out, *final_states = _mlstm_scan(
        q,
        k,
        v,
        i,
        f,
        scale=scale,
        eps=eps,
        input_gate=input_gate,
        normalize=normalize,
        initial_C=C,
        initial_n=n,
        initial_m=m,
        **options,
    )
    return (out, (final_states[0], final_states[1], final_states[2])) if return_final_states else out
