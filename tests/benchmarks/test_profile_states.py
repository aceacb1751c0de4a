"""profile_discretization.py with complex states, and with a matrix A."""

# ruff: noqa: F811
from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ssm_kernels import reference
from ssm_kernels._discretizations import is_two_sample

pytest.importorskip("rich", reason="the profiler prints its tables with rich")
pytest.importorskip("matplotlib", reason="the profiler draws with matplotlib")

from profile_helpers import (
    ACCURACY_ONLY,
    SCRIPT,
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
OF_OPERATORS = {
    "bilinear": (1, 2, True),
    "rk4": (1, 2, True),
    "euler": (1, 1, True),
    "backward_euler": (1, 1, True),
    "gbt(0.7)": (1, 1, True),
    "trapezoidal": (2, 1, True),
    "gbt_two_sample(0.7)": (1, 1, True),
}
OF_REFERENCE = {
    "zoh": (1, 1, False),
    "zoh_exact": (1, 2, True),
    "poly": (1, 2, False),
    "highorder": (1, 2, False),
    "foh_ramp": (2, 1, True),
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


def check_matrix(found: dict) -> None:
    for accuracy in found["accuracies"]:
        end, middle, keeps_dc_gain = (OF_OPERATORS | OF_REFERENCE)[accuracy["method"]]
        assert accuracy["sampled_at_end"]["order"] == pytest.approx(end, abs=0.25)
        assert accuracy["sampled_at_middle"]["order"] == pytest.approx(middle, abs=0.25)
        assert (accuracy["dc_gain_error"] < 1e-12) == keeps_dc_gain
        assert accuracy["computed_by"] == ("reference" if accuracy["method"] in OF_REFERENCE else "operator")


def test_run_with_a_matrix_marks_the_rules_of_the_reference(measure, capsys):
    outputs = ["--plot", "found.png", "--csv", "found.csv"]
    methods = ["zoh", "poly", "euler", "rk4", "foh_ramp", "trapezoidal"]
    found = measure(*SMALL, "--no-profile-ops", *outputs, "--states", "matrix", "--methods", *methods)
    assert found["settings"]["states"] == "matrix" and found["settings"]["A_range"] == [1, 4]
    assert [accuracy["method"] for accuracy in found["accuracies"]] == methods
    assert [scan["method"] for scan in found["scans"]] == ["euler", "rk4", "trapezoidal"]
    check_matrix(found)
    printed = capsys.readouterr().out
    errors = printed[printed.index("3. Error") : printed.index("Input: ")].splitlines()
    for accuracy in found["accuracies"]:
        method, of_reference = accuracy["method"], accuracy["method"] in OF_REFERENCE
        assert (accuracy["rounding"] is None) == of_reference
        (line,) = (line for line in errors if line.startswith((f"{method} ", f"{method} (")))
        assert (" * " in line) == of_reference
        # The eigenvalues are -1 to -4, and euler's decay is 1 + z.
        steps = accuracy["steps"]
        if method == "euler":
            expected = [max(abs(1 - step), abs(1 - 4 * step)) for step in steps]
            assert steps[0] == 0.512 and expected[0] > 1 > expected[1] and " 0.256 " in line
        elif of_reference:
            expected = [math.exp(-step) for step in steps]
        else:
            assert accuracy["spectral_radii"] == sorted(accuracy["spectral_radii"]) and accuracy["spectral_radii"][-1] < 1
            continue
        assert accuracy["spectral_radii"] == pytest.approx(expected, abs=1e-12)
    words = " ".join(printed.split())
    assert "A is the matrix of HiPPO-LegS, one for all channels." in words
    assert "One matrix A of HiPPO-LegS for all channels, with eigenvalues from -1 to -4." in words and "complex" not in words
    rows = [row for row in csv.DictReader(Path("found.csv").read_text().splitlines()) if row["quantity"] == "spectral_radius"]
    assert len(rows) == len(methods) * len(steps)


def test_figures_of_the_page_have_every_rule_of_a_matrix(profiler):
    found = json.loads((SCRIPT.parent / "docs" / "figures" / "legs.json").read_text())
    assert [accuracy["method"] for accuracy in found["accuracies"]] == profiler.chosen_methods(["all"])
    check_matrix(found)


def test_errors_of_a_matrix_by_the_reference(profiler):
    """One exponential for all steps gives what ``dense_scan`` does, and a DC gain is that of its coefficients."""
    system, step, cpu = profiler.signals.System.legs(3, 5, seed=1), 0.1, torch.device("cpu")
    u = torch.randn(3, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for method in OF_REFERENCE:
        options = profiler.scans.options_of(method, u[None])
        for before in (None, u[:, 4]):
            previous = {"previous": "repeat" if before is None else (before[None], None)} if is_two_sample(method) else {}
            tensors = (u[None], torch.full_like(u, step)[None], system.A, system.B, system.C)
            expected = reference.dense_scan(*tensors, **options, **previous)[0]
            found = profiler.accuracy._reference_scan(method, u, before, step, system)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    Z, B = step * system.A[0], system.B[0]
    exact = torch.eye(5, dtype=B.dtype)[0]  # of all of the input's past, LegS keeps the mean
    torch.testing.assert_close(-torch.linalg.solve(system.A[0], B), exact)
    settled = torch.linalg.solve(torch.eye(5, dtype=B.dtype) - torch.matrix_exp(Z), step * B)
    found = profiler.accuracy._matrix_gain_error("zoh", system, step, cpu)
    assert found == pytest.approx((settled - exact).norm().item(), rel=1e-9)


def test_rates_are_those_of_s4d(profiler):
    linear, inverse = (profiler.signals.s4d_rates(states, 4) for states in ("s4d-lin", "s4d-inv"))
    assert torch.equal(linear.real, torch.full((4,), -0.5, dtype=torch.float64)) and torch.equal(inverse.real, linear.real)
    torch.testing.assert_close(linear.imag, math.pi * torch.arange(4, dtype=torch.float64))
    expected = torch.tensor([8 / math.pi * (8 / odd - 1) for odd in (1, 3, 5, 7)], dtype=torch.float64)
    torch.testing.assert_close(inverse.imag, expected)


@pytest.mark.parametrize("hold", ["sinusoids", "linear", "zero"])
@pytest.mark.parametrize("states", ["s4d-lin", "matrix"])
def test_exact_responses(profiler, states, hold):
    """Against the reference's steps, so small that its own error is small."""
    signals, is_matrix = profiler.signals, states == "matrix"
    system = signals.System.legs(2, 3, seed=1) if is_matrix else signals.System.s4d(states, 2, 3, seed=1)
    if hold == "sinusoids":
        response = signals.sinusoids(system, seed=2, seqlen=200, step=0.005)
    else:
        response = signals.recording(system, np.random.default_rng(3).standard_normal(18), hold, step=0.005)
    rule = "zoh_exact" if hold == "zero" else "foh_ramp"
    before = {} if hold == "zero" else {"previous": (response.u_start[None], None)}
    steps = torch.full_like(response.u, response.step)[None]
    tensors = (response.u[None], steps, system.A, system.B, system.C)
    scan = reference.dense_scan if is_matrix else reference.complex_scan
    found = scan(*tensors, discretization=rule, **before)[0]
    torch.testing.assert_close(found, response.y, rtol=0, atol=2e-4 if hold == "sinusoids" else 1e-12)


@pytest.mark.parametrize(
    ("states", "method"), [*(("s4d-inv", rule) for rule in RULES), *(("matrix", rule) for rule in OF_OPERATORS)]
)
def test_loop_is_the_scan(profiler, states, method):
    size, results = profiler.scans.ScanSize(2, 3, 9, 4), []
    options = {"device": torch.device("cpu"), "dtype": torch.float64, "seed": 0, "states": states}
    inputs = profiler.scans.scan_inputs(size, **options)
    for scan in (profiler.scans.loop_scan, reference.dense_scan if states == "matrix" else reference.complex_scan):
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
        (["--states", "matrix", "--dstate", "33"], "expected at most 32 states of a matrix, got 33"),
        (["--states", "matrix", "--A-range", "1", "2"], "--A-range is for real states, --states matrix has an A of its own"),
        (["--states", "matrix", "--methods", "foh", "--no-profile-accuracy"], "zoh_exact take exponentials of matrices"),
    ],
)
def test_bad_arguments_give_one_line(refuse, arguments, says):
    refuse(arguments, says)
