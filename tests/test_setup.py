"""setup.py in a copy of the sources, with a compiler that compiles an empty file in place of each source."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from build_helpers import ROOT

import build_backend

pytest.importorskip("setuptools", reason="setup.py needs setuptools")

# Logs when it starts and ends, and leaves other calls than compilations to the real compiler.
STUB = """#!{python}
import os, sys, time
arguments = sys.argv[1:]
if "-c" not in arguments:
    if {keep!r} is not None:
        arguments = [argument for argument in arguments if not argument.startswith({keep!r})]
    os.execvp({compiler[0]!r}, {compiler!r} + arguments)
sources = [argument for argument in arguments if argument.endswith(".cpp")]
log = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(log, f"+ {{' '.join(sources)}}\\n".encode())
time.sleep(0.3)
arguments = [argument for argument in arguments if argument not in sources and not argument.startswith("-I")]
status = os.spawnvp(os.P_WAIT, {compiler[0]!r}, {compiler!r} + arguments + ["-x", "c++", os.devnull])
os.write(log, f"- {{' '.join(sources)}}\\n".encode())
sys.exit(status)
"""


@pytest.fixture
def sources(tmp_path) -> Path:
    """A copy of what the build reads, in a folder whose name has a space."""
    folder = tmp_path / "my sources"
    (folder / "ssm_kernels").mkdir(parents=True)
    names = ("build_backend.py", "build_linking.py", "build_metadata.py", "pyproject.toml", "setup.py", "README.md", "LICENSE")
    for name in names:
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "csrc", folder / "csrc", ignore=shutil.ignore_patterns("*.cu", "*.cuh"))
    return folder


def make_stub(folder: Path, compiler: list[str], left_out: str | None = None) -> Path:
    path = folder / "stub"
    path.write_text(STUB.format(python=sys.executable, compiler=compiler, keep=left_out, log=str(folder / "log")))
    path.chmod(0o755)
    return path


def build(sources: Path, compiler: Path, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "CXX": str(compiler), "SSM_KERNELS_CUDA": "0", "CCACHE_DISABLE": "1", **environment}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    return subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("jobs", [1, 3])
def test_compilers_that_run_at_a_time_are_at_most_max_jobs(sources, tmp_path, jobs):
    result = build(sources, make_stub(tmp_path, ["c++"]), MAX_JOBS=str(jobs))
    assert result.returncode == 0, result.stdout + result.stderr
    events = [line.split(maxsplit=1) for line in (tmp_path / "log").read_text().splitlines()]
    running = [sum(1 if sign == "+" else -1 for sign, *_ in events[: i + 1]) for i in range(len(events))]
    assert max(running) == jobs and running[-1] == 0
    compiled = [Path(source).stem for sign, source in events if sign == "+"]
    units = [f"{name}_{number}" for name, count in build_backend.UNITS.items() for number in range(1, count + 1)]
    assert set(compiled) == set(units)
