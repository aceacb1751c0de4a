"""MambaLM on two ranks, CPUs or GPUs, under DistributedDataParallel and fully_shard, is MambaLM on one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from model_helpers import MIXERS, make_model, make_tokens
from process_pool import TWO_GPUS, Mesh, Place, Processes, param
from torch import Tensor


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())


def whole(value: Tensor) -> Tensor:
    """Gathers the shards of a DTensor."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def check(mesh: Mesh) -> None:
    """Each rank has half of a batch, whose gradients are averaged."""
    from torch.distributed.fsdp import fully_shard

    rank, device = mesh.get_local_rank(), mesh.device_type
    tokens = make_tokens(2 * mesh.size(), 10, device=device)
    for mixer in MIXERS:
        model = make_model(mixer, device, d_intermediate=20)
        data_parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(model), process_group=mesh.get_group())
        sharded = copy.deepcopy(model)
        for layer in sharded.backbone.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        assert sharded.lm_head.weight is sharded.backbone.embedding.weight
        for step in range(2):
            loss_of(model, tokens).backward()
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            for parallel, names in ((data_parallel, "module."), (sharded, "")):
                loss_of(parallel, tokens[2 * rank : 2 * rank + 2]).backward()
                for name, parameter in parallel.named_parameters():
                    got, wanted = whole(parameter.grad), gradients[name.removeprefix(names)]
                    place = f"{mixer}, step {step}, {name}"
                    torch.testing.assert_close(got, wanted, msg=lambda text, place=place: f"{place}: {text}")
            with torch.no_grad():
                for parameter in (*model.parameters(), *data_parallel.parameters(), *sharded.parameters()):
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None
        expected = model.generate(tokens[:, :3], max_new_tokens=5, temperature=0, cg=False)
        assert torch.equal(sharded.generate(tokens[:, :3], max_new_tokens=5, temperature=0, cg=False), expected)


@pytest.mark.slow
@pytest.mark.parametrize("place", [param(Place((2,))), param(TWO_GPUS)])
def test_two_ranks_are_one(processes: Processes, place: Place):
    processes.check(place, check)
