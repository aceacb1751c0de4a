#!/usr/bin/env python3
"""Installs the package in every supported way, each time from a fresh copy of the sources into fresh virtual environments.

    python scripts/check_build.py --list
    python scripts/check_build.py pip-with-torch uv-with-torch --torch 2.11.0
    python scripts/check_build.py --torch newest --json results.json

Each case must end with a package that imports, agrees with the reference, and reports what the case expects to have been
built; pip's own log must show that no other torch was fetched. For "no nvcc" CUDA_HOME names a folder without one. For "a torch
without CUDA" the script edits version file and headers of a CUDA build, because the package index has no CPU build for Linux on
x86-64.

A case takes minutes and up to 12 GB of temporary disk space.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from build_backend import has_nvidia_driver  # noqa: E402

BUILD_REQUIREMENTS = ["setuptools>=77,<82", "wheel", "ninja"]
NO_NVCC = {"CUDA_HOME": "/nonexistent"}
# CUDA kernels on every machine that can build them; without this variable, only on machines with an NVIDIA driver.
FORCE_CUDA = {"FORCE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0a"}

SMOKE_TEST = """
import json, torch, ssm_kernels
torch.manual_seed(0)
u, delta, A = torch.randn(2, 8, 33), torch.rand(2, 8, 33), -torch.rand(8, 4)
B, C = torch.randn(2, 4, 33), torch.randn(2, 4, 33)
for name in ssm_kernels.discretizations:
    out = ssm_kernels.selective_scan(u, delta, A, B, C, discretization=name)
    torch.testing.assert_close(out, ssm_kernels.reference.selective_scan(u, delta, A, B, C, discretization=name))
print(json.dumps({**ssm_kernels.build_info(), "running": torch.__version__, "file": ssm_kernels.__file__}))
"""

CASES: dict[str, tuple[str, Callable[[Session], None]]] = {}


def case(description: str):
    def register(function):
        CASES[function.__name__.replace("_", "-")] = (description, function)
        return function

    return register


class Failure(Exception):
    pass


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise Failure(message)


class Environment:
    """A virtual environment, used without activation, like by an IDE or a script."""

    def __init__(self, session: Session, name: str):
        self.session = session
        self.folder = session.folder / name
        session.run([session.python, "-m", "venv", self.folder])
        if session.upgrade_pip:
            session.run([self.folder / "bin" / "python", "-m", "pip", "install", "--upgrade", "pip"])
        self.python = self.folder / "bin" / "python"

    def pip(self, *arguments: str, env: dict[str, str] | None = None, check: bool = True) -> str:
        return self.session.run([self.folder / "bin" / "pip", *arguments], env=env, check=check)

    def install_torch(self) -> str:
        self.pip("install", self.session.torch_requirement, "numpy")
        return self.torch_version()

    def torch_version(self) -> str:
        return self.session.run([self.python, "-c", "import torch; print(torch.__version__)"]).split()[-1]

    def make_torch_cpu_only(self) -> None:
        script = "import torch; print(torch.__path__[0])"
        torch = Path(self.session.run([self.python, "-c", script]).split()[-1])
        version = torch / "version.py"
        text, count = re.subn(r"(?m)^cuda(: .*)? = .*$", "cuda = None", version.read_text())
        expect(count == 1, "torch/version.py has no line for cuda")
        version.write_text(text)
        for headers in ("c10/cuda", "ATen/cuda"):
            shutil.rmtree(torch / "include" / headers)

    def verify(self, cuda: bool, torch: str | None = None) -> dict:
        """Imports the package, compares it with the reference, and checks the build. ``torch``: the version that must be
        unchanged.
        """
        output = self.session.run([self.python, "-c", SMOKE_TEST], cwd=self.session.folder)
        info = json.loads(output.splitlines()[-1])
        expect(info["torch"] == info["running"], f"built with torch {info['torch']}, runs with {info['running']}")
        expect(torch in (None, info["running"]), f"expected torch {torch} to stay, got {info['running']}")
        expect((info["cuda"] is not None) == cuda, f"expected CUDA kernels: {cuda}, built with CUDA: {info['cuda']}")
        self.session.run([self.python, "-m", "ssm_kernels"], cwd=self.session.folder)
        self.session.info = info
        return info


class Session:
    """One case's temporary folder, copy of the sources and log."""

    def __init__(self, name: str, arguments: argparse.Namespace, folder: Path):
        self.folder = folder
        self.python = arguments.python
        self.upgrade_pip = arguments.upgrade_pip
        self.torch_requirement = "torch" if arguments.torch == "newest" else f"torch=={arguments.torch}"
        self.log = arguments.logs / f"{name}.log"
        self.log.write_text("")
        self.build_seconds = 0.0
        self.info: dict = {}
        self.source = folder / "source"
        names = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
        ).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).exists():
                (self.source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.source / name)

    def run(self, command, env: dict[str, str] | None = None, cwd: Path | None = None, check: bool = True) -> str:
        hidden = ("PYTHONPATH", "VIRTUAL_ENV", "SSM_KERNELS_CUDA", "FORCE_CUDA")
        environment = {k: v for k, v in os.environ.items() if k not in hidden} | (env or {})
        command = [str(part) for part in command]
        with self.log.open("a") as log:
            log.write(f"\n$ {' '.join(f'{k}={v}' for k, v in (env or {}).items())} {' '.join(command)}\n")
            log.flush()
            result = subprocess.run(
                command, env=environment, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            )
            log.write(result.stdout)
        if check and result.returncode:
            tail = "\n".join(result.stdout.splitlines()[-15:])
            raise Failure(f"exit code {result.returncode}: {' '.join(command[:6])}\n{tail}")
        return result.stdout

    def build(self, run: Callable[..., str], *arguments, env: dict[str, str] | None = None) -> str:
        """Runs the command that installs, and records its time."""
        start = time.monotonic()
        output = run(*arguments, env=env)
        self.build_seconds = time.monotonic() - start
        return output


def fetched_torch(log: str) -> bool:
    return re.search(r"(Downloading|Using cached|Collecting) torch[-=> ]", log) is not None


def install_in_place(session: Session, cuda: bool, env: dict[str, str] | None = None, cpu_torch: bool = False) -> Environment:
    environment = Environment(session, "venv")
    torch = environment.install_torch()
    if cpu_torch:
        environment.make_torch_cpu_only()
    log = session.build(environment.pip, "install", "-v", "-e", str(session.source), env=env)
    expect(not fetched_torch(log), "pip fetched another torch")
    environment.verify(cuda, torch)
    return environment


@case("(a) pip install -e . where torch is installed: CUDA kernels if there is a driver")
def pip_with_torch(session):
    install_in_place(session, cuda=has_nvidia_driver())


@case("(a) CUDA torch, nvcc, FORCE_CUDA=1: CUDA kernels, whether or not there is a driver")
def pip_forces_cuda(session):
    install_in_place(session, cuda=True, env=FORCE_CUDA)


@case("(a) CUDA torch, no nvcc, FORCE_CUDA=1: the compiler comes as Python packages")
def pip_fetches_nvcc(session):
    install_in_place(session, cuda=True, env=NO_NVCC | FORCE_CUDA)


@case("(a) torch without CUDA (simulated)")
def pip_cpu_torch(session):
    install_in_place(session, cuda=False, cpu_torch=True)


@case("(b) pip install -e . where there is no torch")
def pip_without_torch(session):
    environment = Environment(session, "venv")
    session.build(environment.pip, "install", "-v", "-e", str(session.source))
    environment.verify(cuda=has_nvidia_driver())


@case("(b) no torch, no nvcc, FORCE_CUDA=1: torch and the compiler that fits it")
def pip_without_torch_fetches_nvcc(session):
    environment = Environment(session, "venv")
    session.build(environment.pip, "install", "-v", "-e", str(session.source), env=NO_NVCC | FORCE_CUDA)
    environment.verify(cuda=True)


@case("(c) pip install --no-build-isolation -e .")
def no_build_isolation(session):
    environment = Environment(session, "venv")
    torch = environment.install_torch()
    environment.pip("install", *BUILD_REQUIREMENTS)
    install = ["install", "-v", "--no-build-isolation", "-e", str(session.source)]
    refused = environment.pip(*install, env=NO_NVCC | FORCE_CUDA, check=False)
    expect("FORCE_CUDA=1), but no nvcc was found" in refused, "expected the build without nvcc to say so")
    log = session.build(environment.pip, *install)
    expect(not fetched_torch(log), "pip fetched another torch")
    environment.verify(has_nvidia_driver(), torch)


def uv(session: Session, with_torch: bool, cuda: bool, env: dict[str, str] | None = None) -> None:
    tools = Environment(session, "uv")
    tools.pip("install", "uv")
    environment = Environment(session, "venv")
    torch = environment.install_torch() if with_torch else None
    command = [tools.folder / "bin" / "uv", "pip", "install", "-v", "--python", environment.python, "-e", session.source]
    session.build(session.run, command, env=env)
    environment.verify(cuda, torch)


@case("(d) uv pip install -e . where torch is installed")
def uv_with_torch(session):
    uv(session, with_torch=True, cuda=has_nvidia_driver())


@case("(d) uv pip install -e . where there is no torch")
def uv_without_torch(session):
    uv(session, with_torch=False, cuda=has_nvidia_driver())


@case("(d) uv, no nvcc, FORCE_CUDA=1: the compiler comes as Python packages")
def uv_fetches_nvcc(session):
    uv(session, with_torch=True, cuda=True, env=NO_NVCC | FORCE_CUDA)


@case("(e) pip wheel . --no-deps, installed in another environment with the same torch")
def wheel(session):
    builder = Environment(session, "builder")
    torch = builder.install_torch()
    wheels = session.folder / "wheels"
    session.build(builder.pip, "wheel", "-v", "--no-deps", "-w", str(wheels), str(session.source))
    (built,) = wheels.glob("*.whl")
    contents = session.run([builder.python, "-m", "zipfile", "-l", built])
    for name in (
        "ssm_kernels/_ops.abi3.so",
        "ssm_kernels/libssm_kernels_cpu.so",
        "ssm_kernels/_build_facts.py",
        "ssm_kernels/py.typed",
        "ssm_kernels/ops/ssd.pyi",
        "licenses/LICENSE",
    ):
        expect(name in contents, f"the wheel lacks {name}")
    expect("csrc/" not in contents and "tests/" not in contents, "the wheel has files besides the package")
    shutil.rmtree(builder.folder)
    shutil.rmtree(session.source)
    user = Environment(session, "venv")
    user.install_torch()
    user.pip("install", str(built))
    info = user.verify(has_nvidia_driver(), torch)
    expect(str(user.folder) in info["file"], f"imported from {info['file']}")


def run_case(name: str, arguments: argparse.Namespace) -> dict:
    result = {"case": name, "requested_torch": arguments.torch, "ok": False}
    with tempfile.TemporaryDirectory(prefix="ssm_kernels_build_", dir=arguments.folder) as folder:
        session = Session(name, arguments, Path(folder))
        try:
            CASES[name][1](session)
            result["ok"] = True
        except Failure as failure:
            result["error"] = str(failure)
    info = session.info
    return result | {
        "build_seconds": round(session.build_seconds, 1),
        "torch": info.get("torch"),
        "cuda": info.get("cuda"),
        "architectures": info.get("architectures"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="cases to run; all if none is named")
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    parser.add_argument("--torch", default="2.11.0", help="version installed first, or 'newest' (default: %(default)s)")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environments (default: this one)")
    parser.add_argument("--upgrade-pip", action="store_true", help="use the newest pip, not the one that came with Python")
    parser.add_argument("--folder", type=Path, help="where the temporary folders go (default: the system's)")
    parser.add_argument("--logs", type=Path, default=Path("build/check_build"), help="where the logs go (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.cases if name not in CASES]
    if unknown:
        parser.error(f"unknown case {', '.join(unknown)}; known: {', '.join(CASES)}")
    if arguments.list:
        for name, (description, _) in CASES.items():
            print(f"{name:<32} {description}")
        return 0
    arguments.logs.mkdir(parents=True, exist_ok=True)
    results = []
    for name in arguments.cases or CASES:
        result = run_case(name, arguments)
        results.append(result)
        built = f"torch {result['torch']}, CUDA {result['cuda']}, {result['build_seconds']} s"
        print(f"{'ok    ' if result['ok'] else 'FAILED'} {name:<32} {built if result['ok'] else result['error']}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
