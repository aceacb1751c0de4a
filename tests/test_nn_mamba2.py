"""The Mamba-2 layer: names and initialization as in mamba_ssm, values and gradients as its formula, decoding, sequences."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from types import SimpleNamespace
from typing import Any

import plain_layers
import pytest
import torch
from helpers import assert_as_accurate, says
from ssd_helpers import METHODS, reference_scan
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ssm_kernels.nn import Mamba2
from ssm_kernels.nn.mamba2 import GatedRMSNorm

OPERATOR = "ssd_chunk_scan"

# The constructor of mamba_ssm's Mamba2.
SIGNATURE = {
    "d_model": inspect.Parameter.empty,
    "d_state": 128,
    "d_conv": 4,
    "conv_init": None,
    "expand": 2,
    "headdim": 64,
    "d_ssm": None,
    "ngroups": 1,
    "A_init_range": (1, 16),
    "D_has_hdim": False,
    "rmsnorm": True,
    "norm_before_gate": False,
    "dt_min": 0.001,
    "dt_max": 0.1,
    "dt_init_floor": 1e-4,
    "dt_limit": (0.0, math.inf),
    "bias": False,
    "conv_bias": True,
    "chunk_size": 256,
    "use_mem_eff_path": True,
    "layer_idx": None,
    "process_group": None,
    "sequence_parallel": True,
    "device": None,
    "dtype": None,
}

# d_model 6, d_inner 12.
D_MODEL = 6
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "groups": {"ngroups": 2},
    "bias": {"bias": True},
    "no_conv_bias": {"conv_bias": False, "d_conv": 2},
    "conv_of_one_step": {"d_conv": 1},
    "D_has_hdim": {"D_has_hdim": True},
    "no_norm": {"rmsnorm": False},
    "norm_before_gate": {"norm_before_gate": True, "ngroups": 2},
    "with_mlp": {"d_ssm": 8, "ngroups": 2},
    "with_mlp_no_norm": {"d_ssm": 4, "rmsnorm": False, "D_has_hdim": True, "bias": True},
    "dt_limit": {"dt_limit": (0.01, 0.05)},
    "chunk_size": {"chunk_size": 3},
    "chosen_chunk_size": {"chunk_size": None},
    "one_head": {"headdim": 12},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def make_layer(device: str = "cpu", dtype: torch.dtype = torch.float64, **options: Any) -> Mamba2:
    """The same layer on every device; its parameters are not at their initial values."""
    torch.manual_seed(0)
    layer = Mamba2(D_MODEL, **{"d_state": 3, "headdim": 2, "layer_idx": 0, "dtype": dtype} | options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape).to(parameter))
    return layer.to(device)


def make_sequence(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def norm(x: Tensor, groups: int, weight: Tensor) -> Tensor:
    parts = [part / (part.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() for part in x.chunk(groups, dim=-1)]
    return torch.cat(parts, dim=-1) * weight


def formula(layer: Mamba2, p: dict[str, Tensor], u: Tensor, sequences: list[slice] | None = None) -> Tensor:
    """The mixer from the parameters ``p``: the convolution term by term, the scan a step at a time."""
    if sequences is not None:
        return torch.cat([formula(layer, p, u[:, steps]) for steps in sequences], dim=1)
    (batch, seqlen, _), heads, groups = u.shape, layer.nheads, layer.ngroups
    projected = u @ p["in_proj.weight"].T + p.get("in_proj.bias", 0)
    d_mlp, d_BC = layer.d_inner - layer.d_ssm, groups * layer.d_state
    gate, up, z, v, dt = projected.split([d_mlp, d_mlp, layer.d_ssm, layer.d_ssm + 2 * d_BC, heads], dim=-1)

    kernel = p["conv1d.weight"][:, 0]
    width = kernel.shape[1]
    padded = torch.cat([v.new_zeros(batch, width - 1, v.shape[2]), v], dim=1)
    v = silu(sum(padded[:, k : k + seqlen] * kernel[:, k] for k in range(width)) + p.get("conv1d.bias", 0))
    x, B, C = v.split([layer.d_ssm, d_BC, d_BC], dim=-1)

    y, _ = reference_scan(
        x=x.unflatten(-1, (heads, layer.headdim)),
        dt=torch.log1p(torch.exp(dt + p["dt_bias"])).clamp(*layer.dt_limit),
        A=-torch.exp(p["A_log"]),
        B=B.unflatten(-1, (groups, layer.d_state)),
        C=C.unflatten(-1, (groups, layer.d_state)),
        discretization=layer.discretization,
    )
    D = p["D"].reshape(heads, -1)
    y = (y + D * x.unflatten(-1, (heads, layer.headdim))).flatten(2)
    if not layer.rmsnorm:
        y = y * silu(z)
    elif layer.norm_before_gate:
        y = norm(y, groups, p["norm.weight"]) * silu(z)
    else:
        y = norm(y * silu(z), groups, p["norm.weight"])
    if d_mlp:
        y = torch.cat([silu(gate) * up, y], dim=-1)
    return y @ p["out_proj.weight"].T + p.get("out_proj.bias", 0)


def gradients(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, leaves, make_sequence(*out.shape, device=out.device, dtype=out.dtype, seed=5))


# ----- names, shapes and initialization


def test_constructor_is_that_of_mamba_ssm():
    parameters = list(inspect.signature(Mamba2).parameters.values())
    positional = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == list(SIGNATURE.items())
    assert [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY] == ["discretization"]


def test_forward_is_that_of_mamba_ssm():
    parameters = inspect.signature(Mamba2.forward).parameters
    assert list(parameters) == ["self", "u", "seqlen", "seq_idx", "cu_seqlens", "inference_params"]
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("bias, conv_bias, D_has_hdim, d_ssm", [(False, True, False, None), (True, False, True, 96)])
def test_state_dict_is_that_of_mamba_ssm(bias, conv_bias, D_has_hdim, d_ssm):
    layer = Mamba2(64, 16, 3, headdim=32, ngroups=1, bias=bias, conv_bias=conv_bias, D_has_hdim=D_has_hdim, d_ssm=d_ssm)
    d_inner, of_ssm = 128, d_ssm or 128
    heads, d_xBC = of_ssm // 32, of_ssm + 2 * 16
    expected = {
        "dt_bias": (heads,),
        "A_log": (heads,),
        "D": (of_ssm if D_has_hdim else heads,),
        "in_proj.weight": (2 * d_inner + 2 * 16 + heads, 64),
        **({"in_proj.bias": (2 * d_inner + 2 * 16 + heads,)} if bias else {}),
        "conv1d.weight": (d_xBC, 1, 3),
        **({"conv1d.bias": (d_xBC,)} if conv_bias else {}),
        "norm.weight": (of_ssm,),
        "out_proj.weight": (64, d_inner),
        **({"out_proj.bias": (64,)} if bias else {}),
    }
    # In order: optimizers save their states by position.
    assert [(name, tuple(value.shape)) for name, value in layer.state_dict().items()] == list(expected.items())
    assert [name for name, _ in layer.named_parameters()] == list(expected)
    checkpoint = {name: make_sequence(*shape, dtype=torch.float32) for name, shape in expected.items()}
    layer.load_state_dict(checkpoint, strict=True)
    torch.testing.assert_close(dict(layer.state_dict()), checkpoint, rtol=0, atol=0)
    assert not [name for name in Mamba2(64, 16, rmsnorm=False).state_dict() if "norm" in name]


def test_sizes_of_published_models():
    """mamba2-130m: d_model 768; its checkpoint's shapes."""
    layer = Mamba2(768, device="meta")
    shapes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    assert shapes["in_proj.weight"] == (3352, 768) and shapes["conv1d.weight"] == (1792, 1, 4)
    assert shapes["A_log"] == (24,) and shapes["norm.weight"] == (1536,) and shapes["out_proj.weight"] == (768, 1536)


def test_initialization():
    torch.manual_seed(0)
    layer = Mamba2(1024, headdim=1, dt_min=0.002, dt_max=0.5, A_init_range=(2, 6), conv_init=0.01)
    A = layer.A_log.exp()
    assert 2 <= A.min() < 2.05 and 5.95 < A.max() <= 6.0001
    torch.testing.assert_close(A.mean(), torch.tensor(4.0), rtol=0.02, atol=0)
    assert (layer.D == 1).all() and (layer.norm.weight == 1).all()
    assert 0.0099 < layer.conv1d.weight.abs().max() <= 0.01
    position = (torch.nn.functional.softplus(layer.dt_bias).log() - math.log(0.002)) / math.log(0.5 / 0.002)
    assert -1e-4 < position.min() < 0.01 and 0.99 < position.max() < 1 + 1e-4
    quartiles = torch.quantile(position, torch.tensor([0.25, 0.5, 0.75]))
    torch.testing.assert_close(quartiles, torch.tensor([0.25, 0.5, 0.75]), rtol=0, atol=0.05)
    floored = Mamba2(16, headdim=4, dt_min=1e-6, dt_max=1e-5, dt_init_floor=1e-3).dt_bias
    torch.testing.assert_close(torch.nn.functional.softplus(floored), torch.full((8,), 1e-3))


def test_parameters_are_marked_for_training_code():
    layer = Mamba2(16, headdim=4)
    assert {n for n, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)} == {"dt_bias", "A_log", "D"}


def test_made_on_meta_and_initialized_later():
    torch.manual_seed(0)
    layer = Mamba2(16, headdim=4, conv_init=0.1, device="meta").to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    layer.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    assert (layer.norm.weight == 1).all() and layer.conv1d.weight.abs().max() <= 0.1


BAD_ARGUMENTS = [
    ({"headdim": 5}, "Mamba2: expected a headdim that divides d_ssm = 32, got 5"),
    ({"headdim": 0}, "Mamba2: expected headdim from 1 to 256, got 0"),
    ({"d_ssm": 40}, "Mamba2: expected d_ssm from 1 to d_inner = 32, got 40"),
    ({"d_ssm": 0}, "Mamba2: expected d_ssm to be at least 1, got 0"),
    ({"A_init_range": (0, 1)}, "Mamba2: expected A_init_range with 0 < low <= high, got (0, 1)"),
    ({"dt_min": 0.2}, "Mamba2: expected 0 < dt_min <= dt_max, both finite, got dt_min=0.2, dt_max=0.1"),
    ({"d_conv": 0}, "Mamba2: expected d_conv to be at least 1, got 0"),
    ({"process_group": "a group"}, "Mamba2: expected process_group None"),
    ({"d_state": 300}, "Mamba2: expected d_state from 1 to 256, got 300"),
    ({"d_state": 0}, "Mamba2: expected d_state from 1 to 256, got 0"),
    ({"expand": 32, "headdim": 512}, "Mamba2: expected headdim from 1 to 256, got 512"),
    # What the scan says.
    ({"ngroups": 3}, "ssd_chunk_scan: expected the groups of B and C to divide heads = 8, got 3"),
    ({"chunk_size": 0}, "Mamba2: expected chunk_size to be at least 1, got 0"),
    ({"dt_limit": (1.0, 0.5)}, "Mamba2: expected dt_limit = (min, max) with min <= max, got (1.0, 0.5)"),
    ({"discretization": "tustin"}, "Mamba2: unknown discretization 'tustin'"),
    ({"discretization": "bilinear"}, "ssd_chunk_scan: discretization 'bilinear' is not supported"),
]


@pytest.mark.parametrize(("options", "message"), BAD_ARGUMENTS, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_bad_arguments(options, message):
    """When the layer is made, not when it is called."""
    with pytest.raises(ValueError, match=says(message)):
        Mamba2(16, **{"d_state": 8, "headdim": 4} | options)


# ----- values and gradients


def assert_is_its_formula(layer: Mamba2, u: Tensor, sequences: list[slice] | None = None, **options: Tensor) -> None:
    parameters = dict(layer.named_parameters())
    leaves = [u.requires_grad_(), *parameters.values()]
    actual, expected = layer(u, **options), formula(layer, parameters, u, sequences)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
    names = ["u", *parameters]
    for name, a, b in zip(names, gradients(actual, leaves), gradients(expected, leaves), strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


@every_variant
def test_is_its_formula(variant, device):
    layer = make_layer(device, **VARIANTS[variant])
    assert_is_its_formula(layer, make_sequence(2, 9, D_MODEL, device=device))


@pytest.mark.parametrize("discretization", METHODS)
def test_discretizations(discretization, device):
    layer = make_layer(device, discretization=discretization)
    assert_is_its_formula(layer, make_sequence(2, 9, D_MODEL, device=device))


def test_gated_norm_of_groups():
    x, z = make_sequence(2, 3, 8), make_sequence(2, 3, 8, seed=1)
    for groups, before in itertools.product((1, 2, 4), (False, True)):
        layer = GatedRMSNorm(8, groups, before, dtype=torch.float64)
        torch.nn.init.uniform_(layer.weight)
        expected = norm(x, groups, layer.weight) * silu(z) if before else norm(x * silu(z), groups, layer.weight)
        torch.testing.assert_close(layer(x, z), expected, rtol=1e-12, atol=1e-12)
    for groups in (0, 3):
        with pytest.raises(ValueError, match=says("GatedRMSNorm: expected groups", f"got {groups}")):
            GatedRMSNorm(8, groups)


def test_inputs_of_any_strides(device):
    layer, u = make_layer(device), make_sequence(2, 9, D_MODEL, device=device)
    expected = layer(u)
    for view in (u.transpose(0, 1).contiguous().transpose(0, 1), u.transpose(1, 2).contiguous().transpose(1, 2)):
        assert not view.is_contiguous()
        torch.testing.assert_close(layer(view), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(2, 0, D_MODEL), (0, 5, D_MODEL), (2, 1, D_MODEL)])
def test_empty_and_short_sequences(shape, device):
    layer = make_layer(device)
    out = layer(torch.ones(shape, device=device, dtype=torch.float64))
    assert out.shape == shape and out.isfinite().all()
    out.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())
    seq_idx = torch.zeros(shape[:2], dtype=torch.int32, device=device)
    assert layer(torch.ones(shape, device=device, dtype=torch.float64), seq_idx=seq_idx).shape == shape


def test_the_future_does_not_matter(device):
    layer, u = make_layer(device), make_sequence(2, 9, D_MODEL, device=device)
    changed = torch.cat([u[:, :5], make_sequence(2, 4, D_MODEL, device=device, seed=1)], dim=1)
    before, after = layer(u), layer(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=1e-12, atol=1e-14)
    assert (before[:, 5:] - after[:, 5:]).abs().amax(dim=-1).min() > 1e-9


# ----- sequences one after another


@every_variant
def test_packed_sequences(variant, device):
    """Shorter than the convolution is wide, too."""
    layer, offsets = make_layer(device, **VARIANTS[variant]), (0, 0, 1, 3, 3, 9, 11)
    u, cu_seqlens = make_sequence(1, 11, D_MODEL, device=device), torch.tensor(offsets, dtype=torch.int32, device=device)
    assert_is_its_formula(layer, u, list(itertools.starmap(slice, itertools.pairwise(offsets))), cu_seqlens=cu_seqlens)
    with torch.no_grad():
        torch.testing.assert_close(layer(u, cu_seqlens=cu_seqlens.long()), layer(u, cu_seqlens=cu_seqlens))


def test_seq_idx(device):
    """A number that comes again is another sequence, unless it comes at once."""
    layer, u = make_layer(device), make_sequence(2, 9, D_MODEL, device=device)
    rows = [[4, 4, 4, 0, 4, 4, 4, 4, 7], [1, 1, 1, 1, 1, 1, 1, 1, 1]]
    parts = [[slice(0, 3), slice(3, 4), slice(4, 8), slice(8, 9)], [slice(0, 9)]]
    parameters = dict(layer.named_parameters())
    expected = torch.cat([formula(layer, parameters, u[i : i + 1], parts[i]) for i in range(2)])
    for dtype in (torch.int32, torch.int64):
        actual = layer(u, seq_idx=torch.tensor(rows, dtype=dtype, device=device))
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def test_sequences_and_errors(device):
    layer, u = make_layer(device), make_sequence(1, 9, D_MODEL, device=device)
    cu_seqlens, seq_idx = torch.tensor([0, 4, 9], device=device), torch.zeros(1, 9, dtype=torch.int32, device=device)
    cache = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    for options in ({"seq_idx": seq_idx}, {"cu_seqlens": cu_seqlens}):
        with pytest.raises(ValueError, match=says("Mamba2: expected no inference_params with seq_idx or cu_seqlens")):
            layer(u, inference_params=cache, **options)
    with pytest.raises(ValueError, match=says("Mamba2: expected seq_idx of shape (batch, seqlen) = [1, 9], got [1, 8]")):
        layer(u, seq_idx=seq_idx[:, :8])
    with pytest.raises(ValueError, match=says("Mamba2: expected seq_idx or cu_seqlens, got both")):
        layer(u, seq_idx=seq_idx, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match=says("expected batch 1 with cu_seqlens, got 2")):
        layer(u.expand(2, -1, -1), cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match=says("expected cu_seqlens to end at seqlen = 9, got 8")):
        layer(u, cu_seqlens=torch.tensor([0, 8], device=device))
    with pytest.raises(ValueError, match=says("Mamba2: expected cu_seqlens of shape (sequences + 1,), got [1, 3]")):
        layer(u, cu_seqlens=cu_seqlens[None])
    with pytest.raises(RuntimeError, match=says(f"Mamba2: expected cu_seqlens on {u.device}, got meta")):
        layer(u, cu_seqlens=cu_seqlens.to("meta"))
    with pytest.raises(
        ValueError, match=says("Mamba2: expected u of shape (batch, seqlen, d_model) with d_model = 6, got [9, 6]")
    ):
        layer(u[0], cu_seqlens=cu_seqlens)


# ----- flattened batches


@pytest.mark.parametrize("with_seq_idx", [False, True])
def test_flattened_batch(with_seq_idx, device):
    layer, u = make_layer(device), make_sequence(3, 4, D_MODEL, device=device).requires_grad_()
    ids = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0], [2, 3, 3, 3]], device=device) if with_seq_idx else None
    flat = u.detach().flatten(0, 1).requires_grad_()
    actual, expected = layer(flat, 4, ids), layer(u, None, ids)
    assert actual.shape == flat.shape
    torch.testing.assert_close(actual, expected.flatten(0, 1), rtol=0, atol=0)
    of_actual = gradients(actual, [flat, *layer.parameters()])
    of_expected = gradients(expected.flatten(0, 1), [u, *layer.parameters()])
    torch.testing.assert_close(of_actual[0].unflatten(0, (3, 4)), of_expected[0], rtol=1e-12, atol=1e-14)
    for a, b in zip(of_actual[1:], of_expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_flattened_batch_without_rows(device):
    assert make_layer(device)(torch.ones(0, D_MODEL, device=device, dtype=torch.float64), seqlen=4).shape == (0, D_MODEL)


def test_flattened_prefill_and_step(device):
    layer, u = make_layer(device), make_sequence(2, 5, D_MODEL, device=device)
    cache = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    with torch.no_grad():
        prefilled = layer(u[:, :4].flatten(0, 1), 4, None, None, cache)
        cache.seqlen_offset = 4
        step = layer(u[:, 4], 1, None, None, cache)
        whole = layer(u)
    torch.testing.assert_close(prefilled.unflatten(0, (2, 4)), whole[:, :4], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(step, whole[:, 4], rtol=1e-10, atol=1e-12)


def test_flattened_batch_and_errors(device):
    layer, u = make_layer(device), make_sequence(10, D_MODEL, device=device)
    with pytest.raises(ValueError, match=says("Mamba2: expected u of a multiple of seqlen = 4 steps, got 10")):
        layer(u, 4)
    with pytest.raises(ValueError, match=says("expected u of shape (batch * seqlen, d_model) with seqlen, got [1, 10, 6]")):
        layer(u[None], 5)
    with pytest.raises(ValueError, match=says("Mamba2: expected seqlen to be at least 1, got 0")):
        layer(u, 0)
    with pytest.raises(ValueError, match=says("Mamba2: expected seqlen or cu_seqlens, got both")):
        layer(u, 5, cu_seqlens=torch.tensor([0, 10], device=device))
    with pytest.raises(ValueError, match=says("Mamba2: expected seq_idx of shape (batch, seqlen) = [2, 5], got [1, 10]")):
        layer(u, 5, torch.zeros(1, 10, dtype=torch.int32, device=device))


# ----- decoding


@pytest.mark.parametrize("prefill", [0, 1, 3, 7])
@every_variant
def test_prefill_and_steps_are_the_whole_sequence(variant, prefill, device):
    layer, u = make_layer(device, **VARIANTS[variant]), make_sequence(3, 9, D_MODEL, device=device)
    cache = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    with torch.no_grad():
        whole = layer(u)
        parts = [layer(u[:, :prefill], inference_params=cache)]
        conv_state, ssm_state = cache.key_value_memory_dict[0]
        d_xBC = layer.d_ssm + 2 * layer.ngroups * layer.d_state
        assert conv_state.shape == (3, d_xBC, layer.d_conv)
        assert ssm_state.shape == (3, layer.nheads, layer.headdim, layer.d_state)
        for t in range(prefill, 9):
            cache.seqlen_offset = max(t, 1)  # with offset 0 the sequence would start anew
            if t % 2:
                out, *states = layer.step(u[:, t : t + 1], conv_state, ssm_state)
                assert states[0] is conv_state and states[1] is ssm_state
            else:
                out = layer(u[:, t : t + 1], inference_params=cache)
            parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("discretization", METHODS)
def test_steps_of_discretizations(discretization, device):
    layer, u = make_layer(device, discretization=discretization), make_sequence(2, 5, D_MODEL, device=device)
    states = layer.allocate_inference_cache(2, 5)
    steps = torch.cat([layer.step(u[:, t : t + 1], *states)[0] for t in range(5)], dim=1)
    torch.testing.assert_close(steps, layer(u).detach(), rtol=1e-10, atol=1e-12)


def test_prefill_in_pieces_is_the_whole_sequence(device):
    layer, u = make_layer(device), make_sequence(2, 11, D_MODEL, device=device)
    cache = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    parts = []
    for piece in u.split([2, 5, 3, 1], dim=1):
        parts.append(layer(piece, inference_params=cache))
        assert parts[-1].requires_grad, "pieces of one step train as others do"
        cache.seqlen_offset += piece.shape[1]
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(u), rtol=1e-10, atol=1e-12)
    assert not any(state.requires_grad for state in cache.key_value_memory_dict[0])
    for part in parts:  # each from a state that the next has overwritten in the cache
        part.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    cache.seqlen_offset = 0  # starts anew, whatever the cache holds
    torch.testing.assert_close(layer(u, inference_params=cache), layer(u), rtol=1e-12, atol=1e-14)


def test_inference_cache(device):
    layer = make_layer(device, torch.bfloat16)
    conv_state, ssm_state = layer.allocate_inference_cache(3, 100)
    assert conv_state.shape == (3, 18, 4) and ssm_state.shape == (3, 6, 2, 3)
    assert conv_state.dtype == torch.bfloat16 and ssm_state.dtype == torch.float32
    assert not conv_state.any() and not ssm_state.any()
    assert [state.dtype for state in layer.allocate_inference_cache(3, 100, dtype=torch.float16)] == [torch.float16] * 2


def test_decoding_errors():
    layer, u = make_layer(), make_sequence(2, 3, D_MODEL)
    with pytest.raises(
        ValueError,
        match=says("Mamba2.step: expected hidden_states of shape (batch, 1, d_model) with d_model = 6, got [2, 3, 6]"),
    ):
        layer.step(u, *layer.allocate_inference_cache(2, 3))
    with pytest.raises(
        ValueError, match=says("Mamba2: expected u of shape (batch, seqlen, d_model) with d_model = 6, got [3, 6]")
    ):
        layer(u[0])
    cache = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    layer(u, inference_params=cache)
    with pytest.raises(ValueError, match="Mamba2: expected a batch of 2 as in the cache, got 1"):
        layer(u[:1], inference_params=cache)
    layer.layer_idx = None
    with pytest.raises(ValueError, match="Mamba2: inference_params needs a layer_idx"):
        layer(u, inference_params=cache)


def test_refused_step_changes_no_state():
    layer, u = make_layer(), make_sequence(2, 1, D_MODEL)
    conv_state, ssm_state = (torch.ones_like(state) for state in layer.allocate_inference_cache(2, 1))
    with pytest.raises(ValueError, match="expected ssm_state of shape"):
        layer.step(u, conv_state, ssm_state[:, :-1])
    with pytest.raises(
        ValueError, match=says("Mamba2.step: expected conv_state of shape (batch, channels, d_conv)", "got [2, 18, 3]")
    ):
        layer.step(u, conv_state[..., 1:], ssm_state)
    assert (conv_state == 1).all() and (ssm_state == 1).all()


# ----- dtypes


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_layer(dtype, packed, device):
    layer = make_layer(device, dtype, bias=True, ngroups=2)
    wide = {"dt_bias", "A_log", "D"}
    assert {name for name, p in layer.named_parameters() if p.dtype == torch.float32} == wide
    assert {name for name, p in layer.named_parameters() if p.dtype == dtype} == dict(layer.named_parameters()).keys() - wide
    options = {"cu_seqlens": torch.tensor([0, 20, 33], device=device)} if packed else {}
    sequences = [slice(0, 20), slice(20, 33)] if packed else None
    leaves, draws = dict(layer.named_parameters()), []
    # A gradient that is a few sums has a draw of roundings that may by chance be far more exact than is usual.
    for seed in range(8):
        u = make_sequence(1, 33, D_MODEL, device=device, dtype=dtype, seed=seed)
        exact = formula(layer, {name: p.double() for name, p in leaves.items()}, u.double(), sequences)
        outs = {"actual": layer(u, **options), "native": plain_layers.mamba2(layer, u, **options)}
        assert_as_accurate(outs["actual"].detach(), outs["native"].detach(), exact.detach(), "out")
        outs["exact"] = exact.to(dtype)
        draws.append({key: dict(zip(leaves, gradients(out, [*leaves.values()]), strict=True)) for key, out in outs.items()})
    for name in leaves:
        actual, native, exact = (torch.stack([draw[key][name] for draw in draws]) for key in ("actual", "native", "exact"))
        assert_as_accurate(actual, native, exact.double(), name)


def test_16_bit_steps_are_the_whole_sequence(device):
    for dtype in (torch.bfloat16, torch.float16):
        layer, u = make_layer(device, dtype), make_sequence(2, 12, D_MODEL, device=device, dtype=dtype)
        states = layer.allocate_inference_cache(2, 12)
        steps = torch.cat([layer.step(u[:, t : t + 1], *states)[0] for t in range(12)], dim=1)
        whole = layer(u).detach()
        assert steps.dtype == whole.dtype == dtype
        exact = formula(layer, {name: p.detach().double() for name, p in layer.named_parameters()}, u.double())
        assert_as_accurate(steps, whole, exact, "steps")


@pytest.mark.parametrize("variant", ["default", "no_norm", "with_mlp"])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
def test_autocast(variant, input_dtype, device):
    layer = make_layer(device, torch.float32, **VARIANTS[variant])
    u = make_sequence(2, 33, D_MODEL, device=device, dtype=input_dtype)
    with torch.autocast(device, torch.bfloat16):
        actual = layer(u)
        native = plain_layers.mamba2(layer, u)
        states = layer.allocate_inference_cache(2, 33)
        steps = torch.cat([layer.step(u[:, t : t + 1], *states)[0] for t in range(33)], dim=1)
        sequences = layer(u, seq_idx=torch.zeros(2, 33, dtype=torch.int32, device=device))
    exact = formula(layer, {name: p.double() for name, p in layer.named_parameters()}, u.double()).detach()
    for name, result in {"out": actual, "steps": steps, "one sequence": sequences}.items():
        assert result.dtype == torch.bfloat16
        assert_as_accurate(result.detach(), native.detach(), exact, name)
    for parameter, gradient in zip(layer.parameters(), gradients(actual, list(layer.parameters())), strict=True):
        assert gradient.dtype == parameter.dtype == torch.float32
        assert gradient.isfinite().all()


def test_converted_to_double(device):
    layer = make_layer(device, torch.float32)
    double, u = copy.deepcopy(layer).double(), make_sequence(2, 9, D_MODEL, device=device)
    expected = formula(double, dict(double.named_parameters()), u)
    torch.testing.assert_close(double(u), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer(u.float()).double(), expected, rtol=1e-4, atol=1e-5)


# ----- torch.compile


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [None, "cu_seqlens", "seq_idx"])
def test_compiles_once_for_all_lengths(sequences, device, fresh_dynamo):
    layer, counter = make_layer(device, d_ssm=8), CompileCounterWithBackend("aot_eager")
    compiled, counts = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter), []
    for seqlen in (9, 5, 64):
        u = make_sequence(1, seqlen, D_MODEL, device=device).requires_grad_()
        options = {}
        if sequences == "cu_seqlens":
            options["cu_seqlens"] = torch.tensor([0, 3, 3, seqlen], device=device)
        elif sequences == "seq_idx":
            options["seq_idx"] = torch.arange(seqlen, device=device)[None] // 4
        leaves = [u, *layer.parameters()]
        actual, expected = compiled(u, **options), layer(u, **options)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
        for a, b in zip(gradients(actual, leaves), gradients(expected, leaves), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1  # the first length may take two attempts, for the numbers among the options


@pytest.mark.slow
def test_compiled_step(device, fresh_dynamo):
    layer, u = make_layer(device), make_sequence(2, 4, D_MODEL, device=device)
    step = torch.compile(layer.step, fullgraph=True, backend="aot_eager")
    states = layer.allocate_inference_cache(2, 4)
    steps = torch.cat([step(u[:, t : t + 1], *states)[0] for t in range(4)], dim=1)
    torch.testing.assert_close(steps, layer(u).detach(), rtol=1e-10, atol=1e-12)
