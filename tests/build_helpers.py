"""The build backend as a module, the folders of the build, and Python in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import ssm_kernels

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(ssm_kernels.__file__).parent


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
