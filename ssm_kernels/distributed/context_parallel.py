"""Context parallelism of layers: ``ContextParallel``, a style of ``torch.distributed.tensor.parallel.parallelize_module``."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from .._mixers import mamba2_arguments, mamba_mixer
from ..choices import Exchange
from ..nn.common import ConvMixer
from ..nn.naming import class_name
from ..nn.recurrent import RecurrentBase
from ..nn.selective_ssm import SelectiveBase
from ..ops.recurrence_steps import step_size
from ._agreement import Agreement, calls_begun, failure, report
from ._casts import Casts
from ._collectives import Gathering
from ._convolution import MambaConv, is_gate
from ._group import Group, GroupLike, check_dimensions
from ._mixers import ChainedMamba2Mixer, Mamba2Mixer
from ._operators import GroupOperators, choose_exchange
from ._packing import ForwardCount
from ._parts import Local
from ._split_norm import SplitNorm, split_mamba2_mixer

__all__ = ["ContextParallel", "sum_gradients"]

_ops = torch.ops.ssm_kernels
_BUCKET_BYTES = 64 * 2**20


class _Context(GroupOperators):
    """The operators that a layer with context parallelism calls. They return None for a last state that nobody needs."""

    def __init__(self, group: Group, exchange: Exchange | None, layer: int, forward_count: ForwardCount | None) -> None:
        super().__init__(group, Agreement(group, of_layer=True), exchange, "ContextParallel", layer, forward_count)
        self.begun = 0  # calls when the layer's forward began

    def __deepcopy__(self, memo: dict[int, Any]) -> _Context:
        # A copy has agreed on nothing.
        return _Context(self.group, self.exchange, self._layer, copy.deepcopy(self._forward_count, memo))

    def begin(self) -> None:
        """The layer's forward begins. Compiled code and backward, which may recompute it, count no forward passes."""
        if torch.compiler.is_compiling():
            return
        self.begun = calls_begun()
        if self._forward_count is not None and torch._C._current_graph_task_id() == -1:
            self._forward_count.begin(self._layer)

    def __reduce__(self) -> Any:
        raise TypeError(
            "ContextParallel: expected a state_dict to be saved, got a whole layer or model: its rank belongs to this run"
        )

    def mamba_conv(
        self, xz: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments and results as ``torch.ops.ssm_kernels._mamba_conv``."""
        if self.group.size == 1:
            results: tuple[Tensor, Tensor, Tensor] = _ops._mamba_conv(xz, weight, bias, initial_state)
            return results
        weight = weight.squeeze(1)
        if torch.compiler.is_compiling() or weight.shape[1] == 1:
            x, z = xz.chunk(2, dim=-1)
            x = self.causal_conv1d(x, weight, bias, activation="silu", initial_state=initial_state)
            return x, x, z
        xz, weight, bias, initial_state = self._cast_convolution(xz, weight, bias, initial_state)
        options = {"activation": "silu", "return_final_state": False}
        self._agree_on_convolution(xz[..., : xz.shape[2] // 2], weight, bias, initial_state, options)
        x, scanned, z = MambaConv.apply(xz, weight, bias, initial_state, self._chain(), self.group)
        return x, scanned, z

    def mamba_mixer(self, *arguments: Any, needs_last_state: bool) -> tuple[Tensor, Tensor | None]:
        """Arguments and results as ``torch.ops.ssm_kernels._mamba_mixer``; no last state unless it is needed."""
        if self.group.size == 1:
            local: tuple[Tensor, Tensor] = _ops._mamba_mixer(*arguments)
            return local

        z: Tensor | None = arguments[6]
        z_is_gate = z is not None and not torch.compiler.is_compiling() and is_gate(z)

        def scan(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
            results = self.selective_scan(*tensors, **options, return_last_state=needs_last_state, z_is_gate=z_is_gate)
            return results if needs_last_state else (results, None)

        out, last_state = mamba_mixer(scan, *arguments)
        return out, last_state

    def mamba2_mixer(self, *arguments: Any, norm: SplitNorm | None = None) -> tuple[Tensor, None, None]:
        """Arguments and results as ``torch.ops.ssm_kernels._mamba2_mixer``, without initial and final states.

        ``norm`` describes one whose groups are on several ranks of tensor parallelism.
        """
        mixer = _ops._mamba2_mixer.default
        if self.group.size == 1:
            local = mixer if norm is None else functools.partial(split_mamba2_mixer, norm=norm)
            return local(*arguments)[0], None, None
        given, options = mamba2_arguments(arguments)
        if given.conv_state is not None or given.ssm_state is not None:
            raise ValueError("Mamba2: expected neither conv_state nor ssm_state over several ranks, got states of a cache")
        tensors = dict(zip(given._fields, given, strict=True))
        cu_seqlens = tensors.pop("cu_seqlens")
        named_options = dict(zip(options._fields, options, strict=True))
        check = functools.partial(mixer, cu_seqlens=None)
        self._agree("Mamba2", check, tensors, named_options, {"projected": 1, "seq_idx": 1}, cu_seqlens)
        numbers, packing = self._packing("Mamba2", given.projected.shape[1], given.seq_idx, cu_seqlens)
        to, chain = Casts(given.projected), self._chain()
        node = Mamba2Mixer if chain is None else ChainedMamba2Mixer
        out: Tensor = node.apply(
            to.lower(given.projected),
            *map(to.wide, given[1:7]),
            *((None,) * 3 if packing is None else (numbers, packing.past, packing.passes)),
            options,
            self.group,
            norm,
            *(() if chain is None else (chain,)),
        )
        return out, None, None

    def mingru_scan(self, gate: Tensor, candidate: Tensor, h0: Tensor | None, **options: Any) -> Any:
        return self.recurrence("mingru_scan", (gate, candidate), h0, **options)

    def minlstm_scan(self, forget: Tensor, input: Tensor, candidate: Tensor, h0: Tensor | None, **options: Any) -> Any:
        return self.recurrence("minlstm_scan", (forget, input, candidate), h0, **options)

    def liquid_scan(self, candidate: Tensor, tau: Tensor, dt: Tensor | float, h0: Tensor | None, **options: Any) -> Any:
        return self.recurrence("liquid_scan", (candidate, tau, step_size("liquid_scan", dt, candidate)), h0, **options)

    def starts_backwards(self, reset: Tensor) -> Tensor:
        """Mask of the steps where the backward direction starts anew: the step before each reset, on the rank that has it."""
        if self.group.size == 1:
            return F.pad(reset[:, 1:], (0, 1)) if reset.shape[1] > 0 else reset
        self._agree("bidirectional layer", lambda reset: None, {"reset": reset}, {}, {"reset": 1})
        batch, seqlen = reset.shape
        first = reset[:, 0].long() if seqlen > 0 else reset.new_zeros(batch, dtype=torch.int64)
        table = Gathering([torch.stack([first, torch.full_like(first, seqlen)])], self.group, "reset at the borders").wait()[0]
        start = torch.zeros_like(first)
        for first, lengths in (of_rank.unbind(0) for of_rank in table[self.group.rank + 1 :].flip(0).unbind(0)):
            start = torch.where(lengths > 0, first, start)
        return torch.cat([reset[:, 1:], start.bool()[:, None]], dim=1) if seqlen > 0 else reset


class ContextParallel(ParallelStyle):
    """Splits sequences over the ranks of a mesh dimension: context parallelism, also called sequence parallelism of the scan.

    A style of :func:`torch.distributed.tensor.parallel.parallelize_module`, for a layer (``Mamba``, ``Mamba2``,
    ``SelectiveSSM``, ``MinGRU``, ``MinLSTM``, ``Liquid``, the mixer of a minGRU or minLSTM model) or any module that contains
    such layers, for instance a whole ``MambaLM``::

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
        exchange: how states pass from rank to rank: "chain", from neighbour to neighbour, so that rank r begins r scans after
            the first; "summaries", by an all-gather in every layer, for which each rank runs half a scan to one scan more in
            forward; or None, the chain for up to 8 ranks. Layers that return final states, and compiled ones, use summaries.

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
        layers = [layer for layer in module.modules() if isinstance(layer, (SelectiveBase, ConvMixer, RecurrentBase))]
        if not layers:
            raise ValueError(
                f"ContextParallel: expected a module that contains layers of ssm_kernels, got {class_name(module)}"
            )
        for layer in layers:
            check_dimensions("ContextParallel", group, "TensorParallel", layer._group if isinstance(layer, Local) else None)
        forward_count = ForwardCount()
        for number, layer in enumerate(layers, 1):
            if layer.context is None:
                layer.register_forward_pre_hook(_begin_layer)
                layer.register_forward_hook(_report_error, always_call=True)
            layer.context = _Context(group, self.exchange, number, forward_count)
        return module


def _begin_layer(layer: nn.Module, args: Any) -> None:
    """A forward pre-hook."""
    cast(_Context, layer.context).begin()


def _report_error(layer: nn.Module, args: Any, result: Any) -> None:
    """A forward hook, also called where forward has raised: the other ranks get the error of this one."""
    if torch.compiler.is_compiling() or result is not None:
        return
    context, error = cast(_Context, layer.context), sys.exc_info()[1]
    if isinstance(error, Exception) and context.begun == calls_begun():
        report(context.group, class_name(layer), error)


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
