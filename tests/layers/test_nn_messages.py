"""Errors of layers name the layer and its argument: dtypes and devices of inputs, wrong calls, damaged caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import says
from layer_helpers import IN, WIDTH, every_layer, every_mixer, make_layer, make_sequence, new_layer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import parametrize

from ssm_kernels.models import RecurrentMixer
from ssm_kernels.nn import MLSTM, Block, GatedMLP, Liquid, Mamba, Mamba2, MinGRU, MinLSTM, SelectiveSSM
from ssm_kernels.nn.naming import class_name

FIRST = {"Mamba": "hidden_states", "Mamba2": "u", "SelectiveSSM": "x"}


def sequence_of(name: str) -> Tensor:
    return make_sequence(2, 3, WIDTH if name in FIRST else IN, dtype=torch.float32)


@every_layer
def test_dtype_of_the_input(name):
    layer, x = make_layer(name, dtype=torch.float32), sequence_of(name)
    what = FIRST.get(name, "input")
    for dtype, remedy in (
        (torch.float64, ""),
        (torch.bfloat16, "; or use autocast"),
        (torch.float16, "; or use autocast"),
        (torch.complex64, ""),
        (torch.int64, ""),
    ):
        expected = f"{name}: expected {what} of dtype torch.float32 (the layer's{remedy}), got {dtype}"
        with pytest.raises(RuntimeError, match="^" + says(expected)):
            layer(x.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        layer(x.bfloat16()), layer(x)
        with pytest.raises(RuntimeError, match=says(f"{name}: expected {what} of dtype torch.float32 (the layer's), got")):
            layer(x.to(torch.complex64))


@every_layer
def test_dtype_of_a_step(name):
    layer, x = make_layer(name, dtype=torch.float32), sequence_of(name)
    if name in ("Mamba", "Mamba2"):
        arguments: tuple[Any, ...] = (x[:, :1].double(), *layer.allocate_inference_cache(2, 1))
    else:
        arguments = (x[:, 0].double(), *([layer.allocate_state(2)] if name == "SelectiveSSM" else []))
    what = "hidden_states" if name.startswith("Mamba") else "x"
    with pytest.raises(RuntimeError, match=says(f"{name}.step: expected {what} of dtype torch.float32", "got torch.float64")):
        layer.step(*arguments)


@every_layer
def test_classes_that_torch_derives_have_the_name_of_the_layer(name):
    """``fully_shard`` derives the class FSDPMamba; parametrizations ParametrizedMamba."""
    layer, x = make_layer(name, dtype=torch.float32), sequence_of(name)
    own = type(layer)
    layer.__class__ = type(f"FSDP{name}", (FSDPModule, own), {"__module__": "torch.distributed.fsdp._fully_shard"})
    for error, bad, text in ((RuntimeError, x.double(), "dtype"), (ValueError, x[..., 1:], "shape")):
        with pytest.raises(error, match=rf"^{name}: expected \w+ of {text}"):
            layer(bad)
    layer.__class__ = own
    weight = next(key for key, value in layer.named_parameters(recurse=False) if value.dim() > 0)
    parametrize.register_parametrization(layer, weight, nn.Identity())
    assert type(layer).__name__ == f"Parametrized{name}" and class_name(layer) == name
    assert [class_name(nn.Linear(2, 2)), class_name(own.__new__(type("Own", (own,), {})))] == ["Linear", "Own"]


def test_dtype_of_other_layers():
    with pytest.raises(RuntimeError, match=says("GatedMLP: expected x of dtype torch.float32", "got torch.float64")):
        GatedMLP(4)(torch.zeros(2, 4, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=says("RecurrentMixer: expected hidden_states of dtype torch.float32")):
        RecurrentMixer(4)(torch.zeros(1, 2, 4, dtype=torch.float64))
    for mode in ("single", "fused"):
        expected = "MLSTM: expected hidden_states of dtype torch.float32 (the layer's; or use autocast), got torch.float16"
        with pytest.raises(RuntimeError, match="^" + says(expected)):
            MLSTM(8, 2, weight_mode=mode)(torch.zeros(1, 2, 8, dtype=torch.float16))


@every_layer
def test_device_of_the_input(name):
    layer, x = make_layer(name, dtype=torch.float32), sequence_of(name)
    message = f"{name}: expected {FIRST.get(name, 'input')} on cpu (the layer's device), got meta"
    with pytest.raises(RuntimeError, match="^" + says(message)):
        layer(x.to("meta"))


@every_layer
def test_adapters_that_cast_their_input_are_left_alone(name):
    """A layer whose projection takes another dtype raises nothing."""
    layer, x = make_layer(name, dtype=torch.float32), sequence_of(name)
    if name not in FIRST:
        pytest.skip("its projections are no modules")
    projection = layer.x_proj if name == "SelectiveSSM" else layer.in_proj
    projection.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    if name != "SelectiveSSM":
        assert layer(x.double()).dtype == torch.float32


@every_mixer
def test_errors_of_operators_name_the_layer(name):
    layer, x = make_layer(name), make_sequence(2, 5, WIDTH)
    with pytest.raises(ValueError, match=f"^{name}: expected a batch of 1 with cu_seqlens, got 2$"):
        layer(x, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(RuntimeError, match=rf"^{name}: .*expected seq_idx of dtype"):
        layer(x, seq_idx=torch.zeros(2, 5))
    with pytest.raises(ValueError, match=rf"^{name}: .*expected cu_seqlens"):
        layer(x[:1], cu_seqlens=torch.tensor([0, 4, 2, 5]))
    with pytest.raises(RuntimeError, match=rf"^{name}: .*expected cu_seqlens of dtype"):
        layer(x[:1], cu_seqlens=torch.tensor([0.0, 5.0]))


@pytest.mark.parametrize("layer", [MinGRU, MinLSTM, Liquid, Mamba, Mamba2, SelectiveSSM, GatedMLP, Block, RecurrentMixer])
def test_wrong_calls_name_the_public_class(layer):
    with pytest.raises(TypeError, match=rf"^{layer.__name__}.__init__\(\) got an unexpected keyword argument 'unknown'"):
        layer(4, 4, unknown=1)
    name = layer.__name__
    if name in ("GatedMLP", "Block"):
        return
    made = new_layer(name) if name != "RecurrentMixer" else RecurrentMixer(4)
    for method in ("forward", "step"):
        with pytest.raises(TypeError, match=rf"^{name}.{method}\(\) got an unexpected keyword argument 'unknown'"):
            getattr(made, method)(torch.zeros(1), unknown=1)


@pytest.mark.parametrize("value", ["silu", None, 3])
def test_constructors_refuse_what_is_not_callable(value):
    with pytest.raises(
        TypeError, match=says("GatedMLP: expected activation to be a callable, such as torch.nn.functional.silu")
    ):
        GatedMLP(8, activation=value)
    for argument in ("mixer_cls", "mlp_cls", "norm_cls"):
        with pytest.raises(TypeError, match=says(f"Block: expected {argument} to be a callable, such as")):
            Block(8, **{"mixer_cls": Mamba, argument: value})


MIXERS = {"Mamba": Mamba, "Mamba2": Mamba2, "RecurrentMixer": RecurrentMixer}


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("name", MIXERS)
def test_damaged_caches(name, offset):
    options = {"headdim": 4} if name == "Mamba2" else {}
    layer, x = MIXERS[name](4, layer_idx=3, **options), torch.zeros(2, 1, 4)
    conv, ssm = layer.allocate_inference_cache(2, 4)
    cases: list[tuple[type[Exception], str, Any]] = [
        *(
            (TypeError, "to be a pair of conv_state and ssm_state", bad)
            for bad in (None, (conv,), (conv, ssm, ssm), {}, "ab", conv)
        ),
        *((TypeError, "to be a tensor", bad) for bad in ((None, ssm), (conv, None), (conv, [1.0]))),
        *((RuntimeError, "of a floating-point dtype", bad) for bad in ((conv.long(), ssm), (conv, ssm.to(torch.complex64)))),
        *((ValueError, "expected", bad) for bad in ((conv[:1], ssm), (conv[:, 1:], ssm), (conv[0], ssm), (conv.sum(), ssm))),
        *(
            (ValueError, "expected ssm_state of shape", bad)
            for bad in ((conv, ssm[:1]), (conv, ssm[..., None]), (conv, ssm.sum()))
        ),
        *((RuntimeError, "(the layer's device), got meta", bad) for bad in ((conv.to("meta"), ssm), (conv, ssm.to("meta")))),
    ]
    for error, message, entry in cases:
        cache = SimpleNamespace(seqlen_offset=offset, key_value_memory_dict={3: entry})
        for sequence in (x, x.expand(2, 3, 4)):
            with torch.no_grad(), pytest.raises(error, match=rf"^{name}: .*{says(message)}"):
                layer(sequence, inference_params=cache)
    layer(x, inference_params=SimpleNamespace(seqlen_offset=offset, key_value_memory_dict={3: [conv, ssm]}))
    for parameters, error, message in (
        (SimpleNamespace(seqlen_offset=0), TypeError, "inference_params with key_value_memory_dict"),
        (SimpleNamespace(key_value_memory_dict={}), TypeError, "inference_params with seqlen_offset"),
        (SimpleNamespace(seqlen_offset=None, key_value_memory_dict={}), TypeError, "seqlen_offset to be an int"),
        (SimpleNamespace(seqlen_offset=-1, key_value_memory_dict={}), ValueError, "seqlen_offset to be at least 0"),
        (SimpleNamespace(seqlen_offset=0, key_value_memory_dict=None), TypeError, "key_value_memory_dict to be a dict"),
        (SimpleNamespace(seqlen_offset=0, key_value_memory_dict=[]), TypeError, "key_value_memory_dict to be a dict"),
        (3, TypeError, "inference_params with seqlen_offset, got int"),
    ):
        with pytest.raises(error, match=rf"^{name}: .*{says(message)}"):
            layer(x, inference_params=parameters)
