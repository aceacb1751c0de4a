"""Builds ``_ops``, the library of every operator, the kernel libraries that it needs, and ``_build_facts.py``, the module of
facts about the build.

Environment variables: ``FORCE_CUDA`` (1), ``SSM_KERNELS_CUDA`` (0 or 1), ``CUDA_HOME``, ``TORCH_CUDA_ARCH_LIST``, ``MAX_JOBS``,
``CXX``; see docs/installation.md.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import sys
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NoReturn

import setuptools
from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.errors import BaseError

import build_backend
from build_backend import stop

if int(setuptools.__version__.split(".")[0]) < 77:
    stop(f"expected setuptools>=77, got setuptools {setuptools.__version__}: pip install 'setuptools>=77,<82' wheel ninja")

import build_kernels
import build_metadata
from build_kernels import CPU_CAPABILITIES, CPU_LIBRARY, CUDA_LIBRARY, Library
from build_linking import check_library, link_arguments

ROOT = Path(__file__).parent.resolve()
OPS = "ssm_kernels._ops"

# The starts of the names of objects that take longest, in this order (scripts/compile_report.py).
SLOW_OBJECTS = ("cuda/selective_scan", "host/", "cpu_", "cuda/ssd", "cuda/linear_scan")


def stop_for_missing(requirement: str) -> NoReturn:
    stop(
        f"{requirement} is not installed in this environment; without build isolation the build requirements must be. "
        "Install them first: pip install 'setuptools>=77,<82' wheel ninja"
    )


build_backend.check_platform()
request = build_backend.cuda_request()
compiler = build_backend.find_compiler()
torch_found = build_backend.find_torch(sys.path)
if torch_found is None:
    # Metadata and source distributions need no torch.
    if {"egg_info", "dist_info", "sdist"}.isdisjoint(sys.argv):
        stop("torch is not installed in this environment. Install it first, or let pip do it: drop --no-build-isolation.")
    setup(distclass=build_metadata.distribution_class(None, None))
    sys.exit()

if {"egg_info", "sdist"}.isdisjoint(sys.argv):
    build_backend.check_torch(torch_found)
try:
    import ninja

    # ninja is not on PATH if pip is called by its path in an environment that is not active.
    os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ["PATH"]])
except ModuleNotFoundError:
    if shutil.which("ninja") is None:
        stop_for_missing("ninja")

toolkit = build_backend.find_toolkit(sys.path)
plan = build_backend.plan_cuda(torch_found, toolkit, request, build_backend.has_nvidia_driver())
if plan.decision == "fetch":
    # Without build isolation nobody fetched it.
    advice = (
        f"install the CUDA toolkit and set CUDA_HOME to it, or: pip install '{build_backend.toolkit_requirement(torch_found)}'"
    )
    if request == "1":
        stop(f"{build_backend.REQUESTED}, but no nvcc was found: {advice}")
    plan = build_backend.CudaPlan("no", f"no nvcc was found ({advice})")
WITH_CUDA = plan.decision == "yes"
LIBRARIES = (CPU_LIBRARY, *([CUDA_LIBRARY] if WITH_CUDA else []))
is_wheel = not build_metadata.WHEEL_COMMANDS.isdisjoint(sys.argv)
distribution = build_metadata.distribution_class(
    torch_found.version if is_wheel else None, toolkit.version if WITH_CUDA else None
)
builds = ("build", "build_ext", "bdist_wheel", "editable_wheel", "develop", "install")
if not {"egg_info", "dist_info", "sdist"}.isdisjoint(sys.argv) and {*builds}.isdisjoint(sys.argv):
    # Source distributions, and the metadata for which pip asks before it builds, need no torch, whose import takes seconds.
    setup(distclass=distribution)
    sys.exit()
if WITH_CUDA:
    # torch.utils.cpp_extension reads it at import.
    os.environ["CUDA_HOME"] = str(toolkit.home)

import torch  # noqa: E402
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension, _get_cuda_arch_flags  # noqa: E402


def cuda_architectures() -> str:
    """TORCH_CUDA_ARCH_LIST, else the visible GPUs, else code for everything from Ampere on that also uses all of Hopper."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(" ", ";").replace(",", ";")
    if listed not in ("", "native"):
        return build_backend.complete_architectures(listed)
    try:
        capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    except RuntimeError:  # a GPU that torch cannot use
        capabilities = set()
    # From Hopper on, tensor-core instructions belong to the architecture-specific set, "a".
    names = [f"{major}.{minor}{'a' if major >= 9 else ''}" for major, minor in sorted(capabilities)]
    return ";".join(names) or "8.0+PTX;9.0a"


def number_of_jobs() -> int:
    """MAX_JOBS, else one per core as far as memory allows: compilers take up to 2 GB for a C++ file, 4 GB for a CUDA file."""
    requested = os.environ.get("MAX_JOBS", "")
    if requested.isdigit() and int(requested) > 0:
        return int(requested)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // (4 if WITH_CUDA else 2) // 10**9))


def find_sources(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


CPU_KERNELS = find_sources("csrc/**/cpu/*kernel.cpp")


def write_units(sources: list[str], name: str) -> list[str]:
    """Writes the files of #include lines of build_backend.join_files into build/units, and returns their paths.

    They are written only if their text changes. Therefore ninja recompiles a unit only when a file that it includes changes, or
    when files move between units.
    """
    folder = ROOT / "build" / "units"
    folder.mkdir(parents=True, exist_ok=True)
    units = []
    for unit_name, text in build_backend.join_files(sources, name).items():
        unit = folder / f"{unit_name}.cpp"
        if not unit.exists() or unit.read_text() != text:
            unit.write_text(text)
        units.append(str(unit.relative_to(ROOT)))
    return units


class BuildLibraries(BuildExtension):
    """BuildExtension that builds the kernel libraries before ``_ops``, and keeps the objects for incremental rebuilds."""

    def finalize_options(self):
        super().finalize_options()
        # Not the default, a temporary folder in an editable install. Each version of torch and Python needs its own objects of
        # the host's files; those of kernels are in build_kernels.OBJECTS.
        name = f"{torch.__version__}-{'cuda' if WITH_CUDA else 'cpu'}-{sys.implementation.cache_tag}"
        self.build_temp = str(ROOT / "build" / name)

    def run(self):
        super().run()
        if not self.inplace:
            build_metadata.write_facts(Path(self.build_lib) / "ssm_kernels", build_facts())
        if plan.reason:
            print(build_backend.cpu_only_notice(plan, ROOT))

    def copy_extensions_to_source(self):
        # Never the facts of one build beside the library of another, nor CUDA kernels beside a library that has none.
        package = ROOT / "ssm_kernels"
        for name in (build_metadata.FACTS, CPU_LIBRARY.file, CUDA_LIBRARY.file):
            (package / name).unlink(missing_ok=True)
        super().copy_extensions_to_source()
        for library in LIBRARIES:
            shutil.copy(Path(self.build_lib) / "ssm_kernels" / library.file, package)
        build_metadata.write_facts(package, build_facts())

    def get_outputs(self):
        return [*super().get_outputs(), *(os.path.join(self.build_lib, "ssm_kernels", one.file) for one in LIBRARIES)]

    def build_extension(self, ext):
        with build_kernels.only_build():
            self.build_alone(ext)

    def build_alone(self, ext):
        folder = Path(self.get_ext_fullpath(ext.name)).parent
        try:
            # Change a copy, so that source distributions list the sources and not the units.
            ext = copy.copy(ext)
            ext.extra_objects, kernels = self.compile_sources(ext, number_of_jobs())
            ext.sources = []
            folder.mkdir(parents=True, exist_ok=True)
            for library in LIBRARIES:
                self.link_kernels(library, kernels[library], folder, ext)
            ext.library_dirs = [str(folder), *ext.library_dirs]
            # ninja refuses an empty list.
            self.compiler.compile = lambda *arguments, **keywords: []
            super().build_extension(ext)
        except (RuntimeError, BaseError) as error:
            stop(f"building {ext.name} failed ({error}); the compiler's messages are above.")
        for name in (*(library.file for library in LIBRARIES), Path(self.get_ext_fullpath(ext.name)).name):
            check_library(folder / name, compiler.command)

    def compile_sources(self, ext, jobs: int) -> tuple[list[str], dict[Library, list[str]]]:
        """Compiles the host's units and the kernels, ``jobs`` at a time.

        Returns:
            the objects of ``_ops``, and those of each kernel library.
        """
        compile_with_ninja = self.compiler.compile
        host_flags = ext.extra_compile_args["cxx"]

        def compile_host(unit: str) -> str:
            # A folder of its own, because ninja's file is in it.
            output = os.path.join(self.build_temp, "host", Path(unit).stem)
            (found,) = compile_with_ninja([unit], output_dir=output, include_dirs=ext.include_dirs, extra_postargs=host_flags)
            return found

        cpu_compiler = [*compiler.command.split(), *self.compiler.compiler_so[1:]]
        units = write_units(CPU_KERNELS, "kernels")
        build_kernels.point_at_torch_headers(Path(torch.__file__).parent)
        kernels = {CPU_LIBRARY: build_kernels.cpu_tasks(units, cpu_compiler, warning_flags())}
        if WITH_CUDA:
            kernels[CUDA_LIBRARY] = cuda_tasks()
        host_units = write_units(ext.sources, "host")
        calls = {f"host/{Path(unit).stem}": (compile_host, unit) for unit in host_units}
        calls |= {task.folder: (build_kernels.compile_task, task) for tasks in kernels.values() for task in tasks}
        os.environ["MAX_JOBS"] = "1"
        with ThreadPoolExecutor(jobs) as pool:
            # The slowest begin, so that none of them is left alone at the end.
            started = {name: pool.submit(*calls[name]) for name in sorted(calls, key=by_time)}
            done, _ = wait(started.values(), return_when=FIRST_EXCEPTION)
            pool.shutdown(wait=False, cancel_futures=True)
            for one in done:
                one.result()
        # DEFAULT comes first in the link: the linker keeps the first copy of an inline function.
        objects = {library: [started[task.folder].result() for task in tasks] for library, tasks in kernels.items()}
        return [started[f"host/{Path(unit).stem}"].result() for unit in host_units], objects

    def link_kernels(self, library: Library, objects: list[str], folder: Path, ext) -> None:
        arguments = ["-Wl,--no-undefined", f"-Wl,-soname,{library.file}", *link_arguments(library.exports)]
        # Sleef is in libtorch_cpu.so, under the same names in every version.
        libraries = ["cudart"] if library is CUDA_LIBRARY else ["torch_cpu"]
        self.compiler.link_shared_object(
            objects,
            str(folder / library.file),
            libraries=libraries,
            library_dirs=ext.library_dirs,
            extra_postargs=arguments,
            target_lang="c++",
        )


def by_time(name: str) -> int:
    """Orders objects by the compile time of their kind, the longest first. The name of a CUDA object has nvcc's version."""
    name = re.sub(r"^cuda_[\d.]+/", "cuda/", name)
    return next((place for place, start in enumerate(SLOW_OBJECTS) if name.startswith(start)), len(SLOW_OBJECTS))


class CleanBuild(build):
    """Starts from an empty build_lib, so that a wheel contains no file that is gone from the sources."""

    def run(self):
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


def warning_flags() -> list[str]:
    flags = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-unknown-pragmas"]  # PyTorch's headers
    if compiler.name == "GCC":
        flags.append("-Wno-maybe-uninitialized")  # GCC's own AVX-512 intrinsics
    return flags


def ops_extension() -> Extension:
    """``_ops``: py_limited_api keeps libtorch_python out, and with it every Python symbol."""
    # Host files only check, allocate and launch; the loops are in the CPU kernels. -O1 saves a fifth of their compile time.
    host_flags = ["-O1", "-g0", "-fopenmp", "-fvisibility=hidden", *warning_flags()]
    # The paths of the build machine, in the messages of checks: csrc/... and torch/include/... remain.
    host_flags += [f"-ffile-prefix-map={folder}/=" for folder in (ROOT, Path(torch.__file__).parents[1])]
    host_flags.append("-DAT_PER_OPERATOR_HEADERS")  # fewer headers to parse: saves a twentieth of a CPU build
    if compiler.name == "GCC":
        host_flags += ["-finline-small-functions", "-findirect-inlining"]  # Clang does this at -O1
    host_flags += [f"-DSSM_KERNELS_CPU_{capability}" for capability in CPU_CAPABILITIES]
    sources = sorted(set(find_sources("csrc/**/*.cpp")) - {*CPU_KERNELS, *find_sources("csrc/cpu/kernel_abi.cpp")})
    options = {
        "include_dirs": [str(ROOT / "csrc")],
        "libraries": [library.name for library in LIBRARIES],
        # The kernel libraries are in the folder of `_ops`, wherever that is.
        "runtime_library_dirs": ["$ORIGIN"],
        "extra_link_args": ["-fopenmp", "-Wl,--no-undefined", *link_arguments("ops.exports")],
        "py_limited_api": True,
    }
    if not WITH_CUDA:
        return CppExtension(OPS, sources, extra_compile_args={"cxx": host_flags}, **options)

    host_flags.append("-DSSM_KERNELS_WITH_CUDA")
    options["include_dirs"] += packaged_headers()
    if toolkit.is_packaged:
        options["library_dirs"] = [linkable_runtime(toolkit.home / "lib")]
    return CUDAExtension(OPS, sources, extra_compile_args={"cxx": host_flags}, **options)


def packaged_headers() -> list[str]:
    """Folders of the toolkit's headers. Some come with torch's own requirements, which may be in another folder than nvcc."""
    homes = [toolkit.home]
    if toolkit.is_packaged:
        homes += [home for path in sys.path for home in Path(path).glob("nvidia/cu[0-9]*") if home != toolkit.home]
    folders = [folder for home in homes for folder in build_backend.cuda_include_dirs(home)]
    return [folder for folder in folders if folder != "/usr/include"]


def cuda_tasks() -> list[build_kernels.Task]:
    # Without this option nvcc takes the g++ of PATH.
    options = ["-ccbin", shutil.which(compiler.command.split()[-1]), *_get_cuda_arch_flags()]
    nvcc = toolkit.home / "bin" / "nvcc"
    return build_kernels.cuda_tasks(find_sources("csrc/**/*.cu"), nvcc, toolkit.version, options, packaged_headers())


def linkable_runtime(lib: Path) -> str:
    """Makes a folder with libcudart.so, the name that -lcudart needs: the Python package has libcudart.so.<major> only."""
    folder = ROOT / "build" / "cudart"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "libcudart.so"
    link.unlink(missing_ok=True)
    link.symlink_to(next(lib.glob("libcudart.so.*")))
    return str(folder)


def build_facts() -> dict[str, object]:
    """The facts that the generated module holds, which ``ssm_kernels/_build_info.py`` reads."""
    architectures = os.environ.get("TORCH_CUDA_ARCH_LIST", "") if WITH_CUDA else ""
    return {
        "version": build_metadata.source_version(),
        "torch": torch.__version__,
        "cuda": toolkit.version if WITH_CUDA else None,
        "architectures": tuple(filter(None, architectures.split(";"))),
        "cpu_capabilities": tuple(CPU_CAPABILITIES),
        "compiler": f"{compiler.name} {compiler.version}",
        "kernel_abi": build_metadata.kernel_abi(),
    }


os.environ["CXX"] = compiler.command
if WITH_CUDA:
    os.environ["TORCH_CUDA_ARCH_LIST"] = cuda_architectures()
    build_backend.check_architectures(os.environ["TORCH_CUDA_ARCH_LIST"], toolkit)
cuda = f"CUDA {toolkit.version} for {os.environ['TORCH_CUDA_ARCH_LIST']}" if WITH_CUDA else "no CUDA kernels"
print(f"ssm_kernels: torch {torch.__version__}, {compiler.name} {compiler.version}, CPU {', '.join(CPU_CAPABILITIES)}, {cuda}")
setup(
    ext_modules=[ops_extension()],
    cmdclass={"build": CleanBuild, "build_ext": BuildLibraries},
    distclass=distribution,
)
