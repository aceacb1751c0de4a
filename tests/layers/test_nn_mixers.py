"""Mamba, Mamba2 and SelectiveSSM: names of mamba_ssm, values and gradients of their formulas, decoding, dtypes."""

from __future__ import annotations

import copy
import inspect
import math
from types import SimpleNamespace
from typing import Any

import plain_layers
import pytest
import torch
import torch.nn.functional as F
from helpers import METHODS, assert_as_accurate, says
from layer_helpers import (
    LAYERS,
    MIXERS,
    WIDTH,
    assert_all_close,
    assert_same_gradients,
    decode,
    every_mixer,
    every_variant_of_mixers,
    gradients,
    make_layer,
    make_sequence,
    mamba_ssm_shapes,
    variants_of,
)
from plain_layers import parameters_of
from torch import Tensor

from ssm_kernels.nn import Mamba, Mamba2, SelectiveSSM

OPERATOR = "selective_scan"

# The constructors of mamba_ssm.
SIGNATURES = {
    "Mamba": """d_model, d_state=16, d_conv=4, expand=2, dt_rank="auto", dt_min=0.001, dt_max=0.1, dt_init="random",
        dt_scale=1.0, dt_init_floor=1e-4, conv_bias=True, bias=False, use_fast_path=True, layer_idx=None, device=None,
        dtype=None""",
    "Mamba2": """d_model, d_state=128, d_conv=4, conv_init=None, expand=2, headdim=64, d_ssm=None, ngroups=1,
        A_init_range=(1, 16), D_has_hdim=False, rmsnorm=True, norm_before_gate=False, dt_min=0.001, dt_max=0.1,
        dt_init_floor=1e-4, dt_limit=(0.0, math.inf), bias=False, conv_bias=True, chunk_size=256, use_mem_eff_path=True,
        layer_idx=None, process_group=None, sequence_parallel=True, device=None, dtype=None""",
}
# Relative and absolute tolerances in float64: of values, and of gradients.
TOLERANCES = {"Mamba": ((1e-10, 1e-12), (1e-9, 1e-12)), "Mamba2": ((1e-9, 1e-11), (1e-8, 1e-10))}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def new_cache() -> Any:
    return SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})


def plain(layer: torch.nn.Module, x: Tensor, p: dict[str, Tensor] | None = None, **options: Tensor) -> Tensor:
    return LAYERS[type(layer).__name__].plain(layer, x, p, **options)


def exact(layer: torch.nn.Module, x: Tensor) -> Tensor:
    """Computes the layer in float64, whatever the dtypes of its parameters and input."""
    return plain(layer, x.double(), parameters_of(layer, torch.float64))


# ----- names, shapes and initialization


@every_mixer
def test_constructor_is_that_of_mamba_ssm(name):
    parameters = list(inspect.signature(LAYERS[name].type).parameters.values())
    positional = [(p.name, p.default) for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    theirs = inspect.signature(eval(f"(lambda {SIGNATURES[name]}: None)", {"math": math})).parameters.values()
    assert positional == [(p.name, p.default) for p in theirs]
    ours = {"Mamba": ["discretization", "alpha", "time_steps_scale", "recompute"], "Mamba2": ["discretization", "recompute"]}
    assert [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY] == ours[name]


def test_forward_of_mamba2_is_that_of_mamba_ssm():
    parameters = inspect.signature(Mamba2.forward).parameters
    assert list(parameters) == ["self", "u", "seqlen", "seq_idx", "cu_seqlens", "inference_params"]
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


MAMBA = {"d_model": 40, "d_state": 5, "d_conv": 3}
MAMBA2 = {"d_model": 64, "d_state": 16, "d_conv": 3, "headdim": 32}
OTHERS = {"bias": True, "conv_bias": False, "D_has_hdim": True, "d_ssm": 96}


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        *(
            # The rank is ceil(40 / 16).
            ("Mamba", MAMBA | {"expand": 3} | biases, MAMBA | {"d_inner": 120, "dt_rank": 3} | biases)
            for biases in ({"bias": bias, "conv_bias": conv_bias} for bias in (True, False) for conv_bias in (True, False))
        ),
        ("Mamba2", MAMBA2, MAMBA2 | {"d_inner": 128, "d_ssm": 128}),
        ("Mamba2", MAMBA2 | OTHERS, MAMBA2 | {"d_inner": 128} | OTHERS),
    ],
)
def test_state_dict_is_that_of_mamba_ssm(name, options, sizes):
    """The order of the entries counts: optimizers save their states by position."""
    layer, expected = LAYERS[name].type(**options), mamba_ssm_shapes(name, **sizes)
    assert [(key, tuple(value.shape)) for key, value in layer.state_dict().items()] == list(expected.items())
    assert [key for key, _ in layer.named_parameters()] == list(expected)
    checkpoint = {key: make_sequence(*shape, dtype=torch.float32) for key, shape in expected.items()}
    layer.load_state_dict(checkpoint, strict=True)
    torch.testing.assert_close(dict(layer.state_dict()), checkpoint, rtol=0, atol=0)


def test_no_norm_has_no_parameters():
    assert not [name for name in Mamba2(64, 16, rmsnorm=False).state_dict() if "norm" in name]


def test_sizes_of_published_models():
    """mamba2-130m: d_model 768; its checkpoint's shapes."""
    shapes = {name: tuple(value.shape) for name, value in Mamba2(768, device="meta").state_dict().items()}
    assert shapes["in_proj.weight"] == (3352, 768) and shapes["conv1d.weight"] == (1792, 1, 4)
    assert shapes["A_log"] == (24,) and shapes["norm.weight"] == (1536,) and shapes["out_proj.weight"] == (768, 1536)


def assert_step_sizes(bias: Tensor, low: float, high: float) -> None:
    """The logarithm of softplus(bias) is uniform: its quartiles are where a uniform variable's are."""
    position = (F.softplus(bias).log() - math.log(low)) / math.log(high / low)
    assert -1e-4 < position.min() < 0.01 and 0.99 < position.max() < 1 + 1e-4
    quartiles = torch.quantile(position, torch.tensor([0.25, 0.5, 0.75]))
    torch.testing.assert_close(quartiles, torch.tensor([0.25, 0.5, 0.75]), rtol=0, atol=0.05)


@pytest.mark.parametrize("layer_type", [Mamba, SelectiveSSM])
def test_initialization(layer_type):
    torch.manual_seed(0)
    layer = layer_type(1600, d_state=7, dt_rank=9, dt_min=0.002, dt_max=0.5, dt_scale=0.25)
    expected_A = torch.arange(1.0, 8.0).expand(layer.d_inner, 7)
    torch.testing.assert_close(layer.A_log.exp(), expected_A)
    assert (layer.D == 1).all()
    bound = 0.25 / 3
    assert 0.95 * bound < layer.dt_proj.weight.abs().max() <= bound
    assert layer.dt_proj.weight.mean().abs() < 0.01 * bound
    assert_step_sizes(layer.dt_proj.bias, 0.002, 0.5)


def test_initialization_of_mamba2():
    torch.manual_seed(0)
    layer = Mamba2(1024, headdim=1, dt_min=0.002, dt_max=0.5, A_init_range=(2, 6), conv_init=0.01)
    A = layer.A_log.exp()
    assert 2 <= A.min() < 2.05 and 5.95 < A.max() <= 6.0001
    torch.testing.assert_close(A.mean(), torch.tensor(4.0), rtol=0.02, atol=0)
    assert (layer.D == 1).all() and (layer.norm.weight == 1).all()
    assert 0.0099 < layer.conv1d.weight.abs().max() <= 0.01
    assert_step_sizes(layer.dt_bias, 0.002, 0.5)


def test_initialization_options():
    small = {"dt_min": 1e-6, "dt_max": 1e-5, "dt_init_floor": 1e-3}
    layer = SelectiveSSM(64, dt_rank=4, dt_init="constant", dt_scale=3.0, **small)
    assert (layer.dt_proj.weight == 1.5).all()
    torch.testing.assert_close(F.softplus(layer.dt_proj.bias), torch.full((64,), 1e-3))
    torch.testing.assert_close(F.softplus(Mamba2(16, headdim=4, **small).dt_bias), torch.full((8,), 1e-3))
    assert Mamba(40).dt_rank == 3 and SelectiveSSM(40).dt_rank == 3


@pytest.mark.parametrize("name", [*MIXERS, "SelectiveSSM"])
def test_parameters_are_marked_for_training_code(name):
    layer = make_layer(name)
    marked = {key for key, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked == {"A_log", "D"} | ({"dt_bias"} if name == "Mamba2" else set())
    kept = [key for key, p in layer.named_parameters() if getattr(p, "_no_reinit", False)]
    assert name == "Mamba2" or kept == ["dt_proj.bias"]


# ----- values and gradients


@every_variant_of_mixers
def test_is_its_formula(name, device):
    layer, x = make_layer(name, device), make_sequence(2, 9, WIDTH, device=device).requires_grad_()
    of_values, of_gradients = TOLERANCES[type(layer).__name__]
    actual, expected = layer(x), plain(layer, x)
    assert_all_close(actual, expected, *of_values)
    assert_same_gradients(actual, expected, {"x": x} | parameters_of(layer), *of_gradients)


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("name", variants_of("SelectiveSSM"))
def test_selective_ssm_is_its_formula(name, gate, device):
    layer = make_layer(name, device)
    x, z = (make_sequence(2, 7, WIDTH, device=device, seed=seed).requires_grad_() for seed in (0, 1))
    state = make_sequence(2, WIDTH, 4, device=device, seed=2).requires_grad_()
    z = z if gate else None
    expected = plain_layers.selective_ssm(layer, x, z, state)
    actual = layer(x, z, initial_state=state, return_last_state=True)
    assert_all_close(actual, expected, 1e-9, 1e-12)
    leaves = {"x": x, "state": state, **parameters_of(layer)} | ({"z": z} if gate else {})
    assert_same_gradients(actual, expected, leaves, 1e-9, 1e-12)


def test_discretizations_differ(device):
    """The word reaches the operator: no two methods give the same result."""
    hidden = make_sequence(1, 6, WIDTH, device=device)
    results = {name: make_layer("Mamba", device, discretization=name)(hidden) for name in METHODS}
    for name, result in results.items():
        others = [other for key, other in results.items() if key != name]
        assert all((result - other).abs().max() > 1e-9 for other in others), name


@pytest.mark.parametrize("shape", [(2, 0, WIDTH), (0, 5, WIDTH), (2, 1, WIDTH)])
@every_mixer
def test_empty_and_short_sequences(name, shape, device):
    layer, x = make_layer(name, device), torch.ones(shape, device=device, dtype=torch.float64)
    out = layer(x)
    assert out.shape == shape and out.isfinite().all()
    out.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())
    if name == "Mamba2":
        assert layer(x, seq_idx=torch.zeros(shape[:2], dtype=torch.int32, device=device)).shape == shape


# ----- decoding


@pytest.mark.parametrize("prefill", [0, 1, 2, 3, 4, 7])
@every_variant_of_mixers
def test_prefill_and_steps_are_the_whole_sequence(name, prefill, device):
    layer, x, cache = make_layer(name, device), make_sequence(3, 9, WIDTH, device=device), new_cache()
    with torch.no_grad():
        whole = layer(x)
        parts = [layer(x[:, :prefill], inference_params=cache)]
        conv_state, ssm_state = cache.key_value_memory_dict[0]
        assert conv_state.shape == (3, layer.conv1d.weight.shape[0], layer.d_conv)
        channels = (layer.nheads, layer.headdim) if name.startswith("Mamba2") else (12,)
        assert ssm_state.shape == (3, *channels, layer.d_state)
        for t in range(prefill, 9):
            cache.seqlen_offset = max(t, 1)  # with offset 0 the sequence would start anew
            if t % 2:
                out, *states = layer.step(x[:, t : t + 1], conv_state, ssm_state)
                assert states[0] is conv_state and states[1] is ssm_state
            else:
                out = layer(x[:, t : t + 1], inference_params=cache)
            parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-12)


@every_variant_of_mixers
def test_prefill_in_pieces_is_the_whole_sequence(name, device):
    layer, x, cache = make_layer(name, device), make_sequence(2, 11, WIDTH, device=device), new_cache()
    parts = []
    for piece in x.split([2, 5, 3, 1], dim=1):
        parts.append(layer(piece, inference_params=cache))
        assert parts[-1].requires_grad, "pieces of one step train as others do"
        cache.seqlen_offset += piece.shape[1]
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x), rtol=1e-10, atol=1e-12)
    assert not any(state.requires_grad for state in cache.key_value_memory_dict[0])
    for part in parts:  # each from a state that the next has overwritten in the cache
        part.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    cache.seqlen_offset = 0  # starts anew, whatever the cache holds
    torch.testing.assert_close(layer(x, inference_params=cache), layer(x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", variants_of("SelectiveSSM"))
def test_selective_ssm_halves_and_steps_are_the_whole_sequence(name, device):
    layer = make_layer(name, device)
    x, z = (make_sequence(2, 8, WIDTH, device=device, seed=seed) for seed in (0, 1))
    whole, last_state = layer(x, z, return_last_state=True)
    first, state = layer(x[:, :3], z[:, :3], return_last_state=True)
    second, end = layer(x[:, 3:], z[:, 3:], initial_state=state, return_last_state=True)
    assert_all_close((torch.cat([first, second], dim=1), end), (whole, last_state), 1e-10, 1e-12)
    state = layer.allocate_state(2)
    steps = [layer.step(x[:, t], state, z[:, t]) for t in range(8)]
    assert_all_close((torch.stack(steps, dim=1), state), (whole.detach(), last_state.detach()), 1e-10, 1e-12)


@every_mixer
def test_inference_cache(name, device):
    """States are as wide as the parameters of the recurrence, unless the user asks for another dtype."""
    shapes = {"Mamba": [(3, 12, 4), (3, 12, 4)], "Mamba2": [(3, 18, 4), (3, 6, 2, 3)]}[name]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layer = make_layer(name, device, dtype)
        states = layer.allocate_inference_cache(3, 100)
        assert [state.shape for state in states] == shapes and not any(state.any() for state in states)
        assert [state.dtype for state in states] == [dtype, torch.float32]
        narrow = layer.allocate_inference_cache(3, 100, dtype=torch.float16)
        assert [state.dtype for state in narrow] == [torch.float16] * 2


@pytest.mark.parametrize("of_cache", FLOATS, ids=str)
@pytest.mark.parametrize("of_layer", FLOATS, ids=str)
@every_mixer
def test_cache_of_any_dtype(name, of_layer, of_cache, device):
    """Prefill and steps take it, and round the states to it."""
    layer, x = make_layer(name, device, of_layer), make_sequence(2, 6, WIDTH, device=device, dtype=of_layer)
    cache = new_cache()
    states = cache.key_value_memory_dict[0] = layer.allocate_inference_cache(2, 0, dtype=of_cache)
    with torch.no_grad():
        whole, parts = layer(x), []
        for piece in x.split([3, 1, 1, 1], dim=1):
            parts.append(layer(piece, inference_params=cache))
            cache.seqlen_offset += piece.shape[1]
    assert all(state.dtype == of_cache and state.any() for state in states)
    tolerance = 4 * max(torch.finfo(dtype).eps for dtype in (of_layer, of_cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=tolerance, atol=tolerance)


@every_mixer
def test_decoding_errors(name):
    layer, x, cache = make_layer(name), make_sequence(2, 3, WIDTH), new_cache()
    expected = f"{name}.step: expected hidden_states of shape (batch, 1, d_model) with d_model = 6, got [2, 3, 6]"
    with pytest.raises(ValueError, match=says(expected)):
        layer.step(x, *layer.allocate_inference_cache(2, 3))
    expected = f"{'u' if name == 'Mamba2' else 'hidden_states'} of shape (batch, seqlen, d_model) with d_model = 6, got [3, 6]"
    with pytest.raises(ValueError, match=says(f"{name}: expected {expected}")):
        layer(x[0])
    with pytest.raises(
        ValueError, match=says(f"{name}.allocate_inference_cache: expected a floating-point dtype, got torch.int64")
    ):
        layer.allocate_inference_cache(2, 3, dtype=torch.int64)
    layer(x, inference_params=cache)
    with pytest.raises(ValueError, match=f"{name}: expected a batch of 2 as in the cache, got 1"):
        layer(x[:1], inference_params=cache)
    layer.layer_idx = None
    with pytest.raises(ValueError, match=f"{name}: inference_params needs a layer_idx"):
        layer(x, inference_params=cache)


@every_mixer
def test_refused_step_changes_no_state(name):
    layer, x = make_layer(name), make_sequence(2, 1, WIDTH)
    conv_state, ssm_state = (torch.ones_like(state) for state in layer.allocate_inference_cache(2, 1))
    for wrong in ((conv_state, ssm_state[:, :-1]), (conv_state[..., 1:], ssm_state)):
        bad = 0 if wrong[0] is not conv_state else 1
        expected = [f"{name}.step: expected {('conv_state', 'ssm_state')[bad]} of shape (batch, "]
        expected += [f"= {[*(conv_state, ssm_state)[bad].shape]}, got {[*wrong[bad].shape]}"]
        with pytest.raises(ValueError, match=says(*expected)):
            layer.step(x, *wrong)
    for wrong, bad in (((conv_state, ssm_state.long()), "ssm_state"), ((conv_state.int(), ssm_state), "conv_state")):
        with pytest.raises(RuntimeError, match=says(f"{name}.step: expected {bad} of a floating-point dtype, got torch.int")):
            layer.step(x, *wrong)
    assert (conv_state == 1).all() and (ssm_state == 1).all()


# ----- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name, packed", [("Mamba", False), ("Mamba2", False), ("Mamba2", True)])
def test_16_bit_layer(name, packed, dtype, device):
    layer = make_layer(name, device, dtype, bias=True, **({"ngroups": 2} if name == "Mamba2" else {}))
    leaves, wide = dict(layer.named_parameters()), {"A_log", "D"} | ({"dt_bias"} if name == "Mamba2" else set())
    assert {key for key, p in leaves.items() if p.dtype == torch.float32} == wide
    assert {key for key, p in leaves.items() if p.dtype == dtype} == leaves.keys() - wide
    options = {"cu_seqlens": torch.tensor([0, 20, 33], device=device)} if packed else {}
    draws = []
    # A gradient that is a few sums has a draw of roundings that may by chance be far more exact than is usual.
    for seed in range(8):
        x = make_sequence(2 if name == "Mamba" else 1, 33, WIDTH, device=device, dtype=dtype, seed=seed)
        wanted = torch.cat([exact(layer, part) for part in (x.split([20, 13], dim=1) if packed else [x])], dim=1)
        outs = {"actual": layer(x, **options), "native": plain(layer, x, **options)}
        assert_as_accurate(outs["actual"].detach(), outs["native"].detach(), wanted.detach(), "out")
        outs["exact"] = wanted.to(dtype)
        draws.append({key: dict(zip(leaves, gradients(out, leaves.values()), strict=True)) for key, out in outs.items()})
    for key in leaves:
        actual, native, wanted = (torch.stack([draw[which][key] for draw in draws]) for which in ("actual", "native", "exact"))
        assert_as_accurate(actual, native, wanted.double(), key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_mixer
def test_16_bit_steps_are_the_whole_sequence(name, dtype, device):
    layer, x = make_layer(name, device, dtype), make_sequence(2, 12, WIDTH, device=device, dtype=dtype)
    steps, whole = decode(layer, x), layer(x).detach()
    assert steps.dtype == whole.dtype == dtype
    assert_as_accurate(steps, whole, exact(layer, x).detach(), "steps")


@pytest.mark.parametrize("name", ["Mamba-bilinear", "Mamba2-default", "Mamba2-no_norm", "Mamba2-with_mlp"])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
def test_autocast(name, input_dtype, device):
    layer = make_layer(name, device, torch.float32)
    x = make_sequence(2, 33, WIDTH, device=device, dtype=input_dtype)
    with torch.autocast(device, torch.bfloat16):
        actual, native = layer(x), plain(layer, x)
        results = {"out": actual, "steps": decode(layer, x)}
        if name.startswith("Mamba2"):
            results["one sequence"] = layer(x, seq_idx=torch.zeros(2, 33, dtype=torch.int32, device=device))
    for key, result in results.items():
        assert result.dtype == torch.bfloat16
        assert_as_accurate(result.detach(), native.detach(), exact(layer, x).detach(), key)
    for parameter, gradient in zip(layer.parameters(), gradients(actual, layer.parameters()), strict=True):
        assert gradient.dtype == parameter.dtype == torch.float32
        assert gradient.isfinite().all()


def test_autocast_of_the_ssm_alone(device):
    """Its input is not the result of a projection, so autocast has not lowered it."""
    layer = make_layer("SelectiveSSM", device, torch.float32)
    x, z = (make_sequence(2, 9, WIDTH, device=device, dtype=torch.float32, seed=seed) for seed in (0, 1))
    state = layer.allocate_state(2)
    with torch.autocast(device, torch.bfloat16):
        whole = layer(x, z)
        steps = torch.stack([layer.step(x[:, t], state, z[:, t]) for t in range(9)], dim=1)
    assert whole.dtype == steps.dtype == torch.bfloat16 and state.dtype == torch.float32
    torch.testing.assert_close(steps, whole.detach(), rtol=2e-2, atol=2e-2)


@every_mixer
def test_converted_to_double(name, device):
    layer, x = make_layer(name, device, torch.float32), make_sequence(2, 9, WIDTH, device=device)
    double = copy.deepcopy(layer).double()
    expected = plain(double, x)
    torch.testing.assert_close(double(x), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer(x.float()).double(), expected, rtol=1e-4, atol=1e-5)
