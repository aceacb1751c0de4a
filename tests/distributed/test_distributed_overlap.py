"""The order of products and collectives in tensor parallelism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from process_pool import TWO_GPUS, Mesh, Place, Processes, param
from tensor_parallel_helpers import Recorded, draw, mamba, mamba2, mlp, own, pair
from torch import Tensor, nn

PLACES = [param(Place((2,))), param(TWO_GPUS)]


def order_of(mesh: Mesh, layer: nn.Module, x: Tensor) -> tuple[list[str], list[str]]:
    """Products and collectives of forward and of backward."""
    inputs = x.clone().requires_grad_()
    with Recorded(mesh.size()) as forward:
        out = layer(inputs)
    with Recorded(mesh.size()) as backward:
        out.backward(torch.ones_like(out))
    return forward.order, backward.order


def check_column_parallel(mesh: Mesh, sequence_parallel: bool) -> None:
    """The weight's gradient is computed between the start of the collective and the wait for it."""
    for make, name in ((mamba, "in_proj"), (mamba2, "in_proj"), (mlp, "fc1")):
        _, layer = pair(make, mesh, sequence_parallel=sequence_parallel)
        x = own(draw(mesh), 1, mesh) if sequence_parallel else draw(mesh)
        forward, backward = order_of(mesh, layer.get_submodule(name), x)
        collective = "reduce_scatter_tensor" if sequence_parallel else "all_reduce"
        assert [step for step in forward if step not in ("mm", "addmm")] == (
            ["all_gather_into_tensor", "wait_tensor"] if sequence_parallel else []
        )
        first, *rest = backward
        assert (first, rest[:3]) == ("mm", [collective, "mm", "wait_tensor"]), (name, backward)
        # The gradients of B and C of the one group of Mamba2 are sums over ranks.
        assert rest[3:] == (["all_reduce", "wait_tensor"] if make is mamba2 else []), (name, backward)


def check_no_gradient_of_the_input(mesh: Mesh) -> None:
    _, layer = pair(mamba, mesh)
    with Recorded(mesh.size()) as recorded:
        layer.in_proj(draw(mesh)).sum().backward()
    assert recorded.counts.total() == 0 and recorded.order.count("mm") == 2, recorded.order


def check_second_derivatives(mesh: Mesh) -> None:
    """A second derivative, which would need other collectives, raises an error."""
    _, layer = pair(mlp, mesh)
    x = draw(mesh).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def check_autocast(mesh: Mesh) -> None:
    """Under autocast the ranks sum tensors of its dtype."""
    from torch.utils._python_dispatch import TorchDispatchMode

    dtypes: Counter[torch.dtype] = Counter()

    class Dtypes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket.__name__.startswith("all_reduce"):
                dtypes[args[0].dtype] += 1
            return func(*args, **kwargs or {})

    _, layer = pair(partial(mamba, dtype=torch.float32), mesh)
    x = draw(mesh).float().requires_grad_()
    with Dtypes():
        with torch.autocast(mesh.device_type, torch.bfloat16):
            out = layer(x)
        out.sum().backward()
    assert dtypes == {torch.bfloat16: 4}
    assert x.grad.dtype == torch.float32


CHECKS = (
    check_no_gradient_of_the_input,
    check_second_derivatives,
    check_autocast,
)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_products_of_parameters_hide_the_collective_of_the_input(
    processes: Processes, place: Place, sequence_parallel: bool
) -> None:
    processes.check(place, check_column_parallel, sequence_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("check", CHECKS)
def test_overlap(processes: Processes, place: Place, check: Callable[[Mesh], None]) -> None:
    processes.check(place, check)
