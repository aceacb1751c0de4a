"""Compiles the objects of the kernel libraries, libssm_kernels_cpu.so and libssm_kernels_cuda.so.

Kernels include no header of PyTorch but ``at::vec``, PyTorch's SIMD vectors, and call nothing of PyTorch but Sleef's functions.
Their commands name neither a version nor a folder of PyTorch, and their objects are in ``build/kernels``. After a change of
PyTorch the build therefore recompiles the host's files only, and one kernel library serves every version. ninja does not track
the headers of ``at::vec``, which change with every version: an object keeps those of the PyTorch that compiled it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.resolve()
OBJECTS = ROOT / "build" / "kernels"
# The headers of the PyTorch that builds, by a path that is the same for every PyTorch.
TORCH_HEADERS = OBJECTS / "torch"

# Hot CPU loops, cpu/*kernel.cpp, are compiled once per capability and selected at run time, like PyTorch's own.
CPU_CAPABILITIES = {"DEFAULT": ["-O3"]}
if platform.machine() in ("x86_64", "AMD64"):
    CPU_CAPABILITIES["AVX2"] = ["-O3", "-mavx2", "-mfma", "-mf16c"]
    CPU_CAPABILITIES["AVX512"] = [*CPU_CAPABILITIES["AVX2"], "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
    # Here DEFAULT serves only processors without AVX2, from before 2013: -O2 compiles it in two thirds of the time.
    CPU_CAPABILITIES["DEFAULT"] = ["-O2"]

# The flags that PyTorch passes to nvcc: without them `a + b` of half types is ambiguous between CUDA's operators and others.
HALF_NAMES = ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS")
HALF_TYPES = [f"-D__CUDA_NO_{name}__" for name in HALF_NAMES]


class Library(NamedTuple):
    name: str

    @property
    def file(self) -> str:
        return f"lib{self.name}.so"

    @property
    def exports(self) -> str:
        """The version script in ``csrc/``."""
        return f"{self.name.removeprefix('ssm_')}.exports"


CPU_LIBRARY = Library("ssm_kernels_cpu")
CUDA_LIBRARY = Library("ssm_kernels_cuda")


class Task(NamedTuple):
    """One object: its folder in ``build/kernels``, its source, and the command up to the source."""

    folder: str
    source: str
    command: list[str]
    # The options with which the compiler writes the names of the headers that ninja tracks.
    dependencies: str


@contextlib.contextmanager
def only_build() -> Iterator[None]:
    """Waits until no other build in this tree compiles or links: builds for several versions of PyTorch share OBJECTS."""
    OBJECTS.mkdir(parents=True, exist_ok=True)
    with (OBJECTS / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("ssm_kernels: waiting for another build in this tree", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def point_at_torch_headers(torch_folder: Path) -> None:
    OBJECTS.mkdir(parents=True, exist_ok=True)
    TORCH_HEADERS.unlink(missing_ok=True)
    TORCH_HEADERS.symlink_to(torch_folder / "include", target_is_directory=True)


def wrapped(compiler: list[str]) -> list[str]:
    """Precedes a compiler by a compiler cache on PATH, as PyTorch does for the host's files."""
    if os.environ.get("TORCH_NO_COMPILER_WRAPPER"):
        return compiler
    found = [wrapper for wrapper in ("ccache", "sccache") if shutil.which(wrapper)]
    return [*found[:1], *compiler]


def cpu_tasks(units: list[str], compiler: list[str], warnings: list[str]) -> list[Task]:
    """Tasks of libssm_kernels_cpu.so.

    Args:
        units: files of #include lines of the CPU kernels, each of which is compiled for every capability.
        compiler: the C++ compiler with Python's flags.
        warnings: flags that set the compiler's warnings.
    """
    flags = ["-g0", "-std=c++20", "-fPIC", "-fopenmp", "-fvisibility=hidden", *warnings]
    # at::vec as headers of a system, which -MMD leaves out.
    flags += [f"-I{ROOT / 'csrc'}", "-isystem", str(TORCH_HEADERS), f"-ffile-prefix-map={ROOT}/="]
    command = [*wrapped(compiler), *flags]
    tasks = [Task("cpu_common/kernel_abi", "csrc/cpu/kernel_abi.cpp", command, "-MMD -MF $out.d")]
    for capability, options in CPU_CAPABILITIES.items():
        macros = [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]
        for unit in units:
            folder = f"cpu_{capability.lower()}/{Path(unit).stem}"
            tasks.append(Task(folder, unit, [*command, *options, *macros], "-MMD -MF $out.d"))
    return tasks


def cuda_tasks(sources: list[str], nvcc: Path, version: str, options: list[str], include_dirs: list[str]) -> list[Task]:
    """Tasks of libssm_kernels_cuda.so.

    Args:
        sources: the .cu files.
        nvcc: the compiler.
        version: its version, "13.0"; each has its own objects.
        options: the host's compiler and the architectures.
        include_dirs: folders of the toolkit's headers that nvcc does not know by itself.
    """
    # ptxas prints the registers and spills of every kernel; compression makes the library a sixth of the size.
    flags = ["-std=c++17", "-O3", "-lineinfo", "-Xptxas", "-v,-warn-spills", "-Xfatbin", "-compress-all"]
    flags += [*HALF_TYPES, "--expt-relaxed-constexpr", f"-I{ROOT / 'csrc'}"]
    flags += ["-include", str(ROOT / "csrc" / "cuda" / "visible_types.h")]
    for flag in ("-fPIC", "-fvisibility=hidden", f"-ffile-prefix-map={ROOT}/="):
        flags += ["-Xcompiler", flag]
    for folder in include_dirs:
        flags += ["-isystem", folder]
    command = [*wrapped([str(nvcc)]), *flags, *options]
    dependencies = "--generate-dependencies-with-compile --dependency-output $out.d"
    return [Task(f"cuda_{version}/{cuda_name(source)}", source, command, dependencies) for source in sources]


def cuda_name(source: str) -> str:
    """The name of a CUDA file's folder of objects: csrc/ssd/cuda/instantiations/bwd_f32.cu is ssd_bwd_f32."""
    return f"{Path(source).parts[1]}_{Path(source).stem}"


def compile_task(task: Task) -> str:
    """Compiles an object unless it is newer than its sources and of the same command, and returns its path."""
    # A folder of its own, because ninja's file is in it, and several compile at a time.
    folder = OBJECTS / task.folder
    folder.mkdir(parents=True, exist_ok=True)
    target = (folder / task.source).with_suffix(".o")
    command = shlex.join(task.command).replace("$", "$$")
    rule = [
        "rule compile",
        f"  command = {command} {task.dependencies} -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        f"build {ninja_path(target)}: compile {ninja_path(ROOT / task.source)}",
    ]
    (folder / "build.ninja").write_text("\n".join(rule) + "\n")
    if subprocess.run(["ninja", "-v"], cwd=folder).returncode:
        raise RuntimeError(f"compiling {task.source} failed")
    return str(target)


def ninja_path(path: Path) -> str:
    return re.sub(r"([$: ])", r"$\1", str(path))
