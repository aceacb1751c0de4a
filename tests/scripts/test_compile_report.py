"""The budget of compile time: the number of CUDA kernels of each operator, and the script that reports it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ssm_kernels

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import compile_report

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = {path.relative_to(ROOT / "csrc").parts[0] for path in (ROOT / "csrc").glob("**/instantiations")}
KERNEL = "_ZN11ssm_kernels3ssd15ssd_some_kernelIfEEvv"


def test_every_operator_declares_its_kernels_and_seconds():
    assert set(compile_report.KERNEL_LIMITS) == set(compile_report.SECONDS) == OPERATORS
    assert sum(compile_report.SECONDS.values()) <= compile_report.ALL_SECONDS


def test_library_keeps_to_the_limits():
    if ssm_kernels.build_info()["cuda"] is None:
        pytest.skip("built without CUDA kernels")
    library = Path(ssm_kernels.__file__).parent / compile_report.LIBRARY.name
    counts = compile_report.kernels_per_operator(compile_report.kernel_names(library.read_bytes()))
    assert set(counts) == OPERATORS
    assert compile_report.over_limit(counts) == []


def test_documentation_has_the_limits():
    page = compile_report.PAGE.read_text().split(compile_report.BEGIN)[1].split(compile_report.END)[0]
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert {name: int(limit) for name, _, limit in rows if name != "all"} == compile_report.KERNEL_LIMITS
    assert all(int(count) <= int(limit) for _, count, limit in rows)
    budgets = re.findall(r"^\| (\w+) \| \d+ \| (\d+) \|  \|  \|$", page, re.MULTILINE)
    assert {name: int(budget) for name, budget in budgets} == compile_report.SECONDS
    assert all(f"| {family} | {budget} |" in page for family, budget in compile_report.FAMILY_SECONDS.items())


def test_kernels_are_counted_by_operator():
    other = KERNEL.replace("3ssd15", "11linear_scan15")
    library = b"\0".join(name.encode() for name in (KERNEL, KERNEL + "i", other, "_ZN11ssm_kernels3ssd4planEv")) + b"\0"
    counts = compile_report.kernels_per_operator(compile_report.kernel_names(library))
    assert counts == {"linear_scan": 1, "ssd": 2}


def test_undeclared_operator_and_exceeded_limit_are_errors():
    limit = compile_report.KERNEL_LIMITS["ssd"]
    assert compile_report.over_limit({"ssd": limit}) == []
    (exceeded,) = compile_report.over_limit({"ssd": limit + 1})
    assert f"ssd: {limit + 1} CUDA kernels" in exceeded
    (undeclared,) = compile_report.over_limit({"another": 1})
    assert "another: 1 CUDA kernels" in undeclared


def test_report_of_seconds(tmp_path):
    (tmp_path / "cpu_avx2").mkdir()
    line = "{}\t{}\t0\t{}\thash\n"
    header = "# ninja log v7\n"
    cuda = tmp_path / "cuda_13.0" / "ssd_fwd_f32" / "csrc" / "ssd" / "cuda" / "instantiations" / "fwd_f32.o"
    host = tmp_path / "build" / "units" / "host_1.o"
    other = tmp_path / "build" / "units" / "host_2.o"
    cpu = tmp_path / "cpu_avx2" / "build" / "units" / "kernels_1.o"
    # An object that was built twice: the last time counts.
    log = header + line.format(0, 9000, cuda) + line.format(100, 2100, cuda) + line.format(0, 1500, host)
    (tmp_path / ".ninja_log").write_text(log + line.format(1500, 4500, other))
    (tmp_path / "cpu_avx2" / ".ninja_log").write_text(header + line.format(0, 4000, cpu))
    tables = compile_report.seconds_tables(compile_report.read_objects(tmp_path), "2.11.0")
    assert f"| ssd | 2 | {compile_report.SECONDS['ssd']} |  |  |" in tables and "| kernels_1 |  |  | 4 |  |" in tables
    assert "| host_1 |  |  |  | 2 |" in tables and "| host_2 |  |  |  | 3 |" in tables
    assert f"| all | 2 | {compile_report.ALL_SECONDS} | 4 | 4 |" in tables
    assert "| `build/units/host_1.o` | 1.5 |" in tables and "| `csrc/ssd/cuda/instantiations/fwd_f32.o` | 2.0 |" in tables


def test_script_runs():
    result = subprocess.run(
        [sys.executable, "scripts/compile_report.py", "--kernels"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
