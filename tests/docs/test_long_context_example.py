"""``examples/long_context.py``, run as users run it."""

from __future__ import annotations

import json
import os
import signal
import socket

import pytest
import torch
from example_helpers import (
    LONG_CONTEXT,
    SHORT_LONG_CONTEXT,
    Example,
)
from forked_scripts import run_scripts


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
