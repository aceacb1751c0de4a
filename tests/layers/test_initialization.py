"""Initial parameters of every layer and model, in every order of ``reset_parameters``; tied weights."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings
import weakref

import pytest
import torch
import torch.nn as nn
from helpers import says
from initialization_helpers import MAKERS, ORDERS, assert_initialized, make_language_model
from model_helpers import make_config, make_model, make_tokens

from ssm_kernels.models import MambaLM
from ssm_kernels.nn import Mamba

every_maker = pytest.mark.parametrize("name", MAKERS)


def on_meta(name: str) -> nn.Module:
    """A model with memory that holds no numbers yet."""
    model = MAKERS[name](device="meta").to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, math.nan)
    return model


@every_maker
def test_constructor(name):
    torch.manual_seed(0)
    assert_initialized(MAKERS[name]())


@pytest.mark.parametrize("order", ORDERS)
@every_maker
def test_made_on_meta_and_initialized_later(name, order):
    torch.manual_seed(0)
    model = on_meta(name)
    ORDERS[order](model)
    assert_initialized(model)


@pytest.mark.parametrize("name", ["Mamba", "RecurrentMixer-MinGRU", "MambaLM-Mamba2"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"])
def test_copies_initialize_themselves(name, copied):
    torch.manual_seed(0)
    original = on_meta(name)
    model = copied(original)
    for order in ORDERS.values():
        order(model)
        assert_initialized(model)
    assert all(parameter.isnan().all() for parameter in original.parameters())


def test_a_parent_leaves_its_children_alone():
    layer = on_meta("Mamba")
    layer.reset_parameters()
    changed = {name for name, parameter in layer.named_parameters() if not parameter.isnan().any()}
    assert changed == {"A_log", "D"}
    assert bytes(layer.discretization_name.tolist()) == b"bilinear"


def test_memory_is_free_without_the_garbage_collector():
    gc.disable()
    try:
        layer = Mamba(8)
        weights = [weakref.ref(parameter) for parameter in layer.parameters()]
        del layer
        assert not any(weight() is not None for weight in weights)
    finally:
        gc.enable()


def test_init_weights_needs_modules_that_can_be_initialized():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    model = make_model("Mamba")
    model.backbone.layers[1].mixer = Scale()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=says("init_weights", "backbone.layers.1.mixer", "Scale")):
        model.init_weights()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_init_weights_of_a_model_with_attention_of_pytorch():
    model = make_model("Mamba", dtype=torch.float32)
    attention = nn.MultiheadAttention(16, 2)
    model.backbone.layers[1].mixer = attention
    nn.init.constant_(attention.in_proj_weight, math.nan)
    model.init_weights()
    assert attention.in_proj_weight.isfinite().all()
    assert not attention.out_proj.bias.any()  # as its constructor has it: the parent initializes after the child


class Counter(nn.Module):
    """A module with a buffer or with nothing, which knows how to begin."""

    def __init__(self, with_buffer: bool) -> None:
        super().__init__()
        self.calls = 0
        if with_buffer:
            self.register_buffer("frequencies", torch.full((3,), math.nan))

    def reset_parameters(self) -> None:
        self.calls += 1
        for buffer in self.buffers():
            buffer.fill_(2.0)


def test_init_weights_resets_modules_without_parameters():
    model = make_model("Mamba", dtype=torch.float32)
    mixer = model.backbone.layers[0].mixer
    mixer.rotary, mixer.plain, mixer.norm = Counter(True), Counter(False), nn.BatchNorm1d(3, affine=False)
    mixer.norm.running_mean.fill_(math.nan)
    mixer.buffers_only = nn.Module()
    mixer.buffers_only.register_buffer("kept", torch.ones(1))
    # A wrapper that forwards attributes has no method of its own.
    mixer.wrapped = torch.compile(Counter(False))
    model.init_weights()
    assert mixer.rotary.frequencies.tolist() == [2.0] * 3 and mixer.norm.running_mean.tolist() == [0.0] * 3
    assert [module.calls for module in (mixer.rotary, mixer.plain, mixer.wrapped._orig_mod)] == [1, 1, 1]


class Adapted(nn.Linear):
    """A projection with an adapter, which inherits ``reset_parameters``."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.lora_A, self.lora_B = (nn.Parameter(torch.zeros(size, 1)) for size in sizes)


class Scaled(nn.Module):
    """The last word on the parameters of children is the parent's."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(4, 2), nn.Linear(2, 4)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.up.weight)


def without_floats(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().char(), requires_grad=False)


def used_spectral_norm(layer: nn.Linear) -> None:
    nn.utils.spectral_norm(layer)(torch.randn(1, layer.in_features, dtype=layer.weight.dtype))


# Each changes a projection; the message names these parameters and this class.
HELD_WEIGHTS = {
    "weight_norm": (lambda layer: nn.utils.weight_norm(layer), ["Linear: weight_g, weight_v"]),
    "spectral_norm": (used_spectral_norm, ["Linear: weight_orig"]),
    "pruning": (lambda layer: nn.utils.prune.l1_unstructured(layer, "weight", 0.5), ["Linear: weight_orig"]),
    "weight_norm_parametrization": (lambda layer: nn.utils.parametrizations.weight_norm(layer), ["ParametrizationList"]),
    "spectral_norm_parametrization": (lambda layer: nn.utils.parametrizations.spectral_norm(layer), ["ParametrizationList"]),
    "orthogonal_parametrization": (lambda layer: nn.utils.parametrizations.orthogonal(layer), ["ParametrizationList"]),
    "integers": (without_floats, ["Linear with parameters of integers"]),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("change", HELD_WEIGHTS)
def test_init_weights_refuses_weights_that_it_cannot_reach(change):
    apply, expected = HELD_WEIGHTS[change]
    model = make_model("Mamba", dtype=torch.float32)
    layer = model.backbone.layers[1].mixer.in_proj
    apply(layer)
    before = copy.deepcopy(dict(layer.named_parameters(prefix="weight")))
    with pytest.raises(RuntimeError, match=says("init_weights", "backbone.layers.1.mixer.in_proj", *expected, "before you")):
        model.init_weights()
    torch.testing.assert_close(dict(layer.named_parameters(prefix="weight")), before, rtol=0, atol=0)


def test_init_weights_and_adapters():
    model = make_model("Mamba", dtype=torch.float32)
    model.backbone.layers[0].mixer.in_proj = Adapted(16, 64)
    with pytest.raises(RuntimeError, match=says("layers.0.mixer.in_proj", "Adapted: lora_A, lora_B")):
        model.init_weights()
    model.backbone.layers[0].mixer.in_proj = Scaled()
    nn.init.ones_(model.backbone.layers[0].mixer.in_proj.up.weight)
    model.init_weights()
    assert not model.backbone.layers[0].mixer.in_proj.up.weight.any()


def test_init_weights_and_a_parameter_of_two_modules():
    model = make_model("Mamba", dtype=torch.float32)
    sharing = Scaled()
    sharing.shared = model.backbone.layers[1].mixer.D  # which reset_parameters of its own module draws
    model.backbone.layers[0].mixer.in_proj = sharing
    nn.init.constant_(sharing.shared, 7.0)
    model.init_weights()
    assert sharing.shared is model.backbone.layers[1].mixer.D and sharing.shared.eq(1).all()


def test_init_weights_refuses_adapters_of_peft():
    peft = pytest.importorskip("peft", reason="peft is not installed: the extra [clients]")
    model = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["in_proj"]), make_model("Mamba", dtype=torch.float32))
    with pytest.raises(RuntimeError, match=says("layers.1.mixer.in_proj", "a layer of peft", "before you")):
        model.init_weights()
    assert not model.backbone.layers[1].mixer.in_proj.lora_B["default"].weight.any()


# ----- tied weights


def is_tied(model: MambaLM) -> bool:
    names = {name for name, _ in model.named_parameters()}
    return model.lm_head.weight is model.backbone.embedding.weight and "lm_head.weight" not in names


def assigned(model: MambaLM) -> MambaLM:
    other = MambaLM(model.config, device="meta", dtype=torch.float64)
    other.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return other


def loaded_later(model: MambaLM) -> MambaLM:
    other = MambaLM(model.config, device="meta", dtype=torch.float64).to_empty(device="cpu")
    other.load_state_dict(model.state_dict())
    return other


def in_a_larger_model(model: MambaLM) -> MambaLM:
    outer = nn.Sequential(MambaLM(model.config, device="meta", dtype=torch.float64))
    outer.load_state_dict({f"0.{name}": value.clone() for name, value in model.state_dict().items()}, assign=True)
    return outer[0]


CHANGES = {
    "assign": assigned,
    "assign_in_a_larger_model": in_a_larger_model,
    "to_empty": loaded_later,
    "dtype": lambda model: model.float().double(),
    "bfloat16": lambda model: model.to(torch.bfloat16).double(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("conversion", ["", "overwrite", "swap"])
@pytest.mark.parametrize("change", CHANGES)
def test_tied_weights_stay_tied(change, conversion):
    model = make_model("Mamba")
    assert is_tied(model)
    expected = model.lm_head.weight.detach().clone()
    future = torch.__future__
    future.set_overwrite_module_params_on_conversion(conversion == "overwrite")
    future.set_swap_module_params_on_conversion(conversion == "swap")
    try:
        model = CHANGES[change](model)
    finally:
        future.set_overwrite_module_params_on_conversion(False)
        future.set_swap_module_params_on_conversion(False)
    assert is_tied(model)
    torch.testing.assert_close(model.lm_head.weight, nn.Parameter(expected), rtol=0.01, atol=0)
    model(make_tokens(1, 4)).logits.sum().backward()
    assert model.backbone.embedding.weight.grad.abs().sum() > 0


TIED = ("backbone.embedding.weight", "lm_head.weight")


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize("prefix", ["", "0.", "inner.0."])
@pytest.mark.parametrize("names", [TIED[:1], TIED[1:], TIED], ids=["embedding", "head", "both"])
def test_a_tied_weight_is_loaded_under_each_of_its_names(names, prefix, place):
    model = MambaLM(make_config("Mamba"), device=place)
    other = copy.deepcopy(model)
    outer = {"": model, "0.": nn.Sequential(model, other), "inner.0.": nn.ModuleDict({"inner": nn.Sequential(model, other)})}
    weight = torch.randn(model.lm_head.weight.shape)
    left = other.lm_head.weight
    outer[prefix].load_state_dict({prefix + name: weight.clone() for name in names}, strict=False, assign=True)
    assert is_tied(model) and torch.equal(model.lm_head.weight, weight)
    assert model.lm_head.weight.requires_grad
    assert is_tied(other) and other.lm_head.weight is left


def test_a_tied_weight_with_memory_wins():
    names = dict.fromkeys(TIED, torch.randn(24, 16))
    for empty in TIED:
        model = MambaLM(make_config("Mamba"), device="meta")
        model.load_state_dict(names | {empty: names[empty].to("meta")}, strict=False, assign=True)
        assert is_tied(model) and torch.equal(model.lm_head.weight, names[empty])
    model = MambaLM(make_config("Mamba"), device="meta")
    model.lm_head.load_state_dict({"weight": names["lm_head.weight"]}, assign=True)
    model.tie_weights()
    assert is_tied(model) and torch.equal(model.lm_head.weight, names["lm_head.weight"])


def test_weights_that_are_not_tied_stay_two():
    model = assigned(make_model("Mamba", tie_embeddings=False))
    model = copy.deepcopy(model).float()
    model.init_weights()
    assert not is_tied(model) and not torch.equal(model.lm_head.weight, model.backbone.embedding.weight)


def test_a_tied_checkpoint_of_two_weights(tmp_path):
    model = make_model("Mamba", tie_embeddings=False)
    weights = model.state_dict()
    message = says("backbone.embedding.weight", "lm_head.weight", "tie_embeddings=False")
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=message):
            make_model("Mamba").load_state_dict(weights, strict=strict)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=message):
        MambaLM.from_pretrained(tmp_path, tie_embeddings=True)
    # Equal values in two tensors, as a format without shared tensors has them; NaN too.
    weights["lm_head.weight"] = weights["backbone.embedding.weight"].clone()
    weights["lm_head.weight"][0, 0] = weights["backbone.embedding.weight"][0, 0] = math.nan
    make_model("Mamba").load_state_dict(weights)


@pytest.mark.parametrize("part", ["backbone", "lm_head"])
def test_a_part_that_is_changed_alone(part, tmp_path):
    """Nobody tells the model; it warns in training, and saves nothing else than it trains."""
    model = make_model("Mamba")
    weights = {name: value.clone() for name, value in getattr(model, part).state_dict().items()}
    getattr(model, part).load_state_dict(weights, assign=True)
    assert not is_tied(model)
    with pytest.warns(UserWarning, match=says("embedding and head", "two parameters", "tie_weights()")) as caught:
        model(make_tokens(1, 4))
    assert caught[0].filename == __file__
    model.tie_weights()
    assert is_tied(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(make_tokens(1, 4))


def test_a_model_on_meta_is_not_saved(tmp_path):
    with pytest.raises(RuntimeError, match=says("save_pretrained", "on meta", "init_weights")):
        MambaLM(make_config("Mamba"), device="meta").save_pretrained(tmp_path)


def test_options_of_the_initialization():
    with pytest.raises(TypeError, match=says("MixerModel", "initializer_cfg", "'initializer_range'", "'initalizer_range'")):
        MambaLM(make_config("Mamba"), {"initalizer_range": 1.0})


def test_tied_weights_are_initialized_as_an_embedding_is():
    torch.manual_seed(0)
    model = make_language_model("Mamba")
    model.lm_head.reset_parameters()
    assert is_tied(model) and model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.03)
    # A copy of a part knows nothing of the whole.
    part = copy.deepcopy(model.backbone)
    before = model.lm_head.weight.clone()
    part.embedding.reset_parameters()
    assert torch.equal(model.lm_head.weight, before) and make_config("Mamba").tie_embeddings
