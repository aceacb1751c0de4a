"""Mamba2 alone: the gated norm of groups, and flattened batches."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import says
from layer_helpers import WIDTH, assert_all_close, gradients, make_layer, make_sequence
from plain_layers import gated_norm, parameters_of
from test_nn_mixers import new_cache
from torch import Tensor

from ssm_kernels.nn.gated_rms_norm import GatedRMSNorm

OPERATOR = "ssd_chunk_scan"


def test_gated_norm_of_groups():
    x, z = make_sequence(2, 3, 8), make_sequence(2, 3, 8, seed=1)
    for groups, before in itertools.product((1, 2, 4), (False, True)):
        layer = GatedRMSNorm(8, groups, before, dtype=torch.float64)
        torch.nn.init.uniform_(layer.weight)
        torch.testing.assert_close(layer(x, z), gated_norm(x, z, layer.weight, groups, before), rtol=1e-12, atol=1e-12)
    for groups in (0, 3):
        with pytest.raises(ValueError, match=says("GatedRMSNorm: expected groups", f"got {groups}")):
            GatedRMSNorm(8, groups)


def test_gated_norms_pickled_by_an_earlier_version_have_the_default():
    layer, x = GatedRMSNorm(8), make_sequence(2, 8, dtype=torch.float32)
    expected = layer(x, x)
    del layer.__dict__["activation"]
    assert layer.activation == "silu" and torch.equal(layer(x, x), expected)


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
        ((2, 9, 6), {"cu_seqlens": OFFSETS}, "expected a batch of 1 with cu_seqlens, got 2"),
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
