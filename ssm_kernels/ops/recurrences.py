"""The gated linear recurrences: a documented scan for each row of ``csrc/common/recurrences.h``.

A loop at the end of the module makes the steps and the summaries from the scans. ``recurrences.pyi`` has the types:
``scripts/generate_stubs.py`` writes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._recurrences import recurrences
from ..choices import CandidateActivation
from ._arguments import names_arguments
from ._masks import as_mask, reset_state, time_options
from ._recurrence_functions import make_step, make_summary
from ._step_sizes import step_size

__all__ = [name for row in recurrences.values() for name in (row.scan, row.step, row.summary)]

_operators = torch.ops.ssm_kernels


@names_arguments
def linear_scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""All states of a linear recurrence, computed for each channel by itself.

    .. math:: h_t = a_t h_{t-1} + b_t

    The other scans of the family compute :math:`a` and :math:`b` from gates and candidates, in the same kernel. This docstring
    documents inputs, ``h0``, options and results for all of them.

    Args:
        a: (batch, seqlen, channels); float32, float16, bfloat16 or float64. Any value, any strides. The other inputs of a scan
            have its shape, dtype and device. Inputs that broadcast, as the scan's documentation says, may have any shape that
            broadcasts to it, and its dtype or the dtype of ``h0``.
        b: shape and dtype of ``a``.
        h0: state before the first step, (batch, channels), float32 (float64 with float64 inputs); zero if absent.
        reverse: time runs backwards, from the last step to the first, also in each packed sequence. ``h0`` is then the state
            before the last step, and ``last_state`` the state at step 0.
        cu_seqlens: (sequences + 1,), int32 or int64: the batch, then of size 1, holds sequences one after another, and sequence
            ``i`` is steps ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1``. It starts at 0, ends at seqlen and does not decrease;
            a sequence may have no steps. Sequences are independent: ``h0`` and ``last_state`` are
            (sequences, channels). The values are not checked while a CUDA graph is captured or replayed. Wrong values then
            give wrong numbers, but no access outside the tensors.
        reset: (batch, seqlen) or (batch, seqlen, 1), bool or of an integer or floating-point dtype. Where it is true, or not
            zero, the sequence starts anew: the state before that step is dropped, and ``h0`` of that row of the batch, or zero,
            takes its place. With ``reverse`` the state before step t is that of step t + 1. The gradient of ``h0`` sums over
            all starts. ``last_state`` is the state after the last step. Not together with ``cu_seqlens``, whose sequences have
            an ``h0`` each.
        return_last_state: also return the state after the last step.

    Returns:
        ``h``, every state, shape and dtype of ``a``; with ``return_last_state`` also ``last_state``, (batch, channels), dtype
        of ``h0``, which for a sequence of no steps is its ``h0``. Both are differentiable with respect to every floating-point
        tensor argument, ``h0`` included. Double backward is supported by ``linear_scan`` alone and raises in the others;
        transforms of ``torch.func`` other than ``vmap`` are not supported and raise.

    The operator runs on CPU and on CUDA (compute capability 8.0 and newer) and gives the same bits every time. States and sums
    are float32 (float64 with float64 inputs), whatever the dtype of the inputs. They are not in log-space: values may have any
    sign, and long sequences lose no accuracy. On CUDA products of up to 128 consecutive ``a`` must be finite, unless they
    multiply a zero. Autograd saves the inputs and ``h``. The gradient of an input that broadcasts is summed in float32 (float64
    with float64 inputs) and rounded once. On CUDA the gradient of ``h0`` with a ``reset`` takes temporary memory of the size of
    ``h`` in float32 (float64 with float64 inputs). On CUDA the operator launches on the current stream and can be captured in a
    CUDA graph. The host waits for the device only to check the values of ``cu_seqlens``, and not while a graph is being
    captured. Autocast casts the inputs to its dtype, except inputs that broadcast and ``h0``, which it casts to float32.

    Raises:
        ValueError: a shape, the values of ``cu_seqlens`` or a candidate activation are not as documented.
        RuntimeError: a dtype, layout or device is not supported, or the device has no kernel.
        TypeError: an argument is not a tensor where one is expected, or a required tensor is None.

    Examples:
        >>> import torch
        >>> from ssm_kernels import linear_scan
        >>> a, b = torch.tensor([[[0.5], [0.5], [0.5]]]), torch.tensor([[[1.0], [1.0], [1.0]]])  # (batch, seqlen, channels)
        >>> linear_scan(a, b).flatten()
        tensor([1.0000, 1.5000, 1.7500])
        >>> h, last_state = linear_scan(a, b, torch.tensor([[8.0]]), return_last_state=True)
        >>> last_state
        tensor([[2.7500]])
        >>> linear_scan(a, b, reset=torch.tensor([[False, False, True]])).flatten()  # a sequence begins at step 2
        tensor([1.0000, 1.5000, 1.0000])
    """
    results: tuple[Tensor, Tensor] = _operators.linear_scan.default(
        a, b, h0, **time_options("linear_scan", reverse, cu_seqlens, reset)
    )
    return results if return_last_state else results[0]


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


@names_arguments
def liquid_scan(
    candidate: Tensor,
    tau: Tensor,
    dt: Tensor | float,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""All states of a leaky integrator whose target, time constant and step size may change with every step.

    .. math:: h_t = f_t + (h_{t-1} - f_t)\, e^{-\mathrm{dt}_t / \tau_t}, \quad f = \mathrm{candidate}

    This is the exact solution of :math:`\tau\, \mathrm dh/\mathrm dt = f - h` over a step in which :math:`f` and :math:`\tau`
    are constant: the relaxation of liquid time-constant networks (Hasani et al., arXiv 2006.04439) in closed form, for an
    :math:`f` and :math:`\tau` that do not depend on the state.

    Args:
        candidate: (batch, seqlen, channels).
        tau: time constant, not zero; broadcasts, such as (channels,). Positive for a decay.
        dt: step size; broadcasts, such as (batch, seqlen, 1) for irregular sampling, or a number.

    :func:`linear_scan` documents the other arguments, the results and the errors.

    Raises:
        ValueError: ``dt`` is a number that is negative, NaN, or finite and beyond the range of the states' dtype.
        TypeError: ``dt`` is neither a tensor nor a number, another argument is not a tensor, or a required tensor is None.

    Examples:
        >>> import torch
        >>> from ssm_kernels import liquid_scan
        >>> candidate, dt = torch.tensor([[[1.0], [1.0], [1.0]]]), torch.tensor([[[1.0], [5.0], [0.5]]])  # steps of any length
        >>> liquid_scan(candidate, torch.tensor([2.0]), dt).flatten()
        tensor([0.3935, 0.9502, 0.9612])
    """
    results: tuple[Tensor, Tensor] = _operators.liquid_scan.default(
        candidate, tau, step_size("liquid_scan", dt, candidate), h0, **time_options("liquid_scan", reverse, cu_seqlens, reset)
    )
    return results if return_last_state else results[0]


@names_arguments
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
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""All states of Griffin's real-gated linear recurrent unit (RG-LRU).

    .. math::
        \log a_t &= -8\, \mathrm{softplus}(\mathrm{recurrent\_param})\, \sigma(\mathrm{recurrence\_gate}_t) \\
        h_t &= a_t h_{t-1} + \sqrt{1 - a_t^2}\; \sigma(\mathrm{input\_gate}_t)\, x_t

    Source: De et al., *Griffin* (arXiv 2402.19427), equations 1 to 4, with :math:`\Lambda = -\mathrm{recurrent\_param}`: the
    parameter as ``recurrentgemma`` and ``transformers`` store it.

    Args:
        recurrence_gate: (batch, seqlen, channels), before the sigmoid.
        input_gate: shape and dtype of ``recurrence_gate``, before the sigmoid.
        x: shape and dtype of ``recurrence_gate``. Keyword-only, like all later arguments, so that no call passes it as a gate.
        recurrent_param: broadcasts; as a rule (channels,).

    :func:`linear_scan` documents the other arguments, the results and the errors.

    Examples:
        >>> import torch
        >>> from ssm_kernels import rglru_scan
        >>> gates, x = torch.tensor([[[0.0], [0.0], [0.0]]]), torch.tensor([[[1.0], [1.0], [1.0]]])  # raw gates, for both
        >>> rglru_scan(gates, gates, x=x, recurrent_param=torch.tensor([0.1])).flatten()
        tensor([0.4994, 0.5248, 0.5261])
    """
    results: tuple[Tensor, Tensor] = _operators.rglru_scan.default(
        recurrence_gate,
        input_gate,
        x=x,
        recurrent_param=recurrent_param,
        h0=h0,
        **time_options("rglru_scan", reverse, cu_seqlens, reset),
    )
    return results if return_last_state else results[0]


@names_arguments
def hgrn_scan(
    log_gate: Tensor,
    *,
    x: Tensor,
    h0: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""All states of a hierarchically gated recurrent network (HGRN), with gates in log-space.

    .. math:: h_t = e^{\mathrm{log\_gate}_t} h_{t-1} + x_t

    Source: Qin et al., *Hierarchically Gated Recurrent Neural Network* (arXiv 2311.04823), in the form of
    ``flash-linear-attention``'s kernel: the forget gate is given as its logarithm, and the gated input as ``x``.

    Args:
        log_gate: (batch, seqlen, channels), the logarithm of the forget gate; at most 0 for a decay.
        x: shape and dtype of ``log_gate``. Keyword-only, like all later arguments, so that no call passes it as the gate.

    :func:`linear_scan` documents the other arguments, the results and the errors.

    Examples:
        >>> import torch
        >>> from ssm_kernels import hgrn_scan
        >>> log_gate, x = torch.tensor([[[-0.5], [-0.5], [-0.5]]]), torch.tensor([[[1.0], [1.0], [1.0]]])
        >>> hgrn_scan(log_gate, x=x).flatten()
        tensor([1.0000, 1.6065, 1.9744])
    """
    results: tuple[Tensor, Tensor] = _operators.hgrn_scan.default(
        log_gate, x=x, h0=h0, **time_options("hgrn_scan", reverse, cu_seqlens, reset)
    )
    return results if return_last_state else results[0]


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


@names_arguments
def diag_linear_scan(
    gate: Tensor,
    x: Tensor,
    h0: Tensor | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    reset: Tensor | None = None,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""All states of a diagonal linear recurrence with a sigmoid gate.

    .. math:: h_t = \sigma(\mathrm{gate}_t)\, h_{t-1} + x_t

    Args:
        gate: (batch, seqlen, channels), the forget gate before the sigmoid.
        x: shape and dtype of ``gate``.

    :func:`linear_scan` documents the other arguments, the results and the errors.

    Examples:
        >>> import torch
        >>> from ssm_kernels import diag_linear_scan
        >>> gate, x = torch.tensor([[[0.0], [0.0], [0.0]]]), torch.tensor([[[1.0], [1.0], [1.0]]])
        >>> diag_linear_scan(gate, x).flatten()
        tensor([1.0000, 1.5000, 1.7500])
    """
    results: tuple[Tensor, Tensor] = _operators.diag_linear_scan.default(
        gate, x, h0, **time_options("diag_linear_scan", reverse, cu_seqlens, reset)
    )
    return results if return_last_state else results[0]


@names_arguments
def linear_step(a: Tensor, b: Tensor, state: Tensor | None = None, *, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One decoding step of :func:`linear_scan`: a scan of seqlen 1. This docstring documents the steps of the other scans too.

    Args:
        a, b: the scan's inputs in its order, (batch, channels). Inputs that broadcast do so to this shape.
        state: state before the step, (batch, channels), float32 (float64 with float64 inputs); zero if absent. Not modified.
        reset: (batch,) or (batch, 1), bool or of an integer or floating-point dtype: in the rows where it is true, or not zero,
            the state before the step is zero, whatever ``state`` holds. None for no reset.

    Returns:
        ``(h, new_state)``: the same state in the dtype of the first input and in the dtype of ``state``. Differentiable like
        the scan.

    The step has the errors of the scan and, except ``reverse`` and ``cu_seqlens``, its options. Messages name the step and its
    arguments.

    Examples:
        >>> import torch
        >>> from ssm_kernels import linear_step
        >>> a, b = torch.tensor([[0.5]]), torch.tensor([[1.0]])  # (batch, channels)
        >>> h, state = linear_step(a, b)  # from a state of zero
        >>> h, state = linear_step(a, b, state)
        >>> h
        tensor([[1.5000]])
    """
    state = reset_state("linear_step", state, reset, a)
    results: tuple[Tensor, Tensor] = torch.ops.ssm_kernels.linear_step(a, b, state)
    return results


@names_arguments
def linear_scan_summary(
    a: Tensor, b: Tensor, *, reverse: bool = False, cu_seqlens: Tensor | None = None, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""The map of :func:`linear_scan` from the state before all steps to the state after them.

    .. math:: h_{\mathrm{last}} = \mathrm{decay} \cdot h_0 + \mathrm{last\_state}, \quad \mathrm{decay} = \prod_t a_t

    This docstring documents options and results for all summaries of the family.

    Args:
        a, b: as for :func:`linear_scan`.
        reverse: time runs backwards, from the last step to the first, also in each packed sequence.
        cu_seqlens: as for :func:`linear_scan`: each packed sequence has a summary of its own.
        reset: as in :func:`linear_scan`: the state before a reset is dropped, and zero takes its place. Not together
            with ``cu_seqlens``.

    Returns:
        ``last_state`` of a scan from zero and ``decay``, both (batch, channels) or, with ``cu_seqlens``, (sequences, channels),
        float32 (float64 with float64 inputs). ``decay`` is zero in rows with a reset and, on the CPU, where the product is
        below the smallest normal number. A span of no steps has the last state 0 and the decay 1. Both are differentiable with
        respect to every floating-point tensor argument. Double backward and ``torch.func`` transforms other than ``vmap`` are
        not supported and raise.

    The kernels read the inputs once and write nothing for a step: the two results and, on CUDA, the maps of tiles of steps.
    There a state is multiplied by products of up to 64 consecutive ``a`` in float64, 128 in float32 and 256 in float16 and
    bfloat16, which must be finite, unless they multiply a zero. Backward runs the scan and its adjoint twice on both devices.
    Autograd saves the inputs only.

    Raises:
        ValueError: a shape, the values of ``cu_seqlens`` or a candidate activation are not as documented.
        RuntimeError: a dtype, layout or device is not supported, or the device has no kernel.
        TypeError: an argument is not a tensor where one is expected, or a required tensor is None.

    Examples:
        >>> import torch
        >>> from ssm_kernels import linear_scan, linear_scan_summary
        >>> a, b = torch.tensor([[[0.5], [0.5], [0.5]]]), torch.tensor([[[1.0], [1.0], [1.0]]])  # (batch, seqlen, channels)
        >>> last_state, decay = linear_scan_summary(a, b)
        >>> last_state, decay
        (tensor([[1.7500]]), tensor([[0.1250]]))
        >>> linear_scan(a, b, torch.tensor([[8.0]]))[:, -1] == decay * 8 + last_state
        tensor([[True]])
    """
    results: tuple[Tensor, Tensor] = torch.ops.ssm_kernels.linear_scan_summary(
        a, b, reverse=reverse, cu_seqlens=cu_seqlens, reset=as_mask("linear_scan_summary", reset, 2)
    )
    return results


for _row in recurrences.values():
    if _row.scan != "linear_scan":
        _scan: Any = globals()[_row.scan]
        globals()[_row.step], globals()[_row.summary] = make_step(_scan), make_summary(_scan)
