"""The layers of linear recurrences: values and gradients as their formulas, calls as torch.nn.GRU's, steps, packing."""

from __future__ import annotations

import inspect
import math
from itertools import pairwise

import pytest
import torch
import torch.nn as nn
from helpers import assert_as_accurate, says
from layer_helpers import (
    HIDDEN,
    IN,
    LAYERS,
    RECURRENCES,
    assert_all_close,
    assert_same_gradients,
    decode,
    every_recurrence,
    make_layer,
    make_sequence,
    variants_of,
)
from plain_layers import parameters_of, recurrent

from ssm_kernels.nn import Liquid

OPERATOR = "linear_scan"

# ----- constructor, parameters, shapes


@every_recurrence
def test_constructor_is_that_of_gru(name):
    parameters = list(inspect.signature(LAYERS[name].type).parameters.values())
    positional = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    empty = inspect.Parameter.empty
    defaults = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}
    assert list(positional.items()) == [("input_size", empty), ("hidden_size", empty), *defaults.items()]
    keyword_only = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert {"candidate_activation", "device", "dtype"} <= keyword_only
    assert not [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name, parts", [("MinGRU", 2), ("MinLSTM", 3), ("Liquid", 2), ("Liquid-constant_tau", 1)])
def test_parameters(name, parts, bias):
    if name == "Liquid" and not bias:
        pytest.skip("input-dependent time constants need a bias")
    layer = make_layer(name, bidirectional=True, bias=bias, dtype=torch.bfloat16)
    expected = {}
    for index, inputs in ((0, IN), (1, 2 * HIDDEN)):
        for suffix in ("", "_reverse"):
            expected[f"weight_ih_l{index}{suffix}"] = (parts * HIDDEN, inputs)
            if bias:
                expected[f"bias_ih_l{index}{suffix}"] = (parts * HIDDEN,)
            if name == "Liquid-constant_tau":
                expected[f"raw_tau_l{index}{suffix}"] = (HIDDEN,)
    assert {key: tuple(value.shape) for key, value in layer.state_dict().items()} == expected
    for key, value in layer.named_parameters():
        is_tau = key.startswith("raw_tau")
        assert value.dtype == (torch.float32 if is_tau else torch.bfloat16)
        assert getattr(value, "_no_weight_decay", False) == is_tau
        assert value.isfinite().all() and value.unique().numel() > 1
        # In bfloat16 a bound may be rounded up.
        assert is_tau or name == "Liquid" or value.abs().max() <= 1.01 * HIDDEN**-0.5


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


@every_recurrence
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_shapes_are_those_of_gru(name, num_layers, bidirectional, batch_first, device):
    options = {"num_layers": num_layers, "bidirectional": bidirectional, "batch_first": batch_first}
    layer = make_layer(name, device, **options)
    gru = nn.GRU(IN, HIDDEN, dtype=torch.float64, **options).to(device)
    for shape, batch in (((4, 3, IN), (3 if not batch_first else 4,)), ((1, 1, IN), (1,)), ((4, IN), ())):
        h_0 = make_sequence(num_layers * (1 + bidirectional), *batch, HIDDEN, device=device, seed=1)
        x = make_sequence(*shape, device=device)
        for arguments in ((x,), (x, h_0)):
            actual, expected = layer(*arguments), gru(*arguments)
            assert [tuple(a.shape) for a in actual] == [tuple(e.shape) for e in expected]
            assert all(a.dtype == torch.float64 for a in actual)


@every_recurrence
@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (1, 1)])
def test_empty_and_short_sequences(name, shape, device):
    layer = make_layer(name, device)
    h_0 = make_sequence(2, shape[1], HIDDEN, device=device, seed=1)
    output, h_n = layer(make_sequence(*shape, IN, device=device), h_0)
    assert output.shape == (*shape, HIDDEN) and h_n.shape == h_0.shape
    if shape[0] == 0:
        torch.testing.assert_close(h_n, h_0, rtol=0, atol=0)
    (output.sum() + h_n.sum()).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())


# ----- values and gradients


# Every layer, and Liquid at irregular times.
every_timing = pytest.mark.parametrize(
    "name, has_dt", [*((name, False) for name in variants_of(*RECURRENCES)), ("Liquid", True), ("Liquid-constant_tau", True)]
)


@every_timing
@pytest.mark.parametrize("layout", ["time_first", "batch_first", "one"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_layer_is_its_formula(name, has_dt, bidirectional, layout, device):
    layer = make_layer(name, device, bidirectional=bidirectional, batch_first=layout == "batch_first")
    x = make_sequence(9, 2, IN, device=device).requires_grad_()
    h_0 = make_sequence(2 * (1 + bidirectional), 2, HIDDEN, device=device, seed=1).requires_grad_()
    dt = {"dt": (make_sequence(9, 2, device=device, seed=1).abs() * 3).requires_grad_()} if has_dt else {}
    if layout == "one":
        parts = [layer(x[:, b], h_0[:, b], **{key: value[:, b] for key, value in dt.items()}) for b in range(2)]
        actual = tuple(torch.stack(results, dim=1) for results in zip(*parts, strict=True))
    elif layout == "batch_first":
        output, h_n = layer(x.transpose(0, 1), h_0, **{key: value.transpose(0, 1) for key, value in dt.items()})
        actual = output.transpose(0, 1), h_n
    else:
        actual = layer(x, h_0, **dt)
    expected = recurrent(layer, x, h_0, **dt)
    assert_all_close(actual, expected)
    assert_same_gradients(actual, expected, {"x": x, "h_0": h_0, **dt} | parameters_of(layer))


@pytest.mark.parametrize("name", ["MinGRU", "MinLSTM", "Liquid-constant_tau"])
def test_without_bias_and_state(name, device):
    layer = make_layer(name, device, bias=False, num_layers=1)
    x = make_sequence(6, 2, IN, device=device)
    assert_all_close(layer(x), recurrent(layer, x))


def test_liquid_is_exact_in_time(device):
    """A held input: two steps of half the length are one step, and a step of length 0 is none."""
    layer = make_layer("Liquid", device, num_layers=1)
    x = make_sequence(5, 2, IN, device=device)
    whole, end = layer(x, dt=0.8)
    halves, halves_end = layer(x.repeat_interleave(2, dim=0), dt=0.4)
    assert_all_close((halves[1::2], halves_end), (whole, end))
    dt = torch.tensor([0.8, 0.0], device=device, dtype=torch.float64).repeat(5)[:, None].expand(10, 2)
    other = torch.stack([x, make_sequence(5, 2, IN, device=device, seed=3)], dim=1).flatten(0, 1)
    still, still_end = layer(other, dt=dt)
    assert_all_close((still[1::2], still_end), (whole, end))


@every_recurrence
def test_bidirectional_is_two_unidirectional(name, device):
    both = make_layer(name, device, bidirectional=True, num_layers=1)
    ways = [make_layer(name, device, num_layers=1) for _ in range(2)]
    state_dict = both.state_dict()
    for way, suffix in zip(ways, ("", "_reverse"), strict=True):
        way.load_state_dict({key: state_dict[key + suffix] for key in way.state_dict()})
    x, h_0 = make_sequence(7, 3, IN, device=device), make_sequence(2, 3, HIDDEN, device=device, seed=1)
    forward, forward_end = ways[0](x, h_0[:1])
    backward, backward_end = ways[1](x.flip(0), h_0[1:])
    expected = torch.cat([forward, backward.flip(0)], dim=-1), torch.cat([forward_end, backward_end])
    assert_all_close(both(x, h_0), expected)
    torch.testing.assert_close(both(x, h_0)[0][0, :, HIDDEN:], backward_end[0])


# ----- steps and packed sequences


@every_timing
def test_steps_are_the_whole_sequence(name, has_dt, device):
    layer = make_layer(name, device)
    x, h_0 = make_sequence(8, 3, IN, device=device), make_sequence(2, 3, HIDDEN, device=device, seed=1)
    dt = {"dt": make_sequence(8, 3, device=device, seed=1).abs()} if has_dt else {}
    whole, h_n = layer(x, h_0, **dt)
    for start in (0, 1, 5):
        _, state = layer(x[:start], h_0, **{key: value[:start] for key, value in dt.items()})
        for t in range(start, 8):
            output, state = layer.step(x[t], state, **{key: value[t] for key, value in dt.items()})
            torch.testing.assert_close(output, whole[t], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(state, h_n, rtol=1e-10, atol=1e-12)
    fresh = layer.step(x[0])
    assert_all_close(fresh, (layer(x[:1])[0][0], layer(x[:1])[1]))
    if has_dt:
        equal = torch.full((3,), 0.3, device=device, dtype=torch.float64)
        assert_all_close(layer.step(x[0], dt=0.3), layer.step(x[0], dt=equal))


@pytest.mark.parametrize("form", ["one", "batch_first", "time_first"])
@pytest.mark.parametrize("bidirectional", [False, True])
@every_recurrence
def test_packed_is_one_by_one(name, bidirectional, form, device):
    layer = make_layer(name, device, bidirectional=bidirectional, batch_first=form == "batch_first")
    bounds = [0, 4, 4, 5, 11]
    x = make_sequence(11, IN, device=device).requires_grad_()
    h_0 = make_sequence(2 * (1 + bidirectional), 4, HIDDEN, device=device, seed=1).requires_grad_()
    dt = {"dt": make_sequence(11, device=device, seed=2).abs()} if name == "Liquid" else {}
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
    assert_same_gradients((output, h_n), expected, {"x": x, "h_0": h_0} | parameters_of(layer))


# ----- training


@every_recurrence
def test_dropout_only_in_training(name, device):
    with_dropout, without = (make_layer(name, device, dropout=p) for p in (0.5, 0.0))
    x = make_sequence(6, 4, IN, device=device)
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
    everything = make_layer(name, device, dropout=1.0)
    assert torch.equal(everything(x)[0], everything(make_sequence(6, 4, IN, device=device, seed=9))[0])


# ----- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*RECURRENCES, "Liquid-constant_tau"])
def test_16_bit_layer(name, dtype, device):
    layer = make_layer(name, device, dtype, num_layers=1)
    x = make_sequence(33, 2, IN, device=device, dtype=dtype)
    h_0 = make_sequence(1, 2, HIDDEN, device=device, dtype=torch.float32, seed=1)
    output, h_n = layer(x, h_0)
    assert output.dtype == dtype and h_n.dtype == torch.float32
    exact, exact_h_n = recurrent(layer, x.double(), h_0.double(), parameters_of(layer, torch.float64))
    native, native_h_n = recurrent(layer, x, h_0.to(dtype), parameters_of(layer, dtype))
    assert_as_accurate(output.detach(), native.detach(), exact.detach(), "output")
    assert_as_accurate(h_n.detach(), native_h_n.detach().float(), exact_h_n.detach(), "h_n")
    state, steps = h_0, []
    for x_t in x:
        step, state = layer.step(x_t, state)
        steps.append(step)
    assert steps[0].dtype == dtype and state.dtype == torch.float32
    assert_as_accurate(torch.stack(steps).detach(), native.detach(), exact.detach(), "steps")


@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*RECURRENCES, "Liquid-constant_tau"])
def test_autocast(name, input_dtype, device):
    layer = make_layer(name, device, torch.float32, batch_first=True)
    x = make_sequence(2, 33, IN, device=device, dtype=input_dtype)
    with torch.autocast(device, torch.bfloat16):
        output, h_n = layer(x)
        steps, (_, state) = decode(layer, x), layer.step(x[:, 0])
        native, _ = recurrent(layer, x.transpose(0, 1).to(torch.bfloat16), p=parameters_of(layer, torch.bfloat16))
    assert output.dtype == steps.dtype == torch.bfloat16 and h_n.dtype == state.dtype == torch.float32
    exact, _ = recurrent(layer, x.transpose(0, 1).double(), p=parameters_of(layer, torch.float64))
    native, exact = native.to(torch.bfloat16).detach().transpose(0, 1), exact.detach().transpose(0, 1)
    assert_as_accurate(output.detach(), native, exact, "output")
    assert_as_accurate(steps.detach(), native, exact, "steps")
    output.float().square().sum().backward()
    for key, parameter in layer.named_parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all(), key


@every_recurrence
def test_dtypes_of_states(name, device):
    """The layer's or that of its states; under autocast those that autocast casts. Others would lose digits or parts."""
    h_0 = make_sequence(1, 2, HIDDEN, device=device)
    refused = {
        torch.float32: (torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool),
        torch.bfloat16: (torch.float64, torch.float16, torch.complex64, torch.int64),
        torch.float64: (torch.float32, torch.complex128, torch.int64),
    }
    for dtype, others in refused.items():
        layer, x = make_layer(name, device, dtype, num_layers=1), make_sequence(3, 2, IN, device=device, dtype=dtype)
        wide = torch.promote_types(dtype, torch.float32)
        own = h_0.to(dtype)
        assert_all_close(layer(x, own), layer(x, own.to(wide)), 0, 0)
        assert_all_close(layer.step(x[0], own), layer.step(x[0], own.to(wide)), 0, 0)
        for other in others:
            message = says(f"expected hx of dtype {wide}", f", got {other}")
            with pytest.raises(RuntimeError, match=message):
                layer(x, h_0.to(other))
            with pytest.raises(RuntimeError, match=says(".step: expected state of dtype", f", got {other}")):
                layer.step(x[0], h_0.to(other))
    layer, x = make_layer(name, device, torch.float32, num_layers=1), make_sequence(3, 2, IN, device=device).float()
    with torch.autocast(device, torch.bfloat16):
        assert layer(x, h_0.bfloat16())[1].dtype == torch.float32
        for other in (torch.float64, torch.complex64):
            with pytest.raises(RuntimeError, match=says("expected hx of dtype torch.float32", f", got {other}")):
                layer(x, h_0.to(other))


@every_recurrence
def test_bad_calls(name):
    layer = make_layer(name)
    x = make_sequence(4, 3, IN)
    for bad in (make_sequence(4, 3, IN + 1), make_sequence(2, 4, 3, IN), make_sequence(IN)):
        with pytest.raises(
            ValueError, match=says("expected input of shape (seqlen, batch, input_size)", f"got {list(bad.shape)}")
        ):
            layer(bad)
    with pytest.raises(ValueError, match=says("hx of shape", "batch", "= [2, 3, 6], got [2, 4, 6]")):
        layer(x, make_sequence(2, 4, HIDDEN))
    with pytest.raises(ValueError, match=says("hx of shape", "= [2, 6], got [2, 1, 6]")):
        layer(x[:, 0], make_sequence(2, 1, HIDDEN))
    with pytest.raises(ValueError, match=says("state of shape", "= [2, 3, 6], got [1, 3, 6]")):
        layer.step(x[0], make_sequence(1, 3, HIDDEN))
    with pytest.raises(
        ValueError, match=says("step: expected x of shape (batch, input_size) with input_size = 5, got [4, 3, 5]")
    ):
        layer.step(x)
    with pytest.raises(ValueError, match="expected batch 1 with cu_seqlens, got 3"):
        layer(x, cu_seqlens=torch.tensor([0, 2, 4]))
    for shape in ((), (2, 1)):
        with pytest.raises(ValueError, match=says("expected cu_seqlens of shape (sequences + 1,), got ", str([*shape]))):
            layer(x, cu_seqlens=torch.zeros(shape, dtype=torch.int32))
    with pytest.raises(ValueError, match=says("step: a bidirectional layer needs the whole sequence")):
        make_layer(name, bidirectional=True).step(x[0])


@every_recurrence
def test_flatten_parameters_is_there_for_code_of_gru(name):
    layer = make_layer(name)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    assert layer.flatten_parameters() is None
    torch.testing.assert_close(dict(layer.state_dict()), before, rtol=0, atol=0)


def test_bad_steps_of_liquid():
    layer = make_layer("Liquid", batch_first=True)
    x = make_sequence(3, 4, IN)
    for dt in (torch.ones(4, 3), torch.ones(3, 4, 1), torch.ones(())):
        with pytest.raises(ValueError, match=says("dt", "[3, 4]", f"got {list(dt.shape)}")):
            layer(x, dt=dt)
    with pytest.raises(ValueError, match=says("dt", "[3]", "got [3, 1]")):
        layer.step(x[:, 0], dt=torch.ones(3, 1))
