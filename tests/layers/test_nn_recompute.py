"""Mamba2 has the same bits with every value of recompute, and calls projections that are not plain as modules."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from test_nn_projections import WATCHED, Adapter, Wrapper
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ssm_kernels import nn as snn
from ssm_kernels.nn.common import is_plain_linear

OPERATOR = "mamba2_mixer"
WIDTH = 16
LEVELS = ("none", "cheap", "all")
SIZES: dict[str, Any] = {"headdim": 8, "d_state": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "bias": {"bias": True},
    "groups": {"ngroups": 2, "norm_before_gate": True},
    "no_norm": {"rmsnorm": False},
    "with_mlp": {"d_ssm": 16},
}


def make(recompute: Any = "cheap", *, dtype: torch.dtype = torch.float64, device: str = "cpu", **options: Any) -> snn.Mamba2:
    torch.manual_seed(0)
    return snn.Mamba2(WIDTH, recompute=recompute, dtype=dtype, device=device, **SIZES, **options)


def make_input(layer: nn.Module, batch: int = 2, seqlen: int = 20) -> Tensor:
    weight = layer.A_log
    x = torch.randn(batch, seqlen, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dtype = next(p.dtype for name, p in layer.named_parameters() if "conv1d" in name)
    return x.to(weight.device, dtype).requires_grad_()


def evaluate(layer: nn.Module, call: Callable[..., Tensor] | None = None, **packed: Tensor) -> dict[str, Tensor]:
    x = make_input(layer, batch=1 if packed else 2)
    out = (layer if call is None else call)(x, **packed)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(out)
    parameters = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(out, [x, *parameters.values()], grad, allow_unused=True)
    return {"out": out.detach()} | dict(zip(("x", *parameters), found, strict=True))


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_every_value_gives_the_same_bits(options, dtype, device):
    expected = evaluate(make("none", dtype=dtype, device=device, **options))
    for level in LEVELS[1:]:
        actual = evaluate(make(level, dtype=dtype, device=device, **options))
        if options.get("bias"):  # addmm and its gradient may sum in another order than the module's
            torch.testing.assert_close(actual, expected)
        else:
            assert_equal(actual, expected)


@pytest.mark.parametrize("packed", [{"seq_idx": torch.arange(20)[None] // 7}, {"cu_seqlens": torch.tensor([0, 3, 20])}])
def test_packed_sequences(packed):
    expected = evaluate(make("none"), **packed)
    for level in LEVELS[1:]:
        assert_equal(evaluate(make(level), **packed), expected)


def test_continues_from_a_cache():
    class Cache:
        def __init__(self) -> None:
            self.seqlen_offset, self.key_value_memory_dict = 0, {}

    outs = []
    for level in LEVELS:
        layer, cache = make(level, layer_idx=0), Cache()
        x = make_input(layer)
        first = layer(x[:, :7], inference_params=cache)
        cache.seqlen_offset = 7
        out = torch.cat([first, layer(x[:, 7:], inference_params=cache)], 1)
        outs.append([out.detach(), *torch.autograd.grad(out.square().sum(), [x, layer.out_proj.weight, layer.dt_bias])])
    for other in outs[1:]:
        assert all(map(torch.equal, other, outs[0]))


class Calls(TorchDispatchMode):
    """Records the calls of the operator that takes the out-projection in."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("ssm_kernels::_mamba2_mixer_projected"):
            names = [argument.name for argument in func._schema.arguments]
            self.weights.append(args[names.index("out_proj_weight")])
        return func(*args, **(kwargs or {}))


def takes_projection(layer: snn.Mamba2) -> bool:
    """Whether the layer's operator computes the out-projection."""
    x = make_input(layer)
    with Calls() as calls:
        layer(x)
    return any(weight is not None for weight in calls.weights)


def test_a_plain_projection_is_taken():
    for layer in (make(), copy.deepcopy(make()), pickle.loads(pickle.dumps(make())), make("all"), make(rmsnorm=False)):
        assert is_plain_linear(layer.out_proj) and takes_projection(layer)
    for layer in (make("none"), make(d_ssm=16), make("all", d_ssm=16)):
        assert not takes_projection(layer)
    layer = make()
    with torch.no_grad():
        assert not takes_projection(layer)
    layer.recompute = "none"
    assert not takes_projection(layer)


def test_layers_pickled_by_an_earlier_version_have_the_default():
    layer = make("none")
    del layer.__dict__["recompute"]
    assert layer.recompute == "cheap" and takes_projection(layer)


class Subclass(Tensor):
    """Stands for DTensors and quantized weights, which are subclasses of Tensor."""


def weight_of_a_subclass(module: nn.Linear) -> None:
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Subclass))


def derived_module(module: nn.Linear) -> None:
    class Linear(nn.Linear):
        pass

    module.__class__ = Linear


NOT_PLAIN = WATCHED | {
    "subclass": derived_module,
    "weight_of_a_subclass": weight_of_a_subclass,
    "parametrization": lambda module: nn.utils.parametrizations.weight_norm(module) and None,
    "pruning": lambda module: nn.utils.prune.random_unstructured(module, "weight", 0.0) and None,
}


@pytest.mark.parametrize("level", ["cheap", "all"])
@pytest.mark.parametrize("watch", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_a_projection_that_is_not_plain_is_called(watch, level):
    layer = make(level)
    expected = evaluate(layer)
    handle = watch(layer.out_proj)
    try:
        assert not is_plain_linear(layer.out_proj) and not takes_projection(layer)
        actual = evaluate(layer)
        for name in ("out", "x", "A_log"):
            torch.testing.assert_close(actual[name].as_subclass(Tensor), expected[name], rtol=1e-12, atol=1e-12)
    finally:
        if handle is not None:
            handle.remove()
    assert handle is None or takes_projection(layer)


@pytest.mark.parametrize("level", ["cheap", "all"])
@pytest.mark.parametrize("wrap", [Adapter, Wrapper], ids=["adapter", "wrapper"])
def test_adapters_train(wrap, level):
    layer = make(level)
    expected = evaluate(layer)
    layer.out_proj = wrap(layer.out_proj)
    assert not takes_projection(layer)
    actual = evaluate(layer)
    torch.testing.assert_close(actual["out"], expected["out"])
    torch.testing.assert_close(actual["x"], expected["x"])
    if wrap is Adapter:
        assert actual["out_proj.up.weight"].abs().max() > 0


@pytest.mark.parametrize("level", ["cheap", "all"])
@pytest.mark.parametrize("frozen", ["out_proj", "norm", "in_proj", ""])
def test_frozen_parameters(frozen, level):
    layers = [make(level, bias=True), make("none", bias=True)]
    for layer in layers:
        layer.get_submodule(frozen).requires_grad_(False)
        layer.A_log.requires_grad_(frozen != "")
    actual, expected = map(evaluate, layers)
    torch.testing.assert_close(actual, expected)


def saved_bytes(layer: nn.Module) -> int:
    """Bytes that forward keeps for backward, without the parameters and the input."""
    x = make_input(layer)
    given = {tensor.untyped_storage().data_ptr() for tensor in (x, *layer.parameters())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(x)
    assert out.shape == x.shape
    return sum(saved.values())


def test_kept_bytes(device):
    rows, d_inner, nheads = 2 * 20, 32, 4
    columns, small = 2 * d_inner + 16 + nheads, rows * 4 + nheads * 4  # rstd and A
    kept = {level: saved_bytes(make(level, dtype=torch.bfloat16, device=device)) - small for level in LEVELS}
    assert kept == {
        "none": 2 * rows * (columns + 2 * d_inner),
        "cheap": 2 * rows * (columns + d_inner),
        "all": 2 * rows * columns,
    }
    # Called as a module, out_proj keeps its input.
    layer = make("all", dtype=torch.bfloat16, device=device)
    layer.out_proj.register_forward_hook(lambda module, inputs, output: None)
    assert saved_bytes(layer) - small == 2 * rows * (columns + d_inner)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    layer = make()
    expected = evaluate(layer)
    if not use_reentrant:  # which gives no gradients by torch.autograd.grad
        assert_equal(evaluate(layer, lambda x: checkpoint(layer, x, use_reentrant=False)), expected)
    x = make_input(layer)
    out = checkpoint(layer, x, use_reentrant=use_reentrant)
    out.sum().backward()
    assert torch.equal(out.detach(), expected["out"]) and x.grad is not None


def test_tangents_of_the_projection_alone():
    layer = make()
    x, weight = make_input(layer).detach(), layer.out_proj.weight.detach()
    layer.requires_grad_(False)
    layer.out_proj.requires_grad_()
    expected = torch.autograd.grad(layer(x).sum(), layer.out_proj.weight)[0]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight, weight)
        out = torch.func.functional_call(layer, {"out_proj.weight": dual}, (x,))
        tangent = forward_ad.unpack_dual(out).tangent
    torch.testing.assert_close(tangent.sum(), (expected * weight).sum())


@pytest.mark.parametrize("level", LEVELS)
def test_autocast(level, device):
    layer, plain = make(level, dtype=torch.float32, device=device), make("none", dtype=torch.float32, device=device)

    def call(layer: nn.Module) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            with torch.autocast(device, torch.bfloat16):
                return layer(x)

        return forward

    actual, expected = evaluate(layer, call(layer)), evaluate(plain, call(plain))
    assert actual["out"].dtype == torch.bfloat16 and actual["out_proj.weight"].dtype == torch.float32
    assert torch.equal(actual["out"], expected["out"])
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("level", ["cheap", "all"])
def test_compiled(level):
    layer = make(level)
    expected = evaluate(layer)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(evaluate(layer, compiled), expected, rtol=1e-12, atol=1e-12)
    torch._dynamo.reset()


@pytest.mark.parametrize("strict", [False, True])
def test_exported_layers_show_the_projection(strict):
    layer = make()
    x = make_input(layer).detach()
    program = torch.export.export(layer, (x,), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes]
    assert not any("projected" in target for target in targets) and sum("linear" in target for target in targets) == 2
    torch.testing.assert_close(program.module()(x), layer(x).detach())


def test_wrong_dtype_names_the_layer():
    layer = make(dtype=torch.float32)
    layer.out_proj.double()
    with pytest.raises(RuntimeError, match="dtype"):
        layer(make_input(layer))
