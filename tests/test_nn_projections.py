"""The mixers call their projections as modules: hooks see them, adapters train, and layers put in their place are used."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from layer_helpers import MIXERS, WIDTH, decode, make_layer, make_sequence
from torch import Tensor

LAYERS = [*MIXERS, "Mamba2-with_mlp", "SelectiveSSM"]


def projections(layer: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}


@pytest.mark.parametrize("call", [lambda layer, x: layer(x), decode], ids=["forward", "step"])
@pytest.mark.parametrize("name", LAYERS)
def test_hooks_see_every_projection(name, call):
    layer, called = make_layer(name), []
    for key, module in projections(layer).items():
        module.register_forward_hook(lambda module, inputs, output, key=key: called.append(key))
    call(layer, make_sequence(2, 1, WIDTH))
    assert sorted(called) == sorted(projections(layer))


class Adapter(nn.Module):
    """A low-rank adapter beside the layer that it wraps, as adapter libraries make them."""

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


class Wrapper(nn.Module):
    """Calls a layer and adds nothing, as checkpoint wrappers do."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, input: Tensor) -> Tensor:
        return self.wrapped(input)


@pytest.mark.parametrize(
    "wrap", [Adapter, Wrapper, lambda module: Adapter(Adapter(module))], ids=["adapter", "wrapper", "two_adapters"]
)
@pytest.mark.parametrize("name", LAYERS)
def test_wrapped_projections_train(name, wrap):
    layer, x = make_layer(name), make_sequence(2, 5, WIDTH)
    expected = layer(x)
    for key, module in projections(layer).items():
        setattr(layer, key, wrap(module))
    assert torch.equal(layer(x), expected)
    layer(x).square().sum().backward()
    assert all(p.grad is not None for key, p in layer.named_parameters() if key.endswith("bias"))
    for key, module in layer.named_modules():
        assert not isinstance(module, Adapter) or module.up.weight.grad.abs().max() > 0, key


@pytest.mark.parametrize("name", MIXERS)
def test_step_of_a_16_bit_layer_under_autocast_to_the_other_dtype(name):
    layer, x = make_layer(name).half(), make_sequence(2, 3, WIDTH, dtype=torch.float16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole, steps = layer(x), decode(layer, x)
    assert steps.dtype == whole.dtype == torch.bfloat16
    torch.testing.assert_close(steps, whole, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("name", ["Mamba", "SelectiveSSM"])
def test_a_linear_layer_in_the_place_of_dt_proj_adds_its_bias_itself(name):
    layer, x = make_layer(name), make_sequence(2, 5, WIDTH)
    expected, projection = layer(x), layer.dt_proj
    layer.dt_proj = nn.Linear(projection.in_features, projection.out_features, dtype=torch.float64)
    layer.dt_proj.load_state_dict(projection.state_dict())
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("call", [lambda layer, x: layer(x), decode], ids=["forward", "step"])
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_hooks_that_compute_the_weight_of_the_convolution(name, call):
    """torch.nn.utils.weight_norm computes it in a hook, which sees no call of conv1d."""
    layer, x = make_layer(name), make_sequence(2, 5, WIDTH)
    with torch.no_grad():
        first = call(layer, x)
        nn.utils.weight_norm(layer.conv1d)
        torch.testing.assert_close(call(layer, x), first)
        layer.conv1d.weight_g.mul_(2)
        actual = call(layer, x)
        nn.utils.remove_weight_norm(layer.conv1d)
        torch.testing.assert_close(actual, call(layer, x))
    assert (actual - first).abs().max() > 1e-3


@pytest.mark.parametrize("name", MIXERS)
def test_weight_norm_of_every_projection_trains(name):
    layer, x = make_layer(name), make_sequence(2, 5, WIDTH)
    expected = layer(x)
    modules = [*projections(layer).values(), layer.conv1d]
    for module in modules:
        nn.utils.parametrizations.weight_norm(module)
    torch.testing.assert_close(layer(x), expected)
    layer(x).square().sum().backward()
    for module in modules:
        assert all(p.grad.abs().max() > 0 for p in module.parametrizations.weight.parameters())


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dynamically_quantized_projections(name):
    layer = make_layer(name, dtype=torch.float32)
    x = make_sequence(2, 5, WIDTH, dtype=torch.float32)
    quantized = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear}, dtype=torch.qint8)
    assert type(quantized.in_proj) is not nn.Linear and type(quantized.out_proj) is not nn.Linear
    with torch.no_grad():
        expected, actual = layer(x), quantized(x)
        assert 0 < (actual - expected).norm() < 0.1 * expected.norm()
        assert (decode(quantized, x) - expected).norm() < 0.1 * expected.norm()
