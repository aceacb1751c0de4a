"""Tags of messages along a chain: a rank that skips a call or a backward gets an error, or causes one, and no rank hangs."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.checkpoint
from process_pool import TWO_GPUS, Mesh, Place, Processes, param
from torch import Tensor

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from ssm_kernels import nn as layers
from ssm_kernels.distributed import ContextParallel, _messages, keep_exchanged_states, linear_scan, mingru_scan
from ssm_kernels.distributed._messages import _Tag

SECONDS = 3  # before a rank no longer waits for another


def group_of(mesh: Mesh, ranks: int) -> Mesh | None:
    """Returns a new group of the first ranks, None elsewhere.

    Tests that break a message need their own group, because gloo closes its connections.
    """
    # NCCL makes its connections within the time-out.
    seconds = SECONDS if mesh.device_type == "cpu" else 30
    group = dist.new_group([*range(ranks)], timeout=datetime.timedelta(seconds=seconds))
    if mesh.get_local_rank() >= ranks:
        return None
    return DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=("context",))


def on_new_group(mesh: Mesh, check: Callable[[Mesh], None], ranks: int) -> None:
    group = group_of(mesh, ranks)
    if group is not None:
        check(group)


def raises(pattern: str, call: Callable[[], Any]) -> None:
    began = time.perf_counter()
    with pytest.raises(RuntimeError, match=pattern):
        call()
    assert time.perf_counter() - began < 3 * SECONDS


def scan(mesh: Mesh, a: Tensor) -> Tensor:
    return linear_scan(a, a, group=mesh, exchange="chain")


def steps(mesh: Mesh) -> Tensor:
    return torch.full((1, 2, 3), 0.5, device=mesh.device_type, requires_grad=True)


# As rank 0 finds it where rank 1 has sent the gradient of another call.
OTHER_GRADIENT = (
    r"linear_scan: states: expected from rank 1 on rank 0 of \d: linear_scan: states, gradient of call {}; got: "
    r"linear_scan: states, gradient of call {}\. One of the two ranks has skipped a call or backward"
)
# As a rank finds it that waits for one that makes no such call.
TIME_OUT = r"linear_scan: states: the message from rank {} failed on rank {} of \d: .* The message: linear_scan: states, {}\."


def check_skipped_layer(mesh: Mesh) -> None:
    """Rank 1 skips a layer: it gets another layer's message, where sizes and operators agree; the next rank waits in vain."""
    rank = mesh.get_local_rank()
    model = nn.Sequential(*(layers.Mamba2(4, 3, headdim=2) for _ in range(3)))
    parallelize_module(model, mesh, ContextParallel(exchange="chain"))
    x = torch.randn(1, 5, 4)
    model(x)
    what = "Mamba2: states and halo"
    if rank == 0:
        model(x)
        return
    x = model[0](x)
    if rank == 1:
        expected = rf"expected from rank 0 on rank 1 of 3: {what} of layer 3, call 4; got: {what} of layer 2, call 4\. "
        raises(expected, lambda: model[2](x))
    else:
        raises(
            rf"the message from rank 1 failed on rank 2 of 3: .* The message: {what} of layer 2, call 4\.",
            lambda: model[1](x),
        )


def check_other_layer(mesh: Mesh) -> None:
    """Every rank gets the error of layers that have not been called before."""
    model = nn.Sequential(*(layers.Mamba2(4, 3, headdim=2) for _ in range(2)))
    parallelize_module(model, mesh, ContextParallel())
    expected = "expected the same layer on every rank, got 1 on rank 0 and 2 on rank 1"
    with pytest.raises(ValueError, match=expected):
        model[mesh.get_local_rank()](torch.randn(1, 5, 4))


def check_skipped_call(mesh: Mesh) -> None:
    """Rank 1 skips one of two calls of a function: rank 0 notices when it gets the gradients."""
    rank = mesh.get_local_rank()
    a = steps(mesh)
    results = [scan(mesh, a) for _ in range(2 - rank)]
    if rank == 0:
        raises(OTHER_GRADIENT.format(1, 0), lambda: (results[0] + results[1]).sum().backward())
    else:
        results[0].sum().backward()


def check_other_arguments(mesh: Mesh) -> None:
    """Functions that call with arguments that all ranks have used before, but not in this call."""
    rank, a = mesh.get_local_rank(), steps(mesh)

    def scan_with(activation: str | None) -> Tensor:
        out: Tensor = mingru_scan(a, a, candidate_activation=activation, group=mesh, exchange="chain")
        return out

    for activation in (None, "tanh"):
        scan_with(activation)
    if rank == 0:
        scan_with(None)
    else:
        expected = r"rank 1 of 2: mingru_scan: states, call 2; got: mingru_scan: states, call 2, with other arguments\. "
        raises(expected, lambda: scan_with("tanh"))
    # In opposite directions neither waits for the other: the next call finds the message.
    for reverse in (False, True, rank > 0):
        linear_scan(a, a, reverse=reverse, group=mesh, exchange="chain")
    if rank == 0:
        scan(mesh, a)
    else:
        raises(r"linear_scan: states, call 6; got: linear_scan: states, call 5\. ", lambda: scan(mesh, a))


def check_skipped_backward_of_first(mesh: Mesh) -> None:
    """Rank 0 skips a backward: in the next it gets the gradient of the call before."""
    rank = mesh.get_local_rank()
    a = steps(mesh)
    first = scan(mesh, a).sum()
    if rank > 0:
        first.backward()
    second = scan(mesh, a).sum()
    if rank == 0:
        raises(OTHER_GRADIENT.format(1, 0), second.backward)
    else:
        second.backward()


def check_skipped_backward_of_last(mesh: Mesh) -> None:
    """Rank 1 skips a backward: rank 0 waits for its gradient, and rank 1 for the next call of rank 0."""
    rank = mesh.get_local_rank()
    a = steps(mesh)
    loss = scan(mesh, a).sum()
    if rank == 0:
        raises(TIME_OUT.format(1, 0, "gradient of call 0"), loss.backward)
    else:
        raises(TIME_OUT.format(0, 1, "call 1"), lambda: scan(mesh, a))


def check_other_order(mesh: Mesh) -> None:
    """The ranks make two backwards in different orders."""
    a = steps(mesh)
    losses = [scan(mesh, a).sum() for _ in range(2)]
    if mesh.get_local_rank() == 0:
        raises(OTHER_GRADIENT.format(0, 1), losses[0].backward)
    else:
        losses[1].backward()


def check_second_backward(mesh: Mesh) -> None:
    """Rank 1 makes a backward twice: rank 0 gets its second gradient in the next backward."""
    a = steps(mesh)
    losses = [scan(mesh, a).sum() for _ in range(2)]
    losses[1].backward(retain_graph=True)
    if mesh.get_local_rank() == 0:
        raises(OTHER_GRADIENT.format(0, 1), losses[0].backward)
    else:
        losses[1].backward()


def check_repeated_backward(mesh: Mesh) -> None:
    """All ranks make a backward twice: the gradients add up."""
    a = steps(mesh)
    loss = scan(mesh, a).sum()
    loss.backward(retain_graph=True)
    once = a.grad.clone()
    loss.backward()
    assert torch.equal(a.grad, 2 * once)


def check_recomputation_on_some(mesh: Mesh) -> None:
    """Rank 0 alone recomputes with what it has kept: numbers count messages, which it does not send again."""
    rank = mesh.get_local_rank()
    layer = layers.Mamba2(4, 3, headdim=2, dtype=torch.float64)
    parallelize_module(layer, mesh, ContextParallel(exchange="chain"))
    x, gradients = torch.randn(1, 5, 4, dtype=torch.float64), []
    for recomputes in (False, rank == 0, rank == 0):
        own = x.clone().requires_grad_()
        options = {"use_reentrant": False, "context_fn": keep_exchanged_states}
        out = torch.utils.checkpoint.checkpoint(layer, own, **options) if recomputes else layer(own)
        out.sum().backward()
        gradients.append(own.grad)
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


CHECKS = {
    "a skipped layer": (check_skipped_layer, 3),
    "a skipped call": (check_skipped_call, 2),
    "other arguments": (check_other_arguments, 2),
    "a backward that the first rank skips": (check_skipped_backward_of_first, 2),
    "a backward that the last rank skips": (check_skipped_backward_of_last, 2),
    "backwards in other orders": (check_other_order, 2),
    "a backward that one rank makes twice": (check_second_backward, 2),
}


@pytest.mark.parametrize(("check", "ranks"), CHECKS.values(), ids=CHECKS)
def test_messages_of_other_calls_are_errors(processes: Processes, check: Callable[[Mesh], None], ranks: int):
    processes.check(Place((4,)), on_new_group, check, ranks)


@pytest.mark.parametrize("check", [check_other_layer, check_repeated_backward, check_recomputation_on_some])
def test_ranks_agree(processes: Processes, check: Callable[[Mesh], None]):
    processes.check(Place((2,)), check)


def check_deferred_error(mesh: Mesh) -> None:
    """On CUDA the gradient of another call is NaN at once; the first call after its tag has reached the host raises."""
    rank = mesh.get_local_rank()
    a = steps(mesh)
    losses = [scan(mesh, a).sum() for _ in range(2)]
    losses[1 - rank].backward()
    torch.cuda.synchronize()
    if rank == 0:
        assert losses[0].isfinite() and a.grad.isnan().all()
        raises(OTHER_GRADIENT.format(1, 0), lambda: scan(mesh, a))
    else:
        assert a.grad.isfinite().all()


@pytest.mark.parametrize("place", [param(TWO_GPUS)])
def test_a_device_does_not_wait_for_the_comparison(processes: Processes, place: Place):
    processes.check(place, on_new_group, check_deferred_error, 2)


def check_exit(mesh: Mesh) -> None:
    """A rank that ends through an exception waits for the receivers of its messages for a short time, not for the group's."""
    a = steps(mesh).detach()
    scan(mesh, a)
    if mesh.get_local_rank() > 0:
        return
    scan(mesh, a)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "last_value", ValueError(), raising=False)
        patch.setattr(_messages, "_SECONDS_AFTER_ERROR", 0.2)
        began = time.perf_counter()
        _messages._wait_for_receivers()
    assert 0.1 < time.perf_counter() - began < SECONDS / 2
    # The pool's process must not wait for it when it ends.
    _messages._traffic[mesh.get_group()].under_way.clear()


def test_failed_processes_end(processes: Processes):
    processes.check(Place((4,)), on_new_group, check_exit, 2)


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        (_Tag("selective_scan: states", 5, False, 3, 17), "selective_scan: states of layer 3, call 17"),
        (_Tag("rglru_scan: states", 0, True, 0, 2**24 - 1), "rglru_scan: states, gradient of call 16777215"),
    ],
)
def test_tags_are_unpacked_as_packed(tag, text):
    assert 0 <= tag.pack() < 2**63
    assert _Tag.unpack(tag.pack()) == tag and str(tag) == text
    assert len({other.pack() for other in (tag, *(tag._replace(**{name: 1}) for name in ("layer", "number")))}) == 3
    assert tag._replace(is_gradient=not tag.is_gradient).pack() != tag.pack() != tag._replace(what="causal_conv1d: halo").pack()
