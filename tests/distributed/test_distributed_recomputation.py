"""``keep_exchanged_states``: layers that checkpointing computes again take from forward what ranks have exchanged."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.checkpoint
from distributed_helpers import SEQLEN, Collectives, generator, own_span
from process_pool import TWO_GPUS, Mesh, Place, Processes, param
from torch import Tensor

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from torch.distributed.tensor.parallel import parallelize_module

from ssm_kernels import distributed
from ssm_kernels import nn as layers
from ssm_kernels.distributed import ContextParallel, keep_exchanged_states

checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False, context_fn=keep_exchanged_states)


def inputs(mesh: Mesh) -> Tensor:
    return generator(mesh, 0)(2, SEQLEN, 6)[:, own_span(mesh)]


def check_gradients(mesh: Mesh) -> None:
    """Gradients and messages of backward are those without checkpointing: nested, and in a second backward."""
    for layer in (layers.MinGRU(6, 5, batch_first=True, dtype=torch.float64), layers.Mamba(6, 4, dtype=torch.float64)):
        # MinGRU returns final states, and so uses summaries.
        parallelize_module(layer.to(mesh.device_type), mesh, ContextParallel())

        def run(x: Tensor, layer: nn.Module = layer) -> Tensor:
            results = layer(x)
            return results.sum() if isinstance(results, Tensor) else results[0].sum() + 2 * results[1].sum()

        once = functools.partial(checkpoint, run)
        found = []
        for call in (run, once, functools.partial(checkpoint, once)):
            x = inputs(mesh).requires_grad_()
            loss = call(x)
            for _ in range(2):
                with Collectives() as backward:
                    loss.backward(retain_graph=True)
                found.append((x.grad, [name for name, _ in backward.sent]))
                x.grad = None
        expected, sent = found[0]
        for gradient, sent_again in found[1:]:
            assert torch.equal(gradient, expected) and sent_again == sent, (type(layer).__name__, sent_again, sent)


def check_other_function(mesh: Mesh) -> None:
    """A function that makes another call when it is computed again."""
    for exchange in ("chain", "summaries"):
        scans = iter((distributed.linear_scan, distributed.mingru_scan))

        def scan(x: Tensor, scans: Iterator[Any] = scans, exchange: str = exchange) -> Tensor:
            out: Tensor = next(scans)(x, x, group=mesh, exchange=exchange)
            return out

        out = checkpoint(scan, inputs(mesh).requires_grad_())
        with pytest.raises(RuntimeError, match=r"the same in backward as in forward, linear_scan: .*, got mingru_scan: "):
            out.sum().backward()


@pytest.mark.parametrize("place", [param(Place((2,))), param(Place((3,))), param(TWO_GPUS)])
def test_gradients(processes: Processes, place: Place):
    processes.check(place, check_gradients)


def test_another_function_is_an_error(processes: Processes):
    processes.check(Place((2,)), check_other_function)
