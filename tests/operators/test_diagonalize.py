"""diagonalize: a complex diagonal system with the outputs of one with matrices."""

import math

import pytest
import torch

from ssm_kernels import diagonalize, reference


def scan(system, u, delta):
    """The real part of a bilinear scan of complex numbers."""
    A, B, C = system
    h, outputs = 0, []
    for t in range(u.shape[-1]):
        z = delta[..., t, None] * A
        B_t, C_t = (X if X.dim() == 2 else X[..., t] for X in (B, C))
        h = ((1 + z / 2) * h + delta[..., t, None] * B_t * u[..., t, None]) / (1 - z / 2)
        outputs.append((h * C_t).sum(-1).real)
    return torch.stack(outputs, -1)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_has_the_outputs_of_the_matrices(constant, shared):
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    u, delta = randn(2, 4, 9), randn(2, 4, 9).abs()
    A = (randn(1 if shared else 4, 5, 5) / 5**0.5 - torch.eye(5, dtype=torch.float64)).requires_grad_()
    B, C = (randn(4, 5) for _ in range(2)) if constant else (randn(2, 2, 5, 9), randn(2, 5, 9))
    system = diagonalize(A, B, C)
    if shared and not constant:
        system = system._replace(B=system.B.repeat_interleave(2, 1))
    found = scan(system, u, delta)
    expected = reference.selective_scan(u, delta, A, B, C, discretization="bilinear")
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    weights = randn(2, 4, 9)
    grads = [torch.autograd.grad((out * weights).sum(), A)[0] for out in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_refuses_dependent_eigenvectors():
    B = torch.ones(2, 3)
    A = torch.stack([-torch.eye(3), torch.diag(torch.ones(2), 1) - torch.eye(3)])
    with pytest.raises(ValueError, match="condition number of at most 10000, got inf for matrix 1"):
        diagonalize(A, B, B)
    n = torch.arange(16.0)
    legs = -torch.tril(torch.sqrt(2 * n[:, None] + 1) * torch.sqrt(2 * n + 1), -1) - torch.diag(n + 1)
    with pytest.raises(ValueError, match=r"got 8.* for matrix 0"):
        diagonalize(legs[None], torch.ones(1, 16), torch.ones(1, 16))
    assert diagonalize(A[:1], B, B, max_condition=1.1).B.dtype == torch.complex64


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"A": torch.ones(4, 3)}, ValueError, r"A of shape \(dim, dstate, dstate\) or \(1, dstate, dstate\), got \[4, 3\]"),
        ({"C": torch.ones(2, 4)}, ValueError, r"C of shape .* with dstate = 3, got \[2, 4\]"),
        ({"B": torch.ones(5, 3)}, ValueError, r"B of shape \(dim, dstate\) = \[4, 3\], got \[5, 3\]"),
        ({"B": torch.ones(2, 3, 3, 7)}, ValueError, "the groups of B to divide dim = 4, got 3"),
        ({"A": torch.full((4, 3, 3), math.nan)}, ValueError, "finite A, got NaN or infinity"),
        ({"A": torch.ones(4, 3, 3, dtype=torch.complex64)}, RuntimeError, "A of dtype float32 or float64, got complex64"),
        ({"A": torch.ones(4, 3, 3, dtype=torch.int64)}, RuntimeError, "A of dtype float32 or float64, got int64"),
        ({"B": torch.ones(4, 3, dtype=torch.complex64)}, RuntimeError, "B to be real, got complex64"),
        ({"C": None}, TypeError, "C to be a tensor, got NoneType"),
    ],
)
def test_errors(changes, kind, message):
    arguments = {"A": -torch.eye(3).repeat(4, 1, 1), "B": torch.ones(4, 3), "C": torch.ones(4, 3)}
    with pytest.raises(kind, match=f"^diagonalize: expected {message}"):
        diagonalize(**arguments | changes)
