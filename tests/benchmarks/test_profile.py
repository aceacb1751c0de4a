"""profile_discretization.py and what it measures with: runs of the script, bad arguments, exact solutions, orders, timing."""

# ruff: noqa: F811
from __future__ import annotations

import csv
import io
import json
import math
import re
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from helpers import METHODS

import ssm_kernels
from ssm_kernels.reference import ALIASES, DISCRETIZATIONS, two_sample_coefficients

pytest.importorskip("rich", reason="the profiler prints its tables with rich")
pytest.importorskip("matplotlib", reason="the profiler draws with matplotlib")

from plot_helpers import assert_legible
from profile_helpers import (
    ACCURACY_ONLY,
    ROOT,
    SMALL,
    assert_one_line,
    in_a_folder_of_its_own,  # noqa: F401
    measure,  # noqa: F401
    profiler,  # noqa: F401
    refuse,  # noqa: F401
    run_script,
    table,
)

OPERATOR = "selective_scan"
# With two samples: the order, with the input at the ends of steps, and whether the DC gain is exact.
TWO_SAMPLES = {
    "foh_ramp": (2, True),
    "trapezoidal": (2, True),
    "gbt_two_sample(0.7)": (1, True),
    "exp_trapezoidal": (2, False),
}
ALL_METHODS = [*DISCRETIZATIONS, "gbt(0.7)", *TWO_SAMPLES]


def with_kernels(device: str) -> list[str]:
    """The methods that have kernels on the device."""
    one = torch.ones(1, 1, 1, device=device)
    try:
        ssm_kernels.selective_scan(one, one, -one[0], one, one, discretization="foh_ramp")
    except NotImplementedError:
        return [name for name in ALL_METHODS if name not in TWO_SAMPLES]
    return ALL_METHODS


# --- runs ---


def test_small_run_measures_and_writes_everything(device, tmp_path):
    files = ("--json", "found.json", "--csv", "found.csv", "--plot", "found.png")
    done = run_script(*SMALL, "--device", device, *files)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    methods = with_kernels(device)
    for name in methods:
        assert name in done.stdout
    assert all(ord(character) < 128 for character in done.stdout)

    found = json.loads((tmp_path / "found.json").read_text())
    assert {scan["method"] for scan in found["scans"]} == set(methods)
    assert {accuracy["method"] for accuracy in found["accuracies"]} == set(methods)
    assert {"exp", "expm1", "reciprocal", "inverse", "solve (bilinear Abar)"} <= {op["name"] for op in found["operations"]}
    assert found["settings"]["seqlen"] == 16
    for scan in found["scans"]:
        assert scan["forward"]["trials"] == scan["backward"]["trials"] == 3
        assert 0 < scan["backward"]["median"] <= scan["forward_backward"]["median"]
        assert scan["loop_seqlen"] == 16
        assert scan["speedup_over_loop"] > 0
    for accuracy in found["accuracies"]:
        if accuracy["method"] in TWO_SAMPLES:
            (end, keeps_dc_gain), middle = TWO_SAMPLES[accuracy["method"]], 1  # samples from mid-step are half a step late
        else:
            method = METHODS[accuracy["method"]]
            end, middle, keeps_dc_gain = 1, method.mid_step_order, method.keeps_dc_gain
        assert accuracy["sampled_at_end"]["order"] == pytest.approx(end, abs=0.1)
        assert accuracy["sampled_at_middle"]["order"] == pytest.approx(middle, abs=0.1)
        assert (abs(accuracy["dc_gain_error"]) < 1e-12) == keeps_dc_gain

    with (tmp_path / "found.csv").open() as file:
        rows = list(csv.DictReader(file))
    for part in ("scans", "accuracies"):
        assert {row["name"] for row in rows if row["part"] == part} == set(methods)
    assert all(math.isfinite(float(row["value"])) for row in rows)
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote found.png" in done.stdout


def test_recorded_input_ends_in_advice_at_its_own_step(measure, capsys):
    np.save("signal.npy", np.random.default_rng(0).standard_normal(257).cumsum())
    arguments = ["--input", "signal.npy", "--hold", "zero", "--step", "0.05", "--plot", "none"]
    found = measure(*ACCURACY_ONLY, *arguments, "--A-range", "0.5", "20", "--methods", "zoh,foh,bilinear,euler")
    assert found["settings"]["A_range"] == pytest.approx([0.5, 20.0])
    printed = " ".join(capsys.readouterr().out.split())
    assert "0.05, the sample spacing" in printed and found["advice"] in printed
    # The DC gain is that of the same A and step. For zoh it is furthest off for the fastest A, where z = -1.
    assert "A from -0.5 to -20 in every channel" in printed and "DC gain method" in printed
    gains = {accuracy["method"]: (accuracy["dc_step"], accuracy["dc_gain_error"]) for accuracy in found["accuracies"]}
    assert gains == {
        "zoh": (0.05, pytest.approx(1 / (1 - math.exp(-1)) - 1)),
        "zoh_exact": (0.05, 0),
        "bilinear": (0.05, 0),
        "euler": (0.05, 0),
    }
    # The input is constant over a step, which zoh_exact integrates exactly.
    assert found["advice"].startswith("At step 0.05 zoh_exact has the smallest error")
    assert "|delta A| reaches 1;" in found["advice"]
    slow = measure(*ACCURACY_ONLY, *arguments, "--A-range", "0.01", "0.02", "--methods", "bilinear,highorder")
    assert slow["advice"].startswith("At step 0.05 bilinear has the smallest error")
    assert slow["accuracies"][1]["dc_gain_error"] == pytest.approx(-(0.001**2) / 6, rel=0.01)
    coarse = measure(*ACCURACY_ONLY, *arguments, "--A-range", "900", "1000", "--methods", "euler,highorder")
    assert coarse["advice"].startswith("No rule resolves this input at step 0.05")
    assert coarse["accuracies"][0]["dc_gain_error"] is None  # euler is unstable


def test_headline_is_the_error_of_a_model_on_samples(profiler, measure):
    """The recurrences in NumPy, with coefficients from SciPy: each step reads the input at its own end."""
    signal = pytest.importorskip("scipy.signal")
    scipy_names = {"zoh_exact": ("zoh", None), "bilinear": ("gbt", 0.5), "euler": ("gbt", 0.0), "backward_euler": ("gbt", 1.0)}
    system = profiler.signals.System.random(3, 4, 0)
    response = profiler.signals.sinusoids(system, 0)
    found = profiler.accuracy.measure_accuracy(
        list(scipy_names), system, response, device=torch.device("cpu"), dtype=torch.float64
    )
    assert profiler.report.Report({}, {}).sampling == "end"
    step = found[0].headline_step(None)
    assert step == pytest.approx(0.064)
    y = response.y[:, 63::64].numpy()
    u = response.u[:, 63::64].numpy()
    for accuracy in found:
        method, alpha = scipy_names[accuracy.method]
        out = np.zeros_like(y)
        for d in range(3):
            A, B, C = (np.asarray(values[d]) for values in (system.A, system.B, system.C))
            for n in range(4):
                continuous = (A[n : n + 1, None], np.eye(1), np.eye(1), np.zeros((1, 1)))
                Abar, gain, *_ = signal.cont2discrete(continuous, step, method, alpha)
                h = 0.0
                for k in range(u.shape[1]):
                    h = Abar[0, 0] * h + gain[0, 0] * B[n] * u[d, k]
                    out[d, k] += C[n] * h
        expected = np.sqrt(np.mean((out - y) ** 2) / np.mean(y**2))
        assert accuracy.error_at(step, "end") == pytest.approx(expected, rel=1e-6)
    assert min(found, key=lambda accuracy: accuracy.error_at(step, "end")).method == "backward_euler"


def test_figure_and_advice_follow_the_sampling(measure, monkeypatch, profiler):
    drawn = []
    figure_of = profiler.plots.figure_of
    monkeypatch.setattr(profiler.plots, "figure_of", lambda *a, **k: drawn.append(figure_of(*a, **k)) or drawn[-1])
    end, middle = (
        measure(*ACCURACY_ONLY[:2], *ACCURACY_ONLY[4:], "--methods", "zoh,foh", "--sampling", place)
        for place in ("end", "middle")
    )
    ratios = {}
    for found, place in ((end, "end"), (middle, "middle")):
        assert found["sampling"] == place
        zoh, exact = (accuracy[f"sampled_at_{place}"]["errors"] for accuracy in found["accuracies"])
        at = [abs(step - 0.064) < 1e-9 for step in found["accuracies"][0]["steps"]].index(True)
        ratios[place] = zoh[at] / exact[at]
    # With 16 states, as the front page shows it.
    assert ratios == pytest.approx({"end": 1.34, "middle": 17.5}, rel=0.05)
    labels = [figure.axes[0].get_xlabel() for figure in drawn]
    assert "step's end" in labels[0] and "mid-step" in labels[1]


# --- figures ---


def scan_with(profiler: ModuleType, spread: float = 0.0, **seconds: float):
    """A scan with made-up timings."""
    timing = {
        name: profiler.scans.Timing(value, (1 - spread) * value, (1 + spread) * value, 20) for name, value in seconds.items()
    }
    size = profiler.scans.ScanSize(1, 2, 3, 4)
    return profiler.scans.Scan("zoh", size, timing["forward"], timing["backward"], timing["both"], 1, 1, 0, None, None)


@pytest.mark.parametrize(("spread", "printed"), [(0.01, "1.23   1"), (0.1, "1.2  10"), (0.42, "1  42")])
def test_noise_is_judged(profiler, spread, printed):
    scan = scan_with(profiler, spread, forward=0.001234, backward=0.005, both=0.009)
    found = profiler.report.Report({}, {"dtype": "float32"}, scans=[scan])
    console = profiler.Console(file=io.StringIO(), width=110)
    found.print_tables(console)
    text = console.file.getvalue()
    row = next(line for line in text.splitlines() if line.startswith("zoh"))
    assert re.search(rf"\s{re.escape(printed)}\s", row), row
    expected = ["zoh forward", "zoh backward", "zoh both"] if spread > 0.2 else []
    assert found.unreliable == expected
    assert ("unreliable: rerun" in text) == bool(expected)


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ("page", ()),
        ("column", ()),
        ("column", ("--input", "signal.csv", "--hold", "zero")),
        ("page", ("--input", "signal.csv", "--no-profile_ops", "--no-profile_scan")),
        ("column", ("--no-profile_accuracy",)),
        ("page", ("--no-profile_accuracy", "--no-profile_scan")),
        ("column", ("--no-profile_scan", "--methods", "euler", "backward_euler")),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_figures_are_legible(profiler, monkeypatch, layout, parts):
    times = 0.008 * np.arange(129)
    table(Path("signal.csv"), "time,x", np.stack([times, np.random.default_rng(0).standard_normal(129)], axis=1))
    drawn = []
    figure_of = profiler.plots.figure_of
    monkeypatch.setattr(profiler.plots, "figure_of", lambda *a, **k: drawn.append(figure_of(*a, **k)) or drawn[-1])
    monkeypatch.setattr(profiler.plots.plt, "close", lambda _: None)
    assert profiler.main([*SMALL, "--layout", layout, *parts, "--quiet"]) == 0
    assert_legible(drawn[0])


def test_every_option_has_help_and_one_spelling(profiler, measure, capsys):
    with pytest.raises(SystemExit):
        profiler.main(["--help"])
    printed = capsys.readouterr().out.partition("options:")[2]
    options = [line for line in printed.splitlines() if line.startswith("  -")]
    assert len(options) > 20
    assert not [line for line in options if "_" in line.split()[0]]
    for line, following in pairwise([*printed.splitlines(), ""]):
        if line.startswith("  -"):
            assert re.search(r"\S {2,}\S", line.strip()) or re.match(r" {10,}\S", following), line
    # The spelling of the first versions.
    parts = ["--profile_ops", "--no-profile_scan", "--no-profile_accuracy", "--n_trials=2", "--plot", "none"]
    assert measure("--device", "cpu", "--dstate", "4", *parts)["settings"]["n_trials"] == 2


def test_figure_shows_the_numbers_of_the_table(profiler):
    """The dark bar ends at forward, the light one at both, although forward is faster without a graph than with one."""
    scan = scan_with(profiler, forward=0.001, backward=0.005, both=0.009)
    figure = profiler.plots.figure_of(profiler.report.Report({}, {}, scans=[scan]), list(DISCRETIZATIONS))
    widths = [patch.get_width() for patch in figure.axes[0].patches]
    assert widths == pytest.approx([9.0, 1.0])


def test_legend_lists_the_curves_that_are_visible(profiler):
    steps = (0.4, 0.2, 0.1)
    lines = {"zoh": (30.0, 20.0, 0.1), "euler": (math.inf, 1e9, 1e7)}
    accuracies = [
        profiler.accuracy.Accuracy(
            name,
            steps,
            {place: profiler.accuracy.Convergence(errors, None, False) for place in ("end", "middle")},
            0.1,
            0.0,
            None,
        )
        for name, errors in lines.items()
    ]
    figure = profiler.plots.figure_of(profiler.report.Report({}, {}, accuracies=accuracies), list(DISCRETIZATIONS))
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "zoh" in names and "euler" not in names
    # An error above 1 is not cut off.
    assert figure.axes[0].get_ylim()[1] > 30


@pytest.mark.parametrize(("error", "text"), [(999.0, "zoh"), (8.5e9, "zoh: 8.5e+09"), (math.inf, "zoh: diverges")])
def test_speed_against_error_says_what_it_clips(profiler, error, text):
    convergence = dict.fromkeys(("end", "middle"), profiler.accuracy.Convergence((error,), None, False))
    report = profiler.report.Report(
        {},
        {},
        scans=[scan_with(profiler, forward=0.001, backward=0.005, both=0.009)],
        accuracies=[profiler.accuracy.Accuracy("zoh", (0.1,), convergence, 0.1, 0.0, None)],
    )
    figure = profiler.plots.figure_of(report, list(DISCRETIZATIONS))
    assert [label.get_text() for label in figure.axes[0].texts] == [text]


def test_methods_and_parts_can_be_chosen(measure, tmp_path):
    parts = ["--no-profile_ops", "--no-profile_accuracy", "--no-backward", "--plot", "none"]
    found = measure(*SMALL, "--methods", "zoh_exact,bilinear", "foh", *parts)
    assert [scan["method"] for scan in found["scans"]] == ["zoh_exact", "bilinear"]
    assert all(scan["backward"] is None for scan in found["scans"])
    assert found["operations"] == found["accuracies"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(measure, dtype):
    found = measure(*SMALL, "--dtype", dtype, "--methods", "foh")
    rounding = found["accuracies"][0]["rounding"]
    assert rounding is None if dtype == "float64" else 1e-5 < rounding < 0.1
    assert {operation["dtype"] for operation in found["operations"] if operation["form"] == "diagonal"} == {dtype}


@pytest.mark.parametrize("layout", ["page", "column"])
def test_unstable_methods_and_many_states_are_reported(measure, capsys, layout):
    measure("--device", "cpu", "--dstate", "256", *ACCURACY_ONLY[4:], "--layout", layout, "--methods", "euler", "bilinear")
    printed = capsys.readouterr().out
    assert "unstable" in next(line for line in printed.splitlines() if line.startswith("euler"))


# --- arguments that cannot be served ---


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--batch", "0"], "--batch: expected an integer of at least 1, got '0'"),
        (["--dim", "-3"], "--dim"),
        (["--seqlen", "ten"], "--seqlen: expected an integer of at least 1, got 'ten'"),
        (["--dstate", "257"], "expected an integer from 1 to 256, got '257'"),
        (["--n_trials", "2.5"], "--n-trials"),
        (["--seed", "-1"], "--seed"),
        (["--methods", "tustin"], "unknown discretization 'tustin', expected 'all' or some of zoh, zoh_exact"),
        (["--methods", "zoh,blinear"], "unknown discretization 'blinear', expected 'all' or some of zoh"),
        (["--methods", "zoh,blinear"], "; did you mean 'bilinear'?"),
        (["--methods", ","], "--methods"),
        (["--methods"], "--methods"),
        (["--device", "tpu"], "--device"),
        (["--dtype", "int8"], "--dtype"),
        (["--hold", "cubic"], "--hold"),
        (["--bogus"], "--bogus"),
        (["--seq", "4"], "--seq"),
        (["stray"], "stray"),
        (["--no-profile_ops", "--no-profile_scan", "--no-profile_accuracy"], "nothing to measure"),
        (["--plot", "figure.bmp"], "--plot figure.bmp: expected a name that ends in .png, .pdf, .svg"),
        (["--plot", "absent/figure.png"], "no such folder"),
        (["--json", "."], "is a folder"),
        (["--json", "same", "--csv", "same"], "different files"),
        (["--input", "absent.npy"], "absent.npy: no such file"),
        (["--input", "signal.mp3"], "expected a .npy, .csv or .wav file"),
        (["--input", "absent.npy", "--no-profile_accuracy"], "--input"),
        (["--input", "absent.npy", "--step", "0"], "--step: expected a number above 0, got '0'"),
        (["--step", "0.1"], "--step is for a recorded input"),
        (["--A-range", "4", "2"], "--A-range: expected MIN up to MAX, got 4 and 2"),
        (["--A-range", "0", "2"], "--A-range: expected a number above 0, got '0'"),
        (["--A-range", "1", "2", "--no-profile-accuracy"], "--A-range is for the accuracy part"),
        (["--sampling", "start"], "--sampling"),
        (["--batch", "4000000000", "--seqlen", "4000000000"], "GiB"),
    ],
)
def test_bad_arguments_give_one_line(refuse, tmp_path, arguments, says):
    refuse(["--dim", "4", "--n_trials", "1", *arguments], says)
    assert list(tmp_path.iterdir()) == []


def test_script_exits_with_2_and_no_traceback():
    done = run_script("--methods", "tustin")
    assert done.returncode == 2
    assert done.stdout == ""
    assert_one_line(done.stderr, "tustin")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_device_gives_one_line(refuse):
    refuse(["--device", "cuda"], "finds no CUDA device")


def test_missing_packages_give_one_line(tmp_path):
    absent = tmp_path / "rich"
    absent.mkdir()
    (absent / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'rich'\", name='rich')\n")
    done = run_script(PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert_one_line(done.stderr, 'pip install -e ".[profile]"')


# --- what the documentation says ---


def test_safe_range_and_orders_of_the_documentation():
    rows = {}
    for line in (ROOT / "docs" / "discretizations.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 10 and cells[0].startswith("`"):
            rows[cells[0].split("`")[1]] = cells[4:8]
    assert {*rows} == {*DISCRETIZATIONS, "gbt", "dirac", *(name.partition("(")[0] for name in TWO_SAMPLES)}
    z = -torch.logspace(-3, 1, 200_001, dtype=torch.float64)
    for method, (orders, gain, _, safe) in rows.items():
        if method in ("gbt", "dirac", "gbt_two_sample"):
            continue
        if method in TWO_SAMPLES:
            order, keeps_dc_gain = TWO_SAMPLES[method]
            assert orders == f"{order} / 1 / 1"
            options = {"lam": torch.full_like(z, 0.5)} if method == "exp_trapezoidal" else {}
            Abar, now, before = two_sample_coefficients(method, -z, torch.tensor(-1.0, dtype=z.dtype), **options)
            k = (now + before) / -z
        else:
            expected = METHODS[method]
            held = "exact" if expected.step_order is None else str(expected.step_order)
            assert orders == f"1 / {expected.mid_step_order} / {held}"
            keeps_dc_gain = expected.keeps_dc_gain
            Abar, k = DISCRETIZATIONS[method].coefficients(z)
        gain_error = (-z * k / (1 - Abar) - 1).abs()
        assert (gain == "exact") == keeps_dc_gain == bool(gain_error.max() < 1e-9)
        unsafe = torch.nonzero((gain_error > 0.1) | (Abar < 0))
        if safe == "any":
            assert len(unsafe) == 0
        else:
            assert float(safe) == pytest.approx(-z[unsafe[0, 0]].item(), abs=0.01)


# --- what the numbers rest on ---


def small_system(profiler: ModuleType):
    return profiler.signals.System.random(dim=3, dstate=4, seed=1)


def test_exact_response_to_sinusoids(profiler):
    integrate = pytest.importorskip("scipy.integrate")
    system = small_system(profiler)
    response = profiler.signals.sinusoids(system, seed=2, seqlen=64, step=0.02)
    A, B, C = (tensor.numpy() for tensor in (system.A, system.B, system.C))
    frequencies = np.array([1.0, 3.1, 9.7])
    phases = 2 * np.pi * torch.rand(3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64).numpy()
    times = 0.02 * np.arange(1, 65)
    for d in range(3):

        def u(t, d=d):
            return np.sin(frequencies * t + phases[d]).sum()

        solved = integrate.solve_ivp(
            lambda t, h, d=d, u=u: A[d] * h + B[d] * u(t), (0, times[-1]), np.zeros(4), "DOP853", times, rtol=1e-11, atol=1e-13
        )
        np.testing.assert_allclose(response.y[d].numpy(), C[d] @ solved.y, atol=1e-9)
        np.testing.assert_allclose(response.u[d].numpy(), [u(t) for t in times], atol=1e-12)


@pytest.mark.parametrize("hold", ["linear", "zero"])
def test_exact_response_to_a_recording(profiler, hold):
    signal = pytest.importorskip("scipy.signal")
    system = small_system(profiler)
    samples = np.random.default_rng(3).standard_normal(20)
    response = profiler.signals.recording(system, samples, hold)
    A, B, C = (tensor.numpy() for tensor in (system.A, system.B, system.C))
    spacing = response.resolved
    refined = round(spacing / response.step)
    times = spacing * np.arange(20)
    # A hold at the later sample is SciPy's hold at the earlier one, of a signal that is one sample ahead.
    given = samples if hold == "linear" else np.append(samples[1:], 0.0)
    for d in range(3):
        continuous = (np.diag(A[d]), B[d][:, None], C[d][None], np.zeros((1, 1)))
        _, expected, _ = signal.lsim(continuous, given, times, interp=hold == "linear")
        np.testing.assert_allclose(response.y[d, refined - 1 :: refined].numpy(), np.ravel(expected)[1:], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_loop_is_the_scan(profiler, method):
    """In float64, forward and backward: the baseline of the kernel's time does the same work."""
    size = profiler.scans.ScanSize(2, 3, 9, 4)
    inputs = profiler.scans.scan_inputs(size, device=torch.device("cpu"), dtype=torch.float64, seed=0)
    cotangent = torch.randn(2, 3, 9, dtype=torch.float64)
    results = []
    of_reference = profiler.scans.reference
    expected = of_reference.selective_scan
    if method in TWO_SAMPLES:

        def expected(*, discretization, **options):
            name, _, number = discretization.rstrip(")").partition("(")
            alpha = {"alpha": float(number)} if number else {}
            return of_reference.two_sample_scan(discretization=name, **alpha, **options)

    for scan in (profiler.scans.loop_scan, expected):
        forward, backward = profiler.scans.scan_stages(scan, inputs, cotangent, method, backward=True)
        out = forward()
        results.append((out.detach(), *backward(out)))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


def test_loop_has_no_series(profiler, monkeypatch):
    """zoh_exact's is ``expm1(z) / z``, as a user writes it, and not the 18 passes of the reference's phi1."""

    def refuse(*_):
        raise AssertionError("the loop calls reference.phi1")

    monkeypatch.setattr(profiler.scans.reference, "phi1", refuse)
    inputs = profiler.scans.scan_inputs(
        profiler.scans.ScanSize(1, 2, 3, 2), device=torch.device("cpu"), dtype=torch.float32, seed=0
    )
    for method in DISCRETIZATIONS:
        profiler.scans.loop_scan(**inputs, discretization=method, delta_softplus=True)


def test_observed_order_is_the_slope(profiler):
    steps = [2.0**-k for k in range(8)]
    errors = [3 * step**2 for step in steps]
    assert profiler.accuracy.observed_order(steps, errors, largest_step=0.5) == pytest.approx(2)
    errors[0] = math.inf
    assert profiler.accuracy.observed_order(steps, errors, largest_step=1.0) == pytest.approx(2)
    assert profiler.accuracy.observed_order(steps, [1e-15] * 8, largest_step=1.0) is None


def test_names_in_tables_and_plots_have_the_alias(profiler):
    from benchmarks import labels

    assert {alias: name for name, alias in labels.ALIASES.items()} == ALIASES
    assert [labels.label(name) for name in ("zoh", "zoh_exact")] == ["zoh", "zoh_exact (foh)"]


def test_labels_keep_their_order_and_distance(profiler):
    wanted = [0.5, 0.52, 0.51, 0.0, 0.99, 1.0]
    placed = profiler.plots._spread_apart(wanted, gap=0.1, low=0.02, high=0.98)
    assert sorted(range(6), key=placed.__getitem__) == sorted(range(6), key=wanted.__getitem__)
    ordered = sorted(placed)
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(ordered))
    assert ordered[0] >= 0.02 and ordered[-1] <= 0.98


def test_methods_beyond_the_palette_look_different(profiler):
    names = [f"method_{index}" for index in range(40)]
    looks = profiler.plots._looks(names, names)
    assert len(set(looks.values())) == len(names)
    assert profiler.plots._looks(names[5:6], names) == {names[5]: looks[names[5]]}


def test_measure_interleaves_and_times_each_stage(profiler):
    calls = []
    benchmarks = {name: (lambda name=name: calls.append(name) or name, lambda given: calls.append(given)) for name in "ab"}
    found = profiler.measure(benchmarks, trials=4, warmup=1)
    assert calls == ["a", "a", "b", "b"] * 5
    assert found["a"].total.trials == 4
    assert len(found["a"].stages) == 2
    assert found["a"].total.p20 <= found["a"].total.median <= found["a"].total.p80


def test_measure_stops_when_the_time_is_over(profiler):
    assert profiler.measure({"a": (lambda: None,)}, trials=1000, warmup=0, budget=0.0)["a"].total.trials == 3
