"""The examples, run as users run them."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ssm_kernels

for package in ("sklearn", "tqdm", "matplotlib"):
    pytest.importorskip(package, reason=f"the examples need {package}, which is not installed")

import matplotlib.style  # noqa: E402
from plot_helpers import assert_legible  # noqa: E402

TRAIN = Path(__file__).parents[1] / "examples" / "train_sequence.py"
CHAR_LM = TRAIN.with_name("char_lm.py")
# As Python does for a script: the scripts import training.py, which is beside them.
sys.path.insert(0, str(TRAIN.parent))

import training  # noqa: E402

# 2 epochs of 13 steps.
SHORT = ["--epochs", "2", "--batch-size", "100", "--d-model", "8", "--n-layers", "1"]


# 4 steps of 3 sequences of 20 bytes, of this file.
SHORT_LM = ["--steps", "4", "--batch-size", "3", "--seqlen", "20", "--d-model", "16", "--n-layers", "1", "--sample", "30"]
SHORT_LM += ["--text", __file__]


def calls(script: Path, capsys):
    """Calls the script's ``main``, which is quicker than a process of its own; returns what it prints."""
    main, threads = runpy.run_path(str(script))["main"], torch.get_num_threads()

    def run(*arguments: str | Path) -> str:
        main([str(argument) for argument in arguments])
        return capsys.readouterr().out

    yield run
    torch.set_num_threads(threads)


def refusals(script: Path, run, capsys):
    """Calls ``run`` with arguments that it must refuse; returns what it then writes to stderr."""

    def refused(*arguments: str | Path) -> str:
        with pytest.raises(SystemExit) as stop:
            run(*arguments)
        assert stop.value.code
        # A message as the exit code is printed by the interpreter.
        message = capsys.readouterr().err + (f"{stop.value.code}\n" if isinstance(stop.value.code, str) else "")
        assert message.startswith(f"{script.name}: error: ") and message.index("\n") == len(message) - 1, message
        return message

    return refused


@pytest.fixture
def train(capsys):
    yield from calls(TRAIN, capsys)


@pytest.fixture
def mistake(train, capsys):
    return refusals(TRAIN, train, capsys)


@pytest.fixture
def char_lm(capsys):
    yield from calls(CHAR_LM, capsys)


@pytest.fixture
def mistake_of_char_lm(char_lm, capsys):
    return refusals(CHAR_LM, char_lm, capsys)


def read(checkpoint: Path) -> dict:
    return torch.load(checkpoint, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["", "mamba2", "mingru", "minlstm"])
def test_learns(model, tmp_path):
    """As a user runs it, in a process of its own."""
    arguments = ["--epochs=5", "--d-model=16", "--n-layers=1", "--lr=0.01", "--checkpoint=run.pt", "--plot=curve.png"]
    arguments += [f"--model={model}"] if model else []
    run = subprocess.run([sys.executable, TRAIN, *arguments], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    checkpoint = read(tmp_path / "run.pt")
    steps_per_epoch = 1347 // 16
    assert len(checkpoint["losses"]) == 5 * steps_per_epoch
    assert [step for step, _ in checkpoint["accuracies"]] == [epoch * steps_per_epoch for epoch in range(1, 6)]
    # Ten classes: chance is 10 %, and a loss of 2.30.
    assert checkpoint["accuracies"][-1][1] > 0.3
    assert sum(checkpoint["losses"][-10:]) / 10 < 2.0
    assert f"test accuracy: {100 * checkpoint['accuracies'][-1][1]:.1f} %" in run.stdout
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    described = f"{model or 'mamba'} (discretization zoh)" if model in ("", "mamba2") else model
    assert f" {described}\n" in run.stdout


@pytest.mark.parametrize("models", [("mamba",), ("mamba", "mamba2", "mingru", "minlstm")])
@pytest.mark.parametrize("steps", [3, 400])
def test_learning_curves_are_legible(models, steps):
    example = runpy.run_path(str(TRAIN))
    losses = [2.3 * 0.99**step for step in range(steps)]
    history = example["History"](losses, [(steps // 2, 0.5), (steps, 0.97)])
    with matplotlib.style.context(training.STYLE):
        assert_legible(example["learning_curves"](dict.fromkeys(models, history), f"digits: {', '.join(models)}"))


@pytest.mark.slow
def test_compares_models(tmp_path, train):
    """One after another, each as if it were alone, in one plot."""
    models, plot = ["mamba", "mamba2", "mingru", "minlstm"], tmp_path / "curves.png"
    together = train(*SHORT, "--max-steps", "3", "--model", *models, "--plot", plot)
    assert plot.read_bytes().startswith(b"\x89PNG") and f"learning curves: {plot}" in together
    found = re.findall(r"test accuracy: (.*) % after 3 steps .*, (\w+)(?: \(.*\))?\n", together)
    assert [name for _, name in found] == models
    for value, name in found:
        assert f"test accuracy: {value} %" in train(*SHORT, "--max-steps", "3", "--model", name)


@pytest.mark.slow
@pytest.mark.parametrize("stop, model", [(13, "mamba"), (17, "mamba"), (17, "mamba2"), (17, "mingru")])
def test_stopped_and_resumed_is_one_run(stop, model, tmp_path, train):
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    options = (*SHORT, "--model", model)
    expected = train(*options, "--checkpoint", whole)
    train(*options, "--checkpoint", parts, "--max-steps", stop)
    assert len(read(parts)["losses"]) == stop
    resumed = train(*options, "--checkpoint", parts, "--resume")
    assert re.search("test accuracy: .* %", resumed)[0] == re.search("test accuracy: .* %", expected)[0]
    a, b = read(whole), read(parts)
    assert a["losses"] == b["losses"] and len(a["losses"]) == 26
    assert a["accuracies"] == [entry for entry in b["accuracies"] if entry[0] % 13 == 0]
    torch.testing.assert_close(a["model"], b["model"], rtol=0, atol=0)


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("model", ["mamba", "mamba2", "mingru", "minlstm"])
def test_trains_on_cuda_as_on_the_cpu(model, tmp_path, train):
    """From the same weights on the same batches, stopped and resumed in between."""
    on_cpu, on_cuda = tmp_path / "cpu.pt", tmp_path / "cuda.pt"
    options = (*SHORT, "--model", model)
    train(*options, "--max-steps", "17", "--checkpoint", on_cpu)
    train(*options, "--max-steps", "9", "--checkpoint", on_cuda, "--device", "cuda")
    train(*options, "--max-steps", "17", "--checkpoint", on_cuda, "--device", "cuda", "--resume")
    assert read(on_cuda)["losses"] == pytest.approx(read(on_cpu)["losses"], abs=1e-2)


@pytest.mark.slow
def test_seed_model_and_discretization_decide_the_run(tmp_path, train):
    losses = {}
    for name, arguments in {
        "first": [],
        "again": [],
        "other seed": ["--seed", "1"],
        "other method": ["--discretization", "bilinear"],
        "other model": ["--model", "mingru"],
        "method of mamba2": ["--model", "mamba2", "--discretization", "foh"],
        "mamba2": ["--model", "mamba2"],
    }.items():
        train(*SHORT, "--max-steps", "3", "--checkpoint", tmp_path / "run.pt", *arguments)
        losses[name] = read(tmp_path / "run.pt")["losses"]
    assert losses["first"] == losses["again"]
    assert losses["first"] != losses["other seed"]
    assert losses["first"] != losses["other method"]
    assert losses["first"] != losses["other model"]
    assert losses["mamba2"] != losses["method of mamba2"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--discretization", "tustin"], ["tustin", *ssm_kernels.discretizations]),
        (["--model", "lstm"], ["--model", "lstm", "mamba", "mamba2", "mingru", "minlstm"]),
        (["--model", "mamba2", "--discretization", "bilinear"], ["--discretization", "bilinear", "zoh", "foh"]),
        (["--model", "mamba", "mingru", "--checkpoint", "run.pt"], ["--checkpoint", "mamba", "mingru"]),
        (["--epochs", "0"], ["--epochs", "0"]),
        (["--lr", "nan"], ["--lr", "nan"]),
        (["--lr", "-1"], ["--lr", "-1"]),
        (["--batch-size", "10000"], ["--batch-size", "10000", "1347"]),
        (["--device", "abacus"], ["--device", "abacus"]),
        (["--device", "meta"], ["--device", "meta"]),
        (["--seed", "-1"], ["--seed", "-1"]),
        (["--checkpoint", "."], ["--checkpoint", "cannot write"]),
        (["--plot", "curve.svg"], ["--plot", "curve.svg", ".png"]),
        (["--plot", "no/such/folder/curve.png"], ["--plot", "no/such/folder"]),
        (["--checkpoint", "no/such/folder/run.pt"], ["--checkpoint", "no/such/folder"]),
        (["--resume"], ["--resume", "--checkpoint"]),
        (["--resume", "--checkpoint", "missing.pt"], ["--resume", "missing.pt"]),
        (["--no-such-option"], ["--no-such-option"]),
    ],
)
def test_bad_arguments(arguments, words, mistake):
    message = mistake(*arguments)
    assert all(word in message for word in words), message


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu(mistake):
    assert "--device" in mistake("--device", "cuda")


def test_checkpoints_that_do_not_fit(tmp_path, train, mistake):
    checkpoint = tmp_path / "run.pt"
    train(*SHORT, "--lr", "0.003", "--checkpoint", checkpoint, "--max-steps", "2")
    resume = (*SHORT, "--checkpoint", checkpoint, "--resume")
    assert "lr 0.003, not 0.5" in mistake(*resume, "--lr", "0.5")
    assert "model mamba, not mingru" in mistake(*resume, "--lr", "0.003", "--model", "mingru")
    assert "2 steps already" in mistake(*resume, "--lr", "0.003", "--max-steps", "2")
    torch.save({"model": {}}, checkpoint)
    assert "run.pt is not a checkpoint" in mistake(*resume)
    for text in ("", "not a checkpoint"):
        checkpoint.write_text(text)
        assert "run.pt is not a checkpoint" in mistake(*resume)


@pytest.mark.parametrize(
    "script, package, install", [(TRAIN, "sklearn", "scikit-learn tqdm matplotlib"), (CHAR_LM, "tqdm", "tqdm matplotlib")]
)
def test_missing_packages(script, package, install):
    """Python with an import that fails: what the example says without scikit-learn, or without tqdm."""
    program = f"import sys, runpy; sys.modules[{package!r}] = None; sys.path.insert(0, {str(script.parent)!r})\n"
    program += f"runpy.run_path({str(script)!r}, run_name='__main__')"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert run.returncode == 1
    assert re.fullmatch(rf"{re.escape(script.name)}: error: .*{package}.*: pip install {install}\n", run.stderr)


# ----- char_lm.py


def test_char_lm_learns_and_writes(tmp_path):
    """As a user runs it, in a process of its own, on the text that it finds by itself."""
    arguments = ["--steps=40", "--d-model=32", "--batch-size=4", "--seqlen=64", "--sample=50", "--prompt=def "]
    arguments += ["--checkpoint=run.pt", "--plot=curve.png"]
    run = subprocess.run([sys.executable, CHAR_LM, *arguments], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    checkpoint = read(tmp_path / "run.pt")
    assert len(checkpoint["losses"]) == 40
    assert [step for step, _ in checkpoint["tests"]] == [*range(5, 41, 5)]
    # An untrained model of bytes has 8 bits.
    assert checkpoint["losses"][0] == pytest.approx(8, abs=0.2)
    assert checkpoint["tests"][-1][1] < 5.5 and sum(checkpoint["losses"][-5:]) / 5 < 5.5
    assert f"test loss: {checkpoint['tests'][-1][1]:.2f} bits per byte after 40 steps" in run.stdout
    assert "mamba (discretization zoh)\n" in run.stdout and (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    sample = run.stdout.partition("sample:\n")[2]
    assert sample.startswith("def ") and 20 <= len(sample.removesuffix("\n")) <= 54


@pytest.mark.parametrize("stop, model", [(1, "mamba"), (3, "mamba2"), (3, "mingru"), (2, "minlstm")])
def test_char_lm_stopped_and_resumed_is_one_run(stop, model, tmp_path, char_lm):
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    options = (*SHORT_LM, "--model", model)
    expected = char_lm(*options, "--checkpoint", whole)
    char_lm(*options, "--checkpoint", parts, "--max-steps", stop)
    assert len(read(parts)["losses"]) == stop
    resumed = char_lm(*options, "--checkpoint", parts, "--resume")
    assert resumed.partition("sample:")[2] == expected.partition("sample:")[2] != ""
    a, b = read(whole), read(parts)
    assert a["losses"] == b["losses"] and a["tests"] == b["tests"] and len(a["losses"]) == 4
    torch.testing.assert_close(a["model"], b["model"], rtol=0, atol=0)


def test_seed_model_and_discretization_decide_the_run_of_char_lm(tmp_path, char_lm):
    losses = []
    for arguments in ([], [], ["--seed", "1"], ["--discretization", "zoh_exact"], ["--model", "mamba2"], ["--model", "mingru"]):
        char_lm(*SHORT_LM, "--checkpoint", tmp_path / "run.pt", "--max-steps", "2", *arguments)
        losses.append(read(tmp_path / "run.pt")["losses"])
    first, again, *others = losses
    assert first == again
    assert all(other != first for other in others)


@pytest.mark.parametrize("steps", [1, 30, 800])
def test_curve_of_char_lm_is_legible(steps):
    example = runpy.run_path(str(CHAR_LM))
    history = example["History"]([8 * 0.99**step for step in range(steps)], [(max(1, steps // 2), 5.0), (steps, 2.31)])
    with matplotlib.style.context(training.STYLE):
        title = "mamba2 (discretization highorder) on Python's reference pages"
        assert_legible(example["learning_curve"](history, title))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--discretization", "tustin"], ["tustin", *ssm_kernels.discretizations]),
        (["--model", "lstm"], ["--model", "lstm", "mamba", "mamba2", "mingru", "minlstm"]),
        (["--model", "mamba2", "--discretization", "bilinear"], ["--discretization", "bilinear", "zoh", "foh"]),
        (["--steps", "0"], ["--steps", "0"]),
        (["--text", "no/such/file"], ["--text", "cannot read"]),
        (["--seqlen", "100000"], ["--seqlen 100000", "bytes are too few"]),
        (["--prompt", ""], ["--prompt"]),
        (["--device", "abacus"], ["--device", "abacus"]),
        (["--plot", "curve.svg"], ["--plot", "curve.svg", ".png"]),
        (["--checkpoint", "no/such/folder/run.pt"], ["--checkpoint", "no/such/folder"]),
        (["--resume"], ["--resume", "--checkpoint"]),
    ],
)
def test_bad_arguments_of_char_lm(arguments, words, mistake_of_char_lm):
    message = mistake_of_char_lm(*arguments)
    assert all(word in message for word in words), message


def test_checkpoints_that_do_not_fit_char_lm(tmp_path, char_lm, mistake_of_char_lm):
    checkpoint = tmp_path / "run.pt"
    char_lm(*SHORT_LM, "--checkpoint", checkpoint, "--max-steps", "2")
    resume = (*SHORT_LM, "--checkpoint", checkpoint, "--resume")
    assert "lr 0.006, not 0.5" in mistake_of_char_lm(*resume, "--lr", "0.5")
    assert "text " in mistake_of_char_lm(*resume, "--text", CHAR_LM)
    assert "2 steps already" in mistake_of_char_lm(*resume, "--max-steps", "2")
    checkpoint.write_text("")
    assert "run.pt is not a checkpoint" in mistake_of_char_lm(*resume)


@pytest.mark.cuda
@pytest.mark.parametrize("model", ["mamba", "mamba2", "mingru", "minlstm"])
def test_char_lm_on_cuda_is_as_on_the_cpu(model, tmp_path, char_lm):
    for device in ("cpu", "cuda"):
        printed = char_lm(*SHORT_LM, "--model", model, "--checkpoint", tmp_path / f"{device}.pt", "--device", device)
        assert "sample:" in printed
    assert read(tmp_path / "cuda.pt")["losses"] == pytest.approx(read(tmp_path / "cpu.pt")["losses"], abs=1e-2)
