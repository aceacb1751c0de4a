"""The commands that build the package again, for messages: they fit the way in which it was installed."""

from __future__ import annotations

import json
import os
import re
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["rebuild_command", "rebuild_with_cuda_command", "release_of", "remedy"]

PACKAGE = Path(__file__).parent


def _distribution() -> metadata.Distribution | None:
    """The metadata beside the package, or of its editable install, which is beside no package."""
    beside = metadata.distributions(name="ssm_kernels", path=[str(PACKAGE.parent)])
    return next(iter(beside), None) or next(iter(metadata.distributions(name="ssm_kernels")), None)


def _requirement(distribution: metadata.Distribution) -> str | None:
    """What pip installed, if it can build that again: None for a wheel of the user's and for sources that are gone."""
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
    """The command that builds the package against the torch that is installed, without the caches of pip or uv.

    Both keep a wheel under the address of its sources alone. They take it again under another torch, and with FORCE_CUDA=1.

    Args:
        variables: assignments of environment variables, as ``"FORCE_CUDA=1 "``.
    """
    distribution = _distribution()
    with_uv = distribution is not None and (distribution.read_text("INSTALLER") or "").strip() == "uv"
    if (PACKAGE.parent / "setup.py").exists():
        sources = shlex.quote(str(PACKAGE.parent))
        # Only in this folder does uv read that it builds against the torch that is installed.
        command = f"uv pip install --directory {sources} --no-deps -e ." if with_uv else f"pip install --no-deps -e {sources}"
        return variables + command
    command = "uv pip install --no-deps --no-cache --reinstall-package ssm_kernels"
    if not with_uv:
        command = "pip install --no-deps --no-cache-dir --force-reinstall"
    requirement = None if distribution is None else _requirement(distribution)
    if requirement is None:
        return f"{variables}{command} . (in the folder of the sources)"
    if requirement.startswith("ssm_kernels=="):
        command += " --no-binary ssm_kernels"
    return f"{variables}{command} {shlex.quote(requirement)}"


def rebuild_with_cuda_command() -> str:
    """The command that builds CUDA kernels too, with or without a GPU, and even if SSM_KERNELS_CUDA is exported."""
    variable = "SSM_KERNELS_CUDA" if "SSM_KERNELS_CUDA" in os.environ else "FORCE_CUDA"
    return rebuild_command(f"{variable}=1 ")


def release_of(torch_version: str) -> str:
    """``2.15`` of ``2.15.1+cu132``; all of a pre-release, whose interface changes from day to day."""
    released = re.match(r"(\d+\.\d+)(?:\.\d+)*(?=\+|$)", torch_version)
    return released[1] if released else torch_version


def remedy(built: str) -> str:
    """Two ways out for a package that was built with torch ``built`` and runs with another."""
    release = release_of(built)
    pin = f"torch=={release}.*" if release != built else f"torch=={built.split('+')[0]}"
    return f"Rebuild it: {rebuild_command()}; or install the torch that it was built for: pip install {shlex.quote(pin)}"
