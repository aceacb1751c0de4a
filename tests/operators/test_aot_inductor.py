"""Layers and operators with limits in packages of AOTInductor: exported, compiled ahead of time, loaded, run on other sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler
from torch.utils._pytree import tree_leaves

import ssm_kernels.nn as layers
from build_linking import SHARED_LIBSTDCXX
from ssm_kernels import ssd_chunk_scan, ssd_chunk_scan_summary
from ssm_kernels.compat.ssd import mamba_chunk_scan_combined

D_MODEL = 16
# The code around the kernels takes most of the compiler's time; its header, which one file includes, is not compiled ahead.
COMPILES_FAST = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
INFINITE = (math.inf, -math.inf)


SMALL = {"headdim": 8, "d_state": 16}
HEADS = {"hidden_size": D_MODEL, "head_dim": 4, "num_heads": 2}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Mamba": lambda: layers.Mamba(D_MODEL),
    "Mamba, zoh_exact": lambda: layers.Mamba(D_MODEL, discretization="zoh_exact"),
    "Mamba2": lambda: layers.Mamba2(D_MODEL, **SMALL),
    "Mamba2, step sizes within limits": lambda: layers.Mamba2(D_MODEL, dt_limit=(0.01, 0.05), rmsnorm=False, **SMALL),
    "Mamba2, a lower limit": lambda: layers.Mamba2(D_MODEL, dt_limit=(0.1, math.inf), **SMALL),
    "Mamba3": lambda: layers.Mamba3(D_MODEL, **SMALL),
    "SelectiveSSM": lambda: layers.SelectiveSSM(D_MODEL),
    "Liquid": lambda: layers.Liquid(D_MODEL, D_MODEL),
    "MinGRU": lambda: layers.MinGRU(D_MODEL, D_MODEL),
    "MinLSTM": lambda: layers.MinLSTM(D_MODEL, D_MODEL),
    "DeltaNet": lambda: layers.DeltaNet(hidden_size=D_MODEL, num_heads=2),
    "GatedDeltaNet": lambda: layers.GatedDeltaNet(**HEADS, num_v_heads=4),
    "KimiDeltaAttention": lambda: layers.KimiDeltaAttention(**HEADS),
    "GatedDeltaProduct": lambda: layers.GatedDeltaProduct(**HEADS),
    "MLSTM": lambda: layers.MLSTM(D_MODEL, 2),
    "Block": lambda: layers.Block(D_MODEL, layers.Mamba, norm_cls=nn.RMSNorm, mlp_cls=layers.GatedMLP),
}


class Scan(nn.Module):
    """An operator of SSD, its sequences parts of one input."""

    def __init__(self, function: Callable[..., Any], *options: Any, **limits: Any) -> None:
        super().__init__()
        self.function, self.options, self.limits = function, options, limits

    def forward(self, x: Tensor) -> Any:
        sequences = x.unflatten(-1, (2, D_MODEL // 2)), x[..., :2] - 0.5
        B, C = (x[..., columns].unflatten(-1, (1, 4)) for columns in (slice(4), slice(4, 8)))
        matrices = (B,) if self.function is ssd_chunk_scan_summary else (B, C)
        return self.function(*sequences, -torch.ones(2, device=x.device), *matrices, *self.options, **self.limits)


OPERATORS: dict[str, Callable[[], nn.Module]] = {
    "ssd_chunk_scan": lambda: Scan(ssd_chunk_scan),
    "ssd_chunk_scan, no limits": lambda: Scan(ssd_chunk_scan, dt_limit=None),
    "ssd_chunk_scan, the operator": lambda: Scan(torch.ops.ssm_kernels.ssd_chunk_scan, dt_limit=(0.0, math.inf)),
    "ssd_chunk_scan_summary": lambda: Scan(ssd_chunk_scan_summary, dt_limit=None),
    "mamba_chunk_scan_combined": lambda: Scan(mamba_chunk_scan_combined, 16),
}
MODULES = LAYERS | OPERATORS
# All in one on the CPU, because each package takes a compiler seconds. On CUDA torch 2.11 generates C++ for all of them that
# does not compile: it reuses an array of sizes outside the scope that declares it.
PACKAGES = [pytest.param("cpu", tuple(MODULES), id="cpu")]
USUAL_ON_CUDA = ("Mamba", "Mamba2, step sizes within limits", "MinGRU", "ssd_chunk_scan_summary")
PACKAGES += [
    pytest.param(
        "cuda",
        (name,),
        id=f"cuda-{name}",
        marks=[pytest.mark.cuda, *([] if name in USUAL_ON_CUDA else [pytest.mark.exhaustive])],
    )
    for name in MODULES
]


class Modules(nn.Module):
    """Modules of one input."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: MODULES[name]() for name in names})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outputs = {name: part(x) for name, part in self.parts.items()}
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
def test_modules_in_a_package(where: str, names: tuple[str, ...], tmp_path: Path, fresh_dynamo, compiler):
    torch.manual_seed(0)
    module = Modules(names).to(where).requires_grad_(False)
    x = torch.randn(2, 9, D_MODEL, device=where)
    sizes = {"x": {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("seqlen", min=2, max=4096)}}
    program = torch.export.export(module, (x,), dynamic_shapes=sizes)
    nodes = program.run_decompositions().graph.nodes
    constants = [constant for node in nodes for constant in tree_leaves((node.args, node.kwargs))]
    assert not any(isinstance(constant, float) and constant in INFINITE for constant in constants)
    with torch._inductor.config.patch(COMPILES_FAST):
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "modules.pt2"))
    compiled = torch._inductor.aoti_load_package(package)
    for shape in ((2, 9), (3, 70)):
        x = torch.randn(*shape, D_MODEL, device=where)
        actual, expected = compiled(x), module(x)
        assert actual.keys() == expected.keys()
        for name, output in actual.items():
            torch.testing.assert_close(output, expected[name], msg=lambda text, name=name: f"{name}: {text}")
