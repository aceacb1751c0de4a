"""Wheels and source distributions, installed by pip into environments of their own; a stub compiles, see stub_build.py."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from build_helpers import ROOT, skip_without_build_requirements
from stub_build import build_environment, copy_sources, make_stub, run

import build_backend
from ssm_kernels._build_info import build_info

skip_without_build_requirements()
pytest.importorskip("pip", reason="installs with pip")
import build_metadata  # noqa: E402

VERSION = build_info()["version"]
PIN = build_metadata.torch_pin(torch.__version__)


class Environment:
    """A virtual environment that sees the packages of this one, or a torch that is only metadata."""

    def __init__(self, folder: Path, torch_version: str | None = None):
        venv.create(folder)
        self.python = folder / "bin" / "python"
        (packages,) = folder.glob("lib/python*/site-packages")
        if torch_version is None:
            seen = [path for path in sys.path if path.endswith("-packages")]
            (packages / "packages_of_the_caller.pth").write_text("\n".join(seen))
            return
        (packages / "torch").mkdir()
        (packages / "torch" / "__init__.py").write_text(f"__version__ = {torch_version!r}\n")
        metadata = packages / f"torch-{torch_version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch_version}\n")
        (metadata / "RECORD").touch()

    def pip(self, *arguments: str | Path, env: dict[str, str]):
        return run(sys.executable, "-m", "pip", "--python", self.python, *arguments, env=env)


def metadata_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


@pytest.fixture
def environment_of_builds(tmp_path) -> dict[str, str]:
    return build_environment(make_stub(tmp_path), PIP_CACHE_DIR=str(tmp_path / "cache"), PIP_NO_INDEX="1", TMPDIR=str(tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_wheel_from_the_cache_of_pip_works_or_is_refused(tmp_path, environment_of_builds):
    """pip keeps the wheel of a commit, whatever torch and variables it was built with."""
    env = environment_of_builds
    sources = copy_sources(tmp_path / "repository")
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", "-C", sources]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "sources"]):
        assert run(*git, *command).returncode == 0
    address = f"git+file://{sources}@{run(*git, 'rev-parse', 'HEAD').stdout.strip()}"
    install = ("install", "-v", "--no-build-isolation", f"{address}#egg=ssm_kernels")

    built = Environment(tmp_path / "first").pip(*install, env=env)
    assert built.returncode == 0, built.stdout + built.stderr
    if torch.version.cuda is not None:
        (notice,) = re.findall(r"ssm_kernels: CPU kernels only were built.*", built.stdout + built.stderr)
        assert "pip-install-" not in notice and "SSM_KERNELS_CUDA=1" in notice and "--no-cache-dir" in notice

    refused = Environment(tmp_path / "other", torch_version="2.99.0").pip(*install, env=env)
    assert refused.returncode == 1 and "Using cached" in refused.stdout
    assert f"No matching distribution found for {PIN}" in refused.stderr

    same = Environment(tmp_path / "same")
    # The wheel without CUDA kernels is taken again; the package works and names the command that builds them.
    with_cuda = {**env, "FORCE_CUDA": "1"}
    with_cuda.pop("SSM_KERNELS_CUDA")
    assert "Using cached" in same.pip(*install, env=with_cuda).stdout
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SSM_KERNELS_CUDA")}
    report = run(same.python, "-m", "ssm_kernels", env=variables, cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    if torch.version.cuda is not None and build_info()["cuda"] is None:
        command = f"FORCE_CUDA=1 pip install --no-deps --no-cache-dir --force-reinstall {address}"
        assert report.stdout.splitlines()[-1].endswith(command)
    script = "import torch; torch.__version__ = '2.99.0'; import ssm_kernels"
    message = run(same.python, "-c", script, env=variables, cwd=tmp_path).stderr.splitlines()[-1]
    assert f"--no-cache-dir --force-reinstall {address}" in message and f"pip install '{PIN}'" in message


def build_sdist(sources: Path, folder: Path) -> list[str]:
    """Builds a source distribution, and returns the paths of its files from the root of the sources."""
    script = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    result = run(sys.executable, "-c", script, cwd=sources)
    assert result.returncode == 0, result.stderr
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        return [name.split("/", 1)[1] for name in files.getnames() if "/" in name and not files.getmember(name).isdir()]


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="needs a git checkout")
def test_source_distribution_has_every_file(tmp_path):
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT).stdout.split("\0")
    committed = {name for name in listed if name and (ROOT / name).exists()}
    for name in committed:
        copy = tmp_path / "sources" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy)
    # Files that a build and the tests leave behind are not among them.
    left = (
        "ssm_kernels/_build_facts.py",
        "ssm_kernels/_ops.abi3.so",
        "ssm_kernels/libssm_kernels_cpu.so",
        "tests/__pycache__/a.cpython-311.pyc",
        "build/units/a.cpp",
    )
    for name in left:
        (tmp_path / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sources" / name).touch()
    files = set(build_sdist(tmp_path / "sources", tmp_path))
    written = {"PKG-INFO", "setup.cfg", *(name for name in files if ".egg-info/" in name)}
    assert sorted(files - written) == sorted(committed)


@pytest.mark.slow
def test_wheel_of_a_source_distribution_has_its_version(tmp_path, environment_of_builds):
    """pip refuses a wheel whose version is not that of the source distribution's name: a build tag takes the label's place."""
    env = environment_of_builds
    sources = copy_sources(tmp_path / "sources")
    build_sdist(sources, tmp_path / "dist")
    (archive,) = (tmp_path / "dist").iterdir()
    assert archive.name == f"ssm_kernels-{VERSION}.tar.gz"
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    information = (tmp_path / "unpacked" / f"ssm_kernels-{VERSION}" / "PKG-INFO").read_text()
    assert f"Requires-Dist: {build_backend.TORCH_REQUIREMENT}\n" in information

    options = ("--no-build-isolation", "--no-deps", "--find-links", tmp_path / "dist", "-w", tmp_path / "wheels")
    result = Environment(tmp_path / "environment").pip("wheel", *options, f"ssm_kernels=={VERSION}", env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    number = build_metadata.build_number(torch.__version__, None)
    assert re.fullmatch(rf"ssm_kernels-{re.escape(VERSION)}-{number}-py3-none-linux_\w+\.whl", wheel.name)
    metadata = metadata_of(wheel)
    assert f"Version: {VERSION}\n" in metadata and f"Requires-Dist: {PIN}\n" in metadata
