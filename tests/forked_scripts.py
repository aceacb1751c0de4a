"""Python scripts in forks of a process that has imported torch: a new interpreter takes seconds to import it."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from process_pool import PRELOADED


def run_scripts(
    script: str | Path, *arguments: str, folder: Path, environments: Sequence[Mapping[str, str]]
) -> list[subprocess.CompletedProcess]:
    """Runs a script in ``folder``, once for each environment, all at the same time; waits for all."""
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as outputs:
        paths = [[f"{outputs}/{name}{i}" for name in ("out", "err")] for i in range(len(environments))]
        command = [str(script), *arguments]
        processes = [
            context.Process(target=_run, args=(command, str(folder), dict(environment), streams))
            for environment, streams in zip(environments, paths, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
            process.kill()
            process.join()
        texts = [[Path(path).read_text() for path in streams] for streams in paths]
    return [
        subprocess.CompletedProcess(command, process.exitcode, *text) for process, text in zip(processes, texts, strict=True)
    ]


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
