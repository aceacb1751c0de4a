"""Values that arguments cannot have, and what errors about them are."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

NUMBERS = (10**400, -(10**400), math.nan, -1.0, 1j, "x", True, [1.0], torch.ones(2), torch.ones(2, device="meta"), object())
INTEGERS = (2**70, -(2**70), 2**63, 2.5, True, "x", [1], torch.ones(2), 1j, Fraction(1, 2), object())
NAMES = ("nope", "", 3, True, ["silu"], "\ud800", torch.ones(2), object())
FLAGS = ("yes", "", 2, 1.0, [], 1j, torch.ones(()), torch.ones(2, dtype=torch.bool), object())

TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "zero-dim": lambda x: x.new_ones(()),
    "complex": lambda x: x.to(torch.complex64),
    "bool": lambda x: x.bool(),
    "int8": lambda x: x.to(torch.int8),
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "jagged": lambda x: torch.nested.nested_tensor([x.reshape(-1), x.reshape(-1)], layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "meta": lambda x: x.to("meta"),
    "list": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "class": lambda x: Tensor,
    "none": lambda x: None,
}

# Names of PyTorch's internals, which no message of ours contains.
_INTERNAL = re.compile(r"aten|c10|dispatch|Triton|TORCH_|Internal|Expected|internally|argument '")


def replaced(value: Tensor, *, is_present: bool = True) -> Iterator[tuple[str, Any]]:
    """Yields the replacements of a tensor, each with a name. One that is absent gets a wrong shape, of any dtype."""
    for kind, change in TENSORS.items():
        if kind == "csr" and value.dim() < 2:
            continue
        if kind in ("bool", "int8") and (not is_present or not value.is_floating_point()):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's layouts are prototypes
            yield kind, change(value.detach().clone())


def fresh(arguments: dict[str, Any]) -> dict[str, Any]:
    """With copies of the tensors, which operators write to."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}


def call_of(function: Callable[..., Any], arguments: dict[str, Any]) -> Exception | None:
    """The error of a call."""
    try:
        function(**arguments)
    except Exception as error:
        return error
    return None


def is_ours(error: Exception | None, name: str) -> bool:
    """Whether the error has a type for arguments, and a message of one line that begins with the operator or layer."""
    types = (TypeError, ValueError, RuntimeError, NotImplementedError)
    message = str(error)
    return type(error) in types and message.startswith(f"{name}: ") and "\n" not in message and not _INTERNAL.search(message)


def same(actual: Any, expected: Any) -> bool:
    """Whether two calls returned the same bits."""
    pairs = zip(tree_leaves(actual), tree_leaves(expected), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
