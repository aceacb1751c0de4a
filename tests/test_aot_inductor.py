"""Every layer in a package of AOTInductor: exported, compiled ahead of time, loaded, and run on other sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

import ssm_kernels.nn as layers
from build_linking import SHARED_LIBSTDCXX

D_MODEL = 16
INFINITE = (math.inf, -math.inf)


SMALL = {"headdim": 8, "d_state": 16}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Mamba": lambda: layers.Mamba(D_MODEL),
    "Mamba, zoh_exact": lambda: layers.Mamba(D_MODEL, discretization="zoh_exact"),
    "Mamba2": lambda: layers.Mamba2(D_MODEL, **SMALL),
    "Mamba2, step sizes within limits": lambda: layers.Mamba2(D_MODEL, dt_limit=(0.01, 0.05), rmsnorm=False, **SMALL),
    "Mamba2, a lower limit": lambda: layers.Mamba2(D_MODEL, dt_limit=(0.1, math.inf), **SMALL),
    "SelectiveSSM": lambda: layers.SelectiveSSM(D_MODEL),
    "Liquid": lambda: layers.Liquid(D_MODEL, D_MODEL),
    "MinGRU": lambda: layers.MinGRU(D_MODEL, D_MODEL),
    "MinLSTM": lambda: layers.MinLSTM(D_MODEL, D_MODEL),
    "Block": lambda: layers.Block(D_MODEL, layers.Mamba, norm_cls=nn.RMSNorm, mlp_cls=layers.GatedMLP),
}
# All in one on the CPU, because each package takes a compiler seconds. On CUDA torch 2.11 generates C++ for all of them that
# does not compile: it reuses an array of sizes outside the scope that declares it.
PACKAGES = [pytest.param("cpu", tuple(LAYERS), id="cpu")]
PACKAGES += [pytest.param("cuda", (name,), id=f"cuda-{name}", marks=pytest.mark.cuda) for name in LAYERS]


class Layers(nn.Module):
    """Layers of one input."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: LAYERS[name]() for name in names})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outputs = {name: layer(x) for name, layer in self.layers.items()}
        return {name: output[0] if isinstance(output, tuple) else output for name, output in outputs.items()}


def test_of_every_layer():
    assert {type(make()).__name__ for make in LAYERS.values()} | {"GatedMLP"} == set(layers.__all__)


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[None]:
    """AOTInductor's compiler, linking the shared libstdc++: some link a copy of it, which crashes on loading."""
    try:
        command = cpp_builder.get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("AOTInductor needs a C++ compiler")
    script = tmp_path / "g++"
    linking = f'*" -shared "*) exec {command} {" ".join(SHARED_LIBSTDCXX)} "$@"'
    script.write_text(f'#!/bin/sh\ncase " $* " in {linking} ;; *) exec {command} "$@" ;; esac\n')
    script.chmod(0o755)
    with torch._inductor.config.patch({"cpp.cxx": (str(script),)}):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(("where", "names"), PACKAGES)
def test_layers_in_a_package(where: str, names: tuple[str, ...], tmp_path: Path, fresh_dynamo, compiler):
    torch.manual_seed(0)
    module = Layers(names).to(where).requires_grad_(False)
    x = torch.randn(2, 9, D_MODEL, device=where)
    sizes = {"x": {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("seqlen", min=2, max=4096)}}
    program = torch.export.export(module, (x,), dynamic_shapes=sizes)
    constants = [argument for node in program.graph.nodes for argument in (*node.args, *node.kwargs.values())]
    assert not any(isinstance(constant, float) and constant in INFINITE for constant in constants)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layers.pt2"))
    compiled = torch._inductor.aoti_load_package(package)
    for shape in ((2, 9), (3, 70)):
        x = torch.randn(*shape, D_MODEL, device=where)
        actual, expected = compiled(x), module(x)
        assert actual.keys() == expected.keys()
        for name, output in actual.items():
            torch.testing.assert_close(output, expected[name], msg=lambda text, name=name: f"{name}: {text}")
