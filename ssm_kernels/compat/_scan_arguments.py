"""The arguments of the selective scan, in the forms of ``mamba_ssm`` and VMamba, as :func:`ssm_kernels.selective_scan` takes
them. The functions, the extension modules and their gradients share this file."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dtypes import cast, wide_dtype
from ._errors import check_shape
from ._promotion import common_dtype

__all__ = ["complex_pairs", "operator_arguments", "over_channels"]


def operator_arguments(
    function: str,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    *,
    takes_complex: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The tensors in the dtypes of :func:`ssm_kernels.selective_scan`.

    Sequences (``u``, ``delta``, ``z``, and ``B`` and ``C`` of more than two axes) get their common dtype, and parameters the
    wide dtype of it. Differentiable. ``function`` is the name in errors. With ``takes_complex`` ``A`` may be complex: ``B`` and
    ``C`` of each step are then complex or real, (..., dstate, 2 seqlen), with the parts of a step as neighbors.

    Raises:
        NotImplementedError, RuntimeError, TypeError: as :func:`._promotion.common_dtype`.
    """
    if takes_complex and isinstance(A, Tensor) and A.is_complex():
        return _complex_arguments(function, u, delta, A, B, C, D, z, delta_bias)
    common_dtype(function, A=A, B=B, C=C, D=D, delta_bias=delta_bias)
    per_step = {"u": u, "delta": delta, "z": z}
    per_step |= {key: value for key, value in (("B", B), ("C", C)) if value.dim() > 2}
    dtype = common_dtype(function, **per_step)
    wide = wide_dtype(dtype)
    return (
        cast(u, dtype),
        cast(delta, dtype),
        cast(A, wide),
        cast(B, dtype if B.dim() > 2 else wide),
        cast(C, dtype if C.dim() > 2 else wide),
        cast(D, wide),
        cast(z, dtype),
        cast(delta_bias, wide),
    )


def _complex_arguments(
    function: str,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    dtype = common_dtype(function, u=u, delta=delta, z=z)
    common_dtype(function, u=u, D=D, delta_bias=delta_bias)
    if any(value.dim() > 2 and value.dtype in (torch.float64, torch.complex128) for value in (B, C)):
        dtype = torch.float64
    wide = wide_dtype(dtype)
    number = torch.complex128 if wide == torch.float64 else torch.complex64

    def matrix(name: str, value: Tensor) -> Tensor:
        if value.is_complex():
            return value.to(number)
        if value.dim() < 3:
            raise RuntimeError(
                f"{function}: expected a complex {name} of shape (dim, dstate) with a complex A, got {value.dtype}"
            )
        if value.shape[-1] != 2 * u.shape[-1]:
            expected = f"(..., dstate, 2 seqlen) with 2 seqlen = {2 * u.shape[-1]}"
            raise ValueError(f"{function}: expected a complex {name}, or a real one of shape {expected}, got {[*value.shape]}")
        return complex_pairs(value).to(number)

    return (
        cast(u, dtype),
        cast(delta, dtype),
        A.to(number),
        matrix("B", B),
        matrix("C", C),
        cast(D, wide),
        cast(z, dtype),
        cast(delta_bias, wide),
    )


def complex_pairs(value: Tensor) -> Tensor:
    """(..., 2 n), real and imaginary parts as neighbors, as (..., n), in complex64 or, for float64, complex128."""
    return torch.view_as_complex(cast(value, wide_dtype(value.dtype)).unflatten(-1, (-1, 2)).contiguous())


def over_channels(
    name: str, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, delta_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """VMamba's tensors with a step size for each channel, and axes for the states. Differentiable.

    Raises:
        ValueError: the channels of ``delta`` do not divide those of ``u``, or ``delta_bias`` has others than ``delta``.
    """
    if A.dim() == 1:
        A, B, C = A[:, None], B.unsqueeze(-2), C.unsqueeze(-2)
    if u.dim() == 3 and delta.dim() == 3 and delta.shape[1] != u.shape[1]:
        dim, delta_dim = u.shape[1], delta.shape[1]
        if delta_dim == 0 or dim % delta_dim != 0:
            raise ValueError(f"{name}: expected delta of channels that divide those of u = {dim}, got {delta_dim}")
        if delta_bias is not None:
            check_shape(name, "delta_bias", delta_bias, "(delta_dim,)", (delta_dim,))
            delta_bias = delta_bias.repeat_interleave(dim // delta_dim)
        delta = delta.repeat_interleave(dim // delta_dim, dim=1)
    return u, delta, A, B, C, D, delta_bias
