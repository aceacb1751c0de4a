"""Mamba and Mamba2: sequences one after another. SelectiveSSM: the same."""

from __future__ import annotations

import itertools
import math

import plain_layers
import pytest
import torch
from helpers import says
from layer_helpers import WIDTH, assert_all_close, assert_same_gradients, make_layer, make_sequence, variants_of
from plain_layers import parameters_of
from test_nn_mixers import TOLERANCES, new_cache
from torch import Tensor

from ssm_kernels.nn import Mamba, Mamba2, SelectiveSSM

OPERATOR = "ssd_chunk_scan"
every_mixer = pytest.mark.parametrize("name", ["Mamba", "Mamba2"])


def plain(layer: Mamba | Mamba2, u: Tensor) -> Tensor:
    return plain_layers.mamba(layer, u) if isinstance(layer, Mamba) else plain_layers.mamba2(layer, u)


def one_by_one(layer: Mamba | Mamba2, u: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """Applies the plain layer to each sequence of at least one step."""
    bounds = itertools.pairwise(dict.fromkeys(offsets))
    return torch.cat([plain(layer, u[:, begin:end]) for begin, end in bounds], dim=1)


@pytest.mark.parametrize("name", [*variants_of("Mamba"), *variants_of("Mamba2")])
def test_packed_sequences(name, device):
    """Shorter than the convolution is wide, too."""
    layer, offsets = make_layer(name, device), (0, 0, 1, 3, 3, 9, 11)
    u = make_sequence(1, 11, WIDTH, device=device).requires_grad_()
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    actual, expected = layer(u, cu_seqlens=cu_seqlens), one_by_one(layer, u, offsets)
    of_values, of_gradients = TOLERANCES[name.partition("-")[0]]
    assert_all_close(actual, expected, *of_values)
    assert_same_gradients(actual, expected, {"u": u} | parameters_of(layer), *of_gradients)
    with torch.no_grad():
        torch.testing.assert_close(layer(u, cu_seqlens=cu_seqlens.long()), layer(u, cu_seqlens=cu_seqlens))


@every_mixer
def test_padding_in_the_middle(name, device):
    """Steps with a negative number mix to zero, before the bias of the out-projection, and change no other step."""
    layer = make_layer(name, device)
    u = make_sequence(1, 11, WIDTH, device=device).requires_grad_()
    seq_idx = torch.tensor([[0] * 4 + [-1] * 3 + [1] * 4], device=device)
    actual, sequences = layer(u, seq_idx=seq_idx), [layer(u[:, :4]), layer(u[:, 7:])]
    padding = layer.out_proj(u.new_zeros(1, 3, layer.out_proj.in_features))
    expected = torch.cat([sequences[0], padding, sequences[1]], dim=1)
    of_values, of_gradients = TOLERANCES[name]
    assert_all_close(actual, expected, *of_values)
    assert_same_gradients(actual, expected, {"u": u} | parameters_of(layer), *of_gradients)
    (grad,) = torch.autograd.grad(layer(u, seq_idx=seq_idx).square().sum(), u)
    assert not grad[:, 4:7].any()


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Mamba2-conv_of_one_step", "Mamba2-with_mlp", "Mamba2-no_norm"])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("padding", [0, 2])
def test_packed_prompts_fill_a_cache(name, padding, needs_grad, device):
    """Two packed calls, with sequences without steps, then steps: the same as every sequence in one piece."""
    layer, cache = make_layer(name, device), new_cache()
    pieces = [(4, 1, 0, 7), (2, 0, 0, 1)]  # the lengths in each call
    sequences = [
        make_sequence(1, sum(lengths) + 3, WIDTH, device=device, seed=i) for i, lengths in enumerate(zip(*pieces, strict=True))
    ]
    outputs, done = [[] for _ in sequences], [0] * len(sequences)
    with torch.set_grad_enabled(needs_grad):
        for lengths in pieces:
            u = torch.cat([u[:, t : t + n] for u, t, n in zip(sequences, done, lengths, strict=True)], dim=1)
            u = torch.cat([u, torch.full_like(u[:, :1], math.nan).expand(-1, padding, -1)], dim=1)
            offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
            numbers = [i for i, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
            seq_idx = torch.tensor([numbers], dtype=torch.int32, device=device) if padding else None
            parts = layer(u, seq_idx=seq_idx, cu_seqlens=offsets, inference_params=cache).split([*lengths, padding], dim=1)
            done = [t + n for t, n in zip(done, lengths, strict=True)]
            cache.seqlen_offset = max(done)
            for output, part in zip(outputs, parts[:-1], strict=True):
                output.append(part)
        for step in range(3):
            u = torch.cat([u[:, t + step : t + step + 1] for u, t in zip(sequences, done, strict=True)])
            for output, part in zip(outputs, layer(u, inference_params=cache).split(1), strict=True):
                output.append(part)
    for u, output in zip(sequences, outputs, strict=True):
        assert_all_close(torch.cat(output, dim=1), plain(layer, u), *TOLERANCES[name.partition("-")[0]][0])
    if needs_grad and not padding:  # the gradient of a product with NaN is NaN, whatever the gradient of the product is
        torch.cat([part for output in outputs for part in output], dim=1).sum().backward()
        assert layer.in_proj.weight.grad.isfinite().all()


@every_mixer
def test_seq_idx_of_another_packing_than_the_cache(name):
    layer, u = make_layer(name, "cpu"), make_sequence(1, 5, WIDTH, device="cpu")
    seq_idx = torch.tensor([[0, 0, 0, 1, 1]])
    with pytest.raises(ValueError, match=says("same packing, got sequences that begin at [3] and at [2]")):
        layer(u, seq_idx=seq_idx, cu_seqlens=torch.tensor([0, 2, 5]), inference_params=new_cache())
    with pytest.raises(ValueError, match=says(f"{name}: expected no inference_params with seq_idx alone")):
        layer(u, seq_idx=seq_idx, inference_params=new_cache())


@every_mixer
def test_a_packed_cache_has_a_row_for_each_sequence(name, device):
    layer, cache = make_layer(name, device), new_cache()
    u, offsets = make_sequence(1, 5, WIDTH, device=device), torch.tensor([0, 2, 5], device=device)
    layer(u, cu_seqlens=offsets, inference_params=cache)
    before = [state.clone() for state in cache.key_value_memory_dict[0]]
    assert [len(state) for state in before] == [2, 2]
    with pytest.raises(ValueError, match=says(f"{name}: expected a batch of 2 as in the cache, got 3")):
        layer(u, cu_seqlens=torch.tensor([0, 2, 4, 5], device=device), inference_params=cache)
    with pytest.raises(ValueError, match=says("expected a batch of 1 with cu_seqlens, got 2")):
        layer(u.expand(2, -1, -1), cu_seqlens=offsets, inference_params=cache)
    layer(u[:, :0], cu_seqlens=torch.zeros_like(offsets), inference_params=cache)
    assert all(not state.any() for state in cache.key_value_memory_dict[0])  # offset 0: the sequences start anew


@every_mixer
def test_seq_idx(name, device):
    """A number that comes again is another sequence, unless it comes at once."""
    layer, u = make_layer(name, device), make_sequence(2, 9, WIDTH, device=device)
    rows = [[4, 4, 4, 0, 4, 4, 4, 4, 7], [1, 1, 1, 1, 1, 1, 1, 1, 1]]
    expected = torch.cat([one_by_one(layer, u[:1], (0, 3, 4, 8, 9)), one_by_one(layer, u[1:], (0, 9))])
    for dtype in (torch.int32, torch.int64):
        assert_all_close(layer(u, seq_idx=torch.tensor(rows, dtype=dtype, device=device)), expected)


@every_mixer
def test_seq_idx_with_cu_seqlens(name, device):
    """Sequences begin where either says so; here seq_idx also changes with the second packed sequence."""
    layer, u = make_layer(name, device), make_sequence(1, 9, WIDTH, device=device)
    seq_idx = torch.tensor([[4, 4, 0, 1, 1, 1, 1, 7, 7]], device=device)
    offsets = torch.tensor([0, 0, 3, 5, 9], device=device)
    assert_all_close(layer(u, seq_idx=seq_idx, cu_seqlens=offsets), one_by_one(layer, u, (0, 2, 3, 5, 7, 9)))


def test_packed_sequences_of_the_selective_ssm(device):
    layer, offsets = SelectiveSSM(6, 4, dtype=torch.float64, device=device), (0, 0, 1, 40, 40, 50)
    x, z = (make_sequence(1, 50, 6, device=device, seed=seed).requires_grad_() for seed in range(2))
    states = make_sequence(5, 6, 4, device=device, seed=2).requires_grad_()
    seq_idx = torch.arange(50, device=device)[None] // 7
    for ids in (None, seq_idx):
        cu_seqlens = torch.tensor(offsets, device=device)
        actual = layer(x, z, states, True, cu_seqlens=cu_seqlens, seq_idx=ids)
        outputs, last_states = [], []
        for i, (begin, end) in enumerate(itertools.pairwise(offsets)):
            steps = slice(begin, end)
            numbers = None if ids is None else ids[:, steps]
            out, last_state = layer(x[:, steps], z[:, steps], states[i : i + 1], True, seq_idx=numbers)
            outputs.append(out)
            last_states.append(last_state)
        expected = torch.cat(outputs, dim=1), torch.cat(last_states)
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
        leaves = [x, z, states, *layer.parameters()]
        found, exact = (torch.autograd.grad(sum(v.square().sum() for v in results), leaves) for results in (actual, expected))
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-10)
    with pytest.raises(TypeError, match=says("SelectiveSSM: expected cu_seqlens to be a tensor")):
        layer(x, cu_seqlens=[0, 50])
