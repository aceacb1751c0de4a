"""The libraries and folders of the build, binutils, programs of nvcc, and Python in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import build_backend
import ssm_kernels

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(ssm_kernels.__file__).parent
OPS = PACKAGE / "_ops.abi3.so"
CPU_LIBRARY, CUDA_LIBRARY = PACKAGE / "libssm_kernels_cpu.so", PACKAGE / "libssm_kernels_cuda.so"
# The kernel libraries that were built, and all libraries.
KERNEL_LIBRARIES = [CPU_LIBRARY, *([CUDA_LIBRARY] if ssm_kernels.build_info()["cuda"] is not None else [])]
LIBRARIES = [OPS, *KERNEL_LIBRARIES]
FACTS = PACKAGE / "_build_facts.py"


def run_python(*arguments, env=None, cwd=None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **(env or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )


def skip_without_build_requirements() -> None:
    """Skips a test or a module where setup.py cannot build: a fresh environment has an older setuptools, or none."""
    pytest.importorskip("setuptools", minversion="77", reason="setup.py needs setuptools>=77")
    for program in ("ninja", "c++"):
        if shutil.which(program, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") is None:
            pytest.skip(f"{program} is not installed", allow_module_level=True)


def binutil(*command) -> str:
    """Returns what a program of binutils prints; skips the test where the program is not installed."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} (binutils) is not installed")
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


def exported_symbols(library: Path) -> list[str]:
    return [line.split()[-1].split("@")[0] for line in binutil("nm", "-D", "--defined-only", library).splitlines()]


def needed_libraries(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.*)\]", binutil("readelf", "-d", library))


def compile_program(name: str, folder: Path) -> Path:
    """Compiles ``tests/lib/<name>.cu`` to a host program in ``folder``. Without nvcc it skips the test."""
    toolkit = build_backend.find_toolkit([])
    if toolkit is None:
        pytest.skip("no nvcc was found")
    target, source = folder / name, ROOT / "tests" / "lib" / f"{name}.cu"
    command = [toolkit.home / "bin" / "nvcc", "-std=c++17", "-O1", f"-I{ROOT / 'csrc'}", "-arch=sm_80", source, "-o", target]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return target
