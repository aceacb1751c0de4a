"""``examples/control_loop.py``, run as users run it."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

for package in ("tqdm", "matplotlib"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the examples need {package}, which is not installed", allow_module_level=True)

import matplotlib.style  # noqa: E402
from plot_helpers import assert_legible  # noqa: E402

CONTROL_LOOP = Path(__file__).parents[2] / "examples" / "control_loop.py"
# As Python does for a script: the scripts import training.py, which is beside them.
sys.path.insert(0, str(CONTROL_LOOP.parent))

import training  # noqa: E402

SCRIPT = runpy.run_path(str(CONTROL_LOOP))


def test_the_controller_balances_and_no_force_does_not():
    states = SCRIPT["first_states"](16, torch.Generator().manual_seed(0))
    gains = SCRIPT["controller"]()
    controlled, free, has_fallen = states, states, torch.zeros(16, dtype=torch.bool)
    for _ in range(600):
        controlled = SCRIPT["advance"](controlled, (-controlled @ gains).clamp(-10, 10))
        free = SCRIPT["advance"](free, torch.zeros(16))
        has_fallen |= SCRIPT["has_fallen"](free)
        assert not SCRIPT["has_fallen"](controlled).any()
    assert has_fallen.all()
    assert controlled.abs().max() < 1e-3


@pytest.mark.parametrize("name", SCRIPT["LAYERS"])
def test_steps_equal_the_whole_sequence(name):
    """The policy that keeps its state acts as the one that reads all frames, and forgets an episode that has ended."""
    torch.manual_seed(0)
    policy = SCRIPT["Policy"](SCRIPT["LAYERS"][name], 8)
    observations = torch.randn(1, 6, 2)
    with torch.no_grad():
        wanted = policy(observations)[0]
        for way in ("eager", "window"):
            act = SCRIPT["WAYS"][way](policy)
            act(torch.randn(1, 2), True)
            forces = [act(observations[:, frame], frame == 0) for frame in range(6)]
            torch.testing.assert_close(torch.tensor(forces), wanted, rtol=1e-5, atol=1e-5)


def test_measures_every_policy_in_every_way(tmp_path, capsys):
    plot, results = tmp_path / "loop.png", tmp_path / "loop.json"
    threads = torch.get_num_threads()
    options = ["--frames=20", "--steps=2", "--d-model=8", f"--plot={plot}", f"--results={results}"]
    SCRIPT["main"](options)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(threads)
    rows = json.loads(results.read_text())["rows"]
    runs = [(name, way) for name in SCRIPT["LAYERS"] for way in ("eager", "window")]
    assert [(row["policy"], row["way"]) for row in rows] == runs
    for row in rows:
        assert 0 < row["p50"] <= row["p99"] <= row["p99.9"] <= row["max"] and row["frames"] == 20
    printed = capsys.readouterr().out
    assert re.findall(r"^(\S+) +(eager|window) +\d", printed, re.MULTILINE) == runs
    assert plot.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        SCRIPT["main"](options)
    assert "exists" in capsys.readouterr().err


def test_the_figure_is_legible():
    latencies = 100 * torch.exp(torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    rows = [SCRIPT["Measurement"](name, way, latencies, 0) for way in SCRIPT["WAYS"] for name in SCRIPT["LAYERS"]]
    with matplotlib.style.context(training.STYLE):
        assert_legible(SCRIPT["histograms"](rows, "NVIDIA H200"))
