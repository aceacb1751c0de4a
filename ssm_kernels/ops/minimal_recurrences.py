"""The scans of minimal recurrent networks: minGRU with each of its candidates, and minLSTM. Typed like ``selective_scan.py``.

``recurrences.py`` exports them.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from ..choices import CandidateActivation
from ._arguments import names_arguments
from ._masks import time_options

__all__ = ["elu_gru_scan", "mingru_scan", "minlstm_scan"]

_operators = torch.ops.ssm_kernels


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
@names_arguments
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
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""All states of a minGRU.

    .. math::
        z_t &= \sigma(\mathrm{gate}_t), \text{ or } \mathrm{gate}_t \text{ itself without gate\_is\_logit} \\
        h_t &= (1 - z_t)\, h_{t-1} + z_t\, g(\mathrm{candidate}_t)

    Source: Feng et al., *Were RNNs All We Needed?* (arXiv 2410.01201), section 3.1, and its appendix for :math:`g`; here
    not in log-space, so that a candidate may have any sign.

    Args:
        gate: (batch, seqlen, channels), the update gate.
        candidate: shape and dtype of ``gate``.
        candidate_activation: None for the candidate itself, ``"g"`` for the paper's positive one, ``x + 1/2`` where
            ``x >= 0`` and ``sigmoid(x)`` elsewhere, or ``"tanh"``.
        gate_is_logit: apply the sigmoid to ``gate``.

    :func:`linear_scan` documents the other arguments, the results and the errors.

    Examples:
        >>> import torch
        >>> from ssm_kernels import mingru_scan
        >>> gate, candidate = torch.tensor([[[0.0], [0.0], [0.0]]]), torch.tensor([[[1.0], [1.0], [1.0]]])
        >>> mingru_scan(gate, candidate).flatten()  # a logit of 0 is a gate of 1/2
        tensor([0.5000, 0.7500, 0.8750])
        >>> x = torch.randn(2, 100, 16)
        >>> mingru_scan(x, x, torch.zeros(2, 16), candidate_activation="g").shape
        torch.Size([2, 100, 16])
    """
    results: tuple[Tensor, Tensor] = _operators.mingru_scan.default(
        gate,
        candidate,
        h0,
        candidate_activation=candidate_activation,
        gate_is_logit=gate_is_logit,
        **time_options("mingru_scan", reverse, cu_seqlens, reset),
    )
    return results if return_last_state else results[0]


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
@names_arguments
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
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""All states of a minLSTM, whose forget and input gates are normalized to the sum 1.

    .. math::
        f_t &= \sigma(\mathrm{forget}_t), \quad i_t = \sigma(\mathrm{input}_t) \\
        h_t &= \frac{f_t}{f_t + i_t} h_{t-1} + \frac{i_t}{f_t + i_t}\, g(\mathrm{candidate}_t)

    The gates are computed as :math:`i' = \sigma(\mathrm{softplus}(-\mathrm{forget}) - \mathrm{softplus}(-\mathrm{input}))` and
    :math:`f' = 1 - i'`, which is finite where both sigmoids underflow. Where both gates are :math:`-\infty` they have no limit,
    and the result is NaN.
    Source: Feng et al., *Were RNNs All We Needed?* (arXiv 2410.01201), section 3.2, and its appendix for :math:`g`.

    Args:
        forget: (batch, seqlen, channels), before the sigmoid.
        input: shape and dtype of ``forget``, before the sigmoid.
        candidate: shape and dtype of ``forget``.
        candidate_activation: as for :func:`mingru_scan`.

    :func:`linear_scan` documents the other arguments, the results and the errors.

    Examples:
        >>> import torch
        >>> from ssm_kernels import minlstm_scan
        >>> gate, candidate = torch.tensor([[[0.0], [0.0], [0.0]]]), torch.tensor([[[1.0], [1.0], [1.0]]])
        >>> minlstm_scan(gate, gate, candidate).flatten()  # forget and input gate are equal
        tensor([0.5000, 0.7500, 0.8750])
    """
    results: tuple[Tensor, Tensor] = _operators.minlstm_scan.default(
        forget,
        input,
        candidate,
        h0,
        candidate_activation=candidate_activation,
        **time_options("minlstm_scan", reverse, cu_seqlens, reset),
    )
    return results if return_last_state else results[0]


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
@names_arguments
def elu_gru_scan(
    gate: Tensor,
    candidate: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""All states of a minGRU with the positive candidate ``1 + elu(x)``.

    .. math::
        z_t &= \sigma(\mathrm{gate}_t) \\
        h_t &= (1 - z_t)\, h_{t-1} + z_t\, (1 + \mathrm{elu}(\mathrm{candidate}_t))

    ``1 + elu(x)`` is ``x + 1`` for ``x > 0``, else ``e^x``. The scan otherwise equals :func:`mingru_scan`
    with ``candidate_activation="g"``, and is smooth where ``"g"`` has a kink.

    Args:
        gate: (batch, seqlen, channels), the update gate before the sigmoid.
        candidate: shape and dtype of ``gate``.

    :func:`linear_scan` documents the other arguments, the results and the errors.

    Examples:
        >>> import torch
        >>> from ssm_kernels import elu_gru_scan
        >>> gate, candidate = torch.tensor([[[0.0], [0.0], [0.0]]]), torch.tensor([[[1.0], [1.0], [1.0]]])
        >>> elu_gru_scan(gate, candidate).flatten()
        tensor([1.0000, 1.5000, 1.7500])
    """
    results: tuple[Tensor, Tensor] = _operators.elu_gru_scan.default(
        gate, candidate, h0, **time_options("elu_gru_scan", reverse, cu_seqlens, reset)
    )
    return results if return_last_state else results[0]
