"""``states_at`` of the scans: their states at chosen positions.

Without gradients and packed sequences one call of an operator returns them: ``_ssd_chunk_scan_states`` those at any positions,
``_selective_scan_fwd`` those at multiples of the chunk, from which short pieces lead to the others. On the CPU
``_ssd_chunk_scan_states`` is differentiable too. Otherwise the public operators run on the pieces between positions.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torchscript import refuse_tracing
from ._arguments import finite_dt_limit, is_autocast_enabled

__all__ = ["Positions", "selective_scan_with_states", "ssd_chunk_scan_with_states"]

Positions = Sequence[int] | Tensor
_Results = tuple[Tensor, Tensor, Tensor]

# The axes that a tensor of steps may have; without one of time, it is constant.
_SELECTIVE_RANKS = {"u": (3,), "delta": (3,), "B": (2, 3, 4), "C": (2, 3, 4), "z": (3,), "seq_idx": (2,)}
_SSD_RANKS = {"x": (4,), "dt": (3,), "B": (4,), "C": (4,), "z": (4,), "seq_idx": (2,), "log_decay": (3,), "gain": (3,)}
_MAY_BE_ABSENT = ("dt", "z", "seq_idx", "log_decay", "gain")


def chunk_length(dstate: int) -> int:
    """The steps between the states that ``_selective_scan_fwd`` saves: chunk_length of csrc/selective_scan/selective_scan.h."""
    return 32 if dstate <= 16 else 64


def selective_scan_with_states(states_at: Positions, inputs: dict[str, Any], options: dict[str, Any]) -> _Results:
    """``out``, ``last_state`` and the states at the positions.

    Args:
        inputs: the positional arguments of ``torch.ops.ssm_kernels.selective_scan``, in their order.
        options: its other arguments.
    """
    op = torch.ops.ssm_kernels.selective_scan
    u, initial_state, seq_idx, cu_seqlens = (inputs[name] for name in ("u", "initial_state", "seq_idx", "cu_seqlens"))
    if not _are_steps(inputs, _SELECTIVE_RANKS, -1):
        op(*inputs.values(), **options)  # raises
    seqlen = u.shape[-1]
    positions = _read("selective_scan", states_at, seqlen)
    sequences = [
        name for name in _SELECTIVE_RANKS if inputs[name] is not None and (inputs[name].dim() > 2 or name == "seq_idx")
    ]

    def of_steps(begin: int, end: int, state: Tensor | None) -> dict[str, Any]:
        return inputs | {name: inputs[name][..., begin:end] for name in sequences} | {"initial_state": state}

    if seq_idx is None and cu_seqlens is None and not _needs_public_operator(inputs.values()):
        chunk = chunk_length(inputs["A"].shape[-1])
        out, last_state, chunk_states = torch.ops.ssm_kernels._selective_scan_fwd(
            *(value for name, value in inputs.items() if name not in ("seq_idx", "cu_seqlens")), *options.values(), True
        )
        states: dict[int, Tensor] = {}
        for p in set(positions):
            state = last_state if p == seqlen else chunk_states[:, p // chunk]
            if p != seqlen and p % chunk != 0:
                piece = of_steps(p // chunk * chunk, p, state) | {"D": None, "z": None}
                state = op(*(piece | {"C": piece["B"]}).values(), **options)[1]
            states[p] = state
        return out, last_state, _stack(positions, states, last_state)

    def scan(begin: int, end: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        piece_cu_seqlens, state = _packed_piece(seq_idx, cu_seqlens, begin, end, seqlen, state)
        piece = of_steps(begin, end, state) | {"cu_seqlens": piece_cu_seqlens}
        result: tuple[Tensor, Tensor] = op(*piece.values(), **options)
        return result

    try:
        outputs, states, last_state = _scan_pieces(scan, positions, seqlen, initial_state)
    except ValueError:
        op(*inputs.values(), **options)  # the message has the sizes of the whole tensors
        raise
    if len(outputs) > 1 and u.stride(1) == 1 and u.stride(2) != 1:  # out has the layout of u
        out = torch.cat([piece.transpose(1, 2) for piece in outputs], 1).transpose(1, 2)
    else:
        out = _join(outputs, 2)
    return out, last_state, _of_positions(positions, seqlen, states, last_state, cu_seqlens)


def ssd_chunk_scan_with_states(states_at: Positions, arguments: dict[str, Any]) -> _Results:
    """``out``, ``final_states`` and the states at the positions.

    Args:
        arguments: all of ``torch.ops.ssm_kernels.ssd_chunk_scan``, by name and in its order.
    """
    op = torch.ops.ssm_kernels.ssd_chunk_scan
    required = ("x", "dt", "A", "B", "C")

    def call(**values: Any) -> tuple[Tensor, Tensor]:
        others = {name: value for name, value in values.items() if name not in required}
        result: tuple[Tensor, Tensor] = op(*(values[name] for name in required), **others)
        return result

    if not _are_steps(arguments, _SSD_RANKS, 1):
        call(**arguments)  # raises
    seqlen = arguments["x"].shape[1]
    positions = _read("ssd_chunk_scan", states_at, seqlen)
    sequences = [name for name in _SSD_RANKS if arguments[name] is not None]
    seq_idx, cu_seqlens = arguments["seq_idx"], arguments["cu_seqlens"]

    # On CUDA the adjoint of the operator is PyTorch matmuls; those of the pieces are fused kernels.
    is_differentiated = arguments["x"].device.type != "cpu" and _needs_grad(arguments.values())
    if cu_seqlens is None and not is_differentiated and not _is_transformed():
        return _ssd_chunk_scan_states(positions, arguments, call)

    def scan(begin: int, end: int, states: Tensor | None) -> tuple[Tensor, Tensor]:
        values = arguments | {name: arguments[name][:, begin:end] for name in sequences}
        values["cu_seqlens"], values["initial_states"] = _packed_piece(seq_idx, cu_seqlens, begin, end, seqlen, states)
        return call(**values)

    try:
        outputs, states, final_states = _scan_pieces(scan, positions, seqlen, arguments["initial_states"])
    except ValueError:
        call(**arguments)  # the message has the sizes of the whole tensors
        raise
    return _join(outputs, 1), final_states, _of_positions(positions, seqlen, states, final_states, cu_seqlens)


def _packed_piece(
    seq_idx: Tensor | None, cu_seqlens: Tensor | None, begin: int, end: int, seqlen: int, states: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """``cu_seqlens`` of the steps from ``begin`` to before ``end``, and the states before them: zero where ``seq_idx`` changes
    there."""
    if seq_idx is not None and begin > 0 and states is not None:
        one_each = (-1, *(1,) * (states.dim() - 1))
        resets = (seq_idx[:, begin] != seq_idx[:, begin - 1]).view(one_each)
        if cu_seqlens is not None:
            number, before = (_sequence_of(cu_seqlens, step) for step in (begin, begin - 1))
            rows = torch.arange(states.shape[0], device=states.device).view(one_each)
            resets = resets & (number == before) & (rows == number)
        states = states.masked_fill(resets, 0)
    if cu_seqlens is not None and (begin, end) != (0, seqlen):
        # Sequences that have ended, or not begun, have no steps here: their states pass through. The first and the last piece
        # leave the operator to check where cu_seqlens begins and ends.
        low, high = (begin if begin > 0 else None), (end if end < seqlen else None)
        cu_seqlens = cu_seqlens.clamp(low, high) - begin
    return cu_seqlens, states


def _of_positions(
    positions: list[int], seqlen: int, states: dict[int, Tensor], last: Tensor, cu_seqlens: Tensor | None
) -> Tensor:
    """(batch, positions, ...): with ``cu_seqlens``, of each position the state of the sequence of the step before it.

    Position 0 is that of the sequence of step 0. Without steps it has no sequence, and its state is zero.

    Args:
        states, last: of all sequences, as ``_scan_pieces`` returns them.
    """
    if cu_seqlens is None:
        return _stack(positions, states, last)
    chosen = {}
    for p in {0, *positions}:
        if (p == 0 and 0 not in states) or seqlen == 0 or last.shape[0] == 0:
            chosen[p] = last.new_zeros(1, *last.shape[1:])
        else:
            number = _sequence_of(cu_seqlens, max(p - 1, 0)).clamp(max=last.shape[0] - 1)
            chosen[p] = states.get(p, last).index_select(0, number)
    return _stack(positions, chosen, chosen[0])


def _ssd_chunk_scan_states(positions: list[int], arguments: dict[str, Any], call: Callable[..., Any]) -> _Results:
    """The results of one call of the operator that returns states beside them. ``call``: of the public operator."""
    low, high = finite_dt_limit(arguments["dt_limit"])
    values = arguments | {"dt_limit": low}
    operands = [item for name, value in values.items() for item in ((value, high) if name == "dt_limit" else (value,))]
    ascending = sorted(set(positions))
    try:
        out, final_states, states = torch.ops.ssm_kernels._ssd_chunk_scan_states(*operands, ascending)
    except Exception:
        call(**arguments)  # the message names the public operator
        raise
    if ascending != positions:  # without an index on the device, which the capture of a CUDA graph refuses
        each = states.unbind(1)
        states = torch.stack([each[ascending.index(p)] for p in positions], 1)
    return out, final_states, states


def _scan_pieces(
    scan: Callable[[int, int, Tensor | None], tuple[Tensor, Tensor]],
    positions: list[int],
    seqlen: int,
    state: Tensor | None,
) -> tuple[list[Tensor], dict[int, Tensor], Tensor]:
    """``out`` of each piece, the states at 0, if given, and at the positions before seqlen, and the last state.

    The dictionary does not hold the last state: an exported program's seqlen may be a symbol, which cannot be a key.

    Args:
        scan: returns ``out`` and the last state of the steps from the first to before the second number.
    """
    states = {} if state is None else {0: state}
    between = sorted({p for p in positions if 0 < p < seqlen})
    pieces = []
    for begin, end in itertools.pairwise([0, *between, seqlen]):
        pieces.append(scan(begin, end, state))
        state = pieces[-1][1]
    outputs, ends = ([piece[i] for piece in pieces] for i in (0, 1))
    return outputs, states | dict(zip(between, ends[:-1], strict=True)), ends[-1]


def _join(outputs: list[Tensor], time: int) -> Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, time)


def _stack(positions: list[int], states: dict[int, Tensor], last: Tensor) -> Tensor:
    """(batch, positions, ...), in the dtype of ``last``, (batch, ...). An absent state is zero at 0, and else ``last``."""
    if not positions:
        return last.new_empty(last.shape[0], 0, *last.shape[1:])
    absent = {0: torch.zeros_like(last)} if 0 in positions and 0 not in states else {}
    states = states | absent
    return torch.stack([states.get(p, last).to(last.dtype) for p in positions], 1)


def _sequence_of(cu_seqlens: Tensor, step: int) -> Tensor:
    """The packed sequence of a step, (1,); the host does not read it."""
    return (cu_seqlens[1:] <= step).sum(0, keepdim=True)


def _are_steps(arguments: dict[str, Any], ranks: Mapping[str, tuple[int, ...]], time: int) -> bool:
    """Whether the tensors of steps have one of their ranks and equally many steps."""
    lengths = []
    for name, allowed in ranks.items():
        value = arguments[name]
        if value is None and name in _MAY_BE_ABSENT:
            continue
        if not isinstance(value, Tensor) or value.dim() not in allowed:
            return False
        if not (name in "BC" and allowed != (4,) and value.dim() == 2):
            lengths.append(value.shape[time])
    return all(length == lengths[0] for length in lengths)


def _needs_public_operator(tensors: Iterable[Any]) -> bool:
    """Whether autograd, autocast or a transform has something to do, which the operator of kernels alone leaves out."""
    present = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    return _needs_grad(present) or is_autocast_enabled(present[0].device.type) or _is_transformed()


def _needs_grad(values: Iterable[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _is_transformed() -> bool:
    """Whether ``torch.func`` or an export needs the public operators, which alone have batching rules and other runtimes."""
    return torch._C._are_functorch_transforms_active() or torch.compiler.is_exporting()


def _read(name: str, states_at: Positions, seqlen: int) -> list[int]:
    refuse_tracing(name, "states_at")
    if isinstance(states_at, Tensor):
        if states_at.dim() != 1:
            raise ValueError(f"{name}: expected states_at of shape (positions,), got {list(states_at.shape)}")
        if states_at.dtype not in (torch.int32, torch.int64):
            raise RuntimeError(f"{name}: expected states_at of dtype int32 or int64, got {states_at.dtype}")
        if states_at.device.type != "cpu":
            raise RuntimeError(f"{name}: expected states_at on the CPU, where it is read, got {states_at.device}")
        positions = states_at.tolist()
    else:
        try:
            positions = [operator.index(p) for p in states_at]
        except TypeError:
            raise TypeError(f"{name}: expected states_at to be a sequence of ints or a tensor, got {states_at!r}") from None
    for p in positions:
        if not 0 <= p <= seqlen:
            raise ValueError(f"{name}: expected states_at from 0 to seqlen = {seqlen}, got {p}")
    return positions
