# Written by scripts/generate_stubs.py.

from typing import Literal, overload

from torch import Tensor

from .._mamba3_state import Mamba3State

__all__ = ["mamba3_chunk_scan"]

@overload
def mamba3_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    trap: Tensor,
    angles: Tensor,
    *,
    B_bias: Tensor | None = None,
    C_bias: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    mimo_x: Tensor | None = None,
    mimo_z: Tensor | None = None,
    mimo_out: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    rotate: str = "pairs",
    chunk_size: int | None = None,
    initial_states: Mamba3State | tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    return_final_states: Literal[False] = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
) -> Tensor: ...
@overload
def mamba3_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    trap: Tensor,
    angles: Tensor,
    *,
    B_bias: Tensor | None = None,
    C_bias: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    mimo_x: Tensor | None = None,
    mimo_z: Tensor | None = None,
    mimo_out: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    rotate: str = "pairs",
    chunk_size: int | None = None,
    initial_states: Mamba3State | tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    return_final_states: Literal[True],
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Mamba3State]: ...
@overload
def mamba3_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    trap: Tensor,
    angles: Tensor,
    *,
    B_bias: Tensor | None = None,
    C_bias: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    mimo_x: Tensor | None = None,
    mimo_z: Tensor | None = None,
    mimo_out: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    rotate: str = "pairs",
    chunk_size: int | None = None,
    initial_states: Mamba3State | tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    return_final_states: bool,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
) -> Tensor | tuple[Tensor, Mamba3State]: ...
