"""The functions of the extension modules ``selective_scan_cuda`` (mamba_ssm 1.0 to 2.3) and, of VMamba and its copies,
``selective_scan_cuda_core``, ``_oflex``, ``_nrow`` and ``_ndstate``. Clients call them from autograd functions of their own.

Arguments are positional, results are lists, and a buffer for a gradient is filled in place, as in the modules. Autograd records
nothing. The modules save states in ``x`` for backward. Here ``x`` has the same shape, and only the last state in it, at
``x[:, :, -1, 1::2]``, is computed: the rest is zero, and ``bwd`` computes forward again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dtypes import cast, wide_dtype
from ._errors import check_device, check_shape, peer_arguments
from ._promotion import check_real, common_dtype, no_autocast
from ._scan_arguments import operator_arguments, over_channels
from .selective_scan import selective_scan_fn

__all__ = [
    "core_bwd",
    "core_fwd",
    "ndstate_bwd",
    "ndstate_fwd",
    "nrow_bwd",
    "nrow_fwd",
    "oflex_bwd",
    "oflex_fwd",
    "selective_scan_bwd",
    "selective_scan_fwd",
]

_forward = torch.ops.ssm_kernels._selective_scan_fwd.default
_backward = torch.ops.ssm_kernels._selective_scan_bwd.default

# Steps between the saved states of mamba_ssm.
_CHUNK = 2048


@torch.no_grad()
@peer_arguments("selective_scan_cuda.fwd")
def selective_scan_fwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    nrows: int = 1,
) -> list[Tensor]:
    """``selective_scan_cuda.fwd``: the scan of :func:`.selective_scan.selective_scan_fn`.

    Args:
        nrows: without effect; VMamba's forks pass it.

    Other arguments, and their dtypes, are those of :func:`.selective_scan.selective_scan_fn`.

    Returns:
        ``[out, x]`` or, with ``z``, ``[out, x, out_z]``. ``out``, (batch, dim, seqlen), is the scan before the gate, and
        ``out_z`` after it, both in the dtype of ``u``. ``x`` is (batch, dim, chunks of 2048 steps, 2 dstate), float32 (float64
        beside float64 sequences), and ``x[:, :, -1, 1::2]`` the last state. Not differentiable.

    Raises:
        NotImplementedError: ``A`` is complex.
        ValueError, RuntimeError, TypeError, NotImplementedError: as :func:`.selective_scan.selective_scan_fn`.
    """
    check_real("selective_scan_cuda.fwd", "A", A)
    out, last_state = selective_scan_fn(u, delta, A, B, C, D, None, delta_bias, delta_softplus, True)
    x = _saved_states(u, last_state)
    if z is None:
        return [out, x]
    if z.dtype == u.dtype == wide_dtype(u.dtype) and z.shape == u.shape:
        return [out, x, F.silu(z).mul_(out)]
    # The gate of a narrow dtype acts on the sum before it is rounded.
    out_z = selective_scan_fn(u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    assert isinstance(out_z, Tensor)
    return [out, x, out_z]


@torch.no_grad()
@peer_arguments("selective_scan_cuda.bwd", grad_out="dout")
def selective_scan_bwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    dout: Tensor,
    x: Tensor | None,
    out: Tensor | None,
    dz: Tensor | None,
    delta_softplus: bool,
    recompute_out_z: bool,
    nrows: int = 1,
) -> list[Tensor | None]:
    """``selective_scan_cuda.bwd``: the gradients of :func:`selective_scan_fwd`, which runs again.

    Args:
        dout: (batch, dim, seqlen), the gradient of ``out_z``, or of ``out`` without ``z``.
        x: not read.
        out: not read.
        dz: the gradient of ``z`` is written into this tensor, of the shape of ``z``, if it is given.
        recompute_out_z: also return ``out_z``.
        nrows: without effect.

    Returns:
        ``[du, ddelta, dA, dB, dC, dD, ddelta_bias]``, with ``z`` also ``dz``, which is the argument if that is given, and with
        ``recompute_out_z`` also ``out_z``. Each gradient has the dtype of its tensor, and is None without it.

    Raises:
        ValueError: ``dout`` or ``dz`` has another shape than above.
        RuntimeError, TypeError, NotImplementedError: as :func:`selective_scan_fwd`.
    """
    name = "selective_scan_cuda.bwd"
    out_z, gradients = _gradients(name, dout, u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    du, ddelta, dA, dB, dC, dD, new_dz, ddelta_bias = gradients
    results = [du, ddelta, dA, dB, dC, dD, ddelta_bias]
    if z is not None:
        results.append(new_dz if dz is None else fill(name, "dz", dz, new_dz))
    if recompute_out_z:
        results.append(out_z if z is not None else None)
    return results


def _make_fwd(name: str, has_out_float: bool) -> Callable[..., list[Tensor]]:
    def fwd(
        u: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        delta_bias: Tensor | None,
        delta_softplus: bool,
        nrows: int,
        out_float: bool = False,
    ) -> list[Tensor]:
        u_wide = u.to(wide_dtype(u.dtype)) if out_float else u
        tensors = over_channels(name, u_wide, delta, A, B, C, D, delta_bias)
        check_real(name, "A", A)
        out, last_state = selective_scan_fn(*tensors[:6], None, tensors[6], delta_softplus, True)
        return [out, _saved_states(u, last_state)]

    fwd.__doc__ = f"""``{name}``: the scan of VMamba, without a gate.

    Args:
        u: (batch, dim, seqlen).
        delta: (batch, delta_dim, seqlen), where delta_dim divides dim: consecutive channels share their step sizes.
        A: (dim, dstate), or (dim,) for one state.
        B: (batch, groups, dstate, seqlen), or (batch, groups, seqlen) with ``A`` of shape (dim,).
        C: as ``B``.
        D: (dim,) or None.
        delta_bias: (delta_dim,) or None.
        delta_softplus: apply softplus to ``delta + delta_bias``.
        nrows: without effect.
        {
        "out_float: return out in float32, computed in float32 from a float32 copy of narrower sequences."
        if has_out_float
        else ""
    }

    Returns:
        ``[out, x]``: ``out``, (batch, dim, seqlen), and ``x`` as :func:`selective_scan_fwd`. Not differentiable.

    Raises:
        ValueError, RuntimeError, TypeError, NotImplementedError: as :func:`selective_scan_fwd`.
    """
    fwd.__qualname__ = _member(name)
    return torch.no_grad()(peer_arguments(name)(fwd))


def _make_bwd(name: str) -> Callable[..., list[Tensor | None]]:
    def bwd(
        u: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        delta_bias: Tensor | None,
        dout: Tensor,
        x: Tensor | None,
        delta_softplus: bool,
        nrows: int,
    ) -> list[Tensor | None]:
        _, (du, ddelta, dA, dB, dC, dD, _, ddelta_bias) = _gradients(
            name, dout, u, delta, A, B, C, D, None, delta_bias, delta_softplus
        )
        return [du, ddelta, dA, dB, dC, dD, ddelta_bias]

    bwd.__doc__ = f"""``{name}``: the gradients of VMamba's scan, whose forward runs again.

    ``dout`` is (batch, dim, seqlen), in the dtype of ``u`` or float32. ``x`` is not read and ``nrows`` has no effect.

    Returns:
        ``[du, ddelta, dA, dB, dC, dD, ddelta_bias]``, each in the shape and dtype of its tensor; None without it.

    Raises:
        ValueError, RuntimeError, TypeError, NotImplementedError: as :func:`selective_scan_bwd`.
    """
    bwd.__qualname__ = _member(name)
    return torch.no_grad()(peer_arguments(name, grad_out="dout")(bwd))


def _member(name: str) -> str:
    """The name in this module of a function of an extension module: ``core_fwd`` of ``selective_scan_cuda_core.fwd``."""
    return name.removeprefix("selective_scan_cuda_").replace(".", "_")


core_fwd = _make_fwd("selective_scan_cuda_core.fwd", False)
core_bwd = _make_bwd("selective_scan_cuda_core.bwd")
nrow_fwd = _make_fwd("selective_scan_cuda_nrow.fwd", False)
nrow_bwd = _make_bwd("selective_scan_cuda_nrow.bwd")
ndstate_fwd = _make_fwd("selective_scan_cuda_ndstate.fwd", False)
ndstate_bwd = _make_bwd("selective_scan_cuda_ndstate.bwd")
oflex_fwd = _make_fwd("selective_scan_cuda_oflex.fwd", True)
oflex_bwd = _make_bwd("selective_scan_cuda_oflex.bwd")


def _saved_states(u: Tensor, last_state: Tensor) -> Tensor:
    batch, dim, dstate = last_state.shape
    chunks = max(-(-u.shape[2] // _CHUNK), 1)
    x = last_state.new_zeros(batch, dim, chunks, 2 * dstate)
    x[:, :, -1, 1::2] = last_state
    return x


def _gradients(
    name: str,
    dout: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> tuple[Tensor, list[Tensor | None]]:
    """The output, and the gradients of ``u, delta, A, B, C, D, z, delta_bias``."""
    common_dtype(name, u=u, dout=dout)
    check_shape(name, "dout", dout, "(batch, dim, seqlen)", u.shape)
    u_wide = cast(u, torch.promote_types(u.dtype, dout.dtype))
    tensors = over_channels(name, u_wide, delta, A, B, C, D, delta_bias)
    arguments = operator_arguments(name, *tensors[:6], z, tensors[6])
    # The operators themselves, because torch.library.custom_op calls this function where autograd does not record.
    with no_autocast(u):
        out, _, states = _forward(*arguments, None, "zoh", bool(delta_softplus), True)
        needed = [argument is not None for argument in arguments]
        grads = _backward(
            cast(dout, out.dtype),
            None,
            *arguments,
            states,
            "zoh",
            bool(delta_softplus),
            None,
            None,
            None,
            False,
            [*needed, False],
        )
    found: list[Tensor | None] = []
    for given, grad in zip((u, delta, A, B, C, D, z, delta_bias), grads, strict=False):
        if given is None:
            found.append(None)
            continue
        if grad.numel() > given.numel():  # step sizes of several channels
            axis = 1 if given.dim() == 3 else 0
            grad = grad.unflatten(axis, (given.shape[axis], -1)).sum(axis + 1)
        found.append(cast(grad.reshape(given.shape), given.dtype))
    return cast(out, u.dtype), found


def fill(function: str, name: str, buffer: Tensor, value: Tensor | None) -> Tensor:
    """Writes ``value`` into the caller's tensor and returns that."""
    assert value is not None
    if not isinstance(buffer, Tensor):
        raise TypeError(f"{function}: expected {name} to be a tensor, got {type(buffer).__name__}")
    if buffer.shape != value.shape:
        raise ValueError(f"{function}: expected {name} of shape {list(value.shape)}, got {list(buffer.shape)}")
    check_device(function, name, buffer, "its gradient", value)
    return buffer.copy_(value)
