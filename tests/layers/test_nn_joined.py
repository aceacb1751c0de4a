"""Layers of delta rules whose projections one product computes: the same results and gradients as by calls of the modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer_helpers import make_sequence
from plain_delta_layers import VARIANTS, WIDTH, make_delta_layer
from torch import Tensor, nn

from ssm_kernels.nn import GatedDeltaNet, aligned, delta_rule, joined

OPERATOR = "delta_rule_scan"


@pytest.fixture
def joins(monkeypatch) -> Any:
    """A function that switches joined products on and off, on every device, with two elements in a vector of every dtype."""
    monkeypatch.setattr(aligned, "_of_vector", lambda dtype: 2)
    monkeypatch.setattr(aligned, "_is_worthwhile", lambda dtype: True)

    def switch(on: bool) -> None:
        monkeypatch.setattr(aligned, "_may_align", lambda sequences: on)

    return switch


@pytest.fixture
def joined_names(monkeypatch) -> list[list[str]]:
    """The names of the projections that each call has computed together."""
    found: list[list[str]] = []
    join = joined.join_projections

    def spied(*arguments: Any) -> dict[str, Tensor]:
        result = join(*arguments)
        found.append(list(result))
        return result

    monkeypatch.setattr(delta_rule, "join_projections", spied)
    return found


@pytest.fixture
def concatenated(monkeypatch) -> list[bool]:
    """Whether each product has read the gradients of several projections as a concatenation of them."""
    found: list[bool] = []
    join = joined._join_columns

    def spied(grads: Any) -> Tensor:
        result = join(grads)
        found.append(result.untyped_storage().data_ptr() != grads[0].untyped_storage().data_ptr())
        return result

    monkeypatch.setattr(joined, "_join_columns", spied)
    return found


def results(layer: nn.Module, x: Tensor, **packed: Any) -> dict[str, Tensor]:
    """The output and all gradients."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    out = layer(x, **packed)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out))
    return {"out": out.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].is_contiguous(), name
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance * value.abs().max().item(), msg=name)


RECOMPUTED = [("GatedDeltaNet", recompute) for recompute in ("none", "all")]


@pytest.mark.parametrize(("name", "recompute"), [*((name, "cheap") for name in VARIANTS), *RECOMPUTED])
def test_results_and_gradients(joins, joined_names, name, recompute):
    layer, x = make_delta_layer(name), make_sequence(2, 37, WIDTH)
    layer.recompute = recompute
    joins(False)
    expected = results(layer, x)
    joins(True)
    assert_same(results(layer, x), expected)
    children = [key for key, module in layer.named_children() if isinstance(module, nn.Linear) and key != "o_proj"]
    assert not joined_names[0] and sorted(joined_names[1]) == sorted(children)


@pytest.mark.parametrize(
    "packed", [{"cu_seqlens": torch.tensor([0, 3, 3, 40])}, {"seq_idx": torch.arange(40)[None] // 7}], ids=["ends", "numbers"]
)
def test_packed_sequences(joins, packed):
    layer, x = make_delta_layer("GatedDeltaNet-more_value_heads"), make_sequence(1, 40, WIDTH)
    joins(False)
    expected = results(layer, x, **packed)
    joins(True)
    assert_same(results(layer, x, **packed), expected)


def test_states_of_a_cache(joins):
    """A prompt, a second part that continues it, and a step."""
    layer, x = make_delta_layer("GatedDeltaNet"), make_sequence(2, 20, WIDTH)
    found = []
    for on in (False, True):
        joins(on)
        cache = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
        outs = []
        for first, last in ((0, 9), (9, 19), (19, 20)):
            cache.seqlen_offset = first
            with torch.no_grad():
                outs.append(layer(x[:, first:last], inference_params=cache))
        found.append([*outs, *cache.key_value_memory_dict[0]])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_autocast(joins, joined_names):
    layer, x = make_delta_layer("GatedDeltaNet", dtype=torch.float32), make_sequence(2, 37, WIDTH, dtype=torch.float32)
    found = []
    for on in (False, True):
        joins(on)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(results(layer, x))
    assert len(joined_names[1]) == 6
    assert_same(found[1], found[0], 3e-2)


def test_backward_under_autocast_keeps_the_dtype_of_forward(joins):
    joins(True)
    layer, x = make_delta_layer("GatedDeltaNet", dtype=torch.bfloat16), make_sequence(2, 9, WIDTH, dtype=torch.bfloat16)
    leaves, found = [x.requires_grad_(), *layer.parameters()], []
    for is_enabled in (False, True):
        total = layer(x).sum()
        with torch.autocast("cpu", torch.float16, enabled=is_enabled):
            found.append(torch.autograd.grad(total, leaves))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_mixer_writes_gradients_into_columns(joins, concatenated, dtype):
    joins(True)
    layer, x = make_delta_layer("GatedDeltaNet", dtype=dtype), make_sequence(2, 9, WIDTH, dtype=dtype)
    layer(x).sum().backward()
    assert concatenated == [False, False]  # of the group, and of the gate of the output


def test_other_gradients_are_concatenated(joins, concatenated):
    joins(True)
    layer, x = make_delta_layer("GatedDeltaNet-no_conv"), make_sequence(2, 9, WIDTH)
    layer(x).sum().backward()
    assert concatenated == [True, False]


def test_frozen_weights_get_no_gradient(joins):
    joins(True)
    layer = make_delta_layer("GatedDeltaNet")
    for trained in ("q_proj.weight", "v_proj.weight", "b_proj.weight", "g_proj.weight", "k_conv1d.weight", "A_log"):
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name == trained)
            parameter.grad = None
        layer(make_sequence(2, 9, WIDTH)).square().sum().backward()
        assert [name for name, p in layer.named_parameters() if p.grad is not None] == [trained]


def test_hooks_and_adapters_are_called(joins, joined_names):
    joins(True)
    layer, x, called = make_delta_layer("GatedDeltaNet"), make_sequence(2, 9, WIDTH), []
    handle = layer.k_proj.register_forward_hook(lambda *arguments: called.append("hook"))
    layer(x)
    handle.remove()
    layer.b_proj = nn.Sequential(layer.b_proj)
    layer(x)
    assert called == ["hook"] and joined_names == [[], []]


def test_columns_between_vectors_are_not_joined(joins, joined_names):
    joins(True)
    layer = GatedDeltaNet(WIDTH, head_dim=3, num_heads=1, num_v_heads=1, expand_v=1, dtype=torch.float64)
    layer(make_sequence(2, 9, WIDTH))
    assert joined_names == [[]]


def test_double_backward_raises(joins):
    joins(True)
    layer, x = make_delta_layer("GatedDeltaNet"), make_sequence(1, 5, WIDTH).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_gradcheck(joins):
    joins(True)
    x = make_sequence(2, 3, 4).requires_grad_()
    weights = [make_sequence(1, rows, 4)[0].requires_grad_() for rows in (2, 4, 2, 3, 1, 5)]

    def products(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return joined._JoinedProjections.apply(x, [5, 1], torch.float64, *weights)

    assert torch.autograd.gradcheck(products, (x, *weights))


@pytest.mark.cuda
@pytest.mark.parametrize("sizes", [(6, 6, 64), (2, 4, 128)], ids=["pad", "value_heads"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(monkeypatch, joined_names, concatenated, sizes, dtype):
    """As near to float64 as calls of the modules."""
    heads, value_heads, head_dim = sizes
    torch.manual_seed(0)
    options = {"head_dim": head_dim, "num_heads": heads, "num_v_heads": value_heads}
    layer = GatedDeltaNet(256, **options, device="cuda", dtype=dtype)
    x = make_sequence(2, 1024, 256, dtype=dtype).cuda()
    found = results(layer, x)
    assert len(joined_names[0]) == 6 and concatenated == [False, False]
    monkeypatch.setattr(aligned, "_may_align", lambda sequences: False)
    separate = results(layer, x)
    layer_exact = GatedDeltaNet(256, **options, device="cuda", dtype=torch.float64)
    layer_exact.load_state_dict(layer.state_dict())
    exact = results(layer_exact, x.double())
    for name, value in exact.items():
        errors = [(of[name].double() - value).norm().item() for of in (found, separate)]
        assert errors[0] <= 1.1 * errors[1] + 1e-3 * value.norm().item(), (name, errors)
