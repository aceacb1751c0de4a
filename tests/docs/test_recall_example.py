"""``examples/recall.py``, run as users run it."""

from __future__ import annotations

import importlib.util
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

RECALL = Path(__file__).parents[2] / "examples" / "recall.py"
# As Python does for a script: the scripts import training.py, which is beside them.
sys.path.insert(0, str(RECALL.parent))

import training  # noqa: E402

# 4 steps of sequences of 4 and of 8 pairs.
SHORT = ["--steps=4", "--pairs=8", "--tokens=60", "--d-model=16", "--n-layers=1"]
SCRIPT = runpy.run_path(str(RECALL))
MODELS = [*SCRIPT["MIXERS"]]


@pytest.fixture
def run(capsys):
    threads = torch.get_num_threads()

    def main(*arguments: str | Path) -> str:
        SCRIPT["main"]([str(argument) for argument in arguments])
        return capsys.readouterr().out

    yield main
    torch.set_num_threads(threads)


def read(checkpoint: Path) -> dict:
    return torch.load(checkpoint, weights_only=True)


@pytest.mark.parametrize("rewritten", [0, 4])
def test_queries_ask_for_the_last_values(rewritten):
    tokens, values = SCRIPT["sequences"](8, rewritten, 5, torch.Generator().manual_seed(0))
    end = 2 * (8 + rewritten)
    assert tokens.shape == (5, end + 8) and values.shape == (5, 8)
    for sequence, wanted in zip(tokens.tolist(), values.tolist(), strict=True):
        stored = dict(zip(sequence[:end:2], sequence[1:end:2], strict=True))  # the last pair of a key stays
        assert len(stored) == 8 and sorted(sequence[end:]) == sorted(stored) and max(stored) < SCRIPT["KEYS"]
        assert [stored[key] - SCRIPT["KEYS"] for key in sequence[end:]] == wanted


def test_all_models_have_as_much_state():
    """In decoding caches: the state of a layer is the product of what a head has of keys and of values."""
    sizes = set()
    for name in MODELS:
        (layer,) = (
            module for module in SCRIPT["RecallModel"](name, 32, 1).modules() if hasattr(module, "allocate_inference_cache")
        )
        sizes.add(max(state.numel() for state in layer.allocate_inference_cache(1, 1)))
    assert sizes == {32 * 32 // 2}


def test_trains_and_compares(run, tmp_path):
    plot = tmp_path / "recall.png"
    printed = run(*SHORT, "--plot", plot)
    found = re.findall(r"after 4 steps, .*, (\w+) recalls\n  every key has one value: of 4: \d+ %, 8: \d+ %\n", printed)
    assert found == MODELS and plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("model", MODELS)
def test_learns_a_batch(model):
    torch.manual_seed(0)
    learner = SCRIPT["RecallModel"](model, 32, 1)
    batch = SCRIPT["sequences"](4, 2, 8, torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(learner.parameters(), lr=0.02)
    losses = []
    for _ in range(40):
        losses.append(SCRIPT["recall_loss"](learner, *batch))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("model", MODELS)
def test_stopped_and_resumed_is_one_run(model, run, tmp_path):
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    expected = run(*SHORT, "--model", model, "--checkpoint", whole)
    run(*SHORT, "--model", model, "--checkpoint", parts, "--max-steps", "2")
    resumed = run(*SHORT, "--model", model, "--checkpoint", parts, "--resume")
    assert resumed.splitlines()[-2:] == expected.splitlines()[-2:]
    a, b = read(whole), read(parts)
    assert a["losses"] == b["losses"] and a["tests"] == b["tests"]
    torch.testing.assert_close(a["model"], b["model"], rtol=0, atol=0)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--d-model", "18"], ["--d-model", "multiple of 4", "18"]),
        (["--pairs", "3"], ["--pairs", "3"]),
        (["--model", "lstm"], ["--model", "lstm", *MODELS]),
        (["--steps", "0"], ["--steps", "0"]),
        (["--plot", "curve.svg"], ["--plot", "curve.svg", ".png"]),
        (["--resume"], ["--resume", "--checkpoint"]),
    ],
)
def test_bad_arguments(arguments, words, run, capsys):
    with pytest.raises(SystemExit):
        run(*arguments)
    message = capsys.readouterr().err
    assert message.startswith("recall.py: error: ") and all(word in message for word in words), message


def test_curves_are_legible():
    histories = {name: SCRIPT["History"]([3.0], [(1, [[1.0, 0.9, 0.4], [0.8, 0.5, 0.2]])]) for name in MODELS}
    with matplotlib.style.context(training.STYLE):
        assert_legible(SCRIPT["recall_curves"]([4, 8, 16], histories, 64))
