"""``mamba_ssm``'s functions of Mamba-2 (2.3.2): signatures, dtypes of results and effects are its own, the kernels ours."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from .._arguments import names_arguments
from .._packing import check_same_packing, with_padding
from ..convolutions import causal_conv1d
from ._promotion import cast, common_dtype, no_autocast, readable, wide_dtype
from .norms import rmsnorm_fn

__all__ = ["mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"]


@names_arguments
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
    *,
    discretization: str = "zoh",
) -> Tensor | tuple[Tensor, ...]:
    """The scan of Mamba-2: :func:`ssm_kernels.ssd_chunk_scan`, whose arguments these are, in any mix of dtypes.

    Args:
        cu_seqlens: (sequences + 1,), the ends of packed sequences, used with ``return_varlen_states`` only. Steps after its
            last element are padding.
        seq_idx: (1, seqlen) with ``return_varlen_states``: the same packing as ``cu_seqlens``. The CPU checks this unless it
            compiles; CUDA does not, because the host would have to wait for the device.
        return_varlen_states: also return the state at the end of each sequence of ``cu_seqlens``.
        state_dtype: dtype of ``varlen_states``; that of ``C`` by default. States between chunks are float32 at least.
        discretization: as for :func:`ssm_kernels.ssd_chunk_scan`; not in ``mamba_ssm``.

    Parameters and ``initial_states`` become float32 (float64 beside float64 sequences): small copies. If ``x``, ``dt``, ``B``,
    ``C`` and ``z`` differ, all are widened to the widest: a float32 ``dt`` beside a bfloat16 ``x`` costs float32 copies of the
    sequences and the float32 kernels.

    Returns:
        ``out``, shape and dtype of ``x``, or ``(out, final_states)``, ``(out, varlen_states)`` or ``(out, final_states,
        varlen_states)``. ``final_states`` are float32 (float64 beside float64 sequences). All are differentiable with respect
        to every floating-point tensor. Autocast changes nothing.

    Raises:
        ValueError: shapes or options are not as for :func:`ssm_kernels.ssd_chunk_scan`, or ``return_varlen_states`` comes
            without ``cu_seqlens``, with a batch of more than 1, or with a ``seq_idx`` of another packing.
        NotImplementedError: a complex tensor.
        RuntimeError, TypeError: as :func:`ssm_kernels.ssd_chunk_scan`.
    """
    name = "mamba_chunk_scan_combined"
    common_dtype(name, A=A, x=x, D=D, dt_bias=dt_bias, initial_states=initial_states)
    dtype = common_dtype(name, x=x, dt=dt, B=B, C=C, z=z)
    wide = wide_dtype(dtype)
    initial_states = cast(initial_states, wide)
    ends, last = None, None
    if return_varlen_states:
        if cu_seqlens is None:
            raise ValueError(f"{name}: expected cu_seqlens with return_varlen_states, got None")
        if x.dim() != 4 or x.shape[0] != 1:
            raise ValueError(f"{name}: expected x of batch size 1 with return_varlen_states, got shape {list(x.shape)}")
        if seq_idx is not None:
            check_same_packing(name, seq_idx, cu_seqlens)
        elif cu_seqlens.shape[0] > 2:
            raise ValueError(f"{name}: expected seq_idx with return_varlen_states of several sequences, got None")
        ends = with_padding(cu_seqlens, x.shape[1])
        places = torch.arange(ends.shape[0] - 1, device=ends.device)
        is_full = ends[1:] > ends[:-1]
        last = torch.where(is_full, places, 0).amax()[None]
        if initial_states is not None:
            first = torch.where(is_full, places, places.shape[0] - 1).amin()
            initial_states = torch.where((places == first).view(-1, 1, 1, 1), initial_states, 0)
    with no_autocast(x):
        out, states = ops.ssd_chunk_scan(
            cast(x, dtype),
            cast(dt, dtype),
            cast(A, wide),
            cast(B, dtype),
            cast(C, dtype),
            chunk_size=chunk_size,
            D=cast(D, wide),
            z=cast(z, dtype),
            dt_bias=cast(dt_bias, wide),
            dt_softplus=bool(dt_softplus),
            dt_limit=dt_limit,
            initial_states=initial_states,
            seq_idx=None if return_varlen_states else seq_idx,
            cu_seqlens=ends,
            return_final_states=True,
            discretization=discretization,
        )
    results = [cast(out, x.dtype)]
    if return_final_states:
        results.append(states if last is None else states.index_select(0, last))
    if return_varlen_states:
        results.append(cast(states[:-1], C.dtype if state_dtype is None else state_dtype))
    return tuple(results) if len(results) > 1 else results[0]


@names_arguments
def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: Sequence[float] = (0.0, math.inf),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
    *,
    discretization: str = "zoh",
) -> Tensor | tuple[Tensor, Tensor]:
    """The Mamba-2 mixer after its in-projection: convolution, scan, gated norm and, if given, the out-projection.

    Args:
        zxbcdt: (batch, seqlen, 2 mlp + 2 dim + 2 ngroups dstate + heads): a parallel MLP's gate and value, the gate ``z``, the
            convolution's input ``x``, ``B``, ``C``, and ``dt``. dim is heads times headdim; mlp may be 0.
        conv1d_weight: (dim + 2 ngroups dstate, width).
        conv1d_bias: (dim + 2 ngroups dstate,).
        dt_bias: (heads,).
        A: (heads,).
        D: (heads,), then with ``headdim``, or (heads, headdim).
        rmsnorm_weight: (dim,); None: the scan gates its output and there is no norm.
        outproj_weight: (out_dim, mlp + dim).
        state_dtype: without effect: states are float32 at least.
        discretization: as for :func:`ssm_kernels.ssd_chunk_scan`; not in ``mamba_ssm``.

    Other arguments and dtypes are those of :func:`mamba_chunk_scan_combined` and :func:`.norms.rmsnorm_fn`.

    Returns:
        ``out``, (batch, seqlen, out_dim or mlp + dim); with ``return_final_states`` also ``final_states``, (batch, heads,
        headdim, dstate), float32 (float64 beside a float64 ``zxbcdt``). Differentiable with respect to every floating-point
        tensor. Under autocast the out-projection alone runs in its dtype.

    Raises:
        NotImplementedError: an activation other than None, ``"silu"`` and ``"swish"``.
        ValueError: a shape is not as above, or ``outproj_bias`` comes without ``outproj_weight``.
        RuntimeError, TypeError: as :func:`ssm_kernels.ssd_chunk_scan`.
    """
    name = "mamba_split_conv1d_scan_combined"
    common_dtype(name, zxbcdt=zxbcdt, D=D)
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"{name}: expected activation None, 'silu' or 'swish', got {activation!r}")
    if outproj_weight is None and outproj_bias is not None:
        raise ValueError(f"{name}: expected outproj_bias with outproj_weight only")
    if D.dim() == 2:
        headdim = D.shape[1]
    elif headdim is None:
        raise ValueError(f"{name}: expected headdim with D of shape (heads,), got None")
    heads = D.shape[0]
    dim = heads * headdim
    columns = conv1d_weight.shape[0]
    dstate = (columns - dim) // ngroups // 2
    mlp = (zxbcdt.shape[-1] - dim - columns - heads) // 2
    if zxbcdt.dim() != 3 or mlp < 0 or dstate < 1 or zxbcdt.shape[-1] != 2 * mlp + dim + columns + heads:
        raise ValueError(
            f"{name}: expected zxbcdt of 2 * mlp + {dim} + {columns} + {heads} columns (z, convolution, dt), got "
            f"{list(zxbcdt.shape)}"
        )
    gate, up, z, xBC, dt = zxbcdt.split([mlp, mlp, dim, columns, heads], dim=-1)
    with no_autocast(zxbcdt):
        xBC = causal_conv1d(
            xBC,
            readable(conv1d_weight, zxbcdt.dtype),
            readable(conv1d_bias, zxbcdt.dtype),
            activation=activation,
            seq_idx=seq_idx,
        )
    x, B, C = xBC.split([dim, ngroups * dstate, ngroups * dstate], dim=-1)
    results = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, headdim)),
        dt,
        A,
        B.unflatten(-1, (ngroups, dstate)),
        C.unflatten(-1, (ngroups, dstate)),
        chunk_size,
        D=D,
        z=z.unflatten(-1, (heads, headdim)) if rmsnorm_weight is None else None,
        dt_bias=dt_bias,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=True,
        discretization=discretization,
    )
    out, final_states = results[0].flatten(-2), results[1]
    if rmsnorm_weight is not None:
        out = rmsnorm_fn(out, rmsnorm_weight, None, z, rmsnorm_eps, dim // ngroups, norm_before_gate)
    if mlp > 0:
        out = torch.cat([F.silu(gate) * up, out], dim=-1)
    if outproj_weight is not None:
        out = F.linear(out, outproj_weight, cast(outproj_bias, outproj_weight.dtype))
    return (out, final_states) if return_final_states else out
