# Written by scripts/generate_stubs.py.

from typing import Literal, overload

from torch import Tensor

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
    return_final_states: Literal[True],
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
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
    return_final_states: bool,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor, Tensor]]: ...
