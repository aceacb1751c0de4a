"""Inputs of mlstm_step, and its results on copies of the states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers import Draws, arrange, parameter_dtype
from torch import Tensor

from ssm_kernels import mlstm_step

STATES = ("C", "n", "m")

# The dtype of q, k, v and out, then that of C.
DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float16, torch.float16),
]
CASES: dict[str, dict[str, Any]] = {
    "exp": {},
    "sigmoid": {"input_gate": "sigmoid"},
    "without_divisor": {"input_gate": "sigmoid", "normalize": False},
    "options": {"scale": 0.7, "eps": 0.1},
}


def make_inputs(
    *,
    batch: int = 2,
    heads: int = 3,
    key_dim: int = 16,
    value_dim: int = 6,
    slots: int | None = None,
    dtype: torch.dtype = torch.float64,
    state_dtype: torch.dtype | None = None,
    gate_dtype: torch.dtype | None = None,
    device: str = "cpu",
    layout: str = "contiguous",
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Keyword arguments of ``mlstm_step``, the same numbers on every device.

    Args:
        slots: the number of cache slots, with ``state_batch_indices`` in reverse order; None for no indices.
        gate_dtype: of i and f; by default the accumulation dtype.
        layout: see :func:`helpers.arrange`; of every tensor but the indices.
        options: of the function.
    """
    normal, rows = Draws(seed).normal, batch if slots is None else slots
    values = {
        "C": normal(rows, heads, value_dim, key_dim),
        "n": normal(rows, heads, key_dim),
        "m": normal(rows, heads),
        "q": normal(batch, heads, key_dim),
        "k": normal(batch, heads, key_dim),
        "v": normal(batch, heads, value_dim),
        "i": normal(batch, heads),
        "f": normal(batch, heads) + 1,
    }
    wide = parameter_dtype(dtype)
    dtypes = {"C": state_dtype or wide, "n": wide, "m": wide, "i": gate_dtype or wide, "f": gate_dtype or wide}
    inputs: dict[str, Any] = {
        name: arrange(value.to(device, dtypes.get(name, dtype)), layout) for name, value in values.items()
    }
    inputs["state_batch_indices"] = None
    if slots is not None:
        inputs["state_batch_indices"] = torch.arange(slots - 1, slots - 1 - batch, -1, dtype=torch.int32, device=device)
    return inputs | {"scale": None, "eps": 1e-6, "input_gate": "exp", "normalize": True} | options


def step(inputs: dict[str, Any], function: Callable[..., Tensor] = mlstm_step) -> tuple[Tensor, ...]:
    """The output and the new states, of copies of the states in the same strides."""
    copies = {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
        for name, x in inputs.items()
        if name in STATES
    }
    return function(**inputs | copies), *copies.values()
