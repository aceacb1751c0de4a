"""Counts the operators that layers run besides matrix products. Each that is not a view is at least one kernel on a GPU."""

from __future__ import annotations

import pytest
import torch
from layer_helpers import WIDTH, make_layer, make_sequence
from torch import Tensor

import ssm_kernels.nn as snn

MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "linear")
MEMORY = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "lift_fresh", "_unsafe_view")
# Operators that call others: of a profile, what is inside of them counts.
COMPOSED = ("_mamba_conv", "_mamba_inner", "_mamba_mixer", "_mamba2_mixer", "_mamba2_mixer_projected", "rms_norm_gated")
COMPOSED += (
    "_delta_rule_mixer",
    "_mlstm_mixer",
    "_norm_gated",
    "reshape",
    "flatten",
    "unflatten",
    "to",
    "matmul",
    "contiguous",
)
VIEWS = ("view", "t", "transpose", "slice", "narrow", "split", "split_with_sizes", "chunk", "select", "expand", "squeeze")
VIEWS += ("unsqueeze", "as_strided", "resolve_conj", "_reshape_alias")
SSD_SCANS = ("_ssd_chunk_scan_fwd", "_ssd_chunk_scan_bwd")
MIXERS = {"Mamba": {}, "Mamba-bias": {}, "Mamba2": {}, "Mamba2-D_has_hdim": {"rmsnorm": False}}
every_mixer = pytest.mark.parametrize("name", MIXERS)
# The parameters of the recurrence stay float32 in a layer that is made in bfloat16, and do not in one that is cast to it.
every_dtype = pytest.mark.parametrize(
    ("made", "cast"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)],
    ids=["float32", "bfloat16", "cast_to_bfloat16"],
)


def profiled(run) -> list[str]:
    """Returns the names of the operators that ``run`` executes, without views, allocations and matrix products.

    An operator of ``COMPOSED`` is replaced by the operators that it calls.
    """

    def visit(event) -> list[str]:
        name = event.name.removeprefix("aten::").removeprefix("ssm_kernels::")
        if name == event.name or name in COMPOSED:  # a node of the graph, or an operator that is composed
            return [found for child in event.cpu_children for found in visit(child)]
        return [] if name in (*MATRIX_PRODUCTS, *MEMORY, *VIEWS) else [name]

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        run()
    return [name for event in profiler.events() if event.cpu_parent is None for name in visit(event)]


def make_layer_and_input(name: str, made: torch.dtype, cast: torch.dtype | None) -> tuple[torch.nn.Module, Tensor]:
    layer = make_layer(name, dtype=made, **MIXERS[name])
    return layer.to(cast) if cast else layer, make_sequence(2, 5, WIDTH, dtype=cast or made)


@every_dtype
@every_mixer
def test_step(name, made, cast):
    """The convolution's step, the recurrence's and, in Mamba-2, the norm."""
    layer, x = make_layer_and_input(name, made, cast)
    states = layer.allocate_inference_cache(2, 1)
    expected = ["causal_conv1d_update", "selective_state_update"]
    if hasattr(layer, "norm"):
        expected.append("_norm_gated_fwd")
    assert profiled(lambda: layer.step(x[:, :1], *states)) == expected


@every_dtype
@every_mixer
def test_forward(name, made, cast):
    """Once: the parameters, the convolution, the scan and, in Mamba-2, the norm."""
    layer, x = make_layer_and_input(name, made, cast)
    expected = ["_mixer_parameters", "_causal_conv1d_fwd"]
    if isinstance(layer, snn.Mamba):
        expected = [*reversed(expected), "_selective_scan_fwd"]
    else:
        expected.append("_ssd_chunk_scan_fwd")
        if hasattr(layer, "norm"):
            expected.append("_norm_gated_fwd")
    assert profiled(lambda: layer(x)) == expected


@pytest.mark.parametrize("recompute", ["none", "cheap", "all"])
def test_a_delta_rule(recompute):
    """Forward: the convolutions, the scan and the norm. Backward: the convolutions again, and the adjoints of all."""
    layer = snn.GatedDeltaNet(WIDTH, head_dim=4, num_heads=2, num_v_heads=4)
    x, convolutions = make_sequence(2, 5, WIDTH, dtype=torch.float32), ["_causal_conv1d_fwd"] * 3
    layer.recompute = recompute
    forward = [*convolutions, "_delta_rule_scan_fwd"]
    assert profiled(lambda: layer(x)) == [*forward, "_norm_gated_fwd"]
    out = layer(x)
    found = profiled(lambda: out.backward(out.detach()))
    adjoints = ["_norm_gated_bwd_out", "_delta_rule_scan_bwd", *["_causal_conv1d_bwd"] * 3]
    again = forward if recompute == "all" else convolutions
    assert [name for name in found if name in {*adjoints, *forward}] == (
        [*again, *adjoints] if recompute == "all" else [adjoints[0], *again, *adjoints[1:]]
    )


@pytest.mark.parametrize("recompute", ["none", "cheap", "all"])
@every_mixer
def test_profiles_name_the_scan(name, recompute):
    """Forward and backward, and forward again where backward recomputes the scan; with the sizes of x."""
    layer, x = make_layer_and_input(name, torch.float32, None)
    layer.recompute = recompute
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True, record_shapes=True) as profiler:
        layer(x.requires_grad_()).sum().backward()
    scans = {event.name: event for event in profiler.events() if "scan" in event.name}
    is_mamba = isinstance(layer, snn.Mamba)
    forward, backward = ("_selective_scan_fwd", "_selective_scan_bwd_out") if is_mamba else SSD_SCANS
    assert [name.removeprefix("ssm_kernels::") for name in scans] == [forward, backward]
    assert sum(event.name.endswith(forward) for event in profiler.events()) == 1 + (recompute == "all")
    sizes = [2, layer.d_inner, 5] if is_mamba else [2, 5, layer.nheads, layer.headdim]
    for event in scans.values():
        assert sizes in [[*shape] for shape in event.input_shapes]


@every_dtype
@pytest.mark.parametrize("recompute", ["none", "cheap"])
def test_backward_of_mamba(made, cast, recompute):
    """Beside the adjoints of the scan and of the convolution: the gradient of A_log, conversions of those of parameters, the
    gradient of x_proj's output, put together, and the sum of the gradients of the convolution's result, which is part of a
    product if the node recomputes.
    """
    layer, x = make_layer_and_input("Mamba", made, cast)
    layer.recompute = recompute
    out = layer(x.requires_grad_())
    found = profiled(lambda: out.backward(torch.ones_like(out)))
    rounded = {None: ["_to_copy"] * (made == torch.bfloat16), torch.bfloat16: ["_to_copy"] * 2}[cast]
    expected = ["_selective_scan_bwd_out", "mul" if cast else "mul_", *rounded, "cat", "add_", "_causal_conv1d_bwd_out"]
    if recompute == "cheap":
        expected.remove("add_")
        assert found[: found.index("_selective_scan_bwd_out")] == ["ones_like", "_causal_conv1d_fwd"]
    assert found[found.index("_selective_scan_bwd_out") :] == expected
