"""The layers: names and initialization as in mamba_ssm, values and gradients as their formulas, decoding as whole sequences."""

from __future__ import annotations

import copy
import inspect
import math
from types import SimpleNamespace

import plain_layers
import pytest
import torch
import torch.nn.functional as F
from helpers import METHODS, assert_as_accurate, reference_scan
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import ssm_kernels
from ssm_kernels.nn import Mamba, SelectiveSSM

OPERATOR = "selective_scan"

# The constructor of mamba_ssm's Mamba.
MAMBA_SIGNATURE = {
    "d_model": inspect.Parameter.empty,
    "d_state": 16,
    "d_conv": 4,
    "expand": 2,
    "dt_rank": "auto",
    "dt_min": 0.001,
    "dt_max": 0.1,
    "dt_init": "random",
    "dt_scale": 1.0,
    "dt_init_floor": 1e-4,
    "conv_bias": True,
    "bias": False,
    "use_fast_path": True,
    "layer_idx": None,
    "device": None,
    "dtype": None,
}


def make_mamba(discretization: str = "zoh", device: str = "cpu", dtype: torch.dtype = torch.float64, **kwargs) -> Mamba:
    """The same layer on every device."""
    torch.manual_seed(0)
    return Mamba(6, d_state=4, dt_rank=2, layer_idx=0, dtype=dtype, discretization=discretization, **kwargs).to(device)


def make_ssm(discretization: str = "zoh", device: str = "cpu", dtype: torch.dtype = torch.float64) -> SelectiveSSM:
    """The same layer on every device."""
    torch.manual_seed(0)
    return SelectiveSSM(6, d_state=4, dt_rank=2, dtype=dtype, discretization=discretization).to(device)


def make_sequence(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def ssm_formula(
    p: dict[str, Tensor], x: Tensor, z: Tensor | None, state: Tensor | None, discretization: str
) -> tuple[Tensor, Tensor]:
    """The selective SSM on (batch, seqlen, d_inner) from its parameters, by the reference scan."""
    d_state, dt_rank = p["A_log"].shape[1], p["dt_proj.weight"].shape[1]
    projected = x @ p["x_proj.weight"].T
    delta = torch.log1p(torch.exp(projected[..., :dt_rank] @ p["dt_proj.weight"].T + p["dt_proj.bias"]))
    B, C = projected[..., dt_rank : dt_rank + d_state], projected[..., dt_rank + d_state :]
    out, last_state = reference_scan(
        *(v.transpose(1, 2) for v in (x, delta)),
        -torch.exp(p["A_log"]),
        *(v.transpose(1, 2) for v in (B, C)),
        p["D"],
        None if z is None else z.transpose(1, 2),
        discretization=discretization,
        initial_state=state,
        return_last_state=True,
    )
    return out.transpose(1, 2), last_state


def mamba_formula(p: dict[str, Tensor], hidden: Tensor, discretization: str) -> Tensor:
    """The mixer on (batch, seqlen, d_model) from its parameters; the convolution term by term."""
    v, z = (hidden @ p["in_proj.weight"].T + p.get("in_proj.bias", 0)).chunk(2, dim=-1)
    kernel, seqlen = p["conv1d.weight"][:, 0], v.shape[1]
    width = kernel.shape[1]
    x = torch.zeros_like(v) + p.get("conv1d.bias", 0)
    for k in range(width):
        lag = width - 1 - k
        if lag < seqlen:
            x = x + F.pad(kernel[:, k] * v[:, : seqlen - lag], (0, 0, lag, 0))
    x = x / (1 + torch.exp(-x))
    y, _ = ssm_formula(p, x, z, None, discretization)
    return y @ p["out_proj.weight"].T + p.get("out_proj.bias", 0)


def gradients(out: Tensor | tuple[Tensor, ...], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    outputs = (out,) if isinstance(out, Tensor) else out
    cotangents = [make_sequence(*o.shape, device=o.device, dtype=o.dtype, seed=5 + i) for i, o in enumerate(outputs)]
    return torch.autograd.grad(outputs, leaves, cotangents)


# ----- names, shapes and initialization


def test_constructor_is_that_of_mamba_ssm():
    parameters = list(inspect.signature(Mamba).parameters.values())
    positional = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == list(MAMBA_SIGNATURE.items())
    assert [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY] == ["discretization"]


@pytest.mark.parametrize("conv_bias", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_state_dict_is_that_of_mamba_ssm(bias, conv_bias):
    d_model, d_state, d_conv, d_inner = 40, 5, 3, 120
    layer = Mamba(d_model, d_state, d_conv, expand=3, bias=bias, conv_bias=conv_bias)
    dt_rank = 3  # ceil(40 / 16)
    expected = {
        "A_log": (d_inner, d_state),
        "D": (d_inner,),
        "in_proj.weight": (2 * d_inner, d_model),
        **({"in_proj.bias": (2 * d_inner,)} if bias else {}),
        "conv1d.weight": (d_inner, 1, d_conv),
        **({"conv1d.bias": (d_inner,)} if conv_bias else {}),
        "x_proj.weight": (dt_rank + 2 * d_state, d_inner),
        "dt_proj.weight": (d_inner, dt_rank),
        "dt_proj.bias": (d_inner,),
        "out_proj.weight": (d_model, d_inner),
        **({"out_proj.bias": (d_model,)} if bias else {}),
    }
    # In order: optimizers save their states by position.
    assert [(name, tuple(value.shape)) for name, value in layer.state_dict().items()] == list(expected.items())
    assert [name for name, _ in layer.named_parameters()] == list(expected)
    checkpoint = {name: make_sequence(*shape, dtype=torch.float32) for name, shape in expected.items()}
    layer.load_state_dict(checkpoint, strict=True)
    torch.testing.assert_close(dict(layer.state_dict()), checkpoint, rtol=0, atol=0)


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
    # The logarithm of softplus(bias) is uniform: its quartiles are where a uniform variable's are.
    position = (F.softplus(layer.dt_proj.bias).log() - math.log(0.002)) / math.log(0.5 / 0.002)
    assert -1e-4 < position.min() < 0.01 and 0.99 < position.max() < 1 + 1e-4
    quartiles = torch.quantile(position, torch.tensor([0.25, 0.5, 0.75]))
    torch.testing.assert_close(quartiles, torch.tensor([0.25, 0.5, 0.75]), rtol=0, atol=0.05)


def test_initialization_options():
    layer = SelectiveSSM(64, dt_rank=4, dt_init="constant", dt_scale=3.0, dt_min=1e-6, dt_max=1e-5, dt_init_floor=1e-3)
    assert (layer.dt_proj.weight == 1.5).all()
    torch.testing.assert_close(F.softplus(layer.dt_proj.bias), torch.full((64,), 1e-3))
    assert Mamba(40).dt_rank == 3 and SelectiveSSM(40).dt_rank == 3


@pytest.mark.parametrize("layer_type", [Mamba, SelectiveSSM])
def test_parameters_are_marked_for_training_code(layer_type):
    layer = layer_type(16)
    marked = {name for name, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked == {"A_log", "D"}
    assert [name for name, p in layer.named_parameters() if getattr(p, "_no_reinit", False)] == ["dt_proj.bias"]


@pytest.mark.parametrize("layer_type", [Mamba, SelectiveSSM])
def test_made_on_meta_and_initialized_later(layer_type):
    torch.manual_seed(0)
    layer = layer_type(16, device="meta").to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    layer.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    torch.testing.assert_close(layer.A_log.exp()[0], torch.arange(1.0, 17.0))


@pytest.mark.parametrize("layer_type", [Mamba, SelectiveSSM])
def test_bad_arguments(layer_type):
    with pytest.raises(ValueError, match="unknown discretization 'tustin'") as error:
        layer_type(16, discretization="tustin")
    assert all(repr(name) in str(error.value) for name in ssm_kernels.discretizations)
    with pytest.raises(ValueError, match="unknown dt_init 'uniform'"):
        layer_type(16, dt_init="uniform")
    with pytest.raises(ValueError, match="expected d_state from 1 to 256, got 300"):
        layer_type(16, d_state=300)
    with pytest.raises(ValueError, match=r"0 < dt_min <= dt_max, both finite, got dt_min=0\.2, dt_max=0\.1"):
        layer_type(16, dt_min=0.2)


def test_convolution_of_no_width():
    with pytest.raises(ValueError, match="Mamba: expected d_conv to be at least 1, got 0"):
        Mamba(16, d_conv=0)


# ----- values and gradients


@pytest.mark.parametrize("discretization", [*METHODS, "foh"])
def test_mamba_is_its_formula(discretization, device):
    layer = make_mamba(discretization, device, bias=True)
    hidden = make_sequence(2, 9, 6, device=device).requires_grad_()
    parameters = dict(layer.named_parameters())
    expected = mamba_formula(parameters, hidden, discretization)
    actual = layer(hidden)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    leaves = [hidden, *parameters.values()]
    for name, a, b in zip(["hidden_states", *parameters], gradients(actual, leaves), gradients(expected, leaves), strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("bias, conv_bias, d_conv", [(False, False, 4), (False, True, 1), (True, False, 2)])
def test_mamba_options(bias, conv_bias, d_conv, device):
    layer = make_mamba("zoh", device, bias=bias, conv_bias=conv_bias, d_conv=d_conv)
    hidden = make_sequence(2, 5, 6, device=device)
    expected = mamba_formula(dict(layer.named_parameters()), hidden, "zoh")
    torch.testing.assert_close(layer(hidden), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("discretization", METHODS)
def test_selective_ssm_is_its_formula(discretization, gate, device):
    layer = make_ssm(discretization, device)
    x = make_sequence(2, 7, 6, device=device).requires_grad_()
    z = make_sequence(2, 7, 6, device=device, seed=1).requires_grad_() if gate else None
    state = make_sequence(2, 6, 4, device=device, seed=2).requires_grad_()
    parameters = dict(layer.named_parameters())
    expected = ssm_formula(parameters, x, z, state, discretization)
    actual = layer(x, z, initial_state=state, return_last_state=True)
    leaves = [x, state, *parameters.values(), *([z] if gate else [])]
    for a, b in zip((*actual, *gradients(actual, leaves)), (*expected, *gradients(expected, leaves)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_discretizations_differ(device):
    """The word reaches the operator: no two methods give the same result."""
    hidden = make_sequence(1, 6, 6, device=device)
    results = {name: make_mamba(name, device)(hidden) for name in METHODS}
    for name, result in results.items():
        others = [other for key, other in results.items() if key != name]
        assert all((result - other).abs().max() > 1e-9 for other in others), name


def test_inputs_of_any_strides(device):
    layer = make_mamba("zoh", device)
    hidden = make_sequence(2, 9, 6, device=device)
    expected = layer(hidden)
    for view in (hidden.transpose(0, 1).contiguous().transpose(0, 1), hidden.transpose(1, 2).contiguous().transpose(1, 2)):
        assert not view.is_contiguous()
        torch.testing.assert_close(layer(view), expected, rtol=1e-12, atol=1e-14)
    expanded = hidden[:1].expand(2, -1, -1)
    torch.testing.assert_close(layer(expanded), layer(expanded.contiguous()), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(2, 0, 6), (0, 5, 6), (2, 1, 6)])
def test_empty_and_short_sequences(shape, device):
    layer = make_mamba("zoh", device)
    out = layer(torch.ones(shape, device=device, dtype=torch.float64))
    assert out.shape == shape and out.isfinite().all()
    out.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_the_future_does_not_matter(device):
    layer = make_mamba("bilinear", device)
    hidden = make_sequence(2, 9, 6, device=device)
    changed = hidden.clone()
    changed[:, 5:] = make_sequence(2, 4, 6, device=device, seed=1)
    before, after = layer(hidden), layer(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=1e-12, atol=1e-14)
    assert (before[:, 5:] - after[:, 5:]).abs().amax(dim=-1).min() > 1e-9


# ----- decoding


@pytest.mark.parametrize("prefill", [0, 1, 2, 3, 4, 7])
@pytest.mark.parametrize("discretization", METHODS)
def test_prefill_and_steps_are_the_whole_sequence(discretization, prefill, device):
    layer = make_mamba(discretization, device, bias=True)
    hidden = make_sequence(3, 9, 6, device=device)
    cache = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    with torch.no_grad():
        whole = layer(hidden)
        parts = [layer(hidden[:, :prefill], cache)]
        conv_state, ssm_state = cache.key_value_memory_dict[0]
        assert conv_state.shape == (3, 12, 4) and ssm_state.shape == (3, 12, 4)
        for t in range(prefill, 9):
            cache.seqlen_offset = t
            if t % 2:
                out, *states = layer.step(hidden[:, t : t + 1], conv_state, ssm_state)
                assert states[0] is conv_state and states[1] is ssm_state
            else:
                cache.seqlen_offset = max(t, 1)  # with offset 0 the sequence would start anew
                out = layer(hidden[:, t : t + 1], cache)
            parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-12)


def test_prefill_in_pieces_is_the_whole_sequence(device):
    layer = make_mamba("foh", device)
    hidden = make_sequence(2, 11, 6, device=device)
    cache = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    parts = []
    for piece in hidden.split([2, 5, 3, 1], dim=1):
        parts.append(layer(piece, cache))
        assert parts[-1].requires_grad, "pieces of one step train as others do"
        cache.seqlen_offset += piece.shape[1]
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(hidden), rtol=1e-10, atol=1e-12)
    assert not any(state.requires_grad for state in cache.key_value_memory_dict[0])
    cache.seqlen_offset = 0  # starts anew, whatever the cache holds
    torch.testing.assert_close(layer(hidden, cache), layer(hidden), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("discretization", METHODS)
def test_selective_ssm_halves_and_steps_are_the_whole_sequence(discretization, device):
    layer = make_ssm(discretization, device)
    x, z = make_sequence(2, 8, 6, device=device), make_sequence(2, 8, 6, device=device, seed=1)
    whole, last_state = layer(x, z, return_last_state=True)
    first, state = layer(x[:, :3], z[:, :3], return_last_state=True)
    second, end = layer(x[:, 3:], z[:, 3:], initial_state=state, return_last_state=True)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(end, last_state, rtol=1e-10, atol=1e-12)
    state = layer.allocate_state(2)
    steps = [layer.step(x[:, t], state, z[:, t]) for t in range(8)]
    torch.testing.assert_close(torch.stack(steps, dim=1), whole.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, last_state.detach(), rtol=1e-10, atol=1e-12)


def test_inference_cache(device):
    layer = make_mamba("zoh", device, torch.float32)
    conv_state, ssm_state = layer.allocate_inference_cache(3, 100)
    assert conv_state.shape == (3, 12, 4) and ssm_state.shape == (3, 12, 4)
    assert conv_state.dtype == ssm_state.dtype == torch.float32
    assert not conv_state.any() and not ssm_state.any()
    narrow = layer.allocate_inference_cache(3, 100, dtype=torch.bfloat16)
    assert [state.dtype for state in narrow] == [torch.bfloat16, torch.bfloat16]


def test_decoding_errors():
    layer = make_mamba()
    hidden = make_sequence(2, 3, 6)
    with pytest.raises(
        ValueError, match=r"expected hidden_states of shape \(batch, 1, d_model\) with d_model = 6, got \[2, 3, 6\]"
    ):
        layer.step(hidden, *layer.allocate_inference_cache(2, 3))
    expected = r"Mamba: expected hidden_states of shape \(batch, seqlen, d_model\) with d_model = 6, got \[3, 6\]"
    with pytest.raises(ValueError, match=expected):
        layer(hidden[0])
    cache = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    layer(hidden, cache)
    with pytest.raises(ValueError, match="expected a batch of 2 as in the cache, got 1"):
        layer(hidden[:1], cache)
    layer.layer_idx = None
    with pytest.raises(ValueError, match="layer_idx"):
        layer(hidden, cache)


def test_refused_step_changes_no_state():
    layer, hidden = make_mamba(), make_sequence(2, 1, 6)
    conv_state, ssm_state = (torch.ones_like(state) for state in layer.allocate_inference_cache(2, 1))
    expected = r"Mamba\.step: expected ssm_state of shape \(batch, d_inner, d_state\) = \[2, 12, 4\], got \[2, 11, 4\]"
    with pytest.raises(ValueError, match=expected):
        layer.step(hidden, conv_state, ssm_state[:, :-1])
    expected = r"Mamba\.step: expected conv_state of shape \(batch, channels, d_conv\) = \[2, 12, 4\], got \[2, 12, 3\]"
    with pytest.raises(ValueError, match=expected):
        layer.step(hidden, conv_state[..., 1:], ssm_state)
    assert (conv_state == 1).all() and (ssm_state == 1).all()


# ----- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_layer(dtype, device):
    layer = make_mamba("zoh", device, dtype, bias=True)
    assert layer.A_log.dtype == layer.D.dtype == torch.float32
    narrow = {name for name, p in layer.named_parameters() if p.dtype == dtype}
    assert narrow == {name for name, _ in layer.named_parameters()} - {"A_log", "D"}
    leaves, draws = dict(layer.named_parameters()), []
    # A gradient that is a few sums has a draw of roundings that may by chance be far more exact than is usual.
    for seed in range(8):
        hidden = make_sequence(2, 33, 6, device=device, dtype=dtype, seed=seed)
        exact = mamba_formula({name: p.double() for name, p in leaves.items()}, hidden.double(), "zoh")
        outs = {"actual": layer(hidden), "native": plain_layers.mamba(layer, hidden)}
        assert_as_accurate(outs["actual"].detach(), outs["native"].detach(), exact.detach(), "out")
        outs["exact"] = exact.to(dtype)
        draws.append({key: dict(zip(leaves, gradients(out, [*leaves.values()]), strict=True)) for key, out in outs.items()})
    for name in leaves:
        actual, native, exact = (torch.stack([draw[key][name] for draw in draws]) for key in ("actual", "native", "exact"))
        assert_as_accurate(actual, native, exact.double(), name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_steps_are_the_whole_sequence(dtype, device):
    layer = make_mamba("zoh", device, dtype)
    hidden = make_sequence(2, 12, 6, device=device, dtype=dtype)
    conv_state, ssm_state = layer.allocate_inference_cache(2, 12)
    assert conv_state.dtype == dtype and ssm_state.dtype == torch.float32
    steps = torch.cat([layer.step(hidden[:, t : t + 1], conv_state, ssm_state)[0] for t in range(12)], dim=1)
    whole = layer(hidden).detach()
    assert steps.dtype == whole.dtype == dtype
    exact = mamba_formula({name: p.detach().double() for name, p in layer.named_parameters()}, hidden.double(), "zoh")
    assert_as_accurate(steps, whole, exact, "steps")


@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
def test_autocast(input_dtype, device):
    layer = make_mamba("bilinear", device, torch.float32, bias=True)
    hidden = make_sequence(2, 33, 6, device=device, dtype=input_dtype)
    with torch.autocast(device, torch.bfloat16):
        actual = layer(hidden)
        native = plain_layers.mamba(layer, hidden)
        conv_state, ssm_state = layer.allocate_inference_cache(2, 33)
        steps = torch.cat([layer.step(hidden[:, t : t + 1], conv_state, ssm_state)[0] for t in range(33)], dim=1)
    exact = mamba_formula({name: p.double() for name, p in layer.named_parameters()}, hidden.double(), "bilinear")
    assert actual.dtype == steps.dtype == torch.bfloat16
    assert_as_accurate(actual.detach(), native.detach(), exact.detach(), "out")
    assert_as_accurate(steps, native.detach(), exact.detach(), "steps")
    for parameter, gradient in zip(layer.parameters(), gradients(actual, list(layer.parameters())), strict=True):
        assert gradient.dtype == parameter.dtype == torch.float32
        assert gradient.isfinite().all()


def test_autocast_of_the_ssm_alone(device):
    """Its input is not the result of a projection, so autocast has not lowered it."""
    layer = make_ssm("zoh", device, torch.float32)
    x, z = (make_sequence(2, 9, 6, device=device, dtype=torch.float32, seed=seed) for seed in (0, 1))
    state = layer.allocate_state(2)
    with torch.autocast(device, torch.bfloat16):
        whole = layer(x, z)
        steps = torch.stack([layer.step(x[:, t], state, z[:, t]) for t in range(9)], dim=1)
    assert whole.dtype == steps.dtype == torch.bfloat16 and state.dtype == torch.float32
    torch.testing.assert_close(steps, whole.detach(), rtol=2e-2, atol=2e-2)


def test_converted_to_double(device):
    layer = make_mamba("zoh", device, torch.float32)
    double = copy.deepcopy(layer).double()
    hidden = make_sequence(2, 9, 6, device=device)
    expected = mamba_formula(dict(double.named_parameters()), hidden, "zoh")
    torch.testing.assert_close(double(hidden), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer(hidden.float()).double(), expected, rtol=1e-4, atol=1e-5)


# ----- torch.compile


@pytest.mark.slow
def test_compiles_once_for_all_lengths(device):
    layer = make_mamba("foh", device)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for seqlen in (9, 5, 64):
        hidden = make_sequence(2, seqlen, 6, device=device).requires_grad_()
        leaves = [hidden, *layer.parameters()]
        actual, expected = compiled(hidden), layer(hidden)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
        for a, b in zip(gradients(actual, leaves), gradients(expected, leaves), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_compiled_step(device):
    layer = make_mamba("zoh", device)
    hidden = make_sequence(2, 4, 6, device=device)
    torch._dynamo.reset()
    step = torch.compile(layer.step, fullgraph=True, backend="aot_eager")
    states = layer.allocate_inference_cache(2, 4)
    steps = torch.cat([step(hidden[:, t : t + 1], *states)[0] for t in range(4)], dim=1)
    torch.testing.assert_close(steps, layer(hidden).detach(), rtol=1e-10, atol=1e-12)
