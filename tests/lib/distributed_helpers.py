"""Helpers of the tests of ``ssm_kernels.distributed``: spans of a sequence, packed sequences, and what ranks send."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
from process_pool import TWO_GPUS, Mesh, Place, param
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SEQLEN = 23
# The steps of each rank: fewer than a convolution's halo, none, and as many as a rank likes.
LENGTHS = {1: (23,), 2: (9, 14), 3: (2, 0, 21), 4: (1, 2, 17, 3)}
PLACES = [*(Place((size,)) for size in LENGTHS), TWO_GPUS]
TOLERANCE = 1e-10
CU_SEQLENS = (0, 5, 5, 11, 23)
Cut = Callable[[Tensor, int], Tensor]


def over_places(checks: dict[str, Callable[..., None]]) -> list[Any]:
    """Parameters of a test that runs each check on every number of ranks.

    Two ranks of the CPU are exhaustive: what crosses their border also crosses those of three and of four.
    """
    places = {place: place == Place((2,)) for place in PLACES}
    return [param(place, check, id=n, exhaustive=rare) for n, check in checks.items() for place, rare in places.items()]


def spans(lengths: tuple[int, ...]) -> Iterator[slice]:
    begin = 0
    for length in lengths:
        yield slice(begin, begin + length)
        begin += length


def own_span(mesh: Mesh) -> slice:
    """The steps of this rank."""
    return [*spans(LENGTHS[mesh.size()])][mesh.get_local_rank()]


def generator(mesh: Mesh, seed: int) -> Callable[..., Tensor]:
    """Draws the same float64 numbers on every rank and device."""
    source = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=source, dtype=torch.float64).to(mesh.device_type)


def close(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{what}: {text}")


def parallelize(module: nn.Module, mesh: Mesh, exchange: str | None = None) -> nn.Module:
    """Splits the sequences of the module's layers over the ranks of a mesh."""
    from torch.distributed.tensor.parallel import parallelize_module

    from ssm_kernels.distributed import ContextParallel

    return parallelize_module(module, mesh, ContextParallel(exchange=exchange))


def compare_layer(
    mesh: Mesh,
    layer: nn.Module,
    call: Callable[[nn.Module, Cut], Any],
    what: str,
    axis: int = 1,
    exchanges: Sequence[str] = ("chain", "summaries"),
) -> None:
    """Compares a layer whose sequences are split over the ranks of a mesh with the same layer on one process.

    Args:
        call: calls a layer with inputs that its second argument cuts along an axis; returns the outputs of these steps and, if
            there is one, the last state.
        axis: the axis of time of the outputs.
        exchanges: those of a layer without a last state; layers that return one exchange summaries.
    """
    from ssm_kernels.distributed import sum_gradients

    size, own = mesh.size(), own_span(mesh)
    layer = layer.to(mesh.device_type)
    expected = call(layer, lambda value, axis: value)
    expected = expected if isinstance(expected, tuple) else (expected,)
    random = generator(mesh, 1)
    factors = [random(*result.shape) for result in expected]
    sum((result * factor).sum() for result, factor in zip(expected, factors, strict=True)).backward()

    def cut(value: Tensor, axis: int) -> Tensor:
        return value.narrow(axis, own.start, own.stop - own.start)

    for exchange in exchanges if len(expected) == 1 else ("summaries",):
        parallel = copy.deepcopy(layer)
        parallel.zero_grad()
        actual = call(parallelize(parallel, mesh, exchange), cut)
        actual = actual if isinstance(actual, tuple) else (actual,)
        close(actual[0], cut(expected[0], axis), f"{what}, {exchange}, {size} ranks, output")
        loss = (actual[0] * cut(factors[0], axis)).sum()
        for value, whole, factor in zip(actual[1:], expected[1:], factors[1:], strict=True):
            close(value, whole, f"{what}, {exchange}, {size} ranks, last state")
            loss = loss + (value * factor).sum() / size
        loss.backward()
        sum_gradients(parallel, mesh)
        for (name, parameter), whole in zip(parallel.named_parameters(), layer.parameters(), strict=True):
            close(parameter.grad, whole.grad, f"{what}, {exchange}, {size} ranks, gradient of {name}")
    layer.zero_grad()


def cu_seqlens_of(mesh: Mesh, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(CU_SEQLENS, dtype=dtype, device=mesh.device_type)


def packings(mesh: Mesh, batch: int) -> dict[str, dict[str, Tensor]]:
    """Options of packed sequences: some cross the borders, some end there, and the numbers may go down or be negative."""
    source = torch.Generator().manual_seed(3)
    ascending = torch.randint(0, 3, (batch, SEQLEN), generator=source).sort(1).values.to(mesh.device_type)
    random = torch.randint(-1, 2, (batch, SEQLEN), generator=source).to(mesh.device_type)
    return {"unpacked": {}, "ascending": {"seq_idx": ascending}, "random": {"seq_idx": random.int()}}


def random_flags(mesh: Mesh, batch: int, share: float) -> Tensor:
    numbers = torch.rand(batch, SEQLEN, generator=torch.Generator().manual_seed(2))
    return (numbers < share).to(mesh.device_type)


class LargeResults(TorchDispatchMode):
    """Records the names of the operators with a result of at least so many elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(result, Tensor) and result.numel() >= self.numel:
                self.names.add(func.name())
        return results


class Collectives(TorchDispatchMode):
    """Records the name of each collective, or "send" for a message, and the bytes that this rank sends in it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")
        is_collective = name[0] in ("_c10d_functional", "c10d") and not name[2].startswith("wait")
        if is_collective or func.name() == "ssm_kernels_distributed::send":
            tensors = [value for value in args if isinstance(value, Tensor)]
            self.sent.append((name[2], sum(value.numel() * value.element_size() for value in tensors)))
        return func(*args, **(kwargs or {}))
