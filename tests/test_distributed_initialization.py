"""Models that are made on ``meta``, sharded, materialized and then initialized, on one rank and on two."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from initialization_helpers import MAKERS, ORDERS, assert_initialized, init_weights
from process_pool import TWO_GPUS, Mesh, Place, Processes, param

from ssm_kernels.models import MambaLM

PLACES = [param(Place((1,))), param(Place((2,))), param(TWO_GPUS)]


def shard(model: nn.Module, mesh: Mesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    if isinstance(model, MambaLM):
        for block in model.backbone.layers:
            fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_sharded(name: str, mesh: Mesh) -> Any:
    with torch.device("meta"):
        model = shard(MAKERS[name](), mesh)
    return model.to_empty(device=mesh.device_type)


def check_fully_shard(mesh: Mesh) -> None:
    """Ranks that were seeded alike draw different shards; orders take turns, because their results must not differ."""
    for number, name in enumerate(MAKERS):
        torch.manual_seed(0)
        model = make_sharded(name, mesh)
        [*ORDERS.values()][number % len(ORDERS)](model)
        assert all(hasattr(parameter, "placements") for parameter in model.parameters())
        assert_initialized(model)


def check_copies(mesh: Mesh) -> None:
    """Ranks that were seeded apart draw the same copies of a shard."""
    torch.manual_seed(mesh.get_rank())
    model = make_sharded("MambaLM-Mamba", mesh)
    init_weights(model)
    assert_initialized(model)
    for name, parameter in model.named_parameters():
        local = parameter.to_local()
        first = local.clone()
        torch.distributed.broadcast(first, group_src=0, group=mesh.get_group(0))
        assert torch.equal(local, first), name


def check_fsdp1(mesh: Mesh) -> None:
    """FSDP1 materializes a model by itself: root first, one module after the other."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    device = torch.device("cpu") if mesh.device_type == "cpu" else torch.cuda.current_device()
    options: dict[str, Any] = {"process_group": mesh.get_group(), "use_orig_params": True, "device_id": device}
    for name in MAKERS:
        torch.manual_seed(0)
        wrapped = FullyShardedDataParallel(MAKERS[name](device="meta"), **options)
        with FullyShardedDataParallel.summon_full_params(wrapped):
            assert_initialized(copy.deepcopy(wrapped.module))
            if isinstance(wrapped.module, MambaLM) and wrapped.module.config.tie_embeddings:
                assert wrapped.module.lm_head.weight is wrapped.module.backbone.embedding.weight


@pytest.mark.parametrize("place", PLACES)
def test_fully_shard_on_meta(processes: Processes, place: Place):
    processes.check(place, check_fully_shard)


def test_copies_of_a_shard_are_equal(processes: Processes):
    processes.check(Place((2, 2)), check_copies)


@pytest.mark.parametrize("place", PLACES)
def test_fsdp1_on_meta(processes: Processes, place: Place):
    processes.check(place, check_fsdp1)
