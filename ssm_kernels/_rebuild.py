"""The commands that build the package again, for messages: they fit the way in which it was installed."""

from __future__ import annotations

import json
import os
import shlex
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ._torch_versions import torch_pin

__all__ = ["rebuild_command", "rebuild_with_cuda_command", "remedy"]

PACKAGE = Path(__file__).parent
BUILD_TOOLS = "'setuptools>=77,<82' wheel ninja"


def _distribution() -> metadata.Distribution | None:
    """The metadata beside the package, or of its editable install, which is beside no package."""
    beside = next(iter(metadata.distributions(name="ssm_kernels", path=[str(PACKAGE.parent)])), None)
    if beside is not None and not (PACKAGE.parent / "setup.py").exists():
        return beside
    # A build leaves metadata beside the sources, too, without an installer.
    found = list(metadata.distributions(name="ssm_kernels"))
    return next((one for one in found if one.read_text("INSTALLER")), found[0] if found else None)


def _is_of_uv(distribution: metadata.Distribution | None) -> bool:
    """Whether uv installed the package. The environments that uv makes have no pip."""
    return distribution is not None and (distribution.read_text("INSTALLER") or "").strip() == "uv"


def _requirement(distribution: metadata.Distribution) -> str | None:
    """The requirement that makes pip build the package again; None for a wheel of the user's and for sources that are gone."""
    url = json.loads(distribution.read_text("direct_url.json") or "{}")
    subdirectory = f"#subdirectory={url['subdirectory']}" if "subdirectory" in url else ""
    if "vcs_info" in url:
        return f"{url['vcs_info']['vcs']}+{url['url']}@{url['vcs_info']['commit_id']}{subdirectory}"
    if "dir_info" in url:
        folder = Path(unquote(urlsplit(url["url"]).path))
        return str(folder) if (folder / "pyproject.toml").exists() else None
    if "url" in url:
        return None if url["url"].endswith(".whl") else url["url"] + subdirectory
    return f"ssm_kernels=={distribution.version.split('+')[0]}"


def rebuild_command(variables: str = "") -> str:
    """The command that builds the package against the torch that is installed, without what pip or uv cached.

    Both keep a wheel under the address of its sources alone. They take it again under another torch, and with FORCE_CUDA=1.

    Args:
        variables: assignments of environment variables, as ``"FORCE_CUDA=1 "``.
    """
    distribution = _distribution()
    if (PACKAGE.parent / "setup.py").exists():
        requirement: str | None = str(PACKAGE.parent)
        is_editable = True
    else:
        requirement = None if distribution is None else _requirement(distribution)
        is_editable = False
    command = _uv(requirement, is_editable, variables) if _is_of_uv(distribution) else _pip(requirement, is_editable, variables)
    return command if requirement else f"{command} (in the folder of the sources)"


def _no_binary(requirement: str) -> str:
    return " --no-binary ssm_kernels" if requirement.startswith("ssm_kernels==") else ""


def _pip(requirement: str | None, is_editable: bool, variables: str) -> str:
    requirement = requirement or "."
    # pip caches no editable install.
    options = " -e" if is_editable else f" --no-cache-dir --force-reinstall{_no_binary(requirement)}"
    return f"{variables}pip install --no-deps{options} {shlex.quote(requirement)}"


def _uv(requirement: str | None, is_editable: bool, variables: str) -> str:
    command = f"uv pip install --python {shlex.quote(sys.executable)}"
    # Without --no-deps, because uv then does not find the version of torch.
    rebuilds = "--reinstall-package ssm_kernels"
    if requirement is None or os.path.isabs(requirement):
        # In this folder alone uv reads that it builds against the torch that is installed.
        directory = f" --directory {shlex.quote(requirement)}" if requirement else ""
        return f"{variables}{command}{directory} {rebuilds} {'-e ' if is_editable else ''}."
    # Elsewhere uv would build against the newest torch.
    tools = f"{command} {BUILD_TOOLS} && "
    rebuilds = f"--no-build-isolation --no-cache {rebuilds}{_no_binary(requirement)}"
    return f"{tools}{variables}{command} {rebuilds} {shlex.quote(requirement)}"


def rebuild_with_cuda_command() -> str:
    """The command that builds CUDA kernels too, with or without a GPU, and even if SSM_KERNELS_CUDA is exported."""
    variable = "SSM_KERNELS_CUDA" if "SSM_KERNELS_CUDA" in os.environ else "FORCE_CUDA"
    return rebuild_command(f"{variable}=1 ")


def remedy(built: str) -> str:
    """Two ways out for a package that was built with torch ``built`` and runs with another."""
    install = f"uv pip install --python {shlex.quote(sys.executable)}" if _is_of_uv(_distribution()) else "pip install"
    command = f"{install} {shlex.quote(torch_pin(built))}"
    return f"Rebuild it: {rebuild_command()}; or install the torch that it was built for: {command}"
