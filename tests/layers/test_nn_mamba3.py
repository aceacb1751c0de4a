"""nn.Mamba3 and MambaLM: names of mamba_ssm, values and gradients of the formula, decoding, prefill in chunks, packing."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import says
from layer_helpers import assert_all_close, assert_same_gradients, make_sequence
from torch import Tensor

from ssm_kernels import nn, reference
from ssm_kernels.models import MambaConfig, MambaLM, parameter_groups

OPERATOR = "mamba3_chunk_scan"

WIDTH = 12
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "norm": {"is_outproj_norm": True, "rope_fraction": 1.0},
    "softplus": {"A_activation": "softplus", "ngroups": 2},
    "mimo": {"is_mimo": True, "mimo_rank": 3, "ngroups": 2},
    "mimo_norm": {"is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def make_layer(variant: str = "default", device: str = "cpu", dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": WIDTH, "d_state": 8, "headdim": 6, "layer_idx": 0, "dtype": dtype}
    layer = nn.Mamba3(**sizes | VARIANTS[variant] | options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64).to(parameter))
    return layer.to(device)


def plain(layer: Any, u: Tensor, p: dict[str, Tensor] | None = None, **options: Any) -> Tensor:
    """The formula, with the reference's loop over time."""
    p = dict(layer.named_parameters()) if p is None else p
    heads, state, groups, ranks = layer.nheads, layer.d_state, layer.num_bc_heads, layer.mimo_rank
    matrix = ranks * groups * state
    sizes = [layer.d_inner, layer.d_inner, matrix, matrix, heads, heads, heads, layer.num_rope_angles]
    z, x, B, C, dt, a, trap, angles = (u @ p["in_proj.weight"].T).split(sizes, dim=-1)
    B, C = (
        F.rms_norm(rows.unflatten(-1, (ranks, groups, state)), (state,), p[name], 1e-5)
        for rows, name in ((B, "B_norm.weight"), (C, "C_norm.weight"))
    )
    a = F.softplus(a) if layer.A_activation == "softplus" else torch.where(a >= 0, 1 + a, 1 / (1 - torch.minimum(a, 0 * a)))
    if layer.is_mimo:
        options |= {"rotate": "halves", "mimo_x": p["mimo_x"], "mimo_z": p["mimo_z"], "mimo_out": p["mimo_o"]}
    y = reference.mamba3_chunk_scan(
        x.unflatten(-1, (heads, -1)),
        F.softplus(dt + p["dt_bias"]),
        -torch.maximum(a, torch.full_like(a, layer.A_floor)),
        B,
        C,
        trap,
        angles,
        B_bias=p["B_bias"],
        C_bias=p["C_bias"],
        D=p["D"],
        z=z.unflatten(-1, (heads, -1)),
        norm_weight=p["norm.weight"].unflatten(0, (heads, -1)) if layer.is_outproj_norm else None,
        **options,
    )
    return y.flatten(-2) @ p["out_proj.weight"].T


def leaves_of(layer: torch.nn.Module, u: Tensor) -> dict[str, Tensor]:
    return {"u": u} | dict(layer.named_parameters())


def make_cache(offset: int = 0) -> Any:
    return SimpleNamespace(seqlen_offset=offset, key_value_memory_dict={})


def test_state_dict_is_that_of_mamba_ssm():
    names = "dt_bias B_bias C_bias D in_proj.weight B_norm.weight C_norm.weight out_proj.weight"
    assert [*nn.Mamba3(64).state_dict()] == names.split()
    layer = nn.Mamba3(256, is_outproj_norm=True, ngroups=2, device="meta")
    shapes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    assert shapes == {
        "dt_bias": (8,),
        "B_bias": (8, 1, 128),
        "C_bias": (8, 1, 128),
        "D": (8,),
        "in_proj.weight": (2 * 512 + 2 * 2 * 128 + 3 * 8 + 32, 256),
        "B_norm.weight": (128,),
        "C_norm.weight": (128,),
        "norm.weight": (512,),
        "out_proj.weight": (256, 512),
    }
    # In mamba_ssm's order of creation too, which is that of optimizer states.
    layer = nn.Mamba3(256, ngroups=2, is_mimo=True, mimo_rank=4)
    names = "dt_bias B_bias C_bias mimo_x mimo_z mimo_o D in_proj.weight B_norm.weight C_norm.weight out_proj.weight"
    assert [*layer.state_dict()] == names.split()
    assert layer.in_proj.weight.shape == (2 * 512 + 2 * 4 * 2 * 128 + 3 * 8 + 32, 256)
    assert layer.B_bias.shape == (8, 4, 128) and layer.mimo_x.shape == layer.mimo_o.shape == (8, 4, 64)
    assert layer.mimo_x.eq(0.25).all() and layer.mimo_z.eq(1).all() and layer.mimo_o.eq(0.25).all()
    assert nn.Mamba3(64, rope_fraction=1.0).num_rope_angles == 64
    assert nn.Mamba3(64, dtype=torch.bfloat16).B_bias.dtype == torch.float32


def test_initial_values():
    layer = nn.Mamba3(64, headdim=16, dt_min=0.01, dt_max=0.02)
    steps = F.softplus(layer.dt_bias)
    assert (steps > 0.0099).all() and (steps < 0.0201).all()
    for parameter in (layer.B_bias, layer.C_bias, layer.D, layer.B_norm.weight):
        assert parameter.eq(1).all()
    marked = {name for name, parameter in layer.named_parameters() if getattr(parameter, "_no_weight_decay", False)}
    assert marked == {"dt_bias", "D"}


@every_variant
def test_values_and_gradients(variant, device):
    layer, u = make_layer(variant, device), make_sequence(2, 9, WIDTH, device=device).requires_grad_()
    actual, expected = layer(u), plain(layer, u)
    assert_all_close(actual, expected, 1e-9, 1e-11)
    assert_same_gradients(actual, expected, leaves_of(layer, u), 1e-7, 1e-9)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(variant, dtype, device):
    layer, u = make_layer(variant, device, dtype), make_sequence(2, 70, WIDTH, device=device, dtype=dtype)
    exact = plain(layer, u.double(), {key: p.double() for key, p in layer.named_parameters()})
    actual = layer(u)
    assert actual.dtype is dtype
    bound = {torch.float32: 2e-5, torch.bfloat16: 5e-2}[dtype]
    assert ((actual.double() - exact).norm() / exact.norm()).item() < bound


def test_activations_are_other_functions(device):
    """Trap 9: one state dict, two functions."""
    u = make_sequence(1, 20, WIDTH, device=device)
    heavy = make_layer(device=device)
    soft = nn.Mamba3(WIDTH, 8, headdim=6, dtype=torch.float64, A_activation="softplus").to(device)
    soft.load_state_dict(heavy.state_dict(), strict=True)
    assert (heavy(u) - soft(u)).abs().max() > 1e-3


def test_A_at_the_floor(device):
    """Trap 6: the clamp's gradient is zero, and the decay is that of the floor."""
    layer = make_layer(device=device, A_floor=5.0)
    u = make_sequence(1, 5, WIDTH, device=device)
    layer(u).sum().backward()
    rows = layer.in_proj.weight.grad[2 * layer.d_inner + 16 + layer.nheads :][: layer.nheads]
    assert rows.eq(0).all()


@every_variant
@pytest.mark.parametrize("splits", [(), (1,), (4,), (4, 5), (4, 7, 8)], ids=str)
def test_prefill_and_decoding(variant, splits, device):
    """A prompt in any number of calls, then tokens one by one, in mamba_ssm's cache."""
    layer, u = make_layer(variant, device), make_sequence(2, 11, WIDTH, device=device)
    expected, cache, outputs = layer(u), make_cache(), []
    with torch.no_grad():
        for begin, end in itertools.pairwise((0, *splits, 9, 10, 11)):
            cache.seqlen_offset = begin
            outputs.append(layer(u[:, begin:end], inference_params=cache))
    assert_all_close(torch.cat(outputs, 1), expected, 1e-9, 1e-11)
    shapes = [tuple(state.shape) for state in cache.key_value_memory_dict[0]]
    assert shapes == [(2, 4, layer.num_rope_angles), (2, 4, 6, 8), (2, layer.mimo_rank, 4, 8), (2, 4, 6)]


def test_step_takes_tokens_with_and_without_time(device):
    layer, u = make_layer(device=device), make_sequence(3, 1, WIDTH, device=device)
    caches = [layer.allocate_inference_cache(3, 1) for _ in range(2)]
    out, *states = layer.step(u, *caches[0])
    same, *_ = layer.step(u[:, 0], *caches[1])
    assert torch.equal(out[:, 0], same) and all(a is b for a, b in zip(states, caches[0], strict=True))
    assert_all_close(out, layer(u), 1e-9, 1e-11)
    assert [state.dtype for state in caches[0]] == [torch.float64] * 4
    other = layer.allocate_inference_cache(3, 1, dtype=torch.float32)
    assert torch.equal(layer.step(u, *other)[0], out) and torch.equal(other[3], caches[0][3].float())
    half = make_layer(device=device, dtype=torch.bfloat16)
    assert [state.dtype for state in half.allocate_inference_cache(1, 1)] == [
        torch.float64,
        torch.float32,
        torch.float32,
        torch.bfloat16,
    ]


@every_variant
def test_packed_sequences(variant, device):
    layer, u = make_layer(variant, device), make_sequence(1, 11, WIDTH, device=device).requires_grad_()
    bounds = (0, 3, 3, 8, 11)
    numbers = torch.tensor([[0] * 3 + [1] * 5 + [2] * 3], dtype=torch.int32, device=device)
    for options in ({"cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device=device)}, {"seq_idx": numbers}):
        actual = layer(u, **options)
        expected = torch.cat([plain(layer, u[:, begin:end]) for begin, end in itertools.pairwise(bounds) if begin < end], 1)
        assert_all_close(actual, expected, 1e-9, 1e-11)
        assert_same_gradients(actual, expected, leaves_of(layer, u), 1e-7, 1e-9)


def test_packed_prompts_fill_a_cache(device):
    """Prompts of unequal lengths in one call with padding, then a token each."""
    layer, u = make_layer(device=device), make_sequence(1, 10, WIDTH, device=device)
    next_u = make_sequence(2, 1, WIDTH, device=device)
    cache, bounds = make_cache(), torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    with torch.no_grad():
        layer(u, cu_seqlens=bounds, inference_params=cache)
        cache.seqlen_offset = 3
        out = layer(next_u, inference_params=cache)
        for row, (begin, end) in enumerate(((0, 3), (3, 8))):
            whole = layer(torch.cat([u[:, begin:end], next_u[row : row + 1]], 1))
            assert_all_close(out[row], whole[0, -1:], 1e-9, 1e-11)


def test_bad_arguments():
    for options, error, message in (
        ({"is_mimo": True, "mimo_rank": 0}, ValueError, "Mamba3: expected mimo_rank"),
        ({"is_mimo": True, "d_state": 15}, ValueError, "Mamba3: expected an even d_state with is_mimo, got 15"),
        ({"rope_fraction": 0.25}, ValueError, "Mamba3: expected rope_fraction 0.5 or 1.0, got 0.25"),
        ({"headdim": 7}, ValueError, "Mamba3: expected a headdim that divides d_inner = 128, got 7"),
        ({"ngroups": 3}, ValueError, "Mamba3: expected ngroups to divide nheads = 2, got 3"),
        ({"A_activation": "relu"}, ValueError, "Mamba3: unknown A_activation 'relu'"),
        ({"d_state": 2}, ValueError, "Mamba3: expected d_state * rope_fraction of at least 2"),
    ):
        with pytest.raises(error, match=says(message)):
            nn.Mamba3(64, **options)
    layer = nn.Mamba3(64)
    with pytest.raises(ValueError, match=says("Mamba3: expected u of shape (batch, seqlen, d_model)")):
        layer(torch.zeros(2, 64))
    with pytest.raises(ValueError, match="needs a layer_idx"):
        layer(torch.zeros(1, 2, 64), inference_params=make_cache())
    with pytest.raises(ValueError, match="expected seq_idx without inference_params"):
        layer(torch.zeros(1, 2, 64), torch.zeros(1, 2, dtype=torch.int32), inference_params=make_cache())


def make_model(device: str = "cpu", **options: Any) -> MambaLM:
    torch.manual_seed(0)
    ssm_cfg = {"headdim": 8, "d_state": 8} | options
    config = MambaConfig(d_model=16, n_layer=2, vocab_size=11, mixer="Mamba3", ssm_cfg=ssm_cfg)
    return MambaLM(config, {"initializer_range": 1.0}, dtype=torch.float64).to(device)


@pytest.mark.parametrize("options", [{}, {"is_mimo": True, "mimo_rank": 2}], ids=str)
def test_language_model(options, device, tmp_path):
    """Generation is greedy decoding of whole sequences, padded and packed batches are separate, checkpoints load."""
    model = make_model(device, **options)
    assert type(model.backbone.layers[1].mixer) is nn.Mamba3
    tokens = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(1)).to(device)
    expected = tokens
    with torch.no_grad():
        for _ in range(4):
            following = model(expected).logits[:, -1, :11].argmax(-1, keepdim=True)
            expected = torch.cat([expected, following], dim=1)
    assert torch.equal(model.generate(tokens, max_length=9, top_k=1), expected)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5], device=device)
    masked = model(tokens, attention_mask=mask).logits
    torch.testing.assert_close(masked[:1, 2:], model(tokens[:1, 2:]).logits, rtol=1e-8, atol=1e-9)
    packed = model(tokens[:1], cu_seqlens=torch.tensor([0, 2, 5], device=device)).logits
    torch.testing.assert_close(packed[:, 2:], model(tokens[:1, 2:]).logits, rtol=1e-8, atol=1e-9)
    model.save_pretrained(tmp_path)
    loaded = MambaLM.from_pretrained(tmp_path, dtype=torch.float64).to(device)
    assert loaded.config.mixer == "Mamba3" and torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert MambaConfig(d_model=16, ssm_cfg={"layer": "Mamba3", "headdim": 8}).mixer == "Mamba3"
    decayed, rest = (set(group["params"]) for group in parameter_groups(model, 0.1))
    mixer = model.backbone.layers[0].mixer
    assert mixer.in_proj.weight in decayed and {mixer.dt_bias, mixer.D} <= rest


def test_made_on_meta():
    model = MambaLM(MambaConfig(d_model=16, n_layer=1, vocab_size=11, mixer="Mamba3", ssm_cfg={"headdim": 8}), device="meta")
    model = model.to_empty(device="cpu")
    model.init_weights()
    mixer = model.backbone.layers[0].mixer
    assert mixer.B_bias.eq(1).all() and F.softplus(mixer.dt_bias).le(0.11).all()
