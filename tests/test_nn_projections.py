"""The mixers call their projections as modules: hooks see them, adapters train, and layers put in their place are used."""

from __future__ import annotations

from types import SimpleNamespace

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
        self.base_layer, self.in_features, self.out_features = base_layer, base_layer.in_features, base_layer.out_features
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


class Wrapper(nn.Module):
    """Calls a layer and adds nothing, as checkpoint wrappers do."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, input: Tensor) -> Tensor:
        return self.wrapped(input)


@every_mixer
@pytest.mark.parametrize("wrap", [Wrapper, lambda module: Adapter(Adapter(module))], ids=["wrapper", "two_adapters"])
def test_wrapped_projections(make, wrap):
    torch.manual_seed(0)
    layer = make()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    expected = layer(x)
    for name, module in projections(layer).items():
        setattr(layer, name, wrap(module))
    assert torch.equal(layer(x), expected)
    layer(x).square().sum().backward()
    assert all(p.grad is not None for name, p in layer.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize("name", ["Mamba", "Mamba2"])
def test_backward_through_a_continued_piece(name):
    """The cache is written after the piece, and backward reads the states before it."""
    torch.manual_seed(0)
    layer, x = MIXERS[name](), torch.randn(2, 7, 8, dtype=torch.float64)
    layer.layer_idx = 0
    cache = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    layer(x[:, :4], inference_params=cache)
    cache.seqlen_offset = 4
    continued = layer(x[:, 4:], inference_params=cache)
    torch.testing.assert_close(continued, layer(x)[:, 4:], rtol=1e-10, atol=1e-12)
    continued.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("name", ["Mamba", "Mamba2"])
def test_step_of_a_16_bit_layer_under_autocast_to_the_other_dtype(name):
    torch.manual_seed(0)
    layer, x = MIXERS[name]().half(), torch.randn(2, 3, 8, dtype=torch.float16)
    conv_state, ssm_state = layer.allocate_inference_cache(2, 3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole = layer(x)
        steps = torch.cat([layer.step(x[:, t : t + 1], conv_state, ssm_state)[0] for t in range(3)], dim=1)
    assert steps.dtype == whole.dtype == torch.bfloat16
    torch.testing.assert_close(steps, whole, rtol=5e-2, atol=5e-2)


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
