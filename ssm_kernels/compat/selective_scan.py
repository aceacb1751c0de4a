"""``mamba_ssm``'s functions of Mamba (2.3.2): signatures, dtypes of results and effects are its own, the kernels ours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from .._dtypes import cast, readable, wide_dtype
from ..choices import DiscretizationName
from ..ops.norm import rms_norm_gated
from ._cache_rows import CacheRows, check_scan_cache
from ._errors import check_device, check_projection, check_shape, peer_arguments
from ._promotion import common_dtype, no_autocast
from ._scan_arguments import complex_pairs, operator_arguments
from .layer_norm import layer_norm_fn

__all__ = [
    "bimamba_inner_fn",
    "mamba_inner_fn",
    "mamba_inner_fn_no_out_proj",
    "rms_norm_forward",
    "selective_scan_fn",
    "selective_state_update",
]


@peer_arguments()
def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    discretization: DiscretizationName = "zoh",
) -> Tensor | tuple[Tensor, Tensor]:
    """The selective scan: :func:`ssm_kernels.selective_scan` with the positions and the freedom of dtypes of ``mamba_ssm``.

    Args:
        u: (batch, dim, seqlen).
        delta: shape of ``u``.
        A: (dim, dstate), real or complex.
        B: (dim, dstate), (batch, dstate, seqlen) or (batch, groups, dstate, seqlen). With a complex ``A`` complex, or real with
            a last axis of 2 seqlen: the real and the imaginary part of each step as neighbors.
        C: as ``B``, independently of it.
        D: (dim,).
        z: shape of ``u``.
        delta_bias: (dim,).
        delta_softplus: apply softplus to ``delta + delta_bias``.
        return_last_state: also return the state after the last step.
        discretization: one of ``ssm_kernels.discretizations``; not in ``mamba_ssm``.

    Every tensor may have its own floating-point dtype. Parameters (``A``, ``D``, ``delta_bias``, constant ``B`` and ``C``)
    become float32, or float64 beside a float64 sequence: copies of small tensors. If ``u``, ``delta``, ``z`` and the ``B`` and
    ``C`` of each step differ, all are widened to the widest of them. A float32 ``B`` beside a bfloat16 ``u`` thus costs float32
    copies of the bfloat16 sequences, and the scan reads twice the bytes: cast ``B`` first where its rounding does not matter.

    Returns:
        ``out``, shape and dtype of ``u``; with ``return_last_state`` also ``last_state``, (batch, dim, dstate), float32
        (float64 beside float64 sequences), or complex as ``A``. Both are differentiable with respect to every tensor (in
        ``mamba_ssm`` the last state is not); gradients have the dtype of their tensor. Autocast changes nothing.

    Raises:
        NotImplementedError: a tensor other than ``A``, ``B`` and ``C`` is complex.
        ValueError, RuntimeError, TypeError: as :func:`ssm_kernels.selective_scan`.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.selective_scan import selective_scan_fn
        >>> u, delta = torch.randn(2, 8, 100), torch.rand(2, 8, 100)
        >>> A, B, C = -torch.rand(8, 16), torch.randn(2, 16, 100), torch.randn(2, 16, 100)
        >>> selective_scan_fn(u, delta, A, B, C, delta_softplus=True).shape
        torch.Size([2, 8, 100])
    """
    out, last_state = _selective_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus, discretization)
    return (out, last_state) if return_last_state else out


def _selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    discretization: DiscretizationName,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    arguments = operator_arguments("selective_scan_fn", u, delta, A, B, C, D, z, delta_bias, takes_complex=True)
    with no_autocast(u):
        out, last_state = ops.selective_scan(
            *arguments,
            discretization=discretization,
            delta_softplus=bool(delta_softplus),
            reverse=reverse,
            return_last_state=True,
        )
    return cast(out, u.dtype), last_state


_scan = peer_arguments(u="xz", delta="xz")(_selective_scan)


@peer_arguments()
def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
    *,
    discretization: DiscretizationName = "zoh",
) -> Tensor:
    """The Mamba mixer between its in-projection and its result: convolution, projections, selective scan, gate, out-projection.

    Args:
        xz: (batch, 2 dim, seqlen): the in-projection's output, the scan's half first.
        conv1d_weight: (dim, 1, width).
        conv1d_bias: (dim,).
        x_proj_weight: (rank + dstate for each of B and C that is None, dim); with a complex ``A`` 2 dstate for each, the real
            and the imaginary part of a state as neighbors.
        delta_proj_weight: (dim, rank).
        out_proj_weight: (out_dim, dim).
        out_proj_bias: (out_dim,).
        A: (dim, dstate), real or complex.
        B: as in :func:`selective_scan_fn`; None: projected from ``x``.
        C: likewise.
        D: (dim,).
        delta_bias: (dim,).
        B_proj_bias: (dstate,), added to the projected ``B``; with a complex ``A`` (2 dstate,), as those rows.
        C_proj_bias: likewise for ``C``.
        delta_softplus: apply softplus to ``delta + delta_bias``.
        checkpoint_lvl: 0 or 1, without effect: autograd saves the same tensors either way.
        b_rms_weight: (dstate,): RMSNorm of the projected ``B``.
        c_rms_weight: (dstate,), likewise for ``C``.
        dt_rms_weight: (dim,): RMSNorm of ``delta``, after its projection.
        b_c_dt_rms_eps: eps of the three norms.
        discretization: one of ``ssm_kernels.discretizations``; not in ``mamba_ssm``.

    Returns:
        ``out``, (batch, seqlen, out_dim). Differentiable with respect to every tensor, the weights of the three norms included
        (``mamba_ssm`` ignores these norms in backward). Dtypes mix as in :func:`selective_scan_fn`. Under autocast the
        projections run in its dtype, the rest in the dtype of its arguments.

    Raises:
        ValueError: a shape or ``checkpoint_lvl`` is not as above.
        NotImplementedError: a tensor other than ``A``, ``B`` and ``C`` is complex; ``b_rms_weight`` or ``c_rms_weight`` is
            given with a complex ``A``.
        RuntimeError, TypeError: as :func:`ssm_kernels.selective_scan`.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.selective_scan import mamba_inner_fn
        >>> batch, dim, seqlen, dstate, rank, out = 2, 8, 100, 4, 3, 6
        >>> xz, A = torch.randn(batch, 2 * dim, seqlen), -torch.rand(dim, dstate)
        >>> conv, x_proj = torch.randn(dim, 1, 4), torch.randn(rank + 2 * dstate, dim)
        >>> dt_proj, out_proj = torch.randn(dim, rank), torch.randn(out, dim)
        >>> mamba_inner_fn(xz, conv, None, x_proj, dt_proj, out_proj, None, A, D=torch.ones(dim)).shape
        torch.Size([2, 100, 6])
    """
    name = "mamba_inner_fn"
    y = _inner_scan(
        name,
        xz,
        conv1d_weight,
        conv1d_bias,
        x_proj_weight,
        delta_proj_weight,
        [A],
        B,
        C,
        D,
        delta_bias,
        B_proj_bias,
        C_proj_bias,
        delta_softplus,
        checkpoint_lvl,
        (b_rms_weight, c_rms_weight, dt_rms_weight),
        b_c_dt_rms_eps,
        (out_proj_weight, out_proj_bias),
        discretization,
    )
    return F.linear(y, out_proj_weight, cast(out_proj_bias, out_proj_weight.dtype))


@peer_arguments()
def mamba_inner_fn_no_out_proj(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    *,
    discretization: DiscretizationName = "zoh",
) -> Tensor:
    """:func:`mamba_inner_fn` without its out-projection and norms, a function of the vision forks of ``mamba_ssm``.

    Returns:
        the gated scan, (batch, dim, seqlen). Differentiable with respect to every tensor.

    Raises:
        ValueError, RuntimeError, TypeError, NotImplementedError: as :func:`mamba_inner_fn`.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.selective_scan import mamba_inner_fn_no_out_proj
        >>> batch, dim, seqlen, dstate, rank = 2, 8, 100, 4, 3
        >>> xz, A = torch.randn(batch, 2 * dim, seqlen), -torch.rand(dim, dstate)
        >>> conv, x_proj = torch.randn(dim, 1, 4), torch.randn(rank + 2 * dstate, dim)
        >>> dt_proj = torch.randn(dim, rank)
        >>> mamba_inner_fn_no_out_proj(xz, conv, None, x_proj, dt_proj, A, D=torch.ones(dim)).shape
        torch.Size([2, 8, 100])
    """
    return _inner_scan(
        "mamba_inner_fn_no_out_proj",
        xz,
        conv1d_weight,
        conv1d_bias,
        x_proj_weight,
        delta_proj_weight,
        [A],
        B,
        C,
        D,
        delta_bias,
        B_proj_bias,
        C_proj_bias,
        delta_softplus,
        checkpoint_lvl,
        discretization=discretization,
    ).transpose(1, 2)


@peer_arguments()
def bimamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    A_b: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    *,
    discretization: DiscretizationName = "zoh",
) -> Tensor:
    """:func:`mamba_inner_fn` with a second scan, backwards, of the same convolved sequence: Vim's ``bimamba_type="v1"``.

    Args:
        A_b: (dim, dstate), real or complex as ``A``: the matrix of the scan that begins at the last step. Both scans add ``D``
            times their input and have the same gate; their sum is projected.

    Other arguments are those of :func:`mamba_inner_fn`.

    Returns:
        ``out``, (batch, seqlen, out_dim). Differentiable with respect to every tensor.

    Raises:
        ValueError, RuntimeError, TypeError, NotImplementedError: as :func:`mamba_inner_fn`.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.selective_scan import bimamba_inner_fn
        >>> batch, dim, seqlen, dstate, rank, out = 2, 8, 100, 4, 3, 6
        >>> xz, A = torch.randn(batch, 2 * dim, seqlen), -torch.rand(dim, dstate)
        >>> conv, x_proj = torch.randn(dim, 1, 4), torch.randn(rank + 2 * dstate, dim)
        >>> dt_proj, out_proj = torch.randn(dim, rank), torch.randn(out, dim)
        >>> bimamba_inner_fn(xz, conv, None, x_proj, dt_proj, out_proj, None, A, A, D=torch.ones(dim)).shape
        torch.Size([2, 100, 6])
    """
    check_shape("bimamba_inner_fn", "A_b", A_b, "(dim, dstate)", A.shape)
    if A.is_complex() != A_b.is_complex():
        raise RuntimeError(f"bimamba_inner_fn: expected A_b real or complex as A, {A.dtype}, got {A_b.dtype}")
    y = _inner_scan(
        "bimamba_inner_fn",
        xz,
        conv1d_weight,
        conv1d_bias,
        x_proj_weight,
        delta_proj_weight,
        [A, A_b],
        B,
        C,
        D,
        delta_bias,
        B_proj_bias,
        C_proj_bias,
        delta_softplus,
        checkpoint_lvl,
        out_proj=(out_proj_weight, out_proj_bias),
        discretization=discretization,
    )
    return F.linear(y, out_proj_weight, cast(out_proj_bias, out_proj_weight.dtype))


def _inner_scan(
    name: str,
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    systems: list[Tensor],
    B: Tensor | None,
    C: Tensor | None,
    D: Tensor | None,
    delta_bias: Tensor | None,
    B_proj_bias: Tensor | None,
    C_proj_bias: Tensor | None,
    delta_softplus: bool,
    checkpoint_lvl: int,
    rms_weights: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    eps: float = 1e-6,
    out_proj: tuple[Tensor, Tensor | None] | None = None,
    discretization: DiscretizationName = "zoh",
) -> Tensor:
    """The gated scan, (batch, seqlen, dim), forwards with ``systems[0]`` and, added to it, backwards with ``systems[1]``."""
    A = systems[0]
    b_rms_weight, c_rms_weight, dt_rms_weight = rms_weights
    projections = {"x_proj_weight": x_proj_weight, "delta_proj_weight": delta_proj_weight}
    out_proj_weight, out_proj_bias = out_proj or (None, None)
    if out_proj is not None:
        projections["out_proj_weight"] = out_proj[0]
    biases = {"out_proj_bias": out_proj_bias, "B_proj_bias": B_proj_bias, "C_proj_bias": C_proj_bias}
    norms = {"b_rms_weight": b_rms_weight, "c_rms_weight": c_rms_weight, "dt_rms_weight": dt_rms_weight}
    common_dtype(name, xz=xz, conv1d_weight=conv1d_weight, conv1d_bias=conv1d_bias, D=D, delta_bias=delta_bias)
    common_dtype(name, **projections, **biases, **norms)
    is_complex = isinstance(A, Tensor) and A.is_complex()
    if not is_complex:
        common_dtype(name, A=A, B=B, C=C)
    elif b_rms_weight is not None or c_rms_weight is not None:
        raise NotImplementedError(f"{name}: b_rms_weight and c_rms_weight are not supported with a complex A")
    if checkpoint_lvl not in (0, 1):
        raise ValueError(f"{name}: expected checkpoint_lvl 0 or 1, got {checkpoint_lvl}")
    if xz.dim() != 3 or xz.shape[1] % 2 != 0:
        raise ValueError(f"{name}: expected xz of shape (batch, 2 * dim, seqlen), got {list(xz.shape)}")
    dim = xz.shape[1] // 2
    check_projection(name, "delta_proj_weight", delta_proj_weight, "(dim, rank)", (dim, None), "xz", xz)
    if out_proj_weight is not None:
        check_projection(name, "out_proj_weight", out_proj_weight, "(out_dim, dim)", (None, dim), "xz", xz)
    check_shape(name, "A", A, "(dim, dstate)", (dim, None))
    rank, dstate = delta_proj_weight.shape[1], A.shape[1]
    out_dim = None if out_proj_weight is None else out_proj_weight.shape[0]
    width, columns = (2 * dstate, "2 dstate") if is_complex else (dstate, "dstate")
    sizes = [rank, *[width] * ((B is None) + (C is None))]
    rows = " + ".join(["rank", columns, columns][: len(sizes)])
    check_projection(name, "x_proj_weight", x_proj_weight, f"({rows}, dim)", (sum(sizes), dim), "xz", xz)
    for argument, tensor, axes, shape in (
        ("conv1d_weight", conv1d_weight, "(dim, 1, width)", (dim, 1, None)),
        ("conv1d_bias", conv1d_bias, "(dim,)", (dim,)),
        ("out_proj_bias", out_proj_bias, "(out_dim,)", (out_dim,)),
        ("B_proj_bias", B_proj_bias, f"({columns},)", (width,)),
        ("C_proj_bias", C_proj_bias, f"({columns},)", (width,)),
        ("b_rms_weight", b_rms_weight, "(dstate,)", (dstate,)),
        ("c_rms_weight", c_rms_weight, "(dstate,)", (dstate,)),
        ("dt_rms_weight", dt_rms_weight, "(dim,)", (dim,)),
    ):
        if tensor is not None:
            check_shape(name, argument, tensor, axes, shape)
            check_device(name, argument, tensor, "xz", xz)
    with no_autocast(xz):
        x, scanned, z = torch.ops.ssm_kernels._mamba_conv(
            xz.transpose(1, 2), readable(conv1d_weight, xz.dtype), readable(conv1d_bias, xz.dtype), None, name
        )
    low_rank, *projected = F.linear(x, x_proj_weight).split(sizes, dim=-1)
    delta = F.linear(low_rank, delta_proj_weight)
    if B is None:
        B = _normalized(projected[0], B_proj_bias, b_rms_weight, eps)
        B = (complex_pairs(B) if is_complex else B).transpose(1, 2)
    elif B_proj_bias is not None or b_rms_weight is not None:
        raise NotImplementedError(f"{name}: B_proj_bias and b_rms_weight are not supported with a given B")
    if C is None:
        C = _normalized(projected[-1], C_proj_bias, c_rms_weight, eps)
        C = (complex_pairs(C) if is_complex else C).transpose(1, 2)
    elif C_proj_bias is not None or c_rms_weight is not None:
        raise NotImplementedError(f"{name}: C_proj_bias and c_rms_weight are not supported with a given C")
    delta = _normalized(delta, None, dt_rms_weight, eps)
    y: Tensor | None = None
    for index, system in enumerate(systems):
        one, _ = _scan(
            scanned.transpose(1, 2),
            delta.transpose(1, 2),
            system,
            B,
            C,
            D,
            z.transpose(1, 2),
            delta_bias,
            delta_softplus,
            discretization,
            reverse=index == 1,
        )
        y = one if y is None else y + one
    assert y is not None
    return y.transpose(1, 2)


@peer_arguments()
def rms_norm_forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-6, is_rms_norm: bool = True) -> Tensor:
    """RMSNorm, or LayerNorm, of the last axis: :func:`.layer_norm.layer_norm_fn` without a residual.

    Differentiable with respect to every tensor, unlike the function of ``mamba_ssm``.

    Raises:
        ValueError, RuntimeError, TypeError: as :func:`.layer_norm.layer_norm_fn`.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.selective_scan import rms_norm_forward
        >>> rms_norm_forward(torch.randn(10, 64), torch.ones(64), None).shape
        torch.Size([10, 64])
    """
    y = layer_norm_fn(x, weight, bias, eps=eps, is_rms_norm=is_rms_norm)
    assert isinstance(y, Tensor)
    return y


def _normalized(v: Tensor, bias: Tensor | None, weight: Tensor | None, eps: float) -> Tensor:
    """``v`` plus the bias, then its RMSNorm, each if present."""
    if bias is not None:
        v = v + bias.to(v.dtype)
    return v if weight is None else rms_norm_gated(v, readable(weight, v.dtype), eps=eps)


@peer_arguments()
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    *,
    discretization: DiscretizationName = "zoh",
) -> Tensor:
    """One decoding step; ``state`` is updated in place: :func:`ssm_kernels.selective_state_update` in any mix of dtypes.

    Arguments and shapes are those of :func:`ssm_kernels.selective_state_update`. Every tensor may have its own floating-point
    dtype; all are used as float32 (float64 beside a float64 ``x``). Narrower ``x``, ``dt``, ``B``, ``C`` and ``z`` are copied
    if they differ, which are tensors of one step; ``A``, ``D`` and ``dt_bias`` if they have a dtype other than float32 and that
    of ``x``. A ``state`` in a dtype other than float32 and that of ``x`` is computed in a float32 copy of the slots that the
    call uses and rounded once as it is written back.

    Returns:
        ``out``, shape and dtype of ``x``. Not differentiable.

    Raises:
        ValueError, RuntimeError, TypeError: as :func:`ssm_kernels.selective_state_update`.

    Examples:
        >>> import torch
        >>> from ssm_kernels.compat.selective_scan import selective_state_update
        >>> state, x, dt = torch.zeros(2, 8, 16), torch.randn(2, 8), torch.rand(2, 8)  # the state is updated in place
        >>> A, B, C = -torch.rand(8, 16), torch.randn(2, 16), torch.randn(2, 16)
        >>> selective_state_update(state, x, dt, A, B, C).shape
        torch.Size([2, 8])
    """
    name = "selective_state_update"
    common_dtype(name, state=state, A=A, D=D, dt_bias=dt_bias)
    dtype = common_dtype(name, x=x, dt=dt, B=B, C=C, z=z)
    wide = wide_dtype(dtype)
    takes_state = state.dtype in (dtype, wide)

    def step(state: Tensor, indices: Tensor | None) -> Tensor:
        with no_autocast(x):
            return ops.selective_state_update(
                state,
                cast(x, dtype),
                cast(dt, dtype),
                readable(A, dtype),
                cast(B, dtype),
                cast(C, dtype),
                readable(D, dtype),
                cast(z, dtype),
                readable(dt_bias, dtype),
                bool(dt_softplus),
                indices,
                discretization=discretization,
            )

    if takes_state:
        return cast(step(state, state_batch_indices), x.dtype)
    rows = CacheRows(state, state_batch_indices, x.shape[0] if x.dim() > 0 else 0, check_scan_cache)
    old = rows.read()
    new = old.to(wide)
    out = step(new, None)
    rows.write(old, new)
    return cast(rows.without_slot(out), x.dtype)
