"""Compares the CUDA kernels of two builds by their instructions, not by their names: for changes that rename or move code.

    python scripts/compare_sass.py [--ignore-parameters] OLD NEW

OLD and NEW are libraries or objects (`libssm_kernels_cuda.so`, `*.o`). Needs cuobjdump from the CUDA toolkit. Exits with 1 if
any kernel of one build has no equal kernel in the other.

Kernels read their parameters from constant bank 0. `--ignore-parameters` ignores the offsets of these reads, and the low half
of their encodings, which contains the offset: for changes of the order of parameters. The high half, which contains the
width of a load and its control bits, still counts.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path

HEADER = re.compile(r"^\s*(?:arch = (?P<architecture>\w+)|Function : (?P<function>\S+))$")
INSTRUCTION = re.compile(r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>.*?);?\s*/\*")
PARAMETER = re.compile(r"c\[0x0\]\[(?P<register>U?R\d+(?:\.\w+)?\+?)?(?:0x[0-9a-f]+)?\]")
ENCODING = re.compile(r"/\* 0x[0-9a-f]{16} \*/$")


@dataclass(frozen=True)
class Kernel:
    """A function of a listing: its name and its lines, which include the encodings of instructions."""

    architecture: str
    name: str
    lines: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        """The key is equal for the same machine code of the same architecture."""
        return self.architecture, sha256("\n".join(self.lines).encode()).hexdigest()


def kernels_of(listing: Iterable[str]) -> Iterator[Kernel]:
    """Reads the functions in the output of ``cuobjdump -sass``."""
    architecture, name, lines = "", "", []
    for line in listing:
        header = HEADER.match(line)
        if header is None:
            if name and line.lstrip().startswith("/*"):
                lines.append(" ".join(line.split()))  # the widths of columns differ between files
            continue
        if name:
            yield Kernel(architecture, name, tuple(lines))
        name, lines = header["function"] or "", []
        architecture = header["architecture"] or architecture
    if name:
        yield Kernel(architecture, name, tuple(lines))


def without_parameters(kernel: Kernel) -> Kernel:
    """The kernel without the offsets of its parameters in constant bank 0."""

    def mask(line: str) -> str:
        masked, count = PARAMETER.subn(lambda match: f"c[0x0][{match['register'] or ''}parameter]", line)
        return ENCODING.sub("/* parameter */", masked) if count else line

    return replace(kernel, lines=tuple(map(mask, kernel.lines)))


def without_equal(kernels: list[Kernel], others: list[Kernel]) -> list[Kernel]:
    """Kernels without an equal among the others; each equal counts once."""
    left = Counter(kernel.key for kernel in others)
    result = []
    for kernel in kernels:
        if left[kernel.key] > 0:
            left[kernel.key] -= 1
        else:
            result.append(kernel)
    return result


def first_difference(old: Kernel, new: Kernel) -> str:
    for before, after in zip_longest(old.lines, new.lines, fillvalue=""):
        if before != after:
            instructions = (INSTRUCTION.match(line) for line in (before, after))
            texts = (match["text"].strip() if match else "(encoding or end)" for match in instructions)
            return " -> ".join(texts)
    return "none"


def report(old: list[Kernel], new: list[Kernel]) -> tuple[list[str], bool]:
    """Returns lines to print, and whether every kernel has an equal."""
    gone, come = without_equal(old, new), without_equal(new, old)
    lines = [f"{len(old)} kernels before, {len(new)} after, {len(old) - len(gone)} with the same SASS"]
    by_name = {(kernel.architecture, kernel.name): kernel for kernel in come}
    for kernel in gone:
        same_name = by_name.pop((kernel.architecture, kernel.name), None)
        if same_name is None:
            lines.append(f"only before, {kernel.architecture}: {kernel.name}, {len(kernel.lines)} lines")
        else:
            lines.append(f"differs, {kernel.architecture}: {kernel.name}: {first_difference(kernel, same_name)}")
    lines += [f"only after, {kernel.architecture}: {kernel.name}, {len(kernel.lines)} lines" for kernel in by_name.values()]
    return lines, not gone and not come


def disassemble(library: Path) -> list[Kernel]:
    cuobjdump = shutil.which("cuobjdump") or "/usr/local/cuda/bin/cuobjdump"
    result = subprocess.run([cuobjdump, "-sass", str(library)], capture_output=True, text=True, check=True)
    return list(kernels_of(result.stdout.splitlines()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ignore-parameters", action="store_true", help="ignore where parameters are in constant bank 0")
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    options = parser.parse_args(arguments)
    old, new = disassemble(options.old), disassemble(options.new)
    for path, kernels in ((options.old, old), (options.new, new)):
        if not kernels:
            parser.error(f"expected CUDA kernels in {path}, found none")
    if options.ignore_parameters:
        old, new = [*map(without_parameters, old)], [*map(without_parameters, new)]
    lines, is_same = report(old, new)
    print("\n".join(lines))
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
