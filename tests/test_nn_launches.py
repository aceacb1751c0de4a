"""What the layers run beside their matrix products: every operator that is not a view is at least one kernel on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ssm_kernels.nn as snn

MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "linear")
MEMORY = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "lift_fresh", "_unsafe_view")
# Operators that call others: of a profile, what is inside of them counts.
COMPOSED = ("_mamba_conv", "_mamba_mixer", "_mamba2_mixer", "reshape", "flatten", "unflatten", "to", "matmul", "contiguous")
VIEWS = ("view", "t", "transpose", "slice", "narrow", "split", "split_with_sizes", "chunk", "select", "expand", "squeeze")
VIEWS += ("unsqueeze", "as_strided", "resolve_conj", "_reshape_alias")
MIXERS = {
    "Mamba": lambda dtype: snn.Mamba(16, d_state=4, dtype=dtype),
    "Mamba_d_bias": lambda dtype: snn.Mamba(16, d_state=4, bias=True, conv_bias=False, dtype=dtype),
    "Mamba2": lambda dtype: snn.Mamba2(16, d_state=4, headdim=8, dtype=dtype),
    "Mamba2_D_has_hdim": lambda dtype: snn.Mamba2(16, d_state=4, headdim=8, D_has_hdim=True, rmsnorm=False, dtype=dtype),
}
every_mixer = pytest.mark.parametrize("make", MIXERS.values(), ids=list(MIXERS))
# The parameters of the recurrence stay float32 in a layer that is made in bfloat16, and do not in one that is cast to it.
every_dtype = pytest.mark.parametrize(
    ("made", "cast"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)],
    ids=["float32", "bfloat16", "cast_to_bfloat16"],
)


class Launches(TorchDispatchMode):
    """Names of the operators that computed something, matrix products apart."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in (*MATRIX_PRODUCTS, *MEMORY):
            self.names.append(name)
        return result


def count(run) -> list[str]:
    with Launches() as launches:
        run()
    return launches.names


def profiled(run) -> list[str]:
    """The same by the profiler, which sees what is inside of the mixers' operators."""

    def visit(event) -> list[str]:
        name = event.name.removeprefix("aten::").removeprefix("ssm_kernels::")
        if name == event.name or name in COMPOSED:  # a node of the graph, or an operator that is composed
            return [found for child in event.cpu_children for found in visit(child)]
        return [] if name in (*MATRIX_PRODUCTS, *MEMORY, *VIEWS) else [name]

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        run()
    return [name for event in profiler.events() if event.cpu_parent is None for name in visit(event)]


def make_layer(make, made: torch.dtype, cast: torch.dtype | None) -> tuple[torch.nn.Module, Tensor]:
    torch.manual_seed(0)
    layer = make(made) if cast is None else make(made).to(cast)
    return layer, torch.randn(2, 5, 16).to(made if cast is None else cast)


@every_dtype
@every_mixer
def test_step(make, made, cast):
    """The convolution's step, the recurrence's and, in Mamba-2, the norm."""
    layer, x = make_layer(make, made, cast)
    states = layer.allocate_inference_cache(2, 1)
    expected = ["causal_conv1d_update", "selective_state_update"]
    if hasattr(layer, "norm"):
        expected.append("_norm_gated_fwd")
    assert count(lambda: layer.step(x[:, :1], *states)) == expected


@every_dtype
@every_mixer
def test_forward(make, made, cast):
    """Once: the parameters, the convolution, the scan and, in Mamba-2, the norm."""
    layer, x = make_layer(make, made, cast)
    expected = ["_mixer_parameters", "_causal_conv1d_fwd"]
    if isinstance(layer, snn.Mamba):
        expected = [*reversed(expected), "_selective_scan_fwd"]
    elif hasattr(layer, "norm"):
        expected.append("_norm_gated_fwd")
    found = profiled(lambda: layer(x))
    if isinstance(layer, snn.Mamba2):  # on the CPU its scan is made of PyTorch's operators
        assert found[:2] == expected[:2]
        found = [name for name in found if name in expected]
    assert found == expected


@every_dtype
def test_backward_of_mamba(made, cast):
    """Beside the adjoints of the scan and of the convolution: the gradient of A_log, conversions of those of parameters, the
    gradient of x_proj's output, put together, and the sum of the gradients of the convolution's result.
    """
    layer, x = make_layer(MIXERS["Mamba"], made, cast)
    out = layer(x.requires_grad_())
    found = profiled(lambda: out.backward(torch.ones_like(out)))
    rounded = {None: ["_to_copy"] * (made == torch.bfloat16), torch.bfloat16: ["_to_copy"] * 2}[cast]
    expected = ["_selective_scan_bwd_out", "mul" if cast else "mul_", *rounded, "cat", "add_", "_causal_conv1d_bwd_out"]
    assert found[found.index("_selective_scan_bwd_out") :] == expected
