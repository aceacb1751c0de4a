"""Mamba layers whose rows do not fill whole vectors: copies of their parameters with zeros give the same results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer_helpers import make_layer, make_sequence
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import ssm_kernels.nn as layers
from ssm_kernels.nn import aligned

OPERATOR = "selective_scan"
every_recompute = pytest.mark.parametrize("recompute", ["none", "cheap", "all"])
# Odd d_model; odd channels of the in-projection; a step's rank that is not a multiple of a vector; a bias everywhere.
MAMBA = {
    "d_model": {"d_model": 5},
    "channels": {"d_model": 8, "expand": 1.25},
    "rank": {"d_model": 8, "dt_rank": 3, "d_state": 8},
    "bias": {"d_model": 6, "bias": True},
    "no_conv_bias": {"d_model": 7, "conv_bias": False, "d_conv": 2},
}
MAMBA2 = {
    "heads": {"d_model": 8, "headdim": 16, "d_state": 8},
    "d_model": {"d_model": 5, "headdim": 2, "d_state": 3},
    "bias": {"d_model": 6, "headdim": 4, "bias": True, "rmsnorm": False},
    "mlp": {"d_model": 6, "headdim": 4, "d_ssm": 8},
    "odd_heads": {"d_model": 7, "headdim": 7, "d_state": 8, "ngroups": 2, "bias": True},
    "odd_heads_of_D": {"d_model": 14, "headdim": 7, "d_state": 3, "D_has_hdim": True, "norm_before_gate": True},
    "odd_heads_without_norm": {"d_model": 14, "headdim": 14, "d_state": 5, "rmsnorm": False, "conv_bias": False},
}
CASES = [("Mamba", name) for name in MAMBA] + [("Mamba2", name) for name in MAMBA2]
every_layer = pytest.mark.parametrize(("kind", "case"), CASES, ids=[f"{kind}-{case}" for kind, case in CASES])


@pytest.fixture
def aligns(monkeypatch) -> Any:
    """A function that switches copies on and off, on every device, with eight elements in a vector of every dtype."""
    monkeypatch.setattr(aligned, "_of_vector", lambda dtype: 8)
    monkeypatch.setattr(aligned, "_is_worthwhile", lambda dtype: True)

    def switch(on: bool) -> None:
        monkeypatch.setattr(aligned, "_may_align", lambda sequences: on)

    return switch


def layer_of(kind: str, case: str, **options: Any) -> nn.Module:
    layer = make_layer(kind, **(MAMBA if kind == "Mamba" else MAMBA2)[case], **options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                parameter.add_(torch.linspace(-1, 1, parameter.numel(), dtype=parameter.dtype).to(parameter.device))
    return layer


def results(layer: nn.Module, x: Tensor, **packed: Any) -> dict[str, Tensor]:
    """The output and all gradients."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    out = layer(x, **packed)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out).to(out.device))
    return {"out": out.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].is_contiguous(), name
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance * value.abs().max().item(), msg=name)


@every_layer
@every_recompute
def test_results_and_gradients(aligns, kind, case, recompute):
    layer = layer_of(kind, case, recompute=recompute)
    x = make_sequence(2, 37, layer.d_model)
    aligns(False)
    assert layer._dtype_to_align(x) is None
    expected = results(layer, x)
    aligns(True)
    assert layer._dtype_to_align(x) is x.dtype
    assert_same(results(layer, x), expected)


@pytest.mark.parametrize("kind", ["Mamba", "Mamba2"])
@pytest.mark.parametrize(
    "packed", [{"cu_seqlens": torch.tensor([0, 3, 3, 40])}, {"seq_idx": torch.arange(40)[None] // 7}], ids=["ends", "numbers"]
)
def test_packed_sequences(aligns, kind, packed):
    layer = layer_of(kind, "d_model" if kind == "Mamba" else "odd_heads")
    x = make_sequence(1, 40, layer.d_model)
    aligns(False)
    expected = results(layer, x, **packed)
    aligns(True)
    assert_same(results(layer, x, **packed), expected)


@pytest.mark.parametrize(("kind", "case"), [("Mamba", "d_model"), ("Mamba2", "d_model"), ("Mamba2", "odd_heads")])
def test_states_of_a_cache(aligns, kind, case):
    """A prompt, a second part that continues it, and a step."""
    layer = layer_of(kind, case)
    x = make_sequence(2, 20, layer.d_model)
    found = []
    for on in (False, True):
        aligns(on)
        cache = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
        outs = []
        for first, last in ((0, 9), (9, 19), (19, 20)):
            cache.seqlen_offset = first
            with torch.no_grad():
                outs.append(layer(x[:, first:last], inference_params=cache))
        found.append([*outs, *cache.key_value_memory_dict[0]])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@every_layer
def test_autocast(aligns, kind, case):
    layer = layer_of(kind, case, dtype=torch.float32)
    x = make_sequence(2, 37, layer.d_model, dtype=torch.float32)
    found = []
    for on in (False, True):
        aligns(on)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(results(layer, x))
            assert layer._dtype_to_align(x) is (torch.bfloat16 if on else None)
    assert_same(found[1], found[0], 3e-2)


def test_frozen_weights_get_no_gradient(aligns):
    aligns(True)
    for kind in ("Mamba", "Mamba2"):
        layer = layer_of(kind, "bias")
        for trained in ("in_proj.weight", "in_proj.bias", "conv1d.weight", "A_log", "out_proj.weight"):
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(name == trained)
                parameter.grad = None
            layer(make_sequence(2, 9, layer.d_model)).square().sum().backward()
            assert [name for name, p in layer.named_parameters() if p.grad is not None] == [trained]


@every_layer
def test_gradients_write_aligned_rows(aligns, monkeypatch, kind, case):
    """The in-projection's products read the gradient where the mixer has written it."""
    aligns(True)
    layer = layer_of(kind, case)
    x = make_sequence(2, 9, layer.d_model)
    layer(x).sum().backward()
    copied = []
    copy = aligned._with_columns

    def spied(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        copied.append(tensor.shape[-1])
        return copy(tensor, dtype)

    out = layer(x)
    monkeypatch.setattr(aligned, "_with_columns", spied)
    out.sum().backward()
    # With a parallel MLP the gradient is a concatenation.
    assert copied == [layer.d_model] * len(copied) or case == "mlp"


def test_space_behind_rows_is_cleared():
    buffer = torch.full((2, 3, 8), torch.nan, dtype=torch.bfloat16)
    rows = buffer[..., :5].fill_(1)
    with torch.no_grad():
        whole = aligned._whole_rows(rows, torch.bfloat16)
        assert whole.data_ptr() == buffer.data_ptr() and torch.equal(whole, buffer)
        assert whole.sum() == rows.numel()
        # A slice of a tensor of others.
        wide = torch.ones(2, 3, 8, dtype=torch.bfloat16)
        aligned._whole_rows(wide[:1, :, :5], torch.bfloat16)
        aligned._whole_rows(wide[:, :, 1:6], torch.bfloat16)
        assert wide.eq(1).all()


def test_gradcheck(aligns):
    aligns(True)
    linear = nn.Linear(5, 6, dtype=torch.float64)
    x = make_sequence(2, 3, 5).requires_grad_()
    parameters = (linear.weight.detach().requires_grad_(), linear.bias.detach().requires_grad_())

    def product_of(heads: aligned.Heads, columns: int) -> Any:
        rows = aligned.aligned_size(columns, torch.float64)
        options = (heads, rows, columns, torch.float64, heads.number == 1)
        return lambda x, weight, bias: aligned._AlignedLinear.apply(x, weight, bias, *options)

    def copies(weight: Tensor, bias: Tensor) -> Any:
        return tuple(aligned.align_parameters((weight, bias), (aligned.Layout((16, 8), 2, 8), aligned.Layout((8,)))))

    for sizes, columns in (((1, 6, 8), 6), ((2, 3, 8), 16), ((3, 2, 8), 24), ((2, 2, 8), 18)):
        product, inputs = product_of(aligned.Heads(*sizes), columns), (x, *parameters)
        assert torch.autograd.gradcheck(product, inputs) and torch.autograd.gradgradcheck(product, inputs)
    assert torch.autograd.gradcheck(copies, parameters) and torch.autograd.gradgradcheck(copies, parameters)

    def heads(weight: Tensor, bias: Tensor) -> Any:
        layouts = aligned.Layout((12, 5), heads=aligned.Heads(2, 2, 5)), aligned.Layout((8,), heads=aligned.Heads(2, 3, 4))
        return tuple(aligned.align_parameters((weight, bias), layouts))

    assert torch.autograd.gradcheck(heads, parameters) and torch.autograd.gradgradcheck(heads, parameters)


@pytest.mark.parametrize("kind", ["Mamba", "Mamba2"])
def test_batched_gradients(aligns, kind):
    aligns(True)
    layer = layer_of(kind, "bias")
    x = make_sequence(1, 5, layer.d_model).requires_grad_()
    out = layer(x)
    leaves = (x, *layer.parameters())
    directions = torch.randn(3, *out.shape, dtype=out.dtype)
    batched = torch.autograd.grad(out, leaves, directions, retain_graph=True, is_grads_batched=True)
    singly = [torch.autograd.grad(out, leaves, d, retain_graph=True) for d in directions]
    for found, *expected in zip(batched, *singly, strict=True):
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-10, atol=1e-10)


def test_where_parameters_are_read_as_they_are(aligns):
    """With hooks or subclasses, under transforms and compilers, at aligned sizes, and without a GPU."""
    layer = layer_of("Mamba", "d_model")
    x = make_sequence(2, 9, layer.d_model)
    aligns(True)
    assert layer._dtype_to_align(x) is not None
    for kind in ("Mamba", "Mamba2"):
        other = layer_of(kind, "d_model")
        with other.in_proj.register_forward_hook(lambda *_: None):
            assert other._dtype_to_align(x) is None
        with other.out_proj.register_forward_hook(lambda *_: None):  # which Mamba2 aligns for itself
            assert (other._dtype_to_align(x) is None) == (kind == "Mamba")
        assert other._dtype_to_align(x.float()) is None  # an error of PyTorch's, as of the module
        assert torch.func.vmap(lambda s, other=other: torch.tensor(other._dtype_to_align(s) is None))(x[None]).all()
        exported = torch.export.export(other, (x,), strict=False).module()
        torch.testing.assert_close(exported(x), other(x), rtol=1e-12, atol=1e-12)
    assert make_layer("Mamba", d_model=16, dt_rank=8)._dtype_to_align(make_sequence(2, 9, 16)) is None
    aligns(False)
    assert layer._dtype_to_align(x) is None


@pytest.mark.parametrize("kind", ["Mamba", "Mamba2"])
def test_products_of_a_gpu(device, aligns, kind):
    """In bfloat16, whose rows of 50 elements start between vectors."""
    options = {"d_model": 50, **({"headdim": 20, "d_state": 16} if kind == "Mamba2" else {"d_state": 16, "dt_rank": 7})}
    layer = make_layer(kind, device, torch.bfloat16, **options)
    x = make_sequence(2, 600, 50, device=device, dtype=torch.bfloat16)
    aligns(False)
    expected = results(layer, x)
    aligns(True)
    found = results(layer, x)
    assert found["out"].stride() == (600 * 50, 50, 1)
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 2e-2 * value.norm(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8], ids=str)
def test_copies_of_rows(device, dtype):
    """Rows of any strides, narrower and wider than the copy's, and from any element on."""
    for shape in ((7,), (5, 33), (3, 50, 41), (2, 3, 4, 9), (0, 5), (2, 0)):
        rows = make_sequence(*shape, device=device, dtype=torch.float64).mul(50).to(dtype)
        spread = torch.zeros(*shape[:-1], shape[-1] + 5, dtype=dtype, device=device)
        spread[..., 3:-2] = rows
        for source in (rows, spread[..., 3:-2], rows.flip(0), rows.mT.contiguous().mT if rows.dim() > 1 else rows):
            for columns in (shape[-1] + 6, shape[-1] + 1, shape[-1], max(0, shape[-1] - 3)):
                found = torch.ops.ssm_kernels._copy_rows(source, columns)
                expected = torch.nn.functional.pad(source, (0, columns - shape[-1]))
                assert found.is_contiguous() and torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["Mamba", "Mamba2"])
def test_numbers_of_tokens_are_symbols_on_a_gpu(kind):
    """Export for any batch and seqlen: whether copies of the parameters pay depends on the number of tokens."""
    batch, seqlen = torch.export.Dim("batch", max=64), torch.export.Dim("seqlen", min=2, max=4096)
    with FakeTensorMode(shape_env=ShapeEnv()):
        layer = getattr(layers, kind)(**(MAMBA if kind == "Mamba" else MAMBA2)["d_model"], device="cuda", dtype=torch.bfloat16)
        x = torch.empty(2, 9, layer.d_model, device="cuda", dtype=torch.bfloat16)
        program = torch.export.export(layer, (x,), dynamic_shapes=({0: batch, 1: seqlen},), strict=False)
    [out] = program.graph.find_nodes(op="output")[0].args[0]
    assert all(isinstance(size, torch.SymInt) for size in out.meta["val"].shape[:2])
