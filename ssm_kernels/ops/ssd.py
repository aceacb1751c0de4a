"""The scan in chunks, typed and documented. It calls ``torch.ops.ssm_kernels``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .._discretizations import is_two_sample
from .._scan_state import ScanState
from ..choices import ExponentialDiscretizationName, ExponentialTwoSampleDiscretizationName, PreviousSample
from ._arguments import names_arguments, read_dt_limit
from ._states_at import Positions, is_transformed, read_positions
from ._two_samples import refuse_one_sample, two_sample_chunk_scan

__all__ = ["ssd_chunk_scan"]

# Looked up once: the attributes of torch.ops take 0.3 microseconds a call.
_ssd_chunk_scan = torch.ops.ssm_kernels.ssd_chunk_scan.default


@names_arguments
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
    return_final_states: bool = False,
    discretization: ExponentialDiscretizationName | ExponentialTwoSampleDiscretizationName = "zoh",
    lam: Tensor | None = None,
    lam_sigmoid: bool = False,
    previous: PreviousSample | tuple[Tensor, Tensor] = "zero",
    states_at: Positions | None = None,
    log_decay: Tensor | None = None,
    gain: Tensor | None = None,
) -> Tensor | tuple[Tensor | ScanState, ...]:
    r"""The scan of Mamba-2, structured state-space duality (SSD), in chunks, as matrix products.

    Each head is a selective scan whose :math:`A` is one number, with a state of headdim times dstate:

    .. math::
        \Delta_t &= \mathrm{dt}_t + \mathrm{dt\_bias}, \quad
        \Delta_t \leftarrow \mathrm{softplus}(\Delta_t) \text{ if } \mathrm{dt\_softplus}, \quad
        \Delta_t \leftarrow \mathrm{clamp}(\Delta_t, \mathrm{dt\_limit}) \\
        S_t &= e^{\Delta_t A} S_{t-1} + \Delta_t\, k(\Delta_t A)\, x_t B_t^\top \\
        y_t &= (S_t C_t + D x_t) \cdot \mathrm{silu}(z_t)

    The discretization defines the function :math:`k`: see ``docs/discretizations.md``. ``"foh_ramp"`` and ``"exp_trapezoidal"``
    read two input samples a step:

    .. math:: S_t = e^{z_t} S_{t-1} + \Delta_t \left(k(z_t)\, x_t B_t^\top + m(z_t)\, x_{t-1} B_{t-1}^\top\right), \quad
        z_t = \Delta_t A

    ``log_decay`` and ``gain`` take the place of ``dt`` and ``A`` where the decay of each step and head is given:

    .. math:: S_t = e^{\mathrm{log\_decay}_t} S_{t-1} + \mathrm{gain}_t\, x_t B_t^\top

    This is linear attention with values x, keys B and queries C: with a constant log decay per head, RetNet (arXiv 2307.08621)
    and lightning attention (arXiv 2405.17381); with log decays that depend on the data, simple gated linear attention (GLA,
    arXiv 2312.06635, with one gate a head). ``docs/ssd.md`` has the calls.
    Source of the scan: Dao and Gu, *Transformers are SSMs* (arXiv 2405.21060), section 6. Arguments have the names of
    ``mamba_ssm``'s ``mamba_chunk_scan_combined``.

    Args:
        x: input, (batch, seqlen, heads, headdim); float32, float16, bfloat16 or float64; headdim <= 256. All tensors may have
            any strides.
        dt: step sizes, (batch, seqlen, heads), dtype of ``x``; None with ``log_decay``.
        A: (heads,), float32 (float64 with float64 inputs); None with ``log_decay``.
        B: input matrix, (batch, seqlen, groups, dstate), dtype of ``x``; dstate <= 256. The groups divide the heads: head ``h``
            reads group ``h // (heads // groups)``.
        C: output matrix, shape and dtype of ``B``.
        chunk_size: a hint of how many steps a chunk has, on CPU at most 64 or 128; None lets the operator choose. It changes
            the rounding of the result only.
        D: skip connection, (heads,) or (heads, headdim), float32 (float64 with float64 inputs).
        z: gate, shape and dtype of ``x``.
        dt_bias: (heads,), dtype of ``A``. Like the next two and ``discretization``, not with ``log_decay``.
        dt_softplus: apply softplus (identity above 20, as :func:`torch.nn.functional.softplus`) to ``dt + dt_bias``.
        dt_limit: the smallest and the largest step size. Others are clamped, after bias and softplus, and have no gradient.
            None: no limits, which is also the default of ``torch.ops.ssm_kernels.ssd_chunk_scan``.
        initial_states: states before the first step, (batch, heads, headdim, dstate), dtype of ``D``; zero if absent.
        reverse: time runs backwards, from the last step to the first, also in each packed sequence. ``initial_states`` are then
            the states after the last step, ``final_states`` the ones at step 0, and :math:`S_t` follows from :math:`S_{t+1}`.
        seq_idx: (batch, seqlen), int32 or int64, the number of the sequence that a step belongs to. Where it changes from one
            step to the next, the state starts again from zero. ``initial_states`` belongs to the first sequence of a row,
            ``final_states`` to the last; together with ``cu_seqlens``, to the first and the last part of each of its sequences.
        cu_seqlens: (sequences + 1,), int32 or int64. The batch, then of size 1, holds sequences one after another, and sequence
            ``i`` is steps ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1``. It starts at 0, ends at seqlen and does not decrease;
            a sequence may have no steps. Sequences are independent: ``initial_states`` and ``final_states`` are (sequences,
            heads, headdim, dstate). Together with ``seq_idx``, of shape (1, seqlen), sequences begin where ``cu_seqlens`` says
            so, from their initial states, and the state starts again from zero where ``seq_idx`` changes inside a sequence.
        return_final_states: also return the states after the last step.
        discretization: a rule whose state decays by :math:`e^{\Delta A}`: ``"zoh"``, ``"zoh_exact"`` (alias ``"foh"``),
            ``"poly"``, ``"highorder"`` or ``"rk4"``, which differ in the input's factor; or, with two input samples,
            ``"foh_ramp"`` or ``"exp_trapezoidal"``. A chunk's decay is the exponential of a sum, which rational rules such as
            ``"bilinear"`` and ``"trapezoidal"`` do not have.
        lam: of ``"exp_trapezoidal"``, the weight of the current sample, (batch, seqlen, heads) or a shape that broadcasts to
            it, dtype of ``x``, from 0 to 1; the previous sample has the weight :math:`(1 - \lambda) e^z`.
        lam_sigmoid: take the sigmoid of ``lam``.
        previous: the sample before the first step of each sequence, for rules with two samples. ``"zero"``: none, which makes
            every rule first order. ``"repeat"``: the first sample itself. ``(x, B)``: (batch, heads, headdim) and (batch,
            groups, dstate), dtype of ``x``; with ``cu_seqlens`` one row for each sequence. Sequences that begin where
            ``seq_idx`` changes have no sample before them but with ``"repeat"``. With ``reverse`` the sample after a
            sequence's last step, which the scan reads first.
        states_at: also return the states at these positions: ints, or a tensor of one axis, int32 or int64, on the CPU. The
            state at ``p``, from 0 to seqlen, is the one after the first ``p`` steps, before ``seq_idx`` or ``cu_seqlens`` begin
            a sequence at step ``p``: a scan that begins with it continues the sequence of step ``p - 1``.
            With ``cu_seqlens`` the state at 0 is the initial state of the sequence of step 0, or zero if seqlen is 0. Positions
            may repeat and need no order. Not with ``reverse``.
        log_decay: the natural logarithm of each step's decay, (batch, seqlen, heads), float32 or the dtype of ``x`` (float64
            with float64 inputs). Positive values let the state grow. -inf is a decay of 0, which drops the state before the
            step, and has the gradient 0.
        gain: the factor of each step's input, shape as ``log_decay``, dtype float32 or that of ``x``; 1 if absent. Only with
            ``log_decay``.

    Returns:
        ``out`` of the shape and dtype of ``x``; with ``return_final_states`` then ``final_states``, (batch, heads, headdim,
        dstate), dtype of ``D``; a sequence without steps returns its initial state. With ``states_at`` then ``states``,
        (batch, positions, heads, headdim, dstate), dtype of ``D``. Rules with two samples return a
        :class:`~ssm_kernels.reference.ScanState` in place of each of the two: the states with the last sample of x and B, from
        which ``initial_states`` and ``previous`` continue the scan. A step size of 0 keeps the state, and its sample becomes
        the previous one. All are differentiable with respect to every
        floating-point tensor argument, ``initial_states`` included. Double backward and ``torch.func`` transforms other than
        ``vmap`` are not supported and raise.

    **Cost of** ``reverse``. The CUDA kernels read and write the tensors from the last step on: nothing is copied or flipped but
    ``seq_idx`` and ``cu_seqlens``. PyTorch's matmuls, on the CPU and where they stand in for the kernels, flip copies of some
    chunks at a time.

    **Cost of** ``states_at``. Without transforms and ``cu_seqlens``, and on CUDA without gradients, one call returns all
    states. On the CPU those at multiples of the chunk are a copy, and another position ends a chunk early. On CUDA the kernels
    store the states at multiples of 64 as they pass them; any other position takes one more launch, of the steps since the
    multiple before it. If the positions, 0 and seqlen apart, are ``d``, ``2 d``, ``3 d`` and so on, the kernels write the
    result itself. Otherwise they write a workspace of as many states as the greatest common divisor of these multiples is
    contained in the last one (``docs/ssd.md``). All other calls run the scan on each piece between positions, chained by its
    states, and copy to join the outputs. Rounding may differ from the scan in one call. With ``cu_seqlens`` each piece also
    reads and writes the states of all sequences.

    States and sums are float32 (float64 with float64 inputs), also for float16 and bfloat16. float32 inputs are multiplied as
    float32, unless PyTorch's switch for matrix products on CUDA allows TF32 (``torch.backends.cuda.matmul.fp32_precision =
    "tf32"``, or ``allow_tf32 = True`` there) when forward or backward runs: relative errors are then about 4e-4 instead of
    4e-7. Autograd saves the inputs only. Autocast casts ``x``, ``dt``, ``B``, ``C`` and ``z`` to its dtype, parameters,
    states, ``log_decay`` and ``gain`` to float32. ``docs/ssd.md`` describes rounding, NaN and infinity, memory, and when the
    values of ``cu_seqlens`` are checked.

    Raises:
        ValueError: a shape, a position, the values of ``cu_seqlens``, ``chunk_size``, ``dt_limit`` or the discretization are
            not as above, ``states_at`` is given with ``reverse``, or the call has both or neither of ``log_decay`` and ``dt``
            with ``A``, or an argument of the other form.
        RuntimeError: a dtype, layout or device is not supported, or the device has no kernel.
        TypeError: an argument is not a tensor where one is expected, a required tensor is None, or ``states_at`` has other
            elements than ints.

    Examples:
        >>> import torch
        >>> from ssm_kernels import ssd_chunk_scan
        >>> batch, seqlen, heads, headdim, groups, dstate = 2, 100, 4, 16, 1, 32
        >>> x, dt = torch.randn(batch, seqlen, heads, headdim), torch.rand(batch, seqlen, heads)
        >>> A, B, C = -torch.rand(heads), *torch.randn(2, batch, seqlen, groups, dstate)
        >>> ssd_chunk_scan(x, dt, A, B, C).shape
        torch.Size([2, 100, 4, 16])
        >>> out, states = ssd_chunk_scan(x, dt, A, B, C, D=torch.ones(heads), return_final_states=True)
        >>> states.shape
        torch.Size([2, 4, 16, 32])
        >>> more = ssd_chunk_scan(x, dt, A, B, C, initial_states=states)  # continues
        >>> out, last = ssd_chunk_scan(x, dt, A, B, C, discretization="foh_ramp", return_final_states=True)
        >>> later = ssd_chunk_scan(
        ...     x, dt, A, B, C, discretization="foh_ramp", initial_states=last.state, previous=(last.u, last.B)
        ... )
        >>> gates = torch.nn.functional.logsigmoid(torch.randn(batch, seqlen, heads))
        >>> ssd_chunk_scan(x, None, None, B, C, log_decay=gates).shape  # simple gated linear attention
        torch.Size([2, 100, 4, 16])
    """
    if discretization != "zoh" and log_decay is None and is_two_sample(discretization):
        if dt is None or A is None or gain is not None:
            raise ValueError("ssd_chunk_scan: expected dt and A, without gain, with a discretization that reads two samples")
        return cast(
            "Tensor | tuple[Tensor | ScanState, ...]",
            two_sample_chunk_scan(
                *(x, dt, A, B, C),
                chunk_size=chunk_size,
                D=D,
                z=z,
                dt_bias=dt_bias,
                dt_softplus=dt_softplus,
                dt_limit=read_dt_limit("ssd_chunk_scan", dt_limit),
                initial_states=initial_states,
                reverse=reverse,
                seq_idx=seq_idx,
                cu_seqlens=cu_seqlens,
                return_final_states=return_final_states,
                discretization=cast(ExponentialTwoSampleDiscretizationName, discretization),
                lam=lam,
                lam_sigmoid=lam_sigmoid,
                previous=previous,
                states_at=states_at,
            ),
        )
    if lam is not None or lam_sigmoid is not False or previous != "zero":
        refuse_one_sample("ssd_chunk_scan", discretization, lam, lam_sigmoid, previous)
    if states_at is not None:
        out, final_states, states = torch.ops.ssm_kernels._ssd_chunk_scan_states_at(
            *(x, dt, A, B, C, chunk_size, D, z, dt_bias, dt_softplus, read_dt_limit("ssd_chunk_scan", dt_limit)),
            *(initial_states, seq_idx, cu_seqlens, discretization, reverse, log_decay, gain),
            read_positions("ssd_chunk_scan", states_at),
            is_transformed(),
        )
        return (out, final_states, states) if return_final_states else (out, states)
    # The dispatcher takes half a microsecond for each keyword: those that few calls give are left out.
    options: dict[str, Any] = {}
    if not (initial_states is seq_idx is cu_seqlens is None and discretization == "zoh" and reverse is False):
        options = {"initial_states": initial_states, "seq_idx": seq_idx, "cu_seqlens": cu_seqlens}
        options |= {"discretization": discretization, "reverse": reverse}
    if not log_decay is gain is None:
        options |= {"log_decay": log_decay, "gain": gain}
    results: tuple[Tensor, Tensor] = _ssd_chunk_scan(
        x,
        dt,
        A,
        B,
        C,
        chunk_size=chunk_size,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=read_dt_limit("ssd_chunk_scan", dt_limit),
        **options,
    )
    return results if return_final_states else results[0]
