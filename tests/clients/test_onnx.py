"""Layers and models in ONNX: exported after ``decomposition_table``, and run by ONNX Runtime on other sizes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch import Tensor

import ssm_kernels
import ssm_kernels.nn as layers
from ssm_kernels.integrations.decompositions import decomposition_table
from ssm_kernels.models import MambaConfig, MambaLM

onnx = pytest.importorskip("onnx", reason="onnx is not installed: see the extra [clients]")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: see the extra [clients]")
pytest.importorskip("onnxscript", reason="onnxscript is not installed: see the extra [clients]")

CLIENT = "onnxruntime"
D_MODEL = 16
TOLERANCE = 1e-5
SMALL = {"headdim": 8, "d_state": 16}
HEADS = {"hidden_size": D_MODEL, "head_dim": 4, "num_heads": 2}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Mamba": lambda: layers.Mamba(D_MODEL),
    "Mamba2": lambda: layers.Mamba2(D_MODEL, **SMALL),
    "Mamba2 with groups and limits": lambda: layers.Mamba2(D_MODEL, ngroups=2, dt_limit=(0.01, 0.05), **SMALL),
    "Mamba2 without norm": lambda: layers.Mamba2(D_MODEL, rmsnorm=False, dt_limit=(0.01, math.inf), **SMALL),
    "Mamba3": lambda: layers.Mamba3(D_MODEL, ngroups=2, is_outproj_norm=True, **SMALL),
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


class Output(nn.Module):
    """The first output of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x)
        return output[0] if isinstance(output, tuple) else output


def exported(module: nn.Module, x: Tensor) -> onnxruntime.InferenceSession:
    """A session with the module, of any batch and length, in the operators of ONNX alone."""
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("seqlen", min=2, max=4096)}
    program = torch.export.export(module.eval(), (x,), dynamic_shapes=(sizes,)).run_decompositions(decomposition_table())
    with torch.no_grad():
        model = torch.onnx.export(program, dynamo=True, verbose=False).model_proto
    onnx.checker.check_model(model)
    assert {entry.domain for entry in model.opset_import} <= {"", "pkg.onnxscript.torch_lib.common", "pkg.onnxscript.torch_lib"}
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def assert_same(module: nn.Module, make_input: Callable[[int, int], Tensor]) -> None:
    module = Output(module)
    session = exported(module, make_input(2, 9))
    (name,) = (entry.name for entry in session.get_inputs())
    for batch, seqlen in ((2, 9), (1, 2), (3, 70)):
        x = make_input(batch, seqlen)
        with torch.no_grad():
            expected = module(x).numpy()
        output, *_ = session.run(None, {name: x.numpy()})
        np.testing.assert_allclose(output, expected, rtol=TOLERANCE, atol=TOLERANCE * np.abs(expected).max())


def make_hidden_states(batch: int, seqlen: int) -> Tensor:
    return torch.randn(batch, seqlen, D_MODEL)


@pytest.mark.serves("ONNX")
@pytest.mark.parametrize("model", LAYERS)
def test_layers(model: str):
    torch.manual_seed(0)
    assert_same(LAYERS[model](), make_hidden_states)


def test_of_every_layer():
    assert {type(make()).__name__ for make in LAYERS.values()} | {"GatedMLP"} == set(layers.__all__)


@pytest.mark.parametrize("discretization", [name for name in ssm_kernels.discretizations if name != "zoh"])
def test_every_discretization(discretization: str):
    torch.manual_seed(0)
    assert_same(layers.SelectiveSSM(D_MODEL, discretization=discretization), make_hidden_states)


@pytest.mark.serves("ONNX", model="MambaLM")
@pytest.mark.parametrize("mixer", ["Mamba2", "MinGRU"])
def test_language_model(mixer: str):
    torch.manual_seed(0)
    ssm_cfg = SMALL if mixer == "Mamba2" else {}
    model = MambaLM(MambaConfig(d_model=D_MODEL, n_layer=2, vocab_size=40, mixer=mixer, ssm_cfg=ssm_cfg))
    assert_same(model, lambda batch, seqlen: torch.randint(40, (batch, seqlen)))
