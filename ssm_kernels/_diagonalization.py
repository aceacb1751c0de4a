"""From a matrix A to the diagonal of its eigenvalues."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._torchscript import refuse_script

__all__ = ["DiagonalSystem", "diagonalize"]


class DiagonalSystem(NamedTuple):
    """A system with a complex diagonal, whose output is the real part of ``<C, h>``.

    Attributes:
        A: the eigenvalues, (dim, dstate).
        B: (dim, dstate) or (batch, dim, dstate, seqlen).
        C: as ``B``.

    Examples:
        >>> import torch
        >>> from ssm_kernels import diagonalize
        >>> diagonalize(torch.eye(3)[None], torch.ones(1, 3), torch.ones(1, 3))._fields
        ('A', 'B', 'C')
    """

    A: Tensor
    B: Tensor
    C: Tensor


def _check(A: Tensor, B: Tensor, C: Tensor) -> None:
    for name, tensor in (("A", A), ("B", B), ("C", C)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"diagonalize: expected {name} to be a tensor, got {type(tensor).__name__}")
        if tensor.is_complex() or (name == "A" and tensor.dtype not in (torch.float32, torch.float64)):
            expected = "of dtype float32 or float64" if name == "A" else "to be real"
            raise RuntimeError(f"diagonalize: expected {name} {expected}, got {str(tensor.dtype).removeprefix('torch.')}")
    if A.dim() != 3 or A.shape[1] != A.shape[2]:
        raise ValueError(f"diagonalize: expected A of shape (dim, dstate, dstate) or (1, dstate, dstate), got {[*A.shape]}")
    if not A.isfinite().all():
        raise ValueError("diagonalize: expected finite A, got NaN or infinity")
    matrices, dstate = A.shape[:2]
    for name, tensor in (("B", B), ("C", C)):
        if tensor.dim() not in (2, 3, 4) or tensor.shape[-1 if tensor.dim() == 2 else -2] != dstate:
            raise ValueError(
                f"diagonalize: expected {name} of shape (dim, dstate), (batch, dstate, seqlen) or "
                f"(batch, groups, dstate, seqlen) with dstate = {dstate}, got {[*tensor.shape]}"
            )
        if matrices == 1 or tensor.dim() == 3:
            continue
        if tensor.dim() == 2 and tensor.shape[0] != matrices:
            raise ValueError(
                f"diagonalize: expected {name} of shape (dim, dstate) = {[matrices, dstate]}, got {[*tensor.shape]}"
            )
        if tensor.dim() == 4 and (tensor.shape[1] == 0 or matrices % tensor.shape[1]):
            raise ValueError(f"diagonalize: expected the groups of {name} to divide dim = {matrices}, got {tensor.shape[1]}")


@refuse_script
def diagonalize(A: Tensor, B: Tensor, C: Tensor, *, max_condition: float = 1e4) -> DiagonalSystem:
    r"""The complex diagonal system with the outputs of a system with matrices ``A``, for every discretization.

    .. math::
        A = V \Lambda V^{-1}, \quad h' = \Lambda h + V^{-1} B u, \quad y = \mathrm{Re}\, \langle V^T C, h \rangle

    All eigenvalues are kept, both of a conjugate pair. The errors of a scan grow with the condition number of ``V``. It is
    infinite for a defective ``A`` and large for matrices far from normal: 8e10 for HiPPO-LegS with 16 states. For those,
    :func:`ssm_kernels.selective_scan` takes the matrices as they are.

    Args:
        A: (dim, dstate, dstate), or (1, dstate, dstate) for one matrix; real, float32 or float64.
        B: (dim, dstate), (batch, dstate, seqlen) or (batch, groups, dstate, seqlen), real.
        C: as ``B``, independently of it.
        max_condition: the largest condition number of ``V``, whose columns have unit length.

    Returns:
        :class:`DiagonalSystem`, complex64 or, for float64, complex128. ``B`` and ``C`` per step have a group for each matrix of
        ``A``, or with one matrix their own groups. Computed in complex128, and differentiable.

    Raises:
        ValueError: a shape is not as above, ``A`` is not finite, or the condition number is above ``max_condition``.
        RuntimeError: a dtype is not as above.
        TypeError: an argument is not a tensor.

    Examples:
        >>> import torch
        >>> from ssm_kernels import diagonalize
        >>> A = torch.tensor([[[-1.0, 2.0], [-2.0, -1.0]]])
        >>> diagonalize(A, torch.ones(1, 2), torch.ones(1, 2)).A.imag.sort().values
        tensor([[-2.,  2.]])
        >>> diagonalize(torch.tensor([[[-1.0, 1.0], [0.0, -1.0]]]), torch.ones(1, 2), torch.ones(1, 2))
        Traceback (most recent call last):
        ...
        ValueError: diagonalize: expected eigenvectors with a condition number of at most 10000, got inf for matrix 0
    """
    _check(A, B, C)
    values, vectors = torch.linalg.eig(A.double())
    condition = torch.linalg.cond(vectors.detach())
    # Rounding leaves eigenvectors of a defective matrix at a distance.
    condition = torch.where(condition > 1e15, torch.inf, condition)
    if condition.numel() > 0 and not bool((condition <= max_condition).all()):
        largest = torch.where(condition.isnan(), torch.inf, condition).argmax()
        raise ValueError(
            f"diagonalize: expected eigenvectors with a condition number of at most {max_condition:.10g}, "
            f"got {condition[largest].item():.3g} for matrix {largest.item()}"
        )

    def of_matrices(matrix: Tensor, factor: Tensor) -> Tensor:
        matrix = matrix.to(vectors.dtype)
        if matrix.dim() == 2:
            return (factor @ matrix[..., None])[..., 0]
        groups = matrix[:, None] if matrix.dim() == 3 else matrix
        return factor @ groups.repeat_interleave(max(1, len(factor) // groups.shape[1]), dim=1)

    dtype = torch.complex128 if A.dtype == torch.float64 else torch.complex64
    new_B = torch.linalg.solve(vectors, torch.eye(A.shape[1], dtype=vectors.dtype, device=A.device))
    return DiagonalSystem(values.to(dtype), of_matrices(B, new_B).to(dtype), of_matrices(C, vectors.mT).to(dtype))
