"""The decoding step of the delta rules, typed and documented."""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import empty_output, names_arguments

__all__ = ["delta_rule_step"]


@names_arguments
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
    out: Tensor | None = None,
    dst_state_batch_indices: Tensor | None = None,
    pad_slot_id: int | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    disable_state_update: bool = False,
) -> Tensor:
    r"""One decoding step of a delta rule, or a few; ``states`` is updated in place.

    Per token and value head, with the state $S$ stored (value_dim, key_dim):

    .. math::
        S \leftarrow S\,\mathrm{diag}(e^{g}), \qquad S \leftarrow S + \beta\,(v - S k)\,k^T, \qquad o = \mathrm{scale}\; S q

    It is the step of DeltaNet (``g`` absent), Gated DeltaNet (one gate a head), Kimi Delta Attention (one gate a column) and
    DeltaProduct (``num_householder``). The result equals a scan of the same tokens that begins with ``states``. Each value
    head reads ``q`` and ``k`` of key head ``value_head // (value_heads / heads)``.

    Args:
        states: (batch, value_heads, value_dim, key_dim), modified in place; float32 (float64 with float64 inputs), or the dtype
            of ``q``, to which each update is rounded. Any strides: a cache of (key_dim, value_dim) states is passed as a
            transposed view. With ``state_batch_indices`` its first size is the number of cache slots instead.
        q: (batch, heads, key_dim), or (batch, tokens, heads, key_dim) for several tokens; float32, float16, bfloat16 or
            float64. key_dim is at most 512.
        k: shape and dtype of ``q``.
        v: (batch, value_heads, value_dim), or (batch, tokens, value_heads, value_dim); dtype of ``q``. The heads of ``q``
            divide value_heads.
        beta: the strength of a write, (batch, value_heads), or (batch, tokens, value_heads); dtype of ``q``, or float32
            (float64 with float64 inputs).
        g: the natural logarithm of the decay of a token: one number a head, shape of ``beta`` (without the factors of
            ``num_householder``), or one a column, with a last axis of key_dim; dtypes as for ``beta``. -inf clears.
            None: no decay.
        scale: of ``q``, finite; key_dim ** -0.5 if None.
        state_batch_indices: (batch,), int32 or int64: the slot of ``states`` that each row of the batch uses. A negative index
            is padding: the output is zero and no state is touched. Other indices must be distinct and below the number of
            slots; the CPU raises a ValueError otherwise. CUDA does not check, because the host would have to wait for the
            device: a row whose index is past the last slot returns NaN and touches no state. Rows that share a slot race:
            the contents of this slot and the outputs of these rows are undefined; other slots are not affected.
        qk_l2norm: divide each row of ``q`` and of ``k`` by sqrt(sum of its squares + 1e-6).
        A_log: (value_heads,); ``g`` is then raw, and the log decay is ``-exp(A_log) * softplus(g + dt_bias)``. Dtypes as for
            ``beta``.
        dt_bias: (value_heads,), or (value_heads, key_dim) if ``g`` has columns; needs ``A_log`` or ``gate_lower_bound``.
        gate_lower_bound: negative and finite; the log decay is ``gate_lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``
            instead. Without ``A_log`` the factor is 1.
        beta_sigmoid: ``beta`` is a logit, the strength its sigmoid.
        allow_neg_eigval: the strength is twice that, for eigenvalues 1 - beta of an update down to -1.
        num_householder: updates of each token, n. ``k``, ``v`` and ``beta`` then have n entries a token: (batch, n, ...) for
            one token, (batch, tokens * n, ...) for several. The state decays before the first and is read after the last.
        out: the tensor that the output is written to: shape (batch, [tokens,] value_heads, value_dim), dtype and device of
            ``q``, any strides. A new one if absent.
        dst_state_batch_indices: the slot that each row writes to, if it differs from the slot that it reads from; int32 or
            int64. (batch,): the state after the row's last token. (batch, tokens): the state after each token, to the slot in
            the token's column. A negative index is padding: that state is not written.
        pad_slot_id: a further index that is padding, for all tables of indices.
        num_accepted_tokens: (batch,), int32 or int64, with ``state_batch_indices`` of shape (batch, columns): how many tokens
            of the previous call speculative decoding has accepted. Row ``b`` reads the state in column
            ``num_accepted_tokens[b] - 1``, and column 0 if the number is 0.
        cu_seqlens: (sequences + 1,), int32 or int64: the tokens of all sequences are packed one after another. ``q`` is then
            (tokens, heads, key_dim), and so on; a row is a sequence. A sequence without tokens touches no state.
            Tokens after ``cu_seqlens[-1]`` are padding, for CUDA graphs, which keep one shape: they touch no state, and their
            output is zero, or in ``out``, if given, what it was.
        intermediate_states_buffer: (entries, tokens, value_heads, value_dim, key_dim), dtype of ``states``: receives the state
            after each token. Row ``b`` writes to entry ``b`` or, with ``intermediate_state_indices``, to entry
            ``intermediate_state_indices[b]``, unless that is padding. Other entries stay as they are.
        intermediate_state_indices: (batch,), int32 or int64.
        disable_state_update: do not write to ``states``, as when drafts are only verified.

    **Several tokens and slots** are those of :func:`selective_state_update`: the result of several tokens equals as many calls
    of one token; the kernel reads the state of a row once, and writes it once, after the last token, unless the table of slots
    to write to has two axes. A row whose slot to read from is padding has the output zero and writes nothing. No slot or entry
    that a row writes to may be read or written by another row: the CPU raises a ValueError, on CUDA the contents are undefined.
    On CUDA a row whose slot to read from is past the last one returns NaN and writes nothing, and a state whose slot or entry
    is past the last one is not written.

    With ``out`` or an argument after it the function calls ``torch.ops.ssm_kernels.delta_rule_step_out``, which raises if an
    argument requires a gradient.

    Returns:
        ``out``, (batch, [tokens,] value_heads, value_dim), dtype of ``q``; the argument if it is given. Not differentiable:
        backward through it raises. ``states`` requires a gradient after the call only if it did before; backward through it
        then raises, too.

    Raises:
        ValueError: a shape, an option or, on the CPU, a table of indices, ``num_accepted_tokens`` or ``cu_seqlens`` is not as
            above.
        RuntimeError: a dtype, layout or device is not supported, or the device has no kernel.
        RuntimeError: elements of ``states``, ``out`` or ``intermediate_states_buffer``, which are written to, share memory with
            each other or with another argument.
        NotImplementedError: an argument requires a gradient beside ``out`` or another of the arguments after it.
        TypeError: an argument is not a tensor where one is expected, or a required tensor is None.

    Examples:
        >>> import torch
        >>> from ssm_kernels import delta_rule_step
        >>> batch, heads, key_dim, value_dim = 2, 4, 16, 8
        >>> states = torch.zeros(batch, heads, value_dim, key_dim)  # updated in place
        >>> for token in range(3):
        ...     q, k = torch.randn(2, batch, heads, key_dim)
        ...     v, beta, g = torch.randn(batch, heads, value_dim), torch.rand(batch, heads), -torch.rand(batch, heads)
        ...     o = delta_rule_step(states, q, k, v, beta, g=g, qk_l2norm=True)
        >>> o.shape
        torch.Size([2, 4, 8])
        >>> slots = torch.tensor([5, 0])  # of a cache of 8 states
        >>> delta_rule_step(torch.zeros(8, heads, value_dim, key_dim), q, k, v, beta, state_batch_indices=slots).shape
        torch.Size([2, 4, 8])
    """
    if (
        out is None
        and dst_state_batch_indices is None
        and pad_slot_id is None
        and num_accepted_tokens is None
        and cu_seqlens is None
        and intermediate_states_buffer is None
        and intermediate_state_indices is None
        and not disable_state_update
    ):
        result: Tensor = torch.ops.ssm_kernels.delta_rule_step.default(
            states,
            q,
            k,
            v,
            beta,
            g,
            scale,
            state_batch_indices,
            qk_l2norm,
            A_log,
            dt_bias,
            gate_lower_bound,
            beta_sigmoid,
            allow_neg_eigval,
            num_householder,
        )
        return result
    result = empty_output(q, cu_seqlens, (*q.shape[:-2], *states.shape[1:3])) if out is None else out
    torch.ops.ssm_kernels.delta_rule_step_out.default(
        states,
        q,
        k,
        v,
        beta,
        g,
        scale,
        state_batch_indices,
        qk_l2norm,
        A_log,
        dt_bias,
        gate_lower_bound,
        beta_sigmoid,
        allow_neg_eigval,
        num_householder,
        result,
        dst_state_batch_indices,
        pad_slot_id,
        num_accepted_tokens,
        cu_seqlens,
        intermediate_states_buffer,
        intermediate_state_indices,
        disable_state_update,
    )
    return result
