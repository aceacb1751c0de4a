"""The mixers call their projections as modules: hooks see them, adapters train, and layers put in their place are used."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import ssm_kernels.nn as snn

MIXERS = {
    "Mamba": lambda: snn.Mamba(8, d_state=4, dtype=torch.float64),
    "Mamba2": lambda: snn.Mamba2(8, d_state=4, headdim=4, dtype=torch.float64),
    "Mamba2_mlp": lambda: snn.Mamba2(8, d_state=4, headdim=4, d_ssm=8, dtype=torch.float64),
    "SelectiveSSM": lambda: snn.SelectiveSSM(8, d_state=4, dtype=torch.float64),
}
every_mixer = pytest.mark.parametrize("make", MIXERS.values(), ids=list(MIXERS))


def projections(layer: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}


class Adapter(nn.Module):
    """Of low rank, beside a layer that it calls: as adapter libraries wrap one."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        options = {"bias": False, "dtype": base_layer.weight.dtype}
        self.down = nn.Linear(base_layer.in_features, 2, **options)
        self.up = nn.Linear(2, base_layer.out_features, **options)
        nn.init.zeros_(self.up.weight)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, input: Tensor) -> Tensor:
        return self.base_layer(input) + self.up(self.down(input))


@every_mixer
def test_hooks_see_every_projection(make):
    torch.manual_seed(0)
    layer, called = make(), []
    for name, module in projections(layer).items():
        module.register_forward_hook(lambda module, inputs, output, name=name: called.append(name))
    layer(torch.randn(2, 5, 8, dtype=torch.float64))
    assert sorted(called) == sorted(projections(layer))


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Mamba2_mlp"])
def test_hooks_see_the_projections_of_a_step(name):
    torch.manual_seed(0)
    layer, called = MIXERS[name](), []
    for module in projections(layer).values():
        module.register_forward_hook(lambda module, inputs, output: called.append(module))
    layer.step(torch.randn(2, 1, 8, dtype=torch.float64), *layer.allocate_inference_cache(2, 1))
    assert len(called) == len(projections(layer))


@every_mixer
def test_adapters_train(make):
    torch.manual_seed(0)
    layer = make()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    expected = layer(x)
    for name, module in projections(layer).items():
        setattr(layer, name, Adapter(module))
    assert torch.equal(layer(x), expected)
    layer(x).square().sum().backward()
    for name, module in layer.named_modules():
        if isinstance(module, Adapter):
            assert module.up.weight.grad.abs().max() > 0, name


@pytest.mark.parametrize("name", ["Mamba", "SelectiveSSM"])
def test_a_linear_layer_in_the_place_of_dt_proj_adds_its_bias_itself(name):
    torch.manual_seed(0)
    layer = MIXERS[name]()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    expected, projection = layer(x), layer.dt_proj
    plain = nn.Linear(projection.in_features, projection.out_features, dtype=torch.float64)
    plain.load_state_dict(projection.state_dict())
    layer.dt_proj = plain
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
