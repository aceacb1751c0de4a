"""``distributed.mamba3_chunk_scan``, and ``ContextParallel`` and ``TensorParallel`` of ``Mamba3``, on 1 to 4 ranks: results and
gradients of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_helpers import (
    SEQLEN,
    Cut,
    close,
    compare_layer,
    cu_seqlens_of,
    generator,
    over_places,
    own_span,
    packings,
)
from mamba3_helpers import OF_STEPS, STATES, make_inputs
from process_pool import Mesh, Place, Processes, param
from torch import Tensor

from ssm_kernels import mamba3_chunk_scan, nn

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from ssm_kernels import distributed

SHAPE = {"batch": 2, "seqlen": SEQLEN, "biases": True, "D": "head", "z": True}


def call(function: Callable[..., Any], inputs: dict[str, Any], **options: Any) -> list[Tensor]:
    """``out`` and, with ``return_final_states``, the four states."""
    given = dict(inputs)
    states = [given.pop(name, None) for name in STATES]
    results = function(**given, initial_states=None if states[0] is None else tuple(states), **options)
    return [results[0], *results[1]] if isinstance(results, tuple) else [results]


def compare(
    mesh: Mesh, exchange: str, *, final: bool = False, packing: dict[str, Tensor] | None = None, **options: Any
) -> None:
    rank, size, own = mesh.get_local_rank(), mesh.size(), own_span(mesh)
    what = f"{size} ranks, {exchange}, {final}, {[*(packing or ())]}, {options}"
    inputs = make_inputs(**(SHAPE | options), device=mesh.device_type) | (packing or {})
    is_leaf = {name: isinstance(value, Tensor) and value.is_floating_point() for name, value in inputs.items()}

    def leaves(cut: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
        copies = {
            name: cut(name, value).detach().clone() if isinstance(value, Tensor) else value for name, value in inputs.items()
        }
        return {name: value.requires_grad_() if is_leaf[name] else value for name, value in copies.items()}

    whole = leaves(lambda name, value: value)
    expected = call(mamba3_chunk_scan, whole, return_final_states=final)
    random = generator(mesh, 1)
    factors = [random(*result.shape) for result in expected]
    sum((result * factor).sum() for result, factor in zip(expected, factors, strict=True)).backward()

    local = leaves(lambda name, value: value[:, own] if name in OF_STEPS else value)
    actual = call(distributed.mamba3_chunk_scan, local, return_final_states=final, group=mesh, exchange=exchange)
    loss = (actual[0] * factors[0][:, own]).sum()
    for result, factor in zip(actual[1:], factors[1:], strict=True):
        loss = loss + (result * factor).sum() * (rank + 1) / (size * (size + 1) / 2)
    loss.backward()
    close(actual[0], expected[0][:, own], f"{what}, out")
    for name, result, value in zip(STATES, actual[1:], expected[1:], strict=False):
        close(result, value, f"{what}, final {name}")
    for name, value in local.items():
        if not is_leaf[name]:
            continue
        gradient, of_whole = value.grad, whole[name].grad
        if name in OF_STEPS:
            of_whole = of_whole[:, own]
        else:
            dist.all_reduce(gradient, group=mesh.get_group())
        close(gradient, of_whole, f"{what}, gradient of {name}")


def check_scan(mesh: Mesh) -> None:
    for exchange in ("chain", "summaries"):
        compare(mesh, exchange)
        compare(mesh, exchange, initial_states=False, rotate="halves", angles_of_heads=True)
        compare(mesh, exchange, norm=True, dstate=8, D="channel")
        compare(mesh, exchange, initial_states=False, biases=False, D=None, z=False, norm=True, angles=3)
        compare(mesh, exchange, ranks=3, rotate="halves", norm=True)
        compare(mesh, exchange, ranks=2, initial_states=False, factors=False, z=False)
    compare(mesh, "summaries", final=True)
    compare(mesh, "summaries", final=True, ranks=2)
    compare(mesh, "summaries", final=True, initial_states=False, rotate="halves")


def check_packed(mesh: Mesh) -> None:
    for name, packing in packings(mesh, 2).items():
        for exchange in ("chain", "summaries") if name != "unpacked" else ():
            compare(mesh, exchange, packing=packing)
            compare(mesh, exchange, packing=packing, initial_states=False, angles_of_heads=True)
            compare(mesh, exchange, packing=packing, ranks=2)
        compare(mesh, "summaries", packing=packing, final=True)
    for exchange in ("chain", "summaries"):
        compare(mesh, exchange, packing={"cu_seqlens": cu_seqlens_of(mesh)}, batch=1, initial_states=False)


def make_layer(**options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = nn.Mamba3(8, d_state=8, headdim=4, ngroups=2, dtype=torch.float64, **options)
    with torch.no_grad():
        layer.in_proj.weight.mul_(3)
    return layer


def check_layer(mesh: Mesh) -> None:
    x, cu_seqlens = generator(mesh, 0)(2, SEQLEN, 8), cu_seqlens_of(mesh)
    compare_layer(mesh, make_layer(), lambda layer, cut: layer(cut(x, 1)), "Mamba3")
    of_ranks = make_layer(is_mimo=True, mimo_rank=2, is_outproj_norm=True)
    compare_layer(mesh, of_ranks, lambda layer, cut: layer(cut(x, 1)), "Mamba3 of ranks")
    normed = make_layer(is_outproj_norm=True, rope_fraction=1.0, A_activation="softplus")
    compare_layer(mesh, normed, lambda layer, cut: layer(cut(x, 1)), "Mamba3 with norm")
    compare_layer(mesh, make_layer(), lambda layer, cut: layer(cut(x[:1], 1), cu_seqlens=cu_seqlens), "Mamba3, cu_seqlens")
    seq_idx = packings(mesh, 2)["random"]["seq_idx"]
    compare_layer(mesh, make_layer(), lambda layer, cut: layer(cut(x, 1), seq_idx=cut(seq_idx, 1)), "Mamba3, seq_idx")


def check_compiled(mesh: Mesh) -> None:
    x = generator(mesh, 0)(2, SEQLEN, 8)
    torch._dynamo.reset()

    def call(layer: torch.nn.Module, cut: Cut) -> Any:
        own = cut(x, 1)
        return torch.compile(layer, backend="aot_eager", fullgraph=True)(own) if own is not x else layer(own)

    compare_layer(mesh, make_layer(), call, "compiled Mamba3", exchanges=("chain",))


CHECKS = {"scan": check_scan, "packed": check_packed, "layer": check_layer}


@pytest.mark.slow
@pytest.mark.parametrize(("check", "place"), over_places(CHECKS))
def test_ranks_are_one_process(processes: Processes, check: Callable[..., None], place: Place):
    processes.check(place, check)


@pytest.mark.slow
@pytest.mark.parametrize("place", [param(Place((2,)), exhaustive=True)])
def test_a_compiled_layer_is_one_process(processes: Processes, place: Place):
    processes.check(place, check_compiled)
