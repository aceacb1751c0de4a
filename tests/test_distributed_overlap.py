"""The order of products and collectives in tensor parallelism, and all-reduces in pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from process_pool import TWO_GPUS, Mesh, Place, Processes, param
from tensor_parallel_helpers import CHANNELS, D_MODEL, Recorded, check_layer, draw, mamba, mamba2, mlp, own, pair, run, whole
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


def check_row_parallel(mesh: Mesh) -> None:
    """Each piece's all-reduce starts before the next product; the pieces sum as many numbers as the whole."""
    from ssm_kernels.distributed import _linear

    _, layer = pair(mamba, mesh)
    x = draw(mesh)[..., :1].expand(-1, -1, CHANNELS // mesh.size())
    orders, numbers = [], []
    for piece_bytes in (_linear._PIECE_BYTES, 1):
        with pytest.MonkeyPatch.context() as patch, Recorded(mesh.size()) as recorded, torch.no_grad():
            patch.setattr(_linear, "_PIECE_BYTES", piece_bytes)
            layer.out_proj(x)
        orders.append(recorded.order)
        numbers.append(recorded.numbers)
    assert orders[0] == ["mm", "all_reduce", "wait_tensor"]
    assert orders[1] == ["mm", "all_reduce"] * 4 + ["wait_tensor"] * 4
    assert numbers == [x.shape[0] * x.shape[1] * D_MODEL] * 2


def integers(tensor: Tensor) -> Tensor:
    """Small integers, whose products are the same in any order of additions."""
    return (4 * tensor).round().clamp(-8, 8)


def check_pieces(mesh: Mesh, dtype: torch.dtype) -> None:
    """Pieces of equal and of unequal numbers of rows give the bits of one product, in forward and backward."""
    from ssm_kernels.distributed import _linear

    for make, name in ((mamba, "out_proj"), (mamba, "x_proj"), (partial(mamba2, d_ssm=12, headdim=1, ngroups=2), "out_proj")):
        _, layer = pair(make, mesh)
        projection = layer.get_submodule(name).to(dtype)
        with torch.no_grad():
            for parameter in projection.parameters():
                parameter.copy_((8 * parameter).round())
        for steps in (5, 12):
            x = integers(draw(mesh)).to(dtype)[:, :steps].repeat(1, 1, 2)[..., : CHANNELS // mesh.size()]
            results = []
            for piece_bytes in (_linear._PIECE_BYTES, 1):
                projection.zero_grad()
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(_linear, "_PIECE_BYTES", piece_bytes)
                    out, grad = run(projection, x, torch.ones(*x.shape[:2], projection.out_features).to(x))
                gradients = [whole(parameter.grad) for parameter in projection.parameters()]
                results.append((out, grad, *gradients))
            assert results[0][0].abs().max() > 0
            for one, pieces in zip(*results, strict=True):
                assert torch.equal(pieces, one), (name, steps)


def check_layer_in_pieces(mesh: Mesh) -> None:
    """A layer whose products are all cut gives the outputs and gradients of one process."""
    from ssm_kernels.distributed import _linear

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_linear, "_PIECE_BYTES", 1)
        for make in (partial(mamba, bias=True), mamba2, mlp):
            check_layer(make, mesh)


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
    check_row_parallel,
    check_layer_in_pieces,
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
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_pieces_have_the_bits_of_one_product(processes: Processes, place: Place, dtype: torch.dtype) -> None:
    processes.check(place, check_pieces, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("check", CHECKS)
def test_overlap(processes: Processes, place: Place, check: Callable[[Mesh], None]) -> None:
    processes.check(place, check)
