"""The build backend as a module, the libraries and folders of the build, binutils, and Python in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ssm_kernels

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(ssm_kernels.__file__).parent
OPS = PACKAGE / "_ops.abi3.so"
MODULE = Path(sys.modules["ssm_kernels._C"].__file__)


def load_backend():
    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "build_backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_backend = load_backend()
Torch, Toolkit, CudaPlan = build_backend.Torch, build_backend.Toolkit, build_backend.CudaPlan


def run_python(*arguments, env=None, cwd=None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **(env or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )


def binutil(*command) -> str:
    """What a program of binutils prints; skips the test where there is none."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} (binutils) is not installed")
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


def exported_symbols(library: Path) -> list[str]:
    return [line.split()[-1].split("@")[0] for line in binutil("nm", "-D", "--defined-only", library).splitlines()]


def needed_libraries(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.*)\]", binutil("readelf", "-d", library))
