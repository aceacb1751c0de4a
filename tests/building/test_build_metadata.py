"""build_metadata.py: the torch that a wheel requires, its name, and links in the description."""

from __future__ import annotations

import re
import shlex

import pytest
from build_helpers import FACTS, ROOT
from stub_build import BUILD_FILES

pytest.importorskip("setuptools", minversion="77", reason="build_metadata.py needs setuptools>=77")
import build_metadata
from ssm_kernels._build_info import check_torch
from ssm_kernels._rebuild import remedy


@pytest.mark.parametrize(
    ("version", "pin"),
    [
        ("2.15.0+cu132", "torch==2.15.*"),
        ("2.11.1", "torch==2.11.*"),
        ("2.15", "torch==2.15.*"),
        ("2.16.0.dev20261101+cpu", "torch==2.16.0.dev20261101"),
        ("2.16.0a0+gitabc", "torch==2.16.0a0"),
        ("2.16.0rc1", "torch==2.16.0rc1"),
    ],
)
def test_wheel_requires_the_minor_version_that_it_was_built_with(version, pin):
    assert build_metadata.torch_pin(version) == pin
    # The message at import has the same rule.
    assert remedy(version).endswith(f"pip install {shlex.quote(pin)}")


@pytest.mark.parametrize(
    ("torch_version", "cuda", "label", "number"),
    [
        ("2.15.0+cu132", None, "torch2.15.cpu", "215_cpu"),
        ("2.11.0", "13.0", "torch2.11.cu130", "211_cu130"),
        ("2.16.0a0+git", "12.8", "torch2.16.cu128", "216_cu128"),
    ],
)
def test_wheels_for_another_torch_or_cuda_have_other_names(torch_version, cuda, label, number):
    assert build_metadata.build_label(torch_version, cuda) == label
    assert build_metadata.build_number(torch_version, cuda) == number


def test_cache_keys_of_uv_are_what_a_build_reads():
    """Every source file and every variable that changes the wheel; not the facts that each build writes."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    keys = re.search(r"^cache-keys = \[$(.*?)^\]$", pyproject, re.MULTILINE | re.DOTALL)[1]
    files = {path for glob in re.findall(r'\{ file = "(.+?)" \}', keys) for path in ROOT.glob(glob) if path.is_file()}
    # uv compares a pattern without a slash with names in every folder, build/ included.
    assert all("/" in glob or (ROOT / glob).is_file() for glob in re.findall(r'\{ file = "(.+?)" \}', keys))
    sources = {
        *ROOT.glob("csrc/**/*.*"),
        *ROOT.glob("ssm_kernels/**/*.py"),
        *ROOT.glob("ssm_kernels/**/*.pyi"),
        *(ROOT / name for name in BUILD_FILES),
    }
    assert {path for path in sources if path.is_file()} - files == ({FACTS} if FACTS.exists() else set())
    page = (ROOT / "docs" / "installation.md").read_text()
    table = page[page.index("Read when building:") :].partition("\n## ")[0]
    assert set(re.findall(r'\{ env = "(\w+)" \}', keys)) == set(re.findall(r"^\| `(\w+)` \|", table, re.M)) - {"MAX_JOBS"}


@pytest.mark.parametrize(
    ("built", "running", "cuda", "running_cuda", "message"),
    [
        ("2.15.0+cu132", "2.15.0+cu132", None, "13.2", None),
        ("2.15.0+cu132", "2.15.1+cpu", None, None, None),
        ("2.15.0+cu132", "2.15.1+cu130", "13.0", "13.0", None),
        ("2.15.0", "2.16.0", None, None, "built with torch 2.15.0, .* is 2.16.0.*pip install 'torch==2.15.*'"),
        ("2.15.0", "2.1.5", None, None, "built with torch 2.15.0"),
        ("2.16.0a0+x", "2.16.0", None, None, "pip install torch==2.16.0a0$"),
        ("2.16.0.dev1", "2.16.0.dev2", None, None, "built with torch 2.16.0.dev1"),
        ("2.15.0+cu132", "2.15.0+cpu", "13.0", None, "CUDA 13.0, .* is a build without CUDA.*a torch with CUDA 13"),
        ("2.15.0+cu132", "2.15.0+cu128", "13.0", "12.8", "CUDA 13.0, .* is a build with CUDA 12.8"),
    ],
)
def test_torch_that_the_pin_admits_runs_the_library(built, running, cuda, running_cuda, message):
    if message is None:
        check_torch(built, running, cuda, running_cuda)
    else:
        with pytest.raises(ImportError, match=message):
            check_torch(built, running, cuda, running_cuda)


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("see [the page](docs/page.md#part) and [top](#top)", "see the page and top"),
        ("[site](https://example.org/a) <https://example.org>", "[site](https://example.org/a) <https://example.org>"),
        ('![a plot](docs/plot.png "title")', "a plot"),
        ("[![badge](docs/b.svg)](https://example.org)", "[badge](https://example.org)"),
        ("[![badge](https://example.org/b.svg)](LICENSE)", "![badge](https://example.org/b.svg)"),
        ("[`nn.Mamba`](docs/layers.md)", "`nn.Mamba`"),
        (
            "[page][1] and [home][2]\n\n[1]: docs/page.md\n[2]: https://example.org\n",
            "page and [home][2]\n\n[2]: https://example.org\n",
        ),
        ("[page] is\n\n[page]: docs/page.md", "page is\n\n"),
        ('<img src="docs/a.png" width="9"> <a href="docs/b.md">text</a>', " text"),
        ("`x[i](y)` stays, [z](w) not", "`x[i](y)` stays, z not"),
        ("```python\ny = f[0](x)\n```\n[a](b)\n", "```python\ny = f[0](x)\n```\na\n"),
        ("x[:, 0] and a[i] (see b)", "x[:, 0] and a[i] (see b)"),
    ],
)
def test_relative_links_become_text(markdown, expected):
    assert build_metadata.without_relative_links(markdown) == expected


def test_description_has_no_relative_link():
    description = build_metadata.without_relative_links((ROOT / "README.md").read_text())
    outside_code = re.sub(r"^```.*?^```|`[^`\n]+`", "", description, flags=re.MULTILINE | re.DOTALL)
    assert [target for target in re.findall(r"\]\(([^)]*)\)", outside_code) if "://" not in target] == []
    assert "# ssm_kernels" in description and "pip install" in description
