"""Calls of :func:`ssm_kernels.selective_scan` and :func:`ssm_kernels.selective_state_update` with a complex ``A``.

The operators take real tensors in which the real and the imaginary part of a state are neighbors, twice as many columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._scan_state import ScanState
from ._two_samples import two_sample_scan

__all__ = ["complex_scan", "complex_step", "is_complex"]


def is_complex(A: Any) -> bool:
    """Whether it is a complex tensor."""
    return isinstance(A, Tensor) and A.is_complex()


def _check(operator: str, name: str, value: Any, A: Tensor) -> None:
    if not isinstance(value, Tensor):
        return  # the operator names it
    if not value.is_complex():
        hint = f"torch.complex({name}, torch.zeros_like({name}))"
        raise RuntimeError(f"{operator}: expected a complex {name} with a complex A, got {value.dtype}: pass {hint}")
    if value.dtype != A.dtype:
        raise RuntimeError(f"{operator}: expected {name} of dtype {A.dtype}, that of A, got {value.dtype}")


def _columns(value: Tensor) -> Tensor:
    """(..., dstate), complex, as (..., 2 dstate), real: a view."""
    return torch.view_as_real(value.resolve_conj()).flatten(-2)


def _rows(value: Tensor) -> Tensor:
    """(..., dstate, seqlen) as (..., 2 dstate, seqlen), whose states are contiguous: a view if those of the argument are."""
    return _columns(value.movedim(-1, 1).contiguous()).movedim(1, -1)


def _complex(value: Tensor) -> Tensor:
    return torch.view_as_complex(value.unflatten(-1, (-1, 2)).contiguous())


def _check_states(operator: str, A: Tensor, **others: tuple[Tensor | None, int]) -> None:
    """Raises unless the tensors are of the dtype of A, and their axes of states as long as its own."""
    for name, (value, axis) in others.items():
        if value is None:
            continue
        _check(operator, name, value, A)
        if isinstance(value, Tensor) and A.dim() > 1 and value.dim() > 1 and value.shape[axis] != A.shape[-1]:
            raise ValueError(
                f"{operator}: expected {name} to have dstate = {A.shape[-1]} of A in axis {axis}, got shape {[*value.shape]}"
            )


def _refuse_unequal(operator: str, u: Any, A: Tensor) -> None:
    if isinstance(u, Tensor):
        expected = torch.complex128 if u.dtype == torch.float64 else torch.complex64
        if A.dtype != expected:
            raise RuntimeError(f"{operator}: expected a complex A of dtype {expected} beside {u.dtype}, got {A.dtype}")


def complex_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *others: Any, initial_state: Any, previous: Any, **options: Any
) -> Any:
    """:func:`two_sample_scan` of complex tensors. The states among its results are complex, too."""
    operator = "selective_scan"
    _refuse_unequal(operator, u, A)
    axes = [1 if isinstance(X, Tensor) and X.dim() == 2 else -2 for X in (B, C)]
    _check_states(operator, A, B=(B, axes[0]), C=(C, axes[1]), initial_state=(initial_state, -1))
    is_constant = axes[0] == 1
    matrices = [X if not isinstance(X, Tensor) else _columns(X) if X.dim() == 2 else _rows(X) for X in (B, C)]
    if isinstance(previous, (tuple, list)) and len(previous) == 2 and isinstance(previous[1], Tensor):
        _check_states(operator, A, previous_B=(previous[1], -1))
        previous = (previous[0], _columns(previous[1]))
    results = two_sample_scan(
        *(u, delta, _columns(A), *matrices, *others),
        initial_state=None if initial_state is None else _columns(initial_state),
        previous=previous,
        is_complex=True,
        **options,
    )
    if isinstance(results, Tensor):
        return results
    out, *states = results
    return (out, *(_complex_state(state, is_constant) for state in states))


def _complex_state(state: Tensor | ScanState, has_constant_B: bool) -> Tensor | ScanState:
    if isinstance(state, Tensor):
        return _complex(state)
    return ScanState(_complex(state.state), state.u, None if has_constant_B or state.B is None else _complex(state.B))


def complex_step(
    step: Callable[..., Tensor],
    state: Tensor,
    previous_x: Tensor | None,
    previous_B: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *others: Any,
    **options: Any,
) -> Tensor:
    """``step`` of complex tensors. Copies and writes back a state or a sample whose parts are not neighbors."""
    operator = "selective_state_update"
    _refuse_unequal(operator, x, A)
    _check_states(operator, A, state=(state, -1), B=(B, -1), C=(C, -1))
    if previous_B is not None and previous_B.dim() > 1:
        _check_states(operator, A, previous_B=(previous_B, -1))
    written = [(value, _memory(value)) for value in (state, previous_B)]
    columns = [None if memory is None else _columns(memory) if memory.is_complex() else memory for _, memory in written]
    out = step(columns[0], previous_x, columns[1], x, dt, *map(_columns, (A, B, C)), *others, is_complex=True, **options)
    for value, memory in written:
        if value is not None and memory is not None and memory is not value:
            value.copy_(memory)
    return out


def _memory(value: Tensor | None) -> Tensor | None:
    """The memory that the step writes to: the tensor itself, or a copy whose parts are neighbors."""
    if value is None or not value.is_complex() or (value.stride(-1) == 1 and not value.is_conj()):
        return value
    return value.resolve_conj().contiguous()
