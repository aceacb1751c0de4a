"""Discretizations that read two input samples a step, on CUDA beside the CPU in float64: kernels, layouts, borders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import debug_option
from test_selective_scan_two_samples import every_rule
from torch import Tensor
from two_sample_helpers import evaluate, make_scan_inputs, on, widened

from ssm_kernels import selective_scan

pytestmark = pytest.mark.cuda

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SEQUENTIAL, WARP_SCAN = "sequential", "warp_scan"  # of the debug option

OPTIONS: dict[str, dict[str, Any]] = {
    "tiles": {"seqlen": 100, "dim": 64, "dstate": 16, "previous": "given"},
    "partial_tiles": {"seqlen": 77, "dim": 67, "dstate": 14, "previous": "repeat"},
    "zero": {"seqlen": 129, "dim": 70, "dstate": 16},
    "groups": {"seqlen": 66, "dim": 128, "dstate": 16, "B": "groups", "C": "groups", "previous": "given"},
    "reverse": {"seqlen": 64, "dim": 64, "dstate": 16, "reverse": True, "previous": "given"},
    "reverse_repeat": {"seqlen": 45, "dim": 64, "dstate": 16, "reverse": True, "previous": "repeat"},
    "constant_B": {"seqlen": 70, "dim": 20, "B": "constant", "previous": "given"},
    "constant_B_repeat": {"seqlen": 70, "dim": 20, "B": "constant", "C": "constant", "previous": "repeat"},
    "many_states": {"seqlen": 140, "dim": 12, "dstate": 40, "previous": "given"},
    "one_step": {"seqlen": 1, "dim": 64, "dstate": 16, "previous": "given"},
}


def with_delta_A(inputs: dict[str, Any]) -> dict[str, Any]:
    """Steps of A from 0 to 4; every fifth is 0."""
    u = inputs["u"]
    delta_A = 4 * torch.rand(u.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    delta_A[..., ::5] = 0
    return inputs | {"delta_A": delta_A.to(u.dtype)}


def transposed(inputs: dict[str, Any]) -> dict[str, Any]:
    """The sequences with the channels, or states, contiguous."""

    def arrange(name: str, value: Any) -> Any:
        is_sequence = name in ("u", "delta", "z", "lam", "delta_A", "B", "C") and isinstance(value, Tensor) and value.dim() > 2
        return value.movedim(-1, 1).contiguous().movedim(1, -1) if is_sequence else value

    return {name: arrange(name, value) for name, value in inputs.items()}


def assert_agrees_with_cpu(inputs: dict[str, Any], scales: dict[str, float] | None = None) -> None:
    """Errors are relative to the norm of the result, or to that of `scales`."""
    found = evaluate(selective_scan, on("cuda", inputs))
    expected = evaluate(selective_scan, widened(inputs))
    for name, value in expected.items():
        actual = found[name].cpu()
        bound = 5e-6 + 2 * torch.finfo(actual.dtype).eps if actual.dtype != torch.float64 else 1e-11
        # Parameters' gradients of 16-bit calls are sums of rounded numbers.
        bound = max(bound, 2 * torch.finfo(inputs["u"].dtype).eps if inputs["u"].element_size() == 2 else 0)
        scale = (scales or {}).get(name, value.norm().item())
        error = (actual.double() - value).norm() / max(scale, 1e-30)
        assert error < bound, (name, error.item(), bound)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@every_rule
def test_against_the_cpu(rule, options, dtype, layout):
    inputs = make_scan_inputs(rule, dtype=dtype, **options)
    inputs = transposed(inputs) if layout == "transposed" else inputs
    kernels = [WARP_SCAN] if dtype == torch.float64 else [WARP_SCAN, SEQUENTIAL]
    for kernel in kernels:
        with debug_option("selective_scan_kernel", kernel):
            assert_agrees_with_cpu(inputs)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_a_step_of_its_own_for_A(options, dtype, layout):
    inputs = with_delta_A(make_scan_inputs("exp_trapezoidal", dtype=dtype, **options))
    assert_agrees_with_cpu(transposed(inputs) if layout == "transposed" else inputs)


@pytest.mark.parametrize("previous", ["zero", "repeat", "given"])
def test_a_step_of_its_own_for_A_over_segments_and_packed(previous):
    few = {"batch": 1, "dim": 5, "dstate": 16, "dtype": torch.float32, "previous": previous}
    for seqlen in (2047, 2049):
        assert_agrees_with_cpu(with_delta_A(make_scan_inputs("exp_trapezoidal", seqlen=seqlen, **few)))
    inputs = with_delta_A(make_scan_inputs("exp_trapezoidal", seqlen=150, sequences=6, **few))
    assert_agrees_with_cpu(inputs | {"cu_seqlens": torch.tensor([0, 0, 37, 37, 38, 101, 150])})


@pytest.mark.parametrize("previous", ["zero", "repeat", "given"])
@pytest.mark.parametrize("chosen", [WARP_SCAN, SEQUENTIAL])
@every_rule
def test_packed_sequences(rule, chosen, previous):
    """Empty sequences, one of a single step, and ones that begin between vectors and tiles."""
    options = {"batch": 1, "dim": 64, "dstate": 16, "seqlen": 150, "sequences": 6, "previous": previous}
    inputs = make_scan_inputs(rule, dtype=torch.float32, **options)
    inputs["cu_seqlens"] = torch.tensor([0, 0, 37, 37, 38, 101, 150])
    with debug_option("selective_scan_kernel", chosen):
        assert_agrees_with_cpu(inputs)
        assert_agrees_with_cpu(transposed(inputs))


@pytest.mark.parametrize("previous", ["repeat", "given"])
@every_rule
def test_resets(rule, previous):
    inputs = make_scan_inputs(rule, dim=64, dstate=16, seqlen=90, previous=previous, dtype=torch.float32)
    seq_idx = torch.zeros(2, 90, dtype=torch.int32)
    seq_idx[0, 32:] += 1
    seq_idx[1, 1:] += 1
    seq_idx[:, 71:] += 1
    assert_agrees_with_cpu(inputs | {"seq_idx": seq_idx})


@pytest.mark.parametrize("length", [31, 32, 33, 127, 128, 129, 2047, 2048, 2049])
@every_rule
def test_borders_of_tiles_and_segments(rule, length):
    """Few channels: forward cuts long sequences into segments."""
    inputs = make_scan_inputs(rule, batch=1, dim=5, dstate=16, seqlen=length, previous="given", dtype=torch.float32)
    assert_agrees_with_cpu(inputs)


@pytest.mark.parametrize("shape", [(), (6, 1), (2, 1, 70), (1, 6, 1)])
@pytest.mark.parametrize("chosen", [WARP_SCAN, SEQUENTIAL])
def test_lam_broadcasts(chosen, shape):
    """By strides of zero. Its gradient is the sum over the axes that it lacks, where terms cancel: the rounding errors of the
    terms, and with them that of the sum, are relative to the norm of the terms.
    """
    inputs = make_scan_inputs("exp_trapezoidal", seqlen=70, dstate=16, dtype=torch.float32)
    lam = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expanded = inputs | {"lam": lam.expand(inputs["u"].shape).contiguous()}
    terms = evaluate(selective_scan, widened(expanded))["grad_lam"]
    with debug_option("selective_scan_kernel", chosen):
        assert_agrees_with_cpu(expanded)
        assert_agrees_with_cpu(inputs | {"lam": lam}, {"grad_lam": terms.norm().item()})
