"""``examples/train_sequence.py`` on signals, run as users run it."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

for package in ("sklearn", "tqdm", "matplotlib"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the examples need {package}, which is not installed", allow_module_level=True)

import matplotlib.style  # noqa: E402
from plot_helpers import assert_legible  # noqa: E402

TRAIN = Path(__file__).parents[2] / "examples" / "train_sequence.py"
# As Python does for a script: the scripts import modules that are beside them.
sys.path.insert(0, str(TRAIN.parent))

import sampling_rates  # noqa: E402
import training  # noqa: E402

SHORT = ["--task=signals", "--steps=3", "--batch-size=4", "--d-model=8", "--n-layers=1"]


@pytest.fixture(autouse=True)
def few_signals(monkeypatch):
    monkeypatch.setattr(sampling_rates, "TEST_SIGNALS", 64)
    monkeypatch.setattr(sampling_rates, "STEPS_OF_A_BLOCK", 2)


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main, threads = runpy.run_path(str(TRAIN))["main"], torch.get_num_threads()

    def printed(*arguments: str) -> str:
        main([*SHORT, *arguments])
        return capsys.readouterr().out

    yield printed
    torch.set_num_threads(threads)


@pytest.fixture
def refuse(run, capsys):
    def message(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stop:
            run(*arguments)
        return f"{capsys.readouterr().err}{stop.value.code}"

    return message


def test_paths_are_those_of_the_process():
    """Their covariance is that of the stochastic differential equation at every spacing, and rates share their samples."""
    for name, (frequency, damping) in enumerate(sampling_rates.CLASSES):
        labels = torch.full((20_000,), name)
        paths = sampling_rates.sample_paths(labels, 0.02, 4, torch.Generator().manual_seed(0))
        assert paths.mean().abs() < 0.03 and paths.square().mean() == pytest.approx(1, abs=0.03)
        omega = 2 * math.pi * frequency
        damped, decay = omega * math.sqrt(1 - damping**2), math.exp(-damping * omega * 0.04)
        covariance = decay * (math.cos(0.04 * damped) + damping * omega / damped * math.sin(0.04 * damped))
        assert (paths[:, 1] * paths[:, 3]).mean() == pytest.approx(covariance, abs=0.03)
    paths, labels = sampling_rates.test_set(torch.device("cpu"))
    assert [paths[rate].shape for rate in (0.5, 1, 2)] == [(64, 64), (64, 128), (64, 256)] and labels.shape == (64,)
    assert torch.equal(paths[1], paths[2][:, 1::2]) and torch.equal(paths[0.5], paths[1][:, 1::2])


@pytest.mark.parametrize("rule", ["zoh", "exp_trapezoidal"])
def test_models_do_not_depend_on_each_other(rule):
    """Outputs and limited gradients are those of each model alone, also beside one whose loss is not finite."""
    both = sampling_rates.SignalClassifiers.of_seeds([3, 4, 5], 8, 1, rule)
    alone = sampling_rates.SignalClassifiers.of_seeds([4], 8, 1, rule)
    signals = torch.randn(3, 5, 20, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        both.head[2].fill_(math.nan)
    losses = []
    for models, given in ((both, signals), (alone, signals[1:2])):
        logits = models(given, 0.5)
        losses.append(logits.square().mean(dim=(1, 2)) * 1e3)
        sampling_rates.mean_of_finite(losses[-1]).backward()
        models.clip_gradients()
    assert losses[0][1].item() == pytest.approx(losses[1].item(), rel=1e-4)
    for (name, ours), theirs in zip(both.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad[1:2], theirs.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert both.diverged() == 1
    # A and the steps before training: -1 to -8 times a step of at most about 0.1, so that 90 % of the products are below it.
    (reached,) = alone.reach(signals[1])
    assert both.reach(signals[1])[1] == pytest.approx(reached, rel=1e-4) and 0.1 < reached < 0.8
    with torch.no_grad():
        both.mixers[0].dt_bias[2].fill_(math.nan)
    assert both.reach(signals[1])[2] is None
    paths, labels = sampling_rates.test_set(torch.device("cpu"))
    found = both.accuracies(paths, labels)
    assert {name: shares[2] for name, shares in found.items()} == dict.fromkeys(sampling_rates.CONDITIONS, 0.0)
    for name, shares in alone.accuracies(paths, labels).items():
        assert found[name][1] == pytest.approx(shares[0], abs=0.04)


def test_scaled_steps_make_a_model_independent_of_the_rate():
    """For a signal that is constant, up to the rule's error; without scaled steps the outputs differ."""
    models = sampling_rates.SignalClassifiers.of_seeds([0], 8, 1, "zoh_exact").double()
    signals = torch.ones(1, 1, 256, dtype=torch.float64)
    with torch.no_grad():
        twice, equal, wrong = models(signals, 0.5), models(signals[..., 1::2]), models(signals)
    assert (twice - equal).abs().max() < 0.05 * (wrong - equal).abs().max()


def test_trains_all_rules_and_tests_them_at_every_rate(run):
    printed = run("--discretization", "all", "--seeds", "1", "--results", "rates.json", "--plot", "rates.png")
    results = json.loads(Path("rates.json").read_text())
    assert [*results["rules"]] == [*sampling_rates.RULES] and len(sampling_rates.RULES) == 14
    for rule, entry in results["rules"].items():
        assert f"\n{rule} " in printed
        assert [*entry["accuracies"]] == [*sampling_rates.CONDITIONS] and entry["steps"] == 3 and entry["diverged"] == 0
        assert len(entry["reach"]) == 1 and entry["reach"][0] > 0
        assert all(len(shares) == 1 and 0 <= shares[0] <= 1 for shares in entry["accuracies"].values())
    assert Path("rates.png").read_bytes().startswith(b"\x89PNG") and results["settings"]["seeds"] == 1


def test_figure_is_legible():
    entry = {"accuracies": {name: [0.9, 0.8, 0.95] for name in sampling_rates.CONDITIONS}}
    results = {"settings": {"seeds": 3}, "rules": dict.fromkeys(sampling_rates.RULES, entry)}
    with matplotlib.style.context(training.STYLE):
        assert_legible(sampling_rates.figure_of(results))


def test_stopped_and_resumed_is_one_run(run, refuse):
    rules = ("--discretization", "zoh", "foh_ramp", "--seeds", "2")
    run(*rules, "--results", "whole.json")
    parts = (*rules, "--results", "parts.json", "--checkpoint", "run.pt")
    run(*parts, "--max-steps", "2")
    assert Path("run.zoh.pt").is_file() and Path("run.foh_ramp.pt").is_file()
    run(*parts, "--resume")
    whole, resumed = (json.loads(Path(name).read_text())["rules"] for name in ("whole.json", "parts.json"))
    for rule in ("zoh", "foh_ramp"):
        assert resumed[rule]["accuracies"] == whole[rule]["accuracies"] and resumed[rule]["steps"] == 3
        assert resumed[rule]["loss"] == pytest.approx(whole[rule]["loss"])
    # Rules in the results are not trained again, and need no checkpoints.
    changed = json.loads(Path("whole.json").read_text())
    changed["rules"]["zoh"]["accuracies"]["half"] = [0.25, 0.25]
    Path("whole.json").write_text(json.dumps(changed))
    assert re.search(r"\nzoh +25\.0 \+- 0\.0", run(*rules, "--results", "whole.json", "--resume"))
    assert "seeds 2, not 1" in refuse(*rules[:3], "--seeds", "1", "--results", "whole.json", "--resume")
    Path("whole.json").write_text("{}")
    assert "whole.json has no results" in refuse(*rules, "--results", "whole.json", "--resume")
    assert "exists" in refuse(*rules, "--results", "whole.json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epochs", "3"], ["--epochs", "no effect with --task signals"]),
        (["--model", "mingru"], ["--model", "no effect with --task signals"]),
        (["--seeds", "0"], ["--seeds"]),
        (["--task", "digits"], ["--steps", "no effect with --task digits"]),
        (["--resume"], ["--resume", "no checkpoint"]),
    ],
)
def test_bad_arguments(refuse, arguments, words):
    message = refuse(*arguments)
    assert all(word in message for word in words), message


@pytest.mark.cuda
def test_cuda_is_as_the_cpu(run):
    rules = ("--discretization", "zoh", "trapezoidal", "--seeds", "2")
    for device in ("cpu", "cuda"):
        run(*rules, "--results", f"{device}.json", "--device", device)
    on_cpu, on_cuda = (json.loads(Path(f"{device}.json").read_text())["rules"] for device in ("cpu", "cuda"))
    for rule, entry in on_cpu.items():
        assert on_cuda[rule]["loss"] == pytest.approx(entry["loss"], abs=1e-3)
