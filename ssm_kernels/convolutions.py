"""The causal convolution and its decoding step, typed and documented. Each calls ``torch.ops.ssm_kernels``."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from ._arguments import names_arguments

__all__ = ["causal_conv1d", "causal_conv1d_update"]


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: Literal[False] = False,
) -> Tensor: ...
@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
@names_arguments
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
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
            belongs to the first sequence of a row, ``final_state`` to the last.
        cu_seqlens: (sequences + 1,), int32 or int64: the batch, then of size 1, holds sequences one after another, and sequence
            ``i`` is steps ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1``. It starts at 0, ends at seqlen and does not decrease;
            a sequence may have no steps. Sequences are independent: ``initial_state`` and ``final_state``
            are (sequences, channels, width - 1). Not together with ``seq_idx``.
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
        ValueError: a shape, the activation or, on the CPU, the values of ``cu_seqlens`` are not as above, or both ``seq_idx``
            and ``cu_seqlens`` are given.
        RuntimeError: a dtype, layout or device is not as above, or there is no kernel for the device.
        TypeError: an argument is not a tensor where one is expected, or a required tensor is None.
    """
    results: tuple[Tensor, Tensor] = torch.ops.ssm_kernels.causal_conv1d(
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
    activation: str | None = None,
    state_batch_indices: Tensor | None = None,
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

    Returns:
        ``out``, shape and dtype of ``x``. Not differentiable: call it under ``torch.no_grad()``.

    Raises:
        ValueError: a shape, the activation or, on the CPU, ``state_batch_indices`` is not as above.
        RuntimeError: a dtype, layout or device is not as above, or there is no kernel for the device.
        RuntimeError: elements of ``conv_state``, which is updated in place, share memory with each other or with another
            argument.
        NotImplementedError: an argument requires a gradient, or has a tangent of forward-mode differentiation.
        TypeError: an argument is not a tensor where one is expected, or a required tensor is None.
    """
    out: Tensor = torch.ops.ssm_kernels.causal_conv1d_update(
        x, conv_state, weight, bias, activation=activation, state_batch_indices=state_batch_indices
    )
    return out
