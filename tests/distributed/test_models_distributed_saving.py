"""``save_pretrained`` of distributed models writes the files of the whole model, or refuses."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from helpers import says
from model_helpers import MIXERS, make_model
from process_pool import TWO_GPUS, Mesh, Place, Processes, param

from ssm_kernels.models import MambaLM


def shard(model: nn.Module, mesh: Mesh) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.backbone.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module, mesh: Mesh) -> Any:
    from torch.distributed.tensor.parallel import parallelize_module

    from ssm_kernels.distributed import TensorParallel

    return parallelize_module(model, mesh, TensorParallel())


def both(model: nn.Module, mesh: Mesh) -> Any:
    return shard(tensor_parallel(model, mesh["model"]), mesh["data"])


def check_file(mesh: Mesh, folder: str, distribute: Any, mixer: str, **fields: Any) -> None:
    model = make_model(mixer, mesh.device_type, **fields)
    expected = {name: value.cpu() for name, value in model.state_dict().items()}
    distributed = distribute(copy.deepcopy(model), mesh)
    path = Path(folder) / f"{mixer}-{distribute.__name__}-{len(fields)}"
    distributed.save_pretrained(path)
    # The files are complete on every rank's return.
    saved = torch.load(path / "pytorch_model.bin", weights_only=True)
    assert [*saved] == [*expected]
    torch.testing.assert_close(dict(saved), expected, rtol=0, atol=0)
    is_shared = saved["lm_head.weight"].data_ptr() == saved["backbone.embedding.weight"].data_ptr()
    assert is_shared == model.config.tie_embeddings
    assert MambaLM.from_pretrained(path).config == model.config
    dist.barrier(group=mesh.get_group(0))


def check_fully_shard(mesh: Mesh, folder: str) -> None:
    for mixer in MIXERS:
        check_file(mesh, folder, shard, mixer)
    check_file(mesh, folder, shard, "Mamba", tie_embeddings=False, discretization="bilinear")


def check_tensor_parallel(mesh: Mesh, folder: str) -> None:
    for mixer in ("Mamba", "Mamba2"):
        check_file(mesh, folder, tensor_parallel if mesh.ndim == 1 else both, mixer)


def check_failure(mesh: Mesh, folder: str) -> None:
    """No rank goes on as if there were a file."""
    model = shard(make_model("Mamba"), mesh)
    path = Path(folder) / "file"
    if mesh.get_rank() == 0:
        path.touch()
    expected, words = (
        (FileExistsError, "file") if mesh.get_rank() == 0 else (RuntimeError, "save_pretrained: the rank that writes")
    )
    with pytest.raises(expected, match=words):
        model.save_pretrained(path)


def check_refusal(mesh: Mesh, folder: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    for use_orig_params in (True, False):
        options = {"process_group": mesh.get_group(), "device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
        wrapped = FullyShardedDataParallel(make_model("Mamba", dtype=torch.float32).float(), **options)
        with pytest.raises(RuntimeError, match=says("save_pretrained", "FSDP1", "ssm_kernels.distributed.get_state_dict")):
            wrapped.save_pretrained(folder)
    assert not os.listdir(folder)


@pytest.mark.parametrize("place", [param(Place((1,))), param(Place((2,))), param(TWO_GPUS)])
def test_fully_shard(processes: Processes, place: Place, tmp_path: Path):
    processes.check(place, check_fully_shard, str(tmp_path))


@pytest.mark.parametrize("place", [param(Place((2,))), param(Place((2, 2)))])
def test_tensor_parallel(processes: Processes, place: Place, tmp_path: Path):
    processes.check(place, check_tensor_parallel, str(tmp_path))


def test_an_error_of_the_rank_that_writes(processes: Processes, tmp_path: Path):
    processes.check(Place((2,)), check_failure, str(tmp_path))


def test_fsdp1_is_refused(processes: Processes, tmp_path: Path):
    processes.check(Place((2,)), check_refusal, str(tmp_path))


def test_weights_that_came_apart_are_refused(tmp_path):
    model = make_model("Mamba")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight + 1)
    with pytest.raises(
        RuntimeError, match=says("save_pretrained", "lm_head.weight", "backbone.embedding.weight", "tie_weights()")
    ):
        model.save_pretrained(tmp_path)
    model.tie_weights()
    model.save_pretrained(tmp_path)
