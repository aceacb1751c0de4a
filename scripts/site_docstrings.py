"""Griffe extension for the site: what docstrings write for Sphinx becomes Markdown.

References such as :func:`linear_scan` become code, formulas (``.. math::`` and :math:) go between dollar signs, and names of
pages such as ``docs/cuda.md`` become links.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

# A name after a tilde is shown without the modules before it.
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|exc|data):(`+)(?:~[\w.]*\.(?=\w))?\.?([\w.]+)\1")
_INLINE_FORMULA = re.compile(r":math:`([^`]+)`")
_FORMULA = re.compile(r"^( *)\.\. math::\n+((?:\1 +.*\n?|\n)+)", re.MULTILINE)
_PAGE = re.compile(r"(`{1,2})docs/([\w/]+)\.md\1")


def _displayed(formula: re.Match[str]) -> str:
    lines = textwrap.dedent(formula[2]).strip()
    if "&" in lines:
        lines = f"\\begin{{aligned}}{lines}\\end{{aligned}}"
    return textwrap.indent(f"$$\n{lines}\n$$\n\n", formula[1])


def as_markdown(docstring: str) -> str:
    """The docstring for a page in docs/api/."""
    docstring = _FORMULA.sub(_displayed, docstring)
    docstring = _INLINE_FORMULA.sub(r"$\1$", docstring)
    docstring = _ROLE.sub(r"`\2`", docstring)
    return _PAGE.sub(r"[docs/\2.md](../\2.md)", docstring)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
