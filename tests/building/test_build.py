"""The built package: its libraries, build information, imports, editable installs, and the checks of CI."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from build_helpers import (
    CPU_LIBRARY,
    CUDA_LIBRARY,
    FACTS,
    KERNEL_LIBRARIES,
    LIBRARIES,
    OPS,
    PACKAGE,
    ROOT,
    binutil,
    needed_libraries,
    run_python,
)
from recurrence_helpers import RECURRENCES

import build_backend
import ssm_kernels
from ssm_kernels import _rebuild
from ssm_kernels._build_info import check_torch, runs_on
from ssm_kernels._recurrences import recurrences

BUILD_COMMAND = re.compile(r"pip install --no-deps (--no-cache-dir --force-reinstall|-e) ")


@pytest.fixture(scope="module")
def bare_process() -> subprocess.CompletedProcess:
    """A call of an operator without GPU, nvcc and Triton in a process that prints the number of its OpenMP runtimes."""
    script = r"""
import re, sys
sys.modules["triton"] = None
import torch, ssm_kernels
x = torch.ones(1, 2, 3)
ssm_kernels.selective_scan(x, x, -torch.ones(2, 4), torch.ones(2, 4), torch.ones(2, 4))
print(len(set(re.findall(r"\S*/lib(?:g|i|)omp5?[-.]\S*", open("/proc/self/maps").read()))))
"""
    return run_python("-c", script, env={"PATH": "/nonexistent", "CUDA_HOME": "/nonexistent", "CUDA_VISIBLE_DEVICES": ""})


# Libraries


def test_operators_hold_no_python_symbol():
    symbols = [line.split()[-1] for line in binutil("nm", "-D", OPS).splitlines()]
    assert any("TORCH_LIBRARY" in s or "torch7Library" in s for s in symbols), "nm shows nothing of torch: wrong file?"
    for library in LIBRARIES:
        symbols = [line.split()[-1] for line in binutil("nm", "-D", library).splitlines()]
        assert [s for s in symbols if re.match(r"_?Py", s)] == []
        assert not [lib for lib in needed_libraries(library) if "python" in lib]


@pytest.mark.parametrize("library", KERNEL_LIBRARIES, ids=lambda library: library.name)
def test_kernel_libraries_use_nothing_of_one_version_of_torch(library):
    """They serve every version: of PyTorch's libraries they need Sleef's functions alone, whose names stay."""
    undefined = [line.split()[-1] for line in binutil("nm", "-D", "--undefined-only", library).splitlines()]
    assert [name for name in undefined if re.search(r"c10|2at|5torch|ssm_kernels", name)] == []
    torch_libraries = {lib for lib in needed_libraries(library) if "torch" in lib or "c10" in lib}
    assert torch_libraries <= ({"libtorch_cpu.so"} if library == CPU_LIBRARY else set())
    assert torch.__version__.encode() not in library.read_bytes()


def test_operators_hold_no_kernel_and_find_the_kernel_libraries_in_their_folder():
    assert {library.name for library in KERNEL_LIBRARIES} <= set(needed_libraries(OPS))
    assert re.search(r"R(UN)?PATH\).*\[\$ORIGIN[\]:]", binutil("readelf", "-d", OPS))
    assert ".nv_fatbin" not in binutil("readelf", "-SW", OPS)


def test_messages_name_no_folder_of_the_build_machine(tmp_path):
    """Messages of checks have the paths of source files: those of PyTorch's headers and ours from their roots.

    The binaries of CUDA kernels keep their full paths, by which profilers find the lines of sources (-lineinfo).
    """
    assert b"csrc/" in OPS.read_bytes()
    for library in LIBRARIES:
        host_code = tmp_path / library.name
        binutil("objcopy", "--remove-section=.nv_fatbin", library, host_code)
        contents = host_code.read_bytes()
        for folder in (ROOT, Path(torch.__file__).parents[1]):
            assert f"{folder}/".encode() not in contents


def test_cuda_runtime_is_needed_only_if_cuda_kernels_were_built():
    has_runtime = any("cudart" in lib for library in LIBRARIES for lib in needed_libraries(library))
    assert has_runtime == CUDA_LIBRARY.exists() == (ssm_kernels.build_info()["cuda"] is not None)


def test_one_openmp_runtime(bare_process):
    """A second one would keep a second pool of threads."""
    if not ssm_kernels.build_info()["compiler"].startswith("GCC"):
        pytest.skip("Clang's OpenMP runtime is not the one that PyTorch brings")
    assert bare_process.stdout.strip() == "1"


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


# Build information


@pytest.mark.skipif(ssm_kernels.build_info()["cuda"] is not None, reason="built with CUDA kernels")
@pytest.mark.parametrize("name", ["_selective_scan_fwd", "_selective_scan_bwd", "selective_state_update"])
def test_cuda_tensors_without_cuda_kernels(name):
    """Calls the replacement of the kernels; the dispatch key sends CPU tensors there too, so that the test needs no GPU."""
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
    assert torch.ops.ssm_kernels._discretization_aliases() == ssm_kernels.reference.ALIASES


def test_recurrences_are_those_of_the_reference_and_of_the_tests():
    assert tuple(recurrences) == tuple(ssm_kernels.reference.RECURRENCES) == tuple(RECURRENCES)
    for name, row in recurrences.items():
        expected = RECURRENCES[name]
        assert row.inputs == tuple(expected.inputs)
        assert set(row.broadcast) == set(expected.broadcast)
        assert row.options == tuple(expected.options)
        for operator in (row.scan, row.step, row.summary):
            assert callable(getattr(ssm_kernels, operator)) and hasattr(torch.ops.ssm_kernels, operator)


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
    assert build_backend.rebuild_with_cuda(".") in (ROOT / "docs" / "installation.md").read_text()
    source = (ROOT / "csrc" / "torch" / "arguments.cpp").read_text()
    assert build_backend.rebuild_with_cuda(".") in source


@pytest.mark.parametrize("exported, variable", [(None, "FORCE_CUDA"), ("0", "SSM_KERNELS_CUDA")])
def test_command_that_rebuilds_overrides_an_exported_variable(monkeypatch, exported, variable):
    monkeypatch.delenv("SSM_KERNELS_CUDA", raising=False)
    if exported is not None:
        monkeypatch.setenv("SSM_KERNELS_CUDA", exported)
    assert _rebuild.rebuild_with_cuda_command().startswith(f"{variable}=1 pip install ")


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


def test_import_needs_no_gpu_nvcc_or_triton(bare_process):
    assert bare_process.returncode == 0, bare_process.stderr


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
    sources = tmp_path / "my sources"
    sources.mkdir()
    (sources / "setup.py").touch()
    monkeypatch.setattr(_rebuild, "PACKAGE", sources / "ssm_kernels")
    with pytest.raises(ImportError, match=re.escape(f"pip install --no-deps -e '{sources}';")):
        check_torch("2.11.0", "2.12.0")


def _uv_pip_install() -> str:
    return f"uv pip install --python {shlex.quote(sys.executable)}"


UNKNOWN_SOURCES = ". (in the folder of the sources)"


@pytest.mark.parametrize(
    ("installer", "url", "command"),
    [
        ("pip", {"url": "https://a.org/x", "vcs_info": {"vcs": "git", "commit_id": "1f"}}, "git+https://a.org/x@1f"),
        (
            "pip",
            {"url": "https://a.org/x", "vcs_info": {"vcs": "git", "commit_id": "1f"}, "subdirectory": "y"},
            "'git+https://a.org/x@1f#subdirectory=y'",
        ),
        ("pip", {"url": "https://a.org/ssm_kernels-1.0.tar.gz", "archive_info": {}}, "https://a.org/ssm_kernels-1.0.tar.gz"),
        (
            "pip",
            {"url": "file:///a/ssm_kernels-1.0-py3-none-linux_x86_64.whl", "archive_info": {}},
            UNKNOWN_SOURCES,
        ),
        ("pip", {"url": "file:///nonexistent/folder", "dir_info": {}}, UNKNOWN_SOURCES),
        ("pip", None, "--no-binary ssm_kernels ssm_kernels==1.0"),
        ("uv", {"url": "https://a.org/x", "vcs_info": {"vcs": "git", "commit_id": "1f"}}, "git+https://a.org/x@1f"),
        ("uv", None, "--no-binary ssm_kernels ssm_kernels==1.0"),
        ("uv", {"url": "file:///nonexistent/folder", "dir_info": {}}, UNKNOWN_SOURCES),
    ],
)
def test_rebuild_command_fits_the_installation(monkeypatch, tmp_path, installer, url, command):
    """The command names sources that exist, and not the caches of pip or uv."""
    monkeypatch.setattr(_rebuild, "PACKAGE", tmp_path / "ssm_kernels")
    metadata = tmp_path / "ssm_kernels-1.0+torch2.15.cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ssm_kernels\nVersion: 1.0+torch2.15.cpu\n")
    (metadata / "INSTALLER").write_text(f"{installer}\n")
    if url is not None:
        (metadata / "direct_url.json").write_text(json.dumps(url))
    pip = "pip install --no-deps --no-cache-dir --force-reinstall"
    # An environment of uv has no pip.
    of_torch = "pip install 'torch==2.15.*'" if installer == "pip" else f"{_uv_pip_install()} 'torch==2.15.*'"
    assert _rebuild.remedy("2.15.0+cpu") == (
        f"Rebuild it: {_rebuild.rebuild_command()}; or install the torch that it was built for: {of_torch}"
    )
    if installer == "pip":
        assert _rebuild.rebuild_command() == f"{pip} {command}"
        return
    uv, rebuilds = _uv_pip_install(), "--reinstall-package ssm_kernels"
    tools = "" if command == UNKNOWN_SOURCES else f"{uv} {_rebuild.BUILD_TOOLS} && "
    assert (
        _rebuild.rebuild_command() == f"{tools}{uv}{' --no-build-isolation --no-cache' if tools else ''} {rebuilds} {command}"
    )


def test_rebuild_command_is_of_the_installer_of_an_editable_install(monkeypatch, tmp_path):
    """Beside the sources there are metadata of the build, which no installer wrote."""
    sources, packages = tmp_path / "sources", tmp_path / "site-packages"
    (sources / "ssm_kernels.egg-info").mkdir(parents=True)
    (sources / "setup.py").touch()
    (packages / "ssm_kernels-1.0.dist-info").mkdir(parents=True)
    for file in (sources / "ssm_kernels.egg-info" / "PKG-INFO", packages / "ssm_kernels-1.0.dist-info" / "METADATA"):
        file.write_text("Metadata-Version: 2.1\nName: ssm_kernels\nVersion: 1.0\n")
    (packages / "ssm_kernels-1.0.dist-info" / "INSTALLER").write_text("uv\n")
    monkeypatch.setattr(_rebuild, "PACKAGE", sources / "ssm_kernels")
    monkeypatch.setattr(sys, "path", [str(packages)])
    assert _rebuild.rebuild_command().startswith("uv pip install ") and f" --directory {sources} " in _rebuild.rebuild_command()


def test_rebuild_command_names_the_folder_that_was_installed(monkeypatch, tmp_path):
    """Its library is a copy in site-packages; the folder is still there."""
    (tmp_path / "my sources").mkdir()
    (tmp_path / "my sources" / "pyproject.toml").touch()
    monkeypatch.setattr(_rebuild, "PACKAGE", tmp_path / "ssm_kernels")
    metadata = tmp_path / "ssm_kernels-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ssm_kernels\nVersion: 1.0\n")
    (metadata / "direct_url.json").write_text(json.dumps({"url": (tmp_path / "my sources").as_uri(), "dir_info": {}}))
    assert _rebuild.rebuild_command().endswith(f" --force-reinstall '{tmp_path}/my sources'")
    (metadata / "INSTALLER").write_text("uv\n")
    assert f" --directory '{tmp_path}/my sources' --reinstall-package" in _rebuild.rebuild_command()


REASONS = {
    "nothing built": "missing",
    "no operators": "missing",
    "unloadable operators": "file too short|invalid ELF header",
    "undefined symbol": "undefined symbol: .*absent",
    "no kernels": "libssm_kernels_cpu.so is missing",
    "other kernels": r"is of another build than _ops\.abi3\.so: expected kernel ABI \d+, got 999\.",
    "no kernels of this package": r"expected kernel ABI \d+, got None\.",
}


def test_incomplete_build_is_an_import_error(tmp_path):
    """In one process, in which each copy of the package is imported after the one before has failed."""
    if shutil.which("c++") is None:
        pytest.skip("c++ is not installed")
    for state in REASONS:
        copy = tmp_path / state / "ssm_kernels"
        copy.mkdir(parents=True)
        for source in PACKAGE.glob("*.py"):
            shutil.copy(source, copy)
        for library in KERNEL_LIBRARIES:
            (copy / library.name).symlink_to(library)
    (tmp_path / "nothing built" / "ssm_kernels" / FACTS.name).unlink()
    (tmp_path / "unloadable operators" / "ssm_kernels" / OPS.name).write_bytes(b"not a library")
    (tmp_path / "library.cpp").write_text("void absent_function(); void call() { absent_function(); }")
    library = tmp_path / "undefined symbol" / "ssm_kernels" / OPS.name
    subprocess.run(["c++", "-shared", "-fPIC", tmp_path / "library.cpp", "-o", library], check=True)
    for state, source in (
        ("no kernels", None),
        ("other kernels", 'extern "C" int ssm_kernels_cpu_abi() { return 999; }'),
        ("no kernels of this package", "void function() {}"),
    ):
        (tmp_path / state / "ssm_kernels" / OPS.name).write_bytes(b"not a library")
        library = tmp_path / state / "ssm_kernels" / CPU_LIBRARY.name
        library.unlink()
        if source is not None:
            (tmp_path / "library.cpp").write_text(source)
            subprocess.run(["c++", "-shared", "-fPIC", tmp_path / "library.cpp", "-o", library], check=True)
    script = """
import json, sys
messages = []
for folder in sys.argv[1:]:
    sys.path.insert(0, folder)
    try:
        import ssm_kernels
    except ImportError as error:
        messages.append(str(error))
    else:
        messages.append(f"imported {ssm_kernels.__file__}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "ssm_kernels"]:
        del sys.modules[name]
print(json.dumps(messages))
"""
    result = run_python("-c", script, *(tmp_path / state for state in REASONS), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for (state, reason), message in zip(REASONS.items(), json.loads(result.stdout), strict=True):
        assert "\n" not in message and BUILD_COMMAND.search(message), (state, message)
        assert str(tmp_path / state / "ssm_kernels") in message
        assert re.search(reason, message), (state, message)


# Editable installs


def test_editable_install_is_a_path_that_type_checkers_follow(tmp_path):
    """setuptools' own default for this layout is an import hook, ``__editable___..._finder``."""
    pytest.importorskip("setuptools", minversion="77", reason="builds with setuptools")
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


# Checks of CI


def test_limits_of_ci_fit_into_its_time():
    """A machine half as fast ends in time, and before the time of the workflow; what .ci/run says about both is true."""
    ci = (ROOT / ".ci" / "run").read_text()
    measured = [int(seconds) for seconds in re.findall(r"^(?:\w+=0 )?step (\d+) ", ci, re.MULTILINE)]
    last_minute = int(re.search(r"^last_minute=(\d+)$", ci, re.MULTILINE)[1])
    minutes = round(sum(measured) / 60)
    comment = " ".join(ci[: ci.index("\nset ")].replace("\n#", "").split())
    assert f"all steps take {minutes} minutes" in comment and f"half as fast they take {2 * minutes}" in comment
    assert len(measured) >= 10 and 2 * minutes < last_minute
    # The README's two commands.
    stated = [int(minutes) for minutes in re.findall(r"about (\d+) minutes", (ROOT / "README.md").read_text())]
    assert stated == [round(int(seconds) / 60) for seconds in re.findall(r'^step (\d+) "\$\{commands', ci, re.MULTILINE)]
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert last_minute < int(re.search(r"timeout-minutes: (\d+)", workflow)[1])
    assert len(re.findall(r"\btimeout --", ci)) == 1 and "CCACHE_DISABLE=1" in ci


@pytest.mark.parametrize(
    ("measured", "start", "command", "status", "messages"),
    [
        (9, 0, "true", 0, ["limit    87 s: a step"]),
        (900, 85 * 60, "true", 0, ["limit   180 s: a step"]),
        (900, 89 * 60, "sleep 9", 124, ["took longer than 1 s", "FAILED: a step"]),
        (9, 0, "exit 3", 3, ["FAILED: a step"]),
    ],
)
def test_step_of_ci(measured, start, command, status, messages):
    ci = (ROOT / ".ci" / "run").read_text()
    step = ci[ci.index("last_minute=") : ci.index("# install_extras")]
    script = f'set -eu\n{step}\nSECONDS={start}\nstep {measured} "a step" bash -c "{command}"\necho "${{report[@]}}"'
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert result.returncode == status
    assert [message for message in messages if message not in result.stdout + result.stderr] == []


ALLOWED_TO_SPILL = (
    "_ZN11ssm_kernels3ssd21ssd_bwd_chunks_kernelI6__halfLi128ENS_4cuda7Sm80MmaENS0_16DiscretizedGatesIS2_"
    "EEEEvNT2_9BwdParamsENS3_7chunked13WorkPartitionE"
)


needs_names = pytest.mark.skipif(shutil.which("c++filt") is None, reason="needs c++filt")


@pytest.mark.parametrize(
    "name, architecture, spills, status",
    [
        ("_Z6kernelv", "sm_90a", 0, 0),
        ("_Z6kernelv", "sm_90a", 8, 1),
        (ALLOWED_TO_SPILL, "sm_90a", 8, 1),
        pytest.param(ALLOWED_TO_SPILL, "sm_80", 100, 0, marks=needs_names),
        pytest.param(ALLOWED_TO_SPILL, "sm_80", 104, 1, marks=needs_names),
    ],
)
def test_check_of_kernels(tmp_path, name, architecture, spills, status):
    report = (
        f"ptxas info    : Compiling entry function '{name}' for '{architecture}'\n"
        f"ptxas info    : Function properties for {name}\n"
        "    16 bytes stack frame, {0} bytes spill stores, {0} bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size\n"
    )
    warning = f"ptxas warning : Registers are spilled to local memory in function '{name}', {spills} bytes spill stores\n"
    log = tmp_path / "build.log"
    log.write_text(report.format(0) + "[2/2] another source\n" + report.format(spills) + warning * (spills > 0))
    result = run_python(ROOT / "scripts" / "check_kernels.py", log)
    assert result.returncode == status, result.stdout + result.stderr
    found = [line.split()[:4] for line in result.stdout.splitlines()[1:3]]
    assert found == [[architecture, "40", "16", str(spilled)] for spilled in (0, 2 * spills)]


def test_check_of_kernels_where_none_was_built(tmp_path):
    log = tmp_path / "build.log"
    log.write_text("[1/1] c++ -c registration.cpp\n")
    assert run_python(ROOT / "scripts" / "check_kernels.py", log).returncode == 1
