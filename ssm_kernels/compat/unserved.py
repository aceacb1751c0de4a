"""Names that copies of ``mamba_ssm``'s files import at their top and use only for attention or tensor parallelism.

They are importable, as the copies run without these options; using one raises a ``NotImplementedError``.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

__all__ = ["MHA", "ColumnParallelLinear", "RowParallelLinear", "all_reduce", "reduce_scatter"]


def _refuse(name: str, reason: str) -> NoReturn:
    raise NotImplementedError(f"{name}: ssm_kernels.compat does not support {reason}")


class MHA(nn.Module):
    """Attention of ``mamba_ssm.modules.mha``: raises when it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("MHA", "attention layers")


class ColumnParallelLinear(nn.Linear):
    """A projection of ``mamba_ssm.distributed.tensor_parallel``: raises when it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("ColumnParallelLinear", "tensor parallelism: expected process_group=None")


class RowParallelLinear(nn.Linear):
    """As :class:`ColumnParallelLinear`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("RowParallelLinear", "tensor parallelism: expected process_group=None")


def all_reduce(*args: Any, **kwargs: Any) -> NoReturn:
    """A collective of ``mamba_ssm.distributed.distributed_utils``: raises."""
    _refuse("all_reduce", "tensor parallelism: expected process_group=None")


def reduce_scatter(*args: Any, **kwargs: Any) -> NoReturn:
    """As :func:`all_reduce`."""
    _refuse("reduce_scatter", "tensor parallelism: expected process_group=None")
