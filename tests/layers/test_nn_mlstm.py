"""MLSTM: names of xLSTM-7B, values and gradients of the formula, decoding, packed sequences."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import says
from layer_helpers import assert_all_close, assert_same_gradients, gradients, make_sequence
from plain_mlstm import plain_mlstm
from torch import Tensor

from ssm_kernels import nn

OPERATOR = "mlstm_scan"

WIDTH = 12
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "bias": {"use_bias": True, "v_dim_factor": 2.0},
    "no_cap": {"gate_soft_cap": None},
    "fused": {"weight_mode": "fused", "qk_dim_factor": 1.0},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def make_layer(variant: str = "default", device: str = "cpu", dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    layer = nn.MLSTM(**{"embedding_dim": WIDTH, "num_heads": 2, "layer_idx": 0, "dtype": dtype} | VARIANTS[variant] | options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "gate_preact.bias" in name:
                parameter.zero_()
            parameter.add_(0.5 * torch.randn(parameter.shape, dtype=torch.float64).to(parameter))
    return layer.to(device)


def leaves_of(layer: torch.nn.Module, u: Tensor) -> dict[str, Tensor]:
    return {"u": u} | dict(layer.named_parameters())


def test_state_dict_is_that_of_xlstm():
    single = "q.weight k.weight v.weight ogate_preact.weight igate_preact.weight igate_preact.bias fgate_preact.weight"
    single += " fgate_preact.bias multihead_norm.weight out_proj.weight"
    assert [*nn.MLSTM(16, 4).state_dict()] == single.split()
    fused = "qkv_opreact.weight ifgate_preact.weight ifgate_preact.bias multihead_norm.weight out_proj.weight"
    assert [*nn.MLSTM(16, 4, weight_mode="fused").state_dict()] == fused.split()
    shapes = {name: tuple(value.shape) for name, value in nn.MLSTM(device="meta").state_dict().items()}
    assert shapes["q.weight"] == (2048, 4096) and shapes["v.weight"] == (4096, 4096) and shapes["igate_preact.bias"] == (8,)


@pytest.mark.parametrize("mode", ["single", "fused"])
def test_initial_gates(mode):
    layer = nn.MLSTM(16, 4, weight_mode=mode, device="meta").to_empty(device="cpu")
    for module in layer.modules():
        if callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()
    gates = (layer.igate_preact, layer.fgate_preact) if mode == "single" else (layer.ifgate_preact,)
    assert torch.equal(torch.cat([gate.bias for gate in gates]), torch.tensor([-10.0] * 4 + [3.0, 4.0, 5.0, 6.0]))
    assert not any(gate.weight.any() for gate in gates)


@every_variant
def test_values_and_gradients(variant, device):
    layer, u = make_layer(variant, device), make_sequence(2, 9, WIDTH, device=device).requires_grad_()
    actual, expected = layer(u), plain_mlstm(layer, u)
    assert_all_close(actual, expected, 1e-9, 1e-11)
    assert_same_gradients(actual, expected, leaves_of(layer, u), 1e-7, 1e-9)


def test_replaced_norm(device):
    """Any module that takes the states' readings and the gate."""
    layer, u = make_layer(device=device), make_sequence(2, 9, WIDTH, device=device)
    expected, norm = layer(u), layer.multihead_norm

    class Norm(torch.nn.Module):
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return norm(x, gate)

    layer.multihead_norm = Norm()
    assert_all_close(layer(u), expected, 1e-12, 1e-12)


def test_several_chunks(device):
    layer, u = make_layer(device=device), make_sequence(1, 150, WIDTH, device=device).requires_grad_()
    actual, expected = layer(u), plain_mlstm(layer, u)
    assert_all_close(actual, expected, 1e-8, 1e-10)
    assert_same_gradients(actual, expected, leaves_of(layer, u), 1e-6, 1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype, device):
    layer, u = make_layer(device=device, dtype=dtype), make_sequence(2, 70, WIDTH, device=device, dtype=dtype)
    exact = plain_mlstm(layer, u.double(), {key: p.double() for key, p in layer.named_parameters()})
    actual = layer(u)
    assert actual.dtype is dtype
    bound = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 6e-3}[dtype]
    assert (actual.double() - exact).norm() <= bound * exact.norm()


@every_variant
def test_steps_and_continued_segments(variant, device):
    layer, u = make_layer(variant, device), make_sequence(2, 9, WIDTH, device=device)
    expected = layer(u).detach()
    states = layer.allocate_inference_cache(2, 9)
    steps = torch.cat([layer.step(u[:, t : t + 1], *states)[0] for t in range(9)], dim=1)
    assert_all_close(steps, expected, 1e-9, 1e-11)
    for enabled in (False, True):
        cache, outputs = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={}), []
        with torch.set_grad_enabled(enabled):
            for begin, end in itertools.pairwise([0, 5, 8, 9]):
                cache.seqlen_offset = begin
                outputs.append(layer(u[:, begin:end], cache).detach())
        assert_all_close(torch.cat(outputs, dim=1), expected, 1e-9, 1e-11)


@every_variant
def test_packed_sequences(variant, device):
    layer, u = make_layer(variant, device), make_sequence(1, 11, WIDTH, device=device).requires_grad_()
    bounds = (0, 0, 1, 3, 3, 9, 11)
    pieces = itertools.pairwise(dict.fromkeys(bounds))
    expected, actual = torch.cat([plain_mlstm(layer, u[:, a:b]) for a, b in pieces], dim=1), None
    actual = layer(u, cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device))
    assert_all_close(actual, expected, 1e-9, 1e-11)
    leaves = leaves_of(layer, u).values()
    assert_all_close(gradients(actual, leaves), gradients(expected, leaves), 1e-7, 1e-9)


def test_packed_prompts_then_steps(device):
    layer, lengths = make_layer(device=device), (1, 6, 2)
    sequences = [make_sequence(1, length + 2, WIDTH, device=device, seed=i) for i, length in enumerate(lengths)]
    prompts = torch.cat([*(s[:, :n] for s, n in zip(sequences, lengths, strict=True)), sequences[0]], dim=1)
    cache = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    with torch.no_grad():
        layer(prompts, cache, cu_seqlens=torch.tensor([0, 1, 7, 9], device=device))
        for t in range(2):
            cache.seqlen_offset = 6 + t
            out = layer(torch.cat([s[:, n + t : n + t + 1] for s, n in zip(sequences, lengths, strict=True)]), cache)
            expected = [plain_mlstm(layer, s)[:, n + t : n + t + 1] for s, n in zip(sequences, lengths, strict=True)]
            assert_all_close(out, torch.cat(expected))


def test_compiled():
    layer, u = make_layer(), make_sequence(2, 6, WIDTH).requires_grad_()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_same_gradients(compiled(u), layer(u), leaves_of(layer, u), 1e-9, 1e-11)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qk_dim_factor": 0.25}, "MLSTM: expected embedding_dim * qk_dim_factor to be a multiple of num_heads = 2, got 12"),
        ({"gate_soft_cap": 0.0}, "MLSTM: expected gate_soft_cap to be positive and finite, got 0.0"),
        ({"weight_mode": "both"}, "MLSTM: unknown weight_mode 'both'"),
        (
            {"embedding_dim": 1024, "num_heads": 1},
            "MLSTM: expected embedding_dim * qk_dim_factor / num_heads to be at most 256, got 512 / 1",
        ),
        ({"num_heads": 0}, "MLSTM: expected num_heads to be at least 1, got 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=says(message)):
        make_layer(**options)


def test_largest_heads():
    layer = nn.MLSTM(256, 1, qk_dim_factor=1.0, v_dim_factor=0.125)
    assert layer(torch.zeros(1, 2, 256)).shape == (1, 2, 256)


def test_bad_calls():
    layer, u = make_layer(), make_sequence(2, 3, WIDTH)
    with pytest.raises(ValueError, match=says("MLSTM: expected hidden_states of shape (batch, seqlen, embedding_dim)")):
        layer(u[0])
    with pytest.raises(ValueError, match=says("MLSTM: expected cu_seqlens of shape (sequences + 1,) and a batch of 1")):
        layer(u, cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=says("MLSTM.step: expected hidden_states of shape (batch, 1, embedding_dim)")):
        layer.step(u, *layer.allocate_inference_cache(2, 0))


@pytest.mark.parametrize("offset", [0, 2])
def test_damaged_caches(offset):
    layer, x = nn.MLSTM(8, 2, layer_idx=3), torch.zeros(2, 1, 8)
    C, n, m = layer.allocate_inference_cache(2, 4)
    cases: list[tuple[type[Exception], str, Any]] = [
        *((TypeError, "to be the tensors C, n and m, got", bad) for bad in (None, (C, n), (C, n, m, m), {}, "abc", C)),
        *((TypeError, "to be a tensor", bad) for bad in ((None, n, m), (C, n, 0.0))),
        *((RuntimeError, "of a floating-point dtype", bad) for bad in ((C.long(), n, m), (C, n, m.to(torch.complex64)))),
        (ValueError, "expected a batch of 1 as in the cache, got 2", (C[:1], n[:1], m[:1])),
        (ValueError, "expected C of the cache of shape", (C.mT[..., :1], n, m)),
        (ValueError, "expected n of the cache of shape", (C, n[:1], m)),
        (ValueError, "expected m of the cache of shape", (C, n, m.sum())),
        (RuntimeError, "(the layer's device), got meta", (C, n.to("meta"), m)),
    ]
    for error, message, entry in cases:
        cache = SimpleNamespace(seqlen_offset=offset, key_value_memory_dict={3: entry})
        for sequence in (x, x.expand(2, 3, 8)):
            with torch.no_grad(), pytest.raises(error, match=rf"^MLSTM: .*{says(message)}"):
                layer(sequence, cache)
    layer(x, SimpleNamespace(seqlen_offset=offset, key_value_memory_dict={3: [C, n, m]}))
    for offset_given, error in ((None, TypeError), (-1, ValueError)):
        with pytest.raises(error, match=says("MLSTM: expected inference_params.seqlen_offset to be")):
            layer(x, SimpleNamespace(seqlen_offset=offset_given, key_value_memory_dict={}))


@pytest.mark.parametrize("mode", ["single", "fused"])
def test_layer_of_transformers(mode):
    """With its checkpoint."""
    modeling = pytest.importorskip("transformers.models.xlstm.modeling_xlstm", reason="needs the extra [clients]")
    if not hasattr(modeling, "xLSTMLayer"):
        pytest.skip("transformers takes the layer of the package xlstm here")
    config = modeling.xLSTMConfig(hidden_size=64, num_heads=4, weight_mode=mode, chunk_size=16, num_hidden_layers=1)
    torch.manual_seed(0)
    theirs = modeling.xLSTMLayer(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    ours = nn.MLSTM(64, 4, weight_mode=mode)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(2, 32, 64)
    expected, actual = theirs(x)[0], ours(x)
    assert (actual - expected).norm() <= 1e-5 * expected.norm()
