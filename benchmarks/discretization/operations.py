"""Part 1: the elementary operations of a discretization, in PyTorch.

With a diagonal A, one step of one channel needs ``dstate`` values of a scalar function of ``z = delta A``. With a full A the
same rule needs a function of a ``dstate x dstate`` matrix: an inverse or a solve for the bilinear rule, a matrix exponential
for the exact ones. Both are reported per channel and step, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.harness import Stages, Timing, measure


@dataclass(frozen=True)
class Operation:
    """One operation's cost.

    Attributes:
        name: the operation.
        form: ``"diagonal"`` (elementwise) or ``"full"`` (on matrices).
        dtype: the dtype of the computation; ``torch.linalg`` has no fp16 or bf16 matrices.
        per_element: nanoseconds per element of ``z``, or per entry of the matrix.
        per_step: nanoseconds per channel and step of ``dstate`` states.
        timing: for the whole tensor.
    """

    name: str
    form: str
    dtype: str
    per_element: float
    per_step: float
    timing: Timing

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "form": self.form,
            "dtype": self.dtype,
            "ns_per_element": self.per_element,
            "ns_per_channel_step": self.per_step,
            "timing": self.timing.to_dict(),
        }


def _elementwise(elements: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Stages]:
    """Operations on ``z`` in (-2, 0), into a preallocated result."""
    z = (-2 * torch.rand(elements, generator=generator)).to(device, dtype)
    result, second = torch.empty_like(z), torch.empty_like(z)

    def polynomial(*coefficients: float) -> Callable[[], torch.Tensor]:
        highest, *lower = reversed(coefficients)

        def horner() -> torch.Tensor:
            torch.mul(z, highest, out=result).add_(lower[0])
            for coefficient in lower[1:]:
                result.mul_(z).add_(coefficient)
            return result

        return horner

    def bilinear() -> torch.Tensor:
        torch.mul(z, -0.5, out=second).add_(1.0).reciprocal_()  # c / delta = 1 / (1 - z/2)
        return torch.mul(second, 2.0, out=result).sub_(1.0)  # Abar = 2 c / delta - 1

    return {
        "exp": (lambda: torch.exp(z, out=result),),
        "expm1": (lambda: torch.expm1(z, out=result),),
        "reciprocal": (lambda: torch.reciprocal(z, out=result),),
        "polynomial, 2 terms": (polynomial(1.0, 1 / 2),),
        "polynomial, 3 terms": (polynomial(1.0, 1 / 2, 1 / 6),),
        "polynomial, 4 terms": (polynomial(1.0, 1 / 2, 1 / 6, 1 / 24),),
        "bilinear, Abar and c": (bilinear,),
    }


def _full(
    matrices: int, dstate: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Stages]:
    """Operations on ``delta A`` of shape (matrices, dstate, dstate), A full and stable."""
    random = torch.randn(matrices, dstate, dstate, generator=generator, dtype=torch.float64)
    A = -torch.eye(dstate, dtype=torch.float64) - random @ random.mT / dstate
    z = (0.1 * A).to(device, dtype)
    identity = torch.eye(dstate, device=device, dtype=dtype)
    left, right = identity - z / 2, identity + z / 2
    return {
        "inverse": (lambda: torch.linalg.inv(left),),
        "solve (bilinear Abar)": (lambda: torch.linalg.solve(left, right),),
        "matrix exponential": (lambda: torch.linalg.matrix_exp(z),),
    }


def time_operations(
    dstate: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    trials: int,
    budget: float | None,
    seed: int,
    on_trial: Callable[[], None] | None = None,
) -> list[Operation]:
    """Times every operation for ``dstate`` states per channel. The fixed sizes stay in a CPU's cache and fill a GPU."""
    generator = torch.Generator().manual_seed(seed)
    cuda = device.type == "cuda"
    elements = dstate * max(1, 2 ** (24 if cuda else 16) // dstate)
    matrices = max(2, min(2**14, 2**26 // dstate**3) if cuda else min(256, 2**21 // dstate**3))
    full_dtype = dtype if dtype == torch.float64 else torch.float32

    operations = []
    groups = (
        ("diagonal", dtype, elements, elements // dstate, _elementwise(elements, device, dtype, generator)),
        ("full", full_dtype, matrices * dstate**2, matrices, _full(matrices, dstate, device, full_dtype, generator)),
    )
    for form, used, count, steps, stages in groups:
        share = None if budget is None else budget / len(groups)
        for name, measured in measure(stages, device=device, trials=trials, warmup=2, budget=share, on_trial=on_trial).items():
            nanoseconds = 1e9 * measured.total.median
            dtype_name = str(used).removeprefix("torch.")
            operations.append(Operation(name, form, dtype_name, nanoseconds / count, nanoseconds / steps, measured.total))
    return operations
