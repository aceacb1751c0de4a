"""Helpers and fixtures of the tests of profile_discretization.py: calls of the program, and files with signals."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from forked_scripts import run_scripts

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "profile_discretization.py"
SMALL = ["--device", "cpu", "--batch", "1", "--dim", "4", "--seqlen", "16", "--dstate", "4", "--n-trials", "3"]
ACCURACY_ONLY = ["--device", "cpu", "--dstate", "4", "--no-profile-ops", "--no-profile-scan"]


@pytest.fixture(scope="module")
def profiler() -> ModuleType:
    spec = importlib.util.spec_from_file_location("profile_discretization", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def measure(profiler, capsys):
    """Calls ``main`` and returns the JSON file that it writes."""

    def call(*arguments: str) -> dict:
        assert profiler.main([*arguments, "--json", "found.json"]) == 0, capsys.readouterr().err
        return json.loads(Path("found.json").read_text())

    return call


@pytest.fixture
def refuse(profiler, capsys):
    """Calls ``main``, which refuses the arguments in one line."""

    def call(arguments: list[str], says: str) -> None:
        assert profiler.main(arguments) == 2
        assert_one_line(capsys.readouterr().err, says)

    return call


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    if "cuda" in arguments:  # a fork cannot use GPUs
        command = [sys.executable, str(SCRIPT), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    (done,) = run_scripts(SCRIPT, *arguments, folder=Path.cwd(), environments=[environment])
    return done


def assert_one_line(stderr: str, says: str) -> None:
    lines = stderr.strip().splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("profile_discretization.py: error: ")
    assert says in lines[0]


def recorded(path: Path, samples: np.ndarray) -> Path:
    if path.suffix == ".npy":
        np.save(path, samples)
    elif path.suffix == ".csv":
        path.write_text("left,right\n" + "".join(f"{value},{value}\n" for value in samples))
    else:
        wavfile = pytest.importorskip("scipy.io.wavfile", reason="writes the WAV file")
        wavfile.write(path, 8000, np.round(2**14 * samples / np.abs(samples).max()).astype(np.int16))
    return path


def table(path: Path, heading: str, rows: np.ndarray, separator: str = ",", point: str = ".", quote: str = "") -> Path:
    lines = [separator.join(f"{quote}{value:.4f}{quote}".replace(".", point) for value in row) for row in rows]
    path.write_text("\n".join([*([heading] if heading else []), *lines]) + "\n")
    return path


TIMES = 2.0 + 0.25 * np.arange(30)
SIGNAL = np.cos(TIMES)
