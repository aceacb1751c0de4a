"""setup.py: how many compilers run, how the library is linked, what is written beside it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from build_helpers import CPU_LIBRARY, FACTS, OPS, ROOT, run_python, skip_without_build_requirements
from forked_scripts import run_scripts
from stub_build import build_environment, copy_sources, make_stub, run

import build_backend
import build_linking
from ssm_kernels._build_info import build_info

skip_without_build_requirements()


@pytest.fixture
def sources(tmp_path) -> Path:
    return copy_sources(tmp_path / "my sources")


def build_in_place(sources: Path, stub: Path, **variables: str):
    """Runs ``python setup.py -q build_ext --inplace``."""
    environment = build_environment(stub, **variables)
    (result,) = run_scripts("setup.py", "-q", "build_ext", "--inplace", folder=sources, environments=[environment])
    return result


def compilers_at_a_time(log: Path) -> int:
    """Checks the units that were compiled, and returns how many compilers ran at the same time at most."""
    events = [line.split(maxsplit=1) for line in log.read_text().splitlines()]
    running = [sum(1 if sign == "+" else -1 for sign, _ in events[: i + 1]) for i in range(len(events))]
    units = {f"{name}_{number}" for name, count in build_backend.UNITS.items() for number in range(1, count + 1)}
    assert running[-1] == 0 and {Path(source).stem for _, source in events} == {*units, "kernel_abi"}
    return max(running)


def test_compilers_that_run_at_a_time_are_at_most_max_jobs(sources, tmp_path):
    result = build_in_place(sources, make_stub(tmp_path, seconds=0.3), MAX_JOBS="3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert compilers_at_a_time(tmp_path / "log") == 3
    facts = (sources / "ssm_kernels" / FACTS.name).read_text()
    for value in (torch.__version__, build_info()["version"], f"cuda = {None}"):
        assert str(value) in facts
    if torch.version.cuda is not None:
        notice = result.stdout.splitlines()[-1]
        assert notice.startswith("ssm_kernels: CPU kernels only were built: SSM_KERNELS_CUDA=0 is set")
        assert notice.endswith(f" SSM_KERNELS_CUDA=1 pip install --no-deps -e '{sources}'")


def test_builds_in_a_tree_take_turns(sources, tmp_path):
    """They share the headers of PyTorch that the kernels include, and ninja's files."""
    environment = build_environment(make_stub(tmp_path, seconds=0.3), MAX_JOBS="1")
    results = run_scripts("setup.py", "-q", "build_ext", "--inplace", folder=sources, environments=[environment] * 2)
    assert [result.returncode for result in results] == [0, 0], results
    assert compilers_at_a_time(tmp_path / "log") == 1
    waiting = [result for result in results if "ssm_kernels: waiting for another build in this tree" in result.stdout]
    assert len(waiting) == 1


def test_failed_build_leaves_no_facts_beside_an_older_library(sources, tmp_path):
    """A tree that was built for another torch has its library and its facts, or neither."""
    package = sources / "ssm_kernels"
    (package / FACTS.name).write_text("torch = '2.11.0'\n")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"INPUT(-lc)")
    assert build_in_place(sources, make_stub(tmp_path, library=broken), MAX_JOBS="1").returncode == 1
    assert compilers_at_a_time(tmp_path / "log") == 1
    assert (package / FACTS.name).read_text() == "torch = '2.11.0'\n" and not list(package.glob("*.so"))
    assert build_in_place(sources, make_stub(tmp_path)).returncode == 0
    assert torch.__version__ in (package / FACTS.name).read_text()


def test_setup_links_the_shared_libstdcxx_and_checks_it(sources, tmp_path):
    """With a compiler that prefers the static one: setup.py with and without its arguments of the link."""
    compiler = shutil.which("g++")
    found = run(compiler, "-print-file-name=libstdc++.a").stdout.strip() if compiler else ""
    if not Path(found).is_absolute():
        pytest.skip("g++ with libstdc++.a is not installed")
    (tmp_path / "static").mkdir()
    (tmp_path / "static" / "libstdc++.a").symlink_to(found)
    wrapper = tmp_path / "wrapped-g++"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} -B{tmp_path}/static -L{tmp_path}/static "$@"\n')
    wrapper.chmod(0o755)
    stub = make_stub(tmp_path, compiler=str(wrapper), library=None)

    linked = build_in_place(sources, stub)
    assert linked.returncode == 0, linked.stdout + linked.stderr
    for name in (OPS.name, CPU_LIBRARY.name):
        library = build_linking.read_shared_library(sources / "ssm_kernels" / name)
        assert library.exported == [] and "libstdc++.so.6" in library.needed
        (sources / "ssm_kernels" / name).unlink()
    text = (sources / "build_linking.py").read_text()
    (sources / "build_linking.py").write_text(text.replace("*SHARED_LIBSTDCXX,", '"-lstdc++",'))
    stopped = build_in_place(sources, stub)
    assert stopped.returncode == 1 and "Traceback" not in stopped.stderr, stopped.stdout + stopped.stderr
    assert re.search(r"ssm_kernels: expected libssm_kernels_cpu\.so to use the shared libstdc\+\+\.so\.6", stopped.stderr)
    assert not list((sources / "ssm_kernels").glob("*.so"))


def test_requirement_of_the_build_is_that_of_the_sources():
    assert f'dependencies = ["{build_backend.TORCH_REQUIREMENT}"]' in (ROOT / "pyproject.toml").read_text()


def test_old_setuptools_stops_with_one_message(tmp_path):
    (tmp_path / "setuptools").mkdir()
    (tmp_path / "setuptools" / "__init__.py").write_text("__version__ = '65.5.0'\nExtension = setup = None\n")
    (tmp_path / "setuptools" / "command").mkdir()
    (tmp_path / "setuptools" / "command" / "build.py").write_text("build = object\n")
    (tmp_path / "setuptools" / "errors.py").write_text("BaseError = Exception\n")
    result = run_python("setup.py", "build_ext", env={"PYTHONPATH": str(tmp_path)}, cwd=ROOT)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "ssm_kernels: expected setuptools>=77, got setuptools 65.5.0: pip install 'setuptools>=77,<82'" in result.stderr
