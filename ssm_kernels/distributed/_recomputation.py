"""Exchanges between ranks under activation checkpointing, which computes a layer again in backward.

:func:`keep_exchanged_states` makes a pair of contexts with one list between them. In the first, :func:`exchange` appends what
this rank has received; in the second, it takes the next result of the list and exchanges nothing. PyTorch's selective
checkpointing does the same for operators of the dispatcher, but its Python code runs for each operator of the layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

__all__ = ["exchange", "is_repeated", "keep_exchanged_states"]


class _Context:
    """The contexts of a thread are a stack, because checkpoints can be nested.

    Args:
        results: what the exchanges of a call have returned, in order, each with what it was.
        repeats: whether the call is made again.
    """

    def __init__(self, results: list[tuple[str, list[Tensor | None]]], repeats: bool) -> None:
        self._results, self._repeats = results, repeats

    def __enter__(self) -> None:
        self._outer, self._next = _innermost(), 0
        _thread.context = self

    def __exit__(self, *error: Any) -> None:
        _thread.context = self._outer

    @property
    def is_repeated(self) -> bool:
        return self._repeats or (self._outer is not None and self._outer.is_repeated)

    def exchange(self, what: str, run: Callable[[], Iterable[Tensor | None]]) -> list[Tensor | None]:
        if not self._repeats:
            result = [*run()] if self._outer is None else self._outer.exchange(what, run)
            self._results.append((what, _detached(result)))
            return result
        kept, result = self._results[self._next] if self._next < len(self._results) else ("nothing more", [])
        if kept != what:
            raise RuntimeError(
                "keep_exchanged_states: expected a checkpointed function to exchange the same in backward as in forward, "
                f"{kept}, got {what}"
            )
        self._next += 1
        return _detached(result)


def _detached(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """A result of an autograd node refers to the node, and belongs to one alone."""
    return [None if tensor is None else tensor.detach() for tensor in tensors]


_thread = threading.local()


def _innermost() -> _Context | None:
    context: _Context | None = getattr(_thread, "context", None)
    return context


def is_repeated() -> bool:
    """Whether the layers that run now take what they exchange from forward."""
    context = None if torch.compiler.is_compiling() else _innermost()
    return context is not None and context.is_repeated


def exchange(what: str, run: Callable[[], Iterable[Tensor | None]]) -> Any:
    """The tensors of ``run()``, or those of forward. ``what`` names the exchange."""
    context = None if torch.compiler.is_compiling() else _innermost()
    return run() if context is None else context.exchange(what, run)


# In compiled code, which exchanges summaries; it repeats the all-gathers.
_SAVED = {
    getattr(torch.ops.ssm_kernels, name).default
    for name in ("_selective_scan_summary_fwd", "_ssd_chunk_scan_summary_fwd", "_linear_recurrence_summary_fwd")
}


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def keep_exchanged_states() -> tuple[Any, Any]:
    """For activation checkpointing: layers with context parallelism keep what they have received from other ranks.

    A checkpointed layer is then computed again in backward without communication, and with summaries without the summary. What
    it keeps, a state and a halo, does not depend on the length of the sequences::

        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=keep_exchanged_states)

    Where ``torch.compile`` compiles the call of ``checkpoint``, it keeps the summaries and repeats the all-gathers.

    Raises:
        RuntimeError: in backward, if the checkpointed function does not make the same calls in the same order as in forward.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.utils.checkpoint import checkpoint
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from ssm_kernels import distributed, nn
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # no arguments under torchrun
        >>> mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        >>> layer = parallelize_module(nn.Mamba(32), mesh, distributed.ContextParallel())
        >>> x = torch.randn(2, 100, 32)
        >>> y = checkpoint(layer, x, use_reentrant=False, context_fn=distributed.keep_exchanged_states)
        >>> y.sum().backward()  # computes the layer again, without messages
        >>> dist.destroy_process_group()
    """
    if TracingContext.try_get() is not None:  # the compiler takes no other contexts
        contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)
        return contexts
    results: list[tuple[str, list[Tensor | None]]] = []
    return _Context(results, False), _Context(results, True)
