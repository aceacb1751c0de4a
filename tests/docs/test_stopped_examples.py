"""The examples, stopped with Ctrl-C."""

# ruff: noqa: F811
from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from example_helpers import (
    CHAR_LM,
    LONG_CONTEXT,
    TRAIN,
    Example,
    each_example,
    example,  # noqa: F401
    name_of,
    read,
    train,
    training,
)


@each_example
def test_ctrl_c_saves_and_names_the_command(example, tmp_path, capsys, monkeypatch):
    """Pressed in the second step, with and without a checkpoint: the command that is printed gives the uninterrupted run."""
    monkeypatch.chdir(tmp_path)
    plot = ["--plot", "a curve.png"]
    expected = example.run(*example.short, "--checkpoint", "whole.pt")
    measured = training.nn.utils.clip_grad_norm_
    for given in ([], ["--checkpoint", "run.pt"]):
        steps = []

        def press(*arguments, steps=steps):
            steps.append(1)
            if len(steps) == 2:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            return measured(*arguments)

        monkeypatch.setattr(training.nn.utils, "clip_grad_norm_", press)
        with pytest.raises(SystemExit) as stop:
            example.run(*example.short, *plot, *given)
        monkeypatch.setattr(training.nn.utils, "clip_grad_norm_", measured)
        printed = capsys.readouterr().out
        assert stop.value.code == 130 and "stopped after 2 of" in printed and not Path("a curve.png").exists()
        words = shlex.split(printed.splitlines()[-1])
        assert words[:2] == ["python", str(example.script)] and "'a curve.png'" in printed
        resumed = example.run(*words[2:])
        pattern = r"test accuracy: .* %|(?s:sample:.*)"
        assert re.search(pattern, resumed)[0] == re.search(pattern, expected)[0]
        whole, parts = read(Path("whole.pt")), read(Path(words[words.index("--checkpoint") + 1]))
        assert whole["losses"] == parts["losses"]
        torch.testing.assert_close(whole["model"], parts["model"], rtol=0, atol=0)
        Path("a curve.png").unlink()


@pytest.fixture
def stopped(tmp_path, capsys, monkeypatch):
    """Runs an example with Ctrl-C in a call of one of a module's functions; returns the last line that is printed."""

    def run(example: Example, module: object, function: str, *arguments: str | Path) -> str:
        original = getattr(module, function)

        def press(*args):
            monkeypatch.setattr(module, function, original)
            signal.raise_signal(signal.SIGINT)
            return original(*args)

        monkeypatch.setattr(module, function, press)
        with pytest.raises(SystemExit) as stop:
            example.run(*arguments)
        assert stop.value.code == 130
        return capsys.readouterr().out.splitlines()[-1]

    monkeypatch.chdir(tmp_path)
    return run


@each_example
def test_ctrl_c_before_the_first_test_or_after_the_plot(example, stopped, monkeypatch):
    """A run without a test is tested before its result is printed; the command to resume replaces the plot it has drawn."""
    options = (*example.short, "--checkpoint", "run.pt")
    if example.script == CHAR_LM:
        options = (*options, "--steps", "30")  # a test after 3 steps
    stopped(example, training.nn.utils, "clip_grad_norm_", *options)
    assert len(read(Path("run.pt"))["losses"]) == 1
    assert "after 1 steps" in example.run(*options, "--resume", "--max-steps", "1")
    stopped(example, training.nn.utils, "clip_grad_norm_", *options, "--resume")
    assert "2 steps already" in example.refuse(*options, "--resume", "--max-steps", "1")
    draw = training.save_figure
    monkeypatch.setattr(training, "save_figure", lambda *args: (draw(*args), signal.raise_signal(signal.SIGINT)))
    with pytest.raises(SystemExit):
        example.run(*options, "--resume", "--plot", "curve.png")
    command = shlex.split(example.capsys.readouterr().out.splitlines()[-1])
    monkeypatch.setattr(training, "save_figure", draw)
    assert "learning curve: curve.png" in example.run(*command[2:])


@train
def test_overwritten_comparison_resumes_without_older_checkpoints(example, stopped):
    options = (*example.short, "--max-steps", "1", "--model", "mingru", "minlstm", "--checkpoint", "run.pt")
    example.run(*options)
    command = stopped(example, training.nn.utils, "clip_grad_norm_", *options, "--overwrite", "--lr", "0.01")
    example.run(*shlex.split(command)[2:])
    assert {read(Path(f"run.{model}.pt"))["run"]["lr"] for model in ("mingru", "minlstm")} == {0.01}


@pytest.mark.parametrize("script", [TRAIN, CHAR_LM, LONG_CONTEXT], ids=name_of)
def test_ctrl_c_while_packages_load_has_no_traceback(script, tmp_path):
    (tmp_path / "torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, env=environment)
    assert run.returncode == -signal.SIGINT and run.stderr == run.stdout == ""


@train
def test_ctrl_c_saves_finished_runs_too(example, tmp_path, capsys, monkeypatch):
    """Pressed in the second of three runs: the command continues that one and trains the third."""
    monkeypatch.chdir(tmp_path)
    options = [*example.short, "--epochs", "1", "--discretization", "zoh", "euler", "bilinear"]
    expected = example.run(*options)
    indices = example.main.__globals__["batch_indices"]
    steps = []

    def press(*arguments):
        steps.append(1)
        if len(steps) == 15:
            signal.raise_signal(signal.SIGINT)
        return indices(*arguments)

    monkeypatch.setitem(example.main.__globals__, "batch_indices", press)
    with pytest.raises(SystemExit):
        example.run(*options)
    *_, message, command = capsys.readouterr().out.splitlines()
    files = [f"train_sequence-stopped.mamba-{rule}.pt" for rule in ("zoh", "euler")]
    assert f", saved in {', '.join(files)}; continue with" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
    resumed = example.run(*shlex.split(command)[2:])
    assert len(steps) == 15 + 11 + 13

    def table(printed: str) -> list[list[str]]:
        return [line.split()[:-1] for line in printed.splitlines()[-3:]]

    assert table(resumed) == table(expected) and [row[0] for row in table(resumed)] == ["zoh", "euler", "bilinear"]


def test_ctrl_c_where_nothing_can_be_written_says_so(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop, training.Session("script.py", []) as session:
        session.saves["mingru"] = lambda path: torch.save({}, path / "absent")
        session.progress = "after 3 of 4 steps"
        raise KeyboardInterrupt
    assert "error: stopped after 3 of 4 steps, but cannot write script-stopped.mingru.pt: " in stop.value.code
