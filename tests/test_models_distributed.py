"""MambaLM on two processes of the CPU, under DistributedDataParallel and fully_shard, is MambaLM on one."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from model_helpers import MIXERS, make_model, make_tokens
from torch import Tensor

PROCESSES = 2


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())


def whole(value: Tensor) -> Tensor:
    """Gathers the shards of a DTensor."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def work(rank: int, folder: str) -> None:
    """One process: each has half of a batch, whose gradients are averaged."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    mesh = dist.init_device_mesh("cpu", (PROCESSES,))
    tokens = make_tokens(2 * PROCESSES, 10)
    for mixer in MIXERS:
        model = make_model(mixer, d_intermediate=20)
        data_parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
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
        expected = model.generate(tokens[:, :3], max_new_tokens=5, temperature=0)
        assert torch.equal(sharded.generate(tokens[:, :3], max_new_tokens=5, temperature=0), expected)
    dist.barrier()
    dist.destroy_process_group()
    # DistributedDataParallel and fully_shard keep the group, and with it gloo's threads, alive. Where the interpreter ends
    # before them, the process sometimes aborts.
    sys.stdout.flush()
    os._exit(0)


@pytest.mark.slow
def test_two_processes_are_one(tmp_path: Path):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    mp.start_processes(work, (str(tmp_path),), PROCESSES, start_method="spawn")
