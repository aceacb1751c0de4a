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

SLOTS = 24

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


def distinct_slots(rows: int, columns: int | None, parity: int, device: str, dtype: torch.dtype) -> Tensor:
    """Slots in no order, (rows,) or (rows, columns). Tables of the two parities have none in common."""
    slots = 2 * torch.randperm(SLOTS // 2, generator=torch.Generator().manual_seed(parity))[: rows * (columns or 1)] + parity
    return slots.reshape((rows,) if columns is None else (rows, columns)).to(device, dtype)


def make_token_inputs(
    *,
    batch: int = 2,
    packed: tuple[int, ...] | None = None,
    columns: int | None = None,
    destination: int | None = None,
    intermediate: int | None = None,
    out: bool = True,
    index_dtype: torch.dtype = torch.int32,
    device: str = "cpu",
    **options: Any,
) -> dict[str, Any]:
    """Keyword arguments of ``delta_rule_step`` with ``SLOTS`` slots.

    Args:
        columns: None for ``state_batch_indices`` of shape (rows,), 0 for none, else (rows, columns) and
            ``num_accepted_tokens``.
        destination: None for no ``dst_state_batch_indices``, 0 for shape (rows,), else (rows, destination).
        intermediate: tokens of a buffer of states, with ``intermediate_state_indices``; None for none.
        options: of :func:`make_inputs`.
    """
    rows = batch if packed is None else len(packed) - 1
    inputs = make_inputs(batch=batch, packed=packed, slots=SLOTS, device=device, **options)
    inputs["state_batch_indices"] = None if columns == 0 else distinct_slots(rows, columns, 0, device, index_dtype)
    if columns == 0:
        inputs["states"] = inputs["states"][:rows]
    elif columns:
        inputs["num_accepted_tokens"] = (torch.arange(rows) % (columns + 1)).to(device, index_dtype)
    if destination is not None:
        inputs["dst_state_batch_indices"] = distinct_slots(rows, destination or None, 1, device, index_dtype)
    states = inputs["states"]
    if intermediate is not None:
        inputs["intermediate_states_buffer"] = states.new_full((rows + 2, intermediate, *states.shape[1:]), 7)
        inputs["intermediate_state_indices"] = torch.arange(rows, 0, -1, device=device, dtype=index_dtype)
    inputs["disable_state_update"] = False
    if out:
        inputs["out"] = inputs["q"].new_full((*inputs["q"].shape[:-2], *states.shape[1:3]), torch.nan)
    return inputs


WRITTEN = ("states", "out", "intermediate_states_buffer")


def decode(inputs: dict[str, Any], function: Callable = delta_rule_step) -> dict[str, Tensor]:
    """The output and all tensors that a call writes to, of copies of them in the same strides."""
    copies = {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
        for name in WRITTEN
        if (x := inputs.get(name)) is not None
    }
    out = function(**inputs | copies)
    assert "out" not in copies or out is copies["out"]
    return copies | {"out": out}


def one_step(states: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    """A step of one row: the output and the new states."""
    states = states.clone()
    return delta_rule_step(states, **inputs), states


def decode_by_steps(inputs: dict[str, Any], call: Callable = one_step) -> dict[str, Tensor]:
    """The results of :func:`decode`, by calls of ``call`` for one row and one token, in plain Python."""
    tables = ("state_batch_indices", "dst_state_batch_indices", "num_accepted_tokens", "cu_seqlens")
    read, write, accepted, ends = (None if inputs.get(name) is None else inputs[name].tolist() for name in tables)
    write = read if write is None else write
    entries, pad, buffer = (
        inputs.get(name) for name in ("intermediate_state_indices", "pad_slot_id", "intermediate_states_buffer")
    )
    before, states, updates = inputs["states"], inputs["states"].clone(), inputs.get("num_householder", 1)
    buffer = None if buffer is None else buffer.clone()
    q = inputs["q"]
    out = q.new_zeros((*q.shape[:-2], *states.shape[1:3]))
    sequences = ("q", "k", "v", "beta", "g")
    skipped = {*tables, *WRITTEN, *sequences, "intermediate_state_indices", "pad_slot_id", "disable_state_update"}
    shared = {name: value for name, value in inputs.items() if name not in skipped}

    def is_padding(slot: int) -> bool:
        return slot < 0 or slot == pad

    def token_of(name: str, b: int, t: int) -> Tensor | None:
        value = inputs.get(name)
        if value is None:
            return None
        n = updates if name in ("k", "v", "beta") else 1
        if ends is None and q.dim() == 3:
            return value[b][None]
        part = value[t * n : (t + 1) * n] if ends is not None else value[b, t * n : (t + 1) * n]
        return part[None] if n > 1 else part

    for b in range(len(q) if ends is None else len(ends) - 1):
        slot = b if read is None else read[b]
        slot = slot if isinstance(slot, int) else slot[0 if accepted is None else max(accepted[b] - 1, 0)]
        if read is not None and is_padding(slot):
            continue
        places = range(ends[b], ends[b + 1]) if ends is not None else range(q.shape[1] if q.dim() == 4 else 1)
        h = before[slot]
        for t, place in enumerate(places):
            row = {name: token_of(name, b, place) for name in sequences}
            y, new = call(h[None], **row, **shared)
            h = new[0].to(states.dtype)
            out[place if ends is not None else (b, place) if q.dim() == 4 else b] = y[0].to(out.dtype)
            target = b if write is None else write[b]
            if not isinstance(target, int):
                target = target[t]
            elif t < len(places) - 1:
                target = -1
            if not inputs.get("disable_state_update") and (write is None or not is_padding(target)) and target >= 0:
                states[target] = h
            entry = b if entries is None else int(entries[b])
            if buffer is not None and (entries is None or not is_padding(entry)):
                buffer[entry, t] = h
    results = {"states": states, "out": out}
    return results if buffer is None else results | {"intermediate_states_buffer": buffer}
