"""Links of the libraries: the shared libstdc++ with any compiler, nothing exported, and exceptions that PyTorch knows."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from build_helpers import KERNEL_LIBRARIES, LIBRARIES, OPS, ROOT, exported_symbols, needed_libraries
from torch.autograd import forward_ad

import build_linking
import ssm_kernels

SOURCE = """
#include <sstream>
#include <vector>

__attribute__((visibility("default"))) std::vector<std::string> format(long number) {
  std::ostringstream stream;
  stream << number << ' ' << 0.5;
  return std::vector<std::string>(3, stream.str());
}
"""


def compile_and_link(compiler: str | Path, library: Path, arguments: list[str]) -> None:
    source = library.with_suffix(".cpp")
    source.write_text(SOURCE)
    command = [compiler, "-O2", "-fPIC", "-shared", "-fvisibility=hidden", source, "-o", library, *arguments]
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture(params=["g++", "clang++"])
def static_compiler(request, tmp_path) -> Path:
    """A compiler that finds libstdc++.a before libstdc++.so, through a wrapper, as some clusters install theirs."""
    command = shutil.which(request.param)
    if command is None:
        pytest.skip(f"{request.param} is not installed")
    found = subprocess.run([command, "-print-file-name=libstdc++.a"], capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"{request.param} has no libstdc++.a")
    folder = tmp_path / "static"
    folder.mkdir()
    (folder / "libstdc++.a").symlink_to(found)
    wrapper = tmp_path / f"wrapped-{request.param}"
    wrapper.write_text(f'#!/bin/sh\nexec {command} -B{folder} -L{folder} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


# The library that was built


def test_library_exports_nothing():
    assert build_linking.read_shared_library(OPS).exported == [] == exported_symbols(OPS)


@pytest.mark.parametrize("library", KERNEL_LIBRARIES, ids=lambda library: library.name)
def test_kernel_library_exports_its_boundary_alone(library):
    """The functions marked SSM_KERNEL_API: of the CPU, the kernels of each operator and instruction set."""
    exported = build_linking.read_shared_library(library).exported
    kind = library.stem.removeprefix("libssm_kernels_")
    assert sorted(exported) == sorted(exported_symbols(library)) and f"ssm_kernels_{kind}_abi" in exported
    functions = [name for name in exported if name != f"ssm_kernels_{kind}_abi"]
    questions = r"launch|\d(count_norm|shared_bytes|has_wgmma_kernels|has_mlstm_chunks|complex_bwd_blocks)"
    expected = r"7kernelsEv$" if kind == "cpu" else questions
    assert functions and [name for name in functions if not re.search(expected, name)] == []
    if kind == "cpu":
        built = ssm_kernels.build_info()["cpu_capabilities"]
        kernels = [path for path in (ROOT / "csrc").glob("*/cpu/*kernel.cpp") if "& kernels() {" in path.read_text()]
        assert len(functions) == len(kernels) * len(built)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_library_uses_the_shared_libstdcxx(library):
    assert "libstdc++.so.6" in build_linking.read_shared_library(library).needed


def test_exceptions_cross_the_library_that_exports_no_typeinfo():
    """PyTorch's Python bindings catch them by type; two copies of libstdc++ crash at the number in the message."""
    zeros = torch.zeros
    with pytest.raises(ValueError, match=r"expected B .*got \[2, 4, 7\]"):
        ssm_kernels.selective_scan(zeros(2, 3, 5), zeros(2, 3, 5), zeros(3, 4), zeros(2, 4, 7), zeros(2, 4, 5))
    with pytest.raises(RuntimeError) as error:
        ssm_kernels.selective_scan(zeros(2, 3, 5), zeros(2, 3, 5).double(), zeros(3, 4), zeros(2, 4, 5), zeros(2, 4, 5))
    assert type(error.value) is RuntimeError
    state, A = zeros(2, 3, 4), zeros(3, 4)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="selective_state_update"):
        x = forward_ad.make_dual(zeros(2, 3), zeros(2, 3))
        ssm_kernels.selective_state_update(state, x, zeros(2, 3), A, zeros(2, 4), zeros(2, 4))


# Checks of the build


def test_reader_agrees_with_binutils():
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    read = build_linking.read_shared_library(library)
    assert sorted(read.exported) == sorted(exported_symbols(library)) and read.needed == needed_libraries(library)


@pytest.mark.parametrize(
    ("symbol", "is_std"),
    [
        ("_ZNSolsEl", True),  # std::ostream::operator<<(long)
        ("_ZSt4cout", True),
        ("_ZNKSt6locale4nameB5cxx11Ev", True),
        ("_ZTISt9exception", True),
        ("_ZTv0_n24_NSoD1Ev", True),  # a virtual thunk of std::ostream's destructor
        ("_ZGVNSt7__cxx118numpunctIcE2idE", True),
        ("_ZNSt6vectorIN2at6TensorESaIS1_EED1Ev", True),
        ("_ZN3c105ErrorC1ESt6string", False),
        ("_Z6formatRSt6vectorIiSaIiEE", False),
        ("PyInit_module", False),
    ],
)
def test_symbols_of_std_are_known_by_their_mangled_names(symbol, is_std):
    assert (build_linking.STD_SYMBOL.match(symbol) is not None) == is_std


def test_shared_libstdcxx_is_linked_where_the_compiler_prefers_the_static_one(static_compiler, tmp_path):
    library = tmp_path / "library.so"
    compile_and_link(static_compiler, library, build_linking.link_arguments("ops.exports"))
    assert build_linking.read_shared_library(library).needed[0] == "libstdc++.so.6"
    build_linking.check_library(library, str(static_compiler))
    assert library.exists()


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        ([], r"it exports \d{3,} symbols of std::"),
        (["-Wl,--version-script"], "it was linked statically"),
        (["-l:libstdc"], r"it exports \d+ symbols of std::"),
    ],
    ids=["neither", "static but hidden", "shared but visible"],
)
def test_build_stops_at_a_library_with_a_copy_of_libstdcxx(static_compiler, tmp_path, keep, reason):
    """With some of the arguments of the link left out."""
    library = tmp_path / "library.so"
    arguments = [argument for argument in build_linking.link_arguments("ops.exports") if argument.startswith(tuple(keep))]
    assert len(arguments) == len(keep)
    compile_and_link(static_compiler, library, arguments)
    with pytest.raises(
        SystemExit, match=rf"expected library\.so to use the shared libstdc\+\+\.so\.6.*{reason}.*{static_compiler}"
    ):
        build_linking.check_library(library, str(static_compiler))
    assert not library.exists()


def test_file_that_is_no_library_stops(tmp_path):
    (tmp_path / "library.so").write_bytes(b"INPUT(-lc)")
    with pytest.raises(SystemExit, match=r"expected .*library\.so to be a 64-bit ELF library"):
        build_linking.check_library(tmp_path / "library.so", "c++")
