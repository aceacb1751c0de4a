"""The operator between the projections of the delta rules: what it keeps for backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from delta_rule_mixer_helpers import DELTA_RULE_MIXER
from mixer_spec import kept_bytes

OPERATOR = "delta_rule_mixer"


def kept(inputs: dict[str, Any], autocast: torch.dtype | None = None) -> int:
    arguments = tuple((inputs | {"q": inputs["q"].detach().requires_grad_()}).values())
    with torch.autocast(inputs["q"].device.type, autocast, enabled=autocast is not None):
        return kept_bytes(lambda: DELTA_RULE_MIXER.operator(*arguments)[0], arguments)


@pytest.mark.parametrize("projects", [False, True])
def test_keeps_little_for_backward(projects, device):
    rows = 2 * 80 * 4
    make = partial(
        DELTA_RULE_MIXER.make_inputs, projects=projects, dtype=torch.bfloat16, device=device, **DELTA_RULE_MIXER.sizes
    )
    assert kept(make()) == rows * (16 * 2 + 4)  # y and rstd
    assert kept(make(recomputes_scan=True)) == rows * 4


def test_keeps_no_copy_of_a_weight_under_autocast(device):
    inputs = DELTA_RULE_MIXER.make_inputs(projects=True, dtype=torch.float32, device=device, **DELTA_RULE_MIXER.sizes)
    inputs["out_proj_weight"].requires_grad_()
    inputs |= {name: inputs[name].bfloat16() for name in ("q", "k", "v", "beta", "g", "z")}
    assert kept(inputs, torch.bfloat16) == 2 * 80 * 4 * (16 * 2 + 4)
