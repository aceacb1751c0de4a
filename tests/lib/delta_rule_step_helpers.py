"""Inputs of delta_rule_step, and its comparison with the reference and with loops of one step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from helpers import Draws, arrange, assert_as_accurate, parameter_dtype, step_on_a_copy
from operator_spec import as_float64
from torch import Tensor

from ssm_kernels import delta_rule_step, reference

# The dtype of q, k, v and out, then that of the states.
DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float16, torch.float16),
]

GATES = (None, "head", "column")
# Options of the function beside the gate's shape, and whether they need a gate.
OPTIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, False),
    "qk_l2norm": ({"qk_l2norm": True}, False),
    "scale": ({"scale": 0.7}, False),
    "beta_sigmoid": ({"beta_sigmoid": True}, False),
    "allow_neg_eigval": ({"allow_neg_eigval": True, "qk_l2norm": True}, False),
    "sigmoid_and_neg_eigval": ({"beta_sigmoid": True, "allow_neg_eigval": True, "qk_l2norm": True}, False),
    "A_log": ({"A_log": True}, True),
    "A_log_and_dt_bias": ({"A_log": True, "dt_bias": True}, True),
    "lower_bound": ({"gate_lower_bound": -5.0}, True),
    "lower_bound_and_A_log": ({"gate_lower_bound": -5.0, "A_log": True, "dt_bias": True}, True),
    "all": ({"gate_lower_bound": -2.0, "A_log": True, "dt_bias": True, "qk_l2norm": True, "beta_sigmoid": True}, True),
}
CASES = {
    f"{name}-{gate}": {"gate": gate, **options}
    for (name, (options, needs_gate)), gate in itertools.product(OPTIONS.items(), GATES)
    if gate is not None or not needs_gate
}


def make_inputs(
    *,
    batch: int = 2,
    tokens: int | None = None,
    packed: tuple[int, ...] | None = None,
    heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 16,
    value_dim: int = 6,
    num_householder: int = 1,
    gate: str | None = "head",
    A_log: bool = False,
    dt_bias: bool = False,
    slots: int | None = None,
    dtype: torch.dtype = torch.float64,
    state_dtype: torch.dtype | None = None,
    gate_dtype: torch.dtype | None = None,
    device: str = "cpu",
    layout: str = "contiguous",
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Keyword arguments of ``delta_rule_step``, the same numbers on every device.

    Args:
        tokens: None for one token without an axis.
        packed: ``cu_seqlens``, in place of ``batch`` and ``tokens``.
        gate: the shape of ``g``: one number a head or a column; None for none.
        slots: the number of cache slots, with ``state_batch_indices`` in reverse order; None for no indices.
        gate_dtype: of beta, g, A_log and dt_bias; by default the accumulation dtype.
        layout: see :func:`helpers.arrange`; of every tensor but the indices.
        options: of the function.
    """
    draws = Draws(seed)
    normal, uniform = draws.normal, draws.uniform
    rows = batch if packed is None else len(packed) - 1
    leading: tuple[int, ...] = (batch,) if tokens is None else (batch, tokens)
    updates: tuple[int, ...] = (*leading[:-1], leading[-1] * num_householder)
    if packed is not None:
        leading, updates = (packed[-1],), (packed[-1] * num_householder,)
    elif tokens is None and num_householder > 1:
        updates = (batch, num_householder)
    columns = (value_heads, key_dim) if gate == "column" else (value_heads,)
    is_raw = A_log or options.get("gate_lower_bound") is not None
    values = {
        "states": normal(rows if slots is None else slots, value_heads, value_dim, key_dim),
        "q": normal(*leading, heads, key_dim),
        "k": normal(*updates, heads, key_dim) / key_dim**0.5,
        "v": normal(*updates, value_heads, value_dim),
        "beta": normal(*updates, value_heads) if options.get("beta_sigmoid") else uniform(*updates, value_heads),
        "g": None if gate is None else normal(*leading, *columns) if is_raw else -uniform(*leading, *columns),
        "A_log": 0.5 * normal(value_heads) if A_log else None,
        "dt_bias": normal(*columns) if dt_bias else None,
    }
    wide = parameter_dtype(dtype)
    dtypes = dict.fromkeys(("beta", "g", "A_log", "dt_bias"), gate_dtype or wide) | {"states": state_dtype or wide}
    inputs: dict[str, Any] = {
        name: None if value is None else arrange(value.to(device, dtypes.get(name, dtype)), layout)
        for name, value in values.items()
    }
    if slots is not None:
        inputs["state_batch_indices"] = torch.arange(slots - 1, slots - 1 - rows, -1, dtype=torch.int32, device=device)
    if packed is not None:
        inputs["cu_seqlens"] = torch.tensor(packed, device=device, dtype=torch.int32)
    flags = dict.fromkeys(("qk_l2norm", "beta_sigmoid", "allow_neg_eigval"), False)
    return inputs | flags | {"num_householder": num_householder} | options


def step(inputs: dict[str, Any], function: Callable = delta_rule_step) -> tuple[Tensor, Tensor]:
    """``out`` and the new states, of a copy of the states."""
    return step_on_a_copy(function, inputs, "states")


def assert_step_matches_reference(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """By the low-precision rule below float64; returns ``out`` and the new states."""
    out, states = step(inputs)
    assert out.shape == (*inputs["q"].shape[:-2], *inputs["states"].shape[1:3]) and out.dtype == inputs["q"].dtype
    exact_out, exact_states = reference.delta_rule_step(**as_float64(inputs))
    if inputs["q"].dtype == torch.float64:
        torch.testing.assert_close(out, exact_out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(states, exact_states, rtol=1e-12, atol=1e-12)
    else:
        native_out, native_states = reference.delta_rule_step(**inputs)
        assert_as_accurate(out, native_out.to(out.dtype), exact_out, "out")
        assert_as_accurate(states, native_states.to(states.dtype), exact_states, "states")
    return out, states
