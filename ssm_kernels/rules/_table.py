"""A row of the table of rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

__all__ = ["Axes", "Batching", "Call", "Composed", "Decomposition", "Formula", "Row"]

Call = Mapping[str, Any]  # the arguments of a call by name
Formula = Callable[[Call], int]
Axes = Mapping[str, str]
Decomposition = Callable[..., Any]


class Composed(NamedTuple):
    """A batching rule for an operator that consists of others: vmap maps those.

    Attributes:
        function: calls them; None for an operator that C++ composes.
    """

    function: Callable[..., Any] | None = None


Batching = Composed | Callable[..., tuple[Any, Any]]


class Row(NamedTuple):
    """The rules of an operator: in each column by the names of the operators in ``torch.ops.ssm_kernels`` that its calls reach.

    Attributes:
        batching: for ``torch.vmap``, as ``torch.library.register_vmap`` takes them, or :class:`Composed`.
        flops: of a call.
        axes: for DTensor, the names of the axes of each tensor by the name of the argument or the result; or a function of a
            call that returns them. ``batch`` and ``channels`` may be cut.
        decompositions: functions of PyTorch's operators.
    """

    batching: Mapping[str, Batching] = MappingProxyType({})
    flops: Mapping[str, Formula] = MappingProxyType({})
    axes: Mapping[str, Axes | Callable[[Call], Axes]] = MappingProxyType({})
    decompositions: Mapping[str, Decomposition] = MappingProxyType({})
