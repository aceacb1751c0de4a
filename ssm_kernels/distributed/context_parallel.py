"""Context parallelism of layers: ``ContextParallel``, a style of ``torch.distributed.tensor.parallel.parallelize_module``.

A layer's scan runs in these steps:

1. ``ContextParallel._apply`` below sets ``layer.operators``, by default ``LOCAL`` of ``nn/_operators.py``, to the
   ``LayerOperators`` of the ranks (``_layer_operators.py``). Code and parameters of the layer stay as they are.
2. In forward the layer calls ``self.operators.mamba_mixer``, or another method. It compares the call with those of the other
   ranks (``_agreement.py``), reads the packed sequences at the borders between spans (``_packed_sequences.py``), casts under
   autocast, and applies an autograd node of ``_scans.py``, ``_two_samples.py``, ``_mamba3.py``, ``_delta_rule.py``,
   ``_mlstm.py``, ``_mamba2_mixer.py`` or ``_convolution.py``.
3. The node asks a ``Carry`` (``_carry.py``) for the state before the rank's span, runs the kernel of one GPU from it, and gives
   the carry the last state. Backward runs the kernel's adjoint and carries the states' gradients the other way. ``Mamba2``
   along a chain and the convolution exchange in their own files, without a carry.
   Rules that read two input samples first receive the last sample of the span before (``_samples.py``).
4. ``ChainCarry`` receives states from the rank before and sends them to the next rank (``_messages.py``). ``SummaryCarry``
   all-gathers a summary of each rank's span (``_collectives.py``) and folds those of the ranks before. ``GroupCalls``
   chooses between them (``_group_calls.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..choices import Exchange
from ..nn._operators import CallsOperators
from ..nn.naming import class_name
from ._agreement import calls_begun, failure, report
from ._group import Group, GroupLike, check_dimensions
from ._group_calls import choose_exchange
from ._layer_operators import LayerOperators
from ._packed_sequences import ForwardCount
from ._sharding import ShardedModule

__all__ = ["ContextParallel", "sum_gradients"]

_BUCKET_BYTES = 64 * 2**20


class ContextParallel(ParallelStyle):
    """Splits sequences over the ranks of a mesh dimension: context parallelism, also called sequence parallelism of the scan.

    A style of :func:`torch.distributed.tensor.parallel.parallelize_module`, for a layer (``Mamba``, ``Mamba2``,
    ``Mamba3``, ``SelectiveSSM``, ``MinGRU``, ``MinLSTM``, ``Liquid``, ``DeltaNet``, ``GatedDeltaNet``, ``KimiDeltaAttention``,
    ``GatedDeltaProduct``, ``MLSTM``, the mixer of a minGRU or minLSTM model) or any module that contains such layers, for
    instance a whole ``MambaLM``::

        mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
        parallelize_module(model, mesh["cp"], ContextParallel())

    Each rank then passes its own contiguous span of the sequences, in the order of the ranks, as a plain tensor, and gets the
    outputs of its span. Spans may have unequal lengths. Parameters are the same on every rank and are not touched. Their
    gradients are those of the rank's span: :func:`sum_gradients` adds them, or FSDP2 does over a mesh that includes this
    dimension. See ``docs/distributed.md``.

    Every rank has to make the same calls in the same order, and to call backward. A span of no steps is legal: its rank passes
    the states on. ``cu_seqlens`` describes the whole sequence; ``seq_idx``, ``reset`` and ``dt`` have this rank's steps.
    ``hx`` of a recurrent layer is the state before the whole sequence, on every rank, and ``h_n`` that after it.

    ``inference_params`` and ``PackedSequence`` raise a ValueError.

    Args:
        exchange: leave it out. States pass from neighbour to neighbour, along a chain, for up to 8 ranks, and by an all-gather
            of summaries for more ranks and where a chain cannot run: layers that return final states, compiled layers, CUDA
            graphs. "chain" and "summaries" replace the number of ranks in this choice.

    Raises:
        ValueError: ``exchange`` is something else; from ``parallelize_module``, if the module contains no such layer, or one
            with :class:`TensorParallel` over the same ranks; on every rank, if the ranks call with different shapes, dtypes or
            options, or if ``cu_seqlens`` does not end at the sum of the spans' lengths.
        RuntimeError: a rank has died, or does not make the call within the time-out of the group; with a chain, in forward or
            backward: a rank has skipped a call or a backward, so that its neighbour receives the message of another one. On
            CUDA the neighbour's results are NaN then, and one of its later calls or backwards raises.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from ssm_kernels import distributed, nn
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        >>> layer = parallelize_module(nn.Mamba(32), mesh, distributed.ContextParallel())
        >>> layer(torch.randn(2, 100, 32)).shape  # of this rank's steps
        torch.Size([2, 100, 32])
        >>> dist.destroy_process_group()
    """

    def __init__(self, *, exchange: Exchange | None = None) -> None:
        super().__init__()
        choose_exchange("ContextParallel", exchange, 1)
        self.exchange = exchange

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = Group.of(device_mesh)
        layers = [layer for layer in module.modules() if isinstance(layer, CallsOperators)]
        if not layers:
            raise ValueError(
                f"ContextParallel: expected a module that contains layers of ssm_kernels, got {class_name(module)}"
            )
        for layer in layers:
            ranks_of_shards = layer._group if isinstance(layer, ShardedModule) else None
            check_dimensions("ContextParallel", group, "TensorParallel", ranks_of_shards)
        forward_count = ForwardCount()
        for number, layer in enumerate(layers, 1):
            if layer.operators.is_local:
                layer.register_forward_pre_hook(_begin_layer)
                layer.register_forward_hook(_report_error, always_call=True)
            layer.operators = LayerOperators(group, self.exchange, number, forward_count)
        return module


def _begin_layer(layer: nn.Module, args: Any) -> None:
    """A forward pre-hook."""
    cast(LayerOperators, layer.operators).begin()


def _report_error(layer: nn.Module, args: Any, result: Any) -> None:
    """A forward hook, also called where forward has raised: the other ranks get the error of this one."""
    if torch.compiler.is_compiling() or result is not None:
        return
    operators, error = cast(LayerOperators, layer.operators), sys.exc_info()[1]
    if isinstance(error, Exception) and operators.begun == calls_begun():
        report(operators.group, class_name(layer), error)


@torch.no_grad()
def sum_gradients(module: nn.Module, group: GroupLike = None) -> None:
    """Adds the gradients of a module's parameters over the ranks of a group, in place: an all-reduce for every 64 MiB.

    With :class:`ContextParallel` a rank's gradients are those of its span. If each rank's loss is its part of a sum, the
    results are the gradients of the whole loss. For sharded parameters of FSDP2 on another mesh dimension the local shards are
    added.

    A parameter that some ranks have not used counts as zero there and gets the sum on every rank. One that no rank has used
    keeps the gradient None. One number for each parameter says so; only a rank with a gradient that is None waits for it.

    Args:
        module: the same on every rank, with the same parameters that require a gradient.
        group: a ``ProcessGroup``, a ``DeviceMesh`` of one dimension, or None for the default group.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from ssm_kernels import distributed, nn
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        >>> layer = parallelize_module(nn.Mamba(32), mesh, distributed.ContextParallel())
        >>> layer(torch.randn(2, 100, 32)).square().sum().backward()  # this rank's part of a sum over all steps
        >>> distributed.sum_gradients(layer, mesh)
        >>> dist.destroy_process_group()
    """
    ranks = Group.of(group)
    if ranks.size == 1:
        return
    for bucket in _buckets(parameter for parameter in module.parameters() if parameter.requires_grad):
        gradients = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for _, gradient in bucket]
        # Not from a list, whose copy to the device the host would wait for.
        are_present = gradients[0].new_ones(len(bucket))
        for i, (parameter, _) in enumerate(bucket):
            if parameter.grad is None:
                are_present[i].zero_()
        total = torch.cat([*(gradient.flatten() for gradient in gradients), are_present])
        try:
            total = torch.ops._c10d_functional.all_reduce(total, "sum", ranks.name)
            total = torch.ops._c10d_functional.wait_tensor(total)
        except RuntimeError as error:
            raise failure("sum_gradients: the all-reduce", ranks, error) from error
        sizes = [*(gradient.numel() for gradient in gradients), len(gradients)]
        *parts, counts = total.split(sizes)
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))
        if any(parameter.grad is None for parameter, _ in bucket):
            for (parameter, gradient), count in zip(bucket, counts.tolist(), strict=True):
                if parameter.grad is None and count > 0:
                    parameter.grad = gradient


def _zero_gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter, dtype=getattr(parameter, "grad_dtype", None) or parameter.dtype)


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
    """Parameters with their gradients, zeros where there is none.

    The gradients of a bucket have one dtype and device and follow each other, up to ``_BUCKET_BYTES`` unless one has more.
    """
    bucket: list[tuple[nn.Parameter, Tensor]] = []
    size = 0
    for parameter in parameters:
        gradient = _zero_gradient(parameter) if parameter.grad is None else parameter.grad
        is_other = bucket and (gradient.dtype, gradient.device) != (bucket[0][1].dtype, bucket[0][1].device)
        nbytes = (gradient.to_local() if isinstance(gradient, DTensor) else gradient).nbytes
        if is_other or (bucket and size + nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append((parameter, gradient))
        size += nbytes
    if bucket:
        yield bucket
