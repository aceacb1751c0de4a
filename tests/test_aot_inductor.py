"""Every layer in a package of AOTInductor: exported, compiled ahead of time, loaded, and run on other sizes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

import ssm_kernels.nn as layers

OPERATOR = "every operator"
D_MODEL = 16
INFINITE = (math.inf, -math.inf)


class EveryLayer(nn.Module):
    """All layers of one input, in one package: a package takes seconds to compile."""

    def __init__(self) -> None:
        super().__init__()
        small = {"headdim": 8, "d_state": 16}
        self.layers = nn.ModuleDict(
            {
                "Mamba": layers.Mamba(D_MODEL),
                "Mamba, zoh_exact": layers.Mamba(D_MODEL, discretization="zoh_exact"),
                "Mamba2": layers.Mamba2(D_MODEL, **small),
                "Mamba2, step sizes within limits": layers.Mamba2(D_MODEL, dt_limit=(0.01, 0.05), rmsnorm=False, **small),
                "Mamba2, a lower limit": layers.Mamba2(D_MODEL, dt_limit=(0.1, math.inf), **small),
                "SelectiveSSM": layers.SelectiveSSM(D_MODEL),
                "Liquid": layers.Liquid(D_MODEL, D_MODEL),
                "MinGRU": layers.MinGRU(D_MODEL, D_MODEL),
                "MinLSTM": layers.MinLSTM(D_MODEL, D_MODEL),
                "Block": layers.Block(D_MODEL, layers.Mamba, norm_cls=nn.RMSNorm, mlp_cls=layers.GatedMLP),
            }
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outputs = {name: layer(x) for name, layer in self.layers.items()}
        return {name: output[0] if isinstance(output, tuple) else output for name, output in outputs.items()}


@pytest.mark.slow
def test_every_layer_in_a_package(device, tmp_path: Path, fresh_dynamo):
    if device == "cpu":
        try:
            cpp_builder.get_cpp_compiler()
        except InvalidCxxCompiler:
            pytest.skip("AOTInductor needs a C++ compiler")
    torch.manual_seed(0)
    module = EveryLayer().to(device).requires_grad_(False)
    assert {type(layer).__name__ for layer in module.layers.values()} | {"GatedMLP"} == set(layers.__all__)
    x = torch.randn(2, 9, D_MODEL, device=device)
    sizes = {"x": {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("seqlen", min=2, max=4096)}}
    program = torch.export.export(module, (x,), dynamic_shapes=sizes)
    constants = [argument for node in program.graph.nodes for argument in (*node.args, *node.kwargs.values())]
    assert not any(isinstance(constant, float) and constant in INFINITE for constant in constants)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layers.pt2"))
    compiled = torch._inductor.aoti_load_package(package)
    for shape in ((2, 9), (3, 70)):
        x = torch.randn(*shape, D_MODEL, device=device)
        actual, expected = compiled(x), module(x)
        assert actual.keys() == expected.keys()
        for name, output in actual.items():
            torch.testing.assert_close(output, expected[name], msg=lambda text, name=name: f"{name}: {text}")
