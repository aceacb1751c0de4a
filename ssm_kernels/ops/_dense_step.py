"""Calls of :func:`ssm_kernels.selective_state_update` with a matrix A for each channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._discretizations import is_two_sample, split_name
from .._dtypes import Given, cast, wide_dtype

__all__ = ["dense_step", "is_dense"]

_OPERATOR = "selective_state_update"
_MAX_DSTATE = 32
_RULES = ("bilinear", "trapezoidal", "gbt", "gbt_two_sample", "euler", "backward_euler", "rk4")


def is_dense(state: Any, A: Any) -> bool:
    """Whether ``A`` has square matrices. With heads, where ``state`` has four axes, an ``A`` of three axes is diagonal."""
    if not (isinstance(A, Tensor) and isinstance(state, Tensor)) or A.is_nested or state.is_nested:
        return False
    return A.dim() == 3 and state.dim() == 3 and A.shape[1] == A.shape[2]


def _refuse(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{_OPERATOR}: {name} is not supported with A of shape (dim, dstate, dstate)")


def _check_shape(name: str, value: Tensor, axes: str, sizes: tuple[int, ...]) -> None:
    if value.shape != sizes:
        raise ValueError(f"{_OPERATOR}: expected {name} of shape {axes} = {[*sizes]}, got {[*value.shape]}")


def _check_slots(indices: Tensor, slots: int) -> None:
    """Raises for slots on the CPU that do not exist or that two rows share, where their values can be read."""
    if indices.device.type != "cpu" or torch.compiler.is_compiling():
        return
    used = indices[indices >= 0]
    if used.numel() > 0 and used.max() >= slots:
        raise ValueError(f"{_OPERATOR}: expected state_batch_indices below {slots}, got {used.max().item()}")
    if used.unique().numel() < used.numel():
        raise ValueError(f"{_OPERATOR}: expected distinct state_batch_indices, apart from padding")


def _widened(parameter: Given, dtype: torch.dtype) -> Given:
    """A parameter of the activations' dtype in the one that the scan takes; another dtype is for the scan to refuse."""
    return cast(parameter, wide_dtype(dtype)) if parameter is not None and parameter.dtype == dtype else parameter


class _Slots:
    """The rows of the batch in a cache. Without indices, row ``i`` is in slot ``i``.

    No branch depends on an index, because the host would have to wait for the device. Every row writes instead: rows without
    a slot repeat the write of the first row that has one or, if none has, write back what they have read.
    """

    def __init__(self, indices: Tensor | None, slots: int) -> None:
        self.indices = indices
        if indices is None:
            return
        indices = indices.long()
        self.is_padding, self.is_past = indices < 0, indices >= slots
        is_used = ~(self.is_padding | self.is_past)
        first = is_used.to(torch.uint8).argmax()
        rows = torch.arange(indices.numel(), device=indices.device)
        self.sources = torch.where(is_used, rows, first)
        self.targets = torch.where(is_used.any(), indices[self.sources], 0)
        self.any_used = is_used.any()

    def read(self, cache: Tensor) -> Tensor:
        return cache if self.indices is None else cache[self.targets]

    def write(self, cache: Tensor, values: Tensor) -> None:
        values = values.to(cache.dtype)
        if self.indices is None:
            cache.copy_(values)
        else:
            cache[self.targets] = torch.where(self.any_used, values[self.sources], cache[self.targets])

    def mask(self, out: Tensor) -> Tensor:
        if self.indices is None:
            return out
        axes = (-1, *[1] * (out.dim() - 1))
        return out.masked_fill(self.is_padding.view(axes), 0).masked_fill(self.is_past.view(axes), torch.nan)


def dense_step(
    state: Tensor,
    previous_x: Tensor | None,
    previous_B: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    state_batch_indices: Tensor | None,
    *,
    discretization: str,
    dt_limit: Sequence[float] | None,
    unsupported: dict[str, Any],
) -> Tensor:
    """The step as a scan over its tokens, which reduces the matrices once a call, not once a row of the batch."""
    _refuse(unsupported)
    reads_two = is_two_sample(discretization)
    if split_name(discretization)[0] not in _RULES:
        listed = ", ".join(map(repr, _RULES[:-1])) + f" or {_RULES[-1]!r}"
        raise ValueError(
            f"{_OPERATOR}: expected discretization {listed} with A of shape (dim, dstate, dstate), got {discretization!r}, "
            "which needs the exponential of a matrix in each step"
        )
    slots, dim, dstate = state.shape
    if not 1 <= dstate <= _MAX_DSTATE:
        raise ValueError(f"{_OPERATOR}: expected dstate from 1 to {_MAX_DSTATE} with a matrix A for each channel, got {dstate}")
    if A.shape not in ((dim, dstate, dstate), (1, dstate, dstate)):
        raise ValueError(
            f"{_OPERATOR}: expected A of shape (dim, dstate, dstate) = {[dim, dstate, dstate]} or {[1, dstate, dstate]}, "
            f"got {[*A.shape]}"
        )
    if x.dim() not in (2, 3):
        raise ValueError(f"{_OPERATOR}: expected x of shape (batch, dim) or (batch, tokens, dim), got {[*x.shape]}")
    axes, sizes = "(batch, dim)", (x.shape[0], dim)
    if x.dim() == 3:
        axes, sizes = "(batch, tokens, dim)", (*x.shape[:2], dim)
    for name, value in (("x", x), ("dt", dt), ("z", z)):
        if value is not None:
            _check_shape(name, value, axes, sizes)
    for name, value in (("B", B), ("C", C)):
        is_of_tokens = value.dim() in (x.dim(), x.dim() + 1) and value.shape[: x.dim() - 1] == x.shape[:-1]
        if not is_of_tokens or value.shape[-1] != dstate:
            expected = axes.replace("dim", "dstate")
            grouped = axes.replace("dim", "groups, dstate")
            raise ValueError(
                f"{_OPERATOR}: expected {name} of shape {expected} or {grouped} with dstate = {dstate}, got {[*value.shape]}"
            )
    if state_batch_indices is not None:
        _check_shape("state_batch_indices", state_batch_indices, "(batch,)", (x.shape[0],))
        if state_batch_indices.dtype not in (torch.int32, torch.int64):
            raise RuntimeError(f"{_OPERATOR}: expected int32 or int64 state_batch_indices, got {state_batch_indices.dtype}")
        _check_slots(state_batch_indices, slots)
    elif slots != x.shape[0]:
        raise ValueError(f"{_OPERATOR}: expected state of shape (batch, dim, dstate) with batch = {x.shape[0]}, got {slots}")
    if reads_two and previous_x is not None and previous_B is not None:
        without_tokens = B.shape[1:] if x.dim() == 2 else B.shape[2:]
        _check_shape("previous_x", previous_x, "(batch, dim)", (slots, dim))
        _check_shape("previous_B", previous_B, "that of B", (slots, *without_tokens))
    given = (state, previous_x, previous_B, x, dt, A, B, C, D, z, dt_bias)
    if torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in given):
        raise NotImplementedError(
            f"{_OPERATOR}: decoding is not differentiable: train with selective_scan, and decode under torch.no_grad()"
        )
    if 0 in x.shape or slots == 0:
        return torch.zeros_like(x)

    with torch.no_grad():
        wide, out_dtype = wide_dtype(x.dtype), x.dtype
        if state.dtype not in (wide, x.dtype):
            raise RuntimeError(f"{_OPERATOR}: expected state of dtype {wide} or that of x, got {state.dtype}")
        A, D, dt_bias = _widened(A, x.dtype), _widened(D, x.dtype), _widened(dt_bias, x.dtype)
        if dt_limit is not None:  # whose bounds lie between the bias and the recurrence
            dt = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias
            dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
            dt_bias, dt_softplus = None, False
            x, B, C, z = cast(x, wide), cast(B, wide), cast(C, wide), cast(z, wide)

        has_one_token = x.dim() == 2

        def over_time(value: Given) -> Given:
            if value is None:
                return value
            return value.unsqueeze(-1) if has_one_token else value.movedim(1, -1)

        rows = _Slots(state_batch_indices, slots)
        samples: tuple[Tensor | None, Tensor | None] = (None, None)
        if previous_x is not None and previous_B is not None:
            samples = (cast(rows.read(previous_x), x.dtype), cast(rows.read(previous_B), x.dtype))
        out, last = torch.ops.ssm_kernels.selective_scan_dense(
            *(over_time(x), over_time(dt), A, over_time(B), over_time(C), D, over_time(z), dt_bias),
            cast(rows.read(state), wide),
            *samples,
            None,
            None,
            discretization=discretization,
            repeats_first=False,
            delta_softplus=dt_softplus,
            reverse=False,
        )
        rows.write(state, last)
        if previous_x is not None and previous_B is not None:
            rows.write(previous_x, x if has_one_token else x[:, -1])
            rows.write(previous_B, B if has_one_token else B[:, -1])
        out = out.squeeze(-1) if has_one_token else out.movedim(-1, 1)
        return rows.mask(cast(out, out_dtype))
