"""Calls of :func:`ssm_kernels.selective_scan`, of its summary and of :func:`ssm_kernels.selective_state_update` with a complex
``A``.

The operators take real tensors in which the real and the imaginary part of a state are neighbors, twice as many columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._scan_state import ScanState
from ._arguments import is_autocast_enabled
from ._two_samples import two_sample_scan

__all__ = ["columns", "complex_decay", "complex_scan", "complex_step", "complex_summary", "is_complex", "numbers"]

_MAX_DSTATE = 128


def is_complex(A: Any) -> bool:
    """Whether it is a complex tensor."""
    return isinstance(A, Tensor) and A.is_complex()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(operator: str, name: str, value: Any, A: Tensor) -> None:
    if not isinstance(value, Tensor):
        return  # the operator names it
    if not value.is_complex():
        hint = f"torch.complex({name}, torch.zeros_like({name}))"
        raise RuntimeError(f"{operator}: expected a complex {name} with a complex A, got {_name(value.dtype)}: pass {hint}")
    if value.dtype != A.dtype:
        raise RuntimeError(f"{operator}: expected {name} of dtype {_name(A.dtype)}, that of A, got {_name(value.dtype)}")


def columns(value: Tensor) -> Tensor:
    """(..., dstate), complex, as (..., 2 dstate), real: a view."""
    return torch.view_as_real(value.resolve_conj()).flatten(-2)


def _rows(value: Tensor) -> Tensor:
    """(..., dstate, seqlen) as (..., 2 dstate, seqlen), whose states are contiguous: a view if those of the argument are."""
    return columns(value.movedim(-1, 1).contiguous()).movedim(1, -1)


def numbers(value: Tensor) -> Tensor:
    """(..., 2 dstate), real, as (..., dstate), complex."""
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
    """Raises unless ``A`` is complex64, or complex128 beside a float64 ``u``."""
    if isinstance(u, Tensor):
        expected = torch.complex128 if u.dtype == torch.float64 else torch.complex64
        if A.dtype != expected:
            given = f"{_name(expected)} beside {_name(u.dtype)}, got {_name(A.dtype)}"
            raise RuntimeError(f"{operator}: expected a complex A of dtype {given}")


# The operators' checks count the real and the imaginary part of a state, so that their messages would name other shapes than
# the caller's.
def _check_A(operator: str, A: Tensor, axes: str, channels: Sequence[Any]) -> None:
    if A.dim() != len(channels) + 1 or [*A.shape[:-1]] != [*channels]:
        expected = f"{axes}, whose first {'size is' if len(channels) == 1 else 'sizes are'} {', '.join(map(str, channels))}"
        raise ValueError(f"{operator}: expected a complex A of shape {expected}, got {[*A.shape]}")
    if not 1 <= A.shape[-1] <= _MAX_DSTATE:
        raise ValueError(f"{operator}: expected dstate from 1 to {_MAX_DSTATE} with a complex A, got {A.shape[-1]}")


def _check_shape(operator: str, name: str, value: Any, shapes: dict[str, list[Any]]) -> None:
    """Raises unless the shape is the one of those, by axes, that has as many sizes."""
    if not isinstance(value, Tensor) or [*value.shape] in shapes.values():
        return
    alike = {axes: shape for axes, shape in shapes.items() if len(shape) == value.dim()}
    expected = " or ".join(f"{axes} = {shape}" for axes, shape in alike.items()) or " or ".join(shapes)
    raise ValueError(f"{operator}: expected {name} of shape {expected}, got {[*value.shape]}")


def _check_shapes(operator: str, u: Any, A: Tensor, B: Any, C: Any, initial_state: Any, previous: Any, cu_seqlens: Any) -> None:
    if not isinstance(u, Tensor) or u.dim() != 3:
        return  # the operator names it
    batch, dim, seqlen = u.shape
    _check_A(operator, A, "(dim, dstate)", [dim])
    dstate = A.shape[1]
    for name, value in (("B", B), ("C", C)):
        groups = value.shape[1] if isinstance(value, Tensor) and value.dim() == 4 else 1
        shapes = {
            "(dim, dstate)": [dim, dstate],
            "(batch, dstate, seqlen)": [batch, dstate, seqlen],
            "(batch, groups, dstate, seqlen)": [batch, groups, dstate, seqlen],
        }
        _check_shape(operator, name, value, shapes)
    axis, sequences = "batch", batch
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1:
        axis, sequences = "sequences", cu_seqlens.shape[0] - 1
    _check_shape(operator, "initial_state", initial_state, {f"({axis}, dim, dstate)": [sequences, dim, dstate]})
    if not isinstance(previous, (tuple, list)) or len(previous) != 2 or not isinstance(B, Tensor):
        return
    if (previous[1] is None) != (B.dim() == 2):
        got = f"{'None' if previous[1] is None else 'a tensor'} with B of shape {[*B.shape]}"
        raise ValueError(f"{operator}: expected the B of previous to be a tensor, or None where B is constant, got {got}")
    of_groups = [*B.shape[1:-1]]
    axes = f"({axis}, dstate)" if len(of_groups) == 1 else f"({axis}, groups, dstate)"
    _check_shape(operator, "previous_B", previous[1], {axes: [sequences, *of_groups]})


def complex_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *others: Any,
    initial_state: Any,
    previous: Any,
    operator: str = "selective_scan",
    scan: Callable[..., Any] = two_sample_scan,
    **options: Any,
) -> Any:
    """``scan``, a function such as :func:`two_sample_scan`, of complex tensors. The states among its results are complex, too.

    ``operator`` is the name in errors.
    """
    _refuse_unequal(operator, u, A)
    for name, value in (("B", B), ("C", C), ("initial_state", initial_state)):
        _check(operator, name, value, A)
    given_B = previous[1] if isinstance(previous, (tuple, list)) and len(previous) == 2 else None
    _check(operator, "previous_B", given_B, A)
    _check_shapes(operator, u, A, B, C, initial_state, previous, options.get("cu_seqlens"))
    is_constant = isinstance(B, Tensor) and B.dim() == 2
    matrices = [X if not isinstance(X, Tensor) else columns(X) if X.dim() == 2 else _rows(X) for X in (B, C)]
    if isinstance(given_B, Tensor):
        previous = (previous[0], columns(given_B))
    results = scan(
        *(u, delta, columns(A), *matrices, *others),
        initial_state=None if initial_state is None else columns(initial_state),
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
        return numbers(state)
    return ScanState(numbers(state.state), state.u, None if has_constant_B or state.B is None else numbers(state.B))


def complex_summary(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    *,
    delta_bias: Tensor | None,
    discretization: str,
    delta_A: Tensor | None,
    delta_softplus: bool,
    seq_idx: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """:func:`ssm_kernels.selective_scan_summary` of complex tensors."""
    operator = "selective_scan_summary"
    if delta_A is not None:
        raise NotImplementedError(f"{operator}: delta_A is not supported with a complex A")
    of_steps: Any = {"delta_bias": delta_bias, "discretization": discretization, "delta_softplus": delta_softplus}
    last = _last_state(operator, u, delta, A, B, initial_state=None, seq_idx=seq_idx, **of_steps, **options)
    return last, complex_decay(u, delta, A, seq_idx=seq_idx, **of_steps)


def _last_state(
    operator: str, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, delta_bias: Tensor | None, **options: Any
) -> Tensor:
    _, last = complex_scan(
        *(u, delta, A, B, B, None, None, delta_bias),
        operator=operator,
        alpha=None,
        delta_A=None,
        reverse=False,
        cu_seqlens=None,
        return_last_state=True,
        states_at=None,
        conjugate_pairs=False,
        **options,
    )
    return last if isinstance(last, Tensor) else last.state


def complex_decay(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    *,
    delta_bias: Tensor | None,
    discretization: str,
    delta_softplus: bool,
    seq_idx: Tensor | None,
) -> Tensor:
    """The product of the decays of all steps, (batch, dim, dstate), and zero in rows in which a sequence begins.

    Where the decay of a step is not an exponential, it is the last state of a scan from one without input.
    """
    if discretization in ("bilinear", "trapezoidal"):
        ones, no_input = torch.ones(*u.shape[:2], A.shape[1], dtype=A.dtype, device=A.device), torch.zeros_like(u)
        of_scan: Any = {
            "delta_softplus": delta_softplus,
            "lam": None,
            "lam_sigmoid": False,
            "previous": "zero",
            "seq_idx": None,
        }
        decay = _last_state(
            *("selective_scan_summary", no_input, delta, A, torch.zeros_like(A), delta_bias),
            discretization="bilinear",
            initial_state=ones,
            **of_scan,
        )
    else:
        if is_autocast_enabled(delta.device.type) and delta.dtype != torch.float64:
            delta = delta.to(torch.get_autocast_dtype(delta.device.type))
        steps = delta.to(A.real.dtype)
        steps = steps if delta_bias is None else steps + delta_bias[:, None]
        steps = F.softplus(steps) if delta_softplus else steps
        total, rate = steps.sum(-1, keepdim=True, dtype=torch.float64), A.to(torch.complex128)
        # An infinite sum has the decay and the gradient zero, not the NaN of zero times infinity.
        total = total.clamp(max=torch.finfo(torch.float64).max)
        magnitude = (rate.real * total).exp()
        decay = torch.polar(magnitude, torch.where(magnitude == 0, 0, rate.imag * total)).to(A.dtype)
    if seq_idx is None:
        return decay
    return decay.masked_fill((seq_idx[:, 1:] != seq_idx[:, :-1]).any(1)[:, None, None], 0)


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
    if isinstance(state, Tensor) and state.dim() in (3, 4):
        axes = "(dim, dstate)" if state.dim() == 3 else "(heads, headdim, dstate)"
        _check_A(operator, A, axes, state.shape[1:-1])
    if previous_B is not None and previous_B.dim() > 1:
        _check_states(operator, A, previous_B=(previous_B, -1))
    written = [(value, _memory(value)) for value in (state, previous_B)]
    given = [None if memory is None else columns(memory) if memory.is_complex() else memory for _, memory in written]
    out = step(given[0], previous_x, given[1], x, dt, *map(columns, (A, B, C)), *others, is_complex=True, **options)
    for value, memory in written:
        if value is not None and memory is not None and memory is not value:
            value.copy_(memory)
    return out


def _memory(value: Tensor | None) -> Tensor | None:
    """The memory that the step writes to: the tensor itself, or a copy whose parts are neighbors."""
    if value is None or not value.is_complex() or (value.stride(-1) == 1 and not value.is_conj()):
        return value
    return value.resolve_conj().contiguous()
