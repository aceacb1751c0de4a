# Written by scripts/generate_stubs.py.

from typing import Literal, overload

from torch import Tensor

from ..choices import CandidateActivation

__all__ = [
    "diag_linear_scan",
    "diag_linear_scan_summary",
    "diag_linear_step",
    "elu_gru_scan",
    "elu_gru_scan_summary",
    "elu_gru_step",
    "hgrn_scan",
    "hgrn_scan_summary",
    "hgrn_step",
    "linear_scan",
    "linear_scan_summary",
    "linear_step",
    "liquid_scan",
    "liquid_scan_summary",
    "liquid_step",
    "mingru_scan",
    "mingru_scan_summary",
    "mingru_step",
    "minlstm_scan",
    "minlstm_scan_summary",
    "minlstm_step",
    "rglru_scan",
    "rglru_scan_summary",
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
def linear_step(
    a: Tensor,
    b: Tensor,
    state: Tensor | None = None,
    *,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
def linear_scan_summary(
    a: Tensor,
    b: Tensor,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
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
def mingru_step(
    gate: Tensor,
    candidate: Tensor,
    state: Tensor | None = None,
    *,
    candidate_activation: CandidateActivation | None = None,
    gate_is_logit: bool = True,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of :func:`mingru_scan`; see :func:`linear_step`.

    Examples:
        >>> import torch
        >>> from ssm_kernels import mingru_step
        >>> gate, candidate = torch.rand(2, 2, 8)  # (batch, channels)
        >>> h, state = mingru_step(gate, candidate)  # from a state of zero
        >>> h, state = mingru_step(gate, candidate, state)
        >>> h.shape
        torch.Size([2, 8])"""

def mingru_scan_summary(
    gate: Tensor,
    candidate: Tensor,
    *,
    candidate_activation: CandidateActivation | None = None,
    gate_is_logit: bool = True,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The map of :func:`mingru_scan` from the state before all steps to the state after them.

    :func:`mingru_scan` documents the inputs, :func:`linear_scan_summary` the other arguments, the results and the errors.

    Examples:
        >>> import torch
        >>> from ssm_kernels import mingru_scan_summary
        >>> gate, candidate = torch.rand(2, 2, 100, 8)  # (batch, seqlen, channels)
        >>> last_state, decay = mingru_scan_summary(gate, candidate)
        >>> last_state.shape, decay.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))"""

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
def minlstm_step(
    forget: Tensor,
    input: Tensor,
    candidate: Tensor,
    state: Tensor | None = None,
    *,
    candidate_activation: CandidateActivation | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of :func:`minlstm_scan`; see :func:`linear_step`.

    Examples:
        >>> import torch
        >>> from ssm_kernels import minlstm_step
        >>> forget, input, candidate = torch.rand(3, 2, 8)  # (batch, channels)
        >>> h, state = minlstm_step(forget, input, candidate)  # from a state of zero
        >>> h, state = minlstm_step(forget, input, candidate, state)
        >>> h.shape
        torch.Size([2, 8])"""

def minlstm_scan_summary(
    forget: Tensor,
    input: Tensor,
    candidate: Tensor,
    *,
    candidate_activation: CandidateActivation | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The map of :func:`minlstm_scan` from the state before all steps to the state after them.

    :func:`minlstm_scan` documents the inputs, :func:`linear_scan_summary` the other arguments, the results and the errors.

    Examples:
        >>> import torch
        >>> from ssm_kernels import minlstm_scan_summary
        >>> forget, input, candidate = torch.rand(3, 2, 100, 8)  # (batch, seqlen, channels)
        >>> last_state, decay = minlstm_scan_summary(forget, input, candidate)
        >>> last_state.shape, decay.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))"""

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
def liquid_step(
    candidate: Tensor,
    tau: Tensor,
    dt: Tensor | float,
    state: Tensor | None = None,
    *,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of :func:`liquid_scan`; see :func:`linear_step`.

    Examples:
        >>> import torch
        >>> from ssm_kernels import liquid_step
        >>> candidate, tau, dt = torch.rand(3, 2, 8)  # (batch, channels)
        >>> h, state = liquid_step(candidate, tau, dt)  # from a state of zero
        >>> h, state = liquid_step(candidate, tau, dt, state)
        >>> h.shape
        torch.Size([2, 8])"""

def liquid_scan_summary(
    candidate: Tensor,
    tau: Tensor,
    dt: Tensor | float,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The map of :func:`liquid_scan` from the state before all steps to the state after them.

    :func:`liquid_scan` documents the inputs, :func:`linear_scan_summary` the other arguments, the results and the errors.

    Examples:
        >>> import torch
        >>> from ssm_kernels import liquid_scan_summary
        >>> candidate, tau, dt = torch.rand(3, 2, 100, 8)  # (batch, seqlen, channels)
        >>> last_state, decay = liquid_scan_summary(candidate, tau, dt)
        >>> last_state.shape, decay.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))"""

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
def rglru_step(
    recurrence_gate: Tensor,
    input_gate: Tensor,
    *,
    x: Tensor,
    recurrent_param: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of :func:`rglru_scan`; see :func:`linear_step`.

    Examples:
        >>> import torch
        >>> from ssm_kernels import rglru_step
        >>> recurrence_gate, input_gate, x, recurrent_param = torch.rand(4, 2, 8)  # (batch, channels)
        >>> h, state = rglru_step(recurrence_gate, input_gate, x=x, recurrent_param=recurrent_param)  # from a state of zero
        >>> h, state = rglru_step(recurrence_gate, input_gate, x=x, recurrent_param=recurrent_param, state=state)
        >>> h.shape
        torch.Size([2, 8])"""

def rglru_scan_summary(
    recurrence_gate: Tensor,
    input_gate: Tensor,
    *,
    x: Tensor,
    recurrent_param: Tensor,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The map of :func:`rglru_scan` from the state before all steps to the state after them.

    :func:`rglru_scan` documents the inputs, :func:`linear_scan_summary` the other arguments, the results and the errors.

    Examples:
        >>> import torch
        >>> from ssm_kernels import rglru_scan_summary
        >>> recurrence_gate, input_gate, x, recurrent_param = torch.rand(4, 2, 100, 8)  # (batch, seqlen, channels)
        >>> last_state, decay = rglru_scan_summary(recurrence_gate, input_gate, x=x, recurrent_param=recurrent_param)
        >>> last_state.shape, decay.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))"""

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
def hgrn_step(
    log_gate: Tensor,
    *,
    x: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of :func:`hgrn_scan`; see :func:`linear_step`.

    Examples:
        >>> import torch
        >>> from ssm_kernels import hgrn_step
        >>> log_gate, x = torch.rand(2, 2, 8)  # (batch, channels)
        >>> h, state = hgrn_step(log_gate, x=x)  # from a state of zero
        >>> h, state = hgrn_step(log_gate, x=x, state=state)
        >>> h.shape
        torch.Size([2, 8])"""

def hgrn_scan_summary(
    log_gate: Tensor,
    *,
    x: Tensor,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The map of :func:`hgrn_scan` from the state before all steps to the state after them.

    :func:`hgrn_scan` documents the inputs, :func:`linear_scan_summary` the other arguments, the results and the errors.

    Examples:
        >>> import torch
        >>> from ssm_kernels import hgrn_scan_summary
        >>> log_gate, x = torch.rand(2, 2, 100, 8)  # (batch, seqlen, channels)
        >>> last_state, decay = hgrn_scan_summary(log_gate, x=x)
        >>> last_state.shape, decay.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))"""

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
def elu_gru_step(
    gate: Tensor,
    candidate: Tensor,
    state: Tensor | None = None,
    *,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of :func:`elu_gru_scan`; see :func:`linear_step`.

    Examples:
        >>> import torch
        >>> from ssm_kernels import elu_gru_step
        >>> gate, candidate = torch.rand(2, 2, 8)  # (batch, channels)
        >>> h, state = elu_gru_step(gate, candidate)  # from a state of zero
        >>> h, state = elu_gru_step(gate, candidate, state)
        >>> h.shape
        torch.Size([2, 8])"""

def elu_gru_scan_summary(
    gate: Tensor,
    candidate: Tensor,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The map of :func:`elu_gru_scan` from the state before all steps to the state after them.

    :func:`elu_gru_scan` documents the inputs, :func:`linear_scan_summary` the other arguments, the results and the errors.

    Examples:
        >>> import torch
        >>> from ssm_kernels import elu_gru_scan_summary
        >>> gate, candidate = torch.rand(2, 2, 100, 8)  # (batch, seqlen, channels)
        >>> last_state, decay = elu_gru_scan_summary(gate, candidate)
        >>> last_state.shape, decay.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))"""

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
def diag_linear_step(
    gate: Tensor,
    x: Tensor,
    state: Tensor | None = None,
    *,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of :func:`diag_linear_scan`; see :func:`linear_step`.

    Examples:
        >>> import torch
        >>> from ssm_kernels import diag_linear_step
        >>> gate, x = torch.rand(2, 2, 8)  # (batch, channels)
        >>> h, state = diag_linear_step(gate, x)  # from a state of zero
        >>> h, state = diag_linear_step(gate, x, state)
        >>> h.shape
        torch.Size([2, 8])"""

def diag_linear_scan_summary(
    gate: Tensor,
    x: Tensor,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The map of :func:`diag_linear_scan` from the state before all steps to the state after them.

    :func:`diag_linear_scan` documents the inputs, :func:`linear_scan_summary` the other arguments, the results and the errors.

    Examples:
        >>> import torch
        >>> from ssm_kernels import diag_linear_scan_summary
        >>> gate, x = torch.rand(2, 2, 100, 8)  # (batch, seqlen, channels)
        >>> last_state, decay = diag_linear_scan_summary(gate, x)
        >>> last_state.shape, decay.shape
        (torch.Size([2, 8]), torch.Size([2, 8]))"""
