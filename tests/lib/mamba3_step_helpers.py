"""Inputs of mamba3_state_update, and its results on copies of the states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers import Draws, arrange, parameter_dtype
from torch import Tensor

from ssm_kernels import mamba3_state_update

STATES = ("angle", "ssm", "previous_k", "previous_x")
CASES: dict[str, dict[str, Any]] = {
    "everything": {},
    "required_only": {"biases": False, "D": None, "z": False},
    "halves": {"rotate": "halves", "D": "channel"},
    "norm": {"norm": True},
    "ranks": {"ranks": 3, "rotate": "halves", "norm": True, "D": "channel"},
    "ranks_only": {"ranks": 2, "factors": False, "biases": False},
    "angles_of_heads": {"angles_of_heads": True, "norm": True, "z": False},
}
# The dtype of x, then that of ssm.
DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
]


def make_inputs(
    *,
    batch: int = 2,
    heads: int = 4,
    headdim: int = 6,
    groups: int = 2,
    dstate: int = 16,
    angles: int = 4,
    angles_of_heads: bool = False,
    ranks: int | None = None,
    factors: bool = True,
    biases: bool = True,
    D: str | None = "head",
    z: bool = True,
    norm: bool = False,
    rotate: str = "pairs",
    slots: int | None = None,
    dtype: torch.dtype = torch.float64,
    state_dtype: torch.dtype | None = None,
    angle_dtype: torch.dtype | None = None,
    device: str = "cpu",
    layout: str = "contiguous",
) -> dict[str, Any]:
    """Keyword arguments, the same numbers on every device; ``slots``: with ``state_batch_indices`` in reverse order."""
    draws, rows = Draws(0), batch if slots is None else slots
    normal, uniform = draws.normal, draws.uniform
    wide = parameter_dtype(dtype)
    of_ranks = () if ranks is None else (ranks,)
    has_factors = ranks is not None and factors
    values = {
        "angle": normal(rows, heads, angles),
        "ssm": normal(rows, heads, headdim, dstate),
        "previous_k": normal(rows, heads, *of_ranks, dstate),
        "previous_x": normal(rows, heads, headdim),
        "x": normal(batch, heads, headdim),
        "dt": uniform(batch, heads) + 0.05,
        "A": -uniform(batch, heads),
        "B": normal(batch, *of_ranks, groups, dstate),
        "C": normal(batch, *of_ranks, groups, dstate),
        "trap": normal(batch, heads),
        "angles": normal(batch, heads, angles) if angles_of_heads else normal(batch, angles),
        "B_bias": normal(heads, *of_ranks, dstate) if biases else None,
        "C_bias": normal(heads, *of_ranks, dstate) if biases else None,
        "D": {"head": normal(heads), "channel": normal(heads, headdim), None: None}[D],
        "z": normal(batch, heads, headdim) if z else None,
        "norm_weight": normal(heads, headdim) if norm else None,
    }
    factors_of_ranks = ("mimo_x", "mimo_z", "mimo_out")
    values |= {
        name: normal(heads, ranks, headdim) if has_factors and (z or name != "mimo_z") else None for name in factors_of_ranks
    }
    dtypes = {"angle": angle_dtype or wide, "ssm": state_dtype or wide, "previous_k": wide}
    dtypes |= dict.fromkeys(("B_bias", "C_bias", "D", "norm_weight", "dt", "A", *factors_of_ranks), wide)
    inputs: dict[str, Any] = {
        name: None if value is None else arrange(value.to(device, dtypes.get(name, dtype)), layout)
        for name, value in values.items()
    }
    inputs["state_batch_indices"] = None
    if slots is not None:
        inputs["state_batch_indices"] = torch.arange(slots - 1, slots - 1 - batch, -1, dtype=torch.int32, device=device)
    return inputs | {"norm_eps": 1e-5, "rotate": rotate}


def step(inputs: dict[str, Any], function: Callable[..., Tensor] = mamba3_state_update) -> tuple[Tensor, ...]:
    """The output and the new states, of copies of the states in the same strides."""
    copies = {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        for name, x in inputs.items()
        if name in STATES
    }
    for name, copy in copies.items():
        copy.copy_(inputs[name])
    out = function(**inputs | copies)
    return out, *copies.values()
