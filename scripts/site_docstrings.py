"""Griffe extension for the site: what docstrings write for Sphinx becomes Markdown.

References such as :func:`linear_scan` become links where docs/api has the name, and code elsewhere. Formulas (``.. math::`` and
:math:) go between dollar signs, and names of pages such as ``docs/cuda.md`` become links.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))

from site_hooks import api_names

PAGES = Path(__file__).resolve().parents[1] / "docs" / "api"
NAMES = {name for page in PAGES.glob("*.md") for line in page.read_text().splitlines() for name in api_names(line)}

# A name after a tilde is shown without the modules before it.
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|exc|data):(`+)(?:~[\w.]*\.(?=\w))?\.?([\w.]+)\1")
_INLINE_FORMULA = re.compile(r":math:`([^`]+)`")
_FORMULA = re.compile(r"^( *)\.\. math::(.*\n+(?:\1 +.*\n?|\n)*)", re.MULTILINE)
# The parser would take a result's description up to its first colon for a type.
_RETURNS = re.compile(r"^( *)Returns:\n((?:\1 +.*(?:\n|$)|\n)+)", re.MULTILINE)
_PAGE = re.compile(r"(`{1,2})docs/([\w/]+)\.md\1")


def _displayed(formula: re.Match[str]) -> str:
    lines = textwrap.dedent(formula[2]).strip()
    if "&" in lines:
        lines = f"\\begin{{aligned}}{lines}\\end{{aligned}}"
    return textwrap.indent(f"$$\n{lines}\n$$\n\n", formula[1])


def _dedented(text: str, indent: str) -> str:
    return textwrap.indent(textwrap.dedent(text).strip(), indent)


def _target(name: str, path: str) -> str | None:
    """The name in docs/api that a docstring of the object ``path`` means by ``name``."""
    if name in NAMES:
        return name
    modules = [".".join(path.split(".")[:2])]
    modules += ["ssm_kernels", "ssm_kernels.nn", "ssm_kernels.models", ".".join(path.split(".")[:3])]
    return next((f"{module}.{name}" for module in modules if f"{module}.{name}" in NAMES), None)


def as_markdown(docstring: str, path: str) -> str:
    """The docstring of the object ``path`` for a page in docs/api/."""

    def reference(role: re.Match[str]) -> str:
        target = _target(role[2], path)
        return f"`{role[2]}`" if target is None else f"[`{role[2]}`][{target}]"

    docstring = _RETURNS.sub(lambda section: f"{section[1]}**Returns:**\n\n{_dedented(section[2], section[1])}\n\n", docstring)
    docstring = _FORMULA.sub(_displayed, docstring)
    docstring = _INLINE_FORMULA.sub(r"$\1$", docstring)
    docstring = _ROLE.sub(reference, docstring)
    return _PAGE.sub(r"[docs/\2.md](../\2.md)", docstring)


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for each in module.modules.values():
        if not each.is_alias:
            yield from _modules(each)


class Docstrings(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Exports the functions that loops make. Griffe reads them from stubs, and leaves them out of star imports."""
        made = [member for module in _modules(pkg) for member in module.members.values() if not member.runtime]
        for path in NAMES:
            package, _, name = path.rpartition(".")
            if package == pkg.path or package.startswith(f"{pkg.path}."):
                parent = pkg if package == pkg.path else pkg[package[len(pkg.path) + 1 :]]
                found = [each for each in made if each.name == name and each.path.startswith(f"{package}.")]
                if found and name not in parent.members:
                    parent.set_member(name, griffe.Alias(name, found[0], parent=parent))

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value, obj.path)
