"""build_backend.py: errors that stop a build, the choice of CUDA kernels, build requirements, and translation units."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from build_helpers import ROOT, run_python

import build_backend
from build_backend import Toolkit, Torch

# Errors that stop a build, its plan and its requirements


def stops(match: str):
    return pytest.raises(SystemExit, match=match)


def make_executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def make_toolkit(home: Path, release: str) -> Path:
    make_executable(home / "bin" / "nvcc", f'echo "Cuda compilation tools, release {release}, V{release}.88"')
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime_api.h").touch()
    return home


def test_no_compiler_stops(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    with stops(r"no C\+\+ compiler: '/nonexistent/g\+\+'.*CXX"):
        build_backend.find_compiler()


@pytest.mark.parametrize(
    ("macros", "name"),
    [
        ({"__GNUC__": 9, "__GNUC_MINOR__": 4}, "GCC 9.4"),
        ({"__GNUC__": 4, "__clang_major__": 11, "__clang_minor__": 0}, "Clang 11.0"),
    ],
)
def test_old_compiler_stops(monkeypatch, tmp_path, macros, name):
    lines = "\n".join(f"#define {macro} {value}" for macro, value in macros.items())
    monkeypatch.setenv("CXX", str(make_executable(tmp_path / "c++", f"cat <<'END'\n{lines}\nEND")))
    with stops(rf"{name}, too old.*GCC >= 11 or Clang >= 14"):
        build_backend.find_compiler()


def test_broken_compiler_stops(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(make_executable(tmp_path / "c++", "echo 'cannot execute cc1plus' >&2; exit 1")))
    with stops("does not work.*\n?.*cannot execute cc1plus"):
        build_backend.find_compiler()


def test_toolkit_is_the_one_cuda_home_names(monkeypatch, tmp_path):
    home = make_toolkit(tmp_path / "cuda", "12.4")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert build_backend.find_toolkit([]) == Toolkit(home, "12.4", False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    assert build_backend.find_toolkit([]) is None
    packaged = make_toolkit(tmp_path / "site-packages" / "nvidia" / "cu13", "13.0")
    assert build_backend.find_toolkit([str(tmp_path / "site-packages")]) == Toolkit(packaged, "13.0", True)


def test_nvcc_script_without_headers_is_no_toolkit(monkeypatch, tmp_path):
    make_executable(tmp_path / "bin" / "nvcc", "exec /somewhere/nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build_backend.find_toolkit([]) is None


def test_architecture_unknown_to_nvcc_stops(tmp_path):
    make_executable(tmp_path / "bin" / "nvcc", "echo compute_80; echo compute_90; echo compute_100")
    toolkit = Toolkit(tmp_path, "13.0", False)
    build_backend.check_architectures("8.0;8.0+PTX;9.0a;10.0;Hopper", toolkit)
    for name in ("7.0", "9.0b", "90"):
        with stops(f"names '{name}', for which nvcc 13.0 does not compile; it does for 8.0, 9.0, 10.0"):
            build_backend.check_architectures(f"8.0;{name}", toolkit)


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("9.0", "9.0a"),
        ("8.0;9.0+PTX", "8.0;9.0a+PTX"),
        ("Hopper", "9.0a+PTX"),
        ("8.0+PTX;9.0a", "8.0+PTX;9.0a"),
        ("8.9;10.0;12.0+PTX", "8.9;10.0;12.0+PTX"),
    ],
)
def test_hopper_is_built_with_its_own_instructions(listed, expected, capsys):
    assert build_backend.complete_architectures(listed) == expected
    lines = capsys.readouterr().out
    assert ("need 9.0a" in lines) == (listed != expected) and ("8.0+PTX" in lines) == ("9.0a+PTX" in expected)


CPU_TORCH, TORCH_12, TORCH_13 = Torch("2.11.0+cpu", None), Torch("2.11.0+cu128", "12.8"), Torch("2.11.0+cu130", "13.0")
NVCC_12, NVCC_13 = Toolkit(Path("/cuda"), "12.4", False), Toolkit(Path("/cuda"), "13.2", False)


@pytest.mark.parametrize(
    ("torch_found", "toolkit", "request_", "has_driver", "expected"),
    [
        (CPU_TORCH, NVCC_13, None, True, "no"),
        (CPU_TORCH, None, None, False, "no"),
        (CPU_TORCH, NVCC_13, "0", True, "no"),
        (TORCH_13, NVCC_13, None, True, "yes"),
        (TORCH_13, NVCC_13, None, False, "no"),
        (TORCH_13, NVCC_13, "1", False, "yes"),
        (TORCH_13, NVCC_12, None, False, "no"),
        (TORCH_13, NVCC_13, "0", True, "no"),
        (TORCH_13, NVCC_12, "0", True, "no"),
        (TORCH_12, NVCC_12, None, True, "yes"),
        (TORCH_13, None, None, True, "fetch"),
        (TORCH_13, None, "1", False, "fetch"),
        (TORCH_13, None, None, False, "no"),
        (TORCH_12, None, None, True, "no"),
        (None, None, None, False, "no"),
        (None, None, None, True, "fetch"),
        (None, NVCC_13, None, False, "no"),
        (None, NVCC_13, None, True, "yes"),
        (None, NVCC_13, "1", False, "yes"),
    ],
)
def test_cuda_plan(torch_found, toolkit, request_, has_driver, expected):
    plan = build_backend.plan_cuda(torch_found, toolkit, request_, has_driver)
    assert plan.decision == expected
    assert bool(plan.reason) == (expected == "no" and torch_found is not CPU_TORCH)


@pytest.mark.parametrize(
    ("torch_found", "toolkit", "request_", "has_driver", "reason", "variable"),
    [
        (TORCH_13, NVCC_13, None, False, "this machine has no NVIDIA driver", "FORCE_CUDA"),
        (TORCH_13, NVCC_13, "0", True, "SSM_KERNELS_CUDA=0 is set", "SSM_KERNELS_CUDA"),
        (TORCH_12, None, None, True, "no nvcc was found, and CUDA 12.8 has none as a Python package", "FORCE_CUDA"),
    ],
)
def test_build_without_cuda_kernels_says_why_and_how_to_build_them(
    torch_found, toolkit, request_, has_driver, reason, variable
):
    notice = build_backend.cpu_only_notice(
        build_backend.plan_cuda(torch_found, toolkit, request_, has_driver), Path("/sources")
    )
    assert notice.startswith("ssm_kernels: CPU kernels only were built: " + reason) and "\n" not in notice
    assert notice.endswith(f": {variable}=1 pip install --no-deps -e /sources")


@pytest.mark.parametrize(
    ("torch_found", "toolkit", "request_", "match"),
    [
        (TORCH_13, NVCC_12, None, r"/cuda/bin/nvcc is CUDA 12\.4, but torch 2\.11\.0\+cu130 is .* CUDA 13\.0.*CUDA_HOME"),
        (CPU_TORCH, NVCC_13, "1", r"FORCE_CUDA=1\), but torch 2\.11\.0\+cpu is a build without CUDA"),
        (TORCH_12, None, "1", r"FORCE_CUDA=1\), but no nvcc was found, and CUDA 12\.8 has none as a Python package"),
    ],
)
def test_impossible_cuda_plan_stops(torch_found, toolkit, request_, match):
    with stops(match):
        build_backend.plan_cuda(torch_found, toolkit, request_, has_driver=True)


@pytest.mark.parametrize(
    ("own", "force", "expected"),
    [
        (None, None, None),
        ("", "", None),
        (None, "0", None),
        (None, "1", "1"),
        ("1", None, "1"),
        ("0", None, "0"),
        ("0", "1", "0"),
        ("1", "0", "1"),
    ],
)
def test_own_variable_overrides_the_one_that_all_packages_read(monkeypatch, own, force, expected):
    for variable, value in {"SSM_KERNELS_CUDA": own, "FORCE_CUDA": force}.items():
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value)
    assert build_backend.cuda_request() == expected


@pytest.mark.parametrize("variable", ["SSM_KERNELS_CUDA", "FORCE_CUDA"])
def test_misspelt_request_stops(monkeypatch, variable):
    monkeypatch.setenv(variable, "yes")
    with stops(f"expected {variable} to be 0 or 1, got 'yes'"):
        build_backend.cuda_request()


@pytest.mark.parametrize("folder", ["pip-install-x1/ssm_kernels_2", "pip-req-build-x1", "build-via-sdist-x1/ssm_kernels-0.1.0"])
def test_messages_name_no_folder_that_pip_deletes(folder):
    plan = build_backend.CudaPlan("no", "this machine has no NVIDIA driver")
    notice = build_backend.cpu_only_notice(plan, Path("/tmp") / folder)
    assert folder not in notice and "FORCE_CUDA=1" in notice and "--no-cache-dir --force-reinstall" in notice
    assert build_backend.cpu_only_notice(plan, Path("/tmp/my sources")).endswith(" -e '/tmp/my sources'")


@pytest.mark.parametrize(("script", "expected"), [("echo 'GPU 0: an A100'", True), ("echo 'no driver'; exit 9", False)])
def test_driver_is_one_that_nvidia_smi_reaches(monkeypatch, tmp_path, script, expected):
    monkeypatch.setattr(build_backend, "DRIVER_FILES", (str(tmp_path / "nvidiactl"),))
    make_executable(tmp_path / "nvidia-smi", script)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert build_backend.has_nvidia_driver() == expected
    (tmp_path / "nvidiactl").touch()
    assert build_backend.has_nvidia_driver()


def make_torch(folder: Path, version: str, cuda: str | None) -> Path:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "torch" / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\n")
    return folder


@pytest.mark.parametrize(
    ("cuda", "request_", "expected"),
    [("13.0", "1", ["cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]==13.0.*"]), ("13.0", "0", []), (None, "0", [])],
)
def test_build_requires_no_torch_where_there_is_one(monkeypatch, tmp_path, cuda, request_, expected):
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    monkeypatch.setenv("SSM_KERNELS_CUDA", request_)
    monkeypatch.setattr(sys, "path", [str(make_torch(tmp_path, "2.11.0", cuda))])
    monkeypatch.setattr(build_backend, "environment_paths", lambda: [])
    assert build_backend.build_requirements() == expected


@pytest.mark.parametrize(
    ("version", "stops_at"),
    [("2.10.0+cu128", True), ("1.13.1", True), ("2.11.0", False), ("2.11.0a0+nv", False), ("3.0.0", False)],
)
def test_torch_below_the_bound_stops_before_the_build(monkeypatch, tmp_path, version, stops_at):
    monkeypatch.setenv("SSM_KERNELS_CUDA", "0")
    monkeypatch.setattr(sys, "path", [str(make_torch(tmp_path, version, None))])
    monkeypatch.setattr(build_backend, "environment_paths", lambda: [])
    if stops_at:
        with stops(rf"expected torch>=2\.11, got torch {re.escape(version)} in this environment: pip install 'torch>=2\.11'"):
            build_backend.get_requires_for_build_wheel()
    else:
        assert build_backend.get_requires_for_build_wheel() == []


def pip_chooses(**versions: str) -> str:
    return json.dumps({"install": [{"metadata": {"name": k.replace("_", "-"), "version": v}} for k, v in versions.items()]})


@pytest.mark.parametrize(
    ("request_", "report", "expected"),
    [
        ("0", None, ["torch>=2.11"]),
        ("1", None, ["torch>=2.11", "cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]"]),
        (
            "1",
            pip_chooses(torch="2.15.0", cuda_toolkit="13.2.2", numpy="2.4.6"),
            ["torch==2.15.0", "cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]==13.2.2"],
        ),
        ("1", pip_chooses(torch="2.11.0+cpu"), ["torch==2.11.0+cpu"]),
    ],
)
def test_build_requires_torch_where_there_is_none(monkeypatch, request_, report, expected):
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    monkeypatch.setenv("SSM_KERNELS_CUDA", request_)
    monkeypatch.setattr(sys, "path", [])

    def run_in_environment(*arguments):
        fails = "pip" in arguments and report is None
        return subprocess.CompletedProcess(arguments, int(fails), stdout=report if "pip" in arguments else "")

    monkeypatch.setattr(build_backend, "run_in_environment", run_in_environment)
    assert build_backend.build_requirements() == expected


def test_environment_is_seen_through_build_isolation(monkeypatch, tmp_path):
    """pip isolates by PYTHONPATH: a child without it must find this environment's torch."""
    monkeypatch.setenv("PYTHONPATH", str(make_torch(tmp_path, "0.0.0", None)))
    assert build_backend.find_torch(build_backend.environment_paths()).version == torch.__version__


@pytest.mark.parametrize(
    ("variable", "value", "match"),
    [
        ("CXX", "/nonexistent/g++", "no C++ compiler"),
        ("SSM_KERNELS_CUDA", "2", "expected SSM_KERNELS_CUDA to be 0 or 1, got '2'"),
    ],
)
def test_setup_stops_with_one_message(variable, value, match):
    pytest.importorskip("setuptools", minversion="77", reason="setup.py needs setuptools")
    result = run_python("setup.py", "build_ext", env={variable: value}, cwd=ROOT)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr and "running build_ext" not in result.stdout
    (message,) = (line for line in result.stderr.splitlines() if line.startswith("ssm_kernels: "))
    assert match in message


# Files that are compiled together


@pytest.mark.parametrize("name, pattern", [("host", "*.cpp"), ("kernels", "*kernel.cpp")])
def test_every_file_is_in_one_unit_with_the_files_of_its_operator(name, pattern):
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob(pattern)]
    units = build_backend.join_files(files, name)
    assert units.keys() == {f"{name}_{number}" for number in range(1, build_backend.UNITS[name] + 1)}
    included = {name: re.findall(r'^#include "(.+)"$', text, re.MULTILINE) for name, text in units.items()}
    assert sorted(f"csrc/{path}" for paths in included.values() for path in paths) == sorted(files)
    operators = {Path(file).parts[1] for file in files if len(Path(file).parts) > 2} - {*build_backend.SHARED_FOLDERS}
    assert operators
    for operator in operators:
        assert sum(any(path.startswith(f"{operator}/") for path in paths) for paths in included.values()) == 1


def test_units_are_of_similar_size_and_do_not_depend_on_the_order(tmp_path, monkeypatch):
    monkeypatch.setattr(build_backend, "ROOT", tmp_path)
    sizes = {"a/op.cpp": 50, "b/cuda/fwd.cpp": 20, "b/op.cpp": 50, "c/op.cpp": 25, "torch/checks.cpp": 3, "registration.cpp": 7}
    for name, size in sizes.items():
        path = tmp_path / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" " * size)
    files = [f"csrc/{name}" for name in sizes]
    expected = {
        "host_1": '#include "b/cuda/fwd.cpp"\n#include "b/op.cpp"\n#include "registration.cpp"\n#include "torch/checks.cpp"\n',
        "host_2": '#include "a/op.cpp"\n#include "c/op.cpp"\n',
    }
    assert build_backend.join_files(files, "host") == build_backend.join_files(files[::-1], "host") == expected
    assert build_backend.join_files(files[:1], "host") == {"host_1": '#include "a/op.cpp"\n'}
