"""Models that are made on ``meta``, sharded, materialized and then initialized, on one rank and on two."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn
from initialization_helpers import MAKERS, ORDERS, assert_initialized, init_weights
from model_helpers import make_tokens
from process_pool import TWO_GPUS, Mesh, Place, Processes, param

from ssm_kernels.models import MambaLM, parameter_groups
from ssm_kernels.nn import initialization
from ssm_kernels.nn.naming import class_name

# A weight whose shards have unequal sizes, in blocks of few rows.
SEED, SHAPE, BLOCK = 3, (7, 5), 11

PLACES = [param(Place((1,))), param(Place((2,))), param(TWO_GPUS)]


def shard(model: nn.Module, mesh: Mesh, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    if isinstance(model, MambaLM):
        for block in model.backbone.layers:
            fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def make_sharded(name: str, mesh: Mesh) -> Any:
    with torch.device("meta"):
        model = shard(MAKERS[name](), mesh)
    return model.to_empty(device=mesh.device_type)


def check_fully_shard(mesh: Mesh) -> None:
    """Ranks that were seeded alike draw different shards; orders take turns, because their results must not differ."""
    for number, name in enumerate(MAKERS):
        torch.manual_seed(0)
        model = make_sharded(name, mesh)
        order = init_weights if isinstance(model, MambaLM) else [*ORDERS.values()][number % len(ORDERS)]
        order(model)
        assert all(hasattr(parameter, "placements") for parameter in model.parameters())
        assert_initialized(model)
        assert type(model).__name__ == f"FSDP{class_name(model)}"


class Adapted(nn.Linear):
    """A projection with an adapter, which inherits ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.adapter, self.gain = nn.Parameter(torch.empty(3, 8)), nn.Parameter(torch.empty(1))


def check_parameters_left(mesh: Mesh) -> None:
    """Both ranks name a parameter that nothing initializes, and it keeps its values."""
    with torch.device("meta"):
        whole = MAKERS["MambaLM-Mamba"]()
        whole.backbone.layers[0].adapted = Adapted()
    model: Any = shard(whole, mesh).to_empty(device=mesh.device_type)
    adapted = model.backbone.layers[0].adapted
    nn.init.constant_(adapted.adapter.to_local(), 3)
    with pytest.raises(
        RuntimeError, match=r"init_weights: .*layers\.0\.adapted \(Adapted: adapter, gain\): initialize the model before"
    ):
        model.init_weights()
    assert adapted.adapter.to_local().eq(3).all() and adapted.weight.to_local().abs().max() <= 8**-0.5


def check_flattened_parameters(mesh: Mesh) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    device = torch.device("cpu") if mesh.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())
    options = {"process_group": mesh.get_group(), "device_id": device, "use_orig_params": True}
    wrapped = FullyShardedDataParallel(MAKERS["MambaLM-Mamba"](device=device), **options)
    with pytest.raises(RuntimeError, match=r"init_weights: .*whose weight FSDP1 has flattened: initialize the model before"):
        wrapped.module.init_weights()


def check_training(mesh: Mesh) -> None:
    """The documented path, on as many ranks as there are: the same losses as on one."""
    losses: dict[bool, list[float]] = {}
    tokens = make_tokens(2, 9, device=mesh.device_type)
    torch.manual_seed(0)
    sharded, single = make_sharded("MambaLM-Mamba", mesh), MAKERS["MambaLM-Mamba"](device=mesh.device_type)
    sharded.init_weights()
    single.load_state_dict({name: value.full_tensor() for name, value in sharded.state_dict().items()})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "MambaLM: expected embedding and head to share")
        for model in (single, sharded):
            optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-2)
            for _ in range(3):
                loss = nn.functional.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.setdefault(model is single, []).append(loss.item())
            assert model.lm_head.weight is model.backbone.embedding.weight
    assert losses[True] == pytest.approx(losses[False], rel=1e-4) and losses[True][2] < losses[True][0]


def check_dtypes(mesh: Mesh) -> None:
    """The statements of docs/distributed.md about bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    tokens = make_tokens(2, 9, device=mesh.device_type)
    make = MAKERS["MambaLM-Mamba2"]
    with pytest.raises(AssertionError, match="uniform original parameter dtype"):
        shard(make(dtype=torch.bfloat16), mesh)(tokens)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for model, dtype in (
        (shard(make(), mesh, mp_policy=policy), torch.float32),
        (shard(make().to(torch.bfloat16), mesh), torch.bfloat16),
    ):
        logits = model(tokens).logits
        logits.float().sum().backward()
        assert logits.dtype == torch.bfloat16
        assert {parameter.grad.dtype for parameter in model.parameters()} == {dtype}


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


def check_tying(mesh: Mesh) -> None:
    """Conversions and assign=True of distributed models."""
    from torch.distributed.tensor.parallel import parallelize_module

    from ssm_kernels.distributed import TensorParallel

    future = torch.__future__
    for distribute in (shard, lambda model, mesh: parallelize_module(model, mesh, TensorParallel())):
        for is_overwritten in (False, True):
            model: Any = distribute(MAKERS["MambaLM-Mamba"](), mesh)
            future.set_overwrite_module_params_on_conversion(is_overwritten)
            try:
                model.double()
            finally:
                future.set_overwrite_module_params_on_conversion(False)
            assert model.lm_head.weight is model.backbone.embedding.weight
            assert model.lm_head.weight.dtype == torch.float64
            weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
            model.load_state_dict(weights, assign=True)
            assert model.lm_head.weight is model.backbone.embedding.weight
            model(make_tokens(1, 4, device=mesh.device_type)).logits.sum().backward()
            head = weights["lm_head.weight"] + 1
            model.load_state_dict({"lm_head.weight": head}, strict=False, assign=True)
            assert model.lm_head.weight is model.backbone.embedding.weight
            assert torch.equal(model.lm_head.weight.full_tensor(), head.full_tensor())
            weights["lm_head.weight"] = weights["lm_head.weight"] + 1
            with pytest.raises(RuntimeError, match=r"backbone\.embedding\.weight.*lm_head\.weight"):
                model.load_state_dict(weights)


def check_numbers(mesh: Mesh, expected: list[list[float]]) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    # The processes serve other tests too.
    default, initialization._BLOCK = initialization._BLOCK, BLOCK
    placements = [[Shard(0)], [Shard(1)], [Replicate()]] if mesh.ndim == 1 else [[Shard(0), Shard(1)], [Replicate(), Shard(1)]]
    for placement in placements:
        torch.manual_seed(SEED)
        tensor = distribute_tensor(torch.zeros(SHAPE, dtype=torch.float64), mesh, placement)
        initialization.uniform_(tensor, -1, 1)
        torch.testing.assert_close(tensor.full_tensor(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=0)
    initialization._BLOCK = default


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
        if isinstance(wrapped.module, MambaLM):
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "MambaLM: expected embedding and head to share")
                wrapped(make_tokens(1, 4, device=mesh.device_type)).logits.sum().backward()


def test_numbers_depend_on_the_seed_alone(processes: Processes):
    torch.manual_seed(SEED)
    seed, rows = int(torch.randint(2**62, (1,))), BLOCK // SHAPE[1]
    blocks = [
        torch.empty(min(rows, SHAPE[0] - first), SHAPE[1], dtype=torch.float64).uniform_(
            -1, 1, generator=torch.Generator().manual_seed(seed + number)
        )
        for number, first in enumerate(range(0, SHAPE[0], rows))
    ]
    for shape in ((1,), (2,), (3,), (2, 2)):
        processes.check(Place(shape), check_numbers, torch.cat(blocks).tolist())


@pytest.mark.parametrize("place", PLACES)
def test_fully_shard_on_meta(processes: Processes, place: Place):
    processes.check(place, check_fully_shard)


@pytest.mark.parametrize("place", [param(Place((2,))), param(TWO_GPUS)])
def test_the_documented_path(processes: Processes, place: Place):
    processes.check(place, check_training)


def test_parameters_that_nothing_initializes(processes: Processes):
    processes.check(Place((2,)), check_parameters_left)
    processes.check(Place((2,)), check_flattened_parameters)


def test_tied_weights_stay_tied(processes: Processes):
    processes.check(Place((2,)), check_tying)


def test_dtypes(processes: Processes):
    processes.check(Place((2,)), check_dtypes)


def test_copies_of_a_shard_are_equal(processes: Processes):
    processes.check(Place((2, 2)), check_copies)


@pytest.mark.parametrize("place", PLACES)
def test_fsdp1_on_meta(processes: Processes, place: Place):
    processes.check(place, check_fsdp1)
