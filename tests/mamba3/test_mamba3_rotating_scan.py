"""mamba3_chunk_scan on CUDA where the scan's kernel rotates, beside float64 and beside the rotation in front of the scan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mamba3_helpers import MAMBA3, make_inputs

pytestmark = pytest.mark.cuda

SIZES: dict[str, dict[str, Any]] = {
    "chunks": {"seqlen": 200, "heads": 4, "groups": 2, "headdim": 64, "dstate": 128, "angles": 32},
    "few_rows": {"seqlen": 80, "heads": 3, "groups": 1, "headdim": 40, "dstate": 64, "angles": 12, "z": False, "D": None},
    "halves": {"seqlen": 65, "heads": 2, "groups": 1, "headdim": 64, "dstate": 128, "angles": 64, "rotate": "halves"},
    "halves_of_64": {"seqlen": 64, "heads": 2, "groups": 1, "headdim": 16, "dstate": 64, "angles": 20, "rotate": "halves"},
    "all_pairs": {"seqlen": 130, "heads": 2, "groups": 1, "headdim": 72, "dstate": 128, "angles": 64, "biases": False},
    "one_step": {"seqlen": 1, "heads": 2, "groups": 1, "headdim": 64, "dstate": 64, "angles": 16, "initial_states": False},
    "cut_sequences": {"batch": 3, "seqlen": 640, "heads": 102, "groups": 1, "headdim": 8, "dstate": 64, "angles": 4},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(SIZES))
def test_forward(name, dtype):
    """``out`` is within 1.15 times its rounding; the states are within the rounding of the operands."""
    inputs = make_inputs(device="cuda", dtype=dtype, **SIZES[name])
    exact = MAMBA3.evaluate_in_float64(inputs, None)
    actual = MAMBA3.evaluate(MAMBA3, inputs, None)

    def error(value: torch.Tensor, key: str) -> float:
        return ((value.double() - exact[key]).norm() / exact[key].norm()).item()

    assert error(actual["out"], "out") <= 1.15 * error(exact["out"].to(dtype), "out")
    turned = (actual["final_angle"].double() - exact["final_angle"]) / 2
    assert turned.sin().abs().max() < 1e-5
    bounds = {"final_k": 1e-5, "final_x": 0.0, "final_ssm": torch.finfo(dtype).eps}
    assert {key: value for key, bound in bounds.items() if (value := error(actual[key], key)) > bound} == {}


@pytest.mark.parametrize("case", ["expanded", "one_head"])
def test_rows_that_tma_cannot_describe(case):
    sizes = {"heads": 1, "headdim": 100} if case == "one_head" else {"heads": 2, "headdim": 64}
    inputs = make_inputs(device="cuda", dtype=torch.bfloat16, seqlen=70, groups=1, dstate=64, angles=16, **sizes)
    if case == "expanded":
        inputs["x"] = inputs["x"][:, :1].expand_as(inputs["x"])
    exact = MAMBA3.evaluate_in_float64(inputs, None)["out"]
    error, rounding = ((out.double() - exact).norm() for out in (MAMBA3(**inputs)[0], exact.bfloat16()))
    assert error <= 1.15 * rounding


def test_later_steps_have_no_effect():
    """Other inputs at step t leave the bits of the outputs of earlier steps."""
    inputs = make_inputs(device="cuda", dtype=torch.bfloat16, **SIZES["chunks"])
    out = MAMBA3(**inputs)[0]
    for step in (3, 62, 64, 133):
        changed = {name: inputs[name].clone() for name in ("x", "B", "C", "z", "dt", "A", "angles", "trap")}
        for tensor in changed.values():
            tensor[:, step] *= -0.5
        found = MAMBA3(**inputs | changed)[0]
        assert torch.equal(found[:, :step], out[:, :step]) and not torch.equal(found[:, step], out[:, step]), step
