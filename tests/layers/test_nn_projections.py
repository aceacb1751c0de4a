"""The mixers call their projections as modules: hooks see them, adapters train, and layers put in their place are used."""

from __future__ import annotations

import copy
import pickle
from typing import ClassVar

import pytest
import torch
import torch.nn as nn
from layer_helpers import MIXERS, WIDTH, decode, make_layer, make_sequence
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
    # A wrapped dt_proj adds its bias itself, in its own order of sums.
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
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


STEP_SIZES = pytest.mark.parametrize("name", ["Mamba", "SelectiveSSM"])


class BiasOfTheScan(TorchDispatchMode):
    """Records whether each scan or step adds a bias to the step sizes."""

    PLACES: ClassVar = {"_mamba_mixer": 7, "selective_state_update": 8}

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Below autograd the mixer is _mamba_mixer_fwd.
        place = self.PLACES.get(func.name().removeprefix("ssm_kernels::").removesuffix("_fwd"))
        if place is not None:
            self.found.append(args[place] is not None)
        return func(*args, **(kwargs or {}))


def adds_bias(layer: nn.Module, x: Tensor) -> bool:
    """Whether the scan and the step both add the bias of dt_proj, which has to be the same."""
    with BiasOfTheScan() as bias:
        layer(x)
        decode(layer, x[:, :1])
    assert len(bias.found) == 2 and bias.found[0] == bias.found[1]
    return bias.found[0]


@STEP_SIZES
def test_dt_proj_is_a_plain_linear_layer(name):
    layer, x = make_layer(name), make_sequence(2, 5, WIDTH)
    assert type(layer.dt_proj) is nn.Linear
    assert adds_bias(layer, x)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert adds_bias(copied, x)
        assert torch.equal(copied(x), layer(x))
    layer.dt_proj = nn.Linear(layer.dt_rank, layer.d_inner, bias=False, dtype=torch.float64)
    assert not adds_bias(layer, x)
    nn.utils.parametrizations.weight_norm(layer.dt_proj)
    assert not adds_bias(layer, x)


def forward_of_its_own(module: nn.Linear) -> None:
    """Replaces `forward` of the module alone, as accelerate's hooks and FSDP do."""
    forward = module.forward
    module.forward = lambda input: forward(input)


def class_of_its_own(module: nn.Linear) -> None:
    """Gives the module a subclass of nn.Linear, as quantization does."""

    class Linear(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    module.__class__ = Linear


WATCHED = {
    "forward_hook": lambda module: module.register_forward_hook(lambda module, inputs, output: output),
    "forward_pre_hook": lambda module: module.register_forward_pre_hook(lambda module, inputs: inputs),
    "backward_hook": lambda module: module.register_full_backward_hook(lambda module, inputs, outputs: None),
    "backward_pre_hook": lambda module: module.register_full_backward_pre_hook(lambda module, outputs: None),
    "global_hook": lambda module: nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None),
    "global_backward_hook": lambda module: nn.modules.module.register_module_full_backward_hook(lambda *_: None),
    "forward": forward_of_its_own,
    "class": class_of_its_own,
}


@pytest.mark.parametrize("watch", WATCHED.values(), ids=WATCHED)
@STEP_SIZES
def test_dt_proj_is_called_where_something_sees_the_call(name, watch):
    layer, x = make_layer(name), make_sequence(2, 5, WIDTH)
    expected = layer(x)
    handle = watch(layer.dt_proj)
    try:
        assert not adds_bias(layer, x)
        torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(decode(layer, x), expected, rtol=1e-12, atol=1e-12)
    finally:
        if handle is not None:
            handle.remove()
    assert handle is None or adds_bias(layer, x)


@torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)  # by default no compiled module sees hooks added later
@STEP_SIZES
def test_a_compiled_layer_sees_hooks_of_dt_proj(name):
    layer, x = make_layer(name), make_sequence(2, 5, WIDTH)
    compiled, expected = torch.compile(layer, backend="aot_eager", fullgraph=True), layer(x)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-12, atol=1e-12)
    handle = layer.dt_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    doubled = layer(x)
    assert (doubled - expected).abs().max() > 1e-6
    torch.testing.assert_close(compiled(x), doubled, rtol=1e-12, atol=1e-12)
    handle.remove()
    torch.testing.assert_close(compiled(x), expected, rtol=1e-12, atol=1e-12)
    torch._dynamo.reset()


@pytest.mark.parametrize("strict", [False, True])
@STEP_SIZES
def test_exported_layers_add_the_bias_in_the_scan(name, strict):
    """Also where torch.export hides the modules behind classes of its own."""
    layer, x = make_layer(name), make_sequence(2, 5, WIDTH)
    program = torch.export.export(layer, (x,), strict=strict)
    [scan] = [node for node in program.graph.nodes if "_mamba_mixer" in str(node.target)]
    assert scan.args[BiasOfTheScan.PLACES["_mamba_mixer"]] is not None
    torch.testing.assert_close(program.module()(x), layer(x))


@STEP_SIZES
def test_a_linear_layer_in_the_place_of_dt_proj(name):
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
    assert all(not isinstance(quantized.get_submodule(key), nn.Linear) for key in projections(layer))
    with torch.no_grad():
        expected, actual = layer(x), quantized(x)
        assert 0 < (actual - expected).norm() < 0.1 * expected.norm()
        assert (decode(quantized, x) - expected).norm() < 0.1 * expected.norm()
