"""Mamba with its projections in one autograd node: the same results as with modules, and fewer saved tensors."""

from __future__ import annotations

import pytest
import torch
from layer_helpers import WIDTH, make_layer, make_sequence
from torch import Tensor, nn

from ssm_kernels.nn import Mamba

OPERATOR = "selective_scan"
every_recompute = pytest.mark.parametrize("recompute", ["cheap", "all"])


def results(layer: nn.Module, x: Tensor, recompute: str, **packed) -> dict[str, Tensor]:
    """The output and all gradients."""
    layer.recompute = recompute
    layer.zero_grad()
    x = x.detach().requires_grad_()
    out = layer(x, **packed)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, **grads}


def saved_tensors(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The tensors that forward saves after the in-projection, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in parameters and place != x.untyped_storage().data_ptr():
            found[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return list(found.values())


@pytest.mark.parametrize(
    "packed",
    [{}, {"cu_seqlens": torch.tensor([0, 3, 3, 40])}, {"seq_idx": torch.arange(40)[None] // 7}],
    ids=["one", "cu_seqlens", "seq_idx"],
)
@pytest.mark.parametrize("options", [{}, {"bias": True, "conv_bias": False}], ids=["plain", "bias"])
@every_recompute
def test_gradients_are_those_of_modules(recompute, options, packed):
    layer, x = make_layer("Mamba", **options), make_sequence(1, 40, WIDTH)
    expected, found = results(layer, x, "none", **packed), results(layer, x, recompute, **packed)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_gradients_in_bfloat16():
    """The outputs have the bits of the modules', and so have the gradients that no sum rounds elsewhere."""
    layer = make_layer("Mamba", dtype=torch.bfloat16)
    x = make_sequence(2, 40, WIDTH, dtype=torch.bfloat16)
    expected, found = results(layer, x, "none"), results(layer, x, "cheap")
    for name in ("out", "out_proj.weight", "x_proj.weight", "dt_proj.weight", "A_log", "D"):
        assert torch.equal(found[name], expected[name]), name
    torch.testing.assert_close(found["x"], expected["x"], rtol=2e-2, atol=2e-2 * expected["x"].abs().max().item())


@every_recompute
def test_frozen_weights_get_no_gradient(recompute):
    for trained in ("in_proj.weight", "conv1d.weight", "x_proj.weight", "dt_proj.weight", "A_log", "out_proj.weight"):
        layer, x = make_layer("Mamba"), make_sequence(2, 9, WIDTH)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name == trained)
        grads = {}
        for mode in ("none", recompute):
            layer.recompute = mode
            layer.zero_grad()
            layer(x).square().sum().backward()
            grads[mode] = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
        assert grads[recompute].keys() == {trained}
        torch.testing.assert_close(grads[recompute], grads["none"], rtol=1e-12, atol=1e-12)


def test_kept_elements():
    """xz, the output of x_proj, the chunk states and parameters; the chunk states not with recompute="all"."""
    batch, seqlen = 2, 96
    layer, x = make_layer("Mamba"), make_sequence(batch, seqlen, WIDTH)
    d, n = layer.d_inner, layer.d_state
    tokens, states = batch * seqlen, batch * (seqlen // 32 + 1) * d * n
    smallest = tokens * (2 * d + layer.dt_rank + 2 * n)
    parameters = d * (n + 2)
    for recompute, most in (("all", smallest + parameters), ("cheap", smallest + states + parameters)):
        layer.recompute = recompute
        kept = sum(t.untyped_storage().nbytes() // t.element_size() for t in saved_tensors(layer, x))
        assert smallest <= kept <= most, recompute
    layer.recompute = "none"
    assert sum(t.untyped_storage().nbytes() // t.element_size() for t in saved_tensors(layer, x)) > most


@every_recompute
def test_gradients_under_autocast(recompute):
    layer, x = make_layer("Mamba").float(), make_sequence(2, 40, WIDTH, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = results(layer, x, "none"), results(layer, x, recompute)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(found[name], value, rtol=3e-2, atol=3e-2 * value.abs().max().item(), msg=name)


class Called(nn.Linear):
    """A subclass of nn.Linear with another forward."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input)


PROJECTIONS = pytest.mark.parametrize("name", ["x_proj", "dt_proj", "out_proj"])


@PROJECTIONS
def test_hooks_see_calls(name):
    layer, x = make_layer("Mamba"), make_sequence(2, 5, WIDTH)
    expected, seen = layer(x), []
    with getattr(layer, name).register_forward_hook(lambda module, args, output: seen.append(output.shape)):
        assert torch.equal(layer(x), expected)
    assert len(seen) == 1
    assert torch.equal(layer(x), expected) and len(seen) == 1
    with getattr(layer, name).register_forward_hook(lambda module, args, output: output + 1):
        assert not torch.allclose(layer(x), expected)


@PROJECTIONS
def test_subclasses_are_called(name):
    layer, x = make_layer("Mamba"), make_sequence(2, 5, WIDTH)
    expected, keys = layer(x), [*layer.state_dict()]
    old = getattr(layer, name)
    new = Called(old.in_features, old.out_features, old.bias is not None, dtype=old.weight.dtype)
    new.load_state_dict(old.state_dict())
    setattr(layer, name, new)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    assert new.calls == 1 and [*layer.state_dict()] == keys


@PROJECTIONS
def test_parametrized_weights_are_read(name):
    layer, x = make_layer("Mamba"), make_sequence(2, 5, WIDTH)
    expected = layer(x)

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    nn.utils.parametrize.register_parametrization(getattr(layer, name), "weight", Doubled())
    assert not torch.allclose(layer(x), expected)
    layer(x).sum().backward()
    assert getattr(layer, name).parametrizations.weight.original.grad is not None


@every_recompute
def test_second_derivatives_are_refused(recompute):
    layer, x = make_layer("Mamba"), make_sequence(2, 5, WIDTH).requires_grad_()
    layer.recompute = recompute
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    expected = results(layer, x, "none")
    assert grad.shape == expected["x"].shape
    with pytest.raises((RuntimeError, NotImplementedError), match="Mamba"):
        grad.sum().backward()


@every_recompute
def test_batched_gradients(recompute):
    layer, x = make_layer("Mamba"), make_sequence(1, 5, WIDTH).requires_grad_()
    layer.recompute = recompute
    out = layer(x)
    directions = torch.randn(3, *out.shape, dtype=out.dtype)
    (batched,) = torch.autograd.grad(out, x, directions, retain_graph=True, is_grads_batched=True)
    singly = torch.stack([torch.autograd.grad(out, x, d, retain_graph=True)[0] for d in directions])
    torch.testing.assert_close(batched, singly, rtol=1e-10, atol=1e-10)


@every_recompute
def test_gradcheck(recompute):
    layer = make_layer("Mamba", d_state=3, bias=True)
    layer.recompute = recompute
    x = make_sequence(1, 4, WIDTH).requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("batch", "dim", "seqlen", "dstate"), [(2, 128, 77, 16), (1, 24, 130, 5)])
@pytest.mark.parametrize("along", ["channels", "steps"])
def test_scan_backward_writes_the_outputs(device, along, batch, dim, seqlen, dstate, dtype):
    """Into the memory of grad_out, whose gradients keep their bits. CUDA's backward sums over states in its own order."""
    op, wide = torch.ops.ssm_kernels, torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(0)

    def sequence() -> Tensor:
        shape = (batch, seqlen, dim) if along == "channels" else (batch, dim, seqlen)
        tensor = torch.randn(*shape, generator=generator).to(device, dtype)
        return tensor.mT if along == "channels" else tensor

    def parameter(*shape: int, dtype: torch.dtype = wide) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    u, delta, z, grad_out = (sequence() for _ in range(4))
    B, C = (parameter(batch, dstate, seqlen, dtype=dtype) for _ in range(2))
    A, D, bias = -parameter(dim, dstate).exp(), parameter(dim), parameter(dim)
    out, _, states = op._selective_scan_fwd(u, delta, A, B, C, D, z, bias, None, "zoh", True, True)
    arguments = (None, u, delta, A, B, C, D, z, bias, states, "zoh", True, None, None, None, False, [True] * 9)
    grad_z, again = torch.empty_like(z), torch.empty_like(z)
    expected = op._selective_scan_bwd_out(grad_out, *arguments, grad_z)
    found = op._selective_scan_bwd_out(grad_out, *arguments, again, out=grad_out)
    assert torch.equal(again, grad_z)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    if device == "cpu":
        assert torch.equal(grad_out, out)
    else:
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(grad_out, out, rtol=2 * eps, atol=16 * torch.finfo(wide).eps * out.abs().max().item())


# Segments of steps that end within a tile and at its ends, one warp's and several blocks', and channels that fill no block.
PRODUCTS = [(2, 256, seqlen, 16) for seqlen in (1, 3, 8, 9, 63, 1000)] + [
    (1, 8, 130, 32),
    (3, 136, 77, 128),
    (1, 1536, 2048, 48),
]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("batch", "channels", "seqlen", "rank"), PRODUCTS)
def test_backward_of_the_convolution_computes_a_product(batch, channels, seqlen, rank, dtype):
    """On CUDA backward of the convolution multiplies the gradient of (dt, B, C) with x_proj; cuBLAS does in the modules."""
    torch.manual_seed(0)
    layer = Mamba(channels // 2, d_state=16, dt_rank=rank, device="cuda", dtype=dtype)
    x = torch.randn(batch, seqlen, channels // 2, device="cuda", dtype=dtype)
    found = {}
    for recompute in ("none", "cheap"):
        layer.recompute = recompute
        leaf = x.detach().requires_grad_()
        out = layer(leaf)
        directions = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
            grads = torch.autograd.grad(out, [leaf, *layer.parameters()], directions)
        names = {event.key for event in profiler.key_averages()}
        assert ("ssm_kernels::_causal_conv1d_bwd_out" in names) == (recompute == "none")
        found[recompute] = dict(zip(("x", *(name for name, _ in layer.named_parameters())), grads, strict=True))
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for name, value in found["none"].items():
        scale = value.double().abs().max().item()
        torch.testing.assert_close(found["cheap"][name], value, rtol=0, atol=tolerance * scale, msg=name)
