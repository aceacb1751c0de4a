# Written by scripts/generate_stubs.py.

import math
from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from ..choices import ExponentialDiscretizationName
from ._states_at import Positions

__all__ = ["ssd_chunk_scan"]

@overload
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] | None = (0.0, math.inf),
    initial_states: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: Literal[False] = False,
    discretization: ExponentialDiscretizationName = "zoh",
    states_at: None = None,
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
) -> Tensor: ...
@overload
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] | None = (0.0, math.inf),
    initial_states: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: Literal[False] = False,
    discretization: ExponentialDiscretizationName = "zoh",
    states_at: Positions,
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] | None = (0.0, math.inf),
    initial_states: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: Literal[True],
    discretization: ExponentialDiscretizationName = "zoh",
    states_at: None = None,
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] | None = (0.0, math.inf),
    initial_states: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: Literal[True],
    discretization: ExponentialDiscretizationName = "zoh",
    states_at: Positions,
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] | None = (0.0, math.inf),
    initial_states: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: bool,
    discretization: ExponentialDiscretizationName = "zoh",
    states_at: None = None,
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] | None = (0.0, math.inf),
    initial_states: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: bool,
    discretization: ExponentialDiscretizationName = "zoh",
    states_at: Positions | None,
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]: ...
