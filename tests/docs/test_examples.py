"""The examples, run as users run them."""

# ruff: noqa: F811
from __future__ import annotations

import os
import re
import runpy
import sys
from itertools import pairwise

import pytest
import torch

import ssm_kernels

pytest.importorskip("matplotlib", reason="the examples draw with matplotlib")

import matplotlib.style
from example_helpers import (
    CHAR_LM,
    SHORT,
    SHORT_LM,
    TEXT,
    TRAIN,
    char_lm,
    each_example,
    example,  # noqa: F401
    name_of,
    read,
    train,
    training,
)
from forked_scripts import run_scripts
from plot_helpers import assert_legible


@pytest.mark.slow
@pytest.mark.parametrize("model", ["", "mamba2", "mingru", "minlstm"])
@train
def test_learns(example, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--epochs=3", "--d-model=16", "--n-layers=1", "--lr=0.01", "--checkpoint=run.pt", "--plot=curve.png"]
    printed = example.run(*arguments, *([f"--model={model}"] if model else []))
    checkpoint = read(tmp_path / "run.pt")
    steps_per_epoch = 1347 // 16
    assert len(checkpoint["losses"]) == 3 * steps_per_epoch
    assert [step for step, _ in checkpoint["accuracies"]] == [epoch * steps_per_epoch for epoch in range(1, 4)]
    # Ten classes: chance is 10 %, and a loss of 2.30.
    assert checkpoint["accuracies"][-1][1] > 0.3
    assert sum(checkpoint["losses"][-10:]) / 10 < 2.0
    assert f"test accuracy: {100 * checkpoint['accuracies'][-1][1]:.1f} %" in printed
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    described = f"{model or 'mamba'} (discretization zoh)" if model in ("", "mamba2") else model
    assert f" {described}\n" in printed


@pytest.mark.parametrize("models", [("mamba",), ("mamba", "mamba2", "mingru", "minlstm")])
@pytest.mark.parametrize("steps", [3, 400])
def test_learning_curves_are_legible(models, steps):
    example = runpy.run_path(str(TRAIN))
    losses = [2.3 * 0.99**step for step in range(steps)]
    history = example["History"](losses, [(steps // 2, 0.5), (steps, 0.97)])
    with matplotlib.style.context(training.STYLE):
        assert_legible(example["learning_curves"](dict.fromkeys(models, history), f"digits: {', '.join(models)}"))


def test_char_lm_learns_and_writes(tmp_path):
    """Runs the example as a script, in its own process, on the text that it finds by default."""
    arguments = ["--steps=40", "--d-model=32", "--batch-size=4", "--seqlen=64", "--sample=50", "--prompt=def "]
    arguments += ["--checkpoint=run.pt", "--plot=curve.png"]
    (run,) = run_scripts(CHAR_LM, *arguments, folder=tmp_path, environments=[dict(os.environ)])
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


@pytest.mark.parametrize("steps", [1, 30, 800])
def test_curve_of_char_lm_is_legible(steps):
    example = runpy.run_path(str(CHAR_LM))
    history = example["History"]([8 * 0.99**step for step in range(steps)], [(max(1, steps // 2), 5.0), (steps, 2.31)])
    with matplotlib.style.context(training.STYLE):
        title = "mamba2 (discretization highorder) on Python's reference pages"
        assert_legible(example["learning_curve"](history, title))


@pytest.mark.slow
@train
def test_compares_models(tmp_path, example):
    """One after another, each as if it were alone, in one plot."""
    models, plot = ["mamba", "mamba2", "mingru", "minlstm"], tmp_path / "curves.png"
    together = example.run(*SHORT, "--max-steps", "3", "--model", *models, "--plot", plot)
    assert plot.read_bytes().startswith(b"\x89PNG") and f"learning curves: {plot}" in together
    found = re.findall(r"test accuracy: (.*) % after 3 steps .*, (\w+)(?: \(.*\))?\n", together)
    assert [name for _, name in found] == models
    for value, name in found:
        assert f"test accuracy: {value} %" in example.run(*SHORT, "--max-steps", "3", "--model", name)


@pytest.mark.parametrize(
    "example, stop, model",
    [
        *(
            pytest.param(TRAIN, *case, marks=pytest.mark.slow)
            for case in ((13, "mamba"), (17, "mamba"), (17, "mamba2"), (17, "mingru"))
        ),
        *(
            (CHAR_LM, *case)
            for case in (
                (1, "mamba"),
                (3, "mamba2"),
                (2, "mamba3"),
                (1, "gated_deltanet"),
                (1, "mlstm"),
                (3, "mingru"),
                (2, "minlstm"),
            )
        ),
    ],
    indirect=["example"],
    ids=name_of,
)
def test_stopped_and_resumed_is_one_run(example, stop, model, tmp_path):
    # The last lines of the output; the checkpoint's evaluations, which come every so many steps and at the stop; the steps.
    pattern, evaluations, every, steps = {
        TRAIN: (r"test accuracy: .* %", "accuracies", 13, 26),
        CHAR_LM: (r"(?s)sample:.*", "tests", 1, 4),
    }[example.script]
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    options = (*example.short, "--model", model)
    expected = example.run(*options, "--checkpoint", whole)
    example.run(*options, "--checkpoint", parts, "--max-steps", stop)
    assert len(read(parts)["losses"]) == stop
    resumed = example.run(*options, "--checkpoint", parts, "--resume")
    assert re.search(pattern, resumed)[0] == re.search(pattern, expected)[0]
    a, b = read(whole), read(parts)
    assert a["losses"] == b["losses"] and len(a["losses"]) == steps
    assert a[evaluations] == [entry for entry in b[evaluations] if entry[0] % every == 0]
    torch.testing.assert_close(a["model"], b["model"], rtol=0, atol=0)


@pytest.mark.cuda
@pytest.mark.slow
@train
@pytest.mark.parametrize("model", ["mamba", "mamba2", "mingru", "minlstm"])
def test_trains_on_cuda_as_on_the_cpu(model, tmp_path, example):
    """From the same weights on the same batches, stopped and resumed in between."""
    on_cpu, on_cuda = tmp_path / "cpu.pt", tmp_path / "cuda.pt"
    options = (*SHORT, "--model", model)
    example.run(*options, "--max-steps", "17", "--checkpoint", on_cpu)
    example.run(*options, "--max-steps", "9", "--checkpoint", on_cuda, "--device", "cuda")
    example.run(*options, "--max-steps", "17", "--checkpoint", on_cuda, "--device", "cuda", "--resume")
    assert read(on_cuda)["losses"] == pytest.approx(read(on_cpu)["losses"], abs=1e-2)


@pytest.mark.cuda
@char_lm
@pytest.mark.parametrize("model", ["mamba", "mamba2", "mamba3", "gated_deltanet", "mlstm", "mingru", "minlstm"])
def test_char_lm_on_cuda_is_as_on_the_cpu(model, tmp_path, example):
    for device in ("cpu", "cuda"):
        printed = example.run(*SHORT_LM, "--model", model, "--checkpoint", tmp_path / f"{device}.pt", "--device", device)
        assert "sample:" in printed
    assert read(tmp_path / "cuda.pt")["losses"] == pytest.approx(read(tmp_path / "cpu.pt")["losses"], abs=1e-2)


@pytest.mark.parametrize(
    "example, steps", [pytest.param(TRAIN, 3, marks=pytest.mark.slow), (CHAR_LM, 2)], indirect=["example"], ids=name_of
)
def test_seed_model_and_discretization_decide_the_run(example, steps, tmp_path):
    def losses(*arguments: str) -> list[float]:
        example.run(*example.short, "--max-steps", steps, "--checkpoint", tmp_path / "run.pt", "--overwrite", *arguments)
        return read(tmp_path / "run.pt")["losses"]

    first, mamba2 = losses(), losses("--model", "mamba2")
    assert first == losses()
    for others in (["--seed", "1"], ["--discretization", "bilinear"], ["--discretization", "zoh_exact"], ["--model", "mingru"]):
        assert losses(*others) != first
    exact = losses("--model", "mamba2", "--discretization", "zoh_exact")
    assert first != mamba2 != exact == losses("--model", "mamba2", "--discretization", "foh")


# Options of both examples.
BAD_ARGUMENTS = [
    (["--discretization", "tustin"], ["tustin", *ssm_kernels.discretizations]),
    (["--model", "lstm"], ["--model", "lstm", "mamba", "mamba2", "mingru", "minlstm"]),
    (["--model", "mamba2", "--discretization", "bilinear"], ["--discretization", "bilinear", "zoh", "zoh_exact"]),
    (["--lr", "nan"], ["--lr", "nan"]),
    (["--lr", "-1"], ["--lr", "-1"]),
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
]


@pytest.mark.parametrize(
    "example, arguments, words",
    [
        *((script, *case) for script in (TRAIN, CHAR_LM) for case in BAD_ARGUMENTS),
        *(
            (script, ["--discretization", "rk4", "--model", model], ["--discretization", model, "--model mamba"])
            for script in (TRAIN, CHAR_LM)
            for model in ("mingru", "minlstm")
        ),
        (CHAR_LM, ["--sample", "0", "--top-p", "0.5"], ["--top-p", "no effect with --sample 0"]),
        (CHAR_LM, ["--temperature", "0", "--top-p", "0.5"], ["--top-p", "no effect with --temperature 0"]),
        (TRAIN, ["--epochs", "0"], ["--epochs", "0"]),
        (TRAIN, ["--batch-size", "10000"], ["--batch-size", "10000", "1347"]),
        (CHAR_LM, ["--steps", "0"], ["--steps", "0"]),
        (CHAR_LM, ["--text", "no/such/file"], ["--text", "cannot read"]),
        (CHAR_LM, ["--seqlen", "100000"], ["--seqlen 100000", "bytes are too few"]),
        (CHAR_LM, ["--prompt", ""], ["--prompt"]),
    ],
    indirect=["example"],
    ids=name_of,
)
def test_bad_arguments(example, arguments, words):
    message = example.refuse(*arguments)
    assert all(word in message for word in words), message


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@each_example
def test_no_gpu(example):
    assert "--device" in example.refuse("--device", "cuda")


@each_example
def test_checkpoints_that_do_not_fit(example, tmp_path):
    checkpoint = tmp_path / "run.pt"
    options = (*example.short, "--lr", "0.003", "--checkpoint", checkpoint)
    example.run(*options, "--max-steps", "2")
    assert "lr 0.003, not 0.5" in example.refuse(*options, "--resume", "--lr", "0.5")
    assert "model mamba, not mingru" in example.refuse(*options, "--resume", "--model", "mingru")
    assert "after 2 steps" in example.run(*options, "--resume", "--max-steps", "2")
    shorter = {TRAIN: ("--epochs", "1"), CHAR_LM: ("--steps", "3")}[example.script]
    assert "--max-steps stops a run early" in example.refuse(*options, *shorter, "--resume")
    if example.script == CHAR_LM:
        assert "text " in example.refuse(*options, "--resume", "--text", CHAR_LM)
    torch.save({"model": {}}, checkpoint)
    assert "run.pt is not a checkpoint" in example.refuse(*options, "--resume")
    for text in ("", "not a checkpoint"):
        checkpoint.write_text(text)
        assert "run.pt is not a checkpoint" in example.refuse(*options, "--resume")


@each_example
def test_nothing_is_overwritten_without_the_option(example, tmp_path):
    checkpoint, plot = tmp_path / "run.pt", tmp_path / "curve.png"
    options = (*example.short, "--max-steps", "1")
    example.run(*options, "--checkpoint", checkpoint, "--plot", plot)
    files = checkpoint.read_bytes(), plot.read_bytes()
    message = example.refuse(*options, "--checkpoint", checkpoint)
    assert "run.pt exists" in message and "--resume" in message and "--overwrite" in message
    outputs = ["--plot", *(["--sample-file"] if example.script == CHAR_LM else [])]
    for option in outputs:
        assert "--overwrite" in example.refuse(*options, option, plot)
        assert "--overwrite" in example.refuse(*options, option, plot, "--checkpoint", checkpoint, "--resume")
    assert files == (checkpoint.read_bytes(), plot.read_bytes())
    if example.script == CHAR_LM:
        book = tmp_path / "book.txt"
        book.write_bytes(TEXT.read_bytes())
        message = example.refuse(*options, "--text", book, "--sample-file", book, "--overwrite")
        assert "--sample-file, --text: expected different files" in message
    example.run(*options, "--checkpoint", checkpoint, "--plot", plot, "--overwrite", "--seed", "1")
    assert checkpoint.read_bytes() != files[0]


@each_example
def test_finished_run_is_lengthened(example, tmp_path):
    """Stopped after the lengthening or not: the same bits, and a learning rate without jumps."""
    option, length, stop = {TRAIN: ("--epochs", "3", 30), CHAR_LM: ("--steps", "8", 6)}[example.script]
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    for path in (a, b):
        example.run(*example.short, "--checkpoint", path)
    done = len(read(a)["losses"])
    longer = (*example.short, option, length, "--resume", "--checkpoint")
    example.run(*longer, a)
    for stops in (["--max-steps", stop], []):
        example.run(*longer, b, *stops)
    assert len(read(a)["losses"]) > done and read(a)["losses"] == read(b)["losses"]
    torch.testing.assert_close(read(a)["model"], read(b)["model"], rtol=0, atol=0)
    rate = training.LearningRate(1000, 0.1)
    before = [rate(step) for step in range(1001)]
    rate.lengths.append([1000, 2000])
    rates = [*before[:1000], *(rate(step) for step in range(1000, 2001))]
    assert before[:1000] == rates[:1000] and rates[-1] == pytest.approx(0.1)
    assert max(abs(y - x) for x, y in pairwise(rates)) < 0.025
    assert max(rates[1000:]) == pytest.approx(training.LearningRate(2000, 0.1)(1049))


def test_samples_for_the_terminal_have_no_control_characters():
    printable = runpy.run_path(str(CHAR_LM))["printable"]
    assert printable(b"a\tb\n\x1b[31m\x07\r\x7f \xe2\x80\xae\xc2\x9b \xc3\xa9") == "a\tb\n\\x1b[31m\\x07\\r\\x7f \\u202e\\x9b é"


@pytest.mark.parametrize(
    "script, package, install", [(TRAIN, "sklearn", "scikit-learn tqdm matplotlib"), (CHAR_LM, "tqdm", "tqdm matplotlib")]
)
def test_missing_packages(script, package, install, monkeypatch):
    """An import that fails, for the example's message without scikit-learn or tqdm, which the interpreter prints."""
    for name in [name for name in sys.modules if name == "training" or name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")
    assert re.fullmatch(rf"{re.escape(script.name)}: error: .*{package}.*: pip install {install}", stop.value.code)
