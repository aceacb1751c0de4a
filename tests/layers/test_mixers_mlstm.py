"""The operator between the projections of ``nn.MLSTM``, and the layer: what they keep for backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from mixer_spec import kept_bytes
from mlstm_mixer_helpers import MLSTM_MIXER
from torch import Tensor

from ssm_kernels import nn

OPERATOR = "mlstm_mixer"


@pytest.mark.parametrize("projects", [False, True])
def test_keeps_little_for_backward(projects, device):
    rows = 2 * 80 * 2
    make = partial(MLSTM_MIXER.make_inputs, projects=projects, dtype=torch.bfloat16, device=device, **MLSTM_MIXER.sizes)
    for recomputes_scan, expected in ((False, rows * (32 * 2 + 12)), (True, rows * 8)):  # y, the divisor, rstd and mean
        inputs = make(recomputes_scan=recomputes_scan)
        inputs["q"].requires_grad_()
        arguments = tuple(inputs.values())
        assert kept_bytes(lambda arguments=arguments: MLSTM_MIXER.operator(*arguments)[0], arguments) == expected


def nodes_of(tensor: Tensor) -> list[str]:
    """The names of the graph's nodes but those of leaves and views."""
    found, waiting = {tensor.grad_fn}, [tensor.grad_fn]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                waiting.append(node)
    names = [type(node).__name__ if "Mlstm" not in node.name() else "mixer" for node in found]
    return sorted(
        name for name in names if not name.startswith(("AccumulateGrad", "View", "UnsafeView", "TBackward", "Unflatten"))
    )


@pytest.mark.parametrize("recompute", ["none", "cheap", "all"])
@pytest.mark.parametrize("mode", ["single", "fused"])
def test_one_node_between_the_projections(mode, recompute, device):
    layer = nn.MLSTM(64, num_heads=2, weight_mode=mode, device=device, dtype=torch.bfloat16)
    layer.recompute = recompute
    u = torch.randn(2, 80, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    out = layer(u)
    products = {"single": 6, "fused": 2}[mode] + (recompute == "none")
    nodes = nodes_of(out)
    assert nodes.count("mixer") == 1
    others = [name for name in nodes if name != "mixer"]
    assert len([name for name in others if name.startswith(("Mm", "Addmm", "Linear"))]) == products, nodes
    assert all(name.startswith(("Mm", "Addmm", "Linear", "Split", "ReshapeAlias")) for name in others), nodes
    # The projections' outputs; y and three float32 numbers a head, which "all" leaves out but for the norm's two.
    steps = 2 * 80
    projected = steps * (32 + 32 + 64 + 64 + 4) * 2
    expected = projected + (steps * 2 * 8 if recompute == "all" else steps * (64 * 2 + 2 * 12))
    expected += steps * 64 * 2 if recompute == "none" else 0  # the input of the out-projection
    assert kept_bytes(lambda: layer(u), [u, *layer.parameters()]) == expected


@pytest.mark.cuda
def test_peak_memory_of_layers():
    """Less than with the composed operators, which keep the input of each out-projection and the gates."""
    layers = [nn.MLSTM(1024, num_heads=4, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    u = torch.randn(4, 2048, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def peak() -> int:
        for _ in range(2):
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(u).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    class Composed:
        is_local = False
        mlstm_mixer = staticmethod(MLSTM_MIXER.composition)

    fused = peak()
    for layer in layers:
        layer.operators = Composed()
    assert fused < peak()
