# Written by scripts/generate_stubs.py.

from typing import Any, Literal, overload

from torch import Tensor

from ._states_at import Positions

__all__ = ["mlstm_scan"]

@overload
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
    return_final_states: Literal[False] = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    states_at: None = None,
    reverse: bool = False,
) -> Tensor: ...
@overload
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
    return_final_states: Literal[False] = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    states_at: Positions,
    reverse: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]: ...
@overload
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
    return_final_states: Literal[True],
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    states_at: None = None,
    reverse: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]: ...
@overload
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
    return_final_states: Literal[True],
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    states_at: Positions,
    reverse: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]: ...
@overload
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
    return_final_states: bool,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    states_at: None = None,
    reverse: bool = False,
) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor, Tensor]]: ...
@overload
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
    return_final_states: bool,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    states_at: Positions | None,
    reverse: bool = False,
) -> Tensor | tuple[Any, ...]: ...
