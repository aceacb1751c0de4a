"""Norms of rows that start and end between 16-byte boundaries: the bits of aligned rows, from each kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from guarded_memory import ALIGNED, Layout, assert_offsets_keep_bits, assert_same_bits, guarded
from helpers import dtypes
from norm_helpers import NORMS, accumulate_type
from torch import Tensor

OPERATOR = "norms"
ops = torch.ops.ssm_kernels

ROWS = dict.fromkeys(("x", "z", "residual", "out", "normed", "new_residual"), (-1,))
LAYOUTS = (Layout(1), Layout(2), Layout(4), Layout(7), Layout(8), Layout(3, odd=True))

# The kernels compiled for RMSNorm take groups of more than 256 columns without bias, and in backward aligned rows of one
# smaller group with the gate after the norm; the general kernels take all others. 12296 and 12291 columns take clusters of
# blocks, 770 to 776 columns several rows for each block.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gate before": ("rms_norm_gated", {"bias": False, "columns": 776}),
    "gate before, odd": ("rms_norm_gated", {"bias": False, "columns": 2561}),
    "gate before, long": ("rms_norm_gated", {"bias": False, "columns": 12291}),
    "gate after": ("rms_norm_gated", {"bias": False, "columns": 774, "norm_before_gate": True}),
    "gate after, long": ("rms_norm_gated", {"bias": False, "columns": 12296, "norm_before_gate": True}),
    "odd groups": ("rms_norm_gated", {"bias": False, "columns": 963, "group_size": 321}),
    "no gate": ("rms_norm_gated", {"bias": False, "columns": 771, "z": False}),
    "gelu": ("rms_norm_gated", {"bias": False, "columns": 776, "activation": "gelu", "weight": False}),
    "few columns": ("rms_norm_gated", {"bias": False, "columns": 104}),
    "few columns, gate after": ("rms_norm_gated", {"bias": False, "columns": 104, "norm_before_gate": True}),
    "heads": ("rms_norm_gated", {"bias": False, "columns": 128, "norm_before_gate": True, "activation": "sigmoid"}),
    "small odd groups": ("layer_norm_gated", {"columns": 93, "group_size": 31}),
    "layer norm": ("layer_norm_gated", {"columns": 776, "norm_before_gate": True}),
    "layer norm, long": ("layer_norm_gated", {"columns": 12291}),
    "layer norm, long, vectors": ("layer_norm_gated", {"columns": 12296}),
    "layer norm, odd groups": ("layer_norm_gated", {"columns": 1539, "group_size": 513}),
    "add": ("add_rms_norm", {"bias": False, "columns": 776}),
    "add, long": ("add_rms_norm", {"bias": False, "columns": 12291}),
    "add, fp32 residual": ("add_rms_norm", {"bias": False, "columns": 776, "residual_dtype": torch.float32}),
    "add, fp32 residual, odd": ("add_rms_norm", {"bias": False, "columns": 2561, "residual_dtype": torch.float32}),
    "add, fp32 residual, long": ("add_rms_norm", {"bias": False, "columns": 12291, "residual_dtype": torch.float32}),
    "add layer norm": ("add_layer_norm", {"columns": 775, "residual_dtype": torch.float32}),
}


@pytest.mark.parametrize("case", CASES)
@dtypes(torch.float32, torch.bfloat16, torch.float16)
def test_bits_are_those_of_aligned_rows(case: str, dtype: torch.dtype, device: str) -> None:
    name, options = CASES[case]
    # On CUDA, blocks then take several rows each, in all stages of their pipelines.
    rows = max(5, 3_000_000 // options["columns"]) if device == "cuda" else 5
    norm = NORMS[name]
    inputs = norm.make_inputs(rows=(rows,), dtype=dtype, device=device, **options)
    layouts = LAYOUTS if device == "cuda" else LAYOUTS[-1:]
    assert_offsets_keep_bits(norm, inputs, ROWS, layouts=layouts)
    norm.assert_matches_reference(norm.make_inputs(rows=(5,), dtype=dtype, device=device, **options))


def shifted(parameter: Tensor, by: int) -> Tensor:
    """A copy that starts `by` elements after a multiple of 16 bytes."""
    return guarded(parameter, Layout(by))


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_parameters_start_at_any_element(bias: bool, dtype: torch.dtype, device: str) -> None:
    for parameter_dtype in {dtype, accumulate_type(dtype)}:
        norm = NORMS["rms_norm_gated"]
        inputs = norm.make_inputs(
            rows=(5,), columns=776, bias=bias, dtype=dtype, parameter_dtype=parameter_dtype, group_size=388, device=device
        )
        parameters = [key for key in ("weight", "bias") if inputs[key] is not None]
        cotangents = norm.make_cotangents(inputs)
        expected = norm.evaluate(norm, inputs, cotangents)
        for by in (1, 2, 3):
            moved = inputs | {key: shifted(inputs[key], by) for key in parameters}
            assert_same_bits(norm.evaluate(norm, moved, cotangents), expected, f"{by}")


@pytest.mark.parametrize("first", [1, 2, 3, 4, 5, 8])
@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize(("columns", "bias"), [(776, False), (771, False), (776, True), (12291, False)])
def test_gradients_go_into_slices(columns: int, bias: bool, first: int, dtype: torch.dtype, device: str) -> None:
    """grad_x and grad_z beside each other in one buffer, as the mixers write them: nothing else changes."""
    norm = NORMS["rms_norm_gated"]
    inputs = norm.make_inputs(rows=(9,), columns=columns, dtype=dtype, bias=bias, device=device)
    x, weight, z, bias_values = (inputs[key] for key in ("x", "weight", "z", "bias"))
    options = (None, False, "silu", False)
    _, rstd, mean = ops._norm_gated_fwd(x, weight, z, bias_values, 1e-5, *options)
    rows = tuple(guarded(value, ALIGNED) for value in (torch.randn_like(x), x, z))
    arguments = (*rows[:2], weight, rows[2], bias_values, mean, rstd, *options)
    expected = ops._norm_gated_bwd(*arguments, [True, True, True, bias])
    buffer = torch.full((9, first + 2 * columns + 9), torch.nan, dtype=dtype, device=device)
    slices = buffer[:, first : first + columns], buffer[:, first + columns : first + 2 * columns]
    parameters = ops._norm_gated_bwd_out(*arguments, [True, bias], *slices)
    actual = dict(zip(("x", "weight", "z", "bias"), (slices[0], parameters[0], slices[1], parameters[1]), strict=True))
    assert_same_bits(actual, dict(zip(actual, expected, strict=True)))
    assert buffer[:, :first].isnan().all() and buffer[:, first + 2 * columns :].isnan().all()
