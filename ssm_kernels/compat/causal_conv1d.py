"""The functions of the package ``causal_conv1d`` (1.7): signatures, layouts and effects are its own, the kernels ours."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from .._dtypes import cast, readable, wide_dtype
from .._torchscript import refuse_script
from ..choices import ConvActivation
from ..ops._arguments import is_traced
from ..ops.convolution import causal_conv1d
from ..ops.convolution import causal_conv1d_update as _update
from ._cache_rows import CacheRows, check_conv_cache
from ._errors import ACTIVATIONS, check_activation, check_device, check_shape, peer_arguments
from ._promotion import common_dtype, no_autocast

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states"]


@refuse_script
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | str | None = None,
    initial_states: Tensor | str | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Depthwise causal convolution: :func:`ssm_kernels.causal_conv1d` with the arguments of ``causal_conv1d``.

    Args:
        x: (batch, channels, seqlen), channels-first or channels-last, slices of wider tensors too; float32, float16, bfloat16
            or float64.
        weight: (channels, width), any floating-point dtype. A dtype other than that of ``x`` and float32 is converted to
            float32, a copy of the parameter.
        bias: (channels,), as ``weight``, independently of it.
        seq_idx: (batch, seqlen), integers. A new sequence begins where it changes. Steps with a negative number are padding:
            their output and gradient are zero, and so is the final state of a row that ends with padding.
        initial_states: (batch, channels, width - 1), dtype of ``x``: the steps before the first.
        return_final_states: also return the last ``width - 1`` steps; for either layout, and with ``seq_idx``, where the
            package asks for channels-last and no ``seq_idx``.
        final_states_out: (batch, channels, width - 1), dtype of ``x``: written in place and returned as the final states.
            Autograd does not record the write: final states with a gradient are returned as another tensor.
        activation: None, ``"silu"`` or ``"swish"``. One of these strings in the place of ``seq_idx`` or ``initial_states`` is
            the activation too, which had these places in ``causal_conv1d`` 1.0 and 1.1.

    Returns:
        ``out``, (batch, channels, seqlen), dtype and layout of ``x``; with ``return_final_states`` also ``final_states``,
        (batch, channels, width - 1), dtype of ``x``. Both are differentiable with respect to ``x``, ``weight``, ``bias`` and
        ``initial_states``. Autocast changes nothing.

    Raises:
        NotImplementedError: another activation.
        ValueError: a shape is not as above, or ``final_states_out`` without ``return_final_states``.
        RuntimeError, TypeError: as :func:`ssm_kernels.causal_conv1d`.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.causal_conv1d import causal_conv1d_fn
        >>> x, weight = torch.randn(2, 8, 100), torch.randn(8, 4)  # (batch, dim, seqlen)
        >>> causal_conv1d_fn(x, weight, activation="silu").shape
        torch.Size([2, 8, 100])
    """
    if isinstance(seq_idx, str) and seq_idx in ACTIVATIONS:
        activation = _older_activation("seq_idx", seq_idx, activation)
        seq_idx = None
    if isinstance(initial_states, str) and initial_states in ACTIVATIONS:
        activation = _older_activation("initial_states", initial_states, activation)
        initial_states = None
    # Other strings are errors there.
    states: Any = initial_states
    ids: Any = seq_idx
    return _causal_conv1d(x, weight, bias, ids, states, return_final_states, final_states_out, activation)


@peer_arguments("causal_conv1d_fn", initial_state="initial_states")
def _causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    return_final_states: bool,
    final_states_out: Tensor | None,
    activation: str | None,
) -> Tensor | tuple[Tensor, Tensor]:
    kind = check_activation("causal_conv1d_fn", activation)
    common_dtype("causal_conv1d_fn", x=x, weight=weight, bias=bias)
    if x.dim() != 3:
        raise ValueError(f"causal_conv1d_fn: expected x of shape (batch, channels, seqlen), got {list(x.shape)}")
    if final_states_out is not None and not return_final_states:
        raise ValueError("causal_conv1d_fn: final_states_out is written with return_final_states=True only")
    if final_states_out is not None and weight.dim() == 2:
        _check_final_states_out(final_states_out, (x.shape[0], x.shape[1], weight.shape[1] - 1), x)
    out, final_states = convolve(x.transpose(1, 2), weight, bias, kind, seq_idx, initial_states)
    out = out.transpose(1, 2)
    if not return_final_states:
        return out
    return out, final_states if final_states_out is None else write_final_states(final_states, final_states_out)


def _older_activation(place: str, given: str, activation: str | None) -> str:
    if activation is not None:
        raise ValueError(
            f"causal_conv1d_fn: expected {place} to be a tensor or None beside activation={activation!r}, got {given!r}"
        )
    return given


def write_final_states(final_states: Tensor, final_states_out: Tensor) -> Tensor:
    """Writes to ``final_states_out`` and returns it or, if they have a gradient, ``final_states``.

    Autograd does not record the write: the copies of all calls that write to a tensor would be one growing graph. The result
    is not a detached alias of ``final_states_out`` with a gradient, because Inductor drops a write to such an alias.
    """
    with torch.no_grad():
        final_states_out.copy_(final_states)
    return final_states if final_states.requires_grad else final_states_out


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: ConvActivation | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The convolution of ``x``, (batch, seqlen, channels), and the final states."""
    with no_autocast(x):
        return causal_conv1d(
            x,
            readable(weight, x.dtype),
            readable(bias, x.dtype),
            activation=activation,
            seq_idx=seq_idx,
            initial_state=initial_states,
            return_final_state=True,
        )


def _check_final_states_out(final_states_out: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    name = "causal_conv1d_fn"
    check_shape(name, "final_states_out", final_states_out, "(batch, channels, width - 1)", shape)
    if final_states_out.dtype != x.dtype:
        raise RuntimeError(f"{name}: expected final_states_out of dtype {x.dtype}, got {final_states_out.dtype}")
    check_device(name, "final_states_out", final_states_out, "x", x)


@peer_arguments(state_batch_indices="conv_state_indices")
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """One or several decoding steps of :func:`causal_conv1d_fn`; ``conv_state`` is updated in place.

    Args:
        x: (batch, channels), one step, or (batch, channels, seqlen), several.
        conv_state: (batch, channels, length), length >= width - 1; dtype of ``x`` or wider. Without ``cache_seqlens`` the last
            element is the newest, and new steps are appended. With ``conv_state_indices`` its first size is the number of
            cache slots.
        weight: (channels, width), any floating-point dtype.
        bias: (channels,), likewise.
        activation: None, ``"silu"`` or ``"swish"``.
        cache_seqlens: (batch,), int32 or int64. ``conv_state`` is then a circular buffer: new steps are written from the index
            ``cache_seqlens % length`` on, and the steps before them are those before this index.
        conv_state_indices: (batch,), int32 or int64: the slot of each row, as ``state_batch_indices`` of
            :func:`ssm_kernels.causal_conv1d_update`. A negative index is padding: its output is zero and no slot is touched.

    Returns:
        ``out``, shape and dtype of ``x``. Differentiable with respect to ``x``, ``weight`` and ``bias``, where one of them
        requires a gradient; states carry none. A circular buffer, or a call that autograd records, is the scan of
        :func:`ssm_kernels.causal_conv1d` and a few small operations instead of one kernel.

    Raises:
        NotImplementedError: another activation.
        ValueError, RuntimeError, TypeError: as :func:`ssm_kernels.causal_conv1d_update`.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.causal_conv1d import causal_conv1d_update
        >>> state, weight = torch.zeros(2, 8, 4), torch.randn(8, 4)  # the state is updated in place
        >>> causal_conv1d_update(torch.randn(2, 8), state, weight).shape
        torch.Size([2, 8])
    """
    kind = check_activation("causal_conv1d_update", activation)
    common_dtype("causal_conv1d_update", x=x, conv_state=conv_state, weight=weight, bias=bias)
    if x.dim() not in (2, 3):
        raise ValueError(
            f"causal_conv1d_update: expected x of shape (batch, channels) or (batch, channels, seqlen), got {list(x.shape)}"
        )
    steps = x[:, None] if x.dim() == 2 else x.transpose(1, 2)
    weight, bias = readable(weight, x.dtype), readable(bias, x.dtype)
    is_recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    takes_state = conv_state.dtype in (x.dtype, wide_dtype(x.dtype))
    with no_autocast(x):
        if cache_seqlens is None and not is_recorded and takes_state:
            out = _update(steps, conv_state, weight, bias, activation=kind, state_batch_indices=conv_state_indices)
        else:
            out = _update_composed(steps, conv_state, weight, bias, kind, cache_seqlens, conv_state_indices)
    return out[:, 0] if x.dim() == 2 else out.transpose(1, 2)


def _update_composed(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: ConvActivation | None,
    cache_seqlens: Tensor | None,
    indices: Tensor | None,
) -> Tensor:
    """:func:`causal_conv1d_update` of ``x``, (batch, seqlen, channels), as the scan and a copy of the state's rows."""
    check_shape("causal_conv1d_update", "weight", weight, "(channels, width)", (x.shape[2], None))
    past, seqlen = weight.shape[1] - 1, x.shape[1]
    _check_conv_state(conv_state, x, past, has_slots=indices is not None)
    if cache_seqlens is not None:
        _check_cache_seqlens(cache_seqlens, x)
    length = conv_state.shape[2]
    dtype = torch.promote_types(x.dtype, conv_state.dtype)
    rows = CacheRows(conv_state, indices, x.shape[0], check_conv_cache)
    with torch.no_grad():
        old = rows.read()
        new_steps = x.detach().transpose(1, 2).to(conv_state.dtype)
        if cache_seqlens is None:
            before = old[..., length - past :]
            new = torch.cat([old, new_steps], dim=-1)[..., seqlen:]
        else:
            kept = min(seqlen, length)
            ages = torch.arange(-past, seqlen, device=x.device)
            places = ((cache_seqlens[:, None] + ages) % length)[:, None].expand(-1, x.shape[2], -1)
            before = old.gather(2, places[..., :past])
            new = old.scatter(2, places[..., past + seqlen - kept :], new_steps[..., seqlen - kept :])
    out = causal_conv1d(
        cast(x, dtype),
        readable(weight, dtype),
        readable(bias, dtype),
        activation=activation,
        initial_state=before.to(dtype),
    )
    with torch.no_grad():
        rows.write(old, new)
    return rows.without_slot(cast(out, x.dtype))


def _check_conv_state(conv_state: Tensor, x: Tensor, past: int, has_slots: bool) -> None:
    """Raises unless the state has a row for each of ``x``, (batch, seqlen, channels), or slots."""
    name = "causal_conv1d_update"
    rows = conv_state.shape[:1] if has_slots else x.shape[:1]
    if conv_state.dim() != 3 or conv_state.shape[:2] != (*rows, x.shape[2]):
        raise ValueError(
            f"{name}: expected conv_state of shape ({'slots' if has_slots else x.shape[0]}, {x.shape[2]}, length), got "
            f"{list(conv_state.shape)}"
        )
    if conv_state.shape[2] < past:
        raise ValueError(f"{name}: expected conv_state of length >= width - 1 = {past}, got {conv_state.shape[2]}")
    check_device(name, "conv_state", conv_state, "x", x)


def _check_cache_seqlens(cache_seqlens: Tensor, x: Tensor) -> None:
    name = "causal_conv1d_update"
    check_shape(name, "cache_seqlens", cache_seqlens, "(batch,)", x.shape[:1])
    if cache_seqlens.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"{name}: expected cache_seqlens of dtype int32 or int64, got {cache_seqlens.dtype}")
    check_device(name, "cache_seqlens", cache_seqlens, "x", x)


@peer_arguments()
def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last steps of each of several packed sequences, as states for :func:`causal_conv1d_update`.

    Args:
        x: (steps, channels), sequences one after another.
        cu_seqlens: (sequences + 1,), integers from 0 to ``steps`` that do not decrease: sequence ``i`` is steps
            ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1``. Their values are checked on the CPU only, and not in traced calls.
        state_len: how many steps a state has.

    Returns:
        states, (sequences, channels, state_len), dtype of ``x``, channels-last, the last element the newest; zero where a
        sequence has fewer steps. The host does not wait for the device.

    Raises:
        ValueError: a shape, ``state_len`` or, on the CPU, a value of ``cu_seqlens`` is not as above.
        RuntimeError: a dtype or device is not as above.
        TypeError: an argument is not a tensor where one is expected, or ``state_len`` is not an integer.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.causal_conv1d import causal_conv1d_varlen_states
        >>> x, cu_seqlens = torch.randn(100, 8), torch.tensor([0, 30, 100], dtype=torch.int32)
        >>> causal_conv1d_varlen_states(x, cu_seqlens, state_len=4).shape
        torch.Size([2, 8, 4])
    """
    name = "causal_conv1d_varlen_states"
    common_dtype(name, x=x)
    if x.dim() != 2 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(
            f"{name}: expected x of shape (steps, channels) and cu_seqlens of shape (sequences + 1,), got "
            f"{list(x.shape)} and {list(cu_seqlens.shape)}"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"{name}: expected cu_seqlens of dtype int32 or int64, got {cu_seqlens.dtype}")
    check_device(name, "cu_seqlens", cu_seqlens, "x", x)
    if not isinstance(state_len, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"{name}: expected state_len to be an integer, got {type(state_len).__name__}")
    if state_len < 0:
        raise ValueError(f"{name}: expected state_len of at least 0, got {state_len}")
    if cu_seqlens.device.type == "cpu" and not is_traced(cu_seqlens):
        _check_ends(name, cu_seqlens, x.shape[0])
    if x.shape[0] == 0:
        return x.new_zeros(cu_seqlens.shape[0] - 1, state_len, x.shape[1]).transpose(1, 2)
    steps = cu_seqlens[1:, None] + torch.arange(-state_len, 0, device=cu_seqlens.device)
    is_own = steps >= cu_seqlens[:-1, None]
    return x[steps.clamp(min=0)].masked_fill(~is_own[..., None], 0).transpose(1, 2)


def _check_ends(function: str, cu_seqlens: Tensor, steps: int) -> None:
    ends = cu_seqlens.tolist()
    if ends[0] < 0 or ends[-1] > steps or ends != sorted(ends):
        raise ValueError(f"{function}: expected cu_seqlens from 0 to the steps of x = {steps}, not decreasing, got {ends}")
