"""Layers exported with dynamic batch sizes and lengths run at every size, the ordinary small ones included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_helpers import IN, LAYERS, RECURRENCES, WIDTH, assert_all_close, make_layer, make_sequence
from torch import Tensor

SIZES = ((2, 1), (1, 2), (2, 2), (3, 3), (1, 1), (4, 9))


def inputs_of(name: str, kind: str, batch: int, seqlen: int) -> tuple[Tensor, dict[str, Any]]:
    x = make_sequence(batch, seqlen, IN if name in RECURRENCES else WIDTH)
    starts = make_sequence(batch, seqlen, seed=1) > 0.5
    if kind == "reset":
        return x, {"reset": starts}
    return x, {"seq_idx": starts.cumsum(1)} if kind == "seq_idx" else {}


def export(layer: Any, x: Tensor, options: dict[str, Any]) -> Callable[..., Any]:
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seqlen")}
    first = {"Mamba": "hidden_states", "Mamba2": "u", "SelectiveSSM": "x"}.get(type(layer).__name__, "input")
    shapes = {first: sizes, **dict.fromkeys(options, sizes)}
    program: Callable[..., Any] = torch.export.export(layer, (x,), options, dynamic_shapes=shapes, strict=False).module()
    return program


CASES = [
    *((name, "plain") for name in LAYERS),
    *((name, "seq_idx") for name in ("Mamba", "Mamba2", "SelectiveSSM")),
    *((name, "reset") for name in RECURRENCES),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_dynamic_sizes(name, kind):
    options = {"batch_first": True, "bidirectional": True} if name in RECURRENCES else {}
    layer = make_layer(name, **options).requires_grad_(False)
    program = export(layer, *inputs_of(name, kind, 3, 5))
    for batch, seqlen in SIZES:
        x, given = inputs_of(name, kind, batch, seqlen)
        results, expected = program(x, **given), layer(x, **given)
        if name in RECURRENCES:
            assert_all_close(results, expected)
        else:
            assert_all_close((results,), (expected,))


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "MinGRU"])
def test_dynamic_numbers_of_packed_sequences(name):
    """One sequence is exported as two, of which one is empty: PyTorch tells sizes 0 and 1 from others."""
    options = {"batch_first": True, "bidirectional": True} if name in RECURRENCES else {}
    layer = make_layer(name, **options).requires_grad_(False)
    steps, ends = torch.export.Dim("seqlen", min=2), torch.export.Dim("n", min=3)
    x, width = make_sequence(1, 7, IN if name in RECURRENCES else WIDTH), {"Mamba": "hidden_states", "Mamba2": "u"}
    shapes = {width.get(name, "input"): {1: steps}, "cu_seqlens": {0: ends}}
    given = {"cu_seqlens": torch.tensor([0, 2, 5, 7])}
    program = torch.export.export(layer, (x,), given, dynamic_shapes=shapes, strict=False).module()
    for offsets in ([0, 7, 7], [0, 0, 7], [0, 1, 2, 3], [0, 1, 1, 4, 9], [0, 2, 2]):
        x, cu_seqlens = make_sequence(1, offsets[-1], x.shape[2]), torch.tensor(offsets)
        results, expected = program(x, cu_seqlens=cu_seqlens), layer(x, cu_seqlens=cu_seqlens)
        pairs = (results, expected) if name in RECURRENCES else ((results,), (expected,))
        assert_all_close(*pairs)
    # One sequence.
    results = program(x, cu_seqlens=torch.tensor([0, x.shape[1], x.shape[1]]))
    alone = layer(x)
    assert_all_close((results[0],) if name in RECURRENCES else (results,), (alone[0],) if name in RECURRENCES else (alone,))
