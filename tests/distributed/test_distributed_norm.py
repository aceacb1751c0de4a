"""The norm of a tensor-parallel Mamba2 whose group is on two ranks, called alone as in decoding."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from process_pool import Mesh, Place, Processes
from torch import Tensor

from ssm_kernels.nn import Mamba2


def layer_and_parallel(mesh: Mesh, norm_before_gate: bool) -> tuple[Mamba2, Mamba2]:
    from torch.distributed.tensor.parallel import parallelize_module

    from ssm_kernels.distributed import TensorParallel

    torch.manual_seed(0)
    layer = Mamba2(12, d_state=3, headdim=2, norm_before_gate=norm_before_gate, dtype=torch.float64)
    nn.init.uniform_(layer.norm.weight, 0.5, 1.5)
    return layer, parallelize_module(copy.deepcopy(layer), mesh, TensorParallel())


def own(tensor: Tensor, mesh: Mesh) -> Tensor:
    return tensor.tensor_split(mesh.size(), -1)[mesh.get_local_rank()]


def check_values(mesh: Mesh, norm_before_gate: bool) -> None:
    layer, parallel = layer_and_parallel(mesh, norm_before_gate)
    x, z = torch.randn(2, 5, layer.d_inner, dtype=torch.float64)
    with torch.no_grad():
        for gate in (z, None):
            actual = parallel.norm(own(x, mesh), None if gate is None else own(gate, mesh))
            torch.testing.assert_close(actual, own(layer.norm(x, gate), mesh), rtol=0, atol=1e-10)


def check_gradients(mesh: Mesh) -> None:
    """An error where a gradient is needed, of x, of z or of the weight, and none elsewhere."""
    layer, parallel = layer_and_parallel(mesh, norm_before_gate=False)
    x, z = torch.randn(2, 5, layer.d_inner // mesh.size(), dtype=torch.float64)

    def check_error(x: Tensor, z: Tensor) -> None:
        with pytest.raises(NotImplementedError, match="Mamba2: expected no gradients through norm, whose groups"):
            parallel.norm(x, z)

    check_error(x, z)
    parallel.requires_grad_(False)
    assert not parallel.norm(x, z).requires_grad
    check_error(x.clone().requires_grad_(), z)
    check_error(x, z.clone().requires_grad_())


@pytest.mark.slow
@pytest.mark.parametrize("norm_before_gate", [False, True], ids=["gate_first", "norm_first"])
def test_values(processes: Processes, norm_before_gate: bool) -> None:
    processes.check(Place((2,)), check_values, norm_before_gate)


@pytest.mark.slow
def test_gradients(processes: Processes) -> None:
    processes.check(Place((2,)), check_gradients)
