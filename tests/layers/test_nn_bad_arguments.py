"""Each argument of each layer's call in turn replaced by what it cannot be: one sentence that names the layer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from bad_arguments import FLAGS, call_of, fresh, is_ours, replaced
from torch import Tensor, nn

from ssm_kernels import nn as layers

SEQUENCE, STEP, PACKED = torch.randn(2, 5, 6), torch.randn(2, 6), torch.randn(1, 5, 6)
OFFSETS, NUMBERS = torch.tensor([0, 2, 5]), torch.zeros(2, 5, dtype=torch.int32)
STEP_SIZES = (10**400, -1.0, math.nan, 1e39, 1j, "x", None, True, [1.0], torch.ones(()), torch.ones(7), object())


class Call(NamedTuple):
    """A call with every tensor that can be there together.

    Attributes:
        named: the start of its messages.
    """

    named: str
    function: Callable[..., Any]
    good: dict[str, Any]


def calls() -> Iterator[Call]:
    for layer in (
        layers.MinGRU(6, 4, batch_first=True),
        layers.MinLSTM(6, 4, batch_first=True),
        layers.Liquid(6, 4, batch_first=True),
    ):
        name = type(layer).__name__
        of_liquid = {"dt": torch.rand(2, 5)} if name == "Liquid" else {}
        yield Call(name, layer, {"input": SEQUENCE, "hx": torch.randn(1, 2, 4), "reset": torch.zeros(2, 5)} | of_liquid)
        yield Call(name, layer, {"input": PACKED, "hx": torch.randn(1, 2, 4), "cu_seqlens": OFFSETS})
        yield Call(name, layer, {"input": SEQUENCE, "lengths": torch.tensor([2, 5])})
        of_step = {"dt": torch.rand(2)} if name == "Liquid" else {}
        step = {"x": STEP, "state": torch.randn(1, 2, 4), "reset": torch.zeros(2)} | of_step
        yield Call(f"{name}.step", layer.step, step)
    ssm = layers.SelectiveSSM(6)
    state = ssm.allocate_state(2)
    yield Call("SelectiveSSM", ssm, {"x": SEQUENCE, "z": SEQUENCE, "initial_state": state, "seq_idx": NUMBERS})
    yield Call("SelectiveSSM", ssm, {"x": PACKED, "initial_state": state, "cu_seqlens": OFFSETS, "return_last_state": True})
    yield Call("SelectiveSSM.step", ssm.step, {"x": STEP, "state": state, "z": STEP})
    for mixer in (layers.Mamba(6), layers.Mamba2(6, d_state=8, headdim=4)):
        name, first = type(mixer).__name__, next(iter(inspect.signature(mixer.forward).parameters))
        yield Call(name, mixer, {first: SEQUENCE, "seq_idx": NUMBERS})
        yield Call(name, mixer, {first: PACKED, "cu_seqlens": OFFSETS})
        states = dict(zip(("conv_state", "ssm_state"), mixer.allocate_inference_cache(2, 5), strict=True))
        yield Call(f"{name}.step", mixer.step, {"hidden_states": SEQUENCE[:, :1]} | states)
    yield Call("GatedMLP", layers.GatedMLP(6), {"x": SEQUENCE})
    block = layers.Block(6, layers.Mamba, mlp_cls=layers.GatedMLP)
    yield Call("Block", block, {"hidden_states": SEQUENCE, "residual": SEQUENCE})


CALLS = [*calls()]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.named}-{'-'.join(call.good)}")
def test_every_argument_of_layers(call: Call, grad: bool) -> None:
    function = call.function.forward if isinstance(call.function, nn.Module) else call.function
    layer = call.named.partition(".")[0]
    with torch.set_grad_enabled(grad):
        assert call_of(call.function, fresh(call.good)) is None
        for name, parameter in inspect.signature(function).parameters.items():
            annotation, given = str(parameter.annotation), call.good.get(name)
            wrong = [*replaced(given)] if isinstance(given, Tensor) else []
            if not wrong and "Tensor" in annotation and name != "h_0":
                wrong = [*replaced(torch.ones(2, 3), is_present=False)]
            wrong += [("number", value) for value in STEP_SIZES] if name == "dt" else []
            wrong += [("flag", value) for value in (*FLAGS, None)] if annotation == "bool" else []
            for kind, value in wrong:
                if value is None and ("None" in annotation or (name == "dt" and kind == "none")):
                    continue
                if is_legal(name, kind, given):
                    continue
                error = call_of(call.function, fresh(call.good) | {name: value})
                assert is_ours(error, layer) or is_ours(error, call.named), (name, kind, error)


def is_legal(name: str, kind: str, given: Any) -> bool:
    """Masks have any dtype but a complex one, numbers of steps and lengths any integer one, and lengths may be a list."""
    if kind == "int8":
        return name in ("reset", "dt", "lengths")
    return (name == "reset" and kind == "bool") or (name == "lengths" and kind == "list" and isinstance(given, Tensor))


LAYERS_OF_ONE_MIXER = {
    "SelectiveSSM": lambda: layers.SelectiveSSM(6),
    "Mamba": lambda: layers.Mamba(6),
    "MineOfMamba": lambda: type("MineOfMamba", (layers.Mamba,), {})(6),
    "Mamba2": lambda: layers.Mamba2(6, d_state=8, headdim=4),
    "Mine": lambda: type("Mine", (layers.SelectiveSSM,), {})(6),
    "Mine2": lambda: type("Mine2", (layers.Mamba2,), {})(6, d_state=8, headdim=4),
}


@pytest.mark.parametrize("name", LAYERS_OF_ONE_MIXER)
def test_messages_name_the_layer_that_the_user_made(name: str) -> None:
    """Layers share the operators between their projections, whose errors name the layer all the same."""
    layer = LAYERS_OF_ONE_MIXER[name]()
    scan = "ssd_chunk_scan" if "2" in name else "selective_scan"
    supported = rf" is not supported; ssm_kernels.reference.{scan}, which is plain PyTorch, supports it"
    x = SEQUENCE.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=rf"^{name}: double backward \(a derivative of a gradient\){supported}"):
        (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
    # Under a transform, Mamba's convolution is the operator of its own.
    transform = r"(causal_conv1d: )?a transform of torch.func .* is not supported; ssm_kernels.reference"
    with pytest.raises(RuntimeError, match=rf"^{name}: {transform}.({scan}|causal_conv1d)"):
        torch.func.grad(lambda x: layer(x).sum())(SEQUENCE)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(SEQUENCE, SEQUENCE)
        with pytest.raises(NotImplementedError, match=rf"^{name}: forward-mode differentiation .*{supported}"):
            layer(dual)
