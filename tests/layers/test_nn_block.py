"""The residual block and its MLP: names as in mamba_ssm, values and gradients as a composition in plain PyTorch, decoding."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import assert_as_accurate, says
from layer_helpers import assert_all_close, assert_same_gradients, make_sequence
from plain_layers import rms_norm
from torch import Tensor

from ssm_kernels.nn import Block, GatedMLP, Mamba, Mamba2

OPERATOR = "norms"
DIM = 8
NORMS = {"rms": functools.partial(nn.RMSNorm, eps=1e-3), "layer": functools.partial(nn.LayerNorm, eps=1e-3)}


class Linear(nn.Linear):
    """A mixer that keeps what it is called with."""

    def forward(self, x: Tensor, inference_params: Any = None, **kwargs: Any) -> Tensor:
        self.called_with = inference_params, kwargs
        return super().forward(x)


def make_block(
    norm: str = "rms", mlp: bool = False, dtype: torch.dtype = torch.float64, mixer: Any = None, **options: Any
) -> Block:
    """A block with parameters that are not at their initial values."""
    torch.manual_seed(0)
    mixer = functools.partial(Linear, DIM, dtype=dtype) if mixer is None else functools.partial(mixer, dtype=dtype)
    block = Block(
        DIM,
        mixer,
        functools.partial(GatedMLP, hidden_features=12, multiple_of=4, bias=True, dtype=dtype) if mlp else nn.Identity,
        functools.partial(NORMS[norm], dtype=dtype),
        **options,
    )
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape).to(parameter))
    return block


def normalize(norm: nn.Module, x: Tensor) -> Tensor:
    """The formula of either norm, not PyTorch's function."""
    if isinstance(norm, nn.LayerNorm):
        centred = x - x.mean(dim=-1, keepdim=True)
        return centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-3).sqrt() * norm.weight + norm.bias
    return rms_norm(x, norm.weight, eps=1e-3)


def composed(block: Block, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    residual = x if residual is None else x + residual
    y = F.linear(normalize(block.norm, residual), block.mixer.weight, block.mixer.bias)
    if block.mlp is not None:
        residual = residual + y
        value, gate = F.linear(normalize(block.norm2, residual), block.mlp.fc1.weight, block.mlp.fc1.bias).chunk(2, dim=-1)
        y = F.linear(value * gate * torch.sigmoid(gate), block.mlp.fc2.weight, block.mlp.fc2.bias)
    return y, residual


# ----- what mamba_ssm has


@pytest.mark.parametrize(
    "function, names",
    [
        (Block, "dim mixer_cls mlp_cls norm_cls fused_add_norm residual_in_fp32"),
        (Block.forward, "self hidden_states residual inference_params mixer_kwargs"),
        (GatedMLP, "in_features hidden_features out_features activation bias multiple_of device dtype"),
    ],
)
def test_signatures_are_those_of_mamba_ssm(function, names):
    assert [*inspect.signature(function).parameters] == names.split()


def test_names_and_shapes_of_parameters():
    mixer = functools.partial(Mamba, d_state=2, layer_idx=0)
    block = Block(DIM, mixer, functools.partial(GatedMLP, hidden_features=100), functools.partial(nn.RMSNorm, eps=1e-5))
    shapes = {name: [*parameter.shape] for name, parameter in block.named_parameters()}
    of_mixer = {f"mixer.{name}": [*parameter.shape] for name, parameter in mixer(DIM).named_parameters()}
    expected = {"norm.weight": [DIM], **of_mixer, "norm2.weight": [DIM]}
    expected |= {"mlp.fc1.weight": [256, DIM], "mlp.fc2.weight": [DIM, 128]}
    assert shapes == expected and [*shapes] == [*expected]
    assert [name for name, _ in Block(DIM, mixer).named_parameters()] == ["norm.weight", "norm.bias", *of_mixer]


@pytest.mark.parametrize(
    "arguments, hidden, out",
    [({}, 128, 48), ({"multiple_of": 1}, 128, 48), ({"hidden_features": 129}, 256, 48), ({"out_features": 7}, 128, 7)],
)
def test_sizes_of_the_mlp(arguments, hidden, out):
    mlp = GatedMLP(48, **arguments)
    assert mlp.fc1.weight.shape == (2 * hidden, 48) and mlp.fc2.weight.shape == (out, hidden)
    assert mlp.fc1.bias is None and mlp.fc2.bias is None
    assert mlp(torch.randn(2, 3, 48)).shape == (2, 3, out)


def test_activation_of_the_mlp():
    mlp = GatedMLP(4, 6, activation=torch.tanh, multiple_of=2, dtype=torch.float64)
    x = make_sequence(3, 4)
    value, gate = F.linear(x, mlp.fc1.weight).split(6, dim=-1)
    torch.testing.assert_close(mlp(x), F.linear(value * gate.tanh(), mlp.fc2.weight))


# ----- values and gradients


@pytest.mark.parametrize("residual_in_fp32", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mlp", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_values_and_gradients(norm, mlp, fused, residual_in_fp32, device):
    block = make_block(norm, mlp, fused_add_norm=fused, residual_in_fp32=residual_in_fp32).to(device)
    x, residual = (make_sequence(2, 5, DIM, seed=seed, device=device).requires_grad_() for seed in range(2))
    for inputs in ((x, residual), (x, None)):
        leaves = {"x": x, "residual": inputs[1], **dict(block.named_parameters())}
        actual, expected = block(*inputs), composed(block, *inputs)
        assert_all_close(actual, expected, 1e-7, 1e-7)
        leaves = {name: leaf for name, leaf in leaves.items() if leaf is not None}
        assert_same_gradients(actual, expected, leaves, 1e-7, 1e-7)


@pytest.mark.parametrize("norm", NORMS)
def test_norms_without_parameters(norm):
    plain = functools.partial(NORMS[norm], elementwise_affine=False)
    mixer = functools.partial(Linear, DIM, dtype=torch.float64)
    fused, unfused = (Block(DIM, mixer, norm_cls=plain, fused_add_norm=fused) for fused in (True, False))
    unfused.load_state_dict(fused.state_dict())
    torch.testing.assert_close(fused(make_sequence(2, 5, DIM)), unfused(make_sequence(2, 5, DIM)))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_norm_is_as_accurate_as_pytorch(norm, dtype, device):
    """Also with a residual stream in float32, which the sum does not round."""
    block = make_block(norm, dtype=dtype, fused_add_norm=True, residual_in_fp32=True).to(device)
    wide = make_block(norm).to(device)
    wide.load_state_dict({name: value.double() for name, value in block.state_dict().items()})
    x = make_sequence(2, 33, DIM, dtype=dtype, device=device)
    residual = make_sequence(2, 33, DIM, dtype=torch.float32, seed=1, device=device)
    y, total = block(x, residual)
    assert y.dtype == dtype and total.dtype == torch.float32
    torch.testing.assert_close(total, x.float() + residual, rtol=0, atol=0)
    native = block.mixer(block.norm(x + residual.to(dtype)))
    exact = composed(wide, x.double(), residual.double())[0]
    assert_as_accurate(y.detach(), native.detach(), exact.detach(), "output")


@pytest.mark.parametrize("fused", [False, True])
def test_dtype_of_the_residual_stream(fused, device):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = make_sequence(1, 2, DIM, dtype=dtype, device=device)
        for in_fp32, expected in ((False, dtype), (True, torch.promote_types(dtype, torch.float32))):
            block = make_block(dtype=dtype, mlp=True, fused_add_norm=fused, residual_in_fp32=in_fp32).to(device)
            y, residual = block(x)
            assert y.dtype == dtype and residual.dtype == expected
            y, residual = block(y, residual)
            assert y.dtype == dtype and residual.dtype == expected


def test_autocast(device):
    """Float32 parameters and residual stream around projections in bfloat16."""
    block = make_block(mlp=True, dtype=torch.float32, fused_add_norm=True, residual_in_fp32=True).to(device)
    x = make_sequence(2, 9, DIM, dtype=torch.bfloat16, device=device)
    residual = make_sequence(2, 9, DIM, dtype=torch.float32, seed=1, device=device)
    with torch.autocast(device, torch.bfloat16):
        y, total = block(x, residual)
    assert y.dtype == torch.bfloat16 and total.dtype == torch.float32
    y.float().square().sum().backward()
    for name, parameter in block.named_parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.abs().max() > 0, name


# ----- mixers and decoding


def test_mixer_is_given_the_arguments():
    block = make_block()
    params = SimpleNamespace()
    block(make_sequence(1, 2, DIM), inference_params=params, seq_idx=3)
    assert block.mixer.called_with == (params, {"seq_idx": 3})


@pytest.mark.parametrize("mlp", [False, True])
@pytest.mark.parametrize("mixer", [Mamba, functools.partial(Mamba2, headdim=4)])
def test_steps_are_the_whole_sequence(mixer, mlp):
    block = make_block(mlp=mlp, mixer=functools.partial(mixer, d_state=3, layer_idx=0), fused_add_norm=True)
    x, residual = make_sequence(2, 7, DIM), make_sequence(2, 7, DIM, seed=1)
    with torch.no_grad():
        whole = block(x, residual)
        states = block.allocate_inference_cache(2, 7)
        params = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={0: states})
        pieces = []
        for begin, end in ((0, 3), (3, 4), (4, 6), (6, 7)):
            params.seqlen_offset = begin
            pieces.append(block(x[:, begin:end], residual[:, begin:end], inference_params=params))
    for got, wanted in zip(zip(*pieces, strict=True), whole, strict=True):
        torch.testing.assert_close(torch.cat(got, dim=1), wanted)
    assert params.key_value_memory_dict[0] is states


# ----- errors


def test_bad_arguments():
    with pytest.raises(ValueError, match="Block: expected dim to be at least 1, got 0"):
        Block(0, Linear)
    with pytest.raises(TypeError, match="Block: expected fused_add_norm to be a bool, got int"):
        Block(DIM, functools.partial(Linear, DIM), fused_add_norm=1)
    with pytest.raises(TypeError, match=says("nn.RMSNorm or nn.LayerNorm with fused_add_norm, got BatchNorm1d")):
        Block(DIM, functools.partial(Linear, DIM), norm_cls=nn.BatchNorm1d, fused_add_norm=True)
    for norm, words in (
        (
            nn.RMSNorm,
            ["with a number for eps", "got eps=None of RMSNorm((8,)", "functools.partial(torch.nn.RMSNorm, eps=1e-5)"],
        ),
        (lambda dim: nn.LayerNorm((2, dim)), ["of the last axis", "got normalized_shape=(2, 8) of LayerNorm"]),
    ):
        with pytest.raises(ValueError, match=says("Block: expected norm_cls to make a norm", *words)):
            Block(DIM, functools.partial(Linear, DIM), norm_cls=norm, fused_add_norm=True)
    with pytest.raises(ValueError, match="GatedMLP: expected hidden_features to be at least 1, got 0"):
        GatedMLP(4, 0)
    with pytest.raises(ValueError, match="GatedMLP: expected multiple_of to be at least 1, got 0"):
        GatedMLP(4, multiple_of=0)
    for shape in ((), (2, 3, 5)):
        expected = f"GatedMLP: expected x of shape (..., in_features) = (..., 4), got {[*shape]}"
        with pytest.raises(ValueError, match=says(expected)):
            GatedMLP(4)(torch.ones(shape))
    with pytest.raises(RuntimeError, match=r"^Block: expected hidden_states on cpu \(the layer's device\), got meta$"):
        Block(DIM, functools.partial(Linear, DIM))(torch.ones(2, 3, DIM, device="meta"))


def test_bad_calls():
    block = make_block()
    for bad in (make_sequence(2, DIM), make_sequence(2, 3, DIM + 1)):
        with pytest.raises(
            ValueError, match=says("Block: expected hidden_states of shape (batch, seqlen, dim)", f"{[*bad.shape]}")
        ):
            block(bad)
    with pytest.raises(ValueError, match=says("Block: expected residual of shape (batch, seqlen, dim)", "got [2, 1, 8]")):
        block(make_sequence(2, 3, DIM), make_sequence(2, 1, DIM))
    with pytest.raises(TypeError, match="Block: expected hidden_states to be a tensor, got list"):
        block([1.0])


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.complex128, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("fused", [False, True])
def test_the_stream_is_of_real_floating_point_numbers(fused, dtype):
    block = make_block(fused_add_norm=fused, residual_in_fp32=True)
    good, bad = make_sequence(2, 3, DIM), torch.ones(2, 3, DIM).to(dtype)
    got = str(dtype).removeprefix("torch.")
    for inputs, name in (((bad, None), "hidden_states"), ((bad, good), "hidden_states"), ((good, bad), "residual")):
        with pytest.raises(RuntimeError, match=says(f"Block: expected {name} of dtype float32, float16", f"got {got}")):
            block(*inputs)
