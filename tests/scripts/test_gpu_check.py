"""The steps of scripts/gpu_check.sh, with an interpreter that only records its commands."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Stands for Python on a machine with a GPU: notes the folder and the arguments of every call, and makes virtual environments.
PYTHON = """#!/bin/sh
echo "$PWD: $*" >> "$CALLS"
case "$*" in
  *"install --dry-run"*) exit "$NO_INDEX" ;;
  *"import xdist"*) exit 1 ;;
  "-m venv"*)
    for folder; do :; done
    mkdir -p "$folder/bin" "$folder/lib/python3.12/site-packages" && cp "$0" "$folder/bin/python" ;;
  "-c import sys"*) echo /somewhere/site-packages ;;
  "benchmarks/bench_"*) for file; do :; done; echo "{}" > "$file" ;;
  "benchmarks/report.py"*) touch "$3/A_GPU.md" "$3/A_GPU_figure.png"; echo "$3/A_GPU.md" ;;
esac
"""


class Tree:
    """A copy of the sources that matter here, with products of an earlier build in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.checkout = folder / "build" / "clean_checkout"
        for name in ("scripts/gpu_check.sh", "README.md", ".gitignore", "docs/figures/profile_discretization.png"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        for name in (
            "ssm_kernels/_ops.abi3.so",
            "ssm_kernels/libssm_kernels_cpu.so",
            "ssm_kernels/__pycache__/ops.pyc",
            "build/csrc/x.o",
            "profile_discretization.png",
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        self.python = folder.parent / "python"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=name", "-c", "user.email=mail@example.org"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=self.folder, check=True, capture_output=True, text=True
        ).stdout

    def commit_all(self, message: str) -> None:
        """Commits every file; the first call makes the repository."""
        if shutil.which("git") is None:
            pytest.skip("git is not installed")
        self.git("init", "--quiet")
        self.git("add", "-A")
        self.git("commit", "--quiet", "-m", message)

    def check(self, *arguments: str, has_index: bool = True) -> tuple[int, str, list[str]]:
        """Exit status, output, and the calls of Python."""
        calls = self.folder.parent / "calls"
        calls.write_text("")
        environment = {k: v for k, v in os.environ.items() if k not in ("PIP_NO_INDEX", "OUT", "WORKERS", "GIT_DIR")}
        environment |= {"PYTHON": str(self.python), "CALLS": str(calls), "NO_INDEX": str(int(not has_index))}
        command = ["bash", str(self.folder / "scripts" / "gpu_check.sh"), *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        return result.returncode, result.stdout + result.stderr, calls.read_text().splitlines()


@pytest.fixture
def tree(tmp_path) -> Tree:
    if shutil.which("tar") is None or shutil.which("bash") is None:
        pytest.skip("needs bash and tar")
    return Tree(tmp_path / "tree")


def test_build_installs_a_clean_checkout_by_the_command_of_the_readme(tree, tmp_path):
    status, output, calls = tree.check(str(tmp_path / "out"), "build")
    assert status == 0, output
    (install,) = (call for call in calls if " install " in call and "--dry-run" not in call)
    assert install == f"{tree.checkout}: -m pip --disable-pip-version-check install -e .[test] --verbose"
    copied = {str(path.relative_to(tree.checkout)) for path in tree.checkout.rglob("*") if path.is_file()}
    assert copied == {"scripts/gpu_check.sh", "README.md", ".gitignore", "docs/figures/profile_discretization.png"}
    environment = tree.checkout.with_name("clean_checkout_environment")
    (link,) = environment.glob("lib/*/site-packages/*.pth")
    assert link.read_text() == "/somewhere/site-packages\n"


def test_build_without_a_package_index(tree, tmp_path):
    status, output, calls = tree.check(str(tmp_path / "out"), "build", has_index=False)
    assert status == 0, output
    assert sum("install --no-index --no-build-isolation --no-deps -e ." in call for call in calls) == 1
    assert "no package index" in (tmp_path / "out" / "build.log").read_text()


def test_build_of_a_repository_is_of_the_commit(tree, tmp_path):
    tree.commit_all("Add everything")
    (tree.folder / "README.md").write_text("changed")
    status, output, _ = tree.check(str(tmp_path / "out"), "build")
    assert status == 0, output
    assert (tree.checkout / "README.md").read_text() == (ROOT / "README.md").read_text()
    log = (tmp_path / "out" / "build.log").read_text()
    assert f"clean checkout of {tree.git('rev-parse', 'HEAD').strip()}" in log and "not committed" in log


def test_whole_suite_runs_from_the_clean_checkout_in_two_stages(tree, tmp_path):
    assert tree.check(str(tmp_path / "out"), "build")[0] == 0
    status, output, calls = tree.check(str(tmp_path / "out"), "tests-cpu", "tests-cuda")
    assert status == 0, output
    assert [call.split(": ")[0] for call in calls if "-m pytest" in call] == [str(tree.checkout)] * 2
    for called in (calls, tree.check(str(tmp_path / "out"))[2]):
        marks = [call.split(" -m ")[2] for call in called if "-m pytest" in call]
        assert marks == ["not cuda tests", "cuda tests"]


@pytest.mark.parametrize("is_repository", [False, True])
def test_stages_refuse_the_checkout_of_other_sources(tree, tmp_path, is_repository):
    if is_repository:
        tree.commit_all("Add everything")
    status, output, calls = tree.check(str(tmp_path / "out"), "tests-cpu")
    assert status == 1 and "run the stage build first" in output and not calls
    assert tree.check(str(tmp_path / "out"), "build")[0] == 0
    assert tree.check(str(tmp_path / "out"), "tests-cpu")[0] == 0
    with (tree.folder / "README.md").open("a") as readme:
        readme.write("more\n")
    if is_repository:
        tree.commit_all("Say more")
    status, output, calls = tree.check(str(tmp_path / "out"), "tests-cpu")
    assert status == 1 and "run the stage build first" in output and not calls


def test_carried_library_is_used_where_it_lies(tree, tmp_path):
    status, output, calls = tree.check("--carried", str(tmp_path / "out"), "build", "tests-cuda")
    assert status == 0 and "for tuning only" in output
    assert not tree.checkout.exists() and not any("pip" in call for call in calls)
    assert [call.split(": ")[0] for call in calls if "-m pytest" in call] == [str(tree.folder)]


def test_chosen_benchmarks_join_earlier_measurements_on_the_page(tree, tmp_path, monkeypatch):
    pages = tree.folder / "docs" / "benchmarks"
    pages.mkdir()
    (pages / "A_GPU_ssd.json").write_text("{}")
    monkeypatch.setenv("BENCHMARKS", "layers norms")
    status, output, calls = tree.check("--carried", str(tmp_path / "out"), "benchmarks")
    assert status == 0, output
    out = tmp_path / "out"
    run = [call.partition(": ")[2] for call in calls if "benchmarks/" in call]
    assert run[:2] == [f"benchmarks/bench_{name}.py --json {out / name}.json" for name in ("layers", "norms")]
    together = " ".join(str(pages / f"A_GPU_{name}.json") for name in ("layers", "norms", "ssd"))
    assert run[3:] == [f"benchmarks/report.py --output {pages} {together}"]
    log = (out / "benchmarks.log").read_text()
    assert "-- layers: 0 s" in log and "-- ssd\nnot measured: not among BENCHMARKS" in log


def test_stage_without_a_folder_is_no_folder(tree):
    status, output, calls = tree.check("build")
    assert status == 0 and (tree.folder / "build" / "gpu_check" / "build.log").exists(), output
    assert not any("-m pytest" in call for call in calls)


def test_unknown_stage_stops(tree, tmp_path):
    status, output, calls = tree.check(str(tmp_path / "out"), "build", "test")
    assert status == 1 and "unknown stage 'test', expected one of: build tests-cpu tests-cuda" in output and not calls
