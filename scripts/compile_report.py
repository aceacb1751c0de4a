"""Prints the cost of a clean build: seconds per object, from ninja's log, and CUDA kernels per operator, from the library.

    rm -rf build && python setup.py build_ext --inplace
    python scripts/compile_report.py
    python scripts/compile_report.py --write      # into docs/installation.md, between its markers

Seconds are wall time of one compiler while one runs per core: measure on an idle machine. An object from a compiler cache has
the time of the copy.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent.resolve()
LIBRARY = ROOT / "ssm_kernels" / "libssm_kernels_cuda.so"  # absent in a build without CUDA kernels
KERNELS = ROOT / "build" / "kernels"
PAGE = ROOT / "docs" / "installation.md"
BEGIN, END = "<!-- compile report: begin -->", "<!-- compile report: end -->"

# Limits on the number of CUDA kernels of an operator, for one architecture. The whole build is the second longest step of
# .ci/run. A new operator declares its number here. Before you raise a number, measure whether a branch at run time costs
# anything.
KERNEL_LIMITS = {
    "causal_conv1d": 71,
    "cuda": 11,
    "delta_rule": 101,
    "delta_rule_step": 21,
    "linear_scan": 198,
    "mamba3": 30,
    "mixers": 4,
    "mlstm": 73,
    "norm": 72,
    "selective_scan": 172,
    "selective_state_update": 186,
    "ssd": 261,
}
# The seconds that an operator's CUDA objects may take to compile, for one architecture, on the machine of docs/installation.md.
# Reports print them beside the seconds that they find; only the numbers of kernels can fail a run, because seconds depend on
# the machine and its load. FAMILY_SECONDS are the shares of operators that come next. ALL_SECONDS binds too: an operator that
# takes its whole share may have to wait until another one takes less.
SECONDS = {
    "causal_conv1d": 60,
    "cuda": 10,
    "delta_rule": 105,
    "delta_rule_step": 25,
    "linear_scan": 120,
    "mamba3": 60,
    "mixers": 10,
    "mlstm": 40,
    "norm": 70,
    "selective_scan": 340,
    "selective_state_update": 70,
    "ssd": 250,
}
FAMILY_SECONDS = {
    "two-sample, complex and dense rules of the selective scan": 130,
    "Mamba-3": 70,
    "LSTM, GRU and sLSTM": 130,
}
ALL_SECONDS = 1250


def kernel_names(library: bytes) -> set[str]:
    """The mangled names of the CUDA kernels that a library registers with the CUDA runtime."""
    return {name.decode() for name in re.findall(rb"_ZN11ssm_kernels\w+_kernel[IE]\w+(?=\0)", library)}


def operator_of(kernel: str) -> str:
    """The operator of a kernel: its namespace inside ssm_kernels, or for cuda::chunked that of its template arguments."""
    spaces = [kernel[at.end() : at.end() + int(at[1])] for at in re.finditer(r"(?:_ZN11ssm_kernels|NS_)(\d+)", kernel)]
    assert spaces, kernel
    if kernel.startswith("_ZN11ssm_kernels4cuda7chunked"):
        return next(space for space in spaces if space != "cuda")
    return spaces[0]


def kernels_per_operator(names: set[str]) -> dict[str, int]:
    return dict(sorted(Counter(map(operator_of, names)).items()))


def over_limit(counts: dict[str, int]) -> list[str]:
    """A message for each operator with more kernels than it declares."""
    return [
        f"{operator}: {count} CUDA kernels, but scripts/compile_report.py allows {KERNEL_LIMITS.get(operator, 0)}"
        for operator, count in counts.items()
        if count > KERNEL_LIMITS.get(operator, 0)
    ]


def read_objects(build: Path) -> dict[str, float]:
    """Seconds by object, from all ninja logs under a build folder; the last entry of a repeated object."""
    objects = {}
    for log in sorted(build.rglob(".ninja_log")):
        for line in log.read_text().splitlines():
            if line.startswith("#"):
                continue
            start, end, _, output, _ = line.split("\t")
            objects[os.path.relpath(output, build)] = (int(end) - int(start)) / 1000
    return objects


def part_of(name: str) -> tuple[str, str]:
    """(operator, kind) of an object: cuda, cpu (kernels, once per instruction set) or host.

    The host's files and the CPU kernels are compiled as units, build/units/*.cpp, each of which includes the files of several
    operators: their operator is the unit.
    """
    path = re.split(r"csrc/|units/", name, maxsplit=1)[1]
    kind = "cpu" if name.startswith("cpu_") else "cuda" if "/instantiations/" in name else "host"
    return path.split("/", 1)[0].removesuffix(".o"), kind


def first_line(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine() -> str:
    models = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    processor = models[0] if models else platform.machine()
    compiler = first_line(os.environ.get("CXX", "c++").split()[-1], "--version").splitlines()[:1]
    nvcc = re.search(r"release ([\d.]+)", first_line(os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin/nvcc", "--version"))
    parts = [f"{processor}, {len(os.sched_getaffinity(0))} cores", *compiler, *([f"nvcc {nvcc[1]}"] if nvcc else [])]
    return "; ".join(parts)


def kernel_table(counts: dict[str, int]) -> str:
    lines = ["| operator | CUDA kernels | limit |", "|---|---:|---:|"]
    lines += [f"| {operator} | {count} | {KERNEL_LIMITS.get(operator, 0)} |" for operator, count in counts.items()]
    lines.append(f"| all | {sum(counts.values())} | {sum(KERNEL_LIMITS.values())} |")
    return "\n".join(lines)


def seconds_tables(objects: dict[str, float], torch_version: str) -> str:
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, time in objects.items():
        operator, kind = part_of(name)
        seconds[operator][kind] += time
        seconds["all"][kind] += time
    kinds = ("cuda", "cpu", "host")
    lines = [
        f"Seconds of one compiler, summed over objects ({machine()}, torch {torch_version}):",
        "",
        "| operator or unit | CUDA objects | budget | CPU kernels | other C++ |",
        "|---|---:|---:|---:|---:|",
    ]
    for operator in [*sorted(seconds.keys() - {"all"}), "all"]:
        times = seconds[operator]
        cuda, *others = (f"{times[kind]:.0f}" if kind in times else "" for kind in kinds)
        budget = ALL_SECONDS if operator == "all" else SECONDS.get(operator, "")
        lines.append(f"| {operator} | {cuda} | {budget} | {' | '.join(others)} |")
    lines += ["", "Budgets of families that come next, in the same seconds:", "", "| family | budget |", "|---|---:|"]
    lines += [f"| {family} | {budget} |" for family, budget in FAMILY_SECONDS.items()]
    lines += ["", "<details><summary>Seconds per object</summary>", "", "| object | seconds |", "|---|---:|"]
    # Without the folder that each object has for its ninja file; that of a CPU kernel names the instruction set.
    lines += [
        f"| `{re.sub('^(cuda_[^/]+|cpu_common|host)/[^/]+/', '', name)}` | {time:.1f} |"
        for name, time in sorted(objects.items(), key=lambda item: -item[1])
    ]
    lines += ["", "</details>"]
    return "\n".join(lines)


def write(page: str, text: str) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("build", nargs="?", type=Path, help="a folder of the host's objects in build/; by default the last")
    parser.add_argument("--kernels", action="store_true", help="kernels only, no seconds")
    parser.add_argument("--write", action="store_true", help=f"write the tables into {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    counts = kernels_per_operator(kernel_names(LIBRARY.read_bytes())) if LIBRARY.exists() else {}
    tables = [kernel_table(counts)] if counts else []
    if not arguments.kernels:
        logs = sorted((ROOT / "build").glob("*-*/**/.ninja_log"), key=lambda log: log.stat().st_mtime)
        if arguments.build is None and not logs:
            sys.exit("expected ninja's log in a folder of build/, found none: build first")
        build = (arguments.build or ROOT / "build" / logs[-1].relative_to(ROOT / "build").parts[0]).resolve()
        objects = read_objects(KERNELS) | read_objects(build)
        tables.append(seconds_tables(objects, build.name.split("-")[0]))
    text = "\n\n".join(tables)
    print(text)
    if arguments.write:
        PAGE.write_text(write(PAGE.read_text(), text))
    if wrong := over_limit(counts):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
