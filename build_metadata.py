"""Metadata of the wheels that setup.py builds: their torch, tag, name and description, and the facts that
``ssm_kernels.build_info`` reads.

The sources declare a lower bound of torch. The library loads under one minor version, so a wheel requires that one: pip caches
a wheel under the address of its sources alone, and installs it later into an environment with another torch.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from setuptools import Distribution
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
FACTS = "_build_facts.py"
# Commands of setup.py that write the metadata of a wheel; those of a source distribution keep the lower bound.
WHEEL_COMMANDS = {"bdist_wheel", "dist_info", "editable_wheel"}
# The package cannot be imported before it is built.
torch_pin = runpy.run_path(str(ROOT / "ssm_kernels" / "_torch_versions.py"))["torch_pin"]

LINK = re.compile(
    r"""
    (?P<code>^(?P<fence>```+|~~~+).*?^(?P=fence)|`[^`\n]+`)             # code stays
    | !?\[(?P<text>(?:[^\[\]]|!?\[[^\[\]]*\](?:\([^()\s]*\))?)*)\]      # [text], with an image or a bracket in it
      \((?P<target>[^()\s]*)(?:\s+"[^"]*")?\)
    | (?P<definition>^\[[^\]]+\]:[ ]*(?P<defined>\S+)[^\n]*\n?)         # [name]: target
    | <img\b[^>]*?\bsrc="(?P<image>[^"]*)"[^>]*>
    | <a\b[^>]*?\bhref="(?P<anchor>[^"]*)"[^>]*>(?P<anchored>.*?)</a>
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)


def source_version() -> str:
    return re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


def kernel_abi() -> int:
    """The number of the boundary between ``_ops`` and the kernel libraries: kKernelLibraryAbi of C++."""
    common = ROOT / "csrc" / "common"
    number = int(re.search(r"\bkKernelAbi = (\d+);", (common / "kernel_abi.h").read_text())[1])
    rows = "".join((common / f"{table}.h").read_text() for table in ("discretization", "recurrences"))
    hashed = 2166136261  # FNV-1a
    for letter in "".join(f"{name} " for name in re.findall(r'\bROW\(\w+, "(\w+)", \w+\)', rows)).encode():
        hashed = (hashed ^ letter) * 16777619 % 2**32
    return number << 20 | hashed & 0xFFFFF


def build_kind(torch_version: str, cuda: str | None) -> tuple[str, str]:
    """The minor version of torch, and ``cpu`` or ``cu130``: they tell apart two wheels of the same version."""
    return re.match(r"\d+\.\d+", torch_version)[0], f"cu{cuda.replace('.', '')}" if cuda else "cpu"


def build_label(torch_version: str, cuda: str | None) -> str:
    """The local label of a wheel's version: ``torch2.15.cpu`` or ``torch2.15.cu130``."""
    return "torch{}.{}".format(*build_kind(torch_version, cuda))


def build_number(torch_version: str, cuda: str | None) -> str:
    """The build tag of a wheel's file name, which begins with a digit: ``215_cpu`` or ``215_cu130``."""
    minor, kind = build_kind(torch_version, cuda)
    return f"{minor.replace('.', '')}_{kind}"


def without_relative_links(markdown: str) -> str:
    """Replaces links and images that have no address of their own by their text: a package index does not have the files."""

    def replace(match: re.Match) -> str:
        if match["code"] is not None:
            return match[0]
        if match["definition"] is not None:
            return match[0] if ":" in match["defined"] else ""
        target = next(match[name] for name in ("target", "image", "anchor") if match[name] is not None)
        text = without_relative_links(match["text"] or match["anchored"] or "")
        if ":" not in target:
            return text
        return match[0] if match["text"] is None else f"{match[0].partition('[')[0]}[{text}]({match['target']})"

    links = LINK.sub(replace, markdown)
    defined = set(re.findall(r"^\[([^\]]+)\]:", links, re.MULTILINE))
    dropped = set(re.findall(r"^\[([^\]]+)\]:", markdown, re.MULTILINE)) - defined
    for name in dropped:
        links = re.sub(rf"!?\[([^\[\]]+)\]\[{re.escape(name)}\]|\[({re.escape(name)})\](?:\[\])?", r"\1\2", links)
    return links


def write_facts(folder: Path, facts: dict[str, object]) -> None:
    """Writes the module of build facts. It loads under any torch, so that versions are compared before the library loads."""
    lines = ['"""Facts about the build; setup.py writes this module with the library."""\n\n']
    lines += [f"{name} = {value!r}\n" for name, value in facts.items()]
    (folder / FACTS).write_text("".join(lines))


def distribution_class(torch_version: str | None, cuda: str | None) -> type[Distribution]:
    """The ``distclass`` of ``setup``.

    pyproject.toml keeps the version and the dependencies static all the same: uv reads them before it builds, to choose torch.

    Args:
        torch_version: the torch that a wheel is built for; None for metadata of the sources.
        cuda: the CUDA version that the kernels are compiled with; None without CUDA kernels.
    """
    # pip compares the version of a source distribution's file name with that of its wheel.
    is_source_distribution = (ROOT / "PKG-INFO").exists()

    class Wheel(bdist_wheel):
        def finalize_options(self):
            if torch_version and is_source_distribution:
                self.build_number = self.build_number or build_number(torch_version, cuda)
            super().finalize_options()

        def get_tag(self):
            # One wheel for every Python: the library has no Python symbol.
            return "py3", "none", super().get_tag()[2]

    class Modules(build_py):
        def find_package_modules(self, package, package_dir):
            # The facts of a build in place are neither sources nor those of this build.
            found = super().find_package_modules(package, package_dir)
            return [module for module in found if Path(module[2]).name != FACTS]

    class BuiltDistribution(Distribution):
        def parse_config_files(self, *arguments, **keywords):
            super().parse_config_files(*arguments, **keywords)
            self.cmdclass.update(bdist_wheel=Wheel, build_py=Modules)
            self.metadata.long_description = without_relative_links((ROOT / "README.md").read_text())
            if torch_version is None:
                return
            if not is_source_distribution:
                self.metadata.version = f"{self.metadata.version}+{build_label(torch_version, cuda)}"
            others = [requirement for requirement in self.install_requires if not re.match(r"torch\b(?!-)", requirement)]
            self.install_requires = [torch_pin(torch_version), *others]
            self._finalize_requires()

    return BuiltDistribution
