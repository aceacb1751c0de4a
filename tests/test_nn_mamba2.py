"""Mamba2 alone: the gated norm of groups, sequences one after another, and flattened batches."""

from __future__ import annotations

import itertools
import math

import plain_layers
import pytest
import torch
from helpers import says
from layer_helpers import WIDTH, assert_all_close, assert_same_gradients, gradients, make_layer, make_sequence, variants_of
from plain_layers import gated_norm, parameters_of
from test_nn_mixers import TOLERANCES, new_cache
from torch import Tensor

from ssm_kernels.nn import Mamba2
from ssm_kernels.nn.mamba2 import GatedRMSNorm

OPERATOR = "ssd_chunk_scan"


def one_by_one(layer: Mamba2, u: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """Applies the plain layer to each sequence of at least one step."""
    bounds = itertools.pairwise(dict.fromkeys(offsets))
    return torch.cat([plain_layers.mamba2(layer, u[:, begin:end]) for begin, end in bounds], dim=1)


def test_gated_norm_of_groups():
    x, z = make_sequence(2, 3, 8), make_sequence(2, 3, 8, seed=1)
    for groups, before in itertools.product((1, 2, 4), (False, True)):
        layer = GatedRMSNorm(8, groups, before, dtype=torch.float64)
        torch.nn.init.uniform_(layer.weight)
        torch.testing.assert_close(layer(x, z), gated_norm(x, z, layer.weight, groups, before), rtol=1e-12, atol=1e-12)
    for groups in (0, 3):
        with pytest.raises(ValueError, match=says("GatedRMSNorm: expected groups", f"got {groups}")):
            GatedRMSNorm(8, groups)


# ----- sequences one after another


@pytest.mark.parametrize("name", variants_of("Mamba2"))
def test_packed_sequences(name, device):
    """Shorter than the convolution is wide, too."""
    layer, offsets = make_layer(name, device), (0, 0, 1, 3, 3, 9, 11)
    u = make_sequence(1, 11, WIDTH, device=device).requires_grad_()
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    actual, expected = layer(u, cu_seqlens=cu_seqlens), one_by_one(layer, u, offsets)
    of_values, of_gradients = TOLERANCES["Mamba2"]
    assert_all_close(actual, expected, *of_values)
    assert_same_gradients(actual, expected, {"u": u} | parameters_of(layer), *of_gradients)
    with torch.no_grad():
        torch.testing.assert_close(layer(u, cu_seqlens=cu_seqlens.long()), layer(u, cu_seqlens=cu_seqlens))


@pytest.mark.parametrize("name", ["Mamba2", "Mamba2-conv_of_one_step", "Mamba2-with_mlp", "Mamba2-no_norm"])
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
        assert_all_close(torch.cat(output, dim=1), plain_layers.mamba2(layer, u), *TOLERANCES["Mamba2"][0])
    if needs_grad and not padding:  # the gradient of a product with NaN is NaN, whatever the gradient of the product is
        torch.cat([part for output in outputs for part in output], dim=1).sum().backward()
        assert layer.in_proj.weight.grad.isfinite().all()


def test_seq_idx_of_another_packing_than_the_cache():
    layer, u = make_layer("Mamba2", "cpu"), make_sequence(1, 5, WIDTH, device="cpu")
    seq_idx = torch.tensor([[0, 0, 0, 1, 1]])
    with pytest.raises(ValueError, match=says("same packing, got sequences that begin at [3] and at [2]")):
        layer(u, seq_idx=seq_idx, cu_seqlens=torch.tensor([0, 2, 5]), inference_params=new_cache())
    with pytest.raises(ValueError, match=says("Mamba2: expected no inference_params with seq_idx alone")):
        layer(u, seq_idx=seq_idx, inference_params=new_cache())


def test_a_packed_cache_has_a_row_for_each_sequence(device):
    layer, cache = make_layer("Mamba2", device), new_cache()
    u, offsets = make_sequence(1, 5, WIDTH, device=device), torch.tensor([0, 2, 5], device=device)
    layer(u, cu_seqlens=offsets, inference_params=cache)
    before = [state.clone() for state in cache.key_value_memory_dict[0]]
    assert [len(state) for state in before] == [2, 2]
    with pytest.raises(ValueError, match=says("Mamba2: expected a batch of 2 as in the cache, got 3")):
        layer(u, cu_seqlens=torch.tensor([0, 2, 4, 5], device=device), inference_params=cache)
    with pytest.raises(ValueError, match=says("expected batch 1 with cu_seqlens, got 2")):
        layer(u.expand(2, -1, -1), cu_seqlens=offsets, inference_params=cache)
    layer(u[:, :0], cu_seqlens=torch.zeros_like(offsets), inference_params=cache)
    assert all(not state.any() for state in cache.key_value_memory_dict[0])  # offset 0: the sequences start anew


def test_seq_idx(device):
    """A number that comes again is another sequence, unless it comes at once."""
    layer, u = make_layer("Mamba2", device), make_sequence(2, 9, WIDTH, device=device)
    rows = [[4, 4, 4, 0, 4, 4, 4, 4, 7], [1, 1, 1, 1, 1, 1, 1, 1, 1]]
    expected = torch.cat([one_by_one(layer, u[:1], (0, 3, 4, 8, 9)), one_by_one(layer, u[1:], (0, 9))])
    for dtype in (torch.int32, torch.int64):
        assert_all_close(layer(u, seq_idx=torch.tensor(rows, dtype=dtype, device=device)), expected)


def test_seq_idx_with_cu_seqlens(device):
    """Sequences begin where either says so; here seq_idx also changes with the second packed sequence."""
    layer, u = make_layer("Mamba2", device), make_sequence(1, 9, WIDTH, device=device)
    seq_idx = torch.tensor([[4, 4, 0, 1, 1, 1, 1, 7, 7]], device=device)
    offsets = torch.tensor([0, 0, 3, 5, 9], device=device)
    assert_all_close(layer(u, seq_idx=seq_idx, cu_seqlens=offsets), one_by_one(layer, u, (0, 2, 3, 5, 7, 9)))


# ----- flattened batches


@pytest.mark.parametrize("with_seq_idx", [False, True])
def test_flattened_batch(with_seq_idx, device):
    layer, u = make_layer("Mamba2", device), make_sequence(3, 4, WIDTH, device=device).requires_grad_()
    ids = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0], [2, 3, 3, 3]], device=device) if with_seq_idx else None
    flat = u.detach().flatten(0, 1).requires_grad_()
    actual, expected = layer(flat, 4, ids), layer(u, None, ids)
    assert actual.shape == flat.shape
    torch.testing.assert_close(actual, expected.flatten(0, 1), rtol=0, atol=0)
    leaves = parameters_of(layer)
    of_flat = gradients(actual, [flat, *leaves.values()])
    of_batch = gradients(expected.flatten(0, 1), [u, *leaves.values()])
    assert_all_close((of_flat[0].unflatten(0, (3, 4)), *of_flat[1:]), of_batch, 1e-12, 1e-14)


def test_flattened_batch_without_rows(device):
    assert make_layer("Mamba2", device)(torch.ones(0, WIDTH, device=device, dtype=torch.float64), seqlen=4).shape == (0, WIDTH)


def test_flattened_prefill_and_step(device):
    layer, u = make_layer("Mamba2", device), make_sequence(2, 5, WIDTH, device=device)
    cache = new_cache()
    with torch.no_grad():
        prefilled = layer(u[:, :4].flatten(0, 1), 4, None, None, cache)
        cache.seqlen_offset = 4
        step = layer(u[:, 4], 1, None, None, cache)
        whole = layer(u)
    torch.testing.assert_close(prefilled.unflatten(0, (2, 4)), whole[:, :4], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(step, whole[:, 4], rtol=1e-10, atol=1e-12)


# ----- errors

OFFSETS, NUMBERS = torch.tensor([0, 4, 9]), torch.zeros(1, 9, dtype=torch.int32)
STATES = "expected no inference_params with seq_idx alone"


@pytest.mark.parametrize(
    "shape, options, message",
    [
        ((1, 9, 6), {"seq_idx": NUMBERS, "inference_params": new_cache()}, STATES),
        ((1, 9, 6), {"seq_idx": NUMBERS[:, :8]}, "expected seq_idx of shape (batch, seqlen) = [1, 9], got [1, 8]"),
        ((2, 9, 6), {"cu_seqlens": OFFSETS}, "expected batch 1 with cu_seqlens, got 2"),
        ((1, 9, 6), {"cu_seqlens": torch.tensor([0, 8])}, "expected cu_seqlens to end at seqlen = 9, got 8"),
        ((1, 9, 6), {"cu_seqlens": OFFSETS[None]}, "expected cu_seqlens of shape (sequences + 1,), got [1, 3]"),
        ((9, 6), {"cu_seqlens": OFFSETS}, "expected u of shape (batch, seqlen, d_model) with d_model = 6, got [9, 6]"),
        ((10, 6), {"seqlen": 4}, "expected u of a multiple of seqlen = 4 steps, got 10"),
        ((1, 10, 6), {"seqlen": 5}, "expected u of shape (batch * seqlen, d_model) with seqlen, got [1, 10, 6]"),
        ((10, 6), {"seqlen": 0}, "expected seqlen to be at least 1, got 0"),
        ((10, 6), {"seqlen": 5, "cu_seqlens": OFFSETS}, "expected seqlen or cu_seqlens, got both"),
        ((10, 6), {"seqlen": 5, "seq_idx": NUMBERS}, "expected seq_idx of shape (batch, seqlen) = [2, 5], got [1, 9]"),
    ],
)
def test_bad_calls(shape, options, message, device):
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    with pytest.raises(ValueError, match=says(message)):
        make_layer("Mamba2", device)(make_sequence(*shape, device=device), **options)


def test_offsets_on_another_device(device):
    layer, u = make_layer("Mamba2", device), make_sequence(1, 9, WIDTH, device=device)
    with pytest.raises(RuntimeError, match=says(f"Mamba2: expected cu_seqlens on {u.device}, got meta")):
        layer(u, cu_seqlens=OFFSETS.to("meta"))
