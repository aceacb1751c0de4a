"""PEP 517 backend: setuptools, with the torch of the environment that the package is installed into.

Build isolation hides that environment, so a plain setuptools backend would fetch the newest torch and build against the wrong
one. pip isolates by setting PYTHONPATH for the same interpreter: a child process without it sees the environment, and its paths
are appended here. uv isolates with another interpreter; there ``[tool.uv] extra-build-dependencies`` in pyproject.toml brings
the right torch. Only if neither has one is torch a build requirement.

The first half holds the decisions that setup.py shares: which compilers there are, whether CUDA kernels are built, which
files are compiled together, and what stops the build with one message.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

TORCH_REQUIREMENT = "torch>=2.11"
TOOLKIT_REQUIREMENT = "cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]"
# PyTorch's headers are C++17 up to 2.11 and C++20 in its newest releases, which GCC has from 11 and Clang from 14 on.
MINIMUM_COMPILERS = {"GCC": 11, "Clang": 14}
# Folders of csrc/ that belong to no single operator.
SHARED_FOLDERS = ("common", "cpu", "cuda", "torch")
UNITS = {"host": 2, "kernels": 1}  # of the host's files, and of the CPU kernels for each instruction set
ROOT = Path(__file__).parent.resolve()
# Before CUDA 13 the Python packages have no nvcc.
FIRST_PACKAGED_CUDA = 13
# Folders into which pip, python -m build and uv unpack sources.
TEMPORARY_FOLDER = re.compile(r"pip-(install|req-build|wheel|download)-|build-via-sdist-|(sdists|git|builds)-v\d")
DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl")
REQUESTED = "CUDA kernels are asked for (SSM_KERNELS_CUDA=1 or FORCE_CUDA=1)"


def stop(message: str) -> NoReturn:
    raise SystemExit(f"\nssm_kernels: {message}\n")


class Torch(NamedTuple):
    version: str
    cuda: str | None  # "13.0"


class Compiler(NamedTuple):
    command: str
    name: str  # "GCC" or "Clang"
    version: str


class Toolkit(NamedTuple):
    home: Path
    version: str  # "13.0"
    is_packaged: bool  # installed as Python packages


class CudaPlan(NamedTuple):
    decision: str  # "yes", "no", or "fetch": yes, with nvcc from Python packages
    reason: str = ""  # why only CPU kernels are built although torch has CUDA
    variable: str = "FORCE_CUDA"  # the variable that requests CUDA kernels on this machine


def major(version: str) -> int:
    return int(version.split(".")[0])


def run_in_environment(*arguments: str) -> subprocess.CompletedProcess:
    """Runs Python in the environment that the package is installed into, not in the isolated one."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


def environment_paths() -> list[str]:
    """sys.path of the environment that the package is installed into."""
    return run_in_environment("-c", "import sys; print(*filter(None, sys.path[1:]), sep='\\n')").stdout.splitlines()


def find_torch(paths: list[str]) -> Torch | None:
    """Finds the torch on ``paths`` from its version file: an import takes seconds, and fails if torch is broken."""
    spec = importlib.machinery.PathFinder.find_spec("torch", paths)
    if spec is None or spec.origin is None:
        return None
    facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return Torch(str(facts["__version__"]), facts["cuda"])


def check_torch(torch: Torch | None) -> None:
    """Stops at a torch that is older than the package requires: pip could not install the wheel built with it."""
    least = tuple(map(int, TORCH_REQUIREMENT.split(">=")[1].split(".")))
    # A pre-release counts as its release: some containers have no other.
    if torch is not None and tuple(map(int, re.match(r"(\d+)\.(\d+)", torch.version).groups())) < least:
        stop(f"expected {TORCH_REQUIREMENT}, got torch {torch.version} in this environment: pip install '{TORCH_REQUIREMENT}'")


def find_compiler() -> Compiler:
    """Finds the C++ compiler that PyTorch's build extension will call. Stops if there is none, or if it is too old."""
    command = os.environ.get("CXX") or "c++"
    needed = " or ".join(f"{name} >= {version}" for name, version in MINIMUM_COMPILERS.items())
    if shutil.which(command.split()[0]) is None:
        stop(
            f"no C++ compiler: '{command}' was not found. Install one ({needed}; for example `apt install g++`), "
            "or name yours in the environment variable CXX."
        )
    probe = subprocess.run([*command.split(), "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True)
    macros = dict(re.findall(r"^#define (__clang_major__|__clang_minor__|__GNUC__|__GNUC_MINOR__) (\d+)$", probe.stdout, re.M))
    if probe.returncode or "__GNUC__" not in macros:
        stop(f"the C++ compiler '{command}' does not work, or is neither of {needed}:\n{probe.stderr.strip()}")
    if "__clang_major__" in macros:
        name, version = "Clang", f"{macros['__clang_major__']}.{macros['__clang_minor__']}"
    else:
        name, version = "GCC", f"{macros['__GNUC__']}.{macros['__GNUC_MINOR__']}"
    if major(version) < MINIMUM_COMPILERS[name]:
        stop(
            f"the C++ compiler '{command}' is {name} {version}, too old for PyTorch's headers, which need {needed}. "
            "Name a newer one in the environment variable CXX, for example CXX=g++-13."
        )
    return Compiler(command, name, version)


def join_files(sources: list[str], name: str) -> dict[str, str]:
    """Returns the text of the translation units that include .cpp files: all those of a folder of csrc/ are in one unit.

    PyTorch's headers and the templates that they instantiate take seconds of every unit, longer than most of these files alone.
    The units keep two cores busy: the largest folders go first, each into the unit that is smaller so far.

    Args:
        sources: paths from the root of the repository.
        name: ``host`` or ``kernels``, what the names of the units begin with.
    """
    folders: dict[str, list[Path]] = {}
    for source in sorted(sources):
        path = Path(source).relative_to("csrc")
        is_shared = len(path.parts) == 1 or path.parts[0] in SHARED_FOLDERS
        folders.setdefault("torch" if is_shared else path.parts[0], []).append(path)
    bytes_of = {folder: sum((ROOT / "csrc" / path).stat().st_size for path in paths) for folder, paths in folders.items()}
    units: list[list[str]] = [[] for _ in range(UNITS[name])]
    for folder in sorted(folders, key=lambda folder: (-bytes_of[folder], folder)):
        min(units, key=lambda unit: sum(bytes_of[other] for other in unit)).append(folder)
    return {
        f"{name}_{number}": "".join(f'#include "{path.as_posix()}"\n' for folder in sorted(unit) for path in folders[folder])
        for number, unit in enumerate(units, 1)
        if unit
    }


def find_toolkit(paths: list[str]) -> Toolkit | None:
    """Finds the toolkit: CUDA_HOME or CUDA_PATH alone if set, else the nvcc on PATH, else /usr/local/cuda, else Python
    packages.
    """
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    if named:
        homes = [Path(named)]
    else:
        homes = [Path(on_path).resolve().parent.parent] if on_path else []
        homes.append(Path("/usr/local/cuda"))
    packaged = [home for path in paths for home in sorted(Path(path).glob("nvidia/cu[0-9]*"), reverse=True)]
    for home in [*homes, *packaged]:
        nvcc = home / "bin" / "nvcc"
        # A script named nvcc outside a toolkit has no headers next to it.
        if nvcc.exists() and cuda_include_dirs(home):
            output = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True).stdout
            release = re.search(r"release (\d+\.\d+)", output)
            if release is None:
                stop(f"'{nvcc} --version' names no release; set CUDA_HOME to a working toolkit, or SSM_KERNELS_CUDA=0.")
            return Toolkit(home, release[1], home in packaged)
    return None


def cuda_include_dirs(home: Path) -> list[str]:
    folders = [home / "include", *home.glob("targets/*-linux/include")]
    return [str(folder) for folder in folders if (folder / "cuda_runtime_api.h").exists()]


def complete_architectures(architectures: str) -> str:
    """Replaces 9.0 by 9.0a in ``architectures``, spelt as in TORCH_CUDA_ARCH_LIST.

    setmaxnreg, which moves registers between warps, needs 9.0a; without it kernels spill.
    """
    names = architectures.replace("Hopper", "9.0+PTX").split(";")
    completed = ";".join(re.sub(r"^9\.0(?=\+|$)", "9.0a", name) for name in names)
    if completed != ";".join(names):
        print(f"ssm_kernels: TORCH_CUDA_ARCH_LIST={architectures}: on Hopper the kernels need 9.0a; building for {completed}")
    if "9.0a+PTX" in completed:
        print("ssm_kernels: PTX of 9.0a is for compute capability 9.0 alone; for newer GPUs add 8.0+PTX")
    return completed


def check_architectures(architectures: str, toolkit: Toolkit) -> None:
    """Stops unless nvcc compiles for all of ``architectures``, spelt as in TORCH_CUDA_ARCH_LIST ("8.0+PTX;9.0a", "Hopper")."""
    output = subprocess.run([str(toolkit.home / "bin" / "nvcc"), "--list-gpu-arch"], capture_output=True, text=True).stdout
    known = [f"{number[:-1]}.{number[-1]}" for number in re.findall(r"compute_(\d+)", output)]
    for name in filter(None, architectures.split(";")):
        capability = re.fullmatch(r"(\d+\.\d+)[af]?(\+PTX)?", name)
        if name[0].isdigit() and (capability is None or capability[1] not in known):
            stop(
                f"TORCH_CUDA_ARCH_LIST names '{name}', for which nvcc {toolkit.version} does not compile; it does for "
                f"{', '.join(known)}, each also with +PTX, from 9.0 on also with a (as 9.0a)."
            )


def has_nvidia_driver() -> bool:
    """Checks whether the kernel module is loaded or, under WSL, which has none, whether nvidia-smi reaches a GPU."""
    # Some containers have only the device file.
    if any(map(os.path.exists, DRIVER_FILES)):
        return True
    # On login nodes nvidia-smi exists and fails.
    return shutil.which("nvidia-smi") is not None and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0


def cuda_request() -> str | None:
    """Returns the user's request: "1" (build CUDA kernels or stop), "0" (build none) or None (the machine decides).

    SSM_KERNELS_CUDA overrides FORCE_CUDA, which many packages read and container images set for all of them.
    """
    for variable in ("SSM_KERNELS_CUDA", "FORCE_CUDA"):
        if os.environ.get(variable, "") not in ("", "0", "1"):
            stop(f"expected {variable} to be 0 or 1, got '{os.environ[variable]}'.")
    return os.environ.get("SSM_KERNELS_CUDA") or ("1" if os.environ.get("FORCE_CUDA") == "1" else None)


def plan_cuda(torch: Torch | None, toolkit: Toolkit | None, request: str | None, has_driver: bool) -> CudaPlan:
    """Decides whether to build CUDA kernels. Stops if they are requested and cannot be built.

    CUDA kernels take most of the time of a build, and a machine without an NVIDIA driver cannot run them. Such a machine gets
    them on request only, even if it has an nvcc.

    Args:
        torch: the torch to build against; None before it is installed.
        toolkit: the CUDA toolkit found, if any.
        request: the result of :func:`cuda_request`.
        has_driver: whether the machine has an NVIDIA driver.
    """
    if torch is not None and torch.cuda is None:
        if request == "1":
            stop(
                f"{REQUESTED}, but torch {torch.version} is a build without CUDA. "
                "Install a CUDA build of torch first, or unset the variable."
            )
        return CudaPlan("no")
    if request == "0":
        # FORCE_CUDA has no effect where SSM_KERNELS_CUDA=0 is exported.
        return CudaPlan("no", "SSM_KERNELS_CUDA=0 is set", "SSM_KERNELS_CUDA")
    if request is None and not has_driver:
        return CudaPlan("no", "this machine has no NVIDIA driver")
    if toolkit is not None:
        if torch is not None and major(toolkit.version) != major(torch.cuda):
            stop(
                f"the CUDA compiler {toolkit.home / 'bin' / 'nvcc'} is CUDA {toolkit.version}, but torch {torch.version} is "
                f"built with CUDA {torch.cuda}; the major versions must agree. Set CUDA_HOME to a CUDA {major(torch.cuda)} "
                "toolkit, or build CPU kernels only: SSM_KERNELS_CUDA=0."
            )
        return CudaPlan("yes")
    if torch is not None and major(torch.cuda) < FIRST_PACKAGED_CUDA:
        missing = f"no nvcc was found, and CUDA {torch.cuda} has none as a Python package"
        advice = f"install the CUDA {torch.cuda} toolkit and set CUDA_HOME to it"
        if request == "1":
            stop(f"{REQUESTED}, but {missing}: {advice}.")
        return CudaPlan("no", f"{missing} ({advice})")
    return CudaPlan("fetch")


def rebuild_with_cuda(sources: Path | str, variable: str = "FORCE_CUDA") -> str:
    """The command that builds CUDA kernels on any machine, the same in messages, ``python -m ssm_kernels`` and the docs."""
    return f"{variable}=1 pip install --no-deps -e {shlex.quote(str(sources))}"


def is_temporary(sources: Path) -> bool:
    """Whether pip, uv or build unpacked the sources, and will delete them."""
    return any(map(TEMPORARY_FOLDER.match, sources.parts))


def cpu_only_notice(plan: CudaPlan, sources: Path) -> str:
    """The last line of a build without CUDA kernels against a torch with CUDA."""
    command = rebuild_with_cuda(sources, plan.variable)
    if is_temporary(sources):
        command = f"repeat the command of this installation with {plan.variable}=1 and "
        command += "pip's --no-cache-dir --force-reinstall, or uv's --no-cache --reinstall-package ssm_kernels"
    return f"ssm_kernels: CPU kernels only were built: {plan.reason}. To build CUDA kernels too, on any machine: {command}"


def toolkit_requirement(torch: Torch) -> str:
    return f"{TOOLKIT_REQUIREMENT}=={torch.cuda}.*"


def torch_with_toolkit() -> list[str]:
    """Requirements for the torch that pip will choose and the matching compiler.

    torch requires one version of cuda-toolkit. If asked for both at once, pip (for example 23.2) starts with the newest of each
    and gives up. The function therefore asks for torch alone first.
    """
    resolve = ["-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", TORCH_REQUIREMENT]
    result = run_in_environment(*resolve)
    if result.returncode:
        return [TORCH_REQUIREMENT, TOOLKIT_REQUIREMENT]
    chosen = {item["metadata"]["name"]: item["metadata"]["version"] for item in json.loads(result.stdout)["install"]}
    requirements = [f"torch=={chosen['torch']}"]
    if "cuda-toolkit" in chosen:  # CUDA 13 or newer
        requirements.append(f"{TOOLKIT_REQUIREMENT}=={chosen['cuda-toolkit']}")
    return requirements


def check_platform() -> None:
    if platform.system() != "Linux":
        stop(f"expected Linux, got {platform.system()}; other systems are not supported (on Windows, use WSL).")


def see_environment() -> None:
    """Appends the environment's paths to this process's, so that ``import torch`` finds the environment's."""
    sys.path.extend(path for path in environment_paths() if path not in sys.path)


def build_requirements() -> list[str]:
    check_platform()
    find_compiler()
    see_environment()
    torch = find_torch(sys.path)
    check_torch(torch)
    plan = plan_cuda(torch, find_toolkit(sys.path), cuda_request(), has_nvidia_driver())
    if torch is None:
        return torch_with_toolkit() if plan.decision == "fetch" else [TORCH_REQUIREMENT]
    return [toolkit_requirement(torch)] if plan.decision == "fetch" else []


def get_requires_for_build_wheel(config_settings=None):
    return build_requirements()


def get_requires_for_build_editable(config_settings=None):
    return build_requirements()


def get_requires_for_build_sdist(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    return backend().prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    return backend().prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return backend().build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return backend().build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory, config_settings=None):
    return backend().build_sdist(sdist_directory, config_settings)


def backend():
    see_environment()
    from setuptools import build_meta

    return build_meta
