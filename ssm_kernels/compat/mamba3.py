"""``mamba_ssm``'s functions of Mamba-3, of rank one and of higher rank: their signatures and results, our kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._dtypes import cast, wide_dtype
from ._errors import check_given, check_shape, peer_arguments
from ._promotion import common_dtype, no_autocast

__all__ = ["mamba3_mimo", "mamba3_siso_combined"]


def _check_gates(function: str, V: Tensor, **gates: Tensor) -> None:
    """The operator's own errors have the axes of its gates, (batch, seqlen, heads)."""
    if V.dim() != 4:
        return  # the operator names it
    batch, seqlen, heads = V.shape[:3]
    for name, gate in gates.items():
        check_shape(function, name, gate, "(batch, heads, seqlen)", (batch, heads, seqlen))


def _scan(
    function: str,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    Angles: Tensor,
    D: Tensor | None,
    Z: Tensor | None,
    *,
    factors: Sequence[Tensor | None] = (None, None, None),
    states: Sequence[Tensor | None] = (None, None, None, None),
    cu_seqlens: Tensor | None,
    rotate: str,
    chunk_size: int | None,
) -> tuple[Tensor, ...]:
    """``out`` and the four states after the last step, as the operator has them.

    Args:
        factors: ``mimo_x``, ``mimo_z`` and ``mimo_out`` of :func:`ssm_kernels.mamba3_chunk_scan`.
        states: before the first step.
    """
    dtype = common_dtype(function, V=V, Q=Q, K=K, Z=Z)
    wide = wide_dtype(dtype)
    with no_autocast(V):
        found: tuple[Tensor, ...] = torch.ops.ssm_kernels._mamba3_chunk_scan(
            cast(V, dtype),
            *(cast(gate, wide).transpose(1, 2) for gate in (DT, ADT)),
            cast(K, dtype),
            cast(Q, dtype),
            cast(Trap, wide).transpose(1, 2),
            *(cast(tensor, wide) for tensor in (Angles, K_bias, Q_bias, D)),
            cast(Z, dtype),
            *(cast(factor, wide) for factor in factors),
            None,  # norm_weight
            *(cast(state, kind) for state, kind in zip(states, (wide, wide, wide, dtype), strict=True)),
            None,  # seq_idx
            cu_seqlens,
            0.0,
            rotate,
            chunk_size,
            False,
            True,
        )
    return found


@peer_arguments(x="V", B="K", C="Q", dt="DT", A="ADT", trap="Trap", angles="Angles", B_bias="K_bias", C_bias="Q_bias", z="Z")
def mamba3_siso_combined(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    Angles: Tensor,
    D: Tensor | None = None,
    Z: Tensor | None = None,
    Input_States: Sequence[Tensor] | None = None,
    chunk_size: int | None = 64,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """The scan of Mamba-3 of rank one: :func:`ssm_kernels.mamba3_chunk_scan`, in any mix of dtypes.

    ``mamba_ssm`` rounds every argument to bfloat16; here each keeps its dtype. ``ADT`` is ``A`` times ``DT``: its gradient is
    that of the product, and ``DT`` has none through the decay.

    Args:
        Q: (batch, seqlen, groups, dstate), ``C`` of :func:`ssm_kernels.mamba3_chunk_scan`.
        K: likewise, ``B``.
        V: (batch, seqlen, heads, headdim), ``x``.
        ADT: (batch, heads, seqlen), ``A * dt``.
        DT: (batch, heads, seqlen), ``dt``.
        Trap: (batch, heads, seqlen), ``trap``.
        Q_bias: (heads, dstate), ``C_bias``.
        K_bias: (heads, dstate), ``B_bias``.
        Angles: (batch, seqlen, heads, angles), ``angles``.
        D: (heads,).
        Z: shape of ``V``.
        Input_States: the states (angle, ssm, K, V) before the first step.
        chunk_size: a hint.
        return_final_states: also return the four states after the last step.
        cu_seqlens: (sequences + 1,), of packed sequences in a batch of 1.

    Returns:
        ``out``, shape and dtype of ``V``; with ``return_final_states`` then the states (angle, ssm, K, V), in the same tuple:
        angle from 0 to 2 pi and ssm float32 (float64 with float64 sequences), K and V of the dtypes of ``K`` and ``V``.
        Differentiable, states included. Autocast changes nothing.

    Raises:
        ValueError, RuntimeError, TypeError: as :func:`ssm_kernels.mamba3_chunk_scan`.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.mamba3 import mamba3_siso_combined
        >>> Q, K, V = torch.randn(1, 20, 1, 8), torch.randn(1, 20, 1, 8), torch.randn(1, 20, 2, 4)
        >>> DT = torch.rand(1, 2, 20)
        >>> bias, Angles = torch.ones(2, 8), torch.randn(1, 20, 2, 2)
        >>> mamba3_siso_combined(Q, K, V, -DT, DT, torch.randn(1, 2, 20), bias, bias, Angles).shape
        torch.Size([1, 20, 2, 4])
    """
    name = "mamba3_siso_combined"
    check_given(name, Q=Q, K=K, V=V, ADT=ADT, DT=DT, Trap=Trap, Angles=Angles)
    if Input_States is not None and len(Input_States) != 4:
        raise ValueError(f"{name}: expected Input_States to be (angle, ssm, K, V), got {len(Input_States)} of them")
    _check_gates(name, V, ADT=ADT, DT=DT, Trap=Trap)
    states = (None, None, None, None) if Input_States is None else Input_States
    arguments = (Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z)
    out, angle, ssm, k, v = _scan(name, *arguments, states=states, cu_seqlens=cu_seqlens, rotate="pairs", chunk_size=chunk_size)
    out = out.to(V.dtype)
    if not return_final_states:
        return out
    return out, torch.remainder(angle, 2 * torch.pi), ssm, k.to(K.dtype), v.to(V.dtype)


@peer_arguments(
    x="V",
    B="K",
    C="Q",
    dt="DT",
    A="ADT",
    trap="Trap",
    angles="Angles",
    B_bias="K_bias",
    C_bias="Q_bias",
    z="Z",
    mimo_x="MIMO_V",
    mimo_z="MIMO_Z",
    mimo_out="MIMO_Out",
)
def mamba3_mimo(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    MIMO_V: Tensor,
    MIMO_Z: Tensor | None,
    MIMO_Out: Tensor | None,
    Angles: Tensor,
    D: Tensor | None,
    Z: Tensor | None,
    chunk_size: int | None,
    rotary_dim_divisor: int,
    dtype: torch.dtype | None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """The scan of Mamba-3 of any rank: :func:`ssm_kernels.mamba3_chunk_scan` with ranks and ``"halves"``, in any mix of dtypes.

    ``ADT`` is ``A`` times ``DT``: its gradient is that of the product, and ``DT`` has none through the decay.

    Args:
        Q: (batch, seqlen, ranks, groups, dstate), ``C`` of :func:`ssm_kernels.mamba3_chunk_scan`.
        K: likewise, ``B``.
        V: (batch, seqlen, heads, headdim), ``x``.
        ADT: (batch, heads, seqlen), ``A * dt``.
        DT: (batch, heads, seqlen), ``dt``.
        Trap: (batch, heads, seqlen), ``trap``.
        Q_bias: (heads, ranks, dstate), ``C_bias``.
        K_bias: likewise, ``B_bias``.
        MIMO_V: (heads, ranks, headdim), ``mimo_x``.
        MIMO_Z: likewise, ``mimo_z``; without effect if ``Z`` is None.
        MIMO_Out: likewise, ``mimo_out``. None: the result has an axis of ranks, which is not summed over; it is then computed
            by a scan for each rank.
        Angles: (batch, seqlen, heads, angles), ``angles``.
        D: (heads,).
        Z: shape of ``V``.
        chunk_size: a hint.
        rotary_dim_divisor: ``dstate`` over the columns of ``Angles``.
        dtype: of the result; that of ``V`` if None.
        return_state: also return the four states after the last step.
        cu_seqlens: (sequences + 1,), of packed sequences in a batch of 1. The states have a row for each sequence.

    Returns:
        ``out``, shape of ``V``, or (batch, seqlen, ranks, heads, headdim) without ``MIMO_Out``; with ``return_state`` then the
        states (angle, ssm, K, V), in the same tuple: angle from 0 to 2 pi and ssm float32 (float64 with float64 sequences), K,
        (batch, ranks, heads, dstate), and V of the dtypes of ``K`` and ``V``. Differentiable, states included. Autocast changes
        nothing.

    Raises:
        ValueError: ``rotary_dim_divisor`` does not fit ``Angles``, or as :func:`ssm_kernels.mamba3_chunk_scan`.
        RuntimeError, TypeError: as :func:`ssm_kernels.mamba3_chunk_scan`.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.mamba3 import mamba3_mimo
        >>> (Q, K), V = torch.randn(2, 1, 20, 4, 1, 8), torch.randn(1, 20, 2, 4)
        >>> DT, bias, factor = torch.rand(1, 2, 20), torch.ones(2, 4, 8), torch.ones(2, 4, 4)
        >>> scan = Q, K, V, -DT, DT, torch.randn(1, 2, 20), bias, bias, factor, factor, factor
        >>> mamba3_mimo(*scan, torch.randn(1, 20, 2, 2), None, torch.randn(1, 20, 2, 4), 16, 4, None).shape
        torch.Size([1, 20, 2, 4])
    """
    name = "mamba3_mimo"
    check_given(name, Q=Q, K=K, V=V, ADT=ADT, DT=DT, Trap=Trap, MIMO_V=MIMO_V, Angles=Angles)
    _check_gates(name, V, ADT=ADT, DT=DT, Trap=Trap)
    if K.dim() != 5:
        axes = "(batch, seqlen, ranks, groups, dstate)"
        raise ValueError(f"{name}: expected K of shape {axes}, got {[*K.shape]}")
    if Angles.shape[-1] * rotary_dim_divisor != K.shape[-1]:
        got = f"{Angles.shape[-1]} columns, rotary_dim_divisor {rotary_dim_divisor} and dstate {K.shape[-1]}"
        raise ValueError(f"{name}: expected rotary_dim_divisor times the columns of Angles to be dstate, got {got}")

    def scan(mimo_out: Tensor | None) -> tuple[Tensor, ...]:
        arguments = (Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z)
        factors = (MIMO_V, None if Z is None else MIMO_Z, mimo_out)
        return _scan(name, *arguments, factors=factors, cu_seqlens=cu_seqlens, rotate="halves", chunk_size=chunk_size)

    if MIMO_Out is not None:
        out, *last = scan(MIMO_Out)
    else:
        units = torch.eye(MIMO_V.shape[1], device=V.device)[:, None, :, None].expand(-1, V.shape[2], -1, V.shape[3])
        each = [scan(unit) for unit in units.contiguous()]
        out, last = torch.stack([one[0] for one in each], dim=2), [*each[0][1:]]
    out = out.to(V.dtype if dtype is None else dtype)
    if not return_state:
        return out
    angle, ssm, k, v = last
    return out, torch.remainder(angle, 2 * torch.pi), ssm, k.transpose(1, 2).to(K.dtype), v.to(V.dtype)
