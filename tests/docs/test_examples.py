"""The examples, run as users run them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import ssm_kernels

for package in ("sklearn", "tqdm", "matplotlib"):
    if importlib.util.find_spec(package) is None:  # found, not imported: every worker collects this file, and one runs it
        pytest.skip(f"the examples need {package}, which is not installed", allow_module_level=True)

import matplotlib.style  # noqa: E402
from forked_scripts import run_scripts  # noqa: E402
from plot_helpers import assert_legible  # noqa: E402

TRAIN = Path(__file__).parents[2] / "examples" / "train_sequence.py"
CHAR_LM = TRAIN.with_name("char_lm.py")
LONG_CONTEXT = TRAIN.with_name("long_context.py")
# As Python does for a script: the scripts import training.py, which is beside them.
sys.path.insert(0, str(TRAIN.parent))

import training  # noqa: E402

# 2 epochs of 13 steps.
SHORT = ["--epochs", "2", "--batch-size", "100", "--d-model", "8", "--n-layers", "1"]


# A file that does not change: two rules can give the same losses of a few steps.
TEXT = TRAIN.parents[1] / "LICENSE"
# 4 steps of 3 sequences of 20 bytes.
SHORT_LM = ["--steps", "4", "--batch-size", "3", "--seqlen", "20", "--d-model", "16", "--n-layers", "1", "--sample", "30"]
SHORT_LM += ["--text", str(TEXT)]
SHORT_LONG_CONTEXT = ["--steps=4", "--seqlen=50", "--d-model=16", "--n-layers=1", f"--text={TEXT}"]
SHORT_OF = {TRAIN: SHORT, CHAR_LM: SHORT_LM, LONG_CONTEXT: SHORT_LONG_CONTEXT}


class Example:
    """An example script. Tests call its ``main``, which is quicker than a process."""

    def __init__(self, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.script, self.short, self.capsys = script, SHORT_OF[script], capsys
        self.main = runpy.run_path(str(script))["main"]

    def run(self, *arguments: str | Path) -> str:
        """Returns what the example prints."""
        self.main([str(argument) for argument in arguments])
        return self.capsys.readouterr().out

    def refuse(self, *arguments: str | Path) -> str:
        """Returns the one line that the example writes to stderr when it refuses the arguments."""
        with pytest.raises(SystemExit) as stop:
            self.run(*arguments)
        assert stop.value.code
        # A message as the exit code is printed by the interpreter.
        message = self.capsys.readouterr().err + (f"{stop.value.code}\n" if isinstance(stop.value.code, str) else "")
        assert message.startswith(f"{self.script.name}: error: ") and message.index("\n") == len(message) - 1, message
        return message


@pytest.fixture
def example(request, capsys):
    threads = torch.get_num_threads()
    yield Example(request.param, capsys)
    torch.set_num_threads(threads)


def name_of(value: object) -> str | None:
    return value.stem if isinstance(value, Path) else None


each_example = pytest.mark.parametrize("example", [TRAIN, CHAR_LM], indirect=True, ids=name_of)
train = pytest.mark.parametrize("example", [TRAIN], indirect=True, ids=name_of)
char_lm = pytest.mark.parametrize("example", [CHAR_LM], indirect=True, ids=name_of)


def read(checkpoint: Path) -> dict:
    return torch.load(checkpoint, weights_only=True)


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


@pytest.fixture
def process_of_torchrun(monkeypatch):
    """Makes this process the only one of a run."""
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        environment["MASTER_PORT"] = str(free.getsockname()[1])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def long_context(capsys: pytest.CaptureFixture[str]) -> Example:
    return Example(LONG_CONTEXT, capsys)


@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)
def test_long_context_goes_on_with_another_number_of_processes(tmp_path, process_of_torchrun, capsys, monkeypatch):
    """Two processes, then one, are one process from the beginning."""
    options = SHORT_LONG_CONTEXT
    ranks = [{**os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"} for rank in "01"]  # as torchrun sets them
    arguments = (*options, "--checkpoint=parts", "--max-steps=2")
    runs = run_scripts(LONG_CONTEXT, *arguments, folder=tmp_path, environments=ranks)
    assert not any(run.returncode for run in runs), [run.stderr for run in runs]
    printed = "".join(run.stdout for run in runs)
    assert printed.count("after 2 steps") == 1 and "on 2 processes" in printed
    example, parts, whole, plot = long_context(capsys), tmp_path / "parts", tmp_path / "whole", tmp_path / "curve.png"
    # As a run leaves it that is killed before the new checkpoint takes the old one's place.
    parts.rename(tmp_path / "parts.old")
    (tmp_path / "parts.partial").mkdir()
    assert "after 4 steps" in example.run(*options, "--checkpoint", parts, "--resume", "--plot", plot)
    assert plot.read_bytes().startswith(b"\x89PNG")
    example.run(*options, "--checkpoint", whole)
    resumed, expected = (json.loads((folder / "history.json").read_text()) for folder in (parts, whole))
    assert resumed["losses"] == pytest.approx(expected["losses"], abs=1e-4) and len(expected["losses"]) == 4
    assert resumed["tests"][-1] == [4, pytest.approx(expected["tests"][-1][1], abs=1e-4)]
    assert [folder.name for folder in tmp_path.iterdir() if folder.is_dir()] in (["parts", "whole"], ["whole", "parts"])
    assert "after 4 steps" in example.run(*options, "--checkpoint", parts, "--resume")
    both = example.refuse(*options, "--checkpoint", parts)
    assert "--resume" in both and "--overwrite" in both and "--overwrite" in example.refuse(*options, "--plot", plot)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    assert "other files" in example.refuse(*options, "--checkpoint", tmp_path / "mine", "--overwrite")
    assert "lr 0.006, not 0.5" in example.refuse(*options, "--checkpoint", parts, "--resume", "--lr", "0.5")
    # As a run leaves it that is killed while the complete new checkpoint takes the old one's place.
    old = tmp_path / "parts.old"
    parts.rename(tmp_path / "parts.partial")
    old.mkdir()
    (old / "history.json").write_text(json.dumps(resumed | {"losses": resumed["losses"][:2]}))
    assert "after 4 steps" in example.run(*options, "--checkpoint", parts, "--resume")
    assert parts.is_dir() and old.is_dir() and not (tmp_path / "parts.partial").exists()
    (parts / "history.json").write_text("{}")
    assert "is not a checkpoint" in example.refuse(*options, "--checkpoint", parts, "--resume")

    longer = ["--steps=6", *options[1:], "--checkpoint", whole, "--resume"]
    batch = example.main.__globals__["training_batch"]

    def interrupt(*arguments):
        signal.raise_signal(signal.SIGINT)
        return batch(*arguments)

    monkeypatch.setitem(example.main.__globals__, "training_batch", interrupt)
    with pytest.raises(SystemExit) as stop:
        example.run(*longer)
    printed = capsys.readouterr().out
    assert stop.value.code == 130 and "stopped after 5 of 6 steps" in printed and f"--checkpoint {whole} --resume" in printed
    monkeypatch.setitem(example.main.__globals__, "training_batch", batch)
    assert "after 6 steps" in example.run(*longer)
    assert json.loads((whole / "history.json").read_text())["lengths"] == [[0, 4], [4, 6]]


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
    "arguments, words",
    [
        (["--device", "meta"], ["--device", "meta"]),
        (["--resume", "--checkpoint", "missing"], ["--resume", "missing"]),
        (["--seqlen", "1000000"], ["--seqlen 1000000", "bytes are too few"]),
        (["--steps", "0"], ["--steps", "0"]),
        (["--discretization", "bilinear"], ["--discretization", "bilinear", "zoh_exact"]),
        (["--device", "cuda"], ["--device cuda", "GPU for each process"]),
    ],
)
def test_bad_arguments_of_long_context(arguments, words, process_of_torchrun, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    message = long_context(capsys).refuse(*arguments)
    assert all(word in message for word in words), message


def test_long_context_needs_torchrun(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert "torchrun --nproc-per-node 2" in long_context(capsys).refuse()


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
