"""The table of layers: small sizes, variants and the plain reference of each; how a test calls and steps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import plain_layers
import pytest
import ssd_helpers
import torch
import torch.nn as nn
from helpers import METHODS
from torch import Tensor

from ssm_kernels.nn import Liquid, Mamba, Mamba2, MinGRU, MinLSTM, SelectiveSSM


class LayerSpec(NamedTuple):
    """A layer of the tests.

    Attributes:
        type: its class.
        sizes: arguments of a small layer.
        plain: the function of ``plain_layers`` that computes it.
        variants: by name, further arguments.
        perturbation: standard deviation of the noise that is added to its initial parameters.
    """

    type: type[nn.Module]
    sizes: dict[str, Any]
    plain: Callable[..., Any]
    variants: dict[str, dict[str, Any]]
    perturbation: float = 0.0


ACTIVATIONS = {"g": {"candidate_activation": "g"}, "tanh": {"candidate_activation": "tanh"}}
IN, HIDDEN = 5, 6  # of the recurrent layers
RECURRENT = {"input_size": IN, "hidden_size": HIDDEN, "num_layers": 2}
WIDTH = 6  # of the other layers' inputs
LAYERS = {
    "Mamba": LayerSpec(
        Mamba,
        {"d_model": WIDTH, "d_state": 4, "dt_rank": 2, "layer_idx": 0},
        plain_layers.mamba,
        {name: {"discretization": name, "bias": True} for name in (*METHODS, "foh", "zoh_exact")}
        | {
            "no_conv_bias": {"conv_bias": False},
            "conv_of_one_step": {"d_conv": 1},
            "bias": {"bias": True, "conv_bias": False, "d_conv": 2},
        },
    ),
    "Mamba2": LayerSpec(
        Mamba2,
        {"d_model": WIDTH, "d_state": 3, "headdim": 2, "layer_idx": 0},
        plain_layers.mamba2,
        {
            "default": {},
            "groups": {"ngroups": 2},
            "bias": {"bias": True},
            "no_conv_bias": {"conv_bias": False, "d_conv": 2},
            "conv_of_one_step": {"d_conv": 1},
            "D_has_hdim": {"D_has_hdim": True},
            "no_norm": {"rmsnorm": False},
            "norm_before_gate": {"norm_before_gate": True, "ngroups": 2},
            "with_mlp": {"d_ssm": 8, "ngroups": 2},
            "with_mlp_no_norm": {"d_ssm": 4, "rmsnorm": False, "D_has_hdim": True, "bias": True},
            "dt_limit": {"dt_limit": (0.01, 0.05)},
            "chunk_size": {"chunk_size": 3},
            "chosen_chunk_size": {"chunk_size": None},
            "one_head": {"headdim": 12},
        }
        | {name: {"discretization": name} for name in ssd_helpers.METHODS},
        perturbation=0.1,
    ),
    "SelectiveSSM": LayerSpec(
        SelectiveSSM,
        {"d_inner": WIDTH, "d_state": 4, "dt_rank": 2},
        plain_layers.selective_ssm,
        {name: {"discretization": name} for name in METHODS},
    ),
    "MinGRU": LayerSpec(MinGRU, RECURRENT, plain_layers.recurrent, {"": {}} | ACTIVATIONS),
    "MinLSTM": LayerSpec(MinLSTM, RECURRENT, plain_layers.recurrent, {"": {}} | ACTIVATIONS),
    "Liquid": LayerSpec(
        Liquid,
        RECURRENT,
        plain_layers.recurrent,
        {"": {}, "linear": {"candidate_activation": None}, "constant_tau": {"input_dependent_tau": False}},
    ),
}
MIXERS, RECURRENCES = ("Mamba", "Mamba2"), ("MinGRU", "MinLSTM", "Liquid")


def variants_of(*names: str) -> list[str]:
    """The names that ``make_layer`` takes for every variant of these layers."""
    return [f"{name}-{variant}" if variant else name for name in names for variant in LAYERS[name].variants]


every_layer = pytest.mark.parametrize("name", LAYERS)
every_mixer = pytest.mark.parametrize("name", MIXERS)
every_variant_of_mixers = pytest.mark.parametrize("name", variants_of(*MIXERS))
every_recurrence = pytest.mark.parametrize("name", RECURRENCES)


def mamba_ssm_shapes(
    name: str,
    d_model: int,
    d_inner: int,
    d_state: int,
    d_conv: int = 4,
    *,
    dt_rank: int = 0,
    d_ssm: int = 0,
    headdim: int = 1,
    ngroups: int = 1,
    bias: bool = False,
    conv_bias: bool = True,
    D_has_hdim: bool = False,
) -> dict[str, tuple[int, ...]]:
    """The state_dict of mamba_ssm's Mamba or Mamba2, in its order."""
    if name == "Mamba":
        rows, channels, D = 2 * d_inner, d_inner, d_inner
        shapes: dict[str, tuple[int, ...]] = {"A_log": (d_inner, d_state)}
        middle = {"x_proj.weight": (dt_rank + 2 * d_state, d_inner), "dt_proj.weight": (d_inner, dt_rank)}
        middle |= {"dt_proj.bias": (d_inner,)}
    else:
        heads, matrices = d_ssm // headdim, 2 * ngroups * d_state
        rows, channels, D = 2 * d_inner + matrices + heads, d_ssm + matrices, d_ssm if D_has_hdim else heads
        shapes, middle = {"dt_bias": (heads,), "A_log": (heads,)}, {"norm.weight": (d_ssm,)}
    shapes |= {"D": (D,), "in_proj.weight": (rows, d_model)} | ({"in_proj.bias": (rows,)} if bias else {})
    shapes |= {"conv1d.weight": (channels, 1, d_conv)} | ({"conv1d.bias": (channels,)} if conv_bias else {})
    return shapes | middle | {"out_proj.weight": (d_model, d_inner)} | ({"out_proj.bias": (d_model,)} if bias else {})


def new_layer(name: str, **options: Any) -> nn.Module:
    """Constructs a layer of ``LAYERS``: ``name`` is its key, or its key, ``-`` and one of its variants."""
    name, _, variant = name.partition("-")
    spec = LAYERS[name]
    return spec.type(**spec.sizes | (spec.variants[variant] if variant else {}) | options)


def make_layer(
    name: str, device: str = "cpu", dtype: torch.dtype | None = torch.float64, seed: int = 0, **options: Any
) -> nn.Module:
    """Makes the layer with parameters that depend on the seed alone, not on the device."""
    torch.manual_seed(seed)
    layer, perturbation = new_layer(name, dtype=dtype, **options), LAYERS[name.partition("-")[0]].perturbation
    if perturbation:
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(perturbation * torch.randn(parameter.shape).to(parameter))
    return layer.to(device)


def make_sequence(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def width_of(layer: nn.Module) -> int:
    """The number of channels of the layer's input."""
    return IN if hasattr(layer, "input_size") else WIDTH


def run(layer: nn.Module, x: Tensor) -> Tensor:
    """Returns the output for a sequence (batch, seqlen, channels)."""
    if hasattr(layer, "input_size"):
        return layer(x.transpose(0, 1))[0].transpose(0, 1)
    return layer(x)


def decode(layer: nn.Module, x: Tensor, step: Callable[..., Any] | None = None) -> Tensor:
    """Returns the output for a sequence (batch, seqlen, channels) from one call of ``step`` for each time step."""
    compiled, step, (batch, seqlen, _) = step is not None, step or layer.step, x.shape
    if isinstance(layer, Mamba | Mamba2):
        states = layer.allocate_inference_cache(batch, seqlen)
        return torch.cat([step(x[:, t : t + 1], *states)[0] for t in range(seqlen)], dim=1)
    if isinstance(layer, SelectiveSSM):
        state = layer.allocate_state(batch)
        return torch.stack([step(x[:, t], state) for t in range(seqlen)], dim=1)
    # A first state of None would be one more graph to compile.
    state, outputs = x.new_zeros(layer.num_layers, batch, layer.hidden_size) if compiled else None, []
    for t in range(seqlen):
        output, state = step(x[:, t], state)
        outputs.append(output)
    return torch.stack(outputs, dim=1)


def gradients(outputs: Tensor | Iterable[Tensor], leaves: Iterable[Tensor]) -> Sequence[Tensor]:
    """Returns the gradients of the leaves for random cotangents, which are the same in every call."""
    outputs = [outputs] if isinstance(outputs, Tensor) else [*outputs]
    cotangents = [make_sequence(*o.shape, device=o.device, dtype=o.dtype, seed=5 + i) for i, o in enumerate(outputs)]
    return torch.autograd.grad(outputs, [*leaves], cotangents)


def assert_all_close(
    actual: Tensor | Iterable[Tensor], expected: Tensor | Iterable[Tensor], rtol: float = 1e-9, atol: float = 1e-11
) -> None:
    """Compares two tensors, or two sequences of tensors, with ``torch.testing.assert_close``."""
    pairs = [(actual, expected)] if isinstance(actual, Tensor) else zip(actual, expected, strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def assert_same_gradients(
    actual: Tensor | Iterable[Tensor],
    expected: Tensor | Iterable[Tensor],
    leaves: dict[str, Tensor],
    rtol: float = 1e-9,
    atol: float = 1e-11,
) -> None:
    """Compares the gradients of every leaf through both results, and fails if an expected gradient is zero everywhere."""
    for name, a, b in zip(leaves, *(gradients(y, leaves.values()) for y in (actual, expected)), strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
