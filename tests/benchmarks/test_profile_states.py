"""profile_discretization.py with complex states."""

# ruff: noqa: F811
from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ssm_kernels import reference

pytest.importorskip("rich", reason="the profiler prints its tables with rich")
pytest.importorskip("matplotlib", reason="the profiler draws with matplotlib")

from profile_helpers import (
    ACCURACY_ONLY,
    SMALL,
    in_a_folder_of_its_own,  # noqa: F401
    measure,  # noqa: F401
    profiler,  # noqa: F401
    refuse,  # noqa: F401
)

OPERATOR = "selective_scan"
# The order with the input at the ends of steps and at their middle, and whether the DC gain is exact.
RULES = {
    "zoh": (1, 1, False),
    "zoh_exact": (1, 2, True),
    "bilinear": (1, 2, True),
    "trapezoidal": (2, 1, True),
    "exp_trapezoidal": (2, 1, False),
}


@pytest.mark.parametrize(
    ("states", "rates"), [("s4d-lin", "S4D-Lin from 0.5 to 9.438"), ("s4d-inv", "S4D-Inv from 0.6183 to 17.83")]
)
def test_run_measures_and_prints_every_rule(measure, capsys, states, rates):
    has_scans = states == "s4d-lin"
    options = [*SMALL, "--no-profile-ops", "--plot", "found.png"] if has_scans else [*ACCURACY_ONLY, "--plot", "none"]
    found = measure(*options, "--states", states, "--methods", "all")
    assert found["settings"]["states"] == states and found["settings"]["methods"] == [*RULES]
    assert [scan["method"] for scan in found["scans"]] == [*RULES] * has_scans
    for accuracy in found["accuracies"]:
        end, middle, keeps_dc_gain = RULES[accuracy["method"]]
        assert accuracy["sampled_at_end"]["order"] == pytest.approx(end, abs=0.25)
        assert accuracy["sampled_at_middle"]["order"] == pytest.approx(middle, abs=0.25)
        assert (accuracy["dc_gain_error"] < 1e-12) == keeps_dc_gain
    printed = " ".join(capsys.readouterr().out.split())
    assert f"|A| of {rates} in every channel" in printed
    assert ("A, B and C are complex" in printed) == has_scans


def test_rates_are_those_of_s4d(profiler):
    linear, inverse = (profiler.signals.s4d_rates(states, 4) for states in ("s4d-lin", "s4d-inv"))
    assert torch.equal(linear.real, torch.full((4,), -0.5, dtype=torch.float64)) and torch.equal(inverse.real, linear.real)
    torch.testing.assert_close(linear.imag, math.pi * torch.arange(4, dtype=torch.float64))
    expected = torch.tensor([8 / math.pi * (8 / odd - 1) for odd in (1, 3, 5, 7)], dtype=torch.float64)
    torch.testing.assert_close(inverse.imag, expected)


@pytest.mark.parametrize("hold", ["sinusoids", "linear", "zero"])
def test_exact_responses(profiler, hold):
    """Against the reference's steps, so small that its own error is small."""
    signals, system = profiler.signals, profiler.signals.System.s4d("s4d-lin", 2, 3, seed=1)
    if hold == "sinusoids":
        response = signals.sinusoids(system, seed=2, seqlen=200, step=0.005)
    else:
        response = signals.recording(system, np.random.default_rng(3).standard_normal(18), hold, step=0.005)
    rule = "zoh_exact" if hold == "zero" else "foh_ramp"
    before = {} if hold == "zero" else {"previous": (response.u_start[None], None)}
    steps = torch.full_like(response.u, response.step)[None]
    tensors = (response.u[None], steps, system.A, system.B, system.C)
    found = reference.complex_scan(*tensors, discretization=rule, **before)[0]
    torch.testing.assert_close(found, response.y, rtol=0, atol=2e-4 if hold == "sinusoids" else 1e-12)


@pytest.mark.parametrize("method", RULES)
def test_loop_is_the_scan(profiler, method):
    size, results = profiler.scans.ScanSize(2, 3, 9, 4), []
    options = {"device": torch.device("cpu"), "dtype": torch.float64, "seed": 0, "states": "s4d-inv"}
    inputs = profiler.scans.scan_inputs(size, **options)
    for scan in (profiler.scans.loop_scan, reference.complex_scan):
        forward, backward = profiler.scans.scan_stages(scan, inputs, torch.ones_like(inputs["u"]), method, backward=True)
        out = forward()
        results.append((out.detach(), *backward(out)))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--states", "complex"], "--states: invalid choice: 'complex'"),
        (["--states", "s4d-lin", "--methods", "euler"], "'euler' has no complex states, expected 'all' or some of zoh"),
        (["--states", "s4d-inv", "--A-range", "1", "2"], "--A-range is for real states"),
        (["--states", "s4d-lin", "--dstate", "129"], "expected at most 128 complex states, got 129"),
    ],
)
def test_bad_arguments_give_one_line(refuse, arguments, says):
    refuse(arguments, says)
