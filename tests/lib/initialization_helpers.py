"""The distributions of initial parameters, as checks of values; the ways in which a model is initialized late."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ssm_kernels.models import MambaConfig, MambaLM, RecurrentMixer
from ssm_kernels.nn import Block, GatedMLP, Liquid, Mamba, Mamba2, MinGRU, MinLSTM, SelectiveSSM
from ssm_kernels.nn.gated_rms_norm import GatedRMSNorm

D_MODEL = 128
MODELS: dict[str, dict[str, Any]] = {
    "Mamba": {"ssm_cfg": {"bias": True, "d_state": 4}, "d_intermediate": 128},
    "Mamba2": {"ssm_cfg": {"bias": True, "headdim": 1, "d_state": 4}, "discretization": "zoh_exact"},
    "MinGRU": {"ssm_cfg": {"bias": True}, "tie_embeddings": False},
    "MinLSTM": {"rms_norm": False},
}


def make_language_model(mixer: str, **options: Any) -> MambaLM:
    return MambaLM(MambaConfig(d_model=D_MODEL, n_layer=2, vocab_size=256, mixer=mixer, **MODELS[mixer]), **options)


# By name, layers and models with every way of initialization.
MAKERS: dict[str, Callable[..., nn.Module]] = {
    "Mamba": lambda **options: Mamba(D_MODEL, d_state=4, bias=True, discretization="bilinear", **options),
    "Mamba-constant": lambda **options: Mamba(D_MODEL, d_state=4, dt_init="constant", dt_min=0.01, dt_max=0.5, **options),
    "Mamba2": lambda **options: Mamba2(D_MODEL, headdim=1, d_state=4, conv_init=0.1, A_init_range=(2, 6), **options),
    "SelectiveSSM": lambda **options: SelectiveSSM(D_MODEL, d_state=4, dt_rank=16, dt_scale=0.5, **options),
    "MinGRU": lambda **options: MinGRU(D_MODEL, D_MODEL, 2, bidirectional=True, **options),
    "MinLSTM": lambda **options: MinLSTM(D_MODEL, D_MODEL, **options),
    "Liquid": lambda **options: Liquid(D_MODEL, D_MODEL, 2, tau_init=(0.5, 50), **options),
    "Liquid-constant_tau": lambda **options: Liquid(D_MODEL, D_MODEL, input_dependent_tau=False, **options),
    "RecurrentMixer-MinGRU": lambda **options: RecurrentMixer(D_MODEL, "MinGRU", **options),
    "RecurrentMixer-MinLSTM": lambda **options: RecurrentMixer(D_MODEL, "MinLSTM", **options),
    "GatedMLP": lambda **options: GatedMLP(D_MODEL, bias=True, **options),
    "GatedRMSNorm": lambda **options: GatedRMSNorm(D_MODEL, **options),
    "Block": lambda **options: Block(
        D_MODEL, lambda dim: Mamba2(dim, headdim=1, **options), norm_cls=lambda dim: nn.RMSNorm(dim, **options)
    ),
    **{f"MambaLM-{name}": lambda name=name, **options: make_language_model(name, **options) for name in MODELS},
}


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().double().cpu()


def assert_uniform(value: Tensor, low: float, high: float, what: str) -> None:
    """Range, mean and spread; no half repeats the other, as shards of ranks that drew equal numbers do."""
    value = (whole(value) - low) / (high - low)
    assert -2e-3 < value.min() < 0.15 and 0.85 < value.max() < 1 + 2e-3, (what, value.min(), value.max())
    count = value.numel()
    assert abs(value.mean() - 0.5) < 5 * 0.29 / math.sqrt(count), (what, value.mean())
    assert abs(value.std() - 0.289) < 0.6 / math.sqrt(count), (what, value.std())
    assert_no_half_repeats(value, what)


def assert_no_half_repeats(value: Tensor, what: str) -> None:
    if value.shape[0] % 2 == 0 and value.shape[0] > 1:
        first, second = value.chunk(2)
        assert (first == second).float().mean() < 0.1, f"{what}: the shards are equal"


def assert_constant(value: Tensor | None, expected: float, what: str) -> None:
    assert value is None or (whole(value) == expected).all(), what


def assert_steps(bias: Tensor, low: float, high: float, what: str) -> None:
    assert_uniform(F.softplus(whole(bias)).log(), math.log(low), math.log(high), what)


def assert_initialized(model: nn.Module) -> None:
    """Checks the values of every parameter of ``model``."""
    modules, checked = dict(model.named_modules()), set()
    own = next((module for module in modules.values() if isinstance(module, MambaLM)), None)
    config = None if own is None else own.config
    for path, module in modules.items():
        parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        parent, _, name = path.rpartition(".")
        if parameters:
            check_parameters(module, name, modules.get(parent) if path else None, config, path, parameters)
            checked.update(parameters.values())
    missing = [name for name, parameter in model.named_parameters() if parameter not in checked]
    assert not missing
    if config is not None:
        assert (own.lm_head.weight is own.backbone.embedding.weight) == config.tie_embeddings


def check_parameters(module: Any, name: str, parent: Any, config: Any, path: str, parameters: dict[str, Tensor]) -> None:
    if isinstance(module, Mamba | SelectiveSSM):
        rows = torch.arange(1, module.d_state + 1, dtype=torch.float64).expand(module.d_inner, -1)
        torch.testing.assert_close(whole(module.A_log).exp(), rows, rtol=1e-6, atol=0)
        assert_constant(module.D, 1, path)
    elif isinstance(module, Mamba2):
        assert_uniform(whole(module.A_log).exp(), *module.A_init_range, f"{path}.A_log")
        assert_steps(module.dt_bias, module.dt_min, module.dt_max, f"{path}.dt_bias")
        assert_constant(module.D, 1, path)
    elif isinstance(module, MinGRU | MinLSTM | Liquid):
        check_recurrence(module, isinstance(parent, RecurrentMixer), path, parameters)
    elif isinstance(module, nn.Embedding) or (name == "lm_head" and config.tie_embeddings):
        weight = whole(module.weight)
        assert 0.0195 < weight.std() < 0.0205 and abs(weight.mean()) < 1e-3, (path, weight.std())
        assert_no_half_repeats(weight, path)
    elif isinstance(module, nn.Linear) and name == "dt_proj":
        bound = module.in_features**-0.5 * parent.dt_scale
        if parent.dt_init == "constant":
            torch.testing.assert_close(whole(module.weight), torch.full(module.weight.shape, bound, dtype=torch.float64))
        else:
            assert_uniform(module.weight, -bound, bound, path)
        assert_steps(module.bias, parent.dt_min, parent.dt_max, f"{path}.bias")
    elif isinstance(module, nn.Linear):
        bound = module.in_features**-0.5
        residuals = 1 if config is None else config.n_layer * (2 if config.d_intermediate else 1)
        divisor = math.sqrt(residuals) if name in ("out_proj", "fc2") else 1
        assert_uniform(module.weight, -bound / divisor, bound / divisor, path)
        if module.bias is not None and config is not None:
            assert_constant(module.bias, 0, path)
        elif module.bias is not None:
            assert_uniform(module.bias, -bound, bound, f"{path}.bias")
    elif isinstance(module, nn.Conv1d):
        own = module.kernel_size[0] ** -0.5
        bound = getattr(parent, "conv_init", None) or own
        assert_uniform(module.weight, -bound, bound, path)
        assert_uniform(module.bias, -own, own, f"{path}.bias")
    else:
        assert isinstance(module, nn.RMSNorm | nn.LayerNorm | GatedRMSNorm), path
        assert_constant(module.weight, 1, path)
        assert_constant(getattr(module, "bias", None), 0, path)


def check_recurrence(module: Any, is_in_mixer: bool, path: str, parameters: dict[str, Tensor]) -> None:
    hidden = module.hidden_size
    bound = hidden**-0.5
    for name, value in parameters.items():
        what = f"{path}.{name}"
        if name.startswith("weight"):
            assert_uniform(value, -bound, bound, what)
        elif name.startswith("raw_tau"):
            assert_uniform((F.softplus(whole(value)) + 1e-3).log(), *map(math.log, module.tau_init), what)
        else:
            parts = whole(value).split(hidden)
            for place, part in enumerate(parts):
                if isinstance(module, Liquid) and place == 1:
                    assert_uniform((F.softplus(part) + 1e-3).log(), *map(math.log, module.tau_init), what)
                elif is_in_mixer and place == len(parts) - 2:
                    assert_uniform(part, -4, 0, what)
                else:
                    assert_uniform(part, -bound, bound, what)


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def root_first(model: nn.Module) -> None:
    for module in model.modules():
        reset(module)


def children_first(model: nn.Module) -> None:
    model.apply(reset)


def init_weights(model: nn.Module) -> None:
    model.init_weights() if hasattr(model, "init_weights") else root_first(model)


ORDERS = {"root_first": root_first, "children_first": children_first, "init_weights": init_weights}
