"""Compiles every CUDA source for one architecture, prints what ptxas says of each kernel, and fails if one spills registers.

Needs nvcc, found as the build finds it, but neither a GPU nor torch: the kernels' sources include no torch header. Exits with 3
if there is no nvcc. Shared memory is a matter of each launch, which ptxas does not know: tests/selective_scan_plan.cu prints
the selective scan's.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.resolve()
sys.path.insert(0, str(ROOT))

from build_backend import find_toolkit  # noqa: E402

FLAGS = ["-std=c++17", "-O3", "-lineinfo", "-Xptxas", "-v", f"-I{ROOT / 'csrc'}"]


class Kernel(NamedTuple):
    name: str
    registers: int
    stack_bytes: int
    spill_bytes: int


def compile_source(nvcc: str, source: Path, arch: str, folder: str) -> list[Kernel]:
    """Compiles one source; its kernels in the order in which ptxas reports them."""
    target = Path(folder) / (str(source.relative_to(ROOT)).replace(os.sep, "_") + ".o")
    command = [nvcc, *FLAGS, f"-gencode=arch=compute_{arch[3:]},code={arch}", "-c", str(source), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)}\n{result.stderr}")
    kernels = []
    for report in re.split(r"Compiling entry function '", result.stderr)[1:]:
        mangled = report.split("'", 1)[0]
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
        kernels.append(
            Kernel(
                name=mangled,
                registers=int(re.search(r"Used (\d+) registers", report)[1]),
                stack_bytes=int((re.search(r"(\d+) bytes stack frame", report) or [0, 0])[1]),
                spill_bytes=sum(spills),
            )
        )
    return kernels


def demangle(names: list[str]) -> list[str]:
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool is None or not names:
        return names
    output = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [re.sub(r"ssm_kernels::|\(.*\)$|\bvoid ", "", line) for line in output.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_90a", help="real architecture to compile for (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at once (default: %(default)s)")
    arguments = parser.parse_args()
    toolkit = find_toolkit(sys.path)
    if toolkit is None:
        print("no nvcc was found: nothing was checked")
        sys.exit(3)

    nvcc = str(toolkit.home / "bin" / "nvcc")
    sources = sorted((ROOT / "csrc").rglob("*.cu"))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        reports = list(pool.map(lambda source: compile_source(nvcc, source, arguments.arch, folder), sources))
    spilling = 0
    print(f"{'registers':>9} {'stack B':>7} {'spill B':>7}  kernel ({arguments.arch})")
    for source, kernels in zip(sources, reports, strict=True):
        print(source.relative_to(ROOT))
        for kernel, name in zip(kernels, demangle([kernel.name for kernel in kernels]), strict=True):
            spilling += kernel.spill_bytes > 0
            print(f"{kernel.registers:9} {kernel.stack_bytes:7} {kernel.spill_bytes:7}  {name}")
    total = sum(map(len, reports))
    print(f"{total} kernels in {len(sources)} files, {spilling} with spills")
    if not total or spilling:
        sys.exit(1)


if __name__ == "__main__":
    main()
