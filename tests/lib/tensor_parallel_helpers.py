"""Helpers of the tests of tensor parallelism: layers and models, their parallel copies, and what a call sends."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from process_pool import TWO_GPUS, Mesh, Place, param
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ssm_kernels.models import MambaConfig, MambaLM
from ssm_kernels.nn import Mamba, Mamba2, Mamba3
from ssm_kernels.nn.block import GatedMLP

# Divisible by 2, 3 and 4 ranks: 24 channels, 12 heads.
D_MODEL, CHANNELS, HEADS, DSTATE, RANK, WIDTH = 12, 24, 12, 3, 5, 4
BATCH, SEQLEN = 2, 12


def mamba(**options: Any) -> Mamba:
    return Mamba(D_MODEL, **{"d_state": DSTATE, "dt_rank": RANK, "layer_idx": 0, "dtype": torch.float64} | options)


def mamba2(**options: Any) -> Mamba2:
    sizes = {"d_state": DSTATE, "headdim": 2, "chunk_size": 4, "layer_idx": 0, "dtype": torch.float64}
    layer = Mamba2(D_MODEL, **sizes | options)
    if layer.rmsnorm:
        nn.init.uniform_(layer.norm.weight, 0.5, 1.5)
    return layer


def mamba3(**options: Any) -> Mamba3:
    layer = Mamba3(D_MODEL, **{"d_state": 8, "headdim": 2, "layer_idx": 0, "dtype": torch.float64} | options)
    factors = (layer.mimo_x, layer.mimo_z, layer.mimo_o) if layer.is_mimo else ()
    for parameter in (layer.B_norm.weight, layer.C_norm.weight, layer.B_bias, layer.C_bias, layer.D, *factors):
        nn.init.uniform_(parameter, 0.5, 1.5)
    return layer


def mlp() -> GatedMLP:
    return GatedMLP(D_MODEL, 24, multiple_of=12, bias=True, dtype=torch.float64)


VOCABULARY = 21


def language_model(mixer: str, **fields: Any) -> MambaLM:
    all_sizes = {"Mamba": {}, "Mamba2": {"headdim": 2}, "Mamba3": {"d_state": 8, "headdim": 2}}
    sizes = {"d_state": DSTATE} | all_sizes[mixer]
    options = {"d_model": D_MODEL, "n_layer": 2, "vocab_size": VOCABULARY, "ssm_cfg": sizes, "mixer": mixer} | fields
    return MambaLM(MambaConfig(**options), {"initializer_range": 1.0}, dtype=torch.float64)


def tokens_of(mesh: Mesh, *shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0)).to(mesh.device_type)


def parallelize(module: nn.Module, mesh: Mesh, **options: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import parallelize_module

    from ssm_kernels.distributed import TensorParallel

    return parallelize_module(module, mesh, TensorParallel(**options))


def pair(make: Callable[[], nn.Module], mesh: Mesh, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A layer and its copy that is parallel; the copies of the other ranks than 0 have other parameters."""
    torch.manual_seed(0)
    expected = make().to(mesh.device_type)
    actual = copy.deepcopy(expected)
    if mesh.get_local_rank() > 0:
        with torch.no_grad():
            for parameter in actual.parameters():
                parameter.zero_()
    return expected, parallelize(actual, mesh, **options)


def whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def draw(mesh: Mesh, seed: int = 1) -> Tensor:
    """The same activations on every rank and device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, SEQLEN, D_MODEL, generator=generator, dtype=torch.float64).to(mesh.device_type)


def assert_close(actual: Tensor, expected: Tensor, name: str, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance, msg=lambda text: f"{name}: {text}")


def assert_same_gradients(actual: nn.Module, expected: nn.Module, tolerance: float = 1e-10) -> None:
    """Compares gradients of whole parameters, which state_dict makes while the parameters have their gradients as values."""
    for parameter in actual.parameters():
        assert parameter.grad is not None and type(parameter.grad) is type(parameter.data)
        if hasattr(parameter, "placements"):
            assert parameter.grad.placements == parameter.placements
    values = [parameter.detach().clone() for parameter in actual.parameters()]
    with torch.no_grad():
        for parameter in actual.parameters():
            parameter.copy_(parameter.grad)
        gradients = {name: whole(gradient).clone() for name, gradient in actual.state_dict().items()}
        for parameter, value in zip(actual.parameters(), values, strict=True):
            parameter.copy_(value)
    for name, parameter in expected.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        assert_close(gradients[name], parameter.grad, name, tolerance)


def run(layer: nn.Module, inputs: Tensor, weights: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Output and gradient of the input."""
    inputs = inputs.clone().requires_grad_()
    out = layer(inputs, **arguments)
    out.backward(weights)
    return out.detach(), inputs.grad


def own(tensor: Tensor, axis: int, mesh: Mesh) -> Tensor:
    return tensor.tensor_split(mesh.size(), axis)[mesh.get_local_rank()]


def check_layer(make: Callable[[], nn.Module], mesh: Mesh, **arguments: Any) -> None:
    expected, actual = pair(make, mesh)
    x, weights = draw(mesh), draw(mesh, 2)
    arguments = {name: value.to(mesh.device_type) for name, value in arguments.items()}
    if "cu_seqlens" in arguments:
        x, weights = x[:1], weights[:1]
    for wanted, got, name in zip(
        run(expected, x, weights, **arguments), run(actual, x, weights, **arguments), ("out", "grad_x"), strict=True
    ):
        assert_close(got, wanted, name)
    assert_same_gradients(actual, expected)
    state, wanted_state = actual.state_dict(), expected.state_dict()
    assert state.keys() == wanted_state.keys()
    for name, value in wanted_state.items():
        assert torch.equal(whole(state[name]), value), name


class Recorded(TorchDispatchMode):
    """Records products and collectives in order, and the numbers that the collectives reduce, gather or scatter."""

    COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.numbers = ranks, 0
        self.order: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Collectives in place have names that end in an underscore.
        name = func.overloadpacket.__name__.rstrip("_")
        if name in ("mm", "addmm", "wait_tensor", *self.COLLECTIVES):
            self.order.append(name)
        if name in self.COLLECTIVES:
            self.numbers += args[0].numel() * (self.ranks if name.startswith("all_gather") else 1)
        return func(*args, **kwargs or {})

    @property
    def counts(self) -> Counter[str]:
        return Counter(name for name in self.order if name in self.COLLECTIVES)


def record_collectives(mesh: Mesh, function: Callable[[], Any]) -> tuple[Any, Counter[str], int]:
    """The result of a function, its collectives by name and the numbers that they reduce, gather or scatter."""
    with Recorded(mesh.size()) as recorded:
        result = function()
    return result, recorded.counts, recorded.numbers


class Case(NamedTuple):
    """A check, the shape of the mesh that it gets, and whether it is left to ``-m exhaustive``."""

    shape: tuple[int, ...]
    check: Callable[[Mesh], None]
    exhaustive: bool = False


def over_places(cases: dict[str, Case], on_gpus: Iterable[str]) -> list[Any]:
    """Parameters of a test, the names of cases and places: all cases on CPUs, and some on two GPUs."""
    on_cpus = [param(Place(case.shape), name, id=name, exhaustive=case.exhaustive) for name, case in cases.items()]
    return [*on_cpus, *(param(TWO_GPUS, name, id=name) for name in on_gpus)]
