"""Builds in seconds: setup.py in a copy of the sources, where a stub of the compiler compiles empty files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from build_helpers import FACTS, OPS, ROOT

BUILD_FILES = ("build_backend.py", "build_kernels.py", "build_linking.py", "build_metadata.py", "pyproject.toml", "setup.py")
DOCUMENTS = ("README.md", "LICENSE", "MANIFEST.in")

# Logs when a compilation starts and ends. Other calls go to the real compiler, except for a link that a copy replaces.
STUB = """#!{python}
import os, shutil, sys, time
arguments = sys.argv[1:]
if "-shared" in arguments and {library!r} is not None:
    target = arguments[arguments.index("-o") + 1]
    beside = os.path.join(os.path.dirname({library!r}), os.path.basename(target))
    shutil.copy(beside if os.path.exists(beside) else {library!r}, target)
    sys.exit()
if "-c" not in arguments:
    os.execvp({compiler!r}, [{compiler!r}, *arguments])
sources = [argument for argument in arguments if argument.endswith(".cpp")]
log = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(log, f"+ {{' '.join(sources)}}\\n".encode())
time.sleep({seconds})
arguments = [argument for argument in arguments if argument not in sources and not argument.startswith("-I")]
status = os.spawnvp(os.P_WAIT, {compiler!r}, [{compiler!r}, *arguments, "-x", "c++", os.devnull])
os.write(log, f"- {{' '.join(sources)}}\\n".encode())
sys.exit(status)
"""


def copy_sources(folder: Path) -> Path:
    """Copies what a build reads, without CUDA sources and without what is built."""
    folder.mkdir(parents=True)
    for name in (*BUILD_FILES, *DOCUMENTS):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "csrc", folder / "csrc", ignore=shutil.ignore_patterns("*.cu", "*.cuh"))
    built = shutil.ignore_patterns("*.so", FACTS.name, "__pycache__")
    shutil.copytree(ROOT / "ssm_kernels", folder / "ssm_kernels", ignore=built)
    return folder


def make_stub(folder: Path, *, compiler: str = "c++", library: Path | None = OPS, seconds: float = 0) -> Path:
    """Writes the stub into ``folder``; its log is ``folder/log``.

    Args:
        compiler: the compiler that probes and links.
        library: what is copied in place of a link, or the file beside it of the linked one's name; None: link.
        seconds: how long a compilation takes at least.
    """
    path = folder / "stub"
    library_name = None if library is None else str(library)
    log = str(folder / "log")
    path.write_text(STUB.format(python=sys.executable, compiler=compiler, library=library_name, log=log, seconds=seconds))
    path.chmod(0o755)
    return path


def build_environment(stub: Path, **variables: str) -> dict[str, str]:
    ours = {"CXX": str(stub), "SSM_KERNELS_CUDA": "0", "CCACHE_DISABLE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {**os.environ, **ours, **variables}


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(list(map(str, command)), env=env, cwd=cwd, capture_output=True, text=True, timeout=300)
