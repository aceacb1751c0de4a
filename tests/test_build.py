"""Build and packaging: what the libraries link to, what the package says of itself, and what stops a build or an import."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import ssm_kernels
from ssm_kernels import _build_info
from ssm_kernels._build_info import check_torch, runs_on

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(ssm_kernels.__file__).parent
OPS = PACKAGE / "_ops.abi3.so"
BUILD_COMMAND = re.compile(r"pip install --no-deps (-e|--force-reinstall) ")


def load_backend():
    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "build_backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_backend = load_backend()
Torch, Toolkit, CudaPlan = build_backend.Torch, build_backend.Toolkit, build_backend.CudaPlan


def run_python(*arguments, env=None, cwd=None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **(env or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )


def binutil(*command) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} (binutils) is not installed")
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout


def needed_libraries(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.*)\]", binutil("readelf", "-d", library))


# Libraries


def test_operators_hold_no_python_symbol():
    symbols = [line.split()[-1] for line in binutil("nm", "-D", OPS).splitlines()]
    assert any("TORCH_LIBRARY" in s or "torch7Library" in s for s in symbols), "nm shows nothing of torch: wrong file?"
    assert [s for s in symbols if re.match(r"_?Py", s)] == []
    assert not [lib for lib in needed_libraries(OPS) if "python" in lib]


def test_python_module_needs_no_torch():
    (module,) = (Path(path) for path in [sys.modules["ssm_kernels._C"].__file__])
    assert not [lib for lib in needed_libraries(module) if re.search(r"torch|c10", lib)]


def test_cuda_runtime_is_needed_only_if_cuda_kernels_were_built():
    has_runtime = any("cudart" in lib for lib in needed_libraries(OPS))
    assert has_runtime == (ssm_kernels.build_info()["cuda"] is not None)


def test_one_openmp_runtime():
    """A second one would keep a second pool of threads."""
    if not ssm_kernels.build_info()["compiler"].startswith("GCC"):
        pytest.skip("Clang's OpenMP runtime is not the one that PyTorch brings")
    script = (
        "import ssm_kernels, re; maps = open('/proc/self/maps').read(); "
        r"print(len(set(re.findall(r'\S*/lib(?:g|i|)omp5?[-.]\S*', maps))))"
    )
    assert run_python("-c", script).stdout.strip() == "1"


# C++ programs


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """examples/libtorch, built as its page says."""
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    toolkit = build_backend.find_toolkit(sys.path)
    if torch.version.cuda and toolkit is None:
        pytest.skip("find_package(Torch) wants a CUDA PyTorch's toolkit")
    folder = tmp_path_factory.mktemp("libtorch")
    env = os.environ | ({"CUDACXX": str(toolkit.home / "bin" / "nvcc")} if torch.version.cuda else {})
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (["-S", ROOT / "examples" / "libtorch", "-B", folder, prefix], ["--build", folder]):
        result = subprocess.run(["cmake", *command], env=env, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stdout + result.stderr
    return folder / "fit"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_cpp_program_trains(program, where):
    result = subprocess.run([program, OPS, where], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", result.stdout)]
    assert len(losses) == 6 and losses[-1] <= losses[0] / 100


@pytest.mark.slow
def test_cpp_program_needs_no_python(program):
    libraries = needed_libraries(program)
    assert any("torch" in library for library in libraries) and not any("python" in library for library in libraries)


@pytest.mark.slow
def test_cpp_program_without_its_library(program):
    result = subprocess.run([program, "nowhere.so"], capture_output=True, text=True)
    assert result.returncode == 2 and "nowhere.so" in result.stderr


# What the package says of itself


@pytest.mark.skipif(ssm_kernels.build_info()["cuda"] is not None, reason="built with CUDA kernels")
@pytest.mark.parametrize("name", ["_selective_scan_fwd", "_selective_scan_bwd", "selective_state_update"])
def test_cuda_tensors_without_cuda_kernels(name):
    """What stands in for the kernels; the dispatch key leads CPU tensors there too, so that this takes no GPU."""
    operator = getattr(torch.ops.ssm_kernels, name).default
    values = {"Tensor": torch.zeros(1, 1, 1), "bool": False, "str": "zoh", "List[bool]": [True] * 9}
    arguments = [values.get(str(a.type)) for a in operator._schema.arguments if not a.kwarg_only]
    with pytest.raises(NotImplementedError, match=r"built without CUDA kernels, got CUDA tensors") as error:
        operator.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *arguments)
    assert str(error.value).startswith(f"{name.removeprefix('_').removesuffix('_fwd').removesuffix('_bwd')}: ")
    assert f"`{build_backend.rebuild_with_cuda('.')}`" in str(error.value)


def test_build_info():
    info = ssm_kernels.build_info()
    assert info["torch"] == torch.__version__
    declared = re.search(r'(?m)^version = "(.*)"$', (ROOT / "pyproject.toml").read_text())[1]
    assert info["version"] == ssm_kernels.__version__ == declared
    assert re.fullmatch(r"(GCC|Clang) \d+\.\d+.*", info["compiler"])
    assert info["cpu_capabilities"][0] == "DEFAULT"
    assert (info["cuda"] is None) == (info["architectures"] == ())
    assert json.loads(json.dumps(info))["discretizations"] == list(ssm_kernels.discretizations)


def test_discretizations_are_those_of_the_reference():
    assert ssm_kernels.discretizations == tuple(ssm_kernels.reference.DISCRETIZATIONS)
    assert sys.modules["ssm_kernels._C"].discretization_aliases == ssm_kernels.reference.ALIASES


def test_command_line_report(monkeypatch):
    monkeypatch.delenv("SSM_KERNELS_CUDA", raising=False)
    result = run_python("-m", "ssm_kernels")
    assert result.returncode == 0, result.stderr
    info = ssm_kernels.build_info()
    for expected in (info["version"], info["torch"], info["compiler"], *info["discretizations"], str(torch.get_num_threads())):
        assert expected in result.stdout
    if info["cuda"] is None and torch.version.cuda is not None:
        (hint,) = (line for line in result.stdout.splitlines() if line.startswith("CUDA kernels were not built"))
        if (PACKAGE.parent / "setup.py").exists():
            assert hint.endswith(build_backend.rebuild_with_cuda(PACKAGE.parent))


def test_documentation_has_the_command_that_builds_cuda_kernels():
    for page in ("README.md", "docs/installation.md"):
        assert build_backend.rebuild_with_cuda(".") in (ROOT / page).read_text()
    source = (ROOT / "csrc" / "torch" / "missing_cuda.cpp").read_text()
    assert build_backend.rebuild_with_cuda(".") in source


@pytest.mark.parametrize("exported, variable", [(None, "FORCE_CUDA"), ("0", "SSM_KERNELS_CUDA")])
def test_command_that_rebuilds_overrides_an_exported_variable(monkeypatch, exported, variable):
    monkeypatch.delenv("SSM_KERNELS_CUDA", raising=False)
    if exported is not None:
        monkeypatch.setenv("SSM_KERNELS_CUDA", exported)
    assert _build_info.rebuild_with_cuda_command().startswith(f"{variable}=1 pip install ")


@pytest.mark.parametrize(
    ("architectures", "capability", "expected"),
    [
        (("9.0a",), (9, 0), True),
        (("9.0a",), (9, 1), False),
        (("9.0a",), (10, 0), False),
        (("8.0",), (8, 9), True),
        (("8.6",), (8, 0), False),
        (("8.0",), (9, 0), False),
        (("8.0+PTX",), (9, 0), True),
        (("8.0+PTX", "9.0a"), (12, 0), True),
        (("8.0+PTX", "9.0a"), (7, 5), False),
        ((), (9, 0), False),
    ],
)
def test_architecture_covers_device(architectures, capability, expected):
    assert runs_on(architectures, capability) == expected


# Import


def test_import_needs_no_gpu_nvcc_or_triton():
    script = """
import sys
sys.modules["triton"] = None
import torch, ssm_kernels
x = torch.ones(1, 2, 3)
ssm_kernels.selective_scan(x, x, -torch.ones(2, 4), torch.ones(2, 4), torch.ones(2, 4))
"""
    result = run_python("-c", script, env={"PATH": "/nonexistent", "CUDA_HOME": "/nonexistent", "CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 0, result.stderr


def test_other_torch_is_an_import_error():
    script = """
import torch
torch.__version__ = "2.99.0+cu990"
try:
    import ssm_kernels
except ImportError as error:
    print(error)
    print("_ops" in open("/proc/self/maps").read())
"""
    message, is_loaded = run_python("-c", script).stdout.splitlines()
    assert "2.99.0+cu990" in message and torch.__version__ in message
    assert BUILD_COMMAND.search(message)
    assert is_loaded == "False", "the operators were loaded before the versions were compared"


def test_rebuild_command_names_the_sources_of_an_editable_install(monkeypatch, tmp_path):
    (tmp_path / "setup.py").touch()
    monkeypatch.setattr(_build_info, "PACKAGE", tmp_path / "ssm_kernels")
    with pytest.raises(ImportError, match=re.escape(f"pip install --no-deps -e {tmp_path}")):
        check_torch("2.11.0", "2.12.0")


@pytest.mark.parametrize("state", ["nothing built", "no operators", "unloadable operators"])
def test_incomplete_build_is_an_import_error(tmp_path, state):
    copy = tmp_path / "ssm_kernels"
    copy.mkdir()
    for source in PACKAGE.glob("*.py"):
        shutil.copy(source, copy)
    if state != "nothing built":
        shutil.copy(sys.modules["ssm_kernels._C"].__file__, copy)
    if state == "unloadable operators":
        (copy / "_ops.abi3.so").write_bytes(b"not a library")
    result = run_python("-c", "import ssm_kernels", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode != 0
    message = result.stderr.splitlines()[-1]
    assert message.startswith("ImportError: ") and BUILD_COMMAND.search(message)
    assert str(copy) in message


# What stops a build


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
    pytest.importorskip("setuptools", reason="setup.py needs setuptools")
    result = run_python("setup.py", "build_ext", env={variable: value}, cwd=ROOT)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr and "running build_ext" not in result.stdout
    (message,) = (line for line in result.stderr.splitlines() if line.startswith("ssm_kernels: "))
    assert match in message


def test_editable_install_is_a_path_that_type_checkers_follow(tmp_path):
    """setuptools' own default for this layout is an import hook, ``__editable___..._finder``."""
    pytest.importorskip("setuptools", reason="builds with setuptools")
    source = tmp_path / "source"
    shutil.copytree(PACKAGE, source / "ssm_kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("benchmarks", "docs", "tests"):  # other folders make the layout ambiguous
        (source / name).mkdir()
    script = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    result = run_python("-c", script, cwd=source)
    assert result.returncode == 0, result.stderr
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        files = [name for name in wheel.namelist() if ".dist-info/" not in name]
        assert files == ["__editable__.ssm_kernels-" + ssm_kernels.__version__ + ".pth"]
        assert wheel.read(files[0]).decode().strip() == str(source)


# Units of the host's files


def test_every_host_file_is_in_the_unit_of_its_operator():
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.cpp")]
    units = build_backend.host_units(files)
    operators = {path.parent.name for path in (ROOT / "csrc").glob("*/instantiations")}
    assert operators < set(units) and set(units).isdisjoint(build_backend.SHARED_FOLDERS[:-1])
    included = [f"csrc/{name}" for text in units.values() for name in re.findall(r'^#include "(.+)"$', text, re.MULTILINE)]
    assert sorted(included) == sorted(files)
    for operator in operators:
        assert all(line.startswith(f'#include "{operator}/') for line in units[operator].splitlines())


def test_units_take_nested_folders_and_do_not_depend_on_the_order():
    files = ["csrc/ssd/ssd_op.cpp", "csrc/ssd/cuda/ssd_fwd.cpp", "csrc/torch/checks.cpp", "csrc/registration.cpp"]
    expected = {
        "ssd": '#include "ssd/cuda/ssd_fwd.cpp"\n#include "ssd/ssd_op.cpp"\n',
        "torch": '#include "registration.cpp"\n#include "torch/checks.cpp"\n',
    }
    assert build_backend.host_units(files) == build_backend.host_units(files[::-1]) == expected


# What CI checks of a build


def test_times_in_the_documentation_are_those_that_ci_allows():
    """README: the two commands, in minutes; docs/installation.md: the clean builds, as measured and as limited."""
    ci = (ROOT / ".ci" / "run").read_text()
    commands = [int(seconds) for seconds in re.findall(r'within (\d+) eval "\$\{commands\[[01]\]\}"', ci)]
    minutes = re.findall(r"under\s+(\d+)\s+minutes", (ROOT / "README.md").read_text())
    assert commands == [60 * int(number) for number in minutes] and len(commands) == 2
    builds = re.findall(r"SSM_KERNELS_CUDA=[01] (?:.* )?within (\d+) build", ci)
    rows = re.findall(
        r"^\| CPU .*kernels.* \| (\d+) \| (\d+) \|$", (ROOT / "docs" / "installation.md").read_text(), re.MULTILINE
    )
    assert [limit for _, limit in rows] == builds and len(builds) == 2
    assert all(int(measured) <= int(limit) for measured, limit in rows)


ALLOWED_TO_SPILL = "_ZN11ssm_kernels3ssd21ssd_bwd_chunks_kernelI6__halfLi128ENS0_12WarpProductsEEEvNS0_12SsdBwdParamsE"


@pytest.mark.parametrize("name, spills, status", [("_Z6kernelv", 0, 0), ("_Z6kernelv", 8, 1), (ALLOWED_TO_SPILL, 8, 1)])
def test_check_of_kernels(tmp_path, name, spills, status):
    report = (
        f"ptxas info    : Compiling entry function '{name}' for 'sm_90a'\n"
        f"ptxas info    : Function properties for {name}\n"
        "    16 bytes stack frame, {0} bytes spill stores, {0} bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size\n"
    )
    log = tmp_path / "build.log"
    warning = f"ptxas warning : Registers are spilled to local memory in function '{name}', {{0}} bytes spill stores\n"
    log.write_text(
        report.format(0) + "[2/2] another source\n" + report.format(spills) + (warning.format(spills) if spills else "")
    )
    result = run_python(ROOT / "scripts" / "check_kernels.py", log)
    assert result.returncode == status, result.stderr
    assert [line.split()[:4] for line in result.stdout.splitlines()[1:3]] == [
        ["sm_90a", "40", "16", "0"],
        ["sm_90a", "40", "16", str(2 * spills)],
    ]


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="needs c++filt")
@pytest.mark.parametrize("spills, status", [(100, 0), (104, 1)])
def test_check_of_kernels_that_may_spill(tmp_path, spills, status):
    log = tmp_path / "build.log"
    log.write_text(
        f"ptxas info    : Compiling entry function '{ALLOWED_TO_SPILL}' for 'sm_80'\n"
        f"    16 bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers, 16 bytes cumulative stack size\n"
    )
    result = run_python(ROOT / "scripts" / "check_kernels.py", log)
    assert result.returncode == status, result.stdout + result.stderr


def test_check_of_kernels_where_none_was_built(tmp_path):
    log = tmp_path / "build.log"
    log.write_text("[1/1] c++ -c registration.cpp\n")
    assert run_python(ROOT / "scripts" / "check_kernels.py", log).returncode == 1
