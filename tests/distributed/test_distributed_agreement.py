"""Agreement of the ranks of ``ssm_kernels.distributed``: dropped states, sums of gradients, and each other's calls."""

from __future__ import annotations

import copy
import datetime
import gc
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from process_pool import Mesh, Place, Processes
from torch import Tensor

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from torch.distributed.tensor.parallel import parallelize_module

from ssm_kernels import distributed
from ssm_kernels import nn as layers
from ssm_kernels.distributed import (
    ContextParallel,
    _agreement,
    _group_calls,
    _group_operators,
    _packed_sequences,
    _reductions,
    sum_gradients,
)
from ssm_kernels.distributed._group import Group


def check_drops(mesh: Mesh) -> None:
    """A dropped state leaves no trace in later steps, nor do their gradients in earlier ones."""
    rank, group = mesh.get_local_rank(), mesh.get_group()
    own, axes = slice(4 * rank, 4 * rank + 4), (1, 12, 2)

    def run(name: str, steps: Tensor, place: int, bad: float, bad_gradient: float) -> list[Tensor]:
        """Output and gradients of a scan in the order of ``steps``, which starts anew at the step ``place``."""
        x, decay, factor = torch.ones(axes), torch.full(axes, 0.5), torch.ones(axes)
        x[:, 1 if place > 4 else 0], factor[:, 10] = bad if place > 2 else 1, bad_gradient
        x, factor = x[:, steps[0]], factor[:, steps[0]]
        initial, seq_idx = torch.full((1, 2, 1), float(bad)), (steps >= place).long()[:, own]
        options: dict[str, Any] = {"reverse": bool(steps[0, 0] > 0), "group": group}
        x, decay = (value[:, own].clone().requires_grad_() for value in (x, decay))
        ones = torch.ones(1, 4, 1)
        if name == "linear_scan":
            out = distributed.linear_scan(decay, x, reset=(steps == place)[:, own], **options)
        elif name == "selective_scan":
            u, delta, B = (value.transpose(1, 2) for value in (x, decay, ones))
            options |= {"initial_state": initial, "seq_idx": seq_idx}
            out = distributed.selective_scan(u, delta, -torch.ones(2, 1), B, B, **options).transpose(1, 2)
        else:
            B = ones[..., None]
            options |= {"initial_states": initial[..., None], "seq_idx": seq_idx}
            out = distributed.ssd_chunk_scan(x[..., None], decay, -torch.ones(2), B, B, **options)[..., 0]
        (out * factor[:, own]).sum().backward()
        # On one process the gradients of dt in a chunk of ssd_chunk_scan share the NaN of one of its steps.
        return [out.detach(), x.grad] if name == "ssd_chunk_scan" else [out.detach(), x.grad, decay.grad]

    ascending = torch.arange(12)[None]
    names, orders = ("linear_scan", "selective_scan", "ssd_chunk_scan"), (ascending, ascending.flip(1))
    for name, steps in itertools.product(names, orders):
        for place in (2, 4, 6, 8):
            finite, later, earlier = (run(name, steps, place, *bad) for bad in ((1, 1), (math.inf, 1), (1, math.inf)))
            for value, wanted in zip(later, finite, strict=True):
                new = (steps >= place)[:, own].expand_as(value[..., 0])
                assert torch.equal(value[new], wanted[new]), (name, place, "later steps")
            for value, wanted in zip(earlier, finite, strict=True):
                old = (steps < place)[:, own].expand_as(value[..., 0])
                assert torch.equal(value[old], wanted[old]), (name, place, "earlier steps")


def test_dropped_states_leave_no_trace(processes: Processes):
    processes.check(Place((3,)), check_drops)


def check_absent_gradients(mesh: Mesh) -> None:
    """A rank without a gradient gets the sum of the others'; where no rank has one there is none."""
    rank, group = mesh.get_local_rank(), mesh.get_group()
    layer = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in ("all", "some", "none", "frozen")})
    layer["frozen"].requires_grad_(False)
    for name, ranks in (("all", (0, 1, 2)), ("some", (1, 2))):
        if rank in ranks:
            layer[name].weight.grad = torch.full((1, 2), rank + 1.0)
    sum_gradients(layer, group)
    gradients = {name: None if part.weight.grad is None else part.weight.grad.tolist() for name, part in layer.items()}
    assert gradients == {"all": [[6.0, 6.0]], "some": [[5.0, 5.0]], "none": None, "frozen": None}


def test_sum_of_absent_gradients(processes: Processes):
    processes.check(Place((3,)), check_absent_gradients)


def check_comparisons(mesh: Mesh) -> None:
    """A new call costs 2 * ranks - 1 reads of the store, and another number of packed sequences none."""
    rank, group = mesh.get_local_rank(), mesh.get_group()
    reads = [0]

    class Counting:
        def __init__(self, store: Any) -> None:
            self.store = store

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> Any:
                reads[0] += {"get": 1, "multi_get": len(args[0])}.get(name, 0)
                return getattr(self.store, name)(*args)

            return call

    whole = _agreement._store
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_agreement, "_store", lambda group: (Counting(whole(group)[0]), whole(group)[1]))
        # A new group has agreed on nothing.
        fresh = dist.new_group([*range(dist.get_world_size(group))])
        states = weakref.ref(fresh)
        x, seqlen = torch.randn(1, 3 + rank, 2), sum(range(3, 3 + dist.get_world_size(group)))
        for ends in ((5, seqlen), (2, 4, 6, seqlen), (seqlen,)):
            cu_seqlens, h0 = torch.tensor([0, *ends]), torch.randn(len(ends), 2)
            distributed.linear_scan(x, x, h0, cu_seqlens=cu_seqlens, group=fresh)
            distributed.causal_conv1d(x, torch.ones(2, 3), cu_seqlens=cu_seqlens, group=fresh)
        total = torch.tensor(reads)
        dist.all_reduce(total, group=fresh)
        assert total.item() == 2 * (2 * dist.get_world_size(group) - 1)
        assert fresh in _agreement._histories
        dist.destroy_process_group(fresh)
        known = len(_agreement._histories)
        del fresh
        gc.collect()
        assert states() is None and known == len(_agreement._histories) + 1


def test_comparisons_of_ranks(processes: Processes):
    processes.check(Place((4,)), check_comparisons)


def test_a_layer_describes_only_calls_that_differ(monkeypatch: pytest.MonkeyPatch):
    group, events = Group("ranks", 2, 0), []
    monkeypatch.setattr(Group, "process_group", property(lambda self: type(self)))
    monkeypatch.setattr(_agreement, "compare", lambda *call: events.append("compared"))
    describe = _agreement.describe
    monkeypatch.setattr(_group_calls, "describe", lambda *axes: events.append("described") or describe(*axes))
    agreement = _agreement.Agreement(group, of_layer=True)
    operators = _group_operators.GroupOperators(group, agreement, "chain", "layer", layer=1)
    x = torch.ones(1, 4, 2)

    def call(x: Tensor, activation: str | None = None) -> list[str]:
        events.clear()
        operators._agree("causal_conv1d", lambda **arguments: None, {"x": x}, {"activation": activation}, {"x": 1})
        return sorted({*events})

    nothing, described, compared = [], ["described"], ["compared", "described"]
    assert call(x) == compared and call(x.clone()) == nothing
    assert call(x[:, 1:]) == described and call(x[:, 1:]) == nothing
    for other in ((x[..., 1:],), (x.double(),), (x.clone().requires_grad_(),), (x, "silu")):
        assert call(*other) == compared and call(*other) == nothing
        assert call(x) == compared
    with torch.no_grad():
        assert call(x) == compared
    assert call(x) == nothing


def check_copied_tensor(mesh: Mesh) -> None:
    """A copy of the other layers' ``seq_idx`` on one rank is an error on every rank; functions take it."""
    rank, x = mesh.get_local_rank(), torch.randn(1, 6, 4)
    seq_idx = torch.zeros(1, 6, dtype=torch.int64)
    own = seq_idx if rank == 0 else seq_idx.clone()
    u, A = x.transpose(1, 2), -torch.ones(4, 3)
    results = [distributed.selective_scan(u, u, A, u[:, :3], u[:, :3], seq_idx=each, group=mesh) for each in (seq_idx, own)]
    assert torch.equal(*results)

    model = nn.Sequential(*(layers.Mamba2(4, 3, headdim=2) for _ in range(2)))
    parallelize_module(model, mesh, ContextParallel())
    model[0](x, seq_idx=seq_idx)
    expected = "expected the same tensor on every rank, got that of an earlier call on rank 0 and a new one on rank 1"
    with pytest.raises(ValueError, match=expected):
        model[1](x, seq_idx=own)
    model[1](x, seq_idx=seq_idx)


def check_tensors_that_change(mesh: Mesh) -> None:
    """Other values that no version counts, and other spans with the same ``cu_seqlens``, which the last rank cannot see."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layers.Mamba(4, 3) for _ in range(2))).double()
    cut = parallelize_module(copy.deepcopy(model), mesh, ContextParallel())
    rank, x, numbers = mesh.get_local_rank(), torch.randn(1, 12, 4, dtype=torch.float64), np.array([0, 5, 12])
    cu_seqlens = torch.from_numpy(numbers)
    for border, spans in ((5, (4, 4, 4)), (7, (4, 4, 4)), (7, (2, 6, 4)), (7, (6, 2, 4))):
        numbers[1] = border
        expected, actual = x, x.split(spans, 1)[rank]
        for whole, part in zip(model, cut, strict=True):
            expected, actual = whole(expected, cu_seqlens=cu_seqlens), part(actual, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(actual, expected.split(spans, 1)[rank], rtol=0, atol=1e-10)


def check_tensors_are_released(mesh: Mesh) -> None:
    """Layers drop a ``Packing`` when its tensors die."""
    layer, known = layers.Mamba2(4, 3, headdim=2), _packed_sequences._caches
    parallelize_module(layer, mesh, ContextParallel())
    seq_idx, cu_seqlens = torch.zeros(1, 6, dtype=torch.int64), torch.tensor([0, 12])
    before = len(known.get(mesh.get_group(), ()))
    with torch.no_grad():
        for options in ({"seq_idx": seq_idx}, {"cu_seqlens": cu_seqlens}, {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}):
            layer(torch.randn(1, 6, 4), **options)
    assert len(known[mesh.get_group()]) == before + 2
    tensors = [weakref.ref(tensor) for tensor in (seq_idx, cu_seqlens)]
    del seq_idx, cu_seqlens, options
    gc.collect()
    assert [tensor() for tensor in tensors] == [None, None] and len(known[mesh.get_group()]) <= before


@pytest.mark.parametrize("check", [check_copied_tensor, check_tensors_are_released])
def test_tensors_of_earlier_calls(processes: Processes, check: Callable[[Mesh], None]):
    processes.check(Place((2,)), check)


def test_tensors_that_change(processes: Processes):
    processes.check(Place((3,)), check_tensors_that_change)


def check_failed_sums(mesh: Mesh) -> None:
    """A rank that waits in vain for a sum gets an error that names it."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.5))
    if mesh.get_local_rank() > 0:
        return
    layer = nn.Linear(2, 1)
    layer(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"sum_gradients: the all-reduce failed on rank 0 of 2: a rank has died"):
        sum_gradients(layer, group)
    # The failure has closed the connections of the group.
    for call, name in ((_reductions.all_reduce, "all_reduce"), (_reductions.all_gather, "all_gather_into_tensor")):
        with pytest.raises(RuntimeError, match=f"tensor parallelism: {name} failed on rank 0 of 2: a rank has died"):
            call(torch.ones(1, 1, 1), Group.of(group))


def test_failed_sums_have_names(processes: Processes):
    processes.check(Place((4,)), check_failed_sums)


def check_lost_store(mesh: Mesh) -> None:
    """Without the store, the ranks' calls cannot be compared: the error says this, and not that a rank is late."""
    server, limit = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), datetime.timedelta(seconds=5)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    expected = r"linear_scan: rank \d makes a call with new arguments, .* the store of the process group cannot be reached"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_agreement, "_store", lambda group: (store, limit))
        with pytest.raises(RuntimeError, match=expected):
            distributed.linear_scan(*torch.rand(2, 1, 5, 17), group=mesh)


def test_lost_store(processes: Processes):
    processes.check(Place((2,)), check_lost_store)
