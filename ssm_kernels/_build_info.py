"""Build information, the check that it matches the running torch, and the loading of the operators."""

from __future__ import annotations

import ctypes
import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import TypedDict

import torch

from ._rebuild import rebuild_command, remedy
from ._torch_versions import release_of
from .choices import DiscretizationName

__all__ = ["BuildInfo", "build_info", "load_operators"]

PACKAGE = Path(__file__).parent


class BuildInfo(TypedDict):
    """Describes the build; every value is plain, so that ``json.dumps`` accepts it."""

    version: str  # of this package
    torch: str  # version that the operators were compiled against, the only one that they load under
    cuda: str | None  # CUDA version of the compiler; None: CPU kernels only
    architectures: tuple[str, ...]  # compute capabilities of the CUDA kernels, as TORCH_CUDA_ARCH_LIST spells them
    cpu_capabilities: tuple[str, ...]  # instruction sets of the CPU kernels
    discretizations: tuple[DiscretizationName, ...]
    compiler: str  # of the host code


def _facts() -> ModuleType:
    try:
        return importlib.import_module("ssm_kernels._build_facts")
    except ModuleNotFoundError:
        raise ImportError(
            f"ssm_kernels has not been built: _build_facts.py, which the build writes, is missing from {PACKAGE}. "
            f"Build it: {rebuild_command()}"
        ) from None


def build_info() -> BuildInfo:
    """Describes the build: a dict with the keys of :class:`BuildInfo`.

    Examples:
        >>> import ssm_kernels
        >>> info = ssm_kernels.build_info()
        >>> sorted(info)
        ['architectures', 'compiler', 'cpu_capabilities', 'cuda', 'discretizations', 'torch', 'version']
    """
    facts = _facts()
    return BuildInfo(
        version=facts.version,
        torch=facts.torch,
        cuda=facts.cuda,
        architectures=facts.architectures,
        cpu_capabilities=facts.cpu_capabilities,
        discretizations=tuple(torch.ops.ssm_kernels._discretizations()),
        compiler=facts.compiler,
    )


def check_torch(built: str, running: str, cuda: str | None = None, running_cuda: str | None = None) -> None:
    """Raises ImportError unless the running torch has the C++ interface of the build.

    Args:
        built, running: versions of torch. The interface changes with every minor version.
        cuda: CUDA version of the compiler of the CUDA kernels; None if there are none.
        running_cuda: CUDA version of the running torch. Its major version must be that of ``cuda``.
    """
    if release_of(built) != release_of(running):
        raise ImportError(
            f"ssm_kernels was built with torch {built}, but the torch that is installed is {running}. {remedy(built)}"
        )
    if cuda is not None and (running_cuda is None or running_cuda.split(".")[0] != cuda.split(".")[0]):
        kind = f"with CUDA {running_cuda}" if running_cuda else "without CUDA"
        raise ImportError(
            f"ssm_kernels was built with CUDA {cuda}, but the torch that is installed, {running}, is a build {kind}. "
            f"Rebuild it: {rebuild_command()}; or install a torch with CUDA {cuda.split('.')[0]}"
        )


def _missing(library: Path) -> ImportError:
    return ImportError(f"ssm_kernels has not been built: {library} is missing. Build it: {rebuild_command()}")


def _does_not_load(library: Path, error: OSError, built: str) -> ImportError:
    # Newer versions of PyTorch keep the loader's own message, with the undefined symbol, in the cause.
    reason = str(error.__cause__ or error).removeprefix(f"{library}: ")
    return ImportError(f"{library} does not load under torch {torch.__version__}: {reason}. {remedy(built)}")


def _check_kernel_library(kind: str, facts: ModuleType) -> None:
    """Raises ImportError unless the kernel library ``kind`` has the boundary that ``_ops`` was compiled for.

    ``_ops`` compares the numbers too, for C++ programs, and can only end the process.
    """
    path = PACKAGE / f"libssm_kernels_{kind}.so"
    if not path.exists():
        raise _missing(path)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise _does_not_load(path, error, facts.torch) from error
    function = getattr(library, f"ssm_kernels_{kind}_abi", None)
    got = None if function is None else function()
    if got != facts.kernel_abi:
        raise ImportError(
            f"{path} is of another build than _ops.abi3.so: expected kernel ABI {facts.kernel_abi}, got {got}. "
            f"Build both: {rebuild_command()}"
        )


def load_operators() -> None:
    """Loads ``_ops``, which registers ``torch.ops.ssm_kernels.*``, and the kernel libraries beside it.

    Raises:
        ImportError: the package is not built, or was built with another torch; the message has the command that fixes it.
    """
    facts = _facts()
    check_torch(facts.torch, torch.__version__, facts.cuda, torch.version.cuda)
    library = PACKAGE / "_ops.abi3.so"
    if not library.exists():
        raise _missing(library)
    for kind in ("cpu",) if facts.cuda is None else ("cpu", "cuda"):
        _check_kernel_library(kind, facts)
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise _does_not_load(library, error, facts.torch) from error


def runs_on(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether code for ``architectures`` (as in TORCH_CUDA_ARCH_LIST) runs on a device of compute capability ``capability``.

    Machine code runs on its own major version, from its minor version on. Architecture-specific code ("9.0a") runs on its
    own version only, PTX on all newer ones.
    """
    for name in architectures:
        match = re.fullmatch(r"(\d+)\.(\d+)(a?)(\+PTX)?", name)
        if match is None:
            continue
        compiled = (int(match[1]), int(match[2]))
        if compiled == capability or (not match[3] and compiled <= capability and (match[4] or compiled[0] == capability[0])):
            return True
    return False
