"""Every argument of every layer: a wrong type is a TypeError, a wrong value a ValueError, and both name layer and argument."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn as nn
from helpers import says
from ssd_helpers import METHODS
from torch.nn.utils.rnn import pack_sequence

import ssm_kernels
from ssm_kernels.nn import Liquid, Mamba, Mamba2, MinGRU, MinLSTM, SelectiveSSM
from ssm_kernels.nn.gated_rms_norm import GatedRMSNorm

OPERATOR = "linear_scan"


class Kind(NamedTuple):
    """Values that an argument must refuse."""

    types: tuple[Any, ...]
    values: tuple[Any, ...]


NO_INT = (True, 2.0, "2", [2], torch.tensor(2))
NO_NUMBER = (True, "0.1", [0.1], None)
SIZE = Kind((*NO_INT, None), (0, -8))
OPTIONAL_SIZE = Kind(NO_INT, (0, -8))
INDEX = Kind(NO_INT, (-1,))
SMALL_SIZE = Kind(SIZE.types, (0, -8, 257))
RANK = Kind((True, 2.0, None), (0, -8, "full"))
BOOL = Kind((1, 0.0, None, "yes"), ())
PROBABILITY = Kind(NO_NUMBER, (-0.1, 1.5, math.nan))
NOT_NEGATIVE = Kind(NO_NUMBER, (-1, math.inf, math.nan))
OPTIONAL_NOT_NEGATIVE = Kind(NO_NUMBER[:-1], NOT_NEGATIVE.values)
POSITIVE = Kind(NO_NUMBER, (0, -1, math.inf, math.nan))
PAIR = Kind((0.5, None, "ab", ("1", "2"), {1, 2}, (True, 2)), ((1.0,), (1.0, 2.0, 3.0), (2.0, 1.0), (math.nan, 1.0)))
NAME = Kind((None, 3, True), ("tustin", "", "ZOH"))
OPTIONAL_NAME = Kind((3, True), ("relu", ""))
GROUP = Kind((), ("a group",))
DTYPE = Kind(("float32", 3), (torch.int64, torch.bool, torch.complex64))

RECURRENT = {
    "input_size": SIZE,
    "hidden_size": SIZE,
    "num_layers": SIZE,
    "bias": BOOL,
    "batch_first": BOOL,
    "dropout": PROBABILITY,
    "bidirectional": BOOL,
    "candidate_activation": OPTIONAL_NAME,
    "dtype": DTYPE,
}
INIT = {"dt_min": POSITIVE, "dt_max": POSITIVE, "dt_init_floor": NOT_NEGATIVE, "discretization": NAME, "dtype": DTYPE}
SELECTIVE = INIT | {
    "alpha": Kind(NO_NUMBER[:-1], (0.7, -0.1, math.nan)),
    "d_state": SMALL_SIZE,
    "dt_rank": RANK,
    "dt_init": NAME,
    "dt_scale": NOT_NEGATIVE,
    "time_steps_scale": NAME,
}
MIXER = {"d_model": SIZE, "d_conv": SIZE, "expand": POSITIVE, "layer_idx": INDEX, "bias": BOOL, "conv_bias": BOOL}
MIXER |= {"recompute": NAME}

# Arguments that make a layer, and what is wrong for each one that it has.
LAYERS: dict[type[nn.Module], tuple[dict[str, Any], dict[str, Kind]]] = {
    MinGRU: ({"input_size": 3, "hidden_size": 4}, RECURRENT),
    MinLSTM: ({"input_size": 3, "hidden_size": 4}, RECURRENT),
    Liquid: ({"input_size": 3, "hidden_size": 4}, RECURRENT | {"input_dependent_tau": BOOL, "tau_init": PAIR}),
    SelectiveSSM: ({"d_inner": 6}, SELECTIVE | {"d_inner": SIZE}),
    Mamba: ({"d_model": 6}, SELECTIVE | MIXER | {"use_fast_path": BOOL}),
    Mamba2: (
        {"d_model": 16, "d_state": 8, "headdim": 4},
        INIT
        | MIXER
        | {
            "d_state": SMALL_SIZE,
            "headdim": SMALL_SIZE,
            "d_ssm": OPTIONAL_SIZE,
            "ngroups": SIZE,
            "chunk_size": OPTIONAL_SIZE,
            "conv_init": OPTIONAL_NOT_NEGATIVE,
            "A_init_range": PAIR,
            "dt_limit": PAIR,
            "D_has_hdim": BOOL,
            "rmsnorm": BOOL,
            "norm_before_gate": BOOL,
            "use_mem_eff_path": BOOL,
            "sequence_parallel": BOOL,
            "process_group": GROUP,
        },
    ),
    GatedRMSNorm: (
        {"channels": 8},
        {"channels": SIZE, "groups": SIZE, "norm_before_gate": BOOL, "eps": NOT_NEGATIVE, "activation": NAME, "dtype": DTYPE},
    ),
}

NAMED = ("discretization", "dt_init", "candidate_activation", "activation", "dt_rank", "recompute", "time_steps_scale")
RECURRENCES = (MinGRU, MinLSTM, Liquid)
every_layer = pytest.mark.parametrize("layer_type", LAYERS, ids=lambda layer_type: layer_type.__name__)


def assert_raises(error: type[Exception], layer: str, argument: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    assert message.startswith(layer), message
    assert argument in message and "got" in message, message


@every_layer
def test_every_argument_of_the_constructor_is_checked(layer_type):
    _, kinds = LAYERS[layer_type]
    assert {*kinds, "device"} == {*inspect.signature(layer_type).parameters}


@every_layer
def test_arguments_of_constructors(layer_type):
    good, kinds = LAYERS[layer_type]
    name = layer_type.__name__
    layer_type(**good)
    for argument, kind in kinds.items():
        for value in kind.types:
            assert_raises(TypeError, name, argument, lambda: layer_type(**good | {argument: value}))  # noqa: B023
        for value in kind.values:
            expected = "unknown discretization" if argument == "discretization" else argument
            if argument == "process_group":
                with pytest.raises(ValueError, match="Mamba2: expected process_group None"):
                    layer_type(**good | {argument: value})
            elif isinstance(value, str) and argument in NAMED:
                with pytest.raises(ValueError, match=f"^{name}: unknown {argument} '{value}', expected one of "):
                    layer_type(**good | {argument: value})
            else:
                assert_raises(ValueError, name, expected, lambda: layer_type(**good | {argument: value}))  # noqa: B023


# Options that a layer of LAYERS refuses, and the message without the layer's name.
BAD_VALUES: dict[tuple[type[nn.Module], ...], list[tuple[dict[str, Any], str]]] = {
    (SelectiveSSM, Mamba, Mamba2): [
        ({"d_state": 300}, "expected d_state from 1 to 256, got 300"),
        ({"d_state": 0}, "expected d_state from 1 to 256, got 0"),
        ({"dt_min": 0.2}, "expected 0 < dt_min <= dt_max, both finite, got dt_min=0.2, dt_max=0.1"),
    ],
    (SelectiveSSM, Mamba): [({"dt_init": "uniform"}, "unknown dt_init 'uniform'")],
    (Mamba, Mamba2): [({"d_conv": 0}, "expected d_conv to be at least 1, got 0")],
    (Mamba2,): [
        ({"headdim": 5}, "expected a headdim that divides d_ssm = 32, got 5"),
        ({"headdim": 0}, "expected headdim from 1 to 256, got 0"),
        ({"d_ssm": 40}, "expected d_ssm from 1 to d_inner = 32, got 40"),
        ({"d_ssm": 0}, "expected d_ssm to be at least 1, got 0"),
        ({"A_init_range": (0, 1)}, "expected A_init_range with 0 < low <= high, got (0, 1)"),
        ({"process_group": "a group"}, "expected process_group None"),
        ({"expand": 32, "headdim": 512}, "expected headdim from 1 to 256, got 512"),
        ({"ngroups": 3}, "ssd_chunk_scan: expected the groups of B and C to divide heads = 8, got 3"),
        ({"chunk_size": 0}, "expected chunk_size to be at least 1, got 0"),
        ({"dt_limit": (1.0, 0.5)}, "expected dt_limit = (min, max) with min <= max, got (1.0, 0.5)"),
        ({"discretization": "bilinear"}, "ssd_chunk_scan: discretization 'bilinear' is not supported"),
        ({"discretization": "gbt"}, "discretization 'gbt' has a rational decay, and this layer needs an exponential one"),
    ],
    RECURRENCES: [
        *(({size: 0}, f"expected {size} to be at least 1, got 0") for size in ("input_size", "hidden_size", "num_layers")),
        ({"dropout": 1.5, "num_layers": 2}, "expected dropout from 0 to 1, got 1.5"),
        ({"candidate_activation": "relu"}, "unknown candidate_activation 'relu', expected one of [None, "),
    ],
    (Liquid,): [
        ({"bias": False}, "input-dependent time constants need bias=True"),
        ({"tau_init": (2.0, 1.0)}, "expected 0.001 < tau_init[0] <= tau_init[1], both finite, got (2.0, 1.0)"),
        ({"tau_init": (0.0, 1.0)}, "expected 0.001 < tau_init[0] <= tau_init[1], both finite, got (0.0, 1.0)"),
    ],
}
EVERY_BAD_VALUE = [(layer, *row) for layers, rows in BAD_VALUES.items() for layer in layers for row in rows]


@pytest.mark.parametrize(
    ("layer_type", "options", "message"), EVERY_BAD_VALUE, ids=lambda value: getattr(value, "__name__", "")
)
def test_bad_values(layer_type, options, message):
    """Raised by the constructor, not by a call."""
    prefix = "" if message.startswith("ssd_chunk_scan") else f"{layer_type.__name__}: "
    with pytest.raises(ValueError, match="^" + says(prefix + message)):
        layer_type(**LAYERS[layer_type][0] | options)


@pytest.mark.parametrize("layer_type", [SelectiveSSM, Mamba, Mamba2])
def test_unknown_discretization_lists_those_there_are(layer_type):
    with pytest.raises(ValueError, match=f"^{layer_type.__name__}: unknown discretization 'tustin'") as error:
        layer_type(**LAYERS[layer_type][0], discretization="tustin")
    rules = [name for name in ssm_kernels.discretizations if layer_type is not Mamba2 or name in METHODS]
    assert all(repr(name) in str(error.value) for name in rules) and ("'euler'" in str(error.value)) == ("euler" in rules)


@pytest.mark.parametrize("layer_type", RECURRENCES)
def test_dropout_of_one_layer_warns(layer_type):
    with pytest.warns(UserWarning, match="dropout acts between layers, and there is only one"):
        layer_type(3, 4, dropout=0.5)


@every_layer
def test_ints_and_numbers_of_numpy_are_numbers(layer_type):
    good, kinds = LAYERS[layer_type]
    numbers = {name: np.int64(good[name]) for name in good}
    numbers |= {name: np.float64(0.05) for name in ("dt_min", "dt_scale", "eps") if name in kinds}
    layer_type(**numbers)


@every_layer
def test_device_and_dtype_are_those_of_the_parameters(layer_type):
    good, _ = LAYERS[layer_type]
    layer = layer_type(**good, device="meta", dtype=torch.float16)
    assert all(parameter.is_meta for parameter in layer.parameters())
    assert torch.float16 in {parameter.dtype for parameter in layer.parameters()} <= {torch.float16, torch.float32}
    with pytest.raises(RuntimeError, match="nowhere"):
        layer_type(**good, device="nowhere")


NO_TENSOR = (np.zeros((2, 3), dtype=np.float32), [1.0], (torch.zeros(1), torch.zeros(1)), 3, "x")
SEQUENCE, STEP = torch.zeros(2, 5, 6), torch.zeros(2, 6)


def calls_of(layer_type: type[nn.Module]) -> dict[str, tuple[Callable, dict[str, Any], list[str]]]:
    """The function, its required arguments and its other tensors' names, by the suffix of the name in messages."""
    if layer_type in RECURRENCES:
        layer = layer_type(6, 4)
        return {"": (layer, {"input": SEQUENCE}, ["hx", "cu_seqlens", "reset"]), ".step": (layer.step, {"x": STEP}, ["state"])}
    if layer_type is SelectiveSSM:
        step, state = SelectiveSSM(6).step, torch.zeros(2, 6, 16)
        return {
            "": (SelectiveSSM(6), {"x": SEQUENCE}, ["z", "initial_state", "seq_idx", "cu_seqlens"]),
            ".step": (step, {"x": STEP, "state": state}, ["z"]),
        }
    layer = Mamba(6) if layer_type is Mamba else Mamba2(6, d_state=8, headdim=4)
    states = dict(zip(("conv_state", "ssm_state"), layer.allocate_inference_cache(2, 5), strict=True))
    sequence, optional = "hidden_states" if layer_type is Mamba else "u", ["seq_idx", "cu_seqlens"]
    step = (layer.step, {"hidden_states": SEQUENCE[:, :1]} | states, [])
    return {"": (layer, {sequence: SEQUENCE}, optional), ".step": step}


every_called_layer = pytest.mark.parametrize(
    "layer_type", [*RECURRENCES, SelectiveSSM, Mamba, Mamba2], ids=lambda layer_type: layer_type.__name__
)


@every_called_layer
def test_arguments_of_calls_that_are_no_tensors(layer_type):
    for suffix, (call, good, optional) in calls_of(layer_type).items():
        call(**good)
        for argument in (*good, *optional):
            for value in (*NO_TENSOR, *([] if argument in optional else [None])):
                with pytest.raises(TypeError, match=rf"^{layer_type.__name__}{suffix}: expected {argument} to be a tensor"):
                    call(**good | {argument: value})


@every_called_layer
def test_shapes_of_sequences_and_steps(layer_type):
    for suffix, (call, good, _) in calls_of(layer_type).items():
        (argument, x), *_ = good.items()
        for shape in ((6,), (), (1, *x.shape, 6), (*x.shape[:-1], 7), (*x.shape[:-1], 1)):
            pattern = rf"^{layer_type.__name__}{suffix}: expected {argument} of shape .*, got \[{', '.join(map(str, shape))}\]"
            with pytest.raises(ValueError, match=pattern):
                call(**good | {argument: torch.zeros(shape)})


@pytest.mark.parametrize("layer_type", [Mamba, Mamba2])
def test_shapes_of_convolution_states(layer_type):
    layer = layer_type(8, layer_idx=0, **({"headdim": 4} if layer_type is Mamba2 else {}))
    name, hidden = layer_type.__name__, torch.zeros(2, 1, 8)
    conv_state, ssm_state = layer.allocate_inference_cache(2, 5)
    for wrong in (conv_state[..., 1:], conv_state[:, 1:], conv_state[0], conv_state[:1]):
        expected = f"expected conv_state of shape (batch, channels, d_conv) = {list(conv_state.shape)}, got {list(wrong.shape)}"
        with pytest.raises(ValueError, match="^" + re.escape(f"{name}.step: {expected}") + "$"):
            layer.step(hidden, wrong, ssm_state)
        if wrong.shape[0] != 2:
            continue  # the batch of the cache has a message of its own
        cache = SimpleNamespace(seqlen_offset=1, key_value_memory_dict={0: (wrong, ssm_state)})
        for sequence in (hidden.expand(2, 3, 8), hidden):
            with torch.no_grad(), pytest.raises(ValueError, match="^" + re.escape(f"{name}: {expected}") + "$"):
                layer(sequence, inference_params=cache)


def test_other_arguments_of_calls():
    liquid, mamba2 = Liquid(6, 4), Mamba2(6, d_state=8, headdim=4)
    for dt in (None, "1", True, [0.1]):
        for call in (lambda dt: liquid(SEQUENCE, dt=dt), lambda dt: liquid.step(STEP, dt=dt)):
            with pytest.raises(TypeError, match=r"^Liquid: expected dt to be a number or a tensor, got "):
                call(dt)
    packed = pack_sequence([*SEQUENCE])
    for dt in (-1.0, -1, -math.inf, math.nan, np.float32(-1)):
        for call in (lambda dt: liquid(SEQUENCE, dt=dt), lambda dt: liquid.step(STEP, dt=dt), lambda dt: liquid(packed, dt=dt)):
            with pytest.raises(ValueError, match=rf"^Liquid: expected dt to be not negative, got {dt}$"):
                call(dt)
    liquid(SEQUENCE, dt=0)
    for seqlen in (5.0, "5", True):
        with pytest.raises(TypeError, match=r"^Mamba2: expected seqlen to be an int, got "):
            mamba2(SEQUENCE.flatten(0, 1), seqlen=seqlen)
    for layer in (Mamba(6, layer_idx=0), mamba2):
        name = type(layer).__name__
        for parameters, missing in ((3, "seqlen_offset"), (SimpleNamespace(seqlen_offset=0), "key_value_memory_dict")):
            with pytest.raises(TypeError, match=f"^{name}: expected inference_params with {missing}, got "):
                layer(SEQUENCE, inference_params=parameters)
        for batch_size, error in ((2.0, TypeError), ("2", TypeError), (True, TypeError), (None, TypeError), (-1, ValueError)):
            with pytest.raises(error, match=rf"^{name}\.allocate_inference_cache: expected batch_size to be "):
                layer.allocate_inference_cache(batch_size, 5)
    with pytest.raises(TypeError, match=r"^SelectiveSSM\.allocate_state: expected batch_size to be an int, got float"):
        SelectiveSSM(6).allocate_state(2.0)
