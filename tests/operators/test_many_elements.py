"""Scans of more than 2^31 elements on CUDA: their first and last steps are those of short calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssm_kernels import delta_rule_scan, mlstm_scan

pytestmark = [pytest.mark.cuda, pytest.mark.slow]

# Steps whose results are compared, and steps before them, over which the gates drop the state.
COMPARED, BEFORE = 1024, 1024
ENDS = {"first": slice(0, COMPARED), "last": slice(-COMPARED, None)}


def make_draws() -> Callable[..., Tensor]:
    """Draws of one generator on the device, in bfloat16."""
    generator = torch.Generator("cuda").manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def make_delta_rule(channels: bool) -> dict[str, Tensor]:
    normal, steps, heads = make_draws(), 2**20 + 64, 16
    q, k = (F.normalize(normal(1, steps, 1, 64), dim=-1) for _ in range(2))
    g = normal(1, steps, heads, 64) if channels else normal(1, steps, heads)
    g.abs_().neg_().sub_(0.5)
    return {"q": q, "k": k, "v": normal(1, steps, heads, 128), "beta": normal(1, steps, heads).sigmoid_(), "g": g}


def make_mlstm(odd: bool) -> dict[str, Tensor]:
    normal, steps, heads = make_draws(), 2**19 + 64, 8
    q, k = normal(1, steps, heads, 256), normal(1, steps, heads, 256)
    return {
        "q": q,
        "k": k,
        "v": normal(1, steps, heads, 513 if odd else 768),
        **{gate: normal(1, steps, heads) for gate in "if"},
    }


def scan_of_mlstm(**inputs: Tensor) -> Tensor:
    return mlstm_scan(**inputs, eps=0.5)


@pytest.mark.parametrize(
    ("scan", "make", "option"),
    [
        pytest.param(delta_rule_scan, make_delta_rule, False, id="delta_rule_scan"),
        pytest.param(delta_rule_scan, make_delta_rule, True, id="delta_rule_scan, gate a channel"),
        pytest.param(scan_of_mlstm, make_mlstm, False, id="mlstm_scan"),
        pytest.param(scan_of_mlstm, make_mlstm, True, id="mlstm_scan, odd value_dim"),
    ],
)
def test_more_elements_than_32_bits_count(scan, make, option, needs_gpu_memory):
    needs_gpu_memory("cuda", 90)
    inputs = make(option)
    assert inputs["v"].numel() > 2**31
    steps = inputs["v"].shape[1]
    pieces = {"first": slice(0, COMPARED), "last": slice(steps - COMPARED - BEFORE, steps)}

    def evaluate(values: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs of both pieces, and the gradients of their weighted sums, of the compared steps."""
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        out = scan(**leaves)
        cotangent = torch.zeros_like(out)
        for name, weight in weights.items():
            cotangent[:, ENDS[name]] = weight
        grads = torch.autograd.grad(out, list(leaves.values()), cotangent)
        found = {"out": out.detach()} | dict(zip(leaves, grads, strict=True))
        return {f"{piece} {name}": value[:, ENDS[piece]].clone() for piece in weights for name, value in found.items()}

    normal = make_draws()
    weights = {name: normal(1, COMPARED, *inputs["v"].shape[2:]) for name in pieces}
    actual = evaluate(inputs, weights)
    for name, steps_of_piece in pieces.items():
        expected = evaluate({key: value[:, steps_of_piece] for key, value in inputs.items()}, {name: weights[name]})
        for result, value in expected.items():
            error = (actual[result].float() - value.float()).norm() / value.float().norm()
            assert error < 1e-2, (result, error.item())
