"""The messages and collectives that ranks send for layers of ``ContextParallel``, and their sizes in bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from distributed_helpers import Collectives, parallelize
from model_helpers import make_model, make_tokens
from process_pool import TWO_GPUS, Mesh, Place, Processes, param

from ssm_kernels import nn as layers

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from ssm_kernels.distributed import causal_conv1d, linear_scan, selective_scan, sum_gradients


def check_collectives(mesh: Mesh) -> None:
    """Counts what a rank sends: sizes of the docstrings of ``functions.py``, in bytes."""
    rank, device = mesh.get_local_rank(), mesh.device_type
    batch, d_model, width, dstate, channels = 2, 6, 4, 3, 12
    x = torch.randn(batch, 5 + rank, d_model, device=device, requires_grad=True)
    gather, number = "all_gather_into_tensor", 4
    halo, grad_halo = (batch * channels + 1) * (width - 1) * number, batch * channels * (width - 1) * number
    states = batch * channels * dstate * number

    # Along a chain the first rank sends only in forward, and the last only in backward. A message ends with its tag.
    tag = 8
    in_forward, in_backward = rank < mesh.size() - 1, rank > 0
    layer = layers.Mamba(d_model, dstate, width, device=device)
    for exchange, sent_forward, sent_backward in (
        ("summaries", [(gather, halo), (gather, 2 * states)], [(gather, states), (gather, grad_halo)]),
        (
            None,
            [("send", grad_halo + tag), ("send", states + tag)] * in_forward,
            [("send", states + tag), ("send", grad_halo + tag)] * in_backward,
        ),
    ):
        parallelize(layer, mesh, exchange)
        with Collectives() as forward:
            out = layer(x)
        with Collectives() as backward:
            out.sum().backward()
        assert forward.sent == sent_forward, exchange
        assert backward.sent == sent_backward, exchange

    heads, headdim, groups = 6, 2, 2
    channels += 2 * groups * dstate
    halo, grad_halo = (batch * channels + 1) * (width - 1) * number, batch * channels * (width - 1) * number
    states = batch * heads * headdim * dstate * number
    layer = layers.Mamba2(d_model, dstate, width, headdim=headdim, ngroups=groups, device=device)
    parallelize(layer, mesh, "chain")
    with Collectives() as forward:
        out = layer(x)
    with Collectives() as backward:
        out.sum().backward()
    # Steps and states travel together.
    assert forward.sent == [("send", states + grad_halo + tag)] * in_forward
    assert backward.sent == [("send", states + grad_halo + tag)] * in_backward
    # Messages of two steps of three channels in bf16, 12 bytes, and of one state, 4 bytes, are padded.
    x_3, weight = torch.randn(1, 5, 3, dtype=torch.bfloat16, device=device), torch.randn(3, 3, device=device)
    decay = torch.rand(1, 5, 1, device=device)
    with Collectives() as forward:
        causal_conv1d(x_3, weight, group=mesh)
        linear_scan(decay, decay, group=mesh)
    assert forward.sent == [("send", 16 + tag), ("send", 8 + tag)] * in_forward
    parallelize(layer, mesh, "summaries")
    borders = 4 * batch * 8
    for options, packing in (
        ({}, []),
        ({"seq_idx": torch.zeros(batch, 5 + rank, dtype=torch.int32, device=device)}, [(gather, borders)]),
    ):
        with Collectives() as forward:
            out = layer(x, **options)
        with Collectives() as backward:
            out.sum().backward()
        assert forward.sent == [*packing, (gather, halo), (gather, states + batch * heads * number)]
        assert backward.sent == [(gather, states), (gather, grad_halo)]

    # Phases in float64, then k and x with a number that says whether there are any, then states.
    layer = layers.Mamba3(d_model, 4, headdim=headdim, device=device)
    phases, samples = 8 * batch * heads * layer.num_rope_angles, number * batch * heads * (4 + headdim)
    states = number * batch * heads * headdim * 4
    for exchange, sent_forward, sent_backward in (
        (
            "summaries",
            [(gather, phases + 8 * batch), (gather, samples + number), (gather, states + number * batch * heads)],
            [(gather, states), (gather, samples), (gather, phases)],
        ),
        (
            "chain",
            [("send", phases + tag), ("send", samples + number + 4 + tag), ("send", states + tag)] * in_forward,
            [("send", states + tag), ("send", samples + tag), ("send", phases + tag)] * in_backward,
        ),
    ):
        parallelize(layer, mesh, exchange)
        with Collectives() as forward:
            out = layer(x)
        with Collectives() as backward:
            out.sum().backward()
        assert forward.sent == sent_forward, exchange
        assert backward.sent == sent_backward, exchange

    layer = parallelize(layers.MinGRU(d_model, 7, batch_first=True, device=device), mesh)
    with Collectives() as forward:
        out, _ = layer(x)
    with Collectives() as backward:
        out.sum().backward()
    assert forward.sent == [(gather, 2 * batch * 7 * number)]
    # The layer also returns the last state.
    assert backward.sent == [(gather, 2 * batch * 7 * number)]

    # All layers of a model share what they know of the borders.
    model = parallelize(make_model("Mamba2", device), mesh, "summaries")
    lengths, borders, steps = 4 * 8, 4 * 8, sum(5 + other for other in range(mesh.size()))
    ends = torch.tensor([0, 7, steps], device=device)
    with Collectives() as forward:
        model(make_tokens(1, 5 + rank, device=device), cu_seqlens=ends)
    assert [sent for _, sent in forward.sent[:2]] == [lengths, borders] and len(forward.sent) == 2 + 2 * 2
    ends[1] = 8
    with Collectives() as forward:
        model(make_tokens(1, 5 + rank, device=device), cu_seqlens=ends)
    assert len(forward.sent) == 2 + 2 * 2

    # A scan in reverse sends as much as one forward. Functions ask for the borders in every call.
    u, A = torch.randn(1, channels, 5 + rank, device=device, requires_grad=True), -torch.ones(channels, dstate, device=device)
    B, seq_idx = torch.randn(1, dstate, 5 + rank, device=device), torch.zeros(1, 5 + rank, dtype=torch.int32, device=device)
    with Collectives() as forward:
        options = {"seq_idx": seq_idx, "group": mesh, "exchange": "summaries"}
        results = [selective_scan(u, u, A, B, B, reverse=reverse, **options) for reverse in (False, True)]
    with Collectives() as backward:
        (results[0] * results[1]).sum().backward()
    states = channels * dstate * number
    assert forward.sent == [(gather, borders), (gather, 2 * states)] * 2
    assert backward.sent == [(gather, states), (gather, states)]

    # Gradients are added in buckets, with a number for each parameter.
    layer = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2).double()).to(device)
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    with Collectives() as sums:
        sum_gradients(layer, mesh)
    assert sums.sent == [("all_reduce", (20 + 2) * 4), ("all_reduce", (12 + 2) * 8)]
    assert all((parameter.grad == sum(range(mesh.size() + 1))).all() for parameter in layer.parameters())

    # Nothing before the scan needs a gradient, and so no rank sends one.
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    layer = parallelize(layers.Mamba(d_model, dstate, width, device=device).requires_grad_(False), mesh)
    layer.out_proj.requires_grad_(True)
    layer.D.requires_grad_(True)
    out = layer(x.detach())
    with Collectives() as backward:
        out.sum().backward()
    assert backward.sent == []


@pytest.mark.parametrize("place", [param(Place((3,))), param(TWO_GPUS)])
def test_bytes_of_a_layer(processes: Processes, place: Place):
    processes.check(place, check_collectives)


def test_one_rank_sends_nothing(processes: Processes):
    processes.check(Place((1,)), check_one_rank)


def check_one_rank(mesh: Mesh) -> None:
    layer = parallelize(layers.Mamba2(6, 3, headdim=2), mesh)
    with Collectives() as sent:
        layer(torch.randn(1, 5, 6), cu_seqlens=torch.tensor([0, 2, 5])).sum().backward()
    assert sent.sent == []
