"""``mamba_ssm``'s function of Mamba-3 of rank one: its signature and results, our kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._dtypes import cast, wide_dtype
from ._errors import check_given, peer_arguments
from ._promotion import common_dtype, no_autocast

__all__ = ["mamba3_siso_combined"]


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
    states = (None, None, None, None) if Input_States is None else Input_States
    dtype = common_dtype(name, V=V, Q=Q, K=K, Z=Z)
    wide = wide_dtype(dtype)
    with no_autocast(V):
        out, angle, ssm, k, v = torch.ops.ssm_kernels._mamba3_chunk_scan(
            cast(V, dtype),
            *(cast(gate, wide).transpose(1, 2) for gate in (DT, ADT)),
            cast(K, dtype),
            cast(Q, dtype),
            cast(Trap, wide).transpose(1, 2),
            cast(Angles, wide),
            cast(K_bias, wide),
            cast(Q_bias, wide),
            cast(D, wide),
            cast(Z, dtype),
            *(None, None, None, None),  # of ranks
            *(cast(state, kind) for state, kind in zip(states, (wide, wide, wide, dtype), strict=True)),
            None,
            cu_seqlens,
            0.0,
            "pairs",
            chunk_size,
            False,
            True,
        )
    out = out.to(V.dtype)
    if not return_final_states:
        return out
    return out, torch.remainder(angle, 2 * torch.pi), ssm, k.to(K.dtype), v.to(V.dtype)
