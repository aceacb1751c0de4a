"""Hooks of mkdocs that build the site from the same files as the repository shows.

* Pages outside of docs/, such as CONTRIBUTING.md, become pages of the site.
* A link to any other file of the repository leads to a page with its text; one to a folder becomes text.
* Formulas become MathML, which browsers show without a script.
* A line of docs/api/ with an asterisk becomes a line for each recurrence.
* Lists and <details> follow GitHub's rules, not Python-Markdown's.
"""

from __future__ import annotations

import html
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# Pages of the site that are files outside of docs/, by their names there.
OUTSIDE = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
LANGUAGES = {
    ".py": "python",
    ".cpp": "cpp",
    ".cu": "cpp",
    ".cuh": "cpp",
    ".h": "cpp",
    ".sh": "bash",
    ".yml": "yaml",
    "": "text",
}
IMAGES = (".png", ".svg")

_LINK = re.compile(r"(?<!\\)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
_ITEM = re.compile(r"(\d+\.|[-*]) +(?=\S)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>', re.DOTALL)


def lines_of(markdown: str) -> Iterator[tuple[str, bool]]:
    """The lines of a page, each with whether it is inside a block of code."""
    fence = ""
    for line in markdown.split("\n"):
        mark = re.match(r" *(`{3,}|~{3,})", line)
        if fence:
            yield line, True
            if mark and line.strip() == fence:
                fence = ""
        else:
            fence = mark[1] if mark else ""
            yield line, bool(mark)


def linked(markdown: str, repository_path: str) -> Iterator[str]:
    """The paths, from the repository's root, that the links of the page ``repository_path`` name."""
    for line, is_code in lines_of(markdown):
        if not is_code:
            for link in _LINK.finditer(line):
                yield posixpath.normpath(posixpath.join(posixpath.dirname(repository_path), link[1]))


def site_path(repository_path: str) -> str | None:
    """The path on the site of a file of the repository; None for a folder without a page."""
    if repository_path in OUTSIDE:
        return OUTSIDE[repository_path]
    path = ROOT / repository_path
    if path.is_dir():
        page = posixpath.join(repository_path, "README.md")
        return site_path(page) if (ROOT / page).exists() else None
    if repository_path.startswith("docs/") and path.suffix in (".md", *IMAGES):
        return repository_path.removeprefix("docs/")
    return f"source/{repository_path}.md"


def with_site_links(markdown: str, repository_path: str, src_uri: str) -> str:
    """The page with links that lead to the site's pages."""

    def replace(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(repository_path), link[1]))
        of_site = site_path(target)
        if of_site is None:
            return "](#)"
        return f"]({posixpath.relpath(of_site, posixpath.dirname(src_uri) or '.')}{link[2] or ''})"

    def replace_line(line: str) -> str:
        # A folder without a page: the link's text alone.
        return re.sub(r"\[([^\]]*)\]\(#\)", r"\1", _LINK.sub(replace, line))

    return "\n".join(line if is_code else replace_line(line) for line, is_code in lines_of(markdown))


def with_wide_indents(markdown: str) -> str:
    """The page with what belongs to an item of a list indented by four columns, as Python-Markdown wants it."""
    result, width, before, is_loose = [], 0, "", False
    for line, is_code in lines_of(markdown):
        item = None if is_code else _ITEM.match(line)
        if item:
            if before.strip() and (not width or is_loose):
                result.append("")  # an item may follow a paragraph without a blank line
            width, is_loose = len(item[0]), is_loose and bool(before.strip())
        elif line.strip() and not line.startswith(" ") and not (width and before.strip()):
            width = 0
        is_loose = bool(width) and (is_loose or not line.strip())
        indented = width and not item and line.startswith(" " * width)
        result.append(" " * max(4 - width, 0) + line if indented else line)
        before = line
    return "\n".join(result)


def api_names(line: str) -> list[str]:
    """The public names that a line of a page in docs/api/ shows. An asterisk stands for each recurrence."""
    name = line.removeprefix("::: ").strip() if line.startswith("::: ") else ""
    if "*" not in name:
        return [name] if name else []
    stub = (ROOT / "ssm_kernels" / "ops" / "recurrences.pyi").read_text()
    recurrences = list(dict.fromkeys(re.findall(r"^def (\w+)_scan\(", stub, flags=re.MULTILINE)))
    return [name.replace("*", recurrence) for recurrence in recurrences]


def with_api_names(markdown: str) -> str:
    """A page of docs/api/ with a line for each name."""
    lines = markdown.split("\n")
    return "\n".join("\n".join(f"::: {name}" for name in api_names(line)) or line for line in lines)


def with_mathml(page: str) -> str:
    """HTML with each formula as MathML."""
    from latex2mathml.converter import convert

    def replace(formula: re.Match[str]) -> str:
        tex = html.unescape(formula[2]).replace("{aligned}", "{align*}")  # the converter knows align only
        # It shows the backslash of an underscore in a text.
        tex = re.sub(r"\\text\{[^}]*\}", lambda text: text[0].replace(r"\_", "_"), tex)
        return str(convert(tex, display="block" if formula[1] == "div" else "inline"))

    return _FORMULA.sub(replace, page)


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    pages = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    pages |= {path: (ROOT / path).read_text() for path in OUTSIDE}
    for path, src_uri in OUTSIDE.items():
        files.append(File.generated(config, src_uri, content=pages[path]))
    sources = {target for path, text in pages.items() for target in linked(text, path)}
    for path in sorted(sources):
        src_uri = site_path(path)
        if src_uri is None or not src_uri.startswith("source/"):
            continue
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"a page links to {path}, which does not exist")
        language = LANGUAGES.get(Path(path).suffix, "text")
        text = (ROOT / path).read_text()
        fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
        content = f"---\nsearch:\n  exclude: true\n---\n# `{path}`\n\n{fence}{language}\n{text}\n{fence}\n"
        files.append(File.generated(config, src_uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    src_uri = page.file.src_uri
    if src_uri.startswith("source/"):
        return markdown
    repository_path = next((path for path, name in OUTSIDE.items() if name == src_uri), f"docs/{src_uri}")
    markdown = with_api_names(with_site_links(markdown, repository_path, src_uri))
    return with_wide_indents(markdown).replace("<details>", '<details markdown="1">')


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    return with_mathml(content)
