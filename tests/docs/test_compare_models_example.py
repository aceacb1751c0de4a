"""``examples/compare_models.py``, run as users run it."""

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

COMPARE = Path(__file__).parents[2] / "examples" / "compare_models.py"
RESULTS = COMPARE.parents[1] / "docs" / "figures" / "mamba3_losses.json"
# As Python does for a script: the scripts import training.py, which is beside them.
sys.path.insert(0, str(COMPARE.parent))

import training  # noqa: E402

SCRIPT = runpy.run_path(str(COMPARE))
SHORT = ["--steps=2", "--seeds=1", "--lr", "0.01", "0.001", "--batch-size=2", "--seqlen=20", "--d-model=16", "--n-layers=1"]


@pytest.fixture
def run(capsys):
    threads = torch.get_num_threads()

    def main(*arguments: str | Path) -> str:
        SCRIPT["main"]([str(argument) for argument in arguments])
        return capsys.readouterr().out

    yield main
    torch.set_num_threads(threads)


def test_trains_once_and_compares(run, tmp_path):
    results, plot = tmp_path / "losses.json", tmp_path / "losses.png"
    printed = run(*SHORT, "--results", results, "--plot", plot).splitlines()
    assert len(printed) == 3 * 2 + 5 and plot.read_bytes().startswith(b"\x89PNG")
    assert printed[-5] == "| model | parameters | learning rate 0.001 | learning rate 0.01 |"
    rows = [re.fullmatch(r"\| (\w+) \| ([\d,]+) (\| \d\.\d{3} ± \d\.\d{3} ){2}\|", row) for row in printed[-3:]]
    assert [row[1] for row in rows] == ["mamba2", "mamba3", "mamba2_without_convolution"]
    assert run(*SHORT, "--results", results).splitlines() == printed[-5:]  # nothing is trained again
    # Mamba2 without its convolution has weights of one step in place of four for each of its channels.
    channels = 2 * 16 + 2 * 32
    assert int(rows[0][2].replace(",", "")) - int(rows[2][2].replace(",", "")) == 3 * channels
    with pytest.raises(training.Mistake, match="expected results of"):
        run(*SHORT, "--steps=3", "--results", results)


def test_the_page_has_the_results():
    """docs/mamba3.md has the table of the committed results, and the figure is legible."""
    runs = json.loads(RESULTS.read_text())["runs"]
    models, rates = ["mamba2", "mamba3", "mamba2_without_convolution"], sorted({run["lr"] for run in runs})
    page = (COMPARE.parents[1] / "docs" / "mamba3.md").read_text()
    cells = re.findall(r"\d\.\d{3} ± \d\.\d{3}", SCRIPT["table"](runs, models, rates))
    assert len(cells) == 9 and all(cell in page for cell in cells)
    with matplotlib.style.context(training.STYLE):
        assert_legible(SCRIPT["curves"](runs, models, rates, "title"))
