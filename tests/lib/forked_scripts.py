"""Python scripts in forks of a process that has imported torch: a new interpreter takes seconds to import it.

Where there are GPUs, scripts have interpreters of their own, because forks cannot use them.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from process_pool import start_fork_server


def run_scripts(
    script: str | Path, *arguments: str, folder: Path, environments: Sequence[Mapping[str, str]]
) -> list[subprocess.CompletedProcess]:
    """Runs a script in ``folder``, once for each environment, all at the same time; waits for all."""
    command = [str(script), *arguments]
    with tempfile.TemporaryDirectory() as outputs:
        paths = [[f"{outputs}/{name}{i}" for name in ("out", "err")] for i in range(len(environments))]
        start = _start_interpreter if torch.cuda.is_available() else _start_fork
        processes = [
            start(command, str(folder), dict(environment), streams)
            for environment, streams in zip(environments, paths, strict=True)
        ]
        codes = [_wait(process) for process in processes]
        texts = [[Path(path).read_text() for path in streams] for streams in paths]
    return [subprocess.CompletedProcess(command, code, *text) for code, text in zip(codes, texts, strict=True)]


def _wait(process: BaseProcess | subprocess.Popen) -> int | None:
    """The exit status, after at most five minutes."""
    if isinstance(process, subprocess.Popen):
        try:
            return process.wait(300)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
    process.join(300)
    process.kill()
    process.join()
    return process.exitcode


def _start_interpreter(command: list[str], folder: str, environment: dict[str, str], streams: list[str]) -> subprocess.Popen:
    with open(streams[0], "w") as out, open(streams[1], "w") as err:
        return subprocess.Popen([sys.executable, *command], cwd=folder, env=environment, stdout=out, stderr=err)


def _start_fork(command: list[str], folder: str, environment: dict[str, str], streams: list[str]) -> BaseProcess:
    start_fork_server()
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=(command, folder, environment, streams))
    process.start()
    return process


def _run(command: list[str], folder: str, environment: dict[str, str], streams: list[str]) -> None:
    for number, path in enumerate(streams, start=1):
        # Descriptors, so that the programs that the script starts write there too.
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    # As for a new interpreter.
    sys.path[:0] = [str(Path(command[0]).resolve().parent), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    runpy.run_path(command[0], run_name="__main__")
