"""Every operator under torch.compile and torch.export."""

from __future__ import annotations

import pytest
import torch
from helpers import KeptGraphs, assert_equal
from operator_spec import tensor_names
from operators import OPERATORS, SCANS, every_operator, every_scan, over, over_options
from torch._dynamo.testing import CompileCounterWithBackend

OPERATOR = "every operator"

every_compiled = over_options(OPERATORS, lambda spec: {name: spec.options[name] for name in spec.compiled})
# One recurrence for all, with an input that broadcasts; test_causal_conv1d_torch.py has the convolution.
for_inductor = over({name: SCANS[name] for name in ("selective_scan", "ssd_chunk_scan", "liquid_scan")})
packing = ("ssd_chunk_scan", "linear_scan", "mingru_scan", "liquid_scan", "rglru_scan", "causal_conv1d")


def assert_same_training(operator, compiled, inputs, function=None, tolerance=None) -> None:
    """Compares results and gradients of the compiled function with the function, by default the operator."""
    actual, expected = operator.training_step(compiled, inputs), operator.training_step(function or operator, inputs)
    operator.assert_close(actual, expected, tolerance or operator.tolerance)


@every_compiled
def test_compile_once_for_every_length(operator, options, device, fresh_dynamo):
    """fullgraph, forward and backward: one graph each for every length, that calls nothing but the kernels."""
    graphs = KeptGraphs()
    compiled = torch.compile(operator, fullgraph=True, backend=graphs.backend)

    def with_any_length(**leaves):
        for name, axis in operator.time_axes(leaves).items():
            torch._dynamo.mark_dynamic(leaves[name], axis)
        return compiled(**leaves)

    for seqlen in (5, 32, 64, 65, 130, 70, 7):
        assert_same_training(operator, with_any_length, operator.make_inputs(**options | {"seqlen": seqlen}, device=device))
    kernels = [f"ssm_kernels.{operator.internal}_{way}.default" for way in ("fwd", "bwd")]
    assert graphs.kernels() == ([kernels[0]], [kernels[1]])


@every_scan
def test_compile_with_automatic_dynamic_shapes(operator, device, fresh_dynamo):
    """Nothing marked: the second length makes the size symbolic, and no later one compiles again."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(operator, fullgraph=True, backend=counter)
    counts = []
    for seqlen in (5, 64, 65, 130, 7):
        assert_same_training(operator, compiled, operator.make_inputs(seqlen=seqlen, device=device))
        counts.append(counter.frame_count)
    assert counts[1:] == [counts[1]] * 4 and counts[1] <= 1 + operator.frames


@over({name: SCANS[name] for name in packing})
def test_compile_packed_sequences(operator, device, fresh_dynamo):
    """Once for every length and every number of sequences: the offsets are data."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(operator, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for cu_seqlens in ((0, 0, 3, 4, 4, 4, 9, 9), (0, 3, 5, 5, 6), (0, 40, 41, 60)):
        assert_same_training(operator, compiled, operator.make_inputs(cu_seqlens=cu_seqlens, device=device))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1 and counts[0] <= operator.frames


@pytest.mark.slow
@for_inductor
def test_compile_with_inductor(operator, device, fresh_dynamo):
    """With work around the operator for Inductor to fuse and to lay out, channels contiguous."""

    def layer(**inputs):
        name, *others = tensor_names(inputs)
        around = {name: torch.tanh(inputs[name]) * 2} | {other: inputs[other] * 1.5 for other in others}
        first, *states = operator(**inputs | around)
        return torch.relu(first) + inputs[name], *(state * 2 for state in states)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for seqlen in (70, 9):
        inputs = operator.make_inputs(seqlen=seqlen, dtype=torch.float32, layout="transposed", device=device)
        assert_same_training(operator, compiled, inputs, layer, 1e-4)


@every_operator
def test_compile_without_gradients(operator, device, fresh_dynamo):
    inputs = operator.make_inputs(device=device)
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert all(map(torch.equal, compiled(**inputs), operator(**inputs)))


@every_scan
def test_autocast_in_compile(operator, device, fresh_dynamo):
    inputs = operator.make_inputs(dtype=torch.float32, device=device)

    def in_autocast(**inputs):
        with torch.autocast(device, dtype=torch.bfloat16):
            return operator(**inputs)

    compiled = torch.compile(in_autocast, fullgraph=True, backend="aot_eager")
    actual, expected = (operator.training_step(function, inputs) for function in (compiled, in_autocast))
    assert actual[operator.results[0]].dtype == torch.bfloat16
    assert_equal(actual, expected)


@every_operator
def test_export(operator, device):
    """Exports the public operator, with a symbolic length."""
    inputs = operator.make_inputs(seqlen=9, device=device)
    names, axes = tensor_names(inputs), operator.time_axes(inputs)

    class Call(torch.nn.Module):
        def forward(self, *tensors):
            return operator(**inputs | dict(zip(names, tensors, strict=True)))

    seqlen = torch.export.Dim("seqlen", min=2, max=4096)
    dynamic = tuple({axes[name]: seqlen} if name in axes else None for name in names)
    exported = torch.export.export(Call(), tuple(inputs[name] for name in names), dynamic_shapes=(dynamic,))
    targets = [str(node.target) for node in exported.graph.nodes if "ssm_kernels" in str(node.target)]
    assert targets == [f"ssm_kernels.{operator.name}.default"]
    for length in (2, 9, 32, 64, 200):
        tensors = operator.make_inputs(seqlen=length, device=device)
        example = tuple(tensors[name] for name in names)
        assert all(map(torch.equal, exported.module()(*example), Call()(*example)))
