"""Reference of discretizations that read two input samples a step: the current one and the one before it."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .._discretizations import is_two_sample
from .._scan_state import ScanState
from ..choices import DiscretizationName, ExponentialTwoSampleDiscretizationName, TwoSampleDiscretizationName
from ..ops._states_at import Positions
from ..ops._two_samples import read_previous
from .discretizations import coefficients, decaying, exponents_of_A, phi1
from .selective_scan import _per_step
from .sequences import promoted_dtype, resets_of, step_sizes

__all__ = ["ScanState", "phi2", "two_sample_chunk_scan", "two_sample_coefficients", "two_sample_scan"]


def phi2(z: Tensor) -> Tensor:
    """``(phi1(z) - 1) / z``, continued by 1/2 at ``z = 0``; differentiable there as well.

    Below ``|z| = 1`` it is the Taylor series ``sum_k z^k / (k + 2)!`` with 20 terms (relative remainder under 1e-20).

    Examples:
        >>> import torch
        >>> from ssm_kernels.reference.two_samples import phi2
        >>> phi2(torch.tensor([0.0, 1.0], dtype=torch.float64))
        tensor([0.5000, 0.7183], dtype=torch.float64)
    """
    near_zero = z.abs() < 1
    near, away = torch.where(near_zero, z, 0), torch.where(near_zero, 1, z)
    series = torch.zeros_like(z)
    for k in range(19, -1, -1):
        series = 1.0 + series * near / (k + 3)
    return torch.where(near_zero, series / 2, (phi1(away) - 1) / away)


def two_sample_coefficients(
    discretization: TwoSampleDiscretizationName,
    delta: Tensor,
    A: Tensor,
    *,
    alpha: float | None = None,
    lam: Tensor | None = None,
    delta_A: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(Abar, c, c_previous)`` of ``h_t = Abar h_{t-1} + c B_t u_t + c_previous B_{t-1} u_{t-1}``.

    Args:
        discretization: ``"foh_ramp"``, first-order hold, is exact for an input that is linear over the step. ``"trapezoidal"``
            and ``"gbt_two_sample"`` weigh the two ends of the step by 1 - alpha and alpha, for the state and for the input.
            ``"exp_trapezoidal"`` (Mamba-3) has the exact decay and weighs the inputs by 1 - lam and lam.
        delta: step sizes, any shape that broadcasts with ``A``.
        A: the diagonal of the continuous system.
        alpha: of ``"gbt_two_sample"``, from 0 to 1.
        lam: of ``"exp_trapezoidal"``, broadcasts with ``delta``.
        delta_A: of ``"exp_trapezoidal"``, the step of ``Abar`` in place of ``delta``; the previous sample decays with states.

    Raises:
        ValueError: the discretization is unknown, or ``alpha``, ``lam`` or ``delta_A`` is missing or given to another rule.

    Examples:
        >>> import torch
        >>> from ssm_kernels.reference.two_samples import two_sample_coefficients
        >>> delta, A = torch.tensor(0.5, dtype=torch.float64), torch.tensor(-1.0, dtype=torch.float64)
        >>> two_sample_coefficients("trapezoidal", delta, A)
        (tensor(0.6000, dtype=torch.float64), tensor(0.2000, dtype=torch.float64), tensor(0.2000, dtype=torch.float64))
    """
    for name, value, owner in (("alpha", alpha, "gbt_two_sample"), ("lam", lam, "exp_trapezoidal")):
        if (value is not None) != (discretization == owner):
            raise ValueError(f"expected {name} with discretization {owner!r} and no other, got {discretization!r}")
    z = decaying(torch.mul, delta, A) if delta_A is None else exponents_of_A(discretization, delta_A, A)
    if discretization in ("trapezoidal", "gbt_two_sample"):
        weight = 0.5 if alpha is None else alpha
        r = 1 / (1 - weight * z)
        return (1 + (1 - weight) * z) * r, delta * weight * r, delta * (1 - weight) * r
    Abar = torch.exp(z)
    if discretization == "exp_trapezoidal":
        assert lam is not None
        return Abar, delta * lam + torch.zeros_like(z), delta * (1 - lam) * Abar
    if discretization == "foh_ramp":
        ramp = phi2(z)
        return Abar, delta * ramp, delta * (phi1(z) - ramp)
    known = ["foh_ramp", "trapezoidal", "gbt_two_sample", "exp_trapezoidal"]
    raise ValueError(f"unknown discretization {discretization!r}, expected one of {known}")


def two_sample_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: TwoSampleDiscretizationName,
    alpha: float | None = None,
    lam: Tensor | None = None,
    lam_sigmoid: bool = False,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    previous: Literal["zero", "repeat"] | tuple[Tensor, Tensor | None] = "zero",
    delta_A: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool = False,
    states_at: Positions | None = None,
    conjugate_pairs: bool = True,
) -> Any:
    r"""The selective scan with two input samples a step, as a loop over time.

    .. math::
        h_t = \bar A(z_t)\, h_{t-1} + \Delta_t \left(k(z_t)\, B_t u_t + m(z_t)\, B_{t-1} u_{t-1}\right), \quad z_t = \Delta_t A

    Other arguments as :func:`ssm_kernels.selective_scan`. Computed in the promoted dtype of all arguments. With a complex
    ``A`` as :func:`ssm_kernels.reference.complex_scan`.

    Args:
        discretization: see :func:`two_sample_coefficients`.
        alpha: of ``"gbt_two_sample"``.
        lam: of ``"exp_trapezoidal"``, (batch, dim, seqlen) or a shape that broadcasts to it, from 0 to 1.
        lam_sigmoid: take the sigmoid of ``lam``.
        previous: the sample before the first step of each sequence. ``"zero"``: none, which makes every rule first order.
            ``"repeat"``: the first sample itself. ``(u, B)``: (batch, dim), and (batch, dstate) or (batch, groups, dstate), or
            None if ``B`` is constant; with ``cu_seqlens`` one row for each sequence. Sequences that begin where ``seq_idx``
            changes have no sample before them but with ``"repeat"``.
        delta_A: of ``"exp_trapezoidal"``, as for :func:`ssm_kernels.selective_scan`.
        return_last_state: also return a :class:`ScanState`, which continues the scan as ``initial_state`` and ``previous``.
        states_at: also return a :class:`ScanState` for each of these positions, in a list. Not with ``reverse``.
        conjugate_pairs: of a complex ``A``.

    A step size of zero keeps the state, and its sample becomes the previous one.

    Raises:
        ValueError: ``states_at`` is given with ``reverse``, ``previous`` is another string, or its ``B`` is given with a
            constant ``B`` or missing with another; also as :func:`two_sample_coefficients`.
        TypeError: ``previous`` is not as above.

    Examples:
        >>> import torch
        >>> from ssm_kernels.reference.two_samples import two_sample_scan
        >>> one = torch.ones(1, 1, 3, dtype=torch.float64)
        >>> A = -torch.ones(1, 1, dtype=torch.float64)
        >>> two_sample_scan(one, one, A, one, one, discretization="foh_ramp", previous="repeat")  # 1 - exp(-t)
        tensor([[[0.6321, 0.8647, 0.9502]]], dtype=torch.float64)
    """
    if A.dim() == 3:
        from .dense import dense_scan  # which uses this package's modules

        if delta_A is not None:
            raise ValueError("two_sample_scan: expected no delta_A with A of shape (dim, dstate, dstate)")
        return dense_scan(
            *(u, delta, A, B, C, D, z, delta_bias),
            discretization=discretization,
            alpha=alpha,
            lam=lam,
            lam_sigmoid=lam_sigmoid,
            delta_softplus=delta_softplus,
            initial_state=initial_state,
            previous=previous,
            reverse=reverse,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            return_last_state=return_last_state,
            states_at=states_at,
        )
    batch, dim, seqlen = u.shape
    previous_u, previous_B, repeats = read_previous("two_sample_scan", previous)
    given: tuple[Tensor | None, ...] = (previous_u, previous_B)
    if (given[1] is not None) != (given[0] is not None and B.dim() > 2):
        raise ValueError(
            "two_sample_scan: expected previous to have a sample of B where B changes from step to step, and None where it is "
            f"constant, got {'None' if given[1] is None else 'a tensor'} with B of shape {[*B.shape]}"
        )
    dtype = promoted_dtype(u, delta, A, B, C, D, z, delta_bias, initial_state, lam, delta_A, *given)
    real = dtype.to_real()
    delta_A = None if delta_A is None else delta_A.to(real).expand(u.shape)
    if lam is not None:
        lam = lam.to(real).expand(batch, dim, seqlen)
        lam = torch.sigmoid(lam) if lam_sigmoid else lam
    if reverse:
        if states_at is not None:
            raise ValueError("two_sample_scan: expected states_at without reverse, got both")
        u, delta, B, C = (v if v.dim() == 2 else v.flip(-1) for v in (u, delta, B, C))
        z, seq_idx, lam, delta_A = (None if v is None else v.flip(-1) for v in (z, seq_idx, lam, delta_A))
        if cu_seqlens is not None:
            cu_seqlens = seqlen - cu_seqlens.flip(0)
            initial_state = None if initial_state is None else initial_state.flip(0)
            given = tuple(None if v is None else v.flip(0) for v in given)
    u, A, own_B = u.to(real), A.to(dtype), B.to(dtype)
    delta = step_sizes(delta.to(real), None if delta_bias is None else delta_bias.to(real)[:, None], delta_softplus)
    Bt, Ct = _per_step(own_B, batch, dim, seqlen), _per_step(C.to(dtype), batch, dim, seqlen)
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    states = A.new_zeros(sequences, dim, A.shape[1]) if initial_state is None else initial_state.to(dtype)
    given_u = u.new_zeros(sequences, dim) if given[0] is None else given[0].to(real)
    given_B = None if B.dim() == 2 else own_B.new_zeros(sequences, *own_B.shape[1:-1])
    if given_B is not None and given[1] is not None:
        given_B = given[1].to(dtype)
    resets = resets_of(seq_idx, batch, seqlen, u.device)
    spans = [(0, seqlen)] if cu_seqlens is None else [*itertools.pairwise(cu_seqlens.tolist())]

    # The factors of all steps at once: a call for each step takes many times as long.
    weight = None if lam is None else lam[..., None]
    of_A = None if delta_A is None else delta_A[..., None]
    if A.is_complex() and not is_two_sample(discretization):
        Abar, c = coefficients(cast(DiscretizationName, discretization), delta[..., None], A[:, None])
        factors = (Abar, c, torch.zeros_like(c))
    else:
        factors = two_sample_coefficients(discretization, delta[..., None], A[:, None], alpha=alpha, lam=weight, delta_A=of_A)
    decays, gains, gains_before = (factor.unbind(2) for factor in factors)
    samples = (Bt * u[:, :, None]).unbind(-1)

    outputs: list[Tensor] = []
    last: list[ScanState] = []
    at: dict[int, ScanState] = {}
    for i, (begin, end) in enumerate(spans):
        rows = slice(None) if cu_seqlens is None else slice(i, i + 1)
        h, u_before, B_before = states[rows], given_u[rows], None if given_B is None else given_B[rows]
        matrix = own_B if B_before is None else _per_step(B_before[..., None], u_before.shape[0], dim, 1)[..., 0]
        sample = matrix * u_before[..., None]
        if begin == 0:
            # The state at 0 is that of the first sequence with steps, before which its own first sample comes with "repeat".
            if repeats and end > 0:
                at[0] = ScanState(h, u[..., 0], None if B_before is None else own_B[..., 0])
            elif end > 0 or 0 not in at:
                at[0] = ScanState(h, u_before, B_before)
        for t in range(begin, end):
            first = resets[:, t, None, None] if t > begin else torch.full_like(resets[:, t, None, None], repeats)
            if t > begin:
                h = torch.where(first, 0, h)
            now = samples[t]
            sample = torch.where(first, now if repeats else 0, sample)
            h = decays[t] * h + gains[t] * now + gains_before[t] * sample
            sample, u_before, B_before = now, u[..., t], None if B.dim() == 2 else own_B[..., t]
            y = (h * Ct[..., t]).sum(-1)
            outputs.append(y.real * (1 + conjugate_pairs) if y.is_complex() else y)
            at[t + 1] = ScanState(h, u_before, B_before)
        last.append(ScanState(h, u_before, B_before))

    if cu_seqlens is not None and seqlen == 0 and 0 in at:
        # The state at 0 is that of the sequence of step 0, and there is none.
        of_first = at[0]
        no_B = None if of_first.B is None else torch.zeros_like(of_first.B)
        at[0] = ScanState(torch.zeros_like(of_first.state), torch.zeros_like(of_first.u), no_B)
    out = torch.stack(outputs, dim=-1) if outputs else u[..., :0]
    if D is not None:
        out = out + D.to(real)[:, None] * u
    if z is not None:
        out = out * F.silu(z.to(real))
    if reverse:
        out = out.flip(-1)
        last = last[::-1]
    results: list[Any] = [out]
    if return_last_state:
        state, sample_u, sample_B = zip(*last, strict=True)
        results.append(ScanState(torch.cat(state), torch.cat(sample_u), None if B.dim() == 2 else torch.cat(sample_B)))
    if states_at is not None:
        results.append([at[int(p)] for p in states_at])
    return tuple(results) if len(results) > 1 else out


def two_sample_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = (0.0, math.inf),
    initial_states: Tensor | None = None,
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_final_states: bool = False,
    discretization: ExponentialTwoSampleDiscretizationName,
    lam: Tensor | None = None,
    lam_sigmoid: bool = False,
    previous: Literal["zero", "repeat"] | tuple[Tensor, Tensor] = "zero",
    states_at: Positions | None = None,
) -> Any:
    """The scan of the state-space dual form with two input samples a step.

    It is :func:`two_sample_scan` of channels that share the step size, the weight and the rate of their head. Arguments and
    results as :func:`ssm_kernels.ssd_chunk_scan`; ``states_at`` returns a list.

    Examples:
        >>> import torch
        >>> from ssm_kernels.reference.two_samples import two_sample_chunk_scan
        >>> x, dt = torch.randn(2, 10, 4, 8, dtype=torch.float64), torch.rand(2, 10, 4, dtype=torch.float64)
        >>> A, B, C = -torch.rand(4, dtype=torch.float64), *torch.randn(2, 2, 10, 1, 16, dtype=torch.float64)
        >>> two_sample_chunk_scan(x, dt, A, B, C, discretization="foh_ramp").shape
        torch.Size([2, 10, 4, 8])
    """
    batch, seqlen, heads, headdim = x.shape
    previous_x, previous_B, _ = read_previous("two_sample_chunk_scan", previous, "x", may_lack_B=False)
    given = () if previous_x is None else (previous_x, previous_B)
    dtype = promoted_dtype(x, dt, A, B, C, D, z, dt_bias, initial_states, lam, *given)

    def of_channels(values: Tensor) -> Tensor:  # (batch, seqlen, heads) to (batch, channels, seqlen)
        return values.repeat_interleave(headdim, dim=2).transpose(1, 2)

    steps = step_sizes(dt.to(dtype), None if dt_bias is None else dt_bias.to(dtype), dt_softplus, dt_limit)
    out, last, *at = two_sample_scan(
        x.flatten(2).transpose(1, 2),
        of_channels(steps),
        A.repeat_interleave(headdim)[:, None].expand(-1, B.shape[3]),
        B.permute(0, 2, 3, 1),
        C.permute(0, 2, 3, 1),
        None if D is None else (D if D.dim() == 2 else D[:, None].expand(heads, headdim)).flatten(),
        None if z is None else z.flatten(2).transpose(1, 2),
        discretization=discretization,
        lam=None if lam is None else of_channels(lam.expand(batch, seqlen, heads)),
        lam_sigmoid=lam_sigmoid,
        initial_state=None if initial_states is None else initial_states.flatten(1, 2),
        previous=previous if isinstance(previous, str) else (previous[0].flatten(1), previous[1]),
        reverse=reverse,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        return_last_state=True,
        states_at=states_at,
    )

    def of_heads(state: ScanState) -> ScanState:
        h, u, matrix = state
        return ScanState(h.unflatten(1, (heads, headdim)), u.unflatten(1, (heads, headdim)), matrix)

    results: list[Any] = [out.transpose(1, 2).unflatten(2, (heads, headdim))]
    results += [of_heads(last)] * return_final_states
    results += [[of_heads(state) for state in states] for states in at]
    return tuple(results) if len(results) > 1 else results[0]
