"""The layers of linear recurrences: values and gradients as their formulas, calls as torch.nn.GRU's, steps, packing."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn as nn
from helpers import assert_as_accurate, says
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ssm_kernels.nn import Liquid, MinGRU, MinLSTM

OPERATOR = "linear_scan"

IN, HIDDEN = 5, 6

# By name; all but the constructor's common arguments.
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "mingru": MinGRU,
    "mingru_g": functools.partial(MinGRU, candidate_activation="g"),
    "mingru_tanh": functools.partial(MinGRU, candidate_activation="tanh"),
    "minlstm": MinLSTM,
    "minlstm_g": functools.partial(MinLSTM, candidate_activation="g"),
    "minlstm_tanh": functools.partial(MinLSTM, candidate_activation="tanh"),
    "liquid": Liquid,
    "liquid_linear": functools.partial(Liquid, candidate_activation=None),
    "liquid_constant_tau": functools.partial(Liquid, input_dependent_tau=False),
}
# One of each recurrence, where its options do not matter.
PLAIN = ("mingru", "minlstm", "liquid")


def make_layer(name: str, device: str = "cpu", dtype: torch.dtype = torch.float64, **kwargs) -> nn.Module:
    """The same layer on every device."""
    torch.manual_seed(0)
    return LAYERS[name](IN, HIDDEN, dtype=dtype, **kwargs).to(device)


def make(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def activation(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    return {
        None: lambda x: x,
        "tanh": lambda x: 2 / (1 + torch.exp(-2 * x)) - 1,
        "g": lambda x: torch.where(x >= 0, x + 0.5, 1 / (1 + torch.exp(-x))),
    }[layer.candidate_activation]


def formula_step(layer: nn.Module, p: dict[str, Tensor], name: str, x: Tensor, h: Tensor, dt: Tensor | float) -> Tensor:
    """The next state of one layer and direction, from its parameters: ``x`` (batch, inputs), ``h`` (batch, hidden)."""
    projected = x @ p[f"weight_ih_{name}"].T + p.get(f"bias_ih_{name}", 0)
    parts = projected.split(layer.hidden_size, dim=-1)
    g = activation(layer)
    if isinstance(layer, MinGRU):
        z = 1 / (1 + torch.exp(-parts[0]))
        return (1 - z) * h + z * g(parts[1])
    if isinstance(layer, MinLSTM):
        f, i = (1 / (1 + torch.exp(-part)) for part in parts[:2])
        return f / (f + i) * h + i / (f + i) * g(parts[2])
    raw_tau = parts[1] if layer.input_dependent_tau else p[f"raw_tau_{name}"]
    tau = 1e-3 + torch.where(raw_tau > 20, raw_tau, torch.log1p(torch.exp(raw_tau)))  # where torch's softplus is the identity
    decay = torch.exp(-dt / tau)
    return g(parts[0]) * (1 - decay) + h * decay


def formula(
    layer: nn.Module, p: dict[str, Tensor], x: Tensor, h_0: Tensor | None = None, dt: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """``output`` and ``h_n`` of a sequence (seqlen, batch, channels) by loops over layers, directions and time."""
    suffixes = ("", "_reverse") if layer.bidirectional else ("",)
    last_states = []
    for index in range(layer.num_layers):
        outputs = []
        for suffix in suffixes:
            zero = x.new_zeros(x.shape[1], layer.hidden_size)
            h = zero if h_0 is None else h_0[len(last_states)]
            states = {}
            for t in reversed(range(len(x))) if suffix else range(len(x)):
                dt_t = dt[t][:, None] if isinstance(dt, Tensor) else dt
                h = states[t] = formula_step(layer, p, f"l{index}{suffix}", x[t], h, dt_t)
            outputs.append(torch.stack([states[t] for t in range(len(x))]))
            last_states.append(h)
        x = torch.cat(outputs, dim=-1)
    return x, torch.stack(last_states)


def gradients(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    cotangents = [make(*o.shape, device=o.device, dtype=o.dtype, seed=5 + i) for i, o in enumerate(outputs)]
    return torch.autograd.grad(outputs, leaves, cotangents)


def assert_all_close(actual, expected, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


# ----- constructor, parameters, shapes


@pytest.mark.parametrize("layer_type", [MinGRU, MinLSTM, Liquid])
def test_constructor_is_that_of_gru(layer_type):
    parameters = list(inspect.signature(layer_type).parameters.values())
    positional = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    empty = inspect.Parameter.empty
    defaults = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}
    assert list(positional.items()) == [("input_size", empty), ("hidden_size", empty), *defaults.items()]
    keyword_only = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert {"candidate_activation", "device", "dtype"} <= keyword_only
    assert not [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name, parts", [("mingru", 2), ("minlstm", 3), ("liquid", 2), ("liquid_constant_tau", 1)])
def test_parameters(name, parts, bias):
    if name == "liquid" and not bias:
        pytest.skip("input-dependent time constants need a bias")
    layer = make_layer(name, num_layers=2, bidirectional=True, bias=bias, dtype=torch.bfloat16)
    expected = {}
    for index, inputs in ((0, IN), (1, 2 * HIDDEN)):
        for suffix in ("", "_reverse"):
            expected[f"weight_ih_l{index}{suffix}"] = (parts * HIDDEN, inputs)
            if bias:
                expected[f"bias_ih_l{index}{suffix}"] = (parts * HIDDEN,)
            if name == "liquid_constant_tau":
                expected[f"raw_tau_l{index}{suffix}"] = (HIDDEN,)
    assert {key: tuple(value.shape) for key, value in layer.state_dict().items()} == expected
    for key, value in layer.named_parameters():
        is_tau = key.startswith("raw_tau")
        assert value.dtype == (torch.float32 if is_tau else torch.bfloat16)
        assert getattr(value, "_no_weight_decay", False) == is_tau
        assert value.isfinite().all() and value.unique().numel() > 1
        # In bfloat16 a bound may be rounded up.
        assert is_tau or name == "liquid" or value.abs().max() <= 1.01 * HIDDEN**-0.5


def test_initial_time_constants():
    torch.manual_seed(0)
    for options in ({}, {"input_dependent_tau": False}):
        layer = Liquid(3, 2000, tau_init=(0.5, 50.0), **options)
        raw_tau = layer.raw_tau_l0 if options else layer.bias_ih_l0[2000:]
        # The logarithm is uniform: its quartiles are where a uniform variable's are.
        position = ((nn.functional.softplus(raw_tau) + 1e-3).log() - math.log(0.5)) / math.log(100)
        assert -1e-3 < position.min() < 0.01 and 0.99 < position.max() < 1 + 1e-3
        quartiles = torch.quantile(position, torch.tensor([0.25, 0.5, 0.75]))
        torch.testing.assert_close(quartiles, torch.tensor([0.25, 0.5, 0.75]), rtol=0, atol=0.05)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_shapes_are_those_of_gru(name, num_layers, bidirectional, batch_first, device):
    options = {"num_layers": num_layers, "bidirectional": bidirectional, "batch_first": batch_first}
    layer = make_layer(name, device, **options)
    gru = nn.GRU(IN, HIDDEN, dtype=torch.float64, **options).to(device)
    for shape, batch in (((4, 3, IN), (3 if not batch_first else 4,)), ((1, 1, IN), (1,)), ((4, IN), ())):
        h_0 = make(num_layers * (1 + bidirectional), *batch, HIDDEN, device=device, seed=1)
        x = make(*shape, device=device)
        for arguments in ((x,), (x, h_0)):
            actual, expected = layer(*arguments), gru(*arguments)
            assert [tuple(a.shape) for a in actual] == [tuple(e.shape) for e in expected]
            assert all(a.dtype == torch.float64 for a in actual)


@pytest.mark.parametrize("name", PLAIN)
def test_layouts_of_the_input_agree(name, device):
    time_first = make_layer(name, device, num_layers=2, bidirectional=True)
    batch_first = make_layer(name, device, num_layers=2, bidirectional=True, batch_first=True)
    x, h_0 = make(7, 3, IN, device=device), make(4, 3, HIDDEN, device=device, seed=1)
    output, h_n = time_first(x, h_0)
    other, other_h_n = batch_first(x.transpose(0, 1), h_0)
    assert_all_close((other.transpose(0, 1), other_h_n), (output, h_n))
    for b in range(3):
        for layer in (time_first, batch_first):
            assert_all_close(layer(x[:, b], h_0[:, b]), (output[:, b], h_n[:, b]))


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (1, 1)])
def test_empty_and_short_sequences(name, shape, device):
    layer = make_layer(name, device, num_layers=2)
    h_0 = make(2, shape[1], HIDDEN, device=device, seed=1)
    output, h_n = layer(make(*shape, IN, device=device), h_0)
    assert output.shape == (*shape, HIDDEN) and h_n.shape == h_0.shape
    if shape[0] == 0:
        torch.testing.assert_close(h_n, h_0, rtol=0, atol=0)
    (output.sum() + h_n.sum()).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())


# ----- values and gradients


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_its_formula(name, bidirectional, device):
    layer = make_layer(name, device, num_layers=2, bidirectional=bidirectional)
    x = make(9, 2, IN, device=device).requires_grad_()
    h_0 = make(2 * (1 + bidirectional), 2, HIDDEN, device=device, seed=1).requires_grad_()
    parameters = dict(layer.named_parameters())
    expected = formula(layer, parameters, x, h_0)
    actual = layer(x, h_0)
    assert_all_close(actual, expected)
    leaves = [x, h_0, *parameters.values()]
    for what, a, b in zip(["x", "h_0", *parameters], gradients(actual, leaves), gradients(expected, leaves), strict=True):
        assert b.abs().max() > 0, what
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda m, what=what: f"{what}: {m}")


@pytest.mark.parametrize("name", ["mingru", "minlstm", "liquid_constant_tau"])
def test_without_bias_and_state(name, device):
    layer = make_layer(name, device, bias=False)
    x = make(6, 2, IN, device=device)
    assert_all_close(layer(x), formula(layer, dict(layer.named_parameters()), x))


@pytest.mark.parametrize("layout", ["time_first", "batch_first", "one"])
@pytest.mark.parametrize("name", ["liquid", "liquid_constant_tau"])
def test_liquid_at_irregular_times(name, layout, device):
    layer = make_layer(name, device, num_layers=2, bidirectional=True, batch_first=layout == "batch_first")
    x = make(7, 2, IN, device=device).requires_grad_()
    dt = (make(7, 2, device=device, seed=1).abs() * 3).requires_grad_()
    expected = formula(layer, dict(layer.named_parameters()), x, dt=dt)
    if layout == "one":
        parts = [layer(x[:, b], dt=dt[:, b]) for b in range(2)]
        actual = tuple(torch.stack(results, dim=1) for results in zip(*parts, strict=True))
    elif layout == "batch_first":
        output, h_n = layer(x.transpose(0, 1), dt=dt.transpose(0, 1))
        actual = output.transpose(0, 1), h_n
    else:
        actual = layer(x, dt=dt)
    assert_all_close(actual, expected)
    leaves = [x, dt, *layer.parameters()]
    assert_all_close(gradients(actual, leaves), gradients(expected, leaves))


def test_liquid_is_exact_in_time(device):
    """A held input: two steps of half the length are one step, and a step of length 0 is none."""
    layer = make_layer("liquid", device)
    x = make(5, 2, IN, device=device)
    whole, end = layer(x, dt=0.8)
    halves, halves_end = layer(x.repeat_interleave(2, dim=0), dt=0.4)
    assert_all_close((halves[1::2], halves_end), (whole, end))
    dt = torch.tensor([0.8, 0.0], device=device, dtype=torch.float64).repeat(5)[:, None].expand(10, 2)
    other = torch.stack([x, make(5, 2, IN, device=device, seed=3)], dim=1).flatten(0, 1)
    still, still_end = layer(other, dt=dt)
    assert_all_close((still[1::2], still_end), (whole, end))


@pytest.mark.parametrize("name", PLAIN)
def test_bidirectional_is_two_unidirectional(name, device):
    both = make_layer(name, device, bidirectional=True)
    ways = [make_layer(name, device) for _ in range(2)]
    state_dict = both.state_dict()
    for way, suffix in zip(ways, ("", "_reverse"), strict=True):
        way.load_state_dict({key: state_dict[key + suffix] for key in way.state_dict()})
    x, h_0 = make(7, 3, IN, device=device), make(2, 3, HIDDEN, device=device, seed=1)
    forward, forward_end = ways[0](x, h_0[:1])
    backward, backward_end = ways[1](x.flip(0), h_0[1:])
    expected = torch.cat([forward, backward.flip(0)], dim=-1), torch.cat([forward_end, backward_end])
    assert_all_close(both(x, h_0), expected)
    torch.testing.assert_close(both(x, h_0)[0][0, :, HIDDEN:], backward_end[0])


@pytest.mark.parametrize("name", PLAIN)
def test_the_future_does_not_matter(name, device):
    layer = make_layer(name, device, num_layers=2)
    x = make(9, 2, IN, device=device)
    changed = torch.cat([x[:5], make(4, 2, IN, device=device, seed=1)])
    before, after = layer(x)[0], layer(changed)[0]
    torch.testing.assert_close(before[:5], after[:5], rtol=1e-12, atol=1e-14)
    assert (before[5:] - after[5:]).abs().amax(dim=-1).min() > 1e-9


# ----- steps and packed sequences


@pytest.mark.parametrize("name", LAYERS)
def test_steps_are_the_whole_sequence(name, device):
    layer = make_layer(name, device, num_layers=2)
    x, h_0 = make(8, 3, IN, device=device), make(2, 3, HIDDEN, device=device, seed=1)
    whole, h_n = layer(x, h_0)
    for start in (0, 1, 5):
        _, state = layer(x[:start], h_0)
        for t in range(start, 8):
            output, state = layer.step(x[t], state)
            torch.testing.assert_close(output, whole[t], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(state, h_n, rtol=1e-10, atol=1e-12)
    fresh = layer.step(x[0])
    assert_all_close(fresh, (layer(x[:1])[0][0], layer(x[:1])[1]))


@pytest.mark.parametrize("name", ["liquid", "liquid_constant_tau"])
def test_liquid_steps_at_irregular_times(name, device):
    layer = make_layer(name, device, num_layers=2)
    x, dt = make(6, 3, IN, device=device), make(6, 3, device=device, seed=1).abs()
    whole, h_n = layer(x, dt=dt)
    state = None
    for t in range(6):
        output, state = layer.step(x[t], state, dt=dt[t])
        torch.testing.assert_close(output, whole[t], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, h_n, rtol=1e-10, atol=1e-12)
    assert_all_close(layer.step(x[0], dt=0.3), layer.step(x[0], dt=torch.full((3,), 0.3, device=device, dtype=torch.float64)))


@pytest.mark.parametrize("form", ["one", "batch_first", "time_first"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_packed_is_one_by_one(name, bidirectional, form, device):
    layer = make_layer(name, device, num_layers=2, bidirectional=bidirectional, batch_first=form == "batch_first")
    bounds = [0, 4, 4, 5, 11]
    x = make(11, IN, device=device).requires_grad_()
    h_0 = make(2 * (1 + bidirectional), 4, HIDDEN, device=device, seed=1).requires_grad_()
    dt = {"dt": make(11, device=device, seed=2).abs()} if name == "liquid" else {}
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    axis = {"one": None, "batch_first": 0, "time_first": 1}[form]
    if axis is None:
        output, h_n = layer(x, h_0, cu_seqlens=cu_seqlens, **dt)
    else:
        batched_dt = {key: value.unsqueeze(axis) for key, value in dt.items()}
        output, h_n = layer(x.unsqueeze(axis), h_0, cu_seqlens=cu_seqlens, **batched_dt)
        output = output.squeeze(axis)
    singles = []
    for i, (begin, end) in enumerate(pairwise(bounds)):
        singles.append(layer(x[begin:end], h_0[:, i], **{key: value[begin:end] for key, value in dt.items()}))
    expected = torch.cat([single for single, _ in singles]), torch.stack([state for _, state in singles], dim=1)
    assert_all_close((output, h_n), expected)
    leaves = [x, h_0, *layer.parameters()]
    assert_all_close(gradients((output, h_n), leaves), gradients(expected, leaves))


# ----- training


@pytest.mark.parametrize("name", PLAIN)
def test_dropout_only_in_training(name, device):
    with_dropout, without = (make_layer(name, device, num_layers=2, dropout=p) for p in (0.5, 0.0))
    x = make(6, 4, IN, device=device)
    expected = without(x)
    with_dropout.eval()
    assert_all_close(with_dropout(x), expected)
    assert_all_close(with_dropout.step(x[0]), without.step(x[0]))
    with_dropout.train()
    output, h_n = with_dropout(x)
    assert (output - expected[0]).abs().max() > 1e-3
    # It acts on what the second layer reads, not on the first layer itself.
    torch.testing.assert_close(h_n[0], expected[1][0])
    assert (h_n[1] - expected[1][1]).abs().max() > 1e-3
    everything = make_layer(name, device, num_layers=2, dropout=1.0)
    assert torch.equal(everything(x)[0], everything(make(6, 4, IN, device=device, seed=9))[0])


@pytest.mark.parametrize("name", LAYERS)
def test_state_dict_round_trip(name, tmp_path, device):
    layer = make_layer(name, device, num_layers=2, bidirectional=True)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    torch.manual_seed(1)
    other = LAYERS[name](IN, HIDDEN, num_layers=2, bidirectional=True, dtype=torch.float64, device=device)
    x = make(4, 2, IN, device=device)
    assert (other(x)[0] - layer(x)[0]).abs().max() > 1e-3
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True), strict=True)
    torch.testing.assert_close(other(x), layer(x), rtol=0, atol=0)
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_reach_every_parameter(name, device):
    layer = make_layer(name, device, num_layers=2, bidirectional=True)
    layer(make(5, 2, IN, device=device))[0].square().sum().backward()
    for key, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 0, key


@pytest.mark.parametrize("name", PLAIN)
def test_made_on_meta_and_initialized_later(name):
    torch.manual_seed(0)
    layer = LAYERS[name](IN, HIDDEN, num_layers=2, device="meta").to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.constant_(parameter, math.nan)
    layer.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    torch.manual_seed(0)
    expected = LAYERS[name](IN, HIDDEN, num_layers=2).state_dict()
    torch.testing.assert_close(dict(layer.state_dict()), dict(expected), rtol=0, atol=0)


# ----- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*PLAIN, "liquid_constant_tau"])
def test_16_bit_layer(name, dtype, device):
    layer = make_layer(name, device, dtype)
    x, h_0 = make(33, 2, IN, device=device, dtype=dtype), make(1, 2, HIDDEN, device=device, dtype=torch.float32, seed=1)
    output, h_n = layer(x, h_0)
    assert output.dtype == dtype and h_n.dtype == torch.float32
    parameters = dict(layer.named_parameters())
    exact, exact_h_n = formula(layer, {key: p.double() for key, p in parameters.items()}, x.double(), h_0.double())
    native, native_h_n = formula(layer, {key: p.to(dtype) for key, p in parameters.items()}, x, h_0.to(dtype))
    assert_as_accurate(output.detach(), native.detach(), exact.detach(), "output")
    assert_as_accurate(h_n.detach(), native_h_n.detach().float(), exact_h_n.detach(), "h_n")
    state, steps = h_0, []
    for x_t in x:
        step, state = layer.step(x_t, state)
        steps.append(step)
    assert steps[0].dtype == dtype and state.dtype == torch.float32
    assert_as_accurate(torch.stack(steps).detach(), native.detach(), exact.detach(), "steps")


@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*PLAIN, "liquid_constant_tau"])
def test_autocast(name, input_dtype, device):
    layer = make_layer(name, device, torch.float32, num_layers=2, batch_first=True)
    x = make(2, 33, IN, device=device, dtype=input_dtype)
    with torch.autocast(device, torch.bfloat16):
        output, h_n = layer(x)
        state, steps = None, []
        for t in range(33):
            step, state = layer.step(x[:, t], state)
            steps.append(step)
        parameters = {key: p.to(torch.bfloat16) for key, p in layer.named_parameters()}
        native, _ = formula(layer, parameters, x.transpose(0, 1).to(torch.bfloat16))
    assert output.dtype == steps[0].dtype == torch.bfloat16 and h_n.dtype == state.dtype == torch.float32
    exact, _ = formula(layer, {key: p.double() for key, p in layer.named_parameters()}, x.transpose(0, 1).double())
    native, exact = native.to(torch.bfloat16).detach().transpose(0, 1), exact.detach().transpose(0, 1)
    assert_as_accurate(output.detach(), native, exact, "output")
    assert_as_accurate(torch.stack(steps, dim=1).detach(), native, exact, "steps")
    output.float().square().sum().backward()
    for key, parameter in layer.named_parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all(), key


def test_states_of_another_dtype_are_converted(device):
    layer = make_layer("mingru", device, torch.float32)
    x, h_0 = make(3, 2, IN, device=device, dtype=torch.float32), make(1, 2, HIDDEN, device=device)
    assert_all_close(layer(x, h_0), layer(x, h_0.float()))
    assert_all_close(layer.step(x[0], h_0), layer.step(x[0], h_0.float()))


# ----- torch.compile


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_compiles_once_for_all_lengths(name, device):
    layer = make_layer(name, device, num_layers=2, bidirectional=True)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for seqlen in (9, 5, 64):
        x = make(seqlen, 2, IN, device=device).requires_grad_()
        leaves = [x, *layer.parameters()]
        actual, expected = compiled(x), layer(x)
        assert_all_close(actual, expected)
        assert_all_close(gradients(actual, leaves), gradients(expected, leaves))
        graphs.append(counter.frame_count)
    # The first call may be traced twice, as a module's float (the dropout) is a variable before it is found to be a constant.
    assert graphs[0] == graphs[-1] <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_compiled_step(name, device):
    layer = make_layer(name, device, num_layers=2)
    x = make(4, 2, IN, device=device)
    torch._dynamo.reset()
    step = torch.compile(layer.step, fullgraph=True, backend="aot_eager")
    state, steps = x.new_zeros(2, 2, HIDDEN), []
    for x_t in x:
        output, state = step(x_t, state)
        steps.append(output)
    assert_all_close((torch.stack(steps), state), layer(x))


# ----- errors


@pytest.mark.parametrize("layer_type", [MinGRU, MinLSTM, Liquid])
def test_bad_arguments(layer_type):
    name = layer_type.__name__
    with pytest.raises(ValueError, match=says(f"{name}: unknown candidate_activation 'relu', expected one of [None, ")):
        layer_type(3, 4, candidate_activation="relu")
    for what in ("input_size", "hidden_size", "num_layers"):
        with pytest.raises(ValueError, match=f"{name}: expected {what} to be at least 1, got 0"):
            layer_type(**({"input_size": 3, "hidden_size": 4} | {what: 0}))
    with pytest.raises(ValueError, match=f"{name}: expected dropout from 0 to 1, got 1.5"):
        layer_type(3, 4, 2, dropout=1.5)
    with pytest.warns(UserWarning, match="dropout acts between layers, and there is only one"):
        layer_type(3, 4, dropout=0.5)


def test_bad_arguments_of_liquid():
    with pytest.raises(ValueError, match="input-dependent time constants need bias=True"):
        Liquid(3, 4, bias=False)
    for tau_init in ((2.0, 1.0), (0.0, 1.0)):
        with pytest.raises(ValueError, match=says("tau_init", f"got {tau_init}")):
            Liquid(3, 4, tau_init=tau_init)


@pytest.mark.parametrize("name", PLAIN)
def test_bad_calls(name):
    layer = make_layer(name, num_layers=2)
    x = make(4, 3, IN)
    for bad in (make(4, 3, IN + 1), make(2, 4, 3, IN), make(IN)):
        with pytest.raises(
            ValueError, match=says("expected input of shape (seqlen, batch, input_size)", f"got {list(bad.shape)}")
        ):
            layer(bad)
    with pytest.raises(ValueError, match=says("hx of shape", "batch", "= [2, 3, 6], got [2, 4, 6]")):
        layer(x, make(2, 4, HIDDEN))
    with pytest.raises(ValueError, match=says("hx of shape", "= [2, 6], got [2, 1, 6]")):
        layer(x[:, 0], make(2, 1, HIDDEN))
    with pytest.raises(ValueError, match=says("state of shape", "= [2, 3, 6], got [1, 3, 6]")):
        layer.step(x[0], make(1, 3, HIDDEN))
    with pytest.raises(
        ValueError, match=says("step: expected x of shape (batch, input_size) with input_size = 5, got [4, 3, 5]")
    ):
        layer.step(x)
    with pytest.raises(ValueError, match="expected batch 1 with cu_seqlens, got 3"):
        layer(x, cu_seqlens=torch.tensor([0, 2, 4]))
    with pytest.raises(ValueError, match=says("step: a bidirectional layer needs the whole sequence")):
        make_layer(name, bidirectional=True).step(x[0])


@pytest.mark.parametrize("name", PLAIN)
def test_arguments_that_are_no_tensors(name):
    layer, x = make_layer(name), make(4, 1, IN)
    h_0 = make(1, 1, HIDDEN)
    with pytest.raises(TypeError, match=says("expected hx to be a tensor, got tuple")):
        layer(x, (h_0, h_0))
    with pytest.raises(TypeError, match=says("expected state to be a tensor, got tuple")):
        layer.step(x[0], (h_0, h_0))
    with pytest.raises(TypeError, match=says("expected cu_seqlens to be a tensor, got list")):
        layer(x, cu_seqlens=[0, 4])
    for shape in ((), (2, 1)):
        with pytest.raises(ValueError, match=says("expected cu_seqlens of shape (sequences + 1,), got ", str([*shape]))):
            layer(x, cu_seqlens=torch.zeros(shape, dtype=torch.int32))
    if name == "liquid":
        for dt in (None, "1"):
            for call in (layer, lambda x, dt: layer.step(x[0], dt=dt)):
                with pytest.raises(TypeError, match=says("expected dt to be a number or a tensor")):
                    call(x, dt=dt)


@pytest.mark.parametrize("name", PLAIN)
def test_flatten_parameters_is_there_for_code_of_gru(name):
    layer = make_layer(name)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    assert layer.flatten_parameters() is None
    torch.testing.assert_close(dict(layer.state_dict()), before, rtol=0, atol=0)


def test_bad_steps_of_liquid():
    layer = make_layer("liquid", batch_first=True)
    x = make(3, 4, IN)
    for dt in (torch.ones(4, 3), torch.ones(3, 4, 1), torch.ones(())):
        with pytest.raises(ValueError, match=says("dt", "[3, 4]", f"got {list(dt.shape)}")):
            layer(x, dt=dt)
    with pytest.raises(ValueError, match=says("dt", "[3]", "got [3, 1]")):
        layer.step(x[:, 0], dt=torch.ones(3, 1))
