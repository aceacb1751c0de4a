"""The selective scan and the decoding step, typed and documented. Each calls ``torch.ops.ssm_kernels``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ._arguments import empty_output, names_arguments, read_dt_limit
from ._states_at import Positions, selective_scan_with_states
from .choices import DiscretizationName

__all__ = ["selective_scan", "selective_state_update"]

# Looked up once: the attributes of torch.ops take 0.3 microseconds a call.
_selective_scan = torch.ops.ssm_kernels.selective_scan.default


@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: DiscretizationName = "zoh",
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: Literal[False] = False,
    states_at: None = None,
) -> Tensor: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: DiscretizationName = "zoh",
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: Literal[False] = False,
    states_at: Positions,
) -> tuple[Tensor, Tensor]: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: DiscretizationName = "zoh",
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: Literal[True],
    states_at: None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: DiscretizationName = "zoh",
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: Literal[True],
    states_at: Positions,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: DiscretizationName = "zoh",
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool,
    states_at: None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: DiscretizationName = "zoh",
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool,
    states_at: Positions | None,
) -> Tensor | tuple[Tensor, ...]: ...
@names_arguments
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: DiscretizationName = "zoh",
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool = False,
    states_at: Positions | None = None,
) -> Tensor | tuple[Tensor, ...]:
    r"""Selective scan of a diagonal state-space model, with a choice of discretization.

    .. math::
        \Delta_t &= \mathrm{delta}_t + \mathrm{delta\_bias}, \quad
        \Delta_t \leftarrow \mathrm{softplus}(\Delta_t) \text{ if } \mathrm{delta\_softplus} \\
        h_t &= \bar A(\Delta_t A)\, h_{t-1} + \Delta_t\, k(\Delta_t A)\, B_t u_t \\
        y_t &= (\langle C_t, h_t \rangle + D u_t) \cdot \mathrm{silu}(z_t)

    The discretization defines the functions :math:`\bar A` and :math:`k`: see ``docs/discretizations.md``.
    Source: Gu and Dao, *Mamba* (arXiv 2312.00752), equations 1 to 4. ``"zoh"`` is the rule of the paper's code; the
    paper's equation 4 is ``"zoh_exact"`` here.

    Args:
        u: input, (batch, dim, seqlen); float32, float16, bfloat16 or float64. Any strides; seqlen-contiguous and
            dim-contiguous tensors are read in 16-byte vectors, others element by element on CUDA.
        delta: step sizes, shape and dtype of ``u``.
        A: diagonal of the continuous system, (dim, dstate), real, float32 (float64 with float64 inputs); dstate <= 256.
        B: input matrix. Constant: (dim, dstate) in the dtype of ``A``. Per step: (batch, dstate, seqlen) or
            (batch, groups, dstate, seqlen) in the dtype of ``u``; channel ``d`` reads group ``d // (dim // groups)``.
        C: output matrix, as ``B``, independently of it.
        D: skip connection, (dim,), dtype of ``A``.
        z: gate, shape and dtype of ``u``.
        delta_bias: (dim,), dtype of ``A``.
        discretization: one of ``ssm_kernels.discretizations``, such as ``"zoh"``, ``"zoh_exact"`` and ``"bilinear"``, or
            ``"foh"``, an alias of ``"zoh_exact"``.
        delta_softplus: apply softplus (identity above 20, as :func:`torch.nn.functional.softplus`) to ``delta + delta_bias``.
        initial_state: state before the first step, (batch, dim, dstate), dtype of ``A``; zero if absent. With ``cu_seqlens``
            (sequences, dim, dstate), one for each sequence.
        reverse: time runs backwards, from the last step to the first, also in each packed sequence. ``initial_state`` is then
            the state after the last step, ``last_state`` the one at step 0, and :math:`h_t` follows from :math:`h_{t+1}`.
        seq_idx: (batch, seqlen), int32 or int64: a new sequence begins wherever it changes, with a state of zero.
        cu_seqlens: (sequences + 1,), int32 or int64, for a batch of 1: sequence ``i`` has the steps ``cu_seqlens[i]`` to
            ``cu_seqlens[i + 1] - 1``, which may be none. Together with ``seq_idx`` sequences begin where either says so; those
            of ``cu_seqlens`` have states.
        return_last_state: also return the state after the last step, of each sequence of ``cu_seqlens``.
        states_at: also return the states at these positions: ints, or a tensor of one axis, int32 or int64, on the CPU. The
            state at ``p``, from 0 to seqlen, is the one after the first ``p`` steps. A scan of the later steps that begins
            with it continues the sequence. Positions may repeat and need no order. With ``cu_seqlens`` the state at ``p`` is
            that of the sequence of step ``p - 1``, and at 0 the first one of the sequence of step 0, or zero if seqlen is 0.
            Not with ``reverse``.

    Returns:
        ``out`` of the shape and dtype of ``u``; with ``return_last_state`` then ``last_state``, (batch, dim, dstate) or
        (sequences, dim, dstate), dtype of ``A``; with ``states_at`` then ``states``, (batch, positions, dim, dstate), dtype of
        ``A``. All are differentiable with respect to every floating-point tensor, ``initial_state`` included. Double backward
        and ``torch.func`` transforms other than ``vmap`` are not supported and raise.

    **Packed sequences.** Each sequence is scanned on its own: values of one, NaN included, reach no other. On CUDA the blocks
    of all sequences run at once, and the time of a sequence is not divided: one long sequence of few channels takes longer than
    in a call without ``cu_seqlens``. Tensors of contiguous channels, as layers have them, are read in vectors. Contiguous steps
    are read as shifted rows by the sequential scan (``docs/cuda.md``) and element by element by the others. The host waits for
    the device to check the values of ``cu_seqlens``, unless a CUDA graph is being captured, and to count the sequences of
    ``seq_idx``, which cannot be captured.

    **Cost of** ``reverse``. Nothing is copied or flipped. Channels-last tensors take the same kernels as without it. On CUDA,
    tensors of contiguous steps take the warp scan or the short scan (``docs/cuda.md``).

    **Cost of** ``states_at``. Without gradients, autocast, transforms and packed sequences, one call returns the states at
    multiples of 32 (above 16 states: 64), at 0 and at seqlen, from the chunk states that forward then writes, (batch,
    seqlen / 32 + 1, dim, dstate). Any other position takes one more call, of the steps since the multiple before it. Otherwise
    the scan is one call for each piece between positions, chained by its states, and a copy that joins the outputs; rounding
    may differ from the scan in one call. On CUDA, pieces that do not begin at a multiple of 16 bytes are shifted rows
    of the sequential scan; the others read them element by element.

    The operator runs on CPU and on CUDA (compute capability 8.0 and newer) and gives the same bits every time. States and sums
    are float32 (float64 with float64 inputs). Autograd saves the states at every 32nd step (above 16 states: 64th). On CUDA the
    operator launches on the current stream, the host waits for the device for packed sequences only, and forward and backward
    can be captured in a CUDA graph.

    Raises:
        ValueError: a shape, a position, the discretization or, unless a CUDA graph is being captured, a value of
            ``cu_seqlens`` is not as above, or ``states_at`` is given with ``reverse``.
        RuntimeError: a dtype, layout or device is not as above, there is no kernel for the device, or ``seq_idx`` is given
            while a CUDA graph is being captured.
        TypeError: an argument is not a tensor where one is expected, a required tensor is None, or ``states_at`` has other
            elements than ints.

    Examples:
        >>> import torch
        >>> from ssm_kernels import selective_scan
        >>> batch, dim, seqlen, dstate = 2, 8, 100, 16
        >>> u, delta = torch.randn(batch, dim, seqlen), torch.rand(batch, dim, seqlen)
        >>> A, B, C = -torch.rand(dim, dstate), torch.randn(batch, dstate, seqlen), torch.randn(batch, dstate, seqlen)
        >>> selective_scan(u, delta, A, B, C, discretization="zoh_exact").shape
        torch.Size([2, 8, 100])
        >>> y, state = selective_scan(u, delta, A, B, C, return_last_state=True)
        >>> state.shape
        torch.Size([2, 8, 16])
        >>> x = torch.randn(batch, seqlen, dim)  # channels last: a view, no copy
        >>> selective_scan(x.transpose(1, 2), delta, A, B, C).transpose(1, 2).shape
        torch.Size([2, 100, 8])
        >>> one = torch.ones(1, 1, 3)  # a held input of 1, with A = -1 and steps of 1: 1 - exp(-t)
        >>> selective_scan(one, one, -torch.ones(1, 1), one, one, discretization="zoh_exact")
        tensor([[[0.6321, 0.8647, 0.9502]]])
    """
    if states_at is not None:
        if reverse:
            raise ValueError("selective_scan: expected states_at without reverse, got both")
        inputs = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias}
        inputs |= {"initial_state": initial_state, "seq_idx": seq_idx, "cu_seqlens": cu_seqlens}
        settings = {"discretization": discretization, "delta_softplus": delta_softplus}
        out, last_state, states = selective_scan_with_states(states_at, inputs, settings)
        return (out, last_state, states) if return_last_state else (out, states)
    # The dispatcher takes half a microsecond for each keyword.
    options: dict[str, Any] = {}
    if discretization != "zoh":
        options["discretization"] = discretization
    if delta_softplus is not False:
        options["delta_softplus"] = delta_softplus
    if reverse is not False:
        options["reverse"] = reverse
    results: tuple[Tensor, Tensor] = _selective_scan(
        u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx, cu_seqlens, **options
    )
    return results if return_last_state else results[0]


@names_arguments
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    *,
    discretization: DiscretizationName = "zoh",
    dt_limit: Sequence[float] | None = None,
    A_is_log: bool = False,
    out: Tensor | None = None,
    dst_state_batch_indices: Tensor | None = None,
    pad_slot_id: int | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    disable_state_update: bool = False,
) -> Tensor:
    r"""One decoding step of the selective scan, or a few; ``state`` is updated in place.

    The result equals a scan with seqlen 1, the initial state ``state`` and the same ``dt_limit``, whose default in
    :func:`ssd_chunk_scan` is (0, inf). The step has two forms. With channels (Mamba, :func:`selective_scan`) ``state`` is
    (batch, dim, dstate). With heads (Mamba-2, :func:`ssd_chunk_scan`) ``state`` is (batch, heads, headdim, dstate), and ``A``,
    ``dt``, ``D`` and ``dt_bias`` are expanded over the axes that they do not depend on. Arguments have the names and the order
    of ``mamba_ssm``'s function.

    Args:
        state: (batch, dim, dstate) or (batch, heads, headdim, dstate), modified in place; float32 (float64 with float64
            inputs), or the dtype of ``x``. With ``state_batch_indices`` its first size is the number of cache slots instead.
        x: (batch, dim) or (batch, heads, headdim).
        dt: shape and dtype of ``x`` (with heads often expanded over headdim, which is read without a copy).
        A: (dim, dstate) or (heads, headdim, dstate); float32 (float64 with float64 inputs), or the dtype of ``x``; may be
            expanded.
        B: (batch, dstate) or (batch, groups, dstate), dtype of ``x``. The groups divide dim or, where there
            are heads, the heads.
        C: shape and dtype of ``B``.
        D: (dim,) or (heads, headdim), dtypes as for ``A``.
        z: gate, shape and dtype of ``x``.
        dt_bias: (dim,) or (heads, headdim), dtypes as for ``A``.
        dt_softplus: apply softplus to ``dt + dt_bias``.
        state_batch_indices: (batch,), int32 or int64: the slot of ``state`` that each row of the batch uses. A negative index
            is padding: the output is zero and no state is touched. Other indices must be distinct and below the number of
            slots; the CPU raises a ValueError otherwise. CUDA does not check, because the host would have to wait for the
            device: a row whose index is past the last slot returns NaN and touches no state. Rows that share a slot race:
            the contents of this slot and the outputs of these rows are undefined; other slots are not affected.
        discretization: as for :func:`selective_scan`.
        dt_limit: the smallest and the largest step size; clamps the others, after bias and softplus. None: no limits.
        A_is_log: ``A`` holds the logarithm that layers keep; the operator computes ``-exp(A)`` from it.
        out: the tensor that the output is written to: shape, dtype and device of ``x``, any strides. A new one if absent.
        dst_state_batch_indices: the slot that each row writes to, if it differs from the slot that it reads from; int32 or
            int64. (batch,): the state after the row's last token. (batch, tokens): the state after each token, to the slot in
            the token's column. A negative index is padding: that state is not written.
        pad_slot_id: a further index that is padding, for all tables of indices; vLLM's newer name is ``null_block_id``.
        num_accepted_tokens: (batch,), int32 or int64, with ``state_batch_indices`` of shape (batch, columns): how many tokens
            of the previous call speculative decoding has accepted. Row ``b`` reads the state in column
            ``num_accepted_tokens[b] - 1``, and column 0 if the number is 0.
        cu_seqlens: (sequences + 1,), int32 or int64: the tokens of all sequences are packed one after another. ``x``, ``dt``
            and ``z`` are then (tokens, dim) or (tokens, heads, headdim), ``B`` and ``C`` (tokens, dstate) or (tokens, groups,
            dstate); a row is a sequence. A sequence without tokens touches no state.
            Tokens after ``cu_seqlens[-1]`` are padding, for CUDA graphs, which keep one shape: they touch no state, and their
            output is zero, or in ``out``, if given, what it was.
        intermediate_states_buffer: (entries, tokens, dim, dstate) or (entries, tokens, heads, headdim, dstate), dtype of
            ``state``: receives the state after each token. Row ``b`` writes to entry ``b`` or, with
            ``intermediate_state_indices``, to entry ``intermediate_state_indices[b]``, unless that is padding. Other entries
            stay as they are.
        intermediate_state_indices: (batch,), int32 or int64.
        disable_state_update: do not write to ``state``, as when drafts are only verified.

    **Several tokens.** ``x`` of shape (batch, tokens, dim) or (batch, tokens, heads, headdim), with ``dt`` and ``z`` of the
    same shape and ``B`` and ``C`` of shape (batch, tokens, dstate) or (batch, tokens, groups, dstate), makes one step for each
    token. The result equals as many calls of one token. The kernel reads the state of a row once, and writes it once, after the
    last token. If the table of slots to write to has two axes, it writes the state after each token: that table is
    ``dst_state_batch_indices`` or, without it, ``state_batch_indices``. A row without ``num_accepted_tokens`` reads column 0.

    **Slots.** A row whose slot to read from is padding has the output zero and writes nothing. No slot or entry that a row
    writes to may be read or written by another row: the CPU raises a ValueError, on CUDA the contents are undefined. Rows may
    share a slot that none writes to. If a row writes several states to one slot, the last one stays. On CUDA a row whose slot
    to read from is past the last one returns NaN and writes nothing, and a state whose slot or entry is past the last one is
    not written.

    These arguments are those of vLLM, FlashInfer and SGLang. With any of those after ``A_is_log`` the function calls
    ``torch.ops.ssm_kernels.selective_state_update_out``, which raises if an argument requires a gradient.

    Returns:
        ``out``, shape and dtype of ``x``; the argument if it is given. Not differentiable: backward through it raises.
        ``state`` requires a gradient after the call only if it did before; backward through it then raises, too.

    Raises:
        ValueError: a shape, the discretization, ``dt_limit`` or, on the CPU, a table of indices, ``num_accepted_tokens`` or
            ``cu_seqlens`` is not as above.
        RuntimeError: a dtype, layout or device is not as above, or there is no kernel for the device.
        RuntimeError: elements of ``state``, ``out`` or ``intermediate_states_buffer``, which are written to, share memory with
            each other or with another argument.
        NotImplementedError: an argument requires a gradient beside ``out`` or another of the arguments after ``A_is_log``.
        TypeError: an argument is not a tensor where one is expected, or a required tensor is None.

    Examples:
        >>> import torch
        >>> from ssm_kernels import selective_state_update
        >>> batch, dim, dstate = 2, 8, 16
        >>> state = torch.zeros(batch, dim, dstate)  # updated in place
        >>> A = -torch.rand(dim, dstate)
        >>> for token in range(3):
        ...     x, dt = torch.randn(batch, dim), torch.rand(batch, dim)
        ...     B, C = torch.randn(batch, dstate), torch.randn(batch, dstate)
        ...     y = selective_state_update(state, x, dt, A, B, C)
        >>> y.shape
        torch.Size([2, 8])
        >>> heads, headdim = 4, 2  # Mamba-2: a number a head, expanded
        >>> state = torch.zeros(batch, heads, headdim, dstate)
        >>> A, dt = -torch.rand(heads), torch.rand(batch, heads)
        >>> A, dt = A[:, None, None].expand(-1, headdim, dstate), dt[:, :, None].expand(-1, -1, headdim)
        >>> selective_state_update(state, torch.randn(batch, heads, headdim), dt, A, B, C).shape
        torch.Size([2, 4, 2])
    """
    limits = read_dt_limit("selective_state_update", dt_limit)
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
        result: Tensor = torch.ops.ssm_kernels.selective_state_update.default(
            state,
            x,
            dt,
            A,
            B,
            C,
            D,
            z,
            dt_bias,
            dt_softplus,
            state_batch_indices,
            discretization=discretization,
            dt_limit=limits,
            A_is_log=A_is_log,
        )
        return result
    result = empty_output(x, cu_seqlens) if out is None else out
    torch.ops.ssm_kernels.selective_state_update_out.default(
        state,
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        dt_softplus,
        state_batch_indices,
        discretization,
        limits,
        A_is_log,
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
