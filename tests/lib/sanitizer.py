"""Calls for compute-sanitizer: each runs once on a GPU, and its results are compared with those of the CPU.

The inputs are made on the CPU and copied to the GPU. The sanitizer's reports are therefore about the package's kernels, or
about PyTorch's kernels that run with them. Each tensor is a separate allocation (vector_allocator.py), so the sanitizer finds
accesses past the last 16-byte vector of any tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from helpers import DEBUG_OPTION_VALUES, KERNEL_OPTIONS, debug_option, move_all
from operator_spec import OperatorSpec, Results

Inputs = dict[str, Any]
Move = Callable[[Inputs, str], Inputs]

# A test of the sanitizer's helpers runs them on the CPU.
DEVICE = "cuda"
PYTESTMARK = [pytest.mark.cuda, pytest.mark.sanitizer]


def over(names: str, cases: Iterable[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrizes a test over cases, each an identifier and the values of these parameters."""
    return pytest.mark.parametrize(names, [pytest.param(*values, id=str(name)) for name, *values in cases])


def kernels_of(family: str) -> Sequence[str]:
    """The values of the debug option that chooses the family's kernels."""
    return DEBUG_OPTION_VALUES[KERNEL_OPTIONS[family]] if family in KERNEL_OPTIONS else ("only",)


def choose_kernel(family: str, name: str) -> AbstractContextManager[Any]:
    return debug_option(KERNEL_OPTIONS[family], name) if family in KERNEL_OPTIONS else nullcontext()


def both_devices(inputs: Inputs, move: Move = move_all) -> Iterator[Inputs]:
    """Copies of the inputs on the CPU and on the GPU."""
    return (move(inputs, device) for device in ("cpu", DEVICE))


def assert_close_to_cpu(actual: Results, expected: Results, *, in_16_bits: bool = False, roundings: int | None = None) -> None:
    """Compares results of the GPU with those of the CPU. The tolerances are loose: other tests check accuracy.

    Args:
        in_16_bits: results of any dtype have the errors of fp16 and bf16 operands.
        roundings: replaces the tolerance, which is a share of the largest value: so many roundings of a result in float32 or
            float64, and two of one in fp16 or bf16.
    """
    for name, value in expected.items():
        if not value.numel():
            continue
        largest = value.detach().double().abs().max().item()
        if roundings is None:
            relative = 3e-2 if in_16_bits else {torch.float64: 1e-9, torch.float32: 1e-4}.get(value.dtype, 3e-2)
            tolerance = relative * max(largest, 1e-30)  # the device flushes float32 numbers below 1e-38 to zero
        else:
            tolerance = (2 if value.element_size() == 2 else roundings) * torch.finfo(value.dtype).eps * (1 + largest)
        difference = (actual[name].detach().cpu().double() - value.detach().double()).abs().max().item()
        assert difference <= tolerance, f"{name} differs from the CPU's by {difference:.3g}, more than {tolerance:.3g}"


def assert_same_on_gpu(
    operator: OperatorSpec,
    inputs: Inputs,
    *,
    wanted: Sequence[str] | None = None,
    through: Sequence[str] | None = None,
    move: Move = move_all,
    contexts: Sequence[AbstractContextManager[Any]] = (),
    **tolerance: Any,
) -> None:
    """Compares the operator's results and gradients on the GPU with those on the CPU.

    Args:
        wanted: the tensors that get a gradient; none of them if empty, all by default.
        through: the results that send a gradient back, by default all.
        contexts: entered around the call on the GPU.
        tolerance: keyword arguments of :func:`assert_close_to_cpu`.
    """
    cotangents = {}
    if wanted is None or len(wanted):
        every = dict(zip(operator.results, operator.make_cotangents(inputs), strict=True))
        cotangents = {name: value if through is None or name in through else None for name, value in every.items()}

    def evaluate(device: str) -> Results:
        moved = tuple(move(cotangents, device).values()) or None
        return operator.evaluate(operator, move(inputs, device), moved, wanted)

    expected = evaluate("cpu")
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        actual = evaluate(DEVICE)
    assert_close_to_cpu(actual, expected, **tolerance)
