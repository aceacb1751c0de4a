# Written by scripts/generate_stubs.py.

from typing import Literal, overload

from torch import Tensor

from ..choices import CandidateActivation
from .recurrence_steps import (
    diag_linear_step,
    elu_gru_step,
    hgrn_step,
    linear_step,
    liquid_step,
    mingru_step,
    minlstm_step,
    rglru_step,
)

__all__ = [
    "diag_linear_scan",
    "diag_linear_step",
    "elu_gru_scan",
    "elu_gru_step",
    "hgrn_scan",
    "hgrn_step",
    "linear_scan",
    "linear_step",
    "liquid_scan",
    "liquid_step",
    "mingru_scan",
    "mingru_step",
    "minlstm_scan",
    "minlstm_step",
    "rglru_scan",
    "rglru_step",
]

@overload
def linear_scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: Literal[False] = False,
) -> Tensor: ...
@overload
def linear_scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def mingru_scan(
    gate: Tensor,
    candidate: Tensor,
    h0: Tensor | None = None,
    *,
    candidate_activation: CandidateActivation | None = None,
    gate_is_logit: bool = True,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: Literal[False] = False,
) -> Tensor: ...
@overload
def mingru_scan(
    gate: Tensor,
    candidate: Tensor,
    h0: Tensor | None = None,
    *,
    candidate_activation: CandidateActivation | None = None,
    gate_is_logit: bool = True,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def mingru_scan(
    gate: Tensor,
    candidate: Tensor,
    h0: Tensor | None = None,
    *,
    candidate_activation: CandidateActivation | None = None,
    gate_is_logit: bool = True,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def minlstm_scan(
    forget: Tensor,
    input: Tensor,
    candidate: Tensor,
    h0: Tensor | None = None,
    *,
    candidate_activation: CandidateActivation | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: Literal[False] = False,
) -> Tensor: ...
@overload
def minlstm_scan(
    forget: Tensor,
    input: Tensor,
    candidate: Tensor,
    h0: Tensor | None = None,
    *,
    candidate_activation: CandidateActivation | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def minlstm_scan(
    forget: Tensor,
    input: Tensor,
    candidate: Tensor,
    h0: Tensor | None = None,
    *,
    candidate_activation: CandidateActivation | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def liquid_scan(
    candidate: Tensor,
    tau: Tensor,
    dt: Tensor | float,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: Literal[False] = False,
) -> Tensor: ...
@overload
def liquid_scan(
    candidate: Tensor,
    tau: Tensor,
    dt: Tensor | float,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def liquid_scan(
    candidate: Tensor,
    tau: Tensor,
    dt: Tensor | float,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def rglru_scan(
    recurrence_gate: Tensor,
    input_gate: Tensor,
    *,
    x: Tensor,
    recurrent_param: Tensor,
    h0: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: Literal[False] = False,
) -> Tensor: ...
@overload
def rglru_scan(
    recurrence_gate: Tensor,
    input_gate: Tensor,
    *,
    x: Tensor,
    recurrent_param: Tensor,
    h0: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def rglru_scan(
    recurrence_gate: Tensor,
    input_gate: Tensor,
    *,
    x: Tensor,
    recurrent_param: Tensor,
    h0: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def hgrn_scan(
    log_gate: Tensor,
    *,
    x: Tensor,
    h0: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: Literal[False] = False,
) -> Tensor: ...
@overload
def hgrn_scan(
    log_gate: Tensor,
    *,
    x: Tensor,
    h0: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def hgrn_scan(
    log_gate: Tensor,
    *,
    x: Tensor,
    h0: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def elu_gru_scan(
    gate: Tensor,
    candidate: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: Literal[False] = False,
) -> Tensor: ...
@overload
def elu_gru_scan(
    gate: Tensor,
    candidate: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def elu_gru_scan(
    gate: Tensor,
    candidate: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def diag_linear_scan(
    gate: Tensor,
    x: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: Literal[False] = False,
) -> Tensor: ...
@overload
def diag_linear_scan(
    gate: Tensor,
    x: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def diag_linear_scan(
    gate: Tensor,
    x: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
