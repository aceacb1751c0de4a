"""The selective scan, typed and documented."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._discretizations import is_two_sample, with_alpha
from .._scan_state import ScanState
from ..choices import DiscretizationName, PreviousSample, TwoSampleDiscretizationName
from ._arguments import names_arguments
from ._complex import complex_scan, is_complex
from ._dense import dense_scan
from ._states_at import Positions, is_transformed, read_positions
from ._two_samples import refuse_one_sample, two_sample_scan

__all__ = ["selective_scan"]

# Looked up once: the attributes of torch.ops take 0.3 microseconds a call.
_selective_scan = torch.ops.ssm_kernels.selective_scan.default


@names_arguments
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
    discretization: DiscretizationName | TwoSampleDiscretizationName = "zoh",
    alpha: float | None = None,
    lam: Tensor | None = None,
    lam_sigmoid: bool = False,
    previous: PreviousSample | tuple[Tensor, Tensor | None] = "zero",
    delta_A: Tensor | None = None,
    conjugate_pairs: bool = True,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool = False,
    states_at: Positions | None = None,
) -> Tensor | tuple[Tensor | ScanState, ...]:
    r"""Selective scan of a diagonal state-space model, with a choice of discretization.

    .. math::
        \Delta_t &= \mathrm{delta}_t + \mathrm{delta\_bias}, \quad
        \Delta_t \leftarrow \mathrm{softplus}(\Delta_t) \text{ if } \mathrm{delta\_softplus} \\
        h_t &= \bar A(\Delta_t A)\, h_{t-1} + \Delta_t\, k(\Delta_t A)\, B_t u_t \\
        y_t &= (\langle C_t, h_t \rangle + D u_t) \cdot \mathrm{silu}(z_t)

    The discretization defines the functions :math:`\bar A` and :math:`k`: see ``docs/discretizations.md``.
    Source: Gu and Dao, *Mamba* (arXiv 2312.00752), equations 1 to 4. ``"zoh"`` is the rule of the paper's code; the
    paper's equation 4 is ``"zoh_exact"`` here.

    Args:
        u: input, (batch, dim, seqlen); float32, float16, bfloat16 or float64. Any strides; seqlen-contiguous and
            dim-contiguous tensors are read in 16-byte vectors, others element by element on CUDA.
        delta: step sizes, shape and dtype of ``u``.
        A: diagonal of the continuous system, (dim, dstate), float32 (float64 with float64 inputs); dstate <= 256. Or complex64
            (complex128), with dstate <= 128, ``B`` and ``C`` and states of that dtype too. Or a matrix for each
            channel, (dim, dstate, dstate), or one for all, (1, dstate, dstate), real, with dstate <= 32.
        B: input matrix. Constant: (dim, dstate) in the dtype of ``A``. Per step: (batch, dstate, seqlen) or
            (batch, groups, dstate, seqlen) in the dtype of ``u``; channel ``d`` reads group ``d // (dim // groups)``.
        C: output matrix, as ``B``, independently of it.
        D: skip connection, (dim,), dtype of ``A``.
        z: gate, shape and dtype of ``u``.
        delta_bias: (dim,), dtype of ``A``.
        discretization: one of ``ssm_kernels.discretizations``, such as ``"zoh"``, ``"zoh_exact"`` and ``"bilinear"``, or
            ``"foh"``, an alias of ``"zoh_exact"``; or ``"gbt"``, the bilinear family, with ``alpha``; or ``"dirac"``, for input
            impulses: :math:`h_t = e^{\Delta_t A} h_{t-1} + B_t u_t`. Rules that read two input samples a step are
            ``"foh_ramp"``, ``"trapezoidal"``, ``"gbt_two_sample"`` with ``alpha``, and ``"exp_trapezoidal"``, Mamba-3's, with
            ``lam``: :math:`h_t = \bar A h_{t-1} + \Delta_t (k\, B_t u_t + m\, B_{t-1} u_{t-1})`.
        alpha: of ``"gbt"``, from 0 (``"euler"``) over 1/2 (``"bilinear"``) to 1 (``"backward_euler"``); and of
            ``"gbt_two_sample"``.
        lam: of ``"exp_trapezoidal"``, the weight of the current sample beside that of the previous one, from 0 to 1:
            (batch, dim, seqlen) or a shape that broadcasts to it, dtype of ``u``.
        lam_sigmoid: take the sigmoid of ``lam``.
        previous: the sample before the first step of each sequence, for rules that read two. ``"zero"``: none, which makes
            every rule first order. ``"repeat"``: the first sample itself. ``(u, B)``: (batch, dim), and (batch, dstate) or
            (batch, groups, dstate), or None if ``B`` is constant, dtypes of ``u`` and ``B``; with ``cu_seqlens`` one row for
            each sequence. Sequences that begin where ``seq_idx`` changes have no sample before them but with ``"repeat"``.
            A sequence without steps and without a given sample returns a sample of zero.
        delta_A: the steps of ``A``, in place of those of ``delta``, which are then those of the input alone:
            (batch, dim, seqlen) or a shape that broadcasts to it, dtype of ``u``. No bias and no softplus applies to it.
        conjugate_pairs: of a complex ``A``: states are one of each conjugate pair, and the output is
            :math:`2\, \mathrm{Re} \langle C_t, h_t \rangle`. False: without the factor 2.
        delta_softplus: apply softplus (identity above 20, as :func:`torch.nn.functional.softplus`) to ``delta + delta_bias``.
        initial_state: state before the first step, (batch, dim, dstate), dtype of ``A``; zero if absent. With ``cu_seqlens``
            (sequences, dim, dstate), one for each sequence.
        reverse: time runs backwards, from the last step to the first, also in each packed sequence. ``initial_state`` is then
            the state after the last step, ``last_state`` the one at step 0, and :math:`h_t` follows from :math:`h_{t+1}`.
        seq_idx: (batch, seqlen), int32 or int64: a new sequence begins wherever it changes, with a state of zero.
        cu_seqlens: (sequences + 1,), int32 or int64, for a batch of 1: sequence ``i`` has the steps ``cu_seqlens[i]`` to
            ``cu_seqlens[i + 1] - 1``, which may be none. Together with ``seq_idx`` sequences begin where either says so; those
            of ``cu_seqlens`` have states.
        return_last_state: also return the state after the last step, of each sequence of ``cu_seqlens``.
        states_at: also return the states at these positions: ints, or a tensor of one axis, int32 or int64, on the CPU. The
            state at ``p``, from 0 to seqlen, is the one after the first ``p`` steps. A scan of the later steps that begins
            with it continues the sequence. Positions may repeat and need no order. With ``cu_seqlens`` the state at ``p`` is
            that of the sequence of step ``p - 1``, and at 0 the first one of the sequence of step 0, or zero if seqlen is 0.
            Not with ``reverse``.

    Returns:
        ``out`` of the shape and dtype of ``u``; with ``return_last_state`` then ``last_state``, (batch, dim, dstate) or
        (sequences, dim, dstate), dtype of ``A``; with ``states_at`` then ``states``, (batch, positions, dim, dstate), dtype of
        ``A``. Rules that read two input samples have a :class:`ssm_kernels.reference.ScanState` in the place of each: a state
        with the last sample of ``u``, (batch, dim), and of ``B``, or at ``states_at`` (batch, positions, dim) and so on. Its
        fields continue the scan as ``initial_state`` and ``previous``. All are differentiable with respect to every
        floating-point tensor, ``initial_state`` and ``previous`` included. Double backward and ``torch.func`` transforms other
        than ``vmap`` are not supported and raise.

    **Packed sequences.** Each sequence is scanned on its own: values of one, NaN included, reach no other. On CUDA the blocks
    of all sequences run at once, and the time of a sequence is not divided: one long sequence of few channels takes longer than
    in a call without ``cu_seqlens``. Tensors of contiguous channels, as layers have them, are read in vectors. Contiguous steps
    are read as shifted rows by the sequential scan (``docs/cuda.md``) and element by element by the others. The host waits for
    the device to check the values of ``cu_seqlens``, unless a CUDA graph is being captured, and to count the sequences of
    ``seq_idx``, which cannot be captured.

    **Cost of** ``reverse``. Nothing is copied or flipped. Channels-last tensors take the same kernels as without it. On CUDA,
    tensors of contiguous steps take the warp scan or the short scan (``docs/cuda.md``).

    **Two input samples.** A step of size zero keeps the state, and its sample becomes the previous one. Kernels read the step
    before a tile; no tensor is shifted.

    **A step of its own for A.** With ``delta_A`` a state decays over another time than its input acts:
    :math:`h_t = e^{\Delta^A_t A} h_{t-1} + \Delta_t\, k(\Delta_t A)\, B_t u_t`, with the time since the event before in
    ``delta_A`` of event streams. 0 keeps the state, and infinity clears it. ``"zoh"``, ``"zoh_exact"``, ``"poly"``,
    ``"highorder"``, ``"rk4"``, ``"dirac"`` and ``"exp_trapezoidal"``, whose previous sample decays with the state, take it.
    Rules that advance the state and the input by one step of a rational function or of a line do not. On CUDA such calls take
    the warp scan.

    **Complex states.** With a complex ``A`` states are complex, and ``u``, ``delta``, ``D``, ``z`` and ``out`` real:
    :math:`y_t = 2\, \mathrm{Re} \sum_n C_{t,n} h_{t,n}`, without a conjugate on ``C``, before the skip connection and the gate.
    ``B`` and ``C`` of each step are complex64 beside float16 and bfloat16 inputs too. ``"zoh"``, ``"zoh_exact"``,
    ``"bilinear"``, ``"trapezoidal"`` and ``"exp_trapezoidal"`` take it, without ``delta_A``. Angles are reduced as turns, so
    that :math:`\Delta\, \mathrm{Im} A` may be large. Gradients of complex tensors follow PyTorch's convention,
    :math:`\partial L / \partial \mathrm{Re} + i\, \partial L / \partial \mathrm{Im}`.

    **A matrix for A.** ``"bilinear"``, ``"trapezoidal"``, ``"gbt"``, ``"gbt_two_sample"``, ``"euler"``, ``"backward_euler"``
    and ``"rk4"`` take any real matrices, defective ones included: :math:`z` above is then :math:`Z_t = \Delta_t A`, and a
    quotient is a solve. ``"rk4"`` is the classical Runge-Kutta step, whose decay is a polynomial of :math:`Z_t`, too: for
    diagonal matrices it is not the ``"rk4"`` of a diagonal ``A``, whose decay is the exponential. An orthogonal reduction once
    a call, :math:`A = Q T Q^T` with a real Schur form :math:`T`, makes the solve of a step one with a triangular matrix. The
    other rules need the exponential of a matrix in each step; the reference has them. ``delta_A`` and ``lam`` are not taken.

    **Cost of** ``states_at``. Without gradients, autocast, transforms and packed sequences, one call returns the states at
    multiples of 32 (above 16 states: 64), at 0 and at seqlen, from the chunk states that forward then writes, (batch,
    seqlen / 32 + 1, dim, dstate). Any other position takes one more call, of the steps since the multiple before it.
    Otherwise, and with rules that read two input samples, the scan is one call for each piece between positions, chained by
    its states, and a copy that joins the outputs; rounding may differ from the scan in one call. On CUDA, pieces that do
    not begin at a multiple of 16 bytes are shifted rows of the sequential scan; the others read them element by element.

    The operator runs on CPU and on CUDA (compute capability 8.0 and newer) and gives the same bits every time. States and sums
    are float32 (float64 with float64 inputs). Autograd saves the states at every 32nd step (above 16 states: 64th). On CUDA the
    operator launches on the current stream, the host waits for the device for packed sequences only, and forward and backward
    can be captured in a CUDA graph.

    Raises:
        ValueError: a shape, a position, the discretization or, unless a CUDA graph is being captured, a value of
            ``cu_seqlens`` is not as above, ``states_at`` is given with ``reverse``, or ``delta_A`` to a rule in which it has no
            meaning.
        RuntimeError: a dtype, layout or device is not supported, the device has no kernel, or ``seq_idx`` is given
            while a CUDA graph is being captured.
        NotImplementedError: ``delta_A`` is given with a complex ``A``.
        TypeError: an argument is not a tensor where one is expected, a required tensor is None, or ``states_at`` has other
            elements than ints.

    Examples:
        >>> import torch
        >>> from ssm_kernels import selective_scan
        >>> batch, dim, seqlen, dstate = 2, 8, 100, 16
        >>> u, delta = torch.randn(batch, dim, seqlen), torch.rand(batch, dim, seqlen)
        >>> A, B, C = -torch.rand(dim, dstate), torch.randn(batch, dstate, seqlen), torch.randn(batch, dstate, seqlen)
        >>> selective_scan(u, delta, A, B, C, discretization="zoh_exact").shape
        torch.Size([2, 8, 100])
        >>> y, state = selective_scan(u, delta, A, B, C, return_last_state=True)
        >>> state.shape
        torch.Size([2, 8, 16])
        >>> y, last = selective_scan(u, delta, A, B, C, discretization="foh_ramp", return_last_state=True)
        >>> later = selective_scan(
        ...     u, delta, A, B, C, discretization="foh_ramp", initial_state=last.state, previous=(last.u, last.B)
        ... )
        >>> x = torch.randn(batch, seqlen, dim)  # channels last: a view, no copy
        >>> selective_scan(x.transpose(1, 2), delta, A, B, C).transpose(1, 2).shape
        torch.Size([2, 100, 8])
        >>> gaps = torch.tensor([0.0, 1.0, 0.5])  # times since the event before, of all channels
        >>> selective_scan(u[..., :3], delta[..., :3], A, B[..., :3], C[..., :3], delta_A=gaps).shape
        torch.Size([2, 8, 3])
        >>> A = torch.complex(-torch.rand(dim, dstate), torch.randn(dim, dstate))  # complex states, constant B and C
        >>> B, C = torch.randn(2, dim, dstate, dtype=torch.complex64)
        >>> selective_scan(u, delta, A, B, C, discretization="bilinear").shape
        torch.Size([2, 8, 100])
        >>> one = torch.ones(1, 1, 3)  # a held input of 1, with A = -1 and steps of 1: 1 - exp(-t)
        >>> selective_scan(one, one, -torch.ones(1, 1), one, one, discretization="zoh_exact")
        tensor([[[0.6321, 0.8647, 0.9502]]])
    """
    if is_complex(A):
        return complex_scan(
            *(u, delta, A, B, C, D, z, delta_bias),
            discretization=discretization,
            alpha=alpha,
            lam=lam,
            lam_sigmoid=lam_sigmoid,
            previous=previous,
            delta_A=delta_A,
            conjugate_pairs=conjugate_pairs,
            delta_softplus=delta_softplus,
            initial_state=initial_state,
            reverse=reverse,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            return_last_state=return_last_state,
            states_at=states_at,
        )
    if conjugate_pairs is not True:
        raise ValueError("selective_scan: expected conjugate_pairs=False with a complex A only, got a real A")
    if A.dim() == 3 and not A.is_nested:
        return dense_scan(
            *(u, delta, A, B, C, D, z, delta_bias),
            discretization=discretization,
            alpha=alpha,
            lam=lam,
            lam_sigmoid=lam_sigmoid,
            previous=previous,
            delta_A=delta_A,
            delta_softplus=delta_softplus,
            initial_state=initial_state,
            reverse=reverse,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            return_last_state=return_last_state,
            states_at=states_at,
        )
    if delta_A is not None or (discretization != "zoh" and is_two_sample(discretization)):
        return two_sample_scan(
            *(u, delta, A, B, C, D, z, delta_bias),
            discretization=discretization,
            alpha=alpha,
            lam=lam,
            lam_sigmoid=lam_sigmoid,
            previous=previous,
            delta_A=delta_A,
            delta_softplus=delta_softplus,
            initial_state=initial_state,
            reverse=reverse,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            return_last_state=return_last_state,
            states_at=states_at,
        )
    if lam is not None or lam_sigmoid is not False or previous != "zero":
        refuse_one_sample("selective_scan", discretization, lam, lam_sigmoid, previous)
    if alpha is not None or discretization == "gbt":
        discretization = with_alpha("selective_scan", discretization, alpha)
    if states_at is not None:
        out, last_state, states = torch.ops.ssm_kernels._selective_scan_states_at(
            *(u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx, cu_seqlens, discretization, delta_softplus, reverse),
            read_positions("selective_scan", states_at),
            is_transformed(),
        )
        return (out, last_state, states) if return_last_state else (out, states)
    # The dispatcher takes half a microsecond for each keyword.
    options: dict[str, Any] = {}
    if discretization != "zoh":
        options["discretization"] = discretization
    if delta_softplus is not False:
        options["delta_softplus"] = delta_softplus
    if reverse is not False:
        options["reverse"] = reverse
    results: tuple[Tensor, Tensor] = _selective_scan(
        u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx, cu_seqlens, **options
    )
    return results if return_last_state else results[0]
