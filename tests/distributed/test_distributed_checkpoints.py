"""Checkpoints of models on 1 to 4 ranks, on CPUs and on two GPUs: each distribution reads what another has written."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from process_pool import TWO_GPUS, Mesh, Place, Processes, param
from torch import Tensor

from ssm_kernels.models import MambaConfig, MambaLM

VOCABULARY, BATCH, SEQLEN = 24, 12, 5
MODELS: tuple[dict[str, Any], ...] = (
    {"mixer": "Mamba", "ssm_cfg": {"d_state": 3}, "d_intermediate": 384},
    # An MLP beside, and two groups: owned by two ranks, on several ranks otherwise.
    {"mixer": "Mamba2", "ssm_cfg": {"d_state": 3, "headdim": 1, "d_ssm": 12, "ngroups": 2}},
)


class Models(nn.Module):
    """Two language models that are trained together."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        sizes: dict[str, Any] = {"d_model": 12, "n_layer": 1, "vocab_size": VOCABULARY}
        self.models = nn.ModuleList(MambaLM(MambaConfig(**sizes, **options), dtype=torch.float64) for options in MODELS)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss."""
        losses = [F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()) for model in self.models]
        return sum(losses[1:], losses[0])


def distribute(models: Models, kind: str, mesh: Mesh) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    from ssm_kernels.distributed import TensorParallel

    for model in models.models:
        if "tensor" in kind:
            parallelize_module(model, mesh["model"], TensorParallel(), src_data_rank=None)  # every rank drew the same numbers
        if "fsdp" in kind:
            of_data = mesh["data"] if "tensor" in kind else mesh
            for layer in model.backbone.layers:
                fully_shard(layer, mesh=of_data)
            fully_shard(model, mesh=of_data)


def make(kind: str, mesh: Mesh, seed: int) -> tuple[Models, torch.optim.Optimizer]:
    models = Models(seed).to("cpu" if mesh is None else mesh.device_type)
    distribute(models, kind, mesh)
    # A large eps: differences in rounding of gradients near zero stay small.
    return models, torch.optim.AdamW(models.parameters(), lr=0.1, eps=1e-3)


def train(models: Models, optimizer: torch.optim.Optimizer, kind: str, mesh: Mesh, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(VOCABULARY, (BATCH, SEQLEN), generator=torch.Generator().manual_seed(step))
        tokens = tokens.to("cpu" if mesh is None else mesh.device_type)
        if "fsdp" in kind:
            of_data = mesh["data"] if "tensor" in kind else mesh
            tokens = tokens.chunk(of_data.size())[of_data.get_local_rank()]
        models(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def truth(steps: int) -> tuple[Models, torch.optim.Optimizer]:
    """Models that one process has trained."""
    models, optimizer = make("one", None, seed=0)
    train(models, optimizer, "one", None, range(steps))
    return models, optimizer


@functools.lru_cache
def true_states(steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    from ssm_kernels.distributed import get_state_dict

    return get_state_dict(*truth(steps))


def whole(value: Any) -> Any:
    """The whole tensor, on the CPU."""
    from torch.distributed.tensor import DTensor

    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.cpu() if isinstance(value, Tensor) else value


def assert_is_truth(models: Models, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Compares every parameter and every state of the optimizer, under the names of the models of one process."""
    from ssm_kernels.distributed import get_state_dict

    wanted, got = true_states(steps), get_state_dict(models, optimizer)
    assert got[0].keys() == wanted[0].keys()
    assert got[1]["state"].keys() == wanted[1]["state"].keys()
    assert set(got[1]["param_groups"][0]["params"]) == set(wanted[1]["param_groups"][0]["params"])
    entries = {name: (got[0][name], value) for name, value in wanted[0].items()}
    for name, states in wanted[1]["state"].items():
        entries |= {f"{name}, {key}": (got[1]["state"][name][key], value) for key, value in states.items()}
    for name, (actual, expected) in entries.items():
        torch.testing.assert_close(whole(actual), expected, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def save(mesh: Mesh, kind: str) -> None:
    import torch.distributed.checkpoint as dcp

    from ssm_kernels.distributed import get_state_dict

    models, optimizer = make(kind, mesh, seed=0)
    train(models, optimizer, kind, mesh, range(2))
    model_state, optimizer_state = get_state_dict(models, optimizer)
    dcp.save(
        {"model": model_state, "optimizer": optimizer_state},
        checkpoint_id=name_of(kind, mesh),
        process_group=group_of(mesh),
    )


def load(mesh: Mesh, source: str, kind: str) -> None:
    """Training goes on from a checkpoint."""
    import torch.distributed.checkpoint as dcp

    from ssm_kernels.distributed import get_state_dict, set_state_dict

    models, optimizer = make(kind, mesh, seed=1)
    model_state, optimizer_state = get_state_dict(models, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=source, process_group=group_of(mesh))
    set_state_dict(models, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    train(models, optimizer, kind, mesh, range(2, 3))
    assert_is_truth(models, optimizer, 3)
    for parameter in optimizer.param_groups[0]["params"]:
        if hasattr(parameter, "placements"):
            assert optimizer.state[parameter]["exp_avg"].placements == parameter.placements


def name_of(kind: str, mesh: Mesh) -> str:
    return f"{kind} {mesh.size()}"


def group_of(mesh: Mesh) -> Any:
    return mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD


def options_of(**options: Any) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(**options)


def check_whole_file_is_read(kind: str, from_rank_0: bool, mesh: Mesh) -> None:
    """The file of one process, which every rank or only rank 0 has read."""
    from ssm_kernels.distributed import get_state_dict, set_state_dict

    states: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    if not from_rank_0 or dist.get_rank() == 0:
        states = get_state_dict(*truth(2))
    models, optimizer = make(kind, mesh, seed=1)
    options = options_of(full_state_dict=True, broadcast_from_rank0=from_rank_0)
    set_state_dict(models, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    assert_is_truth(models, optimizer, 2)


def check_whole_file_is_written(kind: str, is_flat: bool, mesh: Mesh) -> None:
    from ssm_kernels.distributed import get_state_dict, set_state_dict

    models, optimizer = make(kind, mesh, seed=0)
    train(models, optimizer, kind, mesh, range(2))
    options = options_of(full_state_dict=True, flatten_optimizer_state_dict=is_flat)
    model_state, optimizer_state = get_state_dict(models, optimizer, options=options)
    assert not any(hasattr(value, "placements") for value in model_state.values())
    models, optimizer = make("one", None, seed=1)
    models.load_state_dict(model_state, strict=True)
    options = options_of(flatten_optimizer_state_dict=is_flat)
    set_state_dict(models, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
    assert_is_truth(models, optimizer, 2)


def check_flat_states(is_whole: bool, mesh: Mesh) -> None:
    """The flattened form of an optimizer's state."""
    from ssm_kernels.distributed import get_state_dict, set_state_dict

    models, optimizer = make("tensor", mesh, seed=0)
    train(models, optimizer, "tensor", mesh, range(2))
    options = options_of(flatten_optimizer_state_dict=True, full_state_dict=is_whole)
    model_state, optimizer_state = get_state_dict(models, optimizer, options=options)
    assert optimizer_state.keys() == get_state_dict(*truth(2), options=options)[1].keys()
    models, optimizer = make("tensor", mesh, seed=1)
    set_state_dict(models, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
    assert_is_truth(models, optimizer, 2)


def check_functions_of_pytorch(kind: str, mesh: Mesh) -> None:
    """For models alone, PyTorch's functions and load_state_dict do the same."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    expected = truth(1)[0].state_dict()
    first, second, third = (make(kind, mesh, seed)[0] for seed in (1, 2, 3))
    first.load_state_dict(expected, strict=True)
    second.load_state_dict(first.state_dict(), strict=True)
    if kind == "tensor":
        set_model_state_dict(third, dict(expected), options=options_of(full_state_dict=True))
    else:
        set_model_state_dict(third, get_model_state_dict(first))
    for model in (first, second, third):
        state = get_model_state_dict(model, options=options_of(full_state_dict=True))
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(whole(state[name]), value), name


def check_parts_of_one_group(mesh: Mesh) -> None:
    from ssm_kernels.distributed import get_state_dict

    models = Models(0)
    distribute(models, "tensor", mesh)
    first, *rest = models.models[0].backbone.layers[0].mixer.in_proj.parameters()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": rest}], momentum=0.9)
    with pytest.raises(
        ValueError, match=r"expected the parts of .*in_proj.weight in one group of the optimizer, got one without"
    ):
        get_state_dict(models, optimizer)


def check_names_of_wrappers(mesh: Mesh) -> None:
    """Names leave out the modules of PyTorch that wrap others, but no attribute that is called like one in such a module."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.tensor.parallel import parallelize_module

    from ssm_kernels.distributed import TensorParallel, get_state_dict, set_state_dict
    from ssm_kernels.nn import Mamba

    def make_module(seed: int, is_distributed: bool) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model: Any = nn.ModuleDict({"module": Mamba(4, d_state=2)})
        if is_distributed:
            parallelize_module(model["module"], mesh, TensorParallel(), src_data_rank=None)
            model["module"] = checkpoint_wrapper(model["module"])
            model = torch.compile(model, backend="eager")
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) * (1 + seed)
        optimizer.step()
        return model, optimizer

    options = options_of(full_state_dict=True)
    saved = get_state_dict(*make_module(0, True), options=options)
    model, optimizer = make_module(1, False)
    assert saved[0].keys() == saved[1]["state"].keys() == model.state_dict().keys()
    set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
    for parameter in model.parameters():
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], torch.full_like(parameter, 0.1))
    model, optimizer = make_module(1, True)
    set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1], options=options)
    loaded = get_state_dict(model, optimizer, options=options)
    torch.testing.assert_close((loaded[0], loaded[1]["state"]), (saved[0], saved[1]["state"]), rtol=0, atol=0)


# The distributions that write and that read, by name.
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "one 1": ("one", (1,)),
    **{f"tensor {n}": ("tensor", (n,)) for n in (1, 2, 3, 4)},
    **{f"fsdp {n}": ("fsdp", (n,)) for n in (2, 3)},
    "fsdp, tensor 4": ("fsdp, tensor", (2, 2)),
}
# More ranks and fewer ones, numbers that divide and that do not, of each kind of distribution and between two kinds.
PAIRS = [
    *(("tensor 2", "tensor 3"), ("tensor 3", "tensor 1"), ("tensor 2", "tensor 4")),
    *(("fsdp 2", "fsdp 3"), ("one 1", "fsdp 3"), ("one 1", "fsdp, tensor 4")),
    *(("fsdp 2", "one 1"), ("fsdp, tensor 4", "one 1")),
    *(("fsdp, tensor 4", "tensor 3"), ("tensor 3", "fsdp, tensor 4"), ("tensor 2", "fsdp 3")),
]
EVERY_PAIR = [
    *((f"tensor {n}", f"tensor {m}") for n, m in itertools.permutations((1, 2, 3, 4), 2)),
    *(("fsdp 2", "fsdp 3"), ("fsdp 3", "fsdp 2"), ("fsdp 3", "tensor 4"), ("tensor 2", "fsdp 3")),
    *(pair for name in ("tensor 3", "fsdp 3", "fsdp, tensor 4") for pair in (("one 1", name), (name, "one 1"))),
    *(("fsdp, tensor 4", "tensor 3"), ("tensor 3", "fsdp, tensor 4")),
]
PAIRS_ON_GPUS = (("one 1", "tensor 2"), ("tensor 2", "one 1"), ("tensor 2", "fsdp 2"), ("fsdp 2", "tensor 2"))
CASES: dict[str, tuple[tuple[int, ...], Callable[[Mesh], None]]] = {
    "whole file to tensor 3": ((3,), partial(check_whole_file_is_read, "tensor", False)),
    "whole file of rank 0 to tensor 4": ((4,), partial(check_whole_file_is_read, "tensor", True)),
    "whole file to fsdp, tensor 4": ((2, 2), partial(check_whole_file_is_read, "fsdp, tensor", False)),
    "tensor 3 to whole file": ((3,), partial(check_whole_file_is_written, "tensor", False)),
    "tensor 2 to whole file, flat": ((2,), partial(check_whole_file_is_written, "tensor", True)),
    "fsdp, tensor 4 to whole file": ((2, 2), partial(check_whole_file_is_written, "fsdp, tensor", False)),
    "flat states": ((2,), partial(check_flat_states, False)),
    "flat states, whole": ((2,), partial(check_flat_states, True)),
    "PyTorch's functions, tensor 3": ((3,), partial(check_functions_of_pytorch, "tensor")),
    "PyTorch's functions, fsdp, tensor 4": ((2, 2), partial(check_functions_of_pytorch, "fsdp, tensor")),
    "parts of one group": ((2,), check_parts_of_one_group),
    "names of wrappers": ((2,), check_names_of_wrappers),
}
CASES_ON_GPUS = {
    # PyTorch broadcasts to all processes.
    "whole file of rank 0 to tensor 2": ((2,), partial(check_whole_file_is_read, "tensor", True)),
    **{name: CASES[name] for name in ("tensor 2 to whole file, flat", "flat states")},
}


def run_case(mesh: Mesh, name: str) -> None:
    (CASES | CASES_ON_GPUS)[name][1](mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target", "on"),
    [
        *((source, target, "cpu") for source, target in PAIRS),
        *(pytest.param(*pair, "cpu", marks=pytest.mark.exhaustive) for pair in EVERY_PAIR if pair not in PAIRS),
        *(pytest.param(*pair, "cuda", marks=pytest.mark.cuda) for pair in PAIRS_ON_GPUS),
    ],
)
def test_training_goes_on_from_a_checkpoint(processes: Processes, source: str, target: str, on: str) -> None:
    (of_source, ranks_of_source), (of_target, ranks_of_target) = SHAPES[source], SHAPES[target]
    folder = processes.folder(on)
    if folder is None or not (folder / source / ".metadata").exists():
        processes.check(Place(ranks_of_source, on), save, of_source)
    processes.check(Place(ranks_of_target, on), load, source, of_target)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place"),
    [
        *(param(Place(shape), name, id=name) for name, (shape, _) in CASES.items()),
        *(param(TWO_GPUS, name, id=name) for name in CASES_ON_GPUS),
    ],
)
def test_states_do_not_depend_on_the_ranks(processes: Processes, name: str, place: Place) -> None:
    processes.check(place, run_case, name)
