"""The pages of the documentation: their links, mkdocs.yml's list of them, and how the site changes them."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ssm_kernels

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import site_hooks  # noqa: E402

PAGES = [*site_hooks.OUTSIDE, *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = [
        line.lstrip("# ") for line, is_code in site_hooks.lines_of(page.read_text()) if line.startswith("#") and not is_code
    ]
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_links_lead_to_files_and_headings_of_the_repository():
    checked = 0
    for name in PAGES:
        page = ROOT / name
        for line, is_code in site_hooks.lines_of(page.read_text()):
            links = [] if is_code else re.findall(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]+))?\)", line)
            for path, anchor in links:
                target = (page.parent / path).resolve() if path else page
                assert target.exists(), (name, path)
                assert ROOT in target.parents, (name, path)
                if anchor:
                    assert anchor in anchors(target), (name, path, anchor)
                checked += 1
    assert checked > 100


def test_every_page_has_a_place_on_the_site_and_in_the_index():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"[\w/]+\.md", navigation)
    assert len(listed) == len(set(listed))
    assert {*listed} == {site_hooks.site_path(name) for name in PAGES}
    index = (ROOT / "docs" / "README.md").read_text()
    linked = set(site_hooks.linked(index, "docs/README.md"))
    # The index leads to the folders' own lists of pages.
    of_folders = ("docs/api/", "docs/benchmarks/", "docs/tuning/")
    expected = {name for name in PAGES if not name.startswith(of_folders)} - {"docs/README.md"}
    assert linked == expected | {folder + "README.md" for folder in of_folders}
    for folder in of_folders:
        of_folder = set(site_hooks.linked((ROOT / folder / "README.md").read_text(), folder + "README.md"))
        assert {name for name in PAGES if name.startswith(folder)} <= of_folder | {folder + "README.md"}


def test_links_of_the_site():
    def of_page(markdown: str) -> str:
        return site_hooks.with_site_links(markdown, "docs/api/nn.md", "api/nn.md")

    assert of_page("[a](../layers.md#cost), [b](../../README.md)") == "[a](../layers.md#cost), [b](../overview.md)"
    assert of_page("[a](../../examples/training.py)") == "[a](../source/examples/training.py.md)"
    assert of_page("[a](../benchmarks), `b` [tests](../../tests)") == "[a](../benchmarks/README.md), `b` tests"
    assert of_page("![a](../figures/char_lm.png) [b](https://x.org/a.md) [c](#d)") == (
        "![a](../figures/char_lm.png) [b](https://x.org/a.md) [c](#d)"
    )
    assert of_page("```\n[a](../../README.md)\n```") == "```\n[a](../../README.md)\n```"


def test_lists_of_the_site():
    page = "Text\n1. one\n   two\n\n   ```python\n   x\n   ```\n2. c\n\n* a\n  b\n* c\n\nEnd\n   kept"
    wide = "Text\n\n1. one\n    two\n\n    ```python\n    x\n    ```\n\n2. c\n\n* a\n    b\n* c\n\nEnd\n   kept"
    assert site_hooks.with_wide_indents(page) == wide


def public_names() -> set[str]:
    """The public names of the package and of its public modules, those of compat's and integrations' modules included."""
    modules = ["", "nn", "models", "distributed", "compat", "reference", "choices"]
    modules += [f"integrations.{module}" for module in ssm_kernels.integrations.__all__]
    modules += [
        f"compat.{name}"
        for name in dir(ssm_kernels.compat)
        if not name.startswith("_") and isinstance(getattr(ssm_kernels.compat, name), ModuleType)
    ]
    names = set()
    for module in modules:
        name = f"ssm_kernels.{module}".rstrip(".")
        names |= {f"{name}.{member}" for member in importlib.import_module(name).__all__ if not member.startswith("__")}
    return names - {f"ssm_kernels.{module}" for module in ("nn", "models", "reference", "choices")}


def names_on(page: Path) -> list[str]:
    """As the page has them, patterns included."""
    return [line.partition(" ")[2] for line in page.read_text().splitlines() if line.startswith("::: ")]


def test_api_reference_has_every_public_name():
    folder = ROOT / "docs" / "api"
    index = (folder / "README.md").read_text()
    listed = []
    for page in sorted(folder.glob("*.md")):
        names = names_on(page)
        listed += [each for name in names for each in site_hooks.api_names(f"::: {name}")]
        # The index has the same names in the same order.
        short = [
            re.sub(r"^ssm_kernels\.((nn|models|distributed|compat|reference|integrations|choices)\.)?", "", name)
            for name in names
        ]
        assert not names or f"]({page.name}) | {', '.join(f'`{name}`' for name in short)} |" in index, page.name
    assert len(listed) == len(set(listed))
    assert set(listed) == public_names(), "a public name needs a ::: line in docs/api and its place in docs/api/README.md"


def test_docstrings_of_the_site():
    pytest.importorskip("griffe", reason="the extra [docs]")
    as_markdown = importlib.import_module("site_docstrings").as_markdown
    formula = "    .. math::\n        a &= 1 \\\\\n        b &= 2\n\n"
    docstring = f":func:`linear_scan`, :class:`~.common.Mixer`, see ``docs/ssd.md``: :math:`a_t`\n\n{formula}End"
    assert as_markdown(docstring, "ssm_kernels.ops.recurrences.mingru_scan") == (
        "[`linear_scan`][ssm_kernels.linear_scan], `Mixer`, see [docs/ssd.md](../ssd.md): $a_t$\n\n"
        "    $$\n    \\begin{aligned}a &= 1 \\\\\n    b &= 2\\end{aligned}\n    $$\n\nEnd"
    )
    assert as_markdown("A.\n\n.. math:: a_t = 1\n\nReturns:\n    b: c.\n\nRaises:\n    D: e.", "") == (
        "A.\n\n$$\na_t = 1\n$$\n\n**Returns:**\n\nb: c.\n\nRaises:\n    D: e."
    )
    # The name of the same module comes first, then the package's.
    for path, target in (
        ("ssm_kernels.distributed.functions.mingru_scan", "ssm_kernels.distributed.linear_scan"),
        ("ssm_kernels.reference.recurrences.mingru_scan", "ssm_kernels.reference.linear_scan"),
        ("ssm_kernels.nn.minrnn.MinGRU", "ssm_kernels.linear_scan"),
    ):
        assert as_markdown(":func:`linear_scan`", path) == f"[`linear_scan`][{target}]"
    assert as_markdown(":func:`ssm_kernels.linear_scan`", path) == "[`ssm_kernels.linear_scan`][ssm_kernels.linear_scan]"
    assert as_markdown(":class:`torch.nn.GRU`, :meth:`step`", path) == "`torch.nn.GRU`, `step`"


def test_citation_has_the_version_of_the_package():
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)[1]
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.*)$", citation, flags=re.MULTILINE)[1] == version
    # A license in pyproject.toml and one in the citation.
    assert re.search(r"^license: (.*)$", citation, flags=re.MULTILINE)[1] == "Apache-2.0"
