"""Reference of the selective scan with a matrix A, by solves and exponentials of matrices: no reduction, and every rule."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._discretizations import split_name
from .._scan_state import ScanState
from ..ops._states_at import Positions
from ..ops._two_samples import read_previous
from .selective_scan import _per_step
from .sequences import promoted_dtype, resets_of, step_sizes

__all__ = ["dense_coefficients", "dense_scan"]

_ALPHA = {"bilinear": 0.5, "euler": 0.0, "backward_euler": 1.0, "trapezoidal": 0.5}
_POLYNOMIALS = {"zoh": (1.0,), "dirac": (1.0,), "highorder": (1.0, 1 / 2), "poly": (1.0, 1 / 2, 1 / 6)}


def _phi(Z: Tensor, count: int) -> list[Tensor]:
    """``e^Z``, ``phi1(Z)`` and so on: the first row of blocks of the exponential of a larger matrix."""
    n = Z.shape[-1]
    larger = F.pad(Z, (0, n * count, 0, n * count))
    ones = torch.diag_embed(torch.ones(n * count, dtype=Z.dtype, device=Z.device), offset=n)
    return list(torch.matrix_exp(larger + ones)[..., :n, :].split(n, dim=-1))


def dense_coefficients(
    discretization: str, delta: Tensor, A: Tensor, *, alpha: float | None = None, lam: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The matrices ``(Abar, G, P)`` of ``h_t = Abar h_{t-1} + G B_t u_t + P B_{t-1} u_{t-1}``.

    The formulas are those of :func:`ssm_kernels.reference.coefficients` and
    :func:`ssm_kernels.reference.two_sample_coefficients`, with a matrix in the place of ``z``. ``"rk4"`` alone differs: its
    decay is the polynomial of the classical Runge-Kutta step, where that of a diagonal ``A`` is the exponential.

    Args:
        discretization: a rule of one or of two input samples.
        delta: step sizes, (...).
        A: the continuous system, (..., dstate, dstate), which broadcasts with ``delta``.
        alpha: of ``"gbt"`` and ``"gbt_two_sample"``, also as ``"gbt(0.7)"``.
        lam: of ``"exp_trapezoidal"``, (...).

    Raises:
        ValueError: the discretization is unknown.

    Examples:
        >>> import torch
        >>> from ssm_kernels.reference import dense_coefficients
        >>> A = torch.tensor([[-1.0, 1.0], [0.0, -1.0]], dtype=torch.float64)  # one eigenvector
        >>> dense_coefficients("zoh_exact", torch.tensor(1.0, dtype=torch.float64), A)[0]
        tensor([[0.3679, 0.3679],
                [0.0000, 0.3679]], dtype=torch.float64)
    """
    stem, number = split_name("zoh_exact" if discretization == "foh" else discretization)
    delta = delta[..., None, None]
    Z = delta * A
    eye = torch.eye(A.shape[-1], dtype=Z.dtype, device=Z.device).expand(Z.shape)
    zero = torch.zeros_like(Z)
    if stem in ("gbt", "gbt_two_sample", *_ALPHA):
        weight = _ALPHA.get(stem, alpha if number is None else number)
        assert weight is not None
        matrix = eye - weight * Z
        Abar = torch.linalg.solve(matrix, eye + (1 - weight) * Z)
        gain = delta * torch.linalg.solve(matrix, eye)
        if stem in ("trapezoidal", "gbt_two_sample"):
            return Abar, weight * gain, (1 - weight) * gain
        return Abar, gain, zero
    if stem == "rk4":
        gain = eye + Z @ (eye + Z @ (eye + Z / 4) / 3) / 2
        return eye + Z @ gain, delta * gain, zero
    if stem in _POLYNOMIALS:
        gain, power = zero, eye
        for factor in _POLYNOMIALS[stem]:
            gain, power = gain + factor * power, power @ Z
        return torch.matrix_exp(Z), gain if stem == "dirac" else delta * gain, zero
    if stem == "zoh_exact":
        Abar, phi1 = _phi(Z, 1)
        return Abar, delta * phi1, zero
    if stem == "foh_ramp":
        Abar, phi1, phi2 = _phi(Z, 2)
        return Abar, delta * phi2, delta * (phi1 - phi2)
    if stem == "exp_trapezoidal":
        assert lam is not None
        Abar, weights = torch.matrix_exp(Z), lam[..., None, None]
        return Abar, delta * weights * eye, delta * (1 - weights) * Abar
    raise ValueError(f"unknown discretization {discretization!r}")


def dense_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    discretization: str,
    alpha: float | None = None,
    lam: Tensor | None = None,
    lam_sigmoid: bool = False,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    previous: Any = "zero",
    reverse: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_last_state: bool = False,
    states_at: Positions | None = None,
) -> Any:
    """The selective scan with ``A`` of shape (dim, dstate, dstate) or (1, dstate, dstate), as a loop over time.

    :func:`ssm_kernels.reference.selective_scan` and :func:`ssm_kernels.reference.two_sample_scan` are this function for such an
    ``A``. It takes every rule. Arguments and results are theirs; every state is a :class:`ScanState` here, and ``states_at``
    returns a list.

    Raises:
        ValueError: ``states_at`` is given with ``reverse``; also as :func:`dense_coefficients`.

    Examples:
        >>> import torch
        >>> from ssm_kernels.reference import dense_scan
        >>> one = torch.ones(1, 1, 3, dtype=torch.float64)
        >>> A = torch.tensor([[[-1.0, 0.0], [1.0, -1.0]]], dtype=torch.float64)  # a chain of two filters
        >>> B, C = torch.tensor([[[1.0], [0.0]], [[0.0], [1.0]]], dtype=torch.float64).expand(2, 2, 3)[:, None]
        >>> dense_scan(one, one, A, B, C, discretization="zoh_exact")
        tensor([[[0.2642, 0.5940, 0.8009]]], dtype=torch.float64)
    """
    if reverse and states_at is not None:
        raise ValueError("selective_scan: expected states_at without reverse, got both")
    batch, dim, seqlen = u.shape
    previous_u, previous_B, repeats = read_previous("selective_scan", previous)
    given: tuple[Tensor | None, ...] = (previous_u, previous_B)
    dtype = promoted_dtype(u, delta, A, B, C, D, z, delta_bias, initial_state, lam, *given)
    if lam is not None:
        lam = lam.to(dtype).expand(u.shape)
        lam = torch.sigmoid(lam) if lam_sigmoid else lam
    if reverse:
        u, delta, B, C = (v if v.dim() == 2 else v.flip(-1) for v in (u, delta, B, C))
        z, seq_idx, lam = (None if v is None else v.flip(-1) for v in (z, seq_idx, lam))
        if cu_seqlens is not None:
            cu_seqlens = seqlen - cu_seqlens.flip(0)
            initial_state = None if initial_state is None else initial_state.flip(0)
            given = tuple(None if v is None else v.flip(0) for v in given)
    u, A, own_B = u.to(dtype), A.to(dtype), B.to(dtype)
    delta = step_sizes(delta.to(dtype), None if delta_bias is None else delta_bias.to(dtype)[:, None], delta_softplus)
    Bt, Ct = _per_step(own_B, batch, dim, seqlen), _per_step(C.to(dtype), batch, dim, seqlen)
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    states = A.new_zeros(sequences, dim, A.shape[-1]) if initial_state is None else initial_state.to(dtype)
    given_u = u.new_zeros(sequences, dim) if given[0] is None else given[0].to(dtype)
    given_B = None if B.dim() == 2 else own_B.new_zeros(sequences, *own_B.shape[1:-1])
    if given_B is not None and given[1] is not None:
        given_B = given[1].to(dtype)
    resets = resets_of(seq_idx, batch, seqlen, u.device)
    spans = [(0, seqlen)] if cu_seqlens is None else [*itertools.pairwise(cu_seqlens.tolist())]
    factors = dense_coefficients(discretization, delta, A[:, None], alpha=alpha, lam=lam)
    decays, gains, gains_before = (factor.unbind(2) for factor in factors)
    samples = (Bt * u[:, :, None]).unbind(-1)

    def apply(matrix: Tensor, vector: Tensor) -> Tensor:
        return (matrix @ vector[..., None])[..., 0]

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
            h = apply(decays[t], h) + apply(gains[t], now) + apply(gains_before[t], sample)
            sample, u_before, B_before = now, u[..., t], None if B.dim() == 2 else own_B[..., t]
            outputs.append((h * Ct[..., t]).sum(-1))
            at[t + 1] = ScanState(h, u_before, B_before)
        last.append(ScanState(h, u_before, B_before))

    if cu_seqlens is not None and seqlen == 0 and 0 in at:
        # The state at 0 is that of the sequence of step 0, and there is none.
        of_first = at[0]
        no_B = None if of_first.B is None else torch.zeros_like(of_first.B)
        at[0] = ScanState(torch.zeros_like(of_first.state), torch.zeros_like(of_first.u), no_B)
    out = torch.stack(outputs, dim=-1) if outputs else u[..., :0]
    if D is not None:
        out = out + D.to(dtype)[:, None] * u
    if z is not None:
        out = out * F.silu(z.to(dtype))
    if reverse:
        out, last = out.flip(-1), last[::-1]
    results: list[Any] = [out]
    if return_last_state:
        state, sample_u, sample_B = zip(*last, strict=True)
        results.append(ScanState(torch.cat(state), torch.cat(sample_u), None if B.dim() == 2 else torch.cat(sample_B)))
    if states_at is not None:
        results.append([at[int(p)] for p in states_at])
    return tuple(results) if len(results) > 1 else out
