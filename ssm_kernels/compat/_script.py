"""Runs the program of ``python -m ssm_kernels.compat``, also in processes that ``multiprocessing`` spawns.

A spawned process does not inherit the installed modules. It first runs the main module of its parent again, which it finds by
the name in ``__spec__``. The program's module therefore has the name of this module there, which installs and then runs the
program that an environment variable names.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ssm_kernels.compat import install, served

_VARIABLE = "SSM_KERNELS_COMPAT_MAIN"
# The parts that spawned processes install; all without it.
_PARTS = "SSM_KERNELS_COMPAT_PARTS"


class _Spec(ModuleSpec):
    """The name that a spawned process imports, beside the program's own package, to which relative imports refer."""

    parent = ""

    def __init__(self, package: str) -> None:
        super().__init__("ssm_kernels.compat._script", None)
        self.parent = package


def run_main(arguments: list[str], as_module: bool, only: Sequence[str] | None = None, prints_served: bool = False) -> None:
    """Installs, and runs a script or, ``as_module``, a module as ``__main__``.

    Args:
        arguments: the script's path or the module's name, and then the program's own.
        only: as for :func:`ssm_kernels.compat.install`.
        prints_served: print :func:`ssm_kernels.compat.served` to stderr as the process ends.

    Raises:
        SystemExit: the script, the module or a part does not exist.
    """
    if not as_module and not Path(arguments[0]).exists():
        sys.exit(f"python -m ssm_kernels.compat: expected a script, got {arguments[0]}, which does not exist")
    try:
        install(only)
    except ValueError as error:
        sys.exit(str(error).replace("ssm_kernels.compat.install", "python -m ssm_kernels.compat --only", 1))
    if only is not None:
        os.environ[_PARTS] = ",".join(only)
    if prints_served:
        atexit.register(lambda: print(served(), file=sys.stderr))
    sys.argv = arguments
    if as_module:
        os.environ[_VARIABLE] = f"-m {arguments[0]}"
    else:
        script = Path(arguments[0]).resolve()
        sys.path[0] = str(script.parent)
        if script.suffix != ".py":
            runpy.run_path(arguments[0], run_name="__main__")  # a folder, an archive or a compiled file
            return
        os.environ[_VARIABLE] = str(script)
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    _run(module.__dict__, None if as_module else arguments[0])


def _run(namespace: dict[str, Any], shown: str | None = None) -> None:
    """Runs the program in the namespace of its main module. ``shown``: its path as ``sys.argv`` has it."""
    code, path, package = _load(os.environ[_VARIABLE])
    sys.argv[0] = path if shown is None else shown
    namespace |= {"__file__": sys.argv[0], "__spec__": _Spec(package), "__package__": package}
    exec(code, namespace)


def _load(program: str) -> tuple[CodeType, str, str]:
    """Code, path and package of a program."""
    if not program.startswith("-m "):
        # Without dont_inherit the program would get this file's future statements.
        return compile(Path(program).read_bytes(), program, "exec", dont_inherit=True), program, ""
    name = program.removeprefix("-m ")
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(f"{error.name}."):
            raise  # an import of a parent package
        spec = None
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = None if spec is None else spec.loader.get_code(spec.name)  # type: ignore[union-attr]
    if spec is None or spec.origin is None or code is None:
        sys.exit(f"python -m ssm_kernels.compat: expected a module that Python can run, got {name}")
    return code, spec.origin, spec.parent or ""


if __name__ == "__mp_main__":
    install(os.environ[_PARTS].split(",") if _PARTS in os.environ else None)
    program: dict[str, Any] = {"__name__": __name__}
    _run(program)
    globals().update(program)
