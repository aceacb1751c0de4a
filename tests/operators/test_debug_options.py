"""The options that tests set to choose kernels and to pretend that a device has less memory."""

from __future__ import annotations

import re

import pytest
import torch
from helpers import DEBUG_OPTION_VALUES, debug_option, set_debug_option

LARGEST = 2**63 - 1
# The default, the smallest and the largest value of each option.
OPTIONS = {
    "causal_conv1d_kernel": (0, 0, 1),
    "linear_scan_kernel": (0, 0, 2),
    "selective_scan_kernel": (0, 0, 2),
    "selective_scan_shared_bytes": (LARGEST, 1, LARGEST),
    "ssd_mma": (0, 0, 1),
    "ssd_workspace_bytes": (2**30, 1, LARGEST),
    "ssd_shared_bytes": (LARGEST, 99 * 1024, LARGEST),
    "delta_rule_mma": (0, 0, 1),
    "delta_rule_shared_bytes": (LARGEST, 99 * 1024, LARGEST),
    "delta_rule_cpu": (0, 0, 1),
    "mamba3_cpu": (0, 0, 1),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_call_returns_the_previous_value(name):
    default, least, most = OPTIONS[name]
    with debug_option(name, least) as before:
        assert before == default
        assert set_debug_option(name, most) == least
        assert set_debug_option(name, most) == most
    assert set_debug_option(name, default) == default


@pytest.mark.parametrize("name", OPTIONS)
def test_a_value_out_of_range_is_refused_and_changes_nothing(name):
    default, least, most = OPTIONS[name]
    if name in DEBUG_OPTION_VALUES:
        expected = f"from {least} to {most} ({', '.join(DEBUG_OPTION_VALUES[name])})"
    else:
        expected = f"of at least {least}"
    for value in (least - 1, -LARGEST - 1, *([most + 1] if most < LARGEST else [])):
        message = f"_set_debug_option: expected {name} {expected}, got {value}"
        with pytest.raises(ValueError, match=rf"^{re.escape(message)}(\n|$)"):
            torch.ops.ssm_kernels._set_debug_option(name, value)
    assert set_debug_option(name, default) == default


def test_an_unknown_name_is_told_the_known_ones():
    message = f"_set_debug_option: unknown option 'ssd_shared', expected one of: {', '.join(OPTIONS)}"
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}(\n|$)"):
        torch.ops.ssm_kernels._set_debug_option("ssd_shared", 2**20)


@pytest.mark.parametrize("name", DEBUG_OPTION_VALUES)
def test_values_have_names(name):
    _, least, most = OPTIONS[name]
    assert len(DEBUG_OPTION_VALUES[name]) == most - least + 1
