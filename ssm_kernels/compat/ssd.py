"""``mamba_ssm``'s functions of Mamba-2 (2.3.2): signatures, dtypes of results and effects are its own, the kernels ours."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dtypes import cast, wide_dtype
from ..choices import ExponentialDiscretizationName
from ..ops._packing import check_same_packing, with_padding
from ..ops.ssd import ssd_chunk_scan
from ._errors import check_activation, check_device, check_given, check_projection, check_shape, peer_arguments
from ._promotion import common_dtype, no_autocast
from .causal_conv1d import convolve
from .norms import rmsnorm_fn

__all__ = ["mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"]


@peer_arguments()
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] | None = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
    *,
    discretization: ExponentialDiscretizationName = "zoh",
) -> Tensor | tuple[Tensor, ...]:
    """The scan of Mamba-2: :func:`ssm_kernels.ssd_chunk_scan`, whose arguments these are, in any mix of dtypes.

    Args:
        initial_states: (batch, heads, headdim, dstate), the state before the first step of each row. With
            ``return_varlen_states`` (1, heads, headdim, dstate): the first non-empty sequence of ``cu_seqlens`` starts from
            it, the others from zero.
        cu_seqlens: (sequences + 1,), int32 or int64, the ends of packed sequences, for ``return_varlen_states``. Steps after
            its last element are padding. Without ``return_varlen_states`` it has no effect and needs a ``seq_idx``, which
            divides the sequences.
        seq_idx: (batch, seqlen): a new sequence begins where it changes. Negative numbers are padding: a row that ends with
            padding has zero ``final_states``. With ``return_varlen_states`` (1, seqlen), the same packing as ``cu_seqlens``:
            the CPU checks this unless it compiles; CUDA does not, because the host would have to wait for the device.
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
            without ``cu_seqlens``, with a batch of more than 1, or with a ``seq_idx`` of another packing, or ``cu_seqlens``
            comes without ``return_varlen_states`` and ``seq_idx``.
        NotImplementedError: a complex tensor.
        RuntimeError, TypeError: as :func:`ssm_kernels.ssd_chunk_scan`.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.ssd import mamba_chunk_scan_combined
        >>> x, dt = torch.randn(2, 100, 4, 16), torch.rand(2, 100, 4)
        >>> A, B, C = -torch.rand(4), torch.randn(2, 100, 1, 32), torch.randn(2, 100, 1, 32)
        >>> mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size=64).shape
        torch.Size([2, 100, 4, 16])
    """
    name = "mamba_chunk_scan_combined"
    check_given(name, dt=dt, A=A)
    _check_state_dtype(name, state_dtype)
    if cu_seqlens is not None:
        _check_cu_seqlens(name, cu_seqlens)
        if seq_idx is None and not return_varlen_states:
            raise ValueError(
                f"{name}: expected seq_idx or return_varlen_states=True with cu_seqlens, which alone divides no sequences"
            )
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
        if seq_idx is None:
            if cu_seqlens.shape[0] > 2:
                raise ValueError(f"{name}: expected seq_idx with return_varlen_states of several sequences, got None")
        elif seq_idx.shape != x.shape[:2]:
            raise ValueError(f"{name}: expected seq_idx of shape (1, seqlen) = {list(x.shape[:2])}, got {list(seq_idx.shape)}")
        else:
            check_same_packing(name, seq_idx, cu_seqlens)
        ends = with_padding(cu_seqlens, x.shape[1])
        places = torch.arange(ends.shape[0] - 1, device=ends.device)
        is_full = ends[1:] > ends[:-1]
        last = torch.where(is_full, places, 0).amax()[None]
        if initial_states is not None:
            dstate = B.shape[3] if B.dim() == 4 else None
            shape = (1, *x.shape[2:], dstate)
            check_shape(name, "initial_states", initial_states, "(1, heads, headdim, dstate)", shape)
            first = torch.where(is_full, places, places.shape[0] - 1).amin()
            initial_states = torch.where((places == first).view(-1, 1, 1, 1), initial_states, 0)
    with no_autocast(x):
        out, states = ssd_chunk_scan(
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
        final_states = states if last is None else states.index_select(0, last)
        if seq_idx is not None and seq_idx.shape[1] > 0:
            final_states = final_states.masked_fill((seq_idx[:, -1] < 0).view(-1, 1, 1, 1), 0)
        results.append(final_states)
    if return_varlen_states:
        results.append(cast(states[:-1], C.dtype if state_dtype is None else state_dtype))
    return tuple(results) if len(results) > 1 else results[0]


def _check_state_dtype(name: str, state_dtype: torch.dtype | None) -> None:
    if state_dtype is None:
        return
    if not isinstance(state_dtype, torch.dtype):
        raise TypeError(f"{name}: expected state_dtype to be a torch.dtype or None, got {type(state_dtype).__name__}")
    if not state_dtype.is_floating_point:
        raise ValueError(f"{name}: expected a floating-point state_dtype, got {state_dtype}")


def _check_cu_seqlens(name: str, cu_seqlens: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{name}: expected cu_seqlens to be a tensor or None, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name}: expected cu_seqlens of shape (sequences + 1,), got {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"{name}: expected cu_seqlens of dtype int32 or int64, got {cu_seqlens.dtype}")


_convolve = peer_arguments(x="zxbcdt", weight="conv1d_weight", bias="conv1d_bias")(convolve)
_scan = peer_arguments(x="zxbcdt", dt="zxbcdt")(mamba_chunk_scan_combined)
_normalize = peer_arguments(x="zxbcdt", weight="rmsnorm_weight")(rmsnorm_fn)


@peer_arguments()
def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int | None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: Sequence[float] | None = (0.0, math.inf),
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
    discretization: ExponentialDiscretizationName = "zoh",
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
        seq_idx: (batch, seqlen): a new sequence begins where it changes. Negative numbers are padding: there the convolution's
            output is zero, and so are the scan's output and the state.
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

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.ssd import mamba_split_conv1d_scan_combined
        >>> batch, seqlen, heads, headdim, dstate = 2, 100, 4, 16, 32
        >>> dim = heads * headdim
        >>> zxbcdt = torch.randn(batch, seqlen, 2 * dim + 2 * dstate + heads)
        >>> conv, dt_bias, A, D = torch.randn(dim + 2 * dstate, 4), torch.zeros(heads), -torch.rand(heads), torch.ones(heads)
        >>> mamba_split_conv1d_scan_combined(zxbcdt, conv, None, dt_bias, A, D, chunk_size=64, headdim=headdim).shape
        torch.Size([2, 100, 64])
    """
    name = "mamba_split_conv1d_scan_combined"
    check_given(name, A=A)
    common_dtype(name, zxbcdt=zxbcdt, conv1d_weight=conv1d_weight, conv1d_bias=conv1d_bias, dt_bias=dt_bias, A=A, D=D)
    parameters = {"rmsnorm_weight": rmsnorm_weight, "outproj_weight": outproj_weight, "outproj_bias": outproj_bias}
    common_dtype(name, zxbcdt=zxbcdt, **parameters)
    _check_state_dtype(name, state_dtype)
    kind = check_activation(name, activation)
    if outproj_weight is None and outproj_bias is not None:
        raise ValueError(f"{name}: expected outproj_bias with outproj_weight only")
    if D.dim() not in (1, 2):
        raise ValueError(f"{name}: expected D of shape (heads,) or (heads, headdim), got {list(D.shape)}")
    if D.dim() == 2:
        headdim = D.shape[1]
    elif headdim is None:
        raise ValueError(f"{name}: expected headdim with D of shape (heads,), got None")
    for argument, value in (("headdim", headdim), ("ngroups", ngroups)):
        if value < 1:
            raise ValueError(f"{name}: expected {argument} of at least 1, got {value}")
    heads = D.shape[0]
    dim = heads * headdim
    columns = conv1d_weight.shape[0] if conv1d_weight.dim() == 2 else 0
    dstate = (columns - dim) // ngroups // 2
    if dstate < 1 or columns != dim + 2 * ngroups * dstate:
        raise ValueError(
            f"{name}: expected conv1d_weight of shape (dim + 2 * ngroups * dstate, width), with dim = {dim} and ngroups = "
            f"{ngroups}, got {list(conv1d_weight.shape)}"
        )
    mlp = (zxbcdt.shape[-1] - dim - columns - heads) // 2 if zxbcdt.dim() == 3 else -1
    if mlp < 0 or zxbcdt.shape[-1] != 2 * mlp + dim + columns + heads:
        raise ValueError(
            f"{name}: expected zxbcdt of 2 * mlp + {dim} + {columns} + {heads} columns (gate, convolution, step sizes), got "
            f"{list(zxbcdt.shape)}"
        )
    if outproj_weight is not None:
        shape = (None, mlp + dim)
        check_projection(name, "outproj_weight", outproj_weight, "(out_dim, mlp + dim)", shape, "zxbcdt", zxbcdt)
        if outproj_bias is not None:
            check_shape(name, "outproj_bias", outproj_bias, "(out_dim,)", outproj_weight.shape[:1])
            check_device(name, "outproj_bias", outproj_bias, "zxbcdt", zxbcdt)
    gate, up, z, xBC, dt = zxbcdt.split([mlp, mlp, dim, columns, heads], dim=-1)
    xBC, _ = _convolve(xBC, conv1d_weight, conv1d_bias, kind, seq_idx)
    x, B, C = xBC.split([dim, ngroups * dstate, ngroups * dstate], dim=-1)
    results = _scan(
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
        return_final_states=return_final_states,
        discretization=discretization,
    )
    out, final_states = results if isinstance(results, tuple) else (results, None)
    out = out.flatten(-2)
    if rmsnorm_weight is not None:
        out = _normalize(out, rmsnorm_weight, None, z, rmsnorm_eps, dim // ngroups, norm_before_gate)
    if mlp > 0:
        out = torch.cat([F.silu(gate) * up, out], dim=-1)
    if outproj_weight is not None:
        out = F.linear(out, outproj_weight, cast(outproj_bias, outproj_weight.dtype))
    return out if final_states is None else (out, final_states)
