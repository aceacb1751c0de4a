"""The parameters without weight decay, found by name in every form of a model."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from helpers import says
from initialization_helpers import MAKERS
from model_helpers import MIXERS, make_model
from process_pool import Mesh, Place, Processes
from torch.optim.swa_utils import AveragedModel

from ssm_kernels.models import parameter_groups
from ssm_kernels.nn import Liquid, Mamba, Mamba2

RECURRENCE = ("A_log", "D", "dt_bias")
PREFIXES = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.", "module.", "part.")


class Foreign(nn.Module):
    """A user's model: our layers in it, a parameter that is marked, and one that timm's method names."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Mamba(8, d_state=4)
        self.layers = nn.ModuleList([Mamba2(8, headdim=4, d_state=4, D_has_hdim=True), Liquid(8, 8), nn.Linear(8, 8)])
        self.positions = nn.Parameter(torch.zeros(3, 8))
        self.marked = nn.Parameter(torch.zeros(3, 8))
        self.marked._no_weight_decay = True
        self.other = nn.Parameter(torch.zeros(3, 8))

    def no_weight_decay(self) -> set[str]:
        return {"positions", "layers.2.weight", "no.such.parameter"}


def cleaned(name: str) -> str:
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    return name


def exempt_names(model: nn.Module) -> set[str]:
    decay, no_decay = parameter_groups(model, 0.1)
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): cleaned(name) for name, parameter in model.named_parameters()}
    given = [id(parameter) for parameter in (*decay["params"], *no_decay["params"])]
    assert len(given) == len(set(given)) == len(names)
    torch.optim.AdamW([decay, no_decay])
    return {names[id(parameter)] for parameter in no_decay["params"]}


def expected_names(model: nn.Module) -> set[str]:
    """The rule of the documentation, of a model as its constructor made it."""
    return {
        cleaned(name)
        for name, parameter in model.named_parameters()
        if parameter.dim() < 2 or name.rpartition(".")[2] in RECURRENCE
    }


def overwritten(model: nn.Module) -> nn.Module:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def swapped(model: nn.Module) -> nn.Module:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def with_checkpoints(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Mamba | Mamba2))
    return model


FORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "as_made": lambda model: model,
    "deepcopy": copy.deepcopy,
    "averaged": AveragedModel,
    "meta": lambda model: copy.deepcopy(model).to("meta").to_empty(device="cpu"),
    "overwritten": overwritten,
    "swapped": swapped,
    "compiled": torch.compile,
    "checkpoints": with_checkpoints,
}


@pytest.mark.parametrize("form", FORMS)
def test_groups_do_not_depend_on_the_form(form):
    for name in MAKERS:
        model = MAKERS[name]()
        expected = expected_names(model)
        assert exempt_names(FORMS[form](model)) == expected, name


@pytest.mark.parametrize("form", ["as_made", "compiled", "checkpoints"])
def test_models_of_users(form):
    model = Foreign()
    expected = expected_names(model) | {"positions", "marked", "layers.2.weight"}
    assert exempt_names(FORMS[form](model)) == expected
    if form == "as_made":
        assert exempt_names(copy.deepcopy(model)) == expected - {"marked"}
        assert exempt_names(nn.Sequential(model)) == {f"0.{name}" for name in expected}


def test_parametrized_parameters():
    layer = Mamba(8, d_state=4)
    nn.utils.parametrize.register_parametrization(layer, "A_log", nn.Identity())
    assert "parametrizations.A_log.original" in exempt_names(layer)
    assert "parametrizations.A_log.original" in layer.no_weight_decay()


@pytest.mark.parametrize("mixer", MIXERS)
def test_names_of_timm(mixer):
    model = copy.deepcopy(make_model(mixer))
    own = {"Mamba": {"A_log", "D"}, "Mamba2": {"A_log", "D", "dt_bias"}}.get(mixer, set())
    assert model.backbone.layers[0].mixer.no_weight_decay() == own
    assert model.backbone.layers[0].no_weight_decay() == {f"mixer.{name}" for name in own}
    names = {f"backbone.layers.{i}.mixer.{name}" for i in range(2) for name in own}
    assert model.no_weight_decay() == names <= {name for name, _ in model.named_parameters()}
    assert Liquid(3, 4, 2, input_dependent_tau=False).no_weight_decay() == {"raw_tau_l0", "raw_tau_l1"}


def test_parameters_that_are_elsewhere():
    """DeepSpeed's ZeRO-3 keeps the shape of a parameter in an attribute."""
    layer = Mamba(8, d_state=4)
    expected = exempt_names(layer)
    for parameter in layer.parameters():
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    assert exempt_names(layer) == expected


def test_arguments():
    for model, weight_decay, error, words in (
        ([], 0.1, TypeError, ["model", "nn.Module", "list"]),
        (nn.Linear(1, 1), "0.1", TypeError, ["weight_decay"]),
        (nn.Linear(1, 1), -0.1, ValueError, ["weight_decay", "-0.1"]),
    ):
        with pytest.raises(error, match=says("parameter_groups", *words)):
            parameter_groups(model, weight_decay)


def test_optimizer_of_the_examples(monkeypatch):
    """A copy's parameters have no marks."""
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    model = copy.deepcopy(Mamba2(8, headdim=4, d_state=4))
    optimizer, _ = importlib.import_module("training").make_optimizer(model, 1e-3, 10, weight_decay=0.1)
    decayed = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in decayed}
    assert names == {"in_proj.weight", "conv1d.weight", "out_proj.weight"}
    layer = copy.deepcopy(Mamba(8, d_state=4))
    optimizer, _ = importlib.import_module("training").make_optimizer(layer, 1e-3, 10, weight_decay=0.1)
    assert all(parameter is not layer.A_log for parameter in optimizer.param_groups[0]["params"])


def check_sharded(mesh: Mesh) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    from ssm_kernels.distributed import TensorParallel

    options: dict[str, Any] = {"process_group": mesh.get_group(), "device_id": torch.device("cpu")}
    for name in ("Mamba", "Liquid-constant_tau", "MambaLM-Mamba2", "MambaLM-MinGRU"):
        make = MAKERS[name]
        expected = expected_names(make())
        for device in ("cpu", "meta"):
            model = fully_shard(make(device=device), mesh=mesh)
            assert exempt_names(model) == expected, name
            assert exempt_names(model.to_empty(device="cpu")) == expected, name
            wrapped = FullyShardedDataParallel(make(device=device), use_orig_params=True, **options)
            assert exempt_names(wrapped) == expected, name
        assert exempt_names(nn.parallel.DistributedDataParallel(make(), process_group=mesh.get_group())) == expected, name
    flat = FullyShardedDataParallel(MAKERS["Mamba"](), use_orig_params=False, **options)
    with pytest.raises(ValueError, match=says("parameter_groups", "use_orig_params=True", "_flat_param")):
        parameter_groups(flat, 0.1)
    model = parallelize_module(MAKERS["MambaLM-Mamba2"](), mesh, TensorParallel())
    names = exempt_names(model)
    assert {f"backbone.layers.0.mixer.{name}" for name in RECURRENCE} <= names
    assert not any(name.endswith(("weight_x", "weight_z", "out_proj.weight")) for name in names)


def test_groups_of_sharded_models(processes: Processes):
    processes.check(Place((2,)), check_sharded)
