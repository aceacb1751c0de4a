# Written by scripts/generate_stubs.py.

from typing import Literal, overload

from torch import Tensor

from ..choices import DiscretizationName
from ._states_at import Positions

__all__ = ["selective_scan"]

@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: DiscretizationName = "zoh",
    alpha: float | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: Literal[False] = False,
    states_at: None = None,
) -> Tensor: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: DiscretizationName = "zoh",
    alpha: float | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: Literal[False] = False,
    states_at: Positions,
) -> tuple[Tensor, Tensor]: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: DiscretizationName = "zoh",
    alpha: float | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: Literal[True],
    states_at: None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: DiscretizationName = "zoh",
    alpha: float | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: Literal[True],
    states_at: Positions,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: DiscretizationName = "zoh",
    alpha: float | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool,
    states_at: None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: DiscretizationName = "zoh",
    alpha: float | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool,
    states_at: Positions | None,
) -> Tensor | tuple[Tensor, ...]: ...
