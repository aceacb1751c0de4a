"""The causal convolution and its decoding step, typed and documented. Each calls ``torch.ops.ssm_kernels``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..choices import ConvActivation
from ._arguments import empty_output, names_arguments

__all__ = ["causal_conv1d", "causal_conv1d_update"]


@names_arguments
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: ConvActivation | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Depthwise causal convolution over time, with SiLU: the short convolution in front of Mamba's scans.

    Convolves each channel by itself with :math:`W` taps:

    .. math::
        \mathrm{out}_t = \mathrm{act}\Big(\mathrm{bias} + \sum_{l=0}^{W-1} \mathrm{weight}_{W-1-l}\; x_{t-l}\Big)

    A tap before a sequence's first step reads its initial state, or zero. The result equals
    ``act(conv1d(x.transpose(1, 2), weight[:, None], bias, padding=W - 1, groups=channels))`` without its last ``W - 1`` steps.
    Source: the shift SSM of Fu et al., *Hungry Hungry Hippos* (arXiv 2212.14052), and Gu and Dao, *Mamba* (arXiv 2312.00752),
    section 3.4. The package ``causal-conv1d`` has the same function for widths of 2 to 4.

    Args:
        x: input, (batch, seqlen, channels); float32, float16, bfloat16 or float64. Any strides: channels-contiguous and
            time-contiguous tensors are read as they are, slices of wider tensors too. For a (batch, channels, seqlen) tensor
            pass ``x.transpose(1, 2)``.
        weight: (channels, width), width >= 1, the last tap the newest; dtype of ``x``, or float32 (float64 with float64
            inputs).
        bias: (channels,), dtypes as for ``weight``, independently of it.
        activation: ``"silu"`` (alias ``"swish"``), or None (alias ``"none"``).
        seq_idx: (batch, seqlen), int32 or int64, the number of the sequence that a step belongs to. Where it changes from one
            step to the next, up or down, a new sequence begins, whose initial state is zero. ``initial_state``
            belongs to the first sequence of a row, ``final_state`` to the last; together with ``cu_seqlens``, to the first and
            the last part of each of its sequences. Steps with a negative number are padding and may hold anything, NaN too:
            ``out`` and the gradient of ``x`` are zero there, weights and bias get no gradient from them, and a
            ``final_state`` that belongs to padding is zero, as is the gradient of an ``initial_state`` that does.
        cu_seqlens: (sequences + 1,), int32 or int64: the batch, then of size 1, holds sequences one after another, and sequence
            ``i`` is steps ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1``. It starts at 0, ends at seqlen and does not decrease;
            a sequence may have no steps. Sequences are independent: ``initial_state`` and ``final_state``
            are (sequences, channels, width - 1). Together with ``seq_idx``, of shape (1, seqlen), a sequence begins from its
            initial state, and from zero where ``seq_idx`` changes inside it.
        initial_state: the ``width - 1`` steps before the first one, (batch, channels, width - 1), the last element the newest;
            dtype of ``x``; zero if absent.
        return_final_state: also return the state after the last step.

    Returns:
        ``out`` of the shape and dtype of ``x`` and, where ``x`` is dense, of its strides; with ``return_final_state`` also
        ``final_state``, (batch, channels, width - 1), dtype of ``x``: the last ``width - 1`` elements of the initial state
        followed by the sequence. Both are differentiable with respect to ``x``, ``weight``, ``bias`` and ``initial_state``.
        Double backward and ``torch.func`` transforms other than ``vmap`` are not supported and raise.

    The operator runs on CPU and on CUDA and gives the same bits every time. Sums are float32 (float64 with float64 inputs), and
    each result is rounded once. Autograd saves the inputs only; backward recomputes the sums before the activation. On CUDA the
    operator launches on the current stream and can be captured in a CUDA graph. The values of ``cu_seqlens`` are checked for
    tensors on the CPU only. Autocast casts ``x`` and ``initial_state`` to its dtype, and ``weight`` and ``bias`` of a third
    dtype to float32.

    Raises:
        ValueError: a shape, the activation or, on the CPU, the values of ``cu_seqlens`` are not as above.
        RuntimeError: a dtype, layout or device is not supported, or the device has no kernel.
        TypeError: an argument is not a tensor where one is expected, or a required tensor is None.

    Examples:
        >>> import torch
        >>> from ssm_kernels import causal_conv1d
        >>> x = torch.randn(2, 100, 8)  # (batch, seqlen, channels)
        >>> causal_conv1d(x, torch.randn(8, 4), torch.zeros(8), activation="silu").shape
        torch.Size([2, 100, 8])
        >>> y, state = causal_conv1d(x, torch.randn(8, 7), return_final_state=True)  # any width
        >>> state.shape
        torch.Size([2, 8, 6])
        >>> steps = torch.tensor([[[1.0], [2.0], [3.0]]])
        >>> causal_conv1d(steps, torch.tensor([[10.0, 1.0]]))  # the last tap is the newest
        tensor([[[ 1.],
                 [12.],
                 [23.]]])
    """
    results: tuple[Tensor, Tensor] = torch.ops.ssm_kernels.causal_conv1d.default(
        x,
        weight,
        bias,
        activation=activation,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
    )
    return results if return_final_state else results[0]


@names_arguments
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: ConvActivation | None = None,
    state_batch_indices: Tensor | None = None,
    out: Tensor | None = None,
    dst_state_batch_indices: Tensor | None = None,
    pad_slot_id: int | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    disable_state_update: bool = False,
) -> Tensor:
    r"""One or several decoding steps of :func:`causal_conv1d`; ``conv_state`` is updated in place.

    The result equals :func:`causal_conv1d` with the last ``width - 1`` elements of ``conv_state`` as its initial state. The
    operator then shifts the state to the left and appends the new steps, as in ``mamba_ssm``. The package
    ``causal-conv1d`` has a function of the same name, which takes several steps as (batch, channels, seqlen).

    Args:
        x: (batch, channels), one step, or (batch, seqlen, channels), several; float32, float16, bfloat16 or float64. Any
            strides.
        conv_state: (batch, channels, length), length >= width - 1, modified in place: the last steps, the last element the
            newest; dtype of ``x``, or float32 (float64 with float64 inputs). With ``state_batch_indices`` its first size is
            the number of cache slots instead.
        weight: (channels, width), the last tap the newest; dtype of ``x``, or float32 (float64 with float64 inputs).
        bias: (channels,), dtypes as for ``weight``, independently of it.
        activation: ``"silu"`` (alias ``"swish"``), or None (alias ``"none"``).
        state_batch_indices: (batch,), int32 or int64: the slot of ``conv_state`` that each row of the batch uses. A negative
            index is padding: the output is zero and no state is touched. Other indices must be distinct and below the number
            of slots; the CPU raises a ValueError otherwise. CUDA does not check, because the host would have to wait for the
            device: a row whose index is past the last slot returns NaN and touches no state, and rows that share a slot race.
        out: the tensor that the output is written to: shape, dtype and device of ``x``, any strides. A new one if absent.
        dst_state_batch_indices: (batch,), int32 or int64: the slot that each row writes its state to, if it differs from the
            slot that it reads from. A negative index is padding: the state is not written.
        pad_slot_id: a further index that is padding, for all tensors of indices; vLLM's newer name is ``null_block_id``.
        num_accepted_tokens: (batch,), int32 or int64: how many steps of the previous call speculative decoding has accepted;
            the text below says what the state then holds. 0 counts as 1.
        cu_seqlens: (sequences + 1,), int32 or int64: the steps of all sequences are packed one after another. ``x`` is then
            (tokens, channels), and a row is a sequence. A sequence without steps touches no state. Steps after
            ``cu_seqlens[-1]`` are padding, for CUDA graphs, which keep one shape: they touch no state, and their output is
            zero, or in ``out``, if given, what it was. vLLM's name is ``query_start_loc``.
        intermediate_conv_window: (entries, seqlen, channels, width - 1), dtype of ``conv_state``: receives the last
            ``width - 1`` inputs after each step. Row ``b`` writes to entry ``b`` or, with ``intermediate_state_indices``, to
            entry ``intermediate_state_indices[b]``, unless that is padding. Other entries stay as they are.
        intermediate_state_indices: (batch,), int32 or int64.
        disable_state_update: do not write to ``conv_state``, as when drafts are only verified.

    **Speculative decoding.** With ``num_accepted_tokens`` the state has the layout of vLLM, from its front: ``width - 2``
    inputs before the steps of the previous call, then these steps, of which ``num_accepted_tokens[b]`` are kept. A row
    therefore reads elements ``num_accepted_tokens[b] - 1`` to ``num_accepted_tokens[b] + width - 3``. It writes the last
    ``width - 2`` of them, followed by its own steps, to the front of the state and leaves the rest as it is. The state has at
    least ``width - 2 + seqlen`` elements. With 1, a row reads the ``width - 1`` elements that a prompt has left at the front.

    **Slots.** A row whose slot to read from is padding has the output zero and writes nothing. No slot or entry that a row
    writes to may be read or written by another row: the CPU raises a ValueError, on CUDA the contents are undefined. Rows may
    share a slot that none writes to. On CUDA a row whose slot to read from is past the last one returns NaN and writes nothing,
    and a state whose slot or entry is past the last one is not written.

    These arguments are those of vLLM and SGLang. With any of those after ``state_batch_indices`` the function calls
    ``torch.ops.ssm_kernels.causal_conv1d_update_out``.

    Returns:
        ``out``, shape and dtype of ``x``; the argument if it is given. Not differentiable: call it under ``torch.no_grad()``.

    Raises:
        ValueError: a shape, the activation or, on the CPU, a tensor of indices, ``num_accepted_tokens`` or ``cu_seqlens`` is
            not as above.
        RuntimeError: a dtype, layout or device is not supported, or the device has no kernel.
        RuntimeError: elements of ``conv_state``, ``out`` or ``intermediate_conv_window``, which are written to, share memory
            with each other or with another argument.
        NotImplementedError: an argument has a tangent of forward-mode differentiation, or requires a gradient beside ``out``
            or another argument after ``state_batch_indices``. Otherwise backward raises when it reaches the result.
        TypeError: an argument is not a tensor where one is expected, or a required tensor is None.

    Examples:
        >>> import torch
        >>> from ssm_kernels import causal_conv1d, causal_conv1d_update
        >>> x, weight = torch.randn(2, 5, 8), torch.randn(8, 4)
        >>> state = torch.zeros(2, 8, 3)  # the last width - 1 steps, updated in place
        >>> steps = [causal_conv1d_update(x[:, t], state, weight) for t in range(5)]
        >>> torch.allclose(torch.stack(steps, dim=1), causal_conv1d(x, weight), atol=1e-5)
        True
    """
    if (
        out is None
        and dst_state_batch_indices is None
        and pad_slot_id is None
        and num_accepted_tokens is None
        and cu_seqlens is None
        and intermediate_conv_window is None
        and intermediate_state_indices is None
        and not disable_state_update
    ):
        result: Tensor = torch.ops.ssm_kernels.causal_conv1d_update.default(
            x, conv_state, weight, bias, activation=activation, state_batch_indices=state_batch_indices
        )
        return result
    result = empty_output(x, cu_seqlens) if out is None else out
    torch.ops.ssm_kernels.causal_conv1d_update_out.default(
        x,
        conv_state,
        weight,
        bias,
        activation,
        state_batch_indices,
        result,
        dst_state_batch_indices,
        pad_slot_id,
        num_accepted_tokens,
        cu_seqlens,
        intermediate_conv_window,
        intermediate_state_indices,
        disable_state_update,
    )
    return result
