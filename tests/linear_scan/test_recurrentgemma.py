"""The recipe of docs/recurrences.md for RecurrentGemma's first step, against transformers' layer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssm_kernels import rglru_scan, rglru_step

OPERATOR = "linear_scan"
HEADS, WIDTH = 2, 8


def recipe() -> dict[str, Any]:
    page = (Path(__file__).parents[2] / "docs" / "recurrences.md").read_text()
    (block,) = (block for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "first_state" in block)
    names: dict[str, Any] = {}
    exec(block, names)
    return names


def make_layer() -> Any:
    models = pytest.importorskip("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    config = models.RecurrentGemmaConfig(hidden_size=WIDTH, lru_width=WIDTH, num_attention_heads=HEADS)
    layer = models.RecurrentGemmaRglru(config)
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def gates_of(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence gate and the input gate, before their sigmoids."""
    blocks = x.unflatten(-1, (HEADS, -1))
    gates = []
    for weight, bias in (
        (layer.recurrent_gate_weight, layer.recurrent_gate_bias),
        (layer.input_gate_weight, layer.input_gate_bias),
    ):
        gates.append((torch.einsum("bthi,hij->bthj", blocks, weight) + bias).flatten(-2))
    return gates[0], gates[1]


@pytest.mark.parametrize("positions", ["ranges", "restarts", "continued"])
def test_first_steps_are_those_of_transformers(positions):
    layer, names = make_layer(), recipe()
    x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    position_ids = torch.arange(9).expand(2, 9).clone()
    state = None
    if positions == "restarts":
        position_ids[0, 4:] -= 4
    elif positions == "continued":
        position_ids += 3
        state = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(2))
        layer.recurrent_states = state
    expected = layer(x, position_ids)
    last = layer.recurrent_states
    recurrence_gate, input_gate = gates_of(layer, x)
    parameters = (recurrence_gate, input_gate, x, layer.recurrent_param)
    results = [names["scan_from_resets"](*parameters, position_ids == 0, state)]
    if positions != "restarts":
        h0 = names["first_state"](*(value[:, 0] for value in parameters[:3]), layer.recurrent_param) if state is None else state
        options = {"x": x, "recurrent_param": layer.recurrent_param, "h0": h0}
        results.append(rglru_scan(recurrence_gate, input_gate, **options, return_last_state=True))
    leaves = [x, *layer.parameters()]
    factor = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    wanted = torch.autograd.grad((expected * factor).sum(), leaves, retain_graph=True)
    for h, h_n in results:
        torch.testing.assert_close(h, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(h_n, last, rtol=1e-6, atol=1e-6)
        for actual, gradient in zip(torch.autograd.grad((h * factor).sum(), leaves, retain_graph=True), wanted, strict=True):
            torch.testing.assert_close(actual, gradient, rtol=1e-4, atol=1e-5)


def test_packed_sequences_and_steps():
    layer, names = make_layer(), recipe()
    x = torch.randn(1, 9, WIDTH, generator=torch.Generator().manual_seed(1))
    cu_seqlens = torch.tensor([0, 4, 5, 9])
    position_ids = torch.tensor([[*range(4), 0, *range(4)]])
    with torch.no_grad():
        expected = layer(x, position_ids)
        recurrence_gate, input_gate = gates_of(layer, x)
        parameters, first = (recurrence_gate, input_gate, x), cu_seqlens[:-1]
        h0 = names["first_state"](*(value[0, first] for value in parameters), layer.recurrent_param)
        options = {"recurrent_param": layer.recurrent_param}
        h = rglru_scan(recurrence_gate, input_gate, x=x, **options, h0=h0, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(h, expected, rtol=1e-6, atol=1e-6)
        state = torch.zeros(1, WIDTH)
        for t in range(9):
            now = [value[:, t] for value in parameters]
            if position_ids[0, t] == 0:
                state = names["first_state"](*now, layer.recurrent_param)
            h_t, state = rglru_step(now[0], now[1], x=now[2], **options, state=state)
            torch.testing.assert_close(h_t, expected[:, t], rtol=1e-6, atol=1e-6)


def test_gradient_is_finite_where_the_decay_is_one():
    names = recipe()
    gate = torch.full((1, 3, 2), -200.0, requires_grad=True)  # sigmoid underflows, so a is 1
    x, reset = torch.ones(1, 3, 2), torch.tensor([[True, False, False]])
    h, _ = names["scan_from_resets"](gate, x, x, torch.zeros(2), reset)
    torch.testing.assert_close(h, F.sigmoid(x))
    h.sum().backward()
    assert gate.grad.isfinite().all()
